"""``swarm-node verify``: what it compares, what it says of a backend that is wrong, and real
nodes at their expert ports."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import kernels
from kernels.tolerances import Family
from node.commands.main import main
from node.commands.verify_matrix import (
    DeviceBackend,
    Input,
    ReferenceBackend,
    Subject,
    compare_backends,
    make_input,
    n_values,
)
from node.commands.verify_screen import markdown
from node.models.demo import demo_model
from rigs.layers import Layer
from rigs.loopback import NODE_COMMAND, LocalSwarm, local_swarm
from rigs.program_texts import SWIGLU
from rigs.random_models import QWEN3MOE, moe_model, random_layer

N_EXPERT, N_EMBD, N_FF = 10, 256, 256


def make_subject(folder: Path, type: str = "q8_0", first: int = 2, last: int = 9) -> Subject:
    layer = Layer(SWIGLU, random_layer(type, N_EXPERT, N_EMBD, N_FF), N_EXPERT, folder / "layer")
    sources = {}
    for name, (kind, ne, data) in layer.tensors.items():
        one = len(data) // N_EXPERT
        sources[name] = kernels.TensorSource(
            kind, ne, [(str(layer.path), layer.offsets[name] + first * one, (last - first + 1) * one)]
        )
    return Subject("made up", 0, first, last, N_EXPERT, 4, SWIGLU, sources)


class Made:
    """A backend that does to the reference's results what `change` says, for some experts only."""

    def __init__(self, name: str, subject: Subject, experts: Sequence[int], change: Any = None) -> None:
        self.name = name
        self.family: Family = "cpu"
        self.description = "made up"
        self.experts = frozenset(experts)
        self.asked: list[Input] = []
        self._reference = ReferenceBackend(subject)
        self._change = change

    async def compute(self, given: Input) -> np.ndarray:
        self.asked.append(given)
        y = await self._reference.compute(given)
        return y if self._change is None else self._change(given, y)  # type: ignore[no-any-return]


def test_inputs_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    subject = make_subject(tmp_path)
    one, other = make_input(subject, range(2, 6), 33, N_EMBD, 5), make_input(subject, range(2, 6), 33, N_EMBD, 5)
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("h", "row", "expert", "weight"))
    assert one.h.shape == (33, N_EMBD) and np.bincount(one.expert).tolist() == [0, 0, 33, 33, 33, 33]
    assert not np.array_equal(one.h, make_input(subject, range(2, 6), 33, N_EMBD, 6).h)
    # A call for no more experts a row than the layer uses: what a node accepts.
    assert len(one.row) == 33 * 4 and (np.diff(one.row) >= 0).all()


async def test_every_two_backends_are_compared_where_both_can(tmp_path: Path) -> None:
    subject = make_subject(tmp_path)
    first, second = Made("first", subject, range(2, 6)), Made("second", subject, (4, 5, 6, 9))
    lone = Made("lone", subject, (7, 8))
    backends = [first, second, lone, ReferenceBackend(subject)]
    steps: list[tuple[int, int]] = []
    outcome = await compare_backends(subject, backends, N_EMBD, rows=(1, 5), progress=lambda *step: steps.append(step))
    found = {(one.a, one.b, one.n_rows): one.figures.n_outputs for one in outcome.compared}
    assert found == {
        **{("first", "float64", n): 4 * n * N_EMBD for n in (1, 5)},
        **{("second", "float64", n): 4 * n * N_EMBD for n in (1, 5)},
        **{("lone", "float64", n): 2 * n * N_EMBD for n in (1, 5)},
        **{("first", "second", n): 2 * n * N_EMBD for n in (1, 5)},
    }
    assert outcome.is_well and all(one.figures.max_abs == 0 for one in outcome.compared)
    assert list(found)[:2] == [("first", "float64", 1), ("first", "float64", 5)]  # against the reference first
    assert steps[0] == (0, 4) and steps[-1] == (4, 4)
    assert set(np.concatenate([given.expert for given in second.asked]).tolist()) == {4, 5, 6, 9}


async def test_a_backend_that_fails_is_left_out_and_said(tmp_path: Path) -> None:
    subject = make_subject(tmp_path)

    def fails(given: Input, y: np.ndarray) -> np.ndarray:
        if given.n_rows > 1:
            raise kernels.ComputeError("the device is gone")
        return y

    backends = [
        Made("ill", subject, range(2, 10), fails),
        Made("fine", subject, range(2, 10)),
        ReferenceBackend(subject),
    ]
    outcome = await compare_backends(subject, backends, N_EMBD, rows=(1, 5))
    assert outcome.left_out == {"ill": "the device is gone"} and not outcome.is_well
    assert {(one.a, one.b) for one in outcome.compared} == {("fine", "float64")}


@pytest.mark.parametrize("fault", ["scaled", "swapped", "nan"])
async def test_a_fault_is_said_with_its_expert(fault: str, tmp_path: Path) -> None:
    subject = make_subject(tmp_path)

    def change(given: Input, y: np.ndarray) -> np.ndarray:
        y = y.copy()
        own = given.expert == 5
        if fault == "scaled":
            y[own] *= 1.01
        elif fault == "swapped" and own.any():
            y[own] = y[given.expert == 4]
        elif fault == "nan":
            y[own, 3] = np.nan
        return y

    backends = [Made("wrong", subject, range(2, 10), change), ReferenceBackend(subject)]
    outcome = await compare_backends(subject, backends, N_EMBD, rows=(64,))
    (compared,) = outcome.compared
    assert compared.problem.startswith("expert 5: ") and not outcome.is_well
    assert compared.figures.gain_expert == 5


