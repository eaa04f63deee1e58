"""Masks whose elements are known when a program is traced, such as causal ones.

An element that is masked by a large negative number has the weight 0, unless its row has no other
elements. So such a mask may become the mask of an op only if each row is known to have one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fastops.autofuse._numpy import ARRAYS
from jax_fastops.autofuse._value import NO_EQUATION, Value

_MAX_SIZE = 1 << 24  # it takes too long to compute more elements


def masked(value: Value, axis: int) -> tuple[Value, Value, bool] | None:
    """The array before a mask, the mask, and for which of its elements (0 or not) one counts.

    ``None`` if the value has no mask, or a row might have no element that counts. ``axis`` is a
    number of a long dimension.
    """
    node = value.node
    axis = value.long[axis]
    for which, x, fill, keep in value.selections():
        if fill.number is not None and is_fill(fill.number, value.dtype):
            known = no_row_is_empty(which, axis, keep, None)
            return (x, *_compared(which, keep)) if known else None
    if node.name == "add":
        for x, mask in (node.inputs, node.inputs[::-1]):
            same = x.shape == value.shape and len(mask.shape) == len(x.shape)
            if same and no_row_is_empty(mask, axis, False, value.dtype):
                return x, mask, False
    return None


def _compared(mask: Value, keep: bool) -> tuple[Value, bool]:
    """If the mask is ``x != 0`` (jnp.where adds this), ``x``."""
    source, shown, _ = mask.source()
    node = source.node
    if node.name not in ("ne", "eq") or len(source.shape) != len(mask.shape):
        return mask, keep
    pairs = zip(mask.long, shown, strict=True)
    in_place = all(i is None or source.long[i] == place for place, i in pairs)
    numbers, zero = node.inputs
    if in_place and numbers.shape == source.shape and zero.number == 0:
        return numbers, keep is (node.name == "ne")
    return mask, keep


def is_fill(number, dtype):
    """Whether a number is far below all logits."""
    return np.float64(number) <= max(-1e9, float(jnp.finfo(dtype).min) / 2)


_known: dict[tuple, bool] = {}


def no_row_is_empty(mask: Value, axis: int, keep: bool, added_to) -> bool:
    """Whether each row is known to have an element that counts.

    A mask that is added to logits of a dtype has no elements but 0 and large negative numbers.
    """
    if axis not in mask.long:
        return False
    source, shown, _ = mask.source()
    along = shown[mask.long.index(axis)]
    if (name := name_of(source)) is None:
        return False
    key = name, along, keep, added_to
    if key not in _known:
        elements = elements_of(source)
        wide = elements.astype(np.float64) if added_to is not None else 0.0
        counts = np.reshape(elements != 0, source.sizes) == keep
        counts = counts if along is None else counts.any(along)
        is_mask = (wide == 0) | (added_to is not None and is_fill(wide, added_to))
        _known[key] = bool(counts.all() and np.all(is_mask))
    return _known[key]


def name_of(value: Value) -> tuple | None:
    """A name of an array whose elements are known, the same for equal ones."""
    if not value.is_static or value.size > _MAX_SIZE:
        return None
    node = value.node
    if node is NO_EQUATION:
        known = value.number if value.array is None else np.asarray(value.array)
        return None if known is None else (known.shape, str(known.dtype), hash(known.tobytes()))
    if node.name not in ARRAYS:
        return None
    names: list[tuple] = []
    for operand in node.inputs:
        if (name := name_of(operand)) is None:  # the others may be large sums of sums
            return None
        names.append(name)
    return node.name, str(node.params), value.shape, *names


def elements_of(value: Value) -> Any:
    """The elements of an array that has a name."""
    node = value.node
    if node is NO_EQUATION:
        known = value.number if value.array is None else value.array
        return np.broadcast_to(np.asarray(known), value.shape)
    operands = map(elements_of, node.inputs)
    with np.errstate(all="ignore"):
        return ARRAYS[node.name](node.params, *operands).astype(value.dtype, copy=False)
