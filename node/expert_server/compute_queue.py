"""One thread that computes, with a bounded queue before it.

A device runs one expert call at a time; the event loop goes on meanwhile because the kernel releases the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from node.errors import CallRefused

T = TypeVar("T")


@dataclass(frozen=True)
class Computed(Generic[T]):
    """What a job returned, how long it waited before it started and how long it ran."""

    value: T
    queue_us: int
    compute_us: int


@dataclass(eq=False)
class _Job:
    # None once the job has run, so that nobody who still waits for something else keeps its arrays alive.
    work: Callable[[], Any] | None
    future: asyncio.Future[Computed[Any]]
    arrived_s: float
    deadline_s: float | None


class ComputeQueue:
    """Runs jobs in order in a thread of its own. All methods are called on the event loop's thread."""

    def __init__(
        self,
        name: str,
        max_waiting: int,
        delay_s: float = 0.0,
        *,
        others_waiting: Callable[[], int] | None = None,
    ) -> None:
        """`delay_s` is slept before every call (not before `run`): a test hook. `others_waiting`: how many calls wait
        for the device without coming through here."""
        self._max_waiting = max_waiting
        self._delay_s = delay_s
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._others_waiting = others_waiting or (lambda: 0)
        # A daemon, since a kernel in mid-call cannot be interrupted and must not hold up the end of the process.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        return self._jobs.qsize() + self._others_waiting()

    async def call(self, work: Callable[[], T], arrived_s: float, deadline_s: float) -> Computed[T]:
        """Runs `work` unless `deadline_s` (as `arrived_s`, of time.monotonic) passes before it starts.

        Raises CallRefused (too_late), or what `work` raised.
        """
        waiting = self.waiting
        if waiting >= self._max_waiting:
            raise CallRefused(f"{waiting} calls are waiting already", kind="too_late", retry=True)
        if time.monotonic() > deadline_s:
            raise _too_late(arrived_s)
        return await self._submit(work, arrived_s, deadline_s)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work`, however long the queue is: for the server's own jobs, of which there is one at a time."""
        return (await self._submit(work, time.monotonic(), None)).value

    def _submit(self, work: Callable[[], T], arrived_s: float, deadline_s: float | None) -> asyncio.Future[Computed[T]]:
        job = _Job(work, self._loop.create_future(), arrived_s, deadline_s)
        self._jobs.put(job)
        return job.future

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            started_s = time.monotonic()
            # A caller that went away has cancelled its future: nobody wants the result.
            if not job.future.cancelled():
                self._compute(job, started_s)
            del job

    def _compute(self, job: _Job, started_s: float) -> None:
        work, job.work = job.work, None
        assert work is not None
        try:
            if job.deadline_s is not None:
                if started_s > job.deadline_s:
                    raise _too_late(job.arrived_s)
                if self._delay_s:
                    time.sleep(self._delay_s)
                    started_s += self._delay_s
            value = work()
        except BaseException as error:  # whatever it is belongs to the one who waits for this job
            self._finish(job.future, None, error)
        else:
            ended_s = time.monotonic()
            queue_us = round(1e6 * (started_s - job.arrived_s))
            self._finish(job.future, Computed(value, queue_us, max(0, round(1e6 * (ended_s - started_s)))), None)

    def _finish(
        self, future: asyncio.Future[Computed[Any]], value: Computed[Any] | None, error: BaseException | None
    ) -> None:
        def deliver() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif value is not None:
                future.set_result(value)

        # A closed loop raises: the process is ending, and nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(deliver)


def _too_late(arrived_s: float) -> CallRefused:
    waited_ms = round(1000 * (time.monotonic() - arrived_s))
    return CallRefused(f"the deadline passed: the call waited {waited_ms} ms", kind="too_late", retry=True)
