"""The mask of dropout, in NumPy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops import _random


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """Philox4x32-10 as in the paper, for Python's integers or arrays of uint64."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k, q % 2**32, p >> 32 ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


@jax.jit
def looped_rounds(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """``_random._rounds`` with a loop: the same words by a program that XLA compiles faster."""

    def step(_, state):
        a, b, c, d, k, m = state
        (p, q), (r, s) = (
            _random._wide_product(x, y) for x, y in ((0xD2511F53, a), (0xCD9E8D57, c))
        )
        weyl = (np.uint32(x) for x in (0x9E3779B9, 0xBB67AE85))
        return r ^ b ^ k, s, p ^ d ^ m, q, k + next(weyl), m + next(weyl)

    state = step(1, step(0, (*counter, *key)))
    words = jnp.broadcast_arrays(*state[:4])
    return jax.lax.fori_loop(2, 10, step, (*words, *state[4:]))[:4]


def masks(keys: Any, shape: Sequence[int], rate: float) -> np.ndarray:
    """The masks of an array of raw keys of two words."""
    keys = np.asarray(keys).astype(np.uint64)[..., None, None, :]
    *rows, n = tuple(shape) or (1,)
    row = np.arange(np.prod(rows, dtype=int), dtype=np.uint64)[:, None]
    block = np.arange(-(-n // 8), dtype=np.uint64)
    zero = np.uint64(0)
    words = philox((block, row, zero, zero), (keys[..., 0], keys[..., 1]))
    fields = np.stack([half for word in words for half in (word % 2**16, word >> 16)], -1)
    bits = fields.reshape(*fields.shape[:-2], 8 * block.size)[..., :n]
    return (bits < round((1 - rate) * 2**16)).reshape((*keys.shape[:-3], *shape))


def dropout_mask(key: Any, shape: Sequence[int], rate: float) -> jax.Array:
    """`fo.dropout_mask` as a call of `masks` in a program, which costs no compilation."""
    return jax.pure_callback(
        lambda keys: masks(keys, shape, rate),
        jax.ShapeDtypeStruct(shape, bool),
        key,
        vmap_method="broadcast_all",
    )
