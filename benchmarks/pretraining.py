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

``--curves N`` trains for N steps on a few batches in turn instead, with a warm-up, and keeps the
losses. Without dropout, the contenders differ in rounding only. How far rounding alone drives two
trainings apart is shown by ``moved``: ``plain`` from weights whose last bits were changed.
"""

import argparse
import dataclasses
import importlib.util
import json

from benchmarks import jobs

RATE, DECAY = 1e-4, 0.01
CONTENDERS = ("ours", "plain", "moved", "torch")
BATCHES = 8  # of a loss curve


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
    what = "-losses" if options.curves else ""
    jobs.run("benchmarks.pretraining", options, rows, what, dropout=options.dropout)


def parse() -> argparse.Namespace:
    parser = jobs.parser("benchmarks.pretraining", __doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "plain", "torch"])
    add("--shapes", nargs="+", default=["32x512", "64x128"], help="batch x length")
    add("--attention", nargs="+", choices=("cudnn", "softmax"), default=["cudnn", "softmax"])
    add("--dropout", type=float, default=0.1)
    add("--curves", type=int, default=0, metavar="N", help="losses of N steps, and no times")
    return parser.parse_args()


def data(shape: str, vocabulary: int, seed: int = 0):
    """Tokens, labels, and which tokens are no padding."""
    import numpy as np

    batch, length = map(int, shape.split("x"))
    rng = np.random.default_rng(seed)
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
    batches = [
        tuple(map(jnp.asarray, data(shape, config.vocab_size, seed)))
        for seed in range(BATCHES if options.curves else 1)
    ]
    warm_up = optax.linear_schedule(0.0, RATE, options.curves // 10)
    optimise = optax.adamw(warm_up if options.curves else RATE, weight_decay=DECAY)

    @jax.jit
    def start():
        params = bert.init(jax.random.key(0), config, mlm=True)
        del params["pooler"]  # the loss does not use it
        if contender == "moved":
            params = jax.tree.map(lambda a: jnp.nextafter(a, jnp.inf), params)
        return params, optimise.init(params), jnp.int32(0)

    def update(state, tokens, labels, inside):
        params, inner, count = state
        key = jax.random.fold_in(jax.random.key(1), count) if config.dropout else None

        def loss(params):
            hidden, _ = bert.apply(params, tokens, config, mask=inside, key=key, ops=ops)
            return bert.masked_lm_loss(params, hidden, labels, config, ops=ops)

        value, grads = jax.value_and_grad(loss)(params)
        changes, inner = optimise.update(grads, inner, params)
        return (optax.apply_updates(params, changes), inner, count + 1), value

    return jobs.jax_training(options, start, update, batches, options.curves)


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=on_cuda)

    def warm_up(step: int) -> float:
        return RATE * min(1.0, step / (options.curves // 10))

    batches = []
    for seed in range(BATCHES if options.curves else 1):
        given = data(shape, config.vocab_size, seed)
        tokens, labels, inside = (torch.from_numpy(a).to(device) for a in given)
        batches.append((tokens.long(), labels.long(), inside[:, None, None, :]))
    return jobs.torch_training(
        options,
        torch.compile(model, dynamic=False),
        optimizer,
        batches,
        options.curves,
        warm_up if options.curves else None,
    )


if __name__ == "__main__":
    main()
