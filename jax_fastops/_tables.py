"""Tables of ``explain`` and of ``autofuse.report``: as text, for notebooks and as Markdown."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence

# Of a column that must be narrower than its text. The last one takes what is left.
_WIDTHS = {"pattern": 24, "result": 20, "saves": 8, "up to": 22, "where": 24}
_WIDTHS |= {"op": 22, "operands": 20, "runs": 9, "calls": 5, "kept": 7}


def text(rows: Sequence[tuple[str, ...]], most: int = 100) -> str:
    """A table of at most so many columns.

    Long cells have several lines, and paths lose their start.
    """
    if not rows:
        return ""
    rows = _with_places(rows)
    *names, last = rows[0]
    longest = [max(len(row[i]) for row in rows) for i in range(len(names))]
    widths = [min(n, _WIDTHS.get(name, n)) for n, name in zip(longest, names, strict=True)]
    # What other columns do not need goes to those that need more, but the last one is wide enough.
    for i, n in enumerate(longest):
        free = most - sum(widths) - 2 * len(widths) - max(len(last), 30)
        widths[i] = min(n, widths[i] + max(0, free))
    widths.append(most - sum(widths) - 2 * len(widths))
    lines = []
    for row in rows:
        cells = []
        for name, cell, width in zip(rows[0], row, widths, strict=True):
            if name == "where" and len(cell) > width:
                cell = "..." + cell[3 - width :]
            if name == "up to" and len(cell) > width:  # an operation and its operands
                start = cell[: width - 4].rpartition(", ")[0]
                cell = f"{start}, ...)" if start else f"{cell.partition('(')[0]}(...)"
            cells.append(textwrap.wrap(cell, width) or [""])
        for i in range(max(map(len, cells))):
            line = (c[i] if i < len(c) else "" for c in cells)
            padded = (x.ljust(width) for x, width in zip(line, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _with_places(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows with "cell" in place of the file that IPython makes of a cell."""
    if not rows or "where" not in rows[0]:
        return list(rows)
    at = rows[0].index("where")
    file = re.compile(r"\S*/ipykernel_\d+/\d+\.py")
    return [(*row[:at], file.sub("cell", row[at]), *row[at + 1 :]) for row in rows]


def as_html(rows: Sequence[tuple[str, ...]]) -> str:
    lines = []
    for row in _with_places(rows):
        kind = "td" if lines else "th"
        cells = (f'<{kind} style="text-align:left">{html.escape(c)}</{kind}>' for c in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    # The class is that of pandas' tables, for which notebooks and pages have a style.
    return f'<table class="dataframe">{"".join(lines)}</table>' if rows else ""


def as_markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [" | ".join(_escaped(cell) for cell in row) for row in _with_places(rows)]
    lines[1:1] = [" | ".join("---" for _ in row) for row in rows[:1]]
    return "\n".join(f"| {line} |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|").replace("<", "&lt;")


def size(n: int) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 999.5:  # which has three digits
            return f"{n:.3g} {unit}" if unit != "B" else f"{n} B"
        n = n / 1000  # type: ignore[assignment]
    return f"{n:.3g} GB"
