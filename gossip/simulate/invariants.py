"""What must hold in a swarm whatever happens to it, checked after every step of every simulated node.

Each step is checked for what it touched; now and then everything is, from scratch. A violation says how to see it
again.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from gossip import limits
from gossip.messages import Packet, PingReply, PingRequest, PullReply, Record, Reply, Request, SyncReply, SyncRequest
from gossip.simulate.simulation import Node, Simulation
from gossip.state import NodeId, Status
from gossip.swim.core import Gossip, Sizes
from gossip.swim.events import Action, Change, Event, Notify, Received, Replied, Send
from gossip.swim.members import Member, fingerprint

# So many nodes are checked from scratch, in turn, each so many simulated seconds.
_FULL_NODES = 10
_FULL_EVERY_S = 2.0
# A candidate has one ping a second, each awaited for two; a probe and some of the dead have the rest.
_PINGS_PER_CANDIDATE = 4
_PINGS_MORE = 16
# A probe, a comparison, and one of each candidate every other second.
_REQUESTS_MORE = 32
# A suspicion may be brought forward twice; a ping has two timers; the rest are single ones.
_TIMERS_PER_MEMBER = 8
_TIMERS_PER_PING = 4
_TIMERS_MORE = 64

#: What a node may hold at most, whatever else it holds; the other sizes follow from these, or have no such limit.
_MAXIMA = Sizes(
    members=limits.MEMBERS_MAX,
    live=limits.MEMBERS_MAX + 1,
    unconfirmed=limits.UNCONFIRMED_MAX,
    buried=limits.TOMBSTONES_MAX,
    record_bytes=limits.RECORDS_BYTES_MAX,
    candidates=limits.CANDIDATES_MAX,
    incompatible=limits.INCOMPATIBLE_MAX,
    news=limits.MEMBERS_MAX + 1,
    pulls=limits.MEMBERS_MAX,
    pings=sys.maxsize,
    relays=limits.RELAYED_PINGS_MAX,
    requests=sys.maxsize,
    timers=sys.maxsize,
)

#: Incarnation, status and record version of a member as a node believes them, and the record that it holds.
_Belief = tuple[int, Status, int, Record | None]


class InvariantViolated(Exception):
    """Something that must never happen. The message says what, when, and how to see it again."""


@dataclass
class _Owner:
    """The highest that a node has reached in all its lives, and every record that it wrote."""

    incarnation: int = 0
    version: int = 0
    written: dict[int, set[tuple[tuple[str, ...], int, bytes]]] = field(default_factory=dict)


class Invariants:
    """Checks one simulation from its beginning. ``replay``: the command that shows a violation again."""

    def __init__(self, simulation: Simulation, replay: str) -> None:
        self._simulation = simulation
        self._replay = replay
        self._owners: dict[bytes, _Owner] = {}
        # (node, its generation) → what it believed: (incarnation, status, version, the record held)
        self._believed: dict[tuple[int, int], dict[NodeId, _Belief]] = {}
        self._own: dict[tuple[int, int], tuple[int, Record]] = {}
        self._next_full = 0
        simulation.on_step = self._after_step
        simulation.at(simulation.now_s + _FULL_EVERY_S, self._every_second)

    def check_everything(self) -> None:
        """Checks all nodes from scratch."""
        for node in self._simulation.nodes:
            self._check_node(node)

    def _every_second(self) -> None:
        nodes = self._simulation.nodes
        for _ in range(min(_FULL_NODES, len(nodes))):
            self._next_full = (self._next_full + 1) % len(nodes)
            self._check_node(nodes[self._next_full])
        self._simulation.at(self._simulation.now_s + _FULL_EVERY_S, self._every_second)

    def _check_node(self, node: Node) -> None:
        if node.core is not None:
            beliefs = self._beliefs_of(node)
            for member in node.core.members:
                self._check_member(node, beliefs, member)
            self._check_structure(node, node.core)

    def _fail(self, node: Node, what: str) -> None:
        raise InvariantViolated(
            f"node {node.index} ({node.id.hex()}): {what}\n"
            f"seed {self._simulation.seed}, after {self._simulation.now_s:.3f} simulated seconds; to see it again:\n"
            f"    {self._replay}"
        )

    # --- after a step

    def _after_step(self, node: Node, cause: Event | Request, actions: list[Action]) -> None:
        core = node.core
        assert core is not None
        self._note_own(node, core)
        self._check_sizes(node, core)
        touched = set(_spoken_of(cause))
        for action in actions:
            if isinstance(action, Send):
                self._check_claims(node, action.packet)
            elif isinstance(action, Notify):
                touched.add(action.node)
                if action.change is Change.FORGOTTEN:
                    self._beliefs_of(node).pop(action.node, None)
        beliefs = self._beliefs_of(node)
        for touched_node in touched:
            member = core.members.get(NodeId(touched_node))
            if member is not None:
                self._check_member(node, beliefs, member)

    def _note_own(self, node: Node, core: Gossip) -> None:
        incarnation, record = core.incarnation, core.record
        life = (node.index, node.generation)
        before = self._own.get(life)
        if before is not None:
            if incarnation == before[0] and record is before[1]:
                return
            if incarnation < before[0] or record.version < before[1].version:
                self._fail(node, f"its own counters fell from {before} to {(incarnation, record)}")
        self._own[life] = (incarnation, record)
        owner = self._owners.setdefault(node.id, _Owner())
        owner.incarnation = max(owner.incarnation, incarnation)
        owner.version = max(owner.version, record.version)
        owner.written.setdefault(record.version, set()).add(_content(record))

    def _check_claims(self, node: Node, packet: Packet) -> None:
        """Fails if a packet says more of a node than that node has said itself."""
        for update in packet.updates:
            owner = self._owners.get(update.node)
            if owner is None or update.incarnation > owner.incarnation or update.version > owner.version:
                self._fail(node, f"says {update} of a node that never reached that")
        if self._simulation.packet_bytes_max > limits.PACKET_BYTES_MAX:
            self._fail(node, f"sends a packet of {self._simulation.packet_bytes_max} bytes")

    def _beliefs_of(self, node: Node) -> dict[NodeId, _Belief]:
        return self._believed.setdefault((node.index, node.generation), {})

    def _check_member(self, node: Node, beliefs: dict[NodeId, _Belief], member: Member) -> None:
        if (member.suspicion is not None) != (member.status is Status.SUSPECT):
            self._fail(node, f"suspects {member.node.hex()} without a deadline, or has one without suspecting it")
        known = beliefs.get(member.node)
        record = member.record
        now = (member.incarnation, member.status, member.version, record)
        if known is not None and known[:3] == now[:3] and known[3] is record:
            return  # what was right once stays so: owners only rise
        owner = self._owners.get(member.node)
        if owner is None or member.incarnation > owner.incarnation or member.version > owner.version:
            self._fail(node, f"believes more of {member.node.hex()} than it ever said: {member.update()}")
            return
        if record is not None and _content(record) not in owner.written.get(record.version, ()):
            self._fail(
                node, f"holds version {record.version} of {member.node.hex()}'s record, which it did not write so"
            )
        if known is not None and (now[:2] < known[:2] or now[2] < known[2] or _version(record) < _version(known[3])):
            self._fail(node, f"its belief of {member.node.hex()} fell from {known} to {now}")
        beliefs[member.node] = now

    def _check_sizes(self, node: Node, core: Gossip) -> None:
        sizes = core.sizes
        if (
            any(map(operator.gt, sizes, _MAXIMA))
            or sizes.news > sizes.members + 1
            or sizes.pulls > sizes.members
            or sizes.pings > sizes.relays + _PINGS_PER_CANDIDATE * sizes.candidates + _PINGS_MORE
            or sizes.requests > limits.PULLS_MAX + sizes.candidates + _REQUESTS_MORE
            or sizes.timers > _TIMERS_PER_MEMBER * (sizes.members + 1) + _TIMERS_PER_PING * sizes.pings + _TIMERS_MORE
        ):
            self._fail(node, f"holds {sizes}, which is more than it may")

    # --- everything

    def _check_structure(self, node: Node, core: Gossip) -> None:
        """Fails if what is kept beside the members themselves does not agree with them."""
        members = core.members
        live = {member.node for member in members if member.is_live}
        if set(core.probed) != live or len(core.probed) != len(live):
            self._fail(node, "probes others than the live members")
        if members.get(core.node) is not None:
            self._fail(node, "is a member of itself")
        if members.n_live != len(live) + 1 or {member.node for member in members.gone} & live:
            self._fail(node, "counts its live members wrongly")
        if {member.node for member in members.unconfirmed} != {m.node for m in members if m.record is None}:
            self._fail(node, "does not know whose records it lacks")
        if members.record_bytes != sum(len(m.record.payload) for m in members if m.record is not None):
            self._fail(node, "counts the bytes of its records wrongly")
        anew = fingerprint(core.own_update())
        for member in members:
            if member.is_live and not member.is_hearsay:
                anew ^= fingerprint(member)
            paths = [path.address for path in member.paths.all()]
            if len(paths) > limits.PATHS_MAX:
                self._fail(node, f"has {len(paths)} addresses of one member")
            if member.address is not None and member.address not in paths:
                self._fail(node, f"uses an address of {member.node.hex()} that it does not know")
        if members.hash(core.own_update()) != anew.to_bytes(16, "big"):
            self._fail(node, "its hash is not that of what it believes")
        if not 0 <= core.health.score < core.settings.health_max:
            self._fail(node, f"its health is {core.health.score}")


def _version(record: Record | None) -> int:
    return -1 if record is None else record.version


def _content(record: Record) -> tuple[tuple[str, ...], int, bytes]:
    return record.addresses, record.port, record.payload


def _spoken_of(cause: Event | Request) -> Iterable[bytes]:
    """The nodes of which a packet, a request or a reply told something."""
    told: Event | Request | Reply | Packet | None = cause
    if isinstance(cause, Received):
        told = cause.packet
    elif isinstance(cause, Replied):
        told = cause.reply
    if isinstance(told, PingRequest | PingReply):
        told = told.packet
    if isinstance(told, Packet):
        return (told.sender, *(update.node for update in told.updates))
    if isinstance(told, SyncRequest | SyncReply):
        return (told.sender, *(update.node for update in told.members))
    if isinstance(told, PullReply) and told.record is not None:
        return (told.record.node,)
    return ()
