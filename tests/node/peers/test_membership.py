"""Peers as the program sees them: gossip's members with records that can be read."""

from __future__ import annotations

from random import Random

import pytest

from gossip.address import Address
from gossip.messages import Kind, Packet, PullReply, PullRequest, Update
from gossip.messages import Record as Envelope
from gossip.state import NodeId, Status, first_counter
from gossip.swim.core import Gossip
from gossip.swim.events import Ask, Change, Notify, Received, Replied, Tick
from node.peers.membership import FORGET_AFTER_S, Membership
from node.records import VERSION, Record, encode

OWN = NodeId(bytes(8))
OTHER = NodeId(bytes(7) + b"\1")
ADDRESS = Address("192.168.1.7", 4100)


def _record(node: NodeId = OTHER, swarm: str = "default", version: int = VERSION) -> Record:
    return Record(
        version=version,
        swarm=swarm,
        node=node.hex(),
        boot=1,
        name="desk",
        build="b",
        platform="Linux x86_64",
        port=4100,
        expert_port=4101,
        devices=(),
        memory_bytes=1 << 30,
        can_route=False,
    )


class Rig:
    """A node, and one other that speaks to it."""

    def __init__(self) -> None:
        self.core = Gossip(OWN, 1, Random(1))
        self.core.start(0.0)
        self.membership = Membership(self.core, "default")
        self.now_s = 0.0

    def hear(self, payload: bytes, version: int = 1, incarnation: int = 5) -> None:
        """The other node pings; its record is pulled and given."""
        packet = Packet(int(Kind.PING), OTHER, incarnation, version, 7)
        self._do(self.core.handle(self.now_s, Received(packet, ADDRESS)), payload, version)

    def tell(self, status: Status, incarnation: int = 5) -> None:
        """A third node's news of it."""
        update = Update(OTHER, incarnation, int(status), 1)
        packet = Packet(int(Kind.NEWS), bytes(7) + b"\2", 1, 0, 8, None, None, (update,))
        self._do(self.core.handle(self.now_s, Received(packet, Address("192.168.1.8", 4100))), b"", 1)

    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s
        self._do(self.core.handle(self.now_s, Tick()), b"", 1)

    def _do(self, actions: list, payload: bytes, version: int) -> None:  # type: ignore[type-arg]
        for action in actions:
            if isinstance(action, Ask) and isinstance(action.request, PullRequest) and action.request.node == OTHER:
                reply = PullReply(Envelope(OTHER, version, ("192.168.1.7",), 4100, payload)) if payload else None
                self._do(self.core.handle(self.now_s, Replied(action.token, reply)), payload, version)
            elif isinstance(action, Notify) and action.change is Change.RECORD:
                self.membership.record_changed(action.node)
            elif isinstance(action, Notify) and action.change is Change.FORGOTTEN:
                self.membership.forgotten(action.node)


def test_a_peer_with_its_record_address_and_silence() -> None:
    rig = Rig()
    rig.hear(encode(_record()))
    rig.now_s += 0.4
    (peer,) = rig.membership.alive(rig.now_s).values()
    assert (peer.record, peer.url, peer.alive) == (_record(), "http://192.168.1.7:4100", True)
    assert peer.silent_s == pytest.approx(0.4)


def test_a_node_without_a_record_is_no_peer_yet() -> None:
    rig = Rig()
    rig.hear(b"")
    assert rig.membership.known(0.0) == {}
    assert rig.core.members.get(OTHER) is not None


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (encode(_record(swarm="other")), "swarm 'other'"),
        (encode(_record(version=VERSION + 1)), f"version {VERSION + 1}"),
        (encode(_record(NodeId(bytes(7) + b"\5"))), "0000000000000005"),
        (b"{", "not a record"),
    ],
)
def test_a_record_that_is_not_ours_is_shown_and_given_no_work(payload: bytes, reason: str) -> None:
    rig = Rig()
    rig.hear(encode(_record()))
    rig.hear(payload, version=2)
    assert rig.membership.known(rig.now_s) == {}
    assert reason in rig.membership.refusal(OTHER)
    rig.hear(encode(_record()), version=3)
    assert rig.membership.refusal(OTHER) == ""
    assert len(rig.membership.alive(rig.now_s)) == 1


def test_the_dead_keep_their_slices_for_a_while_and_who_leaves_does_not() -> None:
    rig = Rig()
    rig.hear(encode(_record()))
    rig.tell(Status.DEAD)
    assert rig.membership.alive(rig.now_s) == {}
    assert not rig.membership.known(rig.now_s)[OTHER.hex()].alive
    assert rig.membership.known(rig.now_s + FORGET_AFTER_S + 0.1) == {}
    rig.hear(encode(_record()), incarnation=6)
    assert rig.membership.known(rig.now_s)[OTHER.hex()].alive
    rig.tell(Status.LEFT, incarnation=6)
    assert rig.membership.known(rig.now_s) == {}


def test_a_node_that_was_started_again_is_not_alive_by_its_old_record() -> None:
    rig = Rig()
    rig.hear(encode(_record()), version=first_counter(1) + 1, incarnation=first_counter(1))
    assert len(rig.membership.alive(rig.now_s)) == 1
    rig.hear(b"", version=first_counter(2) + 1, incarnation=first_counter(2))
    assert not rig.membership.known(rig.now_s)[OTHER.hex()].alive
    rig.wait(1.0)  # the pull is tried again
    rig.hear(encode(_record()), version=first_counter(2) + 2, incarnation=first_counter(2))
    assert rig.membership.known(rig.now_s)[OTHER.hex()].alive


def test_what_gossip_forgets_is_forgotten() -> None:
    rig = Rig()
    rig.hear(encode(_record()))
    rig.tell(Status.DEAD)
    rig.wait(rig.core.settings.dead_s + 2)
    assert rig.core.members.get(OTHER) is None
    rig.hear(b"", incarnation=9)
    assert rig.membership.known(rig.now_s) == {}
