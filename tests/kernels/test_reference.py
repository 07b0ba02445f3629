"""The NumPy reference against formulas written out here, and its parser against everything that is not a program."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.reference import ProgramError, dequantise, digest, ffn, parse
from rigs.program_texts import BAD_TEXTS, SWIGLU, program
from rigs.random_models import LAYER_TYPES, random_layer

N_EXPERT, N_IN, N_FF, FIRST = 5, 6, 4, 10


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def tensors(rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    shapes = {
        "ffn_up_exps.weight": (N_FF, N_IN),
        "ffn_gate_exps.weight": (N_FF, N_IN),
        "ffn_down_exps.weight": (N_IN, N_FF),
        "ffn_gate_up_exps.weight": (2 * N_FF, N_IN),
        "ffn_gate_up_exps.bias": (2 * N_FF,),
        "ffn_down_exps.bias": (N_IN,),
        "ffn_down_exps.scale": (),
    }
    return {name: rng.standard_normal((N_EXPERT, *shape), np.float32) for name, shape in shapes.items()}


ROW = [0, 0, 1, 3, 3, 3]
EXPERT = [FIRST + 4, FIRST, FIRST + 2, FIRST, FIRST + 1, FIRST + 4]
N_ROWS = 5  # rows 2 and 4 have no expert here


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_swiglu_pair_by_pair(rng: np.random.Generator, tensors: dict[str, NDArray[np.float32]]) -> None:
    h = rng.standard_normal((N_ROWS, N_IN)).astype(np.float32)
    w = rng.uniform(0, 1, len(ROW)).astype(np.float32)
    rows = ffn(SWIGLU, tensors, h, ROW, EXPERT, w, N_ROWS, "rows", first=FIRST)
    for i, (r, e) in enumerate(zip(ROW, EXPERT, strict=True)):
        x = h[r].astype(np.float64)
        up, gate, down = (
            tensors[f"ffn_{name}_exps.weight"][e - FIRST].astype(np.float64) for name in ("up", "gate", "down")
        )
        hidden = [silu(float(gate[j] @ x)) * float(up[j] @ x) for j in range(N_FF)]
        expected = [float(w[i]) * sum(float(down[k, j]) * hidden[j] for j in range(N_FF)) for k in range(N_IN)]
        assert rows[i] == pytest.approx(expected, rel=1e-12)
    total = ffn(SWIGLU, tensors, h, ROW, EXPERT, w, N_ROWS, "sum", first=FIRST)
    expected_sum = np.stack([sum((rows[i] for i in range(len(ROW)) if ROW[i] == r), np.zeros(N_IN)) for r in range(5)])
    assert total == pytest.approx(expected_sum, rel=1e-12)
    assert not total[[2, 4]].any()


def test_merged_biased_scaled_weight_before(rng: np.random.Generator, tensors: dict[str, NDArray[np.float32]]) -> None:
    """Merged gate and up, biases, per-expert scale, one input row per pair, no gate weights."""
    text = program(
        "matmul ffn_gate_up_exps.weight h prec=10,0",
        "bias ffn_gate_up_exps.bias %0",
        f"cut %1 0 {N_FF}",
        f"cut %1 {N_FF} {N_FF}",
        "glu swiglu_oai %2 %3 0x1.b3b646p+0 0x1p-1",
        "matmul ffn_down_exps.weight %4",
        "gather ffn_down_exps.scale",
        "mul %5 %6",
        "bias ffn_down_exps.bias %7",
        "%8",
        input="pair",
    )
    h = rng.standard_normal((len(ROW), N_IN))
    got = ffn(text, tensors, h, ROW, EXPERT, None, N_ROWS, "rows", first=FIRST)
    alpha, limit = float.fromhex("0x1.b3b646p+0"), 0.5
    assert alpha == pytest.approx(1.702)
    for i, e in enumerate(EXPERT):
        t = {name: tensor[e - FIRST].astype(np.float64) for name, tensor in tensors.items()}
        both = t["ffn_gate_up_exps.weight"] @ h[i] + t["ffn_gate_up_exps.bias"]
        hidden = []
        for gate, up in zip(both[:N_FF].tolist(), both[N_FF:].tolist(), strict=True):
            gate, up = min(gate, limit), max(-limit, min(up, limit))
            hidden.append(gate / (1 + math.exp(-alpha * gate)) * (up + 1))
        expected = t["ffn_down_exps.weight"] @ np.array(hidden) * t["ffn_down_exps.scale"] + t["ffn_down_exps.bias"]
        assert got[i] == pytest.approx(expected, rel=1e-12)


X = [-30.0, -4.0, -1.5, -0.25, 0.0, 0.25, 1.5, 4.0, 30.0]

UNARY: Mapping[str, Callable[[float], float]] = {
    "silu": silu,
    "gelu": lambda x: 0.5 * x * (1 + math.tanh(0.79788456080286535588 * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x / (1 + math.exp(-1.702 * x)),
    "gelu_erf": lambda x: 0.5 * x * (1 + math.erf(x / 2**0.5)),
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "abs": abs,
    "neg": lambda x: -x,
    "exp": math.exp,
    "softplus": lambda x: math.log1p(math.exp(x)),
}

GLU: Mapping[str, Callable[[float, float], float]] = {
    "reglu": lambda g, u: max(g, 0.0) * u,
    "geglu": lambda g, u: UNARY["gelu"](g) * u,
    "swiglu": lambda g, u: silu(g) * u,
    "geglu_erf": lambda g, u: UNARY["gelu_erf"](g) * u,
    "geglu_quick": lambda g, u: UNARY["gelu_quick"](g) * u,
    "swiglu_oai": lambda g, u: min(g, 3.0) / (1 + math.exp(-1.5 * min(g, 3.0))) * (max(-3.0, min(u, 3.0)) + 1),
    "swiglu_clamp": lambda g, u: silu(min(g, 3.0)) * max(-3.0, min(u, 3.0)),
}


def _on_h(*steps: str, h: list[float] = X, w: float | None = None) -> list[float]:
    """Runs a program without tensors on one pair."""
    weight = None if w is None else [w]
    return [float(y) for y in ffn(program(*steps), {}, [h], [0], [0], weight, 1, "rows")[0]]


@pytest.mark.parametrize("kind", UNARY)
def test_unary(kind: str) -> None:
    assert _on_h(f"unary {kind} h", "%0") == pytest.approx([UNARY[kind](x) for x in X], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", GLU)
def test_glu(kind: str) -> None:
    limits = {"swiglu_oai": " 0x1.8p+0 0x1.8p+1", "swiglu_clamp": " 0x0p+0 0x1.8p+1"}.get(kind, "")
    got = _on_h("scale h -0x1p-1 0x1p+0", f"glu {kind} h %0{limits}", "%1")
    assert got == pytest.approx([GLU[kind](x, 1 - x / 2) for x in X], rel=1e-12, abs=1e-15)


def test_nothing_overflows_at_the_ends() -> None:
    for kind in ("silu", "gelu", "gelu_quick", "gelu_erf", "sigmoid", "softplus"):
        with np.errstate(over="raise"):
            low, high = _on_h(f"unary {kind} h", "%0", h=[-2000.0, 2000.0])
        assert low == 0
        assert high == (1 if kind == "sigmoid" else 2000)


def test_elementwise() -> None:
    assert _on_h("sqr h", "%0") == [x * x for x in X]
    assert _on_h("clamp h -0x1.8p+0 inf", "%0") == [max(x, -1.5) for x in X]
    assert _on_h("add h w", "%0", w=2.0) == [x + 2 for x in X]
    assert _on_h("mul w h", "%0", w=2.0) == [2 * x for x in X]
    assert _on_h("add h h", "mul %0 h", "%1") == [2 * x * x for x in X]
    assert _on_h("cut h 2 3", "%0") == X[2:5]
    assert _on_h("h") == X
    assert _on_h("w", w=3.0) == [3.0]


def test_no_pairs() -> None:
    tensors = {name: np.ones((2, N_IN, N_IN)) for name in ("ffn_up_exps.weight", "ffn_gate_exps.weight")}
    tensors["ffn_down_exps.weight"] = np.ones((2, 9, N_IN))
    total = ffn(SWIGLU, tensors, np.ones((3, N_IN)), [], [], [], 3, "sum")
    assert total.shape == (3, 9)
    assert not total.any()
    assert ffn(SWIGLU, tensors, np.ones((3, N_IN)), [], [], [], 3, "rows").shape == (0, 9)


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_random_layers_of_every_type(type: str) -> None:
    """The raw form of a tensor gives what its dequantised form gives, and has the spread of real weights."""
    n_expert, n_embd, n_ff = 3, 256, 512
    layer = random_layer(type, n_expert, n_embd, n_ff)
    floats = {}
    for name, (kind, ne, data) in layer.items():
        values = dequantise(kind, (*ne, n_expert), data)
        assert values.shape == (n_expert, *reversed(ne))
        assert np.isfinite(values).all()
        assert float(values.std()) == pytest.approx(ne[0] ** -0.5, rel=0.05)
        assert abs(float(values.mean())) < 0.02 * ne[0] ** -0.5
        floats[name] = values
    h = np.random.default_rng(2).standard_normal((2, n_embd))
    pairs = ([0, 0, 1], [7, 9, 8], [0.5, 0.25, 1.0])
    raw = ffn(SWIGLU, layer, h, *pairs, 2, "sum", first=7)
    assert np.array_equal(raw, ffn(SWIGLU, floats, h, *pairs, 2, "sum", first=7))
    assert 0.1 < float(raw.std()) < 1.5


def test_dequantise_f32_f16_bf16_exactly() -> None:
    values = np.array([[1.5, -0.25, 3.0], [0.0, 65504.0, -2.0]], np.float32)
    assert np.array_equal(dequantise("f32", (3, 2), values.tobytes()), values)
    assert np.array_equal(dequantise("f16", (3, 2), values.astype(np.float16).tobytes()), values)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    expected = (halves.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(dequantise("bf16", (3, 2), halves.tobytes()), expected)
    scalar = dequantise("f32", (), np.float32(7).tobytes())
    assert scalar.shape == ()
    assert scalar == 7


@pytest.mark.parametrize(
    ("type", "ne", "size", "reason"),
    [
        ("q9_9", (32,), 18, "does not know"),
        ("q4_0", (33,), 18, "not a q4_0 tensor"),
        ("f32", (4,), 15, "15 bytes"),
        ("q8_K", (256,), 292, "cannot dequantise"),
    ],
)
def test_what_cannot_be_dequantised(type: str, ne: tuple[int, ...], size: int, reason: str) -> None:
    if type == "q8_K":
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]
    with pytest.raises(ValueError, match=reason):
        dequantise(type, ne, bytes(size))


BAD_CALLS: Mapping[str, tuple[dict[str, Any], str]] = {
    "row outside": ({"row": [0, 0, 1, 3, 3, 5]}, "outside the 5 rows"),
    "row negative": ({"row": [-1, 0, 1, 3, 3, 3]}, "outside the 5 rows"),
    "rows descend": ({"row": [1, 0, 1, 3, 3, 3]}, "descend"),
    "expert above": ({"expert": [*EXPERT[:5], FIRST + N_EXPERT]}, "outside 10 to 14"),
    "expert below": ({"expert": [*EXPERT[:5], FIRST - 1]}, "outside 10 to 14"),
    "pair twice": ({"expert": [FIRST] * 6}, "occurs twice"),
    "too few experts": ({"expert": EXPERT[:5]}, "not pairs"),
    "h too short": ({"h": np.ones((4, N_IN))}, "does not fit"),
    "h too narrow": ({"h": np.ones((5, N_IN - 1))}, "line 3"),
    "no weight": ({"weight": None}, "needs gate weights"),
    "weight too short": ({"weight": [1.0]}, "reshape"),
    "reduce": ({"reduce": "mean"}, "'mean'"),
    "program": ({"program_text": SWIGLU.replace("mul %3 w", "mul %3 %4")}, "line 7"),
    "width": ({"program_text": SWIGLU.replace("glu swiglu %1 %0", "glu swiglu %1 h")}, r"line 5 \(glu swiglu"),
    "spread": ({"program_text": SWIGLU.replace("return %4", "%5 = add %4 %2\nreturn %5")}, r"line 8 \(add %4 %2\)"),
    "tensor": ({"program_text": SWIGLU.replace("up_exps.w", "up_exps.v")}, r"not given: ffn_up_exps\.veight"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name: str, tensors: dict[str, NDArray[np.float32]]) -> None:
    arguments: dict[str, Any] = {
        "program_text": SWIGLU,
        "tensors": tensors,
        "h": np.ones((N_ROWS, N_IN)),
        "row": ROW,
        "expert": EXPERT,
        "weight": [1.0] * 6,
        "n_rows": N_ROWS,
        "reduce": "rows",
        "first": FIRST,
    }
    changes, reason = BAD_CALLS[name]
    with pytest.raises(ValueError, match=reason):
        ffn(**(arguments | changes))


def test_weights_that_are_not_used_are_refused() -> None:
    with pytest.raises(ValueError, match="does not use gate weights"):
        _on_h("sqr h", "%0", w=1.0)


def test_parse_reads_what_the_protocol_says() -> None:
    parsed = parse(SWIGLU)
    assert parsed.input == "row"
    assert parsed.uses_weights
    assert parsed.tensors == {"ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight"}
    assert [step.op for step in parsed.steps] == ["matmul", "matmul", "glu", "matmul", "mul"]
    assert parsed.steps[2].operands == ("%1", "%0")
    assert parsed.result == "%4"
    assert parse(program("clamp h -inf inf", "%0")).steps[0].numbers == (-math.inf, math.inf)
    assert not parse(program("sqr h", "%0")).uses_weights
    assert len(parse(program(*["sqr h"] * 64, "%63")).steps) == 64


def test_digest_is_fnv_1a() -> None:
    # The published test vectors of FNV-1a 64.
    assert digest("") == 0xCBF29CE484222325
    assert digest("a") == 0xAF63DC4C8601EC8C
    assert digest("foobar") == 0x85944171F73967E8


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_texts_that_are_no_programs(name: str) -> None:
    with pytest.raises(ProgramError):
        parse(BAD_TEXTS[name])


def test_errors_name_line_and_text() -> None:
    with pytest.raises(ProgramError, match=re.escape("line 4: unknown step 'softmax': '%1 = softmax %0'")):
        parse(program("sqr h", "softmax %0", "%1"))
