"""Files with the shape of a known model and random weights."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from node.commands.main import main
from node.errors import ModelError
from node.models.gguf import GGML_TYPES, TYPE_IDS
from node.models.index import read_model
from node.models.random_blocks import BLOCK_TYPES, random_blocks
from node.models.synthetic import SHAPES, SyntheticShape, write_synthetic_model
from node.router.programs import read_programs
from rigs.model_files import TINY, TINY_QWEN35
from rigs.oracle import Job, logits


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def expert_digests(path: Path) -> list[str]:
    index = read_model(path)
    data = path.read_bytes()
    digests = []
    for layer in index.expert_layers:
        for expert in range(index.n_expert):
            for tensor in index.slice_parts(layer, expert, expert).values():
                (part,) = tensor.parts
                digests.append(hashlib.sha256(data[part.offset : part.offset + part.bytes]).hexdigest())
    return digests


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_random_blocks_have_the_spread_that_was_asked_for(type: str) -> None:
    spread = 2048**-0.5
    n_weights, block_bytes = GGML_TYPES[TYPE_IDS[type]][1:]
    blocks = random_blocks(np.random.default_rng(1), type, (1 << 19) // n_weights, spread)
    assert blocks.shape == ((1 << 19) // n_weights, block_bytes)
    kind = gguf.GGMLQuantizationType[type.upper()]
    values = blocks.view({"f32": "<f4", "f16": "<f2"}.get(type, np.uint8))
    if type not in ("f32", "f16"):
        values = gguf.quants.dequantize(blocks, kind)
    assert np.isfinite(values).all()
    assert values.std(dtype=np.float64) == pytest.approx(spread, rel=0.5 if type == "mxfp4" else 0.03)
    assert abs(values.mean(dtype=np.float64)) < 0.01 * spread


@pytest.mark.parametrize("shape", [TINY, TINY_QWEN35], ids=lambda shape: shape.architecture)
def test_the_file_is_what_the_shape_says(shape: SyntheticShape, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reports: list[tuple[int, int]] = []
    size = write_synthetic_model(shape, path, progress=lambda done, total: reports.append((done, total)))
    assert path.stat().st_size == size and list(tmp_path.iterdir()) == [path]
    index = read_model(path)
    assert (index.architecture, index.n_layer, index.n_embd) == (shape.architecture, 8, 256)
    assert (index.n_expert, index.n_expert_used) == (8, 3)
    assert index.expert_layers == tuple(range(8))
    # llama-quantize's Q4_K_M: more bits for the first and the last eighth, and for every third layer between.
    downs = [index.expert_tensors(layer)["ffn_down_exps.weight"].type for layer in range(8)]
    assert downs == ["q6_K", "q4_K", "q4_K", "q6_K", "q4_K", "q4_K", "q6_K", "q6_K"]
    assert {index.expert_tensors(layer)["ffn_up_exps.weight"].type for layer in range(8)} == {"q4_K"}
    # Another reader finds the same.
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == len(index.tensors)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 1000
    done = [done for done, _ in reports]
    assert done == sorted(done) and 0.95 * size < done[-1] <= reports[-1][1] <= size


def test_every_expert_has_bytes_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic_model(TINY, path, layers=2)
    digests = expert_digests(path)
    assert len(digests) == 2 * 8 * 3 == len(set(digests))


def test_the_seed_decides(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for path, seed in ((one, 5), (same, 5), (other, 6)):
        write_synthetic_model(TINY, path, layers=1, seed=seed)
    assert digest(one) == digest(same)
    assert not set(expert_digests(one)) & set(expert_digests(other))


def test_a_layer_is_the_same_however_many_are_written(tmp_path: Path) -> None:
    write_synthetic_model(TINY, tmp_path / "two", layers=2)
    write_synthetic_model(TINY, tmp_path / "three", layers=3)
    assert read_model(tmp_path / "two").n_layer == 2
    assert expert_digests(tmp_path / "two") == expert_digests(tmp_path / "three")[: 2 * 8 * 3]


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_every_expert_tensor_in_one_type(type: str, tmp_path: Path) -> None:
    write_synthetic_model(TINY, tmp_path / "model.gguf", layers=1, expert_type=type)
    index = read_model(tmp_path / "model.gguf")
    assert {tensor.type for tensor in index.expert_tensors(0).values()} == {type}
    assert len(set(expert_digests(tmp_path / "model.gguf"))) == 8 * 3


def test_sizes_of_the_named_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published models' Q4_K_M files have 18.6 GB, and 1.57 GB of experts in a layer."""
    needed = {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    for name, shape in SHAPES.items():
        with pytest.raises(ModelError, match=r"needs \d+ bytes") as raised:
            write_synthetic_model(shape, tmp_path / "model.gguf")
        needed[name] = int(str(raised.value).split("it needs ")[1].split()[0])
    assert needed["qwen3-30b-a3b"] == pytest.approx(18.6e9, rel=0.01)
    assert needed["qwen3.5-122b"] == pytest.approx(74e9, rel=0.02)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="no random weights of type q9_0; there are f32, "):
        write_synthetic_model(TINY, path, expert_type="q9_0")
    with pytest.raises(ModelError, match="layers must be 1 to 8, not 9"):
        write_synthetic_model(TINY, path, layers=9)
    with pytest.raises(ModelError, match="rows of 128 weights, which q6_K with its blocks of 256 cannot hold"):
        write_synthetic_model(replace(TINY, n_ff=128), path)
    with pytest.raises(ModelError, match="No such file"):
        write_synthetic_model(TINY, tmp_path / "nowhere" / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")

    def write_gguf(file: io.BufferedWriter, *_: object) -> None:
        file.write(b"GGUF")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("node.models.synthetic.write_gguf", write_gguf)
    with pytest.raises(ModelError, match=r"No space left on device; it needs \d+ bytes"):
        write_synthetic_model(TINY, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_work_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic_model(TINY, tmp_path / "model.gguf", progress=stop)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)  # type: ignore[misc]
    path = tmp_path / "model.gguf"
    assert main(["model", "synthetic", "tiny", str(path), "--layers", "2", "--type", "Q4_k", "--seed", "3"]) == 0
    index = read_model(path)
    assert index.n_layer == 2 and index.expert_tensors(1)["ffn_down_exps.weight"].type == "q4_K"
    assert str(path) in capsys.readouterr().err
    assert main(["model", "synthetic", "huge", str(path)]) == 1
    assert "there are qwen3-30b-a3b, qwen3.5-122b" in capsys.readouterr().err
    assert main(["model", "synthetic", "tiny", str(path), "--type", "q9"]) == 1
    assert "no random weights of type q9" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TINY, TINY_QWEN35], ids=lambda shape: shape.architecture)
def test_llama_cpp_runs_it(shape: SyntheticShape, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic_model(shape, path)
    programs = asyncio.run(read_programs(read_model(path)))
    assert sorted(programs.layers) == list(range(8))
    assert {(layer.n_expert, layer.n_used, layer.n_in) for layer in programs.layers.values()} == {(8, 3, 256)}
    result = logits(Job(path, n_prompt=16, n_generate=8))
    assert result.rows.shape == (9, 1000) and np.isfinite(result.rows).all()
    assert 0.1 < result.rows.std() < 10


@pytest.mark.slow
def test_one_layer_of_the_reference_model_has_programs(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic_model(TINY_QWEN35, path, layers=1)
    programs = asyncio.run(read_programs(read_model(path)))
    assert list(programs.layers) == [0]
