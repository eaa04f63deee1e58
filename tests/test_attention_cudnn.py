"""Attention by cuDNN: values, gradients, rows without keys, masks of dropout, programs."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh, x64
from harness.numerics import normal
from harness.sharding import collectives, device_count, mesh_for, over_kinds, over_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _attention, _dispatch, _native

HERE = jax.default_backend() == "gpu" and "jax_fastops.attention" in _native.kernels("cuda")
on_gpu = pytest.mark.skipif(not HERE, reason="needs a GPU and a build with cuDNN")
# Under "auto", calls with few keys take no cuDNN.
pytestmark = pytest.mark.usefixtures("native")
DROP = dict(dropout_key=jax.random.key(3), dropout_rate=0.25)


def heads(shape, kv_shape=None, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(normal(rng, s, dtype)) for s in (shape, *[kv_shape or shape] * 2)]


def expected(query, key, value, bias=None, allowed=True, weight=1.0):
    """In float64, from arrays of NumPy, with 0 for a query without keys."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    scores = jnp.where(allowed, scores, -1e30)
    weights = jnp.where(allowed, jax.nn.softmax(scores), 0) * weight
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def in_float64(function, *arrays):
    with x64(), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, function(*(np.asarray(x, np.float64) for x in arrays)))


def errors(found, wanted):
    """The largest error of each array, relative to its root mean square."""
    return [
        float(np.abs(np.asarray(f, np.float64) - w).max() / max(np.sqrt((w**2).mean()), 1e-3))
        for f, w in zip(found, wanted, strict=True)
    ]


def check(query, key, value, bias=None, allowed=True, weight=1.0, bound=0.15, **options):
    """Value and gradients, of both implementations of the op, and a cotangent that differs."""
    rng = np.random.default_rng(7)
    dy = jnp.asarray(normal(rng, query.shape, query.dtype))

    def run(function, q, k, v, dy):
        y, pull = jax.vjp(function, q, k, v)
        return y, *pull(dy)

    def ours(q, k, v):
        return fo.attention(q, k, v, bias, **options)

    found = jax.jit(functools.partial(run, ours))(query, key, value, dy)
    reference = functools.partial(expected, bias=bias, allowed=allowed, weight=weight)
    wanted = in_float64(functools.partial(run, reference), query, key, value, dy)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in found)
    assert max(errors(found, wanted)) < bound, errors(found, wanted)
    forward = jax.jit(ours)(query, key, value)
    np.testing.assert_array_equal(forward, found[0])
    return found, wanted


SHAPES = {
    "plain": ((2, 128, 4, 64), None),
    "short": ((3, 5, 2, 8), None),
    "two queries": ((2, 2, 4, 64), (2, 33, 4, 64)),
    "odd": ((2, 77, 3, 40), (2, 131, 3, 40)),
    "grouped": ((2, 65, 6, 64), (2, 96, 2, 64)),
    "one head of keys": ((2, 65, 4, 64), (2, 96, 1, 64)),
    "large heads": ((1, 130, 2, 128), None),
    "larger heads": ((1, 64, 2, 256), None),
}


def rows_and_columns(query, key):
    return jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, dtype):
    query, key, value = heads(*SHAPES[name], dtype)
    check(query, key, value)
    row, column = rows_and_columns(query, key)
    check(query, key, value, allowed=column <= row, is_causal=True)


