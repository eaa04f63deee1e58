"""The random bits of dropout: Philox4x32-10, in ``jax.numpy``. ``src/core/philox.h`` has the same.

A row of elements has a *seed* of four uint32 words: its position among the rows (the low and the
high word), and the two words of the key. Blocks of eight elements take the 128 bits of one Philox
call with the counter ``(block, low, high, 0)``, 16 bits for an element. Kernels that XLA may
partition, or under a ``vmap``, take the seeds as an operand, because such a call does not know
which rows it has. The others count the rows, which saves the pass that writes the seeds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._arguments import real_number
from jax_fastops._kernel import partitions
from jax_fastops._settings import own_code
from jax_fastops._views import broadcast, explicit_spec, spec_of

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def _u32(x) -> jax.Array:
    return jnp.asarray(x, jnp.uint32)


def _wide_product(a, b) -> tuple[jax.Array, jax.Array]:
    """The high and the low word of the product of two words."""
    a, b = _u32(a), _u32(b)
    half = _u32(0xFFFF)
    low, mixed = (a & half) * (b & half), (a >> 16) * (b & half)
    middle = (a & half) * (b >> 16) + (low >> 16) + (mixed & half)
    return (a >> 16) * (b >> 16) + (mixed >> 16) + (middle >> 16), a * b


def philox(counter, key) -> tuple[jax.Array, ...]:
    """Philox4x32-10: four words from a counter of four words and a key of two, all broadcast."""
    return _rounds(tuple(map(_u32, counter)), tuple(map(_u32, key)))


@jax.jit  # 300 operations, traced and lowered once for all calls of the same shapes
def _rounds(counter, key) -> tuple[jax.Array, ...]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = _wide_product(_MULTIPLIERS[0], c0)
        high1, low1 = _wide_product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _u32(_STEPS[0]), k1 + _u32(_STEPS[1])
    return c0, c1, c2, c3


def key_words(op: str, name: str, key: Any) -> jax.Array:
    """The two words of a key of ``jax.random``.

    The words of ``jax.random.key_data``, if these are two. More words are folded, by Philox with
    the first two as key and the next two as counter.
    """
    accepted = "it must be a key of jax.random, of shape () (typed) or (words,) (raw uint32)"
    dtype = getattr(key, "dtype", None)
    if not isinstance(key, (jax.Array, np.ndarray)):
        found = "None" if key is None else f"of type {type(key).__name__}"
        raise TypeError(f"{op}: {name} is {found}; {accepted}")
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != jnp.uint32:
        raise TypeError(f"{op}: {name} has dtype {dtype} and shape {key.shape}; {accepted}")
    if key.ndim != (0 if typed else 1) or 0 in key.shape:
        raise ValueError(f"{op}: {name} has shape {key.shape}; {accepted}")
    words = jax.random.key_data(key) if typed else jnp.asarray(key)
    words = words.reshape(-1)
    words = jnp.pad(words, (0, words.size % 2))
    found = words[:2]
    for i in range(2, words.size, 2):
        found = jnp.stack(philox((words[i], words[i + 1], 0, 0), found)[:2])
    return found


def drop_rate(op: str, name: str, rate: object) -> tuple[int, float]:
    """The threshold in 16 bits below which an element is kept, and the factor of those kept."""
    rate = real_number(op, name, rate)
    if not 0 <= rate <= 1:
        raise ValueError(f"{op}: {name} is {rate}; it must be in [0, 1]")
    threshold = round((1 - rate) * 2**16)
    return threshold, 1 / (1 - rate) if threshold else 0.0


class Drop(NamedTuple):
    """What a dropout draws: the words of the key, and :func:`drop_rate`'s numbers."""

    words: jax.Array
    threshold: int
    scale: float


@own_code()
def drop_of(op: str, key_name: str, key: Any, rate_name: str, rate: object) -> Drop | None:
    """The dropout with these arguments, or ``None`` for the rate 0, which needs no key."""
    threshold, scale = drop_rate(op, rate_name, rate)
    if key is None and rate == 0:
        return None
    words = key_words(op, key_name, key)
    return None if rate == 0 else Drop(words, threshold, scale)


