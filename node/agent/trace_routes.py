"""``GET /trace`` of an agent: the router's trace, asked of its engine here, or of the router's agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from node.agent.known_programs import Post
from node.agent.view import NO_ROUTER, View
from node.errors import SwarmError
from node.peers.http import read_body

PEER_PATH = "/swarm/v1/trace"


class TracedEngine(Protocol):
    """What is asked of the router engine (`node.router.engine.RouterEngine`)."""

    async def trace(self) -> Mapping[str, Any]:
        """Its counters. Raises SwarmError."""


class TraceRoutes:
    """``engine`` gives this node's router engine, while it runs; ``post`` asks another agent.

    ``requests`` gives how many requests this node has passed on so far, and how many of them llama-server works on.
    """

    def __init__(
        self,
        look: Callable[[], View],
        engine: Callable[[], TracedEngine | None],
        requests: Callable[[], tuple[int, int]],
        post: Post,
    ) -> None:
        self._look = look
        self._engine = engine
        self._requests = requests
        self._post = post

    def routes(self) -> list[web.RouteDef]:
        """``GET /trace`` (JSON) for all who may see ``/status``, and the same for peers, who ask this node only."""
        return [web.get("/trace", self._trace), web.post(PEER_PATH, self._trace_for_peer)]

    async def _trace(self, request: web.Request) -> web.Response:
        found = self._look().routing_node()
        if found is None:
            return _unavailable("no_router", NO_ROUTER)
        record, url = found
        if not url:
            return await self._own()
        try:
            status, body = await self._post(url, PEER_PATH, b"{}")
        except (aiohttp.ClientError, OSError, TimeoutError, SwarmError) as error:
            text = str(error) or type(error).__name__
            return _unavailable("router_unreachable", f"the router, node {record.name}, does not answer: {text}")
        if status not in (200, 503):
            old = ": it runs an older swarm-node" if status == 404 else ""
            return _unavailable("router_refused", f"the router, node {record.name}, answers with status {status}{old}")
        return web.Response(status=status, body=body, content_type="application/json")

    async def _trace_for_peer(self, request: web.Request) -> web.Response:
        await read_body(request, 64)
        view = self._look()
        if view.own.router is None:
            return _unavailable("not_router", f"node {view.node.name} is not the router")
        return await self._own()

    async def _own(self) -> web.Response:
        engine, view = self._engine(), self._look()
        if engine is None:
            found = view.routing_node()
            router = found[0].router if found is not None else None
            waits_for = view.waits_for(router) if router is not None else "the router engine is starting"
            return _unavailable("model_loading", f"the router's engine does not run: {waits_for}")
        # Before the counters: a request that comes meanwhile is rather one too many than unsaid.
        relayed, running = self._requests()
        try:
            counters = await engine.trace()
        except SwarmError as error:
            return _unavailable("no_trace", str(error))
        document = {
            "router": view.node.name,
            "requests": {"relayed": relayed, "running": max(0, running)},
            "trace": counters,
        }
        # The trace of a large swarm has megabytes.
        body = await asyncio.to_thread(lambda: json.dumps(document).encode())
        return web.Response(body=body, content_type="application/json")


def _unavailable(code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "unavailable", "code": code}}, status=503)
