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

from jax_fastops.autofuse._pattern import add
from jax_fastops.batch_norm import batch_norm, batch_norm_inference
from jax_fastops.bias_act import ACTIVATIONS, bias_act
from jax_fastops.gated_act import gated_act
from jax_fastops.lerp import lerp
from jax_fastops.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm
from jax_fastops.relu import add_relu, relu
from jax_fastops.softmax import log_softmax, softmax

# ---- activations ---------------------------------------------------------------------------------

# Forms of an activation, each with the operation that all programs with it have: first that of its
# function. Activations that are not named here are traced for every program.
_NEEDS = {
    **dict(gelu="tanh", gelu_exact="erfc", mish="tanh", relu="custom_jvp_call"),
    **dict(silu="logistic", quick_gelu="logistic"),
}
_OTHER_FORMS: dict[str, list[tuple[Callable, str]]] = {
    "gelu": [
        (
            lambda x: 0.5 * x * (1 + jnp.tanh((2 / math.pi) ** 0.5 * x * (1 + 0.044715 * x**2))),
            "tanh",
        ),
        (lambda x: x * lax.logistic((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3)), "logistic"),
    ],
    "gelu_exact": [
        (lambda x: x * 0.5 * (1 + lax.erf(x * 0.5**0.5)), "erf"),
        (lambda x: x * 0.5 * lax.erfc(-x * 0.5**0.5), "erfc"),
        (lambda x: x * jax.scipy.special.ndtr(x), "erf erfc"),
    ],
    "silu": [
        (lambda x: x / (1 + jnp.exp(-x)), "exp"),
        (lambda x: 0.5 * x * (1 + jnp.tanh(0.5 * x)), "tanh"),
    ],
}


def _activation(name: Any, function: Callable, needs: str) -> None:
    def gate(x, up=None):
        return gated_act(x, up, activation=name)

    def gated(x, up, axis):
        return function(x) * up

    add(f"{name} * up", gated, "x up", gate, needs)
    biased = functools.partial(bias_act, activation=name)
    if name == "relu":
        call, more = relu, dict(sum_of=lambda x, residual: add_relu(x, residual))
    else:
        call, more = functools.partial(biased, bias=None), {}
    add(name, gated, "x up", call, needs, fixed={"up": 1.0}, biased=biased, **more)


for _name, _function in ACTIVATIONS.items():
    _activation(_name, _function, _NEEDS.get(_name, ""))
    for _function, _needed in _OTHER_FORMS.get(_name, ()):
        _activation(_name, _function, _needed)

# ---- softmax -------------------------------------------------------------------------------------

_OF_SOFTMAX = "exp reduce_max reduce_sum"
OF_LOG_SOFTMAX = _OF_SOFTMAX + " log"
OF_LOGSUMEXP = OF_LOG_SOFTMAX + " is_finite"


def _softmax(x, axis):
    e = jnp.exp(x - jnp.max(x, axis, keepdims=True))
    return e / jnp.sum(e, axis, keepdims=True)


def log_softmax_by_hand(x, axis):
    x = x - jnp.max(x, axis, keepdims=True)
    return x - jnp.log(jnp.sum(jnp.exp(x), axis, keepdims=True))


for _form, _needed in (
    (lambda x, axis: jax.nn.softmax(x, axis), _OF_SOFTMAX),
    (_softmax, _OF_SOFTMAX),
    (lambda x, axis: jnp.exp(x - jax.nn.logsumexp(x, axis, keepdims=True)), OF_LOGSUMEXP),
    (lambda x, axis: jnp.exp(jax.nn.log_softmax(x, axis)), OF_LOG_SOFTMAX),
):
    add("softmax", _form, "x", softmax, _needed, axes="each", scaled=True, masked=True)
add(
    "softmax with where",
    lambda x, where, axis: jax.nn.softmax(x, axis, where=where),
    "x where",
    softmax,
    _OF_SOFTMAX,
    axes="each",
    scaled=True,
)
for _form, _needed in (
    (lambda x, axis: jax.nn.log_softmax(x, axis), OF_LOG_SOFTMAX),
    (log_softmax_by_hand, OF_LOG_SOFTMAX),
    (lambda x, axis: x - jax.nn.logsumexp(x, axis, keepdims=True), OF_LOGSUMEXP),
):
    add("log_softmax", _form, "x", log_softmax, _needed, axes="each", scaled=True)

