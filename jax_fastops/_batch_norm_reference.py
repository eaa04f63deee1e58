"""Batch norm in ``jax.numpy``: the references of its ops, and their derivatives.

An op sees an array as ``[..., o, c, i]``: ``...`` is the batch, which may be sharded; ``c``, the
channels.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jax_fastops._bits import pack, select
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge, reshape, spec_of

CHANNELS = -2


def merged(both):
    """Mean and variance of the whole, from those of equal parts ``[parts, 2, c]``."""
    mean = both[:, 0].mean(0)
    return mean, (both[:, 1] + jnp.square(both[:, 0] - mean)).mean(0)


def _along(values, x, channels: int = CHANNELS):
    """Values per channel, in a shape that broadcasts with ``x``."""
    return values.reshape((1,) * (x.ndim + channels) + values.shape + (1,) * (-channels - 1))


def _others(x, channels: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis != x.ndim + channels)


def count_of(x, channels: int):
    """The number of elements per channel. A float, because it may exceed an int32."""
    n = math.prod(x.shape[axis] for axis in _others(x, channels))
    return float(n) if isinstance(n, int) else n


def _wide(x):
    return x.astype(accumulator_dtype(x.dtype))


def statistics_reference(x, *, channels=CHANNELS, dtype=None) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of each channel, in one pass over differences from an anchor.

    For bfloat16, the variance is E[x**2] - E[x]**2, as in Flax. Its relative error grows with the
    square of mean over deviation: it is 1% at 400 and total at 4000. ``dtype`` is that of the array
    before it was widened.
    """
    dtype = x.dtype if dtype is None else dtype
    x, axes = _wide(x), _others(x, channels)
    return _moments(x, axes) if dtype == jnp.bfloat16 else _anchored(x, axes)


def _moments(x, axes):
    """Mean and biased variance in one pass. Loses precision if the mean is far from 0."""
    mean = jnp.mean(x, axes)
    return mean, jnp.maximum(0, jnp.mean(jnp.square(x), axes) - jnp.square(mean))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _anchored(x, axes):
    return _from_anchor(x, axes)[:2]


@_anchored.defjvp
def _anchored_jvp(axes, primals, tangents):
    """Tangents by deviations from the mean, so that the gradient reads no anchor."""
    (x,), (dx,) = primals, tangents
    mean, var, lost = _from_anchor(x, axes)
    centred, dmean = x - jnp.expand_dims(mean, axes), jnp.mean(dx, axes)
    return (mean, var), (dmean, 2 * (jnp.mean(centred * dx, axes) - lost * dmean))


def _from_anchor(x, axes):
    """Mean, variance, and the rounding error of the mean."""
    anchor = _anchor(x, axes)
    shift, var = _moments(x - anchor, axes)
    anchor = jnp.squeeze(anchor, axes)
    mean = anchor + shift
    return mean, var, (anchor - mean) + shift


def _anchor(x, axes):
    """One element of each channel, which is subtracted so that E[x**2] - E[x]**2 does not cancel.

    XLA reads it in the same pass. Where an explicit mesh shards the axes, it is the mean.
    """
    spec = spec_of(x)
    if 0 in x.shape or (spec is not None and any(spec[axis] is not None for axis in axes)):
        return jax.lax.stop_gradient(jnp.mean(x, axes, keepdims=True))
    for axis in reversed(axes):  # the first one, which may be sharded, last
        middle = x.shape[axis] // 2 if isinstance(x.shape[axis], int) else 0
        x = jax.lax.slice_in_dim(x, middle, middle + 1, axis=axis)
    x = jax.lax.stop_gradient(x)
    return jnp.where(jnp.isfinite(x), x, 0)


def statistics_pullback(residuals, cts):
    x, mean = residuals
    dmean, dvar = (_along(ct / count_of(x, CHANNELS), x) for ct in cts)
    return ((dmean + 2 * dvar * (_wide(x) - _along(mean, x))).astype(x.dtype),)


def statistics_pushforward(residuals, tangents):
    (x, mean), (dx,) = residuals, map(_wide, tangents)
    axes = _others(x, CHANNELS)
    dmean = jnp.mean(dx, axes)
    centred = _wide(x) - _along(mean, x)
    # The mean of `centred` is only rounding error, but that of `dx` may be large: subtract it.
    return dmean, 2 * jnp.mean(centred * (dx - _along(dmean, x)), axes)


def _factor(var, scale, eps: float):
    rstd = jax.lax.rsqrt(var + eps)
    return rstd if scale is None else rstd * scale.astype(rstd.dtype)


def _before_activation(x, mean, var, scale, bias, residual, eps, channels):
    """The input of the activation, in the accumulator dtype."""
    mean, var = (v.astype(accumulator_dtype(x.dtype)) for v in (mean, var))
    z = (_wide(x) - _along(mean, x, channels)) * _along(_factor(var, scale, eps), x, channels)
    if bias is not None:
        z = z + _along(bias.astype(z.dtype), x, channels)
    return z if residual is None else z + residual.astype(z.dtype)


def inference_reference(x, mean, var, scale, bias, residual, *, eps, relu, channels=CHANNELS):
    z = _before_activation(x, mean, var, scale, bias, residual, eps, channels)
    return (jax.nn.relu(z) if relu else z).astype(x.dtype)


