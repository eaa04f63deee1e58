"""Writes the generated parts of the documentation: charts and tables from benchmarks/results.

``docs/conf.py`` calls :func:`write`; pages include the files by name.
"""

import json
from pathlib import Path

import numpy as np

from benchmarks import RESULTS, ROOT, ages, plot
from benchmarks.jobs import runs_kernels
from benchmarks.numbers import (
    CPU,
    FAMILIES,
    H100,
    H200,
    device,
    family_speedups,
    fused,
    gains,
    load,
    loaded,
    main_phase,
    mean,
    numbers,
    slower,
)
from benchmarks.report import headline
from benchmarks.tables import MOVES, by_case, fused_table, job_table, keeps, markdown, table

# The rows that a family's chart shows, by op and label: at most six, common shapes and hard ones.
SHOWN = {
    "relu": [
        ("relu", "large"),
        ("relu", "conv NHWC"),
        ("relu", "odd rows"),
        ("add_relu", "large"),
        ("add_relu", "odd rows"),
    ],
    "transpose": [
        ("transpose", "matrix"),
        ("transpose", "matrices"),
        ("transpose", "heads"),
        ("transpose", "NHWC to NCHW"),
        ("transpose", "reversed"),
        ("transpose", "odd"),
    ],
    "heads": [
        ("split_heads", "bias"),
        ("split_qkv_heads", "bias"),
        ("split_qkv_heads", "no bias"),
        ("split_qkv_heads_rotary", "norms, heads of 128"),
        ("merge_heads", "BERT"),
    ],
    "softmax": [
        ("softmax", "mask (B,1,1,L) 512"),
        ("softmax", "mask (B,1,1,L) 128"),
        ("softmax", "rows"),
        ("softmax", "odd rows"),
        ("softmax", "axis 1"),
        ("log_softmax", "vocabulary"),
    ],
    "norm": [
        ("layer_norm", "BERT-base"),
        ("layer_norm", "odd"),
        ("residual_layer_norm", "BERT-base"),
        ("residual_layer_norm", "wide"),
        ("rms_norm", "wide"),
        ("residual_rms_norm", "wide"),
    ],
    "batch_norm": [
        ("batch_norm", "NHWC 56x56x64"),
        ("batch_norm", "NCHW 56x56x64"),
        ("batch_norm_relu", "NHWC 28x28x128"),
        ("batch_norm_relu", "NHWC 56x56x3"),
        ("batch_norm_add_relu", "NHWC 7x7x2048"),
        ("batch_norm_add_relu", "NCHW 7x7x2048"),
    ],
    "lerp": [
        ("lerp", "all alike"),
        ("lerp", "weight (1,)"),
        ("lerp", "three planes"),
        ("lerp", "row, all, column"),
        ("lerp", "rank 7"),
        ("lerp", "odd row, all, column"),
    ],
    "bias_act": [
        ("bias_act", "gelu"),
        ("bias_act", "gelu, odd"),
        ("bias_act", "gelu_exact"),
        ("bias_act", "silu"),
        ("bias_relu", "relu"),
        ("bias_relu", "relu, odd"),
    ],
    "gated_act": [
        ("gated_act", "two operands"),
        ("gated_act", "halves"),
        ("gated_act", "halves, gelu"),
        ("gated_act", "two operands, odd"),
        ("gated_act", "halves, odd"),
    ],
    "cross_entropy": [
        ("cross_entropy", "GPT-2"),
        ("cross_entropy", "BERT"),
        ("cross_entropy", "Llama 3"),
        ("cross_entropy", "ImageNet"),
    ],
    "dropout": [
        ("dropout", "rows"),
        ("dropout", "odd"),
        ("dropout", "short rows"),
    ],
    "window_sum": [
        ("window_sum", "radius 2"),
        ("window_sum", "radius 16"),
        ("window_sum", "radius 256"),
        ("window_sum", "axis 0, radius 2"),
        ("window_sum", "axis 0, odd, radius 16"),
        ("window_sum_valid", "VALID, radius 16"),
    ],
}
TITLES = {
    "batch_norm_relu": "batch norm + ReLU",
    "batch_norm_add_relu": "batch norm + add + ReLU",
    "bias_relu": "bias",
    "bias_act": "bias",
    "gated_act": "gated",
    "window_sum_valid": "window sum",
}
CUT = 4.0  # floors: longer bars are cut


