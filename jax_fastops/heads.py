"""``split_heads``, ``split_qkv_heads`` and ``merge_heads``: between features and attention heads.

The kernel adds the bias while it moves the elements, and sums the bias gradient while it moves
the cotangents back, in partial sums over groups of rows, which XLA adds up. Each pass reads and
writes every element once. Without a bias, splitting and merging are transpositions. Grouped heads,
norms of queries and keys, and rotary embedding have a second pair of kernels, which do all of it in
one pass.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fastops._arguments import FLOATING, as_arrays, broadcasts, epsilon, integer, one_of
from jax_fastops._broadcast import of_rank
from jax_fastops._dispatch import by_width
from jax_fastops._heads_kernels import (
    MERGE,
    ORDERS,
    ROTARY,
    ROTARY_BACK,
    SPLIT,
    rotary_backward,
    rotary_forward,
    split_backward,
    split_forward,
)
from jax_fastops._heads_reference import (
    add_bias,
    rotary_pullback,
    rotary_pushforward,
    rotary_reference,
    split_and_rotate,
    split_pullback,
    split_reference,
)
from jax_fastops._native import limit
from jax_fastops._op import Op
from jax_fastops._registry import example, register
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge_last, spec_of, split_last
from jax_fastops.transpose import is_movable, permute

# ---- ops -----------------------------------------------------------------------------------------


_SIZES = {"b": (2, 1), "s": (64, 7)}


def _declare(name: str, parts: int) -> Op:
    results = ", ".join(["... h *s d"] * parts)
    return Op(
        name,
        f"... *s f, f -> {results}",
        split_reference,
        family="heads",
        example=example(
            lambda x, bias: globals()[name](x, bias, num_heads=3),
            "b s f, f",
            **_SIZES | {"f": (192 * parts, 15 * parts)},
        ),
        kernels=(SPLIT, MERGE),
        forward=split_forward,
        residuals=lambda args, outs, saved: (),
        pullback=split_pullback,
        pushforward=lambda residuals, tangents, **options: split_reference(*tangents, **options),
        backward=split_backward,
        tangent=lambda residuals, tangents, **options: split_forward(*tangents, **options),
        dtype_class=by_width,
        shared={"bias": 1},
    )


_OPS = {1: _declare("split_heads", 1), 3: _declare("split_qkv_heads", 3)}


def _rotary_residuals(args, outs, saved):
    """Without a norm, the derivative depends on the angles only."""
    del outs, saved
    *others, turns = args
    if others[2] is None and others[3] is None:
        return None, None, None, None, turns
    return args


def _rotary_example(x, scale):
    angles = jnp.outer(jnp.arange(x.shape[-2], dtype=jnp.float32), jnp.ones(2))
    scales = dict(q_scale=scale, k_scale=scale)
    return split_qkv_heads(x, num_heads=4, num_kv_heads=2, rotary=angles, **scales)


_ROTARY_OP = Op(
    "split_qkv_heads_rotary",
    "... *s f, f, d, d, ~... *s r -> ... h *s d, ... n *s d, ... n *s d",
    rotary_reference,
    family="heads",
    example=example(_rotary_example, "b s f, d", **_SIZES, f=(512, 40), d=(64, 5)),
    kernels=(ROTARY[True], ROTARY_BACK[True, False]),
    forward=rotary_forward,
    residuals=_rotary_residuals,
    pullback=rotary_pullback,
    pushforward=rotary_pushforward,
    backward=rotary_backward,
    data=(4,),
    dtype_class=by_width,
    shared={"bias": 1, "q_scale": 2, "k_scale": 3},
)


# A view of a transposition.
_MERGED = example(lambda x: merge_heads(x), "b h s d", **_SIZES, h=(3, 3), d=(64, 5))
register("heads", "merge_heads", _MERGED)


def _apply(name: str, x, bias, num_heads, parts: int) -> Any:
    x, bias, num_heads, head_size, _ = _check(name, x, bias, num_heads, parts)
    options: dict[str, Any] = dict(num_heads=num_heads, parts=parts)
    if not is_movable(x.dtype):
        return split_reference(x, bias, **options)
    if parts == 1 and (bias is None or (spec_of(x) or (None,))[-1] is not None):
        # XLA adds the bias, and a transposition remains.
        return _swap(split_last(add_bias(x, bias), (num_heads, head_size)))
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.astype(accumulator_dtype(x.dtype))
    results = ", ".join([f"... {num_heads} *s {head_size}"] * parts)
    signature = f"... *s {x.shape[-1]}, {x.shape[-1]} -> {results}"
    size = head_size * x.dtype.itemsize
    whole, biased = size % 16 == 0, bias is not None  # other heads add a bias element by element
    features = dict(head_bytes=size, whole_bias=biased and whole, odd_bias=biased and not whole)
    return _OPS[parts](
        x, bias, signature=signature, limit=_limit(x, bias), features=features, **options
    )


def _limit(x, bias) -> str | None:
    if 0 in x.shape:
        return "there are no elements"
    if not all(isinstance(d, int) for d in x.shape[-2:]):
        return "the sequence or the features have a symbolic size"
    if bias is not None and str(x.dtype) not in FLOATING:
        return f"the kernel does not take the dtype {x.dtype}"
    return None


def _swap(x):
    """Exchanges the sequence and the heads, which no matrix product of attention can absorb."""
    n = x.ndim
    return permute(x, (*range(n - 3), n - 2, n - 3, n - 1))


def _check(name: str, x, bias, num_heads, parts: int, kv_heads=None):
    """The checked arguments: the arrays, ``num_heads``, the size of a head, ``num_kv_heads``."""
    argument = "x" if parts == 1 else "qkv"
    x, *rest = as_arrays(name, **{argument: x}, **({} if bias is None else {"bias": bias}))
    bias = rest[0] if rest else None
    num_heads = integer(name, "num_heads", num_heads)
    kv_heads = num_heads if kv_heads is None else integer(name, "num_kv_heads", kv_heads)
    if x.ndim < 2:
        raise ValueError(
            f"{name}: {argument} has shape {x.shape}; it must have at least 2 dimensions, "
            "[..., sequence, features]"
        )
    features = x.shape[-1]
    if num_heads < 1:
        raise ValueError(f"{name}: num_heads is {num_heads}; it must be at least 1")
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(
            f"{name}: num_kv_heads is {kv_heads}; it must divide num_heads, {num_heads}"
        )
    heads = num_heads if parts == 1 else num_heads + 2 * kv_heads
    if features % heads != 0:
        pieces = f"{num_heads}" if parts == 1 else f"3 * num_heads = {heads}"
        if kv_heads != num_heads:
            pieces = f"num_heads + 2 * num_kv_heads = {heads}"
        raise ValueError(
            f"{name}: num_heads is {num_heads}, and the last axis of {argument}, of shape "
            f"{x.shape}, cannot be divided into {pieces} equal parts"
        )
    checked = x, bias, num_heads, features // heads, kv_heads
    if bias is None:
        return checked
    if bias.shape != (features,):
        raise ValueError(
            f"{name}: bias has shape {bias.shape}; it must be ({features},), the last axis of "
            f"{argument}"
        )
    both_floating = str(x.dtype) in FLOATING and str(bias.dtype) in FLOATING
    if bias.dtype != x.dtype and not both_floating:
        raise TypeError(
            f"{name}: bias has dtype {bias.dtype} and {argument} has dtype {x.dtype}; they must be "
            f"the same, or both be among {', '.join(FLOATING)}"
        )
    return checked


def split_heads(x: ArrayLike, bias: ArrayLike | None = None, *, num_heads: int) -> jax.Array:
    """Adds a bias and splits features into heads: ``[..., S, H*D]`` to ``[..., H, S, D]``.

    Equals ``jnp.swapaxes((x + bias).reshape(..., S, H, D), -3, -2)``, in one pass.

    Args:
      x: array ``[..., S, H*D]`` of any dtype, with any number of leading dimensions.
      bias: array ``[H*D]``, or ``None``. It has the dtype of ``x``, or both are floating-point and
        the sum is rounded once from float32 (float64 for float64) to the dtype of ``x``.
      num_heads: ``H``, which divides the last axis of ``x``.

    Returns:
      An array ``[..., H, S, D]`` with the dtype of ``x``.

    Residuals: none. The kernel sums the bias gradient in float32 (float64 for float64), the
    reference in the dtype of the bias.

    Sharding: over the leading dimensions and the sequence, and without a bias over the heads if the
    number of devices divides ``num_heads``. There is no communication except an all-reduce of the
    bias gradient. With a bias, features that are sharded over an auto mesh axis are gathered; over
    an explicit one, XLA adds the bias and the kernel moves the sum. Under auto axes, a device needs
    32 rows of the sequence or more; otherwise the backward of a bias gathers the sequence.

    Raises:
      TypeError: ``x`` or ``bias`` is not an array, ``num_heads`` is not an integer, or the dtypes
        are not compatible.
      ValueError: ``x`` has fewer than two dimensions, ``num_heads`` does not divide the last axis,
        or ``bias`` has another shape.

    Source: FasterTransformer, ``add_QKV_bias``.

    Example:
      >>> fo.split_heads(jnp.ones((2, 5, 12)), jnp.zeros(12), num_heads=3).shape
      (2, 3, 5, 4)
    """
    return _apply("split_heads", x, bias, num_heads, 1)


def _angles(name: str, rotary, x, head_size: int) -> tuple:
    """Cosines and sines in the accumulator dtype, or ``(None, None)``."""
    if rotary is None:
        return None, None
    pair = isinstance(rotary, (tuple, list))
    if pair and len(rotary) != 2:
        raise ValueError(
            f"{name}: rotary has {len(rotary)} arrays; it must be an array of angles, or two "
            "arrays, of cosines and sines"
        )
    names = ["rotary[0]", "rotary[1]"] if pair else ["rotary"]
    given = as_arrays(name, **dict(zip(names, rotary if pair else [rotary], strict=True)))
    for what, array in zip(names, given, strict=True):
        if str(array.dtype) not in FLOATING:
            raise TypeError(
                f"{name}: {what} has dtype {array.dtype} and shape {array.shape}; the dtype must "
                f"be one of {', '.join(FLOATING)}"
            )
        lead = (*x.shape[:-1], array.shape[-1] if array.ndim else 0)
        if array.ndim < 2 or not broadcasts(array.shape, lead):
            raise ValueError(
                f"{name}: {what} has shape {array.shape}; it must have 2 dimensions or more, and "
                f"broadcast to {x.shape[:-1]} and the number of rotated pairs"
            )
        sizes = 2 * array.shape[-1], head_size
        if all(isinstance(n, int) for n in sizes) and sizes[0] > sizes[1]:  # not symbolic
            raise ValueError(
                f"{name}: {what} has shape {array.shape}, for {2 * array.shape[-1]} elements of "
                f"each head; a head has {head_size}"
            )
    if given[0].shape != given[-1].shape:
        raise ValueError(
            f"{name}: rotary[0] has shape {given[0].shape} and rotary[1] has shape "
            f"{given[1].shape}; they must be the same"
        )
    if given[0].shape[-1] == 0:
        return None, None
    wide = accumulator_dtype(x.dtype)
    if not pair:  # large angles need their digits
        angles = given[0].astype(jnp.promote_types(given[0].dtype, wide))
        given = [jnp.cos(angles), jnp.sin(angles)]
    return tuple(array.astype(wide) for array in given)


def _turns(cos, sin, x):
    """The cosines and the sines of each token in one array, with the rank of ``x``."""
    turns = jnp.concatenate((cos, sin), axis=-1)
    shape = (*turns.shape[:-2], x.shape[-2], turns.shape[-1])
    return of_rank(turns if shape == turns.shape else jnp.broadcast_to(turns, shape), x.ndim)


def _scale(name: str, what: str, value, x, head_size: int):
    if value is None:
        return None
    (value,) = as_arrays(name, **{what: value})
    if value.shape != (head_size,):
        raise ValueError(
            f"{name}: {what} has shape {value.shape}; it must be ({head_size},), the size of a head"
        )
    if str(value.dtype) not in FLOATING:
        raise TypeError(
            f"{name}: {what} has dtype {value.dtype}; it must be one of {', '.join(FLOATING)}"
        )
    return value if value.dtype == x.dtype else value.astype(accumulator_dtype(x.dtype))


def _split_rotary(qkv, bias, num_heads, kv_heads, rotary, scales, eps, interleaved, heads_first):
    """``split_qkv_heads`` by the kernels with arithmetic. Grouped heads need no arithmetic."""
    name = "split_qkv_heads"
    x, bias, num_heads, size, kv_heads = _check(name, qkv, bias, num_heads, 3, kv_heads)
    floating = str(x.dtype) in FLOATING
    if not floating and (rotary is not None or any(s is not None for s in scales)):
        raise TypeError(
            f"{name}: qkv has dtype {x.dtype}; with rotary, q_scale or k_scale it must be one of "
            f"{', '.join(FLOATING)}"
        )
    q_scale, k_scale = (
        _scale(name, what, value, x, size)
        for what, value in zip(("q_scale", "k_scale"), scales, strict=True)
    )
    cos, sin = _angles(name, rotary, x, size)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.astype(accumulator_dtype(x.dtype))
    turned = 0 if cos is None else 2 * cos.shape[-1]
    order = "... " + ORDERS[heads_first]
    results = (order.format(h=h, s="*s", d=size) for h in (num_heads, kv_heads, kv_heads))
    args = x, bias, q_scale, k_scale, cos, sin
    options: dict[str, Any] = dict(heads=num_heads, kv_heads=kv_heads, size=size)
    options |= dict(interleaved=interleaved, heads_first=heads_first, eps=eps)
    reference = functools.partial(split_and_rotate, **options)
    if not is_movable(x.dtype):
        return reference(*args)
    features = x.shape[-1]
    signature = f"... *s {features}, {features}, {size}, {size}, ~... *s {turned} -> "
    signature += ", ".join(results)

    def native(request, *args):
        *others, cos, sin = args
        turns = None if cos is None else _turns(cos, sin, others[0])
        return _ROTARY_OP.bind(request, *others, turns, signature=signature, **options)

    return _ROTARY_OP(
        *args,
        native=native,
        otherwise=reference,
        limit=_rotary_limit(x, size),
        features=dict(
            head_bytes=size * x.dtype.itemsize,
            bias=bias is not None,
            norm=q_scale is not None or k_scale is not None,
            rotary=cos is not None,
        ),
    )


def _rotary_limit(x, size: int) -> str | None:
    if str(x.dtype) not in FLOATING:
        return f"the kernel does not take the dtype {x.dtype}"
    if reason := _limit(x, None):
        return reason
    if size > limit("rotary_head_size"):
        return f"a head has more than {limit('rotary_head_size')} elements"
    if x.ndim - 2 > limit("rotary_rank"):
        return f"there are more than {limit('rotary_rank')} leading dimensions"
    return None


def split_qkv_heads(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rotary: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    q_scale: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    layout: Literal["heads_first", "sequence_first"] = "heads_first",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits a fused projection into queries, keys and values, ready for attention.

    Adds the bias, splits ``[..., S, (H + 2*K)*D]`` into heads, applies an RMS norm to each head of
    queries and keys, and rotates queries and keys by the angles of the rotary embedding. All of it
    is computed in one pass, in float32 (float64 for float64), and rounded once. Without them, it
    equals ``jnp.moveaxis((qkv + bias).reshape(..., S, 3, H, D), (-3, -2), (0, -3))`` unpacked.

    Args:
      qkv: array ``[..., S, (H + 2*K)*D]`` of queries, keys and values; of any dtype, but float32,
        bfloat16, float16 or float64 with ``rotary``, ``q_scale`` or ``k_scale``.
      bias: array ``[(H + 2*K)*D]``, or ``None``. It has the dtype of ``qkv``, or both are
        floating-point.
      num_heads: ``H``, the number of heads of queries.
      num_kv_heads: ``K``, the number of heads of keys and of values, which divides ``H``. Default:
        ``H``.
      rotary: angles ``[..., S, R]``, that is, positions times frequencies, or a pair of arrays of
        that shape, of cosines and sines. ``R`` pairs of elements of each head of queries and keys
        are rotated; ``2*R`` is at most ``D``, and other elements stay. The shape has two dimensions
        or more, and broadcasts to the leading dimensions and the sequence of ``qkv``.
      q_scale, k_scale: arrays ``[D]``: queries become ``q * rsqrt(mean(q**2) + eps) * q_scale``,
        with the mean over a head, and so do keys. ``None``: no norm.
      eps: a Python or NumPy number, added to the mean square.
      interleaved: whether the pairs are the elements ``2*i`` and ``2*i + 1`` of a head, as in
        GPT-J. If not, they are ``i`` and ``i + R``, as in Llama.
      layout: ``"heads_first"`` for results ``[..., H, S, D]``, or ``"sequence_first"`` for
        ``[..., S, H, D]``, as ``jax.nn.dot_product_attention`` takes them.

    Returns:
      Queries, keys and values with the dtype of ``qkv``, with ``H``, ``K`` and ``K`` heads.

    Residuals: without a norm, the cosines and sines; nothing without rotation. With a norm, also
    ``qkv`` and the parameters: the backward computes the statistics again. Gradients of parameters
    are summed as in :func:`split_heads`. XLA computes derivatives with respect to ``rotary``.

    Sharding: as :func:`split_heads`, but never over the features, whose shards are not shards of
    the heads: over an explicit mesh axis, the call takes the reference.

    Raises:
      TypeError: an argument is not an array, ``num_heads`` or ``num_kv_heads`` is not an integer,
        ``eps`` is not a number, ``interleaved`` is not a boolean, or the dtypes are not compatible.
      ValueError: ``qkv`` has fewer than two dimensions, ``num_heads + 2 * num_kv_heads`` does not
        divide the last axis, ``num_kv_heads`` does not divide ``num_heads``, an array has another
        shape, ``eps`` is negative or not finite, or ``layout`` is not one of the names above.

    Sources: FasterTransformer, ``add_QKV_bias``; Su et al., "RoFormer: Enhanced Transformer with
    Rotary Position Embedding".

    Example:
      >>> q, k, v = fo.split_qkv_heads(jnp.ones((2, 5, 36)), num_heads=3)
      >>> q.shape, k.shape, v.shape
      ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4))

      Grouped heads with rotary embedding and norms of queries and keys:

      >>> angles = jnp.arange(5.0)[:, None] * jnp.array([1.0, 0.01])
      >>> q, k, v = fo.split_qkv_heads(
      ...     jnp.ones((2, 5, 32)), num_heads=4, num_kv_heads=2, rotary=angles,
      ...     q_scale=jnp.ones(4), k_scale=jnp.ones(4), layout="sequence_first")
      >>> q.shape, k.shape, v.shape
      ((2, 5, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4))
    """
    one_of("split_qkv_heads", "layout", layout, ("heads_first", "sequence_first"))
    if not isinstance(interleaved, (bool, np.bool_)):
        raise TypeError(
            f"split_qkv_heads: interleaved is {interleaved!r}; it must be True or False"
        )
    eps = epsilon("split_qkv_heads", eps)
    heads_first, scales = layout == "heads_first", (q_scale, k_scale)
    grouped = num_kv_heads is not None and (
        integer("split_qkv_heads", "num_kv_heads", num_kv_heads)
        != integer("split_qkv_heads", "num_heads", num_heads)
    )
    if heads_first and not grouped and rotary is q_scale is k_scale is None:
        return _apply("split_qkv_heads", qkv, bias, num_heads, 3)
    return _split_rotary(
        qkv, bias, num_heads, num_kv_heads, rotary, scales, eps, bool(interleaved), heads_first
    )


def merge_heads(x: ArrayLike) -> jax.Array:
    """Merges heads into features: ``[..., H, S, D]`` to ``[..., S, H*D]``.

    Equals ``jnp.swapaxes(x, -3, -2).reshape(..., S, H*D)``.

    Args:
      x: array ``[..., H, S, D]`` of any dtype, with any number of leading dimensions.

    Returns:
      An array ``[..., S, H*D]`` with the dtype of ``x``.

    Residuals: none.

    Sharding: over every dimension except ``D``, without communication. Sharded heads become sharded
    features.

    Raises:
      TypeError: ``x`` is not an array.
      ValueError: ``x`` has fewer than three dimensions.

    Source: FasterTransformer, ``transpose``.

    Example:
      >>> fo.merge_heads(jnp.ones((2, 3, 5, 4))).shape
      (2, 5, 12)
    """
    (x,) = as_arrays("merge_heads", x=x)
    if x.ndim < 3:
        raise ValueError(
            f"merge_heads: x has shape {x.shape}; it must have at least 3 dimensions, "
            "[..., heads, sequence, head_size]"
        )
    return merge_last(_swap(x))
