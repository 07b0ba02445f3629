"""``GET /trace`` of an agent: the router's trace, asked of its engine here, or of the router's agent."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from node.errors import SwarmError
from node.peers.http import read_body

if TYPE_CHECKING:
    from node.agent.agent import Agent

PEER_PATH = "/swarm/v1/trace"


def trace_routes(agent: Agent) -> list[web.RouteDef]:
    """``GET /trace`` (JSON) for everybody who may see ``/status``, and the same for peers, who ask this node only."""

    async def trace(request: web.Request) -> web.Response:
        found = agent.routing_node()
        if found is None:
            return _unavailable("no_router", "no node of the swarm serves a model yet; start one with --model FILE")
        record, url = found
        if not url:
            return await _own(agent)
        try:
            status, body = await agent.post(url, PEER_PATH, b"{}")
        except (aiohttp.ClientError, OSError, TimeoutError, SwarmError) as error:
            text = str(error) or type(error).__name__
            return _unavailable("router_unreachable", f"the router, node {record.name}, does not answer: {text}")
        if status not in (200, 503):
            old = ": it runs an older swarm-node" if status == 404 else ""
            return _unavailable("router_refused", f"the router, node {record.name}, answers with status {status}{old}")
        return web.Response(status=status, body=body, content_type="application/json")

    async def trace_for_peer(request: web.Request) -> web.Response:
        await read_body(request, 64)
        if agent.role is None:
            return _unavailable("not_router", f"node {agent.config.node.name} is not the router")
        return await _own(agent)

    return [web.get("/trace", trace), web.post(PEER_PATH, trace_for_peer)]


async def _own(agent: Agent) -> web.Response:
    engine = agent.role.engine if agent.role is not None else None
    found = agent.routing_node()
    if engine is None:
        router = found[0].router if found is not None else None
        waits_for = agent.waits_for(router) if router is not None else "the router engine is starting"
        return _unavailable("model_loading", f"the router's engine does not run: {waits_for}")
    door = agent.door
    # Before the counters: a request that comes meanwhile is rather one too many than unsaid.
    requests = {"relayed": door.statistics.relayed, "running": max(0, door.open - door.waiting)}
    try:
        counters = await engine.trace()
    except SwarmError as error:
        return _unavailable("no_trace", str(error))
    document = {"router": agent.config.node.name, "requests": requests, "trace": counters}
    # That of a large swarm has megabytes.
    body = await asyncio.to_thread(lambda: json.dumps(document).encode())
    return web.Response(body=body, content_type="application/json")


def _unavailable(code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "unavailable", "code": code}}, status=503)
