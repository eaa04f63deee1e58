"""Cross entropy losses whose logits are a product with a table, and perhaps a bias and a softcap.

The logits have no other use, so ``linear_cross_entropy`` computes them in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fastops import _implementation
from jax_fastops._autofuse.formulas import near
from jax_fastops._autofuse.graph import Value
from jax_fastops._autofuse.meaning import (
    constant,
    identity,
    multiple_of,
    resolve,
    selections_of,
    with_row,
)
from jax_fastops._signature import accumulator_dtype
from jax_fastops.linear_cross_entropy import linear_cross_entropy

# ---- what is found in a program ------------------------------------------------------------------


class Losses(NamedTuple):
    """The loss of each token, which of them count, and the values between these and their sum.

    Without such values, the losses are not summed.
    """

    each: Value
    where: tuple[Value, bool] | None = None  # a mask, and whether it is True for those that count
    between: tuple[Value, ...] = ()

    @property
    def reduction(self) -> str:
        return "sum" if self.between else "none"


def summed_at(value: Value) -> Losses | None:
    """The array whose elements a value is the sum of."""
    node = value.node
    if node is None or node.name != "reduce_sum" or value.shape or not value.is_floating:
        return None
    inner, shown, passed = resolve(node.inputs[0])
    if inner.node is None or shown != identity(inner):
        return None
    selections = list(selections_of(inner))
    for which, losses, zero, keep in selections:
        if constant(zero) == 0 and which.shape == losses.shape:
            source, shown, more = resolve(losses)
            if source.shape == losses.shape and shown == identity(losses):
                return Losses(source, (which, keep), (value, *passed, inner, *more))
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


def product_at(logits: Value, losses: Losses) -> Product | str | None:
    """The product that logits are, or as text why the op does not compute it."""
    part, whole, cut = _part(logits)
    softcap, biased, capped = _softcap(whole)
    bias, raw = None, biased
    if biased.node is not None and biased.node.name == "add":
        raw, bias = next(with_row(biased), (biased, None))
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
    if _implementation.current() == "auto":
        # The logits are read and written less, but the table's gradient is wider.
        if math.prod(x.shape[:-1]) < x.shape[-1]:
            return "the table is larger than the logits"
        # The backward computes the logits again, but none of them are in the wider dtype.
        if losses.reduction == "none" and losses.each.dtype == x.dtype:
            return "the losses are not summed"
    part = (*part, (0, x.shape[-1]))
    between = (*cut, *capped, biased, raw)
    return Product(x, part, _wide(table), bias, right[0] == 0, softcap, between)


def _part(logits: Value) -> tuple[tuple[tuple[int, int], ...], Value, tuple[Value, ...]]:
    """The tokens that the logits are of, the logits of all tokens, and the values between."""
    node, whole = logits.node, tuple((0, n) for n in logits.shape[:-1])
    if node is None or node.name != "slice" or any(n != 1 for n in node.params["strides"] or ()):
        return whole, logits, ()
    before, shown, passed = resolve(node.inputs[0])
    ends = node.params["start_indices"], node.params["limit_indices"]
    *part, classes = zip(*ends, strict=True)
    same = before.shape == node.inputs[0].shape and shown == identity(before)
    if not same or classes != (0, before.shape[-1]):
        return whole, logits, ()
    return tuple(part), before, (logits, *passed, before)


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
    """A number and the array that a value is the product of, and the values between."""
    multiple = multiple_of(value)
    if multiple is None:
        return None
    source, shown, passed = resolve(multiple[1])
    if source.shape != value.shape or shown != identity(value):
        return None
    return multiple[0], source, [value, *passed, source]


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


class _Call(NamedTuple):
    """The operands of the op, and its options."""

    x: Any
    table: Any
    bias: Any
    labels: Any
    where: Any
    options: dict[str, Any]

    def losses(self, labels, more=None):
        """The losses or their sum, where ``more`` is added to the loss of each token."""
        given = dict(bias=self.bias, where=self.where, **self.options)
        found = linear_cross_entropy(self.x, self.table, labels, **given)
        if more is None:
            return found
        if self.options["reduction"] == "none":
            return found + more
        return found + jnp.sum(more if self.where is None else jnp.where(self.where, more, 0))

    def finite_class(self):
        """A class whose logits are finite. The bias of those that are no class may be -inf."""
        return 0 if self.bias is None else jnp.argmax(self.bias).astype(self.labels.dtype)

    def logits_of(self, index):
        """The logits of one class, in the dtype of the losses."""
        wide = accumulator_dtype(self.x.dtype)
        row = self.table[index].astype(self.x.dtype).astype(wide)
        found = (self.x.astype(wide) * jnp.broadcast_to(row, self.x.shape)).sum(-1)
        found = found if self.bias is None else found + self.bias[index].astype(wide)
        cap = self.options["softcap"]
        return found if cap is None else cap * jnp.tanh(found / cap)

    def has_low_bias(self):
        """Where a bias is -inf that the loss, or one of the losses in the sum, takes off."""
        if self.bias is None:
            return False
        low = self.bias == -jnp.inf
        if self.options.get("label_smoothing"):
            return low.any()
        found = low[self.labels]
        if self.options["reduction"] == "none":
            return found
        return (found if self.where is None else found & self.where).any()


def wide_labels(labels):
    """The labels in a dtype that can hold the number of classes."""
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def from_the_end(labels, classes: int):
    """Labels of which negative ones count from the end, as indices do.

    A label that is no class becomes too large: its loss is NaN.
    """
    labels = wide_labels(labels)
    labels = jnp.where(labels < 0, labels + classes, labels)
    return jnp.where(labels < 0, classes, labels)


def nearest_class(labels, classes: int):
    """Labels as indices; one that is no class becomes the nearest class."""
    labels = wide_labels(labels)
    return jnp.clip(jnp.where(labels < 0, labels + classes, labels), 0, classes - 1)


def no_class_as_padding(labels, classes: int):
    """Labels of which those that are no class are -1, and so have no loss."""
    labels = wide_labels(labels)
    return jnp.where((labels >= 0) & (labels < classes), labels.astype(jnp.int32), -1)


def _call(leaves, options) -> _Call:
    table = leaves["table"].T if leaves["transposed"] else leaves["table"]
    labels = wide_labels(leaves["labels"])
    options |= {name: leaves[name] for name in ("softcap", "reduction")}
    return _Call(leaves["x"], table, leaves.get("bias"), labels, leaves.get("where"), options)


def linear_by_label(leaves, **options):
    """The losses of labels as indices: negative ones count from the end; no class gives NaN."""
    call = _call(leaves, options)
    return call.losses(from_the_end(call.labels, call.table.shape[0]))


def linear_by_sum(leaves, too_large: bool = False, **options):
    """The losses by ``sum(one_hot(label) * logits)``: a label that is no class subtracts nothing.

    Its loss is that of another class plus the logit of that class. If ``too_large``, only a
    negative label counts as no class, and a label that is too large gives NaN.
    """
    call = _call(leaves, options)
    is_class, share = call.labels >= 0, 1 - options.get("label_smoothing", 0.0)
    if not too_large:
        is_class &= call.labels < call.table.shape[0]
    other = call.finite_class()
    more = jnp.where(is_class, 0, share * call.logits_of(other))
    return call.losses(jnp.where(is_class, call.labels, other), more)


def linear_by_sum_of_shifted(leaves, **options):
    """The same of logits less their maximum, which would take another product."""
    raise ValueError("a label that is no class has the loss of the largest logit")


def linear_of_log_softmax(leaves, **options):
    """The losses of labels as indices. A logit of +inf gives NaN, because inf - inf is NaN.

    The NaN of a label that is no class has no gradient.
    """
    call = _call(leaves, options)
    classes = call.table.shape[0]
    labels = no_class_as_padding(from_the_end(call.labels, classes), classes)
    found = call.losses(labels, jnp.where(labels < 0, jnp.nan, 0))
    return found * jnp.where(jnp.isfinite(found) | call.has_low_bias(), 1, jnp.nan)


def linear_of_one_hot(leaves, **options):
    """A label that is no class has no loss."""
    call = _call(leaves, options)
    return call.losses(no_class_as_padding(call.labels, call.table.shape[0]))


def of_nearest_class(losses: Callable) -> Callable:
    """The same, but a label that is no class is the nearest one, as by ``x[label]``."""

    def call(leaves, **options):
        classes = leaves["table"].shape[int(leaves["transposed"])]
        return losses({**leaves, "labels": nearest_class(leaves["labels"], classes)}, **options)

    return call


def nan_with_inf(losses: Callable) -> Callable:
    """The same, but NaN where it is infinite: an infinite logit gives inf less itself."""

    def call(leaves, **options):
        found = losses(leaves, **options)
        return found * jnp.where(jnp.isfinite(found), 1, jnp.nan)

    return call
