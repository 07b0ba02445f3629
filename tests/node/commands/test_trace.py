"""Figures of a trace, the screen for them, ``GET /trace``, and ``swarm-node trace`` at a node that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from node.commands.main import _parser
from node.commands.trace import other_requests, run_trace
from node.commands.trace_figures import (
    CallCounters,
    Counters,
    Figures,
    LayerCounters,
    LayerFigures,
    NodeFigures,
    Parts,
    Requests,
    Snapshot,
    TraceError,
    decode,
    difference,
    figures,
    grouped,
)
from node.commands.trace_screen import HEIGHT, WIDTH, headline, trace_lines
from node.errors import SwarmError
from node.records import Router
from node.router.failure import RouterEngineError
from rigs import ROOT, TESTS
from rigs.agent import lone_agent, peer
from rigs.door import serve

PROTOCOL = ROOT / "docs" / "protocol.md"

times_ns = st.integers(0, 10**10)
names = st.text(max_size=70)


@st.composite
def counters(draw: st.DrawFn, layers_max: int = 40, nodes_max: int = 5) -> Counters:
    """As a backend could have counted: the parts of a round are not longer than the round, nor those of a wait."""
    nodes = draw(st.lists(names, unique=True, max_size=nodes_max))
    layers, calls = [], []
    for layer in sorted(draw(st.sets(st.integers(0, 1023), max_size=layers_max))):
        rounds = draw(st.integers(1, 1000))
        encode, wait, add, rest = (draw(times_ns) for _ in range(4))
        layers.append(
            LayerCounters(
                layer, rounds, rounds * draw(st.integers(1, 512)), encode + wait + add + rest, encode, wait, add,
                draw(times_ns),
            )
        )  # fmt: skip
        left, left_ns = rounds, wait
        for node in draw(st.sets(st.integers(0, len(nodes) - 1))) if nodes else ():
            last, last_ns = draw(st.integers(0, left)), draw(st.integers(0, left_ns))
            left, left_ns = left - last, left_ns - last_ns
            compute = draw(st.integers(0, last_ns))
            queue = draw(st.integers(0, last_ns - compute))
            calls.append(
                CallCounters(
                    layer, node, draw(st.integers(1, 10**6)), draw(st.integers(1, 10**9)), 3 * last_ns, compute, queue,
                    last, last_ns, compute, queue, draw(times_ns),
                )
            )  # fmt: skip
    return Counters(draw(st.integers(1, 10**6)), draw(times_ns), 0, tuple(nodes), tuple(layers), tuple(calls))


def added(before: Counters, more: Counters) -> Counters:
    """What the backend has counted when it counted ``more`` after ``before``, with the nodes in ``more``'s order."""
    nodes = (*more.nodes, *(name for name in before.nodes if name not in more.nodes))
    layers = {layer.layer: layer for layer in before.layers}
    for layer in more.layers:
        layers[layer.layer] = _plus(layers.get(layer.layer), layer, ("layer",))
    calls = {
        (c.layer, before.nodes[c.node]): msgspec.structs.replace(c, node=nodes.index(before.nodes[c.node]))
        for c in before.calls
    }
    for call in more.calls:
        key = (call.layer, more.nodes[call.node])
        calls[key] = _plus(calls.get(key), call, ("layer", "node"))
    return Counters(
        before.passes + more.passes,
        before.between_ns + more.between_ns,
        0,
        nodes,
        tuple(layers.values()),
        tuple(calls.values()),
    )


def _plus(a: Any, b: Any, keep: Sequence[str]) -> Any:
    if a is None:
        return b
    changed = {name: getattr(a, name) + getattr(b, name) for name in b.__struct_fields__ if name not in keep}
    return msgspec.structs.replace(b, **changed)


@given(counters(), counters())
def test_a_difference_is_what_was_counted_meanwhile(before: Counters, more: Counters) -> None:
    found = difference(before, added(before, more))
    assert (found.passes, found.between_ns) == (more.passes, more.between_ns)
    assert {layer.layer: layer for layer in found.layers} == {layer.layer: layer for layer in more.layers}

    def by_name(of: Counters) -> dict[tuple[int, str], CallCounters]:
        return {(c.layer, of.nodes[c.node]): msgspec.structs.replace(c, node=0) for c in of.calls}

    assert by_name(found) == by_name(more)
    assert difference(before, before).layers == ()


