"""What does ``autofuse`` gain in programs that others wrote?

The programs are the list in ``benchmarks/others``: models of packages, and plain workloads. Each is
measured as a forward without a gradient and as a training step with its optimizer, in steady state:

``plain``     as it is
``autofuse``  with ``autofuse`` around the loss, or around the package's own step
``tune``      with ``autofuse(tune=True)``, by ``--tune``. ``tune_regions`` has the seconds of each
              phase of its regions, plain and with kernels

The contenders of a program run in turns, in random order. There are two measurements, each with
arguments in new memory. A program whose compiled text has no kernel of this package is marked
``equal``. A row also has seconds: ``first_trace_s`` of the first trace, ``trace_s`` of traces after
it, ``first_call_s`` of the first trace, the compilation next to others, and the first run, and
``tune_s`` of traces that tune.

While one program is compiled, the next ones are built and traced. Then each is timed, tuned, and
timed again with what was tuned, while nothing else runs. A row is written as soon as its program
was timed. A process of its own measures.
If a program fails or takes longer than ``--limit``, its row says so, and a new process goes on. A
program that was timed, but not tuned, has a row without ``tune``.
``--budget`` stops in time, and ``--add`` goes on with what is missing in the file, and then with
the rows that have errors.

``--check`` measures nothing. It compares values and gradients at tiny sizes.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, processes, report
from benchmarks.cases import fo
from benchmarks.others import PACKAGES, WORKLOADS
from benchmarks.others.program import BUILD, Program
from benchmarks.programs import kernels, temp_bytes

NAMES = [*PACKAGES, *WORKLOADS]
PHASES = ("forward", "step")


def options(add) -> None:
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="programs")
    add("--group", choices=("packages", "workloads"), help="one of the two lists")
    add("--tune", action="store_true", help="measure autofuse(tune=True) too")
    add("--budget", type=float, default=3600, metavar="S", help="stop after S seconds")
    add("--limit", type=float, default=180, metavar="S", help="seconds that a program may take")
    add("--together", type=int, default=8, metavar="N", help="programs of one round")
    add("--sample", type=float, default=0.05, metavar="S", help="seconds of one sample")
    add("--samples", type=int, default=5, metavar="N", help="samples of a measurement")
    add("--traces", type=int, default=1, metavar="N", help="traces after the first one")
    add("--add", action="store_true", help="keep the rows of the file, and measure the others")
    add("--tiny", action="store_true", help="tiny sizes in float32, for a test")
    add("--check", action="store_true", help="compare values at tiny sizes")
    add("--dtype", default="bfloat16", help="the dtype in which programs compute")
    add("--implementation", default="auto", help="of our ops: auto, native or xla")
    add("--one", type=json.loads, help="print rows by these options, in this process")


def run(options) -> None:
    if options.one:
        for row in measure(argparse.Namespace(**options.one)):
            print(json.dumps(row), flush=True)
        return
    names = [n for n in options.only if options.group is None or n in _group(options.group)]
    missing = [name for name in names if not installed(name)]
    for name in missing:
        print(f"left out: {name}, because {PACKAGES[name][0]} is not installed", flush=True)
    names = [name for name in names if name not in missing]
    if options.check:
        for name in names:
            print(name, _text(functools.partial(check, name, options.implementation)), flush=True)
        return
    # The device's name is asked for in a process, too, because this one must not hold the device.
    results = processes.process(["-c", processes.FACTS])
    if "error" in results:
        raise SystemExit(results["error"])
    results |= {"missing": missing, "rows": []}
    path = options.out / f"others-{environment.slug(results)}.json"
    if options.add and path.exists():
        results["rows"] = json.loads(path.read_text())["rows"]
        failed = {row["program"]: "error" in row for row in results["rows"]}
        names = [name for name in names if failed.get(name, True)]
        names.sort(key=lambda name: name in failed)
    for row in rows(names, options):
        if "program" in row:
            print(json.dumps(row), flush=True)
            kept = [old for old in results["rows"] if old["program"] != row["program"]]
            row = {"rows": [*kept, row]}
        results |= row
        report.write(path, results)
    print(f"wrote {path}", flush=True)


def rows(names: Sequence[str], options: Any) -> Iterator[dict]:
    """The row of each program as soon as it is complete, and facts of the process before them.

    A process measures. It prints a row with its ``stage`` when it begins to work on a program. When
    it fails, or a program takes too long, the row so far gets an error, and a new process goes on.
    """
    left, end = list(names), time.monotonic() + options.budget
    while left:
        row, begin = {"program": "", "stage": "starting"}, time.monotonic()
        seconds: dict[str, float] = collections.defaultdict(float)  # that each program took so far
        timed: dict[str, dict] = {}  # rows in which only the times of tuning are missing

        def allowed() -> float:
            own = options.limit - seconds[row["program"]]  # noqa: B023
            return min(begin + own, end) - time.monotonic()  # noqa: B023

        one = vars(options) | {"only": left, "one": None, "out": str(options.out)}
        command = ["-m", "benchmarks", "others", "--one", json.dumps(one)]
        for found in processes.stream(command, allowed):
            before, begin = begin, time.monotonic()
            seconds[row["program"]] += begin - before
            if "program" in found:
                row = found
                if "stage" in row and "plain_step_ms" in row:
                    timed[row["program"]] = row
            elif "error" not in found:
                yield found
            elif timed:  # there was no time to tune, or that failed
                for name, row in timed.items():
                    left.remove(name)
                    yield {k: v for k, v in row.items() if k != "stage"}
            elif begin > end - 1:
                print(f"no time for {', '.join(left)}", flush=True)
                return
            elif not row["program"]:
                raise SystemExit(found["error"])
            elif "stage" in row:
                row["error"] = f"{row.pop('stage')}: {found['error']}"
            if "stage" not in row and row["program"] in left:
                left.remove(row["program"])
                timed.pop(row["program"], None)
                yield row


def installed(name: str) -> bool:
    """Whether the package of a program is installed."""
    return name not in PACKAGES or bool(importlib.util.find_spec(PACKAGES[name][0]))


def tracer(program: Program, fuse: Callable, phase: str) -> Callable[[], Any]:
    """A function that traces a phase, which JAX has not seen before."""
    if phase == "forward":
        function, args, donated = program.evaluation(fuse), program.inputs, ()
    else:
        state = jax.eval_shape(program.state)
        function, args, donated = program.step(fuse), (state, *program.batch), (0,)
    types = _like(args)
    # JAX knows the traces of a function that it has seen.
    jitted = jax.jit(lambda *args: function(*args), donate_argnums=donated)
    return lambda: jitted.trace(*types)


def _group(name: str) -> dict:
    return PACKAGES if name == "packages" else WORKLOADS


def built(name: str, tiny: bool, dtype: Any) -> Program:
    """A program, with its arrays on the host."""
    module = "packages" if name in PACKAGES else "workloads"
    importlib.import_module(f"benchmarks.others.{module}")
    with _on_host():
        return BUILD[name](tiny, dtype)


def _on_host():
    """New arrays are the host's, so that models that wait for their turn take no memory."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def fuses(program: Program, tune: bool) -> dict[str, Callable]:
    """Contender -> what stands around the function."""
    more = {"dropout": True} if program.dropout else {}
    found = {"plain": lambda fn: fn, "autofuse": functools.partial(fo.autofuse, **more)}
    if tune:
        found["tune"] = functools.partial(fo.autofuse, tune=True, **more)
    return found


