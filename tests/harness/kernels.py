"""Checks of the kernels: which ones a program calls, what a backward pass keeps, and their bits.

What a program calls is checked for a case that names its `kernels`.
"""

import collections
import functools
import itertools
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
from harness.numerics import (
    assert_bitwise_equal,
    assert_close,
    assert_matches,
    is_float,
    special_rows,
)
from harness.programs import assert_strict, targets
from harness.transforms import Transform, kept, run, value, vjp

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


def examples(case: Case, mode: str | None, dtype: Any) -> None:
    """A map has the results of a loop, and NaN of one example is in no other one.

    Arguments that are not mapped have a gradient for each example.
    """
    subset, count = max(case.maps, key=len), 4
    sizes = next(iter(case.sizes[::-1]), None)
    draws = [draw(case, dtype, f"examples{i}", sizes) for i in range(count)]
    args = draws[0][0]
    drawn = [(*put(args, subset, take(own, subset)), *cts) for own, cts in draws]
    stacked = [i in subset or i >= len(args) for i in range(len(drawn[0]))]
    values = [
        np.stack(parts) if own else parts[0]
        for parts, own in zip(zip(*drawn, strict=True), stacked, strict=True)
    ]
    spoiled = [
        np.where(np.arange(count).reshape(-1, *[1] * (v.ndim - 1)) == 2, v.dtype.type(np.nan), v)
        if own and is_float(v.dtype)
        else v
        for v, own in zip(values, stacked, strict=True)
    ]
    one = program(case.fn, case, len(args))
    with x64(dtype == np.float64), implementation(mode):
        single = jax.jit(one)
        mapped = jax.jit(jax.vmap(one, [0 if own else None for own in stacked]))
        got, others = (jax.tree.map(np.asarray, mapped(*given)) for given in (values, spoiled))
        for i, given in enumerate(drawn):
            want = jax.tree.map(np.asarray, single(*given))
            found, again = (jax.tree.map(lambda y, i=i: y[i], ys) for ys in (got, others))
            for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
                limit = 16 * float(jnp.finfo(theirs.dtype).eps) if is_float(theirs.dtype) else 0
                scale = np.abs(theirs.astype(np.float64)).max(initial=0)
                assert_close(mine, theirs, rtol=limit, atol=limit * float(np.nan_to_num(scale)))
            if i != 2:
                assert_matches(again, found, where=f"example {i} beside NaN")


def keeps(case: Case, mode: str | None, dtype: Any) -> None:
    """A backward pass keeps what the case says, with and without `jit`, and in a model.

    A result that it keeps is the array that the caller gets, not a copy.
    """
    args = case.make_args(case.rng("kept"), dtype)
    wanted = sorted((jnp.dtype(kind).name, int(size)) for kind, size in case.kept(*args))
    fn, primals = of(case.fn, args, case.diff), take(args, case.diff)
    with x64(dtype == np.float64), implementation(mode):
        for function in (fn, jax.jit(fn)):
            leaves = jax.tree.leaves(jax.vjp(function, *primals)[1])
            assert sorted((leaf.dtype.name, leaf.size) for leaf in leaves) == wanted
        results, pullback = jax.vjp(fn, *primals)
        leaves = [leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array)]
        for y, leaf in itertools.product(results, leaves if case.kernels else ()):
            if leaf.size > 1 and (leaf.shape, leaf.dtype) == (y.shape, y.dtype):
                same = leaf.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()
                assert same or not np.array_equal(leaf, y), "a copy of a result is kept"

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
    "reversal": (lambda a: a[::-1] if a.ndim else a, lambda b, a: b[::-1] if a.ndim else b),
    "transposition": (lambda a: a.T, lambda b, a: b.T),
    "strides": (
        lambda a: np.repeat(a, 2, -1) if a.ndim else a,
        lambda b, a: b[..., ::2] if a.ndim else b,
    ),
}
for offset in (1, 3, 7):
    VIEWS[f"from element {offset} on"] = (
        lambda a, n=offset: np.concatenate([np.zeros(n, a.dtype), a.reshape(-1)]),
        lambda b, a, n=offset: b[n:].reshape(a.shape),
    )
