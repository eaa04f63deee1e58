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
import numpy as np
from jax.typing import ArrayLike

from jax_fastops._arguments import (
    as_arrays,
    epsilon,
    integer,
    not_weak,
    parameter,
    same_floating_dtype,
)
from jax_fastops._bits import pack, select
from jax_fastops._dispatch import SYMBOLIC, Refused, size_in_bytes
from jax_fastops._kernel import Kernel, groups_of
from jax_fastops._native import workspace
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._signature import accumulator_dtype
from jax_fastops._types import Flag, fans_out
from jax_fastops._views import (
    broadcast,
    broadcast_to,
    broadcast_type,
    merge,
    parts_of,
    reshape,
    spec_of,
)

# An op sees an array as [..., o, c, i]: "..." is the batch, which may be sharded; c, the channels.
_X = "... o c i"
_MASK = "... ceil(o*c*i/8) :uint8"
_CHANNELS = -2


# ---- kernels -------------------------------------------------------------------------------------
#
# Kernels take flat groups [..., n]. XLA may copy an array that has a dimension of size 1, merely to
# change its layout.


_BITS = "mask?: ... ceil(n/8) :uint8"
_STATISTICS_OF = "mean: ... c :acc, var: ... c :acc"
_SCALE = "scale?: ... c :acc"
_WORKSPACE = "workspace: ... w :acc"
_DX_FROM = (
    f"x: ... n, dy: ... n, {_BITS}, {_STATISTICS_OF}, {_SCALE}, dmean: ... c :acc, dvar: ... c :acc"
)


def _declare(name: str, signature: str, **attributes) -> Kernel:
    return Kernel.declare(f"batch_norm_{name}", signature, inner=np.int64, **attributes)


_STATISTICS_KERNEL = _declare("statistics", f"x: ... n -> {_STATISTICS_OF}, {_WORKSPACE}")
_FORWARD_KERNEL = _declare(
    "fwd",
    f"x: ... n, {_SCALE}, bias?: ... c :acc, residual?: ... n -> "
    f"y: ... n, {_STATISTICS_OF}, {_BITS}, {_WORKSPACE}",
    eps=np.float64,
    relu=np.bool_,
)
_APPLY_KERNEL = _declare(
    "apply",
    f"x: ... n, {_STATISTICS_OF}, {_SCALE}, bias?: ... c :acc, residual?: ... n -> "
    f"y: ... n, {_BITS}",
    eps=np.float64,
    relu=np.bool_,
)
_SUMS_KERNEL = _declare(
    "sums",
    f"x: ... n, dy: ... n, dy2?: ... n, {_BITS}, mean: ... c :acc, var?: ... c :acc, {_SCALE} -> "
    f"dx?: ... n, dresidual?: ... n, sums: ... 2 c :acc, {_WORKSPACE}",
    eps=np.float64,
)
_BACKWARD_KERNEL = _declare("bwd", f"{_DX_FROM}, sums: ... 2 c :acc -> dx: ... n", eps=np.float64)
_GRADIENT_KERNEL = _declare(
    "grad", f"{_DX_FROM} -> dx: ... n, sums: ... 2 c :acc, {_WORKSPACE}", eps=np.float64
)


