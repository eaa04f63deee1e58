"""Ops under JAX's settings for debugging, and under `jax.experimental.jet`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import strict
from harness.programs import assert_strict
from jax.experimental import jet

import jax_fastops as fo
from jax_fastops._registry import families

CALLS = {name: call for calls in families().values() for name, call in calls.items()}


def operands(call, dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in call.shapes[1]]


def scalar(function):
    def total(*args):
        outs = jax.tree.leaves(function(*args))
        return sum((jnp.sum(y.astype(jnp.float32)) for y in outs), jnp.float32(0))

    return total


def gradients(function, args):
    return jax.grad(scalar(function), tuple(range(len(args))))


@pytest.fixture(params=(pytest.param("native", marks=pytest.mark.jax), "xla"))
def by(request):
    with fo.use_implementation(request.param):
        yield request.param


@pytest.mark.parametrize("op", CALLS)
def test_strict_promotion_changes_nothing(op, by):
    """Its program, gradients and second derivatives; also of a function that was traced before."""
    call = CALLS[op]
    args = operands(call, jnp.bfloat16)

    def everything(*args):
        inner = jax.jit(call.function)
        grads = gradients(inner, args)
        return inner(*args), *jax.jvp(grads, args, args)

    assert_strict(everything, *args)
    with strict():
        jax.jit(everything).lower(*args)


def programs(call, args):
    """The op and its gradients, eager and jitted."""
    grads = gradients(call.function, args)
    return {
        "eager": call.function,
        "jit of grad": jax.jit(grads),
        "jit": jax.jit(call.function),
        "grad": grads,
    }


# The mask of a softmax has infinities inside.
@pytest.mark.parametrize("op", [op for op in CALLS if op != "list_attention"])
def test_finite_values_pass_the_checks_for_nan_and_infinity(op, by):
    args = operands(CALLS[op])
    for program in programs(CALLS[op], args).values():
        with jax.debug_nans(True), jax.debug_infs(True):
            found = jax.block_until_ready(program(*args))
        assert all(np.isfinite(y).all() for y in jax.tree.leaves(found))


@pytest.mark.jax
@pytest.mark.parametrize("op", CALLS)
def test_a_nan_ends_in_a_floating_point_error(op, native):
    args = operands(CALLS[op])
    args[0][:] = np.nan
    for program in programs(CALLS[op], args).values():
        if not any(np.isnan(y).any() for y in jax.tree.leaves(program(*args))):
            continue  # the gradient of a linear op
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(program(*args))


@pytest.mark.parametrize("op", (fo.softmax, fo.layer_norm))
def test_an_infinity_that_becomes_nan_inside_of_an_op(op, by):
    x = np.zeros((4, 8), np.float32)
    x[1, 2] = np.inf
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(lambda x: op(x * 2).sum())(x)


@pytest.mark.jax
def test_an_infinity_ends_in_a_floating_point_error(native):
    x = jnp.full((4, 8), 3e38)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        jax.jit(lambda x: fo.relu(x * 2))(x)


@pytest.mark.jax
@pytest.mark.parametrize("padding", ("SAME", "VALID"))
@pytest.mark.parametrize("dtype", (np.float32, jnp.bfloat16))
def test_max_pool_shows_no_infinity_of_its_padding(padding, dtype):
    x = np.random.default_rng(0).standard_normal((2, 9, 9, 3)).astype(dtype)

    def pool(x):
        return fo.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), padding)

    want = jax.jit(pool)(x), jax.jit(jax.grad(lambda x: pool(x).sum()))(x)
    with jax.debug_infs(True):
        got = pool(x), jax.grad(lambda x: pool(x).sum())(x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# jet does not take functions with a custom derivative, such as jax.nn.relu.
CUSTOM = {"relu", "add_relu", "batch_norm", "batch_norm_statistics", "lerp", "bias_relu"}
CUSTOM |= {"linear_cross_entropy"}


def fails_under_jet(function, args) -> bool:
    try:
        jet.jet(function, args, [[np.ones_like(x)] for x in args])
    except (jax.errors.UnexpectedTracerError, AttributeError):  # it depends on the version of jax
        return True
    return False


@pytest.mark.jax
@pytest.mark.parametrize("op", sorted(CUSTOM))
def test_jet_takes_a_custom_derivative_if_it_takes_that_of_jax(op, native):
    args = operands(CALLS[op])
    assert fails_under_jet(CALLS[op].function, args) == fails_under_jet(jax.nn.relu, args[:1])


@pytest.mark.jax
# jet has no rule for the mask of a softmax.
@pytest.mark.parametrize("op", [op for op in CALLS if op not in (*CUSTOM, "list_attention")])
def test_jet_gives_the_derivatives_along_a_path(op, native):
    call = CALLS[op]
    args = operands(call)
    rng = np.random.default_rng(1)
    series = [[rng.standard_normal(x.shape).astype(np.float32) for _ in range(3)] for x in args]

    def path(t):
        pairs = zip(args, series, strict=True)
        return call.function(*(x + t * a + t**2 / 2 * b + t**3 / 6 * c for x, (a, b, c) in pairs))

    def derivative(f):
        return lambda t: jax.jvp(f, (t,), (1.0,))[1]

    second = derivative(derivative(path))
    want = jax.jit(lambda t: (path(t), *jax.jvp(second, (t,), (1.0,))))(0.0)
    value, terms = jax.jit(lambda *args: jet.jet(call.function, args, series))(*args)
    tree = jax.tree.structure(value)
    _, *terms = zip(*tree.flatten_up_to(terms), strict=True)
    for mine, theirs in zip([value, *terms], want, strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
