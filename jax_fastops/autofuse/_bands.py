"""Masks of attention: their parts, and those that depend on ``column - row`` only.

A view of a mask has the dimensions of the weights of attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jax_fastops.autofuse import _numpy
from jax_fastops.autofuse._masks import elements_of, is_fill, name_of
from jax_fastops.autofuse._meaning import iota_wraps
from jax_fastops.autofuse._value import View


class Band(NamedTuple):
    """Where ``low <= column - row <= high``. ``row`` is a dimension of the weights."""

    row: int
    low: float
    high: float


def cases(view: View) -> tuple[View, Any, Any] | None:
    """A mask, and the two numbers of which an array consists: those of False and of True."""
    view = view.source(narrowing=True)
    node = view.value.node
    varying = [v for v in node.inputs if v.number is None]
    is_known = node.name in _numpy.ELEMENTWISE and (node.name != "div" or view.value.is_floating)
    if is_known and len(varying) == 1:
        if (found := cases(view.of(varying[0]))) is not None:
            mask, *numbers = found
            given = ([n if v is varying[0] else v.number for v in node.inputs] for n in numbers)
            function = _numpy.ELEMENTWISE[node.name]
            with np.errstate(all="ignore"):
                off, on = (np.asarray(function(node.params, *numbers)) for numbers in given)
            if off != on:
                return mask, off, on
    return (view, np.asarray(False), np.asarray(True)) if view.value.dtype == bool else None


def parts(view: View, keep: bool) -> Iterator[tuple[View, bool]]:
    """The masks that must all have their value, for this one to have the value ``keep``."""
    found = cases(view)
    if found is None:
        yield view, keep
        return
    view, _, on = found
    keep = keep is bool(on)
    node = view.value.node
    operands = node.inputs if node.name == ("and" if keep else "or") else ()
    if keep and node.name == "select_n" and node.inputs[1].number is not None:  # tril of a mask
        operands = () if node.inputs[1].number else node.inputs[::2]
    for operand in operands:
        yield from parts(view.of(operand), keep)
    if not operands:
        yield view, keep


# ---- bands ---------------------------------------------------------------------------------------


_known: dict[tuple, tuple[int, int] | None] = {}


def band(view: View, column: int, keep: bool) -> Band | None:
    """The band that a mask is. ``column`` is the dimension of the keys."""
    return _compared(view, column, keep) or _of_elements(view, column, keep=keep)


def added_band(view: View, column: int, factor: float, dtype: Any) -> Band | None:
    """The band of 0 in a multiple of an array, all other elements of which mask logits."""
    return _of_elements(view, column, factor=factor, dtype=dtype)


def _of_elements(view: View, column: int, **options: Any) -> Band | None:
    """The band of known elements."""
    source = view.source()
    rows = [i for i, place in enumerate(source.map) if place is not None and i != column]
    if len(rows) != 1 or source.map[column] is None or len(source.value.long) != 2:
        return None
    if (name := name_of(source.value)) is None:
        return None
    is_turned = source.map[column] == 0
    key = name, is_turned, *options.values()
    if key not in _known:
        mask = _counting(np.reshape(elements_of(source.value), source.value.sizes), **options)
        _known[key] = None if mask is None else _ends(mask.T if is_turned else mask)
    ends = _known[key]
    return None if ends is None else Band(rows[0], *ends)


def _counting(elements, keep: bool | None = None, factor: float = 1.0, dtype: Any = None) -> Any:
    """The elements of a mask that count, if it is one."""
    if keep is not None:
        return (elements != 0) == keep
    added = elements.astype(np.float64) * factor
    return added == 0 if np.all((added == 0) | is_fill(added, dtype)) else None


def _ends(mask: np.ndarray) -> tuple[int, int] | None:
    """The least and the largest ``column - row`` where a mask is True, if it is a band."""
    rows, columns = (np.arange(n, dtype=np.int32) for n in mask.shape)
    distance = columns - rows[:, None]
    if not mask.any():
        return None
    low, high = int(distance[mask].min()), int(distance[mask].max())
    is_band = np.array_equal(mask, (low <= distance) & (distance <= high))
    return (low, high) if is_band else None


def _compared(view: View, column: int, keep: bool) -> Band | None:
    """The band of a comparison of positions."""
    source = view.source()
    node = source.value.node
    if node.name not in ("lt", "le", "gt", "ge"):
        return None
    a, b = (source.of(v) for v in node.inputs)
    above = (node.name in ("gt", "ge")) is keep  # whether the difference is at least a number
    strict = (node.name in ("gt", "lt")) is keep
    first, second = _positions(a), _positions(b)
    if first is None or second is None:
        return None
    one = _distance(_minus(first, second), column)
    if one is None:
        return None
    row, sign, shift = one  # sign * (column - row) + shift
    limit = -shift + (strict if above else -strict)
    if above is (sign > 0):
        return Band(row, sign * limit, math.inf)
    return Band(row, -math.inf, sign * limit)


_Positions = tuple[dict[int, int], int]  # the sum of dimensions' indices with factors, and a number


def _minus(a: _Positions, b: _Positions) -> _Positions:
    factors = {i: a[0].get(i, 0) - b[0].get(i, 0) for i in (*a[0], *b[0])}
    return {i: factor for i, factor in factors.items() if factor}, a[1] - b[1]


def _positions(view: View) -> _Positions | None:
    """What an array of integers is in the indices of the dimensions."""
    view = view.source()
    value, node = view.value, view.value.node
    if value.dtype.kind != "i" or value.dtype.itemsize < 4:
        return None
    if value.number is not None:
        return {}, int(value.number)
    if node.name == "iota" and not iota_wraps(value):
        dimension = node.params["dimension"]
        if dimension not in value.long:
            return {}, 0
        place = value.long.index(dimension)
        return ({view.map.index(place): 1}, 0) if place in view.map else None
    if node.name in ("add", "sub"):
        a, b = (_positions(view.of(v)) for v in node.inputs)
        if a is not None and b is not None:
            b = _minus(({}, 0), b) if node.name == "add" else b
            return _minus(a, b)
    return None


def _distance(positions: _Positions | None, column: int) -> tuple[int, int, int] | None:
    """The row, the factor of ``column - row``, and the number, if this is what positions are."""
    if positions is None:
        return None
    factors, shift = positions
    sign = factors.get(column, 0)
    rows = [i for i in factors if i != column]
    if len(rows) != 1 or abs(sign) != 1 or factors[rows[0]] != -sign:
        return None
    return rows[0], sign, shift
