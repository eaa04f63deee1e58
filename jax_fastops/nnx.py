"""Layers for Flax NNX on the kernels: norms and ``Dropout``.

``dot_product_attention`` is for Flax's layer of attention. ``convert`` exchanges the layers of a
built model.

The classes are subclasses of Flax's. They have the constructor arguments, variables, metadata,
checkpoints and ``train()``/``eval()`` of the installed version of Flax. They add ``activation=`` to
the constructor, and ``residual=`` and (row norms) ``return_sum=`` to the call. A call runs one of
two programs:

* the ops of this package, if they support the call, and ``"auto"`` finds their kernels faster (at
  least in a gradient) or ``"native"`` is in force;
* otherwise, and always under ``"xla"``, Flax's own code, with bitwise equal results. The residual
  is then added, and the activation applied, in ``jax.numpy``.

The ops take float32, bfloat16, float16 and float64, and no calls in which promotion widens the
input: bfloat16 with ``dtype=None`` and float32 parameters gives float32, as in Flax. Set
``dtype=jnp.bfloat16`` to compute on bfloat16 arrays.

``Dropout`` always has the masks of :func:`jax_fastops.dropout_mask`, which are not Flax's.

The ops differ from Flax's code only by rounding. They compute the variance from the deviations from
the mean, whatever ``use_fast_variance`` says, in float32 (float64 for float64), and round once. The
ops cast what Flax casts before it computes: with ``dtype=jnp.bfloat16``, the parameters, and the
running statistics at inference.

Needs Flax: ``pip install 'flax>=0.12'``.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fastops import (
    attention,
    batch_norm,
    batch_norm_inference,
    bias_act,
    dropout,
    group_norm,
    kernel_or,
    layer_norm,
    relu,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)

try:
    from flax import nnx as _flax
    from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
except ImportError as _error:
    raise ImportError(
        "jax_fastops.nnx needs Flax, which cannot be imported "
        f"({_error}); install it with: pip install 'flax>=0.12'"
    ) from _error

from jax_fastops._nnx_convert import exchange  # needs Flax

__all__ = [
    "BatchNorm",
    "Dropout",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "convert",
    "dot_product_attention",
]

_Model = TypeVar("_Model", bound=_flax.Module)
_DTYPES = {"float32", "bfloat16", "float16", "float64"}  # of the ops


# ---- when the kernels take a call ----------------------------------------------------------------


def _is_epsilon(value) -> bool:
    """Whether the ops take this epsilon. Flax also takes an array, NaN and negative numbers."""
    number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    return number and 0 <= float(value) < float("inf")


class _Operands(NamedTuple):
    """The operands of an op."""

    x: jax.Array
    statistics: list[jax.Array]  # the running statistics
    parameters: list[jax.Array | None]
    dtype: np.dtype  # of the layer's result
    statistics_dtype: np.dtype  # of the statistics that the layer computes


def _operands(layer, x, statistics, parameters) -> _Operands | None:
    """Input, statistics and parameters as Flax promotes them; ``None`` if the ops cannot take them.

    Flax computes in the widest dtype of its operands, and rounds to that of the result at the end.
    The returned ``x`` has that widest dtype.
    """
    given = jnp.result_type(x)
    if hasattr(layer, "promote_dtype"):  # Flax 0.12.0 promotes nothing
        promoted = layer.promote_dtype((x, *statistics, *parameters), dtype=layer.dtype)
        x, values = promoted[0], promoted[1:]
        statistics, parameters = values[: len(statistics)], values[len(statistics) :]
    dtype = jnp.dtype(canonicalize_dtype(x, *parameters, dtype=layer.dtype))
    own = jnp.result_type(x)
    wide = jnp.promote_types(own, dtype)
    if not {str(d) for d in (given, own, dtype, wide)} <= _DTYPES:
        return None
    if wide.itemsize > given.itemsize:
        # XLA widens as it reads. A kernel would need the wider array in memory.
        return None
    least = jnp.promote_types(own if layer.dtype is None else layer.dtype, jnp.float32)
    return _Operands(_as(x, wide), list(statistics), list(parameters), dtype, least)


def _as(x, dtype) -> jax.Array:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return x if x.dtype == dtype else x.astype(dtype)


def _axes(axes, rank: int) -> tuple[int, ...]:
    """Flax's axes, counted from 0."""
    axes = axes if hasattr(axes, "__iter__") else (axes,)
    return tuple({axis + rank if axis < 0 else axis for axis in axes})


