"""Models, whole or in part, that this node has fetched from others: sparse files in a bounded folder.

    FOLDER/ID/manifest   what the bytes are, by hash
             layout      sizes and headers of the files
             about.json  the model's name, for people
             model*.gguf the files, sparse, with all tensors at the source's own offsets
             present     which pieces are there (node/transfer/bitmap.py)
             user-*      one for each that uses the model, locked by it
             lock        held shared by whoever uses the model, exclusively by who removes it

A piece is verified before it is written, and counts as present only when it is on the disk and the new bitmap has
replaced the old one. So a process that is killed loses at most what it had not committed, and several processes may
fetch into one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from node.errors import ModelError
from node.files import locked, replace_file, sync
from node.models.index import ModelIndex, read_model
from node.models.layout import Layout, write_layout
from node.models.manifest import MANIFEST_BYTES_MAX, Manifest, identified
from node.models.pieces import pieces, trunk_numbers
from node.transfer.stored import StoredModel, StoreFull, disk_error, read_present

_ID = re.compile(r"[0-9a-f]{32}")
# Prefixes of the temporary folders in which models are made and removed; no id begins so.
_NEW, _GONE = "new-", "gone-"
# With no limit set the whole store may take all but this share of the disk.
_DISK_LEFT_SHARE = 0.1


@dataclass(frozen=True)
class StoredInfo:
    """A model of the store, for lists. ``disk_bytes``: what it takes; ``present_bytes``: its verified pieces."""

    model_id: str
    name: str
    total_bytes: int
    present_bytes: int
    disk_bytes: int
    used_s: float
    in_use: bool
    has_trunk: bool

    @property
    def is_whole(self) -> bool:
        """Whether every piece is there."""
        return self.present_bytes == self.total_bytes


class ModelStore:
    """The store in ``folder``, which is made when it is needed. ``limit_bytes`` 0: all but a tenth of the disk."""

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes

    def models(self) -> list[StoredInfo]:
        """The models that are there, the last used first. Blocks."""
        found = []
        for model_id in self._ids():
            with contextlib.suppress(ModelError, OSError):
                if (info := self._info(model_id)) is not None:
                    found.append(info)
        return sorted(found, key=lambda info: -info.used_s)

    def open(self, model_id: str) -> StoredModel | None:
        """A model, in use from now on; None if it is not there. Blocks. Raises ModelError when it is damaged."""
        if not _ID.fullmatch(model_id) or model_id not in self._ids():
            return None
        folder = self.folder / model_id
        lock = _use(folder / "lock")
        if lock is None:
            return None
        try:
            manifest = _read_manifest(folder, model_id)
            index = identified(_read_index(folder), manifest)
            stored = StoredModel(folder, lock, manifest, index, _read_name(folder))
            os.utime(folder / "lock")
        except OSError as error:
            os.close(lock)
            raise ModelError(f"the stored model {folder} cannot be read: {error}; remove the folder") from error
        except BaseException:
            os.close(lock)
            raise
        return stored

    def create(self, manifest: Manifest, layout: Layout, name: str) -> StoredModel:
        """Adds a model without any pieces, and opens it; opens it as it is if it is there. Blocks.

        Raises ModelError when the layout is not one of the manifest's model, StoreFull.
        """
        found = self.open(manifest.model_id)
        if found is not None:
            return found
        new = self.folder / f"{_NEW}{secrets.token_hex(8)}"
        try:
            new.mkdir(parents=True)
            try:
                write_layout(layout, new)
                index = _read_index(new)
                manifest.check(index)
                if len(index.paths) != len(layout.files):
                    raise ModelError(
                        f"model {manifest.model_id} has {len(index.paths)} files, its layout {len(layout.files)}"
                    )
                replace_file(new / "manifest", manifest.to_bytes())
                replace_file(new / "about.json", json.dumps({"name": name[:63]}).encode())
                replace_file(new / "lock", b"")
                for file in layout.file_names():
                    sync(new / file)
                sync(new)
                with locked(self.folder / "lock"), contextlib.suppress(FileExistsError, OSError):
                    # Fails when another process was faster, whose folder is as good.
                    new.rename(self.folder / manifest.model_id)
                sync(self.folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        except OSError as error:
            raise disk_error(error, new, sum(len(file.header) for file in layout.files)) from error
        found = self.open(manifest.model_id)
        if found is None:
            raise ModelError(f"model {manifest.model_id} was removed from {self.folder} while it was made")
        return found

    def limit_bytes(self) -> int:
        """What the store may take on the disk, by setting or by the disk's size."""
        if self._limit_bytes > 0:
            return self._limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        usage = shutil.disk_usage(self.folder)
        return max(0, self.used_bytes() + usage.free - int(usage.total * _DISK_LEFT_SHARE))

    def used_bytes(self) -> int:
        """What the store takes on the disk. Blocks."""
        return _disk_bytes(self.folder) if self.folder.exists() else 0

    def make_room(self, needed_bytes: int) -> None:
        """Removes models that nobody uses, the least recently used first, until there is space. Blocks.

        Raises StoreFull.
        """
        self.prune(self.limit_bytes() - needed_bytes)
        left = self.limit_bytes() - self.used_bytes()
        free = shutil.disk_usage(self.folder).free if self.folder.exists() else left
        if min(left, free) < needed_bytes:
            raise StoreFull(
                f"{self.folder} has no space for {needed_bytes} bytes of a model: {max(0, min(left, free))} are left. "
                f"Free some, raise [model] cache_gib, or name another folder with SWARM_CACHE_DIR"
            )

    def prune(self, target_bytes: int, only: str | None = None) -> list[StoredInfo]:
        """Removes unused models, the least recently used first, until at most ``target_bytes`` are taken. Blocks.

        ``only``: the one model to remove. Returns what was removed.
        """
        removed: list[StoredInfo] = []
        if not self.folder.exists():
            return removed
        with locked(self.folder / "lock"):
            self._sweep()
            used = self.used_bytes()
            for info in reversed(self.models()):
                if used <= target_bytes:
                    break
                if (only is None or info.model_id == only) and self._remove(info.model_id):
                    removed.append(info)
                    used -= info.disk_bytes
        return removed

    def _remove(self, model_id: str) -> bool:
        folder = self.folder / model_id
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under another name at once: from now on nobody finds it, however long removing it takes.
            gone = self.folder / f"{_GONE}{secrets.token_hex(8)}"
            folder.rename(gone)
        except OSError:
            return False
        finally:
            os.close(lock)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def _sweep(self) -> None:
        """Removes what killed processes left behind. The store's lock is held, so nobody is renaming."""
        for folder in self.folder.glob(f"{_GONE}*"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.folder.glob(f"{_NEW}*"):
            # Made in a second; an hour is for a disk in trouble.
            with contextlib.suppress(OSError):
                if _now_s(self.folder) - folder.stat().st_mtime > 3600:
                    shutil.rmtree(folder, ignore_errors=True)

    def _ids(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.folder) if _ID.fullmatch(entry.name))
        except OSError:
            return []

    def _info(self, model_id: str) -> StoredInfo | None:
        folder = self.folder / model_id
        in_use = _in_use(folder / "lock")
        with contextlib.ExitStack() as stack:
            lock = _use(folder / "lock")
            if lock is None:
                return None
            stack.callback(os.close, lock)
            manifest, index = _read_manifest(folder, model_id), _read_index(folder)
            manifest.check(index)
            all_pieces = pieces(index)
            present = read_present(folder, len(all_pieces))
            return StoredInfo(
                model_id,
                _read_name(folder),
                sum(piece.bytes for piece in all_pieces),
                sum(all_pieces[number].bytes for number in present),
                _disk_bytes(folder),
                (folder / "lock").stat().st_mtime,
                in_use,
                not present.missing(trunk_numbers(all_pieces)),
            )


