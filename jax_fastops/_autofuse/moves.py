"""Patterns that are no formulas of elements: windows, and attention heads.

What a chain of reshapes, transpositions and slices does is known from the strides that it gives to
a NumPy array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import numpy as np

from jax_fastops import _implementation
from jax_fastops._autofuse.graph import Node, Value
from jax_fastops._autofuse.meaning import with_row
from jax_fastops._dispatch import lowering_platform
from jax_fastops.heads import merge_heads, split_heads, split_qkv_heads
from jax_fastops.max_pool import max_pool
from jax_fastops.window_sum import window_sum


class Move(NamedTuple):
    """A pattern, its results, the values by operand, and the call that replaces it."""

    name: str
    results: list[Value]
    reads: dict[str, Value]
    op: Callable
    axis: int = 0
    numbers: tuple[tuple[str, Any], ...] = ()

    @property
    def rate(self) -> float:
        """That of a dropout."""
        return dict(self.numbers)["rate"]


def move_at(value: Value) -> Move | str | None:
    """The pattern whose result, or one of whose results, is this value.

    A text says why heads that are split stay as they are.
    """
    node = value.node
    if node is None or not value.is_floating or value.aval.weak_type or not value.is_static:
        return None
    if node.name == "reduce_window_sum":
        return _window(value, node)
    if node.name == "reduce_window_max":
        return _pool(value, node)
    if node.name == "reshape" and (merged := _merged(value, node)) is not None:
        return merged
    # A value that another move uses belongs to the pattern of that move.
    return _split(value) if node.name in _MOVES and not _is_used_by(value, _MOVES) else None


def _is_used_by(value: Value, names: Container[str]) -> bool:
    return any(user.name in names for user in _users(value))


def _users(value: Value) -> Iterator[Node]:
    """What uses a value, also if that takes it transposed, which only a product does."""
    for user in value.users:
        after = user.outputs[0]
        products = not after.is_result and all(u.name in _PRODUCT for u in after.users)
        yield from after.users if user.name == "transpose" and products else [user]


# It may take its operand transposed, if only one of its dimensions is a batch.
_PRODUCT = ("dot_general",)


def _window(value: Value, node: Node) -> Move | None:
    sizes = node.params["window_dimensions"]
    wide = [i for i, size in enumerate(sizes) if size != 1]
    plain = ("window_strides", "base_dilation", "window_dilation")
    if len(wide) != 1 or any(n != 1 for name in plain for n in node.params[name]):
        return None
    axis, padding = wide[0], list(node.params["padding"])
    around, radius = tuple(padding.pop(axis)), sizes[axis] // 2
    if sizes[axis] % 2 == 0 or around not in ((0, 0), (radius, radius)) or any(map(any, padding)):
        return None
    numbers = (("radius", radius), ("padding", "SAME" if around[0] else "VALID"))
    return Move("window_sum", [value], {"x": node.inputs[0]}, _window_sum, axis, numbers)


def _window_sum(leaves, axis):
    return window_sum(leaves["x"], leaves["radius"], axis=axis, padding=leaves["padding"])


_MOST_OF_WINDOW = 9  # in larger windows, XLA's search may cost less than the loads


def _pool(value: Value, node: Node) -> Move | None:
    params = node.params
    dilations = (*params["base_dilation"], *params["window_dilation"])
    if not _pools() or set(dilations) != {1}:
        return None
    if not 1 < math.prod(params["window_dimensions"]) <= _MOST_OF_WINDOW:
        return None
    numbers = (
        ("window", tuple(params["window_dimensions"])),
        ("strides", tuple(params["window_strides"])),
        ("padding", tuple(map(tuple, params["padding"]))),
    )
    return Move("max_pool", [value], {"x": node.inputs[0]}, _max_pool, 0, numbers)


def _pools() -> bool:
    """Whether a pooling is replaced. On a CPU, XLA's gradient of 3x3 windows is often faster."""
    implementation = _implementation.current()
    return implementation == "native" or (implementation == "auto" and lowering_platform() != "cpu")


def _max_pool(leaves, axis):
    del axis
    return max_pool(leaves["x"], leaves["window"], leaves["strides"], leaves["padding"])


# ---- heads ---------------------------------------------------------------------------------------

_Strides = tuple[tuple[int, ...], tuple[int, ...], int]


def _slice(params, x):
    steps = params["strides"] or (1,) * x.ndim
    ranges = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*r) for r in ranges)]


def _pieces(params, x):
    return np.split(x, np.cumsum(params["sizes"])[:-1], axis=params["axis"])


def _reshape(params, x):
    y = x.reshape(params["new_sizes"])
    if not np.may_share_memory(x, y):
        raise AttributeError("it would copy")
    return y


