"""Which functions of other packages are ours now, in this thread."""

from __future__ import annotations

import jax

# A user context is part of the key of jit's caches: a function that was traced outside of `patch`
# is traced again inside.
names = jax.make_user_context(frozenset())


def off():
    """A context in which no function is ours: for our own uses of these functions."""
    return names(frozenset())
