"""The parent's side of the expert server: orders, crashes and restarts, and a child that never outlives it."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from node.agent.expert_role import ExpertRole
from node.errors import ExpertProcessError, ExpertProcessExited, ExpertProcessGaveUp, ModelError
from node.expert_server import process as process_module
from node.expert_server import wire
from node.expert_server.process import ExpertProcess, ProcessEvent
from node.parent_death import child_environment
from node.paths import PYTHON_MODULE
from node.slices import Slice
from rigs import ROOT
from rigs.fake_server import COMMAND, MODEL, call, get, is_gone, load, order, post, server, until, url
from rigs.timing import quickly

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def test_load_and_drop() -> None:
    async with server() as process:
        seen = []
        orders = [order(), order(layer=1, kind="missing"), order(layer=2)]
        answers = await process.load(
            MODEL,
            {n: "swarm-program 1\ninput row\n" for n in range(3)},
            dict.fromkeys(range(3), 8),
            dict.fromkeys(range(3), 4),
            orders,
            seen.append,
        )
        assert [answer.reason is None for answer in answers] == [True, False, True]
        assert [answer.slice.layer for answer in answers] == [0, 1, 2] == sorted(answer.slice.layer for answer in seen)
        assert answers[0].memory_bytes == 3 * 16 * 12 * 4
        await process.drop(MODEL, Slice(0, 2, 4))
        async with aiohttp.ClientSession() as session:
            slices = (await get(session, process, "/v1/stats"))[1]["slices"]
        assert [(one["layer"], one["state"]) for one in slices] == [(1, "failed"), (2, "ready")]


async def test_files_that_changed_are_not_loaded_again_after_a_crash() -> None:
    events: list[ProcessEvent] = []
    asked: list[str] = []

    def check(model: str) -> None:
        asked.append(model)
        raise ModelError("the file changed")

    async with (
        server(order(), on_event=events.append, check_files=check) as process,
        aiohttp.ClientSession() as session,
    ):
        supervising = asyncio.create_task(process.supervise())
        assert process.held == {(MODEL, Slice(0, 2, 4))} and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: any(event.kind == "reloaded" for event in events), 10)
        assert asked == [MODEL] and process.held == frozenset()
        assert events[-1].message == "the file changed"
        answer = await post(session, process, call())
        assert isinstance(answer, wire.CallError)
        await process.stop()
        await asyncio.wait_for(supervising, 1)


def test_a_holder_forgets_what_was_not_loaded_again(tmp_path: Path) -> None:
    told: list[None] = []
    holder = ExpertRole(
        "alpha",
        host="127.0.0.1",
        port=0,
        device="CPU",
        threads=1,
        max_rows=1,
        memory_bytes=1,
        log_path=tmp_path / "log",
        environment={},
        on_change=lambda: told.append(None),
    )
    process = SimpleNamespace(held={(MODEL, Slice(0, 0, 3)), (MODEL, Slice(1, 0, 3))})
    holder.process = process  # type: ignore[assignment]
    holder._held_model = SimpleNamespace(model_id=MODEL)  # type: ignore[assignment]
    holder._held = {Slice(0, 0, 3): 1, Slice(1, 0, 3): 1}
    holder._process_event(ProcessEvent("exited", "", -9))
    assert holder.ready == ()
    process.held = {(MODEL, Slice(1, 0, 3))}
    holder._process_event(ProcessEvent("reloaded", "the file changed"))
    assert holder.ready == ((1, 0, 3),) and holder._wanted_changed.is_set() and len(told) == 2


async def test_orders_without_a_process_are_refused() -> None:
    process = ExpertProcess("alpha", command=COMMAND)
    with pytest.raises(ExpertProcessExited, match="alpha"):
        await load(process, order())
    await process.start()
    with pytest.raises(ExpertProcessError, match="runs already"):
        await process.start()
    await process.stop()
    assert not process.running
    with pytest.raises(ExpertProcessExited):
        await process.drop(MODEL, Slice(0, 2, 4))
    await process.start()
    assert process.running
    await process.stop()


async def test_a_process_that_cannot_start_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = ExpertProcess("alpha", command=(*COMMAND, "--nonsense"), stderr=log)
    with pytest.raises(ExpertProcessExited, match="code 2") as caught:
        await process.start()
    assert caught.value.returncode == 2 and "--nonsense" in log.read_text()
    with pytest.raises(OSError):
        await ExpertProcess("alpha", command=("/no/such/program",)).start()


async def test_an_order_fails_when_the_process_dies() -> None:
    async with server() as process:
        loading = asyncio.create_task(load(process, order(kind="slow")))
        async with aiohttp.ClientSession() as session:

            async def is_loading() -> bool:
                return (await get(session, process, "/ready"))[0] == 503

            await until(is_loading)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ExpertProcessExited, match="SIGKILL") as caught:
            await loading
        assert caught.value.returncode == -signal.SIGKILL
        assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("fixed_port", [True, False])
async def test_abort_in_a_call_costs_the_process_and_it_comes_back_with_its_slices(fixed_port: bool) -> None:
    events: list[ProcessEvent] = []
    port = free_port() if fixed_port else 0
    environment = {"SWARM_DEBUG_ABORT": "1"}
    async with (
        server(order(), environment=environment, port=port, on_event=events.append) as process,
        aiohttp.ClientSession() as session,
    ):
        supervising = asyncio.create_task(process.supervise())
        assert (await load(process, order(layer=1), order(layer=2)))[0].reason is None
        await process.drop(MODEL, Slice(2, 2, 4))
        first_pid = process.pid
        with pytest.raises(aiohttp.ClientError):
            await post(session, process, call(model="abort"))
        await until(lambda: any(event.kind == "reloaded" for event in events), 10)
        assert process.pid != first_pid
        if fixed_port:
            assert process.port == port
        for layer in (0, 1):
            assert isinstance(await post(session, process, call(layer=layer)), wire.CallReply)
        answer = await post(session, process, call(layer=2))
        assert isinstance(answer, wire.CallError) and answer.kind == "not_held", "what was dropped stays dropped"
        assert [event.kind for event in events] == ["started", "exited", "started", "reloaded"]
        assert events[1].returncode == -signal.SIGABRT and "SIGABRT" in events[1].message
        await process.stop()
        await asyncio.wait_for(supervising, 1)


async def test_it_gives_up_after_five_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "BACK_OFF_FIRST_S", 0.01)
    events: list[ProcessEvent] = []
    async with server(order(), on_event=events.append) as process:
        supervising = asyncio.create_task(process.supervise())
        killed = set()
        while not supervising.done():
            if process.running and process.pid not in killed:
                assert process.pid is not None
                killed.add(process.pid)
                os.kill(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        with pytest.raises(ExpertProcessGaveUp, match=r"5 times.*SIGKILL.*alpha"):
            await supervising
        assert len(killed) == 5 and events[-1].kind == "gave_up"


async def test_back_off_doubles_and_stop_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "BACK_OFF_FIRST_S", 60.0)
    monkeypatch.setattr(process_module, "BACK_OFF_MOST_S", 60.0)
    async with server() as process:
        supervising = asyncio.create_task(process.supervise())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.sleep(0)
        assert not supervising.done()
        await process.stop()
        await asyncio.wait_for(supervising, 1)


async def test_a_process_that_ignores_everything_is_killed_within_four_seconds(tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        'print(\'{"type": "listening", "version": 1, "host": "127.0.0.1", "port": 1}\', flush=True)\n'
        "time.sleep(600)\n"
    )
    process = ExpertProcess("alpha", command=(sys.executable, str(stubborn)))
    await process.start()
    with quickly(4):
        await process.stop()
    assert await process.wait() == -signal.SIGKILL


async def test_a_stopped_process_is_stopped_too() -> None:
    async with server(order()) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with quickly(4):
            await process.stop()
        assert not process.running


async def test_counters_and_memory_outlive_a_crash() -> None:
    async with server(order(), environment={"SWARM_DEBUG_ABORT": "1"}) as process, aiohttp.ClientSession() as session:
        supervising = asyncio.create_task(process.supervise())
        assert process.held_bytes == 3 * 16 * 12 * 4
        for experts in (((2, 3),), ((4,), (2,))):
            assert isinstance(await post(session, process, call(experts)), wire.CallReply)
        assert isinstance(await post(session, process, call(layer=7)), wire.CallError)
        await until(lambda: process.counters["errors not_held"] == 1)
        assert process.counters["calls"] == 2
        assert process.counters["pairs"] == 4
        for name in ("bytes_received", "bytes_sent", "compute_us"):
            assert process.counters[name] > 0
        before = {name: process.counters[name] for name in process.counters}
        first_pid = process.pid
        with pytest.raises(aiohttp.ClientError):
            await post(session, process, call(model="abort"))
        await until(lambda: not process.running)
        assert process.held_bytes == 0
        assert {name: process.counters[name] for name in before} == before
        await until(lambda: process.pid != first_pid and process.held_bytes > 0, 10)
        assert isinstance(await post(session, process, call()), wire.CallReply)
        await until(lambda: process.counters["calls"] == 3)
        assert all(process.counters[name] >= value for name, value in before.items())
        await process.drop(MODEL, Slice(0, 2, 4))
        assert process.held_bytes == 0
        await process.stop()
        await asyncio.wait_for(supervising, 1)


def test_a_parent_that_reads_nothing_does_not_hold_up_calls() -> None:
    """Its pipe is full at last; then the counters wait, and not the server."""
    source = "import node.expert_server.orders as s; s.STATISTICS_PERIOD_S = 0; import runpy; "
    source += f"runpy.run_path({COMMAND[1]!r})"
    child = subprocess.Popen(
        [COMMAND[0], "-c", source, "--port", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        cwd=ROOT,
    )
    assert child.stdout is not None

    async def call_in_vain(port: int, times: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            for _ in range(times):
                async with session.post(
                    f"http://127.0.0.1:{port}/v1/ffn", data=b"", headers={"Content-Type": wire.CONTENT_TYPE}
                ) as response:
                    assert response.status == 400

    try:
        port = json.loads(child.stdout.readline())["port"]
        fcntl.fcntl(child.stdout.fileno(), fcntl.F_SETPIPE_SZ, 8192)
        asyncio.run(call_in_vain(port, 300))
        os.set_blocking(child.stdout.fileno(), False)
        told = child.stdout.read()
        # Each line has some 160 bytes.
        assert 10 < told.count(b'"statistics"') < 60
    finally:
        child.kill()
        child.wait()


async def test_lines_that_answer_nothing_are_ignored(tmp_path: Path) -> None:
    chatty = tmp_path / "chatty.py"
    chatty.write_text(
        "import sys\n"
        "print('hello'); print('[]'); print('{\"type\": \"ready\"}')\n"
        'print(\'{"type": "listening", "version": 1, "host": "127.0.0.1", "port": 1}\', flush=True)\n'
        "sys.stdin.readline()\n"
        "print('x' * 3_000_000, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = ExpertProcess("alpha", command=(sys.executable, str(chatty)))
    await process.start()
    assert process.port == 1
    with pytest.raises(ExpertProcessExited):
        await load(process, order())
    assert await process.wait() == -signal.SIGKILL, "a line without end is the end of it"


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from node.expert_server.process import ExpertProcess

async def main():
    process = ExpertProcess("alpha", command={command!r})
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stuck", [False, True])
def test_the_child_dies_with_a_parent_that_is_killed(stuck: bool) -> None:
    source = PARENT.format(path=[str(ROOT)], command=COMMAND)
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert not is_gone(child)
        if stuck:
            os.kill(child, signal.SIGSTOP)  # Cannot read its stdin: only the kernel's signal reaches it.
        parent.kill()
        parent.wait()
        asyncio.run(until(lambda: is_gone(child), 3))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_another_program_is_tied_to_its_parent() -> None:
    source = (
        f"import subprocess, sys, time; sys.path[:0] = [{str(ROOT)!r}]\n"
        "from node.parent_death import child_environment\n"
        "child = subprocess.Popen([sys.executable, '-m', 'node.parent_death', 'sleep', '600'], env=child_environment(),"
        f" cwd={str(ROOT)!r})\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        asyncio.run(until(lambda: b"sleep" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0], 10))
        parent.kill()
        parent.wait()
        asyncio.run(until(lambda: is_gone(child), 3))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_child_whose_parent_is_gone_already_exits() -> None:
    environment = {**os.environ, "SWARM_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    command = [sys.executable, "-m", "node.parent_death", "echo", "alive"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=10)
    assert done.returncode == 1 and done.stdout == b""


async def test_calls_reach_it_at_the_port_it_reports() -> None:
    async with server(order()) as process, aiohttp.ClientSession() as session:
        assert url(process).endswith(f":{process.port}/v1/ffn") and process.listening["devices"][0]["type"] == "cpu"
        assert isinstance(await post(session, process, call()), wire.CallReply)


async def test_a_log_that_cannot_be_written_keeps_nothing_from_running(tmp_path: Path) -> None:
    (tmp_path / "experts.log").mkdir()
    process = ExpertProcess("alpha", command=COMMAND, stderr=tmp_path / "experts.log")
    await process.start()
    assert process.running
    await process.stop()


def test_python_files_in_the_current_folder_are_not_run(tmp_path: Path) -> None:
    """Nodes are started in folders of models, which may be shared."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(7)")
    unsafe = [argument for argument in PYTHON_MODULE if argument != "-P"]
    for command, status in ((unsafe, 7), (PYTHON_MODULE, 0)):
        # Where nothing is installed, this checkout.
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "node.expert_server", "--help"], cwd=tmp_path, capture_output=True, env=variables
        )
        assert done.returncode == status, done.stderr
