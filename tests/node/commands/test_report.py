"""The report of a node: what may stand in it, that each part is there or says why not, and the archive itself."""

from __future__ import annotations

import argparse
import json
import os
import stat
import string
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from node.commands import report_parts
from node.commands.main import _parser
from node.commands.report import run_report
from node.commands.report_parts import PARTS
from node.commands.report_redaction import (
    BYTES_MAX,
    LINES_MAX,
    NOT_SHOWN,
    agent_log,
    environment_document,
    last_lines,
    llama_server_log,
    secrets_in,
    secrets_of,
    settings_document,
)
from node.errors import SwarmError
from node.log_files import READY_MARK, START_MARK, log_folder, mark_ready
from node.logs import Redactor
from node.settings.load import Config, load_config
from node.swarm_key import SwarmKey
from rigs.door import serve

KEY = SwarmKey(bytes(range(32))).text()
API_KEY = 'api"key\\with/all+of it'.replace(" ", "_")
WORD = "xylozaurus"


def config(**variables: str) -> Config:
    return load_config(argparse.Namespace(config=os.devnull), variables)


# ---- keys

api_keys = st.text(string.ascii_letters + string.digits + string.punctuation, min_size=8, max_size=40)
swarm_keys = st.binary(min_size=32, max_size=32).map(lambda seed: SwarmKey(seed).text())


@given(api_keys, swarm_keys)
def test_no_key_is_in_the_settings(api_key: str, swarm_key: str) -> None:
    found = settings_document(config(SWARM_API_KEY=api_key, SWARM_SWARM_KEY=swarm_key))
    assert (found["api"]["key"], found["swarm"]["key"]) == (NOT_SHOWN, NOT_SHOWN)
    assert swarm_key not in json.dumps(found)
    assert settings_document(config())["api"]["key"] == ""


@given(api_keys, swarm_keys)
def test_no_key_is_in_the_environment(api_key: str, swarm_key: str) -> None:
    keys = {
        "SWARM_API_KEY": api_key, "SWARM_SWARM_KEY": swarm_key, "SWARM_CALL_KEY": "0" * 64, "LLAMA_API_KEY": api_key,
        "LLAMA_ARG_HF_TOKEN": api_key, "SWARM_ROUTER_EXTRA_ARGUMENTS": f"--hf-token {api_key}",
    }  # fmt: skip
    found = environment_document(
        {**keys, "SWARM_NODE_PORT": "4100", "GGML_VK": "1", "AWS_SECRET": api_key, "HOME": "/"}
    )
    assert found == {**dict.fromkeys(keys, NOT_SHOWN), "SWARM_NODE_PORT": "4100", "GGML_VK": "1"}
    assert {api_key, swarm_key} <= set(secrets_in(keys))


@given(api_keys, swarm_keys, st.text(max_size=20), st.text(max_size=20))
def test_no_key_is_in_a_line(api_key: str, swarm_key: str, before: str, after: str) -> None:
    made = config(SWARM_API_KEY=api_key, SWARM_SWARM_KEY=swarm_key)
    redactor = Redactor(secrets_of(made))
    call_key = SwarmKey.parse(swarm_key).derive("call").hex()
    for secret in (swarm_key, call_key):
        for form in (secret, json.dumps(secret), repr(secret)):
            assert secret not in redactor.text(before + form + after)
    text = redactor.text(before + json.dumps({"key": api_key}) + after)
    assert "[redacted]" in text and json.dumps(api_key) not in text


def test_arguments_of_llama_server_that_may_be_keys_or_texts() -> None:
    arguments = f"--flash-attn on --hf-token {WORD} --api-prefix /x --system-prompt '{WORD} b' -hft {WORD} --a={WORD}/1"
    arguments += f" --ssl-key-file={WORD} -ngl 0 --chat-template '{WORD}'"
    shown = settings_document(config(SWARM_ROUTER_EXTRA_ARGUMENTS=arguments))["router"]["extra_arguments"]
    assert shown == [
        "--flash-attn", "on", "--hf-token", NOT_SHOWN, "--api-prefix", "/x", "--system-prompt", NOT_SHOWN, "-hft",
        NOT_SHOWN, f"--a={WORD}/1", f"--ssl-key-file={NOT_SHOWN}", "-ngl", "0", "--chat-template", NOT_SHOWN,
    ]  # fmt: skip


# ---- logs

