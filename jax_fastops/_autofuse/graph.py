"""The values of a traced program as one graph, through the calls of jitted functions.

A value is one result of an equation, whatever it is called: inside of a jitted function it has
another variable than outside. ``Level`` is one of these programs, and a value has a variable in
each level that sees it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_fastops import _compat

_CALLS = {"jit", "pjit", "closed_call", "core_call"}


class Value:
    """A result of an equation, an operand of the program, or a constant.

    ``long`` are the dimensions whose size is not 1, and ``sizes`` theirs. All maps between values
    number these dimensions alone.
    """

    def __init__(self, aval, node: Node | None = None, constant: np.ndarray | None = None):
        self.aval = aval
        self.node = node
        self.array: Any = None  # of a program, known when it is traced
        self.constant = constant  # of one element
        self.is_folded = node is None  # whether `constant` is known
        self.places: dict[Level, Any] = {}
        self.users: list[Node] = []
        self.is_result = False
        self.shape: tuple = getattr(aval, "shape", ())
        self.dtype: Any = getattr(aval, "dtype", None)
        self.is_floating = _is_floating(self.dtype)
        self.long, self.sizes = _long(self.shape)
        self.resolved: dict[bool, tuple] = {}

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether no dimension is symbolic."""
        return all(isinstance(d, int) for d in self.shape)

    @property
    def line(self) -> str:
        """The user's file and line that made it, or called the function that made it."""
        if self.node is None:
            return ""
        line, level = _compat.source_line(self.node.equation), self.node.level
        while not line and level is not None and level.equation is not None:
            line, level = _compat.source_line(level.equation), level.parent
        return line


@functools.lru_cache(1024)
def _is_floating(dtype) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


@functools.lru_cache(1024)
def _long(shape: tuple) -> tuple[tuple[int, ...], tuple]:
    long = tuple(i for i, d in enumerate(shape) if not (isinstance(d, int) and d == 1))
    return long, tuple(shape[i] for i in long)


class Node:
    """An equation that is no call of a jitted function."""

    def __init__(self, equation, inputs: Sequence[Value], level: Level):
        self.equation, self.inputs, self.level = equation, inputs, level
        self.name: str = equation.primitive.name
        self.params: dict[str, Any] = equation.params
        self.outputs: list[Value] = []
        self.meaning: tuple | None = None


def _nodes_of(equation, inputs: Sequence[Value], level: Level) -> list[Node]:
    """The node of an equation. A ``dot_general`` that sums a product is a product and its sum."""
    node = Node(equation, inputs, level)
    node.outputs = [Value(v.aval, node) for v in equation.outvars]
    if equation.primitive.name != "dot_general":
        return [node]
    numbers = equation.params["dimension_numbers"]
    left, right, batch, other = (tuple(d) for pair in numbers for d in pair)
    ranks = {len(left) + len(batch), *(len(v.shape) for v in inputs)}
    if len(ranks) > 1 or (left, batch) != (right, other) or batch != tuple(sorted(batch)):
        return [node]
    product = Node(equation, inputs, level)
    product.name, product.params = "mul", {}
    product.outputs = [Value(inputs[0].aval.update(dtype=node.outputs[0].dtype), product)]
    node.name, node.params, node.inputs = "reduce_sum", {"axes": left}, product.outputs
    return [product, node]


def _turn(node: Node) -> None:
    """Makes the transposition of a ``dot_general`` the product of the operands in other order.

    It is that of ``vmap`` of ``w @ x``. The product must have no other use.
    """
    product = node.inputs[0].node if node.name == "transpose" else None
    if product is None or product.name != "dot_general" or node.inputs[0].is_result:
        return
    (left, right), batch = product.params["dimension_numbers"]
    a, b = product.inputs
    free, rank = len(a.shape) - len(left), len(node.inputs[0].shape)
    turned = (*range(free, rank), *range(free))
    moved, alone = tuple(node.params["permutation"]), node.inputs[0].users == [node]
    if moved == turned and alone and not any(batch):
        node.name, node.inputs = product.name, [b, a]
        node.params = {**product.params, "dimension_numbers": ((right, left), batch)}


