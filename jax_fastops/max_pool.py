"""``max_pool``: the maxima of windows, with one byte for each that says where it was.

XLA's gradient keeps the operand and searches for the maxima again. This one keeps the place of each
maximum in its window, and each element gathers from the windows that contain it. It is in plain
JAX: XLA makes one loop of the forward, and one of the backward.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_fastops import _compat
from jax_fastops._arguments import as_arrays, integer, not_weak, same_floating_dtype
from jax_fastops._views import spec_of

_MOST = 255  # elements of a window: places are bytes, and one of them means "nowhere"


class _Windows(NamedTuple):
    """The windows, by axis of the operand."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def pooled(self) -> list[int]:
        """The axes along which there is something to do."""
        numbers = enumerate(zip(self.sizes, self.strides, self.padding, strict=True))
        return [axis for axis, found in numbers if found != (1, 1, (0, 0))]


def max_pool(
    x: ArrayLike,
    window: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    *,
    scale: ArrayLike | None = None,
) -> jax.Array:
    """The maxima of windows, with one byte per maximum for the backward: its place in the window.

    Equals ``jax.lax.reduce_window`` with ``jax.lax.max``, also in the gradient: of equal elements
    of a window, it goes to the first, and in a window with a NaN to an unspecified element. There
    is no kernel: XLA compiles it.

    Args:
      x: array of a floating dtype.
      window: the size of a window along each axis of ``x``; 1 where it has one element. A window
        has at most 255 elements.
      strides: the distance between windows along each axis. ``None`` means 1.
      padding: ``"VALID"``, ``"SAME"``, or for each axis how many elements of minus infinity come
        before and after ``x``, numbers from 0.
      scale: array of a floating dtype that broadcasts against ``x``, and has one element along
        every axis with windows: the factor by which the result will be multiplied, or ``None``.
        Where it is negative, the minima are pooled, because the factor turns them into maxima.

    Returns:
      The maxima, in the dtype of ``x``.

    Residuals: one byte (uint8) per element of the result.

    Sharding: over every axis with windows of one element, without communication. Other axes are
    sharded as ``jax.lax.slice`` and ``jax.lax.pad`` do it.

    Raises:
      TypeError: ``x`` or ``scale`` is not an array of a floating dtype, or a size, a stride or a
        padding is not an integer.
      ValueError: ``window``, ``strides`` or ``padding`` does not have one entry per axis, an entry
        is out of range, a window has more than 255 elements, or ``scale`` does not broadcast.

    Example:
      >>> x = jnp.arange(16.0).reshape(4, 4)
      >>> fo.max_pool(x, (2, 2), (2, 2)).tolist()
      [[5.0, 7.0], [13.0, 15.0]]
    """
    (x,) = as_arrays("max_pool", x=x)
    (x,) = map(not_weak, same_floating_dtype("max_pool", [x], ["x"]))
    sizes = _numbers("window", window, x.ndim)
    strides = (1,) * x.ndim if strides is None else _numbers("strides", strides, x.ndim)
    if math.prod(sizes) > _MOST:
        raise ValueError(f"max_pool: window is {sizes}; it must have at most {_MOST} elements")
    around = _padding(padding, x, sizes, strides)
    windows = _Windows(sizes, strides, around)
    return _pool(windows, False, x, None if scale is None else _sign(scale, x, windows))


def _numbers(name: str, values: Sequence[int], rank: int) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"max_pool: {name} is {values!r}; it must have a number for each of {rank} axes"
        )
    found = tuple(integer("max_pool", f"{name}[{i}]", n) for i, n in enumerate(values))
    if len(found) != rank or any(n < 1 for n in found):
        raise ValueError(
            f"max_pool: {name} is {found}; it must have a number from 1 for each of {rank} axes"
        )
    return found


