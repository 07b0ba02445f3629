"""How fast a device reads expert weights: what decides, on most machines, how long one token's experts take.

A made-up layer stands for the model's: the speed is known before there is a model, and the same on every node.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np

from node.expert_server.compute_queue import ComputeQueue

log = logging.getLogger(__name__)

# The layer program of most models: SwiGLU, weighted after the FFN. Measurements and self-tests compute it.
SWIGLU_PROGRAM = """swarm-program 1
input row
%0 = matmul ffn_up_exps.weight h
%1 = matmul ffn_gate_exps.weight h
%2 = glu swiglu %1 %0
%3 = matmul ffn_down_exps.weight %2
%4 = mul %3 w
return %4
"""

# Q4_K, as most of the models that are served: 144 bytes of 256 weights, of which the first 4 are two float16 scales.
_BLOCK_BYTES, _BLOCK_WEIGHTS = 144, 256
_N_EMBD, _N_FF = 2048, 1024
_EXPERT_BYTES = 3 * _N_EMBD * _N_FF // _BLOCK_WEIGHTS * _BLOCK_BYTES
# More than the caches of most CPUs and GPUs hold, so that it is the memory that is measured; where less than 16 times
# as much memory is free, less of it.
_LAYER_BYTES_MAX = 128 << 20
_MEMORY_SHARE = 1 / 16
_MEASURE_S = 0.3


class DeviceSpeed:
    """What an expert server knows of its device's speed. `bytes_per_s`: of expert weights; 0: not measured."""

    def __init__(self, kernels: ModuleType, device: str, threads: int, compute: ComputeQueue) -> None:
        self._kernels = kernels
        self._device = device
        self._threads = threads
        self._compute = compute
        self.bytes_per_s = 0.0

    async def measure(self) -> None:
        """Sets ``bytes_per_s``, if it can be measured; about half a second, in which calls wait as for another call."""
        try:
            work = partial(expert_bytes_per_s, self._kernels, self._device, self._threads)
            self.bytes_per_s = await self._compute.run(work)
        except Exception as error:  # whatever a device cannot do: slices are tested by themselves
            log.warning("the speed of %s could not be measured: %s: %s", self._device, type(error).__name__, error)


def expert_bytes_per_s(kernels: ModuleType, device: str, threads: int) -> float:
    """Bytes of expert weights that a device reads in a second, computing one row with each expert of a layer once.

    Takes about half a second and blocks for as long; uses up to 128 MiB of the device's memory meanwhile. Raises what
    the kernels raise, OSError without a folder for temporary files, ValueError when the device has too little memory.
    """
    free_bytes = next(d.memory_free_bytes for d in kernels.devices() if d.name == kernels.choose_device(device))
    n_expert = int(min(_LAYER_BYTES_MAX, free_bytes * _MEMORY_SHARE)) // _EXPERT_BYTES
    if n_expert < 2:
        raise ValueError(f"{free_bytes >> 20} MiB of memory are free on {device}")
    program = kernels.Program(SWIGLU_PROGRAM)
    matrix = _random_matrix()
    with tempfile.NamedTemporaryFile(prefix="swarm-node-speed-") as file:
        file.write(matrix)
        file.flush()
        # Each expert has a place of its own in memory, if all from the same bytes of the file.
        places = [(file.name, 0, len(matrix))] * n_expert
        tensors = {
            "ffn_up_exps.weight": kernels.TensorParts("q4_K", [_N_EMBD, _N_FF], places),
            "ffn_gate_exps.weight": kernels.TensorParts("q4_K", [_N_EMBD, _N_FF], places),
            "ffn_down_exps.weight": kernels.TensorParts("q4_K", [_N_FF, _N_EMBD], places),
        }
        store = kernels.ExpertStore(device, threads)
        loaded = store.load(0, program, 0, n_expert - 1, n_expert, tensors)
    h = np.sin(np.arange(_N_EMBD, dtype=np.float32)).reshape(1, _N_EMBD)

    def compute(n: int) -> None:
        row, expert = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
        store.ffn(program.digest, 0, h, row, expert, np.ones(n, np.float32), 1, "sum")

    # A GPU compiles its kernels for the first call.
    compute(2)
    return int(loaded.bytes) / shortest_s(partial(compute, n_expert), _MEASURE_S)


def shortest_s(work: Callable[[], object], within_s: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """How long the quickest of several repeats of ``work`` takes, above 0: the others were disturbed by something.

    Repeats until ``within_s`` has passed, at least twice.
    """
    started_s = before_s = clock()
    durations_s: list[float] = []
    while len(durations_s) < 2 or before_s - started_s < within_s:
        work()
        now_s = clock()
        durations_s.append(now_s - before_s)
        before_s = now_s
    return max(min(durations_s), 1e-9)


def _random_matrix() -> bytes:
    """One expert's matrix: random bits, with scales that give an output of about the input's size."""
    blocks = np.random.default_rng(1).integers(0, 256, (_N_EMBD * _N_FF // _BLOCK_WEIGHTS, _BLOCK_BYTES), np.uint8)
    blocks[:, :4] = np.array([2.0**-12, 2.0**-12], np.float16).view(np.uint8)
    return blocks.tobytes()
