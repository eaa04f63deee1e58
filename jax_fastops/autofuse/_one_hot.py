"""Losses that are a sum of log probabilities times a one-hot array of integer labels.

Programs make such an array in many ways, with any two numbers, and multiply it by weights of the
tokens. So no formula is compared. What is computed from ``labels == arange(classes)`` and numbers
has one value at the label and one at all other classes. This module evaluates both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops.autofuse._losses import OF_ONE_HOT
from jax_fastops.autofuse._masks import elements_of, name_of
from jax_fastops.autofuse._match import Matcher, State, matched
from jax_fastops.autofuse._numpy import ELEMENTWISE
from jax_fastops.autofuse._pattern import MAX_RANK, PATTERNS, Pattern, formulas
from jax_fastops.autofuse._rule import Rewrite, Rule, Search, read_of
from jax_fastops.autofuse._value import USED, Value, View, compose, values_between

NAME = "cross_entropy of one_hot"
_MAX_TERMS = 6
_MAX_STEPS = 20
_MAX_DEPTH = 20
_MAX_NODES = 60
_Z_LOSS = Pattern("", lambda x, axis: jax.nn.logsumexp(x, axis) ** 2, ("x",), jax.nn.logsumexp)


class _Stays(Exception):
    """The program is no such loss."""


class _Labels(NamedTuple):
    """The labels of a one-hot array, and the dimension of its classes."""

    view: View
    axis: int


@dataclasses.dataclass(frozen=True)
class _Product:
    """A number times factors, at the labels or elsewhere.

    Attributes:
      number: the product of the numbers.
      log_p: the log probabilities, if they are a factor.
      factors: arrays without classes, the outermost first. Each has a name that says what it does:
        see ``with_factors``. A mask has its sign.
      passed: the values from the product to the log probabilities.
    """

    number: float = 1.0
    log_p: View | None = None
    factors: tuple[tuple[str, View, bool | None], ...] = ()
    passed: tuple[Value, ...] = ()

    def __mul__(self, other: _Product) -> _Product:
        if self.log_p is not None:
            if other.log_p is not None:
                raise _Stays
            return other * self
        number, factors = self.number * other.number, self.factors + other.factors
        return dataclasses.replace(other, number=number, factors=factors)

    def inverse(self) -> _Product:
        if self.log_p is not None or not self.number or {f[0] for f in self.factors} - {"weight"}:
            raise _Stays
        factors = tuple(("divisor", view, None) for _, view, _ in self.factors)
        return _Product(1 / self.number, None, factors)


class OneHot:
    """The one-hot array in some arrays of the same dimensions, which are those of all views.

    Attributes:
      sizes: the sizes of the dimensions.
      labels: the labels of the one-hot array, if there is one.
      axis: the dimension of the classes.
    """

    def __init__(self, views: Sequence[View], sizes: Sequence[int]):
        self.sizes = sizes
        self._numbers: dict[tuple, Any] = {}
        self.labels = next((x for v in views if (x := self._find(v)) is not None), None)
        self.axis = len(sizes) - 1 if self.labels is None else self.labels.axis

    def _find(self, view: View) -> _Labels | None:
        """The labels of the one-hot array before a value."""
        left, seen = [view], set()
        while left and len(seen) < _MAX_NODES:
            view = left.pop().source(narrowing=True)
            node = view.value.node
            if view.value in seen or view.value.number is not None:
                continue
            seen.add(view.value)
            if node.name in ("eq", "ne") and (labels := self._compared(view)) is not None:
                return labels
            if node.name in ELEMENTWISE or node.name == "stop_gradient":
                left += [View(view.value, view.map).of(v) for v in node.inputs]
        return None

    def _compared(self, view: View) -> _Labels | None:
        """The labels, if a value is ``labels == arange(classes)`` or the opposite of it."""
        for numbers, labels in (view.value.node.inputs, view.value.node.inputs[::-1]):
            classes, shown = view.of(numbers).source(), view.of(labels).source()
            places = [i for i, j in enumerate(classes.map) if j is not None]
            if len(places) != 1 or not jnp.issubdtype(labels.dtype, jnp.integer):
                continue
            (axis,) = places
            if shown.map[axis] is None and _counts(classes.value, self.sizes[axis]):
                return _Labels(View(shown.value, shown.map), axis)
        return None

    def two(self, view: View) -> tuple[Any, Any] | None:
        """The numbers elsewhere and at the labels, if an array is computed from these only."""
        view = view.source()
        value, key = view.value, view[:2]
        if (number := value.number) is not None:
            return number, number
        if key not in self._numbers:
            self._numbers[key] = None if view.map[self.axis] is None else self._evaluated(view)
        return self._numbers[key]

    def _evaluated(self, view: View) -> tuple[Any, Any] | None:
        node = view.value.node
        view = View(view.value, view.map)
        if node.name in ("eq", "ne") and self._compared(view) == self.labels is not None:
            is_equal = node.name == "eq"
            return np.bool_(not is_equal), np.bool_(is_equal)
        if node.name == "stop_gradient":
            return self.two(view.of(node.inputs[0]))
        if node.name not in ELEMENTWISE or (node.name == "div" and not view.value.is_floating):
            return None
        operands = [self.two(view.of(v)) for v in node.inputs]
        if None in operands:
            return None
        with np.errstate(all="ignore"):
            off, on = (
                ELEMENTWISE[node.name](node.params, *map(np.asarray, given))
                for given in zip(*operands, strict=True)
            )
        return off, on


class _ClassSum(OneHot):
    """A sum over classes, and perhaps tokens, of a product with log probabilities.

    The dimensions of all views are those of what is summed.

    Attributes:
      here: the number in the product at the labels.
      elsewhere: the number in the product at all other classes.
      log_p: the log probabilities in the product.
      factors: see ``_Product``.
      passed: the values from the product to the log probabilities.
      tokens: the dimensions without the one of the classes.
      summed: the places of those of them that are summed, too.
    """

    def __init__(self, total: Value):
        operand = total.node.inputs[0]
        reduced = total.node.params["axes"]
        raveled: list[Value] = []
        views, sizes = [operand.seen], operand.sizes
        axes = {operand.long.index(i) for i in reduced if i in operand.long}
        if (unraveled := _unraveled(operand)) is not None:
            views, raveled = unraveled, [operand, *operand.node.inputs]
            sizes, axes = views[0].value.sizes, set(views[0].map)
        if not operand.is_plain or 0 in operand.shape or len(sizes) > MAX_RANK:
            raise _Stays
        super().__init__(views, sizes)
        if self.labels is None and len(axes) == 1:  # the mean of log probabilities
            (self.axis,) = axes
        if self.axis not in axes or (self.labels is None and len(axes) > 1):
            raise _Stays
        self.tokens = tuple(i for i in range(len(self.sizes)) if i != self.axis)
        self.summed = tuple(i for i, place in enumerate(self.tokens) if place in axes)
        here, elsewhere = (self._product_of(views, at) for at in (True, False))
        self.here, self.elsewhere = here.number, elsewhere.number
        parts = [p for p in (here, elsewhere) if p.number]
        same = {(p.log_p, p.factors) for p in parts}
        if len(same) != 1 or parts[0].log_p is None:
            raise _Stays
        self.log_p: View = parts[0].log_p
        self.factors = parts[0].factors
        self.passed = (*here.passed, *elsewhere.passed, *raveled)

    def in_order(self, view: View, places: Sequence[int]) -> View:
        """A view of what is summed, as one of these dimensions of it."""
        return View(view.value, tuple(view.map[i] for i in places))

    def _product_of(self, views: list[View], here: bool) -> _Product:
        product = _Product()
        for view in views:
            product = product * self._product(view, here)
        return product

    def _product(self, view: View, here: bool, depth: int = 0) -> _Product:
        """The value of an array at the labels, or elsewhere."""
        if depth > _MAX_DEPTH:
            raise _Stays
        if (two := self.two(view)) is not None:
            return _Product(float(two[here]))
        source = view.source()
        if source.map[self.axis] is None:
            return _Product(factors=(("weight", View(source.value, source.map), None),))
        source = view.source(narrowing=True)  # the op rounds later than the program
        product = self._of_operands(View(source.value, source.map), here, depth + 1)
        if product.log_p is None:
            return product
        passed = (*source.passed, source.value, *product.passed)
        return dataclasses.replace(product, passed=passed)

    def _of_operands(self, view: View, here: bool, depth: int) -> _Product:
        node, inputs = view.value.node, [view.of(v) for v in view.value.node.inputs]
        if node.name in ("mul", "div"):
            a, b = (self._product(v, here, depth) for v in inputs)
            return a * (b if node.name == "mul" else b.inverse())
        if node.name == "neg":
            return _Product(-1.0) * self._product(inputs[0], here, depth)
        if node.name == "select_n" and len(inputs) == 3:
            which, *cases = inputs
            if (two := self.two(which)) is not None:
                return self._product(cases[int(two[here])], here, depth)
            mask = which.source()
            for keep, (case, other) in enumerate((cases, cases[::-1])):
                if mask.map[self.axis] is None and other.value.number == 0:
                    factor = "mask", View(mask.value, mask.map), bool(keep)
                    return _Product(factors=(factor,)) * self._product(case, here, depth)
        return _Product(log_p=view)


def _unraveled(product: Value) -> list[View] | None:
    """The factors of a product of two arrays that a program reshapes to rows, as ``vdot`` does."""
    factors = product.node.inputs
    if product.node.name != "mul" or len(product.shape) != 1 or len(factors) != 2:
        return None
    before = [v.node.inputs[0] for v in factors if v.node.name == "reshape"]
    if len(before) != 2 or before[0].shape != before[1].shape or len(before[0].long) < 2:
        return None
    return [v.seen for v in before]


def _counts(value: Value, n: int) -> bool:
    """Whether an array is ``arange(n)``."""
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.size != n or name_of(value) is None:
        return False
    return np.array_equal(elements_of(value).ravel(), np.arange(n))


def _terms(value: Value) -> Iterator[tuple[float, Value, tuple[Value, ...]]]:
    """The summands of a value with their factors, and the values that each goes through."""
    left: list[tuple[float, Value, tuple[Value, ...]]] = [(1.0, value, ())]
    steps = 0  # a program may scale an array a thousand times
    while left:
        factor, value, passed = left.pop()
        source = value.whole_source(narrowing=True)
        if source is not None:
            value, passed = source.value, (*passed, *source.passed, source.value)
        steps += 1
        terms = value.terms or []
        same = source is not None and all(v.shape == value.shape for _, v in terms)
        if terms and same and len(left) < _MAX_TERMS and steps < _MAX_STEPS:
            left += [(factor * own, v, passed) for own, v in terms]
        else:
            yield factor, value, passed


def _match(pattern: Pattern, axis: int, value: Value, x: View | None = None) -> State | None:
    """The match of a pattern along a dimension of its operand, which may be known."""
    rank = len(value.long) if x is None else len(x.map)
    (formula,) = formulas(pattern, value.dtype, rank, axis)
    return (
        matched(formula, value) if x is None else Matcher()(formula, value, State({0: x}, {}, ()))
    )


def _log_softmax(view: View, axis: int) -> tuple[View, State] | None:
    """The logits, as those see them who see a log_softmax along a dimension, and the match."""
    if None in view.map or sorted(view.map) != list(view.value.identity):
        return None
    for pattern in PATTERNS:
        if pattern.name == "log_softmax":
            state = _match(pattern, view.map[axis], view.value)
            if state is not None:
                x = state.leaves[0]
                return View(x.value, compose(view.map, x.map)), state
    return None


class OneHotLossRule(Rule):
    """``cross_entropy``, of losses by a one-hot array or of their weighted sum."""

    def __init__(self, search: Search):
        super().__init__(search)
        self._noted: set[Value] = set()  # the sums over classes with a reason why they stay

    def match(self, value: Value) -> Rewrite | None:
        moved = value.node.name in ("broadcast_in_dim", "reshape", "squeeze", "copy", "transpose")
        if moved or not (value.is_array and value.is_plain) or 0 in value.shape:
            return None
        terms = list(_terms(value))
        sums = [v for _, v, _ in terms if v.node.name == "reduce_sum"]
        if not sums:
            return None
        try:
            reason = self._loss(value, terms)
        except _Stays:
            reason = None
        if isinstance(reason, Rewrite):
            return reason
        if reason is None and len(terms) == len(sums) == 1 and self.search.thorough:
            reason = _reason_of_weights(sums[0])
        if reason and self._noted.isdisjoint(sums):
            self._noted.update(sums)
            self.miss(NAME, value, reason, True)
        return None

    def _loss(self, root: Value, terms: Sequence) -> Rewrite | str | None:
        """The rewrite, or as text why a loss stays."""
        inner: list[Value] = []
        sums: list[tuple[float, _ClassSum]] = []
        rest: list[tuple[float, Value]] = []
        for factor, value, passed in terms:
            inner += passed
            if value.node.name == "reduce_sum":
                sums.append((factor, _ClassSum(value)))
            else:
                rest.append((factor, value))
        one_hot = [(s, s.labels) for _, s in sums if s.labels is not None]
        if not one_hot or (len(terms) > 1 and any(s.summed or s.factors for _, s in sums)):
            return None
        logits: set[View] = set()
        for _, s in sums:
            if (found := _log_softmax(s.log_p, s.axis)) is None:
                return None
            logits.add(s.in_order(found[0], (*s.tokens, s.axis)))
            inner += (*s.passed, *found[1].inner)
        labels = {s.in_order(found.view, s.tokens) for s, found in one_hot}
        if len(logits) > 1 or len(labels) > 1:
            return None
        (x,), (label,) = logits, labels
        for _, value in rest:
            if (state := _match(_Z_LOSS, len(x.map) - 1, value, x)) is None:
                return None
            inner += (value, *state.inner)
        # The op computes in float32, also the log-probabilities of narrow logits.
        least = min(root.dtype, x.value.dtype, key=lambda dtype: dtype.itemsize)
        for value in inner:
            if value.is_narrower_than(least):
                return f"{value.dtype} is narrower than the result's {root.dtype}"
        nodes = {v.node for v in (*inner, root)}
        if any(v.is_used_outside(nodes) and v.size >= root.size for v in inner if v is not root):
            return USED
        first, _ = one_hot[0]
        sizes = [first.sizes[i] for i in (*first.tokens, first.axis)]
        dtype = root.dtype if root.dtype.itemsize == 8 else None  # else float32
        reads = {"x": read_of(x, dtype=dtype), "labels": read_of(label)}
        for name, view, sign in first.factors:
            operand = read_of(first.in_order(view, first.tokens), counts=sign)
            reads[f"{name}_{len(reads)}"] = operand
        options: dict[str, Any] = {
            "share": -sum(factor * (s.here - s.elsewhere) for factor, s in sums),
            "smooth": -sum(factor * s.elsewhere for factor, s in sums) * sizes[-1],
            "z": sum(factor for factor, _ in rest),
        }
        if first.summed:
            options["summed"] = first.summed
        ends = {v for v, _ in reads.values()}
        between = frozenset(values_between(root, ends))
        return self.search.rewrite(NAME, OF_ONE_HOT, [root], reads, options, between)


def _reason_of_weights(total: Value) -> str | None:
    """Why a sum of log probabilities times an array over one dimension stays."""
    product = total.node.inputs[0].source(narrowing=True)
    axes = [i for i in total.node.params["axes"] if i in total.node.inputs[0].long]
    if product.value.node.name != "mul" or len(axes) != 1:
        return None
    axis = product.map[total.node.inputs[0].long.index(axes[0])]
    for operand in product.value.node.inputs:
        view = product.value.seen.of(operand).source(narrowing=True)
        if axis is not None and None not in view.map and _log_softmax(view, axis) is not None:
            return "the weights of the classes are no one_hot of integer labels"
    return None
