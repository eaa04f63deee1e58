"""``patch``: functions of ``jax.nn``, Flax and optax are ours in a block.

A function may have been imported by name long before, so what is replaced is what a call of it
runs: the code of a Python function (also of one under ``jax.jit``, which is traced again), the
class of a function with a derivative rule (``jax.custom_jvp``), and the method of a class. The
replacement asks for the context of its thread, and runs the original outside of ``patch``. It is
installed once and stays.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import source_info_util

from jax_fastops import _implementation, _patched
from jax_fastops._arguments import FLOATING, is_epsilon
from jax_fastops._dispatch import Refused, kernel_or
from jax_fastops.attention import attention
from jax_fastops.autofuse._losses import losses_by_label
from jax_fastops.batch_norm import batch_norm, batch_norm_inference
from jax_fastops.bias_act import bias_act
from jax_fastops.dropout import dropout
from jax_fastops.group_norm import group_norm
from jax_fastops.norm import layer_norm, rms_norm
from jax_fastops.relu import relu
from jax_fastops.segment_sum import segment_sum
from jax_fastops.softmax import log_softmax, softmax

# ---- what runs in place of each function ---------------------------------------------------------
# Each takes the original and the arguments of the call.


def _takes(*arrays: Any) -> bool:
    """Whether these are arrays for which the results of the ops have the same dtype."""
    return all(
        isinstance(x, jax.Array) and x.ndim and str(x.dtype) in FLOATING and not x.weak_type
        for x in arrays
    )


def _takes_traced(x: Any) -> bool:
    """The same for a function that XLA fuses with its neighbors in a traced program."""
    fused = _implementation.current() == "auto" and isinstance(x, jax.core.Tracer)
    return _takes(x) and not fused


def _element_wise(ours, original, x, *rest):
    return (kernel_or(ours, original) if _takes_traced(x) else original)(x, *rest)


def _activation(name: str):
    return lambda x, *_: bias_act(x, None, activation=name)


def _gelu(original, x, approximate=True):
    ours = _activation("gelu" if approximate else "gelu_exact")
    return _element_wise(ours, original, x, approximate)


def _softmax(original, x, axis=-1, where=None, **rest):
    return _softmax_of(softmax, original, _takes(x), x, axis=axis, where=where, **rest)


def _log_softmax(original, x, axis=-1, where=None, **rest):
    """A loss often picks one element of a row, and XLA then stores none."""
    return _softmax_of(log_softmax, original, _takes_traced(x), x, axis=axis, where=where, **rest)


def _softmax_of(ours, original, takes: bool, x, *, where, **rest):
    if rest.keys() != {"axis"} or getattr(where, "dtype", jnp.bool_) != jnp.bool_:
        takes = False
    return (kernel_or(ours, original) if takes else original)(x, where=where, **rest)


def _cross_entropy(original, logits, labels, axis=-1, where=None):
    """optax counts negative labels from the end, and gives NaN for labels that are no class."""
    if where is not None or isinstance(axis, tuple) or not _takes(logits):
        return original(logits, labels, axis=axis, where=where)

    def ours(logits, labels):
        return losses_by_label(logits, jnp.asarray(labels), axis)

    return kernel_or(ours, functools.partial(original, axis=axis))(logits, labels)


def _segment_sum(original, *args, **kwargs):
    """JAX adds options from version to version."""

    def ours(*, data, segment_ids, num_segments, indices_are_sorted, unique_indices, **rest):
        del unique_indices  # a promise
        if any(option is not None for option in rest.values()) or not _takes(data):
            raise Refused
        ids = jnp.asarray(segment_ids)
        return segment_sum(data, ids, num_segments, indices_are_sorted=indices_are_sorted)

    def given(*args, **kwargs):
        return ours(**inspect.signature(original).bind(*args, **kwargs).arguments)

    return _ours_or(given, original)(*args, **kwargs)


def _attention(original, *args, **kwargs):
    def ours(query, key, value, *masks, implementation, **options):
        if implementation is not None or not _takes(query, key, value):
            raise Refused
        return attention(query, key, value, *masks, **options)

    return _ours_or(ours, original)(*args, **kwargs)


def _flax_attention(original, *args, **kwargs):
    """Flax adds options from version to version."""

    def ours(*args, **kwargs):
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        in_place_of = importlib.import_module("jax_fastops.nnx")._attention_in_place_of
        y = None if given["precision"] is not None else in_place_of(**given)
        if y is None:
            raise Refused
        return y

    return _ours_or(ours, original)(*args, **kwargs)


def _ours_or(ours: Callable, original: Callable) -> Callable:
    """Ours where the op takes the arguments and its kernel, else the original.

    For attention, the softmax in the original is ours if that is active.
    """

    def taken(*args, **kwargs):
        try:
            with _patched.off():
                return ours(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise Refused from error

    return kernel_or(taken, original)


def _linen_parameters(layer, x, axis: int) -> list | None:
    """Scale and bias of a norm of Flax, if the result of the op has the dtype of Flax's.

    They are read without a claim on their names, so that the original can still make it.
    """
    if not _takes(x) or layer.is_initializing() or not is_epsilon(layer.epsilon):
        return None
    unbox = sys.modules["flax.core.meta"].unbox
    used = {leaf: getattr(layer, f"use_{leaf}", False) for leaf in ("scale", "bias")}
    found = [unbox(layer.get_variable("params", leaf)) if used[leaf] else None for leaf in used]
    given = [p for p, use in zip(found, used.values(), strict=True) if use]
    if any(getattr(p, "shape", None) != (x.shape[axis],) for p in given):
        return None
    return found if x.dtype == (layer.dtype or jnp.result_type(x, *given)) else None


def _one_axis(axes) -> int | None:
    axes = tuple(axes) if hasattr(axes, "__iter__") else (axes,)
    return axes[0] if len(axes) == 1 else None


def _linen_statistics(original, x, *args, **kwargs):
    """Notes whether the statistics are those of whole rows on one device, for `_linen_norm`.

    A batch norm is computed here, because its layer averages the statistics before it normalizes.
    """
    given = inspect.signature(original).bind(x, *args, **kwargs).arguments
    whole = given.get("mask") is None and given.get("axis_name") is None
    layer = sys.modules["flax.linen.module"]._context.module_stack[-1]
    ours = whole and _active(layer) == "batch_norm"
    with _patched.off():
        y, *statistics = (ours and _linen_batch_norm(layer, x)) or (None,)
        statistics = statistics or original(x, *args, **kwargs)
    _local.statistics = statistics[0], whole, y
    return tuple(statistics)


def _linen_batch_norm(layer, x) -> tuple | None:
    axis = _one_axis(layer.axis)
    parameters = None if axis is None else _linen_parameters(layer, x, axis)
    if parameters is None or not getattr(layer, "force_float32_reductions", True):
        return None
    ours = functools.partial(batch_norm, axis=axis, eps=layer.epsilon)
    return kernel_or(ours, lambda *_: None)(x, *parameters)


def _linen_norm(original, *args, **kwargs):
    """Flax has computed the statistics; XLA removes them if they are not used."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    layer, x, mean, var = (given[name] for name in ("mdl", "x", "mean", "var"))
    statistics, whole, y = _local.__dict__.pop("statistics", (None, False, None))
    if statistics is mean and y is not None:
        return y
    name, axis, last = _active(layer), _one_axis(given["feature_axes"]), (-1, x.ndim - 1)
    if name == "batch_norm":
        fits = axis is not None and statistics is not mean  # running averages
    else:
        rows = axis in last and _one_axis(given["reduction_axes"]) in last
        fits = name is not None and statistics is mean and whole and rows
    parameters = _linen_parameters(layer, x, axis) if fits else None
    with _patched.off():
        if parameters is None:
            return original(*args, **kwargs)
        if name == "batch_norm":
            ours = functools.partial(batch_norm_inference, x, mean, var, *parameters, axis=axis)
        else:
            op = {"layer_norm": layer_norm, "rms_norm": rms_norm}[name]
            ours = functools.partial(op, x, *parameters[: 1 if op is rms_norm else 2])
        return kernel_or(lambda: ours(eps=layer.epsilon), lambda: original(*args, **kwargs))()


