"""`split_heads`, `split_qkv_heads`, `merge_heads`: transformations, bias sums, dtypes, errors."""

import dataclasses
import functools

import jax
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
    sharding,
)
from harness.case import outputs
from harness.compat import make_mesh, x64
from harness.numerics import any_value, normal, sprinkled
from harness.programs import outputs_and_gradients, targets_of
from harness.properties import shapes
from harness.sharding import assert_collectives, assert_layout, mesh_for, over_kinds
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops._heads_kernels import group_rows

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]


def add(x, bias):
    """`x + bias` in the wider dtype, rounded once to the dtype of `x`."""
    if bias is None:
        return x
    wide = jnp.promote_types(x.dtype, bias.dtype)
    return (x.astype(wide) + bias.astype(wide)).astype(x.dtype)


def reference_split(x, bias=None, *, num_heads):
    x = add(x, bias)
    size = x.shape[-1] // num_heads
    return jnp.swapaxes(x.reshape(*x.shape[:-1], num_heads, size), -3, -2)


def reference_split_qkv(qkv, bias=None, *, num_heads):
    # The gradient of `split` is a concatenation. The gradient of slices is a sum, which loses -0.
    parts = jnp.split(add(qkv, bias), 3, axis=-1)
    return tuple(reference_split(part, num_heads=num_heads) for part in parts)


def reference_merge(x):
    x = jnp.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def draws(*sizes, dtypes=(None, None)):
    """Draws arguments with the given shapes, and with `dtypes` if given."""

    def make(rng, dtype):
        own = [d or dtype for d in dtypes[: len(sizes)]]
        return tuple(any_value(rng, s, d) for s, d in zip(sizes, own, strict=True))

    return make


def split_shapes(unit):
    """Shapes of x, whose last axis is a multiple of `unit`.

    Not for cases with a bias: whether a sum of the largest numbers overflows depends on its order.
    """

    def join(lead, sequence, size):
        return ((*lead, sequence, unit * size),)

    lead = shapes(0, 2, max_size=6)
    return st.builds(join, lead, st.integers(0, 70), st.integers(0, 5))


BIAS_SUM = Tolerance(ulps=4.0)


def case(name, op, sizes, sharded=None, shardings=(), bias_dtype=None, kernels=(), **more):
    """A case of a split into heads, with a bias if there are sizes of two arguments."""
    num_heads = more.pop("num_heads", 2)
    if sharded is not None:
        more["make_sharded_args"] = draws(*sharded)
    if kernels:
        more |= {"kept": lambda *args: [], "maps": ((0,),)}
    if len(sizes) > 1:
        more |= {"tolerance": BIAS_SUM, "shards_under_vmap": False} | more
    elif "exact" not in more:
        more["exact"] = True
    reference = {fo.split_heads: reference_split, fo.split_qkv_heads: reference_split_qkv}[op]
    return Case(
        name=name,
        fn=lambda *args: op(*args, num_heads=num_heads),
        reference=lambda *args: reference(*args, num_heads=num_heads),
        make_args=draws(*sizes, dtypes=(None, bias_dtype)),
        kernels=kernels,
        shardings=tuple(shardings),
        **({"linear": tuple(range(len(sizes)))} | more),
    )


