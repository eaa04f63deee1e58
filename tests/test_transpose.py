"""`transpose`: every permutation and element size, bit for bit, with one kernel per call."""

import collections
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, assert_bitwise_equal, assert_matches, checks
from harness.compat import make_mesh, x64
from harness.numerics import any_value, assert_close, normal
from harness.properties import shapes
from harness.sharding import assert_layout, collectives, device_count, over_kinds, spec
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

# One dtype for each element size.
WIDTHS = ("uint8", "bfloat16", "float32", "float64", "complex128")


def permutation(axes, sizes, sharded=(), **options):
    """A case of one permutation; `sharded` lists the dimensions of the operand to shard."""
    rank = len(axes)
    options = {"linear": (0,), "dtypes": ("float32", "bfloat16", "float16", "float64")} | options
    return Case(
        name="transpose_" + "".join(map(str, axes)),
        fn=lambda x: fo.transpose(x, axes),
        reference=lambda x: jnp.transpose(x, axes),
        make_args=lambda rng, dtype: (any_value(rng, sizes, dtype),),
        make_sharded_args=lambda rng, dtype: (any_value(rng, (8, 16, 24, 32)[:rank], dtype),),
        exact=True,
        kernels=("transpose",) * (1 + bool(options["linear"])),
        only_kernels=True,
        maps=((0,),),
        kept=lambda x: [],
        shardings=tuple(Sharding(f"dim{d}", (d,), (axes.index(d),)) for d in sharded),
        shapes=shapes(rank, rank).map(lambda shape: (shape,)),
        **options,
    )


T10 = permutation((1, 0), (3, 5), symbolic=("a, 5",))
T021 = permutation((0, 2, 1), (2, 3, 5), basic_only=True)
T201 = permutation(
    (2, 0, 1),
    (2, 3, 5),
    (0, 1, 2),
    symbolic=("2, b, 5",),
    dtypes=("float32", "bfloat16"),
    modes=("native",),
)
T0312 = permutation((0, 3, 1, 2), (2, 3, 2, 5), basic_only=True)
T3210 = permutation((3, 2, 1, 0), (2, 3, 4, 5), basic_only=True)
T1032 = permutation(
    (1, 0, 3, 2),
    (2, 3, 1, 5),
    linear=(),
    dtypes=("int8", "int32", "complex64"),
)
T102 = permutation((1, 0, 2), (3, 2, 5), dtypes=("float8_e4m3fn", "float8_e5m2"), basic_only=True)
TBOOL = permutation((2, 1, 0), (3, 2, 5), dtypes=("bool",), linear=(), basic_only=True)


@checks(T10, T021, T201, T0312, T3210, T1032, T102, TBOOL)
def test_harness(check):
    check()


# Every permutation --------------------------------------------------------------------------------


def bits(rng, shape, dtype):
    """Random bits, including NaNs with any payload and signaling NaNs."""
    dtype = jnp.dtype(dtype)
    count = math.prod(shape)
    return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def assert_same_bytes(got, want, what):
    got = np.asarray(got)
    assert got.shape == want.shape and got.dtype == want.dtype, what
    # Compare bytes, because a NaN is not equal to itself.
    got, want = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (got, want))
    wrong = np.flatnonzero(got != want)
    assert not wrong.size, f"{what}: {wrong.size} of {want.size} bytes differ, from {wrong[0]}"


def assert_moves(x, permutations):
    """The kernel returns NumPy's transpositions of one array, all in one program."""
    permutations = list(permutations)
    with x64(x.dtype.itemsize >= 8):
        got = jax.jit(lambda x: [fo.transpose(x, axes) for axes in permutations])(x)
        for axes, result in zip(permutations, got, strict=True):
            assert_same_bytes(result, x.transpose(axes), f"{x.dtype}{x.shape} by {axes}")


SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257)


