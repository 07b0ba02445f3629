"""The expert call's messages, as docs/protocol.md defines them: encoding, strict decoding, limits. No I/O.

A request is a msgpack map:

    v, id         uint, uint64       version; the caller's number, echoed
    model         str                1 to 64 of [0-9a-z-]
    program       uint64             digest of the layer's program
    term, layer   uint64, int32      the router's term
    reduce, rows  str, int32         rows: a row back per pair, sum: one per row; n_rows
    dtype         str                of h and y: f32, bf16, f16
    h             bin                [n_rows, or n_pairs for an input of pairs; n_in]
    row, expert   bin, int32 each    [n_pairs]
    weight        bin, float32 each  [n_pairs]; left out if the program uses none
    deadline_ms   uint64

A reply: v, id, y (bin, [n_pairs or n_rows, n_out]), compute_us, queue_us (uint); or v, id and error, a map of kind,
message (str), layer (int; -1: unknown), experts (array of int) and retry (bool).

Nothing in a message is trusted: a field is checked for type and range, every length against what the fields before it
imply, and only then an array is made, as a view of the body where format and alignment allow it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np

from node.bounded_msgpack import LARGE_BYTES, MAX_STR_BYTES, Body, unpack_map
from node.errors import CallRefused, MalformedMessage, UnsupportedVersion
from node.number_formats import ITEM_BYTES, Floats, Ints, from_wire, ints_from_wire, to_wire

VERSION: Final = 1
CONTENT_TYPE: Final = "application/msgpack"
MAX_CONNECTIONS: Final = 64
MAX_WAITING_CALLS: Final = 16
MAX_ERROR_EXPERTS: Final = 16
MAX_MODEL_CHARS: Final = 64
OVERHEAD_BYTES: Final = 4096

HTTP_STATUS: Final[Mapping[str, int]] = {
    "bad_request": 400,
    "unsupported_version": 400,
    "unknown_model": 404,
    "not_held": 404,
    "program_mismatch": 409,
    "stale_term": 409,
    "too_large": 413,
    "too_late": 503,
    "not_ready": 503,
    "failed": 500,
}

_UINT64_MAX = 2**64 - 1
_INT32_MAX = 2**31 - 1
_MODEL_ID = re.compile(r"[0-9a-z-]{1,64}\Z")


@dataclass(frozen=True)
class LayerShape:
    """What a server knows of a layer before it reads a call. `per_pair`: `h` has one row per pair, not per row."""

    n_in: int
    n_expert: int
    n_used: int
    max_rows: int
    per_pair: bool
    uses_weight: bool


@dataclass(frozen=True, eq=False)
class CallRequest:
    """One expert call. `h` [n_rows or n_pairs, n_in] float32 (travels as `dtype`); `row`, `expert` [n_pairs] int32;
    `weight` [n_pairs] float32 or None."""

    id: int
    model: str
    program: int
    term: int
    layer: int
    reduce: str
    n_rows: int
    dtype: str
    h: Floats
    row: Ints
    expert: Ints
    weight: Floats | None
    deadline_ms: int


@dataclass(frozen=True, eq=False)
class CallReply:
    """`y` [n_pairs or n_rows, n_out] float32 (travels as `dtype`)."""

    id: int
    dtype: str
    y: Floats
    compute_us: int
    queue_us: int


@dataclass(frozen=True)
class CallError:
    """Why a call was refused or failed. `layer` is -1 when unknown; `experts` holds at most 16 global ids."""

    id: int
    kind: str
    message: str
    layer: int = -1
    experts: tuple[int, ...] = ()
    retry: bool = False

    @property
    def http_status(self) -> int:
        return HTTP_STATUS.get(self.kind, 500)

    @staticmethod
    def of(error: CallRefused) -> CallError:
        layer = -1 if error.layer is None else error.layer
        return CallError(
            error.call_id, error.kind, error.message, layer, error.experts[:MAX_ERROR_EXPERTS], error.retry
        )

    def to_exception(self, node: str | None = None) -> CallRefused:
        layer = None if self.layer < 0 else self.layer
        return CallRefused(
            self.message,
            kind=self.kind,
            retry=self.retry,
            call_id=self.id,
            node=node,
            layer=layer,
            experts=self.experts,
        )


def body_limit_bytes(max_rows: int, n_in: int, n_used: int, per_pair: bool) -> int:
    """The most bytes a request's body may hold for a layer of this shape."""
    if per_pair:
        return max_rows * n_used * (n_in * 4 + 12) + OVERHEAD_BYTES
    return max_rows * (n_in * 4 + n_used * 12) + OVERHEAD_BYTES


