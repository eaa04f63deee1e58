"""The settings of JAX for this package's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jax_fastops import _patched


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """A context, or a decorator, without the promotion checks and the ``patch`` of the caller."""
    checks = jax.config.jax_numpy_rank_promotion, jax.config.jax_numpy_dtype_promotion
    if checks == ("allow", "standard") and not _patched.names.value:
        yield  # an eager call of a small op would take a tenth longer
        return
    with (
        _patched.off(),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


@contextlib.contextmanager
def fixed(x64: bool = False) -> Iterator[None]:
    """A context in which a trace is the same under any settings and ``patch`` of the caller.

    ``x64`` says whether there are 64-bit types. Settings that change no trace stay as they are.
    """
    with own_code(), jax.enable_x64(x64), jax.disable_jit(False):
        yield
