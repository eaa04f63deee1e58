"""`softmax` and `log_softmax`: transformations, shapes, masks, special values, residuals."""

import functools
import itertools
import math
import re
import zlib

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from harness import (
    Case,
    Sharding,
    Tolerance,
    assert_bitwise_equal,
    assert_matches,
    checks,
    implementation,
)
from harness.case import NESTED_VARIANT, VARIANT
from harness.numerics import assert_close, assert_within, normal
from harness.programs import equations, residuals, targets, targets_of, value_and_gradient
from harness.properties import LENGTHS, SHORT, of_any
from harness.sharding import (
    assert_collectives,
    assert_layout,
    mesh_for,
    over_kinds,
    over_mesh,
)
from harness.transforms import oracle
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

OPS = {"softmax": fo.softmax, "log_softmax": fo.log_softmax}


def reference(name, x, axis=-1, where=None, scale=1.0):
    scaled = x if scale == 1.0 else jnp.multiply(x, scale)  # NumPy would widen bfloat16
    return getattr(jax.nn, name)(scaled, axis=axis, where=where)


def variant(name, masked=False, **options):
    """The op and its reference, as functions of `x` and, if masked, `where`.

    Masked results of log_softmax are -inf. They are replaced by 0 to keep losses finite.
    """
    ops = OPS[name], functools.partial(reference, name)
    if not masked:
        return tuple(lambda x, op=op: op(x, **options) for op in ops)

    def of(op):
        if name == "softmax":
            return lambda x, where: op(x, where=where, **options)
        return lambda x, where: jnp.where(where, op(x, where=where, **options), 0)

    return tuple(map(of, ops))


def random_mask(rng, shape, keep=0.7):
    return rng.random(shape) < keep


def draws(shape, mask=None):
    """Draws x, and a mask, of the given shapes; each row of the mask has elements left."""

    def make(rng, dtype):
        x = normal(rng, shape, dtype)
        if mask is None:
            return (x,)
        where = random_mask(rng, mask)
        if where.ndim:
            where[..., :1] = True
        return x, where

    return make


def case(name, op, shape, mask=None, sharded=None, sharded_mask=None, axis=-1, scale=1.0, **more):
    fn, plain = variant(op, mask is not None, axis=axis, scale=scale)
    make_sharded = {} if sharded is None else {"make_sharded_args": draws(sharded, sharded_mask)}
    return Case(
        name=name,
        fn=fn,
        reference=plain,
        make_args=draws(shape, mask),
        tolerance=Tolerance(ulps=12.0),
        kernels=("softmax", "softmax_bwd") if mask is None or op == "softmax" else (),
        only_kernels=True,
        maps=((0,), (0, 1))[: 1 + (mask is not None)],
        kept=(lambda x, *_: [(x.dtype, x.size)]) if mask is None or op == "softmax" else None,
        **make_sharded,
        **more,
    )


SOFTMAX = case(
    "softmax",
    "softmax",
    (3, 7),
    sharded=(16, 8),
    shardings=(Sharding("batch", (0,), (0,)), Sharding("row", (1,), (1,), whole=True)),
    symbolic=("b, n",),
    sizes=({"b": 5, "n": 64}, {"b": 2, "n": 40_001}),
    quick=VARIANT,
)

# A mask of padding: it is the same for all heads and queries.
SOFTMAX_PADDED = case(
    "softmax_padded",
    "softmax",
    (2, 2, 3, 5),
    (2, 1, 1, 5),
    (8, 8, 16, 12),
    (8, 1, 1, 12),
    dtypes=("float32", "bfloat16"),
    modes=("native",),
    shardings=(Sharding("heads", (1, None), (1,)),),
    symbolic=("b, h, q, k", "b, 1, 1, k"),
    sizes=({"b": 2, "h": 3, "q": 7, "k": 1001},),
)

# A mask of each query, the same for all heads, and a scale: attention.
SOFTMAX_ATTENTION = case(
    "softmax_attention",
    "softmax",
    (2, 2, 3, 4),
    (2, 1, 3, 4),
    (16, 8, 16, 8),
    (16, 1, 16, 8),
    scale=0.25,
    dtypes=("bfloat16", "float32"),
    modes=("native",),
    shardings=(
        Sharding("batch", (0, 0), (0,)),
        Sharding("heads", (1, None), (1,)),
        Sharding("queries", (2, 2), (2,)),
    ),
    quick=VARIANT,
)

SOFTMAX_AXIS = case(
    "softmax_axis",
    "softmax",
    (2, 4, 3),
    (1, 4, 1),
    (8, 8, 16),
    (1, 8, 1),
    axis=1,
    scale=-1.5,
    dtypes=("float32", "float16"),
    shardings=(
        Sharding("batch", (0, None), (0,)),
        Sharding("inner", (2, None), (2,)),
        Sharding("row", (1, None), (1,), whole=True),
    ),
    symbolic=("b, 4, i", "1, 4, 1"),
    sizes=({"b": 50, "i": 9},),
    quick=NESTED_VARIANT,
)

LOG_SOFTMAX = case(
    "log_softmax",
    "log_softmax",
    (2, 3, 5),
    sharded=(8, 16, 5),
    scale=0.7,
    shardings=(Sharding("batch", (0,), (0,)), Sharding("sequence", (1,), (1,))),
    symbolic=("b, s, n",),
    sizes=({"b": 37, "s": 1, "n": 1001},),
    quick=NESTED_VARIANT,
)

LOG_SOFTMAX_PADDED = case(
    "log_softmax_padded",
    "log_softmax",
    (2, 2, 5),
    (2, 1, 5),
    (8, 16, 16),
    (8, 1, 16),
    dtypes=("float32", "bfloat16"),
    shardings=(
        Sharding("batch", (0, 0), (0,)),
        Sharding("heads", (1, None), (1,)),
        Sharding("row", (2, None), (2,), whole=True),
    ),
    symbolic=("b, h, k", "b, 1, k"),
    sizes=({"b": 2, "h": 3, "k": 20_000},),
    quick=NESTED_VARIANT,
)

