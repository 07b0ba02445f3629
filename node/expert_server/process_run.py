"""One life of an expert server process: orders go to its stdin, answers and news come from its stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.errors import ExpertProcessError, ExpertProcessExited
from node.log_files import open_log
from node.parent_death import child_environment
from node.slices import Slice

log = logging.getLogger(__name__)

STOP_STEPS_S = (2.0, 1.0, 1.0)
MAX_ANSWER_BYTES = 1024 * 1024

# The kind of order, the model and the slice that an answer is for.
_Key = tuple[str, str, Slice]
_ORDER_OF_ANSWER = {"ready": "load", "failed": "load", "dropped": "drop"}


class ProcessRun:
    """A process that was started. Made by :meth:`start`; the thread that made it must live as long as the program."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_told: Callable[[Mapping[str, Any]], None],
        on_exit: Callable[[str, int | None], None],
    ) -> None:
        self._name = name
        self._process = process
        self._on_told = on_told
        self._on_exit = on_exit
        self._listening: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers: dict[_Key, asyncio.Future[dict[str, Any]]] = {}
        self.exited = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        stderr: Path | None,
        *,
        on_told: Callable[[Mapping[str, Any]], None],
        on_exit: Callable[[str, int | None], None],
    ) -> ProcessRun:
        """Starts the process; `environment` is added to this one's, `stderr` appended to.

        `on_told` gets each message that answers no order; KeyError, TypeError and ValueError from it mean that the
        message makes no sense. `on_exit` is called with the cause and the return code when the process has ended.
        Raises OSError.
        """
        with contextlib.ExitStack() as files:
            log_file = None if stderr is None else files.enter_context(open_log(stderr))
            # A session of its own, so that Ctrl-C in the terminal reaches only this process, which stops the child.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                env=child_environment(environment),
                start_new_session=True,
                limit=MAX_ANSWER_BYTES,
            )
        return cls(name, process, on_told, on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As in `subprocess`; None while it runs."""
        return self._process.returncode

    @property
    def is_listening(self) -> bool:
        """Whether it has begun to listen, or has ended before."""
        return self._listening.done()

    async def listens(self) -> dict[str, Any]:
        """What it says when it begins to listen. Raises ExpertProcessExited."""
        return await asyncio.shield(self._listening)

    def expects(self, order: str, model: str, one: Slice) -> bool:
        """Whether the answer to such an order is still to come."""
        return (order, model, one) in self._answers

    def expect(self, order: str, model: str, one: Slice) -> asyncio.Future[dict[str, Any]]:
        """The answer to an order that will be sent. Raises ExpertProcessError when there is such an order already."""
        if self.expects(order, model, one):
            raise ExpertProcessError(
                f"experts {one.first} to {one.last} have an order already", node=self._name, layer=one.layer
            )
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # The one who waits can be gone when the process ends.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._answers[order, model, one] = answer
        return answer

    async def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # When the process has ended, whoever waits for the answer learns that from `_read`.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def end(self) -> None:
        """Ends it, by force if need be, within 4 s. Raises ExpertProcessError."""
        for step, seconds in enumerate(STOP_STEPS_S):
            with contextlib.suppress(ProcessLookupError, ConnectionError, RuntimeError):
                self._ask_to_end(step)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited.wait(), seconds)
                return
        raise ExpertProcessError(f"process {self.pid} does not end, not even when killed", node=self._name)

    def _ask_to_end(self, step: int) -> None:
        if step:
            self._process.send_signal(signal.SIGTERM if step == 1 else signal.SIGKILL)
        elif self._process.stdin is not None:
            self._process.stdin.write(b'{"type": "stop"}\n')
            self._process.stdin.close()

    async def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                self._take(line)
        except ValueError:
            log.error("%s: the expert server wrote a line above %d bytes", self._name, MAX_ANSWER_BYTES)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        returncode = await self._process.wait()
        cause = ending(returncode)
        self.exited.set()
        error = ExpertProcessExited(cause, node=self._name, returncode=returncode)
        for answer in (self._listening, *self._answers.values()):
            if not answer.done():
                answer.set_exception(error)
        self._listening.cancelled() or self._listening.exception()
        self._on_exit(cause, returncode)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            kind = message["type"]
            if kind == "listening":
                if not self._listening.done():
                    self._listening.set_result(message)
                return
            order = _ORDER_OF_ANSWER.get(kind)
            if order is None:
                self._on_told(message)
                return
            answer = self._answers.pop((order, message["model"], message_slice(message)))
        except (ValueError, KeyError, TypeError):
            log.error("%s: the expert server wrote a line that answers nothing: %r", self._name, line[:200])
            return
        if not answer.done():
            answer.set_result(message)


def message_slice(message: Mapping[str, Any]) -> Slice:
    """The slice that a message is about. Raises KeyError."""
    return Slice(message["layer"], message["first"], message["last"])


def ending(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is not None and returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        hint = ": this build is for another CPU; `swarm-node doctor` says more" if name == "SIGILL" else ""
        return f"the expert server was ended by {name}{hint}"
    return f"the expert server ended with code {returncode}"
