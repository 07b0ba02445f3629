"""Errors of the gossip package.

::

    GossipError        a peer's bytes are not what docs/protocol.md says, or too many
    ├── NotForUs       another swarm's name, or not sealed with this swarm's key
    └── UnknownVersion a protocol version that this program does not speak: version
"""

from __future__ import annotations


class GossipError(ValueError):
    """Root of the package's errors. Nothing changed when it is raised."""


class NotForUs(GossipError):
    """A packet of another swarm, or one that this swarm's key does not open."""


class UnknownVersion(GossipError):
    """A packet of a protocol version that this program does not speak."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}")
        self.version = version
