"""The channel between this process and the Swarm backend in its llama-server (docs/protocol.md, "Router control").

The backend connects to a Unix socket. Routing tables, holds and requests for traces go to it; what it uses, what it
could not compute and its statistics come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import kernels
from node.router.failure import ExpertFailure, RouterEngineError, TableNotUsed
from node.router.table import RoutingTable

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
# A statistics line of 1,000 nodes and 128 layers is some 200 KB.
_LINE_BYTES_MAX = 16 << 20
_SHORT_LINE_BYTES = 256 << 10
# A backend that answers none must not make them pile up.
_UNANSWERED_MAX = 64
#: What a hold may last, as the backend bounds it.
HOLD_MS_MAX = 2000
# sun_path holds 104 bytes on macOS, 108 on Linux.
_SOCKET_PATH_BYTES_MAX = 103


class SentTable:
    """A table on its way to the backend. ``problem``: its answer, empty when it is in use."""

    def __init__(self, table_id: int, table: RoutingTable) -> None:
        self.id = table_id
        self.table = table
        self.problem: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Control:
    """This process's end of the channel to the Swarm backend: tables, holds and requests go out, failures come in."""

    def __init__(self, table: RoutingTable, on_failure: Callable[[ExpertFailure], None] | None) -> None:
        # Those that the backend has not answered, oldest first.
        self._sent: deque[SentTable] = deque([SentTable(1, table)])
        self._last_sent = self._sent[-1]
        self.in_use: RoutingTable | None = None
        self.table_problem = ""
        self._on_failure = on_failure
        self._writers: set[asyncio.StreamWriter] = set()
        # Enough to explain the requests of a busy minute; older ones are in the log.
        self.failures: deque[ExpertFailure] = deque(maxlen=256)
        self.statistics: dict[str, Any] = {}
        self._trace_turn = asyncio.Lock()
        self._trace_id = 0
        self._trace: asyncio.Future[dict[str, Any]] | None = None
        self.connected = asyncio.Event()
        #: Why the backend cannot be used at all; empty if it can.
        self.problem = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Path]:
        """Listens on a Unix socket as long as the body; its path."""
        folder = _socket_folder()
        try:
            path = folder / "control"
            async with await asyncio.start_unix_server(self._serve, path=path, limit=_LINE_BYTES_MAX):
                yield path
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def set_table(self, table: RoutingTable) -> SentTable:
        """Sends a table, and keeps it for whoever connects later. Does not wait for the answer."""
        self._last_sent = SentTable(self._last_sent.id + 1, table)
        self._sent.append(self._last_sent)
        if len(self._sent) > _UNANSWERED_MAX:
            self._sent.popleft().problem.set_result("the Swarm backend answers no routing table")
        for writer in self._writers:
            self._send_table(writer)
        return self._last_sent

    def _send_table(self, writer: asyncio.StreamWriter) -> None:
        table = json.loads(self._last_sent.table.to_json())
        writer.write(_line({"type": "table", "id": self._last_sent.id, "table": table}))

    async def use_table(self, table: RoutingTable, timeout_s: float) -> None:
        """Sends a table and waits until the backend uses it, or one that was set after it. Raises TableNotUsed."""
        sent = self.set_table(table)
        try:
            problem = await asyncio.wait_for(asyncio.shield(sent.problem), timeout_s)
        except TimeoutError:
            problem = f"the Swarm backend has not answered routing table {table.sequence} within {timeout_s:g} s"
        if problem:
            raise TableNotUsed(problem)

    def hold(self, ms: int) -> None:
        """Lets the backend begin no layer within the next ``ms``; 0 ends that. Raises ValueError above HOLD_MS_MAX."""
        if not 0 <= ms <= HOLD_MS_MAX:
            raise ValueError(f"a hold of {ms} ms is not one of 0 to {HOLD_MS_MAX}")
        for writer in self._writers:
            writer.write(_line({"type": "hold", "ms": ms}))

    async def trace(self, timeout_s: float) -> dict[str, Any]:
        """The backend's trace since its start (docs/protocol.md, "Trace"), one at a time. Raises RouterEngineError."""
        try:
            async with asyncio.timeout(timeout_s), self._trace_turn:
                if not self._writers:
                    raise RouterEngineError("llama-server gives no trace: its Swarm backend is not connected")
                self._trace_id += 1
                self._trace = asyncio.get_running_loop().create_future()
                for writer in self._writers:
                    writer.write(_line({"type": "trace", "id": self._trace_id}))
                return await self._trace
        except TimeoutError:
            raise RouterEngineError(f"llama-server gave no trace within {timeout_s:g} s") from None

    def _trace_answer(self, message: dict[str, Any]) -> None:
        if self._trace is not None and not self._trace.done() and message["id"] == self._trace_id:
            self._trace.set_result(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            async for line in reader:
                # A trace of a large swarm has megabytes.
                message = (
                    json.loads(line) if len(line) < _SHORT_LINE_BYTES else await asyncio.to_thread(json.loads, line)
                )
                if message["type"] == "hello":
                    self._hello(message)
                    self._send_table(writer)
                elif message["type"] == "table":
                    self._table_answer(message)
                elif message["type"] == "failure":
                    self._failure(message)
                elif message["type"] == "stats":
                    self.statistics = message
                elif message["type"] == "trace":
                    self._trace_answer(message)
        except (ValueError, KeyError, TypeError, ConnectionError) as error:
            log.warning("router engine: control channel closed: %s: %s", type(error).__name__, error)
        finally:
            self._writers.discard(writer)
            writer.close()

    def _hello(self, message: dict[str, Any]) -> None:
        if message["version"] != PROTOCOL_VERSION or message["build"] != kernels.build_id():
            self.problem = (
                f"the Swarm backend is of build {message['build']}, protocol {message['version']}; this program is of "
                f"build {kernels.build_id()}, protocol {PROTOCOL_VERSION}. Reinstall swarm-node"
            )
        self.connected.set()

    def _table_answer(self, message: dict[str, Any]) -> None:
        table_id, problem = int(message["id"]), "" if message["ok"] else str(message["problem"])
        answered = [sent for sent in self._sent if sent.id <= table_id]
        if not answered or answered[-1].id != table_id:
            return  # sent again with a new connection, and answered before
        table = answered[-1].table
        if problem:
            problem = f"the Swarm backend refuses routing table {table.sequence} of term {table.term}: {problem}"
            log.error("%s", problem)
        else:
            self.in_use = table
        self.table_problem = problem
        for sent in answered:  # those before the last were lost with a connection: only the last is sent again
            self._sent.popleft()
            sent.problem.set_result(problem)

    def _failure(self, message: dict[str, Any]) -> None:
        first, last = message["experts"]
        failure = ExpertFailure(
            node=str(message["node"]),
            layer=int(message["layer"]),
            first=int(first),
            last=int(last),
            reason=str(message["reason"]),
            waited_ms=float(message["waited_ms"]),
        )
        self.failures.append(failure)
        log.error("experts failed: %s", failure)
        if self._on_failure is not None:
            self._on_failure(failure)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _socket_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="swarm-"))
    if len(os.fsencode(folder / "control")) > _SOCKET_PATH_BYTES_MAX:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="swarm-", dir="/tmp"))
    return folder
