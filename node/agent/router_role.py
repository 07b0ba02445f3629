"""What the elected router does: plans the slices, waits until they are ready, runs the engine over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from node.agent.placement import Candidate, LayerSize, plan
from node.errors import SwarmError
from node.log_files import begin_log, mark_ready
from node.models.index import ModelIndex
from node.records import Plan, Record, Router
from node.router.engine import RouterEngine, router_engine
from node.router.failure import ExpertFailure
from node.router.llama_server import EngineOptions
from node.router.programs import ModelPrograms
from node.router.table import RoutingNode, RoutingSlice, RoutingTable
from node.slices import Slice, gaps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownNode:
    """A node as the router sees it: its record, whether it is alive, and the host that reaches its expert port."""

    record: Record
    host: str
    alive: bool


def table_holds(table: RoutingTable, nodes: Mapping[str, KnownNode]) -> bool:
    """Whether every slice of the table is still ready where the table says."""
    by_address = {(known.host, known.record.expert_port): known for known in nodes.values() if known.alive}
    for number, node in enumerate(table.nodes):
        known = by_address.get((node.host, node.port))
        wanted = [Slice(one.layer, one.first, one.last) for one in table.slices if number in one.nodes]
        if known is None or known.record.holds_model != table.model or gaps(wanted, known.record.ready):
            return False
    return True


class RouterRole:
    """The router's part of an agent. ``update`` is given the nodes whenever something changed; ``run`` owns the engine.

    ``provide`` is awaited before the engine starts: it fetches what the model's file lacks, and raises SwarmError when
    it cannot.
    """

    def __init__(
        self,
        index: ModelIndex,
        programs: ModelPrograms,
        *,
        term: int,
        options: EngineOptions,
        reduce: str,
        dtype: str,
        log_path: Path,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        on_failure: Callable[[ExpertFailure], None],
        provide: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.index = index
        self.programs = programs
        self.term = term
        self.engine: RouterEngine | None = None
        self.reason = ""
        self._phase = "idle"  # starting, running, failed
        self._options = options
        self._reduce = reduce
        self._dtype = dtype
        self._log_path = log_path
        self._environment = environment
        self._on_change = on_change
        self._on_failure = on_failure
        self._provide = provide
        self._plan = Plan(sequence=0, model=index.model_id, slices={})
        self._not_ready: dict[str, tuple[Slice, ...]] = {}
        self._table: RoutingTable | None = None
        self._table_holds = False
        self._table_changed = asyncio.Event()

    @property
    def state(self) -> str:
        """The state that the record tells: waiting (for slices), starting, ready or failed."""
        if self._phase == "running":
            return "ready" if self._table_holds else "waiting"
        return "waiting" if self._phase == "idle" else self._phase

    @property
    def router_record(self) -> Router:
        """What the node's record says of its being router."""
        return Router(
            term=self.term,
            state=self.state,
            plan=self._plan,
            not_ready=self._not_ready,
            reason=(self.reason or (self.engine.table_problem if self.engine is not None else ""))[:400],
        )

    def update(self, nodes: Mapping[str, KnownNode]) -> None:
        """Plans anew if the nodes changed, and makes a routing table when every slice is ready."""
        before = self.router_record
        self._replan(nodes)
        self._not_ready = {
            node_id: tuple(missing)
            for node_id, wanted in self._plan.slices.items()
            if (missing := self._missing_of(wanted, nodes.get(node_id)))
        }
        if not self._not_ready and not self._plan.missing and self._plan.slices:
            self._set_table(nodes)
        # A new plan takes nothing away: until it is ready, its nodes answer by the table before.
        self._table_holds = self._table is not None and table_holds(self._table, nodes)
        if self.router_record != before:
            self._on_change()

    def _replan(self, nodes: Mapping[str, KnownNode]) -> None:
        layers = {
            layer: LayerSize(program.n_expert, -(-self.index.expert_bytes(layer) // program.n_expert))
            for layer, program in self.programs.layers.items()
        }
        candidates = [Candidate(node_id, known.record.memory_bytes) for node_id, known in nodes.items()]
        new = plan(candidates, layers, dict(self._plan.slices) or None)
        if (dict(new.slices), new.missing) != (dict(self._plan.slices), self._plan.missing):
            self._plan = Plan(self._plan.sequence + 1, self.index.model_id, dict(new.slices), new.missing)
            log.info("plan %d: %s", self._plan.sequence, {nodes[i].record.name: len(s) for i, s in new.slices.items()})

    def _missing_of(self, wanted: tuple[Slice, ...], known: KnownNode | None) -> list[Slice]:
        if known is None or not known.alive or known.record.holds_model != self.index.model_id:
            return sorted(wanted)
        return gaps(wanted, known.record.ready)

    def _set_table(self, nodes: Mapping[str, KnownNode]) -> None:
        ids = sorted(node_id for node_id, slices in self._plan.slices.items() if slices)
        routing_nodes = tuple(
            RoutingNode(nodes[i].record.name, nodes[i].host, nodes[i].record.expert_port) for i in ids
        )
        slices = tuple(
            RoutingSlice(*one, (number,)) for number, node_id in enumerate(ids) for one in self._plan.slices[node_id]
        )
        known = self._table
        if known is not None and (known.nodes, known.slices) == (routing_nodes, slices):
            return
        self._table = RoutingTable(
            model=self.index.model_id,
            nodes=routing_nodes,
            slices=slices,
            sequence=1 if known is None else known.sequence + 1,
            term=self.term,
            reduce=self._reduce,
            dtype=self._dtype,
        )
        self._table_changed.set()
        if self.engine is not None:
            self.engine.set_table(self._table)

    async def run(self) -> None:
        """Starts the engine once there is a table, and again with back-off when it ends; until cancelled."""
        delay_s = 1.0
        while True:
            try:
                if self._provide is not None:
                    await self._provide()
                await self._table_changed.wait()
                assert self._table is not None
                self._phase, self.reason = "starting", ""
                self._on_change()
                begin_log(self._log_path)
                async with router_engine(
                    self.index.paths[0],
                    self._table,
                    self._options,
                    log_path=self._log_path,
                    environment=self._environment,
                    on_failure=self._on_failure,
                ) as engine:
                    mark_ready(self._log_path)
                    self.engine = engine
                    engine.set_table(self._table)
                    self._phase = "running"
                    self._on_change()
                    delay_s = 1.0
                    status = await engine.process.wait()
                    self.reason = f"llama-server ended with status {status}"
            except SwarmError as error:
                self.reason = str(error)
            finally:
                self.engine = None
            self._phase = "failed"
            log.error("router engine: %s; starting it again in %.0f s", self.reason, delay_s)
            self._on_change()
            with contextlib.suppress(TimeoutError):
                # A new table may be the cure.
                self._table_changed.clear()
                await asyncio.wait_for(self._table_changed.wait(), delay_s)
            delay_s = min(2 * delay_s, 30.0)
            if self._table is not None:
                self._table_changed.set()
