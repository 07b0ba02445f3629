"""`ExpertStore.ffn` against the NumPy reference: types, batch sizes, slices and every step of the program language."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kernels
from kernels import activations, reference
from kernels.equivalence import compare
from kernels.tolerances import problem, tolerance
from rigs.layers import Floats, Layer, Pairs, float_tensors, hidden
from rigs.oracle import nmse
from rigs.program_texts import SWIGLU, program
from rigs.random_models import LAYER_TYPES, random_layer

N_ROWS = (1, 2, 7, 8, 9, 33, 512)


def cosines(a: NDArray[np.floating], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """The cosine of each row of a and the same row of b."""
    x = a.astype(np.float64)
    return np.asarray((x * b).sum(1) / np.sqrt((x * x).sum(1) * (b * b).sum(1)))


def in_pair_order(rows: Floats, pairs: Pairs) -> Floats:
    """The sum over each row's pairs in float32, in the order given."""
    total = np.zeros((pairs.n_rows, rows.shape[1]), np.float32)
    first = np.ones(pairs.n_rows, bool)
    for value, row in zip(rows, pairs.row.tolist(), strict=True):
        total[row] = value if first[row] else total[row] + value
        first[row] = False
    return total


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_every_type_against_the_reference(type: str, tmp_path: Path) -> None:
    """Issue 2, line 6: 14 types, a slice that does not begin at expert 0, both reductions."""
    n_embd, n_ff, n_expert, first, last = 256, 512, 12, 3, 9
    layer = Layer(SWIGLU, random_layer(type, n_expert, n_embd, n_ff), n_expert, tmp_path / "layer")
    store = layer.held((first, last))
    allowed = tolerance("cpu", "reference", [type])
    for n_rows in N_ROWS:
        h = hidden(n_rows, n_embd)
        pairs = Pairs.random(n_rows, range(first, last + 1), 4)
        rows = layer.call(store, h, pairs, "rows")
        expected = layer.expected(h, pairs, "rows")
        each = compare(rows, expected, pairs.expert).experts()
        assert {e: problem(one, allowed, n_embd) for e, one in each.items()} == dict.fromkeys(each, "")
        total = layer.call(store, h, pairs, "sum")
        assert np.array_equal(total.view(np.uint32), in_pair_order(rows, pairs).view(np.uint32))
        assert cosines(total, layer.expected(h, pairs, "sum")).min() >= (0.99999 if type == "f32" else 0.999)


# Six experts per token of a layer of eight of which this node has 2, 3 and 4: none of them, one, all, in other orders.
ROUTED = ([0, 1, 5, 6], [0, 3, 5, 7], [4, 2, 3, 0], [7, 6, 4, 2], [1, 0, 6, 5], [3, 2, 4, 1], [5, 2, 7, 6])


@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_K"])
@pytest.mark.parametrize("n_tokens", [1, 2, 8, 9, 16, 32, 33])
def test_a_node_computes_its_own_pairs_of_each_row(type: str, n_tokens: int, tmp_path: Path) -> None:
    """A node with experts 2 to 4 of 8 gets its pairs of every token, of which some have none."""
    layer = Layer(SWIGLU, random_layer(type, 8, 256, 256), 8, tmp_path / "layer")
    store = layer.held((2, 4))
    for shift in range(len(ROUTED)):
        routed = [[e for e in ROUTED[(shift + token) % len(ROUTED)] if 2 <= e <= 4] for token in range(n_tokens)]
        pairs = Pairs.of(routed, seed=shift)
        h = hidden(n_tokens, 256, seed=shift)
        total = layer.call(store, h, pairs, "sum")
        used = np.array([len(experts) > 0 for experts in routed])
        assert not total[~used].any()
        rows = layer.call(store, h, pairs, "rows")
        assert rows.shape == (len(pairs.row), 256)
        if used.any():
            assert cosines(rows, layer.expected(h, pairs, "rows")).min() >= 0.999
            assert cosines(total[used], layer.expected(h, pairs, "sum")[used]).min() >= 0.999


