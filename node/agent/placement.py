"""Who holds which experts. Pure: the same nodes and model give the same answer everywhere.

A plain rule, until placement by speed and replicas: experts by memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.slices import Slice


@dataclass(frozen=True)
class Candidate:
    """A live node, as placement sees it. ``memory_bytes``: what it offers for experts; 0: none."""

    node_id: str
    memory_bytes: int


@dataclass(frozen=True)
class LayerSize:
    """A layer with routed experts. ``expert_bytes``: memory of one expert."""

    n_expert: int
    expert_bytes: int


@dataclass(frozen=True)
class Plan:
    """Slices by node id. ``missing``: slices that nobody has memory for."""

    slices: Mapping[str, tuple[Slice, ...]]
    missing: tuple[Slice, ...]


def plan(
    candidates: Sequence[Candidate],
    layers: Mapping[int, LayerSize],
    held: Mapping[str, Sequence[Slice]] | None = None,
) -> Plan:
    """Shares every layer's experts among the nodes, in proportion to the memory they offer.

    Every layer is cut the same way, as far as its number of experts allows, because a token waits for the slowest share
    of each layer. Never more than a node offers; what fits nowhere is ``missing``. Who has room for an expert gets one,
    if there are enough. ``held`` is what nodes have now: if it already covers every expert once and no candidate is
    left without work, it stays.
    """
    smallest_bytes = max(1, min((layer.expert_bytes for layer in layers.values()), default=1))
    nodes = sorted((c for c in candidates if c.memory_bytes >= smallest_bytes), key=lambda c: c.node_id)
    if held is not None and _is_complete(nodes, layers, held):
        return Plan({n.node_id: tuple(held.get(n.node_id, ())) for n in nodes}, ())
    total_bytes = sum(layer.n_expert * layer.expert_bytes for layer in layers.values())
    offered = sum(node.memory_bytes for node in nodes)
    # Everything fits: each node gets its share of the model. It does not: each is filled, and the rest is missing.
    fraction = {n.node_id: n.memory_bytes / max(offered, total_bytes, 1) for n in nodes}
    slices: dict[str, list[Slice]] = {node.node_id: [] for node in nodes}
    free = {node.node_id: node.memory_bytes for node in nodes}
    missing = []
    carried: dict[str, float] = dict.fromkeys(free, 0.0)
    for number, layer in sorted(layers.items()):
        counts = _counts(layer, nodes, fraction, carried, free)
        first = 0
        for node in nodes:
            count = counts[node.node_id]
            if count > 0:
                slices[node.node_id].append(Slice(number, first, first + count - 1))
                free[node.node_id] -= count * layer.expert_bytes
                first += count
        if first < layer.n_expert:
            missing.append(Slice(number, first, layer.n_expert - 1))
    for node in nodes:
        if not slices[node.node_id]:
            _give_one(node, slices, layers)
    return Plan({node_id: tuple(of_node) for node_id, of_node in slices.items()}, tuple(missing))


def _give_one(node: Candidate, slices: dict[str, list[Slice]], layers: Mapping[int, LayerSize]) -> None:
    """Moves one expert of the longest slice to a node whose share was rounded to nothing, if it can be spared."""
    spare = [
        (first - last, number, node_id, last)
        for node_id, of_node in slices.items()
        for number, first, last in of_node
        if layers[number].expert_bytes <= node.memory_bytes and (last > first or len(of_node) > 1)
    ]
    if not spare:
        return
    shortened, number, donor, last = min(spare)
    first = last + shortened
    slices[donor].remove(Slice(number, first, last))
    if last > first:
        slices[donor] = sorted([*slices[donor], Slice(number, first, last - 1)])
    slices[node.node_id].append(Slice(number, last, last))


def _counts(
    layer: LayerSize,
    nodes: Sequence[Candidate],
    fraction: Mapping[str, float],
    carried: dict[str, float],
    free: Mapping[str, int],
) -> dict[str, int]:
    """Experts of a layer for each node. What rounding takes from a node in one layer it gets back in a later one."""
    wanted = {n.node_id: layer.n_expert * fraction[n.node_id] + carried[n.node_id] for n in nodes}
    fits = {n.node_id: free[n.node_id] // max(layer.expert_bytes, 1) for n in nodes}
    counts = {node_id: max(0, min(int(wanted[node_id]), fits[node_id])) for node_id in wanted}
    # The largest remainders get one more each, until the layer is covered or nobody has room.
    while sum(counts.values()) < layer.n_expert:
        able = [node_id for node_id in counts if counts[node_id] < fits[node_id]]
        if not able:
            break
        counts[max(able, key=lambda node_id: (wanted[node_id] - counts[node_id], node_id))] += 1
    while sum(counts.values()) > layer.n_expert:
        counts[min((i for i in counts if counts[i] > 0), key=lambda i: (wanted[i] - counts[i], i))] -= 1
    for node_id in carried:
        carried[node_id] = wanted[node_id] - counts[node_id]
    return counts


def _is_complete(
    nodes: Sequence[Candidate],
    layers: Mapping[int, LayerSize],
    held: Mapping[str, Sequence[Slice]],
) -> bool:
    working = {node_id for node_id, slices in held.items() if slices}
    n_experts = sum(layer.n_expert for layer in layers.values())
    if not working <= {n.node_id for n in nodes} or len(working) < min(len(nodes), n_experts):
        return False
    for node in nodes:
        of_node = held.get(node.node_id, ())
        needed = sum(one.n_experts * layers[one.layer].expert_bytes for one in of_node if one.layer in layers)
        if needed > node.memory_bytes or any(layer not in layers for layer, _, _ in of_node):
            return False
    for number, layer in layers.items():
        covered = sorted(
            (first, last) for slices in held.values() for of_layer, first, last in slices if of_layer == number
        )
        expected = 0
        for first, last in covered:
            if first != expected:
                return False
            expected = last + 1
        if expected != layer.n_expert:
            return False
    return True
