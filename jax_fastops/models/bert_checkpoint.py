"""Hugging Face's checkpoints of BERT, RoBERTa, DistilBERT and ELECTRA.

A checkpoint is a folder with ``config.json`` and ``model.safetensors``.

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

from jax_fastops.models import bert
from jax_fastops.models._bert_types import TYPES, ModelType
from jax_fastops.models._checkpoint import (
    ACTIVATION_NAMES,
    ACTIVATION_OF,
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
    OTHERS,
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

# Buffers of old checkpoints that only count from 0.
_IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids")
_POSITIONS = "embeddings.position_embeddings.weight"
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
        :func:`jax_fastops.models.decoder_checkpoint.load`. The model type is ``"bert"``,
        ``"roberta"``, ``"xlm-roberta"``, ``"camembert"``, ``"distilbert"`` or ``"electra"``. Names
        of tensors may begin with ``"bert."`` or the like, and may be the old ones (``gamma``,
        ``beta``).
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
      ``BertForTokenClassification``. For the classifiers of sequences of other types, ``"pooler"``
      is the product before the last one.

      RoBERTa counts positions after two rows of its table, which ``params`` does not have. As in
      ``transformers``, positions are counted from the first token, so padding is on the right.

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
    content = read_config("bert", path)
    config = _config_of(content, dtype, tensor_parallel=tensor_parallel)
    kind = TYPES[content["model_type"]]
    given = find_tensors("bert", path, _IGNORED)
    tensors = _renamed(given, kind)
    repeated = {name: tensors.pop(name) for name in kind.repeated if name in tensors}
    for name, value in repeated.items():  # a file may have either of the two names
        tensors.setdefault(kind.repeated[name], value)
    if (first := _first_position(content)) and (table := tensors.get(_POSITIONS)):
        tensors[_POSITIONS] = table.part(first, max(0, table.shape[0] - first))
    last = kind.classifier.get("classifier")
    modules = kind.modules_of(any(name.startswith(f"{last}.") for name in tensors))
    expected = _expected_shapes(config, kind, modules, tensors, [*tensors, *repeated])
    leaves = leaves_of(expected, modules, kind.layer_module)
    known = {*leaves, *kind.repeated}
    unknown = {name: stored for name, stored in given.items() if _current(name, kind) not in known}
    if keep_unknown:
        tensors = {name: tensor for name, tensor in tensors.items() if name in leaves}
    remedy = " (load(..., keep_unknown=True) returns them)"
    check_tensors("bert", tensors, leaves, expected, remedy)
    for name, stored in repeated.items():
        if not same_tensors("bert", stored, tensors[kind.repeated[name]]):
            raise ValueError(
                f"bert: tensor {name} differs from {kind.repeated[name]}; they must be the same"
            )
    sharding = sharding(config) if callable(sharding) else sharding
    params = read_params("bert", tensors, leaves, expected, own, sharding)
    if keep_unknown:
        return config, params, {name: read_tensor("bert", a) for name, a in unknown.items()}
    return config, params


def _expected_shapes(
    config: bert.Config, kind: ModelType, modules: dict, tensors: dict, names: list[str]
) -> dict:
    """The shapes of the parameters, with the heads and the pooler if they are in the file."""

    def has(part):
        return part is not None and any(name.startswith(part) for name in names)

    names_of = (f"{modules['classifier']}.{leaf}" for leaf in ("bias", "weight"))
    labels = [(*tensors[name].shape, 1)[0] for name in names_of if name in tensors]
    heads = {own: has(kind.heads.get(own)) for own in ("mlm", "nsp", "qa")}
    _check_mlm(config, kind, heads["mlm"])
    expected = bert.shapes(config, **heads, labels=labels[0] if labels else None)
    if not has(f"{modules['pooler']}."):
        del expected["pooler"]
    return expected


def _check_mlm(config: bert.Config, kind: ModelType, mlm: bool) -> None:
    """The head of masked words has the activation of the layers."""
    if mlm and kind.own_mlm and config.activation != "gelu_exact":
        raise ValueError(
            f"bert: activation is {config.activation!r}, but the head of {kind.classes}ForMaskedLM "
            "always has 'gelu_exact'"
        )


def _first_position(content: dict) -> int:
    """The first row of the table of positions that a token can have."""
    padding = content.get("pad_token_id", 1)
    return TYPES[content["model_type"]].first_position * (1 if padding is None else padding + 1)


def _config_of(given: dict, dtype: str = "float32", **options: Any) -> bert.Config:
    _CHECK.choice(f"model_type in {CONFIG}", given.get("model_type"), tuple(TYPES), OTHERS)
    kind, first = TYPES[given["model_type"]], _first_position(given)
    given = kind.defaults | without_null(given)
    check_supported("bert", given, kind.supported)
    if given.get("pruned_heads"):
        raise ValueError(f"bert: {CONFIG} has pruned_heads, which are not supported")
    activation = given.get(kind.activation, "gelu")
    _CHECK.choice(f"{kind.activation} in {CONFIG}", activation, tuple(ACTIVATION_OF))
    fields = {own: given[name] for own, name in kind.fields.items() if name in given}
    fields["positions"] = fields.get("positions", bert.BASE.positions) - first
    return bert.Config(
        **fields, **kind.fixed, activation=ACTIVATION_OF[activation], dtype=dtype, **options
    )


def _current(name: str, kind: ModelType) -> str:
    """The current name of a tensor, without the prefix of the encoder."""
    name = name.removeprefix(kind.prefix)
    for old, new in _OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _renamed(tensors: dict[str, Stored], kind: ModelType) -> dict[str, Stored]:
    """The tensors under their current names."""
    renamed: dict[str, Stored] = {}
    twice = []
    for given, tensor in tensors.items():
        name = _current(given, kind)
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
    ``BertForTokenClassification`` (a classifier without a pooler) or ``BertForQuestionAnswering``;
    with ``like``, those of the same classes of its model type. Dtypes, existing files and ``like``
    are as in :func:`jax_fastops.models.decoder_checkpoint.save`. Without ``like``,
    ``pad_token_id`` is ``null``, so that no word has a gradient of zero in ``transformers``.

    Args:
      path, config: as in :func:`jax_fastops.models.decoder_checkpoint.save`.
      params: parameters, as from :func:`jax_fastops.models.bert.init`, or stacked. Remove
        ``"pooler"`` if the classifier reads ``hidden``.
      unknown: other tensors to write, by their names, as :func:`load` returns them. The names of
        the encoder then begin with ``"bert."`` or the like, as with heads.
      label_names: the names of the classifier's labels, for ``id2label`` in ``config.json``.
        Default: those of ``like`` if it has as many, else ``"LABEL_0"`` and so on.
      like: as there. The architecture is that of ``params``. Without it, the model type is the
        first of BERT, DistilBERT and ELECTRA that can have ``config``. BERT has what RoBERTa has.

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
        content = _written(config, _model_type(config)) | {"pad_token_id": None}
    else:

        def written(given: dict) -> dict[str, Any]:
            return given | _written(config, given["model_type"], _first_position(given))

        content = written_like("bert", like, config, _config_of, written)
    kind = TYPES[str(content["model_type"])]
    _check_mlm(config, kind, "mlm" in params)
    former = content.get("id2label") or ()
    if label_names is None and len(former) == len(labels.get("id2label", ())):
        labels = {}
    modules = kind.modules_of("classifier" in params and "pooler" in params)
    leaves, unknown = leaves_of(params, modules, kind.layer_module), unknown or {}
    if both := sorted(name for name in unknown if _current(name, kind) in leaves):
        raise ValueError(f"bert: unknown has tensors of the parameters: {', '.join(both)}")
    tensors = {name: np.asarray(value, order="C") for name, value in unknown.items()}
    prefix = kind.prefix if unknown or any(head in params for head in kind.heads) else ""
    for name, tensor in tensors_of(params, leaves).items():
        if name == _POSITIONS and (first := _first_position(content)):
            tensor = np.pad(tensor, ((first, 0), (0, 0)))
        tensors[name if name.startswith(tuple(kind.heads.values())) else prefix + name] = tensor
    architecture = kind.classes + _architecture(params)
    content |= {"architectures": [architecture], "tie_word_embeddings": True, **labels}
    write("bert", Path(path), content, tensors, like)


def _written(config: bert.Config, name: str, first: int = 0) -> dict[str, Any]:
    """The content of config.json."""
    kind = TYPES[name]
    values = {
        "positions": config.positions + first,
        "embedding_size": config.embedding_size or config.hidden_size,
    }
    return {
        **{name: values.get(own, getattr(config, own)) for own, name in kind.fields.items()},
        "model_type": name,
        kind.activation: ACTIVATION_NAMES.get(config.activation, config.activation),
        **kind.supported,
    }


def _model_type(config: bert.Config) -> str:
    """The first model type that can have all of the config."""
    for name in TYPES:
        if network(_config_of(_written(config, name))) == network(config):
            return name
    raise ValueError(
        f"bert: no supported model type has eps={config.eps}, token_types={config.token_types}, "
        f"pooler_activation={config.pooler_activation!r} and "
        f"embedding_size={config.embedding_size} together"
    )


def _labels(params: dict, names: Sequence[str] | None) -> dict[str, Any]:
    """The part of config.json about labels, from which transformers takes their number."""
    count = len(params["classifier"]["bias"]) if "classifier" in params else 0
    if names is not None and len(names) != count:
        raise ValueError(f"bert: label_names has {len(names)} names, but params has {count} labels")
    labels = dict(enumerate(names or (f"LABEL_{label}" for label in range(count))))
    pairs = {"id2label": labels, "label2id": {name: label for label, name in labels.items()}}
    return pairs if count else {}


def _architecture(params: dict) -> str:
    """The name of the class in transformers, after that of the model type."""
    if "qa" in params:
        return "ForQuestionAnswering"
    if "classifier" in params:
        return f"For{'Sequence' if 'pooler' in params else 'Token'}Classification"
    if "nsp" in params:
        return "ForPreTraining" if "mlm" in params else "ForNextSentencePrediction"
    return "ForMaskedLM" if "mlm" in params else "Model"
