"""Who this node is, across restarts: an id made once, a counter of its starts, the highest router term it has used.

Identity is never an address. It lives in a state folder of the node's own, which a lock keeps to one agent at a time:

    lock                    locked while an agent runs; holds its process id, for the message to a second one
    identity.json           {"version": 1, "node_id": 16 hex digits, "boot": N, "term": N, "check": …}
    identity.backup.json    the same, written after it

Each file is replaced as a whole and durably, so only a fault of the disk, or an editor, damages one; then the other is
used. Boot counter and term never go down: without a readable file they go on from the time of day in seconds, which is
above any number of starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from node.errors import IdentityError
from node.files import replace_file

_VERSION: Final = 1
_FILES: Final = ("identity.json", "identity.backup.json")
_FILE_BYTES_MAX: Final = 4096
_COUNTER_MAX: Final = (1 << 63) - 1


def state_root(configured: str, environ: Mapping[str, str], *, system: str = sys.platform) -> Path:
    """The folder that holds the nodes' state folders: `configured` ([node] state_folder), else the platform's place."""
    if configured:
        return Path(configured)
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "swarm-node"
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    if system == "darwin":
        return home / "Library" / "Application Support" / "swarm-node"
    return home / ".local" / "state" / "swarm-node"


@dataclass(frozen=True)
class _State:
    node_id: str
    boot: int
    term: int

    def to_bytes(self) -> bytes:
        fields = {"version": _VERSION, "node_id": self.node_id, "boot": self.boot, "term": self.term}
        return json.dumps({**fields, "check": self._check()}).encode() + b"\n"

    def _check(self) -> str:
        return hashlib.sha256(f"{self.node_id} {self.boot} {self.term}".encode()).hexdigest()[:16]

    @staticmethod
    def from_bytes(data: bytes) -> _State | None:
        """None if `data` is damaged. Raises IdentityError when a newer version of the program wrote it."""
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        version, node_id, boot, term = (fields.get(key) for key in ("version", "node_id", "boot", "term"))
        if type(version) is int and version > _VERSION:
            raise IdentityError(
                f"a newer swarm-node wrote it (version {version}; this one knows {_VERSION}): update this one"
            )
        if type(node_id) is not str or not re.fullmatch(r"[0-9a-f]{16}", node_id):
            return None
        if (
            type(boot) is not int
            or type(term) is not int
            or not (1 <= boot < _COUNTER_MAX and 0 <= term < _COUNTER_MAX)
        ):
            return None
        state = _State(node_id, boot, term)
        return state if fields.get("check") == state._check() else None


class Identity:
    """The identity of a running node. Made by `hold_identity`; `warnings` are for the user."""

    def __init__(self, folder: Path, name: str, state: _State, warnings: tuple[str, ...]) -> None:
        self.folder = folder
        self.name = name
        self.warnings = warnings
        self._state = state

    @property
    def node_id(self) -> str:
        """16 hex digits, random, the same for the life of the state folder."""
        return self._state.node_id

    @property
    def boot(self) -> int:
        """The number of this start: higher than that of every start before."""
        return self._state.boot

    @property
    def term(self) -> int:
        """The highest router term that was saved; 0 at first."""
        return self._state.term

    def save_term(self, term: int) -> None:
        """Keeps `term` on disk before it is used. Raises ValueError if it is lower than the last, IdentityError."""
        if not self._state.term <= term < _COUNTER_MAX:
            raise ValueError(f"term {term} after {self._state.term}")
        if term > self._state.term:
            state = replace(self._state, term=term)
            _save(self.folder, state)
            self._state = state


@contextlib.contextmanager
def hold_identity(root: Path, name: str) -> Iterator[Identity]:
    """The identity of the node `name`, its state folder locked for as long as the body runs; the boot counter rises.

    `name` is as `[node] name` must be. Raises IdentityError when another agent holds the folder, or when it cannot be
    used.
    """
    folder = root / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise IdentityError(f"the state folder {folder} cannot be used: {error.strerror}. {_ELSEWHERE}") from error
    try:
        _lock(lock, folder, name)
        state, warnings = _next_state(folder)
        _save(folder, state)
        yield Identity(folder, name, state, warnings)
    finally:
        # The file stays: another agent may be about to lock it. Closing it is what ends the lock.
        os.close(lock)


_ELSEWHERE: Final = "Another folder: --node-state-folder PATH"


def _lock(lock: int, folder: Path, name: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        of_process = f" (process {process})" if process.isdecimal() else ""
        raise IdentityError(
            f"a node named {name} runs on this machine already{of_process}, with the state folder {folder}. "
            f"A second node needs a name of its own: --name {name}-2"
        ) from None
    except OSError as error:
        raise IdentityError(f"the state folder {folder} cannot be locked: {error.strerror}. {_ELSEWHERE}") from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _next_state(folder: Path) -> tuple[_State, tuple[str, ...]]:
    """The state of the start that is being made, and warnings."""
    found: list[_State] = []
    damaged: list[Path] = []
    for path in (folder / file for file in _FILES):
        try:
            with path.open("rb") as file:
                state = _State.from_bytes(file.read(_FILE_BYTES_MAX))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise IdentityError(f"{path} cannot be read: {error.strerror}. {_ELSEWHERE}") from error
        except IdentityError as error:
            raise IdentityError(f"{path}: {error.message}") from None
        if state is None:
            damaged.append(path)
        else:
            found.append(state)
    names = " and ".join(str(path) for path in damaged)
    if found:
        # The second file is one start behind if the machine went down between the two.
        last = max(found, key=lambda state: (state.boot, state.term))
        warnings = (f"{names} was damaged and is repaired from its copy",) if damaged else ()
        return replace(last, boot=last.boot + 1), warnings
    if not damaged:
        return _State(secrets.token_hex(8), 1, 0), ()
    now = max(1, int(time.time()))
    state = _State(secrets.token_hex(8), now, now)
    return state, (f"{names} cannot be read any more: this node has a new id, {state.node_id}",)


def _save(folder: Path, state: _State) -> None:
    try:
        for file in _FILES:
            replace_file(folder / file, state.to_bytes(), mode=0o600)
    except OSError as error:
        raise IdentityError(f"the state folder {folder} cannot be written: {error.strerror}. {_ELSEWHERE}") from error