# ---- norms ---------------------------------------------------------------------------------------


def moments(x, axes, form: str):
    mean = jnp.mean(x, axes, keepdims=True)
    if form.startswith("fast"):
        var = jnp.mean(x * x, axes, keepdims=True) - mean * mean
    else:
        var = jnp.mean((x - mean) ** 2, axes, keepdims=True)
    return mean, jnp.maximum(var, 0.0) if form.endswith("positive") else var


_moments = jax.jit(moments, static_argnums=(1, 2))  # the same in several forms, and traced once


def needs_of(form: str) -> str:
    """The operations of a norm, whose variance may be of a form of ``moments``."""
    return "reduce_sum root" + " max" * form.endswith("positive")


def affine(x, mean, inverse, scale, bias, order: str):
    """``(x - mean) * inverse * scale + bias``, or with the brackets multiplied out."""
    inverse = inverse * scale
    y = x * inverse - mean * inverse if order == "out" else (x - mean) * inverse
    return y + bias


def _others(x, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis % x.ndim)


def _along(v, x, axis: int):
    return jnp.expand_dims(v, _others(x, axis))


def absences(*names: str) -> Iterator[dict[str, float]]:
    """For each subset of operands, the numbers that have no effect in place of them."""
    neutral = {"scale": 1.0, "bias": 0.0, "residual": 0.0}
    for count in range(len(names) + 1):
        for absent in itertools.combinations(names, count):
            yield {name: neutral[name] for name in absent}


def _layer_norm(form: str, order: str) -> None:
    def function(x, scale, bias, eps, axis):
        mean, var = _moments(x, -1, form)
        rows = _along(scale, x, axis), _along(bias, x, axis)
        return affine(x, mean, lax.rsqrt(var + eps), *rows, order)

    parameters, needs = ("scale", "bias"), needs_of(form)
    _row_norm("layer_norm", function, parameters, layer_norm, residual_layer_norm, needs)


def _rms_norm(wide: bool) -> None:
    def function(x, scale, eps, axis):
        mean = jnp.mean(x * x, -1, keepdims=True)
        mean = jnp.broadcast_to(mean, x.shape) if wide else mean
        return x * lax.rsqrt(mean + eps) * _along(scale, x, axis)

    _row_norm("rms_norm", function, ("scale",), rms_norm, residual_rms_norm, needs_of(""))


def _row_norm(
    name: str, function: Callable, parameters: tuple[str, ...], call: Callable, residual: Callable,
    needs: str,
) -> None:  # fmt: skip
    more = dict(axes="last", residual=residual, fanout=True)
    leaves = " ".join(("x", *parameters, "eps"))
    for fixed in absences(*parameters):
        add(name, function, leaves, call, needs, fixed=fixed, **more)


FORMS = ("two", "fast", "fast positive")
for _form in FORMS:
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
        y = affine(x, mean, lax.rsqrt(var + eps), scale, bias, order) + residual
        y = jax.nn.relu(y) if activation else y
        return (y, mean, var) if form else y

    name = "batch_norm" if form else "batch_norm_inference"
    op = batch_norm if form else batch_norm_inference
    call = functools.partial(op, scale=None, bias=None, activation=activation)
    leaves = f"x {'' if form else 'mean var'} scale bias residual eps"
    needs = (needs_of(form) if form else "root") + " custom_jvp_call" * bool(activation)
    for fixed in absences("scale", "bias", "residual"):
        parts = name, None if "residual" in fixed else "residual", activation
        add(
            " + ".join(filter(None, parts)),
            function,
            leaves,
            call,
            needs,
            over_others=True,
            fixed=fixed,
            axes="each",
            fanout=form is not None,
        )


for _activation_after in ("relu", None):
    for _form in (*FORMS, None):
        for _order in ("in", "out"):
            _channel_norm(_form, _order, _activation_after)

# ---- interpolation -------------------------------------------------------------------------------

add(
    "lerp",
    lambda start, end, weight, axis: start + weight * (end - start),
    "start end weight",
    lerp,
)
