"""What the types of arrays say about sharding: explicit mesh axes, and axes of ``shard_map``."""

import jax
from jax.sharding import AxisType, PartitionSpec


def explicit_spec(x) -> PartitionSpec | None:
    """The partition spec of an array if its mesh has explicit axes, else ``None``."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


def varying_with(x, others):
    """``x``, varying over the mesh axes over which it or one of the others varies."""
    axes = frozenset().union(*map(_varying_axes, others)) - _varying_axes(x)
    axes = tuple(sorted(axes, key=str))
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    # jax < 0.9
    return jax.lax.pvary(x, axes)  # pyright: ignore[reportAttributeAccessIssue]


def _varying_axes(x) -> frozenset:
    kind = jax.typeof(x)
    # It is vma in earlier versions of JAX.
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying)