def _linen_group_norm(original, layer, x, *, mask=None, **rest):
    own = functools.partial(original, layer, x, mask=mask, **rest)
    both = getattr(layer, "num_groups", None) and getattr(layer, "group_size", None)
    linen = sys.modules["flax.linen"]  # a subclass may be another function
    known = type(layer) in (linen.GroupNorm, linen.InstanceNorm)
    if mask is not None or rest or both or not known or not _takes(x) or x.ndim < 2:
        return own()
    groups = importlib.import_module("jax_fastops.nnx")._groups_of(layer, x.shape)
    whole = groups is not None and x.shape[groups["axis"]] % groups["num_groups"] == 0
    parameters = _linen_parameters(layer, x, groups["axis"]) if groups and whole else None
    if parameters is None or not getattr(layer, "force_float32_reductions", True):
        return own()
    ours = functools.partial(group_norm, x, *parameters, eps=layer.epsilon, **groups)
    return kernel_or(ours, own)()


def _active(layer) -> str | None:
    """The name of a norm of Flax that is ours now. A subclass may be another function."""
    linen = sys.modules["flax.linen"]
    kinds = {
        linen.LayerNorm: "layer_norm",
        linen.RMSNorm: "rms_norm",
        linen.BatchNorm: "batch_norm",
    }
    name = kinds.get(type(layer))
    return name if name in _patched.names.value else None


