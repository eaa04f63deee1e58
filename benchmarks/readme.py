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
    ("forward that saves", "forward_saving"),
    ("backward", "backward"),
    ("both, one step", "step"),
)
MOVES = {"forward": "forward", "backward": "backward", "step": "both, one step"}
WAYS = {"native": "kernels", "xla": "XLA", "auto": '`"auto"`', "without": "without the move"}
CONTENDERS = {
    "native": "ours",
    "jax.nn": "XLA",
    "torch": "PyTorch",
    "torch.compile": "PyTorch, compiled",
}


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
    """The Markdown of one results file: what ops keep and all phases, if they keep anything;
    multiples of the floor beside PyTorch's, if they only move elements or PyTorch was measured;
    times of whole blocks; of a whole network, with its memory; errors."""
    results = json.loads((RESULTS / f"{name}.json").read_text())
    if "blocks" in results:
        header, rows = blocks_table(results)
    elif "rows" in results:
        header, rows = network_table(results)
    elif "layers" in results:
        header, rows = layers_table(results)
    elif "accuracy" in results:
        header, rows = accuracy_table(results)
    else:
        compared = any("torch" in case["results"] for case in results["cases"])
        of_phases = contenders_table if compared else phase_table
        header, rows = (of_phases if keeps(results) else multiples_table)(results)
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return f"{headline(results)}.\n\n" + "\n".join(lines) + "\n"


def keeps(results: dict) -> bool:
    """Whether an op of ours keeps anything between forward and backward."""
    entries = (case["results"].get("native") for case in results["cases"])
    return any(e and e["saved_bytes"] and e["saved_bytes"]["total"] for e in entries)


def phase_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per case, a column per phase, ours beside XLA's."""
    header = ["op, shape", "dtype", *(title for title, _ in PHASES), "kept: ours / XLA"]
    return header, [row(case) for case in results["cases"]]


def contenders_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per case, a column per phase: multiples of the floor of every contender."""
    names = list(CONTENDERS)
    who = " / ".join(CONTENDERS.values())
    header = ["op, shape", "dtype", *(f"{title}: {who}" for title in list(MOVES.values())[:1])]
    header += list(MOVES.values())[1:]
    rows = []
    for case in results["cases"]:
        cells = [what(case), case["dtype"]]
        for key in MOVES:
            entries = [case["results"].get(name) for name in names]
            times = [e and e["phases"].get(key, {}).get("of_floor") for e in entries]
            cells.append(" / ".join(multiples(times)))
        rows.append(cells)
    return header, rows


def row(case: dict) -> list[str]:
    ours, xla = case["results"]["native"], case["results"]["jax.nn"]
    cells = [what(case), case["dtype"]]
    cells += [phase(ours["phases"][key], xla["phases"][key]) for _, key in PHASES]
    return [*cells, " / ".join(mib(side["saved_bytes"]["total"]) for side in (ours, xla))]


def phase(ours: dict, xla: dict) -> str:
    """``180 µs (1.03) / 174 µs (0.99)``: ours and XLA's, the faster one in bold."""
    texts = [f"{side['median_us']:.3g} µs ({side['of_floor']:.2f})" for side in (ours, xla)]
    faster = 0 if ours["median_us"] <= xla["median_us"] else 1
    texts[faster] = f"**{texts[faster]}**"
    return " / ".join(texts)