NUMBERS = {"threshold": int, "dropout_scale": float}  # attributes of kernels with dropout


def seed_operands(rows: str = "") -> str:
    """The operands that :func:`seeded` passes. ``rows`` are dimensions of rows after ``...``."""
    return f"seeds?: ... {rows} 4 :uint32, key?: 2 :uint32"


def seeded(native, x, *arrays):
    """``native(x, *arrays, ...)`` with an operand that gives each row of ``x`` its seed.

    The words of the key are the last array. Where the kernel has the rows of ``x`` and no others,
    it counts them, and ``native`` gets the words as ``key=``. Otherwise ``native`` gets all seeds,
    as ``seeds=``: in a program for several devices, and under a ``vmap``, where rows of several
    examples become those of one call. XLA does not partition a call with ``key``, because shards
    do not divide this operand.
    """

    def of_rows(x, *arrays):
        seeds = row_seeds(arrays[-1], x.shape, jax.typeof(x).sharding)
        return native(x, *arrays, seeds=seeds)

    if partitions() > 1:
        return of_rows(x, *arrays)

    @jax.custom_batching.custom_vmap
    def counted(*arrays):
        return native(*arrays, key=arrays[-1])

    @counted.def_vmap
    def _(axis_size, mapped, *arrays):
        del axis_size
        outs = jax.vmap(of_rows, in_axes=[0 if m else None for m in mapped])(*arrays)
        return outs, jax.tree.map(lambda _: True, outs)

    return counted(x, *arrays)


def row_seeds(words, shape, sharding=None) -> jax.Array:
    """The seeds of the rows of an array of ``shape``. Rows are those of the last axis.

    They are sharded as the rows of ``sharding``, if that is part of the array's type.
    """
    rows = tuple(shape[:-1])
    spec = explicit_spec(sharding, len(shape))

    count = math.prod(rows) if all(isinstance(d, int) for d in rows) else None
    if any(isinstance(d, int) and d >= 1 << 32 for d in rows):
        raise ValueError(f"an array of shape {tuple(shape)} has 2**32 rows or more along one axis")
    indices = [
        broadcast(
            jnp.arange(size, dtype=jnp.uint32).reshape(-1, *(1,) * (len(rows) - 1 - d)),
            rows,
            sharding,
            spec and spec[:-1],
        )
        for d, size in enumerate(rows)
    ]
    position = position_of(indices, rows, wide=count is None or count > 1 << 32)
    parts = [*position, words[0], words[1]]
    whole = spec and (*spec[:-1], None)
    parts = [broadcast(_u32(part)[..., None], (*rows, 1), sharding, whole) for part in parts]
    return jnp.concatenate(parts, -1)


def position_of(indices, sizes, wide: bool = True) -> tuple[jax.Array, jax.Array]:
    """The low and the high word of the position of an index in C order.

    Without ``wide``, it must fit one word.
    """
    low, high = _u32(0), _u32(0)
    for index, size in zip(indices, sizes, strict=True):
        size = _u32(size)
        if wide:
            carry, product = _wide_product(low, size)
            high = high * size + carry
            low = product + index
            high = high + (low < product).astype(jnp.uint32)
        else:
            low = low * size + index
    return low, high


def kept(seeds, n, threshold: int) -> jax.Array:
    """Which of the ``n`` elements of each row are kept, a boolean array ``(..., n)``."""
    blocks = jnp.arange((n + 7) // 8, dtype=jnp.uint32)
    low, high, *key = (seeds[..., i, None] for i in range(4))
    words = philox((blocks, low, high, 0), key)
    halves = [half for word in words for half in (word & _u32(0xFFFF), word >> 16)]
    bits = jnp.stack(halves, -1)
    kind, spec = jax.typeof(bits).sharding, spec_of(bits)
    if spec is not None:  # by name, because there may be no mesh in the context
        kind = kind.update(spec=jax.sharding.PartitionSpec(*spec[:-1]))
    shape = (*bits.shape[:-2], bits.shape[-2] * 8)
    bits = jax.lax.reshape(bits, shape, out_sharding=None if spec is None else kind)
    return bits[..., :n] < _u32(threshold)
