"""The layer program in NumPy and float64: what `kernels.ffn` is judged against.

Programs are those of docs/protocol.md, "Layer program". Weights are dequantised with the `gguf` package, activations
are ggml's definitions without its tables and float16 shortcuts, and nothing is rounded on the way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernels.activations import GLU, LIMITED_GLU, UNARY, Array

__all__ = ["Program", "ProgramError", "Step", "Tensor", "dequantise", "digest", "ffn", "parse"]

#: A tensor of the local experts: float values [n_local, *reversed(ne)], or (ggml type name, ne of one expert in ggml's
#: order, bytes of all local experts).
Tensor = NDArray[np.floating] | tuple[str, Sequence[int], bytes | memoryview]

MAX_STEPS = 64
MAX_BYTES = 4096

_NAME = re.compile(r"[a-z0-9_.]{1,63}")
_FLOAT = re.compile(r"-?(inf|0x[0-9a-f]+(\.[0-9a-f]+)?p[+-][0-9]+)")
_COUNT = re.compile(r"0|[1-9][0-9]{0,9}")
_PRECISION = re.compile(r"prec=(-?[0-9]{1,10}),(-?[0-9]{1,10})")


class ProgramError(ValueError):
    """The text is not a layer program; the message names line and step."""


@dataclass(frozen=True)
class Step:
    """`%N = op …`: operands are `h`, `w` or `%N`, `numbers` the step's constants in the order of the text."""

    line: int
    op: str
    tensor: str = ""
    kind: str = ""
    operands: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        words = (self.op, self.kind, self.tensor, *self.operands)
        return f"line {self.line} ({' '.join(word for word in words if word)})"


@dataclass(frozen=True)
class Program:
    """A parsed program. `input` is `row` or `pair`."""

    input: str
    steps: tuple[Step, ...]
    result: str

    @property
    def uses_weights(self) -> bool:
        return self.result == "w" or any("w" in step.operands for step in self.steps)

    @property
    def tensors(self) -> frozenset[str]:
        return frozenset(step.tensor for step in self.steps if step.tensor)


