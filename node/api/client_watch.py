"""Notices that a client is gone while its request is worked on: it closed, was reset, vanished, or takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from aiohttp import web

from node.errors import SwarmError

# aiohttp cancels a handler whose client is gone only when its server was told to; this is what it costs otherwise.
_LOOK_INTERVAL_S = 0.2
# What a slow client has not taken shall keep the router waiting, and not lie in the kernel, which would take megabytes.
_SEND_BUFFER_BYTES = 64 << 10


class ClientGone(SwarmError):
    """The client closed its connection, or took nothing for too long."""


class Interrupted(SwarmError):
    """The exchange was ended by :meth:`ClientWatch.interrupt`."""


class ClientWatch:
    """Made by :func:`watch_client`. ``sent`` is to be called with the length of what was written to the client."""

    def __init__(self, request: web.Request, stall_timeout_s: float, leash: asyncio.Timeout) -> None:
        self._request = request
        self._stall_timeout_s = stall_timeout_s
        self._leash = leash
        self._written_bytes = 0
        self.cause: SwarmError | None = None

    def sent(self, n_bytes: int) -> None:
        self._written_bytes += n_bytes

    def interrupt(self, reason: str) -> None:
        """Ends what happens inside the context with Interrupted."""
        self._end(Interrupted(reason))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        most_taken_bytes, progress_s = -1, loop.time()
        while self.cause is None:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                self._end(ClientGone("the client closed the connection"))
                return
            waiting_bytes = transport.get_write_buffer_size()
            taken_bytes = self._written_bytes - waiting_bytes
            if waiting_bytes == 0 or taken_bytes > most_taken_bytes:
                most_taken_bytes, progress_s = taken_bytes, loop.time()
            elif loop.time() - progress_s > self._stall_timeout_s:
                self._end(ClientGone(f"the client took nothing for {self._stall_timeout_s:.0f} s"))
                return
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _end(self, cause: SwarmError) -> None:
        if self.cause is None:
            self.cause = cause
            self._leash.reschedule(asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def watch_client(request: web.Request, stall_timeout_s: float) -> AsyncIterator[ClientWatch]:
    """Watches the client of ``request`` while the context lasts; its connection is dropped when the client is gone.

    Raises ClientGone, or Interrupted.
    """
    transport = request.transport
    if transport is None:
        raise ClientGone("the client closed the connection")
    if (client := transport.get_extra_info("socket")) is not None and client.family != socket.AF_UNIX:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        notice_vanished(client, stall_timeout_s)
    watch: ClientWatch | None = None
    try:
        async with asyncio.timeout(None) as leash:
            watch = ClientWatch(request, stall_timeout_s, leash)
            looking = asyncio.create_task(watch.run())
            try:
                yield watch
            except ConnectionError as error:
                raise ClientGone(f"the client closed the connection: {error}") from error
            finally:
                looking.cancel()
    except TimeoutError:
        if watch is None or watch.cause is None:
            raise
        if isinstance(watch.cause, ClientGone):
            # Closed in order, it would wait for ever to send what a client that is gone will not take.
            transport.abort()
        raise watch.cause from None


def notice_vanished(connection: socket.socket, silence_s: float) -> None:
    """Has the kernel break a connection whose other end answers nothing for about ``silence_s``, at least 2 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, round(silence_s / 3))
    # macOS has its own name for the first, and none for the last: there, unanswered data takes its minutes.
    for name, value in (
        ("TCP_KEEPIDLE", probe_s),
        ("TCP_KEEPALIVE", probe_s),
        ("TCP_KEEPINTVL", probe_s),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", max(2000, round(1000 * silence_s))),
    ):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
