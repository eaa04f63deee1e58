"""The README's numbers and chart, from benchmarks/results.

A number in the README is followed by a marker that names it: ``2.30<!-- norm_speedup -->``; the
names are the keys of `benchmarks.numbers.numbers`. The table between two comments ``one-line`` is
that of `benchmarks.tables.one_line_table`. The command writes the numbers and the table, and draws
the chart; ``--check``, which CI runs, fails where one of them differs, or where a measured number
has no marker.
"""

import re
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT
from benchmarks.numbers import numbers, one_line
from benchmarks.pages import steps
from benchmarks.tables import one_line_table

README = ROOT / "README.md"
CHART = ROOT / "docs" / "images" / "speedup"
TABLE = re.compile(r"(<!-- one-line -->\n\n).*?(\n<!-- /one-line -->)", re.DOTALL)
MARKED = re.compile(r"([\d./]+)<!-- (\w+) -->")
# What a measurement looks like in a sentence, if no marker follows it.
_UNIT = r"(?:%|\u00d7|-fold\b|(?:x|ms|µs|us|s|[KMGT]i?B|TB/s|GB/s|times|percent)\b)"
UNMARKED = re.compile(
    rf"\b\d[\d.,]*\s*{_UNIT}|\b\d+/\d+\b|\bfactor of \d[\d.]*|\b(?:twice|half) as\b"
)


def options(add) -> None:
    add("--check", action="store_true", help="fail if the README is not up to date")


def run(options) -> None:
    if options.check:
        if wrong := problems(README.read_text()):
            sys.exit("\n".join([*wrong, "run 'python -m benchmarks readme'"]))
        return
    README.write_text(filled(README.read_text()))
    CHART.parent.mkdir(parents=True, exist_ok=True)
    steps(CHART)


def filled(text: str) -> str:
    """The README with every marked number as the results have it."""
    known = numbers()
    text = MARKED.sub(lambda m: f"{known[m[2]]}<!-- {m[2]} -->", text)
    return TABLE.sub(f"\\1{one_line_table(one_line())}\\2", text)


def problems(text: str) -> list[str]:
    """What in the README does not come from the results."""
    wrong = []
    known = numbers()
    for number, name in MARKED.findall(text):
        if name not in known:
            wrong.append(f"README.md: {name} is no key of benchmarks.numbers")
        elif known[name] != number:
            wrong.append(f"README.md: {name} is {number}, the results have {known[name]}")
    if not wrong and filled(text) != text:
        wrong.append("README.md: the table of what one line gains differs from the results")
    prose = re.sub(r"```.*?```", "", TABLE.sub("", MARKED.sub("", text)), flags=re.DOTALL)
    wrong += [f"README.md: {m[0]!r} has no marker" for m in UNMARKED.finditer(prose)]
    with tempfile.TemporaryDirectory() as folder:
        for drawn in steps(Path(folder) / CHART.name):
            committed = CHART.parent / drawn.name
            if not committed.exists() or words(committed) != words(drawn):
                wrong.append(f"{committed.relative_to(ROOT)} differs from the results")
    return wrong


def words(chart: Path) -> list[str]:
    """The texts of an SVG, in order: labels and the number on each bar."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", chart.read_text())
