"""What a router exports of its llama-server: never falling, never waited for, and in Prometheus' format."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from node.errors import SwarmError
from node.metrics import Counters, Page, plain_samples
from node.router import engine as engine_module
from node.router.engine import RouterEngine
from node.router.engine_metrics import EngineMetrics
from node.router.failure import RouterEngineError
from node.router.llama_server import LlamaServer
from rigs.door import serve

# As llama-server writes it.
PAGE = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt}
llamacpp:prompt_tokens_cached_total {cached}
llamacpp:tokens_predicted_total {generated}
# TYPE llamacpp:prompt_tokens_seconds gauge
llamacpp:prompt_tokens_seconds {prompt_rate}
llamacpp:predicted_tokens_seconds {rate}
llamacpp:requests_processing {processing}
llamacpp:requests_deferred {deferred}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 7
"""


def page(**values: float) -> str:
    defaults = dict.fromkeys(("prompt", "cached", "generated", "prompt_rate", "rate", "processing", "deferred"), 0)
    return PAGE.format(**{**defaults, **values})


class FakeEngine:
    """Answers with the texts that it is given; an error is raised."""

    def __init__(self, *texts: str | Exception, statistics: dict[str, Any] | None = None) -> None:
        self.texts = list(texts)
        self.statistics: dict[str, Any] = statistics or {}
        self.n_read = 0

    async def metrics_text(self, session: aiohttp.ClientSession) -> str:
        self.n_read += 1
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return text


class Router:
    """An agent's part: its engine, and the requests that it has passed on and has open."""

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine
        self.requests = (0, 0)
        self.metrics = EngineMetrics(lambda: self.engine, lambda: self.requests, period_s=0.001)

    async def update(self) -> None:
        async with aiohttp.ClientSession() as session:
            await self.metrics.update(session)


