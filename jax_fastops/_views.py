"""Views of an array in which every dimension that people shard is a leading one.

XLA partitions a custom call over leading dimensions only. An element-wise op that keeps one bit per
element therefore sees ``x`` as ``(..., n)`` with a short last dimension, eight elements to a mask
byte, and everything in front of it is a batch dimension. The reshape costs nothing.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


def mask_view(shape, sharding=None) -> tuple[tuple, tuple | None] | None:
    """The shape ``(..., n)`` in which an array of ``shape`` gets its mask, and that view's spec.

    ``n`` is 8 where the last axis is a multiple of 8, or some trailing axes merged are; the mask
    then has one byte for every eight elements, whatever the shape. The first axis is never merged,
    so that a sharded batch stays local. Where nothing divides, each row of ``n`` elements pads its
    last mask byte.

    ``sharding`` is the array's, where it is part of the type (explicit mesh axes). A view is then
    chosen in which the shards stay whole; ``None`` is returned if there is no such view.
    """
    spec = explicit_spec(sharding, len(shape))
    for view, merged in _candidates(shape):
        if spec is None:
            return view, None
        view_spec = _view_spec(shape, spec, view, merged, sharding)
        if view_spec is not None:
            return view, view_spec
    return None


def _candidates(shape):
    """Views in the order of preference, each with the number of leading axes it leaves alone."""
    if not shape:
        yield (1,), 0
        return
    first = len(shape) - 1
    for lead in range(first, min(1, first) - 1, -1):
        size = math.prod(shape[lead:])
        if size % 8 == 0:
            yield (*shape[:lead], size // 8, 8), lead
    for lead in dict.fromkeys((min(1, first), first)):
        yield (*shape[:lead], math.prod(shape[lead:])), lead


def explicit_spec(sharding, rank: int) -> tuple | None:
    """The partition spec of an array whose sharding is part of its type, else None."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (rank - len(spec))


def _view_spec(shape, spec, view, lead, sharding) -> tuple | None:
    """The view's partition spec, or None where a shard of the array is not a shard of the view."""
    merged = spec[lead:]
    if any(axis is not None for axis in merged[1:]):
        # An inner axis is sharded: fine only if it is the innermost one on its own.
        return None
    axis = merged[0] if merged else None
    if len(view) == lead + 1:  # one padded row per index of the leading axes
        return None if axis is not None else (*spec[:lead], None)
    parts = parts_of(axis, sharding)
    return (*spec[:lead], axis, None) if view[lead] % parts == 0 else None


def parts_of(axis, sharding) -> int:
    """Over how many devices an entry of a partition spec spreads a dimension."""
    names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def reshape(x, shape, spec: tuple | None):
    """``x`` in another shape; ``spec`` is the result's sharding where it is part of the type."""
    if spec is None:
        return jax.lax.reshape(x, shape)
    return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*spec))


def split_last(x, sizes: tuple[int, ...]):
    """``x`` with its last dimension as dimensions of these ``sizes``.

    Where the sharding is part of the type, that of the last dimension goes to the first of them; if
    that cannot be spread so, the dimension is gathered first.
    """
    kind = jax.typeof(x).sharding
    spec = explicit_spec(kind, x.ndim)
    shape = (*x.shape[:-1], *sizes)
    if spec is None:
        return jax.lax.reshape(x, shape)
    *lead, last = spec
    if sizes[0] % parts_of(last, kind):
        x, last = jax.sharding.reshard(x, kind.update(spec=PartitionSpec(*lead, None))), None
    return reshape(x, shape, (*lead, last, *(None,) * (len(sizes) - 1)))


def merge_last(x, count: int = 2):
    """``x`` with its last ``count`` dimensions merged; the inverse of ``split_last``."""
    kind = jax.typeof(x).sharding
    spec = explicit_spec(kind, x.ndim)
    lead = x.ndim - count
    shape = (*x.shape[:lead], math.prod(x.shape[lead:]))
    if spec is None:
        return jax.lax.reshape(x, shape)
    if any(axis is not None for axis in spec[lead + 1 :]):
        outer = (*spec[: lead + 1], *(None,) * (count - 1))
        x = jax.sharding.reshard(x, kind.update(spec=PartitionSpec(*outer)))
    return reshape(x, shape, spec[: lead + 1])


def broadcast_type(arrays):
    """The shape, dtype and sharding of an element-wise result, as ``jnp.add`` has them."""
    types = [jax.typeof(x) for x in arrays]
    if all(t == types[0] for t in types):
        return types[0]
    return jax.eval_shape(lambda *xs: functools.reduce(jnp.add, xs), *arrays)


def broadcast_to(x, result):
    """``x`` broadcast to the shape and, where it is part of the type, the sharding of ``result``.

    The sharding has to come with the broadcast: were the copy replicated and resharded, its
    gradient would be gathered before it is summed.
    """
    explicit = explicit_spec(result.sharding, len(result.shape)) is not None
    if x.shape == result.shape and not (explicit and jax.typeof(x).sharding != result.sharding):
        return x
    if not explicit:
        return jnp.broadcast_to(x, result.shape)
    if x.shape == result.shape:
        return jax.sharding.reshard(x, result.sharding)
    return jnp.broadcast_to(x, result.shape, out_sharding=result.sharding)
