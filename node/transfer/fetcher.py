"""Fetches pieces of a model from other nodes into the store: `schedule` decides, this asks, verifies and writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import aiohttp

from node.errors import ModelError, SwarmError
from node.models.layout import LAYOUT_BYTES_MAX, Layout
from node.models.manifest import MANIFEST_BYTES_MAX, Manifest
from node.peers.http import PeerClient
from node.transfer.bitmap import PieceBitmap
from node.transfer.schedule import Ask, RateLimit, Source, Transfer, describe_sources
from node.transfer.service import BINARY, MODELS_PREFIX
from node.transfer.stored import PieceWrong, StoredModel

log = logging.getLogger(__name__)

# A source that gives no byte for this long has stalled. A disk that has to wake up takes some seconds.
STALL_S = 10.0
# Slower than this over SLOW_AFTER_S is as good as stalled: an expert would take minutes.
SLOW_BYTES_PER_S, SLOW_AFTER_S = 16 << 10, 20.0
# What a source has changes while it fetches itself.
_ASK_AGAIN_S = 5.0
# How long nobody may be able to give anything before it is said to be hopeless for now.
_NOBODY_S = 5.0
# Pieces go to the disk together, since a sync costs more than its bytes.
_COMMIT_BYTES, _COMMIT_S = 256 << 20, 5.0
# Threads that hash and write one piece while the next one comes.
_WORKERS = 2
# So many pieces are kept in memory while they are verified, beside one that is received for each request.
_WAITING_MAX = 2
# A piece is a megabyte as a rule; Mixtral's of 170 MB are the largest known.
PIECE_BYTES_MAX = 1 << 30
_ID = re.compile(r"[0-9a-f]{32}")
_ERROR_BYTES_MAX = 4096

_FETCH_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, SwarmError)


@dataclass(frozen=True)
class Progress:
    """How far a fetch is. ``source`` is the name of who gave the last piece; ``bytes_per_s``: over the last seconds."""

    done_bytes: int
    total_bytes: int
    source: str
    bytes_per_s: float

    def __str__(self) -> str:
        share = 100 * self.done_bytes // max(self.total_bytes, 1)
        source = f" from {self.source}" if self.source else ""
        return f"fetching: {share} % of {_size(self.total_bytes)}{source}, {self.bytes_per_s / 1e6:.0f} MB/s"


class ModelFetcher:
    """Fetches models. ``sources`` gives, for a model id, the live nodes that offer it: name by URL of the agent."""

    def __init__(
        self, client: PeerClient, sources: Callable[[str], Mapping[str, str]], *, limit: RateLimit | None = None
    ) -> None:
        self._client = client
        self._find_sources = sources
        self._limit = limit or RateLimit(0)
        self._known: dict[str, dict[str, Source]] = {}
        #: The bytes of all verified pieces.
        self.received_bytes = 0

    async def describe(self, model_id: str) -> tuple[Manifest, Layout]:
        """The manifest and the layout of a model, from the first source that gives them right. Raises ModelError."""
        if not _ID.fullmatch(model_id):
            raise ModelError(f"{model_id!r} is no id of a model")
        problems = []
        for url, name in self._find_sources(model_id).items():
            try:
                path = f"{MODELS_PREFIX}/{model_id}"
                manifest = Manifest.from_bytes(
                    await self._client.get(url, f"{path}/manifest", limit_bytes=MANIFEST_BYTES_MAX)
                )
                if manifest.model_id != model_id:
                    raise ModelError("it gave the manifest of another model")
                data = await self._client.get(url, f"{path}/layout", limit_bytes=LAYOUT_BYTES_MAX)
                return manifest, await asyncio.to_thread(Layout.from_bytes, data)
            except _FETCH_ERRORS as error:
                problems.append(f"{name}: {error or type(error).__name__}")
        raise ModelError(
            f"model {model_id} cannot be fetched: " + ("; ".join(problems[:4]) or "no live node offers it")
        )

    async def fetch(
        self, stored: StoredModel, numbers: Sequence[int], on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        """Fetches the pieces that are missing. What was fetched stays when this is cancelled or fails.

        Raises ModelError when no source gives them, StoreFull.
        """
        missing = stored.missing(numbers)
        if not missing:
            return
        largest = max(stored.pieces[number].bytes for number in missing)
        if largest > PIECE_BYTES_MAX:
            raise ModelError(f"model {stored.model_id} has a piece of {largest} bytes, above {PIECE_BYTES_MAX}")
        sources = self._known.setdefault(stored.model_id, {})
        transfer = Transfer(missing, [piece.bytes for piece in stored.pieces], sources)
        run = _Run(self, stored, transfer, sources, on_progress)
        try:
            await run.run()
        finally:
            await run.close()

    def sources_of(self, model_id: str) -> Mapping[str, str]:
        """The live nodes that offer a model: name by URL."""
        return self._find_sources(model_id)

    @property
    def client(self) -> PeerClient:
        """The client for requests to sources."""
        return self._client

    @property
    def limit(self) -> RateLimit:
        """The rate limit for everything that is received."""
        return self._limit


class _Run:
    """One fetch. It keeps pieces in memory until they are verified: at most one for each request, and _WAITING_MAX."""

    def __init__(
        self,
        fetcher: ModelFetcher,
        stored: StoredModel,
        transfer: Transfer,
        sources: dict[str, Source],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._fetcher = fetcher
        self._stored = stored
        self._transfer = transfer
        self._sources = sources
        self._on_progress = on_progress
        self._total_bytes = transfer.missing_bytes
        self._parts: dict[int, list[bytes]] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(_WAITING_MAX)
        self._executor = ThreadPoolExecutor(_WORKERS, "model piece")
        self._uncommitted_bytes = 0
        self._committed_s = time.monotonic()
        self._asked_s: dict[str, float] = {}
        self._last = ""
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=4096)
        self._asks: set[Ask] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._n_verifying = 0
        self._hopeless_since_s: float | None = None

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                committing: asyncio.Task[None] | None = None
                while not self._transfer.complete:
                    self._wake.clear()
                    self._follow_sources(tasks)
                    while (ask := self._transfer.next(time.monotonic())) is not None:
                        self._asks.add(ask)
                        tasks.create_task(self._ask(ask, tasks), name=f"fetch pieces {ask.first} to {ask.last}")
                    if (committing is None or committing.done()) and self._commit_is_due():
                        committing = tasks.create_task(self._commit(), name="commit pieces")
                    self._check_hope()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), self._pause_s())
                for task in self._asking:
                    task.cancel()
                await self._commit()
        except* SwarmError as group:
            raise _first(group) from None

    def _pause_s(self) -> float:
        """How long to wait until more may be asked; at most half a second, since sources come and go."""
        now_s = time.monotonic()
        next_s = self._transfer.next_s(now_s)
        return 0.5 if next_s is None else min(max(next_s - now_s, 0.01), 0.5)

    async def close(self) -> None:
        """Waits for the threads, and keeps what they wrote."""
        # What is left here was asked by tasks that were cancelled before they began. Sources outlive this fetch, and
        # would count as asked for good.
        for ask in list(self._asks):
            self._end(ask)

        def finish() -> None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            try:
                self._stored.commit()
            except ModelError as error:  # the node ends, or the disk is full: said before
                log.info("%s", error)

        await asyncio.to_thread(finish)

    def _follow_sources(self, tasks: asyncio.TaskGroup) -> None:
        live = self._fetcher.sources_of(self._stored.model_id)
        now_s = time.monotonic()
        for url in [url for url, source in self._sources.items() if url not in live and not source.in_flight]:
            if self._sources[url].not_before_s <= now_s:
                del self._sources[url]
        for url, name in live.items():
            source = self._sources.setdefault(url, Source(name))
            full = source.has is not None and source.has.is_full
            due = now_s >= max(self._asked_s.get(url, 0.0), source.not_before_s)
            if not full and due and not source.in_flight:
                self._asked_s[url] = now_s + _ASK_AGAIN_S
                task = tasks.create_task(self._ask_present(url, source), name=f"ask {name} what it has")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _ask_present(self, url: str, source: Source) -> None:
        path = f"{MODELS_PREFIX}/{self._stored.model_id}/present"
        count = len(self._stored.pieces)
        try:
            data = await self._fetcher.client.get(url, path, limit_bytes=64 + count // 8)
            source.has = PieceBitmap.from_bytes(data, count)
        except _FETCH_ERRORS as error:
            source.failed(str(error) or type(error).__name__, time.monotonic())
        self._wake.set()

    def _check_hope(self) -> None:
        now_s = time.monotonic()
        if self._n_verifying or self._asking or any(source.in_flight for source in self._sources.values()):
            self._hopeless_since_s = None
            return
        since_s = self._hopeless_since_s = self._hopeless_since_s or now_s
        if now_s - since_s > _NOBODY_S:
            raise ModelError(
                f"{_size(self._transfer.missing_bytes)} of model {self._stored.model_id} ({self._stored.name}) "
                f"cannot be fetched: {describe_sources(self._sources.values())}"
            )

    async def _ask(self, ask: Ask, tasks: asyncio.TaskGroup) -> None:
        source = self._sources[ask.source]
        try:
            await self._receive(ask, source, tasks)
        except _Busy:
            source.busy(time.monotonic())
        except _FETCH_ERRORS as error:
            reason = str(error) or ("it stalled" if isinstance(error, TimeoutError) else type(error).__name__)
            log.info("model %s: %s: %s", self._stored.model_id, source.name, reason)
            source.failed(reason, time.monotonic())
            source.has = None  # which may have changed by then
            self._asked_s.pop(ask.source, None)
        finally:
            self._end(ask)

    def _end(self, ask: Ask) -> None:
        self._asks.discard(ask)
        self._transfer.ended(ask)
        self._wake.set()

    async def _receive(self, ask: Ask, source: Source, tasks: asyncio.TaskGroup) -> None:
        sizes = self._transfer.sizes
        path = f"{MODELS_PREFIX}/{self._stored.model_id}/pieces?from={ask.first}&to={ask.last}"
        total = sum(sizes[ask.first : ask.last + 1])
        headers = {"Range": f"bytes={ask.skip_bytes}-"} if ask.skip_bytes else {}
        log.debug("model %s: %s is asked for pieces %d to %d", self._stored.model_id, source.name, ask.first, ask.last)
        number, parts, have = ask.first, self._parts.pop(ask.first, []), ask.skip_bytes
        assert sum(map(len, parts)) == have
        try:
            async with self._fetcher.client.get_streamed(
                ask.source, path, stall_s=STALL_S, headers=headers
            ) as response:
                await _check_head(response, ask.skip_bytes, total)
                began_s, received = time.monotonic(), 0
                async for chunk in response.content.iter_any():
                    received += len(chunk)
                    await self._slow_down(len(chunk), began_s, received)
                    while chunk:
                        piece_bytes = sizes[number]
                        used, chunk = chunk[: piece_bytes - have], chunk[piece_bytes - have :]
                        parts.append(used)
                        have += len(used)
                        if have == piece_bytes:
                            await self._room.acquire()
                            self._n_verifying += 1
                            self._transfer.received(number)
                            tasks.create_task(self._verify(ask, source, number, parts), name=f"verify piece {number}")
                            number, parts, have = number + 1, [], 0
        finally:
            if parts and number <= ask.last and self._transfer.keeps_part(number):
                self._parts[number] = parts
                if number != ask.first or have > ask.skip_bytes:
                    self._transfer.received_part(ask, number, have)
                while len(self._parts) > _WAITING_MAX:
                    oldest = next(iter(self._parts))
                    del self._parts[oldest]
                    self._transfer.forget_part(oldest)

    async def _slow_down(self, count: int, began_s: float, received: int) -> None:
        now_s = time.monotonic()
        self._arrivals.append((now_s, count))
        if now_s - began_s > SLOW_AFTER_S and received < SLOW_BYTES_PER_S * (now_s - began_s):
            raise ModelError(f"it gives {received / (now_s - began_s):.0f} bytes a second")
        delay_s = self._fetcher.limit.delay_s(count, now_s)
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _verify(self, ask: Ask, source: Source, number: int, parts: list[bytes]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._stored.write, number, parts)
            self._transfer.verified(ask, number)
            self._uncommitted_bytes += self._transfer.sizes[number]
            self._fetcher.received_bytes += self._transfer.sizes[number]
            self._last = source.name
        except PieceWrong as error:
            log.error("%s: %s", source.name, error)
            self._transfer.wrong(ask, number, time.monotonic())
        finally:
            self._n_verifying -= 1
            self._room.release()
            if self._transfer.complete:
                self._wake.set()
        self._tell()

    def _commit_is_due(self) -> bool:
        late = time.monotonic() - self._committed_s > _COMMIT_S
        return self._uncommitted_bytes >= _COMMIT_BYTES or (late and self._uncommitted_bytes > 0)

    async def _commit(self) -> None:
        self._uncommitted_bytes, self._committed_s = 0, time.monotonic()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._stored.commit)

    def _tell(self) -> None:
        if self._on_progress is None:
            return
        now_s = time.monotonic()
        while self._arrivals and now_s - self._arrivals[0][0] > 3.0:
            self._arrivals.popleft()
        span_s = max(now_s - self._arrivals[0][0], 0.1) if self._arrivals else 1.0
        rate = sum(count for _, count in self._arrivals) / span_s
        done = self._total_bytes - self._transfer.missing_bytes
        self._on_progress(Progress(done, self._total_bytes, self._last, rate))


class _Busy(ModelError):
    """A source serves as many as it wants to."""


async def _check_head(response: aiohttp.ClientResponse, skip: int, total: int) -> None:
    """Raises ModelError unless the reply says that exactly the bytes follow that were asked for."""
    if response.status == 503:
        raise _Busy("it is busy")
    expected = {"type": BINARY, "length": total - skip, "coding": None, "range": None}
    if skip:
        expected["range"] = f"bytes {skip}-{total - 1}/{total}"
    got = {
        "type": response.content_type,
        "length": response.content_length,
        "coding": response.headers.get("Content-Encoding"),
        "range": response.headers.get("Content-Range"),
    }
    if response.status == (206 if skip else 200) and got == expected:
        return
    text = ""
    if response.status >= 400 and "Content-Encoding" not in response.headers:
        text = (await response.content.read(_ERROR_BYTES_MAX)).decode(errors="replace")
    raise ModelError(f"it answers with status {response.status} and {got}, not with the pieces: {text[:200]}")


def _first(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SwarmError)
    return error


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
