"""What does a ResNet gain from this package?

Measures the whole training step of ResNet-50 (forward, backward, SGD with momentum) on a batch of
128 images of 224 x 224 in bfloat16. It is compiled once for each of:

``ours``     with the batch norms and the max pooling of this package, which runs before the stem's
             batch norm, and with ``Config.remat``
``plain``    with ``resnet.PLAIN``: batch norm in jax.numpy and XLA's max pooling
``without``  as ``plain``, but only with the addition and the ReLU that follow batch norm: the cost
             of the rest of the step

Steps are timed in turns, and then each in steady state by the wall clock. Then ``ours`` and
``plain`` are trained for 50 steps on one batch of random images, from the same initial state.
Rounding makes two such trainings diverge. Two more trainings show how far: ``plain`` on images in
which each number is changed by its last bit, and ``plain`` in float32.

``--torch`` measures the step in compiled PyTorch first, in a process of its own.
"""

import dataclasses
import json
import statistics
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import installed, measure
from benchmarks.processes import process, steady, torch_training
from benchmarks.programs import Program
from benchmarks.report import Results

resnet = installed("jax_fastops.models.resnet")

MOMENTUM = 0.9
WARM_UP = 5  # steps in which the rate rises to its full value
STEADY = 20  # steps without a wait between them


def nothing(x, scale, bias, *, activation=None, residual=None, fanout=False, **options):
    """In place of ``batch_norm``: only the addition and the ReLU that follow it."""
    zeros = jnp.zeros(scale.shape, jnp.float32)
    y = x if residual is None else x + residual
    y = jax.nn.relu(y) if activation == "relu" else y
    return (y, y) if fanout else y, zeros, zeros


VARIANTS = {"ours": resnet.FASTOPS, "plain": resnet.PLAIN}
VARIANTS["without"] = resnet.BatchNorm(nothing, None)


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


def options(add) -> None:
    add("--small", action="store_true", help="a small network on small images, for a CPU")
    add("--batch", type=int, metavar="N", help="images (default: 128; with --small, 16)")
    add("--size", type=int, metavar="N", help="of an image's sides (default: 224 or 32)")
    add("--rate", type=float, metavar="R", help="of learning (default: 0.05)")
    add("--dtype", default="bfloat16", metavar="DTYPE", help="of the activations")
    add("--implementation", choices=("auto", "native", "xla"), default="auto", help="of ours")
    add("--steps", type=int, default=50, metavar="N", help="of the loss curves; 0 for none")
    add("--torch", action="store_true", help="PyTorch too, where it is installed")
    add("--in-torch", type=json.loads, help="measure PyTorch only, with these sizes")
    measure.options(add, 15)


def run(options) -> None:
    """Measure times, memory and loss curves, and print each when it is known."""
    if options.in_torch:
        print(json.dumps(in_torch(options, **options.in_torch)))
        return
    setting = SMALL if options.small else RESNET50
    given = {name: getattr(options, name) for name in ("batch", "size", "rate")}
    setting = dataclasses.replace(
        setting,
        config=dataclasses.replace(setting.config, dtype=options.dtype),
        **{name: value for name, value in given.items() if value is not None},
    )
    pytorch = {}
    if options.torch:
        sizes = {"batch": setting.batch, "size": setting.size, "rate": setting.rate}
        arguments = ["-m", "benchmarks", "resnet", "--in-torch", json.dumps(sizes)]
        pytorch = {"pytorch": process(arguments)}
        print("compiled PyTorch:", pytorch)
    clock, timer = measure.clock(options.clock)
    images, labels = data(setting)
    print(f"{setting.name}, {images.shape}, {setting.config.dtype}")
    programs = {}
    for name, batch_norm in VARIANTS.items():
        chosen = options.implementation if name == "ours" else "xla"
        programs[name] = step(name, setting, batch_norm, images, labels, chosen)
        programs[name].compile()
    timings = timer(list(programs.values()), options.repeats)
    results = Results(
        options.out,
        "resnet-small" if options.small else "resnet",
        clock=clock,
        rounds=options.repeats,
        network=dataclasses.asdict(setting),
        implementation=options.implementation,
        steps={
            name: measure.figures(program, timing, wall(program))
            for (name, program), timing in zip(programs.items(), timings, strict=True)
        },
        **pytorch,
    )
    measure.show_figures(results["steps"])
    if options.steps:
        del programs["without"]
        results["losses"] = losses(setting, programs, options.steps)
        results["differences"] = differences(results["losses"])
        for name, curve in results["losses"].items():
            shown = [curve[round(k * (len(curve) - 1) / 5)] for k in range(6)]
            print(f"losses, {name:<20}" + "".join(f"{value:>10.4f}" for value in shown))
        for name, found in results["differences"].items():
            print(f"{name:<42}{found}")
    results.end()


