"""Sources of models on loopback that behave, or do not, and a fetcher that asks them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from node.peers.http import PeerClient, PeerGuard
from node.swarm_key import SwarmKey
from node.transfer.fetcher import ModelFetcher
from node.transfer.schedule import RateLimit
from node.transfer.service import Copy, LocalCopy, ModelService
from node.transfer.stored import StoredModel
from rigs import random_models
from rigs.store_cases import SMALL, new_store, source

#: Answers a request for pieces; None: as a good source does.
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class Node:
    """A source of pieces. ``asked`` holds the requests that it got, with their Range headers."""

    url: str
    service: ModelService
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    fault: Fault | None = None


@asynccontextmanager
async def serving(copy: Copy, key: SwarmKey | None = None, fault: Fault | None = None) -> AsyncIterator[Node]:
    """A node that gives a copy to others."""

    async def find(model_id: str) -> Copy | None:
        return copy if model_id == copy.manifest.model_id else None

    service = ModelService(find)
    node = Node("", service, fault=fault)
    guard = PeerGuard(key)

    @web.middleware
    async def check(request: web.Request, handler) -> web.StreamResponse:
        async def faulty(request: web.Request) -> web.StreamResponse:
            if request.path.endswith("/pieces"):
                node.asked.append((request.query_string, request.headers.get("Range")))
                if node.fault is not None and (answer := await node.fault(request)) is not None:
                    return answer
            return await handler(request)

        return await guard.check(request, faulty)

    app = web.Application(middlewares=[check])
    app.add_routes([*service.routes(), *guard.routes()])
    app.on_response_prepare.append(guard.sign_streamed)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    node.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield node
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fetching(
    *nodes: Node, key: SwarmKey | None = None, limit: RateLimit | None = None
) -> AsyncIterator[ModelFetcher]:
    """A fetcher whose sources are the nodes, called a, b, …"""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        names = {node.url: chr(ord("a") + number) for number, node in enumerate(nodes)}
        yield ModelFetcher(PeerClient(session, key), lambda _: names, limit=limit)


def local_copy(shape: random_models.Shape = SMALL) -> LocalCopy:
    index, manifest, _ = source(shape)
    return LocalCopy(index, manifest)


async def begin(fetcher: ModelFetcher, copy: LocalCopy, folder: Path) -> StoredModel:
    """An empty copy in a store, as a node makes it of what sources say."""
    manifest, layout = await fetcher.describe(copy.manifest.model_id)
    return new_store(folder).create(manifest, layout, "fetched.gguf")
