"""What a node has counted of models, expert calls and requests, for ``/status`` and ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from node.metrics import Counters
from node.router.engine_metrics import EngineMetrics


class CountedExperts(Protocol):
    """What is asked of an expert server (`node.expert_server.process.ExpertProcess`)."""

    @property
    def held_bytes(self) -> int:
        """Memory of the slices that are ready."""

    @property
    def counters(self) -> Counters[str]:
        """What was counted of its calls, by the names in `node.expert_server.process`."""


@dataclass(frozen=True)
class Measured:
    """The counters at one moment.

    ``fetched_bytes``, ``sent_bytes``: of models, from and to other nodes. ``experts``: this node's expert server, if it
    has one. ``engine``: what its llama-servers have counted, while it routes; ``statistics``: those of the Swarm
    backend of the one that runs; ``waiting``: requests that wait for a slot of it. ``failures``: the last ones of
    expert calls.
    """

    fetched_bytes: int = 0
    sent_bytes: int = 0
    experts: CountedExperts | None = None
    engine: EngineMetrics | None = None
    waiting: int = 0
    statistics: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[object] = ()
