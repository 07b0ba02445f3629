"""Placement: what holds for every set of nodes and every model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from node.agent.placement import Candidate, LayerSize, Plan, plan
from node.slices import Slice

Layers = dict[int, LayerSize]

node_ids = st.integers(0, 40).map(lambda number: f"{number:016x}")


def nodes(memory: st.SearchStrategy[int]) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(Candidate, node_ids, memory)
    return st.lists(one, max_size=7, unique_by=lambda c: c.node_id)


any_nodes = nodes(st.one_of(st.just(0), st.integers(0, 60), st.integers(0, 2000)))
any_layers: st.SearchStrategy[Layers] = st.dictionaries(
    st.integers(0, 9), st.builds(LayerSize, st.integers(1, 64), st.sampled_from([1, 2, 5, 9, 50])), max_size=7
)
# As in real models: layers alike.
even_layers: st.SearchStrategy[Layers] = st.builds(
    lambda n_layer, layer: dict.fromkeys(range(n_layer), layer),
    st.integers(1, 6),
    st.builds(LayerSize, st.integers(1, 12), st.integers(1, 9)),
)


def covered(slices: Mapping[str, tuple[Slice, ...]]) -> list[tuple[int, int]]:
    return sorted((layer, e) for of in slices.values() for layer, first, last in of for e in range(first, last + 1))


def experts(of: tuple[Slice, ...]) -> list[tuple[int, int]]:
    return covered({"": of})


def used_bytes(of: tuple[Slice, ...], layers: Layers) -> int:
    return sum((last - first + 1) * layers[layer].expert_bytes for layer, first, last in of)


def check(made: Plan, candidates: list[Candidate], layers: Layers) -> None:
    """Each expert once, or missing; nobody holds more than it offers."""
    wanted = sorted((number, expert) for number, layer in layers.items() for expert in range(layer.n_expert))
    assert sorted([*covered(made.slices), *experts(made.missing)]) == wanted
    offers = {c.node_id: c.memory_bytes for c in candidates}
    for node_id, of_node in made.slices.items():
        assert used_bytes(of_node, layers) <= offers[node_id]
        assert list(of_node) == sorted(of_node)


@settings(max_examples=300)
@given(any_nodes, any_layers)
def test_each_expert_once_and_never_more_than_is_offered(candidates: list[Candidate], layers: Layers) -> None:
    made = plan(candidates, layers)
    check(made, candidates, layers)
    # What is missing fits nowhere.
    for layer, _, _ in made.missing:
        for c in candidates:
            assert c.memory_bytes - used_bytes(made.slices.get(c.node_id, ()), layers) < layers[layer].expert_bytes or (
                any(layers[other].expert_bytes != layers[layer].expert_bytes for other in layers)
            )


def test_a_node_that_is_ahead_in_a_layer_of_small_experts_gets_no_less_than_none() -> None:
    """A share below zero put experts beyond the layer's last on other nodes."""
    sizes = [(1, 1), (16, 50), (64, 1), (3, 9), (2, 50), (3, 1), (3, 1)]
    layers = {number: LayerSize(*size) for number, size in enumerate(sizes)}
    candidates = [Candidate(f"{n:016x}", memory) for n, memory in enumerate([14, 342, 225, 41, 224])]
    check(plan(candidates, layers), candidates, layers)


@given(any_nodes, any_layers, st.data())
def test_the_order_of_candidates_and_layers_does_not_matter(
    candidates: list[Candidate], layers: Layers, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    reordered = dict(data.draw(st.permutations(list(layers.items()))))
    made = plan(candidates, layers)
    assert plan(shuffled, reordered) == made
    assert plan(shuffled, reordered, made.slices) == plan(candidates, layers, made.slices)


@settings(max_examples=300)
@given(any_nodes, any_layers)
def test_what_is_held_stays_when_nothing_changed(candidates: list[Candidate], layers: Layers) -> None:
    made = plan(candidates, layers)
    assert plan(candidates, layers, made.slices) == made


@given(nodes(st.integers(200, 2000)).filter(len), even_layers, st.data())
def test_what_is_held_stays_when_memory_changes_and_it_still_fits(
    candidates: list[Candidate], layers: Layers, data: st.DataObject
) -> None:
    made = plan(candidates, layers)
    assume(not made.missing and all(made.slices.get(c.node_id) for c in candidates))
    grown = [replace(c, memory_bytes=c.memory_bytes + data.draw(st.integers(0, 500))) for c in candidates]
    assert plan(grown, layers, made.slices).slices == made.slices
    # A node that offers memory for no expert changes nothing either.
    idle = Candidate("f" * 16, layers[0].expert_bytes - 1)
    assert plan([*candidates, idle], layers, made.slices).slices == made.slices


@settings(max_examples=300)
@given(nodes(st.integers(1, 10**6)), even_layers)
def test_every_node_with_room_for_an_expert_gets_one(candidates: list[Candidate], layers: Layers) -> None:
    able = [c for c in candidates if c.memory_bytes >= layers[0].expert_bytes]
    assume(len(able) <= sum(layer.n_expert for layer in layers.values()))
    made = plan(candidates, layers)
    check(made, candidates, layers)
    assert {c.node_id for c in able} == {node_id for node_id, of in made.slices.items() if of}


@given(any_nodes, even_layers, st.data())
def test_nodes_that_leave_and_come_back(candidates: list[Candidate], layers: Layers, data: st.DataObject) -> None:
    made = plan(candidates, layers)
    left = [c for c in candidates if data.draw(st.booleans())]
    after = plan(left, layers, made.slices)
    check(after, left, layers)
    check(plan(candidates, layers, after.slices), candidates, layers)


def test_layers_are_cut_alike_in_proportion_to_memory() -> None:
    layers = dict.fromkeys(range(48), LayerSize(128, 1000))
    offers = {"a" * 16: 3_000_000, "b" * 16: 2_000_000, "c" * 16: 3_000_000}
    made = plan([Candidate(i, memory) for i, memory in offers.items()], layers)
    for node_id, share in (("a" * 16, 48), ("b" * 16, 32), ("c" * 16, 48)):
        assert {last - first + 1 for _, first, last in made.slices[node_id]} == {share}
        assert len(made.slices[node_id]) == 48


@pytest.mark.parametrize("small_bytes", [1000, 5000, 20_000])
def test_a_tiny_node_beside_giants_gets_a_part_and_then_all_stays(small_bytes: int) -> None:
    layers = dict.fromkeys(range(4), LayerSize(8, 1000))
    candidates = [
        Candidate("1" * 16, 10**12),
        Candidate("2" * 16, small_bytes),
        Candidate("3" * 16, 10**12),
    ]
    made = plan(candidates, layers)
    check(made, candidates, layers)
    assert all(made.slices[c.node_id] for c in candidates)
    assert plan(candidates, layers, made.slices) == made


def test_a_node_with_room_for_no_expert_does_not_shuffle_the_others() -> None:
    layers = dict.fromkeys(range(2), LayerSize(8, 1000))
    two = [Candidate("1" * 16, 10_000), Candidate("2" * 16, 10_000)]
    held = {"1" * 16: (Slice(0, 4, 7), Slice(1, 0, 3)), "2" * 16: (Slice(0, 0, 3), Slice(1, 4, 7))}
    idle = Candidate("0" * 16, 999)
    assert plan([idle, *two], layers, held).slices == held
