"""Checks of the users' arguments at trace time, with the same wording for every op."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fastops._signature import accumulator_dtype

FLOATING = ("float32", "bfloat16", "float16", "float64")


def as_arrays(op: str, **arguments: object) -> list[jax.Array]:
    """The arguments as JAX arrays. Raises ``TypeError`` if one is not an array or a number."""
    arrays = []
    for name, value in arguments.items():
        scalar = isinstance(value, (bool, int, float, complex, np.generic))
        if not (scalar or isinstance(value, (jax.Array, np.ndarray)) or _is_array_like(value)):
            raise TypeError(
                f"{op}: {name} is {_describe(value)}; it must be a jax.Array, a NumPy array or a "
                "number"
            )
        try:
            # Not asarray of an array: in jax 0.8 it gives a vmap tracer a wrong sharding.
            arrays.append(value if isinstance(value, jax.Array) else jnp.asarray(value))
        except TypeError as error:  # an array of strings, say
            raise TypeError(f"{op}: {name} is {_describe(value)}: {error}") from error
    return arrays


def array_leaves(
    args: tuple, kwargs: dict, is_array: Callable[[Any], bool]
) -> tuple[list, Callable[[Iterable], Any]]:
    """The arrays in the arguments of a call, and what puts others in their places."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    flags = [is_array(leaf) for leaf in leaves]

    def with_arrays(arrays: Iterable) -> Any:
        return jax.tree.unflatten(tree, placed(arrays, flags, leaves))

    return selected(leaves, flags), with_arrays


def selected(values: Iterable, flags: Iterable) -> list:
    """The values whose flag is true."""
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def placed(values: Iterable, flags: Sequence, others: Iterable | None = None) -> list:
    """The values in the places of the true flags, and ``others`` or ``None`` in the others."""
    rest, others = iter(values), [None] * len(flags) if others is None else others
    return [next(rest) if flag else x for flag, x in zip(flags, others, strict=True)]


def _is_array_like(value) -> bool:
    return hasattr(value, "__jax_array__") or hasattr(value, "__array__")


def _describe(value) -> str:
    if isinstance(value, jax.core.Tracer):
        return "traced"
    return "None" if value is None else f"of type {type(value).__name__}"


def _is_weak(x) -> bool:
    return getattr(x, "weak_type", False)  # arrays of extended dtypes (PRNG keys) have none


def same_floating_dtype(
    op: str, arrays: Sequence[jax.Array], names: Sequence[str], widen: bool = False
) -> list[jax.Array]:
    """The arrays in one floating dtype. Weakly typed numbers take the dtype of the others.

    With ``widen``, that is the widest dtype of all. Raises ``TypeError`` if there is no such dtype.
    """
    strong = [x for x in arrays if not _is_weak(x)]
    dtype = strong[0].dtype if strong else jnp.result_type(*arrays)
    if widen and all(str(x.dtype) in FLOATING for x in strong):
        dtype = max((x.dtype for x in strong), key=lambda d: d.itemsize, default=dtype)
    first = next((n for n, x in zip(names, arrays, strict=True) if not _is_weak(x)), names[0])
    for name, x in zip(names, arrays, strict=True):
        found = dtype if _is_weak(x) and not jnp.iscomplexobj(x) else x.dtype
        if str(found) not in FLOATING:
            raise TypeError(
                f"{op}: {name} has dtype {found} and shape {x.shape}; the dtype must be one of "
                f"{', '.join(FLOATING)}"
            )
        if found != dtype and not (widen and found.itemsize < dtype.itemsize):
            raise TypeError(
                f"{op}: {name} has dtype {found}, but {first} has dtype {dtype}; they must be "
                "the same (use .astype on one of them)"
            )
    if all(x.dtype == dtype for x in arrays):
        return list(arrays)
    if not strong:  # the result is weakly typed, too
        return [x if x.dtype == dtype else x + 0.0 for x in arrays]
    return [x if x.dtype == dtype else x.astype(dtype) for x in arrays]


def is_integer(x: jax.Array) -> bool:
    """Whether an array has integers or booleans."""
    return jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_


