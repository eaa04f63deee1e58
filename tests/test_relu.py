"""`relu` and `add_relu`: transformations, shapes, bits, residuals, errors."""

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
    assert_bitwise_equal,
    assert_matches,
    checks,
)
from harness.case import find
from harness.compat import make_mesh
from harness.numerics import normal, specials, sprinkled
from harness.programs import outputs_and_gradients, targets_of
from harness.properties import same_shapes
from harness.sharding import device_count, over_kinds
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = pytest.mark.kernels


def reference_add_relu(x, y):
    return jax.nn.relu(x + y)


def draws(*shapes):
    """Draws normal arguments of the given shapes."""
    return lambda rng, dtype: tuple(normal(rng, shape, dtype) for shape in shapes)


def spread(count, *names):
    """Shards the same dimension of every argument and of the result."""
    return tuple(Sharding(name, (dim,) * count, (dim,)) for dim, name in enumerate(names))


def case_of(name, fn, reference, shape, sharded, dims=("batch",), **more):
    count = 2 if fn is fo.add_relu else 1
    return Case(
        name=name,
        kernels=(fn.__name__, "relu_bwd"),
        kept=lambda *args: [(np.uint8, 6)],
        fn=fn,
        reference=reference,
        make_args=draws(*[shape] * count),
        make_sharded_args=draws(*[sharded] * count),
        exact=True,
        shardings=spread(count, *dims),
        **more,
    )


relu_case = functools.partial(case_of, fn=fo.relu, reference=jax.nn.relu)
EVERY = ("batch", "sequence", "features")
RELU = relu_case(
    "relu",
    shape=(3, 16),
    sharded=(8, 8, 64),
    dims=EVERY,
    symbolic=("b, 16",),
    shapes=same_shapes(1),
    versions=True,
)
# The last axis is not a multiple of eight, so the mask packs the last two axes merged.
RELU_MERGED = relu_case(
    "relu_merged", shape=(2, 4, 6), sharded=(8, 4, 6), dtypes=("float32", "bfloat16")
)
# No product of trailing axes is a multiple of eight, so the last mask byte is padded.
RELU_PADDED = relu_case(
    "relu_padded", shape=(3, 11), sharded=(8, 11), dtypes=("float32", "bfloat16")
)
ADD_RELU = case_of(
    "add_relu",
    fo.add_relu,
    reference_add_relu,
    (3, 16),
    (8, 8, 64),
    EVERY,
    symbolic=("b, 16", "b, 16"),
    shapes=same_shapes(2),
    thorough=True,
)

# The gradient of a broadcast operand is a sum over the rows.
ADD_RELU_BIAS = Case(
    name="add_relu_bias",
    fn=fo.add_relu,
    reference=reference_add_relu,
    make_args=draws((3, 16), (16,)),
    make_sharded_args=draws((8, 8, 64), (64,)),
    tolerance=Tolerance(ulps=4.0),
    dtypes=("float32", "bfloat16"),
    shardings=(
        Sharding("batch", (0, None), (0,), gradient_all_reduces=1),
        Sharding("features", (2, 0), (2,)),
    ),
)

CASES = (RELU, RELU_MERGED, RELU_PADDED, ADD_RELU, ADD_RELU_BIAS)
OPS = {"relu": RELU, "add_relu": ADD_RELU}


@checks(*CASES)
def test_harness(check):
    check()


@pytest.fixture(params=OPS)
def case(request):
    return OPS[request.param]


@pytest.fixture(params=["native", "auto"])
def mode(request):
    with fo.use_implementation(request.param):
        yield request.param


def arity(case):
    return len(case.example)


def assert_same_bits(case, examples):
    """The op returns the bits of the reference for many examples, all in one program."""

    def many(fn):
        return jax.jit(lambda batch: [outputs_and_gradients(fn)(*example) for example in batch])

    assert_matches(many(case.fn)(examples), many(case.reference)(examples))


def assert_same_bits_in_shapes(case, shapes, dtype):
    """The same for many shapes. The reference gets all of them as one flat array."""
    rng = case.rng("shapes")
    examples = [example(case, rng, shape, dtype) for shape in shapes]
    flat = lambda arrays: np.concatenate([np.reshape(a, -1) for a in arrays])  # noqa: E731
    args = tuple(flat(args[i] for args, _ in examples) for i in range(arity(case)))
    cotangents = flat(cotangent for _, cotangent in examples)
    want = jax.jit(outputs_and_gradients(case.reference))(args, cotangents)
    results = jax.jit(lambda batch: [outputs_and_gradients(case.fn)(*e) for e in batch])(examples)
    for shape, ((out,), gradients) in zip(shapes, results, strict=True):
        assert out.shape == shape and out.dtype == dtype
        assert [g.shape for g in gradients] == [shape] * arity(case)
    outs = (flat(out for (out,), _ in results),)
    gradients = tuple(flat(g[i] for _, g in results) for i in range(arity(case)))
    assert_matches((outs, gradients), want)


