"""How far two backends may differ, by what they are and by the type of the weights. For tests and admission.

ggml's kernels for quantised weights quantise the activations too; that is nearly all of the difference between a
backend and float64. Two backends have noise of their own: their difference has at most the root of the sum of
squares. A wrong factor hides in that noise, but not in an expert's gain, whose deviation falls with the number of
independent values. How each limit was measured: docs/equivalence.md, "How the limits came about".
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from kernels.equivalence import ExpertComparison

__all__ = ["GAIN_FOUND", "Family", "Tolerance", "family", "is_swiglu", "problem", "rows_needed", "tolerance"]

#: What a result comes from. "gpu" is every device that is no CPU; "reference" is kernels/reference.py in float64.
Family = Literal["cpu", "gpu", "reference"]

#: An expert's median row may have so many times the expected noise; 1.33 times was measured.
TYPICAL_FACTOR: Final = 2.0
#: Any single row may have so many times the expected noise; 8.2 times was measured, with real weights.
ROW_FACTOR: Final = 20.0
#: But no more than this: a row that is lost differs by 1, one in another's place by 1.4.
ROW_MOST: Final = 0.5
#: A typical gain may be off by so many times noise / sqrt(values); 10.5 times was measured on CPUs.
GAIN_FACTOR: Final = 20.0
#: The same with a GPU; 20.3 times was measured, with Vulkan.
GPU_GAIN_FACTOR: Final = 40.0
#: For types that are nearly exact: a deviation below this is no fault.
GAIN_LEAST: Final = 1e-4
# With fewer rows, a median is no better than a mean.
_ROWS_LEAST: Final = 5
#: The deviation of an expert's gain that golden inputs have rows enough for to find.
GAIN_FOUND: Final = 0.01

# The relative L2 of ggml's CPU kernels against float64, by the type of the activations: of an FFN, the mean over rows.
_NOISE: Final = {"exact": 2e-7, "f16": 4e-4, "bf16": 3.3e-3, "q8_0": 1.2e-2, "q8_K": 2e-2}
# The type of the activations by that of the weights, as ggml-cpu's table of vec_dot types says; others: q8_K.
_ACTIVATIONS: Final = {
    **{"f32": "exact", "f16": "f16", "bf16": "bf16"},
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4", "q1_0"), "q8_0"),
}
# What Vulkan on Mesa's software driver had when it added up in F16, rounded up; quantised types get the CPU's if more.
_GPU_NOISE_LEAST: Final = 6e-3
# The reference rounds nothing, but its result is compared in float32.
_EXACT: Final = 1e-7
# Activations other than SwiGLU, such as the square of a ReLU, and tables of F16 for GELU, make more of the same noise.
_OTHER_PROGRAMS: Final = 1.5
# ggml's CPU code looks GELU up in a table of F16.
_FLOATS_LEAST: Final = 5e-4


@dataclass(frozen=True)
class Tolerance:
    """How far the results of two backends may differ."""

    #: The relative L2 that is expected.
    noise: float
    #: The most that an expert's median row may have.
    typical: float
    #: The most that any row may have.
    row: float
    #: How many times as far as one value's noise, divided by the root of their number, the gain may be off.
    gain_factor: float = GAIN_FACTOR


def family(device_type: str) -> Family:
    """The family of a ggml device's type (cpu, gpu, igpu, accel, other)."""
    return "cpu" if device_type == "cpu" else "gpu"


def tolerance(one: Family, other: Family, types: Collection[str], *, swiglu: bool = True) -> Tolerance:
    """What is allowed of two families, of experts whose weights have these ggml types. `swiglu`: whether the layer
    program has no other activation."""
    noise = math.hypot(_noise(one, types), _noise(other, types))
    if not swiglu:
        noise = max(_OTHER_PROGRAMS * noise, _FLOATS_LEAST)
    gain_factor = GPU_GAIN_FACTOR if "gpu" in (one, other) else GAIN_FACTOR
    return Tolerance(noise, TYPICAL_FACTOR * noise, min(ROW_MOST, ROW_FACTOR * noise), gain_factor)


def problem(found: ExpertComparison, allowed: Tolerance, width: int, n_distinct_rows: int | None = None) -> str:
    """What is wrong with one expert of two backends, in words; empty when nothing is.

    `width`: the narrowest of the expert's matrices, in values. `n_distinct_rows`: of the inputs that were compared,
    if fewer than the rows: repeats have no noise of their own. With fewer than 5 of them, only single rows are
    judged.
    """
    if found.n_not_finite:
        return f"{found.n_not_finite} values are not finite"
    if found.worst_row > allowed.row:
        return f"a row differs by {_percent(found.worst_row)}, at most {_percent(allowed.row)} is noise"
    n_rows = found.n_rows if n_distinct_rows is None else n_distinct_rows
    if n_rows < _ROWS_LEAST:
        return ""
    if found.typical_row > allowed.typical:
        return f"the median row differs by {_percent(found.typical_row)}, at most {_percent(allowed.typical)} is noise"
    limit = max(GAIN_LEAST, allowed.gain_factor * found.typical_row / math.sqrt(max(1, width * n_rows)))
    if abs(found.typical_gain - 1) > limit:
        return (
            f"the results are {found.typical_gain:.5f} times what they should be; "
            f"{_percent(limit)} more or less would be noise"
        )
    return ""


def is_swiglu(program_text: str) -> bool:
    """Whether a layer program has no other activation than SwiGLU."""
    steps = [line.partition(" = ")[2].split(" ") for line in program_text.splitlines()]
    return all(words[:2] == ["glu", "swiglu"] for words in steps if words[0] in ("glu", "unary", "sqr"))


def rows_needed(allowed: Tolerance, width: int) -> int:
    """Distinct rows with which a gain that is wrong by GAIN_FOUND stands out of the noise twice over."""
    return math.ceil((allowed.gain_factor * allowed.noise / (GAIN_FOUND / 2)) ** 2 / max(1, width))


def _noise(of: Family, types: Collection[str]) -> float:
    if of == "reference":
        return _EXACT
    noise = max((_NOISE[_ACTIVATIONS.get(name, "q8_K")] for name in types), default=_NOISE["exact"])
    return max(noise, _GPU_NOISE_LEAST) if of == "gpu" else noise


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.3g} %"