def not_weak(x: jax.Array) -> jax.Array:
    """``x`` without weak type, as from the functions of ``jax.nn`` that reduce."""
    return jax.lax.convert_element_type(x, x.dtype) if _is_weak(x) else x


def real_number(op: str, name: str, value: object, advice: str = "") -> float:
    """The value as a float, static in the program. Raises ``TypeError`` if it is not a number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        known = ", known when the function is traced" if isinstance(value, jax.core.Tracer) else ""
        raise TypeError(
            f"{op}: {name} is {_describe(value)}; it must be a Python or NumPy number{known}"
            f"{advice}"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} is {value}, which no float can hold") from None


def check_function(op: str, fn: object) -> None:
    """Raises ``TypeError`` if ``fn`` cannot be called."""
    if not callable(fn):
        raise TypeError(f"{op}: fn is {_describe(fn)}; it must be a function")


def integer(op: str, name: str, value: SupportsIndex) -> int:
    """The value as an int. Raises ``TypeError`` if it is not a Python or NumPy integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r}; it must be an integer") from None


def one_of(op: str, name: str, value: object, known: Iterable[str]) -> None:
    """Raises ``ValueError`` if the value is not one of the known names."""
    if not isinstance(value, str) or value not in known:
        names = ", ".join(repr(name) for name in known)
        function = getattr(value, "__name__", None)
        given = f"the function {function}" if callable(value) and function else repr(value)
        raise ValueError(f"{op}: {name} is {given}; it must be one of {names}")


def epsilon(op: str, eps: object) -> float:
    """Checks ``eps``, which is added to a variance."""
    eps = real_number(op, "eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op}: eps is {eps!r}; it must be 0 or more, and finite")
    return eps


def is_epsilon(eps: object) -> bool:
    """Whether the ops take this epsilon. Flax also takes an array, NaN and negative numbers."""
    try:
        return epsilon("", eps) >= 0
    except (TypeError, ValueError):
        return False


def parameter(
    op: str, name: str, value: ArrayLike | None, x: jax.Array, axis: int, what: str
) -> jax.Array:
    """Checks a parameter along an axis of ``x``; casts it to the dtype or accumulator of ``x``."""
    (value,) = as_arrays(op, **{name: value})
    if value.shape != (x.shape[axis],):
        raise ValueError(
            f"{op}: {name} has shape {value.shape}; it must be {(x.shape[axis],)}, {what}, of "
            f"shape {x.shape}"
        )
    if str(value.dtype) not in FLOATING:
        raise TypeError(
            f"{op}: {name} has dtype {value.dtype} and shape {value.shape}; the dtype must be one "
            f"of {', '.join(FLOATING)}"
        )
    return value if value.dtype == x.dtype else value.astype(accumulator_dtype(x.dtype))


def broadcasts(shape: Sequence, result: Sequence) -> bool:
    """Whether ``shape`` broadcasts to ``result``."""
    try:
        return jnp.broadcast_shapes(shape, result) == result
    except ValueError:
        return False


def check_mask(op: str, where: jax.Array, shape: tuple[int, ...], of: str, counts: str) -> None:
    """Checks that ``where`` is boolean and broadcasts to ``shape``, which is that of ``of``."""
    if where.dtype != jnp.bool_:
        raise TypeError(
            f"{op}: where has dtype {where.dtype} and shape {where.shape}; it must be boolean "
            f"(True where {counts} counts)"
        )
    if not broadcasts(where.shape, shape):
        raise ValueError(
            f"{op}: where has shape {where.shape}, which does not broadcast to the shape {shape} "
            f"of {of}"
        )


def broadcast_shape(op: str, arrays: Sequence[jax.Array], names: Sequence[str]) -> tuple[int, ...]:
    """The broadcast shape. Raises ``ValueError`` with the names if there is none."""
    try:
        return jnp.broadcast_shapes(*(x.shape for x in arrays))
    except ValueError:
        shapes = " and ".join(f"{n} of shape {x.shape}" for n, x in zip(names, arrays, strict=True))
        raise ValueError(f"{op}: Incompatible shapes for broadcasting: {shapes}") from None