def _linen_dropout(original, layer, inputs, deterministic=None, rng=None, **rest):
    linen = sys.modules["flax.linen"]
    off = linen.merge_param("deterministic", layer.deterministic, deterministic)
    if off or layer.broadcast_dims or rest or not 0 < layer.rate < 1 or not _takes(inputs):
        return original(layer, inputs, deterministic, rng, **rest)
    rng = layer.make_rng(getattr(layer, "rng_collection", "dropout")) if rng is None else rng
    return dropout(inputs, rng, layer.rate)


def _nnx(name: str):
    def call(original, layer, *args, **kwargs):
        ours = importlib.import_module("jax_fastops.nnx")
        if isinstance(layer, getattr(ours, name)):
            return original(layer, *args, **kwargs)
        flax_call = functools.partial(original, layer)
        return ours.in_place_of(name, layer, flax_call, *args, **kwargs)

    return call


# All norms of Flax linen go through these functions.
_LINEN_NORMS = [
    ("flax.linen.normalization", "_compute_stats", _linen_statistics),
    ("flax.linen.normalization", "_normalize", _linen_norm),
]
# By name: the module, the place in it, and what runs. A module is patched once it is imported.
_PLACES: dict[str, list[tuple[str, str, Callable]]] = {
    "relu": [("jax.nn", "relu", functools.partial(_element_wise, relu))],
    "gelu": [("jax.nn", "gelu", _gelu)],
    "silu": [("jax.nn", "silu", functools.partial(_element_wise, _activation("silu")))],
    "softmax": [("jax.nn", "softmax", _softmax)],
    "log_softmax": [("jax.nn", "log_softmax", _log_softmax)],
    "attention": [
        ("jax.nn", "dot_product_attention", _attention),
        ("flax.linen", "dot_product_attention", _flax_attention),
        ("flax.nnx", "dot_product_attention", _flax_attention),
    ],
    "segment_sum": [("jax.ops", "segment_sum", _segment_sum)],
    "cross_entropy": [("optax", "softmax_cross_entropy_with_integer_labels", _cross_entropy)],
    "layer_norm": [*_LINEN_NORMS, ("flax.nnx", "LayerNorm.__call__", _nnx("LayerNorm"))],
    "rms_norm": [*_LINEN_NORMS, ("flax.nnx", "RMSNorm.__call__", _nnx("RMSNorm"))],
    "batch_norm": [*_LINEN_NORMS, ("flax.nnx", "BatchNorm.__call__", _nnx("BatchNorm"))],
    "group_norm": [
        ("flax.linen", "GroupNorm.__call__", _linen_group_norm),
        ("flax.linen", "InstanceNorm.__call__", _linen_group_norm),
        ("flax.nnx", "GroupNorm.__call__", _nnx("GroupNorm")),
        ("flax.nnx", "InstanceNorm.__call__", _nnx("InstanceNorm")),
    ],
    "dropout": [
        ("flax.linen", "Dropout.__call__", _linen_dropout),
        ("flax.nnx", "Dropout.__call__", _nnx("Dropout")),
    ],
}
# These ask which names are active, or run an original in which they stay active.
_ASK = (_linen_statistics, _linen_norm, _attention, _flax_attention)
_local = threading.local()
source_info_util.register_exclusion(__file__)  # calls stay replaced after the block

# ---- how calls get there -------------------------------------------------------------------------

_installing = threading.Lock()
_calls: dict[str, tuple[Callable, frozenset[str], Callable]] = {}


def _run(place: str, *args: Any, **kwargs: Any) -> Any:
    """A call of a replaced function."""
    original, names, ours = _calls[place]
    active = _patched.names.value
    if names.isdisjoint(active):
        return original(*args, **kwargs)
    if ours in _ASK:
        return ours(original, *args, **kwargs)
    with _patched.off():
        return ours(original, *args, **kwargs)


def _install(place: str, module: str, path: str, names: frozenset[str], ours: Callable) -> None:
    owner: Any = sys.modules[module]
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    found = getattr(owner, last)
    if outer:  # a method

        @functools.wraps(found)
        def method(*args, **kwargs):
            return _run(place, *args, **kwargs)

        _calls[place] = found, names, ours
        setattr(owner, last, method)
    elif isinstance(found, jax.custom_jvp):
        kind = type(found)
        _calls[place] = functools.partial(kind.__call__, found), names, ours

        class Replaced(kind):
            def __call__(self, *args, **kwargs):
                return _run(place, *args, **kwargs)

        found.__class__ = Replaced
    else:
        function = inspect.unwrap(found)
        _calls[place] = _copy(function), names, ours
        function.__code__ = _code_that_runs(place, function)


