"""Checks of the kernels: which ones a program calls, what a backward pass keeps, and their bits.

What a program calls is checked for a case that names its `kernels`.
"""

import collections
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np

from harness.case import Case, Check, draw, float_outputs, implementation, of, outputs, put, take
from harness.compat import saved_residuals, x64
from harness.export import program
from harness.numerics import assert_matches, is_float
from harness.programs import targets
from harness.transforms import Transform, run, value, vjp

# XLA makes no kernel for these.
FREE = {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}


def gradients(case: Case, args: tuple[Any, ...], cotangents: tuple[Any, ...]) -> Any:
    return jax.vjp(of(case.fn, args, case.diff), *take(args, case.diff))[1](cotangents)


def calls(case: Case, mode: str | None, dtype: Any) -> None:
    """The kernels of the case run once each way, and none runs with `xla`."""
    args, cotangents = draw(case, dtype, "kernels")
    both = program(case.fn, case, len(args))
    with x64(dtype == np.float64):
        with implementation(mode):
            forward = jax.jit(lambda *args: outputs(case.fn(*args))).lower(*args).compile()
            assert targets(forward.as_text()) == list(case.kernels[:1])
            text = jax.jit(both).lower(*args, *cotangents).compile().as_text()
            assert targets(text) == sorted(case.kernels)
        with implementation("xla"):
            lowered = jax.jit(lambda *values: both(*values)).lower(*args, *cotangents)
            assert "@jax_fastops" not in lowered.as_text()


