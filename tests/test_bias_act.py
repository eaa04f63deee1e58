"""`bias_act`: transformations, shapes, special values, the mask of relu, residuals."""

import functools
import math
import re
import zlib

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, assert_matches, checks, implementation
from harness.compat import make_mesh, saved_residuals, x64
from harness.numerics import assert_within, normal, stacked, unbroadcast
from harness.programs import targets_of, value_and_gradients
from harness.properties import settings
from harness.sharding import KINDS, assert_layout, collectives, device_count
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = pytest.mark.usefixtures("native")

FUNCTIONS = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
}
MODES = ("native", "auto", "xla")


def reference(x, bias, *, activation="gelu"):
    dtype = jnp.result_type(x)
    wide = jnp.promote_types(dtype, jnp.float32)
    total = jnp.asarray(x).astype(wide) + jnp.asarray(bias).astype(wide)
    return FUNCTIONS[activation](total).astype(dtype)


def draws(shape, bias, bias_dtype=None):
    def make(rng, dtype):
        return normal(rng, shape, dtype), normal(rng, bias, bias_dtype or dtype)

    return make


def case(name, activation, shape, bias, sharded=None, sharded_bias=None, bias_dtype=None, **more):
    if sharded is not None:
        more["make_sharded_args"] = draws(sharded, sharded_bias, bias_dtype)
    return Case(
        name=name,
        fn=functools.partial(fo.bias_act, activation=activation),
        reference=functools.partial(reference, activation=activation),
        make_args=draws(shape, bias, bias_dtype),
        tolerance=Tolerance(ulps=96.0),  # sums in which terms cancel
        **more,
    )


GELU = case(
    "gelu",
    "gelu",
    (3, 5),
    (5,),
    (64, 24),
    (24,),
    shardings=(
        Sharding("rows", (0, None), (0,), gradient_all_reduces=1),
        Sharding("features", (1, 0), (1,)),
    ),
    symbolic=("b, n", "n"),
)

RELU = case(
    "relu",
    "relu",
    (3, 8),
    (8,),
    (64, 128),
    (128,),
    shardings=(
        Sharding("rows", (0, None), (0,), gradient_all_reduces=1),
        Sharding("features", (1, 0), (1,)),
    ),
    symbolic=("b, 8", "8"),
    modes=("native",),
)

# The last axis is not a multiple of 8, so each row pads the last byte of its mask.
RELU_ROWS = case(
    "relu_rows",
    "relu",
    (2, 2, 5),
    (5,),
    (64, 16, 5),
    (5,),
    shardings=(
        Sharding("batch", (0, None), (0,), gradient_all_reduces=1),
        Sharding("sequence", (1, None), (1,), gradient_all_reduces=1),
    ),
    symbolic=("b, s, n", "n"),
    modes=("native",),
    dtypes=("float32", "bfloat16"),
)

# A bias for each example and feature.
SILU_PER_EXAMPLE = case(
    "silu_per_example",
    "silu",
    (2, 3, 4),
    (2, 1, 4),
    (16, 64, 8),
    (16, 1, 8),
    shardings=(
        Sharding("batch", (0, 0), (0,)),
        Sharding("sequence", (1, None), (1,), gradient_all_reduces=1),
        Sharding("features", (2, 2), (2,)),
    ),
    symbolic=("b, s, n", "b, 1, n"),
    dtypes=("bfloat16", "float32"),
    modes=("native",),
)

# Images, channels first.
EXACT_CHANNELS = case(
    "exact_channels",
    "gelu_exact",
    (2, 3, 2, 2),
    (3, 1, 1),
    (8, 16, 8, 8),
    (16, 1, 1),
    shardings=(
        Sharding("batch", (0, None), (0,), gradient_all_reduces=1),
        Sharding("channels", (1, 0), (1,)),
    ),
    modes=("native",),
)

basic = functools.partial(case, basic_only=True, modes=("native",))
FLOAT32_BIAS = basic(
    "float32_bias", "gelu", (3, 6), (6,), bias_dtype=np.float32, dtypes=("bfloat16", "float16")
)
RELU_FLOAT32_BIAS = basic(
    "relu_float32_bias", "relu", (3, 6), (6,), bias_dtype=np.float32, dtypes=("bfloat16",)
)
SCALAR_BIAS = basic("scalar_bias", "silu", (2, 5), (), dtypes=("float32",))
SCALARS = basic("scalars", "relu", (), (), dtypes=("float32",))
FULL_BIAS = basic("full_bias", "gelu", (2, 5), (2, 5), dtypes=("float32",))


