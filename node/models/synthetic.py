"""GGUF files with the shape of a named model and random weights: to measure and test with, without fetching it.

llama.cpp loads and runs them like any other. What they say is noise, but finite noise, and the same for the same seed.
They are written at about the disk's speed: each tensor is one stretch of random blocks, repeated, and every expert
begins at another place in it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.errors import ModelError
from node.files import new_file
from node.models.gguf import ARRAY, GGML_TYPES, STRING, TYPE_IDS, KeyValue, NewTensor, tensor_bytes, write_gguf
from node.models.random_blocks import BLOCK_TYPES, random_blocks

Progress = Callable[[int, int], None]

# Large enough for few system calls, small enough to stay in a cache.
_CHUNK_BYTES = 1 << 22
# A tensor's random stretch is at least this long, and longer for one with many rows.
_STRETCH_BYTES = 1 << 22
_FILE_TYPE_Q4_K_M = 15  # llama.cpp's number for what `llama-quantize … Q4_K_M` makes


@dataclass(frozen=True)
class SyntheticShape:
    """Sizes of a model of the architecture `qwen3moe` or `qwen35moe`.

    Quantised as llama-quantize's Q4_K_M would, so rows are multiples of 256: n_embd, n_ff, n_head * head_dim and
    delta_values * delta_dim. `n_ff_shared` and those after it are qwen35moe's, where three of four layers are gated
    delta nets with `delta_keys` key heads and `delta_values` value heads of `delta_dim` each.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_used: int
    n_ff: int
    n_vocab: int
    rope_dim: int
    n_ff_shared: int = 0
    delta_keys: int = 0
    delta_values: int = 0
    delta_dim: int = 0


#: The shapes that can be named, as the published configurations of Qwen3-30B-A3B and Qwen3.5-122B-A10B have them.
SHAPES: Final[Mapping[str, SyntheticShape]] = {
    "qwen3-30b-a3b": SyntheticShape(
        *("qwen3moe", 48, 2048, 32, 4, 128),
        n_expert=128,
        n_used=8,
        n_ff=768,
        n_vocab=151936,
        rope_dim=128,
    ),
    "qwen3.5-122b": SyntheticShape(
        *("qwen35moe", 48, 3072, 32, 2, 256),
        n_expert=256,
        n_used=8,
        n_ff=1024,
        n_vocab=248320,
        rope_dim=64,
        n_ff_shared=1024,
        delta_keys=16,
        delta_values=64,
        delta_dim=128,
    ),
}


