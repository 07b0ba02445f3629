"""Multicast DNS (RFC 6762) by zeroconf: its sockets on this machine's interfaces, and the service announced there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final

from zeroconf import ServiceInfo
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from gossip.discovery.interfaces import LocalAddress

log = logging.getLogger(__name__)

SERVICE_TYPE: Final = "_swarm-node._tcp.local."
# Withdrawing a service takes three packets, a quarter of a second in all.
CLOSE_S: Final = 1.0


def interface_choices(addresses: Sequence[LocalAddress]) -> list[str | int]:
    """Where zeroconf listens and sends, best first: on each interface at one IPv4 address and at IPv6, by its index.

    A second address of the same interface would be refused: a socket joins a group once per interface.
    """
    choices: dict[tuple[str, bool], str | int] = {}
    for local in addresses:
        is_ipv6 = ":" in local.address
        if (local.interface, is_ipv6) in choices or local.address == "::1":  # IPv6 has no multicast on loopback
            continue
        try:
            choices[local.interface, is_ipv6] = socket.if_nametoindex(local.interface) if is_ipv6 else local.address
        except OSError:
            continue  # it has gone since; the next change will tell
    return list(choices.values())


async def open_zeroconf(choices: list[str | int]) -> AsyncZeroconf:
    """Opens zeroconf on these interfaces, or on the best of them alone where one does not let it.

    Raises OSError, and what else zeroconf raises.
    """
    try:
        zeroconf = AsyncZeroconf(interfaces=choices)
    except (OSError, RuntimeError) as error:
        if len(choices) < 2:
            raise
        log.debug("multicast DNS on all of %s: %s", choices, error)
        zeroconf = AsyncZeroconf(interfaces=choices[:1])
    try:
        await zeroconf.zeroconf.async_wait_for_start()
    except BaseException:
        await close_zeroconf(zeroconf)
        raise
    return zeroconf


def can_rescan(zeroconf: AsyncZeroconf) -> bool:
    """Whether this zeroconf can be moved to other interfaces (0.150 and later), or must be closed and opened anew."""
    return hasattr(zeroconf, "async_update_interfaces")


async def rescan(zeroconf: AsyncZeroconf, choices: list[str | int]) -> bool:
    """Moves zeroconf to these interfaces; without effect on those where it is. Whether it is on all of them now.

    An address that the system still checks for duplicates, for one, cannot be used yet.
    """
    if can_rescan(zeroconf):
        try:
            await zeroconf.async_update_interfaces(choices)
        except Exception as error:  # zeroconf raises errors of many kinds; what works goes on working
            log.debug("multicast DNS on %s: %s: %s", choices, type(error).__name__, error)
    return len(zeroconf.zeroconf.engine.senders) >= len(choices)


async def close_zeroconf(zeroconf: AsyncZeroconf) -> None:
    """Withdraws what is announced, and closes the sockets, within `CLOSE_S`. Raises nothing."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await zeroconf.async_close()
    except Exception as error:  # also TimeoutError
        log.debug("multicast DNS was closed without goodbye: %s: %s", type(error).__name__, error)
        with contextlib.suppress(Exception):
            zeroconf.zeroconf.close()


class Announcement:
    """A service that one zeroconf announces, from `publish` on.

    Each set of addresses gets a host name of its own, which the service then points to: so the addresses before are
    withdrawn by the one packet that tells of the new ones, and no cache mixes the two. The host name also tells two
    programs apart that announce the same service.
    """

    def __init__(self, node_id: str, port: int, text: dict[str, str]) -> None:
        self._token = secrets.token_hex(4)
        # Never the machine's name: it may be too long, not ASCII, or "pc" like the neighbour's.
        self._label = node_id
        self._host_prefix = f"{node_id}-{self._token}-"
        self._port = port
        self._text = text
        self._info: AsyncServiceInfo | None = None
        self._addresses: tuple[LocalAddress, ...] = ()
        self._n_hosts = 0
        self._sending: asyncio.Future[Any] | None = None

    @property
    def name(self) -> str:
        """The service's full name; "" while nothing is announced."""
        return "" if self._info is None else self._info.name

    def update(self, zeroconf: AsyncZeroconf, addresses: tuple[LocalAddress, ...]) -> None:
        """Begins to announce the service again, at these addresses. Without effect before `publish`."""
        if self._info is None:
            return
        if addresses != self._addresses:
            self._info = self._make(self._info.name, addresses)
        self._cancel()
        self._sending = asyncio.ensure_future(self._send(zeroconf, self._info))

    async def publish(self, zeroconf: AsyncZeroconf, addresses: tuple[LocalAddress, ...]) -> None:
        """Announces the service if it is not, under another name if this one is taken.

        Every begun announcement is seen out. Raises what zeroconf raises.
        """
        if self._info is None:
            info = self._make(f"{self._label}.{SERVICE_TYPE}", addresses)
            self._sending = asyncio.ensure_future(await zeroconf.async_register_service(info, allow_name_change=True))
            self._info = info
        sending = self._sending
        if sending is not None:
            try:
                await asyncio.wait([sending])
            finally:
                sending.cancel()
            if not sending.cancelled():  # by `meet`
                sending.result()

    def heard(self, zeroconf: AsyncZeroconf) -> bool:
        """Whether the last announcement came back, as multicasts of this machine do."""
        if self._info is None:
            return False
        seen = AsyncServiceInfo(SERVICE_TYPE, self._info.name)
        seen.load_from_cache(zeroconf.zeroconf)
        return seen.server == self._info.server

    def is_rival(self, info: ServiceInfo) -> bool:
        """Whether another program announces a service of the same name."""
        return info.key == self.name.lower() and not (info.server or self._host_prefix).startswith(self._host_prefix)

    def meet(self, zeroconf: AsyncZeroconf, rival: ServiceInfo) -> None:
        """Settles the name with a rival: two programs that did not know of each other announce the same.

        The one whose host name is the earlier takes a name of its own at the next `publish`, as RFC 6762 has it for
        simultaneous probes. The other announces itself anew, under a new host name: in the caches the one before may
        be about to expire, and would not count as news.
        """
        own = f"{self._label}-{self._token}"
        if self._info is None or self._label == own:
            return
        self._cancel()
        if self._host_prefix > (rival.server or ""):
            self._info = self._make(self._info.name, self._addresses)
        else:
            # Unregistering it would send packets that withdraw the rival's service, too, from everybody's cache.
            zeroconf.zeroconf.registry.async_remove(self._info)
            self._info, self._label = None, own

    def stop(self) -> None:
        """Sends no more packets of the service; closing zeroconf withdraws it."""
        self._cancel()

    def _make(self, name: str, addresses: tuple[LocalAddress, ...]) -> AsyncServiceInfo:
        self._n_hosts += 1
        self._addresses = addresses
        return AsyncServiceInfo(
            SERVICE_TYPE,
            name,
            port=self._port,
            # Whoever hears a link-local one adds the link on which it was heard.
            parsed_addresses=list(dict.fromkeys(local.address.partition("%")[0] for local in addresses)),
            properties=self._text,
            server=f"{self._host_prefix}{self._n_hosts}.local.",
        )

    @staticmethod
    async def _send(zeroconf: AsyncZeroconf, info: AsyncServiceInfo) -> None:
        await (await zeroconf.async_update_service(info))

    def _cancel(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
