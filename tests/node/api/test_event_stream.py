"""Event streams on their way to a client: whole events at once, unchanged, and an error where one breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.api.errors import Api
from node.api.event_stream import EventStream
from rigs.chain import (
    CHAT,
    LAST_EVENT,
    MESSAGES,
    RESPONSES,
    chain,
    data_of,
    event,
    message_of,
)


async def test_part_of_an_event_waits_for_the_rest_of_it() -> None:
    async with chain() as c:
        asking = c.post()
        asked = await c.llama.next()
        await asked.start()
        response = await asking
        await asked.send(event("a") + event("b")[:10])
        assert await response.content.readexactly(len(event("a"))) == event("a")
        await asked.send(event("b")[10:] + LAST_EVENT[CHAT])
        await asked.finish()
        assert await response.read() == event("b") + LAST_EVENT[CHAT]


@given(
    st.lists(st.sampled_from([event("a"), b":\n\n", b"data: x", b"\n", b"\n\n", b'data: {"erro', event("long" * 99)])),
    st.data(),
)
def test_events_are_cut_but_never_changed(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts) + LAST_EVENT[CHAT]
    stream = EventStream(Api.OPENAI)
    out, start = b"", 0
    while start < len(whole):
        end = data.draw(st.integers(start + 1, len(whole)))
        passed, error = stream.feed(whole[start:end])
        assert not error and not (out + passed).startswith(b"\0")
        out, start = out + passed, end
    assert out + stream.rest() == whole


def test_a_huge_event_passes_in_pieces() -> None:
    stream = EventStream(Api.RESPONSES)
    huge = b"event: response.completed\ndata: " + b"x" * (9 << 20) + b"\n\n"
    out = b""
    for start in range(0, len(huge), 65536):
        passed, _ = stream.feed(huge[start : start + 65536])
        out += passed
        assert len(stream._held) <= (4 << 20)
    assert out == huge and stream.ended and stream.closing == b""


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("path", list(LAST_EVENT))
async def test_each_event_passes_as_soon_as_it_is_there(path: str, hops: int) -> None:
    async with chain(hops) as c:
        asking = c.post(path=path)
        asked = await c.llama.next()
        await asked.start()
        response = await asking  # the headers, before any event
        assert response.content_type == "text/event-stream" and response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Connection"] == "close"  # so that no client uses it again
        for data in (event("a"), b":\n\n", event("é") + event("b"), LAST_EVENT[path]):
            await asked.send(data)
            assert await response.content.readexactly(len(data)) == data
        await asked.finish()
        assert await response.read() == b""


@pytest.mark.parametrize("how", ["reset", "ended early"])
@pytest.mark.parametrize("path", list(LAST_EVENT))
@pytest.mark.parametrize("hops", [1, 2])
async def test_a_stream_that_breaks_ends_with_an_error_event(hops: int, path: str, how: str) -> None:
    async with chain(hops) as c:
        asking = c.post(path=path)
        asked = await c.llama.next()
        await asked.start()
        response = await asking
        await asked.send(event("a") + event("b")[:12])
        assert await response.content.readexactly(len(event("a"))) == event("a")
        if how == "reset":
            asked.break_connection()
        else:
            await asked.finish()
        rest = await response.read()
        assert rest.count(b"\n\n") == 1 and rest.endswith(b"\n\n") and event("b")[:12] not in rest
        document = data_of(rest)
        assert "this node's llama-server broke" in message_of(document)
        if path in (CHAT, "/v1/completions"):
            assert rest.startswith(b'data: {"error"') and document["error"]["type"] == "server_error"
        else:
            assert rest.startswith(b"event: error\n") and document["type"] == "error"
        if path == RESPONSES:
            assert document["message"] == message_of(document)
        if path == MESSAGES:
            assert document["error"]["type"] == "api_error"
        await c.settled()
        assert c.router.door.statistics.broken == 1
