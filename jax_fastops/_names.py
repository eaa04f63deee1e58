"""Names that other libraries have for what is here, for the messages of wrong calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax_fastops._activations import ACTIVATIONS

_F = TypeVar("_F", bound=Callable[..., Any])

_FUNCTIONS = {
    ", ".join((*ACTIVATIONS, "swish, fused_bias_gelu")): "bias_act(x, activation=...)",
    "glu, geglu, reglu, swiglu": "gated_act(gate, up, activation=...)",
    "layernorm, fused_layer_norm": "layer_norm",
    "rmsnorm, fused_rms_norm": "rms_norm",
    "batchnorm": "batch_norm",
    "groupnorm, instance_norm": "group_norm",
    "dot_product_attention, scaled_dot_product_attention, flash_attention, mha": "attention",
    "softmax_cross_entropy, softmax_cross_entropy_with_integer_labels": "cross_entropy",
    "fused_linear_cross_entropy": "linear_cross_entropy",
    "embed, embedding, gather": "take",
    "rope, rotary_embedding": "split_qkv_heads(qkv, num_heads=..., rotary=...)",
    "scatter_add": "segment_sum",
}
_ADVICE = {name: advice for names, advice in _FUNCTIONS.items() for name in names.split(", ")}


def advice(name: str) -> str:
    """What to call in place of a function that has this name elsewhere: empty, or in brackets."""
    if name in ("models", "nnx"):
        return f" (it is a module: import jax_fastops.{name})"
    return f" (use {_ADVICE[name]})" if name in _ADVICE else ""


def elsewhere(**arguments: str) -> Callable[[_F], _F]:
    """A decorator of a function that other libraries have with other names of arguments.

    A call with such a name raises a ``TypeError`` that has the advice, which ``arguments`` gives.
    """

    def decorator(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not arguments.keys().isdisjoint(kwargs):
                name = next(name for name in kwargs if name in arguments)
                raise TypeError(
                    f"{function.__name__}: there is no argument {name}; {arguments[name]}"
                )
            return function(*args, **kwargs)

        return cast(_F, checked)

    return decorator
