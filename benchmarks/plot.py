"""Charts as SVG: one question each, at most 16 bars, drawn for a light and for a dark page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MOST_BARS = 16
WIDTH = 7.2  # inches: 691 px, the width of a page of text


@dataclass(frozen=True)
class Theme:
    """The colors of a chart. The background is the page's."""

    name: str
    text: str
    kernel: str
    reference: str
    line: str


THEMES = (
    Theme("light", text="#24292f", kernel="#1a7f5a", reference="#b8bec6", line="#c0392b"),
    Theme("dark", text="#e6edf3", kernel="#3fb68b", reference="#6e7781", line="#ff7b72"),
)


@dataclass(frozen=True)
class Bars:
    """One group of bars: a label, and a value for each series."""

    label: str
    values: tuple[float, ...]


def draw(path: Path, title: str, groups: Sequence[Bars], *args, **options) -> list[Path]:
    """Writes ``<path>-light.svg`` and ``<path>-dark.svg``; returns their paths.

    ``series`` names the bars of each group, ``line`` what the vertical line at 1 stands for, and
    ``axis`` the horizontal axis. A bar longer than ``limit`` is cut; its value is written on it.
    """
    if sum(len(group.values) for group in groups) > MOST_BARS:
        raise ValueError(f"{path.name}: more than {MOST_BARS} bars")
    return [_draw(theme, path, title, groups, *args, **options) for theme in THEMES]


def _draw(theme: Theme, path, title, groups, series, line, axis, limit, unit="") -> Path:
    colored = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    settings = dict.fromkeys(colored, theme.text) | {
        "font.size": 10,
        "svg.fonttype": "none",  # text stays text: small files that can be searched and checked
        "svg.hashsalt": path.name,  # the same file from the same numbers
    }
    bars = sum(len(group.values) for group in groups)
    with plt.rc_context(settings):
        height = 0.2 * bars + 0.14 * len(groups) + (1.45 if len(series) > 1 else 1.2)
        figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
        colors = (theme.kernel, theme.reference)
        end = min(limit, max(value for group in groups for value in group.values))
        thickness = 0.84 / len(series)
        for index, name in enumerate(series):
            places = [
                row + (index - (len(series) - 1) / 2) * thickness for row in range(len(groups))
            ]
            values = [group.values[index] for group in groups]
            lengths = [min(value, end) for value in values]
            axes.barh(places, lengths, thickness * 0.92, color=colors[index], label=name)
            for place, value in zip(places, values, strict=True):
                text = f"{value:.2f}{unit}" if value < 10 else f"{value:.0f}{unit}"
                after = 1 if 0.7 < value < 1 else min(value, end)  # clear of the line at 1
                axes.annotate(
                    text + (" (cut)" if value > end else ""),
                    (after, place),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
        axes.axvline(1, color=theme.line, lw=1.3, label=line, zorder=3)
        axes.set_yticks(range(len(groups)), [group.label for group in groups])
        axes.set_ylim(len(groups) - 0.45, -0.55)
        axes.set_xlim(0, end * 1.16)
        axes.set_xlabel(axis)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.legend(
            loc="outside lower center",
            ncols=len(series) + 1,
            frameon=False,
            fontsize=9,
            reverse=len(series) == 1,
        )
        written = path.with_name(f"{path.name}-{theme.name}.svg")
        figure.savefig(written, transparent=True, metadata={"Date": None})
        plt.close(figure)
    return written