def lengths_of(kind, query, key):
    most = {"q": query.shape[1], "kv": key.shape[1]}[kind]
    return np.array([0, most, max(most // 3, 1)][: query.shape[0]])


# Options, and what they allow, from the rows and columns of scores.
MASKS = {
    "window": lambda q, k, r, c: (dict(local_window_size=(9, 4)), (r - c <= 9) & (c - r <= 4)),
    "narrow window": lambda q, k, r, c: (dict(local_window_size=0), r == c),
    "causal window": lambda q, k, r, c: (
        dict(local_window_size=(6, 3), is_causal=True),
        (r - c <= 6) & (c <= r),
    ),
    "key lengths": lambda q, k, r, c: (
        dict(key_value_seq_lengths=lengths_of("kv", q, k)),
        c < lengths_of("kv", q, k)[:, None, None, None],
    ),
    "both lengths": lambda q, k, r, c: (
        dict(
            query_seq_lengths=lengths_of("q", q, k)[::-1].copy(),
            key_value_seq_lengths=lengths_of("kv", q, k),
            is_causal=True,
        ),
        (c < lengths_of("kv", q, k)[:, None, None, None])
        & (r < lengths_of("q", q, k)[::-1, None, None, None])
        & (c <= r),
    ),
    "window and lengths": lambda q, k, r, c: (
        dict(local_window_size=(9, 0), key_value_seq_lengths=lengths_of("kv", q, k)),
        (c < lengths_of("kv", q, k)[:, None, None, None]) & (r - c <= 9) & (c <= r),
    ),
}


def drawn_mask(shape, share=0.3):
    return np.random.default_rng(5).random(shape) < share


@on_gpu
@pytest.mark.parametrize(
    "shape", [((3, 64, 4, 32), (3, 64, 4, 32)), ((3, 70, 4, 32), (3, 40, 2, 32))]
)
@pytest.mark.parametrize("name", MASKS)
def test_masks_that_cudnn_has(name, shape):
    query, key, value = heads(*shape)
    options, allowed = MASKS[name](query, key, *rows_and_columns(query, key))
    check(query, key, value, allowed=allowed, **options)


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "shape", [*list(itertools.product((1, 3), (1, 4), (1, 64), (1, 64))), (64, 64), (64,)]
)
def test_masks_of_every_shape(shape, dtype):
    query, key, value = heads((3, 64, 4, 32), dtype=dtype)
    mask = drawn_mask(shape, 0.02 if shape[-1] > 1 else 0.5)  # some rows have no keys
    check(query, key, value, allowed=mask, mask=mask)
    row, column = rows_and_columns(query, key)
    check(query, key, value, allowed=mask & (column <= row), mask=mask, is_causal=True)


@on_gpu
def test_masks_and_lengths():
    query, key, value = heads((3, 64, 4, 32), (3, 48, 2, 32))
    lengths = np.array([48, 0, 17])
    allowed = np.arange(48) < lengths[:, None, None, None]
    for shape in ((3, 1, 1, 48), (1, 4, 64, 48)):
        mask = drawn_mask(shape)
        both = mask & allowed
        check(query, key, value, allowed=both, mask=mask, key_value_seq_lengths=lengths)


@on_gpu
@pytest.mark.parametrize(
    "ids",
    [
        np.repeat([[1, 2, 3, 0]], 16, 1),
        np.array([[1, 1, 2, 1] * 16, [0, 3, 0, 3] * 16]),
        np.zeros((2, 64), int) - 1,
    ],
)
def test_segments(ids):
    ids = np.broadcast_to(ids, (2, 64))
    query, key, value = heads((2, 64, 4, 32))
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, :, None]
    check(query, key, value, allowed=allowed, segment_ids=ids)


# Segments that are sequences, and segments that are not, of which the last are more than 3.
PACKED = np.array([[1] * 40 + [2] * 30 + [3] * 58, [0] * 5 + [7] * 100 + [0] * 3 + [4] * 20])
IDS = {
    "packed": PACKED,
    "one": np.ones((2, 128), int),
    "padding only": np.array([[0] * 128, [-1] * 60 + [9] * 68]),
    "again": np.array([[1, 1, 2, 1] * 32, PACKED[0]]),
    "padding in the middle": np.array([[1] * 64 + [0] + [1] * 63, PACKED[1]]),
    "four": np.array([[1] * 30 + [2] * 30 + [3] * 40 + [4] * 28, PACKED[1]]),
}
FORMS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(17, 5)),
    "deterministic": dict(deterministic=True, is_causal=True),
}


@on_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", IDS)
def test_segments_as_sequences(name, form):
    ids, options = IDS[name], FORMS[form]
    row, column = np.arange(128)[:, None], np.arange(128)
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, :, None]
    if "is_causal" in options:
        allowed &= column <= row
    if form == "window":
        allowed &= (row - column <= 17) & (column - row <= 5)
    for kv_heads in (4, 2):
        arrays = heads((2, 128, 4, 64), (2, 128, kv_heads, 64))
        more = dict(segment_ids=ids, max_segments=3) | options
        check(*arrays, allowed=allowed, **more)
    query, key, value = heads((2, 128, 4, 64))
    qkv = jnp.stack([query, key, value], 2)

    def loss(function):
        return lambda *a: (function(*a, **more).astype(jnp.float32) ** 2).sum()

    in_one = functools.partial(fo.qkv_attention, num_heads=4)
    found = jax.jit(jax.grad(loss(in_one)))(qkv)
    wanted = jax.jit(jax.grad(loss(fo.attention), (0, 1, 2)))(query, key, value)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found, jnp.stack(wanted, 2))), atol=0.05, rtol=0.05
    )


