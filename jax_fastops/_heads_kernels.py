"""The kernels between features and attention heads, and the rules of the ops that call them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._dispatch import Refused
from jax_fastops._heads_reference import sum_rows
from jax_fastops._kernel import Kernel
from jax_fastops._native import limit
from jax_fastops._shards import shards_of, total
from jax_fastops._views import explicit_spec, merge, split, split_last

# The approximate number of rows in one partial sum of the bias gradient. Fewer rows mean more
# traffic for the sums. More rows leave too few thread blocks when the batch is small.
_SUM_ROWS = 128
# For a shorter sequence, moving the partial sums costs more than reading the cotangents again.
_FEWEST_ROWS = 3

SPLIT = Kernel.declare(
    "split_heads",
    "x: ... *s f, bias?: f :acc? -> q: ... h *s d, k?: ... h *s d, v?: ... h *s d",
)
MERGE = Kernel.declare(
    "merge_heads", "q: ... h *s d, k?: ... h *s d, v?: ... h *s d -> x: ... *s f"
)
# Merges, and writes p partial sums for each of the g groups of s rows.
_MERGE_AND_SUM = Kernel.declare(
    "merge_heads",
    "q: ... h *g s d, k?: ... h *g s d, v?: ... h *g s d -> x: ... *g s f, sums: ... *g p f :acc",
)


# Heads before or after the sequence, by ``heads_first``.
ORDERS = {True: "{h} {s} {d}", False: "{s} {h} {d}"}


def _parts(order: str, rows: str) -> str:
    return ", ".join(
        f"{part}: ... " + order.format(h=heads, s=rows, d="d")
        for part, heads in zip("qkv", "hnn", strict=True)
    )


_ROTARY_OPTIONS = dict(interleaved=np.bool_, heads_first=np.bool_, eps=np.float64)
ROTARY = {
    first: Kernel.declare(
        "rotary_heads",
        "x: ... *s f, bias?: f :acc?, q_scale?: d :acc?, k_scale?: d :acc?, turns?: ~... *s r :acc "
        f"-> {_parts(order, '*s')}",
        **_ROTARY_OPTIONS,
    )
    for first, order in ORDERS.items()
}


def _rotary_back(order: str, rows: str) -> Kernel:
    """With groups of rows, the kernel writes p partial sums for each group."""
    sums = ", bias_sums?: ... *g p f :acc, scale_sums?: ... *g p m :acc"
    return Kernel.declare(
        "rotary_heads_bwd",
        f"{_parts(order, rows)}, x?: ... {rows} f, bias?: f :acc?, q_scale?: d :acc?, "
        f"k_scale?: d :acc?, turns?: ~... {rows} r :acc -> "
        f"dx: ... {rows} f{sums * ('g' in rows)}",
        **_ROTARY_OPTIONS,
    )


# By ``heads_first``, and whether there are sums.
ROTARY_BACK = {
    (first, sums): _rotary_back(order, "*g s" if sums else "*s")
    for first, order in ORDERS.items()
    for sums in (False, True)
}


def split_forward(x, bias, *, num_heads: int, parts: int, **_):
    head_size, several = x.shape[-1] // (parts * num_heads), parts > 1
    return tuple(SPLIT(x, bias, k=several, v=several, h=num_heads, d=head_size)[:parts])


def split_backward(residuals, cts, needs_grad, *, num_heads: int, parts: int):
    """The gradients of x and of the bias, in one pass over the cotangents."""
    del residuals
    sequence, head_size = cts[0].shape[-2:]
    features = parts * num_heads * head_size
    if not needs_grad[0]:
        raise Refused("only the gradient of the bias is needed, a sum")
    if not needs_grad[1] or sequence < _FEWEST_ROWS:
        dx = MERGE(*cts, f=features).x
        return dx, sum_rows(dx) if needs_grad[1] else None
    rows = _rows_of_sums(cts[0], -2)
    grouped = (_grouped(ct, ct.ndim - 2, rows) for ct in cts)
    dx, sums = _MERGE_AND_SUM(*grouped, f=features, p=-(-rows // _SUM_ROWS))
    return merge(dx, dx.ndim - 3), total(sums)


def _rows_of_sums(ct, axis: int) -> int:
    """The rows in a group of a cotangent, whose sequence is ``axis``."""
    kind = jax.typeof(ct).sharding
    spec = explicit_spec(kind, ct.ndim)
    sequence = ct.shape[axis]
    return group_rows(sequence // shards_of(sequence, spec and spec[axis], kind, 32))


def _grouped(x, axis: int, rows: int):
    """The sequence as two dimensions: groups, and the rows of a group."""
    return split(x, axis, (x.shape[axis] // rows, rows))


def group_rows(sequence: int) -> int:
    """The number of rows in a group, which no shard boundary may cut.

    The largest divisor of the (local) sequence up to ``_SUM_ROWS``. If that is small, the whole
    sequence is one group.
    """
    largest = max(n for n in range(1, min(sequence, _SUM_ROWS) + 1) if sequence % n == 0)
    return largest if 4 * largest >= _SUM_ROWS else sequence


def rotary_forward(x, *arrays, heads: int, kv_heads: int, size: int, **options):
    kernel = ROTARY[options["heads_first"]]
    return tuple(kernel(x, *arrays, h=heads, n=kv_heads, d=size, **options))


def rotary_backward(residuals, cts, needs_grad, *, heads, kv_heads, size, **options):
    x, bias, q_scale, k_scale, turns = residuals
    first = options["heads_first"]
    axis = -2 if first else -3
    if any(needs_grad[1:]) and cts[0].shape[axis] < _FEWEST_ROWS:
        raise Refused(f"gradients of parameters are sums over fewer than {_FEWEST_ROWS} positions")
    needs_bias, *needs_scales = needs_grad[1:4]
    # Heads share the sum of their scale's gradient, unless a bias has sums, too.
    per_sum = 1 if needs_bias else limit("rotary_heads_per_sum")
    q_sums, k_sums = (-(-n // per_sum) for n in (heads, kv_heads))
    sizes: dict[str, Any] = dict(h=heads, n=kv_heads, d=size, f=(heads + 2 * kv_heads) * size)
    if summing := bool(needs_bias or any(needs_scales)):
        rows = _rows_of_sums(cts[0], axis)
        cts = [_grouped(ct, ct.ndim + axis, rows) for ct in cts]
        x, turns = (None if a is None else _grouped(a, a.ndim - 2, rows) for a in (x, turns))
        run = _SUM_ROWS if needs_bias else _SUM_ROWS // 2  # the sums of scales are small
        sizes |= dict(p=-(-rows // run), m=(q_sums + k_sums) * size)
        sizes |= dict(bias_sums=needs_bias, scale_sums=any(needs_scales))
    parameters = bias, q_scale, k_scale
    kernel = ROTARY_BACK[first, summing]
    result = kernel(*cts, x, *parameters, turns, **sizes, **options)
    dbias = total(result.bias_sums) if needs_bias else None
    dq = dk = None
    if any(needs_scales):
        parts = jnp.split(result.scale_sums, (q_sums * size,), axis=-1)
        dq, dk = (total(split_last(part, (part.shape[-1] // size, size))) for part in parts)
    dx = merge(result.dx, result.dx.ndim - 3) if summing else result.dx
    return dx, dbias, dq, dk, None
