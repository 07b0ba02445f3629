"""Who routes, and since which term: what this node sees of the others' records, and the terms that it takes itself."""

from __future__ import annotations

import time
from collections.abc import Iterable

from node.agent.placement import Candidate, elect
from node.peers.identity import Identity
from node.peers.membership import Membership, Peer
from node.records import Record

# An election waits until every peer that was announced had time to answer.
ELECTION_DELAY_S = 3.0


class Election:
    """One node's view of it."""

    def __init__(self, identity: Identity, membership: Membership) -> None:
        self._identity = identity
        self._membership = membership
        self._started_s = time.monotonic()
        self._highest_term = identity.term

    def is_won_by(self, own: Record, now_s: float) -> bool:
        """Whether the node of this record is the router, or has to become it."""
        alive = [peer.record for peer in self._membership.alive(now_s).values()]
        # Also of routers that are gone: expert servers refuse a term below one they have seen.
        heard = [
            peer.record.router.term for peer in self._membership.known(now_s).values() if peer.record.router is not None
        ]
        self._highest_term = max([self._highest_term, *heard])
        chosen = elect([_candidate(record) for record in [own, *alive]])
        return chosen is not None and chosen.node_id == own.node

    def is_open(self, now_s: float) -> bool:
        """Whether this node was there for long enough to know who else is."""
        return now_s - self._started_s >= ELECTION_DELAY_S

    def take_term(self) -> int:
        """A term above all that were seen, kept on disk. Raises IdentityError."""
        term = max(self._highest_term, self._identity.term) + 1
        self._identity.save_term(term)
        return term


def routing_peer(peers: Iterable[Peer]) -> Peer | None:
    """The one of the live peers that routes; None if none does."""
    # As elect() does: of two with one term, the lower id.
    routing = [(-peer.record.router.term, peer.record.node, peer) for peer in peers if peer.record.router is not None]
    return min(routing, key=lambda entry: entry[:2])[2] if routing else None


def _candidate(record: Record) -> Candidate:
    return Candidate(
        record.node,
        record.memory_bytes,
        record.can_route,
        record.router.term if record.router is not None else 0,
        record.fetches,
    )