def test_no_pairs_at_all(tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 256), 8, tmp_path / "layer")
    store = layer.held((2, 4))
    for n_rows in (0, 1, 33):
        pairs = Pairs.of([[]] * n_rows)
        total = layer.call(store, hidden(n_rows, 256), pairs, "sum")
        assert total.shape == (n_rows, 256)
        assert not total.any()
        assert layer.call(store, hidden(n_rows, 256), pairs, "rows").shape == (0, 256)


BAD_IDS = {
    "twice in a row": ([[3, 3]], kernels.BadCall, "layer 0: expert 3 is asked for twice for row 0"),
    "twice, not adjacent": ([[2], [3, 4, 3]], kernels.BadCall, "expert 3 is asked for twice for row 1"),
    "placeholder": ([[-1, 2, 3]], kernels.BadCall, "expert -1 of a layer of 8"),
    "one beyond": ([[2, 8, 3]], kernels.BadCall, "expert 8 of a layer of 8"),
    "far beyond": ([[2**31 - 1]], kernels.BadCall, "expert 2147483647 of a layer of 8"),
    "least": ([[-(2**31)]], kernels.BadCall, "expert -2147483648 of a layer of 8"),
    "the node before": ([[2, 1]], kernels.NotHeld, "layer 0: expert 1 is not held here"),
    "the node after": ([[4], [5]], kernels.NotHeld, "layer 0: expert 5 is not held here"),
}


@pytest.mark.parametrize("name", BAD_IDS)
@pytest.mark.parametrize("reduce", ["rows", "sum"])
def test_bad_ids_are_refused_and_nothing_else_happens(name: str, reduce: str, tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 256), 8, tmp_path / "layer")
    store = layer.held((2, 4))
    experts, error, message = BAD_IDS[name]
    with pytest.raises(error, match=message):
        layer.call(store, hidden(len(experts), 256), Pairs.of(experts), reduce)
    good = Pairs.of([[2, 3, 4]])
    assert (
        cosines(layer.call(store, hidden(1, 256), good, "rows"), layer.expected(hidden(1, 256), good, "rows")).min()
        > 0.999
    )


def test_bad_shapes_and_values_are_refused(tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("f32", 4, 64, 32), 4, tmp_path / "layer")
    store = layer.held()
    digest = kernels.Program(SWIGLU).digest
    h, row, expert = hidden(2, 64), np.array([0, 1, 1], np.int32), np.array([3, 0, 2], np.int32)
    weight = np.ones(3, np.float32)

    def nan_at(values: Floats, index: int, value: float = np.nan) -> Floats:
        changed = values.copy()
        changed.flat[index] = value
        return changed

    def refused(
        error: type[Exception],
        message: str,
        *,
        digest: int = digest,
        layer: int = 0,
        h: Floats = h,
        n_rows: int = 2,
        row: NDArray[np.int32] = row,
        expert: NDArray[np.int32] = expert,
        weight: Floats | None = weight,
        reduce: str = "rows",
    ) -> None:
        with pytest.raises(error, match=message):
            store.ffn(digest, layer, h, row, expert, weight, n_rows, reduce)

    refused(kernels.ProgramMismatch, "layer 0: .* not the one loaded", digest=digest + 1)
    refused(kernels.NotHeld, "no experts of layer 7", layer=7)
    refused(kernels.BadCall, "rows of 63 values; the layer takes 64", h=hidden(2, 63))
    refused(kernels.BadCall, "1 input rows for 2 rows and 3 pairs", h=hidden(1, 64))
    refused(kernels.BadCall, "input rows for 3 rows", n_rows=3)
    refused(kernels.BadCall, "-1 rows asked for", n_rows=-1, reduce="sum")
    refused(kernels.BadCall, "rows asked for", n_rows=2**40, reduce="sum")
    refused(kernels.BadCall, "needs gate weights", weight=None)
    refused(kernels.BadCall, "all of one length", weight=np.ones(2, np.float32))
    refused(kernels.BadCall, "all of one length", row=row[:2])
    refused(kernels.BadCall, "all of one length", h=h[0])
    refused(kernels.BadCall, "row index 2 of pair 2", row=np.array([0, 1, 2], np.int32))
    refused(kernels.BadCall, "row index -1 of pair 0", row=np.array([-1, 1, 1], np.int32))
    refused(kernels.BadCall, "row index 0 of pair 2 is out of range or descends", row=np.array([0, 1, 0], np.int32))
    refused(kernels.BadCall, "reduce must be", reduce="mean")
    for bad in (np.nan, np.inf, -np.inf):
        refused(kernels.BadCall, "not finite", h=nan_at(h, 70, bad))
        refused(kernels.BadCall, "not finite", weight=nan_at(weight, 1, bad))
    refused(kernels.ComputeError, "layer 0: experts 0 to 3 gave a value that is not finite", h=h * np.float32(1e38))
    # Copies in another type or layout are the caller's to make.
    refused(TypeError, "incompatible", h=h.astype(np.float64))  # type: ignore[arg-type]
    refused(TypeError, "incompatible", row=row.astype(np.int64))  # type: ignore[arg-type]
    refused(TypeError, "incompatible", h=np.asfortranarray(h))
    pairs = Pairs(row, expert, weight, 2)
    assert nmse(layer.call(store, h, pairs, "rows"), layer.expected(h, pairs, "rows")) < 1e-11


