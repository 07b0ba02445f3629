"""What a node knows of itself, as plain values, and the record of it: what it says of itself to the others."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from node.agent.machine import Machine
from node.api.swarm import Here
from node.models.index import ModelIndex
from node.records import RATE_MAX, VERSION, Model, Offer, Record, Router
from node.slices import Slice


@dataclass(frozen=True)
class Node:
    """What stays as it is while a node runs.

    ``told``: it was told to serve a file of its own. ``wanted``: name or beginning of the id of the model that it was
    told to take from the others; empty: whichever the swarm serves.
    """

    swarm: str
    node_id: str
    boot: int
    name: str
    machine: Machine
    told: bool = False
    wanted: str = ""


@dataclass(frozen=True)
class Experts:
    """What this node's expert server holds.

    ``in_use``: slices that are held or are to be. ``bytes_per_s``: expert weights that its device reads in a second;
    0: not measured.
    """

    port: int
    model_id: str | None = None
    ready: tuple[Slice, ...] = ()
    in_use: tuple[Slice, ...] = ()
    problem: str = ""
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Own:
    """What this node knows of itself at one moment.

    ``served``: the model that it was told to serve, once its content is known. ``fetched``: the model that it takes
    part in without having its file; ``has_programs``: whether that one's layer programs are known. ``router``: its part
    as the router, and ``engine`` its llama-server, while it runs. ``highest_term``: of all that it has used or heard
    of. ``problem``: why it cannot do its part. ``activity``: what it is at, in words; ``hashes``: the file that it
    reads through, if any.
    """

    port: int
    served: Model | None = None
    fetched: Model | None = None
    has_programs: bool = False
    experts: Experts | None = None
    router: Router | None = None
    engine: Here | None = None
    tokens_per_s: float = 0.0
    highest_term: int = 0
    problem: str = ""
    activity: str = ""
    hashes: str | None = None
    offers: tuple[Offer, ...] = ()


def own_record(node: Node, own: Own, *, can_route: bool) -> Record:
    """The record of a node; ``can_route`` depends on the others."""
    experts = own.experts or Experts(0)
    return Record(
        version=VERSION,
        swarm=node.swarm,
        node=node.node_id,
        boot=node.boot,
        name=node.name,
        build=node.machine.build,
        platform=node.machine.platform,
        port=own.port,
        expert_port=experts.port,
        devices=node.machine.devices,
        memory_bytes=node.machine.memory_bytes,
        can_route=can_route,
        model=own.served or own.fetched,
        holds_model=experts.model_id,
        ready=experts.ready,
        problem=(experts.problem or own.problem)[:400],
        router=None if own.router is None else _router(own.router, own.tokens_per_s),
        expert_bytes_per_s=_rounded(experts.bytes_per_s, 3),
        activity=own.activity[:400],
        offers=own.offers,
        fetches=own.served is None and own.fetched is not None,
    )


def model_record(index: ModelIndex, file: str) -> Model:
    """A model as records tell of it; ``file``: the name by which people know it."""
    return Model(
        id=index.model_id,
        file=file,
        architecture=index.architecture[:63],
        n_layer=index.n_layer,
        n_expert=index.n_expert,
        trunk_bytes=index.trunk_bytes,
        expert_bytes=sum(index.expert_bytes(layer) for layer in index.expert_layers),
        header=index.header_digest[:32],
    )


def _router(router: Router, tokens_per_s: float) -> Router:
    # In two digits, since every change of a record goes to every node.
    return msgspec.structs.replace(router, tokens_per_s=_rounded(tokens_per_s, 2))


def _rounded(rate: float, digits: int) -> float:
    return min(float(f"{rate:.{digits}g}"), RATE_MAX)
