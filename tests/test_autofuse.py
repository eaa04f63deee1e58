"""`autofuse`: what is replaced, equal results and gradients, near misses, transformations."""

import functools
import importlib
import inspect
import pickle
import pydoc
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autofuse_programs import (
    BIAS,
    IMAGES,
    LABELS,
    LOWER,
    MASK,
    PROGRAMS,
    SCORES,
    B,
    C,
    W,
    X,
    Y,
    by_moments,
    capped,
    label_loss,
    masked_sum_loss,
    one_hot_loss,
    rms,
    shifted_loss_by_sum,
    smoothed_loss,
    smoothed_z_loss,
    softmax,
    z_loss,
)
from harness.compat import JAX_0_8, strict, x64
from harness.numerics import of_products
from harness.programs import targets_of
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.autofuse import RULES, Rule, _kept, _meaning, _pattern
from jax_fastops.autofuse._pattern_rule import PatternRule

pytestmark = pytest.mark.usefixtures("native")


def names(f, *args):
    return [r.pattern for r in fo.autofuse.report(f)(*args).replaced]


def close(got, want, tolerance):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jnp.inexact):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            scale = max(1.0, np.max(np.abs(b), initial=0, where=np.isfinite(b)))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def run(f, args, compiled=True):
    """Results, and gradients of the floating operands."""
    floating = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(*args):
        results = jax.tree.leaves(f(*args))
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results)

    def both(*args):
        return f(*args), jax.grad(loss, floating)(*args)

    return (jax.jit(both) if compiled else both)(*args)


# jaxlib 0.8 has no product of bfloat16 with a float32 result on the CPU.
RUNNABLE = [name for name in PROGRAMS if not (JAX_0_8 and name == "linear loss in bfloat16")]


@pytest.mark.jax
@pytest.mark.parametrize("name", RUNNABLE)
def test_programs(name):
    f, args, patterns = PROGRAMS[name]
    assert names(f, *args) == patterns
    want, got = run(f, args), run(fo.autofuse(f), args)
    narrow = any(x.dtype == jnp.bfloat16 for x in args)
    tolerance = of_products(3e-5) if "linear_cross_entropy" in patterns else 3e-5
    close(got, want, 0.05 if narrow else tolerance)
    assert targets_of(lambda *a: fo.autofuse(f)(*a), *args)


@pytest.mark.parametrize(
    "name", ["gelu", "softmax", "loss", "gemma rms", "residual rms", "var", "group norm, gelu"]
)
def test_narrow_dtypes(name):
    f, args, patterns = PROGRAMS[name]
    args = [x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    assert names(f, *args) == patterns
    close(run(fo.autofuse(f), args), run(f, args), 0.05)


@pytest.mark.parametrize("shape", [(8,), (256, 112, 112, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rules_are_found_in_each_type(shape, dtype):
    """They are compared as text, in which a literal and the end of a line depend on the type."""
    assert names(jax.nn.relu, jax.ShapeDtypeStruct(shape, dtype)) == ["relu"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, b: jax.nn.gelu(x + b[:, None]),
        lambda x, b: jax.nn.relu(x + b[:, None]),
        lambda x, b: jax.nn.silu(x + x.mean(1, keepdims=True)),
        lambda x, b: jax.nn.standardize(x + b[:, None] + x[::-1], epsilon=1e-6),
        lambda x, b: jax.nn.relu(jnp.stack([x, x]) + b[None, :, None]),
    ],
)
def test_a_column_of_a_square_is_no_row(f):
    x, b = jax.random.normal(jax.random.key(0), (16, 16)), jnp.arange(16.0)
    np.testing.assert_allclose(fo.autofuse(f)(x, b), f(x, b), rtol=1e-5, atol=1e-5)


def test_nothing_is_replaced_without_a_kernel():
    with fo.use_implementation("xla"):
        report = fo.autofuse.report(softmax)(X)
    assert not report.replaced and report.missed[0].reason == "the implementation is 'xla'"


def rms_of_product(x, y):
    return x * jax.lax.rsqrt(jnp.mean(x * y, -1, keepdims=True) + 1e-6)


def times_sum(axis):
    @jax.custom_jvp
    def f(x):
        return x * x.sum(axis, keepdims=True) / 9

    f.defjvp(lambda x, t: (f(*x), t[0] * x[0].sum(axis, keepdims=True)))
    return f


def sum_with_rms(x):
    return rms(x, B) + x


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.maximum(x, 0),  # another derivative at 0
        lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),  # overflows
        lambda x: (x - jax.lax.stop_gradient(x.mean(-1, keepdims=True))) / x.std(-1, keepdims=True),
        lambda x: x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6),
        lambda x: x * jax.nn.sigmoid(1.702 * x),
        lambda x: jax.nn.log_softmax(x)[..., 0],
        lambda x: x[:, 0] - x[:, 0].mean(0),
        # Calls of one op with other options
        lambda x: rms_of_product(fo.softmax(x), fo.softmax(x, scale=0.1)),
        lambda x: rms_of_product(fo.layer_norm(x, eps=1.0), fo.layer_norm(x)),
        lambda x: rms_of_product(fo.layer_norm(x, x[0, 0]), fo.layer_norm(x, None, x[0, 0])),
        # Rules that differ by an axis
        lambda x: rms_of_product(times_sum(0)(x), times_sum(2)(x)),
        # A gradient that is rounded to 8 bits
        lambda x: sum_with_rms(x.astype(jnp.float8_e4m3fn).astype(jnp.float32)),
    ],
)
def test_near_misses(f):
    close(run(fo.autofuse(f), (X,)), run(f, (X,)), 2e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.einsum("abc,abc->ab", x, x, precision="highest"),
        lambda x: jnp.einsum("abc,abc->ca", x, x, preferred_element_type=jnp.bfloat16),
        lambda x: jnp.vdot(jnp.sin(x), x),
        lambda x: jnp.einsum("abc,abc->abc", x, x),
        lambda x: x[0, 0] @ W.T + x[0, 1] @ W.T,
        lambda x: jax.lax.dot_general(x, x, (((2, 1), (2, 1)), ((0,), (0,)))),
        lambda x: jax.lax.dot_general(x, x, (((2,), (2,)), ((1, 0), (1, 0)))),
        lambda x: jnp.einsum("ab,ba->", x[0, :, :6], x[1, :, :6]),
        jax.vmap(lambda x: jnp.sin(W @ x[0])),
        lambda x: (lambda y: (y, jnp.sin(y.T)))(W @ x[0].T),
    ],
)
def test_other_products_stay(f):
    program = jax.make_jaxpr(f)(X)
    assert str(jax.make_jaxpr(lambda x: fo.autofuse(f)(x))(X)) == str(program)


def rms_by_float16(x):
    """bfloat16 has a larger range than float16."""
    x = x.astype(jnp.float32)
    square = jnp.mean(x * x, -1, keepdims=True).astype(jnp.float16).astype(jnp.float32)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * jax.lax.rsqrt((x[0, 0] @ W.T)[:40] / 40 + 1e-6),
        lambda x: x * jax.lax.rsqrt(jnp.einsum("abc,abc->ba", x, x).T[..., None] / 39 + 1e-6),
        lambda x: x[:, :4] * jax.lax.rsqrt(
            jax.lax.dot_general(x[:, :4], x[:, :4], (((2,), (2,)), ((1, 0), (1, 0))))[..., None]
            / 40 + 1e-6
        ),
        lambda x: x * jax.lax.rsqrt(
            jnp.einsum("abc,abc->ab", *[x.astype(jnp.bfloat16)] * 2)[..., None] / 40 + 1e-6
        ),
        lambda x: rms_by_float16(x.astype(jnp.bfloat16)),
    ],
)  # fmt: skip
def test_near_misses_of_sums_of_products(f):
    assert names(f, X) == []
    close(run(fo.autofuse(f), (X,)), run(f, (X,)), 2e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[..., :20] * jax.nn.silu(x[..., 20:]),
        lambda x: x[..., ::2] * jax.nn.silu(x[..., 1::2]),
        lambda x: x[..., 19:39] * jax.nn.silu(x[..., :20]),
        lambda x: (lambda a, _, b: a * jax.nn.silu(b))(*jnp.split(x, (10, 30), -1)),
        lambda x: (lambda a, b: a * jax.nn.silu(b))(*jnp.split(x, 2, 1)),
        lambda x: x[..., :20] * jax.nn.silu((x + 1)[..., 20:]),
        lambda x: x[..., :20] * jax.nn.silu(x[..., :20]),
    ],
)
def test_other_parts_than_halves(f):
    assert not any("split" in name for name in names(f, X))
    close(run(fo.autofuse(f), (X,)), run(f, (X,)), 2e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 4), (1, 1, 1), "VALID"),
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 3), (1, 1, 2), "SAME"),
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3), (1, 1, 1), "SAME"),
        lambda x: jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (1, 1, 3), (1, 1, 1), "SAME"),
        lambda x: (x + B).reshape(4, 6, 8, 5).transpose(0, 2, 3, 1),
        lambda x: (x + B).reshape(4, 6, 5, 8).transpose(0, 2, 1, 3) @ x[:, None, :5, :8].mT,
        lambda x: x.reshape(4, 8, 3, 10).transpose(0, 2, 1, 3).reshape(4, 8, 30) @ x[:, :3, :30].mT,
    ],
)
def test_other_windows_and_moves(f):
    assert names(f, X) == []


@pytest.mark.jax
@pytest.mark.parametrize(
    "window, strides", [((1, 3, 3, 1), (1, 2, 2, 1)), ((2, 1, 1, 4), (2, 1, 1, 4))]
)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_max_pooling(window, strides, padding):
    """It is no kernel, but its gradient is faster than XLA's."""

    def f(x):
        return (
            jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding) ** 2
        ).sum()

    assert names(f, IMAGES) == ["max_pool"]
    close(run(jax.grad(fo.autofuse(f)), (IMAGES,)), run(jax.grad(f), (IMAGES,)), 1e-6)
    with fo.use_implementation("xla"):
        assert names(f, IMAGES) == []