def _copy(f: types.FunctionType) -> Callable:
    copied = types.FunctionType(
        f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__
    )
    copied.__kwdefaults__ = f.__kwdefaults__
    return copied


def _code_that_runs(place: str, f: types.FunctionType) -> types.CodeType:
    """Code with the parameters of a function, which keeps its defaults."""
    code = f.__code__
    positional = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    listed = [*positional, *(["*", *keywords] if keywords else [])]
    given = [repr(place), *positional, *(f"{name}={name}" for name in keywords)]
    text = (
        f"def {f.__name__}({', '.join(listed)}):\n"
        "  from jax_fastops._patch import _run\n"
        f"  return _run({', '.join(given)})\n"
    )
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    line = {"co_filename": code.co_filename, "co_firstlineno": code.co_firstlineno}
    return namespace[f.__name__].__code__.replace(**line)


def _install_all() -> None:
    places: dict[tuple[str, str], tuple[Callable, set[str]]] = {}
    for name, found in _PLACES.items():
        for module, path, ours in found:
            places.setdefault((module, path), (ours, set()))[1].add(name)
    with _installing:
        for (module, path), (ours, names) in places.items():
            place = f"{module}.{path}"
            if place not in _calls and _is_imported(module):
                _install(place, module, path, frozenset(names), ours)


def _is_imported(module: str) -> bool:
    """Whether a module is loaded. A package may be in the middle of its import."""
    found = sys.modules.get(module)
    return found is not None and not getattr(found.__spec__, "_initializing", False)


class patch(contextlib.ContextDecorator):
    """Makes functions of ``jax.nn``, Flax and optax ours: a ``with`` block, or a decorator.

    Inside, a call takes our op where that takes the kernel (see :func:`kernel_or`), with the same
    arguments, dtype and result but for rounding. All other calls run the original. This is so
    however the function was imported, only in this thread, and also in functions under ``jax.jit``:
    what was traced outside is traced again. Blocks may be nested; the innermost one counts.

    =================== =======================================================================
    name                what becomes ours
    =================== =======================================================================
    ``"relu"``          ``jax.nn.relu``
    ``"gelu"``          ``jax.nn.gelu``
    ``"silu"``          ``jax.nn.silu``, and so ``swish``
    ``"softmax"``       ``jax.nn.softmax``
    ``"log_softmax"``   ``jax.nn.log_softmax``
    ``"attention"``     ``dot_product_attention`` of ``jax.nn``, ``flax.nnx`` and ``flax.linen``;
                        dropout has other masks than Flax's, and a query without keys gives 0
    ``"segment_sum"``   ``jax.ops.segment_sum``, with the same bits in every run
    ``"cross_entropy"`` ``optax.softmax_cross_entropy_with_integer_labels``
    ``"layer_norm"``    ``LayerNorm`` of ``flax.nnx`` and ``flax.linen``
    ``"rms_norm"``      ``RMSNorm`` of ``flax.nnx`` and ``flax.linen``
    ``"batch_norm"``    ``BatchNorm`` of ``flax.nnx`` and ``flax.linen``
    ``"group_norm"``    ``GroupNorm`` and ``InstanceNorm`` of ``flax.nnx`` and ``flax.linen``
    ``"dropout"``       ``Dropout`` of ``flax.nnx`` and ``flax.linen``, with the masks of
                        :func:`dropout_mask`, which are not Flax's
    =================== =======================================================================

    In a traced program, XLA fuses ``relu``, ``gelu``, ``silu`` and ``log_softmax`` with their
    neighbors. With the implementation ``"auto"`` they stay as they are there; :class:`autofuse`
    sees the neighbors. Layers keep their parameters, statistics and streams of keys.

    Args:
      only: the names to replace. Default: all.
      without: names that do not.

    Raises:
      ValueError: a name is not known.

    Example:
      >>> from jax.nn import softmax
      >>> with fo.patch(), fo.use_implementation("native"):
      ...     print("softmax" in str(jax.make_jaxpr(softmax)(jnp.ones(8))))
      True
    """

    def __init__(self, *, only: Iterable[str] | None = None, without: Iterable[str] = ()):
        chosen = set(_PLACES) if only is None else _known("only", only)
        self._names = frozenset(chosen - _known("without", without))
        self._blocks = threading.local()

    def __enter__(self) -> patch:
        _install_all()
        block = _patched.names(self._names)
        block.__enter__()
        self._blocks.__dict__.setdefault("entered", []).append(block)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blocks.entered.pop().__exit__(*exc_info)


def _known(argument: str, names: Iterable[str]) -> set[str]:
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in _PLACES:
            known = ", ".join(map(repr, _PLACES))
            raise ValueError(f"patch: {argument} has {name!r}; it may have {known}")
    return set(names)
