"""What the parts of one node's core share: the node itself, what it believes, and what it wants done."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gossip.address import Address
from gossip.messages import UPDATES_MAX, Kind, Packet, Record, Reply, Request, Update
from gossip.state import NodeId, Status, first_counter, first_version
from gossip.swim.broadcasts import Broadcasts
from gossip.swim.events import Action, Ask, Change, Notify, Send
from gossip.swim.lifeguard import LocalHealth
from gossip.swim.members import Members
from gossip.swim.ring import ProbeRing
from gossip.swim.settings import Settings
from gossip.swim.timers import Timers


class Local:
    """One node, as its parts share it. Everything that it sends and tells is collected in ``actions``."""

    def __init__(self, node: NodeId, boot: int, random: Random, settings: Settings) -> None:
        self.node = node
        self.settings = settings
        self.random = random
        self.first_incarnation = self.incarnation = first_counter(boot)
        self.record = Record(node, first_version(boot, random), (), 1, b"")
        self.leaving = False
        self.members = Members(node)
        self.ring = ProbeRing(random)  # the live members
        self.news = Broadcasts()
        self.health = LocalHealth(settings.health_max)
        self.timers = Timers()
        self.actions: list[Action] = []
        # Random, so that an acknowledgement of the process before is not one of this.
        self._first_sequence = self._sequence = random.getrandbits(40)
        self._asked: dict[int, Callable[[float, Reply | None], None]] = {}

    # --- itself

    @property
    def version(self) -> int:
        """The record's version."""
        return self.record.version

    def own_update(self) -> Update:
        """What others are to know of this node."""
        status = Status.LEFT if self.leaving else Status.ALIVE
        return Update(self.node, self.incarnation, int(status), self.record.version)

    def set_record(self, version: int, addresses: tuple[str, ...], port: int, payload: bytes) -> None:
        """Puts a new version of this node's record in place of the last."""
        self.record = Record(self.node, version, addresses, port, payload)
        self.news.add(self.node)

    def hash(self) -> bytes:
        """A hash of this node's view of who lives, 16 bytes."""
        return self.members.hash(self.own_update())

    def digest(self) -> tuple[Update, ...]:
        """All that this node believes and passes on, itself included."""
        return (self.own_update(), *(member.update() for member in self.members if not member.is_hearsay))

    # --- what it wants done

    def next_sequence(self) -> int:
        """The number of the next ping or request."""
        self._sequence += 1
        return self._sequence

    def was_sent(self, sequence: int) -> bool:
        """Whether this process gave this number out."""
        return self._first_sequence < sequence <= self._sequence

    def packet(
        self,
        kind: Kind,
        sequence: int = 0,
        *,
        target: bytes | None = None,
        address: Address | None = None,
        first: Update | None = None,
    ) -> Packet:
        """A packet of this node with news, ``first`` before all."""
        updates: tuple[Update, ...] = () if first is None else (first,)
        if len(self.news):
            updates += self._pick_news(UPDATES_MAX - len(updates), first.node if first is not None else None)
        host = None if address is None else (address.host, address.port)
        return Packet(int(kind), self.node, self.incarnation, self.record.version, sequence, target, host, updates)

    def _pick_news(self, limit: int, without: bytes | None) -> tuple[Update, ...]:
        updates = []
        for node in self.news.pick(limit, self.settings.transmits(self.members.n_live)):
            if node == self.node:
                updates.append(self.own_update())
            elif node != without and (member := self.members.get(node)) is not None and not member.is_hearsay:
                updates.append(member.update())
        return tuple(updates)

    def accusation(self, node: NodeId) -> Update | None:
        """The belief of a node that it is to refute, if there is one."""
        member = self.members.get(node)
        if member is not None:
            return None if member.status is Status.ALIVE else member.update()
        buried = self.members.buried(node)
        return None if buried is None else Update(node, buried, int(Status.DEAD), 0)

    def send(self, address: Address, packet: Packet) -> None:
        """Queues a packet to be sent by UDP."""
        self.actions.append(Send(address, packet))

    def ask(self, address: Address, request: Request, then: Callable[[float, Reply | None], None]) -> None:
        """Queues a request to be sent over TCP. ``then`` gets the time and the reply, or None."""
        token = self.next_sequence()
        self._asked[token] = then
        self.actions.append(Ask(address, token, request))

    @property
    def n_asked(self) -> int:
        """How many requests have no reply so far."""
        return len(self._asked)

    def replied(self, now_s: float, token: int, reply: Reply | None) -> None:
        """Hands a reply to whoever asked."""
        then = self._asked.pop(token, None)
        if then is not None:
            then(now_s, reply)

    def notify(self, change: Change, node: NodeId, detail: str = "") -> None:
        """Queues a notification of the program."""
        self.actions.append(Notify(change, node, detail))