def digest(text: str) -> int:
    """FNV-1a 64 of the program's text."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def parse(text: str) -> Program:
    """Parses a layer program. Raises ProgramError naming the line for anything that is not one to the letter."""
    if not text.isascii() or len(text) > MAX_BYTES:
        raise ProgramError(f"the program is not ASCII of at most {MAX_BYTES} bytes")
    if not text.endswith("\n"):
        raise ProgramError("the program's last line does not end")
    lines = text[:-1].split("\n")
    if lines[0] != "swarm-program 1":
        raise ProgramError(f"line 1: '{lines[0]}' is not 'swarm-program 1'")
    if len(lines) < 3 or lines[1] not in ("input row", "input pair"):
        raise ProgramError("line 2 is neither 'input row' nor 'input pair', or nothing follows it")
    steps: list[Step] = []
    for number, line in enumerate(lines[2:-1], start=3):
        if len(steps) == MAX_STEPS:
            raise ProgramError(f"line {number}: more than {MAX_STEPS} steps")
        steps.append(_Line(number, line, len(steps)).step())
    last = _Line(len(lines), lines[-1], len(steps))
    return Program(lines[1].removeprefix("input "), tuple(steps), last.result())


class _Line:
    def __init__(self, number: int, text: str, n_values: int) -> None:
        self.number = number
        self.text = text
        self.n_values = n_values
        self.words = text.split(" ")

    def fail(self, reason: str) -> ProgramError:
        return ProgramError(f"line {self.number}: {reason}: '{self.text}'")

    def take(self, what: str) -> str:
        if not self.words:
            raise self.fail(f"{what} is missing")
        return self.words.pop(0)

    def end(self) -> None:
        if self.words:
            raise self.fail("the line is too long")

    def operand(self) -> str:
        word = self.take("an operand")
        if word in ("h", "w"):
            return word
        if word.startswith("%") and _COUNT.fullmatch(word[1:]) and int(word[1:]) < self.n_values:
            return word
        raise self.fail(f"'{word}' is not h, w or an earlier value")

    def tensor(self) -> str:
        word = self.take("a tensor")
        if not _NAME.fullmatch(word):
            raise self.fail(f"'{word}' is not a tensor name")
        return word

    def float(self) -> float:
        word = self.take("a number")
        if not _FLOAT.fullmatch(word):
            raise self.fail(f"'{word}' is not a hexadecimal float")
        try:
            return float.fromhex(word)
        except OverflowError:
            raise self.fail(f"'{word}' is out of range") from None

    def count(self) -> int:
        word = self.take("a count")
        if not _COUNT.fullmatch(word):
            raise self.fail(f"'{word}' is not a count")
        return int(word)

    def kind(self, known: Sequence[str]) -> str:
        word = self.take("the kind")
        if word not in known:
            raise self.fail(f"unknown kind '{word}'")
        return word

    def result(self) -> str:
        if self.take("return") != "return":
            raise self.fail("the last line is not 'return'")
        result = self.operand()
        self.end()
        return result

    def step(self) -> Step:
        if self.take("a value") != f"%{self.n_values}" or self.take("'='") != "=":
            raise self.fail(f"the line does not begin with '%{self.n_values} = '")
        op = self.take("a step")
        step = self.arguments(op)
        self.end()
        return step

    def arguments(self, op: str) -> Step:
        if op == "matmul":
            step = Step(self.number, op, tensor=self.tensor(), operands=(self.operand(),))
            if self.words and not _PRECISION.fullmatch(self.take("the precision")):
                raise self.fail("the precision is not prec=A,B")
            return step
        if op == "bias":
            return Step(self.number, op, tensor=self.tensor(), operands=(self.operand(),))
        if op == "gather":
            return Step(self.number, op, tensor=self.tensor())
        if op == "cut":
            operands, numbers = (self.operand(),), (self.count(), self.count())
            return Step(self.number, op, operands=operands, numbers=numbers)
        if op == "glu":
            kind = self.kind((*GLU, *LIMITED_GLU))
            operands2 = (self.operand(), self.operand())
            limits = (self.float(), self.float()) if kind in LIMITED_GLU else ()
            return Step(self.number, op, kind=kind, operands=operands2, numbers=limits)
        if op == "unary":
            return Step(self.number, op, kind=self.kind(tuple(UNARY)), operands=(self.operand(),))
        if op == "sqr":
            return Step(self.number, op, operands=(self.operand(),))
        if op in ("scale", "clamp"):
            return Step(self.number, op, operands=(self.operand(),), numbers=(self.float(), self.float()))
        if op in ("mul", "add"):
            return Step(self.number, op, operands=(self.operand(), self.operand()))
        raise self.fail(f"unknown step '{op}'")


def dequantise(type_name: str, ne: Sequence[int], data: bytes | memoryview) -> NDArray[np.float32]:
    """Values [*reversed(ne)] of a tensor of ggml type `type_name` with dimensions `ne` (ggml's order).

    Raises ValueError when the bytes do not fit, or the `gguf` package cannot dequantise the type.
    """
    import gguf

    try:
        quantisation = gguf.GGMLQuantizationType[type_name.upper()]
    except KeyError:
        raise ValueError(f"the gguf package does not know the type {type_name}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    shape = [int(length) for length in reversed(ne)] or [1]
    raw = np.frombuffer(data, np.uint8)
    if shape[-1] % block or raw.size != math.prod(shape) // block * block_bytes:
        raise ValueError(f"{raw.size} bytes are not a {type_name} tensor of dimensions {list(ne)}")
    if type_name in ("f32", "f16"):
        values = raw.view("<f4" if type_name == "f32" else "<f2").astype(np.float32)
    else:
        rows = raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)
        try:
            values = gguf.quants.dequantize(rows, quantisation)
        except NotImplementedError:
            raise ValueError(f"the gguf package cannot dequantise {type_name}") from None
    return np.asarray(values, np.float32).reshape(shape if len(ne) else ())


class _Experts:
    """One tensor's experts as float64, dequantised when first used."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._tensor = tensor
        self._ready: dict[int, Array] = {}
        if isinstance(tensor, tuple):
            one = tensor_bytes(tensor[0], tensor[1])
            size = memoryview(tensor[2]).nbytes
            if one == 0 or size % one:
                raise ValueError(f"tensor {name}: {size} bytes are not a number of experts of {one} bytes")
            self._one = one
            self.count = size // one
        else:
            self.count = tensor.shape[0]

    def __getitem__(self, expert: int) -> Array:
        if expert not in self._ready:
            if isinstance(self._tensor, tuple):
                type_name, ne, data = self._tensor
                part = memoryview(data).cast("B")[expert * self._one : (expert + 1) * self._one]
                self._ready[expert] = dequantise(type_name, ne, part).astype(np.float64)
            else:
                self._ready[expert] = self._tensor[expert].astype(np.float64, copy=False)
        return self._ready[expert]


def tensor_bytes(type_name: str, ne: Sequence[int]) -> int:
    """Bytes of a tensor of ggml type `type_name` with dimensions `ne`."""
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name.upper()]]
    return math.prod(int(length) for length in ne) // block * block_bytes


