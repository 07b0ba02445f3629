"""Decisions are carried out: rounds over parts that the test plays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.agent.own_record import Experts, Node, Own
from node.agent.supervisor import Supervisor
from node.agent.view import View
from node.errors import IdentityError, ModelError
from node.peers.membership import Peer
from node.records import Plan, Record, Router, decode
from node.slices import Slice
from rigs.agent import MACHINE, MODEL, NODE, peer, view_of

ABLE = replace(NODE, machine=replace(MACHINE, can_route=True))
MINE = (Slice(0, 0, 3),)
INDEX: Any = SimpleNamespace(model_id=MODEL.id, expert_layers=(0, 1), n_expert=8, paths=("m.gguf",))
PROGRAMS: Any = SimpleNamespace(layers={0: None, 1: None})


class Role:
    """The router's part: runs until it is cancelled."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.router_record = Router(term, "waiting", Plan(1, MODEL.id, {NODE.node_id: MINE}))
        self.planned: list[list[str]] = []
        self.ended = False

    def update(self, nodes: dict[str, Any]) -> None:
        self.planned.append(sorted(nodes))

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


class Rig:
    """A supervisor with everything that it acts on."""

    def __init__(self, own: Own, node: Node = ABLE) -> None:
        self.own = own
        self.node = node
        self.peers: list[Peer] = []
        self.terms: list[int] = []
        self.published: list[Record] = []
        self.kept: list[Any] = []
        self.wanted: list[Any] = []
        self.asked: list[str] = []
        self.copy: Any = INDEX
        self.programs: Any = PROGRAMS
        self.model: Any = SimpleNamespace(
            to_serve=INDEX,
            fetched=None,
            to_route=lambda model: self._found(),
            copy_of=lambda model: self._found(),
            shared=SimpleNamespace(keep=self.kept.append, is_stored=lambda index: index is INDEX),
        )
        known: Any = SimpleNamespace(of=self._programs_of, by_model={MODEL.id: PROGRAMS})
        identity: Any = SimpleNamespace(term=4, save_term=self.terms.append)
        peering: Any = SimpleNamespace(publish=lambda body: self.published.append(decode(body)))
        experts: Any = SimpleNamespace(want=lambda *what: self.wanted.append(what))
        make_role: Any = lambda index, programs, term: Role(term)  # noqa: E731
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(
            self.look,
            self.changed,
            identity=identity,
            model=self.model,
            programs=known,
            peering=peering,
            experts=experts,
            make_role=make_role,
        )
        self.identity = identity

    def look(self) -> View:
        role = self.supervisor.role
        own = replace(
            self.own,
            router=None if role is None else role.router_record,
            highest_term=self.supervisor.highest_term,
            problem=self.supervisor.problem,
        )
        return view_of(own, *self.peers, node=self.node)

    def _found(self) -> Any:
        if isinstance(self.copy, Exception):
            raise self.copy
        return self.copy

    async def _programs_of(self, index: Any, url: str) -> Any:
        self.asked.append(url)
        if isinstance(self.programs, Exception):
            raise self.programs
        return self.programs


SERVES = Own(4100, served=MODEL, experts=Experts(4101))
HOLDS = Own(4100, experts=Experts(4101))
ROUTER = peer("2", model=MODEL, can_route=True, router=Router(9, "ready", Plan(1, MODEL.id, {NODE.node_id: MINE})))


async def test_a_role_is_won_and_lost() -> None:
    rig = Rig(SERVES)
    async with asyncio.TaskGroup() as tasks:
        await rig.supervisor._take_steps(tasks)
        role: Any = rig.supervisor.role
        assert rig.terms == [5] and role.term == 5 and rig.supervisor.highest_term == 5
        assert rig.changed.is_set()  # the others are told at once, and all is looked at again
        # In the same round: it planned, told the others, and holds its own share.
        assert role.planned == [[NODE.node_id]]
        assert [one.router and one.router.term for one in rig.published] == [5]
        assert rig.wanted == [(INDEX, PROGRAMS, MINE)]
        await asyncio.sleep(0)
        assert not role.ended

        rig.peers = [ROUTER]
        await rig.supervisor._take_steps(tasks)
        assert rig.supervisor.role is None and rig.supervisor.highest_term == 9
        assert rig.published[-1].router is None and len(role.planned) == 1
        await asyncio.sleep(0)
        assert role.ended

        # It came back above the term that it lost to.
        rig.peers = []
        await rig.supervisor._take_steps(tasks)
        assert rig.terms == [5, 10]
        rig.peers = [ROUTER, peer("3", router=Router(11, "ready"))]
        await rig.supervisor._take_steps(tasks)


