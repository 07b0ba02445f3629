"""Models for tests of the store and of transfers: with real numbers in them, small, and of any split."""

from __future__ import annotations

import os
from pathlib import Path

from node.models.gguf import KeyValue, NewTensor, TensorInfo, read_header, write_gguf
from node.models.hashing import local_manifest
from node.models.index import ModelIndex, read_model
from node.models.layout import Layout, read_layout
from node.models.manifest import Manifest
from node.transfer.store import ModelStore
from node.transfer.stored import StoredModel
from rigs import random_models

SMALL = random_models.Shape("qwen3moe", n_layer=2, n_expert=6, n_used=2)
#: Experts of 3 MB, so that what file systems round to does not count.
LARGE = random_models.Shape("qwen3moe", n_layer=2, n_expert=8, n_used=2, n_embd=512, n_ff=512)


def source(shape: random_models.Shape = SMALL) -> tuple[ModelIndex, Manifest, Layout]:
    index = read_model(random_models.moe_model(shape))
    return index, local_manifest(index, folder=Path(index.paths[0]).parent / "manifests"), read_layout(index)


def split(index: ModelIndex, folder: Path, count: int) -> ModelIndex:
    """The model in ``count`` files, as gguf-split cuts them."""
    header = read_header(index.paths[0])
    tensors = list(header.tensors)
    size = -(-len(tensors) // count)
    for number in range(count):
        own = tensors[number * size : (number + 1) * size]
        values = dict(header.key_values) if number == 0 else {}
        values |= {
            "split.no": KeyValue(2, number.to_bytes(2, "little")),
            "split.count": KeyValue(2, count.to_bytes(2, "little")),
            "split.tensors.count": KeyValue(5, len(tensors).to_bytes(4, "little")),
        }
        path = folder / f"other-{number + 1:05d}-of-{count:05d}.gguf"
        with path.open("wb") as file:
            write_gguf(file, values, [_copied(tensor) for tensor in own])
    return read_model(folder / f"other-00001-of-{count:05d}.gguf")


def _copied(tensor: TensorInfo) -> NewTensor:
    return NewTensor(tensor.name, tensor.type, tensor.ne, lambda: [read(tensor.path, tensor.offset, tensor.bytes)])


def read(path: str, offset: int, count: int) -> bytes:
    with Path(path).open("rb") as file:
        file.seek(offset)
        return file.read(count)


def piece_bytes(index: ModelIndex, stored: StoredModel, number: int) -> bytes:
    """A piece's bytes as a copy has them."""
    return b"".join(read(part.path, part.offset, part.bytes) for part in stored.pieces[number].parts(index))


def new_store(folder: Path, limit_bytes: int = 0) -> ModelStore:
    return ModelStore(folder / "models", limit_bytes)


def disk_bytes(folder: Path) -> int:
    return sum((Path(root) / name).lstat().st_blocks * 512 for root, _, names in os.walk(folder) for name in names)