def wall(program: Program) -> float:
    """Seconds of a step without a wait between two."""
    return steady(program, lambda: jax.block_until_ready(program.outputs), STEADY)["ms"] / 1e3


def in_torch(options, batch: int, size: int, rate: float) -> dict:
    import torch

    from benchmarks.torch_models import resnet50

    options.steps, options.profile = STEADY, 0
    found = torch_training(options, *resnet50(batch, size, rate, MOMENTUM))
    return {
        "median_us": statistics.median(found["all_ms"]) * 1e3,
        "spread_us": (max(found["all_ms"]) - min(found["all_ms"])) * 1e3,
        "peak_mib": found.get("peak_bytes", 0) / measure.MIB,
        "versions": {"torch": torch.__version__},
    }


def step(name: str, setting: Setting, batch_norm, images, labels, implementation="xla") -> Program:
    """A training step. It returns the new state, and the loss of the old one."""
    body = partial(update, config=setting.config, batch_norm=batch_norm)
    about = *initial(setting), jnp.float32(setting.rate), images, labels
    return Program.of(f"resnet_{name}", body, *about, implementation=implementation)


def curve(program: Program, steps: int, images=None) -> list[float]:
    """The losses of a training, step by step."""
    *state, rate, given, labels = program.args
    images = given if images is None else images
    found = []
    for index in range(steps):
        warm = rate * min(1.0, (index + 1) / WARM_UP)
        outputs = program.compiled(*state, warm, images, labels, *program.outputs)
        # The arrays to overwrite must not be those that the next step reads.
        program.outputs = [jnp.zeros_like(out) for out in outputs]
        *state, loss = outputs
        found.append(loss)
    return [round(float(loss), 6) for loss in found]


def update(params, statistics, velocity, rate, images, labels, config, batch_norm):
    """One step of SGD with momentum."""

    def loss(params):
        more = dict(train=True, batch_norm=batch_norm)
        logits, new = resnet.apply(params, statistics, images, config, **more)
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


def losses(setting: Setting, programs: dict[str, Program], steps: int) -> dict[str, list[float]]:
    found = {name: curve(program, steps) for name, program in programs.items()}
    plain = programs["plain"]
    found["plain, images moved"] = curve(plain, steps, moved(plain.args[-2]))
    config = dataclasses.replace(setting.config, dtype="float32")
    images, labels = plain.args[-2].astype(config.dtype), plain.args[-1]
    programs.clear()  # float32 needs the memory
    wide = dataclasses.replace(setting, config=config)
    with jax.default_matmul_precision("highest"):  # not TensorFloat-32
        found["plain, float32"] = curve(step("float32", wide, resnet.PLAIN, images, labels), steps)
    return found


def differences(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The largest and the mean difference of the losses, for pairs of trainings."""
    found = {}
    for a, b in (
        ("ours", "plain"),
        ("plain, images moved", "plain"),
        ("ours", "plain, float32"),
        ("plain", "plain, float32"),
    ):
        gap = np.abs(np.subtract(curves[a], curves[b]))
        numbers = {"largest": float(gap.max()), "mean": float(gap.mean())}
        found[f"{a} - {b}"] = {name: round(value, 6) for name, value in numbers.items()}
    return found
