"""The op layer on toy ops: every order of derivative, levels of vmap, optional operands."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_ops
from harness.numerics import assert_close

import jax_fastops as fo

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("native_in_float64")]

X = np.random.default_rng(0).normal(size=(3, 5, 6))
SCALE = np.random.default_rng(1).normal(size=(6,))
CLOSE = dict(rtol=1e-9, atol=1e-9)


def loss(f):
    def total(*args):
        return sum(jnp.sum(jnp.sin(y * (i + 1.5))) for i, y in enumerate(jax.tree.leaves(f(*args))))

    return total


# name -> (op, reference, arguments of one example)
CASES = {
    "scaled_relu": (toy_ops.scaled_relu, toy_ops.scaled_relu.reference, (X[0], SCALE)),
    "softmax": (toy_ops.softmax, toy_ops.softmax.reference, (X[0],)),
    "unit": (toy_ops.unit, toy_ops.unit.reference, (X[0],)),
    "affine": (
        lambda x, s, b: toy_ops.affine(x, s, b, power=3),
        lambda x, s, b: toy_ops.affine.reference(x, s, b, power=3),
        (X[0], SCALE, SCALE * 2),
    ),
    "affine without scale": (
        lambda x, b: toy_ops.affine(x, None, b, power=2),
        lambda x, b: toy_ops.affine.reference(x, None, b, power=2),
        (X[0], SCALE),
    ),
    "add_bias": (toy_ops.add_bias, toy_ops.add_bias.reference, (X[0], SCALE)),
    "moments": (toy_ops.moments, toy_ops.moments.reference, (X[0],)),
    "transpose": (
        lambda x: toy_ops.transpose(x, (1, 0)),
        lambda x: jnp.transpose(x, (1, 0)),
        (X[0],),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def both(transform, case):
    op, reference, args = case
    return jax.jit(transform(op))(*args), jax.jit(transform(reference))(*args)


def argnums(args):
    return tuple(range(len(args)))


def test_value(case):
    assert_close(*both(lambda f: f, case), **CLOSE)


def test_value_and_gradients_without_jit(case):
    op, reference, args = case
    assert_close(op(*args), reference(*args), **CLOSE)
    every = argnums(args)
    assert_close(jax.grad(loss(op), every)(*args), jax.grad(loss(reference), every)(*args), **CLOSE)


def test_gradients(case):
    assert_close(*both(lambda f: jax.grad(loss(f), argnums(case[2])), case), **CLOSE)


def test_gradient_of_each_argument_alone(case):
    for i in argnums(case[2]):
        assert_close(*both(lambda f, i=i: jax.grad(loss(f), i), case), **CLOSE)


def test_jvp(case):
    def transform(f):
        return lambda *args: jax.jvp(f, args, tuple(jnp.cos(a) for a in args))

    assert_close(*both(transform, case), **CLOSE)


def test_jvp_in_each_argument_alone(case):
    for i in argnums(case[2]):

        def transform(f, i=i):
            def g(*args):
                return jax.jvp(
                    lambda a: f(*args[:i], a, *args[i + 1 :]), args[i : i + 1], (jnp.cos(args[i]),)
                )

            return g

        assert_close(*both(transform, case), **CLOSE)


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_order(case, inner, outer):
    nums = argnums(case[2])
    assert_close(*both(lambda f: outer(inner(loss(f), nums), nums), case), **CLOSE)


def test_third_order(case):
    def transform(f):
        def norm(g):
            return lambda *args: sum(jnp.sum(x**2) for x in jax.tree.leaves(g(*args)))

        nums = argnums(case[2])
        return jax.grad(norm(jax.grad(norm(jax.grad(loss(f), nums)), nums)), nums)

    assert_close(*both(transform, case), **CLOSE)


def test_gradients_per_example_with_unmapped_parameters(case):
    _, _, args = case

    def transform(f):
        in_axes = (0,) + (None,) * (len(args) - 1)
        per_example = jax.vmap(jax.grad(loss(f), argnums(args)), in_axes)
        return lambda x, *rest: per_example(jnp.stack([x, 2 * x, -x]), *rest)

    actual, expected = both(transform, case)
    assert all(g.shape[0] == 3 for g in jax.tree.leaves(actual))
    assert_close(actual, expected, **CLOSE)


def test_gradients_per_example_with_mapped_parameters(case):
    def transform(f):
        g = jax.vmap(jax.grad(loss(f), argnums(case[2])))
        return lambda *args: g(*(jnp.stack([a, 2 * a, -a]) for a in args))

    assert_close(*both(transform, case), **CLOSE)


def test_only_parameters_mapped(case):
    _, _, args = case
    if len(args) == 1:
        pytest.skip("no parameters")

    def transform(f):
        g = jax.vmap(f, (None,) + (0,) * (len(args) - 1))
        value = jax.grad(lambda *a: loss(g)(*a), argnums(args))
        return lambda x, *rest: value(x, *(jnp.stack([r, 2 * r]) for r in rest))

    assert_close(*both(transform, case), **CLOSE)


def test_nested_vmap_of_gradients(case):
    def transform(f):
        g = jax.grad(loss(f), argnums(case[2]))
        outer = (0,) * len(case[2])
        inner = (0,) + (None,) * (len(case[2]) - 1)
        g = jax.vmap(jax.vmap(g, inner), outer)
        return lambda x, *rest: g(
            jnp.stack([jnp.stack([x, 2 * x]), jnp.stack([-x, 3 * x])]),
            *(jnp.stack([r, 2 * r]) for r in rest),
        )

    assert_close(*both(transform, case), **CLOSE)


def test_gradient_of_vmap_of_gradient(case):
    nums = argnums(case[2])

    def transform(f):
        def inner(*args):
            per_example = jax.vmap(jax.grad(loss(f), nums), (0,) + (None,) * (len(args) - 1))
            x, *rest = args
            grads = per_example(jnp.stack([x, 2 * x]), *rest)
            return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(grads))

        return jax.grad(inner, nums)

    assert_close(*both(transform, case), **CLOSE)


def test_remat_and_scan(case):
    args = case[2]

    def transform(f):
        def run(*args):
            def body(carry, _):
                return carry + jax.checkpoint(loss(f))(*args), None

            return jax.lax.scan(body, 0.0, None, length=3)[0]

        return jax.grad(run, argnums(args))

    assert_close(*both(transform, case), **CLOSE)


def test_a_gradient_program_holds_just_the_two_kernels():
    program = jax.jit(jax.grad(loss(toy_ops.scaled_relu), (0, 1))).trace(X, SCALE).jaxpr
    names = [str(eqn.primitive) for eqn in program.eqns if "fastops" in str(eqn.primitive)]
    assert names == ["fastops_toy_scaled_relu_fwd", "fastops_toy_scaled_relu_vjp"]


def test_an_op_keeps_what_it_declares():
    leaves = jax.tree.leaves(jax.vjp(toy_ops.softmax, X)[1])
    assert [(v.shape, v.dtype) for v in leaves] == [(X.shape, X.dtype)]


def test_an_op_may_keep_nothing():
    assert not jax.tree.leaves(jax.vjp(toy_ops.add_bias, X, SCALE)[1])


def test_gradient_with_respect_to_one_operand_computes_that_one():
    program = jax.jit(jax.grad(loss(toy_ops.scaled_relu), 1)).trace(X, SCALE).jaxpr
    (vjp,) = [e for e in program.eqns if str(e.primitive).endswith("_vjp")]
    assert len(vjp.outvars) == 1 and vjp.outvars[0].aval.shape == SCALE.shape


def test_gather_like_ops_take_any_dtype():
    for dtype in ("int32", "bool", "complex64", "uint8"):
        x = (X > 0).astype(dtype)
        out = jax.jit(lambda x: toy_ops.transpose(x, (2, 0, 1)))(x)
        assert out.dtype == x.dtype
        np.testing.assert_array_equal(out, np.transpose(x, (2, 0, 1)))


def test_pullback_without_pushforward_is_refused():
    with pytest.raises(ValueError, match="pushforward"):
        toy_ops.Op("toy_half", "... -> ...", jnp.sin, pullback=lambda kept, cts: cts)


def test_programs_and_profiles_name_the_op():
    """XLA names an instruction by the last part of its name stack, and profilers show both."""

    def loss(x):
        return fo.layer_norm(fo.softmax(x)).sum()

    text = jax.jit(jax.grad(loss)).lower(np.ones((4, 256), np.float32)).as_text(debug_info=True)
    names = re.findall(r'"\S*/(fastops_\w+)"', text)
    assert set(names) == {
        "fastops_softmax_fwd",
        "fastops_layer_norm_fwd",
        "fastops_layer_norm_vjp",
        "fastops_softmax_vjp",
    }
