"""The ops of the networks in plain JAX, as a careful user writes them, for ``PLAIN``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import jax
import jax.numpy as jnp

import jax_fastops as fo
from jax_fastops.bias_act import ACTIVATIONS
from jax_fastops.models._products import (
    accumulator_dtype,
    biased,
    dot,
    of_rank,
    same_segment,
    softcapped,
    wide_product,
)
from jax_fastops.models._sharding import explicit_spec


def _row(vector, x):
    """A vector over the last axis of ``x``, in its dtype and rank."""
    return of_rank(vector.astype(x.dtype), x.ndim)


def split_qkv_heads(qkv, bias=None, *, num_heads: int):
    if bias is not None:
        qkv = biased(qkv, bias)
    if num_heads == 1:
        # The gradient of a split is a concatenation. That of indexing is a sum with zeros.
        return tuple(part[..., None, :, :] for part in jnp.split(qkv, 3, axis=-1))
    *lead, features = qkv.shape
    qkv = qkv.reshape(*lead, 3, num_heads, features // (3 * num_heads))
    return tuple(jnp.swapaxes(qkv[..., part, :, :], -3, -2) for part in range(3))


def merge_heads(x):
    x = jnp.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def dropout(x, key, rate: float):
    """Dropout with the masks of this package."""
    if key is None or rate == 0:
        return x
    keep = fo.dropout_mask(key, x.shape, rate)
    if explicit_spec(x) is not None:
        keep = jax.sharding.reshard(keep, jax.typeof(x).sharding)
    # A divisor in bfloat16 would be rounded, which scales every element wrongly.
    scaled = (x.astype(accumulator_dtype(x.dtype)) / (1 - rate)).astype(x.dtype)
    return jnp.where(keep, scaled, jnp.zeros_like(x))


def softmax(
    x,
    axis=-1,
    where=None,
    *,
    scale: float = 1.0,
    dropout_key=None,
    dropout_rate: float = 0.0,
    dropout=dropout,
):
    y = jax.nn.softmax(x * scale, axis=axis, where=where)
    return dropout(y, dropout_key, dropout_rate)


def qkv_attention(
    qkv,
    qkv_bias=None,
    *,
    num_heads: int,
    mask=None,
    segment_ids=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    dropout_key=None,
    dropout_rate: float = 0.0,
    softmax=softmax,
):
    """Heads before the sequence, as models usually write it.

    It takes a mask, segments, or lengths. Queries after the end have any result.
    """
    del query_seq_lengths
    qkv = qkv if qkv_bias is None else biased(qkv, qkv_bias)
    mask = mask if segment_ids is None else same_segment(segment_ids)
    if key_value_seq_lengths is not None:
        place = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]
        mask = (place < key_value_seq_lengths[:, None])[:, None, None]
    if qkv.ndim == 3:
        q, k, v = split_qkv_heads(qkv, num_heads=num_heads)
    else:
        q, k, v = (jnp.swapaxes(part[:, :, 0], 1, 2) for part in jnp.split(qkv, 3, axis=2))
    p = softmax(
        jnp.einsum("bhqd,bhkd->bhqk", q, k),
        where=mask,
        scale=q.shape[-1] ** -0.5,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
    )
    return merge_heads(jnp.einsum("bhqk,bhkd->bhqd", p, v))


def attention(
    query,
    key,
    value,
    *,
    mask=None,
    scale=None,
    softcap=None,
    is_causal=False,
    local_window_size=None,
    segment_ids=None,
    max_segments=None,
    dropout_key=None,
    dropout_rate: float = 0.0,
    softmax=softmax,
):
    """The mask is the same for all heads, or segments. A window needs ``is_causal``."""
    del max_segments  # which only cuDNN uses
    mask = mask if segment_ids is None else same_segment(segment_ids)
    kv_heads, size = key.shape[2:]
    grouped = query.reshape(*query.shape[:2], kv_heads, query.shape[2] // kv_heads, size)
    # Wide scores, or the softcap would round them twice more.
    product = jnp.einsum if softcap is None else wide_product
    scores = product("bqngd,bknd->bngqk", grouped, key)
    where = None if mask is None else mask[:, :, None]
    if is_causal:
        at, other = (jnp.arange(n, dtype=jnp.int32) for n in scores.shape[3:])
        causal = other[None] <= at[:, None]
        if local_window_size is not None:
            causal &= other[None] >= at[:, None] - local_window_size[0]
        causal = of_rank(causal, 5)
        where = causal if where is None else where & causal
    scale = size**-0.5 if scale is None else scale
    if softcap is not None:
        scores, scale = softcap * jnp.tanh(scores * (scale / softcap)), 1.0
    p = softmax(
        scores,
        where=where,
        scale=scale,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
    )
    p = p.astype(value.dtype)
    return jnp.einsum("bngqk,bknd->bqngd", p, value).reshape(query.shape)


def residual_layer_norm(
    x,
    residual,
    scale=None,
    bias=None,
    *,
    input_bias=None,
    dropout_key=None,
    dropout_rate: float = 0.0,
    eps: float = 1e-6,
    return_sum=False,
    fanout=False,
    dropout=dropout,
):
    if input_bias is not None:
        x = biased(x, input_bias)
    x = dropout(x, dropout_key, dropout_rate) + residual
    y = layer_norm(x, scale, bias, eps=eps, fanout=fanout)
    return (y, x) if return_sum else y


def layer_norm(x, scale=None, bias=None, *, eps: float = 1e-6, fanout=False):
    """Layer norm in float32 (float64 for float64), rounded once, as models usually write it."""
    wide = x.astype(accumulator_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * _row(scale, y)
    y = (y if bias is None else biased(y, bias)).astype(x.dtype)
    return (y, y) if fanout else y


def bias_act(x, bias, *, activation: str = "gelu"):
    return ACTIVATIONS[activation](biased(x, bias))


def dense_act(x, kernel, bias=None, *, activation: str = "gelu"):
    y = dot(x, kernel)
    return ACTIVATIONS[activation](y if bias is None else biased(y, bias))


def linear_cross_entropy(
    x,
    table,
    labels,
    *,
    bias=None,
    where=None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    precision=None,
):
    """All logits at once, in the dtype of ``x``; the losses in float32 (float64 for float64)."""
    del chunk
    logits = jnp.einsum("...e,ve->...v", x, table.astype(x.dtype), precision=precision)
    logits = logits if bias is None else biased(logits, bias)
    logits = softcapped(logits.astype(accumulator_dtype(x.dtype)), softcap)
    counted = labels >= 0
    counted = counted if where is None else counted & where
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    # A masked sum instead of an indexed read, whose gradient would be a scatter.
    classes = table.shape[0]
    at_label = of_rank(jnp.arange(classes, dtype=labels.dtype), logits.ndim) == labels[..., None]
    lse = jax.nn.logsumexp(logits, -1)
    picked = jnp.sum(jnp.where(at_label, logits, 0), -1)
    each = lse - jnp.where(labels < classes, picked, jnp.nan)
    if label_smoothing:
        each = (1 - label_smoothing) * each + label_smoothing * (lse - jnp.mean(logits, -1))
    each = each + z_loss * jnp.square(lse) if z_loss else each
    each = jnp.where(counted, each, 0)
    if reduction == "none":
        return each
    count = jnp.maximum(jnp.sum(counted, dtype=each.dtype), 1) if reduction == "mean" else 1
    return jnp.sum(each) / count


def rms_norm(x, scale, *, eps: float):
    """RMS norm in float32 (float64 for float64), rounded once."""
    wide = x.astype(accumulator_dtype(x.dtype))
    y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (y * _row(scale, y)).astype(x.dtype)


def residual_rms_norm(x, residual, scale, *, input_bias=None, eps: float, return_sum: bool):
    x = residual + (x if input_bias is None else biased(x, input_bias))
    y = rms_norm(x, scale, eps=eps)
    return (y, x) if return_sum else y


def gated_act(gate, up=None, *, activation: str = "silu"):
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    return ACTIVATIONS[activation](gate) * up


def split_grouped_heads(
    qkv, bias=None, *, num_heads: int, num_kv_heads: int, rotary, q_scale, k_scale, eps, layout
):
    assert layout == "sequence_first"
    qkv = qkv if bias is None else biased(qkv, bias)
    d = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.reshape(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, d)
    q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=-2)
    q = q if q_scale is None else rms_norm(q, q_scale, eps=eps)
    k = k if k_scale is None else rms_norm(k, k_scale, eps=eps)
    return (q, k, v) if rotary is None else (rotated(q, *rotary), rotated(k, *rotary), v)


def rotated(x, cos, sin):
    cos, sin = (of_rank(turn[..., None, :], x.ndim) for turn in (cos, sin))
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def plain_batch_norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: Literal["relu"] | None = None,
    residual: jax.Array | None = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    fanout: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """:func:`jax_fastops.batch_norm` as it is usually written in ``jax.numpy``.

    The statistics are float32 (float64 for float64). The variance is ``mean(x**2) - mean(x)**2``,
    as in Flax: one pass over ``x``, whose difference cancels if the mean is far larger than the
    deviation. The result is rounded to the dtype of ``x``; then residual and ReLU follow.

    Arguments and results are those of :func:`jax_fastops.batch_norm`. They are not checked.

    Example:
      >>> y, mean, var = resnet.plain_batch_norm(jnp.array([[1.0], [3.0]]), None, None)
      >>> mean.tolist(), var.tolist()
      ([2.0], [1.0])
    """
    wide = x.astype(accumulator_dtype(x.dtype))
    axes = tuple(k for k in range(x.ndim) if k != axis % x.ndim)
    mean, squares = jnp.mean(wide, axes), jnp.mean(jnp.square(wide), axes)
    if axis_name is not None:
        mean, squares = jax.lax.pmean((mean, squares), axis_name)
    var = jnp.maximum(squares - jnp.square(mean), 0.0)
    y = plain_batch_norm_inference(
        x, mean, var, scale, bias, axis=axis, eps=eps, activation=activation, residual=residual
    )
    return (y, y) if fanout else y, mean, var


def plain_batch_norm_inference(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: Literal["relu"] | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """:func:`jax_fastops.batch_norm_inference` as it is usually written in ``jax.numpy``.

    Arguments and result are those of that function. They are not checked.

    Example:
      >>> x, mean, var = jnp.array([[3.0]]), jnp.array([1.0]), jnp.array([4.0])
      >>> resnet.plain_batch_norm_inference(x, mean, var, None, None, eps=0.0).tolist()
      [[1.0]]
    """
    wide = x.astype(accumulator_dtype(x.dtype))

    def along(values):
        shape = [-1 if k == axis % x.ndim else 1 for k in range(x.ndim)]
        return values.astype(wide.dtype).reshape(shape)

    factor = jax.lax.rsqrt(along(var) + eps)
    y = (wide - along(mean)) * (factor if scale is None else factor * along(scale))
    y = (y if bias is None else y + along(bias)).astype(x.dtype)
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if activation == "relu" else y


# Sizes, strides and padding of the windows of ResNet's max pooling.
IMAGE_WINDOWS = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))


def plain_max_pool(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """The maxima of 3x3 windows at stride 2, ``[n, h, w, c]`` to ``[n, ceil(h/2), ceil(w/2), c]``.

    The padding is one row or column of minus infinity on each side. The gradient is XLA's
    select-and-scatter, which keeps ``x`` and searches for the maxima again. Arguments are those of
    :func:`jax_fastops.models.resnet.max_pool`, and are not checked.

    Example:
      >>> resnet.plain_max_pool(jnp.ones((1, 5, 5, 2))).shape
      (1, 3, 3, 2)
    """

    def pool(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *IMAGE_WINDOWS)

    if scale is None:
        return pool(x)
    sign = of_rank(jnp.where(scale < 0, -1, 1).astype(x.dtype), x.ndim)
    return sign * pool(sign * x)


def take(table, indices):
    return table.at[indices].get(mode="fill")
