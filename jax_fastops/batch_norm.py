"""Batch norm, with the residual and the ReLU that often follow it.

In training, each direction takes two passes over the input: one for two sums per channel, and one
for the result. A GPU's second pass reads from memory only the part that did not stay on the chip.
The residuals are the input, the statistics, and one bit per element for the ReLU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._arguments import (
    as_arrays,
    epsilon,
    integer,
    not_weak,
    parameter,
    same_floating_dtype,
)
from jax_fastops._batch_norm_kernels import (
    APPLY_KERNEL,
    BACKWARD_KERNEL,
    FORWARD_KERNEL,
    GRADIENT_KERNEL,
    STATISTICS_KERNEL,
    SUMS_KERNEL,
    inference_forward,
    inference_gradients,
    statistics,
    training_forward,
    training_gradients,
)
from jax_fastops._batch_norm_reference import (
    count_of,
    inference_pullback,
    inference_pushforward,
    inference_reference,
    inference_save,
    merged,
    statistics_pullback,
    statistics_pushforward,
    statistics_reference,
    training_pullback,
    training_pushforward,
    training_reference,
    training_save,
    twice_if,
)
from jax_fastops._dispatch import SYMBOLIC, Refused, size_in_bytes
from jax_fastops._names import elsewhere
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._types import Flag, fans_out
from jax_fastops._views import broadcast_to, broadcast_type, parts_of, reshape, spec_of

# An op sees an array as [..., o, c, i]: "..." is the batch, which may be sharded; c, the channels.
_X = "... o c i"
_MASK = "... ceil(o*c*i/8) :uint8"


# ---- ops -----------------------------------------------------------------------------------------


def _features(x, at: int) -> dict[str, int]:
    """The number of elements of a channel, and the bytes of those that are contiguous.

    The bytes are 0 if channels are last. XLA is slower there, and most of all if a channel has
    about 1024 to 4096 elements: it does not divide such a sum.
    """
    after = x.shape[at + 1 :]
    last = math.prod(after) == 1
    count = math.prod(x.shape[:at]) * math.prod(after)
    count = count if isinstance(count, int) else SYMBOLIC
    return dict(
        channel_count=count,
        inner_bytes=0 if last else size_in_bytes(after, x.dtype),
        undivided=last and 1024 <= count < 4096,
    )


_TRAINING_IN = f"{_X}, c, c, {_X}"
_STATISTICS_OUT = "c :acc, c :acc"

_STATISTICS = Op(
    "batch_norm_statistics",
    f"{_X} -> {_STATISTICS_OUT}",
    statistics_reference,
    family="batch_norm",
    example=example(lambda x: batch_norm_statistics(x), "... n"),
    kernels=(STATISTICS_KERNEL,),
    forward=statistics,
    residuals=lambda args, outs, saved: (*args, outs[0]),
    pullback=statistics_pullback,
    pushforward=statistics_pushforward,
    independent=False,
)

_TRAINING = Op(
    "batch_norm",
    f"{_TRAINING_IN} -> {_X}, {_STATISTICS_OUT}",
    training_reference,
    example=example(lambda *arrays: batch_norm(*arrays), "... n, n, n"),
    kernels=(
        FORWARD_KERNEL,
        STATISTICS_KERNEL,
        APPLY_KERNEL,
        SUMS_KERNEL,
        BACKWARD_KERNEL,
        GRADIENT_KERNEL,
    ),
    forward=training_forward,
    save=training_save,
    forward_saving=functools.partial(training_forward, save=True),
    residuals=lambda args, outs, saved: (*args[:2], *saved, *outs[-2:]),
    pullback=training_pullback,
    pushforward=training_pushforward,
    backward=training_gradients,
    independent=False,
)

_INFERENCE = Op(
    "batch_norm_inference",
    f"{_X}, c, c, c, c, {_X} -> {_X}",
    inference_reference,
    family="batch_norm",
    example=example(
        lambda x, mean, var, *rest: batch_norm_inference(x, mean, jnp.abs(var) + 0.5, *rest),
        "... n, n, n, n, n",
    ),
    kernels=(APPLY_KERNEL, SUMS_KERNEL),
    forward=inference_forward,
    save=inference_save,
    forward_saving=functools.partial(inference_forward, save=True),
    residuals=lambda args, outs, saved: (args[0], args[3], *saved, *args[1:3]),
    pullback=inference_pullback,
    pushforward=inference_pushforward,
    backward=inference_gradients,
)


# ---- public functions ----------------------------------------------------------------------------


_CUTS = "an explicit mesh axis has shards that the view cuts"


def _view(x, at: int, relu: bool) -> tuple[tuple, tuple | None]:
    """The view ``[..., o, c, i]`` in which an array gets its mask, and the view's spec.

    ``...`` is the array's first dimension, or the part of it whose indices have whole bytes of
    mask, or nothing.
    """
    spec = spec_of(x)
    first, c, inner = x.shape[0], x.shape[at], math.prod(x.shape[at + 1 :])
    between = math.prod(x.shape[1:at])
    rest = between * c * inner
    together = 8 // math.gcd(rest, 8) if relu and at > 0 and isinstance(rest, int) else 1
    if spec is not None and any(axis is not None for axis in spec[1:]):
        raise Refused(_CUTS)
    if at == 0 or (together > 1 and (not isinstance(first, int) or first % together)):
        if spec is not None and spec[0] is not None:
            raise Refused(_CUTS)
        o = first * between if at else 1
        return (o, c, inner), spec and (None,) * 3
    groups = first // together
    if spec is not None and groups % parts_of(spec[0], jax.typeof(x).sharding):
        raise Refused(_CUTS)
    return (groups, together * between, c, inner), spec and (spec[0], None, None, None)


def _call(op: Op, x, at: int, values, residual, **options) -> Any:
    """Calls an op on arrays with the user's shape, and reshapes the results back."""
    if residual is not None:  # with explicit axes, shard both as their sum would be
        kind = broadcast_type((x, residual))
        x, residual = (broadcast_to(a, kind) for a in (x, residual))
    more = () if op is _STATISTICS else (residual,)
    return op(
        x,
        *values,
        *more,
        entry="batch_norm_inference" if op is _INFERENCE else "batch_norm",
        features=_features(x, at),
        limit=_limit(x, at),
        native=functools.partial(_in_view, op, at, options),
        otherwise=functools.partial(op.reference, channels=at - x.ndim, **options),
    )


