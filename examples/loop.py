"""The loop that the examples share: progress, checkpoints, and an end that says what to do.

A *job* has the state of a training and its steps; :class:`Job` lists what the loop needs of it.

**Progress.** On a terminal it is a bar, elsewhere a line at most every ten seconds, each with the
loss, the rate and the time left.

**Checkpoints.** With ``--checkpoint DIR``, the state is written every ``--every`` steps, while the
training continues. A checkpoint appears when it is complete, and has a checksum of the state. The
same command resumes from the last checkpoint; where the schedule does not depend on it, ``--steps``
may then be higher. Losses are in ``DIR/losses.csv``, one line per step. Lines that a killed run
wrote after its last checkpoint are cut off.

**The end.** Ctrl-C (or SIGTERM, as a cluster sends it) ends the training of one process after the
step that runs, writes a checkpoint, and prints the command that goes on. A second Ctrl-C ends it at
once. Several processes are killed, and go on from the last checkpoint. A full disk or a damaged
checkpoint ends the training with one line.
"""

import argparse
import contextlib
import functools
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SECONDS = 10.0  # between two lines
IMAGES = ".jpeg", ".jpg", ".png"  # their suffixes
OLDER = {"accumulate": 1}  # the values of what older checkpoints do not have in ``made_with``
DIGESTS = ("text", "train")  # the options of whose files ``made_with`` has a digest


class Job(Protocol):
    """What is trained.

    Attributes:
      options: those of :func:`add_options`, and ``made_with``: a dictionary of plain values that a
        run must share with the checkpoints from which it resumes.
      unit, units: what a step works on, and how much, for the rate: ``"tokens", 4096``.
      abstract: shapes, dtypes and shardings of the state.
      update: the compiled step. It maps the state, which is donated, and a batch to the next state
        and a loss.
    """

    options: argparse.Namespace
    unit: str
    units: int
    abstract: Any
    update: Any

    def init(self) -> Any:
        """The first state."""

    def batch(self, step: int) -> Any:
        """The batch of a step, counted from 0. It depends only on the step and the options."""

    def evaluate(self, state: Any) -> dict[str, float | str]:
        """Measures of the state and texts to print, at each checkpoint and at the end."""


def console(quiet: bool = False) -> Console:
    """Prints paths as they are."""
    return Console(quiet=quiet, markup=False, emoji=False)


# ---- options -------------------------------------------------------------------------------------


def parser(about: str, **options) -> argparse.ArgumentParser:
    """The lines of ``about`` stay as they are."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=form, **options)


def add_options(add, steps: int, every: int = 50) -> None:
    """Adds the options of the loop, by ``parser.add_argument``."""
    add("--steps", type=positive, default=steps, metavar="N", help=f"in all (default: {steps})")
    add("--checkpoint", type=Path, metavar="DIR", help="(default: none are written)")
    about = f"steps between checkpoints, and between evaluations (default: {every})"
    add("--every", type=positive, default=every, metavar="N", help=about)
    add("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    add("--plot", type=Path, metavar="FILE", help="(default: DIR/loss.png, or loss.png)")


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks them, makes paths absolute, and adds ``options.error``, which needs no usage."""
    options.error = functools.partial(fail, parser)
    if options.seed < 0:
        options.error(f"--seed is {options.seed}; it must be 0 or more")
    for name in ("checkpoint", "plot"):
        path = getattr(options, name)
        if path is not None:
            setattr(options, name, path.resolve())  # which Orbax wants
    if options.checkpoint and options.checkpoint.exists() and not options.checkpoint.is_dir():
        options.error(f"--checkpoint: {options.checkpoint} is not a folder")
    options.plot = options.plot or (options.checkpoint or Path.cwd()) / "loss.png"


def fail(parser: argparse.ArgumentParser, message: str) -> None:
    """Ends the program with one line."""
    parser.exit(2, f"{parser.prog}: error: {message}\n")


def check_folder(folder: Path, kind: str) -> None:
    """Raises an error if ``folder`` is not one with a model and its tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).exists():
            raise ValueError(
                f"{folder} has no {name}; it must be a folder with a {kind}, for example one that "
                "'hf download NAME --local-dir FOLDER' makes"
            )


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


# ---- checkpoints ---------------------------------------------------------------------------------


class CannotWrite(Exception):
    """A checkpoint cannot be written."""


@jax.jit
def checksum(state: Any) -> jax.Array:
    """A number that changes if bits of a state change or move."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(state):
        bits = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
        flat = bits.astype(jnp.uint32).ravel()
        weights = 2 * lax.iota(jnp.uint32, flat.size) + 1
        total = 31 * total + jnp.sum(flat * weights, dtype=jnp.uint32)
    return total