SLICES = ((0, 2), (3, 6), (7, 7))


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_any_slicing_gives_the_same_bits(type: str, tmp_path: Path) -> None:
    """Eight experts as one slice, as three slices of one store, and as three stores."""
    layer = Layer(SWIGLU, random_layer(type, 8, 256, 256), 8, tmp_path / "layer")
    whole, together = layer.held(), layer.held(*reversed(SLICES))
    alone = [layer.held(part) for part in SLICES]
    for n_rows in (1, 5, 33):
        h = hidden(n_rows, 256)
        pairs = Pairs.random(n_rows, range(8), 4)
        rows = layer.call(whole, h, pairs, "rows")
        assert layer.call(together, h, pairs, "rows").tobytes() == rows.tobytes()
        assert layer.call(together, h, pairs, "sum").tobytes() == layer.call(whole, h, pairs, "sum").tobytes()
        merged = np.full_like(rows, np.nan)
        partial = np.zeros((n_rows, 256), np.float32)
        for store, (first, last) in zip(alone, SLICES, strict=True):
            own = (pairs.expert >= first) & (pairs.expert <= last)
            merged[own] = layer.call(store, h, pairs.where(own), "rows")
            partial += layer.call(store, h, pairs.where(own), "sum")
        assert merged.tobytes() == rows.tobytes()
        assert nmse(partial, layer.call(whole, h, pairs, "sum")) < 1e-12


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_a_call_in_parts_gives_the_same_bits(type: str, tmp_path: Path) -> None:
    """A large call is cut by experts, so that others get the device in between."""
    n_embd, n_ff = 256, 512
    layer = Layer(SWIGLU, random_layer(type, 8, n_embd, n_ff), 8, tmp_path / "layer")
    whole, cut, of_slices = layer.held(), layer.held(), layer.held(*SLICES)
    per_pair = 3 * n_embd * n_ff
    whole.set_part_products_max(2**62)
    for n_rows in (1, 5, 9, 33, 512):
        h = hidden(n_rows, n_embd)
        # Experts with very different numbers of rows: some with less and some with more than a part's worth.
        pairs = Pairs.random(n_rows, range(8), 3)
        pairs = pairs.where((pairs.expert != 2) | (pairs.row % 16 == 0))
        for reduce in ("rows", "sum"):
            expected = layer.call(whole, h, pairs, reduce)
            # The whole call in one, and in parts of one expert and of several.
            for n_pairs in (0, 1, 40, 200):
                for store in (cut, of_slices):
                    store.set_part_products_max(n_pairs * per_pair)
                    assert layer.call(store, h, pairs, reduce).tobytes() == expected.tobytes()


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_a_kept_graph_gives_the_bits_of_a_new_one(type: str, tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer(type, 4, 256, 256), 4, tmp_path / "layer")
    store = layer.held()
    for n_rows in (1, 7, 8, 33, 64):
        h = hidden(n_rows, 256)
        one = Pairs.of([[2]] * n_rows)
        kept = layer.call(store, h, one, "rows")
        n_kept = store.kept_graphs()
        assert layer.call(store, h, one, "rows").tobytes() == kept.tobytes()
        assert store.kept_graphs() == n_kept
        # The same pairs, of the same expert, in a call that is too large to be kept.
        filled = hidden(n_rows + 64, 256)
        filled[:n_rows] = h
        larger = Pairs.of([[2]] * n_rows + [[3]] * 64)
        larger.weight[:n_rows] = one.weight  # type: ignore[index]
        assert layer.call(store, filled, larger, "rows")[:n_rows].tobytes() == kept.tobytes()
        assert store.kept_graphs() == n_kept


