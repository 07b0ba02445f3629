"""Looking for nodes that are not live members: at announced addresses, and now and then at those of the dead.

The dead are pinged so that a healed cut is noticed: each side of it thinks the other dead, and would never speak to it.
"""

from __future__ import annotations

from functools import partial

from gossip.address import Address
from gossip.state import NodeId, Status
from gossip.swim.candidates import Candidates
from gossip.swim.local import Local
from gossip.swim.pings import Answer, Pings

# Announcements make a node look at its candidates no more often than this.
_CANDIDATES_EVERY_S = 0.05


class Seeker:
    """One node's search for nodes that are not live members."""

    def __init__(self, local: Local, pings: Pings, candidates: Candidates) -> None:
        self._local = local
        self._pings = pings
        self._candidates = candidates

    def start(self, now_s: float) -> None:
        """The dead are pinged from a random time on, so that nodes do not keep step."""
        local = self._local
        local.timers.set(now_s + local.random.random() * local.settings.reconnect_period_s, self._ping_dead, None)

    def announced(self, now_s: float, address: Address, source: str) -> None:
        """Takes that somebody may be at an address."""
        self._candidates.add(address, source, now_s)
        self._set_timer(now_s)

    def _set_timer(self, earliest_s: float) -> None:
        next_s = self._candidates.next_s()
        if next_s is not None:
            self._local.timers.set(max(next_s, earliest_s), self._ping_candidates, None)

    def _ping_candidates(self, now_s: float, _: None) -> None:
        for candidate in self._candidates.due(now_s):
            member = self._local.members.get(candidate.member) if candidate.member is not None else None
            if member is not None and member.is_live and not candidate.problem:
                continue  # probed as a member
            self._ping(now_s, candidate.address, None, tcp=candidate.tries % 2 == 0)
        self._set_timer(now_s + _CANDIDATES_EVERY_S)

    def _ping_dead(self, now_s: float, _: None) -> None:
        local = self._local
        local.timers.set(now_s + local.settings.reconnect_period_s, self._ping_dead, None)
        dead = [member for member in local.members.gone if member.status is Status.DEAD and member.address is not None]
        if dead:
            member = local.random.choice(dead)
            assert member.address is not None
            for address in [member.address, *member.paths.alternatives(1)]:
                self._ping(now_s, address, member.node)

    def _ping(self, now_s: float, address: Address, target: NodeId | None, *, tcp: bool = False) -> None:
        sequence = self._pings.expect(partial(self._answered, address))
        self._local.timers.set(now_s + 2 * self._local.settings.probe_period_s, self._pings.forget, sequence)
        self._pings.send(address, sequence, target)
        if tcp:
            self._pings.send(address, sequence, target, tcp=True)

    def _answered(self, address: Address, now_s: float, answer: Answer) -> None:
        if answer.sender == self._local.node:
            self._candidates.refuse(address, "this node itself")
            return
        member = self._local.members.get(answer.sender)
        if member is not None:
            self._candidates.answered(address, member.node)
            if answer.source is not None:
                member.paths.answered(answer.source, now_s, None)
