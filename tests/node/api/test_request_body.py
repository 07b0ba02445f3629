"""Bodies of requests: what is refused of them, what is looked into, and how much of them is held."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.api.front_door import DoorOptions
from node.api.request_body import decoded, top_level
from rigs.chain import (
    CHAT,
    MESSAGES,
    QUESTION,
    RESPONSES,
    RawClient,
    chain,
    message_of,
    until,
)


@pytest.mark.parametrize(
    ("path", "param", "value"),
    [(CHAT, "stop", ""), (CHAT, "stop", ["a", ""]), (RESPONSES, "stop", [""]), (MESSAGES, "stop_sequences", [""])],
)
async def test_an_empty_stop_string_is_refused(path: str, param: str, value: Any) -> None:
    async with chain() as c:
        response = await c.post(json.dumps({"messages": [], param: value}).encode(), path)
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["type"] == "invalid_request_error" and param in error["message"]
        assert c.llama.n_asked == 0
        for harmless in (["a", " "], "a", [], None, [[""]]):
            asking = c.post(json.dumps({"messages": [], param: harmless}).encode(), path)
            await (await c.llama.next()).answer(b"{}")
            assert (await asking).status == 200


@pytest.mark.parametrize(
    "body", [b'{"model": "demo"}', b'{"model": "default"}', b'{"model": ""}', b'{"model": null}', b"{}", b"{{{", b""]
)
async def test_these_bodies_are_for_llama_server(body: bytes) -> None:
    async with chain() as c:
        asking = c.post(body)
        asked = await c.llama.next()
        assert asked.body == body
        await asked.answer(b"{}")
        assert (await asking).status == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["model", '"model":', "{", "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "m", "x}"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["model", "stop", "messages", 'mo"del', "é"]), json_values),
    st.sampled_from([None, 1]),
    st.booleans(),
)
async def test_members_are_found_without_decoding(document: dict[str, Any], indent: int | None, ascii: bool) -> None:
    body = json.dumps(document, indent=indent, ensure_ascii=ascii).encode()
    found = await top_level(body, ("model", "stop", "é"))
    assert {name: decoded(value) for name, value in found.items()} == {
        name: value for name, value in document.items() if name in ("model", "stop", "é")
    }


@pytest.mark.parametrize(
    "value", ["[" * 9000 + "]" * 9000, "[" + "[]," * 300_000 + "0]", '"' + "x" * 300_000 + '"', '"\\ud800"', '"\xff"']
)
async def test_hostile_values_do_no_harm(value: str) -> None:
    async with chain() as c:
        async with asyncio.timeout(50):
            response = await c.post(b'{"model": ' + value.encode("latin-1") + b"}")
        assert response.status == 404
        assert len(await response.read()) < 2000


@given(st.text(alphabet='{}[]",:\\ model1', max_size=40))
async def test_what_is_not_json_does_no_harm(text: str) -> None:
    await top_level(text.encode(), ("model",))


async def test_a_large_hostile_body_does_not_stop_the_event_loop() -> None:
    body = b'{"messages": [' + b"[]," * 500_000 + b'0], "model": "x"}'
    beats, looking = 0, asyncio.create_task(top_level(body, ("model",)))
    while not looking.done():
        await asyncio.sleep(0.01)
        beats += 1
    assert await looking == {"model": b'"x"'}
    assert beats > 2  # looked into on the event loop, it would be done at the first


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_too_large_body_is_refused(chunked: bool) -> None:
    async with chain(1, DoorOptions(body_bytes_max=1000)) as c:
        body: Any = b'{"prompt": "' + b"x" * 1000 + b'"}'

        async def chunks() -> AsyncIterator[bytes]:
            yield body

        for path, kind in ((CHAT, "invalid_request_error"), (MESSAGES, "request_too_large")):
            async with c.session.post(
                c.front.url + path, data=chunks() if chunked else body, headers={"Content-Type": "application/json"}
            ) as response:
                assert response.status == 413
                error = (await response.json())["error"]
                assert error["type"] == kind and "1,000 bytes" in error["message"]
        assert c.llama.n_asked == 0 and c.front.door._bodies.held_bytes == 0


async def test_all_bodies_together_are_limited() -> None:
    async with chain(1, DoorOptions(held_bytes_max=2 * len(QUESTION))) as c:
        askings = [c.post() for _ in range(2)]
        asked = [await c.llama.next() for _ in range(2)]
        third = await c.post()
        assert (third.status, third.headers["Retry-After"]) == (503, "5")
        await asked[0].answer(b"{}")
        await askings[0]
        await until(lambda: c.front.door._bodies.held_bytes == len(QUESTION))
        askings.append(c.post())
        await (await c.llama.next()).answer(b"{}")
        assert (await askings[2]).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_content_types(headers: dict[str, str], status: int) -> None:
    async with chain() as c:
        body = b"\x1f\x8b" if "Content-Encoding" in headers else QUESTION
        asking = asyncio.create_task(c.session.post(c.front.url + CHAT, data=body, headers=headers).__aenter__())
        if status == 200:
            await (await c.llama.next()).answer(b"{}")
        assert (await asking).status == status


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/embeddings"])
async def test_an_unknown_model_is_refused_with_the_list(path: str) -> None:
    async with chain() as c:
        response = await c.post(b'{"model": "gpt-5", "messages": []}', path)
        assert response.status == 404
        document = await response.json()
        if path == MESSAGES:
            assert document["type"] == "error" and document["error"]["type"] == "not_found_error"
        else:
            assert document["error"]["type"] == "invalid_request_error"
            assert (document["error"]["code"], document["error"]["param"]) == ("model_not_found", "model")
        assert "'gpt-5'" in message_of(document) and "demo, demo-moe, default" in message_of(document)
        assert document["error"]["models"] == ["demo", "demo-moe", "default"]
        assert c.llama.n_asked == 0


async def test_a_client_that_sends_nothing_more_is_refused() -> None:
    async with chain(1, DoorOptions(stall_timeout_s=0.1)) as c:
        host, port = c.front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(RawClient.request(host)[:-5])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_client_that_leaves_while_it_sends_asks_nothing(hops: int) -> None:
    async with chain(hops) as c:
        client = await RawClient.ask(c.front.url)
        await c.llama.next()
        slow = socket.create_connection(client.socket.getpeername())
        slow.sendall(RawClient.request("localhost")[:-5])
        await until(lambda: c.front.door._bodies.held_bytes > len(QUESTION))
        slow.close()
        await until(lambda: c.front.door._bodies.held_bytes == len(QUESTION))
        assert c.llama.n_asked == 1
        client.leave("close")