def is_model_id(text: object) -> bool:
    """Whether `text` is a model id: 1 to 64 of [0-9a-z-]."""
    return type(text) is str and _MODEL_ID.match(text) is not None


def encode_request(request: CallRequest) -> bytes:
    """Raises OverflowError when a value of `h` does not fit `dtype`."""
    fields: dict[str, Any] = {
        "v": VERSION,
        "id": request.id,
        "model": request.model,
        "program": request.program,
        "term": request.term,
        "layer": request.layer,
        "reduce": request.reduce,
        "rows": request.n_rows,
        "dtype": request.dtype,
        "h": to_wire(request.h, request.dtype),
        "row": np.ascontiguousarray(request.row, dtype=np.int32),
        "expert": np.ascontiguousarray(request.expert, dtype=np.int32),
    }
    if request.weight is not None:
        fields["weight"] = np.ascontiguousarray(request.weight, dtype=np.float32)
    fields["deadline_ms"] = request.deadline_ms
    return b"".join(_parts(fields))


def decode_request(body: Body, layer_shape: Callable[[str, int, int], LayerShape]) -> CallRequest:
    """The call in `body`, wholly checked, except that this server holds the experts.

    `layer_shape(model, layer, program)` gives the shape that the arrays must have, or raises CallRefused; it is called
    once the fields before the arrays are known to be well-formed. Raises CallRefused with the call's id:
    MalformedMessage, UnsupportedVersion, or what `layer_shape` raised. `h` can be a view of `body`.
    """
    fields = _open(body)
    call_id = _uint(fields, "id", _UINT64_MAX)
    layer: int | None = None
    try:
        model = fields.get("model")
        if not is_model_id(model):
            raise MalformedMessage("field 'model' is not 1 to 64 of [0-9a-z-]")
        program = _uint(fields, "program", _UINT64_MAX)
        term = _uint(fields, "term", _UINT64_MAX)
        layer = _uint(fields, "layer", _INT32_MAX)
        reduce = _choice(fields, "reduce", ("rows", "sum"))
        n_rows = _uint(fields, "rows", _INT32_MAX)
        dtype = _choice(fields, "dtype", tuple(ITEM_BYTES))
        deadline_ms = _uint(fields, "deadline_ms", _UINT64_MAX)
        shape = layer_shape(str(model), layer, program)
        h, row, expert, weight = _arrays(fields, n_rows, dtype, shape)
        return CallRequest(
            call_id, str(model), program, term, layer, reduce, n_rows, dtype, h, row, expert, weight, deadline_ms
        )
    except CallRefused as error:
        error.call_id = call_id
        if error.layer is None:
            error.layer = layer
        raise


def encode_reply(reply: CallReply) -> Body:
    """The message, with `y` copied once; a large one is a memoryview. Raises OverflowError when a value of `y` does not
    fit `dtype`."""
    parts = _parts(
        {
            "v": VERSION,
            "id": reply.id,
            "y": to_wire(reply.y, reply.dtype),
            "compute_us": reply.compute_us,
            "queue_us": reply.queue_us,
        }
    )
    n_bytes = sum(len(part) for part in parts)
    if n_bytes <= LARGE_BYTES:
        return b"".join(parts)
    # NumPy copies without the GIL, bytes.join with it.
    message = np.empty(n_bytes, dtype=np.uint8)
    position = 0
    for part in parts:
        message[position : position + len(part)] = np.frombuffer(part, dtype=np.uint8)
        position += len(part)
    return message.data


