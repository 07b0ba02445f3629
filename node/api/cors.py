"""CORS: pages of the origins in [api] allowed_origins may call this node from a browser, and read its answers.

A browser lets a page send JSON to another origin, and read the answer, only if that origin's server says so: first in
answer to an OPTIONS request of its own (the preflight), then in the answer itself. Never said to anyone: ``*``, which
is every page of the internet, and that credentials which the browser keeps for this node may be used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import hdrs, web

from node import request_id
from node.access import origin_listed
from node.peers.http import PEER_PREFIX

_METHODS = "GET, POST"
#: What the clients of both APIs send from a browser.
_HEADERS = (
    *("Authorization", "Content-Type", "x-api-key", "Idempotency-Key", "User-Agent"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    *("OpenAI-Organization", "OpenAI-Project", "OpenAI-Beta"),
)
# They also name themselves and their system, in headers whose number grows from release to release.
_MORE_HEADERS = re.compile(r"x-stainless-[a-z0-9-]{1,40}")
_MORE_HEADERS_MAX = 32
# Browsers ask again after 2 hours at most; a setting that was taken back should not live on for as long as that.
_MAX_AGE_S = 600


class Cors:
    """Adds the headers to whatever a web application answers. The routes between nodes are for no page."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allowed_origins = tuple(allowed_origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight request from an allowed origin, which carries no API key; None for all others."""
        if request.method != hdrs.METH_OPTIONS or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        if self._reader(request) is None:
            return None
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "").lower().split(",")
        more = [name.strip() for name in asked if _MORE_HEADERS.fullmatch(name.strip())][:_MORE_HEADERS_MAX]
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: ", ".join([*_HEADERS, *more]),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
            },
        )

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """A hook of ``Application.on_response_prepare``, so that streamed answers and errors get them as well."""
        if not self._allowed_origins or request.path.startswith(PEER_PREFIX):
            return
        # Also where there is no Origin: a cache must not give that answer to a page, nor a page's to another.
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        reader = self._reader(request)
        if reader is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = reader
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = f"{hdrs.RETRY_AFTER}, {request_id.HEADER}"

    def _reader(self, request: web.Request) -> str | None:
        """The origin that may read the answer, as its browser wrote it."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not origin.isascii() or request.path.startswith(PEER_PREFIX):
            return None
        return origin if origin_listed(origin, self._allowed_origins) else None