MOVED, SUMMED = ("transpose", "transpose"), ("split_heads", "merge_heads")
ONE_SUM = dict(gradient_all_reduces=1)
SPLIT = case(
    "split_heads",
    fo.split_heads,
    [(2, 3, 16)],
    [(8, 16, 64)],
    [
        Sharding("batch", (0,), (0,)),
        Sharding("sequence", (1,), (2,)),
        # Not in `shard_map`: a shard has fewer heads than `num_heads`.
        Sharding("heads", (2,), (1,), shard_map=False),
    ],
    num_heads=8,
    kernels=MOVED,
    dtypes=("float32", "bfloat16"),  # the kernel only moves bytes
    symbolic=("b, s, 16",),
    shapes=split_shapes(8),
)
SPLIT_BIAS = case(
    "split_heads_bias",
    fo.split_heads,
    [(2, 3, 8), (8,)],
    [(8, 512, 8), (8,)],
    [
        Sharding("batch", (0, None), (0,), **ONE_SUM),
        Sharding("sequence", (1, None), (2,), **ONE_SUM),
    ],
    kernels=SUMMED,
    dtypes=("float32", "bfloat16"),
    modes=("native",),
    symbolic=("b, 3, 8", "8"),
)
QKV = case(
    "split_qkv_heads",
    fo.split_qkv_heads,
    [(2, 3, 12)],
    [(8, 16, 24)],
    [Sharding("sequence", (1,), (2, 2, 2))],
    kernels=SUMMED,
    dtypes=("bfloat16", "float32"),
    shapes=split_shapes(6),
)
QKV_BIAS = case(
    "split_qkv_heads_bias",
    fo.split_qkv_heads,
    [(2, 3, 12), (12,)],
    [(8, 512, 12), (12,)],
    [
        Sharding("batch", (0, None), (0, 0, 0), **ONE_SUM),
        Sharding("sequence", (1, None), (2, 2, 2), **ONE_SUM),
    ],
    kernels=SUMMED,
    modes=("native",),
)
# Parameters are often float32 while the data has half precision.
QKV_FLOAT32_BIAS = case(
    "split_qkv_heads_float32_bias",
    fo.split_qkv_heads,
    [(2, 3, 12), (12,)],
    bias_dtype=np.float32,
    dtypes=("bfloat16", "float16"),
    basic_only=True,
)

MERGE = Case(
    kernels=MOVED,
    kept=lambda *args: [],
    name="merge_heads",
    fn=fo.merge_heads,
    reference=reference_merge,
    dtypes=("float32", "float16"),  # XLA flushes subnormals of bfloat16 on a CPU
    modes=("native",),
    make_args=draws((2, 4, 3, 2)),
    make_sharded_args=draws((8, 16, 24, 3)),
    linear=(0,),
    exact=True,
    shardings=(
        Sharding("heads", (1,), (2,)),
        Sharding("batch", (0,), (0,)),
        Sharding("sequence", (2,), (1,)),
    ),
    symbolic=("b, 4, s, 2",),
    shapes=shapes(3, 5).map(lambda shape: (shape,)),
)

# The kernel moves elements of any dtype. XLA adds a bias that is not floating-point.
NO_FLOATS = ("int32", "bool", "complex64", "int8")
numbers = functools.partial(case, dtypes=NO_FLOATS, exact=True, basic_only=True, linear=())
SPLIT_NUMBERS = numbers("split_heads_numbers", fo.split_heads, [(2, 3, 8), (8,)])
QKV_NUMBERS = numbers("split_qkv_heads_numbers", fo.split_qkv_heads, [(2, 3, 12), (12,)])
QKV_MOVED = numbers("split_qkv_heads_moved", fo.split_qkv_heads, [(2, 3, 12)])
MERGE_NUMBERS = dataclasses.replace(
    MERGE,
    name="merge_heads_numbers",
    dtypes=(*NO_FLOATS, "float8_e4m3fn"),
    modes=("native", "auto"),
    linear=(),
    basic_only=True,
    kernels=(),
    kept=None,
    shapes=None,
    symbolic=None,
)

CASES = (QKV_BIAS, SPLIT, SPLIT_BIAS, QKV, QKV_FLOAT32_BIAS, MERGE)
NUMBERS = (SPLIT_NUMBERS, QKV_NUMBERS, QKV_MOVED, MERGE_NUMBERS)


@checks(*CASES, *NUMBERS)
def test_harness(check):
    check()


# name -> (op, reference, number of results)
SPLITS = {
    "split_heads": (fo.split_heads, reference_split, 1),
    "split_qkv_heads": (fo.split_qkv_heads, reference_split_qkv, 3),
}


@pytest.fixture(params=SPLITS)
def split(request):
    """An op, its reference, and its number of results."""
    return SPLITS[request.param]


def example(rng, parts, lead, sequence, heads, size, dtype, fill=normal):
    """x, a bias, and cotangents."""
    features = parts * heads * size
    args = fill(rng, (*lead, sequence, features), dtype), fill(rng, (features,), dtype)
    return args, tuple(fill(rng, (*lead, heads, sequence, size), dtype) for _ in range(parts))


