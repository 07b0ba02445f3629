"""`/status` and `/metrics` of a node, and what `swarm-node status` shows of them."""

from __future__ import annotations

import io
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from node.agent import machine
from node.agent.agent import Agent
from node.agent.status import metrics_text, status_document
from node.api.front_door import Door
from node.commands.status import print_status
from node.metrics import Counters
from node.models.demo import demo_model
from node.peers.identity import hold_identity
from node.peers.membership import Peer
from node.records import Model, Router, decode, encode
from rigs.agent import config
from rigs.lan import Host, lan, needs_namespaces

SAMPLE = re.compile(r'([a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (-?[0-9.e+-]+)')
# Of the router alone.
ROUTER = (
    "swarm_prompt_tokens_total",
    "swarm_prompt_tokens_cached_total",
    "swarm_generated_tokens_total",
    "swarm_prompt_tokens_per_second",
    "swarm_generated_tokens_per_second",
    "swarm_requests_processing",
    "swarm_requests_waiting",
    "swarm_expert_calls_total",
    "swarm_expert_failures_total",
)
# Of each node that has sent or answered expert calls.
BY_NODE = (
    "swarm_expert_calls_by_node_total",
    "swarm_expert_pairs_by_node_total",
    "swarm_expert_bytes_sent_by_node_total",
    "swarm_expert_bytes_received_by_node_total",
    "swarm_expert_call_seconds_sum",
    "swarm_expert_call_seconds_count",
)
SERVED = (
    "swarm_slices_bytes",
    "swarm_served_calls_total",
    "swarm_served_pairs_total",
    "swarm_served_bytes_received_total",
    "swarm_served_bytes_sent_total",
    "swarm_served_compute_seconds_sum",
    "swarm_served_compute_seconds_count",
    "swarm_served_queue_seconds_sum",
)


def samples(text: str) -> dict[str, float]:
    """By name with labels. Every line is in the format, every metric is declared before it, and nothing comes twice."""
    found: dict[str, float] = {}
    declared: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in declared
            declared[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name = match[1]
            base = name if name in declared else re.sub("_(sum|count)$", "", name)
            assert declared[base] in ("gauge", "counter", "summary")
            assert (declared[base] == "counter") == name.endswith("_total")
            assert name + (match[2] or "") not in found
            found[name + (match[2] or "")] = float(match[3])
    assert text.endswith("\n")
    return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Agent]:
    """An agent of which nothing runs."""
    settings = config(tmp_path)
    with hold_identity(Path(settings.node.state_folder), settings.node.name) as identity:
        agent = Agent(settings, identity)
        agent.port = 4100
        yield agent


def with_experts(agent: Agent, bytes_per_s: float) -> Any:
    process: Any = SimpleNamespace(port=4101, expert_bytes_per_s=bytes_per_s, held_bytes=123, counters=Counters())
    agent.holder = SimpleNamespace(process=process, model_id=None, ready=(), problem="")  # type: ignore[assignment]
    return process


def as_router(agent: Agent) -> Any:
    role: Any = SimpleNamespace(router_record=Router(1, "ready"), engine=None)
    agent.role = role
    return role


def test_a_node_without_experts_that_does_not_route(node: Agent) -> None:
    found = samples(metrics_text(node))
    assert found["swarm_ready"] == 0
    assert found['swarm_node_alive{node="here"}'] == 1
    assert not any(name.startswith((*ROUTER, *BY_NODE, *SERVED)) for name in found)
    assert 'swarm_node_expert_bytes_per_second{node="here"}' not in found


def test_what_an_expert_server_has_done(node: Agent) -> None:
    process = with_experts(node, 4.0987654e9)
    process.counters.take(
        {"calls": 3, "pairs": 12, "bytes_received": 10**12, "bytes_sent": 7, "compute_us": 5e6, "queue_us": 250, "errors not_held": 2}
    )  # fmt: skip
    found = samples(metrics_text(node))
    assert found['swarm_node_expert_bytes_per_second{node="here"}'] == 4.1e9
    assert {name: found[name] for name in SERVED} == dict(
        zip(SERVED, (123, 3, 12, 10**12, 7, 5.0, 3, 0.00025), strict=True)
    )
    assert found['swarm_served_errors_total{kind="not_held"}'] == 2
    assert not any(name.startswith((*ROUTER, *BY_NODE)) for name in found)


