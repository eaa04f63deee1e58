"""A residual multi-layer perceptron as pure functions; its activations are an argument."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from data import CLASSES, FEATURES

WIDTH, BLOCKS = 512, 4
SMOOTHING = 0.1  # of the labels, against over-fitting on so few images


class Activations(NamedTuple):
    """The two functions in which the two trainings differ."""

    relu: Callable
    add_relu: Callable


def init(seed: int) -> dict:
    """Parameters: He initialisation, with a small last matrix in each block."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 2 * BLOCKS))

    def dense(n_in: int, n_out: int, gain: float) -> dict:
        weights = jax.random.normal(next(keys), (n_in, n_out), jnp.float32)
        return {"w": weights * (gain / n_in) ** 0.5, "b": jnp.zeros(n_out, jnp.float32)}

    return {
        "first": dense(FEATURES, WIDTH, 2.0),
        "blocks": [
            {"inner": dense(WIDTH, WIDTH, 2.0), "outer": dense(WIDTH, WIDTH, 0.2)}
            for _ in range(BLOCKS)
        ],
        "last": dense(WIDTH, CLASSES, 1.0),
    }


def affine(layer: dict, x):
    return x @ layer["w"] + layer["b"]


def logits(params: dict, x, activations: Activations):
    """Each block is ``h = add_relu(h, relu(h W1 + b1) W2 + b2)``."""
    relu, add_relu = activations
    h = relu(affine(params["first"], x))
    for block in params["blocks"]:
        h = add_relu(h, affine(block["outer"], relu(affine(block["inner"], h))))
    return affine(params["last"], h)


def loss(params: dict, x, labels, activations: Activations):
    """Mean cross-entropy with smoothed labels."""
    log_p = jax.nn.log_softmax(logits(params, x, activations))
    targets = jax.nn.one_hot(labels, CLASSES) * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return -jnp.mean(jnp.sum(targets * log_p, axis=-1))
