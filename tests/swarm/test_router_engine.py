"""The router engine: starts that fail say why, and the routing table changes while llama-server runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

import kernels
from node.commands.chat import ChatError, stream_chat
from node.models.demo import demo_model
from node.models.index import read_model
from node.router.control import PROTOCOL_VERSION
from node.router.engine import router_engine
from node.router.failure import ExpertFailure, RouterEngineError, TableNotUsed
from node.router.llama_server import EngineOptions
from node.router.table import RoutingNode, RoutingSlice, RoutingTable
from node.slices import Slice
from rigs import swarm as swarm_module
from rigs.swarm import ANSWER, VICTIM, Rig

module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with swarm_module.rig(tmp_path_factory.mktemp("swarm")) as running:
        yield running


async def pairs(rig: Rig) -> list[int]:
    return [(await rig.statistics(process))["pairs"] for process in rig.held.servers.processes]


@module_loop
async def test_slices_move_to_another_server_between_two_questions(rig: Rig) -> None:
    pids = rig.pids
    layers = sorted(rig.held.programs.layers)
    moved = layers[3:13]
    assert await rig.ask() == ANSWER
    processes = rig.held.servers.processes
    await rig.load(processes[2], [Slice(layer, 3, 5) for layer in moved])
    await rig.use_table(
        slices=tuple(
            dataclasses.replace(one, nodes=(2,)) if one.layer in moved and one.first == 3 else one
            for one in rig.table.slices
        )
    )
    # Asked for one of these now, the former holder would refuse.
    for layer in moved:
        await rig.run(processes[1].drop(rig.held.index.model_id, Slice(layer, 3, 5)))
    middle = await pairs(rig)
    assert await rig.ask() == ANSWER
    after = await pairs(rig)
    gained = [b - a for a, b in zip(middle, after, strict=True)]
    # Every expert is used for every token, so the pairs count slices: of 10 layers one of 3 experts has moved.
    n_rows = gained[0] // (3 * len(layers))
    assert gained == [3 * len(layers) * n_rows, 3 * (len(layers) - 10) * n_rows, (2 * len(layers) + 3 * 10) * n_rows]
    assert n_rows >= 8
    await rig.load(processes[1], [Slice(layer, 3, 5) for layer in moved])
    await rig.use_table()
    assert await rig.ask() == ANSWER
    assert rig.pids == pids and not rig.engine.failures


@module_loop
async def test_a_table_without_a_slice_fails_by_name_and_a_full_one_mends_it(rig: Rig) -> None:
    pids = rig.pids
    layer = sorted(rig.held.programs.layers)[7]
    await rig.use_table(slices=swarm_module.without(rig.table, layer, 3))
    started_s = time.monotonic()
    failure = await rig.ask_in_vain()
    assert time.monotonic() - started_s < 5, "nothing to wait for"
    assert failure.layer == layer and failure.node == ""
    assert failure.reason == f"no node holds experts 3 to 5 of layer {layer}"
    assert str(failure) == f"layer {layer}: no node holds experts 3 to 5 of layer {layer}"
    await rig.use_table()
    assert await rig.ask() == ANSWER
    assert rig.pids == pids


@module_loop
async def test_an_older_table_is_ignored(rig: Rig) -> None:
    used = rig.newer_table()
    await rig.engine.use_table(used)
    assert rig.engine.table_in_use is used
    with pytest.raises(
        TableNotUsed, match=r"table 1 of term 1: it is older \(term 1, sequence 1\) than the one in use"
    ):
        await rig.engine.use_table(dataclasses.replace(rig.table, sequence=1, slices=()))
    with pytest.raises(TableNotUsed, match="term 0: it is older"):
        await rig.engine.use_table(dataclasses.replace(rig.table, sequence=10**6, term=0, slices=()))
    assert rig.engine.table_in_use is used and "it is older" in rig.engine.table_problem
    for _ in range(2):
        assert await rig.ask() == ANSWER


@module_loop
async def test_a_table_that_is_refused_is_a_problem_until_a_good_one_comes(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    used = rig.newer_table()
    await rig.engine.use_table(used)
    nodes = (*rig.table.nodes[:2], dataclasses.replace(rig.table.nodes[2], host="a.name"))
    refused, good = rig.newer_table(nodes=nodes), rig.newer_table()
    # Two on their way: each is answered for itself.
    answers = await asyncio.gather(rig.engine.use_table(refused), rig.engine.use_table(used), return_exceptions=True)
    assert isinstance(answers[0], TableNotUsed) and "node 2 of the routing table (node2): " in str(answers[0])
    assert answers[1] is None
    assert "a.name" in caplog.text and f"routing table {refused.sequence}" in caplog.text
    # The same again is in use, and no problem.
    assert rig.engine.table_in_use is used and rig.engine.table_problem == ""
    with pytest.raises(TableNotUsed):
        await rig.engine.use_table(refused)
    assert "a.name" in rig.engine.table_problem
    assert await rig.ask() == ANSWER
    await rig.engine.use_table(good)
    assert rig.engine.table_in_use is good and rig.engine.table_problem == ""


@module_loop
async def test_a_hold_lasts_as_long_as_it_says(rig: Rig) -> None:
    started_s = time.monotonic()
    rig.engine.hold(1500)
    assert await rig.ask(max_tokens=1) == "The"
    assert time.monotonic() - started_s >= 1.5
    for wrong_ms in (-1, 2001):
        with pytest.raises(ValueError, match="hold"):
            rig.engine.hold(wrong_ms)
    assert "llamacpp:" in await rig.engine.metrics_text(rig.session)
    rig.engine.hold(2000)
    with pytest.raises(RouterEngineError, match="is being held"):
        await rig.engine.metrics_text(rig.session)
    rig.engine.hold(0)
    assert "llamacpp:" in await rig.engine.metrics_text(rig.session)
    assert await rig.ask() == ANSWER


@module_loop
async def test_a_slice_that_its_server_does_not_hold_fails_at_once(rig: Rig) -> None:
    layer = sorted(rig.held.programs.layers)[5]
    await rig.run(rig.victim.drop(rig.held.index.model_id, Slice(layer, 3, 5)))
    try:
        started_s = time.monotonic()
        failure = await rig.ask_in_vain()
        assert time.monotonic() - started_s < 5
        assert (failure.node, failure.layer, failure.first, failure.last) == (VICTIM, layer, 3, 5)
        assert failure.reason.startswith("not_held: ")
    finally:
        await rig.load(rig.victim, [Slice(layer, 3, 5)])
    assert await rig.ask() == ANSWER


@module_loop
async def test_statistics_arrive(rig: Rig) -> None:
    async with asyncio.timeout(10):
        while rig.engine.statistics.get("calls", 0) < 90:
            await rig.ask(max_tokens=2)
    statistics = rig.engine.statistics
    assert {entry["layer"] for entry in statistics["layers"]} == set(rig.held.programs.layers)
    assert [entry["name"] for entry in statistics["nodes"]] == ["node0", VICTIM, "node2"]


@module_loop
async def test_traces_are_made_when_they_are_asked_for(rig: Rig) -> None:
    before = await rig.engine.trace()
    await rig.ask(max_tokens=4)
    # Each has an answer of its own.
    after = await asyncio.gather(*(rig.engine.trace() for _ in range(5)))
    assert len({trace["id"] for trace in [before, *after]}) == 6
    assert all({**trace, "id": 0} == {**after[0], "id": 0} for trace in after)
    assert after[0]["passes"] >= before["passes"] + 4
    assert after[0]["nodes"] == ["node0", VICTIM, "node2"]
    assert {entry["layer"] for entry in after[0]["layers"]} == set(rig.held.programs.layers)


@module_loop
async def test_requests_need_the_key(rig: Rig) -> None:
    with pytest.raises(ChatError, match=r"(?i)api key"):
        async for _ in stream_chat(
            rig.session, rig.engine.url, [{"role": "user", "content": "Hi"}], headers={}, max_tokens=1
        ):
            pass
    command_line = " ".join(psutil.Process(rig.engine.process.pid).cmdline())
    assert rig.engine.api_key not in command_line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table_to(port: int, **changes: Any) -> RoutingTable:
    """The whole demo model on one server."""
    index = read_model(demo_model())
    fields: dict[str, Any] = {
        "model": index.model_id,
        "nodes": (RoutingNode("alpha", "127.0.0.1", port),),
        "slices": tuple(RoutingSlice(layer, 0, index.n_expert - 1, (0,)) for layer in index.expert_layers),
        "sequence": 1,
        "term": 1,
        "deadline_floor_ms": 1000,
    }
    return RoutingTable(**(fields | changes))


async def failed_start(tmp_path: Path, model: Path, table: RoutingTable, **options: Any) -> str:
    """The error of an engine that cannot start, which leaves nothing behind."""
    children = set(psutil.Process().children())
    failures: list[ExpertFailure] = []
    started_s = time.monotonic()
    with pytest.raises(RouterEngineError) as caught:
        async with router_engine(
            str(model), table, EngineOptions(context=512), log_path=tmp_path / "router.log", on_failure=failures.append
        ):
            pass
    assert time.monotonic() - started_s < 15
    assert set(psutil.Process().children()) <= children
    return str(caught.value)


async def test_a_server_that_is_down_fails_the_start(tmp_path: Path) -> None:
    error = await failed_start(tmp_path, demo_model(), table_to(free_port()))
    assert error.startswith(
        "llama-server's first decode failed: layer 0, experts 0 to 7 on node alpha: no success within"
    )
    assert "Connection refused" in error


async def test_a_table_that_covers_nothing_fails_the_start(tmp_path: Path) -> None:
    error = await failed_start(tmp_path, demo_model(), table_to(free_port(), slices=()))
    assert error == "llama-server's first decode failed: layer 0: no node holds any expert of layer 0"


async def test_a_table_that_is_refused_fails_the_start(tmp_path: Path) -> None:
    error = await failed_start(tmp_path, demo_model(), table_to(1, nodes=(RoutingNode("alpha", "a.name", 1),)))
    assert error.startswith(
        "the Swarm backend refuses routing table 1 of term 1: node 0 of the routing table (alpha): "
    )


async def test_a_file_that_llama_cpp_cannot_load_fails_the_start_with_its_words(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    with demo_model().open("rb") as file:
        damaged.write_bytes(file.read(1_000_000))
    error = await failed_start(tmp_path, damaged, table_to(free_port()))
    assert error.startswith("llama-server ended with status 1:\n")
    assert "damaged.gguf" in error and "failed to load model" in error


HELLO: dict[str, Any] = {"type": "hello", "version": PROTOCOL_VERSION, "build": kernels.build_id(), "pid": 1}

# Answers /health as llama-server does, and greets the control channel as it is told to.
FAKE_SERVER = """#!{python}
import http.server, json, os, socket, sys
hello = {hello!r}
if hello:
    control = socket.socket(socket.AF_UNIX)
    control.connect(os.environ["SWARM_CONTROL"].removeprefix("unix:"))
    control.sendall(hello.encode() + b"\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
print("the last words of the log", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hello: dict[str, Any] | None) -> None:
    program = tmp_path / "llama-server"
    program.write_text(FAKE_SERVER.format(python=sys.executable, hello=json.dumps(hello) if hello else ""))
    program.chmod(0o755)
    real = kernels.native_path
    monkeypatch.setattr(kernels, "native_path", lambda name: program if name == "llama-server" else real(name))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"build": "0123456789abcdef"}, "of build 0123456789abcdef, protocol 1"), ({"version": 2}, "protocol 2")],
)
async def test_a_backend_of_another_build_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    fake_server(tmp_path, monkeypatch, HELLO | changes)
    error = await failed_start(tmp_path, demo_model(), table_to(free_port()))
    assert words in error and kernels.build_id() in error and "Reinstall swarm-node" in error