@pytest.mark.parametrize(
    "window, dilations",
    [((1, 4, 4, 1), {}), ((1, 1, 1, 1), {}), ((1, 2, 2, 1), {"window_dilation": (1, 2, 2, 1)})],
)
def test_other_max_pooling(window, dilations):
    def f(x):
        ones = (1, 1, 1, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, ones, "SAME", **dilations)

    assert names(f, IMAGES) == []


def dropped(x, key, rate=0.25):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


KEY = jax.random.key(7)
DROPOUT = {
    "where": (dropped, "dropout"),
    "uniform": (
        lambda x, k: jnp.where(jax.random.uniform(k, x.shape) < 0.25, 0, x) / 0.75,
        "dropout",
    ),
    "product": (lambda x, k: x * (jax.random.uniform(k, x.shape) >= 0.25) / 0.75, "dropout"),
    "softmax": (lambda x, k: dropped(softmax(x * 0.5), k), "scale + softmax + dropout"),
    "norm": (lambda x, k: rms(x + dropped(x * 2, k), B), "dropout + add + rms_norm"),
    "bias": (lambda x, k: rms(dropped(x * 2 + C, k) + x, B), "bias + dropout + add + rms_norm"),
    "keys": (lambda x, k: jax.vmap(dropped)(x, jax.random.split(k, len(x))), "dropout"),
    "normal": (lambda x, k: jnp.where(jax.random.normal(k, x.shape) < 0.75, x / 0.75, 0), None),
    "key of the program": (lambda x, k: dropped(x, KEY), "dropout"),
    "a mask that is drawn again": (
        lambda x, k: dropped(x, k) + jax.random.bernoulli(k, 0.75, x.shape),
        None,
    ),
    "bits of two masks": (
        lambda x, k: (lambda u: jnp.where(u < 0.75, x / 0.75, 0) * u)(
            jax.random.uniform(k, x.shape)
        ),
        None,
    ),
    "other range": (
        lambda x, k: jnp.where(jax.random.uniform(k, x.shape, maxval=2) < 0.75, x / 0.75, 0),
        None,
    ),
}


def post_norm(x, key):
    """The norm's result is used after the dropout and by a branch."""
    h = by_moments(x, B, C)
    return by_moments(dropped(h, key) + jnp.sin(h), B, C)


def post_norm_of_scaled(x, key):
    """What the dropout scales is used, too."""
    scaled = by_moments(x, B, C) / 0.75
    kept = jnp.where(jax.random.bernoulli(key, 0.75, x.shape), scaled, 0)
    return by_moments(kept + jnp.sin(scaled), B, C)


def result_and_dropout(x, key):
    y = softmax(x)
    return y, dropped(y, key)


@pytest.mark.parametrize(
    "f, calls",
    [
        (post_norm, ["dropout", "norm", "norm"]),
        (post_norm_of_scaled, ["dropout", "norm", "norm"]),
        (result_and_dropout, ["dropout", "softmax"]),
    ],
)
def test_what_is_dropped_and_used_elsewhere_is_computed_once(f, calls):
    key = jax.random.key(3)
    fused = fo.autofuse(f, dropout=True)
    found = targets_of(lambda *a: fused(*a), X, key)
    assert sorted(found) == sorted(calls)
    kept = fo.dropout_mask(key, X.shape, 0.25)

    def by_hand(x):
        if f is result_and_dropout:
            y = softmax(x)
            return y, jnp.where(kept, y / 0.75, 0)
        h = by_moments(x, B, C) / (1 if f is post_norm else 0.75)
        drops = h / 0.75 if f is post_norm else h
        return by_moments(jnp.where(kept, drops, 0) + jnp.sin(h), B, C)

    close(run(lambda x: fused(x, key), (X,)), run(by_hand, (X,)), 5e-5)


@pytest.mark.jax
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name):
    f, pattern = DROPOUT[name]
    key = jax.random.key(3)
    g = fo.autofuse(f, dropout=True)
    assert [r.pattern for r in fo.autofuse.report(g)(X, key).replaced] == (
        [pattern] if pattern else []
    )
    close(fo.autofuse(f)(X, key), f(X, key), 2e-5)
    if pattern is None:
        np.testing.assert_array_equal(g(X, key), f(X, key))
        return
    y = g(X, key)
    zeros = jax.grad(lambda x: jnp.vdot(g(x, key), y))(X)
    if name != "key of the program":
        assert not np.array_equal(y, g(X, jax.random.key(4)))
    if name in ("where", "uniform", "product", "keys"):
        kept = np.asarray(y != 0)
        assert 0.7 < kept.mean() < 0.8
        np.testing.assert_allclose(y, np.where(kept, X / 0.75, 0), rtol=1e-6)
        np.testing.assert_allclose(zeros, np.where(kept, y / 0.75, 0), rtol=1e-6)
    if name == "where":
        np.testing.assert_array_equal(y, fo.dropout(X, key, 0.25))
    if name == "softmax":
        want = fo.softmax(X, scale=0.5, dropout_key=key, dropout_rate=0.25)
        np.testing.assert_allclose(y, want, rtol=1e-6)
    with pytest.raises(ValueError, match="dropout=True changes masks"):
        fo.autofuse(f, dropout=True, check=True)


def test_dropout_that_scales_in_a_wider_dtype():
    def f(x, key):
        kept = (x.astype(jnp.float32) / 0.9).astype(x.dtype)
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), kept, 0)

    x, key = X.astype(jnp.bfloat16), jax.random.key(3)
    g = fo.autofuse(f, dropout=True)
    assert names(g, x, key) == ["dropout"]
    np.testing.assert_array_equal(g(x, key), fo.dropout(x, key, 0.1))
    assert names(fo.autofuse(f, dropout=True), X, key) == ["dropout"]


@pytest.mark.jax
def test_a_rule_of_its_own_stays():
    @jax.custom_jvp
    def relu(x):
        return jax.nn.relu(x)

    relu.defjvp(lambda p, t: (relu(*p), 3 * t[0]))

    @jax.custom_vjp
    def norm(x):
        return rms(x, B)

    norm.defvjp(lambda x: (norm(x), x), lambda x, ct: (5 * x,))
    for f in (relu, norm):
        close(run(fo.autofuse(f), (X,)), run(f, (X,)), 2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
def test_a_pattern_in_a_function_with_a_rule_is_replaced_only_without_a_gradient(kind):
    function = kind(lambda x: rms(x, B))
    if kind is jax.custom_jvp:
        function.defjvp(lambda p, t: (rms(*p, B), 3 * t[0]))
    else:
        function.defvjp(lambda x: (rms(x, B), None), lambda _, ct: (3 * ct,))

    def f(x):
        return jnp.sum(jnp.sin(jax.nn.relu(function(x))))

    report = fo.autofuse.report(f)(X)
    assert [r.pattern for r in report.replaced] == ["relu"]
    (missed,) = report.missed
    assert missed.pattern == "rms_norm" and kind.__name__ in missed.reason
    assert targets_of(lambda x: fo.autofuse(f)(x), X).count("norm") == 1
    assert "norm" not in targets_of(lambda x: jax.grad(fo.autofuse(f))(x), X)
    close(jax.value_and_grad(fo.autofuse(f))(X), jax.value_and_grad(f)(X), 2e-5)


def test_a_value_that_is_used_elsewhere():
    def f(x):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True), e

    report = fo.autofuse.report(f)(X)
    assert not report.replaced and report.missed[0].reason == "the value is used elsewhere"
    assert __file__.rsplit("/", 1)[-1] in report.missed[0].where


def _normalized(x, axis, scale):
    mean = x.mean(axis, keepdims=axis == -1)
    var = ((x - mean) ** 2).mean(axis, keepdims=axis == -1)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale(mean), mean, var


def _scaled_by_its_sum(x):
    total = x + x[::-1]
    return _normalized(total, -1, lambda mean: total[0])[0], total


def _scaled_by_each_other(x):
    a, b = x[:1] + x[1:2], x[2:3] + x[3:4]
    norms = (_normalized(y, -1, lambda mean: z[0])[0] for y, z in ((a, b), (b, a)))  # noqa: B023
    return *norms, a, b


def _scaled_through_a_ref(x):
    ref = jax.new_ref(jnp.ones(x.shape[1]))

    def scale(mean):
        ref[...] = mean
        return ref[...]

    return _normalized(x, 0, scale)


@pytest.mark.jax
@pytest.mark.parametrize(
    "f",
    [
        _scaled_by_its_sum,
        _scaled_by_each_other,
        lambda x: _normalized(x, 0, lambda mean: 1 + mean),
        pytest.param(
            _scaled_through_a_ref,
            marks=pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="a later jax has it"),
        ),
    ],
)
def test_an_operand_that_depends_on_a_result(f):
    """The op cannot have it as an operand."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((8, 16)), jnp.float32)
    report = fo.autofuse.report(f)(x)
    assert "an operand depends on another result" in {m.reason for m in report.missed}
    close(jax.jit(fo.autofuse(f))(x), jax.jit(f)(x), 2e-5)


@pytest.mark.jax
def test_a_jitted_function_in_which_nothing_is_replaced_stays():
    """Its bodies are looked into."""

    @jax.jit
    def block(x):
        return jax.lax.fori_loop(0, 3, lambda i, z: jax.nn.relu(z) * 2, x) + 1

    program = jax.make_jaxpr(fo.autofuse(lambda x: block(block(x) + 1)))(X)
    assert [e.params.get("name") for e in program.eqns].count("block") == 2


@pytest.mark.parametrize("fill", [-jnp.inf, -1e30, -1e9, -1e4, 0.0])
@pytest.mark.parametrize("rows", [0, 1])
def test_masks_that_are_known(fill, rows):
    """They are the op's mask if no row is empty, and if the fill is far below all logits."""

    def f(x):
        return softmax(jnp.where(jnp.tril(jnp.ones((8, 8), bool), rows - 1), x, fill))

    counts = rows and fill <= -1e9
    assert names(f, SCORES) == ["where + softmax" if counts else "softmax"]
    close(run(fo.autofuse(f), (SCORES,)), run(f, (SCORES,)), 2e-5)


