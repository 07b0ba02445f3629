"""Where a node can be reached: a numeric IP address and the port that its agent uses for UDP and TCP alike."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from gossip.errors import GossipError


class Address(NamedTuple):
    """``host`` is numeric, as `normalised` writes it. Link-local IPv6 may carry a scope (``fe80::1%eth0``)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def normalised(host: str, port: int) -> Address:
    """The one spelling of an address, IPv4 in IPv6 unwrapped. Raises GossipError for what nobody can be reached at."""
    plain, _, scope = host.partition("%")
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        raise GossipError(f"{host[:64]!r} is not a numeric address") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address, scope = address.ipv4_mapped, ""
    if address.is_unspecified or address.is_multicast or not 0 < port < 65536:
        raise GossipError(f"nobody can be reached at {plain} port {port}")
    if len(scope) > 15 or not scope.isascii() or "/" in scope:  # what Linux allows for an interface's name
        raise GossipError(f"{scope[:32]!r} is not the name of an interface")
    return Address(f"{address}%{scope}" if scope else str(address), port)
