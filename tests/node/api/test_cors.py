"""Pages of allowed origins, and all others, at an agent's HTTP server: what a browser would let them do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from node.api.front_door import Unavailable
from rigs.agent import LoneAgent, lone_agent
from rigs.fake_llama_server import FakeLlamaServer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PAGE, OTHER_PAGE, EVIL = "https://chat.example", "http://ui.example:3000", "http://evil.example"
KEY = "sk-12345678"
ALLOW = {
    "SWARM_API_ALLOWED_ORIGINS": f"{PAGE},{OTHER_PAGE}",
    "SWARM_API_KEY": KEY,
    "SWARM_API_ALLOWED_HOSTS": "node.example",
}
JSON = {"Content-Type": "application/json"}
WITH_KEY = {"Authorization": f"Bearer {KEY}", **JSON}
QUESTION = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
CORS = "access-control-"


@dataclass
class Browser:
    """Sends what a browser sends for a page, and keeps no answer from anyone."""

    session: aiohttp.ClientSession
    url: str

    def preflight(
        self, path: str, origin: str, headers: str = "authorization,content-type", method: str = "POST"
    ) -> aiohttp.client._RequestContextManager:
        asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
        return self.session.options(self.url + path, headers={"Origin": origin, **asked})


@asynccontextmanager
async def browser(
    folder: Path, environment: dict[str, str]
) -> AsyncIterator[tuple[Browser, LoneAgent, FakeLlamaServer]]:
    async with lone_agent(folder, environment) as (agent, llama), aiohttp.ClientSession() as session:
        yield Browser(session, f"http://127.0.0.1:{agent.server.port}"), agent, llama


def cors_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items() if name.lower().startswith(CORS)}


def assert_readable(response: aiohttp.ClientResponse, origin: str) -> None:
    assert response.headers.getall("Access-Control-Allow-Origin") == [origin]
    assert "Origin" in response.headers["Vary"]
    assert "access-control-allow-credentials" not in cors_of(response)
    assert "*" not in " ".join(cors_of(response).values())


@pytest.mark.parametrize("origin", [PAGE, OTHER_PAGE])
async def test_a_preflight_is_answered_without_a_key(origin: str, tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, llama):
        for path in (CHAT, MESSAGES, "/v1/models", "/status"):
            asked = "authorization,content-type,x-api-key,anthropic-version,X-Stainless-Lang, x-stainless-retry-count"
            asked += ",cookie,x-evil"
            async with page.preflight(path, origin, asked) as response:
                assert response.status == 204
                assert_readable(response, origin)
                allowed = response.headers["Access-Control-Allow-Headers"].lower().split(", ")
                assert {"authorization", "content-type", "x-api-key", "anthropic-version"} <= set(allowed)
                assert {"x-stainless-lang", "x-stainless-retry-count"} <= set(allowed)
                assert not {"cookie", "x-evil", "*"} & set(allowed)
                assert {"GET", "POST"} == set(response.headers["Access-Control-Allow-Methods"].split(", "))
                assert 0 < int(response.headers["Access-Control-Max-Age"]) <= 7200
                assert await response.read() == b""
        assert llama.n_asked == 0


async def test_what_a_page_asks_for_is_bounded(tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, _):
        names = [f"x-stainless-{n}" for n in range(200)] + [
            "x-stainless-" + "y" * 100,
            "x-stainless-ü",
            "x-stainless- z",
        ]
        async with page.preflight(CHAT, PAGE, ",".join(names)) as response:
            allowed = response.headers["Access-Control-Allow-Headers"]
        assert len(allowed) < 1500
        assert all(re.fullmatch(r"[A-Za-z0-9-]+", name) for name in allowed.split(", "))
        async with page.preflight(CHAT, PAGE, "") as response:
            assert response.status == 204


async def test_a_streamed_answer_can_be_read_while_it_comes(tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, llama):
        asking = page.session.post(page.url + CHAT, data=QUESTION, headers={"Origin": PAGE, **WITH_KEY})

        async def ask() -> aiohttp.ClientResponse:
            return await asking

        task = asyncio.create_task(ask())
        asked = await llama.next()
        assert "Origin" not in asked.headers
        await asked.start()  # which allows every origin, as llama-server does
        await asked.send(b'data: {"x": 1}\n\n')
        response = await task
        assert_readable(response, PAGE)
        assert response.headers["Content-Type"] == "text/event-stream"
        await asked.send(b"data: [DONE]\n\n")
        await asked.finish()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_errors_can_be_read_too(tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, agent, llama):
        for method, path, headers, status in (
            ("POST", CHAT, JSON, 401),
            ("GET", "/v1/models", {}, 401),
            ("GET", "/nowhere", WITH_KEY, 404),
            ("GET", "/v1/nowhere", WITH_KEY, 404),
            ("DELETE", CHAT, WITH_KEY, 405),
            ("PUT", "/status", WITH_KEY, 405),
            ("POST", CHAT, {**WITH_KEY, "Content-Type": "text/plain"}, 415),
            ("POST", CHAT, {**WITH_KEY, "Host": "evil.example"}, 403),
        ):
            async with page.session.request(
                method,
                page.url + path,
                headers={"Origin": PAGE, **headers},
                data=QUESTION if method == "POST" else None,
            ) as response:
                assert response.status == status, (method, path)
                assert_readable(response, PAGE)
        agent.target = Unavailable("missing_slices", "not yet", retry_after_s=7)
        async with page.session.post(
            page.url + MESSAGES, data=QUESTION, headers={"Origin": PAGE, "x-api-key": KEY, **JSON}
        ) as response:
            assert response.status == 503
            assert_readable(response, PAGE)
            # A page reads other headers than the usual ones only if it is told that it may.
            assert response.headers["Access-Control-Expose-Headers"] == "Retry-After, X-Request-Id"
            assert response.headers["Retry-After"] == "7"

        def broken() -> Unavailable:
            raise RuntimeError("a fault of ours")

        agent.router = broken  # type: ignore[method-assign]
        async with page.session.post(page.url + CHAT, data=QUESTION, headers={"Origin": PAGE, **WITH_KEY}) as response:
            assert response.status == 500
            assert_readable(response, PAGE)
        assert llama.n_asked == 0


@pytest.mark.parametrize(
    "origin",
    [EVIL, "null", "*", "http://chat.example", "https://chat.example:8443", "https://chat.example.evil.example",
     "https://chat.example/", "https://evil.example https://chat.example", "https://\u212ahat.example",
     "http://127.0.0.1:1"],
)  # fmt: skip
async def test_other_origins_get_nothing(origin: str, tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, llama):
        for path in (CHAT, MESSAGES, "/v1/models", "/status", "/metrics", "/health"):
            async with page.preflight(path, origin) as response:
                assert response.status == 403
                assert cors_of(response) == {}
            method = "POST" if path in (CHAT, MESSAGES) else "GET"
            async with page.session.request(
                method, page.url + path, headers={"Origin": origin, **WITH_KEY}, data=QUESTION
            ) as response:
                assert response.status == 403
                assert cors_of(response) == {}
                assert "allowed_origins" in await response.text()
        assert llama.n_asked == 0


async def test_the_nodes_own_pages_and_programs_need_no_leave(tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, _):
        for headers in ({"Origin": page.url}, {}):
            async with page.session.get(f"{page.url}/status", headers=headers) as response:
                assert response.status == 200
                assert cors_of(response) == {}
                # What a cache keeps of this must not be shown to a page.
                assert response.headers["Vary"] == "Origin"
        # Without the header that makes it a preflight, OPTIONS is a method like another.
        async with page.session.options(page.url + CHAT, headers={"Origin": PAGE}) as response:
            assert response.status == 401


async def test_routes_between_nodes_are_for_no_page(tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, llama):
        for path in ("/swarm/v1/heartbeat", "/swarm/v1/nonce", f"/swarm/v1/relay{CHAT}"):
            async with page.preflight(path, PAGE) as response:
                assert response.status in (404, 405)
                assert cors_of(response) == {}
            async with page.session.get(page.url + path, headers={"Origin": PAGE}) as response:
                assert cors_of(response) == {}
        assert llama.n_asked == 0


async def test_another_name_of_this_node_is_refused_for_a_preflight_too(tmp_path: Path) -> None:
    async with browser(tmp_path, ALLOW) as (page, _, _):
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        for host, status in (("evil.example", 403), ("node.example:1", 204)):
            async with page.session.options(page.url + CHAT, headers={**asked, "Host": host}) as response:
                assert response.status == status


async def test_without_the_setting_there_is_no_cors(tmp_path: Path) -> None:
    async with browser(tmp_path, {}) as (page, _, _):
        for headers in ({"Origin": page.url}, {}):
            async with page.session.get(f"{page.url}/v1/models", headers=headers) as response:
                assert response.status == 200
                assert cors_of(response) == {}
                assert "Vary" not in response.headers
        async with page.preflight(CHAT, PAGE) as response:
            assert response.status == 403
            assert cors_of(response) == {}
        async with page.preflight(CHAT, page.url) as response:  # which no browser sends
            assert response.status == 405
            assert cors_of(response) == {}
