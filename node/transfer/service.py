"""What this node gives of its models to other nodes: routes of the agent (docs/protocol.md, "Model transfer")."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from aiohttp import web

from node.errors import ModelError
from node.models.index import ModelIndex, TensorPart
from node.models.layout import Layout, read_layout
from node.models.manifest import Manifest
from node.models.pieces import Piece, pieces
from node.transfer.bitmap import PieceBitmap
from node.transfer.schedule import RateLimit

MODELS_PREFIX = "/swarm/v1/models"
BINARY = "application/octet-stream"

# So many transfers fill a gigabit line; more of them only make each slower, and the disk seek.
TRANSFERS_MAX = 4
TRANSFERS_OF_PEER_MAX = 2
# So much is read at once: long enough for the disk, short enough for the event loop not to notice when it is sent.
_CHUNK_BYTES = 1 << 19
# A receiver that takes nothing for this long has its transfer ended, since others wait.
_STALL_S = 30.0


class Copy(Protocol):
    """A copy of a model, whole or in part, that others may read."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def index(self) -> ModelIndex: ...

    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def present(self) -> PieceBitmap: ...

    def missing(self, numbers: Iterable[int]) -> list[int]: ...


@dataclass(frozen=True)
class LocalCopy:
    """A model file of the user's, all of which is there."""

    index: ModelIndex
    manifest: Manifest

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The model's pieces in canonical order."""
        return pieces(self.index)

    @property
    def present(self) -> PieceBitmap:
        """All pieces."""
        return PieceBitmap.full(len(self.pieces))

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """No piece: all are there."""
        return []


class ModelService:
    """Answers other nodes. ``find`` gives the copy with an id, None if this node has none: no id becomes a path."""

    def __init__(self, find: Callable[[str], Awaitable[Copy | None]], limit: RateLimit | None = None) -> None:
        self._find = find
        self._limit = limit or RateLimit(0)
        self._transfers: Counter[str] = Counter()
        self._layouts: dict[str, Layout] = {}
        #: The bytes of pieces that were given to others.
        self.sent_bytes = 0

    def routes(self) -> list[web.RouteDef]:
        """The routes for other nodes, below PEER_PREFIX, so that the swarm key is proved where there is one."""
        return [
            web.get(f"{MODELS_PREFIX}/{{id}}/manifest", self._manifest),
            web.get(f"{MODELS_PREFIX}/{{id}}/layout", self._layout),
            web.get(f"{MODELS_PREFIX}/{{id}}/present", self._present),
            web.get(f"{MODELS_PREFIX}/{{id}}/pieces", self._pieces),
        ]

    async def _manifest(self, request: web.Request) -> web.Response:
        return web.Response(body=(await self._copy(request)).manifest.to_bytes(), content_type=BINARY)

    async def _present(self, request: web.Request) -> web.Response:
        return web.Response(body=(await self._copy(request)).present.to_bytes(), content_type=BINARY)

    async def _layout(self, request: web.Request) -> web.Response:
        copy = await self._copy(request)
        model_id = copy.manifest.model_id
        layout = self._layouts.get(model_id)
        if layout is None:
            try:
                layout = await asyncio.to_thread(read_layout, copy.index)
            except ModelError as error:
                raise _refusal(web.HTTPServiceUnavailable, "unreadable", str(error)) from error
            self._layouts = {model_id: layout}  # the last one only: vocabularies can take 50 MB
        return web.Response(body=layout.to_bytes(), content_type=BINARY)

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        copy = await self._copy(request)
        first, last = _number(request, "from"), _number(request, "to")
        if not first <= last < len(copy.pieces):
            raise _refusal(
                web.HTTPBadRequest, "bad_request", f"pieces {first} to {last} are not among {len(copy.pieces)}"
            )
        numbers = range(first, last + 1)
        missing = copy.missing(numbers)
        if missing:
            raise _refusal(web.HTTPNotFound, "piece_missing", f"piece {missing[0]} is not here")
        total = sum(piece.bytes for piece in copy.pieces[first : last + 1])
        skip, stop = _range(request, total)
        with self._slot(request.remote or ""):
            response = web.StreamResponse(status=200 if (skip, stop) == (0, total) else 206)
            response.content_type = BINARY
            response.content_length = stop - skip
            if response.status == 206:
                response.headers["Content-Range"] = f"bytes {skip}-{stop - 1}/{total}"
            parts = _parts(copy, first, last, skip, stop)
            async with _reader(copy.index.paths, parts, request) as chunks:
                await response.prepare(request)
                async for chunk in chunks:
                    delay_s = self._limit.delay_s(len(chunk), time.monotonic())
                    if delay_s > 0:
                        await asyncio.sleep(delay_s)
                    if copy.missing(numbers):
                        raise ConnectionAbortedError("the pieces were dropped while they were read")
                    async with asyncio.timeout(_STALL_S):
                        await response.write(chunk)
                    self.sent_bytes += len(chunk)
            await response.write_eof()
        return response

    async def _copy(self, request: web.Request) -> Copy:
        copy = await self._find(request.match_info["id"])
        if copy is None:
            raise _refusal(web.HTTPNotFound, "no_model", "this node has no model of that id")
        return copy

    @contextlib.contextmanager
    def _slot(self, peer: str) -> Iterator[None]:
        if self._transfers.total() >= TRANSFERS_MAX or self._transfers[peer] >= TRANSFERS_OF_PEER_MAX:
            raise _refusal(
                web.HTTPServiceUnavailable, "busy", "this node serves as many transfers as it may", {"Retry-After": "1"}
            )
        self._transfers[peer] += 1
        try:
            yield
        finally:
            self._transfers[peer] -= 1
            self._transfers += Counter()  # without those at 0


