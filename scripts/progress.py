"""Runs a command, keeps all that it writes in a log, and says how far it is.

    python3 scripts/progress.py --log FILE WHAT COMMAND …

WHAT is said at once ("swarm-node: WHAT"). On a terminal one line is redrawn every second; elsewhere a line is written
every ten seconds. Of pip's output the package in work is shown, of a build by ninja its steps and about how many
minutes are left. The end of the log is shown only if the command fails; its exit status is passed on.

Needs nothing but Python: scripts/setup calls it before anything is installed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

TAIL_LINES = 60
"""How much of the log is shown when the command fails."""

TERMINAL_SECONDS, PLAIN_SECONDS = 1.0, 10.0
"""Between two lines of progress."""

ESTIMATE_AFTER_SECONDS = 10.0
"""A build is observed that long before its end is guessed."""

WHOLE_BUILD_STEPS = 100
"""From here on it is taken for a build from nothing."""

WHOLE_BUILD = (0.0, 0.03, 0.09, 0.18, 0.5, 0.63, 0.8, 0.85, 0.93, 0.96, 1.0)
"""The share of such a build's time that has passed after each tenth of its steps, as measured of the demo's."""

_STEP = re.compile(r"\s*\[(\d+)/(\d+)\] ")
_PIP = re.compile(
    r"\s*(Collecting|Downloading|Building wheel for|Installing collected packages)\b:? ([\w.]+(?:-[A-Za-z_][\w.]*)*)"
)
_PHASES = (
    ("*** Configuring CMake", "configuring"),
    ("-- Fetching the llama.cpp source", "fetching the source of llama.cpp (76 MB)"),
    ("-- The C compiler identification", "configuring"),
    ("*** Building project", "building"),
    ("*** Installing project", "installing"),
)


def step(line: str) -> tuple[int, int] | None:
    """What ninja has done and has to do, from a line of its output."""
    found = _STEP.match(line)
    return (int(found[1]), int(found[2])) if found else None


def phase(line: str) -> str | None:
    """What begins with this line of pip's or the build's output, if anything does."""
    for start, name in _PHASES:
        if line.strip().startswith(start):
            return name
    found = _PIP.match(line)
    if found is None:
        return None
    # Only the package's name, without versions and tags.
    return "unpacking packages" if found[1].startswith("Installing") else f"{found[1].lower()} {found[2]}"


def time_left(done: int, total: int, seconds: float) -> str:
    """A guess in words, empty while there is nothing to guess from. Steps differ a hundredfold: it is rough."""
    if done <= 0 or seconds < ESTIMATE_AFTER_SECONDS:
        return ""
    share = done / total
    if total >= WHOLE_BUILD_STEPS:
        before = min(int(share * 10), 9)
        share = WHOLE_BUILD[before] + (share * 10 - before) * (WHOLE_BUILD[before + 1] - WHOLE_BUILD[before])
    left = seconds / share - seconds
    return f"about {math.ceil(left / 60)} min left" if left > 50 else "less than a minute left"


class Progress:
    """What is known of the command from its output so far."""

    def __init__(self, what: str, started: float) -> None:
        self.what = what
        self.started = started
        self._phase = ""
        self._steps: tuple[int, int] | None = None
        self._building_since = started

    def read(self, line: str, now: float) -> None:
        found = step(line)
        if found is not None:
            if self._steps is None:
                self._building_since = now
            self._steps = found
            return
        begun = phase(line)
        if begun is not None:
            self._phase, self._steps = begun, None

    def line(self, now: float) -> str:
        if self._steps is None:
            passed = f"{now - self.started:.0f} s"
            return ", ".join(part for part in (f"swarm-node: {self.what}", self._phase, passed) if part)
        done, total = self._steps
        left = time_left(done, total, now - self._building_since)
        return f"swarm-node: [{done}/{total}]" + (f", {left}" if left else "")


class Screen:
    """Writes the lines: over each other on a terminal, else one below the other and seldom."""

    def __init__(self, out: TextIO, now: float) -> None:
        self._out = out
        self._terminal = out.isatty()
        self.seconds = TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS
        self._due = now + self.seconds
        self._drawn = False

    def say(self, text: str) -> None:
        self.clear()
        self._out.write(text + "\n")
        self._out.flush()

    def show(self, text: str, now: float) -> None:
        if now < self._due:
            return
        self._due = now + self.seconds
        if not self._terminal:
            self.say(text)
            return
        # Never as wide as the terminal: a line that wraps cannot be drawn over.
        self._out.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
        self._out.flush()
        self._drawn = True

    def wait_seconds(self, now: float) -> float:
        return max(0.0, self._due - now)

    def clear(self) -> None:
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._drawn = False


def run(what: str, command: Sequence[str], log: BinaryIO, out: TextIO) -> int:
    """The command's exit status."""
    now = time.monotonic()
    screen, progress = Screen(out, now), Progress(what, now)
    screen.say(f"swarm-node: {what}")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], screen.wait_seconds(time.monotonic()))
        now = time.monotonic()
        if ready:
            got = os.read(descriptor, 1 << 16)
            if not got:
                break
            log.write(got)
            log.flush()
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                progress.read(line.decode(errors="replace"), now)
        screen.show(progress.line(now), now)
    status = process.wait()
    seconds = time.monotonic() - progress.started
    if status == 0 and seconds >= PLAIN_SECONDS:
        screen.say(f"swarm-node: {what}: done in {seconds:.0f} s")
    else:
        screen.clear()
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--log", type=Path, required=True, help="the command's output is appended to this file")
    parser.add_argument("what", help="said at once, in words")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    with arguments.log.open("ab") as log:
        start = log.tell()
        try:
            status = run(arguments.what, arguments.command, log, sys.stderr)
        except KeyboardInterrupt:
            sys.exit(130)
    if status != 0:
        with arguments.log.open("rb") as log_read:
            log_read.seek(start)
            lines = log_read.read().decode(errors="replace").splitlines()
        print(*lines[-TAIL_LINES:], sep="\n", file=sys.stderr)
        command = shlex.join(arguments.command)
        print(f"swarm-node: failed: {command} (whole log: {arguments.log})", file=sys.stderr)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