def exact_bias_gradient(cts):
    """The bias gradient in float64, computed by NumPy."""
    sums = [ct.astype(np.float64) for ct in cts]
    return np.concatenate([s.sum((*range(s.ndim - 3), -2)).reshape(-1) for s in sums])


# Values -------------------------------------------------------------------------------------------

SHAPES = [
    # (leading dimensions, sequence, heads, head size)
    ((), 1, 1, 1),
    ((), 5, 3, 7),
    ((2,), 9, 1, 5),
    ((2,), 1, 12, 64),
    ((3,), 33, 5, 1),
    ((2,), 64, 4, 16),
    ((1, 2), 17, 3, 31),
    ((2, 1, 2), 7, 2, 33),
    ((1,), 65, 2, 80),
    ((2,), 130, 2, 128),
    ((2,), 131, 1, 768),
    ((0,), 4, 2, 4),
    ((2,), 0, 2, 4),
    ((2,), 4, 2, 0),
]


def merged(cts):
    """The gradient of x, computed by NumPy: XLA loses subnormals and the sign of zeros."""
    parts = [np.swapaxes(np.asarray(ct), -3, -2) for ct in cts]
    parts = [p.reshape(*p.shape[:-2], p.shape[-2] * p.shape[-1]) for p in parts]
    return np.concatenate(parts, axis=-1)


def heads_of(x, parts, heads, size):
    """The results without a bias, computed by NumPy."""
    pieces = np.split(np.asarray(x), parts, axis=-1)
    return tuple(np.swapaxes(p.reshape(*p.shape[:-1], heads, size), -3, -2) for p in pieces)


@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients(split, dtype, with_bias):
    """Results and the gradient of x have the reference's bits, including special values."""
    fn, _, parts = split
    rng = np.random.default_rng(0)
    examples = [example(rng, parts, *s, dtype, sprinkled) for s in SHAPES]
    heads = [s[2] for s in SHAPES]

    def run(examples):
        results = []
        for ((x, bias), cts), h in zip(examples, heads, strict=True):
            args = (x, bias)[: 1 + with_bias]
            out, gradients = outputs_and_gradients(functools.partial(fn, num_heads=h))(args, cts)
            results.append((out, gradients[0]))
        return results

    sums = [x for (x, _), _ in examples]
    if with_bias:
        sums = jax.jit(lambda examples: [add(*args) for args, _ in examples])(examples)
    for (out, gradient), x, (_, cts), s in zip(
        jax.jit(run)(examples), sums, examples, SHAPES, strict=True
    ):
        assert_matches(out, heads_of(x, parts, *s[2:]), where=f"the result, {s}")
        assert_bitwise_equal(gradient, merged(cts), f"the gradient, {s}")


def test_merge_values_and_gradients(dtype):
    rng = np.random.default_rng(1)
    examples = []
    for lead, sequence, heads, size in SHAPES:
        x = sprinkled(rng, (*lead, heads, sequence, size), dtype)
        examples.append(((x,), (sprinkled(rng, (*lead, sequence, heads * size), dtype),)))
    results = jax.jit(lambda all: [outputs_and_gradients(fo.merge_heads)(*e) for e in all])(
        examples
    )
    for (out, gradients), (args, cts), s in zip(results, examples, SHAPES, strict=True):
        assert_bitwise_equal(out[0], merged(args), f"the result, {s}")
        assert_bitwise_equal(gradients[0], *heads_of(cts[0], 1, *s[2:]), f"the gradient, {s}")


def test_bias_gradient(split, dtype):
    """The bias gradient is close to the sum in float64 for every shape."""
    fn, _, parts = split
    rng = np.random.default_rng(2)
    for lead, sequence, heads, size in SHAPES:
        args, cts = example(rng, parts, lead, sequence, heads, size, dtype)
        gradient = jax.jit(outputs_and_gradients(functools.partial(fn, num_heads=heads)))(args, cts)
        gradient = gradient[1][1]
        assert gradient.dtype == dtype and gradient.shape == args[1].shape
        assert_sum(gradient, cts, dtype)


