"""The values of a traced program as one graph, through the calls of jitted functions.

A value has a variable in each ``Level`` that sees it: in the program, and in the functions that the
program calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_fastops.autofuse._value import Node, Value

_CALLS = {"jit", "pjit", "closed_call", "core_call"}


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
    """Makes the transposition of a ``dot_general`` the product of the swapped operands.

    ``vmap`` of ``w @ x`` has such a transposition. The product must have no other use.
    """
    product = node.inputs[0].node if node.name == "transpose" else None
    if product is None or product.name != "dot_general" or node.inputs[0].is_result:
        return
    (left, right), batch = product.params["dimension_numbers"]
    a, b = product.inputs
    free, rank = len(a.shape) - len(left), len(node.inputs[0].shape)
    turned = (*range(free, rank), *range(free))
    moved, only = tuple(node.params["permutation"]), node.inputs[0].users == [node]
    if moved == turned and only and not any(batch):
        node.name, node.inputs = product.name, [b, a]
        node.params = {**product.params, "dimension_numbers": ((right, left), batch)}


class Level:
    """A program: the one that was traced, or one that an equation of its ``parent`` calls."""

    def __init__(
        self, jaxpr: Any, operands: Sequence[Value], constants: Sequence[Any],
        parent: Level | None = None, equation: Any = None,
    ):  # fmt: skip
        self.jaxpr: Any = jaxpr
        self.constants: Sequence[Any] = constants
        self.parent: Level | None = parent
        self.equation: Any = equation
        self.calls: dict[int, Level] = {}  # by the index of the equation
        self.values: dict[Any, Value] = {}
        for var, value in zip(jaxpr.invars, operands, strict=True):
            self.name(var, value)
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            value = Value(var.aval, number=_scalar(constant))
            value.array = constant if _is_known(constant) else None
            self.name(var, value)

    def chain(self) -> Iterator[Level]:
        """The program, the one that calls it, and so on."""
        yield self
        if self.parent is not None:
            yield from self.parent.chain()

    @functools.cached_property
    def has_ref(self) -> bool:
        """Whether the program, or one that calls it, is a function of a Ref."""
        called = (level.jaxpr for level in self.chain() if level.parent is not None)
        return any(is_ref(v) for jaxpr in called for v in (*jaxpr.invars, *jaxpr.constvars))

    @property
    def depth(self) -> int:
        return len(list(self.chain()))

    def name(self, var: Any, value: Value) -> None:
        self.values[var] = value
        if type(var).__name__ != "DropVar":
            value.places.setdefault(self, var)

    def of(self, atom: Any) -> Value:
        if isinstance(atom, Literal):
            return Value(atom.aval, number=_scalar(atom.val))
        return self.values[atom]


def is_ref(x) -> bool:
    return hasattr(getattr(x, "aval", None), "inner_aval")


def _is_known(x) -> bool:
    """Whether the elements of an array are numbers that can be read: no keys of jax.random."""
    if isinstance(x, jax.core.Tracer) or is_ref(x) or not getattr(x, "is_fully_addressable", True):
        return False
    return not jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.extended)


def _scalar(x) -> np.ndarray | None:
    """The number in an array of one element, if it is known."""
    if not _is_known(x):
        return None
    if not isinstance(x, (bool, int, float)) and getattr(x, "size", 0) != 1:
        return None
    array = np.asarray(x)
    is_number = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"  # of kind "V"
    return array.reshape(()) if is_number else None


def opened(body) -> tuple[Any, Sequence[Any]]:
    """The program of a body, and its constants if it has any."""
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
        """Notes the nodes that use a value, except nodes whose own results have no use."""
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
