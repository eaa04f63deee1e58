"""The forms of cross entropy with integer labels, and the calls that replace them.

A form is a function of the logits and labels. What it does with a label that is no class, and with
an infinite logit, is its own. So each form has a function that gives its losses by an op. This
function takes ``_Logits``, or the ``_Product`` that makes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastops._signature import accumulator_dtype
from jax_fastops.autofuse._pattern import add
from jax_fastops.autofuse._patterns import OF_LOG_SOFTMAX, OF_LOGSUMEXP, log_softmax_by_hand
from jax_fastops.cross_entropy import cross_entropy, cross_entropy_of_one_hot
from jax_fastops.linear_cross_entropy import weighted_cross_entropy

# ``lax.select`` takes half of the time of ``jnp.where`` to trace.

# ---- labels --------------------------------------------------------------------------------------


def wide(labels):
    """The labels in a dtype that can hold the number of classes."""
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def _wrapped(labels, classes: int):
    """Semantics of ``logits[label]``: negative labels wrap; out-of-range labels are too large.

    The loss of a label that is too large is NaN.
    """
    labels = lax.select(labels < 0, labels + classes, labels)
    return lax.select(labels < 0, lax.full_like(labels, classes), labels)


def _nearest(labels, classes: int):
    """Semantics of ``x[label]``: negative labels wrap; others are the nearest class."""
    return jnp.clip(jnp.where(labels < 0, labels + classes, labels), 0, classes - 1)


def padding(labels, classes: int):
    """The labels, with -1 for out-of-range labels, which so have no loss."""
    is_class, labels = (labels >= 0) & (labels < classes), labels.astype(jnp.int32)
    return lax.select(is_class, labels, lax.full_like(labels, -1))


# ---- losses by an op -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Common:
    """The labels, the number of classes, the options of the op, and its first operand."""

    labels: Any
    classes: int
    options: dict[str, Any]
    x: Any


class _Logits(_Common):
    """The operands of ``cross_entropy``."""

    def losses(self, labels, more=None):
        """The losses, where ``more`` is added to the loss of each token."""
        losses = cross_entropy(self.x, labels, **self.options)
        return losses if more is None else self.plus(losses, more)

    def plus(self, losses, more):
        """The losses, and ``more`` for each token."""
        return losses + more

    def some_class(self):
        """The class of the largest logit, whose loss does not lose digits."""
        return jnp.argmax(self.x, -1).astype(self.labels.dtype)

    def logits_of(self, index):
        return _picked(self.x, index).astype(accumulator_dtype(self.x.dtype))

    def overflows(self):
        """Where the loss of finite logits, or of one that is -inf, is infinite."""
        of = jnp.finfo(accumulator_dtype(self.x.dtype))
        if self.options["label_smoothing"]:  # it overflows by any class with -inf
            return jnp.max(self.x, -1) <= of.max
        low = -float(of.max) * float(of.eps) / 4  # also in a row without an infinity
        return self.logits_of(self.labels) < low


@dataclasses.dataclass(frozen=True)
class _Product(_Common):
    """The operands of ``weighted_cross_entropy``."""

    table: Any
    bias: Any
    where: Any
    weights: Any

    def losses(self, labels, more=None):
        """The losses or their sum, where ``more`` is added to the loss of each token."""
        operands = self.x, self.table, labels, self.weights, self.bias, self.where
        losses = weighted_cross_entropy(*operands, **self.options)
        return losses if more is None else self.plus(losses, more)

    def plus(self, losses, more):
        """The losses or their sum, and ``more`` for each token."""
        if self.options["reduction"] == "sum":
            more = more if self.where is None else jnp.where(self.where, more, 0)
            if (weights := self.weights) is not None:  # 0 times infinity adds nothing
                more = jnp.where(jnp.isfinite(weights) | (more != 0), more * weights, 0)
            more = jnp.sum(more)
        return losses + more

    def some_class(self):
        """A class whose logits are finite: the bias of classes without a word may be -inf."""
        return 0 if self.bias is None else jnp.argmax(self.bias).astype(self.labels.dtype)

    def logits_of(self, index):
        """The logits of one class, in the dtype of the losses."""
        wide = accumulator_dtype(self.x.dtype)
        row = self.table[:, index] if self.options["class_axis"] else self.table[index]
        row = row.astype(self.x.dtype).astype(wide)
        logits = (self.x.astype(wide) * jnp.broadcast_to(row, self.x.shape)).sum(-1)
        logits = logits if self.bias is None else logits + self.bias[index].astype(wide)
        cap = self.options["softcap"]
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def overflows(self):
        """Where a bias of -inf makes the loss, or one of the losses in the sum, infinite."""
        if self.bias is None:
            return False
        low = self.bias == -jnp.inf
        if self.options["label_smoothing"]:
            return low.any()
        low = low[self.labels]
        if self.options["reduction"] == "none":
            return low
        return (low if self.where is None else low & self.where).any()

    def has_large_weight(self):
        """Whether a weight, such as one over 0, makes the sum of finite losses infinite or NaN."""
        if self.weights is None:
            return False
        return ~(jnp.abs(self.weights) < math.sqrt(jnp.finfo(self.weights.dtype).max)).all()


_Operands = _Logits | _Product


def _nan_if_infinite(of: _Operands, losses, overflows):
    """NaN, also as the gradient, in place of losses that are infinite and do not overflow."""
    if isinstance(of, _Product):
        overflows |= of.has_large_weight()
    one, nan = (lax.full_like(losses, number) for number in (1, jnp.nan))
    return losses * lax.select(lax.is_finite(losses) | overflows, one, nan)


def _by_label(of: _Operands):
    """Semantics of ``logits[label]``: negative labels wrap; out-of-range labels give NaN."""
    return of.losses(_wrapped(of.labels, of.classes))


def _of_log_softmax(of: _Operands):
    """Semantics of ``log_softmax(logits)[label]``. A logit of +inf gives NaN, because of inf - inf.

    The NaN of a label that is no class has no gradient.
    """
    labels = padding(_wrapped(of.labels, of.classes), of.classes)
    losses = _nan_if_infinite(of, of.losses(labels), of.overflows())
    zero, nan = (lax.full_like(labels, number, losses.dtype) for number in (0, jnp.nan))
    return of.plus(losses, lax.select(labels < 0, nan, zero))


def _by_sum(of: _Operands, top: Callable | None = None, too_large: bool = False):
    """Semantics of ``sum(one_hot(label) * logits)``: an out-of-range label subtracts nothing.

    It is computed as the loss of some class plus the logit of that class. ``top`` is the maximum
    that the program subtracts from the logits first. With ``too_large``, a label that is too large
    gives NaN.
    """
    if top is not None and isinstance(of, _Product):  # the maxima need a second matrix product
        raise ValueError("a label that is no class has the loss of the largest logit")
    is_class = of.labels >= 0
    if not too_large:
        is_class &= of.labels < of.classes
    other = of.some_class()
    more = of.logits_of(other)
    more = (1 - of.options["label_smoothing"]) * more if top is None else more - top(of.x, -1)
    return of.losses(jnp.where(is_class, of.labels, other), jnp.where(is_class, 0, more))


def _of_one_hot(of: _Operands):
    """Semantics of ``sum(one_hot(label) * log_softmax(logits))``: no class has no loss.

    But it has a z-loss, and the loss of all classes that label smoothing adds. A row with +inf
    gives NaN, with its gradient; with label smoothing, only the gradient of the +inf is NaN.
    """
    smooth = of.options["label_smoothing"]
    if not smooth and not of.options["z_loss"]:
        losses = of.losses(padding(of.labels, of.classes))
    elif isinstance(of, _Product):
        raise ValueError("a label that is no class has a loss of all classes or a z-loss")
    else:
        losses = cross_entropy_of_one_hot(of.x, of.labels, **of.options)
    # With label smoothing, a row with +inf has NaN, and the test would read all logits.
    is_product = isinstance(of, _Product)
    return losses if smooth else _nan_if_infinite(of, losses, not is_product and of.overflows())


def _nearest_class(losses: Callable) -> Callable:
    """Wraps ``losses``: clips labels into range, like ``x[label]``."""
    return lambda of: losses(dataclasses.replace(of, labels=_nearest(of.labels, of.classes)))


def _nan_with_inf(losses: Callable) -> Callable:
    """Wraps ``losses``: a row with +inf gives NaN, as inf - inf or 0 * inf, with its gradient."""
    return lambda of: _nan_if_infinite(of, losses(of), isinstance(of, _Logits) and of.overflows())


def losses_by_label(logits, labels, axis: int = -1):
    """The losses of optax: negative labels wrap; out-of-range labels give NaN."""
    labels = _wrapped(wide(labels), logits.shape[axis])
    return cross_entropy(logits, labels, axis=axis).astype(logits.dtype)


def with_factors(losses, factors: dict[str, Any]):
    """The losses, multiplied or divided by arrays, or masked, from the last factor to the first.

    The name of a factor begins with what it is: ``weight``, ``divisor`` or ``mask``.
    """
    for name, array in reversed(factors.items()):
        if name.startswith("mask"):
            losses = jnp.where(array, losses, 0)
        else:
            array = array.astype(losses.dtype)
            losses = losses * array if name.startswith("weight") else losses / array
    return losses


@dataclasses.dataclass(frozen=True)
class LossCall:
    """The call that replaces a form, with label smoothing and z-loss as numbers of the program.

    The losses may be summed along some dimensions, after ``with_factors``.
    """

    losses: Callable[[_Operands], Any]

    def __call__(self, x, labels, *, share, smooth, z, summed=(), **factors):
        factor, options = self._options(share, smooth, z)
        if labels.shape != x.shape[:-1]:  # some rows of logits have one label
            labels = jnp.broadcast_to(labels, x.shape[:-1])
        losses = self.losses(_Logits(wide(labels), x.shape[-1], options, x))
        losses = losses if factor == 1 else factor * losses
        losses = with_factors(losses, factors)
        return losses.sum(summed) if summed else losses

    def of_product(self, x, table, labels, bias=None, where=None, weights=None, **options):
        """The losses, or their weighted sum, of logits ``x @ table.T + bias``."""
        factor, options = self._options(**options)
        classes = table.shape[options["class_axis"]]
        operands = wide(labels), classes, options, x, table, bias, where, weights
        losses = self.losses(_Product(*operands))
        return losses if factor == 1 else factor * losses

    def _options(self, share, smooth, z, **options) -> tuple[float, dict[str, Any]]:
        """The factor of the losses, and the options of the op."""
        factor = share + smooth
        if abs(factor) <= 1e-6 * (abs(share) + abs(smooth)):
            raise ValueError("the losses add up to 0")
        return factor, dict(label_smoothing=smooth / factor, z_loss=z / factor, **options)


# ---- forms ---------------------------------------------------------------------------------------


def _picked(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def _mapped(x, labels) -> Any:
    pick: Callable = operator.getitem
    for _ in labels.shape:
        pick = jax.vmap(pick)
    return pick(x, labels)


def _indexed(x, labels):
    return x[(*jnp.indices(labels.shape, sparse=True), labels)]


def _indexed_under_maps(x, labels) -> Any:
    return _indexed(x, labels) if x.ndim < 3 else jax.vmap(_indexed_under_maps)(x, labels)


def _summed(x, labels):
    return jnp.sum(jnp.where(jnp.arange(x.shape[-1]) == labels[..., None], x, 0), -1)


def _multiplied(x, labels):
    return jnp.sum(jax.nn.one_hot(labels, x.shape[-1]) * x, -1)


def _summed_or_nan(x, labels):
    return jnp.where(labels < x.shape[-1], _summed(x, labels), jnp.nan)


# The operations that pick the logits at the labels, if these are not only a gather.
_PICKS = {_summed: "eq", _summed_or_nan: "eq", _multiplied: "eq", _indexed: "gather concatenate"}


_once = functools.cache(jax.jit)  # what several forms have is traced once


@jax.jit
def _log_sum(x):
    return jax.nn.logsumexp(x, axis=-1)


def _constant_max(x, axis, keepdims=False):
    return lax.stop_gradient(jnp.max(x, axis, keepdims=keepdims))


def _loss(
    form: Callable, pick: Callable, losses: Callable, smoothed: Callable | None = None,
    needs: str = OF_LOG_SOFTMAX,
) -> None:  # fmt: skip
    """Adds a form as it is and negated, with a z-loss, with label smoothing, and with both.

    ``pick`` is how the form gets the logits at the labels. ``smoothed`` is the mean of the losses
    of all classes, as the program writes it.
    """

    def function(x, labels, share, smooth, z, axis):
        y = share * form(x, labels)
        return y if smoothed is None else y + smooth * smoothed(x) + z * _log_sum(x) ** 2

    plain = dict(share=1.0, smooth=0.0, z=0.0)
    variants = [plain, plain | dict(share=-1.0)]  # programs often negate the mean, not each loss
    if smoothed is not None:
        variants += [dict(share=1.0, smooth=0.0), dict(z=0.0), {}]
    needs += " " + _PICKS.get(pick, "gather")
    for fixed in variants:
        leaves = "x labels share smooth z"
        add("cross_entropy", function, leaves, LossCall(losses), needs, fixed=fixed, axes="last")


def _loss_of_logsumexp(pick: Callable, losses: Callable, smoothed: bool = True) -> None:
    mean = (lambda x: _log_sum(x) - jnp.mean(x, -1)) if smoothed else None
    _loss(lambda x, labels: _log_sum(x) - _once(pick)(x, labels), pick, losses, mean, OF_LOGSUMEXP)


def _loss_of_log_softmax(function: Callable, pick: Callable, losses: Callable) -> None:
    mean = _once(lambda x: -jnp.mean(function(x), -1))
    _loss(lambda x, labels: -_once(pick)(_once(function)(x), labels), pick, losses, mean)


def _loss_of_shifted(top: Callable, pick: Callable, losses: Callable) -> None:
    """Adds a loss of logits less their maximum, whose ``exp`` does not overflow."""

    def form(x, labels):
        x = x - top(x, -1, keepdims=True)
        return jnp.log(jnp.sum(jnp.exp(x), -1)) - _once(pick)(x, labels)

    _loss(form, pick, losses)


_BY_INDEX = (_indexed, _mapped, _indexed_under_maps)
_loss_of_logsumexp(lambda x, i: jnp.take_along_axis(x, i[..., None], -1).take(0, -1), _by_label)
_loss_of_logsumexp(_picked, _by_label)
for _function in (jax.nn.log_softmax, functools.partial(log_softmax_by_hand, axis=-1)):
    _loss_of_log_softmax(_function, _picked, _of_log_softmax)
for _pick in _BY_INDEX:
    _loss_of_log_softmax(jax.nn.log_softmax, _pick, _nearest_class(_of_log_softmax))
    _loss_of_logsumexp(_pick, _nearest_class(_by_label))
for _top in (jnp.max, _constant_max):
    _loss_of_shifted(_top, _picked, _of_log_softmax)
    for _pick in _BY_INDEX:
        _loss_of_shifted(_top, _pick, _nearest_class(_of_log_softmax))
    for _pick in (_summed, _multiplied):
        _loss_of_shifted(_top, _pick, _nan_with_inf(functools.partial(_by_sum, top=_top)))
_loss_of_logsumexp(_summed, _by_sum)
_loss_of_logsumexp(_summed_or_nan, functools.partial(_by_sum, too_large=True))
_loss_of_logsumexp(_multiplied, _nan_with_inf(_by_sum), smoothed=False)
OF_ONE_HOT = LossCall(_of_one_hot)
