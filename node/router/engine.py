"""The router's engine: an unmodified llama-server whose routed experts are computed by the swarm.

It listens on loopback with a key of its own. Its Swarm backend connects back to this process over a Unix socket
(docs/protocol.md, "Router control"), receives routing tables and reports failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

import kernels
from node.errors import SwarmError
from node.parent_death import NO_BACKTRACE
from node.router.programs import EXPERT_TENSOR_PATTERN, router_environment
from node.router.table import RoutingTable

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
# A statistics line of 1,000 nodes and 128 layers is some 200 KB.
_LINE_BYTES_MAX = 16 << 20
_SHORT_LINE_BYTES = 256 << 10
# Reading the trunk of the reference model (7 GB) from a slow disk takes about two minutes.
_START_TIMEOUT_S = 600.0
# What the backend reports comes on another connection than what llama-server answers, and may come a little later.
REPORT_DELAY_S = 0.2
# llama-server answers between two batches, of which one of a long prompt may take longer: the next reading will do.
_METRICS_TIMEOUT_S = 2.0
# It has some 20 metrics: 3 KiB.
_METRICS_BYTES_MAX = 64 << 10
# The backend answers a table as soon as it has read it; this is for a machine that is out of breath.
_TABLE_TIMEOUT_S = 10.0
# The backend makes a trace of a large swarm in a tenth of a second, and sends it between two other lines.
_TRACE_TIMEOUT_S = 5.0
# A backend that answers none must not make them pile up.
_UNANSWERED_MAX = 64
#: What a hold may last, as the backend bounds it.
HOLD_MS_MAX = 2000
# sun_path holds 104 bytes on macOS, 108 on Linux.
_SOCKET_PATH_BYTES_MAX = 103


class RouterEngineError(SwarmError):
    """llama-server could not be started, or has ended. The message holds the end of its log."""


class TableNotUsed(SwarmError):
    """The Swarm backend refused a routing table, or did not answer in time. The one before stays in use."""


@dataclass(frozen=True)
class ExpertFailure:
    """A layer that could not be computed, as the Swarm backend reports it. ``node`` is empty when none is at fault."""

    node: str
    layer: int
    first: int
    last: int
    reason: str
    waited_ms: float

    def __str__(self) -> str:
        experts = f", experts {self.first} to {self.last}" if self.first >= 0 else ""
        node = f" on node {self.node}" if self.node else ""
        return f"layer {self.layer}{experts}{node}: {self.reason}"


@dataclass(frozen=True)
class EngineOptions:
    """How llama-server runs. ``threads`` 0 takes the CPU quota; ``extra`` goes to llama-server as it is."""

    context: int = 4096
    parallel: int = 1
    threads: int = 0
    ubatch: int = 512
    cache_ram_mib: int = 0
    extra: tuple[str, ...] = ()


@dataclass
class RouterEngine:
    """A running llama-server. Made by :func:`router_engine`."""

    url: str
    api_key: str
    process: asyncio.subprocess.Process
    _control: _Control = field(repr=False)
    _log_path: Path = field(repr=False)
    _held_until_s: float = field(default=0.0, repr=False)  # of the event loop's time

    def set_table(self, table: RoutingTable) -> None:
        """Gives the backend a new table, used from its next layer on, and for what of the present one must be tried again.

        Whether the backend has taken it says ``table_in_use``; why it has not, ``table_problem``.
        """
        self._control.set_table(table)

    async def use_table(self, table: RoutingTable, timeout_s: float = _TABLE_TIMEOUT_S) -> None:
        """As ``set_table``, and waits until the backend uses this table, or one that was set after it.

        Raises TableNotUsed.
        """
        await self._control.use_table(table, timeout_s)

    @property
    def table_in_use(self) -> RoutingTable | None:
        """The last table that the backend said it uses; None before the first."""
        return self._control.in_use

    @property
    def table_problem(self) -> str:
        """Why the backend refused the last table; empty if it has not."""
        return self._control.table_problem

    def hold(self, ms: int) -> None:
        """Lets the backend begin no layer within the next ``ms``, at most HOLD_MS_MAX; 0 ends that. The last call counts."""
        self._control.hold(ms)
        self._held_until_s = asyncio.get_running_loop().time() + ms / 1000

    @property
    def failures(self) -> deque[ExpertFailure]:
        """The last failures, oldest first."""
        return self._control.failures

    @property
    def statistics(self) -> dict[str, Any]:
        """The backend's last statistics; empty before the first."""
        return self._control.statistics

    async def trace(self, timeout_s: float = _TRACE_TIMEOUT_S) -> dict[str, Any]:
        """Where the backend's time went since its start, as of now: docs/protocol.md, "Trace".

        One at a time: others wait for their turn, within their own ``timeout_s``. Raises RouterEngineError.
        """
        return await self._control.trace(timeout_s)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that llama-server wants with every request."""
        return {"Authorization": f"Bearer {self.api_key}"}

    async def metrics_text(self, session: aiohttp.ClientSession) -> str:
        """llama-server's metrics in Prometheus' text format, at most 64 KiB.

        Raises RouterEngineError when it does not give them within 2 s, and at once during a hold, which they would undo:
        they are one of the results that must not come.
        """
        if asyncio.get_running_loop().time() < self._held_until_s:
            raise RouterEngineError("llama-server gives no metrics: it is being held")
        try:
            async with (
                asyncio.timeout(_METRICS_TIMEOUT_S),
                session.get(f"{self.url}/metrics", headers=self.headers, allow_redirects=False) as response,
            ):
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _METRICS_BYTES_MAX:
                        raise RouterEngineError(f"llama-server's metrics are longer than {_METRICS_BYTES_MAX} bytes")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RouterEngineError(f"llama-server gives no metrics: {str(error) or type(error).__name__}") from error
        if response.status != 200:
            raise RouterEngineError(f"llama-server gives no metrics: status {response.status}")
        return body.decode(errors="replace")

    async def watch(self) -> NoReturn:
        """Waits until llama-server ends, which it does not do by itself. Raises RouterEngineError."""
        status = await self.process.wait()
        raise RouterEngineError(f"llama-server ended with status {status}:\n{_tail(self._log_path)}")


class _SentTable:
    """A table on its way to the backend. ``problem``: its answer, empty when it is in use."""

    def __init__(self, table_id: int, table: RoutingTable) -> None:
        self.id = table_id
        self.table = table
        self.problem: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class _Control:
    """The agent's end of the control channel."""

    def __init__(self, table: RoutingTable, on_failure: Callable[[ExpertFailure], None] | None) -> None:
        # Those that the backend has not answered, oldest first.
        self._sent: deque[_SentTable] = deque([_SentTable(1, table)])
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
        self.problem: str | None = None

    def set_table(self, table: RoutingTable) -> _SentTable:
        self._last_sent = _SentTable(self._last_sent.id + 1, table)
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
        sent = self.set_table(table)
        try:
            problem = await asyncio.wait_for(asyncio.shield(sent.problem), timeout_s)
        except TimeoutError:
            problem = f"the Swarm backend has not answered routing table {table.sequence} within {timeout_s:g} s"
        if problem:
            raise TableNotUsed(problem)

    def hold(self, ms: int) -> None:
        if not 0 <= ms <= HOLD_MS_MAX:
            raise ValueError(f"a hold of {ms} ms is not one of 0 to {HOLD_MS_MAX}")
        for writer in self._writers:
            writer.write(_line({"type": "hold", "ms": ms}))

    async def trace(self, timeout_s: float) -> dict[str, Any]:
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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


