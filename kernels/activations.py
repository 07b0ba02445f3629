"""ggml's activation functions in float64, by the names of layer programs, without ggml's tables and shortcuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _sigmoid(x: Array) -> Array:
    # exp of a negative number only, so that nothing overflows.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x)))


def _gelu_erf(x: Array) -> Array:
    erf = np.frompyfunc(math.erf, 1, 1)
    return 0.5 * x * (1.0 + np.asarray(erf(x / math.sqrt(2.0)), dtype=np.float64))


#: Functions of one value, by the name that a layer program gives.
UNARY: Mapping[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_quick": lambda x: x * _sigmoid(1.702 * x),
    "gelu_erf": _gelu_erf,
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "abs": np.abs,
    "neg": np.negative,
    "exp": np.exp,
    "softplus": lambda x: np.logaddexp(0.0, x),
}

#: Functions of a gate and a value.
GLU: Mapping[str, Callable[[Array, Array], Array]] = {
    "reglu": lambda gate, up: np.maximum(gate, 0.0) * up,
    "geglu": lambda gate, up: _gelu(gate) * up,
    "swiglu": lambda gate, up: gate * _sigmoid(gate) * up,
    "geglu_erf": lambda gate, up: _gelu_erf(gate) * up,
    "geglu_quick": lambda gate, up: gate * _sigmoid(1.702 * gate) * up,
}


def _swiglu_oai(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    gate = np.minimum(gate, limit)
    return gate * _sigmoid(alpha * gate) * (np.clip(up, -limit, limit) + 1.0)


def _swiglu_clamp(gate: Array, up: Array, _alpha: float, limit: float) -> Array:
    gate = np.minimum(gate, limit)
    return gate * _sigmoid(gate) * np.clip(up, -limit, limit)


#: Functions of a gate and a value, with the steepness and the limit that the program gives.
LIMITED_GLU: Mapping[str, Callable[[Array, Array, float, float], Array]] = {
    "swiglu_oai": _swiglu_oai,
    "swiglu_clamp": _swiglu_clamp,
}
