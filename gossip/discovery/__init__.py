"""Finds addresses where other nodes may be, by DNS-SD over multicast DNS, and lets this node be found.

What it finds are addresses to try and no more: `gossip.swim` finds out who is there. Losing it is a warning, since
nodes that are named, or that call, are found without it. `dns_sd.Discovery` is the whole: it announces and browses
(`multicast_dns`, `service_browser`), keeps what was announced (`announced_services`) and says when multicast DNS does
not work (`multicast_dns_health`). `interfaces` decides which addresses of this machine are given to others, and
`interface_watch` tells when they change. It imports the leaves of `gossip`, and is the only user of zeroconf.
"""

from __future__ import annotations

from gossip.discovery.announced_services import Found
from gossip.discovery.dns_sd import Discovery, find
from gossip.discovery.interface_watch import watch_interfaces
from gossip.discovery.interfaces import InterfaceRules, LeftOut, LocalAddress, local_addresses

__all__ = [
    "Discovery",
    "Found",
    "InterfaceRules",
    "LeftOut",
    "LocalAddress",
    "find",
    "local_addresses",
    "watch_interfaces",
]