def _variable(variable):
    return None if variable is None else variable[...]


# ---- what Flax does not have ---------------------------------------------------------------------


def _checked(layer: str, activation):
    if activation not in (None, "relu"):
        raise ValueError(
            f"{layer}: activation is {activation!r}; it must be None or 'relu' (apply others to "
            "the result)"
        )
    return activation


def _finish(y, residual, activation):
    """Adds the residual and applies the activation, in ``jax.numpy``."""
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if activation == "relu" else y


def _signature_of(theirs):
    """Gives a constructor the signature of Flax's constructor plus ``activation``."""

    def decorate(init):
        known = inspect.signature(theirs)
        own = inspect.Parameter("activation", inspect.Parameter.KEYWORD_ONLY, default=None)
        init.__signature__ = known.replace(parameters=[*known.parameters.values(), own])
        return init

    return decorate


# ---- layers --------------------------------------------------------------------------------------


class BatchNorm(_flax.BatchNorm):
    """``flax.nnx.BatchNorm`` on :func:`jax_fastops.batch_norm`, fused with a residual and ReLU.

    ``activation((x - mean) * rsqrt(var + epsilon) * scale + bias + residual)``.

    Args:
      num_features: the size of the feature axis.
      activation: ``None`` or ``"relu"``, applied last.
      **kwargs: all other arguments of ``flax.nnx.BatchNorm``, with its defaults.

    Variables: ``scale``, ``bias`` (``nnx.Param``), ``mean``, ``var`` (``nnx.BatchStat``), each
    ``[num_features]``, as in Flax's layer.

    Calls with several feature axes, a ``mask`` or ``axis_index_groups`` run Flax's code.

    Residuals: those of :func:`jax_fastops.batch_norm` in training, and of
    :func:`jax_fastops.batch_norm_inference` at inference.

    Raises:
      TypeError: as Flax's constructor.
      ValueError: ``activation`` is not known.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> norm = fo_nnx.BatchNorm(8, activation="relu", rngs=nnx.Rngs(0))
      >>> y = norm(jnp.ones((4, 8)), use_running_average=False, residual=jnp.ones((4, 8)))
      >>> y.shape, float(y.sum())
      ((4, 8), 32.0)
    """

    @_signature_of(_flax.BatchNorm.__init__)
    def __init__(
        self, num_features: int, *, activation: Literal["relu"] | None = None, **kwargs: Any
    ):
        super().__init__(num_features, **kwargs)
        self.activation = _checked("BatchNorm", activation)

    def __call__(
        self,
        x: ArrayLike,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: ArrayLike | None = None,
    ) -> jax.Array:
        """Normalizes ``x``, and in training updates the running statistics.

        Args:
          x: array with the features at ``axis``.
          use_running_average: whether to normalize with the running statistics, as at inference,
            instead of those of ``x``. ``None``: the setting of the layer.
          mask: boolean array that broadcasts to ``x``: the elements that count for the statistics.
          residual: array that is added before the activation, or ``None``. The kernel adds it if it
            has the shape of ``x`` and its dtype does not widen the result.

        Returns:
          An array with the shape of ``x`` and the dtype of Flax's layer. A residual with a wider
          dtype widens the result, as ``+`` does.

        Raises:
          ValueError: neither the call nor the layer says whether to use the running statistics; or
            as Flax's layer.
        """
        call = super().__call__
        return _batch_norm(self, call, x, use_running_average, mask=mask, residual=residual)


