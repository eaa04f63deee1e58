"""Sums and maxima over windows."""

from __future__ import annotations

import math

from jax_fastops import _implementation
from jax_fastops._dispatch import lowering_platform
from jax_fastops.autofuse._rule import Rewrite, Rule
from jax_fastops.autofuse._value import Value
from jax_fastops.max_pool import max_pool
from jax_fastops.window_sum import window_sum

_MAX_WINDOW = 9  # in larger windows, XLA's search may cost less than the loads


class WindowRule(Rule):
    """``window_sum`` and ``max_pool``."""

    def match(self, value: Value) -> Rewrite | None:
        node = value.node
        if not node.name.startswith("reduce_window_") or not value.is_plain:
            return None
        window, strides, padding, *dilations = (
            tuple(node.params[name])
            for name in (
                *("window_dimensions", "window_strides", "padding"),
                *("base_dilation", "window_dilation"),
            )
        )
        if any(n != 1 for dilation in dilations for n in dilation):
            return None
        operand, padding = {"x": node.inputs[0]}, tuple(map(tuple, padding))
        if node.name == "reduce_window_max":
            if not _pools() or not 1 < math.prod(window) <= _MAX_WINDOW:
                return None
            options = dict(window=window, strides=strides, padding=padding)
            return self.rewrite("max_pool", max_pool, [value], operand, **options)
        wide = [i for i, size in enumerate(window) if size != 1]
        if node.name != "reduce_window_sum" or len(wide) != 1 or any(n != 1 for n in strides):
            return None
        axis, radius = wide[0], window[wide[0]] // 2
        around = padding[axis]
        if window[axis] % 2 == 0 or around not in ((0, 0), (radius, radius)):
            return None
        if any(any(pair) for i, pair in enumerate(padding) if i != axis):
            return None
        options = dict(radius=radius, axis=axis, padding="SAME" if around[0] else "VALID")
        return self.rewrite("window_sum", window_sum, [value], operand, **options)


def _pools() -> bool:
    """Whether a pooling is replaced. On a CPU, XLA's gradient of 3x3 windows is often faster."""
    implementation = _implementation.current()
    return implementation == "native" or (implementation == "auto" and lowering_platform() != "cpu")
