"""Whole jobs in steady state, each contender in a process of its own.

A job's rows run in processes, one for each row or for some rows of one contender, so that no
contender has the memory, the clocks or the errors of another one.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import ROOT, profile
from benchmarks.programs import collectives, temp_bytes

WARM_UP = 5  # calls
RUNS = 3
FACTS = (
    "import json; from benchmarks import environment as e; "
    "print(json.dumps(e.facts('optax', 'torch')))"
)


def options(add: Callable) -> None:
    """The options that all jobs in processes have."""
    add("--steps", type=int, default=30, help="calls of a run")
    add("--small", action="store_true", help="a small model, for a test")
    add("--profile", type=int, default=0, metavar="N", help="time by kind, and the N longest")
    add("--processes", type=int, default=1, metavar="N", help="of a row; medians count")
    add("--limit", type=float, metavar="S", help="seconds that a process may take")
    add("--add", action="store_true", help="keep other rows of the file, if made in the same way")
    add("--one", type=json.loads, help="measure these rows, in this process")


def run(name: str, job: Any, options: Any, arguments: Sequence[str]) -> None:
    """Measures a job's rows; prints and writes each one when it is known."""
    from benchmarks.environment import slug
    from benchmarks.report import write

    # The device's name is asked for in a process, too, because this one must not hold the device.
    results = process(["-c", FACTS], options.limit)
    if "error" in results:
        raise SystemExit(results["error"])
    with_torch = importlib.util.find_spec("torch")
    rows = list(job.rows(options))
    rows = [r for r in rows if with_torch or not r.get("contender", "").startswith("torch")]
    facts = job.facts(options) if hasattr(job, "facts") else {}
    what = facts.pop("what", "")
    results |= {"steps": options.steps, **facts, "rows": []}
    path = options.out / f"{name}{what}-{slug(results)}.json"
    if options.add and path.exists():
        results["rows"] = others(path, results, rows)
    # Rows that share nothing have values that differ.
    keys = getattr(job, "shared", lambda row: None)
    groups = itertools.groupby(enumerate(rows), lambda pair: keys(pair[1]) or pair[0])
    for some in ([row for _, row in group] for _, group in groups):
        command = ["-m", "benchmarks", name, *arguments, "--one", json.dumps(some)]
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
    """One row of several processes: the medians of times and rates, and the rest of the first."""
    if failed := [one for one in results if "error" in one]:
        return failed[0]
    if len(results) == 1:
        return results[0]
    row = results[0] | {"processes": len(results)}
    for key in results[0]:
        times = [one.get(key) for one in results]
        is_time = key == "ms" or key.endswith(("_ms", "_per_s"))
        if is_time and all(isinstance(time, (int, float)) for time in times):
            row |= {key: statistics.median(times), f"all_{key}": times}
    return row


def process(arguments: list[str], limit: float | None = None, **variables: str) -> Any:
    """The JSON in the last line that Python prints; ``variables`` are of its environment."""
    how = _python(arguments) | dict(capture_output=True, timeout=limit)
    how["env"] |= variables
    try:
        found = subprocess.run(**how)
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {limit:g} s"}
    if found.returncode:
        return {"error": found.stderr.strip()[-400:]}
    return json.loads(found.stdout.splitlines()[-1])


