"""Ops that exist only for tests. Each uses a feature of the op layer that `relu` does not need."""

import jax
import jax.numpy as jnp

from jax_fastops._bits import pack
from jax_fastops._kernel import Kernel
from jax_fastops._op import Op

_MASK = "mask: ... ceil(n/8) :uint8"
_RELU = Kernel.declare("relu", f"x: ... n -> y: ... n, {_MASK.replace(':', '?:', 1)}")
_SELECT = Kernel.declare("relu_bwd", f"dy: ... n, {_MASK} -> dx: ... n")


def _sum_batch(x):
    return x.reshape(-1, x.shape[-1]).sum(0)


# A parameter without batch dimensions. Its gradient is a sum over rows, computed with kernels.
scaled_relu = Op(
    "toy_scaled_relu",
    "... n, n -> ... n | ... ceil(n/8) :uint8",
    lambda x, scale: jax.nn.relu(x * scale),
    kernels=(_RELU, _SELECT),
    forward=lambda x, scale: _RELU(x * scale).y,
    save=lambda x, scale: (pack(x * scale > 0),),
    forward_saving=lambda x, scale: _RELU(x * scale, mask=True),
    residuals=lambda args, outs, saved: (*args, *saved),
    backward=lambda kept, cts, wanted: (
        _SELECT(cts[0], kept[2]).dx * kept[1],
        _sum_batch(_SELECT(cts[0], kept[2]).dx * kept[0]),
    ),
)


# A backward that reads only the output: pullback and pushforward are functions of it.
def _softmax_pullback(kept, cts):
    (y,), (dy,) = kept, cts
    return (y * (dy - jnp.sum(dy * y, axis=-1, keepdims=True)),)


softmax = Op(
    "toy_softmax",
    "... n -> ... n",
    lambda x: jax.nn.softmax(x),
    residuals=lambda args, outs, saved: outs,
    pullback=_softmax_pullback,
    pushforward=lambda kept, tangents: _softmax_pullback(kept, tangents)[0],
)


# A float value saved in addition to the output. The pullback reads it, so its tangent matters.
def _norm(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1)


def _norm_map(kept, dy):
    y, r = kept[0], kept[1][..., None]
    return r * (dy - y * jnp.sum(dy * y, axis=-1, keepdims=True))


unit = Op(
    "toy_unit",
    "... n -> ... n | ... :acc",
    _norm,
    save=lambda x: (1 / jnp.sqrt(jnp.sum(x * x, axis=-1) + 1),),
    residuals=lambda args, outs, saved: (*outs, *saved),
    pullback=lambda kept, cts: (_norm_map(kept, cts[0]),),
    pushforward=lambda kept, tangents: _norm_map(kept, tangents[0]),
)


# Optional operands, options, two results.
def _affine(x, scale, bias, *, power):
    y = x**power if scale is None else x**power * scale
    return (y if bias is None else y + bias), jnp.sum(y, axis=-1)


affine = Op("toy_affine", "... n, n, n -> ... n, ...", _affine)


# A reduction over the batch dimensions: results without them.
moments = Op(
    "toy_moments",
    "... n -> n :acc, n :acc",
    lambda x: (
        jnp.mean(x.reshape(-1, x.shape[-1]), axis=0),
        jnp.var(x.reshape(-1, x.shape[-1]), axis=0),
    ),
)

# No arithmetic, no batch dimensions, any dtype. Each call gives its own signature.
move_axes = Op("toy_move_axes", "a b -> b a", lambda x, *, axes: jnp.transpose(x, axes))


def transpose(x, axes):
    letters = "abcdefgh"[: x.ndim]
    signature = f"{' '.join(letters)} -> {' '.join(letters[a] for a in axes)}"
    return move_axes(x, signature=signature, axes=tuple(axes))


# Linear, so it keeps nothing. Only the tangent of the first operand determines the result's shape.
add_bias = Op(
    "toy_add_bias",
    "... n, n -> ... n",
    lambda x, bias: x + bias,
    residuals=lambda args, outs, saved: (),
    pullback=lambda kept, cts: (cts[0], _sum_batch(cts[0])),
    pushforward=lambda kept, tangents: (
        tangents[0] if tangents[1] is None else tangents[0] + tangents[1]
    ),
)
