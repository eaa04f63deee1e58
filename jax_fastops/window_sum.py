"""``window_sum``: sums over a window that slides along an axis.

One kernel computes the op, its gradient and its tangent: the transpose of a window sum is a window
sum with the complementary padding. Its time grows little with the window, because neighboring
windows share partial sums. The kernel never subtracts. So the error of a sum does not depend on its
position, and a NaN reaches only the windows that contain it.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_fastops import _compat
from jax_fastops._arguments import as_arrays, integer, not_weak, one_of, same_floating_dtype
from jax_fastops._dispatch import row_features
from jax_fastops._kernel import Kernel
from jax_fastops._native import limit
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._signature import accumulator_dtype

PADDINGS = ("VALID", "SAME")

# Longer than any axis. A window that reaches further has the same sums.
_MOST = 1 << 40


def _stars(inner: int) -> str:
    """The dimensions after the axis."""
    return "".join(f" *i{k}" for k in range(inner))


@functools.cache
def _kernel(inner: int, length: str) -> Kernel:
    n, m, w = (f"... {d}{_stars(inner)}" for d in ("n", length, "ceil(n/8)"))
    signature = f"x: {n} -> y: {m}, workspace?: {w} :acc"
    return Kernel.declare("window_sum", signature, radius=np.int64, padding=np.int64)


def _length(radius: int, pad: int) -> str:
    """The number of windows along an axis of ``n`` elements."""
    return "n" if pad == radius else f"n{2 * (pad - radius):+d}"


def _sums(x, *, radius: int, pad: int, inner: int):
    n = x.shape[-1 - inner]
    long_axis = not isinstance(n, int) or n > limit("window_sum_short_axis")
    workspace = long_axis and 2 * radius + 1 > limit("window_sum_long_window")
    kernel = _kernel(inner, _length(radius, pad))
    return kernel(x, workspace=workspace, radius=radius, padding=pad).y


def _reference(x, *, radius: int, pad: int, inner: int):
    axis = x.ndim - 1 - inner
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], padding[axis] = 2 * radius + 1, (pad, pad)
    wide = x.astype(accumulator_dtype(x.dtype))
    sums = jax.lax.reduce_window(
        wide, np.zeros((), wide.dtype), jax.lax.add, window, [1] * x.ndim, padding
    )
    return sums.astype(x.dtype)


def _transposed(function, cts, *, radius: int, pad: int, inner: int):
    return (function(*cts, radius=radius, pad=2 * radius - pad, inner=inner),)


_window_sum = Op(
    "window_sum",
    "... n -> ... n",
    _reference,
    example=example(lambda x: window_sum(x, 2), "... n"),
    kernels=(_kernel(0, "n"),),
    forward=_sums,
    residuals=lambda args, outs, saved: (),
    pullback=lambda residuals, cts, **options: _transposed(_reference, cts, **options),
    pushforward=lambda residuals, tangents, **options: _reference(*tangents, **options),
    backward=lambda residuals, cts, needs_grad, **options: _transposed(_sums, cts, **options),
    tangent=lambda residuals, tangents, **options: _sums(*tangents, **options),
)


def window_sum(
    x: ArrayLike, radius: int, *, axis: int = -1, padding: Literal["VALID", "SAME"] = "VALID"
) -> jax.Array:
    """Sums over windows of ``2 * radius + 1`` neighbors along an axis.

    Equals ``jax.lax.reduce_window`` with ``jax.lax.add`` and strides of 1, summed in float32
    (float64 for float64) and rounded once. Its time grows little with the radius.

    Args:
      x: array of one dimension or more; float32, bfloat16, float16 or float64.
      radius: the number of neighbors on either side; a static Python integer of 0 or more.
      axis: the axis that the window slides along.
      padding: ``"VALID"`` gives the windows that lie within ``x``. ``"SAME"`` gives a window around
        each element, with zeros outside of ``x``.

    Returns:
      An array with the dtype and shape of ``x``. With ``"VALID"``, an axis of ``n`` elements
      becomes one of ``n - 2 * radius``.

    Residuals: none. The gradient of an element is the sum over the windows that contain it, by the
    same kernel.

    Sharding: over every dimension except ``axis``, without communication. A sharded ``axis`` is
    gathered over an auto mesh axis, and takes the reference over an explicit one.

    Raises:
      TypeError: ``x`` is not an array, its dtype is not supported, or ``radius`` or ``axis`` is not
        an integer.
      ValueError: ``radius`` is negative, ``axis`` is out of range, ``padding`` is not known, or a
        window is longer than the axis and ``padding`` is ``"VALID"``.

    Source: CMU 10-414 notes, window sum.

    Example:
      >>> fo.window_sum(jnp.array([1.0, 2.0, 3.0, 4.0]), radius=1).tolist()
      [6.0, 9.0]
      >>> fo.window_sum(jnp.array([1.0, 2.0, 3.0, 4.0]), radius=1, padding="SAME").tolist()
      [3.0, 6.0, 9.0, 7.0]
    """
    (x,) = as_arrays("window_sum", x=x)
    (x,) = map(not_weak, same_floating_dtype("window_sum", [x], ["x"]))
    radius = _check_radius(radius)
    axis = _check_axis(x, axis)
    one_of("window_sum", "padding", padding, PADDINGS)
    if radius == 0:
        return x
    n, same = x.shape[axis], padding == "SAME"
    if same:  # all windows that reach beyond both ends have the same sum
        radius = min(radius, max(n - 1, 0) if isinstance(n, int) else _MOST)
        if radius == 0:
            return x
    elif isinstance(n, int) and 2 * radius + 1 > n:
        raise ValueError(
            f"window_sum: a window has {2 * radius + 1} elements (radius is {radius}), but axis "
            f"{axis} of x of shape {x.shape} has {n}; padding 'SAME' allows it"
        )
    options: dict[str, Any] = dict(
        radius=radius, pad=radius if same else 0, inner=x.ndim - 1 - axis
    )
    limit = "there are no elements" if 0 in x.shape else None
    if not (same or _has_room(n, 2 * radius)):
        limit = "the axis has a symbolic size that may be too small for a window"
    stars, length = _stars(options["inner"]), _length(radius, options["pad"])
    return _window_sum(
        x,
        signature=f"... n{stars} -> ... {length}{stars}",
        features=dict(
            radius=radius,
            across=options["inner"] > 0,
            **row_features(x.shape[-1:], x.dtype),
        ),
        limit=limit,
        **options,
    )


def _has_room(n, least: int) -> bool:
    """Whether ``n >= least`` is known. For a symbolic size, its constraints decide."""
    try:
        return bool(n >= least)
    except _compat.InconclusiveDimensionOperation:
        return False


def _check_radius(radius) -> int:
    try:
        found = operator.index(radius)
    except TypeError:
        raise TypeError(
            f"window_sum: radius is {radius!r}; it must be a Python integer of 0 or more"
        ) from None
    if found < 0:
        raise ValueError(f"window_sum: radius is {found}; it must be 0 or more")
    return found


def _check_axis(x, axis) -> int:
    """The axis counted from 0."""
    found = integer("window_sum", "axis", axis)
    if x.ndim == 0:
        raise ValueError(f"window_sum: axis is {found}, but x of shape () has no axis")
    if not -x.ndim <= found < x.ndim:
        raise ValueError(
            f"window_sum: axis is {found}, out of range for x of shape {x.shape}: it must be from "
            f"{-x.ndim} to {x.ndim - 1}"
        )
    return found % x.ndim