def draw_shape(rng, rank, elements):
    """A random shape of sizes at and next to those of vectors and tiles, in random order."""
    shape, room = [], elements
    for left in range(rank, 0, -1):
        # Leave a random share of the elements for the other dimensions, to mix long and short.
        most = max(1, room ** (1 / rng.uniform(1, left)))
        shape.append(int(rng.choice([size for size in SIZES if size <= most])))
        room //= shape[-1]
    return tuple(int(i) for i in rng.permutation(shape))


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_every_permutation(rank, dtype):
    rng = np.random.default_rng(rank)
    for _ in range(3 if rank < 4 else 2):
        shape = draw_shape(rng, rank, 40_000)
        assert_moves(bits(rng, shape, dtype), itertools.permutations(range(rank)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(("rank", "count"), [(2, 200), (3, 120), (4, 45), (5, 15)])
def test_every_permutation_of_many_shapes(rank, count, dtype):
    rng = np.random.default_rng(100 + rank)
    for _ in range(count):
        shape = draw_shape(rng, rank, 150_000)
        assert_moves(bits(rng, shape, dtype), itertools.permutations(range(rank)))


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(
    "shape", [(1031, 259), (7, 1500), (1500, 7), (2, 4099), (4099, 2)], ids=str
)
def test_matrices(shape, dtype):
    rng = np.random.default_rng(1)
    assert_moves(bits(rng, shape, dtype), [(1, 0)])
    assert_moves(bits(rng, (3, *shape), dtype), [(0, 2, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_small_matrix(dtype):
    """All sizes up to 70 in one dimension, so that every partial tile occurs."""
    rng = np.random.default_rng(2)
    values = bits(rng, (70, 70), dtype)
    sizes = [(m, n) for m in range(1, 71, 3) for n in range(1, 71)]
    with x64(values.dtype.itemsize >= 8):
        for part in (sizes[i::4] for i in range(4)):
            views = [np.ascontiguousarray(values[:m, :n]) for m, n in part]
            got = jax.jit(lambda views: [fo.transpose(v) for v in views])(views)
            for view, result in zip(views, got, strict=True):
                assert_same_bytes(result, view.T, f"{dtype}{view.shape}")


def high_ranks(count):
    rng = np.random.default_rng(3)
    for _ in range(count):
        rank = int(rng.integers(6, 9))
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 5, 7], rank))
        yield shape, [tuple(int(i) for i in rng.permutation(rank)) for _ in range(6)]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_high_ranks(dtype):
    rng = np.random.default_rng(4)
    for shape, permutations in high_ranks(3):
        assert_moves(bits(rng, shape, dtype), permutations)
    order = tuple(int(i) for i in rng.permutation(12))
    assert_moves(bits(rng, (2, 3) * 6, dtype), [tuple(reversed(range(12))), order])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WIDTHS)
def test_many_high_ranks(dtype):
    rng = np.random.default_rng(5)
    for shape, permutations in high_ranks(150):
        assert_moves(bits(rng, shape, dtype), permutations)


# The shapes of the benchmarks, with fewer elements.
MEASURED = [
    ((1024, 1024), (1, 0)),
    ((2, 56, 56, 128), (0, 3, 1, 2)),
    ((2, 128, 56, 56), (0, 2, 3, 1)),
    ((24, 25, 26, 27), (3, 2, 1, 0)),
    ((2, 1000, 1001), (2, 0, 1)),
    ((128, 3, 4096), (2, 1, 0)),
    ((4096, 3, 128), (2, 1, 0)),
    ((4096, 3, 32), (0, 2, 1)),
    ((2, 512, 12, 64), (0, 2, 1, 3)),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "axes"), MEASURED, ids=str)
def test_measured_shapes(shape, axes, dtype):
    assert_moves(bits(np.random.default_rng(6), shape, dtype), [axes])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 715827883), (715827883, 3)], ids=str)
def test_more_than_two_gibibytes(shape):
    """2^31 + 1 elements: offsets do not fit into 32 bits."""
    if jax.default_backend() != "gpu":
        pytest.skip("takes too long on a CPU")
    # Elements count modulo a prime, so that an offset by a power of two shows.
    x = (jnp.arange(math.prod(shape), dtype=jnp.uint32) % 251).astype(jnp.uint8).reshape(shape)
    got = np.asarray(jax.jit(fo.transpose)(x))
    want = np.asarray(x).T
    for start in range(0, max(shape), 1 << 26):
        rows = slice(start, start + (1 << 26))
        along = (rows, slice(None)) if got.shape[0] > 3 else (slice(None), rows)
        assert np.array_equal(got[along], want[along])


