"""Servers that die, stall or misbehave cost a clear error within the deadline, or nothing; and no restart later."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from node.commands.chat import ChatError, stream_chat
from node.commands.local_swarm import LocalSwarm, LocalSwarmOptions, local_swarm
from node.errors import ExpertProcessGaveUp
from node.expert_server import process as process_module
from node.expert_server import wire
from node.expert_server.process import ExpertProcess, ProcessEvent
from node.models.demo import demo_model
from node.models.index import read_model
from node.router.engine import REPORT_DELAY_S
from node.router.failure import ExpertFailure, RouterEngineError
from node.router.llama_server import EngineOptions
from node.router.programs import read_programs
from rigs import swarm as swarm_module
from rigs.calls import encoded
from rigs.swarm import ANSWER, FLOOR_S, LONG_QUESTION, QUESTION, VICTIM, VICTIM_EXPERTS, Broken, Rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What a loaded machine may add to a deadline before the client has the error.
SLACK_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with swarm_module.rig(tmp_path_factory.mktemp("swarm")) as running:
        # Also teaches the router how fast the servers are, which deadlines are made from.
        await running.ask(running.long_prompt(), 8)
        assert await running.ask() == ANSWER
        yield running


def check(rig: Rig, broken: Broken, phase: str, node: str = VICTIM) -> ExpertFailure:
    """The error came in time, names who and what failed, and waiting for it cost nothing."""
    failure = broken.failure
    assert failure.node == node and (failure.first, failure.last) == VICTIM_EXPERTS
    assert failure.layer in rig.held.programs.layers
    # Ten times what the call should take, at least the floor. A prompt's call takes up to a second on a slow machine.
    bound_s = FLOOR_S if phase == "decode" else 10.0
    assert 0.9 * FLOOR_S <= broken.waited_s <= bound_s + SLACK_S, failure
    assert failure.waited_ms <= 1000 * (broken.waited_s + SLACK_S)
    # From the fault on it only waits, but for what of the layer it still had to compute.
    assert broken.cpu_s <= 0.2 * broken.waited_s + 0.2
    return failure


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("drop", "no reply within|upgrade was not answered"),
        ("trickle", "no reply within"),
        ("close", "no success within"),
    ],
)
async def test_a_faulty_connection(rig: Rig, fault: str, reason: str, phase: str) -> None:
    pids = rig.pids
    rig.proxy.mode = "pass"

    def inject() -> None:
        rig.proxy.mode = fault

    try:
        broken = await rig.ask_and_break(phase, inject)
        failure = check(rig, broken, phase)
        assert any(part in failure.reason for part in reason.split("|")), failure
        # The fault lasts: so does the error, which still comes in time.
        started_s = time.monotonic()
        await rig.ask_in_vain()
        assert time.monotonic() - started_s <= 2 * FLOOR_S + SLACK_S
    finally:
        rig.proxy.mode = "pass"
    assert await rig.ask() == ANSWER
    assert rig.pids == pids


@pytest.mark.parametrize("phase", ["decode", "prefill"])
async def test_a_stopped_server(rig: Rig, phase: str) -> None:
    pids = rig.pids
    victim = rig.victim.pid
    assert victim is not None
    try:
        broken = await rig.ask_and_break(phase, lambda: os.kill(victim, signal.SIGSTOP))
        assert "no reply within" in check(rig, broken, phase).reason
        assert "upgrade was not answered" in (await rig.ask_in_vain()).reason
    finally:
        os.kill(victim, signal.SIGCONT)
    assert await rig.ask() == ANSWER
    assert rig.pids == pids


@pytest.mark.parametrize("phase", ["decode", "prefill"])
async def test_a_killed_server_that_does_not_come_back_by_itself(rig: Rig, phase: str) -> None:
    victim = rig.victim
    victim_pid = victim.pid
    assert victim_pid is not None
    others = [pid for pid in rig.pids if pid != victim_pid]
    broken = await rig.ask_and_break(phase, lambda: os.kill(victim_pid, signal.SIGKILL))
    failure = check(rig, broken, phase)
    assert "no success within" in failure.reason and "clos" in failure.reason
    await rig.use_table(nodes=rig.nodes_with(VICTIM, victim.port))
    assert "Connection refused" in (await rig.ask_in_vain()).reason
    await rig.run(victim.start())
    await rig.load(victim, rig.victim_slices)
    rig.proxy.target_port = victim.port
    await rig.use_table()
    assert await rig.ask() == ANSWER
    assert [pid for pid in rig.pids if pid != victim.pid] == others


async def test_a_call_in_trouble_goes_over_to_a_newer_table(rig: Rig) -> None:
    """Which names another holder, before the deadline of a call that began with the table before."""
    expected = await rig.ask(LONG_QUESTION, 24)
    servers = rig.held.servers
    spare = ExpertProcess("spare", threads=1, stderr=servers.folder / "spare.log")
    await rig.run(spare.start())

    def fail(n_chunks: int) -> None:
        if n_chunks == 5:
            rig.proxy.mode = "close"
            rig.proxy.after_bytes(1, asked)

    def asked() -> None:  # a layer's call
        rig.proxy.after_bytes(1, asked_again)

    def asked_again() -> None:
        rig.set_table(nodes=rig.nodes_with("spare", spare.port))

    try:
        await rig.load(spare, rig.victim_slices)
        assert await rig.ask(LONG_QUESTION, 24, fail) == expected
        assert (await rig.statistics(spare))["calls"] > 0
    finally:
        rig.proxy.mode = "pass"
        await rig.use_table()
        await rig.run(spare.stop())
    assert await rig.ask() == ANSWER


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sleeper(rig: Rig) -> ExpertProcess:
    """A server with the victim's slices, healthy but for its compute thread, which sleeps in every call."""
    servers = rig.held.servers
    process = ExpertProcess(
        "sleeper", threads=1, stderr=servers.folder / "sleeper.log", environment={"SWARM_DEBUG_SLEEP_S": "60"}
    )
    servers.processes.append(process)
    await rig.run(process.start())
    await rig.load(process, rig.victim_slices)
    return process


