"""Layer norm and RMS norm over the last axis, optionally of a sum with a residual and a bias.

One kernel reads the input (and the residual) once and writes the result. A row stays on the chip
while its mean, variance and results are computed. The backward reads the cotangent and the input
once, and sums the parameters' gradients in the same pass: it accumulates groups of rows into
partial sums on the chip, and XLA adds these up. Dropout of the input is part of the kernels for
rows of common lengths, and comes before them for others.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._arguments import as_arrays, epsilon, not_weak, parameter, same_floating_dtype
from jax_fastops._dispatch import row_features
from jax_fastops._names import elsewhere
from jax_fastops._native import limit
from jax_fastops._norm_kernels import BACKWARDS, FORWARDS, backward, forward
from jax_fastops._op import Op
from jax_fastops._random import Drop, drop_of
from jax_fastops._registry import example, example_key
from jax_fastops._signature import accumulator_dtype
from jax_fastops._types import Flag, fans_out, sums_and_fans_out
from jax_fastops.dropout import drop_reference, dropped

# ---- references ----------------------------------------------------------------------------------


def _sum(x, residual, input_bias, key=(), **drop):
    """The sum that is normalized, added in the dtype of ``x``, as models usually write it.

    XLA adds it in float32 where it fuses the additions. Casts here would split what follows into
    more kernels.
    """
    if drop:
        return drop_reference(x, *key, bias=input_bias, residual=residual, **drop)
    x = x if input_bias is None else x + input_bias.astype(x.dtype)
    return x if residual is None else x + residual


def _centred(s, rms: bool, eps: float) -> tuple:
    """Deviations from the mean (not for RMS), the mean and the reciprocal standard deviation.

    In the form that XLA fuses to one kernel, with each value used once.
    """
    s = s.astype(accumulator_dtype(s.dtype))
    mean = () if rms else (jnp.mean(s, axis=-1, keepdims=True),)
    centred = s - mean[0] if mean else s
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred, *mean, rstd


def _normalised(s, statistics):
    s = s.astype(accumulator_dtype(s.dtype))
    *mean, rstd = statistics
    return (s - mean[0][..., None] if mean else s) * rstd[..., None]


def _reference(x, residual, input_bias, scale, bias, *key, rms, eps, return_sum, fanout, **drop):
    s = _sum(x, residual, input_bias, key, **drop)
    centred, *_, rstd = _centred(s, rms, eps)
    y = centred * rstd
    if scale is not None:
        y = y * scale.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    y = y.astype(x.dtype)
    return (*(y,) * (1 + fanout), *(s,) * return_sum)


def _save(x, residual, input_bias, scale, bias, *key, rms, eps, return_sum, fanout, **drop):
    del scale, bias, fanout
    s = _sum(x, residual, input_bias, key, **drop)
    summed = residual is not None or input_bias is not None or bool(drop)
    statistics = (jnp.squeeze(v, -1) for v in _centred(s, rms, eps)[1:])
    return (*([s] if summed and not return_sum else []), *statistics)


def _projected(d, xhat, rstd, rms: bool):
    """The derivative of the normalised row along ``d``. It is symmetric."""
    moved = d - xhat * jnp.mean(d * xhat, axis=-1, keepdims=True)
    if not rms:
        moved = moved - jnp.mean(d, axis=-1, keepdims=True)
    return moved * rstd


def _pullback(residuals, cts, *, rms, eps, return_sum, fanout, **drop):
    del eps
    residuals, key = (residuals[:-1], residuals[-1:]) if drop else (residuals, ())
    s, scale, *statistics = residuals
    xhat, rstd = _normalised(s, statistics), statistics[-1][..., None]
    dy = (cts[0] + cts[1] if fanout else cts[0]).astype(xhat.dtype)
    g = dy if scale is None else dy * scale.astype(dy.dtype)
    dx = _projected(g, xhat, rstd, rms)
    if return_sum:
        dx = dx + cts[-1].astype(dx.dtype)
    rows = tuple(range(dx.ndim - 1))
    rounded = dresidual = dx.astype(s.dtype)
    if drop:
        dx = drop_reference(dx, *key, **drop)
        rounded = dx.astype(s.dtype)
    result = rounded, dresidual, dx.sum(rows), (dy * xhat).sum(rows), dy.sum(rows)
    return *result, *(None for _ in key)


def _pushforward(residuals, tangents, *, rms, eps, return_sum, fanout, **drop):
    del eps
    residuals, key = (residuals[:-1], residuals[-1:]) if drop else (residuals, ())
    s, scale, *statistics = residuals
    dx, dresidual, dinput_bias, dscale, dbias, *_ = tangents
    xhat, rstd = _normalised(s, statistics), statistics[-1][..., None]

    def total(*terms):
        terms = [t.astype(xhat.dtype) for t in terms if t is not None]
        return functools.reduce(jnp.add, terms, jnp.zeros_like(xhat))

    if drop:
        ds = drop_reference(total(dx, dinput_bias), *key, **drop)
        ds = total(ds, dresidual)
    else:
        ds = total(dx, dresidual, dinput_bias)
    dy = _projected(ds, xhat, rstd, rms)
    if scale is not None:
        dy = dy * scale.astype(dy.dtype)
    if dscale is not None:
        dy = dy + xhat * dscale.astype(dy.dtype)
    if dbias is not None:
        dy = dy + dbias.astype(dy.dtype)
    dy = dy.astype(s.dtype)
    return (*(dy,) * (1 + fanout), *(ds.astype(s.dtype),) * return_sum)


_names = elsewhere(epsilon="pass eps", axis="the last axis is normalized")


# ---- ops -----------------------------------------------------------------------------------------


def _declare(name: str, rms: bool, dropout: bool = False) -> Op:
    def residuals(args, outs, saved):
        x, residual, input_bias, scale, _, *key = args
        statistics = saved[-1:] if rms else saved[-2:]
        if residual is None and input_bias is None and not key:
            return (x, scale, *statistics)
        s = saved[0] if len(saved) > len(statistics) else outs[-1]
        return (s, scale, *statistics, *key)

    def bound(function, **more):
        return functools.partial(function, rms=rms, **more)

    operands = "... n" + ", ... n" * name.startswith("residual") + ", n" * (1 if rms else 2)

    def call(*arrays):
        drops = dict(dropout_key=example_key(), dropout_rate=0.25) if dropout else {}
        return globals()[name](*arrays, **drops)

    return Op(
        name + "_dropout" * dropout,
        f"... n, ... n, n, n, n{', 2' * dropout} -> ... n",
        bound(_reference),
        family="norm",
        example=example(call, operands),
        kernels=(FORWARDS[False], BACKWARDS[False, False]),
        forward=bound(forward),
        save=bound(_save),
        forward_saving=bound(forward, save=True),
        residuals=residuals,
        pullback=bound(_pullback),
        pushforward=bound(_pushforward),
        backward=bound(backward),
        independent=not dropout,  # as dropout's own op
        shared={"input_bias": 2, "scale": 3, "bias": 4},
    )


_RMS = {
    "layer_norm": False,
    "residual_layer_norm": False,
    "rms_norm": True,
    "residual_rms_norm": True,
}
_OPS = {name: _declare(name, rms) for name, rms in _RMS.items()}
_DROPOUT_OPS = {
    name: _declare(name, rms, True) for name, rms in _RMS.items() if name.startswith("residual")
}


def _takes_dropout(x, drop: Drop) -> bool:
    """Whether a kernel takes the norm with its dropout. Otherwise two passes are faster."""
    n, itemsize = x.shape[-1], x.dtype.itemsize
    if not isinstance(n, int) or itemsize > 4 or drop.threshold == 0:
        return False
    whole = n * itemsize % 16 == 0
    return whole and limit("norm_dropout_least") <= n <= limit("norm_dropout_most")


def _apply(
    name: str,
    x,
    scale,
    bias,
    eps,
    fanout,
    *,
    residual=None,
    input_bias=None,
    return_sum=False,
    dropout_key=None,
    dropout_rate=0.0,
) -> Any:
    given = {"x": x} | ({"residual": residual} if name.startswith("residual") else {})
    result = as_arrays(name, **given)
    arrays = same_floating_dtype(name, result, list(given), widen=True)
    mixed = any(a.dtype != b.dtype and not a.weak_type for a, b in zip(result, arrays, strict=True))
    x, residual = map(not_weak, arrays) if len(arrays) == 2 else (not_weak(arrays[0]), None)
    if x.ndim == 0:
        raise ValueError(f"{name}: x has shape (); it must have at least 1 dimension")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{name}: residual has shape {residual.shape}; it must have that of x, {x.shape}"
        )
    drop = drop_of(name, "dropout_key", dropout_key, "dropout_rate", dropout_rate)
    parameters = [
        None if value is None else parameter(name, what, value, x, -1, "the last axis of x")
        for what, value in (("input_bias", input_bias), ("scale", scale), ("bias", bias))
    ]
    options: dict[str, Any] = dict(
        eps=epsilon(name, eps), return_sum=bool(return_sum), fanout=bool(fanout)
    )
    if drop is not None and not _takes_dropout(x, drop):
        s = dropped(drop, x, parameters[0], residual)
        name = name.removeprefix("residual_")
        y = _apply(name, s, parameters[1], parameters[2], eps, fanout)
        return (y, s) if return_sum else y
    summed = residual is not None
    results = ["... n"] * (1 + options["fanout"] + options["return_sum"])
    saved = ["... n"] * (1 if summed and not return_sum else 0) + ["... :acc"] * (
        1 if _RMS[name] else 2
    )
    op, key = (_OPS[name], ()) if drop is None else (_DROPOUT_OPS[name], (drop.words,))
    if drop is not None:
        options |= dict(threshold=drop.threshold, dropout_scale=drop.scale)
    operands = "... n, ... n, n, n, n" + ", 2" * len(key)
    result = op(
        x,
        residual,
        *parameters,
        *key,
        signature=f"{operands} -> {', '.join(results)} | {', '.join(saved)}",
        entry=name,
        features=row_features(x.shape[-1:], x.dtype) | ({"mixed": mixed} if summed else {}),
        limit="there are no elements" if 0 in x.shape else None,
        **options,
    )
    result = result if isinstance(result, tuple) else (result,)
    y = result[:2] if fanout else result[0]
    return (y, result[-1]) if return_sum else y


@fans_out(tuple[jax.Array, jax.Array])
@_names
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-6,
    fanout: Flag = False,
) -> jax.Array:
    """Layer norm over the last axis: ``(x - mean) * rsqrt(var + eps) * scale + bias``.

    The variance is the mean squared deviation (biased). Everything is computed in float32 (float64
    for float64), and the result is rounded once.

    Args:
      x: array ``[..., n]`` of float32, bfloat16, float16 or float64.
      scale, bias: arrays ``[n]`` of any supported floating dtype, or ``None``.
      eps: a Python or NumPy number, added to the variance.
      fanout: whether to return the result twice, as ``(y, y)``: the same array for two users, such
        as the next product and the next residual of a post-norm transformer. The backward then adds
        the two cotangents as it reads them, and rounds the sum as JAX does. Two users of one result
        would cost a separate pass over three arrays.

    Returns:
      An array with the shape and dtype of ``x``; with ``fanout``, a pair of it.

    Residuals: ``x``, and the mean and reciprocal standard deviation of each row in float32 (float64
    for float64).

    Sharding: over the leading dimensions. The only communication is an all-reduce of each
    parameter's gradient. A sharded last axis is gathered over an auto mesh axis, and takes the
    reference over an explicit one.

    Raises:
      TypeError: an argument is not an array, a dtype is not supported, or ``eps`` is not a number.
      ValueError: ``x`` has no dimension, the shape of ``scale`` or ``bias`` is not that of the last
        axis, or ``eps`` is negative or not finite.

    Source: FasterTransformer, ``add_bias_input_layernorm``.

    Example:
      >>> y = fo.layer_norm(jnp.array([[1.0, 3.0, 5.0, 7.0]]), jnp.ones(4), jnp.zeros(4))
      >>> [round(v, 3) for v in y[0].tolist()]
      [-1.342, -0.447, 0.447, 1.342]
    """
    return _apply("layer_norm", x, scale, bias, eps, fanout)


@sums_and_fans_out
@_names
def residual_layer_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    input_bias: ArrayLike | None = None,
    dropout_key: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    eps: float = 1e-6,
    return_sum: Flag = False,
    fanout: Flag = False,
) -> jax.Array:
    """Layer norm of a sum: ``layer_norm(x + input_bias + residual, scale, bias)``.

    With a dropout rate, the sum is ``residual + dropout(x + input_bias)``; see :func:`dropout`.
    Rows of 256 to 1024 elements that are multiples of 16 bytes take no further pass over memory.

    The kernel computes the sum in float32 (float64 for float64) and rounds it once to the dtype of
    ``x + residual``; the reference adds in this dtype. The norm is that of the rounded sum. If the
    dtypes differ, the narrower array is first cast to the wider one. Where XLA fuses the cast,
    ``"auto"`` takes the reference.

    Args:
      x: array ``[..., n]`` of float32, bfloat16, float16 or float64.
      residual: array with the shape of ``x``, of the same dtype, or of a wider or narrower one.
      scale, bias: arrays ``[n]`` of any supported floating dtype, or ``None``.
      input_bias: likewise, the bias of the layer that computed ``x``.
      dropout_key: a key of ``jax.random``, typed or raw. May be ``None`` if the rate is 0.
      dropout_rate: the probability that an element of ``x + input_bias`` is dropped, a static
        number in [0, 1]. :func:`dropout_mask` defines which.
      eps: a Python or NumPy number, added to the variance.
      return_sum: whether to return the sum as well, which pre-norm models need.
      fanout: whether to return the result twice, as ``(y, y)``; see :func:`layer_norm`.

    Returns:
      An array with the shape and dtype of ``x + residual``; with ``fanout``, a pair of it. With
      ``return_sum``, a pair of that and the sum.

    Residuals: the sum, which is the returned array with ``return_sum``, and the mean and reciprocal
    standard deviation of each row in float32 (float64 for float64); with a dropout rate, also the
    key.

    Sharding: as :func:`layer_norm`.

    Raises:
      TypeError: an argument is not an array, a dtype is not supported, one of ``x`` and
        ``residual`` is float16 and the other bfloat16, ``eps`` or ``dropout_rate`` is not a number,
        or ``dropout_key`` is no key of ``jax.random``.
      ValueError: ``x`` has no dimension, the shape of ``residual`` is not that of ``x``, the shape
        of a parameter is not that of the last axis, ``eps`` is negative or not finite,
        ``dropout_rate`` is not in [0, 1], or ``dropout_key`` is an array of keys.

    Source: FasterTransformer, ``add_bias_input_layernorm``.

    Example:
      >>> x, residual = jnp.ones((2, 4)), jnp.array([[0.0, 2.0, 4.0, 6.0]] * 2)
      >>> y, total = fo.residual_layer_norm(x, residual, return_sum=True)
      >>> [round(v, 3) for v in y[0].tolist()], total[0].tolist()
      ([-1.342, -0.447, 0.447, 1.342], [1.0, 3.0, 5.0, 7.0])
    """
    return _apply(
        "residual_layer_norm",
        x,
        scale,
        bias,
        eps,
        fanout,
        residual=residual,
        input_bias=input_bias,
        return_sum=return_sum,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
    )


@fans_out(tuple[jax.Array, jax.Array])
@_names
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    eps: float = 1e-6,
    fanout: Flag = False,
) -> jax.Array:
    """RMS norm over the last axis: ``x * rsqrt(mean(x**2) + eps) * scale``.

    It is computed in float32 (float64 for float64) and rounded once.

    Args:
      x: array ``[..., n]`` of float32, bfloat16, float16 or float64.
      scale: array ``[n]`` of any supported floating dtype, or ``None``.
      eps: a Python or NumPy number, added to the mean square.
      fanout: whether to return the result twice, as ``(y, y)``; see :func:`layer_norm`.

    Returns:
      An array with the shape and dtype of ``x``; with ``fanout``, a pair of it.

    Residuals: ``x``, and the reciprocal root mean square of each row in float32 (float64 for
    float64).

    Sharding: as :func:`layer_norm`.

    Raises:
      TypeError: an argument is not an array, a dtype is not supported, or ``eps`` is not a number.
      ValueError: ``x`` has no dimension, the shape of ``scale`` is not that of the last axis, or
        ``eps`` is negative or not finite.

    Source: FasterTransformer, ``add_bias_input_layernorm``, without the mean.

    Example:
      >>> y = fo.rms_norm(jnp.array([[3.0, 4.0]]), jnp.ones(2))
      >>> [round(v, 3) for v in y[0].tolist()]
      [0.849, 1.131]
    """
    return _apply("rms_norm", x, scale, None, eps, fanout)


@sums_and_fans_out
@_names
def residual_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    input_bias: ArrayLike | None = None,
    dropout_key: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    eps: float = 1e-6,
    return_sum: Flag = False,
    fanout: Flag = False,
) -> jax.Array:
    """RMS norm of a sum: ``rms_norm(x + input_bias + residual, scale)``.

    The sum, its dropout and its rounding are those of :func:`residual_layer_norm`.

    Args:
      x: array ``[..., n]`` of float32, bfloat16, float16 or float64.
      residual: array with the shape of ``x``; see :func:`residual_layer_norm`.
      scale, input_bias: arrays ``[n]`` of any supported floating dtype, or ``None``.
      eps: a Python or NumPy number, added to the mean square.
      dropout_key, dropout_rate, return_sum, fanout: as in :func:`residual_layer_norm`.

    Returns:
      An array with the shape and dtype of ``x + residual``; with ``fanout``, a pair of it. With
      ``return_sum``, a pair of that and the sum.

    Residuals: the sum, and the reciprocal root mean square of each row in float32 (float64 for
    float64); with a dropout rate, also the key.

    Sharding: as :func:`layer_norm`.

    Raises:
      TypeError: as :func:`residual_layer_norm`.
      ValueError: as :func:`residual_layer_norm`.

    Source: FasterTransformer, ``add_bias_input_layernorm``, without the mean.

    Example:
      >>> fo.residual_rms_norm(jnp.ones((2, 4)), jnp.ones((2, 4))).shape
      (2, 4)
    """
    return _apply(
        "residual_rms_norm",
        x,
        scale,
        None,
        eps,
        fanout,
        residual=residual,
        input_bias=input_bias,
        return_sum=return_sum,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
    )