START = START_MARK.decode() + "2026-12-01 12:00:00\n"
READY = READY_MARK.decode()
LOADING = (
    "0.00.004.349 I srv    load_model: loading model '/models/some-name.gguf'\nE llama_model_load: what is wrong\n"
)
QUIET = """\
0.12.655.794 I slot get_availabl: id  3 | task -1 | selected slot by LRU, t_last = -1
0.12.655.963 I slot launch_slot_: id  3 | task 0 | processing task, is_child = 0
0.14.087.079 I slot print_timing: id  3 | task 0 | prompt eval time =    1015.15 ms /    41 tokens \
(   24.76 ms per token,    40.39 tokens per second)
0.14.087.084 I slot print_timing: id  3 | task 0 |        eval time =     415.79 ms /     8 tokens \
(   59.40 ms per token,    16.84 tokens per second)
0.14.087.092 I slot print_timing: id  3 | task 0 |    graphs reused =          6
0.14.087.240 I slot      release: id  3 | task 0 | stop processing: n_tokens = 48, truncated = 0
0.14.180.582 I slot get_availabl: id  3 | task -1 | selected slot by LCP similarity, \
f_sim_best = 0.595 (> 0.100 thold), f_keep = 0.458
0.17.772.204 I slot print_timing: id  3 | task 10 | n_gen =    100, tg =  29.16 t/s, tg_3s =  29.45 t/s
"""


def test_what_llama_server_says_of_its_work_is_kept() -> None:
    assert llama_server_log(START + LOADING + READY + QUIET) == START + LOADING + READY + QUIET
    assert llama_server_log(QUIET) == QUIET
    assert llama_server_log("") == ""


def test_what_its_warnings_quote_is_cut() -> None:
    # As a build of it wrote them.
    line = (
        '0.14.155.438 W srv    operator(): got exception: {"error":{"code":500,"message":"[json.exception.'
        f"parse_error.101] parse error at line 1, column 51: syntax error; last read: '\\\"{WORD}'\"}}}}\n"
    )
    assert llama_server_log(START + READY + line).splitlines()[-1] == (
        '0.14.155.438 W srv    operator(): got exception: {"error":{"code":500,"[…]'
    )
    assert WORD not in llama_server_log(line)


def test_what_it_says_at_level_debug_is_left_out() -> None:
    lines = f"0.20.528.713 D srv    operator(): http: streamed chunk: data: {WORD}\n{WORD}\n\n"
    assert llama_server_log(START + READY + lines + QUIET) == START + READY + "[lines left out: 3]\n" + QUIET


def test_where_it_gave_up_is_kept() -> None:
    line = f"/build/ggml/src/ggml-cpu/ops.cpp:123: GGML_ASSERT({WORD}) failed\n"
    assert llama_server_log(line) == "/build/ggml/src/ggml-cpu/ops.cpp:123: […]\n"


# Letters that no word of its own has in that order.
texts = st.lists(
    st.sampled_from([WORD, "\n", " ", "0.00.000.001 I srv  ", "E ", "slot ", "'", '"', START, READY, LOADING])
)


@given(texts)
def test_no_text_of_a_client_is_kept_once_it_serves(parts: list[str]) -> None:
    text = "".join(parts)
    for log in (START + LOADING + READY + text, START + QUIET[:80] + "\n" + text, "\n" + text, QUIET + text):
        assert WORD not in llama_server_log(log)


@given(st.text(max_size=200))
def test_any_log_can_be_read(text: str) -> None:
    for log in (text, START + text, START + READY + text):
        llama_server_log(log)
        agent_log(log)
        last_lines(log)


def test_an_agents_log_keeps_its_lines_and_where_an_error_came_from() -> None:
    text = f"""\
2026-12-01 12:00:00 info    node beta joined request=0123abcd
2026-12-01 12:00:01 error   Error handling request from 127.0.0.1
    Traceback (most recent call last):
      File "/x/web_protocol.py", line 5, in start
        message, payload = self._messages.popleft()
    aiohttp.http_exceptions.BadStatusLine: 400, message:
      Invalid method encountered:

        b'{WORD} {WORD}'
          ^

    During handling of the above exception, another exception occurred:

    ValueError: {WORD}
    node.errors.SwarmError: our own text
2026-12-01 12:00:02 warning it says
    {WORD}
    {WORD.title()}
"""
    assert (
        agent_log(text)
        == """\
2026-12-01 12:00:00 info    node beta joined request=0123abcd
2026-12-01 12:00:01 error   Error handling request from 127.0.0.1
    Traceback (most recent call last):
      File "/x/web_protocol.py", line 5, in start
        message, payload = self._messages.popleft()
    aiohttp.http_exceptions.BadStatusLine
    During handling of the above exception, another exception occurred:
    ValueError
    node.errors.SwarmError: our own text
2026-12-01 12:00:02 warning it says
"""
    )