def statistics(calls: int = 0, failures: int = 0, **nodes: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """What the backend counts; of each node its calls, pairs, bytes sent, bytes received, microseconds."""
    return {
        "calls": calls,
        "failures": failures,
        "nodes": [
            {
                **dict(zip(("calls", "pairs", "bytes_sent", "bytes_received"), of_node[:4], strict=True)),
                "name": name,
                "call_us_mean": of_node[4] / (of_node[0] or 1.0),
                "compute_us_mean": 1.0,
            }
            for name, of_node in nodes.items()
        ],
        "layers": [],
    }


async def test_it_is_read_while_requests_are_open_and_once_after() -> None:
    engine = FakeEngine(*(page(generated=n) for n in range(1, 9)))
    router = Router(engine)
    await router.update()
    assert engine.n_read == 0, "nobody has asked anything"
    for requests, n_read in (
        ((1, 1), 1),  # open
        ((1, 1), 2),
        ((1, 0), 3),  # it has ended since
        ((1, 0), 3),
        ((3, 0), 4),  # two came and went between two readings
        ((3, 0), 4),
    ):
        router.requests = requests
        await router.update()
        assert engine.n_read == n_read
    assert router.metrics.tokens["generated_tokens"] == 4


async def test_a_reading_that_fails_changes_nothing_and_is_made_up_for() -> None:
    engine = FakeEngine(
        page(prompt=10, generated=5, rate=30, prompt_rate=300, processing=1),
        RouterEngineError("llama-server gives no metrics: TimeoutError"),
        page(prompt=20, generated=9, processing=0),
    )
    router = Router(engine)
    router.requests = (1, 1)
    await router.update()
    router.requests = (1, 0)
    await router.update()
    assert router.metrics.tokens["generated_tokens"] == 5
    assert (router.metrics.generated_tokens_per_s, router.metrics.processing) == (30, 1)
    await router.update()
    assert router.metrics.tokens["generated_tokens"] == 9
    assert router.metrics.tokens["prompt_tokens"] == 20
    assert router.metrics.processing == 0
    # No request has ended between the readings: the speed of those before stands.
    assert (router.metrics.generated_tokens_per_s, router.metrics.prompt_tokens_per_s) == (30, 300)
    await router.update()
    assert engine.n_read == 3


async def test_counters_go_on_when_llama_server_is_started_again() -> None:
    first = FakeEngine(
        page(prompt=100, cached=50, generated=40, processing=2, deferred=1),
        statistics=statistics(60, 1, alpha=(40, 400, 4000, 40000, 123), beta=(20, 200, 2000, 20000, 77)),
    )
    router = Router(first)
    metrics = router.metrics
    router.requests = (2, 2)
    await router.update()
    assert (metrics.processing, metrics.deferred) == (2, 1)
    # The last that it reports, after the last reading and before its end.
    first.statistics = statistics(90, 2, alpha=(60, 600, 6000, 60000, 246), beta=(30, 300, 3000, 30000, 100))
    router.engine = None
    await router.update()
    assert (metrics.processing, metrics.deferred) == (0, 0)
    assert metrics.calls["calls", ""] == 90
    assert metrics.calls["calls", "alpha"] == 60
    second = FakeEngine(page(prompt=7, generated=3), page(prompt=200, generated=300))
    router.engine = second
    await router.update()
    assert metrics.tokens["prompt_tokens"] == 107
    assert metrics.tokens["prompt_tokens_cached"] == 50
    assert metrics.tokens["generated_tokens"] == 43
    second.statistics = statistics(5, 0, alpha=(3, 30, 300, 3000, 10), gamma=(2, 20, 200, 2000, 8))
    router.requests = (3, 0)
    await router.update()
    assert metrics.tokens["prompt_tokens"] == 300
    assert metrics.tokens["generated_tokens"] == 340
    assert metrics.calls["failures", ""] == 2
    assert metrics.nodes() == ["alpha", "beta", "gamma"]
    assert [metrics.calls["calls", node] for node in metrics.nodes()] == [63, 30, 2]
    assert metrics.calls["bytes_received", "alpha"] == 63000
    assert metrics.calls["call_us", "alpha"] == 256
    # Replaced at once, without a moment in between; it is further already than the one before was.
    router.engine = FakeEngine(page(prompt=1000, generated=1000), statistics=statistics(1000))
    router.requests = (4, 1)
    await router.update()
    assert metrics.tokens["generated_tokens"] == 1340
    assert metrics.calls["calls", ""] == 1095


async def test_a_reading_of_an_engine_that_is_gone_is_not_the_next_ones() -> None:
    router = Router()
    later = FakeEngine()

    class Late(FakeEngine):
        async def metrics_text(self, session: aiohttp.ClientSession) -> str:
            router.engine = later
            return page(generated=500)

    router.engine = Late()
    router.requests = (1, 1)
    await router.update()
    later.texts = [page(generated=3)]
    await router.update()
    assert router.metrics.tokens["generated_tokens"] == 3


async def test_nonsense_is_passed_over() -> None:
    broken: list[dict[str, Any]] = [
        {"calls": 1},
        {"calls": "many", "failures": 0, "nodes": []},
        {"calls": 1, "failures": 0, "nodes": [{"name": "alpha"}]},
        {"calls": 1, "failures": 0, "nodes": 7},
    ]
    router = Router(FakeEngine("", "<html>", page(prompt=-5, generated=float("nan"), processing=1), "\0" * 1000))
    for number, one in enumerate(broken):
        assert router.engine is not None
        router.engine.statistics = one
        router.requests = (number + 1, 1)
        await router.update()
    assert router.metrics.tokens["prompt_tokens"] == router.metrics.tokens["generated_tokens"] == 0
    assert router.metrics.calls["calls", ""] == 0


async def test_it_runs_by_itself_and_survives_errors() -> None:
    engine = FakeEngine(SwarmError("late"), page(generated=11))
    router = Router(engine)
    router.requests = (1, 0)
    running = asyncio.create_task(router.metrics.run())
    async with asyncio.timeout(5):
        while router.metrics.tokens["generated_tokens"] != 11:  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# ---- what RouterEngine asks of llama-server


@asynccontextmanager
async def engine_of(handler: Any) -> AsyncIterator[RouterEngine]:
    app = web.Application()
    app.router.add_get("/metrics", handler)
    async with serve(app) as url:
        nothing: Any = None
        yield RouterEngine(LlamaServer(url, "key", process=nothing, log_path=Path()), nothing)


async def test_metrics_are_asked_with_the_key() -> None:
    async def answer(request: web.Request) -> web.Response:
        ok = request.headers.get("Authorization") == "Bearer key"
        return web.Response(text=page(generated=3), status=200 if ok else 401)

    async with engine_of(answer) as engine, aiohttp.ClientSession() as session:
        assert plain_samples(await engine.metrics_text(session))["llamacpp:tokens_predicted_total"] == 3
        engine._server.api_key = "another"
        with pytest.raises(RouterEngineError, match="status 401"):
            await engine.metrics_text(session)


async def test_metrics_that_do_not_come_or_do_not_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_METRICS_TIMEOUT_S", 0.2)
    written = 0
    closed = asyncio.Event()

    async def late(request: web.Request) -> web.Response:
        try:
            await asyncio.sleep(60)
        finally:
            closed.set()
        return web.Response()

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)
            written += 10_000

    async with engine_of(late) as engine, aiohttp.ClientSession() as session:
        with pytest.raises(RouterEngineError, match="TimeoutError"):
            await engine.metrics_text(session)
        # llama-server need not answer any more: its connection is closed.
        await asyncio.wait_for(closed.wait(), 5)
    monkeypatch.setattr(engine_module, "_METRICS_TIMEOUT_S", 20.0)
    async with engine_of(endless) as engine, aiohttp.ClientSession() as session:
        with pytest.raises(RouterEngineError, match="longer than 65536 bytes"):
            await engine.metrics_text(session)
    assert written < 50 << 20
    async with aiohttp.ClientSession() as session:
        with pytest.raises(RouterEngineError, match="no metrics"):
            await engine.metrics_text(session)  # where nobody listens any more


