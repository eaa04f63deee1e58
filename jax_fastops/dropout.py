"""``dropout``: random elements of an array are set to zero, and the others are scaled.

The kernels draw the random bits while they read the array, in the forward and again in the
backward, so no mask is written or kept. The bits are a function of the key and of the element's
index, and do not depend on how the array is sharded or mapped.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): Philox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike

from jax_fastops._arguments import as_arrays, integer, not_weak, same_floating_dtype
from jax_fastops._dispatch import row_features
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op
from jax_fastops._random import (
    NUMBERS,
    Drop,
    drop_of,
    drop_rate,
    kept,
    key_words,
    row_seeds,
    seed_operands,
    seeded,
)
from jax_fastops._registry import example, example_key
from jax_fastops._settings import own_code
from jax_fastops._signature import accumulator_dtype

_KERNEL = Kernel.declare(
    "dropout",
    f"x: ... n, {seed_operands()}, bias?: n :acc?, residual?: ... n -> y: ... n",
    **NUMBERS,
)


def _reference(x, bias, residual, key, *, threshold: int, dropout_scale: float):
    keep = kept(row_seeds(key, x.shape, jax.typeof(x).sharding), x.shape[-1], threshold)
    wide = accumulator_dtype(x.dtype)
    y = x.astype(wide)
    y = y if bias is None else y + bias.astype(wide)
    y = jnp.where(keep, y * jnp.asarray(dropout_scale, wide), jnp.zeros((), wide))
    return (y if residual is None else y + residual.astype(wide)).astype(x.dtype)


def drop_reference(
    x: Any, key: Any, *, bias: Any = None, residual: Any = None, **numbers: Any
) -> Any:
    """:func:`dropped` in ``jax.numpy``, with the words of a key and a :class:`Drop`'s numbers."""
    return _reference(x, bias, residual, key, **numbers)


def _kernel(x, bias, residual, key, **options):
    def native(x, bias, residual, _, **seeds):
        return _KERNEL(x=x, bias=bias, residual=residual, **seeds, **options).y

    return seeded(native, x, bias, residual, key)


def _sum_of_rows(dx, dy, dropout_scale: float):
    """The gradient of the bias: the sum of ``dx`` as it was before it was rounded."""
    wide = accumulator_dtype(dx.dtype)
    rows = tuple(range(dx.ndim - 1))
    if dx.dtype == wide:
        return dx.sum(rows)
    # The scale is at least 1, so dx is 0 only where the element is dropped, or dy is 0.
    dy_kept = jnp.where(dx != 0, dy.astype(wide), jnp.zeros((), wide))
    return dy_kept.sum(rows) * jnp.asarray(dropout_scale, wide)


def _pullback(function):
    def gradients(residuals, cts, *_, **options):
        dx = function(cts[0], None, None, residuals[0], **options)
        return dx, _sum_of_rows(dx, cts[0], options["dropout_scale"]), cts[0], None

    return gradients


def _pushforward(function):
    def tangent(residuals, tangents, **options):
        dx, dbias, dresidual, _ = tangents
        if dx is None and dbias is None:
            return dresidual
        dx = jnp.zeros_like(dresidual) if dx is None else dx
        return function(dx, dbias, dresidual, residuals[0], **options)

    return tangent


# Not independent: a mapped axis must not become more rows of one array, because with one key every
# example has the same mask. Only the key is kept.
_OP = Op(
    "dropout",
    "... n, n, ... n, 2 -> ... n",
    _reference,
    example=example(lambda x: dropout(x, example_key(), 0.25), "... n"),
    kernels=(_KERNEL,),
    forward=_kernel,
    residuals=lambda args, outs, saved: (args[3],),
    pullback=_pullback(_reference),
    pushforward=_pushforward(_reference),
    backward=_pullback(_kernel),
    tangent=_pushforward(_kernel),
    independent=False,
    shared={"bias": 1},
)


