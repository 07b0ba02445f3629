"""Random weights in ggml's types, made as raw blocks: quickly, and without quantising anything.

The quants of a block are uniformly random; its scales are such that the weights have a mean near 0 and the standard
deviation that was asked for, like a real model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from node.models.gguf import GGML_TYPES, TYPE_IDS

Bytes = NDArray[np.uint8]

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_RMS = float(np.sqrt(np.mean(np.square(_IQ4_VALUES))))
_FP4_RMS = float(np.sqrt(np.mean(np.square((0, 1, 2, 3, 4, 6, 8, 12)))))

# Types whose blocks are an f16 scale and then indices into tables, for which every bit pattern is valid: the standard
# deviation of the weights when the scale is 1 and everything else is uniformly random.
_INDEXED_RMS: Final[Mapping[str, float]] = {
    "iq2_xxs": 53.6,
    "iq2_xs": 56.1,
    "iq2_s": 57.0,
    "iq3_xxs": 143.0,
    "iq3_s": 142.0,
    "iq1_s": 7.2,
}
_FLOATS: Final[Mapping[str, str]] = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


def random_blocks(generator: np.random.Generator, type: str, n: int, spread: float) -> Bytes:
    """`n` random blocks of ggml type `type`, one a row of the result, u8[n, bytes of a block].

    The weights have a standard deviation of about `spread`; MXFP4, whose scales are powers of two, of `spread` within a
    factor of 1.5. Raises KeyError for a type that is not in BLOCK_TYPES.
    """
    if type in _FLOATS:
        return _floats(generator, type, n, spread)
    draw = _Draw(generator, n, spread)
    if type in _INDEXED_RMS:
        parts = [draw.scale(_INDEXED_RMS[type]), draw.bytes(GGML_TYPES[TYPE_IDS[type]][2] - 2)]
    else:
        parts = _PARTS[type](draw)
    return np.concatenate(parts, axis=1)


class _Draw:
    """Draws the parts of `n` blocks whose weights are to have a standard deviation of `spread`."""

    def __init__(self, generator: np.random.Generator, n: int, spread: float) -> None:
        self.generator = generator
        self.n = n
        self.spread = spread

    def bytes(self, width: int) -> Bytes:
        """Quants: `width` uniformly random bytes a block."""
        return self.generator.integers(0, 256, (self.n, width), np.uint8)

    def integers(self, low: int, high: int, width: int) -> NDArray[np.int64]:
        """`width` integers a block, from `low` to below `high`."""
        return self.generator.integers(low, high, (self.n, width))

    def scale(self, rms: float, signed: bool = False) -> Bytes:
        """An f16 scale a block, for quants whose standard deviation is `rms`."""
        sign = self.generator.choice([-1.0, 1.0], self.n) if signed else 1.0
        values = self.spread / rms * self.generator.uniform(0.8, 1.2, self.n) * sign
        return values.astype("<f2").reshape(self.n, 1).view(np.uint8)


def _times(scales: Bytes, factor: float) -> Bytes:
    return (scales.view("<f2").astype(np.float32) * factor).astype("<f2").view(np.uint8)


def _mxfp4(draw: _Draw) -> list[Bytes]:
    # The block scale is 2^(exponent - 128); the exponents are around the one that is meant.
    meant = 128 + np.round(np.log2(draw.spread / _FP4_RMS))
    exponent = meant + draw.generator.choice([-1, 0, 0], (draw.n, 1))
    return [np.clip(exponent, 1, 254).astype(np.uint8), draw.bytes(16)]


def _with_minimum(draw: _Draw, middle: float, rms: float, width: int) -> list[Bytes]:
    d = draw.scale(rms)
    return [d, _times(d, -middle), draw.bytes(width)]


def _q2_k(draw: _Draw) -> list[Bytes]:
    # 4 bits of scale and 4 of minimum for 16 weights: the minimum in the middle of the quants' range, 1.5.
    sub = draw.integers(4, 16, 16)
    d = draw.scale(1.118 * 10.1)
    return [(sub | sub << 4).astype(np.uint8), draw.bytes(64), d, _times(d, 1.5)]


def _k_with_minima(draw: _Draw, middle: float, rms: float, high_bits: int) -> list[Bytes]:
    sub = draw.integers(16, 64, 8)
    low = np.clip(sub + draw.integers(-3, 4, 8), 0, 63)
    d = draw.scale(rms * 42.0)
    return [d, _times(d, middle), _pack_k4(sub, low), draw.bytes(high_bits), draw.bytes(128)]


def _q6_k(draw: _Draw) -> list[Bytes]:
    sub = draw.integers(32, 128, 16) * draw.generator.choice([-1, 1], (draw.n, 16))
    return [draw.bytes(128), draw.bytes(64), sub.astype(np.int8).view(np.uint8), draw.scale(18.5 * 84.3, signed=True)]


# The parts of a block in their order. Quants are integers from 0 to 2^bits - 1, some with an offset: 7.5 and 4.6 are
# mean and standard deviation of 4 bits, 15.5 and 9.2 of 5. Where sub-blocks have scales of 6 bits, these are around 32.
_PARTS: Final[Mapping[str, Callable[[_Draw], list[Bytes]]]] = {
    "q4_0": lambda draw: [draw.scale(4.6, signed=True), draw.bytes(16)],
    "q4_1": lambda draw: _with_minimum(draw, 7.5, 4.6, 16),
    "q5_0": lambda draw: [draw.scale(9.2, signed=True), draw.bytes(20)],
    "q5_1": lambda draw: _with_minimum(draw, 15.5, 9.2, 20),
    "q8_0": lambda draw: [draw.scale(73.9), draw.bytes(32)],
    "mxfp4": _mxfp4,
    "q2_K": _q2_k,
    "q3_K": lambda draw: [draw.bytes(32), draw.bytes(64), draw.bytes(12), draw.scale(2.345 * 18.5, signed=True)],
    "q4_K": lambda draw: _k_with_minima(draw, 7.5, 4.6, 0),
    "q5_K": lambda draw: _k_with_minima(draw, 15.5, 9.2, 32),
    "q6_K": _q6_k,
    "iq4_nl": lambda draw: [draw.scale(_IQ4_RMS, signed=True), draw.bytes(16)],
    "iq4_xs": lambda draw: [
        draw.scale(_IQ4_RMS * 18.5, signed=True),
        draw.bytes(2),
        draw.bytes(4),
        draw.bytes(128),
    ],
}

#: The types that `random_blocks` makes.
BLOCK_TYPES: Final[tuple[str, ...]] = (*_FLOATS, *_PARTS, *_INDEXED_RMS)


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
