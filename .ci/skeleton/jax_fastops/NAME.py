"""``NAME``: twice an array. Say here what the family computes, and what the kernels save."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._arguments import as_arrays, same_floating_dtype
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op
from jax_fastops._registry import example

_KERNEL = Kernel.declare("NAME", "x: ... n -> y: ... n")


def _run(x):
    return _KERNEL(x).y


_op = Op(
    "NAME",
    "... n -> ... n",
    lambda x: x + x,
    example=example(lambda x: NAME(x), "... n"),
    kernels=(_KERNEL,),
    forward=_run,
    residuals=lambda args, outs, saved: (),
    pullback=lambda residuals, cts: (cts[0] + cts[0],),
    pushforward=lambda residuals, tangents: tangents[0] + tangents[0],
    backward=lambda residuals, cts, needs_grad: (_run(cts[0]),),
    tangent=lambda residuals, tangents: _run(tangents[0]),
)


def NAME(x: ArrayLike) -> jax.Array:
    """Twice an array: ``x + x``.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64.

    Returns:
      An array with the shape and dtype of ``x``.

    Residuals: none.

    Raises:
      TypeError: ``x`` is not an array or number, or has another dtype.

    Example:
      >>> fo.NAME(jnp.array([-1.0, 2.0])).tolist()
      [-2.0, 4.0]
    """
    (x,) = same_floating_dtype("NAME", as_arrays("NAME", x=x), ["x"])
    return _op(jnp.atleast_1d(x)).reshape(x.shape)
