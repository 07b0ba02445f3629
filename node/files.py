"""Files on disk: there whole or not at all, and parts of them given back to the file system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be written, which takes the place of ``path`` once it is on the disk; nothing is left of it if the body raises.

    Blocks. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=path.stem + "-", suffix=".part", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.chmod(0o644)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PUNCH_HOLE = 0x01 | 0x02


def punch_hole(descriptor: int, offset: int, count: int) -> None:
    """Frees ``count`` bytes from ``offset`` on; the file keeps its size. Raises OSError, also where the system cannot do it."""
    if not sys.platform.startswith("linux"):
        raise OSError("parts of a file cannot be freed on this system")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate64(descriptor, _PUNCH_HOLE, offset, count) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
