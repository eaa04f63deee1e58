"""Finds a pattern in a program: a function, traced, and compared with the program as a formula.

Formulas are compared modulo what does not change a result beyond rounding: the order and grouping
of sums and products, divisions and powers as exponents, constant factors, dimensions of size 1,
broadcasts, transpositions, and casts to a wider dtype between. A map tells for each dimension of
one array which dimension of another it is, or ``None`` if that one is broadcast along it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_fastops import _compat
from jax_fastops._autofuse.graph import Graph, Node, Value

Map = tuple  # of int | None

# ---- what the equations of a program mean --------------------------------------------------------

FOLDED: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: cases[int(which)],
    "broadcast_in_dim": lambda x, *_: x,
    "reshape": lambda x, *_: x,
    "squeeze": lambda x, *_: x,
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
    "pvary": lambda x: x,
    "pcast": lambda x: x,
}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
_ELEMENTWISE = {
    *("exp", "log", "tanh", "erf", "erfc", "logistic", "max", "min", "abs", "is_finite", "sign"),
    *("select_n", "stop_gradient", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"),
}
# XLA fuses these with each other.
FUSIBLE = _ELEMENTWISE | {
    *("add", "add_any", "sub", "mul", "div", "neg", "square", "sqrt", "rsqrt", "integer_pow"),
    *("pow", "convert_element_type", "broadcast_in_dim", "clamp", "sin", "cos", "log1p", "expm1"),
}
_IN_NO_PATTERN = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call"}
_COMMUTATIVE = {"max", "min", "eq", "ne", "and", "or"}
# They do not change the values.
_IGNORED_PARAMS = {
    *("accuracy", "sharding", "out_sharding", "weak_type", "new_dtype"),
    *("indices_are_sorted", "unique_indices"),
}


def constant(value: Value) -> Any:
    """The one number that an array consists of, or ``None``."""
    node = value.node
    if node is not None and not value.is_folded:
        value.is_folded = True
        if node.name == "convert_element_type" or node.name in FOLDED:
            given = [constant(v) for v in node.inputs]
            whole = node.name == "div" and not value.is_floating  # rounds towards 0
            if given and not whole and all(x is not None for x in given):
                with np.errstate(all="ignore"):
                    if node.name == "convert_element_type":
                        found = given[0].astype(node.params["new_dtype"])
                    else:
                        found = FOLDED[node.name](*given)
                value.constant = np.asarray(found)
    return value.constant


_IDENTITIES = [tuple(range(n)) for n in range(100)]


def identity(value: Value) -> Map:
    return _IDENTITIES[len(value.long)]


def compose(outer: Map, inner: Map) -> Map:
    if inner is _IDENTITIES[len(inner)]:
        return outer
    return tuple([None if i is None else inner[i] for i in outer])


def _same_view(value: Value, operand: Value) -> tuple[Value, Map] | None:
    return (operand, identity(value)) if value.sizes == operand.sizes else None


def _view(value: Value, narrowing: bool) -> tuple[Value, Map] | None:
    """An array of the same elements, and the map from this value's dimensions to its own."""
    node = value.node
    if node is None or not node.inputs:
        return None
    operand = node.inputs[0]
    if node.name == "broadcast_in_dim":
        place = {d: i for i, d in enumerate(node.params["broadcast_dimensions"])}
        index = {d: i for i, d in enumerate(operand.long)}
        return operand, tuple(index.get(place[d]) if d in place else None for d in value.long)
    if node.name == "reshape" and node.params.get("dimensions") is None:
        return _same_view(value, operand)
    if node.name == "transpose":
        order = node.params["permutation"]
        return operand, tuple(operand.long.index(order[d]) for d in value.long)
    if node.name in ("squeeze", "expand_dims", "slice", "copy", "copy_p", "pvary", "pcast"):
        return _same_view(value, operand)
    if node.name == "reshard" and value.aval.sharding.spec == operand.aval.sharding.spec:
        return _same_view(value, operand)  # of jnp.where in a mesh
    if node.name == "convert_element_type":
        if not (value.is_floating and operand.is_floating):
            return None
        wider = value.dtype.itemsize > operand.dtype.itemsize or value.dtype == operand.dtype
        narrower = value.dtype.itemsize < operand.dtype.itemsize
        return _same_view(value, operand) if wider or (narrowing and narrower) else None
    unit = {"sub": 0, "div": 1}.get(node.name)
    if unit is not None and (known := constant(node.inputs[1])) is not None and known == unit:
        return _same_view(value, operand)
    if node.name == "max":
        for limit, other in (node.inputs, node.inputs[::-1]):
            if (known := constant(limit)) is not None and known == -np.inf:
                return _same_view(value, other)
    if node.name in ("and", "or"):  # with True, or with False
        for neutral, other in (node.inputs, node.inputs[::-1]):
            known = constant(neutral)
            if value.dtype == bool and known is not None and known == (node.name == "and"):
                return _same_view(value, other)
    if node.name == "select_n" and (known := constant(operand)) is not None:
        return _same_view(value, node.inputs[1 + int(known)])
    if node.name == "gather" and value.sizes == operand.sizes:  # `take` of the only element
        indexed = node.params["dimension_numbers"].start_index_map
        if constant(node.inputs[1]) == 0 and all(operand.shape[d] == 1 for d in indexed):
            return operand, identity(value)
    return None


