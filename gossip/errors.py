"""The errors that gossip raises, as a tree.

::

    GossipError        a peer's bytes are not what docs/protocol.md says, or too many
    ├── NotForUs       of a swarm of another name
    │   └── WrongKey   of one of this name, but not sealed with its key
    └── UnknownVersion a protocol version that this program does not speak: version
"""

from __future__ import annotations


class GossipError(ValueError):
    """The root of the package's errors. Nothing has changed when it is raised."""


class NotForUs(GossipError):
    """A packet of a swarm of another name."""


class WrongKey(NotForUs):
    """A packet of a swarm of this name that has another key, or none, or is the only one to have one."""


class UnknownVersion(GossipError):
    """A packet of a protocol version that this program does not speak."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}")
        self.version = version