def _padding(padding, x, sizes, strides) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        if padding not in ("VALID", "SAME"):
            raise ValueError(
                f"max_pool: padding is {padding!r}; it must be 'VALID', 'SAME' or pairs"
            )
        # Axes without windows may be symbolic.
        wide = [i for i, found in enumerate(zip(sizes, strides, strict=True)) if found != (1, 1)]
        pairs = jax.lax.padtype_to_pads(
            [x.shape[i] for i in wide],
            [sizes[i] for i in wide],
            [strides[i] for i in wide],
            padding,
        )
        known = dict(zip(wide, pairs, strict=True))
        found = [known.get(i, (0, 0)) for i in range(x.ndim)]
        return tuple((int(low), int(high)) for low, high in found)
    pairs = [tuple(integer("max_pool", "padding", n) for n in pair) for pair in padding]
    if len(pairs) != x.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ValueError(
            f"max_pool: padding is {padding}; it must have a pair of numbers from 0 for each of "
            f"{x.ndim} axes"
        )
    return tuple((low, high) for low, high in pairs)


def _sign(scale, x, windows: _Windows) -> jax.Array:
    (scale,) = as_arrays("max_pool", scale=scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"max_pool: scale has dtype {scale.dtype}; it must be a floating dtype")
    shape = (1,) * (x.ndim - scale.ndim) + scale.shape
    alone = (n == 1 or n == m for n, m in zip(shape, x.shape, strict=False))
    if len(shape) != x.ndim or not all(alone) or any(shape[i] != 1 for i in windows.pooled):
        raise ValueError(
            f"max_pool: scale has shape {scale.shape}; it must broadcast against {x.shape}, with "
            f"one element along axes {windows.pooled}"
        )
    return jnp.where(scale < 0, -1, 1).astype(x.dtype).reshape(shape)


# Jitted, so that an eager call has no array with the -inf of the padding: `jax_debug_infs` would
# raise an error for it.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1), inline=_compat.INLINE)
def _pool(windows: _Windows, differentiated: bool, x, sign):
    x = _times(sign, x)
    if differentiated or x.dtype.itemsize == 2:
        return _times(sign, functools.reduce(jax.lax.max, _elements(windows, x)))
    # Alone, XLA's operation is as fast for wider types, and faster with channels first.
    low = jnp.asarray(-jnp.inf, x.dtype)
    return _times(sign, jax.lax.reduce_window(x, low, jax.lax.max, *windows))


@_pool.defjvp
def _pool_jvp(windows, differentiated, primals, tangents):
    del differentiated  # now it is: XLA computes the maxima and the places in one loop
    (x, sign), (dx, _) = primals, tangents
    place = _places(windows, _times(sign, jax.lax.stop_gradient(x)))
    # Under jax.checkpoint, so that a gradient keeps the places and not the masks made of them.
    at = jax.checkpoint(functools.partial(_elements_at, windows), prevent_cse=False)
    return _pool(windows, True, x, sign), at(place, dx)


def _times(sign, x):
    return x if sign is None else sign * x


def _elements(windows: _Windows, x) -> list[jax.Array]:
    """The elements of each window, row by row, as arrays with the result's shape."""
    shape = [  # a size of an axis without windows may be symbolic
        max(0, (n + sum(around) - size) // stride + 1) if axis in windows.pooled else n
        for axis, (n, size, stride, around) in enumerate(zip(x.shape, *windows, strict=True))
    ]
    # As many after the end as slices need, which is at least the padding.
    around = [
        (low, stride * count + size - 1 - n - low, 0)
        for n, count, size, stride, (low, _) in zip(x.shape, shape, *windows, strict=True)
    ]
    x = jax.lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), around)
    found = []
    for first in itertools.product(*map(range, windows.sizes)):
        ends = [
            i + stride * count
            for i, stride, count in zip(first, windows.strides, shape, strict=True)
        ]
        found.append(jax.lax.slice(x, first, ends, windows.strides))
    return found


