"""What a node offers follows what its control groups leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from node.memory_limit import MemoryLimit, free_memory_bytes, memory_limit

MIB = 1 << 20
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
GROUP = "proc/self/cgroup"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, maximum: str = "max", used_mib: int = 0, cached_mib: int = 0, high: str = "max") -> dict[str, str]:
    half = cached_mib * MIB // 2
    return {
        f"{V2}{folder}/memory.max": f"{maximum}\n",
        f"{V2}{folder}/memory.high": f"{high}\n",
        f"{V2}{folder}/memory.current": f"{used_mib * MIB}\n",
        f"{V2}{folder}/memory.stat": f"anon 5\nfile 7\ninactive_file {half}\nactive_file {half}\n",
    }


def v1(folder: str, limit: int, used_mib: int = 0, cached_mib: int = 0) -> dict[str, str]:
    return {
        f"{V1}{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{V1}{folder}/memory.usage_in_bytes": f"{used_mib * MIB}\n",
        f"{V1}{folder}/memory.stat": (
            f"inactive_file 1\nactive_file 1\ntotal_inactive_file {cached_mib * MIB}\ntotal_active_file 0\n"
        ),
    }


V1_UNLIMITED = 9223372036854771712

# Files below the root; the limit in MiB and what is left of it, None without a limit.
TREES: dict[str, tuple[dict[str, str], tuple[int, int] | None]] = {
    "nothing": ({}, None),
    "v2 without a limit": ({GROUP: "0::/a/b\n", **v2("/a/b", used_mib=5)}, None),
    "v2": ({GROUP: "0::/a/b\n", **v2("/a/b", str(1024 * MIB), 24)}, (1024, 1000)),
    "v2, cached files are free": ({GROUP: "0::/a\n", **v2("/a", str(1024 * MIB), 1000, 900)}, (1024, 924)),
    "v2, a parent's limit is less": (
        {GROUP: "0::/a/b\n", **v2("/a/b", str(4096 * MIB), 100), **v2("/a", str(2048 * MIB), 300)},
        (2048, 1748),
    ),
    "v2, a parent's limit is more, and nearly used up by others": (
        {GROUP: "0::/a/b\n", **v2("/a/b", str(1024 * MIB), 100), **v2("/a", str(2048 * MIB), 2000)},
        (2048, 48),
    ),
    "v2, only a grandparent has one": (
        {GROUP: "0::/a/b/c\n", **v2("/a/b/c"), **v2("/a/b"), **v2("/a", str(700 * MIB))},
        (700, 700),
    ),
    "v2, high is less than max": (
        {GROUP: "0::/a\n", **v2("/a", str(1024 * MIB), 100, high=str(512 * MIB))},
        (512, 412),
    ),
    "v2, only high": ({GROUP: "0::/a\n", **v2("/a", high=str(512 * MIB))}, (512, 512)),
    "v2 in a container": ({GROUP: "0::/\n", **v2("", str(1024 * MIB), 1)}, (1024, 1023)),
    "v2 in a container, the host's path": (
        {GROUP: "0::/docker/0123\n", **v2("", str(600 * MIB))},
        (600, 600),
    ),
    "v2, above its limit": ({GROUP: "0::/a\n", **v2("/a", str(100 * MIB), 120)}, (100, 0)),
    "v2, nothing but the limit can be read": ({GROUP: "0::/\n", f"{V2}/memory.max": f"{64 * MIB}\n"}, (64, 64)),
    "v2, damaged": (
        {
            GROUP: "0::/a\nnonsense\n\n",
            f"{V2}/a/memory.max": "soon\n",
            f"{V2}/memory.high": "\n",
            f"{V2}/memory.stat": "x",
        },
        None,
    ),
    "v2, a group beside it": ({GROUP: "0::/a/b\n", **v2("/a/c", str(MIB))}, None),
    "v1": ({GROUP: "5:memory:/box\n4:cpu:/\n", **v1("/box", 1024 * MIB, 124, 100)}, (1024, 1000)),
    "v1 without a limit": (
        {GROUP: "5:memory:/box\n", **v1("/box", V1_UNLIMITED), **v1("", V1_UNLIMITED)},
        None,
    ),
    "v1, a parent's limit is less": (
        {GROUP: "5:hugetlb,memory:/pod/box\n", **v1("/pod/box", V1_UNLIMITED, 7), **v1("/pod", 512 * MIB, 12)},
        (512, 500),
    ),
    "v1 in a container, the host's path": ({GROUP: "5:memory:/docker/0123\n", **v1("", 256 * MIB)}, (256, 256)),
    "v1, another controller's group": ({GROUP: "5:cpuset:/box\n", **v1("/box", 256 * MIB)}, None),
    "both": (
        {GROUP: "5:memory:/box\n0::/\n", **v1("/box", 900 * MIB), **v2("", str(800 * MIB))},
        (800, 800),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_control_groups(name: str, tmp_path: Path) -> None:
    files, expected = TREES[name]
    limit = memory_limit(tree(tmp_path, files))
    assert (limit and (limit.limit_bytes // MIB, limit.free_bytes // MIB)) == expected
    if limit is not None:
        assert int(limit.file.read_text()) == limit.limit_bytes


def test_the_least_of_machine_and_limit_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 << 30))
    assert free_memory_bytes(tmp_path) == 20 << 30
    tree(tmp_path, {GROUP: "0::/\n", **v2("", str(1024 * MIB), 24)})
    assert free_memory_bytes(tmp_path) == 1000 * MIB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * MIB))
    assert free_memory_bytes(tmp_path) == 10 * MIB


def test_this_machine() -> None:
    """Whatever control groups the tests run in: there is memory, and a limit is one that a file names."""
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total
    limit = memory_limit()
    assert limit is None or (isinstance(limit, MemoryLimit) and limit.file.exists() and limit.free_bytes > 0)
