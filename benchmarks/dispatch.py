"""Fits the decision trees by which `auto` chooses, to a sweep of random calls.

    python -m benchmarks.dispatch softmax norm    # measure, fit, write the table, check
    python -m benchmarks.dispatch --check         # only check, with another seed

The sweep measures kernel and reference of random calls, forward and step. Each entry of the table
and each dtype gets a tree. It divides the calls by their features, and takes the kernel where it
gains. The check measures `auto` and `jax.nn` on calls of another seed. Its results are in
``benchmarks/results/dispatch-<device>.json``: the calls in which `auto` is slower come first.
"""

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from benchmarks import RESULTS, ROOT, environment, measure
from benchmarks.cases import Case, Op, fo, select_ops
from benchmarks.programs import operands
from benchmarks.run import build, precision
from benchmarks.shapes import draw

TABLE = ROOT / "jax_fastops" / "auto_table.json"
PHASES = {"forward": "forward", "grad": "step"}
# A gain below this does not count: two runs of the same program can differ by so much.
MARGIN = 0.02
LOSS = 8  # how much worse a loss is than a gain of the same size
LEAST = 4  # calls in a leaf
DEPTH = 5
# Choices that an op measured by itself does not show. In a model, XLA recomputes a norm inside the
# next norms: in BERT's inference the kernel gains, although it loses when measured by itself
# (docs/dev/log/models.md).
BY_HAND = {
    ("residual_layer_norm", "cuda", dtype): {"forward": ["bytes", 2**23, False, True]}
    for dtype in ("bfloat16", "float16")
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    add = parser.add_argument
    add("ops", nargs="*", help="these ops or families (default: all)")
    add("--count", type=int, default=120, help="random calls of each op")
    add("--seed", type=int, default=0)
    add("--largest", type=int, help="elements (default: 2**26 on a GPU, 2**22 on a CPU)")
    add("--rounds", type=int, default=7)
    add("--check", action="store_true", help="only check the table, with the next seed")
    add("--checks", type=int, default=100, help="random calls of each family in the check")
    add("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    cpu = environment.platform_name() == "cpu"
    options.largest = options.largest or (2**22 if cpu else 2**26)
    ops = [op for op in select_ops(options.ops or None) if not op.name.endswith("_from_result")]
    if not options.check:
        for family in dict.fromkeys(op.family for op in ops):
            fit_table([op for op in ops if op.family == family], options)
    fo._dispatch.table = lambda: json.loads(options.table.read_text())  # not the installed one
    check(ops, options)


# ---- measuring -----------------------------------------------------------------------------------


def calls(op: Op, count: int, seed: int, largest: int) -> list[Case]:
    """Random calls of an op; the same ones for the same seed."""
    rng = random.Random(f"{op.name} {seed}")
    layouts = (draw(rng, op, largest) for _ in range(count))
    return [Case(op, layout, "gpu", layout.dtypes[0]) for layout in layouts]


def ratios(cases: Sequence[Case], ours: str, theirs: str, options) -> list[dict[str, float]]:
    """Time of one contender over that of another, by use, for each case.

    The fastest calls are compared, because other work on the machine can only slow a call down.
    Small programs take more turns, because their times vary more.
    """
    _, timer = measure.clock()
    found: list[dict[str, float]] = []
    for at in range(0, len(cases), 16):  # as many as fit in memory
        batch = cases[at : at + 16]
        with ThreadPoolExecutor() as pool:
            built = list(pool.map(lambda case: _built(case, (ours, theirs)), batch))
        programs = [program for sides in built for side in sides for program in side]
        fastest = {}
        for small in (True, False):
            alike = [p for p in programs if (p.nbytes < measure.SMALL) == small]
            with jax.enable_x64(True):
                timings = timer(alike, options.rounds * (4 if small else 1)) if alike else []
            fastest |= {id(p): t.fastest for p, t in zip(alike, timings, strict=True)}
        for sides in built:
            mine, other = ([fastest[id(program)] for program in side] for side in sides)
            each = [a / b for a, b in zip(mine, other, strict=True)]
            found.append({"forward": each[0], "grad": each[-1]})
        jax.clear_caches()  # thousands of programs do not fit in memory
    return found


def _built(case: Case, names: Sequence[str]):
    phases = [p for p in dict.fromkeys(PHASES.values()) if p in case.phases]
    with precision(case.dtype):
        data = operands(case)
        return [[*build(case, name, data, phases).programs.values()] for name in names]


def request(case: Case):
    """What the decision for a call depends on."""
    seen: list = []
    decide = fo._dispatch.decide

    def noted(kernels, request, platform):
        seen.append(request)
        return decide(kernels, request, platform)

    fo._dispatch.decide = noted
    try:
        with precision(case.dtype):
            pairs = zip(case.shapes, case.operand_dtypes, strict=True)
            arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs]
            jax.eval_shape(lambda *xs: case.op.ours(*xs, **case.layout.options), *arrays)
    finally:
        fo._dispatch.decide = decide
    return seen[0]


# ---- fitting -------------------------------------------------------------------------------------


def fit_table(ops: Sequence[Op], options) -> None:
    """Measures the ops of a family, and writes their trees for this device."""
    samples: dict[tuple[str, str], list] = {}
    for op in ops:
        cases = calls(op, options.count, options.seed, options.largest)
        print(f"{op.name}: {len(cases)} calls", flush=True)
        gain = {"forward": max(MARGIN, op.lone_gain), "grad": MARGIN}
        if op.fuses:
            gain["forward"] = math.inf  # XLA fuses such a forward in most programs
        for case, found in zip(cases, ratios(cases, "native", "jax.nn", options), strict=True):
            asked = request(case)
            if asked.limit is None:
                samples.setdefault((asked.entry, asked.dtype), []).append((asked, found, gain))
    everything = json.loads(options.table.read_text())
    device = _device(everything)
    for (entry, dtype), measured in sorted(samples.items()):
        trees = {}
        for use in PHASES:
            values = [
                (dict(asked.features), math.log(found[use]) + gain[use])
                for asked, found, gain in measured
                if gain[use] < math.inf
            ]
            trees[use] = tree(values) if values else False
        trees |= BY_HAND.get((entry, environment.platform_name(), dtype), {})
        device["entries"].setdefault(entry, {})[dtype] = trees
        if dtype == "bfloat16":  # the kernels of float16 move as many bytes
            device["entries"][entry].setdefault("float16", trees)
        print(f"{entry} {dtype}: {len(measured)} calls, {trees}", flush=True)
    others = [known for known in everything if known["name"] != device["name"]]
    options.table.write_text(text([*others, device]))


def _device(table: list[dict]) -> dict:
    """This device's part of the table. A new device begins with that of the nearest one."""
    platform = environment.platform_name()
    name, capability, bandwidth = fo._native.device(platform)
    if platform == "cpu":
        name = f"{environment.cpu_model()}, {environment.hardware()['cores']} cores"
    known = [device for device in table if device["platform"] == platform]
    entries = fo._dispatch.nearest(known, platform)["entries"] if known else {}
    return {
        "platform": platform,
        "name": name,
        "compute_capability": capability,
        "bandwidth": bandwidth,
        "entries": entries,
    }


def tree(values: list[tuple[dict[str, int], float]]):
    """The decision tree for calls with these features.

    With the features of a call comes the logarithm of the kernel's time, in units of the
    reference's. Splits are chosen as in a regression tree. They stay if the choices in their leaves
    cost less than one choice for all.
    """
    return _grown(values, DEPTH)[0]


def _grown(values, depth: int):
    """A tree, and the cost of its choices."""
    single = _cost(values)
    split = _best_split(values) if depth else None
    if split is not None:
        name, bound = split
        sides = [
            _grown([v for v in values if (v[0][name] < bound) == less], depth - 1)
            for less in (True, False)
        ]
        (below, rest), costs = zip(*sides, strict=True)
        if below != rest and sum(costs) < single - 0.05:
            return [name, bound, below, rest], sum(costs)
    return single < 0, single


def _cost(values) -> float:
    """The cost of the better choice: the kernel costs the sum of its logarithms, of which a loss
    counts ``LOSS`` times, and the reference costs nothing."""
    return min(0.0, sum(value * (LOSS if value > MARGIN else 1) for _, value in values))


def _best_split(values) -> tuple[str, int] | None:
    """The feature and the bound that leave the least variance."""
    best, split = math.inf, None
    for name in sorted(values[0][0]):
        ordered = sorted(values, key=lambda v: v[0][name])
        for (low, _), (high, _) in itertools.pairwise(ordered):
            if low[name] == high[name]:
                continue
            bound = _round(low[name], high[name])
            sides = [[v for f, v in ordered if (f[name] < bound) == less] for less in (True, False)]
            if min(map(len, sides)) < LEAST:
                continue
            left = sum(statistics.pvariance(side) * len(side) for side in sides)
            if left < best:
                best, split = left, (name, bound)
    return split


def _round(low: int, high: int) -> int:
    """A bound above ``low`` and up to ``high``: a power of two if there is one between them."""
    power = 2 ** (high.bit_length() - 1)
    return power if low < power <= high else high


def text(devices: list[dict]) -> str:
    """The table as JSON, with a line for each entry and dtype."""
    parts = []
    for device in devices:
        head = json.dumps({key: value for key, value in device.items() if key != "entries"})
        entries = []
        for name, dtypes in sorted(device["entries"].items()):
            lines = (f"        {json.dumps(d)}: {json.dumps(t)}" for d, t in sorted(dtypes.items()))
            entries.append(f"      {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n      }")
        body = ",\n".join(entries)
        parts.append(f'  {{\n    {head[1:-1]},\n    "entries": {{\n{body}\n    }}\n  }}')
    return "[\n" + ",\n".join(parts) + "\n]\n"


# ---- checking ------------------------------------------------------------------------------------


def check(ops: Sequence[Op], options) -> None:
    """Measures `auto` on calls of another seed, prints the worst, and writes all results."""
    rows = []
    families = {op.family for op in ops}
    for op in ops:
        share = sum(other.family == op.family for other in ops)
        cases = calls(op, -(-options.checks // share), options.seed + 1, options.largest)
        print(f"{op.name}: {len(cases)} calls to check", flush=True)
        for case, found in zip(cases, ratios(cases, "auto", "jax.nn", options), strict=True):
            rows.append({"call": case.name, "family": op.family, **found})
    worst = sorted(rows, key=lambda row: -max(row["forward"], row["grad"]))
    for row in worst[:20]:
        print(f"{row['forward']:.2f} forward, {row['grad']:.2f} step: {row['call']}")
    summary = {}
    for family in sorted(families):
        mine = [row for row in rows if row["family"] == family]
        summary[family] = {
            "calls": len(mine),
            "forward": _mean(1 / row["forward"] for row in mine),
            "step": _mean(1 / row["grad"] for row in mine),
            "slower by 3%": sum(max(row["forward"], row["grad"]) > 1.03 for row in mine),
        }
        print(family, summary[family])
    results = {
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "seed": options.seed + 1,
        "families": summary,
        "calls": worst,
    }
    path = RESULTS / f"dispatch-{environment.slug(results)}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")


def _mean(values) -> float:
    return statistics.geometric_mean(values)


if __name__ == "__main__":
    main()