def assert_sum(gradient, cts, dtype):
    """Checks a sum of normally distributed numbers in float32 (float64), rounded once."""
    rows = cts[0].size // max(1, cts[0].shape[-1] * cts[0].shape[-3])
    wide = jnp.finfo(jnp.promote_types(dtype, np.float32)).eps
    exact = exact_bias_gradient(cts)
    error = np.abs(np.asarray(gradient, np.float64) - exact)
    limit = jnp.finfo(dtype).eps * np.abs(exact) + wide * (rows + 1)
    if dtype == np.float16:
        limit += 1e-7
    assert (error <= limit).all(), f"off by {(error - limit).max()}"


SEQUENCES = [1, 2, 3, 15, 16, 17, 31, 61, 63, 64, 65, 67, 97, 122, 127, 128, 129, 190, 201, 257]


@pytest.mark.parametrize(
    "sequences",
    [
        SEQUENCES[:10],
        SEQUENCES[10:],
        [509, 1021, 4095, 4096, 4097, 4099],
        pytest.param(list(range(1, 201)), marks=pytest.mark.slow),
    ],
    ids=lambda s: f"{s[0]}to{s[-1]}",
)
def test_groups_of_rows(split, sequences):
    """For every division of the sequence into groups, each row is in the sum once."""
    fn, reference, parts = split
    rng = np.random.default_rng(3)
    examples = [example(rng, parts, (2,), s, 2, 3, np.float32) for s in sequences]
    run = outputs_and_gradients(functools.partial(fn, num_heads=2))
    results = jax.jit(lambda all: [run(*e)[1] for e in all])(examples)
    plain = outputs_and_gradients(functools.partial(reference, num_heads=2))
    for (args, cts), (dx, db) in zip(examples, results, strict=True):
        assert_sum(db, cts, np.float32)
        assert_bitwise_equal(dx, plain(args, cts)[1][0], f"sequence {args[0].shape}")


@pytest.mark.parametrize("sequence", [1, 2, 7, 16, 64, 65, 67, 97, 122, 4096, 4097, 4099, 6 * 64])
def test_groups_are_whole(sequence):
    rows = group_rows(sequence)
    assert sequence % rows == 0
    # Small groups would cost traffic for the sums. The whole sequence may be one group.
    assert rows == sequence or 32 <= rows <= 128


# Residuals and kernels ----------------------------------------------------------------------------


def pull(fn):
    return lambda args, cts: outputs_and_gradients(fn)(args, cts)[1]


def test_nothing_to_move_is_no_kernel():
    x = np.ones((2, 5, 6), np.float32)
    assert not targets_of(lambda x: fo.split_heads(x, num_heads=1), x)
    assert not targets_of(lambda x: fo.split_heads(x, num_heads=3), x[:, :1])
    assert not targets_of(fo.merge_heads, x[:, None])
    assert not targets_of(fo.merge_heads, x[:, :, None])


def test_the_gradient_of_one_argument_computes_that_one(split):
    """The gradient of x computes no sum, and that of the bias moves nothing."""
    fn, _, parts = split
    (x, bias), cts = example(np.random.default_rng(5), parts, (2,), 6, 2, 4, np.float32)
    fn = functools.partial(fn, num_heads=2)
    of_x = lambda x, cts: pull(lambda x: fn(x, bias))((x,), cts)  # noqa: E731
    of_bias = lambda bias, cts: pull(lambda bias: fn(x, bias))((bias,), cts)  # noqa: E731
    assert targets_of(of_x, x, cts) == ["merge_heads"]
    assert targets_of(of_bias, bias, cts) == []
    everything = jax.jit(pull(fn))((x, bias), cts)
    assert_bitwise_equal(jax.jit(of_x)(x, cts)[0], everything[0])
    np.testing.assert_allclose(jax.jit(of_bias)(bias, cts)[0], everything[1], rtol=1e-5, atol=1e-6)


# Derivatives and vmap -----------------------------------------------------------------------------


CLOSE = dict(rtol=1e-10, atol=1e-10)


# Dtypes -------------------------------------------------------------------------------------------

MODES = ("native", "auto", "xla")


