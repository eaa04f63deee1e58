"""Dropout as programs and libraries write it, with a mask drawn by ``jax.random``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops.autofuse._numpy import ELEMENTWISE
from jax_fastops.autofuse._rule import Rewrite, Rule, Search
from jax_fastops.autofuse._value import Value, View
from jax_fastops.dropout import dropout
from jax_fastops.softmax import softmax

_COMPARED = {"lt", "le", "gt", "ge", "floor"}  # what makes a mask of random numbers
# From random bits to a number.
_STEPS = ELEMENTWISE | {"bitcast_convert_type": lambda params, x: x.view(params["new_dtype"])}


class DropoutRule(Rule):
    """``dropout``, and ``softmax`` with dropout, if the user allows other masks."""

    def __init__(self, search: Search):
        super().__init__(search)
        self._noted: set[Value] = set()  # masks of dropouts that stay

    def match(self, value: Value) -> Rewrite | None:
        if not (self.search.dropout or self.search.thorough):
            return None
        mask, drop = _examined(value)
        if mask is None or drop is None or mask in self._noted:  # of a part of what stays
            return None
        if isinstance(drop, Drop) and self.search.dropout:
            reads = {"x": drop.x, "key": drop.key}
            return self._of_softmax(value, drop) or self.rewrite(
                "dropout", _dropout, [value], reads, rate=drop.rate
            )
        self._noted.add(mask)
        reason = drop if isinstance(drop, str) else "pass dropout=True; its masks are others"
        return self.miss("dropout", value, reason)

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
    _, drop = _examined(value, shared)
    return drop if isinstance(drop, Drop) else None


def _examined(value: Value, shared: bool = False) -> tuple[Value | None, Drop | str | None]:
    """The mask of a dropout, and the dropout or as text why the op is none."""
    node = value.node
    if node.name not in ("select_n", "mul", "div") or not value.is_floating:
        return None, None
    for scale, masked in _scaled(value):
        for factor, x, mask, keep in _masked(masked):
            if (drawn := _probability(mask.value)) is None:
                continue
            if isinstance(drawn, str):
                return mask.value, drawn
            if mask.value.shape != value.shape and not shared:
                return mask.value, "one number of its mask is for several elements; XLA fuses it"
            bits, probability = drawn
            if not bits.leads_only_to(masked) or bits.is_drawn_again:
                return mask.value, "the mask is used elsewhere"  # which would have another mask
            key = bits.node.inputs[0]
            probability = probability if keep else 1 - probability
            reason = f"its factor is not 1 / {probability:.6g}, the inverse of what it keeps"
            for own, inner in _scaled(x):
                limit = 2 * float(jnp.finfo(value.dtype).eps) + 1e-6
                total = scale * factor * own * probability
                if 0 < probability < 1 and abs(total - 1) < limit:
                    if (inner.shape, inner.dtype) == (value.shape, value.dtype):
                        return mask.value, Drop(inner, key, 1 - probability, mask)
                    reason = "its array is cast or broadcast between the factor and the mask"
            return mask.value, reason
    return None, None


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
    for which, x, zero, sign in value.selections():
        if zero.number == 0 and (two := _two(value.seen.of(which))) is not None:
            mask, *numbers = two
            if numbers[0] != numbers[1]:
                yield 1.0, x, mask, bool(numbers[1]) is sign
    if value.node.name == "mul":
        for numbers, x in (value.node.inputs, value.node.inputs[::-1]):
            if (two := _two(value.seen.of(numbers))) is not None:
                mask, off, on = two
                if (off == 0) != (on == 0):
                    yield float(on if on else off), x, mask, bool(on)


def _two(view: View, depth: int = 8) -> tuple[View, Any, Any] | None:
    """The mask that an array is computed from, and its two numbers, where the mask is False first.

    The rest are numbers.
    """
    view = view.source()
    value, node = view.value, view.value.node
    view = View(value, view.map)
    if node.name in _COMPARED - {"floor"}:
        return view, np.bool_(False), np.bool_(True)
    if node.name == "floor":  # of a number from 0 to 2
        return view, np.zeros((), value.dtype), np.ones((), value.dtype)
    varying = [v for v in node.inputs if v.number is None]
    if node.name not in ELEMENTWISE or len(varying) != 1 or not depth:
        return None
    if (before := _two(view.of(varying[0]), depth - 1)) is None:
        return None
    results = []
    with np.errstate(all="ignore"):
        for number in before[1:]:
            given = [np.asarray(number if v.number is None else v.number) for v in node.inputs]
            results.append(ELEMENTWISE[node.name](node.params, *given))
    return before[0], results[0], results[1]


def _probability(mask: Value) -> tuple[Value, float] | str | None:
    """The bits that a random mask is made of, and the probability that an element is True or 1."""
    node = mask.node
    if node.name == "floor":  # of the sum of a random number and the probability
        node = node.inputs[0].source().value.node
        if node.name != "add":
            return None
    first, second = node.inputs
    for drawn, limit in ((first, second), (second, first)):
        if drawn.shape != mask.shape or (bits := _uniform(drawn)) is None:
            continue
        if limit.number is None:
            return "its rate is not known when the function is traced"
        is_below = (node.name in ("lt", "le")) is (drawn is first)
        number = float(limit.number)
        return bits, number if is_below or node.name == "add" else 1 - number
    return None


def _uniform(value: Value) -> Value | None:
    """The random bits that numbers are made of, if these are uniform in [0, 1)."""
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
    return source if np.allclose(bits, [0, 0.5, 1], atol=1e-6) else None
