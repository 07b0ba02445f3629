"""What the router's llama-server has done: tokens, their speed, requests; and its expert calls. For ``/metrics``.

llama-server counts from its own start, and answers its ``/metrics`` between two batches. So it is asked from time to
time, by a task of its own, and the last values are kept: totals over all the llama-servers that this node has run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp

from node.errors import SwarmError
from node.metrics import Counters, plain_samples

log = logging.getLogger(__name__)

PERIOD_S = 3.0

# Ours → llama-server's (tools/server/server-task.cpp). It prints six digits: above a million tokens, whole tens.
_COUNTERS = {
    "prompt_tokens": "llamacpp:prompt_tokens_total",
    "prompt_tokens_cached": "llamacpp:prompt_tokens_cached_total",
    "generated_tokens": "llamacpp:tokens_predicted_total",
}
_NODE_COUNTERS = ("calls", "pairs", "bytes_sent", "bytes_received")


class Engine(Protocol):
    """What is asked of a router engine (`node.router.engine.RouterEngine`)."""

    @property
    def statistics(self) -> Mapping[str, Any]:
        """The Swarm backend's last statistics (docs/protocol.md, "Router control"); {} before the first."""

    async def metrics_text(self, session: aiohttp.ClientSession) -> str:
        """llama-server's metrics. Raises SwarmError."""


class EngineMetrics:
    """Follows the engine of this node, which is None while it is not the router.

    ``requests``: how many requests were passed on by this node so far, and how many of them are open.
    """

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        requests: Callable[[], tuple[int, int]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._period_s = period_s
        self._followed: Engine | None = None
        self._seen_requests = (0, 0)
        #: Tokens by the names above; expert calls as (what, node), node "" for all together.
        self.tokens: Counters[str] = Counters()
        self.calls: Counters[tuple[str, str]] = Counters()
        #: Speeds of one request alone, as measured over those that ended last; 0 before the first.
        self.prompt_tokens_per_s = 0.0
        self.generated_tokens_per_s = 0.0
        #: Requests that llama-server works on, and those that it has queued itself.
        self.processing = 0
        self.deferred = 0

    async def run(self) -> None:
        """Reads until cancelled: while requests are open, and once after the last."""
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(self._period_s)
                await self.update(session)

    async def update(self, session: aiohttp.ClientSession) -> None:
        """Reads now, if there was a request since the last time. What cannot be read is read the next time."""
        engine = self.follow()
        requests = self._requests()
        if engine is None or (requests == self._seen_requests and requests[1] == 0):
            return
        try:
            text = await engine.metrics_text(session)
        except SwarmError as error:
            log.debug("llama-server's metrics: %s", error)
            return
        if engine is self.follow():
            self._take(plain_samples(text))
            self._seen_requests = requests

    def follow(self) -> Engine | None:
        """Takes the expert calls' statistics of the engine, which keeps them when it has ended; returns the engine."""
        engine = self._engine()
        if engine is not self._followed:
            if self._followed is not None:
                self._take_statistics(self._followed.statistics)
            self.tokens.restarted()
            self.calls.restarted()
            self.processing = self.deferred = 0
            self._followed = engine
        if engine is not None:
            self._take_statistics(engine.statistics)
        return engine

    def nodes(self) -> list[str]:
        """The nodes that were sent expert calls."""
        return sorted({node for _, node in self.calls if node})

    def _take(self, samples: Mapping[str, float]) -> None:
        self.tokens.take(
            {ours: samples[theirs] for ours, theirs in _COUNTERS.items() if samples.get(theirs, -1.0) >= 0}
        )
        # Each reading begins a new average, which is 0 until a request has ended: then the last one stands.
        self.prompt_tokens_per_s = samples.get("llamacpp:prompt_tokens_seconds", 0.0) or self.prompt_tokens_per_s
        self.generated_tokens_per_s = (
            samples.get("llamacpp:predicted_tokens_seconds", 0.0) or self.generated_tokens_per_s
        )
        self.processing = int(samples.get("llamacpp:requests_processing", 0.0))
        self.deferred = int(samples.get("llamacpp:requests_deferred", 0.0))

    def _take_statistics(self, statistics: Mapping[str, Any]) -> None:
        if not statistics:
            return
        try:
            self.calls.take(_call_counters(statistics))
        except (KeyError, TypeError, ValueError) as error:
            log.warning("the router engine's statistics are not understood: %s: %s", type(error).__name__, error)


def _call_counters(statistics: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], float] = {(what, ""): float(statistics[what]) for what in ("calls", "failures")}
    for node in statistics["nodes"]:
        name = str(node["name"])
        counted = {what: float(node[what]) for what in _NODE_COUNTERS}
        # The product is whole, but for the rounding of the mean, which must not look like a fall.
        counted["call_us"] = float(round(node["call_us_mean"] * node["calls"]))
        for what, value in counted.items():
            values[what, name] = values.get((what, name), 0.0) + value
    return values
