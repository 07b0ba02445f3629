"""How alike the results of two backends are: cosine, relative L2, the largest difference, each expert's gain. Pure.

Everything is summed in float64 and expert by expert, so that the results of a whole layer need not be in memory at
once. Each expert is looked at alone, since the cosine of all says little. Its *gain* is 1 but for noise that falls
with the number of values, so a wrong factor stands out long before it shows in the difference as a whole. The
*typical* gain and row, medians over the rows, do not see a single row that is far larger than the others, as real
weights have them; what each figure is for is in docs/equivalence.md, "What is compared".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Comparison", "ExpertComparison", "Tally", "compare"]


@dataclass(frozen=True)
class ExpertComparison:
    """One expert's rows of one backend, a, against those of another, b.

    With b all zero, gains are 1 and the other figures are 0 if a is zero too, else infinite.
    """

    n_rows: int
    n_outputs: int
    #: <a, b> / <b, b>.
    gain: float
    #: The median over rows of <a_i, b_i> / <b_i, b_i>, without rows in which b is zero.
    typical_gain: float
    #: |a - b| / |b|.
    relative_l2: float
    #: The median |a_i - b_i| of a row, relative to |b_i|, or to the median of all |b_i| where that is more.
    typical_row: float
    #: The largest of these. A row that stands in another's place shows here.
    worst_row: float
    #: The largest |a - b| of a value.
    max_abs: float
    #: Values of a or b that are Inf or NaN; with any, the other figures are NaN.
    n_not_finite: int


@dataclass(frozen=True)
class Comparison:
    """All rows of one backend, a, against those of another, b; figures as in ExpertComparison."""

    n_outputs: int
    n_experts: int
    #: <a, b> / (|a| |b|).
    cosine: float
    relative_l2: float
    max_abs: float
    #: The largest |gain - 1| of an expert.
    gain_deviation: float
    #: The expert that has it; -1: nothing was compared.
    gain_expert: int
    worst_row: float
    worst_row_expert: int
    n_not_finite: int


@dataclass
class _Rows:
    """One expert's rows so far."""

    n_rows: int = 0
    n_outputs: int = 0
    n_not_finite: int = 0
    max_abs: float = 0.0
    #: |a|², |b|², <a, b> and |a - b|² of each row, as they came: [4, n] each.
    parts: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def all(self) -> NDArray[np.float64]:
        return np.concatenate([np.zeros((4, 0)), *self.parts], axis=1)


class Tally:
    """Takes rows as they come. A NaN anywhere makes the figures of its expert, and of the whole, NaN."""

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}

    def add(self, expert: int, a: ArrayLike, b: ArrayLike) -> None:
        """Rows of one expert, both [n_rows, n_out]. Raises ValueError when the shapes differ."""
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if x.shape != y.shape or x.ndim != 2:
            raise ValueError(f"results of shapes {x.shape} and {y.shape} cannot be compared")
        rows = self._rows.setdefault(expert, _Rows())
        rows.n_rows += len(x)
        rows.n_outputs += x.size
        n_not_finite = int(x.size - np.count_nonzero(np.isfinite(x) & np.isfinite(y)))
        rows.n_not_finite += n_not_finite
        if not x.size or n_not_finite:
            return
        difference = x - y
        rows.max_abs = max(rows.max_abs, float(np.abs(difference).max()))
        products = (x * x, y * y, x * y, difference * difference)
        rows.parts.append(np.stack([product.sum(axis=1) for product in products]))

    def experts(self) -> Mapping[int, ExpertComparison]:
        """The figures of each expert, by its id, ascending."""
        return {expert: _of_expert(self._rows[expert]) for expert in sorted(self._rows)}

    def result(self) -> Comparison:
        """The figures of everything."""
        each = self.experts()
        aa, bb, ab, differences = (
            math.fsum(values) for values in np.concatenate([np.zeros((4, 0)), *(r.all for r in self._rows.values())], 1)
        )
        n_not_finite = sum(rows.n_not_finite for rows in self._rows.values())
        # A NaN is the worst that there can be.
        gain_expert = max(each, key=lambda e: _rank(abs(each[e].gain - 1)), default=-1)
        row_expert = max(each, key=lambda e: _rank(each[e].worst_row), default=-1)
        norms = math.sqrt(aa) * math.sqrt(bb)
        cosine = ab / norms if norms else float(aa == bb)
        return Comparison(
            n_outputs=sum(rows.n_outputs for rows in self._rows.values()),
            n_experts=len(each),
            cosine=math.nan if n_not_finite else cosine,
            relative_l2=math.nan if n_not_finite else _ratio(differences, bb),
            max_abs=math.nan if n_not_finite else max((rows.max_abs for rows in self._rows.values()), default=0.0),
            gain_deviation=abs(each[gain_expert].gain - 1) if each else 0.0,
            gain_expert=gain_expert,
            worst_row=each[row_expert].worst_row if each else 0.0,
            worst_row_expert=row_expert,
            n_not_finite=n_not_finite,
        )


def compare(a: ArrayLike, b: ArrayLike, expert: ArrayLike) -> Tally:
    """The tally of rows [n_pairs, n_out] of two backends, of the experts `expert` [n_pairs]. Raises ValueError when
    the shapes differ."""
    x, y = np.asarray(a), np.asarray(b)
    ids: NDArray[np.int64] = np.asarray(expert, np.int64).reshape(-1)
    if x.shape != y.shape or x.ndim != 2 or len(x) != len(ids):
        raise ValueError(f"results of shapes {x.shape} and {y.shape} for {len(ids)} pairs cannot be compared")
    tally = Tally()
    for one in np.unique(ids).tolist():
        tally.add(one, x[ids == one], y[ids == one])
    return tally


def _of_expert(rows: _Rows) -> ExpertComparison:
    n_rows, n_outputs = rows.n_rows, rows.n_outputs
    if rows.n_not_finite:
        nan = math.nan
        return ExpertComparison(n_rows, n_outputs, nan, nan, nan, nan, nan, nan, rows.n_not_finite)
    of_rows = rows.all
    _, own_bb, own_ab, own_differences = of_rows
    _, bb, ab, differences = (math.fsum(values) for values in of_rows)
    gain = ab / bb if bb else 1.0
    gains = own_ab[own_bb > 0] / own_bb[own_bb > 0]
    sizes = np.maximum(own_bb, np.median(own_bb)) if n_outputs else own_bb
    errors = [_ratio(d, size) for d, size in zip(own_differences.tolist(), sizes.tolist(), strict=True)]
    return ExpertComparison(
        n_rows=n_rows,
        n_outputs=n_outputs,
        gain=gain,
        typical_gain=float(np.median(gains)) if len(gains) else 1.0,
        relative_l2=_ratio(differences, bb),
        typical_row=float(np.median(errors)) if errors else 0.0,
        worst_row=max(errors, default=0.0),
        max_abs=rows.max_abs,
        n_not_finite=0,
    )


def _ratio(square: float, of_square: float) -> float:
    if of_square == 0:
        return 0.0 if square == 0 else math.inf
    return math.sqrt(square / of_square)


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value
