"""Checks that a transformation gives the same results for the op and for its reference.

A `Transform` is a function of `(fn, inputs)`. The harness applies it to the op and to the
reference, compiles both in the same way, and compares. If a transform adds its own arithmetic, such
as a loss, compilers may round that differently. Then even an exact op is compared by means of the
float64 oracle.
"""

import dataclasses
import functools
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness.case import (
    DECLARED,
    Arrays,
    Case,
    Check,
    float_outputs,
    implementation,
    like,
    like_outputs,
    of,
    outputs,
    put,
    take,
)
from harness.compat import x64
from harness.numerics import (
    Tolerance,
    assert_bitwise_equal,
    assert_matches,
    is_float,
    is_within_floor,
    normal,
)
from harness.process import TESTS

BATCH = 3

# Transforms that differ from another one only in a detail (see `Check.detail`).
DETAIL = re.compile(
    r"vmap/.*/(negative|nested)|vmap_of_jvp/.*|vmap_of_vjp/(.*/last|one_example)|vmap_of_grad/.*"
    r"|grad_of_vmap/x\d|grad_of_vmap_of_grad/x[2-9]|vmap_of_vjp/x[2-9]/one|jvp/x\d|jit_inside"
    r"|repeated|constants|linearize/(vmap|transpose)|vmap_of_hvp/.*|hvp_of_vmap|hessian"
    r"|hvp/forward_over_forward|third/reverse_over_forward_over_forward"
    r"|checkpoint/(everything_saveable|nothing_saveable|loss|eager)"
    r"|scan/(value|inside|jvp)|while/jvp|cond/(value|vmapped)|fori/grad"
)
# Transforms that nest others (see `Check.nested`). hvp/forward_over_reverse and scan/grad also do,
# but they are quick tests of every case.
NESTED = re.compile(
    r"hvp/reverse_.*|third/.*|jac.*|grad_of_vmap/.*|grad_of_vmap_of_grad/.*|vmap_of_vjp/.*/one"
    r"|vmap_of_vmap_of_grad/.*|linearize/vmap/.*|vjp/transpose|cond/grad|checkpoint/(hvp|scan)"
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Operands of a transform: arguments, tangents of those in `diff`, cotangents of outputs."""

    args: tuple[Any, ...]
    tangents: tuple[Any, ...]
    cotangents: tuple[Any, ...]
    diff: tuple[int, ...]

    @property
    def primals(self) -> tuple[Any, ...]:
        return take(self.args, self.diff)


jax.tree_util.register_dataclass(Inputs, ["args", "tangents", "cotangents"], ["diff"])


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transformation under test.

    Attributes:
      name: its name.
      apply: takes a function and inputs, returns a pytree of arrays.
      plain: it adds no arithmetic to the op, so an exact op must give the reference's bits.
      mapped: the arguments that are stacks of `size` examples, and the axis of the stack.
      compiled: the whole runs under one `jax.jit`; otherwise operation by operation.
      basic: see `Check`.
    """

    name: str
    apply: Callable[[Callable[..., Any], Inputs], Any]
    plain: bool = True
    mapped: tuple[tuple[int, int], ...] = ()
    size: int = BATCH
    compiled: bool = True
    basic: bool = False


def make_inputs(case: Case, transform: Transform, dtype: Any) -> Inputs:
    rng = case.rng(transform.name)
    args = list(case.make_args(rng, dtype))
    diff = case.diff
    tangents: Arrays = like(rng, take(args, diff))
    cotangents: Arrays = like_outputs(case, rng, tuple(args))
    if transform.mapped:
        # One example more than needed. Without it, a stack of 0 examples would have no shape.
        examples = [case.make_args(rng, dtype) for _ in range(transform.size + 1)]
        for i, axis in transform.mapped:
            whole = np.stack([example[i] for example in examples], axis)
            args[i] = np.take(whole, range(transform.size), axis)
        tangents, cotangents = (
            tuple(normal(rng, (transform.size, *array.shape), array.dtype) for array in arrays)
            for arrays in (tangents, cotangents)
        )
    return Inputs(tuple(args), tangents, cotangents, diff)


def widen(inputs: Any) -> Any:
    """The same values in float64."""
    return jax.tree.map(lambda a: a.astype(np.float64) if is_float(a.dtype) else a, inputs)


def execute(apply: Callable[..., Any], transform: Transform, inputs: Inputs) -> Any:
    result = jax.jit(apply)(inputs) if transform.compiled else apply(inputs)
    return jax.tree.map(np.asarray, result)


@functools.lru_cache(maxsize=64)
def kept(make: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`make(*args)`, the same object for the same arguments.

    A check of all implementations and dtypes comes one after the other. If the reference is one
    object, JAX compiles it once for all implementations, and the oracle once for all dtypes.
    """
    return make(*args)


def oracle(fn: Callable[..., Any], *inputs: Any, case: Case | None = None, name: Any = "") -> Any:
    """`fn(*inputs)` in float64 on the CPU, not optimized: compilation is most of a test's time.

    CI runs a check of a declared case several times, for example on other versions of JAX. The
    folder JAX_FASTOPS_TEST_ORACLES keeps the results for it, under the check's name.
    """

    def compute():
        with x64(), jax.default_device(jax.devices("cpu")[0]):
            fast = jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})
            return jax.tree.map(np.asarray, fast(*widen(inputs)))

    folder = os.environ.get("JAX_FASTOPS_TEST_ORACLES")
    if not folder or case not in DECLARED:
        return compute()
    test, *_ = os.environ["PYTEST_CURRENT_TEST"].split("[")
    key = hashlib.sha256(repr((test, case.name, name)).encode())
    for value in map(np.asarray, jax.tree.leaves(inputs)):
        key.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    file = TESTS.parent / folder / key.hexdigest()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(compute()))
        part.rename(file)
    return pickle.loads(file.read_bytes())


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a reference gives for some arguments.

    Attributes:
      reference: the function.
      args: its arguments.
      wide: 64-bit types are enabled for it.
      exact: the results in float64, or None if only the reference's bits are right.
      compiled: it runs under one `jax.jit`.
    """

    reference: Callable[..., Any]
    args: tuple[Any, ...]
    wide: bool
    exact: Any
    compiled: bool = True

    @functools.cached_property
    def types(self) -> Any:
        with x64(self.wide):
            return jax.eval_shape(self.reference, *self.args)

    @functools.cached_property
    def values(self) -> Any:
        with x64(self.wide):
            run = jax.jit(self.reference) if self.compiled else self.reference
            return jax.tree.map(np.asarray, run(*self.args))

    def check(self, got: Any, tolerance: Tolerance, where: str = "result") -> None:
        """Compares results. The reference runs only if its own errors decide."""
        got = jax.tree.map(np.asarray, got)
        if self.exact is None or not is_within_floor(got, self.types, self.exact, tolerance):
            assert_matches(got, self.values, self.exact, tolerance, where)


def of_many(fn: Callable[..., Any], reference: Callable[..., Any], values: list[Any]) -> Any:
    """Each of `values`, with the results of `fn`, all in one program, and those in float64."""
    results, exact = (lambda values, f=f: [f(*v) for v in values] for f in (fn, reference))
    got = jax.tree.map(np.asarray, jax.jit(results)(values))
    return zip(values, got, oracle(exact, values), strict=True)


def run(transform: Transform, case: Case, mode: str | None, dtype: Any) -> None:
    inputs = make_inputs(case, transform, dtype)
    wide = dtype == np.float64
    with x64(wide), implementation(mode):
        got = execute(functools.partial(transform.apply, case.fn), transform, inputs)
    reference = kept(functools.partial, transform.apply, case.reference)
    exact, tolerance = None, case.tolerance
    if not (case.exact and transform.plain):
        exact = oracle(reference, inputs, case=case, name=transform.name)
    if not transform.plain:
        # In float64, the oracle itself has an error.
        ulps = 64.0 if dtype == np.float64 else 8.0
        tolerance = dataclasses.replace(tolerance, ulps=max(tolerance.ulps, ulps))
    Expected(reference, (inputs,), wide, exact, transform.compiled).check(got, tolerance)


# Functions that the transforms differentiate


def weights(shape: tuple[int, ...], dtype: Any, k: int) -> np.ndarray:
    """Fixed weights, different for every element."""
    return np.cos(1.7 * np.arange(np.prod(shape, dtype=int)) + k).reshape(shape).astype(dtype)


def loss(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A scalar function of all outputs whose derivatives up to the third order are not zero."""

    def scalar(*args):
        terms = [
            jnp.sum(weights(out.shape, out.dtype, k) * out + out * out * out / 6)
            for k, out in enumerate(float_outputs(fn(*args)))
        ]
        return functools.reduce(jnp.add, terms)

    return scalar


def loss_of(fn: Callable[..., Any], inputs: Inputs) -> Callable[..., jax.Array]:
    """The loss as a function of the differentiable arguments."""
    return loss(of(fn, inputs.args, inputs.diff))


def gradient(fn: Callable[..., jax.Array], inputs: Inputs) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.grad(fn, tuple(range(len(inputs.diff))))


def dot(a: tuple[Any, ...], b: tuple[Any, ...]) -> jax.Array:
    return functools.reduce(jnp.add, (jnp.sum(x * y) for x, y in zip(a, b, strict=True)))


# First order


def several(x):
    return jnp.stack([x, 2 * x, -x])


def value(fn, inputs):
    return outputs(fn(*inputs.args))


def jvp(fn, inputs, which=None):
    """The outputs and their tangents, for tangents of the chosen arguments (all by default)."""
    positions = range(len(inputs.diff)) if which is None else which
    indices = take(inputs.diff, positions)
    return jax.jvp(
        of(fn, inputs.args, indices), take(inputs.args, indices), take(inputs.tangents, positions)
    )


def vjp(fn, inputs, which=None):
    positions = range(len(inputs.diff)) if which is None else which
    indices = take(inputs.diff, positions)
    out, pullback = jax.vjp(of(fn, inputs.args, indices), *take(inputs.args, indices))
    return out, pullback(inputs.cotangents)


def grad(fn, inputs):
    return gradient(loss_of(fn, inputs), inputs)(*inputs.primals)


def linearize(fn, inputs):
    out, tangent_map = jax.linearize(of(fn, inputs.args, inputs.diff), *inputs.primals)
    return out, tangent_map(*inputs.tangents)


def linearize_vmap(fn, inputs):
    _, tangent_map = jax.linearize(of(fn, inputs.args, inputs.diff), *inputs.primals)
    return jax.vmap(tangent_map)(*map(several, inputs.tangents))


def linearize_transpose(fn, inputs):
    """The tangent map of every op is linear. Its transpose gives the gradients."""
    _, tangent_map = jax.linearize(of(fn, inputs.args, inputs.diff), *inputs.primals)
    return jax.linear_transpose(tangent_map, *inputs.primals)(inputs.cotangents)


def linear_transpose(fn, inputs, indices):
    chosen = take(inputs.args, indices)
    return jax.linear_transpose(of(fn, inputs.args, indices), *chosen)(inputs.cotangents)


# Higher order


def forward_over_reverse(fn, inputs):
    return jax.jvp(gradient(loss_of(fn, inputs), inputs), inputs.primals, inputs.tangents)


def directional(fn, inputs):
    return lambda *primals: jax.jvp(loss_of(fn, inputs), primals, inputs.tangents)[1]


def reverse_over_forward(fn, inputs):
    return gradient(directional(fn, inputs), inputs)(*inputs.primals)


def reverse_over_reverse(fn, inputs):
    first = gradient(loss_of(fn, inputs), inputs)
    return gradient(lambda *primals: dot(first(*primals), inputs.tangents), inputs)(*inputs.primals)


def forward_over_forward(fn, inputs):
    first = of(fn, inputs.args, inputs.diff)
    second = lambda *primals: jax.jvp(first, primals, inputs.tangents)  # noqa: E731
    return jax.jvp(second, inputs.primals, inputs.tangents)


def third_derivative(fn, inputs):
    second = lambda *primals: jax.jvp(  # noqa: E731
        gradient(loss_of(fn, inputs), inputs), primals, inputs.tangents
    )[1]
    return gradient(lambda *primals: dot(second(*primals), inputs.tangents), inputs)(
        *inputs.primals
    )


def third_forward(fn, inputs):
    def twice(*primals):
        return jax.jvp(directional(fn, inputs), primals, inputs.tangents)[1]

    return gradient(twice, inputs)(*inputs.primals)


def jacobian(fn, inputs, transform):
    return transform(of(fn, inputs.args, inputs.diff), tuple(range(len(inputs.diff))))(
        *inputs.primals
    )


def hessian(fn, inputs):
    return jax.hessian(loss_of(fn, inputs), tuple(range(len(inputs.diff))))(*inputs.primals)


# vmap


def in_axes(inputs: Inputs, mapped: tuple[tuple[int, int], ...]) -> tuple[int | None, ...]:
    return tuple(dict(mapped).get(i) for i in range(len(inputs.args)))


def vmap(fn, inputs, mapped, out_axes=0):
    return outputs(jax.vmap(fn, in_axes(inputs, mapped), out_axes)(*inputs.args))


def vmap_nested(fn, inputs, mapped):
    """`vmap` over the first axis inside `vmap` over the last; outputs have them first and last."""
    axes = in_axes(inputs, mapped)
    doubled = tuple(
        a if x is None else jnp.stack([a, ~a if a.dtype == bool else -a], -1)
        for a, x in zip(inputs.args, axes, strict=True)
    )
    outer = tuple(None if x is None else -1 for x in axes)
    return outputs(jax.vmap(jax.vmap(fn, axes), outer, -1)(*doubled))


def vmap_of_jvp(fn, inputs, mapped):
    axes = in_axes(inputs, mapped)

    def one(args, tangents):
        return jvp(fn, Inputs(args, tangents, (), inputs.diff))

    return jax.vmap(one, (axes, 0))(inputs.args, inputs.tangents)


def vmap_of_vjp(fn, inputs, mapped):
    """Per-example gradients, also of the arguments that all examples share."""
    axes = in_axes(inputs, mapped)

    def one(args, cotangents):
        return vjp(fn, Inputs(args, (), cotangents, inputs.diff))

    return jax.vmap(one, (axes, 0))(inputs.args, inputs.cotangents)


def vmap_of_grad(fn, inputs, mapped):
    axes = in_axes(inputs, mapped)
    return jax.vmap(jax.grad(loss(fn), inputs.diff), axes)(*inputs.args)


def vmap_of_hvp(fn, inputs, mapped, transform):
    axes = in_axes(inputs, mapped)

    def one(args, tangents):
        return transform(fn, Inputs(args, tangents, (), inputs.diff))

    return jax.vmap(one, (axes, 0))(inputs.args, inputs.tangents)


def grad_of_vmap(fn, inputs, mapped):
    axes = in_axes(inputs, mapped)
    return jax.grad(lambda *args: jnp.sum(jax.vmap(loss(fn), axes)(*args)), inputs.diff)(
        *inputs.args
    )


def hvp_of_vmap(fn, inputs, mapped):
    axes = in_axes(inputs, mapped)
    total = of(lambda *args: jnp.sum(jax.vmap(loss(fn), axes)(*args)), inputs.args, inputs.diff)
    first = gradient(lambda *primals: total(*primals)[0], inputs)
    return jax.jvp(first, inputs.primals, inputs.primals)


def vmap_of_one_vjp(fn, inputs, mapped):
    """The gradient of the last differentiable argument only, for each example."""
    return jax.vmap(jax.grad(loss(fn), inputs.diff[-1]), in_axes(inputs, mapped))(*inputs.args)


def grad_of_vmap_of_grad(fn, inputs, mapped):
    """Gradients of a function of the gradients of each example."""
    each = jax.vmap(jax.grad(loss(fn), inputs.diff), in_axes(inputs, mapped))

    def total(*primals):
        found = each(*put(inputs.args, inputs.diff, primals))
        return functools.reduce(jnp.add, (jnp.sum(g * g) for g in found))

    return gradient(total, inputs)(*inputs.primals)


def vmap_of_vmap_of_grad(fn, inputs, mapped, outer):
    """One map over some arguments in another map over the others."""
    axes = in_axes(inputs, mapped)
    inner = jax.vmap(
        jax.grad(loss(fn), inputs.diff), [None if i in outer else x for i, x in enumerate(axes)]
    )
    return jax.vmap(inner, [x if i in outer else None for i, x in enumerate(axes)])(*inputs.args)


def linearize_vmap_some(fn, inputs, which):
    """The tangents of one argument are mapped and the others are not; and the transposed map."""
    _, tangent_map = jax.linearize(of(fn, inputs.args, inputs.diff), *inputs.primals)
    many = jax.vmap(tangent_map, [0 if k == which else None for k in range(len(inputs.diff))])
    tangents = put(inputs.tangents, [which], [several(inputs.tangents[which])])
    cotangents = tuple(map(several, inputs.cotangents))
    return many(*tangents), jax.linear_transpose(many, *tangents)(cotangents)


def vjp_transpose(fn, inputs):
    """The pullback, mapped; and transposed, for values that it has not rounded."""
    pullback = jax.vjp(of(fn, inputs.args, inputs.diff), *inputs.primals)[1]
    cotangents = tuple(map(several, inputs.cotangents))
    mapped = jax.vmap(pullback)
    tangents = tuple(map(several, inputs.tangents))
    return mapped(cotangents), jax.linear_transpose(mapped, cotangents)(tangents)


# Remat, control flow, donation


def checkpoint_in_scan(fn, inputs):
    """Gradients of a scan over a function that is computed again."""
    step = jax.checkpoint(loss_of(fn, inputs))

    def total(*primals):
        return jax.lax.scan(lambda c, _: (c + step(*primals), None), 0 * step(*primals), length=2)[
            0
        ]

    return gradient(total, inputs)(*inputs.primals)


def checkpoint(fn, inputs, policy, transform):
    return transform(jax.checkpoint(fn, policy=policy), inputs)


def checkpoint_around_loss(fn, inputs):
    return gradient(jax.checkpoint(loss_of(fn, inputs)), inputs)(*inputs.primals)


def carry_step(fn, args, carry):
    """The next carry. It depends on the op's result if that has the right shape."""
    out = outputs(fn(carry, *args[1:]))
    first = out[0]
    if not is_float(carry.dtype):
        same = first.shape == carry.shape and first.dtype == carry.dtype
        return (first if same else carry[..., ::-1]), out
    if first.shape == carry.shape and first.dtype == carry.dtype:
        return carry / 2 + first / 4 + args[0] / 2, out
    return carry * 0.75, out


def scan(fn, inputs, mapped):
    def step(carry, args):
        carry, out = carry_step(fn, args, carry)
        return carry, out

    start = jax.tree.map(lambda a: a[0], inputs.args[0])
    return jax.lax.scan(step, start, inputs.args)


def scan_loss(fn, inputs):
    def total(*primals):
        args = put(inputs.args, inputs.diff, primals)
        return loss(lambda *args: scan(fn, dataclasses.replace(inputs, args=args), None))(*args)

    return total


def scan_grad(fn, inputs, mapped):
    return gradient(scan_loss(fn, inputs), inputs)(*inputs.primals)


def scan_jvp(fn, inputs, mapped):
    return jax.jvp(scan_loss(fn, inputs), inputs.primals, inputs.primals)


def scan_body(fn, inputs, mapped):
    """The op's own outputs from inside a scan, and the gradients of each step."""

    def step(_, args):
        args, cotangents = args
        return 0, vjp(fn, Inputs(args, (), cotangents, inputs.diff))

    return jax.lax.scan(step, 0, (inputs.args, inputs.cotangents))[1]


def while_loop(fn, inputs):
    def step(state):
        i, carry = state
        return i + 1, carry_step(fn, inputs.args, carry)[0]

    return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, jnp.asarray(inputs.args[0])))[1]


def while_jvp(fn, inputs):
    def run_loop(*primals):
        args = put(inputs.args, inputs.diff, primals)
        return while_loop(fn, dataclasses.replace(inputs, args=args))

    return jax.jvp(run_loop, inputs.primals, inputs.tangents)


def fori_grad(fn, inputs):
    def total(*primals):
        args = put(inputs.args, inputs.diff, primals)
        end = jax.lax.fori_loop(0, 3, lambda _, carry: carry_step(fn, args, carry)[0], args[0])
        return jnp.sum(end * weights(end.shape, end.dtype, 0))

    return gradient(total, inputs)(*inputs.primals)


def branch(fn, which):
    other = lambda args: tuple(out * 2 for out in float_outputs(fn(*args)))  # noqa: E731
    same = lambda args: float_outputs(fn(*args))  # noqa: E731
    return lambda *args: jax.lax.cond(which, same, other, args)


def either(inputs):
    """Two opposite conditions that depend on the data."""
    positive = jnp.sum(inputs.args[0]) > 0
    return positive, ~positive


def cond(fn, inputs):
    return [branch(fn, which)(*inputs.args) for which in either(inputs)]


def cond_grad(fn, inputs):
    return [grad(branch(fn, which), inputs) for which in either(inputs)]


def cond_vmapped(fn, inputs, mapped):
    """The condition differs between examples, so both branches run and the result is selected."""
    which = jnp.arange(BATCH) % 2 == 0

    def one(which, args, cotangents):
        return vjp(branch(fn, which), Inputs(args, (), cotangents, inputs.diff))

    return jax.vmap(one, (0, in_axes(inputs, mapped), 0))(which, inputs.args, inputs.cotangents)


def donate(fn, inputs):
    """Every argument donated, then every argument donated and used again after the op."""
    fresh = lambda: tuple(jnp.array(arg, copy=True) for arg in inputs.args)  # noqa: E731
    every = tuple(range(len(inputs.args)))
    alone = jax.jit(lambda *args: outputs(fn(*args)), donate_argnums=every)
    reused = jax.jit(lambda *args: (outputs(fn(*args)), args), donate_argnums=every)
    return alone(*fresh()), reused(*fresh())


def donate_grad(fn, inputs):
    """Arguments and cotangents donated: gradients may be written to the cotangents' memory."""
    fresh = lambda arrays: tuple(jnp.array(array, copy=True) for array in arrays)  # noqa: E731

    def gradients(args, cotangents):
        return vjp(fn, Inputs(args, (), cotangents, inputs.diff))[1]

    def with_inputs(args, cotangents):
        return gradients(args, cotangents), args, cotangents

    every = [jax.jit(f, donate_argnums=(0, 1)) for f in (gradients, with_inputs)]
    return [f(fresh(inputs.args), fresh(inputs.cotangents)) for f in every]


def constants(fn, inputs):
    """The arguments are constants of the program, so a compiler may fold the call."""
    return jax.jit(lambda: vjp(fn, inputs))()


def jitted(fn, inputs):
    """`jit` is inside the differentiation, rather than around it."""
    return vjp(jax.jit(fn), inputs), jvp(jax.jit(fn), inputs)


def repeated(fn, inputs):
    """Two calls with the same arguments, and between them one with others: no mix-up of results."""
    moved = tuple(-arg if is_float(arg.dtype) else arg for arg in inputs.args)
    return [
        vjp(fn, dataclasses.replace(inputs, args=args))
        for args in (inputs.args, moved, inputs.args)
    ]


def transforms(case: Case) -> Iterator[Transform]:
    """Every transform that applies to a case."""
    partial = functools.partial
    example, diff = case.example, case.diff
    everything = tuple(range(len(example)))
    scalars = any(out.ndim == 0 for out in like_outputs(case, case.rng("ranks"), example))

    yield Transform("value", value, basic=True)
    yield Transform("value/eager", value, compiled=False)
    if case.linear:
        yield Transform("linear_transpose", partial(linear_transpose, indices=case.linear))
    if diff:
        yield from differentiable_transforms(case)

    # vmap: each argument, and all together; the axis first, last, and negative.
    for name, subset in case.subsets():
        first = tuple((i, 0) for i in subset)
        ranks = [example[i].ndim for i in subset]
        last = tuple((i, rank) for i, rank in zip(subset, ranks, strict=True))
        negative = tuple((i, -min(2, rank + 1)) for i, rank in zip(subset, ranks, strict=True))
        yield Transform(
            f"vmap/{name}/first", partial(vmap, mapped=first), mapped=first, basic=name == "all"
        )
        yield Transform(f"vmap/{name}/last", partial(vmap, mapped=last, out_axes=-1), mapped=last)
        yield Transform(
            f"vmap/{name}/negative",
            partial(vmap, mapped=negative, out_axes=0 if scalars else 1),
            mapped=negative,
        )
        yield Transform(f"vmap/{name}/nested", partial(vmap_nested, mapped=first), mapped=first)
        if not diff:
            continue
        yield Transform(f"vmap_of_jvp/{name}", partial(vmap_of_jvp, mapped=first), mapped=first)
        yield Transform(
            f"vmap_of_vjp/{name}",
            partial(vmap_of_vjp, mapped=first),
            mapped=first,
            basic=name == "all",
        )
        yield Transform(f"vmap_of_vjp/{name}/last", partial(vmap_of_vjp, mapped=last), mapped=last)
        yield Transform(
            f"vmap_of_grad/{name}", partial(vmap_of_grad, mapped=first), mapped=first, plain=False
        )
        yield Transform(
            f"grad_of_vmap/{name}", partial(grad_of_vmap, mapped=first), mapped=first, plain=False
        )
        again = partial(grad_of_vmap_of_grad, mapped=first)
        yield Transform(f"grad_of_vmap_of_grad/{name}", again, mapped=first, plain=False)
        if len(diff) > 1:
            one = partial(vmap_of_one_vjp, mapped=first)
            yield Transform(f"vmap_of_vjp/{name}/one", one, mapped=first, plain=False)
    if len(everything) > 1:
        every = tuple((i, 0) for i in everything)
        for name, outer in (("first", (0,)), ("others", everything[1:])) if diff else ():
            nested = partial(vmap_of_vmap_of_grad, mapped=every, outer=outer)
            yield Transform(f"vmap_of_vmap_of_grad/{name}", nested, mapped=every, plain=False)
        mixed = tuple((i, 0 if i % 2 == 0 else -1) for i in everything)
        yield Transform("vmap/all/mixed", partial(vmap, mapped=mixed), mapped=mixed)
    first = tuple((i, 0) for i in everything)
    yield Transform("vmap/eager", partial(vmap, mapped=first), mapped=first, compiled=False)
    for size, name in ((1, "one_example"), (0, "no_examples")):
        yield Transform(f"vmap/{name}", partial(vmap, mapped=first), mapped=first, size=size)
        if diff:
            yield Transform(
                f"vmap_of_vjp/{name}", partial(vmap_of_vjp, mapped=first), mapped=first, size=size
            )

    # Control flow
    yield Transform("while/value", while_loop, plain=False)
    yield Transform("cond/value", cond)
    yield Transform("donate/value", donate, compiled=False)


def differentiable_transforms(case: Case) -> Iterator[Transform]:
    partial = functools.partial
    count = len(case.diff)
    every = tuple((i, 0) for i in range(len(case.example)))

    yield Transform("jvp", jvp, basic=True)
    yield Transform("vjp", vjp, basic=True)
    yield Transform("jvp/eager", jvp, compiled=False)
    yield Transform("vjp/eager", vjp, compiled=False)
    if count > 1:
        for k, i in enumerate(case.diff):
            yield Transform(f"jvp/x{i}", partial(jvp, which=(k,)))
            yield Transform(f"vjp/x{i}", partial(vjp, which=(k,)))
    yield Transform("grad", grad, plain=False)
    yield Transform("jit_inside", jitted)
    yield Transform("repeated", repeated)
    yield Transform("constants", constants, compiled=False)
    yield Transform("linearize", linearize)
    yield Transform("linearize/vmap", linearize_vmap)
    yield Transform("linearize/transpose", linearize_transpose)
    yield Transform("vjp/transpose", vjp_transpose, plain=False)
    if count > 1:
        for k, i in enumerate(case.diff):
            yield Transform(f"linearize/vmap/x{i}", partial(linearize_vmap_some, which=k))

    second = {
        "forward_over_reverse": forward_over_reverse,
        "reverse_over_forward": reverse_over_forward,
        "reverse_over_reverse": reverse_over_reverse,
        "forward_over_forward": forward_over_forward,
    }
    for name, transform in second.items():
        yield Transform(f"hvp/{name}", transform, plain=False)
    yield Transform("third/reverse_over_forward_over_reverse", third_derivative, plain=False)
    yield Transform("third/reverse_over_forward_over_forward", third_forward, plain=False)
    for name in ("forward_over_reverse", "reverse_over_reverse"):
        mapped = partial(vmap_of_hvp, mapped=every, transform=second[name])
        yield Transform(f"vmap_of_hvp/{name}", mapped, mapped=every, plain=False)
    yield Transform("hvp_of_vmap", partial(hvp_of_vmap, mapped=every), mapped=every, plain=False)
    yield Transform("jacfwd", partial(jacobian, transform=jax.jacfwd))
    yield Transform("jacrev", partial(jacobian, transform=jax.jacrev))
    yield Transform("hessian", hessian, plain=False)

    policies = {
        "default": None,
        "everything_saveable": jax.checkpoint_policies.everything_saveable,
        "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    }
    for name, policy in policies.items():
        yield Transform(f"checkpoint/{name}", partial(checkpoint, policy=policy, transform=vjp))
    remat = partial(checkpoint, policy=None, transform=forward_over_reverse)
    yield Transform("checkpoint/hvp", remat, plain=False)
    yield Transform("checkpoint/loss", checkpoint_around_loss, plain=False)
    yield Transform("checkpoint/scan", checkpoint_in_scan, plain=False)
    yield Transform(
        "checkpoint/eager", partial(checkpoint, policy=None, transform=vjp), compiled=False
    )

    yield Transform("scan/value", partial(scan, mapped=every), mapped=every, plain=False)
    yield Transform("scan/inside", partial(scan_body, mapped=every), mapped=every)
    yield Transform("scan/grad", partial(scan_grad, mapped=every), mapped=every, plain=False)
    yield Transform("scan/jvp", partial(scan_jvp, mapped=every), mapped=every, plain=False)
    yield Transform("while/jvp", while_jvp, plain=False)
    yield Transform("fori/grad", fori_grad, plain=False)
    yield Transform("cond/grad", cond_grad, plain=False)
    yield Transform("cond/vmapped", partial(cond_vmapped, mapped=every), mapped=every)
    yield Transform("donate/vjp", donate_grad, compiled=False)


def types(case: Case, mode: str | None, dtype: Any) -> None:
    """Abstract evaluation gives the shapes, dtypes and weak types of the reference."""
    args = case.make_args(case.rng("types"), dtype)
    with x64(dtype == np.float64):
        with implementation(mode):
            got = jax.eval_shape(case.fn, *args)
        want = jax.eval_shape(case.reference, *args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert mine.weak_type == theirs.weak_type, "weak types differ"


def x64_keeps_dtype(case: Case, mode: str | None, dtype: Any) -> None:
    """Arguments of a narrow dtype keep it while 64-bit types are enabled."""
    transform = Transform("x64", vjp if case.diff else value)
    inputs = make_inputs(case, transform, dtype)
    apply = functools.partial(transform.apply, case.fn)
    with implementation(mode):
        want = execute(apply, transform, inputs)
        with x64():
            got = execute(apply, transform, inputs)
    jax.tree.map(assert_bitwise_equal, got, want)


def checks(case: Case) -> Iterator[Check]:
    yield Check("types", types, basic=True, jax="first")
    yield Check("x64/keeps_dtype", x64_keeps_dtype, every_dtype=False)
    for transform in transforms(case):
        yield Check(
            transform.name,
            functools.partial(run, transform),
            basic=transform.basic,
            jax="first" if transform.basic else "",
            mapped=bool(transform.mapped),
            detail=DETAIL.fullmatch(transform.name) is not None,
            nested=NESTED.fullmatch(transform.name) is not None,
        )
