"""The expert server: a process that holds expert slices and answers expert calls. docs/protocol.md is its contract.

    python -m node.expert_server --host 127.0.0.1 --port 0 --device auto --threads 0 --max-rows 512 --name alpha

Calls come over HTTP (`POST /v1/ffn`, or a WebSocket on the same path), orders from the parent over stdin; answers to
those go to stdout, logs to stderr. The process ends with its parent, at end-of-file on stdin, within 2 s of SIGTERM.
Nothing that comes over the network names a file. A WebSocket keeps the body limit that it was opened with; when a wider
layer is loaded, the server closes it with code 1012 between two calls, and the caller connects again.

Fault injection for tests, from the environment:
    SWARM_DEBUG_ABORT=1     a call for the model id "abort" ends the process with abort(), as a failed assertion does
    SWARM_NODE_POLL_US=n         see node/environment.py
    SWARM_DEBUG_SLEEP_S=x   every call sleeps x seconds in the worker thread before it computes
And for measurements:
    SWARM_DEBUG_CALLS=folder  the layer and experts of every answered call, as a JSON line in folder/NAME.jsonl; no call is
                            answered by native threads then
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast

import numpy as np
from aiohttp import WSMsgType, web

from node import environment, parent_death
from node.bounded_msgpack import LARGE_BYTES, Body
from node.errors import CallRefused, MalformedMessage, NotAuthenticated
from node.expert_server import speed, wire
from node.expert_server.calls import ExpertCalls
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.guard import CallGuard
from node.expert_server.held_slices import SliceHolder
from node.expert_server.native_calls import NativeCalls
from node.log_levels import apply_levels, levels_from_environment
from node.swarm_key import STREAMED, Accepted

log = logging.getLogger(__name__)

#: The host that stands for every address of this machine, IPv4 and IPv6.
EVERY_ADDRESS = "*"
# How a machine without IPv6 refuses to listen there.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

MAX_ORDER_BYTES = 16 * 1024 * 1024
STOP_WITHIN_S = 1.5
# A caller that neither sends nor takes anything of a message for so long is cut off: it holds connection and memory.
SILENCE_S = 10.0
IDLE_CONNECTION_S = 75.0
LINGER_S = 1.0
# The parent gets the counters when calls were made, this long after the last time.
STATISTICS_PERIOD_S = 1.0


class ExpertServer:
    """Answers expert calls with the slices it was told to load. Made on a running event loop; `kernels` computes."""

    def __init__(
        self, kernels: ModuleType, *, device: str = "auto", threads: int = 0, max_rows: int = 512, name: str = "node"
    ) -> None:
        self._name = name
        self._kernels = kernels
        self._device = device
        self._threads = threads
        # Of expert weights that the device reads; 0: not measured.
        self.bytes_per_s = 0.0
        self._loop = asyncio.get_running_loop()
        delay_s = float(os.environ.get(environment.DEBUG_SLEEP_S, "0"))
        self._compute = ComputeQueue("compute", wire.MAX_WAITING_CALLS, delay_s)
        self.slices = SliceHolder(kernels, device, threads, max_rows, self._compute)
        self._calls = ExpertCalls(kernels, self.slices, self._compute)
        self._native: NativeCalls | None = None
        calls_folder = os.environ.get(environment.DEBUG_CALLS, "")
        if calls_folder:
            self._calls.recording = Path(calls_folder, f"{name}.jsonl").open("a", buffering=1)  # noqa: SIM115 - as long as it lives
        elif NativeCalls.possible(kernels):
            self._native = NativeCalls(
                kernels,
                device,
                max_rows,
                max_waiting=wire.MAX_WAITING_CALLS,
                poll_us=environment.poll_us(),
                delay_s=delay_s,
                answer=self._answer_message,
            )
            self.slices.on_change = self._native.publish
            self._calls.on_term = self._native.set_term
            self._calls.other_counters = self._native.counters
            self._compute.others_waiting = self._native.waiting
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
        self._guard = CallGuard.from_environment()

    async def listen(self, host: str, port: int) -> int:
        """Starts to answer; returns the port. ``host``: an address, or EVERY_ADDRESS. Raises OSError when it cannot be used."""
        # One port for both: the node's record names one, and callers come to the address at which the node answered them.
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

    async def load(self, order: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        """Carries out a `load` order; see SliceHolder.load."""

        def reported(answer: dict[str, Any]) -> None:
            self._renew_sockets()
            report(answer)

        await self.slices.load(order, reported)

    async def measure_speed(self) -> None:
        """Sets ``bytes_per_s``, if it can be measured; about half a second, in which calls wait as for another call."""
        try:
            work = partial(speed.expert_bytes_per_s, self._kernels, self._device, self._threads)
            self.bytes_per_s = await self._compute.run(work)
        except Exception as error:  # whatever a device cannot do: slices are tested by themselves
            log.warning("the speed of %s could not be measured: %s: %s", self._device, type(error).__name__, error)

    def statistics(self) -> dict[str, Any]:
        """Counters of calls since the start, and under ``errors`` those refused, by kind."""
        return {name: value for name, value in self._calls.statistics().items() if name != "terms"}

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
        missing = [held.describe() for held in self.slices.slices() if held.state != "ready"]
        return web.json_response({"ready": not missing, "missing": missing}, status=503 if missing else 200)

    def _stats(self) -> web.Response:
        return web.json_response(
            {
                "name": self._name,
                "body_limit_bytes": self.slices.limit_bytes,
                "connections": len(self._http.connections),
                "waiting": self._compute.waiting,
                "expert_bytes_per_s": self.bytes_per_s,
                "native_calls": 0 if self._native is None else self._native.counters()["calls"],
                **self._calls.statistics(),
                "slices": [{**held.describe(), "bytes": held.memory_bytes} for held in self.slices.slices()],
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
        limit = self.slices.limit_bytes
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
        limit = self.slices.limit_bytes
        if self.slices.is_coming:
            return CallRefused("slices are still loading", kind="not_ready", retry=True)
        return CallRefused(f"the body has {size}, the limit for the layers held here is {limit}", kind="too_large")

    async def _socket(self, request: web.BaseRequest, accepted: Accepted | None) -> web.StreamResponse:
        limit = self.slices.limit_bytes
        try:
            _refuse_browser(request)
            if self.slices.is_coming and not any(held.state == "ready" for held in self.slices.slices()):
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
            await self._native.serve(transport, limit, SILENCE_S, LINGER_S)
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
                    if state.limit_bytes < self.slices.limit_bytes:
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

    def _renew_sockets(self) -> None:
        if self._native is not None:
            self._native.renew(self.slices.limit_bytes)
        for socket, state in self._sockets.items():
            if state.limit_bytes < self.slices.limit_bytes and not state.busy:
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


class Control:
    """The parent's orders, from stdin, and the answers, to stdout."""

    def __init__(self, server: ExpertServer, out: TextIO) -> None:
        self._server = server
        self._out = out
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopped = asyncio.Event()

    def start(self) -> None:
        parent_death.read_lines(sys.stdin.buffer, self._on_line, self._on_end, MAX_ORDER_BYTES)

    def say(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self._out, flush=True)
        except OSError:
            self.stopped.set()  # Nobody listens any more.

    async def measure_speed(self) -> None:
        """Measures the device and tells the parent, 0 when it cannot be measured."""
        await self._server.measure_speed()
        self.say({"type": "speed", "expert_bytes_per_s": self._server.bytes_per_s})

    async def report_statistics(self) -> None:
        """Tells the parent the counters, whenever there were calls; until cancelled."""
        told = self._server.statistics()
        while True:
            await asyncio.sleep(STATISTICS_PERIOD_S)
            now = self._server.statistics()
            # A parent that is stuck must not hold up the calls: without room in the pipe, writing would wait.
            if now != told and select.select([], [self._out], [], 0)[1]:
                told = now
                self.say({"type": "statistics", **now})

    def stop(self) -> None:
        parent_death.exit_after(STOP_WITHIN_S, 0)
        self.stopped.set()

    def _on_line(self, line: bytes) -> None:
        self._loop.call_soon_threadsafe(self._take, line)

    def _on_end(self) -> None:
        # First, since the loop may be stuck or closed.
        parent_death.exit_after(STOP_WITHIN_S, 0)
        self._loop.call_soon_threadsafe(self.stopped.set)

    def _take(self, line: bytes) -> None:
        task = self._loop.create_task(self._obey(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _obey(self, line: bytes) -> None:
        try:
            order = json.loads(line)
            kind = order["type"]
            log.debug("order '%s' of %d slices", kind, len(order.get("slices", ())) or int("layer" in order))
            if kind == "load":
                await self._server.load(order, self.say)
            elif kind == "drop":
                key = {name: order[name] for name in ("model", "layer", "first", "last")}
                await self._server.slices.drop(key["model"], int(key["layer"]), int(key["first"]), int(key["last"]))
                self.say({"type": "dropped", **key})
            elif kind == "stop":
                self.stop()
            else:
                log.error("the parent sent an order of unknown type '%s'", kind)
        except Exception:  # the parent's fault, or ours: calls go on being answered
            log.exception("an order of the parent could not be carried out")


async def serve(kernels: ModuleType, options: argparse.Namespace, out: TextIO) -> None:
    """Runs the server until the parent, a signal or end-of-file ends it."""
    server = ExpertServer(
        kernels, device=options.device, threads=options.threads, max_rows=options.max_rows, name=options.name
    )
    server.slices.proves = not options.unproved
    control = Control(server, out)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, control.stop)
    port = await server.listen(options.host, options.port)
    fields = ("name", "description", "type", "memory_free_bytes", "memory_total_bytes")
    devices = [{field: getattr(device, field) for field in fields} for device in kernels.devices()]
    control.say(
        {
            "type": "listening",
            "version": wire.VERSION,
            "build": kernels.build_id(),
            "host": options.host,
            "port": port,
            "device": options.device,
            "devices": devices,
        }
    )
    server.slices.on_withdrawn = control.say
    control.start()
    asides = [asyncio.create_task(control.report_statistics())]
    if options.measure:
        asides.append(asyncio.create_task(control.measure_speed()))
    await control.stopped.wait()
    for aside in asides:
        aside.cancel()
    await server.close()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m node.expert_server", description="Serves expert FFN calls.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, * for all (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0: one that is free, reported on stdout")
    parser.add_argument("--device", default="auto", help="device to compute on (default: the best that can)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: from the CPU quota")
    parser.add_argument("--max-rows", type=int, default=512, help="rows of one call at most (default: %(default)s)")
    parser.add_argument("--name", default="node", help="name of the node, for logs and status")
    parser.add_argument(
        "--measure", action="store_true", help="measure how fast the device reads experts, at the start"
    )
    parser.add_argument(
        "--unproved",
        action="store_true",
        help="slices are ready without having proved themselves: to measure a device, right or wrong, and never in a swarm",
    )
    options = parser.parse_args(arguments)
    if options.max_rows < 1 or options.threads < 0 or not 0 <= options.port < 65536:
        parser.error("--max-rows must be at least 1, --threads at least 0, --port a port")
    return options


def main(arguments: list[str] | None = None, kernels: ModuleType | None = None) -> None:
    """Runs the process and ends it; `kernels` is given by tests that compute without the extension."""
    parent_death.tie_to_parent()
    options = parse_arguments(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {options.name} %(levelname)s %(name)s: %(message)s"
    )
    apply_levels(levels_from_environment())
    # stdout belongs to the protocol: what a library prints there goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if kernels is None:
        import kernels as imported  # type: ignore[import-not-found,unused-ignore]

        kernels = imported
    try:
        options.device = kernels.choose_device(options.device)
        _new_loop().run_until_complete(serve(kernels, options, out))
        code = 0
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        log.error("the expert server cannot run: %s", error)
        code = 1
    # Without waiting for the worker threads: a kernel in mid-call would hold the process for as long as it runs.
    out.flush()
    sys.stderr.flush()
    os._exit(code)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


if __name__ == "__main__":
    main()
