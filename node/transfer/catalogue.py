"""The models that the nodes of a swarm have, whole or in part. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from node.errors import ModelError
from node.records import Record

# The beginning of an id of 32 hex digits: enough that two models do not share it, few enough to be typed.
_PREFIX = re.compile(r"[0-9a-f]{6,32}")


@dataclass(frozen=True)
class Entry:
    """A model of the swarm, and the names of the nodes that have the ``whole`` of it, or a ``part``.

    ``has_trunk``: whether somebody has all that a router needs.
    """

    id: str
    file: str
    bytes: int
    whole: tuple[str, ...]
    part: tuple[str, ...]
    has_trunk: bool

    def to_json(self) -> dict[str, Any]:
        """The form that it has in the status document."""
        return {
            "id": self.id,
            "file": self.file,
            "bytes": self.bytes,
            "whole": list(self.whole),
            "part": list(self.part),
        }


def catalogue(records: Iterable[Record]) -> list[Entry]:
    """The models of live nodes, by file name and id."""
    found: dict[str, Entry] = {}
    for record in sorted(records, key=lambda record: record.node):
        for offer in record.offers:
            known = found.get(offer.id, Entry(offer.id, offer.file, offer.bytes, (), (), has_trunk=False))
            found[offer.id] = Entry(
                offer.id,
                known.file,
                known.bytes,
                known.whole + (record.name,) * offer.whole,
                known.part + (record.name,) * (not offer.whole),
                known.has_trunk or offer.trunk or offer.whole,
            )
    return sorted(found.values(), key=lambda entry: (entry.file, entry.id))


def choose(entries: Sequence[Entry], name: str) -> Entry | None:
    """The model that a user means by a file name, with or without .gguf, or by the beginning of an id.

    None if there is none. Raises ModelError when it could be one of several.
    """
    plain = name.removesuffix(".gguf").lower()
    by_name = [entry for entry in entries if entry.file.removesuffix(".gguf").lower() == plain]
    by_id = [entry for entry in entries if _PREFIX.fullmatch(name) and entry.id.startswith(name)]
    meant = by_name or by_id
    if len(meant) > 1:
        listed = ", ".join(f"{entry.file} {entry.id}" for entry in meant[:4])
        raise ModelError(f"{name} can be one of several models: {listed}; give more of the id")
    return meant[0] if meant else None
