"""The agent: one per machine. It finds its peers, holds its share of the experts, routes if it is elected, and answers queries.

One root TaskGroup owns every task. Whatever a peer or a child does, the agent's event loop only passes messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from node import environment, log_levels
from node.agent import machine, readiness
from node.agent.election import Election, routing_peer
from node.agent.expert_role import Holder
from node.agent.http_server import HttpServer
from node.agent.known_programs import KnownPrograms
from node.agent.own_record import own_record
from node.agent.router_role import KnownNode, RouterRole
from node.agent.status import status_routes
from node.agent.trace_routes import trace_routes
from node.api.front_door import Door, DoorOptions, Here, PeerProof, ServedModel, There, Unavailable, add_routes
from node.errors import ModelError, SwarmError
from node.log_files import log_folder
from node.models.index import ModelIndex
from node.models.known import KnownModels
from node.models.local import LocalModels
from node.models.manifest import expert_digests
from node.paths import cache_dir
from node.peers.http import PeerClient, PeerGuard
from node.peers.identity import Identity
from node.peers.peering import Peering
from node.records import Record, Router, encode
from node.router.engine_metrics import EngineMetrics
from node.router.failure import ExpertFailure
from node.router.llama_server import EngineOptions
from node.router.programs import ModelPrograms, read_programs
from node.settings.load import Config
from node.slices import Slice
from node.swarm_key import SwarmKey
from node.transfer.store import ModelStore
from node.transfer.swarm_model import SwarmModel

log = logging.getLogger(__name__)

# Of a request to a peer; gossip and the layer programs of a model are all there is.
_PEER_TIMEOUT_S = 2.0


class Agent:
    """One node. ``run`` is its life."""

    def __init__(self, config: Config, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.local_models = LocalModels(config.model.path)
        self.known_models = KnownModels(self.local_models, self.wake)
        self.served: ModelIndex | None = None  # once its content is known
        self.holder: Holder | None = None
        self.role: RouterRole | None = None
        self.failures: deque[ExpertFailure] = deque(maxlen=64)
        self._key = SwarmKey.parse(config.swarm.key) if config.swarm.key else None
        self._guard = PeerGuard(self._key)
        self.peering = Peering(config, identity, self._key, self.wake)
        self.membership = self.peering.membership
        self._election = Election(identity, self.membership)
        self._client: PeerClient | None = None
        self.model = SwarmModel(
            self.known_models,
            ModelStore(cache_dir() / "models", config.model.cache_gib << 30),
            self.membership,
            self.record,
            self.wake,
            bytes_per_s=config.model.transfer_mbit_s * 1e6 / 8,
        )
        self.shared = self.model.shared
        self.door = Door(self, DoorOptions(api_key=config.api.key, node=config.node.name))
        self._server = HttpServer(config, self._guard, lambda: [entry.address for entry in self.peering.addresses])
        self.engine_metrics = EngineMetrics(
            lambda: None if self.role is None else self.role.engine,
            lambda: (self.door.statistics.relayed, self.door.open),
        )
        self.programs = KnownPrograms(self.post)
        self._changed = asyncio.Event()
        self.devices = machine.devices()
        self.memory_bytes = machine.offered_memory_bytes(config)
        self.can_route = machine.can_run_router(config)
        self.port = config.node.port
        self.listening = asyncio.Event()
        self._summary_changed = asyncio.Event()
        self.problem = ""

    # --- what this node says of itself

    def record(self) -> Record:
        """This node's record as it is now."""
        return own_record(self)

    def _models_in_use(self) -> dict[str, tuple[Sequence[Slice], bool]]:
        """What this node needs of which models: slices, and whether the trunk."""
        used: dict[str, tuple[Sequence[Slice], bool]] = {}
        if self.model.fetched is not None:
            used[self.model.fetched.model_id] = ((), self.role is not None)
        if self.holder is not None and self.holder.model_id is not None:
            _, trunk = used.get(self.holder.model_id, ((), False))
            used[self.holder.model_id] = (self.holder.in_use, trunk)
        return used

    def routing_node(self) -> tuple[Record, str] | None:
        """The router's record and its agent's URL ("" for this node itself); None while there is none."""
        if self.role is not None:
            return self.record(), ""
        peer = routing_peer(self.membership.alive(time.monotonic()).values())
        return None if peer is None else (peer.record, peer.url)

    def wake(self) -> None:
        """Something changed: look at everything again, and tell the others."""
        self._changed.set()

    # --- life

    async def run(self) -> None:
        """Runs until cancelled. Raises SwarmError when the node cannot start."""
        told = await asyncio.to_thread(self.local_models.served) if self.config.model.path else None
        self.model.told = told is not None
        self.model.name = "" if told is not None else await asyncio.to_thread(self.local_models.catalogue_name)
        # What cannot be served at all is said before anything is hashed.
        programs = None if told is None else await read_programs(told)
        async with contextlib.AsyncExitStack() as stack:
            folder = log_folder(self.identity.folder)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PEER_TIMEOUT_S))
            )
            log.debug(
                "model told: %s; its programs are %s", told and told.paths[0], "read" if programs else "not needed yet"
            )
            self._client = PeerClient(session, self._key)
            await stack.enter_async_context(self._http_server())
            async with asyncio.TaskGroup() as tasks:
                if self.config.experts.enabled and self.memory_bytes > 0:
                    self.holder = self._make_holder(folder)
                    tasks.create_task(self.holder.run(), name="expert server")
                tasks.create_task(self._gossip(), name="peering")
                if told is not None and programs is not None:
                    tasks.create_task(self._offer(told, programs), name="hash the served model")
                tasks.create_task(self.known_models.run(), name="look for models")
                tasks.create_task(self.shared.run(self._client), name="fetch models")
                tasks.create_task(self._reconcile_forever(folder), name="reconcile")
                tasks.create_task(self.engine_metrics.run(), name="engine metrics")
                try:
                    await asyncio.Event().wait()  # until this node is stopped, or a task failed
                finally:
                    # First, so that clients are told this, and not what breaks when the children end.
                    self.door.end_requests()

    async def _gossip(self) -> None:
        assert self._client is not None
        try:
            await self.peering.run(self._client, self.port, asyncio.Event())
        except* OSError as errors:
            error = errors.exceptions[0]
            raise SwarmError(
                f"UDP port {self.port} cannot be used: {error}. Another program has it? Give this node another --port"
            ) from error

    async def _offer(self, told: ModelIndex, programs: ModelPrograms) -> None:
        """Offers the model that this node was told to serve, as soon as its content is known."""
        index = await self.known_models.identify(told)
        self.programs.by_model[index.model_id] = programs
        self.served = index
        self.wake()
        await self.shared.add_local(index)

    async def _reconcile_forever(self, folder: Path) -> None:
        running: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._changed.wait()
                self._changed.clear()
                self._summary_changed.set()
                role_before = self.role
                problem = await self._problem_of(self._follow_model())
                self._elect(folder)
                if self.role is not role_before:
                    if running is not None:
                        running.cancel()
                    running = None if self.role is None else tasks.create_task(self.role.run(), name="router")
                    self.wake()
                self.shared.keep(self._models_in_use())
                if self.role is not None:
                    self.role.update(self._known_nodes())
                self.peering.publish(encode(self.record()))
                problem = await self._problem_of(self._follow_plan()) or problem
                if problem and problem != self.problem:
                    log.warning("this node holds no experts: %s", problem)
                self.problem = problem

    @staticmethod
    async def _problem_of(step: Coroutine[Any, Any, None]) -> str:
        """What went wrong in a step that is taken again a second later; empty if nothing did."""
        try:
            await step
        except (SwarmError, aiohttp.ClientError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        return ""

    async def _follow_model(self) -> None:
        """Gets ready to route the swarm's model where nobody who has its file can. Raises ModelError."""
        if self.can_route and self.routing_node() is None:
            index = self.model.to_route()
            if index is not None:
                await self.programs.of(index, "")
                self.model.fetched = index

    def _elect(self, folder: Path) -> None:
        now_s = time.monotonic()
        if not self._election.is_won_by(self.record(), now_s):
            if self.role is not None:
                log.info("another node routes now")
                self.role = None
            return
        if self.role is not None or not self._election.is_open(now_s):
            return
        index = self.served or self.model.fetched
        assert index is not None
        term = self._election.take_term()
        log.info("this node is the router, term %d", term)
        self.role = RouterRole(
            index,
            self.programs.by_model[index.model_id],
            term=term,
            options=EngineOptions(
                context=self.config.model.context_total_tokens,
                parallel=self.config.model.parallel,
                threads=self.config.router.threads,
                ubatch=self.config.model.ubatch_tokens,
                cache_ram_mib=self.config.model.prompt_cache_mib,
                extra=tuple(self.config.router.extra_arguments),
            ),
            reduce=self.config.model.reduce,
            dtype=self.config.model.dtype,
            log_path=folder / "router.log",
            environment=self._child_environment(),
            on_change=self.wake,
            on_failure=self._expert_failed,
            provide=partial(self.shared.provide_trunk, index),
        )

    def _known_nodes(self) -> dict[str, KnownNode]:
        own = self.record()
        nodes = {own.node: KnownNode(own, "127.0.0.1", True)}
        for node_id, peer in self.membership.known(time.monotonic()).items():
            nodes[node_id] = KnownNode(peer.record, _host(peer.url), peer.alive)
        return nodes

    async def _follow_plan(self) -> None:
        found = self.routing_node()
        if found is None or self.holder is None or found[0].router is None or found[0].router.plan is None:
            return
        record, url = found
        plan = record.router.plan if record.router is not None else None
        assert plan is not None
        mine = plan.slices.get(self.identity.node_id, ())
        if not mine:
            return
        if record.model is None or record.model.id != plan.model:
            raise ModelError(f"the router does not say what model {plan.model} of its plan is")
        index = self.model.copy_of(record.model)
        if index is not None:
            self.holder.want(index, await self.programs.of(index, url), mine)
            self.model.fetched = index if self.shared.is_stored(index) else None

    def _digests(self, index: ModelIndex, slices: Sequence[Slice]) -> Mapping[Slice, Sequence[str]]:
        manifest = self.shared.manifest_of(index)
        # Of files that changed since, `check_unchanged` has spoken already.
        return (
            {} if manifest is None or manifest.model_id != index.model_id else expert_digests(index, manifest, slices)
        )

    # --- HTTP

    @contextlib.asynccontextmanager
    async def _http_server(self) -> AsyncIterator[None]:
        async with self._server.listen(self._add_routes) as self.port:
            self.listening.set()
            yield

    def _add_routes(self, app: web.Application) -> None:
        app.add_routes(self.peering.routes())
        app.add_routes(self.shared.service.routes())
        app.add_routes(self.programs.routes())
        app.add_routes(status_routes(self))
        app.add_routes(trace_routes(self))
        add_routes(app, self.door)

    async def post(self, url: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Posts to another agent, with the proof of the key. Raises aiohttp.ClientError, TimeoutError, NotAuthenticated."""
        assert self._client is not None
        return await self._client.post(url, path, body)

    def summary(self) -> str:
        """The state of the swarm in one line, for people."""
        alive = len(self.membership.alive(time.monotonic())) + 1
        nodes = f"{alive} node{'s' * (alive > 1)}"
        found = self.routing_node()
        if found is None or found[0].router is None:
            hashed = self.known_models.progress
            state = readiness.without_router(
                serves=self.served is not None, hashes=None if hashed is None else hashed[0]
            )
        else:
            record, router = found[0], found[0].router
            state = readiness.with_router(record, "" if router.state == "ready" else self.waits_for(router))
        return f"{nodes}; {state}"

    async def summary_changed(self) -> None:
        """Waits until the summary may have changed."""
        await self._summary_changed.wait()
        self._summary_changed.clear()

    # --- what the front door asks

    def router(self) -> Here | There | Unavailable:
        """Where queries go now."""
        found = self.routing_node()
        if found is None:
            return Unavailable("no_router", "No node of the swarm serves a model yet; start one with --model FILE")
        record, url = found
        router = record.router
        assert router is not None
        if router.state != "ready":
            missing = [one for slices in router.not_ready.values() for one in slices]
            missing += router.plan.missing if router.plan is not None else ()
            code = "missing_slices" if missing else "model_loading"
            return Unavailable(code, f"The model is not ready: {self.waits_for(router)}", missing=missing)
        if self.role is not None and self.role.engine is not None:
            engine = self.role.engine
            return Here(engine.url, engine.api_key, self.config.model.parallel, engine.hold)
        if url:
            return There(record.name, url)
        return Unavailable("model_loading", "The router engine is starting")

    def models(self) -> list[ServedModel]:
        """The model of the swarm, by its file name, and by its id."""
        found = self.routing_node()
        if found is None or found[0].model is None:
            return []
        model = found[0].model
        return [ServedModel(model.file.removesuffix(".gguf"), (model.file, model.id))]

    async def peer_proof(self, peer: There, path: str, body: bytes) -> PeerProof:
        """How this node and a peer prove their key to each other for one relayed request."""
        assert self._client is not None
        headers, check_reply = await self._client.streamed(peer.url, path, body)
        return PeerProof(headers, check_reply)

    def _expert_failed(self, failure: ExpertFailure) -> None:
        self.failures.append(failure)
        self.door.report_failure(failure)

    def waits_for(self, router: Router) -> str:
        """Why the router does not answer, in words: what is missing and where."""
        names = {i: peer.record.name for i, peer in self.membership.known(time.monotonic()).items()}
        names[self.identity.node_id] = self.config.node.name
        found = self.routing_node()
        activity = f"{found[0].name} is {found[0].activity}" if found is not None and found[0].activity else ""
        return readiness.waits_for(router, names, activity)

    # --- parts

    def _make_holder(self, folder: Path) -> Holder:
        config = self.config
        holder = Holder(
            config.node.name,
            host=config.node.expert_host,
            port=config.node.expert_port,
            device=config.experts.device,
            threads=config.experts.threads,
            max_rows=config.model.ubatch_tokens,
            memory_bytes=self.memory_bytes,
            log_path=folder / "experts.log",
            environment=self._child_environment(),
            on_change=self.wake,
            check_file=self.model.check_file,
            provide=self.shared.provide,
            digests=self._digests,
        )
        holder.process.measures_speed = True
        return holder

    def _child_environment(self) -> dict[str, str]:
        key = {} if self._key is None else {environment.CALL_KEY: self._key.derive("call").hex()}
        settings = {environment.POLL_US: str(self.config.node.poll_us), log_levels.VARIABLE: self.config.log.level}
        return {**settings, **key}


def _host(url: str) -> str:
    return url.removeprefix("http://").rpartition(":")[0].strip("[]")
