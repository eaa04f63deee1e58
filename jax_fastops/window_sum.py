"""``window_sum``: sums over a window that slides along an axis.

One kernel serves the op, its gradient and its tangent: it takes any padding with zeros, and the
transpose of a windowed sum is a windowed sum with the padding that is left. Its cost grows little
with the window: a window is made of sums that neighbouring windows share. Nothing is
subtracted to that end, so the error of a sum does not depend on where it is, and a NaN reaches just
the windows that contain it.

Source: CMU 10-414 notes, window sum.
"""

from __future__ import annotations

import functools
import operator

import jax
import numpy as np

from jax_fastops import _compat
from jax_fastops._arguments import as_arrays, integer, not_weak, same_floating_dtype
from jax_fastops._implementation import by_radius
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op
from jax_fastops._signature import accumulator_dtype

PADDINGS = ("VALID", "SAME")

# Longer windows over longer axes come with a workspace for the kernels (window_sum_shape.h).
_LONG_WINDOW = 2049
_SHORT_AXIS = 256
# No axis is longer; windows that reach further are no different.
_MOST = 1 << 40


def _signature(inner: int, length: str, workspace: bool = False) -> str:
    """Of sums along an axis with so many dimensions behind it."""
    behind = "".join(f" *i{k}" for k in range(inner))
    result = f"... {length}{behind}"
    more = f", ... ceil(n/8){behind} :acc" if workspace else ""
    return f"... n{behind} -> {result}{more}"


@functools.cache
def _kernel(inner: int, length: str, workspace: bool) -> Kernel:
    return Kernel.declare("window_sum", _signature(inner, length, workspace))


def _length(radius: int, pad: int) -> str:
    """How many windows there are along an axis of ``n`` elements."""
    return "n" if pad == radius else f"n{2 * (pad - radius):+d}"


def _sums(x, *, radius: int, pad: int, inner: int):
    n = x.shape[-1 - inner]
    long_axis = not isinstance(n, int) or n > _SHORT_AXIS
    workspace = long_axis and 2 * radius + 1 > _LONG_WINDOW
    kernel = _kernel(inner, _length(radius, pad), workspace)
    attributes = dict(radius=np.int64(radius), padding=np.int64(pad), inner=np.int64(inner))
    return kernel(x, **attributes)[0]


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
    kernels=(_kernel(0, "n", False),),
    forward=_sums,
    forward_saving=_sums,
    residuals=lambda args, outs, saved: (),
    pullback=lambda kept, cts, **options: _transposed(_reference, cts, **options),
    pushforward=lambda kept, tangents, **options: _reference(*tangents, **options),
    backward=lambda kept, cts, wanted, **options: _transposed(_sums, cts, **options),
    tangent=lambda kept, tangents, **options: _sums(*tangents, **options),
    table_row=lambda x, *, radius, inner, **_: by_radius("window_sum", radius, inner > 0),
)


def window_sum(x, radius: int, *, axis: int = -1, padding: str = "VALID") -> jax.Array:
    """Sums over windows of ``2 * radius + 1`` neighbours along an axis.

    Equals ``jax.lax.reduce_window`` with ``jax.lax.add`` and strides of 1; summed in float32
    (float64 for float64) and rounded once. Its time grows little with the radius.

    Args:
      x: array of one dimension or more; float32, bfloat16, float16 or float64.
      radius: how many neighbours there are on either side; a Python integer of 0 or more. It is
        part of the compiled program.
      axis: the axis that the window slides along, an integer.
      padding: ``"VALID"`` for the windows that lie in ``x`` as a whole; ``"SAME"`` for one around
        each element, with zeros outside of ``x``.

    Returns:
      An array of the dtype of ``x``, and of its shape but for the axis of ``n`` elements: with
      ``"VALID"`` it has ``n - 2 * radius``.

    Saved for the backward: nothing. The gradient is the sum over the windows that contain an
    element, by the same kernel.

    Sharding: over every dimension but ``axis``, with no communication. Over an auto mesh axis, a
    sharded ``axis`` is gathered; over an explicit one XLA does the work. So it does with
    ``"VALID"`` and a symbolic size of ``axis`` (``jax.export``) not known to hold a window.

    Raises:
      TypeError: ``x`` is not an array, its dtype is not supported, or ``radius`` or ``axis`` is not
        an integer.
      ValueError: ``radius`` is negative, ``axis`` is out of range, ``padding`` is not known, or a
        window is longer than the axis and ``padding`` is ``"VALID"``.

    Source: CMU 10-414 notes, window sum.
    """
    (x,) = as_arrays("window_sum", x=x)
    (x,) = map(not_weak, same_floating_dtype("window_sum", [x], ["x"]))
    radius = _check_radius(radius)
    axis = _check_axis(x, axis)
    _check_padding(padding)
    if radius == 0:
        return x
    n, same = x.shape[axis], padding == "SAME"
    if same:  # windows that reach beyond both ends are all alike
        radius = min(radius, max(n - 1, 0) if isinstance(n, int) else _MOST)
        if radius == 0:
            return x
    elif isinstance(n, int) and 2 * radius + 1 > n:
        raise ValueError(
            f"window_sum: a window has {2 * radius + 1} elements (radius is {radius}), but axis "
            f"{axis} of x of shape {x.shape} has {n}; padding 'SAME' allows it"
        )
    options = dict(radius=radius, pad=radius if same else 0, inner=x.ndim - 1 - axis)
    if 0 in x.shape or not (same or _has_room(n, 2 * radius)):
        return _reference(x, **options)
    length = _length(radius, options["pad"])
    return _window_sum(x, signature=_signature(options["inner"], length), **options)


def _has_room(n, least: int) -> bool:
    """Whether a size is known to be so large; of a symbolic one, from its constraints."""
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


def _check_padding(padding) -> None:
    if not isinstance(padding, str) or padding not in PADDINGS:
        known = ", ".join(map(repr, PADDINGS))
        raise ValueError(f"window_sum: padding is {padding!r}; it must be one of {known}")