@checks(GELU, FLOAT32_BIAS, RELU_FLOAT32_BIAS, SCALAR_BIAS, SCALARS, FULL_BIAS)
def test_harness(check):
    check()


@pytest.mark.slow
@checks(RELU, RELU_ROWS, SILU_PER_EXAMPLE, EXACT_CHANNELS)
def test_harness_of_variants(check):
    check()


@pytest.fixture(params=FUNCTIONS)
def activation(request):
    return request.param


# The activations except relu differ only in the kernel.
KINDS_OF_OP = [
    "gelu",
    "relu",
    *(pytest.param(a, marks=pytest.mark.slow) for a in ("gelu_exact", "silu")),
]


# Shapes -------------------------------------------------------------------------------------------


def on_gpu():
    return jax.devices()[0].platform == "gpu"


def check_shapes(activation, dtype, examples, bias_dtype=None):
    """Value and gradients of many pairs of shapes, in one program, against float64."""
    rng = np.random.default_rng(zlib.crc32(str(examples).encode()))
    values = []
    for shape, bias in examples:
        args = draws(shape, bias, bias_dtype)(rng, dtype)
        values.append((normal(rng, shape, dtype), *args))

    def program(fn):
        return jax.jit(
            lambda values: [value_and_gradients(fn, activation=activation)(*v) for v in values]
        )

    results = program(fo.bias_act)(values)
    with x64(), jax.default_device(jax.devices("cpu")[0]):
        exact = jax.tree.map(
            np.asarray, program(reference)(jax.tree.map(lambda a: a.astype(np.float64), values))
        )
    for (shape, bias), (dy, x, b), (y, (dx, db)), (ey, (edx, edb)) in zip(
        examples, values, results, exact, strict=True
    ):
        what = f"{activation} of {dtype}{shape} with a bias {bias}"
        assert y.dtype == dx.dtype == dtype and y.shape == dx.shape == shape, what
        assert db.dtype == b.dtype and db.shape == bias, what
        size = np.abs(x.astype(np.float64)) + np.abs(b.astype(np.float64))
        ady = np.abs(dy.astype(np.float64))
        # On a GPU, exact gelu in bfloat16 has an error of 2^-12, which is 2^11 units of float32.
        coarse = (activation, dtype) == ("gelu_exact", jnp.bfloat16) and on_gpu()
        own = 2.0**11 * np.abs(ey) if coarse else 0
        slope = 48 if coarse else 16  # its derivative has 2^-18, 32 units
        assert_within(y, ey, 8 * (1 + size) + own, what)
        assert_within(dx, edx, slope * ady * (1 + size), f"dx of {what}")
        terms = dy.size / max(1, db.size)
        unit = unbroadcast(np.broadcast_to(ady * (1 + size), shape), bias)
        assert_within(db, edb, (slope + math.sqrt(terms)) * unit, f"dbias of {what}")


N = (1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 127, 1000, 1025)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_lengths(activation, kind):
    check_shapes(activation, jnp.dtype(kind), [((5, n), (n,)) for n in N])


