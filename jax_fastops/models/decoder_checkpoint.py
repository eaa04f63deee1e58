"""Hugging Face's checkpoints of Llama, Mistral, Qwen2 and Qwen3.

A checkpoint is a folder with ``config.json`` and ``model.safetensors``::

    config, params = decoder_checkpoint.load("folder/of/Llama-3.2-1B")
    hidden = decoder.apply(params, tokens, config)

Needs safetensors, and neither ``transformers`` nor PyTorch. Without it, the functions raise
``ImportError``; without the folder or a file of it, ``FileNotFoundError``; and for a configuration
or parameters of another type, ``TypeError``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jax_fastops.models import decoder
from jax_fastops.models._checkpoint import (
    FIELDS,
    Leaf,
    Shardings,
    check_supported,
    check_tensors,
    leaves_of,
    network,
    parameter_dtype,
    read_params,
    tensors_of,
    without_null,
    written_like,
)
from jax_fastops.models._checkpoint_files import (
    CONFIG,
    find_tensors,
    read_config,
    same_tensors,
    write,
)
from jax_fastops.models._checks import Checks

__all__ = ["load", "save"]

_CHECK = Checks("decoder")

# Fields of a Config, and their names in config.json.
_FIELDS = FIELDS | {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
# The names of a RopeScaling's fields, in their order.
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Options that must have these values. Others mean another network.
_SUPPORTED: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False}
# Keys whose null is not the default: no window, num_attention_heads, and hidden_size //
# num_attention_heads.
_NULLABLE = ("sliding_window", "num_key_value_heads", "head_dim")
# What transformers takes for a key that config.json does not have.
_ALL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
_QWEN: dict[str, Any] = _ALL | {
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _ALL | {"attention_bias": False},
    "mistral": _ALL
    | {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
}
_MODULES = {
    "embeddings": "model.embed_tokens",
    "layers": {
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
    },
    "norm": "model.norm",
    "head": "lm_head",
}
_IGNORED = ("rotary_emb.inv_freq",)  # of old checkpoints


def _leaves(config: decoder.Config) -> dict[str, Leaf]:
    """The tensors by their names."""
    return leaves_of(decoder.shapes(config), _MODULES, "model.layers")


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    param_dtype: DTypeLike = "float32",
    scan: bool = False,
    tensor_parallel: bool = False,
    sharding: Shardings = None,
) -> tuple[decoder.Config, dict[str, Any]]:
    """Reads the config and the parameters from a folder with a Hugging Face checkpoint.

    Each tensor is converted and put on its devices before the next one is read. So the host holds
    about one tensor in ``param_dtype`` (two if it is sharded over its last axis), and the pages of
    one file.

    Args:
      path: a folder with ``config.json`` and ``model.safetensors``, or with the files that
        ``model.safetensors.index.json`` names. ``huggingface_hub.snapshot_download`` makes one.
      dtype: the ``dtype`` of the config, in which the model computes.
      param_dtype: the dtype of the parameters, for any dtype of the tensors: ``"float32"``,
        ``"bfloat16"``, ``"float16"``, or with ``jax_enable_x64`` ``"float64"``.
      scan: the ``scan`` of the config: whether the layers' arrays are stacked.
      tensor_parallel: the ``tensor_parallel`` of the config.
      sharding: a ``jax.sharding.Sharding`` for all parameters; or a tree of them like the
        parameters, of which a leaf may stand for all parameters below it; or a function that
        returns one of these for the config. Default: all parameters are on JAX's default device.

    Returns:
      ``(config, params)`` for :func:`jax_fastops.models.decoder.apply`.

    Raises:
      ValueError: a file is damaged; the model is none of the supported ones; tensors are missing,
        unknown, or of another shape or dtype (all are named); ``param_dtype`` is none of those
        above; or ``sharding`` lacks a parameter.

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
    path, own = Path(path), parameter_dtype("decoder", param_dtype)
    given = read_config("decoder", path)
    config = _config_of(given, dtype, scan=scan, tensor_parallel=tensor_parallel)
    tensors = find_tensors("decoder", path, _IGNORED)
    head = tensors.pop("lm_head.weight", None) if config.tied else None
    expected, leaves = decoder.shapes(config), _leaves(config)
    check_tensors("decoder", tensors, leaves, expected)
    # With tied embeddings, a file may have them twice.
    if head is not None and not same_tensors("decoder", head, tensors["model.embed_tokens.weight"]):
        raise ValueError(
            "decoder: tensor lm_head.weight differs from model.embed_tokens.weight; with "
            "tie_word_embeddings they must be the same"
        )
    sharding = sharding(config) if callable(sharding) else sharding
    return config, read_params("decoder", tensors, leaves, expected, own, sharding)


