"""Every slice of every architecture's experts has the bytes and gives the results of the whole layer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kernels
from node.models.index import ModelIndex, SliceTensor, read_model
from node.router.programs import LayerProgram, read_programs
from rigs import model_files, random_models
from rigs.architectures import WITHOUT_EXPERTS, architecture_models
from rigs.layers import Ints, hidden

N_ROWS = 3


def _bytes(tensor: SliceTensor) -> bytes:
    data = b""
    for part in tensor.parts:
        with Path(part.path).open("rb") as file:
            file.seek(part.offset)
            data += file.read(part.bytes)
    return data


def _computed(index: ModelIndex, program: LayerProgram, first: int, last: int) -> np.ndarray:
    """The result rows of N_ROWS rows for each expert of the slice, as bits: [experts, N_ROWS, n_out]. Each row has a
    weight of its own, which is the same whatever the slice."""
    store = kernels.ExpertStore("CPU", 1)
    parsed = kernels.Program(program.text)
    slices = index.slice_parts(program.layer, first, last)
    parts = {
        name: kernels.TensorParts(t.type, t.ne, [(p.path, p.offset, p.bytes) for p in t.parts])
        for name, t in slices.items()
        if name in parsed.tensors
    }
    info = store.load(program.layer, parsed, first, last, program.n_expert, parts)
    assert (info.first, info.last) == (first, last)
    experts = np.arange(first, last + 1, dtype=np.int32)
    pairs_expert: Ints = np.repeat(experts, N_ROWS)
    pairs_row: Ints = np.tile(np.arange(N_ROWS, dtype=np.int32), len(experts))
    h = hidden(N_ROWS, program.n_in)
    if parsed.input == "pair":
        # Row and pair are one there.
        h = h[pairs_row]
        pairs_row = np.arange(len(pairs_row), dtype=np.int32)
    weight = (0.1 + 0.01 * pairs_expert + 0.2 * np.tile(np.arange(N_ROWS), len(experts))).astype(np.float32)
    order = np.argsort(pairs_row, kind="stable")
    result = np.empty((len(order), program.n_out), np.float32)
    result[order] = store.ffn(
        program.digest,
        program.layer,
        h,
        pairs_row[order],
        pairs_expert[order],
        weight[order] if parsed.uses_weight else None,
        len(h),
        "rows",
    )
    return result.view(np.uint32).reshape(len(experts), N_ROWS, program.n_out)


def _check(whole: ModelIndex, copies: Iterable[ModelIndex], layers: Iterable[LayerProgram]) -> None:
    for program in layers:
        n = program.n_expert
        tensors = {name: _bytes(t) for name, t in whole.slice_parts(program.layer, 0, n - 1).items()}
        expected = _computed(whole, program, 0, n - 1)
        assert len(np.unique(expected.reshape(n, -1), axis=0)) == n  # no two experts are alike
        for copy in copies:
            for first in range(n):
                for last in range(first, n):
                    for name, tensor in copy.slice_parts(program.layer, first, last).items():
                        one = len(tensors[name]) // n
                        assert _bytes(tensor) == tensors[name][first * one : (last + 1) * one], (name, first, last)
                    got = _computed(copy, program, first, last)
                    assert np.array_equal(got, expected[first : last + 1]), (program.layer, first, last)


ARCHITECTURES = 55  # at least; which ones is llama.cpp's to say


def test_every_slice_of_every_architecture(tmp_path: Path) -> None:
    wrong: dict[str, str] = {}
    checked = 0
    for name, path in architecture_models().items():
        if name in WITHOUT_EXPERTS:
            continue
        whole = read_model(path)
        split = read_model(model_files.split_copy(path, tmp_path / name, 3))
        assert len(split.paths) == 3 and split.header_digest == whole.header_digest
        programs = asyncio.run(read_programs(whole)).layers
        try:
            _check(whole, (whole, split), [programs[min(programs)], programs[max(programs)]])
            checked += 1
        except (AssertionError, ValueError, RuntimeError) as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert wrong == {}
    assert checked >= ARCHITECTURES - len(WITHOUT_EXPERTS)


@pytest.mark.parametrize(
    "shape",
    [random_models.QWEN3MOE, random_models.QWEN35MOE, random_models.QWEN35MOE_NEXTN],
    ids=["qwen3moe", "qwen35moe", "nextn"],
)
def test_every_slice_of_k_quants(shape: random_models.Shape) -> None:
    path = random_models.moe_model(shape, "Q4_K_M")
    whole = read_model(path)
    split = read_model(random_models.split_model(path))
    programs = asyncio.run(read_programs(whole)).layers
    # A block for multi-token prediction has slices like any other, but nothing computes
    # them: no program, and no claims.
    assert list(programs) == list(range(shape.n_layer))
    assert whole.expert_layers == split.expert_layers == tuple(range(shape.n_layer + shape.n_nextn))
    last = programs[shape.n_layer - 1]
    _check(whole, (whole, split), [replace(last, layer=layer) for layer in whole.expert_layers[shape.n_layer - 1 :]])
