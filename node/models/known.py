"""This node's model files by what is in them. Hashing goes on beside the event loop, one model at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from node.errors import ModelError
from node.models.hashing import Stamp, file_stamp, local_manifest
from node.models.index import ModelIndex
from node.models.local import LocalModels
from node.models.manifest import identified
from node.records import Model

# A file that changed while it was hashed is left in peace for so long: it may be in the middle of a download.
_PAUSE_S = 10.0
# Each change of a record goes to every node, so progress is told in steps.
_STEP_PERCENT = 5


class NoCopy(ModelError):
    """No file of this node is a copy of the model, or claims to be."""


class KnownModels:
    """Gives the indexes of this node's files their content's id, and finds the model that the router serves among them.

    ``on_change`` is called whenever ``activity`` changes or a search ended; ``run`` searches.
    ``progress`` is (file name, bytes done, bytes in all) of the model that is being hashed, None when none is.
    """

    def __init__(self, local: LocalModels, on_change: Callable[[], None]) -> None:
        self.progress: tuple[str, int, int] | None = None
        self._local = local
        self._on_change = on_change
        self._ids: dict[Stamp, str] = {}
        self._paused: dict[tuple[str, ...], tuple[float, str]] = {}  # until when, and why, by paths
        self._known: dict[str, tuple[ModelIndex, Stamp]] = {}  # by model id, as the files were
        self._one_at_a_time = asyncio.Lock()
        self._wanted: Model | None = None
        self._look = asyncio.Event()
        self._not_found: ModelError | None = None

    @property
    def activity(self) -> str:
        """What goes on, in words, in steps of 5 %; empty when nothing does."""
        if self.progress is None:
            return ""
        name, done, total = self.progress
        return f"hashing {name}: {_percent(done, total)} %"

    async def identify(self, index: ModelIndex) -> ModelIndex:
        """The index with the content's id: at once if the files are known, else after they were read.

        Raises ModelError.
        """
        async with self._one_at_a_time:
            stamp = await asyncio.to_thread(file_stamp, index)
            if stamp not in self._ids:
                until_s, why = self._paused.get(index.paths, (0.0, ""))
                if time.monotonic() < until_s:
                    raise ModelError(why)
                try:
                    self._ids[stamp] = (await self._hash(index)).model_id
                except ModelError as error:
                    self._paused[index.paths] = (time.monotonic() + _PAUSE_S, str(error))
                    raise
            index = index.with_model_id(self._ids[stamp])
            self._known[index.model_id] = (index, stamp)
            return index

    def look_up(self, model: Model) -> ModelIndex | None:
        """This node's copy of a model that another one serves; None while it is looked for.

        Raises ModelError when there was none, NoCopy if no file even looks like one, and looks again.
        """
        if model.id in self._known:
            return self._known[model.id][0]
        if self._wanted != model:
            self._wanted, self._not_found = model, None
        self._look.set()
        if self._not_found is not None:
            raise self._not_found
        return None

    async def run(self) -> None:
        """Searches for what is looked up and not known, until cancelled."""
        while True:
            await self._look.wait()
            self._look.clear()
            model = self._wanted
            if model is None or model.id in self._known:
                continue
            try:
                await self.find(model)
                problem = None
            except ModelError as error:
                problem = error
            if model == self._wanted:
                self._not_found = problem
            self._on_change()

    async def find(self, model: Model) -> ModelIndex:
        """Looks through this node's files for a model, and hashes those with its header.

        Raises ModelError, saying why none is a copy of it.
        """
        others = []
        for index in await asyncio.to_thread(self._local.with_header, model.header):
            known = await self.identify(index)
            if known.model_id == model.id:
                return known
            others.append(known)
        if others:
            raise ModelError(
                f"{others[0].paths[0]} has the same header as the router's {model.file}, but other bytes: it is model "
                f"{others[0].model_id}, the router's is {model.id}. One of them is damaged; copy the right one"
            )
        for index in await asyncio.to_thread(self._local.named, model.file):
            raise ModelError(
                f"{index.paths[0]} has the name of the router's {model.file}, but is another model or quantisation: "
                f"its header is {index.header_digest[:32]}, the router's {model.header or 'not known'}"
            )
        folders = ", ".join(map(str, self._local.folders_searched()))
        raise NoCopy(
            f"the router serves {model.file}, which is in none of this node's model folders ({folders}). "
            f"Put the file into one of them, or start this node with --model, as the router was"
        )

    def check_unchanged(self, index: ModelIndex) -> None:
        """Raises ModelError when the files of an identified index are not what was hashed any more.

        The model is then looked for anew. Blocks, as long as it takes to look at the files.
        """
        known = self._known.get(index.model_id)
        if known is None or known[0].paths != index.paths or file_stamp(index) != known[1]:
            self._known.pop(index.model_id, None)
            raise ModelError(
                f"model file {index.paths[0]} changed since this node hashed it; "
                f"if it does not load by itself, start the node again"
            )

    async def _hash(self, index: ModelIndex) -> ModelIndex:
        stop = threading.Event()
        report = partial(self._report, asyncio.get_running_loop(), Path(index.paths[0]).name)
        work = asyncio.ensure_future(asyncio.to_thread(local_manifest, index, report, stop))
        try:
            return identified(index, await asyncio.shield(work))
        except asyncio.CancelledError:
            stop.set()
            await asyncio.gather(work, return_exceptions=True)
            raise
        finally:
            self.progress = None
            self._on_change()

    def _report(self, loop: asyncio.AbstractEventLoop, name: str, done: int, total: int) -> None:
        before, self.progress = self.progress, (name, done, total)
        if before is None or _percent(*before[1:]) != _percent(done, total):
            loop.call_soon_threadsafe(self._on_change)


def _percent(done: int, total: int) -> int:
    return 100 * done // max(total, 1) // _STEP_PERCENT * _STEP_PERCENT
