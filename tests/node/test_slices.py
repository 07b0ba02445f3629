"""Arithmetic on slices, against sets of (layer, expert)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.slices import EXPERT_MAX, LAYER_MAX, Slice, count, describe, gaps, surplus


def _slice(layer: int, first: int, length: int) -> Slice:
    return Slice(layer, first, first + length - 1)


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
    assert unneeded == sorted(one for one in held if not experts([one]) & experts(wanted))
    kept = [one for one in held if one not in unneeded]
    assert gaps(wanted, kept) == gaps(wanted, held)


@given(slices, st.randoms(use_true_random=False))
def test_the_order_of_arguments_does_not_matter(slices: list[Slice], random: object) -> None:
    half = len(slices) // 2
    wanted, held = slices[:half], slices[half:]
    shuffled = held[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert gaps(wanted[::-1], shuffled) == gaps(wanted, held)
    assert surplus(wanted[::-1], shuffled) == surplus(wanted, held)


@pytest.mark.parametrize(
    ("of", "text"),
    [
        ([], ""),
        ([Slice(3, 7, 7)], "layer 3 expert 7"),
        ([Slice(2, 0, 3), Slice(0, 0, 3), Slice(1, 0, 3)], "layers 0-2 experts 0-3"),
        ([Slice(0, 0, 3), Slice(2, 0, 3), Slice(3, 0, 3)], "layers 0, 2-3 experts 0-3"),
        ([Slice(0, 0, 3), Slice(1, 0, 2)], "layer 0 experts 0-3; layer 1 experts 0-2"),
        ([Slice(n, n, n + 1) for n in range(6)], "layer 0 experts 0-1; layer 1 experts 1-2; and 4 more"),
    ],
)
def test_described_for_people(of: list[Slice], text: str) -> None:
    assert describe(of, 2) == text


def test_written_as_an_array_and_read_within_its_bounds() -> None:
    largest = Slice(LAYER_MAX, EXPERT_MAX, EXPERT_MAX)
    assert msgspec.json.encode(largest) == b"[1023,65535,65535]"
    read = msgspec.json.decode(b"[1023,65535,65535]", type=Slice)
    assert type(read) is Slice and read == largest
    for text in (b"[1024,0,0]", b"[0,-1,0]", b"[0,0,65536]", b"[0,0]", b"[0,0,0,0]", b'[0,0,"0"]', b'{"layer":0}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Slice)
