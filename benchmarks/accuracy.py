"""How far from exact are the results? ``python -m benchmarks.accuracy``

Compares the kernels with jax.nn (jax.numpy where jax.nn has no equivalent) in the same dtype. The
reference of batch norm computes the variance in two passes, which is slower but more exact than
one. The data is ordinary or hard: rows far from zero, one element that dominates, rows of equal
elements, numbers next to the smallest, Inf and NaN. The exact result is the reference in float64 on
the CPU, on the same rounded operands.

An error is that of the worst element, in units of the dtype's epsilon. It is relative to the
element, or to the root mean square of the array if that is larger. ``special`` counts the elements
that are NaN or infinite in at least one of the two results, and differ.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import RESULTS, environment
from benchmarks.cases import OPS, Op, fo, of_channels, select_ops
from benchmarks.report import headline, write

DTYPES = ("float32", "bfloat16", "float16")
SHAPE = (512, 1000)


@dataclass(frozen=True)
class Variant:
    """An op with options and operand shapes."""

    op: Op
    label: str
    shapes: tuple[tuple[int, ...], ...] = (SHAPE,)
    options: dict = field(default_factory=dict)
    reference: Callable | None = None  # None: that of the op


def variants(ops: tuple[Op, ...] = OPS) -> Iterator[Variant]:
    """The ops that compute, in all variants; ops that only move elements are exact."""
    for op in ops:
        if math.isinf(op.slack):  # random
            continue
        if op.family == "softmax":
            yield Variant(op, op.name)
        elif op.family in ("norm", "lerp", "gated_act"):
            yield Variant(op, op.name, op.operands(SHAPE))
        elif op.name == "batch_norm":  # without a ReLU, where gradients jump at 0
            two_passes = partial(op.reference, two_passes=True)
            for axis, of_axis in ((-1, "last"), (0, "first")):
                shapes = of_channels(2, axis)(SHAPE)
                label = f"batch_norm, channels {of_axis}"
                yield Variant(op, label, shapes, {"axis": axis}, two_passes)
        elif op.family == "bias_act":
            for activation in dict.fromkeys(layout.options["activation"] for layout in op.layouts):
                options = {"activation": activation}
                yield Variant(op, f"bias_act, {activation}", op.operands(SHAPE), options)
        elif op.family == "window_sum":
            for radius in (2, 16):
                options = {"radius": radius, "padding": "SAME"}
                yield Variant(op, f"window_sum, radius {radius}", options=options)


def ordinary(x: np.ndarray) -> np.ndarray:
    return x


def far_from_zero(x: np.ndarray) -> np.ndarray:
    """Unit variance around 1e4."""
    return x + 1e4


def dominated(x: np.ndarray) -> np.ndarray:
    """One element of each row is much larger than the others."""
    x = x.copy()
    x[np.arange(len(x)), np.arange(len(x)) % x.shape[1]] = 80.0
    return x


def all_equal(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[:, :1], x.shape)


def tiny(x: np.ndarray) -> np.ndarray:
    """Some elements are subnormal in float32 and bfloat16."""
    return x * 1e-38


def infinite(x: np.ndarray) -> np.ndarray:
    """-Inf at regular positions, and +Inf in some rows."""
    x = x.copy()
    x[::3, ::7] = -np.inf
    x[::5, 3] = np.inf
    return x


def not_a_number(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[::4, 5] = np.nan
    return x


DATA: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    ordinary,
    far_from_zero,
    dominated,
    all_equal,
    tiny,
    infinite,
    not_a_number,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="these ops or families of ops")
    options = parser.parse_args()
    results = {
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "accuracy": list(rows(select_ops(options.ops))),
    }
    path = options.out / f"accuracy-{environment.slug(results)}.json"
    write(path, results)
    print(f"{headline(results)}\nwrote {path}")


def rows(ops: tuple[Op, ...] = OPS) -> Iterator[dict]:
    """A row for each op, dtype and kind of data, printed as soon as it is measured."""
    for variant in variants(ops):
        for dtype in DTYPES:
            for data in DATA:
                found = {
                    "op": variant.label,
                    "dtype": dtype,
                    "data": data.__name__,
                    **compared(variant, dtype, data),
                }
                print(found["op"], dtype, found["data"], found["errors"], found["special"])
                yield found


def compared(variant: Variant, dtype: str, data: Callable) -> dict:
    """Worst errors of results and gradients, of the kernel and of jax.nn, in epsilons."""
    op = variant.op
    random = np.random.default_rng(0)
    normal = [random.standard_normal(shape) for shape in variant.shapes]
    normal = [data(x) if x.ndim > 1 else x for x in normal]
    dtypes = [jnp.dtype(op.operand_dtypes.get(i, dtype)) for i in range(len(variant.shapes))]
    with np.errstate(over="ignore"):
        rounded = [np.asarray(x).astype(d) for x, d in zip(normal, dtypes, strict=True)]
    cotangent = random.standard_normal(SHAPE).astype(jnp.dtype(dtype))
    with fo.use_implementation("native"):
        ours = evaluated(partial(op.ours, **variant.options), rounded, cotangent)
    reference = partial(variant.reference or op.reference, **variant.options)
    theirs = evaluated(reference, rounded, cotangent)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [x.astype(np.float64) for x in rounded]
        exact = evaluated(reference, wide, cotangent.astype(np.float64))
    names = ("results", *(["gradients"] * (len(ours) - 1)))
    errors: dict = {}
    special = 0
    eps = float(jnp.finfo(dtype).eps)
    for name, mine, other, true in zip(names, ours, theirs, exact, strict=True):
        special += differently_special(mine, other)
        for side, found in (("ours", mine), ("jax.nn", other)):
            worst = worst_error(found, true) / eps
            errors.setdefault(name, {}).setdefault(side, 0.0)
            errors[name][side] = max(errors[name][side], worst)
    return {"errors": errors, "special": special}


def evaluated(function: Callable, args: list, cotangent) -> list[np.ndarray]:
    """The result and the gradients of all operands, in float64."""

    @jax.jit
    def both(args, cotangent):
        result, pullback = jax.vjp(function, *args)
        return [result, *pullback(cotangent)]

    return [np.asarray(x).astype(np.float64) for x in both(args, cotangent)]


def worst_error(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest error of the elements that are finite in both."""
    finite = np.isfinite(found) & np.isfinite(exact)
    if not finite.any():
        return 0.0
    found, exact = found[finite], exact[finite]
    scale = np.maximum(np.abs(exact), np.sqrt(np.mean(exact**2)))
    difference = np.abs(found - exact)
    return float(np.max(np.divide(difference, scale, out=np.zeros_like(scale), where=scale > 0)))


def differently_special(ours: np.ndarray, theirs: np.ndarray) -> int:
    """How many elements are NaN or infinite in at least one array, and not the same in both."""
    either = ~(np.isfinite(ours) & np.isfinite(theirs))
    same = (np.isnan(ours) & np.isnan(theirs)) | (ours == theirs)
    return int((either & ~same).sum())


if __name__ == "__main__":
    main()
