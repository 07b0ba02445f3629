"""Limits of time that a busy machine does not break.

A test may ask that something is quick, if what it guards against is slow by orders of magnitude: a wait that lasts for
ever, a loop that is blocked, a parser that is quadratic. What users are promised to the second is measured by
scripts/bench, which compares within one run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: How much longer than on a quiet machine things may take beside other work on all cores.
BUSY = 10.0


@contextlib.contextmanager
def quickly(limit_s: float, what: str = "") -> Iterator[None]:
    """The body takes at most that long on a quiet machine, by the clock on the wall. For what waits for others."""
    started_s = time.monotonic()
    yield
    took_s = time.monotonic() - started_s
    assert took_s < BUSY * limit_s, f"{what} took {took_s:.2f} s, {limit_s:g} s on a quiet machine"


@contextlib.contextmanager
def cheaply(limit_s: float, what: str = "") -> Iterator[None]:
    """The body uses at most that much of this thread's processor time on a quiet machine.

    Ten times as much is let pass here, too: caches are shared, and the garbage collector may come by.
    """
    started_s = time.thread_time()
    yield
    took_s = time.thread_time() - started_s
    assert took_s < BUSY * limit_s, f"{what} took {took_s:.2f} s of processor time, {limit_s:g} s on a quiet machine"
