"""`autofuse` of sums of losses with a weight for each token, whose logits are a product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autofuse_programs import label_loss, smoothed_loss, z_loss
from harness.numerics import assert_close_in_norm, of_products
from harness.programs import equations
from test_autofuse import close, left, names
from test_autofuse_linear import BIAS, CLASSES, LABELS, LINEAR, WEIGHTS, W, X, flat, of_rows

import jax_fastops as fo
from jax_fastops.linear_cross_entropy import weighted_cross_entropy

pytestmark = pytest.mark.usefixtures("native")
KEPT = WEIGHTS > 0.3


def mean(losses, w):
    return (losses * w).sum() / jnp.maximum(w.sum(), 1e-3)


def one_hot_loss(logits, labels):
    return -(jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits)).sum(-1)


def lm1b(logits, w):
    """As the example of Flax, without label smoothing."""
    constant = -(1.0 * np.log(1.0) + (CLASSES - 1) * 0.0 * np.log(0.0 + 1e-20))
    losses = one_hot_loss(logits, LABELS) - constant
    return (losses * w).sum(), w.sum()


# The arguments are tokens `x`, a table `w` and weights `k` of the tokens.
FORMS = {
    "mean": lambda x, w, k: mean(label_loss(x @ w, LABELS), k),
    "mean of rows": lambda x, w, k: mean(of_rows(x @ w, LABELS), flat(k)),
    "sequences": lambda x, w, k: mean(of_rows(x @ w, LABELS).reshape(4, 6), k),
    "weights first": lambda x, w, k: jnp.mean(k * -z_loss(x @ w + BIAS, LABELS)),
    "average": lambda x, w, k: jnp.average(smoothed_loss(x @ w, LABELS), weights=k),
    "divided": lambda x, w, k: jnp.sum(label_loss(x @ w, LABELS) / (1 + k)),
    "of sequences": lambda x, w, k: jnp.sum(
        label_loss(x @ w, LABELS) / k.sum(-1, keepdims=True)
    ) / 4,
    "twice": lambda x, w, k: (0.5 * label_loss(x @ w, LABELS) * k * jnp.square(k)).sum(),
    "mask of numbers": lambda x, w, k: mean(label_loss(x @ w, LABELS), KEPT.astype(jnp.float32)),
    "where, then weights": lambda x, w, k: mean(
        jnp.where(KEPT, label_loss(x @ w, LABELS), 0), k
    ),
    "weights, then where": lambda x, w, k: jnp.where(
        KEPT, label_loss(x @ w, LABELS) * k, 0
    ).sum(),
    "where twice": lambda x, w, k: jnp.where(
        KEPT, jnp.where(LABELS > 9, label_loss(x @ w, LABELS), 0), 0
    ).sum(),
    "next token": lambda x, w, k: mean(of_rows((x @ w)[:, :-1], LABELS[:, 1:]), flat(k[:, 1:])),
    "vmap": lambda x, w, k: jax.vmap(
        lambda x, labels, k: k * label_loss(x @ w, labels)
    )(x, LABELS, k).mean(),
    "one_hot": lambda x, w, k: mean(one_hot_loss(x @ w, LABELS), k),
    "one_hot times weights": lambda x, w, k: -jnp.sum(
        jax.nn.one_hot(LABELS, CLASSES) * k[..., None] * jax.nn.log_softmax(x @ w)
    ),
    "one_hot of sequences": lambda x, w, k: -jnp.sum(
        jax.nn.one_hot(LABELS, CLASSES) * k[:, :1, None] * jax.nn.log_softmax(x @ w), (-1, -2)
    ).sum(),
    "lm1b": lambda x, w, k: lm1b(x @ w, k)[0] / lm1b(x @ w, k)[1],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    f = FORMS[form]
    assert names(f, X, W, WEIGHTS) == LINEAR
    want, got = (
        jax.jit(jax.value_and_grad(g, (0, 1, 2)))(X, W, WEIGHTS) for g in (f, fo.autofuse(f))
    )
    close(got, want, of_products(3e-5))


def test_no_product_is_repeated():
    step = jax.value_and_grad(fo.autofuse(FORMS["mean"]), (0, 1, 2))
    found = equations(jax.make_jaxpr(step)(X, W, WEIGHTS).jaxpr)
    assert sum(e.primitive.name == "dot_general" for e in found) == 3


@pytest.mark.parametrize("loss", [label_loss, one_hot_loss])
@pytest.mark.parametrize("weight", [0.5, jnp.nan, jnp.inf])
def test_labels_that_are_no_class_and_weights_that_are_no_number(loss, weight):
    """As in the program: 0 times NaN is NaN, also in gradients."""
    labels = LABELS.at[0, :2].set(jnp.array([-1, CLASSES])).at[1, 0].set(CLASSES + 5)
    k = WEIGHTS.at[0, 1].set(0).at[2, 0].set(weight).at[3].set(0)

    def each(x, w, k, masked):
        losses = loss(x @ w, labels)
        if masked:
            losses = jnp.where((labels >= 0) & (labels < CLASSES), losses, 0)
        return (losses * k).sum(), (losses / k.at[3].set(1)).sum()

    for masked in (False, True):
        for i in range(2):
            f = lambda x, w, k: each(x, w, k, masked)[i]  # noqa: B023, E731
            assert names(f, X, W, k) == LINEAR
            want, got = (
                jax.jit(jax.value_and_grad(g, (0, 1, 2)))(X, W, k) for g in (f, fo.autofuse(f))
            )
            close(got, want, of_products(3e-5))


NEAR = {
    "weights of the logits": lambda x, w, k: (
        lambda z: (label_loss(z, LABELS) * jax.lax.stop_gradient(z).max(-1)).sum()
    )(x @ w),
    "weights of the losses": lambda x, w, k: (
        lambda y: (y * jax.lax.stop_gradient(jnp.exp(-y))).sum()
    )(label_loss(x @ w, LABELS)),
    "squares of losses": lambda x, w, k: (lambda y: (y * y).sum())(label_loss(x @ w, LABELS)),
    "losses times moved losses": lambda x, w, k: (lambda y: (y * y.reshape(6, 4).T).sum())(
        label_loss(x @ w, LABELS)[:, :4].repeat(6, 1).reshape(4, 24)[:, :6].T.reshape(4, 6)
    ),
    "losses times their views": lambda x, w, k: (lambda y: (y * y.reshape(1, 24)[0]).sum())(
        of_rows(x @ w, LABELS)
    ),
    "a divisor": lambda x, w, k: (k / label_loss(x @ w, LABELS)).sum(),
    "plus weights": lambda x, w, k: (label_loss(x @ w, LABELS) + k).sum(),
    "losses of two products": lambda x, w, k: (
        label_loss(x @ w, LABELS) * label_loss(x @ w[:, ::-1], LABELS)
    ).sum(),
    "elsewhere not zero": lambda x, w, k: jnp.where(
        KEPT, label_loss(x @ w, LABELS) * k, 1e-3
    ).sum(),
    "weighted losses are a result": lambda x, w, k: (
        lambda y: y.sum() + y.max()
    )(label_loss(x @ w, LABELS) * k),
    "weights of sums": lambda x, w, k: (label_loss(x @ w, LABELS).sum(-1) * k[:, 0]).sum(),
    "weights of all pairs": lambda x, w, k: (
        label_loss(x @ w, LABELS)[:, :, None] * k[:, None, :]
    ).sum(),
}  # fmt: skip


@pytest.mark.parametrize("form", NEAR)
def test_near_misses(form):
    """Each loss may be replaced, but not the sum."""
    f = NEAR[form]
    summed = [
        e
        for e in equations(jax.make_jaxpr(jax.grad(fo.autofuse(f), (0, 1)))(X, W, WEIGHTS).jaxpr)
        if e.primitive.name == "dot_general"
    ]
    assert names(f, X, W, WEIGHTS) != LINEAR or len(summed) > 3, left(f, X, W, WEIGHTS)
    want, got = (jax.value_and_grad(g, (0, 1, 2))(X, W, WEIGHTS) for g in (f, fo.autofuse(f)))
    close(got, want, of_products(1e-4))


@pytest.mark.parametrize("chunk", [None, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_op(chunk, dtype):
    """Also with labels left out, and a number of tokens that chunks do not divide."""
    x, table, bias = (a.astype(dtype) for a in (X[:3, :5], W.T, BIAS))
    labels, k = LABELS[:3, :5].at[0, 0].set(-1), WEIGHTS[:3, :5]
    where = jnp.arange(5) != 3

    def ours(x, table, bias, k):
        return weighted_cross_entropy(
            x, table, labels, k, bias, where, label_smoothing=0.1, z_loss=0.01, softcap=5.0,
            reduction="sum", chunk=chunk,
        )  # fmt: skip

    def plain(x, table, bias, k):
        each = fo.linear_cross_entropy(
            x, table, labels, bias=bias, where=where, label_smoothing=0.1, z_loss=0.01,
            softcap=5.0, reduction="none",
        )  # fmt: skip
        return (each * k).sum()

    args = x, table, bias, k
    want, got = (jax.value_and_grad(f, (0, 1, 2, 3))(*args) for f in (plain, ours))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert_close_in_norm(a, b, 2e-5 if dtype == jnp.float32 else 2e-2)
    if chunk == 2 and dtype == jnp.float32:
        hessian = [jax.jvp(jax.grad(f, 0), args, args)[1] for f in (ours, plain)]
        assert_close_in_norm(*hessian, 1e-4)
