"""The swarm's model on a node: the file that it was told to serve, or where its copy of another node's model is."""

from __future__ import annotations

import time
from collections.abc import Callable

from node.models.index import ModelIndex
from node.models.known import KnownModels, NoCopy
from node.peers.membership import Membership
from node.records import Model
from node.transfer.catalogue import Entry
from node.transfer.shared import SharedModels
from node.transfer.store import ModelStore


class SwarmModel:
    """The model of the swarm as this node has it. ``known`` are its own files, ``shared`` what is fetched.

    ``told``: whether the node was told to serve a file; ``served``: that file, once its content is known. ``fetched``:
    the model that it takes part in, of which it has no file of its own; None until its header was fetched.
    """

    def __init__(
        self,
        known: KnownModels,
        store: ModelStore,
        membership: Membership,
        on_change: Callable[[], None],
        *,
        told: bool,
        bytes_per_s: float,
    ) -> None:
        self.shared = SharedModels(store, self.sources, on_change, bytes_per_s=bytes_per_s)
        self.served: ModelIndex | None = None
        self.fetched: ModelIndex | None = None
        self._told = told
        self._known = known
        self._membership = membership

    @property
    def to_serve(self) -> ModelIndex | None:
        """The model that this node would route."""
        return self.served or self.fetched

    def sources(self, model_id: str) -> dict[str, str]:
        """The live nodes that offer a model: name by URL."""
        return {
            peer.url: peer.record.name
            for peer in self._membership.alive(time.monotonic()).values()
            if any(offer.id == model_id for offer in peer.record.offers)
        }

    def to_route(self, model: Model | Entry) -> ModelIndex | None:
        """The fetched files of a model; an entry of the catalogue is fetched whatever this node has of it.

        None while its header is fetched, or where this node's own file is a copy: that is served only when told.
        Raises ModelError when it cannot be had.
        """
        index = self.shared.look_up(model.id, model.file) if isinstance(model, Entry) else self.copy_of(model)
        return index if index is not None and self.shared.is_stored(index) else None

    def copy_of(self, model: Model) -> ModelIndex | None:
        """This node's own file of a model, else the one into which it fetches; None while neither is known.

        Raises ModelError, saying why there is none.
        """
        if self.fetched is not None and self.fetched.model_id == model.id:
            return self.fetched
        try:
            return self._known.look_up(model)
        except NoCopy:
            # Who was told to serve a file of another model keeps to it.
            if self._told or not self.sources(model.id):
                raise
        return self.shared.look_up(model.id, model.file)

    def check_file(self, index: ModelIndex) -> None:
        """Raises ModelError when a file is not what was hashed any more. Blocks."""
        # What was fetched was verified when it was written.
        if not self.shared.is_stored(index):
            self._known.check_unchanged(index)
