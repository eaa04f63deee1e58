"""The references of the ops between features and attention heads, and their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fastops._arguments import placed, selected
from jax_fastops._broadcast import add
from jax_fastops._kernel import size_of
from jax_fastops._shards import total
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge_last, split_last

# For fewer, the gradient of the reference's bias is a sum of padded arrays, as in plain JAX: a GPU
# sums a concatenation of few rows up to 2.3 times as slowly.
_FEW_TOKENS = 32


def add_bias(x, bias):
    return x if bias is None else add(x, bias)


def split_reference(x, bias, *, num_heads: int, parts: int, **_):
    x = add_bias(x, bias)
    head_size = x.shape[-1] // (parts * num_heads)
    if parts == 1:
        return jnp.swapaxes(split_last(x, (num_heads, head_size)), -3, -2)
    few = bias is not None and size_of(x) < _FEW_TOKENS * size_of(bias)
    x = split_last(x, (parts, num_heads, head_size))
    if few:
        pieces = [jax.lax.index_in_dim(x, i, x.ndim - 3, keepdims=False) for i in range(parts)]
    else:  # the gradient of indexing adds zeros, which turns -0 into +0
        pieces = [jnp.squeeze(p, -3) for p in jax.lax.split(x, (1,) * parts, axis=x.ndim - 3)]
    return tuple(jnp.swapaxes(piece, -3, -2) for piece in pieces)


def sum_rows(dx):
    """The bias gradient, in the accumulator dtype.

    From dx, whose rows are contiguous: XLA sums these much faster than the rows of each head.
    """
    return total(dx.astype(accumulator_dtype(dx.dtype)))


def split_pullback(residuals, cts, **_):
    del residuals
    dx = merge_last(jnp.stack([jnp.swapaxes(ct, -3, -2) for ct in cts], axis=-3), 3)
    return dx, sum_rows(dx) if jnp.issubdtype(dx.dtype, jnp.inexact) else None


def in_wide(x):
    """``x`` in the accumulator dtype, unless it is no floating-point array."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(accumulator_dtype(x.dtype)) if floating else x


def cos_and_sin(turns) -> tuple:
    """The cosines and the sines of an array of turns."""
    return (None, None) if turns is None else tuple(jnp.split(turns, 2, axis=-1))


def _rotated(x, cos, sin, interleaved: bool):
    """Rotates the first elements of each head of ``[..., sequence, heads, size]``."""
    pairs = cos.shape[-1]
    cos, sin = jnp.expand_dims(cos, -2), jnp.expand_dims(sin, -2)
    turned, rest = x, []
    if 2 * pairs < x.shape[-1]:
        turned, *rest = jnp.split(x, (2 * pairs,), axis=-1)
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = jnp.split(turned, 2, axis=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    if interleaved:
        parts = [merge_last(jnp.stack(parts, axis=-1))]
    return jnp.concatenate(parts + rest, axis=-1)


def _normalized(x, scale, eps: float):
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * rstd * scale.astype(x.dtype)


def rotary_reference(*args, **options):
    *others, turns = args
    return split_and_rotate(*others, *cos_and_sin(turns), **options)


def split_and_rotate(
    x, bias, q_scale, k_scale, cos, sin, *, heads, kv_heads, size, interleaved, heads_first, eps
):
    wide = in_wide(x)
    wide = wide if bias is None else wide + bias.astype(wide.dtype)
    sizes = (heads, kv_heads, kv_heads)
    # The first dimension of size 1 lets split_last gather sharded features.
    wide = jnp.squeeze(split_last(wide, (1, sum(sizes), size)), -3)
    parts = jax.lax.split(wide, sizes, axis=wide.ndim - 2)
    results = []
    for part, scale in zip(parts, (q_scale, k_scale, None), strict=True):
        if scale is not None:
            part = _normalized(part, scale, eps)
        if cos is not None and len(results) < 2:
            part = _rotated(part, cos, sin, interleaved)
        part = part.astype(x.dtype)
        results.append(jnp.swapaxes(part, -3, -2) if heads_first else part)
    return tuple(results)


def rotary_pullback(residuals, cts, **options):
    x, *_, turns = residuals
    if x is not None:

        def of(*args):
            return rotary_reference(*args, turns, **options)

        return *jax.vjp(of, *residuals[:4])[1](tuple(cts)), None
    parts = [ct if not options["heads_first"] else jnp.swapaxes(ct, -3, -2) for ct in cts]
    if turns is not None:
        parts = [in_wide(part) for part in parts]
        cos, sin = cos_and_sin(turns)
        parts[:2] = (_rotated(part, cos, -sin, options["interleaved"]) for part in parts[:2])
    wide = merge_last(jnp.concatenate(parts, axis=-2))
    dbias = sum_rows(wide) if jnp.issubdtype(wide.dtype, jnp.inexact) else None
    return wide.astype(cts[0].dtype), dbias, None, None, None


def rotary_pushforward(residuals, tangents, **options):
    x, *_, turns = residuals
    if x is None:  # linear
        return rotary_reference(*tangents[:4], turns, **options)
    moving = [t is not None for t in tangents[:4]]

    def of(*chosen):
        return rotary_reference(*placed(chosen, moving, residuals[:4]), turns, **options)

    return jax.jvp(of, selected(residuals[:4], moving), selected(tangents[:4], moving))[1]
