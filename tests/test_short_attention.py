"""`qkv_attention` by one kernel, of a batch and of a list: which calls take it, and its values."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.numerics import normal
from harness.programs import cuda_targets_of, equations
from harness.sharding import mesh_for
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops import _native
from jax_fastops._projection import attend_list
from jax_fastops.models import _bert_layers, bert

KERNEL = "jax_fastops.short_attention"
HERE = jax.default_backend() == "gpu" and KERNEL in _native.kernels("cuda")


def expected(qkv, bias, keys=None, queries=None, *, heads=1):
    """`keys` and `queries` are masks. Values of keys that do not count are not read."""
    qkv = qkv if bias is None else qkv + bias
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, 64), 2, 0)
    keys = jnp.ones(qkv.shape[:2], bool) if keys is None else keys
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    weights = jax.nn.softmax(jnp.where(keys[:, None, None], scores, -1e30))
    weights = jnp.where(keys[:, None, None], weights, 0)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.where(keys[..., None, None], v, 0))
    y = y.reshape(*y.shape[:2], -1)
    return y if queries is None else jnp.where(queries[..., None], y, 0)


CASE = Case(
    name="short",
    fn=lambda qkv, bias, end: fo.qkv_attention(
        qkv, bias, num_heads=1, mask=(jnp.arange(3) < end[:, None])[:, None, None]
    ),
    reference=lambda qkv, bias, end: expected(qkv, bias, jnp.arange(3) < end[:, None]),
    make_args=lambda rng, dtype: (
        *(normal(rng, shape, dtype) for shape in ((2, 3, 192), (192,))),
        rng.integers(1, 4, 2, np.int32),
    ),
    make_sharded_args=lambda rng, dtype: (
        *(normal(rng, shape, dtype) for shape in ((8, 3, 192), (192,))),
        rng.integers(1, 4, 8, np.int32),
    ),
    dtypes=("bfloat16", "float16"),
    tolerance=Tolerance(ulps=64.0, lone=1.0),
    shardings=(Sharding("batch", (0, None, 0), (0,), gradient_all_reduces=1),),
    quick="^value$|^vjp$|^grad_of_vmap/x1$|^vmap/all/first$|sharded/auto/batch/v|shard_map/batch/v",
)


@checks(CASE)
def test_transforms(check):
    check()


# ---- which calls take the kernel -----------------------------------------------------------------


def calls(fn, *args, name="short_attention"):
    return cuda_targets_of(fn, *args).count(name)


@pytest.mark.jax
def test_calls(cuda_programs):
    qkv = jnp.ones((8, 70, 384), "bfloat16")
    bias, mask, lengths = jnp.ones(384), jnp.ones((8, 70), bool), jnp.ones(8, jnp.int32)
    attention = functools.partial(fo.qkv_attention, num_heads=2)
    keys = mask[:, None, None]
    assert calls(attention, qkv) == 1
    assert calls(lambda x, b, m: attention(x, b, mask=m), qkv, bias, keys) == 1
    assert calls(lambda x, m: attention(x, mask=m), qkv, keys[:1]) == 1
    both = dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    assert calls(lambda x: attention(x, **both), qkv) == 1
    assert calls(jax.vmap(attention), qkv[None]) == 1
    assert calls(jax.vmap(lambda b: attention(qkv, b)), bias[None]) == 0
    assert calls(jax.grad(lambda x: attention(x).astype("float32").sum()), qkv) == 0
    for options in (
        dict(is_causal=True),
        dict(bias=jnp.ones((70, 70))),
        dict(mask=jnp.ones((70, 70), bool)),
        dict(segment_ids=jnp.ones((8, 70), jnp.int32)),
        dict(dropout_key=jax.random.key(0), dropout_rate=0.5),
        dict(return_residual=True),
        dict(num_heads=4),
        dict(num_kv_heads=1, num_heads=4),
    ):
        assert calls(functools.partial(attention, **options), qkv) == 0, options
    assert calls(attention, qkv.astype("float32")) == 0
    for length in (63, 2049):
        assert calls(attention, jnp.zeros((1, length, 384), "bfloat16")) == 0
    mesh = mesh_for(AxisType.Explicit)  # a device has whole features
    for spec, count in ((P("a"), 1), (P(None, None, "a"), 0)):
        with jax.set_mesh(mesh):
            sharded = jax.device_put(qkv, NamedSharding(mesh, spec))
            assert calls(attention, sharded) == count, spec


def test_bert(cuda_programs, monkeypatch):
    """The kernel adds the bias in float32. Otherwise it is rounded, and added as without kernel."""
    config = dataclasses.replace(bert.SMALL, heads=2, layers=1, dtype="bfloat16")
    params = bert.init(jax.random.key(0), config)
    params["layers"][0]["qkv"]["bias"] = jax.random.normal(jax.random.key(1), (384,))
    tokens, mask = jnp.arange(140).reshape(2, 70) % 128, jnp.arange(70) < jnp.array([[70], [30]])

    def apply(params):
        return bert.apply(params, tokens, config, mask=mask)[0]

    def both(params):
        y, pullback = jax.vjp(apply, params)
        return apply(params), pullback(jnp.cos(y))

    assert calls(apply, params) == 1
    program = jax.make_jaxpr(both)(params)
    (kernel,) = (e for e in equations(program.jaxpr) if "short" in e.primitive.name)
    assert [str(x.aval) for x in kernel.invars[:2]] == ["bfloat16[2,70,384]", "float32[384]"]
    results = [x.aval for e in equations(program.jaxpr) for x in e.outvars]
    assert not [x for x in results if (x.size, x.dtype) == (140 * 384, "float32")]
    found = jax.jit(both)(params)
    monkeypatch.setattr(_bert_layers, "takes_bias", lambda *_: False)
    other = jax.jit(lambda params: both(params))(params)
    for a, b in zip(*map(jax.tree.leaves, (found, other)), strict=True):
        error = np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b, np.float32))
        assert error <= 0.03 * np.linalg.norm(np.asarray(b, np.float32))


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.skipif(not HERE, reason="needs a GPU")
@pytest.mark.usefixtures("native", "exact_products")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "batch, length, heads",
    [
        *((1, 32, 12), (3, 128, 3), (70, 100, 4), (300, 33, 1), (2, 1, 2)),
        *((2, 129, 3), (40, 512, 2), (1, 700, 12), (30, 257, 5), (3, 1024, 1)),
    ],
)
def test_values(batch, length, heads, dtype):
    """Sums with the bias are no less accurate than rounded ones. A query without keys gives 0."""
    rng = np.random.default_rng(0)
    qkv = normal(rng, (batch, length, 192 * heads), dtype)
    wide = normal(rng, (192 * heads,), "float32")
    keys, place = rng.random((batch, length)) < 0.6, np.arange(length)
    keys[-1] &= batch == 1
    qkv[~keys, 64 * heads :] = np.inf  # in keys and values that do not count
    lengths = rng.integers(length // 2, length + 2, (2, batch))
    names = ("query_seq_lengths", "key_value_seq_lengths")
    inside = place < lengths[..., None]
    for bias, where, ends in (
        (wide, keys, lengths),
        (wide.astype(dtype), keys, None),
        (None, keys, lengths),
    ):
        given = {} if ends is None else dict(zip(names, ends, strict=True))
        y = fo.qkv_attention(qkv, bias, num_heads=heads, mask=where[:, None, None], **given)
        whole = qkv.astype("float32") + (0 if bias is None else bias.astype("float32"))
        masks = (where, None) if ends is None else (where & inside[1], inside[0])
        wanted = np.asarray(expected(whole, None, *masks, heads=heads))
        error = np.linalg.norm(np.asarray(y, np.float32) - wanted)
        assert error <= (5e-3 if dtype == "bfloat16" else 7e-4) * np.linalg.norm(wanted)
        np.testing.assert_array_equal(np.asarray(y)[wanted == 0], 0)


@pytest.mark.skipif(not HERE, reason="needs a GPU")
@pytest.mark.usefixtures("native", "exact_products")
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.2])
def test_tiles_without_keys(scale):
    """Whole tiles of 64 keys do not count, for scales of any sign."""
    rng = np.random.default_rng(2)
    qkv = normal(rng, (3, 300, 384), "bfloat16")
    keys = (np.arange(300) // 64 % 2 == 1) & (np.arange(300) < np.array([[300], [100], [128]]))
    y = fo.qkv_attention(qkv, num_heads=2, mask=keys[:, None, None], scale=scale)
    scaled = qkv.astype("float32")
    scaled[..., :128] *= 8 * scale
    wanted = np.asarray(expected(scaled, None, keys, heads=2))
    assert np.linalg.norm(np.asarray(y, np.float32) - wanted) <= 6e-3 * np.linalg.norm(wanted)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "counts, rest, heads", [((3, 0, 5), 2, 2), ((129, 1, 300, 64), 3, 3), ((0, 40), 500, 1)]
)
def test_list(counts, rest, heads, dtype):
    """Each sequence is as if alone, also by vmap. After the last one there are zeros."""
    rng = np.random.default_rng(1)
    offsets = np.cumsum([(0, *counts), (0, *counts[::-1])], axis=1, dtype=np.int32)
    end = sum(counts)
    qkv = normal(rng, (2, end + rest, 192 * heads), dtype)
    qkv[:, end:] = np.nan
    bias = normal(rng, (192 * heads,), "float32")
    attend = functools.partial(attend_list, length=max(counts), num_heads=heads)
    with fo.use_implementation("native" if HERE else "auto"):
        y = jax.jit(jax.vmap(attend, (0, None, 0)))(qkv, bias, offsets)
    wanted = np.zeros(y.shape, "float32")
    for row, own in enumerate(offsets):
        for begin, until in itertools.pairwise(np.unique(own)):
            part = qkv[row : row + 1, begin:until].astype("float32")
            wanted[row, begin:until] = expected(part, bias, heads=heads)[0]
    error = np.linalg.norm(np.asarray(y, np.float32) - wanted)
    assert error <= (6e-3 if dtype == "bfloat16" else 8e-4) * np.linalg.norm(wanted)
    assert not np.asarray(y[:, end:], np.float32).any()


@pytest.mark.parametrize("layers", [1, 2])
def test_list_of_bert(layers, cuda_programs):
    """Without padding, one call a layer has the list, and gradients are those of the batch."""
    config = dataclasses.replace(bert.SMALL, heads=2, layers=layers, dtype="bfloat16")
    params = bert.init(jax.random.key(0), config)
    tokens, mask = jnp.arange(140).reshape(2, 70) % 128, jnp.arange(70) < jnp.array([[70], [30]])

    def apply(params, capacity):
        x = bert.apply(params, tokens, config, mask=mask, token_capacity=capacity)[0]
        return jnp.where(mask[..., None], x, 0).astype("float32")

    listed = functools.partial(apply, capacity=110)
    assert calls(listed, params, name="list_attention") == layers
    grad = jax.jit(jax.grad(lambda p, n: jnp.sin(apply(p, n)).sum()), static_argnums=1)
    for a, b in zip(
        *(jax.tree.leaves((apply(params, n), grad(params, n))) for n in (110, None)), strict=True
    ):
        error = np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b, np.float32))
        assert error <= 0.03 * np.linalg.norm(np.asarray(b, np.float32))


@pytest.mark.skipif(not HERE, reason="needs a GPU")
@pytest.mark.usefixtures("native")
def test_nan_is_not_hidden():
    """A NaN in all scores of a query is no missing key."""
    qkv = np.ones((2, 20, 192), jnp.bfloat16)
    qkv[0, :, :64] = np.nan
    y = fo.qkv_attention(qkv, num_heads=1, mask=np.arange(20) < 7)
    np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)).all((1, 2)), [True, False])
