"""`attention` and `qkv_attention`: values, masks, segments, dropout, transformations, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.compat import x64
from harness.masks import dropout_mask
from harness.numerics import norm_errors, normal
from harness.sharding import collectives, mesh_for
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops._native import kernels

# A GPU rounds the operands of float32 products to 10 bits otherwise.
pytestmark = pytest.mark.usefixtures("exact_products")


def expected(query, key, value, bias=None, allowed=True, scale=None, weight=1.0):
    """Weights are multiplied by `weight`, which is 0 where one is dropped."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = jnp.where(allowed, scores, -1e30)
    weights = jnp.where(allowed, jax.nn.softmax(scores), 0) * weight
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def expected_of_qkv(qkv, bias=None, *, num_heads, num_kv_heads=None, **options):
    qkv = qkv if bias is None else qkv + bias
    kv_heads = num_kv_heads or num_heads
    if qkv.ndim == 3:
        count = num_heads + 2 * kv_heads
        heads = qkv.reshape(*qkv.shape[:2], count, qkv.shape[2] // count)
        parts = jnp.split(heads, (num_heads, num_heads + kv_heads), 2)
    else:
        parts = [x[:, :, 0] for x in jnp.split(qkv, 3, 2)]
    y = expected(*parts, **options)
    return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])


def causal(queries, keys):
    return jnp.arange(keys) <= jnp.arange(queries)[:, None]


# ---- the harness ---------------------------------------------------------------------------------


def drawn(*shapes):
    return lambda rng, dtype: tuple(normal(rng, shape, dtype) for shape in shapes)


def case(name, fn, reference, shapes, sharded, **more):
    return Case(
        name=name,
        fn=fn,
        reference=reference,
        make_args=drawn(*shapes),
        make_sharded_args=drawn(*sharded),
        # Weights are rounded before the second product, and terms of a tangent cancel. For 300
        # random inputs, roundings by half an epsilon change a second derivative by up to 71.
        tolerance=Tolerance(ulps=96.0, lone=1.0),
        **more,
    )


PLAIN = case(
    "attention",
    functools.partial(fo.attention, is_causal=True),
    lambda q, k, v: expected(q, k, v, allowed=causal(q.shape[1], k.shape[1])),
    [(2, 3, 2, 2)] * 3,
    [(8, 3, 8, 2)] * 3,
    shardings=(
        Sharding("batch", (0, 0, 0), (0,)),
        Sharding("heads", (2, 2, 2), (2,)),
    ),
    symbolic=("b, t, n, 2", "b, s, n, 2", "b, s, n, 2"),
    empty="b",
)
GROUPED = case(
    "grouped",
    fo.attention,
    expected,
    [(1, 3, 4, 2), (1, 2, 2, 2), (1, 2, 2, 2), (1, 4, 1, 2)],
    [(8, 3, 16, 2), (8, 2, 8, 2), (8, 2, 8, 2), (1, 16, 1, 2)],
    # The gradient of the bias is a sum over the batch.
    shardings=(
        Sharding("batch", (0, 0, 0, None), (0,), gradient_all_reduces=1),
        Sharding("heads", (2, 2, 2, 1), (2,)),
    ),
    basic_only=True,
)
# Heads that cuDNN takes.
EIGHT = case(
    "attention_of_8",
    functools.partial(fo.attention, is_causal=True),
    lambda q, k, v: expected(q, k, v, allowed=causal(q.shape[1], k.shape[1])),
    [(2, 3, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8)],
    [(8, 3, 8, 8), (8, 4, 8, 8), (8, 4, 8, 8)],
    shardings=(
        Sharding("batch", (0, 0, 0), (0,)),
        Sharding("heads", (2, 2, 2), (2,)),
    ),
    basic_only=jax.default_backend() != "gpu",
)
PACKED = case(
    "qkv_attention",
    functools.partial(fo.qkv_attention, num_heads=2),
    functools.partial(expected_of_qkv, num_heads=2),
    [(2, 3, 12), (12,)],
    [(8, 3, 12), (12,)],
    shardings=(Sharding("batch", (0, None), (0,), gradient_all_reduces=1),),
    symbolic=("b, s, 12", "12"),
    empty="b",
)
PARTS = case(
    "qkv_attention_of_parts",
    functools.partial(fo.qkv_attention, num_heads=2),
    functools.partial(expected_of_qkv, num_heads=2),
    [(2, 3, 3, 2, 2), (3, 2, 2)],
    [(8, 3, 3, 2, 2), (3, 2, 2)],
    shardings=(Sharding("batch", (0, None), (0,), gradient_all_reduces=1),),
    basic_only=True,
)


