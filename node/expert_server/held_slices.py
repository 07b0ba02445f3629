"""The expert slices that an expert server holds: loading, looking up, dropping."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from node.errors import CallRefused, SwarmError
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.held_layers import HeldSlice, Layer, Model, slice_key
from node.expert_server.proof import Prover, SliceUnfit
from node.expert_server.wire import LayerShape, body_limit_bytes, is_model_id
from node.memory_limit import MEMORY_SHARE, free_memory_bytes
from node.number_formats import Ints
from node.slices import Slice

log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]
# Model id and layer of which other experts became ready, or none any more.
Changed = Callable[[str, Model, Layer], None]


class SliceHolder:
    """Loads and drops slices, one at a time and off the event loop; says what is held. On the loop's thread only."""

    def __init__(
        self,
        kernels: ModuleType,
        device: str,
        threads: int,
        max_rows: int,
        compute: ComputeQueue,
        prover: Prover,
        *,
        on_change: Changed | None = None,
        on_withdrawn: Report,
    ) -> None:
        """`on_change` is told of a layer of which other experts became ready, or none any more; `on_withdrawn` of a
        slice that was ready and will not be any more, without having been dropped: as `load` reports it."""
        self._kernels = kernels
        self._device = device
        self._threads = threads
        self._max_rows = max_rows
        self._compute = compute
        self._prover = prover
        self._on_change = on_change
        self._on_withdrawn = on_withdrawn
        self._models: dict[str, Model] = {}
        self._one_at_a_time = asyncio.Lock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._devices = {device.name: str(device.type) for device in kernels.devices()}
        # Why slices with weights of these types are not loaded on the device any more.
        self._unfit: dict[tuple[str, ...], str] = {}
        self._retests: set[asyncio.Task[None]] = set()
        self._was_ordered = False
        self.limit_bytes = body_limit_bytes(max_rows, 0, 0, False)

    def slices(self) -> Iterator[HeldSlice]:
        for model in self._models.values():
            for layer in model.layers.values():
                yield from layer.slices.values()

    @property
    def is_coming(self) -> bool:
        """Whether a slice is still to be loaded: also before the first order, which may name any slice.

        A server that crashed is asked again as soon as it listens, and must not refuse for good what it will hold.
        """
        return not self._was_ordered or any(held.state in ("wanted", "loading") for held in self.slices())

    def find(self, model_id: str, number: int, program: int) -> tuple[Model, Layer, LayerShape]:
        """What a call for this layer must look like. Raises CallRefused when the layer is not held in that form."""
        model = self._models.get(model_id)
        if model is None and not self._was_ordered:
            raise CallRefused("no slice was ordered yet", kind="not_ready", retry=True)
        if model is None:
            raise CallRefused(f"model {model_id} is not held here", kind="unknown_model")
        layer = model.layers.get(number)
        if layer is None or not (layer.slices and (layer.ready.any() or layer.is_coming())):
            raise CallRefused(f"no expert of layer {number} of model {model_id} is held here", kind="not_held")
        if layer.program.digest != program:
            raise CallRefused(
                f"the router's program of layer {number} is {program:016x}, this server's {layer.program.digest:016x}: "
                "they read different model files or use different releases",
                kind="program_mismatch",
            )
        if not layer.n_in:
            raise CallRefused(f"layer {number} of model {model_id} is still loading", kind="not_ready", retry=True)
        per_pair = layer.program.input == "pair"
        uses_weight = bool(layer.program.uses_weight)
        shape = LayerShape(layer.n_in, layer.n_expert, layer.n_used, self._max_rows, per_pair, uses_weight)
        return model, layer, shape

    def require(self, model_id: str, layer: Layer, expert: Ints) -> None:
        """Raises CallRefused (not_ready, not_held) unless all the experts (ids of the layer) are ready here."""
        held = layer.ready[expert]
        if held.all():
            return
        missing = np.unique(expert[~held])
        named = [int(e) for e in missing[:16]]
        if layer.is_coming(missing):
            raise CallRefused(
                f"experts of layer {layer.number} of model {model_id} are still loading",
                kind="not_ready",
                retry=True,
                experts=named,
            )
        raise CallRefused(
            f"{len(missing)} experts of layer {layer.number} of model {model_id} are not held here",
            kind="not_held",
            experts=named,
        )

    async def load(self, order: dict[str, Any], report: Report) -> None:
        """Carries out a `load` message of docs/protocol.md ("Expert control"); `report` gets one answer per slice."""
        model_id = order["model"]
        if not is_model_id(model_id):
            raise SwarmError(f"'{model_id}' is not a model id: 1 to 64 of [0-9a-z-]")
        wanted: list[HeldSlice] = []
        for part in order["slices"]:
            one = Slice(int(part["layer"]), int(part["first"]), int(part["last"]))
            try:
                known = self._register(order, model_id, one)
            except (SwarmError, KeyError, ValueError) as error:
                report({"type": "failed", **slice_key(model_id, one), "reason": _reason(error)})
                continue
            if known.state == "ready":
                report(_ready(known))
            elif known.state == "wanted":
                known.tensors, known.sha256 = part["tensors"], tuple(map(str, part.get("sha256", ())))
                wanted.append(known)
            else:
                reason = "the slice is being loaded already"
                report({"type": "failed", **known.key, "reason": reason})
        self._was_ordered = True
        for held in wanted:
            async with self._one_at_a_time:
                report(await self._load_one(held))

    async def drop(self, model_id: str, one: Slice) -> None:
        """Gives a slice's memory back; waits while one is being loaded. No error when it is not held."""
        async with self._one_at_a_time:
            model = self._models.get(model_id)
            layer = model.layers.get(one.layer) if model else None
            if model is None or layer is None or one not in layer.slices:
                return
            dropped = layer.slices.pop(one)
            self._refresh(model_id, model, layer)
            # Loading, while no other load goes on: it waits to be proved again.
            if dropped.state in ("ready", "loading"):
                # In the queue's order: calls accepted before this still compute.
                await self._compute.run(partial(layer.store.drop, *one))
            if not layer.slices:
                model.layers.pop(one.layer, None)
            if not model.layers:
                self._models.pop(model_id, None)
            self._refresh_limit()

    def _register(self, order: dict[str, Any], model_id: str, one: Slice) -> HeldSlice:
        number, first, last = one
        program = self._kernels.Program(order["programs"][str(number)])
        n_expert, n_used = int(order["n_expert"][str(number)]), int(order["n_used"][str(number)])
        if number < 0 or not 0 <= first <= last < n_expert or not 1 <= n_used <= n_expert:
            raise SwarmError(f"experts {first} to {last} with {n_used} used are not of {n_expert}", layer=number)
        model = self._models.setdefault(model_id, Model())
        layer = model.layers.setdefault(number, Layer(number, program, n_expert, n_used))
        if (layer.program.digest, layer.n_expert, layer.n_used) != (program.digest, n_expert, n_used):
            raise SwarmError("the layer is held with another program or number of experts: drop its slices first")
        known = layer.slices.get(one)
        if known is None or known.state == "failed":
            known = layer.slices[one] = HeldSlice(model_id, one)
            self._refresh(model_id, model, layer)
        elif known.state == "wanted":
            # Another order waits to load it and will report it; this one must not do so twice.
            return HeldSlice(model_id, one, state="loading")
        return known

    def suspect(self, model_id: str, number: int, experts: Sequence[int]) -> None:
        """A result with these experts was not finite: their slices answer nothing until they have been proved again.

        Those that cannot are dropped, and the parent is told. One bad input must not cost a slice for good, nor one bad
        slice all later calls.
        """
        model = self._models.get(model_id)
        layer = model.layers.get(number) if model else None
        if model is None or layer is None:
            return
        suspects = [
            held
            for held in layer.slices.values()
            if held.state == "ready" and any(held.slice.first <= expert <= held.slice.last for expert in experts)
        ]
        for held in suspects:
            held.state = "loading"
        self._refresh(model_id, model, layer)
        for held in suspects:
            log.warning("slice %s gave a value that is not finite; it is proved again", held.key)
            task = asyncio.get_running_loop().create_task(self._retest(model, layer, held))
            self._retests.add(task)
            task.add_done_callback(self._retests.discard)

    async def _retest(self, model: Model, layer: Layer, held: HeldSlice) -> None:
        async with self._one_at_a_time:
            if layer.slices.get(held.slice) is not held or held.state != "loading":
                return  # dropped meanwhile
            try:
                await self._prover.prove(layer, held, layer.device, layer.store, layer.n_in, layer.n_out)
                held.state = "ready"
            except Exception as error:  # whatever it is, the slice does not serve
                if isinstance(error, SliceUnfit):
                    self._mark_unfit(layer, held, error)
                await self._withdraw(layer, held, f"after a value that was not finite: {_reason(error)}")
            self._refresh(held.model, model, layer)

    async def _load_one(self, wanted: HeldSlice) -> dict[str, Any]:
        key = wanted.key
        model = self._models.get(wanted.model)
        layer = model.layers.get(wanted.slice.layer) if model else None
        if model is None or layer is None or layer.slices.get(wanted.slice) is not wanted:
            return {"type": "failed", **key, "reason": "the slice was dropped before it was loaded"}
        wanted.state = "loading"
        try:
            await self._load_somewhere(model, layer, wanted)
        except Exception as error:  # a slice that cannot be served is reported, whatever the cause
            log.warning("slice %s failed: %s", key, _reason(error))
            wanted.state, wanted.reason = "failed", _reason(error)
            return {"type": "failed", **key, "reason": wanted.reason}
        wanted.state = "ready"
        self._refresh(wanted.model, model, layer)
        self._refresh_limit()
        log.debug("slice %s is ready", key)
        return _ready(wanted)

    async def _load_somewhere(self, model: Model, layer: Layer, wanted: HeldSlice) -> None:
        """On this server's device, else on the CPU. Raises what is in the way there."""
        cpu = next((name for name, type in self._devices.items() if type == "cpu"), self._device)
        problem = self._unfit.get(_types(layer, wanted))
        is_ready = any(held.state == "ready" for held in layer.slices.values())
        has_moved = self._device != cpu and layer.device == cpu and is_ready
        if problem is None and not has_moved:
            try:
                await self._load_on(self._device, model, layer, wanted)
                return
            except Exception as error:
                if self._device == cpu:
                    raise
                if isinstance(error, SliceUnfit):
                    self._mark_unfit(layer, wanted, error)
                problem = _reason(error)
        wanted.note = f"on {cpu}, for {problem}" if problem else f"on {cpu}, as its layer's other slices"
        log.warning("slice %s: %s", wanted.key, wanted.note)
        needed = sum(int(part["bytes"]) for tensor in wanted.tensors.values() for part in tensor["parts"])
        free = int(MEMORY_SHARE * free_memory_bytes())
        if needed > free:
            raise SwarmError(f"{problem}; and on {cpu} it needs {needed >> 20} MiB of memory, of {free >> 20} MiB free")
        for other in list(layer.slices.values()):
            # The slices of a layer are of one store, so that one call can be for several of them.
            if other.state == "ready" and layer.device != cpu:
                await self._withdraw(layer, other, f"layer {layer.number} moves to {cpu}: {problem}")
                self._refresh(wanted.model, model, layer)
        try:
            await self._load_on(cpu, model, layer, wanted)
        except Exception as error:
            raise SwarmError(f"{problem}; and on {cpu}: {_reason(error)}") from error

    async def _load_on(self, device: str, model: Model, layer: Layer, wanted: HeldSlice) -> None:
        loop = asyncio.get_running_loop()
        store, info = await loop.run_in_executor(self._loader, self._load_weights, device, model, layer, wanted)
        try:
            n_in, n_out = int(info.n_in), int(info.n_out)
            if layer.n_in and (layer.n_in, layer.n_out) != (n_in, n_out):
                raise SwarmError(f"the slice maps {n_in} values to {n_out}, its layer {layer.n_in} to {layer.n_out}")
            await self._prover.prove(layer, wanted, device, store, n_in, n_out)
        except BaseException:
            await self._compute.run(partial(store.drop, *wanted.slice))
            raise
        layer.n_in, layer.n_out, layer.device, layer.store = n_in, n_out, device, store
        wanted.memory_bytes = int(info.bytes)

    def _load_weights(self, device: str, model: Model, layer: Layer, wanted: HeldSlice) -> tuple[Any, Any]:
        if device not in model.stores:
            model.stores[device] = self._kernels.ExpertStore(device=device, threads=self._threads)
        store = model.stores[device]
        parts = {
            name: self._kernels.TensorParts(
                type=tensor["type"],
                ne=list(tensor["ne"]),
                parts=[(part["path"], int(part["offset"]), int(part["bytes"])) for part in tensor["parts"]],
            )
            for name, tensor in wanted.tensors.items()
        }
        return store, store.load(
            layer.number, layer.program, wanted.slice.first, wanted.slice.last, layer.n_expert, parts
        )

    def _mark_unfit(self, layer: Layer, held: HeldSlice, error: SliceUnfit) -> None:
        # What is wrong is, as far as anybody knows, the device's way with these types.
        if self._devices.get(self._device) != "cpu":
            self._unfit[_types(layer, held)] = error.message

    async def _withdraw(self, layer: Layer, held: HeldSlice, reason: str) -> None:
        held.state, held.reason = "failed", reason
        layer.refresh()
        await self._compute.run(partial(layer.store.drop, *held.slice))
        log.warning("slice %s is withdrawn: %s", held.key, reason)
        self._on_withdrawn({"type": "withdrawn", **held.key, "reason": reason})

    def _refresh(self, model_id: str, model: Model, layer: Layer) -> None:
        layer.refresh()
        if self._on_change is not None:
            self._on_change(model_id, model, layer)

    def _refresh_limit(self) -> None:
        limits = [body_limit_bytes(self._max_rows, 0, 0, False)]
        for model in self._models.values():
            for layer in model.layers.values():
                per_pair = layer.program.input == "pair"
                limits.append(body_limit_bytes(self._max_rows, layer.n_in, layer.n_used, per_pair))
        self.limit_bytes = max(limits)


def _types(layer: Layer, held: HeldSlice) -> tuple[str, ...]:
    """The types of weights that the layer's program uses of a slice."""
    return tuple(
        sorted({str(tensor["type"]) for name, tensor in held.tensors.items() if name in layer.program.tensors})
    )


def _ready(held: HeldSlice) -> dict[str, Any]:
    return {"type": "ready", **held.key, "bytes": held.memory_bytes, **({"note": held.note} if held.note else {})}


def _reason(error: BaseException) -> str:
    return (
        str(error)
        if isinstance(error, (SwarmError, OSError, ValueError, RuntimeError))
        else f"{type(error).__name__}: {error}"
    )
