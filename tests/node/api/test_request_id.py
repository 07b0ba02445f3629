"""The id of a request: made once, the same on every node and in the answer, in every log line that is its own."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import request_id
from node.api.front_door import DoorOptions, Here, Unavailable
from node.log_levels import LogLevels, apply_levels
from node.logs import configure
from rigs.chain import CHAT, LAST_EVENT, MESSAGES, Chain, RawClient, chain, event
from rigs.door import node

ID = re.compile(r"[0-9a-f]{8}")
HEADER = request_id.HEADER


class Log:
    """What was logged since the start of the test, as JSON has it."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]

    def of(self, own: str) -> list[str]:
        return [line["msg"] for line in self.lines() if line.get("request") == own]

    def others(self) -> list[str]:
        """What the doors logged without an id."""
        return [line["msg"] for line in self.lines() if "request" not in line and line["logger"].startswith("node.api")]


@pytest.fixture
def log() -> Iterator[Log]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    stream = io.StringIO()
    configure("json", "info,node=debug", stream=stream)
    yield Log(stream)
    apply_levels(LogLevels())
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    logging.captureWarnings(False)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hops", [1, 2])
async def test_it_is_the_same_everywhere(hops: int, stream: bool, log: Log) -> None:
    async with chain(hops) as c:
        asking = c.post()
        asked = await c.llama.next()
        if stream:
            await asked.stream(event("a"), LAST_EVENT[CHAT])
        else:
            await asked.answer(b"{}")
        response = await asking
        await response.read()
        await c.settled()
    own = response.headers[HEADER]
    assert ID.fullmatch(own)
    assert asked.headers[HEADER] == own
    assert all(request.headers.get(HEADER) == (own if hops == 2 else None) for request in c.router.seen)
    texts = log.of(own)
    assert sum("bytes from a client" in text for text in texts) == 1
    assert sum("bytes from a node" in text for text in texts) == hops - 1
    assert sum("passed on to" in text for text in texts) == hops
    assert log.others() == []


async def test_each_request_of_a_connection_has_its_own() -> None:
    async with chain() as c:
        ids = set()
        for _ in range(3):
            asking = c.post()
            await (await c.llama.next()).answer(b"{}")
            ids.add((await asking).headers[HEADER])
        async with c.session.get(f"{c.front.url}/v1/models") as response:
            ids.add(response.headers[HEADER])
    assert len(ids) == 4 and all(map(ID.fullmatch, ids))
    assert request_id.current() == ""


@pytest.mark.parametrize("hops", [1, 2])
async def test_two_requests_at_once_do_not_mix(hops: int, log: Log) -> None:
    async with chain(hops) as c:
        first, second = c.post(path=CHAT), c.post(path=MESSAGES)
        by_path = {asked.path: asked for asked in [await c.llama.next(), await c.llama.next()]}
        for path in (MESSAGES, CHAT):
            await by_path[path].stream(event("a"), LAST_EVENT[path])
        answers = {CHAT: await first, MESSAGES: await second}
        for response in answers.values():
            await response.read()
        await c.settled()
    for path, response in answers.items():
        own = response.headers[HEADER]
        assert by_path[path].headers[HEADER] == own
        assert len(log.of(own)) >= 4 * hops and all(path in text for text in log.of(own))
    assert answers[CHAT].headers[HEADER] != answers[MESSAGES].headers[HEADER]
    assert log.others() == []


@pytest.mark.parametrize("hops", [1, 2])
async def test_errors_have_it(hops: int, log: Log) -> None:
    async with chain(hops, DoorOptions(api_key="s3cret-s3cret", body_bytes_max=1000)) as c:

        async def refused(status: int, **more: Any) -> str:
            headers = {"Authorization": "Bearer s3cret-s3cret", "Content-Type": "application/json"}
            arguments = {"method": "POST", "url": c.front.url + CHAT, "data": b"{}", **more}
            arguments["headers"] = headers | more.get("headers", {})
            async with c.session.request(**arguments) as response:
                assert response.status == status
                return response.headers[HEADER]

        ids = [
            await refused(401, headers={"Authorization": "Bearer wrong"}),
            await refused(413, data=b"x" * 2000),
            await refused(415, headers={"Content-Type": "text/plain"}),
            await refused(404, data=b'{"model": "other"}'),
            await refused(404, url=f"{c.front.url}/v1/nothing"),
            await refused(405, method="GET"),
        ]
        c.router.agent.target = Unavailable("no_router", "there is no router")
        ids.append(await refused(503))
        assert len(set(ids)) == len(ids)
        for own in ids:
            assert any("POST" in text or "GET" in text for text in log.of(own))


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_stream_that_breaks_has_it(hops: int, log: Log) -> None:
    async with chain(hops) as c:
        asking = c.post()
        asked = await c.llama.next()
        await asked.start()
        response = await asking
        asked.break_connection()
        assert b'"error"' in await response.read()
        await c.settled()
    assert any("broke" in text for text in log.of(response.headers[HEADER]))


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_client_that_leaves_has_it(hops: int, log: Log) -> None:
    async with chain(hops, handler_cancellation=False) as c:  # which would end the handler without a word
        client = await RawClient.ask(c.front.url)
        own = (await c.llama.next()).headers[HEADER]
        client.leave("reset")
        await c.settled()
    assert sum("the client closed the connection" in text for text in log.of(own)) >= 1
    assert log.others() == []


