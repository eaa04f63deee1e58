"""Cross entropy losses whose logits are a product with a table, and perhaps a bias and a softcap.

The logits have no other use, so ``linear_cross_entropy`` computes them in chunks. It reads the
table as it is stored, before casts and transpositions of the program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_fastops import _implementation
from jax_fastops._signature import accumulator_dtype
from jax_fastops.autofuse._losses import LossCall, with_factors
from jax_fastops.autofuse._meaning import FUSIBLE
from jax_fastops.autofuse._numpy import MOVES
from jax_fastops.autofuse._one_hot import OneHotLossRule
from jax_fastops.autofuse._pattern import near
from jax_fastops.autofuse._pattern_rule import PatternRule
from jax_fastops.autofuse._rule import Read, Rewrite, Rule
from jax_fastops.autofuse._value import USED, Value, values_between

_NAME = "linear_cross_entropy"
_MAX_FACTORS = 4


class LinearLossRule(Rule):
    """``linear_cross_entropy``, of losses or of their sum."""

    def match(self, value: Value) -> Rewrite | None:
        for losses in _losses_of(value):
            each, find = losses.each, self.search.match
            match = find(OneHotLossRule, each) or find(PatternRule, each)
            if match is None or not isinstance(call := match.call.op, LossCall):
                continue
            rewrite = self._of_losses(value, losses, match, call)
            if isinstance(rewrite, Rewrite):
                return rewrite
            if rewrite and losses.each is value:  # each loss has the reason of the sum
                self.miss(_NAME, value, rewrite, True)
            return None
        return None

    def _of_losses(
        self, value: Value, losses: _Losses, match: Rewrite, call: LossCall
    ) -> Rewrite | str | None:
        """The rewrite of losses that match, or as text why there is none."""
        factors = match.operands
        (x, read), (labels, read_labels) = factors.pop("x"), factors.pop("labels")
        numbers = dict(match.call.options)
        summed = numbers.pop("summed", ())
        is_sum = losses.each is not value or bool(summed)
        if (factors and not is_sum) or read_labels.sizes != read.sizes[:-1]:
            return None
        if 0 < len(summed) < len(read.sizes) - 1 and (losses.each is value or losses.factors):
            return None
        logits, sizes = x.source(), tuple(d for d in read.sizes if d != 1)
        if read.order or sizes != logits.value.sizes or not logits.is_whole:
            return "the logits are transposed" if _follows_product(logits.value) else None
        product = _product(logits.value, losses, is_sum)
        if not isinstance(product, Product):
            return product
        arrays = {array for _, array, _ in losses.factors}
        between = {losses.each, *logits.passed} | values_between(value, {losses.each, *arrays})
        between |= values_between(logits.value, product.ends)
        nodes = {v.node for v in match.inner | between}
        own = any(v.source(narrowing=True).value in match.inner | between for v in arrays)
        if own or any(v.is_used_outside(nodes) for v in between - {value}):
            return USED
        tokens = read_labels.sizes if summed or factors else losses.each.shape
        features = product.x.shape[-1]
        reads = {
            "x": (product.x, Read((*tokens, features), part=product.part)),
            **product.reads,
            "labels": (labels, dataclasses.replace(read_labels, sizes=tokens)),
        }
        for kind, array, keep in losses.factors:
            reads[f"{kind} {len(reads)}"] = array, Read(tokens, None, keep)
        reads |= factors
        options = numbers | product.options
        options["reduction"] = "sum" if is_sum else "none"
        op = ProductCall(call, losses.factor, product.scale, product.fill)
        return self.search.rewrite(_NAME, op, [value], reads, options, match.inner | between)


@dataclasses.dataclass(frozen=True)
class ProductCall:
    """The call that replaces losses, or ``factor`` times their sum, of logits that are a product.

    The product is ``scale`` times as large. ``fill`` is the logit of each class whose element of
    ``classes`` is False. The call takes the factors of the losses, by the names of
    ``with_factors``, among its options.
    """

    losses: LossCall
    factor: float
    scale: float
    fill: float

    def __call__(self, x, table, labels, bias=None, classes=None, **options):
        kinds = "mask", "weight", "divisor"
        factors = {
            name: jnp.broadcast_to(options.pop(name), labels.shape)
            for name in list(options)
            if name.startswith(kinds)
        }
        where = weights = None
        masks = [array for name, array in factors.items() if name.startswith("mask")]
        if masks:
            where = functools.reduce(jnp.logical_and, masks)
        if len(masks) < len(factors):
            weights = with_factors(jnp.ones(labels.shape, accumulator_dtype(x.dtype)), factors)
        if self.scale != 1:
            wide = x.astype(accumulator_dtype(x.dtype))
            x = (wide * self.scale).astype(x.dtype)
        if classes is not None:
            # The products of the others are 0, so that their logit is this number, and a label
            # among them has no gradient.
            kept = jnp.expand_dims(classes, 1 - options["class_axis"])
            table = jnp.where(jnp.broadcast_to(kept, table.shape), table, jnp.zeros_like(table))
            bias = jnp.zeros(classes.shape, x.dtype) if bias is None else bias
            narrow = min(x.dtype, bias.dtype, key=lambda dtype: float(jnp.finfo(dtype).max))
            lowest = -math.inf if self.fill == -math.inf else float(jnp.finfo(narrow).min)
            bias = jnp.where(classes, bias, jnp.full_like(bias, max(self.fill, lowest)))
        losses = self.losses.of_product(x, table, labels, bias, where, weights, **options)
        return losses if self.factor == 1 else self.factor * losses


# ---- the losses ----------------------------------------------------------------------------------


class _Losses(NamedTuple):
    """The losses that a value is, or that it is ``factor`` times the sum of.

    Before the sum are ``factors``, the outermost first: what each is (see ``with_factors``), the
    array, and the sign of a mask.
    """

    each: Value
    factor: float = 1.0
    factors: tuple[tuple[str, Value, bool | None], ...] = ()


def _losses_of(value: Value) -> Iterator[_Losses]:
    """What may be the losses in a value: what it sums in one or several steps, and itself."""
    if value.node.name == "reduce_sum" and not value.shape:
        yield from _inside(_Losses(value.node.inputs[0]))
    yield _Losses(value)


def _inside(losses: _Losses) -> Iterator[_Losses]:
    """What may be the losses in a sum of these, before factors, reshapes and other sums."""
    if (whole := losses.each.whole_source()) is None:
        return
    each = whole.value
    losses = losses._replace(each=each)
    yield losses
    node, inputs = each.node, each.node.inputs
    if (multiple := each.multiple) is not None:
        number, array = multiple
        if array.shape == each.shape:
            factor = losses.factor * number
            yield from _inside(losses._replace(each=array, factor=factor))
    elif node.name == "reshape" or (node.name == "reduce_sum" and not losses.factors):
        yield from _inside(losses._replace(each=inputs[0]))
    elif len(losses.factors) < _MAX_FACTORS:
        for factor, array in _factors(each):
            if factor[1].shape == array.shape:
                factors = (*losses.factors, factor)
                yield from _inside(losses._replace(each=array, factors=factors))


def _factors(value: Value) -> Iterator[tuple[tuple[str, Value, bool | None], Value]]:
    """What a value may be: a factor of losses, and these losses."""
    if value.node.name in ("mul", "div"):
        a, b = value.node.inputs
        yield ("weight" if value.node.name == "mul" else "divisor", b, None), a
        if value.node.name == "mul" and a is not b:
            yield ("weight", a, None), b
    for mask, losses, zero, keep in value.selections():
        if zero.number == 0:
            yield ("mask", mask, keep), losses


# ---- the product ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Product:
    """Logits that are a product, as operands and options of the call.

    Attributes:
      x: the tokens, before the range ``part`` along each dimension is read.
      part: these ranges, or nothing for all tokens.
      reads: the table, and the bias and the mask of the classes if there are any.
      scale: a factor of the product.
      fill: the logits of the classes that the mask leaves out.
      options: options of the op.
      ends: the operands of the program's product and of what follows it.
    """

    x: Value
    part: tuple[tuple[int, int], ...]
    reads: dict[str, tuple[Value, Read]]
    scale: float
    fill: float
    options: dict[str, Any]
    ends: set[Value]


class _Path:
    """The way from the logits of a loss back to their product.

    Attributes:
      value: the value that was reached. Its last dimension are classes.
      part: the range of the tokens that have logits along each other dimension, if not all have.
      classes: the range of the classes that have logits.
    """

    def __init__(self, logits: Value):
        self.part: tuple[tuple[int, int], ...] = ()
        self.classes = (0, logits.shape[-1])
        self.to(logits)

    def to(self, value: Value) -> None:
        """Goes on to an operand of the value, and past its casts, reshapes and slices."""
        self.value = value
        while (before := self._before()) is not None:
            self.value = before

    def _before(self) -> Value | None:
        value, node = self.value, self.value.node
        if (whole := value.whole_source()) is not None and whole.value is not value:
            return whole.value
        if node.name in ("reshape", "squeeze", "broadcast_in_dim"):
            before = node.inputs[0]
            tokens = before.size == value.size and before.shape[-1:] == value.shape[-1:]
            return before if tokens and not self.part else None
        if node.name == "slice" and set(node.params["strides"] or ()) <= {1}:
            before = node.inputs[0]
            ends = zip(node.params["start_indices"], node.params["limit_indices"], strict=True)
            *part, classes = (range(*end) for end in ends)
            if self.part:
                part = [r[slice(*own)] for r, own in zip(part, self.part, strict=True)]
            classes = classes[slice(*self.classes)]
            all_tokens = [range(n) for n in before.shape[:-1]]
            self.part = () if part == all_tokens else tuple((r.start, r.stop) for r in part)
            self.classes = classes.start, classes.stop
            return before
        return None

    def row(self, row: Value, counts: bool | None = None) -> tuple[Value, Read]:
        """An element for each class of the value, as the call reads it: of those with logits."""
        start, stop = self.classes
        part = tuple((0, 1) if n == 1 else (start, stop) for n in row.shape)
        is_whole = stop - start == self.value.shape[-1]
        return row, Read((-1,), counts=counts, part=() if is_whole else part)


def _product(logits: Value, losses: _Losses, is_sum: bool) -> Product | str | None:
    """The product that gives the logits, or as text why the op does not compute it."""
    path = _Path(logits)
    softcap, scale, fill = None, 1.0, 0.0
    rows: dict[str, tuple[Value, Read]] = {}
    while (value := path.value).node.name != "dot_general":
        cap, before = _softcap(value)
        factor, unscaled = _multiple(value)
        if scale != 1:  # only the product may be before it
            return _between(value)
        if cap is not None:
            if softcap is not None or rows:
                return "a softcap is before a bias, a mask or another softcap"
            softcap = cap
        elif (masked := _masked_classes(value)) is not None and not rows:
            row, keep, fill, before = masked
            rows["classes"] = path.row(row, keep)
        elif value.node.name == "add" and "bias" not in rows:
            before, row = next(value.with_row(), (value, None))
            if row is None or not row.is_floating:
                return _between(value)
            rows["bias"] = path.row(row)
        elif unscaled is not value:
            scale, before = factor, unscaled
        else:
            return _between(value)
        path.to(before)
    (left, right), batch = value.node.params["dimension_numbers"]
    a, b = value.node.inputs
    if any(batch) or tuple(left) != (len(a.shape) - 1,) or len(right) != 1 or len(b.shape) != 2:
        return "the product is none of tokens [..., d] with a table of two dimensions"
    x, table = _before_widening(a), _before_widening(b)
    x, table = (x, table) if x.dtype == table.dtype else (a, b)
    if x.dtype != table.dtype or not x.is_floating:
        return "the operands of the product have two dtypes"
    if value.dtype != x.dtype and not (x.dtype == jnp.bfloat16 and value.dtype == jnp.float32):
        return f"logits in {value.dtype} of operands in {x.dtype}"
    if scale != 1 and x.dtype == jnp.float16:
        return "a scaled token may overflow"
    if value.node.params.get("out_sharding") is not None:
        return "the product has a sharding of its own"
    if _implementation.current() == "auto":
        # The logits are read and written less, but the table's gradient is wider.
        if math.prod(x.shape[:-1]) < x.shape[-1]:
            return "the table is larger than the logits"
        if not is_sum:  # the backward would compute the logits again
            return "the losses are not summed"
    part = (*path.part, (0, x.shape[-1])) if path.part else ()
    ends = {a, b, *(row for row, _ in rows.values())}
    table, class_axis = _stored(table, 1 - right[0])
    read = Read(table.shape)
    if path.classes != (0, table.shape[class_axis]):
        ranges = [(0, n) for n in table.shape]
        ranges[class_axis] = path.classes
        read = Read(tuple(stop - start for start, stop in ranges), part=tuple(ranges))
    options = {
        "class_axis": class_axis,
        "softcap": softcap,
        "precision": value.node.params["precision"],
    }
    return Product(x, part, {"table": (table, read), **rows}, scale, fill, options, ends)


def _between(value: Value) -> str | None:
    """Why logits are no product, if a product is a few operations before."""
    if not _follows_product(value):
        return None
    return f"{value.node.name} is between the product and the loss"


def _follows_product(value: Value) -> bool:
    left = [value]
    for _ in range(10):
        if not left:
            return False
        before = left.pop()
        if before.node.name == "dot_general":
            return True
        if before.node.name in FUSIBLE | {*MOVES, "gather"}:
            inputs = before.node.inputs
            left += [
                v for v in inputs if v.is_floating and v.size >= value.size and v.number is None
            ]
    return False


def _masked_classes(value: Value) -> tuple[Value, bool, float, Value] | None:
    """The mask of the classes, its sign, the logit of those left out, and the logits before."""
    for mask, logits, fill, keep in value.selections():
        row = value.seen.of(mask).source()
        last = (None,) * (len(value.long) - 1) + (0,)
        if row.map == last and fill.number is not None and fill.number < math.inf:
            return row.value, keep, float(fill.number), logits
    return None


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


def _stored(table: Value, class_axis: int) -> tuple[Value, int]:
    """The table before transpositions and a cast to a narrower dtype, and the axis of its classes.

    The op makes the cast itself.
    """
    while True:
        before = _before_cast(table)
        if table.node.name == "transpose":
            table, class_axis = table.node.inputs[0], 1 - class_axis
        elif before.dtype.itemsize > table.dtype.itemsize:
            table = before
        else:
            return table, class_axis
