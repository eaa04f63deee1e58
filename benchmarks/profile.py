"""Kernel times from JAX's profiler: which kernels ran on the GPU, when, and for how long."""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax


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
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=_options())
        try:
            work()
        finally:
            jax.profiler.stop_trace()
        return read(Path(folder))


def read(folder: Path) -> list[Kernel]:
    """The GPU work in a folder that the profiler wrote, by start time."""
    found: list[Kernel] = []
    for path in folder.glob("**/*.xplane.pb"):
        found += _from_xplane(path)
    if not found:
        for path in folder.glob("**/*.trace.json.gz"):
            found += from_trace(json.loads(gzip.decompress(path.read_bytes())))
    return sorted(found, key=lambda kernel: kernel.start)


def _options():
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def _from_xplane(path: Path) -> Iterator[Kernel]:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # other lines repeat the events of the streams, by module or by op
            for event in line.events:
                labels = _labels(value for _, value in event.stats)
                yield Kernel(event.start_ns, event.duration_ns, event.name, labels)


def from_trace(trace: dict) -> Iterator[Kernel]:
    """The GPU work in the JSON of the trace viewer, whose times are in microseconds."""
    events = trace.get("traceEvents", [])
    named = [e for e in events if e.get("ph") == "M" and "name" in e.get("args", {})]
    gpus = {e["pid"] for e in named if str(e["args"]["name"]).startswith("/device:GPU:0")}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e.get("name") == "thread_name" and str(e["args"]["name"]).startswith("Stream")
    }
    for event in events:
        where = (event.get("pid"), event.get("tid"))
        if event.get("ph") == "X" and where[0] in gpus and where in streams:
            labels = _labels(event.get("args", {}).values())
            start, duration = event["ts"] * 1e3, event.get("dur", 0) * 1e3
            yield Kernel(start, duration, event["name"], labels)


def _labels(values: Iterable) -> str:
    return " ".join(value for value in values if isinstance(value, str))
