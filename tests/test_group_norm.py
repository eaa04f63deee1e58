"""Group norm: transformations, layouts, accuracy, extreme values, shapes that take other paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.case import VARIANT
from harness.numerics import normal
from harness.programs import targets_of, value_and_gradients

import jax_fastops as fo
from jax_fastops._activations import ACTIVATIONS

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]


def reference(x, *values, residual=False, num_groups, axis=-1, eps=1e-6, activation=None):
    """In the accumulator dtype, rounded once. ``values``: residual, scale, bias."""
    x = jnp.asarray(x)
    if residual:
        x, values = x + values[0], values[1:]
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    at = axis % x.ndim
    group = (num_groups, x.shape[at] // num_groups)
    grouped = wide.reshape(*x.shape[:at], *group, *x.shape[at + 1 :])
    axes = tuple(i for i in range(1, grouped.ndim) if i != at)
    centred = grouped - grouped.mean(axes, keepdims=True)
    y = centred / jnp.sqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)
    y = y.reshape(x.shape)
    along = [-1 if i == at else 1 for i in range(x.ndim)]
    for value, apply in zip(values, (jnp.multiply, jnp.add), strict=False):
        y = apply(y, value.astype(wide.dtype).reshape(along))
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y.astype(x.dtype)


def op(x, *values, residual=False, **options):
    if residual:
        options["residual"], values = values[0], values[1:]
    return fo.group_norm(x, *values, **options)


def draws(shape, axis=-1, residual=False, parameters=2, wide=None):
    """Draws x, the residual if ``residual``, scale and bias."""

    def make(rng, dtype):
        own, c = wide or dtype, shape[axis]
        values = [normal(rng, (c,), np.float64) / 4 + 1, normal(rng, (c,), np.float64)]
        arrays = [normal(rng, shape, dtype) for _ in range(1 + residual)]
        return *arrays, *(v.astype(own) for v in values[:parameters])

    return make


def case(name, shape, groups, axis=-1, residual=False, parameters=2, wide=None, **more):
    options = dict(num_groups=groups, axis=axis, eps=1e-2, activation=more.pop("activation", None))
    options |= dict(residual=residual)
    make = functools.partial(draws, axis=axis, residual=residual, parameters=parameters, wide=wide)
    if sharded := more.pop("sharded", None):
        more["make_sharded_args"] = make(sharded)
        spread = (*(0,) * (1 + residual), *(None,) * parameters)
        more["shardings"] = (Sharding("batch", spread, (0,), gradient_all_reduces=parameters),)

    def kept(x, *rest):
        wide = jnp.promote_types(x.dtype, np.float32)
        own = [(v.dtype, v.size) for v in rest[residual:]]
        return [(x.dtype, x.size), *own, *[(wide, x.shape[0] * groups)] * 2]

    return Case(
        name=name,
        fn=functools.partial(op, **options),
        reference=functools.partial(reference, **options),
        make_args=make(shape),
        tolerance=Tolerance(ulps=64.0, lone=4.0),  # terms of the sums cancel
        kernels=("group_norm", "group_norm_bwd"),
        maps=(tuple(range(1 + residual)),),
        kept=kept,
        shards_under_vmap=False,
        sums_by_address=True,
        empty="b",
        **more,
    )


NHWC = case(
    "nhwc",
    (3, 2, 5, 6),
    2,
    activation="silu",
    sharded=(16, 2, 3, 4),
    symbolic=("b, 2, 5, 6", "6", "6"),
    sizes=({"b": 35}, {"b": 1}),
)
NCHW = case(
    "nchw",
    (3, 4, 2, 3),
    2,
    axis=1,
    residual=True,
    activation="gelu",
    sharded=(16, 4, 2, 3),
    symbolic=("b, 4, 2, 3", "b, 4, 2, 3", "4", "4"),
    dtypes=("bfloat16", "float32"),
    modes=("native",),
    quick=rf"{VARIANT}|value$|vjp$",
)
INSTANCE = case(
    "instance",
    (2, 5, 3),
    3,
    activation="relu",
    parameters=1,
    wide="float32",
    symbolic=("b, 5, 3", "3"),
    dtypes=("bfloat16",),
    modes=("native",),
    basic_only=True,
    quick=rf"{VARIANT}|value$|vjp$",
)
ONE_POSITION = case(
    "one_position",
    (3, 16),
    1,
    parameters=0,
    symbolic=("b, 16",),
    dtypes=("float64", "float32"),
    modes=("native",),
    basic_only=True,
    quick=rf"{VARIANT}|value$|vjp$",
)


@checks(NHWC, NCHW, INSTANCE, ONE_POSITION)
def test_harness(check):
    check()


# Shapes -------------------------------------------------------------------------------------------

# Shape, groups, axis: units that groups cut, channels that fill no unit, several sets and parts,
# one group of many channels, long positions, more tiles than blocks (sets of equal and of different
# sizes), and too many elements for shared memory.
SHAPES = [
    ((2, 9, 7, 20), 2, -1),
    ((2, 33, 60), 4, -1),
    ((3, 5, 24), 8, -1),
    ((1, 700, 40), 4, -1),
    ((2, 3, 2056), 1, -1),
    ((2, 5, 1025), 1, -1),
    ((2, 300, 3), 3, -1),
    ((1, 4, 2048), 1, -1),
    ((2, 6, 5, 7), 3, 1),
    ((2, 4, 64, 33), 2, 1),
    ((1, 64, 2, 4), 2, 1),
    ((2, 300, 16), 1, 1),
    ((1, 2, 5000), 2, 1),
    ((3, 16), 4, 1),
    ((350, 2, 72), 9, -1),
    ((700, 3, 16), 3, 1),
]
LARGE = [
    ((2, 64, 64, 320), 32, -1),
    ((1, 128, 128, 128), 32, -1),
    ((1, 200, 211, 64), 1, -1),
    ((1, 300, 301, 36), 3, -1),
    ((2, 32, 64, 64), 8, 1),
    ((1, 16, 301, 200), 2, 1),
    ((1, 8, 701, 301), 1, 1),
]


def check_shape(shape, groups, axis, dtype, residual=False, activation="silu"):
    options = dict(num_groups=groups, axis=axis, residual=residual, activation=activation)
    make = draws(shape, axis, residual)
    rng = np.random.default_rng(sum(shape))
    args = normal(rng, shape, jnp.dtype(dtype)), *make(rng, jnp.dtype(dtype))
    got = jax.jit(value_and_gradients(op, **options))(*args)
    want = jax.jit(value_and_gradients(reference, **options))(*(a.astype(np.float32) for a in args))
    epsilon = float(jnp.finfo(dtype).eps)
    for part, (a, b) in enumerate(zip(*map(jax.tree.leaves, (got, want)), strict=True)):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        assert error < 4 * epsilon + 2e-5, (shape, groups, axis, part, error)
        worst = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert worst < 8 * epsilon + 1e-4, (shape, groups, axis, part, worst)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes(dtype):
    for i, (shape, groups, axis) in enumerate(SHAPES):
        check_shape(shape, groups, axis, dtype, i % 3 == 0, ("silu", None)[i % 2])


def test_groups_of_two_elements():
    """Their gradients almost cancel, so nothing on the way to them may be rounded to 16 bits."""
    check_shape((2, 2, 8), 8, -1, "bfloat16", residual=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape, groups, axis", LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_shapes(shape, groups, axis, dtype):
    check_shape(shape, groups, axis, dtype)
    check_shape(shape, groups, axis, dtype, True, None)


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, axis", [((2, 700, 8), -1), ((2, 8, 700), 1)])
@pytest.mark.parametrize("offset, outlier", [(1e4, 0), (-3e5, 0), (0, 1e4), (5, 0)])
def test_large_means_and_outliers(shape, axis, offset, outlier):
    """The variance does not cancel, whatever the mean, and wherever an outlier is."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(shape) + offset).astype(np.float32)
    x[0].flat[0] += outlier
    x[1].flat[x[1].size // 2] += outlier
    got = jax.jit(functools.partial(fo.group_norm, num_groups=2, axis=axis))(x)
    with jax.enable_x64(True):
        want = np.asarray(reference(x.astype(np.float64), num_groups=2, axis=axis))
    # The mean is rounded to float32. An outlier in a sum of n squares may cost n units.
    limit = 2e-6 + abs(offset) * 1.2e-7 + (3e-5 if outlier else 0)
    assert np.abs(np.asarray(got, np.float64) - want).max() < limit * max(1, np.abs(want).max())


@pytest.mark.parametrize("axis", [-1, 1])
def test_constants_and_special_values(axis):
    """As in the reference, huge numbers have an infinite variance, and NaN and Inf spread."""
    norm = jax.jit(functools.partial(fo.group_norm, num_groups=2, axis=axis))
    shape = (3, 40, 8) if axis == -1 else (3, 8, 40)
    x = np.full(shape, 7.3, np.float32)
    assert not np.asarray(norm(x)).any()
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    group = np.moveaxis(x, axis, 1)
    assert not np.asarray(norm(x * np.float32(1e21))).any()
    group[0, 1, 3], group[1, 0, 0], group[2, 5, 9] = np.nan, np.inf, -np.inf
    found = np.isnan(np.moveaxis(np.asarray(norm(x)), axis, 1)).all(-1)
    expected = np.zeros((3, 8), bool)
    expected[0, :4] = expected[1, :4] = expected[2, 4:] = True
    np.testing.assert_array_equal(found, expected)


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(x=jnp.ones(4)), ValueError, r"x has shape \(4,\); it must have at least 2"),
        (dict(num_groups=3), ValueError, "num_groups is 3; it must divide 4"),
        (dict(num_groups=0), ValueError, "num_groups is 0"),
        (dict(num_groups=1.5), TypeError, "num_groups is 1.5"),
        (dict(axis=0), ValueError, "axis is 0; it must be an axis of x"),
        (dict(axis=3), ValueError, "axis is 3"),
        (dict(scale=jnp.ones(3)), ValueError, r"scale has shape \(3,\)"),
        (dict(residual=jnp.ones((2, 4))), ValueError, "residual has shape"),
        (dict(activation="tan"), ValueError, "activation is 'tan'"),
        (dict(eps=-1.0), ValueError, "eps is -1.0"),
        (dict(x=jnp.ones((2, 3, 4), int)), TypeError, "x has dtype int32"),
    ],
)
def test_errors(change, error, message):
    given = dict(x=jnp.ones((2, 3, 4)), num_groups=2) | change
    with pytest.raises(error, match=message):
        fo.group_norm(**given)


