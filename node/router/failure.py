"""What goes wrong in the router's engine: the layers that its backend could not compute, and the errors it raises.

Apart from the engine, so that the front door, which tells clients of failures, imports nothing that starts processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.errors import SwarmError


class RouterEngineError(SwarmError):
    """llama-server could not be started, or has ended. The message holds the end of its log."""


class TableNotUsed(SwarmError):
    """The Swarm backend refused a routing table, or did not answer in time. The one before stays in use."""


@dataclass(frozen=True)
class ExpertFailure:
    """A layer that could not be computed, as the Swarm backend reports it. ``node`` is empty when none is at fault."""

    node: str
    layer: int
    first: int
    last: int
    reason: str
    waited_ms: float

    def __str__(self) -> str:
        experts = f", experts {self.first} to {self.last}" if self.first >= 0 else ""
        node = f" on node {self.node}" if self.node else ""
        return f"layer {self.layer}{experts}{node}: {self.reason}"
