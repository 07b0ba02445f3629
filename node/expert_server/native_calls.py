"""Calls over WebSockets answered by a native thread per connection, without the event loop.

Native code (kernels/src/expert_server/call_server.hpp) answers calls that are right in every respect. Every other
message comes back to the event loop, and is answered as one that was posted: what is refused, and how, is decided in
one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from node.bounded_msgpack import Body
from node.expert_server.held_layers import Layer, Model

# Answers a message (None: one that is not binary) that had arrived at the time given, of time.monotonic().
Answer = Callable[[Body | None, float], Awaitable[Body]]


class NativeCalls:
    """The native server of calls, told what is held. Used on the event loop's thread."""

    def __init__(
        self,
        kernels: ModuleType,
        device: str,
        max_rows: int,
        *,
        max_waiting: int,
        poll_us: int,
        delay_s: float,
    ) -> None:
        """`poll_us`: for how long a connection looks for the next call before it sleeps, while a core is free.
        `delay_s` is slept before every call computes: a test hook."""
        self._kernels = kernels
        self._server = kernels.CallServer(kernels.choose_device(device), max_rows, max_waiting, poll_us, delay_s)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[Any, int] = {}

    @staticmethod
    def possible(kernels: ModuleType) -> bool:
        """Whether these kernels have a native server, and a connection can be handed over on this system."""
        return hasattr(kernels, "CallServer") and os.name == "posix"

    def publish(self, model_id: str, model: Model, layer: Layer) -> None:
        """Says which experts of a layer are ready."""
        if not layer.n_in or not layer.ready.any():
            self._server.withdraw(model_id, layer.number)
            return
        self._server.publish(
            model_id,
            layer.number,
            layer.store,
            layer.program.digest,
            layer.n_in,
            layer.n_out,
            layer.n_used,
            layer.program.input == "pair",
            bool(layer.program.uses_weight),
            layer.ready.tobytes(),
        )

    def set_term(self, model_id: str, term: int) -> None:
        """Says the term of the router of a model: calls of another come back."""
        self._server.set_term(model_id, term)

    def waiting(self) -> int:
        """Threads that wait for the device."""
        return int(self._server.waiting)

    def counters(self) -> dict[str, int]:
        """Numbers of the calls answered here, named as in ExpertCalls.counters."""
        return dict(self._server.counters())

    def renew(self, limit_bytes: int) -> None:
        """Closes connections that were opened with a lower limit, with code 1012 and between two calls."""
        for connection, limit in self._connections.items():
            if limit < limit_bytes:
                connection.renew()

    async def serve(
        self, transport: asyncio.Transport, limit_bytes: int, silence_s: float, linger_s: float, answer: Answer
    ) -> None:
        """Takes a connection over, whose upgrade has been answered and whose transport does not read; until it ends.

        `answer` is asked for the messages that are not a call right in every respect. The transport is closed
        afterwards. Raises OSError when there are no descriptors left.
        """
        loop = self._loop
        ended: asyncio.Future[None] = loop.create_future()
        connection: Any = None
        try:
            # The answer to the upgrade goes first.
            deadline_s = time.monotonic() + silence_s
            while transport.get_write_buffer_size():
                if time.monotonic() > deadline_s:
                    return
                await asyncio.sleep(0.001)
            if transport.is_closing():
                return
            descriptor = os.dup(transport.get_extra_info("socket").fileno())
            connection = self._kernels.CallConnection(self._server, descriptor, limit_bytes, silence_s, linger_s)
            self._connections[connection] = limit_bytes

            def end() -> None:
                if not ended.done():
                    ended.set_result(None)

            def answer_from_thread(body: bytes | None, age_s: float) -> Body:
                answering = _answered(answer, body, time.monotonic() - age_s)
                return asyncio.run_coroutine_threadsafe(answering, loop).result()

            def run() -> None:
                # It raises when the loop has ended, or the answer's task: so has the connection.
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    connection.serve(answer_from_thread)
                # A closed loop raises: nobody waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(end)

            # A daemon, since a kernel in mid-call cannot be interrupted and must not hold up the end of the process.
            threading.Thread(target=run, name="calls", daemon=True).start()
            await ended
        finally:
            if connection is not None:
                del self._connections[connection]
                connection.stop()
            transport.abort()


async def _answered(answer: Answer, body: bytes | None, arrived_s: float) -> Body:
    return await answer(body, arrived_s)
