"""Layers for Flax NNX: its ``BatchNorm``, ``LayerNorm`` and ``RMSNorm``, on the kernels.

The classes derive from Flax's, so constructor arguments, variables, metadata, checkpoints and
``train()``/``eval()`` are Flax's own, whatever its version; new are ``activation=`` in the
constructor and ``residual=`` in the call. A call runs one of two programs:

* the ops of this package, where they do what was asked and ``"auto"`` finds their kernels faster
  (in a gradient at least), or under ``"native"``;
* elsewhere (under ``"xla"`` always) Flax's own code, bit for bit, with residual and activation in
  ``jax.numpy`` around it.

The ops differ from Flax's code by rounding alone: the variance is that of the deviations from
the mean, whatever ``use_fast_variance`` says (which computes ``mean(x**2) - mean(x)**2`` and loses
digits where the mean is large), and all between the input and the result is in float32 (float64 for
float64), rounded once. What Flax casts before it computes is cast here too: with
``dtype=jnp.bfloat16`` the parameters, and the statistics in use at inference.

Needs Flax: ``pip install 'jax_fastops[nnx]'``.
"""

from __future__ import annotations

import inspect
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops import _implementation
from jax_fastops._arguments import FLOATING
from jax_fastops._kernel import size_of
from jax_fastops._op import ops
from jax_fastops.batch_norm import batch_norm, batch_norm_inference, seen
from jax_fastops.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm
from jax_fastops.relu import relu

try:
    from flax import nnx as _flax
    from flax.nnx.nn.dtypes import canonicalize_dtype
except ImportError as error:
    raise ImportError(
        "jax_fastops.nnx needs Flax, which cannot be imported "
        f"({error}); install it with: pip install 'jax_fastops[nnx]'"
    ) from error

__all__ = ["BatchNorm", "LayerNorm", "RMSNorm"]

_ACTIVATIONS = (None, "relu")
# Elements under which "auto" leaves a layer to Flax: the fewest that its table was measured with.
_SMALLEST = 1024


# ---- when the kernels take a call ----------------------------------------------------------------


class _Operands(NamedTuple):
    """What an op is called with."""

    x: jax.Array
    statistics: list[jax.Array]  # running ones
    parameters: list[jax.Array | None]
    dtype: np.dtype  # of the layer's result
    statistics_dtype: np.dtype  # of those that the layer computes


def _operands(layer, x, statistics, parameters) -> _Operands | None:
    """Input, statistics and parameters as Flax promotes them; ``None`` if the ops cannot take them.

    Flax's arithmetic has the widest dtype among its operands, and rounds to that of the result at
    the end; ``x`` is in that widest dtype.
    """
    given = jnp.result_type(x)
    if hasattr(layer, "promote_dtype"):  # Flax 0.12.0 promotes nothing
        promoted = layer.promote_dtype((x, *statistics, *parameters), dtype=layer.dtype)
        x, values = promoted[0], promoted[1:]
        statistics, parameters = values[: len(statistics)], values[len(statistics) :]
    dtype = jnp.dtype(canonicalize_dtype(x, *parameters, dtype=layer.dtype))
    own = jnp.result_type(x)
    wide = jnp.promote_types(own, dtype)
    if not {str(d) for d in (given, own, dtype, wide)} <= set(FLOATING):
        return None
    if wide.itemsize > given.itemsize and _implementation.current() == "auto":
        # XLA widens as it reads; for a kernel the wider array has to be written first.
        return None
    least = jnp.promote_types(own if layer.dtype is None else layer.dtype, jnp.float32)
    return _Operands(_as(x, wide), list(statistics), list(parameters), dtype, least)


def _as(x, dtype) -> jax.Array:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return x if x.dtype == dtype else x.astype(dtype)


def _is_epsilon(value) -> bool:
    """Whether the ops take it: of an array or a NaN, Flax makes something too."""
    number = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
    return number and value == value


def _left_to_flax(name: str, x, *others, **options) -> bool:
    """Whether Flax's code runs, though the op could take the call."""
    if _implementation.current() == "auto" and size_of(x) < _SMALLEST:
        return True
    return ops()[name].left_to_xla(x, *(a for a in others if a is not None), **options)