def _batch_norm(layer, flax_call, x, use_running_average=None, *, mask=None, residual=None):
    average = use_running_average
    average = layer.use_running_average if average is None else average
    activation = getattr(layer, "activation", None)
    given = None if average is None or mask is not None else _batch_operands(layer, x, average)

    def flax():
        y = flax_call(x, use_running_average, mask=mask)
        return _finish(y, residual, activation)

    if given is None:
        return flax()
    return kernel_or(lambda: _fused_batch_norm(layer, given, average, residual, activation), flax)()


def _fused_batch_norm(layer, given: _Operands, average, residual, activation):
    """The call by the ops."""
    x, (mean, var), parameters, dtype, statistics_dtype = given
    options: dict[str, Any] = dict(axis=_axes(layer.axis, x.ndim)[0], eps=layer.epsilon)
    fused = residual is None or (
        np.shape(residual) == x.shape
        and x.dtype == dtype == jnp.promote_types(dtype, jnp.result_type(residual))
    )
    if fused:
        options["activation"] = activation
        options["residual"] = None if residual is None else _as(residual, dtype)
    if average:
        y = batch_norm_inference(x, mean, var, *parameters, **options)
    else:
        y, mean, var = batch_norm(x, *parameters, **options, axis_name=layer.axis_name)
        _update(layer, layer.mean, mean.astype(statistics_dtype))
        _update(layer, layer.var, var.astype(statistics_dtype))
    y = _as(y, dtype)
    return y if fused else _finish(y, residual, activation)


def _batch_operands(layer, x, average) -> _Operands | None:
    """The operands for the op, or ``None`` if Flax's code runs."""
    axes = _axes(layer.axis, x.ndim)
    across = not average and layer.axis_name is not None
    if len(axes) != 1 or not _is_epsilon(layer.epsilon):
        return None
    if not 0 <= axes[0] < x.ndim or (across and layer.axis_index_groups is not None):
        return None
    statistics = [layer.mean[...], layer.var[...]]
    parameters = [_variable(layer.scale), _variable(layer.bias)]
    shape = (x.shape[axes[0]],)
    if any(v is not None and v.shape != shape for v in (*statistics, *parameters)):
        return None
    return _operands(layer, x, statistics, parameters)


def _update(layer, variable, value) -> None:
    """Updates a running statistic, which carries no gradient."""
    moved = layer.momentum * variable[...] + (1 - layer.momentum) * value
    variable[...] = jax.lax.stop_gradient(moved)


class Dropout(_flax.Dropout):
    """``flax.nnx.Dropout`` on :func:`jax_fastops.dropout`, which keeps no mask for the backward.

    It has the constructor, the streams of keys and ``train()``/``eval()`` of Flax's layer, and the
    masks of :func:`jax_fastops.dropout_mask`. With ``broadcast_dims``, and for other dtypes than
    float32, bfloat16, float16 and float64, it is Flax's code, with Flax's masks.

    :class:`LayerNorm` and :class:`RMSNorm` take the layer as ``dropout=``.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> dropout = fo_nnx.Dropout(0.5, rngs=nnx.Rngs(0))
      >>> sorted(set(dropout(jnp.ones(100)).tolist()))
      [0.0, 2.0]
      >>> dropout(jnp.ones(4), deterministic=True).tolist()
      [1.0, 1.0, 1.0, 1.0]
    """

    def __call__(
        self,
        inputs: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: Any = None,
    ) -> jax.Array:
        """Drops elements of ``inputs``; see ``flax.nnx.Dropout`` for the arguments."""
        return _dropout(self, super().__call__, inputs, deterministic=deterministic, rngs=rngs)


def _dropout(layer, flax_call, inputs, *, deterministic=None, rngs=None):
    key = _next_key(layer, inputs, deterministic, rngs)
    if key is None:
        return flax_call(inputs, deterministic=deterministic, rngs=rngs)
    return dropout(inputs, key, layer.rate)


