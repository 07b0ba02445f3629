"""``swarm-node trace`` on a real swarm of three nodes, asked at one that does not route."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from node.commands.trace_figures import Counters, decode
from node.commands.trace_screen import HEIGHT, WIDTH
from node.models.demo import demo_model
from rigs.loopback import NODE_COMMAND, LocalSwarm, local_swarm

module_loop = pytest.mark.asyncio(loop_scope="module")

N_LAYERS = 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSwarm]:
    async with local_swarm(tmp_path_factory.mktemp("swarm"), demo_model(), {}) as running:
        await running.start("alpha", routes=True)
        await running.start("beta")
        await running.start("gamma")
        await running.whole()
        yield running


async def trace(swarm: LocalSwarm, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [NODE_COMMAND, "trace", "--url", swarm[name].url, *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


async def counters(swarm: LocalSwarm, name: str) -> Counters:
    async with aiohttp.ClientSession() as session, session.get(f"{swarm[name].url}/trace") as response:
        body = await response.read()
        assert response.status == 200, body
        assert json.loads(body)["router"] == "alpha"
        return decode(body).trace


@module_loop
async def test_every_node_gives_the_routers_trace(swarm: LocalSwarm) -> None:
    done = await trace(swarm, "alpha")
    assert done.returncode == 0, done.stderr
    calls = await swarm.expert_calls()
    traces = [await counters(swarm, name) for name in swarm.nodes]
    assert await swarm.expert_calls() == calls
    assert traces[0] == traces[1] == traces[2]
    (first, *_) = traces
    assert sorted(first.nodes) == ["alpha", "beta", "gamma"]
    # What the servers say they have answered.
    assert sum(call.calls for call in first.calls) == calls
    assert [layer.layer for layer in first.layers] == list(range(N_LAYERS))
    for layer in first.layers:
        assert layer.rounds == first.passes
        assert layer.encode_ns + layer.wait_ns + layer.add_ns <= layer.round_ns
        assert (layer.trunk_ns > 0) == (layer.layer > 0)
        of_layer = [call for call in first.calls if call.layer == layer.layer]
        # Every expert is used for every token.
        assert sum(call.pairs for call in of_layer) == 8 * layer.rows
        assert sum(call.last for call in of_layer) == layer.rounds
        assert sum(call.last_wait_ns for call in of_layer) == layer.wait_ns
        for call in of_layer:
            assert call.compute_ns > 0 and call.compute_ns + call.queue_ns <= call.call_ns


@module_loop
async def test_the_parts_are_what_llama_server_says_a_token_takes(swarm: LocalSwarm) -> None:
    apart = []
    for _ in range(3):
        done = await trace(swarm, "gamma", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["router"] == "alpha" and found["other_requests"] == 0
        shown = found["figures"]
        # One of 32 tokens comes from the prompt's last pass, and some were written before the first snapshot was made.
        assert 1 <= shown["passes"] <= 31 and shown["rows"] == 1
        assert shown["total_ms"] == pytest.approx(sum(shown["parts"].values()))
        assert all(ms > 0 for ms in shown["parts"].values())
        # The same time measured twice, if not of quite the same tokens: a part that is lacking or counted twice shows.
        apart.append(abs(shown["total_ms"] / found["timings"]["predicted_per_token_ms"] - 1))
    assert min(apart) < 0.1, apart


@module_loop
async def test_one_screen_shows_it(swarm: LocalSwarm) -> None:
    done = await trace(swarm, "beta", "--prompt", "Count to a hundred, please.")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    print(done.stdout)
    assert len(lines) <= HEIGHT and max(map(len, lines)) <= WIDTH
    assert "\x1b" not in done.stdout
    assert lines[0].startswith("A token took ") and " % waiting" in lines[1]
    assert {line.split()[0] for line in lines[7:10]} == {"alpha", "beta", "gamma"}


@module_loop
async def test_what_others_ask_is_watched(swarm: LocalSwarm) -> None:
    watching = asyncio.create_task(trace(swarm, "beta", "--watch", "4", "--json"))
    await asyncio.sleep(1.5)  # Python starts meanwhile
    before = await counters(swarm, "alpha")
    command = [NODE_COMMAND, "ask", "--url", swarm["gamma"].url, "--max-tokens", "6", "Name some cities."]
    asked = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    n_passes = (await counters(swarm, "alpha")).passes - before.passes
    done = await watching
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"] == 1 and found["counters"]["passes"] == n_passes >= 6
    assert found["figures"]["parts"]["between_ms"] == 0

    done = await trace(swarm, "beta", "--watch", "0.2")
    assert done.returncode == 1 and done.stderr == "swarm-node: no experts were computed meanwhile\n"
