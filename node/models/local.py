"""Model files that this node can read: the configured one, and those in its model folders.

A peer names a model by what is in it, never by a path. Which file that is, this node finds out by itself: nothing from
the network becomes one.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from node.errors import ModelError
from node.models.demo import demo_model
from node.models.index import ModelIndex, read_model
from node.paths import cache_dir

log = logging.getLogger(__name__)

# Headers are read in milliseconds; a folder with more files than this is not a model folder.
FILES_MAX = 200

_Stamp = tuple[int, int]


@dataclass
class LocalModels:
    """This node's models by header.

    ``configured`` is a file, a folder, ``demo``, a name of the swarm's catalogue, or empty. A file or ``demo`` is the
    model to serve, and so is a file of a folder that has the name.
    """

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
            if self.catalogue_name():
                named = self.named(f"{path.name}.gguf")
                return named[0] if named else None
            raise ModelError(
                f"model file {path} does not exist; --model takes a GGUF file, a folder of them, demo, or the name or "
                f"id of a model that another node has (`swarm-node model list`)"
            )
        return read_model(path)

    def catalogue_name(self) -> str:
        """The name or id of a model that this node was told to take from others; empty if it was told none.

        What is no path here, and does not look like one of a file, is one.
        """
        if self.configured in ("", "demo"):
            return ""
        path = Path(self.configured).expanduser()
        return "" if path.suffix == ".gguf" or path.exists() else path.name

    def with_header(self, header: str) -> list[ModelIndex]:
        """The models among this node's files whose header's digest begins with `header`, 32 hex digits."""
        return [index for index in self._all() if index.header_digest[:32] == header]

    def named(self, file: str) -> list[ModelIndex]:
        """The models among this node's files whose (first) file has that name."""
        return [index for index in self._all() if Path(index.paths[0]).name == file]

    def _all(self) -> list[ModelIndex]:
        served = None if self.catalogue_name() else self.served()
        found = ([] if served is None else [served]) + self._scan()
        return list({index.paths: index for index in found}.values())  # each part of a split set gives the same model

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
