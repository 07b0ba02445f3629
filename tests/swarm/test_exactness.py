"""The swarm computes what stock llama.cpp computes, to the bit, for every architecture it serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.errors import ModelError
from node.models.demo import demo_model
from node.models.index import read_model
from rigs import random_models
from rigs.architectures import WITHOUT_EXPERTS, architecture_models
from rigs.expert_servers import OVERRIDE, HeldModel, Servers
from rigs.oracle import Job, Logits, evaluate, logits, nmse

N_PROMPT, N_GENERATE = 40, 64


@pytest.fixture(scope="module")
def fixtures() -> dict[str, Path]:
    return architecture_models()


@pytest.fixture(scope="module", params=[1, 2, 3])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(request.param, tmp_path_factory.mktemp(f"servers{request.param}"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def stock(fixtures: dict[str, Path]) -> dict[str, Logits | str]:
    """Stock llama.cpp's logits of every fixture, with its default settings; or why there are none."""
    names = [name for name in fixtures if name not in WITHOUT_EXPERTS]
    return dict(zip(names, evaluate([_job(fixtures[name]) for name in names]), strict=True))


def _job(model: Path, **fields: object) -> Job:
    return Job(**({"model": model, "n_prompt": N_PROMPT, "n_generate": N_GENERATE} | fields))  # type: ignore[arg-type]


def _remote(job: Job) -> Job:
    return Job(**(vars(job) | {"overrides": (OVERRIDE,)}))


def _check_one_round_each(held: HeldModel, result: Logits) -> None:
    """Every layer is one round per decode, with at most one call to each server; and only experts left the router."""
    statistics = held.statistics()
    rounds = {entry["layer"]: entry["rounds"] for entry in statistics["layers"]}
    assert set(rounds) == set(held.programs.layers)
    assert len(set(rounds.values())) == 1
    if result.kind == "logits" and len(result.rows) == 1 + N_GENERATE:
        assert set(rounds.values()) == {1 + N_GENERATE} or set(rounds.values()) == {N_GENERATE}
    for node in statistics["nodes"]:
        assert node["calls"] <= sum(rounds.values())
    assert statistics["calls"] >= sum(rounds.values())
    assert statistics["failures"] == 0
    experts = {f"blk.{layer}.{name}" for layer in held.programs.layers for name in held.index.expert_tensors(layer)}
    assert set(statistics["swarm_tensors"]) == experts


def test_every_architecture_is_bit_identical(
    fixtures: dict[str, Path], stock: dict[str, Logits | str], servers: Servers, subtests_report: dict[str, str]
) -> None:
    wrong = {}
    for name, expected in stock.items():
        if isinstance(expected, str):
            wrong[name] = f"stock llama.cpp: {expected}"
            continue
        try:
            with servers.holding(fixtures[name], uneven=len(servers.processes) == 3) as held:
                result = logits(_remote(_job(fixtures[name])), env=held.environment())
                if not np.array_equal(result.rows.view(np.uint32), expected.rows.view(np.uint32)):
                    wrong[name] = f"differs from stock: NMSE {nmse(result.rows, expected.rows):.2e}"
                else:
                    _check_one_round_each(held, result)
        except (ModelError, AssertionError) as error:
            wrong[name] = str(error)
    subtests_report.update(wrong)
    assert wrong == {}


@pytest.fixture
def subtests_report() -> Iterator[dict[str, str]]:
    report: dict[str, str] = {}
    yield report
    for name, reason in report.items():
        print(f"{name}: {reason}")


def test_demo_model_is_bit_identical(servers: Servers) -> None:
    job = _job(demo_model())
    expected = logits(job)
    with servers.holding(demo_model()) as held:
        result = logits(_remote(job), env=held.environment())
        _check_one_round_each(held, result)
    assert np.array_equal(result.rows.view(np.uint32), expected.rows.view(np.uint32))
    assert np.array_equal(result.generated, expected.generated)


@pytest.mark.parametrize(
    "shape",
    [random_models.Shape("qwen3moe"), random_models.Shape("qwen35moe"), random_models.QWEN35MOE_NEXTN],
    ids=["qwen3moe", "qwen35moe", "nextn"],
)
def test_k_quants_are_bit_identical(shape: random_models.Shape, servers: Servers) -> None:
    # --no-repack: repacked weights give other bits than plain ones, and expert servers hold plain ones.
    model = random_models.moe_model(shape, "Q4_K_M")
    job = _job(model, n_prompt=512, repack=False)
    expected = logits(job)
    with servers.holding(model) as held:
        result = logits(_remote(job), env=held.environment())
        _check_one_round_each(held, result)
    assert np.array_equal(result.rows.view(np.uint32), expected.rows.view(np.uint32))


def test_split_model_is_bit_identical(servers: Servers) -> None:
    whole = random_models.moe_model(random_models.Shape("qwen3moe"), "Q4_K_M")
    parts = random_models.split_model(whole)
    assert read_model(parts).model_id == read_model(whole).model_id
    job = _job(parts, repack=False)
    expected = logits(_job(whole, repack=False))
    with servers.holding(parts) as held:
        result = logits(_remote(job), env=held.environment())
    assert np.array_equal(result.rows.view(np.uint32), expected.rows.view(np.uint32))


@pytest.mark.parametrize("architecture", sorted(WITHOUT_EXPERTS))
def test_a_model_without_routed_experts_is_refused_by_name(
    architecture: str, fixtures: dict[str, Path], servers: Servers
) -> None:
    with pytest.raises(ModelError, match=f"{architecture}.* has no routed experts"):
        servers.programs(read_model(fixtures[architecture]))


def test_a_missing_slice_fails_the_decode(servers: Servers) -> None:
    with servers.holding(demo_model()) as held:
        environment = held.environment()
        path = Path(environment["SWARM_TABLE"])
        document = json.loads(path.read_text())
        layer = sorted(held.programs.layers)[3]
        document["slices"] = [s for s in document["slices"] if (s["layer"], s["first"]) != (layer, 0)]
        path.write_text(json.dumps(document))
        result = evaluate([_remote(_job(demo_model(), n_generate=1))], env=environment)[0]
        assert isinstance(result, str)
        assert held.statistics()["failures"] == 1
