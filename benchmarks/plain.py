"""The models' plain contenders: the best plain JAX that a careful user writes."""

import functools

import jax
import jax.numpy as jnp

from benchmarks import installed

bert, _plain = (installed(f"jax_fastops.models.{name}") for name in ("bert", "_plain"))


def dropout_of_jax(x, key, rate: float):
    """Dropout as models in JAX draw it."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    kept = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) / (1 - rate)).astype(x.dtype)
    return jnp.where(keep, kept, jnp.zeros_like(x))


def _with(softmax) -> dict:
    """The functions of attention with a softmax."""
    names = "attention", "qkv_attention"
    return {n: functools.partial(getattr(bert.PLAIN, n), softmax=softmax) for n in names}


PLAIN = bert.PLAIN._replace(
    **_with(functools.partial(_plain.softmax, dropout=dropout_of_jax)),
    residual_layer_norm=functools.partial(bert.PLAIN.residual_layer_norm, dropout=dropout_of_jax),
    dropout=dropout_of_jax,
)


def softmax_of_flax(x, where=None, *, scale: float, dropout_key=None, dropout_rate: float = 0.0):
    """With the mask as Flax' attention has it: the least number in place of other scores."""
    x = x * scale
    x = x if where is None else jnp.where(where, x, jnp.finfo(x.dtype).min)
    return dropout_of_jax(jax.nn.softmax(x), dropout_key, dropout_rate)


def norm_of_flax(x, scale, bias, *, eps: float, fanout=False):
    """As Flax' LayerNorm: the variance from the mean of squares, so that there is one reduction."""
    wide = x.astype(jnp.float32)
    mean, squares = wide.mean(-1, keepdims=True), jnp.square(wide).mean(-1, keepdims=True)
    variance = jnp.maximum(squares - jnp.square(mean), 0)
    y = ((wide - mean) * (jax.lax.rsqrt(variance + eps) * scale) + bias).astype(x.dtype)
    return (y, y) if fanout else y


def residual_norm_of_flax(
    x, residual, scale, bias, *, input_bias, dropout_key=None, dropout_rate: float = 0.0, **options
):
    x = dropout_of_jax(x + input_bias.astype(x.dtype), dropout_key, dropout_rate)
    return norm_of_flax(x + residual, scale, bias, **options)


#: Another careful user's ops: which of the two forms is faster is measured.
_NORMS = dict(layer_norm=norm_of_flax, residual_layer_norm=residual_norm_of_flax)
FLAX = PLAIN._replace(**_with(softmax_of_flax), **_NORMS)