def example(case, rng, shape, dtype, fill=sprinkled):
    args = tuple(fill(rng, shape, dtype) for _ in range(arity(case)))
    return args, fill(rng, shape, dtype)


# Shapes


def chunks(values, size=35):
    return [values[i : i + size] for i in range(0, len(values), size)]


def shape_groups():
    """Groups of shapes, one test each. Every group in every dtype is a slow test."""
    for rank, lead in enumerate([(), (3,), (2, 3), (2, 1, 3)], start=1):
        slow = pytest.mark.slow if rank > 2 else ()
        for group in chunks([(*lead, n) for n in range(1, 71)]):
            last = f"last{group[0][-1]}to{group[-1][-1]}"
            yield pytest.param(group, id=f"rank{rank}-{last}", marks=slow)
    edges = [n + d for n in (8, 64, 256, 1024, 2048, 4096, 8192) for d in (-1, 0, 1)]
    yield pytest.param([(n,) for n in edges], id="edges")
    yield pytest.param([(3, n) for n in edges], id="edges-rows")
    yield pytest.param([(n, 3) for n in edges], id="edges-narrow")
    empty = [(), (0,), (0, 8), (8, 0), (3, 0, 5), (0, 0), (1, 0, 7, 2), (1,), (1, 1, 1, 1)]
    yield pytest.param(empty, id="scalar-and-empty")


@pytest.mark.parametrize("shapes", list(shape_groups()))
def test_shapes_float32(case, native, shapes):
    assert_same_bits_in_shapes(case, shapes, jnp.dtype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("shapes", list(shape_groups()))
def test_shapes_every_dtype(case, dtype, native, shapes):
    assert_same_bits_in_shapes(case, shapes, dtype)


def test_some_shapes_every_dtype(case, dtype, native):
    shapes = [(), (1,), (0, 3), (7,), (8,), (9,), (33,), (3, 5), (2, 3, 64), (5, 127), (4097,)]
    assert_same_bits_in_shapes(case, shapes, dtype)


@pytest.mark.parametrize("shape", [(1_000_003,), (1001, 1000), (1 << 20,)], ids=str)
def test_large(case, dtype, native, shape):
    rng = case.rng("large")
    assert_same_bits(case, [example(case, rng, shape, dtype)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1 << 24) + 5, (1 << 26) + 8, 40_000_007])
def test_very_large(case, native, size):
    rng = case.rng("large")
    assert_same_bits(case, [example(case, rng, (size,), np.float32, normal)])


# Views that do not begin at the start of a buffer


# Values


def every_pair(values):
    """All pairs of values, repeated an odd number of times so that each occurs in other lanes."""
    first, second = (a.reshape(-1) for a in np.meshgrid(values, values))
    return np.tile(first, 5), np.tile(second, 5)


def test_special_values(case, dtype, mode):
    """NaN, infinities, signed zeros and subnormals, as pairs of operands and as cotangents."""
    first, second = every_pair(specials(dtype))
    examples = [((first, second)[: arity(case)], second), ((first, first)[: arity(case)], second)]
    assert_same_bits(case, examples)


def test_masked_gradient_is_positive_zero(case, dtype, mode):
    """If the result is not positive, the gradient is +0: it is selected, not multiplied."""
    info = jnp.finfo(dtype)
    off = np.asarray([-1.0, 0.0, -0.0, np.nan, -np.inf, info.min]).astype(dtype)
    x, cotangent = (a.reshape(-1) for a in np.meshgrid(off, specials(dtype)))
    args = (x, np.zeros_like(x))[: arity(case)]
    _, gradients = jax.jit(outputs_and_gradients(case.fn))(args, cotangent)
    for gradient in gradients:
        assert_bitwise_equal(gradient, np.zeros_like(x))
    tangents = (cotangent, np.zeros_like(x))[: arity(case)]
    assert_bitwise_equal(jax.jvp(case.fn, args, tangents)[1], np.zeros_like(x))


def test_passed_gradient_keeps_its_bits(case, dtype, mode):
    """If the result is positive, the gradient is the cotangent, including NaN and -0.0."""
    info = jnp.finfo(dtype)
    on = np.asarray([1.0, np.inf, info.max, info.smallest_normal]).astype(dtype)
    x, cotangent = (a.reshape(-1) for a in np.meshgrid(on, specials(dtype)))
    args = (x, np.zeros_like(x))[: arity(case)]
    _, gradients = jax.jit(outputs_and_gradients(case.fn))(args, cotangent)
    for gradient in gradients:
        assert_bitwise_equal(gradient, cotangent)


