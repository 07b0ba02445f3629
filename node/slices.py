"""The expert slices that an expert server holds: loading, self-test, looking up, dropping."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from node.compute_queue import ComputeQueue
from node.errors import CallRefused, SwarmError
from node.number_formats import Floats, Ints
from node.wire import LayerShape, body_limit_bytes, is_model_id

log = logging.getLogger(__name__)

# Experts of one self-test call: few, so that calls of a slice that serves already get their turn in between.
PROBE_EXPERTS = 8

Report = Callable[[dict[str, Any]], None]
# Model id and layer of which other experts became ready, or none any more.
Changed = Callable[[str, "Model", "Layer"], None]


@dataclass(eq=False)
class Slice:
    """One contiguous range of a layer's experts; `state` is wanted, loading, ready or failed."""

    model: str
    layer: int
    first: int
    last: int
    state: str = "wanted"
    reason: str = ""
    memory_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        described = {"model": self.model, "layer": self.layer, "first": self.first, "last": self.last}
        return {**described, "state": self.state, **({"reason": self.reason} if self.reason else {})}


@dataclass(eq=False)
class Layer:
    """A layer of which slices are wanted or held. `n_in` and `n_out` are 0 until the first slice is loaded."""

    number: int
    program: Any
    n_expert: int
    n_used: int
    n_in: int = 0
    n_out: int = 0
    slices: dict[tuple[int, int], Slice] = field(default_factory=dict)
    ready: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def refresh(self) -> None:
        self.ready = np.zeros(self.n_expert, dtype=np.bool_)
        for (first, last), held in self.slices.items():
            if held.state == "ready":
                self.ready[first : last + 1] = True

    def is_coming(self, experts: Ints | None = None) -> bool:
        """Whether a slice that is not loaded yet will hold one of the experts (any expert, when None)."""
        coming = [span for span, held in self.slices.items() if held.state in ("wanted", "loading")]
        if experts is None:
            return bool(coming)
        return any(bool(((experts >= first) & (experts <= last)).any()) for first, last in coming)


@dataclass(eq=False)
class Model:
    """The layers of one model, and the kernels' store that holds their weights."""

    store: Any
    layers: dict[int, Layer] = field(default_factory=dict)


