"""Trains one classifier twice, on jax_fastops and on jax.nn, and compares the two.

Run ``make demo``, or ``python demo`` where the package and its ``demo`` extra are installed. Exits
with status 1 if the loss curves part or the test accuracy is too low.
"""

import argparse
import os
from pathlib import Path

import jax
import jax_fastops as fo
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import data
import report
import saved
from model import Activations
from train import Training, rates

SEED = 0
ACCURACY = 0.97
# ReLU has no rounding of its own, but the compiler may order the sums of the two programs
# differently. Changing every weight by its last bit before the first step moved the loss by 1e-4 to
# 3e-4 somewhere along the way, so that is what float32 rounding can do here.
TOLERANCE = 1e-3


def add_then_relu(x, y):
    return jax.nn.relu(x + y)


NATIVE = Activations(fo.relu, fo.add_relu)
PLAIN = Activations(jax.nn.relu, add_then_relu)


def main() -> int:
    options = parse()
    # Products of float32 matrices in float32 on a GPU too, where the default has fewer bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    console = Console()
    device = jax.devices()[0]
    console.print(f"jax {jax.__version__} on {device.device_kind}, {os.cpu_count()} CPU cores")

    digits = data.load()
    with fo.use_implementation("native"):  # "auto" would leave what it can to XLA's fusion
        ours = Training("jax_fastops", NATIVE, digits, SEED)
        kept = counts(NATIVE, ours, digits)
    theirs = Training("jax.nn", PLAIN, digits, SEED)
    kept_by_theirs = counts(PLAIN, theirs, digits)
    run((ours, theirs), digits, options.epochs, console)

    accuracies = [t.accuracy(digits.test_x, digits.test_y) for t in (ours, theirs)]
    rows = {
        "kernels of jax_fastops in a step": tuple(
            str(t.kernels.total() or "none") for t in (ours, theirs)
        ),
        "time of a step (median)": tuple(f"{t.step_ms:.2f} ms" for t in (ours, theirs)),
        "kept for the backward, by activations": (
            report.kib(kept[0]),
            report.kib(kept_by_theirs[0]),
        ),
        "kept for the backward, in total": (report.kib(kept[1]), report.kib(kept_by_theirs[1])),
        "loss of the last step": tuple(f"{t.losses[-1]:.6f}" for t in (ours, theirs)),
        "test accuracy": tuple(f"{a:.2%}" for a in accuracies),
    }
    console.print(report.table(rows, (ours.name, theirs.name)))
    if ours.kernels:
        names = ", ".join(f"{count} {name}" for name, count in sorted(ours.kernels.items()))
        console.print(f"The kernels in a step: {names}.", highlight=False)
    else:
        console.print("There are no kernels for this device: jax_fastops ran its reference in XLA.")
    console.print("Most of a step is matrix products; `make bench` measures the ops alone.")
    path = report.curves(ours, theirs, TOLERANCE, options.out)
    console.print(f"The loss curves are in {shown(path)}.", highlight=False, soft_wrap=True)
    return verdict(ours, theirs, accuracies, console)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python demo", description=__doc__)
    parser.add_argument("--epochs", type=int, metavar="N", help="default: 30; with --quick, 15")
    parser.add_argument("--quick", action="store_true", help="a shorter training")
    out = Path(__file__).resolve().parent / "out" / "digits.png"
    parser.add_argument("--out", type=Path, default=out, metavar="PNG", help="the picture's path")
    options = parser.parse_args()
    options.epochs = options.epochs or (15 if options.quick else 30)
    return options


def counts(activations: Activations, training: Training, digits: data.Digits) -> tuple[int, int]:
    """Bytes kept for the backward of a batch: by the activations, and in total."""
    x, labels = digits.train_x[: data.BATCH], digits.train_y[: data.BATCH]
    return (
        saved.by_activations(activations, training.params, x),
        saved.by_model(activations, training.params, x, labels),
    )


def run(trainings, digits: data.Digits, epochs: int, console: Console) -> None:
    """Train all in turns, a step each, so that what else the machine does slows each alike."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    schedule = rates(epochs * digits.steps_per_epoch)
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bars = [progress.add_task(t.name, total=len(schedule), loss=np.nan) for t in trainings]
        for rate, batch in zip(schedule, digits.batches(epochs, SEED), strict=True):
            for training, bar in zip(trainings, bars, strict=True):
                training.step(rate, *batch)
                progress.update(bar, advance=1, loss=training.losses[-1])


def verdict(ours: Training, theirs: Training, accuracies: list[float], console: Console) -> int:
    """Say whether the two agree and have learnt; 0 if so, else 1."""
    gap = float(np.max(np.abs(np.subtract(ours.losses, theirs.losses))))
    checks = {
        f"largest difference of the losses {gap:.1e}, allowed {TOLERANCE:.0e}": gap <= TOLERANCE,
        f"lowest test accuracy {min(accuracies):.2%}, wanted {ACCURACY:.0%}": min(accuracies)
        >= ACCURACY,
    }
    for text, passed in checks.items():
        mark = "[green]ok[/]  " if passed else "[red]FAILED[/]"
        console.print(f"{mark} {text}", highlight=False)
    return 0 if all(checks.values()) else 1


def shown(path: Path) -> Path:
    """Relative to the current folder where it lies below."""
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    raise SystemExit(main())