def test_a_wide_bias_that_is_not_summed(activation):
    """The gradient has the dtype of the bias, and is written element by element."""
    shapes = ((3, 8), (3, 1), (7,), (), (1001,), (5, 1001), (40, 64))
    check_shapes(activation, jnp.dtype(jnp.bfloat16), [(s, s) for s in shapes], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("n", [*N, 4096, 40_001])
def test_lengths_every_dtype(activation, dtype, n):
    examples = [((5, n), b) for b in ((n,), (5, n), (5, 1), (1, 1), ())]
    check_shapes(activation, dtype, [*examples, ((n, 3), (3,)), ((2, 3, n), (3, 1))])


@pytest.mark.parametrize(
    "shape, bias", [((4099, 72), (72,)), ((3, 5, 7001), (5, 1)), ((9, 33, 64), (9, 1, 64))]
)
def test_large_sums(activation, shape, bias):
    check_shapes(activation, jnp.dtype(np.float32), [(shape, bias)])
    check_shapes(activation, jnp.dtype(jnp.bfloat16), [(shape, bias)], np.float32)


@st.composite
def pairs(draw):
    rank = draw(st.integers(0, 8))
    size = st.one_of(st.integers(1, 4), st.sampled_from([1, 5, 8, 9, 16, 33]))
    shape = [draw(size) for _ in range(rank)]
    while math.prod(shape) > 4000:
        shape[int(np.argmax(shape))] //= 2
    bias = [n if draw(st.booleans()) else 1 for n in shape]
    return tuple(shape), tuple(bias[draw(st.integers(0, rank)) :])


def any_shapes(examples, dtypes=(np.float32, jnp.bfloat16)):
    @settings(examples)
    @hypothesis.given(
        st.lists(pairs(), min_size=8, max_size=8), st.sampled_from([*FUNCTIONS]), st.booleans()
    )
    def check(drawn, activation, mixed):
        for kind in dtypes:
            wide = np.float64 if kind == np.float64 else np.float32
            check_shapes(activation, jnp.dtype(kind), drawn, wide if mixed else None)

    check()


def test_any_shapes():
    any_shapes(3)


@pytest.mark.slow
def test_more_shapes():
    any_shapes(100)


@pytest.mark.slow
def test_more_shapes_in_float64():
    with x64():
        any_shapes(20, (np.float64, np.float16))


@pytest.mark.parametrize("rank", [15, 16, 17, 20])
def test_high_rank(activation, rank):
    """The kernels take up to 16 dimensions. More take the reference."""
    shape = (2,) + (1, 2) * 4 + (1,) * (rank - 10) + (8,)
    bias = tuple(n if i % 4 < 2 else 1 for i, n in enumerate(shape))
    check_shapes(activation, jnp.dtype(np.float32), [(shape, bias), (shape, (8,)), (shape, ())])


@pytest.mark.parametrize("shape, bias", [((0,), ()), ((3, 0), (0,)), ((0, 5), (5,))])
def test_no_elements(activation, shape, bias):
    args = [np.ones(shape, np.float32), np.ones(shape, np.float32), np.ones(bias, np.float32)]
    run = value_and_gradients(fo.bias_act, activation=activation)
    plain = value_and_gradients(reference, activation=activation)
    assert_matches(jax.jit(run)(*args), jax.jit(plain)(*args))
    many = [np.ones((0, *a.shape), np.float32) for a in args[:2]]
    got = jax.vmap(run, (0, 0, None))(*many, args[2])
    assert got[1][1].shape == (0, *bias)
    total = jax.grad(
        lambda b: jax.vmap(fo.bias_act, (0, None))(np.ones((0, 3, 8), np.float32), b).sum()
    )(np.ones(8, np.float32))
    np.testing.assert_array_equal(total, np.zeros(8))


# Special values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [(8,), pytest.param((40, 1), marks=pytest.mark.slow)], ids=str)
def test_nan_infinity_and_large_values(activation, dtype, bias):
    """Values are those of jax.nn within rounding, and NaN is where jax.nn has it."""
    info = jnp.finfo(dtype)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, float(info.max), -float(info.max), 30.0, -30.0]
    special += [float(info.smallest_normal), -float(info.smallest_normal), 9.0, -9.0, 1e-3, 100.0]
    x = np.resize(np.array(special), (40, 8)).astype(dtype)
    for b in (np.zeros(bias), np.full(bias, -0.0), np.full(bias, np.inf), np.full(bias, np.nan)):
        b = b.astype(dtype)
        got = jax.jit(functools.partial(fo.bias_act, activation=activation))(x, b)
        want = jax.jit(functools.partial(reference, activation=activation))(x, b)
        got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        # In the tails jax.nn subtracts numbers near 1, so its absolute error is that of 1.
        wide = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
        np.testing.assert_allclose(got, want, rtol=4 * float(info.eps) + 64 * wide, atol=64 * wide)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_at_infinity_and_nan(activation, mode):
    x = np.float32([np.inf, -np.inf, np.nan, 30.0, -30.0, 0.0, 1.0, -1.0])
    with fo.use_implementation(mode):
        got = jax.grad(lambda x: fo.bias_act(x, np.float32(0), activation=activation).sum())(x)
    want = jax.grad(lambda x: reference(x, np.float32(0), activation=activation).sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_relu_selects(dtype):
    """Bitwise equal to jax.nn.relu. The gradient is the cotangent or 0, without a product."""
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, 1e-3]).astype(dtype)
    x, dy = (a.reshape(-1, 8) for a in np.meshgrid(values, values))
    for bias in (np.zeros(8), np.zeros(()), np.zeros((8, 1))):
        run = value_and_gradients(fo.bias_act, activation="relu")
        y, (dx, _) = jax.jit(run)(dy, x, bias.astype(dtype))
        want = jax.jit(lambda x: jax.nn.relu(x + np.zeros((), dtype)))(x)
        assert_matches(y, np.asarray(want))
        with np.errstate(invalid="ignore"):
            assert_matches(dx, np.where(x > 0, dy, np.zeros_like(dy)))


