"""Training in jitted JAX: gradient descent with momentum and a falling rate."""

import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data import BATCH, CLASSES, Digits

MOMENTUM = 0.9
SMOOTHING = 0.1  # of the labels, against overfitting on so few images
WARM_UP = 10  # the first steps are not timed


class Model(NamedTuple):
    """A classifier as pure functions. ``x`` are rows of pixels; statistics may be empty."""

    init: Callable  # seed -> params, statistics
    train: Callable  # params, statistics, x -> logits, new statistics
    infer: Callable  # params, statistics, x -> logits
    kept: Callable  # params, statistics, x -> bytes kept by the compared functions


def loss(params, statistics, x, labels, model: Model):
    """Mean cross entropy with smoothed labels, and the new statistics."""
    logits, statistics = model.train(params, statistics, x)
    targets = jax.nn.one_hot(labels, CLASSES) * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)), statistics


@functools.partial(jax.jit, static_argnames="model", donate_argnums=(0, 1, 2))
def update(params, statistics, velocity, rate, x, labels, *, model: Model):
    """One step; also returns the loss before it."""
    (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(
        params, statistics, x, labels, model
    )
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - rate * g, velocity, grads)
    return jax.tree.map(jnp.add, params, velocity), statistics, velocity, value


def rates(first: float, steps: int) -> np.ndarray:
    """The learning rate of every step: half a cosine, from ``first`` to 0."""
    return (first * 0.5 * (1 + np.cos(np.linspace(0, np.pi, steps)))).astype(np.float32)


class Training:
    """One model in training. Two with the same seed differ only in the compared functions."""

    def __init__(self, name: str, model: Model, digits: Digits, seed: int):
        self.name, self.model = name, model
        self.params, self.statistics = model.init(seed)
        self.velocity = jax.tree.map(jnp.zeros_like, self.params)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        batch = (digits.train_x[:BATCH], digits.train_y[:BATCH])
        lowered = update.lower(*self._state(), np.float32(0), *batch, model=model)
        self.kernels = custom_calls(lowered.as_text())  # in one step, by name
        self._update = lowered.compile()

    def _state(self) -> tuple:
        return self.params, self.statistics, self.velocity

    def step(self, rate: np.float32, x, labels) -> None:
        start = time.perf_counter()
        out = jax.block_until_ready(self._update(*self._state(), rate, x, labels))
        self.seconds.append(time.perf_counter() - start)
        self.params, self.statistics, self.velocity, value = out
        self.losses.append(float(value))

    @property
    def step_ms(self) -> float:
        """Median time of a step."""
        return 1e3 * float(np.median(self.seconds[WARM_UP:]))

    def accuracy(self, x, labels) -> float:
        """The share of images, from 0 to 1, that the model classifies correctly."""
        guesses = jax.jit(self.model.infer)(self.params, self.statistics, x)
        return float(np.mean(np.argmax(guesses, axis=-1) == labels))


def custom_calls(program: str) -> Counter:
    """The number of calls of each jax_fastops kernel in a lowered program."""
    return Counter(re.findall(r'@"?jax_fastops\.(\w+)\.v\d+', program))