def test_check_finds_a_row_of_padding_in_a_causal_mask():
    """All of it is at the number of the mask; the documentation says so."""

    def f(x, kept):
        return softmax(jnp.where(LOWER, x + (1 - kept) * -1e9, -1e9))

    kept = jnp.ones((2, 1, 1, 8))
    fused = fo.autofuse(f, check=True)
    close(fused(SCORES, kept), f(SCORES, kept), 1e-6)
    with pytest.raises(ValueError, match="autofuse: result differs by"):
        fused(SCORES, kept.at[1].set(0))


WRAPPERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (f(c + x), c), x[0], x),
    "while": lambda f: (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]
    ),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0, 0] > 9, jnp.sin, f, x),
    "nested": lambda f: lambda x: jax.lax.map(jax.jit(lambda x: jax.checkpoint(f)(x)), x),
    "twice": lambda f: jax.jit(lambda x: jax.jit(f)(x * 2) + jax.jit(f)(x)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda x: jax.linearize(jax.jit(f), x)[1](jnp.cos(x)),
}
FUNCTIONS = {"softmax": softmax, "gelu": jax.nn.gelu, "rms": lambda x: rms(x, B[: x.shape[-1]])}


@pytest.mark.jax
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_and_outside(wrap, name):
    forward = wrap not in ("jvp", "linearize")
    wrap, f = WRAPPERS[wrap], FUNCTIONS[name]
    inner, outer = wrap(fo.autofuse(f))(X), fo.autofuse(wrap(f))(X)
    want = wrap(f)(X)
    close(inner, want, 2e-5)
    close(outer, want, 2e-5)
    assert not forward or targets_of(lambda x: wrap(fo.autofuse(f))(x), X)


@pytest.mark.jax
@pytest.mark.parametrize("wrap", ["jit", "checkpoint", "scan", "cond"])
def test_bodies_are_replaced(wrap):
    programs = {
        "jit": jax.jit(softmax),
        "checkpoint": jax.checkpoint(softmax),
        "scan": lambda x: jax.lax.scan(lambda c, x: (softmax(c + x), None), x[0], x)[0],
        "cond": lambda x: jax.lax.cond(x[0, 0, 0] > 9, jnp.sin, softmax, x),
    }
    assert names(programs[wrap], X) == ["softmax"]
    assert targets_of(lambda x: fo.autofuse(programs[wrap])(x), X) == ["softmax"]


@pytest.mark.jax
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_meshes(axis_type):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))

    def f(x):
        return jax.nn.gelu(by_moments(x, B, C))

    with jax.set_mesh(mesh):
        close(jax.jit(fo.autofuse(f))(x), f(X), 2e-5)
        mapped = jax.shard_map(f, in_specs=P("data"), out_specs=P("data"))
        close(jax.jit(fo.autofuse(mapped))(x), f(X), 2e-5)
        assert names(mapped, x) == ["gelu", "layer_norm"] or len(names(mapped, x)) == 2
        if JAX_0_8 and axis_type == "Explicit":
            return  # the gradient of the plain program asks for an output sharding there
        loss, (_, *rest, labels), patterns = PROGRAMS["linear loss, masked"]
        args = x, *rest, jax.device_put(labels, jax.NamedSharding(mesh, P("data")))
        assert names(loss, *args) == patterns
        close(run(fo.autofuse(loss), args), run(loss, args), 2e-5)


def test_a_part_of_what_stays_is_not_replaced():
    """XLA fuses the bias and the relu of a batch norm that ``"auto"`` leaves to it."""

    def f(x, scale, bias):
        mean = x.mean((0, 1, 2))
        centered = x - mean
        variance = (centered**2).mean((0, 1, 2))
        return jax.nn.relu(centered * jax.lax.rsqrt(variance + 1e-5) * scale + bias)

    def after(x, bias):
        return jax.nn.relu(x + bias)

    x = np.ones((4, 4, 4, 8), np.float32)
    assert names(f, x, x[0, 0, 0], x[0, 0, 0]) == ["batch_norm + relu"]
    with fo.use_implementation("auto"):
        report = fo.autofuse.report(f)(x, x[0, 0, 0], x[0, 0, 0])
        if names(after, x, x[0, 0, 0]) != ["bias + relu"]:
            pytest.skip("bias and relu stay by themselves, too")
    assert not report.replaced
    assert "batch_norm + relu" in [m.pattern for m in report.missed]


@pytest.mark.jax
@pytest.mark.parametrize("mapped", ["vmap", "shard_map"])
def test_statistics_of_all_devices(mapped):
    """A mean over an axis with a name is over more than the array has, except under ``vmap``."""

    def f(x):
        mean, square = jax.lax.pmean((x.mean((0, 1)), (x * x).mean((0, 1))), "data")
        return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5) * B + C

    x = X[:, None]
    if mapped == "vmap":
        f = jax.vmap(f, axis_name="data")
        assert names(f, x) == ["batch_norm"]
    elif len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    else:
        auto, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:2]
        mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=devices)
        f = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    close(run(fo.autofuse(f), (x,)), run(f, (x,)), 2e-5)


def test_what_is_not_an_array_passes():
    @fo.autofuse
    def f(x, *, kind, scale=2.0):
        """Doc."""
        return {"y": softmax(x) * scale, "kind": kind, "none": None, "n": 3}

    found = f(X, kind="softmax")
    close(found["y"], softmax(X) * 2.0, 1e-6)
    assert (found["kind"], found["none"], found["n"]) == ("softmax", None, 3)
    assert f.__doc__ == "Doc."
    report, calls = fo.autofuse.report(f)(X, kind="softmax"), fo.explain(f)(X, kind="softmax")
    assert len(report.replaced) == len(calls.calls) == 1
    assert not fo.autofuse.report(lambda x: None)(X).replaced

    def numbers(x):
        return jnp.float32(2), jnp.asarray(2.0), np.float32(2), np.ones(2), softmax(x)

    for a, b in zip(fo.autofuse(numbers)(X), numbers(X), strict=True):
        assert type(a) is type(b) and jax.typeof(a) == jax.typeof(b)


@pytest.mark.jax
def test_effects_are_kept(capfd):
    calls = []

    def f(x):
        jax.debug.print("sum {}, first {}", jnp.sum(x * x) * 0, x[0, 0, 0] * 0)
        total = x + jnp.sin(x)
        row, other = (
            io_callback(lambda i=i: calls.append(i) or np.asarray(B), B, ordered=True)
            for i in range(2)
        )
        return softmax(x), rms(total, other), total + row

    jax.block_until_ready(jax.jit(fo.autofuse(f))(X))
    jax.effects_barrier()
    assert "sum 0.0, first" in capfd.readouterr().out and calls == [0, 1]


def test_a_method():
    class Model:
        scale = B

        @fo.autofuse
        def __call__(self, x):
            return rms(x, self.scale)

    close(Model()(X), rms(X, B), 1e-5)


def test_explain_shows_the_line_of_the_pattern():
    calls = fo.explain(fo.autofuse(softmax))(X).calls
    assert [call.op for call in calls] == ["softmax"]
    assert "autofuse_programs.py" in calls[0].where


def test_check():
    f = fo.autofuse(label_loss, check=True)
    close(f(X, LABELS), label_loss(X, LABELS), 1e-5)
    with pytest.raises(ValueError, match="check=True needs values"):
        jax.jit(f)(X, LABELS)
    calls = iter([1.0, 2.0, 2.0])
    with pytest.raises(ValueError, match=r"autofuse: result differs by"):
        fo.autofuse(lambda x: softmax(x) * next(calls), check=True)(X)


def test_check_of_a_wide_result():
    """The losses are in float32, but the norm before them rounds to bfloat16."""

    def f(x, labels):
        return label_loss(by_moments(x, B, C).astype(x.dtype).astype(jnp.float32), labels)

    x = X.astype(jnp.bfloat16)
    assert names(f, x, LABELS) == ["layer_norm", "cross_entropy"]
    np.testing.assert_allclose(fo.autofuse(f, check=True)(x, LABELS), f(x, LABELS), rtol=0.05)


def test_labels_that_are_no_class():
    labels = LABELS.at[0].set(jnp.array([-1, -40, -41, 39, 40, 41]))
    np.testing.assert_allclose(fo.autofuse(label_loss)(X, labels), label_loss(X, labels), rtol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "weak"])
def test_dtypes_of_labels(kind):
    """Labels that a cast widens are those before the cast."""
    labels = jnp.full(LABELS.shape, 3) if kind == "weak" else LABELS.astype(kind)
    assert names(label_loss, X, labels) == ["cross_entropy"]
    got, want = fo.autofuse(label_loss)(X, labels), label_loss(X, labels)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("dtype, other", [("uint32", 2**31), ("int64", 2**40), ("uint64", 2**63)])
@pytest.mark.parametrize("jitted", [False, True])
def test_labels_that_a_cast_narrows(dtype, other, jitted):
    """``take_along_axis`` casts them to int32, also where the result is negated outside of it."""

    def f(x, labels, table):
        logits = x @ table.T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    f = jax.jit(f) if jitted else f
    with x64():
        labels = np.asarray(LABELS, dtype)
        labels[0, 0] = other if not JAX_0_8 else 0  # it becomes 0, or a negative number
        assert names(f, X, labels, W) == ["linear_cross_entropy"]
        got, want = (jax.value_and_grad(g)(X, labels, W) for g in (fo.autofuse(f), f))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        if np.isfinite(want[0]):
            close(got, want, 2e-5)


def test_arrays_of_two_functions():
    """The outermost program that has the result also has all operands."""

    @jax.jit
    def loss(logits, labels):
        return label_loss(logits, labels).mean()

    def inside(x, labels):
        return loss(jnp.sin(x), labels.astype(jnp.int32))

    assert names(inside, X, LABELS.astype(jnp.uint32)) == ["cross_entropy"]


def less_max(x):
    return x - x.max(-1, keepdims=True)


