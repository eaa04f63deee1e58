"""`qkv_attention` of short sequences by one kernel: which calls take it, and its values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.numerics import normal

import jax_fastops as fo
from jax_fastops import _dispatch, _native, _projection
from jax_fastops.models import _bert_layers, bert

pytestmark = pytest.mark.usefixtures("native")

KERNEL = "jax_fastops.short_attention"
HERE = jax.default_backend() == "gpu" and KERNEL in _native.kernels("cuda")


def operands(batch, length, heads, dtype, bias_dtype="float32", seed=0):
    """A projection, a bias, and a mask of keys, in which one sequence has no key."""
    rng = np.random.default_rng(seed)
    qkv, bias = normal(rng, (batch, length, 192 * heads), dtype), normal(rng, (192 * heads,), dtype)
    mask = rng.random((batch, length)) < 0.6
    mask[-1] &= batch == 1
    return jnp.asarray(qkv), jnp.asarray(bias, bias_dtype), jnp.asarray(mask)


def expected(qkv, bias, mask, heads):
    """In float64, of the sum in the dtype of ``qkv``."""
    whole = np.asarray(qkv if bias is None else qkv + bias.astype(qkv.dtype), np.float64)
    q, k, v = np.moveaxis(whole.reshape(*whole.shape[:2], 3, heads, 64), 2, 0)
    mask = np.ones(whole.shape[:2], bool) if mask is None else np.asarray(mask)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * mask[:, None, None]
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*whole.shape[:2], -1)


@pytest.fixture
def cuda_programs(monkeypatch):
    """Programs are lowered for CUDA as by a build without cuDNN, whatever this machine has."""
    names = frozenset({*_native.kernels("cpu"), KERNEL})
    own = _native.kernels
    monkeypatch.setattr(_native, "kernels", lambda p: names if p == "cuda" else own(p))
    monkeypatch.setattr(_native, "runs_here", lambda p: True)
    for module in (_dispatch, _bert_layers):
        monkeypatch.setattr(module, "lowering_platform", lambda: "cuda")


def calls(fn, *args):
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count(f"@{KERNEL}.v")


@pytest.mark.jax
def test_calls(cuda_programs):
    qkv, bias, mask = operands(3, 20, 2, "bfloat16")
    attention = functools.partial(fo.qkv_attention, num_heads=2)
    keys = mask[:, None, None]
    assert calls(attention, qkv) == 1
    assert calls(lambda x, b, m: attention(x, b, mask=m), qkv, bias, keys) == 1
    assert calls(lambda x, m: attention(x, mask=m), qkv, keys[:1]) == 1
    assert calls(jax.vmap(attention), qkv[None]) == 1
    assert calls(jax.vmap(lambda b: attention(qkv, b)), bias[None]) == 0
    assert calls(jax.grad(lambda x: attention(x).astype("float32").sum()), qkv) == 0
    for options in (
        dict(is_causal=True),
        dict(bias=jnp.ones((20, 20))),
        dict(mask=jnp.ones((20, 20), bool)),
        dict(key_value_seq_lengths=jnp.ones(3, jnp.int32)),
        dict(segment_ids=jnp.ones((3, 20), jnp.int32)),
        dict(dropout_key=jax.random.key(0), dropout_rate=0.5),
        dict(return_residual=True),
        dict(num_heads=4),
        dict(num_kv_heads=1, num_heads=4),
    ):
        assert calls(functools.partial(attention, **options), qkv) == 0, options
    assert calls(attention, qkv.astype("float32")) == 0
    assert calls(attention, jnp.zeros((1, 129, 384), "bfloat16")) == 0
    config = dataclasses.replace(bert.SMALL, heads=2, dtype="bfloat16")
    params = bert.init(jax.random.key(0), config)
    tokens = jnp.ones((3, 20), jnp.int32)
    assert calls(lambda m: bert.apply(params, tokens, config, mask=m)[0], mask) == 2


def test_reference():
    """Any number of leading dimensions."""
    qkv, bias, mask = operands(3, 5, 2, "float32")
    reference = functools.partial(_projection._reference, heads=2, scale=0.125)
    y = jax.jit(reference)(qkv[:, None], bias, mask[:, None])
    np.testing.assert_allclose(y[:, 0], expected(qkv, bias, mask, 2), atol=1e-5)


@pytest.mark.skipif(not HERE, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "batch, length, heads", [(1, 32, 12), (2, 128, 3), (70, 100, 4), (300, 33, 1), (2, 1, 2)]
)
def test_values(batch, length, heads, dtype):
    qkv, wide, keys = operands(batch, length, heads, dtype)
    for bias, mask in ((wide, keys), (wide.astype(dtype), None), (None, keys)):
        where = None if mask is None else mask[:, None, None]
        y = fo.qkv_attention(qkv, bias, num_heads=heads, mask=where)
        wanted = expected(qkv, bias, mask, heads)
        error = np.linalg.norm(np.asarray(y, np.float64) - wanted) / np.linalg.norm(wanted)
        assert error < (5e-3 if dtype == "bfloat16" else 7e-4)
