"""The oracle and the generated models: what they are trusted for in other tests."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from node.models.demo import demo_model, find_source
from node.models.index import read_model
from rigs import oracle
from rigs.oracle import Job, Logits, nmse
from rigs.random_models import QWEN3MOE, QWEN35MOE, moe_model, split_model


def test_a_bad_job_costs_itself_alone(tmp_path: Path) -> None:
    good = moe_model(QWEN3MOE, "Q4_K_M")
    (tmp_path / "damaged.gguf").write_bytes(good.read_bytes()[: 1 << 20])
    jobs = [
        Job(good, n_generate=2),
        Job(tmp_path / "damaged.gguf"),
        Job(good, n_generate=2, overrides=[("exps", "NoSuchBuffer")]),
        Job(good, n_generate=2, tokens=[1, 49152]),
        Job(good, n_generate=2),
    ]
    first, damaged, override, token, last = oracle.evaluate(jobs)
    assert damaged == "the model could not be loaded"
    assert isinstance(override, str)
    assert "no device has the buffer type 'NoSuchBuffer'; there are: CPU" in override
    assert isinstance(token, str)
    assert "token 49152 is outside the vocabulary" in token
    assert isinstance(first, Logits)
    assert isinstance(last, Logits)
    assert first.rows.tobytes() == last.rows.tobytes()
    assert first.rows.shape == (3, 49152)
    with pytest.raises(oracle.OracleError, match="could not be loaded"):
        oracle.logits(jobs[1])


def test_a_job_that_kills_the_process_costs_itself_alone() -> None:
    good = Job(moe_model(QWEN3MOE, "Q4_K_M"), n_generate=1)
    # More threads than there is room for: ggml calls abort(). Without the limit they would be
    # all that the machine can have.
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, former[1]))
    try:
        results = oracle.evaluate([good, Job(good.model, n_threads=100_000), good])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)
    assert [isinstance(result, str) for result in results] == [False, True, False]
    assert "ended with status" in str(results[1])


def test_prompt_and_rows() -> None:
    model = moe_model(QWEN35MOE, "Q4_K_M")
    tokens = [5, 7, 11, 13]
    every, last = oracle.evaluate([Job(model, tokens, n_generate=3, all_logits=all_) for all_ in (True, False)])
    assert isinstance(every, Logits)
    assert isinstance(last, Logits)
    assert (every.kind, every.prompt.tolist(), len(every.generated)) == ("logits", tokens, 3)
    assert every.rows.shape[0] == 4 + 3
    assert last.rows.shape[0] == 1 + 3
    assert np.array_equal(last.generated, last.rows[:-1].argmax(axis=1))
    assert np.array_equal(every.generated, every.rows[3:-1].argmax(axis=1))


@pytest.mark.parametrize("shape", [QWEN3MOE, QWEN35MOE], ids=lambda shape: shape.architecture)
def test_generated_models_use_their_experts(shape: object) -> None:
    """Quantised and split files are the same model to the index and to llama.cpp, and answers depend on the prompt."""
    assert shape in (QWEN3MOE, QWEN35MOE)
    whole = moe_model(QWEN3MOE if shape == QWEN3MOE else QWEN35MOE, "Q4_K_M")
    split = split_model(whole)
    index = read_model(split)
    assert len(index.paths) > 2
    assert index.model_id == read_model(whole).model_id
    types = {tensor.type for layer in index.expert_layers for tensor in index.expert_tensors(layer).values()}
    assert types == {"q4_K", "q6_K"}
    jobs = [Job(whole, n_generate=8), Job(split, n_generate=8), Job(whole, seed=2, n_generate=8)]
    a, b, c = oracle.evaluate(jobs)
    assert isinstance(a, Logits)
    assert isinstance(b, Logits)
    assert isinstance(c, Logits)
    assert a.rows.tobytes() == b.rows.tobytes()
    assert nmse(c.rows, a.rows) > 0.1
    assert len(set(a.generated.tolist())) > 2


def test_the_demo_model_computes_what_its_source_does() -> None:
    """The weights are the same to the last bit; the quantisation of activations amplifies the sums' other order."""
    jobs = [Job(model, n_generate=0, all_logits=True) for model in (find_source(), demo_model())]
    dense, moe = oracle.evaluate(jobs)
    assert isinstance(dense, Logits)
    assert isinstance(moe, Logits)
    assert nmse(moe.rows, dense.rows) < 2e-3
