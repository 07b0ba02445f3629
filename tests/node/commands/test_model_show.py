"""swarm-node model show: what is in a model, and what of it fits where."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from node.commands import model_show
from node.commands.main import main
from node.commands.model_show import SYSTEM_BYTES, fit, machines_needed, model_document, offer_bytes, print_model
from node.models.gguf import KeyValue, NewTensor, write_gguf
from node.models.hashing import local_manifest
from node.models.index import ModelIndex, read_model
from node.models.synthetic import SHAPES
from rigs import model_files

GIB = 1 << 30


def sizes(trunk_bytes: int, n_expert: int, expert_bytes: Sequence[int]) -> Any:
    """An index of layers with experts of these sizes."""
    return SimpleNamespace(
        trunk_bytes=trunk_bytes,
        n_expert=n_expert,
        expert_layers=tuple(range(len(expert_bytes))),
        expert_bytes=lambda layer: n_expert * expert_bytes[layer],
    )


def test_layer_by_layer_beside_the_trunk() -> None:
    index = sizes(100, 4, [10, 10, 20])
    assert not fit(index, []).trunk
    assert not fit(index, [99]).trunk and fit(index, [99]).experts == 8
    assert fit(index, [100]).trunk and fit(index, [100]).experts == 0
    one = fit(index, [100 + 40 + 39])
    assert (one.trunk, one.layers, one.experts, one.experts_total, one.whole) == (True, 1, 7, 12, False)
    assert fit(index, [100 + 160]).whole and not fit(index, [100 + 159]).whole
    # The largest is the router, whatever the order; no expert is cut.
    assert fit(index, [80, 180]).whole and fit(index, [180, 80]).whole
    assert not fit(index, [85, 175]).whole
    # With the trunk elsewhere.
    assert fit(index, [160], trunk_beside=True).whole and not fit(index, [159], trunk_beside=True).whole


@given(
    st.integers(0, 100),
    st.integers(1, 8),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_machines_needed_are_the_fewest(trunk: int, n_expert: int, layers: list[int], offered: int) -> None:
    index = sizes(trunk, n_expert, layers)
    count = machines_needed(index, offered)
    if count is None:
        assert offered < trunk or offered < max(layers)
        return
    assert fit(index, [offered] * count).whole
    assert count == 1 or not fit(index, [offered] * (count - 1)).whole


def test_what_a_machine_offers() -> None:
    assert offer_bytes(8 * GIB, 0.9) == int((8 * GIB - SYSTEM_BYTES) * 0.9)
    assert offer_bytes(GIB, 0.9) == 0


def has_devices(monkeypatch: pytest.MonkeyPatch, device: SimpleNamespace) -> None:
    """A build that has one device; these tests need none."""
    fake = SimpleNamespace(choose_device=lambda: device.name, devices=lambda: [device])
    monkeypatch.setattr(model_show, "kernels", fake)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(model_show, "free_memory_bytes", lambda: 20 * GIB)
    has_devices(monkeypatch, SimpleNamespace(name="CPU", type="cpu"))
    return tmp_path


def shown(document: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_model(document, console)
    return str(console.file.getvalue()).replace("\N{NO-BREAK SPACE}", " ")  # type: ignore[attr-defined]


def test_the_reference_model(here: Path) -> None:
    index = read_model(model_files.split_of_holes(SHAPES["qwen3.5-122b"], here, 4))
    document = model_document(index, [16, 16])
    json.dumps(document)
    assert (document["layers"], document["experts"], document["experts_used"]) == (48, 256, 8)
    assert document["bytes"] == sum(tensor.bytes for tensor in index.tensors)
    assert document["trunk_bytes"] + sum(layer["bytes"] for layer in document["expert_layers"]) == document["bytes"]
    assert sum(row["bytes"] for row in document["types"]) == document["bytes"]
    first = document["expert_layers"][0]
    assert first["bytes"] == 256 * first["expert_bytes"] == index.expert_bytes(0)
    assert first["tensors"]["ffn_down_exps.weight"] == {"type": "q6_K", "ne": [1024, 3072, 256]}
    assert document["id"] is None and len(document["files"]) == 4
    for gib, count in document["machines_needed"].items():
        offers = [offer_bytes(int(gib) * GIB, 0.9)] * count
        assert fit(index, offers).whole and not fit(index, offers[1:]).whole
    text = shown(document)
    assert len(text.splitlines()) <= 28  # one screen
    assert "68.94 GiB, 4 files from" in text
    assert "1.46 GiB in 24 layers, 1.27 GiB in 24 layers" in text
    assert re.search(r"experts .* q6_K .* ffn_down_exps \(24 of 48\)", text)
    assert re.search(r"this machine +offers 18\.00 GiB \(CPU\): trunk \+ 10 of 48 layers \(21 % of the experts\)", text)
    assert re.search(r"machines of 16, 16 GiB +trunk \+ 16 of 48 layers", text)
    assert re.search(r"machines needed +12 of 8 GiB, or 6 of 16 GiB, or 3 of 32 GiB, or 2 of 64 GiB", text)


def test_experts_on_a_graphics_card(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_model(model_files.tiny_model(here / "m.gguf"))
    device = SimpleNamespace(name="CUDA0", type="gpu", memory_free_bytes=index.expert_bytes(0) * 20 // 9)
    has_devices(monkeypatch, device)
    found = model_document(index, [])["this_machine"]
    assert (found["device"], found["trunk"], found["layers"]) == ("CUDA0", True, 2)


def test_the_trunk_alone_is_too_large(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_model(model_files.split_of_holes(SHAPES["qwen3.5-122b"], here, 1))
    monkeypatch.setattr(model_show, "free_memory_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(model_show, "_USUAL_GIB", (2, 4))
    text = shown(model_document(index, [2, 2]))
    assert re.search(r"machines of 2, 2 GiB +not the trunk; of the experts 0 of 48 layers", text)
    assert "each needs more than 4 GiB: the trunk alone is larger" in text


def dense(path: Path) -> ModelIndex:
    key_values = {"general.architecture": KeyValue.string("llama")}
    key_values |= {f"llama.{key}": KeyValue.uint32(2) for key in ("block_count", "embedding_length")}
    with path.open("wb") as file:
        write_gguf(file, key_values, [NewTensor("token_embd.weight", "f32", (2, 4), lambda: [bytes(32)])])
    return read_model(path)


def test_a_dense_model(here: Path) -> None:
    document = model_document(dense(here / "m.gguf"), [8])
    assert document["experts"] == document["experts_used"] == 0
    assert document["this_machine"] is None and document["machines"] is None
    assert "a dense model gains nothing from a swarm" in shown(document)


def test_names_cannot_break_the_page(here: Path) -> None:
    document = model_document(dense(here / "m.gguf"), []) | {"name": "[red]x[/]\x1b[31m", "architecture": "[b]"}
    text = shown(document)
    assert "[red]x[/]" in text and "[b]," in text and "\x1b" not in text


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_files.tiny_model(here / "model.gguf")
    assert main(["model", "show", str(path)]) == 0
    assert "--hash reads the whole file" in capsys.readouterr().out
    assert main(["model", "show", str(path), "--hash"]) == 0
    known = local_manifest(read_model(path)).model_id
    assert known in capsys.readouterr().out
    assert main(["model", "show", str(path), "--json", "--memory", "8", "0.5"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["id"] == known and document["machines"]["memory_gib"] == [8, 0.5]
    assert main(["model", "show", str(here / "missing.gguf")]) == 1
    assert "missing.gguf cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["model", "show", str(path), "--memory", "-1"])
    assert "'-1' is not a memory size in GiB" in capsys.readouterr().err
