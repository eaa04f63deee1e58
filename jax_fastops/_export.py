"""What ``jax.export`` needs to know of the kernels."""

from __future__ import annotations

import jax.export

from jax_fastops import _native


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The checks to pass as ``disabled_checks`` to ``jax.export.export``, one for each kernel.

    ``jax.export`` refuses custom calls whose stability it does not know. The kernels' names carry
    their ABI version, so an exported program either finds the kernels it was made for, or fails
    with the name of the missing one. ``import jax_fastops`` before calling a deserialised program.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _native.targets()]
