"""The patterns, except losses. Operands are float32 arrays of the size that the program has."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastops.autofuse._pattern import PATTERNS, Pattern, add, compiled
from jax_fastops.batch_norm import batch_norm, batch_norm_inference
from jax_fastops.bias_act import ACTIVATIONS, bias_act
from jax_fastops.gated_act import gated_act
from jax_fastops.lerp import lerp
from jax_fastops.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm
from jax_fastops.relu import add_relu, relu
from jax_fastops.softmax import log_softmax, softmax

# ---- activations ---------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, list[Callable]] = {
    "relu": [jax.nn.relu],
    "gelu": [
        ACTIVATIONS["gelu"],
        lambda x: 0.5 * x * (1 + jnp.tanh((2 / math.pi) ** 0.5 * x * (1 + 0.044715 * x**2))),
        lambda x: x * lax.logistic((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
    ],
    "gelu_exact": [
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: x * 0.5 * (1 + lax.erf(x * 0.5**0.5)),
        lambda x: x * 0.5 * lax.erfc(-x * 0.5**0.5),
        lambda x: x * jax.scipy.special.ndtr(x),
    ],
    "silu": [
        jax.nn.silu,
        lambda x: x / (1 + jnp.exp(-x)),
        lambda x: 0.5 * x * (1 + jnp.tanh(0.5 * x)),
    ],
}


def _activation(name: Any, function: Callable) -> None:
    def gate(x, up=None):
        return gated_act(x, up, activation=name)

    add(f"{name} * up", lambda x, up, axis: function(x) * up, "x up", gate)
    biased = functools.partial(bias_act, activation=name)
    if name == "relu":
        call, more = relu, dict(sum_of=lambda x, residual: add_relu(x, residual))
    else:
        call, more = functools.partial(biased, bias=None), {}
    add(name, lambda x, axis: function(x), "x", call, biased=biased, **more)


for _name, _functions in _ACTIVATIONS.items():
    for _function in _functions:
        _activation(_name, _function)

# ---- softmax -------------------------------------------------------------------------------------


def _softmax(x, axis):
    e = jnp.exp(x - jnp.max(x, axis, keepdims=True))
    return e / jnp.sum(e, axis, keepdims=True)


def _log_softmax(x, axis):
    x = x - jnp.max(x, axis, keepdims=True)
    return x - jnp.log(jnp.sum(jnp.exp(x), axis, keepdims=True))


for _form in (
    lambda x, axis: jax.nn.softmax(x, axis),
    _softmax,
    lambda x, axis: jnp.exp(x - jax.nn.logsumexp(x, axis, keepdims=True)),
    lambda x, axis: jnp.exp(jax.nn.log_softmax(x, axis)),
):
    add("softmax", _form, "x", softmax, axes="each", scaled=True, masked=True)
add(
    "softmax with where",
    lambda x, where, axis: jax.nn.softmax(x, axis, where=where),
    "x where",
    softmax,
    axes="each",
    scaled=True,
)
for _form in (
    lambda x, axis: jax.nn.log_softmax(x, axis),
    _log_softmax,
    lambda x, axis: x - jax.nn.logsumexp(x, axis, keepdims=True),
):
    add("log_softmax", _form, "x", log_softmax, axes="each", scaled=True)

# ---- norms ---------------------------------------------------------------------------------------


def _moments(x, axes, form: str):
    mean = jnp.mean(x, axes, keepdims=True)
    if form.startswith("fast"):
        var = jnp.mean(x * x, axes, keepdims=True) - mean * mean
    else:
        var = jnp.mean((x - mean) ** 2, axes, keepdims=True)
    return mean, jnp.maximum(var, 0.0) if form.endswith("positive") else var


def _affine(x, mean, inverse, scale, bias, form: str):
    """``(x - mean) * inverse * scale + bias``, or with the brackets multiplied out."""
    inverse = inverse if scale is None else inverse * scale
    y = x * inverse - mean * inverse if form == "out" else (x - mean) * inverse
    return y if bias is None else y + bias


def _others(x, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis % x.ndim)


def _along(v, x, axis: int):
    return jnp.expand_dims(v, _others(x, axis))


_PARAMETERS = (("scale", "bias"), ("scale",), ("bias",), ())


def _layer_norm(form: str, order: str, parameters: tuple[str, ...]) -> None:
    def function(x, *rest, axis):
        *given, eps = rest
        rows = {name: _along(v, x, axis) for name, v in zip(parameters, given, strict=True)}
        mean, var = _moments(x, -1, form)
        return _affine(x, mean, lax.rsqrt(var + eps), rows.get("scale"), rows.get("bias"), order)

    _row_norm("layer_norm", function, parameters, layer_norm, residual_layer_norm)


def _rms_norm(wide: bool, parameters: tuple[str, ...]) -> None:
    def function(x, *rest, axis):
        mean = jnp.mean(x * x, -1, keepdims=True)
        y = x * lax.rsqrt((jnp.broadcast_to(mean, x.shape) if wide else mean) + rest[-1])
        return y * _along(rest[0], x, axis) if parameters else y

    _row_norm("rms_norm", function, parameters, rms_norm, residual_rms_norm)


def _row_norm(name: str, function: Callable, parameters, call: Callable, residual: Callable):
    residual = functools.partial(residual, return_sum=True)
    leaves = " ".join(("x", *parameters, "eps"))
    add(name, function, leaves, call, axes="last", residual=residual, fanout=True)


for _parameters in _PARAMETERS:
    for _form in ("two", "fast", "fast positive", "two positive"):
        for _order in ("in", "out"):
            _layer_norm(_form, _order, _parameters)
for _parameters in (("scale",), ()):
    for _wide in (False, True):  # Haiku broadcasts the mean
        _rms_norm(_wide, _parameters)


def _channel_norm(
    form: str | None, order: str, parameters: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Batch norm, with the statistics of the batch or (no form) given ones."""
    statistics = () if form else ("mean", "var")

    def function(x, *rest, axis):
        *given, eps = rest
        named = dict(zip((*statistics, *parameters, *after), given, strict=False))
        rows = {n: _along(v, x, axis) for n, v in named.items() if n != "residual"}
        if form:
            mean, var = _moments(x, _others(x, axis), form)
        else:
            mean, var = rows["mean"], rows["var"]
        y = _affine(x, mean, lax.rsqrt(var + eps), rows.get("scale"), rows.get("bias"), order)
        y = y + named["residual"] if "residual" in after else y
        y = jax.nn.relu(y) if "relu" in after else y
        return (y, mean, var) if form else y

    activation = "relu" if "relu" in after else None
    call = functools.partial(
        batch_norm if form else batch_norm_inference, scale=None, bias=None, activation=activation
    )
    residual = ("residual",) if "residual" in after else ()
    leaves = " ".join(("x", *statistics, *parameters, *residual, "eps"))
    name = " + ".join(("batch_norm" if form else "batch_norm_inference", *after))
    add(name, function, leaves, call, axes="each", fanout=form is not None)


for _after in (("residual", "relu"), ("relu",), ("residual",), ()):
    for _parameters in _PARAMETERS:
        for _moments_ in ("two", "fast", "fast positive", None):
            for _order in ("in", "out"):
                _channel_norm(_moments_, _order, _parameters, _after)

# ---- interpolation -------------------------------------------------------------------------------

add(
    "lerp",
    lambda start, end, weight, axis: start + weight * (end - start),
    "start end weight",
    lerp,
)


@functools.cache
def by_size() -> list[tuple[Pattern, str, frozenset[str]]]:
    """All patterns, the largest first, with what is at the top and the operations for any axis."""
    patterns = sorted(PATTERNS, key=lambda p: compiled(p, 3, 2)[0].size, reverse=True)
    formulas = (compiled(pattern, 3, 2)[0] for pattern in patterns)
    return [
        (pattern, formula.kind, frozenset(n for n in formula.needs if isinstance(n, str)))
        for pattern, formula in zip(patterns, formulas, strict=True)
    ]
