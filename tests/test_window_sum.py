"""`window_sum`: transformations, shapes, paddings, special values, rounding errors."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.case import VARIANT
from harness.numerics import normal
from harness.programs import targets, value_and_gradient
from harness.sharding import (
    collectives,
    mesh_for,
    over_mesh,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]


def reference(x, radius, *, axis=-1, padding="VALID"):
    """`window_sum` in plain JAX, summed in float32 or wider."""
    x = jnp.asarray(x)
    axis %= x.ndim
    window, pad = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis] = 2 * radius + 1
    pad[axis] = (radius, radius) if padding == "SAME" else (0, 0)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    zero = np.zeros((), wide.dtype)
    sums = jax.lax.reduce_window(wide, zero, jax.lax.add, window, [1] * x.ndim, pad)
    return sums.astype(x.dtype)


def exact(x, radius, axis, padding, add=np.add):
    """The sums in float64 by NumPy, one element of the window at a time."""
    x = np.moveaxis(np.asarray(x).astype(np.float64), axis, -1)
    n = x.shape[-1]
    radius = min(radius, n) if padding == "SAME" else radius
    if padding == "SAME":
        x = (
            np.concatenate([np.zeros((*x.shape[:-1], radius))] * 2, -1)
            if n == 0
            else np.pad(x, [(0, 0)] * (x.ndim - 1) + [(radius, radius)])
        )
    m = x.shape[-1] - 2 * radius
    total = np.zeros((*x.shape[:-1], m))
    for k in range(2 * radius + 1):
        total = add(total, x[..., k : k + m])
    return np.moveaxis(total, -1, axis)


def case(name, shape, radius, sharded=None, axis=-1, padding="VALID", **more):
    options = dict(radius=radius, axis=axis, padding=padding)
    draw = lambda sizes: lambda rng, dtype: (normal(rng, sizes, dtype),)  # noqa: E731
    make_sharded = {} if sharded is None else {"make_sharded_args": draw(sharded)}
    return Case(
        name=name,
        fn=lambda x: fo.window_sum(x, **options),
        reference=lambda x: reference(x, **options),
        make_args=draw(shape),
        linear=(0,),
        tolerance=Tolerance(ulps=4.0),
        kernels=("window_sum", "window_sum") if radius else (),
        only_kernels=True,
        maps=((0,),),
        kept=lambda x: [],
        **make_sharded,
        **more,
    )


SAME = case(
    "same",
    (3, 7),
    2,
    (16, 7),
    padding="SAME",
    dtypes=("float32", "bfloat16"),
    modes=("native",),
    shardings=(Sharding("batch", (0,), (0,)),),
    symbolic=("b, n",),
    sizes=({"b": 9, "n": 1000},),
    quick=VARIANT,
)
VALID_MIDDLE = case(
    "valid_middle",
    (2, 6, 3),
    1,
    (8, 6, 16),
    axis=1,
    dtypes=("float32", "float16"),
    modes=("native",),
    shardings=(Sharding("batch", (0,), (0,)), Sharding("inner", (2,), (2,))),
    symbolic=("b, 6, i",),
    versions=True,
)
VALID = case(
    "valid",
    (3, 9),
    2,
    (16, 9),
    shardings=(Sharding("batch", (0,), (0,)),),
    symbolic=("b, n",),
    empty="b",
    quick=f"{VARIANT}|differences",
)
SAME_FIRST = case(
    "same_first",
    (5, 2, 3),
    3,
    (5, 8, 16),
    axis=0,
    padding="SAME",
    shardings=(Sharding("first", (1,), (1,)), Sharding("second", (2,), (2,))),
    symbolic=("n, b, i",),
    quick=VARIANT,
)
basic = functools.partial(case, basic_only=True, modes=("native",))
WIDE = basic("wide", (2, 41), 15, dtypes=("bfloat16",))
WIDE_AXIS = basic("wide_axis", (41, 5), 17, axis=0, dtypes=("float32",))
BEYOND = basic("beyond", (3, 5), 9, padding="SAME", dtypes=("float16",))
COPY = basic("copy", (3, 5), 0, dtypes=("float32",))
VECTOR = basic("vector", (33,), 3, dtypes=("float64",))


@checks(VALID_MIDDLE, SAME, VALID, SAME_FIRST, WIDE, WIDE_AXIS, BEYOND, COPY, VECTOR)
def test_harness(check):
    check()


# Shapes -------------------------------------------------------------------------------------------


def whole(rng, shape, dtype):
    """Random multiples of 1/16, whose sums are exact in every accumulator dtype."""
    return (rng.integers(-64, 65, shape) / 16).astype(dtype)


def check_shapes(dtype, examples):
    """Value and gradient of many shapes in one program: (shape, radius, axis, padding).

    The sums are exact, so the only error is one rounding, and the bits are known.
    """
    rng = np.random.default_rng(1)
    xs = [whole(rng, shape, dtype) for shape, *_ in examples]
    fns = [
        functools.partial(fo.window_sum, radius=radius, axis=axis, padding=padding)
        for _, radius, axis, padding in examples
    ]
    dys = [whole(rng, jax.eval_shape(fn, x).shape, dtype) for fn, x in zip(fns, xs, strict=True)]

    @jax.jit
    def run(xs, dys):
        pairs = zip(fns, xs, dys, strict=True)
        return [value_and_gradient(fn)(x, dy) for fn, x, dy in pairs]

    for (y, dx), x, dy, example in zip(run(xs, dys), xs, dys, examples, strict=True):
        shape, radius, axis, padding = example
        n = shape[axis]
        want = exact(x, radius, axis, padding).astype(dtype)
        np.testing.assert_array_equal(np.asarray(y), want, err_msg=str(example))
        # The gradient of an element of x is the sum over the windows that contain it.
        pad = [(0, 0)] * x.ndim
        pad[axis] = (2 * radius, 2 * radius) if padding == "VALID" else (min(radius, n),) * 2
        reach = radius if padding == "VALID" else min(radius, n)
        want = exact(np.pad(np.asarray(dy).astype(np.float64), pad), reach, axis, "VALID")
        np.testing.assert_array_equal(np.asarray(dx), want.astype(dtype), err_msg=str(example))


LAST = [
    ((3, n), radius, -1, padding)
    for n, radius in itertools.product((1, 7, 33, 100, 1003, 4111), (1, 2, 3, 8, 16, 129, 501))
    for padding in ("VALID", "SAME")
    if padding == "SAME" or n > 2 * radius
]
OTHER = [
    (shape, radius, axis, padding)
    for (shape, axis), radius in itertools.product(
        [((67, 3), 0), ((2, 130, 7), 1), ((300, 65), 0), ((2, 71, 2, 16), 1), ((40, 300), 0)],
        (1, 3, 4, 16, 33, 200),
    )
    for padding in ("VALID", "SAME")
    if padding == "SAME" or shape[axis] > 2 * radius
]


@pytest.mark.parametrize("part", range(4))
def test_last_axis(dtype, part):
    check_shapes(dtype, LAST[part::4] if dtype == np.float32 else LAST[part::12])


@pytest.mark.parametrize("part", range(4))
def test_other_axes(dtype, part):
    check_shapes(dtype, OTHER[part::4] if dtype == np.float32 else OTHER[part::12])


def test_rows_that_are_not_aligned_alike(dtype):
    """Rows whose alignment differs, long enough for vectorized loads."""
    kinds = ((1, "SAME"), (1, "VALID"), (9, "SAME"), (9, "VALID"), (40, "SAME"))
    check_shapes(dtype, [((70, 301), radius, 0, padding) for radius, padding in kinds])


def test_long_windows(dtype):
    """Windows longer than a tile, than the limit for a workspace, and than the axis."""
    examples = [
        ((2, 9001), 1024, -1, "VALID"),
        ((2, 9001), 1025, -1, "SAME"),
        ((9001,), 4500, -1, "VALID"),
        ((2, 7000), 100_000, -1, "SAME"),
        ((5003, 3), 1024, 0, "SAME"),
        ((5003, 3), 2000, 0, "VALID"),
        ((2, 300, 33), 140, 1, "VALID"),
    ]
    check_shapes(dtype, examples if dtype == np.float32 else examples[1::3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_shape(dtype, seed):
    rng = np.random.default_rng(seed)
    examples = []
    while len(examples) < 12:
        shape = tuple(int(i) for i in rng.integers(1, (4, 40, 3000)[rng.integers(3)], 1))
        shape = tuple(rng.integers(1, 5, rng.integers(0, 3))) + shape
        shape += tuple(rng.integers(1, 40, rng.integers(0, 3)))
        shape = tuple(map(int, shape))
        axis = int(rng.integers(len(shape)))
        radius = int(rng.integers(0, (3, 20, 600, 3000)[rng.integers(4)]))
        padding = ("VALID", "SAME")[rng.integers(2)]
        if np.prod(shape) <= 200_000 and (padding == "SAME" or shape[axis] > 2 * radius):
            examples.append((shape, radius, axis, padding))
    check_shapes(dtype, examples)


def test_radius_0_changes_nothing(dtype):
    x = normal(np.random.default_rng(2), (3, 5), dtype)
    for padding in ("VALID", "SAME"):
        np.testing.assert_array_equal(fo.window_sum(x, 0, axis=0, padding=padding), x)


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axis"), [((2, 30_001), -1), ((9_001, 5), 0)])
@pytest.mark.parametrize("radius", [2, 16, 256, 1500])
def test_errors_do_not_grow_with_the_position(shape, axis, radius):
    """Sums after large elements are as exact as the others, because nothing is subtracted."""
    rng = np.random.default_rng(3)
    x = np.abs(rng.standard_normal(shape)).astype(np.float32)
    first = np.moveaxis(x, axis, 0)
    first[:1000] *= 1e20
    y = np.moveaxis(np.asarray(fo.window_sum(x, radius, axis=axis)), axis, 0).astype(np.float64)
    want = np.moveaxis(exact(x, radius, axis, "VALID"), axis, 0)
    error = np.abs(y - want) / want
    assert error.max() < 2e-6
    assert error[1000:].max() < 2e-6


@pytest.mark.parametrize(("shape", "axis"), [((4, 8_000), -1), ((8_000, 4), 0)])
@pytest.mark.parametrize("radius", [2, 16, 256, 1500])
def test_errors_are_no_larger_than_those_of_xla(shape, axis, radius):
    rng = np.random.default_rng(4)
    x = np.abs(rng.standard_normal(shape)).astype(np.float32)
    want = exact(x, radius, axis, "SAME")

    def error(sums):
        return np.sqrt(np.mean((np.asarray(sums, np.float64) / want - 1) ** 2))

    mine = error(fo.window_sum(x, radius, axis=axis, padding="SAME"))
    theirs = error(jax.jit(lambda x: reference(x, radius, axis=axis, padding="SAME"))(x))
    assert mine <= 2 * theirs + 2e-8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("radius", [1, 3, 16, 100, 1100])
@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 5_000), -1), ((2, 3_000, 3), 1), ((1_300, 301), 0)]
)
def test_a_bad_element_is_in_its_windows_alone(bad, radius, shape, axis):
    x = np.ones(shape, np.float32)
    where = [0, 17, 1234, shape[axis] - 1]
    lines = np.moveaxis(x, axis, -1)
    lines[0, ..., where] = bad
    y = np.moveaxis(np.asarray(fo.window_sum(x, radius, axis=axis, padding="SAME")), axis, -1)
    hit = np.zeros(shape[axis], bool)
    for at in where:
        hit[max(0, at - radius) : at + radius + 1] = True
    np.testing.assert_array_equal(~np.isfinite(y[0]), np.broadcast_to(hit, y[0].shape))
    assert np.isfinite(y[1]).all()
    if not np.isnan(bad):
        np.testing.assert_array_equal(y[0][..., hit], np.float32(bad))


def test_infinities_of_both_signs():
    x = np.zeros((200,), np.float32)
    x[50], x[60] = np.inf, -np.inf
    y = np.asarray(fo.window_sum(x, 8, padding="SAME"))
    at = np.arange(200)
    plus, minus = np.abs(at - 50) <= 8, np.abs(at - 60) <= 8
    np.testing.assert_array_equal(np.isnan(y), plus & minus)
    np.testing.assert_array_equal(y == np.inf, plus & ~minus)
    np.testing.assert_array_equal(y == -np.inf, minus & ~plus)


def test_sums_of_two_bytes_are_rounded_once():
    """Added one by one in bfloat16, 256 + 1 + 1 + ... stays 256."""
    x = np.ones((1, 4001), jnp.bfloat16)
    x[0, 1000] = 256
    for radius in (8, 100):
        y = np.asarray(fo.window_sum(x, radius)).astype(np.float32)
        want = np.asarray(jnp.asarray(256.0 + 2 * radius, jnp.bfloat16)).astype(np.float32)
        assert y.max() == want > 256


# Programs -----------------------------------------------------------------------------------------


X = normal(np.random.default_rng(7), (2, 9, 4, 8), np.float32)


@pytest.mark.jax
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_one_export_serves_every_size(axis, padding):
    fn = lambda x: fo.window_sum(x, 3, axis=axis, padding=padding)  # noqa: E731
    both = lambda x: (fn(x), jax.grad(lambda x: (fn(x) ** 2).sum())(x))  # noqa: E731
    scope = jax.export.SymbolicScope(["n >= 7", "b >= 7"])
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n", scope=scope), np.float32)
    with fo.use_implementation("native"):
        exported = jax.export.export(jax.jit(both), disabled_checks=fo.export_checks())(shape)
    assert "reduce_window" not in exported.mlir_module()
    back = jax.export.deserialize(exported.serialize())
    rng = np.random.default_rng(10)
    for size in ((7, 9), (64, 33), (300, 301)):
        x = normal(rng, size, np.float32)
        for mine, theirs in zip(back.call(x), jax.jit(both)(x), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.jax
def test_an_export_of_an_axis_that_may_be_too_short():
    """Without a constraint, the axis may hold no window, so the call takes the reference."""
    both = lambda x: (fo.window_sum(x, 3), jax.grad(lambda x: fo.window_sum(x, 3).sum())(x))  # noqa: E731
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n"), np.float32)
    exported = jax.export.export(jax.jit(both), disabled_checks=fo.export_checks())(shape)
    x = normal(np.random.default_rng(12), (3, 9), np.float32)
    for mine, theirs in zip(exported.call(x), jax.jit(both)(x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert exported.call(np.zeros((3, 5), np.float32))[0].shape == (3, 0)


@pytest.mark.jax
def test_an_export_serves_long_windows_of_any_axis():
    """The kernel gets a workspace, whether the axis needs it or not."""
    fn = lambda x: fo.window_sum(x, 1500, padding="SAME")  # noqa: E731
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n"), np.float32)
    exported = jax.export.export(jax.jit(fn), disabled_checks=fo.export_checks())(shape)
    rng = np.random.default_rng(11)
    for size in ((1, 9), (2, 4001)):
        x = whole(rng, size, np.float32)
        np.testing.assert_array_equal(exported.call(x), exact(x, 1500, -1, "SAME"))


# Sharding -----------------------------------------------------------------------------------------


@pytest.mark.jax
def test_a_sharded_axis():
    """`axis` is gathered over an auto mesh axis."""
    x = normal(np.random.default_rng(13), (6, 128), np.float32)
    fn = lambda x: fo.window_sum(x, 3, padding="SAME")  # noqa: E731
    want = reference(x, 3, padding="SAME")
    got, text = over_mesh(mesh_for(AxisType.Auto), fn, (x,), P(None, "a"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert targets(text) == ["window_sum"] and collectives(text)


# Errors -------------------------------------------------------------------------------------------

ARRAY = np.ones((3, 5), np.float32)


@pytest.mark.parametrize(
    ("x", "radius", "options", "error", "message"),
    [
        (None, 1, {}, TypeError, "window_sum: x is None; it must be"),
        ([1.0], 1, {}, TypeError, "window_sum: x is of type list"),
        (np.ones(5, int), 1, {}, TypeError, r"x has dtype int.* and shape \(5,\)"),
        (ARRAY, 1.0, {}, TypeError, "radius is 1.0; it must be a Python integer"),
        (ARRAY, None, {}, TypeError, "radius is None; it must be a Python"),
        (ARRAY, -1, {}, ValueError, "radius is -1; it must be 0 or more"),
        (ARRAY, 1, {"axis": 0.5}, TypeError, "axis is 0.5; it must be an integer"),
        (ARRAY, 1, {"axis": None}, TypeError, "axis is None; it must be an int"),
        (ARRAY, 1, {"axis": 2}, ValueError, r"axis is 2, out of range for x of sh"),
        (ARRAY, 1, {"axis": -3}, ValueError, "it must be from -2 to 1"),
        (np.float32(1), 1, {}, ValueError, r"x of shape \(\) has no axis"),
        (ARRAY, 3, {}, ValueError, "a window has 7 elements .* has 5; padding 'S"),
        (ARRAY, 2, {"axis": 0}, ValueError, r"axis 0 of x of shape \(3, 5\) has 3"),
        (ARRAY, 1, {"padding": "full"}, ValueError, "'full'; it must be one of 'VALID', 'SAME'"),
        (ARRAY, 1, {"padding": None}, ValueError, "padding is None; it must be"),
    ],
)
def test_errors(x, radius, options, error, message):
    with pytest.raises(error, match=message):
        fo.window_sum(x, radius, **options)


def test_a_traced_radius_is_refused():
    with pytest.raises(TypeError, match=r"radius is .*; it must be a Python integer"):
        jax.jit(fo.window_sum)(ARRAY, 1)
