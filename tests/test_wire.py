"""The expert call's messages: golden bytes, round trips, number formats, refusal of all that is malformed (SEC-1)."""

import random
import re
import struct
import time
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.bounded_msgpack import LARGE_BYTES, unpack_map, unpack_views
from node.errors import CallRefused, MalformedMessage, UnsupportedVersion
from node.expert_server import wire
from node.number_formats import from_wire, to_wire

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


def golden_bytes() -> list[bytes]:
    """The request, the reply and the error of docs/protocol.md."""
    text = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text().split("## Golden bytes", 1)[1]
    blocks = re.findall(r"(?:^ {4}[0-9a-f]+$\n?)+", text, re.MULTILINE)
    return [bytes.fromhex(block) for block in blocks[:3]]


def decode(body: bytes | bytearray, shape: wire.LayerShape = SHAPE) -> wire.CallRequest:
    return wire.decode_request(body, lambda model, layer, program: shape)


def encoded(**changed: object) -> bytes:
    """The golden request with some fields changed (None: left out), however wrong they are."""
    fields = msgpack.unpackb(wire.encode_request(golden_request()))
    fields.update(changed)
    return bytes(msgpack.packb({key: value for key, value in fields.items() if value is not None}))


def ints(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


def test_messages_have_the_golden_bytes() -> None:
    request, reply, error = golden_bytes()
    assert wire.encode_request(golden_request()).hex() == request.hex()
    assert bytes(wire.encode_reply(golden_reply())).hex() == reply.hex()
    assert wire.encode_error(GOLDEN_ERROR).hex() == error.hex()


def test_golden_bytes_are_read() -> None:
    request, reply, error = golden_bytes()
    assert_same(decode(request), golden_request())
    decoded = wire.decode_reply(reply, call_id=7, n_rows=3, n_out=4, dtype="f32")
    assert_same(decoded, golden_reply())
    assert wire.decode_error(error) == GOLDEN_ERROR
    assert wire.decode_reply(error, call_id=7, n_rows=3, n_out=4, dtype="f32") == GOLDEN_ERROR


def assert_same(decoded: object, expected: object) -> None:
    assert type(decoded) is type(expected)
    for name, value in vars(expected).items():
        assert np.array_equal(getattr(decoded, name), value), name


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("n_rows", [1, 16, 512])
def test_round_trip(dtype: str, n_rows: int) -> None:
    generator = np.random.default_rng(n_rows)
    shape = wire.LayerShape(n_in=256, n_expert=8, n_used=3, max_rows=512, per_pair=False, uses_weight=True)
    # Values that each format holds exactly.
    h = generator.integers(-128, 128, (n_rows, 256)).astype(np.float32)
    row = np.repeat(np.arange(n_rows, dtype=np.int32), 3)
    expert = np.tile(np.array([1, 7, 4], dtype=np.int32), n_rows)
    weight = generator.random(3 * n_rows, dtype=np.float32)
    call = replace(golden_request(), n_rows=n_rows, dtype=dtype, h=h, row=row, expert=expert, weight=weight)
    body = wire.encode_request(call)
    assert (len(body) > LARGE_BYTES) == (n_rows == 512), "both readers are tried"
    assert len(body) <= wire.body_limit_bytes(512, 256, 3, False)
    decoded = decode(body, shape)
    assert_same(decoded, call)
    assert decoded.h.flags.aligned and decoded.h.dtype == np.float32
    reply = wire.encode_reply(wire.CallReply(1, dtype, h, 2, 3))
    answer = wire.decode_reply(reply, call_id=1, n_rows=n_rows, n_out=256, dtype=dtype)
    assert isinstance(answer, wire.CallReply) and np.array_equal(answer.y, h)


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0xBF808000, 0x00000001, 0x00018000])
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F81, 0xBF80, 0x0000, 0x0002]
    assert to_wire(bits.astype(np.uint32).view(np.float32), "bf16").tolist() == expected
    back = from_wire(np.array(expected, dtype=np.uint16).tobytes(), "bf16")
    assert back.view(np.uint32).tolist() == [value << 16 for value in expected]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_formats_round_as_the_nearest_value(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    try:
        half = from_wire(to_wire(array, "f16").tobytes(), "f16")
        assert np.array_equal(half, array.astype(np.float16).astype(np.float32))
    except OverflowError:
        assert np.abs(array).max() >= 65520
    try:
        brain = from_wire(to_wire(array, "bf16").tobytes(), "bf16")
    except OverflowError:
        assert np.abs(array).max() > 3.389e38
        return
    # No neighbour in the format is nearer.
    error = np.abs(brain.astype(np.float64) - array)
    for step in (-1, 1):
        neighbour = ((brain.view(np.uint32) >> 16).astype(np.uint16) + np.uint16(step % 65536)).astype(np.uint32) << 16
        distance = np.abs(neighbour.view(np.float32).astype(np.float64) - array)
        assert (error <= np.where(np.isfinite(distance), distance, np.inf)).all()


@pytest.mark.parametrize(("dtype", "value"), [("f16", 65520.0), ("f16", -1e9), ("bf16", 3.4e38)])
def test_a_value_that_does_not_fit_is_refused(dtype: str, value: float) -> None:
    h = golden_request().h.copy()
    h[1, 2] = value
    with pytest.raises(OverflowError, match=dtype):
        wire.encode_request(replace(golden_request(), dtype=dtype, h=h))


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


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(name: str) -> None:
    started_s = time.perf_counter()
    with pytest.raises(MalformedMessage):
        decode(MALFORMED[name])
    assert time.perf_counter() - started_s < 0.05


@pytest.mark.parametrize("name", MALFORMED)
def test_the_walker_refuses_what_the_reader_of_small_messages_refuses(name: str) -> None:
    assert _outcome(unpack_views, MALFORMED[name]) == _outcome(unpack_map, MALFORMED[name])


def test_refusals_carry_the_id_and_the_layer() -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(encoded(expert=ints(2, 8, -3)))
    assert (caught.value.call_id, caught.value.layer, caught.value.experts) == (7, 5, (8, -3))


def test_another_version_is_refused_by_name() -> None:
    for body in (encoded(v=2), encoded(v=2, h=None, model=5)):
        with pytest.raises(UnsupportedVersion, match=r"version 2.*version 1") as caught:
            decode(body)
        assert caught.value.call_id == 7


def test_unknown_fields_are_ignored() -> None:
    assert decode(encoded(trace="abc", more={"a": [1, {"b": None}]}, blob=bytes(5000))).id == 7


def test_weight_is_refused_by_a_program_without_it() -> None:
    shape = replace(SHAPE, uses_weight=False)
    with pytest.raises(MalformedMessage, match="weight"):
        decode(encoded(), shape)
    assert decode(encoded(weight=None), shape).weight is None


def test_pair_programs_take_a_row_per_pair() -> None:
    shape = replace(SHAPE, per_pair=True)
    with pytest.raises(MalformedMessage, match="'h' has 32 bytes, expected 48"):
        decode(encoded(), shape)
    assert decode(encoded(h=bytes(48)), shape).h.shape == (3, 4)


def test_the_shape_is_asked_for_before_arrays_are_made() -> None:
    def refuse(model: str, layer: int, program: int) -> wire.LayerShape:
        assert (model, layer, program) == ("demo-0123", 5, 0x1122334455667788)
        raise CallRefused("not here", kind="unknown_model")

    with pytest.raises(CallRefused, match="not here") as caught:
        wire.decode_request(encoded(h=b"wrong"), refuse)
    assert (caught.value.kind, caught.value.call_id) == ("unknown_model", 7)


@pytest.mark.parametrize(
    "changed",
    [{"id": 8}, {"y": bytes(47)}, {"y": None}, {"y": floats(*[1] * 11, float("inf"))}, {"compute_us": -1}, {"v": None}],
)
def test_malformed_replies_are_refused(changed: dict[str, object]) -> None:
    fields = msgpack.unpackb(golden_bytes()[1])
    fields.update(changed)
    body = msgpack.packb({key: value for key, value in fields.items() if value is not None})
    with pytest.raises(MalformedMessage):
        wire.decode_reply(body, call_id=7, n_rows=3, n_out=4, dtype="f32")


def test_errors_that_quote_hostile_text_can_be_read() -> None:
    error = wire.CallError(2**64 - 1, "failed", "\ud800" + "ä" * 10_000, -1, tuple(range(100)), retry=True)
    decoded = wire.decode_error(wire.encode_error(error))
    assert (decoded.id, decoded.retry, decoded.experts) == (2**64 - 1, True, tuple(range(16)))
    assert decoded.message.startswith("?ä")


def _outcome(reader: object, body: bytes) -> object:
    try:
        fields = reader(memoryview(body) if reader is unpack_views else body)  # type: ignore[operator]
    except ValueError:
        return ValueError
    return {key: bytes(value) if isinstance(value, memoryview) else repr(value) for key, value in fields.items()} | {
        key: value for key, value in fields.items() if isinstance(value, bytes)
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


def fuzz(seconds: float, seed: int) -> int:
    """Decodes mutated requests for that long; any error but CallRefused is a fault. Returns how many were accepted."""
    generator = random.Random(seed)
    seeds = [
        encoded(),
        encoded(reduce="sum", more=[1, {"a": "b"}]),
        wire.encode_request(replace(golden_request(), dtype="f16")),
    ]
    accepted = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        body = mutated(generator.choice(seeds), generator)
        assert _outcome(unpack_views, body) == _outcome(unpack_map, body), body.hex()
        try:
            call = decode(body)
        except CallRefused:
            continue
        accepted += 1
        assert call.h.shape == (call.n_rows, 4) and np.isfinite(call.h).all(), body.hex()
        assert call.row.min() >= 0 and call.row.max() < call.n_rows and call.expert.min() >= 0 and call.expert.max() < 8
        assert len(set(zip(call.row.tolist(), call.expert.tolist(), strict=True))) == len(call.row) == len(call.expert)
    return accepted


def test_mutated_requests_are_decoded_or_refused() -> None:
    assert fuzz(seconds=3, seed=1) > 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(CallRefused):
        decode(body)
    assert _outcome(unpack_views, body) == _outcome(unpack_map, body)