class _Groups:
    """The kernels' view of an array ``[..., o, c, i]``: groups, whose sums one all-reduce merges.

    Under ``vmap``, each example whose mask is not a whole number of bytes is a group.
    """

    def __init__(self, x, mask: bool = False):
        *lead, o, c, i = self.shape = x.shape
        self.sharding, self.spec = jax.typeof(x).sharding, spec_of(x)
        self.dtype = accumulator_dtype(x.dtype)
        padded = mask and o * c * i % 8
        self.lead = tuple(lead) if padded else groups_of(lead, self.spec, self.sharding)

    def call(self, kernel: Kernel, arrays: dict, values: dict, **given):
        """The results of a kernel. ``values`` are those of channels, repeated for every group."""
        *_, c, i = self.shape
        operands = {name: None if x is None else self.split(x) for name, x in arrays.items()}
        operands |= {name: None if v is None else self.repeat(v) for name, v in values.items()}
        if "w" in kernel.sizes:
            row = c * i
            n = math.prod(self.shape) // math.prod(self.lead)
            given["w"] = workspace("batch_norm", n // row if isinstance(n, int) else -1, c, i)
        return kernel(**operands, c=c, inner=i, **given)

    def _spec_of_lead(self, *own) -> tuple | None:
        return None if self.spec is None else (*self.spec[: len(self.lead)], *own)

    def split(self, x):
        """An array with the operand's shape, or a mask, in the kernels' view."""
        n = math.prod(x.shape) // math.prod(self.lead)
        return reshape(x, (*self.lead, n), self._spec_of_lead(None))

    def join(self, x):
        """The inverse of :meth:`split` for an array with the operand's shape."""
        return reshape(x, self.shape, self.spec)

    def join_mask(self, mask):
        lead = self.shape[:-3]
        n = math.prod(mask.shape) // math.prod(lead)
        return reshape(mask, (*lead, n), self.spec and (*self.spec[:-3], None))

    def repeat(self, values):
        """Values per channel, repeated for every group."""
        values = values.astype(self.dtype)
        if not self.lead:
            return values
        spec = self._spec_of_lead(*(None for _ in values.shape))
        return broadcast(values, (*self.lead, *values.shape), self.sharding, spec)

    def average(self, values):
        """The average over groups."""
        return values.mean(tuple(range(len(self.lead)))) if self.lead else values

    def merge(self, mean, var):
        """The statistics of all groups together, from those of each group."""
        if not self.lead:
            return mean, var
        both = jnp.stack([mean, var], len(self.lead))
        rows = both.shape[: len(self.lead)]
        count = math.prod(rows)
        # Every device gets every group's values from a sum: the only all-reduce.
        mine = jnp.eye(count, dtype=bool).reshape(count, *rows, 1, 1)
        parts = jnp.broadcast_to(both[None], (count, *both.shape))
        parts = jax.lax.select(broadcast_to(mine, jax.typeof(parts)), parts, jnp.zeros_like(parts))
        return _merged(parts.sum(tuple(range(1, 1 + len(rows)))))


def _merged(both):
    """Mean and variance of the whole, from those of equal parts ``[parts, 2, c]``."""
    mean = both[:, 0].mean(0)
    return mean, (both[:, 1] + jnp.square(both[:, 0] - mean)).mean(0)


def _statistics(x):
    groups = _Groups(x)
    result = groups.call(_STATISTICS_KERNEL, dict(x=x), {})
    return groups.merge(result.mean, result.var)


def _normalise(x, statistics, scale, bias, residual, *, eps, relu, save):
    """Result, statistics and mask. ``statistics=None`` means those of ``x``, which is one group."""
    groups = _Groups(x, relu)
    result = groups.call(
        _FORWARD_KERNEL if statistics is None else _APPLY_KERNEL,
        dict(x=x, residual=residual),
        dict(scale=scale, bias=bias) | dict(zip(("mean", "var"), statistics or (), strict=False)),
        mask=relu and save,
        eps=eps,
        relu=relu,
    )
    mean, var = statistics or (result.mean, result.var)
    masks = () if result.mask is None else (groups.join_mask(result.mask),)
    return groups.join(result.y), mean, var, *masks


def _sums(x, dys, mask, mean, var, scale, eps, given_statistics=False, dresidual=False):
    """The averages of g and of ``g * (x - mean)``; with given statistics dx; g if requested."""
    groups = _Groups(x, mask is not None)
    dy, *dy2 = dys
    result = groups.call(
        _SUMS_KERNEL,
        dict(x=x, dy=dy, dy2=dy2[0] if dy2 else None, mask=mask),
        dict(mean=mean) | (dict(var=var, scale=scale) if given_statistics else {}),
        dx=given_statistics,
        dresidual=dresidual,
        eps=eps,
    )
    grads = (g for g in (result.dx, result.dresidual) if g is not None)
    return groups.average(result.sums), *map(groups.join, grads)


def _gradient(kernel: Kernel, x, dy, mask, *, eps, **values):
    """dx, and the averages if the kernel computes these, too."""
    groups = _Groups(x, mask is not None)
    result = groups.call(kernel, dict(x=x, dy=dy, mask=mask), values, eps=eps)
    return groups.join(result.dx), getattr(result, "sums", None)


# ---- references ----------------------------------------------------------------------------------


def _along(values, x, channels: int = _CHANNELS):
    """Values per channel, in a shape that broadcasts with ``x``."""
    return values.reshape((1,) * (x.ndim + channels) + values.shape + (1,) * (-channels - 1))


def _others(x, channels: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis != x.ndim + channels)


def _count(x, channels: int):
    """The number of elements per channel. A float, because it may exceed an int32."""
    n = math.prod(x.shape[axis] for axis in _others(x, channels))
    return float(n) if isinstance(n, int) else n


def _wide(x):
    return x.astype(accumulator_dtype(x.dtype))


def _statistics_reference(x, *, channels=_CHANNELS, dtype=None) -> tuple[jax.Array, jax.Array]:
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


def _statistics_pullback(residuals, cts):
    x, mean = residuals
    dmean, dvar = (_along(ct / _count(x, _CHANNELS), x) for ct in cts)
    return ((dmean + 2 * dvar * (_wide(x) - _along(mean, x))).astype(x.dtype),)


def _statistics_pushforward(residuals, tangents):
    (x, mean), (dx,) = residuals, map(_wide, tangents)
    axes = _others(x, _CHANNELS)
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


def _inference_reference(x, mean, var, scale, bias, residual, *, eps, relu, channels=_CHANNELS):
    z = _before_activation(x, mean, var, scale, bias, residual, eps, channels)
    return (jax.nn.relu(z) if relu else z).astype(x.dtype)


def _reference(x, scale, bias, residual, *, eps, relu, fanout, channels=_CHANNELS):
    wide = _wide(x)  # once: the gradient of each cast is rounded
    mean, var = _statistics_reference(wide, channels=channels, dtype=x.dtype)
    z = _before_activation(wide, mean, var, scale, bias, residual, eps, channels)
    y = (jax.nn.relu(z) if relu else z).astype(x.dtype)
    return *_twice_if(fanout, y), mean, var


def _twice_if(fanout: bool, y) -> tuple:
    return (y, y) if fanout else (y,)


def _flat(x):
    """Reshapes ``[..., o, c, i]`` to ``[..., n]``, the order of the mask's bits."""
    return merge(x, x.ndim - 3, 3)


def _masked(mask, dy):
    """The cotangent before the activation, in the accumulator's dtype."""
    if mask is None:
        return _wide(dy)
    return _wide(reshape(select(mask, _flat(dy)), dy.shape, spec_of(dy)))


def _inference_save(x, mean, var, scale, bias, residual, *, eps, relu):
    if not relu:
        return ()
    z = _before_activation(x, mean, var, scale, bias, residual, eps, _CHANNELS)
    return (pack(_flat(z) > 0),)


def _save(x, scale, bias, residual, *, eps, relu, fanout):
    if not relu:
        return ()
    return _inference_save(x, *_statistics_reference(x), scale, bias, residual, eps=eps, relu=relu)


def _parts(residuals, relu: bool):
    """x, scale, mask, mean and var from the training op's residuals."""
    x, scale, *mask, mean, var = residuals
    return x, scale, mask[0] if relu else None, mean, var


def _sums_reference(x, dy, mask, mean):
    """g, ``x - mean``, and the averages that :func:`_sums` computes from them."""
    g, axes = _masked(mask, dy), _others(x, _CHANNELS)
    centred = _wide(x) - _along(mean.astype(g.dtype), x)
    return g, centred, jnp.stack([jnp.mean(g, axes), jnp.mean(g * centred, axes)])


def _pullback(residuals, cts, *, eps, relu, fanout):
    x, scale, mask, mean, var = _parts(residuals, relu)
    *dys, dmean, dvar = cts
    dy = sum(dys[1:], dys[0])
    g, centred, sums = _sums_reference(x, dy, mask, mean)
    n = _count(x, _CHANNELS)
    slope = sums[1] / (var + eps)
    dx = _along(_factor(var, scale, eps), x) * (g - _along(sums[0], x) - centred * _along(slope, x))
    dx = dx + _along(dmean / n, x) + centred * _along(2 * dvar / n, x)
    return dx.astype(x.dtype), *_parameter_gradients(sums, n, var, eps), g.astype(x.dtype)


def _parameter_gradients(sums, n, var, eps):
    return sums[1] * n * jax.lax.rsqrt(var + eps), sums[0] * n


def _pushforward(residuals, tangents, *, eps, relu, fanout):
    x, scale, mask, mean, var = _parts(residuals, relu)
    dx, *rest = tangents
    if dx is None:
        dmean, dvar = jnp.zeros_like(mean), jnp.zeros_like(var)
    else:
        dmean, dvar = _statistics_pushforward((x, mean), (dx,))
    residuals = (x, scale, *([] if mask is None else [mask]), mean, var)
    moving = (dx, dmean, dvar, *rest)
    dy = _inference_pushforward(residuals, moving, eps=eps, relu=relu)
    return *_twice_if(fanout, dy), dmean, dvar


def _inference_pullback(residuals, cts, *, eps, relu):
    x, scale, mask, mean, var = _parts(residuals, relu)
    g, _, sums = _sums_reference(x, cts[0], mask, mean)
    factor = _factor(var.astype(g.dtype), scale, eps)
    dx = (g * _along(factor, x)).astype(x.dtype)
    given = _inference_sums(sums, _count(x, _CHANNELS), var, scale, eps)
    return dx, *given, g.astype(x.dtype)


def _inference_sums(sums, n, var, scale, eps):
    """Gradients of mean, var, scale and bias."""
    var = var.astype(sums.dtype)  # in 16 bits eps may vanish, and the division be by 0
    factor = _factor(var, scale, eps)
    dscale, dbias = _parameter_gradients(sums, n, var, eps)
    return -factor * dbias, -0.5 * sums[1] * n * factor / (var + eps), dscale, dbias


def _inference_pushforward(residuals, tangents, *, eps, relu):
    x, scale, mask, mean, var = _parts(residuals, relu)
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
    return _masked(mask, dz).astype(x.dtype)


# ---- ops -----------------------------------------------------------------------------------------


def _forward(x, scale, bias, residual, *, eps, relu, fanout, save=False):
    # The statistics of several groups are merged before they are applied.
    statistics = _statistics(x) if _Groups(x, relu).lead else None
    y, mean, var, *mask = _normalise(
        x, statistics, scale, bias, residual, eps=eps, relu=relu, save=save
    )
    return *_twice_if(fanout, y), mean, var, *mask


def _inference_forward(x, mean, var, scale, bias, residual, *, eps, relu, save=False):
    y, _, _, *mask = _normalise(
        x, (mean, var), scale, bias, residual, eps=eps, relu=relu, save=save
    )
    return y, *mask


def _gradients(residuals, cts, needs_grad, *, eps, relu, fanout):
    x, scale, mask, mean, var = _parts(residuals, relu)
    *dys, dmean, dvar = cts
    if not any(needs_grad[:-1]):
        return None, None, None, _masked(mask, sum(dys[1:], dys[0])).astype(x.dtype)
    n = _count(x, _CHANNELS)
    values = dict(mean=mean, var=var, scale=scale, dmean=dmean / n, dvar=dvar / n)
    # If several results need g, the first pass writes it and the second pass reads it.
    write = (fanout and (needs_grad[0] or needs_grad[-1])) or (relu and needs_grad[-1])
    if needs_grad[0] and not write and not _Groups(x, relu).lead:
        # One group. The sums of several groups must be merged before dx is computed.
        dx, sums = _gradient(_GRADIENT_KERNEL, x, dys[0], mask, eps=eps, **values)
        return dx, *_parameter_gradients(sums, n, var, eps), dys[0]
    sums, *g = _sums(x, dys, mask, mean, var, scale, eps, dresidual=write)
    dy, mask = (g[0], None) if write else (dys[0], mask)
    gradients = _parameter_gradients(sums, n, var, eps)
    dx = None
    if needs_grad[0]:
        dx, _ = _gradient(_BACKWARD_KERNEL, x, dy, mask, eps=eps, sums=sums, **values)
    return dx, *gradients, dy


def _inference_gradients(residuals, cts, needs_grad, *, eps, relu):
    x, scale, mask, mean, var = _parts(residuals, relu)
    if not any(needs_grad[:-1]):
        return *(None,) * 5, _masked(mask, *cts).astype(x.dtype)
    split = needs_grad[-1] and relu
    sums, dx, *masked = _sums(
        x, cts, mask, mean, var, scale, eps, given_statistics=True, dresidual=split
    )
    statistics = _inference_sums(sums, _count(x, _CHANNELS), var, scale, eps)
    return dx, *statistics, masked[0] if split else cts[0]


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
        row_count=count,
        inner_bytes=0 if last else size_in_bytes(after, x.dtype),
        undivided=last and 1024 <= count < 4096,
    )


