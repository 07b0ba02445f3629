"""SWIM with Lifeguard as a state machine: ``handle(now, event)`` returns what to send, whom to ask, what to tell.

It has no socket, no clock and no randomness of its own. `Gossip.next_s` says when it wants a `Tick`.

Beyond the papers: probes go round in a fixed order (`gossip.ring`); a member that does not answer is also pinged at its other
addresses and over TCP; the dead are pinged now and then, so that a healed cut is noticed; a node whose own loop was
late accuses nobody of what it may have missed itself.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from random import Random

from gossip.address import Address, normalised
from gossip.broadcasts import Broadcasts
from gossip.candidates import Candidates
from gossip.errors import GossipError
from gossip.events import (
    Action,
    Announced,
    Ask,
    Change,
    Event,
    Incompatible,
    Leaving,
    Notify,
    Published,
    Received,
    Replied,
    Send,
    Withdrawn,
)
from gossip.health import LocalHealth
from gossip.limits import COUNTER_MAX, INCOMPATIBLE_MAX, RELAYED_PINGS_MAX
from gossip.members import Member, Members
from gossip.messages import (
    UPDATES_MAX,
    Kind,
    Packet,
    PingReply,
    PingRequest,
    PullReply,
    PullRequest,
    Record,
    Reply,
    Request,
    SyncReply,
    SyncRequest,
    Update,
)
from gossip.pulls import Pulls
from gossip.ring import ProbeRing
from gossip.settings import Settings
from gossip.state import NodeId, Status, first_counter, supersedes
from gossip.suspicion import Suspicion

# A peer's word moves this node's own counters; near their end it is a fault or an attack.
_CREDIBLE_MAX = COUNTER_MAX - (1 << 40)
_LEAVE_PACKETS = 8


@dataclass
class _Probe:
    """A member that was pinged and has not answered yet. ``sent``: addresses pinged, and when."""

    member: NodeId
    incarnation: int
    sequence: int
    sent: dict[Address, float] = field(default_factory=dict)
    helpers: int = 0
    nacks_due: set[NodeId] = field(default_factory=set)


@dataclass(frozen=True)
class _Relayed:
    """A ping on behalf of another node."""

    origin: Address
    sequence: int
    target: NodeId


class Gossip:
    """One node's part in a swarm. ``boot``: rises with every start of the node; ``random``: its only randomness."""

    def __init__(self, node: NodeId, boot: int, random: Random, settings: Settings | None = None) -> None:
        self.node = node
        self.settings = settings or Settings()
        self.incarnation = first_counter(boot)
        self.members = Members(node)
        self.candidates = Candidates(self.settings)
        self.health = LocalHealth(self.settings.health_max)
        self.record = Record(node, first_counter(boot), (), 1, b"")
        self.incompatible: dict[str, int] = {}  # host → version
        self.refutations = 0
        self.twin: Address | None = None  # another node with this one's id: a copied state folder
        self._random = random
        self._ring = ProbeRing(random)
        self._news = Broadcasts()
        self._pulls = Pulls()
        # Random, so that an acknowledgement of the process before is not one of this.
        self._sequence = random.getrandbits(40)
        self._probe: _Probe | None = None
        self._pinged: dict[int, Address] = {}  # sequence → candidate or dead member pinged
        self._relayed: dict[int, _Relayed] = {}
        self._asked: dict[int, tuple[Address, Request]] = {}
        self._timers: list[tuple[float, int, str, object]] = []
        self._timer_count = itertools.count()
        self._armed: set[str] = set()
        self._synced_s: float | None = None
        self._leaving = False
        self._out: list[Action] = []

    # --- the border

    @property
    def next_s(self) -> float:
        """When `Tick` is due; infinite before `start`."""
        return self._timers[0][0] if self._timers else float("inf")

    @property
    def version(self) -> int:
        """Of this node's record."""
        return self.record.version

    def start(self, now_s: float) -> None:
        """Begins. The first probe, sync and reconnection come at random times, so that nodes do not keep step."""
        for name, period_s in (
            ("probe", self.settings.probe_period_s),
            ("sync", self.settings.sync_period_s),
            ("reconnect", self.settings.reconnect_period_s),
        ):
            self._arm(name, now_s + self._random.random() * period_s)
        self._arm("reap", now_s + 1.0)

    def handle(self, now_s: float, event: Event) -> list[Action]:
        """Takes one event. Times are of one monotonic clock, in seconds."""
        if self._leaving:
            return []
        self._notice_lateness(now_s)
        if isinstance(event, Received):
            self._received(now_s, event.packet, event.source)
        elif isinstance(event, Replied):
            self._replied(now_s, event.token, event.reply)
        elif isinstance(event, Announced):
            self.candidates.add(event.address, event.source, now_s)
            self._arm("candidates", now_s)
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
        return self._flush(now_s)

    def answer(self, now_s: float, request: Request, source: Address | None) -> tuple[Reply, list[Action]]:
        """The reply to a peer's request over TCP. ``source``: where the peer's UDP port is, if that is known."""
        self._notice_lateness(now_s)
        reply: Reply
        if isinstance(request, PingRequest):
            packet = request.packet
            self._heard(now_s, packet.sender, packet.incarnation, packet.version, source)
            self._merge_all(now_s, packet.updates, source)
            reply = PingReply(self._packet(Kind.ACK, packet.sequence, target=self.node, about=packet.sender))
        elif isinstance(request, SyncRequest):
            self._heard(now_s, request.sender, request.incarnation, request.version, source)
            self._merge_digest(now_s, request.members, request.sender, source)
            own_hash = self._hash()
            members = () if request.hash == own_hash and not request.members else self._digest()
            reply = SyncReply(self.node, self.incarnation, self.version, own_hash, members)
        else:
            reply = PullReply(self._record_for(request))
        return reply, self._flush(now_s)

    def _flush(self, now_s: float) -> list[Action]:
        self._run_timers(now_s)
        if len(self._news):
            self._arm("gossip", now_s + self.settings.gossip_period_s)
        out, self._out = self._out, []
        return out

    def own_update(self) -> Update:
        """What others are to know of this node."""
        status = Status.LEFT if self._leaving else Status.ALIVE
        return Update(self.node, self.incarnation, int(status), self.version)

    # --- timers

    def _arm(self, name: str, when_s: float, data: object = None) -> None:
        """Sets a timer. One without data is one of its kind: while it is set, setting it again changes nothing."""
        if data is None:
            if name in self._armed:
                return
            self._armed.add(name)
        heapq.heappush(self._timers, (when_s, next(self._timer_count), name, data))

    def _run_timers(self, now_s: float) -> None:
        while self._timers and self._timers[0][0] <= now_s:
            _, _, name, data = heapq.heappop(self._timers)
            if data is None:
                self._armed.discard(name)
            getattr(self, f"_on_{name}")(now_s, data)

    def _notice_lateness(self, now_s: float) -> None:
        late_s = now_s - self.next_s
        if late_s <= self.settings.late_s:
            return
        # What came meanwhile is still in the socket: whoever seems silent may have answered.
        self.health.worse()
        self._probe = None
        for member in self.members:
            if member.suspicion is not None:
                member.suspicion.started_s += late_s
                self._arm_suspicion(member)

    # --- probes

    def _on_probe(self, now_s: float, _: object) -> None:
        self._arm("probe", now_s + self.settings.probe_period_s)
        if self._probe is not None:  # the last one still runs: this node's health is bad
            return
        member = self._next_to_probe()
        if member is None or member.address is None:
            return
        probe = self._probe = _Probe(member.node, member.incarnation, self._next_sequence())
        self._ping(now_s, probe, member.address)
        # Timeouts grow with bad health, and the whole probe with them; a healthy one is over within its period.
        timeout_s = self.health.scaled(self.settings.probe_timeout_s)
        period_s = self.health.scaled(self.settings.probe_period_s)
        self._arm("probe_late", now_s + timeout_s, probe)
        self._arm("probe_failed", now_s + 0.999 * period_s, probe)

    def _next_to_probe(self) -> Member | None:
        for _ in range(len(self._ring)):
            node = self._ring.next()
            member = self.members.get(node) if node is not None else None
            if member is not None and member.address is not None:
                return member
        return None

    def _ping(self, now_s: float, probe: _Probe, address: Address) -> None:
        probe.sent[address] = now_s
        self._send(address, self._packet(Kind.PING, probe.sequence, target=probe.member, about=probe.member))

    def _on_probe_late(self, now_s: float, probe: object) -> None:
        if self._probe is not probe or not isinstance(probe, _Probe):
            return
        member = self.members.get(probe.member)
        if member is None or member.address is None:
            return
        for node in self._ring.sample(self.settings.helpers, without=probe.member):
            helper = self.members.get(node)
            if helper is not None and helper.address is not None and helper.status is Status.ALIVE:
                probe.helpers += 1
                probe.nacks_due.add(node)
                packet = self._packet(Kind.PING_REQUEST, probe.sequence, target=probe.member, address=member.address)
                self._send(helper.address, packet)
        for address in member.paths.alternatives(3):
            self._ping(now_s, probe, address)
        ping = self._packet(Kind.PING, probe.sequence, target=probe.member, about=probe.member)
        self._ask(member.address, PingRequest(ping))

    def _on_probe_failed(self, now_s: float, probe: object) -> None:
        if self._probe is not probe or not isinstance(probe, _Probe):
            return
        self._probe = None
        # Helpers say at least that they had no answer either; if they are silent too, it may be this node's fault.
        self.health.worse(len(probe.nacks_due) if probe.helpers else 1)
        member = self.members.get(probe.member)
        if member is None or member.incarnation != probe.incarnation:
            return
        for address in probe.sent:
            member.paths.failed(address, now_s)
        self._merge(
            now_s, Update(member.node, probe.incarnation, int(Status.SUSPECT), member.version, (self.node,)), None
        )

    def _acknowledged(self, now_s: float, packet: Packet, source: Address | None) -> None:
        """An acknowledgement; ``source`` is None if it came over TCP."""
        alive = packet.target if packet.target is not None else packet.sender
        probe = self._probe
        if probe is not None and packet.sequence == probe.sequence and alive == probe.member:
            self._probe = None
            self.health.better()
            member = self.members.get(probe.member)
            if member is not None and source in probe.sent and packet.sender == alive:
                assert source is not None
                member.paths.answered(source, now_s, now_s - probe.sent[source])
            self._acquit(now_s, alive)
            return
        relayed = self._relayed.pop(packet.sequence, None)
        if relayed is not None:
            if alive == relayed.target:
                self._send(relayed.origin, self._packet(Kind.ACK, relayed.sequence, target=relayed.target))
            return
        pinged = self._pinged.pop(packet.sequence, None)
        if pinged is None or source is None:
            return
        if packet.sender == self.node:
            self.candidates.refuse(pinged, "this node itself")
            return
        member = self.members.get(NodeId(packet.sender))
        if member is not None:
            member.paths.answered(source, now_s, None)
            self.candidates.answered(pinged, member.node)

    def _acquit(self, now_s: float, node: bytes) -> None:
        """The suspect answered this node: its own accusation is void, though only the suspect itself can refute others'."""
        member = self.members.get(NodeId(node))
        if member is not None and member.suspicion is not None and member.address is not None:
            # Tell it at once, so that it refutes.
            self._send(member.address, self._packet(Kind.NEWS, 0, about=member.node))

    # --- packets

    def _received(self, now_s: float, packet: Packet, source: Address) -> None:
        if packet.sender == self.node:
            # A candidate that is this node: its ping comes back to itself.
            if packet.sequence in self._pinged:
                self.candidates.refuse(self._pinged.pop(packet.sequence), "this node itself")
            elif packet.kind != Kind.ACK:
                self.twin = source
            return
        self.incompatible.pop(source.host, None)
        self._heard(now_s, packet.sender, packet.incarnation, packet.version, source)
        self._merge_all(now_s, packet.updates, source)
        if packet.kind == Kind.PING:
            # For another node: an address that now belongs to this one (SCENARIOS DISC-2, the id check).
            if packet.target is None or packet.target == self.node:
                self._send(source, self._packet(Kind.ACK, packet.sequence, target=self.node, about=packet.sender))
        elif packet.kind == Kind.ACK:
            self._acknowledged(now_s, packet, source)
        elif packet.kind == Kind.PING_REQUEST:
            self._relay_ping(now_s, packet, source)
        elif packet.kind == Kind.NACK and self._probe is not None and packet.sequence == self._probe.sequence:
            self._probe.nacks_due.discard(NodeId(packet.sender))

    def _relay_ping(self, now_s: float, packet: Packet, source: Address) -> None:
        if packet.target is None or len(self._relayed) >= RELAYED_PINGS_MAX:
            return
        member = self.members.get(NodeId(packet.target))
        address = member.address if member is not None else None
        if address is None and packet.address is not None:
            try:
                address = normalised(*packet.address)
            except GossipError:
                return
        if address is None:
            return
        sequence = self._next_sequence()
        self._relayed[sequence] = _Relayed(source, packet.sequence, NodeId(packet.target))
        self._send(address, self._packet(Kind.PING, sequence, target=packet.target))
        # The asker still waits for about one timeout then.
        self._arm("relay_late", now_s + 0.8 * self.settings.probe_timeout_s, sequence)
        self._arm("relay_over", now_s + 2 * self.settings.probe_period_s, sequence)

    def _on_relay_late(self, now_s: float, sequence: object) -> None:
        relayed = self._relayed.get(sequence) if isinstance(sequence, int) else None
        if relayed is not None:
            self._send(relayed.origin, self._packet(Kind.NACK, relayed.sequence, target=relayed.target))

    def _on_relay_over(self, now_s: float, sequence: object) -> None:
        if isinstance(sequence, int):
            self._relayed.pop(sequence, None)

    # --- beliefs

    def _heard(self, now_s: float, node: bytes, incarnation: int, version: int, source: Address | None) -> None:
        """A node itself spoke."""
        if node == self.node:
            return
        member = self.members.get(NodeId(node))
        if (
            member is not None
            and member.incarnation == incarnation
            and member.version == version
            and member.status is Status.ALIVE
            and member.heard_s is not None
        ):
            member.heard_s = now_s  # no news, which is most packets
            return
        was_live = member is not None and member.is_live
        self._merge(now_s, Update(node, incarnation, int(Status.ALIVE), version), source, how="it called")
        member = self.members.get(NodeId(node))
        if member is None:
            if source is not None and self.members.buried(NodeId(node)) is not None:
                self._send(source, self._packet(Kind.NEWS, 0, about=node))
            return
        member.heard_s = now_s
        if source is not None:
            member.paths.add(source, "it called")
        if member.status is Status.DEAD and member.incarnation == incarnation and member.address is not None:
            # It does not know that it is thought dead.
            self._send(member.address, self._packet(Kind.NEWS, 0, about=member.node))
        if member.is_live and not was_live:
            self._sync_with(now_s, member)

    def _merge_all(self, now_s: float, updates: tuple[Update, ...], source: Address | None) -> None:
        for update in updates:
            self._merge(now_s, update, source)

    def _merge_digest(self, now_s: float, updates: tuple[Update, ...], sender: bytes, source: Address | None) -> None:
        """Of a whole view: after a cut the other side thinks this one dead. That is a suspicion, for the accused to refute."""
        for update in updates:
            member = self.members.get(NodeId(update.node))
            if update.status == Status.DEAD and member is not None and member.is_live:
                update = Update(update.node, update.incarnation, int(Status.SUSPECT), update.version, (sender,))
            self._merge(now_s, update, source)

    def _merge(self, now_s: float, update: Update, source: Address | None, how: str = "another member told") -> None:
        if update.incarnation > _CREDIBLE_MAX or update.version > _CREDIBLE_MAX:
            return
        node = NodeId(update.node)
        if node == self.node:
            self._merge_own(update)
            return
        member = self.members.get(node)
        if member is None:
            member = self._meet(now_s, update, how)
            if member is None:
                return
            self._want_record(now_s, member, source)
            return
        if update.version > member.version:
            self._set(now_s, member, member.incarnation, member.status, update.version)
            if member.is_live:
                self._news.add(node)
            self._want_record(now_s, member, source)
        if supersedes(update.incarnation, update.status, member.incarnation, int(member.status)):
            self._believe(now_s, member, update)
        elif (
            update.status == Status.SUSPECT
            and member.suspicion is not None
            and update.incarnation == member.incarnation
        ):
            confirmed = [member.suspicion.confirm(NodeId(accuser), self.settings) for accuser in update.accusers]
            if any(confirmed):
                self._news.add(node)
                self._arm_suspicion(member)

    def _merge_own(self, update: Update) -> None:
        if supersedes(update.incarnation, update.status, self.incarnation, int(Status.ALIVE)):
            self.incarnation = update.incarnation + 1
            self.refutations += 1
            self.health.worse()
            self._news.add(self.node)
        if update.version > self.version:
            # Of a time that this node's disk does not remember.
            self._set_own_record(update.version + 1)

    def _meet(self, now_s: float, update: Update, how: str) -> Member | None:
        node = NodeId(update.node)
        buried = self.members.buried(node)
        if update.status >= Status.DEAD or (buried is not None and update.incarnation <= buried):
            return None
        member = self.members.add(node, update.incarnation, update.version, how, now_s)
        if member is None:
            return None
        self._ring.add(node)
        self._news.add(node)
        self._out.append(Notify(Change.JOINED, node, how))
        if update.status == Status.SUSPECT:
            self._believe(now_s, member, update)
        return member

    def _believe(self, now_s: float, member: Member, update: Update) -> None:
        before, status = member.status, Status(update.status)
        self._set(now_s, member, update.incarnation, status, member.version)
        self._news.add(member.node)
        if status is Status.SUSPECT:
            member.suspicion = Suspicion(now_s, {NodeId(a) for a in update.accusers[:1]})
            for accuser in update.accusers[1:]:
                member.suspicion.confirm(NodeId(accuser), self.settings)
            self._ring.add(member.node)
            self._arm_suspicion(member)
            if before is not Status.SUSPECT:
                accusers = ", ".join(NodeId(a).hex() for a in update.accusers)
                self._out.append(Notify(Change.SUSPECTED, member.node, f"by {accusers}"))
            return
        member.suspicion = None
        if status is Status.ALIVE:
            self._ring.add(member.node)
            if before is Status.SUSPECT:
                self._out.append(Notify(Change.CLEARED, member.node))
            elif before is not Status.ALIVE:
                self._out.append(Notify(Change.JOINED, member.node, "it came back"))
                if not _has_newest(member):
                    self._want_record(now_s, member, None)
            return
        self._ring.remove(member.node)
        if self._probe is not None and self._probe.member == member.node:
            self._probe = None
        if before <= Status.SUSPECT:
            self._out.append(Notify(Change.DIED if status is Status.DEAD else Change.LEFT, member.node))

    def _set(self, now_s: float, member: Member, incarnation: int, status: Status, version: int) -> None:
        self.members.change(member, now_s, incarnation=incarnation, status=status, version=version)

    def _arm_suspicion(self, member: Member) -> None:
        assert member.suspicion is not None
        when_s = member.suspicion.deadline_s(self.members.n_live, self.settings)
        self._arm("suspicion", when_s, (member.node, member.incarnation))

    def _on_suspicion(self, now_s: float, data: object) -> None:
        assert isinstance(data, tuple)
        member = self.members.get(data[0])
        if member is None or member.suspicion is None or member.incarnation != data[1]:
            return
        if member.suspicion.deadline_s(self.members.n_live, self.settings) > now_s:
            self._arm_suspicion(member)
            return
        self._believe(now_s, member, Update(member.node, member.incarnation, int(Status.DEAD), member.version))

    def _on_reap(self, now_s: float, _: object) -> None:
        self._arm("reap", now_s + 1.0)
        for member in list(self.members):
            gone_s = now_s - member.since_s
            if not member.is_live and gone_s > self.settings.dead_s:
                self._forget(now_s, member, bury=True)
            elif member.is_live and member.record is None and gone_s > self.settings.unconfirmed_s:
                self._forget(now_s, member, bury=False)
        self.members.forget_tombstones(now_s - self.settings.tombstone_s)

    def _forget(self, now_s: float, member: Member, *, bury: bool) -> None:
        self.members.forget(member, now_s, bury=bury)
        self._ring.remove(member.node)
        self._news.discard(member.node)
        self._pulls.discard(member.node)
        self._out.append(Notify(Change.FORGOTTEN, member.node))

    # --- news

    def _on_gossip(self, now_s: float, _: object) -> None:
        for node in self._ring.sample(self.settings.fanout):
            if not len(self._news):
                return
            member = self.members.get(node)
            if member is not None and member.address is not None:
                self._send(member.address, self._packet(Kind.NEWS, 0))

    def _packet(
        self,
        kind: Kind,
        sequence: int,
        *,
        target: bytes | None = None,
        address: Address | None = None,
        about: bytes | None = None,
    ) -> Packet:
        """A packet with news; if it is ``about`` a member that is not thought alive, with that first."""
        updates: list[Update] = []
        if about is not None and (update := self._accusation(NodeId(about))) is not None:
            updates.append(update)
        transmits = self.settings.transmits(self.members.n_live)
        for node in self._news.pick(UPDATES_MAX - len(updates), transmits):
            if node == self.node:
                updates.append(self.own_update())
            elif (news := self.members.get(node)) is not None and (not updates or updates[0].node != node):
                updates.append(news.update())
        host = None if address is None else (address.host, address.port)
        return Packet(int(kind), self.node, self.incarnation, self.version, sequence, target, host, tuple(updates))

    def _accusation(self, node: NodeId) -> Update | None:
        """What a member is to refute, if there is anything."""
        member = self.members.get(node)
        if member is not None:
            return None if member.status is Status.ALIVE else member.update()
        buried = self.members.buried(node)
        return None if buried is None else Update(node, buried, int(Status.DEAD), 0)

    def _send(self, address: Address, packet: Packet) -> None:
        self._out.append(Send(address, packet))

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # --- candidates and the dead

    def _on_candidates(self, now_s: float, _: object) -> None:
        for candidate in self.candidates.due(now_s):
            member = self.members.get(candidate.member) if candidate.member is not None else None
            if member is not None and member.is_live and not candidate.problem:
                continue  # probed as a member
            self._ping_unknown(now_s, candidate.address, None, over_tcp=candidate.tries % 2 == 0)
        next_s = self.candidates.next_s()
        if next_s is not None:
            self._arm("candidates", max(next_s, now_s + 0.05))

    def _on_reconnect(self, now_s: float, _: object) -> None:
        self._arm("reconnect", now_s + self.settings.reconnect_period_s)
        dead = [m for m in self.members if m.status is Status.DEAD and m.address is not None]
        if dead:
            member = self._random.choice(dead)
            assert member.address is not None
            for address in [member.address, *member.paths.alternatives(1)]:
                self._ping_unknown(now_s, address, member.node, over_tcp=False)

    def _ping_unknown(self, now_s: float, address: Address, target: NodeId | None, *, over_tcp: bool) -> None:
        sequence = self._next_sequence()
        self._pinged[sequence] = address
        self._arm("ping_over", now_s + 2 * self.settings.probe_period_s, sequence)
        packet = self._packet(Kind.PING, sequence, target=target, about=target)
        self._send(address, packet)
        if over_tcp:
            self._ask(address, PingRequest(packet))

    def _on_ping_over(self, now_s: float, sequence: object) -> None:
        if isinstance(sequence, int):
            self._pinged.pop(sequence, None)

    # --- requests over TCP

    def _ask(self, address: Address, request: Request) -> None:
        token = self._next_sequence()
        self._asked[token] = (address, request)
        self._out.append(Ask(address, token, request))

    def _replied(self, now_s: float, token: int, reply: Reply | None) -> None:
        asked = self._asked.pop(token, None)
        if asked is None:
            return
        address, request = asked
        if isinstance(request, PullRequest):
            record = reply.record if isinstance(reply, PullReply) else None
            self._pulled(now_s, NodeId(request.node), record, address)
        elif isinstance(request, PingRequest) and isinstance(reply, PingReply):
            self._heard(now_s, reply.packet.sender, reply.packet.incarnation, reply.packet.version, address)
            self._merge_all(now_s, reply.packet.updates, address)
            self.candidates.answered(address, NodeId(reply.packet.sender))
            member = self.members.get(NodeId(reply.packet.sender))
            if member is not None:
                member.paths.answered_tcp(address)
            self._acknowledged(now_s, reply.packet, None)
        elif isinstance(request, SyncRequest) and isinstance(reply, SyncReply):
            self._heard(now_s, reply.sender, reply.incarnation, reply.version, address)
            self._merge_digest(now_s, reply.members, reply.sender, address)
            if reply.members and not request.members and reply.hash != self._hash():
                # It lacks something that this node knows.
                self._ask(address, SyncRequest(self.node, self.incarnation, self.version, self._hash(), self._digest()))

    def _on_sync(self, now_s: float, _: object) -> None:
        self._arm("sync", now_s + self.settings.sync_period_s)
        for node in self._ring.sample(1):
            member = self.members.get(node)
            if member is not None:
                self._sync_with(now_s, member, always=True)

    def _sync_with(self, now_s: float, member: Member, *, always: bool = False) -> None:
        """Compares views. With those who just appeared at most once a second, however many they are."""
        if member.address is None:
            return
        if not always and self._synced_s is not None and now_s - self._synced_s < 1.0:
            return
        self._synced_s = now_s
        self._ask(member.address, SyncRequest(self.node, self.incarnation, self.version, self._hash()))

    def _hash(self) -> bytes:
        return self.members.hash(self.own_update())

    def _digest(self) -> tuple[Update, ...]:
        return (self.own_update(), *(member.update() for member in self.members))

    # --- records

    def _publish(self, event: Published) -> None:
        record = Record(self.node, self.version + 1, event.addresses, event.port, event.payload)
        if (record.addresses, record.port, record.payload) != (
            self.record.addresses,
            self.record.port,
            self.record.payload,
        ):
            self.record = record
            self._news.add(self.node)

    def _set_own_record(self, version: int) -> None:
        old = self.record
        self.record = Record(self.node, version, old.addresses, old.port, old.payload)
        self._news.add(self.node)

    def _record_for(self, request: PullRequest) -> Record | None:
        if request.node == self.node:
            return self.record
        member = self.members.get(NodeId(request.node))
        record = member.record if member is not None else None
        return record if record is not None and record.version >= request.version else None

    def _want_record(self, now_s: float, member: Member, teller: Address | None) -> None:
        self._pulls.want(member.node, teller)
        self._pull(now_s)

    def _pull(self, now_s: float) -> None:
        while (node := self._pulls.next(now_s)) is not None:
            member = self.members.get(node)
            if member is None or not member.is_live or _has_newest(member):
                self._pulls.done(node)
                continue
            known = [member.address] if member.address is not None else []
            others = [m.address for n in self._ring.sample(1, without=node) if (m := self.members.get(n)) is not None]
            # Half of them from who told: the owner of news that all want at once is not to send it to everybody.
            source = self._pulls.source(node, known, [a for a in others if a is not None], self._random)
            if source is None:
                self._pulls.failed(node, now_s)
                continue
            self._ask(source, PullRequest(node, member.version))
        if (next_s := self._pulls.next_s()) is not None:
            self._arm("pull", next_s)

    def _on_pull(self, now_s: float, _: object) -> None:
        self._pull(now_s)

    def _pulled(self, now_s: float, node: NodeId, record: Record | None, source: Address) -> None:
        member = self.members.get(node)
        if member is None:
            self._pulls.done(node)
        elif record is None or record.node != node or record.version > _CREDIBLE_MAX:
            self._pulls.failed(node, now_s)
        else:
            if record.version > member.version:
                self._set(now_s, member, member.incarnation, member.status, record.version)
                self._news.add(node)
            if self.members.keep_record(member, record):
                member.paths.list_own(_addresses(record))
                self._out.append(Notify(Change.RECORD, node))
            if _has_newest(member):
                self._pulls.done(node)
            else:
                self._pulls.failed(node, now_s)
        self._pull(now_s)

    # --- the end

    def _leave(self) -> None:
        self._leaving = True
        self._news.add(self.node)
        packet = Packet(int(Kind.NEWS), self.node, self.incarnation, self.version, 0, None, None, (self.own_update(),))
        for node in self._ring.sample(_LEAVE_PACKETS):
            member = self.members.get(node)
            if member is not None and member.address is not None:
                self._send(member.address, packet)


def _has_newest(member: Member) -> bool:
    return member.record is not None and member.record.version >= member.version


def _addresses(record: Record) -> tuple[Address, ...]:
    found = []
    for host in record.addresses:
        try:
            found.append(normalised(host, record.port))
        except GossipError:
            continue
    return tuple(found)
