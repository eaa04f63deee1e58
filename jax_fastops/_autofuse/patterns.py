"""The patterns: functions in plain JAX, and the calls that replace them.

To add one, write the function and the call. Operands are float32 arrays of the size that the
program has; ``row`` is along the axis, ``rest`` along the other axes, ``free`` any number.
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

from jax_fastops._autofuse.formulas import Compiler, Formula
from jax_fastops._autofuse.graph import Graph
from jax_fastops._autofuse.linear import (
    from_the_end,
    linear_by_label,
    linear_by_sum,
    linear_by_sum_of_shifted,
    linear_of_log_softmax,
    linear_of_one_hot,
    nan_with_inf,
    nearest_class,
    no_class_as_padding,
    of_nearest_class,
    wide_labels,
)
from jax_fastops._settings import fixed
from jax_fastops.batch_norm import batch_norm, batch_norm_inference
from jax_fastops.bias_act import ACTIVATIONS, bias_act
from jax_fastops.cross_entropy import cross_entropy
from jax_fastops.gated_act import gated_act
from jax_fastops.lerp import lerp
from jax_fastops.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm
from jax_fastops.relu import add_relu, relu
from jax_fastops.softmax import log_softmax, softmax

# What a leaf of the pattern is, by the name of the argument.
_KINDS = {
    **dict.fromkeys(("x", "up", "residual", "start", "end", "weight"), "full"),
    **dict.fromkeys(("scale", "bias", "mean", "var"), "row"),
    **{"where": "mask", "labels": "labels"},
    **dict.fromkeys(("eps", "share", "smooth", "z"), "free"),
}


def kind_of(leaf: str) -> str:
    """What an operand of a pattern is."""
    return _KINDS[leaf]


MAX_RANK = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """``function(*leaves, axis=...)`` is what a program has, ``call(leaves, axis)`` replaces it.

    ``leaves`` are names. ``axes`` says for which axes the pattern is tried: ``"last"``, ``"each"``,
    or ``"none"`` if it has no axis. ``sum_of`` replaces it if ``x`` is the sum of two arrays ``a``
    and ``b`` (of norms, also of a row ``input_bias``), and ``biased`` if it is the sum of an array
    and a row. If ``x`` is a multiple and the call is ``scaled``, it takes the number as ``scale``;
    if it is ``masked``, also a mask as ``where``. If the function has several results, the call
    computes them all. ``fanout`` says whether the op can give its result twice, so that the
    backward takes two cotangents in place of their sum. ``linear`` replaces losses, or their sum,
    whose logits are a product.
    """

    name: str
    function: Callable
    leaves: tuple[str, ...]
    call: Callable
    axes: str = "none"
    sum_of: Callable | None = None
    biased: Callable | None = None
    scaled: bool = False
    masked: bool = False
    fanout: bool = False
    linear: Callable | None = None

    @functools.cached_property
    def kind(self) -> str:
        """What its formula is at the top."""
        return compiled(self, 3, 2)[0].kind

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """The operations that it has for any axis."""
        return frozenset(name for name in compiled(self, 3, 2)[0].needs if isinstance(name, str))

    @functools.cache  # noqa: B019
    def reductions(self, rank: int, axis: int) -> frozenset:
        """Its reductions for arrays of this rank, each with its axes."""
        others = tuple(i for i in range(rank) if i != axis)
        of = {"(2,)": (axis,), "(0, 1)": others}
        found = (name for name in compiled(self, 3, 2)[0].needs if not isinstance(name, str))
        return frozenset((name, (("axes", str(of[axes])),)) for name, ((_, axes),) in found)

    def count(self, sizes: tuple[int, ...], axis: int) -> int:
        """How many elements its means are over."""
        return math.prod(sizes) // sizes[axis] if self.axes == "each" else (sizes or (1,))[axis]


_SIZES = (101, 103, 107, 109, 113, 127, 131, 137)  # no constant of a pattern is one of these


@functools.cache
def compiled(
    pattern: Pattern, rank: int, axis: int, dtype: Any = jnp.float32, x64: bool = False
) -> list[Formula]:
    """The formulas of the results, for arrays of up to eight dimensions.

    ``dtype`` is float64 for results of that dtype, so that no number is rounded to float32. ``x64``
    says whether the program was traced with 64-bit types, which indices have then.
    """
    shape = _SIZES[:rank]
    kinds = {
        "full": jax.ShapeDtypeStruct(shape, dtype),
        "row": jax.ShapeDtypeStruct(shape[axis:][:1], dtype),
        "mask": jax.ShapeDtypeStruct(shape, jnp.bool_),
        "labels": jax.ShapeDtypeStruct(shape[:-1], jnp.int32),
        "free": jax.ShapeDtypeStruct((), dtype),
    }
    operands = [kinds[kind_of(leaf)] for leaf in pattern.leaves]
    with fixed(x64):
        traced = jax.make_jaxpr(functools.partial(pattern.function, axis=axis))(*operands)
        graph = Graph(traced.jaxpr, traced.consts)
        free = [i for i, leaf in enumerate(pattern.leaves) if kind_of(leaf) == "free"]
        compiler = Compiler(graph, free, pattern.count(shape, axis))
        return [compiler(value) for value in graph.results]


_PATTERNS: list[Pattern] = []


def _add(name: str, function: Callable, leaves: str, call: Callable, **more: Any) -> None:
    _PATTERNS.append(Pattern(name, function, tuple(leaves.split()), call, **more))


# ---- activations ---------------------------------------------------------------------------------


def _activations() -> dict[str, list[Callable]]:
    return {
        "relu": [jax.nn.relu],
        "gelu": [
            ACTIVATIONS["gelu"],
            lambda x: 0.5 * x * (1 + jnp.tanh((2 / math.pi) ** 0.5 * x * (1 + 0.044715 * x**2))),
            lambda x: x * lax.logistic((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3)),
        ],
        "gelu_exact": [
            lambda x: jax.nn.gelu(x, approximate=False),
            lambda x: x * 0.5 * (1 + lax.erf(x * 0.5**0.5)),
            lambda x: x * 0.5 * lax.erfc(-x * 0.5**0.5),
            lambda x: x * jax.scipy.special.ndtr(x),
        ],
        "silu": [
            jax.nn.silu,
            lambda x: x / (1 + jnp.exp(-x)),
            lambda x: 0.5 * x * (1 + jnp.tanh(0.5 * x)),
        ],
    }


def _relu_of_sum(leaves, axis):
    del axis
    return add_relu(leaves["a"], leaves["b"])


def _activation(name: str, function: Callable) -> None:
    def plain(x, *, axis):
        del axis
        return function(x)

    def gated(x, up, *, axis):
        del axis
        return function(x) * up

    def call(leaves, axis):
        del axis
        return relu(leaves["x"]) if name == "relu" else bias_act(leaves["x"], None, activation=name)  # type: ignore[arg-type]

    def biased(leaves, axis):
        del axis
        return bias_act(leaves["a"], leaves["b"], activation=name)  # type: ignore[arg-type]

    def gate(leaves, axis):
        del axis
        return gated_act(leaves["x"], leaves.get("up"), activation=name)  # type: ignore[arg-type]

    _add(f"{name} * up", gated, "x up", gate)
    if name == "relu":
        _add(name, plain, "x", call, sum_of=_relu_of_sum, biased=biased)
    else:
        _add(name, plain, "x", call, biased=biased)


for _name, _functions in _activations().items():
    for _function in _functions:
        _activation(_name, _function)

# ---- softmax and cross entropy -------------------------------------------------------------------


def _shifted(x, axis):
    return x - jnp.max(x, axis, keepdims=True)


def _softmax(x, *, axis):
    e = jnp.exp(_shifted(x, axis))
    return e / jnp.sum(e, axis, keepdims=True)


def _log_softmax(x, *, axis):
    x = _shifted(x, axis)
    return x - jnp.log(jnp.sum(jnp.exp(x), axis, keepdims=True))


def _drop(leaves) -> dict:
    names = ("dropout_key", "dropout_rate")
    return {name: leaves[name] for name in names if name in leaves}


def _call_softmax(leaves, axis):
    options = dict(scale=leaves.get("scale", 1.0), **_drop(leaves))
    return softmax(leaves["x"], axis, leaves.get("where"), **options)


def _call_log_softmax(leaves, axis):
    return log_softmax(leaves["x"], axis, scale=leaves.get("scale", 1.0))


for _form in (
    lambda x, axis: jax.nn.softmax(x, axis),
    _softmax,
    lambda x, axis: jnp.exp(x - jax.nn.logsumexp(x, axis, keepdims=True)),
    lambda x, axis: jnp.exp(jax.nn.log_softmax(x, axis)),
):
    _add("softmax", _form, "x", _call_softmax, axes="each", scaled=True, masked=True)
_add(
    "softmax with where",
    lambda x, where, axis: jax.nn.softmax(x, axis, where=where),
    "x where",
    _call_softmax,
    axes="each",
    scaled=True,
)
for _form in (
    lambda x, axis: jax.nn.log_softmax(x, axis),
    _log_softmax,
    lambda x, axis: x - jax.nn.logsumexp(x, axis, keepdims=True),
):
    _add("log_softmax", _form, "x", _call_log_softmax, axes="each", scaled=True)


def _picked(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def _picked_by_map(x, labels) -> Any:
    pick: Callable = operator.getitem
    for _ in labels.shape:
        pick = jax.vmap(pick)
    return pick(x, labels)


def _picked_by_index(x, labels):
    return x[(*jnp.indices(labels.shape, sparse=True), labels)]


def _picked_by_map_of_pairs(x, labels) -> Any:
    if x.ndim < 3:
        return _picked_by_index(x, labels)
    return jax.vmap(_picked_by_map_of_pairs)(x, labels)


def _picked_by_optax(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1).take(0, axis=-1)


def _picked_by_sum(x, labels):
    return jnp.sum(jnp.where(jnp.arange(x.shape[-1]) == labels[..., None], x, 0), -1)


def _picked_by_sum_or_nan(x, labels):
    return jnp.where(labels < x.shape[-1], _picked_by_sum(x, labels), jnp.nan)


def _picked_by_product(x, labels):
    return jnp.sum(jax.nn.one_hot(labels, x.shape[-1]) * x, -1)


def losses_by_label(logits, labels, axis=-1, **options):
    """As by indexing: negative labels count from the end, and those that are no class give NaN."""
    labels = from_the_end(labels, logits.shape[axis])
    return cross_entropy(logits, labels, axis=axis, **options).astype(logits.dtype)


def _losses_of_log_softmax(logits, labels, **options):
    """The losses of `losses_by_label`. A label that is no class gives NaN, without a gradient."""
    classes = logits.shape[-1]
    labels = no_class_as_padding(from_the_end(labels, classes), classes)
    losses = cross_entropy(logits, labels, **options).astype(logits.dtype)
    return losses + jnp.where(labels < 0, jnp.nan, 0)


def _losses_by_index(logits, labels, **options):
    """As by ``x[label]``."""
    labels = nearest_class(labels, logits.shape[-1])
    return cross_entropy(logits, labels, **options).astype(logits.dtype)


def _losses_by_sum(logits, labels, top: Callable | None = None, too_large: bool = False, **options):
    """As by a sum over the classes that are the label: one that is no class takes nothing off.

    ``top`` is the maximum that was taken off the logits first. If ``too_large``, a label that is
    too large gives NaN.
    """
    labels = wide_labels(labels)
    is_class = labels >= 0
    if not too_large:
        is_class &= labels < logits.shape[-1]
    largest = jnp.argmax(logits, -1).astype(labels.dtype)  # whose loss does not lose digits
    losses = cross_entropy(logits, jnp.where(is_class, labels, largest), **options)
    taken = jnp.take_along_axis(logits, largest[..., None], -1)[..., 0]
    share = 1 - options.get("label_smoothing", 0.0)
    more = share * taken if top is None else taken - top(logits, -1)
    return losses.astype(logits.dtype) + jnp.where(is_class, 0, more)


def _losses_of_one_hot(logits, labels, **options):
    """A label that is no class has no loss."""
    labels = no_class_as_padding(labels, logits.shape[-1])
    return cross_entropy(logits, labels, **options).astype(logits.dtype)


def _nan_with_inf(losses: Callable) -> Callable:
    """The same losses, but a row with +inf gives NaN, and so does its gradient.

    It has inf less itself, or inf times 0.
    """

    def call(logits, labels, **options):
        found = losses(logits, labels, **options)
        of = jnp.finfo(logits.dtype)
        if options.get("label_smoothing"):  # it overflows by any class with -inf
            overflows = jnp.max(logits, -1) <= of.max
        else:
            taken = jnp.take_along_axis(logits, wide_labels(labels)[..., None], -1)[..., 0]
            overflows = taken < -float(of.max) * float(of.eps) / 4  # also in a row without
        return found * jnp.where(jnp.isfinite(found) | overflows, 1, jnp.nan)

    return call


def _log_sum(x):
    return jax.nn.logsumexp(x, axis=-1)


def _smoothed(x):
    """The mean of the losses of all classes."""
    return _log_sum(x) - jnp.mean(x, -1)


def _options(leaves) -> tuple[float, dict[str, float]]:
    """The factor of a loss with label smoothing and z-loss, and the options of the op."""
    share, smooth, z = (leaves.get(k, v) for k, v in (("share", 1.0), ("smooth", 0.0), ("z", 0.0)))
    factor = share + smooth
    if abs(factor) < 1e-6:
        raise ValueError("the losses add up to 0")
    return factor, dict(label_smoothing=smooth / factor, z_loss=z / factor)


def _loss(
    name: str, function: Callable, losses: Callable, linear: Callable, smoothed: Callable | None
) -> None:
    """Adds a loss as it is, negated, with a z-loss, with label smoothing, and with both."""

    def call(leaves, axis):
        del axis
        factor, options = _options(leaves)
        return factor * losses(leaves["x"], leaves["labels"], **options)

    def of_product(leaves, axis):
        del axis
        factor, options = _options(leaves)
        return factor * linear(leaves, **options)

    def negative(form: Callable) -> Callable:
        return lambda leaves, axis: -form(leaves, axis)

    def add(function: Callable, leaves: str, call=call, linear=of_product) -> None:
        def on_last_axis(x, labels, *numbers, axis):
            del axis
            return function(x, labels, *numbers)

        _add(name, on_last_axis, "x labels " + leaves, call, axes="last", linear=linear)

    add(function, "")
    # The mean of log-likelihoods is often negated, not these.
    add(lambda x, labels: -function(x, labels), "", negative(call), negative(of_product))
    if smoothed is None:
        return
    add(lambda x, labels, z: function(x, labels) + z * _log_sum(x) ** 2, "z")
    add(lambda x, labels, share, s: share * function(x, labels) + s * smoothed(x), "share smooth")
    add(
        lambda x, labels, share, s, z: (
            share * function(x, labels) + s * smoothed(x) + z * _log_sum(x) ** 2
        ),
        "share smooth z",
    )


def _constant_max(x, axis, keepdims=False):
    return lax.stop_gradient(jnp.max(x, axis, keepdims=keepdims))


def _loss_of_shifted(top: Callable, pick: Callable, losses: Callable, linear: Callable) -> None:
    """Adds a loss of logits less their maximum, whose ``exp`` does not overflow."""

    def function(x, labels):
        x = x - top(x, -1, keepdims=True)
        return jnp.log(jnp.sum(jnp.exp(x), -1)) - pick(x, labels)

    _loss("cross_entropy", function, _nan_with_inf(losses), linear, None)


for _form in (
    lambda x, labels: _log_sum(x) - _picked_by_optax(x, labels),
    lambda x, labels: _log_sum(x) - _picked(x, labels),
):
    _loss("cross_entropy", _form, losses_by_label, linear_by_label, _smoothed)
for _log_form in (lambda x: jax.nn.log_softmax(x), lambda x: _log_softmax(x, axis=-1)):
    _loss(
        "cross_entropy",
        lambda x, labels, f=_log_form: -_picked(f(x), labels),
        _nan_with_inf(_losses_of_log_softmax),
        linear_of_log_softmax,
        lambda x, f=_log_form: -jnp.mean(f(x), -1),
    )
for _pick in (_picked_by_index, _picked_by_map, _picked_by_map_of_pairs):
    _loss(
        "cross_entropy",
        lambda x, labels, pick=_pick: -pick(jax.nn.log_softmax(x), labels),
        _nan_with_inf(_losses_by_index),
        of_nearest_class(linear_of_log_softmax),
        lambda x: -jnp.mean(jax.nn.log_softmax(x), -1),
    )
    _loss(
        "cross_entropy",
        lambda x, labels, pick=_pick: _log_sum(x) - pick(x, labels),
        _losses_by_index,
        of_nearest_class(linear_by_label),
        _smoothed,
    )
for _top in (jnp.max, _constant_max):
    _loss_of_shifted(_top, _picked, _losses_of_log_softmax, linear_of_log_softmax)
    for _pick in (_picked_by_index, _picked_by_map, _picked_by_map_of_pairs):
        _loss_of_shifted(_top, _pick, _losses_by_index, of_nearest_class(linear_of_log_softmax))
    for _pick in (_picked_by_sum, _picked_by_product):
        _by_sum = functools.partial(_losses_by_sum, top=_top)
        _loss_of_shifted(_top, _pick, _by_sum, linear_by_sum_of_shifted)
_loss(
    "cross_entropy",
    lambda x, labels: _log_sum(x) - _picked_by_sum(x, labels),
    _losses_by_sum,
    linear_by_sum,
    _smoothed,
)
_loss(
    "cross_entropy",
    lambda x, labels: _log_sum(x) - _picked_by_sum_or_nan(x, labels),
    functools.partial(_losses_by_sum, too_large=True),
    functools.partial(linear_by_sum, too_large=True),
    _smoothed,
)
_loss(
    "cross_entropy",
    lambda x, labels: _log_sum(x) - _picked_by_product(x, labels),
    _nan_with_inf(_losses_by_sum),
    nan_with_inf(linear_by_sum),
    None,
)
_loss(
    "cross_entropy of one_hot",
    lambda x, labels: -_picked_by_product(jax.nn.log_softmax(x), labels),
    _nan_with_inf(_losses_of_one_hot),
    nan_with_inf(linear_of_one_hot),
    None,
)

# ---- norms ---------------------------------------------------------------------------------------


def _moments(x, axes, form: str):
    mean = jnp.mean(x, axes, keepdims=True)
    if form.startswith("fast"):
        var = jnp.mean(x * x, axes, keepdims=True) - mean * mean
    else:
        var = jnp.mean((x - mean) ** 2, axes, keepdims=True)
    return mean, jnp.maximum(var, 0.0) if form.endswith("positive") else var


def _affine(x, mean, inverse, scale, bias, form: str):
    """``(x - mean) * inverse * scale + bias``, or with the brackets multiplied out."""
    inverse = inverse if scale is None else inverse * scale
    y = x * inverse - mean * inverse if form == "out" else (x - mean) * inverse
    return y if bias is None else y + bias


def _others(x, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis % x.ndim)


def _along(v, x, axis: int):
    return jnp.expand_dims(v, _others(x, axis))


_FORMS = ("two", "fast", "fast positive", "two positive")


def _given(leaves, *names):
    return [leaves.get(name) for name in names]


def _row_norm(rms: bool, form: str, order: str, parameters: tuple[str, ...]) -> None:
    def function(x, *rest, axis):
        *given, eps = rest
        named = {name: _along(v, x, axis) for name, v in zip(parameters, given, strict=True)}
        if rms:
            mean = jnp.mean(x * x, -1, keepdims=True)
            inverse = lax.rsqrt((jnp.broadcast_to(mean, x.shape) if form == "wide" else mean) + eps)
            return x * inverse * named["scale"] if named else x * inverse
        mean, var = _moments(x, -1, form)
        scale, bias = _given(named, "scale", "bias")
        return _affine(x, mean, lax.rsqrt(var + eps), scale, bias, order)

    own, with_residual = (rms_norm, residual_rms_norm) if rms else (layer_norm, residual_layer_norm)
    names = ("scale",) if rms else ("scale", "bias")

    def call(leaves, axis):
        del axis
        options = dict(eps=leaves["eps"], fanout=leaves["fanout"])
        return own(leaves["x"], *_given(leaves, *names), **options)

    def sum_of(leaves, axis):
        del axis
        options = dict(eps=leaves["eps"], fanout=leaves["fanout"], return_sum=True)
        options |= dict(input_bias=leaves.get("input_bias"), **_drop(leaves))
        return with_residual(*_given(leaves, "a", "b"), *_given(leaves, *names), **options)

    leaves = " ".join(("x", *parameters, "eps"))
    name = "rms_norm" if rms else "layer_norm"
    _add(name, function, leaves, call, axes="last", sum_of=sum_of, fanout=True)


for _parameters in (("scale", "bias"), ("scale",), ("bias",), ()):
    for _form_ in _FORMS:
        for _order in ("in", "out"):
            _row_norm(False, _form_, _order, _parameters)
    if "bias" not in _parameters:
        for _form_ in ("", "wide"):  # Haiku broadcasts the mean
            _row_norm(True, _form_, "in", _parameters)


def _channel_norm(
    form: str | None, order: str, parameters: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Batch norm, with the statistics of the batch or (no form) given ones."""
    statistics = () if form else ("mean", "var")

    def function(x, *rest, axis):
        *given, eps = rest
        named = dict(zip((*statistics, *parameters, *after), given, strict=False))
        rows = {n: _along(v, x, axis) for n, v in named.items() if n != "residual"}
        if form:
            mean, var = _moments(x, _others(x, axis), form)
        else:
            mean, var = rows["mean"], rows["var"]
        scale, bias = _given(rows, "scale", "bias")
        y = _affine(x, mean, lax.rsqrt(var + eps), scale, bias, order)
        y = y + named["residual"] if "residual" in after else y
        y = jax.nn.relu(y) if "relu" in after else y
        return (y, mean, var) if form else y

    def call(leaves, axis):
        options = dict(axis=axis, eps=leaves["eps"], residual=leaves.get("residual"))
        options["activation"] = "relu" if "relu" in after else None
        given = _given(leaves, "scale", "bias")
        if form:
            return batch_norm(leaves["x"], *given, **options, fanout=leaves["fanout"])
        return batch_norm_inference(leaves["x"], *_given(leaves, *statistics), *given, **options)

    residual = ("residual",) if "residual" in after else ()
    leaves = " ".join(("x", *statistics, *parameters, *residual, "eps"))
    name = " + ".join(("batch_norm" if form else "batch_norm_inference", *after))
    _add(name, function, leaves, call, axes="each", fanout=form is not None)


for _after in (("residual", "relu"), ("relu",), ("residual",), ()):
    for _parameters in (("scale", "bias"), ("scale",), ("bias",), ()):
        for _form_ in ("two", "fast", "fast positive", None):
            for _order in ("in", "out"):
                _channel_norm(_form_, _order, _parameters, _after)

# ---- interpolation -------------------------------------------------------------------------------


def _call_lerp(leaves, axis):
    del axis
    return lerp(leaves["start"], leaves["end"], leaves["weight"])


_add(
    "lerp",
    lambda start, end, weight, axis: start + weight * (end - start),
    "start end weight",
    _call_lerp,
)


@functools.cache
def by_size() -> list[Pattern]:
    """All patterns, the largest first."""
    return sorted(_PATTERNS, key=lambda p: compiled(p, 3, 2)[0].size, reverse=True)
