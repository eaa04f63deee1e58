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
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp

from jax_fastops._autofuse.formulas import Apply, Formula, Leaf, Multiple, Product, Sum, near
from jax_fastops._autofuse.graph import Node, Value
from jax_fastops._autofuse.meaning import (
    ELEMENTWISE,
    REDUCTIONS,
    Map,
    compose,
    constant,
    factors_of,
    identity,
    meaning,
    multiple_of,
    operand_map,
    resolve,
    sign_of,
    terms_of,
    view_of,
)

_COMMUTATIVE = {"max", "min", "eq", "ne", "and", "or"}


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a leaf stands for: an array, and how it is seen. ``seen`` shows it at its place."""

    source: Value
    map: Map
    seen: tuple[Map, Map, Value] | None = None  # the leaf's map, the value's, and the value

    def where(self, is_there: Callable[[Value], bool]) -> Bound:
        """The same by another array that is inside of a function, if there is one.

        That is another view, or the integers that a cast narrows, which the reader casts.
        """
        if is_there(self.source):
            return self
        if self.seen is not None:
            place, shown, value = self.seen
            while value is not self.source:
                if is_there(value) and (found := _map_of_leaf(place, shown)) is not None:
                    return Bound(value, found)
                step = view_of(value, False)
                assert step is not None, value.aval
                value, shown = step[0], compose(shown, step[1])
        cast = self.source.node
        if cast is not None and cast.name == "convert_element_type":
            (value,), dtype = cast.inputs, self.source.dtype
            narrows = dtype.itemsize <= value.dtype.itemsize
            if narrows and {value.dtype.kind, dtype.kind} <= {"i", "u"}:
                source, inner, _ = resolve(value)
                seen = tuple(range(len(self.map))), self.map, value
                return Bound(source, compose(self.map, inner), seen).where(is_there)
        return self


def _map_of_leaf(place: Map, shown: Map) -> Map | None:
    """From the dimensions of a leaf to those of a value, by the dimensions of what has both."""
    found: dict[int, int | None] = {}
    for own, there in zip(place, shown, strict=True):
        if own is None:
            if there is not None:
                return None
        elif found.setdefault(own, there) != there:
            return None
    return tuple([found[i] for i in range(len(found))])


@dataclasses.dataclass(slots=True)
class State:
    """A part of a match: what leaves and free numbers are, and which values it goes through."""

    leaves: dict[int, Bound]
    free: dict[int, float]
    inner: tuple[Value, ...]

    def through(self, values: Sequence[Value]) -> State:
        return State(self.leaves, self.free, (*self.inner, *values))


def _order(place: Map, shown: Map, source: Value) -> Map | None:
    """From the dimensions of a formula to those of a value, whose order a program may change."""
    if place == shown:
        return identity(source)
    if len(place) != len(shown):
        return None
    pairs = dict(zip(place, shown, strict=True))
    if any(pairs[a] != b or (a is None) != (b is None) for a, b in zip(place, shown, strict=True)):
        return None
    pairs.pop(None, None)
    order = tuple([pairs.get(i) for i in range(len(pairs))])
    return order if set(order) == set(range(len(source.long))) else None


def _unreduced(order: Map, formula: Apply, node: Node) -> Map | None:
    """The same for the operand of a reduction, if the axes correspond."""
    operand = node.inputs[0]
    if meaning(node) == formula.params and order == identity(node.outputs[0]):
        return identity(operand)
    axes, own = (
        tuple(map(int, re.findall("[0-9]+", p[0][1]))) for p in (formula.params, meaning(node))
    )
    kept = [i for i in range(len(operand.long)) if i not in axes]
    if len(axes) != len(own) or len(kept) != len(order):
        return None
    rest = [i for i in range(len(operand.long)) if i not in own]
    pairs = dict(zip((*axes, *kept), (*own, *(rest[i] for i in order)), strict=True))
    return tuple([pairs[i] for i in range(len(pairs))])


class Matcher:
    """Matches one formula at one value. ``seen`` keeps the furthest that it came."""

    def __init__(self) -> None:
        self._digits = 0  # how many the formula has
        self._eps = 0.0  # that of the narrowest dtype of a number of the program
        self.seen: tuple[Value, ...] = ()
        self.stopped: Value | None = None
        self._budget = 2000  # steps, so that a strange program costs no more

    def __call__(self, formula: Formula, n: int, root: Value, start: State | None = None):
        """The match of a result, with the leaves of another match or any."""
        ratio, wanted, self._digits = formula.at(n)
        start = State({}, {}, ()) if start is None else start
        for state, found in self._scaled(wanted, identity(root), root, identity(root), start):
            if self._near(found, ratio):
                return state
        return None

    def _near(self, a: float, b: float) -> bool:
        """Whether two numbers differ by no more than a rounding, if the program rounds any."""
        rounds = self._digits > 16 or self._eps * 2.0**self._digits > 2
        return near(a, b, self._eps if rounds else 5e-10)

    def _number(self, value: Value) -> float | None:
        """The number that a value is."""
        known = constant(value)
        if known is None:
            return None
        self._round(value)
        return float(known)

    def _round(self, value: Value) -> None:
        """Notes the dtype of a number, or of its product with an array."""
        if value.is_floating:
            self._eps = max(self._eps, float(jnp.finfo(value.dtype).eps))

    def _match(self, formula, place: Map, value: Value, shown: Map, state: State) -> Iterator:
        """States, and the number that the formula must be multiplied with to give the value."""
        self._budget -= 1
        if self._budget < 0:
            return
        if isinstance(formula, Leaf):
            found = self._bind(formula, place, value, shown, state)
            if found is not None:
                yield found, 1.0
            return
        if isinstance(formula, Apply) and formula.name == "select_n":
            yield from self._selection(formula, place, value, shown, state)
        source, inner, passed = resolve(value, narrowing=True)
        state = state.through((*passed, source))
        order = _order(place, compose(shown, inner), source)
        if order is None or source.node is None:
            return
        before = len(state.inner)
        if isinstance(formula, Sum):
            if terms_of(source) is not None:
                items = [(1.0, source, order)]
                yield from self._sum(formula, formula.terms, items, 0.0, None, state, True)
        elif isinstance(formula, Product):
            if factors_of(source) is not None:
                items = [(source, order, 1.0)]
                yield from self._product(formula.factors, items, 1.0, state, True)
        else:
            yield from self._apply(formula, source, order, state)
        if before > len(self.seen):
            self.seen, self.stopped = state.inner, source

    def _selection(self, formula, place: Map, value: Value, shown: Map, state: State) -> Iterator:
        """The same for a selection that is a view, as of labels that count from 0."""
        while (step := view_of(value, False)) is not None:
            state = state.through([value])
            assert value.node is not None
            if value.node.name == "select_n" and (order := _order(place, shown, value)) is not None:
                yield from self._apply(formula, value, order, state)
            value, shown = step[0], compose(shown, step[1])

    def _scaled(self, formula, place: Map, value: Value, shown: Map, state: State) -> Iterator:
        """The same, where the value may be a multiple that the program computes."""
        yield from self._match(formula, place, value, shown, state)
        source, inner, passed = resolve(value, narrowing=True)
        if (multiple := multiple_of(source)) is not None:
            factor, operand = multiple
            if abs(factor) != 1:
                self._round(source)
            map_ = compose(compose(shown, inner), operand_map(source, operand))
            inside = state.through((*passed, source))
            for after, r in self._scaled(formula, place, operand, map_, inside):
                yield after, r * factor

    def _bind(self, leaf: Leaf, place: Map, value: Value, shown: Map, state: State) -> State | None:
        source, inner, passed = resolve(value)
        mapped = _map_of_leaf(place, compose(shown, inner))
        if mapped is None:
            return None
        bound = Bound(source, mapped, (place, shown, value))
        known = state.leaves.get(leaf.index)
        if known is None:
            return State({**state.leaves, leaf.index: bound}, state.free, state.inner)
        if known.map != mapped or not _equal(known.source, source):
            return None
        if known.source is not source:
            state = state.through((*passed, source))
        return state

    def _sum(self, formula, left, items, total, ratio, state, expand=False) -> Iterator:
        while items and (known := self._number(items[0][1])) is not None:
            total += items[0][0] * known
            items = items[1:]
        if not items:
            if not left:
                yield from self._whole_sum(formula, total, ratio, state)
            return
        (factor, value, shown), *rest = items
        if not expand:
            for i, (own, part, place) in enumerate(left):
                free = part.free if isinstance(part, Multiple) else None
                part = part if free is None else part.formula
                for after, r in self._match(part, place, value, shown, state):
                    new = factor * r / own
                    if not math.isfinite(new) or not new:
                        continue
                    others = left[:i] + left[i + 1 :]
                    if free is not None:
                        after = State(after.leaves, {**after.free, free: new}, after.inner)
                        yield from self._sum(formula, others, rest, total, ratio, after)
                    elif ratio is None or self._near(factor * r, ratio * own):
                        yield from self._sum(formula, others, rest, total, new, after)
        source, inner, passed = resolve(value, narrowing=True)
        terms = terms_of(source)
        if terms is None or len(rest) + 1 > len(left) + 1:
            return
        if len(terms) == 1 and abs(terms[0][0]) != 1:
            self._round(source)
        outer = compose(shown, inner)
        more = [(factor * f, v, compose(outer, operand_map(source, v))) for f, v in terms]
        inside = state.through((*passed, source))
        yield from self._sum(formula, left, [*more, *rest], total, ratio, inside)

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

    def _product(self, left, items, total, state, expand=False) -> Iterator:
        while items and (known := self._number(items[0][0])) is not None:
            exponent = items[0][2]
            if (known <= 0 and exponent != int(exponent)) or (known == 0 and exponent < 0):
                return
            total *= known**exponent
            items = items[1:]
        if not items:
            if not left:
                yield state, total
            return
        (value, shown, exponent), *rest = items
        source, inner, passed = resolve(value)
        outer = compose(shown, inner)
        unlike = []
        for v, m, e in rest:
            other, n, _ = resolve(v)
            if other is source and compose(m, n) == outer:  # x * x
                exponent += e
            else:
                unlike.append((v, m, e))
        rest = unlike
        if not expand:
            for i, (part, place, own) in enumerate(left):
                if own != exponent:
                    continue
                for after, r in self._match(part, place, value, shown, state):
                    if r <= 0 and exponent != int(exponent):
                        continue
                    others = left[:i] + left[i + 1 :]
                    yield from self._product(others, rest, total * r**exponent, after)
        source, inner, passed = resolve(value, narrowing=True)
        factors = factors_of(source)
        if factors is None or exponent != int(exponent):
            return
        if len(rest) > sum(max(1, abs(own)) for _, _, own in left):
            return
        outer = compose(shown, inner)
        more = [(v, compose(outer, operand_map(source, v)), e * exponent) for v, e in factors]
        inside = state.through((*passed, source))
        yield from self._product(left, [*more, *rest], total * sign_of(source) ** exponent, inside)

    def _apply(self, formula: Apply, source: Value, order: Map, state: State) -> Iterator:
        node = source.node
        assert node is not None
        if node.name != formula.name or len(node.inputs) != len(formula.operands):
            return
        if node.name in REDUCTIONS:
            found = _unreduced(order, formula, node)
            if found is None:
                return
            order = found
        elif meaning(node) != formula.params:
            return
        elif node.name not in ELEMENTWISE and order != identity(source):
            return
        orders = [node.inputs]
        if node.name in _COMMUTATIVE:
            orders.append(node.inputs[::-1])
        for inputs in orders:
            for after in self._operands(formula.operands, inputs, source, order, state):
                yield after, 1.0

    def _operands(self, formulas, inputs, source: Value, order: Map, state: State) -> Iterator:
        if not formulas:
            yield state
            return
        formula, value = formulas[0], inputs[0]
        if isinstance(formula, float):
            known = self._number(value)
            is_near = self._near if value.is_floating else operator.eq
            if known is not None and is_near(known, formula):
                yield from self._operands(formulas[1:], inputs[1:], source, order, state)
            return
        part, place, factor = formula
        assert source.node is not None
        if source.node.name in ELEMENTWISE:
            shown = compose(order, operand_map(source, value))
        else:
            shown = order if source.node.name in REDUCTIONS else identity(value)
        for after, r in self._scaled(part, place, value, shown, state):
            if self._near(r, factor):
                yield from self._operands(formulas[1:], inputs[1:], source, order, after)


def _equal(a: Value, b: Value, depth: int = 8) -> bool:
    """Whether two values are computed alike."""
    if a is b:
        return True
    x, y = constant(a), constant(b)
    if x is not None or y is not None:
        return x is not None and y is not None and x == y and a.aval == b.aval
    if a.node is None or b.node is None or not depth or a.node.name != b.node.name:
        return False
    if a.aval != b.aval or len(a.node.inputs) != len(b.node.inputs) or a.node.equation.effects:
        return False
    if a.node.outputs.index(a) != b.node.outputs.index(b):
        return False
    return str(a.node.params) == str(b.node.params) and all(
        _equal(v, w, depth - 1) for v, w in zip(a.node.inputs, b.node.inputs, strict=True)
    )