@given(counters(), counters())
def test_an_engine_that_was_started_again_is_noticed(before: Counters, after: Counters) -> None:
    rounds = {layer.layer: layer.rounds for layer in after.layers}
    lost = before.passes > after.passes or any(rounds.get(one.layer, 0) < one.rounds for one in before.layers)
    if lost:
        with pytest.raises(TraceError, match="started again"):
            difference(before, after)
    else:
        found = difference(before, after)
        # Nothing below 0, whatever a node that comes and goes has counted.
        decode(document(found))


@given(counters(), st.booleans())
def test_parts_are_all_of_the_time_and_nothing_twice(counted: Counters, with_between: bool) -> None:
    if not counted.layers:
        with pytest.raises(TraceError, match="no experts"):
            figures(counted, with_between=with_between)
        return
    found = figures(counted, with_between=with_between)
    expected_ms = sum((layer.round_ns + layer.trunk_ns) / layer.rounds for layer in counted.layers) / 1e6
    expected_ms += counted.between_ns / counted.passes / 1e6 if with_between else 0
    assert found.parts.total_ms == pytest.approx(expected_ms)
    assert sum(layer.parts.total_ms for layer in found.layers) == pytest.approx(
        found.parts.total_ms - found.parts.between_ms
    )
    assert sum(node.wait_ms for node in found.nodes) <= found.parts.wait_ms * (1 + 1e-9) + 1e-9
    for node in found.nodes:
        assert node.wait_compute_ms + node.wait_network_ms + node.wait_queue_ms == pytest.approx(node.wait_ms)
        assert node.compute_ms + node.network_ms + node.queue_ms == pytest.approx(node.call_ms)
    assert [node.wait_ms for node in found.nodes] == sorted((node.wait_ms for node in found.nodes), reverse=True)
    assert [layer.first for layer in found.layers] == [layer.layer for layer in counted.layers]


def layer_figures(ms: Sequence[Sequence[float]], slowest: str = "beta") -> tuple[LayerFigures, ...]:
    return tuple(LayerFigures(number, number, Parts(*parts), slowest) for number, parts in enumerate(ms))


some_ms = st.floats(0, 1e5)


@given(st.lists(st.tuples(some_ms, some_ms, some_ms, some_ms), min_size=1, max_size=300), st.integers(0, 60))
def test_grouped_layers_are_neighbours_and_lose_no_time(ms: list[tuple[float, ...]], groups_max: int) -> None:
    groups = grouped(layer_figures(ms), groups_max)
    assert len(groups) == min(len(ms), max(1, groups_max))
    assert [n for group in groups for n in range(group.first, group.last + 1)] == list(range(len(ms)))
    together_ms = sum(group.parts.total_ms * (group.last - group.first + 1) for group in groups)
    assert together_ms == pytest.approx(sum(sum(parts) for parts in ms))


def test_layers_that_differ_stay_apart() -> None:
    ms = [(0.1, 0, 1.0, 0)] * 10 + [(0.1, 0, 5.0, 0)] + [(0.1, 0, 1.0, 0)] * 9
    groups = grouped(layer_figures(ms), 3)
    assert [(group.first, group.last) for group in groups] == [(0, 9), (10, 10), (11, 19)]


@given(
    counters(layers_max=120, nodes_max=12),
    names,
    st.lists(names, max_size=2),
    st.booleans(),
    st.integers(HEIGHT, 60),
)
def test_the_screen_is_never_too_large(
    counted: Counters, title: str, notes: list[str], plain: bool, height: int
) -> None:
    if not counted.layers:
        return
    lines = [
        line.plain
        for line in trace_lines(
            figures(counted, with_between=True), title=title, notes=notes, height=height, plain=plain
        )
    ]
    assert len(lines) <= height
    for line in lines:
        assert cell_len(line) <= WIDTH and (line.isprintable()), line
        if plain and not any(c > "~" for name in (*counted.nodes, title, *notes) for c in name):
            assert line.isascii()


