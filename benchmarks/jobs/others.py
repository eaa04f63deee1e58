"""What does ``autofuse`` gain in programs that others wrote?

The programs are the list in ``benchmarks/others``: models of packages, and plain workloads. Each is
measured as a forward without a gradient and as a training step with its optimizer, in steady state:

``plain``     as it is
``autofuse``  with ``autofuse`` around the loss, or around the package's own step
``tune``      with ``autofuse(tune=True)``, by ``--tune``. ``tune_regions`` has the regions that no
              program before has: seconds of each phase, plain and with kernels

The contenders of a program run in turns, in random order. There are two measurements, the second
one after the other programs of the same group. A program whose compiled text has no kernel of this
package is marked ``equal``. A row is written as soon as it is known. ``--budget`` stops in time,
and ``--add`` goes on with what is missing in the file.

``--check`` measures nothing. It compares values and gradients at tiny sizes.
"""

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

from benchmarks import environment
from benchmarks.cases import fo
from benchmarks.others import PACKAGES, WORKLOADS
from benchmarks.others.program import BUILD, Program
from benchmarks.programs import kernels, temp_bytes
from benchmarks.report import Results

NAMES = [*PACKAGES, *WORKLOADS]
PHASES = ("forward", "step")


def options(add) -> None:
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="programs")
    add("--group", choices=("packages", "workloads"), help="one of the two lists")
    add("--tune", action="store_true", help="measure autofuse(tune=True) too")
    add("--budget", type=float, default=3600, metavar="S", help="start no programs after S seconds")
    add("--together", type=int, default=8, metavar="N", help="programs that are compiled together")
    add("--sample", type=float, default=0.05, metavar="S", help="seconds of one sample")
    add("--samples", type=int, default=5, metavar="N", help="samples of a measurement")
    add("--add", action="store_true", help="keep the rows of the file, and measure the others")
    add("--tiny", action="store_true", help="tiny sizes in float32, for a test")
    add("--check", action="store_true", help="compare values at tiny sizes")
    add("--dtype", default="bfloat16", help="the dtype in which programs compute")
    add("--implementation", default="auto", help="of our ops: auto, native or xla")


def run(options) -> None:
    names = [n for n in options.only if options.group is None or n in _group(options.group)]
    missing = [n for n in names if n in PACKAGES and not importlib.util.find_spec(PACKAGES[n][0])]
    for name in missing:
        print(f"left out: {name}, because {PACKAGES[name][0]} is not installed", flush=True)
    names = [name for name in names if name not in missing]
    if options.check:
        for name in names:
            print(name, _text(functools.partial(check, name, options.implementation)), flush=True)
        return
    begin = time.perf_counter()
    jax.jit(fo.autofuse(jax.nn.softmax)).lower(jnp.ones((2, 2)))  # builds the patterns
    facts = {"missing": missing, "first_trace_s": time.perf_counter() - begin}
    results = Results(options.out, "others", **facts)
    if options.add and results.path.exists():
        results["rows"] = json.loads(results.path.read_text())["rows"]
        known = {row["program"] for row in results["rows"]}
        names = [name for name in names if name not in known]
    begin = time.perf_counter()
    for first in range(0, len(names), options.together):
        group = names[first : first + options.together]
        if time.perf_counter() - begin > options.budget:
            print(f"no time for {', '.join(names[first:])}", flush=True)
            break
        for row in measure(group, options):
            print(json.dumps(row), flush=True)
            results.add("rows", row)
    results.end()


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
def _cache(contender: str) -> Iterator[Path]:
    """The folder of a cache of measurements that only this contender reads."""
    decisions = importlib.import_module("jax_fastops.autofuse._decisions")
    folder = os.path.join(tempfile.gettempdir(), f"fastops-others-{os.getpid()}-{contender}")
    before = os.environ.get("JAX_FASTOPS_CACHE")
    os.environ["JAX_FASTOPS_CACHE"] = folder
    decisions.clear()
    try:
        yield Path(folder)
    finally:
        decisions.clear()
        os.environ.pop("JAX_FASTOPS_CACHE")
        if before is not None:
            os.environ["JAX_FASTOPS_CACHE"] = before


