"""Whole nodes of which only one has the model's file: the others fetch what they hold of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from node.models.demo import demo_model
from node.models.pieces import expert_numbers, trunk_numbers
from node.swarm_key import SwarmKey
from node.transfer.store import ModelStore
from rigs.lan import Host, lan, needs_namespaces
from rigs.stock_answer import ANSWER, QUESTION, stock_answer
from rigs.store_cases import piece_bytes

pytestmark = needs_namespaces


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Host]]:
    with lan(tmp_path, ["one", "two", "three"]) as hosts:
        yield hosts


KEY = SwarmKey.generate().text()


def _environment(host: Host) -> dict[str, str]:
    """Nothing of this machine's model files or caches, and a key of the swarm's own."""
    home = host.folder / "home"
    home.mkdir(exist_ok=True)
    cache = str(host.folder / "cache")
    return {"HOME": str(home), "SWARM_CACHE_DIR": cache, "XDG_CACHE_HOME": "", "SWARM_SWARM_KEY": KEY}


def _start(host: Host, *arguments: str, **environment: str) -> None:
    empty = host.folder / "empty"
    empty.mkdir(exist_ok=True)
    host.start(*arguments, cwd=empty, env=_environment(host) | environment)


def _store(host: Host) -> Path:
    (folder,) = [path for path in (host.folder / "cache" / "models").iterdir() if path.is_dir()]
    return folder


def _check_disk(host: Host, status: dict[str, Any], trunk: bool = False) -> None:
    """A node's disk has what it holds, and takes what its pieces take."""
    folder = _store(host)
    with ModelStore(folder.parent).open(folder.name) or pytest.fail() as stored:
        present, pieces, index = set(stored.present), stored.pieces, stored.index
    node = next(node for node in status["nodes"] if node["name"] == host.name)
    numbers = expert_numbers(pieces)
    held = {numbers[layer, e] for layer, first, last in node["ready"] for e in range(first, last + 1)}
    assert held <= present and present < set(range(len(pieces)))
    assert set(trunk_numbers(pieces)) <= present if trunk else not set(trunk_numbers(pieces)) & present
    claimed = sum(pieces[number].bytes for number in present)
    ranges = sorted((p.offset, p.offset + p.bytes) for number in present for p in pieces[number].parts(index))
    n_runs = 1 + sum(after[0] != before[1] for before, after in pairwise(ranges))
    files = list(folder.iterdir())
    taken = sum(path.lstat().st_blocks * 512 for path in files)
    (sparse,) = [path for path in files if path.suffix == ".gguf"]
    header = min(tensor.offset for tensor in index.tensors)
    print(f"{host.name}: {claimed} bytes of pieces and {header} of header; {taken} taken, of {sparse.stat().st_size}")
    # The demo model's tensors are small: each run of experts begins and ends within a block of 4 KiB.
    assert claimed <= taken <= 1.01 * claimed + header + 4096 * (n_runs + len(files))


