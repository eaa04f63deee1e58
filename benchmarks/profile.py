"""Kernel times from JAX's profiler: which kernels ran on the GPU, when, and for how long."""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

PROFILED = 3  # calls
# What the kernels of a profile are for: the first pattern that is in the name.
KINDS = (
    ("attention", "sdpa|flash|fmha|attention|cudnn_generated|compute_dot_do_o|convert_dq"),
    ("collectives", "nccl"),
    ("copies", "memcpy|memset|^copy|wrapped_copy"),
    ("products", "nvjet|gemm|gemv|cutlass|cublas|splitk|fusion_dot|xmma|wgmma"),
)
OTHER = "passes of the compiler"  # XLA or Inductor


@dataclass(frozen=True)
class Kernel:
    """One entry of a GPU stream (kernel, copy or memset); times in nanoseconds."""

    start: float
    duration: float
    name: str
    labels: str  # the rest of the profile's entry: HLO module, operation, JAX function


def kernels(work: Callable[[], None]) -> list[Kernel]:
    """Run ``work`` under the profiler, and return what ran on the first GPU, by start time.

    Empty if the profile shows no GPU (on a CPU, or without access to the device's counters).
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            work()
        finally:
            jax.profiler.stop_trace()
        found = [k for path in Path(folder).glob("**/*.xplane.pb") for k in _read(path)]
    return sorted(found, key=lambda kernel: kernel.start)


def _read(path: Path) -> Iterator[Kernel]:
    """The GPU work in a file that the profiler wrote."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # other lines repeat the events of the streams, by module or by op
            for event in line.events:
                labels = " ".join(value for _, value in event.stats if isinstance(value, str))
                yield Kernel(event.start_ns, event.duration_ns, event.name, labels)


def kind(name: str) -> str:
    """What a kernel is for, by its name."""
    if own := re.search(r"jax_fastops::(?:\w+::|\(anonymous namespace\)::)*(\w+)", name):
        return own[1]
    found = (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(found, OTHER)


def runs_kernels(row: dict) -> bool | None:
    """Whether a kernel of this package runs; ``None`` if the row does not say it."""
    if "calls" in row:
        return row["calls"] > 0
    if "kinds_ms" in row:
        return bool(row["kinds_ms"].keys() - {kind for kind, _ in KINDS} - {OTHER})
    return None


def attributed(kernels: Iterable[tuple[str, float]], longest: int, calls: int = PROFILED) -> dict:
    """A profile of some calls as milliseconds of one, from names and milliseconds."""
    names: dict[str, list[float]] = {}
    kinds: dict[str, float] = {}
    for name, ms in kernels:
        names.setdefault(name[:100], []).append(ms / calls)
        kinds[kind(name)] = kinds.get(kind(name), 0) + ms / calls
    ordered = sorted(names.items(), key=lambda item: -sum(item[1]))
    return {
        "busy_ms": sum(kinds.values()),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels": [[name, sum(t), len(t) / calls] for name, t in ordered[:longest]],
    }


def of_calls(call: Callable, wait: Callable[[], None], longest: int, torch: bool = False) -> dict:
    """What runs in calls, by kind, and the longest kernels, by the profiler of JAX or PyTorch."""

    def work():
        for _ in range(PROFILED):
            call()
        wait()

    if not torch:
        return attributed([(k.name, k.duration * 1e-6) for k in kernels(work)], longest)
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
    events = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    return attributed([(e.name, e.time_range.elapsed_us() * 1e-3) for e in events], longest)
