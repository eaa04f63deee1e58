"""Trains a BERT on text, on all devices, and resumes after a kill.

    pip install '.[train]'
    python examples/bert_train.py --checkpoint /tmp/bert

The model reads bytes, some of them hidden, and learns to predict the hidden ones
(``masked_text.py``). The text is that of ``--text``, by default the texts in scikit-learn.

**Devices.** A mesh of all devices has one axis, ``"data"``. Parameters are replicated, a batch is
sharded, and the only communication is the all-reduce of gradients and of the loss. The axis type is
Auto, although ``jax.make_mesh`` defaults to Explicit since jax 0.9: the model sets no shardings, so
the compiler derives them. To try it without GPUs::

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
    python examples/bert_train.py

**Checkpoints.** With ``--checkpoint DIR``, parameters and the optimizer's state are written every
``--every`` steps, while the training continues. A checkpoint appears when it is complete. The same
command resumes from the last checkpoint; ``--steps`` may then be higher. Batches and dropout are
functions of ``--seed`` and the step number, so there is no other state to keep. Losses are in
``DIR/losses.csv``, one line per step. Lines that a killed run wrote after its last checkpoint are
cut off.

A resumed run has the same losses as one that was never killed, to the last bit, if options,
versions, and number and kind of devices are the same, and on GPUs with
``XLA_FLAGS=--xla_gpu_deterministic_ops=true``. Otherwise they agree within rounding.
"""

