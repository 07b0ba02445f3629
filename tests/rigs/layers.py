"""Random layers in a file, loaded into an ExpertStore and computed by the NumPy reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kernels
from kernels import reference
from rigs.random_models import RandomTensor

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def float_tensors(shapes: Mapping[str, Sequence[int]], n_expert: int, seed: int = 0) -> dict[str, RandomTensor]:
    """Random f32 tensors. `shapes`: of one expert, in NumPy's order; matrices get a spread of 1/sqrt(row length)."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, RandomTensor] = {}
    for name, shape in shapes.items():
        values = generator.standard_normal((n_expert, *shape), np.float32)
        if len(shape) == 2:
            values *= np.float32(shape[1] ** -0.5)
        tensors[name] = ("f32", tuple(reversed(shape)), values.tobytes())
    return tensors


@dataclass(frozen=True)
class Pairs:
    """The pairs of one call; ids are global. `weight` is None for programs that do not use it."""

    row: Ints
    expert: Ints
    weight: Floats | None
    n_rows: int

    @staticmethod
    def of(experts_of_rows: Sequence[Sequence[int]], weight: bool = True, seed: int = 0) -> Pairs:
        """One list of expert ids per row."""
        row = [r for r, experts in enumerate(experts_of_rows) for _ in experts]
        expert = [e for experts in experts_of_rows for e in experts]
        weights = np.random.default_rng(seed).uniform(0.05, 1, len(row)).astype(np.float32) if weight else None
        return Pairs(np.array(row, np.int32), np.array(expert, np.int32), weights, len(experts_of_rows))

    @staticmethod
    def random(n_rows: int, ids: Sequence[int], n_used: int, weight: bool = True, seed: int = 0) -> Pairs:
        """For each row `n_used` distinct ids."""
        generator = np.random.default_rng((seed, n_rows))
        chosen = [generator.choice(ids, n_used, replace=False).tolist() for _ in range(n_rows)]
        return Pairs.of(chosen, weight, seed)

    def where(self, mask: NDArray[np.bool_]) -> Pairs:
        weight = None if self.weight is None else self.weight[mask]
        return Pairs(self.row[mask], self.expert[mask], weight, self.n_rows)


@dataclass
class Layer:
    """`tensors` hold all `n_expert` experts of the layer; they are written to `path`, one after the other."""

    program: str
    tensors: Mapping[str, RandomTensor]
    n_expert: int
    path: Path
    offsets: dict[str, int] = field(default_factory=dict)
    _values: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with self.path.open("wb") as file:
            for name, (_, _, data) in self.tensors.items():
                self.offsets[name] = file.tell()
                file.write(data)

    def parts(self, first: int, last: int) -> dict[str, kernels.TensorParts]:
        """What `ExpertStore.load` wants for the experts `first` to `last`."""
        parts = {}
        for name, (type, ne, data) in self.tensors.items():
            one = len(data) // self.n_expert
            place = (str(self.path), self.offsets[name] + first * one, (last - first + 1) * one)
            parts[name] = kernels.TensorParts(type, ne, [place])
        return parts

    def load(self, store: kernels.ExpertStore, first: int, last: int, layer: int = 0) -> kernels.SliceInfo:
        parsed = kernels.Program(self.program)
        return store.load(layer, parsed, first, last, self.n_expert, self.parts(first, last))

    def held(self, *slices: tuple[int, int], threads: int = 1) -> kernels.ExpertStore:
        """A store on the CPU with these slices, as layer 0."""
        store = kernels.ExpertStore("CPU", threads)
        for first, last in slices or [(0, self.n_expert - 1)]:
            self.load(store, first, last)
        return store

    def call(self, store: kernels.ExpertStore, h: Floats, pairs: Pairs, reduce: str) -> Floats:
        digest = kernels.Program(self.program).digest
        return store.ffn(digest, 0, h, pairs.row, pairs.expert, pairs.weight, pairs.n_rows, reduce)

    def expected(self, h: Floats, pairs: Pairs, reduce: str) -> NDArray[np.float64]:
        """The reference's result, from all experts of the layer."""
        for name, (type, ne, data) in self.tensors.items():
            if name not in self._values:
                self._values[name] = reference.dequantise(type, (*ne, self.n_expert), data)
        return reference.ffn(self.program, self._values, h, pairs.row, pairs.expert, pairs.weight, pairs.n_rows, reduce)


def hidden(n: int, n_in: int, seed: int = 0) -> Floats:
    """Hidden rows as after a norm: [n, n_in], standard deviation 1."""
    return np.random.default_rng((seed, n, n_in)).standard_normal((n, n_in), np.float32)