def _axes(axes, rank: int) -> tuple[int, ...]:
    """Axes as Flax takes them, from 0 on."""
    axes = axes if hasattr(axes, "__iter__") else (axes,)
    return tuple({axis + rank if axis < 0 else axis for axis in axes})


def _variable(variable):
    return None if variable is None else variable[...]


# ---- what Flax does not have ---------------------------------------------------------------------


def _checked(layer: str, activation):
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{layer}: activation is {activation!r}; it must be None or 'relu'")
    return activation


def _finish(y, residual, activation):
    """Residual and activation by XLA."""
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if activation == "relu" else y


def _signature_of(theirs):
    """Gives a constructor the signature of Flax's, with ``activation`` behind it."""

    def decorate(init):
        known = inspect.signature(theirs)
        own = inspect.Parameter("activation", inspect.Parameter.KEYWORD_ONLY, default=None)
        init.__signature__ = known.replace(parameters=[*known.parameters.values(), own])
        return init

    return decorate


# ---- layers --------------------------------------------------------------------------------------


class BatchNorm(_flax.BatchNorm):
    """``flax.nnx.BatchNorm`` on :func:`jax_fastops.batch_norm`, with residual and ReLU fused in.

    ``activation((x - mean) * rsqrt(var + epsilon) * scale + bias + residual)``. In a ResNet::

        from jax_fastops import nnx as fo_nnx
        ...
        self.bn1 = fo_nnx.BatchNorm(c, activation="relu", rngs=rngs)
        self.bn2 = fo_nnx.BatchNorm(c, activation="relu", rngs=rngs)
        ...
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y), residual=x)

    Args:
      num_features: the size of the axis of features.
      activation: ``None`` or ``"relu"``, applied last.
      **kwargs: all other arguments of ``flax.nnx.BatchNorm``, with its defaults:
        ``use_running_average``, ``axis``, ``momentum``, ``epsilon``, ``dtype``, ``param_dtype``,
        ``use_bias``, ``use_scale``, ``bias_init``, ``scale_init``, ``axis_name``,
        ``axis_index_groups``, ``use_fast_variance``, ``rngs``, and those of newer versions.

    Variables: ``scale``, ``bias`` (``nnx.Param``), ``mean``, ``var`` (``nnx.BatchStat``), each
    ``[num_features]``, as in Flax's layer: the state of either loads into the other.

    The kernels take calls with one axis of features, no ``mask`` and no ``axis_index_groups``, in
    float32, bfloat16, float16 and float64. All others, and those that ``"auto"`` leaves to XLA, run
    Flax's code. ``"auto"`` also does so where promotion widens the input, such as bfloat16 with
    ``dtype=None`` and float32 variables, whose result is float32, as Flax's is: give
    ``dtype=jnp.bfloat16`` to compute on bfloat16 arrays.

    Saved for the backward: as :func:`jax_fastops.batch_norm` (in training) and
    :func:`jax_fastops.batch_norm_inference` say.

    Raises:
      TypeError: as Flax's constructor.
      ValueError: ``activation`` is not known.
    """

    @_signature_of(_flax.BatchNorm.__init__)
    def __init__(self, num_features: int, *, activation: str | None = None, **kwargs: Any):
        super().__init__(num_features, **kwargs)
        self.activation = _checked("BatchNorm", activation)

    def __call__(
        self, x, use_running_average: bool | None = None, *, mask=None, residual=None
    ) -> jax.Array:
        """Normalises ``x``, and in training updates the running statistics.

        Args:
          x: array with the features at ``axis``.
          use_running_average: whether to normalise with the running statistics, as at inference,
            rather than with those of ``x``; ``None`` for what the constructor, ``train()`` or
            ``eval()`` said.
          mask: boolean array that broadcasts to ``x``: what counts for the statistics.
          residual: array that is added before the activation, or ``None``. One of the shape of
            ``x``, of a dtype that does not widen the result, is added in the kernel.

        Returns:
          An array of the shape of ``x`` and of the dtype of Flax's layer: ``dtype`` where it was
          given, else that of ``x`` and the variables together. A residual of a wider dtype widens
          it as ``+`` does.

        Raises:
          ValueError: neither the call nor the layer says whether to use the running statistics; or
            as Flax's layer.
        """
        average = use_running_average
        average = self.use_running_average if average is None else average
        given = None if average is None or mask is not None else self._given(x, average)
        if given is None:
            y = super().__call__(x, use_running_average, mask=mask)
            return _finish(y, residual, self.activation)
        x, (mean, var), parameters, dtype, statistics_dtype = given
        options = dict(axis=_axes(self.axis, x.ndim)[0], eps=self.epsilon)
        fused = residual is None or (
            np.shape(residual) == x.shape
            and x.dtype == dtype == jnp.promote_types(dtype, jnp.result_type(residual))
        )
        if fused:
            options["activation"] = self.activation
            options["residual"] = None if residual is None else _as(residual, dtype)
        if average:
            y = batch_norm_inference(x, mean, var, *parameters, **options)
        else:
            y, mean, var = batch_norm(x, *parameters, **options, axis_name=self.axis_name)
            self._update(self.mean, mean.astype(statistics_dtype))
            self._update(self.var, var.astype(statistics_dtype))
        y = _as(y, dtype)
        return y if fused else _finish(y, residual, self.activation)

    def _given(self, x, average) -> _Operands | None:
        """What the op takes; ``None`` where Flax's code runs."""
        axes = _axes(self.axis, x.ndim)
        across = not average and self.axis_name is not None
        if len(axes) != 1 or not _is_epsilon(self.epsilon):
            return None
        if not 0 <= axes[0] < x.ndim or (across and self.axis_index_groups is not None):
            return None
        statistics = [self.mean[...], self.var[...]]
        parameters = [_variable(self.scale), _variable(self.bias)]
        shape = (x.shape[axes[0]],)
        if any(v is not None and v.shape != shape for v in (*statistics, *parameters)):
            return None
        given = _operands(self, x, statistics, parameters)
        if given is None:
            return None
        like = seen(given.x, axes[0])
        options = dict(eps=float(self.epsilon), relu=self.activation == "relu", like=like)
        if average:
            arrays = (given.x, *given.statistics, *given.parameters)
            left = _left_to_flax("batch_norm_inference", *arrays, **options)
        else:
            left = _left_to_flax("batch_norm", given.x, *given.parameters, **options)
        return None if left else given

    def _update(self, variable, value) -> None:
        """Moves a running statistic, which carries no gradient."""
        moved = self.momentum * variable[...] + (1 - self.momentum) * value
        variable[...] = jax.lax.stop_gradient(moved)


