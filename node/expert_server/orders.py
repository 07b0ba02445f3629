"""The parent's orders to an expert server, JSON lines on stdin, and what the parent is told, JSON lines on stdout.

docs/protocol.md, "Expert control". The process ends with its parent, at end-of-file on stdin, within 2 s of SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from node import parent_death
from node.expert_server.calls import ExpertCalls
from node.expert_server.held_slices import SliceHolder
from node.expert_server.speed import DeviceSpeed
from node.slices import Slice

log = logging.getLogger(__name__)

MAX_ORDER_BYTES = 16 * 1024 * 1024
STOP_WITHIN_S = 1.5
# The parent gets the counters when calls were made, this long after the last time.
STATISTICS_PERIOD_S = 1.0


class Parent:
    """Who started this process, and is told things. `stopped` is set when it wants this process to end, or is gone."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.stopped = asyncio.Event()

    def say(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=self._out, flush=True)
        except OSError:
            self.stopped.set()  # Nobody listens any more.

    def can_listen(self) -> bool:
        """Whether the pipe has room: one that is stuck must not hold up the calls."""
        return bool(select.select([], [self._out], [], 0)[1])

    def stop(self) -> None:
        """Ends the process soon, whatever its threads do."""
        parent_death.exit_after(STOP_WITHIN_S, 0)
        self.stopped.set()


class Orders:
    """Takes the parent's orders and carries them out. `on_answer` is called before the parent is told of each slice."""

    def __init__(self, parent: Parent, slices: SliceHolder, on_answer: Callable[[], None]) -> None:
        self._parent = parent
        self._slices = slices
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Reads stdin in a thread from now on."""
        parent_death.read_lines(sys.stdin.buffer, self._on_line, self._on_end, MAX_ORDER_BYTES)

    def _on_line(self, line: bytes) -> None:
        self._loop.call_soon_threadsafe(self._take, line)

    def _on_end(self) -> None:
        # First, since the loop may be stuck or closed.
        parent_death.exit_after(STOP_WITHIN_S, 0)
        self._loop.call_soon_threadsafe(self._parent.stopped.set)

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
                await self._slices.load(order, self._report)
            elif kind == "drop":
                key = {name: order[name] for name in ("model", "layer", "first", "last")}
                dropped = Slice(int(key["layer"]), int(key["first"]), int(key["last"]))
                await self._slices.drop(key["model"], dropped)
                self._parent.say({"type": "dropped", **key})
            elif kind == "stop":
                self._parent.stop()
            else:
                log.error("the parent sent an order of unknown type '%s'", kind)
        except Exception:  # the parent's fault, or ours: calls go on being answered
            log.exception("an order of the parent could not be carried out")

    def _report(self, answer: dict[str, Any]) -> None:
        self._on_answer()
        self._parent.say(answer)


async def report_speed(parent: Parent, speed: DeviceSpeed) -> None:
    """Measures the device and tells the parent, 0 when it cannot be measured."""
    await speed.measure()
    parent.say({"type": "speed", "expert_bytes_per_s": speed.bytes_per_s})


async def report_statistics(parent: Parent, calls: ExpertCalls) -> None:
    """Tells the parent the counters, whenever there were calls; until cancelled."""
    told = calls.counters()
    while True:
        await asyncio.sleep(STATISTICS_PERIOD_S)
        now = calls.counters()
        if now != told and parent.can_listen():
            told = now
            parent.say({"type": "statistics", **now})
