"""`lerp`: transformations, shapes, special weights and values, residuals."""

import functools
import itertools
import math
import re
import zlib

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
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
from harness.compat import make_mesh, x64
from harness.numerics import assert_within, normal, stacked, unbroadcast
from harness.programs import targets_of
from harness.properties import settings
from harness.sharding import KINDS, assert_layout, collectives, device_count
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = pytest.mark.usefixtures("native")

MODES = ("native", "auto", "xla")


def reference(start, end, weight):
    """The formula in jax.numpy. Its value differs from the op's only by rounding."""
    dtype = jnp.result_type(start)
    wide = jnp.promote_types(dtype, jnp.float32)
    s, e, w = (jnp.asarray(x).astype(wide) for x in (start, end, weight))
    return (s + w * (e - s)).astype(dtype)


def draws(*shapes):
    def make(rng, dtype):
        return tuple(normal(rng, shape, dtype) for shape in shapes)

    return make


def case(name, shapes, sharded=None, **more):
    make_sharded = {} if sharded is None else {"make_sharded_args": draws(*sharded)}
    return Case(
        name=name,
        fn=fo.lerp,
        reference=reference,
        make_args=draws(*shapes),
        tolerance=Tolerance(ulps=48.0, lone=4.0),  # sums in which terms cancel
        # With auto mesh axes XLA may gather an operand if only another one is mapped.
        shards_under_vmap=False,
        **make_sharded,
        **more,
    )


FULL = case(
    "full",
    [(3, 5)] * 3,
    [(16, 24)] * 3,
    shardings=(Sharding("first", (0, 0, 0), (0,)), Sharding("last", (1, 1, 1), (1,))),
    symbolic=("a, b",) * 3,
)

SCALAR_WEIGHT = case(
    "scalar_weight",
    [(3, 5), (3, 5), ()],
    [(16, 24), (16, 24), ()],
    shardings=(
        Sharding("first", (0, 0, None), (0,), gradient_all_reduces=1),
        Sharding("last", (1, 1, None), (1,), gradient_all_reduces=1),
    ),
    symbolic=("a, b", "a, b", ""),
    modes=("native",),
)

# Each operand is broadcast along another dimension.
CROSSED = case(
    "crossed",
    [(2, 1, 3), (1, 4, 3), (2, 4, 1)],
    [(16, 1, 8), (1, 32, 8), (16, 32, 1)],
    shardings=(
        Sharding("b", (0, None, 0), (0,), gradient_all_reduces=1),
        Sharding("s", (None, 1, 1), (1,), gradient_all_reduces=1),
        Sharding("n", (2, 2, None), (2,), gradient_all_reduces=1),
    ),
    symbolic=("a, 1, b", "1, c, b", "a, c, 1"),
    modes=("native",),
    dtypes=("float32", "bfloat16"),
)

# Noise levels of a diffusion model: one weight for each image.
PER_EXAMPLE = case(
    "per_example",
    [(2, 3, 4), (2, 3, 4), (2, 1, 1)],
    [(16, 8, 8), (16, 8, 8), (16, 1, 1)],
    shardings=(
        Sharding("batch", (0, 0, 0), (0,)),
        Sharding("last", (2, 2, None), (2,), gradient_all_reduces=1),
    ),
    dtypes=("bfloat16", "float32"),
    modes=("native",),
)

basic = functools.partial(case, basic_only=True, modes=("native",), dtypes=("float32",))
OUTER = basic("outer", [(1, 3, 1), (2, 1, 1), (4,)])
NUMBER_AND_ARRAYS = basic("number_and_arrays", [(), (3, 4), (4,)])
SCALARS = basic("scalars", [(), (), ()])
LONG = basic("long", [(3, 1025), (1025,), (3, 1)])


@checks(FULL, OUTER, NUMBER_AND_ARRAYS, SCALARS, LONG)
def test_harness(check):
    check()


@pytest.mark.slow
@checks(SCALAR_WEIGHT, CROSSED, PER_EXAMPLE)
def test_harness_of_variants(check):
    check()


def value_and_gradients(fn, wanted=(0, 1, 2)):
    def run(dy, *args):
        y, pullback = jax.vjp(
            lambda *chosen: fn(
                *(dict(zip(wanted, chosen, strict=True)).get(i, a) for i, a in enumerate(args))
            ),
            *(args[i] for i in wanted),
        )
        return y, pullback(dy)

    return run


