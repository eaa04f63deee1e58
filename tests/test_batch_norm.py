"""Batch norm: transformations, layouts, accuracy of the statistics, the mask, sharded batches."""

import dataclasses
import functools
import itertools
import math

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, assert_bitwise_equal, assert_matches, checks
from harness.case import find, implementation
from harness.compat import make_mesh, x64
from harness.numerics import assert_close, assert_within, normal
from harness.programs import targets, value_and_gradients
from harness.properties import settings
from harness.sharding import assert_layout, collectives, device_count, mesh_for, over_kinds
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _batch_norm_kernels as kernels
from jax_fastops import _dispatch

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

MODES = ("native", "auto", "xla")


def across(x, axis):
    return tuple(i for i in range(x.ndim) if i != axis % x.ndim)


def along(values, x, axis):
    shape = [1] * x.ndim
    shape[axis] = -1
    return values.reshape(shape)


def normalised(x, mean, var, scale, bias, residual, axis, eps, activation):
    wide = jnp.promote_types(x.dtype, np.float32)
    rstd = 1 / jnp.sqrt(var.astype(wide) + eps)
    z = (x.astype(wide) - along(mean.astype(wide), x, axis)) * along(rstd, x, axis)
    z = z if scale is None else z * along(scale.astype(wide), x, axis)
    z = z if bias is None else z + along(bias.astype(wide), x, axis)
    z = z if residual is None else z + residual.astype(wide)
    return (jax.nn.relu(z) if activation else z).astype(x.dtype)


def statistics(x, axis):
    """Mean and biased variance of each channel, in two passes."""
    x = x.astype(jnp.promote_types(x.dtype, np.float32))
    mean = jnp.mean(x, across(x, axis))
    return mean, jnp.mean(jnp.square(x - along(mean, x, axis)), across(x, axis))


def reference(x, scale, bias, residual=None, *, axis=-1, eps=1e-5, activation=None):
    x = jnp.asarray(x)
    mean, var = statistics(x, axis)
    return normalised(x, mean, var, scale, bias, residual, axis, eps, activation), mean, var


def op(x, scale, bias, residual=None, **options):
    return fo.batch_norm(x, scale, bias, residual=residual, **options)


def fanned(x, scale, bias, residual=None, **options):
    (y, same), mean, var = fo.batch_norm(x, scale, bias, residual=residual, fanout=True, **options)
    return y, same, mean, var


def fanned_reference(*args, **options):
    y, mean, var = reference(*args, **options)
    return y, y, mean, var


def inference_reference(
    x, mean, var, scale, bias, residual=None, *, axis=-1, eps=1e-5, activation=None
):
    return normalised(jnp.asarray(x), mean, var, scale, bias, residual, axis, eps, activation)


def inference(x, mean, var, scale, bias, residual=None, **options):
    return fo.batch_norm_inference(x, mean, var, scale, bias, residual=residual, **options)


def draws(shape, axis=-1, residual=False, given=False, parameters=None):
    """Draws x, mean and var if `given`, scale, bias, and the residual if `residual`."""

    def make(rng, dtype):
        own, c = parameters or dtype, shape[axis]
        values = [normal(rng, (c,), np.float64) for _ in range(4)]
        values = [values[0], values[1] ** 2 + 0.5, values[2] / 4 + 1, values[3]]
        values = [v.astype(own) for v in values[0 if given else 2 :]]
        return (
            normal(rng, shape, dtype),
            *values,
            *([normal(rng, shape, dtype)] if residual else []),
        )

    return make


