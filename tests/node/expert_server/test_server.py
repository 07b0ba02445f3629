"""The expert server process, over its own port: right answers, refusals, limits, control, and how it ends."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import msgpack
import numpy as np
import pytest
import pytest_asyncio

from node.expert_server import wire
from node.expert_server.process import ExpertProcess
from node.slices import Slice
from rigs import calls
from rigs.fake_server import (
    COMMAND,
    HEADERS,
    MODEL,
    N_IN,
    N_OUT,
    PAIR_PROGRAM,
    PROGRAM,
    call,
    digest,
    expected,
    get,
    load,
    memory_bytes,
    order,
    post,
    read,
    server,
    until,
    url,
)
from rigs.timing import BUSY, quickly

MIB = 1024 * 1024


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as opened:
        yield opened


@pytest_asyncio.fixture
async def process() -> AsyncIterator[ExpertProcess]:
    async with server(order(), order(layer=5, first=7, last=7), max_rows=16) as running:
        yield running


# --- answers


@pytest.mark.parametrize("reduce", ["rows", "sum"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
async def test_post_and_websocket_answer_alike(
    session: aiohttp.ClientSession, process: ExpertProcess, reduce: str, dtype: str
) -> None:
    # The second row has no pair here: its sum is zero.
    request = call([[2, 4, 3], [], [3]], reduce=reduce, dtype=dtype)
    by_post = await post(session, process, request)
    async with session.ws_connect(url(process)) as socket_:
        await socket_.send_bytes(wire.encode_request(request))
        by_socket = read(request, await socket_.receive_bytes())
    for answer in (by_post, by_socket):
        assert isinstance(answer, wire.CallReply)
        tolerance = {"f32": 1e-5, "bf16": 2e-2, "f16": 2e-3}[dtype]
        assert np.abs(answer.y - expected(request)).max() <= tolerance * np.abs(expected(request)).max()
    if reduce == "sum":
        assert not by_post.y[1].any()


async def test_messages_of_a_websocket_are_answered_in_order(
    session: aiohttp.ClientSession, process: ExpertProcess
) -> None:
    requests = [call([[2 + n % 3]] * (n + 1), call_id=n) for n in range(10)]
    async with session.ws_connect(url(process)) as socket_:
        for request in requests:
            await socket_.send_bytes(wire.encode_request(request))
        for request in requests:
            answer = read(request, await socket_.receive_bytes())
            assert isinstance(answer, wire.CallReply)
            assert np.allclose(answer.y, expected(request), atol=1e-5)


async def test_input_per_pair_without_weights(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    await load(process, order(layer=9), program=PAIR_PROGRAM)
    request = call([[2, 4]], layer=9, program=digest(PAIR_PROGRAM))
    h = np.arange(2 * N_IN, dtype=np.float32).reshape(2, N_IN)
    answer = await post(session, process, replace(request, h=h, weight=None))
    assert isinstance(answer, wire.CallReply) and answer.y.shape == (2, N_OUT)


async def test_what_does_not_fit_the_asked_format_is_an_error(
    session: aiohttp.ClientSession, process: ExpertProcess
) -> None:
    request = replace(call([[2]], dtype="f16"), weight=np.array([1e9], dtype=np.float32))
    answer = await post(session, process, request)
    assert isinstance(answer, wire.CallError) and answer.kind == "failed" and "f16" in answer.message


# --- refusals


@pytest.mark.parametrize(
    ("request_", "kind", "experts"),
    [
        (call([[2, 8]]), "bad_request", (8,)),
        (call([[-1, 2, 8, 3]]), "bad_request", (-1, 8)),
        (call([[3, 3, 4, 4]]), "bad_request", ()),
        (call([[2, 1, 5]]), "not_held", (1, 5)),
        (call([[0]]), "not_held", (0,)),
        (call([[2]], layer=1), "not_held", ()),
        (call([[2]], layer=5), "not_held", (2,)),
        (call([[2]], model="other"), "unknown_model", ()),
        (call([[2]], program=5), "program_mismatch", ()),
        (call([[2]] * 17), "bad_request", ()),
        (call([[2]], n_in=N_IN + 1), "bad_request", ()),
        (call([[2]], deadline_ms=0), "too_late", ()),
    ],
)
async def test_refusals_name_their_cause(
    session: aiohttp.ClientSession,
    process: ExpertProcess,
    request_: wire.CallRequest,
    kind: str,
    experts: tuple[int, ...],
) -> None:
    answer = await post(session, process, request_)
    assert isinstance(answer, wire.CallError)
    assert (answer.kind, answer.experts, answer.id, answer.layer) == (kind, experts, 1, request_.layer)
    assert isinstance(await post(session, process, call()), wire.CallReply), "the server lives"


async def test_an_older_term_is_refused(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    assert isinstance(await post(session, process, call(term=5)), wire.CallReply)
    answer = await post(session, process, call(term=4))
    assert isinstance(answer, wire.CallError) and answer.kind == "stale_term" and "5" in answer.message
    assert isinstance(await post(session, process, call(term=5)), wire.CallReply)
    # A malformed call with a high term must not lock the router out.
    bad = replace(call(term=2**64 - 1), h=np.full((1, N_IN), np.nan, dtype=np.float32))
    assert isinstance(await post(session, process, bad), wire.CallError)
    assert isinstance(await post(session, process, call(term=6)), wire.CallReply)


async def test_malformed_messages_cost_a_400_and_nothing_else(
    session: aiohttp.ClientSession, process: ExpertProcess
) -> None:
    assert process.pid is not None
    await post(session, process, call())
    before_bytes = memory_bytes(process.pid, "VmRSS")
    async with session.ws_connect(url(process)) as socket_:
        for name, body in calls.MALFORMED.items():
            if len(body) > 2000:
                continue  # Above this server's limit when it holds narrow layers only; see the test of wide ones.
            with quickly(0.05, name):
                async with session.post(url(process), data=body, headers=HEADERS) as response:
                    error = wire.decode_error(await response.read())
                    assert (response.status, error.kind) in ((400, "bad_request"), (404, "unknown_model")), name
            await socket_.send_bytes(body)
            assert wire.decode_error(await socket_.receive_bytes()) == error, name
        await socket_.send_str("text")
        assert wire.decode_error(await socket_.receive_bytes()).kind == "bad_request"
        await socket_.send_bytes(wire.encode_request(call()))
        assert isinstance(read(call(), await socket_.receive_bytes()), wire.CallReply)
    assert memory_bytes(process.pid, "VmRSS") - before_bytes < 10 * MIB


async def fuzz(process: ExpertProcess, seconds: float, seed: int) -> int:
    """Sends mutated calls for that long over a WebSocket; each must be answered. How many were right."""
    generator = random.Random(seed)
    seeds = [
        # The highest term there is: a mutant with a higher one would have all later ones refused as stale.
        wire.encode_request(call([[2, 3], [4]], reduce=reduce, dtype=dtype, term=2**64 - 1))
        for reduce in ("rows", "sum")
        for dtype in ("f32", "bf16")
    ]
    n_right = 0
    end_s = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session, session.ws_connect(url(process)) as socket_:
        while time.monotonic() < end_s:
            await socket_.send_bytes(calls.mutated(generator.choice(seeds), generator))
            body = await socket_.receive_bytes(timeout=5)
            n_right += "y" in msgpack.unpackb(body)
    return n_right


async def test_mutated_calls_are_answered(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    assert process.pid is not None
    await post(session, process, call())
    before_bytes = memory_bytes(process.pid, "VmRSS")
    assert await fuzz(process, seconds=3, seed=2) > 0
    assert memory_bytes(process.pid, "VmRSS") - before_bytes < 10 * MIB
    assert (await get(session, process, "/health"))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json"},
        {**HEADERS, "Origin": "http://evil.example"},
        {**HEADERS, "Content-Encoding": "gzip"},
    ],
)
async def test_browsers_and_compression_are_refused(
    session: aiohttp.ClientSession, process: ExpertProcess, headers: dict[str, str]
) -> None:
    body = wire.encode_request(call())
    async with session.post(url(process), data=body, headers=headers, skip_auto_headers=["Content-Type"]) as response:
        assert response.status == 400
        assert wire.decode_error(await response.read()).kind == "bad_request"
    if "Origin" in headers:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(url(process), headers={"Origin": "http://evil.example"})


async def test_other_paths_and_methods(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    for method, path, status in (
        ("GET", "/v1/ffn", 405),
        ("GET", "/", 404),
        ("POST", "/health", 405),
        ("PUT", "/v1/ffn", 405),
    ):
        async with session.request(method, url(process, path)) as response:
            assert response.status == status, (method, path)


# --- limits

WIDE = {"n_in": 4096, "n_out": 4096}


def wide_call(n_rows: int, n_in: int = 4096, **options: object) -> wire.CallRequest:
    return call([[2]] * n_rows, n_in=n_in, reduce="sum", **options)  # type: ignore[arg-type]


def start_request(port: int, headers: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(
        f"POST /v1/ffn HTTP/1.1\r\nHost: localhost\r\nContent-Type: {wire.CONTENT_TYPE}\r\n{headers}\r\n\r\n".encode()
    )
    return connection


async def test_too_large_bodies_are_refused_before_they_are_read(session: aiohttp.ClientSession) -> None:
    async with server(order(**WIDE), max_rows=512) as process:
        assert process.pid is not None
        limit = wire.body_limit_bytes(512, 4096, 4, False)
        assert (await get(session, process, "/v1/stats"))[1]["body_limit_bytes"] == limit
        before_bytes = memory_bytes(process.pid, "VmRSS")

        # Announced: answered without a byte of the body, whether or not the sender waits for leave.
        for extra in ("", "\r\nExpect: 100-continue"):
            connection = start_request(process.port, f"Content-Length: {2 * limit}{extra}")
            answer = await asyncio.to_thread(connection.recv, 65536)
            connection.close()
            assert answer.startswith(b"HTTP/1.1 413"), extra

        # Not announced: answered as soon as the limit is passed, with the rest of the body never sent.
        connection = start_request(process.port, "Transfer-Encoding: chunked")

        def send_until_answered() -> tuple[int, bytes]:
            connection.settimeout(0.001)
            chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
            for n_sent in range(2 * limit // 65536):
                with contextlib.suppress(TimeoutError):
                    return n_sent * 65536, connection.recv(65536)
                connection.settimeout(10)
                connection.sendall(chunk)
                connection.settimeout(0.001)
            return 2 * limit, b""

        n_sent, answer = await asyncio.to_thread(send_until_answered)
        connection.close()
        assert answer.startswith(b"HTTP/1.1 413") and n_sent < limit + 4 * MIB

        # A frame header that announces too much closes a WebSocket with 1009.
        async with session.ws_connect(url(process), max_msg_size=0) as socket_:
            transport = socket_.get_extra_info("socket")
            assert transport is not None
            header = struct.pack(">BBQ", 0x82, 0xFF, limit + 1) + bytes(4)
            socket_._writer.transport.write(header)  # type: ignore[attr-defined]
            message = await socket_.receive(timeout=5)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1009)

        assert memory_bytes(process.pid, "VmRSS") - before_bytes < 2 * limit
        assert isinstance(await post(session, process, wide_call(1), 4096), wire.CallReply)


async def test_the_largest_body_is_accepted_by_post_and_websocket(session: aiohttp.ClientSession) -> None:
    async with server(order(**WIDE), max_rows=512) as process:
        request = call([[2, 3, 4]] * 512, n_in=4096, reduce="sum")
        body = wire.encode_request(request)
        assert len(body) > 8 * MIB
        # As large as the limit allows, through a field that is ignored.
        limit = wire.body_limit_bytes(512, 4096, 4, False)
        padded = bytearray(body)
        padded[0] += 1
        padding = limit - len(body)
        padded += b"\xa1z\xc5" + struct.pack(">H", padding - 5) + bytes(padding - 5)
        assert len(padded) == limit
        for sent in (body, bytes(padded)):
            async with session.post(url(process), data=sent, headers=HEADERS) as response:
                answer = read(request, await response.read(), 4096)
                assert isinstance(answer, wire.CallReply)
                assert np.array_equal(answer.y, request.h)
            async with session.ws_connect(url(process), max_msg_size=0) as socket_:
                await socket_.send_bytes(sent)
                answer = read(request, await socket_.receive_bytes(), 4096)
                assert isinstance(answer, wire.CallReply)
        async with session.post(url(process), data=_pieces(bytes(padded)), headers=HEADERS) as response:
            assert response.status == 200


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100_000):
        yield body[start : start + 100_000]


@pytest.mark.parametrize("size_mib", [64, 256])
async def test_a_large_call_takes_less_than_three_bodies_and_keeps_the_loop_going(
    session: aiohttp.ClientSession, size_mib: int
) -> None:
    n_in = 32768
    n_rows = size_mib * MIB // (4 * n_in)
    async with server(order(n_in=n_in, n_out=n_in), max_rows=n_rows) as process:
        assert process.pid is not None
        await post(session, process, wide_call(1, n_in), n_in)
        body = wire.encode_request(wide_call(n_rows, n_in))
        before_bytes = memory_bytes(process.pid, "VmRSS")
        lags_s: list[float] = []
        done = asyncio.Event()

        def sample() -> None:
            with socket.create_connection(("127.0.0.1", process.port)) as probe:
                while not done.is_set():
                    started_s = time.perf_counter()
                    probe.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    probe.recv(4096)
                    lags_s.append(time.perf_counter() - started_s)
                    time.sleep(0.005)

        def send() -> bytes:
            with start_request(process.port, f"Content-Length: {len(body)}") as connection:
                connection.settimeout(60)
                connection.sendall(body)
                return connection.recv(4096, socket.MSG_WAITALL)

        sampling = asyncio.create_task(asyncio.to_thread(sample))
        answer = await asyncio.to_thread(send)
        done.set()
        await sampling
        assert answer.startswith(b"HTTP/1.1 200")
        peak_bytes = memory_bytes(process.pid, "VmHWM") - before_bytes
        assert peak_bytes < 3 * len(body)
        # The longest may be the machine's; nothing of the server's takes so long.
        assert len(lags_s) > 3
        assert sorted(lags_s)[int(0.9 * len(lags_s))] < 0.05 * BUSY and max(lags_s) < 0.3 * BUSY


async def test_a_slow_sender_holds_up_nobody(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    body = wire.encode_request(call())
    slow = start_request(process.port, f"Content-Length: {len(body)}")
    slow.sendall(body[:100])
    assert isinstance(await post(session, process, call()), wire.CallReply)
    slow.sendall(body[100:])
    assert (await asyncio.to_thread(slow.recv, 65536)).startswith(b"HTTP/1.1 200")
    slow.close()


async def test_a_body_that_breaks_off_is_forgotten(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    connection = start_request(process.port, "Content-Length: 500")
    connection.sendall(bytes(100))
    await until(lambda: _connections(session, process, 2))
    connection.close()
    await until(lambda: _connections(session, process, 1))
    assert isinstance(await post(session, process, call()), wire.CallReply)


async def _connections(session: aiohttp.ClientSession, process: ExpertProcess, wanted: int) -> bool:
    return bool((await get(session, process, "/v1/stats"))[1]["connections"] == wanted)


async def test_sixteen_large_calls_at_once(session: aiohttp.ClientSession) -> None:
    async with server(order(**WIDE), max_rows=256) as process:
        request = wide_call(256)
        answers = await asyncio.gather(*(post(session, process, request, 4096) for _ in range(16)))
        assert all(isinstance(answer, wire.CallReply) for answer in answers)


async def test_at_most_64_connections(session: aiohttp.ClientSession, process: ExpertProcess) -> None:
    assert isinstance(await post(session, process, call()), wire.CallReply)
    others = [socket.create_connection(("127.0.0.1", process.port)) for _ in range(wire.MAX_CONNECTIONS - 1)]
    # Connections are taken in their order, so this one comes after those.
    one_too_many = socket.create_connection(("127.0.0.1", process.port), timeout=5)
    assert (await asyncio.to_thread(one_too_many.recv, 4096)).startswith(b"HTTP/1.1 503")
    assert isinstance(await post(session, process, call()), wire.CallReply), "the router's connection still works"
    for one in (*others, one_too_many):
        one.close()
    await until(lambda: _connections(session, process, 1))


# --- queue and deadline


async def test_calls_beyond_the_queue_or_the_deadline_are_refused() -> None:
    async with (
        server(order(), environment={"SWARM_DEBUG_SLEEP_S": "0.3"}) as process,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        # One computes, 16 wait, three are too many; those that wait more than a second are not started.
        requests = [call(call_id=n, deadline_ms=1000) for n in range(20)]
        answers = await asyncio.gather(*(post(session, process, request) for request in requests))
        errors = [answer for answer in answers if isinstance(answer, wire.CallError)]
        assert {error.kind for error in errors} == {"too_late"} and all(error.retry for error in errors)
        assert sum("waiting already" in error.message for error in errors) in (3, 4)
        n_computed = len(answers) - len(errors)
        assert 1 <= n_computed <= 4
        assert (await get(session, process, "/v1/stats"))[1]["calls"] == n_computed


async def test_health_answers_while_a_call_computes(session: aiohttp.ClientSession) -> None:
    async with server(order(), environment={"SWARM_DEBUG_SLEEP_S": "60"}) as process:
        computing = asyncio.create_task(post(session, process, call()))
        waiting = asyncio.create_task(post(session, process, call()))
        await until(lambda: _waiting(session, process, 1))
        with quickly(0.2):
            assert (await get(session, process, "/health"))[0] == 200
        for task in (computing, waiting):
            task.cancel()
        await process.stop()
        assert await process.wait() == 0, "it ended by itself, and was not killed"


async def _waiting(session: aiohttp.ClientSession, process: ExpertProcess, wanted: int) -> bool:
    return bool((await get(session, process, "/v1/stats"))[1]["waiting"] == wanted)


# --- slices


async def test_ready_tells_what_is_missing(session: aiohttp.ClientSession) -> None:
    async with server() as process:
        assert await get(session, process, "/ready") == (200, {"ready": True, "missing": []})
        answers = await load(process, order(), order(layer=1, kind="missing"), order(layer=2, kind="nan"))
        assert [answer.reason is None for answer in answers] == [True, False, False]
        assert "model.gguf is not there" in str(answers[1].reason)
        assert "experts 2, 3, 4" in str(answers[2].reason)
        status, ready = await get(session, process, "/ready")
        assert status == 503
        assert [(one["layer"], one["state"]) for one in ready["missing"]] == [(1, "failed"), (2, "failed")]
        answer = await post(session, process, call(layer=2))
        assert isinstance(answer, wire.CallError) and answer.kind == "not_held"
        for layer in (1, 2):
            await process.drop(MODEL, Slice(layer, 2, 4))
        assert (await get(session, process, "/ready"))[0] == 200


async def test_a_slice_that_loads_is_not_ready_and_others_serve(session: aiohttp.ClientSession) -> None:
    async with server(order()) as process:
        loading = asyncio.create_task(load(process, order(layer=1, kind="slow"), order(first=5, last=6, kind="slow")))

        async def is_coming() -> bool:
            return (await get(session, process, "/ready"))[0] == 503

        await until(is_coming)
        assert isinstance(await post(session, process, call([[2]])), wire.CallReply)
        for request in (call([[2]], layer=1), call([[2, 5]])):
            answer = await post(session, process, request)
            assert isinstance(answer, wire.CallError) and (answer.kind, answer.retry) == ("not_ready", True)
        assert [answer.reason for answer in await loading] == [None, None]
        assert isinstance(await post(session, process, call([[2, 5]])), wire.CallReply)
        await process.drop(MODEL, Slice(0, 2, 4))
        answer = await post(session, process, call([[2, 5]]))
        assert isinstance(answer, wire.CallError) and (answer.kind, answer.experts) == ("not_held", (2,))


async def test_a_websocket_is_renewed_when_the_limit_grows(session: aiohttp.ClientSession) -> None:
    async with server(order()) as process:
        async with session.ws_connect(url(process)) as socket_:
            await socket_.send_bytes(wire.encode_request(call()))
            assert isinstance(read(call(), await socket_.receive_bytes()), wire.CallReply)
            await load(process, order(layer=1, **WIDE))
            message = await socket_.receive(timeout=5)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1012)
        request = wide_call(16, layer=1)
        async with session.ws_connect(url(process)) as socket_:
            await socket_.send_bytes(wire.encode_request(request))
            assert isinstance(read(request, await socket_.receive_bytes(), 4096), wire.CallReply)


async def test_failures_of_the_kernels_are_reported_and_survived(session: aiohttp.ClientSession) -> None:
    async with server(order(kind="broken")) as process:
        request = call([[2, 4]])
        bad = replace(request, h=np.full((1, N_IN), 2000, dtype=np.float32))
        answer = await post(session, process, bad)
        assert isinstance(answer, wire.CallError)
        assert (answer.kind, answer.layer, answer.experts, answer.retry) == ("failed", 0, (2, 4), True)
        too_heavy = replace(request, weight=np.full(2, 3e38, dtype=np.float32))
        answer = await post(session, process, too_heavy)
        assert isinstance(answer, wire.CallError) and answer.kind == "failed" and "finite" in answer.message

        async def answers() -> bool:
            answer = await post(session, process, request)
            if isinstance(answer, wire.CallReply):
                return True
            # Until the slice has proved itself again.
            assert answer.kind == "not_ready" and answer.retry
            return False

        await until(answers)
        stats = (await get(session, process, "/v1/stats"))[1]
        assert stats["errors"]["failed"] == 2 and stats["calls"] == 1 and stats["pairs"] == 2
        assert process.held_bytes > 0


# --- the process


def start_raw(*arguments: str, **options: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )


def test_the_process_says_where_it_listens_and_ends_with_its_stdin() -> None:
    process = start_raw()
    assert process.stdout is not None and process.stdin is not None
    listening = json.loads(process.stdout.readline())
    assert listening["type"] == "listening" and listening["version"] == wire.VERSION and listening["build"] == "fake"
    assert listening["devices"][0]["name"] == "CPU"
    socket.create_connection(("127.0.0.1", listening["port"])).close()
    process.stdin.close()
    assert process.wait(timeout=2) == 0


@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_it_within_two_seconds(busy: bool) -> None:
    process = start_raw(env={**os.environ, "SWARM_DEBUG_SLEEP_S": "60"})
    assert process.stdout is not None and process.stdin is not None
    port = json.loads(process.stdout.readline())["port"]
    connection = None
    if busy:
        tensors = {name: dict(tensor) for name, tensor in order().tensors.items()}
        slices = [{"layer": 0, "first": 2, "last": 4, "tensors": tensors}]
        load_order = {
            "type": "load",
            "model": MODEL,
            "programs": {"0": PROGRAM},
            "n_expert": {"0": 8},
            "n_used": {"0": 4},
        }
        process.stdin.write(json.dumps({**load_order, "slices": slices}).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["type"] == "ready"
        body = wire.encode_request(call())
        connection = start_request(port, f"Content-Length: {len(body)}")
        connection.sendall(body)
    with quickly(2):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    if connection is not None:
        connection.close()


def test_orders_that_make_no_sense_are_survived() -> None:
    process = start_raw(stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    key = {"layer": 0, "first": 0, "last": 99, "tensors": {}}
    for line in (
        b"not json",
        b"[]",
        b'{"type": "dance"}',
        b'{"type": "load"}',
        json.dumps({"type": "load", "model": "m", "programs": {"0": "x"}, "slices": [key]}).encode(),
        b'{"type": "drop", "model": "none", "layer": 1, "first": 0, "last": 1}',
    ):
        process.stdin.write(line + b"\n")
    process.stdin.flush()
    failed, dropped = (json.loads(process.stdout.readline()) for _ in range(2))
    assert failed["type"] == "failed" and failed["reason"] == "not a program"
    assert dropped == {"type": "dropped", "model": "none", "layer": 1, "first": 0, "last": 1}
    process.stdin.write(b'{"type": "stop"}\n')
    process.stdin.flush()
    assert process.wait(timeout=2) == 0


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start_raw("--port", str(taken.getsockname()[1]), stderr=subprocess.PIPE)
        _, log = process.communicate(timeout=10)
        assert process.returncode == 1 and b"cannot run" in log
    assert subprocess.run([sys.executable, *COMMAND[1:], "--max-rows", "0"], stderr=subprocess.DEVNULL).returncode == 2
