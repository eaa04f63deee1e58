"""Files and lines of the user's program: not of JAX, of the op layer or of installed packages."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator

import jax
import jaxlib

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_MODELS = os.path.join(_HERE, "models", "")
# contextlib calls the functions that have a decorator of the op layer.
_LIBRARIES = (contextlib.__file__,)
_LIBRARIES += tuple(os.path.dirname(os.path.abspath(m.__file__ or "")) for m in (jax, jaxlib))


@functools.cache
def _python() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "scripts")
    return ("<frozen ", *(sysconfig.get_path(name) + os.sep for name in names))


def _is_of_op_layer(place: str) -> bool:
    return place.startswith(_HERE) and not place.startswith(_MODELS)


def is_installed(place: str) -> bool:
    """Whether a file is of Python, an installed package or the op layer.

    The others are those of the user's program, and the models of this package.
    """
    if place.startswith(_HERE):
        return _is_of_op_layer(place)
    packages = (f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
    return place.startswith(_python()) or any(p in place for p in packages)


def of_program(places: Iterable[str]) -> str:
    """The first place in the user's program. If there is none, the first one, or an empty text."""
    places = list(places)
    return next((p for p in places if not is_installed(p)), places[0] if places else "")


def of_caller() -> str:
    """File and line of the innermost frame in the user's program.

    If all frames are of libraries, that of the innermost one outside of JAX and of the op layer.
    """
    name, _, line = of_program(_frames()).rpartition(":")
    near = os.path.relpath(name) if os.path.isfile(name) else name
    return f"{min(near, name, key=len)}:{line}" if name else ""


def _frames() -> Iterator[str]:
    """The frames outside of JAX and of the op layer, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (_is_of_op_layer(name) or name.startswith(_LIBRARIES)):
            yield f"{name}:{frame.f_lineno}"
        frame = frame.f_back
