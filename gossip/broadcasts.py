"""News on its way: the newest of each member, least-sent first, each sent a bounded number of times.

The queue holds only *whose* state changed; what is sent is the state at that moment, so old news is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator

from gossip.state import NodeId


class Broadcasts:
    """Members whose state is news, in levels by how often it was sent."""

    def __init__(self) -> None:
        self._levels: list[dict[NodeId, None]] = []
        self._level_of: dict[NodeId, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def add(self, node: NodeId) -> None:
        """The member's state changed: it is sent anew from the start."""
        self.discard(node)
        self._put(node, 0)

    def discard(self, node: NodeId) -> None:
        """The member is forgotten."""
        level = self._level_of.pop(node, None)
        if level is not None:
            del self._levels[level][node]

    def pick(self, limit: int, transmits: int) -> Iterator[NodeId]:
        """Up to ``limit`` members, least-sent first, newest first among these; each counts as sent once more."""
        chosen: list[NodeId] = []
        for level in self._levels:
            if len(chosen) >= limit:
                break
            for node in reversed(level):
                chosen.append(node)
                if len(chosen) >= limit:
                    break
        for node in chosen:
            level_before = self._level_of[node]
            self.discard(node)
            if level_before + 1 < transmits:
                self._put(node, level_before + 1)
        yield from chosen

    def _put(self, node: NodeId, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append({})
        self._levels[level][node] = None
        self._level_of[node] = level
