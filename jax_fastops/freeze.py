"""``freeze``: binds parameters to a function for inference, as few arrays.

The host handles each argument of a compiled program in each call, and a network has hundreds of
parameters. So small leaves of the same shape, dtype and sharding are stacked into one array, of
which the program reads slices.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_fastops._arguments import check_function, integer, not_weak

# The leaves that the function being traced reads from stacks: by their id, and what reads them.
_SLICES: contextvars.ContextVar[dict[int, tuple[Any, Callable]] | None] = contextvars.ContextVar(
    "jax_fastops_slices", default=None
)


def again(params: Any) -> Callable[[], Any]:
    """A function that gives a tree of parameters, and reads slices of stacks where it is called.

    A branch of ``jax.lax.cond`` that calls it has the stacks as operands. Slices that are read
    before would be operands themselves, for each of which XLA makes a copy.
    """
    leaves, structure = jax.tree.flatten(params)
    slices = _SLICES.get() or {}
    reads = [slices.get(id(leaf), (leaf, lambda leaf=leaf: leaf)) for leaf in leaves]
    return lambda: structure.unflatten([read() for _, read in reads])


def freeze(fn: Callable, params: Any, *, max_bytes: int = 2**16) -> Frozen:
    """Binds parameters to a function, for inference.

    ``freeze(fn, params)(*args)`` equals ``jax.jit(fn)(params, *args)``. Small leaves of the same
    shape, dtype and sharding are stacked into one array, so that the program has fewer arguments.

    Args:
      fn: a function of ``params`` and arrays.
      params: a pytree of arrays and numbers. Arrays may be sharded. Python numbers and other
        leaves of weak type keep it, and are not stacked.
      max_bytes: the largest leaf that is stacked. The program reads slices of the stacks. On a GPU,
        with jax 0.11 or later, kernels of this package and XLA's own read them in place, but
        matrix products of cuBLAS read copies. By default, arrays of at most 64 KiB are stacked.

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
    check_function("freeze", fn)
    leaves, structure = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
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
      >>> params = {"a": jnp.float32(2), "b": jnp.float32(3)}
      >>> frozen = fo.freeze(lambda params, x: x + params["a"] * params["b"], params)
      >>> [array.shape for array in frozen.arrays]
      [(2,)]
      >>> jax.jit(lambda frozen, x: frozen(x))(frozen, 1.0).item()
      7.0
    """

    def __init__(self, layout: _Layout, arrays: tuple[Any, ...]) -> None:
        self._layout = layout
        self.arrays = arrays

    @property
    def apply(self) -> Any:
        return self._layout.apply

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """``fn(params, *args, **kwargs)``."""
        return self._layout.apply(self.arrays, *args, **kwargs)

    @property
    def params(self) -> Any:
        """The parameters as a tree, for use in a jitted function. Elsewhere, they are copies."""
        return self._layout.tree(self.arrays)

    def replace(self, params: Any) -> Frozen:
        """The same function with other parameters: nothing is compiled again.

        Args:
          params: a tree of the same structure, shapes and dtypes. Its arrays are placed like
            those of ``freeze``, and have weak type where those have it. If a leaf of ``freeze`` was
            not committed to a device, an array that is committed is copied through the host. In a
            traced function, arrays keep their sharding.

        Raises:
          ValueError: the structure or a shape is another one.
          TypeError: a dtype is another one.
        """
        leaves, structure = jax.tree.flatten(params)
        if structure != self._layout.structure:
            raise ValueError(
                f"freeze: params has the structure {structure}; it must be {self._layout.structure}"
            )
        leaves = [jnp.asarray(leaf) for leaf in leaves]
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

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Layout]:
        return self.arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: _Layout, arrays: Any) -> Frozen:
        return cls(layout, tuple(arrays))


class _Layout:
    """How the leaves of a tree are stacked, and the jitted function of the stacks.

    It is the static part of a pytree, and equal only to itself: a jitted function that takes a
    ``Frozen`` is compiled again for another function.
    """

    def __init__(self, fn: Callable, structure: Any, leaves: list[Any], max_bytes: int) -> None:
        groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            stacked = _is_stackable(leaf) and leaf.size * leaf.dtype.itemsize <= max_bytes
            key = (jax.typeof(leaf), _place(leaf)) if stacked else index
            groups.setdefault(key, []).append(index)
        self.groups: list[list[int]] = list(groups.values())
        # Where each leaf is: an array, and an index into it unless the array is the leaf.
        places: dict[int, tuple[int, int | None]] = {
            leaf: (array, None if len(group) == 1 else index)
            for array, group in enumerate(self.groups)
            for index, leaf in enumerate(group)
        }
        self.places: list[tuple[int, int | None]] = [places[index] for index in range(len(leaves))]
        self.structure: Any = structure
        self.types: list[Any] = [jax.typeof(leaf) for leaf in leaves]
        self.device_places: list[Any] = [_place(leaf) for leaf in leaves]

        # JAX fails if a keyword has the name of a parameter, also of one that is only positional.
        def frozen(arrays_, /, *args_, **kwargs_):
            reads = self.reads(arrays_)
            leaves = [read() for read in reads]
            found = zip(leaves, reads, self.places, strict=True)
            slices = {id(leaf): (leaf, read) for leaf, read, (_, i) in found if i is not None}
            token = _SLICES.set(slices)
            try:
                return fn(self.structure.unflatten(leaves), *args_, **kwargs_)
            finally:
                _SLICES.reset(token)

        self.apply: Any = jax.jit(frozen)

    def reads(self, arrays: tuple[Any, ...]) -> list[Callable[[], Any]]:
        """What gives each leaf."""

        def leaf(array, index):
            return array if index is None else jax.lax.index_in_dim(array, index, keepdims=False)

        return [functools.partial(leaf, arrays[array], index) for array, index in self.places]

    def tree(self, arrays: tuple[Any, ...]) -> Any:
        """The parameters."""
        return self.structure.unflatten([read() for read in self.reads(arrays)])

    def stack(self, leaves: list[Any]) -> tuple[Any, ...]:
        """The arrays, with the places and weak types of the leaves of the layout."""
        placed = list(map(_placed, leaves, self.types, self.device_places))
        return tuple(_stack([placed[index] for index in group]) for group in self.groups)


def _placed(leaf, expected, place):
    """The leaf at a place, and of weak type if that is expected."""
    if place is None or isinstance(leaf, Tracer) or _place(leaf) == place:
        return _typed(leaf, expected)
    sharding, committed = place
    if committed:
        return jax.device_put(_typed(leaf, expected), sharding)
    # Only arrays from the host are not committed to a device.
    with jax.default_device(min(sharding.device_set, key=lambda device: device.id)):
        return _typed(_from_host(leaf), expected)


def _from_host(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _from_host(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _typed(leaf, expected):
    if jax.typeof(leaf).weak_type == expected.weak_type:
        return leaf
    if not expected.weak_type:
        return not_weak(leaf)
    weak = jnp.full(leaf.shape, np.zeros((), leaf.dtype).item())  # like a Python number
    return weak.at[...].set(leaf)


def _stack(leaves: list[Any]) -> Any:
    if len(leaves) == 1:
        return leaves[0]
    place = _place(leaves[0])
    sharding = None if place is None else place[0]
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    else:
        sharding = None  # that of the leaves
    return jax.jit(_stacked, out_shardings=sharding)(leaves)


def _stacked(leaves: list):
    return jnp.stack(leaves)


def _place(leaf):
    """The sharding of an array and whether it is committed to it, or ``None`` if it is traced."""
    return None if isinstance(leaf, Tracer) else (leaf.sharding, leaf.committed)


def _is_stackable(leaf) -> bool:
    """Whether a stack can have the type and the sharding of the leaf."""
    if jax.typeof(leaf).weak_type:
        return False
    place = _place(leaf)
    return place is None or isinstance(place[0], (NamedSharding, SingleDeviceSharding))
