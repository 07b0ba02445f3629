"""Which release of swarm-node this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed package's version, or what is there instead."""
    try:
        return importlib.metadata.version("swarm-node")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from a source tree)"
