"""Attention heads, and halves of an array.

What a chain of reshapes, transpositions and slices does is known from the strides that it gives to
a NumPy array.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

import numpy as np

from jax_fastops.autofuse._attention import AttentionRule
from jax_fastops.autofuse._numpy import MOVES
from jax_fastops.autofuse._rule import ROW, Read, Rewrite, Rule
from jax_fastops.autofuse._value import Node, Value
from jax_fastops.heads import merge_heads, split_heads, split_qkv_heads

# It may take its operand transposed, if only one of its dimensions is a batch.
_PRODUCT = ("dot_general",)


class HeadsRule(Rule):
    """``split_heads``, ``split_qkv_heads`` and ``merge_heads``."""

    def match(self, value: Value) -> Rewrite | None:
        node = value.node
        if node.name not in MOVES or not value.is_plain or 0 in value.shape:
            return None
        if node.name == "reshape" and (x := _merged(value, node)) is not None:
            if self._is_of_attention(x):
                return None
            return self.rewrite("merge_heads", merge_heads, [value], {"x": x})
        # A value that another move uses belongs to the pattern of that move.
        return None if _is_used_by(value, MOVES) else self._split(value)

    def _is_of_attention(self, x: Value) -> bool:
        """Whether an array is the result of attention, whose op has the heads merged."""
        if self.search.match(AttentionRule, x) is not None:
            return True
        if x.node.name != "reshape":
            return False
        match = self.search.match(AttentionRule, x.node.inputs[0])
        return match is not None and bool(dict(match.call.options)["heads"])

    def _split(self, value: Value) -> Rewrite | None:
        """The sum with a bias, split into heads: one array, or queries, keys and values."""
        total, moves = value, set()
        while total.node.name in MOVES:
            moves.add(total.node.name)
            total = total.node.inputs[0]
        if "transpose" not in moves or len(value.shape) < 3:
            return None
        *lead, heads, sequence, size = value.shape
        parts = total.shape[-1] // (heads * size)
        whole = (*lead, sequence, parts * heads * size)
        if parts == 1 in (heads, sequence):  # nothing moves
            return None
        if parts not in (1, 3) or not _has_rows_of(total, whole):
            return None
        array = np.empty(total.shape, np.int8)  # never touched
        split = array.reshape(*whole[:-1], parts, heads, size)
        views = {_strides(y): v for v, y in _views(total, array) if v.users or v.is_result}
        strides = [_strides(split[..., i, :, :].swapaxes(-3, -2)) for i in range(parts)]
        results = [views[key] for key in strides if key in views]
        if value not in results:
            return None
        if len(results) < parts:
            reason = "not all of queries, keys and values are split like this"
            return self.miss("split_heads", value, reason)
        # Attention's products have two batches, sequences and heads: XLA makes them neighbors.
        others = MOVES if parts == 3 else (*MOVES, *_PRODUCT)
        if any(_is_used_by(v, others) for v in results):
            return None
        for x, row in total.with_row():
            name, op = ("x", split_heads) if parts == 1 else ("qkv", split_qkv_heads)
            reads = {name: (x, Read(whole)), "bias": (row, ROW)}
            return self.rewrite(f"bias + {op.__name__}", op, results, reads, num_heads=heads)
        return self.miss("split_heads", value, "no bias is added before the heads are split")


def _merged(value: Value, node: Node) -> Value | None:
    """The heads that a reshape merges."""
    before = node.inputs[0].node
    if before.name != "transpose" or _is_used_by(value, ("transpose",)):
        return None
    x = before.inputs[0]
    if len(x.shape) < 3:
        return None
    *lead, heads, sequence, size = x.shape
    array = np.empty(x.shape, np.int8)  # never touched
    views = array.transpose(before.params["permutation"]), array.swapaxes(-3, -2)
    moved, merged = (_strides(np.squeeze(view)) for view in views)
    if moved != merged or not _has_rows_of(value, (*lead, sequence, heads * size)):
        return None
    of_attention = x.node.name in _PRODUCT
    return x if of_attention or not _is_used_by(value, _PRODUCT) else None


def _is_used_by(value: Value, names: Container[str]) -> bool:
    return any(user.name in names for user in _users(value))


def _users(value: Value) -> Iterator[Node]:
    """Users of the value, looking through a transpose that feeds only dot products."""
    for user in value.users:
        turned = user.outputs[0] if user.name == "transpose" else None
        if turned is None or turned.is_result or any(u.name not in _PRODUCT for u in turned.users):
            yield user
        else:
            yield from turned.users


def _views(source: Value, array: np.ndarray) -> Iterator[tuple[Value, np.ndarray]]:
    """The values that moves make of a value, and the views of its array."""
    yield source, array
    for node in source.users:
        if node.name in MOVES and node.inputs[0] is source:
            views = MOVES[node.name](node.params, array)
            views = views if isinstance(views, list) else [views]
            for value, view in zip(node.outputs, views, strict=True):
                if np.may_share_memory(view, array):
                    yield from _views(value, view)


def _strides(x: np.ndarray) -> tuple:
    """A key that two views of the same elements share. An axis of size 1 has any stride."""
    strides = tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True))
    return x.shape, strides, x.__array_interface__["data"][0]


def joined(first: Value, second: Value) -> Value | None:
    """The array whose halves along the last axis are these two values."""
    if first.node.name not in MOVES:
        return None
    source = first.node.inputs[0]
    if source.shape != (*first.shape[:-1], 2 * first.shape[-1]):
        return None
    array = np.empty(source.shape, np.int8)  # never touched
    values = {_strides(view): v for v, view in _views(source, array)}
    halves = [values.get(_strides(half)) for half in np.split(array, 2, -1)]
    return source if halves == [first, second] else None


def _has_rows_of(value: Value, shape: tuple[int, ...]) -> bool:
    """Whether a value has the rows of an array of this shape. Batches may be one dimension."""
    return value.shape[-1:] == shape[-1:] and value.size == math.prod(shape)
