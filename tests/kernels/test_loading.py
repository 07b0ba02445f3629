"""Loading and dropping slices: what is refused and how it is said, memory, threads and the GIL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kernels
from rigs.layers import Layer, Pairs, float_tensors, hidden
from rigs.program_texts import SWIGLU, program
from rigs.random_models import random_layer

UP, GATE, DOWN = "ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight"

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Attempt:
    """The arguments of one load, to be spoilt."""

    layer: Layer
    parts: dict[str, tuple[str, list[int], list[tuple[str, int, int]]]]
    text: str = SWIGLU
    number: int = 5
    first: int = 2
    last: int = 4
    n_expert: int = 8

    def load(self, store: kernels.ExpertStore) -> kernels.SliceInfo:
        tensors = {name: kernels.TensorParts(*arguments) for name, arguments in self.parts.items()}
        return store.load(self.number, kernels.Program(self.text), self.first, self.last, self.n_expert, tensors)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 128), 8, tmp_path / "layer.bin")
    parts = {}
    for name, (type, ne, data) in layer.tensors.items():
        one = len(data) // 8
        # Two parts, as of a split file.
        places = [(str(layer.path), layer.offsets[name] + e * one, one * n) for e, n in ((2, 1), (3, 2))]
        parts[name] = (type, list(ne), places)
    return Attempt(layer, parts)


def spoil_part(attempt: Attempt, name: str, index: int, **changes: int | str) -> None:
    places = attempt.parts[name][2]
    place = dict(zip(("path", "offset", "bytes"), places[index], strict=True)) | changes
    places[index] = (place["path"], place["offset"], place["bytes"])


def truncate(attempt: Attempt) -> None:
    end = attempt.layer.path.stat().st_size
    one = len(attempt.layer.tensors[DOWN][2]) // 8
    os.truncate(attempt.layer.path, end - 3 * one - 100)


def retype(type: str, ne: list[int] | None = None) -> Callable[[Attempt], None]:
    def spoil(attempt: Attempt) -> None:
        _, old, places = attempt.parts[GATE]
        attempt.parts[GATE] = (type, old if ne is None else ne, places)

    return spoil


def give(field: str, value: object) -> Callable[[Attempt], None]:
    return lambda attempt: setattr(attempt, field, value)


NEEDED = 3 * 128 * 256 // 32 * 34

FAILURES: dict[str, tuple[Callable[[Attempt], None], str]] = {
    "a byte too few": (
        lambda a: spoil_part(a, UP, 1, bytes=NEEDED * 2 // 3 - 1),
        f"tensor '{UP}' needs {NEEDED} bytes, given are {NEEDED - 1}",
    ),
    "bytes that wrap": (
        lambda a: spoil_part(a, UP, 1, bytes=2**64 - 1),
        f"tensor '{UP}' needs {NEEDED} bytes, given are {2**64 - 1}",
    ),
    "no bytes": (lambda a: a.parts[UP][2].clear(), f"tensor '{UP}' needs {NEEDED} bytes, given are 0"),
    "no file": (
        lambda a: spoil_part(a, DOWN, 0, path="/nowhere/model.gguf"),
        f"tensor '{DOWN}': cannot open '/nowhere/model.gguf': No such file or directory",
    ),
    "a folder": (lambda a: spoil_part(a, DOWN, 0, path="/"), f"tensor '{DOWN}': cannot read '/' at byte"),
    "a short file": (truncate, f"tensor '{DOWN}': '{{path}}' ends at byte "),
    "an offset beyond the file": (
        lambda a: spoil_part(a, GATE, 0, offset=1 << 40),
        f"tensor '{GATE}': '{{path}}' ends at byte {1 << 40}",
    ),
    "an impossible offset": (
        lambda a: spoil_part(a, GATE, 0, offset=2**64 - 4096),
        f"tensor '{GATE}': cannot read '{{path}}' at byte {2**64 - 4096}: Invalid argument",
    ),
    "an unknown type": (retype("q9_9"), f"tensor '{GATE}' is of type 'q9_9'"),
    "a type in capitals": (retype("Q8_0"), f"tensor '{GATE}' is of type 'Q8_0'"),
    "integers": (retype("i32"), f"tensor '{GATE}' is of type 'i32'"),
    "doubles": (retype("f64"), f"tensor '{GATE}' is of type 'f64'"),
    "a type of activations": (retype("q8_K"), f"tensor '{GATE}' is of type 'q8_K'"),
    "another of activations": (retype("q8_1"), f"tensor '{GATE}' is of type 'q8_1'"),
    "another input width": (
        retype("q8_0", [128, 128]),
        f"layer program, step %1: tensor '{GATE}' takes rows of 128 values, not 256",
    ),
    "another width in between": (
        retype("q8_0", [256, 96]),
        "layer program, step %2: combines rows of different widths or inputs",
    ),
    "three dimensions": (retype("q8_0", [256, 128, 2]), f"tensor '{GATE}' has impossible dimensions"),
    "one dimension": (retype("q8_0", [256]), f"step %1: tensor '{GATE}' has 1 dimensions per expert, not 2"),
    "no rows": (retype("q8_0", [256, 0]), f"tensor '{GATE}' has impossible dimensions"),
    "negative": (retype("q8_0", [256, -128]), f"tensor '{GATE}' has impossible dimensions"),
    "too long": (retype("q8_0", [(1 << 24) + 1, 1]), f"tensor '{GATE}' has impossible dimensions"),
    "too many in all": (retype("q8_0", [1 << 24, 1 << 24]), f"tensor '{GATE}' has impossible dimensions"),
    "rows that are not whole blocks": (
        retype("iq4_xs", [256, 128]),
        f"tensor '{GATE}' needs {3 * 128 * 136} bytes, given are {NEEDED}",
    ),
    "a tensor is missing": (lambda a: a.parts.pop(DOWN), f"tensor '{DOWN}' of the layer's program is not given"),
    "more experts than the layer has": (give("n_expert", 4), "not a range of a layer of 4 experts"),
    "no range": (give("last", 1), "not a range of a layer of 8 experts"),
    "a negative expert": (give("first", -1), "not a range of a layer of 8 experts"),
    "a negative layer": (give("number", -1), "not a range of a layer of 8 experts"),
    "too many experts": (give("n_expert", 1 << 20), f"not a range of a layer of {1 << 20} experts"),
    "the input's width is not known": (
        give("text", program("sqr h", f"matmul {UP} h", "%1")),
        "layer program, step %0: changes an input",
    ),
    "a cut beyond the row": (
        give("text", program(f"matmul {UP} h", "cut %0 100 29", "%1")),
        "layer program, step %1: cuts beyond a row of 128 values",
    ),
    "a weight as bias": (
        give("text", program(f"matmul {UP} h", f"bias {GATE} %0", "%1")),
        f"layer program, step %1: tensor '{GATE}' has 2 dimensions per expert, not 1",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_load_that_fails_says_why(name: str, attempt: Attempt) -> None:
    spoil, message = FAILURES[name]
    good = Attempt(
        attempt.layer, {key: (type, list(ne), list(places)) for key, (type, ne, places) in attempt.parts.items()}
    )
    content = attempt.layer.path.read_bytes()
    spoil(attempt)
    store = kernels.ExpertStore("CPU", 1)
    with pytest.raises(kernels.LoadError) as caught:
        attempt.load(store)
    text = str(caught.value)
    assert text.startswith(f"layer {attempt.number}, experts {attempt.first} to {attempt.last}: ")
    assert message.format(path=attempt.layer.path) in text
    assert store.slices() == []
    attempt.layer.path.write_bytes(content)
    assert good.load(store).bytes >= 3 * NEEDED


def test_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    tensors = float_tensors({"w": (128, 160)}, 2)
    layer = Layer(program("matmul w h", "%0"), tensors, 2, tmp_path / "layer")
    parts = {"w": kernels.TensorParts("q4_K", [160, 128], [(str(layer.path), 0, 2 * 128 * 144)])}
    with pytest.raises(
        kernels.LoadError, match="layer 3, experts 0 to 1: tensor 'w' has rows of 160 values, not whole blocks"
    ):
        kernels.ExpertStore("CPU", 1).load(3, kernels.Program(layer.program), 0, 1, 2, parts)


def test_biases_and_scales_are_f32(tmp_path: Path) -> None:
    layer = Layer(
        program("matmul w h", "bias b %0", "%1"), float_tensors({"w": (8, 8), "b": (8,)}, 2), 2, tmp_path / "l"
    )
    parts = layer.parts(0, 1) | {"b": kernels.TensorParts("f16", [8], [(str(layer.path), 0, 32)])}
    with pytest.raises(kernels.LoadError, match="tensor 'b' is f16; biases and scales must be f32"):
        kernels.ExpertStore("CPU", 1).load(0, kernels.Program(layer.program), 0, 1, 2, parts)


def test_a_program_without_h_is_refused(tmp_path: Path) -> None:
    layer = Layer(program("gather s", "%0"), float_tensors({"s": ()}, 2), 2, tmp_path / "l")
    with pytest.raises(kernels.LoadError, match="layer 0, experts 0 to 1: layer program does not use h"):
        layer.load(kernels.ExpertStore("CPU", 1), 0, 1)


# What the language allows but no model does: refused at load, by name, rather than computed wrongly.
INPUTS_CHANGED = ("unary silu h", "sqr w", "scale h 0x1p+1 0x0p+0", "clamp h 0x0p+0 inf", "mul w %0", "add h %0",
                  "glu swiglu h %0", "glu swiglu %0 w", "cut h 0 4", "mul %0 %1")  # fmt: skip


@pytest.mark.parametrize("step", INPUTS_CHANGED)
def test_steps_that_no_model_has(step: str, tmp_path: Path) -> None:
    text = program("matmul w h", "cut %0 0 4", step, "%2")
    layer = Layer(text, float_tensors({"w": (8, 8)}, 2), 2, tmp_path / "l")
    with pytest.raises(kernels.LoadError, match="layer 0, experts 0 to 1: layer program, step %2: "):
        layer.load(kernels.ExpertStore("CPU", 1), 0, 1)


@pytest.mark.parametrize(("first", "last"), [(3, 4), (1, 3), (4, 6), (0, 7), (3, 3), (4, 4)])
def test_overlapping_slices_are_refused(first: int, last: int, tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 128), 8, tmp_path / "layer")
    store = layer.held((3, 4))
    with pytest.raises(
        kernels.LoadError, match=f"layer 0, experts {first} to {last}: overlaps experts 3 to 4, which are held"
    ):
        layer.load(store, first, last)
    layer.load(store, first, last, layer=1)
    layer.load(store, 5, 7)
    layer.load(store, 0, 2)
    assert [(s.layer, s.first, s.last) for s in store.slices()] == [(0, 0, 2), (0, 3, 4), (0, 5, 7), (1, first, last)]


def test_slices_of_a_layer_have_one_program_and_size(tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 128), 8, tmp_path / "layer")
    store = layer.held((0, 3))
    message = "layer 0, experts 4 to 7: differs in its program or number of experts from what is held"
    other = kernels.Program(SWIGLU.replace("swiglu", "geglu"))
    with pytest.raises(kernels.LoadError, match=message):
        store.load(0, other, 4, 7, 8, layer.parts(4, 7))
    with pytest.raises(kernels.LoadError, match=message):
        store.load(0, kernels.Program(SWIGLU), 4, 7, 9, layer.parts(4, 7))


def test_overlapping_loads_at_the_same_time(tmp_path: Path) -> None:
    """One wins of several loads of the same slice that run together."""
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 512, 512), 8, tmp_path / "layer")
    for _ in range(5):
        store = kernels.ExpertStore("CPU", 1)
        barrier, outcomes = threading.Barrier(3), []

        def load(
            store: kernels.ExpertStore = store, barrier: threading.Barrier = barrier, outcomes: list = outcomes
        ) -> None:
            barrier.wait()
            try:
                layer.load(store, 1, 6)
                outcomes.append("held")
            except kernels.LoadError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.slices()) == 1
        assert sorted(outcomes)[0] == "held"
        assert all("overlaps experts 1 to 6" in text for text in sorted(outcomes)[1:])
        assert len(outcomes) == 3


def test_failing_loads_leak_nothing(attempt: Attempt, tmp_path: Path) -> None:
    """200 loads of 12 MiB that fail at their last tensor, when all memory is taken and two tensors are read."""
    layer = Layer(SWIGLU, random_layer("f16", 4, 512, 1024), 4, tmp_path / "big")
    store = kernels.ExpertStore("CPU", 1)
    parts = layer.parts(0, 3)
    good = dict(parts)
    # In order of names up is the last to be read.
    path, offset, size = str(layer.path), layer.offsets[UP], len(layer.tensors[UP][2])
    parts[UP] = kernels.TensorParts("f16", [512, 1024], [(path, offset, size // 2), (path, 1 << 40, size // 2)])
    parsed = kernels.Program(SWIGLU)

    def fail() -> None:
        with pytest.raises(kernels.LoadError, match="ends at byte"):
            store.load(0, parsed, 0, 3, 4, parts)

    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        fail()
    before = resident_bytes()
    for _ in range(200):
        fail()
    # The allocator keeps freed blocks of up to 32 MiB; what the loads took, if it stayed, would be 2,400 MiB.
    assert resident_bytes() - before < 64 * MIB
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    store.load(0, parsed, 0, 3, 4, good)
    pairs, h = Pairs.of([[0, 3]]), hidden(1, 512)
    expected = layer.expected(h, pairs, "rows")
    assert np.allclose(layer.call(store, h, pairs, "rows"), expected, atol=5e-3 * float(np.abs(expected).max()))


def test_dropping_frees_the_memory(tmp_path: Path) -> None:
    one = 64 * MIB
    path = tmp_path / "zeros"
    path.touch()
    os.truncate(path, one)
    parsed = kernels.Program(program("matmul w h", "%0"))
    parts = {"w": kernels.TensorParts("f32", [1024, one // 4 // 1024 // 2], [(str(path), 0, one)])}
    store = kernels.ExpertStore("CPU", 1)
    before = resident_bytes()
    for layer in range(3):
        assert one <= store.load(layer, parsed, 0, 1, 2, parts).bytes <= one + MIB
    assert resident_bytes() - before > 3 * one - 8 * MIB
    for layer in range(3):
        store.drop(layer, 0, 1)
        assert resident_bytes() - before < (2 - layer) * one + 8 * MIB


FIFO_SCRIPT = """
import os, sys, threading
import kernels

