"""The interface of `kernels` in NumPy, with made-up weights: for tests of what is around the computing."""

import threading
import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


class ProgramError(ValueError):
    pass


class BadCall(ValueError):
    pass


class NotHeld(LookupError):
    pass


class ProgramMismatch(ValueError):
    pass


class ComputeError(RuntimeError):
    pass


class NotFinite(ComputeError):
    pass


@dataclass
class Device:
    name: str = "CPU"
    description: str = "NumPy"
    type: str = "cpu"
    memory_free_bytes: int = 1
    memory_total_bytes: int = 1


@dataclass
class TensorParts:
    type: str
    ne: list
    parts: list


@dataclass
class TensorSource:
    type: str
    ne: list
    parts: list


def expert_rows(program_text, tensors, number, n_experts, h, weight):
    """What the store computes but for its faults. `parts` say layer and first expert by their offset:
    server_rig.order."""
    (tensor,) = tensors.values()
    n_in, n_out = tensor.ne
    layer, first = divmod(tensor.parts[0][1], 1000)
    if n_in * n_out >= 1 << 20:
        return np.array([np.resize(row, n_out) for row in h], np.float64)
    y = h.astype(np.float64) @ expert_matrix(layer, first + number, n_in, n_out).T
    return y if weight is None else y * weight[:, None]


@dataclass
class SliceInfo:
    layer: int
    first: int
    last: int
    n_in: int
    n_out: int
    bytes: int


class Program:
    def __init__(self, text):
        if not text.startswith("swarm-program 1\n"):
            raise ProgramError("not a program")
        self.text = text
        self.input = text.split("input ", 1)[1].split("\n", 1)[0]
        self.uses_weight = " w\n" in text
        self.tensors = ["w.weight"]
        self.digest = 0xCBF29CE484222325
        for byte in text.encode():
            self.digest = (self.digest ^ byte) * 0x100000001B3 % 2**64


def devices():
    return [Device()]


def choose_device(name="auto"):
    return "CPU" if name == "auto" else name


def build_id():
    return "fake"


def expert_matrix(layer, expert, n_in, n_out):
    """[n_out, n_in] float32. Wide layers get a single pattern, since only their sizes matter to the tests."""
    return _matrix(layer, expert, n_in, n_out) if n_in * n_out < 1 << 20 else None


@lru_cache(maxsize=64)
def _matrix(layer, expert, n_in, n_out):
    return np.random.default_rng([layer, expert]).standard_normal((n_out, n_in), dtype=np.float32)


class ExpertStore:
    """The type of a tensor selects a fault: "missing" fails to load, "slow" loads for a second, "nan" computes NaN,
    "broken" raises ComputeError for rows whose first value is above 1000."""

    def __init__(self, device="auto", threads=0):
        self._held = {}
        self._lock = threading.Lock()

    def load(self, layer, program, first, last, n_expert, tensors):
        (tensor,) = tensors.values()
        if tensor.type == "missing":
            raise FileNotFoundError(f"{tensor.parts[0][0]} is not there")
        if tensor.type == "slow":
            time.sleep(1.0)
        n_in, n_out = tensor.ne
        with self._lock:
            self._held[layer, first, last] = (program, n_in, n_out, tensor.type)
        return SliceInfo(layer, first, last, n_in, n_out, (last - first + 1) * n_in * n_out * 4)

    def drop(self, layer, first, last):
        with self._lock:
            del self._held[layer, first, last]

    def ffn(self, program_digest, layer, h, row, expert, weight, n_rows, reduce):
        with self._lock:
            held = [(span, value) for span, value in self._held.items() if span[0] == layer]
        if not held:
            raise NotHeld(f"layer {layer} is not held")
        for one in expert:
            if not any(first <= one <= last for (_, first, last), _ in held):
                raise NotHeld(f"expert {one} is not held")
        program, n_in, n_out, kind = held[0][1]
        if program.digest != program_digest:
            raise ProgramMismatch("another program")
        if kind == "broken" and (h[:, 0] > 1000).any():
            raise ComputeError("the device failed")
        if n_in * n_out >= 1 << 20:
            shape = (n_rows if reduce == "sum" else len(row), n_out)
            if reduce == "rows":
                h = h[row]
            return np.resize(h, shape) if h.shape != shape else h.copy()
        y = np.empty((len(row), n_out), dtype=np.float32)
        for pair, (r, e) in enumerate(zip(row, expert, strict=True)):
            x = h[pair if program.input == "pair" else r]
            y[pair] = expert_matrix(layer, int(e), n_in, n_out) @ x
        if kind == "nan":
            y[:] = np.nan
        if weight is not None:
            y *= weight[:, None]
        if reduce == "rows":
            return y
        total = np.zeros((n_rows, n_out), dtype=np.float32)
        np.add.at(total, row, y)
        return total
