"""The agent's HTTP server: where it listens, and which requests are refused whatever they ask for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohttp import web

from node.access import host_allowed, is_json, is_private, origin_allowed
from node.api.cors import Cors
from node.api.front_door import DoorOptions
from node.errors import SwarmError
from node.peers.http import PEER_PREFIX, PeerGuard
from node.peers.peering import CONTENT_TYPE, GOSSIP_PATH
from node.settings.load import Config

log = logging.getLogger(__name__)


class HttpServer:
    """``own_addresses``: those of this node, by which requests may name it; asked with each request.

    ``port``: where it answers, as configured until ``listening`` is set.
    """

    def __init__(self, config: Config, guard: PeerGuard, own_addresses: Callable[[], Sequence[str]]) -> None:
        self._config = config
        self._guard = guard
        self._own_addresses = own_addresses
        self._cors = Cors(config.api.allowed_origins)
        self.port = config.node.port
        self.listening = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listen(self, add_routes: Callable[[web.Application], None]) -> AsyncIterator[None]:
        """Answers as long as the context lasts. Raises SwarmError."""
        app = web.Application(middlewares=[self._check], client_max_size=DoorOptions().body_bytes_max)
        app.add_routes([*self._guard.routes(), web.get("/health", _health)])
        add_routes(app)
        app.on_response_prepare.append(self._guard.sign_streamed)
        app.on_response_prepare.append(self._cors.add_headers)
        # A client that goes away must stop the generation: aiohttp cancels handlers only when asked to.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        hosts = self._config.node.listen_hosts
        # None: every interface, by those of IPv4 and IPv6 that the machine has.
        site = web.TCPSite(runner, None if len(hosts) > 1 else hosts[0], self._config.node.port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise SwarmError(
                f"port {self._config.node.port} cannot be used: {error.strerror or error}. "
                f"Another node on this machine? Give this one --port and --name"
            ) from error
        log.debug("this node answers at %s", runner.addresses)
        try:
            self.port = int(runner.addresses[0][1])
            self.listening.set()
            yield
        finally:
            await runner.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        problem = self._refusal(request)
        if problem is not None:
            status, message = problem
            body = {"error": {"message": message, "type": "request_refused", "code": None}}
            return web.json_response(body, status=status)
        preflight = self._cors.preflight(request)
        if preflight is not None:
            return preflight
        if request.path.startswith(PEER_PREFIX):
            return await self._guard.check(request, handler)
        response: web.StreamResponse = await handler(request)
        return response

    def _refusal(self, request: web.Request) -> tuple[int, str] | None:
        """Status and reason for a request that no route may answer: one of a page that this node does not know, or
        one that names the node as something that it is not (docs/security.md)."""
        remote = request.remote or ""
        if not self._guard.has_key and not is_private(remote):
            return 403, "this swarm has no key, so it is open to private and link-local addresses only"
        host = request.headers.get("Host")
        name = request.transport.get_extra_info("sockname") if request.transport is not None else None
        own = [*self._own_addresses(), *([str(name[0])] if name else [])]
        names = [self._config.node.name, f"{self._config.node.name}.local"]
        if not host_allowed(host, own_names=names, own_addresses=own, allowed_hosts=self._config.api.allowed_hosts):
            return 403, f"the Host header {host!r} is no name of this node; [api] allowed_hosts can add it"
        origin = request.headers.get("Origin")
        if not origin_allowed(origin, host=host, allowed_origins=self._config.api.allowed_origins):
            return 403, f"requests from pages of {origin} are not allowed; [api] allowed_origins can allow them"
        content_type = request.headers.get("Content-Type")
        # Neither is what a page can send without asking first.
        if request.method == "POST" and not is_json(content_type):
            if request.path != GOSSIP_PATH:
                return 415, "the content type must be application/json"
            if content_type != CONTENT_TYPE:
                return 415, f"the content type must be {CONTENT_TYPE}"
        return None


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})
