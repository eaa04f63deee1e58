"""Cross entropy losses whose logits are a product with a table, and perhaps a bias and a softcap.

The logits have no other use, so ``linear_cross_entropy`` computes them in chunks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fastops import _implementation
from jax_fastops.autofuse._losses import LossCall
from jax_fastops.autofuse._one_hot import OneHotLossRule
from jax_fastops.autofuse._pattern import near
from jax_fastops.autofuse._pattern_rule import PatternRule
from jax_fastops.autofuse._rule import ROW, Read, Rewrite, Rule
from jax_fastops.autofuse._value import USED, Value, values_between


class LinearLossRule(Rule):
    """``linear_cross_entropy``, of losses or of their sum."""

    def match(self, value: Value) -> Rewrite | None:
        losses, where = _summed(value) or (value, None)
        rules = OneHotLossRule, PatternRule
        match = next(filter(None, (self.search.match(rule, losses) for rule in rules)), None)
        if match is None or not isinstance(match.call.op, LossCall):
            return None
        (x, read), (labels, read_labels), *factors = match.operands.values()
        numbers = dict(match.call.options)
        summed = numbers.pop("summed", ())
        part = len(summed) not in (0, len(read.sizes) - 1)
        if factors or part or read_labels.sizes != read.sizes[:-1]:
            return None
        each = losses is value and not summed
        logits, sizes = x.source(), tuple(d for d in read.sizes if d != 1)
        if read.order or sizes != logits.value.sizes or not logits.is_whole:
            return None
        product = _product(logits.value, losses.dtype if each else None)
        if isinstance(product, Product):
            between = {losses, *logits.passed} | values_between(logits.value, product.ends)
            between |= values_between(value, {losses} if where is None else {losses, where[0]})
            nodes = {v.node for v in match.inner | between}
            if any(v.is_used_outside(nodes) for v in between - {value}):
                product = USED
            else:
                *tokens, features = (end - start for start, end in product.part)
                reads = {
                    "x": (product.x, Read((*tokens, features), part=product.part)),
                    "table": product.table,
                    "labels": (labels, dataclasses.replace(read_labels, sizes=tuple(tokens))),
                }
                if product.bias is not None:
                    reads["bias"] = product.bias, ROW
                if where is not None:
                    reads["where"] = where[0], Read(tuple(tokens), None, where[1])
                options = numbers | {
                    "transposed": product.transposed,
                    "softcap": product.softcap,
                    "reduction": "none" if each else "sum",
                }
                op, inner = match.call.op.of_product, match.inner | between
                name = "linear_cross_entropy"
                product = self.search.rewrite(name, op, [value], reads, options, inner)
        if isinstance(product, Rewrite):
            return product
        if product and each:  # each loss has the reason of the sum
            self.miss("linear_cross_entropy", value, product, True)
        return None


def _summed(value: Value) -> tuple[Value, tuple[Value, bool] | None] | None:
    """The array that a value is the sum of. If some of its elements count, the mask and its sign.

    The sign is True if the mask is True for those that count.
    """
    node = value.node
    if node.name != "reduce_sum" or value.shape:
        return None
    inner = node.inputs[0].source()
    if not inner.is_whole:
        return None
    selections = list(inner.value.selections())
    for mask, losses, zero, keep in selections:
        whole = losses.whole_source() if zero.number == 0 else None
        if whole is not None and mask.shape == losses.shape:
            return whole.value, (mask, keep)
    return None if selections else (inner.value, None)


class Product(NamedTuple):
    """Logits as ``x[part] @ table.T + bias``, perhaps with a softcap.

    ``ends`` are the operands of the program's product and its bias.
    """

    x: Value
    part: tuple[tuple[int, int], ...]  # the range along each dimension
    table: Value
    bias: Value | None
    transposed: bool  # whether the table is ``[d, v]``
    softcap: float | None
    ends: set[Value]


def _product(logits: Value, dtype: Any) -> Product | str | None:
    """The product that gives the logits, or as text why the op does not compute it.

    ``dtype`` is that of the losses if they are not summed.
    """
    part, whole = _part(logits)
    softcap, biased = _softcap(whole)
    bias, raw = None, biased
    if biased.node.name == "add":
        raw, bias = next(biased.with_row(), (biased, None))
    node = raw.node
    if node.name != "dot_general" or (bias is not None and not bias.is_floating):
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
        if dtype is not None and dtype == x.dtype:
            return "the losses are not summed"
    part = (*part, (0, x.shape[-1]))
    ends = {a, b} if bias is None else {a, b, bias}
    return Product(x, part, _before_narrowing(table), bias, right[0] == 0, softcap, ends)


def _part(logits: Value) -> tuple[tuple[tuple[int, int], ...], Value]:
    """The tokens that have these logits, and the logits of all tokens."""
    node, all_tokens = logits.node, tuple((0, n) for n in logits.shape[:-1])
    if node.name == "slice" and set(node.params["strides"] or ()) <= {1}:
        ends = node.params["start_indices"], node.params["limit_indices"]
        *part, classes = zip(*ends, strict=True)
        before = node.inputs[0].whole_source()
        if before is not None and classes == (0, before.value.shape[-1]):
            return tuple(part), before.value
    return all_tokens, logits


def _softcap(logits: Value) -> tuple[float | None, Value]:
    """The ``c`` and ``x`` of logits ``c * tanh(x / c)``."""
    cap, outer = _multiple(logits)
    if outer.node.name == "tanh" and cap > 0:
        inverse, x = _multiple(outer.node.inputs[0])
        if near(inverse, 1 / cap, float(jnp.finfo(logits.dtype).eps)):
            return cap, x
    return None, logits


def _multiple(value: Value) -> tuple[float, Value]:
    """The number and the array whose product a value is."""
    if (multiple := value.multiple) is not None and multiple[1].shape == value.shape:
        if (whole := multiple[1].whole_source()) is not None:
            return multiple[0], whole.value
    return 1.0, value


def _before_cast(value: Value) -> Value:
    """The floating array of which a cast makes this one, or this one."""
    node = value.node
    cast = node.name == "convert_element_type" and node.inputs[0].is_floating
    return node.inputs[0] if cast else value


def _before_widening(value: Value) -> Value:
    """The array before casts to a wider dtype."""
    before = _before_cast(value)
    return _before_widening(before) if before.dtype.itemsize < value.dtype.itemsize else value


def _before_narrowing(table: Value) -> Value:
    """The table before a cast to a narrower dtype, which the op makes itself."""
    before = _before_cast(table)
    return before if before.dtype.itemsize > table.dtype.itemsize else table
