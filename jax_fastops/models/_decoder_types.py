"""Hugging Face's model types that are a :class:`jax_fastops.models.decoder.Config`."""

from typing import Any, Literal, NamedTuple

from jax_fastops.models._checkpoint import FIELDS


class ModelType(NamedTuple):
    """How a type of ``transformers`` writes a network of ``decoder``.

    Attributes:
      architecture: the name of its class.
      defaults: what ``transformers`` takes for a key that config.json does not have.
      fields: the fields of a Config, and their names in config.json.
      fixed: fields of a Config that the type's code fixes.
      supported: options that must have these values. Others mean another network.
      activation: the key of the activation.
      windows: the layers that a sliding window is for: none; all; ``"typed"``: those that
        ``layer_types`` names; ``"option"``: those that it names, with ``use_sliding_window``.
      ropes: the kinds of rotary frequencies.
      modules: PyTorch's modules, as ``_checkpoint.leaves_of`` takes them.
      layer_module: the module of all layers.
      prefix: what the names of tensors begin with. Some files leave it out.
      packed: modules whose tensors are those of others, one after another.
      transposed: whether kernels are [out, in].
      unit_offset: whether the scales of norms are stored less 1.
    """

    architecture: str
    defaults: dict[str, Any]
    fields: dict[str, str]
    fixed: dict[str, Any]
    supported: dict[str, Any]
    modules: dict[str, Any]
    activation: str = "hidden_act"
    windows: Literal["none", "all", "typed", "option"] = "none"
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    layer_module: str = "model.layers"
    prefix: str = ""
    packed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    transposed: bool = True
    unit_offset: bool = False


_FIELDS = FIELDS | {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_MODULES: dict[str, Any] = {
    "embeddings": "model.embed_tokens",
    "layers": {
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "output_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "down_norm": "post_feedforward_layernorm",
    },
    "norm": "model.norm",
    "head": "lm_head",
}
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
    "hidden_act": "silu",
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
_LLAMA = ModelType(
    architecture="LlamaForCausalLM",
    defaults=_ALL | {"attention_bias": False},
    fields=_FIELDS,
    fixed={},
    supported={"mlp_bias": False},
    modules=_MODULES,
)
_QWEN2 = _LLAMA._replace(
    architecture="Qwen2ForCausalLM",
    defaults=_QWEN,
    fixed={"qkv_bias": True},
    windows="option",
)
_GEMMA2 = _LLAMA._replace(
    architecture="Gemma2ForCausalLM",
    defaults=_ALL
    | {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    fields=_FIELDS
    | {
        "attention_softcap": "attn_logit_softcapping",
        "logits_softcap": "final_logit_softcapping",
    },
    fixed={"norms": "both", "scaled_embeddings": True},
    supported={"use_bidirectional_attention": False},
    modules=_MODULES | {"layers": _MODULES["layers"] | {"norm": "pre_feedforward_layernorm"}},
    activation="hidden_activation",
    windows="typed",
    unit_offset=True,
)
TYPES: dict[str, ModelType] = {
    "llama": _LLAMA,
    "mistral": _LLAMA._replace(
        architecture="MistralForCausalLM",
        defaults=_ALL
        | {
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windows="all",
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2._replace(
        architecture="Qwen3ForCausalLM",
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        fixed={"qk_norm": True},
    ),
    "phi3": _LLAMA._replace(
        architecture="Phi3ForCausalLM",
        defaults=_ALL
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        supported={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        windows="all",
        ropes=("default",),
        packed=(
            ("self_attn.qkv_proj", tuple(f"self_attn.{part}_proj" for part in "qkv")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ),
    ),
    "olmo2": _LLAMA._replace(
        architecture="Olmo2ForCausalLM",
        defaults=_ALL | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"norms": "post", "qk_norm": True},
        supported={},
    ),
    "olmo3": _LLAMA._replace(
        architecture="Olmo3ForCausalLM",
        defaults=_ALL
        | {
            "vocab_size": 50304,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
        },
        fixed={"norms": "post", "qk_norm": True},
        supported={},
        windows="typed",
    ),
    "smollm3": _LLAMA._replace(
        architecture="SmolLM3ForCausalLM",
        defaults=_ALL
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "attention_bias": False,
            "no_rope_layer_interval": 4,
        },
        windows="option",
    ),
    "gemma": _LLAMA._replace(
        architecture="GemmaForCausalLM",
        defaults=_ALL
        | {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
        },
        fixed={"scaled_embeddings": True},
        supported={"use_bidirectional_attention": False},
        unit_offset=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA2.defaults
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        fields=_FIELDS,
        fixed={"norms": "both", "qk_norm": True, "scaled_embeddings": True},
        supported={
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gpt2": ModelType(
        architecture="GPT2LMHeadModel",
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
        },
        fields={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "intermediate_size": "n_inner",
            "init_range": "initializer_range",
            "eps": "layer_norm_epsilon",
            "tied": "tie_word_embeddings",
            "positions": "n_positions",
        },
        fixed={"qkv_bias": True, "output_bias": True},
        supported={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        activation="activation_function",
        modules={
            "embeddings": "transformer.wte",
            "positions": "transformer.wpe",
            "layers": {
                "input_norm": "ln_1",
                "q": "attn.q",
                "k": "attn.k",
                "v": "attn.v",
                "output": "attn.c_proj",
                "norm": "ln_2",
                "up": "mlp.c_fc",
                "down": "mlp.c_proj",
            },
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layer_module="transformer.h",
        prefix="transformer.",
        packed=(("attn.c_attn", ("attn.q", "attn.k", "attn.v")),),
        transposed=False,
    ),
}
