"""Attention as a softmax between two products, with all kinds of masks as one.

Letters of dimensions: ``b`` batch, ``t`` queries, ``s`` keys, ``n`` heads, ``k`` heads of keys,
``g`` heads of queries for one head of keys, ``h`` the size of a head.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastops._dispatch import lowering_platform
from jax_fastops._random import Drop
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge, split
from jax_fastops.softmax import softmax_of

_PRESETS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}


class Masks(NamedTuple):
    """What a query may attend to. Each field is optional, and all that are given must hold."""

    mask: Any = None  # boolean, broadcasts to [b, n, t, s]
    causal: bool = False
    window: tuple[int, int] | None = None  # keys before and after the position of the query
    query_lengths: Any = None  # [b]
    key_lengths: Any = None  # [b]
    segments: tuple[Any, Any] | None = None  # ids of queries [b, t] and of keys [b, s]

    def merged(self, queries: Any, keys: Any) -> jax.Array | None:
        """One boolean mask of rank 4, in the smallest shape, or ``None``."""
        row = jax.lax.broadcasted_iota(jnp.int32, (1, 1, queries, 1), 2)
        column = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys), 3)
        parts = []
        if self.causal:
            parts.append(column <= row)
        if self.window is not None:
            before, after = self.window
            parts.append((row - column <= before) & (column - row <= after))
        if self.key_lengths is not None:
            parts.append(column < self.key_lengths[:, None, None, None])
        if self.query_lengths is not None:
            parts.append(row < self.query_lengths[:, None, None, None])
        if self.segments is not None:
            mine, other = self.segments
            mine, other = mine[:, None, :, None], other[:, None, None, :]
            parts.append((mine == other) & (mine > 0))
        if self.mask is not None:
            parts.append(self.mask)
        return functools.reduce(operator.and_, parts) if parts else None


def _scores(query, key, equation: str) -> jax.Array:
    """The product in the accumulator dtype."""
    wide = accumulator_dtype(query.dtype)
    if lowering_platform() == "cpu":  # XLA widens operands of 16 bits there, but not all of them
        return jnp.einsum(equation, query.astype(wide), key.astype(wide))
    # With a preset, the products of the gradient have operands of 16 bits, too.
    precision = _PRESETS.get(str(query.dtype))
    return jnp.einsum(equation, query, key, precision=precision, preferred_element_type=wide)


def by_softmax(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    where: Any,
    *,
    scale: float,
    drop: Drop | None,
    layout: str = "btnh",
    residual: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The result of attention in ``layout``, and the logarithms of the sums ``[b, t, n]``.

    Args:
      query: array in ``layout``.
      key: array in ``layout``, with ``s`` for ``t``, and heads that divide those of the queries.
      value: likewise.
      bias: added to the scaled scores: an array that broadcasts to ``[b, n, t, s]``, or ``None``.
      where: which scores count: likewise.
      scale: of the scores.
      drop: the dropout of the weights.
      layout: ``"btnh"`` or ``"bnth"``.
      residual: whether the logarithms of the sums are needed.
    """
    axis, heads = layout.index("n"), "n"
    kv_heads = key.shape[axis]
    if query.shape[axis] != kv_heads:
        heads = "kg"
        query = _split_heads(query, axis, kv_heads)
        bias, where = (x if x is None else _split_heads(x, 1, kv_heads) for x in (bias, where))
    of_query = layout.replace("n", heads)
    of_key = layout.replace("t", "s").replace("n", heads[0])
    of_scores = f"b{heads}ts"
    scores = _scores(query, key, f"{of_query},{of_key}->{of_scores}")
    if bias is not None:
        scores, scale = scores * scale + bias.astype(scores.dtype), 1.0
    weights = softmax_of("softmax", scores, -1, where, scale, drop).astype(value.dtype)
    y = jnp.einsum(f"{of_scores},{of_key}->{of_query}", weights, value)
    y = y if heads == "n" else merge(y, axis)
    if not residual:
        return y, None
    sums = _log_sums(jax.lax.stop_gradient(scores) * scale, where).astype(y.dtype)
    sums = sums if heads == "n" else merge(sums, 1)
    return y, jnp.swapaxes(sums, 1, 2)


def _log_sums(scores, where) -> jax.Array:
    """The logarithms of the sums of exponentials: -inf without an element that counts."""
    if where is None:
        return jax.nn.logsumexp(scores, axis=-1)
    lowest = jnp.asarray(0.5 * jnp.finfo(scores.dtype).min, scores.dtype)  # no -inf - -inf
    sums = jax.nn.logsumexp(jnp.where(where, scores, lowest), axis=-1)
    return jnp.where(where.any(-1), sums, -jnp.inf)


def _split_heads(x, axis: int, kv_heads: int):
    """The heads of queries at ``axis`` as heads of keys, and the queries of each."""
    sizes = (1, 1) if x.shape[axis] == 1 else (kv_heads, x.shape[axis] // kv_heads)
    return split(x, axis, sizes)
