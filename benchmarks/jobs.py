"""Whole jobs in steady state, each contender in a process of its own.

`pretraining`, `decoder` and `inference` run themselves once more for each row, or for some rows of
one contender, so that no contender has the memory, the clocks or the errors of another one.
"""

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT

WARM_UP = 5  # calls
RUNS = 3
PROFILED = 3  # calls
# What the kernels of a profile are for: the first pattern that is in the name.
KINDS = (
    ("attention", "sdpa|flash|fmha|attention|compute_dot_do_o|convert_dq"),
    ("copies", "memcpy|memset"),
    ("products", "nvjet|gemm|gemv|cutlass|cublas|splitk|fusion_dot"),
)
OTHER = "passes of the compiler"  # XLA or Inductor
FACTS = """
import json
from benchmarks import environment
versions = environment.versions("optax", "torch")
print(json.dumps({"hardware": environment.hardware(), "versions": versions}))
"""


def parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """The options that all jobs have."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--steps", type=int, default=30, help="calls of a run")
    add("--small", action="store_true", help="a small model, for a test")
    add("--profile", type=int, default=0, metavar="N", help="time by kind, and the N longest")
    add("--processes", type=int, default=1, metavar="N", help="of a row; medians count")
    add("--limit", type=float, metavar="S", help="seconds that a process may take")
    add("--add", action="store_true", help="keep other rows of the file, if made in the same way")
    add("--out", "--output", type=Path, default=RESULTS, metavar="DIR")
    add("--one", type=json.loads, help=argparse.SUPPRESS)
    return made


def run(
    module: str,
    options: argparse.Namespace,
    rows: Iterable[dict],
    what: str = "",
    shared: Callable[[dict], Any] = lambda row: None,
    **facts,
) -> None:
    """Measures the rows; prints and writes each one when it is known.

    ``what`` is a part of the file's name, if a job has several kinds of results. Rows in sequence
    for which ``shared`` gives the same value, but not ``None``, have one process.
    """
    from benchmarks.environment import slug
    from benchmarks.report import write

    # The device's name is asked for in a process, too, because this one must not hold the device.
    results = process(["-c", FACTS], options.limit)
    if "error" in results:
        raise SystemExit(results["error"])
    rows = list(rows)
    results |= {"steps": options.steps, **facts, "rows": []}
    path = options.out / f"{module.rpartition('.')[2]}{what}-{slug(results)}.json"
    if options.add and path.exists():
        results["rows"] = others(path, results, rows)
    for value, group in itertools.groupby(rows, shared):
        for some in [list(group)] if value is not None else ([row] for row in group):
            command = ["-m", module, *sys.argv[1:], "--one", json.dumps(some)]
            found = [process(command, options.limit) for _ in range(options.processes)]
            for index, row in enumerate(some):
                own = [each if "error" in each else each[index] for each in found]
                results["rows"].append(row | combined(own))
                print(json.dumps(results["rows"][-1]), flush=True)
            write(path, results)
    print(f"wrote {path}")


def others(path: Path, results: dict, rows: list[dict]) -> list[dict]:
    """The rows of a file that are not in ``rows``."""
    old = json.loads(path.read_text())
    for key in results.keys() - {"hardware", "rows"}:
        if old.get(key) != results[key]:
            raise SystemExit(f"--add: {key} of {path} is {old.get(key)}, not {results[key]}")
    return [r for r in old["rows"] if not any(row.items() <= r.items() for row in rows)]


def combined(results: list[dict]) -> dict:
    """One row of several processes: the medians of their times, and the rest of the first."""
    if failed := [one for one in results if "error" in one]:
        return failed[0]
    if len(results) == 1:
        return results[0]
    row = results[0] | {"processes": len(results)}
    for key in results[0]:
        times = [one.get(key) for one in results]
        is_time = key == "ms" or key.endswith("_ms")
        if is_time and all(isinstance(time, (int, float)) for time in times):
            row |= {key: statistics.median(times), f"all_{key}": times}
    return row


def process(arguments: list[str], limit: float | None = None) -> Any:
    """The JSON in the last line that Python prints."""
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), *arguments]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {limit:g} s"}
    if found.returncode:
        return {"error": found.stderr.strip()[-400:]}
    return json.loads(found.stdout.splitlines()[-1])


def steady(call: Callable, wait: Callable[[], None], calls: int) -> dict:
    """Milliseconds of a call, with no wait between two calls: the median of some runs."""
    for _ in range(WARM_UP):
        call()
    wait()
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return {"ms": statistics.median(times), "all_ms": times}


def latency(call: Callable, wait: Callable[[], None], calls: int) -> float:
    """The median of the milliseconds of a call that is waited for."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def jax_calls(options: argparse.Namespace, program: Callable[[], Any]) -> tuple[dict, Any]:
    """Times of calls of a compiled program, with a profile if it is asked for, and a result."""
    import jax

    result = None

    def call():
        nonlocal result
        result = program()

    def wait():
        jax.block_until_ready(result)

    found = steady(call, wait, options.steps)
    found["latency_ms"] = latency(call, wait, options.steps)
    if options.profile:
        found |= attributed(jax_kernels(call, wait), options.profile)
    return found, result


