"""Exchanges the layers of a built Flax NNX model, for :func:`jax_fastops.nnx.convert`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx


def exchange(
    model: nnx.Module,
    layers: dict[type, type],
    attention: Callable[..., Any],
    takes_epsilon: Callable[[Any], bool],
) -> None:
    """Exchanges layers in place, and warns of those that stay Flax's.

    Args:
      model: the model.
      layers: our subclasses of Flax's classes, by these.
      attention: the function in place of Flax's ``dot_product_attention``.
      takes_epsilon: whether our norms take an epsilon.
    """
    left = []
    known = False
    for path, layer in list(nnx.iter_graph(model)):  # leaves, too
        for reason in _exchanged(layer, layers, attention, takes_epsilon):
            known = True
            if reason is not None:
                where = ".".join(map(str, path)) or "the model"
                left.append(f"\n  {where} ({type(layer).__name__}): {reason}")
    if not known:
        warnings.warn("jax_fastops.nnx.convert: the model has no layers to exchange", stacklevel=3)
    if left:
        message = f"jax_fastops.nnx.convert leaves to Flax's code:{''.join(left)}"
        warnings.warn(message, stacklevel=3)


def _exchanged(layer, layers, attention, takes_epsilon) -> Iterator[str | None]:
    """Exchanges a layer; yields why not, or ``None``. It yields nothing for other modules."""
    if isinstance(layer, tuple(layers.values())):
        yield None
    elif isinstance(layer, tuple(layers)):
        ours = layers.get(type(layer))
        reason = "it is a subclass of Flax's layer" if ours is None else _reason(layer)
        if ours is not None and reason is None and not takes_epsilon(getattr(layer, "epsilon", 0)):
            reason = f"epsilon is {layer.epsilon}"
        if reason is None:
            # All that refers to the layer, and all that it has, stays.
            object.__setattr__(layer, "__class__", ours)
            if not isinstance(layer, nnx.Dropout):
                layer.activation = None
        yield reason
    elif isinstance(layer, nnx.MultiHeadAttention):
        if layer.attention_fn is nnx.dot_product_attention:
            layer.attention_fn = attention
        if layer.attention_fn is not attention:
            yield "its attention_fn is not Flax's"
        elif layer.dropout_rate > 0 and layer.broadcast_dropout:
            yield "its attention in training, because of broadcast_dropout=True"
        else:
            yield None


def _reason(layer) -> str | None:
    """The option because of which every call of the layer would run Flax's code."""
    never: dict[str, Any] = {}  # other values than one axis
    if isinstance(layer, nnx.Dropout):
        return f"broadcast_dims is {layer.broadcast_dims}" if layer.broadcast_dims else None
    if isinstance(layer, nnx.BatchNorm):
        if layer.axis_index_groups is not None:
            return "it has axis_index_groups"
        never = {"axis": layer.axis}
    elif layer.axis_name is not None:
        return f"axis_name is {layer.axis_name!r}"
    elif not isinstance(layer, nnx.GroupNorm):
        names = ("reduction_axes", "feature_axes")
        never = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    for name, axes in never.items():
        if hasattr(axes, "__iter__") and len(axes) != 1:
            return f"{name} is {axes}"
    return None
