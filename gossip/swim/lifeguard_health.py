"""Lifeguard's local health: a node that misses answers it should have had suspects itself first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LocalHealth:
    """``score`` 0 is healthy; timeouts are ``score + 1`` times as long."""

    maximum: int
    score: int = 0

    def worse(self, by: int = 1) -> None:
        """An answer was missed, a helper was silent, the loop was late, or this node had to refute."""
        self.score = min(self.maximum - 1, self.score + by)

    def better(self) -> None:
        """A probe went well."""
        self.score = max(0, self.score - 1)

    def scaled(self, time_s: float) -> float:
        """``time_s``, longer the worse this node's own health is."""
        return time_s * (self.score + 1)
