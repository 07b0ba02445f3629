"""``swarm-node ask``: one question to a running swarm."""

from __future__ import annotations

import argparse
import json

import aiohttp

from node.commands.chat import ChatError, stream_chat
from node.commands.find_node import find_node
from node.errors import SwarmError


async def run_ask(options: argparse.Namespace) -> int:
    """Streams the answer to one question on stdout. Raises SwarmError when no node is found."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=5)) as session:
        url = await find_node(session, options)
        messages = [{"role": "user", "content": options.text}]
        try:
            async for chunk in stream_chat(session, url, messages, headers=headers, max_tokens=options.max_tokens):
                if options.json:
                    print(json.dumps({"text": chunk.text, "finish_reason": chunk.finish_reason}), flush=True)
                else:
                    print(chunk.text, end="", flush=True)
        except ChatError as error:
            if not options.json:
                print(flush=True)
            raise SwarmError(f"{url}: {error.message}") from error
    if not options.json:
        print()
    return 0
