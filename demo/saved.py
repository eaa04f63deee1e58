"""Bytes kept between forward and backward: the residuals of ``jax.vjp``, except the arguments."""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Literal

import train


def saved_bytes(function: Callable, *args) -> int:
    """Bytes of the arrays that the pullback of ``function`` holds.

    Arguments do not count, because they exist anyway. Constants do not count, because a compiled
    program does not keep them.
    """

    def pullback_leaves(*args):
        return jax.tree.leaves(jax.vjp(function, *args)[1])

    with jax.disable_jit():  # one flat program that shows every operation
        program = jax.make_jaxpr(pullback_leaves)(*args).jaxpr
    computed = set(program.invars)
    for equation in program.eqns:
        if any(not isinstance(v, Literal) and v in computed for v in equation.invars):
            computed.update(equation.outvars)
    kept = {v for v in program.outvars if not isinstance(v, Literal)} & computed
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept - set(program.invars))


def by_functions(functions: Sequence[Callable], forward: Callable) -> int:
    """Bytes kept by calls of these functions in ``forward``, counted call by call."""
    total = 0

    def counted(function: Callable) -> Callable:
        def call(*args, **options):
            nonlocal total
            arrays = {name: a for name, a in options.items() if isinstance(a, jax.Array)}
            rest = {name: a for name, a in options.items() if name not in arrays}

            def of_arrays(args, arrays):
                return function(*args, **arrays, **rest)

            total += saved_bytes(of_arrays, args, arrays)
            return function(*args, **options)

        return call

    jax.eval_shape(lambda: forward(*(function and counted(function) for function in functions)))
    return total


def by_training(training, x, labels) -> int:
    """Bytes kept by the whole forward of a batch: the network and the loss."""

    def forward(params, x):
        return train.loss(params, training.statistics, x, labels, training.model)[0]

    return saved_bytes(forward, training.params, x)
