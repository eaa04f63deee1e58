"""What a pattern is: a function in plain JAX, and the call of an op that replaces it.

A pattern is traced and compiled to formulas, with which the matcher compares a program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops import _compat
from jax_fastops._settings import fixed
from jax_fastops.autofuse._graph import Graph
from jax_fastops.autofuse._meaning import ELEMENTWISE, REDUCTIONS
from jax_fastops.autofuse._value import Map, Value, View, compose

# What a leaf of the pattern is, by the name of the argument.
KINDS = {
    **dict.fromkeys(("x", "up", "residual", "start", "end", "weight"), "full"),
    **dict.fromkeys(("scale", "bias", "mean", "var"), "row"),
    **{"where": "mask", "labels": "labels", "tokens": "tokens"},
    **dict.fromkeys(("eps", "share", "smooth", "z"), "free"),
}
MAX_RANK = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """``function`` is the code to find; ``call`` is what replaces it.

    Attributes:
      name: what the report calls it.
      function: a function of the leaves, and of the keyword ``axis``. If it has several results,
        the call computes them all.
      leaves: the names of the operands, which say what each of them is (``KINDS``).
      needs: names of operations that each program with the pattern has, as in ``Formula``, so that
        the pattern is not traced for other programs. All its reductions are among them.
      over_others: whether its reductions are over all dimensions but the axis.
      call: an op of the leaves as keywords, and of ``axis`` if ``axes`` is ``"each"``.
      fixed: leaves that are numbers. So one function is several patterns: without a bias, which is
        0, or with one. The call takes the free ones of them.
      axes: the axes to try: ``"last"``, ``"each"``, or ``"none"`` if the pattern has no axis.
      sum_of: the op if ``x`` is the sum of two arrays ``x`` and ``residual``.
      residual: as ``sum_of``, but it also returns the sum, with ``return_sum``, and may take a
        dropout of ``x`` and a row ``input_bias``.
      biased: the op if ``x`` is the sum of an array and a row ``bias``.
      scaled: whether the call takes a factor of ``x`` as ``scale``.
      masked: whether the call takes a mask of ``x`` as ``where``.
      fanout: whether the op can give its result twice, so that the backward takes two cotangents in
        place of their sum.
    """

    name: str
    function: Callable[..., Any]
    leaves: tuple[str, ...]
    call: Callable[..., Any]
    needs: frozenset[str] = frozenset()
    over_others: bool = False
    fixed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    axes: str = "none"
    sum_of: Callable[..., Any] | None = None
    residual: Callable[..., Any] | None = None
    biased: Callable[..., Any] | None = None
    scaled: bool = False
    masked: bool = False
    fanout: bool = False

    @functools.cache  # noqa: B019
    def reductions(self, rank: int, axis: int) -> frozenset[Any]:
        """Its reductions for arrays of this rank, each with its axes."""
        axes = tuple(i for i in range(rank) if (i != axis) is self.over_others)
        return frozenset((name, (("axes", str(axes)),)) for name in self.needs & REDUCTIONS)

    def count(self, sizes: tuple[int, ...], axis: int) -> int:
        """How many elements its means are over."""
        return math.prod(sizes) // sizes[axis] if self.axes == "each" else (sizes or (1,))[axis]


_SIZES = (101, 103, 107, 109, 113, 127, 131, 137)  # no constant of a pattern is one of these


@functools.lru_cache(64)  # more graphs would cost Python's garbage collector time
def _traced(
    function: Callable, leaves: tuple[str, ...], rank: int, axis: int, dtype: Any, x64: bool
) -> Graph:
    """The graph of the function of a pattern."""
    shape = _SIZES[:rank]
    kinds = {
        "full": jax.ShapeDtypeStruct(shape, dtype),
        "row": jax.ShapeDtypeStruct(shape[axis:][:1], dtype),
        "mask": jax.ShapeDtypeStruct(shape, jnp.bool_),
        "labels": jax.ShapeDtypeStruct(shape[:-1], jnp.int32),
        "tokens": jax.ShapeDtypeStruct(shape[:-1], dtype),
        "free": jax.ShapeDtypeStruct((), dtype),
    }
    operands = [kinds[KINDS[leaf]] for leaf in leaves]
    with fixed(x64):
        traced = jax.make_jaxpr(functools.partial(function, axis=axis))(*operands)
    return Graph(traced.jaxpr, traced.consts, is_pattern=True)


@functools.cache
def compiled(
    pattern: Pattern, rank: int, axis: int, n: int = 0, dtype: Any = jnp.float32,
    x64: bool = False, others: bool = False,
) -> list[Formula]:  # fmt: skip
    """The formula of the first result or those of the others, for arrays of up to eight dimensions.

    ``n`` is how many elements means are over. ``dtype`` is float64 for results of that dtype, so
    that no number is rounded to float32. ``x64`` says whether the program was traced with 64-bit
    types, which indices have then.
    """
    graph = _traced(pattern.function, pattern.leaves, rank, axis, dtype, x64)
    traced = pattern.count(_SIZES[:rank], axis)
    if n and not any(v.number == traced for node in graph.nodes for v in node.inputs):
        return compiled(pattern, rank, axis, 0, dtype, x64, others)  # it has no means
    results = graph.results[1:] if others else graph.results[:1]
    with fixed(x64):  # derivative rules are traced
        return [Compiler(graph, pattern, traced, n or traced)(value) for value in results]


def formulas(
    pattern: Pattern, dtype: Any, rank: int, axis: int, n: int = 0, others: bool = False
) -> list[Formula]:
    """:func:`compiled` for results of a dtype in the program that is searched."""
    wide = np.float64 if dtype == np.float64 else np.float32  # their hashes take no time
    return compiled(pattern, rank, axis, n, wide, _compat.x64_is_on(), others)


PATTERNS: list[Pattern] = []


def add(
    name: str, function: Callable, leaves: str, call: Callable, needs: str = "", **more: Any
) -> None:
    """Adds a pattern. ``leaves`` and ``needs`` are names with spaces between."""
    operations = frozenset(needs.split())
    PATTERNS.append(Pattern(name, function, tuple(leaves.split()), call, operations, **more))


# ---- formulas ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An operand of the pattern."""

    index: int


