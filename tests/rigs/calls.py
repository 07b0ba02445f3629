"""Expert calls by hand: the golden ones, and everything that is malformed."""

from __future__ import annotations

import random
import struct

import msgpack
import numpy as np

from node.expert_server import wire

SHAPE = wire.LayerShape(n_in=4, n_expert=8, n_used=3, max_rows=16, per_pair=False, uses_weight=True)


def golden_request() -> wire.CallRequest:
    return wire.CallRequest(
        id=7,
        model="demo-0123",
        program=0x1122334455667788,
        term=3,
        layer=5,
        reduce="rows",
        n_rows=2,
        dtype="f32",
        h=np.array([[0.5, -1, 2, 0.25], [1.5, 0, -0.125, 3]], dtype=np.float32),
        row=np.array([0, 0, 1], dtype=np.int32),
        expert=np.array([2, 5, 0], dtype=np.int32),
        weight=np.array([0.25, 0.75, 1.0], dtype=np.float32),
        deadline_ms=2000,
    )


def golden_reply() -> wire.CallReply:
    y = np.array([[1, 2, 3, 4], [-1, -2, -3, -4], [0.5, 0.25, 0.125, -0.0]], dtype=np.float32)
    return wire.CallReply(7, "f32", y, compute_us=120, queue_us=300)


GOLDEN_ERROR = wire.CallError(7, "not_ready", "layer 5 is loading", 5, (2, 5), retry=True)


def encoded(**changed: object) -> bytes:
    """The golden request with some fields changed (None: left out), however wrong they are."""
    fields = msgpack.unpackb(wire.encode_request(golden_request()))
    fields.update(changed)
    return bytes(msgpack.packb({key: value for key, value in fields.items() if value is not None}))


def ints(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


MALFORMED = {
    "no version": encoded(v=None),
    "version is a string": encoded(v="1"),
    "version is true": encoded(v=True),
    "id missing": encoded(id=None),
    "id negative": encoded(id=-1),
    "id is a float": encoded(id=7.0),
    "model empty": encoded(model=""),
    "model is a path": encoded(model="../../etc"),
    "model ends with a newline": encoded(model="demo\n"),
    "model too long": encoded(model="a" * 65),
    "model is binary": encoded(model=b"demo"),
    "program missing": encoded(program=None),
    "term negative": encoded(term=-3),
    "layer is a string": encoded(layer="5"),
    "layer 2^31": encoded(layer=2**31),
    "reduce unknown": encoded(reduce="max"),
    "reduce is a list": encoded(reduce=["rows"]),
    "rows 0": encoded(rows=0, h=b""),
    "rows -1": encoded(rows=-1),
    "rows above the limit": encoded(rows=17),
    "rows 2^62": encoded(rows=2**62),
    "rows 2^63": encoded(rows=2**63),
    "rows wrong for h": encoded(rows=3),
    "dtype 255": encoded(dtype=255),
    "dtype f64": encoded(dtype="f64"),
    "dtype object": encoded(dtype="O"),
    "dtype wrong for h": encoded(dtype="f16"),
    "h missing": encoded(h=None),
    "h is text": encoded(h="0" * 32),
    "h is an array of objects": encoded(h=[0.0] * 8),
    "h one byte short": encoded(h=bytes(31)),
    "h one byte long": encoded(h=bytes(33)),
    "h with NaN": encoded(h=floats(0, 0, 0, 0, 0, 0, 0, float("nan"))),
    "h with infinity": encoded(h=floats(0, float("-inf"), 0, 0, 0, 0, 0, 0)),
    "k 0": encoded(row=b"", expert=b"", weight=b""),
    "k above n_used": encoded(row=ints(*[0] * 7), expert=ints(*range(7)), weight=floats(*[1] * 7)),
    "row negative": encoded(row=ints(-1, 0, 1)),
    "row out of range": encoded(row=ints(0, 1, 2)),
    "row descends": encoded(row=ints(0, 1, 0)),
    "row hides a negative": encoded(row=ints(0, -1, 1)),
    "row odd bytes": encoded(row=bytes(11)),
    "row too short": encoded(row=ints(0, 1)),
    "expert -1": encoded(expert=ints(-1, 2, 3)),
    "expert n_expert": encoded(expert=ints(2, 8, 3)),
    "expert 2^31-1": encoded(expert=ints(2, 2**31 - 1, 3)),
    "expert odd bytes": encoded(expert=bytes(13)),
    "pair twice": encoded(expert=ints(3, 3, 1)),
    "weight missing": encoded(weight=None),
    "weight NaN": encoded(weight=floats(1, float("nan"), 1)),
    "weight short": encoded(weight=floats(1, 1)),
    "deadline negative": encoded(deadline_ms=-1),
    "deadline missing": encoded(deadline_ms=None),
    "empty": b"",
    "nothing but a length": b"\xde\xff\xff",
    "an array": msgpack.packb([1, 2, 3]),
    "an integer": b"\x01",
    "array of 2^31": b"\xdd\x80\x00\x00\x00",
    "map of 2^32-1": b"\xdf\xff\xff\xff\xff",
    "field of 2^31 items": b"\x81\xa1v\xdd\x80\x00\x00\x00",
    "binary of 2^32-1 bytes": b"\x81\xa1h\xc6\xff\xff\xff\xff",
    "maps nested 10,000 deep": b"\x81\xa1a" * 10_000 + b"\xc0",
    "arrays nested 10,000 deep": b"\x81\xa1a" + b"\x91" * 10_000 + b"\xc0",
    "many small containers": b"\x81\xa1a" + b"\xdc\x00\x40" + (b"\xdc\x00\x40" + b"\x80" * 64) * 64,
    "ext type": b"\x82\xa1v\x01\xa1a\xc7\x04\x05abcd",
    "empty ext type": b"\x82\xa1v\x01\xa1a\xc7\x00\x05",
    "timestamp": b"\x82\xa1v\x01\xa1a\xd6\xff\x00\x00\x00\x00",
    "trailing bytes": encoded() + b"\x00",
    "truncated": encoded()[:-1],
    "key is an integer": b"\x82\xa1v\x01\x05\x05",
    "key is binary": b"\x82\xa1v\x01\xc4\x01a\x05",
    "key twice": b"\x82\xa1v\x01\xa1v\x01",
    "not UTF-8": b"\x82\xa1v\x01\xa1a\xa1\xff",
    "unused byte": b"\x82\xa1v\x01\xa1a\xc1",
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94",
}


def mutated(body: bytes, generator: random.Random) -> bytes:
    """`body` with a few random edits: bytes flipped, cut, repeated, replaced by interesting ones."""
    result = bytearray(body)
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(result) + 1)
        kind = generator.randrange(5)
        if kind == 0 and position < len(result):
            result[position] = generator.randrange(256)
        elif kind == 1:
            del result[position : position + generator.randint(1, 8)]
        elif kind == 2:
            result[position:position] = result[position : position + generator.randint(1, 40)]
        elif kind == 3:
            result[position:position] = generator.choice(
                [b"\xdd\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x00\x05", b"\x91" * 50, b"\xcf" + b"\xff" * 8]
            )
        elif position + 4 <= len(result):
            struct.pack_into("<i", result, position, generator.choice([-1, 0, 8, 2**31 - 1, -(2**31), 0x7FC00000]))
    return bytes(result)
