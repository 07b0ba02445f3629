"""An expert server process with made-up weights, and calls to it: for tests of the server and of its parent."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from node.expert_server import wire
from node.expert_server.process import ExpertProcess, SliceAnswer, SliceOrder
from node.slices import Slice
from rigs import fake_kernels

COMMAND = (sys.executable, str(Path(__file__).parent / "run_fake_server.py"))
MODEL = "demo"
PROGRAM = "swarm-program 1\ninput row\n%0 = matmul w.weight h\n%1 = mul %0 w\nreturn %1\n"
PAIR_PROGRAM = "swarm-program 1\ninput pair\n%0 = matmul w.weight h\nreturn %0\n"
N_EXPERT, N_USED, N_IN, N_OUT = 8, 4, 16, 12
HEADERS = {"Content-Type": wire.CONTENT_TYPE}


def digest(program: str = PROGRAM) -> int:
    return int(fake_kernels.Program(program).digest)


def order(
    layer: int = 0, first: int = 2, last: int = 4, kind: str = "f32", n_in: int = N_IN, n_out: int = N_OUT
) -> SliceOrder:
    # The offset tells the fake reference which weights are meant.
    part = {"path": "model.gguf", "offset": 1000 * layer + first, "bytes": 64}
    tensor = {"type": kind, "ne": [n_in, n_out], "parts": [part]}
    return SliceOrder(Slice(layer, first, last), {"w.weight": tensor})


async def load(
    process: ExpertProcess, *orders: SliceOrder, program: str = PROGRAM, model: str = MODEL, n_used: int = N_USED
) -> list[SliceAnswer]:
    layers = {one.slice.layer for one in orders}
    programs = dict.fromkeys(layers, program)
    return await process.load(model, programs, dict.fromkeys(layers, N_EXPERT), dict.fromkeys(layers, n_used), orders)


@asynccontextmanager
async def server(
    *orders: SliceOrder, environment: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[ExpertProcess]:
    """A running server that holds the slices of `orders`; ended afterwards."""
    process = ExpertProcess("alpha", command=COMMAND, environment=environment, **options)
    await process.start()
    try:
        if orders:
            answers = await load(process, *orders)
            assert [answer.reason for answer in answers] == [None] * len(orders)
        yield process
    finally:
        await process.stop()


def call(
    experts: Sequence[Sequence[int]] = ((2, 3),),
    *,
    layer: int = 0,
    reduce: str = "rows",
    term: int = 1,
    n_in: int = N_IN,
    dtype: str = "f32",
    deadline_ms: int = 10_000,
    model: str = MODEL,
    call_id: int = 1,
    program: int | None = None,
) -> wire.CallRequest:
    """A call with one row for each entry of `experts`."""
    row = np.repeat(np.arange(len(experts), dtype=np.int32), [len(of_row) for of_row in experts])
    expert = np.array([one for of_row in experts for one in of_row], dtype=np.int32)
    generator = np.random.default_rng(len(expert))
    h = generator.standard_normal((len(experts), n_in), dtype=np.float32)
    weight = generator.random(len(expert), dtype=np.float32)
    program = digest() if program is None else program
    return wire.CallRequest(
        call_id, model, program, term, layer, reduce, len(experts), dtype, h, row, expert, weight, deadline_ms
    )


def expected(request: wire.CallRequest) -> np.ndarray:
    assert request.weight is not None
    pairs = [
        weight * (fake_kernels.expert_matrix(request.layer, int(expert), N_IN, N_OUT) @ request.h[row])
        for row, expert, weight in zip(request.row, request.expert, request.weight, strict=True)
    ]
    if request.reduce == "rows":
        return np.array(pairs)
    total = np.zeros((request.n_rows, N_OUT), dtype=np.float32)
    np.add.at(total, request.row, np.array(pairs))
    return total


def read(request: wire.CallRequest, body: bytes, n_out: int = N_OUT) -> wire.CallReply | wire.CallError:
    n_rows = len(request.row) if request.reduce == "rows" else request.n_rows
    return wire.decode_reply(body, call_id=request.id, n_rows=n_rows, n_out=n_out, dtype=request.dtype)


def url(process: ExpertProcess, path: str = "/v1/ffn") -> str:
    return f"http://127.0.0.1:{process.port}{path}"


async def post(
    session: aiohttp.ClientSession, process: ExpertProcess, request: wire.CallRequest, n_out: int = N_OUT
) -> wire.CallReply | wire.CallError:
    async with session.post(url(process), data=wire.encode_request(request), headers=HEADERS) as response:
        answer = read(request, await response.read(), n_out)
        status = answer.http_status if isinstance(answer, wire.CallError) else 200
        assert response.status == status
        return answer


async def get(session: aiohttp.ClientSession, process: ExpertProcess, path: str) -> tuple[int, dict[str, Any]]:
    async with session.get(url(process, path)) as response:
        return response.status, await response.json()


async def until(condition: Any, within_s: float = 5.0) -> None:
    """Waits for `condition()` (plain or a coroutine function) to be true. Raises TimeoutError."""

    async def poll() -> None:
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), within_s)


def memory_bytes(pid: int, field: str) -> int:
    """VmRSS or VmHWM of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has reaped yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
