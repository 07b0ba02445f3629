"""Arithmetic on slices (layer, first expert, last expert), both ends included. Pure.

A node may hold more than a plan asks of it, and in other pieces: what counts is that each expert is held.
"""

from __future__ import annotations

from collections.abc import Sequence

Slice = tuple[int, int, int]


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
                missing.append((layer, next_needed, held_first - 1))
            next_needed = max(next_needed, held_last + 1)
        if next_needed <= last:
            missing.append((layer, next_needed, last))
    return missing


def surplus(wanted: Sequence[Slice], held: Sequence[Slice]) -> list[Slice]:
    """The slices of ``held`` of which ``wanted`` has no expert, in order."""
    return sorted(h for h in held if not any(w[0] == h[0] and w[1] <= h[2] and h[1] <= w[2] for w in wanted))


def count(slices: Sequence[Slice]) -> int:
    """How many (layer, expert) pairs the slices have."""
    return sum(last - first + 1 for _, first, last in slices)


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
