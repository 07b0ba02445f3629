"""What this node has of models besides the user's own files, what it fetches, and what it gives of both to others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from node.errors import ModelError, SwarmError
from node.models.hashing import cached_manifest, local_manifest
from node.models.index import ModelIndex
from node.models.manifest import Manifest
from node.models.pieces import expert_numbers, trunk_numbers
from node.peers.http import PeerClient
from node.records import OFFERS_MAX, Offer
from node.slices import Slice
from node.transfer.fetcher import ModelFetcher, Progress
from node.transfer.schedule import RateLimit
from node.transfer.service import Copy, LocalCopy, ModelService
from node.transfer.store import ModelStore
from node.transfer.stored import StoredModel, StoreFull

log = logging.getLogger(__name__)

# Each change of a record goes to every node.
_TELL_S = 2.0
# A model that nobody asked for in this time is no longer held back from being removed.
_IDLE_S = 60.0


class SharedModels:
    """The models that this node shares with others.

    ``run`` makes files of what is looked up; ``sources`` gives, for a model id, the live nodes that offer it: name by
    URL.

    ``on_change`` is called whenever ``offers``, ``activity`` or what ``look_up`` says changed.
    """

    def __init__(
        self,
        store: ModelStore,
        sources: Callable[[str], Mapping[str, str]],
        on_change: Callable[[], None],
        *,
        bytes_per_s: float = 0.0,
    ) -> None:
        self.service = ModelService(self._find, RateLimit(bytes_per_s))
        #: What this node is at, in words; empty when it is at nothing.
        self.activity = ""
        self.fetcher: ModelFetcher | None = None
        self._store = store
        self._sources = sources
        self._on_change = on_change
        self._bytes_per_s = bytes_per_s
        self._local: dict[str, LocalCopy] = {}
        self._local_offers: list[Offer] = []
        self._stored: dict[str, StoredModel] = {}
        self._used_s: dict[str, float] = {}
        # The ids of models that the node serves or holds: they are never removed.
        self._pinned: set[str] = set()
        self._used: dict[str, tuple[Sequence[Slice], bool]] = {}
        self._stored_offers: tuple[Offer, ...] = ()
        self._wanted: tuple[str, str] | None = None
        self._problem = ""
        self._look = asyncio.Event()
        self._opening = asyncio.Lock()
        self._told_s = 0.0

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What this node's record offers: the user's files first, then what was used last of the store."""
        own = self._local_offers
        return tuple((own + [offer for offer in self._stored_offers if offer.id not in self._local])[:OFFERS_MAX])

    def is_stored(self, index: ModelIndex) -> bool:
        """Whether the index is that of files that were fetched, of which only some pieces are there."""
        stored = self._stored.get(index.model_id)
        return stored is not None and stored.index.paths == index.paths

    def manifest_of(self, index: ModelIndex) -> Manifest | None:
        """The digests of a model's pieces, if they are known here. Blocks while a file is read."""
        return self._stored[index.model_id].manifest if self.is_stored(index) else cached_manifest(index)

    def name_of(self, index: ModelIndex) -> str:
        """The name of a model's file, the first one of a split model, as people know it."""
        name = self._stored[index.model_id].name if self.is_stored(index) else Path(index.paths[0]).name
        return name[:63]

    async def add_local(self, index: ModelIndex) -> None:
        """Offers a model of the user's own, whose content is known. Raises ModelError."""
        manifest = await asyncio.to_thread(local_manifest, index)
        if manifest.model_id == index.model_id:
            copy = LocalCopy(index, manifest)
            size = await asyncio.to_thread(lambda: sum(piece.bytes for piece in copy.pieces))
            self._local[index.model_id] = copy
            self._local_offers.append(Offer(index.model_id, self.name_of(index), size, whole=True, trunk=True))
            self._on_change()

    def look_up(self, model_id: str, file: str) -> ModelIndex | None:
        """The index of a model's fetched files, which may have none of its pieces yet; None while there are no files.

        ``file``: what to call it. Raises ModelError when they could not be made, saying why, and tries again.
        """
        stored = self._stored.get(model_id)
        if stored is not None and model_id in self._pinned:
            return stored.index
        if self._wanted is None or self._wanted[0] != model_id:
            self._wanted, self._problem = (model_id, file), ""
        self._look.set()
        if self._problem:
            raise ModelError(self._problem)
        return None

    def keep(self, used: Mapping[str, tuple[Sequence[Slice], bool]]) -> None:
        """Takes what is in use of the models that were looked up, by id: slices, and whether the trunk is.

        Anything else may be removed for what is fetched.
        """
        self._used = dict(used)
        self._pinned &= set(used) | ({self._wanted[0]} if self._wanted is not None else set())

    async def provide(self, index: ModelIndex, slices: Sequence[Slice]) -> None:
        """Fetches the experts of these slices that are missing, if the index is of fetched files. Raises ModelError."""
        if self.is_stored(index):
            numbers = expert_numbers(self._stored[index.model_id].pieces)
            wanted = [numbers[layer, expert] for layer, first, last in slices for expert in range(first, last + 1)]
            await self._fetch(self._stored[index.model_id], wanted)

    async def provide_trunk(self, index: ModelIndex) -> None:
        """Fetches what is missing of everything that is not an expert, as ``provide`` does of slices."""
        if self.is_stored(index):
            stored = self._stored[index.model_id]
            await self._fetch(stored, trunk_numbers(stored.pieces))

    async def run(self, client: PeerClient) -> None:
        """Makes files of what is looked up, until cancelled; closes what is open then."""
        self.fetcher = ModelFetcher(client, self._sources, limit=RateLimit(self._bytes_per_s))
        try:
            await self._list_stored()
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_S / 2):
                        await self._look.wait()
                self._look.clear()
                await self._close_idle()
                await self._make_wanted()
        finally:
            for stored in self._stored.values():
                await asyncio.to_thread(stored.close)
            self._stored.clear()

    async def _make_wanted(self) -> None:
        wanted = self._wanted
        if wanted is None or wanted[0] in self._pinned:
            return
        try:
            await self._adopt(*wanted)
            problem = ""
        except (SwarmError, OSError) as error:
            problem = str(error)
            log.warning("model %s: %s", wanted[1], problem)
        if wanted == self._wanted:
            self._problem = problem
        self._on_change()

    async def _adopt(self, model_id: str, file: str) -> None:
        assert self.fetcher is not None
        if await self._open(model_id) is None:
            manifest, layout = await self.fetcher.describe(model_id)
            async with self._opening:
                self._stored[model_id] = await asyncio.to_thread(self._store.create, manifest, layout, file)
            await self._list_stored()
        self._pinned.add(model_id)

    async def _fetch(self, stored: StoredModel, numbers: Sequence[int]) -> None:
        assert self.fetcher is not None
        missing = stored.missing(numbers)
        if not missing:
            return
        needed = sum(stored.pieces[number].bytes for number in missing)
        await self._close_idle(0.0)
        try:
            await asyncio.to_thread(self._store.make_room, needed)
        except StoreFull:
            await asyncio.to_thread(self._drop_unused, stored, missing)
            await asyncio.to_thread(self._store.make_room, needed)
        try:
            await self.fetcher.fetch(stored, missing, self._tell)
        finally:
            self.activity = ""
            await self._list_stored()

    def _drop_unused(self, stored: StoredModel, wanted: Sequence[int]) -> None:
        """Makes space by dropping pieces of a model that is in use, but none that are used or ``wanted``. Blocks."""
        slices, trunk = self._used.get(stored.model_id, ((), False))
        numbers = expert_numbers(stored.pieces)
        used = {numbers[layer, expert] for layer, first, last in slices for expert in range(first, last + 1)}
        used |= set(wanted) | (set(trunk_numbers(stored.pieces)) if trunk else set())
        dropped = stored.drop([number for number in stored.present if number not in used])
        log.info("%s: dropped %d bytes that this node no longer uses", stored.name, dropped)

    def _tell(self, progress: Progress) -> None:
        if time.monotonic() - self._told_s >= _TELL_S:
            self._told_s = time.monotonic()
            self.activity = str(progress)
            self._on_change()

    async def _find(self, model_id: str) -> Copy | None:
        local = self._local.get(model_id)
        return local if local is not None else await self._open(model_id)

    async def _open(self, model_id: str) -> StoredModel | None:
        async with self._opening:
            self._used_s[model_id] = time.monotonic()
            if model_id not in self._stored:
                try:
                    stored = await asyncio.to_thread(self._store.open, model_id)
                except ModelError as error:
                    log.warning("%s", error)
                    return None
                if stored is None:
                    del self._used_s[model_id]
                    return None
                self._stored[model_id] = stored
            return self._stored[model_id]

    async def _close_idle(self, idle_s: float = _IDLE_S) -> None:
        async with self._opening:
            for model_id in [m for m in self._stored if m not in self._pinned]:
                if time.monotonic() - self._used_s.get(model_id, 0.0) >= idle_s:
                    await asyncio.to_thread(self._stored.pop(model_id).close)
                    self._used_s.pop(model_id, None)

    async def _list_stored(self) -> None:
        infos = await asyncio.to_thread(self._store.models)
        self._stored_offers = tuple(
            Offer(info.model_id, info.name, info.total_bytes, whole=info.is_whole, trunk=info.has_trunk)
            for info in infos
        )
        self._on_change()