def resolve(value: Value, narrowing: bool = False) -> tuple[Value, Map, list[Value]]:
    """The array that a value shows, the map to it, and the values between."""
    known = value.resolved.get(narrowing)
    if known is None:
        step = _view(value, narrowing)
        if step is None:
            known = value, identity(value), []
        else:
            source, inner, passed = resolve(step[0], narrowing)
            known = source, compose(step[1], inner), [value, *passed]
        value.resolved[narrowing] = known
    return known


def operand_map(value: Value, operand: Value) -> Map:
    """From the dimensions of an element-wise result to those of an operand."""
    if len(operand.shape) != len(value.shape):  # a scalar
        return (None,) * len(value.long)
    if operand.long == value.long:
        return identity(value)
    index = {d: i for i, d in enumerate(operand.long)}
    return tuple([index.get(d) for d in value.long])


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


def terms_of(value: Value) -> list[tuple[float, Value]] | None:
    """The summands of a value with their factors."""
    node = value.node
    if node is None:
        return None
    if node.name in ("add", "add_any", "sub"):
        a, b = node.inputs
        return [(1.0, a), (-1.0 if node.name == "sub" else 1.0, b)]
    if node.name == "neg":
        return [(-1.0, node.inputs[0])]
    if node.name in ("mul", "div") and value.is_floating:
        a, b = node.inputs
        if (k := constant(b)) is not None and k:
            return [(float(k) if node.name == "mul" else 1 / float(k), a)]
        if node.name == "mul" and (k := constant(a)) is not None:
            return [(float(k), b)]
    return None


def with_row(value: Value) -> Iterator[tuple[Value, Value]]:
    """The array and the row along the last axis whose sum a value is."""
    node = value.node
    if node is not None and node.name in ("add", "add_any") and value.shape[-1:] != (1,):
        for x, bias in (node.inputs, node.inputs[::-1]):
            row, inner, _ = resolve(bias)
            last = (None,) * (len(value.long) - 1) + (0,)
            shown = compose(operand_map(value, bias), inner)
            if shown == last and (x.shape, x.dtype) == (value.shape, value.dtype):
                yield x, row


