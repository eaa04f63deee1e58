"""BERT in PyTorch as people write it, with the weights of `models.bert`."""

import jax
import torch
from torch import nn
from torch.nn import functional

from benchmarks import installed

bert = installed("jax_fastops.models.bert")


class Layer(nn.Module):
    def __init__(self, config, rate: float, attention_rate: float):
        super().__init__()
        width = config.hidden_size
        self.heads, self.rate, self.attention_rate = config.heads, rate, attention_rate
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.output_norm, self.norm = (nn.LayerNorm(width, config.eps) for _ in range(2))

    def forward(self, x, mask):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rate = self.attention_rate if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
        y = self.output(y.transpose(1, 2).flatten(2))
        x = self.output_norm(x + functional.dropout(y, self.rate, self.training))
        y = self.down(functional.gelu(self.up(x)))
        return self.norm(x + functional.dropout(y, self.rate, self.training))


class Bert(nn.Module):
    """The encoder is ``encode``, and the mean loss of the masked-word head is ``forward``.

    The head gets the tokens at ``positions`` only, if these are given.
    """

    def __init__(self, config, rate: float = 0.0, attention_rate: float = 0.0):
        super().__init__()
        width = config.hidden_size
        self.rate = rate
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.positions, width)
        self.token_type = nn.Embedding(config.token_types, width)
        self.norm = nn.LayerNorm(width, config.eps)
        self.layers = nn.ModuleList(
            Layer(config, rate, attention_rate) for _ in range(config.layers)
        )
        self.dense, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, config.eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def encode(self, tokens, mask):
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]] + self.token_type.weight[0]
        x = functional.dropout(self.norm(x), self.rate, self.training)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def forward(self, tokens, labels, mask, positions=None):
        x = self.encode(tokens, mask)
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        x = self.head_norm(functional.gelu(self.dense(x)))
        logits = functional.linear(x, self.word.weight, self.bias).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=-1)


def load(model: Bert, config) -> Bert:
    """Gives a model the weights of ``bert.init(jax.random.key(0), config, mlm=True)``."""
    jax.config.update("jax_platforms", "cpu")
    init = jax.jit(bert.init, static_argnums=1, static_argnames="mlm")
    params = jax.device_get(init(jax.random.key(0), config, mlm=True))
    tables, head = params["embeddings"], params["mlm"]
    pairs = [
        (model.word, {"weight": tables["word"]}),
        (model.position, {"weight": tables["position"]}),
        (model.token_type, {"weight": tables["token_type"]}),
        (model.norm, tables["norm"]),
        (model.dense, head["dense"]),
        (model.head_norm, head["norm"]),
        (model, {"bias": head["bias"]}),
    ]
    for layer, one in zip(model.layers, params["layers"], strict=True):
        pairs += [(getattr(layer, name), part) for name, part in one.items()]
    with torch.no_grad():
        for module, part in pairs:
            for name, value in part.items():
                # A kernel is [in, out], and a weight [out, in].
                value = torch.tensor(value.T if name == "kernel" else value)
                getattr(module, "bias" if name == "bias" else "weight").copy_(value)
    return model
