"""Trains a diffusion model on images: a U-Net of Flax's layers, by `autofuse`.

    pip install '.[train,nnx]'
    python examples/train_diffusion.py --config small --checkpoint /tmp/diffusion

The images are drawn: a disc, a square or a triangle. ``--train DIR`` takes JPEG and PNG files. The
U-Net knows nothing of jax_fastops, and predicts the noise in an image (Ho et al., "Denoising
Diffusion Probabilistic Models"). Each evaluation prints the loss of images that the training does
not see, and draws samples by DDIM into ``samples.png``. ``loop.py`` describes progress,
checkpoints and what Ctrl-C does.
"""

import argparse
import functools
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_fastops as fo
import numpy as np
import optax
from jax import lax
from PIL import Image, ImageOps

import loop

try:
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install flax") from None

CONFIGS = {"small": (32, 16), "base": (32, 64)}  # pixels, channels
FIXED = ("config", "batch", "rate", "seed")
DRAWN = 4096  # images
LAST = 0.98  # time: at 0 there is no noise, at 1 there is nothing else
SAMPLING = 50  # steps from noise to an image
SHOWN = 8  # rows and columns of samples
GROUPS = 4  # of each norm


class Block(nnx.Module):
    """Two convolutions after group norm and silu, with the time between them, and a residual."""

    def __init__(self, before: int, after: int, time: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, rngs=rngs)
        self.norm1 = nnx.GroupNorm(before, GROUPS, rngs=rngs)
        self.conv1 = conv(before, after, (3, 3))
        self.time = nnx.Linear(time, after, rngs=rngs)
        self.norm2 = nnx.GroupNorm(after, GROUPS, rngs=rngs)
        self.conv2 = conv(after, after, (3, 3), kernel_init=nnx.initializers.zeros)
        self.skip = conv(before, after, (1, 1))

    def __call__(self, x, time):
        h = self.conv1(nnx.silu(self.norm1(x))) + self.time(time)[:, None, None]
        return self.skip(x) + self.conv2(nnx.silu(self.norm2(h)))


