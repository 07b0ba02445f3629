"""The logs that a node keeps on disk, for the report of a node that has died: its own, and those of its children.

They lie in the folder ``logs`` of the node's state folder, each with at most about LOG_BYTES_MAX and as much before
that in a file with ``.1`` after its name. A child writes to its file by itself, so that its last words are there
whatever became of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO, Final

from node.files import replace_file

log = logging.getLogger(__name__)

#: A day of an ordinary node, or the last minutes of one that logs everything.
LOG_BYTES_MAX: Final = 1 << 20
AGENT_LOG, EXPERTS_LOG, ROUTER_LOG = "agent.log", "experts.log", "router.log"
_FOLDER: Final = "logs"
_PREVIOUS: Final = ".1"
# So that a child that logs a megabyte a second is bounded as well.
_LOOK_S: Final = 5.0
#: How a file begins that has a process's log from its start on.
START_MARK: Final = b"# started "
#: A line that stands in a log from where on its process serves clients.
READY_MARK: Final = b"# ready\n"


def log_folder(state_folder: Path, *, make: bool = True) -> Path:
    """The folder of a node's logs, made if it is not there and can be made: no log is worth a node."""
    folder = state_folder / _FOLDER
    if make:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("the folder of logs %s cannot be made: %s", folder, error.strerror)
    return folder


def parts_of(path: Path) -> tuple[Path, Path]:
    """The two files of a log, the older one first."""
    return path.with_name(path.name + _PREVIOUS), path


class AgentLogHandler(RotatingFileHandler):
    """Writes this process's log into a bounded file, and gives up quietly where the disk is full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8", errors="backslashreplace")
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Says once that the log cannot be written; the log on stderr goes on."""
        if not self._failed:
            self._failed = True
            with contextlib.suppress(OSError, ValueError):  # it would write what it holds
                self.close()
            logging.getLogger().removeHandler(self)
            log.warning("%s cannot be written any more", self.baseFilename, exc_info=True)


def open_log(path: Path) -> BinaryIO:
    """The log of a process that is about to start, to be appended to; where that cannot be, what swallows everything.

    Blocks.
    """
    try:
        return path.open("ab")
    except OSError as error:
        log.warning("no log is kept in %s: %s", path, error.strerror)
        return Path(os.devnull).open("ab")


def begin_log(path: Path) -> None:
    """Begins a new file for the log of a process that is about to start; what was there becomes the older file. Blocks.

    Where it cannot, the process adds to the file there is.
    """
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size > 0:
            path.replace(parts_of(path)[0])
        path.write_bytes(START_MARK + time.strftime("%Y-%m-%d %H:%M:%S").encode() + b"\n")


def mark_ready(path: Path) -> None:
    """Says in a log that from here on its process serves clients: what it writes may hold what they ask. Blocks."""
    with contextlib.suppress(OSError), path.open("ab") as file:
        file.write(READY_MARK)


def bound_log(path: Path) -> None:
    """Moves the end of a log that has grown too long into the older file, and empties it. Blocks. Raises OSError.

    The process that writes it appends, so it goes on at the beginning; what it writes in the moment between is lost.
    """
    size = path.stat().st_size
    if size <= LOG_BYTES_MAX:
        return
    with path.open("rb") as file:
        file.seek(size - LOG_BYTES_MAX)
        end = file.read(LOG_BYTES_MAX)
    replace_file(parts_of(path)[0], end[end.find(b"\n") + 1 :])
    os.truncate(path, 0)


async def keep_bounded(paths: Sequence[Path]) -> None:
    """Bounds the logs of child processes until cancelled."""
    while True:
        for path in paths:
            with contextlib.suppress(OSError):  # not there yet, or a full disk, of which others complain
                await asyncio.to_thread(bound_log, path)
        await asyncio.sleep(_LOOK_S)
