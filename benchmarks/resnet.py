"""What does a ResNet gain from this package? ``python -m benchmarks.resnet``

Measures the whole training step of ResNet-50 (forward, backward, SGD with momentum) on a batch of
128 images of 224 x 224 in bfloat16. It is compiled once for each of:

``ours``     with the batch norms and the max pooling of this package, which runs before the stem's
             batch norm, and with ``Config.remat``
``plain``    with ``resnet.PLAIN``: batch norm in jax.numpy and XLA's max pooling
``without``  as ``plain``, but only with the addition and the ReLU that follow batch norm: the cost
             of the rest of the step

Steps are timed in turns, and then each in steady state by the wall clock. Their temporary memory is
XLA's figure for the compiled program. Then ``ours`` and ``plain`` are trained for 50 steps on one
batch of random images, from the same initial state. Rounding makes two such trainings diverge. Two
more trainings show how far: ``plain`` on images in which each number is changed by its last bit,
and ``plain`` in float32.

``--torch`` measures the step in compiled PyTorch first, in a process of its own.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import RESULTS, environment, installed, jobs, measure
from benchmarks.cases import fo
from benchmarks.programs import Program
from benchmarks.report import headline, write

resnet = installed("jax_fastops.models.resnet")

MOMENTUM = 0.9
WARM_UP = 5  # steps in which the rate rises to its full value
STEADY = 20  # steps without a wait between them
MIB = 2**20
TIMES = ("median_us", "spread_us", "min_us", "wall_us")


def nothing(x, scale, bias, *, activation=None, residual=None, fanout=False, **options):
    """In place of ``batch_norm``: only the addition and the ReLU that follow it."""
    zeros = jnp.zeros(scale.shape, jnp.float32)
    y = x if residual is None else x + residual
    y = jax.nn.relu(y) if activation == "relu" else y
    return (y, y) if fanout else y, zeros, zeros


VARIANTS = {
    "ours": resnet.FASTOPS,
    "plain": resnet.PLAIN,
    "without": resnet.BatchNorm(nothing, None),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A network, and the size of the batch that it is trained on."""

    name: str
    config: resnet.Config
    batch: int
    size: int  # of an image's sides
    rate: float = 0.05  # of learning: 0.1 for 256 images


RESNET50 = Setting("ResNet-50", resnet.RESNET50, batch=128, size=224)
SMALL = Setting(
    "small ResNet",
    dataclasses.replace(resnet.RESNET18, stages=(2, 2, 2), width=16, classes=10, stem="small"),
    batch=16,
    size=32,
)


def main() -> None:
    options = parse()
    setting = chosen(options)
    results = run(setting, options)
    path = options.out / f"{options.name}-{environment.slug(results)}.json"
    write(path, results)
    print(f"{headline(results)}\nwrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resnet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--small", action="store_true", help="a small network on small images, for a CPU")
    add("--batch", type=int, metavar="N", help="images (default: 128; with --small, 16)")
    add("--size", type=int, metavar="N", help="of an image's sides (default: 224 or 32)")
    add("--rate", type=float, metavar="R", help="of learning (default: 0.05)")
    add("--dtype", default="bfloat16", metavar="DTYPE", help="of the activations")
    add("--implementation", choices=("auto", "native", "xla"), default="auto", help="of ours")
    add("--steps", type=int, default=50, metavar="N", help="of the loss curves; 0 for none")
    add("--repeats", type=int, default=15, metavar="N", help="rounds")
    add("--clock", choices=("auto", "profiler", "wall"), default="auto")
    add("--torch", action="store_true", help="PyTorch too, where it is installed")
    add("--out", "--output", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    options.name = "resnet-small" if options.small else "resnet"
    return options


def chosen(options: argparse.Namespace) -> Setting:
    setting = SMALL if options.small else RESNET50
    given = {name: getattr(options, name) for name in ("batch", "size", "rate")}
    return dataclasses.replace(
        setting,
        config=dataclasses.replace(setting.config, dtype=options.dtype),
        **{name: value for name, value in given.items() if value is not None},
    )


def in_pytorch(setting: Setting) -> dict:
    given = {"batch": setting.batch, "size": setting.size, "rate": setting.rate}
    given["momentum"] = MOMENTUM
    found = jobs.process(["-m", "benchmarks.torch_resnet", json.dumps(given)])
    print("compiled PyTorch:", found)
    return found


def run(setting: Setting, options: argparse.Namespace) -> dict:
    """Measure times, memory and loss curves, and print each when it is known."""
    pytorch = {"pytorch": in_pytorch(setting)} if options.torch else {}
    clock, timer = measure.clock(options.clock)
    images, labels = data(setting)
    print(f"{setting.name}, {images.shape}, {setting.config.dtype}")
    programs = {}
    for name, batch_norm in VARIANTS.items():
        with fo.use_implementation(options.implementation if name == "ours" else "xla"):
            programs[name] = Step(name, setting, batch_norm, images, labels)
            programs[name].compile()
    timings = timer(list(programs.values()), options.repeats)
    steps = {
        name: numbers(program, timing)
        for (name, program), timing in zip(programs.items(), timings, strict=True)
    }
    show_steps(steps)
    results = {
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "clock": clock,
        "rounds": options.repeats,
        "network": dataclasses.asdict(setting),
        "implementation": options.implementation,
        "steps": steps,
        **pytorch,
    }
    if options.steps:
        del programs["without"]
        results["losses"] = losses(setting, programs, options.steps)
        results["differences"] = differences(results["losses"])
        show_losses(results)
    return results


def numbers(program: "Step", timing: measure.Timing) -> dict:
    steady = jobs.steady(program, lambda: jax.block_until_ready(program.outputs), STEADY)
    found = timing.as_dict() | {"wall_us": steady["ms"] * 1e3}
    found = {key: round(v, 1) if isinstance(v, float) else v for key, v in found.items()}
    temp_mib = round(program.temp_bytes / MIB, 2)
    return found | {"temp_mib": temp_mib, "kernels": program.kernels}


class Step(Program):
    """A training step on flat arrays. It returns the new state, and the loss of the old one."""

    def __init__(self, name: str, setting: Setting, batch_norm, images, labels):
        state = initial(setting)
        leaves, tree = jax.tree.flatten(state)

        def flat(*args):
            *leaves, rate, images, labels = args
            state = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(update(*state, rate, images, labels, setting.config, batch_norm))

        rate = jnp.float32(setting.rate)
        super().__init__(f"resnet_{name}", flat, [*leaves, rate, images, labels])

    def curve(self, steps: int, images=None) -> list[float]:
        """The losses of a training, step by step."""
        *state, rate, given, labels = self.args
        images = given if images is None else images
        found = []
        for index in range(steps):
            warm = rate * min(1.0, (index + 1) / WARM_UP)
            outputs = self.compiled(*state, warm, images, labels, *self.outputs)
            # The arrays to overwrite must not be those that the next step reads.
            self.outputs = [jnp.zeros_like(out) for out in outputs]
            *state, loss = outputs
            found.append(loss)
        return [round(float(loss), 6) for loss in found]


def update(
    params, statistics, velocity, rate, images, labels, config, batch_norm: resnet.BatchNorm
):
    """One step of SGD with momentum."""

    def loss(params):
        logits, new = resnet.apply(
            params, statistics, images, config, train=True, batch_norm=batch_norm
        )
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1)), new

    (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - rate * g, velocity, grads)
    return jax.tree.map(jnp.add, params, velocity), statistics, velocity, value


