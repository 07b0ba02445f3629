"""Notices when this machine's usable addresses change: a cable, another Wi-Fi, waking from sleep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from gossip.discovery.interfaces import (
    InterfaceRules,
    LocalAddress,
    SeenAddress,
    order,
    read_interfaces,
    usable_addresses,
)
from gossip.limits import ADDRESSES_MAX

log = logging.getLogger(__name__)

# Each system has its own way to tell of changes (netlink, routing sockets, none on Android); the list is the same
# everywhere and takes under a millisecond, and nobody waits for a link that came up two seconds ago.
POLL_S: Final = 2.0
# A link that is negotiating goes up and down within less.
STABLE_S: Final = 1.0
# Every change is announced to the whole LAN.
SPACING_S: Final = 5.0


class Damping:
    """Decides which of the addresses that are seen count.

    One that came or went counts after ``stable_s`` without going back, and what counts changes at most once per
    ``spacing_s``. The first ones seen count at once.

    Each address is damped by itself, so one interface that comes and goes for ever does not keep others waiting.
    """

    def __init__(self, stable_s: float = STABLE_S, spacing_s: float = SPACING_S) -> None:
        self._stable_s = stable_s
        self._spacing_s = spacing_s
        self._counted: frozenset[LocalAddress] | None = None
        self._differs_since_s: dict[LocalAddress, float] = {}
        self._next_change_s = float("-inf")

    @property
    def pending(self) -> bool:
        """Whether something was seen that does not count yet."""
        return bool(self._differs_since_s)

    def observe(self, now_s: float, addresses: Sequence[LocalAddress]) -> list[LocalAddress] | None:
        """What counts from now on, best first; None if it did not change. ``now_s``: of a monotonic clock."""
        seen = frozenset(addresses)
        if self._counted is None:
            self._counted = seen
            return sorted(seen, key=order)
        differing = seen ^ self._counted
        self._differs_since_s = {address: self._differs_since_s.get(address, now_s) for address in differing}
        changed = {a for a, since_s in self._differs_since_s.items() if now_s - since_s >= self._stable_s}
        if not changed or now_s < self._next_change_s:
            return None
        self._next_change_s = now_s + self._spacing_s
        self._counted ^= changed
        for address in changed:
            del self._differs_since_s[address]
        # One that left and is damped still takes a place.
        return sorted(self._counted, key=order)[:ADDRESSES_MAX]


async def watch_interfaces(
    rules: InterfaceRules,
    on_change: Callable[[list[LocalAddress]], None],
    *,
    read: Callable[[], list[SeenAddress]] = read_interfaces,
) -> None:
    """Calls ``on_change`` with the usable addresses, best first, now and at each damped change, until cancelled."""
    loop = asyncio.get_running_loop()
    damping = Damping()
    failed = False
    while True:
        try:
            addresses, _ = usable_addresses(read(), rules)
        except OSError as error:
            if not failed:
                log.warning("the list of network interfaces cannot be read: %s. A change will not be noticed", error)
            failed = True
        else:
            failed = False
            changed = damping.observe(loop.time(), addresses)
            if changed is not None:
                on_change(changed)
        # What is not counted yet is looked at again as soon as it may count.
        await asyncio.sleep(STABLE_S if damping.pending else POLL_S)
