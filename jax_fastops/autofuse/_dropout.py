"""Dropout as programs and libraries write it, with a mask drawn by ``jax.random``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops.autofuse._numpy import ELEMENTWISE
from jax_fastops.autofuse._rule import Rewrite, Rule
from jax_fastops.autofuse._value import Value, View
from jax_fastops.dropout import dropout
from jax_fastops.softmax import softmax

# From random bits to a number.
_STEPS = ELEMENTWISE | {"bitcast_convert_type": lambda params, x: x.view(params["new_dtype"])}


class DropoutRule(Rule):
    """``dropout``, and ``softmax`` with dropout, if the user allows other masks."""

    def match(self, value: Value) -> Rewrite | None:
        if not (self.search.dropout or self.search.thorough) or (drop := drop_at(value)) is None:
            return None
        if not self.search.dropout:
            return self.miss("dropout", value, "pass dropout=True; its masks are others")
        reads = {"x": drop.x, "key": drop.key}
        return self._of_softmax(value, drop) or self.rewrite(
            "dropout", _dropout, [value], reads, rate=drop.rate
        )

    def _of_softmax(self, value: Value, drop: Drop) -> Rewrite | None:
        """The softmax and its dropout, if the softmax has no other use."""
        only = drop.x.leads_only_to(value) and drop.key.shape == ()
        match = self.search.find(drop.x) if only else None
        if match is None or match.call.op is not softmax:
            return None
        reads = {**match.operands, "dropout_key": drop.key}
        options = dict(match.call.options) | {"dropout_rate": drop.rate}
        name, inner = f"{match.name} + dropout", match.inner | {value}
        rewrite = self.search.rewrite(name, softmax, [value], reads, options, inner)
        return None if isinstance(rewrite, str) else rewrite


def _dropout(x, key, rate):
    function = functools.partial(dropout, rate=rate)
    for _ in range(key.ndim):  # an array of keys draws for each example
        function = jax.vmap(function)
    return function(x, key)


class Drop(NamedTuple):
    """A dropout in a program. ``mask`` is the random mask, as the result sees it."""

    x: Value
    key: Value
    rate: float
    mask: View


def drop_at(value: Value, shared: bool = False) -> Drop | None:
    """The dropout whose result is this value. With ``shared``, its mask may be broadcast."""
    node = value.node
    if node.name not in ("select_n", "mul", "div") or not value.is_floating:
        return None
    for scale, masked in _scaled(value):
        for factor, x, mask, keep in _masked(masked):
            if mask.value.shape != value.shape and not shared:
                continue  # one draw for several elements
            if not mask.value.leads_only_to(masked):
                return None  # other users would have another mask
            if (drawn := _probability(mask.value)) is None:
                return None
            key, probability = drawn
            probability = probability if keep else 1 - probability
            for own, inner in _scaled(x):
                fits = inner.shape == value.shape and inner.dtype == value.dtype
                limit = 2 * float(jnp.finfo(value.dtype).eps) + 1e-6
                total = scale * factor * own * probability
                if fits and 0 < probability < 1 and abs(total - 1) < limit:
                    return Drop(inner, key, 1 - probability, mask)
            return None
    return None


def _scaled(value: Value) -> Iterator[tuple[float, Value]]:
    """The value, and what it is a multiple of, perhaps computed in a wider dtype."""
    yield 1.0, value
    source = value.whole_source(narrowing=True)
    if source is not None and (multiple := source.value.multiple) is not None:
        factor, of = multiple
        before = of.source()
        cast = source.value is not value and before.value.dtype == value.dtype and before.is_whole
        yield factor, before.value if cast else of


def _masked(value: Value) -> Iterator[tuple[float, Value, View, bool]]:
    """A factor, the array, the mask, and whether this keeps the elements where it is True."""
    for mask, x, zero, keep in value.selections():
        if zero.number == 0:
            yield 1.0, x, value.seen.of(mask).source(), keep
    node = value.node
    if node.name == "mul":
        for mask, x in (node.inputs, node.inputs[::-1]):
            view = value.seen.of(mask).source()
            for factor, numbers in _scaled(view.value):
                cast = view.of(numbers).source()
                before = cast.value.node.inputs[:1]
                if cast.value.node.name == "convert_element_type" and before[0].dtype == bool:
                    yield factor, x, cast.of(before[0]).source(), True


def _probability(mask: Value) -> tuple[Value, float] | None:
    """The key of a random mask, and the probability that an element is True."""
    node = mask.node
    if node.name not in ("lt", "le", "gt", "ge"):
        return None
    for below, (drawn, limit) in ((True, node.inputs), (False, node.inputs[::-1])):
        if (number := limit.number) is not None and drawn.shape == mask.shape:
            key = _uniform(drawn)
            below = below is (node.name in ("lt", "le"))
            return None if key is None else (key, float(number) if below else 1 - float(number))
    return None


def _uniform(value: Value) -> Value | None:
    """The key of numbers that are uniform in [0, 1)."""
    source, chain = value.source().value, []
    while source.node.name != "random_bits":
        chain.append(source.node)
        varying = [v for v in source.node.inputs if v.number is None]
        if len(varying) != 1 or varying[0].shape != value.shape or len(chain) > 12:
            return None
        source = varying[0].source().value
    node = source.node
    if node.params["bit_width"] != 32 or source.shape != value.shape:
        return None
    if any(step.name not in _STEPS for step in chain):
        return None
    bits = np.array([0, 1 << 31, (1 << 32) - 1], np.uint32)
    for step in reversed(chain):
        operands = (bits if v.number is None else v.number for v in step.inputs)
        bits = _STEPS[step.name](step.params, *operands)
    return node.inputs[0] if np.allclose(bits, [0, 0.5, 1], atol=1e-6) else None
