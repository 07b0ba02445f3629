"""The same input through every backend at hand, and how alike the results are: the equivalence matrix.

Backends are the ggml devices of this build, the NumPy reference in float64, and the live nodes of a
swarm, called at their expert ports. Experts are computed a few at a time, so that a whole layer never
is in memory as float64. docs/equivalence.md.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import kernels
from kernels.equivalence import Comparison, Tally
from kernels.tolerances import Family, family, is_swiglu, problem, tolerance
from node.errors import ModelError, SwarmError
from node.expert_server import wire
from node.expert_server.client import ExpertClient
from node.number_formats import Floats, Ints

log = logging.getLogger(__name__)

#: Experts of one step, and of one row of a call: no model uses fewer for a token than a call may then ask for.
STEP_EXPERTS = 8
#: Rows with each expert, as few as one and as many as a prompt brings.
ROWS = (1, 8, 33, 512)
_DEADLINE_MS = 120_000


@dataclass(frozen=True)
class Subject:
    """Experts `first` to `last` of one layer: what the backends compute. `label` names them for people."""

    label: str
    layer: int
    first: int
    last: int
    n_expert: int
    n_used: int
    program: str
    sources: Mapping[str, kernels.TensorSource]
    model_id: str = ""

    @property
    def types(self) -> tuple[str, ...]:
        """ggml types of the matrices, sorted."""
        return tuple(sorted({source.type for source in self.sources.values() if len(source.ne) > 1}))

    @property
    def width(self) -> int:
        """The narrowest of the matrices, in values."""
        return min(length for source in self.sources.values() if len(source.ne) > 1 for length in source.ne)


@dataclass(frozen=True)
class Input:
    """One call's arguments: each row with each of a few experts, in the order of rows. `n_rows` of each expert."""

    n_rows: int
    h: Floats
    row: Ints
    expert: Ints
    weight: Floats | None


class Backend(Protocol):
    """Something that computes experts. `experts`: those it can."""

    name: str
    family: Family
    description: str
    experts: frozenset[int]

    async def compute(self, given: Input) -> NDArray[np.floating]:
        """The rows [n_pairs, n_out]. Raises SwarmError, or what the kernels raise."""
        ...


class DeviceBackend:
    """A ggml device of this build. Loading blocks; raises what the kernels raise."""

    def __init__(self, device: kernels.Device, subject: Subject, threads: int) -> None:
        self.name = device.name
        self.family = family(device.type)
        self.description = f"{device.description} ({device.type})"
        self.experts = frozenset(range(subject.first, subject.last + 1))
        self._program = kernels.Program(subject.program)
        self._layer = subject.layer
        self._store = kernels.ExpertStore(device.name, threads)
        parts = {n: kernels.TensorParts(s.type, list(s.ne), list(s.parts)) for n, s in subject.sources.items()}
        self._store.load(subject.layer, self._program, subject.first, subject.last, subject.n_expert, parts)

    async def compute(self, given: Input) -> NDArray[np.floating]:
        return await asyncio.to_thread(self._compute, given)

    def _compute(self, given: Input) -> NDArray[np.floating]:
        digest = self._program.digest
        return self._store.ffn(
            digest, self._layer, given.h, given.row, given.expert, given.weight, given.n_rows, "rows"
        )


class ReferenceBackend:
    """kernels/reference.py in float64, expert by expert."""

    name = "float64"
    family: Family = "reference"
    description = "NumPy, weights dequantised, float64"

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._per_pair = kernels.Program(subject.program).input == "pair"
        self.experts = frozenset(range(subject.first, subject.last + 1))

    async def compute(self, given: Input) -> NDArray[np.floating]:
        return await asyncio.to_thread(self._compute, given)

    def _compute(self, given: Input) -> NDArray[np.floating]:
        subject = self._subject
        n_experts = subject.last - subject.first + 1
        result: NDArray[np.float64] | None = None
        for expert in np.unique(given.expert).tolist():
            own = given.expert == expert
            h = given.h[own] if self._per_pair else given.h[given.row[own]]
            weight = None if given.weight is None else given.weight[own]
            number = expert - subject.first
            rows = kernels.expert_rows(subject.program, subject.sources, number, n_experts, h, weight)
            if result is None:
                result = np.empty((len(given.expert), rows.shape[1]))
            result[own] = rows
        assert result is not None
        return result


