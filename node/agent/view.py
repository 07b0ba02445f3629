"""What a node sees of its swarm at one moment: who routes, which model is served, what is missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from node.agent import election, readiness
from node.agent.own_record import Node, Own, own_record
from node.api.swarm import Here, ServedModel, There, Unavailable
from node.peers.membership import Peer
from node.records import Record, Router
from node.transfer.catalogue import Entry, catalogue

#: What is said where nobody routes.
NO_ROUTER = "no node of the swarm serves a model yet; start one with --model FILE"


@dataclass(frozen=True)
class View:
    """A snapshot. ``peers``: the others by node id, live ones and those that were silent for less than a minute.

    ``age_s``: how long this node has been running.
    """

    node: Node
    own: Own
    peers: Mapping[str, Peer]
    age_s: float

    @cached_property
    def record(self) -> Record:
        """What this node says of itself."""
        return own_record(self.node, self.own, can_route=self._can_route())

    @property
    def alive(self) -> dict[str, Peer]:
        """The live peers by node id."""
        return {node_id: peer for node_id, peer in self.peers.items() if peer.alive}

    @cached_property
    def live_records(self) -> list[Record]:
        """The records of this node and of the live peers."""
        return [self.record, *(peer.record for peer in self.alive.values())]

    def routing_node(self) -> tuple[Record, str] | None:
        """The router's record and its agent's URL ("" for this node itself); None while there is none."""
        found = election.routing(self.live_records)
        if found is None:
            return None
        return found, "" if found is self.record else self.peers[found.node].url

    def router(self) -> Here | There | Unavailable:
        """Where queries go."""
        found = self.routing_node()
        if found is None or found[0].router is None:
            return Unavailable("no_router", NO_ROUTER[:1].upper() + NO_ROUTER[1:])
        record, url = found
        router = found[0].router
        if router.state != "ready":
            missing = [one for slices in router.not_ready.values() for one in slices]
            missing += router.plan.missing if router.plan is not None else ()
            code = "missing_slices" if missing else "model_loading"
            return Unavailable(code, f"The model is not ready: {self.waits_for(router)}", missing=missing)
        if url:
            return There(record.name, url)
        return self.own.engine or Unavailable("model_loading", "The router engine is starting")

    def models(self) -> list[ServedModel]:
        """The model of the swarm, by its file name, and by its id."""
        found = self.routing_node()
        if found is None or found[0].model is None:
            return []
        model = found[0].model
        return [ServedModel(model.file.removesuffix(".gguf"), (model.file, model.id))]

    def catalogue(self) -> list[Entry]:
        """The models that this node and the live ones have."""
        return catalogue(self.live_records)

    def is_routed_by_others(self) -> bool:
        """Whether a node that has its model's file can route, be it silent for the moment."""
        return any(peer.record.can_route and not peer.record.fetches for peer in self.peers.values())

    def waits_for(self, router: Router) -> str:
        """Why the router does not answer, in words: what is missing and where."""
        names = {node_id: peer.record.name for node_id, peer in self.peers.items()}
        names[self.node.node_id] = self.node.name
        found = self.routing_node()
        activity = f"{found[0].name} is {found[0].activity}" if found is not None and found[0].activity else ""
        return readiness.waits_for(router, names, activity)

    def summary(self) -> str:
        """The state of the swarm in one line, for people."""
        alive = len(self.live_records)
        nodes = f"{alive} node{'s' * (alive > 1)}"
        found = self.routing_node()
        if found is None or found[0].router is None:
            return f"{nodes}; {readiness.without_router(serves=self.own.served is not None, hashes=self.own.hashes)}"
        record, router = found[0], found[0].router
        return f"{nodes}; {readiness.with_router(record, '' if router.state == 'ready' else self.waits_for(router))}"

    def _can_route(self) -> bool:
        """Whether this node is able to route: it was told a model, or it can fetch one."""
        if not self.node.machine.can_route:
            return False
        return self.own.served is not None or self.own.router is not None or self._can_route_fetched()

    def _can_route_fetched(self) -> bool:
        """Whether this node can route the model that it fetches: only where no node with the file can, and where all
        that a router needs is to be had. Nobody who fetches takes a router's place while it may come back."""
        fetched = self.own.fetched
        if fetched is None or not self.own.has_programs or self.is_routed_by_others():
            return False
        offers = [*self.own.offers, *(offer for peer in self.alive.values() for offer in peer.record.offers)]
        return any(offer.id == fetched.id and (offer.whole or offer.trunk) for offer in offers)
