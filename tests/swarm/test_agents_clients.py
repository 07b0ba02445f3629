"""The official clients over a swarm of whole nodes, which ask one that does not route; what
comes is a stock llama-server's."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
import psutil
import pytest
import pytest_asyncio

from node.models.demo import demo_model
from rigs import stock_server
from rigs.api_cases import (
    ALIAS,
    ANSWER,
    ANTHROPIC_CHECKS,
    ASK,
    CASES,
    OPENAI_CHECKS,
    STOPS,
    check_stop,
    normalised,
)
from rigs.loopback import LocalSwarm, local_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTER, ASKED, OTHER = "one", "two", "three"
API_KEY = "key-of-llama-server"
SLOTS, SLOT_TOKENS = 3, 4096
# The swarm's experts are plain: repacked, they would give other last bits.
ARGUMENTS = ["--no-repack"]

# It would be written until the slot is full.
STORY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Write a long story."}],
    "max_tokens": SLOT_TOKENS,
    "extra_body": {"ignore_eos": True, "temperature": 0},
}


def novel(title: str) -> dict[str, Any]:
    """Some 2,000 tokens to read, and as many to write. With a title of its own, none of
    it is in llama-server's cache."""
    return STORY | {"messages": [{"role": "user", "content": f"{title}: " + "A cat sat. " * 500}]}


# What is written whatever the last bits are, which depend on the other requests of a batch.
COUNTING = " ".join(str(number) for number in range(12))
# Many tokens, for which the clients ask as well.
SLOW_CASES = ("chat tools", "chat schema", "messages tools stream")


@dataclass
class Rig:
    """A swarm, and a llama-server of the same settings that has the model to itself."""

    swarm: LocalSwarm
    stock_url: str
    session: aiohttp.ClientSession
    openai_client: openai.AsyncOpenAI
    anthropic_client: anthropic.AsyncAnthropic

    @property
    def url(self) -> str:
        return self.swarm[ASKED].url

    def openai(self) -> openai.AsyncOpenAI:
        return self.openai_client.with_options(base_url=f"{self.url}/v1")

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return self.anthropic_client.with_options(base_url=self.url)

    async def raw(self, url: str, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
        headers = {"Authorization": f"Bearer {API_KEY}"}  # which only the stock server wants
        async with self.session.post(url + path, json=body, headers=headers) as response:
            return response.status, response.headers["Content-Type"], await response.read()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("agents")
    models = folder / "models"
    models.mkdir()
    model = models / "demo.gguf"
    model.symlink_to(demo_model())
    stock_folder = tmp_path_factory.mktemp("stock")
    extra = ["--alias", "demo", "--chat-template-file", str(stock_folder / "template.jinja"), *ARGUMENTS]
    environment = {
        "SWARM_MODEL_CONTEXT_TOKENS": str(SLOT_TOKENS),
        "SWARM_MODEL_PARALLEL": str(SLOTS),
        "SWARM_MODEL_UBATCH_TOKENS": "64",
        "SWARM_MODEL_PROMPT_CACHE_MIB": "0",
        "SWARM_MODEL_REDUCE": "rows",
        "SWARM_ROUTER_THREADS": "1",
        "SWARM_ROUTER_EXTRA_ARGUMENTS": shlex.join(extra),
    }
    options: dict[str, Any] = {"slots": SLOTS, "slot_tokens": SLOT_TOKENS, "threads": 1, "extra": ARGUMENTS}
    with stock_server.llama_server(stock_folder, API_KEY, **options) as (stock_url, check):
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            local_swarm(folder, model, environment) as swarm,
        ):
            await swarm.start(ROUTER, routes=True)
            await asyncio.gather(swarm.start(ASKED), swarm.start(OTHER))
            await stock_server.ready(session, stock_url, check)
            async with (
                openai.AsyncOpenAI(api_key="none", max_retries=0, timeout=120) as openai_client,
                anthropic.AsyncAnthropic(api_key="none", max_retries=0, timeout=120) as anthropic_client,
            ):
                yield Rig(swarm, stock_url, session, openai_client, anthropic_client)


