"""Trains a ResNet on a folder of images, and resumes after a kill.

    pip install '.[train]'
    python examples/train_images.py --train photos/train --test photos/test --out OUT

A folder of images has a folder for each class, with JPEG or PNG files. grain reads them in several
threads, in an order that depends only on the seed, so a run that resumes sees the same images. The
accuracy on the test images is printed at each checkpoint and at the end. OUT is a folder for
``model.safetensors``, with the names of torchvision and timm; ``resnet_checkpoint`` loads it.
``loop.py`` describes progress, checkpoints and what Ctrl-C does.
"""

import argparse
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import jax_fastops as fo
import numpy as np
import optax
from jax_fastops.models import resnet, resnet_checkpoint
from PIL import Image

import loop

CONFIGS = {"small": resnet.SMALL, "18": resnet.RESNET18, "50": resnet.RESNET50}
FIXED = ("config", "batch", "size", "rate", "steps", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = loop.console()
    job = Images(options)
    console.print(
        f"{len(options.train)} images of {len(options.classes)} classes, {len(options.test)} for "
        f"the test; ResNet {options.config}, {options.dtype}, {jax.devices()[0].device_kind}",
        highlight=False,
    )
    try:
        state, losses = loop.train(job, console)
    except Unreadable as error:
        options.error(str(error))

    def save(out: Path) -> None:
        resnet_checkpoint.save(out, job.config, state["params"], state["statistics"])

    loop.finish(job, console, losses, save)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = loop.parser(__doc__)
    add = parser.add_argument
    add("--train", type=Path, required=True, metavar="DIR", help="a folder for each class")
    add("--test", type=Path, required=True, metavar="DIR", help="likewise")
    add("--out", type=Path, metavar="OUT", help="the folder to save to (default: nothing is saved)")
    loop.add_options(add, steps=5000, every=500)
    add("--config", choices=CONFIGS, default="18", help="of ResNet (default: 18)")
    add("--batch", type=loop.positive, default=128, metavar="N", help="(default: 128)")
    add("--size", type=loop.positive, default=224, metavar="N", help="of an image (default: 224)")
    add("--rate", type=loop.above_zero, default=0.1, metavar="R", help="(default: 0.1)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on a CPU)")
    options = parser.parse_args(argv)
    loop.check_options(options, parser)
    options.dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    options.made_with = {name: getattr(options, name) for name in FIXED}
    try:
        options.classes = sorted(p.name for p in options.train.iterdir() if p.is_dir())
        options.train, options.test = (
            files(folder, options.classes) for folder in (options.train, options.test)
        )
    except (OSError, ValueError) as error:
        options.error(str(error))
    if len(options.train) < options.batch:
        options.error(f"--batch is {options.batch}; there are {len(options.train)} images")
    digest = hashlib.sha256(repr([str(path) for path, _ in options.train]).encode())
    options.made_with["train"] = digest.hexdigest()
    return options


def files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """The images of a folder, with the numbers of their classes."""
    found = [
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in loop.IMAGES
    ]
    if not found:
        names = ", ".join(classes) or "none"
        raise ValueError(
            f"{folder} has no images ({', '.join(loop.IMAGES)}) in the folders of the classes, "
            f"which are those in --train: {names}"
        )
    return found


class Unreadable(Exception):
    """An image cannot be read."""


def read(row: tuple[Path, int], size: int, rng: np.random.Generator | None = None) -> tuple:
    """An image [size, size, 3] from 0 to 1, and its class. With ``rng``, a random part of it."""
    path, label = row
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: a broken PNG
        raise Unreadable(f"{path} cannot be read: {error}") from None
    width, height = image.size
    edge = min(width, height)
    if rng is not None:
        edge = max(1, round(edge * rng.uniform(0.6, 1.0)))
    free = np.array([width - edge, height - edge])
    left, top = free // 2 if rng is None else rng.integers(free + 1)
    part = image.resize((size, size), box=(left, top, left + edge, top + edge))
    pixels = np.asarray(part, np.float32) / 255
    if rng is not None and rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    return pixels, np.int32(label)


class Images:
    """The job of the loop. The state has the parameters, the statistics and the optimizer's."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.unit, self.units = "images", options.batch
        self.config = dataclasses.replace(
            CONFIGS[options.config], classes=len(options.classes), channels=3, dtype=options.dtype
        )
        rate = optax.warmup_cosine_decay_schedule(
            0, options.rate, max(1, options.steps // 20), options.steps
        )
        self.optimizer = optax.chain(
            optax.add_decayed_weights(5e-5), optax.sgd(rate, momentum=0.9, nesterov=True)
        )
        self.reader, self.next = None, 0
        self.abstract = loop.abstract(self.init)

    def init(self) -> dict:
        params, statistics = resnet.init(jax.random.key(self.options.seed), self.config)
        return {
            "params": params,
            "statistics": statistics,
            "optimizer": self.optimizer.init(params),
        }

    @functools.cached_property
    def update(self):
        def loss(params, statistics, images, labels):
            logits, statistics = resnet.apply(params, statistics, images, self.config, train=True)
            return fo.cross_entropy(logits, labels).mean(), statistics

        def update(state, batch):
            (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(
                state["params"], state["statistics"], *batch
            )
            changes, inner = self.optimizer.update(gradients, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], changes)
            return {"params": params, "statistics": statistics, "optimizer": inner}, value

        return jax.jit(update, donate_argnums=0).lower(self.abstract, self.batch(0)).compile()

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """The next images, which threads read ahead. Another step than the next one starts anew."""
        if self.reader is None or step != self.next:
            self.reader = iter(self.images(step))
        self.next = step + 1
        return tuple(next(self.reader))

    def images(self, step: int):
        """The batches from a step on."""
        options = self.options
        rows = grain.MapDataset.source(options.train).seed(options.seed).shuffle().repeat()
        rows = rows.random_map(lambda row, rng: read(row, options.size, rng))
        batches = rows.batch(options.batch, drop_remainder=True)
        ahead = grain.ReadOptions(num_threads=8, prefetch_buffer_size=8)  # batches
        return batches[step : options.steps + 1].to_iter_dataset(ahead)

    @functools.cached_property
    def _logits(self):
        return jax.jit(
            lambda state, images: resnet.apply(
                state["params"], state["statistics"], images, self.config, train=False
            )[0]
        )

    def evaluate(self, state: dict) -> dict[str, float]:
        right, size = 0, self.options.batch
        for start in range(0, len(self.options.test), size):
            rows = [read(row, self.options.size) for row in self.options.test[start : start + size]]
            filled = rows + rows[:1] * (size - len(rows))  # so that there is one program
            images, labels = map(np.stack, zip(*filled, strict=True))
            found = np.asarray(self._logits(state, jnp.asarray(images))).argmax(-1)
            right += int((found == labels)[: len(rows)].sum())
        return {"accuracy": right / len(self.options.test)}


if __name__ == "__main__":
    sys.exit(main())
