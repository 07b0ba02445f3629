"""Pings on their way, by sequence number, and who waits for each: by UDP, or over TCP where that does not pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from gossip.address import Address
from gossip.messages import Kind, Packet, PingReply, PingRequest, Reply
from gossip.state import NodeId
from gossip.swim.beliefs import Beliefs
from gossip.swim.local import Local


class Answer(NamedTuple):
    """The answer to ping ``sequence``: ``sender`` says that ``alive`` lives. ``source``: from where; None: over TCP."""

    sequence: int
    alive: NodeId
    sender: NodeId
    source: Address | None


#: Gets the time and the answer.
Waiting = Callable[[float, Answer], None]


class Pings:
    """The pings of one node."""

    def __init__(self, local: Local, beliefs: Beliefs) -> None:
        self._local = local
        self._beliefs = beliefs
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, waiting: Waiting) -> int:
        """A new sequence number; ``waiting`` gets the answers to it until `forget`."""
        sequence = self._local.next_sequence()
        self._waiting[sequence] = waiting
        return sequence

    def forget(self, _now_s: float, sequence: int) -> None:
        """Nobody waits for ``sequence`` any more. It has the form of a timer's action."""
        self._waiting.pop(sequence, None)

    def send(self, address: Address, sequence: int, target: NodeId | None, *, tcp: bool = False) -> None:
        """Pings ``target``, or whoever is there, at an address."""
        first = self._local.accusation(target) if target is not None else None
        packet = self._local.packet(Kind.PING, sequence, target=target, first=first)
        if tcp:
            self._local.ask(address, PingRequest(packet), partial(self._replied, address))
        else:
            self._local.send(address, packet)

    def acknowledged(self, now_s: float, packet: Packet, source: Address | None) -> None:
        """Hands an acknowledgement to whoever waits for it."""
        waiting = self._waiting.get(packet.sequence)
        if waiting is not None:
            alive = packet.target if packet.target is not None else packet.sender
            waiting(now_s, Answer(packet.sequence, NodeId(alive), NodeId(packet.sender), source))

    def came_back(self, now_s: float, packet: Packet, source: Address) -> None:
        """Takes that a ping of this node came to itself: nobody else is at that address."""
        waiting = self._waiting.get(packet.sequence)
        if waiting is not None:
            waiting(now_s, Answer(packet.sequence, self._local.node, self._local.node, source))

    def _replied(self, address: Address, now_s: float, reply: Reply | None) -> None:
        if not isinstance(reply, PingReply):
            return
        packet = reply.packet
        self._beliefs.heard(now_s, packet.sender, packet.incarnation, packet.version, address)
        self._beliefs.merge_all(now_s, packet.updates, address)
        member = self._local.members.get(NodeId(packet.sender))
        if member is not None:
            member.paths.answered_tcp(address)
        self.acknowledged(now_s, packet, None)
