"""Products, biases, gathers, attention and loss of the networks, over sharded axes too.

Nothing relies on JAX's promotion of ranks or dtypes, which users can turn off.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jax_fastops as fo
from jax_fastops.dense_act import product
from jax_fastops.models._sharding import explicit_spec, tokens_at_once

#: What computes the attention of a network.
ATTENTIONS = ("softmax", "xla", "cudnn")


# XLA on a GPU makes a product with fewer multiplications than this, of one row, an element-wise
# product that it writes and then sums: three times the bytes.
_FEWEST = 10**7


def dot(x, kernel):
    """The product over the last axis of ``x`` and the first one of ``kernel``.

    Over explicit axes, all other axes stay sharded.
    """
    specs = explicit_spec(x), explicit_spec(kernel)
    count = _FEWEST // max(kernel.size, 1) + 1  # of rows that make a product of matrices
    if x.size == x.shape[-1] and specs == (None, None) and 1 < count <= 16:
        if jax.default_backend() == "gpu":
            rows = jnp.broadcast_to(x.reshape(1, -1), (count, x.size))
            y = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())))
            return y[0].reshape(*x.shape[:-1], *kernel.shape[1:])
    return product(x, kernel)


def dense_act(params: dict, x, config, ops):
    """The activation of ``config`` after a product with a bias.

    A kernel of both would gather a sharded kernel of the layer, and :func:`dot` knows single rows.
    """
    kernel, bias = params["kernel"], params["bias"]
    if config.tensor_parallel or x.size == x.shape[-1]:
        return ops.bias_act(dot(x, kernel), bias, activation=config.activation)
    return ops.dense_act(x, kernel, bias, activation=config.activation)


def accumulator_dtype(dtype):
    """The dtype of sums and statistics of ``dtype`` data."""
    return jnp.dtype("float64" if jnp.dtype(dtype) == jnp.float64 else "float32")


def of_rank(x, rank: int):
    """``x`` with leading dimensions of size 1 up to the rank ``rank``."""
    return jax.lax.expand_dims(x, tuple(range(rank - x.ndim))) if x.ndim < rank else x


def biased(x, bias):
    """``x`` plus a bias of its last axes, in the dtype of ``x``."""
    return x + of_rank(bias.astype(x.dtype), x.ndim)


def wide_product(equation: str, x, kernel):
    """A product in the dtype of ``x``, whose result has the accumulator dtype."""
    wide = accumulator_dtype(x.dtype)
    kernel = kernel.astype(x.dtype)
    if jax.default_backend() == "cpu":
        # XLA widens the operands on a CPU anyway, but jaxlib 0.8 not those of every product.
        x, kernel = x.astype(wide), kernel.astype(wide)
    return jnp.einsum(equation, x, kernel, preferred_element_type=wide)


def softcapped(x, cap: float | None):
    """``cap * tanh(x / cap)``, or ``x`` without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def in_table(index, count: int, mask):
    """The index into a table of so many rows, or ``None``. Padding gets the index of any row."""
    if index is None or mask is None or index.shape != mask.shape:
        return index
    if index.dtype.itemsize < 4:  # which may be too narrow for the count
        index = index.astype(jnp.int32)
    if (spec := explicit_spec(index)) is not None:  # jnp.where takes no other sharding
        mask = jax.sharding.reshard(mask, spec)
    return jnp.where(mask, index, index % count)


def take_rows(table, index, config, ops):
    """Rows of a table, as ``jnp.take``: NaN where the index is too large.

    Over an explicit mesh, they are sharded like the index.
    """
    table = jnp.asarray(table)
    if index.dtype.itemsize < 4:  # JAX needs an index dtype that can hold the table's length
        index = index.astype(jnp.int32)
    spec = explicit_spec(index)
    if spec is None and not config.tensor_parallel:
        return ops.take(table, index)
    if spec is None:  # XLA's scatter can shard the rows of the table
        return table.at[index].get(mode="fill")
    columns = explicit_spec(table) or (None, None)
    spec = PartitionSpec(*spec, columns[-1])
    return table.at[index].get(mode="fill", out_sharding=spec)


def same_segment(ids):
    """The mask ``[batch, 1, queries, keys]`` of ids, or of a pair of ids of queries and of keys."""
    queries, keys = ids if isinstance(ids, tuple) else (ids, ids)
    queries, keys = queries[:, None, :, None], keys[:, None, None, :]
    return (queries == keys) & (queries > 0)


def jax_attention(implementation: str) -> Callable[..., jax.Array]:
    """``jax.nn.dot_product_attention`` with an implementation."""

    def attention(
        q, k, v, *, mask=None, segment_ids=None, max_segments=None, **options: Any
    ) -> jax.Array:
        del max_segments
        if segment_ids is not None:
            mask = same_segment(segment_ids)
        if mask is not None:  # cuDNN needs it for every query
            mask = jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], k.shape[1]))
        kind = cast(Literal["xla", "cudnn"], implementation)
        with jax.numpy_dtype_promotion("standard"):  # JAX promotes the dtype of the scores
            return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kind, **options)

    return attention


def vocabulary_loss(x, table, labels, config, ops, **options: Any) -> jax.Array:
    """The mean cross entropy of the logits ``x @ table.T``, whose classes may be sharded."""
    softcap = getattr(config, "logits_softcap", None)  # which BERT does not have
    options |= {} if softcap is None else {"softcap": softcap}
    # With tensor parallelism, XLA's passes: they can shard the vocabulary.
    with fo.use_implementation("xla") if config.tensor_parallel else contextlib.nullcontext():
        chunk = tokens_at_once(x, len(table))
        return ops.linear_cross_entropy(x, table, labels, chunk=chunk, **options)
