"""The parent's side of an expert server: starts the process, gives it orders, starts it again when it crashed.

ggml answers most failures with abort(). In a process of its own that costs the slices for some seconds only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.errors import ExpertProcessError, ExpertProcessExited, ExpertProcessGaveUp, SwarmError
from node.expert_server import wire
from node.expert_server.process_run import ProcessRun, ending, message_slice
from node.metrics import Counters
from node.parent_death import NO_BACKTRACE
from node.paths import PYTHON_MODULE
from node.slices import Slice

log = logging.getLogger(__name__)

START_WITHIN_S = 60.0
BACK_OFF_FIRST_S = 0.2
BACK_OFF_MOST_S = 5.0
MAX_CRASHES = 5
CRASH_WINDOW_S = 60.0

# NumPy's threads wait busily for work, which costs the threads that answer calls.
_ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1", "VECLIB_MAXIMUM_THREADS": "1"}

#: An expert server of this build.
SERVER_COMMAND = (*PYTHON_MODULE, "node.expert_server")


@dataclass(frozen=True)
class SliceOrder:
    """A slice to load. `tensors`: per name `type`, `ne` and `parts`, as in docs/protocol.md ("Expert control").
    `sha256`: of each expert's bytes, 64 hex digits each, as the model's manifest says; empty: they are not
    compared."""

    slice: Slice
    tensors: Mapping[str, Mapping[str, Any]]
    sha256: Sequence[str] = ()


@dataclass(frozen=True)
class SliceAnswer:
    """What became of a slice order. `reason` is why it failed, None when the slice is ready. `note`: why a slice that
    is ready is not on the device that it was meant for."""

    slice: Slice
    memory_bytes: int
    reason: str | None
    note: str = ""


@dataclass(frozen=True)
class ProcessEvent:
    """`kind`: started, exited, reloaded (all that it held before a crash is back), withdrawn (a slice) or gave_up."""

    kind: str
    message: str
    returncode: int | None = None


@dataclass(frozen=True)
class _HeldSlice:
    """What it takes to load a slice again."""

    program: str
    n_expert: int
    n_used: int
    order: SliceOrder


class ExpertProcess:
    """An expert server process. Used on one event loop, whose thread must live as long as the program."""

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        device: str = "auto",
        threads: int = 0,
        max_rows: int = 512,
        command: Sequence[str] = SERVER_COMMAND,
        environment: Mapping[str, str] | None = None,
        stderr: Path | None = None,
        start_within_s: float = START_WITHIN_S,
        measures_speed: bool = False,
        check_files: Callable[[str], None] = lambda model: None,
        on_event: Callable[[ProcessEvent], None] | None = None,
        on_withdrawn: Callable[[str, SliceAnswer], None] = lambda model, answer: None,
    ) -> None:
        """`host`: an address to listen on, or `*` for all of this machine. `environment` is added to this process's;
        `stderr` is appended to (None: this process's). A process that does not listen within `start_within_s` is
        ended; an emulated one takes longer than others. `measures_speed`: whether the server shall measure its device
        when it starts; it is not asked again after a crash.

        `check_files` is called in a thread with a model's id before its slices are loaded again after a crash; it
        raises SwarmError when the files are not what they were. `on_withdrawn` is told of a slice of a model that was
        ready and is not any more, and why.
        """
        self.name = name
        self._options: dict[str, str | int] = {
            "host": host,
            "port": port,
            "device": device,
            "threads": threads,
            "max-rows": max_rows,
            "name": name,
        }
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._stderr = stderr
        self._start_within_s = start_within_s
        self._measures_speed = measures_speed
        self._check_files = check_files
        self._on_event = on_event
        self._on_withdrawn = on_withdrawn
        self._run: ProcessRun | None = None
        self._held: dict[tuple[str, Slice], _HeldSlice] = {}
        self._held_bytes: dict[tuple[str, Slice], int] = {}
        self._stop_requested = asyncio.Event()
        #: What the server said when it began to listen: version, build, host, port, device, devices.
        self.listening: dict[str, Any] = {}
        #: Expert weights that its device reads in a second; 0: not measured.
        self.expert_bytes_per_s = 0.0
        #: Numbers of calls, in all lives of the server: calls, pairs, bytes_received, bytes_sent, queue_us, compute_us,
        #: and those refused as "errors KIND".
        self.counters: Counters[str] = Counters(names_max=64)

    @property
    def port(self) -> int:
        """The port it listens on; 0 before it was started."""
        return int(self.listening.get("port", 0))

    @property
    def pid(self) -> int | None:
        return None if self._run is None else self._run.pid

    @property
    def held_bytes(self) -> int:
        """Memory of the slices that are ready."""
        return sum(self._held_bytes.values())

    @property
    def held(self) -> frozenset[tuple[str, Slice]]:
        """Models and their slices that were loaded, and will be again after a crash."""
        return frozenset(self._held)

    @property
    def running(self) -> bool:
        return self._run is not None and self._run.is_listening and not self._run.exited.is_set()

    async def start(self) -> None:
        """Starts the process and waits until it listens. Raises ExpertProcessError."""
        if self._run is not None and not self._run.exited.is_set():
            raise ExpertProcessError("the expert server runs already", node=self.name)
        self._stop_requested.clear()
        await self._start()

    async def load(
        self,
        model: str,
        programs: Mapping[int, str],
        n_expert: Mapping[int, int],
        n_used: Mapping[int, int],
        slices: Sequence[SliceOrder],
        on_answer: Callable[[SliceAnswer], None] | None = None,
    ) -> list[SliceAnswer]:
        """Has slices loaded; the mappings are by layer.

        Returns an answer for each order, in their order, when all are there; `on_answer` gets each as it comes. Raises
        ExpertProcessExited when the process ends meanwhile.
        """
        held = [
            _HeldSlice(programs[one.slice.layer], n_expert[one.slice.layer], n_used[one.slice.layer], one)
            for one in slices
        ]
        return await self._load(self._current(), model, held, on_answer)

    async def drop(self, model: str, dropped: Slice) -> None:
        """Has a slice dropped and waits until it is. Raises ExpertProcessExited."""
        run = self._current()
        self._held.pop((model, dropped), None)
        self._held_bytes.pop((model, dropped), None)
        answer = run.expect("drop", model, dropped)
        await run.send({"type": "drop", "model": model, **dropped._asdict()})
        await answer

    async def wait(self) -> int:
        """Waits until the process has ended; its return code as in `subprocess`. Raises ExpertProcessError."""
        run = self._run
        if run is None:
            raise ExpertProcessError("the expert server was not started", node=self.name)
        await run.exited.wait()
        return run.returncode or 0

    async def stop(self) -> None:
        """Ends the process, by force if need be, within 4 s; and `supervise` with it."""
        self._stop_requested.set()
        run = self._run
        if run is not None:
            await run.end()

    async def supervise(self) -> None:
        """Starts the process again whenever it ends, and has it load what it held; until `stop`.

        Waits 0.2 s before a restart, after each further crash twice as long, up to 5 s. Raises ExpertProcessGaveUp
        after 5 crashes in 60 s. A port other than 0 stays the same.
        """
        crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        while True:
            cause = await self._crash()
            if cause is None:
                return
            now_s = time.monotonic()
            crashes.append(now_s)
            recent = sum(1 for crash_s in crashes if now_s - crash_s <= CRASH_WINDOW_S)
            if recent >= MAX_CRASHES:
                message = f"the expert server crashed {recent} times in {CRASH_WINDOW_S:.0f} s, the last time: {cause}"
                self._tell("gave_up", message)
                raise ExpertProcessGaveUp(f"{message}; its log says why", node=self.name)
            delay_s = min(BACK_OFF_MOST_S, BACK_OFF_FIRST_S * 2 ** (recent - 1))
            log.warning("%s: %s; starting it again in %.1f s", self.name, cause, delay_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), delay_s)
                return

    async def _crash(self) -> str | None:
        """Why the process ended, or could not be started and filled again; None when it was stopped on purpose."""
        try:
            if self._run is None or self._run.exited.is_set():
                await self._start()
                await self._reload()
            run = self._current()
            await run.exited.wait()
            cause = ending(run.returncode)
        except (SwarmError, OSError) as error:
            cause = str(error)
            if self._run is not None and not self._run.exited.is_set():
                await self._run.end()
        return None if self._stop_requested.is_set() else cause

    async def _start(self) -> None:
        arguments = [text for name, value in self._options.items() for text in (f"--{name}", str(value))]
        if self._measures_speed:
            arguments.append("--measure")
            self._measures_speed = False
        run = self._run = await ProcessRun.start(
            self.name,
            (*self._command, *arguments),
            {**NO_BACKTRACE, **_ONE_BLAS_THREAD, **self._environment},
            self._stderr,
            on_told=self._told,
            on_exit=self._exited,
        )
        try:
            if self._stop_requested.is_set():
                raise ExpertProcessError("the expert server was stopped while it started", node=self.name)
            listening = await asyncio.wait_for(run.listens(), self._start_within_s)
            if listening.get("version") != wire.VERSION:
                raise ExpertProcessError(
                    f"the expert server speaks protocol {listening.get('version')}, this program {wire.VERSION}",
                    node=self.name,
                )
        except TimeoutError:
            await run.end()
            message = f"the expert server did not listen within {self._start_within_s:.0f} s"
            raise ExpertProcessError(message, node=self.name) from None
        except BaseException:
            await run.end()
            raise
        self.listening = listening
        self._tell("started", f"the expert server listens on {listening.get('host')}:{self.port}")

    async def _reload(self) -> None:
        """Has everything loaded that was held before. A slice that cannot be loaded any more is no longer held."""
        by_model: dict[str, list[_HeldSlice]] = {}
        for (model, _), held in self._held.items():
            by_model.setdefault(model, []).append(held)
        if not by_model:
            return
        failed = []
        for model, slices in by_model.items():
            try:
                await asyncio.to_thread(self._check_files, model)
            except SwarmError as error:
                for held in slices:
                    self._held.pop((model, held.order.slice), None)
                failed.append(str(error))
                continue
            for answer in await self._load(self._current(), model, slices, None):
                if answer.reason is not None:
                    self._held.pop((model, answer.slice), None)
                    failed.append(f"{answer.slice}: {answer.reason}")
        self._tell("reloaded", "; ".join(failed) or "all slices are ready again")

    async def _load(
        self, run: ProcessRun, model: str, slices: Sequence[_HeldSlice], on_answer: Callable[[SliceAnswer], None] | None
    ) -> list[SliceAnswer]:
        order = {
            "type": "load",
            "model": model,
            "programs": {str(held.order.slice.layer): held.program for held in slices},
            "n_expert": {str(held.order.slice.layer): held.n_expert for held in slices},
            "n_used": {str(held.order.slice.layer): held.n_used for held in slices},
            "slices": [
                {**one.slice._asdict(), "tensors": one.tensors} | ({"sha256": list(one.sha256)} if one.sha256 else {})
                for one in (held.order for held in slices)
            ],
        }
        ordered = {held.order.slice for held in slices}
        if len(ordered) != len(slices) or any(run.expects("load", model, one) for one in ordered):
            raise ExpertProcessError("a slice is ordered twice", node=self.name)
        waiting = [(held, run.expect("load", model, held.order.slice)) for held in slices]

        async def one(held: _HeldSlice, answer: asyncio.Future[dict[str, Any]]) -> SliceAnswer:
            told = await answer
            reason = None if told["type"] == "ready" else str(told.get("reason", "no reason given"))
            if reason is None:
                self._held[model, held.order.slice] = held
                self._held_bytes[model, held.order.slice] = int(told.get("bytes", 0))
            result = SliceAnswer(held.order.slice, int(told.get("bytes", 0)), reason, str(told.get("note", "")))
            if on_answer is not None:
                on_answer(result)
            return result

        await run.send(order)
        return list(await asyncio.gather(*(one(held, answer) for held, answer in waiting)))

    def _current(self) -> ProcessRun:
        run = self._run
        if run is None or run.exited.is_set():
            raise ExpertProcessExited("the expert server does not run", node=self.name)
        return run

    def _told(self, message: Mapping[str, Any]) -> None:
        """Takes what the server says without having been asked. Raises KeyError, TypeError or ValueError."""
        kind = message["type"]
        if kind == "speed":
            self.expert_bytes_per_s = _number(message["expert_bytes_per_s"])
        elif kind == "statistics":
            self.counters.take(_counters(message))
        elif kind == "withdrawn":
            self._withdrawn(message)
        else:
            raise ValueError(f"a message of unknown type {kind!r}")

    def _exited(self, cause: str, returncode: int | None) -> None:
        self._held_bytes.clear()
        self.counters.restarted()
        self._tell("exited", cause, returncode)

    def _withdrawn(self, message: Mapping[str, Any]) -> None:
        model, withdrawn, reason = message["model"], message_slice(message), str(message["reason"])
        self._held.pop((model, withdrawn), None)
        self._held_bytes.pop((model, withdrawn), None)
        self._tell("withdrawn", f"{withdrawn}: {reason}")
        self._on_withdrawn(model, SliceAnswer(withdrawn, 0, reason))

    def _tell(self, kind: str, message: str, returncode: int | None = None) -> None:
        if self._on_event is not None:
            self._on_event(ProcessEvent(kind, message, returncode))


def _counters(message: Mapping[str, Any]) -> dict[str, float]:
    names = ("calls", "pairs", "bytes_received", "bytes_sent", "queue_us", "compute_us")
    refused = {f"errors {kind}": _number(count) for kind, count in message["errors"].items()}
    return {name: _number(message[name]) for name in names} | refused


def _number(value: object) -> float:
    """Raises ValueError unless it is a finite number of at least 0."""
    # Also false for NaN, and for an int that is too long for a float.
    if not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError("not a finite number of at least 0")
    return float(value)
