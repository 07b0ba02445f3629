"""Which nodes are there, from heartbeats. Pure: time comes in as an argument, nothing is sent from here.

The plain rule, until gossip takes its place: every node posts its record to every peer it knows each second, and takes the
peer's record from the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from node.records import Record

# Five missed heartbeats in a row.
DEAD_AFTER_S = 5.0
# A node that was away for longer is no longer planned with; until then its slices wait for it.
FORGET_AFTER_S = 60.0
# Everybody posts to everybody, which is for small swarms only.
PEERS_MAX = 64
# Addresses to try for a peer that was only announced.
CANDIDATES_MAX = 256


@dataclass(frozen=True)
class Peer:
    """A peer as this node knows it. ``url``: of its agent, at the address that answered last."""

    record: Record
    url: str
    heard_s: float


@dataclass
class Membership:
    """The peers of one node."""

    own_id: str
    swarm: str
    _peers: dict[str, Peer] = field(default_factory=dict)
    _candidates: dict[str, str] = field(default_factory=dict)  # url → how it was found
    _departed: dict[str, int] = field(default_factory=dict)  # node → the boot that said goodbye; the last ones
    _refused: dict[str, str] = field(default_factory=dict)  # candidate's url → why it is no peer

    def announce(self, url: str, source: str) -> bool:
        """A peer may be at ``url``; ``source`` says how that is known. False: known already, or too many."""
        if url in self._candidates or len(self._candidates) >= CANDIDATES_MAX:
            return False
        self._candidates[url] = source
        return True

    def withdraw(self, url: str) -> None:
        """Discovery no longer sees ``url``. A peer that answers there stays one."""
        if not any(peer.url == url for peer in self._peers.values()):
            self._candidates.pop(url, None)
            self._refused.pop(url, None)

    def heard(self, record: Record, url: str, now_s: float) -> bool:
        """A record came from the node itself. True when it is news: a new peer, or a changed record."""
        if record.node == self.own_id or record.swarm != self.swarm:
            self._refuse(url, "this node itself" if record.node == self.own_id else f"of swarm {record.swarm!r}")
            return False
        if record.boot <= self._departed.get(record.node, -1):
            # It answers until its last connection is closed, but it is leaving.
            return False
        known = self._peers.get(record.node)
        if known is None and len(self._peers) >= PEERS_MAX:
            self._refuse(url, f"more than {PEERS_MAX} peers")
            return False
        if known is not None and (record.boot, record.sequence) < (known.record.boot, known.record.sequence):
            # An old message that came late: the node lives, but this is not its state.
            return False
        self._refused.pop(url, None)
        self._peers[record.node] = Peer(record, url, now_s)
        return known is None or known.record != record

    def _refuse(self, url: str, reason: str) -> None:
        # Only what would be tried again: who calls from ever new ports must not fill the memory.
        if url in self._candidates:
            self._refused[url] = reason

    def said_goodbye(self, node_id: str, boot: int) -> bool:
        """The node ends on purpose. True when it was a peer."""
        known = self._peers.get(node_id)
        if known is None or known.record.boot != boot:
            return False
        del self._peers[node_id]
        self._departed[node_id] = boot
        if len(self._departed) > PEERS_MAX:
            del self._departed[next(iter(self._departed))]
        return True

    def forget(self, now_s: float) -> list[Peer]:
        """Removes and returns peers that have been away for too long."""
        gone = [peer for peer in self._peers.values() if now_s - peer.heard_s > FORGET_AFTER_S]
        for peer in gone:
            del self._peers[peer.record.node]
        return gone

    def alive(self, now_s: float) -> dict[str, Peer]:
        """Peers heard of lately, by node id."""
        return {i: peer for i, peer in self._peers.items() if now_s - peer.heard_s <= DEAD_AFTER_S}

    def known(self) -> Mapping[str, Peer]:
        """All peers, the absent ones included, by node id."""
        return self._peers

    def targets(self) -> Iterable[str]:
        """URLs to send the next heartbeat to: every peer, and every announced one that is not known to be none."""
        urls = {peer.url for peer in self._peers.values()}
        return urls | {url for url in self._candidates if url not in self._refused}

    def unreachable(self, url: str) -> bool:
        """A heartbeat to ``url`` failed. True if it is only a candidate, which costs nothing to keep trying."""
        return not any(peer.url == url for peer in self._peers.values())

    def source(self, url: str) -> str:
        """How ``url`` was found."""
        return self._candidates.get(url, "it called")
