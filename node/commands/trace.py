"""``swarm-node trace``: where the time of a token went, of a short answer that it asks for, or
of what the swarm does anyway."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from node.commands.chat import ChatError, stream_chat
from node.commands.find_node import find_node
from node.commands.trace_figures import Counters, Figures, Requests, Snapshot, TraceError, decode, difference, figures
from node.commands.trace_screen import HEIGHT, ms_text, trace_lines
from node.errors import SwarmError

TOKENS_MAX = 32
# As much as the router's agent takes of its backend.
_BODY_BYTES_MAX = 16 << 20
_SNAPSHOT_TIMEOUT_S = 10.0


async def run_trace(options: argparse.Namespace) -> int:
    """Shows where the time went. Raises SwarmError when no node is found, or nothing could be measured."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=5)) as session:
        url = await find_node(session, options)
        if options.watch is not None:
            shown = await _watch(session, url, options.watch)
        else:
            shown = await _measure(session, url, options)
    if options.json:
        print(json.dumps({"url": url, **shown.document()}, indent=1))
        return 0
    console = Console(file=sys.stdout, highlight=False)
    height = max(HEIGHT, console.height - 1) if console.is_terminal else HEIGHT
    plain = not (console.encoding or "").lower().startswith("utf")
    for line in trace_lines(shown.figures, title=shown.title, notes=shown.notes, height=height, plain=plain):
        console.print(line, soft_wrap=True)
    return 0


class _Shown:
    """What was found. ``more``: further fields of the JSON document."""

    def __init__(self, found: Figures, router: str, title: str, notes: list[str], more: Mapping[str, Any]) -> None:
        self.figures = found
        self.router = router
        self.title = title
        self.notes = notes
        self._more = more

    def document(self) -> dict[str, Any]:
        return {"router": self.router, **self._more, "figures": document(self.figures)}


def document(found: Figures) -> dict[str, Any]:
    """The figures as JSON, with ``total_ms``."""
    return {"total_ms": found.parts.total_ms, **asdict(found)}


async def _measure(session: aiohttp.ClientSession, url: str, options: argparse.Namespace) -> _Shown:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    messages = [{"role": "user", "content": options.prompt}]
    before = await _snapshot(session, url)
    first: Snapshot | None = None
    timings: Mapping[str, Any] = {}
    try:
        async for chunk in stream_chat(session, url, messages, headers=headers, max_tokens=TOKENS_MAX):
            # A chunk of any kind: some models think first, which is no text of the answer.
            if first is None and chunk.finish_reason is None:
                first = await _snapshot(session, url)
            timings = chunk.timings or timings
    except ChatError as error:
        raise SwarmError(f"{url}: {error.message}") from error
    after = await _snapshot(session, url)
    if first is None:
        raise TraceError("the answer was empty, so there is nothing to measure: give another --prompt")
    try:
        counted = difference(first.trace, after.trace)
        answer = figures(counted, with_between=True)
    except TraceError as error:
        raise TraceError(
            f"{error.message}. The answer may be too short to be measured: give another --prompt"
        ) from error
    prompt_counted = difference(before.trace, first.trace)
    prompt = figures(prompt_counted, with_between=False)
    others = other_requests(before.requests, after.requests, own=1)
    notes = [f"Router {after.router}. {_prompt_note(prompt_counted, prompt)}", *_notes(answer, others)]
    more = {
        "other_requests": others,
        "timings": dict(timings),
        "prompt": document(prompt),
        "counters": msgspec.to_builtins(counted),
    }
    return _Shown(answer, after.router, _title(answer, timings), notes, more)


async def _watch(session: aiohttp.ClientSession, url: str, seconds: float) -> _Shown:
    before = await _snapshot(session, url)
    await asyncio.sleep(seconds)
    after = await _snapshot(session, url)
    counted = difference(before.trace, after.trace)
    found = figures(counted, with_between=False)
    requests = other_requests(before.requests, after.requests, own=0)
    between_ms = counted.between_ns / max(1, counted.passes) / 1e6
    title = (
        f"{found.passes} passes in {seconds:g} s, {_tokens(found.rows)} each: {ms_text(found.parts.total_ms)} ms a pass"
    )
    notes = [
        f"Router {after.router}, {requests} request{'s' * (requests != 1)}. Not in it: sampling and idle, "
        f"{ms_text(between_ms)} ms a pass",
        *_notes(found, 0),
    ]
    more = {
        "requests": requests,
        "seconds": seconds,
        "between_ms": between_ms,
        "counters": msgspec.to_builtins(counted),
    }
    return _Shown(found, after.router, title, notes, more)


def other_requests(before: Requests, after: Requests, own: int) -> int:
    """How many ran between two snapshots, besides ``own``."""
    return max(0, before.running + after.relayed - before.relayed - own)


def _title(answer: Figures, timings: Mapping[str, Any]) -> str:
    what = "A token" if answer.rows < 1.005 else f"A pass of {answer.rows:.2f} tokens"
    said = timings.get("predicted_per_token_ms")
    check = f" (llama-server: {ms_text(said)} ms)" if isinstance(said, int | float) else ""
    total_ms = answer.parts.total_ms
    return (
        f"{what} took {ms_text(total_ms)} ms{check}, {1000 * answer.rows / total_ms:.3g} a second, mean of "
        f"{answer.passes} passes"
    )


def _tokens(number: float) -> str:
    text = f"{number:.0f}" if number > 99 else f"{number:.3g}"
    return f"{text} token{'s' * (text != '1')}"


def _prompt_note(counted: Counters, prompt: Figures) -> str:
    wait = prompt.parts.wait_ms / prompt.parts.total_ms if prompt.parts.total_ms else 0.0
    return (
        f"Before them, the prompt: {_tokens(max(layer.rows for layer in counted.layers))} in "
        f"{ms_text(prompt.passes * prompt.parts.total_ms)} ms, {100 * wait:.0f} % of it waiting"
    )


def _notes(found: Figures, others: int) -> list[str]:
    notes = []
    if others:
        notes.append(f"{others} other request{'s' * (others != 1)} ran meanwhile: the figures are of all together")
    if found.held_ms >= 0.1:
        notes.append(
            f"Held for clients that left: {ms_text(found.held_ms * found.passes)} ms in all, in no figure above"
        )
    return notes


async def _snapshot(session: aiohttp.ClientSession, url: str) -> Snapshot:
    try:
        async with (
            asyncio.timeout(_SNAPSHOT_TIMEOUT_S),
            session.get(f"{url}/trace", headers={"Connection": "close"}) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _BODY_BYTES_MAX:
                    raise TraceError(f"{url}/trace answers with more than {_BODY_BYTES_MAX} bytes")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise SwarmError(f"{url}/trace does not answer: {str(error) or type(error).__name__}") from error
    if response.status != 200:
        raise SwarmError(f"{url}: {_error_text(bytes(body), response.status)}")
    return decode(bytes(body))


def _error_text(body: bytes, status: int) -> str:
    if status == 404:
        return "this node knows no /trace: it runs an older swarm-node"
    try:
        return str(json.loads(body)["error"]["message"])[:400]
    except (ValueError, KeyError, TypeError):
        return f"/trace answers with status {status}"
