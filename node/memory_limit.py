"""How much memory this process may still take: what is free, and what the limits of control groups leave of it.

A container sees the whole machine's memory as free, and is killed for using more than its own limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from kernels.control_groups import own_groups

#: The share of free memory that a node offers for experts; the rest is for everything else on the machine.
MEMORY_SHARE = 0.9

# Control groups v1 say "no limit" as the largest number of whole pages.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of one control group: ``file`` says so. ``free_bytes``: what its processes may still take, at least 0.

    The kernel drops cached files before it refuses memory, so they count as free.
    """

    file: Path
    limit_bytes: int
    free_bytes: int


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory of the machine that this process can still take. ``root``: the file system root to read limits from."""
    available = int(psutil.virtual_memory().available)
    limit = memory_limit(root)
    return available if limit is None else min(available, limit.free_bytes)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit that leaves the least, of this process's control group and all its parents; None without any.

    Control groups v2 (``memory.max``, ``memory.high``) and v1 (``memory.limit_in_bytes``). Other systems have none.
    """
    limits: list[MemoryLimit] = []
    for version, folder in own_groups("memory", root):
        limits += _limits_v2(folder) if version == 2 else _limits_v1(folder)
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def _limits_v2(folder: Path) -> list[MemoryLimit]:
    # Above memory.high a group is slowed down until it hardly runs, which is no better than being killed.
    return _limits(folder, ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def _limits_v1(folder: Path) -> list[MemoryLimit]:
    cached = ("total_inactive_file", "total_active_file")
    return _limits(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", cached)


def _limits(folder: Path, files: tuple[str, ...], usage: str, cached: tuple[str, ...]) -> list[MemoryLimit]:
    found = []
    for file in files:
        limit_bytes = _number(folder / file)
        if limit_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
            continue
        used_bytes = max(0, (_number(folder / usage) or 0) - _cached_bytes(folder / "memory.stat", cached))
        found.append(MemoryLimit(folder / file, limit_bytes, max(0, limit_bytes - used_bytes)))
    return found


def _number(file: Path) -> int | None:
    """What a file holds; None when it cannot be read, or says "max"."""
    try:
        return max(0, int(file.read_text()))
    except (OSError, ValueError):
        return None


def _cached_bytes(file: Path, names: tuple[str, ...]) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in file.read_text().splitlines())
        return sum(int(fields.get(name, 0)) for name in names)
    except (OSError, ValueError):
        return 0
