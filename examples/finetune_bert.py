"""Fine-tunes a BERT to classify texts, and saves it for transformers.

    pip install '.[train]'
    python examples/finetune_bert.py FOLDER --train train.tsv --test test.tsv --out tuned

FOLDER has a BERT of Hugging Face: ``config.json``, ``model.safetensors`` and ``tokenizer.json``.
``hf download google-bert/bert-base-uncased --local-dir FOLDER`` makes one. A file of texts has a
line for each: the label, a tab, and the text. The labels of the training texts are the classes.

Short texts share rows, so that little of a batch is padding: ``packing`` of ``jax_fastops.models``
puts them there, and the model gives an output for each. A step has about ``--batch`` texts.

The accuracy on the test texts is printed at each checkpoint and at the end. OUT is a folder that
``AutoModelForSequenceClassification`` and ``AutoTokenizer`` of transformers load. ``loop.py``
describes progress, checkpoints and what Ctrl-C does.
"""

import argparse
import functools
import hashlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_fastops as fo
import numpy as np
import optax
from jax_fastops.models import bert, bert_checkpoint, packing
from tokenizers import Tokenizer

import loop

FIXED = ("batch", "length", "rate", "steps", "accumulate", "seed")  # what the losses depend on


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = loop.console()
    job = FineTuning(options)
    console.print(
        f"{len(job.train)} texts of {len(options.classes)} classes, {len(job.test)} for the test; "
        f"{job.config.layers} layers, {job.config.dtype}, {jax.devices()[0].device_kind}",
        highlight=False,
    )
    tokens = job.rows(0).segment_ids
    passes = options.steps * job.size / job.count
    console.print(
        f"{len(tokens)} rows of {job.length} tokens; {(tokens > 0).mean():.1%} is not padding; "
        f"{passes:,.1f} passes over the texts",
        highlight=False,
    )
    if (unknown := job.unknown()) > 0.1:
        console.print(
            f"{unknown:.0%} of the tokens are unknown to the tokenizer: is it the right one?",
            highlight=False,
        )
    state, losses = loop.train(job, console)

    def save(out: Path) -> None:
        names, params = options.classes, state["params"]
        bert_checkpoint.save(out, job.config, params, label_names=names, like=options.folder)

    loop.finish(job, console, losses, save)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = loop.parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a BERT of Hugging Face")
    add("--train", type=Path, required=True, metavar="FILE", help="a label, a tab, a text per line")
    add("--test", type=Path, metavar="FILE", help="likewise (default: each tenth of --train)")
    add("--out", type=Path, metavar="OUT", help="the folder to save to (default: nothing is saved)")
    loop.add_options(add, steps=1000, every=200)
    add("--batch", type=loop.positive, default=32, metavar="N", help="(default: 32)")
    about = "steps per update, which takes the mean of their gradients (default: 1)"
    add("--accumulate", type=loop.positive, default=1, metavar="N", help=about)
    add("--length", type=loop.positive, default=128, metavar="N", help="tokens (default: 128)")
    add("--rate", type=loop.above_zero, default=3e-5, metavar="R", help="(default: 3e-5)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on a CPU)")
    options = parser.parse_args(argv)
    loop.check_options(options, parser)
    if options.steps < 2 * options.accumulate or options.steps % options.accumulate:
        options.error(
            f"--steps is {options.steps}; it must be a multiple of --accumulate, "
            f"{options.accumulate}, for two updates or more"
        )
    options.dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        loop.check_folder(options.folder, "BERT")
        options.train = texts(options.train)
        if options.test is None:
            options.test = options.train[::10]
            del options.train[::10]
        else:
            options.test = texts(options.test)
        if not options.train:
            raise ValueError("--train: there are too few texts to keep some for the test")
    except (OSError, ValueError) as error:
        options.error(str(error))
    options.classes = sorted({label for label, _ in options.train})
    for label, _ in options.test:
        if label not in options.classes:
            short = textwrap.shorten(label, 40)
            options.error(
                f"the label {short!r} is in the test, and not in the training; is it one?"
            )
    options.made_with = {name: getattr(options, name) for name in FIXED}
    digest = hashlib.sha256(repr(options.train).encode()).hexdigest()
    options.made_with |= {"train": digest, "folder": str(options.folder.resolve())}
    return options


def texts(path: Path) -> list[tuple[str, str]]:
    """The labels and the texts of a file."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        label, tab, text = line.partition("\t")
        if not line:
            continue
        if not tab:
            raise ValueError(f"{path}:{number} has no tab between a label and a text")
        found.append((label, text))
    if not found:
        raise ValueError(f"{path} has no texts")
    return found


class Rows(NamedTuple):
    """Rows of texts. ``labels`` ``[rows, segments]`` are -1 where a row has no such segment."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    labels: np.ndarray

    def at(self, index) -> "Rows":
        return Rows(*(array[index] for array in self))


def packed(texts: Sequence[tuple[np.ndarray, int]], length: int) -> Rows:
    """The texts, which are tokens and labels, in as few rows as they need."""
    found = packing.pack([tokens for tokens, _ in texts], length)
    labels = np.full((len(found.tokens), found.segments.max()), -1, np.int32)
    labels[found.rows, found.segments - 1] = [label for _, label in texts]
    return Rows(found.tokens, found.segment_ids, labels)


