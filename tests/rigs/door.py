"""Nodes that have nothing but a front door, for tests of what passes through it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from node.api.front_door import Door, DoorOptions, Guard, Here, PeerProof, ServedModel, There, Unavailable, add_routes

MODEL = ServedModel("demo", aliases=("demo-moe", "default"), created_s=1_700_000_000)


@dataclass
class Agent:
    """What a door asks: the agent of a node, with answers that the test sets."""

    target: Here | There | Unavailable
    served: Sequence[ServedModel] = (MODEL,)
    told: list[tuple[str, str, int]] = field(default_factory=list)
    check_reply: Callable[[int, str | None], None] | None = None

    def router(self) -> Here | There | Unavailable:
        return self.target

    def models(self) -> Sequence[ServedModel]:
        return self.served

    async def peer_proof(self, peer: There, path: str, body: bytes) -> PeerProof:
        self.told.append((peer.name, path, len(body)))
        return PeerProof({"X-Swarm-Proof": "proof"}, self.check_reply)


class Node:
    """A node with a front door: its agent, its door, and where it listens."""

    def __init__(self, url: str, agent: Agent, door: Door, seen: list[web.Request]) -> None:
        self.url = url
        self.agent = agent
        self.door = door
        self.seen = seen


@asynccontextmanager
async def node(
    target: Here | There | Unavailable,
    options: DoorOptions | None = None,
    *,
    guard: Guard | None = None,
    handler_cancellation: bool = True,
    host: str = "127.0.0.1",
) -> AsyncIterator[Node]:
    seen: list[web.Request] = []

    @web.middleware
    async def see(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        seen.append(request)
        return await handler(request)

    agent = Agent(target)
    door = Door(agent, options, guard)
    app = web.Application(middlewares=[see])
    add_routes(app, door)
    async with serve(app, handler_cancellation=handler_cancellation, host=host) as url:
        yield Node(url, agent, door, seen)


@asynccontextmanager
async def serve(
    app: web.Application, *, handler_cancellation: bool = True, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Serves ``app`` on a free port; its URL."""
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, shutdown_timeout=0.05, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