def nothing_else(case: Case, mode: str | None, dtype: Any) -> None:
    """The program of the gradients has the kernels, and nothing else that XLA runs."""
    with x64(dtype == np.float64), implementation(mode):
        run = jax.jit(functools.partial(gradients, case))
        text = run.lower(*draw(case, dtype, "kernels")).compile().as_text()
    entry = text[text.index("ENTRY") :]
    found = set(re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w-]*)\(", entry))
    assert found <= FREE, f"XLA runs {found - FREE}:\n{entry}"


def maps(subset: tuple[int, ...], case: Case, mode: str | None, dtype: Any) -> None:
    """A map is one call of each kernel, with no loop."""
    args, cotangents = draw(case, dtype, "kernels")
    axes = tuple(0 if i in subset else None for i in range(len(args)))
    stacks = put(args, subset, (np.stack([args[i]] * 3) for i in subset))
    mapped = jax.vmap(program(case.fn, case, len(args)), axes + (None,) * len(cotangents))
    with x64(dtype == np.float64), implementation(mode):
        text = jax.jit(mapped).lower(*stacks, *cotangents).compile().as_text()
    assert targets(text) == sorted(case.kernels) and " while(" not in text


def keeps(case: Case, mode: str | None, dtype: Any) -> None:
    """A backward pass keeps what the case says, with and without `jit`, and in a model."""
    args = case.make_args(case.rng("kept"), dtype)
    wanted = sorted((jnp.dtype(kind).name, int(size)) for kind, size in case.kept(*args))
    fn, primals = of(case.fn, args, case.diff), take(args, case.diff)
    with x64(dtype == np.float64), implementation(mode):
        for function in (fn, jax.jit(fn)):
            leaves = jax.tree.leaves(jax.vjp(function, *primals)[1])
            assert sorted((leaf.dtype.name, leaf.size) for leaf in leaves) == wanted

        def model(w):
            return sum(jnp.sum(y) for y in float_outputs(case.fn(args[0] * w, *args[1:])))

        lines = saved_residuals(model, jnp.ones_like(args[0])).splitlines()
    made = [line for line in lines if "argument" not in line and "constant" not in line]
    shapes = [re.match(r"\w+\[([\d,]*)\]", line)[1].split(",") for line in made]
    sizes = collections.Counter(int(np.prod([int(n) for n in s if n])) for s in shapes)
    assert sizes <= collections.Counter(size for _, size in wanted), lines


def two_users(case: Case, mode: str | None, dtype: Any) -> None:
    """Two users of one result have the bits of one, whose cotangent is the sum of theirs.

    The cotangent of a result that is not used is 0. XLA adds nothing that has the results' shape.
    """
    for sizes in case.sizes or (None,):
        args, (first, second, *rest) = draw(case, dtype, "two_users", sizes)
        count = len(args)
        with x64(dtype == np.float64), implementation(mode):
            both = jax.jit(program(case.fn, case, count))
            both = both.lower(*args, first, second, *rest).compile()
            one = jax.jit(program(case.one_user, case, count))
            (y, same, *others), gradients = both(*args, first, second, *rest)
            want = one(*args, first + second, *rest)
            assert_matches(((y, *others), gradients), jax.tree.map(np.asarray, want))
            assert_matches(same, np.asarray(y))
            shape = "|".join([",".join(map(str, first.shape)), str(first.size)])
            assert first.size < 2 or not re.search(rf"\[({shape})\]\S* add\(", both.as_text())

    args, (first, *_) = draw(case, dtype, "two_users")
    primals = take(args, case.diff)

    def pulled(fn, i):
        result = lambda *primals: outputs(fn(*put(args, case.diff, primals)))[i]  # noqa: E731
        return jax.vjp(result, *primals)[1](first)

    with x64(dtype == np.float64), implementation(mode):
        found = [jax.jit(functools.partial(pulled, case.fn, i))() for i in range(2)]
        alone = jax.tree.map(np.asarray, jax.jit(functools.partial(pulled, case.one_user, 0))())
    for gradients in found:
        jax.tree.map(np.testing.assert_array_equal, gradients, alone)


def other_modes(modes: tuple[str, ...], case: Case, mode: str | None, dtype: Any) -> None:
    """The implementations that no other check runs give the same results."""
    transform = Transform("vjp", vjp) if case.diff else Transform("value", value)
    for other in modes:
        run(transform, case, other, dtype)


def repeated_runs(case: Case, mode: str | None, dtype: Any) -> None:
    """A program gives the same bits in every run."""
    for sizes in case.sizes[-2:]:
        args, cotangents = draw(case, dtype, "repeated", sizes)
        with x64(dtype == np.float64), implementation(mode):
            both = jax.jit(program(case.fn, case, len(args)))
            first = jax.tree.map(np.asarray, both(*args, *cotangents))
            for _ in range(3):
                assert_matches(both(*args, *cotangents), first, where=f"result of {sizes}")


def dynamic(x: Any) -> Any:
    return jax.lax.dynamic_slice(x, [1] * x.ndim, [n - 3 for n in x.shape])


# Each makes a larger or another array of an operand, and takes the operand out of it.
VIEWS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[Any, Any], Any]]] = {
    "slice": (lambda a: np.pad(a, (1, 2)), lambda b, a: b[(slice(1, -2),) * b.ndim]),
    "dynamic slice": (lambda a: np.pad(a, (1, 2)), lambda b, a: dynamic(b)),
    "at any address": (
        lambda a: np.concatenate([np.zeros(7, a.dtype), a.reshape(-1)]),
        lambda b, a: b[7:].reshape(a.shape),
    ),
    "reversal": (lambda a: a[::-1] if a.ndim else a, lambda b, a: b[::-1] if a.ndim else b),
    "transposition": (lambda a: a.T, lambda b, a: b.T),
    "strides": (
        lambda a: np.repeat(a, 2, -1) if a.ndim else a,
        lambda b, a: b[..., ::2] if a.ndim else b,
    ),
}


def views(case: Case, mode: str | None, dtype: Any) -> None:
    """Operands that are parts of larger arrays have the bits of copies."""
    args, cotangents = draw(case, dtype, "views", next(iter(case.sizes[::-1]), None))
    values = (*args, *cotangents)
    both = program(case.fn, case, len(args))

    def every(values, buffers):
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        found = [both(*values)]
        for (_, view), given in zip(VIEWS.values(), buffers, strict=True):
            found.append(both(*map(view, given, shapes)))
        return found

    buffers = [tuple(map(make, values)) for make, _ in VIEWS.values()]
    with x64(dtype == np.float64), implementation(mode):
        want, *found = jax.tree.map(np.asarray, jax.jit(every)(values, buffers))
    for name, got in zip(VIEWS, found, strict=True):
        assert_matches(got, want, where=name)


