"""The models in PyTorch as people write them, with the weights of those in JAX."""

import jax
import torch
from torch import nn
from torch.nn import functional

from benchmarks import installed

bert, decoder = (installed(f"jax_fastops.models.{name}") for name in ("bert", "decoder"))


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def trained(model: nn.Module, rate: float, decay: float) -> tuple:
    """The device, the compiled model on it, and AdamW."""
    torch.set_float32_matmul_precision("high")
    model, fused = model.to(device()), torch.cuda.is_available()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=fused)
    return device(), torch.compile(model, dynamic=False), optimizer


def load(model: nn.Module, config) -> nn.Module:
    """Gives a model the weights that JAX initializes with the key 0."""
    jax.config.update("jax_platforms", "cpu")
    init = bert.init if isinstance(model, Bert) else decoder.init
    more = {"mlm": True} if init is bert.init else {}
    start = jax.jit(init, static_argnums=1, static_argnames=tuple(more))
    params = jax.device_get(start(jax.random.key(0), config, **more))
    pairs = model.parts(params)
    for layer, one in zip(model.layers, params["layers"], strict=True):
        pairs += [(getattr(layer, name), part) for name, part in one.items()]
    with torch.no_grad():
        for module, part in pairs:
            for name, value in part.items():
                # A kernel is [in, out], and a weight [out, in].
                value = torch.tensor(value.T if name == "kernel" else value)
                getattr(module, "bias" if name == "bias" else "weight").copy_(value)
    return model


class BertLayer(nn.Module):
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
    """``forward`` is the mean loss of the masked-word head, of the tokens at ``positions``."""

    def __init__(self, config, rate: float = 0.0, attention_rate: float = 0.0):
        super().__init__()
        width = config.hidden_size
        self.rate = rate
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.positions, width)
        self.token_type = nn.Embedding(config.token_types, width)
        self.norm = nn.LayerNorm(width, config.eps)
        self.layers = nn.ModuleList(
            BertLayer(config, rate, attention_rate) for _ in range(config.layers)
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

    def parts(self, params: dict) -> list[tuple]:
        tables, head = params["embeddings"], params["mlm"]
        words = {name: {"weight": tables[name]} for name in ("word", "position", "token_type")}
        named = words | {"norm": tables["norm"], "dense": head["dense"], "head_norm": head["norm"]}
        pairs = [(getattr(self, name), part) for name, part in named.items()]
        return [*pairs, (self, {"bias": head["bias"]})]


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class DecoderLayer(nn.Module):
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
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
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

    def parts(self, params: dict) -> list[tuple]:
        tables = [(getattr(self, n), {"table": params[n]}) for n in ("embeddings", "head")]
        return [*tables, (self.norm, params["norm"])]


class Generation:
    """Continues prompts with a decoder: a static cache, and a step in a CUDA graph.

    Inductor compiles the step, unless it is ``eager``.
    """

    def __init__(self, model: Decoder, config, batch: int, capacity: int, dtype, eager: bool):
        self.model = model
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        self.cache = [
            [torch.zeros(shape, dtype=dtype, device=device()) for _ in range(2)]
            for _ in range(config.layers)
        ]
        self.place = torch.arange(capacity, device=device())
        if eager:
            self.step = self.captured(batch) if device() == "cuda" else self.forward
            return
        for tensor in (t for pair in self.cache for t in pair):
            torch._dynamo.mark_static_address(tensor)  # or there are no CUDA graphs
        self.step = torch.compile(self.forward, mode="reduce-overhead", dynamic=False)

    def captured(self, batch: int):
        """The step as a CUDA graph of PyTorch's own kernels."""
        tokens = torch.zeros((batch, 1), dtype=torch.long, device=device())
        at, graph = self.place[:1].clone(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.forward(tokens, at)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                new = self.forward(tokens, at)

        def step(given, place):
            tokens.copy_(given)
            at.copy_(place)
            graph.replay()
            return new

        return step

    def forward(self, tokens, at):
        """The next tokens, after the tokens at the positions ``at``."""
        model = self.model
        angles = at[:, None] * model.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        mask = self.place[None] <= at[:, None]
        x = model.embeddings(tokens)
        for layer, (keys, values) in zip(model.layers, self.cache, strict=True):
            y = layer.input_norm(x)
            q, k, v = (
                f(y).unflatten(-1, (-1, layer.d)).transpose(1, 2)
                for f in (layer.q, layer.k, layer.v)
            )
            q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            y = functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=True
            )
            x = x + layer.output(y.transpose(1, 2).flatten(2))
            y = layer.norm(x)
            x = x + layer.down(functional.silu(layer.gate(y)) * layer.up(y))
        return model.head(model.norm(x[:, -1])).argmax(-1, keepdim=True)

    def __call__(self, tokens, count: int):
        at = self.place[: tokens.shape[1]]
        new = [self.forward(tokens, at)]
        for _ in range(count - 1):
            at = at[-1:] + 1
            new.append(self.step(new[-1], at).clone())
        return torch.cat(new, 1)


def resnet50(batch: int, size: int, rate: float, momentum: float) -> tuple:
    """A model that gives the loss of an image batch, SGD, and the batch."""
    import torchvision

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50(weights=None)
    model = model.to(device(), memory_format=torch.channels_last)
    optimise = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, foreach=True)
    images = torch.randn((batch, 3, size, size), device=device())
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=device())

    def loss(images, labels):
        return functional.cross_entropy(model(images), labels)

    return torch.compile(loss, dynamic=False), optimise, [images, labels]
