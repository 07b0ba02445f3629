"""Takes the steps of `node.agent.reconcile`, once a second or when something changed, and does what they decide."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp

from node.agent.expert_role import ExpertRole
from node.agent.known_programs import KnownPrograms
from node.agent.reconcile import (
    STEPS,
    Action,
    EndRouter,
    Follow,
    HearTerm,
    Hold,
    Impossible,
    Keep,
    Plan,
    Publish,
    StartRouter,
    check_slices,
)
from node.agent.router_role import RouterRole
from node.agent.view import View
from node.errors import SwarmError
from node.models.index import ModelIndex
from node.peers.identity import Identity
from node.peers.peering import Peering
from node.records import encode
from node.router.programs import ModelPrograms
from node.transfer.swarm_model import SwarmModel

log = logging.getLogger(__name__)

_PERIOD_S = 1.0

#: Makes the router's part of a node, for a model, its programs and a term.
MakeRole = Callable[[ModelIndex, ModelPrograms, int], RouterRole]


class Supervisor:
    """``look`` gives the view anew; ``changed`` is set when it may have changed; ``experts`` is None on a node without.

    ``role`` is the router's part of this node while it has it, ``highest_term`` the highest term that it has used or
    heard of, ``problem`` why it cannot do its part, empty if it can.
    """

    def __init__(
        self,
        look: Callable[[], View],
        changed: asyncio.Event,
        *,
        identity: Identity,
        model: SwarmModel,
        programs: KnownPrograms,
        peering: Peering,
        experts: ExpertRole | None,
        make_role: MakeRole,
    ) -> None:
        self.role: RouterRole | None = None
        self.highest_term = identity.term
        self.problem = ""
        self._look = look
        self._changed = changed
        self._identity = identity
        self._model = model
        self._programs = programs
        self._peering = peering
        self._experts = experts
        self._make_role = make_role
        self._routing: asyncio.Task[None] | None = None
        self._round = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled. Raises IdentityError when a term cannot be kept."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD_S):
                        await self._changed.wait()
                self._changed.clear()
                self._round.set()
                await self._take_steps(tasks)

    async def next_round(self) -> None:
        """Waits until what this node sees may have changed."""
        await self._round.wait()
        self._round.clear()

    async def _take_steps(self, tasks: asyncio.TaskGroup) -> None:
        problem = ""
        for step in STEPS:
            for action in step(self._look()):
                problem = await self._carry_out(action, tasks) or problem
        if problem and problem != self.problem:
            log.warning("this node holds no experts: %s", problem)
        self.problem = problem

    async def _carry_out(self, action: Action, tasks: asyncio.TaskGroup) -> str:
        """What went wrong that is tried again in the next round; empty if nothing did."""
        match action:
            case Follow() | Hold():
                try:
                    await (self._follow(action) if isinstance(action, Follow) else self._hold(action))
                except (SwarmError, aiohttp.ClientError, OSError, TimeoutError) as error:
                    return str(error) or type(error).__name__
            case HearTerm(term):
                self.highest_term = term
            case StartRouter(term):
                self._start_router(term, tasks)
            case EndRouter():
                log.info("another node routes now")
                self._set_role(None)
            case Keep(in_use):
                self._model.shared.keep(in_use)
            case Plan(nodes):
                if self.role is not None:
                    self.role.update(nodes)
            case Publish(record):
                self._peering.publish(encode(record))
            case Impossible(reason):
                return reason
        return ""

    async def _follow(self, action: Follow) -> None:
        index = self._model.to_route(action.model)
        if index is not None:
            await self._programs.of(index, "")
            self._model.fetched = index

    async def _hold(self, action: Hold) -> None:
        index = self._model.copy_of(action.model)
        if index is None or self._experts is None:
            return
        programs = await self._programs.of(index, action.router_url)
        check_slices(index, programs, action.slices)
        self._experts.want(index, programs, action.slices)
        self._model.fetched = index if self._model.shared.is_stored(index) else None

    def _start_router(self, term: int, tasks: asyncio.TaskGroup) -> None:
        index = self._model.to_serve
        if index is None:  # nobody without a model is elected
            return
        self._identity.save_term(term)
        self.highest_term = term
        log.info("this node is the router, term %d", term)
        role = self._make_role(index, self._programs.by_model[index.model_id], term)
        self._set_role(role)
        self._routing = tasks.create_task(role.run(), name="router")

    def _set_role(self, role: RouterRole | None) -> None:
        if self._routing is not None:
            self._routing.cancel()
            self._routing = None
        self.role = role
        self._changed.set()
