"""How long is a step of BERT's pretraining? ``python -m benchmarks.pretraining``

The whole step as users run it: forward, loss over the vocabulary at every position, backward and
AdamW, in bfloat16 with float32 parameters, with dropout and padding, and with donated state. It is
measured in steady state: the wall clock of many steps without waiting between them. Each contender
runs in a process of its own:

``ours``   `models.bert` with the ops of this package
``plain``  the same model on `jax.nn` and `jax.random`
``torch``  PyTorch: the same network compiled by Inductor, with scaled_dot_product_attention,
           autocast and fused AdamW, where PyTorch is installed

``cudnn`` and ``softmax`` are the kinds of attention; attention weights are dropped only with
``softmax``. PyTorch chooses its own kernel.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import RESULTS

RATE, DECAY = 1e-4, 0.01
WARM_UP = 5  # steps
CONTENDERS = ("ours", "plain", "torch")


def main() -> None:
    options = parse()
    if options.one:
        print(json.dumps(measure(options)))
        return
    from benchmarks import environment
    from benchmarks.report import write

    rows = []
    for shape in options.shapes:
        for attention in options.attention:
            for name in options.contenders:
                rows.append(one(options, name, shape, attention))
                print(json.dumps(rows[-1]), flush=True)
    results = {
        "hardware": environment.hardware(),
        "versions": environment.versions("optax", "torch"),
        "dropout": options.dropout,
        "steps": options.steps,
        "rows": rows,
    }
    write(options.out / f"pretraining-{environment.slug(results)}.json", results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretraining", description=__doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    add("--shapes", nargs="+", default=["32x512", "64x128"], help="batch x length")
    add("--attention", nargs="+", choices=("cudnn", "softmax"), default=["cudnn", "softmax"])
    add("--dropout", type=float, default=0.1)
    add("--steps", type=int, default=30)
    add("--small", action="store_true", help="a small model, for a test")
    add("--profile", type=int, default=0, metavar="N", help="the N kernels that take longest")
    add("--out", type=Path, default=RESULTS)
    add("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def one(options: argparse.Namespace, name: str, shape: str, attention: str) -> dict:
    """The row of a contender, from a process of its own."""
    row = {"contender": name, "shape": shape, "attention": attention}
    if name == "torch" and importlib.util.find_spec("torch") is None:
        return row | {"error": "PyTorch is not installed"}
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m"]
    command += ["benchmarks.pretraining", "--one", name, "--shapes", shape]
    command += ["--attention", attention, "--dropout", str(options.dropout)]
    command += ["--steps", str(options.steps), "--profile", str(options.profile)]
    command += ["--small"] * options.small
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        return row | {"error": found.stderr.strip()[-400:]}
    return row | json.loads(found.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> dict:
    batch, length = map(int, options.shapes[0].split("x"))
    make = torch_step if options.one == "torch" else jax_step
    step, wait, more = make(options, batch, length)
    for _ in range(WARM_UP):
        loss = step()
    wait()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        wait()
        times.append((time.perf_counter() - begin) / options.steps)
    found = {"ms": statistics.median(times) * 1e3, "all_ms": [t * 1e3 for t in times]}
    return found | more() | {"loss": float(loss)}


def data(options: argparse.Namespace, batch: int, length: int, vocabulary: int):
    """Tokens, labels, and which tokens are no padding."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, vocabulary, (2, batch, length))
    inside = np.arange(length) < rng.integers(length // 2, length + 1, (batch, 1))
    return tokens.astype(np.int32), np.where(inside, labels, -1).astype(np.int32), inside


# ---- JAX -----------------------------------------------------------------------------------------


def jax_step(options: argparse.Namespace, batch: int, length: int):
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks import profile
    from benchmarks.bert import PLAIN
    from jax_fastops.models import bert

    attention = options.attention[0]
    config = dataclasses.replace(
        bert.SMALL if options.small else bert.BASE,
        dtype="float32" if options.small else "bfloat16",
        attention="xla" if options.small and attention == "cudnn" else attention,
        dropout=options.dropout,
        attention_dropout=options.dropout if attention == "softmax" else 0.0,
    )
    ops = bert.FASTOPS if options.one == "ours" else PLAIN
    tokens, labels, inside = map(jnp.asarray, data(options, batch, length, config.vocab_size))
    optimise = optax.adamw(RATE, weight_decay=DECAY)

    @jax.jit
    def start():
        params = bert.init(jax.random.key(0), config, mlm=True)
        del params["pooler"]  # the loss does not use it
        return params, optimise.init(params), jnp.int32(0)

    def update(state):
        params, inner, count = state
        key = jax.random.fold_in(jax.random.key(1), count) if config.dropout else None

        def loss(params):
            hidden, _ = bert.apply(params, tokens, config, mask=inside, key=key, ops=ops)
            return bert.masked_lm_loss(params, hidden, labels, config, ops=ops)

        value, grads = jax.value_and_grad(loss)(params)
        changes, inner = optimise.update(grads, inner, params)
        return (optax.apply_updates(params, changes), inner, count + 1), value

    state = jax.block_until_ready(start())
    compiled = jax.jit(update, donate_argnums=0).lower(state).compile()

    def step():
        nonlocal state
        state, value = compiled(state)
        return value

    def more() -> dict:
        memory = compiled.memory_analysis()
        found = {} if memory is None else {"temp_bytes": memory.temp_size_in_bytes}
        if not options.profile:
            return found
        times: dict[str, list[float]] = {}
        for kernel in profile.kernels(lambda: jax.block_until_ready([step() for _ in range(3)])):
            times.setdefault(kernel.name[:100], []).append(kernel.duration * 1e-6 / 3)
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))[: options.profile]
        busy = sum(map(sum, times.values()))
        kernels = [[name, round(sum(each), 4), len(each) / 3] for name, each in longest]
        return found | {"busy_ms": busy, "kernels": kernels}

    return step, lambda: jax.block_until_ready(state), more


