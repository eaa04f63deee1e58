"""Dropout as programs and libraries write it, with a mask drawn by ``jax.random``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._autofuse.graph import Node, Value
from jax_fastops._autofuse.meaning import (
    UFUNCS,
    constant,
    identity,
    multiple_of,
    resolve,
    selections_of,
)
from jax_fastops._autofuse.moves import Move
from jax_fastops.dropout import dropout

_OPERATIONS = UFUNCS | {"or": np.bitwise_or, "shift_right_logical": np.right_shift}


def drop_at(value: Value) -> Move | None:
    """The dropout whose result is this value."""
    node = value.node
    if node is None or node.name not in ("select_n", "mul", "div") or not value.is_floating:
        return None
    for scale, masked in _scaled(value):
        found = _masked(masked)
        if found is None:
            continue
        x, mask, keep = found
        if mask.is_result or len(mask.users) != 1:  # other users would have another mask
            return None
        drawn = _probability(mask)
        if drawn is None:
            return None
        key, probability = drawn
        probability = probability if keep else 1 - probability
        for factor, inner in _scaled(x):
            fits = inner.shape == value.shape and inner.dtype == value.dtype
            if fits and 0 < probability < 1 and _is_one(scale * factor * probability, value.dtype):
                reads, numbers = {"x": inner, "key": key}, (("rate", 1 - probability),)
                return Move("dropout", [value], reads, _dropout, 0, numbers)
        return None
    return None


def _dropout(leaves, axis):
    del axis
    function, key = functools.partial(dropout, rate=leaves["rate"]), leaves["key"]
    for _ in range(key.ndim):  # an array of keys draws for each example
        function = jax.vmap(function)
    return function(leaves["x"], key)


def _is_one(number: float, dtype) -> bool:
    return abs(number - 1) < 2 * float(jnp.finfo(dtype).eps) + 1e-6


def _scaled(value: Value) -> Iterator[tuple[float, Value]]:
    """The value, and what it is a multiple of, perhaps computed in a wider dtype."""
    yield 1.0, value
    source, shown, _ = resolve(value, narrowing=True)
    multiple = multiple_of(source)
    if multiple is not None and shown == identity(source) and source.shape == value.shape:
        factor, of = multiple
        before, shown, _ = resolve(of)
        cast = source is not value and before.dtype == value.dtype and shown == identity(before)
        yield factor, before if cast else of


def _masked(value: Value) -> tuple[Value, Value, bool] | None:
    """The array, the mask, and whether the mask keeps the elements where it is True."""
    for which, x, zero, keep in selections_of(value):
        # A mask of another shape is one draw for all elements.
        if which.shape == value.shape and constant(zero) == 0:
            return x, which, keep
    node = value.node
    if node is not None and node.name == "mul":
        for mask, x in (node.inputs, node.inputs[::-1]):
            cast = mask.node
            if cast is not None and cast.name == "convert_element_type":
                if cast.inputs[0].dtype == bool and mask.shape == value.shape:
                    return x, cast.inputs[0], True
    return None


def _probability(mask: Value) -> tuple[Value, float] | None:
    """The key of a random mask, and the probability that an element is True."""
    node = mask.node
    if node is None or node.name not in ("lt", "le", "gt", "ge"):
        return None
    for below, (drawn, limit) in ((True, node.inputs), (False, node.inputs[::-1])):
        if (number := constant(limit)) is not None and drawn.shape == mask.shape:
            key = _uniform(drawn)
            below = below is (node.name in ("lt", "le"))
            return None if key is None else (key, float(number) if below else 1 - float(number))
    return None


def _uniform(value: Value) -> Value | None:
    """The key of numbers that are uniform in [0, 1)."""
    source, chain = resolve(value)[0], []
    while source.node is not None and source.node.name != "random_bits":
        chain.append(source.node)
        varying = [v for v in source.node.inputs if constant(v) is None]
        if len(varying) != 1 or varying[0].shape != value.shape or len(chain) > 12:
            return None
        source = resolve(varying[0])[0]
    node = source.node
    if node is None or node.params["bit_width"] != 32 or source.shape != value.shape:
        return None
    bits = np.array([0, 1 << 31, (1 << 32) - 1], np.uint32)
    try:
        for step in reversed(chain):
            bits = _evaluated(step, bits)
    except KeyError:
        return None
    return node.inputs[0] if np.allclose(bits, [0, 0.5, 1], atol=1e-6) else None


def _evaluated(node: Node, x: np.ndarray) -> np.ndarray:
    if node.name == "bitcast_convert_type":
        return x.view(node.params["new_dtype"])
    if node.name == "convert_element_type":
        return x.astype(node.params["new_dtype"])
    given = [constant(v) for v in node.inputs]
    return _OPERATIONS[node.name](*(x if known is None else known for known in given))
