"""Who is in the swarm, and what each member says of itself: a library of its own, which knows nothing of models.

Every node runs SWIM with Lifeguard. It pings one member a second, in turn; one that does not answer is asked again in
every way there is, suspected, and after a while declared dead. News of members travels on these packets. What a node
says of itself is its record, an opaque payload under a version, which members pull from each other when they hear of
a newer one.

`Gossip` (`gossip.swim`) decides all of that as a state machine without sockets or a clock. `Service` gives it both.
`gossip.discovery` finds first addresses to try, by multicast DNS. `gossip.simulate` runs hundreds of `Gossip` in one
process, through every kind of fault. Leaves that all of them share: `address`, `state` (which of two beliefs holds),
`messages` and `envelope` (the bytes, docs/protocol.md), `limits` (what a peer can make grow, and how far), `errors`.

A program needs the names below, and those of `gossip.discovery`; every other module is the library's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gossip.address import Address, normalised
from gossip.errors import GossipError
from gossip.messages import PROTOCOL_VERSION, REPLY_BYTES_MAX, REQUEST_BYTES_MAX
from gossip.state import NodeId, Status, boot_of
from gossip.swim.core import Gossip
from gossip.swim.events import Change, Notify
from gossip.swim.members import Member

if TYPE_CHECKING:
    from gossip.service import Service

__all__ = [
    "PROTOCOL_VERSION",
    "REPLY_BYTES_MAX",
    "REQUEST_BYTES_MAX",
    "Address",
    "Change",
    "Gossip",
    "GossipError",
    "Member",
    "NodeId",
    "Notify",
    "Service",
    "Status",
    "boot_of",
    "normalised",
]


def __getattr__(name: str) -> Any:
    # Only who gossips on sockets pays for asyncio and ciphers: importing them takes longer than all the rest.
    if name == "Service":
        from gossip.service import Service

        return Service
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
