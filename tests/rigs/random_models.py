"""Random Mixture-of-Experts models with what test-llama-archs lacks: chosen sizes, K-quants, a real tokenizer, split
files. And random quantised layers for the kernels' tests.

Files are kept in $SWARM_TEST_CACHE, or a folder under the system's folder for temporary files, under a name that holds
a digest of their parameters and of the code that made them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import node.models.gguf
from node.models.demo import find_source
from node.models.gguf import KeyValue, NewTensor, read_header, write_gguf
from node.models.random_blocks import random_blocks
from rigs.oracle import native_program

RandomTensor = tuple[str, tuple[int, ...], bytes]

#: Types for which `random_layer` makes weights.
LAYER_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4"),
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model of the architecture `qwen3moe` or `qwen35moe`.

    Rows are multiples of 256 by default, which K-quants need. `n_ff_shared`, `merged` (gate and up in one tensor) and
    `n_nextn` (blocks for multi-token prediction after the `n_layer` others, with experts that an ordinary decode does
    not use) are qwen35moe's; three of its four layers are gated delta nets.
    """

    architecture: str
    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_expert: int = 16
    n_used: int = 4
    n_ff: int = 256
    n_ff_shared: int = 256
    merged: bool = False
    n_nextn: int = 0
    type: str = "f32"
    seed: int = 0


QWEN3MOE = Shape("qwen3moe")
QWEN35MOE = Shape("qwen35moe", n_expert=12, n_used=3)
QWEN35MOE_NEXTN = replace(QWEN35MOE, n_nextn=1)


def moe_model(shape: Shape, quantisation: str | None = None) -> Path:
    """A random model, quantised by llama-quantize if `quantisation` (such as "Q4_K_M") is given."""
    plain = _cached(f"{shape.architecture}-{shape.type}", shape, partial(_write_model, shape))
    if quantisation is None:
        return plain

    def quantise(path: Path) -> None:
        _run("llama-quantize", plain, path, quantisation, "1")

    return _cached(f"{shape.architecture}-{quantisation}", (shape, quantisation), quantise)


def big_model(expert_bytes: int = 1 << 30) -> Path:
    """A qwen3moe model with at least `expert_bytes` of experts, in F16, and a trunk of some 30 MB; for memory tests.

    The experts are cut out of one random block, each at another place: different, but quick to write.
    """
    shape = Shape("qwen3moe", n_layer=6, n_expert=128, n_used=4, n_ff=1024, type="f16")
    one = 3 * shape.n_embd * shape.n_ff * 2
    while shape.n_layer * shape.n_expert * one < expert_bytes:
        shape = replace(shape, n_layer=shape.n_layer + 1)
    return _cached("big", shape, partial(_write_model, shape, block_experts=True))


def split_model(path: Path, max_tensors: int = 20) -> Path:
    """Cuts `path`, a cached model, by llama-gguf-split into parts of at most `max_tensors` tensors; the first part."""
    folder = path.with_suffix(f".split-{max_tensors}")
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            parts = Path(work) / "parts"
            parts.mkdir()
            _run("llama-gguf-split", "--split", "--split-max-tensors", str(max_tensors), path, parts / "model")
            try:
                parts.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another test process was faster
                    raise
    return min(folder.glob("model-00001-of-*.gguf"))


def random_layer(type: str, n_expert: int, n_embd: int, n_ff: int, seed: int = 0) -> dict[str, RandomTensor]:
    """Gate, up and down of one layer: {name: (type, ne of one expert, bytes of all experts)}.

    Values have a mean of 0 and a standard deviation of 1/sqrt(row length), like real weights: quantised from normally
    distributed ones where the gguf package can quantise the type, else from `node.models.random_blocks`.
    """
    generator = np.random.default_rng((seed, n_expert, n_embd, n_ff, LAYER_TYPES.index(type)))
    layer: dict[str, RandomTensor] = {}
    for name, ne in (("gate", (n_embd, n_ff)), ("up", (n_embd, n_ff)), ("down", (n_ff, n_embd))):
        data = _random_weights(generator, type, n_expert * ne[1], ne[0])
        layer[f"ffn_{name}_exps.weight"] = (type, ne, data)
    return layer


def _random_weights(generator: np.random.Generator, type: str, n_rows: int, n_columns: int) -> bytes:
    import gguf

    spread = n_columns**-0.5
    if type in ("q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"):
        block = 32 if type == "iq4_nl" else 256
        assert n_columns % block == 0, f"rows of {n_columns} weights cannot be {type}"
        return random_blocks(generator, type, n_rows * n_columns // block, spread).tobytes()
    values = generator.standard_normal((n_rows, n_columns), np.float32) * np.float32(spread)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[type.upper()]).tobytes()


