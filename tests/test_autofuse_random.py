"""`autofuse` of random programs, in which patterns share values, and both forms of their regions.

The programs have what single patterns do not: a value that several patterns use, effects, loops and
functions between the parts of a pattern, axes of equal sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_fastops as fo
from jax_fastops.autofuse._evaluate import Plan, Settings
from jax_fastops.autofuse._graph import Graph, bind
from jax_fastops.autofuse._regions import regions

pytestmark = pytest.mark.usefixtures("native")
N = 8
ROWS = np.random.default_rng(0).uniform(0.5, 1.5, (2, N)).astype(np.float32)
MATRIX = np.random.default_rng(1).standard_normal((N, N)).astype(np.float32) / 3
MASK = np.random.default_rng(2).random((N, N)) < 0.7
LABELS = np.arange(N) * 5 % N


# Programs -----------------------------------------------------------------------------------------


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * scale + bias


def rms_norm(x, scale):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


def batch_norm(x, scale, bias):
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3) * scale + bias


def loss(x):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), LABELS[:, None], -1)


def own_rule(axis):
    """A function with a rule of its own, the same for both axes but for the axis."""

    @jax.custom_jvp
    def f(x):
        return x * jnp.mean(x, axis, keepdims=True)

    f.defjvp(lambda x, t: (f(*x), t[0] * jnp.mean(x[0], axis, keepdims=True)))
    return f


OWN = own_rule(0), own_rule(1)


def attention(q, k, v):
    return jax.nn.softmax(jnp.where(MASK | np.eye(N, dtype=bool), q @ k.T, -jnp.inf)) @ v


def looped(x, f):
    return lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]


def printed(x):
    jax.debug.callback(lambda _: None, x[0, 0])
    return x


_SMALL = [
    *(jnp.tanh, jnp.sin, jnp.negative, jnp.abs, lax.stop_gradient, jnp.transpose, printed),
    *(lambda x: 0.5 * x, lambda x: x + 1e-3, lambda x: x * x / 3, lambda x: jnp.exp(-x * x)),
    *(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), lambda x: x[::-1], OWN[0], OWN[1]),
    *(lambda x: x - x.mean(-1, keepdims=True), lambda x: x / (2 + x.max(0)), lambda x: x @ MATRIX),
    *(lambda x: x * ROWS[0], lambda x: x + ROWS[1], lambda x: x * ROWS[0][:, None]),
    lambda x: x * lax.rsqrt(x.var(-1, keepdims=True) + 1),
]
_PAIRS = [
    *(jnp.add, jnp.subtract, jnp.maximum, lambda x, y: x * y / 3, lambda x, y: x @ y.T / 4),
    *(lambda x, y: jnp.where(MASK, x, y), lambda x, y: x + ROWS[0] * (y - x)),
    lambda x, y: x * lax.rsqrt((x * y).mean(-1, keepdims=True) ** 2 + 1e-3),
]
_PATTERNS = [
    *(jax.nn.softmax, functools.partial(jax.nn.softmax, axis=0), jax.nn.log_softmax),
    *(jax.nn.gelu, jax.nn.silu, jax.nn.relu, lambda x: jax.nn.silu(x + ROWS[1])),
    *(lambda x: layer_norm(x, *ROWS), lambda x: rms_norm(x, ROWS[0]), lambda x: x + loss(x)),
    lambda x: batch_norm(x, *ROWS),
]
_PATTERNS_OF_PAIRS = [
    *(lambda x, y: rms_norm(x + y, ROWS[0]), lambda x, y: layer_norm(x + y, y[0], y[1])),
    *(lambda x, y: jax.nn.relu(x + y), lambda x, y: jax.nn.silu(x) * y),
    *(lambda x, y: attention(x, y, x), lambda x, y: batch_norm(x, y.mean(0), y.var(0))),
]
_WRAPS = [jax.jit, jax.checkpoint, lambda f: functools.partial(looped, f=f)]


def random_program(rng):
    """A function of two arrays, which returns some of the values that it computes."""
    steps = []
    for i in range(2, rng.integers(6, 15)):
        kind = rng.choice(["small", "pair", "pattern", "both"], p=[0.4, 0.2, 0.25, 0.15])
        which = dict(small=_SMALL, pair=_PAIRS, pattern=_PATTERNS, both=_PATTERNS_OF_PAIRS)[kind]
        f = which[rng.integers(len(which))]
        count = 1 + (kind in ("pair", "both"))
        given = [int(rng.integers(i, size=2).max()) for _ in range(count)]
        if len(given) == 1 and rng.random() < 0.15:
            f = _WRAPS[rng.integers(len(_WRAPS))](f)
        steps.append((f, given))
    count = len(steps) + 2
    results = sorted({count - 1, *map(int, rng.integers(count, size=rng.integers(3)))})

    def program(x, y):
        values = [x, y]
        for f, given in steps:
            values.append(f(*(values[i] for i in given)))
        return [values[i] for i in results]

    return program


# Checks -------------------------------------------------------------------------------------------


def _values(f, args, gradients):
    """Results, and gradients of a function of them."""

    def total(*args):
        return sum(jnp.sum(jnp.sin(y)) for y in f(*args))

    return [*f(*args), *(jax.grad(total, (0, 1))(*args) if gradients else ())]


def _close(got, want, moved, rounding):
    """Whether values differ by no more than rounding, of which ``moved`` shows the effect."""
    for a, b, c in zip(got, want, moved, strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        scale = np.max(np.abs(b), initial=0.1)  # of what cancels
        limit = rounding * scale + 100 * np.max(np.abs(b - c), initial=0)
        if limit < 0.05 * scale:  # else rounding decides
            np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def _check_regions(traced, args, rounding):
    """Both forms of each region give what the program computes. Returns how many there are."""
    graph = Graph(traced.jaxpr, traced.consts)
    plan = Plan(graph, Settings())
    arrays = graph.constants | dict(zip(graph.operands, args, strict=True))
    for node in graph.nodes:
        if node.outputs and not node.outputs[0].is_array:
            continue
        results = bind(node.equation, [arrays[v] for v in node.operands])
        arrays |= zip(node.outputs, results, strict=True)
    found = regions(graph, plan.rewrites)
    for region in found:
        given = [arrays[v] for v in region.inputs]
        want = [arrays[v] for v in region.outputs]
        for program in (None, lambda r: plan.search.program(r.call, r.reads)):
            for a, b in zip(region.function(program)(*given), want, strict=True):
                a, b = (np.asarray(x, np.float64) for x in (a, b))
                limit = 5 * rounding * np.max(np.abs(b), initial=0.1)
                np.testing.assert_allclose(a, b, rtol=0, atol=limit)
    return len(found)


def _check_many(seed, count):
    """Checks random programs until there were so many regions."""
    rng = np.random.default_rng(seed)
    while count > 0:
        program = random_program(rng)
        x, y = (jnp.asarray(rng.standard_normal((N, N)), jnp.float32) for _ in range(2))
        gradients = rng.random() < 0.3
        want = _values(program, (x, y), gradients)
        moved = _values(program, (x * (1 + 1e-6), y * (1 - 1e-6)), gradients)
        traced = jax.make_jaxpr(program)(x, y)
        rounding = 0.02 if "bf16" in str(traced) else 2e-4
        _close(_values(fo.autofuse(program), (x, y), gradients), want, moved, rounding)
        count -= _check_regions(traced, (x, y), rounding)


def test_some_random_programs():
    _check_many(0, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_ten_thousand_random_regions(seed):
    _check_many(seed, 500)
