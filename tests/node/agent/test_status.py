"""`/status` and `/metrics` of a node, and what `swarm-node status` shows of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from rich.console import Console

from node.agent.measured import Measured
from node.agent.metrics_page import metrics_text
from node.agent.own_record import Experts, Own
from node.agent.status import status_of
from node.agent.view import View
from node.commands.status import print_status
from node.metrics import Counters
from node.records import Offer, Plan, Router, decode, encode
from node.router.engine_metrics import EngineMetrics
from node.slices import Slice
from rigs.agent import MODEL, NODE, lone_agent, peer, view_of
from rigs.metrics_page import BY_NODE, ROUTER, SERVED, samples


class Served:
    """An expert server that has 123 bytes of slices."""

    held_bytes = 123

    def __init__(self) -> None:
        self.counters: Counters[str] = Counters()


class Engine:
    """The router engine, with the statistics of its Swarm backend."""

    def __init__(self, statistics: dict[str, Any]) -> None:
        self.statistics = statistics

    async def metrics_text(self, session: aiohttp.ClientSession) -> str:
        return ""


OWN_PART = {
    "node": NODE.node_id,
    "name": "here",
    "url": "this node",
    "alive": True,
    "silent_s": 0.0,
    "platform": "Linux x86_64",
    "expert_port": 4101,
    "devices": [{"name": "CPU", "type": "cpu", "memory_bytes": 8 << 30}],
    "memory_bytes": 0,
    "expert_bytes_per_s": 0.0,
    "can_route": False,
    "model": None,
    "activity": "",
    "planned": [[0, 0, 3]],
    "ready": [],
    "problem": "",
}
DOCUMENT = {
    "swarm": "default",
    "node": NODE.node_id,
    "name": "here",
    "model": {
        "id": MODEL.id,
        "file": "model.gguf",
        "architecture": "qwen3moe",
        "layers": 4,
        "experts": 8,
        "trunk_bytes": 10,
        "expert_bytes": 20,
    },
    "router": {"node": "2" * 16, "name": "node-2", "term": 3, "state": "waiting", "tokens_per_s": 31.0},
    "ready": False,
    "waits_for": "no node has memory for layer 1 experts 0-7; add a machine",
    "missing": [[1, 0, 7]],
    "not_ready": {NODE.node_id: [[0, 0, 3]]},
    "nodes": [
        OWN_PART,
        {
            **OWN_PART,
            "node": "2" * 16,
            "name": "node-2",
            "url": "http://10.0.0.2:4100",
            "silent_s": 0.3,
            "expert_port": 0,
            "can_route": True,
            "model": {"id": MODEL.id, "file": "model.gguf"},
            "planned": [],
        },
    ],
    "catalogue": [{"id": MODEL.id, "file": "model.gguf", "bytes": 30, "whole": ["node-2"], "part": []}],
    "failures": ["f2", "f3", "f4", "f5", "f6", "f7", "f8", "f9"],
    "statistics": {"calls": 3},
}


def page(view: View, measured: Measured | None = None) -> str:
    measured = measured or Measured()
    return metrics_text(status_of(view, measured), measured)


def document(view: View, measured: Measured | None = None) -> dict[str, Any]:
    """The document that a client gets."""
    text = json.dumps(msgspec.to_builtins(status_of(view, measured or Measured())), allow_nan=False)
    return dict(json.loads(text))


def shown(view: View) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_status(document(view), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_document() -> None:
    """Field by field: scripts read it."""
    plan = Plan(1, MODEL.id, {NODE.node_id: (Slice(0, 0, 3),)}, missing=(Slice(1, 0, 7),))
    router = peer(
        "2",
        model=MODEL,
        can_route=True,
        router=Router(3, "waiting", plan, not_ready={NODE.node_id: (Slice(0, 0, 3),)}, tokens_per_s=31.0),
        offers=(Offer(MODEL.id, MODEL.file, 30, True, True),),
    )
    view = view_of(Own(4100, experts=Experts(4101)), replace(router, silent_s=0.27))
    measured = Measured(statistics={"calls": 3}, failures=[f"f{number}" for number in range(10)])
    # The order of the fields too.
    assert json.dumps(msgspec.to_builtins(status_of(view, measured))) == json.dumps(DOCUMENT)


def test_a_node_without_a_router_waits_for_one() -> None:
    found = document(view_of())
    assert (found["model"], found["router"], found["ready"], found["missing"], found["not_ready"]) == (
        *(None, None, False, []),
        {},
    )
    assert found["waits_for"] == "no node of the swarm serves a model yet; start one with --model FILE"
    busy = view_of(None, peer("2", activity="fetching"), peer("3", activity="hashing", alive=False))
    assert document(busy)["waits_for"] == "node-2 is fetching"
    ready = view_of(None, peer("2", router=Router(1, "ready")))
    assert document(ready)["ready"] and document(ready)["waits_for"] is None


async def test_a_node_answers_with_them(tmp_path: Path) -> None:
    async with lone_agent(tmp_path) as (agent, _), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{agent.server.port}"
        async with session.get(f"{url}/status") as response:
            found = await response.json()
        assert found == document(agent.view()) and found["name"] == "here"
        assert found["nodes"][0]["devices"][0]["name"] == "CPU"
        async with session.get(f"{url}/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert samples(await response.text())["swarm_ready"] == 0
        async with session.get(f"{url}/peers") as response:
            assert (await response.json())["node"] == found["node"]


def test_a_node_without_experts_that_does_not_route() -> None:
    found = samples(page(view_of()))
    assert found["swarm_ready"] == 0
    assert found['swarm_node_alive{node="here"}'] == 1
    assert not any(name.startswith((*ROUTER, *BY_NODE, *SERVED)) for name in found)
    assert 'swarm_node_expert_bytes_per_second{node="here"}' not in found


def test_what_an_expert_server_has_done() -> None:
    served = Served()
    served.counters.take(
        {"calls": 3, "pairs": 12, "bytes_received": 10**12, "bytes_sent": 7, "compute_us": 5e6, "queue_us": 250}
        | {"errors not_held": 2}
    )
    view = view_of(Own(4100, experts=Experts(4101, bytes_per_s=4.0987654e9)))
    found = samples(page(view, Measured(experts=served)))
    assert found['swarm_node_expert_bytes_per_second{node="here"}'] == 4.1e9
    assert {name: found[name] for name in SERVED} == dict(
        zip(SERVED, (123, 3, 12, 10**12, 7, 5.0, 3, 0.00025), strict=True)
    )
    assert found['swarm_served_errors_total{kind="not_held"}'] == 2
    assert not any(name.startswith((*ROUTER, *BY_NODE)) for name in found)


def test_what_a_router_has_done() -> None:
    engines: list[Engine] = []
    metrics = EngineMetrics(lambda: engines[-1] if engines else None, lambda: (0, 0))
    view = view_of(Own(4100, router=Router(1, "ready")))
    found = samples(page(view, Measured(engine=metrics)))
    assert {found[name] for name in ROUTER} == {0.0}
    alpha = {"name": "alpha", "calls": 4, "pairs": 8, "bytes_sent": 40, "bytes_received": 80, "call_us_mean": 1500.0}
    engines.append(Engine({"calls": 4, "failures": 1, "nodes": [alpha]}))
    metrics.follow()
    metrics.tokens.take({"prompt_tokens": 17, "prompt_tokens_cached": 4, "generated_tokens": 12345678})
    metrics.generated_tokens_per_s = 35.4321
    metrics.prompt_tokens_per_s = 120.5
    found = samples(page(view, Measured(engine=metrics)))
    assert [found[name] for name in ROUTER[:3]] == [17, 4, 12345678]
    assert [found[name] for name in ROUTER[3:5]] == [120.5, 35.4321]
    assert [found[name] for name in ROUTER[7:]] == [4, 1]
    assert [found[f'{name}{{node="alpha"}}'] for name in BY_NODE] == [4, 8, 40, 80, 0.006, 4]
    metrics.processing, metrics.deferred = 2, 1
    found = samples(page(view, Measured(engine=metrics, waiting=3)))
    assert [found[name] for name in ROUTER[5:7]] == [2, 4]
    # When another node routes, it is that one's to tell.
    assert not any(name.startswith((*ROUTER, *BY_NODE)) for name in samples(page(view)))


def test_names_of_others_cannot_break_the_page() -> None:
    text = page(view_of(None, peer("f", name='é"\\\n} 1 # TYPE')))
    assert 'swarm_node_alive{node="é\\"\\\\\\n} 1 # TYPE"} 1\n' in text
    assert text.count("\n# TYPE swarm_node_alive ") == 1


def test_speeds_in_the_record() -> None:
    own = Own(4100, router=Router(1, "ready"), tokens_per_s=35.4321, experts=Experts(4101, bytes_per_s=4.0987654e9))
    record = view_of(own).record
    assert record.router is not None
    assert (record.expert_bytes_per_s, record.router.tokens_per_s) == (4.1e9, 35)
    assert decode(encode(record)) == record
    # A change that nobody would notice is no news for every node of the swarm.
    assert view_of(replace(own, tokens_per_s=35.2)).record == record
    assert view_of(replace(own, tokens_per_s=37.0)).record != record
    fast = view_of(replace(own, experts=Experts(4101, bytes_per_s=1e300))).record
    assert decode(encode(fast)).expert_bytes_per_s == 1e15


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(4.12e9, " 4.1 GB/s "), (0.0, ""), (35e6, " 35.0 MB/s "), (3.35e12, " 3350.0 GB/s ")],
)
def test_speeds_for_people(bytes_per_s: float, text: str) -> None:
    own = Own(4100, router=Router(1, "ready"), experts=Experts(4101, bytes_per_s=bytes_per_s))
    found = document(view_of(own))
    assert found["nodes"][0]["expert_bytes_per_s"] == pytest.approx(bytes_per_s, rel=0.01)
    assert found["router"]["tokens_per_s"] == 0
    people = shown(view_of(own)).replace("\N{NO-BREAK SPACE}", " ")
    assert text in people and ("B/s" in people) == bool(text)
    assert "tokens/s" not in people
    fast = shown(view_of(replace(own, tokens_per_s=35.4321)))
    assert "ready, router here, term 1, 35 tokens/s\n" in fast


def test_what_a_node_is_at_and_another_model() -> None:
    hashes = view_of(Own(4100, activity="hashing model.gguf: 40 %", hashes="model.gguf"))
    found = document(hashes)
    assert found["nodes"][0]["activity"] == "hashing model.gguf: 40 %"
    assert found["waits_for"] == "here is hashing model.gguf: 40 %"
    assert "not ready: here is hashing model.gguf: 40 %" in shown(hashes)
    assert "hashing model.gguf, to know it" in hashes.summary()

    other = msgspec.structs.replace(MODEL, id="2" * 32)
    view = view_of(None, peer("f", model=MODEL, router=Router(1, "ready")), peer("e", name="there", model=other))
    found = document(view)
    assert {n["name"]: n["model"] and n["model"]["id"] for n in found["nodes"]}["there"] == "2" * 32
    people = shown(view)
    assert "model " + "1" * 32 in people and "has another model: model.gguf, " + "2" * 32 in people
    assert people.count("has another model") == 1
