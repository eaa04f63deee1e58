"""Results as Markdown tables, which ``benchmarks.pages`` puts into the documentation."""

import statistics
from statistics import geometric_mean

from benchmarks.numbers import Pair, fastest, over_one, run_of, speedup
from benchmarks.profile import runs_kernels
from benchmarks.report import short

MOVES = {"forward": "forward", "backward": "backward", "step": "forward + backward"}
IMPLEMENTATIONS = {"native": "kernel", "xla": "reference", "auto": '`"auto"`', "without": "no move"}
CONTENDERS = {
    "native": "kernel",
    "auto": '`"auto"`',
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
OTHERS = {"autofuse": "`autofuse`", "tune": "`autofuse(tune=True)`"}
JOBS = {"ours": "jax_fastops", "plain": "plain JAX", "torch": "compiled PyTorch"}
ROWS = {  # of the job `packing`
    "packed": "packed",
    "packed-segments": "packed, with `max_segments` for attention",
    "unpacked": "one sequence in a row",
    "listed": "the same, with `token_capacity`",
    "plain": "one sequence in a row, plain JAX",
    "torch": "one sequence in a row, compiled PyTorch",
}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def table(results: dict) -> str:
    """The table of one results file, in the form that fits what was measured."""
    return markdown(*next(of_key for key, of_key in OF_KEY.items() if key in results)(results))


def cases_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per case and phase: µs of each contender, and over the floor, the fastest in bold."""
    measured = {name for case in results["cases"] for name in case["results"]}
    names = [name for name in CONTENDERS if name in measured]
    rows = []
    for case in results["cases"]:
        entries = [case["results"].get(name, {"phases": {}}) for name in names]
        for key, title in MOVES.items():
            if key not in case["floor_us"]:
                continue
            sides = [entry["phases"].get(key) for entry in entries]
            best = min((side["median_us"] for side in sides if side), default=None)
            cells = [what(case), case["dtype"], title]
            for side in sides:
                text = f"{side['median_us']:.3g} µs ({side['of_floor']:.2f})" if side else "-"
                cells.append(f"**{text}**" if side and side["median_us"] == best else text)
            kept = [entry.get("saved_bytes") for entry in entries if key == "backward"]
            texts = [f"{saved['total'] / 2**20:.3g}" if saved else "-" for saved in kept]
            rows.append([*cells, " / ".join(texts)])
    header = ["op, shape", "dtype", "phase", *(CONTENDERS[name] for name in names)]
    return [*header, "residuals, MiB"], rows


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
    rows = []
    for entry in results["rows"]:
        sides = [entry["results"].get(who) for who in ("ours", "plain")]
        cells = [f"{side['median_us'] / 1e3:.2f} ms" if side else "-" for side in sides]
        memory = [f"{side['temp_mib']:.0f} MiB" if side else "-" for side in sides]
        speed = f"{speedup(entry['results']):.2f}x" if all(sides) else "-"
        if all(sides):
            faster = sides[0]["median_us"] > sides[1]["median_us"]
            cells[faster] = f"**{cells[faster]}**"
        rows.append([entry["row"], *cells, speed, *memory])
    header = [results["network"]["name"], "jax_fastops", "plain JAX", "speed-up"]
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
    header += [*(f"{name}, ms" for name in JOBS.values()), "over plain JAX"]
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


def packing_table(results: dict) -> str:
    """A row per contender and shape of the job ``packing``. Tokens are those without padding."""
    rows = [row for row in results["rows"] if "ms" in row]
    base: dict[str | None, float] = {}
    for row in rows:
        if row["contender"] == "unpacked":
            run = run_of(results, row)
            base[run] = max(row["tokens_per_s"], base.get(run, 0))
    header = ["rows", CASE["shape"], "not padding", "a step, ms", "tokens per second"]
    return _with_runs(
        results,
        rows,
        [*header, f"over {ROWS['unpacked']}"],
        [
            [
                ROWS[row["contender"]],
                row["shape"].replace("x", " x "),
                f"{row['fill']:.1%}",
                _span(row),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_s'] / one:.2f}x" if one else "-",
            ]
            for row in rows
            for one in [base.get(run_of(results, row))]
        ],
    )


def _with_runs(results: dict, rows: list[dict], header: list[str], cells: list[list[str]]) -> str:
    """A table with the commit of each row's run, if there are several."""
    runs = [run_of(results, row) for row in rows]
    if len(set(runs)) < 2:
        return markdown(header, cells)
    commits = [f"`{short(run)}`" if run else "-" for run in runs]
    return markdown([*header, "run"], [[*c, run] for c, run in zip(cells, commits, strict=True)])


def _kernels(row: dict) -> str:
    """The number of calls of kernels, if the row has it or says that there is none."""
    return str(row.get("calls", 0 if runs_kernels(row) is False else "-"))


def _span(row: dict, key: str = "ms") -> str:
    """``0.37``, or ``0.37 (0.34 to 0.49)`` of several processes."""
    text = f"{row[key]:.2f}"
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
    header = ["model", *(f"{way}, ms" for way in ways), "temporary memory, GB"]
    return markdown(header, rows)


def one_line_table(pairs: dict[str, Pair]) -> str:
    """A row per model that was not written for this package: its step without and with the line."""
    rows = [
        [title, f"{p.plain_ms:.1f}", f"{p.ms:.1f}", f"{p.plain_gb:.1f}", f"{p.gb:.1f}", p.device]
        for title, p in pairs.items()
    ]
    return markdown(["training step", "ms", "`autofuse`", "GB", "`autofuse`", "GPU"], rows)


def others_table(results: dict) -> str:
    """A row per program that others wrote: gains of forward and step, memory and kernels."""
    rows = results["rows"]
    ways = [way for way in ("autofuse", "tune") if any(f"{way}_step_ms" in row for row in rows)]
    body = []
    for row in rows:
        if "error" in row:
            body.append([row["program"], *["-"] * (4 + 4 * len(ways))])
            continue
        cells = [row["program"]]
        for phase in ("forward", "step"):
            cells.append(f"{statistics.mean(row[f'plain_{phase}_ms']):.2f}")
            for way in ways:
                if f"{way}_{phase}_ms" not in row:
                    cells.append("-")
                elif row[f"{way}_{phase}_equal"] and not loses(row, way, phase):
                    cells.append("equal")
                else:
                    cells.append(" / ".join(f"{g:.2f}" for g in gains(row, way, phase)))
        for phase in ("forward", "step"):
            sides = [row.get(f"{way}_{phase}_temp_bytes") for way in ("plain", *ways)]
            cells.append(" / ".join("-" if n is None else f"{n / 1e9:.2f}" for n in sides))
        for way in ways:
            kernels = row.get(f"{way}_step_kernels", {})
            cells.append(", ".join(f"{count} {name}" for name, count in kernels.items()) or "-")
        body.append(cells)
    header = ["program"]
    for phase in ("forward", "step"):
        header += [f"{phase}, plain, ms", *(f"{phase}, gain of {OTHERS[way]}" for way in ways)]
    header += [f"temporary memory of a {phase}, GB" for phase in ("forward", "step")]
    return markdown([*header, *(f"kernels in a step, {OTHERS[way]}" for way in ways)], body)


def others_summary(results: dict) -> str:
    """The gains, the losses and the errors of the programs that others wrote.

    A gain is the geometric mean of both measurements of all programs.
    """
    header = ["phase", "contender", "programs with a kernel", "gain", "without attention", "gain"]
    header += ["median", "programs without a kernel", "gain", "losses"]
    failed = [row["program"] for row in results["rows"] if "error" in row]
    body = []
    for phase in ("forward", "step"):
        for way in ("autofuse", "tune"):
            rows = [row for row in results["rows"] if f"{way}_{phase}_ms" in row]
            rows = [row for row in rows if "error" not in row]
            if not rows:
                continue
            cells = [phase, OTHERS[way]]
            with_kernels = [row for row in rows if not row[f"{way}_{phase}_equal"]]
            fewer = [r for r in with_kernels if "attention" not in r[f"{way}_{phase}_kernels"]]
            equal = [row for row in rows if row[f"{way}_{phase}_equal"]]
            for some in (with_kernels, fewer, equal):
                every = [gain for row in some for gain in gains(row, way, phase)]
                cells += [str(len(some)), f"{geometric_mean(every):.3f}" if every else "-"]
                if some is fewer:
                    cells += [f"{statistics.median(every):.3f}" if every else "-"]
            lost = [row["program"] for row in rows if loses(row, way, phase)]
            body.append([*cells, ", ".join(lost) or "none", ", ".join(failed) or "none"])
    return markdown([*header, "errors"], body)


def gains(row: dict, way: str, phase: str) -> list[float]:
    """The time of the plain program over that of another one, in each measurement."""
    pairs = zip(row[f"plain_{phase}_ms"], row[f"{way}_{phase}_ms"], strict=True)
    return [plain / ours for plain, ours in pairs]


def loses(row: dict, way: str, phase: str) -> bool:
    """Whether a program is more than 3% slower in each measurement, also without a kernel."""
    return max(gains(row, way, phase)) < 1 / 1.03


def layers_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per attention: how many kernels the forward of one layer launches."""
    counts: dict[tuple, dict] = {}
    for entry in results["layers"]:
        tokens = f"[{entry['batch']}, {entry['length']}]"
        key = entry["attention"], tokens, entry["dtype"], entry["weights"]
        counts.setdefault(key, {})[entry["contender"]] = str(entry["count"])
    sides = ("ours", "plain")
    rows = [[*key, *(n.get(who, "-") for who in sides)] for key, n in counts.items()]
    names = ["launches, jax_fastops", "launches, plain JAX"]
    return ["attention", "tokens", "dtype", "weights", *names], rows


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


def several_table(results: dict) -> str:
    """A row per layout of a step over several GPUs, and its throughput in multiples of one's."""
    names = {"bert": "BERT-base", "decoder": "decoder"}
    count, rows = results["devices"], []
    titles = {
        "one": "one GPU",
        "data": f"{count} GPUs, data parallel",
        "zero": f"{count} GPUs, data parallel, ZeRO-1",
        "stage": f"{count} stages, {results['micro_batches']} micro-batches",
    }

    def who(row):
        return names[row["model"]] + (", plain JAX" if "contender" in row else "")

    measured = [row for row in results["rows"] if "ms" in row]
    for row in measured:
        gain, moved = over_one(results, row), row.get("collectives", {})
        rows.append(
            [
                who(row),
                titles[row["layout"]],
                f"{row['ms']:.2f} ms",
                f"{gain:.2f}x" if gain else "-",
                *(f"{row[key] / 1e9:.1f}" for key in ("temp_bytes", "state_bytes")),
                ", ".join(f"{n['count']} {kind}" for kind, n in moved.items()) or "-",
            ]
        )
    header = ["step", "layout", "time", "throughput", "temporary memory, GB", "state, GB"]
    return _with_runs(results, measured, [*header, "collectives in the program"], rows)


def remat_table(results: dict) -> str:
    """A row per model and number of layers: temporary GB by the size of recomputed groups."""
    found: dict[tuple, dict] = {}
    for row in results["rows"]:
        case = found.setdefault((row["model"], row["layers"]), {})
        case[row["every"], row["remat"]] = f"{row['temp_bytes'] / 1e9:.1f}"
    sizes = sorted({every for case in found.values() for every, _ in case if every})
    rows = []
    for (model, layers), case in found.items():
        for remat in (False, True):
            cells = [case.get((every, remat), "-") for every in (None, *sizes)]
            rows.append([model, str(layers), "yes" if remat else "no", *cells])
    header = ["model", "layers", "`remat`", "no `remat_every`", *(f"k = {k}" for k in sizes)]
    return markdown(header, rows)


def steps_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """A row per implementation of a training step: times, temporary memory, launches."""
    names = {"ours": "jax_fastops", "plain": "plain JAX", "without": "no batch norm"}
    rows = []
    for step, name in zip(map(results["steps"].get, names), names.values(), strict=True):
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
        sides = [entry["errors"][part] for part in ("results", "gradients")]
        errors = [f"{side['ours']:.2g} / {side['jax.nn']:.2g}" for side in sides]
        rows.append([f"`{entry['op']}`", entry["dtype"], entry["data"].replace("_", " "), *errors])
    return header, rows


# The tables of jobs, by a key of their results.
OF_KEY = {
    "cases": cases_table,
    "blocks": blocks_table,
    "rows": network_table,
    "layers": layers_table,
    "scaling": scaling_table,
    "steps": steps_table,
    "accuracy": accuracy_table,
}


def what(case: dict) -> str:
    """The op, its operands' shapes and its options."""
    shapes = " ".join(map(_tuple, case["shapes"]))
    axes = case.get("options", {}).get("axes")
    return f"`{case['op']}` {shapes}{f' → {_tuple(axes)}' if axes else ''}, {case['label']}"


def _tuple(numbers: list[int]) -> str:
    return f"({', '.join(map(str, numbers))})"