@dataclasses.dataclass(frozen=True)
class Sum:
    """``constant + free + sum of factor * term``, where ``free`` is a number that may be any."""

    terms: tuple[tuple[float, Any, Map], ...]
    constants: tuple[float, ...] = ()
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


@dataclasses.dataclass(frozen=True)
class Formula:
    """A result of a pattern: ``factor * formula``.

    Attributes:
      digits: the binary digits of its longest number. A dtype of fewer digits rounds it.
      kind: what is at the top.
      needs: the names of its operations, of roots ``"root"``, without sums and products.
      size: the number of its operations.
    """

    factor: float
    formula: Any
    digits: int
    kind: str
    needs: frozenset[str]
    size: int


class _Facts(NamedTuple):
    """What is known of a formula: see :class:`Formula`. ``numbers`` are those that are not free."""

    size: int
    needs: frozenset[str]
    numbers: frozenset[float]


def _facts(formula: Any, known: dict[int, _Facts]) -> _Facts:
    """What is known of a formula. ``known`` has this by ids, because formulas share parts."""
    if (found := known.get(id(formula))) is not None:
        return found
    parts: Sequence[Any] = ()
    needs, numbers = set[str](), set[float]()
    if isinstance(formula, Sum):
        parts = [f for _, f, _ in formula.terms]
        numbers.update((c for c, _, _ in formula.terms), formula.constants)
    elif isinstance(formula, Multiple):
        parts = [formula.formula]
    elif isinstance(formula, Product):
        parts = [f for f, _, _ in formula.factors]
        for f, _, e in formula.factors:
            if e % 1:  # a program may take a number out of a root
                needs.add("root")
                numbers.update(abs(c) ** e for c in _facts(f, known).numbers if c)
    elif isinstance(formula, Apply):
        parts = [o[0] for o in formula.operands if isinstance(o, tuple)]
        numbers.update(o if isinstance(o, float) else o[2] for o in formula.operands)
        needs.add(formula.name)
    inner = [_facts(part, known) for part in parts]
    found = known[id(formula)] = _Facts(
        1 + sum(one.size for one in inner),
        frozenset(needs.union(*(one.needs for one in inner))),
        frozenset(numbers.union(*(one.numbers for one in inner))),
    )
    return found


