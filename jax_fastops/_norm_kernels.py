"""The kernels of layer norm and RMS norm, and the rules of their ops that call them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_fastops._kernel import Kernel
from jax_fastops._native import limit
from jax_fastops._random import NUMBERS, seed_operands, seeded
from jax_fastops._shards import Groups, shards_of, total
from jax_fastops._views import mesh_axes, reshape, spec_of


def _forward_kernel(dropout: bool) -> Kernel:
    """With dropout, the kernel also takes what gives rows their seeds."""
    seeds = f", {seed_operands()}" * dropout
    return Kernel.declare(
        "norm",
        f"x: ... n, residual?: ... n, input_bias?: n :acc?, scale?: n :acc?, bias?: n :acc?{seeds} "
        "-> y: ... n, sum?: ... n, mean?: ... :acc, rstd?: ... :acc, "
        "workspace?: ... ceil(n/1024) :acc",
        rms=np.bool_,
        eps=np.float64,
        **(NUMBERS if dropout else {}),
    )


def _backward_kernel(rows: str, dropout: bool) -> Kernel:
    """``rows`` are the dimensions of the rows that are summed together."""
    seeds, dresidual = f", {seed_operands(rows)}", f"dresidual?: ... {rows} n, "
    return Kernel.declare(
        "norm_bwd",
        f"dy: ... {rows} n, s: ... {rows} n, mean?: ... {rows} :acc, rstd: ... {rows} :acc, "
        f"scale?: n :acc?, dsum?: ... {rows} n, dy2?: ... {rows} n{seeds * dropout} -> "
        f"dx: ... {rows} n, {dresidual * dropout}"
        "dscale?: ... sums n :acc, dbias?: ... sums n :acc, dinput_bias?: ... sums n :acc",
        rms=np.bool_,
        **(NUMBERS if dropout else {}),
    )


FORWARDS = {dropout: _forward_kernel(dropout) for dropout in (False, True)}
# By whether they have sums, and dropout.
BACKWARDS = {
    (sums, dropout): _backward_kernel("r" * sums, dropout)
    for sums in (False, True)
    for dropout in (False, True)
}


def forward(*args, rms, eps, return_sum, fanout, save=False, **drop):
    x, residual, input_bias, *_ = args
    summed = residual is not None or input_bias is not None or bool(drop)
    n = x.shape[-1]

    def call(*args, **seeds):
        result = FORWARDS[bool(drop)](
            *args[:5],
            **seeds,
            **drop,
            sum=return_sum or (save and summed),
            mean=save and not rms,
            rstd=save,
            workspace=not isinstance(n, int) or n > limit("norm_workspace"),
            rms=rms,
            eps=eps,
        )
        results = (result.y,) * (1 + fanout) + (result.sum, result.mean, result.rstd)
        return tuple(y for y in results if y is not None)

    return seeded(call, *args) if drop else call(*args)


def backward(residuals, cts, needs_grad, *, eps, **options):
    del eps
    if "threshold" not in options:
        return _kernel_gradients(residuals, cts, needs_grad, {}, **options)
    count = len(residuals) - 1

    def native(*arrays, **seeds):
        return _kernel_gradients(arrays[:count], arrays[count:-1], needs_grad, seeds, **options)

    return *seeded(native, *residuals[:-1], *cts, residuals[-1]), None


def _kernel_gradients(residuals, cts, needs_grad, seeds, *, rms, return_sum, fanout, **drop):
    s, scale, *mean, rstd = residuals
    _, needs_residual, needs_input_bias, needs_scale, needs_bias, *_ = needs_grad
    summing = bool(needs_input_bias or needs_scale or needs_bias)
    split, join, sums = _views(cts[0]) if summing else (lambda a: a, lambda a: a, 0)
    dropout: dict[str, Any] = {}
    if drop:
        seeds = {name: split(x) if name == "seeds" else x for name, x in seeds.items()}
        dropout = dict(drop, **seeds, dresidual=needs_residual)
    result = BACKWARDS[summing, bool(drop)](
        dy=split(cts[0]),
        s=split(s),
        mean=split(mean[0]) if mean else None,
        rstd=split(rstd),
        scale=scale,
        dsum=split(cts[-1]) if return_sum else None,
        dy2=split(cts[1]) if fanout else None,
        dscale=needs_scale,
        dbias=needs_bias,
        dinput_bias=needs_input_bias,
        sums=sums,
        rms=rms,
        **dropout,
    )
    partial = result.dinput_bias, result.dscale, result.dbias
    parameters = map(total, partial)
    dx = join(result.dx)
    if not drop:
        return dx, dx, *parameters
    return dx, None if result.dresidual is None else join(result.dresidual), *parameters


def _views(x) -> tuple[Callable, Callable, int]:
    """The view ``[..., r, n]`` of the rows of ``x`` for the backward kernel, in groups of rows.

    Returns a function that reshapes arrays, or values of each row, into the view, one that reshapes
    arrays back, and the number of partial sums for each index of ``...``.
    """
    spec, kind = spec_of(x), jax.typeof(x).sharding
    groups = Groups(x, x.ndim - 1)
    # The groups on one device, if auto mesh axes shard them over as many devices as they can.
    apart = math.prod(groups.lead)
    apart //= shards_of(apart, spec and mesh_axes(*spec[:-1]), kind, 1)

    def split(a):
        return groups.split(a, groups.rows, *a.shape[x.ndim - 1 :])

    def join(a):
        return reshape(a, x.shape, spec)

    return split, join, _number_of_sums(apart, groups.rows, x.shape[-1], x.dtype.itemsize)


def _number_of_sums(groups: int, rows: int, n: int, itemsize: int) -> int:
    """The number of partial sums for the rows of each group on a device.

    Each thread block of the CUDA kernel, or each cluster if a row needs several blocks, writes one.
    So there are as many as an H100 runs at a time. With more, the last blocks wait for the first,
    which costs 1.5 times the time. A few rows more or fewer per sum matter little.
    """
    if not (isinstance(groups, int) and isinstance(n, int)):
        return 1
    wide = itemsize == 8
    limits = ((8192, 132), (16384, 66), (32768, 28))
    most = next((sums for limit, sums in limits if n <= limit // (1 + wide)), 14)
    most = max(1, most // max(groups, 1))
    return min(most, max(1, rows // 4)) if isinstance(rows, int) else most