@checks(PLAIN, GROUPED, EIGHT, PACKED, PARTS)
def test_transforms(check):
    check()


# ---- values and gradients ------------------------------------------------------------------------


def assert_near(result, exact, bound):
    """Compares norms. Gradients may be 0."""
    for mine, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(exact), strict=True):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(mine - theirs) <= bound * (np.linalg.norm(theirs) + 0.1)


def masks(batch, heads, queries, keys):
    """Options, and the mask that they mean."""
    rng = np.random.default_rng(5)
    row, column = np.arange(queries)[:, None], np.arange(keys)
    lengths = np.array([1, keys // 2, keys, 0][:batch])
    of_queries = np.array([queries, 1, 0, queries][:batch])
    ids = rng.integers(-1, 3, (batch, queries)), rng.integers(-1, 3, (batch, keys))
    random = rng.random((batch, heads, queries, keys)) < 0.6
    short = (column < lengths[:, None, None, None], row < of_queries[:, None, None, None])
    same = ids[0][:, None, :, None] == ids[1][:, None, None, :]
    same &= ids[0][:, None, :, None] > 0
    window = (column >= row - 2) & (column <= row + 1)
    return {
        "none": ({}, True),
        "causal": (dict(is_causal=True), column <= row),
        "window": (dict(local_window_size=(2, 1)), window),
        "wide": (dict(local_window_size=1), abs(column - row) <= 1),
        "mask": (dict(mask=random), random),
        "heads": (dict(mask=random[:1, :, :1]), random[:1, :, :1]),
        "keys": (dict(mask=random[:, :1, :1]), random[:, :1, :1]),
        "matrix": (dict(mask=random[0, 0]), random[0, 0]),
        "lengths": (dict(key_value_seq_lengths=lengths), short[0]),
        "queries": (dict(query_seq_lengths=of_queries), short[1]),
        "segments": (dict(segment_ids=ids, max_segments=2), same),
        "all": (
            dict(
                mask=random,
                is_causal=True,
                local_window_size=(3, 0),
                key_value_seq_lengths=lengths,
                query_seq_lengths=of_queries,
                segment_ids=ids,
            ),
            random & (column <= row) & (column >= row - 3) & short[0] & short[1] & same,
        ),
    }


SHAPES = [(4, 4, 2, 7, 9, 5), (2, 3, 3, 33, 33, 16), (1, 6, 1, 1, 40, 8)]
MASKS = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in masks(1, 1, 1, 1)]
BOUND = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype, kind", [*MASKS, ("float64", "all"), ("float16", "all")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks(shape, kind, dtype):
    """A row without any key gives 0. The gradient of the bias has the shape of the bias."""
    batch, heads, kv_heads, queries, keys, size = shape
    options, allowed = masks(batch, heads, queries, keys)[kind]
    with x64():
        rng = np.random.default_rng(1)
        given = [
            jnp.asarray(rng.standard_normal((batch, *rest)), dtype)
            for rest in ((queries, heads, size), *[(keys, kv_heads, size)] * 2)
        ]
        given.append(jnp.asarray(rng.standard_normal((1, heads, 1, keys)), dtype))
        weight = rng.standard_normal((batch, queries, heads, size))

        def step(fn):
            def loss(*args):
                y = fn(*args)
                return (y.astype(jnp.float64) * weight).sum(), y

            return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))

        found = step(functools.partial(fo.attention, **options))(*given)
        assert [g.dtype for g in found[0]] == [a.dtype for a in given]
        wide = [a.astype(jnp.float64) for a in given]
        wanted = step(functools.partial(expected, allowed=allowed))(*wide)
        assert_near(found, wanted, BOUND[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_less_accurate_than_jax(dtype):
    """Against float64, forward and every gradient. On a GPU, both are by cuDNN in 16 bits."""
    by_cudnn = dtype != "float32" and "jax_fastops.attention" in kernels("cuda")
    implementation = "cudnn" if by_cudnn and jax.default_backend() == "gpu" else "xla"
    with x64():
        rng = np.random.default_rng(2)
        given = [jnp.asarray(2 * rng.standard_normal((2, 64, 2, 32)), dtype) for _ in range(3)]
        weight = jnp.asarray(rng.standard_normal((2, 64, 2, 32)), dtype)

        def step(fn, args, weight):
            y, pull = jax.vjp(fn, *args)
            return y, *pull(weight)

        options = dict(is_causal=True, implementation=implementation)
        jax_nn = functools.partial(jax.nn.dot_product_attention, **options)
        ours = functools.partial(fo.attention, is_causal=True)
        wide = [a.astype(jnp.float64) for a in given]
        oracle = functools.partial(expected, allowed=causal(64, 64))
        exact = step(oracle, wide, weight.astype(jnp.float64))
        xla = functools.partial(jax_nn, implementation="xla")
        errors = [norm_errors(step(fn, given, weight), exact) for fn in (ours, jax_nn, xla)]
    for name, mine in errors[0].items():
        assert mine <= min(1.1 * errors[1][name], 2 * errors[2][name]), name


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(scale=0.3)])
def test_residual_is_that_of_jax(options):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 5, 3, 4)), jnp.float32) for _ in range(3))
    call = lambda fn: fn(q, k, v, return_residual=True, **options)  # noqa: E731
    found, wanted = call(fo.attention), call(jax.nn.dot_product_attention)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, wanted)
    gradient = jax.grad(lambda q: fo.attention(q, k, v, return_residual=True)[1].sum())(q)
    np.testing.assert_array_equal(gradient, 0)


