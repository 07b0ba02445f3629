"""Finds other nodes by DNS-SD over multicast DNS (RFC 6762, RFC 6763), and lets them find this one.

What it finds are addresses to try, no more. Losing it is a warning: nodes that are named, or that call, are found
without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from gossip.discovery.announced_services import SERVICES_MAX, Found, KnownServices, announced_text, is_node_id, parse
from gossip.discovery.interfaces import InterfaceRules, LocalAddress, local_addresses
from gossip.discovery.multicast_dns import (
    Announcement,
    can_rescan,
    close_zeroconf,
    interface_choices,
    open_zeroconf,
    rescan,
)
from gossip.discovery.multicast_dns_health import MulticastDnsHealth
from gossip.discovery.service_browser import ServiceBrowser
from gossip.errors import GossipError

log = logging.getLogger(__name__)

_EVERY_INTERFACE: Final = InterfaceRules()
# Packets get lost, interfaces refuse the first ones, and a switch may pass nothing for 30 s after a link came up: after
# every change it is announced and asked again at intervals that double, as RFC 6762 has it (sections 5.2 and 8.3).
_REPEAT_FIRST_S: Final = 2.0
_REPEAT_MAX_S: Final = 900.0
# After so many, a minute in all, everybody has heard, and whoever is there has answered. What follows only asks.
_SETTLED_AFTER: Final = 5
# A system gives its own multicasts back at once: when it sent them three times and none came, something is wrong.
_HEARD_BY: Final = 2
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
# Anybody can make up rivals: they get no more than this.
_RIVAL_SPACING_S: Final = 10.0


class Discovery:
    """Announces a node, unless ``announce`` is false, and tells of others of its swarm, while `run` runs.

    ``on_found``: a node was announced, or announced with other addresses; ``on_lost``: it withdrew its announcement,
    by its node id. Neither says that a node is alive or dead. Services of other swarms are passed over, and of this
    node's id as well. ``node_id``: 16 lower-case hex digits. Raises GossipError if it is not.
    """

    def __init__(
        self,
        *,
        node_id: str,
        swarm: str,
        port: int,
        version: int,
        on_found: Callable[[Found], None],
        on_lost: Callable[[str], None],
        announce: bool = True,
        interfaces: InterfaceRules = _EVERY_INTERFACE,
    ) -> None:
        if announce and not is_node_id(node_id):
            raise GossipError(f"{node_id[:64]!r} is no node id: 16 lower-case hex digits")
        self._node_id = node_id
        self._swarm = swarm
        self._port = port
        self._text = announced_text(node_id, swarm, version)
        self._announce = announce
        self._rules = interfaces
        self._services = KnownServices(on_found, on_lost)
        self._addresses: tuple[LocalAddress, ...] | None = None
        self._changed = asyncio.Event()
        self._announcement: Announcement | None = None
        self._health = MulticastDnsHealth()
        self._rival_next_s = 0.0
        self._again = False

    def set_addresses(self, addresses: Sequence[LocalAddress]) -> None:
        """Takes this machine's usable addresses, best first. To be called on the event loop, at any time."""
        if tuple(addresses) != self._addresses:
            self._addresses = tuple(addresses)
            self._changed.set()

    async def run(self) -> None:
        """Announces and looks until cancelled; then the announcement is withdrawn, within a second.

        Raises nothing else: what does not work is tried again for ever, with one warning.
        """
        loop = asyncio.get_running_loop()
        if self._addresses is None:
            with contextlib.suppress(OSError):
                self._addresses = tuple(local_addresses(self._rules)[0])
        retry_s = _RETRY_FIRST_S
        with self._health.listening():
            while True:
                self._changed.clear()
                choices = interface_choices(self._addresses or ())
                if not choices:
                    await self._changed.wait()
                    continue
                began_s = loop.time()
                try:
                    await self._session(choices)
                    continue
                except Exception as error:  # zeroconf raises errors of many kinds
                    self._health.failed(error)
                if loop.time() - began_s > _RETRY_MAX_S:
                    retry_s = _RETRY_FIRST_S
                await self._wait_for_change(retry_s)
                retry_s = min(_RETRY_MAX_S, 2 * retry_s)

    async def _session(self, choices: list[str | int]) -> None:
        """Works with one zeroconf. Returns when another is needed."""
        zeroconf = await open_zeroconf(choices)
        try:
            self._services.expect_again()
            self._announcement = Announcement(self._node_id, self._port, self._text) if self._announce else None
            browser = ServiceBrowser(zeroconf, self._services, lambda info: self._resolved(zeroconf, info))
            async with asyncio.TaskGroup() as tasks:
                resolving = tasks.create_task(browser.resolve())
                try:
                    await self._repeat(zeroconf, browser)
                finally:
                    resolving.cancel()
                    await browser.close()
        finally:
            if self._announcement is not None:
                self._announcement.stop()
                self._announcement = None
            await close_zeroconf(zeroconf)

    async def _repeat(self, zeroconf: AsyncZeroconf, browser: ServiceBrowser) -> None:
        """Announces and asks, after every change and then ever more rarely."""
        addresses: tuple[LocalAddress, ...] | None = None
        repeat_s, repeats = _REPEAT_FIRST_S, 0
        while True:
            self._changed.clear()
            if addresses is None or self._addresses != addresses:
                if addresses is not None:
                    if not can_rescan(zeroconf):
                        return
                    self._services.recheck()
                addresses, self._again = self._addresses or (), True
            if self._again:
                self._again = False
                repeat_s, repeats = _REPEAT_FIRST_S, 0
            announcement = self._announcement if repeats <= _SETTLED_AFTER else None
            self._check_heard(zeroconf, repeats)
            if announcement is not None:
                announcement.update(zeroconf, addresses)
            complete = await rescan(zeroconf, interface_choices(addresses))
            await browser.browse()
            if announcement is not None:
                await announcement.publish(zeroconf, addresses)
            if repeats == _SETTLED_AFTER:
                self._services.forget_unseen()
            await self._wait_for_change(repeat_s)
            if not zeroconf.zeroconf.engine.senders and not can_rescan(zeroconf):
                return
            repeats += 1
            repeat_s = min(2 * repeat_s, _REPEAT_MAX_S if complete else _RETRY_MAX_S)

    def _resolved(self, zeroconf: AsyncZeroconf, info: AsyncServiceInfo) -> None:
        if self._announcement is not None and self._announcement.is_rival(info):
            self._meet_rival(zeroconf, info)
        found = parse(info, self._swarm, loopback=self._on_loopback())
        if found is not None and found.node_id == self._node_id:
            if info.name != (self._announcement.name if self._announcement is not None else ""):
                self._health.copy_found(found)
            found = None
        self._services.resolved(info.name, found)

    def _on_loopback(self) -> bool:
        return any(local.address in ("127.0.0.1", "::1") for local in self._addresses or ())

    def _meet_rival(self, zeroconf: AsyncZeroconf, rival: AsyncServiceInfo) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._announcement is None or now_s < self._rival_next_s:
            return
        self._rival_next_s = now_s + _RIVAL_SPACING_S
        self._announcement.meet(zeroconf, rival)
        self._again = True
        self._changed.set()

    def _check_heard(self, zeroconf: AsyncZeroconf, repeats: int) -> None:
        if self._announcement is None or self._announcement.heard(zeroconf):
            self._health.works()
        elif _HEARD_BY <= repeats <= _SETTLED_AFTER and zeroconf.zeroconf.engine.senders:
            self._health.not_heard()

    async def _wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


async def find(
    swarm: str,
    seconds: float,
    *,
    interfaces: InterfaceRules = _EVERY_INTERFACE,
) -> AsyncGenerator[Found, None]:
    """Yields nodes of a swarm, as multicast DNS finds them, for that many seconds. One that changes comes again."""
    nodes: asyncio.Queue[Found] = asyncio.Queue(SERVICES_MAX)

    def found(node: Found) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            nodes.put_nowait(node)

    discovery = Discovery(
        node_id="",
        swarm=swarm,
        port=0,
        version=1,
        on_found=found,
        on_lost=lambda _: None,
        announce=False,
        interfaces=interfaces,
    )
    searching = asyncio.create_task(discovery.run())
    try:
        deadline_s = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    node = await nodes.get()
            except TimeoutError:
                return
            yield node
    finally:
        searching.cancel()
        await asyncio.wait([searching])