def write(folder: Path) -> None:
    """Write every generated part into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (chart, alt) in {
        "steps": (steps, "Gains of training steps"),
        "overview": (overview, "Speed-ups of ops"),
        "pretraining-chart": (pretraining, "BERT-base, pretraining"),
        "inference-chart": (inference, "BERT-base, inference"),
    }.items():
        (folder / f"{name}.md").write_text(_figure(chart(folder / name), alt))
    for name in ("inference", "pretraining", "decoder"):
        results = load(f"{name}-{H100}")
        (folder / f"{name}.md").write_text(f"{headline(results)}.\n\n{job_table(results)}")
    text = f"{headline(load(f'fusing-{H100}'))}.\n\n{fused_table(fused())}"
    (folder / "fusing.md").write_text(text)
    measured = [("", H100, family) for family in FAMILIES]
    on_cpu = [family for family in FAMILIES if (RESULTS / f"{CPU}-{family}.json").exists()]
    measured += [("cpu-", CPU, family) for family in on_cpu]
    measured.append(("", H200, "gated_act"))
    for prefix, name, family in measured:
        text = _family(family, load(f"{name}-{family}"), folder / f"{prefix}{family}")
        (folder / f"{prefix}{family}.md").write_text(text)
    for name, file in {
        "bert": f"bert-{H100}",
        "bert-launches": f"bert-kernels-{H100}",
        "bert-devices": f"bert-devices-{H200}",
        "bert-small": "bert-small-amd-epyc-2-cores",
        "resnet": f"resnet-{H100}",
        "neighbours": f"neighbours-{H100}",
        "accuracy": f"accuracy-{H100}",
    }.items():
        results = _without_retracted(load(file))
        (folder / f"{name}.md").write_text(f"{headline(results)}.\n\n{table(results)}")
    (folder / "ranges.md").write_text(_ranges())
    (folder / "slower.md").write_text(_slower())
    (folder / "batch_norm-layouts.md").write_text(_layouts())
    for platform in ("cuda", "cpu"):
        (folder / f"decisions-{platform}.md").write_text(_decisions(platform))
    numbers()  # which reads some more
    (folder / "ages.md").write_text(ages.table(loaded()))


def steps(path: Path) -> list[Path]:
    """The chart of what training steps gain, in time and in memory."""
    return plot.draw(
        path,
        "What does a training step gain over plain JAX, in time and in memory?\n"
        "One H100, bfloat16; the model of Haiku is in float32.\n"
        "The first three are models on the ops, the others one line, autofuse",
        [plot.Bars(name, values) for name, values in gains().items()],
        ["time", "temporary memory"],
        "plain JAX",
        "plain JAX over jax_fastops (longer is better)",
        limit=2.6,
        unit="x",
    )


def overview(path: Path) -> list[Path]:
    """The chart of the speed-ups of all families of ops."""
    groups = []
    means = {family: mean(family_speedups(family)) for family in FAMILIES}
    for family in sorted(means, key=means.get, reverse=True):
        forward = " (forward)" if family in ("transpose", "window_sum") else ""
        groups.append(plot.Bars(f"{FAMILIES[family]}{forward}", (means[family],)))
    return plot.draw(
        path,
        "How much faster than jax.nn is a forward+backward step?\n"
        "One H100, bfloat16; geometric mean over all benchmarked shapes",
        groups,
        ["jax_fastops"],
        "jax.nn",
        "speed-up over jax.nn (longer is better)",
        limit=2.6,
        unit="x",
    )


def inference(path: Path) -> list[Path]:
    """The chart of a forward of BERT-base in bfloat16, where a kernel of this package runs."""
    return _job_chart(
        path,
        f"inference-{H100}",
        "How much faster than plain JAX is a forward of BERT-base?",
        [("jax_fastops", "ours"), ("compiled PyTorch, CUDA graphs", "torch")],
    )


def pretraining(path: Path) -> list[Path]:
    """The chart of whole training steps of BERT-base."""
    return _job_chart(
        path,
        f"pretraining-{H100}",
        "How much faster than plain JAX is a training step of BERT-base?",
        [("jax_fastops", "ours"), ("compiled PyTorch", "torch")],
    )


def _job_chart(path: Path, file: str, question: str, series: list[tuple[str, str]]) -> list[Path]:
    results = load(file)
    groups = []
    for (shape, *facts), rows in by_case(results).items():
        whole = all(who in rows for who in ("plain", *(who for _, who in series)))
        if not whole or "float16" in facts or runs_kernels(rows["ours"]) is False:
            continue
        label = shape.replace("x", " x ")
        if "positions" in rows["ours"]:
            label += ", loss at {} positions, attention dropout {}".format(*facts)
        values = tuple(rows["plain"]["ms"] / rows[who]["ms"] for _, who in series)
        groups.append(plot.Bars(label, values))
    return plot.draw(
        path,
        f"{question}\n{device(results)}, bfloat16, batch x length",
        groups,
        [name for name, _ in series],
        "plain JAX",
        "speed-up over plain JAX (longer is better)",
        limit=2.6,
        unit="x",
    )


def _without_retracted(results: dict) -> dict:
    """Without rows of a network in 16 bits that were measured before results had their commit.

    In forwards, each call cast the weights. In steps of whole models, plain JAX had float32 logits.
    """
    if "network" not in results or "rows" not in results or results["versions"].get("commit"):
        return results
    retracted = ("inference", "model")
    kept = [r for r in results["rows"] if r["phase"] not in retracted or r["dtype"] == "float32"]
    return results | {"rows": kept}


def _family(family: str, results: dict, path: Path) -> str:
    """A family's chart, and all rows in a table that is folded."""
    cases = {(c["op"], c["label"]): c for c in results["cases"] if c["dtype"] == "bfloat16"}
    shown = [cases[key] for key in SHOWN[family] if key in cases]
    if len(shown) < len(SHOWN[family]) - 1:  # a CPU's benchmark may lack one
        raise ValueError(f"{family}: rows of the chart are missing in {results['hardware']}")
    steps = any(main_phase(case) == "step" for case in shown)
    of = "forward+backward step" if steps else "forward"
    groups = []
    for case in shown:
        phase = main_phase(case)
        sides = (case["results"][name]["phases"][phase] for name in ("native", "jax.nn"))
        only = ", forward" if steps and phase == "forward" else ""
        groups.append(plot.Bars(case_label(case) + only, tuple(s["of_floor"] for s in sides)))
    title = f"How close is a {of} to the speed of memory?\n{device(results)}"
    charts = plot.draw(
        path,
        title,
        groups,
        ("kernel", "jax.nn"),
        "floor: a copy of the same bytes",
        "time over the floor (shorter is better)",
        limit=CUT,
    )
    note = f"\n{results['note'][0].upper()}{results['note'][1:]}.\n" if "note" in results else ""
    return (
        _figure(charts, title.replace("\n", " "))
        + f"\n:::{{dropdown}} All rows: {results['hardware']['device']}\n{_legend(results)}\n"
        + f"\n{headline(results)}.\n{note}\n{table(results)}:::\n"
    )