def write_synthetic_model(
    shape: SyntheticShape,
    path: str | os.PathLike[str],
    *,
    layers: int | None = None,
    expert_type: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Writes a model of `shape` to `path`, which appears whole or not at all, and returns the file's size in bytes.

    `layers`: only the first so many. `expert_type`: this ggml type for all expert tensors, one of BLOCK_TYPES.
    `progress` is called with (bytes done, bytes in all) and may raise, which ends the work. Raises ModelError when the
    shape and the type do not fit each other, or the file cannot be written; it says how many bytes are needed.
    """
    path = Path(path)
    tensors = _Tensors(shape, expert_type, seed)
    if layers is not None and not 1 <= layers <= shape.n_layer:
        raise ModelError(f"layers must be 1 to {shape.n_layer}, not {layers}")
    tensors.add_all(shape.n_layer if layers is None else layers)
    key_values = _key_values(replace(shape, n_layer=layers or shape.n_layer), seed)
    total = sum(tensor_bytes(tensor.type, tensor.ne) for tensor in tensors.all)
    total += sum(len(value.raw) for value in key_values.values())
    try:
        _check_space(path, total)
        _write(path, key_values, tensors, total, progress)
        return path.stat().st_size
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needed = f"; it needs {total} bytes ({total / 1e9:.2f} GB)" if full else ""
        raise ModelError(f"{path} cannot be written: {error.strerror or error}{needed}") from error


def expert_tensors(
    shape: SyntheticShape, *, n_expert: int, expert_type: str | None = None, seed: int = 0
) -> list[NewTensor]:
    """The gate, up and down tensors of the first `n_expert` experts of layer 0.

    They are as `write_synthetic_model` makes them for a model with so many. Raises ModelError when the shape and the
    type do not fit each other.
    """
    tensors = _Tensors(replace(shape, n_expert=n_expert), expert_type, seed)
    tensors.add_experts(0, "blk.0.")
    return [tensor for tensor in tensors.all if "_exps." in tensor.name]


def _check_space(path: Path, total: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < total:
        raise OSError(errno.ENOSPC, f"only {free} bytes ({free / 1e9:.2f} GB) are free in {path.parent}")


def _write(
    path: Path, key_values: Mapping[str, KeyValue], tensors: _Tensors, total: int, progress: Progress | None
) -> None:
    with new_file(path) as file:
        tensors.watch(lambda done: progress(min(done, total), total) if progress is not None else None)
        write_gguf(file, key_values, tensors.all)


class _Tensors:
    """A model's tensors. Each has a random generator of its own, so that none depends on the order or the layers."""

    def __init__(self, shape: SyntheticShape, expert_type: str | None, seed: int) -> None:
        if expert_type is not None and expert_type not in BLOCK_TYPES:
            raise ModelError(f"no random weights of type {expert_type}; there are {', '.join(BLOCK_TYPES)}")
        self.shape = shape
        self.all: list[NewTensor] = []
        self._expert_type = expert_type
        self._seed = seed
        self._done_bytes = 0
        self._watcher: Callable[[int], None] = lambda done: None

    def watch(self, watcher: Callable[[int], None]) -> None:
        """`watcher` is called with the bytes made so far, while they are."""
        self._watcher = watcher

    def add_all(self, n_layer: int) -> None:
        shape = self.shape
        self._matrix("token_embd.weight", "q4_K", shape.n_embd, shape.n_vocab)
        self._vector("output_norm.weight", shape.n_embd, 0.9, 1.1)
        self._matrix("output.weight", "q6_K", shape.n_embd, shape.n_vocab)
        for layer in range(n_layer):
            prefix = f"blk.{layer}."
            self._vector(prefix + "attn_norm.weight", shape.n_embd, 0.9, 1.1)
            if shape.architecture == "qwen35moe":
                self._vector(prefix + "post_attention_norm.weight", shape.n_embd, 0.9, 1.1)
                if (layer + 1) % _attention_interval(n_layer) == 0:
                    self._attention(layer, prefix, gated=True)
                else:
                    self._delta_net(prefix)
                self._shared_expert(layer, prefix)
            else:
                self._vector(prefix + "ffn_norm.weight", shape.n_embd, 0.9, 1.1)
                self._attention(layer, prefix, gated=False)
            self.add_experts(layer, prefix)

    def _more_bits(self, layer: int) -> str:
        """The type of attn_v and ffn_down in llama-quantize's Q4_K_M of the whole model, however little is written."""
        n = self.shape.n_layer
        more = layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
        return "q6_K" if more else "q4_K"

    def _attention(self, layer: int, prefix: str, gated: bool) -> None:
        shape = self.shape
        heads, heads_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
        self._matrix(prefix + "attn_q.weight", "q4_K", shape.n_embd, heads * (2 if gated else 1))
        self._matrix(prefix + "attn_k.weight", "q4_K", shape.n_embd, heads_kv)
        self._matrix(prefix + "attn_v.weight", self._more_bits(layer), shape.n_embd, heads_kv)
        self._matrix(prefix + "attn_output.weight", "q4_K", heads, shape.n_embd)
        self._vector(prefix + "attn_q_norm.weight", shape.head_dim, 0.9, 1.1)
        self._vector(prefix + "attn_k_norm.weight", shape.head_dim, 0.9, 1.1)

    def _delta_net(self, prefix: str) -> None:
        shape = self.shape
        keys, values = shape.delta_keys * shape.delta_dim, shape.delta_values * shape.delta_dim
        self._matrix(prefix + "attn_qkv.weight", "q4_K", shape.n_embd, 2 * keys + values)
        self._matrix(prefix + "attn_gate.weight", "q4_K", shape.n_embd, values)
        self._matrix(prefix + "ssm_conv1d.weight", "f32", 4, 2 * keys + values)
        self._vector(prefix + "ssm_dt.bias", shape.delta_values, -1.0, 1.0)
        self._vector(prefix + "ssm_a", shape.delta_values, -2.0, -0.1)  # a decay: negative
        self._matrix(prefix + "ssm_beta.weight", "q4_K", shape.n_embd, shape.delta_values)
        self._matrix(prefix + "ssm_alpha.weight", "q4_K", shape.n_embd, shape.delta_values)
        self._vector(prefix + "ssm_norm.weight", shape.delta_dim, 0.9, 1.1)
        self._matrix(prefix + "ssm_out.weight", "q4_K", values, shape.n_embd)

    def _shared_expert(self, layer: int, prefix: str) -> None:
        shape = self.shape
        self._matrix(prefix + "ffn_gate_inp_shexp.weight", "f32", shape.n_embd)
        self._matrix(prefix + "ffn_gate_shexp.weight", "q4_K", shape.n_embd, shape.n_ff_shared)
        self._matrix(prefix + "ffn_up_shexp.weight", "q4_K", shape.n_embd, shape.n_ff_shared)
        self._matrix(prefix + "ffn_down_shexp.weight", self._more_bits(layer), shape.n_ff_shared, shape.n_embd)

    def add_experts(self, layer: int, prefix: str) -> None:
        shape = self.shape
        # Router logits with a standard deviation of 2: the experts that are used get clearly different weights.
        self._matrix(prefix + "ffn_gate_inp.weight", "f32", shape.n_embd, shape.n_expert, spread=2 * shape.n_embd**-0.5)
        plain, down = self._expert_type or "q4_K", self._expert_type or self._more_bits(layer)
        self._matrix(prefix + "ffn_gate_exps.weight", plain, shape.n_embd, shape.n_ff, shape.n_expert)
        self._matrix(prefix + "ffn_up_exps.weight", plain, shape.n_embd, shape.n_ff, shape.n_expert)
        self._matrix(prefix + "ffn_down_exps.weight", down, shape.n_ff, shape.n_embd, shape.n_expert)

    def _vector(self, name: str, length: int, low: float, high: float) -> None:
        values = np.linspace(low, high, length, dtype="<f4").tobytes()
        self.all.append(NewTensor(name, "f32", (length,), lambda: [values]))

    def _matrix(self, name: str, type: str, *ne: int, spread: float | None = None) -> None:
        """Weights with a standard deviation of `spread`, by default 1/sqrt(row length): products keep their size."""
        block = GGML_TYPES[TYPE_IDS[type]][1]
        if ne[0] % block:
            raise ModelError(f"{name} has rows of {ne[0]} weights, which {type} with its blocks of {block} cannot hold")
        data = partial(self._data, name, type, ne, ne[0] ** -0.5 if spread is None else spread)
        self.all.append(NewTensor(name, type, ne, data))

    def _data(self, name: str, type: str, ne: tuple[int, ...], spread: float) -> Iterator[bytes]:
        digest = hashlib.sha256(f"{self._seed} {name} {type}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        n_parts = ne[2] if len(ne) == 3 else 1
        part_bytes = tensor_bytes(type, ne) // n_parts
        _, _, block_bytes = GGML_TYPES[TYPE_IDS[type]]
        # No shared factor with a row's blocks, and more blocks than a part has rows: no two rows of a part are equal.
        n_rows = ne[1] if len(ne) > 1 else 1
        n_blocks = _next_prime(max(_STRETCH_BYTES // block_bytes, n_rows, 2 * n_parts))
        stretch = random_blocks(generator, type, min(n_blocks, tensor_bytes(type, ne) // block_bytes), spread)
        for start in generator.choice(len(stretch), n_parts, replace=False).tolist() if n_parts > 1 else [0]:
            for chunk in _repeat(stretch.reshape(-1), start * block_bytes, part_bytes):
                self._done_bytes += len(chunk)
                self._watcher(self._done_bytes)
                yield chunk


def _repeat(stretch: NDArray[np.uint8], start: int, count: int) -> Iterator[bytes]:
    """`count` bytes of `stretch`, repeated without end, from `start` on."""
    while count:
        chunk = stretch[start : start + min(count, _CHUNK_BYTES)].tobytes()
        count -= len(chunk)
        start = (start + len(chunk)) % len(stretch)
        yield chunk


def _attention_interval(n_layer: int) -> int:
    """Every how manyth layer of qwen35moe has attention: 4, and less in a model so short that it would have none.

    llama.cpp runs it only with layers of both kinds; of one layer it builds the graph, no more.
    """
    return min(4, max(2, n_layer))


def _next_prime(number: int) -> int:
    while any(number % factor == 0 for factor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def _key_values(shape: SyntheticShape, seed: int) -> dict[str, KeyValue]:
    numbers = {
        "block_count": shape.n_layer,
        "context_length": 32768,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.rope_dim,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used,
        "expert_feed_forward_length": shape.n_ff,
    }
    others = {"rope.freq_base": _float32(1e6), "attention.layer_norm_rms_epsilon": _float32(1e-6)}
    if shape.architecture == "qwen35moe":
        numbers |= {
            "expert_shared_feed_forward_length": shape.n_ff_shared,
            "full_attention_interval": _attention_interval(shape.n_layer),
            "ssm.conv_kernel": 4,
            "ssm.state_size": shape.delta_dim,
            "ssm.group_count": shape.delta_keys,
            "ssm.time_step_rank": shape.delta_values,
            "ssm.inner_size": shape.delta_dim * shape.delta_values,
        }
        third = shape.rope_dim // 6
        others["rope.dimension_sections"] = _int32s((shape.rope_dim // 2 - 2 * third, third, third, 0))
    key_values = {
        "general.architecture": KeyValue.string(shape.architecture),
        "general.name": KeyValue.string(f"synthetic {shape.architecture}, seed {seed}"),
        "general.file_type": KeyValue.uint32(_FILE_TYPE_Q4_K_M),
    }
    key_values |= {f"{shape.architecture}.{key}": KeyValue.uint32(value) for key, value in numbers.items()}
    key_values |= {f"{shape.architecture}.{key}": value for key, value in others.items()}
    return key_values | _vocabulary(shape.n_vocab)


def _vocabulary(n_vocab: int) -> dict[str, KeyValue]:
    """A tokenizer of the kind gpt2: a token for each byte, invented words, and the marks of a chat at the end.

    There are no merges but one, so a text becomes one token per byte, and any token can be shown.
    """
    tokens = [*_byte_tokens(), "ee"]
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"Ġw{number}" for number in range(len(tokens), n_vocab - len(marks))] + marks
    normal, control = 1, 3
    types = [normal] * (n_vocab - len(marks)) + [control] * len(marks)
    return {
        "tokenizer.ggml.model": KeyValue.string("gpt2"),
        "tokenizer.ggml.pre": KeyValue.string("qwen2"),
        "tokenizer.ggml.tokens": _strings(tokens),
        "tokenizer.ggml.token_type": _int32s(types),
        "tokenizer.ggml.merges": _strings(["e e"]),
        "tokenizer.ggml.eos_token_id": KeyValue.uint32(n_vocab - 1),
        "tokenizer.ggml.padding_token_id": KeyValue.uint32(n_vocab - 3),
        "tokenizer.ggml.add_bos_token": KeyValue(7, b"\0"),
        "tokenizer.chat_template": KeyValue.string(
            "{% for message in messages %}"
            "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
    }


def _byte_tokens() -> list[str]:
    """GPT-2's character for each byte: itself where it can be printed, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _float32(value: float) -> KeyValue:
    return KeyValue(6, struct.pack("<f", value))


def _int32s(values: Sequence[int]) -> KeyValue:
    return KeyValue(ARRAY, struct.pack("<IQ", 5, len(values)) + struct.pack(f"<{len(values)}i", *values))


def _strings(texts: Sequence[str]) -> KeyValue:
    encoded = [text.encode() for text in texts]
    items = b"".join(struct.pack("<Q", len(text)) + text for text in encoded)
    return KeyValue(ARRAY, struct.pack("<IQ", STRING, len(texts)) + items)
