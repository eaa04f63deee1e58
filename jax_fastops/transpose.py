"""``transpose``: any permutation of an array's dimensions, in one pass over memory.

Every dimension is independent of the others, so the op shards over all of them. An axis that
``vmap`` maps becomes one more dimension of the permutation, wherever it is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_fastops._arguments import as_arrays
from jax_fastops._dispatch import by_width, size_in_bytes
from jax_fastops._kernel import Kernel
from jax_fastops._op import Call, Op
from jax_fastops._registry import example
from jax_fastops._signature import Signature

# Dtypes with several elements in a byte.
_PACKED = ("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn")


@functools.cache
def _signature(axes: tuple[int, ...]) -> str:
    """The signature of the transposition by ``axes``; leading axes that stay are ``...``."""
    lead = next((i for i, axis in enumerate(axes) if axis != i), len(axes))
    names = [f"*d{i}" for i in range(len(axes))]
    left, right = " ".join(names[lead:]), " ".join(names[i] for i in axes[lead:])
    return f"... {left} -> ... {right}"


@functools.cache
def _kernel(axes: tuple[int, ...]) -> Kernel:
    left, right = _signature(axes).split("->")
    return Kernel.declare("transpose", f"x: {left}-> y:{right}")


def _move(x, axes: tuple[int, ...]):
    return _kernel(axes)(x).y


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(axes))


def _batch(call: Call, *, operand: int | None = None, result: int | None = None) -> Call:
    """The transposition with a mapped axis at the given position, and first on the other side."""
    axes = dict(call.options)["axes"]
    if operand is not None:
        wider = (operand, *(axis + (axis >= operand) for axis in axes))
    else:
        wider = tuple(axis + 1 for axis in axes)
        wider = (*wider[:result], 0, *wider[result:])
    slots = Signature.parse(_signature(wider))
    args = [dataclasses.replace(s, dtype=call.args[0].dtype) for s in slots.operands]
    outs = [dataclasses.replace(s, dtype=call.outs[0].dtype) for s in slots.results]
    options = (("axes", wider),)
    return dataclasses.replace(call, args=tuple(args), outs=tuple(outs), options=options, sizes=())


_transpose = Op(
    "transpose",
    "... *m *n -> ... *n *m",
    lambda x, axes: jnp.transpose(x, axes),
    example=example(lambda x: transpose(x), "... n"),
    kernels=(_kernel((1, 0)),),
    forward=_move,
    residuals=lambda args, outs, saved: (),
    pullback=lambda residuals, cts, axes: (jnp.transpose(cts[0], _inverse(axes)),),
    pushforward=lambda residuals, tangents, axes: jnp.transpose(tangents[0], axes),
    backward=lambda residuals, cts, needs_grad, axes: (_move(cts[0], _inverse(axes)),),
    tangent=lambda residuals, tangents, axes: _move(tangents[0], axes),
    batch=_batch,
    dtype_class=by_width,
)


def permute(x: jax.Array, axes: tuple[int, ...], fused: str | None = None) -> jax.Array:
    """``jnp.transpose(x, axes)`` for valid ``axes``, by kernel or reference.

    ``fused`` says why XLA needs no pass over memory for this transposition.
    """
    if not is_movable(x.dtype):
        return jnp.transpose(x, axes)
    return _transpose(
        x,
        signature=_signature(axes),
        features={
            "rows": axes[-1:] == (len(axes) - 1,),
            "row_bytes": size_in_bytes(x.shape[-1:], x.dtype),
            "result_row_bytes": size_in_bytes([x.shape[axis] for axis in axes[-1:]], x.dtype),
        },
        limit="no element changes its place" if _moves_nothing(x.shape, axes) else None,
        fused=fused,
        axes=axes,
    )


def _fused(x, axes) -> str | None:
    """Why XLA can probably avoid the pass over memory in a program, if it can."""
    axes = [axis for axis in axes if not (isinstance(x.shape[axis], int) and x.shape[axis] == 1)]
    if not isinstance(x, Tracer) or axes == sorted(axes):
        return None
    if axes[-1] == max(axes):
        return "the next operation reads the rows in place"
    if _transposes_matrices(axes):
        return "a matrix product reads transposed matrices at the same speed"
    return None


def _moves_nothing(shape, axes) -> bool:
    """Whether the elements stay in order. XLA then turns the transposition into a bitcast."""
    moved = [axis for axis in axes if not (isinstance(shape[axis], int) and shape[axis] == 1)]
    return moved == sorted(moved) or 0 in shape


def _transposes_matrices(axes: list[int]) -> bool:
    """Whether, after the leading dimensions that stay, two runs of dimensions trade places."""
    ordered = sorted(axes)
    lead = next(i for i, axis in enumerate(axes) if axis != ordered[i])
    moved = axes[lead:]
    return sum(a > b for a, b in itertools.pairwise(moved)) == 1 and moved[-1] != ordered[-1]


def is_movable(dtype: Any) -> bool:
    """Whether elements occupy whole bytes: no packed dtypes and no PRNG keys."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and str(dtype) not in _PACKED


def transpose(x: ArrayLike, axes: Sequence[int] | None = None) -> jax.Array:
    """Permutes the dimensions of an array: ``jnp.transpose(x, axes)``.

    Args:
      x: array of any shape and dtype.
      axes: dimension ``i`` of the result is dimension ``axes[i]`` of ``x``; a permutation of
        ``range(x.ndim)``, in which negative numbers count from the end. Default: reversed.

    Returns:
      An array with the dtype and the bits of ``x``.

    Residuals: none. The gradient is the inverse transposition, by the same kernel.

    Sharding: over every dimension, without communication. The mesh axes follow their dimensions.

    Raises:
      TypeError: ``x`` is not an array or number; ``axes`` is not a sequence of integers, or not a
        permutation (an axis is repeated or missing).
      ValueError: an axis is out of bounds.

    Source: OneFlow, "How to implement a permute / transpose operator".

    Example:
      >>> fo.transpose(jnp.array([[1, 2, 3], [4, 5, 6]])).tolist()
      [[1, 4], [2, 5], [3, 6]]
    """
    (x,) = as_arrays("transpose", x=x)
    axes = _canonical(axes, x.shape)
    return permute(x, axes, _fused(x, axes))


def _canonical(axes: Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """``axes`` counted from 0. Raises the error that ``jnp.transpose`` raises."""
    rank = len(shape)
    if axes is None:
        return tuple(reversed(range(rank)))
    try:
        given = tuple(operator.index(axis) for axis in axes)
    except TypeError as error:
        raise TypeError(
            f"transpose: axes is {axes!r}; it must be a sequence of integers: {error}"
        ) from None
    for axis in given:
        if not -rank <= axis < rank:
            raise ValueError(
                f"transpose: axis {axis} is out of bounds for array of dimension {rank}"
            )
    found = tuple(axis % rank for axis in given)
    if sorted(found) != list(range(rank)):
        problem = "repeated axis" if len(set(found)) < len(found) else "axes don't match array"
        raise TypeError(
            f"transpose: {problem}: the permutation isn't a permutation of operand dimensions, got "
            f"permutation {given} for operand shape {tuple(shape)}"
        )
    return found