def _config_of(given: dict, dtype: str = "float32", **options: Any) -> decoder.Config:
    kind: Any = given.get("model_type")
    _CHECK.choice(f"model_type in {CONFIG}", kind, tuple(_ARCHITECTURES))
    given = _DEFAULTS[kind] | without_null(given, _NULLABLE)
    check_supported("decoder", given, _SUPPORTED)
    fields = {own: given[name] for own, name in _FIELDS.items()}
    if fields["kv_heads"] is None:
        fields["kv_heads"] = fields["heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // fields["heads"]
    bias = "attention_bias" in _DEFAULTS[kind] and bool(given["attention_bias"])
    return decoder.Config(
        **fields,
        **_rope_of(given),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        qk_norm=kind == "qwen3",
        sliding_window=_window_of(given),
        dtype=dtype,
        **options,
    )


def _rope_of(given: dict) -> dict[str, Any]:
    # In files of transformers before 5, the base is an option of its own. If both are there, 5
    # takes the former.
    rope = without_null(given.get("rope_scaling") or given.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    _CHECK.choice(f"rope_type in {CONFIG}", kind, ("default", "llama3"))
    rope = {
        "rope_theta": given["rope_theta"],
        "original_max_position_embeddings": given["max_position_embeddings"],
        "partial_rotary_factor": given.get("partial_rotary_factor", 1.0),
    } | rope
    check_supported("decoder", rope, {"partial_rotary_factor": 1.0})
    if kind == "default":
        return {"rope_theta": rope["rope_theta"]}
    if missing := [name for name in _SCALING if name not in rope]:
        raise ValueError(f"decoder: rope_parameters in {CONFIG} has no {', '.join(missing)}")
    scaling = decoder.RopeScaling(*(rope[name] for name in _SCALING))
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _window_of(given: dict) -> int | None:
    """The sliding window. All layers must have it, or none."""
    kind, count = given["model_type"], given["num_hidden_layers"]
    if kind == "mistral":
        return given["sliding_window"]
    if kind == "llama" or not given["use_sliding_window"]:
        return None
    full = given["max_window_layers"]
    default = ["full_attention" if layer < full else "sliding_attention" for layer in range(count)]
    kinds = set(given.get("layer_types") or default)
    if more := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"decoder: layer_types in {CONFIG} has {more[0]!r}; supported are 'full_attention' and "
            "'sliding_attention'"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"decoder: by {CONFIG} some layers have a sliding window, and some have none; they "
            "must be alike"
        )
    return given["sliding_window"] if "sliding_attention" in kinds else None


def save(
    path: str | os.PathLike[str],
    config: decoder.Config,
    params: dict[str, Any],
    *,
    like: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a folder that :func:`load` and ``transformers`` can read.

    Tensors have the dtypes of the parameters. Existing files are replaced atomically, after all new
    files are complete. An index of another checkpoint in several files, and these files, are then
    removed.

    After fine-tuning, ``like`` is the folder that was loaded. Without it, ``transformers`` takes
    its defaults for what a Config does not have, such as ``max_position_embeddings``. The tokens
    that begin, end and pad a text are ``null`` then, because the defaults are those of another
    vocabulary.

    Args:
      path: the folder. It is created if it does not exist.
      config: the :class:`jax_fastops.models.decoder.Config` of the parameters. Fields that are not
        part of the network (``dtype``, ``attention``, ``tensor_parallel``, ``remat``,
        ``remat_every``, ``scan``) are not written.
      params: parameters, as from :func:`jax_fastops.models.decoder.init`.
      like: a folder with a checkpoint of the same shapes. What its ``config.json`` says beyond
        ``config`` stays, except for the dtype of tensors. ``generation_config.json`` and the
        files of its tokenizer are copied.

    Raises:
      ValueError: ``params`` are not those of ``config``; no supported model has these biases and
        this sliding window together; or ``like`` is another model, or has other shapes.

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
    like = None if like is None else Path(like)
    if like is None:
        written = _written(config, _model_type(config))
        written |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        if (scaling := config.rope_scaling) is not None:
            written["max_position_embeddings"] = int(scaling.factor * scaling.original_positions)
    else:
        written = written_like(
            "decoder", like, config, _config_of, lambda given: _over(given, config)
        )
    write("decoder", Path(path), written, tensors_of(params, _leaves(config)), like)


def _written(config: decoder.Config, kind: str) -> dict[str, Any]:
    """The content of config.json, which transformers 4 and 5 understand."""
    window = config.sliding_window
    written: dict[str, Any] = {name: getattr(config, own) for own, name in _FIELDS.items()}
    written |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "rope_theta": config.rope_theta,
        **_SUPPORTED,
    }
    if "attention_bias" in _DEFAULTS[kind]:
        written["attention_bias"] = config.output_bias
    if kind == "mistral" or window is not None:
        written["sliding_window"] = window
    if kind in ("qwen2", "qwen3"):
        written |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    if (scaling := config.rope_scaling) is not None:
        values = dict(zip(_SCALING, scaling, strict=True))
        written["rope_scaling"] = {"rope_type": "llama3", **values}
    return written


def _over(given: dict, config: decoder.Config) -> dict[str, Any]:
    """Another content of config.json, changed to that of ``config``."""
    replaced = ("rope_parameters", "rope_scaling", "layer_types")
    same = {name: value for name, value in given.items() if name not in replaced}
    return same | _written(config, given["model_type"])


def _model_type(config: decoder.Config) -> str:
    """The first model that can have all of the config."""
    for kind in _ARCHITECTURES:
        if network(_config_of(_written(config, kind))) == network(config):
            return kind
    raise ValueError(
        f"decoder: no supported model has qkv_bias={config.qkv_bias}, "
        f"output_bias={config.output_bias}, qk_norm={config.qk_norm} and "
        f"sliding_window={config.sliding_window} together"
    )
