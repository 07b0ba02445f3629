"""Bodies of requests: read within limits, and looked into without decoding them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from node.access import is_json
from node.api.errors import ApiError
from node.peers.http import check_body

# From here on a look into a body takes longer than an event loop should be kept: some 5 ms.
_LARGE_BYTES = 256 << 10
_DECODED_BYTES_MAX = 64 << 10

# Strings and structure; everything between them are numbers, literals and blanks.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],:]', re.DOTALL)


class BodyReader:
    """Reads bodies of at most ``limit_bytes`` each, and holds at most ``total_bytes`` at a time."""

    def __init__(self, limit_bytes: int, total_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._total_bytes = total_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request, silence_s: float) -> AsyncIterator[bytes]:
        """The body, which counts as held inside the context. ``silence_s``: how long the client may send nothing.

        Raises ApiError 408, 413, 415 or 503, and ConnectionError when the client goes away.
        """
        if not is_json(request.headers.get("Content-Type")):
            # A page of another origin may send a form or text without asking; JSON only after a preflight request.
            raise ApiError(
                f"The content type must be application/json, not {request.content_type}",
                status=415,
                code="unsupported_content_type",
            )
        if "Content-Encoding" in request.headers:
            raise ApiError(
                "Compressed requests are not supported: leave out Content-Encoding",
                status=415,
                code="unsupported_content_encoding",
            )
        if (request.content_length or 0) > self._limit_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            while chunk := await self._chunk(request, silence_s):
                body += chunk
                self.held_bytes += len(chunk)
                if len(body) > self._limit_bytes:
                    raise self._too_large()
                if self.held_bytes > self._total_bytes:
                    raise ApiError(
                        "This node holds too many requests at the moment", status=503, code="busy", retry_after_s=5
                    )
            whole = bytes(body)
            check_body(request, whole)
            yield whole
        finally:
            self.held_bytes -= len(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            f"The request is larger than {self._limit_bytes:,} bytes, the most that this node takes",
            status=413,
            code="request_too_large",
        )

    @staticmethod
    async def _chunk(request: web.Request, silence_s: float) -> bytes:
        try:
            async with asyncio.timeout(silence_s):
                return await request.content.readany()
        except TimeoutError:
            raise ApiError(
                f"Nothing of the request's body came within {silence_s:.0f} s", status=408, code="request_timeout"
            ) from None


async def top_level(body: bytes, names: Collection[str]) -> dict[str, bytes]:
    """Those members of the JSON object ``body`` that are called so, each value's text as it stands there.

    Of what is not JSON, anything: the server that decodes it will refuse it.
    """
    # Decoded, 32 MiB of brackets are 700 MB of lists, and the decoder lets no other thread run meanwhile.
    if len(body) < _LARGE_BYTES:
        return _top_level(body, names)
    return await asyncio.to_thread(_top_level, body, names)


def _top_level(body: bytes, names: Collection[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    depth = 0
    key = ""
    key_expected = False
    value_start = -1  # while in the value of a member in question
    for match in _TOKEN.finditer(body):
        token = match[0]
        mark = token[:1]
        if depth == 1 and value_start >= 0 and mark in b",}":
            found[key] = body[value_start : match.start()].strip()
            value_start = -1
        if mark in b"{[":
            if depth == 0 and mark == b"[":
                break
            depth += 1
            key_expected = depth == 1
        elif mark in b"}]":
            depth -= 1
            if depth <= 0:
                break
        elif depth == 1:
            if mark == b",":
                key_expected = True
            elif mark == b":":
                key_expected = False
                value_start = match.end() if key in names else -1
            elif key_expected:
                key = str(decoded(token))
    return found


def decoded(value: bytes | None) -> Any:
    """The JSON value ``value``; None when it is absent, and its text when it is not JSON, or is long or deep."""
    value = value or b"null"
    try:
        if len(value) <= _DECODED_BYTES_MAX:
            return json.loads(value)
    except (ValueError, RecursionError):
        pass
    return value[:_DECODED_BYTES_MAX].decode(errors="replace")
