"""Expert servers of several builds, each with the same layer, and the same calls to each through its port."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

import kernels
from node.errors import SwarmError
from node.expert_server import wire
from node.expert_server.process import ExpertProcess, SliceOrder
from node.expert_server.speed import SWIGLU_PROGRAM
from node.models.index import ModelIndex
from node.slices import Slice

LAYER = 0
# An emulated processor takes minutes for what this machine's computes in a second.
WITHIN_S = 3600
# A body that a server takes without knowing the layer; larger calls are sent in parts.
MAX_ROWS = 512
# Mesa's software driver takes no tensor above 128 MiB, which are 53 experts of the large layer.
SLICE_EXPERTS = 32


@dataclass(frozen=True)
class Backend:
    """A build, by the Python that loads it, and a device of it."""

    name: str
    python: Path
    device: str

    @staticmethod
    def parse(text: str) -> Backend:
        """From NAME=PYTHON@DEVICE. Raises ValueError."""
        name, equals, rest = text.partition("=")
        python, at, device = rest.rpartition("@")
        if not (name and equals and python and at and device):
            raise ValueError(f"{text!r} is not NAME=PYTHON@DEVICE")
        return Backend(name, Path(python), device)


@dataclass(frozen=True)
class Inputs:
    """`h` [n_rows, n_in]; `expert`, `weight` [n_rows, n_used]."""

    h: NDArray[np.float32]
    expert: NDArray[np.int32]
    weight: NDArray[np.float32]

    @property
    def row(self) -> NDArray[np.int32]:
        """The row of each pair, [n_rows * n_used]."""
        n_rows, n_used = self.expert.shape
        return np.repeat(np.arange(n_rows, dtype=np.int32), n_used)


def make_inputs(index: ModelIndex, n_rows: int, seed: int = 1) -> Inputs:
    """Rows of normally distributed values; every expert gets about the same number of
    them, in an order that is random."""
    generator = np.random.default_rng(seed)
    n_in = index.expert_tensors(LAYER)["ffn_gate_exps.weight"].ne[0]
    n_used = index.n_expert_used
    turns = math.ceil(n_rows * n_used / index.n_expert)
    # Each row takes from one permutation, so that no expert is twice in a row.
    rows_of_turn = index.n_expert // n_used
    expert = np.concatenate(
        [generator.permutation(index.n_expert)[: rows_of_turn * n_used].reshape(-1, n_used) for _ in range(turns + 1)]
    )[:n_rows]
    weight = generator.dirichlet(np.ones(n_used), n_rows)
    h = generator.standard_normal((n_rows, n_in), np.float32)
    return Inputs(h, expert.astype(np.int32), weight.astype(np.float32))


class Server:
    """The expert server of a build; starts when it is first used, and again when it crashed."""

    def __init__(self, backend: Backend, threads: int, log: Path) -> None:
        self._process = ExpertProcess(
            backend.name,
            device=backend.device,
            threads=threads,
            max_rows=MAX_ROWS,
            # The comparison is the proof here; and an emulated processor takes very long for what admission computes.
            command=(str(backend.python), "-P", "-m", "node.expert_server", "--unproved"),
            stderr=log,
            start_within_s=WITHIN_S,
        )

    @asynccontextmanager
    async def holding(self, index: ModelIndex) -> AsyncIterator[Connection]:
        """Calls to the server while it holds the model's layer. Raises SwarmError."""
        process = self._process
        if not process.running:
            await process.start()
        orders = []
        for first in range(0, index.n_expert, SLICE_EXPERTS):
            last = min(first + SLICE_EXPERTS, index.n_expert) - 1
            tensors = {name: part.to_json() for name, part in index.slice_parts(LAYER, first, last).items()}
            orders.append(SliceOrder(Slice(LAYER, first, last), tensors))
        answers = await process.load(
            index.model_id, {LAYER: SWIGLU_PROGRAM}, {LAYER: index.n_expert}, {LAYER: index.n_expert_used}, orders
        )
        for answer in answers:
            if answer.reason is not None:
                raise SwarmError(f"the layer cannot be loaded: {answer.reason}", node=process.name)
            if answer.note:
                # A node goes on with its CPU, whose results would stand here under another name.
                raise SwarmError(f"the layer is {answer.note}", node=process.name)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WITHIN_S)) as session:
            yield Connection(process, index, session)
        for order in orders:
            await process.drop(index.model_id, order.slice)

    async def stop(self) -> None:
        await self._process.stop()


class Connection:
    """Calls to one server."""

    def __init__(self, process: ExpertProcess, index: ModelIndex, session: aiohttp.ClientSession) -> None:
        self._process = process
        self._index = index
        self._session = session
        self._n_out = index.expert_tensors(LAYER)["ffn_down_exps.weight"].ne[1]
        self._digest = kernels.Program(SWIGLU_PROGRAM).digest

    async def call(self, inputs: Inputs, reduce: str = "rows") -> tuple[NDArray[np.float32], float]:
        """Results [n_pairs, n_out], or [n_rows, n_out] for `reduce` "sum", and the seconds that the server computed.
        Raises SwarmError."""
        request = wire.CallRequest(
            id=1,
            model=self._index.model_id,
            program=self._digest,
            term=1,
            layer=LAYER,
            reduce=reduce,
            n_rows=len(inputs.h),
            dtype="f32",
            h=inputs.h,
            row=inputs.row,
            expert=inputs.expert.reshape(-1),
            weight=inputs.weight.reshape(-1),
            deadline_ms=WITHIN_S * 1000,
        )
        url = f"http://127.0.0.1:{self._process.port}/v1/ffn"
        headers = {"Content-Type": wire.CONTENT_TYPE}
        async with self._session.post(url, data=wire.encode_request(request), headers=headers) as response:
            body = await response.read()
        n_rows = len(request.row) if reduce == "rows" else request.n_rows
        reply = wire.decode_reply(body, call_id=1, n_rows=n_rows, n_out=self._n_out, dtype="f32")
        if isinstance(reply, wire.CallError):
            raise reply.to_exception(self._process.name)
        # A view of the reply's bytes, which may be in another order.
        return np.array(reply.y, np.float32), reply.compute_us / 1e6


def numpy_rows(index: ModelIndex, inputs: Inputs) -> NDArray[np.float64]:
    """What NumPy computes in float64 from the same file, [n_pairs, n_out]; one expert is in memory at a time."""
    row, expert, weight = inputs.row, inputs.expert.reshape(-1), inputs.weight.reshape(-1)
    by_expert = {}
    for one in np.unique(expert).tolist():
        sources = {
            name: kernels.TensorSource(tensor.type, tensor.ne, [(p.path, p.offset, p.bytes) for p in tensor.parts])
            for name, tensor in index.slice_parts(LAYER, one, one).items()
        }
        mine = expert == one
        by_expert[one] = kernels.expert_rows(SWIGLU_PROGRAM, sources, 0, 1, inputs.h[row[mine]], weight[mine])
    result = np.empty((len(expert), next(iter(by_expert.values())).shape[1]))
    for one, rows in by_expert.items():
        result[expert == one] = rows
    return result