async def test_the_device_and_the_reference_agree_for_every_layer_of_a_model(tmp_path: Path) -> None:
    subject = make_subject(tmp_path, "q4_K", 0, 9)
    assert n_values(subject) == (N_EMBD, N_EMBD) and subject.types == ("q4_K",) and subject.width == N_EMBD
    (cpu,) = [device for device in kernels.devices() if device.type == "cpu"]
    backends = [DeviceBackend(cpu, subject, 1), ReferenceBackend(subject)]
    outcome = await compare_backends(subject, backends, N_EMBD, rows=(1, 8, 33))
    assert outcome.is_well and [one.n_rows for one in outcome.compared] == [1, 8, 33]
    assert all(0.999 < one.figures.cosine < 1 for one in outcome.compared)


# --- the command

SMALL = ["--shape", "qwen3-30b-a3b", "--rows", "1", "33"]


def test_the_command_shows_a_matrix_that_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", *SMALL, "--type", "Q8_0", "f16"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "random weights, qwen3-30b-a3b, layer 0, experts 0-7 (q8_0)" in text and "(f16)" in text
    assert text.count("CPU, float64") == 4 and "all within the limits" in text


def test_the_command_gives_json_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["well"] and found["left_out"] == {} and found["build"] == kernels.build_id()
    assert [one["outputs"] for one in found["comparisons"]] == [8 * 2048, 8 * 33 * 2048]
    assert found["subjects"][0]["types"] == ["q4_K", "q6_K"]
    assert main(["verify", *SMALL, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == markdown(found).splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert f"{found['comparisons'][0]['cosine']:.10f}" in lines[2]


def test_a_device_that_is_wrong_makes_the_command_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(kernels.ExpertStore):
        def ffn(self, digest: int, layer: int, h: Any, row: Any, expert: Any, *others: Any) -> Any:
            y = super().ffn(digest, layer, h, row, expert, *others)
            if len(h) > 1:
                y[expert == 6] *= np.float32(1.01)
            return y

    monkeypatch.setattr(kernels, "ExpertStore", Wrong)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["verify", *SMALL]) == 1
    text = capsys.readouterr().out
    assert (
        "beyond the limits: CPU and float64, 33 rows: expert 6: the results are 1.0" in text
        and "not all is well" in text
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "3"], "--layer and --experts are of a model"),
        (["--shape", "gpt-9"], "there is no shape 'gpt-9'"),
        (["--type", "q9_9"], "no random weights of type q9_9"),
        (["--device", "CUDA7"], "no device CUDA7 of this build can compute experts; there are CPU"),
        (["--model", "/nowhere.gguf"], "/nowhere.gguf"),
        (["--model", "/nowhere.gguf", "--full"], "--type and --full are of random weights"),
    ],
)
def test_what_cannot_be_verified_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--rows", "0"], ["--rows", "513"], ["--experts", "5-2"], ["--json", "--markdown"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 2


def test_a_models_layer(capsys: pytest.CaptureFixture[str]) -> None:
    model = moe_model(QWEN3MOE, "Q4_K_M")
    assert (
        main(
            ["verify", "--model", str(model), "--layer", "1", "--experts", "3-6", "--rows", "5", "--no-nodes", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [(s["first"], s["last"], s["layer"]) for s in found["subjects"]] == [(3, 6, 1)]
    assert found["comparisons"][0]["outputs"] == 4 * 5 * QWEN3MOE.n_embd
    assert main(["verify", "--model", str(model), "--layer", "77", "--no-nodes"]) == 1
    assert "layer 77" in capsys.readouterr().err


# --- nodes

module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSwarm]:
    async with local_swarm(tmp_path_factory.mktemp("swarm"), demo_model(), {}) as running:
        await running.start("alpha", routes=True)
        await running.start("beta")
        await running.whole()
        yield running


async def verify(swarm: LocalSwarm, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [NODE_COMMAND, "verify", "--url", swarm["beta"].url, "--rows", "1", "33", *arguments]
    variables = {**swarm._environment, **environment}
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, env=variables)


@pytest.mark.slow
@module_loop
async def test_live_nodes_are_called_at_their_expert_ports(swarm: LocalSwarm) -> None:
    before = await swarm.expert_calls()
    done = await verify(swarm, "--model", str(demo_model()), "--layer", "4", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert set(found["backends"]) == {"CPU", "alpha", "beta", "float64"} and found["left_out"] == {}
    outputs = {(one["a"], one["b"], one["rows"]): one["outputs"] for one in found["comparisons"]}
    # Together the nodes have every expert; no two of them have one in common.
    for n in (1, 33):
        assert (
            outputs["alpha", "float64", n] + outputs["beta", "float64", n]
            == outputs["CPU", "float64", n]
            == 8 * n * 576
        )
    assert ("alpha", "beta", 1) not in outputs
    # The same kernels on the same CPU.
    assert all(one["max_abs"] == 0 for one in found["comparisons"] if one["b"] != "float64")
    assert await swarm.expert_calls() > before
    # The router's term is not raised: it still answers.
    status = await swarm.status("alpha")
    assert status["ready"], status["waits_for"]


@pytest.mark.slow
@module_loop
async def test_another_key_or_model_is_said(swarm: LocalSwarm) -> None:
    from node.swarm_key import SwarmKey

    other_key = await verify(swarm, "--model", str(demo_model()), "--json", SWARM_SWARM_KEY=SwarmKey.generate().text())
    assert other_key.returncode == 1
    left_out = json.loads(other_key.stdout)["left_out"]
    assert set(left_out) == {"alpha", "beta"} and all("swarm key" in why for why in left_out.values()), left_out
    other_model = await verify(swarm, "--model", str(moe_model(QWEN3MOE, "Q4_K_M")))
    assert other_model.returncode == 1 and "serves another" in other_model.stderr
