"""Routing tables and the even split of a layer's experts."""

import json

import pytest

from node.errors import RoutingError
from node.router.table import RoutingNode, RoutingSlice, RoutingTable, even_split

NODES = (RoutingNode("alpha", "127.0.0.1", 4101), RoutingNode("beta", "127.0.0.1", 4102))


def test_the_table_is_the_protocols() -> None:
    table = RoutingTable("demo", NODES[:1], (RoutingSlice(0, 0, 2, (0,)),), sequence=7, term=3, reduce="rows")
    assert json.loads(table.to_json()) == {
        "version": 1,
        "sequence": 7,
        "term": 3,
        "model": "demo",
        "reduce": "rows",
        "dtype": "f32",
        "deadline_floor_ms": 2000,
        "nodes": [{"name": "alpha", "host": "127.0.0.1", "port": 4101}],
        "slices": [{"layer": 0, "first": 0, "last": 2, "nodes": [0]}],
    }
    assert "\n" not in table.to_json()


@pytest.mark.parametrize(
    "slices",
    [
        (RoutingSlice(0, 0, 2, ()),),
        (RoutingSlice(0, 0, 2, (2,)),),
        (RoutingSlice(0, 0, 2, (-1,)),),
        (RoutingSlice(0, 2, 1, (0,)),),
        (RoutingSlice(0, -1, 1, (0,)),),
        (RoutingSlice(0, 2, 3, (0,)), RoutingSlice(0, 0, 2, (1,))),
    ],
)
def test_impossible_slices_are_refused(slices: tuple[RoutingSlice, ...]) -> None:
    with pytest.raises(RoutingError, match="layer 0"):
        RoutingTable("demo", NODES, slices, sequence=1, term=1)


def test_formats_are_the_protocols() -> None:
    for wrong in ({"reduce": "max"}, {"dtype": "f64"}):
        with pytest.raises(RoutingError):
            RoutingTable("demo", NODES, (), sequence=1, term=1, **wrong)


@pytest.mark.parametrize("n_nodes", range(1, 12))
@pytest.mark.parametrize("n_expert", [1, 2, 7, 8, 9, 256])
def test_even_split_covers_each_expert_once(n_expert: int, n_nodes: int) -> None:
    ranges = even_split(n_expert, n_nodes)
    assert [expert for first, last in ranges for expert in range(first, last + 1)] == list(range(n_expert))
    lengths = [last - first + 1 for first, last in ranges]
    assert len(ranges) == min(n_expert, n_nodes) and lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_even_split_needs_both() -> None:
    for n_expert, n_nodes in ((0, 1), (1, 0), (-1, 3)):
        with pytest.raises(RoutingError):
            even_split(n_expert, n_nodes)
