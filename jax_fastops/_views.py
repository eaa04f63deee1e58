"""Views of an array in which the dimensions that users shard lead.

XLA partitions a custom call over leading dimensions only. An element-wise op that keeps one bit per
element therefore sees ``x`` as ``(..., n)``, where the short last dimension fills whole mask bytes,
and every other dimension is a batch dimension. The reshape costs nothing.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


def mask_view(shape, sharding=None) -> tuple[tuple, tuple | None] | None:
    """The view ``(..., n)`` in which an array of ``shape`` gets its mask, and the view's spec.

    ``n`` is 8 if the last axis, or the product of some trailing axes, is a multiple of 8. Otherwise
    each row of ``n`` elements pads its last mask byte. The first axis is never merged, so that a
    sharded batch stays local. With a ``sharding`` of explicit mesh axes, the view cuts no shard;
    the result is ``None`` if there is no such view.
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
    """Views in order of preference, each with the number of leading axes that it keeps."""
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
    """The partition spec of an array if its sharding is part of its type, else None."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (rank - len(spec))


def _view_spec(shape, spec, view, lead, sharding) -> tuple | None:
    """The view's partition spec, or None if a shard of the array is not a shard of the view."""
    merged = spec[lead:]
    if any(axis is not None for axis in merged[1:]):
        # An inner axis is sharded. That works only for a view in which it is not merged.
        return None
    axis = merged[0] if merged else None
    if len(view) == lead + 1:  # one padded row per index of the leading axes
        return None if axis is not None else (*spec[:lead], None)
    parts = parts_of(axis, sharding)
    return (*spec[:lead], axis, None) if view[lead] % parts == 0 else None


def mesh_axes(*entries) -> tuple:
    """The mesh axes in these entries of a partition spec."""
    names = (e if isinstance(e, tuple) else (e,) for e in entries if e is not None)
    return tuple(axis for entry in names for axis in entry)


def parts_of(axis, sharding) -> int:
    """The number of devices over which an entry of a partition spec shards a dimension."""
    return math.prod(sharding.mesh.shape[name] for name in mesh_axes(axis))


def reshape(x, shape, spec: tuple | None):
    """``x`` in another shape. ``spec`` is the result's sharding if it is part of the type."""
    if spec is None:
        return jax.lax.reshape(x, shape)
    return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*spec))


def spec_of(x) -> tuple | None:
    """The partition spec of an array if its sharding is part of its type, else None."""
    return explicit_spec(jax.typeof(x).sharding, x.ndim)


def whole(x, axis: int):
    """``x``, not sharded along an axis. Auto axes must be those of ``jax.set_mesh``."""
    spec = spec_of(x)
    if spec is not None:
        return jax.sharding.reshard(x, PartitionSpec(*spec[:axis], None, *spec[axis + 1 :]))
    if AxisType.Auto not in jax.sharding.get_abstract_mesh().axis_types:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * x.ndim
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*free[:axis], None, *free[axis + 1 :]))


def split(x, axis: int, sizes: tuple[int, ...]):
    """``x`` with the dimension ``axis``, counted from 0, split into dimensions of these ``sizes``.

    If the sharding is part of the type, the first new dimension takes that of the old one. If it
    cannot be sharded so, the old one is gathered first.
    """
    kind, spec = jax.typeof(x).sharding, spec_of(x)
    shape = (*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
    if spec is None:
        return jax.lax.reshape(x, shape)
    before, (own, *after) = spec[:axis], spec[axis:]
    if sizes[0] % parts_of(own, kind):
        own = None
        x = jax.sharding.reshard(x, kind.update(spec=PartitionSpec(*before, own, *after)))
    return reshape(x, shape, (*before, own, *(None,) * (len(sizes) - 1), *after))


def merge(x, axis: int, count: int = 2):
    """``x`` with ``count`` dimensions from ``axis`` on merged: the inverse of :func:`split`."""
    end, spec = axis + count, spec_of(x)
    shape = (*x.shape[:axis], math.prod(x.shape[axis:end]), *x.shape[end:])
    if spec is None:
        return jax.lax.reshape(x, shape)
    if any(spec[axis + 1 : end]):
        outer = PartitionSpec(*spec[: axis + 1], *(None,) * (count - 1), *spec[end:])
        x = jax.sharding.reshard(x, jax.typeof(x).sharding.update(spec=outer))
    own = spec[axis] if count else None
    return reshape(x, shape, (*spec[:axis], own, *spec[end:]))


def split_last(x, sizes: tuple[int, ...]):
    """:func:`split` of the last dimension."""
    return split(x, x.ndim - 1, sizes)


def merge_last(x, count: int = 2):
    """:func:`merge` of the last ``count`` dimensions."""
    return merge(x, x.ndim - count, count)


def broadcast(x, shape, kind, spec: tuple | None):
    """``x`` broadcast to a shape. ``spec`` is the result's, on the mesh of a sharding ``kind``."""
    if spec is None:
        return jnp.broadcast_to(x, shape)
    return jnp.broadcast_to(x, shape, out_sharding=kind.update(spec=PartitionSpec(*spec)))


def broadcast_type(arrays):
    """The shape, dtype and sharding that ``jnp.add`` gives an element-wise result."""
    types = [jax.typeof(x) for x in arrays]
    if all(t == types[0] for t in types):
        return types[0]
    return jax.eval_shape(lambda *xs: functools.reduce(jnp.add, xs), *arrays)


def broadcast_to(x, result):
    """``x`` broadcast to the shape of ``result``, and to its sharding if that is part of the type.

    The broadcast itself must set the sharding. If a replicated copy were resharded, its gradient
    would be gathered before it is summed.
    """
    explicit = explicit_spec(result.sharding, len(result.shape)) is not None
    if x.shape == result.shape and not (explicit and jax.typeof(x).sharding != result.sharding):
        return x
    if not explicit:
        return jnp.broadcast_to(x, result.shape)
    if x.shape == result.shape:
        return jax.sharding.reshard(x, result.sharding)
    return jnp.broadcast_to(x, result.shape, out_sharding=result.sharding)
