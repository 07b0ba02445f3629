"""Turns at something that serves only so many at a time: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Hands out turns. How many at a time is said by those who come, since what they wait for may be replaced."""

    def __init__(self) -> None:
        self._limit = 1
        self._taken = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Those in the queue."""
        return len(self._queue)

    @asynccontextmanager
    async def take(self, limit: int) -> AsyncIterator[None]:
        """A turn for as long as the context lasts. ``limit``: of turns at a time, from now on."""
        self._limit = limit
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was handed out in the same moment
                self._give_back()
            elif turn in self._queue:
                self._queue.remove(turn)
            raise
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._taken -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._queue and self._taken < self._limit:
            turn = self._queue.popleft()
            if not turn.cancelled():
                self._taken += 1
                turn.set_result(None)