async def test_an_error_that_nobody_expected_has_it(log: Log) -> None:
    async with node(Here("http://127.0.0.1:1", "k", 1)) as n, aiohttp.ClientSession() as session:
        n.agent.models = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        async with session.get(f"{n.url}/v1/models") as response:
            assert response.status == 500
            own = response.headers[HEADER]
    assert any("ZeroDivisionError" in line.get("exception", "") for line in log.lines() if line.get("request") == own)


async def asked_with(c: Chain, header: str) -> str:
    asking = c.post(**{HEADER: header})
    await (await c.llama.next()).answer(b"{}")
    return (await asking).headers[HEADER]


@pytest.mark.parametrize("hops", [1, 2])
async def test_a_clients_own_is_taken_if_it_is_one(hops: int) -> None:
    async with chain(hops) as c:
        assert await asked_with(c, "0123abcd") == "0123abcd"
        for other in ("0123ABCD", "0123abc", "0123abcde", "0123 abc", "x=1", "ffffffff ffffffff", "٠١٢٣٤٥٦٧", ""):
            own = await asked_with(c, other)
            assert ID.fullmatch(own) and own != other


async def test_a_nodes_is_taken_if_it_is_one() -> None:
    async with chain() as c:
        for header, taken in (("89abcdef", True), ("89abcdef [2J", False), ("../../..", False), (None, False)):
            headers = {"Content-Type": "application/json"} | ({} if header is None else {HEADER: header})
            url = f"{c.front.url}/swarm/v1/relay{CHAT}"
            asking = asyncio.create_task(c.session.post(url, data=b"{}", headers=headers).__aenter__())
            asked = await c.llama.next()
            await asked.answer(b"{}")
            own = (await asking).headers[HEADER]
            assert asked.headers[HEADER] == own and ID.fullmatch(own)
            assert (own == header) is taken


@given(st.text(max_size=12) | st.text("0123456789abcdef", min_size=7, max_size=9) | st.none())
def test_only_eight_hex_digits_are_an_id(received: str | None) -> None:
    async def begun() -> str:
        return request_id.begin(received)

    own = asyncio.run(begun())
    assert ID.fullmatch(own)
    assert (own == received) == bool(received is not None and re.fullmatch("[0-9a-f]{8}", received))


async def test_tasks_and_threads_started_for_a_request_have_it(log: Log) -> None:
    def say(text: str) -> None:
        logging.getLogger("node.test").info(text)

    async def later(text: str) -> None:
        await asyncio.sleep(0)
        say(text)

    async def work() -> str:
        own = request_id.begin(None)
        await asyncio.gather(later("task"), asyncio.to_thread(say, "thread"))
        asyncio.get_running_loop().call_soon(say, "callback")
        await asyncio.sleep(0)
        return own

    first, second = await asyncio.gather(asyncio.create_task(work()), asyncio.create_task(work()))
    say("nobody's")
    for own in (first, second):
        assert sorted(log.of(own)) == ["callback", "task", "thread"]
    assert [line["msg"] for line in log.lines() if "request" not in line] == ["nobody's"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_shows_it_once(format: str, log: Log) -> None:
    stream = io.StringIO()
    configure(format, "info", stream=stream)

    async def work() -> str:
        own = request_id.begin(None)
        logging.getLogger("node.test").info("a line", extra={"layer": 3})
        return own

    own = asyncio.run(work())
    line = stream.getvalue()
    assert line.count(own) == 1
    assert f"request={own}" in line if format == "text" else json.loads(line)["request"] == own
