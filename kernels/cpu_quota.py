"""How many threads this process may keep busy: affinity and control-group quota, not the number of cores."""

import math
import os
from pathlib import Path


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
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "sys/fs/cgroup/cpu", _quota_v1
        else:
            continue
        # The limit of any ancestor holds too. Inside a container the path may not exist below the mount.
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            quota = read(folder)
            if quota is not None:
                quotas.append(quota)
            if folder == mount:
                break
    return quotas


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
