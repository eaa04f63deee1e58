"""`autofuse`: more forms of norms, activations and heads, and what is nearly one of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autofuse_programs import IMAGES, RNG, B, X, Y, mean_of, rms
from harness.compat import make_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = pytest.mark.usefixtures("native")
SCALE, SHIFT = IMAGES[0, 0, 0], IMAGES[0, 0, 1]
NARROW = jnp.bfloat16


def check(f, args, found, tolerance=3e-5):
    """The patterns are replaced. Values and gradients are equal within rounding."""
    assert [r.pattern for r in fo.autofuse.report(f)(*args).replaced] == found

    def run(f):
        def loss(*args):
            results = jax.tree.leaves(f(*args))
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results), results

        return jax.jit(jax.grad(loss, tuple(range(len(args))), has_aux=True))(*args)

    for got, want in zip(*map(jax.tree.leaves, (run(fo.autofuse(f)), run(f))), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        scale = max(1.0, np.max(np.abs(want), initial=0))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


# Statistics in several steps ----------------------------------------------------------------------


def normalized(x, mean, var, scale, bias):
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def by_means(x, scale, bias):
    mean = jnp.mean(jnp.mean(x, 0), (0, 1))
    return normalized(x, mean, jnp.mean(jnp.mean((x - mean) ** 2, 0), (0, 1)), scale, bias)


def by_means_of_squares(x, scale, bias):
    mean, square = (x.mean(2).mean((0, 1), keepdims=True)[0, 0] for x in (x, x * x))
    var = jnp.maximum(square - mean**2, 0)
    return jax.nn.relu(normalized(x, mean, var, scale, bias)), mean, var


def by_sums(x, scale, bias):
    n = x.size // x.shape[-1]
    mean = x.sum(0).sum(1).sum(0) / n
    return normalized(x, mean, (jnp.square(x - mean)).sum((1, 2)).sum(0) / n, scale, bias)


def channels_first(x, scale, bias):
    """Each step keeps its axes, and the second one is of a transposed array."""
    mean = x.mean((2, 3), keepdims=True).T.mean(-1, keepdims=True).reshape(-1, 1, 1)
    var = ((x - mean) ** 2).mean(0).mean((1, 2))
    return normalized(x, mean, *(v[:, None, None] for v in (var, scale, bias)))


def narrow_steps(x, scale, bias):
    """In float32, of a bfloat16 array."""
    return by_means(x.astype(jnp.float32), scale, bias).astype(x.dtype)


def mapped(x, scale, bias, axis_name="batch"):
    """As Haiku with ``cross_replica_axis``."""

    def each(x):
        mean, square = jax.lax.pmean((x.mean((0, 1)), (x * x).mean((0, 1))), axis_name)
        return normalized(x, mean, square - mean**2, scale, bias)

    return jax.vmap(each, axis_name=axis_name)(x)


def mapped_twice(x, scale, bias):
    def each(x):
        mean = jax.lax.pmean(x.mean(0), ("a", "b"))
        var = jax.lax.pmean(((x - mean) ** 2).mean(0), ("a", "b"))
        return normalized(x, mean, var, scale, bias)

    return jax.vmap(jax.vmap(each, axis_name="b"), axis_name="a")(x)


STATISTICS = {
    "means": (by_means, ["batch_norm"]),
    "means of squares": (by_means_of_squares, ["batch_norm + relu"]),
    "sums": (by_sums, ["batch_norm"]),
    "pmean under vmap": (mapped, ["batch_norm"]),
    "pmean of two axes": (mapped_twice, ["batch_norm"]),
}


@pytest.mark.jax
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_in_several_steps(name):
    f, found = STATISTICS[name]
    check(f, (IMAGES, SCALE, SHIFT), found)


@pytest.mark.jax
def test_statistics_of_other_layouts():
    check(channels_first, (IMAGES.transpose(0, 3, 1, 2), SCALE, SHIFT), ["batch_norm"])
    check(narrow_steps, (IMAGES.astype(NARROW), SCALE, SHIFT), ["batch_norm"], 0.02)


def squares(x, *steps):
    """The norm of deviations from a mean over all axes, whose variance is computed in steps."""
    mean = x.mean((0, 1, 2))
    square = (x - mean) ** 2
    for step in steps:
        square = step(square)
    return (x - mean) * jax.lax.rsqrt(square + 1e-5)


@pytest.mark.parametrize(
    "steps",
    [
        (lambda v: v.mean(0), lambda v: v.mean(0)),  # one axis is left
        (lambda v: v.mean(0), lambda v: v.sum((0, 1)) / 24),
        (lambda v: v.mean(0), lambda v: v.max((0, 1))),
        (lambda v: v.max(0), lambda v: v.mean((0, 1))),
        (lambda v: v.mean(0), lambda v: jnp.sqrt(v), lambda v: v.mean((0, 1))),
        (lambda v: v.mean(0), lambda v: v[:, :2], lambda v: v.mean((0, 1))),
        (lambda v: v.mean(0), lambda v: v[:, ::-1] + 1, lambda v: v.mean((0, 1))),
        (lambda v: v.mean((0, 3)), lambda v: v.mean(0), lambda v: v.mean(0)),
        (lambda v: v.mean(0).astype(NARROW), lambda v: v.astype(jnp.float32).mean((0, 1))),
        (lambda v: v.sum((0, 1)), lambda v: jnp.tile(v, (2, 1)).sum(0) / 50),
    ],
)
def test_other_steps(steps):
    found = [r.pattern for r in fo.autofuse.report(squares)(IMAGES, *steps).replaced]
    assert "batch_norm" not in found
    want, got = squares(IMAGES, *steps), fo.autofuse(squares)(IMAGES, *steps)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_step_that_is_used_elsewhere_stays():
    """It is small, and computed again."""

    def f(x):
        first = x.mean((1, 2))
        mean = first.mean(0)
        return normalized(x, mean, ((x - mean) ** 2).mean((1, 2)).mean(0), SCALE, SHIFT), first

    check(f, (IMAGES,), ["batch_norm"])


@pytest.mark.jax
def test_batch_norm_of_equinox():
    eqx = pytest.importorskip("equinox")
    try:
        norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
    except TypeError:
        pytest.skip("an older Equinox")
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (SCALE, SHIFT))

    def f(x):
        state = eqx.nn.State(norm)
        each = jax.vmap(lambda x: norm(x, state), axis_name="batch", out_axes=(0, None))
        y, after = each(x)
        return y, [s for s in jax.tree.leaves(after) if s.dtype == y.dtype]

    check(f, (IMAGES.transpose(0, 3, 1, 2),), ["batch_norm"])


def test_deviations_that_are_computed_twice():
    def f(x):
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) * (x - mean)).mean(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(jnp.maximum(0, var) + 1e-5), x[0]

    check(f, (X,), ["layer_norm"])
    check(lambda x: f(jnp.sin(x)), (X,), ["layer_norm"])


@pytest.mark.parametrize(
    "square",
    [
        lambda x, mean: (x - mean) * (x - 2 * mean),
        lambda x, mean: (x - mean) * (mean - x),
        lambda x, mean: (x - mean) * (x[::-1] - mean),
    ],
)
def test_other_variances(square):
    def f(x):
        mean = x.mean(-1, keepdims=True)
        var = jnp.maximum(square(x, mean).mean(-1, keepdims=True), 0)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5)

    check(f, (X,), [])


@pytest.mark.parametrize("scale", [lambda v: v, lambda v: jnp.sin(v)])
def test_a_scale_that_is_computed_from_the_variance(scale):
    """The op gives the variance, so it cannot have what depends on it as an operand."""

    def f(x):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        inverse = jax.lax.rsqrt(var + 1e-5)
        return (x - mean) * (inverse * scale(inverse)), mean, var

    check(f, (IMAGES,), [])


# RMS norms ----------------------------------------------------------------------------------------


def rms_before_scale(x, scale):
    """As in Llama: the normalized array is cast before the product with the scale."""
    h = x.astype(jnp.float32)
    return scale * (h * jax.lax.rsqrt(mean_of(h * h) + 1e-6)).astype(x.dtype)


def rms_of_one_plus_scale(x, scale):
    """As in Gemma."""
    return rms(x.astype(jnp.float32), 1 + scale.astype(jnp.float32)).astype(x.dtype)


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("of_scale", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "f",
    [
        rms_before_scale,
        rms_of_one_plus_scale,
        lambda x, s: rms_before_scale(x, 1 + s),
        lambda x, s: rms(x, s.astype(x.dtype)),
        lambda x, s: rms(x.astype(jnp.float32), s).astype(x.dtype),
    ],
)
def test_rms_norms_and_their_casts(f, dtype, of_scale):
    """A kernel rounds once, at the end, also where the program rounds before the scale, too.

    If the result is wider than what is rounded, the op gives what is rounded.
    """
    args = X.astype(dtype), B.astype(of_scale)
    check(f, args, ["rms_norm"], 3e-5 if {dtype, of_scale} == {"float32"} else 0.05)
    call = fo.explain(fo.autofuse(f))(*args).calls[0]
    wider = (dtype, of_scale) == ("bfloat16", "float32") and f(*args).dtype == jnp.float32
    assert len(call.operands) == (1 if wider else 2)


# Activations --------------------------------------------------------------------------------------


ACTIVATIONS = {
    "quick_gelu": [
        lambda x: x * jax.nn.sigmoid(1.702 * x),
        lambda x: jax.lax.logistic(x * 1.702) * x,
    ],
    "mish": [
        jax.nn.mish,
        lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        lambda x: jnp.tanh(jnp.logaddexp(x, 0.0)) * x,
    ],
}
FORMS = [(name, f) for name, functions in ACTIVATIONS.items() for f in functions]


@pytest.mark.jax
@pytest.mark.parametrize("name, f", FORMS)
def test_activations(name, f):
    x = X.at[0, 0, :6].set(jnp.array([0.0, -0.0, 30.0, -30.0, 90.0, -90.0]))
    check(f, (x,), [name])
    check(lambda x, b: f(b + x), (x, B), [f"bias + {name}"])
    check(lambda x, y: y * f(x), (x, Y), [f"{name} * up"])
    check(jax.vmap(lambda x: f(x[..., :20]) * x[..., 20:]), (x,), [f"split + {name} * up"])
    check(f, (x.astype(NARROW),), [name], 0.02)


@pytest.mark.parametrize("name, f", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_special_values_of_activations(name, f, value):
    x = X.at[0, 0, 0].set(value)
    np.testing.assert_allclose(fo.autofuse(f)(x), f(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * jax.nn.sigmoid(1.71 * x),
        lambda x: x * jax.nn.sigmoid(-1.702 * x),
        lambda x: x * jax.nn.sigmoid(1.702 * x + 1e-3),
        lambda x: (x + 1e-3) * jax.nn.sigmoid(1.702 * x),
        lambda x: x * jnp.tanh(1.01 * jax.nn.softplus(x)),
        lambda x: x * jnp.tanh(jax.nn.softplus(2 * x)),
        lambda x: x * jnp.tanh(jnp.logaddexp(x, 0.1)),
        lambda x: x * jnp.tanh(jnp.logaddexp(x, x[::-1])),
        lambda x: x[::-1] * jnp.tanh(jax.nn.softplus(x)),
        lambda x: x * jnp.tanh(jnp.log1p(jnp.exp(x))),  # its gradient is NaN from 89 on
    ],
)
def test_near_misses_of_activations(f):
    check(f, (X,), [])


@pytest.mark.parametrize("bias", [None, SHIFT])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu])
def test_an_activation_of_a_convolution_stays(activation, bias):
    """XLA fuses it into the convolution, or with what follows."""

    def f(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return activation(y if bias is None else y + bias) @ w[0, 0]

    args = IMAGES, jnp.ones((3, 3, 8, 8))
    name = activation.__name__
    assert name in fo.autofuse.report(f)(*args).replaced[0].pattern
    with fo.use_implementation("auto"):
        report = fo.autofuse.report(f)(*args)
    reason = "XLA fuses it with its neighbors"
    assert not report.replaced and (name, reason) in [(m.pattern, m.reason) for m in report.missed]


# Heads --------------------------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize(
    "f, found",
    [
        (lambda x, b: (x + b).reshape(4, 6, 5, 8).transpose(0, 2, 1, 3), "bias + split_heads"),
        (
            lambda x, b: tuple(
                jnp.tile(x + b, 3).reshape(4, 6, 3, 5, 8).transpose(2, 0, 3, 1, 4) * 1
            ),
            None,
        ),
        (
            lambda x, b: x.reshape(4, 5, 6, 8).transpose(0, 2, 1, 3).reshape(24, 40) * b,
            "merge_heads",
        ),
        (
            lambda x, b: x.reshape(20, 6, 8).reshape(4, 5, 6, 8).swapaxes(1, 2).reshape(24, -1) * b,
            "merge_heads",
        ),
        (lambda x, b: (x + b).reshape(6, 4, 5, 8).transpose(0, 2, 1, 3), "bias + split_heads"),
        (lambda x, b: (x + b).reshape(4, 6, 5, 8).transpose(0, 2, 3, 1), None),
        (lambda x, b: (x + b).reshape(4, 6, 5, 8).transpose(1, 2, 0, 3), None),
        (lambda x, b: x.reshape(4, 5, 6, 8).transpose(0, 2, 1, 3).reshape(48, 20), None),
    ],
)
def test_heads_of_flat_tokens(f, found):
    """The product is of tokens without a batch."""
    check(f, (X.reshape(24, 40), B), [found] if found else [])


def test_queries_keys_and_values_of_flat_tokens():
    def f(x, b):
        parts = jnp.split(x + b, 3, -1)
        return tuple(jnp.sin(p.reshape(4, 6, 5, 8).transpose(0, 2, 1, 3)) for p in parts)

    check(f, (jnp.tile(X.reshape(24, 40), 3), jnp.tile(B, 3)), ["bias + split_qkv_heads"])


# Heads that are merged into the batch -------------------------------------------------------------


T, N, H = 6, 5, 8
MASK = jnp.ones((4, T), bool).at[1, 4:].set(False)
LOWER = np.tril(np.ones((T, T), bool))
BIAS = jnp.asarray(RNG.standard_normal((1, N, T, T)), jnp.float32)


def split(x, order=(0, 2, 1, 3)):
    x = x.reshape(-1, T, N, H).transpose(order)
    return x.reshape(-1, *x.shape[2:])


def merge(y):
    return y.reshape(-1, N, T, H).swapaxes(1, 2).reshape(-1, T, N * H)


def attend(x, y, change=lambda s: s, split=split):
    q, k, v = split(x), split(y), split(x * y)
    weights = jax.nn.softmax(change(q @ k.swapaxes(1, 2) * H**-0.5))
    return merge(weights @ v)


def apart(change):
    """A change of scores as ``[batch, heads, length, length]``."""
    return lambda s: change(s.reshape(-1, N, T, T)).reshape(s.shape)


MERGED = {
    "plain": lambda s: s,
    "causal": lambda s: jnp.where(LOWER, s, -1e9),
    "repeated mask": lambda s: jnp.where(jnp.repeat(MASK, N, 0)[:, None], s, -1e9),
    "mask": apart(lambda s: jnp.where(MASK[:, None, None], s, -1e9)),
    "bias": apart(lambda s: s + BIAS),
    "bias and causal": lambda s: jnp.where(LOWER, apart(lambda s: s + BIAS)(s), -1e9),
    "merged bias": lambda s: s + jnp.tile(BIAS[0], (4, 1, 1)),
}


@pytest.mark.jax
@pytest.mark.parametrize("name", MERGED)
def test_attention_with_merged_heads(name):
    """The op has batch and heads apart, so it reads and writes heads in their place."""
    check(lambda x, y: attend(x, y, MERGED[name]), (X, Y), ["attention"])
    f = fo.autofuse(lambda x, y: attend(x, y, MERGED[name]))
    (call,) = fo.explain(f)(X, Y).calls
    assert call.operands[0] == "float32[4,5,6,6]"  # of the softmax


def test_softmax_of_merged_heads():
    """Only the products are of merged arrays."""

    def f(x, y):
        q, k, v = split(x), split(y), split(x * y)
        scores = jnp.einsum("ath,ash->ats", q, k).reshape(4, N, T, T)
        weights = jax.nn.softmax(jnp.where(MASK[:, None, None], scores, -1e30))
        return merge(jnp.einsum("ats,ash->ath", weights.reshape(4 * N, T, T), v))

    check(f, (X, Y), ["attention"])


def test_grouped_heads_that_are_merged():
    def repeated(x):
        x = x.reshape(4, T, 2, 4, 5)[:, :, :, 0]
        return jnp.repeat(x, 4, 2).transpose(0, 2, 1, 3).reshape(32, T, 5)

    def f(x, y):
        q = x.reshape(4, T, 8, 5).transpose(0, 2, 1, 3).reshape(32, T, 5)
        y = jax.nn.softmax(q @ repeated(y).swapaxes(1, 2)) @ repeated(y * y)
        return y.reshape(4, 8, T, 5).swapaxes(1, 2).reshape(4, T, 40)

    check(f, (X, Y), ["attention"])


@pytest.mark.parametrize(
    "change",
    [
        MERGED["plain"],
        lambda s: jnp.where(jnp.tile(MASK, (N, 1))[:, None], s, -1e9),
        lambda s: (s.reshape(N, 4, T, T) + BIAS[0][:, None]).reshape(s.shape),
        lambda s: (s.reshape(4, N, T, T) + BIAS).reshape(s.shape),  # of the wrong heads
        lambda s: s + jnp.tile(BIAS[0], (4, 1, 1)),
    ],
)
def test_heads_before_the_batch(change):
    """Whatever is replaced, the values are those of the program."""

    def f(x, y):
        return attend(x, y, change, lambda x: split(x, (2, 0, 1, 3)))

    found = [r.pattern for r in fo.autofuse.report(f)(X, Y).replaced]
    assert any("attention" in name or "softmax" in name for name in found)
    check(f, (X, Y), found)


@pytest.mark.parametrize(
    "f",
    [
        lambda q, k, v: (
            jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v.reshape(4, N, T, H)[::-1].reshape(v.shape)
        ),
        lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v[::-1],
        lambda q, k, v: (
            jax.nn.softmax((q @ k.swapaxes(1, 2)).reshape(N, 4, T, T), 0).reshape(20, T, T) @ v
        ),
        lambda q, k, v: (
            jax.nn.softmax((q @ k.mT).reshape(4, N, T, T).swapaxes(2, 3)).reshape(20, T, T) @ v
        ),
        lambda q, k, v: jax.nn.softmax((q @ k.mT).reshape(4, N * T, T)).reshape(20, T, T) @ v,
        lambda q, k, v: (
            jax.nn.softmax((q @ k.mT).reshape(5, 4, T, T).swapaxes(0, 1).reshape(20, T, T)) @ v
        ),
    ],
)
def test_other_merged_heads(f):
    def g(x, y):
        return merge(f(split(x), split(y), split(x * y)))

    found = [r.pattern for r in fo.autofuse.report(g)(X, Y).replaced]
    check(g, (X, Y), found)


@pytest.mark.parametrize(
    "sizes", [(1, 6, 5, 8), (4, 6, 1, 40), (4, 1, 5, 8), (2, 5, 5, 5), (4, 4, 4, 4)]
)
def test_merged_heads_of_other_sizes(sizes):
    b, t, n, h = sizes
    x, y = jax.random.normal(jax.random.key(1), (2, b, t, n * h))

    def f(x, y):
        q, k, v = (
            z.reshape(b, t, n, h).transpose(0, 2, 1, 3).reshape(b * n, t, h) for z in (x, y, x * y)
        )
        w = jax.nn.softmax(jnp.einsum("ath,ash->ats", q, k))
        return jnp.einsum("ats,ash->ath", w, v).reshape(b, n, t, h).swapaxes(1, 2).reshape(x.shape)

    found = [r.pattern for r in fo.autofuse.report(f)(x, y).replaced]
    check(f, (x, y), found)


# What a transposition in a reshape hides ----------------------------------------------------------


def column_major(x, shape):
    return jax.lax.reshape(x, shape, dimensions=tuple(range(x.ndim))[::-1])


def one_hot_in_columns(x):
    targets = jax.nn.one_hot(jnp.arange(x.shape[-1]) % 5, x.shape[-1])
    return -jnp.sum(targets.ravel(order="F") * jax.nn.log_softmax(x).ravel())


def logits_in_another_order(x):
    logits = jax.lax.reshape(x @ x[0].T, (36, 6), dimensions=(1, 0, 2))
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(36) % 6).sum()


def mask_in_another_order(x):
    mask = column_major(jnp.tril(jnp.ones((6, 6), bool)), (6, 6))
    scores = jnp.where(mask, x @ x.mT / 3, -jnp.inf)
    return jax.nn.softmax(scores) @ x


def scores_in_another_order(x):
    scores = jax.lax.reshape(
        jnp.einsum("bnth,bnsh->bnts", x, x), (36, 6, 6), dimensions=(1, 0, 2, 3)
    )
    return jax.nn.softmax(scores) @ x.reshape(36, 6, 8)


@pytest.mark.parametrize(
    "f, shape",
    [
        (one_hot_in_columns, (8, 8)),
        (logits_in_another_order, (6, 6, 6)),
        (mask_in_another_order, (6, 6, 6)),
        (scores_in_another_order, (6, 6, 6, 8)),
    ],
)
def test_a_reshape_that_transposes(f, shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    found = [r.pattern for r in fo.autofuse.report(f)(x).replaced]
    check(f, (x,), found)


# Bodies in shard_map ------------------------------------------------------------------------------

BODIES = {
    "relu": jax.nn.relu,
    "scan": lambda x: jax.lax.scan(lambda c, _: (jax.nn.gelu(c), None), x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x.shape[0] > 1, jax.nn.softmax, lambda x: x, x),
    "checkpoint": jax.checkpoint(lambda x: jax.nn.gelu(x) * x),
}


@pytest.mark.jax
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_bodies_in_shard_map(name, outside):
    mesh, body = make_mesh({"a": 2}, AxisType.Auto), BODIES[name]
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    f = fo.autofuse(over(body)) if outside else over(fo.autofuse(body))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
    np.testing.assert_allclose(jax.jit(f)(x), body(x), atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: f(x).sum()))(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: body(x).sum())(x), atol=1e-5)


@pytest.mark.jax
def test_statistics_that_vary_over_fewer_axes_than_the_scale():
    """A call's mean would vary over the axis of the scale, and ``out_specs`` would not have it."""

    def body(x, scale):
        mean = x.mean(0)
        variance = jnp.square(x - mean).mean(0)
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale[0]
        return jax.lax.psum(y, "a"), mean, variance

    specs = dict(in_specs=(P(), P("a")), out_specs=(P(), P(), P()))
    over = jax.shard_map(body, mesh=make_mesh({"a": 2}, AxisType.Auto), **specs)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
    args = x, jnp.ones((2, 64))
    for mine, plain in zip(jax.jit(fo.autofuse(over))(*args), over(*args), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)