LOG_SOFTMAX_AXIS = case(
    "log_softmax_axis",
    "log_softmax",
    (5, 2, 3),
    (5, 1, 3),
    (5, 8, 16),
    (5, 1, 16),
    axis=0,
    dtypes=("float32", "bfloat16"),
    shardings=(
        Sharding("first", (1, None), (1,)),
        Sharding("second", (2, 2), (2,)),
    ),
    symbolic=("n, b, i", "n, 1, i"),
    sizes=({"b": 5, "n": 333, "i": 9},),
    quick=VARIANT,
)

basic = functools.partial(case, basic_only=True, modes=("native",))
SINGLE, HALF = ("float32",), ("bfloat16",)

# Masks of other shapes, and lengths that are not a multiple of a vector.
ROW_MASK = basic("softmax_row_mask", "softmax", (2, 3, 33), (33,), scale=2.0, dtypes=SINGLE)
FULL_MASK = basic("softmax_full_mask", "softmax", (3, 17), (3, 17), dtypes=HALF)
LONG = basic("softmax_long", "softmax", (2, 1001), dtypes=HALF)
ONE = basic("softmax_one", "softmax", (5, 1), (5, 1), dtypes=SINGLE)
FIRST_AXIS = basic("softmax_first_axis", "softmax", (9, 11), (9, 11), axis=0, dtypes=SINGLE)
COLUMN_MASK = basic("softmax_column_mask", "softmax", (4, 3, 8), (3, 1), dtypes=HALF)
LOG_SHORT = basic("log_short", "log_softmax", (2, 3, 5), scale=0.7, dtypes=SINGLE)
LOG_ROW_MASK = basic("log_row_mask", "log_softmax", (3, 8), (8,), scale=-0.5, dtypes=SINGLE)
LOG_FULL_MASK = basic("log_full_mask", "log_softmax", (2, 129), (2, 129), dtypes=SINGLE)
LOG_MIDDLE = basic("log_middle", "log_softmax", (2, 7, 2, 3), (2, 7, 1, 3), axis=1, dtypes=HALF)

QUICK = (
    SOFTMAX_PADDED,
    SOFTMAX,
    LOG_SOFTMAX,
    SOFTMAX_ATTENTION,
    SOFTMAX_AXIS,
    LOG_SOFTMAX_PADDED,
    LOG_SOFTMAX_AXIS,
)
BASIC = (ROW_MASK, FULL_MASK, LONG, ONE, FIRST_AXIS, COLUMN_MASK)
LOG_BASIC = (LOG_SHORT, LOG_ROW_MASK, LOG_FULL_MASK, LOG_MIDDLE)


@checks(*QUICK, *BASIC, *LOG_BASIC)
def test_harness(check):
    check()


@pytest.fixture(params=OPS)
def name(request):
    return request.param


# Shapes -------------------------------------------------------------------------------------------


def exact_value(name, x, axis, where, scale):
    """The result in float64 (-inf or 0 for masked elements), and the sizes of the exponents."""
    z = x.astype(np.float64) * scale
    z = z if where is None else np.where(where, z, -np.inf)
    top = z.max(axis, keepdims=True)
    shifted = z - np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.exp(shifted).sum(axis, keepdims=True)
        y = shifted - np.log(total) if name == "log_softmax" else np.exp(shifted) / total
    if where is not None:
        y = np.where(where, y, -np.inf if name == "log_softmax" else 0)
    return y, np.abs(np.where(np.isfinite(z), z, 0))


def exact_gradient(name, y, dy, axis, where, scale):
    """The gradient in float64, from the rounded result, and the error per unit of rounding."""
    y, dy = y.astype(np.float64), dy.astype(np.float64)
    keep = np.ones(y.shape, bool) if where is None else np.broadcast_to(where, y.shape)
    p = np.where(keep, np.exp(y) if name == "log_softmax" else y, 0)
    dy = np.where(keep, dy, 0)
    weight = np.ones_like(p) if name == "log_softmax" else p
    total = (weight * dy).sum(axis, keepdims=True)
    size = np.abs(weight * dy).sum(axis, keepdims=True) * growth(y.shape, axis)
    if name == "log_softmax":
        exponent = np.where(keep, np.abs(y), 0)
        unit = np.abs(dy) + p * (size + np.abs(total) * (4 + exponent))
        return np.where(keep, scale * (dy - p * total), 0), abs(scale) * unit
    return scale * p * (dy - total), abs(scale) * p * (size + 3 * (np.abs(dy) + np.abs(total)))


def growth(shape, axis):
    """The error of a sum over an axis, in units of rounding.

    Many lanes make partial sums of a row, unless neighboring lanes work on other rows.
    """
    alone = math.prod(shape[axis:][1:]) == 1 if axis != -1 else True
    return 4 + math.sqrt(shape[axis]) / (8 if alone else 2)


def uneven(rng, shape, axis, dtype):
    """Values whose first and last elements along the axis weigh most, so a lost one is noticed."""
    x = rng.standard_normal(shape) * 2
    view = np.moveaxis(x, axis, -1)
    view[..., :2] += math.log(shape[axis])
    view[..., -3:] += math.log(shape[axis])
    return x.astype(dtype)


def check_shapes(name, dtype, examples, scale=1.0):
    """Value and gradient of many shapes in one program: (shape, axis, shape of the mask)."""
    rng = np.random.default_rng(zlib.crc32(str(examples).encode()))
    axes = [axis for _, axis, _ in examples]
    values = []
    for shape, axis, mask in examples:
        where = None if mask is None else random_mask(rng, mask, rng.choice([0.2, 0.7, 0.97]))
        values.append((uneven(rng, shape, axis, dtype), uneven(rng, shape, axis, dtype), where))

    @jax.jit
    def run(values):
        return [
            value_and_gradient(lambda x, w, a=a: OPS[name](x, where=w, axis=a, scale=scale))(*v)
            for v, a in zip(values, axes, strict=True)
        ]

    results = jax.tree.map(np.asarray, run(values))
    for (shape, axis, mask), (x, dy, where), (y, dx) in zip(examples, values, results, strict=True):
        what = f"{name} of {dtype}{shape} over {axis}, mask {mask}"
        assert y.dtype == dx.dtype == dtype and y.shape == dx.shape == x.shape, what
        exact, size = exact_value(name, x, axis, where, scale)
        # The exponent is rounded when it is scaled and when the maximum is subtracted.
        size = 2 * size.max(axis, keepdims=True) + growth(shape, axis)
        unit = size + np.abs(np.where(np.isfinite(exact), exact, 0))
        assert_within(y, exact, unit if name == "log_softmax" else unit * exact, what)
        assert_within(dx, *exact_gradient(name, y, dy, axis, where, scale), f"gradient of {what}")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(name, dtype, lengths):
    """Many lengths of a row, with three rows each."""
    check_shapes(name, dtype, [((3, n), 1, None) for n in lengths])


