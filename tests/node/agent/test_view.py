"""What a node sees of its swarm: who routes, where queries go, and what people are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.agent.own_record import Own
from node.agent.view import View
from node.api.swarm import Here, ServedModel, There, Unavailable
from node.records import Offer, Plan, Router
from node.slices import Slice
from rigs.agent import MACHINE, MODEL, NODE, peer, view_of

ABLE = replace(NODE, machine=replace(MACHINE, can_route=True))
HERE = Here("http://127.0.0.1:1", "key", 4)
READY = Router(3, "ready")
MISSING = (Slice(0, 4, 7),)


def _offer(*, whole: bool = False, trunk: bool = False, model_id: str = MODEL.id) -> Offer:
    return Offer(model_id, "model.gguf", 30, whole, trunk)


def test_queries_go_where_the_router_is() -> None:
    assert view_of().router() == Unavailable(
        "no_router", "No node of the swarm serves a model yet; start one with --model FILE"
    )
    there = view_of(None, peer("2", router=READY, model=MODEL))
    assert there.router() == There("node-2", "http://10.0.0.2:4100")
    assert there.models() == [ServedModel("model", ("model.gguf", MODEL.id))]
    here = view_of(Own(4100, served=MODEL, router=READY, engine=HERE), peer("2"), node=ABLE)
    assert here.router() == HERE
    assert here.routing_node() == (here.record, "")
    starting = view_of(Own(4100, served=MODEL, router=READY), node=ABLE)
    assert starting.router() == Unavailable("model_loading", "The router engine is starting")
    assert view_of().models() == []


def test_a_router_that_is_silent_routes_no_more() -> None:
    view = view_of(None, peer("2", router=READY, model=MODEL, alive=False))
    assert view.routing_node() is None
    assert isinstance(view.router(), Unavailable)


def test_of_two_routers_queries_go_to_the_one_that_all_follow() -> None:
    """Also before this node has given its part up."""
    own = Own(4100, served=MODEL, router=READY, engine=HERE)
    view = view_of(own, peer("2", router=Router(4, "ready"), model=MODEL, can_route=True), node=ABLE)
    assert view.router() == There("node-2", "http://10.0.0.2:4100")


@pytest.mark.parametrize(
    ("router", "code", "words", "missing"),
    [
        (Router(1, "starting"), "model_loading", "the router engine is starting", []),
        (Router(1, "failed", reason="no memory"), "model_loading", "the router engine failed: no memory", []),
        (Router(1, "waiting"), "model_loading", "node-2 is reading", []),
        (
            Router(1, "waiting", not_ready={NODE.node_id: MISSING, "3" * 16: (Slice(1, 0, 0),)}),
            "missing_slices",
            "missing: layer 1 expert 0 on node-3; layer 0 experts 4-7 on here",
            [*MISSING, Slice(1, 0, 0)],
        ),
        (
            Router(1, "waiting", Plan(1, MODEL.id, {}, MISSING)),
            "missing_slices",
            "no node has memory for layer 0 experts 4-7; add a machine",
            list(MISSING),
        ),
    ],
)
def test_why_a_router_does_not_answer(router: Router, code: str, words: str, missing: list[Slice]) -> None:
    view = view_of(None, peer("2", router=router, activity="reading"), peer("3", alive=False))
    found = view.router()
    assert isinstance(found, Unavailable)
    assert (found.code, found.message, list(found.missing)) == (code, f"The model is not ready: {words}", missing)
    assert view.summary() == f"2 nodes; a model, router node-2: {words}"


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (Own(1), "1 node; no model yet: start a node with --model FILE"),
        (Own(1, hashes="m.gguf"), "1 node; hashing m.gguf, to know it from others of its name"),
        (Own(1, served=MODEL), "1 node; the router is being elected"),
        (Own(1, served=MODEL, router=READY), "1 node; model.gguf, router here: ready"),
    ],
)
def test_the_state_in_a_line(own: Own, text: str) -> None:
    assert view_of(own).summary() == text


def _can_route(own: Own, *peers: Any) -> bool:
    return view_of(own, *peers, node=ABLE).record.can_route


def test_who_was_told_a_model_is_able_as_soon_as_its_content_is_known() -> None:
    assert not _can_route(Own(1))
    assert _can_route(Own(1, served=MODEL))
    assert not view_of(Own(1, served=MODEL)).record.can_route  # llama-server is not there, or may not be used


def test_who_fetches_a_model_is_able_where_nobody_who_has_it_can_come_back() -> None:
    fetching = Own(1, fetched=MODEL, has_programs=True)
    source = peer("2", offers=(_offer(trunk=True),))
    assert _can_route(fetching, source)
    assert _can_route(replace(fetching, offers=(_offer(trunk=True),)))  # its trunk is here
    assert not _can_route(replace(fetching, offers=(_offer(),)))
    assert not _can_route(replace(fetching, has_programs=False), source)
    assert not _can_route(fetching, peer("2", offers=(_offer(whole=True, model_id="2" * 32),)))
    assert not _can_route(fetching, peer("2", offers=(_offer(trunk=True),), alive=False))
    # Known for a minute after it went: until then its place is kept.
    for alive in (True, False):
        assert not _can_route(fetching, source, peer("3", can_route=True, alive=alive))
    assert _can_route(fetching, source, peer("3", can_route=True, fetches=True))
    assert _can_route(replace(fetching, router=READY), peer("3", can_route=True))


def test_the_catalogue_is_of_live_nodes() -> None:
    view = view_of(
        Own(1, offers=(_offer(),)),
        peer("2", offers=(_offer(whole=True),)),
        peer("3", offers=(_offer(model_id="2" * 32),), alive=False),
    )
    (entry,) = view.catalogue()
    assert (entry.id, entry.whole, entry.part) == (MODEL.id, ("node-2",), ("here",))


def test_a_view_does_no_input_or_output() -> None:
    """No event loop, no clock, no agent: the same values give the same view."""
    for module in (View.__module__, "node.agent.reconcile", "node.agent.election", "node.agent.status"):
        text = (Path(__file__).parents[3] / f"{module.replace('.', '/')}.py").read_text()
        for name in ("asyncio", "time", "socket", "aiohttp"):
            assert f"import {name}\n" not in text and f"from {name}" not in text, (module, name)