@pytest.mark.parametrize("phase", ["decode", "prefill"])
async def test_a_compute_thread_that_hangs(rig: Rig, sleeper: ExpertProcess, phase: str) -> None:
    pids = rig.pids
    try:
        broken = await rig.ask_and_break(phase, lambda: rig.set_table(nodes=rig.nodes_with("sleeper", sleeper.port)))
        assert "no reply within" in check(rig, broken, phase, node="sleeper").reason
        async with rig.session.get(f"http://127.0.0.1:{sleeper.port}/health") as response:
            assert response.status == 200
    finally:
        await rig.use_table()
    assert await rig.ask() == ANSWER
    assert rig.pids == pids


async def test_calls_stop_when_the_client_goes_away(rig: Rig) -> None:
    answer = stream_chat(
        rig.session,
        rig.engine.url,
        [{"role": "user", "content": LONG_QUESTION}],
        headers=rig.engine.headers,
        max_tokens=1500,
    )
    n_chunks = 0
    async for _ in answer:
        n_chunks += 1
        if n_chunks == 10:
            break
    await answer.aclose()  # closes the connection: the response was not read to its end
    await asyncio.sleep(1)
    processes = rig.held.servers.processes
    calls = [(await rig.statistics(process))["calls"] for process in processes]
    await asyncio.sleep(1)
    assert [(await rig.statistics(process))["calls"] for process in processes] == calls
    assert await rig.ask() == ANSWER


async def test_a_server_that_has_no_orders_yet_asks_to_be_tried_again(rig: Rig, tmp_path: Path) -> None:
    """As one does that has just been started again: it must not say that it does not hold what it is about to load."""
    process = ExpertProcess("fresh", threads=1, stderr=tmp_path / "fresh.log")
    await process.start()
    try:
        url = f"http://127.0.0.1:{process.port}/v1/ffn"
        headers = {"Content-Type": wire.CONTENT_TYPE}
        async with rig.session.post(url, data=encoded(), headers=headers) as response:
            error = wire.decode_error(await response.read())
            assert (response.status, error.kind, error.retry) == (503, "not_ready", True)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await rig.session.ws_connect(url)
        assert refused.value.status == 503
        await process.load(rig.held.index.model_id, {}, {}, {}, [])
        kind = "not_ready"
        async with asyncio.timeout(10):  # an order without slices has no answer to wait for
            while kind == "not_ready":
                async with rig.session.post(url, data=encoded(), headers=headers) as response:
                    kind = wire.decode_error(await response.read()).kind
        assert kind == "unknown_model"
    finally:
        await process.stop()


