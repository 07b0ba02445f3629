"""Membership: who is there, from records that come late, twice, from elsewhere and in masses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from node.membership import CANDIDATES_MAX, DEAD_AFTER_S, FORGET_AFTER_S, PEERS_MAX, Membership
from node.records import VERSION, Record

OWN = "0" * 16
URL = "http://10.0.0.2:4100"


def record(number: int = 1, boot: int = 1, sequence: int = 1, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "version": VERSION,
        "swarm": "default",
        "node": f"{number:016x}",
        "boot": boot,
        "sequence": sequence,
        "name": f"node{number}",
        "build": "b",
        "platform": "p",
        "addresses": (),
        "port": 4100,
        "expert_port": 4101,
        "devices": (),
        "memory_bytes": 1,
        "can_route": False,
    }
    return Record(**{**fields, **changes})


@pytest.fixture
def members() -> Membership:
    return Membership(OWN, "default")


def test_news_is_a_new_peer_or_a_changed_record(members: Membership) -> None:
    assert members.heard(record(), URL, 0.0)
    assert not members.heard(record(), URL, 1.0)
    assert members.heard(record(sequence=2, memory_bytes=2), URL, 2.0)
    assert members.heard(record(boot=2, sequence=1), URL, 3.0)
    assert members.known()[record().node].heard_s == 3.0


@given(st.permutations([(b, s) for b in (1, 2, 3) for s in (1, 2, 3)]))
def test_an_old_record_never_replaces_a_newer_one(order: list[tuple[int, int]]) -> None:
    members = Membership(OWN, "default")
    newest = (0, 0)
    for boot, sequence in order:
        news = members.heard(record(1, boot, sequence), URL, 0.0)
        assert news == ((boot, sequence) > newest)
        newest = max(newest, (boot, sequence))
        known = members.known()[record().node].record
        assert (known.boot, known.sequence) == newest


def test_dead_then_forgotten(members: Membership) -> None:
    members.heard(record(), URL, 100.0)
    node_id = record().node
    assert node_id in members.alive(100.0 + DEAD_AFTER_S)
    assert node_id not in members.alive(100.0 + DEAD_AFTER_S + 0.01)
    assert node_id in members.known()
    assert members.forget(100.0 + FORGET_AFTER_S) == []
    (gone,) = members.forget(100.0 + FORGET_AFTER_S + 0.01)
    assert gone.record.node == node_id
    assert members.known() == {}


def test_a_silent_peer_that_comes_back_is_alive_at_once(members: Membership) -> None:
    members.heard(record(), URL, 0.0)
    assert not members.heard(record(), URL, 30.0)
    assert record().node in members.alive(30.0)


@pytest.mark.parametrize("stranger", [record(0), record(1, swarm="other")])
def test_this_node_itself_and_other_swarms_are_no_peers(members: Membership, stranger: Record) -> None:
    members.announce(URL, "multicast DNS")
    assert URL in members.targets()
    assert not members.heard(stranger, URL, 0.0)
    assert members.known() == {}
    assert URL not in members.targets()
    # Its address may be a peer's later: one that calls, or is announced anew.
    members.withdraw(URL)
    assert members.announce(URL, "multicast DNS")
    assert URL in members.targets()


def test_who_calls_after_a_refusal_is_a_peer(members: Membership) -> None:
    members.announce(URL, "seed")
    members.heard(record(swarm="other"), URL, 0.0)
    assert members.heard(record(), URL, 1.0)
    assert set(members.targets()) == {URL}
    assert members.source(URL) == "seed"
    assert members.source("http://10.0.0.3:4100") == "it called"


def test_goodbye_ends_this_boot_only(members: Membership) -> None:
    members.heard(record(boot=2), URL, 0.0)
    assert not members.said_goodbye(record().node, 1)
    assert not members.said_goodbye("f" * 16, 2)
    assert members.said_goodbye(record().node, 2)
    assert members.known() == {}
    # It still answers heartbeats until its last connection is closed.
    assert not members.heard(record(boot=2, sequence=9), URL, 0.1)
    assert members.known() == {}
    assert members.heard(record(boot=3), URL, 1.0)


def test_a_peer_survives_the_end_of_its_announcement(members: Membership) -> None:
    members.announce(URL, "multicast DNS")
    members.heard(record(), URL, 0.0)
    assert not members.unreachable(URL)
    members.withdraw(URL)
    assert set(members.targets()) == {URL}
    assert members.unreachable("http://10.0.0.9:1")


def test_bounds(members: Membership) -> None:
    announced = [members.announce(f"http://10.0.{n // 250}.{n % 250}:1", "seed") for n in range(CANDIDATES_MAX + 50)]
    assert announced == [True] * CANDIDATES_MAX + [False] * 50
    for number in range(1, PEERS_MAX + 50):
        members.heard(record(number), f"http://10.1.0.{number}:1", 0.0)
    assert len(members.known()) == PEERS_MAX
    # Those that are there are heard, and a place that is given up is taken.
    assert members.heard(record(1, sequence=2), "http://10.1.0.1:1", 1.0)
    members.said_goodbye(record(1).node, 1)
    assert members.heard(record(PEERS_MAX + 1), "http://10.1.0.99:1", 1.0)


def test_strangers_from_ever_new_ports_fill_no_memory(members: Membership) -> None:
    for port in range(1, 5000):
        members.heard(record(1, swarm="other"), f"http://10.0.0.1:{port}", 0.0)
        members.heard(record(0), f"http://10.0.0.2:{port}", 0.0)
    assert sum(len(value) for value in vars(members).values() if isinstance(value, dict)) == 0


class AnyOrder(RuleBasedStateMachine):
    """Whatever is called in whatever order, the table stays within what it promises."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Membership(OWN, "default")
        self.now_s = 0.0
        self.newest: dict[str, tuple[int, int]] = {}
        self.departed: dict[str, int] = {}

    urls = st.integers(0, 5).map(lambda n: f"http://10.0.0.{n}:4100")

    @rule(url=urls)
    def announce(self, url: str) -> None:
        self.members.announce(url, "seed")

    @rule(url=urls)
    def withdraw(self, url: str) -> None:
        self.members.withdraw(url)

    @rule(
        url=urls,
        number=st.integers(0, 4),
        boot=st.integers(0, 2),
        sequence=st.integers(0, 3),
        swarm=st.sampled_from(["default", "other"]),
    )
    def heard(self, url: str, number: int, boot: int, sequence: int, swarm: str) -> None:
        one = record(number, boot, sequence, swarm=swarm)
        self.members.heard(one, url, self.now_s)
        if number != 0 and swarm == "default" and boot > self.departed.get(one.node, -1):
            self.newest[one.node] = max(self.newest.get(one.node, (0, 0)), (boot, sequence))

    @rule(number=st.integers(0, 4), boot=st.integers(0, 2))
    def goodbye(self, number: int, boot: int) -> None:
        if self.members.said_goodbye(record(number).node, boot):
            del self.newest[record(number).node]
            self.departed[record(number).node] = boot

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for peer in self.members.forget(self.now_s):
            assert self.now_s - peer.heard_s > FORGET_AFTER_S
            del self.newest[peer.record.node]

    @invariant()
    def holds(self) -> None:
        known = self.members.known()
        assert {i: (p.record.boot, p.record.sequence) for i, p in known.items()} == self.newest
        assert OWN not in known
        assert all(p.record.swarm == "default" for p in known.values())
        assert set(self.members.alive(self.now_s)) <= set(known)
        assert {p.url for p in known.values()} <= set(self.members.targets())


TestAnyOrder = AnyOrder.TestCase
