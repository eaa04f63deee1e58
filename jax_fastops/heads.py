"""``split_heads``, ``split_qkv_heads`` and ``merge_heads``: between features and attention heads.

The kernel adds the bias while it moves the elements, and sums the bias gradient while it moves
the cotangents back. Each pass reads and writes every element once. The kernel makes partial sums
over groups of rows in the accumulator dtype, and XLA adds them up. Without a bias, splitting and
merging are transpositions.

Source: FasterTransformer, ``add_QKV_bias`` and ``transpose``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._arguments import FLOATING, as_arrays, integer
from jax_fastops._broadcast import add
from jax_fastops._dispatch import by_width
from jax_fastops._kernel import Kernel, shards_of, unless_mapped
from jax_fastops._op import Op
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import explicit_spec, merge_last, reshape, split_last
from jax_fastops.transpose import is_movable, permute

# The approximate number of rows in one partial sum of the bias gradient. Fewer rows mean more
# traffic for the sums. More rows leave too few thread blocks when the batch is small.
_SUM_ROWS = 128
# For a shorter sequence, moving the partial sums costs more than reading the cotangents again.
_FEWEST_ROWS = 3


# ---- kernels -------------------------------------------------------------------------------------


_SPLIT = Kernel.declare(
    "split_heads",
    "x: ... *s f, bias?: f :acc? -> q: ... h *s d, k?: ... h *s d, v?: ... h *s d",
)
_MERGE = Kernel.declare(
    "merge_heads", "q: ... h *s d, k?: ... h *s d, v?: ... h *s d -> x: ... *s f"
)
# Merges, and writes p partial sums for each of the g groups of s rows.
_MERGE_AND_SUM = Kernel.declare(
    "merge_heads",
    "q: ... h *g s d, k?: ... h *g s d, v?: ... h *g s d -> x: ... *g s f, sums: ... *g p f :acc",
)


def _split(x, bias, *, num_heads: int, parts: int, **_):
    head_size = x.shape[-1] // (parts * num_heads)

    def split(x, bias):
        several = parts > 1
        return tuple(_SPLIT(x, bias, k=several, v=several, h=num_heads, d=head_size)[:parts])

    return unless_mapped(split, lambda x, bias: split(_add_bias(x, bias), None), [1])(x, bias)


def _merge(kept, cts, wanted, *, num_heads: int, parts: int):
    """The gradients of x and of the bias, in one pass over the cotangents."""
    del kept
    sequence, head_size = cts[0].shape[-2:]
    features = parts * num_heads * head_size
    if not wanted[0]:
        return None, _sum_rows(_merge_reference(cts))
    if not wanted[1] or sequence < _FEWEST_ROWS:
        dx = _MERGE(*cts, f=features).x
        return dx, _sum_rows(dx) if wanted[1] else None
    kind = jax.typeof(cts[0]).sharding
    spec = explicit_spec(kind, cts[0].ndim)
    shards = shards_of(sequence, spec and spec[-2], kind, 32)
    rows = _group_rows(sequence // shards)

    def grouped(ct):
        shape = (*ct.shape[:-2], sequence // rows, rows, head_size)
        own = explicit_spec(jax.typeof(ct).sharding, ct.ndim)
        return reshape(ct, shape, own and (*own[:-1], None, own[-1]))

    dx, sums = _MERGE_AND_SUM(*map(grouped, cts), f=features, p=-(-rows // _SUM_ROWS))
    shape = (*dx.shape[:-3], sequence, dx.shape[-1])
    own = explicit_spec(jax.typeof(dx).sharding, dx.ndim)
    dx = reshape(dx, shape, own and (*own[:-2], own[-1]))
    return dx, sums.sum(tuple(range(sums.ndim - 1)))


def _group_rows(sequence: int) -> int:
    """The number of rows in a group, which no shard boundary may cut.

    The largest divisor of the (local) sequence up to ``_SUM_ROWS``. If that is small, the whole
    sequence is one group.
    """
    largest = max(n for n in range(1, min(sequence, _SUM_ROWS) + 1) if sequence % n == 0)
    return largest if 4 * largest >= _SUM_ROWS else sequence


# ---- references ----------------------------------------------------------------------------------


def _add_bias(x, bias):
    return x if bias is None else add(x, bias)


def _split_reference(x, bias, *, num_heads: int, parts: int, **_):
    x = _add_bias(x, bias)
    head_size = x.shape[-1] // (parts * num_heads)
    if parts == 1:
        return jnp.swapaxes(split_last(x, (num_heads, head_size)), -3, -2)
    x = split_last(x, (parts, num_heads, head_size))
    # Not by indexing: its gradient adds zeros, which turns -0 into +0.
    pieces = jax.lax.split(x, (1,) * parts, axis=x.ndim - 3)
    return tuple(jnp.swapaxes(jnp.squeeze(piece, -3), -3, -2) for piece in pieces)


def _merge_reference(cts):
    merged = jnp.stack([jnp.swapaxes(ct, -3, -2) for ct in cts], axis=-3)
    return merge_last(merged, 3)


def _sum_rows(dx):
    """The bias gradient, in the accumulator dtype.

    From dx, whose rows are contiguous: XLA sums these much faster than the rows of each head.
    """
    return dx.astype(accumulator_dtype(dx.dtype)).sum(tuple(range(dx.ndim - 1)))


def _pullback(kept, cts, **_):
    del kept
    dx = _merge_reference(cts)
    return dx, _sum_rows(dx) if jnp.issubdtype(dx.dtype, jnp.inexact) else None


# ---- ops -----------------------------------------------------------------------------------------


def _declare(name: str, parts: int) -> Op:
    results = ", ".join(["... h *s d"] * parts)
    return Op(
        name,
        f"... *s f, f -> {results}",
        _split_reference,
        kernels=(_SPLIT, _MERGE),
        forward=_split,
        forward_saving=_split,
        residuals=lambda args, outs, saved: (),
        pullback=_pullback,
        pushforward=lambda kept, tangents, **options: _split_reference(*tangents, **options),
        backward=_merge,
        tangent=lambda kept, tangents, **options: _split(*tangents, **options),
        dtype_class=by_width,
    )


_OPS = {1: _declare("split_heads", 1), 3: _declare("split_qkv_heads", 3)}


def _apply(name: str, x, bias, num_heads, parts: int) -> Any:
    given = {"x" if parts == 1 else "qkv": x} | ({} if bias is None else {"bias": bias})
    x, *rest = as_arrays(name, **given)
    bias = rest[0] if rest else None
    num_heads, head_size = _check(name, x, bias, num_heads, parts)
    options: dict[str, Any] = dict(num_heads=num_heads, parts=parts)
    if not is_movable(x.dtype):
        return _split_reference(x, bias, **options)
    if parts == 1 and (bias is None or _features_sharded(x)):
        # XLA adds the bias, and a transposition remains.
        return _swap(split_last(_add_bias(x, bias), (num_heads, head_size)))
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.astype(accumulator_dtype(x.dtype))
    results = ", ".join([f"... {num_heads} *s {head_size}"] * parts)
    signature = f"... *s {x.shape[-1]}, {x.shape[-1]} -> {results}"
    features = dict(head_bytes=head_size * x.dtype.itemsize, bias=bias is not None)
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


def _features_sharded(x) -> bool:
    spec = explicit_spec(jax.typeof(x).sharding, x.ndim)
    return spec is not None and spec[-1] is not None


def _swap(x):
    """Exchanges the sequence and the heads.

    No matrix product of attention can absorb this: it would need two separate batch dimensions.
    """
    n = x.ndim
    return permute(x, (*range(n - 3), n - 2, n - 3, n - 1))


def _check(name: str, x, bias, num_heads, parts: int) -> tuple[int, int]:
    """Checks the arguments; returns ``num_heads`` and the size of a head."""
    num_heads = integer(name, "num_heads", num_heads)
    argument = "x" if parts == 1 else "qkv"
    if x.ndim < 2:
        raise ValueError(
            f"{name}: {argument} has shape {x.shape}; it must have at least 2 dimensions, "
            "[..., sequence, features]"
        )
    features = x.shape[-1]
    if num_heads < 1:
        raise ValueError(f"{name}: num_heads is {num_heads}; it must be at least 1")
    if features % (parts * num_heads) != 0:
        pieces = f"{parts} * num_heads = {parts * num_heads}" if parts > 1 else f"{num_heads}"
        raise ValueError(
            f"{name}: num_heads is {num_heads}, and the last axis of {argument}, of shape "
            f"{x.shape}, cannot be divided into {pieces} equal parts"
        )
    if bias is None:
        return num_heads, features // (parts * num_heads)
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
    return num_heads, features // (parts * num_heads)


def split_heads(x: ArrayLike, bias: ArrayLike | None = None, *, num_heads: int) -> jax.Array:
    """Adds a bias and splits features into heads: ``[..., S, H*D]`` to ``[..., H, S, D]``.

    Equals ``jnp.swapaxes((x + bias).reshape(..., S, H, D), -3, -2)``, in one pass.

    Args:
      x: array ``[..., S, H*D]`` of any dtype, with any number of leading dimensions.
      bias: array ``[H*D]``, or ``None``. It has the dtype of ``x``, or both are floating-point. The
        sum is then computed in float32 (float64 for float64), and rounded once to the dtype of
        ``x``.
      num_heads: ``H``, which divides the last axis of ``x``.

    Returns:
      An array ``[..., H, S, D]`` with the dtype of ``x``.

    Residuals:
      None. The backward moves the cotangent back and sums the bias gradient in the same pass, in
      float32 (float64 for float64). The reference sums it as JAX does, in the dtype of the bias.

    Sharding: over the leading dimensions and the sequence, and without a bias over the heads if the
    number of devices divides ``num_heads``. There is no communication except an all-reduce of the
    bias gradient. With a bias and features sharded over an explicit mesh axis, XLA adds the bias
    and the kernel moves the sum. Over an auto mesh axis the features are gathered, so add such a
    bias before the call. Under auto axes, a device needs 32 rows of the sequence or more; otherwise
    the backward of a bias gathers the sequence.

    Raises:
      TypeError: ``x`` or ``bias`` is not an array, ``num_heads`` is not an integer, or the dtypes
        are not compatible.
      ValueError: ``x`` has fewer than two dimensions, ``num_heads`` does not divide the last axis,
        or ``bias`` has another shape.

    Source:
      FasterTransformer, ``add_QKV_bias``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fastops as fo
      >>> fo.split_heads(jnp.ones((2, 5, 12)), jnp.zeros(12), num_heads=3).shape
      (2, 3, 5, 4)
    """
    return _apply("split_heads", x, bias, num_heads, 1)


def split_qkv_heads(
    qkv: ArrayLike, bias: ArrayLike | None = None, *, num_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds a bias and splits ``[..., S, 3*H*D]`` into queries, keys and values ``[..., H, S, D]``.

    Equals ``jnp.moveaxis((qkv + bias).reshape(..., S, 3, H, D), (-3, -2), (0, -3))`` unpacked. One
    kernel writes all three results in one pass.

    Args:
      qkv: array ``[..., S, 3*H*D]`` of any dtype, with any number of leading dimensions: queries,
        then keys, then values.
      bias: array ``[3*H*D]``, or ``None``. It has the dtype of ``qkv``, or both are floating-point.
        The sum is then computed in float32 (float64 for float64), and rounded once to the dtype of
        ``qkv``.
      num_heads: ``H``; the last axis of ``qkv`` is a multiple of ``3 * H``.

    Returns:
      Three arrays ``[..., H, S, D]`` with the dtype of ``qkv``.

    Residuals:
      None. The backward merges the three cotangents and sums the bias gradient in the same pass, in
      float32 (float64 for float64). The reference sums it as JAX does, in the dtype of the bias.

    Sharding: over the leading dimensions and the sequence, without communication except an
    all-reduce of the bias gradient. Sharded features are gathered, because shards of ``3*H*D`` are
    not shards of ``H``. Under auto axes, a device needs 32 rows of the sequence or more; otherwise
    the backward of a bias gathers the sequence.

    Raises:
      TypeError: ``qkv`` or ``bias`` is not an array, ``num_heads`` is not an integer, or the dtypes
        are not compatible.
      ValueError: ``qkv`` has fewer than two dimensions, ``3 * num_heads`` does not divide the last
        axis, or ``bias`` has another shape.

    Source:
      FasterTransformer, ``add_QKV_bias``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fastops as fo
      >>> q, k, v = fo.split_qkv_heads(jnp.ones((2, 5, 36)), num_heads=3)
      >>> q.shape, k.shape, v.shape
      ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4))
    """
    return _apply("split_qkv_heads", qkv, bias, num_heads, 3)


def merge_heads(x: ArrayLike) -> jax.Array:
    """Merges heads into features: ``[..., H, S, D]`` to ``[..., S, H*D]``.

    Equals ``jnp.swapaxes(x, -3, -2).reshape(..., S, H*D)``.

    Args:
      x: array ``[..., H, S, D]`` of any dtype, with any number of leading dimensions.

    Returns:
      An array ``[..., S, H*D]`` with the dtype of ``x``.

    Residuals:
      None.

    Sharding: over every dimension except ``D``, without communication. Sharded heads become sharded
    features.

    Raises:
      TypeError: ``x`` is not an array.
      ValueError: ``x`` has fewer than three dimensions.

    Source:
      FasterTransformer, ``transpose``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fastops as fo
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
