"""Shows results in the terminal and keeps them as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.environment import DIRTY, slug

CONTENDERS = ("native", "auto", "jax.nn", "torch", "torch.compile")
OURS = CONTENDERS[:2]


def save(results: dict, folder: Path) -> list[Path]:
    """Write ``results`` to ``folder``: a file for each family of ops, named after the device."""
    written = []
    for family in dict.fromkeys(case["family"] for case in results["cases"]):
        mine = results | {"cases": [c for c in results["cases"] if c["family"] == family]}
        path = folder / f"{slug(results)}-{family}.json"
        write(path, mine)
        written.append(path)
    return written


def write(path: Path, results: dict) -> None:
    """Write compact JSON, and make its folder: a line for each key, and for each case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {_entry(value)}" for key, value in _rounded(results).items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _entry(value) -> str:
    """JSON in one line; a list of objects has a line for each."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def contenders(results: dict) -> list[str]:
    """The contenders that were measured; those of JAX are always shown."""
    measured = {name for case in results["cases"] for name in case["results"]}
    return [name for name in CONTENDERS if name in measured or not name.startswith("torch")]


def _rounded(value):
    """Floats with six significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def show(results: dict, console: Console) -> None:
    """Tables on a terminal, plain lines elsewhere."""
    console.print(headline(results), highlight=False, soft_wrap=True)
    for title, header, rows in (times(results), memory(results)):
        if not rows:
            continue
        if console.is_terminal:
            console.print(_table(title, header, rows))
        else:
            _lines(title, header, rows, console)
    for text in errors(results):
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def headline(results: dict) -> str:
    """Hardware, versions, the clock, and the copy that sets the floor if there is one."""
    hardware, versions, copy = results["hardware"], results["versions"], results.get("copy")
    torch = f", PyTorch {versions['torch']}" if "torch" in versions else ""
    commit = f" at {short(versions['commit'])}" if versions.get("commit") else ""
    speed = copy and (
        f"streaming copy {copy['gbs']:.0f} GB/s (from {copy['min_gbs']:.0f} to "
        f"{copy['max_gbs']:.0f}); "
    )
    what = (
        f"{hardware['device']} ({hardware['platform']}, {hardware['cores']} CPU cores), "
        f"jax {versions['jax']}, jax_fastops {versions['jax_fastops']}{commit}{torch}"
    )
    if "clock" not in results:  # nothing was timed
        return what
    return f"{what}; {speed or ''}{results['clock']} clock, median of {results['rounds']} rounds"


def short(commit: str) -> str:
    """``0123456789`` or ``0123456789-dirty``."""
    return commit[:10] + (DIRTY if commit.endswith(DIRTY) else "")


def errors(results: dict) -> Iterator[str]:
    """Contenders that failed, or returned other results."""
    for case in results["cases"]:
        for name, error in case["errors"].items():
            yield f"{_name(case)}, {name}: {error}"


Rows = tuple[str, tuple[str, ...], list[list[str]]]  # title, header, rows


def times(results: dict) -> Rows:
    """A row for each case and phase: µs and multiples of the floor, speed-ups over jax.nn."""
    names = contenders(results)
    title = f"Time in µs (and over the floor); speed-ups over jax.nn; kernels of {', '.join(names)}"

    def rows():
        for case in results["cases"]:
            entries = {name: case["results"].get(name) for name in names}
            for phase, floor in case["floor_us"].items():
                numbers = [e and e["phases"].get(phase) for e in entries.values()]
                ours = [e and e["phases"].get(phase) for e in map(entries.get, OURS)]
                launches = [str(n["launches"]) if n else "-" for n in numbers]
                cells = [phase.replace("_", " "), f"{floor:.1f}", *map(_time, numbers)]
                yield [_name(case), *cells, *map(_speedup, ours), " ".join(launches)]

    return title, ("case", "phase", "floor", *names, *OURS, "kernels"), list(rows())


def memory(results: dict) -> Rows:
    """A row for each differentiated case: bytes kept for the backward, temporaries of a step."""
    names = [name for name in contenders(results) if not name.startswith("torch")]

    def rows():
        for case in (c for c in results["cases"] if "backward" in c["floor_us"]):
            entries = [case["results"].get(name) for name in names]
            saved = [_bytes(e and (e["saved_bytes"] or {}).get("total")) for e in entries]
            yield [_name(case), *saved, *(_bytes(e and e["temp_bytes"]) for e in entries)]

    header = ("case", *(f"{name} {what}" for what in ("keeps", "temp") for name in names))
    return "Kept between forward and backward; peak temporaries of a step", header, list(rows())


def _table(title: str, header: tuple[str, ...], rows: list[list[str]]) -> Table:
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
    """Speed-ups in green where jax_fastops is faster, in red where jax.nn is."""
    if not text.endswith("x"):
        return text
    value = float(text[:-1])
    colour = "green" if value > 1.02 else "red" if value < 0.98 else "default"
    return f"[{colour}]{text}[/]"


def _name(case: dict) -> str:
    return f"{case['op']} {case['label']} {case['dtype']}"


def _time(numbers: dict | None) -> str:
    return f"{numbers['median_us']:.1f} ({numbers['of_floor']:.2f})" if numbers else "-"


def _speedup(numbers: dict | None) -> str:
    speedup = numbers and numbers.get("speedup")
    return f"{speedup:.2f}x" if speedup else "-"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
