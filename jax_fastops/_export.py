"""Support for ``jax.export``."""

from __future__ import annotations

import jax.export

from jax_fastops import _native


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The checks to pass as ``disabled_checks`` to ``jax.export.export``, one for each kernel.

    ``jax.export`` refuses custom calls whose stability it does not know. The name of each kernel
    carries the version of its interface. So an exported program either finds the kernels that it
    was made for, or fails with the name of the missing one. Run ``import jax_fastops`` before you
    call a deserialized program.

    Returns:
      A list of checks, for the kernels of every native module that was built.

    Example:
      >>> x = jnp.ones((4, 8))
      >>> exported = jax.export.export(jax.jit(fo.relu), disabled_checks=fo.export_checks())(x)
      >>> exported.call(x).shape
      (4, 8)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _native.targets()]
