"""What the router says of its table while nodes come, go and load."""

from __future__ import annotations

import msgspec

from node.agent.router_role import KnownNode, table_holds
from node.records import VERSION, Record, Slices
from node.router.table import RoutingNode, RoutingSlice, RoutingTable
from node.slices import Slice

MODEL = "0123456789abcdef"
TABLE = RoutingTable(
    model=MODEL,
    nodes=(RoutingNode("a", "10.0.0.1", 4101), RoutingNode("b", "10.0.0.2", 4101)),
    slices=(RoutingSlice(0, 0, 3, (0,)), RoutingSlice(0, 4, 7, (1,))),
    sequence=1,
    term=1,
)


def _node(number: int, ready: Slices, *, alive: bool = True, **fields: object) -> KnownNode:
    record = Record(
        version=VERSION,
        swarm="default",
        node=f"{number:016x}",
        boot=1,
        name="ab"[number - 1],
        build="",
        platform="",
        port=4100,
        expert_port=4101,
        devices=(),
        memory_bytes=1,
        can_route=False,
        holds_model=MODEL,
        ready=ready,
    )
    return KnownNode(msgspec.structs.replace(record, **fields), f"10.0.0.{number}", alive)


def _holds(a: KnownNode, b: KnownNode) -> bool:
    return table_holds(TABLE, {a.record.node: a, b.record.node: b})


def test_a_table_holds_while_its_slices_are_ready_where_it_says() -> None:
    a, b = _node(1, (Slice(0, 0, 3),)), _node(2, (Slice(0, 4, 7),))
    assert _holds(a, b)
    # Holding more than the table needs, and cut otherwise, is as good.
    assert _holds(_node(1, (Slice(0, 0, 1), Slice(0, 2, 7))), b)


def test_a_table_does_not_hold_once_a_slice_of_it_is_gone() -> None:
    a, b = _node(1, (Slice(0, 0, 3),)), _node(2, (Slice(0, 4, 7),))
    assert not _holds(a, _node(2, (Slice(0, 5, 7),)))
    assert not _holds(a, _node(2, ()))
    assert not _holds(a, _node(2, (Slice(0, 4, 7),), alive=False))
    assert not _holds(a, _node(2, (Slice(0, 4, 7),), expert_port=4999))
    assert not _holds(a, _node(2, (Slice(0, 4, 7),), holds_model="other"))
    assert not table_holds(TABLE, {a.record.node: a})
    assert _holds(a, b)
