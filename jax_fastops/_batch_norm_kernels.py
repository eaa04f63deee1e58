"""The kernels of batch norm, and the rules of its ops that call them.

Kernels take flat groups ``[..., n]``. XLA may copy an array that has a dimension of size 1, merely
to change its layout.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._batch_norm_reference import (
    CHANNELS,
    count_of,
    inference_sums,
    masked,
    merged,
    parameter_gradients,
    residual_parts,
    twice_if,
)
from jax_fastops._kernel import Kernel
from jax_fastops._native import workspace
from jax_fastops._shards import Groups
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import broadcast, broadcast_to, reshape, spec_of

_BITS = "mask?: ... ceil(n/8) :uint8"
_STATISTICS_OF = "mean: ... c :acc, var: ... c :acc"
_SCALE = "scale?: ... c :acc"
_WORKSPACE = "workspace: ... w :acc"
_DX_FROM = (
    f"x: ... n, dy: ... n, {_BITS}, {_STATISTICS_OF}, {_SCALE}, dmean: ... c :acc, dvar: ... c :acc"
)


def _declare(name: str, signature: str, **attributes) -> Kernel:
    return Kernel.declare(f"batch_norm_{name}", signature, inner=np.int64, **attributes)


STATISTICS_KERNEL = _declare("statistics", f"x: ... n -> {_STATISTICS_OF}, {_WORKSPACE}")
FORWARD_KERNEL = _declare(
    "fwd",
    f"x: ... n, {_SCALE}, bias?: ... c :acc, residual?: ... n -> "
    f"y: ... n, {_STATISTICS_OF}, {_BITS}, {_WORKSPACE}",
    eps=np.float64,
    relu=np.bool_,
)
APPLY_KERNEL = _declare(
    "apply",
    f"x: ... n, {_STATISTICS_OF}, {_SCALE}, bias?: ... c :acc, residual?: ... n -> "
    f"y: ... n, {_BITS}",
    eps=np.float64,
    relu=np.bool_,
)
SUMS_KERNEL = _declare(
    "sums",
    f"x: ... n, dy: ... n, dy2?: ... n, {_BITS}, mean: ... c :acc, var?: ... c :acc, {_SCALE} -> "
    f"dx?: ... n, dresidual?: ... n, sums: ... 2 c :acc, {_WORKSPACE}",
    eps=np.float64,
)
BACKWARD_KERNEL = _declare("bwd", f"{_DX_FROM}, sums: ... 2 c :acc -> dx: ... n", eps=np.float64)
GRADIENT_KERNEL = _declare(
    "grad", f"{_DX_FROM} -> dx: ... n, sums: ... 2 c :acc, {_WORKSPACE}", eps=np.float64
)


class _View:
    """The kernels' view of an array ``[..., o, c, i]``: groups, whose sums one all-reduce merges.

    Under ``vmap``, each example whose mask is not a whole number of bytes is a group.
    """

    def __init__(self, x, mask: bool = False):
        *lead, o, c, i = self.shape = x.shape
        self.sharding, self.spec = jax.typeof(x).sharding, spec_of(x)
        self.dtype = accumulator_dtype(x.dtype)
        self.groups = Groups(x, len(lead), whole=bool(mask and o * c * i % 8))
        self.lead = self.groups.lead

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

    def split(self, x):
        """An array with the operand's shape, or a mask, in the kernels' view."""
        return self.groups.split(x, math.prod(x.shape) // math.prod(self.lead))

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
        spec = self.groups.spec(*(None for _ in values.shape))
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
        return merged(parts.sum(tuple(range(1, 1 + len(rows)))))


def statistics(x):
    view = _View(x)
    result = view.call(STATISTICS_KERNEL, dict(x=x), {})
    return view.merge(result.mean, result.var)


def _normalise(x, statistics, scale, bias, residual, *, eps, relu, save):
    """Result, statistics and mask. ``statistics=None`` means those of ``x``, which is one group."""
    view = _View(x, relu)
    result = view.call(
        FORWARD_KERNEL if statistics is None else APPLY_KERNEL,
        dict(x=x, residual=residual),
        dict(scale=scale, bias=bias) | dict(zip(("mean", "var"), statistics or (), strict=False)),
        mask=relu and save,
        eps=eps,
        relu=relu,
    )
    mean, var = statistics or (result.mean, result.var)
    masks = () if result.mask is None else (view.join_mask(result.mask),)
    return view.join(result.y), mean, var, *masks


def _sums(x, dys, mask, mean, var, scale, eps, given_statistics=False, dresidual=False):
    """The averages of g and of ``g * (x - mean)``; with given statistics dx; g if requested."""
    view = _View(x, mask is not None)
    dy, *dy2 = dys
    result = view.call(
        SUMS_KERNEL,
        dict(x=x, dy=dy, dy2=dy2[0] if dy2 else None, mask=mask),
        dict(mean=mean) | (dict(var=var, scale=scale) if given_statistics else {}),
        dx=given_statistics,
        dresidual=dresidual,
        eps=eps,
    )
    grads = (g for g in (result.dx, result.dresidual) if g is not None)
    return view.average(result.sums), *map(view.join, grads)


def _gradient(kernel: Kernel, x, dy, mask, *, eps, **values):
    """dx, and the averages if the kernel computes these, too."""
    view = _View(x, mask is not None)
    result = view.call(kernel, dict(x=x, dy=dy, mask=mask), values, eps=eps)
    return view.join(result.dx), getattr(result, "sums", None)


def training_forward(x, scale, bias, residual, *, eps, relu, fanout, save=False):
    # The statistics of several groups are merged before they are applied.
    given = statistics(x) if _View(x, relu).lead else None
    y, mean, var, *mask = _normalise(x, given, scale, bias, residual, eps=eps, relu=relu, save=save)
    return *twice_if(fanout, y), mean, var, *mask


def inference_forward(x, mean, var, scale, bias, residual, *, eps, relu, save=False):
    y, _, _, *mask = _normalise(
        x, (mean, var), scale, bias, residual, eps=eps, relu=relu, save=save
    )
    return y, *mask


def training_gradients(residuals, cts, needs_grad, *, eps, relu, fanout):
    x, scale, mask, mean, var = residual_parts(residuals, relu)
    *dys, dmean, dvar = cts
    if not any(needs_grad[:-1]):
        return None, None, None, masked(mask, sum(dys[1:], dys[0])).astype(x.dtype)
    n = count_of(x, CHANNELS)
    values = dict(mean=mean, var=var, scale=scale, dmean=dmean / n, dvar=dvar / n)
    # If several results need g, the first pass writes it and the second pass reads it.
    write = (fanout and (needs_grad[0] or needs_grad[-1])) or (relu and needs_grad[-1])
    if needs_grad[0] and not write and not _View(x, relu).lead:
        # One group. The sums of several groups must be merged before dx is computed.
        dx, sums = _gradient(GRADIENT_KERNEL, x, dys[0], mask, eps=eps, **values)
        return dx, *parameter_gradients(sums, n, var, eps), dys[0]
    sums, *g = _sums(x, dys, mask, mean, var, scale, eps, dresidual=write)
    dy, mask = (g[0], None) if write else (dys[0], mask)
    gradients = parameter_gradients(sums, n, var, eps)
    dx = None
    if needs_grad[0]:
        dx, _ = _gradient(BACKWARD_KERNEL, x, dy, mask, eps=eps, sums=sums, **values)
    return dx, *gradients, dy


def inference_gradients(residuals, cts, needs_grad, *, eps, relu):
    x, scale, mask, mean, var = residual_parts(residuals, relu)
    if not any(needs_grad[:-1]):
        return *(None,) * 5, masked(mask, *cts).astype(x.dtype)
    split = needs_grad[-1] and relu
    sums, dx, *g = _sums(
        x, cts, mask, mean, var, scale, eps, given_statistics=True, dresidual=split
    )
    statistics = inference_sums(sums, count_of(x, CHANNELS), var, scale, eps)
    return dx, *statistics, g[0] if split else cts[0]
