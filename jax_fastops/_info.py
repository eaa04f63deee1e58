"""Reports what was built, and what runs where."""

from __future__ import annotations

from typing import Any

import jax
import jaxlib

from jax_fastops import _implementation, _native
from jax_fastops._op import ops
from jax_fastops._version import __version__

_PLATFORMS = ("cpu", "cuda")


def info() -> dict[str, Any]:
    """Describes this installation, as a dictionary of plain values. Starts no backend.

    Returns:
      A dictionary with these keys:

      - ``"version"``, ``"jax"``, ``"jaxlib"``: versions.
      - ``"implementation"``: the value of :func:`set_implementation` in force.
      - ``"modules"``: for each platform, how its native module was built (compiler, FFI version,
        kernel ABI, instruction sets or compute capabilities), or ``None`` if it was not built.
      - ``"ops"``: for each op and platform, ``"native"`` if it has kernels, otherwise ``"xla"``.

    Example:
      >>> fo.info()["ops"]["relu"]["cpu"]
      'native'
    """
    return {
        "version": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "implementation": _implementation.current(),
        "modules": _native.build_info(),
        "ops": {
            name: {p: "native" if op.supports(p) else "xla" for p in _PLATFORMS} | {"other": "xla"}
            for name, op in sorted(ops().items())
        },
    }


def describe() -> str:
    """The content of ``info()`` as text, and what runs where. Starts JAX's backends."""
    found = info()
    lines = [
        f"jax_fastops {found['version']} (jax {found['jax']}, jaxlib {found['jaxlib']})",
        f"implementation: {found['implementation']}",
        "",
        "native modules",
    ]
    for platform, built in found["modules"].items():
        if built is None:
            lines.append(f"  {platform}: not built")
            continue
        lines.append(f"  {platform}:")
        lines += [f"    {key}: {_plain(value)}" for key, value in built.items()]
    lines += ["", "ops"]
    width = max(map(len, found["ops"]))
    for name, where in found["ops"].items():
        places = ", ".join(f"{platform} {how}" for platform, how in where.items())
        lines.append(f"  {name:<{width}}  {places}")
    lines += ["", "what runs where"]
    lines += [f"  {platform}: {line}" for platform, line in _native.status().items()]
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, (tuple, list)):
        separator = "." if all(isinstance(v, int) for v in value) else ", "
        return separator.join(map(str, value))
    return str(value)
