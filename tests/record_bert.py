"""Makes tests/data/bert: small BERTs of transformers, with their outputs and gradients.

Each folder has a checkpoint (config.json, model.safetensors), the gradient of every parameter under
its name (gradients.safetensors), and the inputs and outputs (arrays.safetensors). Needs torch
and transformers: `python tests/record_bert.py`, or with the names of recordings.
"""

import sys
from pathlib import Path

import torch
import transformers
from recorder import padding, randomize, save_arrays, save_model

FOLDER = Path(__file__).parent / "data" / "bert"
COMMON = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)

# A class of transformers, a config, and the batch: its sizes and its optional inputs.
RECORDINGS = {
    "model": (
        transformers.BertModel,
        dict(
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=20,
        ),
        dict(batch=3, sequence=16, mask=True, token_types=True, positions=False),
    ),
    "pretraining": (
        transformers.BertForPreTraining,
        dict(
            vocab_size=43,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=56,
            max_position_embeddings=17,
            type_vocab_size=3,
            hidden_act="gelu_new",
            layer_norm_eps=1e-6,
        ),
        dict(batch=4, sequence=13, mask=True, token_types=True, positions=True),
    ),
    "unmasked": (
        transformers.BertModel,
        dict(
            vocab_size=29,
            hidden_size=40,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=48,
            max_position_embeddings=9,
            type_vocab_size=1,
            hidden_act="relu",
        ),
        dict(batch=2, sequence=9, mask=False, token_types=False, positions=False),
    ),
}
TINY = dict(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=7,
)
TINY_BATCH = dict(batch=3, sequence=7, mask=True, token_types=True, positions=False)
RECORDINGS |= {
    "sequences": (
        transformers.BertForSequenceClassification,
        TINY | dict(num_labels=3),
        TINY_BATCH,
    ),
    "tokens": (
        transformers.BertForTokenClassification,
        TINY | dict(num_labels=5),
        TINY_BATCH | dict(padded=True),
    ),
    "answers": (transformers.BertForQuestionAnswering, TINY, TINY_BATCH),
}


def inputs(
    config, generator, *, batch, sequence, mask, token_types, positions, padded=False
) -> dict:
    def integers(most, *shape):
        return torch.randint(most, shape, generator=generator)

    # Not 0, the padding token: transformers computes no gradient for its embedding.
    given = {"input_ids": 1 + integers(config.vocab_size - 1, batch, sequence)}
    if mask:  # random lengths of 1 or more; the first sequence has no padding
        lengths = integers(sequence, batch) + 1
        given["attention_mask"] = padding(lengths, sequence)
        if padded:
            given["input_ids"] *= given["attention_mask"]
    if token_types:
        given["token_type_ids"] = integers(config.type_vocab_size, batch, sequence)
    if positions:
        given["position_ids"] = integers(config.max_position_embeddings, batch, sequence)
    return given


def outputs(model, given: dict) -> dict[str, torch.Tensor]:
    """The hidden and pooled states, and the logits of the heads if there are any."""
    if isinstance(model, transformers.BertModel):
        found = model(**given)
        return {"hidden": found.last_hidden_state, "pooled": found.pooler_output}
    if not isinstance(model, transformers.BertForPreTraining):
        found = model(**given, output_hidden_states=True)
        names = [name for name in ("logits", "start_logits", "end_logits") if name in found]
        return {"hidden": found.hidden_states[-1]} | {name: found[name] for name in names}
    encoded = model.bert(**given)
    hidden, pooled = encoded.last_hidden_state, encoded.pooler_output
    logits, relationship = model.cls(hidden, pooled)
    return {"hidden": hidden, "pooled": pooled, "logits": logits, "relationship": relationship}


def recorded(model, given: dict, generator) -> tuple[dict, dict, dict]:
    """Outputs, random weights for them, and the gradients of the weighted sum."""
    found = outputs(model, given)
    weights = {name: torch.randn(y.shape, generator=generator) for name, y in found.items()}
    sum((y * weights[name]).sum() for name, y in found.items()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: y.detach() for name, y in found.items()}, weights, gradients


def build(cls, config: dict, generator) -> torch.nn.Module:
    config = transformers.BertConfig(**COMMON, **config, attn_implementation="eager")
    model = cls(config).eval()
    randomize(model, generator, norm="LayerNorm", matrix=0.2, vector=0.1)
    return model


def record(name: str) -> None:
    cls, config, batch = RECORDINGS[name]
    generator = torch.Generator().manual_seed(len(name))
    model = build(cls, config, generator)
    given = inputs(model.config, generator, **batch)
    found, weights, _ = recorded(model, given, generator)
    save_model(model, FOLDER / name)
    with torch.no_grad():
        low = outputs(model.to(torch.bfloat16), given)
    save_arrays(FOLDER / name, inputs=given, outputs=found, weights=weights, bfloat16=low)


if __name__ == "__main__":
    for each in sys.argv[1:] or RECORDINGS:
        record(each)
