"""The agent: one per machine. It finds its peers, holds its share of the experts, routes if elected, answers queries.

It puts the parts together and runs them; what a node sees is in `node.agent.view`, what it does next in
`node.agent.reconcile`. One root TaskGroup owns every task. Whatever a peer or a child does, the agent's event loop only
passes messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from node.agent.http_server import HttpServer
from node.agent.known_programs import KnownPrograms
from node.agent.machine import Machine
from node.agent.make_roles import RoleMaker
from node.agent.measured import Measured
from node.agent.own_record import Node, Own, model_record
from node.agent.router_role import RouterRole
from node.agent.status_routes import status_routes
from node.agent.supervisor import Supervisor
from node.agent.trace_routes import TraceRoutes
from node.agent.view import View
from node.api.front_door import Door, DoorOptions, add_routes
from node.api.swarm import Here, PeerProof, ServedModel, There, Unavailable
from node.errors import SwarmError
from node.models.index import ModelIndex
from node.models.known import KnownModels
from node.models.local import LocalModels
from node.paths import cache_dir
from node.peers.http import PeerClient, PeerGuard
from node.peers.identity import Identity
from node.peers.peering import Peering
from node.records import Model
from node.router.engine import RouterEngine
from node.router.engine_metrics import EngineMetrics
from node.router.failure import ExpertFailure
from node.router.programs import ModelPrograms, read_programs
from node.settings.load import Config
from node.swarm_key import SwarmKey
from node.transfer.store import ModelStore
from node.transfer.swarm_model import SwarmModel

log = logging.getLogger(__name__)

# What is asked of a peer this way is small: gossip, and the layer programs of a model.
_PEER_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Told:
    """What a node was told to serve: a file with its layer programs, or the ``name`` of a model that others have."""

    index: ModelIndex | None = None
    programs: ModelPrograms | None = None
    name: str = ""


@contextlib.asynccontextmanager
async def open_agent(config: Config, identity: Identity, machine: Machine, logs: Path) -> AsyncIterator[Agent]:
    """A node that was not started yet; ``logs``: the folder of its children's logs.

    Raises SwarmError when its model cannot be served, before anything is hashed.
    """
    started_s = time.monotonic()
    local = LocalModels(config.model.path)
    index = await asyncio.to_thread(local.served) if config.model.path else None
    if index is not None:
        told = Told(index, await read_programs(index))
    else:
        told = Told(name=await asyncio.to_thread(local.catalogue_name))
    read = "not needed yet" if told.programs is None else "read"
    log.debug("model told: %s; its programs are %s", index and index.paths[0], read)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PEER_TIMEOUT_S)) as session:
        yield Agent(config, identity, machine, told, local, session, logs, started_s=started_s)


class Agent:
    """One node. `open_agent` makes it; ``run`` is its life.

    ``local``: the model files that it can read; ``logs``: the folder of its children's logs; ``started_s``: when its
    start began, by the monotonic clock.
    """

    def __init__(
        self,
        config: Config,
        identity: Identity,
        machine: Machine,
        told: Told,
        local: LocalModels,
        session: aiohttp.ClientSession,
        logs: Path,
        *,
        started_s: float,
    ) -> None:
        changed = asyncio.Event()
        key = SwarmKey.parse(config.swarm.key) if config.swarm.key else None
        self._node = _node(config, identity, machine, told)
        self._told = told
        self._slots = config.model.parallel
        self._started_s = started_s
        self._wake = changed.set
        self._failures: deque[ExpertFailure] = deque(maxlen=64)
        self._client = PeerClient(session, key)
        self.models = KnownModels(local, self._wake)
        self.peering = Peering(config, identity, key, self._wake)
        self.server = HttpServer(config, PeerGuard(key), lambda: [one.address for one in self.peering.addresses])
        self.programs = KnownPrograms(self._client.post)
        self.model = SwarmModel(
            self.models,
            ModelStore(cache_dir() / "models", config.model.cache_gib << 30),
            self.peering.membership,
            self._wake,
            told=self._node.told,
            bytes_per_s=config.model.transfer_mbit_s * 1e6 / 8,
        )
        roles = RoleMaker(config, key, logs, self.model, self._wake)
        self.experts = roles.experts(machine.memory_bytes)
        self.supervisor = Supervisor(
            self.view,
            changed,
            identity=identity,
            model=self.model,
            programs=self.programs,
            peering=self.peering,
            experts=self.experts,
            make_role=lambda index, programs, term: roles.router(index, programs, term, self._expert_failed),
        )
        options = DoorOptions(api_key=config.api.key, node=config.node.name)
        self.door = Door(_AskedSwarm(self.view, self._client), options)
        self.engine_metrics = EngineMetrics(self._engine, lambda: (self.door.statistics.relayed, self.door.open))

    async def run(self) -> None:
        """Runs until cancelled. Raises SwarmError when the node cannot start, or cannot go on."""
        async with self.listen(), asyncio.TaskGroup() as tasks:
            if self.experts is not None:
                tasks.create_task(self.experts.run(), name="expert server")
            tasks.create_task(self._gossip(self.server.port), name="peering")
            if self._told.index is not None and self._told.programs is not None:
                offer = self._offer(self._told.index, self._told.programs)
                tasks.create_task(offer, name="hash the served model")
            tasks.create_task(self.models.run(), name="look for models")
            tasks.create_task(self.model.shared.run(self._client), name="fetch models")
            tasks.create_task(self.supervisor.run(), name="reconcile")
            tasks.create_task(self.engine_metrics.run(), name="engine metrics")
            try:
                await asyncio.Event().wait()  # until this node is stopped, or a task failed
            finally:
                # First, so that clients are told this, and not what breaks when the children end.
                self.door.end_requests()

    def listen(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Answers HTTP as long as the context lasts. Raises SwarmError."""
        return self.server.listen(self._add_routes)

    def view(self) -> View:
        """What this node sees of its swarm now."""
        now_s = time.monotonic()
        return View(self._node, self._own(), self.peering.membership.known(now_s), now_s - self._started_s)

    def _own(self) -> Own:
        model, role = self.model, self.supervisor.role
        hashed = self.models.progress
        return Own(
            port=self.server.port,
            served=self._model_record(model.served),
            fetched=self._model_record(model.fetched),
            has_programs=model.fetched is not None and model.fetched.model_id in self.programs.by_model,
            experts=None if self.experts is None else self.experts.state(),
            router=None if role is None else role.router_record,
            engine=self._here(),
            tokens_per_s=self.engine_metrics.generated_tokens_per_s,
            highest_term=self.supervisor.highest_term,
            problem=self.supervisor.problem,
            activity=self.models.activity or model.shared.activity,
            hashes=None if hashed is None else hashed[0],
            offers=model.shared.offers,
        )

    def _measure(self) -> Measured:
        shared, engine = self.model.shared, self._engine()
        return Measured(
            fetched_bytes=0 if shared.fetcher is None else shared.fetcher.received_bytes,
            sent_bytes=shared.service.sent_bytes,
            experts=None if self.experts is None else self.experts.process,
            engine=None if self.supervisor.role is None else self.engine_metrics,
            waiting=self.door.waiting,
            statistics={} if engine is None else engine.statistics,
            failures=list(self._failures),
        )

    def _model_record(self, index: ModelIndex | None) -> Model | None:
        return None if index is None else model_record(index, self.model.shared.name_of(index))

    def _engine(self) -> RouterEngine | None:
        """The router engine of this node, while it runs."""
        role: RouterRole | None = self.supervisor.role
        return None if role is None else role.engine

    def _here(self) -> Here | None:
        engine = self._engine()
        return None if engine is None else Here(engine.url, engine.api_key, self._slots, engine.hold)

    def _add_routes(self, app: web.Application) -> None:
        door = self.door
        traces = TraceRoutes(
            self.view, self._engine, lambda: (door.statistics.relayed, door.open - door.waiting), self._client.post
        )
        app.add_routes(self.peering.routes())
        app.add_routes(self.model.shared.service.routes())
        app.add_routes(self.programs.routes())
        app.add_routes(status_routes(self.view, self._measure, self.peering.document))
        app.add_routes(traces.routes())
        add_routes(app, door)

    async def _gossip(self, port: int) -> None:
        try:
            await self.peering.run(self._client, port, asyncio.Event())
        except* OSError as errors:
            error = errors.exceptions[0]
            raise SwarmError(
                f"UDP port {port} cannot be used: {error}. Another program has it? Give this node another --port"
            ) from error

    async def _offer(self, told: ModelIndex, programs: ModelPrograms) -> None:
        """Offers the model that this node was told to serve, as soon as its content is known."""
        index = await self.models.identify(told)
        self.programs.by_model[index.model_id] = programs
        self.model.served = index
        self._wake()
        await self.model.shared.add_local(index)

    def _expert_failed(self, failure: ExpertFailure) -> None:
        self._failures.append(failure)
        self.door.report_failure(failure)


class _AskedSwarm:
    """What the front door asks (`node.api.front_door.Swarm`)."""

    def __init__(self, look: Callable[[], View], client: PeerClient) -> None:
        self._look = look
        self._client = client

    def router(self) -> Here | There | Unavailable:
        return self._look().router()

    def models(self) -> list[ServedModel]:
        return self._look().models()

    async def peer_proof(self, peer: There, path: str, body: bytes) -> PeerProof:
        headers, check_reply = await self._client.streamed(peer.url, path, body)
        return PeerProof(headers, check_reply)


def _node(config: Config, identity: Identity, machine: Machine, told: Told) -> Node:
    return Node(
        swarm=config.swarm.name,
        node_id=identity.node_id,
        boot=identity.boot,
        name=config.node.name,
        machine=machine,
        told=told.index is not None,
        wanted=told.name,
    )
