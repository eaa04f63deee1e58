"""Chooses between kernel and reference: by request, or by what was measured as faster."""

from __future__ import annotations

import functools
import json
import os
import threading
import weakref
from importlib import resources
from typing import Literal

import jax
import numpy as np

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
    """Chooses the implementation of ops: ``"auto"``, ``"native"`` or ``"xla"``.

    A plain call sets the choice for the whole process. In a ``with`` statement, the choice holds
    for the block and the current thread.

    A platform without kernels always takes the reference. The environment variable
    ``JAX_FASTOPS_IMPLEMENTATION`` sets the initial choice. Functions under ``jax.jit`` are traced
    again when the choice changes. ``"auto"`` looks at the default backend, and under ``jax.vmap``
    at the size of one example.

    Args:
      implementation: ``"native"`` takes the kernel wherever there is one that supports the call,
        ``"xla"`` always the ``jax.numpy`` reference. ``"auto"``, the default, takes whichever was
        measured as faster for the op, platform, dtype and size.

    Raises:
      ValueError: the name is none of the three.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fastops as fo
      >>> with fo.use_implementation("native"):
      ...     print(fo.info()["implementation"], fo.relu(jnp.array([-1.0, 1.0])).tolist())
      native [0.0, 1.0]
    """

    def __init__(self, implementation: Literal["auto", "native", "xla"]):
        self._value = _checked(implementation, "use_implementation")
        self._blocks = threading.local()  # the `with` statements that this object is in
        _choices.append(self)

    def __enter__(self) -> use_implementation:
        _choices.remove(self)  # it was not a plain call
        block = _context(self._value)
        block.__enter__()
        self._blocks.__dict__.setdefault("entered", []).append(block)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blocks.entered.pop().__exit__(*exc_info)


class _Choices:
    """The plain calls of ``use_implementation``. The last one sets the choice of the process.

    A call turns out not to be plain when its object is entered in a ``with`` statement. Until then
    it counts as plain, because it may never be entered: a notebook keeps every result that it
    shows. Once it is entered, the process' choice is again what it was without the call. So other
    threads may see a block's choice for the moment in which the block begins.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._settled = _compat.get_global(_context)
        self._pending: list[tuple[weakref.ref, str]] = []

    def append(self, choice: use_implementation) -> None:
        with self._lock:
            self._settle()
            self._pending.append((weakref.ref(choice), choice._value))
            self._set()

    def remove(self, choice: use_implementation) -> None:
        with self._lock:
            self._pending = [entry for entry in self._pending if entry[0]() is not choice]
            self._set()

    def _settle(self) -> None:
        """Forgets the calls that a later plain call has overruled."""
        for i in reversed(range(len(self._pending))):
            if self._pending[i][0]() is None:
                self._settled = self._pending[i][1]
                self._pending = self._pending[i + 1 :]
                break

    def _set(self) -> None:
        last = self._pending[-1][1] if self._pending else self._settled
        _compat.set_global(_context, last)


_choices = _Choices()


@functools.cache
def table() -> dict:
    """The measured thresholds: ``table()[op][platform][dtype][use]`` is a number of elements.

    ``use`` is ``"forward"`` (not differentiated) or ``"grad"`` (forward and backward together). The
    kernel is faster if the largest array has at least that many elements. ``None`` means never.
    ``python -m benchmarks --auto-table`` writes the file.
    """
    return json.loads(resources.files("jax_fastops").joinpath("auto_table.json").read_text())


def by_width(dtype) -> str:
    """The dtype that represents its width in the table, for ops that only move elements."""
    names = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}
    return names[np.dtype(dtype).itemsize]


def by_row_length(name: str, shape) -> str:
    """The row of the table for an op along the last dimension: long rows, or short ones.

    XLA reads long rows twice. A symbolic length counts as long.
    """
    long = len(shape) > 0 and (not isinstance(shape[-1], int) or shape[-1] > 4096)
    return f"{name}_long" if long else name


def by_radius(name: str, radius: int, across: bool) -> str:
    """The row of the table for an op over windows, across rows or along them.

    XLA's time grows with the radius, and is smaller along rows than across them.
    """
    return f"{name}{'_axis' if across else ''}{'_narrow' if radius < 4 else ''}"


def native_is_faster(op: str, platform: str, dtype, size: int, use: str) -> bool:
    """Whether the table prefers the kernel.

    A class that was never measured takes the kernel in gradients. In a forward that is not
    differentiated, it takes the reference, which XLA can fuse.
    """
    row = table().get(op, {}).get(platform, {}).get(str(dtype))
    if row is None:
        return use == "grad"
    threshold = row[use]
    return threshold is not None and size >= threshold