def _row_norm(layer, flax_call, name: str, x, mask, residual, return_sum: bool):
    """The call of a layer over the last axis; ``name`` is that of the op."""
    x = x if hasattr(x, "shape") else jnp.asarray(x)  # Flax takes a list
    summand = given = None
    if residual is not None and mask is None and np.shape(residual) == np.shape(x):
        # Only a sum of the dtype that is normalised: others are rounded or widened in between.
        dtype = jnp.result_type(x, residual)
        given = _row_operands(layer, _as(x, dtype))
        if given is not None and dtype == given.x.dtype == given.dtype:
            summand = _as(residual, dtype)
    if summand is None:
        x, residual = (x if residual is None else x + residual), None
        given = _row_operands(layer, x) if mask is None else None
    if given is not None:
        function = _ROW_OPS[name][summand is not None]
        arrays = [a for a in (given.x, summand) if a is not None] + given.parameters
        with_sum = return_sum and summand is not None
        options = dict(eps=float(layer.epsilon), return_sum=with_sum)
        if not _left_to_flax(function.__name__, *arrays, **options):
            if not with_sum:
                del options["return_sum"]
            found = function(*arrays, **options)
            y, x = found if with_sum else (found, x)
            y = _as(y, given.dtype)
            y = relu(y) if layer.activation == "relu" else y
            return (y, x) if return_sum else y
    x = x if residual is None else x + residual
    y = _finish(flax_call(x, mask=mask), None, layer.activation)
    return (y, x) if return_sum else y


_ROW_OPS = {
    "layer_norm": (layer_norm, residual_layer_norm),
    "rms_norm": (rms_norm, residual_rms_norm),
}


def _row_operands(layer, x) -> _Operands | None:
    """What the op takes; ``None`` where Flax's code runs."""
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


