"""The activations: their names, and their functions in JAX, which are the kernels' references.

``src/core/activation.h`` has the kernels' formulas. Its names are those of ``Activation``, which
type checkers must be able to read. A name stands for the function of ``jax.nn``, unless this module
defines one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import jax

_F = TypeVar("_F", bound=Callable)

Activation = Literal["gelu", "gelu_exact", "silu", "relu", "quick_gelu", "mish"]


def gelu_exact(x):
    """``jax.nn.gelu(x, approximate=False)``, by erf"""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x):
    """``x * jax.nn.sigmoid(1.702 * x)``"""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable] = {
    name: globals().get(name) or getattr(jax.nn, name) for name in get_args(Activation)
}


# Their calls are in the table of "auto". Others count as silu, or as one that XLA computes in about
# the same time.
_MEASURED = ("gelu", "gelu_exact", "silu", "relu")
_LIKE = {"mish": "gelu_exact"}


def measured(name: str) -> str:
    """The activation whose entry in the table of ``"auto"`` decides."""
    return name if name in _MEASURED else _LIKE.get(name, "silu")


def documented(fn: _F) -> _F:
    """Lists the activations in a docstring, in place of ``{activations}``."""
    lines = (
        f'- ``"{name}"``: {function.__doc__ if name in globals() else f"``jax.nn.{name}(x)``"}'
        for name, function in ACTIVATIONS.items()
    )
    fn.__doc__ = (fn.__doc__ or "").replace("{activations}", "\n        ".join(lines))
    return fn
