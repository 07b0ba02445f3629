"""The text of layer programs: what the C++ parser takes, what it refuses and how, and that the reference agrees."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kernels
from kernels import activations, reference
from rigs.program_texts import BAD_TEXTS, SWIGLU, program
from rigs.timing import cheaply


def c_hexadecimal(value: float) -> str:
    """A float32 as C's %a prints it."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    whole, fraction, exponent = re.fullmatch(r"(-?0x[01])\.([0-9a-f]+)(p.*)", float(np.float32(value)).hex()).groups()
    return whole + f".{fraction}".rstrip("0").rstrip(".") + exponent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.702, "0x1.b3b646p+0"),
        (7.0, "0x1.cp+2"),
        (0.1, "0x1.99999ap-4"),
        (0.0, "0x0p+0"),
        (-0.0, "-0x0p+0"),
        (-math.inf, "-inf"),
        (2.0**-149, "0x1p-149"),
    ],
)
def test_c_hexadecimal(value: float, text: str) -> None:
    assert c_hexadecimal(value) == text
    parsed = kernels.Program(program(f"scale h {text} 0x1p+0", "%0"))
    assert f" {text} " in parsed.text


names = st.text("abcdefghijklmnopqrstuvwxyz0123456789_.", min_size=1, max_size=63) | st.sampled_from(
    ["ffn_up_exps.weight", "ffn_gate_exps.bias", "x" * 63]
)
reals = st.floats(width=32, allow_nan=False).map(c_hexadecimal)
int32 = st.integers(-(2**31), 2**31 - 1)
precision = st.just("") | st.tuples(int32, int32).filter(any).map(lambda p: f" prec={p[0]},{p[1]}")
glu_kinds = st.sampled_from(tuple(activations.GLU))
limited_kinds = st.sampled_from(tuple(activations.LIMITED_GLU))
unary_kinds = st.sampled_from(tuple(activations.UNARY))


@st.composite
def steps(draw: st.DrawFn, number: int) -> str:
    """Step `number` of a program, in its canonical form."""
    earlier = [f"%{n}" for n in range(number)]
    x, y = (draw(st.sampled_from(["h", "w", *earlier])) for _ in range(2))
    forms = {
        "matmul": lambda: f"{draw(names)} {x}{draw(precision)}",
        "bias": lambda: f"{draw(names)} {x}",
        "gather": lambda: draw(names),
        "cut": lambda: f"{x} {draw(st.integers(0, 1 << 24))} {draw(st.integers(1, 1 << 24))}",
        "glu": lambda: f"{draw(glu_kinds)} {x} {y}",
        "glu ": lambda: f"{draw(limited_kinds)} {x} {y} {draw(reals)} {draw(reals)}",
        "unary": lambda: f"{draw(unary_kinds)} {x}",
        "sqr": lambda: x,
        "scale": lambda: f"{x} {draw(reals)} {draw(reals)}",
        "clamp": lambda: f"{x} {draw(reals)} {draw(reals)}",
        "mul": lambda: f"{x} {y}",
        "add": lambda: f"{x} {y}",
    }
    op = draw(st.sampled_from(sorted(forms)))
    return f"{op.strip()} {forms[op]()}"


@st.composite
def programs(draw: st.DrawFn) -> str:
    count = draw(st.integers(1, 24))
    body = [draw(steps(number)) for number in range(count)]
    text = program(*body, f"%{draw(st.integers(0, count - 1))}", input=draw(st.sampled_from(["row", "pair"])))
    return text if len(text) <= reference.MAX_BYTES else SWIGLU


