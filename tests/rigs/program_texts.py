"""Layer programs as text, and texts that are none."""

from __future__ import annotations


def program(*steps: str, input: str = "row") -> str:
    """The text of a program; the last of `steps` is what it returns."""
    lines = [f"%{number} = {step}" for number, step in enumerate(steps[:-1])]
    return "\n".join(["swarm-program 1", f"input {input}", *lines, f"return {steps[-1]}", ""])


SWIGLU = program(
    "matmul ffn_up_exps.weight h",
    "matmul ffn_gate_exps.weight h",
    "glu swiglu %1 %0",
    "matmul ffn_down_exps.weight %2",
    "mul %3 w",
    "%4",
)


BAD_TEXTS = {
    "empty": "",
    "no end": SWIGLU[:-1],
    "version": SWIGLU.replace("swarm-program 1", "swarm-program 2"),
    "input": SWIGLU.replace("input row", "input rows"),
    "carriage returns": SWIGLU.replace("\n", "\r\n"),
    "blank line": SWIGLU.replace("\n%0", "\n\n%0"),
    "nothing after the input": "swarm-program 1\ninput row\n",
    "no return": program("sqr h", "%0").replace("return %0", "%1 = sqr h"),
    "after the return": SWIGLU + "return %4\n",
    "return of a later value": program("sqr h", "%1"),
    "not ASCII": program("sqr h", "%0").replace("sqr", "sqŕ"),
    "65 steps": program(*["sqr h"] * 65, "%64"),
    "4,097 bytes": program(*[f"matmul {'a' * 63} h"] * 56, "%0"),
    "own value": program("sqr %0", "%0"),
    "later value": program("sqr %1", "sqr h", "%1"),
    "wrong number": program("sqr h", "%0").replace("%0 =", "%1 ="),
    "leading zero": program("sqr h", "sqr %00", "%1"),
    "two spaces": program("sqr  h", "%0"),
    "trailing space": program("sqr h ", "%0"),
    "too many operands": program("sqr h h", "%0"),
    "too few operands": program("mul h", "%0"),
    "unknown operand": program("sqr x", "%0"),
    "unknown step": program("softmax h", "%0"),
    "unknown unary": program("unary elu h", "%0"),
    "unknown glu": program("glu xglu h h", "%0"),
    "limits where there are none": program("glu swiglu h h 0x1p+0 0x1p+0", "%0"),
    "limits missing": program("glu swiglu_oai h h", "%0"),
    "one limit": program("glu swiglu_clamp h h 0x1p+0", "%0"),
    "tensor name upper case": program("matmul Ffn h", "%0"),
    "tensor name too long": program(f"matmul {'a' * 64} h", "%0"),
    "tensor name with prefix": program("matmul blk/0 h", "%0"),
    "precision": program("matmul a h prec=1", "%0"),
    "precision twice": program("matmul a h prec=1,2 prec=1,2", "%0"),
    "decimal float": program("scale h 1.0 0x0p+0", "%0"),
    "not a number": program("scale h nan 0x0p+0", "%0"),
    "float out of range": program("scale h 0x1p+99999 0x0p+0", "%0"),
    "negative count": program("cut h -1 2", "%0"),
    "count with a sign": program("cut h +1 2", "%0"),
}