async def test_a_server_without_the_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path, monkeypatch, None)
    error = await failed_start(tmp_path, demo_model(), table_to(free_port()))
    assert error == "llama-server runs without the Swarm backend:\nthe last words of the log"


async def test_tables_are_answered_also_through_a_new_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server(tmp_path, monkeypatch, HELLO)
    sockets: list[str] = []
    real = asyncio.start_unix_server

    async def start(*arguments: Any, path: Path, **options: Any) -> asyncio.Server:
        sockets.append(str(path))
        return await real(*arguments, path=path, **options)

    monkeypatch.setattr(asyncio, "start_unix_server", start)
    first = table_to(1)
    tables = [dataclasses.replace(first, sequence=sequence) for sequence in range(1, 70)]
    async with router_engine(str(demo_model()), tables[0], log_path=tmp_path / "router.log") as engine:
        with pytest.raises(TableNotUsed, match=r"has not answered routing table 2 within 0\.1 s"):
            await engine.use_table(tables[1], timeout_s=0.1)
        waiting = [asyncio.create_task(engine.use_table(table)) for table in tables[2:4]]
        await asyncio.sleep(0)
        reader, writer = await asyncio.open_unix_connection(sockets[0])
        writer.write(json.dumps(HELLO).encode() + b"\n")
        sent = json.loads(await reader.readline())
        # The last one, for all that were lost with the connection before.
        assert sent["type"] == "table" and sent["table"] == json.loads(tables[3].to_json())
        answer = {"type": "table", "id": sent["id"], "ok": True}
        writer.write((json.dumps(answer) + "\n").encode() * 2)
        await asyncio.gather(*waiting)
        assert engine.table_in_use is tables[3] and engine.table_problem == ""
        # A backend that answers nothing any more.
        waiting = [asyncio.create_task(engine.use_table(table, timeout_s=5)) for table in tables[4:]]
        with pytest.raises(TableNotUsed, match="answers no routing table"):
            await waiting[0]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(RouterEngineError, match=r"gave no trace within 0\.1 s"):
            await engine.trace(timeout_s=0.1)
        asked = asyncio.create_task(engine.trace(timeout_s=5))
        await asyncio.sleep(0)
        engine.hold(1100)
        lines = [json.loads(await reader.readline()) for _ in tables[4:]]
        assert [line["table"]["sequence"] for line in lines] == [table.sequence for table in tables[4:]]
        assert [json.loads(await reader.readline()) for _ in range(3)] == [
            {"type": "trace", "id": 1},
            {"type": "trace", "id": 2},
            {"type": "hold", "ms": 1100},
        ]
        # The first answer is too late, and no answer to the second request.
        for answer in ({"type": "trace", "id": 1, "passes": 1}, {"type": "trace", "id": 2, "passes": 2}):
            writer.write(json.dumps(answer).encode() + b"\n")
        assert (await asked)["passes"] == 2
        writer.close()


async def test_a_long_folder_for_temporary_files_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    fake_server(tmp_path, monkeypatch, HELLO)
    async with (
        router_engine(str(demo_model()), table_to(free_port()), log_path=tmp_path / "router.log") as engine,
        aiohttp.ClientSession() as session,
        session.get(f"{engine.url}/health") as response,
    ):
        assert response.status == 200
    assert engine.process.returncode is not None
    assert list(folder.iterdir()) == []
