"""Admission by proof: what a slice must answer before it serves, and what it answered instead.

Golden inputs reach every expert of the slice, each in calls of one row and in a call of more than 32 rows: ggml's
kernels differ by the number of rows. All of an expert's outputs are compared with float64
(kernels/expert_reference.py), by the limits of kernels/tolerances.py. The rows of the large call are the few distinct
ones over and over, so that the reference computes only those. Their number is prime, so that no shift of rows by the
width of a kernel's tile, or by one, puts equal ones in each other's place.

What this cannot see is a fault below the noise of quantised activations, such as one flipped bit of a weight. Against
that stand the hashes of the model's pieces. A file is hashed before it is used (node/models/hashing.py), and a
fetched piece when it is written; so that what a disk gives later is not believed either, the bytes from which the
reference is computed are hashed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kernels.equivalence import Tally
from kernels.tolerances import family, is_swiglu, problem, rows_needed, tolerance
from node.number_formats import Floats, Ints

#: Experts of one call and of one step of the reference: few, so that calls of other slices get their turn.
STEP_EXPERTS = 8
#: More than 32, from which on batched kernels are used.
ROWS_MANY = 33
# Prime numbers of distinct rows: enough for each width, and no more than a server's calls may have.
_PRIMES = (5, 7, 11, 13, 17, 23, 31, 43, 61)


@dataclass(frozen=True)
class GoldenCall:
    """The arguments of one call of `ExpertStore.ffn` (`reduce` is rows). `inputs`: the distinct input of each pair."""

    h: Floats
    row: Ints
    expert: Ints
    weight: Floats | None
    n_rows: int
    inputs: Ints


@dataclass(frozen=True)
class Unfit:
    """Why a slice is not admitted: what was found, and of which experts."""

    reason: str
    experts: tuple[int, ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.experts[:8])) + (", …" if len(self.experts) > 8 else "")
        return f"expert{'s' * (len(self.experts) > 1)} {named}: {self.reason}"


class Golden:
    """The golden inputs of one layer, and what is allowed of a device that computes them.

    `tensors`: of the slice, as in docs/protocol.md, "Expert control". `device_type`: of the device, as ggml says it.
    """

    def __init__(
        self, kernels: ModuleType, program: Any, tensors: Mapping[str, Mapping[str, Any]], n_in: int, device_type: str
    ) -> None:
        self._kernels = kernels
        self._program = program
        # Where each tensor's bytes are, by name, also of those that the program does not use.
        self._all = {
            name: kernels.TensorSource(
                str(tensor["type"]),
                [int(length) for length in tensor["ne"]],
                [(str(part["path"]), int(part["offset"]), int(part["bytes"])) for part in tensor["parts"]],
            )
            for name, tensor in sorted(tensors.items())
        }
        self._sources = {name: source for name, source in self._all.items() if name in program.tensors}
        matrices = [source for source in self._sources.values() if len(source.ne) > 1]
        self._width = min((length for source in matrices for length in source.ne), default=n_in)
        # Biases and scales are exact; only the types of matrices make noise.
        self.types = tuple(sorted({source.type for source in matrices}))
        self._tolerance = tolerance(family(device_type), "reference", self.types, swiglu=is_swiglu(program.text))
        needed = rows_needed(self._tolerance, self._width)
        self.n_inputs = next((prime for prime in _PRIMES if prime >= needed), _PRIMES[-1])
        generator = np.random.default_rng(20)
        self._h = generator.standard_normal((self.n_inputs, n_in), np.float32)
        self._weight = generator.uniform(0.5, 1.5, self.n_inputs).astype(np.float32) if program.uses_weight else None

    def expected(self, first: int, last: int, expert: int) -> Any:
        """What an expert of the slice `first` to `last` should give for the distinct inputs: float64 [n_inputs,
        n_out]. Blocks for some 30 ms. Raises OSError, ValueError."""
        n_experts = last - first + 1
        return self._kernels.expert_rows(
            self._program.text, self._sources, expert - first, n_experts, self._h, self._weight
        )

    def sha256(self, first: int, last: int, expert: int) -> str:
        """The SHA-256 of an expert of the slice `first` to `last`, as a manifest has it: 64 hex digits. Blocks.
        Raises OSError, ValueError."""
        digest = hashlib.sha256()
        for source in self._all.values():
            digest.update(source.bytes_of(expert - first, last - first + 1))
        return digest.hexdigest()

    def calls(self, experts: Sequence[int]) -> list[GoldenCall]:
        """The calls for these experts: one row with each, for every distinct input; then one of more than 32 rows.

        In that, the first expert has every row, the others one of each distinct input: a kernel is chosen by the rows
        of the call or by those of an expert, and is the same for all experts. With every row for every expert, a
        slice took twice as long.
        """
        one_row = [self._call([i] * len(experts), [0] * len(experts), experts) for i in range(self.n_inputs)]
        n_many = max(ROWS_MANY, self.n_inputs)
        pairs = [(row, expert) for row in range(n_many) for expert in experts[: 1 if row >= self.n_inputs else None]]
        rows = [row for row, _ in pairs]
        return [*one_row, self._call([row % self.n_inputs for row in rows], rows, [expert for _, expert in pairs])]

    def judge(
        self, experts: Sequence[int], expected: Sequence[Any], answered: Sequence[tuple[GoldenCall, Floats]]
    ) -> Unfit | None:
        """Compares the answers to `calls`, [n_pairs, n_out] each, with what was expected. None: nothing is wrong."""
        by_size: dict[bool, Tally] = {}
        for call, y in answered:
            tally = by_size.setdefault(call.n_rows > 1, Tally())
            for expert, should in zip(experts, expected, strict=True):
                own = call.expert == expert
                tally.add(expert, y[own], should[call.inputs[own]])
        for many, tally in by_size.items():
            found: dict[str, list[int]] = {}
            for expert, comparison in tally.experts().items():
                why = problem(comparison, self._tolerance, self._width, self.n_inputs)
                if why:
                    found.setdefault(why, []).append(expert)
            if found:
                why = next(iter(found))
                others = tuple(e for experts_of_why in found.values() for e in experts_of_why)
                rows = "more than 32 rows" if many else "one row"
                return Unfit(f"with {rows} an expert, {why}", others)
        return None

    def _call(self, inputs: Sequence[int], rows: Sequence[int], experts: Sequence[int]) -> GoldenCall:
        of_pair, row = np.asarray(inputs, np.int32), np.asarray(rows, np.int32)
        # Rows ascend from 0 on, so the first pair of each says which input it has.
        of_row = of_pair[np.unique(row, return_index=True)[1]]
        h = self._h[of_pair if self._program.input == "pair" else of_row]
        weight = None if self._weight is None else self._weight[of_pair]
        return GoldenCall(h, row, np.asarray(experts, np.int32), weight, len(of_row), of_pair)
