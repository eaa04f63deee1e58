"""Measures every op on the device that JAX has, shows a table, and writes JSON.

The contenders of a case are the kernel, the choice of `auto`, the functions of JAX and, if asked
for, those of PyTorch.
"""

import datetime
import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import environment, measure, pytorch, report
from benchmarks.cases import Case, cases, fo, select_ops
from benchmarks.programs import Contender, Operands, Program, contender, operands
from benchmarks.tables import cases_table

CONTENDERS = ("native", "auto", "jax.nn")  # the last is jax.numpy where jax.nn has no equivalent
WIDE = ("float64", "complex128")


def options(add) -> None:
    add("--ops", nargs="+", metavar="OP", help="these ops or families of ops (default: all)")
    add("--dtypes", nargs="+", metavar="DTYPE", help="these dtypes (default: all)")
    add("--filter", default="", metavar="TEXT", help="cases whose name contains TEXT")
    add("--scale", choices=("gpu", "cpu"), help="sizes (default: those of the platform)")
    add("--quick", action="store_true", help="few rounds, float32 and bfloat16, sizes of a CPU")
    add("--torch", action="store_true", help="PyTorch too, on a GPU where it is installed")
    measure.options(add, None, help="rounds (default: 25; with --quick, 5)")


def run(options) -> None:
    """Run the cases, show them, and write ``<device>-<family>.json``."""
    if options.torch:
        pytorch.share_gpu()
    cpu = options.quick or environment.platform_name() == "cpu"
    dtypes = options.dtypes or (["float32", "bfloat16"] if options.quick else None)
    scale = options.scale or ("cpu" if cpu else "gpu")
    chosen = list(cases(scale, select_ops(options.ops), dtypes, options.filter))
    if not chosen:
        raise SystemExit("no case fits these options")
    if options.torch and (reason := pytorch.unavailable()):
        print(f"no columns of PyTorch: {reason}")
        options.torch = False
    rounds = options.repeats or (5 if options.quick else 25)
    results = measured(chosen, rounds, options.clock, options.torch)
    header, rows = cases_table(results)
    print(f"{report.headline(results)}\n\n{fo._tables.text([header, *rows], 10_000)}")
    for case in results["cases"]:
        for name, error in case["errors"].items():
            print(f"{case['op']} {case['label']} {case['dtype']}, {name}: {error}")
    for family in dict.fromkeys(case["family"] for case in results["cases"]):
        mine = [case for case in results["cases"] if case["family"] == family]
        path = options.out / f"{environment.slug(results)}-{family}.json"
        report.write(path, results | {"cases": mine})
        print(f"wrote {path}")


def measured(cases: Sequence[Case], rounds: int, clock: str, torch: bool = False) -> dict:
    """Measure every case; the result has hardware, versions, the copy's speed and all numbers."""
    clock, timer = measure.clock(clock)
    copy = measure.copy_program()
    found = []
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case.name}", flush=True)
        found.append(run_case(case, copy, timer, rounds, torch))
        if torch:
            pytorch.release()
    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **environment.facts(*(["torch"] if torch else [])),
        "clock": clock,
        "rounds": rounds,
        "copy": {"bytes": 2 * copy.args[0].nbytes},
        "cases": found,
    }
    add_floors(results)
    return results


def run_case(case: Case, copy: Program, timer, rounds: int, torch: bool = False) -> dict:
    """The raw numbers of one case, and of the copy, which takes its turns among the programs."""
    with precision(case.dtype):
        data = operands(case)
        contenders, errors = {}, {}
        for name in CONTENDERS + (pytorch.CONTENDERS if torch and case.op.torch else ()):
            try:
                contenders[name] = build(case, name, data)
            except Exception as error:  # an error in one contender must not lose the other results
                errors[name] = f"{type(error).__name__}: {error}"
        if "jax.nn" in contenders:
            errors |= disagreements(contenders, case)
        timings, copying = _time(contenders, case.phases, copy, timer, rounds)
    return {
        "op": case.op.name,
        "family": case.op.family,
        "label": case.layout.label,
        "options": dict(case.layout.options),
        "shapes": [list(shape) for shape in case.shapes],
        "dtype": case.dtype,
        "elements": math.prod(case.shapes[0]),
        "bytes": traffic(case, data, contenders),
        "copy": copying,
        "results": {
            name: {
                "phases": timings[name],
                "saved_bytes": contenders[name].saved,
                "temp_bytes": contenders[name].programs[case.phases[-1]].temp_bytes,
            }
            for name in contenders
        },
        "errors": errors,
    }


