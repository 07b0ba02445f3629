"""Files on disk: there whole or not at all, kept to one user at a time, and parts of them given back to the system.

Everything here blocks, and raises OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Names may have 255 bytes: so many characters leave room for what makes a name temporary, even of four bytes each.
_STEM_CHARACTERS = 48


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be written, which takes the place of ``path`` once it is on the disk, readable by everybody.

    Nothing is left of it if the body raises. Several processes may do this at once: each writes a file of its own,
    called ``STEM-….part``, and the last one's stays. One that is killed leaves that file.
    """
    prefix = path.stem[:_STEM_CHARACTERS] + "-"
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".part", dir=path.parent)
    with _put_in_place(os.fdopen(descriptor, "wb"), Path(name), path) as file:
        yield file
        os.fchmod(file.fileno(), 0o644)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replaces a file: whenever the machine stops it has the old content or ``data``, and ``data`` once this returns.

    For files with one writer at a time. A killed one leaves ``NAME.new``, which the next one writes over. ``mode``: the
    permissions, as for `os.open`.
    """
    new = path.with_name(path.name + ".new")
    with _put_in_place(open(new, "wb", opener=lambda name, flags: os.open(name, flags, mode)), new, path) as file:
        file.write(data)


@contextlib.contextmanager
def _put_in_place(file: BinaryIO, unfinished: Path, path: Path) -> Iterator[BinaryIO]:
    """Moves a file that the body wrote to ``path`` once it is on the disk; removes it if the body raises."""
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps others that lock the same file waiting, in this process and in others, while the body runs."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PUNCH_HOLE = 0x01 | 0x02


def punch_hole(descriptor: int, offset: int, count: int) -> None:
    """Frees ``count`` bytes from ``offset`` on; the file keeps its size. Raises OSError where there are no holes."""
    if not sys.platform.startswith("linux"):
        raise OSError("parts of a file cannot be freed on this system")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate64(descriptor, _PUNCH_HOLE, offset, count) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
