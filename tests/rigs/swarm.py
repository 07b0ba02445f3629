"""The demo model over three expert servers that nobody restarts, with a proxy before one of them, and a router engine:
for tests that break things and put them right again."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil

from node.commands.chat import ChatError, stream_chat
from node.expert_server.process import ExpertProcess, SliceOrder
from node.models.demo import demo_model
from node.router.engine import RouterEngine, router_engine
from node.router.failure import ExpertFailure
from node.router.llama_server import EngineOptions
from node.router.table import RoutingNode, RoutingSlice, RoutingTable
from node.slices import Slice
from rigs.expert_servers import HeldModel, Servers
from rigs.fault_proxy import FaultProxy, fault_proxy

T = TypeVar("T")

QUESTION = "What is the capital of France? Tell me one fact about it."
ANSWER = "The capital of France is Paris."
LONG_QUESTION = "Write a long story about a cat who lives in Paris."

FLOOR_S = 1.5
#: The node behind the proxy, and the experts that it holds in every layer.
VICTIM, VICTIM_EXPERTS = "node1", (3, 5)


@dataclass(frozen=True)
class Broken:
    """A request that ended with an error. `waited_s` counts from the fault; `cpu_s` is llama-server's meanwhile."""

    failure: ExpertFailure
    waited_s: float
    cpu_s: float


