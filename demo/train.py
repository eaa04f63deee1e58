"""Training in jitted JAX: gradient descent with momentum and a falling rate."""

import functools
import re
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

import model
from data import BATCH, Digits
from model import Activations

RATE, MOMENTUM = 0.01, 0.9
WARM_UP = 10  # first steps, whose time is not counted


@functools.partial(jax.jit, static_argnames="activations", donate_argnums=(0, 1))
def update(params, velocity, rate, x, labels, *, activations: Activations):
    """One step; also returns the loss before it."""
    loss, grads = jax.value_and_grad(model.loss)(params, x, labels, activations)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - rate * g, velocity, grads)
    return jax.tree.map(jnp.add, params, velocity), velocity, loss


def rates(steps: int) -> np.ndarray:
    """The learning rate of every step: half a cosine, from ``RATE`` to 0."""
    return (RATE * 0.5 * (1 + np.cos(np.linspace(0, np.pi, steps)))).astype(np.float32)


class Training:
    """One model in training. Two of the same seed differ in their activations alone."""

    def __init__(self, name: str, activations: Activations, digits: Digits, seed: int):
        self.name, self.activations = name, activations
        self.params = model.init(seed)
        self.velocity = jax.tree.map(jnp.zeros_like, self.params)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        batch = (digits.train_x[:BATCH], digits.train_y[:BATCH])
        state = (self.params, self.velocity, np.float32(RATE))
        lowered = update.lower(*state, *batch, activations=activations)
        self.kernels = custom_calls(lowered.as_text())  # in one step, by name
        self._update = lowered.compile()

    def step(self, rate: np.float32, x, labels) -> None:
        start = time.perf_counter()
        out = self._update(self.params, self.velocity, rate, x, labels)
        self.params, self.velocity, loss = jax.block_until_ready(out)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    @property
    def step_ms(self) -> float:
        """Median time of a step."""
        return 1e3 * float(np.median(self.seconds[WARM_UP:]))

    def accuracy(self, x, labels) -> float:
        """The share of images, from 0 to 1, whose digit the model tells."""
        guesses = jax.jit(model.logits, static_argnums=2)(self.params, x, self.activations)
        return float(np.mean(np.argmax(guesses, axis=-1) == labels))


def custom_calls(program: str) -> Counter:
    """How often a lowered program calls each jax_fastops kernel."""
    return Counter(re.findall(r'@"?jax_fastops\.(\w+)\.v\d+', program))
