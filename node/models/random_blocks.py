"""Random weights in ggml's types, made as raw blocks: quickly, and without quantising anything.

The quants of a block are uniformly random; its scales are such that the weights have a mean near 0 and the standard deviation
that was asked for, like a real model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.models.gguf import GGML_TYPES, TYPE_IDS

Bytes = NDArray[np.uint8]

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_RMS = float(np.sqrt(np.mean(np.square(_IQ4_VALUES))))
_FP4_RMS = float(np.sqrt(np.mean(np.square((0, 1, 2, 3, 4, 6, 8, 12)))))

# Types whose blocks are an f16 scale and then indices into tables, for which every bit pattern is valid: the standard deviation
# of the weights when the scale is 1 and everything else is uniformly random.
_INDEXED_RMS: Final[Mapping[str, float]] = {
    "iq2_xxs": 53.6,
    "iq2_xs": 56.1,
    "iq2_s": 57.0,
    "iq3_xxs": 143.0,
    "iq3_s": 142.0,
    "iq1_s": 7.2,
}
_FLOATS: Final[Mapping[str, str]] = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}

#: The types that `random_blocks` makes.
BLOCK_TYPES: Final[tuple[str, ...]] = (
    *_FLOATS,
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"),
    *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs"),
    *_INDEXED_RMS,
)


def random_blocks(generator: np.random.Generator, type: str, n: int, spread: float) -> Bytes:
    """`n` random blocks of ggml type `type`, one a row of the result, u8[n, bytes of a block].

    The weights have a standard deviation of about `spread`; MXFP4, whose scales are powers of two, of `spread` within a
    factor of 1.5. Raises KeyError for a type that is not in BLOCK_TYPES.
    """
    if type in _FLOATS:
        return _floats(generator, type, n, spread)

    def bytes_(width: int) -> Bytes:
        return generator.integers(0, 256, (n, width), np.uint8)

    def scale(rms: float, signed: bool = False) -> Bytes:
        """f16 scales for quants whose standard deviation is `rms`."""
        sign = generator.choice([-1.0, 1.0], n) if signed else 1.0
        values = spread / rms * generator.uniform(0.8, 1.2, n) * sign
        return values.astype("<f2").reshape(n, 1).view(np.uint8)

    def times(scales: Bytes, factor: float) -> Bytes:
        return (scales.view("<f2").astype(np.float32) * factor).astype("<f2").view(np.uint8)

    # Quants are integers from 0 to 2^bits - 1, some with an offset: 7.5 and 4.6 are mean and standard deviation of 4 bits.
    parts: list[Bytes]
    if type == "q4_0":
        parts = [scale(4.6, signed=True), bytes_(16)]
    elif type == "q5_0":
        parts = [scale(9.2, signed=True), bytes_(20)]
    elif type == "q8_0":
        parts = [scale(73.9), bytes_(32)]
    elif type in ("q4_1", "q5_1"):
        middle, rms = (7.5, 4.6) if type == "q4_1" else (15.5, 9.2)
        d = scale(rms)
        parts = [d, times(d, -middle), bytes_(16 if type == "q4_1" else 20)]
    elif type == "mxfp4":
        # The block scale is 2^(exponent - 128); the exponents are around the one that is meant.
        exponent = 128 + np.round(np.log2(spread / _FP4_RMS)) + generator.choice([-1, 0, 0], (n, 1))
        parts = [np.clip(exponent, 1, 254).astype(np.uint8), bytes_(16)]
    elif type == "q2_K":
        # 4 bits of scale and 4 of minimum for 16 weights: the minimum in the middle of the quants' range, 1.5.
        sub = generator.integers(4, 16, (n, 16))
        d = scale(1.118 * 10.1)
        parts = [(sub | sub << 4).astype(np.uint8), bytes_(64), d, times(d, 1.5)]
    elif type == "q3_K":
        # 6-bit sub-block scales around 32
        parts = [bytes_(32), bytes_(64), bytes_(12), scale(2.345 * 18.5, signed=True)]
    elif type in ("q4_K", "q5_K"):
        middle, rms = (7.5, 4.6) if type == "q4_K" else (15.5, 9.2)
        sub = generator.integers(16, 64, (n, 8))
        low = np.clip(sub + generator.integers(-3, 4, (n, 8)), 0, 63)
        d = scale(rms * 42.0)
        parts = [d, times(d, middle), _pack_k4(sub, low), *([bytes_(32)] if type == "q5_K" else []), bytes_(128)]
    elif type == "q6_K":
        sub = generator.integers(32, 128, (n, 16)) * generator.choice([-1, 1], (n, 16))
        parts = [bytes_(128), bytes_(64), sub.astype(np.int8).view(np.uint8), scale(18.5 * 84.3, signed=True)]
    elif type == "iq4_nl":
        parts = [scale(_IQ4_RMS, signed=True), bytes_(16)]
    elif type == "iq4_xs":
        # 6-bit sub-block scales around 32
        parts = [scale(_IQ4_RMS * 18.5, signed=True), bytes_(2), bytes_(4), bytes_(128)]
    else:
        parts = [scale(_INDEXED_RMS[type]), bytes_(GGML_TYPES[TYPE_IDS[type]][2] - 2)]
    return np.concatenate(parts, axis=1)


def _floats(generator: np.random.Generator, type: str, n: int, spread: float) -> Bytes:
    values = generator.standard_normal((n, 1), np.float32) * np.float32(spread)
    if type == "bf16":
        return (values.view("<u4") >> 16).astype(_FLOATS[type]).view(np.uint8)
    return values.astype(_FLOATS[type]).view(np.uint8)


def _pack_k4(sub: NDArray[np.int64], low: NDArray[np.int64]) -> Bytes:
    """The 12 bytes in which Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit minima."""
    packed = np.empty((len(sub), 12), np.int64)
    packed[:, 0:4] = sub[:, :4] | (sub[:, 4:] >> 4) << 6
    packed[:, 4:8] = low[:, :4] | (low[:, 4:] >> 4) << 6
    packed[:, 8:12] = (sub[:, 4:] & 15) | (low[:, 4:] & 15) << 4
    return packed.astype(np.uint8)
