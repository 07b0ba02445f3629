"""The record of this node: what it says of itself to the others."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import msgspec

import kernels
from node.models.index import ModelIndex
from node.records import RATE_MAX, VERSION, Model, Record, Router

if TYPE_CHECKING:
    from node.agent.agent import Agent


def own_record(agent: Agent) -> Record:
    """As it is now."""
    model = agent.served or agent.model.fetched
    return Record(
        version=VERSION,
        swarm=agent.config.swarm.name,
        node=agent.identity.node_id,
        boot=agent.identity.boot,
        name=agent.config.node.name,
        build=kernels.build_id(),
        platform=f"{platform.system()} {platform.machine()}",
        port=agent.port,
        expert_port=agent.holder.process.port if agent.holder is not None else 0,
        devices=agent.devices,
        memory_bytes=agent.memory_bytes,
        can_route=agent.can_route and (agent.served is not None or _can_route_fetched(agent)),
        model=None if model is None else _model_record(model, agent.shared.name_of(model)),
        holds_model=None if agent.holder is None else agent.holder.model_id,
        ready=agent.holder.ready if agent.holder is not None else (),
        problem=((agent.holder.problem if agent.holder is not None else "") or agent.problem)[:400],
        router=None if agent.role is None else _router(agent, agent.role.router_record),
        expert_bytes_per_s=0.0 if agent.holder is None else _rounded(agent.holder.process.expert_bytes_per_s, 3),
        activity=(agent.known_models.activity or agent.shared.activity)[:400],
        offers=agent.shared.offers,
        fetches=agent.served is None and agent.model.fetched is not None,
    )


def _can_route_fetched(agent: Agent) -> bool:
    return agent.role is not None or agent.model.can_be_routed(agent.programs.by_model)


def _router(agent: Agent, router: Router) -> Router:
    # In two digits, since every change of a record goes to every node.
    return msgspec.structs.replace(router, tokens_per_s=_rounded(agent.engine_metrics.generated_tokens_per_s, 2))


def _rounded(rate: float, digits: int) -> float:
    return min(float(f"{rate:.{digits}g}"), RATE_MAX)


def _model_record(index: ModelIndex, file: str) -> Model:
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
