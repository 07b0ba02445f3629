"""One answer on its way to a client: passed on as it comes, explained where it is an error, ended where it breaks."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from node.api.client_watch import ClientWatch
from node.api.errors import Api, ApiError, ComputeError
from node.api.event_stream import EventStream
from node.api.upstream import Answer
from node.router.failure import ExpertFailure

# The experts' report comes on another connection than llama-server's answer, a little before or after it.
_REPORT_WAIT_S = 1.0
_REPORT_AGE_S = 2.0
_ERROR_BYTES_MAX = 64 << 10
_LAST_EVENT_S = 1.0


class Exchange:
    """What a client has been sent of one answer."""

    def __init__(self, request: web.Request, api: Api, failures: Failures | None) -> None:
        """``failures``: where a compute error's cause is to be found; None when a peer has told it already."""
        self._request = request
        self._api = api
        self._failures = failures
        self._started_s = time.monotonic()
        self._events: EventStream | None = None
        self.response: web.StreamResponse | None = None

    async def relay(self, answer: Answer, watch: ClientWatch) -> web.StreamResponse:
        """Passes the whole answer on. Raises UpstreamBroken, ConnectionError."""
        if answer.status in (401, 403):
            # The client's credentials are checked by this node; these are about ours.
            raise answer.broken(f"it refused this node with status {answer.status}")
        if answer.is_event_stream:
            return await self._relay_events(answer, watch)
        explained = await self._explained_body(answer) if answer.status >= 500 and self._failures else None
        response = await self._begin(answer)
        if explained is not None:
            await response.write(explained)
        while data := await answer.read():
            watch.sent(len(data))
            await response.write(data)
        await response.write_eof()
        return response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Tells the client, in whatever way is left, that the answer will not be whole. Raises ApiError."""
        if self.response is None:
            raise error
        try:
            if self._events is None:  # only breaking the connection tells that the body is not whole
                if self._request.transport is not None:
                    self._request.transport.abort()
            else:
                async with asyncio.timeout(_LAST_EVENT_S):
                    await self.response.write(self._events.closing + error.event(self._api))
                    await self.response.write_eof()
        except (ConnectionError, TimeoutError):
            if self._request.transport is not None:
                self._request.transport.abort()
        return self.response

    async def _begin(self, answer: Answer) -> web.StreamResponse:
        self.response = web.StreamResponse(status=answer.status, headers=answer.headers)
        if answer.is_event_stream:
            # Said in the headers: closing a connection that the client may use again, after a break, would be a race.
            self.response.force_close()
        await self.response.prepare(self._request)
        return self.response

    async def _relay_events(self, answer: Answer, watch: ClientWatch) -> web.StreamResponse:
        self._events = EventStream(self._api)
        response = await self._begin(answer)
        while data := await answer.read():
            whole, error = self._events.feed(data)
            if error:
                error = await self._explained_event(error)
            if whole or error:
                watch.sent(len(whole) + len(error))
                await response.write(whole + error)
        if not self._events.ended:
            raise answer.broken("it ended its answer early")
        if rest := self._events.rest():
            await response.write(rest)
        await response.write_eof()
        return response

    async def _explained_body(self, answer: Answer) -> bytes:
        """The body of an error, or as much of a large one as was read. ``answer.headers`` are made to fit it."""
        body = b""
        while len(body) <= _ERROR_BYTES_MAX:
            if not (data := await answer.read()):
                found = ComputeError.in_body(self._api, body)
                if found and (failure := await self._failure()):
                    body = found.body(failure)
                    answer.headers["Content-Length"] = str(len(body))
                break
            body += data
        return body

    async def _explained_event(self, event: bytes) -> bytes:
        found = ComputeError.in_event(self._api, event) if self._failures else None
        failure = await self._failure() if found else None
        return found.event(failure) if found and failure else event

    async def _failure(self) -> ExpertFailure | None:
        return await self._failures.since(self._started_s) if self._failures else None


class Failures:
    """The last failed layer. Each ends all of llama-server's running requests, so it is theirs, whoever asks."""

    def __init__(self) -> None:
        self._last: tuple[float, ExpertFailure] | None = None
        self._reported = asyncio.Event()

    def report(self, failure: ExpertFailure) -> None:
        self._last = (time.monotonic(), failure)
        self._reported.set()
        self._reported = asyncio.Event()

    async def since(self, started_s: float) -> ExpertFailure | None:
        """The failure of just now, or of the next moment, but none from before ``started_s``."""
        earliest_s = max(started_s, time.monotonic() - _REPORT_AGE_S)
        if self._last is None or self._last[0] < earliest_s:
            try:
                await asyncio.wait_for(self._reported.wait(), _REPORT_WAIT_S)
            except TimeoutError:
                return None
        return self._last[1] if self._last else None