class Level:
    """A program: the one that was traced, or one that an equation of its ``parent`` calls."""

    def __init__(
        self, jaxpr, operands: Sequence[Value], constants: Sequence[Any], parent=None, equation=None
    ):
        self.jaxpr, self.constants, self.equation = jaxpr, constants, equation
        self.parent: Level | None = parent
        self.calls: dict[int, Level] = {}  # by the index of the equation
        self.values: dict[Any, Value] = {}
        for var, value in zip(jaxpr.invars, operands, strict=True):
            self.name(var, value)
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            value = Value(var.aval, constant=_scalar(constant))
            value.array = constant if _is_known(constant) else None
            self.name(var, value)

    @functools.cached_property
    def has_ref(self) -> bool:
        """Whether the program, or one that calls it, is a function of a Ref."""
        if self.parent is None:
            return False
        variables = (*self.jaxpr.invars, *self.jaxpr.constvars)
        return self.parent.has_ref or any(map(is_ref, variables))

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    def name(self, var, value: Value) -> None:
        self.values[var] = value
        if type(var).__name__ != "DropVar":
            value.places.setdefault(self, var)

    def of(self, atom) -> Value:
        if isinstance(atom, Literal):
            return Value(atom.aval, constant=_scalar(atom.val))
        return self.values[atom]


def is_ref(x) -> bool:
    return hasattr(getattr(x, "aval", None), "inner_aval")


def _is_known(x) -> bool:
    """Whether an array's elements are numbers that can be read: no keys of jax.random."""
    if isinstance(x, jax.core.Tracer) or is_ref(x) or not getattr(x, "is_fully_addressable", True):
        return False
    return not jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.extended)


def _scalar(x) -> np.ndarray | None:
    """The number that an array of one element is, if it is known."""
    if not _is_known(x):
        return None
    if not isinstance(x, (bool, int, float)) and getattr(x, "size", 0) != 1:
        return None
    found = np.asarray(x)
    return found.reshape(()) if found.dtype.kind in "biuf" or found.dtype.name in _FLOATS else None


_FLOATS = {"bfloat16"}  # whose kind NumPy does not know


def opened(body) -> tuple[Any, Sequence[Any]]:
    """The program and the constants of a body, which may be a program without any."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


class Graph:
    """A program and all that it calls. ``nodes`` are in the order of evaluation."""

    def __init__(self, jaxpr, constants: Sequence[Any] = ()):
        self.nodes: list[Node] = []
        self.operands = [Value(v.aval) for v in jaxpr.invars]
        self.top = Level(jaxpr, self.operands, constants)
        self.results = self._enter(self.top)
        for value in self.results:
            value.is_result = True
        self._count_users()
        for node in self.nodes:
            _turn(node)

    def _count_users(self) -> None:
        """Notes which nodes use a value, except those whose own results nobody uses."""
        for node in reversed(self.nodes):
            if node.equation.effects or any(v.is_result or v.users for v in node.outputs):
                for value in node.inputs:
                    value.users.append(node)

    def _enter(self, level: Level) -> list[Value]:
        for index, equation in enumerate(level.jaxpr.eqns):
            inputs = [level.of(a) for a in equation.invars]
            if equation.primitive.name in _CALLS and "jaxpr" in equation.params:
                inner, constants = opened(equation.params["jaxpr"])
                called = level.calls[index] = Level(inner, inputs, constants, level, equation)
                outputs = self._enter(called)
            else:
                nodes = _nodes_of(equation, inputs, level)
                self.nodes += nodes
                outputs = nodes[-1].outputs
            for var, value in zip(equation.outvars, outputs, strict=True):
                level.name(var, value)
        return [level.of(a) for a in level.jaxpr.outvars]
