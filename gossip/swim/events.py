"""What happens to the core, and what it wants done: its whole border to the world."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gossip.address import Address
from gossip.messages import Packet, Reply, Request
from gossip.state import NodeId

# --- events


class Received(NamedTuple):
    """A packet came from an address."""

    packet: Packet
    source: Address


class Tick(NamedTuple):
    """Time passed: `Gossip.next_s` is reached."""


class Replied(NamedTuple):
    """The reply to an `Ask`; None: there was none in time, or not one that could be read."""

    token: int
    reply: Reply | None


class Announced(NamedTuple):
    """A node may be at an address; ``source`` says how that is known."""

    address: Address
    source: str


class Withdrawn(NamedTuple):
    """The source no longer says that a node is at an address."""

    address: Address


class Published(NamedTuple):
    """This node's record changed."""

    addresses: tuple[str, ...]
    port: int
    payload: bytes


class Incompatible(NamedTuple):
    """A node of this swarm speaks another version."""

    source: Address
    version: int


class Leaving(NamedTuple):
    """This node ends on purpose."""


Event = Received | Tick | Replied | Announced | Withdrawn | Published | Incompatible | Leaving

# --- actions


class Send(NamedTuple):
    """Send a packet by UDP."""

    address: Address
    packet: Packet


class Ask(NamedTuple):
    """Send a request over TCP and hand its reply back as `Replied`."""

    address: Address
    token: int
    request: Request


class Change(Enum):
    """What became of a member."""

    JOINED = "joined"  # or came back
    SUSPECTED = "suspected"
    CLEARED = "cleared"  # the suspicion was wrong
    DIED = "died"
    LEFT = "left"
    FORGOTTEN = "forgotten"
    RECORD = "record"  # a newer record is held


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the program of a change; ``detail`` is for people."""

    change: Change
    node: NodeId
    detail: str = ""


Action = Send | Ask | Notify
