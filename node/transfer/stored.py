"""One model of the store, in use: which pieces are there, and how more of them come to be there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from node.errors import ModelError
from node.files import locked, punch_hole, replace_file
from node.models.index import ModelIndex
from node.models.manifest import Manifest
from node.models.pieces import Piece, pieces
from node.transfer.bitmap import PieceBitmap

log = logging.getLogger(__name__)

# pwritev takes 1,024 buffers at most on Linux and macOS.
_BUFFERS_MAX = 512
# The prefix of files that say who uses a model, each locked by its user.
_USER = "user-"


class PieceWrong(ModelError):
    """The bytes of a piece are not what the manifest says."""


class StoreFull(ModelError):
    """There is no space for what shall be stored. The message names the path and the bytes."""


class StoredModel:
    """One model of the store, in use until ``close``. Its methods block, and several threads may write at once."""

    def __init__(self, folder: Path, lock: int, manifest: Manifest, index: ModelIndex, name: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.index = index
        self.name = name
        self.pieces: tuple[Piece, ...] = pieces(index)
        self._lock = lock
        self._written: set[int] = set()  # verified and written, but perhaps not on the disk
        self._mutex = threading.Lock()
        # How many threads are within write() and commit(): a descriptor that is closed below them may be another file's
        # by then.
        self._idle = threading.Condition(self._mutex)
        self._n_working = 0
        self._files: dict[str, int] = {}
        self._user = folder / f"{_USER}{secrets.token_hex(8)}"
        with locked(folder / "present.lock"):
            # This comes before the list is read: from now on nobody else drops pieces of it.
            self._user_lock = os.open(self._user, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._user_lock, fcntl.LOCK_EX)
            self._present = read_present(folder, len(self.pieces))

    @property
    def model_id(self) -> str:
        """The model's id, which follows from its bytes."""
        return self.manifest.model_id

    @property
    def present(self) -> PieceBitmap:
        """The pieces that are verified and on the disk."""
        with self._mutex:
            return self._present.copy()

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """The ones of ``numbers`` that are not present."""
        with self._mutex:
            return self._present.missing(numbers)

    def write(self, number: int, chunks: Sequence[bytes | bytearray | memoryview]) -> None:
        """Verifies the bytes of a piece and writes them; ``commit`` makes it present. Blocks.

        Raises PieceWrong, StoreFull, ModelError.
        """
        piece = self.pieces[number]
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        if sum(map(len, chunks)) != piece.bytes or digest.digest() != self.manifest.sha256[number]:
            raise PieceWrong(f"piece {number} of model {self.model_id} is not what its manifest says")
        views = _Views(chunks)
        with self._working():
            for part in piece.parts(self.index):
                self._write_part(part.path, part.offset, views.take(part.bytes), piece.bytes)
            with self._mutex:
                self._written.add(number)

    def commit(self) -> None:
        """Makes what was written so far present: on the disk first, then in the bitmap. Blocks.

        Raises StoreFull, ModelError.
        """
        with self._working():
            with self._mutex:
                written = set(self._written)
                descriptors = list(self._files.values())
            if not written:
                return
            try:
                for descriptor in descriptors:
                    os.fsync(descriptor)
                with locked(self.folder / "present.lock"):
                    # Another process, or thread, may have added pieces of its own.
                    present = read_present(self.folder, len(self.pieces))
                    present.add(written)
                    replace_file(self.folder / "present", present.to_bytes())
            except OSError as error:
                raise disk_error(error, self.folder, sum(self.pieces[n].bytes for n in written)) from error
            with self._mutex:
                self._present.add(present)
                self._written -= written
            log.debug("model %s: %d more pieces are on the disk", self.model_id, len(written))

    def drop(self, numbers: Iterable[int]) -> int:
        """Gives the disk space of pieces back, if nobody else uses the model. Returns their bytes, else 0. Blocks.

        Raises ModelError.
        """
        with self._working():
            try:
                with locked(self.folder / "present.lock"):
                    if not self._is_only_user():
                        return 0
                    present = read_present(self.folder, len(self.pieces))
                    dropped = [number for number in dict.fromkeys(numbers) if number in present]
                    present.remove(dropped)
                    # Whatever happens from here on, no piece is listed that is not there.
                    replace_file(self.folder / "present", present.to_bytes())
                    with self._mutex:
                        self._present.remove(dropped)
                    for number in dropped:
                        for part in self.pieces[number].parts(self.index):
                            punch_hole(self._file(part.path), part.offset, part.bytes)
            except OSError as error:
                raise disk_error(error, self.folder, 0) from error
        return sum(self.pieces[number].bytes for number in dropped)

    def _is_only_user(self) -> bool:
        """Whether nobody else uses the model. The lock of the list is held, so nobody comes meanwhile.

        Also removes what users left that were killed.
        """
        for path in self.folder.glob(f"{_USER}*"):
            if path == self._user:
                continue
            try:
                lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                return False
            finally:
                os.close(lock)
        return True

    def close(self) -> None:
        """Ends the use, once no thread is at work. What was not committed is lost."""
        with self._mutex:
            self._idle.wait_for(lambda: self._n_working == 0)
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
            if self._lock >= 0:
                self._user.unlink(missing_ok=True)
                os.close(self._user_lock)
                os.close(self._lock)
                self._lock = -1

    def __enter__(self) -> StoredModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._mutex:
            if self._lock < 0:
                raise ModelError(f"model {self.model_id} is no longer in use")
            self._n_working += 1
        try:
            yield
        finally:
            with self._mutex:
                self._n_working -= 1
                self._idle.notify_all()

    def _write_part(self, path: str, offset: int, views: list[memoryview], piece_bytes: int) -> None:
        descriptor = self._file(path)
        try:
            while views:
                written = os.pwritev(descriptor, views[:_BUFFERS_MAX], offset)
                offset += written
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if written:
                    views[0] = views[0][written:]
        except OSError as error:
            raise disk_error(error, Path(path), piece_bytes) from error

    def _file(self, path: str) -> int:
        with self._mutex:
            descriptor = self._files.get(path)
            if descriptor is None:
                try:
                    descriptor = self._files[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    raise ModelError(f"{path} cannot be written: {error.strerror or error}") from error
            return descriptor


class _Views:
    """Cuts a sequence of buffers into runs of given lengths, without copies."""

    def __init__(self, chunks: Sequence[bytes | bytearray | memoryview]) -> None:
        self._chunks = [memoryview(chunk) for chunk in reversed(chunks) if len(chunk)]

    def take(self, count: int) -> list[memoryview]:
        taken = []
        while count:
            chunk = self._chunks.pop()
            if len(chunk) > count:
                self._chunks.append(chunk[count:])
                chunk = chunk[:count]
            taken.append(chunk)
            count -= len(chunk)
        return taken


def read_present(folder: Path, count: int) -> PieceBitmap:
    """The pieces that a model's folder says are there; none if it says nothing that can be read."""
    try:
        return PieceBitmap.from_bytes((folder / "present").read_bytes(), count)
    except FileNotFoundError:
        return PieceBitmap(count)
    except ModelError as error:
        log.warning("%s: %s; its pieces are fetched again", folder, error)
        return PieceBitmap(count)


def disk_error(error: OSError, path: Path, needed_bytes: int) -> ModelError:
    """The error for the user where ``needed_bytes`` could not be written below ``path``: StoreFull on a full disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFull(
            f"{path} cannot take {needed_bytes} bytes more: {error.strerror}. Free some space, or name another folder "
            f"with SWARM_CACHE_DIR"
        )
    return ModelError(f"{path} cannot be written: {error.strerror or error}")
