"""The mask of dropout, in NumPy."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """Philox4x32-10 as in the paper, for Python's integers or arrays of uint64."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k, q % 2**32, p >> 32 ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


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
