"""What a compiled program does, from its text."""

import re
from collections.abc import Callable
from typing import Any

import jax


def targets(text: str) -> list[str]:
    """The names of this package's kernels that a compiled program calls, sorted."""
    return sorted(re.findall(r'custom_call_target="jax_fastops\.(\w+?)\.v', text))


def targets_of(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The same, for the program of ``fn`` with these arguments."""
    return targets(jax.jit(fn).lower(*args).compile().as_text())
