"""Puts the measured tables into the README: ``python -m benchmarks.readme`` (``--check`` in CI).

Between ``<!-- results: NAME -->`` and ``<!-- end of results -->`` stands the table made of
``results/NAME.json``. The README's numbers are thus those of the results, and nothing else.
"""

import argparse
import json
import re
import sys

from benchmarks import RESULTS, ROOT
from benchmarks.report import headline

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
PHASES = (
    ("forward", "forward"),
    ("forward that keeps the mask", "forward_saving"),
    ("backward", "backward"),
    ("both, one step", "step"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the README is not up to date")
    check = parser.parse_args().check
    text = README.read_text()
    filled = BLOCK.sub(lambda m: m[1] + table(m[2]) + m[3], text)
    if filled == text:
        return
    if check:
        sys.exit("README.md differs from benchmarks/results: run 'python -m benchmarks.readme'")
    README.write_text(filled)


def table(name: str) -> str:
    """The Markdown of one results file: a row per case, a column per phase, ours beside XLA's."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    header = ["op, shape", "dtype", *(title for title, _ in PHASES), "kept: ours / XLA"]
    rows = [row(case) for case in results["cases"]]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return f"{headline(results)}.\n\n" + "\n".join(lines) + "\n"


def row(case: dict) -> list[str]:
    shapes = " ".join(f"({', '.join(map(str, s))})" for s in case["shapes"])
    ours, xla = case["results"]["native"], case["results"]["jax.nn"]
    cells = [f"`{case['op']}` {shapes}", case["dtype"]]
    cells += [phase(ours["phases"][key], xla["phases"][key]) for _, key in PHASES]
    return [*cells, " / ".join(mib(side["saved_bytes"]["total"]) for side in (ours, xla))]


def phase(ours: dict, xla: dict) -> str:
    """``180 µs (1.03) / 174 µs (0.99)``: ours and XLA's, the faster one in bold."""
    texts = [f"{side['median_us']:.3g} µs ({side['of_floor']:.2f})" for side in (ours, xla)]
    faster = 0 if ours["median_us"] <= xla["median_us"] else 1
    texts[faster] = f"**{texts[faster]}**"
    return " / ".join(texts)


def mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.3g} MiB"


if __name__ == "__main__":
    main()