def test_nodes_with_empty_disks_answer_as_stock_does(three: list[Host], tmp_path: Path) -> None:
    model = demo_model()
    expected = stock_answer(model, tmp_path)
    one, two, three_ = three
    one.start("--model", str(model), cwd=one.folder, env=_environment(one) | {"SWARM_MODEL_REDUCE": "rows"})
    for host in (two, three_):
        _start(host)
    started_s = time.monotonic()
    for host in three:
        host.wait_ready(3, within_s=60)
    print(f"ready {time.monotonic() - started_s:.1f} s after the last start")
    for host in three:
        done = host.run("ask", "--max-tokens", "64", QUESTION)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip("\n") == expected.rstrip("\n")
    status = _all_hold(one)
    for host in (two, three_):
        _check_disk(host, status)

    # A node that is killed and comes back loads from its own disk.
    assert len(list((two.folder / "cache" / "models").iterdir())) == 2  # the model, and the store's lock
    before = _present(two)
    two.processes[0].kill()
    two.processes[0].wait()
    deadline_s = time.monotonic() + 20
    while one.status()["ready"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    _start(two)
    _all_hold(one)
    assert _present(two) == before
    assert one.run("ask", QUESTION).stdout.strip() == ANSWER


def _present(host: Host) -> bytes:
    return (_store(host) / "present").read_bytes()


def _all_hold(host: Host) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while True:
        status = host.wait_ready(3, within_s=60)
        if all(node["planned"] and node["ready"] == node["planned"] for node in status["nodes"]):
            return status
        assert time.monotonic() < deadline_s, (status, host.log()[-2000:])
        time.sleep(0.2)


def test_a_router_without_the_file_fetches_the_trunk(three: list[Host], tmp_path: Path) -> None:
    model = demo_model()
    expected = stock_answer(model, tmp_path)
    one, two, three_ = three
    one.start("--model", str(model), cwd=one.folder, env=_environment(one) | {"SWARM_ROUTER_ENABLED": "false"})
    _start(two, SWARM_MODEL_REDUCE="rows")
    _start(three_, "--model", model.stem, SWARM_MODEL_REDUCE="rows")
    for host in three:
        status = host.wait_ready(3, within_s=90)
    router = status["router"]["name"]
    assert router in ("two", "three")
    for host in three:
        done = host.run("ask", "--max-tokens", "64", QUESTION)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip("\n") == expected.rstrip("\n")
    status = _all_hold(one)
    for host in (two, three_):
        _check_disk(host, status, trunk=host.name == router)
    assert status["model"]["file"] == model.name
    (entry,) = status["catalogue"]
    assert (entry["file"], entry["whole"], sorted(entry["part"])) == (model.name, ["one"], ["three", "two"])
    listed = two.run("model", "list").stdout
    assert entry["id"][:12] in listed and "one" in listed


def _until(host: Host, done: Callable[[dict[str, Any]], bool], within_s: float = 40) -> dict[str, Any]:
    deadline_s = time.monotonic() + within_s
    status: dict[str, Any] = {}
    while time.monotonic() < deadline_s:
        try:
            status = host.status()
            if done(status):
                return status
        except AssertionError:  # it does not listen yet
            pass
        time.sleep(0.1)
    raise AssertionError(f"{status}\n{host.log()[-3000:]}")


def _present_bytes(host: Host) -> int:
    (info,) = ModelStore(_store(host).parent).models()
    return info.present_bytes


def _fetched_bytes(host: Host) -> float:
    (line,) = [x for x in host.curl("/metrics")[1].splitlines() if x.startswith("swarm_model_fetched_bytes_total ")]
    return float(line.split()[1])


def test_killed_in_the_middle_it_goes_on_where_it_was(three: list[Host]) -> None:
    """First who fetches is killed, then who gives."""
    model = demo_model()
    one, two = three[:2]

    def start_source() -> None:
        one.start("--model", str(model), cwd=one.folder, env=_environment(one))

    def is_fetching(status: dict[str, Any]) -> bool:
        (node,) = [node for node in status["nodes"] if node["name"] == "two"]
        return bool(re.fullmatch(r"fetching: \d+ % of [\d.]+ MB from one, \d+ MB/s", node["activity"]))

    start_source()
    # 25 MB take 8 s at this rate; what came is put on the disk every 5 s.
    _start(two, SWARM_MODEL_TRANSFER_MBIT_S="24")
    _until(two, is_fetching)
    deadline_s = time.monotonic() + 20
    while not (_store(two) / "present").exists():
        assert time.monotonic() < deadline_s, two.log()
        time.sleep(0.05)
    two.processes[0].kill()
    two.processes[0].wait()
    with ModelStore(_store(two).parent).open(_store(two).name) or pytest.fail() as stored:
        kept = sum(stored.pieces[number].bytes for number in stored.present)
        for number in stored.present:
            assert stored.manifest.verify(stored.pieces[number], piece_bytes(stored.index, stored, number))
        wanted = set(expert_numbers(stored.pieces).values())
        assert 0 < kept < 24_883_200 and set(stored.present) < wanted

    _start(two, SWARM_MODEL_TRANSFER_MBIT_S="24")
    _until(two, is_fetching)
    two.processes[1].send_signal(signal.SIGINT)
    assert two.processes[1].wait(5) in (0, 130)
    assert two.pids() == [] and "Traceback" not in two.log() and "Error" not in two.log()
    kept = _present_bytes(two)  # what was not on the disk when it was interrupted is put there

    _start(two, SWARM_MODEL_TRANSFER_MBIT_S="24")
    _until(two, is_fetching)
    one.processes[0].kill()
    one.processes[0].wait()
    time.sleep(1.0)
    start_source()
    for host in (one, two):
        host.wait_ready(2, within_s=60)
    _until(one, lambda status: all(node["planned"] and node["ready"] == node["planned"] for node in status["nodes"]))
    assert one.run("ask", QUESTION).stdout.strip() == ANSWER
    assert _fetched_bytes(two) + kept <= 24_883_200  # 120 experts of the demo model, none of them twice