INTO = "dynamic slice"  # the results of this view are written into larger arrays


def amid(x: Any, start: Any) -> Any:
    """A larger array that has ``x`` from ``start`` on. A kernel may write into the middle of it."""
    if not x.ndim:
        return x
    larger = jnp.zeros((x.shape[0] + 3, *x.shape[1:]), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(larger, x, start, 0)


def views(case: Case, mode: str | None, dtype: Any) -> None:
    """Operands and results that are parts of larger arrays have the bits of copies, if sums do."""
    args, cotangents = draw(case, dtype, "views", next(iter(case.sizes[::-1]), None))
    values = (*args, *cotangents)
    both = program(case.fn, case, len(args))

    def every(values, buffers, start):
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        found = {"": both(*values)}
        for name, given in buffers.items():
            found[name] = both(*map(VIEWS[name][1], given, shapes))
        found[INTO] = jax.tree.map(lambda y: amid(y, start), found[INTO])
        return found

    buffers = {name: tuple(map(make, values)) for name, (make, _) in VIEWS.items()}
    with x64(dtype == np.float64), implementation(mode):
        found = jax.tree.map(np.asarray, jax.jit(every)(values, buffers, np.int32(1)))
    want = found.pop("")
    rows = lambda y: [(1, 2), *[(0, 0)] * (y.ndim - 1)]  # noqa: E731
    larger = jax.tree.map(lambda y: np.pad(y, rows(y)) if y.ndim else y, want)
    for name, got in found.items():
        same = larger if name == INTO else want
        oracle = same if case.sums_by_address else None
        assert_matches(got, same, oracle, case.tolerance, name)


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


def special(case: Case, mode: str | None, dtype: Any) -> None:
    """NaN and infinities of any operand are where the reference has them, and all else is close.

    Each array in turn has rows of special values. A gradient may be NaN where another order of
    the same steps gives an infinity.
    """
    sizes = dict.fromkeys(case.letters, 16 if len(case.letters) < 3 else 4)
    sizes[case.letters[-1]] = 32
    args, cotangents = draw(case, dtype, "special", sizes)
    values, rng = (*args, *cotangents), case.rng("special")
    changed = {i: v for i, v in enumerate(values) if is_float(v.dtype)}
    given = [put(values, [i], [special_rows(rng, v.shape, v.dtype)]) for i, v in changed.items()]
    plain = jax.jit(kept(program, case.reference, case, len(args)))
    with x64(dtype == np.float64):
        want = [jax.tree.map(np.asarray, plain(*g)) for g in given]
        for other in {mode, mode and "xla"} if dtype == case.dtypes[0] else {mode}:
            with implementation(other):
                run = jax.jit(program(case.fn, case, len(args)))
                got = [jax.tree.map(np.asarray, run(*g)) for g in given]
            for i, *pair in zip(changed, got, want, strict=True):
                where = f"special values in array {i}, {other}"
                if case.exact:
                    assert_matches(*pair, where=where)
                else:
                    assert_alike(*pair, len(cotangents), dtype, where)


def assert_alike(got: Any, want: Any, count: int, dtype: Any, where: str) -> None:
    """The first ``count`` results have the same NaN and infinities, the others the same finite
    values."""
    limit = 64 * float(jnp.finfo(dtype).eps)
    for k, pair in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        mine, theirs = (a.astype(np.float64) for a in pair)
        finite, what = np.isfinite(theirs), f"result {k} for {where}"
        np.testing.assert_array_equal(np.isfinite(mine), finite, err_msg=what)
        if k < count:
            np.testing.assert_array_equal(mine[~finite], theirs[~finite], err_msg=what)
        mine, theirs = mine[finite], theirs[finite]
        size = np.abs(theirs).max(initial=1)
        np.testing.assert_allclose(mine, theirs, rtol=limit, atol=limit * size, err_msg=what)


def strict_settings(case: Case, mode: str | None, dtype: Any) -> None:
    """JAX's strict settings of promotion change no program, of derivatives and of maps."""
    args, cotangents = draw(case, dtype, "strict")
    count, primals = len(args), take(args, case.diff)

    def everything(*values):
        own, cts = values[:count], values[count:]
        first = program(case.fn, case, count)
        of_primals = lambda *p: gradients(case, put(own, case.diff, p), cts)  # noqa: E731
        second = jax.jvp(of_primals, primals, primals) if case.diff else ()
        return first(*values), second, jax.vmap(first)(*(jnp.stack([v, v]) for v in values))

    for other in ("native", "xla"):
        with x64(dtype == np.float64), implementation(other):
            assert_strict(everything, *args, *cotangents)


def operands(case: Case, mode: str | None, dtype: Any) -> None:
    """Weakly typed operands have the bits and dtypes of others, and float64 those of float32."""
    args = case.make_args(case.rng("operands"), dtype)
    replaced = [i for i, a in enumerate(args) if a.dtype == np.float32]
    weak, strong, wide = (
        put(args, replaced, map(make, take(args, replaced)))
        for make in (
            lambda a: jnp.broadcast_to(jnp.asarray(0.5), a.shape),
            lambda a: np.full(a.shape, 0.5, np.float32),
            lambda a: a.astype(np.float64),
        )
    )
    for other in ("native", "auto", "xla"):
        with implementation(other):
            for got, want in ((weak, strong), (wide, args)):
                got, want = case.fn(*got), case.fn(*want)
                assert all(isinstance(y, jax.Array) for y in outputs(got))
                assert not any(y.weak_type for y in outputs(want))
                jax.tree.map(assert_bitwise_equal, got, want)


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
        fn, primals = jax.jit(of(case.fn, args, case.diff)), take(args, case.diff)
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
    compiled = functools.partial(once, runs_kernels=False)
    again = functools.partial(Check, every_mode=False, runs_kernels=False)
    short = case.basic_only
    if case.kernels:
        yield compiled("kernels", calls)
        if case.only_kernels:
            yield compiled("kernels/nothing_else", nothing_else)
        for subset in case.maps:
            name = "".join(f"x{i}" for i in subset)
            yield compiled(f"kernels/vmap/{name}", functools.partial(maps, subset), jax="first")
        if not short:
            yield Check("views", views, basic=True, every_mode=False)
            if case.maps:
                yield Check("examples", examples, every_mode=False)
    if case.kept is not None:
        yield again("kept", keeps, basic=True, every_dtype=not short)
    modes = tuple(mode for mode in ("auto", "xla") if mode not in case.modes)
    # With operands of several dtypes, an op's reference may round in other places.
    if case.modes[0] and modes and len({a.dtype for a in case.example if is_float(a.dtype)}) < 2:
        other = functools.partial(other_modes, modes)
        yield again("modes", other, basic=True, every_dtype=not short)
    if case.sizes:
        yield Check("repeated_runs", repeated_runs, basic=True, every_mode=False)
    if case.one_user:
        yield Check("two_users", two_users, every_mode=False, jax="first")
    if case.letters and case.empty != "":
        yield once("empty", empty)
    if case.letters and case.kept and case.empty != "":
        yield Check("special", special, basic=True, every_mode=False)
    of_kernels = case.kernels or case.kept
    if of_kernels and case.diff and (not short or len({a.dtype for a in case.example}) > 1):
        yield compiled("strict_settings", strict_settings)
    if case.dtypes[0] == "float32" and not short:
        yield compiled("operands", operands)
    if case.diff and not short:
        if case.kernels:
            yield again("linear_pullback", linear_pullback, basic=True)
        if "float64" in case.dtypes:
            yield compiled("differences", differences)
        yield compiled("no_leaks", no_leaks)
