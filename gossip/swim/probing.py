"""Who still answers: one member a period, in turn. One that does not is asked again in every way, then suspected.

Beyond SWIM: it is also pinged at its other addresses, and over TCP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.address import Address
from gossip.messages import Kind, Packet
from gossip.state import NodeId, Status
from gossip.swim.beliefs import Beliefs
from gossip.swim.local import Local
from gossip.swim.members import Member
from gossip.swim.pings import Answer, Pings

# A silent member is pinged at so many addresses beside the one in use.
_ALTERNATIVES = 3


@dataclass(eq=False)
class _Probe:
    """A member that was pinged and has not answered yet. ``sent`` says which addresses were pinged, and when."""

    member: NodeId
    incarnation: int
    sequence: int
    sent: dict[Address, float] = field(default_factory=dict)
    helpers: set[NodeId] = field(default_factory=set)
    silent_helpers: set[NodeId] = field(default_factory=set)


class Prober:
    """The probes of one node."""

    def __init__(self, local: Local, beliefs: Beliefs, pings: Pings) -> None:
        self._local = local
        self._beliefs = beliefs
        self._pings = pings
        self._probe: _Probe | None = None

    def start(self, now_s: float) -> None:
        """The first probe comes at a random time, so that nodes do not keep step."""
        local = self._local
        local.timers.set(now_s + local.random.random() * local.settings.probe_period_s, self._begin, None)

    def dismiss(self) -> None:
        """Ends the probe under way, which then says nothing."""
        probe, self._probe = self._probe, None
        if probe is not None:
            self._pings.forget(0.0, probe.sequence)
            self._local.timers.cancel(self._late, probe)
            self._local.timers.cancel(self._failed, probe)

    def _begin(self, now_s: float, _: None) -> None:
        local = self._local
        local.timers.set(now_s + local.settings.probe_period_s, self._begin, None)
        if self._probe is not None:  # the last one still runs: this node's health is bad
            return
        member = self._next_member()
        if member is None:
            return
        probe = self._probe = _Probe(member.node, member.incarnation, self._pings.expect(self._answered))
        if member.address is not None:
            self._ping(now_s, probe, member.address)
        # Timeouts grow with bad health, and the whole probe with them; a healthy one is over within its period.
        timeout_s = local.health.scaled(local.settings.probe_timeout_s)
        period_s = local.health.scaled(local.settings.probe_period_s)
        local.timers.set(now_s + timeout_s, self._late, probe)
        local.timers.set(now_s + 0.999 * period_s, self._failed, probe)

    def _next_member(self) -> Member | None:
        for _ in range(len(self._local.ring)):
            node = self._local.ring.next()
            member = self._local.members.get(node) if node is not None else None
            if member is not None and (member.address is not None or not member.is_hearsay):
                return member
        return None

    def _ping(self, now_s: float, probe: _Probe, address: Address) -> None:
        probe.sent[address] = now_s
        self._pings.send(address, probe.sequence, probe.member)

    def _late(self, now_s: float, probe: _Probe) -> None:
        local = self._local
        member = local.members.get(probe.member)
        if member is None or not member.is_live:
            return
        for node in local.ring.sample(local.settings.helpers, without=probe.member):
            helper = local.members.get(node)
            if helper is not None and helper.address is not None and helper.status is Status.ALIVE:
                probe.helpers.add(node)
                packet = local.packet(Kind.PING_REQUEST, probe.sequence, target=probe.member, address=member.address)
                local.send(helper.address, packet)
        probe.silent_helpers |= probe.helpers
        for address in member.paths.alternatives(_ALTERNATIVES):
            self._ping(now_s, probe, address)
        if member.address is not None:
            self._pings.send(member.address, probe.sequence, probe.member, tcp=True)

    def _failed(self, now_s: float, probe: _Probe) -> None:
        self.dismiss()
        local = self._local
        member = local.members.get(probe.member)
        if member is None or not member.is_live:  # others were quicker
            return
        if member.status is not Status.SUSPECT:  # that one is silent is known then, and says nothing about this node
            # Helpers say at least that they had no answer either; if they are silent too, it may be this node's fault.
            local.health.worse(len(probe.silent_helpers) if probe.helpers else 1)
        for address in probe.sent:
            member.paths.failed(address, now_s)
        self._beliefs.suspect(now_s, member, probe.incarnation)

    def not_reached(self, packet: Packet) -> None:
        """Takes that a helper had no answer within its time."""
        if self._probe is not None and packet.sequence == self._probe.sequence:
            self._probe.silent_helpers.discard(NodeId(packet.sender))

    def _answered(self, now_s: float, answer: Answer) -> None:
        local, probe = self._local, self._probe
        if probe is None or answer.alive != probe.member:
            return
        self.dismiss()
        local.health.better()
        member = local.members.get(probe.member)
        if member is None:
            return
        if answer.sender == probe.member and answer.source in probe.sent:
            for address, sent_s in probe.sent.items():
                if sent_s < probe.sent[answer.source]:  # silent for so long that the others were tried
                    member.paths.failed(address, now_s)
            member.paths.answered(answer.source, now_s, now_s - probe.sent[answer.source])
        if member.suspicion is not None and member.address is not None:
            # It lives, but only the suspect itself can refute what others think: it is told at once.
            local.send(member.address, local.packet(Kind.NEWS, first=member.update()))
