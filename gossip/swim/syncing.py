"""Anti-entropy: now and then a node compares the hash of its view with a member's, and where they differ, the views."""

from __future__ import annotations

from functools import partial

from gossip.address import Address
from gossip.messages import Reply, SyncReply, SyncRequest
from gossip.state import NodeId
from gossip.swim.beliefs import Beliefs
from gossip.swim.local import Local
from gossip.swim.members import Member

# However many members appear, views are compared with one of them in this time.
_GREET_EVERY_S = 1.0


class Syncs:
    """The comparisons of one node with others."""

    def __init__(self, local: Local, beliefs: Beliefs) -> None:
        self._local = local
        self._beliefs = beliefs
        self._last_s = float("-inf")

    def start(self, now_s: float) -> None:
        """The first one comes at a random time, so that nodes do not keep step."""
        local = self._local
        local.timers.set(now_s + local.random.random() * local.settings.sync_period_s, self._begin, None)

    def greet(self, now_s: float, member: Member) -> None:
        """Compares views with a member that appeared or came back."""
        if member.address is not None and now_s - self._last_s >= _GREET_EVERY_S:
            self._ask(now_s, member.address)

    def answer(self, now_s: float, request: SyncRequest, source: Address | None) -> SyncReply:
        """The reply to a peer that compares views."""
        local = self._local
        self._beliefs.heard(now_s, request.sender, request.incarnation, request.version, source)
        self._beliefs.merge_digest(now_s, request.members, NodeId(request.sender), source)
        own_hash = local.hash()
        members = () if request.hash == own_hash and not request.members else local.digest()
        return SyncReply(local.node, local.incarnation, local.version, own_hash, members)

    def _begin(self, now_s: float, _: None) -> None:
        local = self._local
        local.timers.set(now_s + local.settings.sync_period_s, self._begin, None)
        for node in local.ring.sample(1):
            member = local.members.get(node)
            if member is not None and member.address is not None:
                self._ask(now_s, member.address)

    def _ask(self, now_s: float, address: Address, *, everything: bool = False) -> None:
        local = self._local
        self._last_s = now_s
        members = local.digest() if everything else ()
        request = SyncRequest(local.node, local.incarnation, local.version, local.hash(), members)
        local.ask(address, request, partial(self._replied, address, everything))

    def _replied(self, address: Address, everything: bool, now_s: float, reply: Reply | None) -> None:
        if not isinstance(reply, SyncReply):
            return
        self._beliefs.heard(now_s, reply.sender, reply.incarnation, reply.version, address)
        self._beliefs.merge_digest(now_s, reply.members, NodeId(reply.sender), address)
        if reply.members and not everything and reply.hash != self._local.hash():
            self._ask(now_s, address, everything=True)  # it lacks something that this node knows