# ---- PyTorch -------------------------------------------------------------------------------------


def torch_step(options: argparse.Namespace, batch: int, length: int):
    import torch
    from torch import nn
    from torch.nn import functional

    from jax_fastops.models import bert

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    config, rate = bert.SMALL if options.small else bert.BASE, options.dropout
    width, heads = config.hidden_size, config.heads
    device = "cuda" if torch.cuda.is_available() else "cpu"
    in_attention = rate if options.attention[0] == "softmax" else 0.0

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up = nn.Linear(width, config.intermediate_size)
            self.down = nn.Linear(config.intermediate_size, width)
            self.norms = nn.ModuleList(nn.LayerNorm(width, config.eps) for _ in range(2))

        def forward(self, x, mask):
            split = self.qkv(x).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(
                *split, attn_mask=mask, dropout_p=in_attention
            )
            y = self.output(y.transpose(1, 2).flatten(2))
            x = self.norms[0](x + functional.dropout(y, rate))
            y = self.down(functional.gelu(self.up(x)))
            return self.norms[1](x + functional.dropout(y, rate))

    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            self.word = nn.Embedding(config.vocab_size, width)
            self.position = nn.Embedding(config.positions, width)
            self.kind = nn.Embedding(config.token_types, width)
            self.norm = nn.LayerNorm(width, config.eps)
            self.layers = nn.ModuleList(Layer() for _ in range(config.layers))
            self.dense, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, config.eps)
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))

        def forward(self, tokens, labels, mask):
            x = self.word(tokens) + self.position.weight[: tokens.shape[1]] + self.kind.weight[0]
            x = functional.dropout(self.norm(x), rate)
            for layer in self.layers:
                x = layer(x, mask)
            x = self.head_norm(functional.gelu(self.dense(x)))
            logits = functional.linear(x, self.word.weight, self.bias).flatten(0, 1)
            return functional.cross_entropy(logits, labels.flatten(), ignore_index=-1)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Bert().to(device)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    fused = device == "cuda"
    optimise = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused)
    given = data(options, batch, length, config.vocab_size)
    tokens, labels, inside = (torch.from_numpy(a).to(device) for a in given)
    tokens, labels, mask = tokens.long(), labels.long(), inside[:, None, None, :]
    compiled = torch.compile(model)

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens, labels, mask)
        loss.backward()
        optimise.step()
        optimise.zero_grad(set_to_none=True)
        return loss.detach()

    wait = torch.cuda.synchronize if fused else lambda: None
    return step, wait, lambda: {"peak_bytes": torch.cuda.max_memory_allocated() if fused else 0}


if __name__ == "__main__":
    main()
