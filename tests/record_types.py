"""Makes tests/data/types: tiny models of each type that the checkpoints know, with their outputs.

Each folder has a checkpoint (config.json, model.safetensors), and inputs, outputs and for decoders
greedy tokens after prompts (arrays.safetensors). Needs torch and transformers:
`python tests/record_types.py`, or with the names of recordings.
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

LLAMA = dict(
    vocab_size=19,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=12,
    max_position_embeddings=32,
)


def scaled(rope_type: str, **more) -> dict:
    return LLAMA | dict(
        rope_parameters=dict(rope_type=rope_type, rope_theta=100.0, factor=4.0, **more)
    )


DECODERS = {
    "llama-linear": ("LlamaForCausalLM", scaled("linear")),
    "llama-yarn": (
        "LlamaForCausalLM",
        scaled("yarn", original_max_position_embeddings=8, beta_fast=2.0, mscale=0.7),
    ),
    "qwen2-mixed": (
        "Qwen2ForCausalLM",
        LLAMA
        | dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    ),
    "phi3": ("Phi3ForCausalLM", LLAMA | dict(sliding_window=4, pad_token_id=0)),
    "olmo2": ("Olmo2ForCausalLM", LLAMA | dict(attention_bias=True)),
    "smollm3": (
        "SmolLM3ForCausalLM",
        LLAMA | dict(num_hidden_layers=3, no_rope_layer_interval=2, pad_token_id=0),
    ),
    "gemma": ("GemmaForCausalLM", LLAMA | dict(head_dim=4)),
    "gemma2": (
        "Gemma2ForCausalLM",
        LLAMA
        | dict(head_dim=4, query_pre_attn_scalar=3, sliding_window=3)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        LLAMA
        | dict(num_hidden_layers=4, sliding_window=3)
        | dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=4.0, rope_theta=100.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            )
        ),
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        LLAMA
        | dict(head_dim=4, query_pre_attn_scalar=4, sliding_window=3)
        | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        dict(vocab_size=19, n_embd=8, n_layer=2, n_head=2, n_positions=24, n_inner=12),
    ),
}


def encoder(model, generator) -> tuple[dict, dict]:
    """Inputs with padding on the right, and outputs."""
    mask = padding(torch.tensor([0, 5, 2]), SEQUENCE)
    # Not the tokens of padding, which are 0 or 1.
    tokens = torch.randint(2, model.config.vocab_size, mask.shape, generator=generator)
    tokens = torch.where(mask > 0, tokens, model.config.pad_token_id)
    given = {"input_ids": tokens, "attention_mask": mask}
    found = model(**given, output_hidden_states=True)
    return given, {"hidden": found.hidden_states[-1], "logits": found.logits}


def decoder(model, generator) -> tuple[dict, dict]:
    """Inputs with padding on the left; logits without padding, and greedy tokens after it."""
    tokens = torch.randint(model.config.vocab_size, (3, SEQUENCE), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :2], mask[2, :6] = 0, 0
    given = {"input_ids": tokens, "mask": mask}
    model.generation_config.eos_token_id = None
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    new = model.generate(tokens, attention_mask=mask, **options)[:, SEQUENCE:]
    return given, {"logits": model(tokens).logits, "generated": new}


def build(cls: str, config: dict, generator) -> torch.nn.Module:
    cls = getattr(transformers, cls)
    model = cls(cls.config_class(**config, attn_implementation="eager")).eval()
    randomize(model, generator, norm="orm", matrix=0.3, vector=0.2)
    return model


def record(name: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    record_of = encoder if name in ENCODERS else decoder
    model = build(*(ENCODERS | DECODERS)[name], generator)
    with torch.no_grad():
        inputs, outputs = record_of(model, generator)
    save_model(model, FOLDER / name)
    save_arrays(FOLDER / name, inputs=inputs, outputs=outputs)


if __name__ == "__main__":
    for each in sys.argv[1:] or ENCODERS | DECODERS:
        record(each)
