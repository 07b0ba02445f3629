"""Finds the node that a client command speaks to, and reads its documents."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import aiohttp

from gossip.discovery import find
from node.errors import SwarmError
from node.settings.load import load_config

# Multicast DNS answers within a second; a lost packet is asked for again after another.
_FIND_S = 3.0


async def find_node(session: aiohttp.ClientSession, options: argparse.Namespace) -> str:
    """The URL of the node that ``--url`` names, else of this machine's node, else of one that multicast DNS finds.

    Raises SwarmError when there is none.
    """
    if options.url:
        return str(options.url).rstrip("/").removesuffix("/v1")
    config = load_config(options, os.environ)
    local = f"http://{config.node.local_url_host}:{config.node.port}"
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


async def get_document(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """A JSON document of a node. Raises SwarmError."""
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise SwarmError(f"{url} answered with status {response.status}: {(await response.text())[:200]}")
            return dict(await response.json())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        raise SwarmError(f"{url} does not answer: {error or type(error).__name__}") from error


async def find_document(options: argparse.Namespace, path: str) -> dict[str, Any]:
    """The JSON document at ``path`` of the node that the options name, or of one that is found. Raises SwarmError."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        url = await find_node(session, options)
        return await get_document(session, f"{url}{path}")


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == 200
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False