def near(a: float, b: float, eps: float) -> bool:
    """Whether a dtype with this epsilon may have ``a`` in place of ``b``.

    ``a`` may be a rounding of ``b``, or of ``n`` where ``b`` is ``1 / n``. In float32 and float64,
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


class Compiler:
    """Makes formulas of the results of a traced pattern, for means over ``n`` elements.

    In the trace, the number of these elements is ``traced``.
    """

    def __init__(self, graph: Graph, pattern: Pattern, traced: int, n: int):
        self._leaves = {v: i for i, v in enumerate(graph.operands)}
        self._free = {i for i, leaf in enumerate(pattern.leaves) if KINDS[leaf] == "free"}
        named = zip(graph.operands, pattern.leaves, strict=True)
        self._fixed = {v: pattern.fixed[leaf] for v, leaf in named if leaf in pattern.fixed}
        self._traced, self._n = traced, n
        self._known: dict[Value, tuple[float, tuple[Any, Map]]] = {}

    def __call__(self, value: Value) -> Formula:
        """The formula of a result."""
        factor, (formula, _) = self._compile(value)
        size, needs, numbers = _facts(formula, {})
        digits = max(map(_digits, (factor, *numbers)))
        kind = formula.name if isinstance(formula, Apply) else type(formula).__name__
        return Formula(factor, formula, digits, kind, needs, size - 1)

    def _number(self, value: Value) -> float | None:
        if (source := value.source().value) in self._fixed:
            return self._fixed[source]
        known = value.number
        return known if known is None else float(self._n if known == self._traced else known)

    def _compile(self, value: Value) -> tuple[float, tuple[Any, Map]]:
        """A factor, a formula, and the map from the value to the formula's dimensions."""
        if value not in self._known:
            self._known[value] = self._new(value)
        return self._known[value]

    def _new(self, value: Value) -> tuple[float, tuple[Any, Map]]:
        if value in self._leaves:
            return 1.0, (Leaf(self._leaves[value]), value.identity)
        if (step := value.view(True)) is not None:
            return self._seen(step)
        if value.node.name in ("add", "add_any", "sub"):
            return self._sum(value)
        if (factors := value.factors) is not None:
            return self._product(value, factors)
        return 1.0, (self._apply(value), value.identity)

    def _seen(self, view: View) -> tuple[float, tuple[Any, Map]]:
        factor, (formula, inner) = self._compile(view.value)
        return factor, (formula, compose(view.map, inner))

    def _is_free(self, formula) -> bool:
        return isinstance(formula, Leaf) and formula.index in self._free

    def _sum(self, value: Value) -> tuple[float, tuple[Any, Map]]:
        terms: list[tuple[float, Any, Map]] = []
        constants: list[float] = []
        free = None
        for sign, operand in value.terms or []:
            if (known := self._number(operand)) is not None:
                constants.append(sign * known)
                continue
            factor, (formula, outer) = self._seen(value.seen.of(operand))
            factor *= sign
            if not factor:
                continue
            if self._is_free(formula):
                free = formula.index
            elif isinstance(formula, Sum) and formula.free is None:
                constants += [factor * c for c in formula.constants]
                terms += [(factor * f, t, compose(outer, m)) for f, t, m in formula.terms]
            else:
                terms.append((factor, formula, outer))
        if len(terms) == 1 and free is None and not any(constants):
            return terms[0][0], terms[0][1:]
        return 1.0, (Sum(tuple(terms), tuple(constants), free), value.identity)

    def _product(self, value: Value, given) -> tuple[float, tuple[Any, Map]]:
        exponents: dict[tuple[Any, Map], float] = {}
        total, free = value.sign, None
        for operand, exponent in given:
            if (known := self._number(operand)) is not None:
                total *= known**exponent
                continue
            factor, (formula, outer) = self._seen(value.seen.of(operand))
            total *= factor**exponent
            if self._is_free(formula):
                free = formula.index
            elif isinstance(formula, Product) and exponent == int(exponent):
                for f, m, e in formula.factors:
                    key = f, compose(outer, m)
                    exponents[key] = exponents.get(key, 0.0) + e * exponent
            else:
                key = formula, outer
                exponents[key] = exponents.get(key, 0.0) + exponent
        factors = tuple((f, m, e) for (f, m), e in exponents.items())
        only = len(factors) == 1 and factors[0][2] == 1
        formula, shown = factors[0][:2] if only else (Product(factors), value.identity)
        return total, (formula if free is None else Multiple(free, formula), shown)

    def _apply(self, value: Value) -> Apply:
        node = value.node
        operands: list[Any] = []
        for operand in node.inputs:
            if (known := self._number(operand)) is not None:
                operands.append(known)
                continue
            view = value.seen.of(operand) if node.name in ELEMENTWISE else operand.seen
            factor, (formula, shown) = self._seen(view)
            operands.append((formula, shown, factor))
        return Apply(node.name, node.meaning, tuple(operands))
