"""This node's place among the others: gossip, how it finds them, and how it is found.

It owns what `gossip` needs of a program: sockets' hosts, requests over HTTP, and somebody who is told of changes.

Route for peers: ``POST /swarm/v1/gossip?port=PORT``, msgpack both ways; PORT is the asker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from gossip import (
    PROTOCOL_VERSION,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Address,
    Change,
    GossipError,
    NodeId,
    Notify,
    Service,
    normalised,
)
from gossip.discovery import Discovery, Found, InterfaceRules, LocalAddress, local_addresses, watch_interfaces
from node.access import is_private
from node.errors import SwarmError
from node.peers.document import peers_document
from node.peers.http import PeerClient, read_body
from node.peers.identity import Identity
from node.peers.membership import Membership
from node.settings.load import Config
from node.swarm_key import SwarmKey

log = logging.getLogger(__name__)

GOSSIP_PATH = "/swarm/v1/gossip"
CONTENT_TYPE = "application/msgpack"
MULTICAST = "multicast DNS"
# A seed's name may come to mean another address.
_RESOLVE_PERIOD_S = 60.0
_RESOLVE_RETRY_S = 5.0


def interface_rules(config: Config) -> InterfaceRules:
    """Which of this machine's addresses are given to peers."""
    return InterfaceRules(
        include=tuple(config.swarm.interfaces),
        exclude=tuple(config.swarm.exclude_interfaces),
        loopback_only=config.node.host == "loopback",
    )