@settings(max_examples=200, deadline=None)
@given(programs())
@example(program(*[f"matmul {'a' * 40} h"] * 64, "%63"))
def test_both_parsers_read_a_program_alike(text: str) -> None:
    native, parsed = kernels.Program(text), reference.parse(text)
    assert native.text == text
    assert native.digest == reference.digest(text)
    assert native.input == parsed.input
    assert native.uses_weight == parsed.uses_weights
    assert set(native.tensors) == parsed.tensors
    assert len(native.tensors) == len(parsed.tensors)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A program with a few characters replaced, taken out or put in."""
    text = draw(programs() | st.just(SWIGLU))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(text) - 1)))
        length = draw(st.integers(0, 3))
        new = draw(st.text("%=hw 0123456789-+.xpinfabc_\n\r\t\0é", max_size=3))
        text = text[:place] + new + text[place + length :]
    return text


@settings(max_examples=200, deadline=None)
@given(damaged() | st.text(max_size=200))
@example("swarm-program " + "x" + "é" * 100 + "\n")
@example("\n")
@example("\n\n\n\n")
def test_a_damaged_program_is_refused_or_means_the_same_to_both(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    try:
        native = kernels.Program(text)
    except kernels.ProgramError:
        return
    assert native.text == text
    assert set(native.tensors) == reference.parse(text).tensors


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
@example(b"\xff\n")
@example(SWIGLU.encode() + b"\0")
def test_bytes_that_are_no_text_are_refused(data: bytes) -> None:
    with pytest.raises(kernels.ProgramError):
        kernels.Program(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_what_the_reference_refuses_is_refused(name: str) -> None:
    with pytest.raises(kernels.ProgramError):
        kernels.Program(BAD_TEXTS[name])


# Text, and the message's beginning: the line, what is wrong, and the line's text with the step in it.
MESSAGES = {
    "step": (program("matmul a h", "softmax %0", "%1"), "line 4: unknown step 'softmax' in '%1 = softmax %0'"),
    "unary": (program("unary elu h", "%0"), "line 3: unknown activation in '%0 = unary elu h'"),
    "glu": (program("glu xglu h h", "%0"), "line 3: unknown gated activation in '%0 = glu xglu h h'"),
    "operand": (program("matmul a h", "sqr %1", "%1"), "line 4: operand '%1' is not h, w or an earlier step"),
    "huge operand": (program(f"sqr %{'9' * 99}", "%0"), "line 3: operand '%9999999"),
    "name": (program("matmul A h", "%0"), "line 3: bad tensor name 'A' in '%0 = matmul A h'"),
    "long name": (program(f"gather {'a' * 64}", "%0"), f"line 3: bad tensor name '{'a' * 63}' in"),
    "number": (program("scale h 0.5 0x0p+0", "%0"), "line 3: bad first parameter '0.5' in '%0 = scale h 0.5 0x0p+0'"),
    "NaN": (program("clamp h 0x0p+0 nan", "%0"), "line 3: bad second parameter 'nan'"),
    "long form": (program("clamp h 0x0.0p+0 inf", "%0"), "line 3: bad first parameter '0x0.0p+0'"),
    "not normal": (program("clamp h 0x2p+0 inf", "%0"), "line 3: bad first parameter '0x2p+0'"),
    "double": (program("clamp h 0x1.b3b645a1cac08p+0 inf", "%0"), "line 3: bad first parameter"),
    "beyond float": (program("clamp h 0x1p+128 inf", "%0"), "line 3: bad first parameter '0x1p+128'"),
    "limit": (program("glu swiglu_oai h h 0x1p+0", "%0"), "line 3: missing limit in"),
    "offset": (program("cut h -1 2", "%0"), "line 3: offset or length out of range in '%0 = cut h -1 2'"),
    "length": (program("cut h 0 0", "%0"), "line 3: offset or length out of range"),
    "int64": (program(f"cut h {2**63} 2", "%0"), f"line 3: bad offset '{2**63}'"),
    "sign": (program("cut h +1 2", "%0"), "line 3: bad offset '+1'"),
    "precision 0": (program("matmul a h prec=0,0", "%0"), "line 3: bad precision 'prec=0,0'"),
    "precision int32": (program("matmul a h prec=4294967297,1", "%0"), "line 3: bad precision"),
    "precision tail": (program("matmul a h prec=1,2x", "%0"), "line 3: bad precision 'prec=1,2x'"),
    "too short": (program("mul h", "%0"), "line 3: missing operand in '%0 = mul h'"),
    "too long": (program("sqr h h", "%0"), "line 3: more words than the step takes in '%0 = sqr h h'"),
    "blanks": (program("sqr  h", "%0"), "line 3: words must be separated by single blanks"),
    "number of a step": (program("sqr h", "%0").replace("%0 =", "%1 ="), "line 3: expected '%0 = ...' in"),
    "return": (program("sqr h", "%0").replace("return", "give"), "line 4: expected 'return' in 'give %0'"),
    "return of h": (program("sqr h", "h"), "line 4: a program returns one of its steps in 'return h'"),
    "return of w": (program("sqr h", "w"), "line 4: a program returns one of its steps in 'return w'"),
    "return of nothing yet": (program("sqr h", "%1"), "line 4: operand '%1' is not"),
    "input": (program("sqr h", "%0", input="both"), "line 2: 'input both' is not 'input row' or 'input pair'"),
    "tabulator": (program("sqr\th", "%0"), "line 3: byte 9 is not printable ASCII"),
    "NUL": (program("gather a\0b", "%0"), "line 3: byte 0 is not printable ASCII"),
    "carriage return": (program("sqr h\r", "%0"), "line 3: byte 13 is not printable ASCII"),
    "not ASCII": (program("sqr h", "gather é", "%1"), "line 4: byte 195 is not printable ASCII"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_names_line_and_step(name: str) -> None:
    text, message = MESSAGES[name]
    with pytest.raises(kernels.ProgramError, match=re.escape(f"layer program, {message}")):
        kernels.Program(text)


def test_version_and_limits() -> None:
    with pytest.raises(
        kernels.ProgramError, match="unknown version: 'swarm-program 2'; this build reads 'swarm-program 1'"
    ):
        kernels.Program(SWIGLU.replace("swarm-program 1", "swarm-program 2"))
    assert kernels.Program(program(*["sqr h"] * 64, "%63")).digest
    with pytest.raises(kernels.ProgramError, match="of 68 lines; 4 to 67 are allowed"):
        kernels.Program(program(*["sqr h"] * 65, "%64"))
    with pytest.raises(kernels.ProgramError, match="of 3 lines"):
        kernels.Program("swarm-program 1\ninput row\nreturn h\n")
    assert kernels.Program(program(f"gather {'a' * 63}", "%0")).tensors == ["a" * 63]
    lines = [f"gather {'a' * 63}"]
    while len(program(*lines, "gather a", "%0")) <= reference.MAX_BYTES:
        lines.append(lines[0])
    lines[-1] = "gather a"
    longest = program(*lines, "%0")
    longest = longest.replace("gather a\n", f"gather {'a' * (1 + reference.MAX_BYTES - len(longest))}\n")
    assert len(longest) == 4096
    assert kernels.Program(longest).text == longest
    with pytest.raises(kernels.ProgramError, match="of 4097 bytes; at most 4096 are allowed"):
        kernels.Program(longest.replace("return %0", "return %10"))


def test_refusal_is_quick() -> None:
    """Whatever the text, its length decides: nothing in it makes the parser slow."""
    texts = [
        "swarm-program 1\ninput row\n" + "x" * 10_000_000,
        "\n" * 4096,
        "swarm-program 1\ninput row\n" + "% " * 2000 + "\n",
        "swarm-program 1\ninput row\n%0 = scale h " + "9" * 4000 + " 0x0p+0\nreturn %0\n",
        "swarm-program 1\ninput row\n%0 = matmul a h prec=" + "1" * 4000 + "\nreturn %0\n",
        "swarm-program 1\ninput row\n" + "%0 = sqr h\n" * 365 + "return %0\n",
    ]
    for text in texts:
        with cheaply(0.1), pytest.raises(kernels.ProgramError) as caught:
            kernels.Program(text)
        assert len(str(caught.value)) < 9000
