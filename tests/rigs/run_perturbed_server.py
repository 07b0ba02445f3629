"""An expert server process whose results are off by one unit in the last place in half of their values.

The floor below which a difference of logits means nothing: quantised models amplify a last bit.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import numpy as np  # noqa: E402

import kernels  # noqa: E402
from node.expert_server.__main__ import main  # noqa: E402


class PerturbedStore(kernels.ExpertStore):
    """The real store, with the last bit of a random half of the values flipped."""

    def __init__(self, device: str = "auto", threads: int = 0) -> None:
        super().__init__(device, threads)
        self._random = np.random.default_rng(1)

    def ffn(self, *arguments: Any, **named: Any) -> Any:
        result = super().ffn(*arguments, **named)
        bits = result.view(np.uint32)
        bits ^= self._random.integers(0, 2, bits.shape, np.uint32)
        return result


perturbed = ModuleType("perturbed")
vars(perturbed).update({name: getattr(kernels, name) for name in kernels.__all__})
perturbed.ExpertStore = PerturbedStore  # type: ignore[attr-defined]
# Its threads would call the native store below this one.
del perturbed.CallServer  # type: ignore[attr-defined]

main(kernels=perturbed)
