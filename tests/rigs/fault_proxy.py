"""A TCP proxy between a router and an expert server that can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

#: `drop` swallows everything both ways and keeps connections open; `close` closes after the header of the next reply
#: (of a new connection: after the header of the HTTP response); `trickle` passes replies on at a byte per second.
MODES = ("pass", "drop", "close", "trickle")


class FaultProxy:
    """Listens on `port` of loopback. `mode` may change at any time, also for connections that exist."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.mode = "pass"
        self._left = 0
        self._action: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def after_bytes(self, count: int, action: Callable[[], None]) -> None:
        """Calls `action` once, when `count` more bytes have come from the router."""
        self._left, self._action = count, action

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.create_task(self._requests(reader, upstream[1])),
            asyncio.create_task(self._replies(upstream[0], writer)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            self._tasks.difference_update(pumps)
            writer.transport.abort()
            upstream[1].transport.abort()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if self._action is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        action, self._action = self._action, None
                        action()
                if self.mode != "drop":
                    writer.write(data)
                    await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = True
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if self.mode == "close":
                    writer.write(data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if is_first else data[:4])
                    await writer.drain()
                    return
                while data and self.mode == "trickle":
                    writer.write(data[:1])
                    data = data[1:]
                    await asyncio.sleep(1)
                if data and self.mode != "drop":
                    writer.write(data)
                    await writer.drain()
                is_first = False


@asynccontextmanager
async def fault_proxy(target_port: int) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(target_port)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy
        proxy.close()