import argparse
import dataclasses
import functools
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_fastops.models import bert
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import masked_text

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONFIGS = {"small": bert.SMALL, "base": bert.BASE, "large": bert.LARGE}
RATES = {"small": 1e-3, "base": 1e-4, "large": 1e-4}
OPS = {"fastops": bert.FASTOPS, "plain": bert.PLAIN}
WEIGHT_DECAY, LARGEST_NORM = 0.01, 1.0  # of matrices; of all gradients together
# The options that the losses depend on. A run that resumes from a checkpoint must have the same.
# Dtype and ops change losses only by rounding. The attention matters: only softmax has dropout.
FIXED = ("config", "batch", "length", "attention", "rate", "warm_up", "dropout", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    mesh = data_mesh()
    texts = options.texts
    console.print(
        f"{options.config} BERT in {options.dtype}, {options.ops} ops, "
        f"{len(mesh.devices.flat)} x {mesh.devices.flat[0].device_kind}; "
        f"{len(texts)} texts of {sum(map(len, texts)):,} bytes",
        highlight=False,
    )
    training = Training(options, mesh)
    if options.checkpoint is None:
        losses = run(training, None, [], None, console)
    else:
        with Checkpoints(options) as checkpoints:
            state, losses = checkpoints.restore(training.abstract)
            if losses:
                console.print(f"Going on from step {len(losses)}.", highlight=False)
            losses = run(training, state, losses, checkpoints, console)
    plot(losses, options.plot)
    console.print(
        f"The loss of step {len(losses)} is {losses[-1]:.4f}. The curve is in {options.plot}.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


# ---- options -------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the texts and the model's config."""
    parser = argparse.ArgumentParser(
        prog="python examples/bert_train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    on_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    add("--text", type=Path, metavar="PATH", help="a file, or a folder of .md, .rst, .txt files")
    add("--steps", type=positive, default=300, metavar="N", help="in all (default: 300)")
    add("--batch", type=positive, default=32, metavar="N", help="on all devices (default: 32)")
    add("--length", type=positive, default=128, metavar="N", help="of a sequence (default: 128)")
    add("--config", choices=CONFIGS, default="small", help="the model's size (default: small)")
    # Without float16: its gradients need a scaled loss, which this example does not have.
    add("--dtype", choices=("bfloat16", "float32"), default=dtype, help=f"(default here: {dtype})")
    add("--attention", choices=("softmax", "xla", "cudnn"), default="softmax", metavar="HOW")
    add("--ops", choices=OPS, default="fastops", help="the kernels, or plain JAX")
    add("--dropout", type=share, default=0.1, metavar="P", help="(default: 0.1)")
    add("--rate", type=above_zero, metavar="R", help="of learning (default: 1e-3 or 1e-4, by size)")
    add("--warm-up", type=positive, default=50, metavar="N", help="steps to it (default: 50)")
    add("--checkpoint", type=Path, metavar="DIR", help="(default: none are written)")
    add("--every", type=positive, default=50, metavar="N", help="steps a checkpoint (default: 50)")
    add("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    add("--plot", type=Path, metavar="FILE", help="(default: DIR/loss.png, or loss.png)")
    options = parser.parse_args(argv)

    count = jax.device_count()
    if options.batch % count:
        parser.error(f"--batch is {options.batch}; it must be a multiple of {count}, the devices")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; it must be 0 or more")
    full = CONFIGS[options.config]
    if options.length > full.positions:
        parser.error(
            f"--length is {options.length}; with --config {options.config} it may be "
            f"{full.positions} at most"
        )
    if options.attention == "cudnn" and (on_cpu or options.dtype == "float32"):
        parser.error("--attention cudnn needs a GPU and --dtype bfloat16")
    try:
        options.texts = masked_text.documents(options.text)
    except (OSError, ValueError) as error:
        parser.error(f"--text: {error}")
    for name in ("checkpoint", "plot"):
        path = getattr(options, name)
        if path is not None:
            setattr(options, name, path.resolve())  # which Orbax wants
    if options.checkpoint and options.checkpoint.exists() and not options.checkpoint.is_dir():
        parser.error(f"--checkpoint: {options.checkpoint} is not a folder")
    options.plot = options.plot or (options.checkpoint or Path.cwd()) / "loss.png"
    options.rate = options.rate or RATES[options.config]
    options.error = parser.error
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to below 1")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def model_config(options: argparse.Namespace) -> bert.Config:
    # jax.nn.dot_product_attention has no dropout of attention weights.
    in_attention = options.dropout if options.attention == "softmax" else 0.0
    return dataclasses.replace(
        CONFIGS[options.config],
        vocab_size=masked_text.VOCABULARY,
        dtype=options.dtype,
        attention=options.attention,
        dropout=options.dropout,
        attention_dropout=in_attention,
    )


# ---- the step ------------------------------------------------------------------------------------


def data_mesh() -> Mesh:
    """All devices along the Auto axis ``"data"``."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def optimiser(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW. The rate rises and then stays, so that ``--steps`` can be raised later."""
    rate = optax.linear_schedule(0.0, options.rate, options.warm_up)

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(LARGEST_NORM),
        optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=matrices),
    )


class Training:
    """The compiled step and its inputs.

    The state is ``{"params", "optimiser", "step"}``, replicated on all devices. ``step`` is the
    number of completed steps.
    """

    def __init__(self, options: argparse.Namespace, mesh: Mesh):
        self.options = options
        self.everywhere = NamedSharding(mesh, P())
        self.split = NamedSharding(mesh, P("data"))
        config, optimise = model_config(options), optimiser(options)
        ops = OPS[options.ops]

        def init() -> dict:
            params = bert.init(jax.random.key(options.seed), config, mlm=True)
            del params["pooler"]  # the loss does not use it
            return {"params": params, "optimiser": optimise.init(params), "step": jnp.int32(0)}

        def loss(params, key, batch):
            hidden, _ = bert.apply(
                params, batch.tokens, config, mask=batch.inside, key=key, ops=ops
            )
            return bert.masked_lm_loss(
                params, hidden, batch.targets, config, where=batch.chosen, ops=ops
            )

        def update(state: dict, batch: masked_text.Batch) -> tuple[dict, jax.Array]:
            # A key that is derived from the seed, other than the key of the parameters.
            key = jax.random.fold_in(jax.random.key(options.seed), 1 + state["step"])
            value, grads = jax.value_and_grad(loss)(state["params"], key, batch)
            changes, inner = optimise.update(grads, state["optimiser"], state["params"])
            params = optax.apply_updates(state["params"], changes)
            return {"params": params, "optimiser": inner, "step": state["step"] + 1}, value

        self.init = jax.jit(init, out_shardings=self.everywhere)
        self._update = jax.jit(update, donate_argnums=0, out_shardings=self.everywhere)

    @functools.cached_property
    def abstract(self) -> dict:
        """The state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.everywhere),
            jax.eval_shape(self.init),
        )

    @functools.cached_property
    def update(self) -> jax.stages.Compiled:
        """Maps ``(state, batch)`` to the next state and the loss. The state is donated."""
        return self._update.lower(self.abstract, self.batch(0)).compile()

    def batch(self, step: int) -> masked_text.Batch:
        """The batch of a step, counted from 0. It depends only on the step and the seed."""
        options = self.options
        rng = np.random.default_rng((options.seed, step))
        made = masked_text.batch(options.texts, options.batch, options.length, rng)
        return jax.device_put(made, self.split)


# ---- checkpoints ---------------------------------------------------------------------------------


class Checkpoints:
    """A folder of checkpoints, and of the losses of all steps so far.

    They are written while the training continues. Leaving the context waits for the last one.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.made_with = {name: getattr(options, name) for name in FIXED}
        text = b"\0".join(t.tobytes() for t in options.texts)
        self.made_with["text"] = hashlib.sha256(text).hexdigest()
        self.manager = ocp.CheckpointManager(
            options.checkpoint,
            options=ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True),
        )
        self.log_path = options.checkpoint / "losses.csv"
        self.log = None

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        if self.log is not None:
            self.log.close()
        self.manager.close()  # waits for the last checkpoint

    def restore(self, abstract: dict) -> tuple[dict | None, list[float]]:
        """The last state and its losses. For a new folder, None and an empty list."""
        step = self.manager.latest_step() or 0
        state = None
        if step:
            read = functools.partial(self.manager.restore, step)
            try:
                found = read(args=ocp.args.Composite(made_with=ocp.args.JsonRestore()))
                self.check(found.made_with)
                found = read(args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
                state = found.state
            except (KeyError, OSError, ValueError) as error:
                # A kill cannot cause this. The user decides whether to delete the checkpoint.
                self.options.error(
                    f"--checkpoint: {self.options.checkpoint / str(step)} is damaged ({error}); "
                    "without that folder, training goes on from the checkpoint before"
                )
        return state, self.open_log(step)

    def check(self, made_with: dict) -> None:
        for name, value in self.made_with.items():
            given = made_with.get(name)
            if value == given:
                continue
            where = f"the checkpoints in {self.options.checkpoint}"
            if name == "text":
                self.options.error(f"--text: {where} are of another text")
            option = "--" + name.replace("_", "-")
            self.options.error(f"{option} is {value}; {where} were made with {given}")

    def open_log(self, steps: int) -> list[float]:
        """Truncates the log after these steps, and returns their losses."""
        self.log_path.touch()
        self.log = self.log_path.open("r+")
        losses = []
        for step in range(1, steps + 1):
            number, _, loss = self.log.readline().partition(",")
            if number != str(step) or not loss.endswith("\n"):
                self.options.error(f"--checkpoint: {self.log_path} has no line for step {step}")
            losses.append(float(loss))
        self.log.seek(self.log.tell())
        self.log.truncate()
        return losses

    def add(self, step: int, loss: float) -> None:
        self.log.write(f"{step},{loss!r}\n")  # repr keeps all digits
        self.log.flush()

    def save(self, step: int, state: dict) -> None:
        os.fsync(self.log.fileno())  # the losses are on the disk before the checkpoint
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), made_with=ocp.args.JsonSave(self.made_with)
            ),
        )


