"""The members of a swarm as one node sees them: beliefs and records, merged. Without I/O, timers or a clock."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gossip.address import Address
from gossip.limits import MEMBERS_MAX, RECORDS_BYTES_MAX, TOMBSTONES_MAX, UNCONFIRMED_MAX
from gossip.messages import ACCUSERS_MAX, Record, Update
from gossip.state import NodeId, Status
from gossip.swim.lifeguard import Suspicion
from gossip.swim.paths import Paths


@dataclass(slots=True)
class Member:
    """Another node. ``version`` is that of the newest record heard of, ``record`` the newest one held.

    ``since_s``: when ``status`` last changed. ``heard_s``: when the member itself was last heard.
    """

    node: NodeId
    incarnation: int
    status: Status
    version: int
    since_s: float
    source: str
    heard_s: float | None = None
    record: Record | None = None
    suspicion: Suspicion | None = None
    paths: Paths = field(default_factory=Paths)

    @property
    def is_live(self) -> bool:
        """Whether it is alive as far as anybody knows: suspects are."""
        return self.status <= Status.SUSPECT

    @property
    def is_hearsay(self) -> bool:
        """Whether it is live only by what others told. That is not passed on, or it could go round for ever."""
        return self.is_live and self.record is None

    @property
    def address(self) -> Address | None:
        """The address at which it is spoken to."""
        return self.paths.current

    @property
    def has_newest_record(self) -> bool:
        """Whether no newer record was heard of than the one held."""
        return self.record is not None and self.record.version >= self.version

    def update(self) -> Update:
        """What others are to know of it."""
        accusers = tuple(sorted(self.suspicion.accusers))[:ACCUSERS_MAX] if self.suspicion is not None else ()
        return Update(self.node, self.incarnation, int(self.status), self.version, accusers)


class Members:
    """All other nodes that this one knows. ``own`` is never among them."""

    def __init__(self, own: NodeId) -> None:
        self.own = own
        self._members: dict[NodeId, Member] = {}
        self._tombstones: OrderedDict[NodeId, tuple[int, float]] = OrderedDict()
        self._gone: dict[NodeId, Member] = {}
        self._unconfirmed: dict[NodeId, Member] = {}
        self._record_bytes = 0
        self._hash = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, node: NodeId) -> Member | None:
        """The member, or None."""
        return self._members.get(node)

    @property
    def n_live(self) -> int:
        """Live members, this node included."""
        return len(self._members) - len(self._gone) + 1

    @property
    def gone(self) -> list[Member]:
        """The members that died or left and are not forgotten yet."""
        return list(self._gone.values())

    @property
    def unconfirmed(self) -> list[Member]:
        """The members without a record."""
        return list(self._unconfirmed.values())

    @property
    def n_unconfirmed(self) -> int:
        """How many members are without a record."""
        return len(self._unconfirmed)

    @property
    def n_buried(self) -> int:
        """Nodes of which only an incarnation is remembered."""
        return len(self._tombstones)

    @property
    def record_bytes(self) -> int:
        """The bytes of all records' payloads together."""
        return self._record_bytes

    def buried(self, node: NodeId) -> int | None:
        """The incarnation at which a node that was forgotten had died."""
        entry = self._tombstones.get(node)
        return None if entry is None else entry[0]

    def add(self, node: NodeId, incarnation: int, version: int, source: str, now_s: float) -> Member | None:
        """Adds a live member; None where there are too many."""
        if len(self._members) >= MEMBERS_MAX or len(self._unconfirmed) >= UNCONFIRMED_MAX:
            return None
        self._tombstones.pop(node, None)
        member = Member(node, incarnation, Status.ALIVE, version, now_s, source)
        self._members[node] = member
        self._unconfirmed[node] = member
        return member

    def change(self, member: Member, now_s: float, *, incarnation: int, status: Status, version: int) -> None:
        """Sets what is believed of a member."""
        self._toggle(member)
        if status is not member.status:
            member.since_s = now_s
        member.incarnation, member.status, member.version = incarnation, status, version
        self._toggle(member)
        if member.is_live:
            self._gone.pop(member.node, None)
        else:
            self._gone[member.node] = member

    def keep_record(self, member: Member, record: Record) -> bool:
        """Keeps a record of the member. False: it is not newer, or there is no room for it."""
        old = member.record
        if old is not None and record.version <= old.version:
            return False
        grows = len(record.payload) - (len(old.payload) if old is not None else 0)
        if self._record_bytes + grows > RECORDS_BYTES_MAX:
            return False
        self._record_bytes += grows
        self._unconfirmed.pop(member.node, None)
        self._toggle(member)
        member.record = record
        self._toggle(member)
        return True

    def forget(self, member: Member, now_s: float, *, bury: bool = True) -> None:
        """Removes a member; with ``bury`` its incarnation is remembered."""
        del self._members[member.node]
        self._gone.pop(member.node, None)
        self._unconfirmed.pop(member.node, None)
        self._toggle(member)
        if member.record is not None:
            self._record_bytes -= len(member.record.payload)
        if bury:
            self._tombstones[member.node] = (member.incarnation, now_s)
            while len(self._tombstones) > TOMBSTONES_MAX:
                self._tombstones.popitem(last=False)

    def forget_tombstones(self, before_s: float) -> None:
        """Drops what is remembered of nodes that were forgotten before then."""
        while self._tombstones:
            node, (_, buried_s) = next(iter(self._tombstones.items()))
            if buried_s >= before_s:
                return
            del self._tombstones[node]

    def hash(self, own: Update) -> bytes:
        """A hash of the live members that are not hearsay, and ``own``: equal in nodes that agree on incarnations and
        versions."""
        return (self._hash ^ fingerprint(own)).to_bytes(16, "big")

    def _toggle(self, member: Member) -> None:
        if member.is_live and member.record is not None:
            self._hash ^= fingerprint(member)


def fingerprint(member: Member | Update) -> int:
    """A number of 128 bits that stands for who it is and what is known of it."""
    # A suspicion is underway or refuted within seconds: it is not worth comparing whole views for.
    text = member.node + member.incarnation.to_bytes(8, "big") + member.version.to_bytes(8, "big")
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")
