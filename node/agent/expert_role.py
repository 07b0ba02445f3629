"""What this node holds: its expert server, and the slices that the router's plan asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from node.agent.own_record import Experts
from node.errors import SwarmError
from node.expert_server.process import ExpertProcess, ProcessEvent, SliceAnswer, SliceOrder
from node.models.index import ModelIndex
from node.router.programs import ModelPrograms
from node.slices import Slice, describe, gaps, surplus

log = logging.getLogger(__name__)


def next_slices(
    wanted: Sequence[Slice], held: Mapping[Slice, int], memory_bytes: int, bytes_of: Callable[[Slice], int]
) -> tuple[list[Slice], list[Slice]]:
    """What to drop and then what to load, so that every expert of ``wanted`` is held. Pure.

    ``held``: bytes by slice; ``memory_bytes``: what may be used. Held slices that are not wanted stay while there is
    room, since the plan may come back to them; wanted ones are never dropped. What does not fit even so is for the
    expert server to refuse.
    """
    to_load = gaps(wanted, list(held))
    needed = sum(held.values()) + sum(bytes_of(one) for one in to_load)
    to_drop = []
    for one in surplus(wanted, list(held)):
        if needed > memory_bytes:
            to_drop.append(one)
            needed -= held[one]
    return to_drop, to_load


class ExpertRole:
    """The expert server of a node and the slices it holds.

    ``run`` owns the process; ``want`` says what to hold. ``on_change`` is called whenever ``ready`` or ``problem``
    changes. ``check_file`` is called in a thread before slices are loaded, and raises ModelError when the file is not
    the one that was hashed. ``provide`` is awaited before that, and cancelled when something else is wanted: it fetches
    what the file lacks, and raises SwarmError when it cannot. ``digests`` is called in a thread, and gives the SHA-256
    of each expert of slices, as far as they are known.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str,
        port: int,
        device: str,
        threads: int,
        max_rows: int,
        memory_bytes: int,
        log_path: Path,
        environment: dict[str, str],
        on_change: Callable[[], None],
        check_file: Callable[[ModelIndex], None] = lambda index: None,
        provide: Callable[[ModelIndex, Sequence[Slice]], Awaitable[None]] | None = None,
        digests: Callable[[ModelIndex, Sequence[Slice]], Mapping[Slice, Sequence[str]]] = lambda index, slices: {},
        measures_speed: bool = False,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._on_change = on_change
        self._check_file = check_file
        self._provide = provide
        self._digests = digests
        self._wanted: tuple[ModelIndex, ModelPrograms, tuple[Slice, ...]] | None = None
        self._wanted_changed = asyncio.Event()
        self._held: dict[Slice, int] = {}  # → memory_bytes
        self._notes: dict[Slice, str] = {}  # why slices are held on another device than was meant
        self._held_model: ModelIndex | None = None
        self._alive = asyncio.Event()
        self.problem = ""
        self.process = ExpertProcess(
            name,
            host=host,
            port=port,
            device=device,
            threads=threads,
            max_rows=max_rows,
            environment=environment,
            stderr=log_path,
            measures_speed=measures_speed,
            check_files=self._check_files,
            on_event=self._process_event,
            on_withdrawn=self._slice_withdrawn,
        )

    def state(self) -> Experts:
        """What is held now, as plain values."""
        return Experts(
            port=self.process.port,
            model_id=self.model_id,
            ready=self.ready,
            in_use=self.in_use,
            problem=self.problem,
            bytes_per_s=self.process.expert_bytes_per_s,
        )

    @property
    def model_id(self) -> str | None:
        """The model whose slices are held."""
        return self._held_model.model_id if self._held_model is not None else None

    @property
    def ready(self) -> tuple[Slice, ...]:
        """Slices that answer calls now."""
        return tuple(sorted(self._held)) if self._alive.is_set() else ()

    @property
    def in_use(self) -> tuple[Slice, ...]:
        """Slices that are held, or are to be, and are read again after a crash."""
        wanted = self._wanted[2] if self._wanted is not None else ()
        return tuple({*self._held, *wanted})

    def want(self, index: ModelIndex, programs: ModelPrograms, slices: Sequence[Slice]) -> None:
        """Says what to hold from now on. Slices that are held and not wanted stay until their memory is needed."""
        wanted = (index, programs, tuple(sorted(slices)))
        if self._wanted is None or self._wanted[0].model_id != index.model_id or self._wanted[2] != wanted[2]:
            self._wanted = wanted
            log.debug("the plan gives this node %d slices of model %s", len(wanted[2]), index.model_id)
            self._wanted_changed.set()

    async def run(self) -> None:
        """Runs the expert server until cancelled, restarts it when it crashes, loads what is wanted."""
        await self.process.start()
        self._alive.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.process.supervise(), name="supervise expert server")
                tasks.create_task(self._follow(), name="load slices")
        finally:
            await self.process.stop()

    async def _follow(self) -> None:
        retry_s = 1.0
        while True:
            await self._wanted_changed.wait()
            self._wanted_changed.clear()
            try:
                await self._reach_wanted()
                retry_s = 1.0
            except SwarmError as error:
                self._tell(str(error))
                # A crash in the middle of loading, or a file that is not complete yet: tried again, ever more slowly.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted_changed.wait(), retry_s)
                retry_s = min(2 * retry_s, 30.0)
                self._wanted_changed.set()

    async def _reach_wanted(self) -> None:
        assert self._wanted is not None
        index, programs, wanted = self._wanted
        await self._alive.wait()
        if self._held_model is not None and self._held_model.model_id != index.model_id:
            for held in list(self._held):
                await self._drop(held)
        self._held_model = index
        to_drop, to_load = next_slices(wanted, self._held, self._memory_bytes, partial(_bytes, index))
        for held in to_drop:
            await self._drop(held)
        if not to_load:
            self._tell(self._note())
            return
        if not await self._provided(index, to_load):
            return
        await self._load(index, programs, to_load)
        self._tell(self._note())

    async def _load(self, index: ModelIndex, programs: ModelPrograms, to_load: Sequence[Slice]) -> None:
        """Raises SwarmError when a slice could not be loaded; the others are held then."""
        await asyncio.to_thread(self._check_file, index)
        digests = await asyncio.to_thread(self._digests, index, to_load)
        layers = {one.layer: programs.layers[one.layer] for one in to_load}
        answers = await self.process.load(
            index.model_id,
            {layer: program.text for layer, program in layers.items()},
            {layer: program.n_expert for layer, program in layers.items()},
            {layer: program.n_used for layer, program in layers.items()},
            [
                SliceOrder(
                    one,
                    {name: tensor.to_json() for name, tensor in index.slice_parts(*one).items()},
                    sha256=digests.get(one, ()),
                )
                for one in to_load
            ],
        )
        problems = []
        for answer in answers:
            if answer.reason is None:
                self._held[answer.slice] = answer.memory_bytes
                if answer.note:
                    self._notes[answer.slice] = answer.note
            else:
                problems.append(f"{answer.slice}: {answer.reason}")
        if problems:
            raise SwarmError("; ".join(problems[:3]))

    async def _provided(self, index: ModelIndex, slices: Sequence[Slice]) -> bool:
        """Whether the bytes of the slices are there; False when something else is wanted by now."""
        if self._provide is None:
            return True
        providing = asyncio.ensure_future(self._provide(index, slices))
        changed = asyncio.ensure_future(self._wanted_changed.wait())
        try:
            await asyncio.wait({providing, changed}, return_when=asyncio.FIRST_COMPLETED)
            if not providing.done():
                return False
            await providing
            return True
        finally:
            changed.cancel()
            providing.cancel()
            await asyncio.gather(providing, changed, return_exceptions=True)

    async def _drop(self, held: Slice) -> None:
        # Gone already, if its proof failed while another one was dropped.
        if self._held_model is None or self._held.pop(held, None) is None:
            return
        self._notes.pop(held, None)
        self._on_change()
        await self.process.drop(self._held_model.model_id, held)

    def _slice_withdrawn(self, model_id: str, answer: SliceAnswer) -> None:
        """A slice that was ready failed its proof later: it is tried again, on another device if there is one."""
        if self._held_model is None or self._held_model.model_id != model_id:
            return
        if self._held.pop(answer.slice, None) is not None:
            self._notes.pop(answer.slice, None)
            self._tell(f"{answer.slice}: {answer.reason}")
            self._wanted_changed.set()

    def _note(self) -> str:
        """Which slices are on another device than was meant, and why."""
        by_note: dict[str, list[Slice]] = {}
        for held in sorted(self._notes):
            by_note.setdefault(self._notes[held], []).append(held)
        return "; ".join(f"{describe(slices)} {note}" for note, slices in by_note.items())

    def _check_files(self, model_id: str) -> None:
        index = self._held_model
        if index is not None and index.model_id == model_id:
            self._check_file(index)

    def _tell(self, problem: str) -> None:
        self.problem = problem
        if problem:
            log.warning("slices: %s", problem)
        self._on_change()

    def _process_event(self, event: ProcessEvent) -> None:
        if event.kind == "exited":
            self._alive.clear()
        elif event.kind in ("started", "reloaded") and (event.kind == "reloaded" or not self._held):
            # A restarted server answers only once it has reloaded what it held.
            lost = [held for held in self._held if (self.model_id, held) not in self.process.held]
            for held in lost:
                del self._held[held]
            if lost:
                self._wanted_changed.set()
            self._alive.set()
        elif event.kind == "gave_up":
            self.problem = event.message
        log.info("expert server: %s", event.message)
        self._on_change()


def _bytes(index: ModelIndex, one: Slice) -> int:
    """Memory of a slice."""
    return index.expert_bytes(one.layer) * one.n_experts // max(index.n_expert, 1)
