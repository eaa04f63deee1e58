"""The numbers that texts quote, each computed from one file in benchmarks/results."""

import json
import math
from functools import cache

from benchmarks import RESULTS

H100 = "nvidia-h100-80gb-hbm3"
H200 = "nvidia-h200"
CPU = "amd-epyc-2-cores"
# Family of ops -> what a chart calls it.
FAMILIES = {
    "norm": "layer_norm, rms_norm, residual norms",
    "softmax": "softmax, log_softmax",
    "heads": "split_heads, split_qkv_heads, merge_heads",
    "relu": "relu, add_relu",
    "bias_act": "bias_act",
    "lerp": "lerp",
    "batch_norm": "batch_norm (+ add) (+ relu)",
    "transpose": "transpose",
    "window_sum": "window_sum",
    "cross_entropy": "cross_entropy",
    "dropout": "dropout",
}


@cache
def load(name: str) -> dict:
    """The results file ``name``, without its suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


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


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def speedup(sides: dict, time: str = "median_us") -> float:
    """Plain JAX's time over ours."""
    return sides["plain"][time] / sides["ours"][time]


def jobs() -> dict[str, float]:
    """Whole jobs on one H100, bfloat16: label -> speed-up over plain JAX."""
    # The rows of the first shape.
    pretraining, decoder = (
        {row["contender"]: row for row in load(f"{name}-{H100}")["rows"][:3]}
        for name in ("pretraining", "decoder")
    )
    return {
        "BERT-base pretraining step, 32 x 512": speedup(pretraining, "ms"),
        "decoder training step, 8 x 2048": speedup(decoder, "ms"),
        "ResNet-50 training step, 128 images": speedup(load(f"resnet-{H100}")["steps"]),
    }


def numbers() -> dict[str, str]:
    """Key -> text, for the README's markers and the documentation's substitutions."""
    found = {f"{family}_speedup": f"{mean(family_speedups(family)):.2f}" for family in FAMILIES}
    relu = next(
        c for c in load(f"{H100}-relu")["cases"] if c["op"] == "relu" and c["dtype"] == "float32"
    )
    kept = relu["results"]["native"]["saved_bytes"]["total"]
    found["relu_bytes"] = f"1/{4 * relu['elements'] // kept}"
    found["resnet"] = f"{jobs()['ResNet-50 training step, 128 images']:.2f}"
    for name, key in (
        ("ours - plain", "loss"),
        ("plain, images moved - plain", "moved"),
        ("plain - plain, float32", "float"),
    ):
        gap = load(f"resnet-{H100}")["differences"][name]
        found |= {f"resnet_{key}_most": f"{gap['largest']:.4f}"}
        found |= {f"resnet_{key}_mean": f"{gap['mean']:.4f}"}
    for name, key in (
        ("native, graphs", "graph"),
        ("native, no graphs", "no_graph"),
        ("jax.nn, graphs", "xla"),
    ):
        found[f"chain_{key}_us"] = f"{load(f'graph-chain-{H100}')[name]['median_us']:.0f}"
    return found
