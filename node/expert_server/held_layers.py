"""What an expert server holds, as data: models, their layers, and each layer's slices with their states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from node.number_formats import Ints
from node.slices import Slice


@dataclass(eq=False)
class HeldSlice:
    """A slice of a model that is wanted or held; `state` is wanted, loading (or proving itself), ready or failed.

    `tensors`: as the order gave them; `sha256`: of each expert's bytes in them, or empty. `note`: why it is not on the
    device that it was meant for.
    """

    model: str
    slice: Slice
    state: str = "wanted"
    reason: str = ""
    memory_bytes: int = 0
    tensors: dict[str, Any] = field(default_factory=dict)
    sha256: tuple[str, ...] = ()
    note: str = ""

    @property
    def key(self) -> dict[str, Any]:
        """What messages name it by."""
        return slice_key(self.model, self.slice)

    def describe(self) -> dict[str, Any]:
        """Its part of the document of `/ready` and `/v1/stats`."""
        texts = {name: text for name, text in (("reason", self.reason), ("note", self.note)) if text}
        return {**self.key, "state": self.state, **texts}


def slice_key(model: str, of: Slice) -> dict[str, Any]:
    """The fields by which messages between parent and server name a slice of a model."""
    return {"model": model, **of._asdict()}


@dataclass(eq=False)
class Layer:
    """A layer of which slices are wanted or held. `n_in` and `n_out` are 0 until the first slice is loaded; `store` is
    None until then, and has the weights of all of them, on `device`. `ready`: of each expert, whether it answers."""

    number: int
    program: Any
    n_expert: int
    n_used: int
    n_in: int = 0
    n_out: int = 0
    device: str = ""
    store: Any = None
    slices: dict[Slice, HeldSlice] = field(default_factory=dict)
    ready: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def refresh(self) -> None:
        """Works `ready` out anew, after a slice's state changed."""
        self.ready = np.zeros(self.n_expert, dtype=np.bool_)
        for one, held in self.slices.items():
            if held.state == "ready":
                self.ready[one.first : one.last + 1] = True

    def is_coming(self, experts: Ints | None = None) -> bool:
        """Whether a slice that is not loaded yet will hold one of the experts (any expert, when None)."""
        coming = [one for one, held in self.slices.items() if held.state in ("wanted", "loading")]
        if experts is None:
            return bool(coming)
        return any(bool(((experts >= one.first) & (experts <= one.last)).any()) for one in coming)


@dataclass(eq=False)
class Model:
    """The layers of one model, and by device the kernels' stores that hold their weights."""

    stores: dict[str, Any] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)
