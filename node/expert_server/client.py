"""Expert calls to a node's expert port, as a router makes them, for tools that want to see what it answers."""

from __future__ import annotations

import hashlib

import aiohttp
from aiohttp import hdrs

from node.errors import NotAuthenticated, SwarmError
from node.expert_server import wire
from node.swarm_key import Proof, nonce_of, prove

_PATH = "/v1/ffn"
# 512 rows of the widest model, for each of eight experts a row.
_REPLY_BYTES_MAX = 512 * 8 * 16384 * 4 + 4096


class ExpertClient:
    """Calls one expert server. ``call_key``: the swarm's key for calls, None in a swarm without a key."""

    def __init__(self, session: aiohttp.ClientSession, name: str, host: str, port: int, call_key: bytes | None) -> None:
        self.name = name
        self._session = session
        self._host = f"[{host}]" if ":" in host else host
        self._url = f"http://{self._host}:{port}"
        self._netloc = f"{self._host}:{port}"
        self._key = call_key

    async def call(self, request: wire.CallRequest, n_out: int) -> wire.CallReply:
        """The answer to one call. Raises SwarmError: CallRefused when the server refuses, NotAuthenticated, or what
        went wrong on the way."""
        body = wire.encode_request(request)
        try:
            proof = await self._prove(body)
            headers = {hdrs.CONTENT_TYPE: wire.CONTENT_TYPE} | ({hdrs.AUTHORIZATION: proof.header} if proof else {})
            async with self._session.post(self._url + _PATH, data=body, headers=headers) as response:
                answer = await self._read(response)
            if response.status == 401:
                raise NotAuthenticated(
                    f"it refuses this swarm key: {answer[:200].decode(errors='replace')}", node=self.name
                )
            if proof is not None:
                digest = hashlib.sha256(answer).hexdigest()
                proof.check_reply(response.headers.get("Authentication-Info"), response.status, digest)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise SwarmError(f"{self._url} does not answer: {error or type(error).__name__}", node=self.name) from error
        n_rows = len(request.row) if request.reduce == "rows" else request.n_rows
        reply = wire.decode_reply(answer, call_id=request.id, n_rows=n_rows, n_out=n_out, dtype=request.dtype)
        if isinstance(reply, wire.CallError):
            raise reply.to_exception(self.name)
        return reply

    async def _prove(self, body: bytes) -> Proof | None:
        if self._key is None:
            return None
        # Any guarded path gives a nonce with its refusal; this one has no body to send twice.
        async with self._session.get(f"{self._url}/v1/stats") as response:
            nonce = nonce_of(response.headers.get(hdrs.WWW_AUTHENTICATE))
        if nonce is None:
            raise NotAuthenticated(
                "it asks for no proof of the swarm key: it has none, and this machine has one", node=self.name
            )
        digest = hashlib.sha256(body).hexdigest()
        return prove(self._key, method="POST", target=_PATH, host=self._netloc, nonce=nonce, body_sha256=digest)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _REPLY_BYTES_MAX:
                raise SwarmError(f"it answers with more than {_REPLY_BYTES_MAX} bytes", node=self.name)
        return bytes(body)
