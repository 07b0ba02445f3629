"""Clients that leave a real swarm's router while another stream is being written.

llama-server alone would not notice: see node/api/client_hold.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from node.api.front_door import Here, There
from node.models.demo import demo_model
from node.router.engine import RouterEngine, router_engine
from node.router.llama_server import EngineOptions
from rigs.door import Node, node
from rigs.expert_servers import Servers
from rigs.stock_server import llama_server, ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
# Is to be the same whatever happens beside it.
TALE: dict[str, Any] = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 60, "temperature": 0}
# Some 6,000 tokens to read, and many to write.
NOVEL: dict[str, Any] = {"prompt": "A cat sat. " * 1500, "ignore_eos": True, "max_tokens": 1500, "stream": True}
STORY: dict[str, Any] = {"prompt": "A cat sat.", "ignore_eos": True, "max_tokens": 6000}


@dataclass
class Rig:
    """A router engine over expert servers, a node that is its router, and another node that is not."""

    session: aiohttp.ClientSession
    engine: RouterEngine
    one: Node
    two: Node
    log_path: Path
    #: What stock llama.cpp says for TALE.
    tale: str
    held_ms: list[int] = field(default_factory=list)

    def note_holds(self) -> None:
        """Puts what is held from now on into `held_ms`, as if the last hold had been long ago."""
        self.held_ms = held_ms = []

        def hold(ms: int) -> None:
            held_ms.append(ms)
            self.engine.hold(ms)

        self.one.agent.target = Here(self.engine.url, self.engine.api_key, 2, hold)

    async def ask(self, through: str, body: dict[str, Any]) -> bytes:
        async with self.session.post(getattr(self, through).url + COMPLETIONS, json=body) as response:
            return await response.read()

    async def busy(self) -> int:
        """How many slots work."""
        async with self.session.get(f"{self.engine.url}/slots", headers=self.engine.headers) as response:
            return sum(slot["is_processing"] for slot in await response.json())

    async def until_busy(self, n_slots: int) -> None:
        async with asyncio.timeout(60):
            while await self.busy() != n_slots:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def logged(self, pattern: str, after_bytes: int) -> re.Match[str]:
        """Waits for a line in llama-server's log. Asking it would be a result, which restarts its wait."""
        async with asyncio.timeout(60):
            while not (found := re.search(pattern, self.log_path.read_text()[after_bytes:])):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found


async def stock_tale(session: aiohttp.ClientSession, folder: Path) -> str:
    with llama_server(folder, "key") as (url, check):
        await ready(session, url, check)
        async with session.post(url + COMPLETIONS, json=TALE, headers={"Authorization": "Bearer key"}) as response:
            return str((await response.json())["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("swarm")
    servers = await asyncio.to_thread(Servers, 1, folder)
    try:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tale = await stock_tale(session, folder)
            with servers.holding(demo_model()) as held:
                # Small batches: what one of them takes comes on top of the second until llama-server is free to stop.
                options = EngineOptions(context=16384, parallel=2, ubatch=64)
                log_path = folder / "router.log"
                async with (
                    router_engine(str(held.index.paths[0]), held.table, options, log_path=log_path) as engine,
                    node(Here(engine.url, engine.api_key, 2)) as one,
                    node(There("alpha", one.url)) as two,
                ):
                    yield Rig(session, engine, one, two, log_path, tale)
                    assert not engine.failures
    finally:
        await asyncio.to_thread(servers.close)


@pytest.mark.parametrize(("phase", "through"), [("prompt, stream", "one"), ("no stream", "two")])
async def test_generation_beside_another_stream_ends_when_the_client_leaves(rig: Rig, phase: str, through: str) -> None:
    rig.note_holds()
    other = asyncio.create_task(rig.ask("one", TALE | {"stream": True}))
    await rig.until_busy(1)
    leaver = asyncio.create_task(rig.ask(through, NOVEL if phase == "prompt, stream" else STORY))
    await rig.until_busy(2)
    written_bytes = rig.log_path.stat().st_size
    leaver.cancel()
    left_s = time.monotonic()
    await rig.logged("cancel task", written_bytes)
    noticed_s = time.monotonic() - left_s
    stopped = await rig.logged(r"stop processing: n_tokens = (\d+)", written_bytes)
    print(f"{phase}: noticed after {noticed_s:.2f} s, ended after {time.monotonic() - left_s:.2f} s")
    assert rig.held_ms == [1100] and not other.done()
    assert int(stopped[1]) < 3000, "half of what there was to read, and before anything was to write"
    events = [line for line in (await other).splitlines() if line.startswith(b"data: {")]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == rig.tale
    await rig.until_busy(0)
