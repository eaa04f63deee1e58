"""`lerp`: transformations, shapes, special weights and values, residuals."""

import functools
import math
import zlib

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
    checks,
    implementation,
)
from harness.case import NESTED_VARIANT, VARIANT
from harness.compat import make_mesh, x64
from harness.numerics import assert_within, normal, stacked, unbroadcast
from harness.programs import equations
from harness.properties import broadcast_shapes, of_any
from harness.sharding import assert_layout, device_count
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

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
        kernels=("lerp", "lerp_bwd"),
        only_kernels=True,
        maps=((0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)),
        kept=lambda *args: [(a.dtype, a.size) for a in args],
        **make_sharded,
        **more,
    )


FULL = case(
    "full",
    [(3, 5)] * 3,
    [(16, 24)] * 3,
    shardings=(Sharding("first", (0, 0, 0), (0,)), Sharding("last", (1, 1, 1), (1,))),
    symbolic=("a, b",) * 3,
    versions=True,
    sizes=({"a": 7, "b": 30_001},),
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
    sizes=({"a": 7, "b": 3001},),
    modes=("native",),
    quick=VARIANT,
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
    sizes=({"a": 30, "b": 70, "c": 20},),
    modes=("native",),
    quick=NESTED_VARIANT,
    dtypes=("float32", "bfloat16"),
    kernels_in_shards=False,
)

# XLA leaves the kernel the parts of operands that are this large.
CROSSED_LARGE = case(
    "crossed_large",
    [(2, 1, 3), (1, 4, 3), (2, 4, 1)],
    [(16, 1, 48), (1, 32, 48), (16, 32, 1)],
    shardings=CROSSED.shardings[:2],
    modes=("native",),
    dtypes=("float32",),
    quick="sharded/",
)

# Noise levels of a diffusion model: one weight for each image.
PER_EXAMPLE = case(
    "per_example",
    [(2, 3, 4), (2, 3, 4), (2, 1, 1)],
    [(16, 64, 64), (16, 64, 64), (16, 1, 1)],
    shardings=(
        Sharding("batch", (0, 0, 0), (0,)),
        Sharding("last", (2, 2, None), (2,), gradient_all_reduces=1),
    ),
    dtypes=("bfloat16", "float32"),
    modes=("native",),
    quick=VARIANT,
)

basic = functools.partial(case, basic_only=True, modes=("native",), dtypes=("float32",))
OUTER = basic("outer", [(1, 3, 1), (2, 1, 1), (4,)])
NUMBER_AND_ARRAYS = basic("number_and_arrays", [(), (3, 4), (4,)])
SCALARS = basic("scalars", [(), (), ()])
LONG = basic("long", [(3, 1025), (1025,), (3, 1)])


@checks(
    FULL,
    SCALAR_WEIGHT,
    CROSSED,
    CROSSED_LARGE,
    PER_EXAMPLE,
    OUTER,
    NUMBER_AND_ARRAYS,
    SCALARS,
    LONG,
)
def test_harness(check):
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


def any_shapes(examples, dtypes=(np.float32, jnp.bfloat16)):
    def check(drawn):
        for kind in dtypes:
            check_shapes(jnp.dtype(kind), [shapes for _, *shapes in drawn])

    of_any(examples, broadcast_shapes(3), check)


def test_any_shapes():
    any_shapes(4)


@pytest.mark.slow
def test_more_shapes():
    any_shapes(100)
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


ONES, HALF, INTS = (np.ones(3, kind) for kind in (np.float32, np.float16, np.int32))


@pytest.mark.parametrize(
    "args, error, message",
    [
        (
            (ONES, ONES[:2], 0.5),
            ValueError,
            r"lerp: Incompatible shapes .*start of shape \(3,\)",
        ),
        ((ONES, HALF, 0.5), TypeError, "lerp: end has dtype float16, but start has dtype float32"),
        ((ONES, 1.0, INTS), TypeError, "lerp: weight has dtype int32 .* must be one of float32"),
        ((None, 1.0, 0.5), TypeError, "lerp: start is None"),
        ((ONES, "x", 0.5), TypeError, "lerp: end is of type str"),
        ((1, 2, 3), TypeError, "lerp: start has dtype int32"),
    ],
)
def test_errors(args, error, message):
    with pytest.raises(error, match=message):
        fo.lerp(*args)


# Kernels that run, and residuals ------------------------------------------------------------------


X = normal(np.random.default_rng(3), (4, 3, 8), np.float32)


# vmap and derivatives -----------------------------------------------------------------------------


AXES = [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, None, 0), (0, 0, 0)]


@pytest.mark.jax
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_map_copies_nothing(axes):
    """An operand that is not mapped gets a dimension of size 1, also in the gradient of others.

    It is copied for its own gradient, of which there is one for each example.
    """
    args = draws((2, 1), (1, 4), (2, 4))(np.random.default_rng(11), np.float32)
    stacks = [a if d is None else stacked(a) for a, d in zip(args, axes, strict=True)]
    mapped = tuple(i for i, d in enumerate(axes) if d is not None)

    def gradients(*args):
        return value_and_gradients(fo.lerp, mapped)(jnp.ones((2, 4)), *args)[1]

    for fn, name in ((fo.lerp, "fastops_lerp"), (gradients, "fastops_lerp_vjp")):
        jaxpr = jax.jit(jax.vmap(fn, axes)).trace(*stacks).jaxpr
        (op,) = [e for e in equations(jaxpr) if str(e.primitive) == name]
        assert op.params["levels"] == ()
        sizes = [v.aval.size for v in op.invars]
        assert sizes[:3] == [np.size(s) for s in stacks]


# Sharding -----------------------------------------------------------------------------------------


def mesh_of(axis_type):
    if device_count() < 8:
        pytest.skip("needs eight devices")
    return make_mesh({"a": 2, "b": 4}, axis_type)


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
