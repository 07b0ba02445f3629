"""Expert calls over HTTP: `POST /v1/ffn`, or a WebSocket on the same path; and `/health`, `/ready`, `/v1/stats`.

Nothing that comes over the network names a file. A WebSocket keeps the body limit that it was opened with; when a wider
layer is loaded, the server closes it with code 1012 between two calls, and the caller connects again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from typing import cast

import numpy as np
from aiohttp import WSMsgType, web

from node.bounded_msgpack import LARGE_BYTES, Body
from node.errors import CallRefused, MalformedMessage, NotAuthenticated
from node.expert_server import wire
from node.expert_server.calls import ExpertCalls
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.guard import CallGuard
from node.expert_server.held_slices import SliceHolder
from node.expert_server.native_calls import NativeCalls
from node.expert_server.speed import DeviceSpeed
from node.swarm_key import STREAMED, Accepted

#: The host that stands for every address of this machine, IPv4 and IPv6.
EVERY_ADDRESS = "*"
# How a machine without IPv6 refuses to listen there.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
# A caller that neither sends nor takes anything of a message for so long is cut off: it holds connection and memory.
SILENCE_S = 10.0
IDLE_CONNECTION_S = 75.0
LINGER_S = 1.0


class ExpertServer:
    """Answers expert calls over HTTP, and what people and agents ask of its state. Made on a running event loop."""

    def __init__(
        self,
        name: str,
        slices: SliceHolder,
        calls: ExpertCalls,
        compute: ComputeQueue,
        native: NativeCalls | None,
        speed: DeviceSpeed,
        guard: CallGuard,
    ) -> None:
        """`native`: answers the calls of WebSockets; None: `calls` answers them all."""
        self._name = name
        self._slices = slices
        self._calls = calls
        self._compute = compute
        self._native = native
        self._speed = speed
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._sockets: dict[web.WebSocketResponse, _SocketState] = {}
        self._http = _LimitedServer(
            self._dispatch,
            handler_cancellation=True,
            keepalive_timeout=IDLE_CONNECTION_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,
        )
        self._listeners: list[asyncio.Server] = []

    async def listen(self, host: str, port: int) -> int:
        """Starts to answer; returns the port. `host`: an address, or EVERY_ADDRESS. Raises OSError if it cannot."""
        # One port for both: the node's record names one, and callers come to the address at which the node answered
        # them.
        for address in ("0.0.0.0", "::") if host == EVERY_ADDRESS else (host,):
            try:
                listener = await self._loop.create_server(self._http, address, port, reuse_address=True)
            except OSError as error:
                if self._listeners and error.errno in _NO_IPV6:
                    continue
                raise
            if listener.sockets:
                self._listeners.append(listener)
                port = int(listener.sockets[0].getsockname()[1])
        return port

    async def close(self) -> None:
        """Stops to listen and closes every connection."""
        for listener in self._listeners:
            listener.close()
        self._http.pre_shutdown()
        await self._http.shutdown(0.2)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.path
        accepted = self._guard.check(request) if path in ("/v1/ffn", "/v1/stats") else None
        if isinstance(accepted, web.Response):
            return accepted
        if path == "/v1/ffn":
            if method == "POST":
                return await self._post(request, accepted)
            if method == "GET" and request.headers.get("Upgrade", "").lower() == "websocket":
                return await self._socket(request, accepted)
            return web.Response(status=405, headers={"Allow": "POST"})
        answer = {"/health": self._health, "/ready": self._ready, "/v1/stats": self._stats}.get(path)
        if answer is None:
            return web.Response(status=404)
        if method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET"})
        return answer()

    def _health(self) -> web.Response:
        return web.json_response({"status": "ok", "name": self._name})

    def _ready(self) -> web.Response:
        missing = [held.describe() for held in self._slices.slices() if held.state != "ready"]
        return web.json_response({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    def _stats(self) -> web.Response:
        return web.json_response(
            {
                "name": self._name,
                "body_limit_bytes": self._slices.limit_bytes,
                "connections": len(self._http.connections),
                "waiting": self._compute.waiting,
                "expert_bytes_per_s": self._speed.bytes_per_s,
                "native_calls": 0 if self._native is None else self._native.counters()["calls"],
                **self._calls.counters(),
                "terms": self._calls.terms(),
                "slices": [{**held.describe(), "bytes": held.memory_bytes} for held in self._slices.slices()],
            }
        )

    async def _post(self, request: web.BaseRequest, accepted: Accepted | None) -> web.StreamResponse:
        arrived_s = time.monotonic()
        reply: Body
        try:
            # The body is named nowhere here: answer() lets go of it before it makes the reply.
            status, reply = await self._calls.answer(await self._read_body(request, accepted), arrived_s)
        except CallRefused as error:
            status, reply = self._calls.refuse(error)
        response = web.StreamResponse(status=status, headers={"Content-Type": wire.CONTENT_TYPE})
        if accepted is not None:
            response.headers["Authentication-Info"] = accepted.reply_header(status, hashlib.sha256(reply).hexdigest())
        response.content_length = len(reply)
        if status == 413:
            response.force_close()
        try:
            await response.prepare(request)
            # In parts, since one large write is one large copy in the event loop.
            view = memoryview(reply)
            for start in range(0, len(reply), LARGE_BYTES):
                await asyncio.wait_for(response.write(view[start : start + LARGE_BYTES]), SILENCE_S)
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            # The caller went away, or does not read.
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _read_body(self, request: web.BaseRequest, accepted: Accepted | None) -> Body:
        """The whole body, refused before it is read when it is too large. Raises CallRefused."""
        if request.content_type != wire.CONTENT_TYPE or "Content-Encoding" in request.headers:
            raise MalformedMessage(f"a call's content type is {wire.CONTENT_TYPE}, without content encoding")
        _refuse_browser(request)
        limit = self._slices.limit_bytes
        declared = request.content_length
        if declared is not None and declared > limit:
            raise self._too_large(f"{declared} bytes")
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Uninitialised memory costs nothing until it is filled, so a slow sender does not hold what it only announced.
        body = None if declared is None else np.empty(declared, dtype=np.uint8).data
        growing = bytearray()
        n_read = 0
        try:
            while chunk := await asyncio.wait_for(request.content.readany(), SILENCE_S):
                n_read += len(chunk)
                if n_read > limit:
                    raise self._too_large(f"more than {limit} bytes")
                if body is None:
                    growing += chunk
                else:
                    body[n_read - len(chunk) : n_read] = chunk
        except TimeoutError:
            raise MalformedMessage(f"the body stopped after {n_read} bytes") from None
        except (web.HTTPException, ValueError, OSError):
            raise MalformedMessage(f"the body broke off after {n_read} bytes") from None
        whole: Body = growing if body is None else body[:n_read]
        if accepted is not None:
            try:
                accepted.check_body(hashlib.sha256(whole).hexdigest())
            except NotAuthenticated as error:
                raise MalformedMessage(error.message) from None
        return whole

    def _too_large(self, size: str) -> CallRefused:
        limit = self._slices.limit_bytes
        if self._slices.is_coming:
            return CallRefused("slices are still loading", kind="not_ready", retry=True)
        return CallRefused(f"the body has {size}, the limit for the layers held here is {limit}", kind="too_large")

    async def _socket(self, request: web.BaseRequest, accepted: Accepted | None) -> web.StreamResponse:
        limit = self._slices.limit_bytes
        try:
            _refuse_browser(request)
            if self._slices.is_coming and not any(held.state == "ready" for held in self._slices.slices()):
                raise CallRefused("slices are still loading", kind="not_ready", retry=True)
        except CallRefused as error:
            status, reply = self._calls.refuse(error)
            return web.Response(status=status, body=reply, content_type=wire.CONTENT_TYPE)
        # aiohttp refuses a message of max_msg_size itself.
        socket = web.WebSocketResponse(max_msg_size=limit + 1, compress=False, autoping=True, heartbeat=None)
        if accepted is not None:
            socket.headers["Authentication-Info"] = accepted.reply_header(101, STREAMED)
        if self._native is not None and request.transport is not None:
            # Before the answer, since what comes after it is for the native side to read.
            transport = request.transport
            _stop_reading(transport)
            await socket.prepare(request)
            # Again: aiohttp goes on reading when a client has sent a lot before its time.
            _stop_reading(transport)
            await self._native.serve(transport, limit, SILENCE_S, LINGER_S, self._answer_message)
            return socket
        await socket.prepare(request)
        state = self._sockets[socket] = _SocketState(limit)
        try:
            while True:
                message = await socket.receive()
                if message.type is WSMsgType.BINARY:
                    state.busy = True
                    arrived_s = time.monotonic()
                    body = message.data
                    del message
                    answer = self._calls.answer(body, arrived_s)
                    del body
                    await socket.send_bytes(cast(bytes, (await answer)[1]))
                    state.busy = False
                    if state.limit_bytes < self._slices.limit_bytes:
                        await socket.close(code=1012, message=b"the body limit has grown")
                        break
                elif message.type is WSMsgType.TEXT:
                    await socket.send_bytes(cast(bytes, await self._answer_message(None, 0)))
                else:
                    break
        except (TimeoutError, ConnectionError):
            pass  # The caller went away.
        finally:
            del self._sockets[socket]
        return socket

    async def _answer_message(self, body: Body | None, arrived_s: float) -> Body:
        """The answer to a message of a WebSocket, None being one that is not binary."""
        if body is None:
            return self._calls.refuse(MalformedMessage("a call is a binary message"))[1]
        return (await self._calls.answer(body, arrived_s))[1]

    def renew_sockets(self) -> None:
        """Closes the WebSockets that were opened with a lower body limit than a call may have now."""
        if self._native is not None:
            self._native.renew(self._slices.limit_bytes)
        for socket, state in self._sockets.items():
            if state.limit_bytes < self._slices.limit_bytes and not state.busy:
                state.closing = self._loop.create_task(socket.close(code=1012, message=b"the body limit has grown"))


class _SocketState:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.busy = False
        self.closing: asyncio.Task[bool] | None = None


class _LimitedServer(web.Server):
    """Turns connections away above the limit. Counted as they are made: many can be accepted before one of them is."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > wire.MAX_CONNECTIONS:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            transport.close()


def _stop_reading(transport: asyncio.Transport) -> None:
    # A transport that was closed meanwhile has nothing to stop, and says so by an error.
    if not transport.is_closing():
        transport.pause_reading()


def _refuse_browser(request: web.BaseRequest) -> None:
    # Browsers send Origin with every request that a foreign page makes; routers never do.
    if "Origin" in request.headers:
        raise MalformedMessage("expert calls are not taken from web pages")
