"""Small model files in variants: another type, another byte, another split. And the shapes they have."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from node.models.gguf import KeyValue, NewTensor, TensorInfo, read_header, tensor_bytes, write_gguf
from node.models.index import read_model
from node.models.synthetic import SyntheticShape, _key_values, _Tensors, write_synthetic_model

_SMALL = {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_expert": 8, "n_used": 3, "n_ff": 256}
_DELTA = {"n_ff_shared": 256, "delta_keys": 2, "delta_values": 4, "delta_dim": 64}
TINY = SyntheticShape("qwen3moe", n_layer=8, n_vocab=1000, rope_dim=64, **_SMALL)
TINY_QWEN35 = SyntheticShape("qwen35moe", n_layer=8, n_vocab=1000, rope_dim=32, **_SMALL, **_DELTA)


def tiny_model(path: Path, layers: int = 4, **options: object) -> Path:
    """Makes a small model file, of some 8 MB."""
    write_synthetic_model(TINY, path, layers=layers, **options)  # type: ignore[arg-type]
    return path


def tensor_data(tensor: TensorInfo) -> bytes:
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.bytes)


def with_layer_in_q8_0(source: Path, target: Path, layer: int) -> Path:
    """The model with another quantisation of one layer's experts (whose values are noise), and the rest as it was."""
    other = read_model(tiny_model(target.with_suffix(".q8_0"), expert_type="q8_0"))
    by_name = {f"blk.{layer}.{name}": tensor for name, tensor in other.expert_tensors(layer).items()}
    header = read_header(source)
    tensors = [_new(by_name.get(tensor.name, tensor)) for tensor in header.tensors]
    with target.open("wb") as file:
        write_gguf(file, header.key_values, tensors)
    return target


def with_other_byte(source: Path, target: Path, layer: int, expert: int) -> Path:
    """A copy in which one byte of one expert's weights is another."""
    data = bytearray(source.read_bytes())
    (part,) = read_model(source).slice_parts(layer, expert, expert)["ffn_up_exps.weight"].parts
    data[part.offset + part.bytes // 2] ^= 1
    target.write_bytes(data)
    return target


def split_copy(source: Path, folder: Path, count: int) -> Path:
    """The model in `count` files, as llama-gguf-split names them; the first of them."""
    header = read_header(source)
    tensors = [_new(tensor) for tensor in header.tensors]
    folder.mkdir(exist_ok=True)
    for path, values, own in _parts(folder, dict(header.key_values), tensors, count):
        with path.open("wb") as file:
            write_gguf(file, values, own)
    return folder / f"other-00001-of-{count:05d}.gguf"


def split_of_holes(shape: SyntheticShape, folder: Path, count: int) -> Path:
    """Makes a model of that shape in `count` sparse files, without weights and next to no room. Returns the first."""
    made = _Tensors(shape, None, 0)
    made.add_all(shape.n_layer)
    tensors = [NewTensor(t.name, t.type, t.ne, partial(_zeros, tensor_bytes(t.type, t.ne))) for t in made.all]
    for path, values, own in _parts(folder, _key_values(shape, 0), tensors, count):
        with path.open("wb") as file:
            write_gguf(_Holes(file), values, own)  # type: ignore[arg-type]
            file.truncate()
    return folder / f"other-00001-of-{count:05d}.gguf"


def _parts(
    folder: Path, key_values: dict[str, KeyValue], tensors: list[NewTensor], count: int
) -> Iterator[tuple[Path, dict[str, KeyValue], list[NewTensor]]]:
    size = -(-len(tensors) // count)
    for number in range(count):
        values = dict(key_values) if number == 0 else {}
        values |= {
            "split.no": KeyValue(2, struct.pack("<H", number)),
            "split.count": KeyValue(2, struct.pack("<H", count)),
            "split.tensors.count": KeyValue(5, struct.pack("<i", len(tensors))),
        }
        path = folder / f"other-{number + 1:05d}-of-{count:05d}.gguf"
        yield path, values, tensors[number * size : (number + 1) * size]


_ZEROS = bytes(1 << 26)


def _zeros(count: int) -> Iterator[bytes | memoryview]:
    yield from [_ZEROS] * (count // len(_ZEROS))
    yield memoryview(_ZEROS)[: count % len(_ZEROS)]


class _Holes:
    """Writes into a file what is not `_ZEROS`, and steps over that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        if data is _ZEROS or isinstance(data, memoryview):
            self._file.seek(len(data), os.SEEK_CUR)
        else:
            self._file.write(data)


def _new(tensor: TensorInfo) -> NewTensor:
    return NewTensor(tensor.name, tensor.type, tensor.ne, lambda: [tensor_data(tensor)])
