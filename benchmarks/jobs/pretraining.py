"""How long is a step of BERT's pretraining?

The whole step as users run it: forward, loss over the vocabulary, backward and AdamW, in bfloat16
with float32 parameters, with dropout and padding, and with donated state. It is measured in steady
state: the wall clock of many steps without waiting between them. Each contender runs in processes
of its own, from the same weights:

``ours``            `models.bert` with the ops of this package
``plain``           the same model on `jax.nn` and `jax.random`, with keys of the kind "rbg"
``autofuse``        ``plain`` through ``autofuse``, with dropout
``plain-threefry``  the same with keys of the default kind
``plain-flax``      ``plain`` with norms and masks as Flax has them
``torch``           PyTorch: the same network compiled by Inductor, with
                    scaled_dot_product_attention, autocast and fused AdamW, where it is installed

Attention weights are dropped by all contenders at the rate ``--attention-dropout``, or by none. In
JAX, attention is by two products if they are dropped, and else by cuDNN. The loss is at all
``--positions`` that are not padding, or at 15% of the length: 76 masked ones of each 512, which are
gathered before the head. The vocabulary is padded to a multiple of 64, as careful users do.

``--curves N`` trains for N steps on a few batches in turn instead, with a warm-up, and keeps the
losses. Without dropout, the contenders differ in rounding only. How far rounding alone drives two
trainings apart is shown by ``moved``: ``plain`` from weights whose last bits were changed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.cases import fo
from benchmarks.plain import FLAX, PLAIN, bert
from benchmarks.processes import adamw, jax_training, together, torch_training

RATE, DECAY = 1e-4, 0.01
CONTENDERS = ("ours", "plain", "autofuse", "plain-threefry", "plain-flax", "moved", "torch")
MASKED = 0.15  # of the length
VOCABULARY = 30528  # 30522, padded
BATCHES = 8  # of a loss curve


def options(add) -> None:
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "plain", "torch"])
    add("--shapes", nargs="+", default=["32x512", "64x128"], help="batch x length")
    add("--attention-dropout", nargs="+", type=float, default=[0.1, 0.0])
    add("--positions", nargs="+", choices=("all", "masked"), default=["all", "masked"])
    add("--dropout", type=float, default=0.1)
    add("--curves", type=int, default=0, metavar="N", help="losses of N steps, and no times")


def rows(options):
    return [
        {"contender": name, "shape": shape, "positions": positions, "attention_dropout": rate}
        for shape in options.shapes
        for name in options.contenders
        for positions in options.positions
        for rate in options.attention_dropout
    ]


def shared(row: dict):
    return row["contender"] != "torch" and (row["shape"], row["contender"])


def facts(options) -> dict:
    return {"dropout": options.dropout, "what": "-losses" if options.curves else ""}


def measure_all(options, rows: list[dict]) -> list[dict]:
    if rows[0]["contender"] == "torch":
        return [torch_row(options, **row) for row in rows]
    compilations = [functools.partial(jax_row, options, **row) for row in rows]
    return [measure() for measure in together(compilations)]


def data(shape: str, vocabulary: int, positions: str, seed: int = 0) -> list[np.ndarray]:
    """Tokens, labels, which tokens are not padding, and the positions of labels if not at all."""
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


def network(options, attention_dropout: float, positions: str, shape: str) -> tuple:
    """The configuration, and the batches."""
    attention = "softmax" if attention_dropout else "xla" if options.small else "cudnn"
    small = bert.SMALL if options.small else dataclasses.replace(bert.BASE, vocab_size=VOCABULARY)
    rates = dict(dropout=options.dropout, attention_dropout=attention_dropout)
    config = dataclasses.replace(small, attention=attention, **rates)
    seeds = range(BATCHES if options.curves else 1)
    return config, [data(shape, config.vocab_size, positions, seed) for seed in seeds]


def jax_row(options, contender: str, shape: str, positions: str, attention_dropout: float):
    """Compiles, and returns a function that measures."""
    config, batches = network(options, attention_dropout, positions, shape)
    batches = [tuple(map(jnp.asarray, batch)) for batch in batches]
    ops = {"ours": bert.FASTOPS, "plain-flax": FLAX}.get(contender, PLAIN)
    kind = None if contender in ("ours", "plain-threefry") else "rbg"

    def loss(params, count, tokens, labels, inside, chosen=None):
        drops = config.dropout or config.attention_dropout
        key = jax.random.fold_in(jax.random.key(1, impl=kind), count) if drops else None
        hidden, _ = bert.apply(params, tokens, config, mask=inside, key=key, ops=ops)
        return bert.masked_lm_loss(params, hidden, labels, config, positions=chosen, ops=ops)

    if contender == "autofuse":
        loss = fo.autofuse(loss, dropout=True)
    warm_up = optax.linear_schedule(0.0, RATE, options.curves // 10)
    begin, update = adamw(warm_up if options.curves else RATE, DECAY, loss)

    @jax.jit
    def start():
        params = bert.init(jax.random.key(0), config, mlm=True)
        del params["pooler"]  # the loss does not use it
        if contender == "moved":
            params = jax.tree.map(lambda a: jnp.nextafter(a, jnp.inf), params)
        return begin(params)

    measure = jax_training(options, start, update, batches, options.curves)
    return lambda: measure() | {"attention": config.attention}


def torch_row(options, contender: str, shape: str, positions: str, attention_dropout: float):
    import torch

    from benchmarks.torch_models import Bert, load, trained

    del contender
    torch.manual_seed(0)
    config, batches = network(options, attention_dropout, positions, shape)
    device, loss, optimizer = trained(
        load(Bert(config, options.dropout, attention_dropout), config), RATE, DECAY
    )

    def warm_up(step: int) -> float:
        return RATE * min(1.0, step / (options.curves // 10))

    def moved(tokens, labels, inside, *chosen):
        tokens, labels, *chosen = (
            torch.from_numpy(a).to(device).long() for a in (tokens, labels, *chosen)
        )
        return tokens, labels, torch.from_numpy(inside).to(device)[:, None, None, :], *chosen

    batches = [moved(*batch) for batch in batches]
    rate = warm_up if options.curves else None
    return torch_training(options, loss, optimizer, batches, options.curves, rate)