class Peering:
    """The membership of one node. ``on_news`` is called whenever who is there, or a record, changed."""

    def __init__(self, config: Config, identity: Identity, key: SwarmKey | None, on_news: Callable[[], None]) -> None:
        self._config = config
        self._identity = identity
        self._on_news = on_news
        self._client: PeerClient | None = None
        self._port = config.node.port
        self._announced: dict[str, tuple[Address, ...]] = {}
        self._unnamed: set[NodeId] = set()  # members that came and whose record is awaited
        self._rules = interface_rules(config)
        self.addresses: tuple[LocalAddress, ...] = self._own_addresses()
        self._discovery: Discovery | None = None
        self._record = b""
        self.service = Service(
            swarm=config.swarm.name,
            key=key.derive("gossip") if key is not None else None,
            node_id=identity.node_id,
            boot=identity.boot,
            ask=self._ask,
            on_change=self._changed,
            # Whoever has the key may be anywhere; without one, a swarm is for the networks at home.
            accepts=None if key is not None else is_private,
        )
        self.membership = Membership(self.service.core, config.swarm.name)

    def routes(self) -> list[web.RouteDef]:
        """The agent's route for peers."""
        return [web.post(GOSSIP_PATH, self._answer)]

    def document(self) -> dict[str, Any]:
        """How this node found the others, for ``GET /peers``."""
        _, left_out = local_addresses(self._rules)
        return peers_document(self.service, self.membership, self.addresses, left_out, time.monotonic())

    def publish(self, record: bytes) -> None:
        """Gives the others this node's record, whenever it may have changed."""
        self._record = record
        # A link-local IPv6 address means nothing without the interface, whose name is this machine's own.
        addresses = [entry.address for entry in self.addresses if "%" not in entry.address]
        self.service.publish(addresses, self._port, record)

    async def run(self, client: PeerClient, port: int, started: asyncio.Event) -> None:
        """Keeps this node among the others until cancelled; then they are told.

        Raises OSError if ``port`` cannot be had for UDP.
        """
        self._client, self._port = client, port
        hosts = self._config.node.listen_hosts
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.service.run(hosts, port, started), name="gossip")
            await started.wait()
            self.publish(self._record)
            for seed in self._config.swarm.seeds:
                tasks.create_task(self._follow_seed(seed), name=f"seed {seed}")
            if self._rules.loopback_only:
                return
            self._discovery = Discovery(
                node_id=self._identity.node_id,
                swarm=self._config.swarm.name,
                port=port,
                version=PROTOCOL_VERSION,
                on_found=self._found,
                on_lost=self._lost,
                announce=True,
            )
            self._discovery.set_addresses(self.addresses)
            tasks.create_task(self._discovery.run(), name="discovery")
            if self._config.node.host == "lan":
                tasks.create_task(watch_interfaces(self._rules, self._interfaces_changed), name="interfaces")

    # --- this machine

    def _own_addresses(self) -> tuple[LocalAddress, ...]:
        if self._config.node.host == "lan":
            return tuple(local_addresses(self._rules)[0])
        return (LocalAddress(self._config.node.listen_hosts[0], "", 0),)

    def _interfaces_changed(self, addresses: Sequence[LocalAddress]) -> None:
        if tuple(addresses) == self.addresses:
            return
        log.info("this node is at %s now", ", ".join(a.address for a in addresses) or "no address")
        self.addresses = tuple(addresses)
        self.publish(self._record)
        if self._discovery is not None:
            self._discovery.set_addresses(self.addresses)
        self._on_news()

    # --- finding others

    def _found(self, found: Found) -> None:
        for address in set(self._announced.get(found.node_id, ())) - set(found.addresses):
            self.service.withdraw(address)
        self._announced[found.node_id] = found.addresses
        for address in found.addresses:
            self.service.announce(address, MULTICAST, found.version)

    def _lost(self, node_id: str) -> None:
        for address in self._announced.pop(node_id, ()):
            self.service.withdraw(address)

    async def _follow_seed(self, seed: str) -> None:
        host, _, port = seed.rpartition(":")
        known: set[Address] = set()
        complained = False
        while True:
            delay_s = _RESOLVE_PERIOD_S
            try:
                entries = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port))
                found = {normalised(str(entry[4][0]), int(port)) for entry in entries}
            except (OSError, GossipError) as error:
                if not complained:
                    log.warning("the seed %s has no address: %s. It is looked up again until it has one", seed, error)
                complained, delay_s = True, _RESOLVE_RETRY_S
            else:
                complained = False
                for address in found - known:
                    self.service.announce(address, "seed")
                for address in known - found:
                    self.service.withdraw(address)
                known = found
            await asyncio.sleep(delay_s)

    # --- what gossip asks and tells

    async def _ask(self, address: Address, body: bytes) -> bytes:
        assert self._client is not None
        try:
            status, reply = await self._client.post(
                f"http://{address}",
                f"{GOSSIP_PATH}?port={self._port}",
                body,
                content_type=CONTENT_TYPE,
                limit_bytes=REPLY_BYTES_MAX,
            )
        except (SwarmError, aiohttp.ClientError, ValueError) as error:
            raise GossipError(str(error)) from error
        if status != 200:
            raise GossipError(f"status {status}")
        return reply

    async def _answer(self, request: web.Request) -> web.Response:
        body = await read_body(request, REQUEST_BYTES_MAX)
        source = None
        with contextlib.suppress(GossipError, ValueError):
            source = normalised(request.remote or "", int(request.query.get("port", "")))
        try:
            reply = self.service.answer(body, source)
        except GossipError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.Response(body=reply, content_type=CONTENT_TYPE)

    def _changed(self, notify: Notify) -> None:
        node, change = notify.node, notify.change
        if change is Change.RECORD:
            self.membership.record_changed(node)
            refusal = self.membership.refusal(node)
            log.debug("%s has a new record", self.membership.name(node))
            if refusal:
                log.warning("%s is given no work: %s", self.membership.name(node), refusal)
            elif node in self._unnamed:
                log.info("%s is there", self.membership.name(node))
            self._unnamed.discard(node)
        elif change is Change.JOINED:
            if self.membership.knows(node):
                log.info("%s is there again", self.membership.name(node))
            else:  # said once its record tells what it is called
                self._unnamed.add(node)
            log.debug("node %s: %s", node.hex(), notify.detail)
        elif change is Change.DIED:
            log.warning("%s does not answer any more", self.membership.name(node))
        elif change is Change.LEFT:
            log.info("%s said goodbye", self.membership.name(node))
        elif change is Change.FORGOTTEN:
            self._unnamed.discard(node)
            self.membership.forgotten(node)
        else:
            log.debug("%s: %s %s", self.membership.name(node), change.value, notify.detail)
        self._on_news()
