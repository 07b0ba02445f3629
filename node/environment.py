"""For how long a thread of the expert call looks for the next message before it sleeps (kernels/src/brief_poll.hpp)."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What the Swarm backend reads, and the expert server.
VARIABLE = "SWARM_NODE_POLL_US"
# Longer than a small call over a LAN takes, and than the trunk of a small model takes for a layer.
DEFAULT_US = 300
MAX_US = 10_000


def poll_us(environment: Mapping[str, str] = os.environ) -> int:
    """The limit in microseconds that the environment gives; the default where it gives none or no such number."""
    text = environment.get(VARIABLE, "")
    return min(int(text), MAX_US) if text.isdecimal() and len(text) <= 6 else DEFAULT_US