BY_INDEX = {
    "map": jax.vmap(lambda x, label: -jax.nn.log_softmax(x)[label]),
    "log_softmax": lambda x, labels: -jax.nn.log_softmax(x)[jnp.arange(len(x)), labels],
    "logsumexp": lambda x, labels: jax.nn.logsumexp(x, -1) - x[jnp.arange(len(x)), labels],
    "shifted": lambda x, labels: (
        jnp.log(jnp.exp(less_max(x)).sum(-1)) - less_max(x)[jnp.arange(len(x)), labels]
    ),
    "smoothed": lambda x, labels: (
        -0.9 * jax.nn.log_softmax(x)[jnp.arange(len(x)), labels]
        - 0.1 * jax.nn.log_softmax(x).mean(-1)
    ),
}


@pytest.mark.parametrize("form", BY_INDEX)
def test_labels_as_indices(form):
    x, table, loss = X[0], jax.random.normal(jax.random.key(0), (40, 40)), BY_INDEX[form]
    labels = LABELS[0].at[:2].set(jnp.array([-1, -40]))
    assert names(loss, x, labels) == ["cross_entropy"]

    def linear(x, labels):
        return loss(x @ table.T, labels).mean()

    assert names(linear, x, labels) == ["linear_cross_entropy"]
    for f in (lambda x, labels: loss(x, labels).mean(), linear):
        want, got = (jax.value_and_grad(g)(x, labels) for g in (f, fo.autofuse(f)))
        close(got, want, of_products(1e-5) if f is linear else 1e-5)
    # The nearest class, as in XLA. Its gradient is not defined.
    labels = labels.at[:2].set(jnp.array([40, -41]))
    np.testing.assert_allclose(fo.autofuse(loss)(x, labels), loss(x, labels), rtol=1e-5)


@pytest.mark.parametrize("name", ["loss by indices", "loss by indices under vmap"])
def test_labels_as_one_of_three_indices(name):
    loss, (x, labels), _ = PROGRAMS[name]
    labels = labels.at[0].set(jnp.array([-1, -40, -41, 39, 40, 41]))
    np.testing.assert_allclose(fo.autofuse(loss)(x, labels), loss(x, labels), rtol=1e-5)


def test_other_indices_of_three():
    def f(x, labels):
        rows = jnp.arange(4)
        return -jax.nn.log_softmax(x)[rows, rows[:, None], labels]

    x, labels = X[:, :4, :6], LABELS[:, :4] % 6
    assert names(f, x, labels) == ["log_softmax"]
    np.testing.assert_allclose(fo.autofuse(f)(x, labels), f(x, labels), rtol=1e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, labels: -jax.nn.log_softmax(x)[jnp.arange(len(x))[::-1], labels],
        lambda x, labels: -jax.nn.log_softmax(x)[labels, jnp.arange(len(x))],
        lambda x, labels: -jax.nn.log_softmax(x)[jnp.arange(len(x)) - 1, labels],
    ],
)
def test_other_indices(f):
    x, labels = X[0, :, :6], LABELS[0] % 6
    assert names(f, x, labels) == ["log_softmax"]
    np.testing.assert_allclose(fo.autofuse(f)(x, labels), f(x, labels), rtol=1e-5)


def picked(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def by_one_hot(x, labels):
    return (jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype) * x).sum(-1)


