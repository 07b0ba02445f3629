"""News on its way: the newest of each member, least-sent first, each sent a bounded number of times.

The queue holds only *whose* state changed; what is sent is the state at that moment, so old news is never sent.
"""

from __future__ import annotations

from itertools import islice

from gossip.state import NodeId


class Broadcasts:
    """Members whose state is news, in levels by how often it was sent."""

    def __init__(self) -> None:
        self._levels: list[dict[NodeId, None]] = []
        self._level_of: dict[NodeId, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def add(self, node: NodeId) -> None:
        """Takes that a member's state changed: it is sent anew from the start."""
        self.discard(node)
        self._put(node, 0)

    def discard(self, node: NodeId) -> None:
        """Sends nothing of a member any more."""
        level = self._level_of.pop(node, None)
        if level is not None:
            del self._levels[level][node]

    def pick(self, limit: int, transmits: int) -> list[NodeId]:
        """Up to ``limit`` members, least-sent first, newest first among these; each counts as sent once more."""
        chosen: list[tuple[NodeId, int]] = []
        for number, level in enumerate(self._levels):
            if len(chosen) == limit:
                break
            chosen += [(node, number) for node in islice(reversed(level), limit - len(chosen))]
        for node, number in chosen:
            del self._levels[number][node]
            if number + 1 < transmits:
                self._put(node, number + 1)
            else:
                del self._level_of[node]
        return [node for node, _ in chosen]

    def _put(self, node: NodeId, number: int) -> None:
        if len(self._levels) <= number:
            self._levels.append({})
        self._levels[number][node] = None
        self._level_of[node] = number
