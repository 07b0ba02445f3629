"""The routing table that an agent gives to its router engine: which node answers for which experts. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from node.errors import RoutingError
from node.number_formats import ITEM_BYTES

VERSION = 1


@dataclass(frozen=True)
class RoutingNode:
    """An expert server."""

    name: str
    host: str
    port: int


@dataclass(frozen=True)
class RoutingSlice:
    """Experts `first` to `last` (both included) of a layer; `nodes` are indexes into the table's nodes, best first."""

    layer: int
    first: int
    last: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class RoutingTable:
    """The table of docs/protocol.md. A table replaces one with a lower (term, sequence).

    Raises RoutingError when a slice names no node or an unknown one, or when slices of a layer overlap; a layer that is
    not covered is allowed here, and is an error when it is computed.
    """

    model: str
    nodes: tuple[RoutingNode, ...]
    slices: tuple[RoutingSlice, ...]
    sequence: int
    term: int
    reduce: str = "sum"
    dtype: str = "f32"
    deadline_floor_ms: int = 2000

    def __post_init__(self) -> None:
        if self.reduce not in ("rows", "sum") or self.dtype not in ITEM_BYTES:
            raise RoutingError(f"reduce '{self.reduce}' with dtype '{self.dtype}' is not of this protocol")
        end_of_layer: dict[int, int] = {}
        for one in sorted(self.slices, key=lambda one: (one.layer, one.first)):
            if not one.nodes or not all(0 <= node < len(self.nodes) for node in one.nodes):
                raise RoutingError(
                    f"experts {one.first} to {one.last} have no node, or one not listed", layer=one.layer
                )
            if not end_of_layer.get(one.layer, 0) <= one.first <= one.last:
                raise RoutingError(f"experts {one.first} to {one.last} overlap other slices", layer=one.layer)
            end_of_layer[one.layer] = one.last + 1

    def to_json(self) -> str:
        """The table as JSON, on one line."""
        return json.dumps({"version": VERSION, **asdict(self)})


def even_split(n_expert: int, n_nodes: int) -> list[tuple[int, int]]:
    """Ranges (first, last) of equal length, for as many nodes as there are experts for; the first get the remainder.

    Raises RoutingError unless both are at least 1.
    """
    if n_expert < 1 or n_nodes < 1:
        raise RoutingError(f"{n_expert} experts cannot be shared by {n_nodes} nodes")
    n_ranges = min(n_expert, n_nodes)
    length, remainder = divmod(n_expert, n_ranges)
    ranges = []
    first = 0
    for index in range(n_ranges):
        last = first + length + (index < remainder) - 1
        ranges.append((first, last))
        first = last + 1
    return ranges
