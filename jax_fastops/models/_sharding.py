"""What the types of arrays say about sharding: explicit mesh axes, and axes of ``shard_map``."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jax_fastops import _compat
from jax_fastops._views import whole as whole


def explicit_spec(x) -> PartitionSpec | None:
    """The partition spec of an array if its mesh has explicit axes, else ``None``."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


def is_sharded(x, axis: int) -> bool:
    """Whether an explicit mesh axis shards this axis."""
    spec = explicit_spec(x)
    return spec is not None and spec[axis] is not None


def split_last(x, *sizes: int):
    """``x`` with its last axis split; over explicit axes, the first part is sharded as it was."""
    shape, spec = (*x.shape[:-1], *sizes), explicit_spec(x)
    if spec is not None:
        spec = PartitionSpec(*spec, *(None,) * (len(sizes) - 1))
    return jax.lax.reshape(x, shape, out_sharding=spec)


def element(x, place: int):
    """``x[:, place]``."""
    spec = explicit_spec(x)
    if spec is None or spec[1] is None:
        return x[:, place]
    # JAX does not slice explicit shards. The device that has the element sends it by a sum.
    index = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1], *(1,) * (x.ndim - 2)), 1)
    return jnp.where(index == place % x.shape[1], x, jnp.zeros_like(x)).sum(1)


def following(x, fill):
    """The next element along the last axis, and ``fill`` for the last one. Sharded like ``x``."""
    spec = explicit_spec(x)
    x = x if spec is None else whole(x, x.ndim - 1)  # JAX does not slice explicit shards
    x = jnp.pad(x[..., 1:], ((0, 0),) * (x.ndim - 1) + ((0, 1),), constant_values=fill)
    return x if spec is None else jax.sharding.reshard(x, spec)


def tokens_at_once(x, classes: int) -> int | None:
    """``chunk`` of ``linear_cross_entropy`` in a mesh with auto axes, whose sharding is not known.

    So many tokens that each device has logits of 512 MiB, where tokens or classes are sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Auto not in mesh.axis_types:
        return None
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    devices = math.prod(size for size, kind in axes if kind != AxisType.Manual)
    return devices * max(1, 2**29 // (classes * x.dtype.itemsize))


def varying_with(x, others):
    """``x``, varying over the mesh axes over which it or one of the others varies."""
    return _compat.as_varying(x, frozenset().union(*map(_compat.varying_axes, others)))