@pytest.mark.parametrize("mode", MODES)
def test_mixed_dtypes_are_rounded_once(split, mode):
    fn, _, _ = split
    x = jnp.ones((1, 1, 6), jnp.bfloat16)
    # Slightly more than halfway between two bfloat16 numbers. Rounded twice, the sum is 1.
    bias = np.full(6, 2.0**-8 + 2.0**-20, np.float32)
    with fo.use_implementation(mode):
        for result in outputs(jax.jit(functools.partial(fn, num_heads=2))(x, bias)):
            assert result.dtype == jnp.bfloat16
            assert (np.asarray(result) == np.asarray(1 + 2.0**-7).astype(jnp.bfloat16)).all()
        wide = jax.jit(functools.partial(fn, num_heads=2))(
            x.astype(np.float32), jnp.ones(6, "bfloat16")
        )
        assert all(r.dtype == np.float32 and (np.asarray(r) == 2).all() for r in outputs(wide))


MIXED = [
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float64", "float32"),
    ("float64", "bfloat16"),
    ("float32", "float64"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("of_x", "of_bias"), MIXED)
def test_mixed_dtypes(split, of_x, of_bias, mode):
    """The sum is in float32 (float64 for float64); gradients have their argument's dtype."""
    fn, _, parts = split
    (x, bias), cts = example(np.random.default_rng(9), parts, (2,), 70, 2, 4, np.float64)
    x, bias = x.astype(jnp.dtype(of_x)), bias.astype(jnp.dtype(of_bias))
    cts = tuple(ct.astype(jnp.dtype(of_x)) for ct in cts)
    acc = np.float64 if of_x == "float64" else np.float32
    with x64("float64" in (of_x, of_bias)), fo.use_implementation(mode):
        run = jax.jit(outputs_and_gradients(functools.partial(fn, num_heads=2)))
        outs, (dx, db) = run((x, bias), cts)
        wide = (x.astype(acc) + bias.astype(acc)).astype(x.dtype)
        want = outputs(
            SPLITS["split_qkv_heads" if parts == 3 else "split_heads"][1](wide, num_heads=2)
        )
        assert_matches(outs, want)
        assert dx.dtype == x.dtype and db.dtype == bias.dtype
        coarse = max((bias.dtype, np.dtype(acc)), key=lambda d: float(jnp.finfo(d).eps))
        exact = exact_bias_gradient(cts)
        limit = float(jnp.finfo(coarse).eps) * (np.abs(exact) + 1e-2) + 140 * jnp.finfo(acc).eps
        assert (np.abs(np.asarray(db, np.float64) - exact) <= limit).all()


def test_random_keys_and_small_integers():
    keys = jax.random.split(jax.random.key(0), (2, 3, 12))
    data = np.asarray(jax.random.key_data(keys))
    heads = data.reshape(2, 3, 2, 6, -1).swapaxes(1, 2)
    got = fo.split_heads(keys, num_heads=2)
    assert got.dtype == keys.dtype and got.shape == (2, 2, 3, 6)
    assert np.array_equal(np.asarray(jax.random.key_data(got)), heads)
    assert np.array_equal(np.asarray(jax.random.key_data(fo.merge_heads(got))), data)
    parts = data.reshape(2, 3, 3, 2, 2, -1)
    for i, part in enumerate(fo.split_qkv_heads(keys, num_heads=2)):
        assert np.array_equal(np.asarray(jax.random.key_data(part)), parts[:, :, i].swapaxes(1, 2))
    x = (np.arange(72).reshape(2, 3, 12) % 7).astype(jnp.int4)
    small = fo.split_heads(x, num_heads=2)
    assert small.dtype == jnp.int4
    want = x.astype(np.int8).reshape(2, 3, 2, 6).swapaxes(1, 2)
    assert np.array_equal(np.asarray(small).astype(np.int8), want)
    assert np.array_equal(np.asarray(fo.merge_heads(small)).astype(np.int8), x.astype(np.int8))


@pytest.mark.parametrize("heads", [np.int64(2), np.uint8(2), True])
def test_number_of_heads_of_any_integer_type(split, heads):
    fn, reference, _ = split
    x = np.arange(36, dtype=np.float32).reshape(1, 3, 12)
    got, want = fn(x, num_heads=heads), reference(x, num_heads=int(heads))
    assert_matches(outputs(got), outputs(want))


# Sharding with explicit mesh axes -----------------------------------------------------------------


# name -> specs of (x, bias, result), for up to 8 devices
SPECS = {
    "batch": (P("a", None, None), P(None), P("a", None, None, None)),
    "sequence": (P(None, "a", None), P(None), P(None, None, "a", None)),
    "features": (P(None, None, "a"), P(None), P(None, "a", None, None)),
    "features and bias": (P(None, None, "a"), P("a"), P(None, "a", None, None)),
    "bias": (P(None, None, None), P("a"), P(None, "a", None, None)),
    "nothing": (P(None, None, None), P(None), P(None, None, None, None)),
}


def over_mesh(mesh, fn, args, specs, cts, ct_spec):
    """Results and gradients over a mesh, their types, and the compiled program."""
    types = []

    def run(args, cts):
        results = outputs_and_gradients(fn)(args, cts)
        types[:] = [jax.typeof(y).sharding.spec for y in jax.tree.leaves(results)]
        return results

    results, text = sharding.over_mesh(mesh, run, (args, cts), (specs, ct_spec))
    return results, types, text


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_explicit_types_of_split_heads(name, with_bias):
    mesh = mesh_for(AxisType.Explicit)
    of_x, of_bias, of_result = SPECS[name]
    if not with_bias and name == "bias":
        of_result = P(None, None, None, None)
    args, cts = example(np.random.default_rng(10), 1, (8,), 16, 16, 4, np.float32)
    args, specs = args[: 1 + with_bias], (of_x, of_bias)[: 1 + with_bias]
    fn = lambda *args: fo.split_heads(*args, num_heads=16)  # noqa: E731
    (outs, gradients), types, _ = over_mesh(mesh, fn, args, specs, cts, of_result)
    assert types == [of_result, *specs]
    assert_layout("the result", outs[0], NamedSharding(mesh, of_result))
    assert_bitwise_equal(outs[0], reference_split(*args, num_heads=16))
    assert_bitwise_equal(gradients[0], reference_merge(cts[0]))
    if with_bias:
        assert_sum(gradients[1], cts, np.float32)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ["batch", "sequence", "features", "features and bias", "nothing"])