def test_relu_of_a_sum_that_the_dtype_would_round():
    """The sum is not rounded before it is compared with zero, nor before the activation."""
    x = np.array([[1.0, 1.0, 256.0] * 8]).astype(jnp.bfloat16)
    bias = np.array([-1.0 - 2**-20, -1.0 + 2**-20, 1.0] * 8, np.float32)
    y, (dx, _) = value_and_gradients(fo.bias_act, activation="relu")(np.ones_like(x), x, bias)
    np.testing.assert_array_equal(dx[0], [0, 1, 1] * 8)
    np.testing.assert_array_equal(
        y[0], np.array([0, 2**-20, 257] * 8, np.float32).astype(jnp.bfloat16)
    )


# Numbers and errors -------------------------------------------------------------------------------


def test_numbers(activation):
    x = np.float32([1.0, -2.0])
    for a, b in ((x, 1), (x, 0.5), (1.0, 2), (x.astype(jnp.bfloat16), 0.5), (2, x[0])):
        got = fo.bias_act(a, b, activation=activation)
        dtype = jnp.result_type(a) if isinstance(a, np.ndarray) else np.float32
        assert got.dtype == dtype and got.shape == np.shape(a)
        want = reference(jnp.asarray(a, dtype), b, activation=activation)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-2, atol=1e-6
        )


def test_integers_without_a_bias(activation):
    for x in (np.array([-2, 0, 3]), np.int8([5]), np.array(-1), 2):
        got, want = (
            fo.bias_act(x, None, activation=activation),
            reference(np.float32(x), 0.0, activation=activation),
        )
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert got.dtype == jnp.float32 and got.shape == np.shape(x)


def test_the_default_is_gelu():
    x = normal(np.random.default_rng(0), (3, 8), np.float32)
    np.testing.assert_allclose(fo.bias_act(x, x[0]), jax.nn.gelu(x + x[0]), rtol=1e-4, atol=1e-6)


def test_a_bias_of_another_dtype():
    """The gradient has the dtype of the bias. The op reads the bias in the accumulator dtype."""
    x = normal(np.random.default_rng(1), (64, 8), jnp.bfloat16)
    for kind in ("float32", "float16", "float64"):
        with x64(kind == "float64"):
            b = normal(np.random.default_rng(2), (8,), jnp.dtype(kind))
            got = value_and_gradients(fo.bias_act)(x, x, b)
            want = value_and_gradients(reference)(x, x, b)
        assert got[0].dtype == jnp.bfloat16 and got[1][1].dtype == b.dtype
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            mine, theirs = (np.asarray(a, np.float64) for a in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=1e-2)


ONES = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    "x, bias, activation, error, message",
    [
        (ONES, ONES, "tanh", ValueError, "activation is 'tanh'; it must be one of 'gelu', 'gelu_e"),
        (ONES, ONES, None, ValueError, "activation is None; it must be one of"),
        (ONES, ONES[0, :3], "gelu", ValueError, r"bias has shape \(3,\), which does not broadcast"),
        (ONES[0], ONES, "gelu", ValueError, r"bias has shape \(3, 4\).*shape \(4,\) of x"),
        (ONES.astype(int), ONES, "gelu", TypeError, "bias_act: x has dtype int.*must be one of"),
        (ONES, ONES.astype(bool), "gelu", TypeError, "bias_act: bias has dtype bool"),
        (None, ONES, "gelu", TypeError, "bias_act: x is None"),
        (ONES, "bias", "gelu", TypeError, "bias_act: bias is of type str"),
    ],
)
def test_errors(x, bias, activation, error, message):
    with pytest.raises(error, match=message):
        fo.bias_act(x, bias, activation=activation)