@on_gpu
@pytest.mark.parametrize("name", ["packed", "again"])
def test_dropout_of_segments(name):
    """All derivatives have one mask, whether segments are sequences or not."""
    ids = IDS[name]
    arrays = heads((2, 128, 4, 64))
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, :, None]
    options = DROP | dict(segment_ids=ids, max_segments=3)
    kept = np.asarray(dropped_weights((2, 128, 4, 64), **options)) & allowed
    assert abs(kept.sum() / np.broadcast_to(allowed, kept.shape).sum() - 0.75) < 0.02
    check(*arrays, weight=kept / 0.75, allowed=allowed, **options)

    def loss(attend, q, k, v, **more):
        return (attend(q, k, v, **more) ** 2).sum()

    ours = functools.partial(loss, fo.attention, **options)
    plain = functools.partial(loss, expected, weight=kept / 0.75, allowed=allowed)
    tangents = heads((2, 128, 4, 64), seed=4)
    found = jax.jit(lambda *a: jax.jvp(jax.grad(ours, (0, 1, 2)), a[:3], a[3:]))(*arrays, *tangents)
    wanted = in_float64(
        lambda *a: jax.jvp(jax.grad(plain, (0, 1, 2)), a[:3], a[3:]), *arrays, *tangents
    )
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert max(errors(found, wanted)) < 0.2, errors(found, wanted)


@on_gpu
@pytest.mark.parametrize(
    "first, dropout", [(0, False), (0, True), (1, False)], ids=["sequences", "dropout", "masks"]
)
def test_mapped_segments(first, dropout):
    arrays = heads((2, 128, 4, 64))
    ids = np.stack([IDS["packed"], IDS["packed"][::-1], IDS["again"]][first:][:2])
    options = dict(max_segments=3) | (DROP if dropout else {})

    def grads(ids, q, k, v):
        attend = functools.partial(fo.attention, segment_ids=ids, **options)
        return jax.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))(q, k, v)

    found = jax.jit(jax.vmap(grads, (0, None, None, None)))(ids, *arrays)
    for i in range(2):
        wanted = jax.jit(grads)(ids[i], *arrays)
        assert max(errors([x[i] for x in found], map(np.asarray, wanted))) < 0.1


@on_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 64), (1, 4, 64, 64), (2, 4, 64, 64), (64, 64), (1, 4, 1, 64)]
)
def test_bias(shape, dtype):
    query, key, value = heads((2, 64, 4, 32))
    bias = jnp.asarray(normal(np.random.default_rng(1), shape, dtype))
    check(query, key, value, bias=bias)
    mask = drawn_mask((2, 1, 64, 64))
    check(query, key, value, bias=bias, allowed=mask, mask=mask)
    dy = jnp.asarray(normal(np.random.default_rng(2), query.shape, query.dtype))

    def loss(attend, bias, q, k, v):
        return (attend(q, k, v, bias) * dy.astype(v.dtype)).sum()

    found = jax.jit(jax.grad(functools.partial(loss, fo.attention)))(bias, query, key, value)
    wanted = in_float64(jax.grad(functools.partial(loss, expected)), bias, query, key, value)
    assert errors([found], [wanted])[0] < 0.1


@on_gpu
def test_residual():
    query, key, value = heads((2, 64, 4, 32))
    mask = drawn_mask((2, 1, 64, 64), 0.02)
    y, found = fo.attention(query, key, value, mask=mask, return_residual=True)
    assert y.dtype == found.dtype == query.dtype
    wanted = fo.attention(
        *(x.astype(jnp.float32) for x in (query, key, value)), mask=mask, return_residual=True
    )[1]
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(
        np.asarray(found, np.float32)[finite], np.asarray(wanted)[finite], atol=0.05
    )


