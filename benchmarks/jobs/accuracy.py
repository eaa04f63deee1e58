"""How far from exact are the results?

Compares the kernels with jax.nn (jax.numpy where jax.nn has no equivalent) in the same dtype. The
reference of batch norm computes the variance in two passes, which is slower but more exact than
one. The data is ordinary or hard: rows far from zero, one element that dominates, rows of equal
elements, numbers next to the smallest, Inf and NaN. The exact result is the reference in float64 on
the CPU, on the same rounded operands.

An error is that of the worst element, in units of the dtype's epsilon. It is relative to the
element, or to the root mean square of the array if that is larger. ``special`` counts the elements
that are NaN or infinite in at least one of the two results, and differ.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import OPS, Case, Layout, Op, _resnet, fo, of_channels, select_ops
from benchmarks.report import Results

DTYPES = ("float32", "bfloat16", "float16")
SHAPE = (512, 1000)


def variants(ops: tuple[Op, ...] = OPS) -> Iterator[tuple[Op, Layout]]:
    """The ops that compute, in all variants; ops that only move elements are exact."""

    def layout(label: str, options: dict | None = None, **more) -> Layout:
        return Layout(label, SHAPE, SHAPE, DTYPES, options or {}, **more)

    for op in ops:
        if math.isinf(op.slack):  # random
            continue
        if op.family == "softmax":
            yield op, layout(op.name, without=1)
        elif op.family in ("norm", "lerp", "gated_act"):
            yield op, layout(op.name)
        elif op.name == "batch_norm":  # without a ReLU, where gradients jump at 0
            for axis, name in ((-1, "last"), (0, "first")):
                operands = of_channels(2, axis)
                yield op, layout(f"{op.name}, channels {name}", {"axis": axis}, operands=operands)
        elif op.family == "bias_act":
            for activation in dict.fromkeys(x.options["activation"] for x in op.layouts):
                yield op, layout(f"bias_act, {activation}", {"activation": activation})
        elif op.family == "window_sum":
            for radius in (2, 16):
                options = {"radius": radius, "padding": "SAME"}
                yield op, layout(f"window_sum, radius {radius}", options)


def two_passes(x, scale, bias, *, axis: int):
    """Batch norm whose variance is that of the differences from the mean."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    given = wide.mean(others), wide.var(others), scale, bias
    return _resnet.plain_batch_norm_inference(x, *given, axis=axis)


def _at(x: np.ndarray, *places) -> np.ndarray:
    """Rows with other values at some places."""
    x = x.copy()
    for place, value in places:
        x[place] = value
    return x


def dominated(x: np.ndarray) -> np.ndarray:
    """One element of each row is much larger than the others."""
    rows = np.arange(len(x))
    return _at(x, ((rows, rows % x.shape[1]), 80.0))


DATA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ordinary": lambda x: x,
    "far_from_zero": lambda x: x + 1e4,  # with unit variance
    "dominated": dominated,
    "all_equal": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "tiny": lambda x: x * 1e-38,  # some elements are subnormal in float32 and bfloat16
    # -Inf at regular positions, and +Inf in some rows.
    "infinite": lambda x: _at(x, (np.s_[::3, ::7], -np.inf), (np.s_[::5, 3], np.inf)),
    "not_a_number": lambda x: _at(x, (np.s_[::4, 5], np.nan)),
}


def options(add) -> None:
    add("--ops", nargs="+", metavar="OP", help="these ops or families of ops")


def run(options) -> None:
    """A row for each op, dtype and kind of data, printed as soon as it is measured."""
    results = Results(options.out, "accuracy", accuracy=[])
    for op, layout in variants(select_ops(options.ops)):
        for dtype in DTYPES:
            for name, data in DATA.items():
                found = compared(op, layout, dtype, data)
                about = {"op": layout.label, "dtype": dtype, "data": name}
                print(*about.values(), found["errors"], found["special"], flush=True)
                results["accuracy"].append(about | found)
    results.end()


def compared(op: Op, layout: Layout, dtype: str, data: Callable) -> dict:
    """Worst errors of results and gradients, of the kernel and of jax.nn, in epsilons."""
    random = np.random.default_rng(0)
    arguments = Case(op, layout, "cpu", dtype).arguments
    normal = [random.standard_normal(x.shape) for x in arguments]
    normal = [data(x) if x.ndim > 1 else x for x in normal]
    dtypes = [x.dtype for x in arguments]
    with np.errstate(over="ignore"):
        rounded = [np.asarray(x).astype(d) for x, d in zip(normal, dtypes, strict=True)]
    cotangent = random.standard_normal(SHAPE).astype(jnp.dtype(dtype))
    with fo.use_implementation("native"):
        ours = evaluated(partial(op.ours, **layout.options), rounded, cotangent)
    reference = partial(two_passes if op.name == "batch_norm" else op.reference, **layout.options)
    theirs = evaluated(reference, rounded, cotangent)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [x.astype(np.float64) for x in rounded]
        exact = evaluated(reference, wide, cotangent.astype(np.float64))
    names = ("results", *(["gradients"] * (len(ours) - 1)))
    errors: dict = {name: {"ours": 0.0, "jax.nn": 0.0} for name in names}
    special, eps = 0, float(jnp.finfo(dtype).eps)
    for name, mine, other, true in zip(names, ours, theirs, exact, strict=True):
        special += differently_special(mine, other)
        for side, found in (("ours", mine), ("jax.nn", other)):
            errors[name][side] = max(errors[name][side], worst_error(found, true) / eps)
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
