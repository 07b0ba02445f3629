"""Which addresses of this machine its peers may reach, best first, and why the others are left out.

Nothing is guessed from the default route or from the order in which the system lists interfaces: every usable address
is given, and peers try them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final

import psutil

from gossip.limits import ADDRESSES_MAX


@dataclass(frozen=True)
class InterfaceRules:
    """Which interfaces to use: ``include`` and ``exclude`` hold names or patterns such as ``eth*``.

    None included means all; ``exclude`` wins. ``loopback_only``: only loopback, which is used in no other case.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    loopback_only: bool = False


@dataclass(frozen=True)
class SeenAddress:
    """An address as the system lists it; link-local IPv6 may carry a scope. ``up``: its interface can send."""

    address: str
    interface: str
    up: bool = True


@dataclass(frozen=True)
class LocalAddress:
    """A usable address. Link-local IPv6 carries its interface as scope (``fe80::1%eth0``). Lower ``rank`` is better."""

    address: str
    interface: str
    rank: int


@dataclass(frozen=True)
class LeftOut:
    """An address that is not used, and why, for people."""

    address: str
    interface: str
    reason: str


class Kind(IntEnum):
    """Kinds of interface, best first."""

    LAN = 0
    OTHER = 1
    TUNNEL = 2
    CONTAINER = 3


# Names as Linux, Android and macOS give them. Containers come first: "bridge100" is one on macOS, "bridge0" is not.
_CONTAINER: Final = re.compile(
    r"docker|br-|veth|virbr|vnet\d|vmnet|vmenet|vboxnet|podman|cni|lxc|lxd|incus|cali|flannel|cilium|kube|nerdctl"
    r"|bridge1\d\d"
)
_TUNNEL: Final = re.compile(
    r"tun|tap|wg|tailscale|zt|utun|ppp|ipsec|gre|sit\d|ip6tnl|vti|nordlynx|proton|cscotun|gpd\d|warp|CloudflareWARP",
)
_LAN: Final = re.compile(r"en|eth|em\d|wl|usb|rndis|ib|bond|team|br\d|bridge\d|lan|p\d+p\d")
# What carriers and VPNs such as Tailscale give out (RFC 6598): no LAN, whatever the interface is called.
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")
# Apple's links between devices that are near: no LAN, and gone at any moment.
_APPLE_LINKS: Final = re.compile(r"awdl|llw|anpi")


def kind_of(interface: str) -> Kind:
    """The kind of an interface, by its name."""
    for kind, names in ((Kind.CONTAINER, _CONTAINER), (Kind.TUNNEL, _TUNNEL), (Kind.LAN, _LAN)):
        if names.match(interface):
            return kind
    return Kind.OTHER


def order(local: LocalAddress) -> tuple[int, list[tuple[int, str]], int, int]:
    """A sorting key, best first; it does not depend on the order in which interfaces are listed."""
    address = ipaddress.ip_address(local.address.partition("%")[0])
    # eth10 after eth9.
    name = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", local.interface)]
    return local.rank, name, address.version, int(address)


def usable_addresses(seen: Iterable[SeenAddress], rules: InterfaceRules) -> tuple[list[LocalAddress], list[LeftOut]]:
    """The usable ones, best first, at most `ADDRESSES_MAX`, and all others with a reason.

    Ordinary LAN interfaces come first, then unknown ones, tunnels, and bridges of containers and virtual machines;
    within a kind IPv4, IPv6, and link-local addresses last. What is no IP address is passed over.
    """
    usable: list[LocalAddress] = []
    left_out: list[LeftOut] = []
    for entry in seen:
        plain, _, scope = entry.address.partition("%")
        try:
            address = ipaddress.ip_address(plain)
        except ValueError:  # a hardware address
            continue
        reason = _reason_against(address, entry, rules)
        if reason is not None:
            left_out.append(LeftOut(entry.address, entry.interface, reason))
            continue
        link_local = address.version == 6 and address.is_link_local
        text = f"{address}%{scope or entry.interface}" if link_local else str(address)
        usable.append(LocalAddress(text, entry.interface, _rank(address, entry.interface)))
    chosen: list[LocalAddress] = []
    interface_of: dict[str, str] = {}
    for local in sorted(usable, key=order):
        first = interface_of.setdefault(local.address, local.interface)
        if first == local.interface and local in chosen:
            continue  # listed twice
        if first != local.interface:
            left_out.append(LeftOut(local.address, local.interface, f"{first} has the same address"))
        # Peers keep no more of one node, and one that answers is enough; what is cut off are the worst.
        elif len(chosen) == ADDRESSES_MAX:
            left_out.append(LeftOut(local.address, local.interface, f"only the {ADDRESSES_MAX} best are used"))
        else:
            chosen.append(local)
    left_out.sort(key=lambda out: (out.interface, out.address))
    return chosen, left_out


def _reason_against(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, entry: SeenAddress, rules: InterfaceRules
) -> str | None:
    interface = entry.interface
    if address.is_multicast or address.is_unspecified:
        return "not the address of a machine"
    if rules.loopback_only:
        if not address.is_loopback:
            return "only loopback is used"
    elif address.is_loopback:
        return "loopback reaches only this machine"
    elif rules.include and not any(fnmatchcase(interface, pattern) for pattern in rules.include):
        return "not among the interfaces to use"
    elif any(fnmatchcase(interface, pattern) for pattern in rules.exclude):
        return "among the interfaces not to use"
    if not entry.up:
        return "the interface is down"
    if address.version == 6 and address.is_link_local:
        # It is of use to machines on the same link, and there are none here.
        if _APPLE_LINKS.match(interface):
            return "a link between devices of Apple's"
        if kind_of(interface) in (Kind.TUNNEL, Kind.CONTAINER):
            return "link-local, and the interface is not one of a LAN"
    return None


def _rank(address: ipaddress.IPv4Address | ipaddress.IPv6Address, interface: str) -> int:
    kind = kind_of(interface)
    if isinstance(address, ipaddress.IPv4Address):
        if address in _SHARED:
            kind = max(kind, Kind.TUNNEL)
        # IPv4 link-local is what a machine gives itself when nobody gave it another: last of its kind.
        return 4 * kind + (3 if address.is_link_local else 0)
    return 4 * kind + (2 if address.is_link_local else 1)


def read_interfaces() -> list[SeenAddress]:
    """All addresses of this machine, as the system lists them. Raises OSError where it does not tell."""
    addresses = psutil.net_if_addrs()
    try:
        up = {name: bool(state.isup) for name, state in psutil.net_if_stats().items()}
    except OSError:  # Android does not tell apps
        up = {}
    return [
        SeenAddress(entry.address, name, up.get(name, True))
        for name, entries in addresses.items()
        for entry in entries
        if entry.address
    ]


def local_addresses(rules: InterfaceRules) -> tuple[list[LocalAddress], list[LeftOut]]:
    """`usable_addresses` of this machine, now. Raises OSError where the system does not tell."""
    return usable_addresses(read_interfaces(), rules)
