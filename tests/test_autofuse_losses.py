"""`autofuse` of losses by one-hot arrays and of dropout: values, gradients, misses, reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import x64
from harness.numerics import of_products
from harness.programs import targets_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo

pytestmark = pytest.mark.usefixtures("native")
V = 40
X = jax.random.normal(jax.random.key(0), (4, 6, V))
LABELS = jax.random.randint(jax.random.key(1), (4, 6), 0, V)
NO_CLASS = LABELS.at[0].set(jnp.array([-1, V, -100, V - 1, V + 1, -V]))
WEIGHTS = jax.random.uniform(jax.random.key(2), (4, 6), minval=0.1)
MASK = WEIGHTS > 0.4
W = jax.random.normal(jax.random.key(3), (V, 16)) / 4
H = jax.random.normal(jax.random.key(4), (4, 6, 16))
KEY = jax.random.key(7)
NAME = "cross_entropy of one_hot"


def report(f, *args, **options):
    found = fo.autofuse.report(fo.autofuse(f, **options))(*args)
    return [r.pattern for r in found.replaced], [(m.pattern, m.reason) for m in found.missed]


def check(f, *args, tolerance=1e-5):
    """Equal results and gradients of floating arguments."""
    places = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of(g):
        def some(*given):
            both = list(args)
            for i, x in zip(places, given, strict=True):
                both[i] = x
            return g(*both)

        y, pull = jax.vjp(some, *(args[i] for i in places))
        return y, *pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    for got, want in zip(of(fo.autofuse(f)), of(f), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        got, want = np.float64(got), np.float64(want)
        scale = max(1e-3, np.max(np.abs(want), initial=0, where=np.isfinite(want)))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)


# ---- losses --------------------------------------------------------------------------------------


log_p = jax.nn.log_softmax


def here(labels, v):
    return labels[..., None] == jnp.arange(v)


def onehot(labels, v, on=1.0, off=0.0):
    """As flax.training.common_utils.onehot."""
    x = labels[..., None] == jnp.arange(v).reshape((1,) * labels.ndim + (-1,))
    return lax.select(x, jnp.full(x.shape, on), jnp.full(x.shape, off)).astype(jnp.float32)


def smoothed(labels, v, share=0.1):
    """As optax.smooth_labels."""
    return (1.0 - share) * jax.nn.one_hot(labels, v) + share / v


ONE_HOT = {
    "select": onehot,
    "where": lambda i, v: jnp.where(here(i, v), 1.0, 0.0),
    "one_hot": jax.nn.one_hot,
    "cast": lambda i, v: here(i, v).astype(jnp.float32),
    "iota of all": lambda i, v: (
        lax.broadcasted_iota(i.dtype, (*i.shape, v), i.ndim) == i[..., None]
    ).astype(jnp.float32),
    "integers": lambda i, v: jax.nn.one_hot(i, v, dtype=jnp.int32),
    "other values": lambda i, v: 1 - (jnp.arange(v) != i[..., None]).astype(jnp.float32),
    "stopped": lambda i, v: lax.stop_gradient(jax.nn.one_hot(i, v)),
    "on and off": lambda i, v: onehot(i, v, 0.9, 0.1 / (v - 1)),
    "smoothed": smoothed,
    "twice as much": lambda i, v: onehot(i, v, 2.0),
}


def zero_times(y, x):
    """As newer versions of optax multiply by targets."""
    return jnp.where(y == 0, 0, x * y)


FORMS = {
    "each": lambda x, y, w: -jnp.sum(y * log_p(x), -1),
    "all at once": lambda x, y, w: -jnp.sum(y * log_p(x)) / w.size,
    "mean of all": lambda x, y, w: -(y * log_p(x)).mean(),
    "weights": lambda x, y, w: -jnp.sum(y * w[..., None] * log_p(x), -1),
    "weighted mean": lambda x, y, w: -jnp.sum(y * log_p(x) * w[..., None]) / w.sum(),
    "divided": lambda x, y, w: jnp.sum(-y * log_p(x) / w[..., None]),
    "by rows": lambda x, y, w: -jnp.sum(y * log_p(x) * w[:, :1, None], (1, 2)),
    "masked": lambda x, y, w: (
        -jnp.sum(jnp.where(w[..., None] > 0.4, y * log_p(x), 0)) / (w > 0.4).sum()
    ),
    "masked and weighted": lambda x, y, w: -jnp.sum(
        jnp.where(w[..., None] < 0.4, 0, y * w[..., None] * log_p(x)) / w[:1, :, None], -1
    ),
    "zeros": lambda x, y, w: -jnp.sum(zero_times(y, log_p(x)), -1),
    "einsum": lambda x, y, w: -jnp.einsum("...v,...v", y * 1.0, log_p(x)),
    "einsum of all": lambda x, y, w: -jnp.einsum("btv,btv->", y * 1.0, log_p(x)),
    "weights in einsum": lambda x, y, w: -jnp.einsum("btv,btv,bt->", y * 1.0, log_p(x), w),
    "vdot": lambda x, y, w: -jnp.vdot(y * 1.0, log_p(x)),
    "logsumexp": lambda x, y, w: jnp.sum(
        -y * (x - jax.nn.logsumexp(x, -1, keepdims=True)), -1, keepdims=True
    ),
    "under vmap": lambda x, y, w: jax.vmap(jax.vmap(lambda x, y: -jnp.vdot(y * 1.0, log_p(x))))(
        x, y
    ),
    "axis 1": lambda x, y, w: -jnp.sum(y.swapaxes(1, 2) * log_p(x.swapaxes(1, 2), 1), 1),
    "z-loss": lambda x, y, w: (
        -jnp.sum(y * log_p(x), -1) + 1e-2 * jax.nn.logsumexp(x, -1) ** 2
    ),
    "z-loss as t5x": lambda x, y, w: (
        lambda lse: -jnp.sum(y * (x - lse), -1) + 1e-2 * lax.square(jnp.squeeze(lse, -1))
    )(jax.nn.logsumexp(x, -1, keepdims=True)),
    "smoothed mean": lambda x, y, w: (
        -0.9 * jnp.sum(y * log_p(x), -1) - 0.1 * jnp.mean(log_p(x), -1)
    ),
}  # fmt: skip


def form(name, one_hot=onehot, labels=LABELS):
    return lambda x, w: FORMS[name](x, one_hot(labels, V), w)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    for f in (form(name, labels=NO_CLASS), form(name, smoothed)):
        assert report(f, X, WEIGHTS) == ([NAME], [])
        check(f, X, WEIGHTS)


@pytest.mark.parametrize("name", ["each", "weighted mean", "z-loss", "smoothed mean"])
def test_labels_that_are_no_class(name):
    """They have the loss of all classes."""
    check(form(name, smoothed, NO_CLASS), X, WEIGHTS)


@pytest.mark.parametrize("name", ONE_HOT)
def test_one_hot_arrays(name):
    for labels in (LABELS, NO_CLASS.astype(jnp.int16)):

        def f(x, w):
            return FORMS["weights"](x, ONE_HOT[name](labels, V), w)  # noqa: B023

        assert report(f, X, WEIGHTS) == ([NAME], [])
        check(f, X, WEIGHTS)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["each", "weighted mean", "z-loss"])
def test_dtypes(name, dtype):
    with x64():
        x, w = X.astype(dtype), WEIGHTS.astype(dtype)
        for one_hot in (onehot, smoothed):
            f = form(name, lambda i, v: one_hot(i, v).astype(dtype))  # noqa: B023
            assert report(f, x, w) == ([NAME], [])
            check(f, x, w, tolerance=0.08 if dtype == "bfloat16" else 1e-13)


@pytest.mark.parametrize("name", ["picked", "each"])
def test_float64_is_for_its_digits(name):
    """The kernel does not read narrower logits then."""

    def f(x):
        x = x.astype(jnp.float64)
        if name == "picked":
            return -jnp.take_along_axis(log_p(x), LABELS[..., None], -1)
        return FORMS[name](x, jax.nn.one_hot(LABELS, V), 1.0)

    with x64():
        assert report(f, X)[0] in (["cross_entropy"], [NAME])
        np.testing.assert_allclose(jax.jit(fo.autofuse(f))(X), jax.jit(f)(X), rtol=1e-12)


def test_the_kernel_reads_narrow_logits():
    """Those that the program casts to float32 first."""

    def picked(x):
        return -jnp.take_along_axis(log_p(x), LABELS[..., None], -1)[..., 0]

    x = X.astype(jnp.bfloat16)
    for loss in (picked, lambda x: FORMS["each"](x, onehot(LABELS, V), WEIGHTS)):

        def f(x):
            return loss(x.astype(jnp.float32))  # noqa: B023

        (equation,) = (
            e for e in jax.make_jaxpr(fo.autofuse(f))(x).eqns if "fastops" in e.primitive.name
        )
        assert equation.invars[0].aval.dtype == jnp.bfloat16
        check(f, x, tolerance=1e-2)


@pytest.mark.jax
@pytest.mark.parametrize("kind", ["vmap", "shard_map", "Explicit"])
@pytest.mark.parametrize("labels", [LABELS, NO_CLASS], ids=["classes", "no class"])
def test_smoothed_losses_under_transformations(kind, labels):
    """The kernel runs if all labels of a device are classes, else the reference."""

    def f(x, labels):
        return FORMS["z-loss"](x, onehot(labels, V, 0.9, 0.1 / (V - 1)), None)

    want, pull = jax.vjp(lambda x: f(x, labels), X)
    if kind == "vmap":
        g, args = jax.vmap(fo.autofuse(f)), (X, labels)
    elif len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    else:
        axis = jax.sharding.AxisType.Explicit if kind == "Explicit" else jax.sharding.AxisType.Auto
        mesh = jax.make_mesh((4,), ("data",), axis_types=(axis,), devices=jax.devices()[:4])
        args = jax.device_put((X, labels), NamedSharding(mesh, P("data")))
        g = fo.autofuse(f)
        if kind == "shard_map":
            g = jax.shard_map(g, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    got, pulled = jax.jit(lambda x, i: jax.vjp(lambda x: g(x, i), x))(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(
        pulled(got)[0], pull(want)[0], rtol=1e-5, atol=1e-6 * np.max(np.abs(want))
    )
    assert set(targets_of(lambda *args: g(*args), *args)) == {"cross_entropy"}


@pytest.mark.jax
@pytest.mark.parametrize("name", ["each", "z-loss"])
@pytest.mark.parametrize("specs", [(P(), P("data")), (P("data"), P())], ids=str)
def test_logits_and_labels_of_different_shardings(name, specs):
    """On explicit axes, results and gradients have the plain types, and no gather more."""
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=kinds, devices=jax.devices()[:4])
    x, labels = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((X, LABELS), specs, strict=True)
    )

    def loss(x, i):
        return FORMS[name](x, jax.nn.one_hot(i, V), 1.0)

    def step(f):
        def both(x, i):  # labels are an operand, and an array that is known
            return (f(x, i) * f(x, labels)).sum(), f(x, i)

        return jax.jit(jax.grad(both, has_aux=True)).lower(x, labels).compile()

    with jax.set_mesh(mesh):
        programs = step(fo.autofuse(loss)), step(loss)
        gathers, plain = (p.as_text().count(" all-gather(") for p in programs)
        assert gathers <= plain
        for a, b in zip(*(p(x, labels) for p in programs), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


LINEAR = ["linear_cross_entropy"]


@pytest.mark.parametrize(
    "name", ["each", "all at once", "einsum of all", "zeros", "weighted mean", "masked"]
)
def test_logits_that_are_a_product(name):
    def f(h, w):
        return form(name, labels=NO_CLASS)(h @ w.T, WEIGHTS).sum()

    assert report(f, H, W) == (LINEAR, [])
    check(f, H, W, tolerance=of_products(1e-5))


@pytest.mark.parametrize("name", ["by rows", "z-loss"])
def test_logits_that_are_a_product_and_stay(name):
    def f(h, w):
        return form(name, labels=NO_CLASS)(h @ w.T, WEIGHTS)

    assert report(f, H, W)[0] == [NAME]
    check(f, H, W, tolerance=of_products(1e-5))


WEIGHTED = "the weights of the classes are no one_hot of integer labels"
Y = onehot(LABELS, V)
NEAR_MISSES = {
    "soft targets": (lambda x: -jnp.sum(jax.nn.softmax(x[::-1]) * log_p(x), -1), WEIGHTED),
    "two labels": (
        lambda x: -jnp.sum((onehot(LABELS, V) + onehot(LABELS[::-1], V)) * log_p(x), -1),
        WEIGHTED,
    ),
    "weights of classes": (
        lambda x: -jnp.sum(onehot(LABELS, V) * jnp.arange(V) * log_p(x), -1),
        WEIGHTED,
    ),
    "classes from 1": (
        lambda x: -jnp.sum((LABELS[..., None] == jnp.arange(1, V + 1)) * log_p(x), -1),
        WEIGHTED,
    ),
    "classes in another order": (
        lambda x: -jnp.sum((LABELS[..., None] == jnp.arange(V)[::-1]) * log_p(x), -1),
        WEIGHTED,
    ),
    "labels that are floats": (
        lambda x: -jnp.sum((LABELS[..., None] + 0.0 == jnp.arange(1.0 * V)) * log_p(x), -1),
        WEIGHTED,
    ),
    "at most the label": (
        lambda x: -jnp.sum((jnp.arange(V) <= LABELS[..., None]) * log_p(x), -1),
        WEIGHTED,
    ),
    "another axis of log_softmax": (lambda x: -jnp.sum(onehot(LABELS, V) * log_p(x, 1), -1), None),
    "summed over tokens": (lambda x: -jnp.sum(onehot(LABELS, V) * log_p(x), 1), None),
    "the largest": (lambda x: -jnp.max(onehot(LABELS, V) * log_p(x), -1), None),
    "squared": (lambda x: jnp.sum((onehot(LABELS, V) * log_p(x)) ** 2, -1), None),
    "probabilities": (lambda x: -jnp.sum(onehot(LABELS, V) * jax.nn.softmax(x), -1), None),
    "focal": (
        lambda x: -jnp.sum((1 - jax.nn.softmax(x)) ** 2 * onehot(LABELS, V) * log_p(x), -1),
        None,
    ),
    "log probabilities elsewhere": (
        lambda x: (lambda z: -jnp.sum(onehot(LABELS, V) * z, -1) + 1e-3 * z.max(-1))(log_p(x)),
        "the value is used elsewhere",
    ),
    "narrow": (
        lambda x: -jnp.sum(onehot(LABELS, V) * log_p(x).astype(jnp.bfloat16), -1),
        "bfloat16 is narrower than the result's float32",
    ),
    "negative smoothing": (
        lambda x: -jnp.sum(onehot(LABELS, V, 1.5, -0.5) * log_p(x), -1),
        "cross_entropy: label_smoothing is 1.11",
    ),
    "nothing in all": (
        lambda x: -jnp.sum(onehot(LABELS, V, V - 1.0, -1.0) * log_p(x), -1),
        "the losses add up to 0",
    ),
    "z-loss of other logits": (
        lambda x: FORMS["each"](x, Y, None) + 1e-2 * jax.nn.logsumexp(x + 1, -1) ** 2,
        None,
    ),
    "z-loss of a cube": (
        lambda x: FORMS["each"](x, Y, None) + 1e-2 * jax.nn.logsumexp(x, -1) ** 3,
        None,
    ),
    "two logits": (
        lambda x: -jnp.sum(smoothed(LABELS, V) * log_p(x), -1) - 0.1 * log_p(x[::-1]).mean(-1),
        None,
    ),
    "weighted twice": (
        lambda x: (
            -jnp.sum(onehot(LABELS, V) * WEIGHTS[..., None] * log_p(x), -1) - log_p(x).mean(-1)
        ),
        None,
    ),
    "masked by classes": (
        lambda x: -jnp.sum(jnp.where(X > 0, onehot(LABELS, V) * log_p(x), 0), -1),
        None,
    ),
    "narrow numbers": (
        lambda x: (
            -jnp.sum(
                onehot(LABELS, V, 0.9, 0.1 / 39).astype(jnp.bfloat16).astype(jnp.float32)
                * log_p(x),
                -1,
            )
        ),
        None,
    ),
    "narrow weights": (
        lambda x: (
            -jnp.sum(Y * WEIGHTS.astype(jnp.bfloat16)[..., None].astype(jnp.float32) * log_p(x), -1)
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    f, reason = NEAR_MISSES[name]
    if reason is not None:
        replaced, missed = report(f, X)
        assert NAME not in replaced
        assert any(name == NAME and why.startswith(reason) for name, why in missed)
    check(f, X, tolerance=0.05 if name == "narrow" else 1e-5)


def test_narrow_logits():
    """The loss of logits in bfloat16 is that in float32, and not rounded between."""
    x = X.astype(jnp.bfloat16)

    def f(x):
        return -jnp.sum(onehot(LABELS, V) * log_p(x), -1)

    assert report(f, x)[0] == [NAME]
    np.testing.assert_allclose(jax.jit(fo.autofuse(f))(x), f(x.astype(jnp.float32)), rtol=1e-5)


def test_a_narrow_dtype_of_labels():
    """``one_hot`` counts in the dtype of the labels, in which 261 is 5."""
    x, labels = jnp.tile(X, 8), LABELS.astype(jnp.int8)

    def f(x):
        return -jnp.sum(jax.nn.one_hot(labels, 320) * log_p(x), -1)

    assert report(f, x)[0] == ["log_softmax"]
    check(f, x)


def test_labels_that_int32_does_not_hold():
    """They are no class, also where a cast to int32 would make one of them."""
    with x64():
        labels = np.asarray(LABELS, np.int64)
        labels[0] = 2**32 + 3, 2**40, -(2**32), 2**31, -(2**31), 2**63 - 1
        labels = jnp.asarray(labels)

        def f(x):
            y = ruled(by_logsumexp, factored)(x, onehot(labels, V), np.float32(1e-2))[0]
            return y + FORMS["z-loss"](x, onehot(labels, V), None)

        assert report(f, X) == ([NAME] * 2, [])
        check(f, X)


def test_one_label_for_several_rows():
    def f(x):
        return -jnp.sum(onehot(LABELS[0], V) * log_p(x) * WEIGHTS[..., None], -1)

    assert report(f, X)[0] == [NAME]
    check(f, X)
    check(lambda x: -jnp.sum(onehot(LABELS, V) * log_p(x), -1), X[:1])  # and the opposite


@pytest.mark.parametrize("one_hot", [onehot, smoothed])
@pytest.mark.parametrize("name", ["each", "z-loss", "zeros"])
def test_special_values(name, one_hot):
    rows = [[0, 1, jnp.inf, 2], [jnp.inf, jnp.inf, 1, 2], [jnp.nan, 1, jnp.inf, 2]]
    x = jnp.repeat(jnp.array(rows), 4, 0)
    labels = jnp.tile(jnp.arange(4), len(rows))

    def f(x):
        return FORMS[name](x, one_hot(labels, 4), None)

    assert report(f, x)[0] == [NAME]
    want, got = (jax.vjp(g, x) for g in (f, fo.autofuse(f)))
    np.testing.assert_allclose(got[0], want[0])
    assert all(np.isnan(pull(jnp.ones(len(x)))[0]).any(-1).all() for _, pull in (want, got))


def random_loss(rng):
    """A loss whose parts are drawn at random, and whether it must be replaced."""

    def pick(*options):
        return options[int(rng.integers(len(options)))]

    labels = pick(LABELS, NO_CLASS, LABELS[:1], LABELS.astype(jnp.uint8))
    make, axes = pick(*ONE_HOT.values()), pick(-1, (1, 2), (0, 2), None, 1)
    kinds = [pick("", "times", "over", "where") for _ in range(2)]
    arrays = [pick(WEIGHTS[..., None], WEIGHTS[:, :1, None], WEIGHTS.sum()) for _ in range(2)]
    number, where, first = pick(1.0, -0.5, 3.0), pick(True, False), pick(True, False)
    logits = pick(log_p, lambda x: log_p(x * 2), lambda x: log_p(x[::-1]), lambda x: log_p(x, 1))
    z = pick(0.0, 0.0, 1e-2)

    def f(x):
        y, p = make(labels, V), logits(x)
        for kind, array in zip(kinds, arrays, strict=True):
            if kind == "where":
                p = jnp.where(array > 0.5, p, 0)
            elif first:
                y = {"times": y * array, "over": y / array}.get(kind, y)
            else:
                p = {"times": p * array, "over": p / array}.get(kind, p)
        loss = number * jnp.sum(jnp.where(y == 0, 0, y * p) if where else p * y, axes)
        return loss + z * jax.nn.logsumexp(x, -1) ** 2 if z and axes == -1 else loss

    return f


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 50))]
)
def test_random_losses(seed):
    rng, count = np.random.default_rng(seed), 0
    for _ in range(12):
        f = random_loss(rng)
        count += NAME in report(f, X)[0]
        check(f, X, tolerance=2e-5)
    assert count >= 3


def test_losses_of_packages():
    optax = pytest.importorskip("optax")
    common = pytest.importorskip("flax.training.common_utils")
    for one_hot in (
        lambda: common.onehot(NO_CLASS, V),
        lambda: optax.smooth_labels(common.onehot(NO_CLASS, V), 0.1),
        lambda: common.onehot(LABELS, V, on_value=0.9, off_value=0.1 / (V - 1)),
    ):

        def f(x):
            return optax.softmax_cross_entropy(x, one_hot()) * WEIGHTS  # noqa: B023

        assert report(f, X) == ([NAME], [])
        check(f, X)


# ---- losses in a function with a rule of its own -------------------------------------------------


def ruled(value, rule, count=2):
    """A loss and a z-loss of logits, targets and a factor, with a rule that ignores the second."""

    def results(x, y, z):
        both = value(x, y, z)
        return both if count == 2 else both[0]

    f = jax.custom_vjp(results)

    def forward(x, y, z):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        total = e.sum(-1, keepdims=True)
        lse = x.max(-1, keepdims=True) + jnp.log(total)
        loss = z * lse[..., 0] ** 2 - jnp.sum((x - lse) * y, -1)
        both = loss, z * jnp.square(jnp.squeeze(lse, -1))
        return (both if count == 2 else loss), (e / total, y, z, lse)

    def backward(kept, cotangents):
        first = cotangents[0] if count == 2 else cotangents
        return rule(*kept, first, cotangents), None, None

    f.defvjp(forward, backward)
    return f


def by_logsumexp(x, y, z):
    lse = jax.nn.logsumexp(x, -1, keepdims=True)
    total = z * lax.square(lse.squeeze(-1))
    return -jnp.sum(y * (x - lse), -1) + total, total


def factored(p, y, z, lse, ct, _):
    return ct[..., None] * ((1 + 2 * z * lse) * p - y)


def multiplied_out(p, y, z, lse, ct, _):
    return (p - y + 2 * z * lse * p) * jnp.expand_dims(ct, -1)


SUM_1 = {"one_hot": onehot, "smoothed": lambda i, v: onehot(i, v, 0.9, 0.1 / (v - 1))}


@pytest.mark.parametrize("labels", [LABELS, NO_CLASS], ids=["classes", "no class"])
@pytest.mark.parametrize("targets", SUM_1)
@pytest.mark.parametrize("rule, z, count", [(factored, 1e-2, 2), (multiplied_out, 0.0, 1)])
def test_a_rule_that_is_known(rule, z, count, targets, labels):
    loss = ruled(by_logsumexp, rule, count)

    def f(x, w):
        if count == 2:
            y = loss(x, SUM_1[targets](labels, V), z)
            return jnp.sum(w * y[0] + 3 * y[1])
        return w * jax.vmap(lambda x, i: loss(x, SUM_1[targets](i, V), z))(x, labels)

    assert report(f, X, WEIGHTS) == ([NAME], [])
    check(f, X, WEIGHTS)
    check(jax.jit(f), X, WEIGHTS)


OTHER_RULES = {
    "of both": lambda p, y, z, lse, ct, cts: (
        cts[0][..., None] * (p - y) + (cts[0] + cts[1])[..., None] * 2 * z * lse * p
    ),
    "without z": lambda p, y, z, lse, ct, _: ct[..., None] * (p - y),
    "twice": lambda p, y, z, lse, ct, _: 2 * factored(p, y, z, lse, ct, _),
    "sign": lambda p, y, z, lse, ct, _: ct[..., None] * ((1 - 2 * z * lse) * p - y),
    "of the second": lambda p, y, z, lse, ct, cts: factored(p, y, z, lse, cts[1], cts),
}
OTHER_CALLS = {
    "soft targets": (lambda i: jax.nn.softmax(X * 2), 1e-2, "the targets are no one_hot"),
    "a sum of 2": (lambda i: onehot(i, V, 2.0), 1e-2, "the targets of a token do not add up to 1"),
    "a factor of the data": (lambda i: onehot(i, V), None, "the factor of the z-loss is not"),
}


def clipped(x, y, z):
    return by_logsumexp(x, y, jnp.minimum(1.0 * z, 0.5))


def doubled(x, y, z):
    return tuple(2 * v for v in by_logsumexp(x, y, z))


@pytest.mark.parametrize("name", [*OTHER_RULES, *OTHER_CALLS, "doubled", "clipped"])
def test_a_rule_hides_a_loss(name):
    value = {"doubled": doubled, "clipped": clipped}.get(name, by_logsumexp)
    loss = ruled(value, OTHER_RULES.get(name, factored))
    targets, z, reason = OTHER_CALLS.get(name, (lambda i: onehot(i, V), 1e-2, None))

    def f(x):
        y = loss(x, targets(LABELS), x[0, 0, 0] if z is None else z)
        return jnp.sum(WEIGHTS * y[0] + 3 * y[1])

    replaced, missed = report(f, X)
    assert NAME not in replaced
    assert any("custom_vjp" in why or (reason and why.startswith(reason)) for _, why in missed)
    check(f, X)


# ---- dropout -------------------------------------------------------------------------------------


def keep(key, x, rate=0.25):
    return jax.random.bernoulli(key, 1 - rate, x.shape)


DROPOUTS = {
    "mask / p": lambda x, k: x * (keep(k, x) / 0.75),
    "x * mask / p": lambda x, k: x * keep(k, x) / 0.75,
    "mask * x / p": lambda x, k: keep(k, x) * x / 0.75,
    "x / p * mask": lambda x, k: (x / 0.75) * keep(k, x),
    "where, then / p": lambda x, k: jnp.where(keep(k, x), x, 0) / 0.75,
    "a mask of 1 / p": lambda x, k: jnp.where(keep(k, x), 1 / 0.75, 0) * x,
    "a mask of integers": lambda x, k: jnp.where(keep(k, x), 1, 0) * x / 0.75,
    "select": lambda x, k: lax.select(keep(k, x), x / 0.75, jnp.zeros_like(x)),
    "not dropped": lambda x, k: jnp.where(~jax.random.bernoulli(k, 0.25, x.shape), x / 0.75, 0),
    "1 - dropped": lambda x, k: x * (1 - jax.random.bernoulli(k, 0.25, x.shape)) / 0.75,
    "floor": lambda x, k: (
        x / 0.75 * jnp.floor(0.75 + jax.random.uniform(k, x.shape)).astype(x.dtype)
    ),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropouts(name, dtype):
    x, f = X.astype(dtype), DROPOUTS[name]
    assert report(f, x, KEY) == ([], [("dropout", "pass dropout=True; its masks are others")])
    assert report(f, x, KEY, dropout=True) == (["dropout"], [])
    want, pull = jax.vjp(lambda x: fo.dropout(x, KEY, 0.25), x)
    got, pulled = jax.vjp(lambda x: fo.autofuse(f, dropout=True)(x, KEY), x)
    np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=1e-6)
    np.testing.assert_allclose(np.float64(pulled(x)[0]), np.float64(pull(x)[0]), rtol=1e-6)


BROADCAST = "one number of its mask is for several elements; XLA fuses it"
STAYS = {
    "drop path": (lambda x, k: x * jax.random.bernoulli(k, 0.75, (4, 1, 1)) / 0.75, BROADCAST),
    "drop path by floor": (
        lambda x, k: x / 0.75 * jnp.floor(0.75 + jax.random.uniform(k, (4, 1, 1))),
        BROADCAST,
    ),
    "drop path under vmap": (
        lambda x, k: jax.vmap(
            lambda x, k: jnp.where(jax.random.bernoulli(k, 0.75), x / 0.75, jnp.zeros_like(x))
        )(x, jax.random.split(k, len(x))),
        BROADCAST,
    ),
    "broadcast over an axis": (
        lambda x, k: jnp.where(
            jnp.broadcast_to(jax.random.bernoulli(k, 0.75, (4, 1, V)), x.shape), x / 0.75, 0
        ),
        BROADCAST,
    ),
    "one mask for all": (
        lambda x, k: x * (jax.random.uniform(k, x.shape[1:]) < 0.5) * 2,
        BROADCAST,
    ),
    "another factor": (
        lambda x, k: jnp.where(keep(k, x), x / 0.25, 0),
        "its factor is not 1 / 0.75, the inverse of what it keeps",
    ),
    "no factor": (
        lambda x, k: x * (1 - keep(k, x, 0.75)),
        "its factor is not 1 / 0.75, the inverse of what it keeps",
    ),
    "a mask that is used": (
        lambda x, k: (lambda m: jnp.where(m, x / 0.75, 0) + m.mean())(keep(k, x)),
        "the mask is used elsewhere",
    ),
    "a mask of 1 / p that is used": (
        lambda x, k: (lambda m: x * m + m.mean())(keep(k, x) / 0.75),
        "the mask is used elsewhere",
    ),
    "a rate of the data": (
        lambda x, k: (lambda p: x * jax.random.bernoulli(k, p, x.shape) / p)(jnp.abs(x[0, 0, 0])),
        "its rate is not known when the function is traced",
    ),
    "a wider mask": (
        lambda x, k: x.astype(jnp.bfloat16) / 0.75 * keep(k, x).astype(jnp.float32),
        "its array is cast or broadcast between the factor and the mask",
    ),
    "signs": (lambda x, k: x * (2 * keep(k, x, 0.5) - 1), None),
    "another value": (lambda x, k: jnp.where(keep(k, x), x / 0.75, 1), None),
    "floor of another range": (
        lambda x, k: x / 0.75 * jnp.floor(0.75 + jax.random.uniform(k, x.shape, maxval=2.0)),
        None,
    ),
    "floor of a product": (
        lambda x, k: x * jnp.floor(2 * jax.random.uniform(k, x.shape)) * 2,
        None,
    ),
    "of the data": (lambda x, k: jnp.where(x > 0, x / 0.5, 0), None),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
@pytest.mark.parametrize("dropout", [False, True])
def test_other_dropouts(name, dropout):
    f, reason = STAYS[name]
    assert report(f, X, KEY, dropout=dropout) == ([], [("dropout", reason)] if reason else [])
    got, want = fo.autofuse(f, dropout=dropout)(X, KEY), f(X, KEY)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # a mean is rounded


def test_a_broadcast_dropout_of_flax():
    linen = pytest.importorskip("flax.linen")
    for dims, missed in ((), []), ((1,), [("dropout", BROADCAST)]):
        layer = linen.Dropout(0.25, broadcast_dims=dims, deterministic=False)

        def f(x):
            return layer.apply({}, x, rngs={"dropout": KEY})  # noqa: B023

        assert report(f, X, dropout=True) == ([] if missed else ["dropout"], missed)


def test_a_rule_without_a_factor():
    """One number in the place of the factor is not the argument of the function."""

    @jax.custom_vjp
    def loss(x, y):
        return by_logsumexp(x, y, 0.375)[0]

    def forward(x, y):
        return loss(x, y), (jax.nn.softmax(x), y, jax.nn.logsumexp(x, -1, keepdims=True))

    def backward(kept, ct):
        p, y, lse = kept
        return factored(p, y, 0.375, lse, ct, None), None

    loss.defvjp(forward, backward)
    f = lambda x: jnp.sum(WEIGHTS * loss(x, onehot(LABELS, V)))  # noqa: E731
    assert NAME not in report(f, X)[0]
    check(f, X)
