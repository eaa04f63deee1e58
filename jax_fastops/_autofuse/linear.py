"""Sums of cross entropy losses whose logits are a product with a table, and perhaps a bias.

The logits have no other use, so ``linear_cross_entropy`` computes them in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fastops import _implementation
from jax_fastops._autofuse.graph import Value
from jax_fastops._autofuse.match import constant, identity, resolve, with_row
from jax_fastops.linear_cross_entropy import linear_cross_entropy

# ---- what is found in a program ------------------------------------------------------------------


class Summed(NamedTuple):
    """The losses that a value is the sum of, those that count, and the values between."""

    losses: Value
    where: tuple[Value, bool] | None  # a mask, and whether it is True for losses that count
    between: tuple[Value, ...]


def summed_at(value: Value) -> Summed | None:
    """The array whose elements a value is the sum of."""
    node = value.node
    if node is None or node.name != "reduce_sum" or value.shape or not value.is_floating:
        return None
    inner, shown, passed = resolve(node.inputs[0])
    if inner.node is None or shown != identity(inner):
        return None
    if inner.node.name != "select_n" or len(inner.node.inputs) != 3:
        return Summed(inner, None, (value, *passed))
    which, *cases = inner.node.inputs
    for keep, (zero, losses) in ((True, cases), (False, cases[::-1])):
        known = constant(zero)
        if known is not None and known == 0 and which.shape == losses.shape:
            source, shown, more = resolve(losses)
            if source.shape == losses.shape and shown == identity(losses):
                return Summed(source, (which, keep), (value, *passed, inner, *more))
    return None


class Product(NamedTuple):
    """Logits as ``x @ table.T + bias``, and the values between."""

    x: Value
    table: Value
    bias: Value | None
    transposed: bool  # whether the table is ``[d, v]``
    between: tuple[Value, ...]


def product_at(logits: Value) -> Product | str | None:
    """The product that logits are, or as text why the op does not compute it."""
    bias, raw = None, logits
    if logits.node is not None and logits.node.name == "add":
        raw, bias = next(with_row(logits), (logits, None))
    node = raw.node
    if node is None or node.name != "dot_general" or (bias is not None and not bias.is_floating):
        return None
    (left, right), batch = node.params["dimension_numbers"]
    a, b = node.inputs
    if any(batch) or tuple(left) != (len(a.shape) - 1,) or len(right) != 1 or len(b.shape) != 2:
        return None
    x, table = _narrow(a), _narrow(b)
    x, table = (x, table) if x.dtype == table.dtype else (a, b)
    if x.dtype != table.dtype or not x.is_floating:
        return "the operands of the product have two dtypes"
    if raw.dtype != x.dtype and not (x.dtype == jnp.bfloat16 and raw.dtype == jnp.float32):
        return f"logits in {raw.dtype} of operands in {x.dtype}"
    if not _is_default(node.params["precision"]) or node.params.get("out_sharding") is not None:
        return "the product has a precision or a sharding of its own"
    # The logits are read and written less, but the table's gradient is wider.
    if math.prod(x.shape[:-1]) < x.shape[-1] and _implementation.current() == "auto":
        return "the table is larger than the logits"
    between = (logits,) if bias is None else (logits, raw)
    return Product(x, _wide(table), bias, right[0] == 0, between)


def _is_default(precision) -> bool:
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT) for p in given)


def _narrow(value: Value) -> Value:
    """The array before casts to a wider dtype."""
    while value.node is not None and value.node.name == "convert_element_type":
        before = value.node.inputs[0]
        if not before.is_floating or before.dtype.itemsize >= value.dtype.itemsize:
            break
        value = before
    return value


def _wide(table: Value) -> Value:
    """The table before a cast to a narrower dtype, which the op makes itself."""
    node = table.node
    if node is None or node.name != "convert_element_type":
        return table
    before = node.inputs[0]
    wider = before.is_floating and before.dtype.itemsize > table.dtype.itemsize
    return before if wider else table


# ---- the calls -----------------------------------------------------------------------------------


def _parts(leaves) -> tuple:
    """The operands of the op, the labels and the mask."""
    x, table, bias = leaves["x"], leaves["table"], leaves.get("bias")
    table = table.T if leaves["transposed"] else table
    labels = leaves["labels"]
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    return x, table, bias, labels, leaves.get("where")


def _sum(x, table, bias, labels, where):
    return linear_cross_entropy(x, table, labels, bias=bias, where=where, reduction="sum")


def _is_class(labels, table):
    return (labels >= 0) & (labels < table.shape[0])


def _counted(mask, where):
    return mask if where is None else mask & where


def sum_by_label(leaves):
    """As by indexing: negative labels count from the end, and those that are no class give NaN."""
    x, table, bias, labels, where = _parts(leaves)
    labels = jnp.where(labels < 0, labels + table.shape[0], labels)
    wrong = jnp.any(_counted(~_is_class(labels, table), where))
    return _sum(x, table, bias, labels, where) + jnp.where(wrong, jnp.nan, 0)


def sum_by_sum(leaves):
    """As by a sum over the classes that are the label: one that is no class takes nothing off.

    Its loss is that of class 0, with what that takes off.
    """
    x, table, bias, labels, where = _parts(leaves)
    is_class = _is_class(labels, table)
    total = _sum(x, table, bias, jnp.where(is_class, labels, 0), where)
    first = (x.astype(total.dtype) * table[0].astype(x.dtype).astype(total.dtype)).sum(-1)
    first = first if bias is None else first + bias[0].astype(total.dtype)
    return total + jnp.sum(jnp.where(_counted(~is_class, where), first, 0))


def sum_of_one_hot(leaves):
    """A label that is no class has no loss."""
    return _sum(*_parts(leaves))


def nan_with_inf(total: Callable) -> Callable:
    """The same sum, but NaN if it is infinite: an infinite logit gives inf less itself."""

    def call(leaves):
        found = total(leaves)
        return found * jnp.where(jnp.isfinite(found), 1, jnp.nan)

    return call
