"""A swarm of gossiping nodes in one process, with a network that loses, delays, duplicates and cuts; all from one seed.

Each node is a real `Gossip`; the simulation stands in for its sockets, its clock and its disk. Time is simulated.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from gossip.address import Address
from gossip.core import Gossip
from gossip.envelope import OVERHEAD_BYTES
from gossip.events import (
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
from gossip.messages import Packet, Reply, encode
from gossip.settings import Settings
from gossip.state import NodeId

_PORT = 4100
# IPv4 and UDP headers; TCP's with the handshake, acknowledgements and HTTP's headers, measured once and rounded.
_UDP_BYTES = 28
_TCP_BYTES = 900


@dataclass
class Link:
    """One direction between two nodes. ``loss`` and ``duplicates``: shares of packets. Delays vary, which reorders."""

    delay_s: float = 0.0005
    jitter_s: float = 0.001
    loss: float = 0.0
    duplicates: float = 0.0
    cut: bool = False


@dataclass
class Node:
    """A machine. ``boot`` and ``id`` are its disk. ``rate``: how fast its clock runs."""

    index: int
    id: NodeId
    boot: int
    rate: float
    core: Gossip | None = None
    paused_until_s: float | None = None
    backlog: list[Callable[[], None]] = field(default_factory=list)
    written: dict[tuple[bytes, int], bytes] = field(default_factory=dict)  # (id, version) → payload, all it ever wrote
    packets: int = 0
    bytes: int = 0
    wake_s: float = float("inf")
    generation: int = 0

    @property
    def address(self) -> Address:
        return Address(f"10.{self.index >> 16 & 255}.{self.index >> 8 & 255}.{self.index & 255}", _PORT)

    @property
    def is_up(self) -> bool:
        return self.core is not None


class Simulation:
    """``n`` nodes that know each other's addresses by announcements of each to the next ``announced``."""

    def __init__(
        self, n: int, seed: int, link: Link | None = None, settings: Settings | None = None, announced: int = 3
    ) -> None:
        self.random = Random(seed)
        self.settings = settings or Settings()
        self.now_s = 0.0
        self.link = link or Link()
        self.links: dict[tuple[int, int], Link] = {}
        self.nodes: list[Node] = []
        self._by_address: dict[Address, Node] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._announced = announced
        self.changes: Counter[Change] = Counter()
        #: Called with each notification: (node that notices, notification).
        self.on_notify: Callable[[Node, Notify], None] | None = None
        for index in range(n):
            self.add_node(index)

    # --- what happens to nodes

    def add_node(self, index: int | None = None) -> Node:
        """A new machine, switched off."""
        index = len(self.nodes) if index is None else index
        rate = 1.0 + self.random.uniform(-0.02, 0.02)
        node = Node(index, NodeId(self.random.randbytes(8)), 0, rate)
        self.nodes.append(node)
        self._by_address[node.address] = node
        return node

    def start(self, node: Node, payload: bytes = b"hello") -> None:
        """Starts the node's program; its disk remembers the id and the boot."""
        node.boot += 1
        node.generation += 1
        node.paused_until_s = None
        node.backlog.clear()
        core = Gossip(node.id, node.boot, Random(self.random.getrandbits(64)), self.settings)
        node.core = core
        core.start(self._clock(node))
        self.publish(node, payload)
        for step in range(1, self._announced + 1):
            other = self.nodes[(node.index + step) % len(self.nodes)]
            if other is not node:
                self.feed(node, Announced(other.address, "seed"))

    def crash(self, node: Node) -> None:
        """Ends the node's program without a word."""
        node.core = None
        node.generation += 1
        node.backlog.clear()

    def leave(self, node: Node) -> None:
        """Ends the node's program with a goodbye."""
        self.feed(node, Leaving())
        self.crash(node)

    def lose_disk(self, node: Node) -> None:
        """The machine is a new node from its next start on."""
        node.id = NodeId(self.random.randbytes(8))
        node.boot = 0

    def forget_boot(self, node: Node) -> None:
        """The disk is put back to an older state: the id stays, the boot counter does not."""
        node.boot = 0

    def pause(self, node: Node, duration_s: float) -> None:
        """The node does nothing for a while; what comes meanwhile waits in its sockets."""
        node.paused_until_s = self.now_s + duration_s
        self.at(node.paused_until_s, lambda: self._resume(node))

    def publish(self, node: Node, payload: bytes) -> None:
        """The node's record changes."""
        self.feed(node, Published((node.address.host,), _PORT, payload))
        if node.core is not None:
            node.written[(node.id, node.core.version)] = node.core.record.payload

    def cut(self, side: set[int], *, both: bool = True) -> None:
        """Nothing passes between ``side`` and the others; or only from ``side``, if not ``both``."""
        for a in range(len(self.nodes)):
            for b in range(len(self.nodes)):
                if (a in side) != (b in side) and (both or a in side):
                    self.link_of(a, b).cut = True

    def heal(self) -> None:
        """Ends all cuts."""
        for link in self.links.values():
            link.cut = False

    def link_of(self, a: int, b: int) -> Link:
        """The link from node ``a`` to ``b``, to be changed for these two alone."""
        link = self.links.get((a, b))
        if link is None:
            shared = self.link
            link = self.links[(a, b)] = Link(shared.delay_s, shared.jitter_s, shared.loss, shared.duplicates)
        return link

    # --- time

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Something that happens at a simulated time."""
        heapq.heappush(self._queue, (when_s, next(self._count), action))

    def run(self, duration_s: float, until: Callable[[], bool] | None = None, step_s: float = 0.1) -> bool:
        """Simulates so long, or until a condition holds, looked at every ``step_s``. False: it never held."""
        end_s = self.now_s + duration_s
        queue = self._queue
        next_look_s = self.now_s
        while True:
            if until is not None and self.now_s >= next_look_s:
                if until():
                    return True
                next_look_s = self.now_s + step_s
            limit_s = min(end_s, next_look_s) if until is not None else end_s
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
        """One event for a node."""
        if node.core is None:
            return
        if node.paused_until_s is not None:
            generation = node.generation
            node.backlog.append(lambda: self.feed(node, event) if node.generation == generation else None)
            return
        self._act(node, node.core.handle(self._clock(node), event))

    def _act(self, node: Node, actions: list[Action]) -> None:
        core = node.core
        assert core is not None
        for action in actions:
            if isinstance(action, Send):
                self._send(node, action)
            elif isinstance(action, Ask):
                self._ask(node, action)
            else:
                self.changes[action.change] += 1
                if self.on_notify is not None:
                    self.on_notify(node, action)
        if (node.id, core.version) not in node.written:
            node.written[(node.id, core.version)] = core.record.payload
        self._wake_at(node, core.next_s)

    def _wake_at(self, node: Node, clock_s: float) -> None:
        when_s = max(self.now_s, (clock_s - 1000.0 * node.index) / node.rate + 1e-9)
        if when_s >= node.wake_s:
            return
        node.wake_s = when_s
        generation = node.generation

        def wake() -> None:
            if node.wake_s != when_s:
                return
            node.wake_s = float("inf")
            if node.generation == generation:
                self.feed(node, Tick())

        self.at(when_s, wake)

    def _resume(self, node: Node) -> None:
        node.paused_until_s = None
        node.wake_s = float("inf")
        backlog, node.backlog = node.backlog, []
        # A socket's buffer holds some 200 KB; the rest was dropped.
        for action in backlog[:1000]:
            action()
        self.feed(node, Tick())

    def _send(self, node: Node, action: Send) -> None:
        node.packets += 1
        node.bytes += len(encode(action.packet)) + OVERHEAD_BYTES + _UDP_BYTES
        other = self._by_address.get(action.address)
        if other is None:
            return
        link = self.links.get((node.index, other.index), self.link)
        if link.cut:
            return
        random = self.random.random
        if link.loss and random() < link.loss:
            return
        self._deliver(node.address, other, action.packet, link)
        if link.duplicates and random() < link.duplicates:
            self._deliver(node.address, other, action.packet, link)

    def _deliver(self, source: Address, other: Node, packet: Packet, link: Link) -> None:
        event = Received(packet, source)
        self.at(self.now_s + link.delay_s + link.jitter_s * self.random.random(), lambda: self.feed(other, event))

    def _ask(self, node: Node, action: Ask) -> None:
        """TCP: nothing is lost, but it takes longer where packets are; and ends without a reply after its time."""
        generation = node.generation
        deadline_s = self.now_s + self.settings.request_timeout_s
        node.bytes += len(encode(action.request)) + _TCP_BYTES

        def fail() -> None:
            if node.generation == generation:
                self.feed(node, Replied(action.token, None))

        other = self._by_address.get(action.address)
        there_s = self._tcp_delay(node, other)
        if other is None or there_s is None:
            self.at(deadline_s, fail)
            return

        def arrive() -> None:
            assert other is not None
            if other.core is None:
                self.at(self.now_s + 0.001, fail)  # refused
                return
            if other.paused_until_s is not None:
                other.backlog.append(arrive)
                return
            reply, actions = other.core.answer(self._clock(other), action.request, node.address)
            self._act(other, actions)
            other.bytes += len(encode(reply)) + _TCP_BYTES
            back_s = self._tcp_delay(other, node)
            when_s = None if back_s is None else self.now_s + back_s
            if when_s is not None and when_s <= deadline_s:
                self.at(when_s, lambda: done(reply))

        answered = False

        def done(reply: Reply) -> None:
            nonlocal answered
            answered = True
            if node.generation == generation:
                self.feed(node, Replied(action.token, reply))

        self.at(self.now_s + there_s, arrive)
        self.at(deadline_s, lambda: None if answered else fail())

    def _tcp_delay(self, node: Node, other: Node | None) -> float | None:
        if other is None:
            return None
        link = self.links.get((node.index, other.index), self.link)
        back = self.links.get((other.index, node.index), self.link)
        if link.cut or back.cut:
            return None
        delay_s = 3 * (link.delay_s + link.jitter_s * self.random.random())
        while self.random.random() < link.loss:
            delay_s += 0.2  # retransmission
        return delay_s

    # --- what can be seen

    @property
    def up(self) -> list[Node]:
        """Nodes whose program runs."""
        return [node for node in self.nodes if node.core is not None]

    def views_agree(self) -> bool:
        """Every running node holds exactly the other running nodes to be alive, with their newest records."""
        up = {node.id: node for node in self.up}
        for node in up.values():
            core = node.core
            assert core is not None
            live = 0
            for member in core.members:
                if not member.is_live:
                    continue
                other = up.get(member.node)
                if other is None or other.core is None or member.suspicion is not None:
                    return False
                if member.incarnation != other.core.incarnation or member.record is None:
                    return False
                if member.record.version != other.core.version:
                    return False
                live += 1
            if live != len(up) - 1:
                return False
        return True

    def all_know_dead(self, gone: NodeId) -> bool:
        """No running node holds ``gone`` to be alive."""
        for node in self.up:
            member = node.core.members.get(gone) if node.core is not None else None
            if member is not None and member.is_live:
                return False
        return True
