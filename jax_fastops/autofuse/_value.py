"""The values of a traced program, and what their equations compute, however they are written.

A value may be a number, a view of another one, a sum, or a product. A map gives, for each dimension
of one array, the dimension of another one, or ``None`` if that one is broadcast along it. Maps
index only the dimensions of size > 1.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_fastops import _compat
from jax_fastops.autofuse import _numpy
from jax_fastops.autofuse._meaning import (
    IN_NO_PATTERN,
    derivative_rule,
    iota_wraps,
    long_axes,
    meaning_of,
)

Map = tuple[Any, ...]  # of int | None

# They give the number that they take, if their operand is one.
_MOVED = {"broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient", "pvary", "pcast"}
_GIVES_NUMBER = _MOVED.union(_numpy.ELEMENTWISE)
MOST_BEFORE = 120
USED = "the value is used elsewhere"
_IDENTITIES = [tuple(range(n)) for n in range(100)]


def compose(outer: Map, inner: Map) -> Map:
    if inner is _IDENTITIES[len(inner)]:
        return outer
    return tuple([None if i is None else inner[i] for i in outer])


class Value:
    """A result of an equation, an operand of the program, or a constant.

    A value is one array of the program. It has one variable in each function that sees it.

    Attributes:
      node: the equation that makes it, or ``NO_EQUATION``.
      shape: its shape.
      dtype: its dtype.
      users: the equations that use it.
      is_result: whether it is a result of the program.
      is_array: whether the program has it. It has no product that a ``dot_general`` sums.
    """

    is_array: bool = True
    is_result: bool = False
    place: int = -1  # among the values of the program
    is_read: bool = False  # whether a rule asked for the array
    is_drawn_again: bool = False  # of random bits: whether other masks of them stay
    _array: Any = None

    def __init__(self, aval: Any, node: Node | None = None, number: np.ndarray | None = None):
        self.aval: Any = aval
        self.node: Node = NO_EQUATION if node is None else node
        self.users: list[Node] = []
        self.shape: tuple[Any, ...] = getattr(aval, "shape", ())
        self.dtype: Any = getattr(aval, "dtype", None)
        self._sources: list[View | None] = [None, None]
        if node is None or node.name not in _GIVES_NUMBER:
            self.number = number

    @functools.cached_property
    def is_floating(self) -> bool:
        """Whether its dtype is floating."""
        return _is_floating(self.dtype)

    @functools.cached_property
    def long(self) -> tuple[int, ...]:
        """The dimensions whose size is not 1."""
        return _long(self.shape)

    @functools.cached_property
    def sizes(self) -> tuple[Any, ...]:
        """The sizes of these dimensions."""
        return tuple([self.shape[i] for i in self.long])

    @functools.cached_property
    def identity(self) -> Map:
        """The map from these dimensions to themselves."""
        return _IDENTITIES[len(self.long)]

    @property
    def array(self) -> Any:
        """The array, if it is known when the program is traced."""
        self.is_read = True
        return self._array

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether no dimension is symbolic."""
        return _is_static(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether its shape is static, and its dtype is not that of a Python number."""
        return self.is_static and not self.aval.weak_type

    def is_narrower_than(self, dtype: Any) -> bool:
        """Whether it is floating, with fewer digits or a smaller range than another dtype."""
        return self.is_floating and self.dtype != dtype and self.dtype.itemsize <= dtype.itemsize

    @property
    def line(self) -> str:
        """The user's file and line of its equation, or of the call of the function that has it."""
        return _compat.source_line(self.node.equation, *self.node.callers)

    # ---- numbers and views

    @functools.cached_property
    def number(self) -> Any:
        """The one number of which the array consists, or ``None``."""
        node = self.node
        if node.name == "div" and not self.is_floating:  # rounds towards 0
            return None
        given = []
        for v in node.inputs:
            if v.number is None:
                return None
            given.append(v.number)
        if not given:
            return None
        if node.name in _MOVED:
            return given[0]
        with np.errstate(all="ignore"):
            return np.asarray(_numpy.ELEMENTWISE[node.name](node.params, *given))

    @functools.cached_property
    def computation(self) -> int:
        """A number for the type of the value and its operation, or for its number.

        Equal numbers mean equal ones, whatever the operands are.
        """
        node = self.node
        if node is NO_EQUATION:
            number = None if self.number is None else self.number.tobytes()  # NaN is not NaN
            return _number_of((self.shape, self.dtype, number))
        place = node.outputs.index(self)
        if node.code is None:
            return _number_of((self.shape, self.dtype, place, node.name, node.plain_meaning))
        key = self.shape, self.dtype, place, node.name, node.code
        if (number := _by_code.get(key)) is None:
            if len(_by_code) > 1 << 16:
                _by_code.clear()
            _by_code[key] = number = _number_of((*key[:4], node.plain_meaning))
        return number

    @functools.cached_property
    def before(self) -> dict[Value, int]:
        """The value and those before it that may be in one pattern with it, with their places."""
        return values_before(self, IN_NO_PATTERN)

    @functools.cached_property
    def structure(self) -> int:
        """A number for what the values of ``before`` compute from each other."""
        key: list[int | None] = []
        for value in self.before:
            key.append(value.computation)
            if value.node.name not in IN_NO_PATTERN:
                key.extend(map(self.before.get, value.node.inputs))
        return _structure_of(tuple(key))

    @functools.cached_property
    def is_closed(self) -> bool:
        """Whether equal structures mean that a formula matches alike."""
        whole = len(self.before) < MOST_BEFORE
        return whole and all(v.node.name != "reshard" for v in self.before)

    def source(self, narrowing: bool = False) -> View:
        """The array of which this is a view.

        With ``narrowing``, a cast to a narrower dtype is a view, too.
        """
        found = self._sources[narrowing]
        if found is None:
            step = self.view(narrowing)
            if step is not None:
                value, map_, passed = step.value.source(narrowing)
                found = View(value, compose(step.map, map_), (self, *passed))
                self._sources[narrowing] = found
            else:
                found = self._sources[narrowing] = View(self, self.identity, (self,))
                if self.node.name != "convert_element_type":
                    self._sources = [found, found]
        return found

    def whole_source(self, narrowing: bool = False) -> View | None:
        """The source, if shape and order of dimensions are equal."""
        source = self.source(narrowing)
        return source if source.is_whole and source.value.shape == self.shape else None

    def view(self, narrowing: bool) -> View | None:
        """The operand that has the same elements."""
        node = self.node
        if not node.inputs:
            return None
        operand, name = node.inputs[0], node.name
        if name == "broadcast_in_dim":
            place = {d: i for i, d in enumerate(node.params["broadcast_dimensions"])}
            index = {d: i for i, d in enumerate(operand.long)}
            map_ = tuple(index.get(place[d]) if d in place else None for d in self.long)
            return View(operand, map_)
        if name == "transpose":
            order = node.params["permutation"]
            return View(operand, tuple(operand.long.index(order[d]) for d in self.long))
        other = self._viewed(node, operand, narrowing)
        if other is None or self.sizes != other.sizes:
            return None
        return View(other, self.identity)

    def _viewed(self, node: Node, operand: Value, narrowing: bool) -> Value | None:
        """The operand that has the same elements, if it has the same long dimensions."""
        name = node.name
        if name in ("squeeze", "expand_dims", "slice", "copy", "copy_p", "pvary", "pcast"):
            return operand
        if name == "reshape":
            return operand if node.params.get("dimensions") is None else None
        if name == "reshard":  # of jnp.where in a mesh
            own, before = self.aval.sharding, operand.aval.sharding
            same_mesh = before.mesh.empty or own.mesh == before.mesh
            return operand if same_mesh and own.spec == before.spec else None
        if name == "convert_element_type":
            if self.dtype.kind in "iu" and operand.dtype.kind in "iu":
                return operand if np.can_cast(operand.dtype, self.dtype) else None
            same = self.is_floating and operand.is_floating
            narrower = self.dtype.itemsize < operand.dtype.itemsize
            # The gradients of two uses are not to be added in 8 bits.
            wider = self.dtype.itemsize > operand.dtype.itemsize > 1 or self.dtype == operand.dtype
            return operand if same and (wider or (narrowing and narrower)) else None
        unit = {"sub": 0, "div": 1}.get(name)
        if unit is not None and node.inputs[1].number == unit:
            return operand
        neutral = {"max": -np.inf, "and": True, "or": False}.get(name)
        if neutral is not None and (name == "max" or self.dtype == bool):
            for number, other in (node.inputs, node.inputs[::-1]):
                if number.number is not None and number.number == neutral:
                    return other
                # The derivative of a mean of squares is 0 where it is 0.
                if name == "max" and number.number == 0 and _is_never_negative(other):
                    return other
        if name == "select_n":
            if operand.number is not None:
                return node.inputs[1 + int(operand.number)]
            return node.inputs[1] if _is_negative_iota(operand) else None  # an index counts from 0
        if name == "gather":  # `take` of the only element
            indexed = node.params["dimension_numbers"].start_index_map
            if node.inputs[1].number == 0 and all(operand.shape[d] == 1 for d in indexed):
                return operand
        return None

    def map_to(self, operand: Value) -> Map:
        """From the dimensions of this element-wise result to those of an operand."""
        if len(operand.shape) != len(self.shape):  # a scalar
            return (None,) * len(self.long)
        if operand.long == self.long:
            return self.identity
        index = {d: i for i, d in enumerate(operand.long)}
        return tuple([index.get(d) for d in self.long])

    @property
    def seen(self) -> View:
        """The value as it is."""
        return View(self, self.identity)

    # ---- sums, products, and selections

    @functools.cached_property
    def terms(self) -> list[tuple[float, Value]] | None:
        """The summands of a sum, or the array of a multiple, with their factors."""
        node = self.node
        if node.name in ("add", "add_any", "sub"):
            a, b = node.inputs
            return [(1.0, a), (-1.0 if node.name == "sub" else 1.0, b)]
        if node.name == "neg":
            return [(-1.0, node.inputs[0])]
        if node.name in ("mul", "div") and self.is_floating:
            a, b = node.inputs
            if (k := b.number) is not None and k:
                return [(float(k) if node.name == "mul" else 1 / float(k), a)]
            if node.name == "mul" and (k := a.number) is not None:
                return [(float(k), b)]
        return None

    @property
    def multiple(self) -> tuple[float, Value] | None:
        """The number and the array, if this is their product."""
        terms = self.terms
        return terms[0] if terms is not None and len(terms) == 1 else None

    @functools.cached_property
    def factors(self) -> list[tuple[Value, float]] | None:
        """The factors of a product with their exponents."""
        node = self.node
        if not self.is_floating:
            return None
        exponent = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "neg": 1.0}.get(node.name)
        if node.name == "integer_pow":
            exponent = float(node.params["y"])
        if node.name == "pow" and (k := node.inputs[1].number) is not None:
            exponent = float(k)
        if exponent is not None:
            return [(node.inputs[0], exponent)]
        if node.name in ("mul", "div"):
            a, b = node.inputs
            return [(a, 1.0), (b, 1.0 if node.name == "mul" else -1.0)]
        return None

    @property
    def sign(self) -> float:
        """The sign of the product of the factors."""
        return -1.0 if self.node.name == "neg" else 1.0

    def with_row(self) -> Iterator[tuple[Value, Value]]:
        """The array and the row along the last axis, if this is their sum."""
        node = self.node
        if node.name in ("add", "add_any") and self.shape[-1:] != (1,):
            for x, bias in (node.inputs, node.inputs[::-1]):
                row = self.seen.of(bias).source()
                last = (None,) * (len(self.long) - 1) + (0,)
                if row.map == last and (x.shape, x.dtype) == (self.shape, self.dtype):
                    yield x, row.value

    def selections(self) -> Iterator[tuple[Value, Value, Value, bool]]:
        """For each array of a selection: the mask, the array, the other array, and a sign.

        The sign is True if the selection takes the array where the mask is True.
        """
        node = self.node
        if node.name == "select_n" and len(node.inputs) == 3:
            which, a, b = node.inputs
            yield which, a, b, False
            yield which, b, a, True

    # ---- uses

    def is_used_outside(self, nodes: set[Any]) -> bool:
        """Whether other nodes use the value, or a view of it."""

        def is_inside(user: Node) -> bool:
            if len(user.outputs) != 1:
                return False
            shown = user.outputs[0]
            view = self in shown.source().passed
            return view and shown is not self and not shown.is_used_outside(nodes)

        return self.is_result or any(u not in nodes and not is_inside(u) for u in self.users)

    def leads_only_to(self, end: Value) -> bool:
        """Whether the value has no use but another one, through operations of one user each."""
        value = self
        while value is not end:
            if value.is_result or len(value.users) != 1 or not value.users[0].outputs:
                return False
            value = value.users[0].outputs[0]
        return True


