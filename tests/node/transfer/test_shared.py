"""What a node fetches when its disk has no space for all of it: what it no longer uses goes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from node.errors import ModelError
from node.models.index import ModelIndex
from node.peers.http import PeerClient
from node.slices import Slice
from node.transfer.shared import SharedModels
from node.transfer.stored import StoreFull
from rigs.store_cases import LARGE, disk_bytes, new_store, piece_bytes, source
from rigs.transfer import Node, local_copy, serving


@asynccontextmanager
async def sharing(node: Node, folder: Path, limit_bytes: int = 0) -> AsyncIterator[SharedModels]:
    shared = SharedModels(new_store(folder, limit_bytes), lambda _: {node.url: "a"}, lambda: None)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        running = asyncio.create_task(shared.run(PeerClient(session, None)))
        try:
            yield shared
        finally:
            running.cancel()
            await asyncio.wait({running})


async def looked_up(shared: SharedModels, model_id: str) -> ModelIndex:
    async with asyncio.timeout(10):
        while (index := shared.look_up(model_id, "large.gguf")) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return index


async def test_what_is_no_longer_used_makes_space(tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    model_id = copy.manifest.model_id
    expert = next(piece.bytes for piece in copy.pieces if piece.key[0] == "expert")
    header = sum(len(file.header) for file in source(LARGE)[2].files)
    async with serving(copy) as node, sharing(node, tmp_path, 9 * expert + header) as shared:
        index = await looked_up(shared, model_id)
        assert shared.is_stored(index) and not shared.offers[0].trunk
        await shared.provide(index, [Slice(0, 0, 3), Slice(1, 0, 3)])
        assert [(offer.id, offer.file, offer.whole) for offer in shared.offers] == [(model_id, "large.gguf", False)]

        # All that is there is in use: nothing is dropped, and the error says what would be needed.
        shared.keep({model_id: ([Slice(0, 0, 3), Slice(1, 0, 3)], False)})
        with pytest.raises(StoreFull, match=f"no space for {4 * expert} bytes"):
            await shared.provide(index, [Slice(0, 4, 5), Slice(1, 4, 5)])

        shared.keep({model_id: ([Slice(0, 0, 1), Slice(1, 0, 1)], False)})
        await shared.provide(index, [Slice(0, 0, 1), Slice(0, 4, 5), Slice(1, 4, 5)])
        copied = await shared._open(model_id)
        assert copied is not None
        present = {piece.key[1:] for piece in copy.pieces if piece.number in copied.present}
        assert present == {(0, 0), (0, 1), (1, 0), (1, 1), (0, 4), (0, 5), (1, 4), (1, 5)}
        for number in copied.present:
            assert piece_bytes(copied.index, copied, number) == piece_bytes(copy.index, copied, number)
        assert disk_bytes(tmp_path) <= 9 * expert + header


async def test_what_nobody_offers_is_said(tmp_path: Path) -> None:
    copy = local_copy()
    async with serving(copy) as node, sharing(node, tmp_path) as shared:
        unknown = "0" * 32
        async with asyncio.timeout(10):
            with pytest.raises(ModelError, match=r"a: .*status 404"):
                while shared.look_up(unknown, "x") is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await looked_up(shared, copy.manifest.model_id)


async def test_what_is_stored_is_given_to_others_and_can_be_removed_when_idle(tmp_path: Path) -> None:
    copy = local_copy()
    async with serving(copy) as node, sharing(node, tmp_path) as shared:
        index = await looked_up(shared, copy.manifest.model_id)
        await shared.provide_trunk(index)
        assert shared.is_stored(index) and shared.offers[0].trunk and not shared.offers[0].whole
    store = new_store(tmp_path)
    async with serving(copy) as node, sharing(node, tmp_path) as shared:
        # Opened for who asks, and closed when space is needed; not looked up, so not in use.
        given = await shared._find(copy.manifest.model_id)
        assert given is not None and given.present.missing(range(3)) == []
        assert [info.in_use for info in store.models()] == [True]
        await shared._close_idle(0.0)
        assert len(store.prune(0)) == 1
        assert await shared._find(copy.manifest.model_id) is None