def test_explicit_types_of_split_qkv_heads(name, with_bias):
    """Sharded features are gathered, and the results are exact."""
    mesh = mesh_for(AxisType.Explicit)
    of_x, of_bias, of_result = SPECS[name]
    if "features" in name:
        of_result = P(None, None, None, None)
    args, cts = example(np.random.default_rng(11), 3, (8,), 16, 8, 4, np.float32)
    args, specs = args[: 1 + with_bias], (of_x, of_bias)[: 1 + with_bias]
    fn = lambda *args: fo.split_qkv_heads(*args, num_heads=8)  # noqa: E731
    (outs, gradients), types, _ = over_mesh(mesh, fn, args, specs, cts, of_result)
    assert types == [of_result] * 3 + list(specs)
    assert_matches(outs, reference_split_qkv(*args, num_heads=8))
    assert_bitwise_equal(gradients[0], merged(cts))
    if with_bias:
        assert_sum(gradients[1], cts, np.float32)


@pytest.mark.parametrize("heads", [3, 4])
def test_heads_that_the_devices_do_not_divide_are_gathered(heads):
    mesh = mesh_for(AxisType.Explicit)
    args, cts = example(np.random.default_rng(12), 1, (2,), 5, heads, 8, np.float32)
    for count in (1, 2):
        fn = lambda *args: fo.split_heads(*args, num_heads=heads)  # noqa: E731
        specs = (P(None, None, "a"), P(None))[:count]
        if heads % mesh.size == 0:
            continue
        result = over_mesh(mesh, fn, args[:count], specs, cts, P(None, None, None, None))
        (outs, gradients), types, _ = result
        assert types[0] == P(None, None, None, None) and types[1] == specs[0]
        assert_bitwise_equal(outs[0], reference_split(*args[:count], num_heads=heads))
        assert_bitwise_equal(gradients[0], reference_merge(cts[0]))


# With explicit mesh axes, groups of rows are chosen to fit the shards. With auto mesh axes, the
# shards are not known while tracing: each device gets whole groups, or all rows are gathered.
SHARDS = [("Explicit", rows) for rows in (1, 3, 17, 64, 67, 96, 128)]
SHARDS += [("Auto", rows) for rows in (32, 64, 67, 96, 128, 640)]
GATHERED = [1, 3, 17]


