"""``attention`` and ``qkv_attention``: dot-product attention with masks, segments and dropout.

On a GPU, cuDNN computes bfloat16 and float16, and another kernel ``qkv_attention`` of short
sequences that is not differentiated. Elsewhere a softmax kernel runs between two products. It
applies scale, mask and dropout as it reads and writes, and the backward draws the bits of
dropout again from the key.

Sources: FasterTransformer, the BERT encoder layer; Vaswani et al., "Attention Is All You Need".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fastops._arguments import (
    FLOATING,
    as_arrays,
    integer,
    is_integer,
    not_weak,
    real_number,
    same_floating_dtype,
)
from jax_fastops._attention import Attend, Masks
from jax_fastops._broadcast import of_rank
from jax_fastops._projection import attend, attend_list
from jax_fastops._random import drop_of
from jax_fastops._registry import example, example_key, register
from jax_fastops._settings import own_code

_LARGEST = 2**31 - 1  # of int32
_SIZES = {"b": (4, 2), "t": (128, 9), "m": (4, 3), "h": (64, 5)}


def _dropped(query, key, value):
    """With a rate at which no weight of an example is dropped: engines have other masks."""
    return attention(query, key, value, dropout_key=example_key(), dropout_rate=1e-9)


def _dropped_tangent(query, key, value):
    return jax.jvp(lambda x: _dropped(x, key, value), (query,), (query,))[1]


for _name, _function in {
    "attention": lambda q, k, v: attention(q, k, v),
    "attention_dropout": _dropped,
    "attention_keep": _dropped_tangent,
}.items():
    register("attention", _name, example(_function, "b t m h, b t m h, b t m h", **_SIZES))
for _name, _width in {"qkv_attention": (768, 36), "short_attention": (768, 768)}.items():
    _call = example(lambda qkv: qkv_attention(qkv, num_heads=4), "b t f", **_SIZES, f=_width)
    register("attention", _name, _call)


def _list(qkv):
    """Two sequences in a list."""
    qkv, t = jnp.asarray(qkv), qkv.shape[0]
    offsets = jnp.array([0, t // 2, t], jnp.int32)
    return attend_list(qkv, jnp.ones(qkv.shape[1:]), offsets, length=t - t // 2, num_heads=4)


register("attention", "list_attention", example(_list, "t f", **_SIZES, f=(768, 768)))


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    max_segments: int | None = None,
    dropout_key: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """Dot-product attention: ``softmax(query @ key.T * scale + bias) @ value`` for each head.

    Equals ``jax.nn.dot_product_attention`` with the same arguments. In addition, it takes segments
    of packed rows, and drops weights by a key. Scores and weights are computed in float32 (float64
    for float64), and the weights are rounded to the dtype of ``value`` before the second product.

    A query that may attend to no key gives 0, and has zero gradients. (``jax.nn`` gives the mean of
    all values there, except after ``query_seq_lengths``, where it gives 0, too.)

    Args:
      query: array ``[B, T, N, H]`` or ``[T, N, H]``; float32, bfloat16, float16 or float64.
      key: array ``[B, S, K, H]`` or ``[S, K, H]``, where ``K`` divides ``N``. ``N / K`` adjacent
        heads of queries share a head of keys.
      value: array with the shape of ``key``.
      bias: added to the scaled scores, an array that broadcasts to ``[B, N, T, S]``, or ``None``.
        Its gradient has its own shape.
      mask: boolean array that broadcasts to ``[B, N, T, S]``: True where a query may attend to a
        key.
      scale: a Python or NumPy number. Default: ``1 / sqrt(H)``.
      is_causal: whether a query attends only to keys up to its own position.
      query_seq_lengths: integer array ``[B]``: queries from there on are padding. Without a batch,
        a number; likewise the next argument.
      key_value_seq_lengths: integer array ``[B]``: keys from there on are padding.
      local_window_size: the number of keys before and after the position of a query to which it
        attends, a number for both or a pair.
      return_residual: whether to also return the logarithms of the sums of exponentials.
      segment_ids: integer array ``[B, L]`` for rows that have several sequences: a query attends to
        keys with its own id. 0 or a negative id is padding. A pair of arrays ``[B, T]`` and
        ``[B, S]`` gives queries and keys different ids. Without a batch, without ``B``.
      max_segments: a bound on the number of segments in a row, static. It changes no result except
        for rounding and, with dropout, which weights are dropped. If ``segment_ids`` is one array,
        each id is in one piece of its row, and there is no other mask, bias or length, cuDNN
        computes each segment separately. This takes less time in long rows, and more memory.
      dropout_key: a key of ``jax.random`` for the dropout of the weights, typed or raw. May be
        ``None`` if the rate is 0.
      dropout_rate: the probability that a weight is dropped, a static number in [0, 1]. Each head
        and example has its own mask. Which weights are dropped is
        :func:`~jax_fastops.dropout_mask`'s definition for the shape ``[B, N, T, S]``; with cuDNN it
        depends on the shape of the call, the GPU and the version of cuDNN.
      deterministic: whether the gradient must have the same bits in every run. With cuDNN, this
        takes memory that grows with ``T * S``.

    Returns:
      An array with the shape and dtype of ``query``. With ``return_residual``, a pair of it and the
      logarithms, ``[B, T, N]`` in the same dtype, before dropout. They are -inf for a query without
      keys, and have no gradient, as in ``jax.nn``.

    Residuals: with cuDNN, the operands, the result and the logarithms of the sums in float32.
    Otherwise the heads, the result of the softmax in float32 (float64 for float64), and for 16-bit
    dtypes the rounded weights; with dropout the heads, the scores in float32, the dropped weights
    and the key. There, memory grows with ``T * S``.

    Sharding: over batch and heads, without communication except for the gradient of what is
    broadcast. Under Explicit axes, heads of queries are gathered if the mesh does not divide the
    heads of keys. The length is sharded as XLA and ``jax.nn`` do: under Explicit axes, queries and
    keys may not be sharded over the same axis.

    Raises:
      TypeError: an argument is not an array, a dtype is not supported or the dtypes of queries,
        keys and values differ, a mask is not boolean, lengths or segments are not integers, or an
        option has another type than above.
      ValueError: shapes do not fit, an option is out of range, or one array of segments is given
        for queries and keys of different lengths.

    Source: FasterTransformer, the BERT encoder layer; ``jax.nn.dot_product_attention``.

    Example:
      >>> q = k = jnp.zeros((1, 3, 1, 2))
      >>> v = jnp.arange(6.0).reshape(1, 3, 1, 2)
      >>> fo.attention(q, k, v, segment_ids=jnp.array([[1, 1, 2]]))[0, :, 0].tolist()
      [[1.0, 2.0], [1.0, 2.0], [4.0, 5.0]]
    """
    op = "attention"
    arrays = as_arrays(op, query=query, key=key, value=value)
    query, key, value = map(not_weak, same_floating_dtype(op, arrays, ["query", "key", "value"]))
    batched = query.ndim == 4
    if query.ndim not in (3, 4):
        raise ValueError(
            f"{op}: query has shape {query.shape}; it must be [batch, length, heads, size] or "
            "[length, heads, size]"
        )
    for name, x in (("key", key), ("value", value)):
        fits = x.ndim == query.ndim and x.shape[-1] == query.shape[-1]
        if not fits or x.shape[:-3] != query.shape[:-3] or x.shape != key.shape:
            raise ValueError(
                f"{op}: {name} has shape {x.shape}, which does not fit query of shape "
                f"{query.shape} and key of shape {key.shape}"
            )
    _check_heads(op, query.shape[-2], key.shape[-2])
    query, key, value = (of_rank(x, 4) for x in (query, key, value))
    sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    call = _checked(
        op,
        query.shape[-1],
        sizes,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        return_residual=return_residual,
        segment_ids=segment_ids,
        max_segments=max_segments,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
    )
    y, sums = call(query, key, value, size=query.shape[-1])
    sums = _residual(call, sums, sizes, y.dtype) if return_residual else None
    results = [x if batched or x is None else jnp.squeeze(x, 0) for x in (y, sums)]
    return tuple(results) if return_residual else results[0]


def qkv_attention(
    qkv: ArrayLike,
    qkv_bias: ArrayLike | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    dropout_key: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
) -> Any:
    """Attention of the three parts of one projection.

    Equals :func:`attention` of the queries, keys and values in ``qkv + qkv_bias``, with the heads
    of the result merged.

    Args:
      qkv: array ``[B, L, (num_heads + 2 * num_kv_heads) * H]``, queries, then keys, then values, or
        ``[B, L, 3, num_heads, H]`` without ``num_kv_heads``, whose heads may be sharded, so that
        the kernel of one projection does not take it; float32, bfloat16, float16 or float64.
      qkv_bias: array with the shape of ``qkv`` without the first two dimensions, or ``None``.
      num_heads: the number of heads of queries.
      num_kv_heads: the number of heads of keys and of values, which divides ``num_heads``. Default:
        ``num_heads``.
      bias: as for :func:`attention`; likewise all that follow.
      mask: boolean array that broadcasts to ``[B, num_heads, L, L]``.
      scale: a Python or NumPy number. Default: ``1 / sqrt(H)``.
      is_causal: whether a query attends only to keys up to its own position.
      query_seq_lengths: integer array ``[B]``.
      key_value_seq_lengths: integer array ``[B]``.
      local_window_size: a number or a pair.
      return_residual: whether to also return the logarithms of the sums ``[B, L, num_heads]``.
      segment_ids: integer array ``[B, L]``, or a pair.
      max_segments: a static number.
      dropout_key: a key of ``jax.random``.
      dropout_rate: a static number in [0, 1].
      deterministic: whether the gradient must have the same bits in every run.

    Returns:
      An array ``[B, L, num_heads * H]`` of the dtype of ``qkv``; with ``return_residual`` a pair.

    Residuals: as :func:`attention`. cuDNN reads ``qkv`` in place, and writes its gradient as one
    array. Otherwise one pass splits ``qkv`` and adds the bias, and one pass of the backward merges
    the three cotangents and sums the gradient of the bias.

    Sharding: over the batch without communication. Features ``[B, L, F]`` that are sharded are
    gathered; heads of ``[B, L, 3, num_heads, H]`` stay sharded.

    Raises:
      TypeError, ValueError: as :func:`attention`; also if ``num_heads`` or ``num_kv_heads`` is not
        an integer, or does not fit the shape of ``qkv``.

    Source: FasterTransformer, the BERT encoder layer.

    Example:
      >>> fo.qkv_attention(jnp.ones((2, 5, 36)), jnp.zeros(36), num_heads=3).shape
      (2, 5, 12)
    """
    op = "qkv_attention"
    (qkv,) = map(not_weak, same_floating_dtype(op, as_arrays(op, qkv=qkv), ["qkv"]))
    num_heads = integer(op, "num_heads", num_heads)
    kv_heads = num_heads if num_kv_heads is None else integer(op, "num_kv_heads", num_kv_heads)
    _check_heads(op, num_heads, kv_heads)
    parts = num_heads + 2 * kv_heads
    packed = qkv.ndim == 3 and qkv.shape[-1] % parts == 0
    if not packed and (qkv.shape[2:-1] != (3, num_heads) or kv_heads != num_heads):
        raise ValueError(
            f"{op}: qkv has shape {qkv.shape}; it must be [batch, length, features], of which "
            f"num_heads + 2 * num_kv_heads = {parts} divides the features, or [batch, length, 3, "
            "num_heads, size], with as many heads of keys as of queries"
        )
    if qkv_bias is not None:
        (qkv_bias,) = as_arrays(op, qkv_bias=qkv_bias)
        if str(qkv_bias.dtype) not in FLOATING:
            raise TypeError(
                f"{op}: qkv_bias has dtype {qkv_bias.dtype} and shape {qkv_bias.shape}; the dtype "
                f"must be one of {', '.join(FLOATING)}"
            )
        if qkv_bias.shape != qkv.shape[2:]:
            raise ValueError(
                f"{op}: qkv_bias has shape {qkv_bias.shape}; it must be {qkv.shape[2:]}"
            )
    sizes = (qkv.shape[0], num_heads, qkv.shape[1], qkv.shape[1])
    options: dict[str, Any] = dict(
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        return_residual=return_residual,
        segment_ids=segment_ids,
        max_segments=max_segments,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
    )
    size = qkv.shape[-1] // (parts if packed else 1)
    call = _checked(op, size, sizes, bias, mask, **options)

    y, sums = attend(call, qkv, qkv_bias, num_heads, kv_heads)
    sums = _residual(call, sums, sizes, y.dtype) if return_residual else None
    return (y, sums) if return_residual else y


# ---- checks --------------------------------------------------------------------------------------


def _residual(call: Attend, sums, sizes: tuple, dtype) -> jax.Array:
    """The logarithms of the sums ``[batch, queries, heads]``, -inf for a query without keys."""
    where = call.masks.merged(*sizes[2:])
    if where is not None:
        sums = jnp.where(where.any(-1), sums, -jnp.inf)
    return jnp.swapaxes(sums, 1, 2).astype(dtype)


@own_code()
def _checked(
    op: str,
    size: int,
    sizes: tuple,
    bias,
    mask,
    *,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    return_residual,
    segment_ids,
    max_segments,
    dropout_key,
    dropout_rate,
    deterministic,
) -> Attend:
    """Checks all arguments but the heads.

    ``sizes`` are batch, heads, queries and keys. They say what masks must broadcast to.
    """
    flags = dict(is_causal=is_causal, return_residual=return_residual, deterministic=deterministic)
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{op}: {name} is {flag!r}; it must be True or False")
    most = 0 if max_segments is None else integer(op, "max_segments", max_segments)
    if max_segments is not None and most < 1:
        raise ValueError(f"{op}: max_segments is {max_segments}; it must be at least 1")
    scale = (
        1 / math.sqrt(max(size, 1))
        if scale is None
        else real_number(op, "scale", scale, " (multiply query by an array instead)")
    )
    batch, _, queries, keys = sizes
    segments = _segments(op, segment_ids, batch, queries, keys)
    masks = Masks(
        mask=_broadcastable(op, "mask", mask, sizes, ("bool",)),
        causal=bool(is_causal),
        window=_window(op, local_window_size),
        query_lengths=_lengths(op, "query_seq_lengths", query_seq_lengths, batch),
        key_lengths=_lengths(op, "key_value_seq_lengths", key_value_seq_lengths, batch),
        segments=segments,
    )
    return Attend(
        scale,
        _broadcastable(op, "bias", bias, sizes, FLOATING),
        masks,
        drop_of(op, "dropout_key", dropout_key, "dropout_rate", dropout_rate),
        bool(deterministic),
        most if segments is not None and segments[0] is segments[1] else 0,
        bool(return_residual),
    )


def _check_heads(op: str, heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{op}: there are {heads} heads of queries and {kv_heads} heads of keys; the second "
            "number must divide the first"
        )


def _broadcastable(op: str, name: str, value, sizes: tuple, dtypes: Sequence[str]):
    """An array that broadcasts to ``sizes``, with four dimensions."""
    if value is None:
        return None
    (x,) = as_arrays(op, **{name: value})
    if str(x.dtype) not in dtypes:
        raise TypeError(
            f"{op}: {name} has dtype {x.dtype} and shape {x.shape}; the dtype must be "
            f"{' or '.join(dtypes)}"
        )
    shape = (1,) * (4 - x.ndim) + x.shape
    if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, sizes, strict=True)):
        raise ValueError(
            f"{op}: {name} has shape {x.shape}, which does not broadcast to [batch, heads, "
            f"queries, keys], {sizes}"
        )
    return of_rank(x, 4)


def _window(op: str, size) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"{op}: local_window_size is {size!r}; it must be a number or a pair")
    if any(isinstance(each, (bool, np.bool_)) for each in pair):
        raise TypeError(f"{op}: local_window_size is {size!r}; it must be an integer or a pair")
    before, after = (integer(op, "local_window_size", each) for each in pair)
    if before < 0 or after < 0:
        raise ValueError(f"{op}: local_window_size is {size!r}; it must not be negative")
    return min(before, _LARGEST), min(after, _LARGEST)


def _integers(op: str, name: str, value, shape: tuple) -> jax.Array:
    (x,) = as_arrays(op, **{name: value})
    if not is_integer(x) or x.dtype == jnp.bool_:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}; it must have integers")
    if x.ndim == len(shape) - 1 and shape[0] == 1:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{op}: {name} has shape {x.shape}; it must be {shape}")
    return x


def _lengths(op: str, name: str, value, batch) -> jax.Array | None:
    if value is None:
        return None
    lengths = _integers(op, name, value, (batch,))
    if jnp.iinfo(lengths.dtype).max > _LARGEST:
        lengths = jnp.minimum(lengths, jnp.asarray(_LARGEST, lengths.dtype))
    return lengths.astype(jnp.int32)


def _segments(op: str, value, batch, queries, keys) -> tuple[jax.Array, jax.Array] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)):
        if queries != keys:
            raise ValueError(
                f"{op}: segment_ids is one array, and there are {queries} queries and {keys} keys; "
                "give a pair"
            )
        ids = _integers(op, "segment_ids", value, (batch, queries))
        return ids, ids
    if len(value) != 2:
        raise ValueError(
            f"{op}: segment_ids is a sequence of length {len(value)}; it must be an array or a "
            "pair of arrays"
        )
    first, second = (
        _integers(op, "segment_ids", ids, (batch, size))
        for ids, size in zip(value, (queries, keys), strict=True)
    )
    dtype = jnp.promote_types(first.dtype, second.dtype)
    return first.astype(dtype), second.astype(dtype)
