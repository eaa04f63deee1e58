"""Checks that the models share; messages begin with the model's name."""

import jax
import jax.numpy as jnp


def check_choice(model: str, name: str, value, choices: tuple[str, ...]) -> None:
    """``value`` is one of the choices."""
    if value not in choices:
        accepted = ", ".join(map(repr, choices))
        raise ValueError(f"{model}: {name} is {value!r}; it must be one of {accepted}")


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
