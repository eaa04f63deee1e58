"""`cross_entropy`: transformations, vocabularies, labels, special values, residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, Sharding, Tolerance, checks
from harness.compat import x64
from harness.numerics import assert_close, assert_within, normal
from harness.programs import targets_of
from harness.transforms import oracle

import jax_fastops as fo

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("native")]

BOTH = {"label_smoothing": 0.1, "z_loss": 0.01}


def reference(logits, labels, *, where=None, label_smoothing=0.0, z_loss=0.0, axis=-1):
    """What users write, in the accumulator dtype. A label that is too large picks NaN."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    x = jnp.moveaxis(logits.astype(wide), axis, -1)
    kept = labels >= 0 if where is None else (labels >= 0) & where
    x = jnp.where(kept[..., None], x, 0)
    top = jax.lax.stop_gradient(x.max(-1))
    top = jnp.where(jnp.isfinite(top), top, 0)
    x = x - top[..., None]
    lse = jax.nn.logsumexp(x, -1)
    picked = jnp.take_along_axis(x, jnp.where(kept, labels, 0)[..., None], -1)[..., 0]
    loss = (1 - label_smoothing) * (lse - picked)
    if label_smoothing:
        loss += label_smoothing * (lse - x.mean(-1))
    if z_loss:
        loss += z_loss * (lse + top) ** 2
    return jnp.where(kept, loss, 0)


def draws(shape, axis=-1, left_out=True, where=None):
    """Draws logits and labels; some are negative, and some are too large. And a mask, if given."""

    def make(rng, dtype):
        tokens = list(shape)
        classes = tokens.pop(axis)
        low, high = (-1, classes + 1) if left_out else (0, classes)
        labels = rng.integers(low, high, tokens).astype(np.int32)
        mask = () if where is None else (rng.random(where) < 0.7,)
        return normal(rng, shape, dtype), labels, *mask

    return make


def kept(logits, labels, *_):
    """The logits, the labels, and two numbers for each token."""
    tokens = (labels.dtype, labels.size), *[(wide_of(logits.dtype), labels.size)] * 2
    return (logits.dtype, logits.size), *tokens


def masked(fn, logits, labels, where=None, **options):
    return fn(logits, labels, where=where, **options)


def case(name, shape, sharded=None, axis=-1, where=None, **more):
    options = {k: more.pop(k) for k in ("label_smoothing", "z_loss") if k in more} | {"axis": axis}
    if sharded is not None:
        more["make_sharded_args"] = draws(sharded, axis)
    return Case(
        name=name,
        fn=functools.partial(masked, fo.cross_entropy, **options),
        reference=functools.partial(masked, reference, **options),
        make_args=draws(shape, axis, where=where),
        tolerance=Tolerance(ulps=16.0),
        kernels=("cross_entropy", "cross_entropy_bwd") if axis == -1 else (),
        maps=((0, 1),),
        kept=kept if axis == -1 and len(shape) > 1 else None,
        **more,
    )


PLAIN = case(
    "plain",
    (3, 5),
    (8, 16, 8),
    shardings=(
        Sharding("batch", (0, 0), (0,)),
        Sharding("sequence", (1, 1), (1,)),
        Sharding("classes", (2, None), (None,), whole=True),
    ),
    symbolic=("b, v", "b"),
    empty="b",
)
basic = functools.partial(case, basic_only=True, modes=("native",))
REGULARIZED = basic("regularized", (2, 3, 33), **BOTH)
ONE_TOKEN = basic("one_token", (9,), **BOTH, dtypes=("float32",))
ONE_CLASS = basic("one_class", (4, 1), dtypes=("bfloat16",))
LONG = basic("long", (2, 5001), z_loss=1e-3, dtypes=("float32",))
FIRST_AXIS = basic("first_axis", (7, 4), axis=0, label_smoothing=0.3, dtypes=("float32",))
# The mask has a lower rank than the labels.
MASKED = basic("masked", (3, 4, 9), where=(4,), **BOTH, dtypes=("bfloat16", "float32"))


@checks(PLAIN, REGULARIZED, ONE_TOKEN, ONE_CLASS, LONG, FIRST_AXIS, MASKED)
def test_harness(check):
    check()


