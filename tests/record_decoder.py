"""Makes tests/data/decoder: small decoders of transformers, with outputs, gradients and tokens.

Each folder has a checkpoint (config.json, model.safetensors), the gradient of the loss by every
parameter under its name (gradients.safetensors), and inputs and outputs (arrays.safetensors).
Needs torch and transformers: `python tests/record_decoder.py`.
"""

from pathlib import Path

import torch
import transformers
from recorder import padding, randomize, save_arrays, save_model

FOLDER = Path(__file__).parent / "data" / "decoder"
NEW = 12  # tokens

# A class of transformers, a config, and the batch: its sizes and its optional inputs.
RECORDINGS = {
    "llama": (
        transformers.LlamaForCausalLM,
        dict(
            vocab_size=37,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=24,
            max_position_embeddings=64,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=100.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        dict(batch=3, sequence=14, mask=True, positions=False),
    ),
    "llama-biases": (
        transformers.LlamaForCausalLM,
        dict(
            vocab_size=23,
            hidden_size=18,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=3,
            intermediate_size=20,
            attention_bias=True,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        dict(batch=2, sequence=9, mask=False, positions=False),
    ),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        dict(
            vocab_size=29,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=6,
            intermediate_size=20,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1000.0),
        ),
        dict(batch=3, sequence=11, mask=True, positions=True),
    ),
    "qwen3-window": (
        transformers.Qwen3ForCausalLM,
        dict(
            vocab_size=19,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=3,
            max_window_layers=0,
        ),
        dict(batch=2, sequence=10, mask=True, positions=False),
    ),
}


def inputs(config, generator, *, batch, sequence, mask, positions) -> dict:
    shape = (batch, sequence)
    given = {"input_ids": torch.randint(config.vocab_size, shape, generator=generator)}
    if mask:  # random lengths of 2 or more; the first sequence has no padding
        lengths = torch.randint(2, sequence + 1, (batch,), generator=generator)
        given["attention_mask"] = padding(lengths, sequence)
    if positions:
        given["position_ids"] = torch.randint(3 * sequence, shape, generator=generator)
    return given


def outputs(model, given: dict) -> dict[str, torch.Tensor]:
    labels = given["input_ids"]
    if "attention_mask" in given:
        labels = labels.masked_fill(given["attention_mask"] == 0, -100)
    found = model(**given, labels=labels)
    return {"logits": found.logits, "loss": found.loss}


def continued(model, given: dict) -> dict[str, torch.Tensor]:
    """Greedy tokens after prompts that are padded on the left, without an end and with one.

    ``whole`` has the tokens after prompts without padding.
    """
    prompt = given["input_ids"]
    mask = torch.ones_like(prompt)
    for row in range(1, len(prompt)):
        mask[row, : 2 * row] = 0
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)

    def new(mask, **more):
        return model.generate(prompt, attention_mask=mask, **options, **more)[:, prompt.shape[1] :]

    whole = new(torch.ones_like(mask), eos_token_id=None)
    free = new(mask, eos_token_id=None)
    end = free[0, NEW // 2]
    ended = new(mask, eos_token_id=int(end))
    ended = torch.nn.functional.pad(ended, (0, NEW - ended.shape[1]))
    return {"mask": mask, "whole": whole, "free": free, "end": end, "ended": ended}


def build(cls, config: dict, generator) -> torch.nn.Module:
    config = cls.config_class(**config, attn_implementation="eager", bos_token_id=None)
    config.eos_token_id = None
    model = cls(config).eval()
    randomize(model, generator, norm="norm", matrix=0.3, vector=0.2)
    return model


def record(name: str) -> None:
    cls, config, batch = RECORDINGS[name]
    generator = torch.Generator().manual_seed(len(name))
    model = build(cls, config, generator)
    given = inputs(model.config, generator, **batch)
    found = outputs(model, given)
    found["loss"].backward()
    save_model(model, FOLDER / name)
    with torch.no_grad():
        tokens = continued(model, given)
        low = outputs(model.to(torch.bfloat16), given)
    save_arrays(FOLDER / name, inputs=given, generated=tokens, outputs=found, bfloat16=low)


if __name__ == "__main__":
    for each in RECORDINGS:
        record(each)
