"""`segment_sum` and `take`: transformations, ids, shapes, special values, bits, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.case import VARIANT
from harness.compat import x64
from harness.numerics import assert_bitwise_equal, normal
from harness.programs import targets_of
from harness.sharding import collectives, mesh_for
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]


def wide_sums(data, ids, count, **options):
    """`jax.ops.segment_sum`, summed in float32 or wider."""
    wide = data.astype(jnp.promote_types(data.dtype, jnp.float32))
    return jax.ops.segment_sum(wide, ids, count, **options).astype(data.dtype)


def draws(shape, count, ordered=False):
    """Draws rows and ids; some ids are of no segment, and some segments have no rows."""

    def make(rng, dtype):
        ids = rng.integers(-1, count + 1, shape[0]).astype(np.int32)
        return normal(rng, shape, dtype), np.sort(ids) if ordered else ids

    return make


def sums(name, shape, count, sharded=None, ordered=False, **more):
    options = {"num_segments": count, "indices_are_sorted": ordered}
    if sharded is not None:
        more["make_sharded_args"] = draws(sharded, count, ordered)
    return Case(
        name=name,
        fn=lambda x, ids: fo.segment_sum(x, ids, **options),
        reference=lambda x, ids: wide_sums(x, ids, count, indices_are_sorted=ordered),
        make_args=draws(shape, count, ordered),
        linear=(0,),
        tolerance=Tolerance(ulps=4.0),
        kernels=("segment_sum",),
        maps=((0, 1),),
        kept=lambda x, ids: [(np.int32, ids.size)],
        **more,
    )


SUMS = sums(
    "sums",
    (7, 3),
    4,
    (16, 8),
    shardings=(
        Sharding("rows", (0, 0), (None,), 1, shard_map=False),
        Sharding("columns", (1, None), (1,)),
    ),
)
SORTED = sums("sorted", (9, 2, 4), 5, ordered=True, quick=VARIANT)
NUMBERS = sums("numbers", (11,), 3, quick=VARIANT)


@checks(SUMS, SORTED, NUMBERS)
def test_segment_sum(check):
    check()


def rows(name, shape, indices, sharded=None, mode=None, **more):
    def make(shape, indices):
        low, high = (0, shape[0]) if mode is None else (-3, shape[0] + 3)

        def draw(rng, dtype):
            ids = rng.integers(low, high, indices).astype(np.int32)
            return normal(rng, shape, dtype), ids

        return draw

    if sharded is not None:
        more["make_sharded_args"] = make(*sharded)
    return Case(
        name=name,
        fn=lambda table, ids: fo.take(table, ids, mode=mode),
        reference=lambda table, ids: jnp.take(table, ids, axis=0, mode=mode),
        make_args=make(shape, indices),
        linear=(0,),
        tolerance=Tolerance(ulps=4.0),
        kept=lambda table, ids: [(np.int32, ids.size)],
        **more,
    )


TAKE = rows(
    "take",
    (5, 3),
    (2, 4),
    ((8, 8), (16, 3)),
    shardings=(Sharding("indices", (None, 0), (0,), gradient_all_reduces=1),),
    shards_under_vmap=False,
)
CLIP = rows("clip", (4, 2, 3), (6,), mode="clip", quick=VARIANT)


@checks(TAKE, CLIP)
def test_take(check):
    check()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gradient_of_a_large_table_gathers_rows(kind):
    """The sums have the bits of one device, and no device sends them."""
    rng = np.random.default_rng(0)
    table, weights = (normal(rng, shape, np.float32) for shape in ((512, 24), (16, 12, 24)))
    ids = rng.integers(0, 512, (16, 12)).astype(np.int32)
    gradient = jax.grad(lambda table, ids, weights: (fo.take(table, ids) * weights).sum())
    expected = jax.jit(gradient)(table, ids, weights)
    mesh = mesh_for(kind)
    with jax.set_mesh(mesh):
        specs = (PartitionSpec(), PartitionSpec("a"), PartitionSpec("a"))
        args = (table, ids, weights)
        args = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(args, specs, strict=True)
        ]
        compiled = jax.jit(gradient).lower(*args).compile()
    assert collectives(compiled.as_text()).keys() == {"all-gather"}
    assert_bitwise_equal(compiled(*args), expected)


# Values -------------------------------------------------------------------------------------------


def exact(x, ids, count):
    """The sums in float64, by NumPy."""
    found = np.zeros((count, *x.shape[1:]))
    kept = (ids >= 0) & (ids < count)
    np.add.at(found, ids[kept], np.asarray(x[kept], np.float64))
    return found


def whole(rng, shape, dtype):
    """Small integers, whose sums are exact in every order."""
    return rng.integers(-4, 5, shape).astype(dtype)


SHAPES = [  # rows, columns, segments
    (1, 1, 1),
    (5, 1, 300),
    (3000, 1, 7),
    (1000, 3, 100),
    (257, 33, 40),
    (2000, 64, 150),
    (60, 300, 1000),
    (300, 1032, 3),
    (9, 8, 70_000),  # ids of more than 16 bits
    (5000, 1, 2**20),  # a sort of several blocks, in three passes
    (40_000, 2, 70_000),  # and of so many that their counts are scanned
]


def ids_of(rng, kind, n, count):
    if kind == "even":
        return rng.integers(-2, count + 2, n)
    if kind == "skewed":
        return np.where(rng.random(n) < 0.5, count // 2, rng.integers(0, count, n))
    return rng.integers(0, min(count, 2), n) if kind == "few" else np.full(n, count)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *(("float32", kind) for kind in ("even", "skewed", "few", "none")),
        ("bfloat16", "skewed"),
        ("float64", "even"),
    ],
)
def test_shapes(dtype, kind):
    rng, dtype = np.random.default_rng(1), jnp.dtype(dtype)
    with x64(dtype == "float64"):
        for n, columns, count in SHAPES:
            x, ids = whole(rng, (n, columns), dtype), ids_of(rng, kind, n, count)
            for ordered in (False, True):
                ids = np.sort(ids) if ordered else ids
                options = {"num_segments": count, "indices_are_sorted": ordered}
                got = jax.jit(functools.partial(fo.segment_sum, **options))(x, ids)
                want = exact(x, ids, count).astype(dtype)
                np.testing.assert_array_equal(
                    np.asarray(got, np.float64), want.astype(np.float64), f"{n, columns, options}"
                )


def test_a_map_sorts_each_list_of_ids():
    rng = np.random.default_rng(5)
    x, ids = whole(rng, (2, 36_000, 1), np.float32), rng.integers(-9, 3000, (2, 36_000))
    got = jax.jit(jax.vmap(lambda x, ids: fo.segment_sum(x, ids, 2990)))(x, ids)
    np.testing.assert_array_equal(got, [exact(x[i], ids[i], 2990) for i in range(2)])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int64, np.uint64, np.uint32])
def test_ids_of_every_dtype(dtype):
    """Those that int32 cannot hold are out of bounds."""
    info = np.iinfo(dtype)
    x = np.ones((6, 2), np.float32)
    with x64(info.bits == 64):
        ids = np.array([0, 1, 1, 100, info.max, info.min], dtype)
        got = jax.jit(lambda x: fo.segment_sum(x, jnp.asarray(ids), 3))(x)
        want = [1 + (info.min == 0), 2, 0]
        np.testing.assert_array_equal(got, np.repeat(np.array(want, np.float32)[:, None], 2, 1))
        table = np.arange(6, dtype=np.float32).reshape(3, 2)
        for mode in (None, "clip"):
            got = jax.jit(functools.partial(fo.take, mode=mode))(table, ids)
            small = np.clip(ids.astype(object), -10, 10).astype(np.int32)
            np.testing.assert_array_equal(got, jnp.take(table, small, axis=0, mode=mode))


def test_other_dtypes_are_jax():
    x, ids = np.arange(6), np.array([0, 2, 0, 1, 5, 2])
    np.testing.assert_array_equal(fo.segment_sum(x, ids), jax.ops.segment_sum(x, ids))
    np.testing.assert_array_equal(fo.take(x, ids), jnp.take(x, ids))


def test_bfloat16_is_rounded_once():
    """Added one by one in bfloat16, 256 + 1 + 1 + ... stays 256."""
    x = np.ones((400, 8), jnp.bfloat16)
    x[0] = 256
    got = jax.jit(lambda x: fo.segment_sum(x, np.zeros(400, int), 1))(x)
    assert np.asarray(got, np.float32).tolist() == [[656.0] * 8]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_in_its_sum_alone(bad):
    rng = np.random.default_rng(2)
    x, ids = normal(rng, (500, 5), np.float32), rng.integers(-1, 40, 500)
    x[17], ids[17] = bad, 11
    x[18:20], ids[18:20] = np.nan, (-1, 39)  # in no sum
    got = np.asarray(jax.jit(lambda x: fo.segment_sum(x, ids, 39))(x))
    hit = np.arange(39) == 11
    np.testing.assert_array_equal(got[hit], np.full((1, 5), bad, np.float32))
    assert np.isfinite(got[~hit]).all()


def test_every_run_has_the_same_bits():
    rng = np.random.default_rng(3)
    x = normal(rng, (20_000, 24), np.float32)
    ids = np.where(rng.random(20_000) < 0.3, 7, rng.integers(0, 500, 20_000))
    f = jax.jit(lambda x: fo.segment_sum(x, ids, 500))
    first = f(x)
    for _ in range(20):
        assert_bitwise_equal(f(x), first)


def test_ids_that_are_not_sorted_do_no_harm():
    """The sums are undefined, and nothing else."""
    ids = np.random.default_rng(4).integers(-5, 60, 3000)
    f = lambda x: fo.segment_sum(x, ids, 50, indices_are_sorted=True)  # noqa: E731
    assert jax.block_until_ready(jax.jit(f)(np.ones((3000, 4), np.float32))).shape == (50, 4)


def test_the_gradient_of_take_is_one_kernel():
    f = lambda table, ids: fo.take(table, ids).sum()  # noqa: E731
    args = np.ones((9, 4), np.float32), np.array([[1, 2], [1, 8]])
    assert targets_of(jax.grad(f), *args) == ["segment_sum"]
    assert targets_of(f, *args) == []


@pytest.mark.jax
def test_tangents_of_rows_that_the_table_does_not_have():
    table, ids = jnp.arange(8.0).reshape(4, 2), jnp.array([1, -1, 4, -5])
    with fo.use_implementation("native"):
        got = jax.jvp(lambda x: fo.take(x, ids), (table,), (table,))
    want = jax.jvp(lambda x: jnp.take(x, ids, axis=0), (table,), (table,))
    jax.tree.map(np.testing.assert_array_equal, got, want)


# Errors -------------------------------------------------------------------------------------------

DATA, IDS = np.ones((3, 2), np.float32), np.array([0, 1, 1])


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((None, IDS, 2), TypeError, "segment_sum: data is None"),
        ((DATA, [0, 1, 1], 2), TypeError, "segment_ids is of type list"),
        ((DATA, IDS.astype(float), 2), TypeError, "segment_ids has dtype float.*; it must have an"),
        ((DATA, IDS[:2], 2), ValueError, r"shape \(2,\), and data has shape \(3, 2\); there must"),
        ((DATA, IDS[None], 2), ValueError, "one id for each row"),
        ((np.float32(1), np.int32(0), 2), ValueError, "one id for each row"),
        ((DATA, IDS, 2.0), TypeError, "num_segments is 2.0; it must be an integer"),
        ((DATA, IDS, -1), ValueError, "num_segments is -1; it must be 0 or more"),
    ],
)
def test_errors_of_segment_sum(args, error, message):
    with pytest.raises(error, match=message):
        fo.segment_sum(*args)


def test_ids_that_are_traced_need_a_number_of_segments():
    with pytest.raises(TypeError, match="num_segments is None; it must be given"):
        jax.jit(lambda ids: fo.segment_sum(DATA, ids))(IDS)


@pytest.mark.parametrize(
    ("args", "mode", "error", "message"),
    [
        ((None, IDS), None, TypeError, "take: table is None"),
        ((DATA, 0.5), None, TypeError, "take: indices has dtype float"),
        ((np.float32(1), IDS), None, ValueError, r"table of shape \(\) has no rows"),
        ((DATA, IDS), "wrap", ValueError, "mode is 'wrap'; it must be one of 'fill', 'clip'"),
        ((DATA[:0], IDS), None, IndexError, "empty axis"),
    ],
)
def test_errors_of_take(args, mode, error, message):
    with pytest.raises(error, match=message):
        fo.take(*args, mode=mode)


# patch --------------------------------------------------------------------------------------------


def test_a_symbolic_number_of_segments_is_that_of_jax():
    data, ids = jnp.ones((5, 3)), jnp.array([0, 2, 2, 1, 7])
    nodes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: fo.segment_sum(data, ids, x.shape[0])))(nodes)
    for n in (3, 9):
        got = exported.call(jnp.ones((n, 3)))
        assert_bitwise_equal(got, jax.ops.segment_sum(data, ids, n))


@pytest.mark.parametrize("columns, segments", [(1, 2**31 + 100), (2**31, 4)])
def test_what_the_kernel_cannot_count_is_left_to_xla(columns, segments):
    x = jax.ShapeDtypeStruct((4, columns), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)

    def lowered(x, ids):
        with x64(segments >= 2**31):
            return jax.jit(lambda x, i: fo.segment_sum(x, i, segments)).lower(x, ids).as_text()

    assert "jax_fastops" not in lowered(x, ids)


def test_patch_replaces_the_function_of_jax():
    x, ids = jnp.ones((30, 4)), np.arange(30) % 7 - 1

    def sums(**options):
        return lambda x: jax.ops.segment_sum(x, ids, num_segments=6, **options)

    with fo.patch(only=["segment_sum"]):
        for options in ({}, {"indices_are_sorted": False}, {"unique_indices": False}):
            assert targets_of(sums(**options), x) == ["segment_sum"]
        np.testing.assert_array_equal(jax.jit(sums())(x), exact(x, ids, 6))
        for options in ({"bucket_size": 8}, {"mode": "clip"}):
            assert targets_of(sums(**options), x) == []
        assert targets_of(lambda x: jax.ops.segment_sum(x.astype(int), ids, 6), x) == []
        assert targets_of(lambda x: jax.ops.segment_sum(x[0], ids[:4], 6), x) == ["segment_sum"]
    assert targets_of(sums(), x) == []
