"""The control groups of this process: its own and all their parents, whose limits hold for it too. Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """The version (1 or 2) and folder of each control group that limits what ``controller`` counts ("cpu", "memory").

    From the process's own group upwards, none on other systems. ``root``: the file system root to read from. Inside a
    container the path may not exist below the mount, which is then the container's own group: folders may be missing.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            yield version, folder
            if folder == mount:
                break