_TRAINING_IN = f"{_X}, c, c, {_X}"
_STATISTICS_OUT = "c :acc, c :acc"

_STATISTICS = Op(
    "batch_norm_statistics",
    f"{_X} -> {_STATISTICS_OUT}",
    _statistics_reference,
    family="batch_norm",
    example=example(lambda x: batch_norm_statistics(x), "... n"),
    kernels=(_STATISTICS_KERNEL,),
    forward=_statistics,
    residuals=lambda args, outs, saved: (*args, outs[0]),
    pullback=_statistics_pullback,
    pushforward=_statistics_pushforward,
    independent=False,
)

_TRAINING = Op(
    "batch_norm",
    f"{_TRAINING_IN} -> {_X}, {_STATISTICS_OUT}",
    _reference,
    example=example(lambda *arrays: batch_norm(*arrays), "... n, n, n"),
    kernels=(
        _FORWARD_KERNEL,
        _STATISTICS_KERNEL,
        _APPLY_KERNEL,
        _SUMS_KERNEL,
        _BACKWARD_KERNEL,
        _GRADIENT_KERNEL,
    ),
    forward=_forward,
    save=_save,
    forward_saving=functools.partial(_forward, save=True),
    residuals=lambda args, outs, saved: (*args[:2], *saved, *outs[-2:]),
    pullback=_pullback,
    pushforward=_pushforward,
    backward=_gradients,
    independent=False,
)

_INFERENCE = Op(
    "batch_norm_inference",
    f"{_X}, c, c, c, c, {_X} -> {_X}",
    _inference_reference,
    family="batch_norm",
    example=example(
        lambda x, mean, var, *rest: batch_norm_inference(x, mean, jnp.abs(var) + 0.5, *rest),
        "... n, n, n, n, n",
    ),
    kernels=(_APPLY_KERNEL, _SUMS_KERNEL),
    forward=_inference_forward,
    save=_inference_save,
    forward_saving=functools.partial(_inference_forward, save=True),
    residuals=lambda args, outs, saved: (args[0], args[3], *saved, *args[1:3]),
    pullback=_inference_pullback,
    pushforward=_inference_pushforward,
    backward=_inference_gradients,
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
    if 0 in x.shape or _count(x, at - x.ndim) == 1:
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
        raise ValueError(f"{op}: activation is {activation!r}; it must be None or 'relu'")
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
        ys = _twice_if(fanout, y)
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
    return _merged(jax.lax.psum(alone, axis_name))


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
