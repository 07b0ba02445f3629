"""How many threads this process may keep busy: affinity and control-group quota, not the number of cores."""

import math
import os
from pathlib import Path

from kernels.control_groups import own_groups


def cpu_quota(root: Path = Path("/")) -> float:
    """Cores this process may use, at least a fraction above 0.

    The least of the scheduler affinity and the CPU quota of this process's control group and its parents
    (cgroup v2 ``cpu.max``; v1 ``cpu.cfs_quota_us``). ``root`` is the file system root to read them from.
    """
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        cores = float(os.cpu_count() or 1)
    return min([cores, *_group_quotas(root)])


def default_threads(root: Path = Path("/")) -> int:
    """Compute threads for one process that has the machine's quota for itself: the quota rounded down, at least 1."""
    return max(1, math.floor(cpu_quota(root) + 1e-6))


def _group_quotas(root: Path) -> list[float]:
    found = (_quota_v2(folder) if version == 2 else _quota_v1(folder) for version, folder in own_groups("cpu", root))
    return [quota for quota in found if quota is not None]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
