"""Slices that answer wrongly are never admitted, and one that begins to is withdrawn: the real kernels, with faults
built in."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kernels
from node.expert_server.__main__ import parse_arguments
from node.expert_server.admission import STEP_EXPERTS, Golden
from node.expert_server.compute_queue import ComputeQueue
from node.expert_server.held_slices import SliceHolder
from node.expert_server.process import SERVER_COMMAND
from node.expert_server.proof import Prover
from node.expert_server.wire import CallRequest
from node.slices import Slice
from rigs.layers import Floats, Layer
from rigs.program_texts import SWIGLU, program
from rigs.random_models import LAYER_TYPES, random_layer

N_EXPERT, N_EMBD, N_FF = 12, 256, 256

# Takes the arguments of a call and the right result, and gives what a faulty device would.
Fault = Callable[[kernels.ExpertStore, dict[str, Any], Floats], Floats]


@dataclass(frozen=True)
class Device:
    name: str
    type: str
    description: str = "made up"
    computes_ffn: bool = True
    memory_free_bytes: int = 1 << 40
    memory_total_bytes: int = 1 << 40


CPU, GPU = Device("CPU", "cpu"), Device("GPU0", "gpu")


class FaultyKernels(ModuleType):
    """The real kernels with devices of our choice, all of them this CPU; `faults` by device."""

    def __init__(self, faults: dict[str, Fault], devices: tuple[Device, ...] = (CPU,), *, proves: bool = True) -> None:
        super().__init__("faulty")
        vars(self).update({name: getattr(kernels, name) for name in kernels.__all__})
        self.faults = faults
        self.stores: dict[str, Any] = {}
        self.devices = lambda: list(devices)
        outer = self

        class Store(kernels.ExpertStore):
            def __init__(self, device: str, threads: int) -> None:
                super().__init__("CPU", 1)
                self.named = device
                outer.stores[device] = self

            def ffn(
                self,
                program_digest: int,
                layer: int,
                h: Floats,
                row: Any,
                expert: Any,
                weight: Any,
                n_rows: int,
                reduce: str,
            ) -> Floats:  # type: ignore[override]
                arguments = {"h": h, "row": row, "expert": expert, "weight": weight, "n_rows": n_rows, "reduce": reduce}
                right = super().ffn(program_digest, layer, **arguments)
                fault = outer.faults.get(self.named)
                if fault is None:
                    return right
                return fault(super(), {"program_digest": program_digest, "layer": layer, **arguments}, right.copy())

        self.ExpertStore = Store


def scaled(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    y[call["expert"] == 9] *= np.float32(1.01)
    return y


def nan(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    y[call["expert"] == 9, 17] = np.nan
    return y


def raises_not_finite(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    if (call["expert"] == 9).any():
        raise kernels.NotFinite("layer 0: experts 0 to 11 gave a value that is not finite on device CPU")
    return y


def swapped(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    expert = call["expert"].copy()
    expert[call["expert"] == 9], expert[call["expert"] == 10] = 10, 9
    return store.ffn(**{**call, "expert": expert})  # type: ignore[no-any-return]


def shifted(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    return np.roll(y, 1, axis=0) if call["n_rows"] > 32 else y


def shifted_by_a_tile(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    own = np.flatnonzero(call["expert"] == call["expert"][0])
    if call["n_rows"] > 32:
        y[own] = np.roll(y[own], 16, axis=0)
    return y


def last_row_lost(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    y[-1] = 0
    return y


def other_shape(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    return y[:, :-1]


def one_row_only(store: Any, call: dict[str, Any], y: Floats) -> Floats:
    return scaled(store, call, y) if call["n_rows"] == 1 else y


FAULTS: dict[str, tuple[Fault, str]] = {
    "one expert scaled by 1.01": (
        scaled,
        r"expert 9: with one row an expert, the results are 1\.0\d+ times what they should be",
    ),
    "scaled for one row only": (one_row_only, "expert 9: with one row an expert, the results are 1.0"),
    "NaN": (nan, "expert 9: with one row an expert, .* values are not finite"),
    "not finite, as the kernels say it": (
        raises_not_finite,
        "it cannot prove itself: layer 0: experts 0 to 11 gave a value",
    ),
    "two experts swapped": (swapped, r"experts 9, 10: with one row an expert, a row differs by [12]\d\d %"),
    "rows shifted by one beyond 32": (shifted, "with more than 32 rows an expert, a row differs by"),
    "rows shifted by 16 beyond 32": (shifted_by_a_tile, "with more than 32 rows an expert, a row differs by"),
    "the last row lost": (last_row_lost, "a row differs by"),
    "another shape": (other_shape, "its result has shape"),
}


def make_layer(folder: Path, type: str = "q4_K", text: str = SWIGLU) -> Layer:
    return Layer(text, random_layer(type, N_EXPERT, N_EMBD, N_FF), N_EXPERT, folder / "layer")


def order(layer: Layer, *slices: tuple[int, int]) -> dict[str, Any]:
    def tensors(first: int, last: int) -> dict[str, Any]:
        found = {}
        for name, (type, ne, data) in layer.tensors.items():
            one = len(data) // N_EXPERT
            # In two parts, one of which ends within an expert, as no file has it but any may.
            cut = (last - first + 1) * one // 2 + 1
            start, total = layer.offsets[name] + first * one, (last - first + 1) * one
            parts = [(start, cut), (start + cut, total - cut)]
            found[name] = {
                "type": type,
                "ne": list(ne),
                "parts": [{"path": str(layer.path), "offset": offset, "bytes": n} for offset, n in parts],
            }
        return found

    return {
        "model": "m",
        "programs": {"0": layer.program},
        "n_expert": {"0": N_EXPERT},
        "n_used": {"0": 4},
        "slices": [
            {"layer": 0, "first": a, "last": b, "tensors": tensors(a, b)} for a, b in slices or ((0, N_EXPERT - 1),)
        ],
    }


class Holding:
    """A SliceHolder, what it reported, and what it withdrew."""

    def __init__(self, faults: dict[str, Fault], devices: tuple[Device, ...] = (CPU,), *, proves: bool = True) -> None:
        self.kernels = FaultyKernels(faults, devices)
        self.compute = ComputeQueue("compute", 16)
        self.withdrawn: list[dict[str, Any]] = []
        prover = Prover(self.kernels, self.compute, 1, enabled=proves)
        self.slices = SliceHolder(
            self.kernels, devices[0].name, 1, 512, self.compute, prover, on_withdrawn=self.withdrawn.append
        )

    async def load(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        await self.slices.load(given, answers.append)
        return answers

    def device(self) -> str:
        (layer,) = self.slices._models["m"].layers.values()
        return layer.device

    def is_ready(self, expert: int) -> bool:
        (layer,) = self.slices._models["m"].layers.values()
        return bool(layer.ready[expert])


@pytest.mark.parametrize("type", LAYER_TYPES)
async def test_every_type_is_admitted_on_this_cpu(type: str, tmp_path: Path) -> None:
    holding = Holding({})
    answers = await holding.load(order(make_layer(tmp_path, type), (2, 4), (5, 11)))
    assert [(a["type"], a.get("reason"), a.get("note")) for a in answers] == [("ready", None, None)] * 2


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_is_never_admitted(name: str, tmp_path: Path) -> None:
    fault, reason = FAULTS[name]
    holding = Holding({"CPU": fault})
    (answer,) = await holding.load(order(make_layer(tmp_path)))
    assert answer["type"] == "failed"
    assert re.search(reason, answer["reason"]), answer["reason"]
    assert "wrong on CPU" in answer["reason"] or "cannot prove" in answer["reason"] or "shape" in answer["reason"]
    assert not any(holding.is_ready(e) for e in range(N_EXPERT))
    assert holding.kernels.stores["CPU"].slices() == []
    # Without the fault, the same slice is admitted.
    holding.kernels.faults.clear()
    (answer,) = await holding.load(order(make_layer(tmp_path)))
    assert answer["type"] == "ready"


async def test_what_is_wrong_can_be_measured_but_not_by_a_node(tmp_path: Path) -> None:
    holding = Holding({"CPU": scaled}, proves=False)
    (answer,) = await holding.load(order(make_layer(tmp_path)))
    assert answer["type"] == "ready"
    assert not parse_arguments(list(SERVER_COMMAND[SERVER_COMMAND.index("node.expert_server") + 1 :])).unproved


@pytest.mark.parametrize("type", ["f32", "q8_0", "q6_K"])
async def test_a_factor_is_found_in_every_type_and_in_the_large_call_alone(type: str, tmp_path: Path) -> None:
    def large_only(store: Any, call: dict[str, Any], y: Floats) -> Floats:
        return scaled(store, call, y) if call["n_rows"] > 1 else y

    holding = Holding({"CPU": large_only})
    (answer,) = await holding.load(order(make_layer(tmp_path, type)))
    found = "a row differs by" if type == "f32" else "the results are 1.0"
    assert f"expert 9: with more than 32 rows an expert, {found}" in answer["reason"]


async def test_a_weight_that_changed_in_memory_shows_when_it_counts(tmp_path: Path) -> None:
    """The device got other bytes than the file has: the scale of one block, of 9,216 of the expert's gate."""
    layer = make_layer(tmp_path, "q8_0")
    given = order(layer)
    damaged = tmp_path / "damaged"
    data = bytearray(layer.path.read_bytes())
    place = layer.offsets["ffn_down_exps.weight"] + 7 * len(layer.tensors["ffn_down_exps.weight"][2]) // N_EXPERT + 1
    data[place] ^= 0x40  # an exponent bit of a float16
    damaged.write_bytes(data)
    holding = Holding({})
    right = holding.kernels.TensorParts

    def other_file(type: str, ne: list[int], parts: list[tuple[str, int, int]]) -> Any:
        return right(type=type, ne=ne, parts=[(str(damaged), offset, n) for _, offset, n in parts])

    holding.kernels.TensorParts = other_file  # type: ignore[assignment]
    (answer,) = await holding.load(given)
    assert answer["type"] == "failed" and "expert 7: " in answer["reason"]