def _next_key(layer, x, deterministic: bool | None = None, rngs: Any = None):
    """The next key, or ``None`` if Flax's code runs, which then draws it or raises."""
    deterministic = layer.deterministic if deterministic is None else deterministic
    rngs = layer.rngs if rngs is None else rngs
    known = isinstance(rngs, (_flax.Rngs, _flax.RngStream, jax.Array))
    if deterministic or deterministic is None or layer.broadcast_dims or not known:
        return None
    if not 0 < layer.rate < 1 or str(jnp.result_type(x)) not in _DTYPES:
        return None
    rngs = rngs[layer.rng_collection] if isinstance(rngs, _flax.Rngs) else rngs
    return rngs if isinstance(rngs, jax.Array) else rngs()


def _row_norm(layer, flax_call, x, mask, residual, return_sum: bool, drop):
    """Calls a layer over the last axis."""
    x = x if hasattr(x, "shape") else jnp.asarray(x)  # Flax takes a list
    activation = getattr(layer, "activation", None)
    key, rate = None, 0.0
    if drop is not None and residual is not None:
        key, rate = _next_key(drop, x), drop.rate
    if drop is not None and key is None:
        x = drop(x)
    summand = given = None
    if residual is not None and mask is None and np.shape(residual) == np.shape(x):
        # The kernel adds only in the dtype that is normalized. Flax rounds or widens others.
        dtype = jnp.result_type(x, residual)
        given = _row_operands(layer, _as(x, dtype))
        if given is not None and dtype == given.x.dtype == given.dtype:
            summand = _as(residual, dtype)
    if summand is None:
        x = x if key is None else dropout(x, key, rate)
        x, residual, key = (x if residual is None else x + residual), None, None
        given = _row_operands(layer, x) if mask is None else None
    y: Any = None
    if given is not None:
        norms = layer_norm, residual_layer_norm
        if isinstance(layer, _flax.RMSNorm):
            norms = rms_norm, residual_rms_norm
        function: Any = norms[summand is not None]
        arrays = [a for a in (given.x, summand) if a is not None] + given.parameters
        with_sum = return_sum and summand is not None
        options: dict[str, Any] = {"return_sum": True} if with_sum else {}
        if key is not None:
            options.update(dropout_key=key, dropout_rate=rate)
        fused = kernel_or(function, lambda *_, **__: None)
        found = fused(*arrays, eps=float(layer.epsilon), **options)
        if found is not None:
            y, x = found if with_sum else (found, x)
            y = _as(y, given.dtype)
            y = relu(y) if activation == "relu" else y
    if y is None:
        x = x if key is None else dropout(x, key, rate)
        x = x if residual is None else x + residual
        y = _finish(flax_call(x, mask=mask), None, activation)
    return (y, x) if return_sum else y


def _row_operands(layer, x) -> _Operands | None:
    """The operands for the op, or ``None`` if Flax's code runs."""
    rank = np.ndim(x)
    if rank == 0 or layer.axis_name is not None or not _is_epsilon(layer.epsilon):
        return None
    if not all(_axes(a, rank) == (rank - 1,) for a in (layer.reduction_axes, layer.feature_axes)):
        return None
    parameters = [_variable(layer.scale)]
    if hasattr(layer, "bias"):
        parameters.append(_variable(layer.bias))
    if any(p is not None and p.shape != x.shape[-1:] for p in parameters):
        return None
    return _operands(layer, x, [], parameters)


