"""A small BERT of ``jax_fastops.models`` that learns to predict hidden bytes of text.

The ops of its layers are an argument.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax_fastops.models import bert

import saved
import train
from data import LENGTH, Text, masked_text

CONFIG = dataclasses.replace(
    bert.SMALL,  # 128 features, in float32, without dropout
    layers=1,
    vocab_size=masked_text.VOCABULARY,
    positions=LENGTH,
    init_range=0.05,  # with 0.02, a network this narrow starts slowly
)
DECAYS, EPS = (0.9, 0.98), 1e-8
WARM_UP = 0.1  # the share of steps in which the rate rises


def model(ops: bert.Ops) -> train.Model:
    """The network with these ops. ``x`` is tokens and segments. There are no statistics."""

    def logits(params, statistics, x, ops=ops):
        tokens, ids = x
        hidden, _ = bert.apply(params, tokens, CONFIG, segment_ids=ids, ops=ops)
        return bert.masked_lm_logits(params, hidden, CONFIG, ops=ops)

    def kept(params, statistics, x):
        return saved.by_functions(
            ops, lambda *functions: logits(params, statistics, x, bert.Ops(*functions))
        )

    return train.Model(
        init=lambda seed: (init(seed), {}),
        train=lambda params, statistics, x: (logits(params, statistics, x), statistics),
        infer=logits,
        kept=kept,
    )


@functools.partial(jax.jit, static_argnums=0)
def init(seed: int) -> dict:
    params = bert.init(jax.random.key(seed), CONFIG, mlm=True)
    del params["pooler"]  # the loss does not use it
    return params


def loss(params, statistics, x, labels, model: train.Model):
    """Mean cross entropy of the hidden bytes, and the (empty) statistics."""
    logits, statistics = model.train(params, statistics, x)
    return masked_text.loss(logits, *labels), statistics


@functools.partial(jax.jit, static_argnames="model", donate_argnums=(0, 1, 2))
def update(params, statistics, moments, rate, x, labels, *, model: train.Model):
    """One step of Adam, since BERT needs more than gradient descent. Also returns the old loss."""
    (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(
        params, statistics, x, labels, model
    )
    first, second = DECAYS
    count = moments["count"] + 1
    means = jax.tree.map(lambda m, g: first * m + (1 - first) * g, moments["means"], grads)
    squares = jax.tree.map(
        lambda s, g: second * s + (1 - second) * g * g, moments["squares"], grads
    )
    rate = rate * jnp.sqrt(1 - second**count) / (1 - first**count)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + EPS), params, means, squares
    )
    return params, statistics, {"count": count, "means": means, "squares": squares}, value


def rates(highest: float, steps: int) -> np.ndarray:
    """The learning rate of every step: it rises to the highest, then falls by half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    rising = highest * np.arange(1, rise + 1, dtype=np.float32) / rise
    return np.concatenate([rising, train.rates(highest, steps - rise)])


class Training(train.Training):
    """A BERT in training. Two with the same seed differ only in the ops."""

    def __init__(self, name: str, model: train.Model, text: Text, seed: int):
        self.name, self.model = name, model
        self.params, self.statistics = model.init(seed)
        zeros = [jax.tree.map(jnp.zeros_like, self.params) for _ in range(2)]
        self.velocity = {"count": jnp.float32(0), "means": zeros[0], "squares": zeros[1]}
        self.losses, self.seconds = [], []
        lowered = update.lower(*self._state(), np.float32(0), *text.first, model=model)
        self.kernels = train.custom_calls(lowered.as_text())
        self._update = lowered.compile()

    def accuracy(self, x, labels) -> float:
        """The share of hidden bytes, from 0 to 1, that the model predicts."""
        logits = jax.jit(self.model.infer)(self.params, self.statistics, x)
        targets, chosen = labels
        return float(np.mean(np.argmax(logits, axis=-1)[chosen] == targets[chosen]))


def kept_by_training(training: Training, x, labels) -> int:
    """Bytes kept by the whole forward of a batch: the network and the loss."""

    def forward(params, x):
        return loss(params, training.statistics, x, labels, training.model)[0]

    return saved.saved_bytes(forward, training.params, x)
