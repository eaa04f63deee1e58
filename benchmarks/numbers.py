"""The numbers that texts quote, each computed from one file in benchmarks/results."""

import json
import re
from collections.abc import Iterable
from statistics import geometric_mean, mean
from typing import NamedTuple

from benchmarks import RESULTS, ROOT, installed

H100 = "nvidia-h100-80gb-hbm3"
H200 = "nvidia-h200"
CPU = "amd-epyc-2-cores"
# Programs that others wrote -> what the front page calls them.
OTHERS = {
    "transformers BERT": "BERT of transformers",
    "nnx GPT": "GPT of Flax NNX layers",
    "flax lm1b": "decoder of Flax's lm1b",
    "haiku transformer": "transformer of Haiku",
}
# Models of the benchmark of `autofuse`, likewise.
FUSED = {"pre-norm, Equinox": "transformer of Equinox", "ResNet-50, Flax": "ResNet-50 of Flax"}
# Parts of a layer of BERT, and names of their kernels: ours and those of compiled PyTorch.
LAUNCHES = {
    "products": ("products",),
    "attention": ("TiledAttentionKernel", "sdpa"),
    "activation": ("DenseActKernel", "fused_gelu"),
    "norms": ("NormRowKernel", "per_fused_add_native_layer_norm"),
}
# Rows of one H100 that guides/sources.md compares with another contender: family, op, label, phase.
SOURCES = {
    "permute_rows": ("transpose", "transpose", "short rows", "forward", "torch"),
    "permute_matrices": ("transpose", "transpose", "matrices", "forward", "torch"),
    "odd_channels": ("batch_norm", "batch_norm_relu", "NHWC 56x56x63", "step", "jax.nn"),
    "add_relu_last": ("batch_norm", "batch_norm_add_relu", "NHWC 112x112x32", "step", "jax.nn"),
    "add_relu_first": ("batch_norm", "batch_norm_add_relu", "NCHW 112x112x32", "step", "jax.nn"),
    "per_activation": ("batch_norm", "batch_norm_relu", "rows", "step", "jax.nn"),
    "relu_gradient": ("relu", "relu", "conv NHWC", "backward", "jax.nn"),
    "softmax_scores": ("softmax", "softmax", "mask (B,1,1,L) 512", "forward", "jax.nn"),
    "softmax_words": ("softmax", "softmax", "vocabulary", "forward", "jax.nn"),
    "softmax_huge": ("softmax", "softmax", "huge rows", "forward", "jax.nn"),
    "lerp_alike": ("lerp", "lerp", "all alike", "forward", "torch"),
    "lerp_alike_step": ("lerp", "lerp", "all alike", "step", "torch"),
    "lerp_weight": ("lerp", "lerp", "weight (1,)", "forward", "torch"),
    "lerp_planes": ("lerp", "lerp", "three planes", "forward", "torch"),
    "lerp_planes_step": ("lerp", "lerp", "three planes", "step", "torch"),
    "lerp_rank": ("lerp", "lerp", "rank 7", "forward", "torch"),
    "lerp_rank_step": ("lerp", "lerp", "rank 7", "step", "torch"),
    "window": ("window_sum", "window_sum", "radius 16", "forward", "jax.nn"),
    "wide_window": ("window_sum", "window_sum", "radius 256", "forward", "jax.nn"),
}


def families(slug: str) -> dict[str, str]:
    """The families of ops that have results of a device, with the titles of their pages."""
    known = installed("jax_fastops")._registry.families()
    return {
        family: title(family) for family in known if (RESULTS / f"{slug}-{family}.json").exists()
    }


def title(family: str) -> str:
    page = (ROOT / "docs" / "ops" / f"{family}.md").read_text()
    return re.search(r"^# (.+)", page, re.MULTILINE)[1]


_loaded: dict[str, dict] = {}