def test_logs_are_bounded() -> None:
    many = "".join(f"line {number}\n" for number in range(10_000))
    assert last_lines(many).splitlines() == [f"line {number}" for number in range(10_000 - LINES_MAX, 10_000)]
    long = "".join(f"{number} {'é' * 5000}\n" for number in range(500))
    kept = last_lines(long)
    assert BYTES_MAX - 11_000 < len(kept.encode()) <= BYTES_MAX
    assert kept.startswith(tuple("0123456789")) and kept.splitlines()[-1].startswith("499 ")
    assert last_lines("x" * (BYTES_MAX + 1)) == ""


# ---- the command


@asynccontextmanager
async def fake_node(name: str = "here", broken: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """A node whose documents hold the keys, as no real one's do; its port."""

    async def answer(request: web.Request) -> web.Response:
        if request.path in broken:
            return web.Response(status=500, text=f"broken: {API_KEY}")
        if request.path == "/metrics":
            return web.Response(text=f"# TYPE {KEY}\n")
        return web.json_response({"name": name, "key": KEY, API_KEY: [{"deep": f"({API_KEY})"}]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serve(app) as url:
        yield url


def options(*arguments: str) -> argparse.Namespace:
    return _parser().parse_args(["report", *arguments])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for reports, with settings and the logs of a node ``here`` that has keys in them."""

    async def nobody(session: object, options: argparse.Namespace) -> str:
        if options.url:
            return str(options.url)
        raise SwarmError("no node found")

    async def no_checks(options: argparse.Namespace) -> list[Any]:
        return []

    monkeypatch.setattr(report_parts, "find_node", nobody)
    monkeypatch.setattr("node.commands.doctor.examine", no_checks)
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "swarm.toml"
    settings.write_text(
        f"[swarm]\nkey = {json.dumps(KEY)}\n[api]\nkey = {json.dumps(API_KEY)}\n"
        "[node]\nname = 'here'\nstate_folder = 'state'\n"
    )
    settings.chmod(0o600)
    state = tmp_path / "state" / "here"
    state.mkdir(parents=True)
    logs = log_folder(state)
    (logs / "agent.log").write_text(f"2026-12-01 12:00:00 info    the key is {KEY} and {API_KEY}\n")
    (logs / "experts.log.1").write_text("older\n")
    (logs / "experts.log").write_text(f"newer {SwarmKey.parse(KEY).derive('call').hex()}\n")
    (logs / "router.log").write_text(START + LOADING)
    mark_ready(logs / "router.log")
    with (logs / "router.log").open("a") as file:
        file.write(f"{WORD}\n" + QUIET)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def archives(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir() if "tar" in one.name]


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        folder = path.name.removesuffix(".tar.gz")
        assert all(entry.isfile() and entry.name.startswith(f"{folder}/") for entry in archive)
        files = {entry.name.partition("/")[2]: archive.extractfile(entry) for entry in archive}
        found = {name: file.read().decode() for name, file in files.items() if file is not None}
    for name, text in found.items():
        for secret in (KEY, API_KEY, json.dumps(API_KEY)[1:-1], WORD, SwarmKey.parse(KEY).derive("call").hex()):
            assert secret not in text, f"{secret} is in {name}"
    return found


async def test_every_part_is_there(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_node() as url:
        assert await run_report(options("--url", url)) == 0
    out, err = capsys.readouterr()
    path = Path(out.strip())
    assert path.name.startswith("swarm-node-report-here-")
    assert mode(path) == 0o600
    found = members(path)
    assert sorted(found) == sorted(["README.txt", *(part.name for part in PARTS)])
    assert all(part.name in err and part.name in found["README.txt"] for part in PARTS)
    assert "which answered at " + url in found["README.txt"] and "addresses, host names" in found["README.txt"]
    assert json.loads(found["status.json"])["name"] == "here"
    assert found["expert-server.log"] == "older\nnewer [redacted]\n"
    assert "some-name.gguf" in found["llama-server.log"] and QUIET in found["llama-server.log"]
    assert json.loads(found["settings.json"])["swarm"]["key"] == NOT_SHOWN
    assert json.loads(found["machine.json"])["cpus"] == os.cpu_count()


async def test_where_no_node_answers_the_rest_is_there(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_report(options("a.tar.gz")) == 0
    found = members(machine / "a.tar.gz")
    gone = ("status.json", "peers.json", "trace.json", "metrics.txt")
    assert all(found[f"{name}.error.txt"] == "no node found\n" for name in gone)
    assert all(part.name in found for part in PARTS if part.name not in gone)
    assert "which did not answer" in found["README.txt"]
    assert "not to be had: no node found" in capsys.readouterr().err


async def test_where_half_of_it_fails_the_other_half_is_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "state" / "here" / "logs" / "router.log").unlink()
    monkeypatch.setattr(report_parts, "_machine_document", lambda: 1 / 0)
    async with fake_node(broken=("/trace", "/metrics")) as url:
        await run_report(options("a.tgz", "--url", url))
    found = members_of_tgz(machine / "a.tgz")
    assert "status 500: broken: [redacted]" in found["trace.json.error.txt"]
    assert "status 500" in found["metrics.txt.error.txt"]
    assert found["machine.json.error.txt"].startswith("ZeroDivisionError")
    assert "there is no" in found["llama-server.log.error.txt"]
    assert "status.json" in found and "peers.json" in found and "agent.log" in found


def members_of_tgz(path: Path) -> dict[str, str]:
    renamed = path.with_name(path.name.removesuffix(".tgz") + ".tar.gz")
    path.rename(renamed)
    return members(renamed)


async def test_wrong_settings_are_a_part_of_it(machine: Path) -> None:
    (machine / "swarm.toml").write_text(f"[node]\nprot = 1\nstate_folder = {json.dumps(str(machine / 'state'))}\n")
    os.environ["SWARM_NODE_STATE_FOLDER"] = str(machine / "state")
    try:
        await run_report(options("a.tar.gz"))
    finally:
        del os.environ["SWARM_NODE_STATE_FOLDER"]
    found = members(machine / "a.tar.gz")
    assert "[node] prot: unknown setting; did you mean port?" in found["settings.json.error.txt"]


async def test_the_logs_of_another_name_are_better_than_none(machine: Path) -> None:
    await run_report(options("a.tar.gz", "--name", "other"))
    assert "the key is [redacted]" in members(machine / "a.tar.gz")["agent.log"]
    await run_report(options("b.tar.gz", "--node-state-folder", str(machine / "nothing")))
    assert "no node has written a log below" in members(machine / "b.tar.gz")["agent.log.error.txt"]


async def test_no_file_is_replaced_without_force(machine: Path) -> None:
    path = machine / "a.tar.gz"
    path.write_text("mine")
    with pytest.raises(SwarmError, match="is there already; --force replaces it"):
        await run_report(options(str(path)))
    assert path.read_text() == "mine"
    await run_report(options(str(path), "--force"))
    assert "README.txt" in members(path)
    assert archives(machine) == ["a.tar.gz"]


async def test_a_place_where_nothing_can_be_written_is_said_before_the_work(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.commands.report.PARTS", ())
    monkeypatch.setattr("node.commands.report._packed", None)
    with pytest.raises(SwarmError, match="cannot be written: there is no such folder"):
        await run_report(options(str(machine / "no such folder" / "a.tar.gz")))
    for force in ((), ("--force",)):
        with pytest.raises(SwarmError, match="is a folder; name the archive in it"):
            await run_report(options(str(machine), *force))


async def test_as_json(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await run_report(options("a.tar.gz", "--json"))
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and found["path"] == str(machine / "a.tar.gz")
    by_name = {part["name"]: part for part in found["parts"]}
    assert by_name["status.json.error.txt"]["problem"] == "no node found"
    assert by_name["agent.log"]["problem"] is None and by_name["agent.log"]["bytes"] > 10


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "é", "-rf", "x" * 999, ""])
async def test_a_nodes_name_makes_no_other_path(name: str, machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_node(name) as url:
        await run_report(options("--url", url))
    path = Path(capsys.readouterr().out.strip())
    assert path.parent == Path() and path.name.startswith("swarm-node-report-") and len(path.name) < 120


def test_its_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--help")
    text = capsys.readouterr().out
    for part in ("bug report", "--force", "--json", "--url", "--name", "examples:"):
        assert part in text
