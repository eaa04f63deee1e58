"""`autofuse` of embeddings: rows of a table are cast in place of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import x64
from harness.numerics import assert_bitwise_equal
from harness.programs import equations
from test_autofuse import left, names

import jax_fastops as fo
from jax_fastops.autofuse import _embedding, _evaluate
from jax_fastops.autofuse._segments import SegmentRule

RNG = np.random.default_rng(0)
ROWS, WIDTH = 50, 16
TABLE = jnp.asarray(RNG.standard_normal((ROWS, WIDTH)), jnp.float32)
TABLE = TABLE.at[0].set(jnp.nan).at[1, :3].set(jnp.array([jnp.inf, -0.0, 1e-41]))
IDS = jnp.asarray(RNG.integers(0, ROWS, (4, 7)))
OUTSIDE = IDS.at[0, :4].set(jnp.array([-1, -ROWS, ROWS, -ROWS - 1]))
BF16 = jnp.bfloat16


def narrow(table):
    return table.astype(BF16)


def take(**options):
    return lambda table, ids: jnp.take(narrow(table), ids, axis=0, **options)


FORMS = {
    "index": lambda table, ids: narrow(table)[ids],
    "take": take(),
    "clip": take(mode="clip"),
    "wrap": take(mode="wrap"),
    "fill": take(mode="fill", fill_value=-2.5),
    "get": lambda table, ids: narrow(table).at[ids].get(mode="drop", fill_value=0),
    "vmap": lambda table, ids: jax.vmap(lambda i: jnp.take(narrow(table), i, axis=0))(ids),
    "jit": lambda table, ids: jax.jit(jnp.take, static_argnames="axis")(narrow(table), ids, axis=0),
    "float16": lambda table, ids: table.astype(jnp.float16)[ids] * 2,
    "sorted": lambda table, ids: narrow(table).at[ids].get(indices_are_sorted=True),
    "checkpoint": jax.checkpoint(take()),
}


@pytest.fixture(autouse=True)
def without_segment_rule(native, monkeypatch):
    """Without the rule that replaces every gather."""
    rules = [rule for rule in _evaluate.RULES if rule is not SegmentRule]
    monkeypatch.setattr(_evaluate, "RULES", rules)


def scatters(step, *args):
    """The dtypes in which a program adds up rows."""
    found = equations(jax.make_jaxpr(step)(*args).jaxpr)
    return {str(e.invars[0].aval.dtype) for e in found if e.primitive.name == "scatter-add"}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """Results are equal to the bit, also for ids that are no row, and of special values."""
    f, ids = FORMS[form], IDS if form in ("index", "float16", "sorted") else OUTSIDE
    ids = jnp.sort(ids.reshape(-1)) if form == "sorted" else ids
    assert names(f, TABLE, ids) == ["embedding"]
    assert_bitwise_equal(jax.jit(fo.autofuse(f))(TABLE, ids), jax.jit(f)(TABLE, ids))
    loss = lambda table: jnp.sum(fo.autofuse(f)(table, ids).astype(jnp.float32))  # noqa: E731
    assert scatters(jax.grad(loss), TABLE) == {"float32"}


def test_the_gradient_is_more_exact():
    """Each row is there hundreds of times."""
    table, ids = TABLE[2:], jnp.tile(IDS % 40, (200, 1))

    def gradient(f, table):
        return jax.grad(lambda table: jnp.sum(f(table, ids).astype(jnp.float32) ** 2))(table)

    exact = gradient(lambda table, ids: narrow(table).astype(jnp.float32)[ids], table)
    plain, ours = (gradient(f, table) for f in (FORMS["take"], fo.autofuse(FORMS["take"])))
    errors = [float(jnp.abs(found - exact).max()) for found in (plain, ours)]
    assert errors[1] < errors[0] / 10


def test_tied_embeddings():
    """A product reads the cast table too. The gather reads the table itself."""

    def f(table, ids):
        weights = narrow(table)
        return jnp.tanh(weights[ids]) @ weights.T

    assert names(f, TABLE[2:], IDS % 40) == ["embedding"]
    args = TABLE[2:], IDS % 40
    assert_bitwise_equal(jax.jit(fo.autofuse(f))(*args), jax.jit(f)(*args))
    loss = lambda f: lambda table: jnp.sum(f(table, args[1]).astype(jnp.float32) ** 2)  # noqa: E731
    want, got = (jax.grad(loss(g))(args[0]) for g in (f, fo.autofuse(f)))
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


def test_a_layer_in_a_loop():
    def f(table, ids):
        def step(total, ids):
            return total + jnp.take(narrow(table), ids, axis=0, mode="clip").sum(), None

        return jax.lax.scan(step, jnp.zeros((), BF16), ids)[0]

    assert names(f, TABLE[2:], IDS) == ["embedding"]
    np.testing.assert_array_equal(fo.autofuse(f)(TABLE[2:], IDS), f(TABLE[2:], IDS))


@pytest.mark.parametrize(
    "f",
    [
        lambda table, ids: table[ids],
        lambda table, ids: table.astype(jnp.float64)[ids],
        lambda table, ids: table.astype(jnp.int32)[ids],
        lambda table, ids: (ids[:, :1] + jnp.arange(5)).astype(BF16)[ids[0] % 4],
        lambda table, ids: jnp.take(narrow(table), ids % WIDTH, axis=1),
        lambda table, ids: jnp.take_along_axis(
            narrow(table), jnp.broadcast_to(ids[:, :1], (4, WIDTH)), 0
        ),
        lambda table, ids: narrow(table)[ids, ids % WIDTH],
        lambda table, ids: jnp.tanh(narrow(table))[ids],
        lambda table, ids: narrow(jnp.stack([table, table]))[:, ids],
        lambda table, ids: narrow(table[0])[ids % WIDTH],
        lambda table, ids: jax.vmap(lambda t, i: t[i])(narrow(jnp.stack([table] * 4)), ids),
    ],
)
def test_near_misses(f):
    with x64():
        assert names(f, TABLE[2:], IDS % 40) == []
        assert_bitwise_equal(fo.autofuse(f)(TABLE[2:], IDS % 40), f(TABLE[2:], IDS % 40))


@pytest.mark.parametrize(
    "choice, platform, devices, reason",
    [
        ("xla", "cuda", 1, "the implementation is 'xla'"),
        ("auto", "cpu", 1, "on a CPU the gradient is as fast in either dtype"),
        ("auto", "cuda", 2, "devices that add up the gradient would exchange more bytes"),
        ("auto", "cuda", 1, None),
    ],
)
def test_where_it_is_replaced(choice, platform, devices, reason, monkeypatch):
    monkeypatch.setattr(_embedding, "lowering_platform", lambda: platform)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    f = FORMS["take"]
    with fo.use_implementation(choice):
        report = fo.autofuse.report(f)(TABLE, IDS)
    if reason is None:
        (replaced,) = report.replaced
        assert replaced.pattern == "embedding"
        assert replaced.why == "rows are cast, not the table; its gradient is summed in float32"
    else:
        assert [(m.pattern, m.reason) for m in report.missed] == [("embedding", reason)]


def test_a_number_that_is_rounded_twice():
    """To float32, then to float16: there it ends on the other side of the middle."""
    fill = 1 + 2.0**-11 + 2.0**-30

    def f(table, ids):
        return jnp.take(table.astype(jnp.float16), ids, axis=0, mode="fill", fill_value=fill)

    reason = "the value of missing rows would be rounded twice"
    assert left(f, TABLE, IDS) == [("embedding", reason)]