def test_without_a_batch():
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.standard_normal((5, 2, 4)), jnp.float32) for _ in range(3))
    ids = np.array([1, 1, 2, 2, 0])
    found = fo.attention(q, k, v, segment_ids=ids, return_residual=True)
    wanted = fo.attention(*(x[None] for x in (q, k, v)), segment_ids=ids[None])
    assert (found[0].shape, found[1].shape) == ((5, 2, 4), (5, 2))
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1][4], -np.inf)


@pytest.mark.parametrize(
    "ids",
    [[1, 1, 2, 1, 3, 0], [1, 0, 1, 2, 2, 2], [1, 2, 3, 4, 5, 6], [0] * 6, [7, 7, -3, -3, 9, 9]],
)
def test_segments(ids):
    """Ids that are not contiguous, padding in the middle, more segments than `max_segments`."""
    rng, ids = np.random.default_rng(6), np.array(ids)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 6, 2, 4)), jnp.float32) for _ in range(3))
    found = fo.attention(q, k, v, segment_ids=ids[None], max_segments=2)
    wanted = np.zeros(found.shape)
    for one in set(ids) - {0, -3}:
        members = ids == one
        wanted[:, members] = fo.attention(*(x[:, members] for x in (q, k, v)))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


def test_hidden_keys_have_no_gradient():
    """Nothing that a key of padding holds is in a gradient, as long as its value is finite."""
    rng = np.random.default_rng(7)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 4, 1, 2)), jnp.float32) for _ in range(3))
    bias = jnp.zeros((1, 1, 1, 4)).at[..., 3].set(jnp.nan)
    lengths = np.array([3])

    def loss(q, k, v, bias):
        return (fo.attention(q, k, v, bias, key_value_seq_lengths=lengths) ** 2).sum()

    gradients = jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    for gradient in gradients[1:3]:
        np.testing.assert_array_equal(gradient[:, 3], 0)


