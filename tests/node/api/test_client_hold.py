"""When decodes are held for a client that left: the plan with a clock of its own, and a door that asks for it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.api import client_hold
from node.api.client_hold import HOLD_S, LONGEST_HOLD_S, PAUSE_S, HoldPlan
from node.api.front_door import Here, There
from rigs.door import Node, node
from rigs.fake_llama_server import Asked, FakeLlamaServer, fake_llama_server

CHAT = "/v1/chat/completions"
EVENT, LAST_EVENT = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
# What the plan gets wrong by adding seconds.
TINY_S = 1e-6


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plan(clock: Clock) -> HoldPlan:
    """With one request that stays."""
    plan = HoldPlan(clock)
    plan.opened()
    return plan


def leave(plan: HoldPlan) -> None:
    plan.opened()
    plan.closed(noticed=False)


def test_a_client_that_leaves_beside_another_is_held_for_at_once(plan: HoldPlan) -> None:
    assert plan.wait_s() is None
    plan.opened()
    assert plan.wait_s() is None
    plan.closed(noticed=False)
    assert plan.wait_s() == 0
    assert plan.begin() == HOLD_S > 1
    assert plan.wait_s() is None


def test_what_llama_server_is_done_with_needs_no_hold(plan: HoldPlan) -> None:
    plan.opened()
    plan.closed(noticed=True)
    assert plan.wait_s() is None


def test_nobody_is_held_while_nothing_else_runs_and_what_comes_a_second_later_finds_it_noticed(
    plan: HoldPlan, clock: Clock
) -> None:
    plan.opened()
    plan.closed(noticed=True)
    plan.closed(noticed=False)
    assert plan.wait_s() is None
    clock.now_s += HOLD_S + TINY_S
    plan.opened()
    assert plan.wait_s() is None


def test_what_comes_within_the_second_would_hide_the_leaver(plan: HoldPlan, clock: Clock) -> None:
    plan.closed(noticed=False)
    clock.now_s += 0.5
    assert plan.wait_s() is None
    plan.opened()
    assert plan.wait_s() == 0
    # As long as there is always somebody, it is never noticed.
    plan.opened()
    plan.closed(noticed=True)
    clock.now_s += 60
    plan.opened()
    assert plan.wait_s() == 0


def test_clients_that_leave_during_a_hold_share_it(plan: HoldPlan, clock: Clock) -> None:
    leave(plan)
    leave(plan)
    started_s = clock.now_s
    plan.begin()
    assert plan.wait_s() is None
    clock.now_s += 0.4
    leave(plan)
    assert plan.wait_s() == 0
    # A whole second is to pass after it has left: the hold becomes longer.
    assert plan.begin() == HOLD_S
    clock.now_s = started_s + LONGEST_HOLD_S - HOLD_S + 0.01
    leave(plan)
    # Too late for this one.
    wait_s = plan.wait_s()
    assert wait_s == pytest.approx(started_s + 0.4 + HOLD_S + PAUSE_S - clock.now_s)


def test_a_client_that_leaves_after_a_hold_waits_for_the_next(plan: HoldPlan, clock: Clock) -> None:
    leave(plan)
    plan.begin()
    clock.now_s += HOLD_S + 3
    leave(plan)
    assert plan.wait_s() == pytest.approx(PAUSE_S - 3)
    clock.now_s += 1
    leave(plan)
    assert plan.wait_s() == pytest.approx(PAUSE_S - 4)
    clock.now_s += PAUSE_S - 4
    assert plan.wait_s() == pytest.approx(0)
    plan.begin()
    assert plan.wait_s() is None


def test_a_client_that_waits_for_the_next_hold_does_not_need_it_once_all_was_quiet(
    plan: HoldPlan, clock: Clock
) -> None:
    leave(plan)
    plan.begin()
    clock.now_s += HOLD_S + 1
    leave(plan)
    plan.closed(noticed=True)
    assert plan.wait_s() is None
    clock.now_s += 2
    plan.opened()
    clock.now_s += 2 * PAUSE_S
    assert plan.wait_s() is None


@given(st.lists(st.tuples(st.floats(0, 4), st.sampled_from(["open", "whole", "left"])), max_size=60))
def test_holds_are_bounded_and_far_between_whatever_clients_do(steps: list[tuple[float, str]]) -> None:
    clock = Clock()
    plan = HoldPlan(clock)
    n_open = 0
    holds: list[list[float]] = []  # start and end of each

    def run_until(end_s: float) -> None:
        while (wait_s := plan.wait_s()) is not None and clock.now_s + wait_s <= end_s:
            clock.now_s += wait_s
            assert n_open > 0, "there is nobody to hold"
            started_s = clock.now_s
            ends_s = started_s + plan.begin()
            if holds and started_s < holds[-1][1]:
                holds[-1][1] = ends_s
            else:
                holds.append([started_s, ends_s])
        clock.now_s = end_s

    for after_s, what in steps:
        run_until(clock.now_s + after_s)
        if what == "open":
            plan.opened()
            n_open += 1
        elif n_open > 0:
            plan.closed(noticed=what == "whole")
            n_open -= 1
    run_until(clock.now_s + 100)
    for start_s, end_s in holds:
        assert HOLD_S - TINY_S <= end_s - start_s <= LONGEST_HOLD_S + TINY_S
    for (_, end_s), (start_s, _) in pairwise(holds):
        assert start_s - end_s >= PAUSE_S - TINY_S


# ---- the door


class Client:
    """A client of a door. ``begun``: it has something of the answer's body."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(session, url))

    async def _read(self, session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
        body = b""
        async with session.post(url, data=b"{}", headers={"Content-Type": "application/json"}) as answer:
            async for data in answer.content.iter_any():
                body += data
                self.begun.set()
            return answer.status, body


@dataclass
class Doors:
    """A node that routes and one that asks it, and for how many ms its llama-server was to be held."""

    llama: FakeLlamaServer
    one: Node
    two: Node
    session: aiohttp.ClientSession
    clients: list[Client] = field(default_factory=list)
    held_ms: list[int] = field(default_factory=list)
    to_be_closed: list[Asked] = field(default_factory=list)

    def hold(self, ms: int) -> None:
        assert all(is_closed(asked) for asked in self.to_be_closed)
        self.held_ms.append(ms)

    def client(self, path: str = CHAT) -> Client:
        """One of the node that routes."""
        return self._client(self.one.url + path)

    async def ask(self, url: str, path: str = CHAT) -> tuple[Client, Asked]:
        return self._client(url + path), await self.llama.next()

    def _client(self, url: str) -> Client:
        self.clients.append(Client(self.session, url))
        return self.clients[-1]

    async def leave(self, client: Client) -> None:
        """Has a client leave, and waits until the routing node has done what it does then."""
        n_open = self.one.door.open
        client.task.cancel()
        async with asyncio.timeout(50):
            while self.one.door.open == n_open:  # noqa: ASYNC110 (counted, not announced)
                await asyncio.sleep(0.01)
        for _ in range(3):
            await asyncio.sleep(0)


def is_closed(asked: Asked) -> bool:
    """Whether the other end of the connection is closed, as llama-server looks."""
    transport = asked._request.transport
    if transport is None or transport.is_closing():
        return True
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


@asynccontextmanager
async def doors() -> AsyncIterator[Doors]:
    async with (
        fake_llama_server() as llama,
        node(Here(llama.url, llama.api_key, 16)) as one,
        node(There("alpha", one.url)) as two,
        aiohttp.ClientSession() as session,
    ):
        rig = Doors(llama, one, two, session)
        one.agent.target = Here(llama.url, llama.api_key, 16, rig.hold)
        yield rig
        for client in rig.clients:
            client.task.cancel()
        await asyncio.wait([client.task for client in rig.clients])


@pytest.mark.parametrize("through", ["one", "two"])
@pytest.mark.parametrize("phase", ["no headers", "headers"])
async def test_a_door_asks_for_a_hold_once_the_connection_is_closed(phase: str, through: str) -> None:
    async with doors() as rig:
        await rig.ask(rig.two.url)
        leaver, asked = await rig.ask(getattr(rig, through).url)
        if phase == "headers":  # which llama-server sends before it reads the prompt
            await asked.start()
        assert not is_closed(asked)
        rig.to_be_closed = [asked]
        await rig.leave(leaver)
        assert rig.held_ms == [1100]


@pytest.mark.parametrize("through", ["one", "two"])
async def test_a_door_asks_for_no_hold_in_mid_stream_nor_at_the_end(through: str) -> None:
    async with doors() as rig:
        await rig.ask(rig.one.url)
        url = getattr(rig, through).url
        whole, asked = await rig.ask(url)
        await asked.stream(EVENT, LAST_EVENT)
        assert await whole.task == (200, EVENT + LAST_EVENT)
        leaver, asked = await rig.ask(url)
        await asked.start()
        await asked.send(EVENT)
        await leaver.begun.wait()
        await rig.leave(leaver)
        assert rig.held_ms == []


async def test_a_door_asks_for_no_hold_while_nothing_else_runs() -> None:
    async with doors() as rig:
        leaver, _ = await rig.ask(rig.one.url)
        counting, _ = await rig.ask(rig.one.url, "/v1/messages/count_tokens")  # which has no results to wait for
        await rig.leave(leaver)
        await rig.leave(counting)
        assert rig.held_ms == []


async def test_a_door_asks_for_no_hold_when_llama_server_breaks_or_is_not_there() -> None:
    async with doors() as rig:
        other, _ = await rig.ask(rig.one.url)
        broken, asked = await rig.ask(rig.one.url)
        asked.break_connection()
        assert (await broken.task)[0] == 502
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            rig.one.agent.target = Here(f"http://127.0.0.1:{closed.getsockname()[1]}", "key", 16, rig.hold)
            assert (await rig.client().task)[0] == 503
        assert rig.held_ms == [] and not other.task.done()


async def test_a_door_holds_the_llama_server_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that both leave within one hold on a busy machine too.
    monkeypatch.setattr(client_hold, "HOLD_S", 11.0)
    monkeypatch.setattr(client_hold, "LONGEST_HOLD_S", 20.0)
    async with doors() as rig, fake_llama_server() as newer:
        await rig.ask(rig.one.url)
        of_the_newer: list[int] = []
        old_leaver, _ = await rig.ask(rig.one.url)
        rig.one.agent.target = Here(newer.url, newer.api_key, 16, of_the_newer.append)
        clients = [rig.client() for _ in range(3)]
        for _ in clients:
            await newer.next()
        await rig.leave(old_leaver)
        assert (rig.held_ms, of_the_newer) == ([], [])
        await rig.leave(clients[0])
        await rig.leave(clients[1])  # which makes the same hold longer
        assert (rig.held_ms, of_the_newer) == ([], [11000, 11000])
