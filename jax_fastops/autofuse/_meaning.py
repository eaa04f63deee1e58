"""What an equation does, by the name of its primitive and by text of its parameters."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_fastops import _compat, _patched
from jax_fastops._activations import ACTIVATIONS

REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
ELEMENTWISE = {
    *("exp", "log", "tanh", "erf", "erfc", "logistic", "max", "min", "abs", "is_finite", "sign"),
    *("select_n", "stop_gradient", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"),
}
FUSIBLE = ELEMENTWISE | {
    *("add", "add_any", "sub", "mul", "div", "neg", "square", "sqrt", "rsqrt", "integer_pow"),
    *("pow", "convert_element_type", "broadcast_in_dim", "clamp", "sin", "cos", "log1p", "expm1"),
}
VIEWS = {
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "rev", "copy", "copy_p"),
    *("convert_element_type", "pvary", "pcast", "bitcast_convert_type"),
}
# XLA fuses these with each other.
LOCAL = FUSIBLE.union(
    REDUCTIONS,
    VIEWS,
    ("transpose", "concatenate", "split", "pad", "iota", "reduce_prod", "argmax", "argmin"),
    ("reduce_precision", "name"),
    ("exp2", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "erf_inv", "cbrt"),
    ("round", "floor", "ceil", "rem", "nextafter", "xor", "population_count"),
    ("shift_left", "shift_right_logical", "shift_right_arithmetic"),
)
IN_NO_PATTERN = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call"}
# They do not change the values.
_IGNORED_PARAMS = {
    *("accuracy", "sharding", "out_sharding", "weak_type", "new_dtype"),
    *("indices_are_sorted", "unique_indices"),
}


def meaning_of(node: Any) -> tuple[Any, ...]:
    """The parameters of a node, without those that depend on sizes."""
    params = None
    if node.name in REDUCTIONS:
        params = {"axes": long_axes(node)}
    if node.name == "iota":
        long = node.outputs[0].long
        dimension = node.params["dimension"]
        params = {"along": long.index(dimension) if dimension in long else None}
        if iota_wraps(node.outputs[0]):
            params["wraps"] = True
    if node.name == "custom_jvp_call":
        params = {"rule": derivative_rule(node).text}
    if node.name == "gather" and (along := _picks(node)) is not None:
        params = node.params
        params = {"along": along, "fill": params["fill_value"], "mode": params["mode"]}
    if params is not None:
        return _text_of(tuple(params.items()))
    items = tuple(node.params.items())
    return _known_text(items) if node.name in LOCAL else _text_of(items)


def _text_of(params: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in params if k not in _IGNORED_PARAMS))


_known_text = functools.lru_cache(4096)(_text_of)


def long_axes(node: Any) -> tuple[int, ...]:
    """The axes of a reduction, as numbers of long dimensions of the operand."""
    long = node.inputs[0].long
    return tuple(sorted(long.index(a) for a in node.params["axes"] if a in long))


def iota_wraps(indices: Any) -> bool:
    """Whether the dtype of an ``iota`` is too narrow for the largest number."""
    size = indices.shape[indices.node.params["dimension"]]
    integers = jnp.issubdtype(indices.dtype, jnp.integer)
    return integers and isinstance(size, int) and size - 1 > jnp.iinfo(indices.dtype).max


def _picks(node: Any) -> int | None:
    """The dimension along which a gather picks one element for each index, or ``None``.

    The other dimensions are those of the indices, in order. A dimension of size 1 may be a slice.
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


# ---- derivative rules ----------------------------------------------------------------------------


class DerivativeRule(NamedTuple):
    """The value and derivative of a function with its own rule.

    Attributes:
      text: what they compute, without shapes.
      whole: their whole program.
    """

    text: str
    whole: str


# By the function, weakly: the cache keeps no function of the user alive.
_Rules = dict[tuple, DerivativeRule]
_rules: weakref.WeakKeyDictionary[Callable, _Rules] = weakref.WeakKeyDictionary()
# The rules of JAX's own functions are the same for all sizes.
_OF_ANY_SIZE = {getattr(function, "jvp", None) for function in ACTIVATIONS.values()}


def derivative_rule(node: Any) -> DerivativeRule:
    given = _compat.derivative_rule(node.equation)
    if given is None:
        return _traced_rule(node)
    known = _rules.setdefault(given[0], {})
    any_size = given[0] in _OF_ANY_SIZE
    types = [(len(v.shape) if any_size else v.shape, v.dtype) for v in node.inputs]
    key = *given[1:], *types, _compat.x64_is_on()
    if (rule := known.get(key)) is None:
        rule = _traced_rule(node)
        if not rule.text.startswith("unknown"):  # under other settings it may be one of ours
            known[key] = rule
    return rule


def _traced_rule(node: Any) -> DerivativeRule:
    def call(*args):
        primitive = node.equation.primitive
        subfunctions, params = _compat.bind_params(primitive, node.params)
        return primitive.bind(*subfunctions, *args, **params)

    x = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.inputs]
    unknown = f"unknown {id(node)}"
    try:
        # JAX keeps this trace for the user's gradient: it is under the user's checks of promotion.
        with _patched.off(), jax.disable_jit(False):
            traced = jax.make_jaxpr(lambda x, t: jax.jvp(call, x, t))(x, x)
    except Exception:  # whatever the rule raises, it is not one of ours
        return DerivativeRule(unknown, unknown)
    whole = unknown if traced.consts else str(traced.jaxpr)  # it does not show constants
    return DerivativeRule(_text(traced.jaxpr), whole)


def _text(jaxpr) -> str:
    """A program without shapes. A broadcast number counts as the number: `vmap` broadcasts it."""
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
    """The text without shapes, meshes and line breaks, whose positions depend on shapes."""
    text = re.sub(r"ctx_mesh=\w*Mesh\(([^()]|\([^()]*\))*\)", "", text)
    text = re.sub(r"\b[a-z]+[0-9]*\[[0-9,]*\]|\([0-9, ]*\)", "", text)
    return re.sub(r"[\s;]+", " ", text)
