"""Fetches the records of members of which a newer one was heard, and gives away those that are held."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

from gossip.address import Address, normalised
from gossip.errors import GossipError
from gossip.limits import CREDIBLE_MAX, PULLS_MAX
from gossip.messages import PullReply, PullRequest, Record, Reply
from gossip.state import NodeId
from gossip.swim.events import Change
from gossip.swim.local import Local
from gossip.swim.members import Member

_RETRY_S = 0.5
_RETRY_MAX_S = 8.0
# So many are asked in one go; most of the others do not have the record either.
_SOURCES_MAX = 4


@dataclass
class _Pull:
    """A record that is wanted, of which ``teller`` spoke last, and who was asked for it in this go."""

    teller: Address | None
    not_before_s: float = 0.0
    retry_s: float = _RETRY_S
    tried: set[Address] = field(default_factory=set)


class Pulls:
    """Members whose record is wanted. There is at most one pull of each under way, and PULLS_MAX of all."""

    def __init__(self) -> None:
        self._wanted: dict[NodeId, _Pull] = {}
        self._running: set[NodeId] = set()

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, node: NodeId, teller: Address | None) -> None:
        """Takes that news of a newer record came from ``teller``."""
        known = self._wanted.get(node)
        if known is None:
            self._wanted[node] = _Pull(teller)
        else:
            known.teller = teller if teller is not None else known.teller
            known.not_before_s, known.retry_s = 0.0, _RETRY_S
            known.tried.clear()

    def next(self, now_s: float) -> NodeId | None:
        """A member to pull now; it counts as under way until `done` or `failed`."""
        if len(self._running) >= PULLS_MAX:
            return None
        for node, pull in self._wanted.items():
            if node not in self._running and pull.not_before_s <= now_s:
                self._running.add(node)
                return node
        return None

    def source(self, node: NodeId, owner: list[Address], others: list[Address], random: Random) -> Address | None:
        """Whom to ask: the teller or the owner, at random, then the other, then anybody; None: nobody for now."""
        pull = self._wanted[node]
        first = [pull.teller] if pull.teller is not None else []
        first += owner
        if len(first) > 1 and random.random() < 0.5:
            first.reverse()
        if len(pull.tried) < _SOURCES_MAX:
            for address in [*first, *others]:
                if address not in pull.tried:
                    pull.tried.add(address)
                    return address
        pull.tried.clear()
        return None

    def done(self, node: NodeId) -> None:
        """Ends the pull: the record is held, or the member forgotten."""
        self._running.discard(node)
        self._wanted.pop(node, None)

    def failed(self, node: NodeId, now_s: float) -> None:
        """Takes that the record did not come: it is pulled again later, from another if there is one."""
        self._running.discard(node)
        pull = self._wanted.get(node)
        if pull is not None:
            pull.not_before_s = now_s + (0.0 if pull.tried else pull.retry_s)
            if not pull.tried:
                pull.retry_s = min(2 * pull.retry_s, _RETRY_MAX_S)

    def next_s(self) -> float | None:
        """When a pull that waits may go on; None if none waits for time."""
        if len(self._running) >= PULLS_MAX:
            return None
        return min((p.not_before_s for n, p in self._wanted.items() if n not in self._running), default=None)


class Fetcher:
    """Fetches records for one node, and gives away those that it holds."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._pulls = Pulls()

    def __len__(self) -> int:
        return len(self._pulls)

    def want(self, now_s: float, member: Member, teller: Address | None) -> None:
        """Fetches a member's record, of which ``teller`` says that there is a newer one."""
        self._pulls.want(member.node, teller)
        self._go_on(now_s)

    def forget(self, node: NodeId) -> None:
        """Wants nothing of a member any more."""
        self._pulls.done(node)

    def give(self, request: PullRequest) -> Record | None:
        """The record that a peer gets for its request; None if there is none of that version."""
        if request.node == self._local.node:
            return self._local.record
        member = self._local.members.get(NodeId(request.node))
        record = member.record if member is not None else None
        return record if record is not None and record.version >= request.version else None

    def _go_on(self, now_s: float, _: None = None) -> None:
        local = self._local
        while (node := self._pulls.next(now_s)) is not None:
            member = local.members.get(node)
            if member is None or not member.is_live or member.has_newest_record:
                self._pulls.done(node)
                continue
            owner = [member.address] if member.address is not None else []
            others = [m.address for n in local.ring.sample(1, without=node) if (m := local.members.get(n)) is not None]
            source = self._pulls.source(node, owner, [a for a in others if a is not None], local.random)
            if source is None:
                self._pulls.failed(node, now_s)
                continue
            local.ask(source, PullRequest(node, member.version), partial(self._replied, node))
        if (next_s := self._pulls.next_s()) is not None:
            local.timers.set(next_s, self._go_on, None)

    def _replied(self, node: NodeId, now_s: float, reply: Reply | None) -> None:
        member = self._local.members.get(node)
        record = reply.record if isinstance(reply, PullReply) else None
        if member is None:
            self._pulls.done(node)
        elif record is None or record.node != node or record.version > CREDIBLE_MAX:
            self._pulls.failed(node, now_s)
        else:
            self._keep(now_s, member, record)
        self._go_on(now_s)

    def _keep(self, now_s: float, member: Member, record: Record) -> None:
        members, node = self._local.members, member.node
        if record.version > member.version:
            members.change(member, now_s, incarnation=member.incarnation, status=member.status, version=record.version)
            self._local.news.add(node)
        was_hearsay = member.is_hearsay
        if members.keep_record(member, record):
            if was_hearsay:
                self._local.news.add(node)
            member.paths.list_own(_addresses(record))
            self._local.notify(Change.RECORD, node)
        if member.has_newest_record:
            self._pulls.done(node)
        else:
            self._pulls.failed(node, now_s)


def _addresses(record: Record) -> tuple[Address, ...]:
    found = []
    for host in record.addresses:
        try:
            found.append(normalised(host, record.port))
        except GossipError:
            continue
    return tuple(found)
