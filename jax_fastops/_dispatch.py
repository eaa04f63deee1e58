"""One decision for each call of an op: kernel or reference.

:func:`decide` is the only place that knows the policy. A family states facts: the class of the
shapes, a limit of its kernel, why XLA needs no pass of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import NamedTuple

import jax
import numpy as np

from jax_fastops import _native


class Choice(NamedTuple):
    """Kernel or reference, and why."""

    kernel: bool
    reason: str


class Decision(NamedTuple):
    """The choice for a call that is not differentiated, and for forward and backward together."""

    forward: Choice
    gradient: Choice

    @property
    def kernel(self) -> bool:
        """Whether either takes the kernel. If not, XLA may fuse the reference."""
        return self.forward.kernel or self.gradient.kernel


@dataclasses.dataclass(frozen=True)
class Request:
    """What the decision depends on.

    ``shape_class`` and ``dtype`` name a row of the measured thresholds, and ``size`` is the number
    of elements of the largest array. ``limit`` says why the kernel cannot take the call. ``fused``
    says why XLA needs no pass over memory for it.
    """

    implementation: str
    shape_class: str
    dtype: str
    size: int
    limit: str | None = None
    fused: str | None = None

    def mapped(self, n) -> Request:
        """The request of ``n`` such calls at once."""
        size = self.size * n if isinstance(n, int) else SYMBOLIC
        return dataclasses.replace(self, size=max(size, self.size))


SYMBOLIC = 1 << 40  # the size that stands for a symbolic one


def decide(kernels: frozenset[str], request: Request, platform: str) -> Decision:
    """Decides a request for a lowering platform. ``kernels`` are those that the op needs."""
    if request.implementation == "xla":
        return _both(False, "the implementation is 'xla'")
    if request.limit is not None:
        return _both(False, request.limit)
    if not kernels or not kernels <= _native.kernels(platform):
        return _both(False, f"no kernel was built for {platform}")
    if not _native.runs_here(platform):
        return _both(False, "the kernels were built for other devices or a later driver")
    if request.implementation == "native":
        return _both(True, "the implementation is 'native'")
    if request.fused is not None:
        return _both(False, request.fused)
    row = thresholds().get(request.shape_class, {}).get(platform, {}).get(request.dtype)
    measured = f"{request.shape_class}, {request.dtype}"
    if row is None:
        return Decision(
            Choice(False, f"not measured ({measured}), and XLA may fuse the reference"),
            Choice(True, f"not measured ({measured})"),
        )
    size = "a symbolic size" if request.size >= SYMBOLIC else f"{request.size:,} elements"

    def of(least: int | None) -> Choice:
        if least is None:
            return Choice(False, f"XLA is as fast at every measured size ({measured})")
        faster = request.size >= least
        return Choice(faster, f"{size}; the kernel is faster from {least:,} ({measured})")

    return Decision(of(row["forward"]), of(row["grad"]))


class Refused(Exception):
    """The kernel cannot take a call, which became clear when its operands were prepared."""


def _both(kernel: bool, reason: str) -> Decision:
    return Decision(Choice(kernel, reason), Choice(kernel, reason))


def refused(reason: str) -> Decision:
    """The decision for a call that the kernel cannot take."""
    return _both(False, reason)


@functools.cache
def thresholds() -> dict:
    """The measured thresholds: ``[shape class][platform][dtype][use]`` is a number of elements.

    ``use`` is ``"forward"`` (not differentiated) or ``"grad"`` (forward and backward together). The
    kernel is faster if the largest array has at least that many elements. ``None`` means never.
    ``python -m benchmarks --auto-table`` writes the file.
    """
    return json.loads(resources.files("jax_fastops").joinpath("auto_table.json").read_text())


def lowering_platform() -> str:
    """The name that lowering rules use for JAX's default backend (``"gpu"``: CUDA or ROCm)."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


# ---- classes of shapes ---------------------------------------------------------------------------


def by_width(dtype) -> str:
    """The dtype that represents its width in the table, for ops that only move elements."""
    names = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}
    return names[np.dtype(dtype).itemsize]


def by_row_length(name: str, shape) -> str:
    """The class of an op along the last dimension: long rows, or short ones.

    XLA reads long rows twice. A symbolic length counts as long.
    """
    long = len(shape) > 0 and (not isinstance(shape[-1], int) or shape[-1] > 4096)
    return f"{name}_long" if long else name


def by_radius(name: str, radius: int, across: bool) -> str:
    """The class of an op over windows, across rows or along them.

    XLA's time grows with the radius, and is smaller along rows than across them.
    """
    return f"{name}{'_axis' if across else ''}{'_narrow' if radius < 4 else ''}"
