"""The expert server's native side, with real kernels: what it answers itself and what it hands on are one server's."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgpack
import numpy as np
import pytest
import pytest_asyncio

import kernels
from node.expert_server import wire
from node.expert_server.process import ExpertProcess, SliceOrder
from node.slices import Slice
from rigs import calls
from rigs.fake_server import HEADERS, get, read, until, url
from rigs.layers import Layer
from rigs.program_texts import SWIGLU, program
from rigs.random_models import random_layer

N_EXPERT, N_USED, N_EMBD, N_FF = 8, 4, 64, 96
MODEL = "demo"
PAIR = program("matmul ffn_up_exps.weight h", "matmul ffn_down_exps.weight %0", "%1", input="pair")
MIB = 1024 * 1024


def order(layer: Layer, number: int, first: int, last: int) -> SliceOrder:
    """A slice of a layer of tests/rigs/layers.py, for an expert server process."""
    tensors = {}
    for name, (type, ne, data) in layer.tensors.items():
        if name in kernels.Program(layer.program).tensors:
            one = len(data) // layer.n_expert
            offset = layer.offsets[name] + first * one
            part = {"path": str(layer.path), "offset": offset, "bytes": (last - first + 1) * one}
            tensors[name] = {"type": type, "ne": list(ne), "parts": [part]}
    return SliceOrder(Slice(number, first, last), tensors)


async def load(process: ExpertProcess, layer: Layer, number: int, first: int, last: int) -> None:
    programs = {number: layer.program}
    wanted = [order(layer, number, first, last)]
    (answer,) = await process.load(MODEL, programs, {number: N_EXPERT}, {number: N_USED}, wanted)
    assert answer.reason is None, answer.reason


def call(
    experts: list[list[int]],
    *,
    layer: int = 0,
    text: str = SWIGLU,
    reduce: str = "rows",
    dtype: str = "f32",
    term: int = 1,
    n_in: int = N_EMBD,
    deadline_ms: int = 10_000,
    model: str = MODEL,
    call_id: int = 1,
) -> wire.CallRequest:
    parsed = kernels.Program(text)
    row = np.repeat(np.arange(len(experts), dtype=np.int32), [len(of_row) for of_row in experts])
    expert = np.array([one for of_row in experts for one in of_row], dtype=np.int32)
    generator = np.random.default_rng(len(expert))
    n_h = len(expert) if parsed.input == "pair" else len(experts)
    h = generator.standard_normal((n_h, n_in), dtype=np.float32)
    weight = generator.random(len(expert), dtype=np.float32) if parsed.uses_weight else None
    digest = parsed.digest
    return wire.CallRequest(
        call_id, model, digest, term, layer, reduce, len(experts), dtype, h, row, expert, weight, deadline_ms
    )


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layer]:
    folder = tmp_path_factory.mktemp("layers")
    tensors = random_layer("f32", N_EXPERT, N_EMBD, N_FF)
    wide = random_layer("q8_0", N_EXPERT, 2048, 64)
    return {
        "row": Layer(SWIGLU, tensors, N_EXPERT, folder / "row"),
        "pair": Layer(PAIR, tensors, N_EXPERT, folder / "pair"),
        "wide": Layer(SWIGLU, wide, N_EXPERT, folder / "wide"),
    }


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as opened:
        yield opened


@contextlib.asynccontextmanager
async def server(environment: dict[str, str] | None = None, max_rows: int = 16) -> AsyncIterator[ExpertProcess]:
    process = ExpertProcess("alpha", device="CPU", threads=1, max_rows=max_rows, environment=environment)
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


@pytest_asyncio.fixture
async def process(layers: dict[str, Layer]) -> AsyncIterator[ExpertProcess]:
    async with server() as running:
        await load(running, layers["row"], 0, 2, 4)
        await load(running, layers["pair"], 1, 0, 7)
        yield running


async def native_calls(session: aiohttp.ClientSession, process: ExpertProcess) -> int:
    """How many calls were answered without the event loop."""
    return int((await get(session, process, "/v1/stats"))[1]["native_calls"])


async def by_post(session: aiohttp.ClientSession, process: ExpertProcess, body: bytes) -> bytes:
    async with session.post(url(process), data=body, headers=HEADERS) as response:
        return await response.read()


async def by_socket(opened: aiohttp.ClientWebSocketResponse, body: bytes) -> bytes:
    await opened.send_bytes(body)
    return await opened.receive_bytes(timeout=10)


async def settled(session: aiohttp.ClientSession, process: ExpertProcess, answer: bytes) -> bytes:
    """The answer; after one that may have been of a result that was not finite, once the slices have proved
    themselves again."""
    if msgpack.unpackb(answer).get("error", {}).get("kind") == "failed":

        async def is_ready() -> bool:
            return (await get(session, process, "/ready"))[0] == 200

        await until(is_ready)
    return answer


def without_times(body: bytes) -> dict[str, object]:
    fields = msgpack.unpackb(body)
    return {name: value for name, value in fields.items() if name not in ("compute_us", "queue_us")}


@pytest.mark.parametrize("reduce", ["rows", "sum"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
async def test_good_calls_get_the_same_bytes_both_ways(
    session: aiohttp.ClientSession, process: ExpertProcess, layers: dict[str, Layer], dtype: str, reduce: str
) -> None:
    requests = [
        call([[2, 4, 3], [], [3]], reduce=reduce, dtype=dtype, call_id=2**64 - 1),
        call([[3]], reduce=reduce, dtype=dtype, call_id=0),
        call([[2, 3, 4]] * 16, reduce=reduce, dtype=dtype),
        call([[7, 0, 3], [1]], layer=1, text=PAIR, reduce=reduce, dtype=dtype),
    ]
    async with session.ws_connect(url(process)) as opened:
        for request in requests:
            body = wire.encode_request(request)
            posted = await by_post(session, process, body)
            before = await native_calls(session, process)
            answered = await by_socket(opened, body)
            assert await native_calls(session, process) == before + 1
            assert without_times(answered) == without_times(posted)
            assert "y" in msgpack.unpackb(answered)
    if dtype == "f32":
        answer = read(requests[0], await by_post(session, process, wire.encode_request(requests[0])), N_EMBD)
        assert isinstance(answer, wire.CallReply)
        one = requests[0]
        held = layers["row"].held((2, 4))
        y = held.ffn(one.program, 0, one.h, one.row, one.expert, one.weight, one.n_rows, reduce)
        assert answer.y.tobytes() == y.tobytes()


REFUSED = {
    "an expert beyond the layer": call([[2, 8]]),
    "a negative expert": call([[-1, 2, 8, 3]]),
    "twice": call([[3, 3, 4, 4]]),
    "not held": call([[2, 1, 5]]),
    "another layer": call([[2]], layer=3),
    "a layer beyond any": replace(call([[2]]), layer=2**31 - 1),
    "another model": call([[2]], model="other"),
    "another program": replace(call([[2]]), program=5),
    "too many rows": call([[2]] * 17),
    "no rows": replace(call([[2]]), n_rows=0),
    "too narrow": call([[2]], n_in=N_EMBD - 1),
    "too late": call([[2]], deadline_ms=0),
    "no pairs": call([[]]),
    "too many pairs": replace(call([[2, 3, 4]]), row=np.zeros(5, np.int32), expert=np.arange(5, dtype=np.int32)),
    "descending rows": replace(call([[2], [3]]), row=np.array([1, 0], np.int32)),
    "a row beyond": replace(call([[2], [3]]), row=np.array([0, 2], np.int32)),
    "a weight too few": replace(call([[2, 3]]), weight=np.ones(1, np.float32)),
    "no weight": replace(call([[2, 3]]), weight=None),
    "a weight nobody uses": replace(call([[2]], layer=1, text=PAIR), weight=np.ones(1, np.float32)),
    "h not finite": replace(call([[2]]), h=np.full((1, N_EMBD), np.nan, np.float32)),
    "weight not finite": replace(call([[2]]), weight=np.array([np.inf], np.float32)),
    "does not fit": replace(call([[2]], dtype="f16"), weight=np.array([1e9], np.float32)),
    "overflows": replace(call([[2]]), h=np.full((1, N_EMBD), 3e38, np.float32)),
    "the sum overflows": replace(call([[2, 3]], reduce="sum"), weight=np.array([3e38, 3e38], np.float32)),
    "an older term": call([[2]], term=0),
}


async def test_refusals_are_the_same_both_ways(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    good = wire.encode_request(call([[2, 3]]))
    async with session.ws_connect(url(process)) as opened:
        await by_socket(opened, good)  # also makes the term known
        for name, request in REFUSED.items():
            body = wire.encode_request(request)
            refused = [
                await settled(session, process, await by_post(session, process, body)),
                await settled(session, process, await by_socket(opened, body)),
            ]
            errors = [wire.decode_error(one) for one in refused]
            assert errors[0] == errors[1], name
            assert errors[0].id == 1 and errors[0].layer == request.layer, name
        for name, body in calls.MALFORMED.items():
            if len(body) > 2000:
                continue  # above this server's limit
            assert await by_socket(opened, body) == await by_post(session, process, body), name
        assert "y" in msgpack.unpackb(await by_socket(opened, good)), "the connection lives"


async def test_mutated_calls_get_the_same_answers_both_ways(
    session: aiohttp.ClientSession, process: ExpertProcess
) -> None:
    generator = random.Random(4)
    # The highest term there is: a mutant with a higher one would have all later ones refused as stale.
    seeds = [
        wire.encode_request(call([[2, 3], [4]], reduce=reduce, dtype=dtype, term=2**64 - 1))
        for reduce in ("rows", "sum")
        for dtype in ("f32", "bf16")
    ]
    n_right = n_native = 0
    async with session.ws_connect(url(process)) as opened:
        await by_socket(opened, seeds[0])
        for _ in range(600):
            body = calls.mutated(generator.choice(seeds), generator)
            posted = without_times(await settled(session, process, await by_post(session, process, body)))
            answered = without_times(await settled(session, process, await by_socket(opened, body)))
            # A call can be too late only by chance of its mutated deadline, and then says how late.
            if "error" not in posted or posted["error"]["kind"] != "too_late":  # type: ignore[index]
                assert answered == posted
            n_right += "y" in answered
        n_native = await native_calls(session, process)
    assert n_right > 20 and n_native > 10


async def test_terms_are_one_for_both_ways(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    def kind(body: bytes) -> str:
        fields = msgpack.unpackb(body)
        return str(fields["error"]["kind"]) if "error" in fields else "answered"

    async with session.ws_connect(url(process)) as opened:
        for term, expected in ((5, "answered"), (5, "answered"), (4, "stale_term"), (6, "answered"), (5, "stale_term")):
            assert kind(await by_socket(opened, wire.encode_request(call([[2]], term=term)))) == expected
        assert kind(await by_post(session, process, wire.encode_request(call([[2]], term=5)))) == "stale_term"
        assert kind(await by_post(session, process, wire.encode_request(call([[2]], term=8)))) == "answered"
        assert kind(await by_socket(opened, wire.encode_request(call([[2]], term=7)))) == "stale_term"
        # A malformed call with a high term must not lock the router out.
        bad = replace(call([[2]], term=2**64 - 1), h=np.full((1, N_EMBD), np.nan, np.float32))
        assert kind(await by_socket(opened, wire.encode_request(bad))) == "bad_request"
        assert kind(await by_socket(opened, wire.encode_request(call([[2]], term=8)))) == "answered"
    assert (await get(session, process, "/v1/stats"))[1]["terms"] == {MODEL: 8}


async def test_slices_that_go_and_come(
    session: aiohttp.ClientSession, process: ExpertProcess, layers: dict[str, Layer]
) -> None:
    body = wire.encode_request(call([[2, 3]]))
    async with session.ws_connect(url(process)) as opened:
        first = without_times(await by_socket(opened, body))
        assert "y" in first
        await process.drop(MODEL, Slice(0, 2, 4))
        assert msgpack.unpackb(await by_socket(opened, body))["error"]["kind"] == "not_held"
        await load(process, layers["row"], 0, 0, 2)
        error = wire.decode_error(await by_socket(opened, body))
        assert (error.kind, error.experts) == ("not_held", (3,))
        await load(process, layers["row"], 0, 3, 7)
        assert without_times(await by_socket(opened, body)) == first


async def test_the_counters_count_both_ways(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    body = wire.encode_request(call([[2, 3, 4]]))
    async with session.ws_connect(url(process)) as opened:
        for _ in range(3):
            await by_socket(opened, body)
        await by_post(session, process, body)
        stats = (await get(session, process, "/v1/stats"))[1]
    assert (stats["calls"], stats["pairs"], stats["bytes_received"]) == (4, 12, 4 * len(body))
    assert stats["native_calls"] == 2 and stats["connections"] == 2 and stats["compute_us"] > 0


async def test_text_ping_and_close(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    async with session.ws_connect(url(process), autoping=False) as opened:
        await opened.send_str("text")
        error = wire.decode_error(await opened.receive_bytes())
        assert error.kind == "bad_request" and "binary" in error.message
        await opened.ping(b"still there?")
        message = await opened.receive(timeout=5)
        assert (message.type, bytes(message.data)) == (aiohttp.WSMsgType.PONG, b"still there?")
        await opened.close()
        assert opened.close_code == 1000
    await until(lambda: _connections(session, process, 1))


async def _connections(session: aiohttp.ClientSession, process: ExpertProcess, wanted: int) -> bool:
    return bool((await get(session, process, "/v1/stats"))[1]["connections"] == wanted)


async def test_frames_that_break_the_rules_end_the_connection(
    session: aiohttp.ClientSession, process: ExpertProcess
) -> None:
    limit = (await get(session, process, "/v1/stats"))[1]["body_limit_bytes"]
    cases = {
        struct.pack(">BBQ", 0x82, 0xFF, limit + 1) + bytes(4): 1009,
        b"\x82\x01x": 1002,
        b"\xc2\x80" + bytes(4): 1002,
        b"\x80\x80" + bytes(4): 1002,
        b"\x83\x80" + bytes(4): 1002,
    }
    for frame, code in cases.items():
        async with session.ws_connect(url(process)) as opened:
            opened._writer.transport.write(frame)  # type: ignore[attr-defined]
            message = await opened.receive(timeout=5)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, code), frame
    await until(lambda: _connections(session, process, 1))


async def test_large_messages_come_and_go_whole(session: aiohttp.ClientSession, layers: dict[str, Layer]) -> None:
    async with server(max_rows=256) as process:
        assert process.pid is not None
        await load(process, layers["wide"], 0, 0, 7)
        request = call([[1, 2, 5, 7]] * 256, n_in=2048)
        body = wire.encode_request(request)
        limit = wire.body_limit_bytes(256, 2048, N_USED, False)
        padded = bytearray(body)
        padded[0] += 1
        padding = limit - len(body)
        padded += b"\xa1z\xc5" + struct.pack(">H", padding - 5) + bytes(padding - 5)
        assert 2 * MIB < len(body) < len(padded) == limit
        posted = without_times(await by_post(session, process, body))
        assert len(posted["y"]) == 4 * 1024 * 2048  # type: ignore[arg-type]
        async with session.ws_connect(url(process), max_msg_size=0) as opened:
            assert without_times(await by_socket(opened, body)) == posted
            assert without_times(await by_socket(opened, bytes(padded))) == posted
            # In fragments, as any proxy may cut it.
            writer = opened._writer.transport  # type: ignore[attr-defined]
            parts = [body[at : at + 70_000] for at in range(0, len(body), 70_000)]
            for number, part in enumerate(parts):
                first = (0x02 if number == 0 else 0) | (0x80 if number == len(parts) - 1 else 0)
                writer.write(struct.pack(">BBQ", first, 0xFF, len(part)) + bytes(4) + part)
            assert without_times(await opened.receive_bytes(timeout=10)) == posted


async def test_a_websocket_is_renewed_when_the_limit_grows(
    session: aiohttp.ClientSession, layers: dict[str, Layer]
) -> None:
    async with server() as process:
        await load(process, layers["row"], 0, 2, 4)
        async with session.ws_connect(url(process)) as opened:
            await by_socket(opened, wire.encode_request(call([[2]])))
            await load(process, layers["wide"], 1, 0, 7)
            message = await opened.receive(timeout=5)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1012)
        async with session.ws_connect(url(process)) as opened:
            body = wire.encode_request(call([[2]] * 16, layer=1, n_in=2048))
            assert "y" in msgpack.unpackb(await by_socket(opened, body))


async def test_at_most_64_connections(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    body = wire.encode_request(call([[2]]))
    async with (
        contextlib.AsyncExitStack() as stack,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many,
    ):
        opened = [await stack.enter_async_context(many.ws_connect(url(process))) for _ in range(wire.MAX_CONNECTIONS)]
        for one in opened:
            assert "y" in msgpack.unpackb(await by_socket(one, body))
        with pytest.raises(aiohttp.ClientError):
            await many.ws_connect(url(process))
        await asyncio.gather(*(one.close() for one in opened))
    await until(lambda: _connections(session, process, 1))


async def test_calls_beyond_the_waiting_ones_and_late_ones_are_refused(layers: dict[str, Layer]) -> None:
    async with (
        server({"SWARM_DEBUG_SLEEP_S": "0.3"}) as process,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        contextlib.AsyncExitStack() as stack,
    ):
        await load(process, layers["row"], 0, 2, 4)
        opened = [await stack.enter_async_context(session.ws_connect(url(process))) for _ in range(20)]
        await by_socket(opened[0], wire.encode_request(call([[2]])))
        # One computes, 16 wait, three are too many; those that wait more than a second are not started.
        body = wire.encode_request(call([[2]], deadline_ms=1000))
        answers = [msgpack.unpackb(one) for one in await asyncio.gather(*(by_socket(one, body) for one in opened))]
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert {error["kind"] for error in errors} == {"too_late"} and all(error["retry"] for error in errors)
        assert 1 <= len(answers) - len(errors) <= 4
        assert any("waiting already" in error["message"] for error in errors)
        assert any("deadline passed" in error["message"] for error in errors)


async def test_it_ends_in_mid_call_and_answers_health_before(
    session: aiohttp.ClientSession, layers: dict[str, Layer]
) -> None:
    async with server({"SWARM_DEBUG_SLEEP_S": "60"}) as process:
        await load(process, layers["row"], 0, 2, 4)
        async with contextlib.AsyncExitStack() as stack:
            # The first of three is answered by way of the event loop, where the delay does not hold the device.
            for _ in range(3):
                opened = await stack.enter_async_context(session.ws_connect(url(process)))
                await opened.send_bytes(wire.encode_request(call([[2]])))

            async def one_waits() -> bool:
                return bool((await get(session, process, "/v1/stats"))[1]["waiting"])

            await until(one_waits)
            assert (await get(session, process, "/health"))[0] == 200
            await process.stop()
            assert await process.wait() == 0, "it ended by itself, and was not killed"


async def test_a_caller_that_vanishes_leaves_nothing(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    assert process.pid is not None
    folder = Path(f"/proc/{process.pid}/fd")

    def n_descriptors() -> int:
        return sum(1 for _ in folder.iterdir())

    await get(session, process, "/health")
    before = n_descriptors()
    upgrade = (
        b"GET /v1/ffn HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    for rest in (b"", b"\x82", struct.pack(">BBH", 0x82, 0xFE, 500) + bytes(100)):
        with socket.create_connection(("127.0.0.1", process.port)) as connection:
            connection.sendall(upgrade)
            assert (await asyncio.to_thread(connection.recv, 4096)).startswith(b"HTTP/1.1 101")
            connection.sendall(rest)
    await until(lambda: _connections(session, process, 1))
    await until(lambda: n_descriptors() <= before)
