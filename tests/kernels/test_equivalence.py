"""How alike results are: the figures against plain formulas, and the limits against known faults."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import tolerances
from kernels.equivalence import Tally, compare
from kernels.tolerances import GAIN_FOUND, problem, rows_needed, tolerance
from rigs.layers import Layer, Pairs, hidden
from rigs.program_texts import SWIGLU
from rigs.random_models import LAYER_TYPES, random_layer


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6), st.floats(1e-6, 1))
def test_the_figures_are_those_of_the_formulas(seed: int, n_experts: int, n_rows: int, noise: float) -> None:
    generator = np.random.default_rng(seed)
    b = generator.standard_normal((n_experts * n_rows, 16))
    a = b * 1.01 + noise * generator.standard_normal(b.shape)
    expert = np.tile(np.arange(n_experts), n_rows)
    tally = compare(a, b, expert)
    found = tally.result()
    assert found.n_outputs == a.size and found.n_experts == n_experts and found.n_not_finite == 0
    assert found.cosine == pytest.approx((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)), abs=1e-12)
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-9)
    assert found.max_abs == np.abs(a - b).max()
    gains = [(a[expert == e] * b[expert == e]).sum() / np.square(b[expert == e]).sum() for e in range(n_experts)]
    assert [one.gain for one in tally.experts().values()] == pytest.approx(gains, rel=1e-9, abs=1e-12)
    assert found.gain_deviation == pytest.approx(max(abs(g - 1) for g in gains), rel=1e-9, abs=1e-13)
    for e, one in tally.experts().items():
        x, y = a[expert == e], b[expert == e]
        norms = np.linalg.norm(y, axis=1)
        sizes = np.maximum(norms, np.sqrt(np.median(norms**2)))
        assert one.worst_row == pytest.approx((np.linalg.norm(x - y, axis=1) / sizes).max(), rel=1e-9)
        assert one.typical_gain == pytest.approx(np.median((x * y).sum(1) / norms**2), rel=1e-9, abs=1e-12)
        assert one.typical_row == pytest.approx(np.median(np.linalg.norm(x - y, axis=1) / sizes), rel=1e-9)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_parts_give_what_the_whole_gives(seed: int, cut: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = generator.standard_normal((2, 8, 5))
    whole, parts = Tally(), Tally()
    whole.add(3, a, b)
    parts.add(3, a[:cut], b[:cut])
    parts.add(3, a[cut:], b[cut:])
    one, other = whole.result(), parts.result()
    assert one.n_outputs == other.n_outputs and one.max_abs == other.max_abs
    assert (one.cosine, one.relative_l2, one.worst_row) == pytest.approx(
        (other.cosine, other.relative_l2, other.worst_row)
    )


def test_equal_results_and_nothing_at_all() -> None:
    a = np.ones((2, 3))
    same = compare(a, a, [0, 1]).result()
    assert (same.cosine, same.relative_l2, same.max_abs, same.gain_deviation) == (pytest.approx(1, abs=1e-15), 0, 0, 0)
    nothing = Tally().result()
    assert (nothing.n_outputs, nothing.gain_expert) == (0, -1)
    zero = compare(np.zeros((1, 3)), np.zeros((1, 3)), [0]).experts()[0]
    assert (zero.gain, zero.relative_l2, zero.worst_row) == (1, 0, 0)
    made_up = compare(a, np.zeros((2, 3)), [0, 1]).experts()[1]
    assert made_up.relative_l2 == math.inf and made_up.worst_row == math.inf


def test_one_large_row_does_not_hide_the_others() -> None:
    """As with real weights: its noise is the expert's gain, but no fault; and a factor in the small rows is one."""
    generator = np.random.default_rng(3)
    b = generator.standard_normal((7, 1024))
    b[4] *= 40
    a = b + 0.01 * np.linalg.norm(b, axis=1, keepdims=True) / 32 * generator.standard_normal(b.shape)
    a[4] *= 1.02
    allowed = tolerance("cpu", "reference", ["q4_K"])
    found = compare(a, b, np.zeros(7)).experts()[0]
    assert found.gain > 1.015 and abs(found.typical_gain - 1) < 1e-3
    assert problem(found, allowed, 1024) == ""
    assert "times what they should be" in problem(compare(a * 1.01, b, np.zeros(7)).experts()[0], allowed, 1024)
    a[5] = 0
    assert "a row differs by 100 %" in problem(compare(a, b, np.zeros(7)).experts()[0], allowed, 1024)


