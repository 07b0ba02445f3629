"""A chat over the OpenAI API of a router, streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from node.errors import SwarmError


class ChatError(SwarmError):
    """The router answered with an error, or its stream ended early."""


@dataclass(frozen=True)
class ChatChunk:
    """A part of an answer: ``text``; in the last one, ``finish_reason`` and llama-server's ``timings``."""

    text: str
    finish_reason: str | None = None
    timings: Mapping[str, Any] | None = None


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    messages: Sequence[Mapping[str, str]],
    *,
    headers: Mapping[str, str],
    max_tokens: int,
    temperature: float = 0.0,
) -> AsyncIterator[ChatChunk]:
    """Streams the answer to ``messages``. ``url``: the server's root. Raises ChatError."""
    body = {"messages": list(messages), "stream": True, "max_tokens": max_tokens, "temperature": temperature}
    # llama-server closes a kept connection after a streamed answer, which the next request on it would run into.
    headers = {**headers, "Connection": "close"}
    finished = False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise ChatError(_error_text(await response.read()))
            async for line in response.content:
                if line.startswith(b"error:"):
                    raise ChatError(_error_text(line.removeprefix(b"error:")))
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(_error_text(data))
                for choice in event["choices"]:
                    finished = finished or choice["finish_reason"] is not None
                    yield ChatChunk(choice["delta"].get("content") or "", choice["finish_reason"], event.get("timings"))
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ChatError(f"the router's connection broke: {error or type(error).__name__}") from error
    if not finished:
        raise ChatError("the router ended its answer early")


def _error_text(body: bytes) -> str:
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error["message"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return body.decode(errors="replace").strip()[:500] or "an empty error"
