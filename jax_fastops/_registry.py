"""The families of ops, each of which names itself where it is defined.

A family is a module of this package. The selftest, the benchmarks, the documentation and the tests
read :func:`families`, so none of them has a list of families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The aligned and the odd size of a dimension.
_SIZES = {"...": (256, 7), "n": (1024, 129)}


class Example(NamedTuple):
    """A call of a public function: a function of arrays, and their shapes, aligned and odd."""

    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


_FAMILIES: dict[str, dict[str, Example]] = {}


def families() -> dict[str, dict[str, Example]]:
    """The examples of each family, by the names of the families and of what is called."""
    return {family: dict(calls) for family, calls in _FAMILIES.items()}


def register(family: str, name: str, call: Example) -> None:
    """Adds a call to a family. An :class:`~jax_fastops._op.Op` with an example does this."""
    _FAMILIES.setdefault(family, {})[name] = call


def example(function: Callable[..., Any], operands: str, **sizes: tuple[int, int]) -> Example:
    """A call, with operands in the notation of signatures: ``example(bias_act, "... n, n")``.

    Args:
      function: takes floating-point arrays. It is called later, so it may name what the module
        defines below.
      operands: the dimensions of each operand.
      sizes: the aligned and the odd size of a dimension. ``...`` and ``n`` have some.
    """
    known = _SIZES | sizes
    shapes = [operand.split() for operand in operands.split(",")]
    return Example(
        function, tuple(tuple(tuple(known[d][i] for d in s) for s in shapes) for i in (0, 1))
    )


def constant(value: Any) -> Any:
    """A constant that XLA does not compute with while it compiles."""
    return jax.lax.optimization_barrier(jnp.asarray(value))


def example_key() -> Any:
    """A key of dropout for an example."""
    return jax.random.wrap_key_data(constant(np.array([0, 1], np.uint32)))