@pytest_asyncio.fixture(loop_scope="module")
async def rig(started: Rig) -> Rig:
    """The swarm with all of its nodes, of which a test before may have ended one."""
    for name, node in list(started.swarm.nodes.items()):
        if not node.runs:
            await started.swarm.start(name, routes=name == ROUTER)
    await started.swarm.whole()
    assert (await started.swarm.status(ASKED))["router"]["name"] == ROUTER
    return started


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW_CASES])
async def test_the_bytes_are_those_of_a_stock_llama_server(rig: Rig, case: str) -> None:
    path, body, status, part = CASES[case]
    if body.get("model") == ALIAS:
        body = body | {"model": "demo.gguf"}
    urls = (rig.stock_url, rig.url)
    if status == 200:  # so that both have the prompt in their cache
        await asyncio.gather(*(rig.raw(url, path, body | {"max_tokens": 1}) for url in urls))
    stock, swarm = await asyncio.gather(*(rig.raw(url, path, body) for url in urls))
    assert stock[0] == status and part.encode() in stock[2], stock
    assert swarm[:2] == stock[:2]
    assert normalised(swarm[2]) == normalised(stock[2])


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(rig: Rig, stream: bool) -> None:
    # All at once, so that they also wait for slots. Of the one left out, test_api_clients.py tells.
    cases = [case for case in STOPS if not (stream and case == "near miss at the limit")]
    await asyncio.gather(*(check_stop(rig.openai(), case, stream) for case in cases))


