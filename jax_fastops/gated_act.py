"""``gated_act``: the activation of a gate times another array, in one pass each way.

The backward reads the cotangent and both operands once, and writes both gradients. The operands may
be the halves of one array, as one matrix product makes them. Then the kernels read and write the
halves in place: nothing is sliced or concatenated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fastops._activations import ACTIVATIONS, Activation, documented
from jax_fastops._arguments import as_arrays, not_weak, one_of, same_floating_dtype
from jax_fastops._dispatch import row_features
from jax_fastops._kernel import Kernel, match_varying
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._views import split_last

_OPERANDS = "both?: ... 2 *n, gate?: ... *n, up?: ... *n"
_FORWARD = Kernel.declare("gated_act", f"{_OPERANDS} -> y: ... *n", activation=str)
_BACKWARD = Kernel.declare(
    "gated_act_bwd",
    f"dy: ... *n, {_OPERANDS} -> dboth?: ... 2 *n, dgate?: ... *n, dup?: ... *n",
    activation=str,
)


def _reference(*operands, activation: str):
    if len(operands) == 1:
        # Not by indexing, and not along an axis of length 2: XLA's gradient is slower then.
        (both,) = operands
        operands = jnp.split(both.reshape(*both.shape[:-2], 2 * both.shape[-1]), 2, -1)
    gate, up = operands
    return ACTIVATIONS[activation](gate) * up


def _declare(signature: str, *names: str) -> Op:
    """The op of these operands: ``gate`` and ``up``, or ``both`` with the two on one axis."""

    def forward(*operands, activation):
        return (_FORWARD(**dict(zip(names, operands, strict=True)), activation=activation).y,)

    def backward(residuals, cts, needs_grad, *, activation):
        gradients = {f"d{name}": w for name, w in zip(names, needs_grad, strict=True)}
        operands = dict(zip(names, residuals, strict=True))
        result = _BACKWARD(dy=cts[0], **operands, **gradients, activation=activation)
        return tuple(getattr(result, name) for name in gradients)

    return Op(
        "gated_act" if len(names) == 2 else "gated_act_halves",
        signature,
        _reference,
        family="gated_act",
        example=example(
            lambda *gates: gated_act(*gates), ", ".join(["... n"] * len(names)), n=(1024, 130)
        ),
        kernels=(_FORWARD, _BACKWARD),
        forward=forward,
        backward=backward,
    )


_PAIR = _declare("... *n, ... *n -> ... *n", "gate", "up")
_HALVES = _declare("... 2 *n -> ... *n", "both")


@documented
def gated_act(
    gate: ArrayLike, up: ArrayLike | None = None, *, activation: Activation = "silu"
) -> jax.Array:
    """A gated activation: ``act(gate) * up``, as in SwiGLU and GeGLU.

    The kernel computes both in float32 (float64 for float64) and rounds the result once. The
    reference computes in the dtype, as ``jax.nn``.

    Args:
      gate: array of any shape; float32, bfloat16, float16 or float64.
      up: array with the shape and dtype of ``gate``. ``None``: ``gate`` has both operands, the
        first half of its last axis is the gate and the second half the other operand.
      activation: the name of a function:

        {activations}

    Returns:
      An array with the shape and dtype of ``up``; without it, ``[..., n]`` for a gate
      ``[..., 2 * n]``.

    Residuals: the operands.

    Sharding: two operands over every dimension, the halves of one array over all but the last. No
    communication. A sharded last axis of halves is gathered.

    Raises:
      TypeError: an argument is not an array or number, or the dtypes are not one supported dtype.
      ValueError: the activation is not known, the shapes differ, or there is no ``up`` and the last
        axis of ``gate`` cannot be halved.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).

    Example:
      >>> fo.gated_act(jnp.array([-1.0, 2.0]), jnp.array([3.0, 4.0]), activation="relu").tolist()
      [0.0, 8.0]
      >>> fo.gated_act(jnp.array([-1.0, 2.0, 3.0, 4.0]), activation="relu").tolist()
      [0.0, 8.0]
    """
    one_of("gated_act", "activation", activation, ACTIVATIONS)
    given = {"gate": gate} if up is None else {"gate": gate, "up": up}
    arrays = same_floating_dtype("gated_act", as_arrays("gated_act", **given), list(given))
    first, *rest = match_varying([not_weak(x) for x in arrays])
    if rest:
        if rest[0].shape != first.shape:
            raise ValueError(
                f"gated_act: up has shape {rest[0].shape}; it must be that of gate, {first.shape}"
            )
        op, operands, shape = _PAIR, [jnp.atleast_1d(x) for x in (first, *rest)], first.shape
    else:
        if first.ndim == 0 or first.shape[-1] % 2:
            raise ValueError(
                f"gated_act: gate has shape {first.shape}; without up, its last axis must be even"
            )
        half = first.shape[-1] // 2
        op, operands, shape = _HALVES, [split_last(first, (2, half))], (*first.shape[:-1], half)
    limit = "there are no elements" if 0 in shape else None
    features = row_features(shape[-1:], first.dtype)
    y = op(*operands, features=features, limit=limit, activation=activation)
    return y if y.ndim == len(shape) else jnp.squeeze(y, 0)
