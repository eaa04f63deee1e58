"""One decision for each call of an op: kernel or reference.

:func:`decide` is the only place that knows the policy. A family states facts: the class of the
shapes, a limit of its kernel, why XLA needs no pass of its own. The op layer asks again when it
lowers a primitive of the call, where it knows what ``vmap`` maps and over how many devices the
program runs. A kernel may refuse that (:class:`Refused`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from jax_fastops import _auto, _native, _tables
from jax_fastops._implementation import Chosen

_P = ParamSpec("_P")
_T = TypeVar("_T")


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

    ``entry`` and ``dtype`` name conditions in the table (:mod:`jax_fastops._auto`), which ask for
    ``features``, among them ``bytes`` of the largest array. ``limit`` says why the kernel cannot
    take the call, ``fused`` why XLA needs no pass over memory for it. ``record`` is the session and
    the number of a call that is explained.
    """

    implementation: str | Chosen
    entry: str
    dtype: str
    features: tuple[tuple[str, int], ...]
    limit: str | None = None
    fused: str | None = None
    record: tuple[int, int] | None = None

    @property
    def known(self) -> dict[str, int]:
        """The features by name, and what follows from them: the number of rows, and the work of
        windows, which is 0 for the radius 1."""
        found = dict(self.features)
        if row := found.get("row_bytes"):
            known = max(row, found["bytes"]) < SYMBOLIC
            found["row_count"] = found["bytes"] // row if known else SYMBOLIC
        if radius := found.get("radius"):
            found["work"] = min(found["bytes"] * (radius - 1), SYMBOLIC)
        return found

    def mapped(self, n) -> Request:
        """The request of ``n`` such calls at once. A choice for one of them does not hold."""
        features = dict(self.features)
        for name in features.keys() & {"bytes", "row_count"}:
            features[name] = features[name] * n if isinstance(n, int) else SYMBOLIC
        own = "auto" if isinstance(self.implementation, Chosen) else self.implementation
        return dataclasses.replace(self, features=tuple(features.items()), implementation=own)


SYMBOLIC = 1 << 50  # stands for a number that depends on a symbolic size


def decide(kernels: frozenset[str], request: Request, platform: str) -> Decision:
    """Decides a request for a lowering platform. ``kernels`` are those that the op needs."""
    if request.implementation == "xla":
        return refused("the implementation is 'xla'")
    if request.limit is not None:
        return refused(request.limit)
    if not kernels or not kernels <= _native.kernels(platform):
        _native.runs_here(platform)  # says once why a GPU has no kernels
        return refused(f"no kernel was built for {platform}")
    if not _native.runs_here(platform):
        return refused("the kernels were built for other devices or a later driver")
    if request.implementation == "native":
        return Decision(*[Choice(True, "the implementation is 'native'")] * 2)
    table = _by_table(request, platform)
    chosen = request.implementation
    if not isinstance(chosen, Chosen) or chosen.platform != platform:
        return table
    pairs = zip((chosen.forward, chosen.step), table, strict=True)
    return Decision(*(other if c is None else Choice(c, REGION) for c, other in pairs))


REGION = "autofuse decided for its region; autofuse.report has the reason"


def _by_table(request: Request, platform: str) -> Decision:
    if request.fused is not None:
        return refused(request.fused)
    found = trees(platform).get(request.entry, {}).get(request.dtype)
    if found is None:
        unknown = f"{request.entry} in {request.dtype} was not measured on this platform"
        return Decision(Choice(False, f"{unknown}, and XLA may fuse it"), Choice(True, unknown))
    features = request.known
    return Decision(_measured(found["forward"], features), _measured(found["grad"], features))


def _measured(tree: _auto.Tree, features: dict[str, int]) -> Choice:
    """Follows a tree. The reason says the conditions on the way."""
    way = []
    while not isinstance(tree, bool):
        name, bound, below, rest = tree
        small = features[name] < bound
        if bound == 1 and name in _auto.FLAGS:
            way.append(_auto.FLAGS[name][small])
        else:
            shown, limit = _shown(name, features[name], bound)
            limit = f"below {limit}" if small else f"{limit} or more"
            way.append(f"{_auto.WORDS[name].format(shown)} ({limit})")
        tree = below if small else rest
    speed = "faster" if tree else "no faster"
    return Choice(tree, f"the kernel was measured as {speed}" + ": " * bool(way) + ", ".join(way))


