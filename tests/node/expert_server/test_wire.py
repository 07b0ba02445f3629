"""The expert call's messages: golden bytes, round trips, number formats, refusal of all that is malformed."""

import random
import re
import time
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.bounded_msgpack import LARGE_BYTES, unpack_map, unpack_views
from node.errors import CallRefused, MalformedMessage, UnsupportedVersion
from node.expert_server import wire
from node.number_formats import from_wire, to_wire
from rigs import ROOT
from rigs.calls import GOLDEN_ERROR, MALFORMED, SHAPE, encoded, floats, golden_reply, golden_request, ints, mutated
from rigs.timing import cheaply


def golden_bytes() -> list[bytes]:
    """The request, the reply and the error of docs/protocol.md."""
    text = (ROOT / "docs" / "protocol.md").read_text().split("## Golden bytes", 1)[1]
    blocks = re.findall(r"(?:^ {4}[0-9a-f]+$\n?)+", text, re.MULTILINE)
    return [bytes.fromhex(block) for block in blocks[:3]]


def decode(body: bytes | bytearray, shape: wire.LayerShape = SHAPE) -> wire.CallRequest:
    return wire.decode_request(body, lambda model, layer, program: shape)


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


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(name: str) -> None:
    with cheaply(0.05), pytest.raises(MalformedMessage):
        decode(MALFORMED[name])


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
