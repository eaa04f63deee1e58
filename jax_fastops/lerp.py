"""``lerp``: linear interpolation of operands whose shapes broadcast.

The forward kernel reads each operand in its own shape and writes the result. The backward kernel
reads the cotangent and the operands once and writes all gradients. It sums the gradients of
broadcast operands on the chip, in the same pass.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._arguments import as_arrays, broadcast_shape, not_weak, same_floating_dtype
from jax_fastops._broadcast import backward_of, call, features_of, limit_of, of_rank
from jax_fastops._dispatch import SYMBOLIC
from jax_fastops._kernel import Kernel, match_varying
from jax_fastops._op import Op, jvp_of
from jax_fastops._registry import example
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import broadcast_to, broadcast_type, explicit_spec

_SIGNATURE = "~... *n, ~... *n, ~... *n -> ... *n"
_OPERANDS = "start: ~... *n, end: ~... *n, weight: ~... *n"
_LERP = Kernel.declare("lerp", f"{_OPERANDS} -> out: ... *n")
_LERP_BWD = Kernel.declare(
    "lerp_bwd",
    f"dy: ... *n, {_OPERANDS} -> "
    "dstart?: ... *n, dend?: ... *n, dweight?: ... *n, workspace?: ... *n :acc",
)


def _alike(*operands):
    """The operands with the sharding of the result, if types have one: `where` needs it."""
    result = broadcast_type(operands)
    if explicit_spec(result.sharding, len(result.shape)) is None:
        return operands
    return [broadcast_to(x, result) if x.ndim else x for x in operands]


@jax.custom_jvp
def _interpolate(start, end, weight):
    wide = accumulator_dtype(start.dtype)
    s, e, w = _alike(*(x.astype(wide) for x in (start, end, weight)))
    d = e - s
    finite = jnp.isfinite(d)
    from_end = (w >= 0.5) & finite
    near = jnp.where(from_end, e, s)
    factor = jnp.where(from_end, w - 1, w)
    return jnp.where(finite & (factor == 0), near, near + factor * d).astype(start.dtype)


@functools.partial(_interpolate.defjvp, symbolic_zeros=True)
def _interpolate_jvp(primals, tangents):
    """The derivative of ``start + weight * (end - start)`` in its dtype, as JAX computes it."""
    y = _interpolate(*primals)
    _, (dy,) = jvp_of(lambda s, e, w: [s + w * (e - s)], primals, tangents)
    return y, match_varying([broadcast_to(dy, jax.typeof(y)), y])[0]


_lerp = Op(
    "lerp",
    _SIGNATURE,
    _interpolate,
    example=example(lambda a, b: lerp(a, b, 0.25), "... n, ... n"),
    kernels=(_LERP, _LERP_BWD),
    forward=functools.partial(call, _LERP),
    backward=backward_of(_LERP_BWD, "start", "end", "weight"),
)


def _features(shapes, dtype) -> dict[str, int]:
    """Also how many of start and end are broadcast, and how many elements the smaller one has."""
    result = jnp.broadcast_shapes(*shapes)
    sizes = [math.prod(s) if all(isinstance(d, int) for d in s) else SYMBOLIC for s in shapes[:2]]
    ends = sum(shape != result for shape in shapes[:2])
    return features_of(shapes, dtype) | dict(ends=ends, smallest=min(sizes))


def lerp(start: ArrayLike, end: ArrayLike, weight: ArrayLike) -> jax.Array:
    """Linear interpolation: ``start + weight * (end - start)``.

    The three operands broadcast as in NumPy, and none of them is expanded. With
    ``d = end - start``, the result is

    - ``start + weight * d`` if ``d`` is not finite; otherwise
    - ``start`` if ``weight == 0`` and ``end`` if ``weight == 1``, to the last bit;
    - ``start + weight * d`` if ``weight < 0.5``;
    - ``end - (1 - weight) * d`` for any other weight.

    It is computed in float32 (float64 for float64) and rounded once. Derivatives of every order are
    those of ``start + weight * (end - start)``. The reference computes them as JAX does, in the
    dtype. The kernel computes them in float32, and that of ``start`` as ``(1 - weight) * dy``.

    Args:
      start: array of any shape, or a number; float32, bfloat16, float16 or float64.
      end: array or number of the same dtype.
      weight: array or number of the same dtype. It may lie outside of ``[0, 1]``.

    Returns:
      An array with the shape to which the three broadcast, and their dtype.

    Residuals: the three operands, each in its own shape.

    Sharding: over every dimension. The only communication is one all-reduce for each gradient that
    is summed over a sharded dimension. In a program for several devices with auto mesh axes, a
    broadcast operand gets a copy for each of them along the dimensions in which it is broadcast. If
    these are more than half as large as the result, the call takes the reference.

    Raises:
      TypeError: an argument is not an array or number, or the dtypes are not one supported dtype.
      ValueError: the shapes do not broadcast.

    Source: Paddle, ``lerp``.

    Example:
      >>> fo.lerp(jnp.zeros((2, 1)), jnp.array([4.0, 8.0]), 0.25).tolist()
      [[1.0, 2.0], [1.0, 2.0]]
    """
    names = ["start", "end", "weight"]
    arrays = as_arrays("lerp", start=start, end=end, weight=weight)
    arrays = list(map(not_weak, same_floating_dtype("lerp", arrays, names)))
    shape = broadcast_shape("lerp", arrays, names)
    arrays = match_varying([of_rank(x, len(shape)) for x in arrays])
    if not shape:
        return jnp.squeeze(lerp(*(of_rank(x, 1) for x in arrays)), 0)
    return _lerp(
        *arrays,
        features=_features([x.shape for x in arrays], arrays[0].dtype),
        limit=limit_of(shape),
    )
