"""In `sum` mode servers add their own experts' rows: other last bits than one machine's, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.models.demo import demo_model
from rigs import random_models
from rigs.architectures import WITHOUT_EXPERTS, architecture_models
from rigs.expert_servers import OVERRIDE, Servers
from rigs.oracle import Job, logits, nmse


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(3, tmp_path_factory.mktemp("servers"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(1, tmp_path_factory.mktemp("perturbed"), script="run_perturbed_server.py")
    yield running
    running.close()


def _prompt(model: Path, **fields: object) -> Job:
    """The logits of 104 fixed tokens: greedy ones would part ways where two are nearly equal."""
    return Job(**({"model": model, "n_prompt": 104, "n_generate": 0, "all_logits": True} | fields))  # type: ignore[arg-type]


def _remote(job: Job) -> Job:
    return Job(**(vars(job) | {"overrides": (OVERRIDE,)}))


def test_f32_models_agree_in_their_logits(servers: Servers) -> None:
    worst = {}
    for name, path in architecture_models().items():
        if name in WITHOUT_EXPERTS:
            continue
        expected = logits(_prompt(path))
        with servers.holding(path) as held:
            result = logits(_remote(_prompt(path)), env=held.environment("sum"))
        worst[name] = nmse(result.rows, expected.rows)
    print("worst:", sorted(worst.items(), key=lambda item: -item[1])[:5])
    assert {name: value for name, value in worst.items() if not value <= 1e-6} == {}


@pytest.mark.parametrize("case", ["demo", "qwen3moe Q4_K_M", "qwen35moe Q4_K_M"])
def test_quantised_models_stay_near_the_last_bits_floor(case: str, servers: Servers, perturbed: Servers) -> None:
    model = (
        demo_model()
        if case == "demo"
        else random_models.moe_model(random_models.Shape(case.split()[0]), case.split()[1])
    )
    # --no-repack where stock would repack, as in the exactness tests.
    job = _prompt(model, repack=case == "demo")
    expected = logits(job)
    with servers.holding(model) as held:
        error = nmse(logits(_remote(job), env=held.environment("sum")).rows, expected.rows)
    # A last bit counts where it makes an activation round to its other neighbour, which is rare and then costs 1e-5: by
    # chance, none of a run's does. So the floor is the largest of several.
    floor, n_runs = 0.0, 0
    with perturbed.holding(model) as held:
        while n_runs == 0 or (error > 3 * floor and n_runs < 12):
            floor = max(floor, nmse(logits(_remote(job), env=held.environment()).rows, expected.rows))
            n_runs += 1
    print(f"{case}: sum {error:.2e}, floor of one last bit in half the values {floor:.2e}, {n_runs} runs")
    assert floor > 0
    assert error <= 3 * floor


def test_each_call_agrees_with_rows(servers: Servers) -> None:
    """One layer at a time, through the real servers: sums added in slice order against rows added in slot order."""
    for model in (demo_model(), random_models.moe_model(random_models.Shape("qwen3moe"), "Q4_K_M")):
        with servers.holding(model) as held:
            random = np.random.default_rng(3)
            for layer, program in held.programs.layers.items():
                h = random.standard_normal((33, program.n_in), dtype=np.float32)
                ids = np.stack([random.permutation(program.n_expert)[: program.n_used] for _ in h]).astype(np.int32)
                weight = random.random(ids.shape, dtype=np.float32)
                rows = held.call(layer, h, ids, weight, "rows")
                total = held.call(layer, h, ids, weight, "sum")
                assert rows.shape == total.shape == (33, program.n_out)
                assert nmse(total, rows) <= 1e-10