# Shapes -------------------------------------------------------------------------------------------


def check_shapes(dtype, examples, wanted=(0, 1, 2)):
    """Value and gradients of many triples of shapes, in one program, against NumPy in float64."""
    rng = np.random.default_rng(zlib.crc32(str(examples).encode()))
    values = []
    for shapes in examples:
        args = [normal(rng, shape, dtype) for shape in shapes]
        values.append((normal(rng, np.broadcast_shapes(*shapes), dtype), *args))
    run = jax.jit(lambda values: [value_and_gradients(fo.lerp, wanted)(*v) for v in values])
    for shapes, (dy, *args), (y, grads) in zip(examples, values, run(values), strict=True):
        what = f"{dtype}{shapes}"
        s, e, w = (a.astype(np.float64) for a in args)
        dy = dy.astype(np.float64)
        assert y.dtype == dtype and y.shape == dy.shape, what
        size = np.abs(s) + np.abs(e) + np.abs(w) * (np.abs(s) + np.abs(e))
        assert_within(y, s + w * (e - s), 4 * np.broadcast_to(size, dy.shape), what)
        exact = (dy * (1 - w), dy * w, dy * (e - s))
        large = (np.abs(dy) * (1 + np.abs(w)), np.abs(dy * w), np.abs(dy) * (np.abs(e) + np.abs(s)))
        for i, g in zip(wanted, grads, strict=True):
            assert g.dtype == dtype and g.shape == args[i].shape, what
            total = unbroadcast(np.broadcast_to(exact[i], dy.shape), g.shape)
            unit = unbroadcast(np.abs(np.broadcast_to(large[i], dy.shape)), g.shape)
            terms = dy.size / max(1, g.size)
            assert_within(g, total, (4 + math.sqrt(terms)) * unit, f"gradient {i} of {what}")


N = (1, 2, 3, 7, 8, 9, 31, 33, 64, 127, 1000, 1025)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_lengths(kind):
    examples = []
    for n in N:
        examples += [((3, n), (3, n), (3, n)), ((3, n), (n,), (3, 1)), ((n, 1), (3,), (n, 3))]
    check_shapes(jnp.dtype(kind), examples)


@pytest.mark.slow
@pytest.mark.parametrize("n", [*N, 4097, 40_001])
def test_lengths_every_dtype(dtype, n):
    full, column, row = (5, n), (5, 1), (n,)
    some = (full, column, row, (1, 1))
    check_shapes(dtype, [(a, b, c) for a in some for b in some for c in some])