@pytest.mark.parametrize("size", [2**31 - 1, 2**40, (2**31 - 1, 2**31 - 1)])
def test_a_window_larger_than_any_row(size):
    q = jnp.asarray(np.random.default_rng(13).standard_normal((1, 5, 2, 4)), jnp.float32)
    result = fo.attention(q, q, q, local_window_size=size)
    np.testing.assert_allclose(result, fo.attention(q, q, q), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int32"])
def test_dtypes_of_lengths_and_segments(dtype):
    """A length beyond the row means the whole row."""
    q = jnp.asarray(np.random.default_rng(14).standard_normal((2, 5, 2, 4)), jnp.float32)
    most = np.iinfo(dtype).max
    result = fo.attention(q, q, q, key_value_seq_lengths=np.array([3, most], dtype))
    expected = fo.attention(q, q, q, key_value_seq_lengths=np.array([3, 5]))
    np.testing.assert_array_equal(result, expected)
    ids = np.array([[1, 1, most, most, 0]] * 2, dtype)
    result = fo.attention(q, q, q, segment_ids=ids)
    expected = fo.attention(q, q, q, segment_ids=np.array([[1, 1, 2, 2, 0]] * 2))
    np.testing.assert_array_equal(result, expected)


def test_a_residual_without_a_key():
    """The sum is -inf, and nothing before it is NaN."""
    q = jnp.ones((1, 3, 4, 2))
    with fo.use_implementation("native"), jax.debug_nans(True):
        _, sums = fo.attention(
            q, q[:, :, :2], q[:, :, :2], key_value_seq_lengths=np.array([0]), return_residual=True
        )
    np.testing.assert_array_equal(sums, -np.inf)


def test_heads_that_the_mesh_does_not_divide():
    """Two heads of keys over eight devices, with 16 heads of queries."""
    mesh = mesh_for(AxisType.Explicit)
    rng = np.random.default_rng(15)
    q = jnp.asarray(rng.standard_normal((1, 4, 2 * mesh.size, 2)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((1, 4, 2, 2)), jnp.float32)
    expected = fo.attention(q, k, k)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(q, NamedSharding(mesh, P(None, None, "a")))
        result = jax.jit(fo.attention)(sharded, k, k)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_dropout(heads, kv_heads, dtype):
    """The weights that `dropout_mask` names, forward and backward."""
    rng, key, rate = np.random.default_rng(8), jax.random.key(3), 0.3
    given = [
        jnp.asarray(rng.standard_normal((2, 6, n, 8)), dtype) for n in (heads, kv_heads, kv_heads)
    ]
    words = np.asarray(jax.random.key_data(key))
    weight = dropout_mask(words, (2, heads, 6, 6), rate) / (1 - rate)
    cotangent = jnp.asarray(rng.standard_normal(given[0].shape), dtype)

    def step(fn, args, cotangent):
        y, pull = jax.vjp(fn, *args)
        return y, *pull(cotangent)

    ours = functools.partial(fo.attention, is_causal=True, dropout_key=key, dropout_rate=rate)
    found = jax.jit(functools.partial(step, ours))(given, cotangent)
    with x64():
        wide = [a.astype(jnp.float64) for a in (*given, cotangent)]
        theirs = functools.partial(expected, allowed=causal(6, 6), weight=weight)
        wanted = step(theirs, wide[:3], wide[3])
    assert_near(found, wanted, BOUND[dtype])


def test_dropout_of_everything_and_nothing():
    q = jnp.ones((1, 3, 1, 2))
    key = jax.random.key(0)
    np.testing.assert_array_equal(fo.attention(q, q, q, dropout_key=key, dropout_rate=1), 0)
    np.testing.assert_array_equal(fo.attention(q, q, q, dropout_key=key), fo.attention(q, q, q))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", [0, 2])
def test_shards_have_the_mask_of_the_whole(kind, axis):
    """So they do not repeat each other's, and there is no collective."""
    mesh = mesh_for(kind)
    x = jnp.ones((mesh.size, 4, mesh.size, 2))
    spec = P(*[None] * axis, "a")

    def run(x):
        return fo.attention(x, x, x, dropout_key=jax.random.key(1), dropout_rate=0.5)

    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        program = jax.jit(run).lower(sharded).compile()
        found = program(sharded)
    assert not collectives(program.as_text())
    np.testing.assert_allclose(found, run(x), rtol=1e-6)
    blocks = np.moveaxis(np.asarray(found), axis, 0)
    assert len({block.tobytes() for block in blocks}) == len(blocks)


def test_mapped_keys():
    """Each has its own mask, and an unmapped key has one."""
    x = jnp.ones((3, 1, 4, 2, 2))

    def run(x, key):
        return fo.attention(x, x, x, dropout_key=key, dropout_rate=0.5)

    keys = jax.random.split(jax.random.key(2), 3)
    found = jax.vmap(run)(x, keys)
    for i in range(3):
        np.testing.assert_allclose(found[i], run(x[i], keys[i]), rtol=1e-6)
    assert len({np.asarray(block).tobytes() for block in found}) == 3
    shared = jax.vmap(run, (0, None))(x, keys[0])
    np.testing.assert_array_equal(shared[1:], shared[:-1])


# ---- the packed projection -----------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed(kv_heads, with_bias):
    """Equals `attention` of the parts, with a residual too."""
    heads, size, rng = 4, 8, np.random.default_rng(9)
    features = (heads + 2 * (kv_heads or heads)) * size
    qkv = jnp.asarray(rng.standard_normal((2, 5, features)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(features), jnp.float32) if with_bias else None
    ids = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]])
    more = dict(num_heads=heads, num_kv_heads=kv_heads)

    def ours(qkv):
        return fo.qkv_attention(qkv, bias, **more, segment_ids=ids, return_residual=True)

    def theirs(qkv):
        allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, :, None]
        return expected_of_qkv(qkv, bias, **more, allowed=allowed)

    y, sums = ours(qkv)
    assert sums.shape == (2, 5, heads)
    np.testing.assert_allclose(y, theirs(qkv), rtol=2e-5, atol=2e-6)
    found, wanted = (
        jax.grad(lambda x, fn=fn: jnp.sin(fn(x)).sum())(qkv)
        for fn in (lambda x: ours(x)[0], theirs)
    )
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_heads_of_a_projection(kind):
    """`[batch, length, 3, heads, size]` has no collective, forward and backward."""
    mesh = mesh_for(kind)
    rng = np.random.default_rng(10)
    x = jnp.asarray(rng.standard_normal((2, 4, 3, mesh.size, 2)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((3, mesh.size, 2)), jnp.float32)

    def step(x, bias):
        def loss(x, bias):
            return fo.qkv_attention(x, bias, num_heads=x.shape[3])

        y, pull = jax.vjp(loss, x, bias)
        return pull(y)

    with jax.set_mesh(mesh):
        args = [
            jax.device_put(a, NamedSharding(mesh, P(*[None] * at, "a")))
            for a, at in ((x, 3), (bias, 1))
        ]
        program = jax.jit(step).lower(*args).compile()
        found = program(*args)
    assert not collectives(program.as_text())
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, step(x, bias)
    )


