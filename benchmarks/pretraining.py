"""How long is a step of BERT's pretraining? ``python -m benchmarks.pretraining``

The whole step as users run it: forward, loss over the vocabulary at every position, backward and
AdamW, in bfloat16 with float32 parameters, with dropout and padding, and with donated state. It is
measured in steady state: the wall clock of many steps without waiting between them. Each contender
runs in a process of its own, from the same weights:

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

from benchmarks import jobs

RATE, DECAY = 1e-4, 0.01
CONTENDERS = ("ours", "plain", "torch")


def main() -> None:
    options = parse()
    if options.one:
        measure = torch_row if options.one["contender"] == "torch" else jax_row
        print(json.dumps(measure(options, **options.one)))
        return
    rows = (
        {"contender": name, "shape": shape, "attention": attention}
        for shape in options.shapes
        for attention in options.attention
        for name in options.contenders
        if name != "torch" or importlib.util.find_spec("torch")
    )
    jobs.run("benchmarks.pretraining", options, rows, dropout=options.dropout)


def parse() -> argparse.Namespace:
    parser = jobs.parser("benchmarks.pretraining", __doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    add("--shapes", nargs="+", default=["32x512", "64x128"], help="batch x length")
    add("--attention", nargs="+", choices=("cudnn", "softmax"), default=["cudnn", "softmax"])
    add("--dropout", type=float, default=0.1)
    return parser.parse_args()


def data(shape: str, vocabulary: int):
    """Tokens, labels, and which tokens are no padding."""
    import numpy as np

    batch, length = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, vocabulary, (2, batch, length))
    inside = np.arange(length) < rng.integers(length // 2, length + 1, (batch, 1))
    return tokens.astype(np.int32), np.where(inside, labels, -1).astype(np.int32), inside


def jax_row(options: argparse.Namespace, contender: str, shape: str, attention: str) -> dict:
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks.bert import PLAIN, bert

    config = dataclasses.replace(
        bert.SMALL if options.small else bert.BASE,
        dtype="float32" if options.small else "bfloat16",
        attention="xla" if options.small and attention == "cudnn" else attention,
        dropout=options.dropout,
        attention_dropout=options.dropout if attention == "softmax" else 0.0,
    )
    ops = bert.FASTOPS if contender == "ours" else PLAIN
    tokens, labels, inside = map(jnp.asarray, data(shape, config.vocab_size))
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
    value = first = None

    def step():
        nonlocal state, value, first
        state, value = compiled(state)
        first = value if first is None else first

    def wait():
        jax.block_until_ready((state, value))

    found = jobs.steady(step, wait, options.steps)
    found |= {"first_loss": float(first), "loss": float(value)}
    if memory := compiled.memory_analysis():
        found["temp_bytes"] = memory.temp_size_in_bytes
    if options.profile:
        found |= jobs.attributed(jobs.jax_kernels(step, wait), options.profile)
    return found


def torch_row(options: argparse.Namespace, contender: str, shape: str, attention: str) -> dict:
    import torch

    from benchmarks.torch_bert import Bert, bert, load

    del contender
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config, rate = bert.SMALL if options.small else bert.BASE, options.dropout
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    model = load(Bert(config, rate, rate if attention == "softmax" else 0.0), config).to(device)
    optimise = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=on_cuda)
    given = data(shape, config.vocab_size)
    tokens, labels, inside = (torch.from_numpy(a).to(device) for a in given)
    tokens, labels, mask = tokens.long(), labels.long(), inside[:, None, None, :]
    compiled = torch.compile(model, dynamic=False)
    value = first = None

    def step():
        nonlocal value, first
        with torch.autocast(device, torch.bfloat16, enabled=not options.small):
            loss = compiled(tokens, labels, mask)
        loss.backward()
        optimise.step()
        optimise.zero_grad(set_to_none=True)
        value = loss.detach()
        first = value.clone() if first is None else first

    wait = torch.cuda.synchronize if on_cuda else lambda: None
    found = jobs.steady(step, wait, options.steps)
    found |= {"first_loss": float(first), "loss": float(value)}
    if on_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if options.profile:
        found |= jobs.attributed(jobs.torch_kernels(step, wait), options.profile)
    return found


if __name__ == "__main__":
    main()
