"""A llama-server for tests, whose answers the test writes, chunk by chunk, while it looks at what the client gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from rigs.door import serve

EVENT_STREAM = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
JSON = {"Content-Type": "application/json; charset=utf-8"}


class Asked:
    """A request that arrived, and the answer to it, which the test writes."""

    def __init__(self, request: web.Request, body: bytes) -> None:
        self.path = request.path
        self.headers = request.headers.copy()
        self.body = body
        #: Set when the client has closed the connection before the answer was finished.
        self.closed = asyncio.Event()
        self.finished = asyncio.Event()
        #: Bytes of the answer that the kernel, or the buffer before it, has taken.
        self.sent_bytes = 0
        self._request = request
        self.response: web.StreamResponse | None = None

    async def start(self, status: int = 200, headers: Mapping[str, str] = EVENT_STREAM) -> None:
        # llama-server says this of itself in every answer.
        own = {"Server": "llama.cpp", "Access-Control-Allow-Origin": "*"}
        self.response = web.StreamResponse(status=status, headers={**own, **headers})
        await self.response.prepare(self._request)

    async def send(self, data: bytes) -> None:
        assert self.response is not None
        await self.response.write(data)
        self.sent_bytes += len(data)

    async def finish(self) -> None:
        assert self.response is not None
        await self.response.write_eof()
        self.finished.set()

    async def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] = JSON) -> None:
        """The whole answer at once, with its length, as llama-server answers without streaming."""
        await self.start(status, {**headers, "Content-Length": str(len(body))})
        await self.send(body)
        await self.finish()

    async def stream(self, *events: bytes) -> None:
        """The whole answer as an event stream."""
        await self.start()
        for event in events:
            await self.send(event)
        await self.finish()

    def break_connection(self) -> None:
        """As when the process is killed."""
        assert self._request.transport is not None
        self._request.transport.abort()


class FakeLlamaServer:
    """Made by :func:`fake_llama_server`."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self.api_key = api_key
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.n_asked = 0

    async def next(self) -> Asked:
        """The next request, as soon as it has arrived."""
        async with asyncio.timeout(30):
            return await self.asked.get()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(request, await request.read())
        assert asked.headers.get("Authorization") == f"Bearer {self.api_key}"
        self.n_asked += 1
        self.asked.put_nowait(asked)
        try:
            await asked.finished.wait()
        except asyncio.CancelledError:
            asked.closed.set()
            raise
        assert asked.response is not None
        return asked.response


@asynccontextmanager
async def fake_llama_server(api_key: str = "key-of-llama-server") -> AsyncIterator[FakeLlamaServer]:
    fake = FakeLlamaServer("", api_key)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/{path:.*}", fake.handle)
    async with serve(app) as fake.url:
        yield fake
