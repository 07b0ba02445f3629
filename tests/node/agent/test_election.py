"""Who routes: what holds whatever the nodes are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from node.agent.election import elect, highest_term, routing
from node.records import Record, Router
from rigs.agent import record

DIGITS = "0123456789abcdef"


def _record(node_id: str, can_route: bool, term: int, fetches: bool, name: str) -> Record:
    router = Router(term, "ready") if term else None
    return record(node_id, can_route=can_route or term > 0, router=router, fetches=fetches, name=name)


# Names may be equal; ids are not.
nodes = st.lists(
    st.builds(
        _record, st.sampled_from(DIGITS), st.booleans(), st.integers(0, 3), st.booleans(), st.sampled_from(["a", "b"])
    ),
    max_size=7,
    unique_by=lambda one: one.node,
)


def _without_router(records: Sequence[Record]) -> list[Record]:
    return [one for one in records if one.router is None]


@given(nodes)
def test_the_router_is_able_and_unique(records: list[Record]) -> None:
    chosen = elect(records)
    assert (chosen is None) == (not any(one.can_route for one in records))
    assert chosen is None or (chosen in records and chosen.can_route)


@given(nodes, st.data())
def test_every_node_chooses_the_same(records: list[Record], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(records))
    assert elect(shuffled) == elect(records)
    assert routing(shuffled) == routing(records)


@given(nodes)
def test_who_is_followed_is_who_is_elected(records: list[Record]) -> None:
    """One rule: while somebody routes, nodes elect the one that they follow."""
    router = routing(records)
    assert (router is None) == all(one.router is None for one in records)
    if router is not None and router.router is not None:
        assert elect(records) == router
        assert router.router.term == highest_term(records)


@given(nodes, nodes, st.integers(1, 9))
def test_a_live_router_stays_whoever_comes_or_goes(before: list[Record], after: list[Record], term: int) -> None:
    chosen = elect(_without_router(before))
    assume(chosen is not None)
    assert chosen is not None
    router = record(chosen.node[0], can_route=True, router=Router(term, "waiting"), fetches=chosen.fetches)
    others = [one for one in _without_router(after) if one.node != router.node]
    assert elect([*others, router]) == router


@given(st.integers(1, 9), st.integers(1, 9))
def test_of_two_routers_the_higher_term_is_the_one_and_of_equal_ones_the_lower_id(one: int, other: int) -> None:
    """As after a network that was cut in two."""
    low = record("3", can_route=True, router=Router(one, "ready"))
    high = record("9", can_route=True, router=Router(other, "ready"))
    assert elect([high, low]) == (high if other > one else low)


def test_the_able_node_with_the_lowest_id_is_first() -> None:
    unable, low, high = record("1"), record("2", can_route=True), record("3", can_route=True)
    assert elect([high, low, unable]) == low
    assert elect([unable]) is None
    assert elect([]) is None


def test_who_has_the_file_routes_before_who_must_fetch_it() -> None:
    has, must = record("b", can_route=True), record("a", can_route=True, fetches=True)
    assert elect([must, has]) == has
    assert elect([must, record("c")]) == must
    routes = record("a", can_route=True, router=Router(3, "ready"), fetches=True)
    assert elect([routes, has]) == routes  # nobody displaces a live router


def test_equal_names_are_no_tie() -> None:
    one, other = record("2", can_route=True, name="twin"), record("3", can_route=True, name="twin")
    assert elect([other, one]) == one


def test_the_highest_term_is_of_all_who_tell_one() -> None:
    assert highest_term([]) == highest_term([record("1")]) == 0
    assert highest_term([record("1", router=Router(4, "failed")), record("2", router=Router(7, "ready"))]) == 7
