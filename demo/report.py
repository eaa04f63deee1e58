"""The output of the demo: a table, and a picture of the loss curves."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.table import Table

from train import Training

OURS, THEIRS = "#2a7f62", "#b9b9b9"


def table(rows: dict[str, tuple[str, str]], names: tuple[str, str]) -> Table:
    """One row per quantity, one column per training."""
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("")
    for name in names:
        drawn.add_column(name, justify="right")
    for label, cells in rows.items():
        drawn.add_row(label, *cells)
    return drawn


def kib(count: int) -> str:
    return f"{count / 1024:,.0f} KiB"


def curves(pairs: Sequence[tuple[str, Training, Training, float]], path: Path) -> Path:
    """Writes loss curves and their differences, one column per pair, to ``path``.

    A pair is a title, two trainings, and the largest allowed difference of their losses.
    """
    figure, panels = plt.subplots(
        2,
        len(pairs),
        figsize=(6 * len(pairs), 6),
        height_ratios=(3, 1),
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle("The same training, once on each library")
    for pair, top, bottom in zip(pairs, *panels, strict=True):
        _column(*pair, top, bottom)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _column(title: str, ours: Training, theirs: Training, tolerance: float, top, bottom) -> None:
    steps = np.arange(1, len(ours.losses) + 1)
    gap = np.abs(np.subtract(ours.losses, theirs.losses))
    top.plot(steps, theirs.losses, color=THEIRS, lw=6, label=theirs.name)
    top.plot(steps, ours.losses, color=OURS, lw=1.5, label=ours.name)
    top.set_ylabel("training loss")
    top.set_ylim(bottom=0)
    top.set_title(title)
    top.legend(frameon=False)
    bottom.plot(steps, gap, color=OURS, lw=1.5)
    bottom.axhline(tolerance, color="#b03030", lw=1.2, ls="--")
    bottom.annotate(
        "allowed", (steps[-1], tolerance), (0, 3), textcoords="offset points", ha="right"
    )
    if not gap.any():
        bottom.annotate("equal to the last bit", (0.5, 0.4), xycoords="axes fraction", ha="center")
    bottom.set_ylim(-0.05 * tolerance, 1.4 * max(tolerance, gap.max()))
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