LOSSES = {
    "log_softmax": lambda x, labels: -picked(jax.nn.log_softmax(x), labels),
    "logsumexp": lambda x, labels: jax.nn.logsumexp(x, -1) - picked(x, labels),
    "shifted": lambda x, labels: (
        jnp.log(jnp.exp(less_max(x)).sum(-1)) - picked(less_max(x), labels)
    ),
    "one_hot": lambda x, labels: -by_one_hot(jax.nn.log_softmax(x), labels),
    "product": lambda x, labels: jax.nn.logsumexp(x, -1) - by_one_hot(x, labels),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", LOSSES)
def test_losses_of_special_values(form, dtype):
    """Each form has its own NaN and inf in rows with +inf; a masked class has -inf."""
    f, low = LOSSES[form], float(jnp.finfo(dtype).min)
    rows = [[0, 1, np.inf, 2], [np.inf, np.inf, 1, 2], [np.nan, 1, np.inf, 2]]
    if form in ("log_softmax", "logsumexp", "shifted"):
        rows += [[0, 1, -np.inf, 2], [-np.inf] * 4, [-low, low, 3, 4]]
    x, labels = jnp.repeat(jnp.array(rows, dtype), 4, 0), jnp.tile(jnp.arange(4), len(rows))
    assert names(f, x, labels) in (["cross_entropy"], ["cross_entropy of one_hot"])
    eps = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(fo.autofuse(f)(x, labels), f(x, labels), rtol=eps)
    want, got = (jax.vjp(g, x, labels)[1](jnp.ones(len(x), dtype))[0] for g in (f, fo.autofuse(f)))
    if form != "product":  # whose gradient is not NaN in the whole row
        np.testing.assert_allclose(got, want, rtol=eps, atol=eps)


# Sums of losses of a product ----------------------------------------------------------------------


# jaxlib 0.8.0 folds a transposed constant that is then compared and selected to wrong numbers.
TURNED = LABELS.T


def linear(loss, x, table, labels):
    return jnp.sum(loss(x @ table.T, labels))


def masked(losses, where):
    return jnp.sum(jnp.where(where, losses, 0))


LINEAR = ["linear_cross_entropy"]
NO_CLASS = jnp.array([[0, -1, 49, -50, 3, 7], [50, 2, -51, 1, 1000, 1]])


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.parametrize("rows", [0, slice(2)])
@pytest.mark.parametrize("count", ["all", "classes", "some"])
def test_linear_losses_of_labels_that_are_no_class(form, rows, count):
    x, labels = X[:2][rows], NO_CLASS[rows]
    where = {"classes": (labels >= 0) & (labels < 50), "some": labels != 1000}.get(count)

    def f(x, table):
        losses = LOSSES[form](x @ table.T + BIAS, labels)
        return jnp.sum(losses) if where is None else masked(losses, where)

    assert names(f, x, W) == LINEAR
    want, got = (jax.value_and_grad(g, (0, 1))(x, W) for g in (f, fo.autofuse(f)))
    np.testing.assert_allclose(got[0], want[0], rtol=of_products(1e-5))
    if np.isfinite(want[0]):
        close(got, want, of_products(2e-5))


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_linear_losses_of_special_values(form, value):
    f = jax.tree_util.Partial(linear, LOSSES[form])
    for i in range(2):
        args = [X, W, LABELS]
        args[i] = args[i].at[0].set(value)
        want, got = f(*args), fo.autofuse(f)(*args)
        assert np.isnan(want) == np.isnan(got) or (value == 1e38 and not np.isfinite(got))


@pytest.mark.parametrize("reduce", [lambda y: y, jnp.sum, lambda y: masked(y, LABELS > 9)])
@pytest.mark.parametrize("form", [label_loss, masked_sum_loss, z_loss, smoothed_loss])
@pytest.mark.parametrize("no_class", [False, True])
def test_linear_losses_with_a_bias_of_minus_inf(form, reduce, no_class):
    """Classes without a word may have one. Their losses are infinite, and others are not NaN."""
    bias = BIAS.at[jnp.array([0, 7, 11])].set(-jnp.inf)
    labels = LABELS.at[0].set(-100) if no_class else LABELS.at[0, :3].set(jnp.array([0, 7, -39]))

    def f(x, w):
        return reduce(form(x @ w.T + bias, labels))

    assert names(f, X, W) == LINEAR
    want, got = f(X, W), fo.autofuse(f)(X, W)
    np.testing.assert_allclose(got, want, rtol=of_products(1e-5))
    if np.isfinite(want).all():
        close(run(fo.autofuse(f), (X, W)), run(f, (X, W)), of_products(2e-5))


@pytest.mark.jax
@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_gradients_of_linear_losses(form, dtype):
    """Those of the program in float64, also without the wider dtype of the sum."""
    with x64():
        f = jax.tree_util.Partial(linear, LOSSES[form])
        args = [np.asarray(a, dtype) for a in (X, W)]
        assert names(f, *args, LABELS) == LINEAR
        got = jax.value_and_grad(fo.autofuse(f), (0, 1))(*args, LABELS)
        want = jax.value_and_grad(f, (0, 1))(*[np.float64(a) for a in args], LABELS)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == dtype
            tolerance = 30 * float(jnp.finfo(dtype).eps)
            tolerance = of_products(tolerance) if dtype == "float32" else tolerance
            tolerance *= np.max(np.abs(b))
            np.testing.assert_allclose(np.float64(a), b, rtol=0, atol=tolerance)


def half(x):
    return x.astype(jnp.float16)


@pytest.mark.parametrize(
    "f",
    [
        lambda y: (jnp.sum(y), y[0, 0]),
        lambda y: masked(y, y > 3),
        lambda y: (masked(y, y > 3), y[0, 0]),
        lambda y: jnp.sum(jnp.where(LABELS > 9, y, 1)),
        lambda y: jnp.sum(y * (LABELS % 3)),
        lambda y: jnp.sum(y * (LABELS > 9)) / jnp.sum(LABELS > 9),
        lambda y: jnp.sum(y, 0),
        lambda y: jnp.max(y),
        lambda y: jnp.sum(y**2),
        lambda y: jnp.exp(-y),
    ],
)
def test_linear_losses_of_each_token(f):
    def g(x, w):
        return f(label_loss(x @ w.T, LABELS))

    assert names(g, X, W) == LINEAR
    close(run(fo.autofuse(g), (X, W)), run(g, (X, W)), 1e-4)


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.parametrize("change", ["cap", "class", "inf", "nan"])
def test_linear_losses_of_each_token_and_special_values(form, change):
    """A token with such logits or labels changes no other one, also not if it is left out."""
    x, bias, labels = X, BIAS, LABELS
    if change in ("cap", "class"):
        labels = labels.at[:2].set(NO_CLASS)
    else:
        x = x.at[1, 2].set(float(change))

    def f(x, w, bias):
        logits = x @ w.T + bias
        losses = LOSSES[form](3 * jnp.tanh(logits / 3) if change == "cap" else logits, labels)
        kept = jnp.isfinite(losses)
        return losses, jnp.sum(jnp.where(kept, losses, 0))

    def loss(g):
        return lambda x, w: g(x, w, bias)[1]

    assert names(f, x, W, bias) == LINEAR
    want, got = f(x, W, bias), fo.autofuse(f)(x, W, bias)
    rounding = of_products(1e-5)
    np.testing.assert_allclose(got[0], want[0], rtol=rounding, atol=rounding)
    want, got = (jax.grad(loss(g), (0, 1))(x, W) for g in (f, fo.autofuse(f)))
    if change in ("cap", "class"):
        close(got, want, of_products(2e-5))


@pytest.mark.parametrize("part", [np.s_[1:], np.s_[:1], np.s_[1:3, :-1], np.s_[:, 2:5], np.s_[1]])
def test_linear_losses_of_some_tokens(part):
    def f(x, w):
        logits = capped(x @ w.T + BIAS)[part]
        return smoothed_loss(logits, LABELS[part]), jnp.sum(logits * 0)

    def g(x, w):
        return f(x, w)[0]

    assert names(g, X, W) == LINEAR
    assert LINEAR[0] not in names(f, X, W)
    close(run(fo.autofuse(g), (X, W)), run(g, (X, W)), of_products(1e-4))


@pytest.mark.parametrize("choice", ["auto", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_of_each_token_by_default(choice, dtype):
    """The op would compute the logits twice."""

    def f(x, w, labels):
        return label_loss((x @ w.T).astype(jnp.float32), labels)

    x, w = jnp.ones((64, 32), dtype), jnp.ones((1000, 32), dtype)
    with fo.use_implementation(choice):
        found = names(f, x, w, jnp.zeros(64, jnp.int32))
    assert found == (["cross_entropy"] if choice == "auto" else LINEAR)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: (lambda z: (jnp.sum(label_loss(z, LABELS)), z.max()))(x @ w.T),
        lambda x, w: (lambda z: (label_loss(z, LABELS), z.max()))(x @ w.T),
        lambda x, w: (lambda z: (jnp.sum(label_loss(z + BIAS, LABELS)), z))(x @ w.T),
        lambda x, w: (lambda z: (jnp.sum(label_loss(capped(z), LABELS)), z.max()))(x @ w.T),
        lambda x, w: (lambda z: (jnp.sum(label_loss(z, LABELS)), z.max()))(capped(x @ w.T)),
        lambda x, w: jnp.sum(label_loss(9 * jnp.tanh(x @ w.T / 8), LABELS)),
        lambda x, w: jnp.sum(label_loss(-9 * jnp.tanh(x @ w.T / -9), LABELS)),
        lambda x, w: jnp.sum(label_loss(9 * jnp.tan(x @ w.T / 9), LABELS)),
        lambda x, w: jnp.sum(label_loss(capped(x @ w.T) + BIAS, LABELS)),
        lambda x, w: jnp.sum(label_loss((x @ w.T)[:, ::2], LABELS[:, ::2])),
        lambda x, w: (lambda z: (jnp.sum(label_loss(z[:, 1:], LABELS[:, 1:])), z[0]))(x @ w.T),
        lambda x, w: jnp.sum(label_loss((x @ w.T)[::-1], LABELS)),
        lambda x, w: jnp.sum(label_loss((x @ w.T)[LABELS[:, 0] % 4], LABELS)),
        lambda x, w: jnp.sum(label_loss(x @ w.T + x[..., :1], LABELS)),
        lambda x, w: jnp.sum(label_loss(x @ w.T + x[0, :, :1], LABELS)),
        lambda x, w: jnp.sum(label_loss(x @ jnp.stack([w.T] * 4), LABELS)),
        lambda x, w: jnp.sum(label_loss(jnp.einsum("abe,ve->bav", x, w), TURNED)),
        lambda x, w: jnp.sum(label_loss(jnp.einsum("abe,ve->vba", x, w).T, LABELS)),
        lambda x, w: jnp.sum(label_loss(jnp.einsum("aeb,ve->abv", x[:, :, :6], w[:, :6]), LABELS)),
        lambda x, w: (lambda z: (jnp.sum(label_loss(z.transpose(1, 2, 0), LABELS)), z.max()))(
            jnp.einsum("abe,ve->vab", x, w)
        ),
        lambda x, w: (lambda z: (jnp.sum(label_loss(z, LABELS)), z.max()))(
            jax.vmap(jax.vmap(lambda x: w @ x))(x)
        ),
        lambda x, w: jnp.sum(label_loss(jnp.einsum("abe,ve->vab", x, w).T, TURNED)),
        lambda x, w: jnp.sum(label_loss((w[:40, :6] @ x[0]).T, jnp.arange(40) % 40)),
        lambda x, w: jnp.sum(shifted_loss_by_sum(x @ w.T, LABELS)),
        lambda x, w: jnp.sum(jax.vmap(lambda x: jnp.sum(label_loss(x @ w.T, LABELS[0])))(x)),
        lambda x, w: linear(label_loss, x.astype(jnp.bfloat16), w, LABELS),
        lambda x, w: jnp.sum(label_loss((x @ w.T).astype(jnp.bfloat16), LABELS)),
        lambda x, w: jnp.sum(
            label_loss(jnp.matmul(half(x), half(w).T, preferred_element_type="float32"), LABELS)
        ),
    ],
)
def test_near_misses_of_linear_losses(f):
    assert LINEAR[0] not in names(f, X, W)
    narrow = "bf16" in str(jax.make_jaxpr(f)(X, W))
    close(run(fo.autofuse(f), (X, W)), run(f, (X, W)), 0.05 if narrow else 1e-4)


def log_sum(x):
    return jax.nn.logsumexp(x, -1)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: label_loss(x, LABELS) + 0.01 * log_sum(x) ** 3,
        lambda x: label_loss(x, LABELS) + 0.01 * log_sum(x + 1) ** 2,
        lambda x: label_loss(x, LABELS) + 0.01 * log_sum(x[::-1]) ** 2,
        lambda x: z_loss(x, LABELS) + 1.0,
        lambda x: (z_loss(x, LABELS), log_sum(x)),
        lambda x: 0.9 * label_loss(x, LABELS) + 0.1 * jax.nn.log_softmax(x).mean(-1),
        lambda x: 0.9 * label_loss(x, LABELS) - 0.1 * jax.nn.log_softmax(x).sum(-1),
        lambda x: 0.9 * label_loss(x, LABELS) - 0.1 * jax.nn.log_softmax(x).mean(1)[:, :1],
        lambda x: 0.9 * label_loss(x, LABELS) - 0.1 * jax.nn.log_softmax(x, 1).mean(-1),
        lambda x: label_loss(x, LABELS) * log_sum(x) ** 2,
        lambda x: jnp.take_along_axis(x, LABELS[..., None], -1, mode="clip")[..., 0] - log_sum(x),
        lambda x: log_sum(x)[:, 0] - jnp.take_along_axis(x, LABELS[:, None, :1] % 6, 1)[:, 0, 0],
        lambda x: log_sum(x[:1]) - jnp.take_along_axis(x[:1], LABELS[:1, :1, None], -1)[..., 0],
    ],
)
def test_near_misses_of_losses(f):
    close(run(fo.autofuse(f), (X,)), run(f, (X,)), 5e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.log(jnp.exp(x).sum(-1)) - picked(x, LABELS),  # overflows
        lambda x: jnp.log(jnp.exp(less_max(x)).sum(-1)) - picked(x, LABELS),
        lambda x: jnp.log(jnp.exp(x - x.max()).sum(-1)) - picked(x - x.max(), LABELS),
        lambda x: jnp.log(jnp.exp(less_max(x)).sum(-1)) - picked(less_max(x[::-1]), LABELS),
        lambda x: (lambda z: jnp.log(jnp.exp(z).sum(-1)) - picked(z, LABELS))(
            x - x.min(-1, keepdims=True)
        ),
        lambda x: (lambda z: jnp.log(jnp.exp(z).sum(-1)) - picked(z, LABELS))(
            jax.lax.stop_gradient(x) - x.max(-1, keepdims=True)
        ),
        lambda x: (lambda z: (jnp.log(jnp.exp(z).sum(-1)) - picked(z, LABELS), z))(less_max(x)),
        lambda x: jnp.log2(jnp.exp(less_max(x)).sum(-1)) - picked(less_max(x), LABELS),
        lambda x: (lambda z: jnp.log(jnp.exp(z).sum(1)) - picked(z, LABELS[:, :6] % 6))(
            x[..., :6] - x[..., :6].max(-1, keepdims=True)
        ),
    ],
)
def test_near_misses_of_losses_of_shifted_logits(f):
    assert "cross_entropy" not in names(f, X)
    close(run(fo.autofuse(f), (X,)), run(f, (X,)), 5e-5)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_labels_that_are_no_class_of_shifted_logits(constant, dtype):
    """Their loss is that of the largest logit, and its derivative is not that of this loss."""

    def f(x, labels):
        top = x.max(-1, keepdims=True)
        z = x - (jax.lax.stop_gradient(top) if constant else top)
        at_label = jnp.arange(x.shape[-1]) == labels[..., None]
        return jnp.log(jnp.exp(z).sum(-1)) - jnp.where(at_label, z, 0).sum(-1)

    rows = [[0, 1, 1, 1], [1, 2, 3, 4], [0, 1, -np.inf, 2], [3e4, 1, 0, 1], [np.nan, 1, 2, 3]]
    x = jnp.repeat(jnp.array([*rows, [0, 1, np.inf, 2]], dtype), 4, 0)
    labels = jnp.tile(jnp.array([3, -1, 4, -100]), len(x) // 4)
    assert names(f, x, labels) == ["cross_entropy"]
    for got, want in zip(*(jax.vjp(g, x, labels) for g in (fo.autofuse(f), f)), strict=True):
        if callable(want):
            got, want = (pull(jnp.ones(len(x), dtype))[0] for pull in (got, want))
        eps = 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(wide(got), wide(want), rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_labels_in_a_narrow_dtype(dtype):
    """``one_hot`` counts the classes in the dtype of the labels, where 261 is 5."""
    x, labels = jnp.tile(X, 8) + jnp.arange(320) / 100, LABELS.astype(dtype)
    is_loss = "cross_entropy of one_hot" in names(one_hot_loss, x, labels)
    assert is_loss == (dtype == jnp.int16)
    for form in (label_loss, masked_sum_loss, one_hot_loss):
        np.testing.assert_allclose(fo.autofuse(form)(x, labels), form(x, labels), rtol=1e-5)


@pytest.mark.parametrize("form", [z_loss, smoothed_loss, smoothed_z_loss])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_with_numbers(form, dtype):
    """The numbers may be any, and rows may hold infinities or have labels that are no class."""
    x = X.astype(dtype).at[0, 0, 3].set(jnp.inf).at[0, 1, 3].set(-jnp.inf).at[0, 2].set(jnp.nan)
    labels = LABELS.at[0, 3:].set(jnp.array([-1, 40, -41])).at[1, 0].set(100)
    for numbers in ((0.25, 1e-3), (0.9, -2.0)):
        numbers = numbers[: form.__code__.co_argcount - 2]

        def f(x):
            return form(x, labels, *numbers)  # noqa: B023

        assert names(f, x) == ["cross_entropy"]
        want, got = (jax.vjp(g, x) for g in (f, fo.autofuse(f)))
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(*map(wide, (got[0], want[0])), rtol=8 * eps, atol=8 * eps)
        grads = [wide(y[1](jnp.ones_like(want[0]))[0]) for y in (got, want)]
        usual = np.isfinite(wide(want[0]))
        np.testing.assert_allclose(*(g[usual] for g in grads), rtol=0, atol=8 * eps)


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.skipif(JAX_0_8, reason="no product of bfloat16 with a float32 result on the CPU")
def test_check_of_rounded_logits():
    f, args, patterns = PROGRAMS["linear loss in bfloat16"]
    assert names(f, *args) == patterns
    np.testing.assert_allclose(fo.autofuse(f, check=True)(*args), f(*args), rtol=5e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 1e30])
@pytest.mark.parametrize("f", [softmax, jax.nn.relu, jax.nn.gelu, jax.nn.log_softmax])
def test_special_values(f, value):
    x = X.at[0, 0, 0].set(value).at[1].set(value)
    np.testing.assert_allclose(fo.autofuse(f)(x), f(x), rtol=1e-5, atol=1e-6)


# Reports ------------------------------------------------------------------------------------------


def left(f, *args):
    return [(m.pattern, m.reason) for m in fo.autofuse.report(f)(*args).missed]


USED = "the value is used elsewhere"


def used_bias(x):
    h = x + B
    return jax.nn.gelu(h), h


def used_sum(x, y):
    h = x + y
    return jax.nn.relu(h), h


@pytest.mark.parametrize(
    "f, args, found, missed",
    [
        (used_bias, (X,), ["gelu"], ("bias + gelu", USED)),
        (used_sum, (X, Y), ["relu"], ("add + relu", USED)),
        (
            lambda x, y: rms((x + y).astype(jnp.float32), B),
            (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)),
            ["rms_norm"],
            ("add + rms_norm", "the sum is bfloat16, the result float32"),
        ),
        (
            lambda x, where: softmax(jnp.where(where, x, -1e9)),
            (X, MASK),
            ["softmax"],
            ("where + softmax", "the mask is not known, or may leave a row empty"),
        ),
        (
            lambda x, w: (lambda z: (label_loss(z, LABELS), z.max()))(x @ w.T),
            (X, W),
            ["cross_entropy"],
            ("linear_cross_entropy", USED),
        ),
        (
            lambda x, y: -(jax.nn.log_softmax(x) * jax.nn.softmax(y)).sum(-1),
            (X, Y),
            ["softmax", "log_softmax"],
            (
                "cross_entropy of one_hot",
                "the weights of the classes are no one_hot of integer labels",
            ),
        ),
        (
            lambda x: x.reshape(4, 6, 5, 8).transpose(0, 2, 1, 3),
            (X,),
            [],
            ("split_heads", "no bias is added before the heads are split"),
        ),
        (
            lambda x: (x + jnp.tile(B, 3)).reshape(4, 6, 3, 5, 8).transpose(2, 0, 3, 1, 4)[0],
            (jnp.tile(X, 3),),
            [],
            ("split_heads", "not all of queries, keys and values are split like this"),
        ),
        (
            lambda x: jnp.where(jax.random.bernoulli(KEY, 0.75, x.shape), x / 0.75, 0),
            (X,),
            [],
            ("dropout", "pass dropout=True; its masks are others"),
        ),
    ],
)
def test_a_smaller_pattern_hides_no_larger_one(f, args, found, missed):
    for _ in range(2):  # the second time with what is known
        assert sorted(names(f, *args)) == sorted(found)
        assert left(f, *args) == [missed]