# ---- errors --------------------------------------------------------------------------------------

Q = np.zeros((2, 3, 4, 8), np.float32)


@pytest.mark.parametrize(
    "args, options, error, text",
    [
        ((Q[0, 0], Q, Q), {}, ValueError, "query has shape"),
        ((Q, Q[:1], Q[:1]), {}, ValueError, "key has shape"),
        ((Q, Q, Q[:, :2]), {}, ValueError, "value has shape"),
        ((Q, Q[..., :4], Q[..., :4]), {}, ValueError, "key has shape"),
        ((Q, Q[:, :, :3], Q[:, :, :3]), {}, ValueError, "4 heads of queries and 3 heads of keys"),
        ((Q, Q.astype(np.float16), Q), {}, TypeError, "key has dtype float16"),
        ((Q.astype(int), Q, Q), {}, TypeError, "query has dtype"),
        ((Q, Q, None), {}, TypeError, "value is None"),
        ((Q, Q, Q), dict(mask=np.ones(3)), TypeError, "mask has dtype float"),
        ((Q, Q, Q), dict(mask=np.ones((2, 1), bool)), ValueError, "mask has shape"),
        ((Q, Q, Q), dict(bias=np.ones((3, 1, 1, 1))), ValueError, "bias has shape"),
        ((Q, Q, Q), dict(bias=np.ones(3, int)), TypeError, "bias has dtype"),
        ((Q, Q, Q), dict(scale=jnp.ones(())), TypeError, "scale is of type"),
        ((Q, Q, Q), dict(is_causal=1), TypeError, "is_causal is 1"),
        ((Q, Q, Q), dict(deterministic=None), TypeError, "deterministic is None"),
        ((Q, Q, Q), dict(local_window_size=-1), ValueError, "local_window_size is -1"),
        ((Q, Q, Q), dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size"),
        ((Q, Q, Q), dict(local_window_size=1.5), TypeError, "local_window_size is 1.5"),
        ((Q, Q, Q), dict(key_value_seq_lengths=np.ones(3, int)), ValueError, "key_value_seq"),
        ((Q, Q, Q), dict(query_seq_lengths=np.ones(2)), TypeError, "query_seq_lengths has"),
        ((Q, Q, Q), dict(segment_ids=np.ones((2, 4), int)), ValueError, "segment_ids has shape"),
        ((Q, Q, Q), dict(segment_ids=(np.ones((2, 3), int),)), ValueError, "a pair of arrays"),
        ((Q, Q, Q), dict(local_window_size=True), TypeError, "local_window_size is True"),
        ((Q, Q[:, :2], Q[:, :2]), dict(segment_ids=Q[..., 0, 0]), ValueError, "give a pair"),
        ((Q, Q, Q), dict(max_segments=0), ValueError, "max_segments is 0"),
        ((Q, Q, Q), dict(dropout_rate=0.1), TypeError, "dropout_key is None"),
        ((Q, Q, Q), dict(dropout_rate=2), ValueError, "dropout_rate is 2"),
    ],
)
def test_errors(args, options, error, text):
    with pytest.raises(error, match=text) as raised:
        fo.attention(*args, **options)
    assert str(raised.value).startswith("attention: ")


@pytest.mark.parametrize(
    "shape, options, error, text",
    [
        ((2, 3, 25), dict(num_heads=4), ValueError, "qkv has shape"),
        ((2, 24), dict(num_heads=4), ValueError, "qkv has shape"),
        ((2, 3, 3, 2, 4), dict(num_heads=4), ValueError, "qkv has shape"),
        ((2, 3, 24), dict(num_heads=4, num_kv_heads=3), ValueError, "must divide"),
        ((2, 3, 24), dict(num_heads=4.0), TypeError, "num_heads is 4.0"),
        ((2, 3, 24), dict(num_heads=4, qkv_bias=np.zeros(8)), ValueError, "qkv_bias has shape"),
        (
            (2, 3, 24),
            dict(num_heads=2, qkv_bias=np.zeros(24, int)),
            TypeError,
            "qkv_bias has dtype",
        ),
        ((2, 3, 3, 2, 8), dict(num_heads=2, num_kv_heads=1), ValueError, "as many heads of keys"),
        ((2, 3, 24), dict(num_heads=4, mask=np.zeros(4, bool)), ValueError, "mask has shape"),
    ],
)
def test_errors_of_a_projection(shape, options, error, text):
    with pytest.raises(error, match=text) as raised:
        fo.qkv_attention(np.zeros(shape, np.float32), **options)
    assert str(raised.value).startswith("qkv_attention: ")


# ---- Flax ----------------------------------------------------------------------------------------


def layers(**options):
    """Two layers of Flax with the same parameters: its own function, and ours."""
    nnx = pytest.importorskip("flax.nnx")
    ours = pytest.importorskip("jax_fastops.nnx").dot_product_attention
    made = dict(num_heads=2, in_features=8, decode=False, **options)
    return [
        nnx.MultiHeadAttention(**made, **more, rngs=nnx.Rngs(0))
        for more in ({}, {"attention_fn": ours})
    ]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (0, 5, 8)], ids=str)
