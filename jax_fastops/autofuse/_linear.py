"""Cross entropy losses whose logits are a product with a table, and perhaps a bias and a softcap.

The logits have no other use, so ``linear_cross_entropy`` computes them in chunks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fastops import _implementation
from jax_fastops.autofuse._losses import LossCall
from jax_fastops.autofuse._pattern import near
from jax_fastops.autofuse._pattern_rule import PatternRule
from jax_fastops.autofuse._rule import ROW, Read, Rewrite, Rule
from jax_fastops.autofuse._value import USED, Value


class LinearLossRule(Rule):
    """``linear_cross_entropy``, of losses or of their sum."""

    def match(self, value: Value) -> Rewrite | None:
        losses = _summed(value) or Losses(value)
        match = self.search.match(PatternRule, losses.each)
        if match is None or not isinstance(match.call.op, LossCall):
            return None
        (x, read), (labels, of_labels) = match.operands.values()
        logits, shown, passed = x.source()
        sizes = tuple(d for d in read.sizes if d != 1)
        if read.order or sizes != logits.sizes or shown != logits.identity:
            return None
        product = _product(logits, losses)
        between = {x, logits, *passed, losses.each, *losses.between}
        if isinstance(product, Product):
            between.update(product.between)
            nodes = {v.node for v in match.inner | between}
            if any(v.is_used_outside(nodes) for v in between - {value}):
                product = USED
        if isinstance(product, Product):
            *tokens, features = (end - start for start, end in product.part)
            reads = {
                "x": (product.x, Read((*tokens, features), part=product.part)),
                "table": product.table,
                "labels": (labels, dataclasses.replace(of_labels, sizes=tuple(tokens))),
            }
            if product.bias is not None:
                reads["bias"] = product.bias, ROW
            if losses.where is not None:
                mask, keep = losses.where
                reads["where"] = mask, Read(tuple(tokens), None, keep)
            options = dict(match.call.options) | {
                "transposed": product.transposed,
                "softcap": product.softcap,
                "reduction": "sum" if losses.between else "none",
            }
            op, name = match.call.op.of_product, "linear_cross_entropy"
            product = self.search.rewrite(name, op, [value], reads, options, match.inner | between)
            if isinstance(product, Rewrite):
                return product
        if product and not losses.between:  # each loss has the reason of the sum
            self.miss("linear_cross_entropy", value, product, True)
        return None


class Losses(NamedTuple):
    """The loss of each token, which of them count, and the values between these and their sum.

    If there are no such values, the losses are not summed.
    """

    each: Value
    where: tuple[Value, bool] | None = None  # a mask, and whether it is True for those that count
    between: tuple[Value, ...] = ()


def _summed(value: Value) -> Losses | None:
    """The array whose elements a value is the sum of."""
    node = value.node
    if node is None or node.name != "reduce_sum" or value.shape:
        return None
    inner, shown, passed = node.inputs[0].source()
    if inner.node is None or shown != inner.identity:
        return None
    selections = list(inner.selections())
    for mask, losses, zero, keep in selections:
        whole = losses.whole_source() if zero.number == 0 else None
        if whole is not None and mask.shape == losses.shape:
            return Losses(whole[0], (mask, keep), (value, *passed, inner, *whole[1]))
    return None if selections else Losses(inner, None, (value, *passed))


class Product(NamedTuple):
    """Logits as ``x[part] @ table.T + bias``, perhaps with a softcap, and the values between."""

    x: Value
    part: tuple[tuple[int, int], ...]  # the range along each dimension
    table: Value
    bias: Value | None
    transposed: bool  # whether the table is ``[d, v]``
    softcap: float | None
    between: tuple[Value, ...]


def _product(logits: Value, losses: Losses) -> Product | str | None:
    """The product that gives the logits, or as text why the op does not compute it."""
    part, whole, cut = _part(logits)
    softcap, biased, capped = _softcap(whole)
    bias, raw = None, biased
    if biased.node is not None and biased.node.name == "add":
        raw, bias = next(biased.with_row(), (biased, None))
    node = raw.node
    if node is None or node.name != "dot_general" or (bias is not None and not bias.is_floating):
        return None
    (left, right), batch = node.params["dimension_numbers"]
    a, b = node.inputs
    if any(batch) or tuple(left) != (len(a.shape) - 1,) or len(right) != 1 or len(b.shape) != 2:
        return None
    x, table = _before_widening(a), _before_widening(b)
    x, table = (x, table) if x.dtype == table.dtype else (a, b)
    if x.dtype != table.dtype or not x.is_floating:
        return "the operands of the product have two dtypes"
    if raw.dtype != x.dtype and not (x.dtype == jnp.bfloat16 and raw.dtype == jnp.float32):
        return f"logits in {raw.dtype} of operands in {x.dtype}"
    precision = node.params["precision"]
    precisions = set(precision if isinstance(precision, tuple) else (precision,))
    if precisions - {None, lax.Precision.DEFAULT} or node.params.get("out_sharding") is not None:
        return "the product has a precision or a sharding of its own"
    if _implementation.current() == "auto":
        # The logits are read and written less, but the table's gradient is wider.
        if math.prod(x.shape[:-1]) < x.shape[-1]:
            return "the table is larger than the logits"
        # The backward computes the logits again, but none of them are in the wider dtype.
        if not losses.between and losses.each.dtype == x.dtype:
            return "the losses are not summed"
    part = (*part, (0, x.shape[-1]))
    between = (*cut, *capped, biased, raw)
    return Product(x, part, _before_narrowing(table), bias, right[0] == 0, softcap, between)


def _part(logits: Value) -> tuple[tuple[tuple[int, int], ...], Value, tuple[Value, ...]]:
    """The tokens that have these logits, the logits of all tokens, and the values between."""
    node, whole = logits.node, tuple((0, n) for n in logits.shape[:-1])
    if node is None or node.name != "slice" or any(n != 1 for n in node.params["strides"] or ()):
        return whole, logits, ()
    ends = node.params["start_indices"], node.params["limit_indices"]
    *part, classes = zip(*ends, strict=True)
    before = node.inputs[0].whole_source()
    if before is None or classes != (0, before[0].shape[-1]):
        return whole, logits, ()
    return tuple(part), before[0], (logits, *before[1], before[0])


def _softcap(logits: Value) -> tuple[float | None, Value, tuple[Value, ...]]:
    """The ``c`` and ``x`` of logits ``c * tanh(x / c)``, and the values between."""
    outer = _multiple(logits)
    node = None if outer is None else outer[1].node
    inner = None if node is None or node.name != "tanh" else _multiple(node.inputs[0])
    if outer is None or inner is None:
        return None, logits, ()
    (cap, _, first), (inverse, x, second) = outer, inner
    if cap <= 0 or not near(inverse, 1 / cap, float(jnp.finfo(logits.dtype).eps)):
        return None, logits, ()
    return cap, x, (*first, *second)


def _multiple(value: Value) -> tuple[float, Value, list[Value]] | None:
    """The number and the array whose product a value is, and the values between."""
    if (multiple := value.multiple) is None or multiple[1].shape != value.shape:
        return None
    whole = multiple[1].whole_source()
    return None if whole is None else (multiple[0], whole[0], [value, *whole[1], whole[0]])


def _before_cast(value: Value) -> Value:
    """The floating array of which a cast makes this one, or this one."""
    node = value.node
    if node is None or node.name != "convert_element_type" or not node.inputs[0].is_floating:
        return value
    return node.inputs[0]


def _before_widening(value: Value) -> Value:
    """The array before casts to a wider dtype."""
    before = _before_cast(value)
    return _before_widening(before) if before.dtype.itemsize < value.dtype.itemsize else value


def _before_narrowing(table: Value) -> Value:
    """The table before a cast to a narrower dtype, which the op makes itself."""
    before = _before_cast(table)
    return before if before.dtype.itemsize > table.dtype.itemsize else table
