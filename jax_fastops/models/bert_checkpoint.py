"""Hugging Face's BERT checkpoints: a folder with ``config.json`` and ``model.safetensors``.

::

    config, params = bert_checkpoint.load("folder/of/bert-base-uncased")
    hidden, pooled = bert.apply(params, tokens, config, mask=mask)

Needs safetensors, and neither ``transformers`` nor PyTorch. Without it, the functions raise
``ImportError``; without the folder or a file of it, ``FileNotFoundError``; and for a configuration
or parameters of another type, ``TypeError``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_fastops.bias_act import ACTIVATIONS
from jax_fastops.models import bert
from jax_fastops.models._checkpoint import (
    FIELDS,
    Shardings,
    check_supported,
    check_tensors,
    leaves_of,
    parameter_dtype,
    read_params,
    tensors_of,
    without_null,
    written_like,
)
from jax_fastops.models._checkpoint_files import (
    CONFIG,
    Stored,
    find_tensors,
    read_config,
    read_tensor,
    same_tensors,
    write,
)
from jax_fastops.models._checks import Checks

__all__ = ["load", "save"]

_CHECK = Checks("bert")

# Fields of a Config, and their names in config.json. transformers has the same defaults.
_FIELDS = FIELDS | {
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
# Hugging Face's names, where they differ, and the names that it has for the same function.
_ACTIVATION_NAMES = {"gelu_exact": "gelu", "gelu": "gelu_new"}
_ACTIVATIONS = {_ACTIVATION_NAMES.get(name, name): name for name in ACTIVATIONS} | {
    "gelu_python": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "swish": "silu",
}
# Options that must have these values. Others mean another network.
_SUPPORTED: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}

_LAYER_MODULE = "encoder.layer"
# The names of tensors, without ``"bert."``.
_MODULES = {
    "embeddings": {
        "word": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "token_type": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    },
    "layers": {
        "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
        "output": "attention.output.dense",
        "output_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm": "output.LayerNorm",
    },
    "pooler": "pooler.dense",
    "mlm": {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions",
    },
    "nsp": "cls.seq_relationship",
    "classifier": "classifier",
    "qa": "qa_outputs",
}
# What the names of a head's tensors begin with.
_HEADS = {head: f"{_MODULES[head]}." for head in ("nsp", "classifier", "qa")}
_HEADS["mlm"] = "cls.predictions."
# Buffers of old checkpoints that only count from 0; then second copies of embeddings and bias.
_IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids")
_REPEATED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@overload
def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = ...,
    param_dtype: DTypeLike = ...,
    tensor_parallel: bool = ...,
    sharding: Shardings = ...,
    keep_unknown: Literal[False] = False,
) -> tuple[bert.Config, dict[str, Any]]: ...


@overload
def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = ...,
    param_dtype: DTypeLike = ...,
    tensor_parallel: bool = ...,
    sharding: Shardings = ...,
    keep_unknown: Literal[True],
) -> tuple[bert.Config, dict[str, Any], dict[str, np.ndarray[Any, Any]]]: ...


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    param_dtype: DTypeLike = "float32",
    tensor_parallel: bool = False,
    sharding: Shardings = None,
    keep_unknown: bool = False,
):
    """Reads the config and the parameters from a folder with a Hugging Face checkpoint.

    Each parameter is put on its devices before the next one is read.

    Args:
      path, dtype, param_dtype, tensor_parallel: as in
        :func:`jax_fastops.models.decoder_checkpoint.load`. Names of tensors may begin with
        ``"bert."``, and may be the old ones (``gamma``, ``beta``).
      sharding: as there. A tree may have heads that the checkpoint does not have.
      keep_unknown: whether to return tensors whose names are not known, such as those of another
        head. Otherwise they are an error. Tensors that are not floating are always an error, and so
        are tensors under the names of a head below that has other shapes.

    Returns:
      ``(config, params)`` for :func:`jax_fastops.models.bert.apply`, or with ``keep_unknown``
      ``(config, params, unknown)``.

      ``params`` has ``"pooler"``, ``"mlm"`` (from ``cls.predictions``), ``"nsp"`` (from
      ``cls.seq_relationship``), ``"classifier"`` and ``"qa"`` (from ``qa_outputs``) if the
      checkpoint has their tensors. :func:`jax_fastops.models.bert.shapes` says what their logits
      are. A classifier reads ``pooled`` in ``BertForSequenceClassification``, and ``hidden`` in
      ``BertForTokenClassification``.

      ``unknown`` has the tensors that are not known, by their names in the files. :func:`save`
      takes it.

    Raises:
      ValueError: as there, or the decoder of the masked words is not the word embeddings.

    Example:
      >>> import jax, tempfile
      >>> from jax_fastops.models import bert, bert_checkpoint
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     bert_checkpoint.save(folder, bert.SMALL, bert.init(jax.random.key(0), bert.SMALL))
      ...     config, params = bert_checkpoint.load(folder, dtype="float32")
      >>> config == bert.SMALL
      True
    """
    path, own = Path(path), parameter_dtype("bert", param_dtype)
    config = _config_of(read_config("bert", path), dtype, tensor_parallel=tensor_parallel)
    given = find_tensors("bert", path, _IGNORED)
    tensors = _renamed(given)
    repeated = {name: tensors.pop(name) for name in _REPEATED if name in tensors}
    for name, value in repeated.items():  # a file may have either of the two names
        tensors.setdefault(_REPEATED[name], value)
    expected = _expected_shapes(config, tensors, [*tensors, *repeated])
    leaves = leaves_of(expected, _MODULES, _LAYER_MODULE)
    known = {*leaves, *_REPEATED}
    unknown = {name: stored for name, stored in given.items() if _current(name) not in known}
    if keep_unknown:
        tensors = {name: tensor for name, tensor in tensors.items() if name in leaves}
    remedy = " (load(..., keep_unknown=True) returns them)"
    check_tensors("bert", tensors, leaves, expected, remedy)
    for name, stored in repeated.items():
        if not same_tensors("bert", stored, tensors[_REPEATED[name]]):
            raise ValueError(
                f"bert: tensor {name} differs from {_REPEATED[name]}; they must be the same"
            )
    sharding = sharding(config) if callable(sharding) else sharding
    params = read_params("bert", tensors, leaves, expected, own, sharding)
    if keep_unknown:
        return config, params, {name: read_tensor("bert", a) for name, a in unknown.items()}
    return config, params


def _expected_shapes(config: bert.Config, tensors: dict, names: list[str]) -> dict:
    """The shapes of the parameters, with the heads and the pooler if they are in the file."""

    def has(part):
        return any(name.startswith(part) for name in names)

    names_of = ("classifier.bias", "classifier.weight")
    labels = [(*tensors[name].shape, 1)[0] for name in names_of if name in tensors]
    expected = bert.shapes(
        config,
        **{own: has(_HEADS[own]) for own in ("mlm", "nsp", "qa")},
        labels=labels[0] if labels else None,
    )
    if not has("pooler."):
        del expected["pooler"]
    return expected


def _config_of(given: dict, dtype: str = "float32", **options: Any) -> bert.Config:
    if given.get("model_type") != "bert":
        raise ValueError(
            f"bert: model_type in {CONFIG} is {given.get('model_type')!r}; it must be 'bert'"
        )
    given = without_null(given)
    check_supported("bert", given, _SUPPORTED)
    if given.get("pruned_heads"):
        raise ValueError(f"bert: {CONFIG} has pruned_heads, which are not supported")
    activation = given.get("hidden_act", "gelu")
    _CHECK.choice(f"hidden_act in {CONFIG}", activation, tuple(_ACTIVATIONS))
    fields = {own: given[name] for own, name in _FIELDS.items() if name in given}
    return bert.Config(**fields, activation=_ACTIVATIONS[activation], dtype=dtype, **options)


def _current(name: str) -> str:
    """The current name of a tensor, without ``"bert."``."""
    name = name.removeprefix("bert.")
    for old, new in _OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _renamed(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors under their current names."""
    renamed: dict[str, Stored] = {}
    twice = []
    for given, tensor in tensors.items():
        name = _current(given)
        if name in renamed:
            twice.append(name)
        renamed[name] = tensor
    if twice:
        raise ValueError(f"bert: tensors under two names: {', '.join(sorted(twice))}")
    return renamed


