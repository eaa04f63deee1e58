"""``relu`` and ``add_relu``: the backward reads one bit per element.

The forward writes ``x > 0`` as a bitmask with eight elements in a byte. The backward selects the
cotangent by the mask. The mask takes ``1/32`` (float32) or ``1/16`` (bfloat16) of the bytes of
``x``, and the backward moves a third fewer bytes than one that reads ``x`` or the output.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops import _compat
from jax_fastops._arguments import as_arrays, broadcast_shape, is_integer, same_floating_dtype
from jax_fastops._bits import pack, select
from jax_fastops._dispatch import Refused
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._views import broadcast_to, broadcast_type, mask_view, reshape

_MASK = "... ceil(n/8) :uint8"
_RELU = Kernel.declare("relu", f"x: ... n -> y: ... n, mask?: {_MASK}")
_ADD_RELU = Kernel.declare("add_relu", f"x: ... n, y: ... n -> z: ... n, mask?: {_MASK}")
_SELECT = Kernel.declare("relu_bwd", f"dy: ... n, mask: {_MASK} -> dx: ... n")


def _select(mask, dy):
    return _SELECT(dy=dy, mask=mask).dx


def _declare(name: str, kernel: Kernel, operands: str, function) -> Op:
    """The op of the sum of these operands."""
    count = len(operands.split(","))

    def total(arrays):
        return functools.reduce(jnp.add, [x for x in arrays if x is not None])

    return Op(
        name,
        f"{operands} -> ... n | {_MASK}",
        lambda *xs: jax.nn.relu(total(xs)),
        family="relu",
        example=example(function, operands),
        kernels=(kernel, _SELECT),
        forward=lambda *xs: kernel(*xs)[0],
        save=lambda *xs: (pack(total(xs) > 0),),
        forward_saving=lambda *xs: kernel(*xs, mask=True),
        residuals=lambda args, outs, saved: saved,
        pullback=lambda residuals, cts: (select(*residuals, *cts),) * count,
        pushforward=lambda residuals, tangents: select(residuals[0], total(tangents)),
        backward=lambda residuals, cts, needs_grad: (_select(*residuals, *cts),) * count,
        tangent=lambda residuals, tangents: _select(residuals[0], total(tangents)),
    )


_relu = _declare("relu", _RELU, "... n", lambda x: relu(x))
_add_relu = _declare("add_relu", _ADD_RELU, "... n, ... n", lambda x, y: add_relu(x, y))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=_compat.INLINE)
def _in_view(op: Op, request, *arrays):
    """Applies an element-wise op in a view whose last axis its mask can pack."""
    result = broadcast_type(arrays)
    viewed = mask_view(result.shape, result.sharding)
    if viewed is None:
        raise Refused("a byte of the mask would belong to two devices")
    view, spec = viewed
    y = op.bind(request, *(reshape(broadcast_to(x, result), view, spec) for x in arrays))
    return reshape(y, result.shape, None if spec is None else tuple(result.sharding.spec))


def relu(x: ArrayLike) -> jax.Array:
    """Rectified linear unit: ``jax.nn.relu(x)``, that is ``max(x, 0)``.

    NaN stays NaN, and ``-0.0`` becomes ``+0.0``. The gradient is 0 at 0 and at NaN.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64. Integers take the reference.

    Returns:
      An array with the shape and dtype of ``x``.

    Residuals: one bit per element: a uint8 mask of ``ceil(n / 8)`` bytes for a last axis of ``n``
    elements. Trailing axes are merged into ``n`` where that needs less padding.

    Raises:
      TypeError: ``x`` is not an array or number, or has another dtype.

    Source: OneFlow, "How to implement an efficient BatchNorm+ReLU": the bitmask ReLU.

    Example:
      >>> fo.relu(jnp.array([-1.0, 0.0, 2.0])).tolist()
      [0.0, 0.0, 2.0]
      >>> jax.grad(lambda x: fo.relu(x).sum())(jnp.array([-1.0, 0.0, 2.0])).tolist()
      [0.0, 0.0, 1.0]
    """
    (x,) = as_arrays("relu", x=x)
    if is_integer(x):
        return jax.nn.relu(x)
    (x,) = same_floating_dtype("relu", [x], ["x"])
    return _relu(x, native=functools.partial(_in_view, _relu))


def add_relu(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Sum, then rectified linear unit: ``jax.nn.relu(x + y)`` in one pass.

    The gradients of ``x`` and ``y`` come from one mask and are the same array, before the sum over
    broadcast axes. The sum ``x + y`` is rounded to the dtype before it is compared with zero.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64.
      y: array of the same dtype, whose shape broadcasts with that of ``x``. With different shapes,
        the kernel reads an expanded copy, and ``"auto"`` takes the reference, which needs no copy.

    Returns:
      An array with the broadcast shape and the dtype of ``x``.

    Residuals: one bit per element of the result (uint8), for both gradients.

    Raises:
      TypeError: an argument is not an array or number, or the dtypes are not one supported dtype.
      ValueError: the shapes do not broadcast.

    Source: OneFlow, BatchNorm + Add + ReLU.

    Example:
      >>> fo.add_relu(jnp.array([-1.0, 3.0]), jnp.array([0.5, -1.0])).tolist()
      [0.0, 2.0]
    """
    names = ["x", "y"]
    arrays = same_floating_dtype("add_relu", as_arrays("add_relu", x=x, y=y), names)
    shape = broadcast_shape("add_relu", arrays, names)
    copies = any(x.shape != shape for x in arrays)
    return _add_relu(
        *arrays,
        fused="an operand is broadcast, and the kernel would read a copy" if copies else None,
        native=functools.partial(_in_view, _add_relu),
    )
