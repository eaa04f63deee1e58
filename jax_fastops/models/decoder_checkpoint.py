"""Hugging Face's checkpoints of decoders.

The model types are Llama, Mistral, Qwen 2 and 3, Phi-3, OLMo 2 and 3, SmolLM3, Gemma 1 to 3 and
GPT-2.

A checkpoint is a folder with ``config.json`` and ``model.safetensors``::

    config, params = decoder_checkpoint.load("folder/of/Llama-3.2-1B")
    hidden = decoder.apply(params, tokens, config)

Needs safetensors, and neither ``transformers`` nor PyTorch. Without it, the functions raise
``ImportError``; without the folder or a file of it, ``FileNotFoundError``; and for a configuration
or parameters of another type, ``TypeError``.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from jax_fastops.models import decoder
from jax_fastops.models._checkpoint import (
    ACTIVATION_NAMES,
    ACTIVATION_OF,
    Leaf,
    Shardings,
    check_supported,
    check_tensors,
    leaves_of,
    network,
    packed_tensors,
    parameter_dtype,
    read_params,
    tensor_shapes,
    tensors_of,
    unpacked,
    without_null,
    written_like,
)
from jax_fastops.models._checkpoint_files import (
    CONFIG,
    OTHERS,
    find_tensors,
    read_config,
    same_tensors,
    write,
)
from jax_fastops.models._checks import Checks
from jax_fastops.models._decoder_types import TYPES, ModelType

__all__ = ["load", "save"]

_CHECK = Checks("decoder")

# The classes of rotary frequencies by their kinds, and the names of their fields.
_ORIGINAL = "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[Any, dict[str, str]]] = {
    "llama3": (decoder.RopeScaling, {"original_positions": _ORIGINAL}),
    "linear": (decoder.LinearScaling, {}),
    "yarn": (decoder.YarnScaling, {"original_positions": _ORIGINAL}),
}
# Keys whose null is not the default: no window, num_attention_heads, hidden_size //
# num_attention_heads, 4 * n_embd, and no softcaps.
_NULLABLE = (
    "sliding_window",
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_IGNORED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")  # of old checkpoints


def _leaves(config: decoder.Config, kind: ModelType) -> dict[str, Leaf]:
    """The tensors by their names."""
    return leaves_of(
        decoder.shapes(config),
        kind.modules,
        kind.layer_module,
        transposed=kind.transposed,
        unit_offset=kind.unit_offset,
    )


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
        ``"bfloat16"``, ``"float16"``, or with ``jax_enable_x64`` ``"float64"``. The scales of
        Gemma's norms, which files have less 1, are at least float32.
      scan: the ``scan`` of the config: whether the layers' arrays are stacked.
      tensor_parallel: the ``tensor_parallel`` of the config.
      sharding: a ``jax.sharding.Sharding`` for all parameters; or a tree of them like the
        parameters, of which a leaf may stand for all parameters below it; or a function that
        returns one of these for the config. Default: all parameters are on JAX's default device.

    Returns:
      ``(config, params)`` for :func:`jax_fastops.models.decoder.apply`.

    Raises:
      ValueError: a file is damaged; the model is none of the supported ones, or with ``scan`` its
        layers are not alike; tensors are missing, unknown, or of another shape or dtype (all are
        named); ``param_dtype`` is none of those above; or ``sharding`` lacks a parameter.

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
    kind = TYPES[given["model_type"]]
    expected, leaves = decoder.shapes(config), _leaves(config, kind)
    tensors = find_tensors("decoder", path, _IGNORED)
    if kind.prefix:  # which may be left out
        known = (kind.prefix, "lm_head.")
        tensors = {
            name if name.startswith(known) else kind.prefix + name: stored
            for name, stored in tensors.items()
        }
    shapes = tensor_shapes(leaves, expected)
    tensors = unpacked(tensors, shapes, kind.packed, 0 if kind.transposed else -1)
    head = tensors.pop("lm_head.weight", None) if config.tied else None
    check_tensors("decoder", tensors, leaves, expected)
    # With tied embeddings, a file may have them twice.
    table = f"{kind.modules['embeddings']}.weight"
    if head is not None and not same_tensors("decoder", head, tensors[table]):
        raise ValueError(
            f"decoder: tensor lm_head.weight differs from {table}; with tie_word_embeddings they "
            "must be the same"
        )
    sharding = sharding(config) if callable(sharding) else sharding
    return config, read_params("decoder", tensors, leaves, expected, own, sharding)


def _config_of(given: dict, dtype: str = "float32", **options: Any) -> decoder.Config:
    _CHECK.choice(f"model_type in {CONFIG}", given.get("model_type"), tuple(TYPES), OTHERS)
    kind = TYPES[given["model_type"]]
    given = kind.defaults | without_null(given, _NULLABLE)
    check_supported("decoder", given, kind.supported)
    activation = given[kind.activation]
    _CHECK.choice(f"{kind.activation} in {CONFIG}", activation, tuple(ACTIVATION_OF))
    fields = {own: given[name] for own, name in kind.fields.items()}
    for name, default in (
        ("kv_heads", fields["heads"]),
        ("head_dim", fields["hidden_size"] // fields["heads"]),
        ("intermediate_size", 4 * fields["hidden_size"]),
    ):
        if fields.get(name) is None:
            fields[name] = default
    if "query_pre_attn_scalar" in kind.defaults:
        size = given["query_pre_attn_scalar"]
        fields["attention_scale"] = None if size == fields["head_dim"] else size**-0.5
    if "attention_bias" in kind.defaults:
        fields |= dict.fromkeys(("qkv_bias", "output_bias"), bool(given["attention_bias"]))
    if "positions" not in fields:
        fields |= _rope_of(given, kind)
    return decoder.Config(
        **fields | kind.fixed,
        **_windows_of(given, kind),
        # Gemma's "gelu" has always been by tanh.
        activation="gelu" if kind.unit_offset else ACTIVATION_OF[activation],
        dtype=dtype,
        **options,
    )


def _rope_of(given: dict, kind: ModelType) -> dict[str, Any]:
    # In files of transformers before 5, the base is an option of its own. If both are there, 5
    # takes the former.
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    if "rope_local_base_freq" in kind.defaults:
        local = rope.get("sliding_attention") or {}
        check_supported("decoder", without_null(local), {"rope_type": "default"})
        found["local_theta"] = local.get("rope_theta", given["rope_local_base_freq"])
        rope = rope.get("full_attention") or ({} if local else rope)
    rope = without_null(rope)
    name = rope.get("rope_type", rope.get("type", "default"))
    _CHECK.choice(f"rope_type in {CONFIG}", name, kind.ropes)
    rope = {
        "rope_theta": given["rope_theta"],
        _ORIGINAL: given["max_position_embeddings"],
        "partial_rotary_factor": given.get("partial_rotary_factor", 1.0),
    } | rope
    check_supported("decoder", rope, {"partial_rotary_factor": 1.0})
    found["rope_theta"] = rope["rope_theta"]
    if name == "default":
        return found
    cls, names = _SCALINGS[name]
    keys = {str(field): str(names.get(field, field)) for field in cls._fields}
    if name == "yarn":
        rope = {"attention_factor": _attention_factor(rope)} | rope
    required = [keys[field] for field in cls._fields if field not in cls._field_defaults]
    if missing := [key for key in required if key not in rope]:
        raise ValueError(f"decoder: rope_parameters in {CONFIG} has no {', '.join(missing)}")
    scaling = cls(**{field: rope[key] for field, key in keys.items() if key in rope})
    return found | {"rope_scaling": scaling}


def _attention_factor(rope: dict) -> float:
    """The factor of queries and keys of YaRN that a file does not have."""

    factor = rope.get("factor", 1.0)

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, other = (rope.get(name) for name in ("mscale", "mscale_all_dim"))
    return of(scale) / of(other) if scale and other else of(1.0)


def _windows_of(given: dict, kind: ModelType) -> dict[str, Any]:
    """The sliding window and the layers that have none; and those without a rotary embedding."""
    count, window = given[kind.fields["layers"]], given.get("sliding_window")
    found: dict[str, Any] = {}
    unrotated: list[int] = []
    if "no_rope_layer_interval" in kind.defaults:
        interval = given["no_rope_layer_interval"]
        rotated = given.get("no_rope_layers") or [(n + 1) % interval for n in range(count)]
        unrotated = [layer for layer, value in enumerate(rotated) if not value]
        found["unrotated_layers"] = tuple(unrotated)
    if kind.windows == "none" or window is None:
        return found
    if kind.windows == "all":
        return found | {"sliding_window": window}
    if kind.windows == "option" and not given["use_sliding_window"]:
        return found
    if (first := given.get("max_window_layers")) is not None:
        sliding = set(range(first, count))
    elif (pattern := given.get("sliding_window_pattern")) is not None:
        sliding = {layer for layer in range(count) if (layer + 1) % pattern}
    else:
        sliding = set(unrotated)
    types = given.get("layer_types") or [
        f"{'sliding' if layer in sliding else 'full'}_attention" for layer in range(count)
    ]
    if more := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"decoder: layer_types in {CONFIG} has {more[0]!r}; supported are 'full_attention' and "
            "'sliding_attention'"
        )
    full = tuple(layer for layer, own in enumerate(types) if own == "full_attention")
    if len(full) == count:
        return found
    return found | {"sliding_window": window, "full_layers": full}


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
        scaling = config.rope_scaling
        if isinstance(scaling, (decoder.RopeScaling, decoder.YarnScaling)):
            written["max_position_embeddings"] = int(scaling.factor * scaling.original_positions)
    else:
        written = written_like(
            "decoder", like, config, _config_of, lambda given: _over(given, config)
        )
    kind = TYPES[written["model_type"]]
    tensors = tensors_of(params, _leaves(config, kind))
    tensors = packed_tensors(tensors, kind.packed, 0 if kind.transposed else -1)
    write("decoder", Path(path), written, tensors, like)


def _written(config: decoder.Config, name: str) -> dict[str, Any]:
    """The content of config.json, which transformers 4 and 5 understand."""
    kind = TYPES[name]
    window = config.sliding_window
    written: dict[str, Any] = {name: getattr(config, own) for own, name in kind.fields.items()}
    written |= {
        "architectures": [kind.architecture],
        "model_type": name,
        kind.activation: ACTIVATION_NAMES.get(config.activation, config.activation),
        **kind.supported,
    }
    if kind.unit_offset:
        written[kind.activation] = "gelu_pytorch_tanh"
    if config.positions is None:
        written["rope_theta"] = config.rope_theta
    if "attention_bias" in kind.defaults:
        written["attention_bias"] = config.output_bias
    if kind.windows == "all" or window is not None:
        written["sliding_window"] = window
    if kind.windows == "option":
        written["use_sliding_window"] = window is not None
    if kind.windows in ("option", "typed") and window is not None:
        full = config.full_layers
        kinds = ("full" if layer in full else "sliding" for layer in range(config.layers))
        written["layer_types"] = [f"{own}_attention" for own in kinds]
    if "max_window_layers" in kind.defaults:
        written["max_window_layers"] = 0
    if "no_rope_layer_interval" in kind.defaults:
        layers = range(config.layers)
        written["no_rope_layers"] = [int(n not in config.unrotated_layers) for n in layers]
    for rope_type, (cls, names) in _SCALINGS.items():
        if isinstance(scaling := config.rope_scaling, cls) and scaling is not None:
            values = {names.get(own, own): value for own, value in scaling._asdict().items()}
            written["rope_scaling"] = {"rope_type": rope_type, **values}
    if "query_pre_attn_scalar" in kind.defaults:
        scale = config.attention_scale
        written["query_pre_attn_scalar"] = config.head_dim if scale is None else round(scale**-2)
    if "rope_local_base_freq" in kind.defaults and config.local_theta is not None:
        # transformers 5 has both in one key, transformers 4 the bases in keys of their own.
        rope = written.pop("rope_scaling", {"rope_type": "default"})
        local = {"rope_type": "default", "rope_theta": config.local_theta}
        written["rope_parameters"] = {
            "full_attention": rope | {"rope_theta": config.rope_theta},
            "sliding_attention": local,
        }
        written["rope_local_base_freq"] = config.local_theta
    return written


def _over(given: dict, config: decoder.Config) -> dict[str, Any]:
    """Another content of config.json, changed to that of ``config``."""
    replaced = ("rope_parameters", "rope_scaling", "layer_types", "no_rope_layers")
    same = {name: value for name, value in given.items() if name not in replaced}
    return same | _written(config, given["model_type"])


def _model_type(config: decoder.Config) -> str:
    """The first model that can have all of the config."""
    for name in TYPES:
        try:
            found = _config_of(_written(config, name))
        except ValueError:  # such as a kind of rotary frequencies
            continue
        if network(found) == network(config):
            return name
    options = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if field.type != "int" and getattr(network(config), field.name) != field.default
    ]
    raise ValueError(f"decoder: no supported model has {', '.join(options)} together")