def _shown(feature: str, value: int, bound: int) -> list[str]:
    """The value and the bound, with all digits where the text would be the same."""
    is_size = feature.endswith("bytes") or feature == "work"
    both = [_tables.size(n) if is_size else f"{n:,}" for n in (value, bound)]
    if value >= SYMBOLIC:
        both[0] = "symbolic size" if is_size else "a symbolic number of"
    elif both[0] == both[1]:
        both = [f"{n:,} B" if is_size else f"{n:,}" for n in (value, bound)]
    return both


class Refused(Exception):
    """A call does not take the kernel."""


# Whether a call that would take its reference raises Refused.
kernels_only = jax.make_user_context(False)


def kernel_or(fn: Callable[_P, _T], otherwise: Callable[_P, _T]) -> Callable[_P, _T]:
    """``fn`` where its calls of ops take the kernel, and ``otherwise`` where one does not.

    With it, a library can use the ops where they gain, and keep its own code elsewhere.

    Args:
      fn: a function that calls ops of this package.
      otherwise: a function of the same arguments. It runs in place of ``fn`` if a call in ``fn``
        would take its reference, forward and backward.

    Returns:
      A function of these arguments.

    Raises:
      Whatever the two functions raise.

    Example:
      >>> softmax = fo.kernel_or(fo.softmax, jax.nn.softmax)
      >>> softmax(jnp.zeros(2)).tolist()
      [0.5, 0.5]
    """

    @functools.wraps(fn)
    def chosen(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            with kernels_only(True):
                return fn(*args, **kwargs)
        except Refused:
            return otherwise(*args, **kwargs)

    return chosen


def refused(reason: str) -> Decision:
    """The decision for a call that the kernel cannot take."""
    return Decision(Choice(False, reason), Choice(False, reason))


def trees(platform: str) -> dict:
    """The trees of the device that is nearest to this process' device."""
    devices = [device for device in _auto.DEVICES if device["platform"] == platform]
    return nearest(devices, platform)["entries"] if devices else {}


def bandwidth(platform: str) -> float:
    """The bytes per second of this process' device, or of the first one that is known."""
    known = (device for device in _auto.DEVICES if device["platform"] == platform)
    return _native.device(platform)[2] or next(known)["bandwidth"]


def nearest(devices: list[dict], platform: str) -> dict:
    """The device of this name, or the nearest one by compute capability, then by bandwidth."""
    if len(devices) == 1:
        return devices[0]
    name, capability, bandwidth = _native.device(platform)

    def distance(device: dict) -> tuple:
        slower = abs(math.log(device["bandwidth"] / bandwidth)) if bandwidth else 0.0
        return device["name"] != name, abs(device["compute_capability"] - capability), slower

    return min(devices, key=distance)


def lowering_platform() -> str:
    """The name that lowering rules use for JAX's default backend (``"gpu"``: CUDA or ROCm)."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


# ---- features of calls ---------------------------------------------------------------------------


def by_width(dtype) -> str:
    """The dtype that represents its width in the table, for ops that only move elements."""
    names = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}
    return names[np.dtype(dtype).itemsize]


def size_in_bytes(shape: Sequence[Any], dtype) -> int:
    """The bytes of an array, or ``SYMBOLIC``."""
    if not all(isinstance(d, int) for d in shape):
        return SYMBOLIC
    return math.prod(shape) * np.dtype(dtype).itemsize


def row_features(shape: Sequence[Any], dtype) -> dict[str, int]:
    """The features of rows of this shape: their bytes, and whether these are a multiple of 16."""
    row_bytes = size_in_bytes(shape, dtype)
    return {"row_bytes": row_bytes, "aligned": row_bytes % 16 == 0}
