"""Model files that this node can read: the configured one, and those in its model folders.

A peer names a model by its id only. Which file that is, this node finds out by itself: nothing from the network
becomes a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from node.demo_model import demo_model
from node.errors import ModelError
from node.model_index import ModelIndex, read_model
from node.paths import cache_dir

log = logging.getLogger(__name__)

# Headers are read in milliseconds; a folder with more files than this is not a model folder.
FILES_MAX = 200

_Stamp = tuple[int, int]


@dataclass
class LocalModels:
    """Models by id. ``configured`` is a file, a folder, ``demo``, or empty; a file or ``demo`` is the model to serve."""

    configured: str
    folders: tuple[Path, ...] = ()
    _seen: dict[Path, tuple[_Stamp, ModelIndex | None]] = field(default_factory=dict)

    def served(self) -> ModelIndex | None:
        """The model this node was told to serve, None if it was told none. Raises ModelError."""
        if not self.configured:
            return None
        if self.configured == "demo":
            return read_model(demo_model())
        path = Path(self.configured).expanduser()
        if path.is_dir():
            return None
        if not path.exists():
            raise ModelError(f"model file {path} does not exist; --model takes a GGUF file, a folder of them, or demo")
        return read_model(path)

    def find(self, model_id: str) -> ModelIndex | None:
        """The model of that id among the files of this node; None if there is none."""
        served = self.served()
        if served is not None and served.model_id == model_id:
            return served
        for index in self._scan():
            if index.model_id == model_id:
                return index
        return None

    def _scan(self) -> list[ModelIndex]:
        found = []
        for path in self._files():
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                known = self._seen.get(path)
                if known is None or known[0] != stamp:
                    known = (stamp, _read(path))
                    self._seen[path] = known
                if known[1] is not None:
                    found.append(known[1])
            except OSError as error:
                log.warning("model file %s cannot be read: %s", path, error)
        return found

    def folders_searched(self) -> list[Path]:
        """Where model files are looked for."""
        configured = Path(self.configured).expanduser() if self.configured not in ("", "demo") else None
        folders = [configured] if configured is not None and configured.is_dir() else []
        if configured is not None and configured.is_file():
            folders.append(configured.parent)
        with contextlib.suppress(OSError):  # the current folder may have been removed
            folders += [Path.cwd(), Path.cwd() / "models"]
        return list(dict.fromkeys([*folders, *self.folders, Path.home() / "models", cache_dir()]))

    def _files(self) -> list[Path]:
        files: list[Path] = []
        for folder in self.folders_searched():
            if folder.is_dir():
                files += sorted(folder.glob("*.gguf"))
        return list(dict.fromkeys(path.resolve() for path in files))[:FILES_MAX]


def _read(path: Path) -> ModelIndex | None:
    try:
        return read_model(path)
    except ModelError as error:
        log.info("%s is no model for a swarm: %s", path, error)
        return None


async def find_model(models: LocalModels, model_id: str) -> ModelIndex | None:
    """:meth:`LocalModels.find` off the event loop."""
    return await asyncio.to_thread(models.find, model_id)
