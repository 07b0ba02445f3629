"""The constants of SWIM and Lifeguard, as HashiCorp's memberlist sets them for a LAN, and what is added to them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Times are in seconds. Papers: SWIM (Das, Gupta, Motivala 2002), Lifeguard (Dadgar, Phillips, Currey 2018)."""

    #: One member is probed each period, in a fixed random order; its acknowledgement may take `probe_timeout_s`.
    probe_period_s: float = 1.0
    probe_timeout_s: float = 0.5
    #: Members asked to ping one that did not answer.
    helpers: int = 3
    #: A suspect is declared dead after ``suspicion_factor × max(1, log10 n)`` periods if `confirmations` others agree,
    #: and after `suspicion_max_factor` times that if nobody does.
    suspicion_factor: int = 4
    suspicion_max_factor: int = 6
    confirmations: int = 2
    #: News goes to `fanout` members each `gossip_period_s`, ``retransmit_factor × ⌈log10(n + 1)⌉`` times in all.
    gossip_period_s: float = 0.2
    fanout: int = 3
    retransmit_factor: int = 4
    #: Lifeguard's local health: timeouts grow up to this many times.
    health_max: int = 8
    #: One peer's digest is compared with this node's.
    sync_period_s: float = 10.0
    #: One of the dead is pinged, so that a healed cut is noticed.
    reconnect_period_s: float = 3.0
    #: The dead are shown for `dead_s`; after that only their incarnation is remembered, for `tombstone_s`.
    dead_s: float = 600.0
    tombstone_s: float = 86400.0
    #: Addresses that do not answer are tried again after a time that doubles from the first to the second.
    candidate_retry_s: float = 1.0
    candidate_retry_max_s: float = 5.0
    #: A member of which nobody gives a record is forgotten.
    unconfirmed_s: float = 30.0
    #: The event loop was late by more than this: the machine slept or is busy, and what is missing is its own fault.
    late_s: float = 0.5
    #: A request over TCP: a record, a digest, a ping where UDP does not pass.
    request_timeout_s: float = 2.0

    def suspicion_min_s(self, n_members: int) -> float:
        """The shortest life of a suspicion among ``n_members``."""
        return self.suspicion_factor * max(1.0, math.log10(max(1, n_members))) * self.probe_period_s

    def transmits(self, n_members: int) -> int:
        """How often each member sends one update."""
        return self.retransmit_factor * math.ceil(math.log10(n_members + 1))
