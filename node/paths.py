"""Folders that swarm-node uses on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from node import environment

#: Starts a module of this program, its name to follow. With -P, since nodes are started in folders of models, which
#: others may write to: a numpy.py there is none of this program's business.
PYTHON_MODULE = (sys.executable, "-P", "-m")


def cache_dir() -> Path:
    """Folder for what can be made or fetched again (not created by this call).

    $SWARM_CACHE_DIR, else $XDG_CACHE_HOME/swarm-node, else the platform's place for caches: the same rule as the
    build's, so that both share one folder.
    """
    if os.environ.get(environment.CACHE_DIR):
        return Path(os.environ[environment.CACHE_DIR])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "swarm-node"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "swarm-node"
    return Path.home() / ".cache" / "swarm-node"
