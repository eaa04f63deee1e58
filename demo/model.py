"""A residual multi-layer perceptron as pure functions; its activations are an argument."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import saved
from data import CLASSES, FEATURES
from train import Model

WIDTH, BLOCKS = 512, 4


class Activations(NamedTuple):
    """The two functions that differ between the trainings."""

    relu: Callable
    add_relu: Callable


def init(seed: int) -> dict:
    """Parameters: He initialization, with a small last matrix in each block."""
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


def model(activations: Activations) -> Model:
    """The network with these activations. It has no statistics."""

    def kept(params, statistics, x):
        return saved.by_functions(
            activations, lambda *functions: logits(params, x, Activations(*functions))
        )

    return Model(
        init=lambda seed: (init(seed), {}),
        train=lambda params, statistics, x: (logits(params, x, activations), statistics),
        infer=lambda params, statistics, x: logits(params, x, activations),
        kept=kept,
    )