@on_gpu
@pytest.mark.parametrize("form", ["features", "heads", "grouped"])
def test_one_array_of_all_heads(form):
    options, shape = dict(num_heads=4), (2, 48, 3 * 4 * 32)
    if form == "grouped":
        options, shape = dict(num_heads=4, num_kv_heads=2), (2, 48, 8 * 32)
    if form == "heads":
        shape = (2, 48, 3, 4, 32)
    rng = np.random.default_rng(0)
    qkv, bias = (jnp.asarray(normal(rng, s, jnp.bfloat16)) for s in (shape, shape[2:]))
    dy = jnp.asarray(normal(rng, (2, 48, 128), jnp.bfloat16))
    lengths = np.array([48, 31])

    def plain(qkv, bias):
        qkv = (qkv + bias).reshape(2, 48, -1, 32)
        kv_heads = options.get("num_kv_heads", 4)
        q, k, v = jnp.split(qkv, (4, 4 + kv_heads), 2)
        allowed = np.arange(48) < lengths[:, None, None, None]
        return expected(q, k, v, allowed=allowed).reshape(2, 48, 128)

    def ours(qkv, bias):
        return fo.qkv_attention(qkv, bias, key_value_seq_lengths=lengths, **options)

    def run(function, qkv, bias, dy):
        y, pull = jax.vjp(function, qkv, bias)
        return y, *pull(dy)

    found = jax.jit(functools.partial(run, ours))(qkv, bias, dy)
    wanted = in_float64(functools.partial(run, plain), qkv, bias, dy)
    assert max(errors(found, wanted)) < 0.1, errors(found, wanted)


# ---- dropout -------------------------------------------------------------------------------------


def dropped_weights(shape, kv_shape=None, **options):
    """The factors of the weights, read from results for rows of identity matrices as values."""
    kv_shape = kv_shape or shape
    length, size = kv_shape[1], kv_shape[3]
    query, key = jnp.zeros(shape, jnp.bfloat16), jnp.zeros(kv_shape, jnp.bfloat16)
    parts = []
    for first in range(0, length, size):
        value = jnp.arange(length)[:, None] == first + jnp.arange(size)
        value = jnp.broadcast_to(value[:, None], kv_shape).astype(jnp.bfloat16)
        parts.append(fo.attention(query, key, value, **options))
    return jnp.moveaxis(jnp.concatenate(parts, -1)[..., :length], 1, 2) != 0


@on_gpu
@pytest.mark.parametrize(
    "shape",
    [((2, 128, 4, 64), None), ((3, 77, 2, 40), (3, 131, 2, 40)), ((2, 64, 6, 64), (2, 64, 2, 64))],
)
@pytest.mark.parametrize("masked", [False, True])
def test_dropout(shape, masked):
    """Forward and backward have one mask, which all derivatives that no kernel computes share."""
    query, key, value = heads(*shape)
    mask = drawn_mask((query.shape[0], 1, 1, key.shape[1]), 0.8) if masked else None
    options = DROP | ({} if mask is None else dict(mask=np.ones_like(mask)))
    kept = np.asarray(dropped_weights(*shape, **options))
    assert abs(kept.mean() - 0.75) < 0.02
    allowed = True if mask is None else mask
    options = DROP | ({} if mask is None else dict(mask=mask))
    check(query, key, value, weight=kept / 0.75, allowed=allowed, **options)

    def loss(attend, q, k, v, **more):
        return (attend(q, k, v, **more) ** 2).sum()

    ours = functools.partial(loss, fo.attention, **options)
    plain = functools.partial(loss, expected, weight=kept / 0.75, allowed=allowed)
    tangents = heads(*shape, seed=4)
    arrays = (query, key, value)
    for transform in (
        lambda f: lambda *a: jax.jvp(f, a[:3], a[3:])[1],
        lambda f: lambda *a: jax.jvp(jax.grad(f, (0, 1, 2)), a[:3], a[3:])[1],
    ):
        found = jax.jit(transform(ours))(*arrays, *tangents)
        wanted = in_float64(transform(plain), *arrays, *tangents)
        found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
        # The largest of many errors of a second derivative, whose parts are rounded to bfloat16.
        assert max(errors(found, wanted)) < 0.25, errors(found, wanted)


