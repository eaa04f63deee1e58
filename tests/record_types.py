"""Makes tests/data/types: tiny models of each type that the checkpoints know, with their outputs.

Each folder has a checkpoint (config.json, model.safetensors), and inputs, outputs and for decoders
greedy tokens (arrays.safetensors). Needs torch and transformers: `python tests/record_types.py`, or
with the names of recordings.
"""

import sys
from pathlib import Path

import torch
import transformers
from recorder import padding, randomize, save_arrays, save_model

FOLDER = Path(__file__).parent / "data" / "types"
NEW = 10  # tokens

BERT = dict(
    vocab_size=19,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=11,
)
DISTILBERT = dict(
    vocab_size=19, dim=8, n_layers=2, n_heads=2, hidden_dim=12, max_position_embeddings=9
)
# Classes of transformers, and their configs.
ENCODERS = {
    "roberta": ("RobertaForMaskedLM", BERT | dict(type_vocab_size=1, layer_norm_eps=1e-5)),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT | dict(activation="relu")),
    "electra": ("ElectraForMaskedLM", BERT | dict(embedding_size=6)),
}
for _type, _config in {
    "Roberta": BERT,
    "DistilBert": DISTILBERT,
    "Electra": BERT | dict(embedding_size=8),
}.items():
    _class = f"{_type}ForSequenceClassification"
    ENCODERS[f"{_type.lower()}-sequences"] = (_class, _config | dict(num_labels=3))
SEQUENCE = 9


def encoder(model, generator) -> tuple[dict, dict]:
    """Inputs with padding on the right, and outputs."""
    mask = padding(torch.tensor([0, 5, 2]), SEQUENCE)
    # Not the tokens of padding, which are 0 or 1.
    tokens = torch.randint(2, model.config.vocab_size, mask.shape, generator=generator)
    tokens = torch.where(mask > 0, tokens, model.config.pad_token_id)
    given = {"input_ids": tokens, "attention_mask": mask}
    found = model(**given, output_hidden_states=True)
    return given, {"hidden": found.hidden_states[-1], "logits": found.logits}


def build(cls: str, config: dict, generator) -> torch.nn.Module:
    cls = getattr(transformers, cls)
    model = cls(cls.config_class(**config, attn_implementation="eager")).eval()
    randomize(model, generator, norm="orm", matrix=0.3, vector=0.2)
    return model


def record(name: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    model = build(*ENCODERS[name], generator)
    with torch.no_grad():
        inputs, outputs = encoder(model, generator)
    save_model(model, FOLDER / name)
    save_arrays(FOLDER / name, inputs=inputs, outputs=outputs)


if __name__ == "__main__":
    for each in sys.argv[1:] or ENCODERS:
        record(each)