def split_over_sequence(split, axis_type, rows):
    """Checks gradients with `rows` rows of the sequence on every device."""
    fn, _, parts = split
    count = mesh_for(AxisType.Explicit).size
    mesh = make_mesh({"a": count}, axis_type)
    args, cts = example(np.random.default_rng(14), parts, (2,), count * rows, 2, 3, np.float32)
    specs, of_result = (P(None, "a", None), P(None)), P(None, None, "a", None)
    split = functools.partial(fn, num_heads=2)
    (_, (dx, db)), _, text = over_mesh(mesh, split, args, specs, cts, of_result)
    assert_sum(db, cts, np.float32)
    assert_bitwise_equal(dx, merged(cts))
    return dx, NamedSharding(mesh, specs[0]), text


@pytest.mark.jax
@pytest.mark.parametrize(("axis_type", "rows"), SHARDS)
def test_sharded_sequences(split, axis_type, rows):
    """For every length of a shard, there is one all-reduce for the bias gradient."""
    dx, sharding, text = split_over_sequence(split, AxisType[axis_type], rows)
    assert_layout("the gradient of x", dx, sharding)
    assert_collectives(text, 1)


@pytest.mark.parametrize("rows", GATHERED)
def test_sequences_whose_groups_lie_on_several_devices(split, rows):
    split_over_sequence(split, AxisType.Auto, rows)


@pytest.mark.jax
@over_kinds
def test_features_sharded_with_a_bias_in_every_mode(split, axis_type):
    fn, reference, parts = split
    mesh = make_mesh({"a": mesh_for(AxisType.Explicit).size}, axis_type)
    args, cts = example(np.random.default_rng(16), parts, (2,), 6, 8, 4, np.float32)
    of_result = P(None, "a", None, None) if parts == 1 else P(None, None, None, None)
    for mode in MODES:
        with fo.use_implementation(mode):
            split = lambda *args: fn(*args, num_heads=8)  # noqa: E731
            specs = (P(None, None, "a"), P("a"))
            (outs, (dx, db)), _, _ = over_mesh(mesh, split, args, specs, cts, of_result)
        assert_matches(outs, outputs(reference(*args, num_heads=8)))
        assert_bitwise_equal(dx, merged(cts))
        assert_sum(db, cts, np.float32)


# Errors -------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 12), np.float32)
BIAS = np.zeros(12, np.float32)