@on_gpu
@pytest.mark.parametrize("masked", [False, True])
def test_masks_of_mapped_keys(masked):
    query, key, value = heads((2, 64, 4, 64))
    many = jax.random.split(jax.random.key(0), 3)
    mask = np.arange(64) < np.array([64, 40])[:, None, None, None] if masked else None

    def loss(q, drop_key):
        return fo.attention(q, key, value, mask=mask, dropout_key=drop_key, dropout_rate=0.25)

    mapped = jax.jit(jax.vmap(loss, (None, 0)))(query, many)
    assert len({np.asarray(x).tobytes() for x in mapped}) == 3
    # With one key, every example has the mask of a call for this example only.
    queries = jnp.stack([query, query + 1])
    alone = [jax.jit(loss)(q, many[0]) for q in queries]
    together = jax.jit(jax.vmap(loss, (0, None)))(queries, many[0])
    np.testing.assert_array_equal(together, jnp.stack(alone))

    def square(q, drop_key):
        return (loss(q, drop_key).astype(jnp.float32) ** 2).sum((1, 2, 3))

    # The cotangents are mapped, and the mask stays that of the forward.
    rows = jax.jit(jax.jacrev(square))(query, many[0])
    for i in range(2):
        one = jax.jit(jax.grad(lambda q, k, i=i: square(q, k)[i]))(query, many[0])
        np.testing.assert_array_equal(rows[i], one)
    grads = jax.jit(jax.vmap(jax.grad(lambda q, k: square(q, k).sum()), (None, 0)))(query, many)
    pulled = jax.jit(lambda q: jax.vjp(lambda q: jax.vmap(square, (None, 0))(q, many), q)[1])(query)
    (total,) = pulled(jnp.ones((3, 2)))
    wanted = np.asarray(grads, np.float32).sum(0)
    np.testing.assert_allclose(np.asarray(total, np.float32), wanted, atol=0.1, rtol=0.05)