# Opening a pipe waits for a writer: had load() the GIL, the other end would never be opened.
program = kernels.Program("swarm-program 1\\ninput row\\n%0 = matmul w h\\nreturn %0\\n")
store = kernels.ExpertStore("CPU", 1)
failures = []

def load():
    try:
        store.load(0, program, 0, 0, 1, {"w": kernels.TensorParts("f32", [8, 8], [(sys.argv[1], 0, 256)])})
    except kernels.LoadError as error:
        failures.append(str(error))

thread = threading.Thread(target=load)
thread.start()
os.close(os.open(sys.argv[1], os.O_WRONLY))
thread.join()
assert len(failures) == 1 and "cannot read" in failures[0], failures
print("both ends were opened")
"""


def test_load_releases_the_gil(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = subprocess.run(
        [sys.executable, "-c", FIFO_SCRIPT, fifo], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "both ends were opened\n", done.stderr


def test_ffn_releases_the_gil(tmp_path: Path) -> None:
    layer = Layer(SWIGLU, random_layer("q8_0", 4, 1024, 1024), 4, tmp_path / "layer")
    store = layer.held(threads=1)
    pairs, h = Pairs.random(512, range(4), 3), hidden(512, 1024)
    layer.call(store, h, pairs, "sum")
    started, ended = threading.Event(), threading.Event()
    times: list[float] = []

    def compute() -> None:
        times.append(time.perf_counter())
        started.set()
        layer.call(store, h, pairs, "sum")
        times.append(time.perf_counter())
        ended.set()

    thread = threading.Thread(target=compute)
    thread.start()
    started.wait()
    ticks = []
    while not ended.wait(0.001):
        ticks.append(time.perf_counter())
    thread.join()
    # The middle of the call, where nothing but native code runs.
    begin, end = times
    within = [tick for tick in ticks if begin + (end - begin) / 4 < tick < end - (end - begin) / 4]
    assert end - begin > 0.02
    assert len(within) >= 5


def test_bits_do_not_depend_on_threads(tmp_path: Path) -> None:
    for type in ("f32", "f16", "q8_0", "q4_K"):
        layer = Layer(SWIGLU, random_layer(type, 8, 256, 512), 8, tmp_path / type)
        stores = [layer.held(threads=threads) for threads in (1, 2, 3)]
        assert [store.threads for store in stores] == [1, 2, 3]
        for n_rows in (1, 7, 40):
            pairs, h = Pairs.random(n_rows, range(8), 4), hidden(n_rows, 256)
            for reduce in ("rows", "sum"):
                results = {layer.call(store, h, pairs, reduce).tobytes() for store in stores}
                assert len(results) == 1


@pytest.mark.parametrize("threads", [-1, 513])
def test_impossible_numbers_of_threads(threads: int) -> None:
    if threads < 0:
        assert kernels.ExpertStore("CPU", threads).threads == kernels.default_threads()
    else:
        with pytest.raises(kernels.LoadError, match="513 threads; 1 to 512 are possible"):
            kernels.ExpertStore("CPU", threads)


def test_calls_of_several_threads(tmp_path: Path) -> None:
    """One store, four callers: each gets its own result."""
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 128), 8, tmp_path / "layer")
    store = layer.held((0, 4), (5, 7), threads=2)
    calls = [(hidden(n, 256, seed=n), Pairs.random(n, range(8), 3, seed=n)) for n in (1, 4, 9, 30)]
    expected = [layer.call(store, *call, "sum").tobytes() for call in calls]
    wrong: list[int] = []

    def check(number: int) -> None:
        for _ in range(50):
            if layer.call(store, *calls[number], "sum").tobytes() != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=check, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_waiting_threads_sleep(tmp_path: Path) -> None:
    """ggml's threads poll after a graph by default, which would cost a core each between two calls."""
    layer = Layer(SWIGLU, random_layer("q8_0", 8, 256, 512), 8, tmp_path / "layer")
    store = layer.held(threads=4)
    pairs, h = Pairs.random(64, range(8), 4), hidden(64, 256)
    for _ in range(3):
        layer.call(store, h, pairs, "sum")
    spent, start = time.process_time(), time.perf_counter()
    time.sleep(0.5)
    assert (time.process_time() - spent) / (time.perf_counter() - start) < 0.05
