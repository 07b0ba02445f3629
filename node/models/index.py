"""What a GGUF model consists of: trunk and expert slices, and where their bytes are.

Everything comes from the headers; no weight is read. A split set is one model, whichever of its parts is
named.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from node.errors import ModelError
from node.models.gguf import GgufHeader, TensorInfo, Value, read_header

__all__ = ["ModelIndex", "SliceTensor", "TensorInfo", "TensorPart", "read_model"]

# The tensors that llama.cpp places into the Swarm buffer: the override pattern, with the layer captured.
_EXPERT_NAME = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down|gate_up)_exps\.(?:weight|bias|scale))")
# What a slice's name between nodes can say (node/records.py); models have 128 layers and 1,000 experts at most so far.
LAYERS_MAX = 1024
EXPERTS_MAX = 65536
# The bounds of numbers that stand for a layer each, and of the architecture's name.
_NUMBERS_BYTES_MAX = 65536
_NAME_MAX = 63
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class TensorPart:
    """A run of bytes in a file."""

    path: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class SliceTensor:
    """One tensor of a slice: `type` is ggml's name, `parts` say where the bytes are, in ascending order of expert.

    `ne`: the dimensions of one expert in ggml's order; empty when each expert has a single number.
    """

    type: str
    ne: tuple[int, ...]
    parts: tuple[TensorPart, ...]

    def to_json(self) -> dict[str, object]:
        """The form of docs/protocol.md, "Expert control"."""
        parts = [{"path": part.path, "offset": part.offset, "bytes": part.bytes} for part in self.parts]
        return {"type": self.type, "ne": list(self.ne), "parts": parts}


@dataclass(frozen=True)
class ModelIndex:
    """The index of one model. Built by `read_model`.

    `n_layer` counts blocks as `block_count` does, trailing multi-token-prediction blocks included. `n_expert` is 0 for
    a dense model. `metadata` holds the header's scalars and numeric arrays, without the tokenizer's arrays.
    `header_digest` is the SHA-256 of the canonical header, 64 hex digits: key-values without `split.*`, and the
    tensors' names, types and shapes. `model_id` is its first half, until the bytes are known too: see
    `node.models.manifest`.
    """

    paths: tuple[str, ...]
    architecture: str
    n_layer: int
    n_embd: int
    n_expert: int
    model_id: str
    header_digest: str = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    metadata: Mapping[str, Value] = field(repr=False)
    _used: tuple[int, ...] = field(repr=False)
    _experts: Mapping[int, Mapping[str, TensorInfo]] = field(repr=False)

    def with_model_id(self, model_id: str) -> ModelIndex:
        """The same index, with the id of the bytes."""
        return replace(self, model_id=model_id)

    @property
    def n_expert_used(self) -> int:
        """Experts used per token; the largest of all layers."""
        return max(self._used, default=0)

    def expert_used(self, layer: int) -> int:
        """Experts used per token in `layer`."""
        return self._used[layer] if layer < len(self._used) else self.n_expert_used

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts, ascending."""
        return tuple(sorted(self._experts))

    def expert_tensors(self, layer: int) -> Mapping[str, TensorInfo]:
        """The tensors of `layer` that are cut by experts, by name without `blk.N.`; empty for a layer without."""
        return self._experts.get(layer, {})

    def slice_parts(self, layer: int, first: int, last: int) -> dict[str, SliceTensor]:
        """The tensors of experts `first` to `last` (both included) of `layer`, by name without `blk.N.`.

        Raises ModelError when the layer has no experts or the range is not within them.
        """
        tensors = self.expert_tensors(layer)
        if not tensors:
            raise ModelError(f"layer {layer} of {self.paths[0]} has no routed experts")
        if not 0 <= first <= last < self.n_expert:
            raise ModelError(
                f"experts {first}-{last} of layer {layer} are not within the {self.n_expert} experts of {self.paths[0]}"
            )
        slices = {}
        for name, tensor in tensors.items():
            one = tensor.bytes // self.n_expert
            part = TensorPart(tensor.path, tensor.offset + first * one, (last - first + 1) * one)
            slices[name] = SliceTensor(tensor.type, tensor.ne[:-1], (part,))
        return slices

    def expert_bytes(self, layer: int) -> int:
        """Bytes of all experts of `layer`, 0 without experts."""
        return sum(tensor.bytes for tensor in self.expert_tensors(layer).values())

    @cached_property
    def trunk_tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors that are not cut by experts, in the order of their names: what a router keeps."""
        of_experts = {tensor.name for tensors in self._experts.values() for tensor in tensors.values()}
        trunk = (tensor for tensor in self.tensors if tensor.name not in of_experts)
        return tuple(sorted(trunk, key=lambda tensor: tensor.name))

    @cached_property
    def trunk_bytes(self) -> int:
        """Bytes of `trunk_tensors`."""
        return sum(tensor.bytes for tensor in self.trunk_tensors)


def read_model(path: str | os.PathLike[str]) -> ModelIndex:
    """Reads the index of the model in `path`: a GGUF file, or any part of a split set beside its other parts.

    Raises ModelError when a file is missing, damaged, or not as llama.cpp would accept it.
    """
    headers = _read_parts(Path(path))
    main = headers[0]
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelError(f"a tensor of {main.path} occurs in two parts of the split set")
    architecture = _text(main, "general.architecture")
    n_layer = _number(main, f"{architecture}.block_count")
    n_expert = _number(main, f"{architecture}.expert_count", 0)
    if n_layer > LAYERS_MAX or n_expert > EXPERTS_MAX:
        raise ModelError(
            f"model file {main.path} claims {n_layer} layers of {n_expert} experts; "
            f"up to {LAYERS_MAX} of {EXPERTS_MAX} are possible"
        )
    used = _per_layer(main, f"{architecture}.expert_used_count")
    header_digest = _header_digest(main, tensors)
    return ModelIndex(
        paths=tuple(header.path for header in headers),
        architecture=architecture,
        n_layer=n_layer,
        n_embd=_number(main, f"{architecture}.embedding_length"),
        n_expert=n_expert if n_expert > 1 else 0,
        model_id=header_digest[:32],
        header_digest=header_digest,
        tensors=tensors,
        metadata=_metadata(main),
        _used=used if len(used) != 1 else used * n_layer,
        _experts=_find_experts(tensors, n_expert),
    )


def _read_parts(path: Path) -> list[GgufHeader]:
    named = read_header(path)
    count = _number(named, "split.count", 0)
    if count < 2:
        return [named]
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path} says that it is one of {count} parts, but its name does not end in -NNNNN-of-{count:05d}.gguf; "
            f"give it back the name it had"
        )
    headers = []
    for number in range(1, count + 1):
        part = path.with_name(f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf")
        header = named if part.name == path.name else read_header(part)
        if _number(header, "split.count", 0) != count or _number(header, "split.no", -1) != number - 1:
            raise ModelError(f"{part} is not part {number} of {count}: its header says otherwise")
        headers.append(header)
    expected = _number(headers[0], "split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if found != expected:
        raise ModelError(f"the parts of {headers[0].path} hold {found} tensors together, but {expected} are expected")
    return headers


def _find_experts(tensors: tuple[TensorInfo, ...], n_expert: int) -> dict[int, dict[str, TensorInfo]]:
    experts: dict[int, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        match = _EXPERT_NAME.fullmatch(tensor.name)
        if match is None:
            continue
        if n_expert < 2 or tensor.ne[-1] != n_expert:
            raise ModelError(
                f"tensor {tensor.name} of {tensor.path} is named like expert weights, but its dimensions "
                f"{list(tensor.ne)} do not end in the expert count, {n_expert}; this model cannot be shared"
            )
        if int(match[1]) >= LAYERS_MAX or tensor.bytes == 0:
            raise ModelError(f"tensor {tensor.name} of {tensor.path} is empty, or of a layer beyond {LAYERS_MAX - 1}")
        # With one number per expert, a quantised type would have several experts in one block.
        if len(tensor.ne) == 1 and tensor.type not in ("f32", "f16", "bf16"):
            raise ModelError(f"{tensor.name} of {tensor.path} cannot be cut by experts: its type is {tensor.type}")
        experts.setdefault(int(match[1]), {})[match[2]] = tensor
    return experts


def _header_digest(main: GgufHeader, tensors: tuple[TensorInfo, ...]) -> str:
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(struct.pack("<Q", len(data)) + data)

    for key in sorted(main.key_values):
        if not key.startswith("split."):
            add(key.encode())
            add(struct.pack("<I", main.key_values[key].type) + main.key_values[key].raw)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        add(tensor.name.encode())
        add(tensor.type.encode())
        add(struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne))
    return digest.hexdigest()


def _metadata(header: GgufHeader) -> dict[str, Value]:
    metadata = {}
    for key, item in header.key_values.items():
        value = item.value if len(item.raw) < _NUMBERS_BYTES_MAX else None
        if value is not None:
            metadata[key] = value
    return metadata


def _value(header: GgufHeader, key: str) -> Value | None:
    item = header.key_values.get(key)
    return None if item is None or len(item.raw) > _NUMBERS_BYTES_MAX else item.value


def _text(header: GgufHeader, key: str) -> str:
    value = _value(header, key)
    if not isinstance(value, str) or not 0 < len(value) <= _NAME_MAX:
        raise ModelError(f"model file {header.path} has no text under '{key}'")
    return value


def _number(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = _value(header, key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"model file {header.path} has no count under '{key}'")
    return value


def _per_layer(header: GgufHeader, key: str) -> tuple[int, ...]:
    value = _value(header, key)
    if value is None:
        return ()
    counts = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelError(f"model file {header.path} has no count under '{key}'")
        counts.append(item)
    return tuple(counts)