def dropped(drop: Drop | None, x: Any, bias: Any = None, residual: Any = None) -> Any:
    """``residual + dropout(x + bias)``, where the bias and the residual may be absent.

    The array has a dtype of the ops. Without ``drop``, ``x`` is returned; the bias and the residual
    must then be absent.
    """
    x = not_weak(x)
    if drop is None:
        assert bias is None and residual is None
        return x
    if drop.threshold == 0:
        return jnp.zeros_like(x) if residual is None else residual
    rows = jnp.atleast_1d(x)
    limit = "there are no elements" if 0 in x.shape else None
    if isinstance(rows.shape[-1], int) and rows.shape[-1] > 1 << 33:
        limit = "a row has more than 2**33 elements"
    y = _OP(
        rows,
        bias,
        residual,
        drop.words,
        features=row_features(rows.shape[-1:], x.dtype),
        limit=limit,
        threshold=drop.threshold,
        dropout_scale=drop.scale,
    )
    return y if x.ndim else jnp.squeeze(y, 0)


def dropout(x: ArrayLike, key: ArrayLike | None, rate: float) -> jax.Array:
    """Dropout: ``jnp.where(keep, x / (1 - rate), 0)``, ``keep = dropout_mask(key, x.shape, rate)``.

    Elements are scaled in float32 (float64 for float64) by ``1 / (1 - rate)``, and rounded once. An
    element that is not kept becomes 0 even if it is infinite or NaN.

    Under ``jax.vmap``, one key gives every example the same mask, and mapped keys give each its
    own, as with ``jax.random``. In ``jax.shard_map``, the rows of each shard count from 0: give
    each shard its own key, unless all should have the same mask.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64.
      key: a key of ``jax.random``, typed or raw. May be ``None`` if the rate is 0.
      rate: the probability that an element is dropped, a static number in [0, 1].

    Returns:
      An array with the shape and dtype of ``x``.

    Residuals: the key. The backward draws the bits again.

    Sharding: over all dimensions except the last, without communication. A last axis that is
    sharded over an auto mesh axis is gathered; over an explicit one, the call takes the reference.
    The mask does not depend on the sharding.

    Raises:
      TypeError: ``x`` is not an array or number, or has another dtype; ``key`` is no key of
        ``jax.random``; ``rate`` is not a number.
      ValueError: ``rate`` is not in [0, 1], ``key`` is an array of keys, or ``x`` has 2**32 rows or
        more along one axis.

    Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".

    Example:
      >>> fo.dropout(jnp.ones(8), jax.random.key(0), 0.5).tolist()
      [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    (x,) = same_floating_dtype("dropout", as_arrays("dropout", x=x), ["x"])
    return dropped(drop_of("dropout", "key", key, "rate", rate), x)


def _size(size: Any) -> Any:
    if is_symbolic_dim(size):
        return size
    size = integer("dropout_mask", "shape", size)
    if size < 0:
        raise ValueError(f"dropout_mask: shape is {size} in one dimension; it must be 0 or more")
    return size


@own_code()
def dropout_mask(
    key: ArrayLike, shape: SupportsIndex | Sequence[SupportsIndex], rate: float
) -> jax.Array:
    """Which elements of an array of ``shape`` a dropout with this key keeps.

    This is the definition of which elements the ops of this library drop. Rows are those of the
    last axis, and a scalar is a row of one element. Elements ``8 * b`` to ``8 * b + 7`` of row
    ``r`` take the 128 bits of Philox4x32-10 with the counter ``(b, r mod 2**32, r div 2**32, 0)``
    and the two words of the key: element ``8 * b + i`` takes the 16 bits of output word ``i // 2``
    that begin at bit ``16 * (i % 2)``, and is kept if they are below
    ``round((1 - rate) * 2**16)``.

    The two words are those of ``jax.random.key_data(key)``. A key of more words is folded. The
    first two words are the key of a Philox call, and the next two, with two zeros, its counter; the
    first two output words replace the key. This is repeated for each further pair. A single last
    word is paired with 0.

    Args:
      key: a key of ``jax.random``, typed or raw.
      shape: the shape of the mask.
      rate: the probability that an element is dropped, a number in [0, 1].

    Returns:
      A boolean array.

    Raises:
      TypeError: ``key`` is no key of ``jax.random``, ``rate`` is not a number, or a size is not an
        integer.
      ValueError: ``rate`` is not in [0, 1], a size is negative, or ``key`` is an array of keys.

    Example:
      >>> fo.dropout_mask(jax.random.key(0), (8,), 0.5).tolist()
      [False, True, False, False, False, False, False, False]
    """
    threshold, _ = drop_rate("dropout_mask", "rate", rate)
    words = key_words("dropout_mask", "key", key)
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(map(_size, sizes))
    rows = sizes or (1,)
    return kept(row_seeds(words, rows), rows[-1], threshold).reshape(sizes)
