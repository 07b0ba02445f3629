"""The network between simulated nodes: links that lose, delay and duplicate packets, and cuts that let nothing pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

# What Linux does when a packet of TCP is lost: that of a new connection is sent again after a second, others sooner.
_CONNECT_AGAIN_S = 1.0
_SEND_AGAIN_S = 0.2


@dataclass
class Link:
    """One direction between two nodes. ``loss`` and ``duplicates``: shares of packets. Delays vary, which reorders."""

    delay_s: float = 0.0005
    jitter_s: float = 0.001
    loss: float = 0.0
    duplicates: float = 0.0


@dataclass(frozen=True)
class Cut:
    """Nothing passes from ``side`` to the others; nor back, if ``both``."""

    side: frozenset[int]
    both: bool

    def stops(self, a: int, b: int) -> bool:
        """Whether it stops what node ``a`` sends to ``b``."""
        return (a in self.side) != (b in self.side) and (self.both or a in self.side)


class Network:
    """What lies between nodes, which are named by their indexes.

    ``link``: what all pairs share that have no link of their own. ``random`` decides what is lost and how long the rest
    takes. ``tcp_timeout_s``: what takes longer over TCP does not arrive.
    """

    def __init__(self, link: Link, random: Random, tcp_timeout_s: float) -> None:
        self.link = link
        self.links: dict[tuple[int, int], Link] = {}
        self.cuts: list[Cut] = []
        self._random = random
        self._tcp_timeout_s = tcp_timeout_s

    def cut(self, side: Iterable[int], *, both: bool = True) -> None:
        """Nothing passes between ``side`` and the others; or only nothing from ``side``, if not ``both``."""
        self.cuts.append(Cut(frozenset(side), both))

    def heal(self) -> None:
        """Ends all cuts."""
        self.cuts.clear()

    def own_link(self, a: int, b: int) -> Link:
        """The link from node ``a`` to ``b``, to be changed for these two alone."""
        return self.links.setdefault((a, b), replace(self.link))

    def is_cut(self, a: int, b: int) -> bool:
        """Whether nothing that node ``a`` sends reaches ``b``."""
        return any(cut.stops(a, b) for cut in self.cuts)

    def udp_delays_s(self, a: int, b: int) -> tuple[float, ...]:
        """How long each copy of a packet takes: none of a packet that is lost, two of one that doubles."""
        if self.cuts and self.is_cut(a, b):
            return ()
        link = self.links.get((a, b), self.link) if self.links else self.link
        random = self._random.random
        if link.loss and random() < link.loss:
            return ()
        delay_s = link.delay_s + link.jitter_s * random()
        if link.duplicates and random() < link.duplicates:
            return delay_s, link.delay_s + link.jitter_s * random()
        return (delay_s,)

    def tcp_delay_s(self, a: int, b: int, *, connects: bool) -> float | None:
        """How long a message takes from ``a`` to ``b``, None if it does not arrive: TCP loses nothing but time."""
        if self.cuts and (self.is_cut(a, b) or self.is_cut(b, a)):
            return None
        there = self.links.get((a, b), self.link)
        back = self.links.get((b, a), self.link)
        delay_s = there.delay_s + there.jitter_s * self._random.random()
        delay_s += self._resending_s(_SEND_AGAIN_S, there.loss)
        if connects:
            delay_s += there.delay_s + back.delay_s + (there.jitter_s + back.jitter_s) * self._random.random()
            delay_s += self._resending_s(_CONNECT_AGAIN_S, 1 - (1 - there.loss) * (1 - back.loss))
        return delay_s if delay_s <= self._tcp_timeout_s else None

    def _resending_s(self, first_s: float, loss: float) -> float:
        """How long TCP takes to send a packet again until it is not lost. It waits twice as long each time."""
        total_s = 0.0
        while loss and self._random.random() < loss and total_s <= self._tcp_timeout_s:
            total_s += first_s
            first_s *= 2
        return total_s
