"""One agent of which nothing runs but its HTTP server; the router's llama-server is one that the test writes."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from node.agent.agent import Agent
from node.api.front_door import Here, There, Unavailable
from node.peers.identity import hold_identity
from node.settings.load import Config, load_config
from rigs.fake_llama_server import FakeLlamaServer, fake_llama_server


class LoneAgent(Agent):
    """Asks ``target`` what clients ask it."""

    target: Here | There | Unavailable = Unavailable("no_router", "nobody")

    def router(self) -> Here | There | Unavailable:
        return self.target


def config(folder: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Settings of a node on loopback, at any free port, and nothing from the machine's own files."""
    own = {
        "SWARM_NODE_NAME": "here",
        "SWARM_NODE_HOST": "loopback",
        "SWARM_NODE_PORT": "0",
        "SWARM_NODE_STATE_FOLDER": str(folder / "state"),
        "SWARM_EXPERTS_DEVICE": "CPU",
        "SWARM_CONFIG": str(_empty(folder)),
    }
    return load_config(argparse.Namespace(), {**own, **(environment or {})})


def _empty(folder: Path) -> Path:
    path = folder / "empty.toml"
    path.touch()
    return path


@asynccontextmanager
async def lone_agent(
    folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[LoneAgent, FakeLlamaServer]]:
    """An agent that listens on ``127.0.0.1`` at its ``port``, and is the router of the llama-server."""
    settings = config(folder, environment)
    async with fake_llama_server() as llama:
        with hold_identity(settings.node.name, Path(settings.node.state_folder)) as identity:
            agent = LoneAgent(settings, identity)
            agent.target = Here(llama.url, llama.api_key, 4)
            async with agent._http_server():
                yield agent, llama
