"""A child process dies with its parent, whatever kills the parent.

Two mechanisms, since neither is enough alone: the kernel's parent-death signal (Linux; at once, even when the child is
stuck), and end-of-file on a pipe from the parent (everywhere; needs a child that reads it). Neither needs code between
fork and exec: the child ties itself, or, when it is not our program, is started through this module:

    python -m node.parent_death PROGRAM ARGUMENT …
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO

from node import environment

_PR_SET_PDEATHSIG = 1


# ggml's abort() calls a debugger where there is one, which can take minutes: a child that must die does so at once.
NO_BACKTRACE = {"GGML_NO_BACKTRACE": "1"}


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child that calls `tie_to_parent`, with `extra` added."""
    return {**os.environ, **(extra or {}), environment.PARENT_PID: str(os.getpid())}


def tie_to_parent() -> bool:
    """Has the kernel kill this process (SIGKILL) when its parent ends; exits at once if the parent has ended already.

    Does nothing where the kernel cannot do it, or when the parent did not use `child_environment`; returns whether it
    is done. Linux sends the signal when the *thread* that started the child ends: start children from a thread that
    lives as long as the program, such as the one of its event loop. Survives exec.
    """
    parent = os.environ.pop(environment.PARENT_PID, "")
    if not sys.platform.startswith("linux") or not parent.isdigit():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        return False
    # A parent that ended before the call above has sent no signal, and this process has another parent by now.
    if os.getppid() != int(parent):
        os._exit(1)
    return True


def read_lines(
    stream: BinaryIO, on_line: Callable[[bytes], None], on_end: Callable[[], None], max_line_bytes: int
) -> threading.Thread:
    """Reads `stream` in a thread: `on_line` for each line (without its end), `on_end` at its end or a line too long.

    Both are called in that thread. A thread, because asyncio can read pipes from stdin but not files or terminals, and
    because end-of-file must be noticed when the event loop is stuck.
    """

    def run() -> None:
        try:
            while line := stream.readline(max_line_bytes + 1):
                if len(line) > max_line_bytes:
                    break
                on_line(line.rstrip(b"\r\n"))
        except (OSError, ValueError):
            pass  # A stream that cannot be read any more has ended.
        on_end()

    thread = threading.Thread(target=run, name="parent", daemon=True)
    thread.start()
    return thread


def exit_after(seconds: float, code: int) -> None:
    """Ends the process after that time, whatever its threads do: for a shutdown that could hang."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m node.parent_death PROGRAM ARGUMENT …")
    tie_to_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