def test_equal_rows_of_a_report_are_one():
    def f(x):
        for i in range(3):
            x = jnp.sin(dropped(softmax(x), jax.random.fold_in(KEY, i)))
        return x

    report = fo.autofuse.report(f)(X)
    assert len(report.replaced) == len(report.missed) == 3
    text = str(report)
    assert "3 patterns replaced" in text and text.count("softmax (3 times)") == 1
    assert "3 patterns left" in text and text.count("dropout (3 times)") == 1


@pytest.mark.parametrize(
    "derived", [jax.grad, jax.value_and_grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))]
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_gradient_is_explained(derived, jitted):
    def f(x):
        return jnp.sum(jnp.sin(softmax(x)))

    g = derived(jax.jit(f)) if jitted else derived(f)
    with pytest.warns(UserWarning, match=r"autofuse: nothing is replaced: .*put grad around"):
        report = fo.autofuse.report(g)(X)
    assert not report.replaced and report.missed[0].pattern == "derivative"
    assert "jax.grad(autofuse(f))" in report.missed[0].reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fo.autofuse.report(lambda x: (g(x), softmax(x[0])))(X)
        assert len(report.replaced) == 1 and report.missed[0].pattern == "derivative"
        assert "derivative" not in [m.pattern for m in fo.autofuse.report(f)(X).missed]


def test_the_report_is_a_table():
    text = str(fo.autofuse.report(lambda x: jax.nn.gelu(softmax(x)))(X))
    assert "2 patterns replaced" in text and "softmax  float32[4,6,40]" in text


def test_the_report_of_a_sum_of_products():
    """The product is no array of the program."""
    f, args, _ = PROGRAMS["rms by einsum"]
    assert fo.autofuse.report(f)(*args).replaced[0].saves == X.nbytes

    def other(x):
        return x * jax.lax.rsqrt(jnp.einsum("...d,...d", x, x)[..., None] / 39 + 1e-6)

    (missed,) = fo.autofuse.report(other)(X).missed
    assert missed.equation == "dot_general(float32[4,6,40], float32[4,6,40])"


def test_equal_programs_are_matched_once(monkeypatch):
    from jax_fastops.autofuse import _match

    count = []

    class Counted(_match.Matcher):
        def __init__(self, *args):
            count.append(self)
            super().__init__(*args)

    monkeypatch.setattr(_match, "Matcher", Counted)

    def matches(number, layers=1):
        def f(x):
            for _ in range(layers):
                x = x + jax.nn.gelu(by_moments(x, B, C) @ jnp.ones((40, 40)) + number * B)
            return x

        count.clear()
        jax.make_jaxpr(lambda x: fo.autofuse(f)(x))(X)
        return len(count)

    assert matches(3.25) > 0
    assert matches(3.25) == 0
    assert matches(2.25, 3) == matches(1.25, 6) > 0


def test_a_norm_like_the_one_before_it_may_be_another():
    def f(x, first=lambda x: x):
        for eps, center in ((1e-6, first), (0.5, lambda x: x - B), (1e-6, lambda x: x - B)):
            y = center(x)
            y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
            x = x + y @ jnp.eye(40)
        return x

    centered = functools.partial(f, first=lambda x: x - x.mean(-1, keepdims=True))
    for g, first in ((f, "rms_norm"), (centered, "layer_norm")):
        found = [e.primitive.name for e in jax.make_jaxpr(fo.autofuse(g))(X).eqns]
        norms = [name.removeprefix("fastops_") for name in found if "norm" in name]
        assert norms == [first, "rms_norm", "rms_norm"]
        close(run(fo.autofuse(g), [X]), run(g, [X]), 3e-5)


@pytest.mark.parametrize("mapped", [False, True])
def test_rules_are_traced_once(mapped, monkeypatch):
    def f(x):
        return jax.nn.relu(jax.nn.relu(jax.nn.relu(x) @ jnp.ones((40, 40))))

    f = jax.vmap(f) if mapped else f
    assert names(f, X) == ["relu"] * 3
    monkeypatch.setattr(_meaning, "_traced_rule", None)
    assert names(f, X) == ["relu"] * 3


# Axes of size 1 -----------------------------------------------------------------------------------


def heads_of(x, bias, heads):
    y = x + bias
    return y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads).swapaxes(-3, -2)


def one_sequence(x, bias, heads):
    """Without the batch of size 1."""
    return (x + bias).reshape(x.shape[1], heads, -1).transpose(1, 0, 2)


def queries_keys_values(x, bias, heads):
    y = (x + bias).reshape(*x.shape[:-1], 3, heads, -1)
    return tuple(jnp.moveaxis(y, -3, 0).swapaxes(-3, -2))


def sliced(x, bias, heads):
    """As `queries_keys_values`."""
    parts = jnp.split(x + bias, 3, -1)
    return tuple(p.reshape(*p.shape[:-1], heads, -1).transpose(0, 2, 1, 3) for p in parts)


def merged(x, bias, heads):
    del bias, heads
    y = x.swapaxes(1, 2)
    return y.reshape(*y.shape[:2], -1)


def merged_sequence(x, bias, heads):
    """Without the batch of size 1."""
    return merged(x, bias, heads)[0]