def values_before(
    value: Value, ends: Container[str] = (), limit: int = MOST_BEFORE
) -> dict[Value, int]:
    """A value and those that it is computed from, the nearest first, with their places.

    They are up to ``limit``, and none before operations of these names.
    """
    places, order = {value: 0}, [value]
    for each in order:
        if len(order) >= limit:
            break
        node = each.node
        if node.name not in ends:
            for v in node.inputs:
                if v not in places:
                    places[v] = len(order)
                    order.append(v)
    return places


def values_between(root: Value, ends: set[Value]) -> set[Value]:
    """A value and those that it is computed from, up to the ends and without numbers."""
    inner: set[Value] = set()
    left = [root]
    while left:
        value = left.pop()
        is_end = not ends.isdisjoint((value, value.source().value)) or value.number is not None
        if not is_end and value not in inner:
            inner.add(value)
            left += value.node.inputs
    return inner


@functools.lru_cache(1024)
def _is_floating(dtype) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


@functools.lru_cache(1024)
def _is_static(shape: tuple) -> bool:
    return all(isinstance(d, int) for d in shape)


@functools.lru_cache(1024)
def _long(shape: tuple) -> tuple[int, ...]:
    return tuple(i for i, d in enumerate(shape) if not (isinstance(d, int) and d == 1))


