"""One gossip core by itself, spoken to by hand: time stands still unless a test moves it."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random
from types import MethodType
from typing import Any, TypeVar

from gossip.address import Address
from gossip.messages import Kind, Packet, PullReply, PullRequest, Record, Update
from gossip.state import NodeId
from gossip.swim.core import Gossip
from gossip.swim.events import Action, Ask, Event, Notify, Published, Received, Replied, Send, Tick
from gossip.swim.settings import Settings

SELF = NodeId(b"self....")
ALICE, BOB, CAROL, DAVE = (NodeId(name.ljust(8, b".")) for name in (b"alice", b"bob", b"carol", b"dave"))
A = TypeVar("A", Send, Ask, Notify)


def node(index: int) -> NodeId:
    """The id of one of many."""
    return NodeId(b"n" + index.to_bytes(7, "big"))


def address(of: NodeId) -> Address:
    """The address of a node."""
    return Address(f"10.0.{of[0]}.{sum(of[1:]) % 256}", 4100)


def packet(
    sender: NodeId, kind: Kind = Kind.NEWS, sequence: int = 0, *, updates: tuple[Update, ...] = (), **more: object
) -> Packet:
    """A packet of a node whose incarnation and record version are 1."""
    fields = {"incarnation": 1, "version": 1, "target": None, "address": None} | more
    return Packet(int(kind), sender, sequence=sequence, updates=updates, **fields)  # type: ignore[arg-type]


def record(of: NodeId, version: int = 1, payload: bytes = b"", hosts: tuple[str, ...] | None = None) -> Record:
    """A node's record; it lists the address of `address`, if not told otherwise."""
    return Record(of, version, (address(of).host,) if hosts is None else hosts, 4100, payload)


def chosen(actions: list[Action], kind: type[A]) -> list[A]:
    """Actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


class Core:
    """A started `Gossip` and its clock."""

    def __init__(self, boot: int = 1, seed: int = 1, settings: Settings | None = None) -> None:
        self.gossip = Gossip(SELF, boot, Random(seed), settings)
        self.now_s = 1000.0
        self.gossip.start(self.now_s)
        self.take(Published((address(SELF).host,), 4100, b"mine"))

    def take(self, event: Event) -> list[Action]:
        """Gives the core an event, now."""
        return self.gossip.handle(self.now_s, event)

    def hear(self, sender: NodeId, kind: Kind = Kind.NEWS, sequence: int = 0, **more: object) -> list[Action]:
        """A packet from a node, from where it is."""
        return self.take(Received(packet(sender, kind, sequence, **more), address(sender)))  # type: ignore[arg-type]

    def meet(self, *nodes: NodeId) -> None:
        """Each of them calls, and gives its record."""
        for other in nodes:
            actions = self.hear(other)
            while pulls := [ask for ask in chosen(actions, Ask) if isinstance(ask.request, PullRequest)]:
                ask = pulls[0]
                reply = PullReply(record(NodeId(ask.request.node)))  # type: ignore[union-attr]
                actions = self.take(Replied(ask.token, reply))

    def wait(self, duration_s: float) -> list[tuple[float, Action]]:
        """Lets time pass in silence; returns what is done, and how long after."""
        start_s, end_s = self.now_s, self.now_s + duration_s
        done: list[tuple[float, Action]] = []
        while self.gossip.next_s <= end_s:
            self.now_s = max(self.now_s, self.gossip.next_s)
            done += [(self.now_s - start_s, action) for action in self.take(Tick())]
        self.now_s = end_s
        return done

    def wait_for_probe(self, within_s: float = 3.0) -> Send:
        """Lets time pass until a member is probed."""
        end_s = self.now_s + within_s
        while self.gossip.next_s <= end_s:
            self.now_s = max(self.now_s, self.gossip.next_s)
            for send in chosen(self.take(Tick()), Send):
                if send.packet.kind == Kind.PING:
                    return send
        raise AssertionError("nobody is probed")

    def keep_alive(self, duration_s: float, *nodes: NodeId) -> list[Action]:
        """Lets time pass, in which some of the others answer at once; returns what is done."""
        done: list[Action] = []
        end_s = self.now_s + duration_s
        while self.gossip.next_s <= end_s:
            self.now_s = max(self.now_s, self.gossip.next_s)
            actions = self.take(Tick())
            done += actions
            for send in chosen(actions, Send):
                target = send.packet.target
                if send.packet.kind == Kind.PING and target in nodes:
                    done += self.hear(NodeId(target), Kind.ACK, send.packet.sequence, target=target)
        self.now_s = end_s
        return done

    def belief(self, of: NodeId) -> tuple[int, str, int] | None:
        """What is believed of a node: incarnation, status and record version."""
        member = self.gossip.members.get(of)
        return None if member is None else (member.incarnation, member.status.name, member.version)


def state_of(thing: object) -> object:
    """Everything that a core holds, as something that can be compared."""
    return _Walk().state(thing)


class _Walk:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def state(self, thing: Any) -> object:
        if thing is None or isinstance(thing, str | bytes | int | float | bool):
            return thing
        if isinstance(thing, set | frozenset):
            return sorted(map(repr, thing))
        if isinstance(thing, Random):
            return thing.getstate()
        if isinstance(thing, count):
            return repr(thing)
        if isinstance(thing, MethodType):
            return thing.__qualname__, self.state(thing.__self__)
        if isinstance(thing, partial):
            return self.state(thing.func), self.state(thing.args)
        if id(thing) in self._seen:
            return "seen", self._seen[id(thing)]
        self._seen[id(thing)] = len(self._seen)
        if isinstance(thing, dict):
            return [(self.state(key), self.state(value)) for key, value in thing.items()]
        if isinstance(thing, tuple | list):
            return [self.state(value) for value in thing]
        if hasattr(thing, "__dict__"):
            return type(thing).__name__, self.state(vars(thing))
        names = getattr(thing, "__struct_fields__", None) or getattr(thing, "__slots__", None)
        if names:
            return type(thing).__name__, [self.state(getattr(thing, name)) for name in names]
        raise TypeError(f"what is a {type(thing)}?")