# The compiled program -----------------------------------------------------------------------------

OPCODE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", re.MULTILINE)
FREE = {"parameter", "bitcast", "tuple", "get-tuple-element", "constant"}


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def work(fn, *args):
    """The operations of the compiled program that move data."""
    text = compiled(fn, *args)
    found = collections.Counter(OPCODE.findall(text))
    calls = len(re.findall(r'custom_call_target="jax_fastops\.transpose', text))
    assert found["custom-call"] == calls
    return {name: count for name, count in found.items() if name not in FREE}


ONE_KERNEL = {"custom-call": 1}


def test_one_kernel_and_nothing_else():
    assert work(lambda x: fo.transpose(x, (2, 0, 1)), np.ones((4, 5, 6), np.float32)) == ONE_KERNEL


def test_what_counts_work_sees_a_transposition():
    assert work(lambda x: jnp.transpose(x, (2, 0, 1)), np.ones((4, 5, 6), np.float32))


STAYS = [
    ((4, 5, 6), (0, 1, 2)),
    ((4, 5, 6), (-3, 1, -1)),
    ((7,), (0,)),
    ((), ()),
    ((1, 5, 6), (1, 0, 2)),
    ((4, 1, 6, 1), (1, 0, 3, 2)),
    ((4, 1, 6), (0, 2, 1)),
    ((1, 1, 1), (2, 1, 0)),
    ((0, 5, 6), (2, 1, 0)),
    ((4, 0), (1, 0)),
]


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(("shape", "axes"), STAYS, ids=str)
def test_an_order_that_stays_is_no_work(shape, axes, dtype):
    x = bits(np.random.default_rng(8), shape, dtype)
    fn = lambda x: fo.transpose(x, axes)  # noqa: E731
    # Every program copies an operand that it returns unchanged into the result.
    added = work(fn, x).items() - work(lambda x: x.reshape(np.transpose(x, axes).shape), x).items()
    assert not added
    assert_same_bytes(jax.jit(fn)(x), x.transpose(axes), f"{shape} by {axes}")


def pull(fn):
    """The pullback of `fn` as a function of the operand and the cotangent."""
    return lambda x, ct: jax.vjp(fn, x)[1](ct)[0]


# vmap ---------------------------------------------------------------------------------------------

BATCHED = [((1, 0), (4, 5)), ((0, 2, 1), (4, 5, 6)), ((2, 0, 1), (4, 5, 6)), ((1, 0, 2), (4, 5, 6))]


def with_axis(rng, shape, at):
    shape = list(shape)
    shape.insert(at if at >= 0 else at + len(shape) + 1, 3)
    return normal(rng, shape, np.float32)


@pytest.mark.jax
@pytest.mark.parametrize(("axes", "shape"), BATCHED, ids=str)
def test_vmap_moves_nothing_more(axes, shape):
    """The kernel reads the mapped axis at any position, of the operand and of the cotangent."""
    rng = np.random.default_rng(9)
    fn, plain = (lambda x, f=f: f(x, axes) for f in (fo.transpose, jnp.transpose))
    for at in range(-len(shape) - 1, len(shape) + 1):
        x, ct = with_axis(rng, shape, at), with_axis(rng, [shape[i] for i in axes], -at - 1)
        for of, given in ((lambda f: f, (x,)), (pull, (x, ct))):
            run, want = (jax.vmap(of(f), (at, -at - 1)[: len(given)]) for f in (fn, plain))
            assert work(run, *given) == ONE_KERNEL, f"in_axes={at}"
            assert_bitwise_equal(jax.jit(run)(*given), want(*given))