def empty(case: Case, mode: str | None, dtype: Any) -> None:
    """Arrays without elements: shapes, dtypes and values of the reference."""
    for letter in case.letters if case.empty is None else case.empty:
        sizes = {name: 8 * (name != letter) for name in case.letters}
        args, cotangents = draw(case, dtype, "empty", sizes)
        values = (*args, *cotangents)
        with x64(dtype == np.float64):
            with implementation(mode):
                got = jax.jit(program(case.fn, case, len(args)))(*values)
            want = jax.jit(program(case.reference, case, len(args)))(*values)
        assert_matches(got, want, want, where=f"result without {letter}")


def linear_pullback(case: Case, mode: str | None, dtype: Any) -> None:
    """Pullbacks of sums are sums, of multiples by 4 have the bits of multiples, and of 0 are 0."""
    args, (a, *rest) = draw(case, dtype, "pullback")
    eps = float(jnp.finfo(dtype).eps)
    with x64(dtype == np.float64), implementation(mode):
        both = jax.jit(functools.partial(gradients, case))
        rng = case.rng("cotangents")
        one, other = ((rng.integers(-8, 8, a.shape) / 8).astype(a.dtype) for _ in range(2))
        zeros = [np.zeros_like(c) for c in rest]
        run = lambda ct: [np.asarray(g) for g in both(args, (ct, *zeros))]  # noqa: E731
        found = zip(
            run(2 * one - other), run(one), run(other), run(4 * one), run(0 * a), strict=True
        )
        for total, first, second, four, nothing in found:
            normal = np.abs(first) >= jnp.finfo(dtype).smallest_normal
            np.testing.assert_array_equal(four[normal], 4 * first[normal])
            assert not nothing.any()
            total, first, second = (g.astype(np.float64) for g in (total, first, second))
            size = np.abs(first).max(initial=0) + np.abs(second).max(initial=0)
            np.testing.assert_allclose(total, 2 * first - second, rtol=0, atol=8 * eps * size)


def differences(case: Case, mode: str | None, dtype: Any) -> None:
    """First and second derivatives are those of differences, in float64."""
    with x64(), implementation(mode):
        args = case.make_args(case.rng("differences"), jnp.dtype(np.float64))
        fn, primals = of(case.fn, args, case.diff), take(args, case.diff)
        jax.test_util.check_grads(fn, primals, order=2, rtol=1e-4, atol=1e-4)


def no_leaks(case: Case, mode: str | None, dtype: Any) -> None:
    """No tracer outlives its trace."""
    args, cotangents = draw(case, dtype, "leaks")
    both = lambda *values: gradients(case, values[: len(args)], values[len(args) :])  # noqa: E731
    with jax.checking_leaks(), x64(dtype == np.float64), implementation(mode):
        jax.jit(both).trace(*args, *cotangents)
        stacks = [np.stack([value] * 2) for value in (*args, *cotangents)]
        jax.jit(jax.vmap(both)).trace(*stacks)


def checks(case: Case) -> Iterator[Check]:
    once = functools.partial(Check, every_dtype=False, every_mode=False)
    short = case.basic_only
    if case.kernels:
        yield once("kernels", calls)
        if case.only_kernels:
            yield once("kernels/nothing_else", nothing_else)
        for subset in case.maps:
            name = "".join(f"x{i}" for i in subset)
            yield once(f"kernels/vmap/{name}", functools.partial(maps, subset), jax=True)
        if not short:
            yield Check("views", views, basic=True, every_mode=False)
    if case.kept is not None:
        yield Check("kept", keeps, basic=True, every_mode=False, every_dtype=not short)
    modes = tuple(mode for mode in ("auto", "xla") if mode not in case.modes)
    # With operands of several dtypes, an op's reference may round in other places.
    if case.modes[0] and modes and len({a.dtype for a in case.example if is_float(a.dtype)}) < 2:
        other = functools.partial(other_modes, modes)
        yield Check("modes", other, basic=True, every_mode=False, every_dtype=not short)
    if case.sizes:
        yield Check("repeated_runs", repeated_runs, basic=True, every_mode=False)
    if case.one_user:
        yield Check("two_users", two_users, every_mode=False, jax=True)
    if case.letters and case.empty != "":
        yield once("empty", empty)
    if case.diff and not short:
        if case.kernels:
            yield Check("linear_pullback", linear_pullback, basic=True, every_mode=False)
        if "float64" in case.dtypes:
            yield once("differences", differences)
        yield once("no_leaks", no_leaks)