@pytest.mark.parametrize(
    "shapes",
    [
        ((70, 3000), (70, 3000), ()),
        ((70, 3000), (3000,), (70, 1)),
        ((3, 1, 5, 1, 700), (1, 4, 1, 6, 1), (3, 4, 5, 6, 1)),
        ((), (), (40_001,)),
        ((64, 1, 65), (1, 33, 65), (64, 33, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_large_sums(kind, shapes):
    check_shapes(jnp.dtype(kind), [shapes])


# Sums over several boxes of the CUDA kernels. They run over columns, slots and rows, one or two of
# them. A row takes a warp or shares one, and some rows are not a multiple of 16 bytes.
MANY_BOXES = [
    ((1, 512), (700, 512), (700, 1)),
    ((1, 515), (700, 515), (700, 1)),
    ((1, 24), (9000, 24), (9000, 1)),
    ((40, 1, 512), (1, 33, 512), (40, 33, 1)),
    ((40, 1, 96), (1, 70, 96), (40, 70, 1)),
    ((300, 1, 257), (1, 5, 257), (300, 5, 1)),
    ((4, 1, 4, 1, 4, 1, 64), (1, 8, 1, 8, 1, 8, 1), (4, 8, 4, 8, 4, 8, 64)),
    ((60, 1, 1024), (60, 6, 1024), (1, 1, 1024)),
    ((1, 300_000), (1, 1), (1, 300_000)),
    ((16, 1), (16, 20_000), (1, 1)),
    ((100_000, 3), (1, 3), (100_000, 1)),
]


@pytest.mark.parametrize("shapes", MANY_BOXES, ids=str)
def test_many_boxes(dtype, shapes):
    check_shapes(dtype, [shapes])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_some_gradients(wanted):
    shapes = [
        ((3, 5), (3, 5), (3, 5)),
        ((3, 5), (5,), (3, 1)),
        ((3, 1), (5,), ()),
        ((), (3, 5), ()),
    ]
    check_shapes(jnp.dtype(np.float32), shapes, wanted)


@st.composite
def triples(draw):
    rank = draw(st.integers(0, 8))
    size = st.one_of(st.integers(1, 4), st.sampled_from([1, 5, 9, 16, 33]))
    shape = [draw(size) for _ in range(rank)]
    while math.prod(shape) > 4000:
        shape[int(np.argmax(shape))] //= 2
    found = []
    for _ in range(3):
        own = [n if draw(st.booleans()) else 1 for n in shape]
        found.append(tuple(own[draw(st.integers(0, rank)) :]))
    return tuple(found)


def any_shapes(examples, dtypes=(np.float32, jnp.bfloat16)):
    @settings(examples)
    @hypothesis.given(st.lists(triples(), min_size=8, max_size=8))
    def check(drawn):
        for kind in dtypes:
            check_shapes(jnp.dtype(kind), drawn)

    check()


def test_any_shapes():
    any_shapes(4)


@pytest.mark.slow
def test_more_shapes():
    any_shapes(100)


@pytest.mark.slow
def test_more_shapes_in_float64():
    with x64():
        any_shapes(20, (np.float64, np.float16))


@pytest.mark.parametrize("rank", [15, 16, 17, 20])
def test_high_rank(rank):
    """The kernels take up to 16 dimensions. More take the reference."""
    shape = (2,) + (1, 2) * 4 + (1,) * (rank - 10) + (3,)
    start = tuple(n if i % 4 < 2 else 1 for i, n in enumerate(shape))
    end = tuple(n if i % 3 < 2 else 1 for i, n in enumerate(shape))
    check_shapes(jnp.dtype(np.float32), [(start, end, shape), (start, shape, ()), (shape,) * 3])


def test_an_operand_that_alternates_along_every_dimension():
    """No two adjacent dimensions are broadcast alike, so none of the 16 can be merged."""
    shape = (2,) * 13 + (1, 3, 2)
    odd, even = (tuple(n if i % 2 == k else 1 for i, n in enumerate(shape)) for k in (0, 1))
    check_shapes(jnp.dtype(np.float32), [(odd, even, shape), (odd, even, ())])


@pytest.mark.parametrize(
    "shapes", [((0,), (0,), ()), ((3, 0), (0,), (3, 1)), ((0, 5), (5,), (5,))], ids=str
)
def test_no_elements(shapes):
    args = [np.ones(shape, np.float32) for shape in shapes]
    dy = np.ones(np.broadcast_shapes(*shapes), np.float32)
    got = jax.jit(value_and_gradients(fo.lerp))(dy, *args)
    want = jax.jit(value_and_gradients(reference))(dy, *args)
    assert_matches(got, want)
    got = jax.vmap(value_and_gradients(fo.lerp), (0, None, None, 0))(
        dy[None][:0], *args[:2], args[2][None][:0]
    )
    assert got[0].shape == (0, *dy.shape) and got[1][0].shape == (0, *args[0].shape)


# Weights and special values -----------------------------------------------------------------------


def specials(dtype):
    info = jnp.finfo(dtype)
    values = [0.0, 1.0, 1e-3, 3.0, float(info.max) / 4, float(info.smallest_normal)]
    return np.array([*values, *(-v for v in values)]).astype(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jitted", [False, True])
def test_ends_are_met_to_the_last_bit(dtype, mode, jitted):
    """For any other operand, -0.0 too. The weight is a number, a scalar array, or a full one."""
    values = specials(dtype)
    start, end = (a.reshape(-1) for a in np.meshgrid(values, values))
    rng = np.random.default_rng(0)
    start = np.concatenate([start, normal(rng, (1000,), dtype)])
    end = np.concatenate([end, normal(rng, (1000,), dtype)])
    run = jax.jit(fo.lerp) if jitted else fo.lerp
    with implementation(mode):
        for number, expected in ((0.0, start), (1.0, end), (-0.0, start)):
            for weight in (
                number,
                np.asarray(number, dtype),
                np.full(start.shape, number).astype(dtype),
            ):
                assert_bitwise_equal(run(start, end, weight), expected)


def test_the_formula():
    """Bitwise equal to the documented formula for inputs where each step is exact."""
    rng = np.random.default_rng(1)
    start, end = (rng.integers(-8, 8, 100).astype(np.float32) for _ in range(2))
    for weight in (-1.0, 0.25, 0.5, 0.75, 2.0):
        got = fo.lerp(start, end, weight)
        np.testing.assert_array_equal(got, start + np.float32(weight) * (end - start))


def test_results_are_between_the_ends(dtype):
    """Near a weight of 1 the op starts from `end`, and passes it only by rounding."""
    rng = np.random.default_rng(2)
    start, end = normal(rng, (5000,), dtype), normal(rng, (5000,), dtype)
    weight = np.sort(rng.random(5000)).astype(dtype)
    y = np.asarray(fo.lerp(start, end, weight)).astype(np.float64)
    low, high = np.minimum(start, end).astype(np.float64), np.maximum(start, end).astype(np.float64)
    slack = 2 * float(jnp.finfo(dtype).eps) * np.maximum(np.abs(low), np.abs(high))
    assert (y >= low - slack).all() and (y <= high + slack).all()


def test_nan_and_infinity(dtype):
    """Values and gradients have them where the formula has them."""
    values = np.array([0.0, 1.0, -2.0, np.inf, -np.inf, np.nan]).astype(dtype)
    weights = np.array([0.0, 1.0, 0.25, 0.75, -1.0, np.inf, np.nan]).astype(dtype)
    start, end, weight = (a.reshape(-1) for a in np.meshgrid(values, values, weights))
    # A weight of 0 or 1 gives start or end. With a finite end - start, so does the formula.
    for dy in (np.ones_like(start), np.full_like(start, np.inf), np.full_like(start, -0.0)):
        got = jax.jit(value_and_gradients(fo.lerp))(dy, start, end, weight)
        want = jax.jit(value_and_gradients(reference))(dy, start, end, weight)
        with implementation("xla"):
            plain = jax.jit(value_and_gradients(fo.lerp))(dy, start, end, weight)
        # The gradient of start is dy - w * dy in jax.numpy and the reference, (1 - w) * dy in the
        # kernel. They differ if dy is infinite.
        got, want, plain = map(jax.tree.leaves, (got, want, plain))
        same = [True] * 4 if np.isfinite(dy).all() else [True, False, True, True]
        pairs = [
            *zip(plain, want, strict=True),
            *itertools.compress(zip(got, want, strict=True), same),
        ]
        for pair in pairs:
            mine, theirs = (np.asarray(a).astype(np.float64) for a in pair)
            np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
            np.testing.assert_allclose(mine, theirs, rtol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_a_tangent_of_one_operand_has_no_nan_of_the_others(mode):
    """An operand without a tangent adds nothing to the result, not even infinity times zero."""
    start, end, weight = np.float32([1.0, 2.0]), np.float32([np.inf, 3.0]), np.float32([0.5, 0.5])
    with implementation(mode):
        dots = jax.jvp(lambda s: fo.lerp(s, end, weight), (start,), (np.ones_like(start),))[1]
    np.testing.assert_array_equal(dots, [0.5, 0.5])


# Numbers and errors -------------------------------------------------------------------------------


def test_numbers():
    x = np.float32([1.0, 2.0])
    for args, expected in (
        ((0, x, 0.5), x / 2),
        ((x, 0.0, 0.25), x * 0.75),
        ((x, 3, 1), np.float32([3, 3])),
        ((0.0, 1, x), x),
        ((x, x + 1, np.float32(0.5)), x + 0.5),
        ((x, x + 1, np.float32([0.5])), x + 0.5),
    ):
        got = fo.lerp(*args)
        assert got.dtype == np.float32 and not got.weak_type
        np.testing.assert_array_equal(got, expected)
    alone = fo.lerp(1.0, 2, 0.5)
    assert alone.shape == () and not alone.weak_type and alone == 1.5
    half = fo.lerp(x.astype(jnp.bfloat16), 0.0, 0.5)
    assert half.dtype == jnp.bfloat16


def test_gradients_of_numbers():
    x = np.float32([1.0, 2.0, 4.0])
    grads = jax.grad(lambda s, e, w: fo.lerp(s, e, w).sum(), (0, 1, 2))(1.0, x, 0.25)
    np.testing.assert_allclose(grads[0], 3 * 0.75)
    np.testing.assert_allclose(grads[1], np.full(3, 0.25))
    np.testing.assert_allclose(grads[2], (x - 1).sum())


@pytest.mark.parametrize(
    "args, error, message",
    [
        (
            (np.ones(3, np.float32), np.ones(4, np.float32), 0.5),
            ValueError,
            r"lerp: Incompatible shapes for broadcasting: start of shape \(3,\) and",
        ),
        (
            (np.ones(3, np.float32), np.ones(3, np.float16), 0.5),
            TypeError,
            "lerp: end has dtype float16, but start has dtype float32",
        ),
        (
            (np.ones(3, np.float32), 1.0, np.ones(3, np.int32)),
            TypeError,
            "lerp: weight has dtype int32 .* must be one of float32",
        ),
        ((None, 1.0, 0.5), TypeError, "lerp: start is None"),
        ((np.ones(3, np.float32), "x", 0.5), TypeError, "lerp: end is of type str"),
        ((1, 2, 3), TypeError, "lerp: start has dtype int32"),
    ],
)
def test_errors(args, error, message):
    with pytest.raises(error, match=message):
        fo.lerp(*args)


# Kernels that run, and residuals ------------------------------------------------------------------


X = normal(np.random.default_rng(3), (4, 3, 8), np.float32)
SHAPES = [
    ((4, 3, 8),) * 3,
    ((4, 3, 8), (4, 3, 8), ()),
    ((4, 1, 8), (3, 1), (1, 3, 8)),
    ((), (), ()),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_one_kernel_each_way(shapes):
    args = draws(*shapes)(np.random.default_rng(4), np.float32)
    dy = np.ones(np.broadcast_shapes(*shapes), np.float32)
    assert targets_of(fo.lerp, *args) == ["lerp"]
    assert targets_of(value_and_gradients(fo.lerp), dy, *args) == ["lerp", "lerp_bwd"]
    with fo.use_implementation("xla"):
        assert not targets_of(value_and_gradients(fo.lerp), dy, *args)


def test_nothing_but_the_kernels_runs():
    args = draws((4, 1, 8), (3, 8), (4, 3, 1))(np.random.default_rng(4), np.float32)
    program = jax.jit(lambda dy, *args: value_and_gradients(fo.lerp)(dy, *args)[1])
    text = program.lower(X, *args).compile().as_text()
    entry = text[text.index("ENTRY") :]
    ops = re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w-]*)\(", entry)
    extra = set(ops) - {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}
    assert not extra, entry


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_what_is_kept(dtype, shapes):
    """The operands, each in its own shape."""
    args = draws(*shapes)(np.random.default_rng(5), dtype)
    leaves = jax.tree.leaves(jax.vjp(fo.lerp, *args)[1])
    assert sum(leaf.size for leaf in leaves) == sum(arg.size for arg in args)
    assert {str(leaf.dtype) for leaf in leaves} == {str(dtype)}


def test_two_runs_give_the_same_bits(dtype):
    rng = np.random.default_rng(6)
    for shapes in (((300, 700), (700,), (300, 1)), ((7, 30_001), (7, 30_001), ())):
        args = draws(*shapes)(rng, dtype)
        dy = normal(rng, np.broadcast_shapes(*shapes), dtype)
        run = jax.jit(value_and_gradients(fo.lerp))
        first = jax.tree.map(np.asarray, run(dy, *args))
        for _ in range(3):
            assert_matches(run(dy, *args), first)


def test_a_platform_without_kernels_takes_the_reference():
    exported = jax.export.export(jax.jit(value_and_gradients(fo.lerp)), platforms=["tpu"])(
        X, X, X[:1], X[:, :1]
    )
    assert "custom_call" not in exported.mlir_module()


@pytest.mark.jax
@pytest.mark.parametrize("crossed", [False, True])
def test_one_export_serves_every_size(crossed):
    symbols = jax.export.symbolic_shape("b, n")
    b, n = symbols
    shapes = [(b, 1), (n,), (b, n)] if crossed else [(b, n), (b, n), ()]
    types = [jax.ShapeDtypeStruct(s, np.float32) for s in [(b, n), *shapes]]
    run = jax.jit(value_and_gradients(fo.lerp))
    exported = jax.export.export(run, disabled_checks=fo.export_checks())(*types)
    back = jax.export.deserialize(exported.serialize())
    rng = np.random.default_rng(7)
    for size in ((2, 3), (5, 64), (1, 1), (30, 2000)):
        sizes = [tuple({b: size[0], n: size[1]}.get(d, d) for d in s) for s in shapes]
        args = draws(size, *sizes)(rng, np.float32)
        got, want = back.call(*args), jax.jit(value_and_gradients(reference))(*args)
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-3)


# vmap and derivatives -----------------------------------------------------------------------------


def loss(fn):
    return lambda *args: jnp.sum(jnp.sin(1.5 * fn(*args)))


AXES = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, None, 0), (0, 0, 0)]
FEW = [((2, 4), (2, 4), ()), ((2, 1), (1, 4), (2, 4)), ((1, 4), (2, 4), (2, 1))]


def compare(transform, *args):
    with x64():
        args = [np.asarray(a, np.float64) for a in args]
        got, want = (jax.jit(transform(f))(*args) for f in (fo.lerp, reference))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)


def mapped(transform, axes):
    def of(fn):
        def run(*args):
            args = [a if d is None else stacked(a) for a, d in zip(args, axes, strict=True)]
            return transform(fn, axes)(*args)

        return run

    return of


MAPPED = {
    "value": lambda f, axes: jax.vmap(f, axes),
    "gradients per example": lambda f, axes: jax.vmap(jax.grad(loss(f), (0, 1, 2)), axes),
    "one gradient per example": lambda f, axes: jax.vmap(jax.grad(loss(f), 1), axes),
    "gradient of the sum": lambda f, axes: jax.grad(
        lambda *args: jax.vmap(loss(f), axes)(*args).sum(), (0, 1, 2)
    ),
    "hessian-vector": lambda f, axes: jax.vmap(
        lambda *args: jax.jvp(jax.grad(loss(f), (0, 1, 2)), args, args)[1], axes
    ),
    "reverse over reverse": lambda f, axes: jax.grad(
        lambda *args: sum(
            jnp.sum(jnp.cos(g)) for g in jax.vmap(jax.grad(loss(f), (0, 1, 2)), axes)(*args)
        ),
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("transform", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_mapped(transform, axes):
    """There is one gradient per example, even for an operand that is not mapped."""
    shapes = FEW[AXES.index(axes) % 3]
    compare(mapped(transform, axes), *draws(*shapes)(np.random.default_rng(8), np.float64))


@pytest.mark.jax
@pytest.mark.parametrize("shapes", FEW, ids=str)
def test_maps_of_tangents_and_of_their_transposes(shapes):
    """Some tangents are mapped and others are not. No operand is mapped."""
    args = draws(*shapes)(np.random.default_rng(9), np.float64)

    def of(fn):
        def run(*args):
            y, tangents_of = jax.linearize(fn, *args)
            axes = (0, None, 0)
            many = jax.vmap(tangents_of, axes)
            dots = [a if d is None else stacked(a) for a, d in zip(args, axes, strict=True)]
            back = jax.linear_transpose(many, *dots)(stacked(y))
            _, pullback = jax.vjp(fn, *args)
            pulled = jax.vmap(pullback)(stacked(y))
            transposed = jax.linear_transpose(jax.vmap(pullback), stacked(y))(pulled)
            # The derivative of a linear map along a single tangent.
            one = jax.jvp(lambda t: many(dots[0], t, dots[2]), (dots[1],), (dots[1],))
            return many(*dots), back, pulled, transposed, one

        return run

    compare(of, *args)


@pytest.mark.jax
def test_nested_maps():
    args = draws((2, 1), (4,), (2, 4))(np.random.default_rng(10), np.float64)

    def of(fn):
        per_example = jax.grad(loss(fn), (0, 1, 2))
        inner = jax.vmap(per_example, (0, None, None))
        return lambda s, e, w: jax.vmap(inner, (None, 0, None))(stacked(s), stacked(e), w)

    compare(of, *args)


@pytest.mark.jax
def test_a_map_is_one_call():
    """There is no loop and no copy. An operand that is not mapped gets a dimension of size 1."""
    args = draws((2, 1), (1, 4), (2, 4))(np.random.default_rng(11), np.float32)
    for axes in AXES:
        stacks = [a if d is None else stacked(a) for a, d in zip(args, axes, strict=True)]
        run = jax.jit(jax.vmap(fo.lerp, axes))
        (op,) = [e for e in run.trace(*stacks).jaxpr.eqns if "fastops_lerp" in str(e.primitive)]
        assert op.params["levels"] == ()
        assert [v.aval.size for v in op.invars] == [np.size(s) for s in stacks]
        text = run.lower(*stacks).as_text()
        assert "while" not in text
        gradient = jax.vmap(jax.grad(loss(fo.lerp), (0, 1, 2)), axes)
        text = jax.jit(gradient).lower(*stacks).as_text()
        assert "while" not in text and text.count("@jax_fastops.lerp_bwd") == 1


# Sharding -----------------------------------------------------------------------------------------


def mesh_of(axis_type):
    if device_count() < 8:
        pytest.skip("needs eight devices")
    return make_mesh({"a": 2, "b": 4}, axis_type)


SPREAD = {
    # shapes, their specs, the result's spec, sums in the backward (one per gradient and mesh axis)
    "full": ([(16, 24)] * 3, [P("a", "b")] * 3, P("a", "b"), 0),
    "scalar": ([(16, 24), (16, 24), ()], [P("a", "b"), P("a", "b"), P()], P("a", "b"), 2),
    "crossed": (
        [(16, 1, 48), (1, 32, 48), (16, 32, 1)],
        [P("a"), P(None, "b"), P("a", "b")],
        P("a", "b", None),
        2,
    ),
    "one dimension": ([(16, 24), (24,), (16, 1)], [P("a"), P(), P("a")], P("a", None), 1),
    "last": ([(60, 64), (64,), (60, 1)], [P(None, "b"), P("b"), P()], P(None, "b"), 1),
}


@pytest.mark.jax
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPREAD)
def test_sharded(kind, name):
    """The only communication is a sum for each gradient that is summed over a sharded axis."""
    shapes, specs, result, sums = SPREAD[name]
    mesh = mesh_of(KINDS[kind])
    rng = np.random.default_rng(12)
    args = draws(*shapes)(rng, np.float32)
    dy = normal(rng, np.broadcast_shapes(*shapes), np.float32)
    want = jax.jit(value_and_gradients(reference))(dy, *args)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((dy, *args), (result, *specs), strict=True)
        ]
        forward = jax.jit(fo.lerp).lower(*placed[1:]).compile()
        assert not collectives(forward.as_text())
        assert forward.as_text().count('custom_call_target="jax_fastops.lerp.') == 1
        both = jax.jit(value_and_gradients(fo.lerp)).lower(*placed).compile()
        got = both(*placed)
    found = collectives(both.as_text())
    assert found.pop("all-reduce", 0) in range(min(sums, 1), sums + 1) and not found
    assert "jax_fastops.lerp_bwd" in both.as_text()
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert_layout("result", got[0], NamedSharding(mesh, result))


@pytest.mark.jax
def test_numbers_beside_explicit_shards():
    mesh = mesh_of(AxisType.Explicit)
    x = jax.device_put(X[:, :2], NamedSharding(mesh, P("b", "a")))
    for run in (fo.lerp, jax.jit(fo.lerp)):
        for args in ((0.0, x, 0.5), (x, 1.0, 0.25), (2.0, 1.0, x)):
            y = run(*args)
            assert_layout("result", y, NamedSharding(mesh, P("b", "a", None)))
            plain = [np.asarray(a) if a is x else a for a in args]
            np.testing.assert_allclose(y, reference(*map(np.float32, plain)), rtol=1e-5, atol=1e-6)


@pytest.mark.jax
def test_operands_that_are_sharded_differently_are_refused():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, y = (jax.device_put(X[:, :2], NamedSharding(mesh, P(axis))) for axis in ("a", "b"))
        with pytest.raises(ValueError, match="sharded differently"):
            fo.lerp(x, y, 0.5)


@pytest.mark.jax
@pytest.mark.parametrize("mode", ["native", "xla"])
def test_a_replicated_operand_beside_explicit_shards_gets_a_replicated_gradient(mode):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), implementation(mode):
        x = jax.device_put(X[:, :2], NamedSharding(mesh, P("b", None, None)))
        y = jax.device_put(X[:, :2], NamedSharding(mesh, P(None, None, None)))
        grads = jax.jit(jax.grad(lambda *a: (fo.lerp(*a, 0.25) ** 2).sum(), (0, 1)))(x, y)
        assert [jax.typeof(g).sharding.spec for g in grads] == [
            P("b", None, None),
            P(None, None, None),
        ]
    np.testing.assert_allclose(grads[0], 1.5 * X[:, :2], rtol=1e-5)
    np.testing.assert_allclose(grads[1], 0.5 * X[:, :2], rtol=1e-5)