@pytest.mark.parametrize("lengths", SHORT.values(), ids=SHORT)
def test_many_rows(name, lengths):
    """The number of rows is prime, so no tile of rows divides it."""
    dtype = jnp.bfloat16 if name == "softmax" else np.float32
    check_shapes(name, jnp.dtype(dtype), [((1031, n), 1, None) for n in lengths[::4]])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 5, 67, 4099])
@pytest.mark.parametrize("lengths", SHORT.values(), ids=SHORT)
def test_rows(name, dtype, rows, lengths):
    check_shapes(name, dtype, [((rows, n), 1, None) for n in lengths], scale=-0.37)


MASKED = {
    "row": lambda r, n: (n,),
    "each": lambda r, n: (r, n),
    "column": lambda r, n: (r, 1),
    "all": lambda r, n: (),
}


@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_masked_lengths(name, kind, mask):
    lengths = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 129, 513, 1000, 1001, 1024]
    lengths += [4097, 16385]
    examples = [((5, n), 1, mask(5, n)) for n in lengths]
    check_shapes(name, jnp.dtype(kind), examples, scale=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_masked_lengths_every_dtype(name, dtype, mask, lengths):
    check_shapes(name, dtype, [((3, n), 1, mask(3, n)) for n in lengths], scale=1.7)


INNER = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 100, 513]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
def test_other_axes(name, kind, masked):
    """Adjacent elements of a row are `inner` elements apart in memory."""
    shapes = [(2, 1 + 7 * i % 40, inner) for i, inner in enumerate(INNER)]
    masks = itertools.cycle([(1, 1), (3, 1), (3, 2)] if masked else [None])

    def mask(outer, n, inner):
        kind = next(masks)
        return (
            None if kind is None else (outer if kind[0] == 3 else 1, n, inner * (kind[1] == 2) or 1)
        )

    shapes += [(3, 5000, 3), (1, 1025, 17), (2, 300, 64), (7, 129, 1), (1, 20000, 2)]
    shapes += [(1, 20000, 8), (1, 2000, 64), (1, 5000, 64)]
    check_shapes(name, jnp.dtype(kind), [(s, 1, mask(*s)) for s in shapes], scale=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 129, 1000, 5000])
def test_other_axes_every_dtype(name, dtype, n):
    examples = [((2, n, inner), 1, None) for inner in INNER if n * inner < 600_000]
    examples += [((2, n, inner), 1, (n, inner)) for inner in INNER[::3] if n * inner < 600_000]
    examples += [((2, n, inner), 1, (2, n, 1)) for inner in INNER[1::3] if n * inner < 600_000]
    examples += [((2, n, inner), 1, (2, 1, inner)) for inner in INNER[2::3] if n * inner < 600_000]
    check_shapes(name, dtype, examples)


def test_rows_that_are_no_rows(name):
    """A single row of rank 1, and long leading dimensions."""
    shapes = [((n,), 0, None) for n in (1, 2, 9, 1001, 40000)]
    shapes += [((1, 1, 1, n), 3, (n,)) for n in (1, 9, 1001)]
    shapes += [((2, 1, 3, 1, 2, 5), axis, None) for axis in range(6)]
    check_shapes(name, jnp.dtype(np.float32), shapes)


