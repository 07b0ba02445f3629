"""Nodes without processes, sockets to others or a native build: made-up machines, records and views, and one agent."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from node.agent.agent import Agent, Told
from node.agent.machine import Machine
from node.agent.own_record import Node, Own, own_record
from node.agent.view import View
from node.api.swarm import Here, There, Unavailable
from node.models.local import LocalModels
from node.peers.identity import hold_identity
from node.peers.membership import Peer
from node.records import Device, Model, Record
from node.settings.load import Config, load_config
from rigs.fake_llama_server import FakeLlamaServer, fake_llama_server

#: A machine that holds no experts and cannot route.
MACHINE = Machine(
    build="0123456789abcdef",
    platform="Linux x86_64",
    devices=(Device("CPU", "cpu", "a made-up processor", 8 << 30),),
    memory_bytes=0,
    can_route=False,
)
#: This node, in the middle of all ids.
NODE = Node(swarm="default", node_id="8" * 16, boot=1, name="here", machine=MACHINE)
MODEL = Model("1" * 32, "model.gguf", "qwen3moe", 4, 8, 10, 20)


def record(node_id: str, **fields: Any) -> Record:
    """What the node ``node_id`` (one hex digit is repeated) says of itself; ``fields`` as in `Record`."""
    node = replace(NODE, node_id=node_id * (16 // len(node_id)), name=f"node-{node_id}")
    return msgspec.structs.replace(own_record(node, Own(4100), can_route=False), **fields)


def peer(node_id: str, *, alive: bool = True, silent_s: float = 0.2, **fields: Any) -> Peer:
    """Another node, whose agent is at 10.0.0.N, N being the first digit of its id."""
    return Peer(record(node_id, **fields), f"http://10.0.0.{int(node_id[0], 16)}:4100", alive, silent_s)


def view_of(own: Own | None = None, *peers: Peer, node: Node = NODE, age_s: float = 3600.0) -> View:
    """What a node sees that has been running for long."""
    return View(node, own or Own(4100), {one.record.node: one for one in peers}, age_s)


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


@dataclass(frozen=True)
class _AimedView(View):
    """Has ``aim`` say where queries go."""

    aim: Callable[[], Here | There | Unavailable] = lambda: Unavailable("no_router", "nobody")

    def router(self) -> Here | There | Unavailable:
        return self.aim()


class LoneAgent(Agent):
    """An agent of which nothing runs but its HTTP server: queries go to ``target``, and ``peers`` are the others."""

    target: Here | There | Unavailable = Unavailable("no_router", "nobody")
    peers: Mapping[str, Peer] = {}

    def router(self) -> Here | There | Unavailable:
        return self.target

    def view(self) -> View:
        seen = super().view()
        return _AimedView(seen.node, seen.own, self.peers, seen.age_s, lambda: self.router())


@asynccontextmanager
async def lone_agent(
    folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[LoneAgent, FakeLlamaServer]]:
    """An agent that listens on ``127.0.0.1`` at its server's ``port``, and is the router of the llama-server."""
    settings = config(folder, environment)
    async with fake_llama_server() as llama, aiohttp.ClientSession() as session:
        with hold_identity(Path(settings.node.state_folder), settings.node.name) as identity:
            agent = LoneAgent(
                *(settings, identity, MACHINE, Told(), LocalModels(""), session, folder), started_s=time.monotonic()
            )
            agent.target = Here(llama.url, llama.api_key, 4)
            async with agent.listen():
                yield agent, llama
