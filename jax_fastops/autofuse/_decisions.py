"""Decides for each region whether its calls take the kernel, and keeps what was measured.

The rule, for a phase (a forward without a gradient, or a step):

1. If the region was measured, now or before, and the form with the calls has much less memory for
   temporary arrays (at most half, and 250 MB less), it is taken unless it is more than 10% slower.
2. Else, if the measured times of both forms differ by more than 2% and one microsecond, the faster
   one is taken.
3. Else, on a GPU, the reference is taken if the model of bytes (``_cost.py``) speaks against the
   calls.
4. Else the table decides for each call.

A call that stands for products, such as ``linear_cross_entropy``, is another algorithm than the
program's. If it loses in a step, it is left in the forward, too: its reference is slower than the
program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform as host
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_fastops import _native, _tables
from jax_fastops._dispatch import lowering_platform
from jax_fastops._implementation import Chosen
from jax_fastops._version import __version__
from jax_fastops.autofuse import _cost, _tune
from jax_fastops.autofuse._graph import Graph
from jax_fastops.autofuse._regions import Region, has_products, regions
from jax_fastops.autofuse._rule import Rewrite
from jax_fastops.autofuse._tune import PHASES, Times

_SAME, _NOISE = 0.02, 1e-6  # a part, and seconds, that two times of one program may differ by
_MUCH = 250e6  # bytes of memory, which are worth some time
_SLOWER = 0.1  # this part of the time of the region
_FORMAT = 3  # of a file, and of how its times are measured


class Verdict(NamedTuple):
    """What is chosen for a region, and why."""

    chosen: Chosen
    reason: str


Measured = dict[str, Times]  # by phase

# What this process has decided by. A file that appears later changes no program of it.
_known: dict[tuple[str, bool], tuple[Measured, str]] = {}
_lock = threading.Lock()
# The verdicts on regions by their structures, times and platforms.
_decided: dict[tuple, Verdict | None] = {}
_UNKNOWN: Any = object()
_cleared = 0  # how often


def state() -> tuple[Any, ...]:
    """What verdicts depend on, besides regions and JAX's settings.

    What is known of a region stays until ``clear``.
    """
    return lowering_platform(), _tune.why_not(), directory(), _cleared


def clear() -> None:
    """Forgets what this process has measured or read."""
    global _cleared
    _cleared += 1
    _known.clear()
    _decided.clear()
    _was_there.cache_clear()


@functools.cache
def _was_there(folder: Path) -> bool:
    """Whether the folder was there when this process first asked."""
    return os.path.isdir(folder)


def _has_times(tune: bool) -> bool:
    """Whether regions are measured, or may have been."""
    return not _tune.why_not() and (tune or _was_there(directory()))


def verdicts(
    graph: Graph,
    rewrites: Sequence[Rewrite],
    program: Callable[[Rewrite, Chosen], Any],
    tune: bool,
) -> dict[Rewrite, Verdict]:
    """The verdict for each match that is in a region of which more is known than by the table.

    ``program`` gives the traced program of a call under a choice.
    """
    platform = lowering_platform()
    stored = _has_times(tune)
    if not stored and platform != "cuda":
        return {}
    taken = Chosen(platform, True, True)
    found = regions(graph, rewrites)
    known: dict[Region, tuple[Measured, str]] = {}
    if stored:
        known = _measured(found, tune, platform, lambda rewrite: program(rewrite, taken))
    result: dict[Rewrite, Verdict] = {}
    if len(_decided) > 10_000:
        _decided.clear()
    for region in found:
        times, source = known.get(region, ({}, ""))
        key = region.structure, *times.items(), source, platform
        verdict = _decided.get(key, _UNKNOWN)  # another thread may clear them
        if verdict is _UNKNOWN:
            verdict = _decided[key] = _verdict(region, times, source, platform)
        if verdict is not None:
            result |= dict.fromkeys(region.rewrites, verdict)
    return result


def of_layers(
    found: Sequence[Region], program: Callable[[Rewrite, Chosen], Any], tune: bool
) -> dict[Region, Verdict]:
    """The verdicts on forwards of dense layers that were measured. Else the table decides."""
    if not found or not _has_times(tune):
        return {}
    platform = lowering_platform()
    taken = Chosen(platform, True, False)
    known = _measured(found, tune, platform, lambda rewrite: program(rewrite, taken))
    result: dict[Region, Verdict] = {}
    for region, (times, source) in known.items():
        choice = _choice(times["forward"]) if "forward" in times else None
        if choice is not None:
            reason = f"region {region}, {source}: forward {_text(times['forward'])}"
            result[region] = Verdict(Chosen(platform, choice, False), reason)
    return result


def _verdict(region: Region, times: Measured, source: str, platform: str) -> Verdict | None:
    choices: list[bool | None] = []
    texts = []
    for phase in PHASES:
        choice = None
        if phase in times:
            texts.append(f"{phase} {_text(times[phase])}")
            choice = _choice(times[phase])
        if choice is None and platform == "cuda":
            if (moved := _cost.more_bytes(region, phase == "step")) is not None:
                choice = False
                kernel, plain = (f"{size / 1e6:.3g} MB" for size in moved)
                texts.append(f"{phase} moves {kernel} by kernel, {plain} plain")
        choices.append(choice)
    if choices[1] is False and any(map(has_products, region.inner)):
        choices[0] = False
    if choices == [None, None]:
        return None
    where = f"{source}: " if times else "by the model, "
    return Verdict(Chosen(platform, *choices), f"region {region}, {where}{'; '.join(texts)}")


def _choice(times: Times) -> bool | None:
    """Whether measurements speak for the calls, or ``None`` if the forms are alike."""
    saved = times.plain_bytes - times.kernel_bytes
    if saved >= max(_MUCH, times.plain_bytes / 2) and times.kernel <= (1 + _SLOWER) * times.plain:
        return True
    if abs(times.kernel - times.plain) > max(_SAME * times.plain, _NOISE):
        return times.kernel < times.plain
    return None


def _text(times: Times) -> str:
    def of(seconds: float, size: float) -> str:
        time = f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
        return f"{time} ({_tables.size(int(size))})"

    kernel, plain = of(times.kernel, times.kernel_bytes), of(times.plain, times.plain_bytes)
    return f"{kernel} by kernel, {plain} plain"


# ---- what was measured ---------------------------------------------------------------------------


def _measured(
    found: Sequence[Region], tune: bool, platform: str, program: Callable[[Rewrite], Any]
) -> dict[Region, tuple[Measured, str]]:
    """The times of regions, and where they are from. Equal regions are measured once.

    Regions of sharded arrays have none.
    """
    about = _about(platform)
    found = [region for region in found if not _tune.is_sharded(region)]
    keys = {r: hashlib.sha256(f"{about}\n{r.key}".encode()).hexdigest() for r in found}
    with _lock:
        new: dict[str, Region] = {}
        for region, key in keys.items():
            if (key, tune) in _known:
                continue
            times = _known.get((key, True), _known.get((key, False), ({}, "")))[0] or _read(key)
            if times or not tune:
                _known[key, tune] = times, "cached"
            else:
                new[key] = region
        if new:
            for key, times in zip(new, _tune.measure(list(new.values()), program), strict=True):
                _known[key, True] = times, "measured"
                if times:
                    _write(key, times, str(new[key]))
        return {r: _known[key, tune] for r, key in keys.items()}


@functools.cache
def _about(platform: str) -> str:
    """The device and the versions that times depend on."""
    kernels = _native.target_name("", platform)  # with the version of their interface
    versions = jax.__version__, importlib.metadata.version("jaxlib"), __version__, kernels
    device = _native.device(platform)[0]
    if platform == "cpu":  # all of them have one name
        device = host.node()
    return json.dumps([_FORMAT, platform, device, *versions])


def directory() -> Path:
    """The folder of the cache."""
    chosen = os.environ.get("JAX_FASTOPS_CACHE")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jax_fastops"


def _read(key: str) -> Measured:
    """The times in a file of the cache, or nothing if it has none."""
    try:
        data = json.loads((directory() / f"{key}.json").read_text())
        times = {phase: Times(*map(float, data[phase])) for phase in PHASES if phase in data}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return times if all(0 <= x < float("inf") for t in times.values() for x in t) else {}


def _write(key: str, times: Measured, name: str) -> None:
    """Keeps times for other processes, if the folder can be written."""
    with contextlib.suppress(OSError):
        folder = directory()
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"region": name, **times}, file)
            os.replace(path, folder / f"{key}.json")
        except OSError:
            os.unlink(path)
            raise
