"""Segments of packed rows: their ids, positions, labels, and what attention is given."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastops.models._checks import Checks
from jax_fastops.models._sharding import explicit_spec, following, is_sharded, whole


class Segments(NamedTuple):
    """The segments of a batch of packed rows.

    Attributes:
      ids: integers ``[batch, sequence]``, 0 for padding.
      limit: the largest number of segments in a row, static, or ``None``.
    """

    ids: Any
    limit: int | None

    @property
    def inside(self):
        """Which positions are not padding."""
        return self.ids > 0

    def positions(self):
        """The positions of tokens in their segment, and 0 for padding.

        The tokens of a segment follow each other.
        """
        ids, spec = whole(self.ids, 1), explicit_spec(self.ids)
        place = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        before = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
        begins = jnp.where(ids != before, place, 0)
        positions = jnp.where(ids > 0, place - jax.lax.cummax(begins, axis=1), 0)
        return positions if spec is None else jax.sharding.reshard(positions, spec)

    def first_tokens(self, x):
        """``x[..., e]`` at the first token of each segment, and which segments there are.

        They are ``[batch, limit, e]`` and ``[batch, limit]``.
        """
        assert self.limit is not None
        ids = whole(self.ids, 1)
        own = ids[:, None, :] == jnp.arange(1, self.limit + 1, dtype=ids.dtype)[None, :, None]
        first = jnp.argmax(own, axis=-1).astype(jnp.int32)
        return jnp.take_along_axis(whole(x, 1), first[..., None], axis=1), own.any(-1)

    def labels(self, tokens):
        """The next token of the same segment, and -1 for its last token and padding."""
        same = (following(self.ids, 0) == self.ids) & self.inside
        return jnp.where(same, following(tokens, -1), -1)

    def for_attention(self):
        """``segment_ids`` of ``attention``."""
        ids = whole(self.ids, 1)
        # Under Explicit axes, the ids of queries are sharded as these are.
        return (self.ids, ids) if is_sharded(self.ids, 1) else ids


def checked(check: Checks, ids, max_segments, mask, shape: tuple[int, ...]) -> Segments | None:
    """The segments, if there are any. A token that ``mask`` excludes is padding."""
    if max_segments is not None:
        max_segments = check.integer("max_segments", max_segments, 1)
    if ids is None:
        if max_segments is not None:
            raise ValueError(
                f"{check.model}: max_segments is {max_segments}, but segment_ids is None"
            )
        return None
    ids = check.integers("segment_ids", ids)
    check.shape("segment_ids", ids, "tokens", shape)
    if ids.dtype.itemsize < 4:  # which may be too narrow for the limit
        ids = ids.astype(jnp.int32)
    inside = ids > 0
    if mask is not None:
        if (spec := explicit_spec(ids)) is not None:  # as in `in_table`
            mask = jax.sharding.reshard(mask, spec)
        inside &= mask
    return Segments(jnp.where(inside, ids, jnp.zeros_like(ids)), max_segments)
