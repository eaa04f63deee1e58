"""Attention of one projection: by a kernel of its own, by cuDNN, or by a softmax."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops import _dispatch, _implementation
from jax_fastops._attention import Attend, Masks, over_leading
from jax_fastops._broadcast import add, of_rank
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge_last, split, whole
from jax_fastops.heads import merge_heads, split_qkv_heads

_HEAD, _LENGTH = 64, 4096  # of the kernels, as in src/short_attention/short_attention.h


def by_engines(
    call: Attend, qkv: Any, qkv_bias: Any, num_heads: int, kv_heads: int
) -> tuple[jax.Array, jax.Array | None]:
    """The result of ``qkv + qkv_bias``, and the logarithms of the sums, by cuDNN or a softmax.

    Args:
      call: the arguments without heads.
      qkv: ``[B, L, (num_heads + 2 * kv_heads) * H]`` or ``[B, L, 3, num_heads, H]``.
      qkv_bias: with the shape of ``qkv`` without the first two dimensions, or ``None``.
      num_heads: the number of heads of queries.
      kv_heads: that of keys.
    """
    parts, packed = num_heads + 2 * kv_heads, qkv.ndim == 3
    size = qkv.shape[-1] // (parts if packed else 1)

    def biased(qkv):
        if qkv_bias is None:
            return qkv
        return add(qkv, of_rank(_wide(qkv_bias, qkv), qkv.ndim))

    def view(qkv):
        qkv = biased(qkv)
        if num_heads == kv_heads:
            return (split(qkv, 2, (3, num_heads, size)) if packed else qkv), None, None
        heads = split(qkv, 2, (parts, size))
        return jnp.split(heads, (num_heads, num_heads + kv_heads), axis=2)

    def by_softmax(call, qkv):
        if packed:
            q, *both = split_qkv_heads(qkv, qkv_bias, num_heads=num_heads, num_kv_heads=kv_heads)
            # Where rows are sharded, XLA might gather the queries, and then the scores.
            y, sums = call.by_softmax(q, *(whole(x, 2) for x in both), layout="bnth")
            return merge_heads(y), sums
        q, *both = (jnp.squeeze(part, 2) for part in jnp.split(biased(qkv), 3, axis=2))
        y, sums = call.by_softmax(q, *(whole(x, 1) for x in both))
        return merge_last(y), sums

    return call(qkv, size=size, view=view, otherwise=by_softmax)


def _wide(bias, qkv):
    """A bias in the dtype of the projection, or in that of its sums."""
    return bias if bias.dtype == qkv.dtype else bias.astype(accumulator_dtype(qkv.dtype))


# ---- the ops: attention of one projection, of a batch and of a list ------------------------------

_KERNEL = Kernel.declare(
    "short_attention",
    "qkv: ... t a, bias?: a :acc?, mask?: ... t :bool, q_lengths?: ... :int32, "
    "kv_lengths?: ... :int32 -> y: ... t ceil(a/3)",
    scale=np.float64,
)


def _forward(*operands, heads: int, scale: float):
    del heads  # of 64 elements
    return _KERNEL(*operands, scale=scale).y


def _reference(qkv, bias, mask, q_lengths, kv_lengths, *, heads: int, scale: float):
    if bias is not None:  # of the dtype of the product, into whose epilogue XLA may put it
        bias = bias.astype(qkv.dtype)

    def example(qkv, mask, q_lengths, kv_lengths):
        if mask is not None:
            mask = mask[:, None, None]
        masks = Masks(mask, query_lengths=q_lengths, key_lengths=kv_lengths)
        call = Attend(scale, None, masks, None, False, 0, False)
        return by_engines(call, qkv, bias, heads, heads)[0]

    return over_leading(example, 3)(qkv, mask, q_lengths, kv_lengths)


_OP = Op(
    "short_attention",
    "... t a, a, ... t, ..., ... -> ... t ceil(a/3)",
    _reference,
    family="attention",
    kernels=(_KERNEL,),
    forward=_forward,
    data=(2, 3, 4),
    shared={"qkv_bias": 1},
)

_LIST_KERNEL = Kernel.declare(
    "list_attention",
    "qkv: ... t a, bias?: a :acc?, offsets: ... n :int32 -> y: ... t ceil(a/3)",
    scale=np.float64,
    length=np.int64,
)


def _list_forward(*operands, heads: int, scale: float, length: int):
    del heads
    return _LIST_KERNEL(*operands, scale=scale, length=length).y


def _list_reference(qkv, bias, offsets, *, heads: int, scale: float, length: int):
    def example(qkv, offsets):
        size = qkv.shape[0]
        starts, counts = offsets[:-1, None], jnp.diff(offsets)
        place = jnp.arange(length, dtype=jnp.int32)
        rows = _filled(qkv, jnp.where(place < counts[:, None], starts + place, size))
        y = _reference(rows, bias, None, counts, counts, heads=heads, scale=scale)
        at = jnp.arange(size, dtype=jnp.int32)
        row = (offsets[1:] <= at[:, None]).sum(1, dtype=jnp.int32)
        in_rows = row * length + at - starts[jnp.minimum(row, counts.size - 1), 0]
        inside = at < offsets[-1]
        y = y.reshape(-1, y.shape[-1])
        return _filled(y, jnp.where(inside, in_rows, y.shape[0]))

    return over_leading(example, 2)(qkv, offsets)


def _filled(x, index):
    return x.at[index].get(mode="fill", fill_value=0)


_LIST_OP = Op(
    "list_attention",
    "... t a, a, ... n -> ... t ceil(a/3)",
    _list_reference,
    family="attention",
    kernels=(_LIST_KERNEL,),
    forward=_list_forward,
    data=(2,),
    shared={"qkv_bias": 1},
)


def attend_list(qkv: Any, qkv_bias: Any, offsets: Any, *, length: int, num_heads: int) -> jax.Array:
    """Attention of a list of sequences, each of which sees itself.

    Args:
      qkv: ``[T, 3 * num_heads * 64]``, the sequences one after the other.
      qkv_bias: ``[3 * num_heads * 64]``.
      offsets: int32 ``[n + 1]``, at least two: where the sequences begin, and where the last one
        ends, at most at ``T``. The result is 0 after that.
      length: of the longest sequence, at most 4096.
      num_heads: the number of heads.

    Returns:
      ``[T, num_heads * 64]``.
    """
    qkv_bias = _wide(qkv_bias, qkv)
    options = dict(heads=num_heads, scale=1 / math.sqrt(_HEAD), length=length)
    return _LIST_OP(qkv, qkv_bias, offsets, features={"keys": length}, **options)


def takes_bias(qkv: Any, num_heads: int, longest: int | None = None) -> bool:
    """Whether a kernel adds the bias of such a projection ``[B, L, features]``.

    It does so in calls that are not differentiated and have only lengths or a mask of keys.
    ``longest`` is given for a list ``[1, T, features]``: the length of the longest sequence.
    """
    length = qkv.shape[1] if longest is None else longest
    if not _fits(qkv, num_heads, length):
        return False
    op, features = _OP if longest is None else _LIST_OP, (("keys", length),)
    request = _dispatch.Request(_implementation.current(), op.name, str(qkv.dtype), features)
    return op.decide(request, _dispatch.lowering_platform()).forward.kernel


def _fits(qkv: Any, num_heads: int, length: Any) -> bool:
    """Whether the kernels have the dtype, the length and the heads."""
    return (
        str(qkv.dtype) in ("bfloat16", "float16")
        and isinstance(length, int)
        and 0 < length <= _LENGTH
        and 0 not in qkv.shape
        and qkv.ndim == 3
        and qkv.shape[2] == 3 * num_heads * _HEAD
    )


def attend(
    call: Attend, qkv: Any, qkv_bias: Any, num_heads: int, kv_heads: int
) -> tuple[jax.Array, jax.Array | None]:
    """The result by the kernel where it is faster, and otherwise by :func:`by_engines`."""
    masks, length = call.masks, qkv.shape[1]
    only_keys = masks.mask is None or masks.mask.shape[1:] == (1, 1, length)
    others = masks._replace(mask=None, query_lengths=None, key_lengths=None) != Masks()
    if (
        not _fits(qkv, num_heads, length)
        or num_heads != kv_heads
        or not only_keys
        or others
        or call.bias is not None
        or call.drop is not None
        or call.residual
    ):
        return by_engines(call, qkv, qkv_bias, num_heads, kv_heads)
    mask, bias = masks.mask, qkv_bias
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, 0, 0], qkv.shape[:2])
    if bias is not None:
        bias = _wide(bias, qkv)

    def otherwise(qkv, bias, *masks):
        return by_engines(call, qkv, bias, num_heads, kv_heads)[0]

    operands = (qkv, bias, mask, masks.query_lengths, masks.key_lengths)
    features, options = {"keys": length}, dict(heads=num_heads, scale=call.scale)
    y = _OP(*operands, features=features, otherwise=otherwise, composed=True, **options)
    return y, None