@pytest.mark.parametrize("check", OPENAI_CHECKS, ids=lambda check: check.__name__)
async def test_openai(rig: Rig, check: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    await check(rig.openai())


@pytest.mark.parametrize("check", ANTHROPIC_CHECKS, ids=lambda check: check.__name__)
async def test_anthropic(rig: Rig, check: Callable[[anthropic.AsyncAnthropic], Awaitable[None]]) -> None:
    await check(rig.anthropic())


# ---- clients that leave

# llama-server looks for a client that left when it has a token for it, else after a second in which none of its
# requests, those for its metrics included, had an answer; and it looks at nothing while it computes a batch.
STREAM_ENDS_WITHIN_S = 3.0
PROMPT_ENDS_WITHIN_S = 6.0


class Reader:
    """A streamed answer that an official client is reading. ``n_events``: of it so far; ``task``: who reads."""

    def __init__(self, read: Callable[[Reader], Coroutine[Any, Any, None]]) -> None:
        self.n_events = 0
        self._left = False
        self.task = asyncio.create_task(read(self))

    async def read(self, events: AsyncIterable[Any]) -> None:
        async for _ in events:
            self.n_events += 1
            if self._left:
                return

    async def events(self, n_more: int) -> None:
        """Waits until that many more have come."""
        wanted = self.n_events + n_more
        async with asyncio.timeout(60):
            while self.n_events < wanted and not self.task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert self.n_events >= wanted, f"it ended after {self.n_events} events: {self.task}"

    async def leave(self) -> None:
        """Stops reading, as a program does that has read enough, or waits no longer for the first event."""
        assert not self.task.done()
        self._left = True
        if self.n_events == 0:
            self.task.cancel()
        await asyncio.wait({self.task})
        assert self.task.cancelled() or self.task.exception() is None


def openai_chat(rig: Rig, ask: dict[str, Any]) -> Reader:
    async def read(reader: Reader) -> None:
        async with await rig.openai().chat.completions.create(**ask, stream=True) as events:
            await reader.read(events)

    return Reader(read)


def openai_responses(rig: Rig, ask: dict[str, Any]) -> Reader:
    async def read(reader: Reader) -> None:
        (message,) = ask["messages"]
        async with await rig.openai().responses.create(
            model="demo", input=message["content"], stream=True, extra_body=ask["extra_body"]
        ) as events:
            await reader.read(events)

    return Reader(read)


def anthropic_messages(rig: Rig, ask: dict[str, Any]) -> Reader:
    async def read(reader: Reader) -> None:
        async with rig.anthropic().messages.stream(**ask) as events:
            await reader.read(events)

    return Reader(read)


Start = Callable[[Rig, dict[str, Any]], Reader]
READERS: tuple[Start, ...] = (openai_chat, openai_responses, anthropic_messages)


@pytest.mark.parametrize("start", READERS)
async def test_experts_rest_once_a_client_left_its_stream(rig: Rig, start: Start) -> None:
    reader = start(rig, STORY)
    await reader.events(5)
    await reader.leave()
    await rig.swarm.quiet(STREAM_ENDS_WITHIN_S)


@pytest.mark.parametrize("start", [openai_chat, anthropic_messages])
async def test_experts_rest_once_a_client_left_before_the_first_token(rig: Rig, start: Start) -> None:
    calls = await rig.swarm.expert_calls()
    reader = start(rig, novel(start.__name__))
    await rig.swarm.called(100, calls)
    assert reader.n_events == 0
    await reader.leave()
    await rig.swarm.quiet(PROMPT_ENDS_WITHIN_S)


async def test_experts_rest_once_a_client_left_that_streams_nothing(rig: Rig) -> None:
    calls = await rig.swarm.expert_calls()
    asking = asyncio.create_task(rig.anthropic().messages.create(**STORY))
    await rig.swarm.called(1000, calls)  # the prompt, and then 90 for a token
    assert not asking.done()
    asking.cancel()
    await rig.swarm.quiet(PROMPT_ENDS_WITHIN_S)


async def test_a_client_that_leaves_does_not_touch_the_streams_of_others(rig: Rig) -> None:
    leaver = openai_chat(rig, STORY)
    await leaver.events(3)
    text, reasons = "", []
    counting = {"grammar": f'root ::= "{COUNTING}"'}
    async for event in await rig.openai().chat.completions.create(**ASK, extra_body=counting, stream=True):
        text += event.choices[0].delta.content or ""
        reasons += [event.choices[0].finish_reason] if event.choices[0].finish_reason else []
        if len(text) > 5 and not leaver.task.done():
            await leaver.leave()
    assert (text, reasons) == (COUNTING, ["stop"])
    assert leaver.task.done()
    await rig.swarm.quiet(STREAM_ENDS_WITHIN_S)


async def test_a_queued_request_never_starts_once_its_client_left(rig: Rig) -> None:
    running = [openai_chat(rig, STORY) for _ in range(SLOTS)]
    for reader in running:
        await reader.events(3)
    queued = openai_chat(rig, novel("queued"))
    behind = asyncio.create_task(rig.openai().chat.completions.create(**ASK))
    for reader in running:  # to which it is no matter
        await reader.events(5)
    assert not queued.task.done() and not behind.done()
    await queued.leave()
    tokens, n_events = await rig.swarm.computed_tokens(), sum(reader.n_events for reader in running)
    await running[0].leave()
    answer = await behind
    assert answer.choices[0].message.content == ANSWER
    for reader in running[1:]:
        await reader.events(3)
        await reader.leave()
    await rig.swarm.quiet(STREAM_ENDS_WITHIN_S)
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    known = sum(reader.n_events for reader in running) - n_events
    known += usage.total_tokens - (usage.prompt_tokens_details.cached_tokens or 0)
    # Until it is noticed that a client left, some more are written for it; a batch of the queued prompt has 60.
    assert await rig.swarm.computed_tokens() - tokens < known + 30


# ---- nodes that are stopped

STOPPED_WITHIN_S = 5.0


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _error_object(error: Any) -> dict[str, Any]:
    """What a client raised, which must be an error in its API's form and not a broken connection."""
    assert isinstance(error, openai.APIError | anthropic.APIError), repr(error)
    body: Any = error.body
    assert isinstance(body, dict), repr(error)
    if isinstance(error, anthropic.APIError):
        assert body["type"] == "error"
        body = body["error"]
    assert body["type"] and body["message"]
    return dict(body)


@pytest.mark.parametrize("stopped", [ASKED, ROUTER])
async def test_streams_end_with_an_error_when_a_node_is_stopped(rig: Rig, stopped: str) -> None:
    node = rig.swarm[stopped]
    readers = [start(rig, STORY) for start in READERS]
    for reader in readers:
        await reader.events(3)
    queued = asyncio.create_task(rig.openai().chat.completions.create(**ASK))
    for reader in readers:
        await reader.events(2)
    assert not queued.done()
    children = node.children()
    assert len(children) == (2 if stopped == ROUTER else 1)
    node.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(STOPPED_WITHIN_S):
        tasks: list[asyncio.Task[Any]] = [queued, *(reader.task for reader in readers)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert await node.process.wait() == 128 + signal.SIGTERM
    assert not [child for child in children if _lives(child)]
    told = [_error_object(error) for error in errors]
    assert getattr(errors[0], "status_code", None) == 503
    assert all(f"Node {stopped} is being stopped" in error["message"] for error in told), told
    for name in rig.swarm.nodes:
        if name != stopped:
            assert (await rig.swarm.status(name))["name"] == name
