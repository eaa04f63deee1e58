"""Trains three networks, each twice, on jax_fastops and on jax.nn, and compares the two.

Run ``make demo``, or ``python demo`` where the package and its ``demo`` extra are installed. Exits
with status 1 if the losses differ by too much or a test accuracy is too low.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax_fastops as fo
import numpy as np
from jax_fastops.models.bert import FASTOPS, PLAIN
from jax_fastops.models.resnet import FASTOPS as BATCH_NORMS
from jax_fastops.models.resnet import PLAIN as PLAIN_BATCH_NORMS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import bert
import data
import model
import report
import resnet
import saved
from train import Model, Training, rates

SEED = 0


Data = data.Digits | data.Text


def add_then_relu(x, y):
    return jax.nn.relu(x + y)


@dataclass(frozen=True)
class Comparison:
    """One network with two implementations of some of its functions."""

    subject: str
    title: str
    functions: str
    ours: Model
    theirs: Model
    rate: float  # of the first step
    epochs: float  # relative to --epochs
    accuracy: float  # the lowest allowed on the test data
    # The compiler may order the sums of the two programs differently. So losses differ by rounding,
    # and the difference grows with the steps. To measure how far it can grow, every weight was
    # changed by its last bit before the first step.
    tolerance: float
    load: Callable[[], Data] = data.digits
    training: type[Training] = Training
    schedule: Callable[[float, int], np.ndarray] = rates
    kept: Callable = saved.by_training  # bytes kept by a whole forward


COMPARISONS = (
    Comparison(
        "Handwritten digits",
        "a residual multi-layer perceptron",
        "activations",
        model.model(model.Activations(fo.relu, fo.add_relu)),
        model.model(model.Activations(jax.nn.relu, add_then_relu)),
        rate=0.01,
        epochs=1.0,
        accuracy=0.97,
        tolerance=1e-3,  # seen: 1e-4 to 3e-4
    ),
    Comparison(
        "Handwritten digits",
        "a small ResNet",
        "batch norms",
        resnet.model(BATCH_NORMS),
        resnet.model(PLAIN_BATCH_NORMS),
        rate=0.3,
        epochs=0.8,
        accuracy=0.96,
        tolerance=5e-2,  # seen: 4e-4 to 2e-2 near step 50, where the loss falls fast
    ),
    Comparison(
        "Text with hidden bytes",
        "a small BERT",
        "the layer's ops",
        bert.model(FASTOPS),
        bert.model(PLAIN),
        rate=2e-3,
        epochs=0.4,
        accuracy=0.17,  # always guessing the most frequent byte gives 13%
        tolerance=1e-2,  # seen: 1e-6; with two layers and changed last bits 5e-4
        load=data.text,
        training=bert.Training,
        schedule=bert.rates,
        kept=bert.kept_by_training,
    ),
)


def main() -> int:
    options = parse()
    # By default, products of float32 matrices on a GPU have fewer bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    console = Console()
    device = jax.devices()[0]
    console.print(f"jax {jax.__version__} on {device.device_kind}, {os.cpu_count()} CPU cores")
    pairs = []
    for comparison in COMPARISONS:
        epochs = max(1, round(comparison.epochs * options.epochs))
        pairs.append(compared(comparison, comparison.load(), epochs, console))
    console.print(
        "Most of a step is matrix products and convolutions; `make bench` measures the ops alone."
    )
    path = report.picture(pairs, options.out)
    text = f"The loss curves, times and bytes are drawn in {shown(path)}."
    console.print(text, highlight=False, soft_wrap=True)
    return 0 if all(pair.agreed for pair in pairs) else 1


def compared(comparison: Comparison, given: Data, epochs: int, console: Console) -> report.Pair:
    """Trains with both implementations and prints the results."""
    title = f"{comparison.subject}, by {comparison.title}"
    console.print(f"\n[bold]{title}[/]", highlight=False)
    with fo.use_implementation("native"):  # on arrays this small, "auto" would take the reference
        ours = comparison.training("jax_fastops", comparison.ours, given, SEED)
        kept = counts(comparison, ours, given)
    theirs = comparison.training("jax.nn", comparison.theirs, given, SEED)
    kept_by_theirs = counts(comparison, theirs, given)
    schedule = comparison.schedule(comparison.rate, epochs * given.steps_per_epoch)
    run((ours, theirs), given, schedule, console)

    accuracies = [t.accuracy(given.test_x, given.test_y) for t in (ours, theirs)]
    rows = {
        "kernels of jax_fastops in a step": tuple(
            str(t.kernels.total() or "none") for t in (ours, theirs)
        ),
        "time of a step (median)": tuple(f"{t.step_ms:.2f} ms" for t in (ours, theirs)),
        f"kept for the backward, by {comparison.functions}": (
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
    agreed = verdict(comparison, ours, theirs, accuracies, console)
    return report.Pair(
        title, ours, theirs, comparison.tolerance, (kept[1], kept_by_theirs[1]), agreed
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python demo", description=__doc__)
    parser.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="of the perceptron; of the others fewer (default: 30; with --quick, 15)",
    )
    parser.add_argument("--quick", action="store_true", help="a shorter training")
    out = Path(__file__).resolve().parent / "out" / "losses.png"
    parser.add_argument("--out", type=Path, default=out, metavar="PNG", help="the picture's path")
    options = parser.parse_args()
    options.epochs = options.epochs or (15 if options.quick else 30)
    return options


def counts(comparison: Comparison, training: Training, given: Data) -> tuple[int, int]:
    """Bytes kept for the backward of a batch: by the compared functions, and in total."""
    x, labels = given.first
    state = (training.params, training.statistics)
    return training.model.kept(*state, x), comparison.kept(training, x, labels)


def run(trainings, given: Data, schedule: np.ndarray, console: Console) -> None:
    """Trains all, one step each in turn, so that other load on the machine slows all equally."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    epochs = len(schedule) // given.steps_per_epoch
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bars = [progress.add_task(t.name, total=len(schedule), loss=np.nan) for t in trainings]
        for rate, batch in zip(schedule, given.batches(epochs, SEED), strict=True):
            for training, bar in zip(trainings, bars, strict=True):
                training.step(rate, *batch)
                progress.update(bar, advance=1, loss=training.losses[-1])


def verdict(
    comparison: Comparison,
    ours: Training,
    theirs: Training,
    accuracies: list[float],
    console: Console,
) -> bool:
    """Prints and returns whether the two agree and have learned."""
    gap = float(np.max(np.abs(np.subtract(ours.losses, theirs.losses))))
    lowest = min(accuracies)
    allowed, wanted = comparison.tolerance, comparison.accuracy
    checks = {
        f"largest difference of the losses {gap:.1e}, allowed {allowed:.0e}": gap <= allowed,
        f"lowest test accuracy {lowest:.2%}, wanted {wanted:.0%}": lowest >= wanted,
    }
    for text, passed in checks.items():
        mark = "[green]ok[/]  " if passed else "[red]FAILED[/]"
        console.print(f"{mark} {text}", highlight=False)
    return all(checks.values())


def shown(path: Path) -> Path:
    """The path, relative to the current folder if it is inside."""
    path = path.resolve()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    raise SystemExit(main())
