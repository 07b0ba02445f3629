"""Heartbeats between agents: each second this node's record goes to every peer, whose record comes back.

Route: ``POST /swarm/v1/heartbeat``, JSON both ways; ``POST /swarm/v1/goodbye`` ends it on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from node.errors import NotAuthenticated, SwarmError
from node.membership import Membership
from node.peer_http import read_body
from node.records import RECORD_BYTES_MAX, Record, RecordError, decode, encode

log = logging.getLogger(__name__)

PERIOD_S = 1.0
TIMEOUT_S = 2.0
# An announced address that does not answer is tried less often, as long as it is only announced.
CANDIDATE_PERIOD_MAX_S = 10.0

# Sends a body to a URL's path, authenticated as the swarm's nodes do; the answer's status and body.
Post = Callable[[str, str, bytes], Awaitable[tuple[int, bytes]]]


class Heartbeats:
    """Sends and receives heartbeats. ``record`` gives this node's own; ``on_news`` is called when a peer's changed."""

    def __init__(
        self, membership: Membership, record: Callable[[], Record], post: Post, on_news: Callable[[], None]
    ) -> None:
        self._membership = membership
        self._record = record
        self._post = post
        self._on_news = on_news
        self._next_try_s: dict[str, tuple[float, float]] = {}  # url → (not before, period)
        self._refusals: dict[str, str] = {}  # said once each; as many as there are candidates
        self.round = asyncio.Event()
        self._leaving = False

    def routes(self) -> list[web.RouteDef]:
        """The agent's routes for peers."""
        return [web.post("/swarm/v1/heartbeat", self._receive), web.post("/swarm/v1/goodbye", self._receive_goodbye)]

    async def run(self) -> None:
        """Sends heartbeats until cancelled, then says goodbye."""
        try:
            while True:
                started_s = time.monotonic()
                # What changes from here on starts another round at once.
                self.round.clear()
                await asyncio.gather(*(self._beat(url) for url in self._due(started_s)))
                for peer in self._membership.forget(time.monotonic()):
                    log.warning("%s has been away for too long and is forgotten", peer.record.name)
                    self._on_news()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.05, started_s + PERIOD_S - time.monotonic())):
                        await self.round.wait()
        finally:
            self._leaving = True
            await asyncio.shield(self._goodbye())

    def _due(self, now_s: float) -> list[str]:
        return [url for url in self._membership.targets() if self._next_try_s.get(url, (0.0, 0.0))[0] <= now_s]

    async def _beat(self, url: str) -> None:
        record = self._record()
        try:
            status, body = await self._post(url, "/swarm/v1/heartbeat", encode(record))
            if status != 200:
                raise RecordError(f"status {status}: {body[:200].decode(errors='replace')}")
            answer = decode(body)
        except (aiohttp.ClientError, OSError, TimeoutError, SwarmError) as error:
            if isinstance(error, NotAuthenticated) and self._refusals.get(url) != str(error):
                self._refusals[url] = str(error)
                log.warning("%s is not of this swarm: %s", url, error)
            _, period_s = self._next_try_s.get(url, (0.0, PERIOD_S / 2))
            period_s = min(2 * period_s, CANDIDATE_PERIOD_MAX_S) if self._membership.unreachable(url) else PERIOD_S
            self._next_try_s[url] = (time.monotonic() + period_s, period_s)
            log.debug("heartbeat to %s: %s: %s", url, type(error).__name__, error)
            return
        self._next_try_s.pop(url, None)
        self._take(answer, url)

    def _take(self, record: Record, url: str) -> None:
        if self._membership.heard(record, url, time.monotonic()):
            self._on_news()

    async def _receive(self, request: web.Request) -> web.Response:
        if self._leaving:
            return web.json_response({"error": "this node is leaving"}, status=503)
        try:
            record = decode(await read_body(request, RECORD_BYTES_MAX))
        except RecordError as error:
            return web.json_response({"error": str(error)}, status=400)
        # The address it called from, with the port it says it listens on: reachable, as far as anyone can know.
        url = _url(request.remote or "", record.port)
        known = self._membership.known().get(record.node)
        if record.node != self._record().node:
            self._membership.announce(url, "it called")
            self._take(record, known.url if known is not None else url)
        return web.Response(body=encode(self._record()), content_type="application/json")

    async def _receive_goodbye(self, request: web.Request) -> web.Response:
        try:
            record = decode(await read_body(request, RECORD_BYTES_MAX))
        except RecordError as error:
            return web.json_response({"error": str(error)}, status=400)
        if self._membership.said_goodbye(record.node, record.boot):
            log.info("%s said goodbye", record.name)
            self._on_news()
        return web.Response()

    async def _goodbye(self) -> None:
        body = encode(self._record())
        alive = self._membership.alive(time.monotonic()).values()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.gather(
                    *(self._post(peer.url, "/swarm/v1/goodbye", body) for peer in alive), return_exceptions=True
                )


def _url(address: str, port: int) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return f"http://{address}:{port}"
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return f"http://[{parsed}]:{port}" if parsed.version == 6 else f"http://{parsed}:{port}"
