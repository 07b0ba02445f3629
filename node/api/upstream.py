"""One request passed on to the server that answers it, and its answer read as it comes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp

from node.api.client_watch import notice_vanished
from node.errors import SwarmError

# An agent on the LAN, or llama-server on loopback, that does not accept a connection in this time is not there.
_CONNECT_TIMEOUT_S = 5.0
_CHUNK_BYTES = 64 << 10

#: The headers of an answer that a client gets. All others are about the connection, or llama-server's own: its CORS
#: header lets every web page read what it answers.
_ANSWER_HEADERS = ("Content-Type", "Content-Length", "Cache-Control", "X-Accel-Buffering", "Retry-After")


class UpstreamUnreachable(SwarmError):
    """The server did not accept the connection, so nothing was asked."""


class UpstreamBroken(SwarmError):
    """The connection broke before the answer was whole."""


@dataclass(frozen=True)
class Upstream:
    """Whom to ask. ``headers`` go along with the request; ``title`` is for people.

    ``check_reply`` is given the answer's status and Authentication-Info, and raises SwarmError if that proves nothing.
    """

    url: str
    headers: Mapping[str, str]
    title: str
    node: str | None = None
    check_reply: Callable[[int, str | None], None] | None = None


class Answer:
    """An answer that is still coming in."""

    def __init__(self, upstream: Upstream, response: aiohttp.ClientResponse) -> None:
        self._upstream = upstream
        self._response = response
        self.status = response.status
        self.headers = {name: response.headers[name] for name in _ANSWER_HEADERS if name in response.headers}
        self.is_event_stream = response.content_type == "text/event-stream"
        #: Whether something of the body has come.
        self.has_begun = False

    async def read(self) -> bytes:
        """What has come of the body, as soon as something has; b"" at its end. Raises UpstreamBroken.

        No more is read from the connection than 128 KiB ahead of this.
        """
        try:
            data = await self._response.content.readany()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise self.broken(error) from error
        self.has_begun = self.has_begun or bool(data)
        return data

    def broken(self, reason: Exception | str) -> UpstreamBroken:
        """The error for this answer, if it ended too early or cannot be passed on."""
        return _broken(self._upstream, reason)


def _broken(upstream: Upstream, error: Exception | str) -> UpstreamBroken:
    reason = str(error) or type(error).__name__
    return UpstreamBroken(f"The connection to {upstream.title} broke: {reason}", node=upstream.node)


class Relay:
    """Passes requests on, each on a connection of its own. An asynchronous context manager."""

    def __init__(self, silence_s: float) -> None:
        """``silence_s``: after how long a machine that answers nothing counts as gone."""
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Relay:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                # llama-server closes a kept connection after a streamed answer: the next request would run into that.
                force_close=True,
                socket_factory=partial(_socket, self._silence_s),
            ),
            # As long as it takes: only the client knows how long it wants to wait.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "swarm-node"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @contextlib.asynccontextmanager
    async def ask(self, upstream: Upstream, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
        """Posts ``body``; the context begins with the answer's headers, and its end closes the connection at once.

        Raises UpstreamUnreachable, UpstreamBroken.
        """
        if self._session is None:
            raise RuntimeError("a Relay is used outside its context")
        try:
            response = await self._session.post(
                upstream.url,
                # Handed over whole, a large body would be copied into the transport's buffer at once.
                data=_chunks(body),
                headers={**headers, **upstream.headers, "Content-Length": str(len(body))},
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise UpstreamUnreachable(
                f"{upstream.title} cannot be reached: {error or type(error).__name__}", node=upstream.node
            ) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _broken(upstream, error) from error
        try:
            if upstream.check_reply is not None:
                try:
                    upstream.check_reply(response.status, response.headers.get("Authentication-Info"))
                except SwarmError as error:
                    raise _broken(upstream, error) from error
            yield Answer(upstream, response)
        finally:
            response.close()


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _CHUNK_BYTES):
        yield body[start : start + _CHUNK_BYTES]


def _socket(silence_s: float, address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    try:
        # Else the kernel takes megabytes of an answer that a slow client will not take, and the router never waits.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK_BYTES)
        notice_vanished(connection, silence_s)
    except BaseException:
        connection.close()
        raise
    return connection