def cache_folder() -> Path:
    """Where test models are kept: $SWARM_TEST_CACHE, else a folder below the system's temporary one."""
    return Path(os.environ.get("SWARM_TEST_CACHE") or Path(tempfile.gettempdir()) / "swarm-test-models")


def _cached(stem: str, parameters: object, write: Callable[[Path], None]) -> Path:
    code = hashlib.sha256(repr(parameters).encode())
    for source in (__file__, node.models.gguf.__file__):
        code.update(Path(source).read_bytes())
    folder = cache_folder()
    path = folder / f"{stem}-{code.hexdigest()[:12]}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            unfinished = Path(work) / "model.gguf"
            write(unfinished)
            unfinished.replace(path)
    return path


def _run(program: str, *arguments: str | Path) -> None:
    done = subprocess.run([native_program(program), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def _float32(value: float) -> KeyValue:
    return KeyValue(6, struct.pack("<f", value))


def _int32_array(values: Sequence[int]) -> KeyValue:
    return KeyValue(9, struct.pack("<IQ", 5, len(values)) + struct.pack(f"<{len(values)}i", *values))


def _key_values(shape: Shape) -> dict[str, KeyValue]:
    source = read_header(find_source())
    numbers = {
        "block_count": shape.n_layer + shape.n_nextn,
        "context_length": 4096,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used,
        "expert_feed_forward_length": shape.n_ff,
    }
    others = {"rope.freq_base": _float32(1e6), "attention.layer_norm_rms_epsilon": _float32(1e-6)}
    if shape.architecture == "qwen35moe":
        numbers |= {
            "expert_shared_feed_forward_length": shape.n_ff_shared,
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": shape.head_dim,
            "ssm.group_count": shape.n_head_kv,
            "ssm.time_step_rank": shape.n_head,
            "ssm.inner_size": shape.head_dim * shape.n_head,
        }
        if shape.n_nextn:
            numbers["nextn_predict_layers"] = shape.n_nextn
        third = shape.head_dim // 6
        others["rope.dimension_sections"] = _int32_array((shape.head_dim // 2 - 2 * third, third, third, 0))
    key_values = {
        "general.architecture": KeyValue.string(shape.architecture),
        "general.name": KeyValue.string(f"random {shape.architecture}"),
    }
    key_values |= {f"{shape.architecture}.{key}": KeyValue.uint32(value) for key, value in numbers.items()}
    key_values |= {f"{shape.architecture}.{key}": value for key, value in others.items()}
    return key_values | {key: value for key, value in source.key_values.items() if key.startswith("tokenizer.")}


def _vocabulary_size() -> int:
    (embedding,) = (tensor for tensor in read_header(find_source()).tensors if tensor.name == "token_embd.weight")
    return embedding.ne[1]


class _Tensors:
    """Collects a model's tensors; each has a random generator of its own, so that none depends on the order."""

    def __init__(self, shape: Shape, block_experts: bool) -> None:
        self.shape = shape
        self.all: list[NewTensor] = []
        self.block: NDArray[np.float32] | None = None
        if block_experts:
            values = np.random.default_rng(shape.seed).standard_normal(1 << 22, np.float32)
            self.block = np.concatenate([values, values])

    def add(self, name: str, *ne: int, spread: float | None = None, type: str | None = None) -> None:
        """A matrix with a standard deviation of `spread`, by default 1/sqrt(row length)."""
        data = partial(self._values, name, ne, ne[0] ** -0.5 if spread is None else spread, type or self.shape.type)
        self.all.append(NewTensor(name, type or self.shape.type, ne, data))

    def constant(self, name: str, length: int, low: float, high: float) -> None:
        """A vector of f32 with values between `low` and `high`."""
        values = np.linspace(low, high, length, dtype="<f4").tobytes()
        self.all.append(NewTensor(name, "f32", (length,), lambda: [values]))

    def _values(self, name: str, ne: tuple[int, ...], spread: float, type: str) -> Iterable[bytes]:
        digest = hashlib.sha256(f"{self.shape.seed} {name}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        dtype = {"f32": "<f4", "f16": "<f2"}[type]
        if self.block is not None and len(ne) == 3:
            one = ne[0] * ne[1]
            scaled = (self.block * np.float32(spread)).astype(dtype)
            for start in generator.integers(0, len(scaled) // 2, ne[2]).tolist():
                yield scaled[start : start + one].tobytes()
            return
        rows = int(np.prod(ne[1:]))
        for start in range(0, rows, 4096):
            values = generator.standard_normal((min(4096, rows - start), ne[0]), np.float32)
            yield (values * np.float32(spread)).astype(dtype).tobytes()


def _write_model(shape: Shape, path: Path, block_experts: bool = False) -> None:
    tensors = _Tensors(shape, block_experts)
    # This is also the output matrix: it is small, so that a token is not followed by itself.
    tensors.add("token_embd.weight", shape.n_embd, _vocabulary_size(), spread=0.05)
    tensors.constant("output_norm.weight", shape.n_embd, 0.9, 1.1)
    for layer in range(shape.n_layer + shape.n_nextn):
        prefix = f"blk.{layer}."
        tensors.constant(prefix + "attn_norm.weight", shape.n_embd, 0.9, 1.1)
        if shape.architecture == "qwen3moe":
            tensors.constant(prefix + "ffn_norm.weight", shape.n_embd, 0.9, 1.1)
            _add_attention(tensors, prefix, gated=False)
        elif shape.architecture == "qwen35moe":
            tensors.constant(prefix + "post_attention_norm.weight", shape.n_embd, 0.9, 1.1)
            if layer % 4 == 3 or layer >= shape.n_layer:
                _add_attention(tensors, prefix, gated=True)
            else:
                _add_delta_net(tensors, prefix)
            _add_shared_expert(tensors, prefix)
        else:
            raise ValueError(f"no generator for the architecture {shape.architecture}")
        _add_experts(tensors, prefix)
        if layer >= shape.n_layer:
            tensors.add(prefix + "nextn.eh_proj.weight", 2 * shape.n_embd, shape.n_embd)
            tensors.constant(prefix + "nextn.enorm.weight", shape.n_embd, 0.9, 1.1)
            tensors.constant(prefix + "nextn.hnorm.weight", shape.n_embd, 0.9, 1.1)
    with path.open("wb") as file:
        write_gguf(file, _key_values(shape), tensors.all)


def _add_attention(tensors: _Tensors, prefix: str, gated: bool) -> None:
    shape = tensors.shape
    heads, heads_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    tensors.add(prefix + "attn_q.weight", shape.n_embd, heads * (2 if gated else 1))
    tensors.add(prefix + "attn_k.weight", shape.n_embd, heads_kv)
    tensors.add(prefix + "attn_v.weight", shape.n_embd, heads_kv)
    tensors.add(prefix + "attn_output.weight", heads, shape.n_embd)
    tensors.constant(prefix + "attn_q_norm.weight", shape.head_dim, 0.9, 1.1)
    tensors.constant(prefix + "attn_k_norm.weight", shape.head_dim, 0.9, 1.1)


def _add_delta_net(tensors: _Tensors, prefix: str) -> None:
    shape = tensors.shape
    values, keys = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    tensors.add(prefix + "attn_qkv.weight", shape.n_embd, 2 * keys + values)
    tensors.add(prefix + "attn_gate.weight", shape.n_embd, values)
    tensors.add(prefix + "ssm_conv1d.weight", 4, 2 * keys + values, type="f32")
    tensors.constant(prefix + "ssm_dt.bias", shape.n_head, -1.0, 1.0)
    tensors.constant(prefix + "ssm_a", shape.n_head, -2.0, -0.1)  # a decay: negative
    tensors.add(prefix + "ssm_beta.weight", shape.n_embd, shape.n_head)
    tensors.add(prefix + "ssm_alpha.weight", shape.n_embd, shape.n_head)
    tensors.constant(prefix + "ssm_norm.weight", shape.head_dim, 0.9, 1.1)
    tensors.add(prefix + "ssm_out.weight", values, shape.n_embd)


def _add_shared_expert(tensors: _Tensors, prefix: str) -> None:
    shape = tensors.shape
    tensors.add(prefix + "ffn_gate_inp_shexp.weight", shape.n_embd, type="f32")
    tensors.add(prefix + "ffn_gate_shexp.weight", shape.n_embd, shape.n_ff_shared)
    tensors.add(prefix + "ffn_up_shexp.weight", shape.n_embd, shape.n_ff_shared)
    tensors.add(prefix + "ffn_down_shexp.weight", shape.n_ff_shared, shape.n_embd)


def _add_experts(tensors: _Tensors, prefix: str) -> None:
    shape = tensors.shape
    # Router logits with a standard deviation of 2: the experts that are used get clearly different weights.
    spread = 2 * shape.n_embd**-0.5
    tensors.add(prefix + "ffn_gate_inp.weight", shape.n_embd, shape.n_expert, spread=spread, type="f32")
    if shape.merged:
        tensors.add(prefix + "ffn_gate_up_exps.weight", shape.n_embd, 2 * shape.n_ff, shape.n_expert)
    else:
        tensors.add(prefix + "ffn_gate_exps.weight", shape.n_embd, shape.n_ff, shape.n_expert)
        tensors.add(prefix + "ffn_up_exps.weight", shape.n_embd, shape.n_ff, shape.n_expert)
    tensors.add(prefix + "ffn_down_exps.weight", shape.n_ff, shape.n_embd, shape.n_expert)
