"""The values of a traced program as one graph, through the calls of jitted functions."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from jax_fastops import _compat
from jax_fastops.autofuse._meaning import LOCAL
from jax_fastops.autofuse._value import Node, Value

_CALLS = {"jit", "pjit", "closed_call", "core_call"}
# The parameters with the programs of an equation, which are searched apart.
BODIES = {
    **dict.fromkeys(("scan", "remat2", "checkpoint"), ("jaxpr",)),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), ("call_jaxpr",)),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
    **dict.fromkeys(("jit", "pjit", "shard_map"), ("jaxpr",)),
}


def _is_call(equation, is_pattern: bool) -> bool:
    """Whether an equation does nothing but call a function, which may be a part of the program.

    A pattern is traced in the context of a user, whose metadata are not its own.
    """
    params = equation.params
    if equation.primitive.name not in _CALLS or "jaxpr" not in params:
        return False
    if any(map(is_ref, equation.invars)) or params.get("compiler_options_kvs"):
        return False
    if "inlineable" in (equation.ctx.xla_metadata or ()) and not is_pattern:
        return False
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    options = (x for name in names for x in params.get(name, ()))
    return all(x is None or type(x).__name__ == "UnspecifiedValue" for x in options)


def _nodes_of(step: Node) -> list[Node]:
    """What an equation computes, as nodes.

    A ``dot_general`` that sums a product is a product and its sum. A ``psum`` over axes that
    ``vmap`` maps is a sum of each operand. An ``iota`` of several dimensions is a broadcast one.
    """
    if step.name == "psum" and all(isinstance(axis, int) for axis in step.params["axes"]):
        return _sums(step) if step.params["axis_index_groups"] is None else [step]
    if step.name == "iota" and len(step.outputs[0].shape) > 1:
        return _broadcast_iota(step) if step.params.get("sharding") is None else [step]
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
    step.code = None
    return [product, step]


def _broadcast_iota(step: Node) -> list[Node]:
    aval, axis = step.outputs[0].aval, step.params["dimension"]
    counting = Node(step.equation, step.inputs, step.callers)
    shape = (aval.shape[axis],)
    counting.params = step.params | {"shape": shape, "dimension": 0}
    counting.outputs = [Value(jax.core.ShapedArray(shape, aval.dtype), counting)]
    counting.outputs[0].is_array = False
    step.name, step.inputs = "broadcast_in_dim", counting.outputs
    step.params = {"shape": aval.shape, "broadcast_dimensions": (axis,), "sharding": None}
    step.code = None
    return [counting, step]


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
        node.name, node.inputs, node.code = product.name, [b, a], None
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
def _jitted(primitive: Any, params: tuple, fill_value: str) -> Callable[..., Any]:
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
            params = equation.params  # 0, -0.0 and False are equal
            fill_value = str(params.get("fill_value"))
            results = _jitted(primitive, tuple(params.items()), fill_value)(*args)
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
      values: all values, except products that are summed. Each has its ``place`` in the list.
      key: what the values are computed by, from which places. Equal programs have equal ones.
        ``None`` if an equation has functions or programs that a rule may read.

    ``link`` says whether to find the users of the values, which a search needs.
    """

    def __init__(
        self, jaxpr, constants: Sequence[Any] = (), link: bool = True, is_pattern: bool = False
    ):
        self._is_pattern = is_pattern
        self.nodes: list[Node] = []
        self.constants: dict[Value, Any] = {}
        self.values: list[Value] = []
        self._key: list[Any] = []
        self._is_plain = not jaxpr.effects
        self.has_contexts = False  # whether equations have metadata for XLA, or a place
        self.operands = [self._placed(Value(v.aval)) for v in jaxpr.invars]
        self._key += [v.aval for v in jaxpr.invars]
        self.steps, self.results = self._enter(jaxpr, self.operands, constants, ())
        self.key = (*self._key, *[v.place for v in self.results]) if self._is_plain else None
        if link:
            self.link()

    def link(self) -> None:
        """Finds the users of each value, which a search needs."""
        for value in self.results:
            value.is_result = True
        # A node whose own results have no use does not count.
        for node in reversed(self.nodes):
            if node.equation.effects or any(v.is_result or v.users for v in node.outputs):
                for value in node.inputs:
                    value.users.append(node)
        for node in self.nodes:
            _swap_operands(node)

    def _placed(self, value: Value) -> Value:
        value.place = len(self.values)
        self.values.append(value)
        return value

    def _constant(self, aval, x) -> Value:
        value = self._placed(Value(aval, number=_scalar(x)))
        value._array = x if _is_known(x) else None
        self.constants[value] = x
        number = value.number if value.number is None else value.number.tobytes()
        self._key.append(
            (value.shape, value.dtype, number, aval if number is None else aval.weak_type)
        )
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
            step = Node(equation, inputs, callers)
            if _is_call(equation, self._is_pattern):
                function, inner_constants = opened(equation.params["jaxpr"])
                inside = (equation, *callers)
                step.body, step.outputs = self._enter(function, inputs, inner_constants, inside)
            else:
                step.outputs = [self._placed(Value(v.aval, step)) for v in equation.outvars]
                number = number_of(equation)
                self._is_plain = self._is_plain and number is not None
                self._key.append((number, *[v.place for v in inputs]))
                if context := _compat.context_of(equation):
                    self.has_contexts = True
                    self._key.append(context)
                if step.name != "custom_jvp_call":  # JAX may refuse its rule under some settings
                    step.code = number
                self.nodes += _nodes_of(step)
            values.update(zip(equation.outvars, step.outputs, strict=True))
            steps.append(step)
        return steps, [of(a) for a in jaxpr.outvars]


# No rule reads their bodies.
_OPAQUE = {"scan", "while", "cond", "checkpoint", "remat2"}
_numbers: dict[tuple, int] = {}
# Of functions, weakly: the user's are not kept alive.
_functions: weakref.WeakKeyDictionary[Callable, int] = weakref.WeakKeyDictionary()
_count = itertools.count()


def number_of(equation) -> int | None:
    """A number for what an equation computes, the same for equal ones.

    ``None`` if it is not only numbers, shapes and types.
    """
    primitive, params = equation.primitive, equation.params
    if primitive.name in _OPAQUE:
        key = primitive, bool(equation.effects), *[v.aval for v in equation.outvars]
    elif primitive.name == "custom_jvp_call":
        rule = _compat.derivative_rule(equation)
        if rule is None:
            return None
        function = _functions.setdefault(rule[0], next(_count))
        key = primitive, function, *rule[1:], *[v.aval for v in equation.invars]
    else:
        key = primitive, *params.items()
        if "fill_value" in params:  # 0, -0.0 and False are equal, and NaN is not
            key = *key, str(params["fill_value"])
    try:
        number = _numbers.get(key)
    except TypeError:  # an array, for example
        return None
    if number is None:
        given = (x for v in params.values() for x in (v if isinstance(v, tuple) else (v,)))
        if primitive.name not in (*_OPAQUE, "custom_jvp_call") and any(map(_is_program, given)):
            return None
        if len(_numbers) > 1 << 16:
            _numbers.clear()
        number = _numbers[key] = next(_count)
    return number


def _is_program(x: Any) -> bool:
    """Whether a parameter is a program, or a function that may be a new one in each trace."""
    is_local = callable(x) and "<locals>" in getattr(x, "__qualname__", "<locals>")
    return is_local or hasattr(x, "jaxpr") or hasattr(x, "eqns")