def stream(arguments: list[str], allowed: Callable[[], float]) -> Iterator[dict]:
    """The JSON objects that Python prints, one in a line, as soon as each is printed.

    The last one has an ``error`` if the process fails, or takes longer than ``allowed()`` seconds
    until the next line.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            **_python(arguments), stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as child,
    ):
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read():
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while (line := lines.get(timeout=max(0, allowed()))) is not None:
                if line.startswith("{"):
                    yield json.loads(line)
            if child.wait(timeout=max(0, allowed())):
                errors.seek(0)
                text = errors.read().strip()[-400:]
                yield {"error": text or f"the process ended with {child.returncode}"}
        except (queue.Empty, subprocess.TimeoutExpired):
            yield {"error": "it took too long"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # also the processes that it started
                os.killpg(child.pid, signal.SIGKILL)


def _python(arguments: list[str]) -> dict[str, Any]:
    """How a process of Python runs in this checkout."""
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), *arguments]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return {"args": command, "text": True, "cwd": ROOT, "env": environment}


def steady(call: Callable, wait: Callable[[], None], calls: int, runs: int = RUNS) -> dict:
    """Milliseconds of a call, with no wait between two calls: the median of some runs."""
    for _ in range(WARM_UP):
        call()
    wait()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return {"ms": statistics.median(times), "all_ms": times}


def jax_calls(options: Any, program: Callable[[], Any]) -> tuple[dict, Any]:
    """Times of calls of a compiled program, with a profile if it is asked for, and a result."""
    result = None

    def call():
        nonlocal result
        result = program()

    return timed(options, call, lambda: jax.block_until_ready(result)), result


def timed(options, call: Callable, wait: Callable, alone=True, torch=False) -> dict:
    """The times of calls, and of those that are waited for, with a profile if it is asked for."""
    found = steady(call, wait, options.steps)
    if alone:
        found["latency_ms"] = steady(call, wait, 1, options.steps)["ms"]
    if options.profile:
        found |= profile.of_calls(call, wait, options.profile, torch)
    return found


def together(compilations: Sequence[Callable[[], Any]]) -> list:
    """Calls functions that compile at the same time, because that takes most of the time.

    XLA chooses algorithms by their times. Those that it chose for the first program, which is
    compiled by itself, are known to the others.
    """
    first, *others = compilations
    with ThreadPoolExecutor() as pool:
        return [first(), *pool.map(lambda compilation: compilation(), others)]


def jax_training(options, start: Callable, update: Callable, batches: list, curve: int = 0):
    """Compiles ``update(state, *batch)``, which gives the next state and the loss.

    Returns a function that measures steps of the first batch, or with ``curve`` so many steps that
    take all batches in turn.
    """
    state = jax.block_until_ready(start())
    compiled = jax.jit(update, donate_argnums=0).lower(state, *batches[0]).compile()

    def step(*batch):
        nonlocal state
        state, value = compiled(state, *batch)
        return value

    def measure() -> dict:
        found = training(options, step, lambda: jax.block_until_ready(state), batches, curve)
        if not curve:
            found |= {"temp_bytes": temp_bytes(compiled)}
            if between := collectives(compiled.as_text()):
                found["collectives"] = between
        return found

    return measure


def adamw(rate, decay: float, loss: Callable) -> tuple[Callable, Callable]:
    """The state of a training, from parameters, and its update, by ``loss(params, count, *batch)``.

    The state has the parameters, that of the optimizer, and the number of steps so far.
    """
    import optax

    optimizer = optax.adamw(rate, weight_decay=decay)

    def update(state, *batch):
        params, inner, count = state
        value, grads = jax.value_and_grad(loss)(params, count, *batch)
        changes, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, changes), inner, count + 1), value

    return lambda params: (params, optimizer.init(params), jax.numpy.int32(0)), update


def torch_training(options, loss: Callable, optimizer, batches: list, curve: int = 0, rate=None):
    """Measures the same in PyTorch. ``rate`` gives the learning rate of a step."""
    import torch

    on_cuda = torch.cuda.is_available()
    counter = itertools.count()

    def step(*batch):
        if rate:
            done = next(counter)
            for group in optimizer.param_groups:
                group["lr"] = rate(done)
        device = "cuda" if on_cuda else "cpu"
        with torch.autocast(device, torch.bfloat16, enabled=not options.small):  # or float32
            found = loss(*batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach().clone()

    found = training(options, step, torch_wait(), batches, curve, torch=True)
    if on_cuda and not curve:
        # At rest there are the parameters and the state of the optimizer.
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["temp_bytes"] = found["peak_bytes"] - torch.cuda.memory_allocated()
    return found


def torch_wait() -> Callable[[], None]:
    """A function that waits for PyTorch's device."""
    import torch

    return torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def training(options, step, wait, batches: list, curve: int, torch: bool = False) -> dict:
    """The times and losses of steps of the first batch; or the losses of all batches in turn."""
    if curve:
        found = [step(*batches[i % len(batches)]) for i in range(curve)]
        return {"losses": [round(float(loss), 5) for loss in found]}
    first = value = step(*batches[0])

    def call():
        nonlocal value
        value = step(*batches[0])

    found = timed(options, call, wait, alone=False, torch=torch)
    return found | {"first_loss": float(first), "loss": float(value)}
