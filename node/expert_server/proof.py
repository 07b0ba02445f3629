"""A slice's proof: what its device answers for every expert, beside what admission.py says that it should."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

from kernels.cpu_quota import default_threads
from node.errors import SwarmError
from node.expert_server.admission import STEP_EXPERTS, Golden, GoldenCall, Unfit
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.held_layers import HeldSlice, Layer
from node.number_formats import Floats

# Threads that compute what is expected of a slice. One expert of a large model takes 50 MB meanwhile.
_REFERENCE_THREADS_MAX = 4


class SliceUnfit(SwarmError):
    """A slice whose answers are not what they should be on this device."""

    def __init__(self, message: str, unfit: Unfit | None = None) -> None:
        super().__init__(message)
        self.unfit = unfit


class Prover:
    """Has slices prove themselves, on the loop's thread. Not `enabled`, all pass: to measure what is wrong."""

    def __init__(self, kernels: ModuleType, compute: ComputeQueue, threads: int, *, enabled: bool = True) -> None:
        self._kernels = kernels
        self._compute = compute
        self._enabled = enabled
        n_threads = min(_REFERENCE_THREADS_MAX, threads or default_threads())
        self._reference = ThreadPoolExecutor(n_threads, thread_name_prefix="reference")
        self._device_types = {device.name: str(device.type) for device in kernels.devices()}

    async def prove(self, layer: Layer, wanted: HeldSlice, device: str, store: Any, n_in: int, n_out: int) -> None:
        """Compares what every expert of a slice answers with what it should. Raises SliceUnfit, or SwarmError for bytes
        that are not the model's."""
        if not self._enabled:
            return
        loop = asyncio.get_running_loop()
        device_type = self._device_types.get(device, "other")
        golden = Golden(self._kernels, layer.program, wanted.tensors, n_in, device_type)
        first, last = wanted.slice.first, wanted.slice.last
        if wanted.sha256 and len(wanted.sha256) != wanted.slice.n_experts:
            raise SwarmError(f"{len(wanted.sha256)} digests for {wanted.slice.n_experts} experts")
        for start in range(first, last + 1, STEP_EXPERTS):
            experts = range(start, min(start + STEP_EXPERTS, last + 1))
            expected = await asyncio.gather(
                *(loop.run_in_executor(self._reference, _expected, golden, wanted, expert) for expert in experts)
            )
            *one_row, many = golden.calls(experts)
            answered: list[tuple[GoldenCall, Floats]] = []
            for calls in (one_row, [many]):
                answered += await self._compute.run(
                    partial(_answers, self._kernels, store, layer.program.digest, layer.number, calls, n_out)
                )
            unfit = golden.judge(experts, expected, answered)
            if unfit is not None:
                raise SliceUnfit(f"its answers are wrong on {device}: {unfit}", unfit)


def _expected(golden: Golden, wanted: HeldSlice, expert: int) -> Any:
    """What an expert should answer, from the model's bytes. Raises SwarmError for others, OSError, ValueError."""
    first, last = wanted.slice.first, wanted.slice.last
    if wanted.sha256 and golden.sha256(first, last, expert) != wanted.sha256[expert - first]:
        raise SwarmError(
            f"the bytes of expert {expert} are not those of model {wanted.model} any more: the file, the disk or the "
            "memory is damaged. Copy the model file again, and test the memory if that does not help"
        )
    return golden.expected(first, last, expert)


def _answers(
    kernels: ModuleType, store: Any, digest: int, layer: int, calls: Sequence[GoldenCall], n_out: int
) -> list[tuple[GoldenCall, Floats]]:
    """Runs in the worker thread. Raises SliceUnfit when the device fails, or gives something of another shape."""
    answered = []
    for call in calls:
        try:
            y: Floats = store.ffn(digest, layer, call.h, call.row, call.expert, call.weight, call.n_rows, "rows")
        except kernels.ComputeError as error:
            raise SliceUnfit(f"it cannot prove itself: {error}") from error
        if y.shape != (len(call.row), n_out):
            raise SliceUnfit(f"its result has shape {y.shape}, expected {(len(call.row), n_out)}")
        answered.append((call, y))
    return answered