@pytest.mark.jax
@pytest.mark.parametrize(("axes", "shape"), BATCHED, ids=str)
def test_vmap_puts_the_axis_anywhere(axes, shape):
    rng = np.random.default_rng(11)
    rank = len(shape)
    both = list(itertools.product(range(-rank - 1, rank + 1), repeat=2))
    args = [with_axis(rng, shape, at) for at, _ in both]

    def run(fn):
        return lambda args: [
            jax.vmap(lambda x: fn(x, axes), at, to)(x)
            for x, (at, to) in zip(args, both, strict=True)
        ]

    assert_matches(jax.jit(run(fo.transpose))(args), jax.jit(run(jnp.transpose))(args))


@pytest.mark.jax
def test_nested_vmap_is_one_kernel():
    rng = np.random.default_rng(12)
    x = normal(rng, (4, 3, 5, 2, 6), np.float32)
    for outer, inner in itertools.product(range(5), range(4)):
        nest = lambda fn: jax.vmap(jax.vmap(fn, inner), outer)  # noqa: B023, E731
        fn = nest(lambda x: fo.transpose(x, (1, 2, 0)))
        assert work(fn, x) == ONE_KERNEL, f"in_axes {outer} and {inner}"
        assert_bitwise_equal(jax.jit(fn)(x), nest(lambda x: jnp.transpose(x, (1, 2, 0)))(x))


@pytest.mark.jax
def test_gradient_of_vmap_with_axes_anywhere():
    rng = np.random.default_rng(13)
    x = normal(rng, (4, 3, 5), np.float32)

    def run(fn):
        def loss(x, at, to):
            y = jax.vmap(lambda x: fn(x, (1, 0)), at, to)(x)
            return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

        def every(x):
            axes = list(itertools.product(range(3), range(3)))
            first = [jax.grad(loss)(x, at, to) for at, to in axes]
            second = [
                jax.jvp(lambda x: jax.grad(loss)(x, at, to), (x,), (x,))[1]  # noqa: B023
                for at, to in axes
            ]
            return first, second

        return every

    got, want = (jax.jit(run(fn))(x) for fn in (fo.transpose, jnp.transpose))
    assert_close(got, want, rtol=1e-5, atol=1e-5)


# Residuals ----------------------------------------------------------------------------------------


def test_gradient_of_complex_numbers():
    x = any_value(np.random.default_rng(14), (3, 4, 5), np.complex64)
    ct = any_value(np.random.default_rng(15), (5, 3, 4), np.complex64)
    for run in (pull, lambda fn: lambda x, ct: jax.jvp(fn, (x,), (2 * x,))):
        got, want = (
            jax.jit(run(lambda x, f=f: f(x, (2, 0, 1))))(x, ct)
            for f in (fo.transpose, jnp.transpose)
        )
        assert_matches(got, want)


# Sharding -----------------------------------------------------------------------------------------

PERMUTATIONS = [(1, 0), (0, 2, 1), (2, 1, 0), (0, 3, 1, 2), (3, 2, 1, 0), (1, 0, 3, 2)]


@functools.cache
def devices():
    count = device_count()
    if count < 2:
        pytest.skip("needs two devices")
    return count


@pytest.mark.jax
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "shard_map"])
@pytest.mark.parametrize("axes", PERMUTATIONS, ids=str)
def test_every_dimension_shards_freely(axes, kind):
    """Sharding any dimension needs no communication, for the result and the gradient."""
    count, rank = devices(), len(axes)
    mesh = make_mesh({"a": count}, AxisType.Explicit if kind == "Explicit" else AxisType.Auto)
    x = normal(np.random.default_rng(16), (8, 16, 24, 8)[:rank], np.float32)
    ct = np.ascontiguousarray(np.transpose(x, axes))
    into = [spec(rank, [d]) for d in range(rank)]
    out_of = [spec(rank, [axes.index(d)]) for d in range(rank)]
    types = []

    def run(xs, cts):
        pairs = [jax.vjp(lambda x: fo.transpose(x, axes), x) for x in xs]
        results = [y for y, _ in pairs], [f(ct)[0] for (_, f), ct in zip(pairs, cts, strict=True)]
        types[:] = [jax.typeof(y).sharding.spec for y in jax.tree.leaves(results)]
        return results

    if kind == "shard_map":
        specs = dict(in_specs=(into, out_of), out_specs=(out_of, into))
        run = jax.shard_map(run, mesh=mesh, **specs)
    with jax.set_mesh(mesh):
        placed = [
            [jax.device_put(array, NamedSharding(mesh, s)) for s in specs]
            for array, specs in ((x, into), (ct, out_of))
        ]
        program = jax.jit(run).lower(*placed).compile()
        ys, gradients = program(*placed)
    assert not collectives(program.as_text())
    for y, gradient, there, back in zip(ys, gradients, out_of, into, strict=True):
        assert_layout("the result", y, NamedSharding(mesh, there))
        assert_layout("the gradient", gradient, NamedSharding(mesh, back))
        assert_bitwise_equal(y, ct)
        assert_bitwise_equal(gradient, x)
    if kind == "Explicit":
        assert types == [P(*s, *(None,) * (rank - len(s))) for s in (*out_of, *into)]