class Prepared:
    """The compiled forwards and steps of a program."""

    def __init__(self, name: str, options: Any):
        self.row: dict[str, Any] = {"program": name, "commit": environment.commit()}
        self.compiled: dict[str, dict[str, Any]] = {phase: {} for phase in PHASES}
        self.futures: list[tuple[str, str, Future]] = []
        dtype = jnp.float32 if options.tiny else jnp.dtype(options.dtype).type
        begin = time.perf_counter()
        self.program = built(name, options.tiny, dtype)
        self.row["build_s"] = time.perf_counter() - begin

    def lower(self, name: str, fuse: Callable, pool: ThreadPoolExecutor, wait=False) -> None:
        """Traces both phases of a contender, and begins to compile them, or compiles each."""
        inputs, batch = _like(self.program.inputs), _like(self.program.batch)
        for phase in PHASES:
            function = getattr(self.program, "evaluation" if phase == "forward" else phase)(fuse)
            state = () if phase == "forward" else (jax.eval_shape(self.program.state),)
            args = inputs if phase == "forward" else (*state, *batch)
            donated = () if phase == "forward" else (0,)
            begin = time.perf_counter()
            traced = jax.jit(function, donate_argnums=donated).trace(*args)
            self.row[f"{name}_{phase}_trace_s"] = time.perf_counter() - begin
            self.futures.append((name, phase, pool.submit(traced.lower().compile)))
            if wait:
                self.wait()

    def wait(self) -> None:
        """Waits for the compilations, and keeps what the compiled programs say of themselves."""
        for name, phase, future in self.futures:
            compiled = self.compiled[phase][name] = future.result()
            self.row[f"{name}_{phase}_temp_bytes"] = temp_bytes(compiled)
            if name != "plain":
                self.row[f"{name}_{phase}_kernels"] = found = kernels(compiled)
                self.row[f"{name}_{phase}_equal"] = not found
        self.futures = []

    def place(self) -> None:
        """Puts the arguments on the device, and runs each step once from the same state."""
        device = jax.devices()[0]
        with _on_host():
            start = self.program.state()
        self.inputs, self.batch = jax.device_put((self.program.inputs, self.program.batch), device)
        for name, step in self.compiled["step"].items():
            given = jax.device_put(start, device, may_alias=False)  # a step donates it
            self.state, value = step(given, *self.batch)
            self.row[f"{name}_loss"] = float(value)

    def calls(self) -> dict[tuple[str, str], Callable]:
        def step(compiled):
            self.state, value = compiled(self.state, *self.batch)
            return value

        found: dict[tuple[str, str], Callable] = {}
        for name, compiled in self.compiled["forward"].items():
            found[name, "forward"] = functools.partial(compiled, *self.inputs)
        for name, compiled in self.compiled["step"].items():
            found[name, "step"] = functools.partial(step, compiled)
        return found

    def free(self) -> None:
        self.inputs = self.batch = self.state = None


def measure(names: Sequence[str], options: Any) -> Iterator[dict]:
    """The rows of some programs, which are compiled at the same time, and measured in turn."""
    rows: dict[str, dict] = {name: {"program": name} for name in names}
    prepared: dict[str, Prepared] = {}

    @contextlib.contextmanager
    def errors(name):
        """Keeps the error of a program, so that the others are measured."""
        try:
            with fo.use_implementation(options.implementation):
                yield
        except Exception as error:
            rows[name] |= {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            prepared.pop(name, None)

    def each() -> list[tuple[str, Prepared]]:
        return list(prepared.items())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = {name: pool.submit(Prepared, name, options) for name in names}
        for name in names:
            with errors(name):
                prepared[name] = one = builds[name].result()
                rows[name] = one.row
                for who, fuse in fuses(one.program, False).items():
                    with _cache(who):
                        one.lower(who, fuse, pool)
        for name, one in each():
            with errors(name):
                one.wait()
        # Tuning measures, so nothing else may run.
        for name, one in each() if options.tune else ():
            with errors(name):
                begin = time.perf_counter()
                with _cache("tune") as folder:
                    known = set(folder.glob("*.json"))
                    one.lower("tune", fuses(one.program, True)["tune"], pool, wait=True)
                    new = set(folder.glob("*.json")) - known
                    one.row["tune_regions"] = [json.loads(p.read_text()) for p in sorted(new)]
                one.row["tune_s"] = time.perf_counter() - begin
    for _ in range(2):
        for name, one in each():
            with errors(name):
                one.place()
                found = times(one.calls(), options)
                one.free()
                for (who, phase), ms in found.items():
                    one.row.setdefault(f"{who}_{phase}_ms", []).append(ms)
    for name in names:
        yield rows[name]


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
