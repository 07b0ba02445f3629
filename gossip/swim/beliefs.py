"""What a node comes to believe of the others: the merging of what it is told, suspicion, death and forgetting."""

from __future__ import annotations

from collections.abc import Callable

from gossip.address import Address
from gossip.limits import CREDIBLE_MAX
from gossip.messages import Kind, Update
from gossip.state import NodeId, Status, supersedes
from gossip.swim.events import Change
from gossip.swim.lifeguard import Suspicion
from gossip.swim.local import Local
from gossip.swim.members import Member
from gossip.swim.pulls import Fetcher

_REAP_EVERY_S = 5.0


class Beliefs:
    """One node's beliefs. ``on_appeared`` is called when a member that was not thought alive spoke itself."""

    def __init__(self, local: Local, fetcher: Fetcher) -> None:
        self._local = local
        self._fetcher = fetcher
        self.on_appeared: Callable[[float, Member], None] = lambda now_s, member: None
        self.refutations = 0

    def start(self, now_s: float) -> None:
        """Has the dead forgotten after their time, from now on."""
        self._local.timers.set(now_s + _REAP_EVERY_S, self._reap, None)

    # --- what is heard

    def heard(self, now_s: float, node: bytes, incarnation: int, version: int, source: Address | None) -> None:
        """Takes that a node itself spoke; ``source`` says from where."""
        local = self._local
        if node == local.node:
            return
        member = local.members.get(NodeId(node))
        if (
            member is not None
            and member.incarnation == incarnation
            and member.version == version
            and member.status is Status.ALIVE
            and member.heard_s is not None
        ):
            member.heard_s = now_s  # no news, which is most packets
            return
        was_live = member is not None and member.is_live
        self.merge(now_s, Update(node, incarnation, int(Status.ALIVE), version), source, how="it called")
        member = local.members.get(NodeId(node))
        if member is None:
            if source is not None and (accusation := local.accusation(NodeId(node))) is not None:
                local.send(source, local.packet(Kind.NEWS, first=accusation))
            return
        member.heard_s = now_s
        if source is not None and (member.incarnation, member.version) == (incarnation, version):
            # Not where something old comes from: anybody can repeat what it once said.
            member.paths.add(source, "it called")
        believed = member.update()
        if source is not None and (believed.incarnation, believed.status, believed.version) != (
            incarnation,
            0,
            version,
        ):
            # More is believed of it than it says, which only itself can refute.
            local.send(source, local.packet(Kind.NEWS, first=believed))
        if member.is_live and not was_live:
            self.on_appeared(now_s, member)

    def merge_all(self, now_s: float, updates: tuple[Update, ...], source: Address | None) -> None:
        """Merges the updates of a packet."""
        for update in updates:
            self.merge(now_s, update, source)

    def merge_digest(self, now_s: float, updates: tuple[Update, ...], sender: NodeId, source: Address | None) -> None:
        """Merges a whole view. A death in it counts as a suspicion, which the accused may refute: after a cut each side
        thinks the other dead."""
        for update in updates:
            member = self._local.members.get(NodeId(update.node))
            if update.status == Status.DEAD and member is not None and member.is_live:
                update = Update(update.node, update.incarnation, int(Status.SUSPECT), update.version, (sender,))
            self.merge(now_s, update, source)

    def suspect(self, now_s: float, member: Member, incarnation: int) -> None:
        """Suspects a member that gave this node no answer."""
        accusers = (self._local.node,)
        self.merge(now_s, Update(member.node, incarnation, int(Status.SUSPECT), member.version, accusers), None)

    # --- merging

    def merge(self, now_s: float, update: Update, source: Address | None, how: str = "another member told") -> None:
        """Merges an update: the greater of two beliefs holds, whoever tells it and however often."""
        node = NodeId(update.node)
        member = self._local.members.get(node)
        if (
            member is not None
            and update.incarnation == member.incarnation
            and update.version == member.version
            and update.status == member.status != Status.SUSPECT
        ):
            return  # no news, which is most of it
        if update.incarnation > CREDIBLE_MAX or update.version > CREDIBLE_MAX:
            return
        if member is None:
            if node == self._local.node:
                self._merge_own(update)
            else:
                self._meet(now_s, update, source, how)
            return
        if update.version > member.version:
            self._set(now_s, member, member.incarnation, member.status, update.version)
            if member.is_live:
                self._local.news.add(node)
            self._fetcher.want(now_s, member, source)
        if supersedes(update.incarnation, update.status, member.incarnation, int(member.status)):
            self._believe(now_s, member, update)
        elif (
            update.status == Status.SUSPECT
            and member.suspicion is not None
            and update.incarnation == member.incarnation
        ):
            confirmed = [member.suspicion.confirm(NodeId(accuser), self._local.settings) for accuser in update.accusers]
            if any(confirmed):
                self._local.news.add(node)
                self._set_timer(member, member.suspicion)

    def _merge_own(self, update: Update) -> None:
        local = self._local
        if supersedes(update.incarnation, update.status, local.incarnation, int(Status.ALIVE)):
            local.incarnation = update.incarnation + 1
            self.refutations += 1
            local.health.worse()
            local.news.add(local.node)
        if update.version > local.version:
            # The others remember a time of this node that its disk does not.
            old = local.record
            local.set_record(update.version + 1, old.addresses, old.port, old.payload)

    def _meet(self, now_s: float, update: Update, source: Address | None, how: str) -> None:
        local, node = self._local, NodeId(update.node)
        buried = local.members.buried(node)
        if update.status >= Status.DEAD or (buried is not None and update.incarnation <= buried):
            return
        member = local.members.add(node, update.incarnation, update.version, how, now_s)
        if member is None:
            return
        local.ring.add(node)
        local.notify(Change.JOINED, node, how)
        if update.status == Status.SUSPECT:
            self._believe(now_s, member, update)
        self._fetcher.want(now_s, member, source)

    def _believe(self, now_s: float, member: Member, update: Update) -> None:
        local, before, status = self._local, member.status, Status(update.status)
        self._set(now_s, member, update.incarnation, status, member.version)
        local.news.add(member.node)
        member.suspicion = None
        if status > Status.SUSPECT:
            local.ring.remove(member.node)
            if before <= Status.SUSPECT:
                local.notify(Change.DIED if status is Status.DEAD else Change.LEFT, member.node)
            return
        if before > Status.SUSPECT:
            local.ring.add(member.node)
            local.notify(Change.JOINED, member.node, "it came back")
            if not member.has_newest_record:
                self._fetcher.want(now_s, member, None)
        if status is Status.SUSPECT:
            self._begin_suspicion(now_s, member, update)
            if before is not Status.SUSPECT:
                accusers = ", ".join(NodeId(accuser).hex() for accuser in update.accusers)
                local.notify(Change.SUSPECTED, member.node, f"by {accusers}")
        elif before is Status.SUSPECT:
            local.notify(Change.CLEARED, member.node)

    def _set(self, now_s: float, member: Member, incarnation: int, status: Status, version: int) -> None:
        self._local.members.change(member, now_s, incarnation=incarnation, status=status, version=version)

    # --- suspicion and death

    def _begin_suspicion(self, now_s: float, member: Member, update: Update) -> None:
        suspicion = member.suspicion = Suspicion(now_s, {NodeId(accuser) for accuser in update.accusers[:1]})
        for accuser in update.accusers[1:]:
            suspicion.confirm(NodeId(accuser), self._local.settings)
        self._set_timer(member, suspicion)

    def _set_timer(self, member: Member, suspicion: Suspicion) -> None:
        when_s = suspicion.deadline_s(self._local.members.n_live, self._local.settings)
        self._local.timers.set(when_s, self._look_at_suspect, member.node)

    def _look_at_suspect(self, now_s: float, node: NodeId) -> None:
        member = self._local.members.get(node)
        if member is None or member.suspicion is None:
            return
        if member.suspicion.deadline_s(self._local.members.n_live, self._local.settings) > now_s:
            self._set_timer(member, member.suspicion)
            return
        self._believe(now_s, member, Update(member.node, member.incarnation, int(Status.DEAD), member.version))

    def forgive(self, late_s: float) -> None:
        """Prolongs all suspicions: this node was late, and what suspects sent meanwhile is not read yet."""
        for member in self._local.members:
            if member.suspicion is not None:
                member.suspicion.started_s += late_s

    def _reap(self, now_s: float, _: None) -> None:
        local = self._local
        local.timers.set(now_s + _REAP_EVERY_S, self._reap, None)
        for member in local.members.gone:
            if now_s - member.since_s > local.settings.dead_s:
                self._forget(now_s, member, bury=True)
        for member in local.members.unconfirmed:
            if member.is_live and now_s - member.since_s > local.settings.unconfirmed_s:
                self._forget(now_s, member, bury=False)
        local.members.forget_tombstones(now_s - local.settings.tombstone_s)

    def _forget(self, now_s: float, member: Member, *, bury: bool) -> None:
        local = self._local
        local.members.forget(member, now_s, bury=bury)
        local.ring.remove(member.node)
        local.news.discard(member.node)
        self._fetcher.forget(member.node)
        local.notify(Change.FORGOTTEN, member.node)