def merged_into_rows(x, bias, heads):
    del bias, heads
    return x.transpose(0, 2, 1, 3).reshape(x.shape[2], -1)


@pytest.mark.jax
@pytest.mark.parametrize("batch, length, heads", [(1, 6, 4), (2, 6, 1), (2, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("f", [heads_of, queries_keys_values, sliced, merged])
def test_heads_with_axes_of_size_1(f, batch, length, heads):
    check_heads(f, batch, length, heads)


@pytest.mark.parametrize("f", [one_sequence, merged_sequence, merged_into_rows])
@pytest.mark.parametrize("length, heads", [(6, 4), (6, 1), (1, 4)])
def test_heads_of_one_sequence(f, length, heads):
    check_heads(f, 1, length, heads)


def check_heads(f, batch, length, heads):
    name = {"q": "bias + split_qkv_heads", "s": "bias + split_qkv_heads", "m": "merge_heads"}
    name = name.get(f.__name__[0], "bias + split_heads")
    width = 40 * heads * (3 if "qkv" in name else 1)
    rng = np.random.default_rng(0)
    shape = (batch, heads, length, 40) if name == "merge_heads" else (batch, length, width)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(width), jnp.float32)

    def g(x, bias):
        return f(x, bias, heads)

    nothing_moves = "qkv" not in name and 1 in (length, heads)
    assert names(g, x, bias) == ([] if nothing_moves else [name])
    close(run(fo.autofuse(g), (x, bias)), run(g, (x, bias)), 1e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x + B)[:, None],
        lambda x: (x + B).reshape(1, 4, 6, 40),
        lambda x: (x[:1] + B).reshape(6, 1, 40),
        lambda x: (x[:, :1] + B).transpose(1, 0, 2),
        lambda x: x[:, None, :, :].transpose(0, 3, 1, 2).reshape(4, 240),
    ],
)
def test_other_moves_of_axes_of_size_1(f):
    assert names(f, X) == []
    close(run(fo.autofuse(f), (X,)), run(f, (X,)), 1e-6)


# Settings -----------------------------------------------------------------------------------------


def forget():
    """Makes the next use of autofuse the first one of the process."""
    reductions = _pattern.Pattern.reductions
    for cached in (_pattern._traced, _pattern.compiled, reductions):
        cached.cache_clear()
    PatternRule.known.clear()
    PatternRule.tops.clear()
    _meaning._rules.clear()
    _kept.clear()


def _mesh(kind):
    types = (getattr(jax.sharding.AxisType, kind),)
    return jax.make_mesh((1,), ("data",), axis_types=types, devices=jax.devices()[:1])


STATES = {
    "patch": fo.patch,
    "xla": lambda: fo.use_implementation("xla"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "64 bits": x64,
    "precision": lambda: jax.default_matmul_precision("highest"),
    "eager": lambda: jax.disable_jit(True),
    "nans": lambda: jax.debug_nans(True),
    "leaks": jax.checking_leaks,
    "mesh": lambda: jax.set_mesh(_mesh("Explicit")),
    "auto mesh": lambda: jax.set_mesh(_mesh("Auto")),
}
SOME = {
    *("gelu", "exact gelu", "silu", "reglu", "softmax", "masked softmax", "log_softmax", "var"),
    *("residual rms", "loss", "one-hot loss", "masked sum", "linear loss, masked"),
}


def plain(name):
    """A program as one that no setting changes, with its operands and patterns."""
    f, args, found = PROGRAMS[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jaxpr_as_fun(jax.make_jaxpr(f)(*args)), args, found


@pytest.mark.jax
@pytest.mark.parametrize(
    "state", [pytest.param(s, marks=[pytest.mark.slow] * (s == "leaks")) for s in STATES]
)
def test_the_state_of_the_first_use_does_not_stay(state):
    """What is traced once for the process is traced without the settings of the caller."""
    programs = [plain(name) for name in sorted(SOME)]
    wanted = [found for _, _, found in programs]
    forget()
    with STATES[state]():
        inside = [names(f, *args) for f, args, _ in programs]
    assert [names(f, *args) for f, args, _ in programs] == wanted
    if state == "xla":
        assert not any(inside)
    else:
        assert inside == wanted


def test_our_own_code_takes_each_setting():
    forget()
    for name in RUNNABLE:
        f, args, found = plain(name)
        with strict():
            assert names(f, *args) == found, name
            if name in SOME:
                tolerance = of_products(3e-5) if "linear" in name else 3e-5
                close(run(fo.autofuse(f), args), run(f, args), tolerance)
            else:
                jax.make_jaxpr(lambda *a, f=f: run(fo.autofuse(f), a))(*args)


def test_the_function_of_the_user_is_traced_with_the_settings():
    with strict():
        for f, message in (
            (lambda x: softmax(x * B), "rank_promotion"),
            (lambda x: softmax(x * jnp.ones(X.shape, jnp.bfloat16)), "dtype_promotion"),
        ):
            for g in (fo.autofuse(f), jax.grad(lambda x, f=f: fo.autofuse(f)(x).sum())):
                with pytest.raises(Exception, match=message):
                    g(X)

        @jax.custom_jvp
        def with_rule(x):
            return x * 2

        with_rule.defjvp(lambda p, t: (with_rule(*p), t[0] * B))
        with pytest.raises(ValueError, match="rank_promotion"):
            jax.grad(fo.autofuse(lambda x: softmax(with_rule(x)).sum()))(X)


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.debug_infs])
def test_a_number_that_is_not_finite_raises_as_without_autofuse(setting):
    def f(x):
        return jnp.sum(softmax(x * 2) * (jnp.inf if setting is jax.debug_infs else 1))

    wrong = X.at[0, 0, 0].set(jnp.inf) if setting is jax.debug_nans else X
    calls = [lambda f: f, jax.jit, lambda f: jax.jit(jax.value_and_grad(f))]
    with setting(True):
        for call in calls:
            for g in (f, fo.autofuse(f)):
                with pytest.raises(FloatingPointError):
                    call(g)(wrong)
        if setting is jax.debug_nans:
            got = [jax.jit(jax.value_and_grad(fo.autofuse(f)))(X), fo.autofuse(f)(X)]
    if setting is jax.debug_nans:
        close(got, [jax.value_and_grad(f)(X), f(X)], 2e-5)


# Labels, views, and masks -------------------------------------------------------------------------


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_labels_that_are_no_class_in_optax(product, dtype):
    """The loss is NaN, and its gradient that of a logit that no class has."""
    loss = pytest.importorskip("optax").softmax_cross_entropy_with_integer_labels
    numbers = [0, 49, 50, 51, 1000, 2**31 - 1]
    labels = jnp.array(numbers + ([-1, -50, -51, -1000] if dtype == "int32" else [1] * 4), dtype)
    x = jax.random.normal(jax.random.key(0), (10, 40 if product else 50))

    def f(x, w):
        return loss(x @ w.T if product else x, labels)

    assert names(f, x, W) == (LINEAR if product else ["cross_entropy"])
    want, got = (jax.vjp(g, x, W) for g in (f, fo.autofuse(f)))
    rounding = of_products(2e-5) if product else 2e-5
    np.testing.assert_allclose(got[0], want[0], rtol=rounding)
    close(*(pull(jnp.ones(10)) for _, pull in (got, want)), rounding)
    assert np.isnan(got[0]).sum() == (6 if dtype == "int32" else 4)


@pytest.mark.parametrize("product", [False, True])
def test_a_masked_sum_with_nan_for_labels_that_are_too_large(product):
    labels = LABELS.at[0].set(jnp.array([-1, -100, 49, 50, 51, 1000]))

    def f(x, w):
        logits = x @ w.T if product else x[..., :1] * w[:, 0]
        here = jnp.arange(50) == labels[..., None]
        at_label = jnp.where(labels < 50, jnp.where(here, logits, 0).sum(-1), jnp.nan)
        return jax.nn.logsumexp(logits, -1) - at_label

    assert names(f, X, W) == (LINEAR if product else ["cross_entropy"])
    want, got = (jax.vjp(g, X, W) for g in (f, fo.autofuse(f)))
    np.testing.assert_allclose(got[0], want[0], rtol=of_products(2e-5))
    assert np.isnan(got[0]).sum() == 3
    close(*(pull(jnp.ones((4, 6))) for _, pull in (got, want)), of_products(2e-5))


def test_labels_that_are_no_class_in_a_masked_sum():
    f, (x, labels), _ = PROGRAMS["masked sum"]
    labels = labels.at[:2].set(-100)
    for value in (-jnp.inf, -1e30):
        y = x.at[..., 0].set(value)
        np.testing.assert_allclose(fo.autofuse(f)(y, labels), f(y, labels), rtol=1e-5)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.nn.softmax(x[jnp.zeros(4, jnp.int32)]),
        lambda x: jax.nn.softmax(x * jax.lax.div(jnp.int32(7), jnp.int32(2)).astype(jnp.float32)),
    ],
)
def test_what_looks_like_a_view_or_a_constant(f):
    close(fo.autofuse(f)(X), f(X), 1e-6)


def test_objects_of_nnx_are_updated():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    def step(model, optimizer, keys, x):
        x = x + jax.random.normal(keys.noise(), x.shape)
        optimizer.update(model, nnx.grad(lambda m: softmax(m(x))[..., 0].sum())(model))

    states = []
    for transform in (lambda f: f, fo.autofuse):
        model, keys = nnx.Linear(40, 4, rngs=nnx.Rngs(0)), nnx.Rngs(noise=1)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        for _ in range(2):
            transform(step)(model, optimizer, keys, X)
        states.append([nnx.to_pure_dict(nnx.state(o)) for o in (model, optimizer)])
        assert keys.noise.count[...] == 2
    close(*states, 1e-4)
    with pytest.raises(ValueError, match="adds a variable to a module, or changes"):
        fo.autofuse(lambda m: setattr(m, "out_features", 9))(model)


# Numbers, Refs, and what else other models need --------------------------------------------------


