"""What the equations of a program compute, in whatever way they are written.

A value may be a constant, a view of another one, a sum, or a product. A map tells for each
dimension of one array which dimension of another it is, or ``None`` if that one is broadcast along
it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_fastops import _compat, _patched
from jax_fastops._autofuse.graph import Node, Value

Map = tuple  # of int | None

UFUNCS: dict[str, Callable] = {
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
}
_FOLDED: dict[str, Callable] = UFUNCS | {
    "select_n": lambda which, *cases: cases[int(which)],
    "broadcast_in_dim": lambda x, *_: x,
    "reshape": lambda x, *_: x,
    "squeeze": lambda x, *_: x,
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
    "pvary": lambda x: x,
    "pcast": lambda x: x,
}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
ELEMENTWISE = {
    *("exp", "log", "tanh", "erf", "erfc", "logistic", "max", "min", "abs", "is_finite", "sign"),
    *("select_n", "stop_gradient", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"),
}
# XLA fuses these with each other.
FUSIBLE = ELEMENTWISE | {
    *("add", "add_any", "sub", "mul", "div", "neg", "square", "sqrt", "rsqrt", "integer_pow"),
    *("pow", "convert_element_type", "broadcast_in_dim", "clamp", "sin", "cos", "log1p", "expm1"),
}
# They do not change the values.
_IGNORED_PARAMS = {
    *("accuracy", "sharding", "out_sharding", "weak_type", "new_dtype"),
    *("indices_are_sorted", "unique_indices"),
}


# ---- constants and views -------------------------------------------------------------------------


def constant(value: Value) -> Any:
    """The one number that an array consists of, or ``None``."""
    node = value.node
    if node is not None and not value.is_folded:
        if node.name == "convert_element_type" or node.name in _FOLDED:
            given = [constant(v) for v in node.inputs]
            whole = node.name == "div" and not value.is_floating  # rounds towards 0
            if given and not whole and all(x is not None for x in given):
                with np.errstate(all="ignore"):
                    if node.name == "convert_element_type":
                        found = given[0].astype(node.params["new_dtype"])
                    else:
                        found = _FOLDED[node.name](*given)
                value.constant = np.asarray(found)
        value.is_folded = True
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


def view_of(value: Value, narrowing: bool) -> tuple[Value, Map] | None:
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
        if value.dtype.kind in "iu" and operand.dtype.kind in "iu":
            return _same_view(value, operand) if np.can_cast(operand.dtype, value.dtype) else None
        if not (value.is_floating and operand.is_floating):
            return None
        wider = value.dtype.itemsize > operand.dtype.itemsize or value.dtype == operand.dtype
        narrower = value.dtype.itemsize < operand.dtype.itemsize
        return _same_view(value, operand) if wider or (narrowing and narrower) else None
    unit = {"sub": 0, "div": 1}.get(node.name)
    if unit is not None and constant(node.inputs[1]) == unit:
        return _same_view(value, operand)
    if node.name == "max":
        for limit, other in (node.inputs, node.inputs[::-1]):
            if constant(limit) == -np.inf:
                return _same_view(value, other)
    if node.name in ("and", "or"):  # with True, or with False
        for neutral, other in (node.inputs, node.inputs[::-1]):
            if value.dtype == bool and constant(neutral) == (node.name == "and"):
                return _same_view(value, other)
    if node.name == "select_n" and (known := constant(operand)) is not None:
        return _same_view(value, node.inputs[1 + int(known)])
    if node.name == "select_n" and _is_negative_iota(operand):  # an index counts from 0
        return _same_view(value, node.inputs[1])
    if node.name == "gather" and value.sizes == operand.sizes:  # `take` of the only element
        indexed = node.params["dimension_numbers"].start_index_map
        if constant(node.inputs[1]) == 0 and all(operand.shape[d] == 1 for d in indexed):
            return operand, identity(value)
    return None


def _is_negative_iota(value: Value) -> bool:
    """Whether a value is the comparison of an ``iota`` with 0, which is never less."""
    node = value.node
    if node is None or node.name != "lt" or constant(node.inputs[1]) != 0:
        return False
    numbers = resolve(node.inputs[0])[0].node
    return numbers is not None and numbers.name == "iota" and not _wraps(numbers.outputs[0])


def resolve(value: Value, narrowing: bool = False) -> tuple[Value, Map, list[Value]]:
    """The array that a value shows, the map to it, and the values between."""
    known = value.resolved.get(narrowing)
    if known is None:
        step = view_of(value, narrowing)
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


# ---- sums, products, and selections --------------------------------------------------------------


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


def multiple_of(value: Value) -> tuple[float, Value] | None:
    """The number and the array whose product a value is."""
    terms = terms_of(value)
    return terms[0] if terms is not None and len(terms) == 1 else None


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


def selections_of(value: Value) -> Iterator[tuple[Value, Value, Value, bool]]:
    """Of a selection between two arrays, for each: the mask, the array, the other one, the sign.

    The sign is whether the mask is True where the array is taken.
    """
    node = value.node
    if node is not None and node.name == "select_n" and len(node.inputs) == 3:
        which, a, b = node.inputs
        yield which, a, b, False
        yield which, b, a, True


def factors_of(value: Value) -> list[tuple[Value, float]] | None:
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


def sign_of(value: Value) -> float:
    return -1.0 if value.node is not None and value.node.name == "neg" else 1.0


# ---- parameters ----------------------------------------------------------------------------------


def meaning(node: Node) -> tuple:
    """What makes an operation this one: its parameters, without what depends on sizes."""
    if node.meaning is None:
        node.meaning = _meaning(node)
    return node.meaning


def _meaning(node: Node) -> tuple:
    params = {k: v for k, v in node.params.items() if k not in _IGNORED_PARAMS}
    if node.name in REDUCTIONS:
        long = node.inputs[0].long
        params = {"axes": tuple(sorted(long.index(a) for a in params["axes"] if a in long))}
    if node.name == "iota":
        long = node.outputs[0].long
        dimension = node.params["dimension"]
        params = {"along": long.index(dimension) if dimension in long else None}
        if _wraps(node.outputs[0]):
            params["wraps"] = True
    if node.name == "custom_jvp_call":
        params = {"rule": _derivative_rule(node)}
    if node.name == "gather" and (along := _picks(node)) is not None:
        params = {"along": along, "fill": params["fill_value"], "mode": params["mode"]}
    return tuple(sorted((k, str(v)) for k, v in params.items()))


def _wraps(indices: Value) -> bool:
    """Whether the dtype of an ``iota`` is too narrow for the largest number."""
    assert indices.node is not None
    size = indices.shape[indices.node.params["dimension"]]
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
    key = *given, *((v.shape, v.dtype) for v in node.inputs), _compat.x64_is_on()
    if key not in known:
        found = _traced_rule(node)
        if found.startswith("unknown"):  # under other settings it may be one of ours
            return found
        known[key] = found
    return known[key]


def _traced_rule(node: Node) -> str:
    def call(*args):
        found = node.equation.primitive.get_bind_params(node.params)
        subfuns, params = found if isinstance(found, tuple) else ((), found)
        return node.equation.primitive.bind(*subfuns, *args, **params)

    x = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.inputs]
    try:
        # JAX keeps this trace for the user's gradient: it is under the user's checks of promotion.
        with _patched.off(), jax.disable_jit(False):
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
    """Also without meshes, and without the places where lines are broken, by the shapes."""
    text = re.sub(r"ctx_mesh=\w*Mesh\(([^()]|\([^()]*\))*\)", "", text)
    text = re.sub(r"\b[a-z]+[0-9]*\[[0-9,]*\]|\([0-9, ]*\)", "", text)
    return re.sub(r"[\s;]+", " ", text)
