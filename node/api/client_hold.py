"""Has llama-server notice that a client has left, by a pause of about a second in which it computes nothing.

Until a request has answered anything, llama-server looks whether its client is still there only when none of its
requests had a result for a second: each result, of whatever request, restarts the wait of them all
(server_response::recv_with_timeout in llama.cpp's tools/server/server-queue.cpp). Beside a stream that writes tokens,
what was asked by a client that left would be computed to its end. So the Swarm backend is asked to hold the decodes of
all requests for a little longer than that second ("hold" in docs/protocol.md), which costs the other streams a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import Callable, Iterator

from node.api.upstream import Answer, UpstreamBroken, UpstreamUnreachable

log = logging.getLogger(__name__)

# llama-server's second, and what the message to the backend takes.
HOLD_S = 1.1
# One hold with its extensions, for clients that leave one after the other.
LONGEST_HOLD_S = 2.0
# So that clients that come and go cannot stop the others: at worst a sixth of the time is held.
PAUSE_S = 10.0


class HoldPlan:
    """When decodes are to be held. Pure; ``clock`` gives seconds.

    Counts the requests at llama-server. A client that leaves during a hold shares it, which makes it longer; where that
    would be too long, and within PAUSE_S after a hold, it waits for the next one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._idle_since_s = -math.inf
        self._left = False  # someone whose request may go on
        self._began_s = self._ends_s = -math.inf

    def opened(self) -> None:
        """A request goes to llama-server."""
        if self._open == 0 and self._clock() - self._idle_since_s > HOLD_S:
            self._left = False  # noticed: nobody was there to have results
        self._open += 1

    def closed(self, *, noticed: bool) -> None:
        """The connection of a request is closed. ``noticed``: llama-server is done with it, or will be at once."""
        self._open -= 1
        if self._open == 0:
            self._idle_since_s = self._clock()
        self._left = self._left or not noticed

    def wait_s(self) -> float | None:
        """Seconds until :meth:`begin` is to be called; None while there is nothing to hold for.

        Changes with each call of the other methods.
        """
        if not self._left or self._open == 0:
            return None
        return max(0.0, self._start_s() - self._clock())

    def begin(self) -> float:
        """Seconds to hold from now on."""
        now_s = self._clock()
        if now_s >= self._ends_s:
            self._began_s = now_s
        self._ends_s = now_s + HOLD_S
        self._left = False
        return HOLD_S

    def _start_s(self) -> float:
        now_s = self._clock()
        if now_s < self._ends_s and now_s + HOLD_S <= self._began_s + LONGEST_HOLD_S:
            return now_s
        return self._ends_s + PAUSE_S


class Passed:
    """A request that was passed to llama-server. ``answer`` is to be set when it comes."""

    def __init__(self) -> None:
        self.answer: Answer | None = None


class ClientHolds:
    """Follows the requests at a llama-server and has its decodes held when the plan says so."""

    def __init__(self) -> None:
        self._hold: Callable[[int], None] | None = None
        self._plan = HoldPlan(self._now_s)
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    @contextlib.contextmanager
    def request(self, hold: Callable[[int], None] | None) -> Iterator[Passed]:
        """The context of a request at the llama-server that ``hold`` belongs to: from before it is sent until its
        connection is closed.

        ``hold`` has no decode begun for so many milliseconds; None: that cannot be asked for.
        """
        passed = Passed()
        if hold is None:
            yield passed
            return
        if hold != self._hold:  # another llama-server; what was asked of the one before has ended with it
            self._hold, self._plan = hold, HoldPlan(self._now_s)
        plan = self._plan
        plan.opened()
        self._schedule()
        noticed = True
        try:
            yield passed
        except (UpstreamBroken, UpstreamUnreachable):
            raise
        except BaseException:
            # The headers of a stream come before its prompt is read. Once it is, each token finds out.
            noticed = passed.answer is not None and passed.answer.has_begun
            raise
        finally:
            plan.closed(noticed=noticed)
            self._schedule()

    def stop(self) -> None:
        """Begins no more holds."""
        self._stopped = True
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._stopped and (wait_s := self._plan.wait_s()) is not None:
            # Even if it is now, after what is ready to run: that closes the leaver's connection.
            # In no request's context: a hold is of all of them, and its log line is not that of who came last.
            nobody = contextvars.Context()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._begin, context=nobody)

    def _begin(self) -> None:
        self._timer = None
        if self._plan.wait_s() != 0:  # a hold that was to be made longer has ended
            self._schedule()
            return
        ms = math.ceil(1000 * self._plan.begin())
        log.info("decodes are held for %d ms, so that llama-server notices a client that has left", ms)
        if self._hold is not None:
            self._hold(ms)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