class Checkpoints:
    """A folder of checkpoints, and of the losses of all steps so far.

    They are written while the training continues, each process its part. Leaving the context waits
    for the last one. Process 0 writes the losses.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.saved = 0  # the step of the last checkpoint
        kept = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        with self.writing():  # it makes the folder
            self.manager = ocp.CheckpointManager(options.checkpoint, options=kept)
        self.log_path = options.checkpoint / "losses.csv"
        self.log = None

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        with self.writing():
            try:
                if self.log is not None:
                    self.log.close()  # which writes again what could not be written
            finally:
                self.manager.close()  # waits for the last checkpoint

    def restore(self, abstract: Any) -> tuple[Any, list[float]]:
        """The last state and its losses. For a new folder, None and an empty list."""
        step = self.manager.latest_step() or 0
        multihost_utils.assert_equal(
            np.int32(step), f"{self.options.checkpoint} is not one folder for all processes"
        )
        state = None
        if step:
            read = functools.partial(self.manager.restore, step)
            try:
                found = read(args=ocp.args.Composite(made_with=ocp.args.JsonRestore())).made_with
                self.check(found)
                restored = read(args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
                state = restored.state
                if found.get("checksum") not in (None, int(checksum(state))):
                    raise ValueError("its checksum differs")
            except (KeyError, OSError, ValueError) as error:
                # A kill cannot cause this. The user decides whether to delete the checkpoint.
                cause = str(error).partition("\n")[0][:200]
                self.options.error(
                    f"--checkpoint: {self.options.checkpoint / str(step)} is damaged ({cause}); "
                    "without that folder, training goes on from the checkpoint before"
                )
        self.saved = step
        return state, self.read_log(step)

    def check(self, made_with: dict) -> None:
        for name, value in self.options.made_with.items():
            given = made_with.get(name, OLDER.get(name))
            if value == given:
                continue
            where = f"the checkpoints in {self.options.checkpoint}"
            option = "FOLDER" if name == "folder" else "--" + name.replace("_", "-")
            if name in DIGESTS:
                self.options.error(f"{option}: {where} were made with other files or texts")
            self.options.error(f"{option} is {value}; {where} were made with {given}")

    def read_log(self, steps: int) -> list[float]:
        """The losses of these steps. Process 0 truncates the log after them."""
        text = self.log_path.read_text() if self.log_path.exists() else ""
        lines = text.splitlines(keepends=True)[:steps]
        losses = []
        for step in range(1, steps + 1):
            number, _, loss = (lines[step - 1] if step <= len(lines) else "").partition(",")
            if number != str(step) or not loss.endswith("\n"):
                self.options.error(f"--checkpoint: {self.log_path} has no line for step {step}")
            losses.append(float(loss))
        if jax.process_index() == 0:
            with self.writing():
                self.log = self.log_path.open("a")
                self.log.truncate(sum(map(len, lines)))
        return losses

    def add(self, step: int, loss: float) -> None:
        if self.log is not None:
            with self.writing():
                self.log.write(f"{step},{loss!r}\n")  # repr keeps all digits
                self.log.flush()

    def save(self, step: int, state: Any) -> None:
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.options.checkpoint).free
        if free < needed:
            raise CannotWrite(
                f"a checkpoint has {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free"
            )
        made_with = self.options.made_with | {"checksum": int(checksum(state))}
        with self.writing():
            if self.log is not None:
                os.fsync(self.log.fileno())  # the losses are on the disk before the checkpoint
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), made_with=ocp.args.JsonSave(made_with)
                ),
            )
        self.saved = step

    @contextlib.contextmanager
    def writing(self):
        """Turns what fails in writing, also that of an earlier step, into ``CannotWrite``."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise CannotWrite(str(error).partition("\n")[0][:200]) from error


# ---- progress ------------------------------------------------------------------------------------