def initial(setting: Setting) -> tuple:
    """Parameters, running statistics, velocity."""
    params, statistics = jax.jit(resnet.init, static_argnums=1)(jax.random.key(0), setting.config)
    return params, statistics, jax.tree.map(jnp.zeros_like, params)


def data(setting: Setting) -> tuple:
    """Random images in the dtype of the activations, and random labels."""
    keys = jax.random.split(jax.random.key(1))
    shape = (setting.batch, setting.size, setting.size, setting.config.channels)
    images = jax.random.normal(keys[0], shape).astype(setting.config.dtype)
    return images, jax.random.randint(keys[1], (setting.batch,), 0, setting.config.classes)


def moved(images):
    """Images in which each number is changed by its last bit, up or down."""
    up = jax.random.bernoulli(jax.random.key(2), shape=images.shape)
    return jnp.nextafter(images, jnp.where(up, jnp.inf, -jnp.inf).astype(images.dtype))


def losses(setting: Setting, programs: dict[str, Step], steps: int) -> dict[str, list[float]]:
    found = {name: program.curve(steps) for name, program in programs.items()}
    plain = programs["plain"]
    found["plain, images moved"] = plain.curve(steps, moved(plain.args[-2]))
    config = dataclasses.replace(setting.config, dtype="float32")
    images, labels = plain.args[-2].astype(config.dtype), plain.args[-1]
    programs.clear()  # float32 needs the memory
    wide = dataclasses.replace(setting, config=config)
    with jax.default_matmul_precision("highest"):  # not TensorFloat-32
        found["plain, float32"] = Step("float32", wide, resnet.PLAIN, images, labels).curve(steps)
    return found


def differences(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The largest and the mean difference of the losses, for pairs of trainings."""
    pairs = [
        ("ours", "plain"),
        ("plain, images moved", "plain"),
        ("ours", "plain, float32"),
        ("plain", "plain, float32"),
    ]
    found = {}
    for a, b in pairs:
        gap = np.abs(np.subtract(curves[a], curves[b]))
        found[f"{a} - {b}"] = {
            "largest": round(float(gap.max()), 6),
            "mean": round(float(gap.mean()), 6),
        }
    return found


def show_steps(steps: dict) -> None:
    header = f"{'ms':>9}{'spread':>8}{'fastest':>9}{'wall':>9}{'temporary MiB':>15}   kernels"
    print(f"{'':<10}{header}")
    for name, found in steps.items():
        times = [found[key] / 1e3 for key in TIMES]
        kernels = ", ".join(f"{n} {kernel}" for kernel, n in found["kernels"].items()) or "none"
        columns = "".join(f"{t:>{w}.2f}" for t, w in zip(times, (9, 8, 9, 9), strict=True))
        print(f"{name:<10}{columns}{found['temp_mib']:>15.1f}   {kernels}")
    ours, plain = steps["ours"], steps["plain"]
    speed, memory = (plain[k] / ours[k] for k in ("median_us", "temp_mib"))
    print(
        f"ours is {speed:.3f} times as fast as plain, with 1/{memory:.3f} of its temporary memory"
    )


def show_losses(results: dict) -> None:
    for name, curve in results["losses"].items():
        shown = [curve[round(k * (len(curve) - 1) / 5)] for k in range(6)]
        print(f"losses, {name:<20}" + "".join(f"{value:>10.4f}" for value in shown))
    print(f"{'differences of losses':<42}{'largest':>10}{'mean':>10}")
    for name, found in results["differences"].items():
        print(f"{name:<42}{found['largest']:>10.4f}{found['mean']:>10.4f}")


if __name__ == "__main__":
    main()
