"""Formulas of patterns, and the compiler that makes them of traced functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax_fastops._autofuse.graph import Graph, Value
from jax_fastops._autofuse.meaning import (
    ELEMENTWISE,
    REDUCTIONS,
    Map,
    compose,
    constant,
    factors_of,
    identity,
    meaning,
    operand_map,
    sign_of,
    terms_of,
    view_of,
)


@dataclasses.dataclass(frozen=True)
class Factor:
    """``number * n ** power``, where ``n`` is how many elements a mean is over."""

    number: float = 1.0
    power: float = 0.0

    def __mul__(self, other: Factor) -> Factor:
        return Factor(self.number * other.number, self.power + other.power)

    def __pow__(self, exponent: float) -> Factor:
        return Factor(self.number**exponent, self.power * exponent)

    def at(self, n: int) -> float:
        return self.number * float(n) ** self.power if self.power else self.number


_ONE = Factor()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An operand of the pattern."""

    index: int


@dataclasses.dataclass(frozen=True)
class Sum:
    """``constant + free + sum of factor * term``, where ``free`` is a number that may be any."""

    terms: tuple[tuple[Any, Any, Map], ...]
    constants: tuple[Any, ...] = ()
    free: int | None = None

    @property
    def constant(self) -> float:
        return math.fsum(self.constants)


@dataclasses.dataclass(frozen=True)
class Multiple:
    """A term of a sum, times a number that may be any: the operand ``free``."""

    free: int
    formula: Any


@dataclasses.dataclass(frozen=True)
class Product:
    """Factors, each with its map and its exponent."""

    factors: tuple[tuple[Any, Map, float], ...]


@dataclasses.dataclass(frozen=True)
class Apply:
    """Any other operation. An operand is a number, or a formula with its map and a factor."""

    name: str
    params: tuple
    operands: tuple[Any, ...]


def _parts(formula) -> list:
    """The formulas that one is made of."""
    if isinstance(formula, Sum):
        return [f for _, f, _ in formula.terms]
    if isinstance(formula, Multiple):
        return [formula.formula]
    if isinstance(formula, Product):
        return [f for f, _, _ in formula.factors]
    if isinstance(formula, Apply):
        return [o[0] for o in formula.operands if isinstance(o, tuple)]
    return []


def _size_of(formula) -> int:
    """The number of operations of a formula."""
    return sum(1 + _size_of(part) for part in _parts(formula))


def _needs(formula) -> frozenset:
    """The names of the operations that a formula has, and which axes it reduces."""
    found: set = {formula.name} if isinstance(formula, Apply) else set()
    if isinstance(formula, Apply) and formula.name in REDUCTIONS:
        found.add((formula.name, formula.params))
    if isinstance(formula, Product) and any(e % 1 for _, _, e in formula.factors):
        found.add("root")
    return frozenset(found).union(*map(_needs, _parts(formula)))


def _numbers_of(formula) -> Iterator[float]:
    """The numbers of a formula, without the free ones."""
    if isinstance(formula, Sum):
        yield from (c for c, _, _ in formula.terms)
        yield from formula.constants
    if isinstance(formula, Apply):
        yield from (o if isinstance(o, float) else o[2] for o in formula.operands)
    if isinstance(formula, Product):  # a program may take a number out of a root
        roots = [(f, e) for f, _, e in formula.factors if e % 1]
        yield from (abs(c) ** e for f, e in roots for c in _numbers_of(f) if c)
    for part in _parts(formula):
        yield from _numbers_of(part)


def near(a: float, b: float, eps: float) -> bool:
    """Whether a dtype with this epsilon may have ``a`` in place of ``b``.

    That is a rounding of ``b``, or of ``n`` where ``b`` is ``1 / n``. In float32 and float64,
    several roundings may be between them.
    """
    if a != a or b != b:
        return a != a and b != b
    if a == b or eps < 1e-4:
        return a == b or abs(a - b) <= 2 * eps * max(abs(a), abs(b)) < math.inf
    pairs = [(a, b)]
    if a and b and abs(math.remainder(n := 1 / b, 1)) < 1e-6 * abs(n) < math.inf:
        pairs.append((1 / a, n))
    half = 0.501 * eps  # of the last binary digit of a number from 1 to 2
    return any(abs(x - y) <= half * 2.0 ** (math.frexp(y)[1] - 1) < math.inf for x, y in pairs)


