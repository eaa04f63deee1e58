"""Matches the formula of a pattern with the values of a program.

Formulas are compared modulo what does not change a result beyond rounding: the order and grouping
of sums and products, divisions and powers as exponents, constant factors, dimensions of size 1,
broadcasts, transpositions, and casts to a wider dtype between.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jax_fastops.autofuse._meaning import ELEMENTWISE, REDUCTIONS
from jax_fastops.autofuse._pattern import Apply, Formula, Leaf, Multiple, Product, Sum, near
from jax_fastops.autofuse._value import Map, Node, Reduction, Value, View, equal, reductions

# A match in the tests has up to 95 values and 218 steps. A chain of thousands of sums ends here.
_MAX_INNER, _MAX_STEPS = 200, 800
_COMMUTATIVE = {"max", "min", "eq", "ne", "and", "or"}


def _map_between(first: Map, second: Map) -> Map | None:
    """From the dimensions of one array to those of another, by maps from the same dimensions."""
    pairs: dict[int, int | None] = {}
    if len(first) != len(second):
        return None
    for i, j in zip(first, second, strict=True):
        if (i is None and j is not None) or (i is not None and pairs.setdefault(i, j) != j):
            return None
    return tuple([pairs.get(i) for i in range(len(pairs))])


@dataclasses.dataclass(slots=True)
class State:
    """A part of a match: the leaves, the free numbers, and the values that it goes through."""

    leaves: dict[int, View]  # the arrays that leaves stand for, as these see them
    free: dict[int, float]
    inner: tuple[Value, ...]

    def through(self, values: Sequence[Value]) -> State:
        return State(self.leaves, self.free, (*self.inner, *values))


def _order(place: Map, shown: View) -> Map | None:
    """From the dimensions of a formula to those of a value, whose order a program may change."""
    if place == shown.map:
        return shown.value.identity
    order = _map_between(place, shown.map)
    return order if order is not None and set(order) == set(shown.value.identity) else None


def _unreduced(order: Map, formula: Apply, found: Reduction) -> Map | None:
    """The order of the operand of a reduction, if the axes correspond."""
    axes = tuple(map(int, re.findall("[0-9]+", formula.params[0][1])))
    others = [i for i in found.operand.identity if i not in axes]
    if len(axes) != len(found.axes) or len(others) != len(order):
        return None
    own = *found.axes, *(found.rest[i] for i in order)
    pairs = dict(zip((*axes, *others), own, strict=True))
    return tuple([pairs[i] for i in range(len(pairs))])


# The matches of formulas at structures, with values by their places. The formulas are kept, so that
# no other one has their address.
_known: dict[tuple, tuple[Formula, State | None]] = {}


def matched(formula: Formula, root: Value, any_numbers: bool = False) -> State | None:
    """As ``Matcher(any_numbers)(formula, root)``, once for values of equal structures."""
    view = root.source(narrowing=True)
    source, passed = view.value, view.passed[:-1]
    if not source.is_closed:
        return Matcher(any_numbers)(formula, root)
    key = id(formula), any_numbers, view.map, source.structure, *[v.computation for v in passed]
    values = [*passed, *source.before]
    if (known := _known.get(key)) is not None:  # another thread may clear them
        return _renamed(known[1], values)
    state = Matcher(any_numbers)(formula, root)
    if len(_known) > 10_000:
        _known.clear()
    _known[key] = formula, _renamed(state, {v: i for i, v in enumerate(values)})
    return state


def _renamed(state: State | None, values: Any) -> State | None:
    """A state with other values."""
    if state is None:
        return None
    leaves = {i: View(values[x.value], x.map, x.passed) for i, x in state.leaves.items()}
    return State(leaves, state.free, tuple([values[v] for v in state.inner]))


def makers(value: Value) -> tuple[str, ...]:
    """The names of the operations that make a value and its operands."""
    return (value.node.name, *[v.source(True).value.node.name for v in value.node.inputs])


def _bits(value: Value) -> bytes | None:
    return None if value.number is None else value.number.tobytes()  # NaN is not NaN


def moved(state: State, root: Value, other: Value) -> State | None:
    """The match of ``root`` at another value, if all between it and the leaves is computed alike.

    The leaves have equal types and makers. So no larger formula matches if none does at ``root``.
    """
    inner, leaves = set(state.inner), {leaf.value for leaf in state.leaves.values()}
    pairs, left = {root: other}, [root]
    for a in left:
        b = pairs[a]
        if a.computation != b.computation or len(a.node.inputs) != len(b.node.inputs):
            return None
        for x, y in zip(a.node.inputs, b.node.inputs, strict=True):
            if (x.shape, x.dtype, _bits(x)) != (y.shape, y.dtype, _bits(y)):
                return None
            if x.number is not None:
                continue
            if x in inner:
                left += [] if x in pairs else [x]
            else:
                (x, x_map, _), (y, y_map, _) = x.source(), y.source()
                if x not in leaves or x_map != y_map or x.aval != y.aval or makers(x) != makers(y):
                    return None
            if pairs.setdefault(x, y) is not y:
                return None
    if len(set(pairs.values())) < len(pairs) or not pairs.keys() >= inner | leaves:
        return None
    return _renamed(state, pairs)


class Matcher:
    """Matches one formula at one value. ``seen`` records the longest partial match, for reports.

    With ``any_numbers``, it takes all numbers for equal. If it then gives up, there may be a match.
    """

    def __init__(self, any_numbers: bool = False) -> None:
        self._any_numbers = any_numbers
        self._digits = 0  # of the formula
        self._eps = 0.0  # of the narrowest dtype of a number of the program
        self.seen: tuple[Value, ...] = ()
        self.stopped: Value | None = None
        self._budget = _MAX_STEPS

    def __call__(self, formula: Formula, root: Value, start: State | None = None) -> State | None:
        """The match of a result, with the leaves of another match or any."""
        self._digits = formula.digits
        start = State({}, {}, ()) if start is None else start
        for state, ratio in self._scaled(formula.formula, root.identity, root.seen, start):
            if self._near(ratio, formula.factor):
                return state
        return start if self._any_numbers and self._budget < 0 else None

    def _may_go_on(self, state: State) -> bool:
        self._budget -= 1
        return self._budget >= 0 and len(state.inner) < _MAX_INNER

    def _near(self, a: float, b: float) -> bool:
        """Whether two numbers differ by no more than a rounding, if the program rounds any."""
        if self._any_numbers:
            return True
        rounds = self._digits > 16 or self._eps * 2.0**self._digits > 2
        return near(a, b, self._eps if rounds else 5e-10)

    def _number(self, value: Value) -> float | None:
        if value.number is None:
            return None
        self._round(value)
        return float(value.number)

    def _round(self, value: Value) -> None:
        """Notes the dtype of a number, or of its product with an array."""
        if value.is_floating:
            self._eps = max(self._eps, float(jnp.finfo(value.dtype).eps))

    def _match(self, formula, place: Map, view: View, state: State) -> Iterator:
        """States, and the number that the formula must be multiplied with to give the value."""
        if not self._may_go_on(state):
            return
        if isinstance(formula, Leaf):
            if (bound := self._bind(formula, place, view, state)) is not None:
                yield bound, 1.0
            return
        if isinstance(formula, Apply) and formula.name == "select_n":
            yield from self._selection(formula, place, view, state)
        source = view.source(narrowing=True)
        value, order = source.value, _order(place, source)
        if order is None:
            return
        before = len(state.inner) + len(source.passed)
        if isinstance(formula, Sum):
            if value.terms is not None:
                items = [(1.0, View(value, order))]
                inside = state.through(source.passed)
                yield from self._sum(formula, formula.terms, items, 0.0, None, inside, True)
        elif isinstance(formula, Product):
            if value.factors is not None:
                items = [(View(value, order), 1.0)]
                inside = state.through(source.passed)
                yield from self._product(formula.factors, items, 1.0, inside, True)
        elif value.node.name == formula.name:
            inside = state.through(source.passed)
            yield from self._apply(formula, value.node, View(value, order), inside)
        if before > len(self.seen):
            self.seen, self.stopped = (*state.inner, *source.passed), value

    def _selection(self, formula, place: Map, view: View, state: State) -> Iterator:
        """Matches a select hidden behind views, such as labels that count from 0."""
        while (step := view.step()) is not None:
            value, node = view.value, view.value.node
            state = state.through([value])
            if node.name == "select_n" and (order := _order(place, view)) is not None:
                yield from self._apply(formula, node, View(value, order), state)
            view = step

    def _scaled(self, formula, place: Map, view: View, state: State) -> Iterator:
        """As `_match`, where the value may also be a multiple that the program computes."""
        yield from self._match(formula, place, view, state)
        source = view.source(narrowing=True)
        if (multiple := source.value.multiple) is not None:
            factor, operand = multiple
            if abs(factor) != 1:
                self._round(source.value)
            inside = state.through(source.passed)
            for after, r in self._scaled(formula, place, source.of(operand), inside):
                yield after, r * factor

    def _bind(self, leaf: Leaf, place: Map, view: View, state: State) -> State | None:
        source = view.source()
        mapped = _map_between(place, source.map)
        if mapped is None:
            return None
        known = state.leaves.get(leaf.index)
        if known is None:
            bound = View(source.value, mapped)
            return State({**state.leaves, leaf.index: bound}, state.free, state.inner)
        if known.map != mapped or not equal(known.value, source.value):
            return None
        return state if known.value is source.value else state.through(source.passed)

    def _sum(self, formula, left: tuple, items, total, ratio, state, expand=False) -> Iterator:
        """Matches the terms that are ``left`` with ``items``, which are factors and views.

        ``total`` is the sum of the program's numbers, and ``ratio`` is the factor of its terms.
        With ``expand``, the first item is the whole sum.
        """
        while items and (known := self._number(items[0][1].value)) is not None:
            total += items[0][0] * known
            items = items[1:]
        if not items:
            if not left:
                yield from self._whole_sum(formula, total, ratio, state)
            return
        (factor, view), *rest = items
        for i, (own, part, place) in enumerate(left[: 0 if expand else None]):
            free = part.free if isinstance(part, Multiple) else None
            part = part if free is None else part.formula
            others = left[:i] + left[i + 1 :]
            for after, r in self._match(part, place, view, state):
                new = factor * r / own
                if not math.isfinite(new) or not new:
                    continue
                if free is not None:
                    after = State(after.leaves, {**after.free, free: new}, after.inner)
                    yield from self._sum(formula, others, rest, total, ratio, after)
                elif ratio is None or self._near(factor * r, ratio * own):
                    yield from self._sum(formula, others, rest, total, new, after)
        source = view.source(narrowing=True)
        terms = source.value.terms
        if terms is None or len(rest) > len(left) or not self._may_go_on(state):
            return
        if len(terms) == 1 and abs(terms[0][0]) != 1:
            self._round(source.value)
        items = [(factor * f, source.of(v)) for f, v in terms] + rest
        yield from self._sum(formula, left, items, total, ratio, state.through(source.passed))

    def _whole_sum(self, formula, total: float, ratio: float | None, state: State) -> Iterator:
        """The state after all terms. Until here, the free numbers are those of the program."""
        multiples = {part.free for _, part, _ in formula.terms if isinstance(part, Multiple)}
        if ratio is None:
            if not multiples:
                return
            ratio = 1.0
        free = {i: x / ratio if i in multiples else x for i, x in state.free.items()}
        if formula.free is not None:
            eps = total / ratio - formula.constant
            if not self._near(free.setdefault(formula.free, eps), eps):
                return
        elif not self._near(total, ratio * formula.constant):
            return
        yield State(state.leaves, free, state.inner), ratio

    def _product(self, left: tuple, items, total, state, expand=False) -> Iterator:
        """Matches the factors that are ``left`` with ``items``, which are views and exponents."""
        while items and (known := self._number(items[0][0].value)) is not None:
            exponent = items[0][1]
            if (known <= 0 and exponent != int(exponent)) or (known == 0 and exponent < 0):
                return
            total *= known**exponent
            items = items[1:]
        if not items:
            if not left:
                yield state, total
            return
        view, exponent = items[0]
        source, rest = view.source(), []
        for item in items[1:]:
            other = item[0].source()
            if other.map == source.map and equal(other.value, source.value):  # x * x
                exponent += item[1]
                if other.value is not source.value:
                    state = state.through(other.passed)
            else:
                rest.append(item)
        for i, (part, place, own) in enumerate(left[: 0 if expand else None]):
            if own != exponent:
                continue
            for after, r in self._match(part, place, view, state):
                if r > 0 or exponent == int(exponent):
                    others = left[:i] + left[i + 1 :]
                    yield from self._product(others, rest, total * r**exponent, after)
        source = view.source(narrowing=True)
        factors = source.value.factors
        if factors is None or exponent != int(exponent) or not self._may_go_on(state):
            return
        if len(rest) > len(left) and len(rest) > sum(max(1, abs(own)) for _, _, own in left):
            return
        items = [(source.of(v), e * exponent) for v, e in factors] + rest
        total *= source.value.sign**exponent
        yield from self._product(left, items, total, state.through(source.passed))

    def _apply(self, formula: Apply, node: Node, view: View, state: State) -> Iterator:
        if len(node.inputs) != len(formula.operands):
            return
        if node.name in REDUCTIONS:
            yield from self._reduced(formula, node, view, state)
            return
        if node.meaning != formula.params:
            return
        if node.name not in ELEMENTWISE and view.map != view.value.identity:
            return
        for inputs in (node.inputs, node.inputs[::-1])[: 1 + (node.name in _COMMUTATIVE)]:
            for after in self._operands(formula.operands, inputs, node, view, state):
                yield after, 1.0

    def _reduced(self, formula: Apply, node: Node, view: View, state: State) -> Iterator:
        """Matches a reduction, perhaps in several steps."""
        ((part, place, factor),) = formula.operands
        for found in reductions(node):
            if (order := _unreduced(view.map, formula, found)) is None:
                continue
            for value in found.passed:
                if value.multiple is not None:
                    self._round(value)
            operand, inside = View(found.operand, order), state.through(found.passed)
            for after, r in self._scaled(part, place, operand, inside):
                if self._near(r, factor):
                    yield after, found.factor

    def _operands(self, formulas, inputs, node: Node, view: View, state: State) -> Iterator:
        if not formulas:
            yield state
            return
        formula, value = formulas[0], inputs[0]
        if isinstance(formula, float):
            known = self._number(value)
            is_near = self._near if value.is_floating or self._any_numbers else operator.eq
            if known is not None and is_near(known, formula):
                yield from self._operands(formulas[1:], inputs[1:], node, view, state)
            return
        part, place, factor = formula
        shown = view.of(value) if node.name in ELEMENTWISE else value.seen
        for after, r in self._scaled(part, place, shown, state):
            if self._near(r, factor):
                yield from self._operands(formulas[1:], inputs[1:], node, view, after)