class Rig:
    def __init__(
        self,
        held: HeldModel,
        proxy: FaultProxy,
        engine: RouterEngine,
        failures: asyncio.Queue[ExpertFailure],
        session: aiohttp.ClientSession,
    ) -> None:
        self.held = held
        self.proxy = proxy
        self.engine = engine
        self.session = session
        self._failures = failures
        self.table = engine_table(held, proxy)
        self._sequence = self.table.sequence
        self._n_asked = 0

    @property
    def victim(self) -> ExpertProcess:
        return self.held.servers.processes[1]

    @property
    def pids(self) -> list[int | None]:
        return [self.engine.process.pid, *(process.pid for process in self.held.servers.processes)]

    def newer_table(self, **changes: Any) -> RoutingTable:
        """The rig's table with changes, as the newest one."""
        self._sequence += 1
        return dataclasses.replace(self.table, **{"sequence": self._sequence, **changes})

    def set_table(self, **changes: Any) -> None:
        self.engine.set_table(self.newer_table(**changes))

    async def use_table(self, **changes: Any) -> None:
        """As `set_table`, and waits until the router has it."""
        await self.engine.use_table(self.newer_table(**changes))

    async def failure(self) -> ExpertFailure:
        """The report that belongs to a failed request: there is exactly one, and it may come after the error."""
        failure = await asyncio.wait_for(self._failures.get(), 2)
        assert self._failures.empty() and self.engine.failures[-1] == failure
        return failure

    async def ask_in_vain(self) -> ExpertFailure:
        """Why a question that must fail has failed."""
        try:
            text = await self.ask()
        except ChatError as error:
            assert "Compute error" in str(error)
            return await self.failure()
        raise AssertionError(f"the request succeeded: {text!r}")

    def nodes_with(self, name: str, port: int) -> tuple[RoutingNode, ...]:
        """The table's nodes with another one in the victim's place."""
        nodes = list(self.table.nodes)
        nodes[1] = RoutingNode(name, "127.0.0.1", port)
        return tuple(nodes)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs what belongs to the servers' event loop."""
        return await asyncio.to_thread(self.held.servers.run, work)

    async def load(self, process: ExpertProcess, slices: Sequence[Slice]) -> None:
        """Loads slices into a server."""
        index, layers = self.held.index, self.held.programs.layers
        orders = [
            SliceOrder(one, {name: tensor.to_json() for name, tensor in index.slice_parts(*one).items()})
            for one in slices
        ]
        answers = await self.run(
            process.load(
                index.model_id,
                {layer: program.text for layer, program in layers.items()},
                {layer: program.n_expert for layer, program in layers.items()},
                {layer: program.n_used for layer, program in layers.items()},
                orders,
            )
        )
        assert [answer.reason for answer in answers if answer.reason is not None] == []

    @property
    def victim_slices(self) -> list[Slice]:
        return [Slice(one.layer, one.first, one.last) for one in self.table.slices if one.nodes == (1,)]

    async def ask(
        self, question: str = QUESTION, max_tokens: int = 24, on_chunk: Callable[[int], None] | None = None
    ) -> str:
        """The answer. `on_chunk` gets the number of chunks so far. Raises ChatError."""
        text, n_chunks = "", 0
        messages = [{"role": "user", "content": question}]
        async for chunk in stream_chat(
            self.session, self.engine.url, messages, headers=self.engine.headers, max_tokens=max_tokens
        ):
            text += chunk.text
            n_chunks += 1
            if on_chunk is not None:
                on_chunk(n_chunks)
        return text

    def long_prompt(self) -> str:
        """Some 400 tokens, of which llama-server has none but the first in its cache."""
        self._n_asked += 1
        return f"{self._n_asked} times: " + f"the cat {self._n_asked} sat on the mat and looked at the sea. " * 24

    async def ask_and_break(self, phase: str, inject: Callable[[], None]) -> Broken:
        """Calls `inject` while an answer is written ("decode") or a long prompt is read ("prefill")."""
        router = psutil.Process(self.engine.process.pid)
        fault: list[tuple[float, float]] = []

        def inject_now() -> None:
            inject()
            fault.append((time.monotonic(), _cpu_s(router)))

        text = ""
        try:
            if phase == "decode":
                text = await self.ask(LONG_QUESTION, 200, lambda n: inject_now() if n == 5 else None)
            else:
                # A row of 576 floats is sent to each server in each of 30 layers: this is in the tenth or so.
                self.proxy.after_bytes(10 * 400 * 576 * 4, inject_now)
                text = await self.ask(self.long_prompt(), 8)
        except ChatError as error:
            assert fault, f"the request failed before the fault: {error}"
            at_s, cpu_s = fault[0]
            broken = (time.monotonic() - at_s, _cpu_s(router) - cpu_s)
            assert "Compute error" in str(error)
            return Broken(await self.failure(), *broken)
        raise AssertionError(f"the request succeeded (fault injected: {bool(fault)}): {text!r}")

    async def statistics(self, process: ExpertProcess) -> dict[str, Any]:
        async with self.session.get(f"http://127.0.0.1:{process.port}/v1/stats") as response:
            return dict(await response.json())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def engine_table(held: HeldModel, proxy: FaultProxy) -> RoutingTable:
    nodes = list(held.table.nodes)
    nodes[1] = RoutingNode(nodes[1].name, "127.0.0.1", proxy.port)
    return dataclasses.replace(held.table, nodes=tuple(nodes))


@asynccontextmanager
async def rig(folder: Path) -> AsyncIterator[Rig]:
    servers = Servers(3, folder)
    try:
        with servers.holding(demo_model(), deadline_floor_ms=round(1000 * FLOOR_S)) as held:
            failures: asyncio.Queue[ExpertFailure] = asyncio.Queue()
            async with (
                fault_proxy(servers.processes[1].port) as proxy,
                router_engine(
                    str(held.index.paths[0]),
                    engine_table(held, proxy),
                    EngineOptions(context=2048, parallel=1),
                    log_path=folder / "router.log",
                    on_failure=failures.put_nowait,
                ) as engine,
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            ):
                yield Rig(held, proxy, engine, failures, session)
    finally:
        await asyncio.to_thread(servers.close)


def without(table: RoutingTable, layer: int, first: int) -> tuple[RoutingSlice, ...]:
    """The table's slices but one."""
    return tuple(one for one in table.slices if (one.layer, one.first) != (layer, first))
