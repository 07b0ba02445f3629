"""Headers of GGUF files: a bounded reader, and a writer that passes key-values through unchanged.

The `gguf` package's reader builds a NumPy view for every array element: two seconds for a 49,000-token
vocabulary, a quarter of a minute for the reference model's, and without end for a damaged file that claims 2**60
elements. This one reads nothing but the header, skips arrays, and checks every length against the file's
size, as strictly as ggml's own loader.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from node.errors import ModelError

#: ggml type id -> (name as llama.cpp prints it, weights in a block, bytes of a block)
GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}
TYPE_IDS: Mapping[str, int] = {name: number for number, (name, _, _) in GGML_TYPES.items()}

UINT32, STRING, ARRAY = 4, 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

#: A header above this is no model's: the largest vocabularies, of 260,000 tokens and 440,000 merges, take some 15 MB.
MAX_HEADER_BYTES = 40 << 20
# The largest value. While it is read it is there twice: with the header's limit, 64 MiB in all.
_MAX_VALUE_BYTES = 24 << 20
_MAX_ARRAY_LENGTH = 1 << 21
# The most tensors, and keys: what they become takes many times their place in the file. Models have 2,000 and 60.
_MAX_ENTRIES = 1 << 15
# A message repeats no more characters of a file.
_MAX_SHOWN = 64
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME - 1
_MAX_DIMS = 4

Value = bool | int | float | str | list[bool | int | float]


@dataclass(frozen=True)
class KeyValue:
    """A metadata value as it stands in the file: GGUF type id and the bytes after it."""

    type: int
    raw: bytes

    @property
    def value(self) -> Value | None:
        """The decoded value; None for an array of strings."""
        if self.type == STRING:
            return self.raw[8:].decode("utf-8", errors="replace")
        if self.type == ARRAY:
            (item_type,) = _U32.unpack_from(self.raw, 0)
            item = _SCALARS.get(item_type)
            return None if item is None else [values[0] for values in item.iter_unpack(self.raw[12:])]
        scalar: bool | int | float = _SCALARS[self.type].unpack(self.raw)[0]
        return scalar

    @classmethod
    def uint32(cls, value: int) -> KeyValue:
        return cls(UINT32, _U32.pack(value))

    @classmethod
    def string(cls, value: str) -> KeyValue:
        data = value.encode()
        return cls(STRING, _U64.pack(len(data)) + data)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file. `type` is ggml's name for it, `ne` the dimensions in ggml's order (fastest first),
    `offset` the position of its data in the file `path`, both in bytes."""

    name: str
    type: str
    ne: tuple[int, ...]
    path: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What one GGUF file says about itself, in the file's order."""

    path: str
    size_bytes: int
    key_values: Mapping[str, KeyValue] = field(repr=False)
    tensors: Sequence[TensorInfo] = field(repr=False)


class _Malformed(Exception):
    pass


