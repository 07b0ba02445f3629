"""The number formats of the wire, in NumPy, little-endian: floats as f32, bf16 or f16; int32."""

from __future__ import annotations

import sys
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from node.bounded_msgpack import Body

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
_Scalar = TypeVar("_Scalar", bound=np.generic)

ITEM_BYTES: Final = {"f32": 4, "bf16": 2, "f16": 2}

if sys.byteorder != "little":
    raise ImportError("this program runs on little-endian machines only")


def to_wire(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """`values` (float32, any shape, finite) in format `dtype`, rounded to nearest even; bf16 as uint16.

    The result is `values` itself for f32 when it is contiguous. Raises OverflowError when a finite value has no finite
    counterpart in the format, ValueError for another format.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "f32":
        return values
    if dtype == "bf16":
        bits = values.view(np.uint32)
        rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
            np.uint16
        )
        # A NaN must stay one: rounding can carry its payload out of the mantissa. (Callers send finite values only.)
        nan = np.isnan(values)
        if nan.any():
            rounded[nan] = 0x7FC0
        _refuse_overflow(values, (rounded & np.uint16(0x7FFF)) == 0x7F80, dtype)
        return rounded
    if dtype == "f16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        _refuse_overflow(values, np.isinf(half), dtype)
        return half
    raise ValueError(f"float format '{dtype}' is not one of {', '.join(ITEM_BYTES)}")


def from_wire(body: Body, dtype: str) -> Floats:
    """The values in `body` as float32, one dimension; for f32 a view of `body` where its alignment allows that.

    Raises ValueError when `body` does not hold a whole number of values.
    """
    if dtype == "f32":
        return _aligned(np.frombuffer(body, dtype=np.float32))
    if dtype == "bf16":
        return (np.frombuffer(body, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return np.frombuffer(body, dtype=np.float16).astype(np.float32)
    raise ValueError(f"float format '{dtype}' is not one of {', '.join(ITEM_BYTES)}")


def ints_from_wire(body: Body) -> Ints:
    """The int32 values in `body`; a view of it where its alignment allows that. Raises ValueError as `from_wire`."""
    return _aligned(np.frombuffer(body, dtype=np.int32))


def _aligned(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    return values if values.flags.aligned else values.copy()


def _refuse_overflow(values: Floats, infinite: npt.NDArray[np.bool_], dtype: str) -> None:
    if infinite.any() and np.isfinite(values[infinite]).any():
        raise OverflowError(f"a value is too large for {dtype}; f32 holds it")
