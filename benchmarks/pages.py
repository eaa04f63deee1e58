"""Writes the generated parts of the documentation: charts and tables from benchmarks/results.

``docs/conf.py`` calls :func:`write`; pages include the files by name.
"""

import math
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from benchmarks import RESULTS, ROOT, ages, numbers, plot
from benchmarks.cases import fo
from benchmarks.numbers import CPU, H100, H200, families, load, main_phase, title
from benchmarks.others import PACKAGES, WORKLOADS
from benchmarks.profile import runs_kernels
from benchmarks.report import headline, short
from benchmarks.tables import (
    MOVES,
    by_case,
    fused_table,
    job_table,
    markdown,
    one_line_table,
    others_summary,
    others_table,
    packing_table,
    remat_table,
    several_table,
    table,
)

TORCH = "compiled PyTorch"
LEGEND = (
    "Times, and in parentheses times over the floor (1.00 is the speed of a copy). The fastest is"
    " bold; `-` was not measured. The residuals are those of the contenders in their order."
)
# Tables of a guide that are there once they are measured, and the text before them.
GUIDES = {
    "decoding": (
        job_table,
        "The table has the time of a token of a Llama-type model with 8 layers, 2048 wide"
        " (`python -m benchmarks decoding`).",
    ),
    "several-2": (
        several_table,
        "The table has whole training steps (`python -m benchmarks several`). Of two GPUs with data"
        " parallelism, each has the batch of one. A loop's collectives count once. A throughput is"
        " over one GPU's in the same run, and rows of another commit are of another run.",
    ),
    "packing": (
        packing_table,
        "The table has a training step of BERT-base with dropout, on sentences of 128 to 384 tokens"
        " (`python -m benchmarks packing`). The last ratio is within a run.",
    ),
    "packing-decoder": (
        packing_table,
        "The table has a training step of a Llama-type model with 8 layers, 2048 wide, on documents"
        " of 128 to 896 tokens (`python -m benchmarks packing --model decoder`).",
    ),
}
# The ops in the chart of the bytes that they keep. Others keep their operands, or nothing.
KEPT = ["relu", "dropout", "softmax", "cross_entropy", "layer_norm", "bias_act", "gated_act"]
KEPT += ["batch_norm_add_relu", "group_norm"]
CUT = 4.0  # floors: longer bars are cut
MOST = 6  # rows of a chart
SIDES = ("native", "jax.nn")