def multiples_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per case and phase, a column per contender, the fastest in bold."""
    measured = {name for case in results["cases"] for name in case["results"]}
    names = [name for name in CONTENDERS if name in measured]
    several = any(len(case["floor_us"]) > 1 for case in results["cases"])
    header = ["op, shape", "dtype", *(["phase"] if several else []), "floor"]
    rows = []
    for case in results["cases"]:
        for key, title in MOVES.items():
            if key not in case["floor_us"]:
                continue
            entries = [case["results"].get(name) for name in names]
            times = [e and e["phases"].get(key, {}).get("of_floor") for e in entries]
            cells = [what(case), case["dtype"], *([title] if several else [])]
            cells.append(f"{case['floor_us'][key]:.3g} µs")
            rows.append([*cells, *multiples(times)])
    return [*header, *(CONTENDERS[name] for name in names)], rows


def multiples(times: list[float | None]) -> list[str]:
    """``1.03``, or ``-`` for what was not measured."""
    best = min((t for t in times if t), default=None)
    texts = [f"{t:.2f}" if t else "-" for t in times]
    return [f"**{s}**" if t and t == best else s for s, t in zip(texts, times, strict=True)]


def blocks_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per block and phase, µs and kernels of each way to make its transpositions."""
    rows = []
    for block in results["blocks"]:
        for key in block["results"]["native"]:
            sides = [block["results"].get(way, {}).get(key) for way in WAYS]
            best = min(side["median_us"] for side in sides[:2])  # kernels, XLA
            shapes = " ".join(map(_tuple, block["shapes"]))
            cells = [f"{block['block']}, {shapes}", block["dtype"], MOVES[key]]
            for way, side in zip(WAYS, sides, strict=True):
                text = f"{side['median_us']:.4g} µs ({side['launches']})" if side else "-"
                bold = side and way in ("native", "xla") and side["median_us"] == best
                cells.append(f"**{text}**" if bold else text)
            rows.append(cells)
    return ["block", "dtype", "phase", *WAYS.values()], rows


def network_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per program of a network: times and temporary memory, ours beside plain JAX's."""
    header = [results["network"]["name"], "ours", "plain JAX", "faster", "temporary memory: ours"]
    rows = []
    for entry in results["rows"]:
        sides = [entry["results"].get(who) for who in ("ours", "plain")]
        cells = [f"{side['median_us'] / 1e3:.2f} ms" if side else "-" for side in sides]
        speed, memory = "-", [f"{side['temp_mib']:.0f} MiB" if side else "-" for side in sides]
        if all(sides):
            faster = 0 if sides[0]["median_us"] <= sides[1]["median_us"] else 1
            cells[faster] = f"**{cells[faster]}**"
            speed = f"{sides[1]['median_us'] / sides[0]['median_us']:.2f}x"
        rows.append([entry["row"], *cells, speed, *memory])
    return [*header, "plain JAX's"], rows


def layers_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per way to attend, the kernels that the forward of one layer launches."""
    counts: dict[tuple, dict] = {}
    for entry in results["layers"]:
        key = (entry["attention"], f"[{entry['batch']}, {entry['length']}]", entry["dtype"])
        counts.setdefault((*key, entry["weights"]), {})[entry["contender"]] = entry["count"]
    names = {"ours": "kernels: ours", "plain": "plain JAX"}
    rows = [
        [*key, *(str(found[name]) if name in found else "-" for name in names)]
        for key, found in counts.items()
    ]
    return ["attention", "tokens", "dtype", "weights", *names.values()], rows


def accuracy_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per op, dtype and kind of data: worst errors, ours beside jax.nn's."""
    header = ["op", "dtype", "data", "results: ours / jax.nn", "gradients: ours / jax.nn"]
    rows = []
    for entry in results["accuracy"]:
        cells = [f"`{entry['op']}`", entry["dtype"], entry["data"].replace("_", " ")]
        for part in ("results", "gradients"):
            sides = entry["errors"][part]
            cells.append(f"{sides['ours']:.2g} / {sides['jax.nn']:.2g}")
        rows.append(cells)
    return header, rows


def what(case: dict) -> str:
    """The op, its operands' shapes and its options."""
    shapes = " ".join(map(_tuple, case["shapes"]))
    options = case.get("options", {})
    text = f"`{case['op']}` {shapes}"
    if "axes" in options:
        text += f" → {_tuple(options['axes'])}"
    if "num_heads" in options:
        text += f", {options['num_heads']} heads"
    if "axis" in options:
        text += f", axis {options['axis']}"
    if "scale" in options:
        text += f", scale {options['scale']}"
    if "radius" in options:
        text += f", radius {options['radius']}"
    if "padding" in options:
        text += f", {options['padding']}"
    if "activation" in options:
        text += f", {options['activation']}"
    return text


def _tuple(numbers: list[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.3g} MiB"


if __name__ == "__main__":
    main()
