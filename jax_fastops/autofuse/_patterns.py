"""The patterns, except losses. Operands are float32 arrays of the size that the program has."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
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

# Other forms of an activation than its function.
_OTHER_FORMS: dict[str, list[Callable]] = {
    "gelu": [
        lambda x: 0.5 * x * (1 + jnp.tanh((2 / math.pi) ** 0.5 * x * (1 + 0.044715 * x**2))),
        lambda x: x * lax.logistic((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
    ],
    "gelu_exact": [
        lambda x: x * 0.5 * (1 + lax.erf(x * 0.5**0.5)),
        lambda x: x * 0.5 * lax.erfc(-x * 0.5**0.5),
        lambda x: x * jax.scipy.special.ndtr(x),
    ],
    "silu": [
        lambda x: x / (1 + jnp.exp(-x)),
        lambda x: 0.5 * x * (1 + jnp.tanh(0.5 * x)),
    ],
}


def _activation(name: Any, function: Callable) -> None:
    def gate(x, up=None):
        return gated_act(x, up, activation=name)

    def gated(x, up, axis):
        return function(x) * up

    add(f"{name} * up", gated, "x up", gate)
    biased = functools.partial(bias_act, activation=name)
    if name == "relu":
        call, more = relu, dict(sum_of=lambda x, residual: add_relu(x, residual))
    else:
        call, more = functools.partial(biased, bias=None), {}
    add(name, gated, "x up", call, fixed={"up": 1.0}, biased=biased, **more)


for _name in ACTIVATIONS:
    for _function in (ACTIVATIONS[_name], *_OTHER_FORMS.get(_name, ())):
        _activation(_name, _function)

# ---- softmax -------------------------------------------------------------------------------------


def _softmax(x, axis):
    e = jnp.exp(x - jnp.max(x, axis, keepdims=True))
    return e / jnp.sum(e, axis, keepdims=True)


def log_softmax_by_hand(x, axis):
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
    log_softmax_by_hand,
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


def _affine(x, mean, inverse, scale, bias, order: str):
    """``(x - mean) * inverse * scale + bias``, or with the brackets multiplied out."""
    inverse = inverse * scale
    y = x * inverse - mean * inverse if order == "out" else (x - mean) * inverse
    return y + bias


def _others(x, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis % x.ndim)


def _along(v, x, axis: int):
    return jnp.expand_dims(v, _others(x, axis))


def _absences(*names: str) -> Iterator[dict[str, float]]:
    """For each subset of operands, the numbers that have no effect in place of them."""
    neutral = {"scale": 1.0, "bias": 0.0, "residual": 0.0}
    for count in range(len(names) + 1):
        for absent in itertools.combinations(names, count):
            yield {name: neutral[name] for name in absent}


def _layer_norm(form: str, order: str) -> None:
    def function(x, scale, bias, eps, axis):
        mean, var = _moments(x, -1, form)
        rows = _along(scale, x, axis), _along(bias, x, axis)
        return _affine(x, mean, lax.rsqrt(var + eps), *rows, order)

    _row_norm("layer_norm", function, ("scale", "bias"), layer_norm, residual_layer_norm)


def _rms_norm(wide: bool) -> None:
    def function(x, scale, eps, axis):
        mean = jnp.mean(x * x, -1, keepdims=True)
        mean = jnp.broadcast_to(mean, x.shape) if wide else mean
        return x * lax.rsqrt(mean + eps) * _along(scale, x, axis)

    _row_norm("rms_norm", function, ("scale",), rms_norm, residual_rms_norm)


def _row_norm(
    name: str, function: Callable, parameters: tuple[str, ...], call: Callable, residual: Callable
) -> None:
    more = dict(axes="last", residual=functools.partial(residual, return_sum=True), fanout=True)
    for fixed in _absences(*parameters):
        add(name, function, " ".join(("x", *parameters, "eps")), call, fixed=fixed, **more)


_FORMS = ("two", "fast", "fast positive")
for _form in _FORMS:
    for _order in ("in", "out"):
        _layer_norm(_form, _order)
for _wide in (False, True):  # Haiku broadcasts the mean
    _rms_norm(_wide)


def _channel_norm(form: str | None, order: str, activation: str | None) -> None:
    """Batch norm, with the statistics of the batch or (no form) given ones."""

    def function(x, *rest, axis):
        *rows, residual, eps = rest
        *given, scale, bias = (_along(v, x, axis) for v in rows)
        mean, var = _moments(x, _others(x, axis), form) if form else given
        y = _affine(x, mean, lax.rsqrt(var + eps), scale, bias, order) + residual
        y = jax.nn.relu(y) if activation else y
        return (y, mean, var) if form else y

    name = "batch_norm" if form else "batch_norm_inference"
    op = batch_norm if form else batch_norm_inference
    call = functools.partial(op, scale=None, bias=None, activation=activation)
    leaves = f"x {'' if form else 'mean var'} scale bias residual eps"
    for fixed in _absences("scale", "bias", "residual"):
        parts = name, None if "residual" in fixed else "residual", activation
        add(
            " + ".join(filter(None, parts)),
            function,
            leaves,
            call,
            fixed=fixed,
            axes="each",
            fanout=form is not None,
        )


for _activation_after in ("relu", None):
    for _form in (*_FORMS, None):
        for _order in ("in", "out"):
            _channel_norm(_form, _order, _activation_after)

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
    tops = [compiled(pattern, 3, 2)[0] for pattern in patterns]
    names = (frozenset(n for n in top.needs if isinstance(n, str)) for top in tops)
    return list(zip(patterns, (top.kind for top in tops), names, strict=True))
