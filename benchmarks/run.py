"""Runs cases and collects the results in one dict.

The contenders of a case are the kernel, the choice of `auto`, the functions of JAX and, if asked
for, those of PyTorch.
"""

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import environment, measure, pytorch
from benchmarks.cases import Case, fo
from benchmarks.programs import Contender, Operands, Program, contender, operands

CONTENDERS = ("native", "auto", "jax.nn")  # the last is jax.numpy where jax.nn has no equivalent
WIDE = ("float64", "complex128")


def run(
    cases: Sequence[Case],
    rounds: int,
    clock: str = "auto",
    on_case: Callable[[int, Case], None] = lambda index, case: None,
    torch: bool = False,
) -> dict:
    """Measure every case; the result has hardware, versions, the copy's speed and all numbers."""
    clock, timer = measure.clock(clock)
    copy = measure.copy_program()
    measured = []
    for index, case in enumerate(cases):
        on_case(index, case)
        measured.append(run_case(case, copy, timer, rounds, torch))
        if torch:
            pytorch.release()
    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": environment.hardware(),
        "versions": environment.versions(*(["torch"] if torch else [])),
        "clock": clock,
        "rounds": rounds,
        "copy": {"bytes": 2 * copy.args[0].nbytes},
        "cases": measured,
    }
    add_floors(results)
    return results


def run_case(
    case: Case, copy: Program, timer: measure.Clock, rounds: int, torch: bool = False
) -> dict:
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
        "bytes": {phase: getattr(case.traffic, phase) for phase in case.phases},
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
    with fo.use_implementation(name):
        return contender(ours, case.differentiated, data, prefix, phases)


def disagreements(contenders: dict[str, Contender], case: Case) -> dict[str, str]:
    """The contenders whose results differ from those of jax.nn: their times mean nothing.

    Compares the results, and the gradients if there are some. They must be equal for an op that
    only moves elements, and otherwise differ by a few units of rounding or by the op's slack at
    most.
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


def _time(
    contenders: dict[str, Contender],
    phases: Iterable[str],
    copy: Program,
    timer: measure.Clock,
    rounds: int,
):
    """{contender: {phase: numbers}}, and the numbers of the copy."""
    keys = [
        (name, phase)
        for phase in phases
        for name in contenders
        if phase in contenders[name].programs
    ]
    programs = [contenders[name].programs[phase] for name, phase in keys]
    *timings, copying = timer([*programs, copy], rounds)
    found: dict = {name: {} for name in contenders}
    for (name, phase), timing in zip(keys, timings, strict=True):
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
