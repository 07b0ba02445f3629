"""Fetching between two HTTP servers: what comes out is the model, or an error that says why not."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from node.errors import ModelError, NotAuthenticated
from node.models.hashing import local_manifest
from node.models.pieces import expert_numbers, trunk_numbers
from node.swarm_key import SwarmKey
from node.transfer import fetcher as fetcher_module
from node.transfer import service as service_module
from node.transfer.schedule import Ask, RateLimit, Transfer
from node.transfer.stored import StoredModel
from rigs.store_cases import LARGE, piece_bytes
from rigs.transfer import begin, fetching, local_copy, serving


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "STALL_S", 0.5)
    monkeypatch.setattr(fetcher_module, "_NOBODY_S", 0.3)
    monkeypatch.setattr("node.transfer.schedule.RUN_BYTES", 7 << 20)
    monkeypatch.setattr("node.transfer.schedule.FAILED_FIRST_S", 0.05)


async def _until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_whole_model_and_progress(keyed: bool, tmp_path: Path) -> None:
    copy, key = local_copy(), SwarmKey.generate() if keyed else None
    async with serving(copy, key) as node, fetching(node, key=key) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            told: list[fetcher_module.Progress] = []
            await fetcher.fetch(stored, range(len(stored.pieces)), told.append)
            assert stored.present.is_full
            assert local_manifest(stored.index, folder=tmp_path / "m") == copy.manifest
            assert told[-1].done_bytes == told[-1].total_bytes == fetcher.received_bytes == node.service.sent_bytes
            assert str(told[-1]).startswith("fetching: 100 % of ")
            n_asked = len(node.asked)
            await fetcher.fetch(stored, range(len(stored.pieces)))
            assert len(node.asked) == n_asked


async def test_only_the_pieces_that_are_wanted_come(tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy) as node, fetching(node) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            wanted = [n for (_, expert), n in expert_numbers(stored.pieces).items() if 2 <= expert <= 4]
            await fetcher.fetch(stored, wanted)
            assert sorted(stored.present) == sorted(wanted)
            assert node.service.sent_bytes == sum(stored.pieces[n].bytes for n in wanted)
            await fetcher.fetch(stored, trunk_numbers(stored.pieces))
            assert set(stored.present) == {*wanted, *trunk_numbers(stored.pieces)}


async def test_who_has_a_part_gives_that_part(tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy) as whole, fetching(whole) as fetcher:
        first = await begin(fetcher, copy, tmp_path / "one")
        experts = sorted(expert_numbers(first.pieces).values())
        await fetcher.fetch(first, experts[:8])
    with first:
        async with serving(first) as part, fetching(part) as fetcher:
            with await begin(fetcher, copy, tmp_path / "two") as second:
                await fetcher.fetch(second, experts[2:6])
                assert sorted(second.present) == experts[2:6]
                with pytest.raises(ModelError, match="a: it does not have what is missing"):
                    await fetcher.fetch(second, experts[6:10])
                assert sorted(second.present) == experts[2:8]


async def test_without_the_key_nothing_is_given(tmp_path: Path) -> None:
    copy = local_copy()
    async with serving(copy, SwarmKey.generate()) as node:
        async with fetching(node) as fetcher:
            with pytest.raises(ModelError, match="cannot be fetched: a: "):
                await fetcher.describe(copy.manifest.model_id)
        async with fetching(node, key=SwarmKey.generate()) as fetcher:
            with pytest.raises(NotAuthenticated):
                await fetcher.client.get(node.url, f"/swarm/v1/models/{copy.manifest.model_id}/manifest")
    async with serving(copy) as node, fetching(node, key=SwarmKey.generate()) as fetcher:  # an impostor
        with pytest.raises(ModelError, match="it has no key"):
            await fetcher.describe(copy.manifest.model_id)


async def test_requests_that_are_wrong_are_refused(tmp_path: Path) -> None:
    copy = local_copy()
    path = f"/swarm/v1/models/{copy.manifest.model_id}"
    cases = [
        ("/swarm/v1/models/..%2f..%2fetc/manifest", None, 404),
        ("/swarm/v1/models/0/manifest", None, 404),
        (f"{path}/pieces", None, 400),
        (f"{path}/pieces?from=0&to=9999999999", None, 400),
        (f"{path}/pieces?from=0&to=99999", None, 400),
        (f"{path}/pieces?from=3&to=2", None, 400),
        (f"{path}/pieces?from=-1&to=2", None, 400),
        (f"{path}/pieces?from=0&to=0", "bytes=99999999999-", 416),
        (f"{path}/pieces?from=0&to=0", "bytes=x", 400),
        (f"{path}/pieces?from=0&to=0", "bytes=-7", 206),
        (f"{path}/pieces?from=0&to=0", "bytes=3-9", 206),
        (f"{path}/pieces?from=0&to=0", "bytes=0-", 200),
    ]
    async with serving(copy) as node, fetching(node) as fetcher:
        whole = b""
        for target, wanted, status in reversed(cases):
            headers = {"Range": wanted} if wanted else {}
            async with fetcher.client.get_streamed(node.url, target, stall_s=2, headers=headers) as response:
                body = await response.read()
                assert response.status == status, target
                if status == 200:
                    whole = body
                elif status == 206:
                    assert body == (whole[3:10] if wanted == "bytes=3-9" else whole[-7:])
                else:
                    assert set((await response.json())["error"]) == {"type", "message"}


async def _error_page(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>Sorry!</html>", content_type="text/html")


async def _long_error_page(request: web.Request) -> web.StreamResponse:
    """Gives a page of the right length, and says that it is what was asked for."""
    first, last = int(request.query["from"]), int(request.query["to"])
    copy = local_copy(LARGE)
    return web.Response(body=b"<html>".ljust(sum(p.bytes for p in copy.pieces[first : last + 1])))


async def _gzip(request: web.Request) -> web.StreamResponse:
    body = gzip.compress(bytes(1000))
    return web.Response(body=body, headers={"Content-Encoding": "gzip", "Content-Type": "application/octet-stream"})


async def _range_refused(request: web.Request) -> web.StreamResponse:
    return web.Response(status=416, text="no such range")


async def _partial_content(request: web.Request) -> web.StreamResponse:
    """206 for what was not asked for in part."""
    return web.Response(status=206, body=bytes(100), headers={"Content-Range": "bytes 0-99/1000"})


async def _elsewhere(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})


async def _stalls(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def _lies(request: web.Request) -> web.StreamResponse:
    """Flips one bit of the last piece."""
    copy = local_copy(LARGE)
    first, last = int(request.query["from"]), int(request.query["to"])
    skip = int((request.headers.get("Range") or "bytes=0-")[6:-1])
    with_all = bytearray(b"".join(_bytes(copy, n) for n in range(first, last + 1)))
    with_all[-1] ^= 1
    headers = {"Content-Range": f"bytes {skip}-{len(with_all) - 1}/{len(with_all)}"} if skip else {}
    return web.Response(
        status=206 if skip else 200,
        body=bytes(with_all[skip:]),
        headers={**headers, "Content-Type": "application/octet-stream"},
    )


def _bytes(copy, number: int) -> bytes:
    return piece_bytes(copy.index, copy, number)


FAULTS = [_error_page, _long_error_page, _gzip, _range_refused, _partial_content, _elsewhere, _stalls, _lies]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_bad_source_costs_time_and_nothing_else(fault, tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy, fault=fault) as bad, serving(copy) as good, fetching(bad, good) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            wanted = sorted(expert_numbers(stored.pieces).values())
            await fetcher.fetch(stored, wanted)
            assert sorted(stored.present) == wanted
            for number in wanted:
                assert piece_bytes(stored.index, stored, number) == _bytes(copy, number)
            assert bad.asked
            if fault in (_lies, _long_error_page):
                assert len(bad.asked) <= 3  # of eight: while the first was verified, and never again


@pytest.mark.parametrize("fault", FAULTS)
async def test_only_bad_sources_give_an_error_and_nothing_wrong(fault, tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy, fault=fault) as bad, fetching(bad) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            wanted = sorted(expert_numbers(stored.pieces).values())
            before_s = time.monotonic()
            with pytest.raises(ModelError, match=r"cannot be fetched: a: (it|Timeout|.*[Tt]imeout)"):
                async with asyncio.timeout(60):
                    await fetcher.fetch(stored, wanted)
            print(f"{fault.__name__}: {time.monotonic() - before_s:.1f} s")
            for number in stored.present:
                assert piece_bytes(stored.index, stored, number) == _bytes(copy, number)
            assert not stored.present.is_full


def _break_after(count: int):
    """Ends the connection after so many bytes, as a source that is killed does."""

    async def fault(request: web.Request) -> web.StreamResponse:
        copy = local_copy(LARGE)
        first, last = int(request.query["from"]), int(request.query["to"])
        skip = int((request.headers.get("Range") or "bytes=0-")[6:-1])
        whole = b"".join(_bytes(copy, n) for n in range(first, last + 1))
        response = web.StreamResponse(status=206 if skip else 200)
        response.content_type, response.content_length = "application/octet-stream", len(whole) - skip
        if skip:
            response.headers["Content-Range"] = f"bytes {skip}-{len(whole) - 1}/{len(whole)}"
        await response.prepare(request)
        await response.write(whole[skip : skip + count])
        assert request.transport
        request.transport.close()
        return response

    return fault


async def test_what_a_dead_source_began_another_ends(tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy, fault=_break_after(1_000_000)) as dying, serving(copy) as good:
        async with fetching(dying) as fetcher:
            with await begin(fetcher, copy, tmp_path) as stored:
                wanted = sorted(expert_numbers(stored.pieces).values())[:4]
                fetch = asyncio.create_task(fetcher.fetch(stored, wanted))
                await _until(lambda: len(dying.asked) > 1)
                fetcher.sources_of("")[good.url] = "good"  # type: ignore[index]
                await fetch
                assert sorted(stored.present) == wanted
        ranges = [wanted for _, wanted in (*dying.asked, *good.asked)]
        assert None in ranges and any(wanted and wanted.startswith("bytes=") for wanted in ranges)
        total = sum(stored.pieces[n].bytes for n in wanted)
        assert total - 4_000_000 <= good.service.sent_bytes < total  # what was there did not come again


async def test_what_is_committed_survives_a_fetch_that_is_cancelled(tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy) as node, fetching(node, limit=RateLimit(20e6)) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            fetch = asyncio.create_task(fetcher.fetch(stored, range(len(stored.pieces))))
            await _until(lambda: fetcher.received_bytes > 20_000_000)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            n_present = len(stored.present)
            assert 0 < n_present < len(stored.pieces)
        with await begin(fetcher, copy, tmp_path) as again:
            assert len(again.present) == n_present


async def test_a_request_that_never_began_is_not_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the sources outlives a fetch that ends with an error in between."""
    copy, next_ask = local_copy(), Transfer.next

    def ask_and_fail(self: Transfer, now_s: float) -> Ask | None:
        if any(source.in_flight for source in self.sources.values()):
            raise ModelError("the disk is full")
        return next_ask(self, now_s)

    async with serving(copy) as node, fetching(node) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            with monkeypatch.context() as patched:
                patched.setattr(Transfer, "next", ask_and_fail)
                with pytest.raises(ModelError, match="the disk is full"):
                    await fetcher.fetch(stored, range(len(stored.pieces)))
            assert node.asked == []
            async with asyncio.timeout(10):
                await fetcher.fetch(stored, range(len(stored.pieces)))
            assert stored.present.is_full


