"""HTTP between agents, with a proof of the swarm key on every request and reply when the swarm has one.

The proof itself is in swarm_key.py; what is protected, in docs/security.md. Every route below ``/swarm/`` is for peers.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs, web

from node.access import is_private
from node.errors import NotAuthenticated, SwarmError
from node.swarm_key import EMPTY_SHA256, STREAMED, Accepted, Challenges, Proof, SwarmKey, is_stale, nonce_of, prove

PEER_PREFIX = "/swarm/"
NONCE_PATH = "/swarm/v1/nonce"
# Queries for the router's llama-server: answers are passed on while they come.
RELAY_PREFIX = "/swarm/v1/relay"

# The layer programs of a model of 1,000 layers are some 2 MB.
_REPLY_BYTES_MAX = 16 << 20
# Spare nonces kept of each peer; they last half a minute, and in a small swarm gossip asks each peer about as often.
_NONCES_MAX = 4
_PEERS_MAX = 256
# How much of a streamed reply is read ahead: what a gigabit line brings within some milliseconds.
_STREAM_BUFFER_BYTES = 1 << 20


class PeerClient:
    """Asks other agents. ``key`` None: a swarm without a key, whose requests carry no proof."""

    def __init__(self, session: aiohttp.ClientSession, key: SwarmKey | None) -> None:
        self._session = session
        self._key = key.derive("control") if key is not None else None
        self._nonces: dict[str, deque[tuple[str, float]]] = {}

    async def post(
        self,
        url: str,
        path: str,
        body: bytes,
        *,
        content_type: str = "application/json",
        limit_bytes: int = _REPLY_BYTES_MAX,
    ) -> tuple[int, bytes]:
        """The reply's status and body. Raises aiohttp.ClientError, TimeoutError, NotAuthenticated, SwarmError."""
        for last_attempt in (False, True):
            proof = await self._prove(url, path, body)
            headers = {hdrs.CONTENT_TYPE: content_type} | ({hdrs.AUTHORIZATION: proof.header} if proof else {})
            async with self._session.post(url + path, data=body, headers=headers) as response:
                answer = await _limited(response, url, limit_bytes)
                self._keep(url, response.headers.get(hdrs.WWW_AUTHENTICATE))
                if response.status == 401:
                    if not last_attempt and is_stale(response.headers.get(hdrs.WWW_AUTHENTICATE)):
                        continue
                    raise NotAuthenticated(f"{url} refuses this node: {answer[:200].decode(errors='replace')}")
                if proof is not None:
                    digest = hashlib.sha256(answer).hexdigest()
                    proof.check_reply(response.headers.get("Authentication-Info"), response.status, digest)
                return response.status, answer
        raise AssertionError("the second attempt returns or raises")

    async def streamed(
        self, url: str, path: str, body: bytes
    ) -> tuple[dict[str, str], Callable[[int, str | None], None] | None]:
        """Headers that prove the key for one POST of ``body`` whose reply is streamed, and the check of that reply."""
        proof = await self._prove(url, path, body)
        if proof is None:
            return {}, None
        return {hdrs.AUTHORIZATION: proof.header}, lambda status, info: proof.check_reply(info, status, STREAMED)

    async def get(self, url: str, path: str, *, limit_bytes: int = _REPLY_BYTES_MAX, stall_s: float = 10.0) -> bytes:
        """The body of a reply of status 200. Raises as ``post`` does, and SwarmError for any other status."""
        async with self._get(url, path, {}, stall_s) as (response, proof):
            answer = await _limited(response, url, limit_bytes)
            if response.status != 200:
                raise SwarmError(f"{url}{path}: status {response.status}: {answer[:200].decode(errors='replace')}")
            if proof is not None:
                digest = hashlib.sha256(answer).hexdigest()
                proof.check_reply(response.headers.get("Authentication-Info"), response.status, digest)
            return answer

    @contextlib.asynccontextmanager
    async def get_streamed(
        self, url: str, path: str, *, stall_s: float, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to a GET while it comes, of whatever status; ``stall_s`` without a byte end it with TimeoutError.

        One of status 200 or 206 has proved the key, but not the bytes of its body. Raises as ``post`` does.
        """
        async with self._get(url, path, headers or {}, stall_s) as (response, proof):
            if proof is not None and response.status in (200, 206):
                proof.check_reply(response.headers.get("Authentication-Info"), response.status, STREAMED)
            yield response

    @contextlib.asynccontextmanager
    async def _get(
        self, url: str, path: str, headers: Mapping[str, str], stall_s: float
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Proof | None]]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=stall_s)
        for last_attempt in (False, True):
            proof = await self._prove(url, path, b"", "GET")
            own = {**headers, hdrs.ACCEPT_ENCODING: "identity"}
            if proof is not None:
                own[hdrs.AUTHORIZATION] = proof.header
            async with self._session.get(
                url + path, headers=own, timeout=timeout, allow_redirects=False, read_bufsize=_STREAM_BUFFER_BYTES
            ) as response:
                challenge = response.headers.get(hdrs.WWW_AUTHENTICATE)
                self._keep(url, challenge)
                if response.status != 401:
                    yield response, proof
                    return
                if last_attempt or not is_stale(challenge):
                    raise NotAuthenticated(f"{url} refuses this node: its proof of the swarm key is not accepted")

    async def _prove(self, url: str, path: str, body: bytes, method: str = "POST") -> Proof | None:
        if self._key is None:
            return None
        nonce = await self._nonce(url)
        return prove(
            self._key,
            method=method,
            target=path,
            host=urlsplit(url).netloc,
            nonce=nonce,
            body_sha256=hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256,
        )

    async def _nonce(self, url: str) -> str:
        kept = self._nonces.get(url)
        while kept:
            nonce, until_s = kept.popleft()
            if time.monotonic() < until_s:
                return nonce
        async with self._session.get(url + NONCE_PATH) as response:
            found = nonce_of(response.headers.get(hdrs.WWW_AUTHENTICATE))
        if found is None:
            raise NotAuthenticated(f"{url} asks for no proof of the swarm key: it has no key, and this node has one")
        return found

    def _keep(self, url: str, challenge: str | None) -> None:
        nonce = nonce_of(challenge)
        if nonce is not None and (url in self._nonces or len(self._nonces) < _PEERS_MAX):
            self._nonces.setdefault(url, deque(maxlen=_NONCES_MAX)).append((nonce, time.monotonic() + 20.0))


async def _limited(response: aiohttp.ClientResponse, url: str, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise SwarmError(f"{url} answers with more than {limit_bytes} bytes")
    return bytes(body)


_CHECK = "swarm_body_check"


class _BodyChecks:
    """Compares a body with the one that was proved, and remembers that somebody did."""

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.done = False

    def __call__(self, body: bytes) -> None:
        self.accepted.check_body(hashlib.sha256(body).hexdigest())
        self.done = True


def check_body(request: web.Request, body: bytes) -> None:
    """To be called with the whole body before anything in it is believed. Raises NotAuthenticated.

    Does nothing for requests that need no proof: those of clients, and all of a swarm without a key.
    """
    checks = request.get(_CHECK)
    if checks is not None:
        checks(body)


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The checked body of a peer's request, cut off after ``limit_bytes`` + 1. Raises NotAuthenticated."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            break
    whole = bytes(body)
    check_body(request, whole)
    return whole


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PeerGuard:
    """Middleware for the routes of peers: a proof of the key where there is one, private addresses where not."""

    def __init__(self, key: SwarmKey | None) -> None:
        self._challenges = Challenges(key.derive("control")) if key is not None else None
        self.refused = 0

    def routes(self) -> list[web.RouteDef]:
        """The route that gives a nonce to whoever wants to prove the key."""
        return [web.get(NONCE_PATH, self._give_nonce)]

    @property
    def has_key(self) -> bool:
        """Whether peers must prove a key."""
        return self._challenges is not None

    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers a request for a peer's route, or refuses it."""
        if self._challenges is None:
            if not is_private(request.remote or ""):
                self.refused += 1
                return _refusal(403, "this swarm has no key, so it is open to private and link-local addresses only")
            return await handler(request)
        if request.path == NONCE_PATH:
            return await handler(request)
        try:
            accepted = self._challenges.check(
                request.headers.get(hdrs.AUTHORIZATION),
                method=request.method,
                target=request.raw_path,
                # That it names this node was checked before (Agent), so that no proof can be passed on.
                host=request.headers.get(hdrs.HOST, ""),
                now_s=time.monotonic(),
            )
            checks = _BodyChecks(accepted)
            request[_CHECK] = checks
            response = await handler(request)
        except NotAuthenticated as error:
            self.refused += 1
            challenge = self._challenges.challenge(time.monotonic(), error)
            return _refusal(401, error.message, {hdrs.WWW_AUTHENTICATE: challenge})
        if not checks.done and accepted.body_sha256 != EMPTY_SHA256 and response.status < 400:
            raise AssertionError(f"{request.path} answered without check_body()")
        if isinstance(response, web.Response) and not response.prepared and not request.path.startswith(RELAY_PREFIX):
            body = response.body if isinstance(response.body, bytes | bytearray) else b""
            response.headers["Authentication-Info"] = accepted.reply_header(
                response.status, hashlib.sha256(body).hexdigest()
            )
            response.headers[hdrs.WWW_AUTHENTICATE] = self._challenges.challenge(time.monotonic())
        return response

    async def sign_streamed(self, request: web.Request, response: web.StreamResponse) -> None:
        """A hook of ``Application.on_response_prepare``: proves the key for replies whose hash nobody knows yet."""
        checks = request.get(_CHECK)
        if checks is not None and "Authentication-Info" not in response.headers:
            response.headers["Authentication-Info"] = checks.accepted.reply_header(response.status, STREAMED)

    async def _give_nonce(self, request: web.Request) -> web.Response:
        headers: dict[str, Any] = {}
        if self._challenges is not None:
            headers[hdrs.WWW_AUTHENTICATE] = self._challenges.challenge(time.monotonic())
        return web.Response(status=204, headers=headers)


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "peer_refused"}}, status=status, headers=headers)