def save(
    path: str | os.PathLike[str],
    config: bert.Config,
    params: dict[str, Any],
    *,
    unknown: Mapping[str, ArrayLike] | None = None,
    label_names: Sequence[str] | None = None,
    like: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a folder that :func:`load` and ``transformers`` can read.

    Tensors have the names of ``transformers.BertModel``, or with heads those of
    ``BertForPreTraining``, ``BertForSequenceClassification`` (a classifier with a pooler),
    ``BertForTokenClassification`` (a classifier without a pooler) or ``BertForQuestionAnswering``.
    Dtypes, existing files and ``like`` are as in
    :func:`jax_fastops.models.decoder_checkpoint.save`. Without ``like``, ``pad_token_id`` is
    ``null``, so that no word has a gradient of zero in ``transformers``.

    Args:
      path, config: as in :func:`jax_fastops.models.decoder_checkpoint.save`.
      params: parameters, as from :func:`jax_fastops.models.bert.init`, or stacked. Remove
        ``"pooler"`` if the classifier reads ``hidden``.
      unknown: other tensors to write, by their names, as :func:`load` returns them. The names of
        the encoder then begin with ``"bert."``, as with heads.
      label_names: the names of the classifier's labels, for ``id2label`` in ``config.json``.
        Default: those of ``like`` if it has as many, else ``"LABEL_0"`` and so on.
      like: as there. The architecture is that of ``params``.

    Raises:
      ValueError: as there, or ``unknown`` has a name of one of the parameters' tensors, or
        ``label_names`` are not as many as the classifier has labels.

    Example:
      >>> import jax, os, tempfile
      >>> from jax_fastops.models import bert, bert_checkpoint
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     bert_checkpoint.save(folder, bert.SMALL, bert.init(jax.random.key(0), bert.SMALL))
      ...     sorted(os.listdir(folder))
      ['config.json', 'model.safetensors']
    """
    bert._check_model(params, config, bert.FASTOPS)
    labels = _labels(params, label_names)
    like = None if like is None else Path(like)
    if like is None:
        content = _written(config) | {"pad_token_id": None}
    else:
        content = written_like(
            "bert", like, config, _config_of, lambda given: given | _written(config)
        )
    former = content.get("id2label") or ()
    if label_names is None and len(former) == len(labels.get("id2label", ())):
        labels = {}
    leaves, unknown = leaves_of(params, _MODULES, _LAYER_MODULE), unknown or {}
    if both := sorted(name for name in unknown if _current(name) in leaves):
        raise ValueError(f"bert: unknown has tensors of the parameters: {', '.join(both)}")
    tensors = {name: np.asarray(value, order="C") for name, value in unknown.items()}
    prefix = "bert." if unknown or any(head in params for head in _HEADS) else ""
    for name, tensor in tensors_of(params, leaves).items():
        tensors[name if name.startswith(tuple(_HEADS.values())) else prefix + name] = tensor
    content |= {"architectures": [_architecture(params)], "tie_word_embeddings": True, **labels}
    write("bert", Path(path), content, tensors, like)


def _written(config: bert.Config) -> dict[str, Any]:
    """The content of config.json."""
    return {
        **{name: getattr(config, own) for own, name in _FIELDS.items()},
        "model_type": "bert",
        "hidden_act": _ACTIVATION_NAMES.get(config.activation, config.activation),
        **_SUPPORTED,
    }


def _labels(params: dict, names: Sequence[str] | None) -> dict[str, Any]:
    """The part of config.json about labels, from which transformers takes their number."""
    count = len(params["classifier"]["bias"]) if "classifier" in params else 0
    if names is not None and len(names) != count:
        raise ValueError(f"bert: label_names has {len(names)} names, but params has {count} labels")
    labels = dict(enumerate(names or (f"LABEL_{label}" for label in range(count))))
    pairs = {"id2label": labels, "label2id": {name: label for label, name in labels.items()}}
    return pairs if count else {}


def _architecture(params: dict) -> str:
    if "qa" in params:
        return "BertForQuestionAnswering"
    if "classifier" in params:
        kind = "Sequence" if "pooler" in params else "Token"
        return f"BertFor{kind}Classification"
    if "nsp" in params:
        return "BertForPreTraining" if "mlm" in params else "BertForNextSentencePrediction"
    return "BertForMaskedLM" if "mlm" in params else "BertModel"
