"""Lifeguard: how long a suspicion lives, and a node that misses answers suspects itself first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gossip.state import NodeId
from gossip.swim.settings import Settings


@dataclass
class Suspicion:
    """The suspicion of one member since ``started_s``. ``accusers`` are who suspects it, this node included."""

    started_s: float
    accusers: set[NodeId] = field(default_factory=set)

    def confirm(self, accuser: NodeId, settings: Settings) -> bool:
        """Takes another member's suspicion. True if it shortens this one."""
        if accuser in self.accusers or len(self.accusers) > settings.confirmations:
            return False
        self.accusers.add(accuser)
        return True

    def deadline_s(self, n_members: int, settings: Settings) -> float:
        """When the suspect is to be declared dead.

        As in Lifeguard, section IV-B: ``max - (max - min) · log(c + 1) / log(k + 1)``, where c is the number of
        confirmations and k that needed. With too few members to give k there is nobody to wait for.
        """
        shortest_s = settings.suspicion_min_s(n_members)
        needed = settings.confirmations
        if n_members - 2 < needed:
            return self.started_s + shortest_s
        longest_s = settings.suspicion_max_factor * shortest_s
        confirmed = max(0, len(self.accusers) - 1)
        share = min(1.0, math.log(confirmed + 1) / math.log(needed + 1))
        return self.started_s + longest_s - (longest_s - shortest_s) * share


@dataclass
class LocalHealth:
    """How far this node doubts itself: ``score`` 0 is healthy; timeouts are ``score + 1`` times as long."""

    maximum: int
    score: int = 0

    def worse(self, by: int = 1) -> None:
        """Counts a missed answer, a silent helper, a late loop, or a suspicion that this node had to refute."""
        self.score = min(self.maximum - 1, self.score + by)

    def better(self) -> None:
        """Counts a probe that went well."""
        self.score = max(0, self.score - 1)

    def scaled(self, time_s: float) -> float:
        """``time_s``, longer the worse this node's own health is."""
        return time_s * (self.score + 1)
