"""Hugging Face's checkpoints of Llama, Mistral, Qwen2 and Qwen3.

A checkpoint is a folder with ``config.json`` and ``model.safetensors``::

    config, params = decoder_checkpoint.load("Llama-3.2-1B")
    hidden = decoder.apply(params, tokens, config)

Needs safetensors, and neither ``transformers`` nor PyTorch.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops.models import decoder
from jax_fastops.models._checkpoint import CONFIG, check_tensors, read_json, read_tensors, write
from jax_fastops.models._checks import Checks
from jax_fastops.models._parameters import unstack

__all__ = ["load", "save"]

_CHECK = Checks("decoder")

# Fields of a Config, and their names in config.json.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "init_range": "initializer_range",
}
_REQUIRED = (*tuple(_FIELDS)[:4], "intermediate_size")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Options that must have these values. Others mean another network.
_SUPPORTED: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False}
_NAMES = {
    "embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_IGNORED = ("rotary_emb.inv_freq",)  # of old checkpoints


def _name(path: tuple) -> str:
    """The name of the tensor at a path in the parameters with a list of layers."""
    first, *rest = (step.idx if hasattr(step, "idx") else step.key for step in path)
    kind = "bias" if rest and rest[-1] == "bias" else "weight"
    if first != "layers":
        return f"{_NAMES[first]}.{kind}"
    return f"model.layers.{rest[0]}.{_LAYER_NAMES[rest[1]]}.{kind}"


def _transposed(path: tuple, array: Any) -> Any:
    """An array or tensor as the other: PyTorch's products are [out, in]."""
    return array.T if getattr(path[-1], "key", None) == "kernel" else array


# ---- load ----------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str], *, dtype: str = "bfloat16", scan: bool = False
) -> tuple[decoder.Config, dict[str, Any]]:
    """Reads the config and the parameters from a folder with a Hugging Face checkpoint.

    Args:
      path: a folder with ``config.json`` and ``model.safetensors``, or with the files that
        ``model.safetensors.index.json`` names.
      dtype: the ``dtype`` of the config, in which the model computes. The parameters are float32,
        for any dtype of the tensors.
      scan: the ``scan`` of the config: whether the layers' arrays are stacked.

    Returns:
      ``(config, params)`` for :func:`jax_fastops.models.decoder.apply`.

    Raises:
      ImportError: safetensors is not installed.
      FileNotFoundError: the folder or a file does not exist.
      ValueError: a file is damaged; the model is none of the supported ones; or tensors are
        missing, unknown, or of another shape or dtype (all are named).

    Example:
      >>> import jax, tempfile
      >>> from jax_fastops.models import decoder, decoder_checkpoint
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     decoder_checkpoint.save(folder, decoder.SMALL, params)
      ...     config, params = decoder_checkpoint.load(folder, dtype="float32")
      >>> config == decoder.SMALL
      True
    """
    path = Path(path)
    config = _config_of(read_json("decoder", path / CONFIG), dtype)
    tensors = read_tensors("decoder", path, _IGNORED)
    tensors = {name: a for name, a in tensors.items() if not name.endswith(_IGNORED)}
    if config.tied:  # a file may have the embeddings twice
        table, head = (tensors.get(f"{_NAMES[name]}.weight") for name in ("embeddings", "head"))
        if head is not None and table is not None and not np.array_equal(head, table):
            raise ValueError(
                "decoder: tensor lm_head.weight differs from model.embed_tokens.weight; with "
                "tie_word_embeddings they must be the same"
            )
        tensors.pop("lm_head.weight", None)
    named, tree = jax.tree.flatten_with_path(decoder.shapes(config))
    wanted = {
        _name(path): tuple(_transposed(path, np.empty(leaf.shape, np.bool_)).shape)
        for path, leaf in named
    }
    check_tensors("decoder", tensors, wanted)
    arrays = [_transposed(path, tensors[_name(path)].astype(np.float32)) for path, _ in named]
    params = jax.tree.unflatten(tree, arrays)
    if scan:
        config = dataclasses.replace(config, scan=True)
        params["layers"] = jax.tree.map(lambda *a: np.stack(a), *params["layers"])
    return config, jax.tree.map(jnp.asarray, params)