class Shown:
    """A bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, job: Job, first: int, last: int):
        self.console, self.job, self.first, self.last = console, job, first, last
        self.started = self.printed = time.monotonic()
        self.bar = None
        if console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=console, refresh_per_second=4)
            self.task = self.bar.add_task("", total=last, completed=first, text="")

    def __enter__(self):
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, step: int, loss: float) -> None:
        now = time.monotonic()
        rate = (step - self.first) / max(now - self.started, 1e-9)
        text = f"loss {loss:.4f}, {rate * self.job.units:,.0f} {self.job.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=text)
        elif now - self.printed > SECONDS or step in (self.first + 1, self.last):
            self.printed = now
            left = time.strftime("%H:%M:%S", time.gmtime((self.last - step) / rate))
            self.line(f"step {step}/{self.last}, {text}, {left} left")

    def line(self, text: str) -> None:
        encoding = self.console.encoding  # which may lack characters of the text
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(text, highlight=False, soft_wrap=True)


# ---- the loop ------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_by_errors():
    """An error ends one of several processes at once.

    Otherwise it would wait for the others, for the next checkpoint and for a common exit, and the
    others would wait for it.
    """
    try:
        yield
    except Exception:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        print(
            f"Process {jax.process_index()} of {jax.process_count()} ends: it failed, or lost "
            "another one. Start all processes again, to go on from the last checkpoint.",
            file=sys.stderr,
        )
        end_at_once()


def end_at_once() -> None:
    """Ends the process without waiting for threads that write a checkpoint."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def stoppable():
    """Yields a list, which Ctrl-C or SIGTERM fills. The second one interrupts as usual."""
    asked: list[int] = []

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if alone else ()
    before = {number: signal.signal(number, ask) for number in signals}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(job: Job, console: Console) -> tuple[Any, list[float]]:
    """Trains from the last checkpoint, or from the start, to the last step.

    Returns the last state and all losses. Ends the program if it is stopped.
    """
    folder = job.options.checkpoint
    keeps = [name for name in ("out", "checkpoint") if hasattr(job.options, name)]
    if not any(getattr(job.options, name) for name in keeps):
        console.print(f"Nothing is kept: no --{', no --'.join(keeps)}.", highlight=False)
    again = shlex.join(["python", *sys.argv])
    try:
        with contextlib.ExitStack() as stack:
            checkpoints = stack.enter_context(Checkpoints(job.options)) if folder else None
            asked = stack.enter_context(stoppable())
            state, losses = run(job, checkpoints, console, asked)
    except CannotWrite as error:
        print(
            f"The checkpoint cannot be written to {folder}: {error}. When that is mended, go on "
            f"with: {again}",
            file=sys.stderr,
        )
        end_at_once()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        raise SystemExit(130) from None
    if len(losses) < job.options.steps:
        what = f"Go on with: {again}" if folder else "--checkpoint DIR would keep the training."
        console.print(f"Stopped after step {len(losses)}. {what}", highlight=False, soft_wrap=True)
        raise SystemExit(130)
    return state, losses


@ended_by_errors()
def run(job: Job, checkpoints: Checkpoints | None, console: Console, asked: list) -> tuple:
    options = job.options
    state, losses = None, []
    if checkpoints is not None:
        state, losses = checkpoints.restore(job.abstract)
        if losses:
            console.print(f"Going on from step {len(losses)}.", highlight=False)
    first, last = len(losses), options.steps
    if first >= last:
        console.print(f"Nothing to do: --steps is {last}.", highlight=False)
        return state, losses
    state = job.init() if state is None else state
    unread: list[jax.Array] = []
    if not console.is_terminal:
        console.print("Compiling.", highlight=False)
    with console.status("compiling"):  # which is shown on a terminal only
        update = job.update
    with Shown(console, job, first, last) as shown:
        for step in range(first + 1, last + 1):
            state, value = update(state, job.batch(step - 1))
            unread.append(value)
            ends = step == last or bool(asked)
            saves = checkpoints is not None and (step % options.every == 0 or ends)
            # Losses are read one step late, so that the devices do not wait for the host.
            while len(unread) > (0 if saves or ends else 1):
                losses.append(float(unread.pop(0)))
                if not math.isfinite(losses[-1]):
                    raise SystemExit(f"The loss of step {len(losses)} is {losses[-1]}.")
                if checkpoints is not None:
                    checkpoints.add(len(losses), losses[-1])
                shown.step(len(losses), losses[-1])
            if saves:
                checkpoints.save(step, state)
            if (step % options.every == 0 or step == last) and (found := job.evaluate(state)):
                texts = {k: repr(v) if isinstance(v, str) else f"{v:.4f}" for k, v in found.items()}
                shown.line(f"step {step}: {', '.join(map(' '.join, texts.items()))}")
            if ends:
                break
    return state, losses


def abstract(init: Callable[[], Any]) -> Any:
    """Shapes and dtypes of the state that ``init`` makes, on the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), jax.eval_shape(init)
    )


def finish(job: Job, console: Console, losses: list[float], save: Callable[[Path], None]) -> None:
    """Plots the losses, and saves the model to ``--out``. Each failure is one line."""
    options = job.options
    if options.out is not None:
        try:
            save(options.out)
        except (OSError, SafetensorError) as error:
            raise SystemExit(f"The model cannot be written to {options.out}: {error}") from None
        console.print(f"The model is in {options.out}.", highlight=False, soft_wrap=True)
    plot(losses, "loss, in nats", options.plot)
    console.print(f"The losses are drawn in {options.plot}.", highlight=False, soft_wrap=True)


def plot(losses: list[float], name: str, path: Path) -> None:
    """Plots the loss of every step, including those before a kill, and its running mean.

    ``name`` is that of the axis. Ends the program with one line if the file cannot be written.
    """
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = np.arange(1, len(losses) + 1)
    span = max(1, len(losses) // 50)
    sums, since = np.cumsum([0.0, *losses]), np.maximum(steps - span, 0)
    mean = (sums[steps] - sums[since]) / (steps - since)
    axes.plot(steps, losses, color="#2a7f62", lw=1, alpha=0.3)
    axes.plot(steps, mean, color="#2a7f62", lw=1.6)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        with drawing(path):
            figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)


@contextlib.contextmanager
def drawing(path: Path):
    """Makes the folder of a picture. Ends the program with one line if that or the file fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise SystemExit(f"The picture cannot be written to {path}: {error}") from None