def _legend(results: dict) -> str:
    """How to read the table of a results file; see `benchmarks.tables.table`."""
    floor = "Times over the floor (1.00 is the speed of a copy)"
    if not keeps(results):
        return f"{floor}, a column for each implementation. The fastest is bold."
    if any("torch" in case["results"] for case in results["cases"]):
        who = "kernel / jax.nn / PyTorch / compiled PyTorch"
        return f"{floor}: {who}. The fastest is bold; `-` was not measured."
    return "Times of kernel / jax.nn, and in parentheses times over the floor. The faster is bold."


def _ranges() -> str:
    """Speed-ups of each family under `"auto"`: mean, least and most."""
    rows = []
    for family, name in FAMILIES.items():
        cells = [name]
        for dtype in ("bfloat16", "float32"):
            found = family_speedups(family, dtype)
            cells.append(_range(found))
        rows.append([*cells, str(len(found))])
    return markdown(["family", "bfloat16", "float32", "shapes"], rows)


def _range(values: list[float]) -> str:
    """``1.95 (0.98 to 3.40)``: mean, least and most."""
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _slower() -> str:
    """The rows on one H100 where jax.nn is faster than the kernel."""
    rows = []
    for family in FAMILIES:
        for case, phase, kernel, auto in slower(load(f"{H100}-{family}")):
            label = case_label(case)
            rows.append([label, MOVES[phase], f"{kernel:.2f}", f"{auto:.2f}"])
    return markdown(["row", "phase", "kernel / jax.nn", '`"auto"` / jax.nn'], rows)


