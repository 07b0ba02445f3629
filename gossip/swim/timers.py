"""Timers of a state machine that has no clock: what is to be done when, and by whom."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

Subject = TypeVar("Subject")


class Timers:
    """Each pair of an action and its subject has one timer at most; setting it again can only bring it forward.

    So a peer that makes a node set timers does not make it hold more of them than it has actions and members.
    """

    def __init__(self) -> None:
        self._due: dict[tuple[Callable[[float, Any], None], Any], float] = {}
        self._heap: list[tuple[float, int, tuple[Callable[[float, Any], None], Any]]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """When `run` is to be called; infinite if nothing is to be done."""
        heap, due = self._heap, self._due
        while heap:
            when_s, _, key = heap[0]
            if due.get(key) == when_s:
                return when_s
            heapq.heappop(heap)  # cancelled, or brought forward
        return float("inf")

    def set(self, when_s: float, action: Callable[[float, Subject], None], subject: Subject) -> None:
        """Has ``action(now_s, subject)`` called at ``when_s``, or earlier if that was said before."""
        key = (action, subject)
        known_s = self._due.get(key)
        if known_s is None or when_s < known_s:
            self._due[key] = when_s
            heapq.heappush(self._heap, (when_s, next(self._count), key))

    def cancel(self, action: Callable[[float, Subject], None], subject: Subject) -> None:
        """Ends the timer of an action and its subject."""
        self._due.pop((action, subject), None)

    def run(self, now_s: float) -> None:
        """Calls the actions that are due."""
        while self.next_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            action, subject = key
            action(now_s, subject)
