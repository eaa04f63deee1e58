"""`dropout`: the bits, their statistics, keys, transformations, shards, special values, errors."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, assert_matches, checks, implementation
from harness.compat import make_mesh
from harness.masks import dropout_mask, looped_rounds, masks, philox
from harness.numerics import normal, raw_key
from harness.sharding import device_count
from jax.sharding import AxisType

import jax_fastops as fo
from jax_fastops import _random
from jax_fastops.dropout import _KERNEL

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

# "auto" takes one of the others, so its tests are marked slow.
MODES = ("native", "xla", pytest.param("auto", marks=pytest.mark.slow))
RATE = 0.3
HEAD_ROWS = 32  # from a row of weights of attention to that of the next head


def reference(x, key):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    keep = dropout_mask(key, x.shape, RATE)
    scaled = x.astype(wide) * jnp.asarray(1 / (1 - RATE), wide)
    return jnp.where(keep, scaled.astype(x.dtype), jnp.zeros((), x.dtype))


def draws(shape):
    return lambda rng, dtype: (normal(rng, shape, dtype), raw_key(int(rng.integers(1 << 30))))


def case(name, shape, sharded=None, **more):
    if sharded is not None:
        more["make_sharded_args"] = draws(sharded)
    return Case(
        name=name,
        fn=functools.partial(fo.dropout, rate=RATE),
        reference=reference,
        make_args=draws(shape),
        linear=(0,),
        exact=True,
        kernels=("dropout", "dropout"),
        only_kernels=True,
        kept=lambda x, key: [(key.dtype, 2)],
        **more,
    )


ROWS = case(
    "rows",
    (3, 13),
    (8, 16, 24),
    shardings=(  # in shard_map, rows count from 0: see test_shard_map
        Sharding("batch", (0, None), (0,), shard_map=False),
        Sharding("sequence", (1, None), (1,), shard_map=False),
    ),
    symbolic=("b, n", "2"),
)
basic = functools.partial(case, basic_only=True, modes=("native",))
VECTOR = basic("vector", (9,))
RANK3 = basic("rank3", (2, 3, 16), dtypes=("bfloat16", "float32"))
SCALAR = basic("scalar", (), dtypes=("float32",))


@checks(ROWS, VECTOR, RANK3, SCALAR)
def test_harness(check):
    check()


# The definition -----------------------------------------------------------------------------------

# Counter, key and result, from the test vectors of Random123.
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_in_python(counter, key, expected):
    assert " ".join(f"{int(word):08x}" for word in _random.philox(counter, key)) == expected


def fields(seed, n):
    """The 16 bits of each element of a row."""
    low, high, *key = seed
    words = [w for b in range(-(-n // 8)) for w in philox((b, low, high, 0), key)]
    return np.array([w >> shift & 0xFFFF for w in words for shift in (0, 16)])[:n]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_of_the_tests(counter, key, expected):
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == expected
    looped = looped_rounds(*(list(map(jnp.uint32, words)) for words in (counter, key)))
    assert " ".join(f"{int(word):08x}" for word in looped) == expected


# Rows beyond 32 bits, keys with high bits, and the known answer of zeros.
SEEDS = [
    (0, 0, 0, 0),
    (2**32 - 1, 0, 1, 2),
    (0, 1, 1, 2),
    (5, 2**32 - 1, 2**32 - 1, 2**31),
    (0x85A308D3, 0x13198A2E, 0xA4093822, 0x299F31D0),
]


@pytest.mark.parametrize("threshold", [1, 255, 256, 32768, 40000, 65535, 65536])
@pytest.mark.parametrize("n", [1, 7, 64, 200, 5001])
def test_the_bits_of_the_kernel(n, threshold):
    """Element by element, for positions that no array of this test could have."""
    seeds = np.array(SEEDS, np.uint32)
    bits = np.array([fields(seed, n) for seed in SEEDS])
    x = jnp.ones((len(SEEDS), n), jnp.float32)
    got = jax.jit(functools.partial(_KERNEL, threshold=threshold, dropout_scale=2.0))(x, seeds).y
    assert_matches(got, np.where(bits < threshold, np.float32(2), np.float32(0)))
    plain = _random.kept(jnp.asarray(seeds), n, threshold)
    assert_matches(plain, bits < threshold)


def test_the_mask():
    """Rows in C order; the last axis is a row."""
    key, shape = raw_key(3), (2, 3, 21)
    want = [fields((row, 0, *map(int, key)), 21) < round(0.75 * 2**16) for row in range(6)]
    assert_matches(fo.dropout_mask(key, shape, 0.25), np.reshape(want, shape))
    assert_matches(fo.dropout_mask(key, 21, 0.25), want[0])
    assert_matches(fo.dropout_mask(key, (), 0.25), want[0][0])


def test_positions_of_many_rows():
    sizes = (70_001, 3, 99_991, 7)
    rng = np.random.default_rng(0)
    index = [rng.integers(0, size, 200) for size in sizes]
    index = [np.append(i, size - 1) for i, size in zip(index, sizes, strict=True)]
    want = np.ravel_multi_index(index, sizes).astype(np.uint64)
    low, high = _random.position_of([jnp.asarray(i, jnp.uint32) for i in index], sizes)
    assert_matches(low, (want & 0xFFFFFFFF).astype(np.uint32))
    assert_matches(high, (want >> 32).astype(np.uint32))
    assert want.max() > 2**33
    low, high = _random.position_of(
        [jnp.asarray(i, jnp.uint32) for i in index[:2]], sizes[:2], False
    )
    assert_matches(low, np.ravel_multi_index(index[:2], sizes[:2]).astype(np.uint32))
    assert int(high) == 0


# Statistics ---------------------------------------------------------------------------------------


def test_rates():
    """Within four sigma of the rate."""
    rng = np.random.default_rng(1)
    for seed in range(20):
        rate = float(rng.uniform(0.01, 0.99))
        shape = tuple(int(d) for d in rng.integers(1, 60, rng.integers(1, 4)))
        shape = (*shape, 1 + 40_000 // int(np.prod(shape)))
        mask = np.asarray(
            jax.jit(fo.dropout_mask, static_argnums=(1, 2))(raw_key(seed), shape, rate)
        )
        sigma = np.sqrt(rate * (1 - rate) / mask.size)
        assert abs(mask.mean() - (1 - rate)) < 4 * sigma + 2**-17, (rate, shape)


def chi_square(counts):
    """How many sigma the statistic of uniform counts is from its mean."""
    expected = counts.mean()
    found, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    return (found - freedom) / np.sqrt(2 * freedom)


# 2^18 draws of each of two keys, or 2^29.
@pytest.mark.parametrize("rows, fields", [(64, 1), pytest.param(4096, 32, marks=pytest.mark.slow)])
def test_bits_are_uniform_and_independent(rows, fields):
    """Bytes, and pairs of neighbors, rows, heads, keys, and layers, whose keys are split."""
    n = 4096

    @jax.jit
    def field(key):  # 16 bits for each element
        seeds = _random.row_seeds(jnp.asarray(key), (rows, n))
        low, high, *words = (seeds[..., i, None] for i in range(4))
        bits = _random.philox((jnp.arange(n // 8, dtype=jnp.uint32), low, high, 0), words)
        return jnp.stack(bits, -1).reshape(rows, -1)

    counts = np.zeros((7, 256), np.int64)
    for seed in range(fields):
        keys = raw_key(2 * seed), raw_key(2 * seed + 1), jax.random.split(raw_key(2 * seed))[1]
        first, second, layer = (np.asarray(field(key)) for key in keys)
        highest, others, layers = (a.view(np.uint16) >> 12 for a in (first, second, layer))
        found = (
            first.view(np.uint8),
            second.view(np.uint8),
            16 * highest[:, :-1] + highest[:, 1:],
            16 * highest[:-1] + highest[1:],
            16 * highest[:-HEAD_ROWS] + highest[HEAD_ROWS:],
            16 * highest + others,
            16 * highest + layers,
        )
        counts += [np.bincount(values.ravel(), minlength=256) for values in found]
    assert all(chi_square(each) < 4 for each in counts)


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_kinds_of_keys(kind):
    masks = []
    for seed in range(3):
        key = jax.random.key(seed, impl=kind)
        raw = jax.random.key_data(key)
        mask = np.asarray(fo.dropout_mask(key, (8, 64), 0.5))
        for same in (raw, np.asarray(raw)):
            assert_matches(fo.dropout_mask(same, (8, 64), 0.5), mask)
        y = jax.jit(functools.partial(fo.dropout, rate=0.5))(np.ones((8, 64), np.float32), key)
        assert_matches(y, 2 * mask.astype(np.float32))
        masks.append(mask)
    for i in range(3):
        differ = np.mean(masks[i] != masks[i - 1])
        assert 0.35 < differ < 0.65
    words = [int(w) for w in np.ravel(jax.random.key_data(jax.random.key(7, impl=kind)))]
    want = words[:2] if len(words) == 2 else philox((*words[2:], 0, 0), words[:2])[:2]
    assert [int(w) for w in _random.key_words("", "", jax.random.key(7, impl=kind))] == list(want)


def test_raw_keys_have_no_gradient():
    x = np.ones((3, 8), np.float32)
    f = lambda x, key: fo.dropout(x, key, 0.5)  # noqa: E731
    y, pullback = jax.vjp(f, x, raw_key(0))
    dx, dkey = pullback(y)
    assert dkey.dtype == jax.dtypes.float0
    assert_matches(dx, 2 * np.asarray(y))
    zeros = np.zeros((2,), jax.dtypes.float0)
    assert_matches(jax.jvp(f, (x, raw_key(0)), (x, zeros))[1], np.asarray(y))


# Shards -------------------------------------------------------------------------------------------


# The harness has those of rows.
SPECS = [("a", None, "b"), (None, None, "a")]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_mask_does_not_depend_on_the_sharding(spec, explicit, mode):
    x = np.random.default_rng(0).standard_normal((8, 8, 40)).astype(np.float32)
    key = jax.random.key(9)

    def run(x, key):
        y, pullback = jax.vjp(lambda x: fo.dropout(x, key, RATE), x)
        return y, pullback(2 * x)[0]

    want = run(x, key)
    mesh = make_mesh(
        {"a": device_count() // 2, "b": 2}, AxisType.Explicit if explicit else AxisType.Auto
    )
    spec = jax.sharding.PartitionSpec(*spec)
    with implementation(mode):
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        got = jax.jit(run)(sharded, key)
    assert_matches(got, jax.tree.map(np.asarray, want))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("mode", MODES)
def test_shard_map(mode):
    """The rows of each shard count from 0."""
    x = np.random.default_rng(0).standard_normal((8, 3, 24)).astype(np.float32)
    count = min(device_count(), 4)
    mesh = jax.sharding.Mesh(jax.devices()[:count], ("a",))
    spec = jax.sharding.PartitionSpec("a")
    keys = jax.random.split(jax.random.key(0), count)

    def run(x, key):
        y, pullback = jax.vjp(lambda x: fo.dropout(x, key, RATE), x)
        return y, pullback(2 * x)[0]

    def local(x, keys):
        return *run(x, keys[0]), *run(x, jax.random.key(7))

    both = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    with implementation(mode):
        got = jax.tree.map(np.asarray, jax.jit(both)(x, keys))
    shards = np.split(x, count)
    want = [
        [*run(shard, key), *run(shard, jax.random.key(7))]
        for shard, key in zip(shards, keys, strict=True)
    ]
    assert_matches(list(got), [np.concatenate(part) for part in zip(*want, strict=True)])


# Rates, shapes, values ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_rates_at_the_ends(mode, dtype):
    x = normal(np.random.default_rng(0), (3, 9), dtype)
    x[0, 0] = np.nan
    key = jax.random.key(0)
    with implementation(mode):
        assert_matches(fo.dropout(x, key, 0), x)
        assert_matches(fo.dropout(x, None, 0.0), x)
        text = jax.jit(lambda x, key: fo.dropout(x, key, 0)).lower(x, key).as_text()
        assert "return %arg0" in text and "stablehlo" not in text
        for rate in (1, 1 - 2**-20):
            assert_matches(fo.dropout(x, key, rate), np.zeros_like(x))
            y, pullback = jax.vjp(lambda x, rate=rate: fo.dropout(x, key, rate), x)
            assert_matches(pullback(y)[0], np.zeros_like(x))
        assert_matches(fo.dropout(x, key, 2**-20), (x * (1 / (1 - 2**-20))).astype(x.dtype))
    assert np.all(fo.dropout_mask(key, (5, 9), 0)) and not np.any(fo.dropout_mask(key, (5, 9), 1))


N = (1, 2, 3, 7, 8, 9, 15, 16, 31, 33, 64, 127, 1000, 1025, 4095, 4096, 4097, 100_000, 100_001)
# On a GPU, arrays of more elements have other kernels.
BOUNDS = (2**15, 2**16, 5 * 2**16)


def test_lengths(dtype):
    """The kernel has the bits of the definition. Offsets make rows unaligned."""
    rng, key = np.random.default_rng(2), raw_key(4)
    shapes = [(2, 5, 33), (11_000, 33), (8000, 8), (1000, 64), *((3, n) for n in N)]
    shapes += [(1, n + more) for n in BOUNDS for more in (-1, 0, 1)] + [(4, 120_001)]
    xs = [normal(rng, shape, dtype) for shape in shapes]

    def offset(xs):
        return [*xs, xs[shapes.index((3, 4097))][1:], xs[-1][1:]]

    def dropped(xs):
        return [fo.dropout(x, key, RATE) for x in xs]

    with implementation("native"):
        got = jax.jit(lambda xs: dropped(offset(xs)))(xs)
    with implementation("xla"):  # each length is a compilation
        assert_matches(jax.jit(dropped)(xs[:4]), got[:4])
    wide = jnp.promote_types(dtype, jnp.float32)
    for y, x in zip(got, offset(xs), strict=True):
        scaled = (x.astype(wide) * wide.type(1 / (1 - RATE))).astype(dtype)
        assert_matches(y, np.where(masks(key, x.shape, RATE), scaled, np.zeros_like(x)))


ONES, KEY = np.ones((3, 4), np.float32), jax.random.key(0)


@pytest.mark.parametrize(
    "x, key, rate, error, message",
    [
        (ONES, KEY, 1.5, ValueError, r"dropout: rate is 1.5; it must be in \[0, 1\]"),
        (ONES, KEY, -0.1, ValueError, r"rate is -0.1; it must be in \[0, 1\]"),
        (ONES, KEY, float("nan"), ValueError, r"rate is nan; it must be in"),
        (ONES, KEY, jnp.float32(0.5), TypeError, "dropout: rate is of type"),
        (ONES, None, 0.5, TypeError, "dropout: key is None; it must be a key of jax.random"),
        (ONES, 3, 0.5, TypeError, "key is of type int; it must be a key"),
        (ONES, jax.random.split(KEY), 0.5, ValueError, r"key has shape \(2,\); it must be a key"),
        (ONES, ONES, 0.5, TypeError, r"key has dtype float32 and shape \(3, 4\); it must be"),
        (ONES, np.zeros((2, 2), np.uint32), 0.5, ValueError, r"key has shape \(2, 2\)"),
        (ONES, np.zeros((), np.uint32), 0.5, ValueError, r"key has shape \(\)"),
        (ONES.astype(int), KEY, 0.5, TypeError, "dropout: x has dtype int.*be one of"),
        (None, KEY, 0.5, TypeError, "dropout: x is None"),
    ],
)
def test_errors(x, key, rate, error, message):
    with pytest.raises(error, match=message):
        fo.dropout(x, key, rate)


def test_errors_of_the_mask():
    for shape, rate, error in (
        ((2, 0.5), 0.5, TypeError),
        (("a",), 0.5, TypeError),
        ((3, -1), 0.5, ValueError),
        (2, 2, ValueError),
    ):
        with pytest.raises(error, match=r"dropout_mask: (shape|rate) is"):
            fo.dropout_mask(KEY, shape, rate)
