"""What a node believes of another, and which of two beliefs holds.

Beliefs are ordered by (incarnation, status) and the greater one holds, so merging them is idempotent, commutative and
associative. Only the member itself raises its incarnation: that is how it refutes a suspicion.
"""

from __future__ import annotations

from enum import IntEnum
from random import Random
from typing import NewType

#: A node's id: eight bytes; `hex()` is how people see it.
NodeId = NewType("NodeId", bytes)
NODE_ID_BYTES = 8


class Status(IntEnum):
    """What is believed of a member. Of two beliefs with the same incarnation, the later in this order holds."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


def supersedes(incarnation: int, status: int, known_incarnation: int, known_status: int) -> bool:
    """Whether the first belief holds against the second; equal ones do not."""
    return (incarnation, status) > (known_incarnation, known_status)


# A boot gives the counters room for this many changes before it would meet the next boot's.
_PER_BOOT = 1 << 20


def first_counter(boot: int) -> int:
    """Where incarnations of this boot begin, above all of earlier boots."""
    return boot * _PER_BOOT


def first_version(boot: int, random: Random) -> int:
    """Where record versions of this boot begin: a place drawn by chance.

    If the boot counter was lost, records of an earlier life with other contents must not have the same versions.
    """
    return first_counter(boot) + random.randrange(_PER_BOOT // 2)


def boot_of(counter: int) -> int:
    """The boot in which a counter had this value."""
    return counter // _PER_BOOT