class _Cursor:
    """Reads a file's beginning chunk by chunk. Not memory mapped: a file that shrinks while it is mapped
    kills the process."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._dropped = 0
        self.data = bytearray()
        self.position = 0  # in `data`

    @property
    def file_position(self) -> int:
        return self._dropped + self.position

    def need(self, count: int) -> int:
        """Makes `count` bytes at the position available; returns the position before them, and moves on."""
        start, end = self.position, self.position + count
        if end > len(self.data):
            in_file = self._dropped + end
            if in_file > self._size:
                raise _Malformed(f"the file ends inside its header (at byte {self._size} of at least {in_file})")
            if in_file > MAX_HEADER_BYTES:
                raise _Malformed(f"its header is larger than {MAX_HEADER_BYTES} bytes")
            while len(self.data) < end:
                chunk = self._file.read(1 << 20)
                if not chunk:
                    raise _Malformed(f"the file ends inside its header (at byte {self._dropped + len(self.data)})")
                self.data += chunk
        self.position = end
        return start

    def drop(self) -> None:
        """Forgets what is before the position; positions that `need` returned are of no use afterwards."""
        del self.data[: self.position]
        self._dropped += self.position
        self.position = 0

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.data, self.need(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.data, self.need(8))[0]
        return value

    def name(self, what: str, limit: int) -> str:
        length = self.u64()
        if not 0 < length <= limit:
            raise _Malformed(f"a {what} is {length} bytes long, outside 1 to {limit}")
        start = self.need(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise _Malformed(f"a {what} is not UTF-8") from None

    def skip_value(self, value_type: int, key: str) -> None:
        if value_type == STRING:
            self._skip_bytes(self.u64(), key)
        elif value_type == ARRAY:
            item_type, length = self.u32(), self.u64()
            if length > _MAX_ARRAY_LENGTH:
                raise _Malformed(f"'{key}' claims {length} elements")
            if item_type == STRING:
                self._skip_strings(length, key)
            elif item_type in _SCALARS:
                self.need(length * _SCALARS[item_type].size)
            else:
                raise _Malformed(f"'{key}' is an array of type {item_type}, which GGUF does not have")
        elif value_type in _SCALARS:
            self.need(_SCALARS[value_type].size)
        else:
            raise _Malformed(f"'{key}' has type {value_type}, which GGUF does not have")

    def _skip_bytes(self, count: int, key: str) -> None:
        if count > _MAX_VALUE_BYTES:
            raise _Malformed(f"'{key}' claims {count} bytes")
        self.need(count)

    def _skip_strings(self, count: int, key: str) -> None:
        begin = position = self.position
        unpack = _U64.unpack_from
        for _ in range(count):
            if position + 8 > len(self.data):
                self.position = position
                self.need(8)
            position += 8 + unpack(self.data, position)[0]
            if position - begin > _MAX_VALUE_BYTES:
                raise _Malformed(f"'{key}' claims more than {_MAX_VALUE_BYTES} bytes")
        self.position = begin
        self.need(position - begin)


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Reads and checks the header of one GGUF file (version 2 or 3, little-endian).

    Raises ModelError when the file is missing, truncated, not GGUF, or not as ggml would accept it.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"model file {name} is not a regular file")
            return _parse(name, _Cursor(file, status.st_size), status.st_size)
    except OSError as error:
        raise ModelError(f"model file {name} cannot be read: {error.strerror or error}") from error
    except _Malformed as error:
        raise ModelError(
            f"model file {name} is damaged or not a GGUF file: {error}; fetch it again or name another"
        ) from error


def _parse(path: str, cursor: _Cursor, size: int) -> GgufHeader:
    start = cursor.need(4)
    if cursor.data[start : start + 4] != b"GGUF":
        raise _Malformed("it does not begin with 'GGUF'")
    version = cursor.u32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = "it is big-endian" if swapped in (2, 3) else f"GGUF version {version} is not supported (2 and 3 are)"
        raise _Malformed(reason)
    n_tensors, n_key_values = cursor.u64(), cursor.u64()
    if max(n_tensors, n_key_values) > _MAX_ENTRIES:
        raise _Malformed(f"it claims {n_tensors} tensors and {n_key_values} keys")

    key_values: dict[str, KeyValue] = {}
    for _ in range(n_key_values):
        cursor.drop()
        key = cursor.name("key", 65535)
        if key in key_values:
            raise _Malformed(f"the key '{key[:_MAX_SHOWN]}' occurs twice")
        value_type = cursor.u32()
        begin = cursor.position
        cursor.skip_value(value_type, key[:_MAX_SHOWN])
        with memoryview(cursor.data) as data:
            key_values[key] = KeyValue(value_type, bytes(data[begin : cursor.position]))

    alignment: Value | None = 32
    if "general.alignment" in key_values:
        item = key_values["general.alignment"]
        alignment = item.value if item.type in _SCALARS else None
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment is {alignment}, not a power of two")

    cursor.drop()
    infos = [_parse_tensor(cursor) for _ in range(n_tensors)]
    if len({info[0] for info in infos}) != len(infos):
        raise _Malformed("a tensor name occurs twice")
    data_start = _pad(cursor.file_position, alignment)
    tensors = []
    expected = 0
    for tensor_name, type_id, ne, offset in infos:
        n_bytes = tensor_bytes(GGML_TYPES[type_id][0], ne)
        if offset != expected:
            raise _Malformed(f"tensor {tensor_name} has offset {offset}, expected {expected}")
        if data_start + offset + n_bytes > size:
            raise _Malformed(
                f"it is truncated: tensor {tensor_name} ends at byte {data_start + offset + n_bytes} of {size}"
            )
        tensors.append(TensorInfo(tensor_name, GGML_TYPES[type_id][0], ne, path, data_start + offset, n_bytes))
        expected = _pad(offset + n_bytes, alignment)
    return GgufHeader(path, size, key_values, tensors)


def _parse_tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.name("tensor name", _MAX_NAME_BYTES)
    n_dims = cursor.u32()
    if n_dims > _MAX_DIMS:
        raise _Malformed(f"tensor {name} has {n_dims} dimensions")
    ne = tuple(cursor.u64() for _ in range(n_dims)) or (1,)
    n_elements = 1
    for length in ne:
        n_elements *= max(length, 1)
    if n_elements >= 1 << 63:
        raise _Malformed(f"tensor {name} has impossible dimensions {list(ne)}")
    type_id = cursor.u32()
    if type_id not in GGML_TYPES:
        raise _Malformed(f"tensor {name} has type {type_id}, which is not known")
    if ne[0] % GGML_TYPES[type_id][1]:
        raise _Malformed(f"tensor {name} has rows of {ne[0]} weights, which {GGML_TYPES[type_id][0]} cannot hold")
    return name, type_id, ne, cursor.u64()


def tensor_bytes(type_name: str, ne: Sequence[int]) -> int:
    """Bytes of a tensor of ggml type `type_name` with dimensions `ne`."""
    _, block, block_bytes = GGML_TYPES[TYPE_IDS[type_name]]
    n_elements = 1
    for length in ne:
        n_elements *= length
    return n_elements // block * block_bytes


def _pad(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: `data` gives its bytes in chunks, and is called when their turn comes."""

    name: str
    type: str
    ne: tuple[int, ...]
    data: Callable[[], Iterable[bytes]]