def load(name: str) -> dict:
    """The results file ``name``, without its suffix."""
    if name not in _loaded:
        _loaded[name] = json.loads((RESULTS / f"{name}.json").read_text())
    return _loaded[name]


def loaded() -> list[str]:
    """The results files that were read, because a page or the README shows them."""
    return list(_loaded)


def on_pages(name: str) -> list[tuple[str, dict]]:
    """The rows of a results file that pages show, each after what a page calls it (``page``)."""
    return [(row["page"], row) for row in load(name)["rows"] if "page" in row]


def device(results: dict) -> str:
    """``NVIDIA H100 80GB HBM3, jax 0.11.2``."""
    return f"{results['hardware']['device']}, jax {results['versions']['jax']}"


def family_speedups(family: str, dtype: str = "bfloat16") -> list[float]:
    """Time of jax.nn over that of ``"auto"`` on one H100, for each benchmarked shape.

    The times are those of forward+backward steps if the family has such rows, otherwise forwards.
    """
    cases = [case for case in load(f"{H100}-{family}")["cases"] if case["dtype"] == dtype]
    steps = [case for case in cases if main_phase(case) == "step"]
    return [_time(case, "jax.nn") / _time(case, "auto") for case in steps or cases]


def main_phase(case: dict) -> str:
    """The phase that a chart shows: the forward+backward step if the row has one."""
    return "step" if "step" in case["floor_us"] else "forward"


def _time(case: dict, contender: str) -> float:
    """Microseconds of a case's main phase."""
    return case["results"][contender]["phases"][main_phase(case)]["median_us"]


def slower(results: dict, margin: float = 0.02) -> list[tuple[dict, str, float, float]]:
    """Rows where jax.nn beats the kernel by more than ``margin``: case, phase, and the times of the
    kernel and of ``"auto"`` over that of jax.nn."""
    found = []
    for case in results["cases"]:
        native, auto, theirs = (_time(case, name) for name in ("native", "auto", "jax.nn"))
        if native > (1 + margin) * theirs:
            found.append((case, main_phase(case), native / theirs, auto / theirs))
    return found


def speedup(sides: dict, time: str = "median_us") -> float:
    """Plain JAX's time over ours."""
    return sides["plain"][time] / sides["ours"][time]


def fastest(rows: Iterable[dict], **facts) -> dict[str, dict]:
    """The fastest row of each contender of a job, of the rows with these facts.

    Names such as ``plain-joined`` are of variants of ``plain``.
    """
    found: dict[str, dict] = {}
    for row in rows:
        who = row["contender"].split("-")[0]
        if "ms" in row and facts.items() <= row.items():
            if who not in found or row["ms"] < found[who]["ms"]:
                found[who] = row
    return found


def steps() -> dict[str, dict[str, dict]]:
    """The rows of two whole training steps, by what a chart calls them and by contender."""
    bert, decoder = (load(f"{name}-{H100}")["rows"] for name in ("pretraining", "decoder"))
    facts = dict(shape="32x512", positions="all", attention_dropout=0.1)
    return {
        "BERT-base, attention dropout": fastest(bert, **facts),
        "decoder": fastest(decoder, shape="8x2048"),
    }


def fused() -> dict[str, dict]:
    """The rows of models that were written without this package, by model."""
    return {row["model"]: row for row in load(f"fusing-{H100}")["rows"]}


class Pair(NamedTuple):
    """Milliseconds and temporary GB of a training step in plain JAX, and with `autofuse`."""

    device: str
    plain_ms: float
    ms: float
    plain_gb: float
    gb: float

    def gains(self) -> tuple[float, float]:
        """Plain JAX's time and temporary memory over ours."""
        return self.plain_ms / self.ms, self.plain_gb / self.gb


