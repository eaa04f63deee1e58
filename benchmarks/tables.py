"""Results as Markdown tables, which ``benchmarks.pages`` puts into the documentation."""

from benchmarks.jobs import runs_kernels
from benchmarks.numbers import fastest, speedup

PHASES = (
    ("forward", "forward"),
    ("forward that saves", "forward_saving"),
    ("backward", "backward"),
    ("forward + backward", "step"),
)
MOVES = {"forward": "forward", "backward": "backward", "step": "forward + backward"}
IMPLEMENTATIONS = {"native": "kernel", "xla": "reference", "auto": '`"auto"`', "without": "no move"}
CONTENDERS = {
    "native": "kernel",
    "jax.nn": "jax.nn",
    "torch": "PyTorch",
    "torch.compile": "compiled PyTorch",
}

# What a row of a job is measured for, and the titles of the columns.
CASE = {
    "shape": "batch x length",
    "dtype": "dtype",
    "positions": "positions of the loss",
    "attention_dropout": "attention dropout",
}
JOBS = {"ours": "jax_fastops", "plain": "plain JAX", "torch": "compiled PyTorch"}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def table(results: dict) -> str:
    """The table of one results file, in the form that fits what was measured."""
    if "blocks" in results:
        return markdown(*blocks_table(results))
    if "rows" in results:
        return markdown(*network_table(results))
    if "layers" in results:
        return markdown(*layers_table(results))
    if "scaling" in results:
        return markdown(*scaling_table(results))
    if "steps" in results:
        return markdown(*steps_table(results))
    if "accuracy" in results:
        return markdown(*accuracy_table(results))
    compared = any("torch" in case["results"] for case in results["cases"])
    of_phases = contenders_table if compared else phase_table
    return markdown(*(of_phases if keeps(results) else multiples_table)(results))


def keeps(results: dict) -> bool:
    """Whether a kernel keeps residuals."""
    entries = (case["results"].get("native") for case in results["cases"])
    return any(e and e["saved_bytes"] and e["saved_bytes"]["total"] for e in entries)


def phase_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per case, a column per phase: kernel and jax.nn."""
    header = ["op, shape", "dtype", *(title for title, _ in PHASES), "residuals"]
    return header, [row(case) for case in results["cases"]]


def contenders_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per case, a column per phase: multiples of the floor of every contender."""
    names = list(CONTENDERS)
    header = ["op, shape", "dtype", *MOVES.values()]
    rows = []
    for case in results["cases"]:
        cells = [what(case), case["dtype"]]
        for key in MOVES:
            cells.append(" / ".join(multiples(case, key, names)))
        rows.append(cells)
    return header, rows


def row(case: dict) -> list[str]:
    ours, xla = case["results"]["native"], case["results"]["jax.nn"]
    cells = [what(case), case["dtype"]]
    cells += [phase(ours["phases"][key], xla["phases"][key]) for _, key in PHASES]
    return [*cells, " / ".join(mib(side["saved_bytes"]["total"]) for side in (ours, xla))]


def phase(ours: dict, xla: dict) -> str:
    """``180 µs (1.03) / 174 µs (0.99)``: kernel and jax.nn, the faster one in bold."""
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
            cells = [what(case), case["dtype"], *([title] if several else [])]
            cells.append(f"{case['floor_us'][key]:.3g} µs")
            rows.append([*cells, *multiples(case, key, names)])
    return [*header, *(CONTENDERS[name] for name in names)], rows


def multiples(case: dict, key: str, names: list[str]) -> list[str]:
    """``1.03`` for each contender, the times of a phase over the floor; ``-`` was not measured."""
    entries = [case["results"].get(name) for name in names]
    times = [e and e["phases"].get(key, {}).get("of_floor") for e in entries]
    best = min((t for t in times if t), default=None)
    texts = [f"{t:.2f}" if t else "-" for t in times]
    return [f"**{s}**" if t and t == best else s for s, t in zip(texts, times, strict=True)]


def blocks_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per block and phase: µs and launches of each way to transpose in it."""
    rows = []
    for block in results["blocks"]:
        for key in block["results"]["native"]:
            sides = [block["results"].get(way, {}).get(key) for way in IMPLEMENTATIONS]
            best = min(side["median_us"] for side in sides[:2])  # kernel, reference
            shapes = " ".join(map(_tuple, block["shapes"]))
            cells = [f"{block['block']}, {shapes}", block["dtype"], MOVES[key]]
            for way, side in zip(IMPLEMENTATIONS, sides, strict=True):
                text = f"{side['median_us']:.4g} µs ({side['launches']})" if side else "-"
                bold = side and way in ("native", "xla") and side["median_us"] == best
                cells.append(f"**{text}**" if bold else text)
            rows.append(cells)
    return ["block", "dtype", "phase", *IMPLEMENTATIONS.values()], rows


def network_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per program of a network: times and temporary memory."""
    header = [results["network"]["name"], "jax_fastops", "plain JAX", "speed-up"]
    rows = []
    for entry in results["rows"]:
        sides = [entry["results"].get(who) for who in ("ours", "plain")]
        cells = [f"{side['median_us'] / 1e3:.2f} ms" if side else "-" for side in sides]
        speed, memory = "-", [f"{side['temp_mib']:.0f} MiB" if side else "-" for side in sides]
        if all(sides):
            faster = 0 if sides[0]["median_us"] <= sides[1]["median_us"] else 1
            cells[faster] = f"**{cells[faster]}**"
            speed = f"{speedup(entry['results']):.2f}x"
        rows.append([entry["row"], *cells, speed, *memory])
    return [*header, "temporary memory", "plain JAX's"], rows