def write_gguf(
    file: BinaryIO,
    key_values: Mapping[str, KeyValue],
    tensors: Sequence[NewTensor],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a GGUF version 3 file, in the order given and with an alignment of 32 bytes.

    `progress` is called with (bytes done, bytes in all) after each tensor. Raises ValueError when a tensor's data
    is not as long as its type and dimensions say, or `key_values` ask for another alignment.
    """
    if "general.alignment" in key_values:
        raise ValueError("this writer aligns to 32 bytes: leave general.alignment out")
    head = bytearray(b"GGUF" + _U32.pack(3) + _U64.pack(len(tensors)) + _U64.pack(len(key_values)))
    for key, value in key_values.items():
        head += _U64.pack(len(key.encode())) + key.encode() + _U32.pack(value.type) + value.raw
    offset = 0
    for tensor in tensors:
        head += _U64.pack(len(tensor.name.encode())) + tensor.name.encode() + _U32.pack(len(tensor.ne))
        head += b"".join(_U64.pack(length) for length in tensor.ne)
        head += _U32.pack(TYPE_IDS[tensor.type]) + _U64.pack(offset)
        offset = _pad(offset + tensor_bytes(tensor.type, tensor.ne), 32)
    head += bytes(_pad(len(head), 32) - len(head))
    file.write(head)

    total, done = offset, 0
    for tensor in tensors:
        expected = tensor_bytes(tensor.type, tensor.ne)
        written = 0
        for chunk in tensor.data():
            file.write(chunk)
            written += len(chunk)
        if written != expected:
            raise ValueError(f"tensor {tensor.name}: {written} bytes of data, expected {expected}")
        file.write(bytes(_pad(expected, 32) - expected))
        done += _pad(expected, 32)
        if progress is not None:
            progress(done, total)
