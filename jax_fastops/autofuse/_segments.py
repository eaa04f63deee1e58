"""Rows of a table, and sums of rows by segment: XLA's gather, and its scatter that adds.

A gather stays a gather; what changes is its gradient, which would be such a scatter.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.lax import GatherScatterMode

from jax_fastops.autofuse._rule import Read, Rewrite, Rule
from jax_fastops.autofuse._value import Value
from jax_fastops.segment_sum import promised_rows, segment_sum, take


class SegmentRule(Rule):
    """``take`` and ``segment_sum``."""

    def match(self, value: Value) -> Rewrite | None:
        if value.node.name == "gather" and value.is_plain:
            return self._gather(value)
        if value.node.name == "scatter-add" and value.is_plain:
            return self._scatter(value)
        return None

    def _gather(self, value: Value) -> Rewrite | None:
        params, (table, ids) = value.node.params, value.node.inputs
        numbers, count = params["dimension_numbers"], len(ids.shape) - 1
        rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        last = numbers.offset_dims == tuple(range(count, len(value.shape)))
        if not rows or not last or params["slice_sizes"] != (1, *table.shape[1:]):
            return None
        if params["unique_indices"]:
            return self.miss("take", value, "no index occurs twice, so nothing is added up")
        fill, mode = params["fill_value"], params["mode"]
        if mode == GatherScatterMode.FILL_OR_DROP and fill is not None and not math.isnan(fill):
            return self.miss("take", value, "a number takes the place of missing rows")
        if mode == GatherScatterMode.ONE_HOT:
            return None
        reads = {"table": table, "ids": (ids, Read(ids.shape[:-1]))}
        return self.rewrite("take", _rows, [value], reads, mode=mode)

    def _scatter(self, value: Value) -> Rewrite | None:
        params, (operand, ids, rows) = value.node.params, value.node.inputs
        numbers, count = params["dimension_numbers"], len(ids.shape) - 1
        first = numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        last = numbers.update_window_dims == tuple(range(count, len(rows.shape)))
        if not first or not last or rows.shape[count:] != value.shape[1:]:
            return None
        if operand.number is None or operand.number != 0:
            return self.miss("segment_sum", value, "the sums are added to other numbers than 0")
        if params["unique_indices"]:
            return self.miss("segment_sum", value, "no index occurs twice, so nothing is added up")
        if params["mode"] == GatherScatterMode.CLIP:
            return self.miss("segment_sum", value, "indices that are out of bounds are clipped")
        size = math.prod(ids.shape[:-1])
        reads = {
            "data": (rows, Read((size, *value.shape[1:]))),
            "segment_ids": (ids, Read((size,))),
        }
        options = {
            "num_segments": value.shape[0],
            "indices_are_sorted": count == 1 and bool(params["indices_are_sorted"]),
        }
        return self.rewrite("segment_sum", segment_sum, [value], reads, **options)


def _rows(table, ids, *, mode):
    """``take`` of indices that do not count from the end."""
    if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
        return promised_rows(table, ids)
    if mode == GatherScatterMode.CLIP:
        return take(table, ids, mode="clip")
    return take(table, jnp.where(ids < 0, table.shape[0], ids))
