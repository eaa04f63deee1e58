"""Runs cases: our kernel, what `auto` picks and jax.nn, side by side, into one dict of results."""

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import jax
import jax.numpy as jnp

from benchmarks import environment, measure
from benchmarks.cases import Case, fo
from benchmarks.programs import PHASES, Contender, Operands, Program, contender, operands

CONTENDERS = ("native", "auto", "jax.nn")


def run(
    cases: Sequence[Case],
    rounds: int,
    clock: str = "auto",
    on_case: Callable[[int, Case], None] = lambda index, case: None,
) -> dict:
    """Measure every case: hardware, versions, the copy's bandwidth (B/s) and all raw numbers."""
    clock, timer = measure.clock(clock)
    copy = measure.copy_program()
    measured = []
    for index, case in enumerate(cases):
        on_case(index, case)
        measured.append(run_case(case, copy, timer, rounds))
    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "clock": clock,
        "rounds": rounds,
        "copy": {"bytes": 2 * copy.args[0].nbytes},
        "cases": measured,
    }
    add_floors(results)
    return results


def run_case(case: Case, copy: Program, timer: measure.Clock, rounds: int) -> dict:
    """The raw numbers of one case, and the copy's, which takes its turns among the programs."""
    with precision(case.dtype):
        data = operands(case)
        contenders, errors = {}, {}
        for name in CONTENDERS:
            try:
                contenders[name] = build(case, name, data)
            except Exception as error:  # a missing kernel must not lose the other cases
                errors[name] = f"{type(error).__name__}: {error}"
        if "jax.nn" in contenders:
            errors |= disagreements(contenders, case.dtype)
        timings, copying = _time(contenders, copy, timer, rounds)
    return {
        "op": case.op.name,
        "label": case.label,
        "shapes": [list(shape) for shape in case.shapes],
        "dtype": case.dtype,
        "elements": math.prod(case.shape),
        "bytes": {phase: getattr(case.traffic, phase) for phase in PHASES},
        "copy": copying,
        "results": {
            name: {
                "phases": timings[name],
                "saved_bytes": contenders[name].saved,
                "temp_bytes": contenders[name].programs["step"].temp_bytes,
            }
            for name in contenders
        },
        "errors": errors,
    }


def precision(dtype: str):
    """64-bit types for the cases that need them, and for no other."""
    return jax.enable_x64(True) if dtype == "float64" else nullcontext()


def build(case: Case, name: str, data: Operands, phases: Iterable[str] = PHASES) -> Contender:
    """The programs of one contender, "native", "auto" or "jax.nn"."""
    prefix = name.replace(".", "_")
    positions = case.op.differentiated
    if name == "jax.nn":
        return contender(case.op.reference, positions, data, prefix, phases)
    platform = environment.platform_name()
    if name == "native" and fo.info()["ops"][case.op.name].get(platform) != "native":
        raise RuntimeError(f"this installation has no kernel for {platform}")
    with fo.use_implementation(name):
        return contender(case.op.ours, positions, data, prefix, phases)


def disagreements(contenders: dict[str, Contender], dtype: str) -> dict[str, str]:
    """Which contenders compute something else than jax.nn: there a time means nothing."""
    expected = contenders["jax.nn"].programs["step"]()
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    found = {}
    for name in contenders.keys() - {"jax.nn"}:
        other = contenders[name]
        pairs = zip(other.programs["step"](), expected, strict=False)
        worst = max(_distance(ours, theirs) for ours, theirs in pairs)
        if not worst <= tolerance:
            found[name] = f"results differ from jax.nn by {worst:.1e} in norm"
    return found


def _distance(ours: jax.Array, theirs: jax.Array) -> float:
    wide = jnp.promote_types(theirs.dtype, jnp.float32)
    ours, theirs = ours.astype(wide), theirs.astype(wide)
    return float(jnp.linalg.norm((ours - theirs).ravel()) / (jnp.linalg.norm(theirs.ravel()) or 1))


def _time(contenders: dict[str, Contender], copy: Program, timer: measure.Clock, rounds: int):
    """{contender: {phase: numbers}} and the copy's numbers; one phase's turns are side by side."""
    keys = [(name, phase) for phase in PHASES for name in contenders]
    programs = [contenders[name].programs[phase] for name, phase in keys]
    *timings, copying = timer([*programs, copy], rounds)
    found: dict = {name: {} for name in contenders}
    for (name, phase), timing in zip(keys, timings, strict=True):
        found[name][phase] = timing.as_dict()
    return found, copying.as_dict()


def add_floors(results: dict) -> None:
    """Floors (µs), multiples of them and speed-ups over jax.nn, from the raw numbers.

    The floor is what the fewest bytes take at the speed of the copy that was timed with the case.
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
                if theirs:
                    numbers["speedup"] = theirs[phase]["median_us"] / numbers["median_us"]
    copy |= {"gbs": statistics.median(speeds), "min_gbs": min(speeds), "max_gbs": max(speeds)}