@on_gpu
@pytest.mark.parametrize("calls", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_statistics_of_masks(calls):
    """Sums over all weights, in units of their standard deviation. 40 calls draw 10^9."""
    shape = (8, 512, 12, 64)

    @jax.jit
    def sums(key, other):
        x, y = (
            (dropped_weights(shape, dropout_key=k, dropout_rate=0.25) - 0.75) / (0.75 * 0.25) ** 0.5
            for k in (key, other)
        )
        return {
            "rate": x.sum(),
            "keys": (x[..., 1:] * x[..., :-1]).sum(),
            "queries": (x[..., 1:, :] * x[..., :-1, :]).sum(),
            "heads": (x[:, 1:] * x[:, :-1]).sum(),
            "examples": (x[1:] * x[:-1]).sum(),
            "other key": (x * y).sum(),
        }

    keys = jax.random.split(jax.random.key(5), calls + 1)
    found = [sums(a, b) for a, b in itertools.pairwise(keys)]
    total = calls * 8 * 12 * 512 * 512
    scores = {name: abs(sum(float(f[name]) for f in found)) / total**0.5 for name in found[0]}
    assert max(scores.values()) < 6, scores


# ---- programs ------------------------------------------------------------------------------------


@on_gpu
def test_equal_bits():
    query, key, value = heads((2, 128, 4, 64))

    @jax.jit
    def grads(q, k, v):
        attend = functools.partial(fo.attention, is_causal=True, deterministic=True, **DROP)
        return jax.grad(lambda *a: (attend(*a).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(q, k, v)

    first = grads(query, key, value)
    for _ in range(5):
        for a, b in zip(first, grads(query, key, value), strict=True):
            np.testing.assert_array_equal(a, b)


@on_gpu
def test_memory_is_linear_in_the_length():
    def bytes_for(length):
        q = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
        step = jax.grad(lambda q, k, v: fo.attention(q, k, v, is_causal=True).sum(), (0, 1, 2))
        return jax.jit(step).lower(q, q, q).compile().memory_analysis().temp_size_in_bytes

    assert bytes_for(8192) < 2.5 * bytes_for(4096)


@pytest.fixture
def cuda_programs(monkeypatch):
    """Programs are lowered for CUDA as by a build with cuDNN, whatever this machine has."""
    names = frozenset(
        {*_native.kernels("cpu"), "jax_fastops.attention", "jax_fastops.attention_bwd"}
    )
    own = _native.kernels
    monkeypatch.setattr(_native, "kernels", lambda p: names if p == "cuda" else own(p))
    monkeypatch.setattr(_native, "runs_here", lambda p: True)
    monkeypatch.setattr(_dispatch, "lowering_platform", lambda: "cuda")
    monkeypatch.setattr(_attention, "lowering_platform", lambda: "cuda")


def calls(fn, *args):
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [text.count(f"@jax_fastops.{name}.v") for name in ("attention", "attention_bwd")]


KINDS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "lengths": dict(key_value_seq_lengths=np.array([3, 4])),
    "window": dict(local_window_size=2, key_value_seq_lengths=np.array([3, 4])),
    "mask": dict(mask=np.ones((2, 1, 1, 16), bool), is_causal=True),
    "bias": dict(bias=np.ones((1, 4, 16, 16), np.float32)),
    "segments": dict(segment_ids=np.ones((2, 16), int)),
    "dropout": DROP,
}


@on_gpu
@over_kinds
@pytest.mark.parametrize("over", ["batch", "heads"])
@pytest.mark.parametrize("options", ["causal", "lengths", "mask", "packed"])
@pytest.mark.parametrize("whole", [False, True])
def test_sharded(axis_type, over, options, whole):
    """Without communication, and with the values of one device."""
    mesh, count = mesh_for(axis_type), device_count()
    shape = (2 * count, 128, 2 * count, 64)
    arrays = heads(shape)
    arrays = (jnp.stack(arrays, 2),) if whole else arrays
    dy = jnp.asarray(normal(np.random.default_rng(7), shape, jnp.bfloat16))
    ids, lengths = np.tile(PACKED, (count, 1)), np.tile([128, 50], count)
    given = {
        "causal": dict(is_causal=True),
        "lengths": dict(key_value_seq_lengths=lengths),
        "mask": dict(mask=np.arange(128) < lengths[:, None, None, None]),
        "packed": dict(segment_ids=ids, max_segments=3),
    }[options]
    attend = functools.partial(fo.qkv_attention, num_heads=2 * count) if whole else fo.attention

    def run(dy, *arrays):
        y, pull = jax.vjp(functools.partial(attend, **given), *arrays)
        dy = dy.reshape(y.shape) if axis_type == AxisType.Auto else dy
        return y, *pull(dy)

    dim = 0 if over == "batch" else arrays[0].ndim - 2
    spec = P(*[None] * dim, "a")
    of_result = P("a") if over == "batch" else P(None, None, "a")
    flat = dy.reshape(*shape[:2], -1) if whole else dy
    specs = (of_result, *[spec] * len(arrays))
    found, compiled = over_mesh(mesh, run, (flat, *arrays), specs)
    assert "jax_fastops.attention" in compiled and not collectives(compiled)
    wanted = jax.jit(run)(flat, *arrays)
    # With several devices, segments are a mask.
    bound = 0.05 if options == "packed" else 0
    for x, y in zip(found, wanted, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_programs(cuda_programs, kind):
    q = jnp.ones((2, 16, 4, 8), jnp.bfloat16)
    qkv = jnp.ones((2, 16, 3 * 4 * 8), jnp.bfloat16)

    def attend(q, k, v):
        return fo.attention(q, k, v, **KINDS[kind])

    def of_one(qkv):
        return fo.qkv_attention(qkv, num_heads=4, **KINDS[kind])

    def loss(function):
        return lambda *a: function(*a).sum()

    kv = jnp.ones((2, 16, 2, 8), jnp.bfloat16)
    assert calls(attend, q, kv, kv) == [1, 0]
    assert calls(jax.grad(loss(attend), (0, 1, 2)), q, kv, kv) == [1, 1]
    assert calls(jax.grad(loss(of_one)), qkv) == [1, 1]
    mapped = jax.vmap(jax.grad(loss(attend)))
    assert calls(mapped, q[None], kv[None], kv[None]) == [1, 1]


@pytest.mark.parametrize("dropout", [False, True])
def test_programs_of_segments(cuda_programs, monkeypatch, dropout):
    """Both kernels are there: which one runs depends on the ids."""
    plans: list[dict] = []

    def plan(**problem):
        plans.append(problem)
        return (1 << 20, "")

    q = jnp.ones((2, 16, 4, 8), jnp.bfloat16)
    ids = jnp.ones((2, 16), int)

    def attend(q, segment_ids=ids, **more):
        more = dict(max_segments=3) | more | (DROP if dropout else {})
        return fo.attention(q, q, q, segment_ids=segment_ids, **more).sum()

    # Without a device, nothing tells whether cuDNN takes them.
    monkeypatch.setattr(_native, "attention_plan", lambda **problem: None)
    assert calls(jax.grad(attend), q) == [1, 1]
    monkeypatch.setattr(_native, "attention_plan", plan)
    assert calls(attend, q) == [2, 0]
    assert calls(jax.grad(attend), q) == [2, 2]
    assert {p["segments"] for p in plans} == {0, 3}
    assert calls(jax.vmap(jax.grad(attend)), q[None]) == [2, 2]
    for more in (
        dict(max_segments=None),
        dict(segment_ids=(ids, ids + 1)),
        dict(mask=jnp.ones((16, 16), bool)),
        dict(bias=jnp.ones((16, 16))),
        dict(key_value_seq_lengths=jnp.array([3, 4])),
    ):
        assert calls(functools.partial(attend, **more), q) == [1, 0]
    mesh = make_mesh({"a": 1}, AxisType.Explicit)
    with jax.set_mesh(mesh):
        for spec in (P("a"), P(None, None, "a")):
            sharded = jax.device_put(q, NamedSharding(mesh, spec))
            assert calls(jax.grad(attend), sharded) == [2, 2]
    # One choice for all examples: a branch, not both forms.
    mapped = jax.vmap(lambda ids: jax.grad(attend)(q, segment_ids=ids))
    text = jax.jit(mapped).trace(ids[None]).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.case") == 2
    plans.clear()
    assert calls(functools.partial(attend, max_segments=2**40), q) == [2, 0]
    assert {p["segments"] for p in plans} == {0, 16}
    for found in ((0, "too old"), (1 << 40, "")):  # also with too large a workspace
        monkeypatch.setattr(
            _native, "attention_plan", lambda f=found, **p: f if p["segments"] else (0, "")
        )
        assert calls(jax.grad(attend), q) == [1, 1]


def test_programs_for_other_machines(cuda_programs, monkeypatch):
    """Under "native", a process without a GPU lowers cuDNN's calls."""
    monkeypatch.setattr(_dispatch, "lowering_platform", lambda: "cpu")
    q = jnp.ones((2, 64, 4, 8), jnp.bfloat16)
    with fo.use_implementation("auto"):
        assert calls(fo.attention, q, q, q) == [0, 0]
    assert calls(fo.attention, q, q, q) == [1, 0]


def test_few_keys(cuda_programs):
    q = jnp.ones((3, 64, 4, 8), jnp.bfloat16)
    with fo.use_implementation("auto"):
        assert calls(fo.attention, q, q, q) == [1, 0]
        assert calls(fo.attention, q, q[:, :63], q[:, :63]) == [0, 0]


@pytest.mark.parametrize("shape", [(4, 1, 1, 16), (1, 4, 16, 16), (16, 16)])
def test_mapped_keys_and_a_mask(cuda_programs, shape):
    """cuDNN takes the bias of one example for all, or of the whole batch."""
    q, many = jnp.ones((4, 16, 4, 8), jnp.bfloat16), jax.random.split(jax.random.key(0), 3)
    mask = jnp.ones(shape, bool)

    def attend(q, drop_key, mask):
        return fo.attention(q, q, q, mask=mask, dropout_key=drop_key, dropout_rate=0.5)

    for axes in ((None, 0, None), (0, 0, None), (None, 0, 0)):
        queries, _, masks = (
            x if a is None else jnp.stack([x] * 3) for x, a in zip((q, q, mask), axes, strict=True)
        )
        mapped = jax.vmap(jax.grad(lambda *a: attend(*a).sum()), axes)
        text = jax.jit(mapped).trace(queries, many, masks).lower(lowering_platforms=("cuda",))
        calls_of = re.findall(r"@jax_fastops\.attention(?:_bwd)?\.v.*", text.as_text())
        assert len(calls_of) == 2
        for call in calls_of:
            operands = re.search(r": \((.*)\) ->", call)[1].split(", ")
            assert operands[3].startswith("tensor<3x4x"), operands


def test_what_cudnn_does_not_take(cuda_programs):
    q = jnp.ones((2, 16, 4, 8), jnp.bfloat16)
    for x in (q.astype(jnp.float32), q[..., :5], q[:, :0], q[:, :1]):
        assert calls(fo.attention, x, x, x) == [0, 0]
    assert calls(fo.attention, q, q[:, :0], q[:, :0]) == [0, 0]
    for scale in (0.0, -1.0, float("nan")):
        attend = functools.partial(fo.attention, scale=scale)
        assert calls(attend, q, q, q) == [0, 0]
    with fo.use_implementation("xla"):
        assert calls(fo.attention, q, q, q) == [0, 0]
    # The gradient of a bias is that of the reference, which computes the forward again.
    bias = jnp.ones((1, 4, 16, 16), jnp.bfloat16)
    assert calls(jax.grad(lambda b: fo.attention(q, q, q, b).sum()), bias)[1] == 0
