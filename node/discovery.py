"""Finds other agents by DNS-SD over multicast DNS (RFC 6762, RFC 6763), and lets them find this one.

Losing it is a warning: peers named in the configuration, and those that call, are found without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import psutil
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger(__name__)
# It reports every packet that an interface does not take, with a traceback; its caller reports what matters.
logging.getLogger("zeroconf").setLevel(logging.CRITICAL)

SERVICE_TYPE = "_swarm-node._tcp.local."
_RESOLVE_TIMEOUT_MS = 3000
# Bridges of containers and virtual machines reach nobody else on the LAN.
_LAST = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "podman", "cni", "lxc")


def local_addresses(include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """Addresses of this machine that a peer may reach, best first: IPv4 before IPv6, bridges last, no loopback.

    ``include``: only these interfaces; ``exclude``: not these. Link-local IPv6 is left out: it needs a scope.
    """
    found: list[tuple[int, str]] = []
    for interface, addresses in psutil.net_if_addrs().items():
        if (include and interface not in include) or interface in exclude:
            continue
        rank = 2 if interface.startswith(_LAST) else 0
        for entry in addresses:
            try:
                address = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue
            if address.is_loopback or address.is_multicast or (address.version == 6 and address.is_link_local):
                continue
            found.append((rank + (address.version == 6), str(address)))
    return [address for _, address in sorted(found, key=lambda item: item[0])]


@contextlib.asynccontextmanager
async def discovery(
    node_id: str,
    swarm: str,
    port: int,
    addresses: Sequence[str],
    on_found: Callable[[str], None],
    *,
    announce: bool = True,
) -> AsyncIterator[None]:
    """Announces this agent and calls ``on_found`` with the URLs of others, until left."""
    # Only where this node can be reached; and never beyond loopback if it listens there only.
    interfaces = [a for a in addresses if ipaddress.ip_address(a).version == 4] or ["127.0.0.1"]
    try:
        zeroconf = AsyncZeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only)
    except OSError as error:
        log.warning("multicast DNS does not work here (%s): name peers with --seed HOST:PORT", error)
        yield
        return
    info = AsyncServiceInfo(
        SERVICE_TYPE,
        # The node id, not the host name: two machines may be called "pc", and a label has 63 bytes.
        f"{node_id}.{SERVICE_TYPE}",
        port=port,
        parsed_addresses=list(addresses),
        properties={"v": "1", "swarm": swarm[:63]},
        server=f"{node_id}.local.",
    )
    resolving: set[asyncio.Task[None]] = set()

    def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is not ServiceStateChange.Removed and name != info.name:
            task = asyncio.get_running_loop().create_task(_resolve(zeroconf, name, swarm, on_found))
            resolving.add(task)
            task.add_done_callback(resolving.discard)

    browser = None
    try:
        try:
            if announce:
                await zeroconf.async_register_service(info)
            browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[changed])
        except Exception as error:  # zeroconf raises errors of many kinds; without it the node still works
            log.warning("multicast DNS failed (%s: %s): name peers with --seed HOST:PORT", type(error).__name__, error)
        yield
    finally:
        for task in list(resolving):
            task.cancel()
        with contextlib.suppress(Exception):
            if browser is not None:
                await browser.async_cancel()
            async with asyncio.timeout(1.0):
                await zeroconf.async_unregister_all_services()
                await zeroconf.async_close()


async def _resolve(zeroconf: Zeroconf, name: str, swarm: str, on_found: Callable[[str], None]) -> None:
    info = AsyncServiceInfo(SERVICE_TYPE, name)
    if not await info.async_request(zeroconf, _RESOLVE_TIMEOUT_MS):
        return
    if info.properties.get(b"swarm") != swarm[:63].encode():
        return
    for address in info.parsed_addresses(IPVersion.V4Only):
        on_found(f"http://{address}:{info.port}")


async def find_agents(swarm: str, seconds: float) -> AsyncIterator[str]:
    """URLs of agents of a swarm, as multicast DNS finds them, for that many seconds."""
    found: asyncio.Queue[str] = asyncio.Queue()
    # A name that no node has: zeroconf refuses an empty one, also where nothing is announced.
    async with discovery("observer", swarm, 0, local_addresses(), found.put_nowait, announce=False):
        deadline_s = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    url = await found.get()
            except TimeoutError:
                return
            yield url
