"""Parameters and optimizer state that are sharded over the devices of data parallelism (ZeRO-1).

It is all in the shardings: each device keeps and updates a part of every parameter and of its
moments. In a step, the parameters are gathered, in the dtype of the products, and their gradients
are summed into the parts (on a GPU, XLA turns such a sum into a reduce-scatter)::

    state = optimizer.init(params), params
    places = zero.shardings(jax.eval_shape(lambda: state), mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
    def step(state, batch):
        inner, params = state
        value, grads = jax.value_and_grad(
            lambda params: loss(zero.gather(params, mesh, "bfloat16"), batch)
        )(params)
        changes, inner = optimizer.update(grads, inner, params)
        return (inner, optax.apply_updates(params, changes)), value

An array is whole in a checkpoint, so it loads on another number of devices, with the shardings of
those. The examples need ``import jax, jax.numpy as jnp``, ``from jax_fastops.models import zero``.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

__all__ = ["gather", "shardings"]

_TABLES = ("head", "embeddings", "word")  # of words, in the models of this package


def shardings(arrays: Any, mesh: Mesh, *, axis: str = "data", specs: Any = None) -> Any:
    """The sharding of each array over one more axis of a mesh.

    That axis shards the first dimension that it divides and that no other axis shards. An array
    without such a dimension, or that the axis shards already, stays as ``specs`` says.

    Args:
      arrays: a tree of arrays or ``jax.ShapeDtypeStruct``, such as parameters or the state of an
        optimizer.
      mesh: the mesh, with Auto axes.
      axis: the name of the axis.
      specs: a tree of ``PartitionSpec``, such as that of a model's ``partition_specs``: how other
        axes shard the arrays. Default: no other axis does.

    Returns:
      A tree of ``jax.sharding.NamedSharding``.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> zero.shardings({"kernel": jnp.ones((4, 8))}, mesh)["kernel"].spec[0]
      'data'
    """
    if axis not in mesh.shape:
        raise ValueError(f"zero: axis is {axis!r}; the mesh has {mesh.axis_names}")

    def sharding(array, spec):
        if len(spec) > len(array.shape):
            raise ValueError(f"zero: specs has {spec} for an array of shape {array.shape}")
        own = [*spec, *(None,) * (len(array.shape) - len(spec))]
        if any(axis in (one if isinstance(one, tuple) else (one,)) for one in own):
            return NamedSharding(mesh, spec)
        for dim, size in enumerate(array.shape):
            if own[dim] is None and size % mesh.shape[axis] == 0:
                own[dim] = axis
                break
        return NamedSharding(mesh, PartitionSpec(*own))

    return jax.tree.map(sharding, arrays, _specs_of(arrays, specs))


def gather(
    params: Any, mesh: Mesh, dtype: DTypeLike, *, axis: str = "data", specs: Any = None
) -> Any:
    """Whole parameters for a forward pass, from parts that are sharded by :func:`shardings`.

    Args:
      params: a tree of arrays.
      mesh, axis, specs: as in :func:`shardings`.
      dtype: of the result, such as ``config.dtype``. Parameters named ``"scale"`` and ``"bias"``,
        and those that are not floating-point, keep theirs.

    Returns:
      The parameters, sharded as ``specs`` says. Their gradients have the dtype of the result until
      they are summed, and then those of ``params``, and are sharded as these. Those of ``"head"``,
      ``"embeddings"`` and ``"word"`` are summed whole, and then cut: a loss adds them up in a loop,
      and XLA would move the sum of each part into that loop.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> zero.gather({"kernel": jnp.ones((4, 8))}, mesh, "bfloat16")["kernel"].dtype
      dtype(bfloat16)
    """

    def gathered(path, array, spec, part):
        name = getattr(path[-1], "key", None) if path else None
        keeps = name in ("scale", "bias") or not jnp.issubdtype(array.dtype, jnp.floating)
        own = array.dtype if keeps else dtype
        whole = NamedSharding(mesh, spec)
        return _moved(part, whole, whole if name in _TABLES else part, own, array)

    specs, parts = _specs_of(params, specs), shardings(params, mesh, axis=axis, specs=specs)
    return jax.tree.map_with_path(gathered, params, specs, parts)


def _specs_of(arrays, specs):
    """``specs``, or for each array the spec of one that no axis shards."""
    return jax.tree.map(lambda _: PartitionSpec(), arrays) if specs is None else specs


def _moved(part: NamedSharding, whole: NamedSharding, summed: NamedSharding, dtype, array):
    """The array in a dtype, cast where it is and then moved, and its gradient moved and cast.

    ``summed`` is the sharding in which the gradient is added up.
    """
    own = array.dtype

    @jax.custom_vjp
    def moved(x):
        x = jax.lax.with_sharding_constraint(x.astype(dtype), part)
        return jax.lax.with_sharding_constraint(x, whole)

    def backward(_, y):
        y = jax.lax.with_sharding_constraint(y, summed)
        return (jax.lax.with_sharding_constraint(y, part).astype(own),)

    moved.defvjp(lambda x: (moved(x), None), backward)
    return moved(array)
