"""Services that multicast DNS told of: what an announcement says, and which ones are known."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from zeroconf import ServiceInfo

from gossip.address import Address, normalised
from gossip.errors import GossipError
from gossip.limits import ADDRESSES_MAX
from gossip.state import NODE_ID_BYTES

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A LAN has tens of nodes, and gossip tells of the rest; anybody on the LAN can announce any number.
SERVICES_MAX: Final = 256
# A swarm's name is for people. As long as a DNS label may be, it leaves the announcement in one small packet.
_SWARM_BYTES_MAX: Final = 63
_NODE_ID: Final = re.compile(rf"[0-9a-f]{{{2 * NODE_ID_BYTES}}}")
_VERSION: Final = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class Found:
    """A node that was announced. Nothing of it is proven. ``addresses``: IPv4 first, link-local last, at most 16 and
    at least one. ``name`` is the instance's full name.
    """

    node_id: str
    swarm: str
    version: int
    addresses: tuple[Address, ...]
    name: str


def is_node_id(text: str) -> bool:
    """Whether ``text`` is a node id as it is announced: 16 lower-case hex digits."""
    return _NODE_ID.fullmatch(text) is not None


def announced_swarm(swarm: str) -> str:
    """What an announcement says of a swarm's name: the name, or a hash of it where it is too long."""
    if len(swarm.encode()) <= _SWARM_BYTES_MAX:
        return swarm
    return f"sha256:{hashlib.sha256(swarm.encode()).hexdigest()[:48]}"


def announced_text(node_id: str, swarm: str, version: int) -> dict[str, str]:
    """The TXT record: everything else is told over HTTP."""
    return {"v": str(version), "swarm": announced_swarm(swarm), "id": node_id}


def parse(info: ServiceInfo, swarm: str, *, loopback: bool) -> Found | None:
    """What a resolved service says; None if it is of another swarm, or not what a node announces.

    ``loopback``: whether loopback addresses are taken; from another machine they would lead to this one.
    """
    text = {key: value or b"" for key, value in info.properties.items()}
    if text.get(b"swarm") != announced_swarm(swarm).encode():
        return None
    node_id, version = (text.get(key, b"").decode("ascii", "replace") for key in (b"id", b"v"))
    if not is_node_id(node_id) or not _VERSION.fullmatch(version):
        return None
    addresses: dict[Address, tuple[int, int]] = {}
    for written in info.parsed_scoped_addresses():
        plain, _, scope = written.partition("%")
        try:
            address = normalised(f"{plain}%{_interface(scope)}" if scope else plain, info.port or 0)
        except GossipError:
            continue
        ip = ipaddress.ip_address(plain)
        # Without the link it was heard on, nobody knows where a link-local address is.
        if (ip.is_loopback and not loopback) or (ip.version == 6 and ip.is_link_local and not scope):
            continue
        addresses[address] = (2 * ip.is_link_local + (ip.version == 6), int(ip))
    if not addresses:
        return None
    best_first = sorted(addresses, key=lambda address: (addresses[address], address))
    return Found(node_id, swarm, int(version), tuple(best_first[:ADDRESSES_MAX]), info.name)


def _interface(scope: str) -> str:
    """An interface's name, from the number that zeroconf gives."""
    try:
        return socket.if_indextoname(int(scope))
    except (ValueError, OverflowError, OSError):
        return scope


class NameQueue:
    """A queue of names: each is in it once, and the first comes out first."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Appends a name, unless it is there."""
        self._names[name] = None
        self._some.set()

    def discard(self, name: str) -> None:
        """Removes a name, if it is there."""
        self._names.pop(name, None)

    async def next(self) -> str:
        """Takes the first name; waits for one."""
        while not self._names:
            self._some.clear()
            await self._some.wait()
        name = next(iter(self._names))
        del self._names[name]
        return name


class KnownServices:
    """The announced services, at most `SERVICES_MAX`, and those among them that are to be resolved: ``told``, of which
    something was heard, and ``asked``, of which not enough was heard. Both hold names of known services, and so are
    as bounded as these.

    ``on_found``: a node is announced, or announced differently; ``on_lost``: no longer, by its node id.
    """

    def __init__(self, on_found: Callable[[Found], None], on_lost: Callable[[str], None]) -> None:
        self._on_found = on_found
        self._on_lost = on_lost
        self._services: dict[str, Found | None] = {}  # by name; None until resolved, and of other swarms
        self.told = NameQueue()
        self.asked = NameQueue()
        self._unseen: set[str] = set()
        self._full = False

    def added(self, name: str) -> None:
        """Takes that a name was announced, now or some time ago."""
        self._unseen.discard(name)
        if self._services.get(name) is not None:
            return  # a change of it is told by `updated`
        if name not in self._services and not self._has_room():
            if not self._full:
                log.warning("more than %d nodes are announced on this network: no more are taken", SERVICES_MAX)
            self._full = True
            return
        self._services.setdefault(name)
        self.told.add(name)

    def updated(self, name: str) -> None:
        """Takes that something of a name changed."""
        if name in self._services:
            self.told.add(name)

    def removed(self, name: str) -> None:
        """Takes that a name was withdrawn, or that nobody has announced it for long."""
        self._unseen.discard(name)
        self.told.discard(name)
        self.asked.discard(name)
        found = self._services.pop(name, None)
        if found is not None:
            self._lost(found.node_id)

    def resolved(self, name: str, found: Found | None) -> None:
        """Takes what a name stands for; None: nothing of this swarm."""
        if name not in self._services:
            return  # removed meanwhile
        before = self._services[name]
        if found == before:
            return
        self._services[name] = found
        if before is not None and (found is None or found.node_id != before.node_id):
            self._lost(before.node_id)
        if found is not None:
            _call(self._on_found, found)

    def ask(self, name: str) -> None:
        """Has a name asked for, of which not enough was heard."""
        if name in self._services:
            self.asked.add(name)

    def recheck(self) -> None:
        """Looks at every name again: this machine's network is another, and what is known may have changed unheard."""
        for name in self._services:
            self.told.add(name)

    def expect_again(self) -> None:
        """Begins anew with nothing heard: names that are not `added` again until `forget_unseen` are gone then."""
        self._unseen = set(self._services)

    def forget_unseen(self) -> None:
        """Removes the names that were to be seen again and were not."""
        for name in list(self._unseen):
            self.removed(name)

    def _has_room(self) -> bool:
        """Whether there is room for a name: those of other swarms, or with nobody behind them, are dropped for it."""
        if len(self._services) < SERVICES_MAX:
            return True
        for name, found in self._services.items():
            if found is None:
                self.removed(name)
                return True
        return False

    def _lost(self, node_id: str) -> None:
        if not any(found is not None and found.node_id == node_id for found in self._services.values()):
            _call(self._on_lost, node_id)


def _call(callback: Callable[[_T], None], argument: _T) -> None:
    try:
        callback(argument)
    except Exception:  # the caller's fault, and no reason to stop looking
        log.exception("the callback for %s failed", argument)
