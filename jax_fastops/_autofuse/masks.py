"""Masks whose elements are known when a program is traced, such as causal ones.

An element that is masked by a large negative number has the weight 0, unless its row has no other
elements. So such a mask may become the mask of an op only if each row is known to have one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fastops._autofuse.graph import Value
from jax_fastops._autofuse.meaning import UFUNCS, constant, resolve, selections_of

_MOST = 1 << 24  # elements; it takes too long to compute more
_COMPUTED = UFUNCS | {"and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert}


def masked(value: Value, axis: int) -> tuple[Value, Value, bool] | None:
    """The array before a mask, the mask, and for which of its elements (0 or not) one counts.

    ``None`` if the value has no mask, or a row might have no element that counts. ``axis`` is a
    number of a long dimension.
    """
    node = value.node
    if node is None:
        return None
    axis = value.long[axis]
    for which, x, fill, keep in selections_of(value):
        if (c := constant(fill)) is not None and _is_fill(c, value.dtype):
            known = _no_row_is_empty(which, axis, keep, None)
            return (x, *_compared(which, keep)) if known else None
    if node.name == "add":
        for x, mask in (node.inputs, node.inputs[::-1]):
            same = x.shape == value.shape and len(mask.shape) == len(x.shape)
            if same and _no_row_is_empty(mask, axis, False, value.dtype):
                return x, mask, False
    return None


def _compared(mask: Value, keep: bool) -> tuple[Value, bool]:
    """Numbers in place of a mask that compares them with 0, which jnp.where does to its mask."""
    source, shown, _ = resolve(mask)
    node = source.node
    if node is None or node.name not in ("ne", "eq") or len(source.shape) != len(mask.shape):
        return mask, keep
    pairs = zip(mask.long, shown, strict=True)
    in_place = all(i is None or source.long[i] == place for place, i in pairs)
    numbers, zero = node.inputs
    if in_place and numbers.shape == source.shape and constant(zero) == 0:
        return numbers, keep is (node.name == "ne")
    return mask, keep


def _is_fill(number, dtype):
    """Whether a number is far below all logits."""
    return np.float64(number) <= max(-1e9, float(jnp.finfo(dtype).min) / 2)


_known: dict[tuple, bool] = {}


def _no_row_is_empty(mask: Value, axis: int, keep: bool, added_to) -> bool:
    """Whether each row is known to have an element that counts.

    A mask that is added to logits of a dtype has no elements but 0 and large negative numbers.
    """
    if axis not in mask.long:
        return False
    source, shown, _ = resolve(mask)
    along = shown[mask.long.index(axis)]
    if (name := _name(source)) is None:
        return False
    key = name, along, keep, added_to
    if key not in _known:
        found = _elements(source)
        if found is None or (added_to is not None and not _is_added(found, added_to)):
            _known[key] = False
        else:
            counts = np.reshape(found != 0, source.sizes) == keep
            _known[key] = bool((counts if along is None else counts.any(along)).all())
    return _known[key]


def _is_added(mask: np.ndarray, dtype) -> bool:
    wide = mask.astype(np.float64)
    return bool(((wide == 0) | _is_fill(wide, dtype)).all())


def _name(value: Value) -> tuple | None:
    """Tells arrays apart whose elements are known. ``None`` for another array."""
    if not value.is_static or value.size > _MOST:
        return None
    if value.node is None:
        known = _given(value)
        return None if known is None else (known.shape, str(known.dtype), hash(known.tobytes()))
    node = value.node
    if node.name not in _COMPUTED and node.name not in _MOVED:
        return None
    names = [_name(v) for v in node.inputs]
    if any(name is None for name in names):
        return None
    return node.name, str(node.params), value.shape, *names


def _given(value: Value) -> np.ndarray | None:
    if value.constant is not None:
        return value.constant
    return None if value.array is None else np.asarray(value.array)


def _elements(value: Value) -> np.ndarray | None:
    """The elements of an array that has a name."""
    node = value.node
    if node is None:
        found = _given(value)
        return None if found is None else np.broadcast_to(found, value.shape)
    given: list[Any] = [_elements(v) for v in node.inputs]
    if any(x is None for x in given):
        return None
    if node.name in _COMPUTED:
        with np.errstate(all="ignore"):
            return _COMPUTED[node.name](*given).astype(value.dtype, copy=False)
    return _MOVED[node.name](node.params, value, *given)


def _iota(params, value):
    along = params["dimension"]
    shape = [d if i == along else 1 for i, d in enumerate(value.shape)]
    return np.broadcast_to(np.arange(value.shape[along]).reshape(shape), value.shape)


def _broadcast(params, value, x):
    shape = [1] * len(value.shape)
    for place, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[place] = size
    return np.broadcast_to(x.reshape(shape), value.shape)


_MOVED = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda params, value, x: x.astype(value.dtype),
    "select_n": lambda params, value, which, *cases: np.choose(which, cases),
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims", "copy"),
        lambda params, value, x: x.reshape(value.shape),
    ),
}
