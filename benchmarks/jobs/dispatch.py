"""Proposes conditions for the table of `auto`, from a sweep of random calls, and checks the table.

    python -m benchmarks dispatch softmax norm    # measure, propose, check
    python -m benchmarks dispatch --check         # only check, with another seed

The sweep measures kernel, reference and `jax.nn` on random calls, forward and step. For each entry
of the table it prints conditions, which divide the calls by their features and their dtype, and
take the kernel where it is faster than the reference. The check measures `auto` and `jax.nn` on
calls of another seed. Its results are in ``benchmarks/results/dispatch-<device>.json``: the calls
in which `auto` is slower come first.
"""

import collections
import dataclasses
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks import environment, measure
from benchmarks.cases import OPS, Case, Op, fo, select_ops
from benchmarks.jobs.ops import build, precision
from benchmarks.programs import operands
from benchmarks.report import Results
from benchmarks.shapes import draw

Request = fo._dispatch.Request
BY_NAME = {op.name: op for op in OPS}
CONTENDERS = ("native", "xla", "jax.nn")
PHASES = {"forward": "forward", "grad": "step"}
# A gain below this does not count: two runs of the same program can differ by so much.
MARGIN = 0.02
LOSS = 8  # how much worse a loss is than a gain of the same size
LEAST = 10  # calls in a leaf
DEPTH = 2  # levels of a tree: more predict other calls no better (docs/dev/log/common.md)
BATCH = 16  # calls that a process measures before it takes others
# Bytes of operands that a process has in memory at once. Outputs take about 12 times as much, and a
# process keeps the most that it ever had.
MEMORY = 2**29
# A tree divides dtypes in this order.
ORDER = ("bool", "int8", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def options(add) -> None:
    add("ops", nargs="*", help="these ops or families (default: all)")
    add("--count", type=int, default=120, help="random calls of each op")
    add("--seed", type=int, default=0)
    add("--largest", type=int, help="elements (default: 2**25 on a GPU, 2**22 on a CPU)")
    add("--rounds", type=int, default=7)
    add("--check", action="store_true", help="only check the table, with the next seed")
    add("--checks", type=int, default=100, help="random calls of each family in the check; 0: none")
    add("--samples", type=Path, help="keeps the samples; those that it has are not measured again")
    add("--jobs", type=int, help="processes that compile (default: half of the cores; 1 on a CPU)")


def run(options) -> None:
    cpu = environment.platform_name() == "cpu"
    options.largest = options.largest or (2**22 if cpu else 2**25)
    options.jobs = options.jobs or (1 if cpu else max(1, (os.cpu_count() or 1) // 2))
    ops = [op for op in select_ops(options.ops) if op.fitted and op.name != "relu_from_result"]
    if not options.check:
        print("\n".join(propose(_samples(ops, options))))
    if options.checks:
        check(ops, options)


class Sample(NamedTuple):
    """A call, what its decision depends on, and the seconds of each contender by use.

    ``same`` are the uses in which the last two contenders have the same program.
    """

    op: str
    call: str
    request: Request
    seconds: dict[str, dict[str, float]]
    same: Sequence[str] = ()

    def ratio(self, ours: str, theirs: str, use: str) -> float:
        return self.seconds[ours][use] / self.seconds[theirs][use]


def _samples(ops: Sequence[Op], options) -> list[Sample]:
    """The samples for a fit. Those that are in the file already are not measured again."""
    if not options.samples:
        return list(sweep(ops, options.count, options.seed, CONTENDERS, options))
    lines = options.samples.read_text().splitlines() if options.samples.exists() else []
    found = []
    for kept in map(json.loads, lines):
        features = tuple(map(tuple, kept["request"]["features"]))
        asked = Request(**kept["request"] | {"features": features})
        found.append(Sample(**kept | {"request": asked}))
    done = collections.Counter(sample.op for sample in found)
    with options.samples.open("a") as file:
        for sample in sweep(ops, options.count, options.seed, CONTENDERS, options, done):
            found.append(sample)
            plain = sample._asdict() | {"request": dataclasses.asdict(sample.request)}
            print(json.dumps(plain), file=file, flush=True)
    return found


def sweep(ops: Sequence[Op], count: int, seed: int, contenders, options, done=None):
    """The samples of random calls: ``count`` of each op, or of each family if `auto` contends.

    Of each op, the first ``done`` ones are left out.
    """
    tasks = []
    for op in ops:
        share = sum(other.family == op.family for other in ops) if "auto" in contenders else 1
        total = -(-count // share)
        starts = range((done or {}).get(op.name, 0), total, BATCH)
        tasks += [(op.name, at, min(BATCH, total - at)) for at in starts]
    return _run(tasks, contenders, seed, options)


def _run(tasks: Sequence[tuple[str, int, int]], contenders, seed: int, options) -> Iterator[Sample]:
    """Measures tasks: an op, the number of its first call, and how many calls.

    Several processes compile at the same time. While one measures, the others do not use the
    device.
    """
    measured = partial(_measured, contenders, seed, options.largest, options.rounds)
    with tempfile.NamedTemporaryFile() as device:
        if options.jobs == 1:
            _share(device.name, threading.Lock())
            yield from _flat(map(measured, tasks))
            return
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        spawn = multiprocessing.get_context("spawn")
        shared = device.name, spawn.Lock()
        with ProcessPoolExecutor(options.jobs, spawn, _share, shared) as pool:
            yield from _flat(pool.map(measured, tasks))


def _flat(batches) -> Iterator[Sample]:
    for family, mine in itertools.groupby(batches, lambda batch: BY_NAME[batch[0].op].family):
        yield from itertools.chain.from_iterable(mine)
        print(f"{family} measured", flush=True)


def _share(path: str, gate) -> None:
    """Tells a process the file that stands for the device, and the gate to it."""
    global _device_file, _gate
    _device_file, _gate = open(path), gate


@contextmanager
def _using_device(how: int):
    """Use of the device by this process only (``LOCK_EX``), or by others as well (``LOCK_SH``).

    Who waits for exclusive use holds the gate, so that no other process begins to use the device.
    """
    _gate.acquire()
    fcntl.flock(_device_file, how)
    if how == fcntl.LOCK_SH:
        _gate.release()
    try:
        yield
    finally:
        fcntl.flock(_device_file, fcntl.LOCK_UN)
        if how == fcntl.LOCK_EX:
            _gate.release()


def _measured(contenders, seed: int, largest: int, rounds: int, task) -> list[Sample]:
    """A batch of random calls of an op."""
    name, at, count = task
    cases = calls(BY_NAME[name], at + count, seed, largest)[at:]
    found = []
    for mine in _parts(cases):
        for case, measured in zip(mine, times(mine, contenders, rounds), strict=True):
            found.append(Sample(name, case.name, request(case), *measured))
        jax.clear_caches()  # thousands of programs do not fit in memory
    return found


def _parts(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Divides calls so that the operands of each part have at most ``MEMORY`` bytes."""
    part, size = [], 0
    for case in cases:
        mine = sum(math.prod(x.shape) * x.dtype.itemsize for x in case.arguments)
        if part and size + mine > MEMORY:
            yield part
            part, size = [], 0
        part.append(case)
        size += mine
    yield part


def calls(op: Op, count: int, seed: int, largest: int) -> list[Case]:
    """Random calls of an op; the same ones for the same seed."""
    rng = random.Random(f"{op.name} {seed}")
    layouts = (draw(rng, op, largest) for _ in range(count))
    return [Case(op, layout, "gpu", layout.dtypes[0]) for layout in layouts]


def times(cases: Sequence[Case], contenders: Sequence[str], rounds: int) -> list[tuple[dict, list]]:
    """The seconds of each contender by use, for each case; and the uses of the same program.

    The seconds are those of the fastest call, because other work on the machine can only slow a
    call down. Small programs take more turns, because their times vary more.
    """
    _, timer = measure.clock()
    with _using_device(fcntl.LOCK_SH), ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda case: _built(case, contenders), cases))
        programs = [program for sides in built for side in sides for program in side]
        jax.block_until_ready([(program.args, program.outputs) for program in programs])
    fastest = {}
    with _using_device(fcntl.LOCK_EX), jax.enable_x64(True):
        for small in (True, False):
            alike = [p for p in programs if (p.nbytes < measure.SMALL) == small]
            timings = timer(alike, rounds * (4 if small else 1)) if alike else []
            fastest |= {id(p): t.fastest for p, t in zip(alike, timings, strict=True)}
    found = []
    for sides in built:
        uses = dict(zip(PHASES, (0, -1), strict=True))
        seconds = {
            name: {use: fastest[id(side[i])] for use, i in uses.items()}
            for name, side in zip(contenders, sides, strict=True)
        }
        ours, theirs = sides[-2:]
        same = [use for use, i in uses.items() if ours[i].operations == theirs[i].operations]
        found.append((seconds, same))
    return found


def _built(case: Case, contenders: Sequence[str]):
    phases = [p for p in PHASES.values() if p in case.phases]
    with precision(case.dtype):
        data = operands(case)
        return [[*build(case, name, data, phases).programs.values()] for name in contenders]


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
            jax.eval_shape(partial(case.op.ours, **case.layout.options), *case.arguments)
    finally:
        fo._dispatch.decide = decide
    return seen[0]


def propose(samples: Sequence[Sample]) -> list[str]:
    """Rows for the table, by the entries and the dtypes of these samples."""
    entries: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.request.limit is None:
            entries.setdefault(sample.request.entry, []).append(sample)
    rows = []
    for entry, mine in sorted(entries.items()):
        slow = [sum(s.ratio("xla", "jax.nn", use) > 1.03 for s in mine) for use in PHASES]
        rows.append(f"# {entry}: {len(mine)} calls, reference slower than jax.nn in {slow}")
        pooled = {use: _pooled(mine, use) for use in PHASES}
        for dtype in sorted({sample.request.dtype for sample in mine}, key=ORDER.index):
            found = (_text(_of_dtype(pooled[use], ORDER.index(dtype))) for use in PHASES)
            rows.append(f'("{entry}", "{dtype}", {", ".join(found)}),')
    return rows


def _text(tree) -> str:
    """A tree as an expression of :mod:`jax_fastops._auto`."""
    if isinstance(tree, bool):
        return "ALWAYS" if tree else "NEVER"
    name, bound, below, rest = tree
    if bound == 1:
        holds = {"inner_bytes": "inner"}.get(name, name)
    else:
        holds = f"({'size' if name == 'bytes' else name} >= {bound:_})"
    if [below, rest] == [False, True]:
        return holds
    return f"{holds}.then({_text(rest)}, {_text(below)})"


def _pooled(samples: Sequence[Sample], use: str):
    """The tree for all dtypes."""
    values = []
    for sample in samples:
        op, asked, gain = BY_NAME[sample.op], sample.request, MARGIN
        if use == "forward":
            if op.fuses:
                continue  # XLA fuses such a forward in most programs
            gain = max(MARGIN, op.lone_gain)
        features = asked.known | {"dtype": ORDER.index(asked.dtype)}
        values.append((features, math.log(sample.ratio("native", "xla", use)) + gain))
    return tree(values) if values else False


def _of_dtype(tree, place: int):
    """The part of a tree that is for the dtype at this place in the order."""
    if isinstance(tree, bool):
        return tree
    name, bound, *sides = tree
    if name == "dtype":
        return _of_dtype(sides[place >= bound], place)
    below, rest = (_of_dtype(side, place) for side in sides)
    return below if below == rest else [name, bound, below, rest]


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
    """The feature and the bound whose sides cost the least if each has one choice.

    Among equals, as where one choice is the best for both sides, those that leave the least
    variance. Large ratios are cut off there, because a gain of ten times is no better a reason to
    divide calls than one of a third.
    """
    best, split = (math.inf, math.inf), None
    for name in sorted(values[0][0]):
        ordered = sorted(values, key=lambda v: v[0][name])
        for (low, _), (high, _) in itertools.pairwise(ordered):
            if low[name] == high[name]:
                continue
            bound = _round(low[name], high[name])
            sides = [[v for v in ordered if (v[0][name] < bound) == less] for less in (True, False)]
            if min(map(len, sides)) < LEAST:
                continue
            cost = sum(_cost(side) for side in sides)
            cut = [[min(max(value, -0.3), 0.3) for _, value in side] for side in sides]
            left = sum(statistics.pvariance(side) * len(side) for side in cut)
            if (key := (round(cost, 1), left)) < best:
                best, split = key, (name, bound)
    return split


def _round(low: int, high: int) -> int:
    """A bound above ``low`` and up to ``high``: a power of two if there is one between them."""
    power = 2 ** (high.bit_length() - 1)
    return power if low < power <= high else high


def check(ops: Sequence[Op], options) -> None:
    """Measures `auto` on calls of another seed, prints the worst, and writes all results.

    Calls in which `auto` is slower, by another program, are compiled and measured again, each by
    itself.
    """
    percent = 5 if environment.platform_name() == "cpu" else 3
    contenders, seed = ("auto", "jax.nn"), options.seed + 1
    rows, lost, tasks, counts = [], [], [], collections.Counter()

    def slower(row) -> set[str]:
        return {use for use in PHASES if row[use] > 1 + percent / 100}

    for sample in sweep(ops, options.checks, seed, contenders, options):
        about = {"call": sample.call, "family": BY_NAME[sample.op].family}
        row = about | _ratios(sample) | {"same": list(sample.same)}
        # Where `auto` has the program of plain JAX, a difference is noise.
        if slower(row) - {*sample.same}:
            lost.append(row)
            tasks.append((sample.op, counts[sample.op], 1))
        counts[sample.op] += 1
        rows.append(row)
    for row, sample in zip(lost, _run(tasks, contenders, seed, options), strict=True):
        row["again"] = _ratios(sample)
    worst = sorted(rows, key=lambda row: -max(row["forward"], row["grad"]))
    for row in worst[:20]:
        print(f"{row['forward']:.2f} forward, {row['grad']:.2f} step: {row['call']}")
    summary = {}
    for family in sorted({op.family for op in ops}):
        mine = [row for row in rows if row["family"] == family]
        again = [row for row in lost if row["family"] == family]
        twice = [row for row in again if (slower(row) - {*row["same"]}) & slower(row["again"])]
        summary[family] = {
            "calls": len(mine),
            "forward": statistics.geometric_mean(1 / row["forward"] for row in mine),
            "step": statistics.geometric_mean(1 / row["grad"] for row in mine),
            f"slower by {percent}%": sum(bool(slower(row)) for row in mine),
            "slower, in another program": len(again),
            "slower twice, in another program": len(twice),
        }
        print(family, summary[family])
    results = Results(options.out, "dispatch", seed=seed, families=summary, calls=worst)
    results.end()


def _ratios(sample: Sample) -> dict[str, float]:
    return {use: sample.ratio("auto", "jax.nn", use) for use in PHASES}
