"""What a node does next: each step alone, and rounds of all of them, without processes, sockets or a build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip import Address, NodeId, Status
from node.agent import election
from node.agent.own_record import Experts, Own
from node.agent.reconcile import (
    STEPS,
    Action,
    EndRouter,
    Follow,
    HearTerm,
    Hold,
    Impossible,
    Keep,
    Plan,
    Publish,
    StartRouter,
    check_slices,
    elect_router,
    follow_model,
    follow_plan,
    keep_models,
    plan_slices,
    publish_record,
)
from node.agent.view import View
from node.errors import ModelError
from node.peers.membership import FORGET_AFTER_S, Membership, Peer
from node.records import Offer, Record, Router, encode
from node.records import Plan as PlanRecord
from node.slices import Slice
from rigs.agent import MACHINE, MODEL, NODE, peer, record, view_of

ABLE = replace(NODE, machine=replace(MACHINE, can_route=True))
SERVES = Own(4100, served=MODEL)
OTHER_MODEL = msgspec.structs.replace(MODEL, id="2" * 32, file="other.gguf")
MINE = (Slice(0, 0, 3), Slice(1, 0, 7))
HOLDS = Own(4100, experts=Experts(4101))


def _offer(model_id: str = MODEL.id, file: str = "model.gguf", *, trunk: bool = True) -> Offer:
    return Offer(model_id, file, 30, whole=False, trunk=trunk)


def _plan(model_id: str = MODEL.id, **slices: Sequence[Slice]) -> PlanRecord:
    return PlanRecord(1, model_id, {NODE.node_id: MINE, **{k * 16: tuple(v) for k, v in slices.items()}})


def _router(plan: PlanRecord | None, **fields: Any) -> Peer:
    return peer("2", model=MODEL, can_route=True, router=Router(3, "waiting", plan), **fields)


def _reasons(actions: Sequence[Action]) -> str:
    return "; ".join(action.reason for action in actions if isinstance(action, Impossible))


# --- following a model


def test_a_node_follows_a_model_only_where_nobody_else_can_route() -> None:
    source = peer("2", model=MODEL, offers=(_offer(),))
    assert follow_model(view_of(None, source, node=ABLE)) == (Follow(MODEL),)
    assert follow_model(view_of(None, node=ABLE)) == ()
    assert follow_model(view_of(None, source)) == ()  # without llama-server
    assert follow_model(view_of(None, source, node=replace(ABLE, told=True))) == ()
    assert follow_model(view_of(Own(4100, fetched=MODEL), source, node=ABLE)) == ()
    assert follow_model(view_of(None, source, _router(None), node=ABLE)) == ()


@pytest.mark.parametrize("alive", [True, False])
def test_who_has_the_file_is_waited_for_as_long_as_it_is_known(alive: bool) -> None:
    """A minute after it went, it is known no more: see node/peers/membership.py."""
    source, owner = peer("2", model=MODEL), peer("3", can_route=True, alive=alive)
    assert follow_model(view_of(None, source, owner, node=ABLE)) == ()
    assert follow_model(view_of(None, source, node=ABLE)) == (Follow(MODEL),)
    # One that would have to fetch it too is not waited for.
    fetches = peer("3", can_route=True, fetches=True, alive=alive)
    assert follow_model(view_of(None, source, fetches, node=ABLE)) == (Follow(MODEL),)


def test_a_model_appears_changes_and_goes() -> None:
    assert follow_model(view_of(None, peer("2"), node=ABLE)) == ()
    both = (peer("2", model=MODEL), peer("3", model=OTHER_MODEL))
    assert follow_model(view_of(None, *both, node=ABLE)) == (Follow(MODEL),)  # every node takes the same
    assert follow_model(view_of(None, peer("2", model=OTHER_MODEL), node=ABLE)) == (Follow(OTHER_MODEL),)
    assert follow_model(view_of(None, peer("2", model=MODEL, alive=False), node=ABLE)) == ()


def test_a_model_that_the_user_named_is_taken_from_the_catalogue() -> None:
    wants = replace(ABLE, wanted="other")
    source = peer("2", model=MODEL, offers=(_offer(), _offer(OTHER_MODEL.id, "other.gguf")))
    (action,) = follow_model(view_of(None, source, node=wants))
    assert isinstance(action, Follow) and action.model.id == OTHER_MODEL.id
    reasons = _reasons(follow_model(view_of(None, peer("2", offers=(_offer(),)), node=wants)))
    assert "no node that answers has a model 'other'" in reasons and "model.gguf (111111111111)" in reasons
    assert "there are: none" in _reasons(follow_model(view_of(None, node=wants)))
    # Nobody has its trunk: it cannot be routed.
    source = peer("2", offers=(_offer(OTHER_MODEL.id, "other.gguf", trunk=False),))
    assert "there are: other.gguf" in _reasons(follow_model(view_of(None, source, node=wants)))
    twice = peer("2", offers=(_offer("3" * 32, "other.gguf"), _offer("4" * 32, "other.gguf")))
    assert "give more of the id" in _reasons(follow_model(view_of(None, twice, node=wants)))


# --- elections


def test_the_first_three_seconds_nobody_takes_the_routers_part() -> None:
    assert elect_router(view_of(SERVES, node=ABLE, age_s=election.DELAY_S - 0.01)) == ()
    assert elect_router(view_of(SERVES, node=ABLE, age_s=election.DELAY_S)) == (StartRouter(1),)


def test_the_able_node_with_the_lowest_id_takes_it() -> None:
    assert elect_router(view_of(SERVES, peer("9", can_route=True), peer("2"), node=ABLE)) == (StartRouter(1),)
    assert elect_router(view_of(SERVES, peer("2", can_route=True), node=ABLE)) == ()
    assert elect_router(view_of(SERVES, peer("2", can_route=True, alive=False), node=ABLE)) == (StartRouter(1),)
    assert elect_router(view_of(Own(4100), node=ABLE)) == ()  # told nothing to serve
    # Two of one name are two nodes.
    assert elect_router(view_of(SERVES, peer("9", can_route=True, name="here"), node=ABLE)) == (StartRouter(1),)


def test_nobody_displaces_a_live_router() -> None:
    router = peer("9", can_route=True, router=Router(5, "failed"))
    assert elect_router(view_of(replace(SERVES, highest_term=5), router, node=ABLE)) == ()
    gone = peer("9", can_route=True, router=Router(5, "failed"), alive=False)
    assert elect_router(view_of(replace(SERVES, highest_term=5), gone, node=ABLE)) == (StartRouter(6),)


def test_a_term_is_above_all_that_were_heard_of_also_of_who_is_gone() -> None:
    gone = peer("9", router=Router(7, "ready"), alive=False)
    assert elect_router(view_of(SERVES, gone, node=ABLE)) == (HearTerm(7), StartRouter(8))
    assert elect_router(view_of(replace(SERVES, highest_term=11), gone, node=ABLE)) == (StartRouter(12),)
    # Also by who does not route now.
    assert elect_router(view_of(None, peer("9", router=Router(7, "ready")))) == (HearTerm(7),)


def test_a_role_is_lost_to_a_higher_term_and_to_an_equal_one_of_a_lower_id() -> None:
    routes = replace(SERVES, router=Router(4, "ready"), highest_term=4)
    for node_id, term, lost in (("9", 5, True), ("2", 5, True), ("2", 4, True), ("9", 4, False), ("2", 3, False)):
        actions = elect_router(view_of(routes, peer(node_id, can_route=True, router=Router(term, "ready")), node=ABLE))
        assert (EndRouter() in actions) == lost, (node_id, term)
        assert not any(isinstance(action, StartRouter) for action in actions)
    assert elect_router(view_of(routes, peer("2", can_route=True), node=ABLE)) == ()


any_peers = st.lists(
    st.builds(
        lambda node_id, can_route, term, alive: peer(
            node_id, can_route=can_route or term > 0, alive=alive, router=Router(term, "ready") if term else None
        ),
        st.sampled_from("012345679abcdef"),
        st.booleans(),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=5,
    unique_by=lambda one: one.record.node,
)


@given(any_peers, st.integers(0, 4), st.integers(0, 4), st.floats(0, 9))
def test_an_election_in_any_swarm(peers: list[Peer], own_term: int, highest: int, age_s: float) -> None:
    router = Router(own_term, "ready") if own_term else None
    view = view_of(
        Own(4100, served=MODEL, router=router, highest_term=max(highest, own_term)), *peers, node=ABLE, age_s=age_s
    )
    actions = elect_router(view)
    starts = [action for action in actions if isinstance(action, StartRouter)]
    found = view.routing_node()
    if starts:
        assert found is None and router is None and age_s >= election.DELAY_S
        assert starts[0].term > max(highest, election.highest_term(one.record for one in peers))
    if EndRouter() in actions:
        assert router is not None and found is not None and found[1]  # to another one
    assert len(actions) <= 2


# --- the record and what is kept


def test_the_record_is_published_whatever_happens() -> None:
    view = view_of(HOLDS)
    assert publish_record(view) == (Publish(view.record),)


def test_what_is_in_use_is_kept() -> None:
    assert keep_models(view_of()) == (Keep({}),)
    experts = Experts(4101, model_id=MODEL.id, in_use=MINE)
    assert keep_models(view_of(Own(1, experts=experts))) == (Keep({MODEL.id: (MINE, False)}),)
    routes = Own(1, fetched=MODEL, router=Router(1, "ready"))
    assert keep_models(view_of(routes)) == (Keep({MODEL.id: ((), True)}),)
    both = replace(routes, experts=experts)
    assert keep_models(view_of(both)) == (Keep({MODEL.id: (MINE, True)}),)
    # What is held of a model before is kept until the new one's slices are there.
    changed = Own(1, fetched=OTHER_MODEL, experts=experts)
    assert keep_models(view_of(changed)) == (Keep({OTHER_MODEL.id: ((), False), MODEL.id: (MINE, False)}),)


def test_a_router_plans_for_itself_and_for_who_is_known() -> None:
    assert plan_slices(view_of(SERVES, peer("2"))) == ()
    view = view_of(replace(SERVES, router=Router(1, "ready")), peer("2"), peer("3", alive=False))
    (action,) = plan_slices(view)
    assert isinstance(action, Plan)
    known = {node_id[0]: (one.host, one.alive) for node_id, one in action.nodes.items()}
    assert known == {"8": ("127.0.0.1", True), "2": ("10.0.0.2", True), "3": ("10.0.0.3", False)}
    by_ipv6 = replace(peer("2"), url="http://[fe80::1%eth0]:4100")
    (action,) = plan_slices(view_of(replace(SERVES, router=Router(1, "ready")), by_ipv6))
    assert isinstance(action, Plan) and action.nodes["2" * 16].host == "fe80::1%eth0"


# --- following a plan


def test_a_node_holds_its_share_of_the_plan() -> None:
    assert follow_plan(view_of(HOLDS, _router(_plan()))) == (Hold(MODEL, "http://10.0.0.2:4100", MINE),)
    own_plan = Own(4100, served=MODEL, experts=Experts(4101), router=Router(1, "waiting", _plan()))
    assert follow_plan(view_of(own_plan)) == (Hold(MODEL, "", MINE),)


def test_there_may_be_nothing_to_hold() -> None:
    assert follow_plan(view_of(HOLDS)) == ()
    assert follow_plan(view_of(HOLDS, _router(None))) == ()
    assert follow_plan(view_of(Own(4100), _router(_plan()))) == ()  # it holds no experts
    assert follow_plan(view_of(HOLDS, _router(PlanRecord(1, MODEL.id, {"2" * 16: MINE})))) == ()
    assert follow_plan(view_of(HOLDS, _router(_plan(), alive=False))) == ()


def test_a_plan_for_a_model_that_the_router_does_not_describe() -> None:
    reasons = _reasons(follow_plan(view_of(HOLDS, _router(_plan(OTHER_MODEL.id)))))
    assert reasons == f"the router does not say what model {OTHER_MODEL.id} of its plan is"
    nameless = peer("2", router=Router(1, "waiting", _plan()))
    assert "does not say" in _reasons(follow_plan(view_of(HOLDS, nameless)))


def test_a_plan_for_another_model_than_the_user_named() -> None:
    wants = replace(NODE, wanted="other")
    reasons = _reasons(follow_plan(view_of(HOLDS, _router(_plan()), node=wants)))
    assert reasons == "this node was told to serve other, and the router serves model.gguf"
    for name in ("model", "model.gguf", MODEL.id[:6]):
        node = replace(NODE, wanted=name)
        assert follow_plan(view_of(HOLDS, _router(_plan()), node=node)) == (Hold(MODEL, "http://10.0.0.2:4100", MINE),)
    takes_part = replace(HOLDS, fetched=MODEL)
    assert not _reasons(follow_plan(view_of(takes_part, _router(_plan()), node=wants)))


def test_slices_that_the_model_does_not_have_and_programs_that_are_missing() -> None:
    index: Any = SimpleNamespace(expert_layers=(0, 1), n_expert=8, paths=("m.gguf",))
    programs: Any = SimpleNamespace(layers={0: None, 1: None})
    check_slices(index, programs, MINE)
    with pytest.raises(ModelError, match=r"the router's plan has layer 7 experts 0-1, which m\.gguf does not have"):
        check_slices(index, programs, (*MINE, Slice(7, 0, 1)))
    with pytest.raises(ModelError, match="layer 1 expert 8, which"):
        check_slices(index, programs, (Slice(1, 8, 8),))
    with pytest.raises(ModelError, match="does not give the layer programs of layer 1 experts 0-7"):
        check_slices(index, SimpleNamespace(layers={0: None}), MINE)  # type: ignore[arg-type]


# --- a record that cannot be read


class _Core:
    """What membership asks of gossip: one member, whose record the test sets."""

    def __init__(self, node_id: str) -> None:
        self.members = _Members()
        self.node = NodeId(bytes.fromhex(node_id))
        member = SimpleNamespace(
            node=self.node,
            record=None,
            address=Address("10.0.0.2", 4100),
            is_live=True,
            status=Status.ALIVE,
            since_s=0.0,
            heard_s=0.0,
            incarnation=1,
        )
        self.member = self.members[self.node] = member


class _Members(dict[NodeId, Any]):
    def __iter__(self) -> Any:
        return iter(list(self.values()))


def test_a_record_that_cannot_be_read_is_one_of_nobody() -> None:
    router: Record = _router(_plan()).record
    core: Any = _Core(router.node)
    membership = Membership(core, NODE.swarm)

    def view(payload: bytes, version: int) -> View:
        core.member.record = SimpleNamespace(version=version, payload=payload)
        membership.record_changed(core.node)
        return View(ABLE, replace(HOLDS, served=MODEL), membership.known(1.0), 3600.0)

    assert [type(action) for action in follow_plan(view(encode(router), 1))] == [Hold]
    assert elect_router(view(encode(router), 1)) == (HearTerm(3),)
    for number, payload in enumerate((b"{", encode(msgspec.structs.replace(router, swarm="another")), b"")):
        broken = view(payload, 2 + number)
        assert broken.routing_node() is None and not broken.peers
        assert follow_plan(broken) == ()
        assert elect_router(broken) == (StartRouter(1),)
    assert [type(action) for action in follow_plan(view(encode(router), 9))] == [Hold]
    # And one of a router that went is known for a minute.
    core.member.is_live, core.member.status = False, Status.DEAD
    assert membership.known(FORGET_AFTER_S) and not membership.known(FORGET_AFTER_S + 1)


# --- all steps


@given(any_peers, st.sampled_from([Own(4100), SERVES, HOLDS, replace(SERVES, router=Router(2, "ready", _plan()))]))
def test_a_round_never_fails(peers: list[Peer], own: Own) -> None:
    for node in (NODE, ABLE, replace(ABLE, wanted="x"), replace(ABLE, told=True)):
        view = view_of(own, *peers, node=node)
        published = [action for step in STEPS for action in step(view) if isinstance(action, Publish)]
        assert len(published) == 1


def test_records_of_the_rig_are_as_on_the_wire() -> None:
    one = record("2", model=MODEL, router=Router(3, "waiting", _plan()))
    assert msgspec.json.decode(encode(one), type=Record) == one