async def test_a_limited_rate_is_kept(tmp_path: Path) -> None:
    copy = local_copy(LARGE)
    async with serving(copy) as node, fetching(node, limit=RateLimit(16e6)) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            wanted = sorted(expert_numbers(stored.pieces).values())[:6]
            started_s = time.monotonic()
            await fetcher.fetch(stored, wanted)
            size = sum(stored.pieces[n].bytes for n in wanted)
            assert time.monotonic() - started_s > size / 16e6 - 0.5  # less the first burst


async def test_more_transfers_than_a_source_gives_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "TRANSFERS_OF_PEER_MAX", 1)
    monkeypatch.setattr("node.transfer.schedule.BUSY_S", 0.05)
    copy = local_copy(LARGE)
    async with serving(copy) as node:

        async def one(folder: Path) -> None:
            async with fetching(node, limit=RateLimit(50e6)) as fetcher:
                with await begin(fetcher, copy, folder) as stored:
                    await fetcher.fetch(stored, sorted(expert_numbers(stored.pieces).values())[:8])

        await asyncio.gather(one(tmp_path / "one"), one(tmp_path / "two"), one(tmp_path / "three"))
        assert len(node.asked) > 3 * 4  # some were refused, and came again


async def test_the_loop_neither_hashes_nor_touches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loop sends and receives; how far it lags is measured by scripts/bench_transfer.py."""
    copy = local_copy(LARGE)
    threads: dict[str, set[int]] = {"read": set(), "write": set(), "commit": set()}
    pread, write, commit = os.pread, StoredModel.write, StoredModel.commit

    def in_thread(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            threads[name].add(threading.get_ident())
            return function(*arguments)

        return called

    async with serving(copy) as node, fetching(node) as fetcher:
        with await begin(fetcher, copy, tmp_path) as stored:
            monkeypatch.setattr(os, "pread", in_thread("read", pread))
            monkeypatch.setattr(StoredModel, "write", in_thread("write", write))
            monkeypatch.setattr(StoredModel, "commit", in_thread("commit", commit))
            await fetcher.fetch(stored, range(len(stored.pieces)))
    assert all(threads.values()) and threading.get_ident() not in set().union(*threads.values())