@pytest.mark.parametrize("type", LAYER_TYPES)
def test_any_number_of_threads_gives_the_same_bits(type: str, tmp_path: Path) -> None:
    """How many of its threads a store uses depends on the work of a call: here one, two, three and all four."""
    layer = Layer(SWIGLU, random_layer(type, 4, 256, 512), 4, tmp_path / "layer")
    one, four = layer.held(threads=1), layer.held(threads=4)
    for n_rows in (1, 4, 8, 11, 16, 20, 40):
        h = hidden(n_rows, 256)
        pairs = Pairs.random(n_rows, range(4), 2)
        assert layer.call(four, h, pairs, "rows").tobytes() == layer.call(one, h, pairs, "rows").tobytes()


@pytest.mark.parametrize("part", SLICES)
def test_each_slice_computes_its_experts_and_no_others(part: tuple[int, int], tmp_path: Path) -> None:
    """Routing forced to one slice, in particular to those that do not begin at expert 0."""
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 256), 8, tmp_path / "layer")
    store = layer.held(part)
    first, last = part
    for expert in range(8):
        pairs, h = Pairs.of([[expert]] * 3), hidden(3, 256)
        if first <= expert <= last:
            assert cosines(layer.call(store, h, pairs, "rows"), layer.expected(h, pairs, "rows")).min() > 0.999
        else:
            with pytest.raises(kernels.NotHeld, match=f"layer 0: expert {expert} is not held here"):
                layer.call(store, h, pairs, "rows")


def test_a_dropped_slice_is_missed_and_not_made_up_for(tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 256), 8, tmp_path / "layer")
    store = layer.held(*SLICES)
    pairs, h = Pairs.of([[1, 4], [5, 7]]), hidden(2, 256)
    before = layer.call(store, h, pairs, "rows")
    assert [(s.first, s.last) for s in store.slices()] == list(SLICES)
    store.drop(0, 7, 7)
    with pytest.raises(kernels.NotHeld, match="layer 0: expert 7 is not held here"):
        layer.call(store, h, pairs, "sum")
    assert [(s.first, s.last) for s in store.slices()] == list(SLICES[:2])
    for first, last in ((7, 7), (3, 5), (0, 6)):
        with pytest.raises(kernels.NotHeld, match=f"layer 0, experts {first} to {last} are not held here"):
            store.drop(0, first, last)
    layer.load(store, 7, 7)
    assert layer.call(store, h, pairs, "rows").tobytes() == before.tobytes()