class Attention(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(channels, GROUPS, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, channels, decode=False, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x).reshape(len(x), -1, x.shape[-1])
        return x + self.attention(h).reshape(x.shape)


class UNet(nnx.Module):
    """Maps images ``[batch, size, size, 3]`` and times ``[batch]`` to the noise in the images."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        half, inner = 2 * width, 4 * width
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        block = functools.partial(Block, time=inner, rngs=rngs)
        self.time1 = nnx.Linear(width, inner, rngs=rngs)
        self.time2 = nnx.Linear(inner, inner, rngs=rngs)
        self.first = conv(3, width)
        self.down = nnx.List([block(width, width), block(half, half)])
        self.smaller = nnx.List([conv(width, half, strides=2), conv(half, inner, strides=2)])
        self.middle = nnx.List([block(inner, inner), block(inner, inner)])
        self.attention = Attention(inner, rngs)
        self.larger = nnx.List([conv(inner, half), conv(half, width)])
        self.up = nnx.List([block(2 * half, half), block(2 * width, width)])
        self.norm = nnx.GroupNorm(width, GROUPS, rngs=rngs)
        self.last = conv(width, 3, kernel_init=nnx.initializers.zeros)

    def __call__(self, x, time):
        count = self.time1.in_features // 2
        angles = time[:, None] * jnp.exp(jnp.linspace(0, math.log(1000), count))
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(x.dtype)
        time = nnx.silu(self.time2(nnx.silu(self.time1(waves))))
        x, skips = self.first(x), []
        for block, smaller in zip(self.down, self.smaller, strict=True):
            skips.append(block(x, time))
            x = smaller(skips[-1])
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for larger, block in zip(self.larger, self.up, strict=True):
            x = larger(x.repeat(2, 1).repeat(2, 2))
            x = block(jnp.concatenate([x, skips.pop()], -1), time)
        return self.last(nnx.silu(self.norm(x)))


def weights(time):
    """Those of image and noise in their sum."""
    return jnp.cos(jnp.pi / 2 * time), jnp.sin(jnp.pi / 2 * time)


def drawn(size: int, seed: int) -> np.ndarray:
    """Images ``[DRAWN, size, size, 3]``, uint8: a shape of some color, size and place in each."""
    rng = np.random.default_rng(seed)

    def some(low: float, high: float, *shape: int) -> np.ndarray:
        return rng.uniform(low, high, (DRAWN, 1, 1, *shape))

    radius, places = some(0.2, 0.4), (np.arange(size) + 0.5) / size
    y, x = (places[:, None] - some(0.4, 0.6)) / radius, (places - some(0.4, 0.6)) / radius
    disc, square = np.hypot(x, y), np.maximum(abs(x), abs(y))
    triangle = np.maximum(2 * y, 3**0.5 * abs(x) - y)
    edge = np.choose(rng.integers(3, size=(DRAWN, 1, 1)), [disc, square, triangle])
    inside = np.clip((1 - edge) * radius * size + 0.5, 0, 1)[..., None]
    back, front = some(0, 80, 3), some(120, 255, 3)
    return (back + inside * (front - back)).astype(np.uint8)


def read(folder: Path, size: int) -> np.ndarray:
    """The images of a folder, cut to squares, all in memory."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in loop.IMAGES)
    if len(paths) < 10:
        raise ValueError(
            f"{folder} has {len(paths)} images ({', '.join(loop.IMAGES)}); 10 are needed"
        )
    images = []
    for path in paths:
        try:
            with Image.open(path) as file:
                images.append(ImageOps.fit(file.convert("RGB"), (size, size)))
        except (OSError, SyntaxError) as error:  # SyntaxError: a broken PNG
            raise ValueError(f"{path} cannot be read: {error}") from None
    return np.stack(images)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = loop.console()
    job = Diffusion(options)
    console.print(
        f"{len(job.images)} images, {len(job.held_out)} for the evaluation; U-Net "
        f"{options.config}, {options.dtype}, {jax.devices()[0].device_kind}",
        highlight=False,
    )
    report = fo.autofuse.report(job.loss)(job.abstract["params"], job.batch(0), job.key)
    for what, found in ("replaces", report.replaced), ("leaves", report.missed):
        counts = Counter(one.pattern for one in found).items()
        patterns = ", ".join(f"{count} x {pattern}" for pattern, count in counts) or "nothing"
        console.print(f"autofuse {what} {patterns}.", highlight=False, soft_wrap=True)
    _, losses = loop.train(job, console)
    loop.plot(losses, "squared error of the noise", options.plot)
    console.print(
        f"The losses are drawn in {options.plot}, and samples in {options.samples}.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = loop.parser(__doc__)
    add = parser.add_argument
    add("--train", type=Path, metavar="DIR", help="images (default: they are drawn)")
    loop.add_options(add, steps=5000, every=500)
    add("--config", choices=CONFIGS, default="base", help="16 or 64 channels (default: base)")
    add("--batch", type=loop.positive, default=64, metavar="N", help="(default: 64)")
    add("--rate", type=loop.above_zero, default=1e-3, metavar="R", help="(default: 0.001)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on a CPU)")
    options = parser.parse_args(argv)
    loop.check_options(options, parser)
    options.samples = options.plot.with_name("samples.png")
    options.dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    size, _ = CONFIGS[options.config]
    try:
        options.images = read(options.train, size) if options.train else drawn(size, options.seed)
    except (OSError, ValueError) as error:
        options.error(f"--train: {error}")
    options.made_with = {name: getattr(options, name) for name in FIXED}
    options.made_with["train"] = hashlib.sha256(options.images.tobytes()).hexdigest()
    return options


class Diffusion:
    """The job of the loop. The state is ``{"params", "average", "optimizer", "step"}``."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.key = options, jax.random.key(options.seed)
        self.unit, self.units = "images", options.batch
        held_out = np.arange(len(options.images)) % 10 == 0
        self.held_out, self.images = options.images[held_out], options.images[~held_out]
        self.size, width = CONFIGS[options.config]
        self.model = functools.partial(UNet, width)
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: self.model(nnx.Rngs(0))))
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0, options.rate, 100))
        )
        self.abstract = loop.abstract(self.init)

    def init(self) -> dict:
        params = nnx.to_pure_dict(nnx.state(self.model(nnx.Rngs(self.options.seed))))
        average = jax.tree.map(jnp.copy, params)
        state = {"params": params, "average": average, "optimizer": self.optimizer.init(params)}
        return state | {"step": jnp.int32(0)}

    def noise(self, params, images, time):
        """The noise that the model finds, float32. The model computes in ``--dtype``."""
        params, images = optax.tree_utils.tree_cast((params, images), self.options.dtype)
        return nnx.merge(self.graph, params)(images, time).astype(jnp.float32)

    def loss(self, params, images, key):
        keys, count = jax.random.split(key), len(images)
        time = LAST * (jnp.arange(count) + jax.random.uniform(keys[0], (count,))) / count
        clear, noisy = weights(time[:, None, None, None])
        noise = jax.random.normal(keys[1], images.shape)
        mixed = clear * (images / 127.5 - 1) + noisy * noise
        return jnp.mean((self.noise(params, mixed, time) - noise) ** 2)

    def samples(self, params, key):
        """Images from noise, by DDIM (Song et al., "Denoising Diffusion Implicit Models")."""
        times = jnp.linspace(LAST, 0, SAMPLING + 1)

        def step(x, times):
            (clear, noisy), after = map(weights, times)
            noise = self.noise(params, x, jnp.full(len(x), times[0]))
            images = jnp.clip((x - noisy * noise) / clear, -1, 1)
            noise = (x - clear * images) / noisy
            return after[0] * images + after[1] * noise, None

        x = jax.random.normal(key, (SHOWN**2, self.size, self.size, 3))
        images, _ = lax.scan(step, x, (times[:-1], times[1:]))
        return jnp.round(127.5 * (images + 1)).astype(jnp.uint8)

    @functools.cached_property
    def update(self):
        loss = fo.autofuse(self.loss)  # the one line

        def update(state, images):
            step = state["step"] + 1
            key = jax.random.fold_in(self.key, step)
            value, gradients = jax.value_and_grad(loss)(state["params"], images, key)
            changes, inner = self.optimizer.update(gradients, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], changes)
            weight = jnp.maximum(0.001, 9 / (9 + step))  # of the new parameters in the average
            average = optax.incremental_update(params, state["average"], weight)
            return dict(params=params, average=average, optimizer=inner, step=step), value

        return jax.jit(update, donate_argnums=0).lower(self.abstract, self.batch(0)).compile()

    def batch(self, step: int) -> np.ndarray:
        rng = np.random.default_rng((self.options.seed, step))
        return self.images[rng.integers(len(self.images), size=self.options.batch)]

    @functools.cached_property
    def measures(self):
        return jax.jit(fo.autofuse(lambda p, x, key: (self.loss(p, x, key), self.samples(p, key))))

    def evaluate(self, state: dict) -> dict[str, float]:
        """The loss of images that are not in the training. Also draws samples."""
        loss, images = self.measures(state["average"], self.held_out[:256], self.key)
        rows = np.asarray(images).reshape(SHOWN, SHOWN, self.size, self.size, 3).swapaxes(1, 2)
        picture = rows.reshape(SHOWN * self.size, SHOWN * self.size, 3)
        with loop.drawing(self.options.samples):
            Image.fromarray(picture.repeat(4, 0).repeat(4, 1)).save(self.options.samples)
        return {"loss of held-out images": float(loss)}


if __name__ == "__main__":
    sys.exit(main())