def _factors(value: Value) -> list[tuple[Value, float]] | None:
    """The factors of a value with their exponents."""
    node = value.node
    if node is None or not value.is_floating:
        return None
    exponent = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}.get(node.name)
    if node.name == "integer_pow":
        exponent = float(node.params["y"])
    if node.name == "pow" and (k := constant(node.inputs[1])) is not None:
        exponent = float(k)
    if exponent is not None:
        return [(node.inputs[0], exponent)]
    if node.name in ("mul", "div"):
        a, b = node.inputs
        return [(a, 1.0), (b, 1.0 if node.name == "mul" else -1.0)]
    if node.name == "neg":
        return [(node.inputs[0], 1.0)]
    return None


def meaning(node: Node) -> tuple:
    """What makes an operation this one: its parameters, without what depends on sizes."""
    if node.meaning is None:
        node.meaning = _meaning(node)
    return node.meaning


def _meaning(node: Node) -> tuple:
    params = {k: v for k, v in node.params.items() if k not in _IGNORED_PARAMS}
    if node.name in _REDUCTIONS:
        long = node.inputs[0].long
        params = {"axes": tuple(sorted(long.index(a) for a in params["axes"] if a in long))}
    if node.name == "iota":
        long = node.outputs[0].long
        dimension = node.params["dimension"]
        params = {"along": long.index(dimension) if dimension in long else None}
        if _wraps(node.outputs[0], dimension):
            params["wraps"] = True
    if node.name == "custom_jvp_call":
        params = {"rule": _derivative_rule(node)}
    if node.name == "gather" and (along := _picks(node)) is not None:
        params = {"along": along, "fill": params["fill_value"], "mode": params["mode"]}
    return tuple(sorted((k, str(v)) for k, v in params.items()))


def _wraps(indices: Value, dimension: int) -> bool:
    """Whether the dtype of indices along a dimension is too narrow for the largest of them."""
    size = indices.shape[dimension]
    integers = jnp.issubdtype(indices.dtype, jnp.integer)
    return integers and isinstance(size, int) and size - 1 > jnp.iinfo(indices.dtype).max


def _picks(node: Node) -> int | None:
    """The dimension along which a gather picks one element for each index, if it does that.

    The other dimensions are those of the indices, in order. One of size 1 may be a slice as well.
    """
    x, indices = node.inputs
    numbers = node.params["dimension_numbers"]
    index = numbers.start_index_map
    if len(index) != 1 or index[0] not in x.long or any(n != 1 for n in node.params["slice_sizes"]):
        return None
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    mapped = [(int(i), int(j)) for i, j in pairs if i in x.long]
    others = [i for i in x.long if i != index[0]]
    same = mapped == list(zip(others, indices.long, strict=False)) and len(mapped) == len(others)
    if not same or len(indices.long) != len(others) or indices.shape[-1] != 1:
        return None
    return x.long.index(index[0])


# By the function, which stays no longer than its user keeps it.
_rules: weakref.WeakKeyDictionary[Callable, dict[tuple, str]] = weakref.WeakKeyDictionary()


def _derivative_rule(node: Node) -> str:
    """The value and the derivative of a function with a rule of its own, as text without shapes."""
    rule = _compat.derivative_rule(node.equation)
    if rule is None:
        return _traced_rule(node)
    function, *given = rule
    known = _rules.setdefault(function, {})
    key = *given, *((v.shape, v.dtype) for v in node.inputs)
    if key not in known:
        known[key] = _traced_rule(node)
    return known[key]


def _traced_rule(node: Node) -> str:
    def call(*args):
        found = node.equation.primitive.get_bind_params(node.params)
        subfuns, params = found if isinstance(found, tuple) else ((), found)
        return node.equation.primitive.bind(*subfuns, *args, **params)

    x = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.inputs]
    try:
        return _text(jax.make_jaxpr(lambda x, t: jax.jvp(call, x, t))(x, x).jaxpr)
    except Exception:  # whatever the rule raises, it is not one of ours
        return f"unknown {id(node)}"