class LayerNorm(_flax.LayerNorm):
    """``flax.nnx.LayerNorm`` on :func:`jax_fastops.layer_norm`, with a residual fused in.

    ``activation((s - mean) * rsqrt(var + epsilon) * scale + bias)`` where ``s = x + residual``: the
    residual is added before the norm (in :class:`BatchNorm`, after it). A pre-norm block::

        y, h = self.norm(y, residual=h, return_sum=True)

    Args:
      num_features: the size of the axis of features.
      activation: ``None`` or ``"relu"``, applied last.
      **kwargs: all other arguments of ``flax.nnx.LayerNorm``, with its defaults: ``epsilon``,
        ``dtype``, ``param_dtype``, ``use_bias``, ``use_scale``, ``bias_init``, ``scale_init``,
        ``reduction_axes``, ``feature_axes``, ``axis_name``, ``axis_index_groups``,
        ``use_fast_variance``, ``rngs``, and those of newer versions.

    Variables: ``scale`` and ``bias`` (``nnx.Param``), each ``[num_features]``, as in Flax's layer:
    the state of either loads into the other.

    The kernels take calls that reduce over the last axis, which is also the one of features, with
    no ``mask`` and no ``axis_name``, in float32, bfloat16, float16 and float64. All others, and
    those that ``"auto"`` leaves to XLA, run Flax's code. ``"auto"`` also does so where promotion
    widens the input, such as bfloat16 with ``dtype=None`` and float32 parameters, whose result is
    float32, as Flax's is: give ``dtype=jnp.bfloat16`` to compute on bfloat16 arrays.

    Saved for the backward: as :func:`jax_fastops.layer_norm` and
    :func:`jax_fastops.residual_layer_norm` say, and one bit per element for the ReLU.

    Raises:
      TypeError: as Flax's constructor.
      ValueError: ``activation`` is not known.
    """

    @_signature_of(_flax.LayerNorm.__init__)
    def __init__(self, num_features: int, *, activation: str | None = None, **kwargs: Any):
        super().__init__(num_features, **kwargs)
        self.activation = _checked("LayerNorm", activation)

    def __call__(self, x, *, mask=None, residual=None, return_sum: bool = False):
        """Normalises ``x``, or ``x + residual``.

        Args:
          x: array with the features in its last axis, or where the constructor said.
          mask: boolean array that broadcasts to ``x``: what counts for the statistics.
          residual: array that is added to ``x`` before the norm, or ``None``. It is added in the
            kernel where it has the shape of ``x`` and the sum has the dtype of the result.
          return_sum: whether to return what was normalised too: ``x + residual``, or ``x``.

        Returns:
          An array of the shape of ``x`` (of the sum) and of the dtype of Flax's layer: ``dtype``
          where it was given, else that of ``x`` and the parameters together; with ``return_sum``
          a pair, of it and of the sum, whose dtype is that of ``x + residual``.

        Raises:
          TypeError: the shapes of ``x``, ``residual`` and ``num_features`` do not fit.
        """
        call = super().__call__
        return _row_norm(self, call, "layer_norm", x, mask, residual, return_sum)


class RMSNorm(_flax.RMSNorm):
    """``flax.nnx.RMSNorm`` on :func:`jax_fastops.rms_norm`, with a residual fused in.

    ``activation(s * rsqrt(mean(s**2) + epsilon) * scale)`` where ``s = x + residual``.

    Args:
      num_features: the size of the axis of features.
      activation: ``None`` or ``"relu"``, applied last.
      **kwargs: all other arguments of ``flax.nnx.RMSNorm``, with its defaults: those of
        :class:`LayerNorm` but ``use_bias`` and ``bias_init``.

    Variables: ``scale`` (``nnx.Param``), ``[num_features]``, as in Flax's layer.

    When the kernels take a call, what is saved for the backward
    (:func:`jax_fastops.rms_norm`, :func:`jax_fastops.residual_rms_norm`) and errors: as
    :class:`LayerNorm`.
    """

    @_signature_of(_flax.RMSNorm.__init__)
    def __init__(self, num_features: int, *, activation: str | None = None, **kwargs: Any):
        super().__init__(num_features, **kwargs)
        self.activation = _checked("RMSNorm", activation)

    def __call__(self, x, mask=None, *, residual=None, return_sum: bool = False):
        """Normalises ``x``, or ``x + residual``: arguments and results as of :class:`LayerNorm`."""
        return _row_norm(self, super().__call__, "rms_norm", x, mask, residual, return_sum)
