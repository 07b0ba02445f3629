"""Which nodes the swarm has, with their records: what gossip knows, in this program's terms. Without I/O or a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossip import Gossip, Member, NodeId, Status, boot_of
from node.records import Record, RecordError, decode

#: A node that was away for longer is no longer planned with; until then its slices wait for it.
FORGET_AFTER_S = 60.0


@dataclass(frozen=True)
class Peer:
    """Another node. ``url`` is its agent's, at the address that answers; ``silent_s`` how long it was not heard."""

    record: Record
    url: str
    alive: bool
    silent_s: float


class Membership:
    """The peers of one node. ``swarm``: its name, which records repeat."""

    def __init__(self, core: Gossip, swarm: str) -> None:
        self._core = core
        self._swarm = swarm
        self._records: dict[NodeId, tuple[int, Record]] = {}
        self._refused: dict[NodeId, str] = {}

    def record_changed(self, node: NodeId) -> None:
        """Takes that gossip holds a newer record of a node."""
        member = self._core.members.get(node)
        if member is None or member.record is None:
            return
        self._refused.pop(node, None)
        try:
            record = decode(member.record.payload)
            if record.node != node.hex():
                raise RecordError(f"its record is of node {record.node}")
            if record.swarm != self._swarm:
                raise RecordError(f"it is of swarm {record.swarm!r}")
        except RecordError as error:
            # Shown, and given no work.
            self._records.pop(node, None)
            self._refused[node] = str(error)
            return
        self._records[node] = (member.record.version, record)

    def forgotten(self, node: NodeId) -> None:
        """Takes that gossip no longer knows a node."""
        self._records.pop(node, None)
        self._refused.pop(node, None)

    def refusal(self, node: NodeId) -> str:
        """Why a member is given no work; empty if it is."""
        return self._refused.get(node, "")

    def knows(self, node: NodeId) -> bool:
        """Whether there is a record of the node that could be read."""
        return node in self._records

    def name(self, node: NodeId) -> str:
        """What a member is called, or its id while that is not known."""
        entry = self._records.get(node)
        return node.hex() if entry is None else entry[1].name

    def known(self, now_s: float) -> Mapping[str, Peer]:
        """Peers by node id: the live ones, and those that went without a goodbye less than FORGET_AFTER_S ago."""
        peers = {}
        for member in self._core.members:
            entry = self._records.get(member.node)
            if entry is None or member.address is None or not _counts(member, now_s):
                continue
            silent_s = now_s - (member.heard_s if member.heard_s is not None else member.since_s)
            # What it had ready before it was started again is gone, whatever its last record says.
            alive = member.is_live and boot_of(entry[0]) >= boot_of(member.incarnation)
            peers[member.node.hex()] = Peer(entry[1], f"http://{member.address}", alive, max(0.0, silent_s))
        return peers

    def alive(self, now_s: float) -> dict[str, Peer]:
        """The live peers by node id."""
        return {node: peer for node, peer in self.known(now_s).items() if peer.alive}


def _counts(member: Member, now_s: float) -> bool:
    if member.is_live:
        return True
    return member.status is Status.DEAD and now_s - member.since_s <= FORGET_AFTER_S
