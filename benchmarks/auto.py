"""Regenerates the table by which `auto` chooses between the kernel and the reference.

The table is ``{op: {platform: {dtype: {"forward": n, "grad": n}}}}``. ``n`` is the smallest number
of elements for which the kernel is used, in a forward that is not differentiated and in a
differentiated call. ``null`` is never. Entries of other platforms are kept, and some entries are
set by hand. For integers, and for an op whose derivative is the op itself, only a forward is
measured. It then counts for both.

Where speed depends on more than the number of elements (a permutation, a bias), a size is measured
in several layouts. The kernel must lose in none of them.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import ROOT, measure
from benchmarks.cases import Case, Layout, Op
from benchmarks.environment import platform_name
from benchmarks.programs import operands
from benchmarks.run import build, precision

TABLE = ROOT / "jax_fastops" / "auto_table.json"
SIZES = tuple(2**power for power in range(10, 27, 2))  # elements of the main operand
PHASES = {"forward": "forward", "grad": "step"}
MARGIN = 0.02  # two runs of the same program can differ by this much
# Thresholds that an op measured by itself does not show. In a model, XLA recomputes a norm inside
# the next norms: in BERT's inference the kernel gains, although it loses when measured by itself
# (docs/dev/log/models.md).
BY_HAND = {
    ("residual_layer_norm", "cuda", "bfloat16"): {"forward": 2**22},
    ("residual_layer_norm", "cuda", "float16"): {"forward": 2**22},
}


def regenerate(
    ops: Sequence[Op],
    dtypes: Sequence[str] | None,
    rounds: int,
    sizes: Sequence[int] = SIZES,
    path: Path = TABLE,
    clock: str = "auto",
    log: Callable[[str], None] = print,
) -> dict:
    """Measure, and merge this platform's entries into the table at ``path``."""
    _, timer = measure.clock(clock)
    platform = platform_name()
    table = json.loads(path.read_text()) if path.exists() else {}
    for op in (op for op in ops if not op.kernel_of):
        known = dict.fromkeys(dtype for layout in op.of_size(sizes[0]) for dtype in layout.dtypes)
        for dtype in (dtype for dtype in known if not dtypes or dtype in dtypes):
            for row, found in thresholds(op, dtype, timer, rounds, sizes, log).items():
                entries = table.setdefault(row, {}).setdefault(platform, {})
                entries[dtype] = found | BY_HAND.get((row, platform, dtype), {})
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    return table


def thresholds(op: Op, dtype: str, timer: measure.Clock, rounds: int, sizes, log) -> dict:
    """{"forward": elements or None, "grad": elements or None} of a dtype, by row of the table."""
    gains = {"forward": max(MARGIN, op.lone_gain), "grad": MARGIN}
    ratios: dict[str, dict[str, dict[int, float]]] = {}
    for size in sizes:
        seen: dict[str, list[dict[str, float]]] = {}
        for layout in (layout for layout in op.of_size(size) if dtype in layout.dtypes):
            found = _ratios(op, layout, dtype, timer, rounds)
            seen.setdefault(op.table_row(layout) if op.table_row else op.name, []).append(found)
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
            log(f"{op.name} {dtype} {layout.label}: native / xla time {shown}")
        for row, of_layouts in seen.items():
            for name in PHASES:
                by_size = ratios.setdefault(row, {}).setdefault(name, {})
                by_size[size] = combined([found[name] for found in of_layouts], gains[name])
    rows = {
        row: {name: threshold(r[name], gain) for name, gain in gains.items()}
        for row, r in ratios.items()
    }
    for row, found in rows.items():
        if op.fuses:
            found["forward"] = None  # XLA fuses such a forward in most programs
        log(f"{row} {dtype}: {found}")
    return rows


def combined(ratios: Sequence[float], gain: float) -> float:
    """One ratio for several layouts: the largest loss, or the largest gain if no layout loses.

    If the gain that is asked for is more than the margin, it is the smallest gain.
    """
    return max(ratios) if gain > MARGIN or max(ratios) > 1 + MARGIN else min(ratios)


def threshold(ratios: dict[int, float], gain: float) -> int | None:
    """The smallest size at which the kernel wins by ``gain`` and beyond which it does not lose.

    At larger sizes a loss up to the margin is allowed. If ``gain`` is more than the margin, the
    kernel must win by ``gain`` at all larger sizes, too.
    """
    best = None
    for size in sorted(ratios, reverse=True):
        if ratios[size] > (1 - gain if gain > MARGIN else 1 + MARGIN):
            break
        if ratios[size] < 1 - gain:
            best = size
    return best


def _ratios(
    op: Op, layout: Layout, dtype: str, timer: measure.Clock, rounds: int
) -> dict[str, float]:
    """Time of the kernel over that of the reference, by name of phase.

    The fastest calls are compared, because other work on the machine can only slow a call down.
    """
    case = Case(op, layout, "gpu", dtype)
    size = math.prod(case.shapes[0])
    rounds = rounds if size > 2**20 else 2 * rounds + 1  # short calls vary more
    phases = {name: phase if phase in case.phases else "forward" for name, phase in PHASES.items()}
    measured = list(dict.fromkeys(phases.values()))
    with precision(dtype):
        data = operands(case)
        sides = [build(case, name, data, measured).programs for name in ("native", "xla")]
        timings = timer([side[phase] for phase in measured for side in sides], rounds)
    ratios = {
        phase: timings[2 * i].fastest / timings[2 * i + 1].fastest
        for i, phase in enumerate(measured)
    }
    return {name: ratios[phase] for name, phase in phases.items()}