class NodeBackend:
    """The expert port of a node. `term`: the router's, which a call must not raise."""

    def __init__(
        self,
        client: ExpertClient,
        experts: frozenset[int],
        subject: Subject,
        *,
        term: int,
        n_out: int,
        description: str,
    ) -> None:
        self.name = client.name
        # What computes it there is not known; whatever it is, it may have a GPU's noise.
        self.family: Family = "gpu"
        self.description = description
        self.experts = experts
        self._client = client
        self._subject = subject
        self._term = term
        self._n_out = n_out
        self._ids = itertools.count(1)

    async def compute(self, given: Input) -> NDArray[np.floating]:
        subject = self._subject
        request = wire.CallRequest(
            id=next(self._ids),
            model=subject.model_id,
            program=kernels.Program(subject.program).digest,
            term=self._term,
            layer=subject.layer,
            reduce="rows",
            n_rows=given.n_rows,
            dtype="f32",
            h=given.h,
            row=given.row,
            expert=given.expert,
            weight=given.weight,
            deadline_ms=_DEADLINE_MS,
        )
        return (await self._client.call(request, self._n_out)).y


@dataclass(frozen=True)
class Compared:
    """Two backends at one number of rows. `problem`: what is beyond the limits, of which
    expert; empty when nothing is."""

    a: str
    b: str
    n_rows: int
    types: tuple[str, ...]
    figures: Comparison
    problem: str


@dataclass
class Outcome:
    """What was compared, and what could not be: `left_out` says why, by name of backend."""

    compared: list[Compared] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether something was compared, and nothing is beyond the limits or failed."""
        return bool(self.compared) and not self.left_out and not any(one.problem for one in self.compared)


def make_input(subject: Subject, experts: Sequence[int], n_rows: int, n_in: int, seed: int) -> Input:
    """Normally distributed hidden rows, and gate weights, from a seed: the same wherever they are made."""
    parsed = kernels.Program(subject.program)
    generator = np.random.default_rng((seed, subject.layer, n_rows, experts[0]))
    row = np.repeat(np.arange(n_rows, dtype=np.int32), len(experts))
    expert = np.tile(np.asarray(experts, np.int32), n_rows)
    h = generator.standard_normal((len(row) if parsed.input == "pair" else n_rows, n_in), np.float32)
    weight = generator.uniform(0.05, 1, len(row)).astype(np.float32) if parsed.uses_weight else None
    return Input(n_rows, h, row, expert, weight)


async def compare_backends(
    subject: Subject,
    backends: Sequence[Backend],
    n_in: int,
    *,
    rows: Sequence[int] = ROWS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Has every backend compute every expert it can, and compares each two where both could.

    A backend that fails is left out from then on. ``progress`` is told (steps done, steps in all).
    """
    outcome = Outcome()
    steps = [
        (n_rows, range(start, min(start + _step(subject), subject.last + 1)))
        for n_rows in rows
        for start in range(subject.first, subject.last + 1, _step(subject))
    ]
    tallies: dict[tuple[str, str, int], Tally] = {}
    by_name = {backend.name: backend for backend in backends}
    for done, (n_rows, experts) in enumerate(steps):
        progress(done, len(steps))
        results: dict[str, dict[int, NDArray[np.floating]]] = {}
        given = make_input(subject, experts, n_rows, n_in, seed)
        for backend in list(by_name.values()):
            own = [expert for expert in experts if expert in backend.experts]
            if not own:
                continue
            part = given if len(own) == len(experts) else _only(subject, given, own)
            try:
                y = await backend.compute(part)
            except (SwarmError, RuntimeError, ValueError, LookupError, OSError) as error:
                outcome.left_out[backend.name] = str(error) or type(error).__name__
                del by_name[backend.name]
                continue
            results[backend.name] = {expert: y[part.expert == expert] for expert in own}
        for a, b in itertools.combinations(results, 2):
            for expert in results[a].keys() & results[b].keys():
                tallies.setdefault((a, b, n_rows), Tally()).add(expert, results[a][expert], results[b][expert])
    progress(len(steps), len(steps))
    families = {backend.name: backend.family for backend in backends}
    for (a, b, n_rows), tally in sorted(tallies.items(), key=lambda item: (_order(families, item[0]), item[0][2])):
        if a not in by_name or b not in by_name:
            continue
        found = _problem(subject, families[a], families[b], tally)
        outcome.compared.append(Compared(a, b, n_rows, subject.types, tally.result(), found))
    return outcome


