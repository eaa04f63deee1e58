"""What a program is, and how it becomes a forward and a training step."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass
class Program:
    """A model with its loss and a batch.

    Attributes:
      params: the parameters that are trained.
      batch: what the loss and the forward take after them.
      loss: ``loss(params, *batch)``; ``loss(params, rest, *batch)``, which also returns ``rest``,
        if there is ``rest``.
      forward: ``forward(params, *batch)`` or ``forward(params, rest, *batch)``, evaluation or
        inference. Without it, it is the loss.
      rest: what a step changes without a gradient, such as running averages.
      optimizer: of optax.
      update: the step of a package that makes the gradient itself, ``update(state, *batch)``, which
        returns the state and the loss. ``params`` is then the state, and there is no ``loss``.
      dropout: whether the loss drops elements. autofuse is then told to take dropouts too.
    """

    params: Any
    batch: tuple
    loss: Callable | None = None
    forward: Callable | None = None
    rest: Any = None
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.adamw(1e-4)
    )
    update: Callable | None = None
    dropout: bool = False

    @property
    def inputs(self) -> tuple:
        """The arguments of the forward."""
        return (self.params, *(() if self.rest is None else (self.rest,)), *self.batch)

    def state(self) -> Any:
        """What a step takes and returns."""
        if self.update:
            return self.params
        return self.params, self.rest, self.optimizer.init(self.params)

    def evaluation(self, fuse: Callable = lambda fn: fn) -> Callable:
        """The forward, with ``fuse`` around it."""
        return fuse(self.forward or self.loss)

    def step(self, fuse: Callable = lambda fn: fn) -> Callable:
        """``step(state, *batch)``, which returns the next state and the loss.

        ``fuse`` is around the loss, inside of the gradient, or around the package's own step.
        """
        if self.update:
            return fuse(self.update)
        loss, has_rest = fuse(self.loss), self.rest is not None

        def step(state, *batch):
            params, rest, inner = state
            given = (rest, *batch) if has_rest else batch
            value, grads = jax.value_and_grad(loss, has_aux=has_rest)(params, *given)
            if has_rest:
                value, rest = value
            changes, inner = self.optimizer.update(grads, inner, params)
            return (optax.apply_updates(params, changes), rest, inner), value

        return step


# Name -> a function of whether the program is tiny, and of the dtype that it computes in.
BUILD: dict[str, Callable[[bool, Any], Program]] = {}


def program(name: str) -> Callable:
    """Adds the function below it to the programs."""

    def add(build: Callable) -> Callable:
        BUILD[name] = build
        return build

    return add


def tokens(shape: tuple[int, ...], classes: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, classes, jnp.int32)


def normal(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def filled(init: Callable, *args: Any) -> Any:
    """What ``init(*args)`` returns in shapes and dtypes, filled with numbers by their names.

    A package's own initialization takes most of the time to compile, and is not measured.
    """
    rng = np.random.default_rng(0)

    def one(path, like):
        name = str(getattr(path[-1], "key", path[-1]))
        if "bias" in name or name in ("b", "offset", "mean"):
            return np.zeros(like.shape, like.dtype)
        if name in ("scale", "var"):
            return np.ones(like.shape, like.dtype)
        fan_in = max(1, math.prod(like.shape[:-1]))
        std = 0.02 if "embed" in name else min(1.0, fan_in**-0.5)
        return (std * rng.standard_normal(like.shape, np.float32)).astype(like.dtype)

    shapes = jax.eval_shape(init, *args)
    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(one, shapes))


def cast(tree: Any, dtype: Any) -> Any:
    """The tree with its floating point arrays in ``dtype``."""

    def one(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)
