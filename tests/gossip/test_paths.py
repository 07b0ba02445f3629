"""Addresses of a member that moves, and of one whose packets somebody repeats."""

from __future__ import annotations

from random import Random

from gossip.address import Address
from gossip.limits import ADDRESSES_MAX, PATHS_MAX
from gossip.messages import Kind, Packet, PullReply, PullRequest, Record
from gossip.state import NodeId
from gossip.swim.core import Gossip
from gossip.swim.events import Action, Ask, Received, Replied
from gossip.swim.paths import Paths

OWN, OTHER = NodeId(bytes(8)), NodeId(bytes(7) + b"\1")
OLD, NEW = Address("10.1.1.1", 4100), Address("10.1.1.2", 4100)


def _hosts(paths: Paths) -> list[str]:
    return [path.address.host for path in paths.all()]


def test_a_record_has_room_for_its_addresses_whoever_called_from_wherever() -> None:
    paths = Paths()
    paths.add(OLD, "it called")
    paths.answered(OLD, 1.0, 0.001)
    for port in range(1, 100):
        paths.add(Address("10.9.9.9", port), "it called")
    assert len(paths.all()) == PATHS_MAX
    listed = tuple(Address(f"10.2.2.{number}", 4100) for number in range(ADDRESSES_MAX))
    paths.list_own(listed)
    assert [path.address for path in paths.all()][:ADDRESSES_MAX] == list(listed)
    assert len(paths.all()) == PATHS_MAX
    assert paths.current == OLD  # it answers there: the last to go


def test_an_address_that_a_member_left_goes_as_soon_as_another_of_its_own_answers() -> None:
    paths = Paths()
    paths.answered(OLD, 1.0, 0.001)
    paths.list_own((NEW,))
    assert _hosts(paths) == [NEW.host, OLD.host]
    paths.answered(NEW, 2.0, 0.001)
    assert _hosts(paths) == [NEW.host, OLD.host]  # both answer: it may be behind a gateway
    paths.failed(OLD, 3.0)
    paths.answered(NEW, 4.0, 0.001)
    assert _hosts(paths) == [NEW.host] and paths.current == NEW


def test_an_address_from_which_a_member_only_called_goes_as_soon_as_one_of_its_own_answers() -> None:
    paths = Paths()
    paths.add(OLD, "it called")
    paths.list_own((NEW,))
    assert paths.current == OLD
    paths.answered(NEW, 2.0, 0.001)
    assert _hosts(paths) == [NEW.host] and paths.current == NEW


def test_an_address_of_the_record_stays_when_it_fails() -> None:
    paths = Paths()
    paths.list_own((OLD, NEW))
    paths.failed(OLD, 1.0)
    paths.answered(NEW, 2.0, 0.001)
    assert _hosts(paths) == [OLD.host, NEW.host]


def test_what_a_member_once_said_does_not_move_it() -> None:
    core = Gossip(OWN, 1, Random(1))
    core.start(0.0)

    def hear(source: Address, version: int, incarnation: int = 5) -> None:
        packet = Packet(int(Kind.PING), OTHER, incarnation, version, 7)
        give_records(core.handle(0.0, Received(packet, source)))

    def give_records(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Ask) and isinstance(action.request, PullRequest):
                record = Record(OTHER, action.request.version, (OLD.host, NEW.host), 4100, b"x")
                give_records(core.handle(0.0, Replied(action.token, PullReply(record))))

    hear(OLD, version=9)
    for port in range(1, 100):
        hear(Address("10.9.9.9", port), version=8)
        hear(Address("10.9.9.9", port), version=9, incarnation=4)
    member = core.members.get(OTHER)
    assert member is not None
    assert set(_hosts(member.paths)) == {OLD.host, NEW.host}
    hear(NEW, version=10)
    assert member.has_newest_record
    # The member itself, behind something that gives it another address: where it speaks now.
    hear(Address("10.3.3.3", 4100), version=11)
    assert "10.3.3.3" in _hosts(member.paths)
