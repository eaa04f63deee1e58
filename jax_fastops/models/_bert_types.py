"""Hugging Face's model types that are a :class:`jax_fastops.models.bert.Config`.

A type is what its config.json and its tensors are called, and which options it has not.
"""

from typing import Any, NamedTuple

from jax_fastops.models._checkpoint import FIELDS


class ModelType(NamedTuple):
    """How a type of ``transformers`` writes a network of ``bert``.

    Attributes:
      classes: what the names of its classes begin with.
      prefix: what the names of the encoder's tensors begin with, in a model with a head.
      layer_module: the module of all layers.
      modules: PyTorch's modules, as ``_checkpoint.leaves_of`` takes them.
      heads: what the names of the heads' tensors begin with.
      classifier: the modules of pooler and classifier in the class for sequences, if others.
      repeated: tensors that are second copies, and of which.
      fields: the fields of a Config, and their names in config.json.
      defaults: what ``transformers`` takes for a missing key, where ``Config`` has another default.
      fixed: fields of a Config that the type's code fixes.
      supported: options that must have these values. Others mean another network.
      activation: the key of the activation.
      first_position: whether positions are counted from the row after that of padding.
      own_mlm: whether the head of masked words has another activation than the layers: erf's GELU.
    """

    classes: str
    prefix: str
    layer_module: str
    modules: dict[str, Any]
    heads: dict[str, str]
    classifier: dict[str, str]
    repeated: dict[str, str]
    fields: dict[str, str]
    defaults: dict[str, Any]
    fixed: dict[str, Any]
    supported: dict[str, Any]
    activation: str = "hidden_act"
    first_position: bool = False
    own_mlm: bool = False

    def modules_of(self, sequences: bool) -> dict[str, Any]:
        """The modules, of the class for sequences or of another one."""
        return self.modules | self.classifier if sequences else self.modules


_BERT_FIELDS = FIELDS | {
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_EMBEDDINGS = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "token_type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_BERT_MODULES = {
    "embeddings": _EMBEDDINGS,
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
_WORDS = "embeddings.word_embeddings.weight"
_ABSOLUTE = {"position_embedding_type": "absolute"}
_ENCODER = {"is_decoder": False, "add_cross_attention": False}
_HEADS = {"nsp": "cls.seq_relationship.", "classifier": "classifier.", "qa": "qa_outputs."}
_BERT = ModelType(
    classes="Bert",
    prefix="bert.",
    layer_module="encoder.layer",
    modules=_BERT_MODULES,
    heads=_HEADS | {"mlm": "cls.predictions."},
    classifier={},
    repeated={
        "cls.predictions.decoder.weight": _WORDS,
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    fields=_BERT_FIELDS,
    defaults={},
    fixed={},
    supported=_ABSOLUTE | _ENCODER,
)
_ROBERTA = _BERT._replace(
    classes="Roberta",
    prefix="roberta.",
    modules=_BERT_MODULES
    | {"mlm": {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head"}},
    heads=_HEADS | {"mlm": "lm_head."},
    classifier={"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
    repeated={"lm_head.decoder.weight": _WORDS, "lm_head.decoder.bias": "lm_head.bias"},
    defaults={"vocab_size": 50265},
    first_position=True,
    own_mlm=True,
)
_DISTILBERT = ModelType(
    classes="DistilBert",
    prefix="distilbert.",
    layer_module="transformer.layer",
    modules={
        "embeddings": _EMBEDDINGS,
        "layers": {
            "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            "output": "attention.out_lin",
            "output_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "norm": "output_layer_norm",
        },
        "pooler": "pre_classifier",
        "mlm": {"dense": "vocab_transform", "norm": "vocab_layer_norm", "bias": "vocab_projector"},
        "classifier": "classifier",
        "qa": "qa_outputs",
    },
    heads={
        "mlm": "vocab_",
        "pooler": "pre_classifier.",
        "classifier": "classifier.",
        "qa": "qa_outputs.",
    },
    classifier={},
    repeated={"vocab_projector.weight": _WORDS},
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "layers": "n_layers",
        "heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "init_range": "initializer_range",
        "positions": "max_position_embeddings",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    defaults={"n_layers": 6},
    fixed={"token_types": None, "eps": 1e-12, "pooler_activation": "relu"},
    supported={"sinusoidal_pos_embds": False},
    activation="activation",
)
_ELECTRA = _ROBERTA._replace(
    classes="Electra",
    prefix="electra.",
    modules=_BERT_MODULES
    | {
        "embeddings": _EMBEDDINGS | {"projection": "embeddings_project"},
        "mlm": {
            "dense": "generator_predictions.dense",
            "norm": "generator_predictions.LayerNorm",
            "bias": "generator_lm_head",
        },
    },
    heads=_HEADS | {"mlm": "generator_"},
    repeated={"generator_lm_head.weight": _WORDS},
    fields=_BERT_FIELDS | {"embedding_size": "embedding_size"},
    defaults={
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    fixed={"pooler_activation": "gelu_exact"},
    first_position=False,
)

TYPES: dict[str, ModelType] = {
    "bert": _BERT,
    "distilbert": _DISTILBERT,
    "electra": _ELECTRA,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA._replace(classes="XLMRoberta", defaults={}),
    "camembert": _ROBERTA._replace(classes="Camembert", defaults={}),
}
