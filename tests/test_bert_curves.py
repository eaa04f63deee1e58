"""Losses of whole trainings, with our ops and in plain JAX with the same masks of dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo
from jax_fastops.models import bert

optax = pytest.importorskip("optax")

BATCH, SEQUENCE, VOCABULARY, MASKED = 16, 24, 53, 0


def config_of(dtype: str, dropout: float) -> bert.Config:
    return bert.Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        layers=2,
        heads=4,
        intermediate_size=128,
        positions=SEQUENCE,
        dropout=dropout,
        attention_dropout=dropout,
        attention="softmax",
        dtype=dtype,
    )


def sentences(key):
    """Each word says which one follows. Some are masked, and the loss is that of finding them."""
    starts, share = jax.random.split(key)
    first = jax.random.randint(starts, (BATCH,), 1, VOCABULARY)

    def follow(word, _):
        return 1 + (7 * word + 3) % (VOCABULARY - 1), word

    words = jax.lax.scan(follow, first, length=SEQUENCE)[1].T
    hidden = jax.random.bernoulli(share, 0.15, words.shape)
    return jnp.where(hidden, MASKED, words), jnp.where(hidden, words, -1)


@functools.partial(jax.jit, static_argnames=("config", "ops", "steps"))
def training(params, *, config: bert.Config, ops: bert.Ops, steps: int):
    """The loss of each step."""
    optimise = optax.adamw(optax.warmup_constant_schedule(0.0, 2e-3, steps // 10))
    padding = jnp.arange(SEQUENCE) < SEQUENCE - jnp.arange(BATCH)[:, None] % 5

    def loss(params, tokens, labels, key):
        drawn = key if config.dropout else None
        hidden = bert.apply(params, tokens, config, mask=padding, key=drawn, ops=ops)[0]
        return bert.masked_lm_loss(params, hidden, jnp.where(padding, labels, -1), config, ops=ops)

    def step(state, key):
        params, moments = state
        data, drawn = jax.random.split(key)
        value, gradient = jax.value_and_grad(loss)(params, *sentences(data), drawn)
        updates, moments = optimise.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    keys = jax.random.split(jax.random.key(1), steps)
    return jax.lax.scan(step, (params, optimise.init(params)), keys)[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("dropout", "steps"), [(0.0, 300), (0.1, 500)])
def test_losses(dtype, dropout, steps):
    """As near to plain JAX' as those are to themselves with the last bits moved."""
    config = config_of(dtype, dropout)
    params = bert.init(jax.random.key(0), config, mlm=True)
    moved = jax.tree.map(lambda a: a * jnp.asarray(1 + 2**-22, a.dtype), params)
    run = functools.partial(training, config=config, steps=steps)
    with fo.use_implementation("native"), jax.default_matmul_precision("highest"):
        ours = np.asarray(run(params, ops=bert.FASTOPS))
        plain, other = (np.asarray(run(p, ops=bert.PLAIN)) for p in (params, moved))
    early, late = plain[: steps // 20].mean(), plain[-steps // 20 :].mean()
    assert late < 0.8 * early  # it learns
    window = np.ones(20) / 20

    def distance(a, b):
        return np.abs(np.convolve(a - b, window, "valid")).max()

    noise = distance(other, plain)
    assert distance(ours, plain) < 5 * noise + 1e-4, (distance(ours, plain), noise)
    np.testing.assert_allclose(ours[:5], plain[:5], rtol=1e-5 if dtype == "float32" else 2e-2)
