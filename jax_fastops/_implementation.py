"""The switch between kernel and reference."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Literal, NamedTuple

import jax

from jax_fastops import _compat
from jax_fastops._arguments import one_of

IMPLEMENTATIONS = ("auto", "native", "xla")
_VARIABLE = "JAX_FASTOPS_IMPLEMENTATION"


class Chosen(NamedTuple):
    """A choice for the calls of a region of a program, on one platform.

    ``forward`` is for a call without a gradient, ``step`` for forward and backward together:
    whether it takes the kernel, or ``None`` if the table decides, as under ``"auto"``.
    """

    platform: str
    forward: bool | None
    step: bool | None


def _checked(value: str, source: str) -> str:
    one_of(source, "implementation", value, IMPLEMENTATIONS)
    return value


# A user context is part of the key of jit's caches: a function traced under one implementation is
# traced again under another.
_context = jax.make_user_context(_checked(os.environ.get(_VARIABLE, "auto"), _VARIABLE))


def current() -> str | Chosen:
    """The implementation in force in this thread: ``"auto"``, ``"native"``, ``"xla"``, or what
    ``autofuse`` chose."""
    return _context.value


def use_chosen(chosen: Chosen | None):
    """A context for a choice, or with ``None`` for the implementation in force."""
    return _context(chosen or current())


def set_implementation(implementation: Literal["auto", "native", "xla"]) -> None:
    """Chooses the implementation of ops for the process: ``"auto"``, ``"native"`` or ``"xla"``.

    A :func:`use_implementation` block overrides it in its thread. The environment variable
    ``JAX_FASTOPS_IMPLEMENTATION`` sets the initial choice.

    Args:
      implementation: ``"native"`` takes the kernel wherever there is one that supports the call,
        ``"xla"`` always the ``jax.numpy`` reference. ``"auto"``, the default, takes whichever was
        measured as faster for the op, platform, dtype and size. It looks at the default backend,
        and inside ``jax.vmap`` at the size of one example. A platform without kernels always takes
        the reference.

    Raises:
      ValueError: the name is none of the three.

    Example:
      >>> fo.set_implementation("native")
      >>> fo.info()["implementation"]
      'native'
      >>> fo.set_implementation("auto")
    """
    _compat.set_global(_context, _checked(implementation, "set_implementation"))


class use_implementation(contextlib.ContextDecorator):
    """Chooses the implementation of ops in a ``with`` block, for the current thread.

    It is also a decorator of a function.

    Args:
      implementation: as in :func:`set_implementation`, which sets the choice of the process.

    Raises:
      ValueError: the name is none of the three.

    Example:
      >>> with fo.use_implementation("native"):
      ...     print(fo.info()["implementation"], fo.relu(jnp.array([-1.0, 1.0])).tolist())
      native [0.0, 1.0]
    """

    def __init__(self, implementation: Literal["auto", "native", "xla"]):
        self._value = _checked(implementation, "use_implementation")
        self._blocks = threading.local()  # the `with` statements that this object is in

    def __enter__(self) -> use_implementation:
        block = _context(self._value)
        block.__enter__()
        self._blocks.__dict__.setdefault("entered", []).append(block)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blocks.entered.pop().__exit__(*exc_info)
