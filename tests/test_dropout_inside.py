"""Dropout in `softmax` and the residual norms: values, transformations, shards, rates, errors."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    Case,
    Sharding,
    Tolerance,
    assert_matches,
    checks,
    implementation,
)
from harness.case import FLOAT_DTYPES, OTHER_FORM, SLOW
from harness.compat import make_mesh
from harness.masks import dropout_mask, masks
from harness.numerics import normal, raw_key
from harness.programs import targets, targets_of, value_and_gradient, value_and_gradients
from harness.sharding import device_count
from jax.sharding import AxisType

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native", "looped_rounds")]

# "auto" takes one of the others, so its tests are slow.
MODES = ("native", "xla", pytest.param("auto", marks=pytest.mark.slow))
RATE = 0.3


def plain_dropout(x, key):
    keep = dropout_mask(key, x.shape, RATE)
    return jnp.where(keep, x * jnp.asarray(1 / (1 - RATE), x.dtype), jnp.zeros((), x.dtype))


# Softmax ------------------------------------------------------------------------------------------


def softmax(x, where, key, **options):
    return fo.softmax(x, where=where, dropout_key=key, dropout_rate=RATE, **options)


def softmax_reference(x, where, key, axis=-1, scale=1.0):
    p = jax.nn.softmax(x if scale == 1.0 else x * scale, axis=axis, where=where)
    wide = jnp.promote_types(p.dtype, jnp.float32)
    return plain_dropout(p.astype(wide), key).astype(p.dtype)


def softmax_draws(shape, mask):
    def make(rng, dtype):
        where = rng.random(mask) < 0.7
        where[..., :1] = True
        return normal(rng, shape, dtype), where, raw_key(int(rng.integers(1 << 30)))

    return make


def softmax_case(name, shape, mask, sharded=None, sharded_mask=None, options=None, **more):
    if sharded is not None:
        more["make_sharded_args"] = softmax_draws(sharded, sharded_mask)
    return Case(
        name=name,
        fn=functools.partial(softmax, **(options or {})),
        reference=functools.partial(softmax_reference, **(options or {})),
        make_args=softmax_draws(shape, mask),
        tolerance=Tolerance(ulps=16.0),
        **more,
    )


SOFTMAX = softmax_case(
    "softmax",
    (2, 2, 3, 8),
    (2, 1, 1, 8),
    (8, 8, 16, 16),
    (8, 1, 1, 16),
    options=dict(scale=0.25),
    shardings=(  # in shard_map, rows count from 0
        Sharding("batch", (0, 0, None), (0,), shard_map=False),
        Sharding("heads", (1, None, None), (1,), shard_map=False),
    ),
    symbolic=("b, h, q, k", "b, 1, 1, k", "2"),
)
# The other cases differ from the first of each test in the kernels that they take.
ODD = softmax_case(
    "odd", (2, 2, 3, 5), (2, 1, 1, 5), (8, 8, 16, 12), (8, 1, 1, 12), quick=OTHER_FORM
)
LONG = softmax_case("long", (2, 1001), (1, 1001), basic_only=True, modes=("native",))
AXIS = softmax_case(
    "axis", (2, 4, 9), (1, 4, 1), options=dict(axis=1), basic_only=True, modes=("native", "xla")
)


@checks(SOFTMAX, ODD, LONG, AXIS)
def test_softmax(check):
    check()


def assert_one_after_the_other(got, want, scale=0.5):
    """The kernel with dropout rounds once, where the two ops round twice."""
    eps = 4 * float(jnp.finfo(want[0].dtype).eps)
    for x, y, size in zip(got, want, (1, 4 * abs(scale)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=eps, atol=eps * size)
        np.testing.assert_array_equal((x == 0) & (size == 1), (y == 0) & (size == 1))


@pytest.mark.parametrize(
    "shape, mode",
    [
        *((shape, "native") for shape in ((3, 5, 7), (2, 4, 264), (2, 3, 333), (2, 3, 4096))),
        ((3, 5, 7), "xla"),
        pytest.param((3, 5, 7), "auto", marks=SLOW),
    ],
)
def test_softmax_is_dropout_of_softmax(shape, mode, dtype):
    """But for rounding, in values and gradients, whatever the axis is."""
    rng, key = np.random.default_rng(0), jax.random.key(5)
    x, dy = normal(rng, shape, dtype), normal(rng, shape, dtype)
    where = rng.random(shape) < 0.8

    def both(x, dy, where, axis):
        options = dict(axis=axis, where=where, scale=0.5)
        inside = lambda x: fo.softmax(x, **options, dropout_key=key, dropout_rate=RATE)  # noqa: E731
        after = lambda x: fo.dropout(fo.softmax(x, **options), key, RATE)  # noqa: E731
        return [value_and_gradient(f)(x, dy) for f in (inside, after)]

    @jax.jit  # one program, in which XLA computes one mask
    def each(*args):
        return [both(*args, axis) for axis in (-1, 0, (0, 2), None)]

    with implementation(mode):
        results = each(x, dy, where)
    keep = masks(jax.random.key_data(key), shape, RATE)
    for got, want in results:
        assert_one_after_the_other(got, want)
        assert not np.any(np.asarray(got[0])[~keep])


HARD = {
    "masked": dict(masked=0),
    "nan": dict(x=np.nan),
    "infinite": dict(x=np.inf),
    "bottom": dict(x=-np.inf),
    "cotangent": dict(dy=np.inf),
    "zero scale": dict(scale=0.0, x=np.inf),
    "negative scale": dict(scale=-2.0, masked=1),
    "large": dict(scale=1e3),
}


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("columns", [64, 301, 512])
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("narrow", ["float32", "bfloat16", pytest.param("float16", marks=SLOW)])
def test_hard_rows(name, columns, mask, narrow):
    """Rows whose sums are not finite."""
    what, rng, key = HARD[name], np.random.default_rng(1), jax.random.key(3)
    shape = (5, columns)
    x, dy = (np.array(normal(rng, shape, narrow)) for _ in range(2))
    where = rng.random(shape) < 0.8 if mask else None
    x[1, 3], x[2] = what.get("x", 1), what.get("x", 1)
    dy[1, ::2] = what.get("dy", 1)
    if mask and "masked" in what:
        where[what["masked"] :: 2] = False
    options = dict(where=where, scale=what.get("scale", 1.0))

    def run(f):
        y, pullback = jax.vjp(f, x)
        return y, pullback(dy)[0]

    with implementation("native"):
        got = run(lambda x: fo.softmax(x, **options, dropout_key=key, dropout_rate=RATE))
        want = run(lambda x: fo.dropout(fo.softmax(x, **options), key, RATE))
    assert_one_after_the_other(got, want, options["scale"])


# Norms --------------------------------------------------------------------------------------------


def norm(x, residual, scale, input_bias, key, *, name, **options):
    options.update(input_bias=input_bias, dropout_key=key, dropout_rate=RATE)
    y = getattr(fo, name)(x, residual, scale, eps=0.1, **options)
    return (*y[0], y[1]) if "fanout" in options else y


def norm_reference(x, residual, scale, input_bias, key, *, name, return_sum=False, fanout=False):
    wide = jnp.promote_types(x.dtype, np.float32)
    s = plain_dropout(x.astype(wide) + input_bias.astype(wide), key) + residual.astype(wide)
    # Without the barrier, XLA on a GPU would skip the rounding. The sum's two gradients are added
    # in its dtype.
    s = jax.lax.optimization_barrier(s.astype(x.dtype))
    y = s.astype(wide)
    if "rms" not in name:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 0.1) * scale.astype(wide)
    y = y.astype(x.dtype)
    return (y,) * (1 + fanout) + (s,) if return_sum else y


def norm_draws(shape, parameters=None):
    def make(rng, dtype):
        own = parameters or dtype
        scale, bias = (normal(rng, shape[-1:], np.float64) for _ in range(2))
        return (
            normal(rng, shape, dtype),
            normal(rng, shape, dtype),
            (scale / 4 + 1).astype(own),
            bias.astype(own),
            raw_key(int(rng.integers(1 << 30))),
        )

    return make


def norm_case(name, op, shape, sharded=None, parameters=None, options=None, **more):
    if sharded is not None:
        more["make_sharded_args"] = norm_draws(sharded, parameters)
    options = dict(options or {}, name=op)
    return Case(
        name=name,
        fn=functools.partial(norm, **options),
        reference=functools.partial(norm_reference, **options),
        make_args=norm_draws(shape, parameters),
        tolerance=Tolerance(ulps=32.0),
        shards_under_vmap=False,
        **more,
    )


LAYER = norm_case(
    "layer",
    "residual_layer_norm",
    (3, 9),
    (8, 16, 12),
    shardings=(
        Sharding("batch", (0, 0, None, None, None), (0,), gradient_all_reduces=2, shard_map=False),
    ),
    symbolic=("b, n", "b, n", "n", "n", "2"),
)
RMS = norm_case(
    "rms",
    "residual_rms_norm",
    (2, 3, 17),
    parameters=np.float32,
    options=dict(return_sum=True, fanout=True),
    dtypes=("bfloat16", "float32"),
    basic_only=True,
    modes=("native", "xla"),
)
WIDE = norm_case(
    "wide", "residual_layer_norm", (3, 1000), dtypes=("bfloat16", "float16"), basic_only=True
)
INSIDE = norm_case(
    "inside",
    "residual_layer_norm",
    (2, 3, 264),
    (8, 16, 256),
    shardings=(
        Sharding("batch", (0, 0, None, None, None), (0,), gradient_all_reduces=2, shard_map=False),
    ),
    symbolic=("a, b, 264", "a, b, 264", "264", "264", "2"),
    quick=OTHER_FORM,
)
INSIDE_RMS = norm_case(
    "inside rms",
    "residual_rms_norm",
    (5, 264),
    parameters=np.float32,
    options=dict(return_sum=True, fanout=True),
    dtypes=("bfloat16", "float32"),
    basic_only=True,
    modes=("native", "xla"),
)


@checks(LAYER, RMS, WIDE, INSIDE, INSIDE_RMS)
def test_norms(check):
    check()


N = (1, 7, 8, 31, 64, 129, 256, 261, 516, 772, 1000, 1024, 1028, 4097)


@pytest.mark.parametrize(
    "dtype, kind",
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float64", "float64"),
    ],
    indirect=["dtype"],
)
def test_sums_of_any_length(kind, dtype):
    """Kernel and reference have NumPy's sums, for unaligned rows, and biases of both dtypes."""
    rng, key = np.random.default_rng(2), jax.random.key(4)
    given = [
        (normal(rng, (4, n), dtype), normal(rng, (4, n), dtype), normal(rng, (n,), kind)) for n in N
    ]

    @functools.partial(jax.jit, static_argnums=1)
    def sums(given, first):
        options = dict(dropout_key=key, dropout_rate=0.25, return_sum=True)
        return [
            fo.residual_rms_norm(x[first:], residual[first:], input_bias=bias, **options)[1]
            for x, residual, bias in given
        ]

    def by_numpy(x, residual, bias):
        kind = jnp.promote_types(dtype, np.float32)
        keep = masks(jax.random.key_data(key), x.shape, 0.25)
        kept = np.where(keep, x.astype(kind) + bias.astype(kind), 0) * kind.type(1 / 0.75)
        return (kept + residual.astype(kind)).astype(dtype)

    # Addresses matter to kernels only: the reference does not get rows that are not aligned.
    for mode, first in (("native", 0), ("native", 1), ("xla", 0)):
        with implementation(mode):
            found = [np.asarray(a) for a in sums(given, first)]
        for got, (x, residual, bias) in zip(found, given, strict=True):
            want = by_numpy(x[first:], residual[first:], bias)
            assert got.dtype == want.dtype
            # A multiplication and an addition may be one instruction.
            epsilon = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=2 * epsilon, atol=8 * epsilon
            )


