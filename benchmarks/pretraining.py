"""How long is a step of BERT's pretraining? ``python -m benchmarks.pretraining``

The whole step as users run it: forward, loss over the vocabulary, backward and AdamW, in bfloat16
with float32 parameters, with dropout and padding, and with donated state. It is measured in steady
state: the wall clock of many steps without waiting between them. Each contender runs in processes
of its own, from the same weights:

``ours``            `models.bert` with the ops of this package
``plain``           the same model on `jax.nn` and `jax.random`, with keys of the kind "rbg"
``plain-threefry``  the same with keys of the default kind
``plain-flax``      ``plain`` with norms and masks as Flax has them
``torch``           PyTorch: the same network compiled by Inductor, with
                    scaled_dot_product_attention, autocast and fused AdamW, where it is installed

Attention weights are dropped by all contenders at the rate ``--attention-dropout``, or by none. In
JAX, attention is by softmax between two products if they are dropped, and else by cuDNN. PyTorch
chooses its own kernel. The loss is at all ``--positions`` that are not padding, or at 15% of the
length: 76 masked ones of each 512, which are gathered before the head. The vocabulary is padded to
a multiple of 64, as careful users do: products with other sizes are slow.

``--curves N`` trains for N steps on a few batches in turn instead, with a warm-up, and keeps the
losses. Without dropout, the contenders differ in rounding only. How far rounding alone drives two
trainings apart is shown by ``moved``: ``plain`` from weights whose last bits were changed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Callable

from benchmarks import jobs

RATE, DECAY = 1e-4, 0.01
CONTENDERS = ("ours", "plain", "plain-threefry", "plain-flax", "moved", "torch")
MASKED = 0.15  # of the length
VOCABULARY = 30528  # 30522, padded
BATCHES = 8  # of a loss curve


def main() -> None:
    options = parse()
    if options.one:
        print(json.dumps(measured(options)))
        return
    rows = (
        {"contender": name, "shape": shape, "positions": positions, "attention_dropout": rate}
        for shape in options.shapes
        for name in options.contenders
        for positions in options.positions
        for rate in options.attention_dropout
        if name != "torch" or importlib.util.find_spec("torch")
    )

    def shared(row):
        return None if row["contender"] == "torch" else (row["shape"], row["contender"])

    what = "-losses" if options.curves else ""
    jobs.run("benchmarks.pretraining", options, rows, what, shared, dropout=options.dropout)


def measured(options: argparse.Namespace) -> list[dict]:
    if options.one[0]["contender"] == "torch":
        return [torch_row(options, **row) for row in options.one]
    compilations = [functools.partial(jax_row, options, **row) for row in options.one]
    return [measure() for measure in jobs.together(compilations)]


def parse() -> argparse.Namespace:
    parser = jobs.parser("benchmarks.pretraining", __doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "plain", "torch"])
    add("--shapes", nargs="+", default=["32x512", "64x128"], help="batch x length")
    add("--attention-dropout", nargs="+", type=float, default=[0.1, 0.0])
    add("--positions", nargs="+", choices=("all", "masked"), default=["all", "masked"])
    add("--dropout", type=float, default=0.1)
    add("--curves", type=int, default=0, metavar="N", help="losses of N steps, and no times")
    return parser.parse_args()


def data(shape: str, vocabulary: int, positions: str, seed: int = 0) -> list:
    """Tokens, labels, which tokens are not padding, and the positions of labels if not at all."""
    import numpy as np

    batch, length = map(int, shape.split("x"))
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, vocabulary, (2, batch, length), np.int32)
    lengths = rng.integers(length // 2, length + 1, (batch, 1))
    inside = np.arange(length) < lengths
    if positions == "all":
        return [tokens, np.where(inside, labels, -1), inside]
    count = int(MASKED * length)
    chosen = np.stack([np.sort(rng.choice(n, count, replace=False)) for (n,) in lengths])
    return [tokens, np.take_along_axis(labels, chosen, 1), inside, chosen.astype(np.int32)]


def config_of(options: argparse.Namespace, bert, attention_dropout: float):
    attention = "softmax" if attention_dropout else "xla" if options.small else "cudnn"
    rates = dict(dropout=options.dropout, attention_dropout=attention_dropout)
    if options.small:
        return dataclasses.replace(bert.SMALL, attention=attention, **rates)
    return dataclasses.replace(bert.BASE, vocab_size=VOCABULARY, attention=attention, **rates)


def jax_row(
    options: argparse.Namespace,
    contender: str,
    shape: str,
    positions: str,
    attention_dropout: float,
) -> Callable[[], dict]:
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks.bert import FLAX, PLAIN, bert

    config = config_of(options, bert, attention_dropout)
    ops = {"ours": bert.FASTOPS, "plain-flax": FLAX}.get(contender, PLAIN)
    kind = None if contender in ("ours", "plain-threefry") else "rbg"
    batches = [
        tuple(map(jnp.asarray, data(shape, config.vocab_size, positions, seed)))
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

    def update(state, tokens, labels, inside, chosen=None):
        params, inner, count = state
        drops = config.dropout or config.attention_dropout
        key = jax.random.fold_in(jax.random.key(1, impl=kind), count) if drops else None

        def loss(params):
            hidden, _ = bert.apply(params, tokens, config, mask=inside, key=key, ops=ops)
            return bert.masked_lm_loss(params, hidden, labels, config, positions=chosen, ops=ops)

        value, grads = jax.value_and_grad(loss)(params)
        changes, inner = optimise.update(grads, inner, params)
        return (optax.apply_updates(params, changes), inner, count + 1), value

    measure = jobs.jax_training(options, start, update, batches, options.curves)
    return lambda: measure() | {"attention": config.attention}


def torch_row(
    options: argparse.Namespace,
    contender: str,
    shape: str,
    positions: str,
    attention_dropout: float,
) -> dict:
    import torch

    from benchmarks.torch_bert import Bert, bert, load

    del contender
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = config_of(options, bert, attention_dropout)
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    model = load(Bert(config, options.dropout, attention_dropout), config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=on_cuda)

    def warm_up(step: int) -> float:
        return RATE * min(1.0, step / (options.curves // 10))

    batches = []
    for seed in range(BATCHES if options.curves else 1):
        given = data(shape, config.vocab_size, positions, seed)
        tokens, labels, inside, *chosen = (torch.from_numpy(a).to(device) for a in given)
        more = [a.long() for a in chosen]
        batches.append((tokens.long(), labels.long(), inside[:, None, None, :], *more))
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
