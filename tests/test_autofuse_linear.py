"""`autofuse` of losses whose logits are a product: tables, reshapes, masked classes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autofuse_programs import capped, label_loss, masked_sum_loss, smoothed_loss, z_loss
from harness.compat import JAX_0_8
from harness.numerics import of_products
from harness.programs import equations
from test_autofuse import close, left, names, run

import jax_fastops as fo

pytestmark = pytest.mark.usefixtures("native")
RNG = np.random.default_rng(0)
WIDTH, CLASSES = 24, 129
WORDS = 120  # the other classes are padding
X = jnp.asarray(RNG.standard_normal((4, 6, WIDTH)), jnp.float32)
W = jnp.asarray(RNG.standard_normal((WIDTH, CLASSES)) / 4, jnp.float32)
BIAS = jnp.asarray(RNG.standard_normal(CLASSES), jnp.float32)
LABELS = jnp.asarray(RNG.integers(1, WORDS, (4, 6)))
TURNED = LABELS.T  # jaxlib 0.8.0 folds a transposed constant to wrong numbers
WEIGHTS = jnp.asarray(RNG.random((4, 6)), jnp.float32)
LINEAR = ["linear_cross_entropy"]
BF16 = jnp.bfloat16


def flat(x, last=()):
    return x.reshape(-1, *last)


def wide(x):
    return x.astype(jnp.float32)


def words(logits, fill=-1e9):
    return jnp.where(jnp.arange(CLASSES) < WORDS, logits, fill)


def of_rows(logits, labels):
    """A loss as a trainer writes it: of a matrix."""
    return label_loss(flat(logits, (CLASSES,)), flat(labels))


@jax.jit
def jitted_loss(logits, labels):
    return of_rows(logits, labels).mean()


FORMS = {
    "columns": lambda x, w: label_loss(x @ w, LABELS).mean(),
    "rows": lambda x, w: label_loss(x @ w.T, LABELS).mean(),
    "reshaped": lambda x, w: of_rows(x @ w, LABELS).mean(),
    "reshaped, each": lambda x, w: jnp.exp(-of_rows(x @ w, LABELS)),
    "reshaped to sequences": lambda x, w: label_loss(
        (flat(x, (WIDTH,)) @ w).reshape(4, 6, -1), LABELS
    ),
    "next token, reshaped": lambda x, w: of_rows((x @ w)[:, :-1], LABELS[:, 1:]).mean(),
    "bias of reshaped logits": lambda x, w: z_loss(
        flat(x @ w, (CLASSES,)) + BIAS, flat(LABELS)
    ).mean(),
    "softcap of reshaped logits": lambda x, w: label_loss(
        capped(flat(x @ w + BIAS, (CLASSES,))), flat(LABELS)
    ).mean(),
    "jitted loss": lambda x, w: jitted_loss(x @ w, LABELS),
    "jitted product": lambda x, w: jitted_loss(jax.jit(jnp.matmul)(x, w), LABELS),
    "sequences of losses": lambda x, w: (of_rows(x @ w, LABELS).reshape(4, 6) * WEIGHTS).sum(),
    "masked sequences": lambda x, w: jnp.where(
        WEIGHTS > 0.3, of_rows(x @ w, LABELS).reshape(4, 6), 0
    ).sum(),
    "mean of means": lambda x, w: label_loss(x @ w, LABELS).mean(-1).mean(),
    "mean of a loss under vmap": lambda x, w: jax.vmap(
        lambda x, labels: -2 * label_loss(x @ w, labels).mean()
    )(x, LABELS).mean(),
    "words": lambda x, w: label_loss(words(x @ w), LABELS).mean(),
    "words by -inf": lambda x, w: label_loss(words(x @ w.T, -jnp.inf), LABELS).mean(),
    "words by the lowest number": lambda x, w: masked_sum_loss(
        words(x @ w + BIAS, jnp.finfo(jnp.float32).min), LABELS
    ).mean(),
    "words of reshaped logits": lambda x, w: of_rows(words(x @ w.T), LABELS).mean(),
    "padding of reshaped logits": lambda x, w: of_rows(
        jnp.where(jnp.arange(CLASSES) >= WORDS, -1e30, x @ w), LABELS
    ).mean(),
    "slice of words": lambda x, w: label_loss(words(x @ w + BIAS)[..., 1:-1], LABELS - 1).mean(),
    "capped words": lambda x, w: label_loss(capped(words(x @ w)), LABELS).mean(),
    "slice of the classes": lambda x, w: label_loss((x @ w)[..., :WORDS], LABELS).mean(),
    "slice with a bias": lambda x, w: smoothed_loss(
        (x @ w.T + BIAS)[:, 1:, :WORDS], LABELS[:, 1:]
    ).mean(),
    "slice before a bias": lambda x, w: label_loss(
        (x @ w)[..., 3:WORDS] + BIAS[3:WORDS], LABELS % 7
    ).mean(),
    "scale": lambda x, w: label_loss(x @ w / 3, LABELS).mean(),
    "scale with a bias": lambda x, w: of_rows(capped(words(0.7 * (x @ w) + BIAS)), LABELS).mean(),
    "precision": lambda x, w: label_loss(
        jnp.matmul(x, w, precision="highest"), LABELS
    ).mean(),
}  # fmt: skip
NARROW = {
    "cast of columns": lambda x, w: of_rows(wide(x @ w.astype(BF16)), LABELS).mean(),
    "cast of rows": lambda x, w: of_rows(wide(x @ w.astype(BF16).T), LABELS).mean(),
    "cast of turned rows": lambda x, w: label_loss(wide(x @ w.T.astype(BF16)), LABELS).mean(),
    "words in float32": lambda x, w: of_rows(
        words(wide(x @ w.astype(BF16)), jnp.finfo(jnp.float32).min), LABELS
    ).mean(),
    "scale of columns": lambda x, w: label_loss(
        wide(x @ w.astype(BF16) * 24**-0.5), LABELS
    ).mean(),
    "wide product": lambda x, w: of_rows(
        jnp.matmul(x, w.astype(BF16), preferred_element_type=jnp.float32), LABELS
    ).mean(),
}  # fmt: skip
NARROW_HERE = [name for name in NARROW if not (JAX_0_8 and name == "wide product")]


def operands(form):
    rows = "rows" in form or form in ("words by -inf", "words of reshaped logits")
    rows = rows or form == "slice with a bias"
    return X.astype(BF16) if form in NARROW else X, W.T if rows else W


@pytest.mark.parametrize("form", [*FORMS, *NARROW_HERE])
def test_forms(form):
    """Equal values and gradients, and nothing as large as the table is transposed."""
    f, args = (FORMS | NARROW)[form], operands(form)
    assert names(f, *args) == LINEAR
    want, got = run(f, args), run(fo.autofuse(f), args)
    close(got, want, 0.03 if form in NARROW else of_products(3e-5))
    step = jax.value_and_grad(lambda *args: jnp.sum(fo.autofuse(f)(*args)), (0, 1))
    if "each" in form or form in ("reshaped to sequences", "sequences of losses"):
        return  # JAX differentiates the product of losses that are not summed
    moved = [
        e for e in equations(jax.make_jaxpr(step)(*args).jaxpr) if str(e.primitive) == "transpose"
    ]
    assert all(e.outvars[0].aval.size < W.size / 2 for e in moved)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", ["columns", "rows"])
def test_a_head_is_not_transposed(layout, platform):
    """The last layers of a decoder with float32 parameters."""
    optax = pytest.importorskip("optax")

    def loss(x, head):
        h = x.astype(jnp.float32)
        h = (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)).astype(x.dtype)
        logits = (h @ (head if layout == "columns" else head.T).astype(h.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()

    args = X.astype(BF16), W if layout == "columns" else W.T
    assert names(loss, *args) == ["rms_norm", *LINEAR]
    step = jax.jit(jax.value_and_grad(fo.autofuse(loss), (0, 1)))
    text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    shapes = re.findall(r"stablehlo.transpose .*-> tensor<([0-9x]+)x", text)
    assert all(math.prod(map(int, shape.split("x"))) < W.size / 2 for shape in shapes)


def test_precision_is_kept():
    step = jax.value_and_grad(fo.autofuse(FORMS["precision"]), (0, 1))
    found = equations(jax.make_jaxpr(step)(X, W).jaxpr)
    products = [e.params["precision"] for e in found if e.primitive.name == "dot_general"]
    highest = jax.lax.Precision.HIGHEST
    assert products == [(highest, highest)] * 3


def test_labels_of_masked_classes():
    """They have the masked logit, and its gradient is zero."""
    labels = LABELS.at[0].set(WORDS).at[1].set(CLASSES - 1)
    bias = BIAS.at[WORDS:].set(jnp.nan)
    for fill in (-1e9, -30.0, 0.0):
        f = lambda x, w, b: label_loss(words(x @ w + b, fill), labels).mean()  # noqa: B023, E731
        assert names(f, X, W, bias) == LINEAR
        want, got = (jax.value_and_grad(g, (0, 1, 2))(X, W, bias) for g in (f, fo.autofuse(f)))
        close(got, want, of_products(3e-5))


def strided(x, axis):
    return jax.lax.slice_in_dim(x, 0, None, 2, axis)


def both(f, *others):
    return lambda x, w: (lambda z: (f(z), *(g(z) for g in others)))(x @ w)


@pytest.mark.parametrize(
    "f, reason",
    [
        (both(lambda z: of_rows(z, LABELS).mean(), jnp.max), "the value is used elsewhere"),
        (both(lambda z: of_rows(words(z), LABELS).mean(), jnp.max), "the value is used elsewhere"),
        (lambda x, w: label_loss(x @ w * jnp.exp(w[0, 0]), LABELS).mean(), "mul is between"),
        (lambda x, w: label_loss((x @ w + BIAS) * 0.5, LABELS).mean(), "add is between"),
        (lambda x, w: label_loss(words(x @ w) * 0.5, LABELS).mean(), "select_n is between"),
        (lambda x, w: label_loss(jnp.sin(flat(x @ w)).reshape(24, -1), flat(LABELS)), None),
        (lambda x, w: label_loss(jnp.sin(x @ w), LABELS), "sin is between"),
        (lambda x, w: label_loss(words(capped(x @ w)), LABELS), "a softcap is before"),
        (lambda x, w: label_loss(words(x @ w) + BIAS, LABELS), "select_n is between"),
        (lambda x, w: label_loss(words(words(x @ w), -3.0), LABELS), "select_n is between"),
        (lambda x, w: label_loss(words(x @ w, jnp.nan), LABELS), "select_n is between"),
        (lambda x, w: label_loss(words(x @ w, jnp.inf), LABELS), "select_n is between"),
        (
            lambda x, w: label_loss(jnp.where(x[..., :1] > 0, x @ w, -1e9), LABELS),
            "select_n is between",
        ),
        (
            lambda x, w: label_loss(jnp.where(x @ w > 0, x @ w, -1e9), LABELS),
            None,
        ),
        (lambda x, w: label_loss(flat(x @ w, (CLASSES,))[2:], flat(LABELS)[2:]), "reshape is"),
        (lambda x, w: label_loss(strided(x @ w, 0), LABELS[::2]), "slice is between"),
        (lambda x, w: label_loss(strided(x @ w, 2), LABELS // 2), "slice is between"),
        (lambda x, w: label_loss((x @ w)[LABELS[0, :2] % 4], LABELS[:2]), "gather is"),
        (lambda x, w: label_loss((x @ w).swapaxes(0, 1), TURNED), "the logits are transposed"),
        (lambda x, w: label_loss((x @ w).reshape(4, 6 * 3, -1), jnp.tile(LABELS, 3) % 43), None),
        (
            lambda x, w: label_loss(jnp.einsum("abd,adv->abv", x, jnp.stack([w] * 4)), LABELS),
            "the product is none of",
        ),
        (
            lambda x, w: (lambda y: (y.mean(), y.max()))(label_loss(x @ w, LABELS).mean(-1)),
            None,
        ),
    ],
)
def test_near_misses(f, reason):
    found = names(f, X, W)
    if reason is None:
        assert left(f, X, W) is not None
    else:
        assert LINEAR[0] not in found
        reasons = [why for name, why in left(f, X, W) if name == LINEAR[0]]
        assert len(reasons) == 1 and reasons[0].startswith(reason)
    close(run(fo.autofuse(f), (X, W)), run(f, (X, W)), of_products(1e-4))