async def test_a_term_that_cannot_be_kept_ends_the_node() -> None:
    rig = Rig(SERVES)

    def fail(term: int) -> None:
        raise IdentityError("the disk is full")

    rig.identity.save_term = fail
    with pytest.raises(ExceptionGroup, match="unhandled") as caught:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.supervisor.run())
            rig.changed.set()
    assert caught.group_contains(IdentityError, match="the disk is full")
    assert rig.supervisor.role is None


@pytest.mark.parametrize(
    ("copy", "programs", "problem"),
    [
        (ModelError("it is in no folder"), PROGRAMS, "it is in no folder"),
        (INDEX, TimeoutError(), "TimeoutError"),
        (INDEX, ModelError("the router does not give the layer programs"), "does not give the layer programs"),
        (INDEX, SimpleNamespace(layers={1: None}), "the layer programs of layer 0 experts 0-3"),
        (SimpleNamespace(expert_layers=(1,), n_expert=8, paths=("m.gguf",)), PROGRAMS, "m.gguf does not have"),
    ],
)
async def test_a_plan_that_cannot_be_followed_is_a_problem_and_tried_again(
    copy: Any, programs: Any, problem: str
) -> None:
    rig = Rig(HOLDS, NODE)
    rig.peers, rig.copy, rig.programs = [ROUTER], copy, programs
    async with asyncio.TaskGroup() as tasks:
        await rig.supervisor._take_steps(tasks)
        assert problem in rig.supervisor.problem and rig.wanted == [] and rig.model.fetched is None
        await rig.supervisor._take_steps(tasks)
        assert problem in rig.published[-1].problem  # everybody sees why
        rig.copy, rig.programs = INDEX, PROGRAMS
        await rig.supervisor._take_steps(tasks)
        assert rig.supervisor.problem == "" and rig.wanted == [(INDEX, PROGRAMS, MINE)]
        assert rig.asked[-1] == "http://10.0.0.2:4100" and rig.model.fetched is INDEX


async def test_nothing_is_wanted_while_a_copy_is_looked_for() -> None:
    rig = Rig(HOLDS, NODE)
    rig.peers, rig.copy = [ROUTER], None
    async with asyncio.TaskGroup() as tasks:
        await rig.supervisor._take_steps(tasks)
    assert rig.wanted == [] and rig.supervisor.problem == "" and rig.asked == []


async def test_a_node_gets_ready_to_route_what_the_others_have() -> None:
    rig = Rig(Own(4100))
    rig.peers = [peer("2", model=MODEL)]
    async with asyncio.TaskGroup() as tasks:
        await rig.supervisor._take_steps(tasks)
        assert rig.model.fetched is INDEX and rig.asked == [""]
        rig.model.fetched, rig.copy = None, ModelError("the disk is full")
        await rig.supervisor._take_steps(tasks)
        assert rig.supervisor.problem == "the disk is full" and rig.supervisor.role is None


async def test_a_problem_with_the_plan_is_told_before_one_with_the_model() -> None:
    rig = Rig(HOLDS, replace(ABLE, wanted="other"))
    async with asyncio.TaskGroup() as tasks:
        await rig.supervisor._take_steps(tasks)
        assert "no node that answers has a model 'other'" in rig.supervisor.problem
        rig.peers = [ROUTER]
        await rig.supervisor._take_steps(tasks)
        assert rig.supervisor.problem == "this node was told to serve other, and the router serves model.gguf"


async def test_a_change_is_acted_on_at_once() -> None:
    rig = Rig(HOLDS, NODE)
    running = asyncio.create_task(rig.supervisor.run())
    for _ in range(2):
        rig.changed.set()
        async with asyncio.timeout(0.9):  # before the second is over
            await rig.supervisor.next_round()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(rig.published) >= 1 and len(rig.kept) >= 1
