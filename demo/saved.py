"""Bytes kept between forward and backward: what ``jax.vjp`` hands on, less the arguments."""

from collections.abc import Callable

import jax
from jax.extend.core import Literal

import model
from model import Activations


def saved_bytes(function: Callable, *args) -> int:
    """Bytes of the arrays that the pullback of ``function`` holds.

    Arguments are left out, since they live anyway, and so are constants, which a compiled
    program does not keep.
    """

    def pullback_leaves(*args):
        return jax.tree.leaves(jax.vjp(function, *args)[1])

    with jax.disable_jit():  # one flat program, in which every operation shows
        program = jax.make_jaxpr(pullback_leaves)(*args).jaxpr
    computed = set(program.invars)
    for equation in program.eqns:
        if any(not isinstance(v, Literal) and v in computed for v in equation.invars):
            computed.update(equation.outvars)
    kept = {v for v in program.outvars if not isinstance(v, Literal)} & computed
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept - set(program.invars))


def by_model(activations: Activations, params, x, labels) -> int:
    """By the whole forward of a batch: activations, matrix products and the loss."""

    def forward(params, x):
        return model.loss(params, x, labels, activations)

    return saved_bytes(forward, params, x)


def by_activations(activations: Activations, params, x) -> int:
    """By the activations of that forward, each differentiated by itself."""
    total = 0

    def counted(function: Callable) -> Callable:
        def call(*args):
            nonlocal total
            total += saved_bytes(function, *args)
            return function(*args)

        return call

    model.logits(params, x, Activations(*map(counted, activations)))
    return total