def n_values(subject: Subject) -> tuple[int, int]:
    """Values of an input and of an output row, as the program's matrices say. Raises ModelError."""
    program = kernels.reference.parse(subject.program)
    first = next((step for step in program.steps if step.op == "matmul" and step.operands[0] == "h"), None)
    if first is None:
        raise ModelError(f"the program of layer {subject.layer} does not begin with a matrix")
    n_in = int(subject.sources[first.tensor].ne[0])
    h = np.zeros((1, n_in), np.float32)
    weight = np.ones(1, np.float32) if program.uses_weights else None
    rows = kernels.expert_rows(subject.program, subject.sources, 0, subject.last - subject.first + 1, h, weight)
    return n_in, rows.shape[1]


def document(subjects: Sequence[tuple[Subject, Sequence[Backend], Outcome]], seed: int) -> dict[str, Any]:
    """All of it for scripts."""
    backends: dict[str, dict[str, Any]] = {}
    for _, used, _ in subjects:
        for backend in used:
            backends[backend.name] = {"family": backend.family, "description": backend.description}
    return {
        "build": kernels.build_id(),
        "seed": seed,
        "well": all(outcome.is_well for _, _, outcome in subjects),
        "backends": backends,
        "left_out": {name: why for _, _, outcome in subjects for name, why in outcome.left_out.items()},
        "subjects": [
            {"label": s.label, "layer": s.layer, "first": s.first, "last": s.last, "types": list(s.types)}
            for s, _, _ in subjects
        ],
        "comparisons": [
            {
                "subject": number,
                "a": one.a,
                "b": one.b,
                "rows": one.n_rows,
                "types": list(one.types),
                "outputs": one.figures.n_outputs,
                "experts": one.figures.n_experts,
                "cosine": one.figures.cosine,
                "relative_l2": one.figures.relative_l2,
                "max_abs": one.figures.max_abs,
                "gain_deviation": one.figures.gain_deviation,
                "gain_expert": one.figures.gain_expert,
                "worst_row": one.figures.worst_row,
                "problem": one.problem,
            }
            for number, (_, _, outcome) in enumerate(subjects)
            for one in outcome.compared
        ],
    }


def _step(subject: Subject) -> int:
    return min(STEP_EXPERTS, subject.n_used)


def _only(subject: Subject, given: Input, experts: Sequence[int]) -> Input:
    keep = np.isin(given.expert, experts)
    per_pair = kernels.Program(subject.program).input == "pair"
    return Input(
        given.n_rows,
        given.h[keep] if per_pair else given.h,
        given.row[keep],
        given.expert[keep],
        None if given.weight is None else given.weight[keep],
    )


def _order(families: Mapping[str, Family], key: tuple[str, str, int]) -> tuple[bool, str, str]:
    # What says most first: against the reference.
    return "reference" not in (families[key[0]], families[key[1]]), key[0], key[1]


def _problem(subject: Subject, a: Family, b: Family, tally: Tally) -> str:
    allowed = tolerance(a, b, subject.types, swiglu=is_swiglu(subject.program))
    for expert, found in tally.experts().items():
        why = problem(found, allowed, subject.width)
        if why:
            return f"expert {expert}: {why}"
    return ""
