"""What the models need of jax that has no one name in all versions, or none."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec


def explicit_spec(x: jax.Array) -> tuple | None:
    """The partition spec of an array over a mesh with explicit axes, or ``None``."""
    sharding: Any = jax.typeof(x).sharding
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def reshape(x: jax.Array, shape: tuple[int, ...], spec: tuple | None) -> jax.Array:
    """``x`` in another shape. ``spec`` is the result's over explicit axes."""
    return jax.lax.reshape(x, shape, out_sharding=None if spec is None else PartitionSpec(*spec))


def varying_as(x: jax.Array, like: Any) -> jax.Array:
    """``x``, varying over the manual axes of ``jax.shard_map`` over which ``like`` varies."""
    axes = frozenset().union(*map(_varying, jax.tree.leaves(like))) - _varying(x)
    if not axes:
        return x
    lax: Any = jax.lax
    missing = tuple(sorted(axes, key=str))
    # jax < 0.9 has no pcast.
    return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)


def _varying(x) -> frozenset:
    kind: Any = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)