def node_figures(
    name: str, wait_ms: float, compute_ms: float, queue_ms: float = 0.0, last: float = 10.0
) -> NodeFigures:
    network_ms = wait_ms - compute_ms - queue_ms
    return NodeFigures(name, 30, last, wait_ms, compute_ms, network_ms, queue_ms, 1.25, 0.2, 0.15, 0.05, 0)


def test_the_headline_names_who_is_waited_for() -> None:
    def of(parts: Parts, *nodes: NodeFigures) -> str:
        return headline(Figures(30, 1.0, parts, layer_figures([(1, 1, 1, 1)]), nodes, 0.0))

    beta, gamma = node_figures("beta", 3.7, 3.2), node_figures("gamma", 0.3, 0.2)
    assert of(Parts(1, 0.5, 4, 0.25, 0.25), beta, gamma) == (
        "67 % waiting for beta: compute 3.40, network 0.600 ms; 17 % trunk"
    )
    assert of(Parts(1, 0.5, 4, 0.25, 0.25), node_figures("beta", 3, 2), node_figures("gamma", 1, 0.5)) == (
        "67 % waiting, most for beta: compute 2.50, network 1.50 ms; 17 % trunk"
    )
    # None of them has most of it.
    assert of(Parts(1, 0.5, 4, 0.25, 0.25), node_figures("beta", 2, 1), node_figures("gamma", 2, 1.5)) == (
        "67 % waiting for experts: compute 2.50, network 1.50 ms; 17 % trunk"
    )
    assert of(Parts(10, 0.5, 4, 0.25, 0.25), node_figures("beta", 4, 1, 2)) == (
        "67 % trunk; 27 % waiting for beta: compute 1.00, network 1.00, queue 2.00 ms"
    )
    # What does not fit is left out, of what is less.
    long = node_figures("b" * 40, 3.5, 1, 2)
    assert of(Parts(0, 0.5, 4, 0.25, 0.75), long) == (
        "73 % waiting, most for bbbbbbbbbb~: compute 1.00, network 0.500, queue 2.00 ms"
    )
    assert of(Parts(0, 0, 4, 0, 9), beta).startswith("69 % between tokens; 31 % waiting for beta: ")
    assert of(Parts()) == "no time was counted"


def screen(n_layers: int = 30, **more: Any) -> list[str]:
    layers = layer_figures([(0.1, 0.05, 0.3 if number != 7 else 1.2, 0.02) for number in range(n_layers)])
    parts = Parts(
        *(sum(getattr(one.parts, name) for one in layers) for name in ("trunk_ms", "ask_ms", "wait_ms", "add_ms")), 0.7
    )
    nodes = (
        node_figures("beta", 8.0, 6.0, last=24),
        node_figures("gamma", 1.5, 1, last=6),
        node_figures("alpha", 0.4, 0.1, last=0),
    )
    return [line.plain for line in trace_lines(Figures(31, 1.0, parts, layers, nodes, 0.0), title="T", **more)]


def test_thirty_layers_and_three_nodes_fit_one_screen_one_by_one() -> None:
    lines = screen(notes=["first", "second"])
    assert len(lines) == HEIGHT
    text = "\n".join(lines)
    found = [int(number) for number in re.findall(r"(?:^| )(\d+) +[\d.]+ [░▒█▓]+ +beta", text, re.MULTILINE)]
    assert sorted(found) == list(range(30))
    # The slowest layer has the longest bar, which shows what it waits for.
    (slow,) = re.findall(r" 7  1\.37 (\S+)", text)
    assert slow.count("█") > 6 and all(len(bar) < len(slow) for bar in re.findall(r"0\.470 (\S+)", text))
    assert re.search(r"^beta +30\.0 +80 % +8\.00 +6\.00 +2\.00 +0 +1\.25 +0\.200 +0\.150 0\.050$", text, re.MULTILINE)
    assert lines[-2:] == ["first", "second"]


def test_many_layers_are_shown_together() -> None:
    lines = screen(128)
    assert len(lines) <= HEIGHT
    assert re.search(r"(^| )7 +1\.37 ", "\n".join(lines), re.MULTILINE), lines
    assert len(screen(128, height=60)) > HEIGHT