@pytest.mark.parametrize("mask", [None, "keys", "pairs"])
def test_layer_of_flax(shape, mask):
    """The results are those of Flax, with any number of dimensions of the batch."""
    x = jnp.asarray(np.random.default_rng(11).standard_normal(shape), jnp.float32)
    if mask is not None:
        lead = shape[:-2] if mask == "pairs" else (1,) * len(shape[:-2])
        size = (*lead, 1, 5 if mask == "pairs" else 1, 5)
        mask = np.random.default_rng(12).random(size) < 0.7
        mask[..., :1] = True
    found, wanted = (layer(x, mask=mask) for layer in layers())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_layer_of_flax_with_dropout():
    """Without `broadcast_dropout`, every head and example has its own mask; with it, Flax runs."""
    nnx = pytest.importorskip("flax.nnx")
    from jax_fastops.nnx import dot_product_attention

    q = jnp.ones((4, 6, 3, 8))
    key, drop = jax.random.key(5), dict(dropout_rate=0.5)
    found = dot_product_attention(q, q, q, broadcast_dropout=False, dropout_rng=key, **drop)
    np.testing.assert_array_equal(found, fo.attention(q, q, q, dropout_key=key, **drop))
    shared = [
        fn(q, q, q, dropout_rng=key, **drop)
        for fn in (dot_product_attention, nnx.dot_product_attention)
    ]
    np.testing.assert_array_equal(*shared)
    quiet = dot_product_attention(q, q, q, dropout_rng=key, deterministic=True, **drop)
    np.testing.assert_allclose(quiet, 1, rtol=1e-6)


def test_layer_of_flax_keeps_its_weights():
    nnx = pytest.importorskip("flax.nnx")
    _, layer = layers()
    layer(jnp.ones((2, 5, 8)), sow_weights=True)
    assert jax.tree.leaves(nnx.state(layer, nnx.Intermediate))
