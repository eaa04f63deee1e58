"""`gated_act`: transformations, shapes, the halves of one array, special values, residuals."""

import functools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, assert_matches, checks
from harness.numerics import assert_within, normal
from harness.programs import value_and_gradients
from harness.properties import broadcast_shapes, of_any
from harness.transforms import of_many
from hypothesis import strategies as st

import jax_fastops as fo
from jax_fastops._activations import ACTIVATIONS

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

MODES = ("native", "auto", "xla")


def reference(gate, up=None, *, activation="silu"):
    """What users write, in the accumulator dtype, rounded once."""
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (ACTIVATIONS[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def draws(*shapes):
    return lambda rng, dtype: tuple(normal(rng, shape, dtype) for shape in shapes)


def case(name, activation, operands, sharded=None, **more):
    if sharded is not None:
        more["make_sharded_args"] = draws(*sharded)
    return Case(
        name=name,
        fn=functools.partial(fo.gated_act, activation=activation),
        reference=functools.partial(reference, activation=activation),
        make_args=draws(*operands),
        tolerance=Tolerance(ulps=16.0),
        kernels=("gated_act", "gated_act_bwd"),
        only_kernels=True,
        maps=(tuple(range(len(operands))),),
        kept=lambda *args: [(a.dtype, a.size) for a in args],
        **more,
    )


PAIR = case(
    "pair",
    "silu",
    [(3, 5)] * 2,
    [(8, 16, 24)] * 2,
    shardings=(
        Sharding("batch", (0, 0), (0,)),
        Sharding("sequence", (1, 1), (1,)),
        Sharding("features", (2, 2), (2,)),
    ),
    symbolic=("b, n", "b, n"),
)

HALVES = case(
    "halves",
    "gelu",
    [(3, 10)],
    [(8, 16, 48)],
    shardings=(Sharding("batch", (0,), (0,)), Sharding("sequence", (1,), (1,))),
    symbolic=("b, 10",),
)

basic = functools.partial(case, basic_only=True, modes=("native",))
OTHERS = [
    basic(name, name, [(2, 8)], symbolic=("b, 8",))
    for name in ACTIVATIONS
    if name not in ("silu", "gelu")
]
ROWS = basic("rows", "silu", [(2, 3, 16)], dtypes=("bfloat16", "float32"))
SCALARS = basic("scalars", "silu", [(), ()], dtypes=("float32",))


@checks(PAIR, HALVES, *OTHERS, ROWS, SCALARS)
def test_harness(check):
    check()


@pytest.fixture(params=ACTIVATIONS)
def activation(request):
    return request.param


# The activations except relu differ only in the formula of the kernel.
of_each_kind = pytest.mark.parametrize(
    "activation",
    [a if a in ("silu", "relu") else pytest.param(a, marks=pytest.mark.slow) for a in ACTIVATIONS],
)


# Shapes -------------------------------------------------------------------------------------------


def check_shapes(activation, dtype, examples):
    """Value and gradients of many shapes of the result, as pairs and as halves, against float64."""
    rng = np.random.default_rng(math.prod(map(math.prod, examples)) % 1000003)
    values = []
    for shape in examples:
        values.append(draws(shape, shape, shape)(rng, dtype))
        if shape:
            values.append(draws(shape, (*shape[:-1], 2 * shape[-1]))(rng, dtype))

    both = (value_and_gradients(f, activation=activation) for f in (fo.gated_act, reference))
    on_gpu = jax.devices()[0].platform == "gpu"
    coarse = 2.0**11 if (activation, dtype) == ("gelu_exact", jnp.bfloat16) and on_gpu else 16
    for given, got, want in of_many(*both, values):
        what = f"{activation} of {dtype}{[a.shape for a in given]}"
        unit = (1 + max(float(np.abs(a).astype(float).max(initial=0)) for a in given)) ** 3
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert mine.dtype == dtype and mine.shape == theirs.shape, what
            assert_within(mine, theirs, coarse * unit * np.ones(theirs.shape), what)


N = (1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 127, 1000, 1025)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_lengths(activation, kind):
    check_shapes(activation, jnp.dtype(kind), [(5, n) for n in N])


def test_every_dtype(activation, dtype):
    check_shapes(activation, dtype, [(), (9,), (3, 40), (4, 3, 33), (2, 1, 3, 4001)])


@pytest.mark.parametrize("shape", [(4099, 72), (33, 7001), (3, 5, 40_001)])
def test_large_arrays(shape):
    check_shapes("silu", jnp.dtype(jnp.bfloat16), [shape])


def test_any_shapes():
    def check(drawn, activation):
        for kind in (np.float32, jnp.bfloat16):
            check_shapes(activation, jnp.dtype(kind), [shape for (shape,) in drawn])

    of_any(3, broadcast_shapes(0), check, activation=st.sampled_from([*ACTIVATIONS]))


# Values -------------------------------------------------------------------------------------------


def test_halves_have_the_bits_of_pairs(activation, dtype):
    """Whatever the alignment of the rows."""
    rng = np.random.default_rng(7)
    run = jax.jit(value_and_gradients(fo.gated_act, activation=activation))
    for shape in ((6, 24), (5, 13), (1, 1), (3, 2, 999)):
        dy, gate, up = draws(shape, shape, shape)(rng, dtype)
        y, (dgate, dup) = run(dy, gate, up)
        both, (dboth,) = run(dy, np.concatenate([gate, up], -1))
        assert_matches(both, np.asarray(y))
        assert_matches(dboth, np.concatenate([dgate, dup], -1))


def test_relu_is_exact(dtype):
    gate, up = draws((7, 33), (7, 33))(np.random.default_rng(8), dtype)
    got = jax.jit(functools.partial(fo.gated_act, activation="relu"))(gate, up)
    assert_matches(got, np.asarray(jax.jit(lambda g, u: jax.nn.relu(g) * u)(gate, up)))


def test_numbers_and_the_default():
    np.testing.assert_allclose(fo.gated_act(1.0, 2), 2 * jax.nn.silu(1.0), rtol=1e-6)
    x = np.float32([1.0, -2.0])
    assert fo.gated_act(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_allclose(fo.gated_act(x), jax.nn.silu(x[:1]) * x[1:], rtol=1e-6)


ONES = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    "gate, up, activation, error, message",
    [
        (ONES, ONES, "tanh", ValueError, "gated_act: activation is 'tanh'; it must be one of"),
        (ONES, ONES, None, ValueError, "activation is None; it must be one of"),
        (ONES, ONES[0], "silu", ValueError, r"up has shape \(4,\); it must be that of gate"),
        (ONES[:, :3], None, "silu", ValueError, r"gate has shape \(3, 3\).*last axis.*even"),
        (np.float32(1), None, "silu", ValueError, r"gate has shape \(\).*last axis"),
        (ONES.astype(int), ONES, "silu", TypeError, "gated_act: gate has dtype int.*be one of"),
        (ONES, ONES.astype(jnp.bfloat16), "silu", TypeError, "up has dtype bfloat16, but gate"),
        (None, ONES, "silu", TypeError, "gated_act: gate is None"),
        (ONES, "up", "silu", TypeError, "gated_act: up is of type str"),
    ],
)
def test_errors(gate, up, activation, error, message):
    with pytest.raises(error, match=message):
        fo.gated_act(gate, up, activation=activation)
