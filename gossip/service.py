"""Gossip on real sockets: UDP for packets, the program's own HTTP for requests, one timer; owned by one TaskGroup.

`Gossip` decides everything; here bytes become events and actions become bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

from gossip.address import Address, normalised
from gossip.envelope import Envelope
from gossip.errors import GossipError, NotForUs, UnknownVersion, WrongKey
from gossip.limits import INCOMPATIBLE_MAX, PACKET_BYTES_MAX
from gossip.messages import PROTOCOL_VERSION, decode_packet, decode_reply, decode_request, encode
from gossip.state import NodeId
from gossip.swim.core import Gossip
from gossip.swim.events import (
    Action,
    Announced,
    Ask,
    Event,
    Incompatible,
    Leaving,
    Notify,
    Published,
    Received,
    Replied,
    Send,
    Tick,
    Withdrawn,
)
from gossip.swim.settings import Settings

log = logging.getLogger(__name__)

#: Sends a request's bytes to the program at an address and gives the reply's. May raise OSError, TimeoutError and
#: GossipError.
AskPeer = Callable[[Address, bytes], Awaitable[bytes]]

# Requests under way; each of them has a time limit, and few are needed at a time but in a storm of joins.
_REQUESTS_MAX = 64
# Packets wait here while the loop is busy; the system's default holds some 200.
_RECEIVE_BUFFER_BYTES = 1 << 20
_REOPEN_S = 2.0


@dataclass
class Statistics:
    """Counts since the start. ``foreign`` packets are of another swarm or key; ``malformed`` break the protocol."""

    packets_sent: int = 0
    packets_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    foreign: int = 0
    malformed: int = 0
    unsendable: int = 0
    requests: int = 0
    requests_failed: int = 0
    answered: int = 0


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, service: Service) -> None:
        self._service = service
        self.lost = asyncio.Event()

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self._service._received(data, addr)

    def error_received(self, exc: Exception) -> None:
        # A host that is unreachable now, or refuses: for the core to find out by silence.
        self._service.statistics.unsendable += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


class Service:
    """The gossip of one node. ``key``: 32 bytes or None. ``on_change`` is called on the loop and must not block.

    ``accepts``: whether packets from a host are looked at; None: all are.
    """

    def __init__(
        self,
        *,
        swarm: str,
        key: bytes | None,
        node_id: str,
        boot: int,
        ask: AskPeer,
        on_change: Callable[[Notify], None],
        accepts: Callable[[str], bool] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.core = Gossip(NodeId(bytes.fromhex(node_id)), boot, SystemRandom(), self.settings)
        self.statistics = Statistics()
        self.wrong_keys: dict[str, str] = {}  # host → what is wrong
        self._envelope = Envelope(swarm, key)
        self._accepts = accepts
        self._ask_peer = ask
        self._on_change = on_change
        self._transports: dict[socket.AddressFamily, asyncio.DatagramTransport] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._tasks: asyncio.TaskGroup | None = None
        self._requests = asyncio.Semaphore(_REQUESTS_MAX)

    # --- the program's side

    async def run(self, hosts: Sequence[str], port: int, started: asyncio.Event | None = None) -> None:
        """Gossips until cancelled, then says goodbye. ``hosts``: local addresses to bind, all with one ``port``.

        Raises OSError if none of them can be bound.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._open_all(tasks, hosts, port)
                self.core.start(time.monotonic())
                self._set_timer()
                if started is not None:
                    started.set()
                await asyncio.get_running_loop().create_future()
        finally:
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()
            # Sent now, or never: nobody waits for an answer.
            self._do(self.core.handle(time.monotonic(), Leaving()))
            for transport in self._transports.values():
                transport.close()

    def publish(self, addresses: Sequence[str], port: int, payload: bytes) -> None:
        """Tells the swarm this node's record. Nothing happens if it did not change."""
        self.feed(Published(tuple(addresses), port, payload))

    def announce(self, address: Address, source: str, version: int = PROTOCOL_VERSION) -> None:
        """A node may be at ``address``; ``source`` says how that is known, ``version`` which protocol it speaks."""
        self.feed(Announced(address, source))
        if version != PROTOCOL_VERSION:  # it will not understand a word, and is to be shown
            self.feed(Incompatible(address, version))

    def withdraw(self, address: Address) -> None:
        """The source no longer says that a node is at ``address``."""
        self.feed(Withdrawn(address))

    def answer(self, body: bytes, source: Address | None = None) -> bytes:
        """The reply to a peer's request; ``source`` is the peer's address and UDP port if known. Raises GossipError."""
        request = decode_request(body)
        self.statistics.answered += 1
        reply, actions = self.core.answer(time.monotonic(), request, source)
        self._do(actions)
        self._set_timer()
        return encode(reply)

    def feed(self, event: Event) -> None:
        """Gives the core an event and does what it wants done."""
        self._do(self.core.handle(time.monotonic(), event))
        self._set_timer()

    # --- the network's side

    def _received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self.statistics.packets_received += 1
        self.statistics.bytes_received += len(data)
        try:
            source = normalised(_scoped(addr), addr[1])
        except GossipError:
            return
        if self._accepts is not None and not self._accepts(source.host):
            self.statistics.foreign += 1
            return
        try:
            packet = decode_packet(self._envelope.open(data))
        except UnknownVersion as error:
            self.feed(Incompatible(source, error.version))
            return
        except WrongKey as error:
            self.statistics.foreign += 1
            if source.host not in self.wrong_keys and len(self.wrong_keys) < INCOMPATIBLE_MAX:
                self.wrong_keys[source.host] = str(error)
                log.warning("%s calls itself of this swarm, but %s", source.host, error)
            return
        except NotForUs:
            self.statistics.foreign += 1
            return
        except GossipError:
            self.statistics.malformed += 1
            return
        log.debug("packet of kind %d, %d bytes, from %s", packet.kind, len(data), source)
        self.feed(Received(packet, source))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Ask):
                if self._tasks is not None:
                    self._tasks.create_task(self._ask(action), name=f"gossip request to {action.address}")
            else:
                self._on_change(action)

    def _send(self, action: Send) -> None:
        family = socket.AF_INET6 if ":" in action.address.host else socket.AF_INET
        transport = self._transports.get(family)
        if transport is None or transport.is_closing():
            self.statistics.unsendable += 1
            return
        data = self._envelope.seal(encode(action.packet))
        assert len(data) <= PACKET_BYTES_MAX, len(data)
        try:
            transport.sendto(data, self._target(action.address))
        except (OSError, ValueError):
            self.statistics.unsendable += 1
            return
        log.debug("packet of kind %d, %d bytes, to %s", action.packet.kind, len(data), action.address)
        self.statistics.packets_sent += 1
        self.statistics.bytes_sent += len(data)

    def _target(self, address: Address) -> tuple[str, int] | tuple[str, int, int, int]:
        host, _, scope = address.host.partition("%")
        if not scope:
            return host, address.port
        return host, address.port, 0, int(scope) if scope.isdigit() else socket.if_nametoindex(scope)

    async def _ask(self, action: Ask) -> None:
        reply = None
        self.statistics.requests += 1
        try:
            async with self._requests, asyncio.timeout(self.settings.request_timeout_s):
                reply = decode_reply(await self._ask_peer(action.address, encode(action.request)))
        except (OSError, TimeoutError, GossipError) as error:
            self.statistics.requests_failed += 1
            log.debug("request to %s: %s: %s", action.address, type(error).__name__, error)
        self.feed(Replied(action.token, reply))

    def _set_timer(self) -> None:
        if self._tasks is None:
            return
        next_s = self.core.next_s
        if self._timer is not None:
            if self._timer_s == next_s:
                return
            self._timer.cancel()
        self._timer_s = next_s
        delay_s = max(0.0, next_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    # --- sockets

    async def _open_all(self, tasks: asyncio.TaskGroup, hosts: Sequence[str], port: int) -> None:
        problems: list[OSError] = []
        for host in hosts:
            try:
                protocol = await self._open(host, port)
            except OSError as error:
                # A machine without IPv6 has nothing to bind there.
                problems.append(error)
                continue
            tasks.create_task(self._keep_open(host, port, protocol), name=f"gossip socket {host}")
        if not self._transports:
            raise problems[0] if problems else OSError(errno.EADDRNOTAVAIL, "no address to listen at")

    async def _open(self, host: str, port: int) -> _Protocol:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)))
            if family == socket.AF_INET6:
                endpoint.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            with contextlib.suppress(OSError):
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            endpoint.setblocking(False)
            endpoint.bind((host, port))
            transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Protocol(self), sock=endpoint
            )
            stack.pop_all()  # the transport closes it
        self._transports[family] = transport
        return protocol

    async def _keep_open(self, host: str, port: int, protocol: _Protocol) -> None:
        """Opens a socket again that broke: some systems close them when their interface goes away."""
        while True:
            await protocol.lost.wait()
            log.warning("the gossip socket at %s port %d was lost and is opened again", host, port)
            while True:
                await asyncio.sleep(_REOPEN_S)
                try:
                    protocol = await self._open(host, port)
                    break
                except OSError as error:
                    log.debug("gossip socket %s: %s", host, error)


def _scoped(addr: tuple[Any, ...]) -> str:
    """The host of a socket's address; some event loops give the scope of link-local ones as a number beside it."""
    host = str(addr[0])
    if len(addr) < 4 or not addr[3] or "%" in host:
        return host
    try:
        return f"{host}%{socket.if_indextoname(addr[3])}"
    except OSError:  # the interface is gone
        return host
