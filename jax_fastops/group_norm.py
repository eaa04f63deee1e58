"""Group norm, of a sum with a residual, followed by an activation.

On a GPU each direction is one launch, which reads its arrays once if they fit into the shared
memory of the processors, and otherwise a part of them twice. The backward sums the gradients of the
parameters in the same pass. The residuals are the input, and the mean and the reciprocal standard
deviation of each group.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fastops._activations import ACTIVATIONS, Activation, documented
from jax_fastops._arguments import (
    as_arrays,
    epsilon,
    integer,
    not_weak,
    one_of,
    parameter,
    same_floating_dtype,
)
from jax_fastops._dispatch import Refused, size_in_bytes
from jax_fastops._kernel import Kernel
from jax_fastops._names import elsewhere
from jax_fastops._native import limit
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge, reshape, spec_of, split

# A kernel sees an array as [..., o, g, k, i]: samples; positions before the channels; groups and
# their channels; positions after the channels. Channels are first or last, so o or i is 1.
_X = "... o g k i"
_STATISTIC = "... g :acc"
_PARAMETERS = "scale?: g k :acc?, bias?: g k :acc?"
_FORWARD = Kernel.declare(
    "group_norm",
    f"x: {_X}, residual?: {_X}, {_PARAMETERS} -> y: {_X}, sum?: {_X}, mean?: {_STATISTIC}, "
    f"rstd?: {_STATISTIC}, workspace: ... w :acc",
    activation=str,
    eps=np.float64,
)
_BACKWARD = Kernel.declare(
    "group_norm_bwd",
    f"dy: {_X}, s: {_X}, mean: {_STATISTIC}, rstd: {_STATISTIC}, {_PARAMETERS} -> dx: {_X}, "
    "dscale?: ... g k :acc, dbias?: ... g k :acc, workspace: ... w :acc",
    activation=str,
)


def _statistics(s, eps, before: int = 1, after: int = 1) -> tuple:
    """Deviations from the mean, the mean and the reciprocal standard deviation.

    ``before`` and ``after`` are the numbers of axes of positions before and after the channels.
    """
    s = s.astype(accumulator_dtype(s.dtype))
    axes = (*range(-before - after - 2, -after - 2), *range(-after - 1, 0))
    mean = jnp.mean(s, axis=axes, keepdims=True)
    centred = s - mean
    variance = jnp.mean(centred * centred, axis=axes, keepdims=True)
    return centred, mean, jax.lax.rsqrt(variance + eps)


def _reference(x, residual, scale, bias, *, eps, activation, before: int = 1, after: int = 1):
    s = x if residual is None else x + residual
    centred, _, y = _statistics(s, eps, before, after)
    ones = (1,) * after
    if scale is not None:
        y = y * jnp.reshape(scale, (*scale.shape, *ones)).astype(y.dtype)
    y = centred * y
    if bias is not None:
        y = y + jnp.reshape(bias, (*bias.shape, *ones)).astype(y.dtype)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y.astype(x.dtype)


def _save(x, residual, scale, bias, *, eps, activation):
    del scale, bias, activation
    s = x if residual is None else x + residual
    statistics = (jnp.reshape(v, v.shape[:-4] + v.shape[-3:-2]) for v in _statistics(s, eps)[1:])
    return (*([] if residual is None else [s]), *statistics)


def _residuals(args, outs, saved):
    x, residual, scale, bias = args
    return (x if residual is None else saved[0], scale, bias, *saved[-2:])


def _of_sum(residuals, options):
    """The op as a function of the sum and the parameters, those of them that are not None."""
    primals = residuals[:3]
    places = [i for i, x in enumerate(primals) if x is not None]

    def function(*given):
        s, scale, bias = (given[places.index(i)] if i in places else None for i in range(3))
        return _reference(s, None, scale, bias, **options)

    return function, places, [primals[i] for i in places]


def _pullback(residuals, cts, **options):
    function, places, primals = _of_sum(residuals, options)
    grads = dict(zip(places, jax.vjp(function, *primals)[1](cts[0]), strict=True))
    ds, dscale, dbias = (grads.get(i) for i in range(3))
    return ds, ds, dscale, dbias


def _pushforward(residuals, tangents, **options):
    function, places, primals = _of_sum(residuals, options)
    dx, dresidual, *rest = tangents
    ds = dx if dresidual is None else dresidual if dx is None else dx + dresidual
    every = [ds, *rest]
    given = [
        jnp.zeros_like(x) if every[i] is None else every[i].astype(x.dtype)
        for i, x in zip(places, primals, strict=True)
    ]
    return (jax.jvp(function, primals, given)[1],)


def _workspace(x, values: int) -> int:
    """The elements of a workspace with ``values`` for each sample and part of its positions."""
    positions = x.shape[-4] * x.shape[-1]
    return values * max(1, min(512, positions // 64))


def _forward(x, residual, scale, bias, *, eps, activation, save=False):
    result = _FORWARD(
        x=x,
        residual=residual,
        scale=scale,
        bias=bias,
        sum=save and residual is not None,
        mean=save,
        rstd=save,
        w=_workspace(x, 4 * x.shape[-3]),
        activation=activation or "none",
        eps=eps,
    )
    results = (result.y, result.sum, result.mean, result.rstd)
    return tuple(y for y in results if y is not None)


def _backward(residuals, cts, needs_grad, *, eps, activation):
    del eps
    s, scale, bias, mean, rstd = residuals
    result = _BACKWARD(
        dy=cts[0],
        s=s,
        mean=mean,
        rstd=rstd,
        scale=scale,
        bias=bias,
        dscale=bool(needs_grad[2]),
        dbias=bool(needs_grad[3]),
        w=_workspace(s, 2 * s.shape[-3] * (1 + s.shape[-2])),
        activation=activation or "none",
    )
    sums = (
        None if v is None else v.sum(tuple(range(v.ndim - 2)))
        for v in (result.dscale, result.dbias)
    )
    return result.dx, result.dx, *sums


_OP = Op(
    "group_norm",
    f"{_X}, {_X}, g k, g k -> {_X}",
    _reference,
    example=example(
        lambda x, scale, bias: group_norm(x, scale, bias, num_groups=1, activation="silu"),
        "... n, n, n",
    ),
    kernels=(_FORWARD, _BACKWARD),
    forward=_forward,
    save=_save,
    forward_saving=functools.partial(_forward, save=True),
    residuals=_residuals,
    pullback=_pullback,
    pushforward=_pushforward,
    backward=_backward,
    shared={"scale": 2, "bias": 3},
)


def _in_view(at: int, num_groups: int, options: dict, request, x, residual, scale, bias):
    """Calls the kernels on a view ``[n, o, g, k, i]``."""
    before, after = math.prod(x.shape[1:at]), math.prod(x.shape[at + 1 :])
    spec = spec_of(x)
    if spec is not None and any(axis is not None for axis in spec[1:]):
        raise Refused("an explicit mesh axis shards another axis than the first")
    group = (num_groups, x.shape[at] // num_groups)
    view, own = (x.shape[0], before, *group, after), spec and (spec[0], *(None,) * 4)
    arrays = (a if a is None else reshape(a, view, own) for a in (x, residual))
    parameters = (p if p is None else jnp.reshape(p, group) for p in (scale, bias))
    saved = f"{_STATISTIC}, {_STATISTIC}"
    if residual is not None:
        saved = f"{_X}, {saved}"
    signature = f"{_OP.signature} | {saved}"
    y = _OP.bind(request, *arrays, *parameters, signature=signature, **options)
    return reshape(y, x.shape, spec)


def _otherwise(at: int, num_groups: int, options: dict, x, residual, scale, bias):
    """The reference on the user's shape: sharded positions and channels stay as they are."""
    group = (num_groups, x.shape[at] // num_groups)
    arrays = (a if a is None else split(a, at, group) for a in (x, residual))
    parameters = (p if p is None else split(p, 0, group) for p in (scale, bias))
    y = _reference(*arrays, *parameters, before=at - 1, after=x.ndim - at - 1, **options)
    return merge(y, at)


def _limit(x, at: int, num_groups: int) -> str | None:
    if not all(isinstance(d, int) for d in x.shape[1:]):  # a workspace needs them
        return "an axis other than the first has a symbolic size"
    if 0 in x.shape:
        return "there are no elements"
    if math.prod(x.shape[1:at]) > 1 and math.prod(x.shape[at + 1 :]) > 1:
        return "the channels are neither before nor after all positions"
    channels = limit("group_norm_channels") // (2 if x.dtype == np.float64 else 1)
    if x.shape[at] // num_groups > channels:
        return f"a group has more than {channels} channels"
    return None


@elsewhere(epsilon="pass eps")
@documented
def group_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int,
    axis: int = -1,
    eps: float = 1e-6,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
) -> jax.Array:
    """Group norm of ``s = x + residual``, and an activation.

    ``activation((s - mean) * rsqrt(var + eps) * scale + bias)``.

    The channels are divided into groups of neighbors. The mean and the biased variance are those of
    all elements of one index of the first axis and one group. With as many groups as channels, this
    is instance norm. Everything is computed in float32 (float64 for float64) and rounded once; the
    sum with the residual is rounded before. The variance is computed from deviations, so it is
    exact also if the mean is far larger than the deviation.

    Args:
      x: array of float32, bfloat16, float16 or float64. The first axis is that of the samples.
      scale, bias: arrays ``[channels]`` of any supported floating dtype, or ``None``.
      num_groups: the number of groups, which divides the number of channels.
      axis: the axis of the channels, not the first one. The kernels take channels that are last, or
        come before all positions.
      eps: a Python or NumPy number, added to the variance.
      activation: ``None`` or the name of a function:

        {activations}
      residual: array with the shape and dtype of ``x``, or ``None``.

    Returns:
      An array with the shape and dtype of ``x``.

    Residuals: ``x + residual``, ``scale``, ``bias``, and the mean and reciprocal standard deviation
    of each group of each sample in float32 (float64 for float64).

    Sharding: over the first axis, without communication, and with one all-reduce of each
    parameter's gradient. Other sharded axes are gathered over auto mesh axes, and take the
    reference over explicit ones.

    Raises:
      TypeError: an argument is not an array, a dtype is not supported or not that of ``x``, or
        ``num_groups``, ``axis`` or ``eps`` is not a number.
      ValueError: ``x`` has less than two dimensions, ``axis`` is out of range or the first one,
        ``num_groups`` does not divide the channels, the shape of ``scale`` or ``bias`` is not that
        of the axis, the shape of ``residual`` is not that of ``x``, ``activation`` is not known, or
        ``eps`` is negative or not finite.

    Source: Wu and He, Group Normalization, with the activation and the residual of diffusion
    models.

    Example:
      >>> x = jnp.array([[[1.0, 10.0], [3.0, 30.0]]])
      >>> y = fo.group_norm(x, num_groups=2)
      >>> [[round(v, 3) for v in row] for row in y[0].tolist()]
      [[-1.0, -1.0], [1.0, 1.0]]
    """
    op = "group_norm"
    given: dict[str, Any] = {"x": x} | ({} if residual is None else {"residual": residual})
    arrays = same_floating_dtype(op, as_arrays(op, **given), list(given))
    x, residual = not_weak(arrays[0]), not_weak(arrays[1]) if residual is not None else None
    if x.ndim < 2:
        raise ValueError(f"{op}: x has shape {x.shape}; it must have at least 2 dimensions")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual has shape {residual.shape}; it must have that of x, {x.shape}"
        )
    axis, num_groups = integer(op, "axis", axis), integer(op, "num_groups", num_groups)
    if not (-x.ndim < axis < x.ndim and axis != 0):
        raise ValueError(
            f"{op}: axis is {axis}; it must be an axis of x, of shape {x.shape}, after the first"
        )
    at = axis % x.ndim
    channels = x.shape[at]
    if num_groups < 1 or channels % num_groups != 0:
        raise ValueError(
            f"{op}: num_groups is {num_groups}; it must divide {channels}, the size of axis {axis} "
            f"of x, of shape {x.shape}"
        )
    if activation is not None:
        one_of(op, "activation", activation, ACTIVATIONS)
    parameters = [
        None if value is None else parameter(op, name, value, x, at, f"axis {axis} of x")
        for name, value in (("scale", scale), ("bias", bias))
    ]
    options = dict(eps=epsilon(op, eps), activation=activation)
    after = x.shape[at + 1 :]
    last = all(d == 1 for d in after)
    return _OP(
        x,
        residual,
        *parameters,
        features={
            "inner_bytes": 0 if last else size_in_bytes(after, x.dtype),
            "group_bytes": size_in_bytes((*x.shape[1:at], channels // num_groups, *after), x.dtype),
        },
        limit=_limit(x, at, num_groups),
        native=functools.partial(_in_view, at, num_groups, options),
        otherwise=functools.partial(_otherwise, at, num_groups, options),
    )