@pytest.mark.parametrize(
    "dtype, factor", [("bfloat16", 0.99), ("bfloat16", 0.9961), ("float16", 0.9985)]
)
def test_a_number_that_the_dtype_tells_from_another(dtype, factor):
    """Numbers that need no rounding must be equal."""
    x = (50 + X).astype(dtype)
    wide = x.astype(jnp.float32)

    def norm(x):
        centred = x - x.mean(-1, keepdims=True)
        var = (centred * centred).mean(-1, keepdims=True)
        return ((x - factor * x.mean(-1, keepdims=True)) * jax.lax.rsqrt(var + 1e-5)).astype(dtype)

    def loss(x):
        picked = jnp.take_along_axis(x, LABELS[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(x, -1) - factor * picked).astype(dtype)

    def gate(x):
        return x * jax.nn.sigmoid(factor * x)

    def interpolation(x):
        return factor * x + X.astype(dtype) * (Y.astype(dtype) - x)

    calls = (norm, wide), (loss, wide), (gate, x), (interpolation, x)
    assert [names(f, a) for f, a in calls] == [[], [], [], []]
    factor = 1.0
    assert [names(f, a) for f, a in calls] == [
        ["layer_norm"],
        ["cross_entropy"],
        ["silu"],
        ["lerp"],
    ]


@pytest.mark.parametrize("n", [64, 100, 128, 255, 257, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_numbers_that_the_dtype_rounds(dtype, n):
    def by_product(x):
        return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) * (1 / n) + 1e-5)

    def by_sum(x):
        return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + n * 1e-6) * n**0.5

    with x64(dtype == "float64"):
        x = jnp.ones((4, n), dtype)
        for f, name in (
            (jax.nn.gelu, "gelu"),
            (functools.partial(jax.nn.gelu, approximate=False), "gelu_exact"),
            (lambda x: 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5)), "gelu_exact"),
            (by_product, "rms_norm"),
            (by_sum, "rms_norm"),
        ):
            assert names(f, x) == [name], f


def test_other_numbers_of_gelu():
    """0.8 is not a rounding of the square root of 2 / pi, in any dtype."""
    for dtype in ("bfloat16", "float16", "float32"):
        x = X.astype(dtype)
        assert names(lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x**3))), x) == []


def test_check_finds_a_change_at_a_step():
    """Few elements are near one."""

    def f(x):
        return jnp.round(100 * softmax(x)) + next(wrong)

    wrong = iter([0, 0, 0])
    close(fo.autofuse(f, check=True)(X), jnp.round(100 * softmax(X)), 0.02)
    wrong = iter([40, 0, 0])
    with pytest.raises(ValueError, match="differs by"):
        fo.autofuse(f, check=True)(X)


def test_numbers_of_float32_in_float64():
    """They are others than those of gelu."""
    with x64():
        a, b = np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)
        x = jnp.linspace(-3, 3, 16).reshape(2, 8)
        assert names(lambda x: 0.5 * x * (1 + jnp.tanh(a * (x + b * x**3))), x) == []


def test_weights_of_both_ends():
    """With an infinity at the end whose weight is 0, this is NaN, and `lerp` is not."""
    assert names(lambda a, b, w: (1 - w) * a + w * b, X, X, X) == []


@pytest.mark.parametrize("body", ["fori_loop", "jit", "cond"])
def test_a_ref_in_a_body(body):
    if not hasattr(jax, "new_ref"):
        pytest.skip("jax.new_ref is of a later jax")

    def change(ref):
        ref[...] = softmax(ref[...] * 2)

    def f(x):
        ref = jax.new_ref(x)
        if body == "fori_loop":
            jax.lax.fori_loop(0, 2, lambda i, c: (change(ref), c)[1], 0)
        elif body == "jit":
            jax.jit(change)(ref)
        else:
            jax.lax.cond(x[0, 0, 0] < 9, lambda: change(ref), lambda: None)
        return ref[...]

    assert names(f, X) == []
    close(jax.jit(fo.autofuse(f))(X), jax.jit(f)(X), 1e-6)


def test_a_ref_from_outside():
    if not hasattr(jax, "new_ref"):
        pytest.skip("jax.new_ref is of a later jax")
    ref = jax.new_ref(jnp.zeros(1))

    def f(x):
        ref[...] = ref[...] + 1
        return softmax(x * ref[...])

    close(jax.jit(fo.autofuse(f))(X), softmax(X), 1e-6)
    assert ref[...] == 1


def test_check_of_results_that_cancel():
    def norm(x):
        return by_moments(x, B, C)

    for f in (
        lambda x: norm(x).mean(),
        lambda x: softmax(x).sum(-1) - 1,
        lambda x: norm(x) - norm(x + 1),
    ):
        close(fo.autofuse(f, check=True)(X), f(X), 1e-5)


def test_check_of_other_results():
    """Keys and complex numbers."""
    key = jax.random.key(3)
    got, keys = fo.autofuse(lambda x, k: (softmax(x), jax.random.split(k)), check=True)(X, key)
    close(got, softmax(X), 1e-6)
    assert (jax.random.key_data(keys) == jax.random.key_data(jax.random.split(key))).all()
    fo.autofuse(lambda x: jnp.fft.fft(softmax(x)), check=True)(X)
    factors = iter([1, 1j, 1j])
    with pytest.raises(ValueError, match="differs by"):
        fo.autofuse(lambda x: softmax(x) * (1 + next(factors)), check=True)(X)


def test_check_of_donated_arguments():
    close(fo.autofuse(jax.jit(softmax, donate_argnums=0), check=True)(X + 0), softmax(X), 1e-6)


def test_check_updates_modules_once():
    nnx = pytest.importorskip("flax.nnx")

    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] = self.count[...] + 1
            return softmax(x) * self.count[...]

    module = Counter()
    fo.autofuse(lambda m, x: m(x), check=True)(module, X)
    assert module.count[...] == 1


def test_a_variable_of_nnx_is_updated():
    nnx = pytest.importorskip("flax.nnx")

    def f(v, x):
        v[...] = v[...] + 1
        return softmax(x)

    variable = nnx.Variable(jnp.ones(()))
    fo.autofuse(f)(variable, X)
    assert variable[...] == 2


@pytest.mark.parametrize("kind", ["numbers", "factors", "views"])
def test_long_chains(kind):
    """They are deeper than Python's stack."""
    depth = 400

    def f(x):
        s = jnp.float32(1)
        for i in range(depth):
            if kind == "numbers":
                s = s * 0.999
            elif kind == "factors":
                x = x * 1.001
            else:
                x = x.reshape(X.shape if i % 2 else (24, 40))
        return softmax(x * s)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + depth)
    try:
        jaxpr = jax.make_jaxpr(lambda x: fo.autofuse(f)(x))(X).jaxpr
    finally:
        sys.setrecursionlimit(limit)
    found = [e.primitive.name for e in jaxpr.eqns if e.primitive.name.startswith("fastops")]
    assert len(found) == 1, found


@pytest.mark.parametrize(
    "other, f",
    [
        (lambda a, b: a + b * (b - b), lambda a, b: a + b * (b - a)),
        (
            lambda a, b: a * jax.lax.rsqrt((a**4).mean(-1, keepdims=True) + 1e-6),
            lambda a, b: rms(a, C),
        ),
    ],
)
def test_what_was_traced_before_does_not_matter(other, f):
    PatternRule.known.clear()
    PatternRule.tops.clear()
    jaxprs = [jax.make_jaxpr(lambda *x, f=f: fo.autofuse(f)(*x))(X, Y) for f in (other, f)]
    calls = [[e.primitive.name.startswith("fastops") for e in j.jaxpr.eqns] for j in jaxprs]
    assert not any(calls[0]) and any(calls[1]), jaxprs


def test_a_result_more_does_not_change_later_matches():
    """The smaller pattern, which stays where its inner value is a result, is not tried first."""

    def norm(x, more):
        deviation = x - x.mean((0, 1))
        n = deviation * jax.lax.rsqrt((deviation**2).mean((0, 1)) + 1e-5)
        y = jax.nn.relu(n * C + C)
        return (y, n) if more else y

    for before in (), (True,):
        PatternRule.known.clear()
        for more in (*before, False):
            report = fo.autofuse.report(functools.partial(norm, more=more))(X)
        assert [r.pattern for r in report.replaced] == ["batch_norm + relu"]


def test_named_scopes_stay():
    def f(x):
        with jax.named_scope("encoder"):
            return jnp.sin(softmax(x))

    jaxpr = jax.make_jaxpr(lambda x: fo.autofuse(f)(x))(X).jaxpr
    assert {str(e.source_info.name_stack) for e in jaxpr.eqns} == {"encoder"}


# The package -------------------------------------------------------------------------------------


def test_the_package_and_the_function_have_one_name():
    """As for each op, the attribute is the function, and the module is where rules are imported."""
    package = importlib.import_module("jax_fastops.autofuse")
    importlib.import_module("jax_fastops.autofuse._rule")
    assert fo.autofuse is package.autofuse and inspect.isclass(fo.autofuse)
    assert inspect.ismodule(package) and all(hasattr(package, name) for name in package.__all__)
    assert "Traces ``fn``" in pydoc.render_doc(fo.autofuse)
    report = fo.autofuse.report(softmax)(X)
    for x in (fo.autofuse, report):
        assert pickle.loads(pickle.dumps(x)) == x


def _absolute(x):
    return fo.relu(x) + fo.relu(-x)


class AbsoluteRule(Rule):
    def match(self, value):
        if value.node.name != "abs":
            return None
        if value.shape == (1,):
            return self.miss("abs", value, "it is small")
        return self.rewrite("abs", _absolute, [value], {"x": value.node.inputs[0]})


def test_a_rule_of_a_user():
    def f(x):
        return softmax(jnp.abs(x) * 2) + jnp.abs(x[0, 0, :1])

    RULES.insert(0, AbsoluteRule)
    try:
        assert names(f, X) == ["abs", "scale + softmax"]
        assert left(f, X) == [("abs", "it is small")]
        close(run(fo.autofuse(f), (X,)), run(f, (X,)), 2e-5)
    finally:
        RULES.remove(AbsoluteRule)
    assert names(f, X) == ["scale + softmax"]
