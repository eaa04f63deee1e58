"""Rows of a table that is cast to a narrower dtype: the rows are cast in place of the table.

Each row that is gathered is the same to the bit. The gradient adds up the rows in the dtype of the
table, not in the narrower one: it loses fewer digits, and XLA's scatter is much faster on a GPU.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax import lax

from jax_fastops import _implementation
from jax_fastops._dispatch import lowering_platform
from jax_fastops.autofuse._rule import Rewrite, Rule
from jax_fastops.autofuse._value import Value

_NAME = "embedding"


class EmbeddingRule(Rule):
    """``table.astype(dtype)[ids]`` becomes ``table[ids].astype(dtype)``."""

    def match(self, value: Value) -> Rewrite | None:
        node = value.node
        if node.name != "gather" or not value.is_plain:
            return None
        cast, ids = node.inputs
        if cast.node.name != "convert_element_type" or len(cast.shape) != 2:
            return None
        table, numbers = cast.node.inputs[0], node.params["dimension_numbers"]
        narrows = table.is_floating and table.dtype.itemsize > value.dtype.itemsize
        rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        if not narrows or not rows or node.params["slice_sizes"] != (1, table.shape[1]):
            return None
        names = "dimension_numbers", "slice_sizes", "indices_are_sorted", "unique_indices", "mode"
        options = {name: node.params[name] for name in names}
        fill = node.params["fill_value"]
        if fill is not None and not math.isnan(fill := float(fill)):  # NaN is the default
            if np.asarray(fill, table.dtype).astype(value.dtype) != np.asarray(fill, value.dtype):
                return self.miss(_NAME, value, "the value of missing rows would be rounded twice")
            options["fill_value"] = fill
        if (reason := _reason()) is not None:
            return self.miss(_NAME, value, reason)
        reads = {"table": table, "ids": ids}
        rewrite = self.rewrite(_NAME, gathered, [value], reads, dtype=value.dtype, **options)
        note = f"rows are cast, not the table; its gradient is summed in {table.dtype}"
        return rewrite and dataclasses.replace(rewrite, note=note)


def _reason() -> str | None:
    """Why the cast stays before the gather."""
    implementation = _implementation.current()
    if implementation == "xla":
        return "the implementation is 'xla'"
    if implementation == "auto":
        if lowering_platform() == "cpu":
            return "on a CPU the gradient is as fast in either dtype"
        if jax.device_count() > 1:
            return "devices that add up the gradient would exchange more bytes"
    return None


def gathered(table, ids, *, dtype, **options):
    """Rows of a table, cast to a dtype."""
    return lax.convert_element_type(lax.gather(table, ids, **options), dtype)