def traffic(case: Case, data: Operands, contenders: dict[str, Contender]) -> dict[str, int]:
    """The fewest bytes that each phase must move: the floor, if divided by a copy's speed.

    Operands are read, and results, residuals that are neither, and distinct gradients are written
    once. The backward reads the residuals and the cotangents. The residuals are those that the op
    declares. A test compares these bytes with those of committed results.

    If the op reads twice, what registers, shared memory and L2 still hold in the second pass is not
    deducted. So an array that mostly fits there may be faster than the floor.
    """
    passes, inputs = case.op.passes, sum(array.nbytes for array in data.args)
    inputs += (passes - 1) * data.args[0].nbytes
    found = {"forward": inputs + data.result_bytes}
    ours = contenders.get("native") or next(iter(contenders.values()))
    if saved := ours.saved:
        new = saved["total"] - saved["operands"] - saved["results"]
        read = data.result_bytes + round(saved["total"] * (1 - case.op.unread))
        written = sum(array.nbytes for array in ours.programs["backward"].outputs)
        found |= {"forward_saving": found["forward"] + new, "backward": passes * read + written}
        found["step"] = found["forward_saving"] + found["backward"]
    return {phase: found[phase] for phase in case.phases}


def precision(dtype: str):
    """A context in which 64-bit types are enabled if ``dtype`` needs them."""
    return jax.enable_x64(True) if dtype in WIDE else nullcontext()


def build(case: Case, name: str, data: Operands, phases: Iterable[str] | None = None) -> Contender:
    """The programs of one contender, from `CONTENDERS` or `pytorch.CONTENDERS`."""
    phases = case.phases if phases is None else phases
    if name in pytorch.CONTENDERS:
        return pytorch.contender(case, name, data, phases)
    prefix = name.replace(".", "_")
    ours, reference = (
        partial(function, **case.layout.options) for function in (case.op.ours, case.op.reference)
    )
    if name == "jax.nn":
        return contender(reference, case.differentiated, data, prefix, phases)
    platform = environment.platform_name()
    kernels = fo.info()["ops"][case.op.kernel_of or case.op.name]
    if name == "native" and kernels.get(platform) != "native":
        raise RuntimeError(f"this installation has no kernel for {platform}")
    if name == "xla" and case.op.composed:
        ours, name = partial(case.op.composed, **case.layout.options), "auto"
    with fo.use_implementation(name):
        return contender(ours, case.differentiated, data, prefix, phases)


def disagreements(contenders: dict[str, Contender], case: Case) -> dict[str, str]:
    """The contenders whose results differ from those of jax.nn: their times mean nothing.

    Results and gradients must be equal for an op that only moves elements. Otherwise, they may
    differ by a few units of rounding, or by the op's slack.
    """
    phases = ("step",) if "step" in case.phases else case.phases

    def results(name: str) -> list:
        programs = contenders[name].programs
        return [array for phase in phases for array in programs[phase].results()]

    expected = results("jax.nn")
    found = {}
    for name in contenders.keys() - {"jax.nn"}:
        pairs = list(zip(results(name), expected, strict=False))
        if case.op.exact or not jnp.issubdtype(case.dtype, jnp.inexact):
            if not all(_equal(ours, theirs) for ours, theirs in pairs):
                found[name] = "results differ from jax.nn"
            continue
        worst = max(_distance(ours, theirs) for ours, theirs in pairs)
        if not worst <= max(8 * float(jnp.finfo(case.dtype).eps), case.op.slack):
            found[name] = f"results differ from jax.nn by {worst:.1e} in norm"
    return found


@jax.jit  # one program, without temporaries of the operands' size
def _equal(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    return jnp.array_equal(ours, theirs)


def _distance(ours: jax.Array, theirs: jax.Array) -> float:
    wide = jnp.promote_types(theirs.dtype, jnp.float32)
    ours, theirs = ours.astype(wide), theirs.astype(wide)
    return float(jnp.linalg.norm((ours - theirs).ravel()) / (jnp.linalg.norm(theirs.ravel()) or 1))


def _time(contenders: dict[str, Contender], phases, copy: Program, timer, rounds: int):
    """{contender: {phase: numbers}}, and the numbers of the copy."""
    pairs = [(n, p) for p in phases for n, c in contenders.items() if p in c.programs]
    programs = [contenders[name].programs[phase] for name, phase in pairs]
    *timings, copying = timer([*programs, copy], rounds)
    found: dict = {name: {} for name in contenders}
    for (name, phase), timing in zip(pairs, timings, strict=True):
        found[name][phase] = timing.as_dict()
    return found, copying.as_dict()


def add_floors(results: dict) -> None:
    """Add floors (µs), multiples of them and speed-ups over jax.nn, from the raw numbers.

    The floor is the time of the fewest bytes at the speed of the copy that was timed with the case.
    """
    copy, speeds = results["copy"], []
    for case in results["cases"]:
        rate = copy["bytes"] / case["copy"]["median_us"]  # bytes per µs
        speeds.append(rate / 1e3)
        case["floor_us"] = {phase: count / rate for phase, count in case["bytes"].items()}
        theirs = case["results"].get("jax.nn", {}).get("phases")
        for entry in case["results"].values():
            for phase, numbers in entry["phases"].items():
                numbers["of_floor"] = numbers["median_us"] / case["floor_us"][phase]
                if theirs and phase in theirs:
                    numbers["speedup"] = theirs[phase]["median_us"] / numbers["median_us"]
    copy |= {"gbs": statistics.median(speeds), "min_gbs": min(speeds), "max_gbs": max(speeds)}
