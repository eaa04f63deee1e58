"""Reports what was built, and what runs where."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib

from jax_fastops import _implementation, _native
from jax_fastops._op import ops
from jax_fastops._version import __version__

_PLATFORMS = ("cpu", "cuda")


def info() -> dict[str, Any]:
    """Describes this installation, as a dictionary of plain values. Starts no backend.

    Returns:
      A dictionary with these keys:

      - ``"version"``, ``"jax"``, ``"jaxlib"``: versions of the installed packages.
      - ``"commit"``: the Git commit of the sources, or ``None`` if it is not known. In a checkout
        it is the present one, also where ``"version"`` is that of an earlier build.
      - ``"implementation"``: the value of :func:`set_implementation` in force.
      - ``"modules"``: for each platform, the file of its native module and how it was built
        (compiler, FFI version, kernel ABI, instruction sets or compute capabilities), or ``None``
        if there is none.
      - ``"ops"``: for each op and platform, ``"native"`` if it has kernels, otherwise ``"xla"``.

    Example:
      >>> fo.info()["ops"]["relu"]["cpu"]
      'native'
    """
    return {
        "version": __version__,
        "commit": _commit(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "implementation": _implementation.current(),
        "modules": _native.build_info(),
        "ops": {
            name: {p: "native" if op.supports(p) else "xla" for p in _PLATFORMS} | {"other": "xla"}
            for name, op in sorted(ops().items())
        },
    }


def _commit() -> str | None:
    """The commit that the build has recorded, or that a checkout is at."""
    package = Path(__file__).parent
    recorded = package / "_commit.txt"
    if recorded.exists():
        return recorded.read_text().strip() or None
    if not (package.parent / ".git").exists():
        return None
    command = ["git", "-C", str(package.parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The checks to pass as ``disabled_checks`` to ``jax.export.export``, one for each kernel.

    ``jax.export`` refuses custom calls whose stability it does not know. The name of each kernel
    carries the version of its interface, so an exported program never finds another kernel. Run
    ``import jax_fastops`` before you call a deserialized program.

    Returns:
      A list of checks, for the kernels of every native module that was built.

    Example:
      >>> x = jnp.ones((4, 8))
      >>> exported = jax.export.export(jax.jit(fo.relu), disabled_checks=fo.export_checks())(x)
      >>> exported.call(x).shape
      (4, 8)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _native.targets()]


def describe() -> str:
    """The content of ``info()`` as text, and what runs where. Starts JAX's backends."""
    found = info()
    lines = [
        f"jax_fastops {found['version']} (jax {found['jax']}, jaxlib {found['jaxlib']})",
        f"commit: {found['commit'] or 'unknown'}",
        f"implementation: {found['implementation']}",
        "",
        "native modules",
    ]
    for platform, built in found["modules"].items():
        if built is None:
            lines.append(f"  {platform}: not installed")
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
