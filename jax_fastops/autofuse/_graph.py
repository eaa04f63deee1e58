"""The values of a traced program as one graph, through the calls of jitted functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from jax_fastops import _compat
from jax_fastops.autofuse._value import LOCAL, Node, Value

_CALLS = {"jit", "pjit", "closed_call", "core_call"}


def _is_call(equation) -> bool:
    """Whether an equation does nothing but call a function, which may be a part of the program."""
    params = equation.params
    if equation.primitive.name not in _CALLS or "jaxpr" not in params:
        return False
    if any(map(is_ref, equation.invars)) or params.get("compiler_options_kvs"):
        return False
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    options = (x for name in names for x in params.get(name, ()))
    return all(x is None or type(x).__name__ == "UnspecifiedValue" for x in options)


def _nodes_of(step: Node) -> list[Node]:
    """What an equation computes, as nodes.

    A ``dot_general`` that sums a product is a product and its sum. A ``psum`` over axes that
    ``vmap`` maps is a sum of each operand.
    """
    if step.name == "psum" and all(isinstance(axis, int) for axis in step.params["axes"]):
        return _sums(step) if step.params["axis_index_groups"] is None else [step]
    if step.name != "dot_general":
        return [step]
    numbers = step.params["dimension_numbers"]
    left, right, batch, other = (tuple(d) for pair in numbers for d in pair)
    ranks = {len(left) + len(batch), *(len(v.shape) for v in step.inputs)}
    if len(ranks) > 1 or (left, batch) != (right, other) or batch != tuple(sorted(batch)):
        return [step]
    product = Node(step.equation, step.inputs, step.callers)
    product.name, product.params = "mul", {}
    product.outputs = [Value(step.inputs[0].aval.update(dtype=step.outputs[0].dtype), product)]
    product.outputs[0].is_array = False
    step.name, step.params, step.inputs = "reduce_sum", {"axes": left}, product.outputs
    return [product, step]


def _sums(step: Node) -> list[Node]:
    nodes = []
    for x, value in zip(step.inputs, step.outputs, strict=True):
        value.node = node = Node(step.equation, [x], step.callers)
        node.name, node.params = "reduce_sum", {"axes": step.params["axes"]}
        node.outputs = [value]
        nodes.append(node)
    return nodes


def _swap_operands(node: Node) -> None:
    """Makes the transposition of a ``dot_general`` the product of the swapped operands.

    ``vmap`` of ``w @ x`` has such a transposition. The product must have no other use.
    """
    if node.name != "transpose" or node.inputs[0].is_result:
        return
    product = node.inputs[0].node
    if product.name != "dot_general":
        return
    (left, right), batch = product.params["dimension_numbers"]
    a, b = product.inputs
    free, rank = len(a.shape) - len(left), len(node.inputs[0].shape)
    turned = (*range(free, rank), *range(free))
    moved, only = tuple(node.params["permutation"]), node.inputs[0].users == [node]
    if moved == turned and only and not any(batch):
        node.name, node.inputs = product.name, [b, a]
        node.params = {**product.params, "dimension_numbers": ((right, left), batch)}


def is_ref(x) -> bool:
    return hasattr(getattr(x, "aval", None), "inner_aval")


def _is_known(x) -> bool:
    """Whether the elements of an array are numbers that can be read: no keys of jax.random."""
    if isinstance(x, (bool, int, float, np.ndarray)):
        return True
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


# Their derivatives by ``jax.jit``, which keeps them, take half of the time to trace.
_KEPT = LOCAL | {"dot_general", "conv_general_dilated", "gather"}


@functools.lru_cache(4096)
def _jitted(primitive: Any, params: tuple) -> Callable[..., Any]:
    return jax.jit(lambda *args: primitive.bind(*args, **dict(params)), inline=_compat.INLINE)


def _may_be_differentiated(args: Sequence[Any]) -> bool:
    """Whether an array may have a tangent. Those that are only traced to a program have none."""
    tracers = (x for x in args if isinstance(x, jax.core.Tracer))
    return any(type(x).__name__ != "DynamicJaxprTracer" for x in tracers)


def bind(equation, args: Sequence[Any]) -> list:
    """Evaluates one equation, with its name stack and source line."""
    primitive, source = equation.primitive, equation.source_info
    pairs = zip(equation.invars, args, strict=True)
    args = [atom.val if isinstance(atom, Literal) else x for atom, x in pairs]
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), equation.ctx.manager:
        if primitive.name in _KEPT and _may_be_differentiated(args):
            results = _jitted(primitive, tuple(equation.params.items()))(*args)
        else:
            subfunctions, params = _compat.bind_params(primitive, equation.params)
            results = primitive.bind(*subfunctions, *args, **params)
    return results if primitive.multiple_results else [results]


def opened(body) -> tuple[Any, Sequence[Any]]:
    """The program of a body, and its constants if it has any."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


class Graph:
    """A program and all that it calls.

    Attributes:
      nodes: the nodes in the order of evaluation, without calls of functions.
      steps: the nodes of the program itself, with calls.
      operands: the values of the arguments.
      results: the values that the program returns.
      constants: the arrays of the values that are known.
    """

    def __init__(self, jaxpr, constants: Sequence[Any] = ()):
        self.nodes: list[Node] = []
        self.constants: dict[Value, Any] = {}
        self.operands = [Value(v.aval) for v in jaxpr.invars]
        self.steps, self.results = self._enter(jaxpr, self.operands, constants, ())
        for value in self.results:
            value.is_result = True
        # A node whose own results have no use does not count.
        for node in reversed(self.nodes):
            if node.equation.effects or any(v.is_result or v.users for v in node.outputs):
                for value in node.inputs:
                    value.users.append(node)
        for node in self.nodes:
            _swap_operands(node)

    def _constant(self, aval, x) -> Value:
        value = Value(aval, number=_scalar(x))
        value.array = x if _is_known(x) else None
        self.constants[value] = x
        return value

    def _enter(
        self, jaxpr, operands: Sequence[Value], constants: Sequence[Any], callers: tuple[Any, ...]
    ) -> tuple[list[Node], list[Value]]:
        """The steps and the results of a program, or of a function that it calls."""
        values = dict(zip(jaxpr.invars, operands, strict=True))
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            values[var] = self._constant(var.aval, constant)

        def of(atom) -> Value:
            return (
                self._constant(atom.aval, atom.val) if isinstance(atom, Literal) else values[atom]
            )

        steps = []
        for equation in jaxpr.eqns:
            inputs = [of(a) for a in equation.invars]
            if _is_call(equation):
                step = Node(equation, inputs, callers)
                function, inner_constants = opened(equation.params["jaxpr"])
                inside = (equation, *callers)
                step.body, step.outputs = self._enter(function, inputs, inner_constants, inside)
            else:
                step = Node(equation, inputs, callers)
                step.outputs = [Value(v.aval, step) for v in equation.outvars]
                self.nodes += _nodes_of(step)
            values.update(zip(equation.outvars, step.outputs, strict=True))
            steps.append(step)
        return steps, [of(a) for a in jaxpr.outvars]