def ffn(
    program_text: str,
    tensors: Mapping[str, Tensor],
    h: ArrayLike,
    row: ArrayLike,
    expert: ArrayLike,
    weight: ArrayLike | None,
    n_rows: int,
    reduce: str,
    *,
    first: int = 0,
) -> Array:
    """Computes a layer program on the pairs (row[i], expert[i]) in float64.

    `h`: [n_rows, n_in], or [n_pairs, n_in] for `input pair`. `row`, `expert` (global ids): [n_pairs]. `weight`:
    [n_pairs], None exactly if the program does not use it. `tensors` hold the experts `first`, `first` + 1, ….
    Returns [n_pairs, n_out] (`reduce` "rows") or [n_rows, n_out] ("sum"). Raises ProgramError for a bad program,
    ValueError for anything else that does not fit together.
    """
    program = parse(program_text)
    missing = program.tensors - tensors.keys()
    if missing:
        raise ValueError(f"the program uses tensors that are not given: {', '.join(sorted(missing))}")
    experts = {name: _Experts(name, tensors[name]) for name in program.tensors}
    counts = {held.count for held in experts.values()}
    if len(counts) > 1:
        raise ValueError(f"the tensors hold different numbers of experts: {sorted(counts)}")
    rows = np.asarray(row, np.int64).reshape(-1)
    local = np.asarray(expert, np.int64).reshape(-1) - first
    _check_pairs(rows, local, n_rows, counts.pop() if counts else None, first)
    hidden = np.asarray(h, np.float64)
    if hidden.ndim != 2 or len(hidden) != (n_rows if program.input == "row" else len(rows)):
        raise ValueError(f"h of shape {hidden.shape} does not fit {n_rows} rows and {len(rows)} pairs")
    values: dict[str, Array] = {"h": hidden[rows] if program.input == "row" else hidden}
    if (weight is not None) != program.uses_weights:
        raise ValueError(f"the program {'needs' if program.uses_weights else 'does not use'} gate weights")
    if weight is not None:
        values["w"] = np.asarray(weight, np.float64).reshape(len(rows), 1)
    for index, step in enumerate(program.steps):
        try:
            values[f"%{index}"] = _compute(step, [values[name] for name in step.operands], experts, local)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{step}: {error}") from error
    result = values[program.result]
    if reduce == "rows":
        return result
    if reduce != "sum":
        raise ValueError(f"reduce is '{reduce}', not 'rows' or 'sum'")
    total = np.zeros((n_rows, result.shape[1]))
    np.add.at(total, rows, result)
    return total


def _check_pairs(rows: NDArray[np.int64], local: NDArray[np.int64], n_rows: int, count: int | None, first: int) -> None:
    if rows.shape != local.shape:
        raise ValueError(f"{len(rows)} rows and {len(local)} experts are not pairs")
    if len(rows) and (rows.min() < 0 or rows.max() >= n_rows):
        raise ValueError(f"a row is outside the {n_rows} rows")
    if (np.diff(rows) < 0).any():
        raise ValueError("rows descend")
    if len(local) and (local.min() < 0 or (count is not None and local.max() >= count)):
        raise ValueError(f"an expert is outside {first} to {first + (count or 0) - 1}")
    if len(set(zip(rows.tolist(), local.tolist(), strict=True))) != len(rows):
        raise ValueError("a (row, expert) pair occurs twice")


def _compute(step: Step, x: list[Array], experts: Mapping[str, _Experts], local: NDArray[np.int64]) -> Array:
    if step.op == "matmul":
        return _matmul(experts[step.tensor], x[0], local)
    if step.op == "bias":
        bias = np.array([experts[step.tensor][e] for e in local.tolist()]).reshape(len(local), -1)
        if len(local) and bias.shape != x[0].shape:
            raise ValueError(f"a bias of {bias.shape[1]} for {x[0].shape[1]} values")
        return x[0] + bias if len(local) else x[0]
    if step.op == "gather":
        return np.array([float(experts[step.tensor][e].reshape(())) for e in local.tolist()]).reshape(len(local), 1)
    if step.op == "cut":
        offset, length = int(step.numbers[0]), int(step.numbers[1])
        if offset + length > x[0].shape[1] or length == 0:
            raise ValueError(f"{length} elements from {offset} of {x[0].shape[1]}")
        return x[0][:, offset : offset + length]
    if step.op == "glu":
        if x[0].shape != x[1].shape:
            raise ValueError(f"gate {x[0].shape} and up {x[1].shape} differ")
        if step.kind in LIMITED_GLU:
            return LIMITED_GLU[step.kind](x[0], x[1], step.numbers[0], step.numbers[1])
        return GLU[step.kind](x[0], x[1])
    if step.op == "unary":
        return UNARY[step.kind](x[0])
    if step.op == "sqr":
        return x[0] * x[0]
    if step.op == "scale":
        return x[0] * step.numbers[0] + step.numbers[1]
    if step.op == "clamp":
        return np.clip(x[0], step.numbers[0], step.numbers[1])
    if x[0].shape[1] != x[1].shape[1] and 1 not in (x[0].shape[1], x[1].shape[1]):
        raise ValueError(f"{x[0].shape[1]} and {x[1].shape[1]} values")
    return x[0] * x[1] if step.op == "mul" else x[0] + x[1]


def _matmul(held: _Experts, x: Array, local: NDArray[np.int64]) -> Array:
    n_out = held[0].shape[0]
    result = np.empty((len(local), n_out))
    for expert in np.unique(local).tolist():
        pairs = local == expert
        result[pairs] = x[pairs] @ held[expert].T
    return result
