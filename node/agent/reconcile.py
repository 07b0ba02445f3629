"""What a node does next: an ordered list of steps, each a function of what the node sees to actions. Pure.

`node.agent.supervisor` takes the steps, once a second or when something changed. It carries the actions of one step out
before it looks again for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from node.agent import election
from node.agent.router_role import KnownNode
from node.agent.view import View
from node.errors import ModelError
from node.models.index import ModelIndex
from node.records import Model, Record
from node.router.programs import ModelPrograms
from node.slices import Slice, describe
from node.transfer.catalogue import Entry, choose


@dataclass(frozen=True)
class Follow:
    """Look up a model of the others and its layer programs, so that this node can route it.

    ``model``: one that a node serves, or an entry of the catalogue, which is taken from the others in any case.
    """

    model: Model | Entry


@dataclass(frozen=True)
class HearTerm:
    """Take note of the highest term so far."""

    term: int


@dataclass(frozen=True)
class StartRouter:
    """Become the router, of this term."""

    term: int


@dataclass(frozen=True)
class EndRouter:
    """Be the router no more."""


@dataclass(frozen=True)
class Keep:
    """Keep on disk what is in use of fetched models, by model id: slices, and whether the trunk."""

    in_use: Mapping[str, tuple[Sequence[Slice], bool]]


@dataclass(frozen=True)
class Plan:
    """Plan the slices of the model that this node routes for these nodes, by id."""

    nodes: Mapping[str, KnownNode]


@dataclass(frozen=True)
class Publish:
    """Give this record to the others."""

    record: Record


@dataclass(frozen=True)
class Hold:
    """Hold these slices of a model, whose router's agent is at ``router_url`` ("": this node)."""

    model: Model
    router_url: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Impossible:
    """Say why this node cannot do its part."""

    reason: str


Action = Follow | HearTerm | StartRouter | EndRouter | Keep | Plan | Publish | Hold | Impossible
Step = Callable[[View], Sequence[Action]]


def follow_model(view: View) -> Sequence[Action]:
    """Gets ready to route where nobody who has a model's file can.

    The model is the one that this node was told, or one that the others have.
    """
    if not view.node.machine.can_route or view.routing_node() is not None:
        return ()
    if view.node.told or view.own.fetched is not None or view.is_routed_by_others():
        return ()
    if view.node.wanted:
        return (_wanted_entry(view),)
    models = {peer.record.model.id: peer.record.model for peer in view.alive.values() if peer.record.model is not None}
    return (Follow(models[min(models)]),) if models else ()


def _wanted_entry(view: View) -> Action:
    entries = view.catalogue()
    try:
        entry = choose([entry for entry in entries if entry.has_trunk], view.node.wanted)
    except ModelError as error:
        return Impossible(str(error))
    if entry is not None:
        return Follow(entry)
    listed = ", ".join(f"{entry.file} ({entry.id[:12]})" for entry in entries) or "none"
    return Impossible(
        f"no node that answers has a model {view.node.wanted!r}, by name or beginning of its id; there are: {listed}"
    )


def elect_router(view: View) -> Sequence[Action]:
    """Takes the router's part when this node is the one to route, and gives it up when it is not."""
    known = (peer.record for peer in view.peers.values())
    # Also of routers that are gone: expert servers refuse a term below one they have seen.
    term = max(view.own.highest_term, election.highest_term(known))
    heard = (HearTerm(term),) if term > view.own.highest_term else ()
    if election.elect(view.live_records) is not view.record:
        return (*heard, EndRouter()) if view.own.router is not None else heard
    if view.own.router is not None or view.age_s < election.DELAY_S:
        return heard
    return (*heard, StartRouter(term + 1))


def keep_models(view: View) -> Sequence[Action]:
    """Says what of which models this node needs, so that only other things are removed for what is fetched."""
    in_use: dict[str, tuple[Sequence[Slice], bool]] = {}
    if view.own.fetched is not None:
        in_use[view.own.fetched.id] = ((), view.own.router is not None)
    experts = view.own.experts
    if experts is not None and experts.model_id is not None:
        _, trunk = in_use.get(experts.model_id, ((), False))
        in_use[experts.model_id] = (experts.in_use, trunk)
    return (Keep(in_use),)


def plan_slices(view: View) -> Sequence[Action]:
    """Has the slices planned for the nodes that are known now, if this node is the router."""
    if view.own.router is None:
        return ()
    nodes = {view.record.node: KnownNode(view.record, "127.0.0.1", True)}
    for node_id, peer in view.peers.items():
        nodes[node_id] = KnownNode(peer.record, _host(peer.url), peer.alive)
    return (Plan(nodes),)


def publish_record(view: View) -> Sequence[Action]:
    """Tells the others what this node is now."""
    return (Publish(view.record),)


def follow_plan(view: View) -> Sequence[Action]:
    """Holds what the router's plan asks of this node."""
    found = view.routing_node()
    if found is None or found[0].router is None or view.own.experts is None:
        return ()
    record, url = found
    plan = found[0].router.plan
    slices = () if plan is None else plan.slices.get(view.node.node_id, ())
    if plan is None or not slices:
        return ()
    if record.model is None or record.model.id != plan.model:
        return (Impossible(f"the router does not say what model {plan.model} of its plan is"),)
    takes_part = view.own.fetched is not None and view.own.fetched.id == plan.model
    if view.node.wanted and not takes_part:
        served = Entry(record.model.id, record.model.file, 0, (), (), has_trunk=True)
        if choose([served], view.node.wanted) is None:
            return (
                Impossible(
                    f"this node was told to serve {view.node.wanted}, and the router serves {record.model.file}"
                ),
            )
    return (Hold(record.model, url, tuple(slices)),)


#: In this order: a router publishes its plan in the round in which it was elected, and holds its own share of it.
STEPS: tuple[Step, ...] = (follow_model, elect_router, keep_models, plan_slices, publish_record, follow_plan)


def check_slices(index: ModelIndex, programs: ModelPrograms, slices: Sequence[Slice]) -> None:
    """Raises ModelError for slices of a plan that the model does not have, or whose layer program is not known."""
    layers = set(index.expert_layers)
    lacking = [one for one in slices if one[0] not in layers or one[2] >= index.n_expert]
    if lacking:
        raise ModelError(f"the router's plan has {describe(lacking)}, which {index.paths[0]} does not have")
    unknown = [one for one in slices if one[0] not in programs.layers]
    if unknown:
        raise ModelError(f"the router does not give the layer programs of {describe(unknown)}")


def _host(url: str) -> str:
    return url.removeprefix("http://").rpartition(":")[0].strip("[]")
