"""Charts as SVG: one question each, at most 18 bars, drawn for a light and for a dark page."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MOST_BARS = 18
WIDTH = 4.7  # inches: 451 px. On a screen of 400 px the text is still 10 px high
LINE = 0.19  # inches: the height of a bar, or of a label


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

    ``series`` names the bars of each group, ``line`` what the vertical line at 1 stands for (there
    is none if it is empty), and ``axis`` the horizontal axis. A bar longer than ``limit`` is cut;
    its value is written on it.
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
    # A group is a line with its label, a line for each bar, and a gap.
    rows = len(series) + 1.4
    question, _, facts = title.partition("\n")
    fill = partial(textwrap.fill, width=60, break_on_hyphens=False)
    heading = f"{fill(question)}\n{fill(facts)}"
    with plt.rc_context(settings):
        height = LINE * (rows * len(groups) + heading.count("\n")) + 1.1
        figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
        colors = (theme.kernel, theme.reference)
        end = min(limit, max(value for group in groups for value in group.values))
        for number, group in enumerate(groups):
            axes.text(0, rows * number, group.label, va="center", fontsize=9.5)
        for index, name in enumerate(series):
            places = [rows * number + 1 + index for number in range(len(groups))]
            values = [group.values[index] for group in groups]
            lengths = [min(value, end) for value in values]
            axes.barh(places, lengths, 0.88, color=colors[index], label=name)
            for place, value in zip(places, values, strict=True):
                text = f"{value:.2f}{unit}" if value < 10 else f"{value:.0f}{unit}"
                close = line and 0.7 < value < 1  # to the line at 1
                axes.annotate(
                    text + (" (cut)" if value > end else ""),
                    (1 if close else min(value, end), place),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
        tops = [rows * number + 0.5 for number in range(len(groups))]  # not across the labels
        ends = [top + len(series) for top in tops]
        if line:
            ones = [1] * len(groups)
            axes.vlines(ones, tops, ends, color=theme.line, lw=1.3, label=line, zorder=3)
        axes.set_yticks([])
        axes.set_ylim(rows * len(groups) - 0.6, -0.7)
        axes.set_xlim(0, end * 1.2)
        axes.set_xlabel(axis)
        axes.spines[["top", "right", "left"]].set_visible(False)
        figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
        figure.legend(
            loc="outside lower center",
            ncols=2 if len("".join((*series, line))) > 40 else len(series) + bool(line),
            frameon=False,
            fontsize=9,
            reverse=len(series) == 1,
        )
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return write_changed(path.with_name(f"{path.name}-{theme.name}.svg"), text.getvalue())


def write_changed(path: Path, text: str) -> Path:
    """Writes a file, if that changes it: otherwise, Sphinx reads again all pages that have it."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path
