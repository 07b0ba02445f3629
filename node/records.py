"""What a node tells the others about itself. Only the node itself writes its record; everything in it is bounded.

JSON in protocol version 1 (docs/protocol.md, "Between agents"). Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from node.errors import SwarmError
from node.slices import Slice

VERSION = 1

# A record of 256 layers with a handful of slices each is some 10 KB; more than this is a fault or an attack.
RECORD_BYTES_MAX = 1 << 20

NodeId = Annotated[str, Meta(pattern="^[0-9a-f]{16}\\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=63)]
Text = Annotated[str, Meta(max_length=400)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
# Per second, of tokens or bytes. The fastest memory there is reads some 10^13 bytes.
RATE_MAX = 1e15
# A node lists its own files and what it used last: more than a disk has room for.
OFFERS_MAX = 16
Rate = Annotated[float, Meta(ge=0, le=RATE_MAX)]
ModelId = Annotated[str, Meta(pattern="^[0-9a-z-]{1,64}\\Z")]
Slices = Annotated[tuple[Slice, ...], Meta(max_length=8192)]


class RecordError(SwarmError):
    """A record from the network is not what the protocol says, or of another version."""


class Device(msgspec.Struct, frozen=True):
    """A ggml device of a node."""

    name: Name
    type: Name
    description: Text
    memory_bytes: Count


class Model(msgspec.Struct, frozen=True):
    """A model whose file a node has. ``id`` stands for its bytes, ``header`` for its header; ``expert_bytes``: of all
    routed experts."""

    id: ModelId
    file: Name
    architecture: Name
    n_layer: Count
    n_expert: Count
    trunk_bytes: Count
    expert_bytes: Count
    # A file with another header is not this model: to know that, no byte of it need be read.
    header: Annotated[str, Meta(pattern="^([0-9a-f]{32})?\\Z")] = ""


class Offer(msgspec.Struct, frozen=True):
    """A model of which a node gives others what it has. ``bytes``: of the whole model. ``whole``, ``trunk``: whether
    all of it is there, or all but experts."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
    file: Name
    bytes: Count
    whole: bool
    trunk: bool


class Plan(msgspec.Struct, frozen=True):
    """Which slices each node is to hold, as the router plans it; and what nobody has memory for."""

    sequence: Count
    model: ModelId
    slices: Annotated[dict[NodeId, Slices], Meta(max_length=1024)]
    missing: Slices = ()


class Router(msgspec.Struct, frozen=True):
    """The part of a record that only a router has. ``state``: waiting (for slices), starting, ready or failed."""

    term: Count
    state: Annotated[str, Meta(pattern="^(waiting|starting|ready|failed)\\Z")]
    plan: Plan | None = None
    # Slices of the plan that are not ready, so that every node can say what a request waits for.
    not_ready: Annotated[dict[NodeId, Slices], Meta(max_length=1024)] = {}
    reason: Text = ""
    # Generated for one request, as last measured; 0 before that.
    tokens_per_s: Rate = 0.0


class Record(msgspec.Struct, frozen=True):
    """A node. Which of two records is newer is for gossip to know (gossip/messages.py).

    ``expert_bytes_per_s``: expert weights that its device reads in a second (node/expert_server/speed.py); 0: not
    known.
    """

    version: int
    swarm: Name
    node: NodeId
    boot: Count
    name: Name
    build: Text
    platform: Text
    port: Port
    expert_port: Annotated[int, Meta(ge=0, le=65535)]
    devices: Annotated[tuple[Device, ...], Meta(max_length=16)]
    memory_bytes: Count
    can_route: bool
    model: Model | None = None
    holds_model: ModelId | None = None
    ready: Slices = ()
    problem: Text = ""
    router: Router | None = None
    expert_bytes_per_s: Rate = 0.0
    # What it is at before it can serve, in words.
    activity: Text = ""
    offers: Annotated[tuple[Offer, ...], Meta(max_length=OFFERS_MAX)] = ()
    # Its copy of the model is one that it fetches from others: it routes only where nobody who has the file can.
    fetches: bool = False


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode(body: bytes) -> Record:
    """A record from JSON. Raises RecordError, naming the version or the field at fault."""
    if len(body) > RECORD_BYTES_MAX:
        raise RecordError(f"a record of {len(body)} bytes; at most {RECORD_BYTES_MAX} are allowed")
    try:
        version = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("version")
        if version is None or bytes(version) != str(VERSION).encode():
            shown = "none" if version is None else bytes(version)[:20].decode(errors="replace")
            raise RecordError(f"record of protocol version {shown}; this program speaks {VERSION}")
        record: Record = msgspec.json.decode(body, type=Record)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RecordError(f"not a record: {error}") from None
    for one in _slices(record):
        if one.last < one.first:
            raise RecordError(f"a slice of experts {one.first} to {one.last}", node=record.name)
    return record


def _slices(record: Record) -> Iterator[Slice]:
    yield from record.ready
    if record.router is None:
        return
    for slices in record.router.not_ready.values():
        yield from slices
    if record.router.plan is not None:
        yield from record.router.plan.missing
        for slices in record.router.plan.slices.values():
            yield from slices
