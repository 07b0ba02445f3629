"""Records that are to be fetched: from whom, how many at a time, and when again."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from gossip.address import Address
from gossip.limits import PULLS_MAX
from gossip.state import NodeId

_RETRY_S = 0.5
_RETRY_MAX_S = 8.0
# Asked in one go; most of the others do not have it either.
_SOURCES_MAX = 4


@dataclass
class _Pull:
    teller: Address | None
    not_before_s: float = 0.0
    retry_s: float = _RETRY_S
    tried: set[Address] = field(default_factory=set)


class Pulls:
    """Members whose record is wanted. There is at most one pull of each under way, and PULLS_MAX of all."""

    def __init__(self) -> None:
        self._wanted: dict[NodeId, _Pull] = {}
        self._running: set[NodeId] = set()

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, node: NodeId, teller: Address | None) -> None:
        """News of a newer record came from ``teller``."""
        known = self._wanted.get(node)
        if known is None:
            self._wanted[node] = _Pull(teller)
        else:
            known.teller = teller if teller is not None else known.teller
            known.not_before_s, known.retry_s = 0.0, _RETRY_S
            known.tried.clear()

    def next(self, now_s: float) -> NodeId | None:
        """A member to pull now; it counts as under way until `done` or `failed`."""
        if len(self._running) >= PULLS_MAX:
            return None
        for node, pull in self._wanted.items():
            if node not in self._running and pull.not_before_s <= now_s:
                self._running.add(node)
                return node
        return None

    def source(self, node: NodeId, owner: list[Address], others: list[Address], random: Random) -> Address | None:
        """Whom to ask: the teller or the owner, at random, then the other, then anybody; None: nobody for now."""
        pull = self._wanted[node]
        first = [pull.teller] if pull.teller is not None else []
        first += owner
        if len(first) > 1 and random.random() < 0.5:
            first.reverse()
        if len(pull.tried) < _SOURCES_MAX:
            for address in [*first, *others]:
                if address not in pull.tried:
                    pull.tried.add(address)
                    return address
        pull.tried.clear()
        return None

    def done(self, node: NodeId) -> None:
        """It is held, or no longer wanted: the member is forgotten."""
        self._running.discard(node)
        self._wanted.pop(node, None)

    def failed(self, node: NodeId, now_s: float) -> None:
        """It did not come: again later, from another if there is one."""
        self._running.discard(node)
        pull = self._wanted.get(node)
        if pull is not None:
            pull.not_before_s = now_s + (0.0 if pull.tried else pull.retry_s)
            if not pull.tried:
                pull.retry_s = min(2 * pull.retry_s, _RETRY_MAX_S)

    def next_s(self) -> float | None:
        """When a pull that waits may go on; None if none waits for time."""
        if len(self._running) >= PULLS_MAX:
            return None
        return min((p.not_before_s for n, p in self._wanted.items() if n not in self._running), default=None)
