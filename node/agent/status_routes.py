"""What an agent tells of its swarm over HTTP: ``GET /status`` and ``/peers`` (JSON), ``/metrics`` (Prometheus text)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from node.agent.measured import Measured
from node.agent.metrics_page import metrics_text
from node.agent.status import status_of
from node.agent.view import View
from node.metrics import CONTENT_TYPE


def status_routes(
    look: Callable[[], View], measure: Callable[[], Measured], peers: Callable[[], dict[str, Any]]
) -> list[web.RouteDef]:
    """The routes; ``peers`` gives the document of `node.peers.document`."""

    async def status(request: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(status_of(look(), measure())))

    async def peers_found(request: web.Request) -> web.Response:
        return web.json_response(peers())

    async def metrics(request: web.Request) -> web.Response:
        measured = measure()
        page = metrics_text(status_of(look(), measured), measured)
        return web.Response(body=page.encode(), headers={"Content-Type": CONTENT_TYPE})

    return [web.get("/status", status), web.get("/metrics", metrics), web.get("/peers", peers_found)]
