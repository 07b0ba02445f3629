"""The parts of the gossip core by themselves: merging, suspicion, news, ring, addresses, pulls, candidates, timers."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.address import Address, normalised
from gossip.errors import GossipError
from gossip.limits import (
    CANDIDATES_MAX,
    COUNTER_MAX,
    PATHS_MAX,
    PULLS_MAX,
    RECORD_BYTES_MAX,
    RECORDS_BYTES_MAX,
    TOMBSTONES_MAX,
)
from gossip.messages import Update
from gossip.state import NodeId, Status, first_counter, first_version, supersedes
from gossip.swim.broadcasts import Broadcasts
from gossip.swim.candidates import Candidates
from gossip.swim.events import Received
from gossip.swim.lifeguard import LocalHealth, Suspicion
from gossip.swim.members import Members
from gossip.swim.paths import Paths
from gossip.swim.pulls import Pulls
from gossip.swim.ring import ProbeRing
from gossip.swim.settings import Settings
from gossip.swim.timers import Timers
from rigs.gossip_core import ALICE, BOB, CAROL, DAVE, SELF, Core, address, node, packet, record

SETTINGS = Settings()
HERE, THERE, ELSEWHERE = (Address(f"10.1.1.{i}", 4100) for i in (1, 2, 3))

# --- merging

BELIEFS = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(BELIEFS, BELIEFS, BELIEFS)
def test_beliefs_are_a_lattice(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> None:
    def join(x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
        return x if supersedes(*x, *y) else y

    assert join(a, a) == a and join(a, b) == join(b, a) and join(a, join(b, c)) == join(join(a, b), c)


UPDATES = st.builds(
    Update,
    st.sampled_from([ALICE, BOB, CAROL]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.sampled_from([ALICE, BOB, CAROL, DAVE]), max_size=3, unique=True).map(tuple),
)


@given(st.lists(UPDATES, max_size=8), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_news_means_the_same_in_any_order_and_however_often_it_comes(updates: list[Update], random: Random) -> None:
    """The merging of beliefs of known members is idempotent, commutative and associative."""
    beliefs = []
    for order in (updates, random.sample(updates, len(updates)), updates + updates[::-1]):
        core = Core()
        core.meet(ALICE, BOB, CAROL)
        parts = [order] if random.random() < 0.5 else [[update] for update in order]
        for part in parts:
            core.take(Received(packet(DAVE, updates=tuple(part)), address(DAVE)))
        beliefs.append([core.belief(of) for of in (ALICE, BOB, CAROL)])
    assert beliefs[0] == beliefs[1] == beliefs[2]
    for of, belief in zip((ALICE, BOB, CAROL), beliefs[0], strict=True):
        told = [update for update in updates if update.node == of]
        assert belief[2] == max([1, *(update.version for update in told)])
        highest = max([(1, 0), *((update.incarnation, update.status) for update in told)])
        assert belief[:2] == (highest[0], Status(highest[1]).name)


def test_each_boot_counts_from_above_the_last() -> None:
    random = Random(1)
    for boot in (1, 2, 1000, 1_000_000):
        assert first_counter(boot) <= first_version(boot, random) < first_counter(boot + 1) <= COUNTER_MAX


OWN = Update(SELF, 1, 0, 1)


def test_equal_views_have_equal_hashes_and_others_do_not() -> None:
    def view(*members: tuple[NodeId, int, Status, int], own: Update = OWN) -> bytes:
        all_members = Members(NodeId(own.node))
        for of, incarnation, status, version in members:
            member = all_members.add(of, 1, 1, "", 0.0)
            all_members.keep_record(member, record(of))
            all_members.change(member, 0.0, incarnation=incarnation, status=status, version=version)
        return all_members.hash(own)

    alice, bob = (ALICE, 2, Status.ALIVE, 3), (BOB, 1, Status.ALIVE, 1)
    same = view(alice, bob)
    assert view(bob, alice) == same and len(same) == 16
    # The same swarm as Alice sees it, and with a suspicion that will pass.
    assert view((SELF, 1, Status.ALIVE, 1), bob, own=Update(ALICE, 2, 0, 3)) == same
    assert view(alice, (BOB, 1, Status.SUSPECT, 1)) == same
    for other in (view(alice), view(alice, (BOB, 1, Status.DEAD, 1)), view(alice, (BOB, 2, Status.ALIVE, 1))):
        assert other != same
    assert view(alice, (BOB, 1, Status.ALIVE, 2)) != same


def test_records_are_replaced_by_newer_ones_alone_and_bounded_together() -> None:
    members = Members(SELF)
    alice = members.add(ALICE, 1, 1, "", 0.0)
    assert members.keep_record(alice, record(ALICE, 5, b"five")) and not members.keep_record(
        alice, record(ALICE, 5, b"5")
    )
    assert not members.keep_record(alice, record(ALICE, 4, b"four")) and alice.record.payload == b"five"
    assert members.keep_record(alice, record(ALICE, 6, b"")) and members.record_bytes == 0
    big = bytes(RECORD_BYTES_MAX)
    fitting = RECORDS_BYTES_MAX // RECORD_BYTES_MAX
    kept = [
        members.keep_record(members.add(node(i), 1, 1, "", 0.0), record(node(i), 1, big)) for i in range(fitting + 2)
    ]
    assert kept == [True] * fitting + [False] * 2
    members.forget(members.get(node(0)), 0.0)
    assert members.keep_record(members.get(node(fitting)), record(node(fitting), 1, big))


def test_tombstones_are_bounded_and_the_oldest_go_first() -> None:
    members = Members(SELF)
    for i in range(TOMBSTONES_MAX + 5):
        members.forget(members.add(node(i), i, 1, "", 0.0), float(i))
    assert members.n_buried == TOMBSTONES_MAX
    assert members.buried(node(4)) is None and members.buried(node(5)) == 5
    members.forget_tombstones(100.0)
    assert members.buried(node(99)) is None and members.buried(node(100)) == 100


# --- suspicion


@pytest.mark.parametrize("n", [2, 3, 4, 10, 100, 1000])
@pytest.mark.parametrize("confirmations", [0, 1, 2, 5])
def test_suspicion_is_lifeguards(n: int, confirmations: int) -> None:
    suspicion = Suspicion(100.0, {SELF})
    for i in range(confirmations):
        suspicion.confirm(node(i), SETTINGS)
    shortest = 4 * max(1.0, math.log10(n))
    longest = 6 * shortest
    counted = min(confirmations, 2)
    expected = (
        max(shortest, longest - (longest - shortest) * math.log(counted + 1) / math.log(3)) if n >= 4 else shortest
    )
    assert suspicion.deadline_s(n, SETTINGS) == pytest.approx(100.0 + expected)


def test_each_accuser_counts_once() -> None:
    suspicion = Suspicion(0.0, {ALICE})
    assert not suspicion.confirm(ALICE, SETTINGS)
    assert suspicion.confirm(BOB, SETTINGS) and not suspicion.confirm(BOB, SETTINGS)
    assert suspicion.confirm(CAROL, SETTINGS) and not suspicion.confirm(DAVE, SETTINGS)
    assert suspicion.accusers == {ALICE, BOB, CAROL}


def test_health_is_bounded_and_scales_times() -> None:
    health = LocalHealth(8)
    assert health.scaled(0.5) == 0.5
    health.worse(100)
    assert health.score == 7 and health.scaled(0.5) == 4.0
    for _ in range(20):
        health.better()
    assert health.score == 0


# --- news


def test_news_is_sent_least_sent_first_then_newest_first() -> None:
    news = Broadcasts()
    news.add(ALICE)
    assert list(news.pick(9, 3)) == [ALICE]
    news.add(BOB)
    news.add(CAROL)
    assert list(news.pick(2, 3)) == [CAROL, BOB]
    assert set(news.pick(9, 3)) == set(news.pick(9, 3)) == {ALICE, BOB, CAROL}  # three times each
    assert len(news) == 0 and not list(news.pick(9, 3))


@given(st.lists(st.tuples(st.sampled_from("acpd"), st.integers(0, 5)), max_size=60), st.integers(1, 4))
def test_each_news_is_sent_so_often_and_no_more(steps: list[tuple[str, int]], transmits: int) -> None:
    news, sent = Broadcasts(), Counter[NodeId]()
    waiting: set[NodeId] = set()
    for step, number in steps:
        of = node(number)
        if step == "a":
            news.add(of)
            sent[of] = 0
            waiting.add(of)
        elif step == "d":
            news.discard(of)
            waiting.discard(of)
        else:
            for picked in news.pick(number, transmits):
                assert picked in waiting
                sent[picked] += 1
                if sent[picked] == transmits:
                    waiting.discard(picked)
        assert len(news) == len(waiting)


# --- the ring


def test_everybody_is_probed_once_a_round_and_newcomers_wait_no_longer_than_one() -> None:
    ring = ProbeRing(Random(3))
    for i in range(20):
        ring.add(node(i))
    rounds = [[ring.next() for _ in range(20)] for _ in range(3)]
    assert rounds[0] == rounds[1] == rounds[2] and len(set(rounds[0])) == 20
    assert rounds[0] != [node(i) for i in range(20)]
    for i in range(7):
        ring.next()
        ring.add(node(100 + i))
        assert node(100 + i) in {ring.next() for _ in range(len(ring))}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_the_ring_holds_whom_it_was_given(steps: list[tuple[bool, int]]) -> None:
    ring, expected = ProbeRing(Random(1)), set()
    for is_added, number in steps:
        (ring.add if is_added else ring.remove)(node(number))
        (expected.add if is_added else expected.discard)(node(number))
        # One round from here meets all of them.
        assert {ring.next() for _ in range(len(ring))} == expected == set(ring)
    assert (ring.next() is None) == (not expected)


def test_samples_are_of_different_members() -> None:
    ring = ProbeRing(Random(1))
    assert ring.sample(3) == []
    for i in range(50):
        ring.add(node(i))
    drawn = Counter(member for _ in range(2000) for member in set(ring.sample(3, without=node(7))))
    assert node(7) not in drawn and sum(drawn.values()) == 6000
    assert len(drawn) == 49 and max(drawn.values()) < 2 * min(drawn.values())


def test_a_sample_of_few_is_all_of_them() -> None:
    ring = ProbeRing(Random(1))
    for i in range(4):
        ring.add(node(i))
    assert set(ring.sample(9, without=node(2))) == {node(0), node(1), node(3)}
    assert all(len(set(ring.sample(3, without=node(2)))) == 3 for _ in range(50))


# --- addresses


def test_addresses_have_one_spelling() -> None:
    assert normalised("::ffff:10.1.2.3", 4100) == Address("10.1.2.3", 4100)
    assert normalised("FE80:0::1%eth0", 1) == Address("fe80::1%eth0", 1) and str(normalised("::1", 5)) == "[::1]:5"
    for host, port in [
        ("", 1),
        ("host", 1),
        ("0.0.0.0", 1),
        ("::", 1),
        ("ff02::1", 1),
        ("10.0.0.1", 0),
        ("10.0.0.1", 65536),
    ]:
        with pytest.raises(GossipError):
            normalised(host, port)
    for scope in ("a" * 16, "../etc", "ä"):
        with pytest.raises(GossipError):
            normalised(f"fe80::1%{scope}", 1)


def test_the_address_that_answers_is_used() -> None:
    paths = Paths()
    paths.list_own((HERE, THERE, ELSEWHERE))
    assert paths.current == HERE  # the member's own first choice, until something is known
    paths.answered(THERE, 1.0, 0.002)
    assert paths.current == THERE
    paths.answered(ELSEWHERE, 2.0, 0.001)
    assert paths.current == THERE  # it works: no reason to change
    paths.failed(THERE, 3.0)
    assert paths.current == THERE  # once may be chance
    paths.failed(THERE, 4.0)
    assert paths.current == ELSEWHERE
    assert paths.alternatives(5) == [HERE, THERE]


def test_an_address_that_is_listed_no_longer_goes_unless_it_answers() -> None:
    paths = Paths()
    paths.add(ELSEWHERE, "it called")
    paths.list_own((HERE, THERE))
    assert {path.address for path in paths.all()} == {HERE, THERE, ELSEWHERE}
    paths.failed(ELSEWHERE, 1.0)
    paths.list_own((THERE,))
    assert [path.address for path in paths.all()] == [THERE] and paths.current == THERE
    paths.list_own(())
    assert paths.all() == [] and paths.current is None and paths.alternatives(3) == []


def test_addresses_are_bounded() -> None:
    paths = Paths()
    added = [paths.add(Address(f"10.2.2.{i}", 4100), "it called") for i in range(50)]
    assert added == [True] * PATHS_MAX + [False] * (50 - PATHS_MAX)


def test_people_see_how_it_stands_with_an_address() -> None:
    paths = Paths()
    paths.list_own((HERE, THERE))
    paths.answered(HERE, 1.0, 0.0021)
    here, there = paths.all()
    assert (here.describe(), there.describe()) == ("answers in 2.1 ms", "not tried")
    paths.failed(HERE, 2.0)
    paths.failed(THERE, 2.0)
    assert (here.describe(), there.describe()) == ("no longer answers", "did not answer")
    paths.answered_tcp(THERE)
    assert "TCP only" in there.describe()
    paths.answered(THERE, 3.0, None)
    assert there.describe() == "answers"


# --- pulls


def test_few_pulls_at_a_time_and_one_of_each_member() -> None:
    pulls = Pulls()
    for i in range(10):
        pulls.want(node(i), HERE)
        pulls.want(node(i), HERE)
    running = [pulls.next(0.0) for _ in range(PULLS_MAX)]
    assert len(set(running)) == PULLS_MAX and pulls.next(0.0) is None and pulls.next_s() is None
    pulls.done(running[0])
    assert pulls.next(0.0) not in running
    assert len(pulls) == 9


def test_a_pull_that_fails_goes_to_others_at_once_and_then_waits_longer_and_longer() -> None:
    pulls, random = Pulls(), Random(1)
    pulls.want(ALICE, HERE)
    now_s, waits, asked = 0.0, [], []
    for _ in range(26):
        assert pulls.next(now_s) == ALICE
        source = pulls.source(ALICE, [THERE], [ELSEWHERE], random)
        asked.append(source)
        pulls.failed(ALICE, now_s)
        waits.append(pulls.next_s() - now_s)
        now_s = pulls.next_s()
    assert waits[:8] == [0, 0, 0, 0.5, 0, 0, 0, 1.0] and max(waits) == 8.0
    assert all(set(asked[i : i + 4]) == {HERE, THERE, ELSEWHERE, None} for i in (0, 4, 8))


def test_a_pull_asks_few_of_many() -> None:
    pulls, random = Pulls(), Random(1)
    pulls.want(ALICE, None)
    pulls.next(0.0)
    sources = [pulls.source(ALICE, [], [Address(f"10.5.5.{i}", 1)], random) for i in range(6)]
    assert sources.index(None) == 4


def test_newer_news_starts_a_pull_anew() -> None:
    pulls, random = Pulls(), Random(1)
    pulls.want(ALICE, None)
    pulls.next(0.0)
    assert pulls.source(ALICE, [], [], random) is None
    pulls.failed(ALICE, 0.0)
    assert pulls.next(0.1) is None
    pulls.want(ALICE, THERE)
    assert pulls.next(0.1) == ALICE and pulls.source(ALICE, [], [], random) == THERE


# --- candidates


def test_candidates_are_tried_less_and_less_often_but_for_ever() -> None:
    candidates = Candidates(SETTINGS)
    candidates.add(HERE, "seed", 0.0)
    tried = []
    now_s = 0.0
    while now_s < 1000:
        assert [candidate.address for candidate in candidates.due(now_s)] == [HERE]
        tried.append(now_s)
        now_s = candidates.next_s()
    assert tried[:5] == [0, 1, 3, 7, 12] and tried[-1] > 990


def test_an_announcement_again_tries_again_but_not_in_the_same_second() -> None:
    candidates = Candidates(SETTINGS)
    candidates.add(HERE, "mDNS", 0.0)
    for now_s in (0.0, 1.0, 3.0, 7.0):
        candidates.due(now_s)
    candidates.add(HERE, "mDNS", 7.5)
    assert candidates.next_s() == 8.0
    candidates.due(8.0)
    assert candidates.next_s() == 9.0
    candidates.add(HERE, "seed", 20.0)
    assert candidates.next_s() == 20.0 and candidates.get(HERE).source == "seed"


def test_candidates_are_bounded() -> None:
    candidates = Candidates(SETTINGS)
    for i in range(CANDIDATES_MAX + 10):
        candidates.add(Address(f"10.7.{i // 250}.{i % 250}", 4100), "mDNS", 0.0)
    assert len(candidates) == len(candidates.due(0.0)) == CANDIDATES_MAX


# --- timers


class Diary:
    """What was done, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[float, object]] = []

    def note(self, now_s: float, subject: object) -> None:
        self.done.append((now_s, subject))


def test_timers_are_done_in_order_and_once() -> None:
    timers, diary = Timers(), Diary()
    for when_s in (3.0, 1.0, 2.0):
        timers.set(when_s, diary.note, when_s)
    timers.run(0.5)
    assert diary.done == [] and timers.next_s == 1.0
    timers.run(2.5)
    assert diary.done == [(2.5, 1.0), (2.5, 2.0)] and timers.next_s == 3.0
    timers.cancel(diary.note, 3.0)
    assert timers.next_s == float("inf") and len(timers) == 0


def test_a_timer_can_be_brought_forward_and_not_put_off() -> None:
    timers, diary = Timers(), Diary()
    timers.set(5.0, diary.note, "a")
    timers.set(9.0, diary.note, "a")
    timers.set(2.0, diary.note, "a")
    timers.set(7.0, diary.note, "b")
    timers.run(2.0)
    timers.run(10.0)
    assert diary.done == [(2.0, "a"), (10.0, "b")]
    timers.set(11.0, diary.note, "a")
    timers.run(11.0)
    assert diary.done[-1] == (11.0, "a")