@over_kinds
def test_two_mesh_axes_follow_their_dimensions(axis_type):
    mesh = make_mesh({"a": 2, "b": devices() // 2}, axis_type)
    x = normal(np.random.default_rng(17), (8, 16, 24), np.float32)
    for given, expected in [
        (P("a", None, "b"), P("b", "a", None)),
        (P(None, ("a", "b"), None), P(None, None, ("a", "b"))),
        (P(("b", "a"), None, None), P(None, ("b", "a"), None)),
    ]:
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, given))
            program = jax.jit(lambda x: fo.transpose(x, (2, 0, 1))).lower(placed).compile()
            y = program(placed)
        assert not collectives(program.as_text())
        assert_layout("the result", y, NamedSharding(mesh, expected))
        assert_bitwise_equal(y, x.transpose(2, 0, 1))


@pytest.mark.jax
@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 1, 2), (2, 1, 0)], ids=str)
def test_explicit_type_is_that_of_jnp(axes):
    """Includes permutations that move nothing, and shapes with a 1."""
    mesh = make_mesh({"a": devices()}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        for shape in ((1, 16, 8), (8, 1, 8), (8, 16, 8)):
            sharding = NamedSharding(mesh, P(None, None, "a"))
            x = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
            got, want = (
                jax.eval_shape(lambda x, f=f: f(x, axes), x) for f in (fo.transpose, jnp.transpose)
            )
            assert got.shape == want.shape and got.sharding == want.sharding


# Dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["int16", "uint32", "float8_e5m2", "float8_e4m3b11fnuz", "complex64", "int4", "uint4"]
)
def test_other_dtypes(name):
    x = any_value(np.random.default_rng(19), (3, 4, 5), np.int8).astype(jnp.dtype(name))
    got = jax.jit(lambda x: fo.transpose(x, (2, 0, 1)))(x)
    assert got.dtype == jnp.dtype(name)
    assert_same_bytes(got, x.transpose(2, 0, 1), name)


def test_two_elements_to_a_byte_are_left_to_xla():
    x = np.zeros((4, 5), jnp.int4)
    assert "custom-call" not in work(fo.transpose, x)
    assert work(fo.transpose, x.astype(np.int8)) == ONE_KERNEL


def test_random_keys():
    keys = jax.random.split(jax.random.key(0), (3, 4))
    got = jax.jit(lambda k: fo.transpose(k, (1, 0)))(keys)
    assert got.dtype == keys.dtype and got.shape == (4, 3)
    data = np.asarray(jax.random.key_data(keys))
    assert np.array_equal(np.asarray(jax.random.key_data(got)), data.transpose(1, 0, 2))


def test_what_is_no_jax_array_yet():
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    assert isinstance(fo.transpose(x), jax.Array)
    assert_bitwise_equal(fo.transpose(x), x.T)
    # A NumPy array that is not contiguous.
    assert_bitwise_equal(fo.transpose(x.T[::-1]), x.T[::-1].T)
    for number in (2, 2.5, True, 1j, np.float32(2)):
        got, want = fo.transpose(number), jnp.transpose(number)
        assert got.dtype == want.dtype and got.weak_type == want.weak_type and got == want
    assert fo.transpose(2.5, ()).shape == ()


