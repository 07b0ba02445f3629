"""Logs on disk: bounded, readable after a death, and no trouble where they cannot be written."""

import asyncio
import logging
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import log_files
from node.log_files import (
    LOG_BYTES_MAX,
    START_MARK,
    AgentLogHandler,
    begin_log,
    bound_log,
    keep_bounded,
    log_folder,
    open_log,
    parts_of,
)
from node.log_levels import LogLevels, apply_levels
from node.logs import SHOWN, add_file, configure

log = logging.getLogger("node.test")
SECRET = "a-secret-of-this-test"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    for one in set(root.handlers) - set(before[1]):
        one.close()
    apply_levels(LogLevels("warning"))
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    logging.captureWarnings(False)


def test_the_agents_log_is_bounded_dated_and_without_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log_folder(tmp_path) / "agent.log"
    configure("text", "info", secrets=[SECRET])
    add_file(AgentLogHandler(path), [SECRET])
    log.info("first %s", SECRET)
    log.info("on the screen", extra=SHOWN)
    text = path.read_text()
    assert text.splitlines()[0][4:5] == "-" and text.splitlines()[0].endswith(" info    first [redacted]")
    assert "on the screen" in text and "on_screen" not in text
    shown = capsys.readouterr().err
    assert "first [redacted]" in shown and "on the screen" not in shown
    for number in range(30):
        log.info("%d %s", number, "x" * 100_000)
    older, newer = parts_of(path)
    assert 0 < newer.stat().st_size <= LOG_BYTES_MAX and 0 < older.stat().st_size <= LOG_BYTES_MAX
    assert sorted(one.name for one in path.parent.iterdir()) == ["agent.log", "agent.log.1"]
    assert "\n    " not in newer.read_text() and " 29 x" in newer.read_text()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_log_that_cannot_be_written_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    add_file(AgentLogHandler(Path("/dev/full")), [])
    log.info("one")
    log.info("two")
    shown = capsys.readouterr().err
    assert "info    one" in shown and "info    two" in shown and "Logging error" not in shown
    assert shown.count("cannot be written any more") == 1


def test_no_log_is_worth_a_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").touch()
    folder = log_folder(tmp_path)
    assert "logs cannot be made" in caplog.text
    with open_log(folder / "experts.log") as file:
        file.write(b"what nobody reads")
    assert "no log is kept in" in caplog.text and "experts.log" in caplog.text
    assert (tmp_path / "logs").read_bytes() == b""


def test_a_process_adds_to_its_log(tmp_path: Path) -> None:
    path = tmp_path / "experts.log"
    for word in (b"one ", b"two"):
        with open_log(path) as file:
            file.write(word)
    assert path.read_bytes() == b"one two"


def test_a_new_process_begins_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    begin_log(path)
    assert path.read_bytes().startswith(START_MARK) and not parts_of(path)[0].exists()
    with path.open("ab") as file:
        file.write(b"the first life\n")
    begin_log(path)
    older, newer = (one.read_bytes() for one in parts_of(path))
    assert older.startswith(START_MARK) and b"the first life" in older
    assert newer.startswith(START_MARK) and b"life" not in newer
    begin_log(tmp_path / "no such folder" / "router.log")  # which the process itself will complain of


CHILD = (
    "import sys\nfor line in sys.stdin:\n print(line[:-1] * 1000, file=sys.stderr, flush=True)\n print('.', flush=True)"
)


def test_a_child_goes_on_writing_when_its_log_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "experts.log"
    with path.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert child.stdin is not None and child.stdout is not None

    def write(number: int) -> None:
        child.stdin.write(f"{number:04}\n")
        child.stdin.flush()
        child.stdout.readline()

    for number in range(600):
        write(number)
        if number % 50 == 0:
            bound_log(path)
    child.stdin.close()
    assert child.wait() == 0
    older, newer = (one.read_text() for one in parts_of(path))
    assert LOG_BYTES_MAX - 5000 < len(older) <= LOG_BYTES_MAX
    assert "\0" not in older + newer
    lines = (older + newer).splitlines()
    assert len({len(line) for line in lines}) == 1, "a line is cut"
    assert [int(line[:4]) for line in lines] == list(range(600 - len(lines), 600))


def test_a_short_log_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "experts.log"
    path.write_bytes(b"x" * LOG_BYTES_MAX)
    bound_log(path)
    assert path.stat().st_size == LOG_BYTES_MAX and not parts_of(path)[0].exists()


async def test_logs_are_bounded_as_long_as_the_node_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_LOOK_S", 0.01)
    path = tmp_path / "experts.log"
    bounding = asyncio.create_task(keep_bounded([tmp_path / "not there", path]))
    for _ in range(2):
        with path.open("ab") as file:
            file.write(b"line\n" * LOG_BYTES_MAX)
        async with asyncio.timeout(60):
            while path.stat().st_size > LOG_BYTES_MAX:  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(0.01)
    bounding.cancel()
    assert parts_of(path)[0].stat().st_size <= LOG_BYTES_MAX