@contextlib.contextmanager
def _cache(folder: str) -> Iterator[None]:
    """The folder of the cache of measurements, which no process but this one reads."""
    decisions = importlib.import_module("jax_fastops.autofuse._decisions")
    before = os.environ.get("JAX_FASTOPS_CACHE")
    os.environ["JAX_FASTOPS_CACHE"] = folder
    decisions.clear()
    try:
        yield
    finally:
        decisions.clear()
        os.environ.pop("JAX_FASTOPS_CACHE")
        if before is not None:
            os.environ["JAX_FASTOPS_CACHE"] = before


class Prepared:
    """The compiled forwards and steps of a program, and its row."""

    def __init__(self, name: str, options: Any, pool: ThreadPoolExecutor):
        self.row: dict[str, Any] = {"program": name, "commit": environment.commit()}
        self.options, self.pool = options, pool
        self.compiled: dict[str, dict[str, Any]] = {phase: {} for phase in PHASES}
        self.futures: list[tuple[str, str, Future]] = []

    def build(self) -> None:
        """In this thread: packages that import their parts late cannot do so in several."""
        if hasattr(self, "program"):
            return
        dtype = jnp.float32 if self.options.tiny else jnp.dtype(self.options.dtype).type
        begin = time.perf_counter()
        self.program = built(self.row["program"], self.options.tiny, dtype)
        self.row["build_s"] = time.perf_counter() - begin

    def compile(self) -> None:
        """Traces plain and ``autofuse``, and begins to compile them."""
        with tempfile.TemporaryDirectory() as folder, _cache(folder):
            self._lower(fuses(self.program, False))

    def tune(self) -> None:
        """Tunes, and compiles the result. Tuning measures, so nothing else may run."""
        with tempfile.TemporaryDirectory() as folder, _cache(folder):
            self._lower({"tune": fuses(self.program, True)["tune"]})
            self.row["tune_s"] = sum(self.row[f"tune_{phase}_first_trace_s"] for phase in PHASES)
            files = sorted(Path(folder).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            self.row["tune_regions"] = [json.loads(path.read_text()) for path in files]
        self.wait()  # because XLA tries variants of kernels on the device

    def _lower(self, contenders: dict[str, Callable]) -> None:
        """Traces contenders in turns, and begins to compile their first traces."""
        programs = {}
        for turn in range(1 + self.options.traces):
            for name, fuse in contenders.items():
                for phase in PHASES:
                    seconds, traced = _timed(tracer(self.program, fuse, phase))
                    if turn == 0:
                        programs[name, phase] = traced
                        self.row[f"{name}_{phase}_first_trace_s"] = seconds
                    else:
                        self.row.setdefault(f"{name}_{phase}_trace_s", []).append(seconds)
        for (name, phase), traced in programs.items():
            begin = time.perf_counter()
            lowered = traced.lower()
            self.row[f"{name}_{phase}_lower_s"] = time.perf_counter() - begin
            self.futures.append((name, phase, self.pool.submit(_timed, lowered.compile)))

    def wait(self) -> None:
        """Waits for the compilations, and keeps what the compiled programs say of themselves."""
        for name, phase, future in self.futures:
            seconds, compiled = future.result()
            self.compiled[phase][name] = compiled
            self.row[f"{name}_{phase}_compile_s"] = seconds
            self.row[f"{name}_{phase}_temp_bytes"] = temp_bytes(compiled)
            if name != "plain":
                self.row[f"{name}_{phase}_kernels"] = found = kernels(compiled)
                self.row[f"{name}_{phase}_equal"] = not found
        self.futures = []

    def time(self) -> None:
        """Times all contenders twice, with the arguments in new memory."""
        measured = [times(self._calls(), self.options) for _ in range(2)]
        for name, phase in measured[0]:
            self.row[f"{name}_{phase}_ms"] = [ms[name, phase] for ms in measured]

    def _calls(self) -> dict[tuple[str, str], Callable]:
        """Puts the arguments on the device, and runs each program once, a step from one state."""
        device = jax.devices()[0]
        with _on_host():
            start = self.program.state()
        inputs, batch = jax.device_put((self.program.inputs, self.program.batch), device)
        state = None

        def step(compiled):
            nonlocal state
            state, value = compiled(state, *batch)
            return value

        found: dict[tuple[str, str], Callable] = {}
        for phase, programs in self.compiled.items():
            for name, compiled in programs.items():
                if phase == "forward":
                    call = functools.partial(compiled, *inputs)
                else:
                    state = jax.device_put(start, device, may_alias=False)  # a step donates it
                    call = functools.partial(step, compiled)
                seconds, value = _timed(lambda call=call: jax.block_until_ready(call()))
                parts = (self.row[f"{name}_{phase}_{part}_s"] for part in FIRST)
                self.row.setdefault(f"{name}_{phase}_first_call_s", seconds + sum(parts))
                if phase == "step":
                    self.row[f"{name}_loss"] = float(value)
                found[name, phase] = call
        return found


FIRST = ("first_trace", "lower", "compile")  # the parts of a first call before it runs


def _timed(call: Callable) -> tuple[float, Any]:
    """The seconds of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure(options: Any) -> Iterator[dict]:
    """The rows of programs. A row with a ``stage`` is of a program that it begins to work on."""
    softmax = jax.jit(fo.autofuse(jax.nn.softmax))  # the first trace builds the patterns
    yield {"first_trace_s": _timed(lambda: softmax.lower(jnp.ones((2, 2))))[0]}
    # One worker: of two compilations at once, XLA measures the variants of both badly.
    with ThreadPoolExecutor(1) as pool:
        left = [Prepared(name, options, pool) for name in options.only]
        while left:
            now, left = left[: options.together], left[options.together :]
            yield from _measured(now, left[: options.together], options)


def _measured(prepared: list[Prepared], later: Sequence[Prepared], options: Any) -> Iterator[dict]:
    """The rows of programs that are compiled at the same time, and timed one after the other.

    Meanwhile, those that come ``later`` are built.
    """

    def wait(one: Prepared) -> None:
        for other in later:
            with contextlib.suppress(Exception):  # it is built again when it is its turn
                other.build()
        one.wait()

    stages = [("building", Prepared.build), ("tracing", Prepared.compile), ("compiling", wait)]
    stages += [("timing", Prepared.time)]
    if options.tune:
        stages += [("tuning", Prepared.tune), ("timing", Prepared.time)]
    for place, (stage, work) in enumerate(stages):
        for one in list(prepared):
            yield one.row | {"stage": stage}
            try:
                with fo.use_implementation(options.implementation):
                    work(one)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
                one.row |= {"error": f"{stage}: {text}"}
            if place == len(stages) - 1 or "error" in one.row:
                yield one.row
                prepared.remove(one)  # frees its arrays


def times(calls: dict[Any, Callable], options: Any) -> dict[Any, float]:
    """Milliseconds of each call in steady state: medians of samples in turns of random order."""
    counts = {}
    for key, call in calls.items():
        jax.block_until_ready(call())
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken = time.perf_counter() - begin
        counts[key] = max(1, min(100, round(options.sample / taken)))
    samples: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(options.samples):
        for key in random.sample(list(calls), len(calls)):
            begin = time.perf_counter()
            for _ in range(counts[key]):
                result = calls[key]()
            jax.block_until_ready(result)
            samples[key].append((time.perf_counter() - begin) / counts[key] * 1e3)
    return {key: statistics.median(found) for key, found in samples.items()}


def check(name: str, implementation: str, dtype: Any = jnp.float32) -> dict:
    """The differences of ``autofuse`` from the plain program, of their values and gradients.

    Dropouts stay, because those of our ops drop other elements.
    """
    program = built(name, True, dtype)

    def values(fuse):
        found = {"forward": jax.jit(program.evaluation(fuse))(*program.inputs)}
        if program.update:
            found["step"] = jax.jit(program.step(fuse))(program.params, *program.batch)
        else:
            gradient = jax.value_and_grad(fuse(program.loss), has_aux=program.rest is not None)
            found["gradient"] = jax.jit(gradient)(*program.inputs)
        return found

    plain = values(lambda fn: fn)
    found: dict[str, Any] = {}
    with fo.use_implementation(implementation):
        ours = values(fo.autofuse)
        for phase, function in (
            ("forward", program.forward or program.loss),
            ("loss", program.loss),
        ):
            if function is not None:
                report = fo.autofuse.report(function)(*program.inputs)
                found[phase] = [r.pattern for r in report.replaced]
                found[f"{phase}_left"] = [f"{m.pattern}: {m.reason}" for m in report.missed]
    for phase, tree in plain.items():
        found[f"{phase}_difference"] = difference(tree, ours[phase])
    return found


def difference(want: Any, have: Any) -> float:
    """The largest difference of two trees, for each array over its norm, in shares of it.

    The difference of an array that has only rounding errors is divided by the largest norm.
    """
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(have), strict=True)
    floats = ((a, b) for a, b in pairs if jnp.issubdtype(a.dtype, jnp.floating))
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in floats]
    norms = [np.linalg.norm(a) for a, _ in pairs]
    least = 1e-3 * max(norms, default=0.0)
    ratios = [
        float(np.linalg.norm(a - b) / max(norm, least, 1e-30))
        for (a, b), norm in zip(pairs, norms, strict=True)
    ]
    return float("nan") if any(np.isnan(ratios)) else max(ratios, default=0.0)


def _text(call: Callable) -> str:
    try:
        return json.dumps(call())
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def _like(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)