def _text(jaxpr) -> str:
    """A program without shapes. A broadcast number is the number: `vmap` broadcasts it again."""
    names = {v: f"operand {i}" for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    numbers, lines = set(), []

    def name(atom):
        return str(np.asarray(atom.val).tolist()) if isinstance(atom, Literal) else names[atom]

    for equation in jaxpr.eqns:
        operands = [name(x) for x in equation.invars]
        outs = equation.outvars
        names |= {v: f"result {i} of {len(lines)}" for i, v in enumerate(outs)}
        first = equation.invars[0] if equation.invars else None
        if equation.primitive.name == "broadcast_in_dim" and (
            isinstance(first, Literal) or first in numbers
        ):
            names[outs[0]] = operands[0]
            numbers.add(outs[0])
        else:
            lines.append((_without_shapes(str(equation)), operands))
    return str((lines, [name(v) for v in jaxpr.outvars]))


def _without_shapes(text: str) -> str:
    """Also without the places where lines are broken, which depend on the shapes."""
    text = re.sub(r"\b[a-z]+[0-9]*\[[0-9,]*\]|\([0-9, ]*\)", "", text)
    return re.sub(r"[\s;]+", " ", text)


# ---- formulas of patterns ------------------------------------------------------------------------


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


def parts(formula) -> list:
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


def size_of(formula) -> int:
    """The number of operations of a formula."""
    return sum(1 + size_of(part) for part in parts(formula))


def needs(formula) -> frozenset:
    """The names of the operations that a formula has, and which axes it reduces."""
    found: set = {formula.name} if isinstance(formula, Apply) else set()
    if isinstance(formula, Apply) and formula.name in _REDUCTIONS:
        found.add((formula.name, formula.params))
    if isinstance(formula, Product) and any(e % 1 for _, _, e in formula.factors):
        found.add("root")
    return frozenset(found).union(*map(needs, parts(formula)))


def near(value: Value, limit: int = 80) -> tuple[set, tuple]:
    """The same for the operations right before a value, and what tells them from others."""
    found: set = set()
    key: list = []
    seen, left = {value}, deque([value])
    while left and len(seen) < limit:
        value = left.popleft()
        node = value.node
        key += (value.shape, value.dtype)
        if node is None:
            key.append(None if value.constant is None else str(value.constant))  # NaN is not NaN
        else:
            told = node.name in _REDUCTIONS or node.name in ("custom_jvp_call", "transpose")
            key += (node.name, meaning(node) if told else None)
            found.add("root" if node.name in ("rsqrt", "sqrt", "pow") else node.name)
            if node.name in _REDUCTIONS:
                found.add((node.name, meaning(node)))
            if node.name in _IN_NO_PATTERN:
                continue
            fresh = [v for v in node.inputs if v not in seen]
            seen.update(fresh)
            left.extend(fresh)
    return found, tuple(key)


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
        self.needs = needs(formula)
        self.size = size_of(formula)
        self._numbers: dict[int, tuple[float, Any]] = {}

    def at(self, n: int) -> tuple[float, Any]:
        """The factor and the formula for means over ``n`` elements."""
        if n not in self._numbers:
            self._numbers[n] = self._factor.at(n), _at(self._formula, n)
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
        if (step := _view(value, True)) is not None:
            factor, formula, inner = self._compile(step[0])
            return factor, formula, compose(step[1], inner)
        if value.node is not None and value.node.name in ("add", "add_any", "sub"):
            return self._sum(value)
        if (factors := _factors(value)) is not None:
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
        total, free = Factor(_sign(value)), None
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
            outer = operand_map(value, operand) if node.name in _ELEMENTWISE else identity(operand)
            operands.append((formula, compose(outer, inner), factor))
        return Apply(node.name, meaning(node), tuple(operands))


def _sign(value: Value) -> float:
    return -1.0 if value.node is not None and value.node.name == "neg" else 1.0


# ---- matching ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a leaf stands for: an array, and how it is seen. ``seen`` shows it at its place."""

    source: Value
    map: Map
    seen: tuple[Map, Map, Value] | None = None  # the leaf's map, the value's, and the value

    def where(self, is_there: Callable[[Value], bool]) -> Bound:
        """The same by another view of the array, if that is inside of a function."""
        if self.seen is None or is_there(self.source):
            return self
        place, shown, value = self.seen
        while value is not self.source:
            if is_there(value) and (found := _map_of_leaf(place, shown)) is not None:
                return Bound(value, found)
            step = _view(value, False)
            assert step is not None, value.aval
            value, shown = step[0], compose(shown, step[1])
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


class Matcher:
    """Matches one formula at one value. ``seen`` keeps the furthest that it came."""

    def __init__(self, root: Value):
        self.tolerance = 2 * float(jnp.finfo(root.dtype).eps)
        self.seen: tuple[Value, ...] = ()
        self.stopped: Value | None = None
        self._budget = 2000  # steps, so that a strange program costs no more

    def __call__(self, formula: Formula, n: int, root: Value, start: State | None = None):
        """The match of a result, with the leaves of another match or any."""
        ratio, wanted = formula.at(n)
        start = State({}, {}, ()) if start is None else start
        for state, found in self._scaled(wanted, identity(root), root, identity(root), start):
            if self._near(found, ratio):
                return state
        return None

    def _near(self, a: float, b: float) -> bool:
        return a == b or abs(a - b) <= self.tolerance * max(abs(a), abs(b)) < math.inf

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
            if _factors(source) is not None:
                items = [(source, order, 1.0)]
                yield from self._product(formula.factors, items, 1.0, state, True)
        else:
            yield from self._apply(formula, source, order, state)
        if before > len(self.seen):
            self.seen, self.stopped = state.inner, source

    def _scaled(self, formula, place: Map, value: Value, shown: Map, state: State) -> Iterator:
        """The same, where the value may be a multiple that the program computes."""
        yield from self._match(formula, place, value, shown, state)
        source, inner, passed = resolve(value, narrowing=True)
        terms = terms_of(source)
        if terms is not None and len(terms) == 1:
            factor, operand = terms[0]
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
        while items and (known := constant(items[0][1])) is not None:
            total += items[0][0] * float(known)
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
                    elif ratio is None or self._near(new, ratio):
                        yield from self._sum(formula, others, rest, total, new, after)
        source, inner, passed = resolve(value, narrowing=True)
        terms = terms_of(source)
        if terms is None or len(rest) + 1 > len(left) + 1:
            return
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
        while items and (known := constant(items[0][0])) is not None:
            known, exponent = float(known), items[0][2]
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
        for i, (v, m, e) in enumerate(rest):
            other, n, _ = resolve(v)
            if other is source and compose(m, n) == outer:  # x * x
                exponent, rest = exponent + e, rest[:i] + rest[i + 1 :]
                break
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
        factors = _factors(source)
        if factors is None or exponent != int(exponent) or len(rest) > len(left):
            return
        outer = compose(shown, inner)
        more = [(v, compose(outer, operand_map(source, v)), e * exponent) for v, e in factors]
        inside = state.through((*passed, source))
        yield from self._product(left, [*more, *rest], total * _sign(source) ** exponent, inside)

    def _apply(self, formula: Apply, source: Value, order: Map, state: State) -> Iterator:
        node = source.node
        assert node is not None
        if node.name != formula.name or len(node.inputs) != len(formula.operands):
            return
        if node.name in _REDUCTIONS:
            found = _unreduced(order, formula, node)
            if found is None:
                return
            order = found
        elif meaning(node) != formula.params:
            return
        elif node.name not in _ELEMENTWISE and order != identity(source):
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
            known = constant(value)
            if known is not None and self._near(float(known), formula):
                yield from self._operands(formulas[1:], inputs[1:], source, order, state)
            return
        part, place, factor = formula
        assert source.node is not None
        if source.node.name in _ELEMENTWISE:
            shown = compose(order, operand_map(source, value))
        else:
            shown = order if source.node.name in _REDUCTIONS else identity(value)
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