def test_weak_types_stay():
    x = jnp.broadcast_to(jnp.asarray(2.0), (2, 3))
    assert x.weak_type
    for axes in ((1, 0), (0, 1)):
        for run in (fo.transpose, jax.jit(fo.transpose, static_argnums=1)):
            assert run(x, axes).weak_type == jnp.transpose(x, axes).weak_type


def test_axes_of_every_kind():
    x = np.arange(24).reshape(2, 3, 4).astype(np.int32)
    kinds = [
        (2, 0, 1),
        [2, 0, 1],
        np.asarray([2, 0, 1]),
        (-1, 0, -2),
        (np.int64(2), np.uint8(0), 1),
        range(2, -1, -1),
        None,
    ]
    for axes in kinds:
        assert_bitwise_equal(fo.transpose(x, axes), jnp.transpose(x, axes))
    assert_bitwise_equal(fo.transpose(x), x.T)
    assert_bitwise_equal(fo.transpose(x, axes=(1, 0, 2)), x.transpose(1, 0, 2))


# Errors -------------------------------------------------------------------------------------------

REFUSED = {
    "repeated": ((0, 0, 1), ["repeated axis", "(0, 0, 1)", "(2, 3, 4)"]),
    "repeated from the end": ((0, -3, 1), ["repeated axis", "(0, -3, 1)"]),
    "missing": ((0, 1), ["axes don't match array", "(0, 1)", "(2, 3, 4)"]),
    "empty": ((), ["axes don't match array", "()", "(2, 3, 4)"]),
    "too large": ((0, 1, 3), ["axis 3 is out of bounds for array of dimension 3"]),
    "too small": ((0, 1, -4), ["axis -4 is out of bounds for array of dimension 3"]),
    "float": ((0, 1, 2.0), ["float"]),
    "text": ("abc", ["str"]),
    "a number": (1, ["int"]),
    "nested": (((0, 1, 2),), ["tuple"]),
}


@pytest.mark.parametrize("implementation", ["native", "auto", "xla"])
@pytest.mark.parametrize(("axes", "words"), list(REFUSED.values()), ids=REFUSED)
def test_refused_axes(axes, words, implementation):
    """The exception has the type that `jnp.transpose` raises, and a message with more details."""
    x = np.zeros((2, 3, 4), np.float32)
    with pytest.raises((TypeError, ValueError)) as theirs:
        jnp.transpose(x, axes)
    with fo.use_implementation(implementation), pytest.raises(type(theirs.value)) as error:
        fo.transpose(x, axes)
    message = str(error.value)
    assert not [word for word in ["transpose", *words] if word not in message], message


@pytest.mark.parametrize("axes", [(0, 0, 1), (0, 1)], ids=str)
def test_messages_contain_those_of_jnp(axes):
    x = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(TypeError) as theirs:
        jnp.transpose(x, axes)
    with pytest.raises(TypeError) as error:
        fo.transpose(x, axes)
    theirs = str(theirs.value).removeprefix("transpose ").rstrip(".")
    assert theirs in str(error.value)


@pytest.mark.parametrize(
    "bad", [None, "text", [1.0, 2.0], object()], ids=lambda b: type(b).__name__
)
def test_refused_arrays(bad):
    with pytest.raises(TypeError, match=r"transpose: x is .*; it must be"):
        fo.transpose(bad)


# Implementations ----------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("mapped", [0, 1, 2])
@pytest.mark.parametrize("spread", [0, 1, 2])
def test_explicit_types_under_vmap_are_those_of_jnp(mapped, spread):
    mesh = make_mesh({"a": devices()}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = normal(np.random.default_rng(21), (8, 16, 24), np.float32)
        x = jax.device_put(x, NamedSharding(mesh, spec(3, [spread])))
        got, want = (jax.vmap(f, in_axes=mapped)(x) for f in (fo.transpose, jnp.transpose))
        assert jax.typeof(got).sharding == jax.typeof(want).sharding
        assert_bitwise_equal(got, want)
        gradient = jax.grad(lambda x: (jax.vmap(fo.transpose, in_axes=mapped)(x) ** 2).sum())(x)
        assert jax.typeof(gradient).sharding == jax.typeof(x).sharding
        assert_bitwise_equal(gradient, 2 * x)