# Values -------------------------------------------------------------------------------------------


def value_and_gradient(fn, **options):
    def run(x, labels, g):
        loss, pullback = jax.vjp(lambda x: fn(x, labels, **options), x)
        return loss, pullback(g)[0]

    return run


def wide_of(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def exactly(x, labels, g, **options):
    """The reference in float64 on the CPU, for the given values."""
    return oracle(value_and_gradient(reference, **options), np.asarray(x), labels, g)


def check_values(x, labels, dtype, **options):
    """Loss and gradient against float64: as exact as the sizes of the exponents allow."""
    x = np.asarray(x).astype(dtype)
    rng = np.random.default_rng(x.size % 1000003)
    g = rng.standard_normal(labels.shape).astype(wide_of(dtype))
    what = f"{dtype}{x.shape} {options}"
    loss, dx = jax.jit(value_and_gradient(fo.cross_entropy, **options))(x, labels, g)
    exact, exact_dx = exactly(x, labels, g, **options)
    assert loss.dtype == g.dtype and dx.dtype == x.dtype, what
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        spread = np.where(np.isfinite(wide), wide.max(-1, keepdims=True) - wide, 0)
    z = options.get("z_loss", 0.0)
    top = np.abs(np.where(np.isfinite(wide), wide, 0)).max(-1)
    squared = z * (top + 12) ** 2
    oracle = 4 if x.dtype == np.float64 else 1  # which has no more bits then
    unit = oracle * (16 + 2 * np.abs(np.where(np.isfinite(exact), exact, 0)) + 4 * squared)
    assert_within(loss, exact, unit, f"loss of {what}", wide_of(dtype))
    # p has the error of its exponent, which is at most 100 where p is not negligible.
    size = (np.abs(g) * (1 + 2 * z * (top + 12)))[..., None]
    with np.errstate(over="ignore"):
        p = np.exp(-np.minimum(spread, 700))
    unit = size * (4 + p * (24 + 2 * np.minimum(spread, 100)))
    assert_within(dx, exact_dx, unit, f"gradient of {what}", wide_of(dtype))


@pytest.mark.parametrize("options", [{}, BOTH], ids=["plain", "both"])
@pytest.mark.parametrize("classes", [1, 2, 7, 8, 33, 1000, 4096, 4097, 30522, 2**17 + 1])
def test_vocabularies(dtype, classes, options):
    rng = np.random.default_rng(classes)
    x = rng.standard_normal((5, classes)) * 3
    x[:, :2] += np.log(classes)
    x[:, -2:] += np.log(classes)  # a lost first or last element is noticed
    labels = np.array([0, classes - 1, classes // 2, -1, classes], np.int32)
    check_values(x, labels, dtype, **options)


@pytest.mark.parametrize("rows", [1, 2, 3, 67, 1031])
@pytest.mark.parametrize("classes", [3, 50, 129])
def test_rows(rows, classes):
    rng = np.random.default_rng(rows)
    labels = rng.integers(-1, classes + 1, rows).astype(np.int32)
    check_values(rng.standard_normal((rows, classes)), labels, jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize("classes", [3, 9, 50, 72, 201])
def test_many_rows(dtype, classes):
    """So many that a thread of a GPU has several words of a row: 512 words per SM."""
    words = 100_000 if jax.default_backend() == "gpu" else 5_000
    rows = words // -(-classes * dtype.itemsize // 16)
    rng = np.random.default_rng(classes)
    labels = rng.integers(-1, classes + 1, rows).astype(np.int32)
    check_values(rng.standard_normal((rows, classes)), labels, dtype, **BOTH)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smooth"])
@pytest.mark.parametrize("classes", [7, 1000, 9000])
def test_hard_values(dtype, classes, options):
    """All equal, one far above the others, far from 0, and -inf."""
    rng = np.random.default_rng(5)
    x = np.repeat(rng.standard_normal((1, classes)), 8, 0)
    x[0] = 3.5
    x[1, 2] = 200.0  # the label
    x[2, 3] = 200.0  # not the label
    x[3] += 1000.0
    x[4] -= 1000.0
    x[5, 3:] = -np.inf if not options else -200.0
    x[6, ::2] *= 100
    labels = np.full(8, 2, np.int32)
    check_values(x, labels, dtype, **options)


def special_rows(classes):
    x = np.tile(np.float32([1, 2, 3, 4] * (classes // 4)), (13, 1))
    x[0] = -np.inf
    x[1, 5] = np.inf
    x[2, 5] = np.nan
    x[3] = np.nan
    x[4, 2] = -np.inf  # the label
    x[5] = np.inf
    x[6, 2] = np.inf
    x[7, 3:] = -np.inf
    labels = np.full(13, 2, np.int32)
    x[9, -3] = np.nan  # and others that are far from the label, maybe in another block
    x[10, -3] = np.inf
    x[11, -3] = np.inf
    labels[11] = classes - 3
    x[12, :-3] = -np.inf
    labels[12] = classes - 3
    return x, labels


@pytest.mark.parametrize("options", [{}, BOTH], ids=["plain", "both"])
@pytest.mark.parametrize("classes", [8, 8200, 2**17])
def test_special_values(dtype, classes, options):
    """NaN and Inf are where optax' formulas have them. The longest rows have several blocks."""
    if classes == 2**17 and jax.default_backend() != "gpu":
        pytest.skip("a CPU has no kernel of its own for such rows")
    x, labels = special_rows(classes)
    x = x.astype(dtype)
    g = np.ones(len(labels), wide_of(dtype))
    got = jax.jit(value_and_gradient(fo.cross_entropy, **options))(x, labels, g)
    with fo.use_implementation("xla"):
        want = jax.jit(value_and_gradient(fo.cross_entropy, **options))(x, labels, g)
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(a, np.float64) for a in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("mode", ["native", "xla"])
def test_tokens_that_are_left_out(dtype, mode):
    """Their loss and gradient are 0, whatever the logits and the cotangent are."""
    x = special_rows(40)[0][:9].astype(dtype)
    labels = np.int32([-1, -2, -(2**31), -40, -1, -41, -100, 2, 40])
    where = np.arange(9) < 7
    g = np.array([np.nan, np.inf] * 4 + [1], wide_of(dtype))
    with fo.use_implementation(mode):
        run = jax.jit(value_and_gradient(fo.cross_entropy, where=where, **BOTH))
        loss, dx = run(x, labels, g)
        assert not np.asarray(loss).any() and not np.asarray(dx).any()
        run = jax.jit(value_and_gradient(fo.cross_entropy, where=False))
        assert not any(np.asarray(a).any() for a in run(x, ~labels, g))


@pytest.mark.parametrize("mode", ["native", "xla"])
@pytest.mark.parametrize("classes", [3, 40, 5001])
def test_labels_that_are_too_large(dtype, classes, mode):
    """The loss is NaN, and the gradients are finite, as in optax."""
    x = np.random.default_rng(classes).standard_normal((6, classes))
    labels = np.int32([0, classes, classes - 1, classes + 1, 2**31 - 1, classes + 63])
    with fo.use_implementation(mode):
        check_values(x, labels, dtype)
        for smoothing in (0.0, 1.0):
            loss = fo.cross_entropy(x.astype(dtype), labels, label_smoothing=smoothing)
            np.testing.assert_array_equal(np.isnan(loss), labels >= classes)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int64", "uint32", "uint64"])
def test_label_dtypes(kind):
    x = np.random.default_rng(3).standard_normal((4, 300)).astype(np.float32)
    with x64():
        info = np.iinfo(kind)
        labels = np.array([0, 100, info.max, info.min], kind)
        got = fo.cross_entropy(x, labels)
        exact = exactly(x, labels.astype(np.float64).clip(-1, 300).astype(np.int32), np.ones(4))[0]
    np.testing.assert_allclose(got, exact, rtol=1e-6)


def test_optax():
    optax = pytest.importorskip("optax")
    x, labels = draws((20, 77), left_out=False)(np.random.default_rng(4), np.float32)
    theirs = optax.softmax_cross_entropy_with_integer_labels
    for given in (labels, np.where(np.arange(20) % 3, labels, 77)):  # some are too large
        run = (value_and_gradient(fn)(x, given, np.ones(20)) for fn in (fo.cross_entropy, theirs))
        assert_close(*run, rtol=1e-6, atol=1e-6)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 77), 0.2)
    want = optax.softmax_cross_entropy(x, smooth)
    got = fo.cross_entropy(x, labels, label_smoothing=0.2)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_axes(axis):
    x, labels = draws((3, 4, 5), axis)(np.random.default_rng(4), np.float32)
    got = fo.cross_entropy(x, labels, axis=axis, **BOTH)
    want = fo.cross_entropy(np.moveaxis(x, axis, -1), labels, **BOTH)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_no_elements(shape):
    x = np.ones(shape, np.float32)
    labels = 1 - np.arange(np.prod(shape[:-1], dtype=np.int32)).reshape(shape[:-1])
    g = np.ones(shape[:-1], np.float32)
    loss, dx = jax.jit(value_and_gradient(fo.cross_entropy, **BOTH))(x, labels, g)
    assert loss.shape == shape[:-1] and dx.shape == shape
    want = np.where(labels < 0, 0, np.nan)  # no label is a class
    np.testing.assert_array_equal(loss, want)


X, Y = np.ones((3, 4), np.float32), np.zeros(3, np.int32)


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((X.astype(int), Y), {}, TypeError, "cross_entropy: logits has dtype int"),
        ((X, Y.astype(np.float32)), {}, TypeError, "labels has dtype float32.*integer"),
        ((X, Y > 0), {}, TypeError, "labels has dtype bool.*integer"),
        ((X, X.astype(np.int32)), {}, ValueError, r"labels has shape \(3, 4\); it must be \(3,\)"),
        ((X, Y), {"where": Y}, TypeError, "where has dtype int32"),
        ((X, Y), {"where": X > 0}, ValueError, r"where has shape \(3, 4\), which does not"),
        ((X, Y), {"axis": 2}, ValueError, "axis is 2, out of range"),
        ((X, Y), {"axis": 1.5}, TypeError, "axis is 1.5; it must be an integer"),
        ((X, Y), {"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5; it must be from 0"),
        ((X, Y), {"z_loss": np.inf}, ValueError, "z_loss is inf; it must be finite"),
        ((X, Y), {"z_loss": "1"}, TypeError, "z_loss is of type str"),
        ((X, None), {}, TypeError, "labels is None"),
    ],
)
def test_errors(args, options, error, message):
    with pytest.raises(error, match=message):
        fo.cross_entropy(*args, **options)


# Kernels that run, residuals, shardings -----------------------------------------------------------


def test_kernels_that_run():
    x, labels = draws((4, 9))(np.random.default_rng(2), np.float32)
    assert targets_of(fo.cross_entropy, x, labels) == ["cross_entropy"]
    mean = lambda x: fo.cross_entropy(x, labels).mean()  # noqa: E731
    assert targets_of(jax.grad(mean), x) == ["cross_entropy", "cross_entropy_bwd"]
    assert not targets_of(functools.partial(fo.cross_entropy, axis=0), x, labels[[0] * 9])


@pytest.mark.parametrize("mode", ["native", "xla"])
def test_next_tokens_of_a_length_that_is_a_symbol(mode):
    def losses(logits, tokens):
        with fo.use_implementation(mode):
            return fo.cross_entropy(logits[:, :-1], tokens[:, 1:])

    (n,) = jax.export.symbolic_shape("n")
    operands = jax.ShapeDtypeStruct((2, n, 5), "float32"), jax.ShapeDtypeStruct((2, n), "int32")
    checks = fo.export_checks()
    exported = jax.export.export(jax.jit(losses), disabled_checks=checks)(*operands)
    logits, tokens = np.ones((2, 7, 5), np.float32), np.zeros((2, 7), np.int32)
    np.testing.assert_allclose(exported.call(logits, tokens), np.log(5.0), rtol=1e-5)


def test_one_hot_labels_say_what_to_pass():
    x = jnp.ones((4, 8))
    with pytest.raises(TypeError, match=r"\(of one-hot labels, pass .argmax\(-1\)\)$"):
        fo.cross_entropy(x, jax.nn.one_hot(jnp.arange(4), 8))
    with pytest.raises(TypeError, match=r"an integer dtype$"):
        fo.cross_entropy(x, jnp.ones(4))
