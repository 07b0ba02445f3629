"""What a check of ``swarm-node doctor`` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """What one check found, and what to do about it (empty: nothing). A warning does not keep the node from working."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""
