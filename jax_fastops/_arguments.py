"""Checks of what users pass, at trace time, worded alike for every op."""

from __future__ import annotations

import math
import numbers
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._signature import accumulator_dtype

FLOATING = ("float32", "bfloat16", "float16", "float64")


def as_arrays(op: str, **arguments) -> list[jax.Array]:
    """The arguments as JAX arrays; ``TypeError`` for what is not an array or a number."""
    arrays = []
    for name, value in arguments.items():
        scalar = isinstance(value, (bool, int, float, complex, np.generic))
        if not (scalar or isinstance(value, (jax.Array, np.ndarray)) or _is_array_like(value)):
            raise TypeError(
                f"{op}: {name} is {_describe(value)}; it must be a jax.Array, a NumPy array or a "
                "number"
            )
        try:
            # Arrays as they are: in jax 0.8 jnp.asarray gives those under vmap a wrong sharding.
            arrays.append(value if isinstance(value, jax.Array) else jnp.asarray(value))
        except TypeError as error:  # an array of strings, say
            raise TypeError(f"{op}: {name} is {_describe(value)}: {error}") from error
    return arrays


def _is_array_like(value) -> bool:
    return hasattr(value, "__jax_array__") or hasattr(value, "__array__")


def _describe(value) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _is_weak(x) -> bool:
    return getattr(x, "weak_type", False)  # arrays of extended dtypes (PRNG keys) have none


def same_floating_dtype(op: str, arrays, names) -> list[jax.Array]:
    """Arrays of one floating dtype; numbers (weakly typed) take the dtype of the others.

    Raises:
      TypeError: a dtype is not a supported floating one, or two of them differ.
    """
    strong = [x for x in arrays if not _is_weak(x)]
    dtype = strong[0].dtype if strong else jnp.result_type(*arrays)
    first = next((n for n, x in zip(names, arrays, strict=True) if not _is_weak(x)), names[0])
    for name, x in zip(names, arrays, strict=True):
        found = dtype if _is_weak(x) and not jnp.iscomplexobj(x) else x.dtype
        if str(found) not in FLOATING:
            raise TypeError(
                f"{op}: {name} has dtype {found} and shape {x.shape}; the dtype must be one of "
                f"{', '.join(FLOATING)}"
            )
        if found != dtype:
            raise TypeError(
                f"{op}: {name} has dtype {found}, but {first} has dtype {dtype}; they must be "
                "the same (use .astype on one of them)"
            )
    if all(x.dtype == dtype for x in arrays):
        return list(arrays)
    if not strong:  # weak they stay
        return [x if x.dtype == dtype else x + 0.0 for x in arrays]
    return [x if x.dtype == dtype else x.astype(dtype) for x in arrays]


def not_weak(x) -> jax.Array:
    """``x`` with a dtype of its own, as the functions of ``jax.nn`` that reduce give it."""
    return jax.lax.convert_element_type(x, x.dtype) if _is_weak(x) else x


def real_number(op: str, name: str, value, advice: str = "") -> float:
    """A Python or NumPy number, which becomes part of the program; ``TypeError`` for others."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{op}: {name} is of type {type(value).__name__}; it must be a Python or NumPy number"
            f"{advice}"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} is {value}, which no float can hold") from None


def integer(op: str, name: str, value) -> int:
    """A Python or NumPy integer; ``TypeError`` for others."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r}; it must be an integer") from None


def epsilon(op: str, eps) -> float:
    """What is added to a variance."""
    eps = real_number(op, "eps", eps)
    if math.isnan(eps):
        raise ValueError(f"{op}: eps is {eps!r}; it must be a number")
    return eps


def parameter(op: str, name: str, value, x, axis: int, what: str) -> jax.Array:
    """Values for each index of an axis of ``x``, in its dtype or in its accumulator's."""
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


def broadcast_shape(op: str, arrays, names) -> tuple[int, ...]:
    """The NumPy broadcast of the arrays' shapes, ``ValueError`` naming them if there is none."""
    try:
        return jnp.broadcast_shapes(*(x.shape for x in arrays))
    except ValueError:
        shapes = " and ".join(f"{n} of shape {x.shape}" for n, x in zip(names, arrays, strict=True))
        raise ValueError(f"{op}: Incompatible shapes for broadcasting: {shapes}") from None