def by_case(results: dict) -> dict[tuple, dict[str, dict]]:
    """The fastest row of each contender of a job, by the values of those of `CASE` that vary."""
    rows = results["rows"]
    names = [name for name in CASE if name in rows[0]]
    cases = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return {
        case: fastest(rows, **dict(zip(names, case, strict=True)))
        for case in sorted(cases, key=lambda case: _tokens(case[0]))
    }


def _tokens(shape: str) -> tuple[int, int]:
    batch, length = map(int, shape.split("x"))
    return batch * length, length


def job_table(results: dict) -> str:
    """A row per case of a whole job: milliseconds of each contender, the fastest in bold.

    Several processes have their range in parentheses. A table with the number of kernels compares
    with plain JAX only where a kernel is known to run.
    """
    header = [title for name, title in CASE.items() if name in results["rows"][0]]
    header += [*JOBS.values(), "over plain JAX"]
    sums = {"temp_bytes": ("temporary memory, GB", 1e-9), "latency_ms": ("waited for, ms", 1.0)}
    sums = {key: value for key, value in sums.items() if key in results["rows"][0]}
    kernels = "calls" in results["rows"][0]
    rows = []
    for (shape, *facts), found in by_case(results).items():
        best = min((row["ms"] for row in found.values()), default=None)
        cells = [shape.replace("x", " x "), *map(str, facts)]
        for who in JOBS:
            text = _span(found[who]) if who in found else "-"
            cells.append(f"**{text}**" if who in found and found[who]["ms"] == best else text)
        compared = found.keys() >= {"ours", "plain"}
        compared &= not kernels or bool(runs_kernels(found["ours"]))
        cells.append(f"{speedup(found, 'ms'):.2f}x" if compared else "-")
        for key, (_, unit) in sums.items():
            values = [found.get(who, {}).get(key) for who in JOBS]
            texts = ["-" if v is None else f"{v * unit:.{1 if unit < 1 else 2}f}" for v in values]
            cells.append(" / ".join(texts))
        rows.append(cells + ([_kernels(found["ours"])] if kernels else []))
    header += [title for title, _ in sums.values()]
    return markdown(header + (["kernels of jax_fastops"] if kernels else []), rows)


def _kernels(row: dict) -> str:
    """The number of calls of kernels, if the row has it or says that there is none."""
    return str(row.get("calls", 0 if runs_kernels(row) is False else "-"))


def _span(row: dict, key: str = "ms") -> str:
    """``0.37 ms``, or ``0.37 ms (0.34 to 0.49)`` of several processes."""
    text = f"{row[key]:.2f} ms"
    # Rows without their number of processes have all latencies if there were several.
    if row.get("processes", 1) > 1 or "all_latency_ms" in row:
        times = row[f"all_{key}"]
        text += f" ({min(times):.2f} to {max(times):.2f})"
    return text


def fused_table(models: dict[str, dict]) -> str:
    """A row per model that was written without this package: milliseconds and temporary memory."""
    ways = ("plain", "patch", "autofuse", "by hand")
    rows = []
    for model, row in models.items():
        cells = [_span(row, f"{way}_ms") if f"{way}_ms" in row else "-" for way in ways]
        memory = [row.get(f"{way}_temp_bytes") for way in ways]
        memory = ["-" if n is None else f"{n / 1e9:.1f}" for n in memory]
        rows.append([model, *cells, " / ".join(memory)])
    return markdown(["model", *ways, "temporary memory, GB"], rows)


def layers_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per attention: how many kernels the forward of one layer launches."""
    counts: dict[tuple, dict] = {}
    for entry in results["layers"]:
        key = (entry["attention"], f"[{entry['batch']}, {entry['length']}]", entry["dtype"])
        counts.setdefault((*key, entry["weights"]), {})[entry["contender"]] = entry["count"]
    names = {"ours": "launches, jax_fastops", "plain": "launches, plain JAX"}
    rows = [
        [*key, *(str(found[name]) if name in found else "-" for name in names)]
        for key, found in counts.items()
    ]
    return ["attention", "tokens", "dtype", "weights", *names.values()], rows


def scaling_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per program over several devices, and its throughput in multiples of one device's."""
    header = ["step", "implementation", "sharded by", "all devices", "one device", "throughput"]
    rows = []
    for entry in results["scaling"]:
        who = "jax_fastops" if entry["contender"] == "ours" else "plain JAX"
        by = "`jax.shard_map`" if entry["shard_map"] else "`jax.jit`"
        times = [f"{entry[key] / 1e3:.2f} ms" for key in ("all_us", "one_us")]
        rows.append([entry["row"], who, by, *times, f"{entry['throughput']:.2f}x"])
    return header, rows


def steps_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per implementation of a training step: times, temporary memory, launches."""
    names = {"ours": "jax_fastops", "plain": "plain JAX", "without": "no batch norm"}
    rows = []
    for key, name in names.items():
        step = results["steps"][key]
        times = [f"{step[clock] / 1e3:.2f} ms" for clock in ("median_us", "wall_us")]
        rows.append([name, *times, f"{step['temp_mib']:.0f} MiB", str(step["launches"])])
    if "median_us" in (found := results.get("pytorch", {})):
        rows.append(["compiled PyTorch", "-", f"{found['median_us'] / 1e3:.2f} ms", "-", "-"])
    header = ["sum of the kernels", "steady step", "temporary memory", "launches"]
    return [results["network"]["name"], *header], rows


def accuracy_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per op, dtype and kind of data: worst errors of the kernel and of jax.nn."""
    header = ["op", "dtype", "data", "results: kernel / jax.nn", "gradients: kernel / jax.nn"]
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
    if "num_kv_heads" in options:
        text += f" and {options['num_kv_heads']} of keys"
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
