"""``cross_entropy``: the loss of a classifier with integer labels, in one pass each way.

The forward reads the logits once, and adds up the exponentials while it finds their maximum. The
backward reads the logits once and writes their gradient: it needs two numbers per row, and neither
probabilities nor a copy of the logits in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jax.typing import ArrayLike

from jax_fastops._arguments import (
    as_arrays,
    check_mask,
    integer,
    not_weak,
    real_number,
    same_floating_dtype,
)
from jax_fastops._dispatch import row_features
from jax_fastops._kernel import Kernel, kind_of, match_varying
from jax_fastops._op import Op
from jax_fastops._registry import example
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import explicit_spec, mesh_axes, spec_of

_OPTIONS = {"label_smoothing": np.float64, "z_loss": np.float64}
_FORWARD = Kernel.declare(
    "cross_entropy",
    "logits: ... v, labels: ... :int32 -> loss: ... :acc, top?: ... :acc, log_sum?: ... :acc",
    **_OPTIONS,
)
_BACKWARD = Kernel.declare(
    "cross_entropy_bwd",
    "logits: ... v, labels: ... :int32, top: ... :acc, log_sum: ... :acc, dloss: ... :acc"
    " -> dlogits: ... v",
    **_OPTIONS,
)


def _selected(logits, labels):
    """The logits in the accumulator dtype, 0 in rows that are left out, and which rows are kept."""
    kept = labels >= 0
    wide = logits.astype(accumulator_dtype(logits.dtype))
    return jnp.where(kept[..., None], wide, jnp.zeros_like(wide)), kept


def _statistics(x):
    """The maximum of each row, ``x - max``, and the logarithm of the sum of its exponentials.

    As in ``jax.nn.logsumexp``, 0 stands for an infinite maximum.
    """
    top = jax.lax.stop_gradient(x.max(-1))
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top))
    shifted = x - top[..., None]
    return top, shifted, jnp.log(jnp.exp(shifted).sum(-1))


def _classes(x):
    """The indices along the last axis, sharded like it, and of size 1 along the other axes."""
    sharding = jax.typeof(x).sharding
    spec = explicit_spec(sharding, x.ndim)
    if spec is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(None,) * (x.ndim - 1), spec[-1]))
    return jax.lax.broadcasted_iota(
        jnp.int32,
        (1,) * (x.ndim - 1) + x.shape[-1:],
        x.ndim - 1,
        out_sharding=None if spec is None else sharding,
    )


def _reference(logits, labels, *, label_smoothing: float, z_loss: float, any_label: bool):
    x, kept = _selected(logits, labels)
    top, shifted, log_sum = _statistics(x)
    # A masked sum, because XLA fuses it with the other sums. The gradient of a gather is a scatter.
    here = _classes(x) == labels[..., None]
    at_label = jnp.where(here, shifted, jnp.zeros_like(shifted)).sum(-1)
    is_class = labels < logits.shape[-1]
    loss = log_sum - (at_label if any_label else jnp.where(is_class, at_label, jnp.nan))
    loss = jnp.where(is_class, loss, jnp.zeros_like(loss)) if any_label else loss
    loss = (1 - label_smoothing) * loss
    if label_smoothing:
        loss = loss + label_smoothing * (log_sum - shifted.mean(-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(top + log_sum)
    return jnp.where(kept, loss, jnp.zeros_like(loss))


def _save(logits, labels, **_):
    return _statistics(_selected(logits, labels)[0])[::2]


def _pullback(logits, labels, top, log_sum, dloss, **options):
    (dlogits,) = jax.vjp(lambda x: _reference(x, labels, **options), logits)[1](dloss)
    return dlogits


def _if_classes(kernel, otherwise):
    """The kernel, or with ``any_label`` something else if not all labels are classes.

    The kernel has no loss for them.
    """

    def call(logits, labels, *rest, any_label, **options):
        native = functools.partial(kernel, **options)
        if not any_label:
            return native(logits, labels, *rest)
        reference = functools.partial(otherwise, any_label=True, **options)
        all_classes = jnp.all(labels < logits.shape[-1])
        return jax.lax.cond(all_classes, native, reference, logits, labels, *rest)

    return call


_loss = _if_classes(lambda *args, **options: _FORWARD(*args, **options).loss, _reference)
_loss_and_saved = _if_classes(
    lambda *args, **options: tuple(_FORWARD(*args, top=True, log_sum=True, **options)),
    lambda *args, **options: (_reference(*args, **options), *_save(*args)),
)
_dlogits = _if_classes(lambda *args, **options: _BACKWARD(*args, **options).dlogits, _pullback)

_OP = Op(
    "cross_entropy",
    "... v, ... -> ... :acc | ... :acc, ... :acc",
    _reference,
    example=example(lambda x: cross_entropy(x, jnp.arange(len(x)) % x.shape[-1]), "... n"),
    kernels=(_FORWARD, _BACKWARD),
    forward=_loss,
    save=_save,
    forward_saving=_loss_and_saved,
    residuals=lambda args, outs, saved: (*args, *saved),
    backward=lambda residuals, cts, needs_grad, **options: (
        _dlogits(*residuals, cts[0], **options),
        None,
    ),
)


def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """The cross entropy of a softmax with integer labels, for each token.

    For labels of a class, the value of
    ``optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis)``, in float32 (float64
    for float64). With ``lse = logsumexp(logits)`` the loss of a token is::

        (1 - label_smoothing) * (lse - logits[label])
            + label_smoothing * (lse - mean(logits)) + z_loss * lse**2

    Args:
      logits: array of any shape; float32, bfloat16, float16 or float64.
      labels: array of any integer dtype, with the shape of ``logits`` without ``axis``. A negative
        label leaves its token out: the loss and the gradient are 0, whatever the logits are. (optax
        counts negative labels from the end.) If a label is not below the number of classes, the
        loss is NaN, as in optax, and for the gradient no logit is at the label.
      where: boolean array that broadcasts to the shape of ``labels``. Leaves out the tokens where
        it is False. ``None`` stands for True.
      label_smoothing: the share of the target that all classes get evenly, from 0 to 1. A Python or
        NumPy number; static, as ``z_loss``.
      z_loss: the factor of the square of ``lse``, which keeps the logits near a common scale.
      axis: the axis of the classes. The kernel takes the last one, and any other takes the
        reference.

    Returns:
      The loss of each token: an array with the shape of ``labels``; float32, or float64 for
      float64. Divide its sum by the number of tokens that count to get the mean.

    Residuals: the logits, the labels (int32), and two float32 numbers (float64 for float64) per
    token: the maximum of its logits, and the logarithm of the sum of exponentials.

    Sharding: over every dimension except ``axis``, without communication. If ``axis`` is sharded
    over an explicit mesh axis, the call takes the reference, and XLA reduces over the devices. Over
    an auto mesh axis, the kernel's logits are gathered, unless you choose the reference.

    Raises:
      TypeError: ``logits``, ``labels`` or ``where`` is not an array, the dtype of ``logits`` is not
        supported, ``labels`` are not integers, ``where`` is not boolean, ``axis`` is not an
        integer, or an option is not a number.
      ValueError: the shapes do not fit, ``axis`` is out of range, there are 2**31 classes or more,
        ``label_smoothing`` is not between 0 and 1, or ``z_loss`` is not finite.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Szegedy et
    al., "Rethinking the Inception architecture" (2015): label smoothing; Chowdhery et al., "PaLM"
    (2022): the z-loss.

    Example:
      >>> logits = jnp.array([[0.0, 0.0], [0.0, 50.0], [7.0, 7.0]])
      >>> fo.cross_entropy(logits, jnp.array([1, 0, -1])).round().tolist()
      [1.0, 50.0, 0.0]
    """
    name = "cross_entropy"
    given = {"logits": logits, "labels": labels} | ({} if where is None else {"where": where})
    x, labels, *rest = as_arrays(name, **given)
    (x,) = map(not_weak, same_floating_dtype(name, [x], ["logits"]))
    axis = integer(name, "axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{name}: axis is {axis}, out of range for logits of shape {x.shape}")
    axis %= x.ndim
    options = check_options(name, label_smoothing, z_loss)
    x, labels, *rest = match_varying([x, labels, *rest])
    moved = x if axis == x.ndim - 1 else jnp.moveaxis(x, axis, -1)
    where = rest[0] if rest else None
    tokens, of = moved.shape[:-1], f"that of logits without axis {axis}"
    classes = prepared_labels(name, labels, where, tokens, moved.shape[-1], of)
    if moved.shape[-1] == 0:  # no label is a class
        zero = moved.sum(-1, dtype=accumulator_dtype(x.dtype))
        return jnp.where(classes < 0, zero, jnp.nan)
    limit = None
    if 0 in x.shape:
        limit = "there are no tokens"
    elif axis != x.ndim - 1:
        limit = "the axis is not the last one"
    features = row_features(moved.shape[-1:], x.dtype)
    moved, classes = _sharded_alike(moved, classes)
    return _OP(moved, classes, features=features, limit=limit, any_label=False, **options)


def cross_entropy_of_one_hot(
    logits: Any, labels: Any, *, label_smoothing: float, z_loss: float
) -> Any:
    """:func:`cross_entropy` as programs compute it with one-hot arrays, for ``autofuse``.

    A label that is no class, also a negative one, has the smoothed loss of all classes and the
    z-loss. ``labels`` have at least 32 bits.
    """
    name, classes = "cross_entropy", logits.shape[-1]
    options = check_options(name, label_smoothing, z_loss)
    labels = jnp.where(labels < 0, classes, labels)
    labels = prepared_labels(name, labels, None, logits.shape[:-1], classes, "that of the tokens")
    features = row_features(logits.shape[-1:], logits.dtype)
    logits, labels = _sharded_alike(logits, labels)
    return _OP(logits, labels, features=features, any_label=True, **options)


def _sharded_alike(logits, labels):
    """Both sharded like the tokens of either, if that is part of the type, as gradients will be.

    Raises a ValueError if both are sharded in ways that exclude each other.
    """
    own, others = spec_of(logits), spec_of(labels)
    if own is None and others is None:
        return logits, labels
    *tokens, classes = own or (None,) * logits.ndim
    pairs = list(zip(tokens, others or (None,) * labels.ndim, strict=True))
    kind = kind_of([jax.typeof(logits), jax.typeof(labels)])
    merged = mesh_axes(*(a or b for a, b in pairs), classes)
    if len(set(merged)) < len(merged):
        raise ValueError(
            f"cross_entropy: the logits are sharded as {own} and the labels as {others}; shard "
            "them alike by jax.sharding.reshard"
        )

    def over(x, spec):
        return x if spec_of(x) == spec else reshard(x, kind.update(spec=PartitionSpec(*spec)))

    return over(logits, (*(a or b for a, b in pairs), classes)), over(
        labels, tuple(b or a for a, b in pairs)
    )


def check_options(name: str, label_smoothing: object, z_loss: object) -> dict[str, Any]:
    smoothing = real_number(name, "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing is {smoothing}; it must be from 0 to 1")
    z = real_number(name, "z_loss", z_loss)
    if not np.isfinite(z):
        raise ValueError(f"{name}: z_loss is {z}; it must be finite")
    return {"label_smoothing": smoothing, "z_loss": z}


def prepared_labels(
    name: str, labels: Any, where: Any, tokens: tuple[Any, ...], classes: Any, of: str
) -> Any:
    """Checks labels and mask; returns labels in int32, negative for tokens that do not count.

    ``tokens`` is the shape that the labels must have, and ``of`` says in a message what it is.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        one_hot = " (of one-hot labels, pass .argmax(-1))" if labels.shape[:-1] == tokens else ""
        raise TypeError(
            f"{name}: labels has dtype {labels.dtype} and shape {labels.shape}; it must have an "
            f"integer dtype{one_hot}"
        )
    if labels.shape != tokens:
        raise ValueError(f"{name}: labels has shape {labels.shape}; it must be {tokens}, {of}")
    if isinstance(classes, int) and classes >= 2**31:
        raise ValueError(f"{name}: there are {classes} classes; they must be less than 2**31")
    if labels.dtype.itemsize >= 4 and labels.dtype != jnp.int32:  # too large ones stay too large
        least = -1 if jnp.issubdtype(labels.dtype, jnp.signedinteger) else 0
        labels = jnp.clip(labels, least, 2**31 - 1)
    labels = labels.astype(jnp.int32)
    if where is None:
        return labels
    check_mask(name, where, tokens, "labels", "a token")
    return jnp.where(where, labels, -1)
