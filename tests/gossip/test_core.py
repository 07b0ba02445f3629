"""The gossip core by examples: what one node does when this happens to it. Whole swarms: test_simulation.py."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gossip.address import Address
from gossip.limits import CREDIBLE_MAX, INCOMPATIBLE_MAX, MEMBERS_MAX, PATHS_MAX, RELAYED_PINGS_MAX, UNCONFIRMED_MAX
from gossip.messages import (
    Kind,
    PingReply,
    PingRequest,
    PullReply,
    PullRequest,
    SyncReply,
    SyncRequest,
    Update,
)
from gossip.state import NodeId, Status, first_counter
from gossip.swim.events import (
    Announced,
    Ask,
    Change,
    Incompatible,
    Leaving,
    Notify,
    Published,
    Received,
    Replied,
    Send,
    Withdrawn,
)
from gossip.swim.settings import Settings
from rigs.gossip_core import ALICE, BOB, CAROL, DAVE, SELF, Core, address, chosen, node, packet, record

ALIVE, SUSPECT, DEAD, LEFT = (int(status) for status in Status)
SETTINGS = Settings()


def notices(actions: list, change: Change) -> list[NodeId]:
    return [notify.node for notify in chosen(actions, Notify) if notify.change is change]


# --- probes


def test_a_member_that_answers_is_well() -> None:
    core = Core()
    core.meet(ALICE)
    ping = core.wait_for_probe()
    assert (ping.address, ping.packet.target) == (address(ALICE), ALICE)
    core.now_s += 0.02
    core.hear(ALICE, Kind.ACK, ping.packet.sequence, target=ALICE)
    path = core.gossip.members.get(ALICE).paths.all()[0]
    assert path.rtt_s == pytest.approx(0.02) and path.failures == 0
    assert not [
        action for _, action in core.wait(0.9) if not isinstance(action, Notify) and action.address != address(ALICE)
    ]
    assert core.belief(ALICE) == (1, "ALIVE", 1) and core.gossip.health.score == 0


def test_one_that_does_not_answer_is_asked_in_every_other_way_and_then_suspected() -> None:
    core = Core()
    core.meet(ALICE, BOB, CAROL)
    second = Address("192.168.7.7", 4100)
    probed = NodeId(core.wait_for_probe().packet.target)
    member = core.gossip.members.get(probed)
    member.paths.add(second, "told")
    done = [(after_s, action) for after_s, action in core.wait(1.0) if not isinstance(action, Notify)]
    late = [action for after_s, action in done if after_s == pytest.approx(0.5)]
    helpers = [send for send in chosen(late, Send) if send.packet.kind == Kind.PING_REQUEST]
    assert {send.address for send in helpers} == {address(n) for n in (ALICE, BOB, CAROL) if n != probed}
    assert all(send.packet.target == probed and send.packet.address == address(probed) for send in helpers)
    assert [send.address for send in chosen(late, Send) if send.packet.kind == Kind.PING] == [second]
    assert [(ask.address, type(ask.request)) for ask in chosen(late, Ask)] == [(address(probed), PingRequest)]
    assert core.belief(probed) == (1, "SUSPECT", 1)
    assert member.suspicion.accusers == {SELF}


@pytest.mark.parametrize("way", ["helper", "tcp", "late"])
def test_an_answer_in_any_way_will_do(way: str) -> None:
    core = Core()
    core.meet(ALICE, BOB)
    ping = core.wait_for_probe()
    probed, helper = (ALICE, BOB) if ping.packet.target == ALICE else (BOB, ALICE)
    asks = chosen([action for _, action in core.wait(0.6)], Ask)
    if way == "helper":
        core.hear(helper, Kind.ACK, ping.packet.sequence, target=probed)
    elif way == "tcp":
        core.take(Replied(asks[0].token, PingReply(packet(probed, Kind.ACK, ping.packet.sequence, target=probed))))
        assert "TCP only" in core.gossip.members.get(probed).paths.all()[0].describe()
    else:
        core.hear(probed, Kind.ACK, ping.packet.sequence, target=probed)
    core.wait(0.4)
    assert core.belief(probed) == (1, "ALIVE", 1)


def test_an_acknowledgement_of_somebody_else_is_none() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    ping = core.wait_for_probe()
    probed, other = (ALICE, BOB) if ping.packet.target == ALICE else (BOB, ALICE)
    core.hear(other, Kind.ACK, ping.packet.sequence, target=other)  # who now has the address of the probed one
    core.hear(probed, Kind.ACK, ping.packet.sequence + 100, target=probed)
    core.wait(1.0)
    assert core.belief(probed) == (1, "SUSPECT", 1)


@pytest.mark.parametrize("nacks,score", [((), 2), ((BOB,), 1), ((BOB, CAROL), 0)])
def test_silent_helpers_make_a_node_doubt_itself(nacks: tuple[NodeId, ...], score: int) -> None:
    core = Core()
    core.meet(ALICE, BOB, CAROL)
    while (ping := core.wait_for_probe()).packet.target != ALICE:
        core.hear(NodeId(ping.packet.target), Kind.ACK, ping.packet.sequence, target=ping.packet.target)
    core.wait(0.95)
    for helper in nacks:
        core.hear(helper, Kind.NACK, ping.packet.sequence, target=ALICE)
    core.wait(0.1)
    assert core.belief(ALICE) == (1, "SUSPECT", 1)
    assert core.gossip.health.score == score


def test_bad_health_lengthens_the_probe() -> None:
    core = Core()
    core.meet(ALICE)
    core.gossip.health.worse(2)
    core.wait_for_probe()
    assert [after_s for after_s, action in core.wait(2.0) if isinstance(action, Ask)] == [pytest.approx(1.5)]
    assert core.belief(ALICE) == (1, "ALIVE", 1)
    core.wait(1.0)
    assert core.belief(ALICE) == (1, "SUSPECT", 1)


def test_a_member_without_any_address_is_probed_through_helpers() -> None:
    core = Core()
    core.meet(BOB)
    actions = core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 1),))
    core.take(Replied(chosen(actions, Ask)[0].token, PullReply(record(ALICE, hosts=()))))
    assert core.gossip.members.get(ALICE).address is None
    actions = core.keep_alive(4.0, BOB)
    ping_requests = [send for send in chosen(actions, Send) if send.packet.kind == Kind.PING_REQUEST]
    assert {(send.address, send.packet.target, send.packet.address) for send in ping_requests} == {
        (address(BOB), ALICE, None)
    }
    assert core.belief(ALICE) == (1, "SUSPECT", 1)


# --- pings of others


def test_pings_for_this_node_or_nobody_are_answered() -> None:
    core = Core()
    core.meet(ALICE)
    for target in (SELF, None):
        (ack,) = chosen(core.hear(ALICE, Kind.PING, 7, target=target), Send)
        assert (ack.address, ack.packet.kind, ack.packet.sequence, ack.packet.target) == (
            address(ALICE),
            Kind.ACK,
            7,
            SELF,
        )
    assert not chosen(core.hear(ALICE, Kind.PING, 8, target=BOB), Send)  # an address that was Bob's


def test_a_helper_relays_the_answer_or_says_that_there_is_none() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    (ping,) = chosen(core.hear(ALICE, Kind.PING_REQUEST, 7, target=BOB), Send)
    assert (ping.address, ping.packet.kind, ping.packet.target) == (address(BOB), Kind.PING, BOB)
    (ack,) = chosen(core.hear(BOB, Kind.ACK, ping.packet.sequence, target=BOB), Send)
    assert (ack.address, ack.packet.kind, ack.packet.sequence, ack.packet.target) == (address(ALICE), Kind.ACK, 7, BOB)
    assert not chosen(core.hear(BOB, Kind.ACK, ping.packet.sequence, target=BOB), Send)

    core.hear(ALICE, Kind.PING_REQUEST, 8, target=BOB)
    nacks = [a for _, a in core.wait(0.45) if isinstance(a, Send) and a.packet.kind == Kind.NACK]
    assert [(nack.address, nack.packet.sequence) for nack in nacks] == [(address(ALICE), 8)]


def test_a_helper_uses_the_address_it_is_given_if_it_knows_none() -> None:
    core = Core()
    core.meet(ALICE)
    (ping,) = chosen(core.hear(ALICE, Kind.PING_REQUEST, 7, target=BOB, address=("192.168.1.2", 4100)), Send)
    assert ping.address == Address("192.168.1.2", 4100)
    for nowhere in (None, ("swarm.example", 4100), ("0.0.0.0", 4100), ("224.0.0.1", 4100)):
        sends = chosen(core.hear(ALICE, Kind.PING_REQUEST, 7, target=BOB, address=nowhere), Send)
        assert [send.packet.kind for send in sends] in ([], [Kind.NACK])


def test_relays_are_bounded() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    pings = [
        len(chosen(core.hear(ALICE, Kind.PING_REQUEST, i, target=BOB), Send)) for i in range(RELAYED_PINGS_MAX + 5)
    ]
    assert sum(pings) == RELAYED_PINGS_MAX
    core.wait(2.1)
    assert core.gossip.sizes.relays == 0 and core.gossip.sizes.pings <= 1


# --- suspicion


def suspect(core: Core, *accusers: NodeId, of: NodeId = ALICE) -> list:
    return core.hear(accusers[0], updates=(Update(of, 1, SUSPECT, 1, accusers),))


@pytest.mark.parametrize(
    "n,accusers,dies_s",
    [
        # Lifeguard: max - (max - min) * log(c + 1) / log(k + 1); min = 4 * max(1, log10 n), max = 6 * min, k = 2.
        (2, 1, 4.0),  # there is nobody else to agree
        (3, 1, 4.0),
        (4, 1, 24.0),
        (4, 2, 11.38),  # 24 - 20 * log 2 / log 3
        (4, 3, 4.0),
        (100, 1, 48.0),
        (100, 2, 22.76),
        (100, 3, 8.0),
    ],
)
def test_a_suspect_dies_after_lifeguards_time(n: int, accusers: int, dies_s: float) -> None:
    core = Core()
    others = [node(i) for i in range(n - 2)]
    core.meet(ALICE, *others)
    now_s = core.now_s
    who = [SELF, *others][:accusers]
    core.take(
        Received(
            packet(ALICE if not others else others[0], updates=(Update(ALICE, 1, SUSPECT, 1, tuple(who)),)),
            address(ALICE),
        )
    )
    suspicion = core.gossip.members.get(ALICE).suspicion
    assert suspicion.deadline_s(n, SETTINGS) - now_s == pytest.approx(dies_s, abs=0.01)


def test_death_follows_and_is_told() -> None:
    core = Core()
    core.meet(ALICE, BOB, CAROL)
    assert notices(suspect(core, BOB), Change.SUSPECTED) == [ALICE]
    suspect(core, CAROL)
    suspect(core, CAROL, BOB)  # heard again: no more than two
    suspect(core, SELF)
    core.keep_alive(3.9, BOB, CAROL)
    assert core.belief(ALICE) == (1, "SUSPECT", 1)
    assert notices(core.keep_alive(0.2, BOB, CAROL), Change.DIED) == [ALICE]
    assert core.belief(ALICE) == (1, "DEAD", 1)


def test_only_the_accused_itself_clears_a_suspicion() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    suspect(core, BOB)
    core.hear(ALICE)  # it lives, but says nothing of the accusation
    core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 1),))
    assert core.belief(ALICE) == (1, "SUSPECT", 1)
    assert notices(core.hear(ALICE, incarnation=2), Change.CLEARED) == [ALICE]
    suspect(core, BOB)  # old news
    assert core.belief(ALICE) == (2, "ALIVE", 1)
    core.wait(0.5)
    assert core.gossip.members.get(ALICE).suspicion is None


def test_the_accused_is_told_whenever_it_speaks() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    suspect(core, BOB)
    for kind in (Kind.PING, Kind.NEWS):
        sends = [send for send in chosen(core.hear(ALICE, kind, 7), Send) if send.address == address(ALICE)]
        assert sends and all(send.packet.updates[0] == Update(ALICE, 1, SUSPECT, 1, (BOB,)) for send in sends)
    reply, _ = core.gossip.answer(core.now_s, PingRequest(packet(ALICE, Kind.PING, 9)), address(ALICE))
    assert reply.packet.updates[0] == Update(ALICE, 1, SUSPECT, 1, (BOB,))


@pytest.mark.parametrize("status", [SUSPECT, DEAD, LEFT])
def test_an_accusation_of_this_node_is_refuted(status: int) -> None:
    core = Core()
    core.meet(ALICE)
    before = core.gossip.incarnation
    core.hear(ALICE, updates=(Update(SELF, before, status, 0),))
    assert core.gossip.incarnation == before + 1 and core.gossip.refutations == 1 and core.gossip.health.score == 1
    sends = [action for _, action in core.wait(0.3) if isinstance(action, Send)]
    assert Update(SELF, before + 1, ALIVE, core.gossip.version) in sends[0].packet.updates
    core.hear(ALICE, updates=(Update(SELF, before, status, 0),))  # old news
    assert core.gossip.incarnation == before + 1


def test_a_life_that_the_disk_forgot_is_surpassed() -> None:
    core = Core()
    core.meet(ALICE)
    old, version = core.gossip.record, core.gossip.version
    core.hear(ALICE, updates=(Update(SELF, first_counter(5), ALIVE, version + 1000),))
    assert core.gossip.incarnation == first_counter(5) + 1 and core.gossip.version == version + 1001
    assert core.gossip.record.payload == old.payload
    core.hear(ALICE, updates=(Update(SELF, CREDIBLE_MAX + 1, DEAD, 0), Update(SELF, 0, ALIVE, CREDIBLE_MAX + 1)))
    assert core.gossip.incarnation == first_counter(5) + 1 and core.gossip.version == version + 1001


def test_who_says_less_of_itself_than_is_known_is_told() -> None:
    core = Core()
    core.meet(BOB)
    core.hear(ALICE, incarnation=9, version=9)
    (news,) = chosen(core.hear(ALICE, incarnation=3, version=4), Send)
    assert news.address == address(ALICE) and news.packet.updates[0] == Update(ALICE, 9, ALIVE, 9)


# --- a node that was late


def test_a_late_node_accuses_nobody_of_what_it_missed() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    suspect(core, BOB)
    dies_s = core.gossip.members.get(ALICE).suspicion.deadline_s(3, SETTINGS)
    core.wait_for_probe()
    core.now_s += 45.0  # SIGSTOP
    core.hear(BOB)
    assert core.gossip.members.get(ALICE).suspicion.deadline_s(3, SETTINGS) >= dies_s + 43
    assert core.belief(ALICE) == (1, "SUSPECT", 1) and core.belief(BOB) == (1, "ALIVE", 1)
    assert core.gossip.health.score >= 1


# --- leaving, dying, being forgotten


def test_a_goodbye_is_told_and_ends_everything() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    sends = chosen(core.take(Leaving()), Send)
    assert {send.address for send in sends} == {address(ALICE), address(BOB)}
    assert all(
        send.packet.updates == (core.gossip.own_update(),) and core.gossip.own_update().status == LEFT for send in sends
    )
    assert core.gossip.next_s == float("inf") and not core.hear(ALICE, Kind.PING, 7)


def test_who_left_is_not_probed_nor_looked_for() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    assert notices(core.hear(ALICE, updates=(Update(ALICE, 1, LEFT, 1),)), Change.LEFT) == [ALICE]
    sends = [a for a in core.keep_alive(20.0, BOB) if isinstance(a, Send) and a.address == address(ALICE)]
    assert not sends
    assert notices(core.hear(ALICE, incarnation=2), Change.JOINED) == [ALICE]  # it started again


def test_the_dead_are_pinged_now_and_then_with_the_accusation() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    core.hear(BOB, updates=(Update(ALICE, 1, DEAD, 1),))
    pings = [a for a in core.keep_alive(10.0, BOB) if isinstance(a, Send) and a.address == address(ALICE)]
    assert len(pings) >= 3 and all(ping.packet.updates[0].status == DEAD for ping in pings)


def test_the_dead_are_forgotten_in_two_steps() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    core.hear(BOB, updates=(Update(ALICE, 7, DEAD, 1),))
    actions = core.keep_alive(SETTINGS.dead_s + 6, BOB)
    assert notices(actions, Change.FORGOTTEN) == [ALICE] and core.belief(ALICE) is None
    # Old news does not bring it back, and if it speaks itself, it is told.
    core.hear(BOB, updates=(Update(ALICE, 7, ALIVE, 1),))
    (news,) = chosen(core.hear(ALICE, incarnation=7), Send)
    assert news.packet.updates[0] == Update(ALICE, 7, DEAD, 0) and core.belief(ALICE) is None
    assert notices(core.hear(ALICE, incarnation=8), Change.JOINED) == [ALICE]

    core.hear(BOB, updates=(Update(ALICE, 8, DEAD, 1),))
    core.gossip.members.forget_tombstones(core.now_s + 1)
    core.keep_alive(SETTINGS.dead_s + 6, BOB)
    assert core.gossip.members.buried(ALICE) == 8
    core.gossip.members.forget_tombstones(core.now_s + 1)
    assert core.gossip.members.buried(ALICE) is None


def test_one_that_comes_back_as_a_suspect_is_back_all_the_same() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    core.hear(BOB, updates=(Update(ALICE, 1, DEAD, 1),))
    core.hear(BOB, updates=(Update(ALICE, 1, DEAD, 9),))  # it has a new record, but nobody asks the dead
    actions = core.hear(BOB, updates=(Update(ALICE, 2, SUSPECT, 9, (BOB,)),))
    assert notices(actions, Change.JOINED) == notices(actions, Change.SUSPECTED) == [ALICE]
    assert [ask.request for ask in chosen(actions, Ask)] == [PullRequest(ALICE, 9)]
    assert ALICE in core.gossip.probed


# --- hearsay


def test_hearsay_is_not_passed_on_until_its_record_is_held() -> None:
    core = Core()
    core.meet(BOB)
    core.wait(3)
    hash_before = core.gossip.members.hash(core.gossip.own_update())
    actions = core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 1),))
    assert notices(actions, Change.JOINED) == [ALICE]
    told = [update.node for _, a in core.wait(1.9) if isinstance(a, Send) for update in a.packet.updates]
    assert ALICE not in told and core.gossip.members.hash(core.gossip.own_update()) == hash_before
    core.take(Replied(chosen(actions, Ask)[0].token, PullReply(record(ALICE))))
    told = [update.node for _, a in core.wait(1.0) if isinstance(a, Send) for update in a.packet.updates]
    assert ALICE in told and core.gossip.members.hash(core.gossip.own_update()) != hash_before


def test_one_that_stays_hearsay_is_forgotten() -> None:
    core = Core()
    core.meet(BOB)
    core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 1),))
    assert notices(core.keep_alive(SETTINGS.unconfirmed_s + 6, BOB), Change.FORGOTTEN) == [ALICE]
    assert core.gossip.sizes.pulls == 0
    assert notices(core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 1),)), Change.JOINED) == [ALICE]


def test_one_that_called_and_gives_no_record_is_probed() -> None:
    core = Core()
    core.hear(ALICE)
    assert core.wait_for_probe().packet.target == ALICE
    core = Core()
    core.meet(BOB)
    core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 1),))  # nobody knows where it is
    probed = {a.packet.target for a in core.keep_alive(5.0, BOB) if isinstance(a, Send) and a.packet.kind == Kind.PING}
    assert probed == {BOB}


def test_strangers_that_are_dead_are_not_met() -> None:
    core = Core()
    for status in (DEAD, LEFT):
        assert not notices(core.hear(BOB, updates=(Update(ALICE, 1, status, 1),)), Change.JOINED)[1:]
        assert core.belief(ALICE) is None


# --- records


def test_a_newer_record_is_fetched_from_its_owner_or_from_who_told() -> None:
    sources = set()
    for seed in range(20):
        core = Core(seed=seed)
        core.meet(ALICE, BOB)
        (ask,) = chosen(core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 5),)), Ask)
        assert ask.request == PullRequest(ALICE, 5)
        sources.add(ask.address)
        actions = core.take(Replied(ask.token, PullReply(record(ALICE, 6, b"new"))))
        assert notices(actions, Change.RECORD) == [ALICE]
        assert core.gossip.members.get(ALICE).record == record(ALICE, 6, b"new") and core.belief(ALICE) == (
            1,
            "ALIVE",
            6,
        )
    assert sources == {address(ALICE), address(BOB)}


def test_a_record_that_is_not_had_is_asked_for_elsewhere_and_later_again() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    asked = []
    actions = core.hear(BOB, updates=(Update(ALICE, 1, ALIVE, 5),))
    wrong = [
        None,
        PullReply(None),
        PullReply(record(BOB, 9)),
        PullReply(record(ALICE, 4)),
        PullReply(record(ALICE, CREDIBLE_MAX + 1)),
    ]
    for reply in wrong:
        while not (asks := [ask for ask in chosen(actions, Ask) if isinstance(ask.request, PullRequest)]):
            actions = [action for _, action in core.wait(0.1)]
        asked.append(asks[0].address)
        actions = core.take(Replied(asks[0].token, reply))
        assert core.belief(ALICE)[2] == 5
    assert set(asked[:2]) == {address(ALICE), address(BOB)}


def test_records_are_given_to_who_asks() -> None:
    core = Core()
    core.meet(ALICE)
    ask = lambda of, version: core.gossip.answer(core.now_s, PullRequest(of, version), None)[0].record  # noqa: E731
    assert ask(SELF, 0) == core.gossip.record
    assert ask(ALICE, 1) == record(ALICE) and ask(ALICE, 2) is None and ask(BOB, 0) is None


def test_publishing_makes_a_new_version_only_if_something_changed() -> None:
    core = Core()
    version = core.gossip.version
    core.take(Published((address(SELF).host,), 4100, b"mine"))
    assert core.gossip.version == version
    core.take(Published((address(SELF).host,), 4100, b"new"))
    assert core.gossip.version == version + 1 and core.gossip.record.payload == b"new"


def test_records_of_another_life_have_other_versions() -> None:
    versions = {Core(boot=1, seed=seed).gossip.version for seed in range(50)}
    assert len(versions) == 50
    assert all(first_counter(1) < version < first_counter(2) - 1000 for version in versions)


# --- comparing views


def test_views_that_are_equal_are_not_sent() -> None:
    core = Core()
    core.meet(ALICE)
    request = SyncRequest(ALICE, 1, 1, core.gossip.members.hash(core.gossip.own_update()))
    reply, _ = core.gossip.answer(core.now_s, request, address(ALICE))
    assert reply.members == () and reply.hash == request.hash
    reply, _ = core.gossip.answer(core.now_s, replace_hash(request), address(ALICE))
    assert {update.node for update in reply.members} == {SELF, ALICE}


def replace_hash(request: SyncRequest) -> SyncRequest:
    return SyncRequest(request.sender, request.incarnation, request.version, bytes(16), request.members)


def test_who_lacks_something_is_given_the_whole_view() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    asks: list[Ask] = []
    while not asks:
        asks = [a for _, a in core.wait(1.0) if isinstance(a, Ask) and isinstance(a.request, SyncRequest)]
    assert asks[0].request.members == ()
    reply = SyncReply(ALICE, 1, 1, bytes(16), (Update(ALICE, 1, ALIVE, 1),))
    (again,) = [
        ask for ask in chosen(core.take(Replied(asks[0].token, reply)), Ask) if isinstance(ask.request, SyncRequest)
    ]
    assert {update.node for update in again.request.members} == {SELF, ALICE, BOB}
    # And that is the end of it, whatever the other says.
    assert not [
        a for a in core.take(Replied(again.token, reply)) if isinstance(a, Ask) and isinstance(a.request, SyncRequest)
    ]


def test_the_dead_of_another_view_are_suspects_here() -> None:
    core = Core()
    core.meet(ALICE, BOB)
    core.gossip.answer(core.now_s, SyncRequest(BOB, 1, 1, bytes(16), (Update(ALICE, 1, DEAD, 1),)), address(BOB))
    assert core.belief(ALICE) == (1, "SUSPECT", 1) and core.gossip.members.get(ALICE).suspicion.accusers == {BOB}


def test_one_that_appears_is_compared_with_but_not_all_at_once() -> None:
    core = Core()
    asks = [ask for i in range(20) for ask in chosen(core.hear(node(i)), Ask) if isinstance(ask.request, SyncRequest)]
    assert len(asks) == 1


# --- finding others


def test_an_announced_address_is_tried_at_once_even_while_others_wait() -> None:
    core = Core()
    here, there = Address("10.9.9.1", 4100), Address("10.9.9.2", 4100)
    assert [send.address for send in chosen(core.take(Announced(here, "mDNS")), Send)] == [here]
    core.wait(30.0)
    assert [send.address for send in chosen(core.take(Announced(there, "mDNS")), Send)] == [there]
    assert not chosen(core.take(Announced(there, "mDNS")), Send)  # an announcement again is no reason for a ping again


def test_an_address_is_tried_for_ever_by_udp_and_tcp_less_and_less_often() -> None:
    core = Core()
    core.take(Announced(Address("10.9.9.1", 4100), "seed"))
    done = core.wait(3600.0)
    pings = [after_s for after_s, action in done if isinstance(action, Send)]
    gaps = [later - earlier for earlier, later in pairwise(pings)]
    assert gaps[0] == pytest.approx(2.0) and max(gaps) == pytest.approx(SETTINGS.candidate_retry_max_s)
    assert pings[-1] > 3590
    assert len([action for _, action in done if isinstance(action, Ask)]) == pytest.approx(len(pings) / 2, abs=1)


def test_candidates_end() -> None:
    core = Core()
    here = Address("10.9.9.1", 4100)
    (ping,) = chosen(core.take(Announced(here, "mDNS")), Send)
    core.take(Received(packet(ALICE, Kind.ACK, ping.packet.sequence, target=ALICE), here))
    candidate = core.gossip.candidates.get(here)
    assert candidate.member == ALICE and core.gossip.members.get(ALICE).address == here
    core.take(Withdrawn(here))
    assert core.gossip.candidates.get(here) is None


def test_an_address_of_its_own_is_noticed() -> None:
    core = Core()
    (ping,) = chosen(core.take(Announced(address(SELF), "mDNS")), Send)
    assert not core.take(Received(ping.packet, address(SELF)))
    assert core.gossip.candidates.get(address(SELF)).problem == "this node itself"
    assert core.gossip.twin is None and len(core.gossip.members) == 0


def test_a_probe_that_comes_back_is_no_sign_of_life() -> None:
    core = Core()
    core.meet(ALICE)
    core.gossip.members.get(ALICE).paths.current = address(SELF)
    ping = core.wait_for_probe()
    core.take(Received(ping.packet, address(SELF)))
    core.wait(1.0)
    assert core.belief(ALICE) == (1, "SUSPECT", 1)


def test_another_node_with_the_same_id_is_noticed() -> None:
    core = Core()
    elsewhere = Address("10.9.9.9", 4100)
    ping = packet(SELF, Kind.PING, 1, incarnation=core.gossip.incarnation)
    assert not core.take(Received(packet(SELF, Kind.PING, 1, incarnation=core.gossip.incarnation - 1), elsewhere))
    assert core.gossip.twin is None  # a packet of this node's life before
    core.take(Received(ping, elsewhere))
    assert core.gossip.twin == elsewhere


def test_nodes_of_another_version_are_shown_and_given_nothing() -> None:
    core = Core()
    here = Address("10.9.9.1", 4100)
    core.take(Announced(here, "mDNS"))
    core.take(Incompatible(here, 9))
    assert core.gossip.incompatible == {"10.9.9.1": 9} and "version 9" in core.gossip.candidates.get(here).problem
    for i in range(2 * INCOMPATIBLE_MAX):
        core.take(Incompatible(Address(f"10.8.{i // 250}.{i % 250}", 4100), 9))
    assert len(core.gossip.incompatible) == INCOMPATIBLE_MAX and len(core.gossip.members) == 0
    core.take(Received(packet(ALICE), here))  # it was updated
    assert "10.9.9.1" not in core.gossip.incompatible


# --- limits


def test_hearsay_is_bounded() -> None:
    core = Core()
    for i in range(0, 2 * UNCONFIRMED_MAX, 20):
        core.hear(BOB, updates=tuple(Update(node(i + j), 1, ALIVE, 1) for j in range(20)))
    assert core.gossip.sizes.unconfirmed == UNCONFIRMED_MAX == len(core.gossip.members)
    assert core.gossip.sizes.requests <= 8


def test_members_are_bounded() -> None:
    core = Core()
    for i in range(MEMBERS_MAX + 10):
        core.meet(node(i))
    assert len(core.gossip.members) == MEMBERS_MAX
    reply, _ = core.gossip.answer(core.now_s, SyncRequest(ALICE, 1, 1, bytes(16)), None)
    assert len(reply.members) == MEMBERS_MAX + 1


def test_addresses_of_a_member_are_bounded() -> None:
    core = Core()
    core.meet(ALICE)
    for i in range(100):
        core.take(Received(packet(ALICE, incarnation=i + 2), Address(f"10.3.3.{i}", 4100)))
    assert len(core.gossip.members.get(ALICE).paths.all()) == PATHS_MAX


def test_whoever_flips_beliefs_does_not_fill_the_timers() -> None:
    core = Core()
    core.meet(ALICE, BOB, CAROL, DAVE)
    for i in range(3000):
        core.now_s += 0.01
        core.hear(BOB, updates=(Update(ALICE, i + 2, SUSPECT, 1, (BOB, CAROL, DAVE)[: 1 + i % 3]),))
        core.hear(ALICE, incarnation=i + 3)
    assert core.gossip.sizes.timers < 60


def test_incredible_counters_are_ignored() -> None:
    core = Core()
    core.meet(ALICE)
    core.hear(BOB, updates=(Update(ALICE, CREDIBLE_MAX + 1, DEAD, 1), Update(ALICE, 1, ALIVE, CREDIBLE_MAX + 1)))
    assert core.belief(ALICE) == (1, "ALIVE", 1)


def test_news_goes_to_some_so_many_times() -> None:
    settings = replace(SETTINGS, probe_period_s=1e6, sync_period_s=1e6, reconnect_period_s=1e6)
    core = Core(settings=settings)
    core.meet(*(node(i) for i in range(12)))
    core.wait(60.0)
    core.take(Published((address(SELF).host,), 4100, b"new"))
    news = [(after_s, a) for after_s, a in core.wait(60.0) if isinstance(a, Send)]
    carrying = [a for _, a in news if any(update.node == SELF for update in a.packet.updates)]
    assert len(carrying) == settings.transmits(13) == 8
    assert max(after_s for after_s, _ in news) == pytest.approx(3 * settings.gossip_period_s)  # 3, 3 and 2 of them
