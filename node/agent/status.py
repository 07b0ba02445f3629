"""The document of ``GET /status`` of an agent: the swarm as this node sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from node.agent.measured import Measured
from node.agent.view import NO_ROUTER, View
from node.records import Model, Record, Router
from node.slices import Slice


class ModelPart(msgspec.Struct, frozen=True):
    """The model that the swarm serves."""

    id: str
    file: str
    architecture: str
    layers: int
    experts: int
    trunk_bytes: int
    expert_bytes: int


class RouterPart(msgspec.Struct, frozen=True):
    """The node that routes."""

    node: str
    name: str
    term: int
    state: str
    tokens_per_s: float


class DevicePart(msgspec.Struct, frozen=True):
    """A device of a node."""

    name: str
    type: str
    memory_bytes: int


class ModelName(msgspec.Struct, frozen=True):
    """The model that a node was told to serve, or takes part in."""

    id: str
    file: str


class NodePart(msgspec.Struct, frozen=True):
    """A node. ``url`` is "this node" for the one that answers; ``planned`` are the slices that the plan gives it."""

    node: str
    name: str
    url: str
    alive: bool
    silent_s: float
    platform: str
    expert_port: int
    devices: tuple[DevicePart, ...]
    memory_bytes: int
    expert_bytes_per_s: float
    can_route: bool
    model: ModelName | None
    activity: str
    planned: tuple[Slice, ...]
    ready: tuple[Slice, ...]
    problem: str


class Status(msgspec.Struct, frozen=True):
    """The document. ``waits_for`` says why queries cannot be answered, and is None while they can."""

    swarm: str
    node: str
    name: str
    model: ModelPart | None
    router: RouterPart | None
    ready: bool
    waits_for: str | None
    missing: tuple[Slice, ...]
    not_ready: dict[str, tuple[Slice, ...]]
    nodes: list[NodePart]
    catalogue: list[dict[str, Any]]
    failures: list[str]
    statistics: Mapping[str, Any]


def status_of(view: View, measured: Measured) -> Status:
    """The document for one moment."""
    found = view.routing_node()
    record, router = (None, None) if found is None else (found[0], found[0].router)
    plan = router.plan if router is not None else None
    planned = plan.slices if plan is not None else {}
    nodes = [_node_part(view.record, "this node", 0.0, True, planned)]
    for peer in sorted(view.peers.values(), key=lambda peer: peer.record.name):
        nodes.append(_node_part(peer.record, peer.url, peer.silent_s, peer.alive, planned))
    return Status(
        swarm=view.node.swarm,
        node=view.node.node_id,
        name=view.node.name,
        model=_model_part(record),
        router=_router_part(record),
        ready=router is not None and router.state == "ready",
        waits_for=_waits_for(view, router, nodes),
        missing=plan.missing if plan is not None else (),
        not_ready=dict(router.not_ready) if router is not None else {},
        nodes=nodes,
        catalogue=[entry.to_json() for entry in view.catalogue()],
        failures=[str(failure) for failure in measured.failures[-8:]],
        statistics=measured.statistics,
    )


def _model_part(router: Record | None) -> ModelPart | None:
    """The model of the router of this record."""
    if router is None or router.model is None:
        return None
    model = router.model
    return ModelPart(
        id=model.id,
        file=model.file,
        architecture=model.architecture,
        layers=model.n_layer,
        experts=model.n_expert,
        trunk_bytes=model.trunk_bytes,
        expert_bytes=model.expert_bytes,
    )


def _router_part(record: Record | None) -> RouterPart | None:
    if record is None or record.router is None:
        return None
    router = record.router
    return RouterPart(record.node, record.name, router.term, router.state, router.tokens_per_s)


def _waits_for(view: View, router: Router | None, nodes: Sequence[NodePart]) -> str | None:
    if router is None:
        return _activity(nodes) or NO_ROUTER
    if router.state == "ready":
        return None
    return view.waits_for(router)


def _activity(nodes: Sequence[NodePart]) -> str:
    """What the live nodes are at, before there is a router."""
    return "; ".join(f"{node.name} is {node.activity}" for node in nodes if node.alive and node.activity)


def _node_part(
    record: Record, url: str, silent_s: float, alive: bool, planned: Mapping[str, tuple[Slice, ...]]
) -> NodePart:
    return NodePart(
        node=record.node,
        name=record.name,
        url=url,
        alive=alive,
        silent_s=round(silent_s, 1),
        platform=record.platform,
        expert_port=record.expert_port,
        devices=tuple(DevicePart(d.name, d.type, d.memory_bytes) for d in record.devices),
        memory_bytes=record.memory_bytes,
        expert_bytes_per_s=record.expert_bytes_per_s,
        can_route=record.can_route,
        model=_model_name(record.model),
        activity=record.activity,
        planned=planned.get(record.node, ()),
        ready=record.ready,
        problem=record.problem,
    )


def _model_name(model: Model | None) -> ModelName | None:
    return None if model is None else ModelName(model.id, model.file)
