"""Pings on behalf of members that had no answer themselves."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.address import Address, normalised
from gossip.errors import GossipError
from gossip.limits import RELAYED_PINGS_MAX
from gossip.messages import Kind, Packet
from gossip.state import NodeId
from gossip.swim.local import Local
from gossip.swim.pings import Answer, Pings


@dataclass
class _Relayed:
    """A ping for another node: ``origin`` sent one of ``sequence`` itself, which was not answered."""

    origin: Address
    sequence: int
    target: NodeId


class Relays:
    """The pings that one node sends as a helper of others."""

    def __init__(self, local: Local, pings: Pings) -> None:
        self._local = local
        self._pings = pings
        self._relayed: dict[int, _Relayed] = {}

    def __len__(self) -> int:
        return len(self._relayed)

    def request(self, now_s: float, packet: Packet, source: Address) -> None:
        """Pings another member, as one asked for in a packet."""
        local = self._local
        if packet.target is None or len(self._relayed) >= RELAYED_PINGS_MAX:
            return
        target = NodeId(packet.target)
        member = local.members.get(target)
        address = member.address if member is not None else None
        if address is None and packet.address is not None:
            try:
                address = normalised(*packet.address)
            except GossipError:
                return
        if address is None:
            self._local.send(source, self._nack(packet.sequence, target))
            return
        sequence = self._pings.expect(self._answered)
        self._relayed[sequence] = _Relayed(source, packet.sequence, target)
        self._pings.send(address, sequence, target)
        # The asker still waits for about one timeout then.
        local.timers.set(now_s + 0.8 * local.settings.probe_timeout_s, self._late, sequence)
        local.timers.set(now_s + 2 * local.settings.probe_period_s, self._over, sequence)

    def _answered(self, now_s: float, answer: Answer) -> None:
        relayed = self._relayed[answer.sequence]
        if answer.alive == relayed.target:
            self._over(now_s, answer.sequence)
            ack = self._local.packet(Kind.ACK, relayed.sequence, target=relayed.target)
            self._local.send(relayed.origin, ack)

    def _late(self, _: float, sequence: int) -> None:
        relayed = self._relayed[sequence]
        self._local.send(relayed.origin, self._nack(relayed.sequence, relayed.target))

    def _nack(self, sequence: int, target: NodeId) -> Packet:
        return self._local.packet(Kind.NACK, sequence, target=target)

    def _over(self, now_s: float, sequence: int) -> None:
        del self._relayed[sequence]
        self._pings.forget(now_s, sequence)
        self._local.timers.cancel(self._late, sequence)
        self._local.timers.cancel(self._over, sequence)