def one_line() -> dict[str, Pair]:
    """Training steps of models that were not written for this package, by their titles."""
    found = {}
    for row in load(f"others-{H200}")["rows"]:
        if title := OTHERS.get(row["program"]):
            ms = (mean(row[f"{way}_step_ms"]) for way in ("plain", "autofuse"))
            gb = (row[f"{way}_step_temp_bytes"] / 1e9 for way in ("plain", "autofuse"))
            found[title] = Pair("H200", *ms, *gb)
    shown = dict(on_pages(f"llama-by-hand-{H200}"))
    plain, ours = shown["plain"], shown["autofuse"]
    found["Llama-type decoder by hand"] = Pair(
        "H200", plain["ms"], ours["ms"], plain["temp_gb"], ours["temp_gb"]
    )
    for model, title in FUSED.items():
        row = fused()[model]
        gb = (row[f"{way}_temp_bytes"] / 1e9 for way in ("plain", "autofuse"))
        found[title] = Pair("H100", row["plain_ms"], row["autofuse_ms"], *gb)
    return found


def gains() -> dict[str, tuple[float, float]]:
    """Training steps: label -> plain JAX's time and temporary memory over ours."""
    found = {f"{title}: autofuse": pair.gains() for title, pair in one_line().items()}
    for title, rows in steps().items():
        found[f"{title}: on the ops"] = speedup(rows, "ms"), speedup(rows, "temp_bytes")
    return found


def of_others() -> dict[str, str]:
    """How many programs that others wrote were measured, and the mean gain of their steps."""
    rows = [row for row in load(f"others-{H200}")["rows"] if "autofuse_step_ms" in row]
    kernels = [row for row in rows if not row["autofuse_step_equal"]]
    pairs = [zip(r["plain_step_ms"], r["autofuse_step_ms"], strict=True) for r in kernels]
    gain = geometric_mean(plain / ours for pair in pairs for plain, ours in pair)
    return {
        "others": str(len(rows)),
        "others_kernels": str(len(kernels)),
        "others_gain": f"{gain:.2f}",
    }


def sources() -> dict[str, str]:
    """The numbers of guides/sources.md: gains of kernels, a layer of BERT, whole forwards."""
    found = {}
    for key, (family, op, label, phase, other) in SOURCES.items():
        for case in load(f"{H100}-{family}")["cases"]:
            if (case["op"], case["label"]) == (op, label):
                ours, theirs = (case["results"][who]["phases"][phase] for who in ("native", other))
                name = f"{key}_{case['dtype']}"
                found[name] = f"{theirs['median_us'] / ours['median_us']:.2f}"
                found[f"{name}_floor"] = f"{ours['of_floor']:.2f}"
    for who in ("ours", "torch"):
        row = forwards()[f"32x512_{who}"]
        found[f"layer_{who}_all_us"] = f"{row['busy_ms'] / 12 * 1e3:.0f}"
        for kind, ms in [*row["kinds_ms"].items(), *(k[:2] for k in row["kernels"])]:
            for part, names in LAUNCHES.items():
                if any(name in kind for name in names):
                    found[f"layer_{who}_{part}_us"] = f"{ms / 12 * 1e3:.0f}"
        launches = sum(n for name, _, n in row["kernels"] if not name.startswith("Mem"))
        found[f"layer_{who}_launches"] = f"{launches:.0f}"
    for key, row in forwards().items():
        found[f"forward_{key}"] = f"{row['ms']:.2f} ({row['latency_ms']:.2f})"
    runs = [
        row["ms"]
        for name in ("inference", "inference-flags", "attention-short")
        for row in load(f"{name}-{H200}")["rows"]
        if (row.get("contender", row.get("variant")), row.get("shape")) == ("torch", "8x128")
    ]
    found["torch_8x128_runs"] = f"{min(runs):.2f} to {max(runs):.2f}"
    several = load(f"several-2-{H200}")
    for row in several["rows"]:
        if row["layout"] != "one" and (gain := over_one(several, row)):
            key = [row[name] for name in ("model", "layout", "contender") if name in row]
            found["_".join(["two_gpus", *key])] = f"{gain:.2f}"
    deep = [r for r in load(f"remat-{CPU}")["rows"] if (r["model"], r["layers"]) == ("bert", 48)]
    for key, kept in (("all", None), ("second", 2)):
        (row,) = (row for row in deep if row["every"] == kept and not row["remat"])
        found[f"keep_{key}_gb"] = f"{row['temp_bytes'] / 1e9:.1f}"
    found["flax_resnet"] = f"{one_line()[FUSED['ResNet-50, Flax']].gains()[0]:.2f}"
    return found


