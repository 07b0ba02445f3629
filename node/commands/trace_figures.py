"""Where the time of a token went: snapshots of the Swarm backend's trace, their difference, and figures of it. Pure.

A forward pass goes through the layers. Of each, the trunk (attention, gating, shared experts) comes
first; then the round of its experts: requests are made ("ask"), awaited ("wait"), and their replies
added up ("add"). What lies between the last layer of a pass and the first of the next (the output
layer, sampling, embedding; idle time as well) is "between".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from node.errors import SwarmError

LAYERS_MAX = 1024
_NODES_MAX = 4096
_CALLS_MAX = 1 << 16  # as the backend sends at most

T = TypeVar("T", bound=msgspec.Struct)
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=400)]


class TraceError(SwarmError):
    """A trace that cannot be read, or that says nothing about what was asked."""


class LayerCounters(msgspec.Struct, frozen=True):
    """One layer since the backend's start. ``rows``: tokens computed in its ``rounds``."""

    layer: Annotated[int, Meta(ge=0, lt=LAYERS_MAX)]
    rounds: Count
    rows: Count
    round_ns: Count
    encode_ns: Count
    wait_ns: Count
    add_ns: Count
    trunk_ns: Count


class CallCounters(msgspec.Struct, frozen=True, array_like=True):
    """One node in one layer. ``node``: index into the nodes. ``last…``: of rounds in
    which its reply was the last one."""

    layer: Annotated[int, Meta(ge=0, lt=LAYERS_MAX)]
    node: Count
    calls: Count
    pairs: Count
    call_ns: Count
    compute_ns: Count
    queue_ns: Count
    last: Count
    last_wait_ns: Count
    last_compute_ns: Count
    last_queue_ns: Count
    alone_ns: Count


class Counters(msgspec.Struct, frozen=True):
    """All that the backend has counted since its start: docs/protocol.md, "Trace"."""

    passes: Count
    between_ns: Count
    held_ns: Count
    nodes: Annotated[tuple[Name, ...], Meta(max_length=_NODES_MAX)]
    layers: Annotated[tuple[LayerCounters, ...], Meta(max_length=LAYERS_MAX)]
    calls: Annotated[tuple[CallCounters, ...], Meta(max_length=_CALLS_MAX)]
    left_out: Count = 0


class Requests(msgspec.Struct, frozen=True):
    """What the router's front door passed to llama-server since the start, and how much of it is being worked on."""

    relayed: Count
    running: Count


class Snapshot(msgspec.Struct, frozen=True):
    """The document of ``GET /trace``. ``router``: the node's name."""

    router: Name
    requests: Requests
    trace: Counters