def test_what_a_router_has_done(node: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    role = as_router(node)
    assert {samples(metrics_text(node))[name] for name in ROUTER} == {0.0}
    alpha = {"name": "alpha", "calls": 4, "pairs": 8, "bytes_sent": 40, "bytes_received": 80, "call_us_mean": 1500.0}
    role.engine = SimpleNamespace(statistics={"calls": 4, "failures": 1, "nodes": [alpha]})
    node.engine_metrics.tokens.take({"prompt_tokens": 17, "prompt_tokens_cached": 4, "generated_tokens": 12345678})
    node.engine_metrics.generated_tokens_per_s = 35.4321
    node.engine_metrics.prompt_tokens_per_s = 120.5
    found = samples(metrics_text(node))
    assert [found[name] for name in ROUTER[:3]] == [17, 4, 12345678]
    assert [found[name] for name in ROUTER[3:5]] == [120.5, 35.4321]
    assert [found[name] for name in ROUTER[7:]] == [4, 1]
    assert [found[f'{name}{{node="alpha"}}'] for name in BY_NODE] == [4, 8, 40, 80, 0.006, 4]
    node.engine_metrics.processing, node.engine_metrics.deferred = 2, 1
    monkeypatch.setattr(Door, "waiting", 3)
    found = samples(metrics_text(node))
    assert [found[name] for name in ROUTER[5:7]] == [2, 4]
    # When another node routes, it is that one's to tell.
    node.role = None
    assert not any(name.startswith((*ROUTER, *BY_NODE)) for name in samples(metrics_text(node)))


def test_names_of_others_cannot_break_the_page(node: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    record = msgspec.structs.replace(node.record(), node="f" * 16, name='é"\\\n} 1 # TYPE')
    peer = Peer(record, "http://10.0.0.2:4100", True, 0.2)
    monkeypatch.setattr(node.membership, "known", lambda now_s: {record.node: peer})
    text = metrics_text(node)
    assert 'swarm_node_alive{node="é\\"\\\\\\n} 1 # TYPE"} 1\n' in text
    assert text.count("\n# TYPE swarm_node_alive ") == 1


def test_speeds_in_the_record(node: Agent) -> None:
    with_experts(node, 4.0987654e9)
    as_router(node)
    node.engine_metrics.generated_tokens_per_s = 35.4321
    record = node.record()
    assert record.router is not None
    assert (record.expert_bytes_per_s, record.router.tokens_per_s) == (4.1e9, 35)
    assert decode(encode(record)) == record
    # A change that nobody would notice is no news for every node of the swarm.
    node.engine_metrics.generated_tokens_per_s = 35.2
    assert node.record() == record
    node.engine_metrics.generated_tokens_per_s = 37.0
    assert node.record() != record
    with_experts(node, 1e300)
    assert decode(encode(node.record())).expert_bytes_per_s == 1e15


def shown(document: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_status(document, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(4.12e9, " 4.1 GB/s "), (0.0, ""), (35e6, " 35.0 MB/s "), (3.35e12, " 3350.0 GB/s ")],
)
def test_speeds_for_people(bytes_per_s: float, text: str, node: Agent) -> None:
    with_experts(node, bytes_per_s)
    as_router(node)
    document = status_document(node)
    json.dumps(document, allow_nan=False)
    assert document["nodes"][0]["expert_bytes_per_s"] == pytest.approx(bytes_per_s, rel=0.01)
    assert document["router"]["tokens_per_s"] == 0
    people = shown(document).replace("\N{NO-BREAK SPACE}", " ")
    assert text in people and ("B/s" in people) == bool(text)
    assert "tokens/s" not in shown(document)
    node.engine_metrics.generated_tokens_per_s = 35.4321
    assert "ready, router here, term 1, 35 tokens/s\n" in shown(status_document(node))


def test_what_a_node_is_at_and_another_model(node: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    node.known_models.progress = ("model.gguf", 43, 100)
    document = status_document(node)
    assert document["nodes"][0]["activity"] == "hashing model.gguf: 40 %"
    assert document["waits_for"] == "here is hashing model.gguf: 40 %"
    assert "not ready: here is hashing model.gguf: 40 %" in shown(document)
    assert "hashing model.gguf, to know it" in node.summary()

    def serving(model_id: str) -> Any:
        return msgspec.structs.replace(node.record(), model=Model(model_id, "model.gguf", "qwen3moe", 4, 8, 1, 1))

    router = msgspec.structs.replace(serving("1" * 32), node="f" * 16, router=Router(1, "ready"))
    other = msgspec.structs.replace(serving("2" * 32), node="e" * 16, name="there")
    peers = {record.node: Peer(record, "http://10.0.0.2:4100", True, 0.2) for record in (router, other)}
    for name in ("known", "alive"):
        monkeypatch.setattr(node.membership, name, lambda now_s: peers)
    document = status_document(node)
    assert {n["name"]: n["model"] and n["model"]["id"] for n in document["nodes"]}["there"] == "2" * 32
    people = shown(document)
    assert "model " + "1" * 32 in people and "has another model: model.gguf, " + "2" * 32 in people
    assert people.count("has another model") == 1


@pytest.mark.parametrize(("memory_mib", "offered_bytes"), [(0, int(0.9 * (1 << 30))), (700, 700 << 20)])
def test_no_more_is_offered_than_is_free(
    memory_mib: int, offered_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, that is what its limit leaves (tests/node/test_memory_limit.py)."""
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 1 << 30)
    settings = config(tmp_path, {"SWARM_EXPERTS_MEMORY_MIB": str(memory_mib)})
    with hold_identity(Path(settings.node.state_folder), settings.node.name) as identity:
        assert Agent(settings, identity).record().memory_bytes == offered_bytes


def metrics(host: Host) -> dict[str, float]:
    code, text = host.curl("/metrics")
    assert code == 200
    return samples(text + "\n" * (not text.endswith("\n")))


def wait_for(host: Host, name: str, at_least: float, within_s: float = 30) -> dict[str, float]:
    deadline_s = time.monotonic() + within_s
    while (found := metrics(host)).get(name, 0.0) < at_least:
        assert time.monotonic() < deadline_s, (name, at_least, found.get(name))
        time.sleep(0.2)
    return found


@pytest.mark.slow
@needs_namespaces
def test_a_swarm_of_two(tmp_path: Path) -> None:
    model = demo_model()
    question = ("ask", "--max-tokens", "8", "What is the capital of France? Tell me one fact about it.")
    with lan(tmp_path, ["one", "two"]) as (one, two):
        one.start("--model", str(model), cwd=model.parent)
        two.start(cwd=model.parent)
        for host in (one, two):
            host.wait_ready(2)
        for name in ("one", "two"):
            wait_for(two, f'swarm_node_expert_bytes_per_second{{node="{name}"}}', 1e6)
        assert two.run(*question).stdout.strip()
        before = wait_for(one, "swarm_generated_tokens_total", 7)
        assert before["swarm_prompt_tokens_total"] >= 10
        assert before["swarm_generated_tokens_per_second"] > 0
        assert before["swarm_prompt_tokens_per_second"] > 0
        assert before["swarm_requests_waiting"] == 0
        for name in BY_NODE:
            for node in ("one", "two"):
                assert before[f'{name}{{node="{node}"}}'] > 0, name
        assert before["swarm_expert_calls_total"] >= 60
        served = wait_for(two, "swarm_served_calls_total", 60)
        for name in SERVED:
            assert served[name] > 0, name
        assert not any(name.startswith((*ROUTER, *BY_NODE)) for name in served)

        # Every node knows the router's speed.
        deadline_s = time.monotonic() + 10
        while not (status := two.status())["router"]["tokens_per_s"]:
            assert time.monotonic() < deadline_s, status
            time.sleep(0.2)
        assert all(node["expert_bytes_per_s"] > 1e6 for node in status["nodes"])
        people = two.run("status").stdout
        assert re.search(r"ready, router one, term \d+, [\d.e+]+ tokens/s", people)
        assert len(re.findall(r" \d+\.\d[ \N{NO-BREAK SPACE}][MG]B/s ", people)) == 2
        print(people)

        # llama-server starts again, counting from 0.
        (llama,) = [pid for pid in one.pids() if "llama-server" in psutil.Process(pid).name()]
        psutil.Process(llama).send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while one.status()["ready"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        for _ in range(200):
            now = metrics(one)
            for name in before:
                if name.endswith("_total"):
                    assert now[name] >= before[name], name
            before = now
            if one.status()["ready"]:
                break
            time.sleep(0.2)
        one.wait_ready(2)
        assert one.run(*question).stdout.strip()
        after = wait_for(one, "swarm_generated_tokens_total", before["swarm_generated_tokens_total"] + 7)
        for name in before:
            if name.endswith("_total"):
                assert after[name] >= before[name], name
        assert after["swarm_expert_calls_total"] > before["swarm_expert_calls_total"]