def _digits(number: float) -> int:
    """The binary digits of a number."""
    numerator = abs(number).as_integer_ratio()[0] if math.isfinite(number) else 0
    return (numerator // (numerator & -numerator)).bit_length() if numerator else 0


def _at(formula, n: int):
    """The formula with numbers in place of factors."""
    if isinstance(formula, Sum):
        terms = tuple((c.at(n), _at(f, n), m) for c, f, m in formula.terms)
        return Sum(terms, tuple(c.at(n) for c in formula.constants), formula.free)
    if isinstance(formula, Multiple):
        return Multiple(formula.free, _at(formula.formula, n))
    if isinstance(formula, Product):
        return Product(tuple((_at(f, n), m, e) for f, m, e in formula.factors))
    if isinstance(formula, Apply):
        operands = tuple(
            o.at(n) if isinstance(o, Factor) else (_at(o[0], n), o[1], o[2].at(n))
            for o in formula.operands
        )
        return Apply(formula.name, formula.params, operands)
    return formula


class Formula:
    """A result of a pattern: ``factor * formula``, for means over any number of elements."""

    def __init__(self, factor: Factor, formula: Any):
        self._factor, self._formula = factor, formula
        self.kind = formula.name if isinstance(formula, Apply) else type(formula).__name__
        self.needs = _needs(formula)
        self.size = _size_of(formula)
        self._numbers: dict[int, tuple[float, Any, int]] = {}

    def at(self, n: int) -> tuple[float, Any, int]:
        """The factor and the formula for means over ``n`` elements, and how many digits it has.

        These are the binary digits of its longest number. A dtype of fewer digits rounds it.
        """
        if n not in self._numbers:
            factor, formula = self._factor.at(n), _at(self._formula, n)
            digits = max(map(_digits, (factor, *_numbers_of(formula))))
            self._numbers[n] = factor, formula, digits
        return self._numbers[n]


class Compiler:
    """Makes formulas of the results of a traced pattern, whose means are over ``n`` elements."""

    def __init__(self, graph: Graph, free: Sequence[int], n: int):
        self._leaves = {id(v): i for i, v in enumerate(graph.operands)}
        self._free, self._n = set(free), n

    def _number(self, known) -> Factor:
        return Factor(1.0, 1.0) if known == self._n else Factor(float(known))

    def __call__(self, value: Value) -> Formula:
        """The formula of a result."""
        factor, formula, _ = self._compile(value)
        return Formula(factor, formula)

    def _compile(self, value: Value) -> tuple[Factor, Any, Map]:
        """A factor, a formula, and the map from the value to the formula's dimensions."""
        if id(value) in self._leaves:
            return _ONE, Leaf(self._leaves[id(value)]), identity(value)
        if (step := view_of(value, True)) is not None:
            factor, formula, inner = self._compile(step[0])
            return factor, formula, compose(step[1], inner)
        if value.node is not None and value.node.name in ("add", "add_any", "sub"):
            return self._sum(value)
        if (factors := factors_of(value)) is not None:
            return self._product(value, factors)
        return _ONE, self._apply(value), identity(value)

    def _sum(self, value: Value) -> tuple[Factor, Any, Map]:
        terms: list[tuple[Factor, Any, Map]] = []
        constants: list[Factor] = []
        free = None
        for sign, operand in terms_of(value) or []:
            if (known := constant(operand)) is not None:
                constants.append(Factor(sign) * self._number(known))
                continue
            factor, formula, inner = self._compile(operand)
            factor = Factor(sign) * factor
            outer = compose(operand_map(value, operand), inner)
            if isinstance(formula, Leaf) and formula.index in self._free:
                free = formula.index
            elif isinstance(formula, Sum) and formula.free is None:
                constants += [factor * c for c in formula.constants]
                terms += [(factor * f, t, compose(outer, m)) for f, t, m in formula.terms]
            else:
                terms.append((factor, formula, outer))
        return _ONE, Sum(tuple(terms), tuple(constants), free), identity(value)

    def _product(self, value: Value, given) -> tuple[Factor, Any, Map]:
        found: dict[tuple[Any, Map], float] = {}
        total, free = Factor(sign_of(value)), None
        for operand, exponent in given:
            if (known := constant(operand)) is not None:
                total *= self._number(known) ** exponent
                continue
            factor, formula, inner = self._compile(operand)
            total *= factor**exponent
            if isinstance(formula, Leaf) and formula.index in self._free:
                free = formula.index
                continue
            outer = compose(operand_map(value, operand), inner)
            inside = ((formula, None, 1.0),)
            if isinstance(formula, Product) and exponent == int(exponent):
                inside = formula.factors
            for f, m, e in inside:
                key = f, outer if m is None else compose(outer, m)
                found[key] = found.get(key, 0.0) + e * exponent
        factors = tuple((f, m, e) for (f, m), e in found.items())
        whole: tuple[Any, Map] = Product(factors), identity(value)
        if len(factors) == 1 and factors[0][2] == 1:
            whole = factors[0][:2]
        return total, whole[0] if free is None else Multiple(free, whole[0]), whole[1]

    def _apply(self, value: Value) -> Apply:
        node = value.node
        assert node is not None, value.aval
        operands: list[Any] = []
        for operand in node.inputs:
            if (known := constant(operand)) is not None:
                operands.append(self._number(known))
                continue
            factor, formula, inner = self._compile(operand)
            outer = operand_map(value, operand) if node.name in ELEMENTWISE else identity(operand)
            operands.append((formula, compose(outer, inner), factor))
        return Apply(node.name, meaning(node), tuple(operands))
