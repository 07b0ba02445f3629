"""A swarm of gossiping nodes in one process, on a simulated network and in simulated time; all from one seed.

Each node is a real `Gossip`; the simulation stands in for its sockets, its clock and its disk.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from gossip.address import Address
from gossip.envelope import OVERHEAD_BYTES
from gossip.messages import Reply, Request, encode
from gossip.simulate.network import Link, Network
from gossip.state import NodeId
from gossip.swim.core import Gossip
from gossip.swim.events import (
    Action,
    Announced,
    Ask,
    Change,
    Event,
    Leaving,
    Notify,
    Published,
    Received,
    Replied,
    Send,
    Tick,
)
from gossip.swim.settings import Settings

_PORT = 4100
# IPv4 and UDP headers; TCP's with the handshake, acknowledgements and HTTP's headers, measured once and rounded.
_UDP_BYTES = 28
_TCP_BYTES = 900
# A socket's buffer holds some 200 KB; what comes to a paused node beyond that is dropped.
_BACKLOG_MAX = 1000


@dataclass
class Node:
    """A machine. ``boot`` and ``id`` are its disk. ``rate``: how fast its clock runs."""

    index: int
    id: NodeId
    boot: int
    rate: float
    address: Address
    core: Gossip | None = None
    generation: int = 0  # rises with every start and end of its program
    paused_until_s: float | None = None
    backlog: list[Callable[[], None]] = field(default_factory=list)
    wake_s: float = float("inf")
    packets: int = 0
    bytes: int = 0

    @property
    def is_up(self) -> bool:
        """Whether its program runs, or is stopped in the middle."""
        return self.core is not None

    @property
    def is_paused(self) -> bool:
        """Whether its program is stopped, and will go on."""
        return self.paused_until_s is not None


class Simulation:
    """``n`` nodes, switched off. Each is told the addresses of the next ``announced`` ones when it starts."""

    def __init__(
        self,
        n: int,
        seed: int,
        link: Link | None = None,
        settings: Settings | None = None,
        *,
        announced: int = 3,
        clock_spread: float = 0.02,
    ) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.settings = settings or Settings()
        self.now_s = 0.0
        self.network = Network(link or Link(), self.random, self.settings.request_timeout_s)
        self.nodes: list[Node] = []
        self.changes: Counter[Change] = Counter()
        self.packet_bytes_max = 0
        #: Called after each step of a node: with what it took, and what it did.
        self.on_step: Callable[[Node, Event | Request, list[Action]], None] | None = None
        #: Called with each notification, and the node that gives it.
        self.on_notify: Callable[[Node, Notify], None] | None = None
        self._by_address: dict[Address, Node] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._announced = announced
        self._clock_spread = clock_spread
        for _ in range(n):
            self.add_node()

    # --- what happens to nodes

    def add_node(self) -> Node:
        """Adds a machine, which is switched off."""
        index = len(self.nodes)
        rate = 1.0 + self.random.uniform(-self._clock_spread, self._clock_spread)
        address = Address(f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}", _PORT)
        node = Node(index, NodeId(self.random.randbytes(8)), 0, rate, address)
        self.nodes.append(node)
        self._by_address[address] = node
        return node

    def start(self, node: Node, payload: bytes = b"hello") -> None:
        """Starts the node's program; its disk remembers the id and the boot."""
        self._end(node)
        node.boot += 1
        core = node.core = Gossip(node.id, node.boot, Random(self.random.getrandbits(64)), self.settings)
        core.start(self._clock(node))
        self.publish(node, payload)
        for step in range(1, self._announced + 1):
            other = self.nodes[(node.index + step) % len(self.nodes)]
            if other is not node:
                self.feed(node, Announced(other.address, "seed"))

    def crash(self, node: Node) -> None:
        """Ends the node's program without a word."""
        self._end(node)

    def leave(self, node: Node) -> None:
        """Ends the node's program with a goodbye."""
        self.feed(node, Leaving())
        self._end(node)

    def _end(self, node: Node) -> None:
        node.core = None
        node.generation += 1
        node.paused_until_s = None
        node.backlog.clear()
        node.wake_s = float("inf")

    def lose_disk(self, node: Node) -> None:
        """Wipes the node's disk: the machine is a new node from its next start on."""
        node.id = NodeId(self.random.randbytes(8))
        node.boot = 0

    def forget_boot(self, node: Node) -> None:
        """Puts the disk back to an older state: the id stays, the boot counter does not."""
        node.boot = 0

    def pause(self, node: Node, duration_s: float) -> None:
        """Stops the node for a while; what comes meanwhile waits in its sockets."""
        until_s = node.paused_until_s = self.now_s + duration_s

        def resume() -> None:
            if node.paused_until_s == until_s:
                self._resume(node)

        self.at(until_s, resume)

    def publish(self, node: Node, payload: bytes) -> None:
        """Changes the node's record."""
        self.feed(node, Published((node.address.host,), _PORT, payload))

    # --- time

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Has something happen at a simulated time."""
        heapq.heappush(self._queue, (when_s, next(self._count), action))

    def run(self, duration_s: float, until: Callable[[], bool] | None = None, step_s: float = 0.1) -> bool:
        """Simulates so long, or until a condition holds, looked at every ``step_s``. False: it never held."""
        end_s = self.now_s + duration_s
        queue = self._queue
        while True:
            if until is not None and until():
                return True
            limit_s = end_s if until is None else min(end_s, self.now_s + step_s)
            while queue and queue[0][0] <= limit_s:
                self.now_s, _, action = heapq.heappop(queue)
                action()
            self.now_s = limit_s
            if limit_s >= end_s:
                return until is None or until()

    # --- what the simulation stands in for

    def _clock(self, node: Node) -> float:
        return self.now_s * node.rate + 1000.0 * node.index

    def feed(self, node: Node, event: Event) -> None:
        """Gives a node an event."""
        core = node.core
        if core is None:
            return
        if node.paused_until_s is not None:
            node.backlog.append(lambda: self.feed(node, event))
            return
        self._act(node, core, event, core.handle(self._clock(node), event))

    def _act(self, node: Node, core: Gossip, cause: Event | Request, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(node, action)
            elif isinstance(action, Ask):
                self._ask(node, action)
            else:
                self.changes[action.change] += 1
                if self.on_notify is not None:
                    self.on_notify(node, action)
        if self.on_step is not None:
            self.on_step(node, cause, actions)
        self._set_wake(node, core)

    def _set_wake(self, node: Node, core: Gossip) -> None:
        when_s = (core.next_s - 1000.0 * node.index) / node.rate + 1e-9
        if when_s >= node.wake_s:
            return
        node.wake_s = when_s = max(self.now_s, when_s)

        def wake() -> None:
            if node.wake_s != when_s or node.core is not core:
                return
            node.wake_s = float("inf")
            if node.paused_until_s is None and core.next_s > self._clock(node):
                self._set_wake(node, core)  # what was due then is no longer
            else:
                self.feed(node, Tick())

        self.at(when_s, wake)

    def _resume(self, node: Node) -> None:
        node.paused_until_s = None
        backlog, node.backlog = node.backlog, []
        generation = node.generation
        for action in backlog[:_BACKLOG_MAX]:
            if node.generation == generation:
                action()
        self.feed(node, Tick())

    def _send(self, node: Node, action: Send) -> None:
        size_bytes = len(encode(action.packet)) + OVERHEAD_BYTES
        if size_bytes > self.packet_bytes_max:
            self.packet_bytes_max = size_bytes
        node.packets += 1
        node.bytes += size_bytes + _UDP_BYTES
        other = self._by_address.get(action.address)
        if other is None:
            return
        event = Received(action.packet, node.address)
        for delay_s in self.network.udp_delays_s(node.index, other.index):
            self.at(self.now_s + delay_s, partial(self.feed, other, event))

    def _ask(self, node: Node, action: Ask) -> None:
        """Asks over TCP: nothing is lost, but it takes longer where packets are, and ends without a reply in time."""
        generation = node.generation
        deadline_s = self.now_s + self.settings.request_timeout_s
        node.bytes += len(encode(action.request)) + _TCP_BYTES
        answered = False

        def done(reply: Reply | None) -> None:
            nonlocal answered
            if not answered and node.generation == generation:
                answered = True
                self.feed(node, Replied(action.token, reply))

        self.at(deadline_s, lambda: done(None))
        other = self._by_address.get(action.address)
        if other is None:
            return
        there_s = self.network.tcp_delay_s(node.index, other.index, connects=True)

        def arrive() -> None:
            if other.core is None:
                self.at(self.now_s + self.network.link.delay_s, lambda: done(None))  # refused
                return
            if other.paused_until_s is not None:
                other.backlog.append(arrive)
                return
            reply, actions = other.core.answer(self._clock(other), action.request, node.address)
            self._act(other, other.core, action.request, actions)
            other.bytes += len(encode(reply)) + _TCP_BYTES
            back_s = self.network.tcp_delay_s(other.index, node.index, connects=False)
            if back_s is not None:
                self.at(self.now_s + back_s, lambda: done(reply))

        if there_s is not None:
            self.at(self.now_s + there_s, arrive)

    # --- what can be seen

    @property
    def up(self) -> list[Node]:
        """The nodes whose program runs."""
        return [node for node in self.nodes if node.core is not None]

    def views_agree(self) -> bool:
        """Whether every running node holds exactly the others that run to be alive, with their newest records."""
        up = {node.id: node.core for node in self.nodes if node.core is not None}
        return all(_sees_all(core, up) for core in up.values())

    def all_know_gone(self, gone: NodeId) -> bool:
        """Whether no running node holds ``gone`` to be alive."""
        cores = [node.core for node in self.nodes if node.core is not None]
        return all((member := core.members.get(gone)) is None or not member.is_live for core in cores)

    def all_know_record(self, node: Node) -> bool:
        """Whether every other running node has the node's newest record."""
        assert node.core is not None
        for other in self.nodes:
            if other is not node and other.core is not None:
                member = other.core.members.get(node.id)
                if member is None or member.record != node.core.record:
                    return False
        return True


def _sees_all(core: Gossip, up: dict[NodeId, Gossip]) -> bool:
    if core.members.n_live != len(up):
        return False
    for node, other in up.items():
        if node == core.node:
            continue
        member = core.members.get(node)
        if member is None or not member.is_live or member.suspicion is not None:
            return False
        if member.incarnation != other.incarnation or member.record != other.record:
            return False
    return True