def _read_manifest(folder: Path, model_id: str) -> Manifest:
    with (folder / "manifest").open("rb") as file:
        manifest = Manifest.from_bytes(file.read(MANIFEST_BYTES_MAX + 1))
    if manifest.model_id != model_id:
        raise ModelError(f"{folder} holds the manifest of another model, {manifest.model_id}; remove the folder")
    return manifest


def _read_index(folder: Path) -> ModelIndex:
    # Names that Layout.file_names() gives.
    first = min(folder.glob("model*.gguf"), default=None)
    if first is None:
        raise ModelError(f"{folder} has no model files; remove the folder")
    return read_model(first)


def _read_name(folder: Path) -> str:
    try:
        name = json.loads((folder / "about.json").read_bytes()[:4096])["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
    return name[:63] if isinstance(name, str) and name else folder.name


def _use(path: Path) -> int | None:
    """A shared lock on the file of that path; None when it is not there, or being removed."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Who holds it exclusively looks whether it is in use, or is renaming the folder: both take no time.
        fcntl.flock(lock, fcntl.LOCK_SH)
        # Removed between the two lines above: then the path is another file, or none.
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _in_use(path: Path) -> bool:
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(lock)
    return False


def _now_s(folder: Path) -> float:
    """The time as the folder's file system has it: clocks of network file systems differ from ours."""
    probe = folder / "lock"
    probe.touch()
    return probe.stat().st_mtime


def _disk_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(root) / name).lstat().st_blocks * 512
    return total
