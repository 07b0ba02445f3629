"""Whom to probe next: every member once a round, in an order of this node's own.

The order stays, and newcomers go to random places: so nobody waits longer than one round, where SWIM's shuffle after
each round lets it be almost two.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from gossip.state import NodeId


class ProbeRing:
    """The members in the order in which they are probed. ``random`` decides where newcomers go."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._order: list[NodeId] = []
        self._members: set[NodeId] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._order)

    def add(self, node: NodeId) -> None:
        """Has a member probed from now on."""
        if node in self._members:
            return
        self._members.add(node)
        place = self._random.randrange(len(self._order) + 1)
        self._order.insert(place, node)
        if place < self._next:
            self._next += 1

    def remove(self, node: NodeId) -> None:
        """Has a member probed no longer."""
        if node not in self._members:
            return
        self._members.discard(node)
        place = self._order.index(node)
        del self._order[place]
        if place < self._next:
            self._next -= 1

    def next(self) -> NodeId | None:
        """The member to be probed next; None if there is nobody."""
        if not self._order:
            return None
        self._next %= len(self._order)
        node = self._order[self._next]
        self._next += 1
        return node

    def sample(self, count: int, without: NodeId | None = None) -> list[NodeId]:
        """Up to ``count`` different random members."""
        if len(self._order) <= 4 * count:
            others = [node for node in self._order if node != without]
            return self._random.sample(others, min(count, len(others)))
        chosen: list[NodeId] = []
        # Few of many: drawing again is cheaper than copying the list.
        for _ in range(4 * count):
            node = self._order[int(self._random.random() * len(self._order))]
            if node != without and node not in chosen:
                chosen.append(node)
                if len(chosen) == count:
                    break
        return chosen
