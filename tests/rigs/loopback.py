"""A swarm of whole nodes on loopback, each with its processes: for clients that ask over real agents. Needs no root."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from node.swarm_key import SwarmKey, nonce_of, prove

NODE_COMMAND = str(Path(sys.executable).with_name("swarm-node"))
# What they find each other with is written in some tenths of a second; an engine starts in some seconds.
_LINE_WITHIN_S = 30.0
_READY_WITHIN_S = 60.0
_QUIET_S = 1.0


class LocalNode:
    """A node: its agent's process and where that listens. ``url``: of the agent;
    ``expert_url``: of its expert server."""

    def __init__(self, name: str, process: Process, log_path: Path) -> None:
        self.name = name
        self.process = process
        self.url = ""
        self.expert_url = ""
        self._log_path = log_path

    @property
    def runs(self) -> bool:
        return self.process.returncode is None

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """The processes of the node besides its agent."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    async def line(self, pattern: str) -> str:
        """The first group of ``pattern`` in the log, once it is there."""
        async with asyncio.timeout(_LINE_WITHIN_S):
            while (found := re.search(pattern, self.log())) is None:
                assert self.runs, self.log()
                await asyncio.sleep(0.05)
        return found[1]


class LocalSwarm:
    """Made by :func:`local_swarm`. ``nodes`` by name: those that were started last under it."""

    def __init__(
        self, folder: Path, model: Path, environment: Mapping[str, str], session: aiohttp.ClientSession
    ) -> None:
        self._folder = folder
        self._model = model
        self._session = session
        self._n_started = 0
        self._key = SwarmKey.generate()
        self._environment = {
            **os.environ,
            "SWARM_NODE_HOST": "loopback",
            "SWARM_NODE_PORT": "0",
            # Other swarms on this machine are others, and nodes prove to each other what they are.
            "SWARM_SWARM_NAME": f"test-{os.getpid()}",
            "SWARM_SWARM_KEY": self._key.text(),
            "SWARM_EXPERTS_MEMORY_MIB": "500",
            "SWARM_EXPERTS_THREADS": "1",
            "COLUMNS": "200",  # so that the greeting, with the URL, is one line
            **environment,
        }
        self.nodes: dict[str, LocalNode] = {}

    def __getitem__(self, name: str) -> LocalNode:
        return self.nodes[name]

    @property
    def key(self) -> str:
        """The swarm's key."""
        return self._key.text()

    def environment(self, name: str) -> dict[str, str]:
        """What a command on a node's machine has, besides the flags that name the node."""
        state_folder = str(self._folder / f"{name}-state")
        return self._environment | {"SWARM_NODE_NAME": name, "SWARM_NODE_STATE_FOLDER": state_folder}

    async def start(self, name: str, *, routes: bool = False) -> None:
        """Starts a node. Only one that ``routes`` is told what to serve; the others find the model where they run."""
        self._n_started += 1
        log_path = self._folder / f"{name}-{self._n_started}.log"
        arguments = ["--model", str(self._model)] if routes else []
        for known in self.nodes.values():
            if known.runs:
                arguments += ["--seed", known.url.removeprefix("http://")]
        with log_path.open("wb") as log_file:
            process = await create_subprocess_exec(
                NODE_COMMAND,
                *arguments,
                cwd=self._model.parent,
                env=self.environment(name),
                stdin=DEVNULL,
                stdout=log_file,
                stderr=log_file,
            )
        node = LocalNode(name, process, log_path)
        self.nodes[name] = node
        node.url = await node.line(r" answers at (http://127\.0\.0\.1:[0-9]+)/v1")
        node.expert_url = "http://" + await node.line(r"expert server listens on (127\.0\.0\.1:[0-9]+)")

    async def status(self, name: str) -> dict[str, Any]:
        """A node's status document."""
        async with self._session.get(f"{self[name].url}/status") as response:
            return dict(await response.json())

    async def whole(self) -> None:
        """Waits until every node sees all of them alive, each with its planned experts, and the router ready."""
        deadline_s = time.monotonic() + _READY_WITHIN_S
        for name in self.nodes:
            while not _is_whole(status := await self.status(name), len(self.nodes)):
                assert time.monotonic() < deadline_s, (status, self[name].log()[-3000:])
                await asyncio.sleep(0.1)

    async def expert_calls(self) -> int:
        """Calls that the expert servers which run have answered."""
        return sum([(await self._statistics(node))["calls"] for node in self.nodes.values() if node.runs])

    async def computed_tokens(self) -> float:
        """Tokens whose experts were computed, a little too few where it is a prompt's. For
        models that use all experts."""
        pairs = sum([(await self._statistics(node))["pairs"] for node in self.nodes.values() if node.runs])
        model = (await self.status(next(iter(self.nodes))))["model"]
        return float(pairs / (model["layers"] * model["experts"]))

    async def _statistics(self, node: LocalNode) -> dict[str, Any]:
        url = f"{node.expert_url}/v1/stats"
        async with self._session.get(url) as refusal:
            nonce = nonce_of(refusal.headers.get("WWW-Authenticate"))
        assert refusal.status == 401 and nonce is not None
        host = node.expert_url.removeprefix("http://")
        proof = prove(self._key.derive("call"), method="GET", target="/v1/stats", host=host, nonce=nonce)
        async with self._session.get(url, headers={"Authorization": proof.header}) as response:
            return dict(await response.json())

    async def called(self, n_calls: int, above: int) -> None:
        """Waits until experts were called ``n_calls`` times more than ``above``."""
        async with asyncio.timeout(30):
            while await self.expert_calls() < above + n_calls:  # noqa: ASYNC110 (counted, not announced)
                await asyncio.sleep(0.05)

    async def quiet(self, within_s: float) -> None:
        """Waits until no expert was called for a second; the last call must not come
        later than ``within_s`` from now."""
        started_s = last_s = time.monotonic()
        calls = await self.expert_calls()
        while time.monotonic() - last_s < _QUIET_S:
            await asyncio.sleep(0.1)
            if (now := await self.expert_calls()) != calls:
                calls, last_s = now, time.monotonic()
                assert last_s - started_s < within_s, f"experts are still called after {last_s - started_s:.1f} s"
        print(f"last expert call after {last_s - started_s:.2f} s")

    async def close(self) -> None:
        """Ends all nodes."""
        running = [node for node in self.nodes.values() if node.runs]
        for node in running:
            node.process.send_signal(signal.SIGTERM)
        for node in running:
            try:
                await asyncio.wait_for(node.process.wait(), 8)
            except TimeoutError:
                node.process.kill()
                await node.process.wait()


def _is_whole(status: Mapping[str, Any], n_nodes: int) -> bool:
    nodes = [node for node in status["nodes"] if node["alive"]]
    return bool(
        status["ready"]
        and not status["not_ready"]
        and len(nodes) == n_nodes
        and all(node["planned"] and node["ready"] for node in nodes)
    )


@asynccontextmanager
async def local_swarm(folder: Path, model: Path, environment: Mapping[str, str]) -> AsyncIterator[LocalSwarm]:
    """A swarm without nodes yet, for ``model``, with settings for all of them; ends those that it has on leaving."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        swarm = LocalSwarm(folder, model, environment, session)
        try:
            yield swarm
        finally:
            await swarm.close()
