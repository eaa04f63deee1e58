"""``softmax`` and ``log_softmax``, with a scale and a mask, over any axis.

A row that fits on the chip is read once and written once. It stays there while its maximum, sum and
results are computed. A longer row is read twice. The kernel applies the scale and the mask as it
reads, and reads the mask in its own shape. The backward reads the result and the cotangent, and for
``log_softmax`` also the mask. With dropout, the backward reads ``x`` in place of the result, which
it computes again, because a result of 0 does not tell what dropout took away.

Sources: FasterTransformer, ``softmax``; OneFlow, softmax in three tiers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fastops._arguments import (
    as_arrays,
    check_mask,
    not_weak,
    real_number,
    same_floating_dtype,
)
from jax_fastops._dispatch import row_features, size_in_bytes
from jax_fastops._kernel import Kernel, without_large_copies
from jax_fastops._names import elsewhere
from jax_fastops._native import limit
from jax_fastops._op import Op
from jax_fastops._random import NUMBERS, Drop, drop_of, seed_operands, seeded
from jax_fastops._registry import example, example_key
from jax_fastops._signature import accumulator_dtype
from jax_fastops.dropout import drop_reference, dropped

# ---- kernels -------------------------------------------------------------------------------------


def _stars(inner: int) -> str:
    """The dimensions after the axis. Rows are independent along them."""
    return "".join(f" *i{k}" for k in range(inner))


@functools.cache
def _kernel(name: str, inner: int) -> Kernel:
    n, m, w = (f"... {d}{_stars(inner)}" for d in ("n", "m", "ceil(n/1024)"))
    rows = f"x: {n}" if name == "softmax" else f"y: {n}, dy: {n}"
    out = "y" if name == "softmax" else "dx"
    return Kernel.declare(
        name,
        f"{rows}, mask?: ~{m} :bool -> {out}: {n}, workspace?: {w} :acc",
        scale=np.float64,
        log=np.bool_,
        **({} if name == "softmax" else {"masked": np.bool_}),
    )


def _dropout_kernel(name: str, arrays: str, out: str) -> Kernel:
    return Kernel.declare(
        name,
        f"{arrays}, mask?: ~... m :bool, {seed_operands()} -> {out}: ... n",
        scale=np.float64,
        **NUMBERS,
    )


_DROPOUT = _dropout_kernel("softmax_dropout", "x: ... n", "y")
_DROPOUT_BWD = _dropout_kernel("softmax_dropout_bwd", "x: ... n, dy: ... n", "dx")


def _features(x, axes: tuple[int, ...], masked: bool) -> dict[str, int]:
    """The bytes that are summed, and those that are contiguous along the axis (0: the last one)."""
    after = x.shape[axes[-1] + 1 :] if axes else ()
    row = x.shape[axes[0] : axes[-1] + 1] if axes else ()
    inner = size_in_bytes(after, x.dtype) if after else 0
    return dict(row_features(row, x.dtype), inner_bytes=inner, masked=masked)


def _call(name: str, x, inner: int, **given):
    n = x.shape[-1 - inner]
    workspace = not isinstance(n, int) or n > limit("softmax_workspace")
    return without_large_copies(_kernel(name, inner).of(x, workspace=workspace, **given))()


def _forward(x, where, *, scale: float, log: bool, inner: int):
    return _call("softmax", x, inner, mask=where, scale=scale, log=log).y


def _backward(kept, cts, wanted, *, log: bool, inner: int, **options):
    del wanted
    y, where = kept if log else (*kept, None)
    return _call("softmax_bwd", y, inner, dy=cts[0], mask=where, log=log, **options).dx, None


def _dropout_forward(x, where, key, **options):
    def native(x, where, _, **seeds):
        return without_large_copies(_DROPOUT.of(x, where, **seeds, **options))().y

    return seeded(native, x, where, key)


def _dropout_backward(kept, cts, wanted, **options):
    del wanted

    def native(x, dy, where, _, **seeds):
        return without_large_copies(_DROPOUT_BWD.of(x, dy, where, **seeds, **options))().dx

    x, where, key = kept
    return seeded(native, x, cts[0], where, key), None, None


# ---- references ----------------------------------------------------------------------------------


def _of_jax(x, where, axis, scale: float, log: bool):
    scaled = x if scale == 1.0 else x * scale
    function = jax.nn.log_softmax if log else jax.nn.softmax
    return function(scaled, axis=axis, where=where)


def _reference(x, where, *, scale: float, log: bool, inner: int, **_):
    return _of_jax(x, where, -1 - inner, scale, log)


def _select(keep, x):
    return jnp.where(keep, x, jnp.zeros_like(x))


def _kept_values(kept, log: bool, masked: bool) -> tuple[Any, Any]:
    """From the kept result: probabilities in the accumulator dtype, and the elements that count."""
    y, where = cast("tuple[Any, Any]", kept if log else (*kept, None))
    wide = y.astype(accumulator_dtype(y.dtype))
    if not masked:
        return (jnp.exp(wide) if log else wide), None
    if log:
        return jnp.exp(wide), jnp.broadcast_to(where, y.shape)
    return wide, y != 0


def _pullback(kept, cts, *, scale: float, log: bool, inner: int, masked: bool):
    p, left = _kept_values(kept, log, masked)
    dy = cts[0].astype(p.dtype)
    dy = dy if left is None else _select(left, dy)
    axis = p.ndim - 1 - inner
    if log:
        dx = dy - p * dy.sum(axis, keepdims=True)
    else:
        dx = p * (dy - (p * dy).sum(axis, keepdims=True))
    dx = dx if left is None else _select(left, dx)
    return (dx * scale).astype(cts[0].dtype), None


def _pushforward(kept, tangents, *, scale: float, log: bool, inner: int, masked: bool):
    p, left = _kept_values(kept, log, masked)
    dtype = tangents[0].dtype
    dx = tangents[0].astype(p.dtype) * scale
    dx = dx if left is None else _select(left, dx)
    dy = dx - (p * dx).sum(p.ndim - 1 - inner, keepdims=True)
    dy = dy if log else p * dy
    return (dy if left is None else _select(left, dy)).astype(dtype)


def _dropout_reference(x, where, key, *, scale: float, **dropped):
    return drop_reference(_of_jax(x, where, -1, scale, False), key, **dropped)


def _dropout_pullback(kept, cts, *, scale: float, **dropped):
    x, where, key = kept
    y = (_of_jax(x, where, -1, scale, False),)
    dy = (drop_reference(cts[0], key, **dropped),)
    masked = where is not None
    return *_pullback(y, dy, scale=scale, log=False, inner=0, masked=masked), None


def _dropout_pushforward(kept, tangents, *, scale: float, **dropped):
    x, where, key = kept
    y, masked = (_of_jax(x, where, -1, scale, False),), where is not None
    dy = _pushforward(y, tangents, scale=scale, log=False, inner=0, masked=masked)
    return drop_reference(dy, key, **dropped)


# ---- ops -----------------------------------------------------------------------------------------


def _declare(name: str, log: bool) -> Op:
    def residuals(args, outs, saved):
        # log_softmax keeps the mask: -inf may be a masked element or an element of x. For softmax
        # the difference does not matter: the cotangent of a probability of 0 has no effect.
        return (outs[0], args[1]) if log else (outs[0],)

    def forward(x, where, *, masked, **options):
        return _forward(x, where, log=log, **options)

    return Op(
        name,
        "... n, ~... m -> ... n",
        functools.partial(_reference, log=log),
        family="softmax",
        example=example(lambda x: globals()[name](x), "... n"),
        kernels=(_kernel("softmax", 0), _kernel("softmax_bwd", 0)),
        forward=forward,
        forward_saving=forward,
        residuals=residuals,
        pullback=functools.partial(_pullback, log=log),
        pushforward=functools.partial(_pushforward, log=log),
        backward=functools.partial(_backward, log=log),
    )


_OPS = {name: _declare(name, name == "log_softmax") for name in ("softmax", "log_softmax")}


# Not independent, as dropout's own op.
_DROPOUT_OP = Op(
    "softmax_dropout",
    "... n, ~... m, 2 -> ... n",
    _dropout_reference,
    family="softmax",
    example=example(lambda x: softmax(x, dropout_key=example_key(), dropout_rate=0.25), "... n"),
    kernels=(_DROPOUT, _DROPOUT_BWD),
    forward=_dropout_forward,
    forward_saving=_dropout_forward,
    pullback=_dropout_pullback,
    pushforward=_dropout_pushforward,
    backward=_dropout_backward,
    independent=False,
)


def softmax_of(
    name: str, x: Any, axis: Any, where: Any, scale: Any, drop: Drop | None = None
) -> Any:
    """Checks the arguments of ``softmax`` or ``log_softmax``, and computes it."""
    given = {"x": x} | ({} if where is None else {"where": where})
    x, *rest = as_arrays(name, **given)
    (x,) = map(not_weak, same_floating_dtype(name, [x], ["x"]))
    where = None
    if rest:
        check_mask(name, rest[0], x.shape, "x", "an element")
        where = jnp.expand_dims(rest[0], tuple(range(x.ndim - rest[0].ndim)))
    scale = real_number(name, "scale", scale, " (multiply x by an array instead)")
    axes = _check_axes(name, x, axis)
    inner = x.ndim - 1 - axes[-1] if axes else 0
    after = _stars(inner)
    features, why_not = _features(x, axes, where is not None), _limit(x, axes, where)
    if drop is not None and why_not is None and _takes_dropout(x, axes, drop):
        return _DROPOUT_OP(
            x,
            where,
            drop.words,
            entry="softmax",
            features=features,
            scale=scale,
            threshold=drop.threshold,
            dropout_scale=drop.scale,
        )

    def merged(z):
        """``z`` with one axis in place of several."""
        if len(axes) == 1:
            return z
        length = math.prod(z.shape[axes[0] : axes[-1] + 1])
        return jax.lax.reshape(z, (*z.shape[: axes[0]], length, *z.shape[axes[-1] + 1 :]))

    def native(request, x, where):
        y = op.bind(
            request,
            merged(x),
            None if where is None else merged(where),
            signature=f"... n{after}, ~... m{after} -> ... n{after}",
            scale=scale,
            inner=inner,
            masked=where is not None,
        )
        return y if len(axes) == 1 else jax.lax.reshape(y, x.shape)

    op = _OPS[name]
    y = op(
        x,
        where,
        features=features,
        limit=why_not,
        native=native,
        otherwise=lambda x, where: _of_jax(x, where, axes, scale, name == "log_softmax"),
    )
    return dropped(drop, y)


def _takes_dropout(x, axes: tuple[int, ...], drop: Drop) -> bool:
    """Whether a kernel takes the softmax with its dropout.

    Short rows that are no whole number of 16 bytes have faster kernels without dropout.
    """
    n, itemsize = x.shape[-1], x.dtype.itemsize
    if axes != (x.ndim - 1,) or itemsize > 4 or not isinstance(n, int) or drop.threshold == 0:
        return False
    if n * itemsize % 16:
        return n * itemsize > 512 and n <= limit("softmax_dropout_row") - 8
    return n <= limit("softmax_dropout_row")


def _limit(x, axes: tuple[int, ...], where) -> str | None:
    """Why the kernel cannot take the call. It takes adjacent axes as one."""
    if 0 in x.shape or not axes:
        return "there is nothing to sum"
    several = slice(axes[0], axes[-1] + 1)
    if len(axes) > 1:
        if len(axes) < len(x.shape[several]):
            return "the axes are not adjacent"
        if not jax.typeof(x).sharding.mesh.empty:
            return "merging the axes could cut across shards"
        if where is not None and where.shape[several] not in (x.shape[several], (1,) * len(axes)):
            return "the mask is broadcast along some of the axes"
    if where is not None and x.ndim - len(axes) + 1 > limit("softmax_mask_rank"):
        return "the mask has too many dimensions"
    return None


def _check_axes(name: str, x, axis) -> tuple[int, ...]:
    """Checks the axes; returns them counted from 0, in order."""
    if axis is None:
        return tuple(range(x.ndim))
    try:
        axes = [operator.index(a) for a in (axis if isinstance(axis, (tuple, list)) else [axis])]
    except TypeError:
        raise TypeError(
            f"{name}: axis is {axis!r}; it must be an integer, a tuple of integers or None"
        ) from None
    for a in axes:
        if x.ndim == 0:
            raise ValueError(f"{name}: axis is {axis!r}, but x has no axes")
        if not -x.ndim <= a < x.ndim:
            raise ValueError(
                f"{name}: axis is {axis!r}, out of range for x of shape {x.shape}: it must be from "
                f"{-x.ndim} to {x.ndim - 1}"
            )
    axes = sorted(a % x.ndim for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axis is {axis!r}, which names an axis twice")
    return tuple(axes)


@elsewhere(initial="it is only in jax.nn.softmax")
def softmax(
    x: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    scale: float = 1.0,
    dropout_key: ArrayLike | None = None,
    dropout_rate: float = 0.0,
) -> jax.Array:
    """Softmax of ``scale * x`` over an axis, with dropout of the result.

    Equals ``jax.nn.softmax(scale * x, axis=axis, where=where)``, computed in float32 (float64 for
    float64) and rounded once. With a dropout rate, it equals
    ``dropout(softmax(x, ...), dropout_key, dropout_rate)`` without the rounding between the two;
    see :func:`dropout`.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64.
      axis: the axis that sums to 1. With a tuple of axes, or ``None`` for all axes, they sum to 1
        together.
      where: boolean array that broadcasts to the shape of ``x``. An element where it is False does
        not count, whatever its value, and its result is 0. The kernel reads ``where`` in its own
        shape, and never expands it. A row without any element that counts is 0.
      scale: a Python or NumPy number by which ``x`` is multiplied. It is static: another value
        compiles another program.
      dropout_key: a key of ``jax.random`` for the dropout of the result, typed or raw. May be
        ``None`` if the rate is 0.
      dropout_rate: the probability that an element of the result is dropped, a static number in
        [0, 1]. Which elements are dropped is :func:`dropout_mask`'s definition for the shape of
        ``x``, whatever ``axis`` is. With 0, the program is that without dropout.

    Returns:
      An array with the shape and dtype of ``x``.

    Residuals: the result. With dropout, ``x``, ``where`` and the key, from which the backward
    computes the result again; or the result before dropout and the key, if no kernel takes both
    (float64, other axes than the last one, rows of more than 4096 elements, and of up to 512 bytes
    that are no multiple of 16). With ``where``, the gradient of an element whose result is 0 is 0,
    even if the cotangent is infinite or NaN.

    Sharding: over every dimension except ``axis``, without communication. A sharded ``axis`` is
    gathered over an auto mesh axis, and takes the reference over an explicit one. In a program for
    several devices with auto mesh axes, a mask gets a copy for each of them along the dimensions in
    which it is broadcast. If these are more than half as large as ``x``, the call takes the
    reference.

    Raises:
      TypeError: ``x`` or ``where`` is not an array, the dtype is not supported, ``where`` is not
        boolean, ``axis`` is not an integer, ``scale`` or ``dropout_rate`` is not a number, or
        ``dropout_key`` is no key of ``jax.random``.
      ValueError: ``axis`` is out of range, ``where`` does not broadcast to the shape of ``x``,
        ``dropout_rate`` is not in [0, 1], or ``dropout_key`` is an array of keys.

    Source: FasterTransformer, ``softmax``; OneFlow, softmax.

    Example:
      >>> x = jnp.array([[0.0, 0.0, 5.0]])
      >>> fo.softmax(x, where=jnp.array([True, True, False])).tolist()
      [[0.5, 0.5, 0.0]]
    """
    drop = drop_of("softmax", "dropout_key", dropout_key, "dropout_rate", dropout_rate)
    return softmax_of("softmax", x, axis, where, scale, drop)


@elsewhere(initial="it is only in jax.nn.log_softmax")
def log_softmax(
    x: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    scale: float = 1.0,
) -> jax.Array:
    """Logarithm of the softmax of ``scale * x`` over an axis.

    Equals ``jax.nn.log_softmax(scale * x, axis=axis, where=where)``, computed in float32 (float64
    for float64) and rounded once.

    Args:
      x: array of any shape; float32, bfloat16, float16 or float64.
      axis: the axis whose exponentials sum to 1. With a tuple of axes, or ``None`` for all axes,
        they sum to 1 together.
      where: boolean array that broadcasts to the shape of ``x``. An element where it is False does
        not count, whatever its value, and its result is -inf. The kernel reads ``where`` in its own
        shape, and never expands it.
      scale: a Python or NumPy number by which ``x`` is multiplied. It is static: another value
        compiles another program.

    Returns:
      An array with the shape and dtype of ``x``.

    Residuals: the result, and ``where``, if given, in its own shape. A masked -inf cannot be told
    from a -inf in ``x``.

    Sharding: as :func:`softmax`.

    Raises:
      TypeError: ``x`` or ``where`` is not an array, the dtype is not supported, ``where`` is not
        boolean, ``axis`` is not an integer, or ``scale`` is not a number.
      ValueError: ``axis`` is out of range, or ``where`` does not broadcast to the shape of ``x``.

    Source: OneFlow, softmax.

    Example:
      >>> jnp.exp(fo.log_softmax(jnp.array([1.0, 1.0]))).tolist()
      [0.5, 0.5]
    """
    return softmax_of("log_softmax", x, axis, where, scale)
