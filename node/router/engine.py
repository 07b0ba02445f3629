"""The router's engine: an unmodified llama-server whose routed experts are computed by the swarm.

It listens on loopback with a key of its own. Its Swarm backend connects back to this process (node/router/control.py),
receives routing tables and reports failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from node import environment as variables
from node.parent_death import NO_BACKTRACE
from node.router.control import Control
from node.router.failure import ExpertFailure, RouterEngineError
from node.router.llama_server import EngineOptions, LlamaServer, llama_server
from node.router.programs import EXPERT_TENSOR_PATTERN, router_environment
from node.router.table import RoutingTable

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


@dataclass
class RouterEngine:
    """A running llama-server with the Swarm backend. Made by :func:`router_engine`."""

    _server: LlamaServer
    _control: Control = field(repr=False)
    _held_until_s: float = field(default=0.0, repr=False)  # of the event loop's time

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def api_key(self) -> str:
        """What llama-server wants as a bearer token with every request."""
        return self._server.api_key

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that llama-server wants with every request."""
        return self._server.headers

    @property
    def process(self) -> asyncio.subprocess.Process:
        return self._server.process

    def set_table(self, table: RoutingTable) -> None:
        """Gives the backend a new table, used from its next layer on, and where the present one must be tried again.

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
        """Lets the backend begin no layer within the next ``ms``, at most HOLD_MS_MAX; 0 ends that. The last counts."""
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

    async def metrics_text(self, session: aiohttp.ClientSession) -> str:
        """llama-server's metrics in Prometheus' text format, at most 64 KiB.

        Raises RouterEngineError when it does not give them within 2 s, and at once during a hold, which they would
        undo: they are one of the results that must not come.
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
        await self._server.watch()


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

    ``environment`` is added to llama-server's. Every slice of ``table`` must be ready: llama-server decodes a small
    batch of its own at start. Raises RouterEngineError.
    """
    control = Control(table, on_failure)
    async with (
        control.listening() as socket_path,
        llama_server(
            model_path,
            options or EngineOptions(),
            log_path=log_path,
            arguments=_ARGUMENTS,
            environment=_environment(socket_path, environment or {}),
        ) as server,
    ):
        try:
            await _until_ready(server, control)
            yield RouterEngine(server, control)
        finally:
            control.hold(0)  # it ends after the decode that it works on


_ARGUMENTS = (
    *("--override-tensor", f"{EXPERT_TENSOR_PATTERN}=Swarm"),
    "--metrics",
    # So that the experts are not read: the Swarm backend makes a mapping of it that reads nothing ahead, and has the
    # trunk copied out of it (kernels/src/llama/mapped_loading.hpp).
    *("--load-mode", "mmap"),
)


def _environment(socket_path: Path, extra: Mapping[str, str]) -> dict[str, str]:
    own = {variables.CONTROL: f"unix:{socket_path}", variables.PARENT_PID: str(os.getpid())}
    return {**router_environment(), **extra, **NO_BACKTRACE, **own}


async def _until_ready(server: LlamaServer, control: Control) -> None:
    """Raises RouterEngineError when it ends, is of another build, refuses the table or cannot decode."""

    def check() -> None:
        if problem := control.problem or control.table_problem:
            raise RouterEngineError(problem)

    await server.until_healthy(_START_TIMEOUT_S, check)
    await asyncio.sleep(REPORT_DELAY_S)
    server.check()
    check()
    if not control.connected.is_set():
        raise RouterEngineError(f"llama-server runs without the Swarm backend:\n{server.log_tail()}")
    if control.failures:
        # It would report healthy with speculation and prompt caching off for good.
        raise RouterEngineError(f"llama-server's first decode failed: {control.failures[-1]}")