def _layouts() -> str:
    """Speed-ups of batch norm's step on one H100, by layout."""
    found: dict[tuple[str, str], list[float]] = {}
    for case in load(f"{H100}-batch_norm")["cases"]:
        layout = "channels last" if case["options"]["axis"] == -1 else "channels first"
        if min(case["shapes"][1]) < 32:
            layout += ", fewer than 32 channels"
        entry = case["results"]["native"]["phases"]["step"]
        found.setdefault((layout, case["dtype"]), []).append(entry["speedup"])
    rows = [
        [layout, dtype, _range(values), str(len(values))]
        for (layout, dtype), values in sorted(found.items())
    ]
    return markdown(["layout", "dtype", "kernel's speed-up over XLA, step", "rows"], rows)


def _decisions(platform: str) -> str:
    """When ``"auto"`` takes the kernel: a row per entry of the table and choice."""
    parts = []
    for known in json.loads((ROOT / "jax_fastops" / "auto_table.json").read_text()):
        if known["platform"] != platform:
            continue
        rows = []
        for name, trees in known["entries"].items():
            alike: dict[tuple, list[str]] = {}
            for dtype, uses in trees.items():
                shown = _conditions(uses["forward"]), _conditions(uses["grad"])
                alike.setdefault(shown, []).append(dtype)
            for number, (shown, dtypes) in enumerate(alike.items()):
                rows.append([f"`{name}`" if number == 0 else "", ", ".join(dtypes), *shown])
        table = markdown(["op", "dtype", "forward", "with gradients"], rows)
        parts.append(f"{known['name']}:\n\n{table}")
    return "\n\n".join(parts)


def _conditions(tree) -> str:
    """The conditions under which a decision tree takes the kernel."""

    def paths(tree, so_far: tuple[str, ...]):
        if tree is True:
            yield ", ".join(so_far)
        elif tree:
            name, bound, below, rest = tree
            if bound == 1:
                small, large = f"not {name}", name
            else:
                shown = _size(bound) if name.endswith("bytes") else f"{bound:,}"
                small, large = f"{name} < {shown}", f"{name} ≥ {shown}"
            yield from paths(below, (*so_far, small))
            yield from paths(rest, (*so_far, large))

    return " *or* ".join(p or "always" for p in paths(tree, ())) or "never"


def _size(count: int) -> str:
    """``4 Mi``, a number of bytes."""
    for unit, factor in (("Mi", 2**20), ("Ki", 2**10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}B"
    return f"{count} B"


def case_label(case: dict) -> str:
    """``layer norm, 32768 x 768, bfloat16``."""
    options = case.get("options", {})
    parts = [TITLES.get(case["op"], case["op"].replace("_", " "))]
    if "activation" in options and case["op"].startswith("bias"):
        parts[0] += f" + {options['activation']}"
    parts.append(" x ".join(map(str, case["shapes"][0])))
    if case["op"] == "lerp":
        shape = " x ".join(map(str, np.broadcast_shapes(*case["shapes"])))
        parts[-1:] = [case["label"], shape]
    if "axes" in options:
        parts[-1] += " to (" + ", ".join(map(str, options["axes"])) + ")"
    if options.get("axis", -1) != -1:
        parts.append(f"axis {options['axis']}")
    if "radius" in options:
        parts.append(f"radius {options['radius']}")
    if case["op"] == "softmax" and len(case["shapes"]) > 1:
        parts.append("mask")
    if case["op"].startswith("split") and len(case["shapes"]) > 1:
        parts.append("bias")
    return ", ".join([*parts, case["dtype"]])


def _figure(charts: list[Path], alt: str) -> str:
    """Both drawings of a chart; the theme of the page shows one."""
    return "\n".join(
        f"```{{image}} /_generated/{chart.name}\n:class: only-{chart.stem.rsplit('-', 1)[1]}\n"
        f":alt: {alt}\n:width: 100%\n```\n"
        for chart in charts
    )
