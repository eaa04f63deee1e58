"""``bias_act``: an activation of ``x + bias``, in one pass forward and one backward.

The backward reads the cotangent, ``x`` (for relu one bit per element) and the bias once, and sums
the bias gradient on the chip while it writes the gradient of ``x``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._activations import ACTIVATIONS, Activation, documented, measured
from jax_fastops._arguments import (
    as_arrays,
    broadcasts,
    is_integer,
    not_weak,
    one_of,
    same_floating_dtype,
)
from jax_fastops._bits import pack, select
from jax_fastops._broadcast import add, backward_of, call, features_of, limit_of, of_rank, pull_back
from jax_fastops._kernel import Kernel, match_varying
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import (
    broadcast_to,
    broadcast_type,
    explicit_spec,
    merge_last,
    parts_of,
    split_last,
)
from jax_fastops.relu import add_relu

_MASK = "... ceil(n/8) :uint8"
_GRADIENTS = "dx?: ... *n, dbias?: ... *n, workspace?: ... *n :acc"
_BIAS_ACT = Kernel.declare(
    "bias_act", "x: ~... *n, bias: ~... *n :acc? -> y: ... *n", activation=str
)
_BIAS_ACT_BWD = Kernel.declare(
    "bias_act_bwd",
    f"dy: ... *n, x: ~... *n, bias: ~... *n :acc? -> {_GRADIENTS}",
    activation=str,
)
_BIAS_RELU = Kernel.declare(
    "bias_act", f"x: ... n, bias: ~... m :acc? -> y: ... n, mask?: {_MASK}", activation=str
)
_BIAS_RELU_BWD = Kernel.declare("bias_relu_bwd", f"dy: ... *n, mask: ... *n :uint8 -> {_GRADIENTS}")


def _reference(x, bias, *, activation: str):
    return ACTIVATIONS[activation](add(x, bias))


_bias_act = Op(
    "bias_act",
    "~... *n, ~... *n -> ... *n",
    _reference,
    example=example(lambda x, bias: bias_act(x, bias), "... n, n"),
    kernels=(_BIAS_ACT, _BIAS_ACT_BWD),
    forward=functools.partial(call, _BIAS_ACT),
    backward=backward_of(_BIAS_ACT_BWD, "x", "bias"),
)


# ---- relu: rows with a mask ----------------------------------------------------------------------


def _relu_forward(x, bias, *, save=False, **_):
    return call(_BIAS_RELU, x, bias, activation="relu", mask=save)


def _relu_pullback(residuals, cts, **_):
    mask, bias = residuals
    dx = select(mask, *cts)
    wide = dx.astype(accumulator_dtype(dx.dtype))
    pairs = enumerate(zip(dx.shape, bias.shape, strict=True))
    summed = tuple(d for d, (size, own) in pairs if size != own)
    return dx, wide.sum(summed, keepdims=True)


def _relu_pushforward(residuals, tangents, *, row, dtype, **_):
    dx, dbias = tangents
    if dbias is not None:
        dbias = jnp.broadcast_to(dbias, (*dbias.shape[:-1], row))
    total = dx if dbias is None else dbias if dx is None else add(dx, dbias)
    return select(residuals[0], total.astype(dtype))


def _relu_backward(residuals, cts, needs_grad, **_):
    (mask, bias), (dy,) = residuals, cts
    types = [jax.typeof(x) if n else None for x, n in zip((dy, bias), needs_grad, strict=True)]
    return pull_back(_BIAS_RELU_BWD, dy, dict(mask=mask), dict(dx=types[0], dbias=types[1]))


_bias_relu = Op(
    "bias_relu",
    f"... n, ~... m -> ... n | {_MASK}",
    lambda x, bias, **_: _reference(x, bias, activation="relu"),
    family="bias_act",
    example=example(lambda x, bias: bias_act(x, bias, activation="relu"), "... n, n"),
    kernels=(_BIAS_RELU, _BIAS_RELU_BWD),
    forward=_relu_forward,
    save=lambda x, bias, **_: (pack(add(x, bias) > 0),),
    forward_saving=functools.partial(_relu_forward, save=True),
    # The bias is kept only for its shape, which is that of its gradient.
    residuals=lambda args, outs, saved: (saved[0], args[1]),
    pullback=_relu_pullback,
    pushforward=_relu_pushforward,
    backward=_relu_backward,
)


def _relu_in_view(request, x, bias):
    """ReLU with a mask: rows of 8 elements if the last axis divides into them, else whole rows."""
    result = broadcast_type([x, bias])
    x = broadcast_to(x, result)
    n = x.shape[-1]
    spec = explicit_spec(result.sharding, x.ndim)
    parts = parts_of(spec[-1], result.sharding) if spec else 1
    if not isinstance(n, int) or n % (8 * parts):
        return _bias_relu.bind(request, x, bias, row=n, dtype=str(x.dtype))
    sizes = (n // 8, 8)
    bias = split_last(bias, sizes if bias.shape[-1] == n else (1, 1))
    return merge_last(
        _bias_relu.bind(request, split_last(x, sizes), bias, row=8, dtype=str(x.dtype))
    )


def _check(x, bias, activation) -> list[jax.Array]:
    one_of("bias_act", "activation", activation, ACTIVATIONS)
    if bias is None:
        (x,) = as_arrays("bias_act", x=x)
        x = x.astype(jnp.result_type(x.dtype, float)) if is_integer(x) else x
        (x,) = same_floating_dtype("bias_act", [x], ["x"])
        # A bias of one element has no axis that an explicit mesh could shard.
        sharded = not jax.typeof(x).sharding.mesh.empty
        shape = (1,) * min(x.ndim, 1) if sharded else x.shape[-1:]
        bias = jnp.full(shape, -0.0, x.dtype)  # the sum is x to the last bit, also for -0.0
    arrays = as_arrays("bias_act", x=x, bias=bias)
    names = ["x", "bias"]
    if any(getattr(a, "weak_type", False) for a in arrays):
        x, bias = same_floating_dtype("bias_act", arrays, names)
    else:
        x, bias = (
            same_floating_dtype("bias_act", [a], [name])[0]
            for a, name in zip(arrays, names, strict=True)
        )
    if not broadcasts(bias.shape, x.shape):
        raise ValueError(
            f"bias_act: bias has shape {bias.shape}, which does not broadcast to the shape "
            f"{x.shape} of x"
        )
    if bias.dtype != x.dtype:
        bias = bias.astype(accumulator_dtype(x.dtype))
    return match_varying([not_weak(x), of_rank(not_weak(bias), x.ndim)])


@documented
def bias_act(x: ArrayLike, bias: ArrayLike | None, *, activation: Activation = "gelu") -> jax.Array:
    """An activation of a sum: ``act(x + bias)``.

    The kernel computes both in float32 (float64 for float64) and rounds the result once. The
    reference computes in the dtype, as ``jax.nn``.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64. Without a bias, integers become
        floating-point numbers, as in ``jax.nn.gelu``.
      bias: array that broadcasts to the shape of ``x``, typically ``[h]``. It may have another
        floating dtype. The kernel reads it in its own shape. ``None``: no bias.
      activation: the name of a function:

        {activations}

    Returns:
      An array with the shape and the (floating) dtype of ``x``.

    Residuals: ``x`` and the bias. For relu, one bit per element (uint8), and the bias for its
    shape. A bias with the shape and dtype of ``x`` is not kept then.

    Sharding: over every dimension, as :func:`lerp`, with one all-reduce of the bias gradient if it
    is summed over a sharded dimension. With relu, a shard of the last axis must be a multiple of 8
    elements. Otherwise the axis is gathered over an auto mesh axis, and the call takes the
    reference over an explicit one.

    Raises:
      TypeError: an argument is not an array or number, or a dtype is not supported.
      ValueError: the activation is not known, or the bias does not broadcast to the shape of ``x``.

    Source: FasterTransformer, ``add_bias_act``.

    Example:
      >>> fo.bias_act(jnp.array([[-2.0, 1.0]]), jnp.array([0.5, 0.5]), activation="relu").tolist()
      [[0.0, 1.5]]
    """
    x, bias = _check(x, bias, activation)
    if x.ndim == 0:
        x, bias = of_rank(x, 1), of_rank(bias, 1)
        return jnp.squeeze(bias_act(x, bias, activation=activation), 0)
    call: dict[str, Any] = dict(
        entry=f"bias_{measured(activation)}",
        features=features_of([x.shape, bias.shape], x.dtype),
        limit=limit_of(x.shape),
    )
    if activation != "relu":
        return _bias_act(x, bias, activation=activation, **call)
    if bias.shape == x.shape and bias.dtype == x.dtype:
        return add_relu(x, bias)  # keeps only the mask
    return _bias_relu(x, bias, native=_relu_in_view, **call)