class FineTuning:
    """The job of the loop. The state is ``{"params", "optimizer", "step"}``."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        try:
            self.tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
            self.config, self.params = bert_checkpoint.load(options.folder, dtype=options.dtype)
        except Exception as error:  # tokenizers has no class of errors
            options.error(str(error).partition("\n")[0])
        self.length = min(options.length, self.config.positions)
        self.tokenizer.enable_truncation(self.length)
        self.tokenizer.no_padding()
        self.train, self.test = (self.encoded(texts) for texts in (options.train, options.test))
        self.rows = functools.lru_cache(maxsize=2)(self._rows)
        self.count = len(self.rows(0).tokens)
        self.size = max(1, round(options.batch * self.count / len(self.train)))
        self.unit, self.units = "texts", self.size * len(self.train) / self.count
        fresh = bert.init(jax.random.key(options.seed), self.config, labels=len(options.classes))
        for head in ("mlm", "nsp", "qa"):  # of pretraining
            self.params.pop(head, None)
        self.params.setdefault("pooler", fresh["pooler"])
        self.params["classifier"] = fresh["classifier"]
        count = options.steps // options.accumulate
        rate = optax.warmup_cosine_decay_schedule(0, options.rate, max(1, count // 10), count)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
        if options.accumulate > 1:  # otherwise it would hold the gradients for nothing
            several = optax.MultiSteps(self.optimizer, options.accumulate)
            self.optimizer = several.gradient_transformation()
        self.abstract = loop.abstract(self.init)

    def encoded(self, texts: list[tuple[str, str]]) -> list[tuple[np.ndarray, int]]:
        classes = {label: number for number, label in enumerate(self.options.classes)}
        found = self.tokenizer.encode_batch([text for _, text in texts])
        return [
            (np.array(e.ids, np.int32), classes[label])
            for e, (label, _) in zip(found, texts, strict=True)
        ]

    def unknown(self) -> float:
        """The share of tokens that stand for what the tokenizer does not know."""
        rows, name = self.rows(0), getattr(self.tokenizer.model, "unk_token", None)
        number = self.tokenizer.token_to_id(name) if name else -1
        return np.mean(rows.tokens[rows.segment_ids > 0] == number)

    def logits(self, params, rows: Rows, key=None) -> jax.Array:
        """``[rows, segments, classes]``."""
        keys = (None, None) if key is None else jax.random.split(key)
        _, pooled = bert.apply(
            params,
            rows.tokens,
            self.config,
            segment_ids=rows.segment_ids,
            max_segments=rows.labels.shape[1],
            key=keys[0],
        )
        if key is not None:
            pooled = fo.dropout(pooled, keys[1], self.config.dropout)
        return pooled @ params["classifier"]["kernel"] + params["classifier"]["bias"]

    def init(self) -> dict:
        params = jax.tree.map(jnp.array, self.params)  # a copy, which the first step may overwrite
        return {"params": params, "optimizer": self.optimizer.init(params), "step": jnp.int32(0)}

    @functools.cached_property
    def update(self):
        def loss(params, rows, key):
            losses = fo.cross_entropy(self.logits(params, rows, key), rows.labels)
            return losses.sum() / (rows.labels >= 0).sum()

        def update(state, batch):
            key = jax.random.fold_in(jax.random.key(self.options.seed), state["step"])
            value, gradients = jax.value_and_grad(loss)(state["params"], batch, key)
            changes, inner = self.optimizer.update(gradients, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], changes)
            return {"params": params, "optimizer": inner, "step": state["step"] + 1}, value

        abstract = self.abstract, self.batch(0)
        return jax.jit(update, donate_argnums=0).lower(*abstract).compile()

    def _rows(self, epoch: int) -> Rows:
        """All texts. In each pass over them, others share a row, and the rows are in other order.

        There are as many rows in each: their number depends on the lengths only.
        """
        rng = np.random.default_rng((self.options.seed, epoch))
        found = packed([self.train[i] for i in rng.permutation(len(self.train))], self.length)
        return found.at(rng.permutation(len(found.tokens)))

    def batch(self, step: int) -> Rows:
        places = (divmod(step * self.size + row, self.count) for row in range(self.size))
        rows = [self.rows(epoch).at(row) for epoch, row in places]
        return Rows(*map(np.stack, zip(*rows, strict=True)))

    @functools.cached_property
    def _logits(self):
        return jax.jit(self.logits)

    def evaluate(self, state: dict) -> dict[str, float]:
        every = packed(self.test, self.length)
        count, right = len(every.tokens), 0
        for start in range(0, count, self.size):
            at = np.arange(start, start + self.size)
            rows = every.at(at % count)  # so that there is one program
            found = np.asarray(self._logits(state["params"], rows)).argmax(-1)
            right += int(((found == rows.labels) & (at < count)[:, None]).sum())
        return {"accuracy": right / len(self.test)}


if __name__ == "__main__":
    sys.exit(main())
