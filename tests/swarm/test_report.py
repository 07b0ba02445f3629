"""``swarm-node report`` on a real swarm of three: whole, and without keys or texts, whatever has become of the node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tarfile
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from node.commands.report_parts import PARTS
from node.models.demo import demo_model
from rigs.loopback import NODE_COMMAND, LocalNode, LocalSwarm, local_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

API_KEY = "api-key-of-this-test/+"
WORD = "xylozaurus"
ROUTER, OTHER, THIRD = "one", "two", "three"
NODES = (ROUTER, OTHER, THIRD)
#: By the node that was asked: the id of a request that it answered.
REQUESTS: dict[str, str] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("report")
    models = folder / "models"
    models.mkdir()
    model = models / "demo.gguf"
    model.symlink_to(demo_model())
    # llama-server writes down each prompt and answer with -v, and our own log has all that it can have.
    environment = {"SWARM_API_KEY": API_KEY, "SWARM_LOG_LEVEL": "debug", "SWARM_ROUTER_EXTRA_ARGUMENTS": "-v"}
    async with local_swarm(folder, model, environment) as running:
        for name in NODES:
            await running.start(name, routes=name == ROUTER)
        await running.whole()
        for name in NODES:
            REQUESTS[name] = await ask(running[name])
        yield running


async def ask(node: LocalNode) -> str:
    """Asks for the word in every way in which it could come into a log; the id of one of the requests."""
    text = f"Say {WORD}.\n0.00.000.001 I srv  {WORD}: {WORD}\n    {WORD}Error: {WORD}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for more in ({}, {"stream": True}, {"grammar": f'root ::= "{WORD}'}):
            async with session.post(f"{node.url}/v1/chat/completions", json=body | more) as response:
                await response.read()
                own = response.headers["X-Request-Id"]
        for broken in ('{"messages": [{"role": "user", "content": "' + WORD, '{"prompt": ' + WORD):
            json_type = {"Content-Type": "application/json"}
            async with session.post(f"{node.url}/v1/completions", data=broken, headers=json_type) as response:
                assert response.status >= 400
                await response.read()
    # A length that is too short: the rest of the body is taken for another request.
    host, _, port = node.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    )
    writer.write(f"{head}{{}}{WORD} {WORD} {WORD}\r\n\r\n".encode())
    writer.write_eof()
    await reader.read()
    writer.close()
    return own


async def report(swarm: LocalSwarm, name: str, folder: Path, *more: str) -> tuple[dict[str, bytes], str]:
    """The members of a report by name, and what the command said."""
    path = folder / f"{name}.tar.gz"
    port = swarm[name].url.rpartition(":")[2]
    process = await create_subprocess_exec(
        NODE_COMMAND, "report", str(path), *more, "--port", port, env=swarm.environment(name), stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
        members = {key.removeprefix(f"{name}/"): file.read() for key, file in files.items() if file is not None}
    return members, out.decode() + err.decode()


def check_members(members: dict[str, bytes], said: str, swarm: LocalSwarm, without: tuple[str, ...] = ()) -> None:
    wanted = [f"{part.name}.error.txt" if part.name in without else part.name for part in PARTS]
    assert sorted(members) == sorted(["README.txt", *wanted])
    for name, data in {**members, "(said)": said.encode()}.items():
        for secret in (swarm.key, API_KEY, WORD):
            assert secret.encode() not in data, f"{secret} is in {name}"
    for name in wanted:
        assert members[name] or name == "expert-server.log"
        if name.endswith(".json"):
            json.loads(members[name])


def logs_of(swarm: LocalSwarm, name: str) -> Path:
    return Path(swarm.environment(name)["SWARM_NODE_STATE_FOLDER"]) / name / "logs"


@pytest.mark.parametrize("name", NODES)
async def test_it_is_whole_and_without_keys_and_texts(swarm: LocalSwarm, name: str, tmp_path: Path) -> None:
    members, said = await report(swarm, name, tmp_path)
    check_members(members, said, swarm, () if name == ROUTER else ("llama-server.log",))
    status: dict[str, Any] = json.loads(members["status.json"])
    assert status["name"] == name and status["router"]["name"] == ROUTER and len(status["nodes"]) == 3
    assert json.loads(members["settings.json"])["api"] == {
        "key": "(not shown)", "allowed_hosts": [], "allowed_origins": []
    }  # fmt: skip
    assert json.loads(members["trace.json"])["router"] == ROUTER
    assert b"swarm_node_requests" in members["metrics.txt"] or b"# TYPE" in members["metrics.txt"]
    log = members["agent.log"].decode()
    assert " starts, process " in log and "request=" in log and "bytes from a client" in log
    if name == ROUTER:
        own = members["llama-server.log"].decode()
        assert "got exception: " in own and "[lines left out: " in own
        assert WORD in (logs_of(swarm, name) / "router.log").read_text(), "this test would find nothing"
    assert WORD in (logs_of(swarm, name) / "agent.log").read_text(), "this test would find nothing"


async def test_a_request_is_found_on_each_node_that_had_to_do_with_it(swarm: LocalSwarm, tmp_path: Path) -> None:
    asked, router, third = [
        (await report(swarm, name, tmp_path))[0]["agent.log"].decode() for name in (OTHER, *NODES[::2])
    ]
    line = f"request={REQUESTS[OTHER]}"
    assert line in asked and line in router and line not in third
    assert any("bytes from a client" in one for one in asked.splitlines() if line in one)
    assert any("bytes from a node" in one for one in router.splitlines() if line in one)


async def test_as_json_and_never_over_another_file(swarm: LocalSwarm, tmp_path: Path) -> None:
    _, said = await report(swarm, OTHER, tmp_path, "--json")
    found = json.loads(said)
    assert found["path"] == str(tmp_path / f"{OTHER}.tar.gz")
    assert [part["name"].removesuffix(".error.txt") for part in found["parts"]] == [part.name for part in PARTS]
    before = (tmp_path / f"{OTHER}.tar.gz").read_bytes()
    with pytest.raises(AssertionError, match="is there already; --force replaces it"):
        await report(swarm, OTHER, tmp_path)
    assert (tmp_path / f"{OTHER}.tar.gz").read_bytes() == before
    await report(swarm, OTHER, tmp_path, "--force")


async def test_a_node_that_was_killed_gives_what_it_left(swarm: LocalSwarm, tmp_path: Path) -> None:
    for name in (THIRD, ROUTER):
        os.kill(swarm[name].process.pid, signal.SIGKILL)
        await swarm[name].process.wait()
        members, said = await report(swarm, name, tmp_path)
        gone = ("status.json", "peers.json", "trace.json", "metrics.txt")
        check_members(members, said, swarm, gone if name == ROUTER else (*gone, "llama-server.log"))
        assert b"no node found" in members["status.json.error.txt"]
        assert b"bytes from a client" in members["agent.log"]
    assert b"listening on http" in members["llama-server.log"]