def run_of(results: dict, row: dict) -> str | None:
    """The commit that was measured: a row of another run than the file's has its own."""
    return row.get("commit", results.get("versions", {}).get("commit"))


def over_one(results: dict, row: dict) -> float | None:
    """The throughput of a row of the job `several`, in multiples of one device's in its run."""

    def job(row):
        return row["model"], row.get("contender"), run_of(results, row)

    measured = [row for row in results["rows"] if "ms" in row]
    one = {job(other): other["ms"] for other in measured if other["layout"] == "one"}
    base = row.get("one_ms", one.get(job(row)))  # that of its run, which may have no row
    batches = results["devices"] if row["layout"] in ("data", "zero") else 1
    return batches * base / row["ms"] if base and "ms" in row else None


def forwards() -> dict[str, dict]:
    """The rows of whole forwards of BERT-base that pages show, by shape and column."""
    found = {}
    for name in (f"inference-{H200}", f"attention-short-{H200}"):
        found |= {f"{row['shape']}_{who}": row for who, row in on_pages(name)}
    return found


def traces() -> dict[str, str]:
    """What `autofuse` adds to a first trace, and later traces over those without it."""
    found: dict[str, list[float]] = {"first_ms": [], "forward": [], "step": []}
    rows = load(f"tracing-{CPU}")["rows"]
    by_program = {(row["program"], row["contender"]): row for row in rows}
    for (program, who), ours in by_program.items():
        if who == "autofuse":
            plain = by_program[program, "plain"]
            found["first_ms"].append(ours["first_forward_ms"] - plain["first_forward_ms"])
            for phase in ("forward", "step"):
                found[phase].append(ours[f"{phase}_ms"] / plain[f"{phase}_ms"])
    return {
        f"trace_{key}_{name}": f"{of(values):.0f}" if key == "first_ms" else f"{of(values):.2f}"
        for key, values in found.items()
        for name, of in (("least", min), ("most", max))
    }


def numbers() -> dict[str, str]:
    """Key -> text, for the README's markers and the documentation's substitutions."""
    means = {family: geometric_mean(family_speedups(family)) for family in families(H100)}
    found = {f"{family}_speedup": f"{mean:.2f}" for family, mean in means.items()}
    found["resnet"] = f"{speedup(load(f'resnet-{H100}')['steps']):.2f}"
    for who, row in steps()["decoder"].items():
        found[f"decoder_{who}_gb"] = f"{row['temp_bytes'] / 1e9:.1f}"
    found |= of_others() | sources() | traces()
    by_hand = one_line()["Llama-type decoder by hand"]
    found |= {"llama_plain_gb": f"{by_hand.plain_gb:.1f}", "llama_gb": f"{by_hand.gb:.1f}"}
    differences = load(f"resnet-{H100}")["differences"]
    for name, key in (
        ("ours - plain", "loss"),
        ("plain, images moved - plain", "moved"),
        ("plain - plain, float32", "float"),
    ):
        found[f"resnet_{key}_most"] = f"{differences[name]['largest']:.4f}"
        found[f"resnet_{key}_mean"] = f"{differences[name]['mean']:.4f}"
    names = {"graph": "native, graphs", "no_graph": "native, no graphs", "xla": "jax.nn, graphs"}
    chain = load(f"graph-chain-{H100}")
    found |= {f"chain_{key}_us": f"{chain[n]['median_us']:.0f}" for key, n in names.items()}
    return found
