"""Shows results in the terminal and keeps them as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.environment import slug
from benchmarks.programs import PHASES

COLUMNS = ("native", "auto", "jax.nn")


def save(results: dict, folder: Path) -> Path:
    """Write ``results`` to ``folder``, in a file named after the device."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(results)}.json"
    path.write_text(json.dumps(_rounded(results), indent=1) + "\n")
    return path


def _rounded(value):
    """Floats to three decimals: nanoseconds where the unit is µs."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def show(results: dict, console: Console) -> None:
    """Tables on a terminal, plain lines elsewhere."""
    console.print(headline(results), highlight=False, soft_wrap=True)
    for title, header, rows in (TIMES, MEMORY):
        if console.is_terminal:
            console.print(_table(title, header, rows(results)))
        else:
            _lines(title, header, rows(results), console)
    for text in errors(results):
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def headline(results: dict) -> str:
    """What was measured on, and the copy that sets the floor."""
    hardware, versions, copy = results["hardware"], results["versions"], results["copy"]
    return (
        f"{hardware['device']} ({hardware['platform']}, {hardware['cores']} CPU cores), "
        f"jax {versions['jax']}, jax_fastops {versions['jax_fastops']}; streaming copy "
        f"{copy['gbs']:.0f} GB/s (from {copy['min_gbs']:.0f} to {copy['max_gbs']:.0f}); "
        f"{results['clock']} clock, median of {results['rounds']} rounds"
    )


def errors(results: dict) -> Iterator[str]:
    """What could not be measured, or computed something else."""
    for case in results["cases"]:
        for name, error in case["errors"].items():
            yield f"{_name(case)}, {name}: {error}"


def times(results: dict) -> Iterator[list[str]]:
    """A row for each case and phase: µs and multiples of the floor, speed-ups over jax.nn."""
    for case in results["cases"]:
        for phase in PHASES:
            entries = [case["results"].get(name) for name in COLUMNS]
            yield [
                _name(case),
                phase.replace("_", " "),
                f"{case['floor_us'][phase]:.1f}",
                *(_time(entry, phase) for entry in entries),
                *(_speedup(entry, phase) for entry in entries[:2]),
                " ".join(_launches(entry, phase) for entry in entries),
            ]


def memory(results: dict) -> Iterator[list[str]]:
    """A row for each case: bytes kept between forward and backward, temporaries of a step."""
    for case in results["cases"]:
        entries = [case["results"].get(name) for name in COLUMNS]
        saved = [_bytes(e and (e["saved_bytes"] or {}).get("total")) for e in entries]
        yield [_name(case), *saved, *(_bytes(e and e["temp_bytes"]) for e in entries)]


TIMES = (
    "Time in µs (and over the floor); speed-ups over jax.nn; kernels of native, auto, jax.nn",
    ("case", "phase", "floor", "native", "auto", "jax.nn", "native", "auto", "kernels"),
    times,
)
MEMORY = (
    "Kept between forward and backward; peak temporaries of a step",
    ("case", *(f"{name} {what}" for what in ("keeps", "temp") for name in COLUMNS)),
    memory,
)


def _table(title: str, header: tuple[str, ...], rows: Iterator[list[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for name in header:
        left = name in ("case", "phase")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    previous = None
    for row in rows:
        name, *rest = row
        table.add_row("" if name == previous else name, *map(_coloured, rest))
        previous = name
    return table


def _lines(title: str, header: tuple[str, ...], rows, console: Console) -> None:
    table = [list(header), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    console.print(f"\n{title}", highlight=False, soft_wrap=True)
    for row in table:
        cells = [
            text.ljust(width) if name in ("case", "phase") else text.rjust(width)
            for name, text, width in zip(header, row, widths, strict=True)
        ]
        console.print("  ".join(cells), markup=False, highlight=False, soft_wrap=True)


def _coloured(text: str) -> str:
    """Speed-ups in green where ours is faster, in red where jax.nn's is."""
    if not text.endswith("x"):
        return text
    value = float(text[:-1])
    colour = "green" if value > 1.02 else "red" if value < 0.98 else "default"
    return f"[{colour}]{text}[/]"


def _name(case: dict) -> str:
    return f"{case['op']} {case['label']} {case['dtype']}"


def _time(entry: dict | None, phase: str) -> str:
    if not entry:
        return "-"
    numbers = entry["phases"][phase]
    return f"{numbers['median_us']:.1f} ({numbers['of_floor']:.2f})"


def _speedup(entry: dict | None, phase: str) -> str:
    speedup = entry and entry["phases"][phase].get("speedup")
    return f"{speedup:.2f}x" if speedup else "-"


def _launches(entry: dict | None, phase: str) -> str:
    return str(entry["phases"][phase]["launches"]) if entry else "-"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