def _is_negative_iota(value: Value) -> bool:
    """Whether a value is the comparison of an ``iota`` with 0, which is never less."""
    node = value.node
    if node.name != "lt" or node.inputs[1].number != 0:
        return False
    numbers = node.inputs[0].source().value.node
    return numbers.name == "iota" and not iota_wraps(numbers.outputs[0])


def equal(a: Value, b: Value, depth: int = 8) -> bool:
    """Whether two values are computed alike, from operands that are in one pattern with them."""
    if a is b:
        return True
    if a.number is not None or b.number is not None:
        return a.aval == b.aval and a.number is not None and bool(a.number == b.number)
    x, y = a.node, b.node
    if NO_EQUATION in (x, y) or not depth or x.name != y.name or x.name in IN_NO_PATTERN:
        return False
    if x.equation.effects or x.plain_meaning is None or a.computation != b.computation:
        return False
    return all(equal(v, w, depth - 1) for v, w in zip(x.inputs, y.inputs, strict=True))


def _is_never_negative(value: Value) -> bool:
    """Whether a value is a mean of squares, or NaN."""
    value = value.source(narrowing=True).value
    node = value.node
    if (multiple := value.multiple) is not None:
        return multiple[0] > 0 and _is_never_negative(multiple[1])
    if node.name == "reduce_sum":
        return _is_never_negative(node.inputs[0])
    if node.name == "mul":
        a, b = node.inputs
        return equal(a, b)
    return node.name == "square" or (node.name == "integer_pow" and node.params["y"] % 2 == 0)


