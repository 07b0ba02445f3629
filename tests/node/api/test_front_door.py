"""The query endpoint against a llama-server whose every answer the test writes (tests/rigs/fake_llama_server.py)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from node.api.front_door import DoorOptions, Here, There, Unavailable
from node.errors import NotAuthenticated
from node.router.failure import ExpertFailure
from node.slices import Slice
from rigs.chain import (
    CHAT,
    LAST_EVENT,
    MESSAGES,
    PATHS,
    QUESTION,
    RESPONSES,
    RawClient,
    chain,
    data_of,
    event,
    message_of,
    until,
)
from rigs.door import node
from rigs.fake_llama_server import EVENT_STREAM, JSON, Asked, fake_llama_server

UPSTREAM_HEADERS = {
    *("host", "connection", "authorization", "user-agent", "accept", "accept-encoding"),
    *("content-type", "content-length", "x-request-id"),
}
FAILURE = ExpertFailure("beta", 3, 2, 4, "no reply within 2.0 s", 2000.0)


# ---- what passes


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("path", PATHS)
async def test_bodies_pass_unchanged_and_headers_do_not(path: str, hops: int) -> None:
    body = b'{ "model" :"demo-moe","x": [1.50, 1e+2, "\\u00e9\xc3\xa9"],\n\t"x":2 }  '
    reply = '{"b": 1.0, "a": "é",  "text": "\\u0000"}\n'.encode()
    async with chain(hops) as c:
        asking = c.post(
            body,
            path,
            Authorization="Bearer client",
            Cookie="a=b",
            **{"x-api-key": "client", "X-Conversation-Id": "7", "anthropic-version": "2023-06-01"},
        )
        asked = await c.llama.next()
        assert (asked.path, asked.body) == (path, body)
        # A conversation id would make llama-server go on after the client has left.
        assert {name.lower() for name in asked.headers} == UPSTREAM_HEADERS
        assert "client" not in str(asked.headers.values())
        await asked.answer(reply)
        response = await asking
        assert (response.status, await response.read()) == (200, reply)
        assert response.headers["X-Request-Id"] == asked.headers["X-Request-Id"]
        plain = {name: value for name, value in response.headers.items() if name.lower() != "x-request-id"}
        assert plain | {"Date": "", "Server": ""} == {
            "Content-Type": JSON["Content-Type"],
            "Content-Length": str(len(reply)),
            "Date": "",
            "Server": "",
        }
        assert "llama" not in response.headers["Server"]
        if hops == 2:
            relayed = c.router.seen[-1]
            assert relayed.headers["X-Swarm-Proof"] == "proof" and "Authorization" not in relayed.headers
            assert c.front.agent.told == [("alpha", f"/swarm/v1/relay{path}", len(body))]


@pytest.mark.parametrize("hops", [1, 2])
async def test_errors_of_llama_server_pass_unchanged(hops: int) -> None:
    async with chain(hops) as c:
        for status, body in [
            (400, b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error","n_ctx":64}}'),
            (501, b'{"error":{"code":501,"message":"no embeddings","type":"not_supported_error"}}'),
            (500, b"not JSON"),
            (500, b'{"error":"' + b"x" * 200_000 + b'"}'),
            (503, b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'),
        ]:
            asking = c.post()
            await (await c.llama.next()).answer(body, status)
            response = await asking
            assert (response.status, await response.read()) == (status, body)


# ---- models and refusals


async def test_models_are_listed_by_the_node_itself() -> None:
    async with node(Unavailable("no_router", "no router")) as n, aiohttp.ClientSession() as session:
        model = {"id": "demo", "object": "model", "created": 1_700_000_000, "owned_by": "swarm"}
        model["aliases"] = ["demo-moe", "default"]
        async with session.get(f"{n.url}/v1/models") as response:
            assert await response.json() == {"object": "list", "data": [model]}
        async with session.get(f"{n.url}/v1/models/demo-moe") as response:
            assert await response.json() == model
        async with session.get(f"{n.url}/v1/models/org/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["models"] == ["demo", "demo-moe", "default"]


async def test_who_cannot_answer_says_what_is_missing() -> None:
    state = Unavailable(
        "missing_slices",
        "missing: layer 3, experts 2 to 4 on beta",
        node="beta",
        layer=3,
        experts=(2, 4),
        missing=[Slice(layer, 2, 4) for layer in range(3, 30)],
        retry_after_s=7,
    )
    async with node(state) as n, aiohttp.ClientSession() as session:
        for path, kind in ((CHAT, "unavailable_error"), (MESSAGES, "overloaded_error")):
            async with session.post(n.url + path, json={"model": "demo", "messages": []}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "7")
                error = (await response.json())["error"]
                assert error["type"] == kind and error["message"] == state.message
                assert (error["node"], error["layer"], error["experts"]) == ("beta", 3, {"first": 2, "last": 4})
                assert error["missing"][0] == {"layer": 3, "experts": {"first": 2, "last": 4}}
                assert (len(error["missing"]), error["missing_slices"]) == (16, 27)
        n.agent.served = ()
        async with session.post(n.url + CHAT, json={"model": "other"}) as response:
            assert response.status == 503  # what is served is not known yet


async def test_a_relayed_request_goes_no_further() -> None:
    async with chain(2) as c:
        c.router.agent.target = There("gamma", c.front.url)
        response = await c.post()
        assert response.status == 503 and "gamma is" in message_of(await response.json())
        assert response.headers["Retry-After"] == "5"


async def test_open_requests_are_limited() -> None:
    async with chain(1, DoorOptions(open_max=1)) as c:
        c.post()
        await c.llama.next()
        assert (await c.post()).status == 503


async def test_the_api_key() -> None:
    async with chain(2, DoorOptions(api_key="s3cret")) as c:
        for path in (CHAT, MESSAGES):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "s3cre"}, {"Authorization": "s3cret"}):
                response = await c.post(path=path, **headers)
                assert response.status == 401
                assert (await response.json())["error"]["type"] == "authentication_error"
            for headers in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
                asking = c.post(path=path, **headers)
                asked = await c.llama.next()
                assert "s3cret" not in str(asked.headers.values())
                await asked.answer(b"{}")
                assert (await asking).status == 200
        async with c.session.get(f"{c.front.url}/v1/models") as response:
            assert response.status == 401


async def test_the_guard_and_unknown_paths() -> None:
    def guard(request: web.Request) -> str | None:
        return "this page's origin is not allowed" if "Origin" in request.headers else None

    async with node(Unavailable("no_router", ""), guard=guard) as n, aiohttp.ClientSession() as session:
        for path in (CHAT, MESSAGES, "/v1/models", "/swarm/v1/relay/v1/messages"):
            method = "GET" if path == "/v1/models" else "POST"
            async with session.request(method, n.url + path, headers={"Origin": "http://evil.example"}) as response:
                assert response.status == 403
                assert "Access-Control-Allow-Origin" not in response.headers
                assert message_of(await response.json()) == "this page's origin is not allowed"
        for method, path, status in (
            ("GET", CHAT, 405),
            ("OPTIONS", MESSAGES, 405),
            ("POST", "/v1/audio/speech", 404),
            ("POST", "/v1/models", 404),
        ):
            async with session.request(method, n.url + path) as response:
                assert response.status == status and (await response.json())["error"]["message"]


# ---- the client goes away


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("phase", ["before the headers", "before the first event", "mid-stream", "in a body"])
@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("handler_cancellation", [True, False])
async def test_llama_server_is_left_at_once(
    handler_cancellation: bool, hops: int, phase: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with chain(hops, handler_cancellation=handler_cancellation) as c:
        client = await RawClient.ask(c.front.url)
        other = c.post()
        asked, other_asked = await c.llama.next(), await c.llama.next()
        if asked.headers["Accept"] == "*/*" and other_asked.headers.get("Accept") is None:
            asked, other_asked = other_asked, asked
        if phase == "in a body":
            await asked.start(200, {**JSON, "Content-Length": "1000"})
            await asked.send(b"{")
            await client.read_until(b"{")
        elif phase != "before the headers":
            await asked.start()
            if phase == "mid-stream":
                await asked.send(event("a"))
            await client.read_until(b"\n\n" if phase == "mid-stream" else b"\r\n\r\n")
        client.leave(how)
        # Half a second a node is promised, and 0.2 s usual; this is for a machine that is busy.
        async with asyncio.timeout(5 * hops):
            await asked.closed.wait()
        await until(lambda: c.front.door.open == 1 and c.router.door.open == 1)
        # The other stream has noticed nothing.
        await other_asked.stream(event("b"), LAST_EVENT[CHAT])
        assert await (await other).read() == event("b") + LAST_EVENT[CHAT]
        assert c.front.door.statistics.broken == 0
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("hops", [1, 2])
async def test_requests_wait_for_their_turn(hops: int) -> None:
    async with chain(hops, slots=2) as c:
        first, second = c.post(), c.post()
        asked = [await c.llama.next() for _ in range(2)]
        clients = []
        for waiting in range(1, 4):  # one by one, so that their order is known
            clients.append(await RawClient.ask(c.front.url, QUESTION + b" " * waiting))
            await until(lambda waiting=waiting: c.router.door.waiting == waiting)  # type: ignore[misc]
        counting = c.post(path="/v1/messages/count_tokens")  # which takes no slot
        await (await c.llama.next()).answer(b"{}")
        assert (await counting).status == 200
        clients[1].leave("close")
        await until(lambda: c.router.door.waiting == 2)
        assert c.llama.n_asked == 3
        await asked[0].answer(b"{}")
        third = await c.llama.next()
        assert third.body == QUESTION + b" "
        await asked[1].answer(b"{}")
        fourth = await c.llama.next()
        assert fourth.body == QUESTION + b"   "  # the second in the queue had left, and was never asked for
        clients[0].leave("reset")
        async with asyncio.timeout(20):
            await third.closed.wait()
        fifth = c.post()
        await (await c.llama.next()).answer(b"{}")
        for request in (first, second, fifth):
            assert (await request).status == 200
        clients[2].leave("close")
        await c.settled()
        assert c.router.door.waiting == 0


async def test_who_waited_is_answered_by_the_new_router() -> None:
    async with chain(2, slots=1) as old, fake_llama_server() as new:
        first = old.post()
        asked = await old.llama.next()
        second = old.post(path=MESSAGES)
        await until(lambda: old.router.door.waiting == 1)
        old.router.agent.target = Here(new.url, new.api_key, 1)
        asked.break_connection()
        assert (await first).status == 502
        await (await new.next()).answer(b"{}")
        assert (await second).status == 200


# ---- slow clients


async def fill(asked: Asked, chunk: bytes, n_chunks: int) -> None:
    for _ in range(n_chunks):
        await asked.send(chunk)
    await asked.send(LAST_EVENT[CHAT])
    await asked.finish()


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_slow_client_slows_llama_server_and_loses_nothing(hops: int) -> None:
    chunk, n_chunks = event("x" * 4000), 8000
    async with chain(hops) as c:
        client = await RawClient.ask(c.front.url)
        asked = await c.llama.next()
        await asked.start()
        filling = asyncio.create_task(fill(asked, chunk, n_chunks))
        sent_bytes = -1
        while sent_bytes != asked.sent_bytes:  # until nothing more goes in
            sent_bytes = asked.sent_bytes
            await asyncio.sleep(0.3)
        # The most of it is in the sending kernel's buffer of the fake server; of this process, 0.5 MB a hop.
        assert not filling.done() and sent_bytes < 8 << 20
        loop, received = asyncio.get_running_loop(), bytearray()
        while b"0\r\n\r\n" not in received[-8:]:
            received += await loop.sock_recv(client.socket, 1 << 20)
        await filling
        assert received.count(chunk) == n_chunks and LAST_EVENT[CHAT] in received
        client.leave("close")


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_client_that_takes_nothing_is_given_up(hops: int) -> None:
    async with chain(hops, DoorOptions(stall_timeout_s=0.5)) as c:
        client = await RawClient.ask(c.front.url)
        asked = await c.llama.next()
        await asked.start()
        filling = asyncio.create_task(fill(asked, event("x" * 4000), 8000))
        async with asyncio.timeout(50):  # ten times what it should take at most
            await asked.closed.wait()
        with contextlib.suppress(ConnectionError):
            await filling
        await c.settled()
        assert c.front.door.statistics.clients_gone == 1
        client.leave("close")


async def test_a_client_that_takes_little_is_kept() -> None:
    async with chain(1, DoorOptions(stall_timeout_s=2.0)) as c:
        client = await RawClient.ask(c.front.url)
        asked = await c.llama.next()
        await asked.start()
        filling = asyncio.create_task(fill(asked, event("x" * 4000), 8000))
        loop = asyncio.get_running_loop()
        for _ in range(30):  # for longer than the client may take nothing
            await asyncio.sleep(0.1)
            for _ in range(16):
                assert await loop.sock_recv(client.socket, 4096)
        assert not asked.closed.is_set() and c.front.door.open == 1
        filling.cancel()
        client.leave("reset")


@contextmanager
def other_network() -> Iterator[tuple[str, Callable[[str, int], socket.socket], Callable[[], None]]]:
    """A network of this machine and another namespace: our address in it, connect from there, and cut the cable."""
    process = subprocess.Popen(["unshare", "--net", "sleep", "60"])
    namespace = f"/proc/{process.pid}/ns/net"
    # The process is in its own namespace only once it has called unshare.
    while process.poll() is None and Path(namespace).readlink() == Path("/proc/self/ns/net").readlink():
        time.sleep(0.01)

    def ip(*arguments: str, inside: bool = False) -> None:
        enter = ["nsenter", f"--net={namespace}"] if inside else []
        subprocess.run([*enter, "ip", *arguments], check=True)

    def connect(host: str, port: int) -> socket.socket:
        made: list[socket.socket] = []

        def inside() -> None:  # a socket belongs to the namespace of the thread that made it
            with Path(namespace).open() as file:
                assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0
            made.append(socket.create_connection((host, port), timeout=5))

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        return made[0]

    ours, theirs = f"swt{process.pid % 100000}", "swt0"
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", str(process.pid))
        ip("address", "add", "10.213.7.1/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("address", "add", "10.213.7.2/30", "dev", theirs, inside=True)
        ip("link", "set", theirs, "up", inside=True)
        yield "10.213.7.1", connect, lambda: ip("link", "set", theirs, "down", inside=True)
    finally:
        # Its namespace goes some time after the process, and until then another of this network would not work.
        subprocess.run(["ip", "link", "delete", ours], check=True)
        process.kill()
        process.wait()


def can_make_networks() -> bool:
    return (
        sys.platform == "linux"
        and os.geteuid() == 0
        and subprocess.run(["sh", "-c", "unshare --net true && command -v nsenter ip"], capture_output=True).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="makes network namespaces, which takes root on Linux")
@pytest.mark.parametrize("phase", ["before the headers", "mid-stream"])
@pytest.mark.parametrize("hops", [1, 2])
async def test_a_client_that_vanishes_is_noticed(hops: int, phase: str) -> None:
    with other_network() as (host, connect, cut):
        async with chain(hops, DoorOptions(stall_timeout_s=2), host=host) as c:
            client = await asyncio.to_thread(connect, host, int(c.front.url.rpartition(":")[2]))
            client.sendall(RawClient.request(host))
            asked = await c.llama.next()
            if phase == "mid-stream":
                await asked.start()
                await asked.send(event("a"))
                client.setblocking(False)
                await RawClient(client).read_until(event("a"))
            cut()
            started_s = time.monotonic()
            if phase == "mid-stream":
                await asked.send(event("b"))  # and then a long silence: only the kernel can tell
            async with asyncio.timeout(60):
                await asked.closed.wait()
            assert time.monotonic() - started_s > 1
            client.close()


# ---- what breaks


async def test_the_node_that_broke_is_named() -> None:
    async with chain(2) as c:
        asking = c.post()
        asked = await c.llama.next()
        await asked.start()
        response = await asking
        next(iter(c.router.seen)).transport.abort()  # type: ignore[union-attr]
        error = data_of(await response.read())["error"]
        assert error["node"] == "alpha" and "node alpha" in error["message"]
        async with asyncio.timeout(20):
            await asked.closed.wait()


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_body_that_breaks_is_no_whole_body(hops: int) -> None:
    async with chain(hops) as c:
        asking = c.post()
        asked = await c.llama.next()
        await asked.start(200, {**JSON, "Content-Length": "1000"})
        await asked.send(b'{"a": ')
        response = await asking
        assert await response.content.readexactly(6) == b'{"a": '
        asked.break_connection()
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await response.read()
        await c.settled()


@pytest.mark.parametrize("hops", [1, 2])
async def test_no_answer_at_all(hops: int) -> None:
    async with chain(hops) as c:
        asking = c.post()
        (await c.llama.next()).break_connection()
        response = await asking
        assert response.status == 502
        error = (await response.json())["error"]
        assert error["code"] == "router_broke" and "this node's llama-server broke" in error["message"]
        asking = c.post(path=MESSAGES)
        await (await c.llama.next()).answer(b"{}", 401)
        response = await asking
        assert response.status == 502 and "refused this node with status 401" in message_of(await response.json())


async def test_nobody_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for target, title in ((Here(url, "k", 1), "this node's llama-server"), (There("beta", url), "node beta")):
            async with node(target) as n, aiohttp.ClientSession() as session:
                response = await session.post(n.url + CHAT, json={})
                assert (response.status, response.headers["Retry-After"]) == (503, "5")
                error = (await response.json())["error"]
                assert error["code"] == "router_unreachable" and title in error["message"]


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("report", ["before", "after"])
async def test_a_compute_error_names_node_layer_and_experts(report: str, stream: bool, path: str, hops: int) -> None:
    own = b'{"code":500,"message":"Compute error.","type":"server_error"}'
    async with chain(hops) as c:
        asking = c.post(path=path)
        asked = await c.llama.next()
        if report == "before":
            c.router.door.report_failure(FAILURE)
        if stream:
            error_event = b"event: error\ndata: " + own if path == MESSAGES else b'data: {"error":' + own + b"}"
            await asked.stream(event("a"), error_event + b"\n\n")
        else:
            await asked.answer(b'{"error":' + own + b"}", 500)
        if report == "after":
            await asyncio.sleep(0.05)  # the error may be at the door by now, or not: both are to work
            assert not asking.done() or stream
            c.router.door.report_failure(FAILURE)
        response = await asking
        body = await response.read()
        if stream:
            assert body.startswith(event("a"))
            body = body.removeprefix(event("a"))
            assert body.startswith(b'data: {"error"' if path == CHAT else b"event: error\n")
            document = data_of(body)
        else:
            assert response.status == 500
            document = json.loads(body)
        error = document["error"]
        assert error["message"] == "Compute error: layer 3, experts 2 to 4 on node beta: no reply within 2.0 s"
        assert (error["node"], error["layer"], error["experts"]) == ("beta", 3, {"first": 2, "last": 4})
        assert error["type"] == ("api_error" if path == MESSAGES else "server_error")
        assert path == MESSAGES or error["code"] == 500


async def test_an_old_failure_explains_nothing() -> None:
    body = b'{"error":{"code":500,"message":"Compute error.","type":"server_error"}}'
    async with chain() as c:
        c.router.door.report_failure(FAILURE)
        asking = c.post()
        await (await c.llama.next()).answer(body, 500)
        response = await asking
        assert (response.status, await response.read()) == (500, body)


@pytest.mark.parametrize("hops", [1, 2])
async def test_stopping_ends_open_requests_with_an_error(hops: int) -> None:
    async with chain(hops) as c:
        streamed, waiting = c.post(), None
        asked = await c.llama.next()
        await asked.start()
        response = await streamed
        waiting = c.post(path=MESSAGES)
        asked_too = await c.llama.next()
        await asked.send(event("a"))
        assert await response.content.readexactly(len(event("a"))) == event("a")
        await c.router.door.stop(web.Application())
        assert message_of(data_of(await response.read())) == "This node is being stopped"
        refused = await waiting
        assert c.router.door.open == 0
        assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        async with asyncio.timeout(20):
            await asked.closed.wait()
            await asked_too.closed.wait()
        assert (await c.post()).status == 503


async def test_an_application_stops_while_a_stream_is_open() -> None:
    async with fake_llama_server() as llama, aiohttp.ClientSession() as session:
        async with node(Here(llama.url, llama.api_key, 16)) as n:
            response = None
            asking = asyncio.create_task(session.post(n.url + CHAT, json={}).__aenter__())
            asked = await llama.next()
            await asked.start(200, EVENT_STREAM)
            response = await asking
        assert b"is being stopped" in await response.read()


async def test_nothing_is_passed_on_of_a_router_that_does_not_prove_the_key() -> None:
    def refuse(status: int, info: str | None) -> None:
        raise NotAuthenticated(f"status {status} with proof {info}")

    async with chain(2) as c:
        c.front.agent.check_reply = refuse
        asking = c.post(body=b'{"messages": []}')
        asked = await c.llama.next()
        await asked.answer(b'{"secret": 1}')
        response = await asking
        body = await response.read()
        assert response.status == 502
        assert b"secret" not in body and "status 200 with proof None" in message_of(json.loads(body))
