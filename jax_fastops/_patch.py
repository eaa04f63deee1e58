"""``patch``: functions of ``jax.nn``, Flax and optax are ours in a block.

A function may have been imported by name long before, so it is not enough to replace the attribute
of its module. What is replaced is what a call of the function runs: the code of a Python function
(also of one under ``jax.jit``, which is traced again), the class of a function with a derivative
rule (``jax.custom_jvp``), and the method of a class. The replacement asks for the context of its
thread, and runs the original outside of ``patch``. It is installed once and stays.
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

from jax_fastops import _implementation, _patched
from jax_fastops._autofuse.patterns import losses_by_label
from jax_fastops._dispatch import kernel_or
from jax_fastops.bias_act import bias_act
from jax_fastops.dropout import dropout
from jax_fastops.norm import layer_norm, rms_norm
from jax_fastops.relu import relu
from jax_fastops.softmax import log_softmax, softmax

_DTYPES = {"float32", "bfloat16", "float16", "float64"}

# ---- what runs in place of each function ---------------------------------------------------------
# Each takes the original and the arguments of the call.


def _takes(*arrays: Any) -> bool:
    """Whether these are arrays for which the results of the ops have the same dtype."""
    return all(
        isinstance(x, jax.Array) and x.ndim and str(x.dtype) in _DTYPES and not x.weak_type
        for x in arrays
    )


def _takes_alone(x: Any) -> bool:
    """The same for an activation. In a traced program, XLA fuses it with its neighbors."""
    fused = _implementation.current() == "auto" and isinstance(x, jax.core.Tracer)
    return _takes(x) and not fused


def _relu(original, x):
    return kernel_or(relu, original)(x) if _takes_alone(x) else original(x)


def _gelu(original, x, approximate=True):
    return _activation("gelu" if approximate else "gelu_exact", original, x, approximate)


def _silu(original, x):
    return _activation("silu", original, x)


def _activation(name, original, x, *rest):
    def ours(x, *_):
        return bias_act(x, None, activation=name)

    return kernel_or(ours, original)(x, *rest) if _takes_alone(x) else original(x, *rest)


def _softmax_of(function, original, x, axis=-1, where=None, **rest):
    if rest or not _takes(x) or getattr(where, "dtype", jnp.bool_) != jnp.bool_:
        return original(x, axis=axis, where=where, **rest)
    return kernel_or(function, original)(x, axis=axis, where=where)


def _cross_entropy(original, logits, labels, axis=-1, where=None):
    """optax counts negative labels from the end, and gives NaN for labels that are no class."""
    if where is not None or isinstance(axis, tuple) or not _takes(logits):
        return original(logits, labels, axis=axis, where=where)

    def ours(logits, labels):
        return losses_by_label(logits, jnp.asarray(labels), axis)

    return kernel_or(ours, functools.partial(original, axis=axis))(logits, labels)


def _linen_statistics(original, x, *args, **kwargs):
    """Notes whether the statistics are those of whole rows on one device, for `_linen_norm`."""
    call = inspect.signature(original).bind(x, *args, **kwargs)
    found = original(x, *args, **kwargs)
    given = call.arguments
    _local.statistics = found[0], given.get("mask") is None and given.get("axis_name") is None
    return found


def _linen_norm(original, *args, **kwargs):
    """Flax has computed the statistics; XLA removes them if they are not used."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    layer, x, mean = given["mdl"], given["x"], given["mean"]
    linen = sys.modules["flax.linen"]
    name = {linen.LayerNorm: "layer_norm", linen.RMSNorm: "rms_norm"}.get(type(layer))
    known, whole = getattr(_local, "statistics", (None, False))
    last = {-1, x.ndim - 1}
    axes = [given[a] if hasattr(given[a], "__iter__") else (given[a],) for a in _AXES]
    if name not in _patched.names.value or known is not mean or not whole or not _takes(x):
        return original(*args, **kwargs)
    if any(len(a) != 1 or a[0] not in last for a in axes) or layer.is_initializing():
        return original(*args, **kwargs)
    stored = [
        layer.param(leaf, given[f"{leaf}_init"], (x.shape[-1],), given["param_dtype"])
        if given[f"use_{leaf}"]
        else None
        for leaf in ("scale", "bias")
    ]
    dtype = given["dtype"] or jnp.result_type(x, *(p for p in stored if p is not None))
    if dtype != x.dtype or any(p is not None and p.shape != x.shape[-1:] for p in stored):
        return original(*args, **kwargs)
    parameters = stored[: 1 if name == "rms_norm" else 2]
    if name == "rms_norm" and stored[1] is not None:
        return original(*args, **kwargs)
    op = {"layer_norm": layer_norm, "rms_norm": rms_norm}[name]
    ours = functools.partial(op, x, *parameters, eps=given["epsilon"])
    with _patched.off():
        return kernel_or(ours, lambda: original(*args, **kwargs))()


