"""What operations compute, in NumPy: functions of their parameters and operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _iota(params):
    shape, dimension = params["shape"], params["dimension"]
    others = tuple(i for i in range(len(shape)) if i != dimension)
    return np.broadcast_to(np.expand_dims(np.arange(shape[dimension]), others), shape)


def _broadcast(params, x):
    kept = params["broadcast_dimensions"]
    others = tuple(i for i in range(len(params["shape"])) if i not in kept)
    return np.broadcast_to(np.expand_dims(x, others), params["shape"])


def _slice(params, x):
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


_FUNCTIONS = {
    **dict(add=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, neg=np.negative),
    **dict(max=np.maximum, min=np.minimum, sqrt=np.sqrt, lt=np.less, le=np.less_equal),
    **dict(gt=np.greater, ge=np.greater_equal, eq=np.equal, ne=np.not_equal),
    **{"and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert},
    **dict(shift_right_logical=np.right_shift),
}
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{name: lambda params, *x, f=f: f(*x) for name, f in _FUNCTIONS.items()},
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "select_n": lambda params, which, *cases: np.choose(which, cases),
}
# Views of one array, if no reshape must copy it.
MOVES: dict[str, Callable[..., Any]] = {
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "slice": _slice,
    "split": lambda params, x: np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),  # of jax 0.12
}
ARRAYS = ELEMENTWISE | {
    **{name: MOVES[name] for name in ("transpose", "squeeze", "reshape", "slice")},
    **dict(iota=_iota, broadcast_in_dim=_broadcast, copy=lambda params, x: x),
}