def _limit(x, at: int) -> str | None:
    if 0 in x.shape or count_of(x, at - x.ndim) == 1:
        return "there is nothing to sum"
    if not all(isinstance(d, int) for d in x.shape[at:]):  # a workspace needs them
        return "the channels or an axis after them have a symbolic size"
    return None


def _in_view(op: Op, at: int, options: dict, request, x, *rest) -> Any:
    """Calls the kernels on a view ``[..., o, c, i]``."""
    shape, spec = _view(x, at, options.get("relu", False))
    own = None if spec is None else tuple(jax.typeof(x).sharding.spec)
    rest = list(rest)
    if op is not _STATISTICS and rest[-1] is not None:
        rest[-1] = reshape(rest[-1], shape, spec)
    signature = op.signature
    if options.get("fanout"):
        signature = f"{_TRAINING_IN} -> {_X}, {_X}, {_STATISTICS_OUT}"
    if options.get("relu"):
        signature = f"{signature} | {_MASK}"
    results = op.bind(request, reshape(x, shape, spec), *rest, signature=signature, **options)
    return jax.tree.map(lambda y: reshape(y, x.shape, own) if y.shape == shape else y, results)


def _check(op: str, x: Any, axis, eps, activation, residual, parameters: dict[str, Any]):
    """The checked arguments: x, residual, the channel axis, options, and the parameters."""
    given = {"x": x} | ({} if residual is None else {"residual": residual})
    arrays = same_floating_dtype(op, as_arrays(op, **given), list(given))
    x, residual = (not_weak(arrays[0]), not_weak(arrays[1]) if residual is not None else None)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual has shape {residual.shape}; it must have that of x, {x.shape}"
        )
    axis = integer(op, "axis", axis)
    if x.ndim == 0:
        raise ValueError(f"{op}: x has shape (); it must have at least 1 dimension")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{op}: axis is {axis}; it must be in [{-x.ndim}, {x.ndim}) for x of shape {x.shape}"
        )
    if activation not in (None, "relu"):
        raise ValueError(
            f"{op}: activation is {activation!r}; it must be None or 'relu' (apply others to the "
            "result)"
        )
    at = axis % x.ndim
    what = f"axis {axis} of x"
    values = [
        parameter(op, name, value, x, at, what)
        if value is not None or name in ("mean", "var")
        else None
        for name, value in parameters.items()
    ]
    options = dict(eps=epsilon(op, eps), relu=activation == "relu")
    return x, residual, at, options, values


