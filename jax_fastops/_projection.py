"""Attention of one projection: by the kernel of short sequences, by cuDNN, or by a softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._attention import Attend, Masks
from jax_fastops._broadcast import add, of_rank
from jax_fastops._dispatch import Refused
from jax_fastops._kernel import Kernel, partitions
from jax_fastops._op import Op
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge_last, split
from jax_fastops.heads import merge_heads, split_qkv_heads

_HEAD, _LENGTH = 64, 128  # of the kernel, as in src/short_attention/short_attention.h


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
        wide = qkv_bias.dtype if qkv_bias.dtype == qkv.dtype else accumulator_dtype(qkv.dtype)
        return add(qkv, of_rank(qkv_bias.astype(wide), qkv.ndim))

    def view(qkv):
        qkv = biased(qkv)
        if num_heads == kv_heads:
            return (split(qkv, 2, (3, num_heads, size)) if packed else qkv), None, None
        heads = split(qkv, 2, (parts, size))
        return jnp.split(heads, (num_heads, num_heads + kv_heads), axis=2)

    def by_softmax(call, qkv):
        if packed:
            heads = split_qkv_heads(qkv, qkv_bias, num_heads=num_heads, num_kv_heads=kv_heads)
            y, sums = call.by_softmax(*heads, layout="bnth")
            return merge_heads(y), sums
        heads = (jnp.squeeze(part, 2) for part in jnp.split(biased(qkv), 3, axis=2))
        y, sums = call.by_softmax(*heads)
        return merge_last(y), sums

    return call(qkv, size=size, view=view, otherwise=by_softmax)


# ---- the op: attention of short sequences --------------------------------------------------------

_KERNEL = Kernel.declare(
    "short_attention",
    "qkv: ... t a, bias?: a :acc?, mask?: ... t :bool -> y: ... t ceil(a/3)",
    scale=np.float64,
)


def _forward(qkv, bias, mask, *, heads: int, scale: float):
    del heads  # of 64 elements
    if partitions() > 1:  # which may shard the heads
        raise Refused("the program is for several devices")
    return _KERNEL(qkv, bias, mask, scale=scale).y


def _reference(qkv, bias, mask, *, heads: int, scale: float):
    if mask is not None:
        mask = mask.reshape(-1, 1, 1, mask.shape[-1])
    call = Attend(scale, None, Masks(mask), None, False, 0, False)
    y, _ = by_engines(call, qkv.reshape(-1, *qkv.shape[-2:]), bias, heads, heads)
    return y.reshape(*qkv.shape[:-1], y.shape[-1])


_OP = Op(
    "short_attention",
    "... t a, a, ... t -> ... t ceil(a/3)",
    _reference,
    family="attention",
    kernels=(_KERNEL,),
    forward=_forward,
    data=(2,),
    shared={"qkv_bias": 1},
)


def attend(
    call: Attend, qkv: Any, qkv_bias: Any, num_heads: int, kv_heads: int
) -> tuple[jax.Array, jax.Array | None]:
    """As :func:`by_engines`, and by the kernel of short sequences where it is faster."""
    mask = _mask_of_keys(call, qkv)
    if mask is False or num_heads != kv_heads or qkv.shape[-1] != 3 * num_heads * _HEAD:
        return by_engines(call, qkv, qkv_bias, num_heads, kv_heads)
    limit = None
    if str(qkv.dtype) not in ("bfloat16", "float16"):
        limit = f"the kernel takes bfloat16 and float16, not {qkv.dtype}"
    elif 0 in qkv.shape:
        limit = "there are no elements"
    bias = qkv_bias
    if bias is not None and bias.dtype not in (qkv.dtype, accumulator_dtype(qkv.dtype)):
        bias = bias.astype(accumulator_dtype(qkv.dtype))

    def otherwise(qkv, bias, mask):
        return by_engines(call, qkv, qkv_bias, num_heads, kv_heads)[0]

    operands, options = (qkv, bias, mask), dict(heads=num_heads, scale=call.scale)
    y = _OP(*operands, limit=limit, otherwise=otherwise, composed=True, **options)
    return y, None


def _mask_of_keys(call: Attend, qkv) -> Any:
    """The mask ``[B, L]`` of keys, ``None``, or False if the kernel cannot take the call."""
    masks = call.masks
    whole = masks._replace(mask=None) == Masks() and call.drop is None and not call.residual
    if not whole or call.bias is not None or qkv.ndim != 3:
        return False
    batch, length = qkv.shape[:2]
    if not isinstance(length, int) or length > _LENGTH:
        return False
    if masks.mask is None:
        return None
    if masks.mask.shape[1:] != (1, 1, length):
        return False
    return jnp.broadcast_to(masks.mask[:, 0, 0], (batch, length))
