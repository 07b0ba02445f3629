"""SWIM with Lifeguard as a state machine: ``handle(now, event)`` returns what to send, whom to ask, what to tell.

It has no socket, no clock and no randomness of its own. `Gossip.next_s` says when it wants a `Tick`.

Beyond the papers: probes go round in a fixed order (`gossip.swim.ring`); a member that does not answer is also pinged
at its other addresses and over TCP (`gossip.swim.probing`); the dead are pinged now and then, so that a healed cut is
noticed (`gossip.swim.seeking`); a node whose own loop was late accuses nobody of what it may have missed itself.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from gossip.address import Address
from gossip.limits import INCOMPATIBLE_MAX
from gossip.messages import Kind, Packet, PingReply, PingRequest, PullReply, Record, Reply, Request, SyncRequest, Update
from gossip.state import NodeId
from gossip.swim.beliefs import Beliefs
from gossip.swim.candidates import Candidates
from gossip.swim.events import (
    Action,
    Announced,
    Event,
    Incompatible,
    Leaving,
    Published,
    Received,
    Replied,
    Withdrawn,
)
from gossip.swim.lifeguard import LocalHealth
from gossip.swim.local import Local
from gossip.swim.members import Members
from gossip.swim.pings import Pings
from gossip.swim.probing import Prober
from gossip.swim.pulls import Fetcher
from gossip.swim.relays import Relays
from gossip.swim.seeking import Seeker
from gossip.swim.settings import Settings
from gossip.swim.syncing import Syncs

#: So many members are told goodbye; they pass it on.
_LEAVE_PACKETS = 8


class Sizes(NamedTuple):
    """How much of everything a node holds. ``live`` counts the node itself."""

    members: int
    live: int
    unconfirmed: int
    buried: int
    record_bytes: int
    candidates: int
    incompatible: int
    news: int
    pulls: int
    pings: int
    relays: int
    requests: int
    timers: int


class Gossip:
    """One node's part in a swarm. ``boot``: rises with every start of the node; ``random``: its only randomness."""

    def __init__(self, node: NodeId, boot: int, random: Random, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.candidates = Candidates(self.settings)
        self.incompatible: dict[str, int] = {}  # host → version
        self.twin: Address | None = None  # another node with this one's id: a copied state folder
        self._local = Local(node, boot, random, self.settings)
        self._fetcher = Fetcher(self._local)
        self._beliefs = Beliefs(self._local, self._fetcher)
        self._syncs = Syncs(self._local, self._beliefs)
        self._beliefs.on_appeared = self._syncs.greet
        self._pings = Pings(self._local, self._beliefs)
        self._prober = Prober(self._local, self._beliefs, self._pings)
        self._relays = Relays(self._local, self._pings)
        self._seeker = Seeker(self._local, self._pings, self.candidates)

    # --- what can be seen

    @property
    def node(self) -> NodeId:
        """This node's id."""
        return self._local.node

    @property
    def incarnation(self) -> int:
        """This node's incarnation."""
        return self._local.incarnation

    @property
    def record(self) -> Record:
        """This node's own record."""
        return self._local.record

    @property
    def version(self) -> int:
        """The version of this node's record."""
        return self._local.version

    @property
    def members(self) -> Members:
        """The other nodes that this one knows."""
        return self._local.members

    @property
    def probed(self) -> list[NodeId]:
        """The members that are probed, in their order."""
        return list(self._local.ring)

    @property
    def health(self) -> LocalHealth:
        """Whether this node has reason to doubt itself."""
        return self._local.health

    @property
    def refutations(self) -> int:
        """How often this node had to say that it lives."""
        return self._beliefs.refutations

    @property
    def sizes(self) -> Sizes:
        """How much this node holds."""
        local, members = self._local, self._local.members
        return Sizes(
            members=len(members),
            live=members.n_live,
            unconfirmed=members.n_unconfirmed,
            buried=members.n_buried,
            record_bytes=members.record_bytes,
            candidates=len(self.candidates),
            incompatible=len(self.incompatible),
            news=len(local.news),
            pulls=len(self._fetcher),
            pings=len(self._pings),
            relays=len(self._relays),
            requests=local.n_asked,
            timers=len(local.timers),
        )

    def own_update(self) -> Update:
        """What others are to know of this node."""
        return self._local.own_update()

    @property
    def next_s(self) -> float:
        """When the next `Tick` is due; infinite before `start`, and after `Leaving`."""
        return float("inf") if self._local.leaving else self._local.timers.next_s

    # --- what happens

    def start(self, now_s: float) -> None:
        """Begins to gossip."""
        for part in (self._prober, self._syncs, self._seeker, self._beliefs):
            part.start(now_s)

    def handle(self, now_s: float, event: Event) -> list[Action]:
        """Takes one event. Times are of one monotonic clock, in seconds."""
        local = self._local
        if local.leaving:
            return []
        self._notice_lateness(now_s)
        if isinstance(event, Received):
            self._received(now_s, event.packet, event.source)
        elif isinstance(event, Replied):
            local.replied(now_s, event.token, event.reply)
        elif isinstance(event, Announced):
            self._seeker.announced(now_s, event.address, event.source)
        elif isinstance(event, Withdrawn):
            self.candidates.remove(event.address)
        elif isinstance(event, Published):
            self._publish(event)
        elif isinstance(event, Incompatible):
            if event.source.host in self.incompatible or len(self.incompatible) < INCOMPATIBLE_MAX:
                self.incompatible[event.source.host] = event.version
                self.candidates.refuse(event.source, f"speaks protocol version {event.version}")
        elif isinstance(event, Leaving):
            self._leave()
        return self._finish(now_s)

    def answer(self, now_s: float, request: Request, source: Address | None) -> tuple[Reply, list[Action]]:
        """The reply to a peer's request over TCP. ``source``: where the peer's UDP port is, if that is known."""
        self._notice_lateness(now_s)
        reply: Reply
        if isinstance(request, PingRequest):
            packet = request.packet
            self._beliefs.heard(now_s, packet.sender, packet.incarnation, packet.version, source)
            self._beliefs.merge_all(now_s, packet.updates, source)
            reply = PingReply(self._acknowledgement(packet))
        elif isinstance(request, SyncRequest):
            reply = self._syncs.answer(now_s, request, source)
        else:
            reply = PullReply(self._fetcher.give(request))
        return reply, self._finish(now_s)

    def _finish(self, now_s: float) -> list[Action]:
        local = self._local
        local.timers.run(now_s)
        if len(local.news):
            local.timers.set(now_s + self.settings.gossip_period_s, self._spread_news, None)
        actions, local.actions = local.actions, []
        return actions

    def _notice_lateness(self, now_s: float) -> None:
        late_s = now_s - self._local.timers.next_s
        if late_s > self.settings.late_s:
            # What came meanwhile is still in the socket: whoever seems silent may have answered.
            self.health.worse()
            self._prober.dismiss()
            self._beliefs.forgive(late_s)

    def _received(self, now_s: float, packet: Packet, source: Address) -> None:
        if packet.sender == self.node:
            self._received_own(now_s, packet, source)
            return
        self.incompatible.pop(source.host, None)
        self._beliefs.heard(now_s, packet.sender, packet.incarnation, packet.version, source)
        self._beliefs.merge_all(now_s, packet.updates, source)
        if packet.kind == Kind.PING:
            # A ping for another node came to an address that now belongs to this one: the id tells.
            if packet.target is None or packet.target == self.node:
                self._local.send(source, self._acknowledgement(packet))
        elif packet.kind == Kind.ACK:
            self._pings.acknowledged(now_s, packet, source)
        elif packet.kind == Kind.PING_REQUEST:
            self._relays.request(now_s, packet, source)
        elif packet.kind == Kind.NACK:
            self._prober.not_reached(packet)

    def _received_own(self, now_s: float, packet: Packet, source: Address) -> None:
        if packet.kind not in (Kind.PING, Kind.PING_REQUEST):
            return
        if self._local.was_sent(packet.sequence):
            self._pings.came_back(now_s, packet, source)
        elif packet.incarnation >= self._local.first_incarnation:  # not of this node's life before
            self.twin = source

    def _acknowledgement(self, ping: Packet) -> Packet:
        first = self._local.accusation(NodeId(ping.sender))
        return self._local.packet(Kind.ACK, ping.sequence, target=self.node, first=first)

    def _publish(self, event: Published) -> None:
        old = self.record
        if (event.addresses, event.port, event.payload) != (old.addresses, old.port, old.payload):
            self._local.set_record(self.version + 1, event.addresses, event.port, event.payload)

    def _spread_news(self, now_s: float, _: None) -> None:
        local = self._local
        for node in local.ring.sample(self.settings.fanout):
            if not len(local.news):
                return
            member = local.members.get(node)
            if member is not None and member.address is not None:
                local.send(member.address, local.packet(Kind.NEWS))

    def _leave(self) -> None:
        local = self._local
        local.leaving = True
        packet = Packet(int(Kind.NEWS), self.node, self.incarnation, self.version, 0, None, None, (self.own_update(),))
        for node in local.ring.sample(_LEAVE_PACKETS):
            member = local.members.get(node)
            if member is not None and member.address is not None:
                local.send(member.address, packet)
