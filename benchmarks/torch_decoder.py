"""A Llama in PyTorch as people write it, with the weights of `models.decoder`."""

import jax
import torch
from torch import nn
from torch.nn import functional

from benchmarks import installed

decoder = installed("jax_fastops.models.decoder")


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner, self.d = config.hidden_size, config.intermediate_size, config.head_dim
        self.input_norm, self.norm = (nn.RMSNorm(width, config.eps) for _ in range(2))
        self.q, self.output = linear(width, config.heads * self.d), linear(width, width)
        self.k, self.v = (linear(width, config.kv_heads * self.d) for _ in range(2))
        self.gate, self.up = (linear(width, inner) for _ in range(2))
        self.down = linear(inner, width)

    def forward(self, x, cos, sin):
        y = self.input_norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, self.d)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """``forward`` is the mean loss."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.eps)
        self.head = linear(config.hidden_size, config.vocab_size)
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("frequencies", config.rope_theta**-half)

    def forward(self, tokens, labels):
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=-1)


def load(model: Decoder, config) -> Decoder:
    """Gives a model the weights of ``decoder.init(jax.random.key(0), config)``."""
    jax.config.update("jax_platforms", "cpu")
    init = jax.jit(decoder.init, static_argnums=1)
    params = jax.device_get(init(jax.random.key(0), config))
    pairs = [
        (model.embeddings, {"table": params["embeddings"]}),
        (model.head, {"table": params["head"]}),
        (model.norm, params["norm"]),
    ]
    for layer, one in zip(model.layers, params["layers"], strict=True):
        pairs += [(getattr(layer, name), part) for name, part in one.items()]
    with torch.no_grad():
        for module, part in pairs:
            for name, value in part.items():
                # A kernel is [in, out], and a weight [out, in].
                module.weight.copy_(torch.tensor(value.T if name == "kernel" else value))
    return model