_MOVES: dict[str, Callable] = {
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "reshape": _reshape,
    "slice": _slice,
    "split": _pieces,
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),  # of jax 0.12
}


def _moved(source: Value, array: np.ndarray) -> Iterator[tuple[Value, np.ndarray]]:
    """What moves make of a value, and the view of its array."""
    yield source, array
    for node in source.users:
        if node.name in _MOVES and node.inputs[0] is source:
            try:
                found = _MOVES[node.name](node.params, array)
            except (AttributeError, ValueError):
                continue
            found = found if isinstance(found, list) else [found]
            for value, view in zip(node.outputs, found, strict=True):
                yield from _moved(value, view)


def _strides(x: np.ndarray) -> _Strides:
    """A key that two views of the same elements share. An axis of size 1 has any stride."""
    strides = tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True))
    return x.shape, strides, x.__array_interface__["data"][0]


def joined(first: Value, second: Value) -> Value | None:
    """The array whose halves along the last axis two values are."""
    if first.node is None or first.node.name not in _MOVES:
        return None
    source = first.node.inputs[0]
    if source.shape != (*first.shape[:-1], 2 * first.shape[-1]):
        return None
    array = np.empty(source.shape, np.int8)  # never touched
    found = {_strides(view): v for v, view in _moved(source, array)}
    halves = [found.get(_strides(half)) for half in np.split(array, 2, -1)]
    return source if halves == [first, second] else None


def _long(shape) -> list[int]:
    return [n for n in shape if n != 1]


def _split(value: Value) -> Move | str | None:
    """The sum with a bias, split into heads: one array, or queries, keys and values."""
    total, moves = value, set()
    while total.node is not None and total.node.name in _MOVES:
        moves.add(total.node.name)
        total = total.node.inputs[0]
    if "transpose" not in moves or len(value.shape) < 3 or 0 in value.shape:
        return None
    *lead, heads, sequence, size = value.shape
    parts = total.shape[-1] // (heads * size)
    whole = (*lead, sequence, parts * heads * size)
    if parts == 1 in (heads, sequence):  # nothing moves
        return None
    if parts not in (1, 3) or _long(total.shape) != _long(whole) or total.shape[-1] != whole[-1]:
        return None
    array = np.empty(total.shape, np.int8)  # never touched
    pieces = array.reshape(*whole[:-1], parts, heads, size)
    wanted = [_strides(pieces[..., i, :, :].swapaxes(-3, -2)) for i in range(parts)]
    found = {_strides(view): v for v, view in _moved(total, array) if v.users or v.is_result}
    results = [found[strides] for strides in wanted if strides in found]
    if value not in results:
        return None
    if len(results) < parts:
        return "not all of queries, keys and values are split like this"
    # The products of attention have two batches, sequences and heads, which XLA makes neighbors.
    others = _MOVES if parts == 3 else (*_MOVES, *_PRODUCT)
    if any(_is_used_by(v, others) for v in results):
        return None
    for x, row in with_row(total):
        name, op = ("split_heads", _split_heads) if parts == 1 else ("split_qkv_heads", _qkv)
        reads, numbers = {"x": x, "bias": row}, (("heads", heads), ("shape", whole))
        return Move("bias + " + name, results, reads, op, 0, numbers)
    return "no bias is added before the heads are split"


def _heads(op: Callable, leaves, axis):
    del axis
    x, bias = leaves["x"].reshape(leaves["shape"]), leaves["bias"].reshape(-1)
    return op(x, bias, num_heads=leaves["heads"])


_split_heads = functools.partial(_heads, split_heads)
_qkv = functools.partial(_heads, split_qkv_heads)


def _merged(value: Value, node: Node) -> Move | None:
    before = node.inputs[0].node
    if before is None or before.name != "transpose" or _is_used_by(value, ("transpose",)):
        return None
    x = before.inputs[0]
    if len(x.shape) < 3 or 0 in x.shape:
        return None
    *lead, heads, sequence, size = x.shape
    array = np.empty(x.shape, np.int8)  # never touched
    views = array.transpose(before.params["permutation"]), array.swapaxes(-3, -2)
    moved, wanted = (_strides(np.squeeze(view)) for view in views)
    if moved != wanted or _long(value.shape) != _long((*lead, sequence, heads * size)):
        return None
    of_attention = x.node is not None and x.node.name in _PRODUCT
    if not of_attention and _is_used_by(value, _PRODUCT):
        return None
    return Move("merge_heads", [value], {"x": x}, _merge_heads)


def _merge_heads(leaves, axis):
    del axis
    return merge_heads(leaves["x"])