def training_reference(x, scale, bias, residual, *, eps, relu, fanout, channels=CHANNELS):
    wide = _wide(x)  # once: the gradient of each cast is rounded
    mean, var = statistics_reference(wide, channels=channels, dtype=x.dtype)
    z = _before_activation(wide, mean, var, scale, bias, residual, eps, channels)
    y = (jax.nn.relu(z) if relu else z).astype(x.dtype)
    return *twice_if(fanout, y), mean, var


def twice_if(fanout: bool, y) -> tuple:
    return (y, y) if fanout else (y,)


def _flat(x):
    """Reshapes ``[..., o, c, i]`` to ``[..., n]``, the order of the mask's bits."""
    return merge(x, x.ndim - 3, 3)


def masked(mask, dy):
    """The cotangent before the activation, in the accumulator's dtype."""
    if mask is None:
        return _wide(dy)
    return _wide(reshape(select(mask, _flat(dy)), dy.shape, spec_of(dy)))


def inference_save(x, mean, var, scale, bias, residual, *, eps, relu):
    if not relu:
        return ()
    z = _before_activation(x, mean, var, scale, bias, residual, eps, CHANNELS)
    return (pack(_flat(z) > 0),)


def training_save(x, scale, bias, residual, *, eps, relu, fanout):
    if not relu:
        return ()
    return inference_save(x, *statistics_reference(x), scale, bias, residual, eps=eps, relu=relu)


def residual_parts(residuals, relu: bool):
    """x, scale, mask, mean and var from the training op's residuals."""
    x, scale, *mask, mean, var = residuals
    return x, scale, mask[0] if relu else None, mean, var


def _sums_reference(x, dy, mask, mean):
    """g, ``x - mean``, and the averages that the kernel of the sums computes from them."""
    g, axes = masked(mask, dy), _others(x, CHANNELS)
    centred = _wide(x) - _along(mean.astype(g.dtype), x)
    return g, centred, jnp.stack([jnp.mean(g, axes), jnp.mean(g * centred, axes)])


def training_pullback(residuals, cts, *, eps, relu, fanout):
    x, scale, mask, mean, var = residual_parts(residuals, relu)
    *dys, dmean, dvar = cts
    dy = sum(dys[1:], dys[0])
    g, centred, sums = _sums_reference(x, dy, mask, mean)
    n = count_of(x, CHANNELS)
    slope = sums[1] / (var + eps)
    dx = _along(_factor(var, scale, eps), x) * (g - _along(sums[0], x) - centred * _along(slope, x))
    dx = dx + _along(dmean / n, x) + centred * _along(2 * dvar / n, x)
    return dx.astype(x.dtype), *parameter_gradients(sums, n, var, eps), g.astype(x.dtype)


def parameter_gradients(sums, n, var, eps):
    return sums[1] * n * jax.lax.rsqrt(var + eps), sums[0] * n


def training_pushforward(residuals, tangents, *, eps, relu, fanout):
    x, scale, mask, mean, var = residual_parts(residuals, relu)
    dx, *rest = tangents
    if dx is None:
        dmean, dvar = jnp.zeros_like(mean), jnp.zeros_like(var)
    else:
        dmean, dvar = statistics_pushforward((x, mean), (dx,))
    residuals = (x, scale, *([] if mask is None else [mask]), mean, var)
    moving = (dx, dmean, dvar, *rest)
    dy = inference_pushforward(residuals, moving, eps=eps, relu=relu)
    return *twice_if(fanout, dy), dmean, dvar


def inference_pullback(residuals, cts, *, eps, relu):
    x, scale, mask, mean, var = residual_parts(residuals, relu)
    g, _, sums = _sums_reference(x, cts[0], mask, mean)
    factor = _factor(var.astype(g.dtype), scale, eps)
    dx = (g * _along(factor, x)).astype(x.dtype)
    given = inference_sums(sums, count_of(x, CHANNELS), var, scale, eps)
    return dx, *given, g.astype(x.dtype)


def inference_sums(sums, n, var, scale, eps):
    """Gradients of mean, var, scale and bias."""
    var = var.astype(sums.dtype)  # in 16 bits eps may vanish, and the division be by 0
    factor = _factor(var, scale, eps)
    dscale, dbias = parameter_gradients(sums, n, var, eps)
    return -factor * dbias, -0.5 * sums[1] * n * factor / (var + eps), dscale, dbias


def inference_pushforward(residuals, tangents, *, eps, relu):
    x, scale, mask, mean, var = residual_parts(residuals, relu)
    dx, dmean, dvar, dscale, dbias, dresidual = tangents
    wide = accumulator_dtype(x.dtype)
    along = lambda values: _along(values.astype(wide), x)  # noqa: E731
    centred, var = _wide(x) - along(mean), var.astype(wide)
    rstd, factor = jax.lax.rsqrt(var + eps), _factor(var, scale, eps)
    dz = jnp.zeros_like(centred)
    if dx is not None:
        dz = dz + _wide(dx) * along(factor)
    if dmean is not None:
        dz = dz - along(dmean.astype(wide) * factor)
    if dvar is not None:
        dz = dz - centred * along(0.5 * dvar.astype(wide) * factor / (var + eps))
    if dscale is not None:
        dz = dz + centred * along(dscale.astype(wide) * rstd)
    if dbias is not None:
        dz = dz + along(dbias)
    if dresidual is not None:
        dz = dz + _wide(dresidual)
    return masked(mask, dz).astype(x.dtype)