REFUSED = {
    "no heads": ((X,), 0, ValueError, ["num_heads is 0", "at least 1"]),
    "negative": ((X,), -2, ValueError, ["num_heads is -2", "at least 1"]),
    "not dividing": ((X,), 5, ValueError, ["num_heads is 5", "(2, 3, 12)", "equal parts"]),
    "float": ((X,), 2.0, TypeError, ["num_heads is 2.0", "an integer"]),
    "None": ((X,), None, TypeError, ["num_heads is None", "an integer"]),
    "text": ((X,), "2", TypeError, ["num_heads is '2'", "an integer"]),
    "array of two": ((X,), np.ones(2, int), TypeError, ["num_heads is", "an integer"]),
    "one dimension": ((X[0, 0],), 2, ValueError, ["(12,)", "2 dimensions"]),
    "a number": ((2.0,), 2, ValueError, ["()", "2 dimensions"]),
    "short bias": ((X, BIAS[:4]), 2, ValueError, ["bias", "(4,)", "(12,)"]),
    "scalar bias": ((X, 1.0), 2, ValueError, ["bias", "()", "(12,)"]),
    "wide bias": ((X, X), 2, ValueError, ["bias", "(2, 3, 12)", "(12,)"]),
    "integer bias": ((X, BIAS.astype(int)), 2, TypeError, ["bias", "int32", "float32"]),
    "complex bias": ((X, BIAS * 1j), 2, TypeError, ["bias", "complex64", "float32"]),
    "float bias of integers": (
        (X.astype(np.int32), BIAS),
        2,
        TypeError,
        ["bias", "float32", "int32"],
    ),
    "other integers": (
        (X.astype(np.int32), BIAS.astype(np.int8)),
        2,
        TypeError,
        ["bias", "int8", "int32"],
    ),
    "text for x": (("text",), 2, TypeError, ["str", "array"]),
    "None for x": ((None,), 2, TypeError, ["None", "array"]),
    "text for the bias": ((X, "text"), 2, TypeError, ["bias", "str", "array"]),
    "list for the bias": ((X, [0.0] * 12), 2, TypeError, ["bias", "list", "array"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(("args", "heads", "error", "words"), list(REFUSED.values()), ids=REFUSED)
def test_refused(args, heads, error, words, name, mode):
    """The message names the op, the argument, what was given, and what is accepted."""
    first = "x" if name == "split_heads" else "qkv"
    with fo.use_implementation(mode), pytest.raises(error) as raised:
        SPLITS[name][0](*args, num_heads=heads)
    message = str(raised.value)
    names = [name, *words]
    if "num_heads" not in message and "bias" not in message:
        names.append(f"{first} ")
    assert not [word for word in names if word not in message], message


def test_three_times_the_heads_must_divide():
    with pytest.raises(ValueError, match=r"num_heads is 4.*qkv.*\(2, 3, 18\).*3 \* num_heads = 12"):
        fo.split_qkv_heads(np.zeros((2, 3, 18), np.float32), num_heads=4)
    with pytest.raises(ValueError, match=r"num_heads is 4"):
        fo.split_qkv_heads(np.zeros((2, 3, 16), np.float32), num_heads=4)


def test_num_heads_is_given_by_name(split):
    fn, _, _ = split
    with pytest.raises(TypeError):
        fn(X)
    with pytest.raises(TypeError):
        fn(X, BIAS, 2)


@pytest.mark.parametrize("shape", [(), (4,), (4, 5)], ids=str)
def test_merge_refuses_few_dimensions(shape):
    with pytest.raises(ValueError, match=r"merge_heads: x .*3 dimensions") as error:
        fo.merge_heads(np.zeros(shape, np.float32))
    assert str(shape) in str(error.value)


def test_merge_refuses_what_is_no_array():
    with pytest.raises(TypeError, match="merge_heads: x is None"):
        fo.merge_heads(None)


def test_refused_under_jit_before_anything_runs(split):
    fn, _, _ = split
    with pytest.raises(ValueError, match="num_heads is 5"):
        jax.eval_shape(lambda x: fn(x, num_heads=5), jax.ShapeDtypeStruct((2, 12), np.float32))


# Implementations ----------------------------------------------------------------------------------


def test_a_bias_alone_is_summed_in_float32(split):
    """If only the bias has a gradient, XLA sums, in float32: a bfloat16 sum stops growing.

    On a GPU, XLA may round parts of the sum to bfloat16.
    """
    fn, _, parts = split
    rng = np.random.default_rng(20)
    args, _ = example(rng, parts, (4,), 1031, 2, 4, np.float32)
    x, bias = (jnp.asarray(a, jnp.bfloat16) for a in args)

    def total(bias):
        return sum(y.sum(dtype=jnp.float32) for y in outputs(fn(x, bias, num_heads=2)))

    expected = float(jnp.bfloat16(4 * 1031))
    rtol = 0.0 if jax.default_backend() == "cpu" else 1 / 32
    np.testing.assert_allclose(jax.grad(total)(bias).astype(np.float32), expected, rtol)


@pytest.mark.jax
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_sequence_without_batch_is_sharded_beside_a_whole_bias(split, axis_type):
    """XLA would also shard a bias whose rank equals the number of batch dimensions."""
    fn, reference, parts = split
    size = mesh_for(AxisType.Explicit).size
    mesh = make_mesh({"a": size}, AxisType[axis_type])
    args, cts = example(np.random.default_rng(16), parts, (), 32 * size, 2, 3, np.float32)
    run = functools.partial(fn, num_heads=2)
    result = over_mesh(mesh, run, args, (P("a", None), P(None)), cts, P(None, "a", None))
    (outs, (dx, db)), _, text = result
    assert_matches(outs, outputs(reference(*args, num_heads=2)))
    assert_bitwise_equal(dx, merged(cts))
    assert_sum(db, cts, np.float32)
    assert_collectives(text, 1)