def test_gradient_at_zero(case, dtype, mode):
    zero = np.zeros((16,), dtype)
    gradient = jax.grad(lambda x: jnp.sum(case.fn(*(x, zero)[: arity(case)])))(zero)
    assert_bitwise_equal(gradient, zero)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_value_of_two_bytes(native, name):
    """All 65536 values, as operands and as cotangents."""
    values = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(name))
    assert_same_bits(RELU, [((values,), values[::-1].copy())])
    assert_same_bits(ADD_RELU, [((values, np.roll(values, 12345)), values[::-1].copy())])


def test_sum_that_cancels(native, dtype):
    """The mask is computed from the rounded sum."""
    eps = float(jnp.finfo(dtype).eps)
    x = np.asarray([1.0, 1.0, 1.0 + eps, -1.0, 3.0, 0.1, 1.0, 2.0] * 3).astype(dtype)
    y = np.asarray([-1.0, -1.0 - eps, -1.0, 1.0 + eps, -3.0, -0.1, eps / 4, -2.0] * 3).astype(dtype)
    assert_same_bits(ADD_RELU, [((x, y), np.ones_like(x))])


# Residuals


def kept(pullback):
    return [(leaf.dtype, leaf.size) for leaf in jax.tree.leaves(pullback)]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("shape", "count"),
    [((16,), 2), ((4, 16), 8), ((2, 3, 40), 30), ((3, 4, 6), 9), ((3, 11), 6), ((5,), 1), ((), 1)],
    ids=str,
)
def test_mask_is_all_that_is_kept(case, dtype, native, shape, count, jitted):
    args = example(case, case.rng("kept"), shape, dtype)[0]
    fn = jax.jit(case.fn) if jitted else case.fn
    _, pullback = jax.vjp(fn, *args)
    assert kept(pullback) == [(np.uint8, count)]


