"""What of a model fits into how much memory. Pure.

A router's machine keeps the trunk, and experts in what is left; the others keep experts only. A conversation's memory (KV cache)
comes on top on the router's machine: its size is a matter of settings, not of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.models.index import ModelIndex

# An idle desktop system leaves this less than the machine has.
SYSTEM_BYTES = 3 << 29
# Looked for up to here; a swarm of more machines is no answer to "how many do I need".
_MACHINES_MAX = 1024


@dataclass(frozen=True)
class Fit:
    """What machines hold of a model together. ``layers``: those that are there with all their experts, if the machines are
    filled layer by layer; ``experts``: of all layers."""

    trunk: bool
    layers: int
    experts: int
    experts_total: int

    @property
    def whole(self) -> bool:
        """Nothing is missing."""
        return self.trunk and self.experts == self.experts_total


def offer_bytes(machine_bytes: int, share: float) -> int:
    """What an otherwise idle machine of that much memory offers a swarm: ``share`` of what its system leaves."""
    return int(max(0, machine_bytes - SYSTEM_BYTES) * share)


def fit(index: ModelIndex, offers_bytes: Sequence[int], trunk_beside: bool = False) -> Fit:
    """What machines that offer so much hold together; the one with the most is the router.

    ``trunk_beside``: the trunk is in other memory than what is offered, as with experts on a graphics card.
    """
    offers = sorted(offers_bytes, reverse=True)
    trunk = bool(offers) and (trunk_beside or offers[0] >= index.trunk_bytes)
    if trunk and not trunk_beside:
        offers[0] -= index.trunk_bytes
    sizes = [index.expert_bytes(layer) // index.n_expert for layer in index.expert_layers]
    experts = layers = 0
    for size in sizes:
        left = index.n_expert
        for number, free in enumerate(offers):
            count = min(left, free // max(size, 1))
            offers[number] -= count * size
            left -= count
        experts += index.n_expert - left
        layers += left == 0
    return Fit(trunk, layers, experts, len(sizes) * index.n_expert)


def machines_needed(index: ModelIndex, offered_bytes: int) -> int | None:
    """How many machines that offer so much each hold the model; None if no number does: the trunk or an expert is too large."""
    lowest, highest = 1, _MACHINES_MAX
    if not fit(index, [offered_bytes] * highest).whole:
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        if fit(index, [offered_bytes] * middle).whole:
            highest = middle
        else:
            lowest = middle + 1
    return lowest
