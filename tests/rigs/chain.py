"""A client that asks a front door, or one behind another, and a llama-server whose answers the test writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from node.api.front_door import DoorOptions, Here, There
from rigs.door import Node, node
from rigs.fake_llama_server import FakeLlamaServer, fake_llama_server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

PATHS = [CHAT, "/v1/completions", RESPONSES, MESSAGES, "/v1/embeddings", "/v1/messages/count_tokens"]

LAST_EVENT = {
    CHAT: b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    RESPONSES: b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}

QUESTION = b'{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'


@dataclass
class Chain:
    """A client's session, the node that it asks, the router's node (the same for one hop), and llama-server."""

    session: aiohttp.ClientSession
    front: Node
    router: Node
    llama: FakeLlamaServer

    def post(self, body: bytes = QUESTION, path: str = CHAT, **headers: str) -> asyncio.Task[aiohttp.ClientResponse]:
        request = self.session.post(
            self.front.url + path, data=body, headers={"Content-Type": "application/json", **headers}
        )

        async def ask() -> aiohttp.ClientResponse:
            return await request

        asking = asyncio.create_task(ask())
        # Who is not waited for in the end was meant to fail, and asyncio shall not say so in some later test.
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asking

    async def settled(self) -> None:
        """Waits until no door relays anything any more."""
        await until(lambda: self.front.door.open == 0 and self.router.door.open == 0)


@asynccontextmanager
async def chain(
    hops: int = 1,
    options: DoorOptions | None = None,
    *,
    slots: int = 16,
    handler_cancellation: bool = True,
    host: str = "127.0.0.1",
) -> AsyncIterator[Chain]:
    async with contextlib.AsyncExitStack() as stack:
        llama = await stack.enter_async_context(fake_llama_server())
        router = await stack.enter_async_context(
            node(
                Here(llama.url, llama.api_key, slots),
                options,
                handler_cancellation=handler_cancellation,
                host=host if hops == 1 else "127.0.0.1",
            )
        )
        front = router
        if hops == 2:
            front = await stack.enter_async_context(
                node(There("alpha", router.url), options, handler_cancellation=handler_cancellation, host=host)
            )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Chain(session, front, router, llama)


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Waits for it; ``within_s`` is for a test that would hang."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (what the doors count has no events)
            await asyncio.sleep(0.01)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def data_of(one_event: bytes) -> dict[str, Any]:
    (line,) = [line for line in one_event.splitlines() if line.startswith(b"data: ")]
    return dict(json.loads(line.removeprefix(b"data: ")))


def message_of(document: dict[str, Any]) -> str:
    return str(document["error"]["message"])


class RawClient:
    """A client on a bare socket, which can leave in ways that HTTP clients do not."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    @classmethod
    async def ask(cls, url: str, body: bytes = QUESTION, path: str = CHAT) -> RawClient:
        host, port = url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, int(port)))
        client = cls(connection)
        await loop.sock_sendall(connection, client.request(host, body, path))
        return client

    @staticmethod
    def request(host: str, body: bytes = QUESTION, path: str = CHAT) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def read_until(self, mark: bytes) -> bytes:
        loop, data = asyncio.get_running_loop(), b""
        async with asyncio.timeout(30):
            while mark not in data:
                chunk = await loop.sock_recv(self.socket, 4096)
                assert chunk, data
                data += chunk
        return data

    def leave(self, how: str) -> None:
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half-close":
            self.socket.shutdown(socket.SHUT_WR)
        else:
            self.socket.close()
