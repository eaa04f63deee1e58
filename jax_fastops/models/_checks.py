"""Checks that the models share; messages begin with the model's name."""

import numbers
import operator

import jax
import jax.numpy as jnp

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_choice(model: str, name: str, value, choices: tuple[str, ...]) -> None:
    """``value`` is one of the choices."""
    if value not in choices:
        accepted = ", ".join(map(repr, choices))
        raise ValueError(f"{model}: {name} is {value!r}; it must be one of {accepted}")


def integer(model: str, name: str, value, least: int) -> int:
    """The value as an int of ``least`` or more."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{model}: {name} is {value!r}; it must be an integer") from None
    if value < least:
        raise ValueError(f"{model}: {name} is {value}; it must be {least} or more")
    return value


def number(model: str, name: str, value) -> float:
    """The value as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise TypeError(f"{model}: {name} is of type {kind}; it must be a Python or NumPy number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{model}: {name} is {value}, which no float can hold") from None


def dtype_name(model: str, dtype) -> str:
    """The name of a floating dtype, given by itself or by its name."""
    try:
        name = dtype if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name is None:  # NumPy takes None for float64
        raise TypeError(f"{model}: dtype is {dtype!r}; it must be a dtype or the name of one")
    check_choice(model, "dtype", name, _DTYPES)
    return name


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