def together(compilations: Sequence[Callable[[], Any]]) -> list:
    """Calls functions that compile at the same time, because that takes most of the time.

    XLA chooses algorithms by their times. Those that it chose for the first program, which is
    compiled by itself, are known to the others.
    """
    first, *others = compilations
    with ThreadPoolExecutor() as pool:
        return [first(), *pool.map(lambda compilation: compilation(), others)]


# ---- trainings -----------------------------------------------------------------------------------


def jax_training(
    options: argparse.Namespace, start: Callable, update: Callable, batches: list, curve: int = 0
) -> Callable[[], dict]:
    """Compiles ``update(state, *batch)``, which gives the next state and the loss.

    Returns a function that measures steps of the first batch, or with ``curve`` so many steps that
    take all batches in turn.
    """
    import jax

    state = jax.block_until_ready(start())
    compiled = jax.jit(update, donate_argnums=0).lower(state, *batches[0]).compile()
    value = first = None

    def step(batch=batches[0]):
        nonlocal state, value, first
        state, value = compiled(state, *batch)
        first = value if first is None else first
        return value

    def wait():
        jax.block_until_ready((state, value))

    def measure() -> dict:
        if curve:
            return losses(step, batches, curve)
        found = steady(step, wait, options.steps)
        found |= {"first_loss": float(first), "loss": float(value)}
        if memory := compiled.memory_analysis():
            found["temp_bytes"] = memory.temp_size_in_bytes
        if between := collectives(compiled.as_text()):
            found["collectives"] = between
        if options.profile:
            found |= attributed(jax_kernels(step, wait), options.profile)
        return found

    return measure


def torch_training(
    options: argparse.Namespace,
    loss: Callable,
    optimizer,
    batches: list,
    curve: int = 0,
    rate: Callable[[int], float] | None = None,
) -> dict:
    """Measures the same in PyTorch. ``rate`` gives the learning rate of a step."""
    import torch

    on_cuda = torch.cuda.is_available()
    value = first = None
    done = 0

    def step(batch=batches[0]):
        nonlocal value, first, done
        if rate:
            for group in optimizer.param_groups:
                group["lr"] = rate(done)
        # In float32 for a test.
        with torch.autocast(
            "cuda" if on_cuda else "cpu", torch.bfloat16, enabled=not options.small
        ):
            found = loss(*batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = found.detach().clone()
        first = value if first is None else first
        done += 1
        return value

    if curve:
        return losses(step, batches, curve)
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    found = steady(step, wait, options.steps)
    found |= {"first_loss": float(first), "loss": float(value)}
    if on_cuda:
        # At rest there are the parameters and the state of the optimizer.
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["temp_bytes"] = found["peak_bytes"] - torch.cuda.memory_allocated()
    if options.profile:
        found |= attributed(torch_kernels(step, wait), options.profile)
    return found


def losses(step: Callable, batches: list, count: int) -> dict:
    """The losses of a training that takes the batches in turn."""
    found = [step(batches[i % len(batches)]) for i in range(count)]
    return {"losses": [round(float(loss), 5) for loss in found]}


# ---- programs ------------------------------------------------------------------------------------

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """The collectives of a compiled module by kind: their count, and the bytes of their results."""
    found: dict[str, dict[str, int]] = {}
    for line in hlo.splitlines():
        # An asynchronous one is counted at its end: newer versions also list operands at its start.
        match = re.match(rf"\s*(?:ROOT )?\S+ = (.*?) ({'|'.join(COLLECTIVES)})(?:-done)?\(", line)
        if match:
            entry = found.setdefault(match[2], {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += sum(map(_nbytes, re.findall(r"(\w+)\[([\d,]*)\]", match[1])))
    return found


def _nbytes(shape: tuple[str, str]) -> int:
    bits = int((re.search(r"\d+", shape[0]) or ["8"])[0])  # "pred" has none
    return bits // 8 * math.prod(int(n) for n in shape[1].split(",") if n)


# ---- profiles ------------------------------------------------------------------------------------


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


def attributed(kernels: Iterable[tuple[str, float]], longest: int) -> dict:
    """A profile of `PROFILED` calls as milliseconds of one, from names and milliseconds."""
    names: dict[str, list[float]] = {}
    kinds: dict[str, float] = {}
    for name, ms in kernels:
        names.setdefault(name[:100], []).append(ms / PROFILED)
        kinds[kind(name)] = kinds.get(kind(name), 0) + ms / PROFILED
    ordered = sorted(names.items(), key=lambda item: -sum(item[1]))
    return {
        "busy_ms": sum(kinds.values()),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels": [[name, sum(t), len(t) / PROFILED] for name, t in ordered[:longest]],
    }


def jax_kernels(call: Callable, wait: Callable[[], None]) -> list[tuple[str, float]]:
    """Names and milliseconds of what runs in `PROFILED` calls."""
    from benchmarks import profile

    def work():
        for _ in range(PROFILED):
            call()
        wait()

    return [(kernel.name, kernel.duration * 1e-6) for kernel in profile.kernels(work)]


def torch_kernels(call: Callable, wait: Callable[[], None]) -> list[tuple[str, float]]:
    """The same with PyTorch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            call()
        wait()
    return [
        (event.name, event.time_range.elapsed_us() * 1e-3)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
