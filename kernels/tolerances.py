"""How far two backends may differ, by what they are and by the type of the weights. One place, for tests and for admission.

**Where the noise comes from.** ggml's kernels for quantised weights quantise the *activations* too: on CPUs to Q8_0 or Q8_1 (blocks of
32) or Q8_K (blocks of 256) as the weights' type wants it, on GPUs to Q8_1 (blocks of 32); F16 and BF16 weights are multiplied
with activations rounded to their type. That, not the order of additions, is nearly all of the difference between a backend
and float64. Of an FFN it is seen three times: the input twice (gate and up), the hidden values once.

**How the figures were measured.** `_NOISE` is the relative L2 of ggml's CPU kernels (x86-64 with AVX-512) against
kernels/reference.py in float64: a SwiGLU FFN with random weights of each type, normally distributed inputs, 8 experts of
256 x 512 and 1024 x 512, 1, 8 and 33 rows; the mean over rows, rounded up. It does not depend on the sizes. Single rows had
up to 1.8 times as much. Of GPUs, only Vulkan on Mesa's software driver was measured (docs/equivalence.md): 5.2e-3 to 5.8e-3 for F16
and quantised weights when it added up in F16, `_GPU_NOISE_LEAST` rounded up, and 5e-4 since it is asked to add up in F32; other
devices may not heed that, or compute with floats of 10 bits (TF32). For
quantised types the CPU's noise is granted to GPUs as well, whose activations are in smaller blocks than the CPU's Q8_K. Published figures (docs/equivalence.md) of GPUs against ARM CPUs are a relative L2 of 1.3 % and 2.2 %.

**What follows.** Two backends have noise of their own: their difference has at most the root of the sum of squares, whichever the two
are. CPUs of one kind should agree far better with each other, but the published figures of two ARM CPUs against one GPU are too unlike to count on it.
With real weights a few rows have much more: in the demo model's layer 27 (8 experts of 512 rows) up to 8.2 times `_NOISE`, where one
hidden value is far larger than all others. So `TYPICAL_FACTOR` times the noise is the limit for an expert's median row (the relative L2 of
an expert was at most 1.33 times, over the demo model and random models of 52 architectures with golden inputs), and `ROW_FACTOR` times, but no more than
`ROW_MOST`, that for each row: a row that is lost differs by 1, one in another's place by 1.4.

**Gain.** A factor of 1.01 hides in that noise, but not in the gain of the expert (kernels/equivalence.py). The deviation of its typical
gain from 1 falls with the number of independent values: rows times the narrowest width of the FFN, since errors of the input and of
the hidden values go into every output. Measured as above, and with 20 times 13 inputs for each of the 240 experts of the demo
model, it was at most 10.5 times noise / sqrt(rows * width) (not 1: a relative error of the input along itself counts twice
in an FFN, a median is less sharp than a mean, and it is the largest of many); `GAIN_FACTOR` is twice that. The noise is the typical row
of the same comparison, not the assumed one. Vulkan reached 20.3 times, for one expert of 272, so with a GPU it is twice
as much again. The plain gain will not do: of two experts of the demo model, one row of some is 37 times as large
as the others, and its noise alone made it 1.018.
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

TYPICAL_FACTOR: Final = 2.0
ROW_FACTOR: Final = 20.0
ROW_MOST: Final = 0.5
GAIN_FACTOR: Final = 20.0
GPU_GAIN_FACTOR: Final = 40.0
#: For types that are nearly exact: a deviation below this is no fault.
GAIN_LEAST: Final = 1e-4
# With fewer rows, a median is no better than a mean.
_ROWS_LEAST: Final = 5
#: The deviation of an expert's gain that golden inputs have rows enough for to find.
GAIN_FOUND: Final = 0.01

_NOISE: Final = {"exact": 2e-7, "f16": 4e-4, "bf16": 3.3e-3, "q8_0": 1.2e-2, "q8_K": 2e-2}
# Of the activations when the weights have this type, as ggml-cpu's table of vec_dot types says; others: q8_K.
_ACTIVATIONS: Final = {
    **{"f32": "exact", "f16": "f16", "bf16": "bf16"},
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4", "q1_0"), "q8_0"),
}
_GPU_NOISE_LEAST: Final = 6e-3
# Of the reference: it rounds nothing, but its result is compared in float32.
_EXACT: Final = 1e-7
# Activations other than SwiGLU, such as the square of a ReLU, and tables of F16 for GELU, make more of the same noise.
_OTHER_PROGRAMS: Final = 1.5
# ggml's CPU code looks GELU up in a table of F16.
_FLOATS_LEAST: Final = 5e-4


@dataclass(frozen=True)
class Tolerance:
    """`noise`: the relative L2 that is expected; `typical`, `row`: the most that an expert's median row, or any row, may have;
    `gain_factor`: how many times as far as one value's noise, divided by the root of their number, the gain may be off."""

    noise: float
    typical: float
    row: float
    gain_factor: float = GAIN_FACTOR


def family(device_type: str) -> Family:
    """Of a ggml device's type (cpu, gpu, igpu, accel, other)."""
    return "cpu" if device_type == "cpu" else "gpu"


def tolerance(one: Family, other: Family, types: Collection[str], *, swiglu: bool = True) -> Tolerance:
    """For results of two families, of experts whose weights have these ggml types. `swiglu`: whether the layer program has no
    other activation."""
    noise = math.hypot(_noise(one, types), _noise(other, types))
    if not swiglu:
        noise = max(_OTHER_PROGRAMS * noise, _FLOATS_LEAST)
    gain_factor = GPU_GAIN_FACTOR if "gpu" in (one, other) else GAIN_FACTOR
    return Tolerance(noise, TYPICAL_FACTOR * noise, min(ROW_MOST, ROW_FACTOR * noise), gain_factor)


def problem(found: ExpertComparison, allowed: Tolerance, width: int, n_distinct_rows: int | None = None) -> str:
    """What is wrong with one expert of two backends, in words; empty when nothing is.

    `width`: the narrowest of the expert's matrices, in values. `n_distinct_rows`: of the inputs that were compared, if fewer than
    the rows: repeats have no noise of their own. With fewer than 5 of them, only single rows are judged.
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
            f"the results are {found.typical_gain:.5f} times what they should be; {_percent(limit)} more or less would be "
            "noise"
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
