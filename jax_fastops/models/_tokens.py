"""The tokens of a batch without its padding, as one list of a static length."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Tokens(NamedTuple):
    """Where the tokens of a batch ``[batch, length]`` are in a list of ``capacity`` tokens.

    Attention takes rows ``[batch, length]``, in which the tokens come before the padding.

    Attributes:
      in_list: ``[batch, length]``: the index of a token in the list, and ``capacity`` for padding.
      in_batch: ``[capacity]``: the index in the flat batch, and its size after the last token.
      row_in_list: ``[batch, length]``: as ``in_list``, for rows.
      in_rows: ``[capacity]``: as ``in_batch``, for rows.
      counts: ``[batch]``: the number of tokens.
      offsets: ``[batch + 1]``: where the tokens of a sequence begin in the list.
    """

    in_list: Any
    in_batch: Any
    row_in_list: Any
    in_rows: Any
    counts: Any
    offsets: Any

    @classmethod
    def of(cls, mask, capacity: int) -> Tokens:
        """The tokens where a boolean mask is True, at most ``capacity`` of them."""
        length, size = mask.shape[1], mask.size
        flat = mask.reshape(-1)
        in_list = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, capacity)
        in_batch = jnp.full(capacity, size, jnp.int32)
        in_batch = in_batch.at[in_list].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
        counts = mask.sum(1, dtype=jnp.int32)
        offsets = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
        starts, offsets = offsets[:-1], jnp.minimum(offsets, capacity)
        place = jnp.arange(length, dtype=jnp.int32)[None]
        row_in_list = jnp.where(place < counts[:, None], starts[:, None] + place, capacity)
        row = jnp.minimum(in_batch, size - 1) // length
        in_rows = row * length + jnp.arange(capacity, dtype=jnp.int32) - starts[row]
        in_rows = jnp.where(in_batch < size, in_rows, size)
        return cls(in_list.reshape(mask.shape), in_batch, row_in_list, in_rows, counts, offsets)

    def listed(self, x):
        """The list ``[1, capacity, ...]`` of a batch, with zeros after the last token."""
        return _rows(_flat(x), self.in_batch)[None]

    def batched(self, x):
        """The batch of a list, with zeros in the padding."""
        return _rows(x[0], self.in_list)

    def to_rows(self, x):
        """The rows of a list, with zeros in the padding."""
        return _rows(x[0], self.row_in_list)

    def of_rows(self, x):
        """The list of rows, with zeros after the last token."""
        return _rows(_flat(x), self.in_rows)[None]


def _flat(x):
    return x.reshape(-1, *x.shape[2:])


def _rows(x, index):
    return x.at[index].get(mode="fill", fill_value=0)