@fans_out(tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array])
@elsewhere(epsilon="pass eps")
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: Literal["relu"] | None = None,
    residual: ArrayLike | None = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    fanout: Flag = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch norm with the statistics of this batch, as in training; optionally add and ReLU.

    ``y = activation((x - mean) * rsqrt(var + eps) * scale + bias + residual)``, with the mean and
    the biased variance over all axes except ``axis``. Everything is computed in float32 (float64
    for float64) and rounded once. The variance is computed from deviations, so it is exact also if
    the mean is far larger than the deviation.

    Args:
      x: array of float32, bfloat16, float16 or float64, with one dimension or more.
      scale, bias: arrays ``[c]`` of any supported floating dtype, or ``None``.
      axis: the axis of the channels.
      eps: a Python or NumPy number, added to the variance.
      activation: ``None`` or ``"relu"``.
      residual: array with the shape and dtype of ``x``, added before the activation, or ``None``.
      axis_name: name of a mapped axis (of ``jax.shard_map`` or ``jax.vmap``), or a tuple of names,
        over which the batch is distributed. The statistics are then those of all parts together,
        computed with one ``psum``.
      fanout: whether to return ``y`` twice, as ``(y, y)``, such as for the convolution and the
        shortcut of a residual network's next block; see :func:`layer_norm`.

    Returns:
      ``(y, mean, var)``: an array with the shape and dtype of ``x``, and the batch's mean and
      biased variance, ``[c]`` in float32 (float64 for float64). All three can be differentiated.
      With ``fanout``, the result is ``((y, y), mean, var)``.

    Residuals: ``x``, ``scale``, ``mean``, ``var``, and with ``"relu"`` one bit per element. Neither
    ``y`` nor the activation's input is kept.

    Sharding: under ``jax.jit``, over the first axis. The statistics are those of the whole batch:
    one small all-reduce (two numbers per channel and device) for them, and one for the gradients.
    Other sharded axes, and a first axis of which a shard's mask is not a whole number of bytes, are
    gathered over auto mesh axes, and take the reference over explicit ones. ``jax.vmap`` gives each
    example its own statistics.

    Raises:
      TypeError: an argument is not an array, a dtype is not supported or not that of ``x``, or
        ``axis`` or ``eps`` is not a number.
      ValueError: ``axis`` is out of range, the shape of ``scale`` or ``bias`` is not that of the
        axis, the shape of ``residual`` is not that of ``x``, ``activation`` is not known, or
        ``eps`` is negative or not finite.

    Source: OneFlow, BatchNorm with ReLU and Add+ReLU.

    Example:
      >>> x = jnp.array([[1.0, 10.0], [3.0, 30.0]])
      >>> y, mean, var = fo.batch_norm(x, jnp.ones(2), jnp.zeros(2), activation="relu")
      >>> mean.tolist(), var.tolist()
      ([2.0, 20.0], [1.0, 100.0])
      >>> [round(v, 3) for v in y[1].tolist()]
      [1.0, 1.0]
    """
    parameters = dict(scale=scale, bias=bias)
    x, residual, at, options, values = _check(
        "batch_norm", x, axis, eps, activation, residual, parameters
    )
    if axis_name is None:
        *ys, mean, var = _call(_TRAINING, x, at, values, residual, fanout=bool(fanout), **options)
    else:
        mean, var = _statistics_of(x, at, axis_name)
        y = _call(_INFERENCE, x, at, [mean, var, *values], residual, **options)
        ys = twice_if(fanout, y)
    y: Any = tuple(ys) if fanout else ys[0]
    return y, mean, var


def batch_norm_statistics(
    x: ArrayLike, *, axis: int = -1, axis_name: Hashable | tuple[Hashable, ...] | None = None
) -> tuple[jax.Array, jax.Array]:
    """The mean and the biased variance with which :func:`batch_norm` normalizes ``x``.

    With :func:`batch_norm_inference`, they normalize another array than ``x``, such as the maxima
    of its windows.

    Args:
      x: array of float32, bfloat16, float16 or float64, with one dimension or more.
      axis: the axis of the channels.
      axis_name: as for :func:`batch_norm`.

    Returns:
      ``(mean, var)``, each ``[c]`` in float32 (float64 for float64). Both can be differentiated.

    Residuals: ``x`` and ``mean``.

    Sharding: as :func:`batch_norm`, with one all-reduce in the forward.

    Raises:
      TypeError: ``x`` is not an array, its dtype is not supported, or ``axis`` is not an integer.
      ValueError: ``axis`` is out of range.

    Source: OneFlow, BatchNorm with ReLU and Add+ReLU.

    Example:
      >>> mean, var = fo.batch_norm_statistics(jnp.array([[1.0, 10.0], [3.0, 30.0]]))
      >>> mean.tolist(), var.tolist()
      ([2.0, 20.0], [1.0, 100.0])
    """
    x, _, at, _, _ = _check("batch_norm_statistics", x, axis, 0.0, None, None, {})
    return _statistics_of(x, at, axis_name)


def _statistics_of(x, at: int, axis_name):
    mean, var = _call(_STATISTICS, x, at, [], None)
    return (mean, var) if axis_name is None else _over_axis(mean, var, axis_name)


def _over_axis(mean, var, axis_name):
    """The statistics over a mapped axis, from those of each of its parts."""
    both = jnp.stack([mean, var])
    parts = jax.lax.psum(1, axis_name)
    mine = jnp.arange(parts) == jax.lax.axis_index(axis_name)
    alone = jnp.where(mine[:, None, None], both, jnp.zeros_like(both))
    return merged(jax.lax.psum(alone, axis_name))


@elsewhere(epsilon="pass eps")
def batch_norm_inference(
    x: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: Literal["relu"] | None = None,
    residual: ArrayLike | None = None,
) -> jax.Array:
    """Batch norm with given statistics, as at inference; optionally add and ReLU.

    ``activation((x - mean) * rsqrt(var + eps) * scale + bias + residual)``: one multiply-add per
    element. Everything is computed in float32 (float64 for float64) and rounded once.

    Args:
      x: array of float32, bfloat16, float16 or float64, with one dimension or more.
      mean, var: arrays ``[c]`` of any supported floating dtype.
      scale, bias: arrays ``[c]`` of any supported floating dtype, or ``None``.
      axis: the axis of the channels.
      eps: a Python or NumPy number, added to ``var``.
      activation: ``None`` or ``"relu"``.
      residual: array with the shape and dtype of ``x``, added before the activation, or ``None``.

    Returns:
      An array with the shape and dtype of ``x``. It can be differentiated with respect to all
      arrays.

    Residuals: ``x``, ``scale``, ``mean``, ``var``, and with ``"relu"`` one bit per element.

    Sharding: as :func:`batch_norm`. The only communication is an all-reduce of the gradients of
    statistics and parameters.

    Raises:
      TypeError: as :func:`batch_norm`.
      ValueError: as :func:`batch_norm`, also for ``mean`` and ``var``.

    Source: OneFlow, BatchNorm with ReLU and Add+ReLU.

    Example:
      >>> x = jnp.array([[1.0, 10.0], [3.0, 30.0]])
      >>> mean, var = jnp.array([2.0, 20.0]), jnp.array([1.0, 100.0])
      >>> y = fo.batch_norm_inference(x, mean, var, None, None)
      >>> [round(v, 3) for v in y[1].tolist()]
      [1.0, 1.0]
    """
    parameters = dict(mean=mean, var=var, scale=scale, bias=bias)
    x, residual, at, options, values = _check(
        "batch_norm_inference", x, axis, eps, activation, residual, parameters
    )
    return _call(_INFERENCE, x, at, values, residual, **options)
