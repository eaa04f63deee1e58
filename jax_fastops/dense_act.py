"""``dense_act``: an activation of ``x @ kernel + bias``, in one kernel if it is not differentiated.

The kernel needs a GPU of compute capability 9.0. Its launch computes the bias and the activation of
one tile of the product while it multiplies the next. The reference is XLA's product and
``bias_act``, which training has: its backward needs the product.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_fastops import _native
from jax_fastops._activations import ACTIVATIONS, Activation, documented, measured
from jax_fastops._arguments import as_arrays, not_weak, one_of, parameter, same_floating_dtype
from jax_fastops._dispatch import SYMBOLIC, Refused
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._views import spec_of
from jax_fastops.bias_act import bias_act

_CAPABILITY = 9.0

_KERNEL = Kernel.declare(
    "dense_act", "x: ... a, kernel: a n, bias?: n :acc? -> y: ... n", activation=str
)


def product(x: Any, kernel: Any) -> jax.Array:
    """The product over the last axis of ``x`` and the first one of ``kernel``.

    Over explicit axes, all other axes stay sharded.
    """
    specs, spec = (spec_of(x), spec_of(kernel)), None
    if specs[0] is not None and specs[1] is not None:
        spec = PartitionSpec(*specs[0][:-1], *specs[1][1:])
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), out_sharding=spec)


def _limit(x, kernel) -> str | None:
    """Why the kernel cannot take these operands."""
    rows, sizes, capability = _rows(x), kernel.shape, _native.device("cuda")[1]
    if str(x.dtype) not in ("bfloat16", "float16"):
        return f"the kernel does not take {x.dtype}"
    if not all(isinstance(d, int) and d % 8 == 0 for d in sizes):
        return "a size of kernel is no multiple of 8"
    if 0 in (*x.shape, *sizes):
        return "there are no elements"
    if rows != SYMBOLIC and max(rows, *sizes) > 2**31 - 512:  # as ffi_cuda.cc
        return "a dimension has about 2**31 elements or more"
    if capability not in (0.0, _CAPABILITY):
        return f"the kernel needs compute capability {_CAPABILITY}; the device has {capability}"
    return None


def _rows(x) -> int:
    lead = x.shape[:-1]
    return math.prod(lead) if all(isinstance(d, int) for d in lead) else SYMBOLIC


def _features(x, kernel) -> dict[str, int]:
    """What decides: rows that begin within lines of 128 bytes take two reads for each line."""
    lines = all(
        isinstance(size, int) and size * x.dtype.itemsize % 128 == 0 for size in kernel.shape
    )
    return {"row_count": _rows(x), "lines": int(lines)}


def _forward(x, kernel, bias, *, activation: str):
    if (reason := _limit(x, kernel)) is not None:  # with the axes that vmap maps
        raise Refused(reason)
    return _KERNEL(x, kernel, bias, activation=activation).y


def _reference(x, kernel, bias, *, activation: Activation):
    return bias_act(product(x, kernel), bias, activation=activation)


_OP = Op(
    "dense_act",
    "... a, a n, n -> ... n",
    _reference,
    example=example(
        # A smaller kernel, so that the activation is no straight line.
        lambda x, kernel, bias: dense_act(x, kernel / 16, bias),
        "... k, k n, n",
        k=(256, 40),
        n=(64, 72),
    ),
    kernels=(_KERNEL,),
    forward=_forward,
    shared={"kernel": 1, "bias": 2},
)


@documented
def dense_act(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = "gelu",
) -> jax.Array:
    """An activation of a dense layer: ``act(x @ kernel + bias)``.

    On a GPU of compute capability 9.0, one kernel computes calls in bfloat16 and float16 that are
    not differentiated: it adds up in float32, adds the bias and applies the activation there, and
    rounds once. The reference is a product in the dtype of ``x``, and :func:`bias_act`.

    Args:
      x: array ``[..., k]``; float32, bfloat16, float16 or float64.
      kernel: array ``[k, n]`` with the dtype of ``x``.
      bias: array ``[n]``. It may have another floating dtype. ``None``: no bias.
      activation: the name of a function:

        {activations}

    Returns:
      An array ``[..., n]`` with the dtype of ``x``.

    Residuals: those of the product and of :func:`bias_act`.

    Sharding: over every axis of ``x`` except the last. A sharded axis of the kernel, or the last
    one of ``x``, is gathered over an auto mesh axis if the call takes the kernel. Over an explicit
    one, the call takes the reference, in which the columns stay sharded.

    Raises:
      TypeError: an argument is not an array or number, or a dtype is not supported.
      ValueError: the activation is not known, or the shapes do not fit.

    Source: FasterTransformer, a product of the feed-forward and ``add_bias_act``.

    Example:
      >>> x, kernel = jnp.array([[1.0, 2.0]]), jnp.eye(2)
      >>> fo.dense_act(x, kernel, jnp.array([-3.0, 0.5]), activation="relu").tolist()
      [[0.0, 2.5]]
    """
    one_of("dense_act", "activation", activation, ACTIVATIONS)
    arrays = as_arrays("dense_act", x=x, kernel=kernel)
    x, kernel = map(not_weak, same_floating_dtype("dense_act", arrays, ["x", "kernel"]))
    if x.ndim == 0:
        raise ValueError("dense_act: x is a number; it must be an array [..., k]")
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1]:
        raise ValueError(
            f"dense_act: kernel has shape {kernel.shape}; it must be ({x.shape[-1]}, n), for x of "
            f"shape {x.shape}"
        )
    if bias is not None:
        bias = parameter("dense_act", "bias", bias, kernel, 1, "one for each column of kernel")
    return _OP(
        x,
        kernel,
        None if bias is None else not_weak(bias),
        entry=f"dense_{measured(activation)}",
        features=_features(x, kernel),
        limit=_limit(x, kernel),
        composed=True,
        activation=activation,
    )
