"""Metrics: counters that go on when their process starts anew, and Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Counters(Generic[K]):
    """Totals by name. More names than ``names_max`` are left out, since some are of nodes that come and go."""

    def __init__(self, names_max: int = 4096) -> None:
        self._names_max = names_max
        self._before: dict[K, float] = {}  # of processes that have ended
        self._now: dict[K, float] = {}

    def take(self, values: Mapping[K, float]) -> None:
        """Takes what the process says its counters are now. One that is lower than last time has started anew."""
        for name, value in values.items():
            last = self._now.get(name)
            if last is None and name not in self._before and len(self) >= self._names_max:
                continue
            if last is not None and value < last:
                self._before[name] = self._before.get(name, 0.0) + last
            self._now[name] = value

    def restarted(self) -> None:
        """Takes that the process has ended: the next values are another one's."""
        for name, value in self._now.items():
            self._before[name] = self._before.get(name, 0.0) + value
        self._now.clear()

    def __getitem__(self, name: K) -> float:
        """The total under a name; 0 before the first value."""
        return self._before.get(name, 0.0) + self._now.get(name, 0.0)

    def __iter__(self) -> Iterator[K]:
        return iter({**self._before, **self._now})

    def __len__(self) -> int:
        return len(self._before.keys() | self._now.keys())


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Page:
    """A page of metrics, as it grows. A metric without samples is left out."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, help_text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """Adds a ``gauge`` or ``counter``, with a value for each set of labels."""
        self._add(name, kind, help_text, [_sample(name, labels, value) for labels, value in samples])

    def add_summary(self, name: str, help_text: str, samples: Iterable[tuple[Labels, float, float]]) -> None:
        """Adds sum and count of what was observed, for each set of labels: their increases give means of any period."""
        lines = []
        for labels, total, count in samples:
            lines += [_sample(f"{name}_sum", labels, total), _sample(f"{name}_count", labels, count)]
        self._add(name, "summary", help_text, lines)

    def text(self) -> str:
        """The page so far."""
        return "".join(f"{line}\n" for line in self._lines)

    def _add(self, name: str, kind: str, help_text: str, lines: list[str]) -> None:
        if lines:
            self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *lines]


def _sample(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    # All digits: with six, a counter of bytes would stand still for minutes and then leap.
    number = str(int(value)) if float(value).is_integer() else repr(float(value))
    return f"{name}{{{shown}}} {number}" if shown else f"{name} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def plain_samples(text: str) -> dict[str, float]:
    """The finite values of the metrics without labels, by name. Other lines are passed over."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) not in (2, 3) or line.startswith("#") or "{" in fields[0]:
            continue
        try:
            value = float(fields[1])
        except ValueError:
            continue
        if math.isfinite(value):
            found[fields[0]] = value
    return found
