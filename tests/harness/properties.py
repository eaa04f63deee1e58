"""Property-based checks: hypothesis draws the shapes; values are random, with special ones among
them.

A case's `shapes` is a strategy that draws one shape per argument. Values come from a drawn seed.
Thus hypothesis shrinks shapes, not thousands of numbers. Primals, tangents and cotangents all have
special values.
"""

import functools
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st

from harness.case import Case, Check, implementation, like_outputs, of, outputs, resized, take
from harness.compat import x64
from harness.numerics import is_float, normal, sprinkled
from harness.transforms import Expected, kept, oracle

# Shapes in the quick tests, of the first dtype and of others, and in the slow tests.
QUICK, FEW, MANY = 15, 5, 100
# Rows of kernels: all short ones, and those near powers of two.
LENGTHS = {
    "1to40": [*range(1, 41)],
    "to1025": [*(n + d for n in (64, 128, 256, 512, 1024) for d in (-1, 0, 1)), 1000, 1001],
    "to8191": [2047, 2048, 2049, 4095, 4096, 4097, 8191],
    "to32769": [16383, 16384, 16385, 32768, 32769],
    "to100003": [65536, 100003],
}
SHORT = {key: LENGTHS[key] for key in ("1to40", "to1025")}
# What hypothesis does. It does not explain failures: that traces each line of Python.
PHASES = hypothesis.Phase.generate, hypothesis.Phase.shrink


@st.composite
def shapes(
    draw: Any, min_rank: int = 0, max_rank: int = 5, max_size: int = 2048
) -> tuple[int, ...]:
    """Any shape, with zero and odd sizes. The last axis is often long or a multiple of 8."""
    rank = draw(st.integers(min_rank, max_rank))
    small = st.one_of(st.integers(0, 7), st.sampled_from([1, 2, 3, 8, 16]))
    last = st.one_of(small, st.sampled_from([8, 24, 31, 33, 64, 127, 128, 250, 257, 1000, 1024]))
    shape = [draw(last if axis == rank - 1 else small) for axis in range(rank)]
    while np.prod(shape, dtype=int) > max_size:
        shape[int(np.argmax(shape))] //= 2
    return tuple(shape)


@st.composite
def broadcast_shapes(draw: Any, count: int) -> tuple[tuple[int, ...], ...]:
    """A shape, and `count` that broadcast to it, of at most its rank."""
    rank = draw(st.integers(0, 8))
    size = st.one_of(st.integers(1, 4), st.sampled_from([1, 5, 8, 9, 16, 33]))
    shape = [draw(size) for _ in range(rank)]
    while np.prod(shape, dtype=int) > 4000:
        shape[int(np.argmax(shape))] //= 2
    found = [tuple(shape)]
    for _ in range(count):
        own = [n if draw(st.booleans()) else 1 for n in shape]
        found.append(tuple(own[draw(st.integers(0, rank)) :]))
    return tuple(found)


def of_any(examples: int, strategy: st.SearchStrategy[Any], check: Any, **options: Any) -> None:
    """Calls `check(drawn, **options)` with lists of eight, and with drawn options."""

    @settings(examples)
    @hypothesis.given(st.lists(strategy, min_size=8, max_size=8), st.fixed_dictionaries(options))
    def each(drawn: Any, given: Any) -> None:
        check(drawn, **given)

    each()


def settings(examples: int) -> hypothesis.settings:
    """A number of examples, the same in every run. There is no deadline: each one is compiled."""
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=PHASES,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def same_shapes(count: int, **kwargs: Any) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """One shape for `count` arguments."""
    return shapes(**kwargs).map(lambda shape: (shape,) * count)


def program(fn, case: Case):
    """Outputs, gradients and tangents in one program, to compile once per shape."""

    def run(args, tangents, cotangents):
        out = outputs(fn(*args))
        if not case.diff:
            return out
        restricted, primals = of(fn, args, case.diff), take(args, case.diff)
        return (
            out,
            jax.vjp(restricted, *primals)[1](cotangents),
            jax.jvp(restricted, primals, tangents)[1],
        )

    return run


def run(special: bool, examples: int, case: Case, mode: str | None, dtype: Any) -> None:
    fill = sprinkled if special else normal
    if examples == QUICK and dtype != case.dtypes[0]:
        examples = FEW

    @settings(examples)
    @hypothesis.given(case.shapes, st.integers(0, 2**32 - 1))
    def check(drawn, seed):
        rng = np.random.default_rng(seed)
        args = tuple(
            fill(rng, shape, arg.dtype) if is_float(arg.dtype) else resized(rng, shape, arg)
            for shape, arg in zip(drawn, template, strict=True)
        )
        tangents = tuple(fill(rng, arg.shape, arg.dtype) for arg in take(args, case.diff))
        cotangents = tuple(fill(rng, c.shape, c.dtype) for c in like_outputs(case, rng, args))
        values = (args, tangents, cotangents)
        with implementation(mode):
            got = jax.jit(program(case.fn, case))(*values)
        reference = kept(program, case.reference, case)
        exact = None if case.exact else oracle(reference, *values)
        Expected(reference, values, dtype == np.float64, exact).check(got, case.tolerance)

    template = case.make_args(case.rng("template"), dtype)
    with x64(dtype == np.float64):
        check()


def checks(case: Case) -> Iterator[Check]:
    if case.shapes is None:
        return
    yield Check("properties/special_values", functools.partial(run, True, QUICK), basic=True)
    yield Check("properties/many", functools.partial(run, True, MANY), slow=True)
    if not case.exact:
        yield Check("properties/values", functools.partial(run, False, QUICK), basic=True)
        yield Check("properties/many_values", functools.partial(run, False, MANY), slow=True)