def test_what_is_not_finite_is_counted_and_spoils_every_figure() -> None:
    a, b = np.ones((3, 4)), np.ones((3, 4))
    a[1, 2], b[1, 3], a[2, 0] = np.nan, np.inf, -np.inf
    tally = compare(a, b, [5, 6, 7])
    found = tally.result()
    assert found.n_not_finite == 3
    assert found.gain_expert in (6, 7)
    assert all(math.isnan(value) for value in (found.cosine, found.relative_l2, found.max_abs, found.gain_deviation))
    assert tally.experts()[5].n_not_finite == 0 and tally.experts()[6].n_not_finite == 2


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
        Tally().add(0, np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="for 3 pairs"):
        compare(np.ones((2, 3)), np.ones((2, 3)), [0, 1, 2])


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_the_noise_of_this_cpu_is_within_the_limits_and_faults_are_not(type: str, tmp_path: Path) -> None:
    """The measurement that kernels/tolerances.py tells of, on other seeds; and that each limit is no looser than it
    need be."""
    n_expert, n_embd, n_ff = 8, 512, 256
    layer = Layer(SWIGLU, random_layer(type, n_expert, n_embd, n_ff, seed=7), n_expert, tmp_path / "layer")
    store = layer.held()
    allowed = tolerance("cpu", "reference", [type])
    n_many = max(33, rows_needed(allowed, n_ff))
    for n_rows in (1, 8, n_many):
        h = hidden(n_rows, n_embd, seed=7)
        pairs = Pairs.of([list(range(n_expert))] * n_rows, seed=7)
        a, b = layer.call(store, h, pairs, "rows"), layer.expected(h, pairs, "rows")
        tally = compare(a, b, pairs.expert)
        found = tally.result()
        print(
            f"{type}, {n_rows} rows: relative L2 {found.relative_l2:.2e}, row {found.worst_row:.2e}, "
            f"gain {found.gain_deviation:.2e}"
        )
        assert {e: problem(one, allowed, n_ff) for e, one in tally.experts().items()} == dict.fromkeys(
            range(n_expert), ""
        )
        assert allowed.noise / 2.5 < found.relative_l2 < allowed.noise * 1.2
        scaled = a.copy()
        scaled[pairs.expert == 3] *= np.float32(1 + GAIN_FOUND)
        wrong = {e for e, one in compare(scaled, b, pairs.expert).experts().items() if problem(one, allowed, n_ff)}
        assert wrong == {3} if n_rows == n_many else wrong <= {3}
        shifted = compare(np.roll(a, 1, axis=0), b, pairs.expert).experts()
        assert all("a row differs by" in problem(one, allowed, n_ff) for one in shifted.values())


def test_a_pair_of_backends_has_the_noise_of_both() -> None:
    cpu, both = tolerance("cpu", "reference", ["q4_K", "q6_K"]), tolerance("cpu", "cpu", ["q4_K"])
    assert both.noise == pytest.approx(cpu.noise * math.sqrt(2))
    assert tolerance("gpu", "reference", ["f32"]).noise > tolerance("cpu", "reference", ["f32"]).noise
    assert tolerance("gpu", "cpu", ["q8_0"]) == tolerance("cpu", "gpu", ["q8_0"])
    # The worst type decides; one that nobody measured counts as the worst there is.
    assert tolerance("cpu", "reference", ["f32", "q8_0"]) == tolerance("cpu", "reference", ["q8_0"])
    assert tolerance("cpu", "reference", ["iq9_new"]) == cpu
    assert tolerance("cpu", "reference", ["q8_0"], swiglu=False).noise > tolerance("cpu", "reference", ["q8_0"]).noise
    assert [tolerances.family(t) for t in ("cpu", "gpu", "igpu", "accel")] == ["cpu", "gpu", "gpu", "gpu"]
    # Swapped experts and rows are far outside of any limit: unrelated vectors differ by the root of 2.
    worst = tolerance("gpu", "cpu", ["q4_K"], swiglu=False)
    assert worst.row <= 0.5 and worst.typical < 0.5


def test_a_type_of_every_kind_is_dequantised_as_the_gguf_package_does() -> None:
    for type in LAYER_TYPES:
        tensors = random_layer(type, 2, 256, 256)
        for name, (kind, ne, data) in tensors.items():
            values = kernels._kernels.dequantise(kind, ne[0], data, 2 * ne[0] * ne[1])
            expected = kernels.reference.dequantise(kind, (*ne, 2), data)
            assert np.array_equal(values, expected.reshape(-1).astype(np.float64)), (type, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("q9_9", 32, b"", 0), "'q9_9' is no type of weights"),
        (("q8_K", 256, b"", 0), "'q8_K' is no type of weights"),
        (("q8_0", 31, b"", 31), "31 values in rows of 31 are not whole blocks"),
        (("q8_0", 0, b"", 0), "rows of 0 are not"),
        (("q8_0", 32, b"\0" * 33, 32), "33 bytes are not 32 values"),
        (("q8_0", 32, b"\0" * 34, 64), "34 bytes are not 64 values"),
        (("f32", 2, b"\0" * 8, 3), "3 values in rows of 2"),
        (("f32", 1, b"", -1), "-1 values"),
    ],
)
def test_what_cannot_be_dequantised_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels._kernels.dequantise(*arguments)
