"""Trees of parameters: their shapes, their shardings, new values, and stacks of layers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of a parameter."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def product(n_in: int, *n_out: int, bias: bool = True) -> dict[str, Any]:
    """The parameters of a product."""
    kernel = {"kernel": float32(n_in, *n_out)}
    return kernel | ({"bias": float32(*n_out)} if bias else {})


def norm(n: int, bias: bool = True) -> dict[str, Any]:
    """The parameters of a norm."""
    return {"scale": float32(n)} | ({"bias": float32(n)} if bias else {})


def stacked_shapes(layers: list) -> dict[str, Any]:
    """The shapes of layers as those of their stack."""
    return jax.tree.map(lambda leaf: float32(len(layers), *leaf.shape), layers[0])


def specs(shapes: Any, sharded: dict[tuple, int], axis: str | None) -> Any:
    """Partition specs for a tree of shapes.

    Args:
      shapes: the tree.
      sharded: the dimensions that are sharded, counted from the end (a stack of layers adds one
        before the others), by the last two keys of the parameter's path.
      axis: the name of the mesh axis, or ``None``.
    """

    def spec(path, leaf):
        names = tuple(getattr(step, "key", None) for step in path[-2:])
        own: list[str | None] = [None] * len(leaf.shape)
        if axis is not None and names in sharded:
            own[sharded[names]] = axis
        return PartitionSpec(*own)

    return jax.tree.map_with_path(spec, shapes)


def keys_like(key, tree: Any) -> Any:
    """A random key for each leaf of a tree."""
    structure = jax.tree.structure(tree)
    return structure.unflatten(list(jax.random.split(key, structure.num_leaves)))


def normal(key, shapes: Any, deviation: float) -> Any:
    """New parameters: kernels and tables are normal, scales are one, and biases are zero."""

    def new(path, leaf, key):
        if path[-1].key in ("scale", "bias"):
            return jnp.full(leaf.shape, float(path[-1].key == "scale"), leaf.dtype)
        return deviation * jax.random.normal(key, leaf.shape, leaf.dtype)

    return jax.tree.map_with_path(new, shapes, keys_like(key, shapes))


def cast_kernels(params: Any, dtype: str) -> Any:
    """Casts the kernels to the dtype of the products. The ops take float32 scales and biases."""

    def cast(path, leaf):
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf

    return jax.tree.map_with_path(cast, params)


def stack(layers: list) -> dict[str, Any]:
    """The layers as one, whose arrays have a leading axis over the layers."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def unstack(layers: dict) -> list[Any]:
    """The inverse of :func:`stack`."""
    count = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda a, k=k: a[k], layers) for k in range(count)]
