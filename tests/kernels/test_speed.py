"""The speed of a device: measured over real experts, by a real expert server, and told to its parent."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

import kernels
from node.expert_server import speed
from node.expert_server.process import ExpertProcess
from rigs import fake_kernels
from rigs.fake_server import COMMAND, get, order, server, until


class Clock:
    """A clock that each repeat of the work moves on by the next of these times, in seconds."""

    def __init__(self, *durations_s: float) -> None:
        self.now_s = 100.0
        self.left_s = list(durations_s)

    def __call__(self) -> float:
        return self.now_s

    def work(self) -> None:
        self.now_s += self.left_s.pop(0)


@pytest.mark.parametrize(
    ("durations_s", "within_s", "shortest_s", "n_left"),
    [
        ([0.2, 0.1, 0.3, 0.05], 0.5, 0.1, 1),
        ([5.0, 4.0, 1.0], 0.3, 4.0, 1),  # twice in any case: the first one may have been disturbed
        ([0.1, 0.1, 0.1, 0.1], 0.25, 0.1, 1),
        ([0.0, 0.0, 1.0], 0.3, 1e-9, 0),  # a coarse clock
    ],
)
def test_the_quickest_of_the_repeats_counts(
    durations_s: list[float], within_s: float, shortest_s: float, n_left: int
) -> None:
    clock = Clock(*durations_s)
    assert speed.shortest_s(clock.work, within_s, clock) == pytest.approx(shortest_s)
    assert len(clock.left_s) == n_left


class Recorder:
    """Kernels that take a fixed time for each byte of each expert that is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, bytes_per_s: float = 4e9) -> None:
        self.calls: list[int] = []
        self.loaded_bytes = 0
        self.n_expert = 0
        clock = Clock()
        shortest_s = speed.shortest_s
        monkeypatch.setattr(speed, "shortest_s", lambda work, within_s: shortest_s(work, within_s, clock))
        recorder = self

        class Store:
            def __init__(self, device: str, threads: int) -> None:
                assert (device, threads) == ("CPU", 3)

            def load(self, layer: int, program: Any, first: int, last: int, n_expert: int, tensors: Any) -> Any:
                # Every part of every tensor can be read, and has the size of its matrix.
                for tensor in tensors.values():
                    for path, offset, n_bytes in tensor.parts:
                        assert Path(path).stat().st_size >= offset + n_bytes
                    assert len(tensor.parts) == n_expert == last + 1
                    recorder.loaded_bytes += sum(part[2] for part in tensor.parts)
                recorder.n_expert = n_expert
                return SimpleNamespace(bytes=recorder.loaded_bytes)

            def ffn(self, digest: int, layer: int, h: Any, row: Any, expert: Any, *rest: Any) -> None:
                assert list(expert) == list(range(len(expert)))
                recorder.calls.append(len(expert))
                clock.now_s += len(expert) / recorder.n_expert * recorder.loaded_bytes / bytes_per_s

        device = fake_kernels.Device(memory_free_bytes=free_bytes)
        self.kernels: Any = SimpleNamespace(
            devices=lambda: [device],
            choose_device=fake_kernels.choose_device,
            Program=fake_kernels.Program,
            TensorParts=fake_kernels.TensorParts,
            ExpertStore=Store,
        )


@pytest.mark.parametrize(("free_mib", "at_least_mib"), [(100_000, 120), (512, 28)])
def test_it_is_what_was_read_by_the_time_it_took(
    free_mib: int, at_least_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, free_mib << 20)
    assert speed.expert_bytes_per_s(recorder.kernels, "CPU", 3) == pytest.approx(4e9)
    assert at_least_mib << 20 <= recorder.loaded_bytes <= min(128 << 20, (free_mib << 20) // 16)
    # One short call first, then all experts each time.
    assert recorder.calls[0] == 2
    assert set(recorder.calls[1:]) == {recorder.n_expert}


def test_without_memory_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, 10 << 20)
    with pytest.raises(ValueError, match="10 MiB of memory are free on CPU"):
        speed.expert_bytes_per_s(recorder.kernels, "CPU", 3)
    assert recorder.calls == []


def test_a_real_device() -> None:
    """No figure is asked for, but one that a computer can have: between a slow disk's and the fastest memory's."""
    measured = speed.expert_bytes_per_s(kernels, "CPU", 1)
    print(f"{measured / 1e9:.2f} GB/s with one thread")
    assert 1e7 < measured < 1e13


@pytest.mark.slow
async def test_a_real_expert_server_tells_its_parent(tmp_path: Path) -> None:
    process = ExpertProcess("alpha", threads=1, device="CPU", stderr=tmp_path / "log", measures_speed=True)
    await process.start()
    try:
        async with aiohttp.ClientSession() as session:
            # The event loop goes on meanwhile.
            assert (await get(session, process, "/health"))[0] == 200
            await until(lambda: process.expert_bytes_per_s > 0, 30)
            stats = (await get(session, process, "/v1/stats"))[1]
        assert math.isfinite(process.expert_bytes_per_s)
        assert stats["expert_bytes_per_s"] == process.expert_bytes_per_s > 1e7
        supervising = asyncio.create_task(process.supervise())
        first_pid, measured = process.pid, process.expert_bytes_per_s
        assert first_pid is not None
        assert "--measure" in psutil.Process(first_pid).cmdline()
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: process.running and process.pid != first_pid, 30)
        # A server that is needed back at once does not measure again, and what is known stays.
        assert process.pid is not None
        assert "--measure" not in psutil.Process(process.pid).cmdline()
        assert process.expert_bytes_per_s == measured
        await process.stop()
        await asyncio.wait_for(supervising, 5)
    finally:
        await process.stop()


@pytest.mark.slow
async def test_a_device_that_cannot_be_measured_serves_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    # Its device has one byte of memory.
    process = ExpertProcess("alpha", command=COMMAND, stderr=log, measures_speed=True)
    await process.start()
    try:
        await until(lambda: "the speed of CPU could not be measured: ValueError: 0 MiB" in log.read_text())
        assert process.running
        assert process.expert_bytes_per_s == 0
    finally:
        await process.stop()


@pytest.mark.slow
async def test_it_is_not_measured_unasked() -> None:
    async with server(order()) as process, aiohttp.ClientSession() as session:
        assert (await get(session, process, "/v1/stats"))[1]["expert_bytes_per_s"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("value", ["-1", "1e999", "null", '"fast"', "NaN", "1" + "0" * 400])
async def test_nonsense_is_no_speed(value: str, tmp_path: Path) -> None:
    chatty = tmp_path / "chatty.py"
    chatty.write_text(
        'print(\'{"type": "speed", "expert_bytes_per_s": %s}\')\n'  # noqa: UP031 (braces are JSON's)
        'print(\'{"type": "statistics", "calls": %s}\')\n'
        'print(\'{"type": "listening", "version": 1, "host": "127.0.0.1", "port": 1}\', flush=True)\n'
        "import sys\nsys.stdin.read()\n" % (value, value)
    )
    process = ExpertProcess("alpha", command=(sys.executable, str(chatty)))
    await process.start()
    try:
        assert process.expert_bytes_per_s == 0
        assert len(process.counters) == 0
    finally:
        await process.stop()