def _parts(copy: Copy, first: int, last: int, skip: int, stop: int) -> Iterator[TensorPart]:
    """Yields the bytes ``skip`` to ``stop`` of the pieces as runs of at most a chunk."""
    position = 0
    for piece in copy.pieces[first : last + 1]:
        if position + piece.bytes <= skip or position >= stop:
            position += piece.bytes
            continue
        for part in piece.parts(copy.index):
            begin, end = max(skip - position, 0), min(stop - position, part.bytes)
            while begin < end:
                count = min(end - begin, _CHUNK_BYTES)
                yield TensorPart(part.path, part.offset + begin, count)
                begin += count
            position += part.bytes


@contextlib.asynccontextmanager
async def _reader(
    paths: Sequence[str], parts: Iterator[TensorPart], request: web.Request
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Gives chunks of the files, each read in a thread while the one before is sent."""
    files: dict[str, int] = {}
    pending: asyncio.Future[bytes] | None = None
    loop = asyncio.get_running_loop()

    def read(part: TensorPart) -> bytes:
        descriptor = files.get(part.path)
        if descriptor is None:
            descriptor = files[part.path] = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(descriptor, part.bytes, part.offset)
        if len(data) != part.bytes:
            raise OSError(f"{part.path} became shorter")
        return data

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal pending
        part = next(parts, None)
        while part is not None:
            current = pending or loop.run_in_executor(None, read, part)
            data = await current
            part = next(parts, None)
            pending = None if part is None else loop.run_in_executor(None, read, part)
            yield data

    try:
        yield chunks()
    finally:
        if pending is not None:
            await asyncio.wait({pending})
            pending.cancelled() or pending.exception()
        for descriptor in files.values():
            os.close(descriptor)


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not text.isdecimal() or len(text) > 9:
        raise _refusal(web.HTTPBadRequest, "bad_request", f"{name!r} must be the number of a piece")
    return int(text)


def _range(request: web.Request, total: int) -> tuple[int, int]:
    try:
        wanted = request.http_range
    except ValueError:
        raise _refusal(web.HTTPBadRequest, "bad_request", "a Range header that is none") from None
    start, stop = wanted.start or 0, total if wanted.stop is None else min(wanted.stop, total)
    if start < 0:
        start = max(0, total + start)
    if start >= stop:
        raise _refusal(
            web.HTTPRequestRangeNotSatisfiable,
            "bad_range",
            f"the range begins behind the {total} bytes of the pieces",
            {"Content-Range": f"bytes */{total}"},
        )
    return start, stop


def _refusal(
    kind: type[web.HTTPError], code: str, message: str, headers: dict[str, str] | None = None
) -> web.HTTPException:
    text = json.dumps({"error": {"type": code, "message": message}})
    return kind(text=text, content_type="application/json", headers=headers)