class SliceHolder:
    """Loads and drops slices, one at a time and off the event loop; says what is held. On the loop's thread only."""

    def __init__(self, kernels: ModuleType, device: str, threads: int, max_rows: int, compute: ComputeQueue) -> None:
        self._kernels = kernels
        self._device = device
        self._threads = threads
        self._max_rows = max_rows
        self._compute = compute
        self._models: dict[str, Model] = {}
        self._one_at_a_time = asyncio.Lock()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._was_ordered = False
        self.limit_bytes = body_limit_bytes(max_rows, 0, 0, False)
        self.on_change: Changed = lambda model_id, model, layer: None

    def slices(self) -> Iterator[Slice]:
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
        wanted: list[tuple[Slice, dict[str, Any]]] = []
        for part in order["slices"]:
            number, first, last = (int(part[name]) for name in ("layer", "first", "last"))
            try:
                known = self._register(order, model_id, number, first, last)
            except (SwarmError, KeyError, ValueError) as error:
                report({"type": "failed", **_key(model_id, number, first, last), "reason": _reason(error)})
                continue
            if known.state == "ready":
                report(_ready(known))
            elif known.state == "wanted":
                wanted.append((known, part["tensors"]))
            else:
                reason = "the slice is being loaded already"
                report({"type": "failed", **_key(model_id, number, first, last), "reason": reason})
        self._was_ordered = True
        for one, tensors in wanted:
            async with self._one_at_a_time:
                report(await self._load_one(one, tensors))

    async def drop(self, model_id: str, number: int, first: int, last: int) -> None:
        """Gives a slice's memory back; waits while one is being loaded. No error when it is not held."""
        async with self._one_at_a_time:
            model = self._models.get(model_id)
            layer = model.layers.get(number) if model else None
            if model is None or layer is None or (first, last) not in layer.slices:
                return
            dropped = layer.slices.pop((first, last))
            self._refresh(model_id, model, layer)
            if dropped.state == "ready":
                # In the queue's order: calls accepted before this still compute.
                await self._compute.run(partial(model.store.drop, number, first, last))
            if not layer.slices:
                model.layers.pop(number, None)
            if not model.layers:
                self._models.pop(model_id, None)
            self._refresh_limit()

    def _register(self, order: dict[str, Any], model_id: str, number: int, first: int, last: int) -> Slice:
        program = self._kernels.Program(order["programs"][str(number)])
        n_expert, n_used = int(order["n_expert"][str(number)]), int(order["n_used"][str(number)])
        if number < 0 or not 0 <= first <= last < n_expert or not 1 <= n_used <= n_expert:
            raise SwarmError(f"experts {first} to {last} with {n_used} used are not of {n_expert}", layer=number)
        model = self._models.setdefault(model_id, Model(None))
        layer = model.layers.setdefault(number, Layer(number, program, n_expert, n_used))
        if (layer.program.digest, layer.n_expert, layer.n_used) != (program.digest, n_expert, n_used):
            raise SwarmError("the layer is held with another program or number of experts: drop its slices first")
        known = layer.slices.get((first, last))
        if known is None or known.state == "failed":
            known = layer.slices[first, last] = Slice(model_id, number, first, last)
            self._refresh(model_id, model, layer)
        elif known.state == "wanted":
            # Another order waits to load it and will report it; this one must not do so twice.
            return Slice(model_id, number, first, last, state="loading")
        return known

    async def _load_one(self, wanted: Slice, tensors: dict[str, Any]) -> dict[str, Any]:
        key = _key(wanted.model, wanted.layer, wanted.first, wanted.last)
        model = self._models.get(wanted.model)
        layer = model.layers.get(wanted.layer) if model else None
        if model is None or layer is None or layer.slices.get((wanted.first, wanted.last)) is not wanted:
            return {"type": "failed", **key, "reason": "the slice was dropped before it was loaded"}
        wanted.state = "loading"
        loaded = False
        try:
            info = await asyncio.get_running_loop().run_in_executor(
                self._loader, self._load_weights, model, layer, wanted, tensors
            )
            loaded = True
            if layer.n_in and (layer.n_in, layer.n_out) != (info.n_in, info.n_out):
                raise SwarmError(
                    f"the slice maps {info.n_in} values to {info.n_out}, its layer {layer.n_in} to {layer.n_out}"
                )
            await self._self_test(model, layer, wanted, int(info.n_in), int(info.n_out))
        except Exception as error:  # a slice that cannot be served is reported, whatever the cause
            log.warning("slice %s failed: %s", key, _reason(error))
            if loaded:
                await self._compute.run(partial(model.store.drop, wanted.layer, wanted.first, wanted.last))
            wanted.state, wanted.reason = "failed", _reason(error)
            return {"type": "failed", **key, "reason": wanted.reason}
        layer.n_in, layer.n_out = int(info.n_in), int(info.n_out)
        wanted.state, wanted.memory_bytes = "ready", int(info.bytes)
        self._refresh(wanted.model, model, layer)
        self._refresh_limit()
        return _ready(wanted)

    def _load_weights(self, model: Model, layer: Layer, wanted: Slice, tensors: dict[str, Any]) -> Any:
        if model.store is None:
            model.store = self._kernels.ExpertStore(device=self._device, threads=self._threads)
        parts = {
            name: self._kernels.TensorParts(
                type=tensor["type"],
                ne=list(tensor["ne"]),
                parts=[(part["path"], int(part["offset"]), int(part["bytes"])) for part in tensor["parts"]],
            )
            for name, tensor in tensors.items()
        }
        return model.store.load(layer.number, layer.program, wanted.first, wanted.last, layer.n_expert, parts)

    async def _self_test(self, model: Model, layer: Layer, wanted: Slice, n_in: int, n_out: int) -> None:
        """Calls every expert of the slice once. Raises SwarmError on a wrong shape or a value that is not finite."""
        for start in range(wanted.first, wanted.last + 1, PROBE_EXPERTS):
            expert = np.arange(start, min(start + PROBE_EXPERTS, wanted.last + 1), dtype=np.int32)
            n_pairs = len(expert)
            n_h = n_pairs if layer.program.input == "pair" else 1
            h = np.sin(np.arange(n_h * n_in, dtype=np.float32)).reshape(n_h, n_in)
            weight = np.ones(n_pairs, dtype=np.float32) if layer.program.uses_weight else None
            row = np.zeros(n_pairs, dtype=np.int32)
            digest = layer.program.digest
            probe = partial(model.store.ffn, digest, layer.number, h, row, expert, weight, 1, "rows")
            y: Floats = await self._compute.run(probe)
            if y.shape != (n_pairs, n_out):
                raise SwarmError(f"self-test: the result has shape {y.shape}, expected {(n_pairs, n_out)}")
            finite = np.isfinite(y).all(axis=1)
            if not finite.all():
                bad = ", ".join(str(e) for e in expert[~finite])
                raise SwarmError(
                    f"self-test: experts {bad} give values that are not finite; is the model file damaged?"
                )

    def _refresh(self, model_id: str, model: Model, layer: Layer) -> None:
        layer.refresh()
        self.on_change(model_id, model, layer)

    def _refresh_limit(self) -> None:
        limits = [body_limit_bytes(self._max_rows, 0, 0, False)]
        for model in self._models.values():
            for layer in model.layers.values():
                per_pair = layer.program.input == "pair"
                limits.append(body_limit_bytes(self._max_rows, layer.n_in, layer.n_used, per_pair))
        self.limit_bytes = max(limits)


def _key(model_id: str, layer: int, first: int, last: int) -> dict[str, Any]:
    return {"model": model_id, "layer": layer, "first": first, "last": last}


def _ready(held: Slice) -> dict[str, Any]:
    key = _key(held.model, held.layer, held.first, held.last)
    return {"type": "ready", **key, "bytes": held.memory_bytes}


def _reason(error: BaseException) -> str:
    return (
        str(error)
        if isinstance(error, (SwarmError, OSError, ValueError, RuntimeError))
        else f"{type(error).__name__}: {error}"
    )