class _RowNorm(_flax.Module):  # of one layout in memory with Flax's layers, for `convert`
    """A call of a norm over the last axis."""

    @overload
    def __call__(
        self,
        x: ArrayLike,
        mask: ArrayLike | None = ...,
        *,
        residual: ArrayLike | None = ...,
        dropout: Dropout | None = ...,
        return_sum: Literal[True],
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self,
        x: ArrayLike,
        mask: ArrayLike | None = ...,
        *,
        residual: ArrayLike | None = ...,
        dropout: Dropout | None = ...,
        return_sum: Literal[False] = ...,
    ) -> jax.Array: ...
    def __call__(
        self,
        x: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        residual: ArrayLike | None = None,
        dropout: Dropout | None = None,
        return_sum: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Normalizes ``x``, or ``x + residual``.

        Args:
          x: array with the features in its last axis, or in the axes given to the constructor.
          mask: boolean array that broadcasts to ``x``: the elements that count for the statistics.
          residual: array that is added to ``x`` before the norm, or ``None``. The kernel adds it if
            it has the shape of ``x`` and the sum has the dtype of the result, such as a float32
            residual of a bfloat16 ``x`` with ``dtype=None``.
          dropout: a layer that is applied to ``x`` before the residual is added, or ``None``. It
            takes the next key of its own stream.
          return_sum: whether to return the normalized sum ``x + residual``, or ``x``, as well.

        Returns:
          An array with the shape of the sum and the dtype of Flax's layer. With ``return_sum``, a
          pair of that and the sum, which has the dtype of ``x + residual``.

        Raises:
          TypeError: the shapes of ``x``, ``residual`` and ``num_features`` are not compatible.
        """
        call = super().__call__  # type: ignore[misc]
        return _row_norm(self, call, x, mask, residual, return_sum, dropout)


class LayerNorm(_RowNorm, _flax.LayerNorm):
    """``flax.nnx.LayerNorm`` on :func:`jax_fastops.layer_norm`, fused with a residual.

    ``activation((s - mean) * rsqrt(var + epsilon) * scale + bias)`` where ``s = x + residual``. The
    residual is added before the norm. (:class:`BatchNorm` adds it after the norm.)

    Args:
      num_features: the size of the feature axis.
      activation: ``None`` or ``"relu"``, applied last.
      **kwargs: all other arguments of ``flax.nnx.LayerNorm``, with its defaults.

    Variables: ``scale`` and ``bias`` (``nnx.Param``), each ``[num_features]``, as in Flax's layer.

    Calls that reduce over other axes than the last one, or have other feature axes, a ``mask`` or
    an ``axis_name``, run Flax's code.

    Residuals: those of :func:`jax_fastops.layer_norm` or :func:`jax_fastops.residual_layer_norm`,
    and one bit per element for the ReLU.

    Raises:
      TypeError: as Flax's constructor.
      ValueError: ``activation`` is not known.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> norm = fo_nnx.LayerNorm(8, rngs=nnx.Rngs(0))
      >>> y, total = norm(jnp.ones((4, 8)), residual=jnp.ones((4, 8)), return_sum=True)
      >>> y.shape, float(total[0, 0])
      ((4, 8), 2.0)
    """

    @_signature_of(_flax.LayerNorm.__init__)
    def __init__(
        self, num_features: int, *, activation: Literal["relu"] | None = None, **kwargs: Any
    ):
        super().__init__(num_features, **kwargs)
        self.activation = _checked("LayerNorm", activation)


class RMSNorm(_RowNorm, _flax.RMSNorm):
    """``flax.nnx.RMSNorm`` on :func:`jax_fastops.rms_norm`, fused with a residual.

    ``activation(s * rsqrt(mean(s**2) + epsilon) * scale)`` where ``s = x + residual``.

    Args:
      num_features: the size of the feature axis.
      activation: ``None`` or ``"relu"``, applied last.
      **kwargs: all other arguments of ``flax.nnx.RMSNorm``, with its defaults.

    Variables: ``scale`` (``nnx.Param``), ``[num_features]``, as in Flax's layer.

    The ops take the same calls as for :class:`LayerNorm`, and the errors are the same.

    Residuals: those of :func:`jax_fastops.rms_norm` or :func:`jax_fastops.residual_rms_norm`, and
    one bit per element for the ReLU.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> fo_nnx.RMSNorm(8, rngs=nnx.Rngs(0))(jnp.ones((4, 8))).shape
      (4, 8)
    """

    @_signature_of(_flax.RMSNorm.__init__)
    def __init__(
        self, num_features: int, *, activation: Literal["relu"] | None = None, **kwargs: Any
    ):
        super().__init__(num_features, **kwargs)
        self.activation = _checked("RMSNorm", activation)


def _group_norm(layer, flax_call, x, mask=None, residual=None):
    """Calls a ``GroupNorm`` or an ``InstanceNorm``."""
    x = x if hasattr(x, "shape") else jnp.asarray(x)
    activation = getattr(layer, "activation", None)
    summand = given = None
    if residual is not None and mask is None and np.shape(residual) == np.shape(x):
        # As for row norms, the kernel adds only in the dtype that is normalized.
        dtype = jnp.result_type(x, residual)
        given = _group_operands(layer, _as(x, dtype))
        if given is not None and dtype == given[0].x.dtype == given[0].dtype:
            summand = _as(residual, dtype)
    if summand is None:
        x = x if residual is None else x + residual
        given = _group_operands(layer, x) if mask is None else None

    def flax():
        total = x if summand is None else x + summand
        y = flax_call(total, mask=mask)
        return y if activation is None else bias_act(y, None, activation=activation)

    if given is None:
        return flax()
    operands, groups = given
    options = dict(groups, eps=float(layer.epsilon), activation=activation, residual=summand)

    def fused():
        y = group_norm(operands.x, *operands.parameters, **options)
        return _as(y, operands.dtype)

    return kernel_or(fused, flax)()


def _group_operands(layer, x) -> tuple[_Operands, dict[str, int]] | None:
    """The operands and the groups for the op, or ``None`` if Flax's code runs."""
    if np.ndim(x) < 2 or not _is_epsilon(layer.epsilon):
        return None
    groups = _groups_of(layer, x.shape)
    if groups is None or x.shape[groups["axis"]] % groups["num_groups"]:
        return None
    parameters = [_variable(layer.scale), _variable(layer.bias)]
    if any(p is not None and p.shape != (x.shape[groups["axis"]],) for p in parameters):
        return None
    operands = _operands(layer, x, [], parameters)
    return None if operands is None else (operands, groups)


def _groups_of(layer, shape) -> dict[str, int] | None:
    """How ``group_norm`` divides an array of this shape as a layer of Flax does.

    The layer is a ``GroupNorm`` or an ``InstanceNorm``. ``None`` if it is not a group norm of each
    index of the first axis.
    """
    rank, instance = len(shape), hasattr(layer, "feature_axes")
    features = _axes(layer.feature_axes if instance else -1, rank)
    reduced = None if instance else layer.reduction_axes
    if layer.axis_name is not None or len(features) != 1 or not 0 < features[0] < rank:
        return None
    if reduced is not None and set(_axes(reduced, rank)) != set(range(1, rank)):
        return None
    channels = shape[features[0]]
    groups = channels if instance else layer.num_groups
    if groups is None and channels % layer.group_size:
        return None  # Flax has an error for it
    groups = groups or channels // layer.group_size
    return dict(num_groups=groups, axis=features[0])


class _GroupNorm(_flax.Module):  # of one layout in memory with Flax's layers, for `convert`
    """A call of a norm of each sample."""

    def __call__(
        self, x: ArrayLike, *, mask: jax.Array | None = None, residual: ArrayLike | None = None
    ) -> jax.Array:
        """Normalizes ``x``, or ``x + residual``.

        Args:
          x: array with the features at the axis of Flax's layer.
          mask: boolean array that broadcasts to ``x``: the elements that count for the statistics.
          residual: array that is added to ``x`` before the norm, or ``None``. The kernel adds it if
            it has the shape of ``x`` and the sum has the dtype of the result.

        Returns:
          An array with the shape of the sum and the dtype of Flax's layer.

        Raises:
          TypeError: the shapes of ``x``, ``residual`` and ``num_features`` are not compatible.
        """
        call = super().__call__  # type: ignore[misc]
        return _group_norm(self, call, x, mask, residual)


def _activation_of(layer: str, activation):
    if activation is not None:
        act = functools.partial(bias_act, bias=None, activation=activation)
        try:
            jax.eval_shape(act, jnp.zeros(1))
        except ValueError as error:
            raise ValueError(str(error).replace("bias_act", layer, 1)) from None
    return activation


class GroupNorm(_GroupNorm, _flax.GroupNorm):
    """``flax.nnx.GroupNorm`` on :func:`jax_fastops.group_norm`, fused with a residual.

    ``activation((s - mean) * rsqrt(var + epsilon) * scale + bias)`` where ``s = x + residual``.

    Args:
      num_features: the size of the feature axis, the last one.
      activation: ``None`` or the name of an activation of :func:`jax_fastops.group_norm`.
      **kwargs: all other arguments of ``flax.nnx.GroupNorm``, with its defaults.

    Variables: ``scale`` and ``bias`` (``nnx.Param``), each ``[num_features]``, as in Flax's layer.

    Calls that do not reduce over all axes except the first one, or have a ``mask`` or an
    ``axis_name``, run Flax's code.

    Residuals: those of :func:`jax_fastops.group_norm`.

    Raises:
      TypeError: as Flax's constructor.
      ValueError: as Flax's constructor, or ``activation`` is not known.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> norm = fo_nnx.GroupNorm(8, num_groups=2, activation="silu", rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 4, 4, 8))).shape
      (2, 4, 4, 8)
    """

    @_signature_of(_flax.GroupNorm.__init__)
    def __init__(self, num_features: int, *args: Any, activation: str | None = None, **kwargs: Any):
        super().__init__(num_features, *args, **kwargs)
        self.activation: str | None = _activation_of("GroupNorm", activation)


class InstanceNorm(_GroupNorm, _flax.InstanceNorm):
    """``flax.nnx.InstanceNorm`` on :func:`jax_fastops.group_norm`, fused with a residual.

    A :class:`GroupNorm` whose groups have one feature. The arguments, variables and errors are
    those of Flax's layer, and ``activation``.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> fo_nnx.InstanceNorm(8, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 4, 8))).shape
      (2, 4, 4, 8)
    """

    @_signature_of(_flax.InstanceNorm.__init__)
    def __init__(self, num_features: int, *, activation: str | None = None, **kwargs: Any):
        super().__init__(num_features, **kwargs)
        self.activation: str | None = _activation_of("InstanceNorm", activation)


def in_place_of(
    name: str, layer: Any, flax_call: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
) -> Any:
    """A call of one of Flax's own layers, for :func:`jax_fastops.patch`."""
    if name == "BatchNorm":
        return _batch_norm(layer, flax_call, x, *args, **kwargs)
    if name == "Dropout":
        return _dropout(layer, flax_call, x, *args, **kwargs)
    if name in ("GroupNorm", "InstanceNorm"):
        return _group_norm(layer, flax_call, x, *args, **kwargs)
    mask = args[0] if args else kwargs.get("mask")
    return _row_norm(layer, flax_call, x, mask, None, False, None)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    **rest: Any,
) -> jax.Array:
    """:func:`jax_fastops.attention` as the ``attention_fn`` of ``flax.nnx.MultiHeadAttention``.

    Takes the arguments of ``flax.nnx.dot_product_attention``. Dropout draws a mask for each head
    and example, which is Flax's ``broadcast_dropout=False``.

    Flax's own function runs where this one cannot do the same: with ``broadcast_dropout`` or a
    precision together with dropout, where the weights are kept (``sow_weights``), and where heads
    of values have another size than those of keys. A query that may attend to no key gives 0, where
    Flax gives the mean of all values.

    Args:
      query: array ``[..., T, N, H]``.
      key: array ``[..., S, K, H]``.
      value: array ``[..., S, K, H]``.
      bias: floating-point array that broadcasts to ``[..., N, T, S]``, or ``None``.
      mask: array that broadcasts to ``[..., N, T, S]``: not 0 where a query may attend to a key.
      broadcast_dropout: whether all examples and heads have the same mask of dropout.
      dropout_rng: the key of the dropout.
      dropout_rate: the probability that a weight is dropped.
      deterministic: whether nothing is dropped.
      dtype: of the computation. Default: that of the operands.
      precision: as in Flax, it holds with dropout only.
      module: the layer that keeps the weights, or ``None``.
      rest: ``is_causal`` and ``promote_dtype``, if the installed version of Flax has them.

    Returns:
      An array with the shape of ``query``.

    Raises:
      TypeError, ValueError: as :func:`jax_fastops.attention`, or as Flax.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops.nnx import dot_product_attention
      >>> layer = nnx.MultiHeadAttention(
      ...     2, 8, decode=False, attention_fn=dot_product_attention, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 5, 8))).shape
      (3, 5, 8)
    """
    given = (
        query,
        key,
        value,
        bias,
        mask,
        broadcast_dropout,
        dropout_rng,
        dropout_rate,
        deterministic,
        dtype,
        precision,
        module,
    )
    y = _attention_in_place_of(*given, **rest)
    return _flax.dot_product_attention(*given, **rest) if y is None else y


