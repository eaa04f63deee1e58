"""Fused, memory-bound operations for JAX: native kernels, called through XLA's FFI.

The functions look and differentiate like those of ``jax.nn``. The docstring of each one says what
it equals and what it keeps for the backward. Its example runs after these imports::

    import jax
    import jax.numpy as jnp
    import jax_fastops as fo
"""

import os
import sys
from typing import TYPE_CHECKING

from jax_fastops import _explain, _names, _native
from jax_fastops._dispatch import kernel_or
from jax_fastops._explain import Explanation, OpCall, explain
from jax_fastops._implementation import set_implementation, use_implementation
from jax_fastops._info import export_checks, info
from jax_fastops._patch import patch
from jax_fastops._version import __version__
from jax_fastops.attention import attention, qkv_attention
from jax_fastops.autofuse import FuseReport, Missed, Replaced, autofuse
from jax_fastops.batch_norm import batch_norm, batch_norm_inference, batch_norm_statistics
from jax_fastops.bias_act import bias_act
from jax_fastops.cross_entropy import cross_entropy
from jax_fastops.dense_act import dense_act
from jax_fastops.dropout import dropout, dropout_mask
from jax_fastops.freeze import Frozen, freeze
from jax_fastops.gated_act import gated_act
from jax_fastops.group_norm import group_norm
from jax_fastops.heads import merge_heads, split_heads, split_qkv_heads
from jax_fastops.lerp import lerp
from jax_fastops.linear_cross_entropy import linear_cross_entropy
from jax_fastops.max_pool import max_pool
from jax_fastops.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm
from jax_fastops.relu import add_relu, relu
from jax_fastops.segment_sum import segment_sum, take
from jax_fastops.softmax import log_softmax, softmax
from jax_fastops.transpose import transpose
from jax_fastops.window_sum import window_sum

__all__ = [
    "Explanation",
    "Frozen",
    "FuseReport",
    "Missed",
    "OpCall",
    "Replaced",
    "__version__",
    "add_relu",
    "attention",
    "autofuse",
    "batch_norm",
    "batch_norm_inference",
    "batch_norm_statistics",
    "bias_act",
    "cross_entropy",
    "dense_act",
    "dropout",
    "dropout_mask",
    "explain",
    "export_checks",
    "freeze",
    "gated_act",
    "group_norm",
    "info",
    "kernel_or",
    "layer_norm",
    "lerp",
    "linear_cross_entropy",
    "log_softmax",
    "max_pool",
    "merge_heads",
    "patch",
    "qkv_attention",
    "relu",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "segment_sum",
    "set_implementation",
    "softmax",
    "split_heads",
    "split_qkv_heads",
    "take",
    "transpose",
    "use_implementation",
    "window_sum",
]

if not TYPE_CHECKING:  # for type checkers, these names do not exist

    def __getattr__(name: str):
        text = f"module {__name__!r} has no attribute {name!r}{_names.advice(name)}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])


_native.register()
_explain.log(os.environ.get("JAX_FASTOPS_LOG", ""))