_AXES = ("reduction_axes", "feature_axes")


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


# By name: the module, the place in it, and what runs. A module is patched once it is imported.
_PLACES: dict[str, list[tuple[str, str, Callable]]] = {
    "relu": [("jax.nn", "relu", _relu)],
    "gelu": [("jax.nn", "gelu", _gelu)],
    "silu": [("jax.nn", "silu", _silu)],
    "softmax": [("jax.nn", "softmax", functools.partial(_softmax_of, softmax))],
    "log_softmax": [("jax.nn", "log_softmax", functools.partial(_softmax_of, log_softmax))],
    "cross_entropy": [("optax", "softmax_cross_entropy_with_integer_labels", _cross_entropy)],
    "layer_norm": [
        ("flax.linen.normalization", "_compute_stats", _linen_statistics),
        ("flax.linen.normalization", "_normalize", _linen_norm),
        ("flax.nnx", "LayerNorm.__call__", _nnx("LayerNorm")),
    ],
    "rms_norm": [
        ("flax.linen.normalization", "_compute_stats", _linen_statistics),
        ("flax.linen.normalization", "_normalize", _linen_norm),
        ("flax.nnx", "RMSNorm.__call__", _nnx("RMSNorm")),
    ],
    "batch_norm": [("flax.nnx", "BatchNorm.__call__", _nnx("BatchNorm"))],
    "dropout": [
        ("flax.linen", "Dropout.__call__", _linen_dropout),
        ("flax.nnx", "Dropout.__call__", _nnx("Dropout")),
    ],
}
_local = threading.local()

# ---- how calls get there -------------------------------------------------------------------------

_installing = threading.Lock()
_calls: dict[str, tuple[Callable, frozenset[str], Callable]] = {}


def _run(place: str, *args: Any, **kwargs: Any) -> Any:
    """A call of a replaced function."""
    original, names, ours = _calls[place]
    active = _patched.names.value
    if names.isdisjoint(active):
        return original(*args, **kwargs)
    if ours is _linen_norm:  # it asks which of two names is active
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
    made: dict[str, Any] = {}
    exec(text, made)
    return made[f.__name__].__code__.replace(co_filename=code.co_filename)


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
    ``"cross_entropy"`` ``optax.softmax_cross_entropy_with_integer_labels``
    ``"layer_norm"``    ``LayerNorm`` of ``flax.nnx`` and ``flax.linen``
    ``"rms_norm"``      ``RMSNorm`` of ``flax.nnx`` and ``flax.linen``
    ``"batch_norm"``    ``BatchNorm`` of ``flax.nnx``
    ``"dropout"``       ``Dropout`` of ``flax.nnx`` and ``flax.linen``, with the masks of
                        :func:`dropout_mask`, which are not Flax's
    =================== =======================================================================

    In a traced program, XLA fuses ``relu``, ``gelu`` and ``silu`` with their neighbors, which one
    call does not see. With the implementation ``"auto"`` they stay as they are there;
    :class:`autofuse` sees the neighbors. Layers keep their parameters, statistics and streams of
    keys.

    Args:
      only: the names that become ours. Default: all.
      without: names that do not.

    Raises:
      ValueError: a name is not known.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.nn import softmax
      >>> import jax_fastops as fo
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