# Kernels that run, and residuals ------------------------------------------------------------------


BIASES = [(8,), (4, 1, 8), (3, 1), (), (1,)]


@pytest.mark.parametrize("activation", KINDS_OF_OP)
@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_one_kernel_each_way(activation, bias):
    x, b = draws((4, 3, 8), bias)(np.random.default_rng(3), np.float32)
    backward = "bias_relu_bwd" if activation == "relu" else "bias_act_bwd"
    fn = functools.partial(fo.bias_act, activation=activation)
    assert targets_of(fn, x, b) == ["bias_act"]
    assert targets_of(value_and_gradients(fn), x, x, b) == ["bias_act", backward]
    with fo.use_implementation("xla"):
        assert not targets_of(value_and_gradients(fn), x, x, b)


def test_nothing_but_the_kernels_runs(activation):
    x, b = draws((4, 3, 16), (16,))(np.random.default_rng(3), np.float32)
    run = value_and_gradients(fo.bias_act, activation=activation)
    text = jax.jit(lambda *args: run(*args)[1]).lower(x, x, b).compile().as_text()
    entry = text[text.index("ENTRY") :]
    ops = re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w-]*)\(", entry)
    extra = set(ops) - {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}
    assert not extra, entry


@pytest.mark.parametrize("activation", KINDS_OF_OP)
@pytest.mark.parametrize("n", [8, 13])
def test_what_is_kept(activation, dtype, n):
    for bias in ((n,), (4, 1, n), (3, 1), (), (1,)):
        x, b = draws((4, 3, n), bias)(np.random.default_rng(4), dtype)
        fn = functools.partial(fo.bias_act, activation=activation)
        leaves = jax.tree.leaves(jax.vjp(fn, x, b)[1])
        sizes = sorted((str(leaf.dtype), leaf.size) for leaf in leaves)
        large = ("uint8", 12 * -(-n // 8)) if activation == "relu" else (str(dtype), x.size)
        assert sizes == sorted([large, (str(dtype), b.size)])


def test_what_is_kept_in_a_model():
    x, w, b = np.ones((4, 3), np.float32), np.ones((3, 16), np.float32), np.ones(16, np.float32)
    for activation, kept in (("gelu", "f32[4,16]"), ("relu", "u8[4,2,1]")):
        fn = lambda w, b, a=activation: fo.bias_act(x @ w, b, activation=a).sum()  # noqa: E731
        lines = saved_residuals(fn, w, b).splitlines()
        made = [line for line in lines if "argument" not in line and "constant" not in line]
        large = [line for line in made if not re.match(r"f32\[(1,)*(16|2,8)\]", line)]
        assert len(large) == 1 and large[0].startswith(kept), lines


@pytest.mark.parametrize("activation", KINDS_OF_OP)
def test_two_runs_give_the_same_bits(activation, dtype):
    rng = np.random.default_rng(5)
    for shape, bias in (((700, 300), (300,)), ((7, 5, 3001), (5, 1))):
        x, b = draws(shape, bias)(rng, dtype)
        dy = normal(rng, shape, dtype)
        run = jax.jit(value_and_gradients(fo.bias_act, activation=activation))
        first = jax.tree.map(np.asarray, run(dy, x, b))
        for _ in range(3):
            assert_matches(run(dy, x, b), first)


def test_implementations_agree(activation, dtype):
    rng = np.random.default_rng(6)
    x, b = draws((40, 24), (24,))(rng, dtype)
    dy = normal(rng, x.shape, dtype)
    results = {}
    for mode in MODES:
        with implementation(mode):
            results[mode] = jax.jit(value_and_gradients(fo.bias_act, activation=activation))(
                dy, x, b
            )
    eps = float(jnp.finfo(dtype).eps)
    for mode in MODES:
        for mine, theirs in zip(
            jax.tree.leaves(results[mode]), jax.tree.leaves(results["xla"]), strict=True
        ):
            mine, theirs = (np.asarray(a, np.float64) for a in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, rtol=8 * eps, atol=64 * eps)


def test_a_platform_without_kernels_takes_the_reference(activation):
    run = value_and_gradients(fo.bias_act, activation=activation)
    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(ONES, ONES, ONES[0])
    assert "custom_call" not in exported.mlir_module()


@pytest.mark.jax
@pytest.mark.parametrize("activation", KINDS_OF_OP)
@pytest.mark.parametrize("last", ["n", "8"])
def test_one_export_serves_every_size(activation, last):
    b, n = jax.export.symbolic_shape(f"b, {last}")
    types = [jax.ShapeDtypeStruct(s, np.float32) for s in ((b, n), (b, n), (n,))]
    run = jax.jit(value_and_gradients(fo.bias_act, activation=activation))
    exported = jax.export.export(run, disabled_checks=fo.export_checks())(*types)
    back = jax.export.deserialize(exported.serialize())
    plain = jax.jit(value_and_gradients(reference, activation=activation))
    rng = np.random.default_rng(7)
    for rows in (1, 2, 300):
        for size in (8,) if last == "8" else (1, 3, 8, 100):
            x, bias = draws((rows, size), (size,))(rng, np.float32)
            dy = normal(rng, x.shape, np.float32)
            for mine, theirs in zip(
                jax.tree.leaves(back.call(dy, x, bias)),
                jax.tree.leaves(plain(dy, x, bias)),
                strict=True,
            ):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


# vmap and derivatives -----------------------------------------------------------------------------


def loss(fn):
    return lambda *args: jnp.sum(jnp.sin(1.5 * fn(*args)))


def compare(activation, transform, *args):
    fns = [functools.partial(f, activation=activation) for f in (fo.bias_act, reference)]
    with x64():
        args = [np.asarray(a, np.float64) for a in args]
        got, want = (jax.jit(transform(f))(*args) for f in fns)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-10)


MAPPED = {
    "value": lambda f, axes: jax.vmap(f, axes),
    "gradients per example": lambda f, axes: jax.vmap(jax.grad(loss(f), (0, 1)), axes),
    "bias' gradient per example": lambda f, axes: jax.vmap(jax.grad(loss(f), 1), axes),
    "gradient of the sum": lambda f, axes: jax.grad(
        lambda *args: jax.vmap(loss(f), axes)(*args).sum(), (0, 1)
    ),
    "hessian-vector": lambda f, axes: jax.vmap(
        lambda *args: jax.jvp(jax.grad(loss(f), (0, 1)), args, args)[1], axes
    ),
    "hessian-vector of the sum": lambda f, axes: (
        lambda *args: jax.jvp(
            jax.grad(lambda *a: jax.vmap(loss(f), axes)(*a).sum(), (0, 1)), args, args
        )[1]
    ),
}


@pytest.mark.parametrize("activation", KINDS_OF_OP)
@pytest.mark.parametrize("transform", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_mapped(activation, transform, axes):
    """There is one gradient per example, even for a bias that is not mapped."""
    for shapes in (((2, 8), (8,)), ((2, 5), (2, 1)), ((1,), (1,))):
        args = draws(*shapes)(np.random.default_rng(8), np.float64)
        args = [a if d is None else stacked(a) for a, d in zip(args, axes, strict=True)]
        compare(activation, lambda f: transform(f, axes), *args)


@pytest.mark.jax
@pytest.mark.parametrize("activation", KINDS_OF_OP)
@pytest.mark.parametrize("shapes", [((2, 8), (8,)), ((2, 5), (2, 1))], ids=str)
def test_maps_of_tangents_and_of_their_transposes(activation, shapes):
    args = draws(*shapes)(np.random.default_rng(9), np.float64)

    def of(fn):
        def run(*args):
            y, tangents_of = jax.linearize(fn, *args)
            found = []
            for axes in ((0, None), (None, 0)):
                many = jax.vmap(tangents_of, axes)
                dots = [a if d is None else stacked(a) for a, d in zip(args, axes, strict=True)]
                found += [many(*dots), jax.linear_transpose(many, *dots)(stacked(y))]
            pulled = jax.vmap(jax.vjp(fn, *args)[1])
            back = jax.linear_transpose(pulled, stacked(y))(pulled(stacked(y)))
            return found, back

        return run

    compare(activation, of, *args)


@pytest.mark.jax
def test_a_map_is_one_call(activation):
    x, b = draws((2, 8), (8,))(np.random.default_rng(10), np.float32)
    fn = functools.partial(fo.bias_act, activation=activation)
    for axes in ((0, None), (None, 0), (0, 0)):
        stacks = [a if d is None else stacked(a) for a, d in zip((x, b), axes, strict=True)]
        gradient = jax.vmap(jax.grad(loss(fn), (0, 1)), axes)
        text = jax.jit(gradient).lower(*stacks).as_text()
        assert "while" not in text and len(re.findall(r"@jax_fastops\.bias_\w+_bwd", text)) == 1


# Sharding -----------------------------------------------------------------------------------------

SPREAD = {
    # shapes, their specs, sums in the backward (one per mesh axis)
    "rows": ([(64, 64), (64,)], [P("a"), P()], 1),
    "features": ([(60, 64), (64,)], [P(None, "b"), P("b")], 0),
    "both": ([(256, 64), (64,)], [P("a", "b"), P("b")], 1),
    "three": ([(16, 64, 32), (32,)], [P("a", "b"), P()], 2),
    "replicated bias": ([(60, 64), (64,)], [P(None, "b"), P()], 0),
}


@pytest.mark.jax
@pytest.mark.parametrize("activation", KINDS_OF_OP)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPREAD)
def test_sharded(activation, kind, name):
    if device_count() < 8:
        pytest.skip("needs eight devices")
    if name == "replicated bias" and kind == "explicit":
        pytest.skip("its gradient is gathered, as the type demands")
    shapes, specs, sums = SPREAD[name]
    mesh = make_mesh({"a": 2, "b": 4}, KINDS[kind])
    rng = np.random.default_rng(11)
    args = draws(*shapes)(rng, np.float32)
    dy = normal(rng, shapes[0], np.float32)
    want = jax.jit(value_and_gradients(reference, activation=activation))(dy, *args)
    run = value_and_gradients(fo.bias_act, activation=activation)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((dy, *args), (specs[0], *specs), strict=True)
        ]
        fn = functools.partial(fo.bias_act, activation=activation)
        forward = jax.jit(fn).lower(*placed[1:]).compile().as_text()
        assert not collectives(forward)
        assert forward.count('custom_call_target="jax_fastops.bias_act.') == 1
        both = jax.jit(run).lower(*placed).compile()
        got = both(*placed)
    text = both.as_text()
    found = collectives(text)
    assert found.pop("all-reduce", 0) in range(min(sums, 1), sums + 1) and not found
    assert len(re.findall(r'custom_call_target="jax_fastops\.bias_\w+_bwd', text)) == 1
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert_layout("result", got[0], NamedSharding(mesh, specs[0]))


@pytest.mark.jax
@pytest.mark.parametrize("activation", KINDS_OF_OP)
def test_a_replicated_bias_beside_explicit_shards(activation):
    """The result has the sharding of x + bias. A gradient has the sharding of its argument."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = make_mesh({"a": 2, "b": 4}, AxisType.Explicit)
    x, b = draws((16, 64), (64,))(np.random.default_rng(12), np.float32)
    want = jax.jit(value_and_gradients(reference, activation=activation))(x, x, b)
    for specs in ((P(None, "b"), P(None)), (P("a", None), P("b"))):
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(a, NamedSharding(mesh, s))
                for a, s in zip((x, b), specs, strict=True)
            ]
            y = jax.jit(functools.partial(fo.bias_act, activation=activation))(*placed)
            assert jax.typeof(y).sharding.spec == jax.typeof(placed[0] + placed[1]).sharding.spec
            run = jax.jit(value_and_gradients(fo.bias_act, activation=activation))
            got = run(jax.sharding.reshard(x, jax.typeof(y).sharding), *placed)
            for g, a in zip(got[1], placed, strict=True):
                assert jax.typeof(g).sharding.spec == jax.typeof(a).sharding.spec
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 16)])
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "silu", "relu"])
def test_without_a_bias(activation, shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    run = functools.partial(fo.bias_act, activation=activation)
    zeros = np.zeros(shape[-1:], dtype)
    np.testing.assert_array_equal(run(x, None), run(x, zeros))
    grad = jax.grad(lambda x, *bias: jnp.sum(run(x, *bias)))
    np.testing.assert_array_equal(grad(x, None), grad(x, zeros))