def test_without_unicode_each_part_still_has_a_sign_of_its_own() -> None:
    text = "\n".join(screen(plain=True))
    assert text.isascii()
    assert ". trunk 3.00  : ask 1.50  # wait 9.90  + add 0.600  - between 0.700  (ms)" in text


# --- the document


def document(trace: Counters, router: str = "alpha", relayed: int = 0, running: int = 0) -> bytes:
    return msgspec.json.encode(Snapshot(router, Requests(relayed, running), trace))


def test_the_message_of_the_protocol_can_be_read() -> None:
    """The same bytes as in tests/native/router/test_control.cpp."""
    (message,) = re.findall(r'^    (\{"between_ns":.*\})$', PROTOCOL.read_text(), re.MULTILINE)
    native = (TESTS / "native" / "router" / "test_control.cpp").read_text()
    bytes_there = native.split("agent.line().dump() ==\n")[1].split(";")[0]
    assert "".join(re.findall(r'R"\((.*?)\)"', bytes_there)) == message
    body = f'{{"router": "alpha", "requests": {{"relayed": 1, "running": 0}}, "trace": {message}, "new": 1}}'
    trace = decode(body.encode()).trace
    assert trace.nodes == ("alpha",) and trace.passes == 3
    assert trace.layers == (LayerCounters(4, 2, 7, 900, 100, 600, 150, 300),)
    assert trace.calls == (CallCounters(4, 0, 2, 14, 800, 400, 50, 2, 600, 400, 50, 550),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("requests"), "requests"),
        (lambda d: d["trace"].update(nodes=[]), "does not name"),
        (lambda d: d["trace"].update(nodes=[7]), "Expected `str`"),
        (lambda d: d["trace"].update(nodes=["a"] * 4097), "4096"),
        (lambda d: d["trace"]["layers"].append(dict(d["trace"]["layers"][0])), "comes twice"),
        (lambda d: d["trace"]["layers"][0].update(layer=1024), "<= 1023"),
        (lambda d: d["trace"]["layers"][0].update(wait_ns=-1), ">= 0"),
        (lambda d: d["trace"]["layers"][0].update(wait_ns=1.5), "int"),
        (lambda d: d["trace"]["calls"][0].pop(), "array"),
        (lambda d: d["trace"]["calls"][0].__setitem__(4, 2**63), "int"),
        (lambda d: d["trace"].update(calls=None), "array"),
    ],
)
def test_what_is_no_trace_is_refused(change: Any, words: str) -> None:
    good = Counters(1, 0, 0, ("a",), (LayerCounters(0, 1, 1, 1, 0, 0, 0, 0),), (CallCounters(*[0] * 12),))
    changed = json.loads(document(good))
    decode(json.dumps(changed).encode())
    change(changed)
    with pytest.raises(TraceError, match=words):
        decode(json.dumps(changed).encode())


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(body: bytes) -> None:
    with pytest.raises(TraceError):
        decode(body)


def test_requests_that_ran_before_and_those_that_began_meanwhile_are_counted() -> None:
    assert other_requests(Requests(10, 0), Requests(11, 0), own=1) == 0
    assert other_requests(Requests(10, 2), Requests(12, 1), own=1) == 3
    assert other_requests(Requests(10, 0), Requests(2, 0), own=1) == 0  # the agent was started again


# --- GET /trace


async def get(url: str, **more: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url, **more) as response:
        return response.status, await response.json()


@contextlib.asynccontextmanager
async def router_agent(folder: Path, answer: Any) -> AsyncIterator[tuple[Any, str]]:
    """An agent that is the router, whose engine answers with ``answer``: a trace, an error, or None without engine."""

    async def trace() -> dict[str, Any]:
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    async with lone_agent(folder) as (agent, _):
        engine = SimpleNamespace(trace=trace, statistics={}, url="http://127.0.0.1:1", api_key="key", hold=None)
        if answer is None:
            engine = None  # type: ignore[assignment]
        role: Any = SimpleNamespace(router_record=Router(1, "starting" if engine is None else "ready"), engine=engine)
        agent.supervisor.role = role
        yield agent, f"http://127.0.0.1:{agent.server.port}"


