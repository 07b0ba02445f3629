"""The bytes that gossiping nodes exchange (docs/protocol.md, "Gossip"): msgpack arrays, validated as they are read.

A packet is one UDP datagram, sealed by `gossip.envelope`. Requests and replies go over TCP, by whatever the program
offers. Elements after those that this version knows are ignored.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from gossip.errors import GossipError
from gossip.limits import ADDRESSES_MAX, COUNTER_MAX, DIGEST_BYTES_MAX, MEMBERS_MAX, RECORD_BYTES_MAX
from gossip.state import NODE_ID_BYTES

#: The version of packets, requests and replies; nodes of different versions do not understand each other.
PROTOCOL_VERSION = 1

Id = Annotated[bytes, Meta(min_length=NODE_ID_BYTES, max_length=NODE_ID_BYTES)]
Counter = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
Host = Annotated[str, Meta(min_length=1, max_length=64)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Accusers = Annotated[tuple[Id, ...], Meta(max_length=8)]

#: So many updates fit a packet whatever is in them: 61 bytes each at most, 122 for the rest, 44 for the envelope.
UPDATES_MAX = 20
#: One node names at most this many accusers of one suspect.
ACCUSERS_MAX = 3


class Kind(IntEnum):
    """What a packet wants; ``NEWS`` only carries updates."""

    PING = 0
    ACK = 1
    PING_REQUEST = 2
    NACK = 3
    NEWS = 4


class Update(Struct, array_like=True, frozen=True, gc=False):
    """A member's state: ``version`` is its record's; ``accusers`` says who suspects it."""

    node: Id
    incarnation: Counter
    status: Annotated[int, Meta(ge=0, le=3)]
    version: Counter
    accusers: Accusers = ()


class Packet(Struct, array_like=True, frozen=True, gc=False):
    """``sender`` is alive at ``incarnation`` and has a record of ``version``.

    ``target``: whom a ping is for (None: whoever is there), whom an acknowledgement speaks for, whom a helper is to
    ping, at ``address`` if it knows none better.
    """

    kind: Annotated[int, Meta(ge=0, le=255)]
    sender: Id
    incarnation: Counter
    version: Counter
    sequence: Counter
    target: Id | None = None
    address: tuple[Host, Port] | None = None
    updates: Annotated[tuple[Update, ...], Meta(max_length=64)] = ()


class Record(Struct, array_like=True, frozen=True, gc=False):
    """What a node says of itself. ``addresses``: best first. ``payload`` is the program's and opaque here."""

    node: Id
    version: Counter
    addresses: Annotated[tuple[Host, ...], Meta(max_length=ADDRESSES_MAX)]
    port: Port
    payload: Annotated[bytes, Meta(max_length=RECORD_BYTES_MAX)]


#: A node's whole view: all members, and the node itself.
Digest = Annotated[tuple[Update, ...], Meta(max_length=MEMBERS_MAX + 1)]


class PingRequest(Struct, array_like=True, frozen=True, tag="ping"):
    """A ping over TCP, where UDP does not pass. The reply is a `PingReply`."""

    packet: Packet


class PingReply(Struct, array_like=True, frozen=True, tag="pong"):
    """The acknowledgement of a ping over TCP."""

    packet: Packet


class SyncRequest(Struct, array_like=True, frozen=True, tag="sync"):
    """The sender compares views: ``hash`` is its own view's; ``members`` comes once the hashes are known to differ."""

    sender: Id
    incarnation: Counter
    version: Counter
    hash: Annotated[bytes, Meta(max_length=16)]
    members: Digest = ()


class SyncReply(Struct, array_like=True, frozen=True, tag="synced"):
    """The asked node's view; ``members`` is empty when the hashes are equal."""

    sender: Id
    incarnation: Counter
    version: Counter
    hash: Annotated[bytes, Meta(max_length=16)]
    members: Digest = ()


class PullRequest(Struct, array_like=True, frozen=True, tag="pull"):
    """The sender wants ``node``'s record, of ``version`` or newer."""

    node: Id
    version: Counter


class PullReply(Struct, array_like=True, frozen=True, tag="record"):
    """The record that was asked for; None where the asked node has none, or only an older one."""

    record: Record | None


Request = PingRequest | SyncRequest | PullRequest
Reply = PingReply | SyncReply | PullReply

#: The largest reply carries a record; the largest request a digest. The rest is what stands around them.
REPLY_BYTES_MAX = RECORD_BYTES_MAX + 4096
REQUEST_BYTES_MAX = DIGEST_BYTES_MAX + 4096

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_packets = msgspec.msgpack.Decoder(Packet)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_records = msgspec.msgpack.Decoder(Record)


def encode(message: Packet | Request | Reply | Record) -> bytes:
    """Writes a message as msgpack."""
    return _encoder.encode(message)


def decode_packet(data: bytes) -> Packet:
    """Reads a packet. Raises GossipError."""
    return _decode(_packets, data)


def decode_request(data: bytes) -> Request:
    """Reads a request over TCP. Raises GossipError."""
    if len(data) > REQUEST_BYTES_MAX:
        raise GossipError(f"a request of {len(data)} bytes")
    return _decode(_requests, data)


def decode_reply(data: bytes) -> Reply:
    """Reads the reply to a request. Raises GossipError."""
    if len(data) > REPLY_BYTES_MAX:
        raise GossipError(f"a reply of {len(data)} bytes")
    return _decode(_replies, data)


def decode_record(data: bytes) -> Record:
    """Reads a record alone, as it is kept. Raises GossipError."""
    return _decode(_records, data)


def _decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> Message:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise GossipError(f"not what the protocol says: {error}") from None