@pytest.mark.parametrize("with_digests", [True, False])
async def test_a_flipped_bit_of_a_weight_is_found_by_its_hash_alone(with_digests: bool, tmp_path: Path) -> None:
    layer = make_layer(tmp_path)
    given = order(layer, (3, 9))
    digests = []
    for expert in range(3, 10):
        parts = [
            data[expert * len(data) // N_EXPERT :][: len(data) // N_EXPERT]
            for _, (_, _, data) in sorted(layer.tensors.items())
        ]
        digests.append(hashlib.sha256(b"".join(parts)).hexdigest())
    if with_digests:
        given["slices"][0]["sha256"] = digests
    (answer,) = await Holding({}).load(given)
    assert answer["type"] == "ready"
    data = bytearray(layer.path.read_bytes())
    data[layer.offsets["ffn_up_exps.weight"] + 7 * len(layer.tensors["ffn_up_exps.weight"][2]) // N_EXPERT + 100] ^= 1
    layer.path.write_bytes(data)
    (answer,) = await Holding({}).load(given)
    if with_digests:
        assert (
            answer["type"] == "failed" and "the bytes of expert 7 are not those of model m any more" in answer["reason"]
        )
    else:
        assert answer["type"] == "ready"  # which no comparison of numbers could tell from noise
    given["slices"][0]["sha256"] = digests[:-1]
    (answer,) = await Holding({}).load(given)
    assert answer["type"] == "failed" and "6 digests for 7 experts" in answer["reason"]


# --- the CPU takes over


async def test_a_device_that_fails_is_replaced_by_the_cpu(tmp_path: Path) -> None:
    holding = Holding({"GPU0": scaled}, (GPU, CPU))
    (answer,) = await holding.load(order(make_layer(tmp_path)))
    assert answer["type"] == "ready"
    assert answer["note"].startswith(
        "on CPU, for its answers are wrong on GPU0: expert 9: with one row an expert, the results are 1.0"
    )
    assert holding.device() == "CPU"
    assert holding.kernels.stores["GPU0"].slices() == []
    (described,) = [held.describe() for held in holding.slices.slices()]
    assert described["note"] == answer["note"]


async def test_a_device_that_fails_is_not_tried_again_for_the_same_types(tmp_path: Path) -> None:
    holding = Holding({"GPU0": scaled}, (GPU, CPU))
    loaded: list[str] = []
    holding.kernels.faults["GPU0"] = lambda store, call, y: (loaded.append("GPU0"), scaled(store, call, y))[1]
    first, second = await holding.load(order(make_layer(tmp_path), (8, 11), (0, 3)))
    assert (first["type"], second["type"]) == ("ready", "ready")
    count = len(loaded)
    await holding.load(order(make_layer(tmp_path), (4, 7)))
    assert len(loaded) == count and holding.device() == "CPU"


async def test_slices_of_the_layer_that_were_ready_on_the_device_move_too(tmp_path: Path) -> None:
    holding = Holding({"GPU0": scaled}, (GPU, CPU))
    layer = make_layer(tmp_path)
    (fine,) = await holding.load(order(layer, (0, 3)))  # without expert 9
    assert fine["type"] == "ready" and "note" not in fine and holding.device() == "GPU0"
    (answer,) = await holding.load(order(layer, (8, 11)))
    assert answer["type"] == "ready" and holding.device() == "CPU"
    assert [(w["type"], w["first"], w["last"]) for w in holding.withdrawn] == [("withdrawn", 0, 3)]
    assert "layer 0 moves to CPU" in holding.withdrawn[0]["reason"]
    assert not holding.is_ready(0) and holding.is_ready(9)
    (again,) = await holding.load(order(layer, (0, 3)))
    assert again["type"] == "ready" and holding.is_ready(0)


async def test_where_the_cpu_fails_as_well_the_slice_stays_out(tmp_path: Path) -> None:
    holding = Holding({"GPU0": scaled, "CPU": nan}, (GPU, CPU))
    (answer,) = await holding.load(order(make_layer(tmp_path)))
    assert answer["type"] == "failed"
    assert "wrong on GPU0" in answer["reason"] and "and on CPU: its answers are wrong on CPU" in answer["reason"]


async def test_a_cpu_without_memory_does_not_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.expert_server.held_slices.free_memory_bytes", lambda: 100_000)
    holding = Holding({"GPU0": scaled}, (GPU, CPU))
    (answer,) = await holding.load(order(make_layer(tmp_path)))
    assert answer["type"] == "failed" and "MiB of memory" in answer["reason"]
    assert "CPU" not in holding.kernels.stores


# --- withdrawn later


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - of what has no event
            await asyncio.sleep(0.01)


async def test_a_slice_that_gives_nan_later_is_withdrawn(tmp_path: Path) -> None:
    holding = Holding({}, (GPU, CPU))
    layer = make_layer(tmp_path)
    await holding.load(order(layer, (0, 7), (8, 11)))
    holding.kernels.faults["GPU0"] = nan
    holding.slices.suspect("m", 0, [8, 9])
    # At once, and only the slice with these experts.
    assert not holding.is_ready(9) and holding.is_ready(7)
    await until(lambda: bool(holding.withdrawn))
    assert (holding.withdrawn[0]["first"], holding.withdrawn[0]["last"]) == (8, 11)
    assert "after a value that was not finite: its answers are wrong on GPU0" in holding.withdrawn[0]["reason"]
    assert not holding.is_ready(9) and holding.is_ready(7)
    # What the parent then orders again is loaded where it is right; the other slice of the layer goes along.
    (answer,) = await holding.load(order(layer, (8, 11)))
    assert answer["type"] == "ready" and answer["note"].startswith("on CPU")
    assert [w["first"] for w in holding.withdrawn] == [8, 0]


async def test_a_slice_that_proves_itself_again_serves_again(tmp_path: Path) -> None:
    holding = Holding({})
    await holding.load(order(make_layer(tmp_path)))
    holding.slices.suspect("m", 0, [3])
    assert not holding.is_ready(3)
    await until(lambda: holding.is_ready(3))
    assert holding.withdrawn == []
    holding.slices.suspect("m", 7, [3])
    holding.slices.suspect("other", 0, [3])
    assert holding.is_ready(3)


async def test_a_slice_dropped_while_it_is_suspected_is_gone(tmp_path: Path) -> None:
    holding = Holding({})
    await holding.load(order(make_layer(tmp_path)))
    holding.slices.suspect("m", 0, [3])
    await holding.slices.drop("m", Slice(0, 0, N_EXPERT - 1))
    await asyncio.gather(*holding.slices._retests)
    assert holding.withdrawn == [] and holding.kernels.stores["CPU"].slices() == []


# --- the golden inputs themselves


PROGRAMS = {
    "SwiGLU": SWIGLU,
    "weight before the FFN": program(
        *("matmul ffn_up_exps.weight h", "matmul ffn_gate_exps.weight h", "glu swiglu %1 %0"),
        *("matmul ffn_down_exps.weight %2", "%3"),
        input="pair",
    ),
    "weight within": program(
        "matmul ffn_up_exps.weight h", "mul %0 w", "unary relu %1", "sqr %2", "matmul ffn_down_exps.weight %3", "%4"
    ),
    "GELU": program(
        *("matmul ffn_up_exps.weight h", "matmul ffn_gate_exps.weight h", "glu geglu %1 %0"),
        *("matmul ffn_down_exps.weight %2", "mul %3 w", "%4"),
    ),
}


@pytest.mark.parametrize("type", LAYER_TYPES)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_other_programs_are_admitted(name: str, type: str, tmp_path: Path) -> None:
    holding = Holding({})
    (answer,) = await holding.load(order(make_layer(tmp_path, type, PROGRAMS[name]), (1, 10)))
    assert answer["type"] == "ready", answer
    holding.kernels.faults["CPU"] = swapped
    (answer,) = await Holding({"CPU": swapped}).load(order(make_layer(tmp_path, type, PROGRAMS[name]), (1, 10)))
    assert answer["type"] == "failed"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_calls_reach_every_expert_with_one_row_and_with_more_than_32(name: str, tmp_path: Path) -> None:
    layer = make_layer(tmp_path, "f32", PROGRAMS[name])
    parsed = kernels.Program(layer.program)
    tensors = order(layer)["slices"][0]["tensors"]
    golden = Golden(kernels, parsed, tensors, N_EMBD, "cpu")
    experts = range(4, 4 + STEP_EXPERTS)
    calls = golden.calls(experts)
    assert golden.types == ("f32",)
    for call in calls:
        request = CallRequest(
            1, "m", 0, 1, 0, "rows", call.n_rows, "f32", call.h, call.row, call.expert, call.weight, 1
        )
        assert (
            len(call.h) == (len(call.row) if parsed.input == "pair" else call.n_rows)
            and (np.diff(request.row) >= 0).all()
        )
        assert (call.weight is None) == (not parsed.uses_weight)
        assert set(call.expert) == set(experts)
        h = call.h if parsed.input == "pair" else call.h[call.row]
        assert np.array_equal(h, golden._h[call.inputs])
    assert [call.n_rows for call in calls] == [1] * golden.n_inputs + [33]
    assert (np.bincount(calls[-1].expert)[4:] >= [33] + [golden.n_inputs] * (STEP_EXPERTS - 1)).all()


@pytest.fixture(autouse=True)
async def _ended() -> AsyncIterator[None]:
    yield
    for task in asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[arg-type]
        task.cancel()
