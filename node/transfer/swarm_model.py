"""The swarm's model on a node that has no file to serve: where its copy is, and when this node may route it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from node.errors import ModelError
from node.models.index import ModelIndex
from node.models.known import KnownModels, NoCopy
from node.peers.membership import Membership
from node.records import Model, Record
from node.transfer.catalogue import Entry, catalogue, choose
from node.transfer.shared import SharedModels
from node.transfer.store import ModelStore


class SwarmModel:
    """The model of the swarm as this node has it. ``known`` are its own files, ``record`` gives its record.

    ``shared``: what is fetched. ``told``: whether the node has a file to serve. ``name``: the model that it was told to
    take from others; empty: whichever the swarm serves. ``fetched``: the model that it takes part in, of which it has
    no file of its own; None until its header was fetched.
    """

    def __init__(
        self,
        known: KnownModels,
        store: ModelStore,
        membership: Membership,
        record: Callable[[], Record],
        on_change: Callable[[], None],
        *,
        bytes_per_s: float,
    ) -> None:
        self.shared = SharedModels(store, self.sources, on_change, bytes_per_s=bytes_per_s)
        self.told = False
        self.name = ""
        self.fetched: ModelIndex | None = None
        self._known = known
        self._membership = membership
        self._record = record

    def sources(self, model_id: str) -> dict[str, str]:
        """The live nodes that offer a model: name by URL."""
        return {
            peer.url: peer.record.name
            for peer in self._membership.alive(time.monotonic()).values()
            if any(offer.id == model_id for offer in peer.record.offers)
        }

    def catalogue(self) -> list[Entry]:
        """The models that this node and the live ones have."""
        peers = self._membership.alive(time.monotonic()).values()
        return catalogue([self._record(), *(peer.record for peer in peers)])

    def is_routed_by_others(self) -> bool:
        """Whether a node that has its model's file can route, be it silent for the moment."""
        peers = self._membership.known(time.monotonic()).values()
        return any(peer.record.can_route and not peer.record.fetches for peer in peers)

    def can_be_routed(self, models_with_programs: Collection[str]) -> bool:
        """Whether this node can route the model that it fetches.

        It can only where no node with the file can, and where everything that a router needs is to be had. Nobody who
        fetches takes a router's place while it may come back.
        """
        if self.fetched is None or self.fetched.model_id not in models_with_programs or self.is_routed_by_others():
            return False
        offered = any(
            offer.id == self.fetched.model_id and (offer.whole or offer.trunk)
            for peer in self._membership.alive(time.monotonic()).values()
            for offer in peer.record.offers
        )
        return offered or self.shared.has_trunk(self.fetched)

    def to_route(self) -> ModelIndex | None:
        """A model that this node could route by fetching it, where nobody who has the file can.

        It is the one that it was told, or one that the others have. None if there is none, or while its header is
        fetched. Raises ModelError when it cannot be had.
        """
        if self.told or self.fetched is not None or self.is_routed_by_others():
            return None
        if self.name:
            entry = choose([entry for entry in self.catalogue() if entry.has_trunk], self.name)
            if entry is None:
                listed = ", ".join(f"{entry.file} ({entry.id[:12]})" for entry in self.catalogue()) or "none"
                raise ModelError(
                    f"no node that answers has a model {self.name!r}, by name or beginning of its id; "
                    f"there are: {listed}"
                )
            index = self.shared.look_up(entry.id, entry.file)
        else:
            alive = self._membership.alive(time.monotonic()).values()
            models = {peer.record.model.id: peer.record.model for peer in alive if peer.record.model is not None}
            index = self.copy_of(models[min(models)]) if models else None
        return index if index is not None and self.shared.is_stored(index) else None

    def copy_of(self, model: Model) -> ModelIndex | None:
        """This node's own file of a model, else the one into which it fetches; None while neither is known.

        Raises ModelError, saying why there is none.
        """
        if self.fetched is not None and self.fetched.model_id == model.id:
            return self.fetched
        served = Entry(model.id, model.file, 0, (), (), has_trunk=True)
        if self.name and choose([served], self.name) is None:
            raise ModelError(f"this node was told to serve {self.name}, and the router serves {model.file}")
        try:
            return self._known.look_up(model)
        except NoCopy:
            # Who was told to serve a file of another model keeps to it.
            if self.told or not self.sources(model.id):
                raise
        return self.shared.look_up(model.id, model.file)

    def check_file(self, index: ModelIndex) -> None:
        """Raises ModelError when a file is not what was hashed any more. Blocks."""
        # What was fetched was verified when it was written.
        if not self.shared.is_stored(index):
            self._known.check_unchanged(index)
