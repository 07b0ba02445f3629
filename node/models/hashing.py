"""The manifest of a model whose files are on this machine: computed once, and kept in the cache folder.

Kept under the files' paths, sizes, times of change and inodes: a file that changed is hashed again, one that did not is
recognised without being read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kernels.cpu_quota import default_threads
from node.errors import ModelError
from node.files import new_file
from node.models.index import ModelIndex, TensorPart, read_model
from node.models.manifest import MANIFEST_BYTES_MAX, Manifest
from node.models.pieces import Piece, pieces
from node.paths import cache_dir

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Stamp = tuple[tuple[str, int, int, int, int], ...]

# Two read a solid-state disk at full speed; more would take the processor from a node that serves.
_WORKERS_MAX = 2
_READ_BYTES = 4 << 20
# So many manifests are kept, half a megabyte each for a large model.
_KEPT_MAX = 64
_SEAL_BYTES = 32


class HashingStopped(Exception):
    """`stop` was set while a model was hashed."""


def local_manifest(
    index: ModelIndex,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    folder: Path | None = None,
) -> Manifest:
    """The manifest of the files of `index`: from the cache, in `folder` or the cache folder, or computed. Blocks.

    `progress` is called with (bytes done, bytes in all), from any thread. Setting `stop` makes this raise
    HashingStopped. Raises ModelError when a file cannot be read, or changes meanwhile.
    """
    cached = cached_manifest(index, folder)
    if cached is not None:
        return cached
    stamp = file_stamp(index)
    _let_clock_pass(stamp)
    # The caller's index may be older than the files.
    current = read_model(index.paths[0])
    if current.header_digest != index.header_digest or current.tensors != index.tensors:
        raise _changed(index)
    manifest = _compute(index, stamp, progress or (lambda done, total: None), stop or threading.Event())
    if file_stamp(index) != stamp:
        raise _changed(index)
    try:
        _keep(_cache_path(stamp, folder), stamp, manifest)
    except OSError as error:
        log.warning("the digests of %s are not kept, and will be computed again: %s", index.paths[0], error)
    return manifest


def cached_manifest(index: ModelIndex, folder: Path | None = None) -> Manifest | None:
    """The manifest of the files of `index` as they are now, if it is in the cache. Reads no weights."""
    stamp = file_stamp(index)
    try:
        with _cache_path(stamp, folder).open("rb") as file:
            data = file.read(_SEAL_BYTES + MANIFEST_BYTES_MAX + 1)
    except OSError:
        return None
    seal, body = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if seal != _seal(stamp, body):
        return None
    try:
        manifest = Manifest.from_bytes(body)
        manifest.check(index)
    except ModelError as error:
        log.info("the kept digests of %s are of no use: %s", index.paths[0], error)
        return None
    return manifest


def file_stamp(index: ModelIndex) -> Stamp:
    """(absolute path, bytes, time of change in ns, inode, device) of each file: what is compared to see a change.

    Raises ModelError when a file is gone.
    """
    stamp = []
    for name in index.paths:
        try:
            status = Path(name).stat()
        except OSError as error:
            raise ModelError(f"model file {name} cannot be read: {error.strerror or error}") from error
        path = str(Path(name).absolute())
        stamp.append((path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev))
    return tuple(stamp)


def _changed(index: ModelIndex) -> ModelError:
    return ModelError(
        f"model file {index.paths[0]} changed while it was read; is it still being written? Start again then"
    )


def _let_clock_pass(stamp: Stamp) -> None:
    """Waits until a change from now on gives another time of change.

    File systems count in steps, and a change in the same step as the last one would not be seen.
    """
    newest_ns = max(changed_ns for _, _, changed_ns, _, _ in stamp)
    # FAT and old network file systems have whole seconds, in steps of two; others count at least in hundredths.
    step_s = 2.0 if newest_ns % 1_000_000_000 == 0 else 0.02
    age_s = time.time() - newest_ns / 1e9
    if 0 <= age_s < step_s:
        time.sleep(step_s - age_s)


def _compute(index: ModelIndex, stamp: Stamp, progress: Progress, stop: threading.Event) -> Manifest:
    all_pieces = pieces(index)
    total = sum(piece.bytes for piece in all_pieces)
    work = _Work(index, stamp, progress, stop, total)
    digests = [b""] * len(all_pieces)
    with ThreadPoolExecutor(min(_WORKERS_MAX, default_threads()), thread_name_prefix="hash") as pool:
        pending = [pool.submit(work.hash_group, group) for group in _groups(index, all_pieces)]
        try:
            for done in as_completed(pending):
                for number, digest in done.result():
                    digests[number] = digest
        except BaseException:
            work.abandoned.set()
            for future in pending:
                future.cancel()
            raise
    return Manifest(index.header_digest, tuple(digests))


def _groups(index: ModelIndex, all_pieces: tuple[Piece, ...]) -> list[list[Piece]]:
    """The pieces that are read together, those of a trunk tensor or of a layer's experts, in the order of the files."""
    groups: dict[tuple[str, int], list[Piece]] = {}
    for piece in all_pieces:
        groups.setdefault(piece.key[:2], []).append(piece)

    def place(group: list[Piece]) -> tuple[int, int]:
        first = group[0].parts(index)[0]
        return index.paths.index(first.path), first.offset

    return sorted(groups.values(), key=place)