def _config_of(given: dict, dtype: str) -> decoder.Config:
    kind = given.get("model_type")
    _CHECK.choice(f"model_type in {CONFIG}", kind, tuple(_ARCHITECTURES))
    for name, value in _SUPPORTED.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"decoder: {name} in {CONFIG} is {given[name]!r}; supported is {value!r}"
            )
    fields = {own: given[name] for own, name in _FIELDS.items() if given.get(name) is not None}
    if missing := [_FIELDS[own] for own in _REQUIRED if own not in fields]:
        raise ValueError(f"decoder: {CONFIG} has no {', '.join(missing)}")
    defaults = dict(
        kv_heads=fields["heads"],
        head_dim=fields["hidden_size"] // fields["heads"],
        eps=1e-6,
        tied=False,
    )
    bias = bool(given.get("attention_bias", False)) and kind in ("llama", "qwen3")
    return decoder.Config(
        **(defaults | fields),
        **_rope_of(given),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        qk_norm=kind == "qwen3",
        sliding_window=_window_of(given),
        dtype=dtype,
    )


def _rope_of(given: dict) -> dict[str, Any]:
    # In files of transformers before 5, the base is an option of its own.
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _CHECK.choice(f"rope_type in {CONFIG}", kind, ("default", "llama3"))
    theta = rope.get("rope_theta", given.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta}
    scaling = decoder.RopeScaling(
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _window_of(given: dict) -> int | None:
    """The sliding window. All layers must have it, or none."""
    kind, count = given["model_type"], given["num_hidden_layers"]
    if kind == "mistral":
        return given.get("sliding_window")
    if kind == "llama" or not given.get("use_sliding_window"):
        return None
    full = given.get("max_window_layers", 28)
    default = ["full_attention" if layer < full else "sliding_attention" for layer in range(count)]
    kinds = set(given.get("layer_types") or default)
    if len(kinds) > 1:
        raise ValueError(
            f"decoder: by {CONFIG} some layers have a sliding window, and some have none; they "
            "must be alike"
        )
    return given.get("sliding_window", 4096) if "sliding_attention" in kinds else None


# ---- save ----------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], config: decoder.Config, params: dict[str, Any]) -> None:
    """Writes a folder that :func:`load` and ``transformers`` can read.

    Tensors are float32. Existing files are replaced atomically, after both new files are complete.

    Args:
      path: the folder. It is created if it does not exist.
      config: the :class:`jax_fastops.models.decoder.Config` of the parameters. Fields that are not
        part of the network (``dtype``, ``attention``, ``tensor_parallel``, ``remat``, ``scan``) are
        not written.
      params: parameters, as from :func:`jax_fastops.models.decoder.init`.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: ``params`` are not those of ``config``, or no supported model has these biases and
        this sliding window together.

    Example:
      >>> import jax, os, tempfile
      >>> from jax_fastops.models import decoder, decoder_checkpoint
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     decoder_checkpoint.save(folder, decoder.SMALL, params)
      ...     sorted(os.listdir(folder))
      ['config.json', 'model.safetensors']
    """
    _CHECK.tree("params", params, decoder.shapes(config))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    if config.scan:
        params = params | {"layers": unstack(params["layers"])}
    tensors = {
        _name(path): np.ascontiguousarray(_transposed(path, leaf))
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    write("decoder", Path(path), _written(config), tensors)


def _written(config: decoder.Config) -> dict[str, Any]:
    """The content of config.json, which transformers 4 and 5 understand."""
    kind, window = _model_type(config), config.sliding_window
    written: dict[str, Any] = {name: getattr(config, own) for own, name in _FIELDS.items()}
    written |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "rope_theta": config.rope_theta,
        **_SUPPORTED,
    }
    if kind in ("llama", "qwen3"):
        written["attention_bias"] = config.output_bias
    if kind == "mistral" or window is not None:
        written["sliding_window"] = window
    if kind in ("qwen2", "qwen3"):
        written |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    if (scaling := config.rope_scaling) is not None:
        written["max_position_embeddings"] = int(scaling.factor * scaling.original_positions)
        written["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    return written


def _model_type(config: decoder.Config) -> str:
    biases, window = (config.qkv_bias, config.output_bias), config.sliding_window is not None
    if config.qk_norm and biases[0] == biases[1]:
        return "qwen3"
    if not config.qk_norm and biases == (True, False):
        return "qwen2"
    if not config.qk_norm and biases[0] == biases[1] and not (window and biases[0]):
        return "mistral" if window else "llama"
    raise ValueError(
        f"decoder: no supported model has qkv_bias={biases[0]}, output_bias={biases[1]}, "
        f"qk_norm={config.qk_norm} and sliding_window={config.sliding_window} together"
    )