def decode_reply(body: Body, *, call_id: int, n_rows: int, n_out: int, dtype: str) -> CallReply | CallError:
    """The answer to call `call_id`, whose `y` must be [n_rows, n_out] in `dtype` and finite. Raises MalformedMessage,
    UnsupportedVersion."""
    fields = _open(body)
    if "error" in fields:
        return _error(fields)
    answered = _uint(fields, "id", _UINT64_MAX)
    if answered != call_id:
        raise MalformedMessage(f"the reply is to call {answered}, not to {call_id}", call_id=call_id)
    try:
        y = _floats(fields, "y", n_rows, n_out, dtype)
        compute_us = _uint(fields, "compute_us", _UINT64_MAX)
        queue_us = _uint(fields, "queue_us", _UINT64_MAX)
    except CallRefused as error:
        error.call_id = call_id
        raise
    return CallReply(answered, dtype, y, compute_us, queue_us)


def encode_error(error: CallError) -> bytes:
    # The message may quote what a peer sent; its encoded form stays within what the reader on the other side accepts.
    message = error.message.encode("utf-8", "replace")[: MAX_STR_BYTES // 4].decode("utf-8", "ignore")
    described = {
        "kind": error.kind,
        "message": message,
        "layer": error.layer,
        "experts": list(error.experts[:MAX_ERROR_EXPERTS]),
        "retry": error.retry,
    }
    return b"".join(_parts({"v": VERSION, "id": error.id, "error": described}))


def decode_error(body: Body) -> CallError:
    """The error that a message holds. Raises MalformedMessage, UnsupportedVersion."""
    return _error(_open(body))


def _open(body: Body) -> dict[str, Any]:
    try:
        fields = unpack_map(body)
    except ValueError as error:
        raise MalformedMessage(f"not a message of this protocol: {error or 'nested too deeply'}") from None
    version = fields.get("v")
    if type(version) is not int:
        raise MalformedMessage("field 'v', the protocol version, is missing or not an integer")
    if version != VERSION:
        call_id = fields.get("id")
        raise UnsupportedVersion(
            f"the message has protocol version {version}, this program speaks version {VERSION}: "
            "run the same release on both machines",
            call_id=call_id if type(call_id) is int and 0 <= call_id <= _UINT64_MAX else 0,
        )
    return fields


def _error(fields: dict[str, Any]) -> CallError:
    call_id = _uint(fields, "id", _UINT64_MAX)
    error = fields.get("error")
    if type(error) is not dict:
        raise MalformedMessage("field 'error' is not a map", call_id=call_id)
    kind, message, layer = error.get("kind"), error.get("message"), error.get("layer")
    experts, retry = error.get("experts"), error.get("retry")
    if type(kind) is not str or type(message) is not str or type(layer) is not int or type(retry) is not bool:
        raise MalformedMessage("field 'error' lacks a field or has one of a wrong type", call_id=call_id)
    if not -1 <= layer <= _INT32_MAX:
        raise MalformedMessage("field 'layer' of the error is out of range", call_id=call_id)
    if type(experts) is not list or len(experts) > MAX_ERROR_EXPERTS or any(type(e) is not int for e in experts):
        raise MalformedMessage("field 'experts' of the error is not a short array of integers", call_id=call_id)
    return CallError(call_id, kind, message, layer, tuple(experts), retry)


def _uint(fields: dict[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int:
        raise MalformedMessage(f"field '{name}' is {'not an integer' if name in fields else 'missing'}")
    if not 0 <= value <= most:
        raise MalformedMessage(f"field '{name}' is {value}, outside 0 to {most}")
    return value


def _choice(fields: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = fields.get(name)
    if type(value) is not str or value not in allowed:
        raise MalformedMessage(f"field '{name}' is not one of {', '.join(allowed)}")
    return value


def _bin(fields: dict[str, Any], name: str, n_bytes: int | None = None, why: str = "") -> Body:
    value = fields.get(name)
    if not isinstance(value, (bytes, memoryview)):
        raise MalformedMessage(f"field '{name}' is {'not binary' if name in fields else 'missing'}")
    if n_bytes is not None and len(value) != n_bytes:
        raise MalformedMessage(f"field '{name}' has {len(value)} bytes, expected {n_bytes}{why}")
    return value


def _floats(fields: dict[str, Any], name: str, n_rows: int, n_columns: int, dtype: str) -> Floats:
    n_bytes = n_rows * n_columns * ITEM_BYTES[dtype]
    body = _bin(fields, name, n_bytes, f" ({n_rows} rows of {n_columns} {dtype} values)")
    values = from_wire(body, dtype).reshape(n_rows, n_columns)
    if not np.isfinite(values).all():
        raise MalformedMessage(f"field '{name}' holds a value that is not finite")
    return values


def _arrays(
    fields: dict[str, Any], n_rows: int, dtype: str, shape: LayerShape
) -> tuple[Floats, Ints, Ints, Floats | None]:
    if not 1 <= n_rows <= shape.max_rows:
        raise MalformedMessage(f"field 'rows' is {n_rows}, this server takes 1 to {shape.max_rows}: split the batch")
    # Copies of the small fields, since a view of one of them would keep the whole body alive next to `h`.
    row_body, expert_body = bytes(_bin(fields, "row")), bytes(_bin(fields, "expert"))
    n_pairs, odd_bytes = divmod(len(expert_body), 4)
    if odd_bytes or not 1 <= n_pairs <= n_rows * shape.n_used:
        raise MalformedMessage(
            f"field 'expert' has {len(expert_body)} bytes, expected 4 for each of 1 to {n_rows * shape.n_used} pairs"
        )
    if len(row_body) != len(expert_body):
        raise MalformedMessage(f"field 'row' has {len(row_body)} bytes, field 'expert' {len(expert_body)}")
    if ("weight" in fields) != shape.uses_weight:
        raise MalformedMessage(
            f"field 'weight' is {'missing' if shape.uses_weight else 'not used'} by this layer's program"
        )
    weight = None
    if shape.uses_weight:
        fields["weight"] = bytes(_bin(fields, "weight"))
        weight = _floats(fields, "weight", 1, n_pairs, "f32").reshape(n_pairs)
    row, expert = ints_from_wire(row_body), ints_from_wire(expert_body)
    _check_pairs(row, expert, n_rows, shape.n_expert)
    h = _floats(fields, "h", n_pairs if shape.per_pair else n_rows, shape.n_in, dtype)
    return h, row, expert, weight


def _check_pairs(row: Ints, expert: Ints, n_rows: int, n_expert: int) -> None:
    if row[0] < 0 or row[-1] >= n_rows or (row[1:] < row[:-1]).any():
        raise MalformedMessage(f"field 'row' holds an index outside 0 to {n_rows - 1}, or descends")
    outside = (expert < 0) | (expert >= n_expert)
    if outside.any():
        raise MalformedMessage(
            f"field 'expert' holds an id outside 0 to {n_expert - 1}",
            experts=[int(e) for e in expert[outside][:MAX_ERROR_EXPERTS]],
        )
    pair = row.astype(np.int64) * n_expert + expert
    if (pair[1:] <= pair[:-1]).any() and len(np.unique(pair)) != len(pair):
        raise MalformedMessage("a (row, expert) pair stands twice in the call")


def _parts(fields: dict[str, Any]) -> list[Body]:
    """The fields as a msgpack map, in their order, in parts: an array is a view of its bytes."""
    packer = msgpack.Packer()
    parts: list[Body] = [packer.pack_map_header(len(fields))]
    for name, value in fields.items():
        parts.append(packer.pack(name))
        if isinstance(value, np.ndarray):
            parts.append(_bin_header(value.nbytes))
            parts.append(value.reshape(-1).view(np.uint8).data)
        else:
            parts.append(packer.pack(value))
    return parts


def _bin_header(n_bytes: int) -> bytes:
    if n_bytes < 1 << 8:
        return b"\xc4" + n_bytes.to_bytes(1, "big")
    if n_bytes < 1 << 16:
        return b"\xc5" + n_bytes.to_bytes(2, "big")
    return b"\xc6" + n_bytes.to_bytes(4, "big")