# ---- counters and the format


@given(st.lists(st.one_of(st.none(), st.integers(0, 1000)), max_size=30))
def test_a_total_never_falls(steps: list[int | None]) -> None:
    """None: the process has ended. A value below the last one: it has ended, and nobody said so."""
    counters: Counters[str] = Counters()
    expected = last = 0
    for step in steps:
        before = counters["x"]
        if step is None:
            counters.restarted()
            last = 0
        else:
            counters.take({"x": step})
            expected += step - last if step >= last else step
            last = step
        assert counters["x"] == expected >= before


def test_names_are_bounded() -> None:
    counters: Counters[int] = Counters(names_max=3)
    for name in range(5):
        counters.take({name: 1.0})
        counters.restarted()
    assert sorted(counters) == [0, 1, 2]
    counters.take(dict.fromkeys(range(5), 2.0))
    assert [counters[name] for name in range(5)] == [3, 3, 3, 0, 0]


def test_numbers_are_written_in_full() -> None:
    page = Page()
    page.add("a_total", "counter", "help", [({}, 123456789012.0), ({"node": "x"}, 0.1)])
    page.add("nothing", "gauge", "help", [])
    page.add_summary("b_seconds", "help", [({"node": "y"}, 1.5, 3)])
    assert page.text() == (
        "# HELP a_total help\n# TYPE a_total counter\n"
        'a_total 123456789012\na_total{node="x"} 0.1\n'
        "# HELP b_seconds help\n# TYPE b_seconds summary\n"
        'b_seconds_sum{node="y"} 1.5\nb_seconds_count{node="y"} 3\n'
    )


LABEL = re.compile(r'm\{node="((?:[^"\\\n]|\\["\\n])*)"\} 1')


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=63))
def test_any_name_is_one_label_on_one_line(name: str) -> None:
    page = Page()
    page.add("m", "gauge", "help", [({"node": name}, 1)])
    *_, line, end = page.text().split("\n")
    found = LABEL.fullmatch(line)
    assert end == "" and found is not None
    read = re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], found[1])
    assert read == name


def test_reading_takes_any_text() -> None:
    generator = random.Random(1)
    for _ in range(2000):
        text = "".join(generator.choice('ab:{}"\\ \n\t#0123.e+-naNinf\0é') for _ in range(200))
        for name, value in plain_samples(text).items():
            assert name and abs(value) < float("inf")
    assert plain_samples('x 1e+06\ny NaN\nz +Inf\n# TYPE x gauge\nw 5 1700000000\nv{a="b"} 1\nu\n') == {
        "x": 1e6,
        "w": 5,
    }