def test_bytes_kept_are_a_bit_per_element(native):
    """A chain of ops keeps one mask per op and no activation."""
    x = np.ones((64, 128), np.float32)
    _, pullback = jax.vjp(lambda x: fo.add_relu(fo.relu(fo.relu(x)), x), x)
    assert kept(pullback) == [(np.uint8, x.size // 8)] * 3


# The compiled program


def test_auto_leaves_a_lone_forward_to_xla(case):
    args = example(case, case.rng("hlo"), (512, 1024), np.float32)[0]
    with fo.use_implementation("auto"):
        assert not targets_of(case.fn, *args)


def test_implementation_is_part_of_the_cache_key(case):
    """One jitted function has a separate program for each implementation."""
    args = example(case, case.rng("hlo"), (8, 64), np.float32)[0]
    fn = jax.jit(case.fn)
    for _ in range(2):
        for name, expected in (("native", [case.name]), ("xla", [])):
            with fo.use_implementation(name):
                assert targets_of(fn, *args) == expected
                assert_bitwise_equal(fn(*args), jax.jit(case.reference)(*args))


@pytest.mark.jax
def test_an_export_needs_the_checks(case, native):
    """JAX refuses to export custom calls that it does not know."""
    program = jax.jit(outputs_and_gradients(case.fn))
    with pytest.raises(ValueError, match=r"jax_fastops\.relu_bwd"):
        jax.export.export(program)(*example(case, case.rng("hlo"), (8, 64), np.float32))


# Shards smaller than a mask byte


@pytest.mark.jax
@over_kinds
@pytest.mark.parametrize("width", [8, 24])
def test_shards_finer_than_a_mask_byte(case, native, axis_type, width):
    """The results are right, and have the requested layout, if a mask byte spans two devices."""
    count = device_count()
    if count < 2:
        pytest.skip("needs two devices")
    mesh = make_mesh({"a": count}, axis_type)
    where = NamedSharding(mesh, P(None, "a"))
    args, cotangent = example(case, case.rng("fine"), (4, width), np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put((args, cotangent), where)
        got = jax.jit(outputs_and_gradients(case.fn), out_shardings=where)(*placed)
    assert_matches(got, jax.jit(outputs_and_gradients(case.reference))(args, cotangent))


# Broadcasting


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 16), (16,)),
        ((16,), (3, 16)),
        ((3, 1), (1, 16)),
        ((2, 3, 5), (3, 1)),
        ((), (3, 8)),
        ((3, 8), ()),
        ((0, 4), (4,)),
        ((3, 1), (3, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["native", "auto"])
def test_add_relu_broadcasts(shapes, mode):
    case = Case("broadcast", fo.add_relu, reference_add_relu, draws(*shapes))
    for name in ("value", "types", "vjp") + ("jvp", "vmap_of_vjp/x1") * (mode == "native"):
        find(case, name, mode)()


# Arguments


def test_numpy_and_python_numbers(mode):
    x = np.asarray([-1.0, 2.0], np.float32)
    assert isinstance(fo.relu(x), jax.Array)
    assert_bitwise_equal(fo.relu(x), np.asarray([0.0, 2.0], np.float32))
    for number in (2.5, -2.5, np.float32(2.5)):
        assert_bitwise_equal(fo.relu(number), jax.nn.relu(number))
        assert fo.relu(number).weak_type == jax.nn.relu(number).weak_type
    assert_bitwise_equal(fo.add_relu(x, 1.5), jax.nn.relu(x + 1.5))
    assert_bitwise_equal(fo.add_relu(1.5, x), jax.nn.relu(1.5 + x))


def test_python_number_takes_the_other_dtype(dtype, mode):
    x = jnp.asarray([-1.0, 2.0], dtype)
    assert fo.add_relu(x, 1).dtype == fo.add_relu(0.5, x).dtype == dtype


REFUSED = {
    "int32": (
        np.arange(6, dtype=np.int32).reshape(2, 3),
        ["int32", "(2, 3)", "float32", "bfloat16"],
    ),
    "bool": (np.ones((2, 3), bool), ["bool", "(2, 3)", "float32"]),
    "complex64": (np.ones((2, 3), np.complex64), ["complex64", "(2, 3)", "float32"]),
    "string": ("text", ["str", "array"]),
    "None": (None, ["None", "array"]),
    "list": ([1.0, 2.0], ["list", "array"]),
    "object": (object(), ["object", "array"]),
    "strings": (np.array(["a", "b"]), ["ndarray"]),
    "PRNG key": (jax.random.key(0), ["key<", "()", "float32"]),
}


@pytest.mark.parametrize("mode", ["native", "auto", "xla"])
@pytest.mark.parametrize(("bad", "words"), list(REFUSED.values()), ids=REFUSED)
def test_refused_arguments(bad, words, mode):
    """The message names the op, the argument, what was given, and what is accepted."""
    x = np.ones((2, 3), np.float32)
    calls = [("relu", "x", (bad,)), ("add_relu", "x", (bad, x)), ("add_relu", "y", (x, bad))]
    takes_integers = getattr(bad, "dtype", None) in (bool, np.int32)
    for op, argument, args in calls[takes_integers:]:
        with fo.use_implementation(mode), pytest.raises(TypeError) as error:
            getattr(fo, op)(*args)
        message = str(error.value)
        # If both arguments are arrays, the message may name either of them.
        expected = (
            [op, *words] if op == "add_relu" and hasattr(bad, "dtype") else [op, argument, *words]
        )
        assert not [word for word in expected if word not in message], message


def test_refused_under_jit_before_anything_runs():
    with pytest.raises(TypeError, match=r"relu.*x.*complex64"):
        jax.eval_shape(fo.relu, jax.ShapeDtypeStruct((2, 3), np.complex64))
    with pytest.raises(TypeError, match=r"relu.*x.*complex64"):
        jax.jit(fo.relu).lower(jax.ShapeDtypeStruct((2, 3), np.complex64))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, bool])
def test_integers(dtype):
    x = np.array([-3, 0, 2]).astype(dtype)
    for given in (x, x[0], int(x[0])):
        got, want = fo.relu(given), jax.nn.relu(given)
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
        np.testing.assert_array_equal(got, want)


def test_mismatched_dtypes():
    with pytest.raises(TypeError, match=r"add_relu.*y.*bfloat16.*x.*float32"):
        fo.add_relu(np.ones(3, np.float32), np.ones(3, jnp.bfloat16))


def test_mismatched_shapes():
    with pytest.raises(ValueError, match=r"add_relu.*x.*\(2, 3\).*y.*\(4,\)"):
        fo.add_relu(np.ones((2, 3), np.float32), np.ones((4,), np.float32))
    with pytest.raises(ValueError, match=r"add_relu.*x.*\(8, 2\).*y.*\(2, 8\)"):
        jax.eval_shape(
            fo.add_relu,
            jax.ShapeDtypeStruct((8, 2), np.float32),
            jax.ShapeDtypeStruct((2, 8), np.float32),
        )


def test_too_many_arguments():
    with pytest.raises(TypeError):
        fo.relu(np.ones(3, np.float32), np.ones(3, np.float32))
    with pytest.raises(TypeError):
        fo.add_relu(np.ones(3, np.float32))