async def test_a_router_gives_its_trace(tmp_path: Path) -> None:
    trace = {
        "type": "trace",
        "id": 1,
        "passes": 2,
        "between_ns": 0,
        "held_ns": 0,
        "nodes": [],
        "layers": [],
        "calls": [],
    }
    async with router_agent(tmp_path, trace) as (agent, url):
        agent.door.statistics.relayed = 7
        status, found = await get(f"{url}/trace")
        assert status == 200 and found == {"router": "here", "requests": {"relayed": 7, "running": 0}, "trace": trace}
        assert decode(json.dumps(found).encode()).requests == Requests(7, 0)
        # As for /status.
        assert (await get(f"{url}/trace", headers={"Host": "evil.example"}))[0] == 403
        async with aiohttp.ClientSession() as session, session.post(f"{url}/swarm/v1/trace", json={}) as response:
            assert response.status == 200 and await response.json() == found


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (None, "model_loading", "engine does not run: the router engine is starting"),
        (RouterEngineError("llama-server gave no trace within 5 s"), "no_trace", "gave no trace within 5 s"),
    ],
)
async def test_a_router_without_a_trace_says_why(tmp_path: Path, answer: Any, code: str, words: str) -> None:
    async with router_agent(tmp_path, answer) as (_, url):
        status, found = await get(f"{url}/trace")
        assert status == 503 and found["error"]["code"] == code and words in found["error"]["message"]


async def test_a_node_without_a_router_says_so(tmp_path: Path) -> None:
    async with lone_agent(tmp_path) as (agent, _):
        url = f"http://127.0.0.1:{agent.server.port}"
        status, found = await get(f"{url}/trace")
        assert status == 503 and found["error"]["code"] == "no_router"
        async with aiohttp.ClientSession() as session, session.post(f"{url}/swarm/v1/trace", json={}) as response:
            assert response.status == 503 and (await response.json())["error"]["code"] == "not_router"


async def test_a_router_that_is_gone_is_named(tmp_path: Path) -> None:
    beta = peer("b", name="beta", router=Router(1, "ready"))
    async with lone_agent(tmp_path) as (agent, _), serve(web.Application()) as older:
        url = f"http://127.0.0.1:{agent.server.port}/trace"
        agent.peers = {beta.record.node: replace(beta, url="http://127.0.0.1:1")}
        status, found = await get(url)
        assert status == 503 and found["error"]["message"].startswith("the router, node beta, does not answer: Cannot")
        agent.peers = {beta.record.node: replace(beta, url=older)}
        status, found = await get(url)
        assert status == 503 and "beta, answers with status 404: it runs an older" in found["error"]["message"]


# --- swarm-node trace


def counted(passes: int, wait_ms: float = 0.3) -> Counters:
    """After so many passes of one token through 30 layers, for whose replies beta is waited for."""
    wait_ns = round(1e6 * wait_ms)
    of_layer = [passes * one for one in (1, 1, wait_ns + 60000, 40000, wait_ns, 20000, 100000)]
    of_call = [passes * one for one in (1, 3, wait_ns, 100000, 0, 1, wait_ns, 100000, 0, 0)]
    layers = tuple(LayerCounters(n, *of_layer) for n in range(30))
    calls = tuple(CallCounters(n, 0, *of_call) for n in range(30))
    return Counters(passes, passes * 700000, 0, ("beta",), layers, calls)