@contextlib.asynccontextmanager
async def router_engine(
    model_path: str,
    table: RoutingTable,
    options: EngineOptions | None = None,
    *,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
    on_failure: Callable[[ExpertFailure], None] | None = None,
) -> AsyncIterator[RouterEngine]:
    """Starts llama-server on ``model_path`` and waits until it answers; ends it on leaving, within 4 s.

    ``environment`` is added to llama-server's. Every slice of ``table`` must be ready: llama-server decodes a small batch of its own at start. Raises
    RouterEngineError.
    """
    options = options or EngineOptions()
    control = _Control(table, on_failure)
    folder = _socket_folder()
    try:
        socket_path = folder / "control"
        server = await asyncio.start_unix_server(control.serve, path=socket_path, limit=_LINE_BYTES_MAX)
        async with server:
            engine = await _start(model_path, options, socket_path, control, log_path, environment or {})
            try:
                await _wait_ready(engine, control)
                yield engine
            finally:
                control.hold(0)  # it ends after the decode that it works on
                await _stop(engine.process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _socket_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="swarm-"))
    if len(os.fsencode(folder / "control")) > _SOCKET_PATH_BYTES_MAX:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="swarm-", dir="/tmp"))
    return folder


async def _start(
    model_path: str,
    options: EngineOptions,
    socket_path: Path,
    control: _Control,
    log_path: Path,
    extra_environment: Mapping[str, str],
) -> RouterEngine:
    port = free_port()
    api_key = secrets.token_urlsafe(24)
    threads = options.threads or kernels.default_threads()
    arguments = [
        *("--model", model_path, "--override-tensor", f"{EXPERT_TENSOR_PATTERN}=Swarm"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--ctx-size", str(options.context), "--parallel", str(options.parallel)),
        *("--ubatch-size", str(options.ubatch)),
        # While it computes a batch (2,048 tokens by default), it neither looks for clients that left nor for new ones.
        *("--batch-size", str(options.ubatch)),
        *("--threads", str(threads), "--poll", "0", "--no-warmup", "--fit", "off", "--metrics"),
        *("--cache-ram", str(options.cache_ram_mib), "--ctx-checkpoints", "0" if options.cache_ram_mib == 0 else "8"),
        # So that the experts are not read: the Swarm backend makes a mapping of it that reads nothing ahead, and has the
        # trunk copied out of it (kernels/src/mapped_loading.hpp).
        *("--load-mode", "mmap"),
        *options.extra,
    ]
    environment = router_environment() | dict(extra_environment)
    environment |= NO_BACKTRACE | {
        "SWARM_CONTROL": f"unix:{socket_path}",
        "SWARM_PARENT_PID": str(os.getpid()),
        # Not on the command line, where every user of the machine could read it.
        "LLAMA_API_KEY": api_key,
    }
    with log_path.open("ab") as log_file:
        process = await asyncio.create_subprocess_exec(
            str(kernels.native_path("llama-server")),
            *arguments,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,  # Ctrl-C on the terminal is for the agent, which then ends its children in order
        )
    url = f"http://127.0.0.1:{port}"
    return RouterEngine(url=url, api_key=api_key, process=process, _control=control, _log_path=log_path)


def free_port() -> int:
    """A TCP port of loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _wait_ready(engine: RouterEngine, control: _Control) -> None:
    watching = asyncio.create_task(engine.watch())
    try:
        async with asyncio.timeout(_START_TIMEOUT_S), aiohttp.ClientSession(headers=engine.headers) as session:
            while not await _healthy(session, engine.url):
                await _pause(watching, control, 0.1)
            await _pause(watching, control, REPORT_DELAY_S)
    except TimeoutError:
        raise RouterEngineError(
            f"llama-server did not answer within {_START_TIMEOUT_S:.0f} s:\n{_tail(engine._log_path)}"
        ) from None
    finally:
        watching.cancel()
    if not control.connected.is_set():
        raise RouterEngineError(f"llama-server runs without the Swarm backend:\n{_tail(engine._log_path)}")
    if control.failures:
        # It would report healthy with speculation and prompt caching off for good.
        raise RouterEngineError(f"llama-server's first decode failed: {control.failures[-1]}")


async def _pause(watching: asyncio.Task[NoReturn], control: _Control, seconds: float) -> None:
    """Raises RouterEngineError when the engine ended, is of another build, or refuses the table."""
    await asyncio.wait({watching}, timeout=seconds)
    if watching.done():
        await watching
    if problem := control.problem or control.table_problem:
        raise RouterEngineError(problem)


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _tail(log_path: Path, lines: int = 15) -> str:
    try:
        text = log_path.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 3.0)
    except TimeoutError:
        process.kill()
        await process.wait()