def test_channels_between_positions_take_the_reference():
    x = normal(np.random.default_rng(0), (2, 3, 4, 5), np.float32)
    options = dict(num_groups=2, axis=2)
    report = fo.explain(functools.partial(fo.group_norm, **options))(x)
    assert "neither before nor after" in report.calls[0].reason
    got = fo.group_norm(x, **options)
    np.testing.assert_allclose(got, reference(x, **options), atol=1e-5)


# Flax ---------------------------------------------------------------------------------------------


def flax_layers():
    """Layers of Flax NNX, ours, and arguments: of both kinds, and one that Flax's code runs."""
    nnx = pytest.importorskip("flax.nnx")
    from jax_fastops import nnx as own

    groups = dict(num_features=16, num_groups=4, epsilon=1e-3)
    return nnx, [
        (nnx.GroupNorm, own.GroupNorm, groups, True),
        (nnx.GroupNorm, own.GroupNorm, groups | dict(dtype=jnp.bfloat16, use_bias=False), True),
        (nnx.InstanceNorm, own.InstanceNorm, dict(num_features=16), True),
        (nnx.GroupNorm, own.GroupNorm, groups | dict(reduction_axes=(-2, -1)), False),
    ]


def test_nnx_layers():
    nnx, layers = flax_layers()
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.standard_normal((2, 3, 5, 16)), jnp.float32) for _ in "ab")
    for theirs, ours, options, taken in layers:
        flax, own = theirs(**options, rngs=nnx.Rngs(0)), ours(**options, rngs=nnx.Rngs(0))
        fused = ours(**options, activation="silu", rngs=nnx.Rngs(0))
        want = flax(x)
        got = own(x)
        assert got.dtype == want.dtype
        tolerance = 0.02 if want.dtype == jnp.bfloat16 else 1e-5
        close = functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance)
        close(*(np.asarray(v, np.float32) for v in (got, want)))
        close(
            np.asarray(fused(x, residual=residual), np.float32),
            np.asarray(jax.nn.silu(flax(x + residual)), np.float32),
        )
        kernels = targets_of(lambda own=own: own(x))
        assert ("group_norm" in kernels) == taken, (options, kernels)
        with fo.patch():
            assert ("group_norm" in targets_of(lambda flax=flax: flax(x))) == taken
    with pytest.raises(
        ValueError, match="GroupNorm: activation is 'tan'; it must be one of 'gelu'"
    ):
        layers[0][1](8, num_groups=2, activation="tan", rngs=nnx.Rngs(0))


def test_patch_of_linen():
    linen = pytest.importorskip("flax.linen")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5, 16)), jnp.float32)
    mask = jnp.ones(x.shape, bool).at[0].set(False)
    for layer, given, taken in (
        (linen.GroupNorm(num_groups=4), {}, True),
        (linen.GroupNorm(num_groups=None, group_size=2, use_scale=False), {}, True),
        (linen.InstanceNorm(epsilon=1e-3), {}, True),
        (linen.GroupNorm(num_groups=4), {"mask": mask}, False),
        (linen.GroupNorm(num_groups=4, reduction_axes=(-2, -1)), {}, False),
    ):
        variables = layer.init(jax.random.key(0), x)

        def loss(variables, layer=layer, given=given):
            return jnp.sum(jnp.sin(layer.apply(variables, x, **given)))

        want = jax.jit(jax.value_and_grad(loss))(variables)
        with fo.patch():
            got = jax.jit(jax.value_and_grad(loss))(variables)
            assert ("group_norm" in targets_of(loss, variables)) == taken
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)
