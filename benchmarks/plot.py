"""Draws results: multiples of the floor, ours beside jax.nn's. A bar at the line wastes nothing."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = ("forward", "backward", "step")
BARS = (("native", "jax_fastops kernel", "#2a7f62"), ("jax.nn", "jax.nn", "#c9c9c9"))
TOP = 2.5  # bars beyond this many floors are cut, with their height written on them


def draw(results: dict, path: Path) -> Path:
    """Write a PNG with a row of panels for each dtype and a column for each phase."""
    phases = [p for p in PANELS if any(p in case["floor_us"] for case in results["cases"])]
    dtypes = list(dict.fromkeys(case["dtype"] for case in results["cases"]))
    by_dtype = {d: [c for c in results["cases"] if c["dtype"] == d] for d in dtypes}
    widest = max(map(len, by_dtype.values()))
    size = (len(phases) * max(3.4, 0.62 * widest + 0.8), 2.6 * len(dtypes) + 1.2)
    figure, grid = plt.subplots(
        len(dtypes), len(phases), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for row, dtype in zip(grid, dtypes, strict=True):
        for axes, phase in zip(row, phases, strict=True):
            _panel(axes, by_dtype[dtype], phase)
            axes.set_xlim(-0.6, widest - 0.4)
            axes.set_title(f"{phase}, {dtype}", fontsize=10)
        row[0].set_ylabel("time / time of a copy\nof the same bytes", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(_title(results), fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _title(results: dict) -> str:
    copy, versions = results["copy"], results["versions"]
    return (
        f"Time over the floor (lower is better; 1 = as fast as memory allows)\n"
        f"{results['hardware']['device']}, copy {copy['gbs']:.0f} GB/s, jax {versions['jax']}"
    )


def _panel(axes, cases: list[dict], phase: str) -> None:
    width = 0.38
    for offset, (name, label, colour) in zip((-width / 2, width / 2), BARS, strict=True):
        heights = [_height(case, name, phase) for case in cases]
        where = [index + offset for index in range(len(cases))]
        axes.bar(where, [min(h, TOP) for h in heights], width * 0.94, label=label, color=colour)
        for x, height in zip(where, heights, strict=True):
            text = "-" if not height else f"{height:.2f}" if height < 9.995 else f"{height:.0f}"
            axes.annotate(
                text,
                (x, min(height, TOP)),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6,
                fontweight="bold" if height > TOP else "normal",
            )
    chosen = [_height(case, "auto", phase) for case in cases]
    marks = [(i, min(h, TOP)) for i, h in enumerate(chosen) if h]
    if marks:
        axes.plot(*zip(*marks, strict=True), "D", ms=4, color="#1f3b73", label="auto (default)")
    axes.axhline(1, color="#b03030", lw=1.2, label="floor", zorder=3)
    axes.set_ylim(0, TOP * 1.12)
    axes.set_xticks(range(len(cases)), [_label(c) for c in cases], rotation=35, ha="right")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _height(case: dict, name: str, phase: str) -> float:
    entry = case["results"].get(name)
    numbers = entry and entry["phases"].get(phase)
    return numbers["of_floor"] if numbers else 0.0


def _label(case: dict) -> str:
    return f"{case['op']}\n{case['label']}"
