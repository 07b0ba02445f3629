"""The number of threads follows what a process may really use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import kernels
from kernels.cpu_quota import cpu_quota, default_threads

CORES = 16


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)), raising=False)


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu"
GROUP = "proc/self/cgroup"

# Files below the root, cores, threads.
TREES: dict[str, tuple[dict[str, str], float, int]] = {
    "nothing": ({}, CORES, CORES),
    "v2 without a limit": ({GROUP: "0::/a/b\n", f"{V2}/a/b/cpu.max": "max 100000\n"}, CORES, CORES),
    "v2": ({GROUP: "0::/a/b\n", f"{V2}/a/b/cpu.max": "250000 100000\n"}, 2.5, 2),
    "v2, a parent's limit is less": (
        {GROUP: "0::/a/b\n", f"{V2}/a/b/cpu.max": "400000 100000\n", f"{V2}/a/cpu.max": "300000 100000\n"},
        3,
        3,
    ),
    "v2, only the parent has one": (
        {GROUP: "0::/a/b\n", f"{V2}/a/b/cpu.max": "max 100000\n", f"{V2}/a/cpu.max": "50000 50000\n"},
        1,
        1,
    ),
    "v2, a grandparent's": ({GROUP: "0::/a/b/c\n", f"{V2}/a/cpu.max": "700000 100000\n"}, 7, 7),
    "v2 in a container": ({GROUP: "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5, 1),
    "v2 in a container, the host's path": (
        {GROUP: "0::/docker/0123\n", f"{V2}/cpu.max": "600000 100000\n"},
        6,
        6,
    ),
    "v2, less than a core": ({GROUP: "0::/\n", f"{V2}/cpu.max": "20000 100000\n"}, 0.2, 1),
    "v2, more than the machine has": ({GROUP: "0::/\n", f"{V2}/cpu.max": "6400000 100000\n"}, CORES, CORES),
    "v2, just below a whole number": ({GROUP: "0::/\n", f"{V2}/cpu.max": "299999 100000\n"}, 2.99999, 2),
    "v2, damaged": ({GROUP: "0::/a\n", f"{V2}/a/cpu.max": "soon\n", f"{V2}/cpu.max": "100000 0\n"}, CORES, CORES),
    "v1": (
        {
            GROUP: "5:memory:/box\n4:cpu,cpuacct:/box\n",
            f"{V1}/box/cpu.cfs_quota_us": "400000\n",
            f"{V1}/box/cpu.cfs_period_us": "100000\n",
        },
        4,
        4,
    ),
    "v1 without a limit": (
        {
            GROUP: "4:cpu,cpuacct:/box\n",
            f"{V1}/box/cpu.cfs_quota_us": "-1\n",
            f"{V1}/box/cpu.cfs_period_us": "100000\n",
        },
        CORES,
        CORES,
    ),
    "v1 in a container, the host's path": (
        {
            GROUP: "4:cpuacct,cpu:/docker/0123\n",
            f"{V1}/cpu.cfs_quota_us": "350000\n",
            f"{V1}/cpu.cfs_period_us": "50000\n",
        },
        7,
        7,
    ),
    "v1, another controller's numbers": (
        {GROUP: "3:cpuset:/box\n2:cpuacct:/box\n", f"{V1}/box/cpu.cfs_quota_us": "100000\n"},
        CORES,
        CORES,
    ),
    "both": (
        {
            GROUP: "4:cpu:/box\n0::/\n",
            f"{V1}/box/cpu.cfs_quota_us": "900000\n",
            f"{V1}/box/cpu.cfs_period_us": "100000\n",
            f"{V2}/cpu.max": "800000 100000\n",
        },
        8,
        8,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_control_groups(name: str, tmp_path: Path) -> None:
    files, cores, threads = TREES[name]
    root = tree(tmp_path, files)
    assert cpu_quota(root) == pytest.approx(cores)
    assert default_threads(root) == threads


def test_affinity_counts_when_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, {GROUP: "0::/\n", f"{V2}/cpu.max": "400000 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert (cpu_quota(root), default_threads(root)) == (2, 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert default_threads(root) == 1


def test_without_affinity_the_cores_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cpu_quota(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads(tmp_path) == 1


def test_a_store_takes_what_the_affinity_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert kernels.ExpertStore("CPU").threads == 1
    assert kernels.ExpertStore("CPU", 2).threads == 2
