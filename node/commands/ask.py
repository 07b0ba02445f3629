"""``swarm-node ask``, ``status`` and ``peers``: commands that ask a running node."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import Any

import aiohttp
from rich.console import Console

from gossip.discovery import find
from node.agent.status import print_status
from node.commands.chat import ChatError, stream_chat
from node.errors import SwarmError
from node.peers.document import print_peers
from node.settings.load import load_config

_FIND_S = 3.0


async def run_ask(options: argparse.Namespace) -> int:
    """Streams the answer to one question on stdout. Raises SwarmError when no node is found."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=5)) as session:
        url = await find_node(session, options)
        messages = [{"role": "user", "content": options.text}]
        try:
            async for piece in stream_chat(session, url, messages, headers=headers, max_tokens=options.max_tokens):
                if options.json:
                    print(json.dumps({"text": piece.text, "finish_reason": piece.finish_reason}), flush=True)
                else:
                    print(piece.text, end="", flush=True)
        except ChatError as error:
            if not options.json:
                print(flush=True)
            raise SwarmError(f"{url}: {error.message}") from error
    if not options.json:
        print()
    return 0


async def run_status(options: argparse.Namespace) -> int:
    """Shows the swarm as a node sees it; 0 when queries can be answered, 3 when not. Raises SwarmError."""
    document = await swarm_status(options)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print_status(document, Console(file=sys.stdout, highlight=False))
    return 0 if document["ready"] else 3


async def swarm_status(options: argparse.Namespace) -> dict[str, Any]:
    """The status document of the node that ``options`` name, or of one that is found. Raises SwarmError."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        url = await find_node(session, options)
        return await get_document(session, f"{url}/status")


async def run_peers(options: argparse.Namespace) -> int:
    """Shows how a node found the others and reaches them. Raises SwarmError."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        url = await find_node(session, options)
        document = await get_document(session, f"{url}/peers")
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print_peers(document, Console(file=sys.stdout, highlight=False))
    return 0


async def find_node(session: aiohttp.ClientSession, options: argparse.Namespace) -> str:
    """--url, else the node of this machine's configuration, else one that multicast DNS finds."""
    if options.url:
        return str(options.url).rstrip("/").removesuffix("/v1")
    config = load_config(options, os.environ)
    host = "127.0.0.1" if config.node.host in ("lan", "loopback") else config.node.host
    local = f"http://{host}:{config.node.port}"
    if await _answers(session, local):
        return local
    async with contextlib.aclosing(find(config.swarm.name, _FIND_S)) as nodes:
        async for found in nodes:
            for address in found.addresses:
                if await _answers(session, f"http://{address}"):
                    return f"http://{address}"
    raise SwarmError(
        f"no node found: none answers at {local}, and none was announced on the network within {_FIND_S:.0f} s. "
        f"Start one with `swarm-node`, or name one with --url http://HOST:PORT"
    )


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == 200
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False


async def get_document(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """A JSON document of a node. Raises SwarmError."""
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise SwarmError(f"{url} answered with status {response.status}: {(await response.text())[:200]}")
            return dict(await response.json())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        raise SwarmError(f"{url} does not answer: {error or type(error).__name__}") from error