def test_layers_of_one_store_are_independent(tmp_path: Path) -> None:
    layers = [Layer(SWIGLU, random_layer("q8_0", 4, 64, 32 * (n + 1), seed=n), 4, tmp_path / str(n)) for n in range(3)]
    store = kernels.ExpertStore("CPU", 1)
    for number, layer in enumerate(layers):
        info = layer.load(store, 1, 3, layer=10 * number)
        assert (info.layer, info.first, info.last, info.n_in, info.n_out) == (10 * number, 1, 3, 64, 64)
        assert info.bytes >= sum(len(data) * 3 // 4 for _, _, data in layer.tensors.values())
    pairs, h = Pairs.random(5, (1, 2, 3), 2), hidden(5, 64)
    for number, layer in enumerate(layers):
        digest = kernels.Program(SWIGLU).digest
        got = store.ffn(digest, 10 * number, h, pairs.row, pairs.expert, pairs.weight, 5, "rows")
        assert got.tobytes() == layer.call(layer.held((1, 3)), h, pairs, "rows").tobytes()


# --- the program decides ---

N_IN, N_FF, N_EXPERT = 64, 96, 6

SHAPES = {
    "up": (N_FF, N_IN),
    "gate": (N_FF, N_IN),
    "down": (N_IN, N_FF),
    "gate_up": (2 * N_FF, N_IN),
    "square": (N_IN, N_IN),
    "up.bias": (N_FF,),
    "gate.bias": (N_FF,),
    "down.bias": (N_IN,),
    "gate_up.bias": (2 * N_FF,),
    "scale": (),
}

ALPHA, LIMIT = "0x1.b3b646p+0", "0x1.cp+2"  # 1.702, 7

PROGRAMS = {
    "gpt-oss": program(
        "matmul up h",
        "bias up.bias %0",
        "matmul gate h",
        "bias gate.bias %2",
        f"glu swiglu_oai %3 %1 {ALPHA} {LIMIT}",
        "matmul down %4",
        "bias down.bias %5",
        "mul %6 w",
        "%7",
    ),
    "merged gate and up": program(
        "matmul gate_up h",
        "bias gate_up.bias %0",
        f"cut %1 0 {N_FF}",
        f"cut %1 {N_FF} {N_FF}",
        "glu swiglu %2 %3",
        "matmul down %4",
        "mul %5 w",
        "%6",
    ),
    "GELU": program("matmul up h", "matmul gate h", "glu geglu %1 %0", "matmul down %2", "mul %3 w", "%4"),
    "no gate, squared ReLU": program("matmul up h", "unary relu %0", "sqr %1", "matmul down %2", "mul %3 w", "%4"),
    "weight before the FFN": program(
        "matmul up h", "matmul gate h", "glu swiglu %1 %0", "matmul down %2", "%3", input="pair"
    ),
    "weight within the FFN": program("matmul up h", "mul %0 w", "unary silu %1", "matmul down %2", "%3"),
    "scales": program(
        "matmul up h",
        "gather scale",
        "mul %0 %1",
        "unary silu %2",
        "matmul down %3",
        "mul %4 %1",
        "add %5 w",
        "%6",
    ),
    "swiglu_clamp": program(
        "matmul up h", "matmul gate h", "glu swiglu_clamp %1 %0 0x0p+0 0x1p-1", "matmul down %2", "mul %3 w", "%4"
    ),
    "clamp": program("matmul up h", "clamp %0 -0x1p-1 0x1.8p-1", "add %0 %1", "matmul down %2", "%3"),
    "clamp from below": program("matmul up h", "clamp %0 0x0p+0 inf", "matmul down %1", "%2"),
    "scale": program("matmul up h", "scale %0 -0x1.8p+1 0x1p-2", "matmul down %1", "%2"),
    "h again": program("matmul square h", "add %0 h", "mul %1 h", "%2"),
    "bias of the input": program("matmul square h", "bias down.bias h", "add %0 %1", "%2"),
    "a result not used": program("matmul up h", "mul %0 w", "matmul square h", "%2"),
    "only scales": program("matmul up h", "gather scale", "%1"),
    "precision": program("matmul up h prec=10,0", "unary silu %0", "matmul down %1 prec=10,0", "mul %2 w", "%3"),
    "64 steps": program("matmul square h", *[f"add %{n} %0" for n in range(63)], "%63"),
    "many gathers": program(
        "matmul square h", *["gather scale"] * 31, "mul %0 %1", *[f"add %{32 + n} %{n + 2}" for n in range(30)], "%62"
    ),
    # A cut of several pairs has gaps between its rows: every step must cope.
    "return of a cut": program("matmul gate_up h", "cut %0 5 40", "%1"),
    "cut of a cut": program("matmul gate_up h", "cut %0 5 100", "cut %1 3 64", "matmul square %2", "%3"),
    "bias of a cut": program("matmul gate_up h", f"cut %0 {N_FF} {N_FF}", "bias up.bias %1", "%2"),
    "sqr of a cut": program("matmul gate_up h", f"cut %0 {N_FF} {N_FF}", "sqr %1", "%2"),
    "scale of a cut": program("matmul gate_up h", f"cut %0 {N_FF} {N_FF}", "scale %1 0x1p+1 0x1p+0", "%2"),
    "clamp of a cut": program("matmul gate_up h", f"cut %0 {N_FF} {N_FF}", "clamp %1 -0x1p-1 0x1p-1", "%2"),
    "mul and add of cuts": program(
        "matmul gate_up h", "cut %0 7 64", "cut %0 100 64", "mul %1 %2", "add %3 %1", "add %4 h", "%5"
    ),
    "one value of a row": program("matmul square h", "cut %0 3 1", "mul %0 %1", "%2"),
}

# ggml's CPU code looks these up in a table of float16.
COARSE = ("geglu", "geglu_quick", "gelu", "gelu_quick")


def check_program(text: str, folder: Path, bound: float) -> None:
    needed = reference.parse(text).tensors
    tensors = float_tensors({name: shape for name, shape in SHAPES.items() if name in needed}, N_EXPERT)
    layer = Layer(text, tensors, N_EXPERT, folder / "layer")
    store = layer.held((0, 1), (2, 5))
    parsed = kernels.Program(text)
    for n_rows in (1, 2, 9, 33):
        pairs = Pairs.random(n_rows, range(N_EXPERT), 3, weight=parsed.uses_weight)
        # Wide enough that every limit is met.
        h = hidden(len(pairs.row) if parsed.input == "pair" else n_rows, N_IN) * np.float32(4)
        for reduce in ("rows", "sum"):
            got, expected = layer.call(store, h, pairs, reduce), layer.expected(h, pairs, reduce)
            assert got.shape == expected.shape
            assert nmse(got, expected) < bound


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    check_program(PROGRAMS[name], tmp_path, 1e-6 if name == "GELU" else 1e-11)


@pytest.mark.parametrize("of_cut", [False, True])
@pytest.mark.parametrize("kind", activations.UNARY)
def test_every_unary_step(kind: str, of_cut: bool, tmp_path: Path) -> None:
    steps = ("matmul gate_up h", f"cut %0 {N_FF} {N_FF}") if of_cut else ("matmul up h", "scale %0 0x1p-1 0x0p+0")
    check_program(program(*steps, f"unary {kind} %1", "%2"), tmp_path, 1e-6 if kind in COARSE else 1e-11)


@pytest.mark.parametrize("of_cut", [False, True])
@pytest.mark.parametrize("kind", (*activations.GLU, *activations.LIMITED_GLU))
def test_every_glu_step(kind: str, of_cut: bool, tmp_path: Path) -> None:
    limits = {"swiglu_oai": f" {ALPHA} {LIMIT}", "swiglu_clamp": f" 0x0p+0 {LIMIT}"}.get(kind, "")
    if of_cut:
        steps = ("matmul gate_up h", f"cut %0 0 {N_FF}", f"cut %0 {N_FF} {N_FF}", f"glu {kind} %1 %2{limits}", "%3")
    else:
        steps = ("matmul up h", "matmul gate h", f"glu {kind} %1 %0{limits}", "%2")
    check_program(program(*steps), tmp_path, 1e-6 if kind in COARSE else 1e-11)
