"""A swarm on this machine: N expert servers on loopback that share every layer, and a router engine over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import kernels
from node.errors import ModelError
from node.expert_server.process import (
    SERVER_COMMAND,
    START_WITHIN_S,
    ExpertProcess,
    ProcessEvent,
    SliceAnswer,
    SliceOrder,
)
from node.models.index import ModelIndex
from node.router.engine import RouterEngine, router_engine
from node.router.failure import ExpertFailure
from node.router.llama_server import EngineOptions, free_ports
from node.router.programs import ModelPrograms
from node.router.table import RoutingNode, RoutingSlice, RoutingTable, even_split
from node.slices import Slice

log = logging.getLogger(__name__)

NODE_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


@dataclass(frozen=True)
class LocalNode:
    """An expert server of the local swarm and what it holds."""

    name: str
    process: ExpertProcess
    slices: tuple[Slice, ...]
    memory_bytes: int


@dataclass(frozen=True)
class LocalSwarm:
    """A running local swarm. ``engine`` is None when it was started without a router."""

    nodes: tuple[LocalNode, ...]
    table: RoutingTable
    engine: RouterEngine | None


@dataclass(frozen=True)
class ServerBuild:
    """What runs an expert server: ``command`` of this build or another, on a ``device`` of it."""

    name: str
    command: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class LocalSwarmOptions:
    """How a local swarm runs. ``expert_threads`` 0 shares the CPU quota among the servers; ``environment`` is added to
    theirs. ``builds``: of one server each, instead of ``nodes`` servers of this build on ``device``."""

    nodes: int = 3
    builds: tuple[ServerBuild, ...] = ()
    start_within_s: float = START_WITHIN_S
    reduce: str = "rows"
    device: str = "auto"
    expert_threads: int = 0
    deadline_floor_ms: int = 2000
    engine: EngineOptions = EngineOptions()  # noqa: RUF009 - frozen
    environment: Mapping[str, str] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def expert_servers(
    index: ModelIndex,
    programs: ModelPrograms,
    options: LocalSwarmOptions,
    *,
    log_folder: Path,
    on_slice: Callable[[str, SliceAnswer], None] | None = None,
    on_event: Callable[[str, ProcessEvent], None] | None = None,
) -> AsyncIterator[tuple[tuple[LocalNode, ...], RoutingTable]]:
    """Expert servers with every slice ready, and the table over them; they are restarted when they crash.

    Raises SwarmError when a server cannot start, a slice cannot be loaded, or, at the body's next await, when a server
    has crashed too often.
    """
    shares = _shares(programs, len(options.builds) or options.nodes)
    builds = options.builds or [ServerBuild(name, SERVER_COMMAND, options.device) for name in _names(len(shares))]
    threads = options.expert_threads or max(1, kernels.default_threads() // len(shares))
    # Ports are fixed before the start, so that a server that crashed comes back where the routing table says.
    processes = [
        ExpertProcess(
            build.name,
            port=port,
            device=build.device,
            threads=threads,
            max_rows=options.engine.ubatch,
            command=build.command,
            environment=options.environment,
            stderr=log_folder / f"{build.name}.log",
            start_within_s=options.start_within_s,
            on_event=None if on_event is None else partial(on_event, build.name),
        )
        for build, port in zip(builds, free_ports(len(shares)), strict=False)
    ]
    try:
        await asyncio.gather(*(process.start() for process in processes))
        loaded = await asyncio.gather(
            *(
                _load(process, index, programs, share, on_slice)
                for process, share in zip(processes, shares, strict=True)
            )
        )
        nodes = tuple(
            LocalNode(process.name, process, tuple(share), memory)
            for process, share, memory in zip(processes, shares, loaded, strict=True)
        )
        async with _beside(*(process.supervise() for process in processes)):
            yield nodes, _table(index, nodes, options)
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


@contextlib.asynccontextmanager
async def local_swarm(
    index: ModelIndex,
    programs: ModelPrograms,
    options: LocalSwarmOptions,
    *,
    log_folder: Path,
    on_slice: Callable[[str, SliceAnswer], None] | None = None,
    on_event: Callable[[str, ProcessEvent], None] | None = None,
    on_failure: Callable[[ExpertFailure], None] | None = None,
) -> AsyncIterator[LocalSwarm]:
    """Expert servers and a router engine over them. Everything ends on leaving, within 5 s.

    Raises SwarmError when something cannot be started, and also later, at the body's next await, when a server has
    crashed too often or llama-server has ended.
    """
    async with (
        expert_servers(index, programs, options, log_folder=log_folder, on_slice=on_slice, on_event=on_event) as (
            nodes,
            table,
        ),
        router_engine(
            index.paths[0], table, options.engine, log_path=log_folder / "router.log", on_failure=on_failure
        ) as engine,
        _beside(engine.watch()),
    ):
        yield LocalSwarm(nodes, table, engine)


@contextlib.asynccontextmanager
async def _beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs ``works`` as long as the body. What one of them raises ends the body at its next await, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _shares(programs: ModelPrograms, n_nodes: int) -> list[list[Slice]]:
    """What each node holds: a slice of every layer."""
    fewest = min(program.n_expert for program in programs.layers.values())
    shares: list[list[Slice]] = [[] for _ in range(min(n_nodes, fewest))]
    for layer, program in sorted(programs.layers.items()):
        for share, (first, last) in zip(shares, even_split(program.n_expert, len(shares)), strict=True):
            share.append(Slice(layer, first, last))
    return shares


def _names(count: int) -> list[str]:
    return [NODE_NAMES[i] if i < len(NODE_NAMES) else f"node{i + 1}" for i in range(count)]


async def _load(
    process: ExpertProcess,
    index: ModelIndex,
    programs: ModelPrograms,
    share: Sequence[Slice],
    on_slice: Callable[[str, SliceAnswer], None] | None,
) -> int:
    layers = {one.layer: programs.layers[one.layer] for one in share}
    orders = [
        SliceOrder(one, {name: tensor.to_json() for name, tensor in index.slice_parts(*one).items()}) for one in share
    ]
    answers = await process.load(
        index.model_id,
        {layer: program.text for layer, program in layers.items()},
        {layer: program.n_expert for layer, program in layers.items()},
        {layer: program.n_used for layer, program in layers.items()},
        orders,
        on_answer=None if on_slice is None else lambda answer: on_slice(process.name, answer),
    )
    for answer in answers:
        if answer.reason is not None:
            raise ModelError(
                f"experts {answer.slice.first} to {answer.slice.last} cannot be loaded: {answer.reason}",
                node=process.name,
                layer=answer.slice.layer,
            )
    return sum(answer.memory_bytes for answer in answers)


def _table(index: ModelIndex, nodes: Sequence[LocalNode], options: LocalSwarmOptions) -> RoutingTable:
    return RoutingTable(
        model=index.model_id,
        nodes=tuple(RoutingNode(node.name, "127.0.0.1", node.process.port) for node in nodes),
        slices=tuple(RoutingSlice(*one, (number,)) for number, node in enumerate(nodes) for one in node.slices),
        sequence=1,
        term=1,
        reduce=options.reduce,
        deadline_floor_ms=options.deadline_floor_ms,
    )