def _attention_in_place_of(
    query,
    key,
    value,
    bias,
    mask,
    broadcast_dropout,
    dropout_rng,
    dropout_rate,
    deterministic,
    dtype,
    precision,
    module,
    *,
    is_causal=False,
    promote_dtype=promote_dtype,
    **rest: Any,
) -> jax.Array | None:
    """The result of a function of Flax, or ``None`` if the op cannot do the same.

    ``rest`` are further options of ``flax.linen``, which must not be set.
    """
    drops = dropout_rate > 0 and not deterministic
    own_size = query.shape[-1] == key.shape[-1] == value.shape[-1]
    flax_only = (
        module is not None or (drops and (broadcast_dropout or precision)) or any(rest.values())
    )
    if flax_only or not own_size:
        return None
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch = query.shape[:-3]

    def flat(x):
        """With one dimension of the batch."""
        lead = jnp.broadcast_shapes(x.shape[:-3], (1,) * len(batch))
        lead = batch if any(size != 1 for size in lead) else lead
        return jnp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(math.prod(lead), *x.shape[-3:])

    heads = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)]
    y = attention(
        heads[0],
        heads[1],
        heads[2],
        None if bias is None else flat(bias),
        None if mask is None else flat(mask).astype(bool),
        is_causal=is_causal,
        dropout_key=dropout_rng if drops else None,
        dropout_rate=dropout_rate if drops else 0.0,
    )
    return y.reshape(query.shape)


