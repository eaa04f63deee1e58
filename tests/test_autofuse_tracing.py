"""`autofuse`: what a trace costs, and what patterns declare so that few of them are traced."""

import jax.numpy as jnp
import pytest

from jax_fastops.autofuse import PATTERNS, _pattern
from jax_fastops.autofuse._value import REDUCTIONS


@pytest.mark.parametrize("rank", [2, 4])
def test_patterns_have_what_they_say_that_they_need(rank):
    for pattern in PATTERNS:
        for axis in range(rank) if pattern.axes == "each" else [rank - 1]:
            (formula,) = _pattern.compiled(pattern, rank, axis)
            assert pattern.needs <= formula.needs
            assert pattern.needs & REDUCTIONS == formula.needs & REDUCTIONS
            traced = _pattern._traced(
                pattern.function, pattern.leaves, rank, axis, jnp.float32, False
            )
            found = {
                (n.name, n.meaning)
                for n in traced.nodes
                if n.name in REDUCTIONS and n.outputs[0].users
            }
            assert found >= pattern.reductions(rank, axis)
            if not pattern.fixed:
                assert found == pattern.reductions(rank, axis)