class _Work:
    """Hashes groups of pieces, in several threads."""

    def __init__(
        self, index: ModelIndex, stamp: Stamp, progress: Progress, stop: threading.Event, total_bytes: int
    ) -> None:
        self.abandoned = threading.Event()  # because another group failed
        self._index = index
        self._stamp = stamp
        self._progress = progress
        self._stop = stop
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    def hash_group(self, group: list[Piece]) -> list[tuple[int, bytes]]:
        """The number and the SHA-256 of each piece of a group, read tensor by tensor and not expert by expert."""
        # A file that is still being written is not to be read to its end, again and again.
        if file_stamp(self._index) != self._stamp:
            raise _changed(self._index)
        hashes = [hashlib.sha256() for _ in group]
        parts = [piece.parts(self._index) for piece in group]
        buffer = memoryview(bytearray(min(_READ_BYTES, max(piece.bytes for piece in group))))
        with contextlib.ExitStack() as stack:
            files: dict[str, int] = {}
            for position in range(len(parts[0])):
                for digest, of_piece in zip(hashes, parts, strict=True):
                    part = of_piece[position]
                    if part.path not in files:
                        files[part.path] = _open(part.path)
                        stack.callback(os.close, files[part.path])
                    for data in _read(files[part.path], part, buffer):
                        digest.update(data)
                        self._count(len(data))
        return [(piece.number, digest.digest()) for piece, digest in zip(group, hashes, strict=True)]

    def _count(self, n_bytes: int) -> None:
        if self._stop.is_set() or self.abandoned.is_set():
            raise HashingStopped
        with self._lock:
            self._done_bytes += n_bytes
            self._progress(self._done_bytes, self._total_bytes)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from error


def _read(file: int, part: TensorPart, buffer: memoryview) -> Iterator[memoryview]:
    offset, left = part.offset, part.bytes
    while left:
        try:
            count = os.preadv(file, [buffer[: min(left, len(buffer))]], offset)
        except OSError as error:
            raise ModelError(
                f"model file {part.path} cannot be read at byte {offset}: {error.strerror or error}"
            ) from error
        if count == 0:
            raise ModelError(f"model file {part.path} became shorter while it was read; is it still being written?")
        yield buffer[:count]
        offset += count
        left -= count


def _cache_path(stamp: Stamp, folder: Path | None) -> Path:
    name = hashlib.sha256(_stamp_bytes(stamp)).hexdigest()[:32]
    return (folder or cache_dir() / "manifests") / f"{name}.manifest"


def _stamp_bytes(stamp: Stamp) -> bytes:
    return json.dumps(stamp, ensure_ascii=True).encode()


def _seal(stamp: Stamp, body: bytes) -> bytes:
    """What stands before a kept manifest's bytes and says that they are whole, and of these files."""
    return hashlib.sha256(_stamp_bytes(stamp) + b"\n" + body).digest()


def _keep(path: Path, stamp: Stamp, manifest: Manifest) -> None:
    body = manifest.to_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.write(_seal(stamp, body) + body)
    kept = sorted(path.parent.glob("*.manifest"), key=lambda one: one.stat().st_mtime_ns, reverse=True)
    for old in kept[_KEPT_MAX:]:
        old.unlink(missing_ok=True)