@functools.partial(jax.jit, static_argnums=0, inline=_compat.INLINE)
def _places(windows: _Windows, x) -> jax.Array:
    """The place of each maximum in its window, row by row. The first of equal elements."""
    best, *rest = _elements(windows, x)
    place = jnp.zeros_like(best, jnp.uint8)
    for k, value in enumerate(rest, 1):
        stays = best >= value  # False for NaN, as in XLA: the gradient goes to a later element
        place = jnp.where(stays, place, jnp.uint8(k))
        best = jnp.where(stays, best, value)
    return place


def _elements_at(windows: _Windows, place, x) -> jax.Array:
    """The element of each window of ``x`` at the place that :func:`_places` gives.

    The code is written for its transpose, the gradient, in which each element gathers from the
    windows that contain it. Along an axis, element ``stride * q + m`` is in the windows ``q + e``
    for few ``e``, at a place that depends only on ``m`` and ``e``: a table indexed by the ``m`` has
    it for each ``e``. XLA compiles this to one loop.
    """
    axes, nowhere = windows.pooled, math.prod(windows.sizes)
    zero = jnp.zeros((), x.dtype)
    counts = {i: -(-x.shape[i] // windows.strides[i]) for i in axes}
    more = [counts[i] * windows.strides[i] - n if i in axes else 0 for i, n in enumerate(x.shape)]
    x = jax.lax.pad(x, zero, [(0, after, 0) for after in more])
    # Each pooled axis becomes two: q, and m.
    split: list[Any] = []
    spec = spec_of(x)
    new_spec: list[Any] = []
    inner = []
    for i, n in enumerate(x.shape):
        split += [counts[i], windows.strides[i]] if i in axes else [n]
        new_spec += [spec[i] if spec else None] + [None] * (i in axes)
        if i in axes:
            inner.append(len(split) - 1)
    x = jax.lax.reshape(x, split, out_sharding=PartitionSpec(*new_spec) if spec else None)
    parts = []
    for shifts in itertools.product(*(list(_shifts(windows, i)) for i in axes)):
        there, back = [(0, 0, 0)] * place.ndim, [(0, 0, 0)] * place.ndim
        for i, (shift, _) in zip(axes, shifts, strict=True):
            after = counts[i] + shift - place.shape[i]
            there[i], back[i] = (-shift, after, 0), (shift, -after, 0)
        table = _table(windows, [at for _, at in shifts], nowhere)
        wanted = table.reshape([n if k in inner else 1 for k, n in enumerate(split)])
        # Beyond the last window, place and table are both `nowhere`. `back` cuts that part off.
        shifted = jax.lax.pad(place, jnp.uint8(nowhere), there)
        found = jnp.where(jnp.expand_dims(shifted, inner) == wanted, x, zero).sum(inner)
        parts.append(jax.lax.pad(found, zero, back))
    return functools.reduce(jnp.add, parts)


def _shifts(windows: _Windows, axis: int) -> Iterator[tuple[int, np.ndarray]]:
    """Each ``e`` of :func:`_elements_at` along an axis, and the place for each ``m``, or -1."""
    size, stride, (low, _) = windows.sizes[axis], windows.strides[axis], windows.padding[axis]
    for shift in range(-((size - 1 - low) // stride), (stride - 1 + low) // stride + 1):
        at = np.arange(stride) + low - stride * shift
        yield shift, np.where((at >= 0) & (at < size), at, -1)


def _table(windows: _Windows, places: Sequence[np.ndarray], nowhere: int) -> np.ndarray:
    """The place in the window for each ``m`` of all pooled axes, or ``nowhere``."""
    found, outside = np.zeros((), int), np.zeros((), bool)
    for axis, at in zip(windows.pooled, places, strict=True):
        found = found[..., None] * windows.sizes[axis] + at
        outside = outside[..., None] | (at < 0)
    return np.where(outside, nowhere, found).astype(np.uint8)
