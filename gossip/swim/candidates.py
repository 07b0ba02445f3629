"""Addresses at which somebody may be, announced by multicast DNS or named as seeds, until a member answers there.

They are tried for ever, at growing intervals: a seed may be switched on an hour later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gossip.address import Address
from gossip.limits import CANDIDATES_MAX
from gossip.state import NodeId
from gossip.swim.settings import Settings


@dataclass
class Candidate:
    """One address that is tried. ``member`` answered there last."""

    address: Address
    source: str
    next_s: float
    period_s: float
    tries: int = 0
    tried_s: float = float("-inf")
    member: NodeId | None = None
    problem: str = ""


class Candidates:
    """The candidates of one node."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._all: dict[Address, Candidate] = {}

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def get(self, address: Address) -> Candidate | None:
        """The candidate at an address."""
        return self._all.get(address)

    def add(self, address: Address, source: str, now_s: float) -> None:
        """Adds an address, to be tried at once, but no address more often than each `candidate_retry_s`."""
        known, retry_s = self._all.get(address), self._settings.candidate_retry_s
        if known is not None:
            known.source = source
            known.next_s, known.period_s = max(now_s, known.tried_s + retry_s), retry_s
        elif len(self._all) < CANDIDATES_MAX:
            self._all[address] = Candidate(address, source, now_s, retry_s)

    def remove(self, address: Address) -> None:
        """Removes an address whose source no longer names it."""
        self._all.pop(address, None)

    def answered(self, address: Address, member: NodeId) -> None:
        """Takes that a member answered at an address."""
        candidate = self._all.get(address)
        if candidate is not None:
            candidate.member, candidate.problem = member, ""

    def refuse(self, address: Address, problem: str) -> None:
        """Notes that who is at an address is no peer, and why."""
        candidate = self._all.get(address)
        if candidate is not None:
            candidate.problem = problem

    def due(self, now_s: float) -> list[Candidate]:
        """The candidates to be tried now; each waits longer after it."""
        due = [candidate for candidate in self._all.values() if candidate.next_s <= now_s]
        for candidate in due:
            candidate.tries += 1
            candidate.tried_s = now_s
            candidate.next_s = now_s + candidate.period_s
            candidate.period_s = min(2 * candidate.period_s, self._settings.candidate_retry_max_s)
        return due

    def next_s(self) -> float | None:
        """When the next candidate is to be tried; None without any."""
        return min((candidate.next_s for candidate in self._all.values()), default=None)
