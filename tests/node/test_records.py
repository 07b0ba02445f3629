"""Records: what goes out comes back, and nothing else comes in."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.records import (
    RECORD_BYTES_MAX,
    VERSION,
    Device,
    Model,
    Plan,
    Record,
    RecordError,
    Router,
    decode,
    encode,
)
from node.slices import Slice

node_ids = st.text("0123456789abcdef", min_size=16, max_size=16)
counts = st.integers(0, 2**53)
characters = st.characters(exclude_categories=["Cs"])
names = st.text(characters, min_size=1, max_size=63)
texts = st.text(characters, max_size=400)
headers = st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32)
model_ids = st.text("0123456789abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=64)
slices = st.lists(
    st.tuples(st.integers(0, 1023), st.integers(0, 65535), st.integers(0, 65535)).map(
        lambda s: Slice(s[0], min(s[1:]), max(s[1:]))
    ),
    max_size=4,
).map(tuple)
by_node = st.dictionaries(node_ids, slices, max_size=3)
plans = st.builds(Plan, counts, model_ids, by_node, slices)
routers = st.builds(
    Router,
    counts,
    st.sampled_from(["waiting", "starting", "ready", "failed"]),
    st.none() | plans,
    by_node,
    texts,
    st.floats(0, 1e6),
)
records = st.builds(
    Record,
    version=st.just(VERSION),
    swarm=names,
    node=node_ids,
    boot=counts,
    name=names,
    build=texts,
    platform=texts,
    port=st.integers(1, 65535),
    expert_port=st.integers(0, 65535),
    devices=st.lists(st.builds(Device, names, names, texts, counts), max_size=3).map(tuple),
    memory_bytes=counts,
    can_route=st.booleans(),
    model=st.none() | st.builds(Model, model_ids, names, names, counts, counts, counts, counts, headers),
    holds_model=st.none() | model_ids,
    ready=slices,
    problem=texts,
    router=st.none() | routers,
    expert_bytes_per_s=st.floats(0, 1e15),
    activity=texts,
)

EXAMPLE = Record(
    version=VERSION,
    swarm="default",
    node="0123456789abcdef",
    boot=3,
    name="kitchen",
    build="f4fdfab5a6eb9830",
    platform="Linux x86_64",
    port=4100,
    expert_port=4101,
    devices=(Device("CPU", "cpu", "AMD EPYC", 25 << 30),),
    memory_bytes=20 << 30,
    can_route=True,
    model=Model("0abc", "m.gguf", "qwen3moe", 48, 128, 3 << 30, 15 << 30),
    holds_model="0abc",
    ready=(Slice(0, 0, 63), Slice(1, 0, 63)),
    router=Router(
        4,
        "waiting",
        Plan(2, "0abc", {"0123456789abcdef": (Slice(0, 0, 63), Slice(1, 0, 63))}, (Slice(0, 64, 127),)),
        {"0123456789abcdef": (Slice(1, 0, 63),)},
    ),
)


@settings(max_examples=200)
@given(records)
def test_round_trip(record: Record) -> None:
    assert decode(encode(record)) == record


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(encode(EXAMPLE)), **changes}).encode()


@given(st.dictionaries(st.text(characters, min_size=1).map(lambda s: "x_" + s), st.integers() | texts | st.none()))
def test_unknown_fields_are_ignored(unknown: dict[str, Any]) -> None:
    fields = json.loads(encode(EXAMPLE))
    fields["router"].update(unknown)
    assert decode(json.dumps({**fields, **unknown}).encode()) == EXAMPLE


@pytest.mark.parametrize("version", [0, 2, -1, 1.5, "1", None, True, [1], 10**30])
def test_another_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(RecordError, match="version") as caught:
        decode(changed(version=version))
    assert json.dumps(version)[:20] in str(caught.value)
    assert str(VERSION) in str(caught.value)


def test_a_later_version_may_look_as_it_likes() -> None:
    with pytest.raises(RecordError, match="version 7; this program speaks 1"):
        decode(b'{"version": 7, "everything": "else"}')
    with pytest.raises(RecordError, match="version none"):
        decode(b'{"node": "x"}')


TOO_MUCH = [
    {"node": "0123456789ABCDEF"},
    {"node": "0" * 17},
    {"node": "0" * 16 + "\n"},
    {"name": ""},
    {"name": "x" * 64},
    {"swarm": "x" * 64},
    {"swarm": None},
    {"boot": -1},
    {"boot": 2**53 + 1},
    {"boot": 10**400},
    {"boot": 1.5},
    {"boot": True},
    {"build": "x" * 401},
    {"problem": "x" * 401},
    {"port": 0},
    {"port": 65536},
    {"expert_port": -1},
    {"devices": [{"name": "CPU", "type": "cpu", "description": "", "memory_bytes": 1}] * 17},
    {"devices": [{"name": "CPU"}]},
    {"memory_bytes": -1},
    {"can_route": "yes"},
    {"holds_model": "../etc"},
    {"activity": "x" * 401},
    {"model": {**msgspec.to_builtins(EXAMPLE.model), "header": "../etc"}},
    {"holds_model": "x" * 65},
    {"ready": [[0, 0, 65536]]},
    {"ready": [[1024, 0, 0]]},
    {"ready": [[0, 0]]},
    {"ready": [[0, 0, 0]] * 8193},
    {"ready": [[0, 5, 4]]},
    {"router": {"term": 1, "state": "perfect"}},
    {"router": {"term": 1, "state": "ready", "tokens_per_s": "fast"}},
    {"router": {"term": 1, "state": "ready", "tokens_per_s": -1}},
    {"router": {"term": 1, "state": "ready", "tokens_per_s": 1e16}},
    {"expert_bytes_per_s": -1},
    {"expert_bytes_per_s": -0.5},
    {"expert_bytes_per_s": 1.1e15},
    {"expert_bytes_per_s": 10**400},
    {"expert_bytes_per_s": float("nan")},
    {"expert_bytes_per_s": float("inf")},
    {"expert_bytes_per_s": None},
    {"expert_bytes_per_s": "4 GB/s"},
    {"router": {"term": 1, "state": "ready", "not_ready": {"0" * 16: [[0, 5, 4]]}}},
    {"router": {"term": 1, "state": "ready", "not_ready": {"nobody": []}}},
    {
        "router": {
            "term": 1,
            "state": "ready",
            "plan": {"sequence": 1, "model": "a", "slices": {}, "missing": [[0, 5, 4]]},
        }
    },
    {"router": {"term": 1, "state": "ready", "plan": {"sequence": 1, "model": "a", "slices": {"0" * 16: [[0, 5, 4]]}}}},
    {
        "router": {
            "term": 1,
            "state": "ready",
            "plan": {"sequence": 1, "model": "a", "slices": {f"{n:016x}": [] for n in range(1025)}},
        }
    },
]


@pytest.mark.parametrize("changes", TOO_MUCH, ids=lambda c: json.dumps(c)[:50])
def test_everything_is_bounded(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        decode(changed(**changes))
    assert len(str(caught.value)) < 600


def test_speeds_are_optional() -> None:
    fields = json.loads(encode(EXAMPLE))
    del fields["expert_bytes_per_s"], fields["router"]["tokens_per_s"]
    record = decode(json.dumps(fields).encode())
    assert record.router is not None
    assert record.expert_bytes_per_s == record.router.tokens_per_s == 0
    assert decode(changed(expert_bytes_per_s=4_100_000_000)).expert_bytes_per_s == 4.1e9
    with pytest.raises(RecordError):
        decode(encode(EXAMPLE).replace(b'"expert_bytes_per_s":0.0', b'"expert_bytes_per_s":1e999'))


def test_a_record_has_a_size() -> None:
    with pytest.raises(RecordError, match="bytes"):
        decode(encode(EXAMPLE) + b" " * RECORD_BYTES_MAX)
    assert decode(encode(EXAMPLE) + b" " * 1000) == EXAMPLE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"1",
        b'"record"',
        b"[" * 100_000,
        b'{"version":1,"x":' * 50_000,
        b"\xff\xfe",
        b'{"version":1}',
    ],
)
def test_what_is_no_record_at_all(body: bytes) -> None:
    with pytest.raises(RecordError):
        decode(body)


def test_random_and_mutated_bytes_are_a_record_or_an_error() -> None:
    """20,000 bodies; decode gives a record that can be sent on, or RecordError, and nothing else."""
    generator = random.Random(1)
    valid, accepted = encode(EXAMPLE), 0
    for number in range(20_000):
        if number % 4 == 0:
            body = generator.randbytes(generator.randrange(300))
        else:
            mutated = bytearray(valid)
            for _ in range(generator.randrange(1, 4)):
                start = generator.randrange(len(mutated))
                match generator.randrange(4):
                    case 0:
                        mutated[start] = generator.randrange(256)
                    case 1:
                        del mutated[start : start + generator.randrange(1, 20)]
                    case 2:
                        mutated[start:start] = generator.choice(
                            [b"1e999", b"-", b"\\ud800", b"\0", b"[[", b'"', b"9" * 40]
                        )
                    case 3:
                        end = start + generator.randrange(1, 40)
                        mutated[start:start] = mutated[start:end]
            body = bytes(mutated)
        try:
            record = decode(body)
        except RecordError:
            continue
        accepted += 1
        assert decode(encode(record)) == record
    # Mutations within texts and numbers leave records: both ways out were taken.
    assert 100 < accepted < 10_000