LARGE = [((3, n), 1, (1, n)) for n in (131072, 262144, 262145)]
LARGE += [((1, n), 1, (1, n)) for n in (1 << 20, (1 << 22) + 1, (1 << 24) + 3)]
# More rows than the blocks of a GPU hold at a time, each at another offset in a vector.
LARGE += [((5, 1048577), 1, (5, 1)), ((7, 2097153), 1, (7, 1))]
LARGE += [
    ((30011, 1000), 1, (1000,)),
    ((7, 2048, 1025), 1, (7, 2048, 1)),
    ((1 << 20, 17), 1, (17,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape, axis, mask", LARGE, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
def test_large_arrays(name, kind, shape, axis, mask, masked):
    check_shapes(name, jnp.dtype(kind), [(shape, axis, mask if masked else None)], scale=0.8)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_long_rows_one_after_the_other(name, kind):
    """Several calls in one program, which a GPU may run as a CUDA graph. Blocks share rows."""
    dtype = jnp.dtype(kind)
    x, dy = (normal(np.random.default_rng(seed), (5, 300_001), dtype) for seed in (3, 4))
    ops = [functools.partial(OPS[name], scale=k / 4) for k in range(1, 7)]
    chain = jax.jit(lambda x, dy: [value_and_gradient(op)(x, dy) for op in ops])
    for got, op in zip(chain(x, dy), ops, strict=True):
        alone = jax.jit(value_and_gradient(op))(x, dy)
        for mine, theirs in zip(got, alone, strict=True):
            assert_bitwise_equal(mine, theirs)


# Masks --------------------------------------------------------------------------------------------


@st.composite
def masked_shapes(draw):
    """A shape, an axis, and the shape of a mask that broadcasts to it, of at most that rank."""
    rank = draw(st.integers(1, 6))
    sizes = st.one_of(st.integers(1, 4), st.sampled_from([1, 5, 9]))
    shape = [draw(sizes) for _ in range(rank)]
    axis = draw(st.integers(0, rank - 1))
    shape[axis] = draw(st.one_of(st.integers(1, 12), st.sampled_from([16, 31, 33, 64, 100])))
    while math.prod(shape) > 20_000:
        shape[int(np.argmax(shape))] //= 2
    mask = [n if draw(st.booleans()) else 1 for n in shape]
    missing = draw(st.integers(0, rank))
    return tuple(shape), axis - rank * draw(st.booleans()), tuple(mask[missing:])


def masks_of_any_shape(examples):
    def check(drawn, scale):
        for name, kind in (("softmax", np.float32), ("log_softmax", jnp.bfloat16)):
            check_shapes(name, jnp.dtype(kind), drawn, scale=scale)

    of_any(examples, masked_shapes(), check, scale=st.sampled_from([1.0, -2.5]))


def test_masks_of_any_shape():
    masks_of_any_shape(6)


@pytest.mark.slow
def test_masks_of_more_shapes():
    masks_of_any_shape(150)


@pytest.mark.parametrize("rank", [16, 17, 20])
def test_masks_of_high_rank(name, rank):
    """With a mask, the kernels take up to 16 dimensions. More take the reference."""
    shape = (2,) + (1, 2) * 5 + (1,) * (rank - 12) + (3,)
    mask = tuple(n if i % 4 < 2 else 1 for i, n in enumerate(shape))
    check_shapes(name, jnp.dtype(np.float32), [(shape, rank - 1, mask), (shape, 0, mask)])


def test_a_mask_that_alternates_along_every_dimension(name):
    """No two adjacent dimensions are broadcast alike, so none can be merged."""
    shape = (2,) * 12 + (3, 2, 2, 2)
    for first in (0, 1):
        mask = tuple(n if i % 2 == first else 1 for i, n in enumerate(shape))
        examples = [(shape, axis, mask) for axis in (0, 7, 12, 15)]
        check_shapes(name, jnp.dtype(np.float32), examples)


# Special values -----------------------------------------------------------------------------------


def special_rows(n, dtype):
    """name -> a row of `n` elements."""
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(n)
    base = rng.standard_normal(n)

    def at(**places):
        row = base.copy()
        for place, value in places.items():
            row[{"first": 0, "middle": n // 2, "last": n - 1}[place]] = value
        return row

    inf, nan = np.inf, np.nan
    ramp = np.linspace(0, 1, n)
    rows = {
        "NaN": at(middle=nan),
        "NaN at the end": at(last=nan),
        "+inf": at(middle=inf),
        "+inf at the end": at(last=inf),
        "two +inf": at(first=inf, last=inf),
        "-inf": at(middle=-inf),
        "-inf but one": np.where(np.arange(n) == n // 2, 3.0, -inf),
        "+inf and -inf": at(first=inf, last=-inf),
        "NaN and +inf": at(first=inf, last=nan),
        "NaN and -inf": at(first=-inf, last=nan),
        "all -inf": np.full(n, -inf),
        "all +inf": np.full(n, inf),
        "all NaN": np.full(n, nan),
        "all equal": np.full(n, 1.7),
        "all -0": np.full(n, -0.0),
        "subnormal": ramp * float(info.smallest_normal),
        "offset": base + 1e4,
        "negative offset": base - 1e4,
        "one dominates": at(middle=1e3),
        "one dominates at the end": at(last=60),
        "far apart": 200 * base,
        "the largest": np.where(ramp < 0.5, float(info.max), 0),
        "the largest alone": np.full(n, float(info.max)),
        "the smallest": np.where(ramp < 0.5, -float(info.max), 1),
        "the smallest alone": np.full(n, -float(info.max)),
        "underflow": -ramp * 110,
    }
    return {what: row.astype(dtype) for what, row in rows.items()}


def compare_rows(name, dtype, x, dy, where=None, scale=1.0, ulps=0, axis=1):
    """Checks values and gradients against float64; NaN and infinities must match jax.nn.

    `ulps` is the relative error of a gradient that is allowed in addition to that of the cotangent.
    With axis 0, the op gets the transposed arrays.
    """

    def of(fn):
        def run(x, dy, *rest):
            where = rest[0] if rest else None
            if axis == 1:
                return value_and_gradient(lambda x: fn(x, where=where, scale=scale))(x, dy)
            where = None if where is None else where.T
            op = functools.partial(fn, where=where, axis=0, scale=scale)
            return value_and_gradient(lambda x: op(x.T).T)(x, dy)

        return run

    values = (x, dy) if where is None else (x, dy, where)
    plain = of(functools.partial(reference, name))
    got, want = (jax.jit(of(fn))(*values) for fn in (OPS[name], functools.partial(reference, name)))
    exact = oracle(plain, *values)
    eps = float(jnp.finfo(dtype).eps)
    # Each row has its own bound: one for the whole array would hide errors in rows of small values.
    # A gradient is a difference of numbers as large as the cotangent, made from rounded results, or
    # as large as the sums of the cotangent on the way to the whole sum.
    with np.errstate(all="ignore"):
        wide = dy.astype(np.float64)
    wide = np.where(np.isfinite(wide), wide, 0)
    of_dy = np.abs(wide).max(1, keepdims=True) * max(1, math.log(x.shape[1]))
    of_dy = np.maximum(of_dy, np.abs(wide.cumsum(1)).max(1, keepdims=True))
    for what, mine, theirs, best in zip(("value", "gradient"), got, want, exact, strict=True):
        mine, theirs = (np.asarray(a).astype(np.float64) for a in (mine, theirs))
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(
            np.where(finite, 0, theirs), np.where(np.isfinite(mine), 0, mine), err_msg=what
        )
        both = finite & np.isfinite(best)
        best = np.where(both, best, 0)
        if what == "value":
            exponent = np.abs(best) if name == "softmax" else np.maximum(1, np.abs(best))
            limit = (4 * eps + 4e-5 * (dtype != np.float64)) * exponent
        else:
            limit = 4 * eps * of_dy
            limit = limit + ulps * eps * np.abs(best)
        least = 2 * float(jnp.finfo(dtype).smallest_normal)
        error = np.where(both, np.abs(np.where(both, mine, 0) - best), 0)
        row, at = np.unravel_index(np.argmax(error - limit), error.shape)
        assert (error <= limit + least).all(), (
            f"{what} of row {row}, {at}: got {mine[row, at]}, jax.nn gives {theirs[row, at]}, "
            f"exact is {best[row, at]}"
        )
    return tuple(np.asarray(a) for a in got)


SPECIAL_LENGTHS = [37, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 9, 259))]


@pytest.mark.parametrize("n", SPECIAL_LENGTHS)
def test_special_values(name, dtype, n):
    rows = special_rows(n, dtype)
    dy = normal(np.random.default_rng(1), (len(rows), n), dtype)
    y, _ = compare_rows(name, dtype, np.stack(list(rows.values())), dy)
    got = dict(zip(rows, y.astype(np.float64), strict=True))
    assert np.isnan(got["all -inf"]).all() and np.isnan(got["+inf"]).all()
    assert np.isfinite(got["the largest alone"]).all()
    at_inf = got["-inf but one"]
    assert at_inf[n // 2] == (0 if name == "log_softmax" else 1)
    np.testing.assert_allclose(
        got["all -0"], -math.log(n) if name == "log_softmax" else 1 / n, 1e-2
    )


@pytest.mark.parametrize("n", SPECIAL_LENGTHS)
def test_special_values_beside_a_mask(name, dtype, n):
    """The mask leaves out about half of each row, with the special values or without them."""
    rows = special_rows(n, dtype)
    x = np.repeat(np.stack(list(rows.values())), 3, axis=0)
    rng = np.random.default_rng(2)
    where = random_mask(rng, x.shape, 0.5)
    where[0::3, n // 2], where[1::3, n // 2], where[2::3, -1] = True, False, False
    where[1::3, 0] = True
    compare_rows(name, dtype, x, normal(rng, x.shape, dtype), where)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, -1.5, 2.0, 0.0])
@pytest.mark.parametrize("masked", [False, True])
def test_special_values_of_long_rows(name, kind, scale, masked):
    """Blocks share rows and work on several of them. Adjacent rows are aligned differently."""
    n, dtype = 300_007, jnp.dtype(kind)
    rows = special_rows(n, dtype)
    # If the scale is not a power of two, the product with a large element is rounded, and results
    # are off by as much. These rows are left out.
    exact = math.frexp(scale)[0] in (0, 0.5)
    x = np.stack([row for what, row in rows.items() if exact or "offset" not in what])
    rng = np.random.default_rng(5)
    where = None
    if masked:
        where = random_mask(rng, x.shape, 0.5)
        where[::3, : n // 3] = False
        where[1::5] = False
    compare_rows(name, dtype, x, normal(rng, x.shape, dtype), where, scale, ulps=16)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [300, 20_001])
@pytest.mark.parametrize("masked", [False, True])
def test_special_values_along_axis_0(name, kind, n, masked):
    """Adjacent elements, of which vectors are read, belong to different rows."""
    dtype = jnp.dtype(kind)
    rows = [*special_rows(n, dtype).values()]
    x = np.stack([*rows, *rows][:32])
    rng = np.random.default_rng(8)
    where = None
    if masked:
        where = random_mask(rng, x.shape, 0.5)
        where[1::5] = False
    compare_rows(name, dtype, x, normal(rng, x.shape, dtype), where, ulps=16, axis=0)


@pytest.mark.parametrize("shape", [(2, 1000), (2, 40_001), (2, 300_001), (20_001, 3), (300_001, 2)])
@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_a_part_of_a_row_that_the_scale_makes_minus_infinity(name, shape, scale):
    """Such an element adds nothing; the rest of the row determines the result."""
    axis = int(shape[0] < shape[1])
    x = normal(np.random.default_rng(6), shape, np.float32)
    np.moveaxis(x, axis, 0)[shape[axis] // 2 :] = -np.sign(scale) * np.finfo(np.float32).max
    y = OPS[name](x, axis=axis, scale=scale)
    np.testing.assert_allclose(y, reference(name, x, axis, scale=scale), rtol=1e-4, atol=1e-9)
    assert not np.isnan(y).any()


def special_fill(rng, shape, dtype):
    values = np.asarray([np.nan, np.inf, -np.inf, jnp.finfo(dtype).max, 0.0]).astype(dtype)
    return rng.choice(values, size=shape)


SHARED_MASKS = [(6, 37), (1, 37), (6, 1), (37,)]


@pytest.mark.parametrize("mask", SHARED_MASKS, ids=str)
@pytest.mark.parametrize("axis", [1, 0])
def test_what_is_masked_does_not_matter(name, dtype, mask, axis):
    """Masked elements of x and dy change no bit elsewhere, and their gradient is 0."""
    rng = np.random.default_rng(4)
    x, dy = (normal(rng, (6, 37), dtype) for _ in range(2))
    where = random_mask(rng, mask, 0.6)
    keep = np.broadcast_to(where, x.shape)
    other = np.where(keep, x, special_fill(rng, x.shape, dtype))
    other_dy = np.where(keep, dy, special_fill(rng, x.shape, dtype))
    assert (~np.isfinite(other_dy)).any()
    fn = jax.jit(value_and_gradient(functools.partial(OPS[name], where=where, axis=axis)))
    y, dx = map(np.asarray, fn(x, dy))
    assert_matches(fn(other, other_dy), (y, dx))
    outside = np.asarray(-np.inf if name == "log_softmax" else 0, dtype)
    assert_bitwise_equal(y[~keep], np.broadcast_to(outside, y[~keep].shape))
    assert_bitwise_equal(dx[~keep], np.zeros_like(dx[~keep]))
    assert np.isfinite(dx).all() and (y[keep] != outside).all()


@pytest.mark.parametrize("mode", ["native", "xla"])
def test_fully_masked_rows(name, dtype, mode):
    """The result is 0 (log_softmax: -inf), and the gradient is 0 for any cotangent."""
    rng = np.random.default_rng(5)
    x, dy = normal(rng, (4, 3, 19), dtype), special_fill(rng, (4, 3, 19), dtype)
    where = np.array([True, False, True, False])[:, None, None]
    dy[~np.broadcast_to(where, dy.shape)[..., 0]] = 1.0
    dy[0], dy[2] = 1.0, 2.0
    with implementation(mode):
        y, dx = jax.jit(value_and_gradient(functools.partial(OPS[name], where=where)))(x, dy)
    y, dx = np.asarray(y), np.asarray(dx)
    outside = np.asarray(-np.inf if name == "log_softmax" else 0, dtype)
    assert_bitwise_equal(y[1::2], np.broadcast_to(outside, y[1::2].shape))
    assert_bitwise_equal(dx[1::2], np.zeros_like(dx[1::2]))
    assert np.isfinite(y[::2]).all() and np.isfinite(dx[::2]).all()


def test_fully_masked_rows_under_special_cotangents(name, dtype):
    rng = np.random.default_rng(6)
    x, dy = normal(rng, (4, 19), dtype), special_fill(rng, (4, 19), dtype)
    for where in (False, np.zeros(19, bool), np.zeros((4, 1), bool), np.zeros((4, 19), bool)):
        fn = functools.partial(OPS[name], where=where)
        dx = jax.jit(value_and_gradient(fn))(x, dy)[1]
        assert_bitwise_equal(dx, np.zeros_like(x))


def test_a_result_of_zero_has_no_gradient_beside_a_mask():
    """softmax keeps no mask: an element that looks masked in the result counts as masked."""
    x = np.array([[0.0, -1e4, 1.0, 2.0]], np.float32)
    dy = np.array([[1.0, np.nan, 2.0, np.inf]], np.float32)
    where = np.array([True, True, True, False])
    dx = jax.vjp(lambda x: fo.softmax(x, where=where), x)[1](dy)[0]
    assert np.isfinite(np.asarray(dx)).all() and not dx[0, 1] and not dx[0, 3]
    dx = jax.vjp(fo.softmax, x)[1](dy)[0]
    assert np.isnan(np.asarray(dx)).all()


def test_offsets_change_nothing(name, dtype):
    """A row plus a power of two has the same result, bit by bit, as the row."""
    rng = np.random.default_rng(7)
    x = (rng.integers(-16, 16, (5, 100)) / 4).astype(dtype)
    y = OPS[name](x)
    for offset in (8.0, -16.0):
        assert_bitwise_equal(OPS[name](x + np.asarray(offset, dtype)), y)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1.0, -1.0, 1e-3, 30.0, 1e30, -1e30, np.inf, np.nan])
def test_scales(name, scale):
    rng = np.random.default_rng(8)
    x, dy = (normal(rng, (5, 41), np.float32) for _ in range(2))
    x[1, 3], x[2, 4] = 0.0, 1e3

    def with_scale(fn):
        return value_and_gradient(functools.partial(fn, scale=scale))

    got = jax.jit(with_scale(OPS[name]))(x, dy)
    # Not compiled: XLA fuses the product and the difference after it into one operation, and then
    # the largest exponent is not 0.
    want = with_scale(functools.partial(reference, name))(x, dy)
    for mine, theirs in zip(got, want, strict=True):
        size = max(1, abs(scale)) if np.isfinite(scale) else 1
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6 * size)


@pytest.mark.parametrize("number", [2, np.float32(0.5), np.int8(-2), np.float64(0.1)], ids=repr)
def test_scales_of_any_number_type(name, number):
    x = normal(np.random.default_rng(9), (3, 5), np.float32)
    got = OPS[name](x, scale=number)
    assert got.dtype == np.float32
    assert_bitwise_equal(got, OPS[name](x, scale=float(number)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_every_value_of_two_bytes(name, kind):
    """All 65536 values, each in a row with one other element."""
    values = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(kind))
    x = np.stack([values, np.zeros_like(values)], 1)
    y = np.asarray(OPS[name](x)).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = exact_value(name, np.nan_to_num(x, nan=0, posinf=0, neginf=0), 1, None, 1.0)[0]
    plain = np.isfinite(x.astype(np.float64)).all(1)
    assert_within(
        np.asarray(OPS[name](x))[plain], exact[plain], 8 * np.abs(exact[plain]) + 8, "values"
    )
    assert np.isnan(y[np.isnan(x[:, 0].astype(np.float64))]).all()


# Determinism and implementations ------------------------------------------------------------------


@pytest.mark.parametrize("mask", [(5, 1, 1, 9), (9,), (4, 1), (5, 3, 4, 9)], ids=str)
@pytest.mark.parametrize("axis", [-1, 1])
def test_a_mask_is_kept_in_its_own_shape(mask, axis):
    x = normal(np.random.default_rng(15), (5, 3, 4, 9), np.float32)
    fn = functools.partial(fo.log_softmax, axis=axis, scale=0.5, where=np.ones(mask, bool))
    wanted = [("bool", (1,) * (4 - len(mask)) + mask), ("float32", x.shape)]
    assert residuals(fn, x) == residuals(jax.jit(fn), x) == wanted


X = normal(np.random.default_rng(12), (2, 3, 4, 8), np.float32)
MASK = np.array([True] * 5 + [False] * 3)


# Residuals ----------------------------------------------------------------------------------------


# vmap and derivatives -----------------------------------------------------------------------------


def assert_mask_is_not_expanded(fn, x, where):
    """No boolean array in the program, traced or compiled, has more elements than the mask has."""
    traced = jax.jit(fn).trace(x, where)
    for eqn in equations(traced.jaxpr.jaxpr):
        for var in eqn.outvars:
            large = var.aval.dtype == bool and var.aval.size > where.size
            assert not large, f"{eqn.primitive} makes {var.aval} of a mask of shape {where.shape}"
    sizes = [
        math.prod(map(int, filter(None, dims.split(","))))
        for dims in re.findall(r"pred\[([\d,]*)\]", traced.lower().compile().as_text())
    ]
    assert sizes and max(sizes) <= where.size


def of_mask(name, backward):
    """The op, or its value and gradient, as a function of x and the mask."""

    def fn(x, w):
        op = functools.partial(OPS[name], where=w)
        return value_and_gradient(op)(x, x) if backward else op(x)

    return fn


UNEXPANDED = {
    "plain": lambda f: f,
    "x mapped": lambda f: jax.vmap(f, (0, None)),
    "x mapped at the end": lambda f: jax.vmap(f, (3, None), 1),
    "x mapped twice": lambda f: jax.vmap(jax.vmap(f, (0, None)), (1, None)),
    "in a scan": lambda f: lambda x, w: jax.lax.scan(lambda c, x: (c, f(x, w)), 0, x)[1],
}


@pytest.mark.jax
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("transform", UNEXPANDED)
def test_a_mask_is_never_expanded(name, transform, backward):
    x = normal(np.random.default_rng(17), (6, 5, 3, 7), np.float32)
    where = np.ones((5, 1, 7) if "twice" not in transform else (1, 7), bool)
    if "end" in transform:
        where = np.ones((6, 1, 3), bool)

    assert_mask_is_not_expanded(UNEXPANDED[transform](of_mask(name, backward)), x, where)


@pytest.mark.jax
@pytest.mark.parametrize("backward", [False, True])
def test_a_mapped_mask_is_not_expanded(name, backward):
    """Only the mask is mapped. x is copied for each example, and the mask is not expanded."""
    x = normal(np.random.default_rng(18), (5, 3, 7), np.float32)
    where = np.ones((4, 5, 1, 7), bool)

    fn = of_mask(name, backward)
    assert_mask_is_not_expanded(jax.vmap(fn, (None, 0)), x, where)
    assert_mask_is_not_expanded(jax.vmap(fn, (None, 1), -1), x, np.moveaxis(where, 0, 1))


# Sharding -----------------------------------------------------------------------------------------

CLOSE = dict(rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "masking"), [(1024, True), (8, True), (2, False)])
def test_a_mask_that_would_grow_leaves_the_work_to_xla(name, rows, masking):
    """With auto axes it has a copy per device along the axes in which it is broadcast."""
    mesh = mesh_for(AxisType.Auto)
    rng = np.random.default_rng(23)
    x = normal(rng, (8, rows, 40), np.float32)
    where = random_mask(rng, (40,), 0.8)
    run = lambda op: lambda x, dy: value_and_gradient(lambda x: op(x, where=where))(x, dy)  # noqa: E731
    got, text = over_mesh(mesh, run(OPS[name]), (x, x), (P("a"), P("a")))
    assert_close(got, jax.jit(run(functools.partial(reference, name)))(x, x), **CLOSE)
    assert_collectives(text, 0)
    if mesh.size == 8:  # the copies of the mask have 8 * 8 * 40 bytes, x has 8 * rows * 40 * 4
        # The backward of softmax takes no mask.
        backward = ["softmax_bwd"] * (masking or name == "softmax")
        assert targets(text) == ["softmax"] * masking + backward


@pytest.mark.jax
@over_kinds
def test_a_mask_sharded_otherwise_than_x(name, axis_type):
    """With a replicated mask, the result is correct and has the layout of x."""
    mesh = mesh_for(axis_type)
    rng = np.random.default_rng(24)
    x = normal(rng, (16, 8, 40), np.float32)
    where = random_mask(rng, (16, 8, 40), 0.8)
    run = lambda op: lambda x, w: value_and_gradient(lambda x: op(x, where=w))(x, x)  # noqa: E731
    want = jax.jit(run(functools.partial(reference, name)))(x, where)
    for of_x, of_mask in ((P("a"), P()), (P(), P())):
        got, _ = over_mesh(mesh, run(OPS[name]), (x, where), (of_x, of_mask))
        assert_close(got, want, **CLOSE)
        for result in got:
            assert_layout("a result", result, NamedSharding(mesh, of_x))


# Axes, sizes, types -------------------------------------------------------------------------------


SEVERAL = [None, (), (0, 1), (-1, -2), (2, 0), (1,), [0, 1, 2, 3], np.int64(2), (1, 2, 3)]


@pytest.mark.parametrize("mask", [None, (3, 4, 5, 2), (1, 1, 1, 2), (4, 1, 1), ()], ids=str)
def test_several_axes(name, mask):
    """The results over all of these axes together sum to 1."""
    rng = np.random.default_rng(26)
    x, dy = (normal(rng, (3, 4, 5, 2), np.float32) for _ in range(2))
    where = None if mask is None else random_mask(rng, mask, 0.7 if mask else 1.1)

    def run(op, axes):
        def of_each(x, dy):
            return [
                value_and_gradient(functools.partial(op, axis=a, where=where, scale=2))(x, dy)
                for a in axes
            ]

        return jax.jit(of_each)(x, dy)

    several = SEVERAL if mask is None else SEVERAL[:4]
    axes = [tuple(a) if isinstance(a, (tuple, list)) else a for a in several]
    axes = [tuple(range(4)) if a is None else a for a in axes]
    got, want = run(OPS[name], several), run(functools.partial(reference, name), axes)
    for axis, mine, theirs in zip(axes, got, want, strict=True):
        assert_close(mine, theirs, **CLOSE)
        if name == "softmax":
            total = np.asarray(mine[0]).sum(axis)
            assert (np.isclose(total, 1, rtol=1e-5) | (total == 0)).all()


def test_neighbouring_axes_are_one_kernel(name):
    assert targets_of(functools.partial(OPS[name], axis=(1, 2)), X) == ["softmax"]
    assert targets_of(functools.partial(OPS[name], axis=None), X) == ["softmax"]
    assert targets_of(functools.partial(OPS[name], axis=(0, 2)), X) == []


@pytest.mark.jax
def test_several_axes_of_explicit_meshes(name):
    """Axes are not merged, because that could cut across shards."""
    mesh = mesh_for(AxisType.Explicit)
    x = normal(np.random.default_rng(27), (16, 4, 5), np.float32)
    for axis in ((0, 1), (1, 2), None):
        fn = functools.partial(OPS[name], axis=axis)
        (got,), _ = over_mesh(mesh, lambda x, fn=fn: (fn(x),), (x,), (P("a"),))
        want = reference(name, x, axis if axis is not None else (0, 1, 2))
        assert_close([got], [want], **CLOSE)


@pytest.mark.parametrize("mode", ["native", "auto", "xla"])
def test_numbers(name, mode):
    """A number has no axes, so axis=None names none of them."""
    with fo.use_implementation(mode):
        for number in (2.5, np.float32(2.5), jnp.float32(2.5)):
            got = OPS[name](number, axis=None)
            want = reference(name, number, ())
            assert_bitwise_equal(got, want)
            assert got.weak_type == want.weak_type
            assert float(got) == (0.0 if name == "log_softmax" else 1.0)
        got = OPS[name](2.5, axis=None, where=False)
        assert float(got) == (-np.inf if name == "log_softmax" else 0.0)


# What is refused ----------------------------------------------------------------------------------

REFUSED = {
    # x, keyword arguments, error, words of the message
    "where of integers": (X, {"where": np.ones(8, int)}, TypeError, ["where", "int", "boolean"]),
    "where of floats": (X, {"where": np.ones(8, np.float32)}, TypeError, ["where", "float32"]),
    "where a list": (X, {"where": [True] * 8}, TypeError, ["where", "list", "array"]),
    "where a text": (X, {"where": "yes"}, TypeError, ["where", "str", "array"]),
    "where too long": (
        X,
        {"where": np.ones(9, bool)},
        ValueError,
        ["where", "(9,)", "(2, 3, 4, 8)"],
    ),
    "where of another shape": (
        X,
        {"where": np.ones((3, 2, 1, 1), bool)},
        ValueError,
        ["where", "(3, 2, 1, 1)", "(2, 3, 4, 8)"],
    ),
    "where of more dimensions": (
        X,
        {"where": np.ones((1, 2, 3, 4, 8), bool)},
        ValueError,
        ["where", "(1, 2, 3, 4, 8)", "(2, 3, 4, 8)"],
    ),
    "where larger than x": (
        X[:, :1],
        {"where": np.ones((3, 1, 1), bool)},
        ValueError,
        ["where", "(3, 1, 1)", "(2, 1, 4, 8)"],
    ),
    "empty where": (X, {"where": np.ones((0,), bool)}, ValueError, ["where", "(0,)"]),
    "axis too large": (X, {"axis": 4}, ValueError, ["axis is 4", "(2, 3, 4, 8)", "-4 to 3"]),
    "axis too small": (X, {"axis": -5}, ValueError, ["axis is -5", "(2, 3, 4, 8)", "-4 to 3"]),
    "an axis too large": (X, {"axis": (0, 7)}, ValueError, ["axis is (0, 7)", "-4 to 3"]),
    "axis twice": (X, {"axis": (1, 1)}, ValueError, ["axis is (1, 1)", "twice"]),
    "axis twice, from the end": (X, {"axis": (3, -1)}, ValueError, ["axis is (3, -1)", "twice"]),
    "axis a float": (X, {"axis": 1.0}, TypeError, ["axis is 1.0", "an integer"]),
    "axis a text": (X, {"axis": "last"}, TypeError, ["axis is 'last'", "an integer"]),
    "axes of floats": (X, {"axis": (0, 1.5)}, TypeError, ["axis is (0, 1.5)", "an integer"]),
    "axis an array": (X, {"axis": np.ones(2, int)}, TypeError, ["axis is", "an integer"]),
    "scale an array": (X, {"scale": np.ones(8)}, TypeError, ["scale", "ndarray", "number"]),
    "scale a jax.Array": (X, {"scale": jnp.float32(2)}, TypeError, ["scale", "number", "multiply"]),
    "scale a text": (X, {"scale": "2"}, TypeError, ["scale", "str", "number"]),
    "scale None": (X, {"scale": None}, TypeError, ["scale", "scale is None", "number"]),
    "scale a bool": (X, {"scale": True}, TypeError, ["scale", "bool", "number"]),
    "scale complex": (X, {"scale": 1j}, TypeError, ["scale", "complex", "number"]),
    "scale a complex of NumPy": (X, {"scale": np.complex64(1)}, TypeError, ["scale", "complex"]),
    "integers": (
        X.astype(np.int32),
        {},
        TypeError,
        ["x has dtype int32", "float32", "(2, 3, 4, 8)"],
    ),
    "booleans": (X > 0, {}, TypeError, ["x has dtype bool", "float32"]),
    "complex": (X * 1j, {}, TypeError, ["x has dtype complex64", "float32"]),
    "eight bits": (X.astype(jnp.float8_e4m3fn), {}, TypeError, ["x has dtype float8", "float32"]),
    "an integer": (3, {"axis": None}, TypeError, ["x has dtype int32"]),
    "no dimension": (np.float32(1), {}, ValueError, ["axis is -1", "x has no axes"]),
    "None": (None, {}, TypeError, ["x is None", "array"]),
    "a list": ([1.0, 2.0], {}, TypeError, ["x is of type list", "array"]),
    "a text": ("text", {}, TypeError, ["x is of type str", "array"]),
    "keys": (jax.random.key(0), {"axis": None}, TypeError, ["x has dtype key<"]),
}


@pytest.mark.parametrize("mode", ["native", "xla"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(name, what, mode):
    """The message names the op, the argument, what was given, and what is accepted."""
    x, kwargs, error, words = REFUSED[what]
    with fo.use_implementation(mode), pytest.raises(error) as raised:
        OPS[name](x, **kwargs)
    message = str(raised.value)
    assert not [word for word in (f"{name}:", *words) if word not in message], message


def test_a_traced_scale_is_refused(name):
    with pytest.raises(TypeError, match="scale is traced"):
        jax.jit(lambda x, s: OPS[name](x, scale=s))(X, 2.0)


def test_axis_and_mask_may_be_given_by_position(name):
    np.testing.assert_array_equal(OPS[name](X, 0), OPS[name](X, axis=0))
    np.testing.assert_array_equal(OPS[name](X, -1, MASK), OPS[name](X, where=MASK))
    with pytest.raises(TypeError):
        OPS[name](X, -1, MASK, 2.0)
    with pytest.raises(TypeError):
        OPS[name]()


def test_refused_under_jit_before_anything_runs(name):
    shape = jax.ShapeDtypeStruct((2, 3), np.float32)
    with pytest.raises(ValueError, match="axis is 2"):
        jax.eval_shape(functools.partial(OPS[name], axis=2), shape)
    with pytest.raises(ValueError, match=r"where has shape \(2,\)"):
        jax.eval_shape(
            lambda x, w: OPS[name](x, where=w), shape, jax.ShapeDtypeStruct((2,), np.bool_)
        )


def test_a_mask_has_no_gradient(name):
    with pytest.raises(TypeError, match="bool"):
        jax.grad(lambda w: OPS[name](X, where=w).sum())(MASK)
    gradient = jax.grad(lambda w: OPS[name](X, where=w).sum(), allow_int=True)(MASK)
    assert gradient.dtype == jax.dtypes.float0