def write(folder: Path) -> None:
    """Write every generated part into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    inference = partial(job, name="inference", what="a forward", torch=f"{TORCH}, CUDA graphs")
    pretraining = partial(job, name="pretraining", what="a training step", torch=TORCH)
    for name, chart, alt in (
        ("steps", steps, "Gains of training steps"),
        ("overview", overview, "Speed-ups of ops"),
        ("kept", kept, "Bytes that ops keep for the backward"),
        ("pretraining-chart", pretraining, "BERT-base, pretraining"),
        ("inference-chart", inference, "BERT-base, inference"),
    ):
        plot.write_changed(folder / f"{name}.md", _figure(chart(folder / name), alt))
    parts = {}
    for name in ("inference", "pretraining", "decoder"):
        results = load(f"{name}-{H100}")
        parts[name] = f"{headline(results)}.\n\n{job_table(results)}"
    parts["fusing"] = f"{headline(load(f'fusing-{H100}'))}.\n\n{fused_table(numbers.fused())}"
    parts["others"] = _others()
    remat = load(f"remat-{CPU}")
    versions = remat["versions"]
    compiled = f"Compiled for a CPU by jax {versions['jax']}, at {short(versions['commit'])}"
    parts["remat"] = f"{compiled}.\n\n{remat_table(remat)}"
    parts["one-line"] = one_line_table(numbers.one_line())
    for name, (of_rows, question) in GUIDES.items():
        found = [load(file) for file in _measured(name)]
        tables = "\n".join(f"{headline(results)}.\n\n{of_rows(results)}" for results in found)
        parts[name] = f"{question}\n\n{tables}" if found else "% No device has been measured.\n"
    # A family's results are on its page, and on the page of all ops.
    for page, prefix, slugs in (("ops", "", (H100, H200)), ("cpu", "cpu-", (CPU,))):
        found = {family: slug for slug in reversed(slugs) for family in families(slug)}
        for family, slug in found.items():
            results = load(f"{slug}-{family}")
            parts[prefix + family] = _family(family, results, folder / f"{prefix}{family}")
        sections = (f"## {title(f)}\n\n{parts[prefix + f]}" for f in sorted(found, key=title))
        parts[f"all-{page}"] = "\n".join(sections)
    for name, file in {
        "bert": f"bert-{H100}",
        "bert-launches": f"bert-kernels-{H100}",
        "bert-devices": f"bert-devices-{H200}",
        "bert-small": f"bert-small-{CPU}",
        "resnet": f"resnet-{H100}",
        "neighbours": f"neighbours-{H100}",
        "accuracy": f"accuracy-{H100}",
    }.items():
        results = _without_retracted(load(file))
        parts[name] = f"{headline(results)}.\n\n{table(results)}"
    parts |= {"ranges": _ranges(), "slower": _slower(), "batch_norm-layouts": _layouts()}
    parts |= {f"decisions-{platform}": _decisions(platform) for platform in ("cuda", "cpu")}
    numbers.numbers()  # which reads some more
    parts["ages"] = ages.table(numbers.loaded())
    parts["functions"] = _functions()
    for name, text in parts.items():
        plot.write_changed(folder / f"{name}.md", text)


def _others() -> str:
    """The gains in programs that others wrote, of each device that has been measured."""
    found = (
        f"{headline(results)}. {len(results['rows'])} of {len(PACKAGES) + len(WORKLOADS)} programs "
        f"were measured.\n\n{others_summary(results)}\n{others_table(results)}"
        for results in map(load, _measured("others"))
    )
    return "\n".join(found) or "No device has been measured yet.\n"


def _measured(name: str) -> list[str]:
    """The files of a job, one for each GPU on which it ran."""
    files = (f"{name}-{slug}" for slug in (H100, H200))
    return [file for file in files if (RESULTS / f"{file}.json").exists()]


def _functions() -> str:
    """The list of the public functions that have a page of ops."""
    pages = [page.stem for page in sorted((ROOT / "docs" / "ops").glob("*.md"))]
    modules = {name: getattr(getattr(fo, name), "__module__", "") for name in fo.__all__}
    found = [name for page in pages for name in modules if modules[name] == f"jax_fastops.{page}"]
    head = "```{eval-rst}\n.. currentmodule:: jax_fastops\n\n.. autosummary::\n\n"
    return head + "".join(f"   {name}\n" for name in found) + "```\n"


def steps(path: Path) -> list[Path]:
    """The chart of what training steps gain, in time and in memory."""
    question = (
        "What does a training step gain over plain JAX, in time and in memory?\n"
        "ResNet-50, the transformer of Equinox, and the models on the ops: H100; the others: H200"
    )
    groups = [plot.Bars(name, values) for name, values in numbers.gains().items()]
    axis = "plain JAX over jax_fastops (longer is better)"
    return _gains(path, question, groups, ["time", "temporary memory"], axis=axis)


def overview(path: Path) -> list[Path]:
    """The chart of the speed-ups of all families of ops."""
    groups = []
    means = {family: geometric_mean(numbers.family_speedups(family)) for family in families(H100)}
    for family in sorted(means, key=means.get, reverse=True):
        phases = {main_phase(case) for case in load(f"{H100}-{family}")["cases"]}
        forward = " (forward)" if phases == {"forward"} else ""
        groups.append(plot.Bars(f"{title(family)}{forward}", (means[family],)))
    question = (
        "How much faster than jax.nn is a forward+backward step?\n"
        "One H100, bfloat16; geometric mean over all benchmarked shapes"
    )
    return _gains(path, question, groups, ["jax_fastops"], "jax.nn")


def kept(path: Path) -> list[Path]:
    """The chart of the bytes that a forward keeps for each element of its first operand."""
    found: dict[str, tuple[str, tuple[float, ...]]] = {}
    for slug in (H100, H200):
        for case in (c for family in families(slug) for c in load(f"{slug}-{family}")["cases"]):
            if case["op"] in KEPT and case["dtype"] == "bfloat16":
                sides = (case["results"][name]["saved_bytes"]["total"] for name in SIDES)
                values = tuple(side / math.prod(case["shapes"][0]) for side in sides)
                found.setdefault(case["op"], (case_label(case), values))
    question = (
        "How many bytes are kept for the backward, for each element?\n"
        "bfloat16; operands that are kept count"
    )
    groups = [plot.Bars(*found[op]) for op in KEPT]
    axis = "bytes for each element (shorter is better)"
    return plot.draw(path, question, groups, ("kernel", "jax.nn"), "", axis, limit=10)


def job(path: Path, name: str, what: str, torch: str) -> list[Path]:
    """The chart of a job in bfloat16, of the rows in which a kernel of this package runs."""
    results = load(f"{name}-{H100}")
    groups = []
    for (shape, *facts), rows in by_case(results).items():
        whole = rows.keys() >= {"plain", "ours", "torch"}
        if not whole or "float16" in facts or runs_kernels(rows["ours"]) is False:
            continue
        label = shape.replace("x", " x ")
        if "positions" in rows["ours"]:
            label += ", loss at {} positions, attention dropout {}".format(*facts)
        values = tuple(rows["plain"]["ms"] / rows[who]["ms"] for who in ("ours", "torch"))
        groups.append(plot.Bars(label, values))
    of = f"{numbers.device(results)}, bfloat16, batch x length"
    question = f"How much faster than plain JAX is {what} of BERT-base?\n{of}"
    return _gains(path, question, groups, ["jax_fastops", torch])


def _gains(path: Path, question: str, groups, series, line: str = "plain JAX", axis: str = ""):
    axis = axis or f"speed-up over {line} (longer is better)"
    return plot.draw(path, question, groups, series, line, axis, limit=3.6, unit="x")


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
    cases = [case for case in results["cases"] if case["dtype"] == "bfloat16"]
    # Evenly from all rows, so that common shapes and hard ones are there.
    places = {round(i * (len(cases) - 1) / (MOST - 1)) for i in range(MOST)}
    shown = [cases[place] for place in sorted(places)]
    steps = any(main_phase(case) == "step" for case in shown)
    of = "forward+backward step" if steps else "forward"
    groups = []
    for case in shown:
        phase = main_phase(case)
        sides = (case["results"][name]["phases"][phase] for name in SIDES)
        only = ", forward" if steps and phase == "forward" else ""
        groups.append(plot.Bars(case_label(case) + only, tuple(s["of_floor"] for s in sides)))
    question = f"How close is a {of} to the speed of memory?\n{numbers.device(results)}, bfloat16"
    floor = "floor: a copy of the same bytes", "time over the floor (shorter is better)"
    charts = plot.draw(path, question, groups, ("kernel", "jax.nn"), *floor, limit=CUT)
    note = f"\n{results['note'][0].upper()}{results['note'][1:]}.\n" if "note" in results else ""
    return (
        _figure(charts, question.replace("\n", " "))
        + f"\n:::{{dropdown}} All rows: {results['hardware']['device']}\n{LEGEND}\n"
        + f"\n{headline(results)}.\n{note}\n{table(results)}:::\n"
    )


def _ranges() -> str:
    """Speed-ups of each family under `"auto"`: mean, least and most."""
    rows = []
    for family, name in families(H100).items():
        found = [numbers.family_speedups(family, dtype) for dtype in ("bfloat16", "float32")]
        rows.append([name, *map(_range, found), str(len(found[-1]))])
    return markdown(["family", "bfloat16", "float32", "shapes"], rows)


def _range(values: list[float]) -> str:
    """``1.95 (0.98 to 3.40)``: mean, least and most."""
    return f"{geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _slower() -> str:
    """The rows on one H100 where jax.nn is faster than the kernel."""
    rows = []
    for family in families(H100):
        for case, phase, kernel, auto in numbers.slower(load(f"{H100}-{family}")):
            label = f"{case_label(case)}, {case['dtype']}"
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
    for known in fo._auto.DEVICES:
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
    """``layer norm, wide, 16384 x 4096``."""
    shape = " x ".join(
        map(
            str, np.broadcast_shapes(*case["shapes"]) if case["op"] == "lerp" else case["shapes"][0]
        )
    )
    return f"{case['op'].replace('_', ' ')}, {case['label']}, {shape}"


def _figure(charts: list[Path], alt: str) -> str:
    """Both drawings of a chart; the theme of the page shows one."""
    return "\n".join(
        f"```{{image}} /_generated/{chart.name}\n:class: only-{chart.stem.rsplit('-', 1)[1]}\n"
        f":alt: {alt}\n:width: {plot.WIDTH * 96:.0f}px\n```\n"
        for chart in charts
    )
