"""Slices, which are neighbouring experts of a layer, and arithmetic on them. Pure.

A node may hold more than a plan asks of it, and cut otherwise: what counts is that each expert is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

LAYER_MAX = 1023
EXPERT_MAX = 65535


class Slice(NamedTuple):
    """The experts `first` to `last`, both included, of a layer. In JSON the array of the three.

    The bounds are checked where a slice is decoded; that `last` is not below `first` is for the decoder's caller.
    """

    layer: Annotated[int, Meta(ge=0, le=LAYER_MAX)]
    first: Annotated[int, Meta(ge=0, le=EXPERT_MAX)]
    last: Annotated[int, Meta(ge=0, le=EXPERT_MAX)]

    @property
    def n_experts(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"layer {self.layer}, experts {self.first} to {self.last}"


def gaps(wanted: Sequence[Slice], held: Sequence[Slice]) -> list[Slice]:
    """The parts of ``wanted`` that are not in ``held``, in order, each expert once."""
    held_of: dict[int, list[tuple[int, int]]] = {}
    for layer, first, last in sorted(held):
        held_of.setdefault(layer, []).append((first, last))
    missing = []
    before = (-1, -1)  # layer and last expert looked at
    for layer, first, last in sorted(wanted):
        next_needed = max(first, before[1] + 1) if layer == before[0] else first
        before = (layer, max(last, next_needed - 1))
        for held_first, held_last in held_of.get(layer, ()):
            if held_last < next_needed or held_first > last:
                continue
            if held_first > next_needed:
                missing.append(Slice(layer, next_needed, held_first - 1))
            next_needed = max(next_needed, held_last + 1)
        if next_needed <= last:
            missing.append(Slice(layer, next_needed, last))
    return missing


def surplus(wanted: Sequence[Slice], held: Sequence[Slice]) -> list[Slice]:
    """The slices of ``held`` of which ``wanted`` has no expert, in order."""
    return sorted(one for one in held if not any(_overlap(one, other) for other in wanted))


def count(slices: Sequence[Slice]) -> int:
    """How many (layer, expert) pairs the slices have."""
    return sum(one.n_experts for one in slices)


def describe(slices: Sequence[Slice], limit: int = 4) -> str:
    """``layers 0-29 experts 3-5, …``: for people. Layers with the same experts are put together."""
    by_range: dict[tuple[int, int], list[int]] = {}
    for layer, first, last in sorted(slices):
        by_range.setdefault((first, last), []).append(layer)
    parts = []
    for (first, last), layers in by_range.items():
        experts = f"expert {first}" if first == last else f"experts {first}-{last}"
        runs: list[list[int]] = []
        for layer in layers:
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
        parts.append(f"layer{'s' * (len(layers) > 1)} {shown} {experts}")
    more = len(parts) - limit
    return "; ".join(parts[:limit]) + (f"; and {more} more" if more > 0 else "")


def _overlap(one: Slice, other: Slice) -> bool:
    return one.layer == other.layer and one.first <= other.last and other.first <= one.last
