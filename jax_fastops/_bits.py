"""The kernels' bitmask in ``jax.numpy``, for the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack(bits: jax.Array) -> jax.Array:
    """Packs booleans ``(..., n)`` into bytes ``(..., ceil(n/8))``, the first in the lowest bit."""
    n = bits.shape[-1]
    n_bytes = (n + 7) // 8
    padding = [(0, 0)] * (bits.ndim - 1) + [(0, n_bytes * 8 - n)]
    octets = jax.lax.reshape(jnp.pad(bits, padding), (*bits.shape[:-1], n_bytes, 8))
    weights = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))
    return jnp.sum(jnp.where(octets, weights, jnp.uint8(0)), axis=-1, dtype=jnp.uint8)


def select(mask: jax.Array, x: jax.Array) -> jax.Array:
    """``x`` where the mask has a one, +0 elsewhere. No product: ``Inf * 0`` is NaN."""
    n, n_bytes = x.shape[-1], mask.shape[-1]
    octets = jnp.right_shift(mask[..., None], jnp.arange(8, dtype=jnp.uint8)) & jnp.uint8(1)
    bits = jax.lax.reshape(octets, (*mask.shape[:-1], n_bytes * 8))
    bits = jax.lax.slice_in_dim(bits, 0, n, axis=bits.ndim - 1)
    return jnp.where(bits.astype(bool), x, jnp.zeros((), x.dtype))