# ---- the loop ------------------------------------------------------------------------------------


def run(
    training: Training,
    state: dict | None,
    losses: list[float],
    checkpoints: Checkpoints | None,
    console: Console,
) -> list[float]:
    """Trains from this state, or from the start, to the last step. Returns all losses."""
    options = training.options
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    first, last = len(losses), options.steps
    state = training.init() if state is None else state
    unread: list[jax.Array] = []
    with console.status("compiling"):
        update = training.update
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("", total=last, completed=first, loss=(losses or [np.nan])[-1])
        for step in range(first + 1, last + 1):
            state, value = update(state, training.batch(step - 1))
            unread.append(value)
            saves = checkpoints is not None and (step % options.every == 0 or step == last)
            # Losses are read one step late, so that the devices do not wait for the host.
            while len(unread) > (0 if saves or step == last else 1):
                losses.append(float(unread.pop(0)))
                if not math.isfinite(losses[-1]):
                    raise SystemExit(f"The loss of step {len(losses)} is {losses[-1]}.")
                if checkpoints is not None:
                    checkpoints.add(len(losses), losses[-1])
                progress.update(bar, completed=len(losses), loss=losses[-1])
            if saves:
                checkpoints.save(step, state)
    return losses


def plot(losses: list[float], path: Path) -> None:
    """Plots the loss of every step, including those before a kill."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, color="#2a7f62", lw=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("masked language model's loss, in nats")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