class View(NamedTuple):
    """An array as it is seen: the map gives the dimension of ``value`` for each dimension seen.

    ``passed`` are the values from the one that is seen to ``value``, if this is its source.
    """

    value: Value
    map: Map
    passed: tuple[Value, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the array is seen in its own order, and not broadcast."""
        return self.map == self.value.identity

    def source(self, narrowing: bool = False) -> View:
        """The view of the array of which the value is a view."""
        source = self.value.source(narrowing)
        if self.map is self.value.identity:
            return source
        return View(source.value, compose(self.map, source.map), source.passed)

    def step(self) -> View | None:
        """The view of the operand that has the same elements as the value."""
        step = self.value.view(False)
        return None if step is None else View(step.value, compose(self.map, step.map))

    def of(self, operand: Value) -> View:
        """The view of an operand of an element-wise operation."""
        if operand.shape == self.value.shape:
            return View(operand, self.map)
        return View(operand, compose(self.map, self.value.map_to(operand)))


class Node:
    """An equation of a program, as what it computes is written best.

    Attributes:
      name: the name of its primitive.
      params: the parameters of its primitive.
      inputs: the values that it reads.
      outputs: the values that it makes.
      equation: the equation in the program, with these ``operands``.
      callers: the calls of functions that it is in, the innermost first.
      body: the nodes of the jitted function that it calls.
      code: a number for its name and parameters, if it has one.
    """

    code: int | None = None

    def __init__(self, equation: Any, inputs: Sequence[Value], callers: tuple[Any, ...]):
        self.equation: Any = equation
        self.inputs: Sequence[Value] = inputs
        self.operands: Sequence[Value] = inputs
        self.body: Sequence[Node] = ()
        self.callers: tuple[Any, ...] = callers
        self.name: str = "" if equation is None else equation.primitive.name
        self.params: dict[str, Any] = {} if equation is None else equation.params
        if self.name == "reshape" and self.params.get("dimensions") is not None:
            self.name = "reshape of a transposition"  # no rule knows it
        self.outputs: list[Value] = []

    @property
    def is_of_derivative(self) -> bool:
        """Whether a derivative inside of the program has the equation."""
        equations = [e for e in (self.equation, *self.callers) if e is not None]
        return any("jvp(" in str(e.source_info.name_stack) for e in equations)

    @functools.cached_property
    def meaning(self) -> tuple[Any, ...]:
        """The parameters, without those that depend on sizes."""
        return meaning_of(self) if self.params else ()

    @functools.cached_property
    def plain_meaning(self) -> tuple[Any, ...] | None:
        """The meaning, if the parameters are numbers, and no functions or programs.

        For a function with its own derivative, it includes the whole traced rule, with shapes.
        """
        if self.name == "custom_jvp_call":
            return *self.meaning, derivative_rule(self).whole
        for x in self.params.values():
            for part in x if isinstance(x, tuple) else (x,):
                if callable(part) or hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                    return None
        return self.meaning


_numbers = itertools.count()


def _number(key: tuple) -> int:
    """A number for each key, always the same while it is in use."""
    return next(_numbers)


# The numbers of computations by the codes of nodes, which take less time than their meanings.
_by_code: dict[tuple, int] = {}
_number_of, _structure_of = (functools.lru_cache(1 << 16)(_number) for _ in range(2))


NO_EQUATION = Node(None, (), ())  # of an operand of the program, or a constant


class Reduction(NamedTuple):
    """A reduction, perhaps in several steps, as ``factor`` times one of ``operand``.

    Attributes:
      axes: the dimensions of the operand that are reduced.
      rest: the dimensions of the operand that the result has, in its order.
      passed: the values between the result and the operand.
    """

    operand: Value
    axes: tuple[int, ...]
    rest: tuple[int, ...]
    factor: float = 1.0
    passed: tuple[Value, ...] = ()


def reductions(node: Node) -> Iterator[Reduction]:
    """What a node reduces: its operand, then those of the sums that it adds up, as a mean of means.

    The dimensions are numbers of long dimensions.
    """
    found = _reduction(node)
    yield found
    while node.name == "reduce_sum":
        operand, axes, rest, factor, passed = found
        view = operand.seen.source(narrowing=True)
        passed += view.passed
        while (multiple := view.value.multiple) is not None:
            factor *= multiple[0]
            view = view.of(multiple[1]).source(narrowing=True)
            passed += view.passed
        before = view.value.node
        if before.name != node.name or set(view.map) != set(view.value.identity):
            return
        inner = _reduction(before)
        place = [inner.rest[i] for i in view.map]
        axes = tuple(sorted((*inner.axes, *(place[i] for i in axes))))
        found = Reduction(inner.operand, axes, tuple(place[i] for i in rest), factor, passed)
        yield found


def _reduction(node: Node) -> Reduction:
    operand, axes = node.inputs[0], long_axes(node)
    return Reduction(operand, axes, tuple(i for i in operand.identity if i not in axes))
