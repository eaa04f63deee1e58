"""The output of the demo: a table, and a picture of the losses, times and bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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


class Pair(NamedTuple):
    """Two trainings of one network."""

    title: str
    ours: Training
    theirs: Training
    tolerance: float  # the largest allowed difference of their losses
    kept: tuple[int, int]  # bytes for the backward, in total
    agreed: bool


def picture(pairs: Sequence[Pair], path: Path) -> Path:
    """Writes loss curves, their differences, and bars of times and bytes, to ``path``.

    The pairs are below each other, so that the text can be read on a narrow screen.
    """
    figure, panels = plt.subplots(
        3 * len(pairs),
        figsize=(4.7, 5.2 * len(pairs)),
        height_ratios=(2.6, 1.2, 1.6) * len(pairs),
        layout="constrained",
    )
    for number, pair in enumerate(pairs):
        top, middle, bottom = panels[3 * number : 3 * number + 3]
        _curves(pair, top, middle)
        _bars(pair, bottom)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170)
    plt.close(figure)
    return path


def _curves(pair: Pair, top, bottom) -> None:
    ours, theirs, tolerance = pair.ours, pair.theirs, pair.tolerance
    steps = np.arange(1, len(ours.losses) + 1)
    gap = np.abs(np.subtract(ours.losses, theirs.losses))
    top.plot(steps, theirs.losses, color=THEIRS, lw=6, label=theirs.name)
    top.plot(steps, ours.losses, color=OURS, lw=1.5, label=ours.name)
    top.set_ylabel("training loss")
    top.set_ylim(bottom=0)
    title = pair.title.replace(", ", ",\n")
    top.set_title(title, loc="left", pad=14, fontsize=11, fontweight="bold")
    top.legend(frameon=False)
    top.sharex(bottom)
    top.tick_params(labelbottom=False)
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


def _bars(pair: Pair, axes) -> None:
    """Two groups of two bars. The longer bar of each group fills it."""
    times = (pair.ours.step_ms, pair.theirs.step_ms)
    groups = {
        "time of a step (median)": (times, [f"{time:.2f} ms" for time in times]),
        "kept for the backward": (pair.kept, [kib(count) for count in pair.kept]),
    }
    for number, (label, (values, texts)) in enumerate(groups.items()):
        places = [3.2 * number + 1, 3.2 * number + 2]
        lengths = np.array(values) / max(values)
        axes.text(0, 3.2 * number, label, va="center")
        axes.barh(places, lengths, 0.86, color=(OURS, THEIRS))
        for place, length, text in zip(places, lengths, texts, strict=True):
            axes.annotate(text, (length, place), (3, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.3)
    axes.set_ylim(5.7, -0.6)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
