"""Who may send expert calls: whoever proves the swarm's key, or, in a swarm without one, private addresses."""

from __future__ import annotations

import os
import time

from aiohttp import hdrs, web

from node import environment
from node.access import host_allowed, is_private
from node.errors import NotAuthenticated
from node.swarm_key import Accepted, Challenges


class CallGuard:
    """Checks requests for the routes of an expert server. ``call_key``: 32 bytes, or empty."""

    def __init__(self, call_key: bytes) -> None:
        self._challenges = Challenges(call_key) if call_key else None

    @staticmethod
    def from_environment() -> CallGuard:
        """With the key that the parent gave; ValueError when it is none."""
        key = bytes.fromhex(os.environ.get(environment.CALL_KEY, ""))
        if len(key) not in (0, 32):
            raise ValueError(f"{environment.CALL_KEY} must be 64 hexadecimal digits")
        return CallGuard(key)

    def check(self, request: web.BaseRequest) -> Accepted | web.Response | None:
        """The proof of an accepted request, None where none is needed, or the refusal to answer with."""
        if not is_private(request.remote or ""):
            return web.Response(status=403, text="only private and link-local addresses may call experts\n")
        if self._challenges is None:
            return None
        try:
            accepted = self._challenges.check(
                request.headers.get(hdrs.AUTHORIZATION),
                method=request.method,
                target=request.raw_path,
                host=_own_host(request),
                now_s=time.monotonic(),
            )
        except NotAuthenticated as error:
            challenge = self._challenges.challenge(time.monotonic(), error)
            return web.Response(status=401, text=f"{error.message}\n", headers={hdrs.WWW_AUTHENTICATE: challenge})
        return accepted


def _own_host(request: web.BaseRequest) -> str:
    """The Host header, when it names the address that the connection came to. Raises NotAuthenticated."""
    host = request.headers.get(hdrs.HOST, "")
    name = request.transport.get_extra_info("sockname") if request.transport is not None else None
    # A proof names the host it was made for; accepted for another one, it could be passed on.
    if name is None or not host_allowed(host, own_addresses=[str(name[0])]):
        raise NotAuthenticated("the Host header is not this node's address")
    return host