def decode(body: bytes) -> Snapshot:
    """Raises TraceError."""
    try:
        snapshot = msgspec.json.decode(body, type=Snapshot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"the trace cannot be read: {error}") from error
    layers = [layer.layer for layer in snapshot.trace.layers]
    if len(set(layers)) != len(layers):
        raise TraceError("the trace cannot be read: a layer comes twice")
    if any(call.node >= len(snapshot.trace.nodes) for call in snapshot.trace.calls):
        raise TraceError("the trace cannot be read: a call is of a node that it does not name")
    return snapshot


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted between two snapshots. A node that left meanwhile is not in it. Raises TraceError."""
    former = {layer.layer: layer for layer in before.layers}
    rounds = {layer.layer: layer.rounds for layer in after.layers}
    if after.passes < before.passes or any(rounds.get(n, 0) < layer.rounds for n, layer in former.items()):
        raise TraceError("the router's engine was started again meanwhile: ask once more")
    layers = (_minus(layer, former.get(layer.layer), ("layer",)) for layer in after.layers)
    former_calls = {(call.layer, before.nodes[call.node]): call for call in before.calls}
    calls = (_minus(c, former_calls.get((c.layer, after.nodes[c.node])), ("layer", "node")) for c in after.calls)
    return Counters(
        passes=after.passes - before.passes,
        between_ns=max(0, after.between_ns - before.between_ns),
        held_ns=max(0, after.held_ns - before.held_ns),
        nodes=after.nodes,
        layers=tuple(layer for layer in layers if layer.rounds > 0),
        calls=tuple(call for call in calls if call.calls > 0),
        left_out=after.left_out,
    )


def _minus(after: T, before: T | None, keep: Sequence[str]) -> T:
    """Not below 0: a node that was away for a while counts anew."""
    if before is None:
        return after
    names = [name for name in after.__struct_fields__ if name not in keep]
    return msgspec.structs.replace(
        after, **{name: max(0, getattr(after, name) - getattr(before, name)) for name in names}
    )


@dataclass(frozen=True)
class Parts:
    """Milliseconds. ``add_ms`` is what else a round took: reading replies and adding them up."""

    trunk_ms: float = 0.0
    ask_ms: float = 0.0
    wait_ms: float = 0.0
    add_ms: float = 0.0
    between_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.trunk_ms + self.ask_ms + self.wait_ms + self.add_ms + self.between_ms


@dataclass(frozen=True)
class LayerFigures:
    """Consecutive layers ``first`` to ``last``, each the mean of them, a round.
    ``slowest``: whom they waited for most."""

    first: int
    last: int
    parts: Parts
    slowest: str


@dataclass(frozen=True)
class NodeFigures:
    """A node, in a pass. ``wait…``: of the rounds in which it was the last to answer;
    ``alone_ms``: after all others had.

    ``calls`` and ``last`` (rounds in which it was the last one) are means too. ``call_ms``, ``compute_ms``,
    ``network_ms`` and ``queue_ms``: of one call.
    """

    name: str
    calls: float
    last: float
    wait_ms: float
    wait_compute_ms: float
    wait_network_ms: float
    wait_queue_ms: float
    alone_ms: float
    call_ms: float
    compute_ms: float
    network_ms: float
    queue_ms: float


@dataclass(frozen=True)
class Figures:
    """Means of forward passes. ``nodes``: first whom the router waited for longest. ``held_ms``: not in ``parts``."""

    passes: int
    rows: float
    parts: Parts
    layers: tuple[LayerFigures, ...]
    nodes: tuple[NodeFigures, ...]
    held_ms: float


def figures(counters: Counters, *, with_between: bool) -> Figures:
    """What a forward pass took. ``with_between``: whether the time between passes is part of it, or may be idle.

    A snapshot may be taken amid a pass, so each layer is divided by its own rounds. Raises TraceError when nothing was
    computed.
    """
    if not counters.layers:
        raise TraceError("no experts were computed meanwhile")
    rounds = {layer.layer: layer.rounds for layer in counters.layers}
    calls = [call for call in counters.calls if call.layer in rounds]
    passes = max(rounds.values())
    layers = tuple(
        _layer(layer, [call for call in calls if call.layer == layer.layer], counters.nodes)
        for layer in sorted(counters.layers, key=lambda layer: layer.layer)
    )
    between_ms = counters.between_ns / max(counters.passes, 1) / 1e6 if with_between else 0.0
    parts = [layer.parts for layer in layers]
    nodes = [_node(number, name, calls, rounds) for number, name in enumerate(counters.nodes)]
    return Figures(
        passes=passes,
        rows=sum(layer.rows for layer in counters.layers) / sum(rounds.values()),
        parts=Parts(
            sum(p.trunk_ms for p in parts),
            sum(p.ask_ms for p in parts),
            sum(p.wait_ms for p in parts),
            sum(p.add_ms for p in parts),
            between_ms,
        ),
        layers=layers,
        nodes=tuple(sorted((n for n in nodes if n.calls > 0), key=lambda n: (-n.wait_ms, n.name))),
        held_ms=counters.held_ns / passes / 1e6,
    )


def _layer(layer: LayerCounters, calls: Sequence[CallCounters], nodes: Sequence[str]) -> LayerFigures:
    each_ms = 1e-6 / layer.rounds
    ask_ms, wait_ms = layer.encode_ns * each_ms, layer.wait_ns * each_ms
    add_ms = max(0.0, layer.round_ns * each_ms - ask_ms - wait_ms)
    slowest = max(calls, key=lambda call: (call.last_wait_ns, -call.node), default=None)
    name = nodes[slowest.node] if slowest is not None and slowest.last > 0 else ""
    return LayerFigures(layer.layer, layer.layer, Parts(layer.trunk_ns * each_ms, ask_ms, wait_ms, add_ms), name)


def _node(number: int, name: str, all_calls: Iterable[CallCounters], rounds: dict[int, int]) -> NodeFigures:
    calls = [call for call in all_calls if call.node == number]

    def a_pass(field: str) -> float:
        return float(sum(getattr(call, field) / rounds[call.layer] for call in calls))

    def a_call_ms(field: str) -> float:
        return float(sum(getattr(call, field) for call in calls) / max(1, sum(call.calls for call in calls)) / 1e6)

    wait_ms, compute_ms, queue_ms = (a_pass(f"last_{what}_ns") / 1e6 for what in ("wait", "compute", "queue"))
    call_ms, call_compute_ms, call_queue_ms = (a_call_ms(f"{what}_ns") for what in ("call", "compute", "queue"))
    return NodeFigures(
        name=name,
        calls=a_pass("calls"),
        last=a_pass("last"),
        wait_ms=wait_ms,
        wait_compute_ms=compute_ms,
        wait_network_ms=max(0.0, wait_ms - compute_ms - queue_ms),
        wait_queue_ms=queue_ms,
        alone_ms=a_pass("alone_ns") / 1e6,
        call_ms=call_ms,
        compute_ms=call_compute_ms,
        network_ms=max(0.0, call_ms - call_compute_ms - call_queue_ms),
        queue_ms=call_queue_ms,
    )


def grouped(layers: Sequence[LayerFigures], groups_max: int) -> list[LayerFigures]:
    """At most ``groups_max`` groups, at least 1: neighbours that took about as long are put together."""
    groups = list(layers)
    apart = [_unlikeness(a, b) for a, b in pairwise(groups)]
    while len(groups) > max(1, groups_max):
        at = apart.index(min(apart))
        groups[at : at + 2] = [_together(groups[at], groups[at + 1])]
        low, high = max(0, at - 1), min(at + 1, len(groups) - 1)
        apart[low : at + 2] = [_unlikeness(a, b) for a, b in pairwise(groups[low : high + 1])]
    return groups


def _unlikeness(a: LayerFigures, b: LayerFigures) -> float:
    """How much the mean of both says wrongly about each, in all."""
    n_a, n_b = a.last - a.first + 1, b.last - b.first + 1
    apart = sum(
        abs(getattr(a.parts, name) - getattr(b.parts, name)) for name in ("trunk_ms", "ask_ms", "wait_ms", "add_ms")
    )
    return 2.0 * float(apart) * n_a * n_b / (n_a + n_b)


def _together(a: LayerFigures, b: LayerFigures) -> LayerFigures:
    # Layers without experts between them are counted as if they had some: a group is for showing.
    n_a, n_b = a.last - a.first + 1, b.last - b.first + 1

    def mean(name: str) -> float:
        return float((getattr(a.parts, name) * n_a + getattr(b.parts, name) * n_b) / (n_a + n_b))

    slowest = a if a.parts.wait_ms * n_a >= b.parts.wait_ms * n_b else b
    parts = Parts(mean("trunk_ms"), mean("ask_ms"), mean("wait_ms"), mean("add_ms"))
    return LayerFigures(a.first, b.last, parts, slowest.slowest)
