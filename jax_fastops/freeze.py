"""``freeze``: binds parameters to a function for inference, as few arrays.

The host handles each argument of a compiled program in each call. A network has hundreds of
parameters, and a short call on a GPU then takes longer on the host than on the device. So leaves
of the same shape, dtype and sharding are stacked into one array, of which the program reads slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_fastops._arguments import integer, not_weak


def freeze(fn: Callable, params: Any, *, max_bytes: int = 2**16) -> Frozen:
    """Binds parameters to a function, for inference.

    ``freeze(fn, params)(*args)`` equals ``jax.jit(fn)(params, *args)``. The host takes less time:
    small leaves of the same shape, dtype and sharding are stacked into one array, so that the
    program has fewer arguments.

    Args:
      fn: a function of ``params`` and arrays.
      params: a pytree of arrays. They may be sharded.
      max_bytes: the largest leaf that is stacked. The program reads slices of the stacks. On a GPU,
        with jax 0.11 or later, kernels of this package and XLA's own read them in place, but
        matrix products of cuBLAS read copies. Vectors have fewer than 64 KiB, and matrices more.

    Returns:
      A :class:`Frozen`. It has copies of what is stacked. If nothing else refers to ``params``,
      their memory is then free.

    Raises:
      TypeError: ``fn`` is not a function, or ``max_bytes`` not an integer.

    Example:
      >>> frozen = fo.freeze(lambda params, x: x @ params["w"], {"w": jnp.eye(2)})
      >>> frozen(jnp.ones(2)).tolist()
      [1.0, 1.0]
      >>> frozen.replace({"w": 2 * jnp.eye(2)})(jnp.ones(2)).tolist()
      [2.0, 2.0]
    """
    if not callable(fn):
        raise TypeError(f"freeze: fn is of type {type(fn).__name__}; it must be a function")
    leaves, structure = jax.tree.flatten(params)
    leaves = [not_weak(jnp.asarray(leaf)) for leaf in leaves]
    layout = _Layout(fn, structure, leaves, integer("freeze", "max_bytes", max_bytes))
    return Frozen(layout, layout.stack(leaves))


@jax.tree_util.register_pytree_node_class
class Frozen:
    """The result of :func:`freeze`: a function with its parameters. A pytree of few arrays.

    A call is compiled as by ``jax.jit``. As an argument of another jitted function, its arrays are
    arguments, and another :class:`Frozen` from :meth:`replace` compiles nothing. If a jitted
    function closes over it instead, its arrays are constants of that program.

    Attributes:
      arrays: a tuple of arrays, the leaves of the pytree.
      apply: the jitted function of ``arrays`` and the other arguments, for ``jax.export`` and
        ``apply.lower(frozen.arrays, ...)``.

    Example:
      >>> frozen = fo.freeze(lambda params, x: x + params["a"] * params["b"], {"a": 2.0, "b": 3.0})
      >>> [array.shape for array in frozen.arrays]
      [(2,)]
      >>> jax.jit(lambda frozen, x: frozen(x))(frozen, 1.0).item()
      7.0
    """

    def __init__(self, layout: _Layout, arrays: tuple) -> None:
        self._layout = layout
        self.arrays = arrays

    @property
    def apply(self) -> Any:
        return self._layout.apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``fn(params, *args, **kwargs)``."""
        return self._layout.apply(self.arrays, *args, **kwargs)

    @property
    def params(self) -> Any:
        """The parameters as a tree, for use in a jitted function. Elsewhere, they are copies."""
        return self._layout.tree(self.arrays)

    def replace(self, params: Any) -> Frozen:
        """The same function with other parameters: nothing is compiled again.

        Args:
          params: a tree of the same structure, shapes and dtypes. It gets the same sharding.

        Raises:
          ValueError: the structure or a shape is another one.
          TypeError: a dtype is another one.
        """
        leaves, structure = jax.tree.flatten(params)
        if structure != self._layout.structure:
            raise ValueError(
                f"freeze: params has the structure {structure}; it must be {self._layout.structure}"
            )
        leaves = [not_weak(jnp.asarray(leaf)) for leaf in leaves]
        for leaf, expected in zip(leaves, self._layout.types, strict=True):
            if leaf.shape != expected.shape:
                raise ValueError(
                    f"freeze: params has an array of shape {leaf.shape}; it must be "
                    f"{expected.shape}, as before"
                )
            if leaf.dtype != expected.dtype:
                raise TypeError(
                    f"freeze: params has an array of {leaf.dtype}; it must be of {expected.dtype}, "
                    "as before"
                )
        return Frozen(self._layout, self._layout.stack(leaves))

    def tree_flatten(self) -> tuple[tuple, _Layout]:
        return self.arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: _Layout, arrays: Any) -> Frozen:
        return cls(layout, tuple(arrays))


class _Layout:
    """How the leaves of a tree are stacked, and the jitted function of the stacks.

    It is the static part of a pytree, and equal only to itself: a jitted function that takes a
    ``Frozen`` is compiled again for another function.
    """

    def __init__(self, fn: Callable, structure, leaves: list, max_bytes: int) -> None:
        groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            stacked = _is_stackable(leaf) and leaf.size * leaf.dtype.itemsize <= max_bytes
            key = (leaf.shape, leaf.dtype, _sharding(leaf)) if stacked else index
            groups.setdefault(key, []).append(index)
        self.groups = list(groups.values())
        # Where each leaf is: an array, and an index into it unless the array is the leaf.
        places = {
            leaf: (array, None if len(group) == 1 else index)
            for array, group in enumerate(self.groups)
            for index, leaf in enumerate(group)
        }
        self.places = [places[index] for index in range(len(leaves))]
        self.structure = structure
        self.types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self.shardings = [_sharding(leaf) for leaf in leaves]

        def frozen(arrays, *args, **kwargs):
            return fn(self.tree(arrays), *args, **kwargs)

        self.apply = jax.jit(frozen)

    def tree(self, arrays: tuple):
        """The parameters."""

        def leaf(array, index):
            array = arrays[array]
            return array if index is None else jax.lax.index_in_dim(array, index, keepdims=False)

        return self.structure.unflatten([leaf(*place) for place in self.places])

    def stack(self, leaves: list) -> tuple:
        """The arrays, with the shardings of the leaves that the layout was made for."""
        placed = [
            leaf if sharding is None or isinstance(leaf, Tracer) else jax.device_put(leaf, sharding)
            for leaf, sharding in zip(leaves, self.shardings, strict=True)
        ]
        return tuple(_stack([placed[index] for index in group]) for group in self.groups)


def _stack(leaves: list):
    if len(leaves) == 1:
        return leaves[0]
    sharding = _sharding(leaves[0])
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    else:
        sharding = None  # that of the leaves
    return jax.jit(_stacked, out_shardings=sharding)(leaves)


def _stacked(leaves: list):
    return jnp.stack(leaves)


def _sharding(leaf):
    """The sharding of an array, ``None`` if it is traced or may be moved to another device."""
    is_placed = not isinstance(leaf, Tracer) and leaf.committed
    return leaf.sharding if is_placed else None


def _is_stackable(leaf) -> bool:
    """Whether a stack can be sharded like the leaf."""
    return isinstance(_sharding(leaf), (NamedSharding, SingleDeviceSharding, type(None)))
