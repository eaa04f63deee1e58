"""How long is a training step if short sentences share rows?

The whole step as users run it: forward, loss over the vocabulary, backward and AdamW, in bfloat16
with float32 parameters, with donated state, and in BERT with dropout, also of attention weights. It
is measured in steady state. There are 1000 sentences with random lengths, which are uniform between
two numbers. Each step takes the next rows of them. Contenders have the same weights:

``packed``           `models.bert` or `models.decoder` on rows of several sentences, which
                     `models.packing` makes
``packed-segments``  the same, and attention is told how many segments a row has at most
``unpacked``         the same model with one sentence in a row, and a mask of the padding
``listed``           BERT: ``unpacked`` with a ``token_capacity``
``plain``            ``unpacked`` on `jax.nn` and `jax.random`, with keys of the kind "rbg"
``torch``            PyTorch: the same network compiled by Inductor, with
                     scaled_dot_product_attention, autocast and fused AdamW, where it is installed

``tokens`` are those of a step without padding, and ``fill`` is their share. The loss is at all of
them. In a decoder without packing, padding comes after a document, so ``plain`` and ``torch`` need
no mask. The contenders in JAX share a process.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import installed
from benchmarks.plain import PLAIN, bert
from benchmarks.processes import adamw, jax_training, together, torch_training

fo, decoder, packing = (
    installed(f"jax_fastops{name}") for name in ("", ".models.decoder", ".models.packing")
)

RATE, DECAY = 1e-4, 0.01
PACKED = ("packed", "packed-segments")
CONTENDERS = (*PACKED, "unpacked", "listed", "plain", "torch")
VOCABULARY = 30528  # 30522, padded


class Sizes(NamedTuple):
    """The lengths of the shortest and the longest sentence, and batch x length of rows."""

    sentences: int
    lengths: tuple[int, int]
    packed: list[str]
    unpacked: list[str]


SIZES = {
    "bert": Sizes(1000, (128, 384), ["17x512"], ["32x512", "32x384"]),
    "decoder": Sizes(1000, (128, 896), ["8x2048"], ["32x896"]),
}
SMALL = Sizes(8, (16, 16), ["4x32"], ["8x32"])
# With the lengths of BERT, no two that exceed 256 share a row. Their number varies: with 12 seeds,
# the fill of all rows is 0.944 to 0.993, with 0.979 in the median, and 0.983 with this seed.
SEED = 1


def options(add) -> None:
    default = ["packed", "unpacked", "plain", "torch"]
    add("--contenders", nargs="+", choices=CONTENDERS, default=default)
    add("--model", choices=SIZES, default="bert")
    add("--packed", nargs="+", metavar="SHAPE", help="batch x length of packed rows")
    add("--unpacked", nargs="+", metavar="SHAPE", help="batch x length of rows with one sentence")
    add("--layers", type=int, default=8, help="of the decoder")
    add("--dropout", type=float, default=0.1, help="in BERT, also of attention weights")


def sizes(options) -> Sizes:
    return SMALL if options.small else SIZES[options.model]


def rows(options):
    packed, unpacked = options.packed or sizes(options).packed, options.unpacked
    unpacked = unpacked or sizes(options).unpacked
    return [
        {"contender": name, "shape": shape}
        for name in options.contenders
        if (options.model, name) != ("decoder", "listed")
        for shape in (packed if name in PACKED else unpacked)
    ]


def shared(row: dict):
    return row["contender"] != "torch"


def facts(options) -> dict:
    found: dict = {"model": options.model, "lengths": list(sizes(options).lengths)}
    if options.model == "decoder":
        return found | {"layers": options.layers, "what": "-decoder"}
    return found | {"dropout": options.dropout}


def measure_all(options, rows: list[dict]) -> list[dict]:
    if rows[0]["contender"] == "torch":
        return [torch_row(options, **row) for row in rows]
    compilations = [functools.partial(jax_row, options, **row) for row in rows]
    if options.model == "decoder":  # the states of two do not fit into memory
        return [compilation()() for compilation in compilations]
    return [measure() for measure in together(compilations)]


class Rows(NamedTuple):
    """The rows of all steps ``[steps, batch, length]``. ``ids`` are 0 for padding."""

    tokens: np.ndarray
    labels: np.ndarray
    ids: np.ndarray

    def facts(self) -> dict:
        steps, batch, length = self.ids.shape
        tokens = np.count_nonzero(self.ids) / steps
        fill = tokens / (batch * length)
        return {"tokens": round(tokens, 1), "fill": round(fill, 4)}


def data(options, contender: str, shape: str, vocabulary: int) -> Rows:
    """All sentences, in rows in random order. The last step, which is not full, is left out."""
    batch, length = map(int, shape.split("x"))
    rng = np.random.default_rng(SEED)
    shortest, longest = sizes(options).lengths
    counts = rng.integers(shortest, longest + 1, sizes(options).sentences)
    sentences = [rng.integers(0, vocabulary, n, np.int32) for n in counts]
    if options.model == "bert":
        labels = [rng.integers(0, vocabulary, len(each), np.int32) for each in sentences]
    else:
        labels = [np.append(each[1:], np.int32(-1)) for each in sentences]
    found = packing.pack(sentences, length, max_segments=None if contender in PACKED else 1)
    order = rng.permutation(len(found.tokens))
    steps = len(order) // batch
    return Rows(
        *(
            array[order[: steps * batch]].reshape(steps, batch, length)
            for array in (found.tokens, packing.place(found, labels, -1), found.segment_ids)
        )
    )


def config_of(options, contender: str):
    changes: dict = {}
    if contender == "plain" and not (options.model == "bert" and options.dropout):
        changes["attention"] = "xla" if options.small else "cudnn"
    if options.model == "bert":
        base = dataclasses.replace(bert.BASE, vocab_size=VOCABULARY)
        changes |= dict(dropout=options.dropout, attention_dropout=options.dropout)
        return dataclasses.replace(bert.SMALL if options.small else base, **changes)
    if contender == "plain":  # no joined kernels: the gradient of a split would be a concatenation
        changes["tensor_parallel"] = True
    base = decoder.Config(layers=options.layers)
    return dataclasses.replace(decoder.SMALL if options.small else base, **changes)


def bert_loss(options, contender: str, config, all_rows: Rows):
    ops = PLAIN if contender == "plain" else bert.FASTOPS
    kind = "rbg" if contender == "plain" else None
    more: dict = {}
    if contender == "packed-segments":
        attention = functools.partial(fo.qkv_attention, max_segments=int(all_rows.ids.max()))
        ops = ops._replace(qkv_attention=attention)
    if contender == "listed":
        most = int(np.count_nonzero(all_rows.ids, axis=(1, 2)).max())
        more["token_capacity"] = -(-most // 128) * 128

    def loss(params, count, tokens, labels, ids):
        key = jax.random.fold_in(jax.random.key(1, impl=kind), count) if options.dropout else None
        where = dict(segment_ids=ids) if contender in PACKED else dict(mask=ids > 0)
        hidden, _ = bert.apply(params, tokens, config, key=key, ops=ops, **where, **more)
        return bert.masked_lm_loss(params, hidden, labels, config, ops=ops)

    return loss


def decoder_loss(options, contender: str, config, all_rows: Rows):
    del options
    ops = decoder.PLAIN if contender == "plain" else decoder.FASTOPS

    def loss(params, count, tokens, labels, ids):
        del count
        given: dict = dict(labels=labels)
        if contender in PACKED:
            given = dict(segment_ids=ids)
            if contender == "packed-segments":
                given["max_segments"] = int(all_rows.ids.max())
        elif contender == "unpacked":
            given = dict(mask=ids > 0)
        return decoder.loss(params, tokens, config, ops=ops, **given)

    return loss


def jax_row(options, contender: str, shape: str):
    """Compiles, and returns a function that measures."""
    config = config_of(options, contender)
    all_rows = data(options, contender, shape, config.vocab_size)
    of_model = bert_loss if options.model == "bert" else decoder_loss
    loss = of_model(options, contender, config, all_rows)

    def of_step(params, count, *arrays):
        return loss(params, count, *(array[count % len(array)] for array in arrays))

    begin, update = adamw(RATE, DECAY, of_step)

    @jax.jit
    def start():
        if options.model == "decoder":
            return begin(decoder.init(jax.random.key(0), config))
        params = bert.init(jax.random.key(0), config, mlm=True)
        del params["pooler"]  # the loss does not use it
        return begin(params)

    measure = jax_training(options, start, update, [tuple(map(jnp.asarray, all_rows))])
    return lambda: finished(measure(), all_rows)


def torch_row(options, contender: str, shape: str) -> dict:
    import torch

    from benchmarks.torch_models import Bert, Decoder, load, trained

    torch.manual_seed(0)
    config = config_of(options, contender)
    all_rows = data(options, contender, shape, config.vocab_size)
    rates = options.dropout, options.dropout
    model = Bert(config, *rates) if options.model == "bert" else Decoder(config)
    device, loss, optimizer = trained(load(model, config), RATE, DECAY)
    tokens, labels, ids = (torch.from_numpy(array).to(device) for array in all_rows)
    given = [tokens.long(), labels.long()]
    if options.model == "bert":
        given.append((ids > 0)[:, :, None, None, :])
    batches = itertools.cycle(zip(*given, strict=True))
    found = torch_training(options, lambda: loss(*next(batches)), optimizer, [()])
    return finished(found, all_rows)


def finished(found: dict, all_rows: Rows) -> dict:
    facts = all_rows.facts()
    return found | facts | {"tokens_per_s": round(facts["tokens"] / found["ms"] * 1e3)}