class Watched:
    """A local swarm under supervision, what it reported, and questions to it."""

    def __init__(
        self, swarm: LocalSwarm, events: list[tuple[str, ProcessEvent]], failures: list[ExpertFailure]
    ) -> None:
        assert swarm.engine is not None
        self.swarm = swarm
        self.engine = swarm.engine
        self.events = events
        self.failures = failures

    @property
    def pids(self) -> dict[str, int | None]:
        return {"router": self.engine.process.pid, **{node.name: node.process.pid for node in self.swarm.nodes}}

    async def ask(self, question: str, max_tokens: int, on_chunk: Callable[[int], None] | None = None) -> str:
        text, n_chunks = "", 0
        messages = [{"role": "user", "content": question}]
        async with aiohttp.ClientSession() as session:
            async for chunk in stream_chat(
                session, self.engine.url, messages, headers=self.engine.headers, max_tokens=max_tokens
            ):
                text += chunk.text
                n_chunks += 1
                if on_chunk is not None:
                    on_chunk(n_chunks)
        return text

    async def back(self, name: str, count: int) -> None:
        """Waits until a server has come back that often."""
        async with asyncio.timeout(20):
            while [event.kind for node, event in self.events if node == name].count("reloaded") < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    index = read_model(demo_model())
    events: list[tuple[str, ProcessEvent]] = []
    failures: list[ExpertFailure] = []
    async with local_swarm(
        index,
        await read_programs(index),
        LocalSwarmOptions(engine=EngineOptions(context=2048)),
        log_folder=folder,
        on_event=lambda name, event: events.append((name, event)),
        on_failure=failures.append,
    ) as swarm:
        yield Watched(swarm, events, failures)


def cpu_s(pids: dict[str, int | None]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids.values()]
    return float(sum(one.user + one.system for one in times))


async def test_a_server_that_is_killed_in_mid_answer_comes_back_and_the_fifth_time_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All five kills are in one window, however slow the machine is.
    monkeypatch.setattr(process_module, "CRASH_WINDOW_S", 600.0)
    n_tokens = 24
    outcomes, killed_s = [], list[float]()
    left: dict[str, int | None] = {}
    with pytest.raises(ExpertProcessGaveUp, match=r"crashed 5 times in 600 s, the last time: .*SIGKILL.*beta"):
        async with watched(tmp_path) as running:
            beta = running.swarm.nodes[1]
            expected = await running.ask(LONG_QUESTION, n_tokens)
            next_expected = await running.ask(QUESTION, n_tokens)
            assert len(expected) > 60 and next_expected == ANSWER

            def kill(n_chunks: int) -> None:
                if n_chunks == 8:
                    assert beta.process.pid is not None
                    os.kill(beta.process.pid, signal.SIGKILL)
                    killed_s.append(time.monotonic())

            for crash in range(1, 5):
                before, port = running.pids, beta.process.port
                running.failures.clear()
                try:
                    text = await running.ask(LONG_QUESTION, n_tokens, kill)
                    assert text == expected and not running.failures
                    outcomes.append("answered")
                except ChatError:
                    # The default floor of the deadline.
                    assert time.monotonic() - killed_s[-1] < 2 + SLACK_S
                    await asyncio.sleep(REPORT_DELAY_S)
                    failure = running.failures[-1]
                    assert (failure.node, failure.first, failure.last) == ("beta", 3, 5), failure
                    assert "no success within" in failure.reason
                    outcomes.append("failed")
                await running.back("beta", crash)
                assert beta.process.port == port
                assert await running.ask(QUESTION, n_tokens) == next_expected
                after = running.pids
                assert after.pop("beta") != before.pop("beta") and after == before
            used_s = cpu_s(running.pids)
            await asyncio.sleep(1)
            assert cpu_s(running.pids) - used_s < 0.1, "an idle swarm is idle"
            left = running.pids
            await running.ask(LONG_QUESTION, 200, kill)
    print(outcomes)
    assert not [pid for pid in left.values() if pid is not None and psutil.pid_exists(pid)]
    kinds = [event.kind for name, event in running.events if name == "beta"]
    assert kinds == ["started", *["exited", "started", "reloaded"] * 4, "exited", "gave_up"]
    assert all(path.stat().st_size < 64 << 10 for path in tmp_path.iterdir())  # noqa: ASYNC240


async def test_an_abort_in_a_server_costs_no_more_than_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_DEBUG_ABORT", "1")
    async with watched(tmp_path) as running, aiohttp.ClientSession() as session:
        gamma = running.swarm.nodes[2]
        before = running.pids
        body = encoded(model="abort")
        with pytest.raises(aiohttp.ClientError):
            await session.post(
                f"http://127.0.0.1:{gamma.process.port}/v1/ffn", data=body, headers={"Content-Type": wire.CONTENT_TYPE}
            )
        await running.back("gamma", 1)
        assert any("SIGABRT" in event.message for name, event in running.events if name == "gamma")
        assert await running.ask(QUESTION, 24) == ANSWER
        after = running.pids
        assert after.pop("gamma") != before.pop("gamma") and after == before


async def test_a_router_engine_that_dies_ends_the_swarm_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RouterEngineError, match=r"(?s)llama-server ended with status -9:.*llama_server: model loaded"):
        async with watched(tmp_path) as running:
            left = running.pids
            os.kill(running.engine.process.pid, signal.SIGKILL)
            await asyncio.sleep(10)
    assert not [pid for pid in left.values() if pid is not None and psutil.pid_exists(pid)]