NORMED = [(37, 256), (3, 5, 300), (256,), (130, 768), (9, 1, 1024)]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(
    "shape, dtype",
    [  # the kernels of float16 are those of bfloat16, and float64 has no vectors of its own
        pytest.param(shape, kind, marks=[SLOW] * (i > 0 and kind in ("float16", "float64")))
        for i, shape in enumerate(NORMED)
        for kind in FLOAT_DTYPES
    ],
    indirect=["dtype"],
)
@pytest.mark.parametrize("op", ["residual_layer_norm", "residual_rms_norm"])
def test_norm_with_dropout_inside(op, shape, odd, dtype, monkeypatch):
    """Values and all gradients are those of dropout, then norm; also for rows at any address."""
    if odd:
        monkeypatch.setattr("jax_fastops.norm._takes_dropout", lambda x, drop: True)
        shape = (*shape[:-1], shape[-1] - 3)
    rng, key = np.random.default_rng(3), jax.random.key(6)
    x, residual, *cts = (normal(rng, shape, dtype) for _ in range(5))
    kind = jnp.promote_types(dtype, np.float32) if len(shape) > 2 else dtype
    scale, bias = (normal(rng, shape[-1:], kind) for _ in range(2))

    def together(x, residual, scale, bias):
        options = dict(input_bias=bias, dropout_key=key, dropout_rate=RATE)
        y, s = getattr(fo, op)(x, residual, scale, **options, return_sum=True, fanout=True)
        return *y, s

    def apart(x, residual, scale, bias):
        wide = jnp.promote_types(x.dtype, np.float32)
        s = fo.dropout(x.astype(wide) + bias.astype(wide), key, RATE) + residual.astype(wide)
        s = jax.lax.optimization_barrier(s.astype(x.dtype))
        return *getattr(fo, op.removeprefix("residual_"))(s, scale, fanout=True), s

    @jax.jit
    def both(*args):
        results = (value_and_gradients(f)(*args) for f in (together, apart))
        return [(*y, *gradients) for y, gradients in results]

    with implementation("native"):
        got, want = both(tuple(cts), x, residual, scale, bias)
    eps, rows = float(jnp.finfo(dtype).eps), np.sqrt(np.prod(shape[:-1]))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        atol = 32 * eps * (rows if i > 4 else 1)  # sums over rows
        np.testing.assert_allclose(a, b, rtol=16 * eps, atol=atol, err_msg=str(i))
    keep = np.asarray(fo.dropout_mask(key, shape, RATE))
    assert not np.any(np.asarray(got[3])[~keep])
    assert np.mean(np.asarray(got[3])[keep] == 0) < 0.01