def kept(axis, activation, x, scale, *_):
    """x, the scale, two numbers per channel, and with relu one bit per element."""
    wide = jnp.promote_types(x.dtype, np.float32)
    mask = [(np.uint8, -(-x.size // 8))] * (activation is not None)
    return [(x.dtype, x.size), (scale.dtype, scale.size), *[(wide, x.shape[axis])] * 2, *mask]


def case(name, shape, axis=-1, residual=False, given=False, parameters=None, fanout=False, **more):
    # Second derivatives are the difference of terms (var + eps) / eps times as large.
    options = dict(axis=axis, activation=more.pop("activation", None), eps=0.1)
    make = functools.partial(
        draws, axis=axis, residual=residual, given=given, parameters=parameters
    )
    if sharded := more.pop("sharded", None):
        spread = (0, *(None,) * (4 if given else 2), *([0] if residual else []))
        more["make_sharded_args"] = make(sharded)
        more["shardings"] = (
            Sharding(
                "batch",
                spread,
                (0,) if given else (0, *[0] * fanout, None, None),
                forward_all_reduces=0 if given else 1,
                gradient_all_reduces=1,
                shard_map=given,
            ),
        )
    # The first kernel writes the masked cotangent, which is the residual's gradient. The second
    # kernel reads it.
    apart = fanout or (options["activation"] and residual)
    backward = ["batch_norm_bwd", "batch_norm_sums"] if apart else ["batch_norm_grad"]
    fn, plain = (inference, inference_reference) if given else (op, reference)
    if fanout:
        more["one_user"] = functools.partial(fn, **options)
        fn, plain = fanned, fanned_reference
    return Case(
        name=name,
        fn=functools.partial(fn, **options),
        reference=functools.partial(plain, **options),
        make_args=make(shape),
        tolerance=Tolerance(ulps=96.0, lone=4.0),  # terms of the sums cancel
        kernels=() if given else ("batch_norm_fwd", *backward),
        maps=((0,), tuple(range(3 + residual))),
        kept=None if given else functools.partial(kept, axis, options["activation"]),
        shards_under_vmap=False,
        empty="",
        **more,
    )


NHWC = case(
    "nhwc",
    (3, 2, 5),
    sharded=(16, 3, 4),
    symbolic=("b, 2, 5", "5", "5"),
    sizes=({"b": 1}, {"b": 6001}),
    modes=("native",),
    versions=True,
)
ADD_RELU = case(
    "add_relu",
    (4, 2, 4),
    residual=True,
    activation="relu",
    sharded=(16, 3, 8),
    symbolic=("b, 2, 4", "4", "4", "b, 2, 4"),
    sizes=({"b": 300}, {"b": 6001}),
    dtypes=("float32", "bfloat16"),
    modes=("native",),
)
NCHW_RELU = case(
    "nchw_relu",
    (3, 4, 2, 3),
    axis=1,
    activation="relu",
    parameters="float32",
    sharded=(16, 3, 2, 4),
    symbolic=("b, 4, 2, 3", "4", "4"),
    modes=("native",),
    dtypes=("bfloat16", "float16"),
    basic_only=True,
)
# The mask of an example is not a whole number of bytes.
ODD_RELU = case(
    "odd_relu",
    (8, 3),
    activation="relu",
    sharded=(64, 3),
    modes=("native",),
    dtypes=("float32",),
    basic_only=True,
)
PADDED_RELU = case(
    "padded_relu",
    (3, 5),
    activation="relu",
    modes=("native",),
    dtypes=("float32",),
    basic_only=True,
)
FANOUT = case(
    "fanout",
    (4, 2, 4),
    residual=True,
    activation="relu",
    fanout=True,
    sharded=(16, 3, 8),
    symbolic=("b, 2, 4", "4", "4", "b, 2, 4"),
    dtypes=("float32", "bfloat16"),
    modes=("native",),
)
FANOUT_BASIC = dataclasses.replace(
    FANOUT, name="fanout_basic", basic_only=True, sizes=({"b": 35}, {"b": 1})
)
FANOUT_CHANNELS = case(
    "fanout_channels",
    (4, 6, 5, 7),
    axis=1,
    activation="relu",
    fanout=True,
    modes=("native",),
    dtypes=("bfloat16",),
    basic_only=True,
)
# Without a mask, and with one that is not a whole number of bytes.
FANOUT_PLAIN = case(
    "fanout_plain", (3, 5), fanout=True, modes=("native",), dtypes=("float32",), basic_only=True
)
FANOUT_PADDED = case(
    "fanout_padded",
    (3, 5),
    activation="relu",
    fanout=True,
    modes=("native",),
    dtypes=("float32",),
    basic_only=True,
)
# Statistics computed separately: over a mapped axis, and in a ResNet's stem.
STATISTICS = Case(
    name="statistics",
    fn=lambda x: fo.batch_norm_statistics(x),
    reference=lambda x: statistics(jnp.asarray(x), -1),
    make_args=lambda rng, dtype: (normal(rng, (4, 3, 8), dtype),),
    make_sharded_args=lambda rng, dtype: (normal(rng, (16, 3, 8), dtype),),
    shardings=(
        Sharding(
            "batch",
            (0,),
            (None, None),
            forward_all_reduces=1,
            gradient_all_reduces=0,
            shard_map=False,
        ),
    ),
    tolerance=Tolerance(ulps=96.0, lone=4.0),
    shards_under_vmap=False,
    symbolic=("b, 3, 8",),
    empty="",
    dtypes=("float32", "bfloat16"),
    modes=("native",),
)
INFERENCE = case(
    "inference",
    (4, 2, 4),
    residual=True,
    given=True,
    activation="relu",
    sharded=(16, 3, 8),
    symbolic=("b, 2, 4", "4", "4", "4", "4", "b, 2, 4"),
    modes=("native",),
    dtypes=("float32", "bfloat16"),
)


@checks(NHWC, ADD_RELU, INFERENCE)
def test_harness(check):
    check()


@pytest.mark.slow
@checks(FANOUT)
def test_harness_of_variants_in_full(check):
    check()


@checks(
    NCHW_RELU,
    ODD_RELU,
    PADDED_RELU,
    FANOUT_BASIC,
    FANOUT_CHANNELS,
    FANOUT_PLAIN,
    FANOUT_PADDED,
    STATISTICS,
)
def test_harness_of_variants(check):
    check()


OPTIONS = [*itertools.product((-1, 1), (None, "relu"), (False, True))]


@pytest.mark.parametrize("axis, activation, residual", OPTIONS)
@pytest.mark.parametrize("check", ["kernels", "kept", "two_users"])
def test_every_choice_of_options(check, axis, activation, residual):
    options = dict(axis=axis, activation=activation, residual=residual, dtypes=("bfloat16",))
    find(case("options", (4, 8, 8), fanout=check == "two_users", **options), check, "native")()


@pytest.mark.jax
@pytest.mark.parametrize("mode", ["auto", "xla"])
@pytest.mark.parametrize("exported", [ADD_RELU, INFERENCE], ids=str)
def test_one_export_serves_every_batch(exported, mode):
    """The harness has the exports of the kernels."""
    find(exported, "export/symbolic", mode)()


# Values -------------------------------------------------------------------------------------------


def exact(x, scale, bias, residual, cts, axis, eps, activation):
    """Results, gradients and the input of the activation, from NumPy in float64."""
    x, scale, bias, dy, dmean, dvar = (
        np.asarray(a).astype(np.float64) for a in (x, scale, bias, *cts)
    )
    axes, n = across(x, axis), x.size // x.shape[axis]
    to = functools.partial(along, x=x, axis=axis)
    mean = x.mean(axes)
    centred = x - to(mean)
    var = (centred**2).mean(axes)
    rstd = 1 / np.sqrt(var + eps)
    z = centred * to(rstd * scale) + to(bias)
    if residual is not None:
        z = z + np.asarray(residual).astype(np.float64)
    y = np.maximum(z, 0) if activation else z
    g = np.where(z > 0, dy, 0) if activation else dy
    sums = g.sum(axes), (g * centred).sum(axes)
    dx = to(rstd * scale) * (g - to(sums[0] / n) - centred * to(sums[1] * rstd**2 / n))
    dx = dx + to(dmean / n) + 2 * centred * to(dvar / n)
    return (y, mean, var), (dx, sums[1] * rstd, sums[0], g), z


def check_shape(shape, axis, dtype, activation="relu", residual=True, seed=0, mean=0.0):
    rng = np.random.default_rng([seed, *shape])
    x, scale, bias = draws(shape, axis, parameters=jnp.promote_types(dtype, np.float32))(rng, dtype)
    x = (x.astype(np.float64) + mean).astype(dtype)
    res = normal(rng, shape, dtype) if residual else None
    wide = scale.dtype
    eps, unit = 1e-3, 8 * (1 + abs(mean))
    zeros = (np.zeros(shape), *(np.zeros(scale.shape),) * 2)
    z = exact(x, scale, bias, res, zeros, axis, eps, activation)[2]
    # If z is 0 within rounding, the mask bit may have either value.
    unsure = np.abs(z) < 64 * float(jnp.finfo(wide).eps) * unit if activation else False
    dy = np.where(unsure, 0, normal(rng, shape, np.float64)).astype(dtype)
    cts = (dy, *(normal(rng, scale.shape, wide) for _ in range(2)))
    options = dict(axis=axis, eps=eps, activation=activation)
    args = (x, scale, bias, *([res] if residual else []))
    out, grads = jax.jit(value_and_gradients(op, **options))(cts, *args)
    want_out, want_grads, _ = exact(x, scale, bias, res, cts, axis, eps, activation)
    n = x.size // scale.size
    names = ("y", "mean", "var")
    largest_rstd = 1 / math.sqrt(want_out[2].min() + eps)  # from an error of mean to one of y
    sizes = (largest_rstd, 1, want_out[2].max())
    for name, got, want, size in zip(names, out, want_out, sizes, strict=True):
        assert got.dtype == (x.dtype if name == "y" else wide)
        assert_within(got, want, unit * max(1, size), f"{name} of {shape}")
    names = ("dx", "dscale", "dbias", "dresidual")
    for name, got, want in zip(names, grads, want_grads, strict=False):
        rows = math.sqrt(n) if name in ("dscale", "dbias") else 1
        largest = np.abs(want).max(initial=1)
        assert_within(got, want, unit * 4 * rows * largest, f"{name} of {shape}")


LAYOUTS = [
    ((4, 6, 6, 16), -1),
    ((300, 3), -1),
    ((5, 7, 17), 2),
    ((8, 9, 63), -1),
    ((33, 257), -1),
    ((6, 2050), -1),
    ((3, 5001), -1),
    ((5, 4, 7, 7), 1),
    ((2, 3, 61, 67), 1),
    ((7, 33, 3), 1),
    ((2, 3, 4, 5, 6), 2),
    ((6, 50), 0),
    ((1, 40), 1),
    ((40,), 0),
]


@pytest.mark.parametrize("shape, axis", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_layouts(shape, axis, kind):
    check_shape(shape, axis, jnp.dtype(kind))


@pytest.mark.slow
@pytest.mark.parametrize("shape, axis", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "activation, residual", list(itertools.product((None, "relu"), (False, True)))
)
def test_layouts_every_dtype(shape, axis, activation, residual, dtype):
    check_shape(shape, axis, dtype, activation, residual)


@pytest.mark.parametrize("shape, axis", [((64, 28, 28, 24), -1), ((33, 24, 28, 31), 1)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_many_rows(shape, axis, residual):
    check_shape(shape, axis, jnp.dtype("float32"), residual=residual)


# On a GPU, each direction is one kernel. It keeps all, a part or little of its arrays on the chip.
# The shapes include partial vectors, masks that end within a word, few channels, and long rows.
ON_CHIP = [
    ((64, 28, 28, 64), -1),
    ((128, 28, 28, 128), -1),
    ((1, 4097, 1023), -1),
    ((2999999, 1), -1),
    ((700003, 3), -1),
    ((65, 33, 1000), 1),
    ((9, 3, 400, 401), 1),
    ((300, 8192), -1),
    ((300, 8000), -1),
    ((70001, 33), -1),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape, axis", ON_CHIP, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_what_stays_on_the_chip(shape, axis, kind, activation):
    check_shape(shape, axis, jnp.dtype(kind), activation, residual=False)


# [o, c, i], and the number of examples (0: not mapped). On a GPU this is one kernel, except for the
# first shape, and for the last one in bfloat16. With 256 channels, a part of the input does not
# stay on the chip.
TOGETHER = [
    ((300, 3, 1), 0),
    ((100352, 24, 1), 0),
    ((33, 24, 868 * 2), 0),
    ((70001, 33, 1), 0),
    ((20000, 256, 1), 0),
    ((11000, 256, 1), 3),
    ((43000, 12, 1), 3),
    ((43001, 12, 1), 3),
]


@pytest.mark.parametrize("shape, examples", TOGETHER, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_both_passes_in_one_call(shape, examples, masked, kind):
    """Compared with two kernels: equal averages within rounding, and from these the same dx."""
    rng, dtype, n = np.random.default_rng(25), jnp.dtype(kind), math.prod(shape)
    lead = (examples,) if examples else ()
    x = normal(rng, (*lead, *shape), dtype)
    dy = (normal(rng, (*lead, *shape), np.float64) + 1).astype(dtype)
    mask = None
    if masked:
        mask = rng.integers(0, 256, (*lead, -(-n // 8)), np.uint8)
        bits = np.unpackbits(mask, axis=-1, count=n, bitorder="little").reshape(dy.shape)
        dy = np.where(bits, dy, np.asarray(np.nan, dtype))
    mean, var, scale, dmean, dvar = (normal(rng, (*lead, shape[1]), np.float32) for _ in range(5))
    args = (x, dy, mask, mean, var**2 + 0.5, scale, dmean, dvar)
    run = lambda f: jax.jit(jax.vmap(f) if examples else f)  # noqa: E731

    def sums_alone(x, dy, mask, mean, var, scale, *_):
        return kernels._sums(x, [dy], mask, mean, var, scale, 1e-3)[0]

    def named(*values):
        return dict(zip(("mean", "var", "scale", "dmean", "dvar"), values, strict=True), eps=1e-3)

    def dx_of(sums, x, dy, mask, *values):
        kernel = kernels.BACKWARD_KERNEL
        return kernels._gradient(kernel, x, dy, mask, sums=sums, **named(*values))[0]

    def both(x, dy, mask, *values):
        return kernels._gradient(kernels.GRADIENT_KERNEL, x, dy, mask, **named(*values))

    dx, sums = run(both)(*args)
    np.testing.assert_allclose(sums, run(sums_alone)(*args), rtol=0, atol=5e-6)
    np.testing.assert_array_equal(dx, run(dx_of)(sums, *args))
    assert np.isfinite(np.asarray(dx).astype(np.float32)).all()


# The CPU kernels combine short rows, and divide long ones into strips. Here the last combination is
# incomplete, or a row has several strips.
@pytest.mark.parametrize(
    "shape, kind",
    [*itertools.product([(2500, 24), (1031, 96), (9, 4160)], ["bfloat16"]), ((9, 4160), "float64")],
    ids=str,
)
def test_many_rows_together(shape, kind):
    with x64(kind == "float64"):
        check_shape(shape, -1, jnp.dtype(kind))


def any_shapes(examples, kind):
    @settings(examples)
    @hypothesis.given(
        st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 4), st.booleans()
    )
    def check(shape, axis, plain):
        activation = None if plain else "relu"
        check_shape(tuple(shape), axis % len(shape), jnp.dtype(kind), activation)

    check()


def test_any_shapes():
    any_shapes(25, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_more_shapes(kind):
    any_shapes(150, kind)


@pytest.mark.parametrize("shape, axis", [((40, 6, 16), -1), ((9, 16, 7, 5), 1)], ids=str)
def test_gradients_at_large_means(shape, axis):
    check_shape(shape, axis, jnp.dtype("float32"), mean=1e3)


@pytest.mark.parametrize("shape, axis", [((512, 8, 24), -1), ((64, 24, 15, 7), 1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_means_far_larger_than_deviations(shape, axis, mode):
    """At most twice the error of two passes. Sums of squares would lose the whole variance."""
    rng = np.random.default_rng(1)
    for shift in (1e4, -3e4):
        x = (normal(rng, shape, np.float64) + shift).astype(np.float32)
        x[0] = shift  # the first values are all equal
        with implementation(mode):
            mean, var = jax.jit(functools.partial(op, axis=axis))(x, None, None)[1:]
        wide = x.astype(np.float64)
        exact_mean, exact_var = wide.mean(across(x, axis)), wide.var(across(x, axis))
        plain_mean, plain_var = statistics(x, axis)
        eps = float(np.finfo(np.float32).eps)
        for got, plain, want in ((mean, plain_mean, exact_mean), (var, plain_var, exact_var)):
            error, theirs = (np.abs(np.asarray(a) - want).max() for a in (got, plain))
            assert error <= max(2 * theirs, eps * np.abs(want).max())


def test_a_first_row_like_no_other():
    x = np.random.default_rng(2).standard_normal((4096, 5)).astype(np.float32) + 1e4
    x[:3] = 0
    mean, var = op(x, None, None)[1:]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(var, wide.var(0), rtol=1e-5)


@pytest.mark.parametrize("mode", ["native", "xla"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_nan_and_infinity_stay_in_their_channel(dtype, axis, mode):
    rng = np.random.default_rng(3)
    shape = (6, 8, 8)
    x, scale, bias = draws(shape, axis)(rng, dtype)
    x = np.moveaxis(x.copy(), axis, 0)
    for c, value in enumerate((np.nan, np.inf, -np.inf)):
        x[c, 2, 3] = value
    x[3, 1, 1], x[3, 2, 2] = np.inf, -np.inf
    middle = (4, 4) if axis == 1 else (3, 4)  # where the reference has its anchor
    for c, value, other in ((4, np.inf, 1), (5, np.inf, np.nan), (6, -np.inf, np.inf)):
        x[(c, *middle)], x[c, 0, 0] = value, other
    x = np.moveaxis(x, 0, axis)
    cts = (normal(rng, shape, dtype), *(np.zeros(8, jnp.promote_types(dtype, np.float32)),) * 2)
    run = lambda f: jax.jit(value_and_gradients(f, axis=axis, activation="relu"))(  # noqa: E731
        cts, x, scale, bias
    )
    with implementation(mode):
        got, want = run(op), run(reference)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, theirs = (np.asarray(a).astype(np.float64) for a in (mine, theirs))
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        close = np.isfinite(theirs)
        limit = 32 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(mine[close], theirs[close], rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_large_values(kind):
    """Values close to the limit of float16, or squares close to that of float32."""
    dtype = jnp.dtype(kind)
    rng = np.random.default_rng(4)
    top = 0.25 * float(jnp.finfo(dtype).max) if kind == "float16" else 1e18
    x = (normal(rng, (64, 8), np.float64).clip(-3, 3) * top).astype(dtype)
    y, mean, var = op(x, None, None)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(0), atol=1e-5 * top)
    np.testing.assert_allclose(var, wide.var(0), rtol=1e-4)
    assert np.isfinite(np.asarray(y).astype(np.float64)).all()


def test_one_element_for_each_channel(dtype):
    rng = np.random.default_rng(5)
    x, scale, bias = draws((1, 8))(rng, dtype)
    wide = jnp.promote_types(dtype, np.float32)
    cts = (normal(rng, (1, 8), dtype), np.zeros(8, wide), np.zeros(8, wide))
    (y, mean, var), grads = jax.jit(value_and_gradients(op))(cts, x, scale, bias)
    assert_bitwise_equal(mean, x[0].astype(wide))
    assert not np.asarray(var).any()
    assert_bitwise_equal(y, (bias + jnp.zeros(8, dtype))[None])
    dx, dscale, dbias = grads
    assert not np.asarray(dscale).any() and not np.asarray(dx).any()
    assert_bitwise_equal(dbias, cts[0][0])


def test_a_cotangent_that_is_not_masked_in_is_not_multiplied():
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    y, pullback = jax.vjp(lambda r: op(x, None, None, r, activation="relu")[0], np.zeros_like(x))
    dy = np.where(np.asarray(y) > 0, np.float32(1), np.float32(np.inf))
    assert_bitwise_equal(pullback(dy)[0], (np.asarray(y) > 0).astype(np.float32))


@pytest.mark.parametrize("shape, axis", [((0, 4), -1), ((3, 0), -1), ((2, 3, 0), 1)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_no_elements(shape, axis):
    c = shape[axis]
    x, ones = np.zeros(shape, np.float32), np.ones(c, np.float32)
    got, want = (
        value_and_gradients(f, axis=axis)((x, ones, ones), x, ones, ones) for f in (op, reference)
    )
    assert_matches(got[0], want[0])
    assert got[1][0].shape == shape


@pytest.mark.parametrize("kind, var, eps", [("bfloat16", 0.004, 0.003), ("float16", 0.0, 1e-8)])
def test_the_gradient_of_a_narrow_variance_is_rounded_once(kind, var, eps):
    """In 16 bits, ``var + eps`` would round eps or lose it, and a variance of 0 would divide."""
    rng = np.random.default_rng(21)
    x = normal(rng, (32, 8), kind)
    given = [np.zeros(8), np.full(8, var), rng.uniform(1e-5, 3e-5, 8)]
    given = [a.astype(kind) for a in given]
    weights = np.where(np.arange(8) % 2, 1e-4, 0).astype(kind)  # every other gradient is 0

    def gradient(mean, var, scale):
        run = lambda var: fo.batch_norm_inference(x, mean, var, scale, None, eps=eps)  # noqa: E731
        (found,) = jax.vjp(run, var)[1](jnp.broadcast_to(weights, x.shape))
        return np.asarray(found)

    want = gradient(*(a.astype(np.float32) for a in given))
    assert np.isfinite(want).all() and np.any(want)
    assert_bitwise_equal(gradient(*given), want.astype(kind))


def test_through_the_statistics():
    """The returned statistics can be differentiated, with or without the result."""
    rng = np.random.default_rng(7)
    with x64():
        x, scale, bias = draws((6, 2, 5))(rng, np.float64)
        weights = rng.standard_normal(5)
        for parts in ((1,), (2,), (0, 1, 2)):

            def loss(fn, x, scale, bias, parts=parts):
                out = fn(x, scale, bias, activation="relu")
                return sum(jnp.sum(jnp.sin(out[i]) * weights) for i in parts)

            got, want = (
                jax.grad(functools.partial(loss, fn), (0, 1, 2))(x, scale, bias)
                for fn in (op, reference)
            )
            for mine, theirs in zip(got, want, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


# Two users of one result --------------------------------------------------------------------------


def test_a_cotangent_of_two_that_is_not_masked_in_is_not_multiplied():
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    users = lambda r: fanned(x, None, None, r, activation="relu")[:2]  # noqa: E731
    (y, _), pullback = jax.vjp(users, np.zeros_like(x))
    on = np.asarray(y) > 0
    dys = [np.where(on, np.float32(1), value) for value in (np.inf, np.nan)]
    assert_bitwise_equal(pullback(tuple(map(jnp.asarray, dys)))[0], 2 * on.astype(np.float32))


@pytest.mark.jax
def test_two_users_of_what_only_parameters_are_wanted_of():
    """The sum of the cotangents is written only if x or the residual needs a gradient."""
    x, c = jnp.ones((16, 4, 8)), jnp.ones(8)

    def gradients(dys, scale, bias):
        run = lambda *p: fanned(x, *p, activation="relu")[:2]  # noqa: E731
        return jax.vjp(run, scale, bias)[1](dys)

    text = jax.jit(gradients).lower((x, x), c, c).compile().as_text()
    assert targets(text) == ["batch_norm_fwd", "batch_norm_sums"]
    (call,) = (line for line in text.splitlines() if "jax_fastops.batch_norm_sums" in line)
    assert "f32[512]" not in call.partition("custom-call(")[0]


# Kernels and residuals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        (((), (), ()), {}, ValueError, r"x has shape \(\); it must have"),
        (((4, 3), (3,), (3,)), dict(axis=2), ValueError, "axis is 2"),
        (((4, 3), (3,), (3,)), dict(axis=1.0), TypeError, "axis is 1.0; it must be an integer"),
        (((4, 3), (4,), (3,)), {}, ValueError, r"scale has shape \(4,\); it must be \(3,\)"),
        (((4, 3), (3,), (1, 3)), {}, ValueError, r"bias has shape \(1, 3\); it must be \(3,\)"),
        (((4, 3), (3,), (3,), (3,)), {}, ValueError, r"residual has shape \(3,\); it must have"),
        (((4, 3), (3,), (3,)), dict(activation="gelu"), ValueError, "None or 'relu'"),
        (((4, 3), (3,), (3,)), dict(eps=math.nan), ValueError, "eps is nan"),
        (((4, 3), (3,), (3,)), dict(eps=-1e-6), ValueError, "eps is -1e-06; it must be 0 or more"),
        (((4, 3), (3,), (3,)), dict(eps="x"), TypeError, "eps is of type str"),
    ],
)
def test_errors(args, options, error, message):
    with pytest.raises(error, match=message):
        op(*(np.ones(shape, np.float32) for shape in args), **options)


def test_errors_of_dtypes():
    x = np.ones((4, 3), np.float32)
    with pytest.raises(TypeError, match="x has dtype int32"):
        op(x.astype(np.int32), None, None)
    with pytest.raises(TypeError, match="residual has dtype float16, but x has dtype float32"):
        op(x, None, None, x.astype(np.float16))
    with pytest.raises(TypeError, match="scale has dtype int32"):
        op(x, np.ones(3, np.int32), None)
    with pytest.raises(TypeError, match="mean is None"):
        fo.batch_norm_inference(x, None, x[0], None, None)
    with pytest.raises(TypeError, match="batch_norm_statistics: x has dtype int32"):
        fo.batch_norm_statistics(x.astype(np.int32))
    with pytest.raises(ValueError, match="batch_norm_statistics: axis is 2"):
        fo.batch_norm_statistics(x, axis=2)
    with pytest.raises(ValueError, match=r"var has shape \(4,\)"):
        fo.batch_norm_inference(x, x[0], np.ones(4, np.float32), None, None)


# vmap and sharding --------------------------------------------------------------------------------


def spread(mesh, args, spec):
    """Shards arrays of two or more dimensions by `spec`, and replicates the others."""
    put = lambda a: jax.device_put(a, NamedSharding(mesh, spec if a.ndim > 1 else P()))  # noqa: E731
    return jax.tree.map(put, args)


SHAPES = {
    "nhwc": ((16, 4, 3, 8), -1),
    "nchw": ((16, 8, 3, 5), 1),
    "three channels": ((64, 3), -1),
    "padded": ((16, 5), -1),
}


@pytest.mark.jax
@over_kinds
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_sharded_batch_is_one_batch(name, activation, axis_type):
    """One all-reduce for the statistics, one for the gradients, and no other communication."""
    mesh, (shape, axis) = mesh_for(axis_type), SHAPES[name]
    rng = np.random.default_rng(14)
    args = draws(shape, axis, True)(rng, np.float32)
    cts = (normal(rng, shape, np.float32), *(normal(rng, args[1].shape, np.float32),) * 2)
    options = dict(axis=axis, activation=activation)
    want = jax.jit(value_and_gradients(reference, **options))(cts, *args)
    with jax.set_mesh(mesh):
        cts, args = spread(mesh, (cts, args), P("a"))
        forward = jax.jit(functools.partial(op, **options)).lower(*args).compile().as_text()
        program = jax.jit(value_and_gradients(op, **options)).lower(cts, *args).compile()
        got, text = program(cts, *args), program.as_text()
    assert_close(got, want, rtol=2e-4, atol=2e-4)
    if name == "padded" and activation and jax.device_count() > 1:
        return  # the mask of a shard is not a whole number of bytes
    assert collectives(forward) == {"all-reduce": 1}
    assert collectives(text) == {"all-reduce": 2}
    assert len(targets(text)) == 4
    for result in (got[0][0], got[1][0], got[1][3]):
        assert_layout(name, result, NamedSharding(mesh, P("a")))


@pytest.mark.jax
def test_a_residual_that_is_spread_otherwise():
    """Over explicit axes, the result is sharded as a sum. Different axes are an error."""
    count = device_count()
    if count < 4:
        pytest.skip("needs four devices")
    mesh = make_mesh({"a": 2, "b": count // 2}, AxisType.Explicit)
    x, residual = (normal(np.random.default_rng(i), (16, 8), np.float32) for i in (22, 23))

    def run(spec, other):
        with jax.set_mesh(mesh):
            put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
            fn = jax.jit(value_and_gradients(op, activation="relu"))
            dy, c = put(x, other if spec == P() else spec), put(jnp.ones(8), P())
            return fn((dy, c, c), put(x, spec), c, c, put(residual, other))

    c = np.ones(8, np.float32)
    plain = jax.jit(value_and_gradients(reference, activation="relu"))
    got, want = run(P(), P("a")), plain((x, c, c), x, c, c, residual)
    assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert jax.typeof(got[0][0]).sharding.spec[0] == "a"
    with pytest.raises(Exception, match="incompatible shardings"):
        run(P("b"), P("a"))


@pytest.mark.jax
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_batch_spread_by_shard_map(activation, check_vma):
    mesh = mesh_for(AxisType.Auto)
    rng = np.random.default_rng(15)
    args = draws((16, 3, 8), residual=True)(rng, np.float32)
    cts = (normal(rng, (16, 3, 8), np.float32), *(normal(rng, (8,), np.float32),) * 2)
    whole, specs = P("a"), (P("a"), P(), P(), P("a"))

    def part(*args):
        return op(*args, activation=activation, axis_name="a")

    mapped = jax.shard_map(
        part, mesh=mesh, in_specs=specs, out_specs=(whole, P(), P()), check_vma=check_vma
    )
    got = jax.jit(value_and_gradients(mapped))(cts, *args)
    want = jax.jit(value_and_gradients(reference, activation=activation))(cts, *args)
    assert_close(got, want, rtol=2e-4, atol=2e-4)
    text = jax.jit(mapped).lower(*args).compile().as_text()
    assert collectives(text) == {"all-reduce": 1}


@pytest.mark.jax
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("by", [op, fanned])
def test_a_batch_spread_by_vmap(by, activation):
    """With `axis_name`, the examples of a map are one batch, also of two users of its result."""
    rng = np.random.default_rng(16)
    x, scale, bias, residual = draws((24, 8), residual=True)(rng, np.float32)

    def loss(fn, x, scale, bias, residual, **options):
        *ys, mean, var = fn(x, scale, bias, residual, activation=activation, **options)
        users = (jnp.sin(ys[0]) * jnp.arange(8)).sum() + jnp.square(ys[-1]).sum()
        return users + mean.sum() + (var * jnp.arange(8)).sum()

    def parts(x, scale, bias, residual):
        each = functools.partial(loss, by, axis_name="i")
        split = lambda a: a.reshape(3, 8, 8)  # noqa: E731
        run = jax.vmap(each, (0, None, None, 0), axis_name="i")
        return run(split(x), scale, bias, split(residual)).sum()

    def whole(*args):
        y, mean, var = reference(*args, activation=activation)
        users = (jnp.sin(y) * jnp.arange(8)).sum() + jnp.square(y).sum()
        return users + 3 * (mean.sum() + (var * jnp.arange(8)).sum())

    args = (x, scale, bias, residual)
    got = jax.jit(jax.value_and_grad(parts, (0, 1, 2, 3)))(*args)
    want = jax.jit(jax.value_and_grad(whole, (0, 1, 2, 3)))(*args)
    assert_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("use", ["forward", "grad"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_auto_goes_by_where_the_channels_are(axis, use, given, monkeypatch):
    name = "batch_norm_inference" if given else "batch_norm"
    where = ["inner_bytes", 1, axis == -1, axis == 1]
    found = {"forward": False, "grad": False} | {use: where}
    monkeypatch.setattr(_dispatch, "trees", lambda platform: {name: {"float32": found}})
    x, values = jnp.ones((4, 8, 8)), [jnp.ones(8)] * (4 if given else 2)
    fn = inference if given else op
    with implementation("auto"):
        for at in (-1, 1):
            run = functools.partial(fn, axis=at)
            if use == "grad":
                run = value_and_gradients(run)
                cts = x if given else (x, *values)
                text = jax.jit(run).lower(cts, x, *values).compile().as_text()
            else:
                text = jax.jit(run).lower(x, *values).compile().as_text()
            assert bool(targets(text)) == (at == axis)


@pytest.mark.parametrize("mode, limit", [("native", 1e-3), ("xla", 0.1)])
def test_derivatives_of_statistics_far_from_zero(mode, limit):
    """Forward and reverse mode, for a mean far larger than the deviations."""
    rng = np.random.default_rng(27)
    x, dx = (1e4 + rng.standard_normal((2, 392, 8, 5)) for _ in range(2))
    cts = tuple(rng.standard_normal((2, 8)))
    fn, found = functools.partial(fo.batch_norm_statistics, axis=2), []
    for dtype in (np.float32, np.float64):
        with x64(dtype == np.float64), implementation(mode):
            given, tangent = (a.astype(np.float32).astype(dtype) for a in (x, dx))
            moved = jax.jit(functools.partial(jax.jvp, fn))((given,), (tangent,))[1]
            pull = jax.jit(lambda x, cts: jax.vjp(fn, x)[1](cts))
            found.append((*moved, *pull(given, tuple(c.astype(dtype) for c in cts))))
    for mine, exact in zip(*found, strict=True):
        error = np.linalg.norm(np.asarray(mine, np.float64) - np.asarray(exact, np.float64))
        assert error <= limit * np.linalg.norm(exact)
