"""Hears of services by multicast DNS, and finds out what each is, from what was heard and by asking."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Final

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from gossip.discovery.announced_services import KnownServices
from gossip.discovery.multicast_dns import SERVICE_TYPE
from gossip.state import NODE_ID_BYTES

log = logging.getLogger(__name__)

# Whoever announces a name tells all of it. Of the rest, each that does not answer takes one place for so long.
_ASKED_AT_A_TIME: Final = 16
_ANSWER_TIMEOUT_MS: Final = 3000
# Names are as `Announcement` makes them; zeroconf appends a number to one that is taken.
_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * NODE_ID_BYTES}}}(-[0-9a-z]{{1,8}}){{0,2}}\.{re.escape(SERVICE_TYPE)}")


def is_name(name: str) -> bool:
    """Whether a node may announce itself by this full name."""
    return _NAME.fullmatch(name) is not None


class ServiceBrowser:
    """Fills ``services`` with what one zeroconf hears of; ``on_resolved`` is told what each of them is, or is now."""

    def __init__(
        self, zeroconf: AsyncZeroconf, services: KnownServices, on_resolved: Callable[[AsyncServiceInfo], None]
    ) -> None:
        self._zeroconf = zeroconf.zeroconf
        self._services = services
        self._on_resolved = on_resolved
        self._browser: AsyncServiceBrowser | None = None

    async def browse(self) -> None:
        """Asks who is there, naming those it knows, four times within 14 s. What it knows it tells of again."""
        await self.close()
        self._browser = AsyncServiceBrowser(self._zeroconf, SERVICE_TYPE, handlers=[self._on_service])

    async def close(self) -> None:
        """Listens no longer."""
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None

    async def resolve(self) -> None:
        """Finds out what each service is, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            for _ in range(_ASKED_AT_A_TIME):
                tasks.create_task(self._ask())

    def _on_service(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        # Inside zeroconf's reading of a packet: nothing here may wait or raise.
        if state_change is ServiceStateChange.Removed:
            self._services.removed(name)
        elif state_change is ServiceStateChange.Updated:
            self._services.updated(name)
        elif is_name(name):
            self._services.added(name)

    async def _read(self) -> None:
        while True:
            name = await self._services.told.next()
            with _whatever_it_says(name):
                info = AsyncServiceInfo(SERVICE_TYPE, name)
                if info.load_from_cache(self._zeroconf):
                    self._on_resolved(info)
                else:
                    self._services.ask(name)
            await asyncio.sleep(0)  # there may be many

    async def _ask(self) -> None:
        while True:
            name = await self._services.asked.next()
            with _whatever_it_says(name):
                info = AsyncServiceInfo(SERVICE_TYPE, name)
                # One that is there and does not answer in time will be told of again.
                if await info.async_request(self._zeroconf, _ANSWER_TIMEOUT_MS):
                    self._on_resolved(info)


@contextlib.contextmanager
def _whatever_it_says(name: str) -> Iterator[None]:
    """Anybody may have written all of it, so no error in it ends more than this one look."""
    try:
        yield
    except Exception as error:
        log.debug("the service %r cannot be read: %s: %s", name, type(error).__name__, error)
