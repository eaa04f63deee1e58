"""Programs with gradients, and what a program does, from its text or its jaxpr."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from harness.case import outputs
from harness.compat import strict


def targets(text: str) -> list[str]:
    """The names of this package's kernels that a compiled program calls, sorted.

    A kernel that prepares operands of another one has a dot in its name, and is not listed.
    """
    return sorted(re.findall(r'custom_call_target="jax_fastops\.(\w+?)\.v', text))


def targets_of(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The same, for the program of ``fn`` with these arguments."""
    return targets(jax.jit(fn).lower(*args).compile().as_text())


def cuda_targets_of(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the kernels that a program calls if it is lowered for CUDA, sorted."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return sorted(re.findall(r"@jax_fastops\.(\w+?)\.v", text))


def value_and_gradients(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function from cotangents and arguments to results and all gradients."""

    def run(cotangents, *args):
        out, pullback = jax.vjp(functools.partial(fn, **options), *args)
        return out, pullback(cotangents)

    return run


def outputs_and_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function from a sequence of arguments and one of cotangents to the same, flat."""

    def run(args, cotangents):
        out, pullback = jax.vjp(lambda *args: outputs(fn(*args)), *args)
        return out, pullback(outputs(cotangents))

    return run


def value_and_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function from an argument, a cotangent and other arguments to the result and a gradient."""

    def run(x, cotangent, *rest):
        out, pullback = jax.vjp(lambda x: fn(x, *rest), x)
        return out, pullback(cotangent)[0]

    return run


def assert_strict(fn: Callable[..., Any], *args: Any) -> None:
    """JAX's strict settings of promotion change nothing in the program of ``fn``."""

    def program() -> list[tuple[str, ...]]:
        # Not its text: whether that has an inner program twice depends on JAX's caches.
        traced = jax.make_jaxpr(lambda *args: fn(*args))(*args)
        return [
            (each.primitive.name, *(str(x.aval) for x in (*each.invars, *each.outvars)))
            for each in equations(traced.jaxpr)
        ]

    want = program()
    with strict():
        assert program() == want


def residuals(fn: Callable[..., Any], *args: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of what the backward pass of ``fn`` keeps, sorted."""
    leaves = jax.tree.leaves(jax.vjp(fn, *args)[1])
    return sorted((str(leaf.dtype), leaf.shape) for leaf in leaves)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