# All ----------------------------------------------------------------------------------------------


def softmax_of(x, key, rate):
    return fo.softmax(x, dropout_key=key, dropout_rate=rate)


def layer_norm_of(x, key, rate):
    return fo.residual_layer_norm(x, x[::-1], dropout_key=key, dropout_rate=rate)


def rms_norm_of(x, key, rate):
    return fo.residual_rms_norm(x, x[::-1], dropout_key=key, dropout_rate=rate)


ALL = pytest.mark.parametrize("op", [softmax_of, layer_norm_of, rms_norm_of])


@ALL
@pytest.mark.parametrize("mode", MODES)
def test_rates_at_the_ends(op, mode, dtype):
    x, key = normal(np.random.default_rng(0), (3, 9), dtype), jax.random.key(0)
    without = {
        softmax_of: fo.softmax,
        layer_norm_of: lambda x: fo.residual_layer_norm(x, x[::-1]),
        rms_norm_of: lambda x: fo.residual_rms_norm(x, x[::-1]),
    }[op]

    def program(f):
        return jax.jit(lambda x: jax.value_and_grad(lambda x: f(x).sum())(x)).lower(x).as_text()

    with implementation(mode):
        assert program(lambda x: op(x, None, 0)) == program(without)
        y, pullback = jax.vjp(lambda x: op(x, key, 1), x)
        if op is softmax_of:
            assert_matches([y, *pullback(y)], [np.zeros_like(x)] * 2)
        else:
            name = op.__name__.removesuffix("_of")
            assert_matches(y, np.asarray(getattr(fo, name)(x[::-1])))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@ALL
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("columns", [40, 256])
def test_the_mask_does_not_depend_on_the_sharding_of_rows(op, columns, mode):
    """The harness has batches that are sharded."""
    x = np.random.default_rng(0).standard_normal((8, 8, columns)).astype(np.float32)
    key = jax.random.key(9)

    def run(x, key):
        y, pullback = jax.vjp(lambda x: op(x, key, RATE), x)
        return y, pullback(x)[0]

    want = jax.tree.map(np.asarray, run(x, key))
    mesh = make_mesh({"a": device_count() // 2, "b": 2}, AxisType.Auto)
    spec = jax.sharding.PartitionSpec("a", None, "b")
    with implementation(mode):
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        got = jax.jit(run)(sharded, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_only_kernels_run():
    x, bias, key = np.ones((64, 96), np.float32), np.ones(96, np.float32), raw_key(0)
    f = lambda x, key: fo.softmax(x, dropout_key=key, dropout_rate=RATE)  # noqa: E731
    assert targets_of(f, x, key) == ["softmax_dropout"]
    assert sorted(targets_of(f, x[:, :7], key)) == ["dropout", "softmax"]
    gradient = jax.grad(lambda x, key: f(x, key).sum())
    assert "softmax_dropout_bwd" in targets_of(gradient, x, key)

    def step(x, residual, bias, key):
        options = dict(input_bias=bias, dropout_key=key, dropout_rate=RATE)
        f = lambda *a: fo.residual_layer_norm(a[0], a[1], **options)  # noqa: E731
        return jax.vjp(f, x, residual)[1](x)

    names = sorted(targets_of(step, x, 2 * x, bias, key))
    assert names == ["dropout", "dropout", "norm", "norm_bwd"]
    x, bias = np.ones((64, 256), np.float32), np.ones(256, np.float32)
    assert sorted(targets_of(step, x, 2 * x, bias, key)) == ["norm", "norm_bwd"]


@ALL
def test_seeds_are_written_only_where_the_key_is_not_enough(op):
    """The words of the rows take a pass of their own: see ``_random.seeded``."""
    x, key = np.ones((64, 256), np.float32), raw_key(0)

    def of_one(x, key):
        return jax.grad(lambda x: op(x, key, RATE).sum())(x)

    seeds = "u32[64,4]"
    one = jax.jit(of_one).lower(x, key).compile().as_text()
    assert targets(one) and seeds not in one
    mapped = jax.jit(jax.vmap(of_one, (0, None))).lower(np.stack([x, x]), key)
    assert "u32[2,64,4]" in mapped.compile().as_text()
    if device_count() > 1:
        mesh = make_mesh(dict(a=2), AxisType.Auto)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
        sharded = jax.jit(of_one, in_shardings=(rows, None)).lower(x, key)
        assert seeds.replace("64", "32") in sharded.compile().as_text()


@ALL
@pytest.mark.jax
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("shape", [(16, 256), (8, 3, 256)], ids=str)
def test_a_program_that_is_exported_for_one_device_runs_on_several(op, shape):
    x, key = normal(np.random.default_rng(0), shape, np.float32), raw_key(0)

    def run(x, key):
        y, pullback = jax.vjp(lambda x: op(x, key, RATE), x)
        return y, pullback(x)[0]

    exported = jax.export.export(jax.jit(run), disabled_checks=fo.export_checks())(x, key)
    rows = jax.sharding.NamedSharding(
        make_mesh({"a": device_count()}, AxisType.Auto), jax.sharding.PartitionSpec("a")
    )
    got = jax.jit(exported.call)(jax.device_put(x, rows), key)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, run(x, key)
    )


ONES, KEY = np.ones((3, 4), np.float32), jax.random.key(0)


@pytest.mark.parametrize(
    "key, rate, error, message",
    [
        (KEY, 1.5, ValueError, r"dropout_rate is 1.5; it must be in \[0, 1\]"),
        (KEY, jnp.float32(0.5), TypeError, "dropout_rate is of type"),
        (None, 0.5, TypeError, "dropout_key is None; it must be a key of jax.random"),
        (3, 0, TypeError, "dropout_key is of type int; it must be a key"),
        (jax.random.split(KEY), 0.5, ValueError, r"dropout_key has shape \(2,\); it must be a key"),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "residual_layer_norm", "residual_rms_norm"])
def test_errors(name, key, rate, error, message):
    arrays = (ONES,) if name == "softmax" else (ONES, ONES)
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(fo, name)(*arrays, dropout_key=key, dropout_rate=rate)
