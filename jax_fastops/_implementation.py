"""Which implementation an op takes: its kernel, its reference, or whichever was measured faster."""

from __future__ import annotations

import functools
import json
import os
from importlib import resources

import jax

from jax_fastops import _compat

IMPLEMENTATIONS = ("auto", "native", "xla")
_VARIABLE = "JAX_FASTOPS_IMPLEMENTATION"


def _checked(value: str, source: str) -> str:
    if value not in IMPLEMENTATIONS:
        known = ", ".join(repr(i) for i in IMPLEMENTATIONS)
        raise ValueError(f"{source}: implementation is {value!r}; it must be one of {known}")
    return value


# A user context is part of the key of jit's caches: a function traced under one implementation is
# traced again under another.
_context = jax.make_user_context(_checked(os.environ.get(_VARIABLE, "auto"), _VARIABLE))


def current() -> str:
    """The implementation in force in this thread: ``"auto"``, ``"native"`` or ``"xla"``."""
    return _context.value


class use_implementation:
    """Choose how ops run: ``"auto"``, ``"native"`` or ``"xla"``.

    Called plainly, sets the choice for the whole process; in a ``with`` statement, for the block
    and the current thread alone::

        fo.use_implementation("native")
        with fo.use_implementation("xla"):
            ...

    ``"native"`` always takes the kernel, ``"xla"`` always the ``jax.numpy`` reference, and
    ``"auto"``, the default, whichever was measured faster for the op, platform, dtype and size.
    A platform without kernels always takes the reference. The environment variable
    ``JAX_FASTOPS_IMPLEMENTATION`` sets the initial choice. Functions under ``jax.jit`` are traced
    again when the choice changes.

    Raises:
      ValueError: the name is none of the three.
    """

    def __init__(self, implementation: str):
        self._value = _checked(implementation, "use_implementation")
        self._before = _compat.get_global(_context)
        _compat.set_global(_context, self._value)
        self._local = None

    def __enter__(self) -> use_implementation:
        _compat.set_global(_context, self._before)
        self._local = _context(self._value)
        self._local.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        self._local.__exit__(*exc_info)


@functools.cache
def table() -> dict:
    """The measured crossovers: ``table()[op][platform][dtype][use]`` is a number of elements.

    ``use`` is ``"forward"`` (not differentiated) or ``"grad"`` (forward and backward together).
    From that many elements of the first operand on the kernel is faster; ``None`` means never.
    ``python -m benchmarks --auto-table`` writes the file.
    """
    return json.loads(resources.files("jax_fastops").joinpath("auto_table.json").read_text())


def native_is_faster(op: str, platform: str, dtype, size: int, use: str) -> bool:
    """Whether the table prefers the kernel. What was never measured is left to the kernel in
    gradients and to XLA, which can fuse, in a lone forward."""
    row = table().get(op, {}).get(platform, {}).get(str(dtype))
    if row is None:
        return use == "grad"
    threshold = row[use]
    return threshold is not None and size >= threshold