def convert(model: _Model) -> _Model:
    """Exchanges the layers of a built model for those of this module, in place.

    These are the norms and ``Dropout``, and the function of ``MultiHeadAttention`` if it is Flax's.
    They keep their options and variables: the ``nnx.Param`` objects, their dtypes and their
    metadata, such as shardings. The paths of the model's state stay, so that checkpoints and the
    states of optimizers load as before. Layers that are shared stay shared. ``nnx.clone(model)``
    makes a copy to convert.

    A call computes what Flax's layer computes, except for rounding, and two differences: the masks
    of ``Dropout`` are those of :func:`jax_fastops.dropout_mask`; and with
    :func:`dot_product_attention`, a query that may attend to no key gives 0.

    Layers stay that are of a subclass, or whose options mean that every call would run Flax's code.
    One ``UserWarning`` names all of them, with the reasons. It is also given for a model that has
    no layer to exchange.

    Args:
      model: an ``nnx.Module``, or one of these layers itself.

    Returns:
      ``model``.

    Raises:
      TypeError: ``model`` is no ``nnx.Module``.

    Example:
      >>> from flax import nnx
      >>> from jax_fastops import nnx as fo_nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs))
      >>> model = fo_nnx.convert(model)
      >>> type(model.layers[1]) is fo_nnx.LayerNorm
      True
    """
    if not isinstance(model, _flax.Module):
        kind = type(model).__name__
        raise TypeError(f"convert: model is of type {kind}; it must be a flax.nnx.Module")
    ours: tuple[type, ...] = (BatchNorm, Dropout, GroupNorm, InstanceNorm, LayerNorm, RMSNorm)
    layers = {getattr(_flax, layer.__name__): layer for layer in ours}
    exchange(model, layers, dot_product_attention, _is_epsilon)
    return model
