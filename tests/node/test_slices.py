"""Arithmetic on slices, against sets of (layer, expert)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.slices import Slice, count, describe, gaps, surplus


def _slice(layer: int, first: int, length: int) -> Slice:
    return layer, first, first + length - 1


slices = st.lists(st.builds(_slice, st.integers(0, 2), st.integers(0, 12), st.integers(1, 6)), max_size=8)


def experts(of: Sequence[Slice]) -> set[tuple[int, int]]:
    return {(layer, expert) for layer, first, last in of for expert in range(first, last + 1)}


@given(slices, slices)
def test_gaps_are_what_is_wanted_and_not_held(wanted: list[Slice], held: list[Slice]) -> None:
    missing = gaps(wanted, held)
    assert experts(missing) == experts(wanted) - experts(held)
    assert count(missing) == len(experts(missing))  # each once
    assert missing == sorted(missing)
    assert gaps(wanted, [*held, *missing]) == []


@given(slices, slices)
def test_surplus_is_what_no_wanted_expert_is_in(wanted: list[Slice], held: list[Slice]) -> None:
    unneeded = surplus(wanted, held)
    assert unneeded == sorted(piece for piece in held if not experts([piece]) & experts(wanted))
    kept = [piece for piece in held if piece not in unneeded]
    assert gaps(wanted, kept) == gaps(wanted, held)


@given(slices, st.randoms(use_true_random=False))
def test_the_order_of_arguments_does_not_matter(pieces: list[Slice], random: object) -> None:
    half = len(pieces) // 2
    wanted, held = pieces[:half], pieces[half:]
    shuffled = held[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert gaps(wanted[::-1], shuffled) == gaps(wanted, held)
    assert surplus(wanted[::-1], shuffled) == surplus(wanted, held)


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ([], ""),
        ([(3, 7, 7)], "layer 3 expert 7"),
        ([(2, 0, 3), (0, 0, 3), (1, 0, 3)], "layers 0-2 experts 0-3"),
        ([(0, 0, 3), (2, 0, 3), (3, 0, 3)], "layers 0, 2-3 experts 0-3"),
        ([(0, 0, 3), (1, 0, 2)], "layer 0 experts 0-3; layer 1 experts 0-2"),
        ([(n, n, n + 1) for n in range(6)], "layer 0 experts 0-1; layer 1 experts 1-2; and 4 more"),
    ],
)
def test_described_for_people(of: list[Slice], text: str) -> None:
    assert describe(of, 2) == text
