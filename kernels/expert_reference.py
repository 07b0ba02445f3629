"""What one expert of a model file should compute: kernels/reference.py, on weights read from where the file has them.

Independent of what is tested against it: the bytes are read again, dequantised by ggml's scalar code (which the tests
compare with the `gguf` package's), and multiplied in float64. One expert is in memory at a time. An expert of 9.4
million weights, as the reference model has them, takes some 30 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels import _kernels, reference

__all__ = ["TensorSource", "expert_rows"]


@dataclass(frozen=True)
class TensorSource:
    """Where a tensor of some experts is: as `kernels.TensorParts`. `ne`: of one expert; `parts`: path, offset, bytes
    of the experts, one after the other."""

    type: str
    ne: Sequence[int]
    parts: Sequence[tuple[str, int, int]]

    def read(self, number: int, n_experts: int) -> NDArray[np.float64]:
        """The values of the `number`th of `n_experts`, [*reversed(ne)]. Raises OSError, ValueError."""
        data = self.bytes_of(number, n_experts)
        shape = [int(length) for length in reversed(self.ne)]
        values = _kernels.dequantise(self.type, shape[-1] if shape else 1, data, math.prod(shape))
        return np.asarray(values).reshape(shape)

    def bytes_of(self, number: int, n_experts: int) -> bytearray:
        """The bytes of the `number`th of `n_experts`. Raises OSError, ValueError."""
        total = sum(n_bytes for _, _, n_bytes in self.parts)
        if n_experts < 1 or total % n_experts or not 0 <= number < n_experts:
            raise ValueError(f"{total} bytes do not hold expert {number} of {n_experts}")
        return self._bytes(number * (total // n_experts), total // n_experts)

    def _bytes(self, start: int, count: int) -> bytearray:
        data = bytearray()
        for path, offset, n_bytes in self.parts:
            here = min(count - len(data), n_bytes - start)
            if here > 0:
                with Path(path).open("rb", buffering=0) as file:
                    file.seek(offset + start)
                    while here > 0:
                        chunk = file.read(here)
                        if not chunk:
                            raise ValueError(f"{path} ends within the weights of an expert")
                        data += chunk
                        here -= len(chunk)
                start = n_bytes
            start -= n_bytes
        return data


def expert_rows(
    program_text: str,
    tensors: Mapping[str, TensorSource],
    number: int,
    n_experts: int,
    h: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
) -> NDArray[np.float64]:
    """The rows [n, n_out] that the `number`th of the `n_experts` in `tensors` should give for `h` [n, n_in] and the
    gate weights [n] (None exactly if the program does not use them). Raises OSError, ProgramError, ValueError."""
    needed = reference.parse(program_text).tensors
    missing = needed - tensors.keys()
    if missing:
        raise ValueError(f"the program uses tensors that are not given: {', '.join(sorted(missing))}")
    values = {name: tensors[name].read(number, n_experts)[np.newaxis] for name in needed}
    rows = np.arange(len(h))
    return reference.ffn(program_text, values, h, rows, np.zeros(len(h), np.int64), weight, len(h), "rows")
