"""Totals of counters whose process starts anew: they go on where they were, and never fall."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Counters(Generic[K]):
    """By name. ``names_max``: what comes under further names is left out, since some are of nodes that come and go."""

    def __init__(self, names_max: int = 4096) -> None:
        self._names_max = names_max
        self._before: dict[K, float] = {}  # of processes that have ended
        self._now: dict[K, float] = {}

    def take(self, values: Mapping[K, float]) -> None:
        """What the process says its counters are now. One that is lower than last time has started anew."""
        for name, value in values.items():
            last = self._now.get(name)
            if last is None and name not in self._before and len(self) >= self._names_max:
                continue
            if last is not None and value < last:
                self._before[name] = self._before.get(name, 0.0) + last
            self._now[name] = value

    def restarted(self) -> None:
        """The process has ended: the next values are of another one."""
        for name, value in self._now.items():
            self._before[name] = self._before.get(name, 0.0) + value
        self._now.clear()

    def __getitem__(self, name: K) -> float:
        """The total; 0 before the first value."""
        return self._before.get(name, 0.0) + self._now.get(name, 0.0)

    def __iter__(self) -> Iterator[K]:
        return iter({**self._before, **self._now})

    def __len__(self) -> int:
        return len(self._before.keys() | self._now.keys())
