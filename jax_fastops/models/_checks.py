"""Checks that the models share; messages begin with the model's name."""

import math
import numbers
import operator

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16", "float64")


def integer(model: str, name: str, value) -> int:
    """The value as an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{model}: {name} is {value!r}; it must be an integer") from None


def number(model: str, name: str, value) -> float:
    """The value as a float, which is not NaN."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise TypeError(f"{model}: {name} is of type {kind}; it must be a Python or NumPy number")
    if math.isnan(value):
        raise ValueError(f"{model}: {name} is {value!r}; it must be a number")
    return float(value)


def check_choice(model: str, name: str, value, choices: tuple[str, ...]) -> None:
    """``value`` is one of the choices."""
    if value not in choices:
        accepted = ", ".join(map(repr, choices))
        raise ValueError(f"{model}: {name} is {value!r}; it must be one of {accepted}")


def check_vector(model: str, name: str, value, length: int, what: str) -> jax.Array:
    """A floating array of one dimension, of the length of ``what``."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{model}: {name} is of type {type(value).__name__}; it must be an array")
    if value.shape != (length,):
        raise ValueError(f"{model}: {name} has shape {value.shape}; it must be {(length,)}, {what}")
    if str(value.dtype) not in DTYPES:
        raise TypeError(
            f"{model}: {name} has dtype {value.dtype}; it must be one of {', '.join(DTYPES)}"
        )
    return jnp.asarray(value)


def dtype_name(model: str, dtype) -> str:
    """The name of a dtype. A name is returned unchanged; ``check_choice`` checks it."""
    if isinstance(dtype, str):
        return dtype
    try:
        if dtype is not None:  # which NumPy takes for float64
            return jnp.dtype(dtype).name
    except TypeError:
        pass
    raise TypeError(f"{model}: dtype is {dtype!r}; it must be a dtype or the name of one")


def check_tree(model: str, name: str, given, wanted) -> None:
    """``given`` has the tree and the shapes of ``wanted``."""

    def sizes(tree):
        return {jax.tree_util.keystr(p): jnp.shape(a) for p, a in jax.tree.leaves_with_path(tree)}

    found, expected = sizes(given), sizes(wanted)
    for path, shape in expected.items():
        if path not in found:
            raise ValueError(f"{model}: {name} has no {path}, which config has, of shape {shape}")
        if found[path] != shape:
            raise ValueError(
                f"{model}: {name}{path} has shape {found[path]}; by config it must be {shape}"
            )
    if more := sorted(set(found) - set(expected)):
        raise ValueError(f"{model}: {name} has {more[0]}, which config has not")