class FakeNode:
    """Gives ``snapshots`` one after the other, and a chat answer of ``chunks`` between them."""

    def __init__(
        self, snapshots: Sequence[bytes | tuple[int, bytes]], chunks: Sequence[str] = ("Once", " upon")
    ) -> None:
        self.snapshots = list(snapshots)
        self.chunks = chunks
        self.asked: list[Any] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/trace", self._trace), web.post("/v1/chat/completions", self._chat)])
        return app

    async def _trace(self, request: web.Request) -> web.Response:
        answer = self.snapshots.pop(0)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, body=body, content_type="application/json")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((await request.json(), request.headers.get("Authorization")))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self.chunks:
            event = {"choices": [{"delta": {"content": chunk}, "finish_reason": None}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        event = {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"predicted_per_token_ms": 14.5}}
        await response.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        return response


async def run(node: FakeNode, *arguments: str) -> str:
    """What the command prints. Raises SwarmError."""
    async with serve(node.app()) as url:
        options = _parser().parse_args(["trace", "--url", url, *arguments])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert await run_trace(options) == 0
    return printed.getvalue()


async def test_an_answer_is_asked_for_and_its_decode_shown_alone() -> None:
    node = FakeNode(
        [document(counted(5), relayed=3), document(counted(6), relayed=4), document(counted(36), relayed=4)]
    )
    text = await run(node, "--api-key", "k")
    lines = text.splitlines()
    # 30 layers of 0.1 + 0.36 ms, and 0.7 ms between tokens.
    assert lines[0] == "A token took 14.5 ms (llama-server: 14.5 ms), 69 a second, mean of 30 passes"
    assert lines[1] == "62 % waiting for beta: compute 3.00, network 6.00 ms; 21 % trunk"
    assert lines[-1] == "Router alpha. Before them, the prompt: 1 token in 13.8 ms, 65 % of it waiting"
    assert "other request" not in text and "\x1b" not in text and len(lines) <= HEIGHT
    ((body, authorization),) = node.asked
    assert body["max_tokens"] == 32 and body["stream"] and authorization == "Bearer k"


async def test_other_requests_are_said() -> None:
    snapshots = [
        document(counted(5), relayed=3, running=1),
        document(counted(6), relayed=4),
        document(counted(36), relayed=6),
    ]
    assert "3 other requests ran meanwhile" in await run(FakeNode(snapshots), "--prompt", "Hi")
    found = json.loads(await run(FakeNode(snapshots), "--json"))
    assert found["other_requests"] == 3 and found["router"] == "alpha"
    assert found["figures"]["total_ms"] == pytest.approx(14.5) and found["figures"]["parts"][
        "between_ms"
    ] == pytest.approx(0.7)
    assert found["figures"]["nodes"][0]["name"] == "beta" and len(found["figures"]["layers"]) == 30
    assert found["prompt"]["passes"] == 1 and found["counters"]["passes"] == 30


async def test_watching_asks_for_nothing() -> None:
    node = FakeNode([document(counted(5), relayed=3), document(counted(45), relayed=5)])
    text = await run(node, "--watch", "0.1")
    assert text.splitlines()[0] == "40 passes in 0.1 s, 1 token each: 13.8 ms a pass"
    assert "Router alpha, 2 requests. Not in it: sampling and idle, 0.700 ms a pass" in text
    assert node.asked == []
    assert (
        json.loads(await run(FakeNode([document(counted(5)), document(counted(45))]), "--watch", "0.1", "--json"))[
            "requests"
        ]
        == 0
    )


@pytest.mark.parametrize(
    ("node", "arguments", "words"),
    [
        (FakeNode([(503, b'{"error": {"message": "no node serves a model"}}')]), [], "no node serves a model"),
        (FakeNode([(500, b"oops")]), [], "status 500"),
        (FakeNode([(404, b"")]), [], "older swarm-node"),
        (FakeNode([b"[]"]), [], "cannot be read"),
        (FakeNode([b"x" * (17 << 20)]), [], "more than 16777216 bytes"),
        (FakeNode([document(counted(5))] * 2), ["--watch", "0.1"], "no experts were computed"),
        (FakeNode([document(counted(5)), document(counted(4))], ["a"]), ["--watch", "0.1"], "started again"),
        (FakeNode([document(counted(5))] * 2, []), [], "answer was empty"),
        (FakeNode([document(counted(5)), document(counted(6)), document(counted(6))]), [], "too short"),
    ],
)
async def test_what_cannot_be_measured_is_an_error(node: FakeNode, arguments: list[str], words: str) -> None:
    with pytest.raises(SwarmError, match=words):
        await asyncio.wait_for(run(node, *arguments), 10)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e6", "x"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["trace", f"--watch={seconds}"])
