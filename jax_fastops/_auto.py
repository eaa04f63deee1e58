"""The table of ``auto``: which calls take the kernel, by device, entry and dtype.

A condition is an expression of features of a call (docs/guides/dispatch.md lists them), with at
most three comparisons. One is for a call that is not differentiated, one for forward and backward
together. The numbers come from measured calls. ``python -m benchmarks dispatch`` measures random
calls and proposes conditions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

KB, MB = 2**10, 2**20
MOST = 3  # comparisons in a condition

# True for the kernel, or (feature, bound, tree if it is less, tree if not).
Tree: TypeAlias = bool | list[Any]
Rules: TypeAlias = dict[str, dict[str, Tree]]  # by dtype and use


def _grafted(tree: Tree, yes: Tree, no: Tree) -> Tree:
    """``tree`` with these trees in the places of its leaves."""
    if isinstance(tree, bool):
        return yes if tree else no
    name, bound, below, rest = tree
    return [name, bound, _grafted(below, yes, no), _grafted(rest, yes, no)]


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on the features of a call, as a decision tree."""

    tree: Tree
    comparisons: int = 0

    def then(self, yes: Condition, no: Condition) -> Condition:
        """``yes`` if this holds, otherwise ``no``."""
        count = self.comparisons + yes.comparisons + no.comparisons
        return Condition(_grafted(self.tree, yes.tree, no.tree), count)

    def __and__(self, other: Condition) -> Condition:
        return self.then(other, NEVER)

    def __or__(self, other: Condition) -> Condition:
        return self.then(ALWAYS, other)

    def __invert__(self) -> Condition:
        return self.then(NEVER, ALWAYS)


ALWAYS, NEVER = Condition(True), Condition(False)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A number that a call has."""

    name: str

    def __ge__(self, bound: float) -> Condition:
        return Condition([self.name, int(bound), False, True], 1)

    def __lt__(self, bound: float) -> Condition:
        return ~(self >= bound)


size, work = Feature("bytes"), Feature("work")
row_bytes, row_count, inner_bytes = map(Feature, ("row_bytes", "row_count", "inner_bytes"))
group_bytes, channel_count = Feature("group_bytes"), Feature("channel_count")
head_bytes, groups, radius, keys = map(Feature, ("head_bytes", "groups", "radius", "keys"))
inner, ends, odd_bias = inner_bytes >= 1, Feature("ends") >= 1, Feature("odd_bias") >= 1
aligned, lines, mixed, masked, broadcast, whole_bias, norm, rows, across, undivided = (
    Feature(name) >= 1
    for name in "aligned lines mixed masked broadcast whole_bias norm rows across undivided".split()
)

# What reasons call a feature: of a number, and of a bound of 1 (whether it is, or is not).
WORDS: dict[str, str] = {
    "bytes": "arrays of {}",
    "row_bytes": "rows of {}",
    "row_count": "{} rows",
    "inner_bytes": "{} after the axis",
    "head_bytes": "heads of {}",
    "groups": "{} groups of dimensions",
    "radius": "the radius {}",
    "keys": "{} keys",
    "group_bytes": "groups of {}",
    "channel_count": "channels of {} elements",
    "work": "work of {}",
}
FLAGS: dict[str, tuple[str, str]] = {
    "aligned": ("rows of a multiple of 16 bytes", "rows of no multiple of 16 bytes"),
    "lines": ("rows of a multiple of 128 bytes", "rows of no multiple of 128 bytes"),
    "mixed": ("x and residual of two dtypes", "x and residual of one dtype"),
    "masked": ("a mask", "no mask"),
    "broadcast": ("a broadcast operand", "no broadcast operand"),
    "whole_bias": (
        "a bias, and heads of a multiple of 16 bytes",
        "no bias, or heads of no multiple of 16 bytes",
    ),
    "odd_bias": (
        "a bias, and heads of no multiple of 16 bytes",
        "no bias, or heads of a multiple of 16 bytes",
    ),
    "norm": ("normalized queries or keys", "no normalized queries or keys"),
    "rows": ("a last dimension that stays the last", "another last dimension"),
    "across": ("an axis that is not the last", "the last axis"),
    "inner_bytes": ("an axis that is not the last", "the last axis"),  # 0 for the last one
    "undivided": ("sums that XLA does not divide", "sums that XLA divides"),
    "ends": ("a broadcast start or end", "no broadcast start or end"),
}

_DTYPES = {
    "half": ("bfloat16", "float16"),
    "all": ("bfloat16", "float16", "float32", "float64"),
}


def _entries(table: list[tuple[str, str, Condition, Condition]]) -> dict[str, Rules]:
    found: dict[str, Rules] = {}
    for entry, dtypes, forward, grad in table:
        if max(forward.comparisons, grad.comparisons) > MOST:
            raise ValueError(f"{entry}: a condition has more than {MOST} comparisons")
        uses = {"forward": forward.tree, "grad": grad.tree}
        names = [name for word in dtypes.split() for name in _DTYPES.get(word, (word,))]
        found.setdefault(entry, {}).update(dict.fromkeys(names, uses))
    return found


# Entry, dtypes, and the conditions without and with gradients.
# fmt: off
_CUDA = _entries([
    ("add_relu", "half float64", NEVER, size >= 8 * MB),
    ("add_relu", "float32", NEVER, size >= 16 * MB),
    ("attention", "half", keys >= 64, keys >= 64),
    ("batch_norm", "half", undivided | (size >= 5 * MB) & (inner_bytes < 128),
     undivided | (size >= 5 * MB) & (inner_bytes < 128)),
    ("batch_norm", "float32", (size >= 16 * MB) & (inner_bytes < 256),
     undivided | (size >= 16 * MB) & (inner_bytes < 256)),
    ("batch_norm_inference", "half", NEVER, undivided | (size >= 4 * MB) & (inner_bytes < 128)),
    ("batch_norm_inference", "float32", NEVER, undivided | (size >= 64 * MB)),
    ("bias_gelu", "half", (size >= 8 * MB) & (aligned | (groups < 3)),
     (size >= 32 * MB) | (size >= 8 * MB) & (groups < 3)),
    ("bias_gelu", "float32", (groups < 3) & ~aligned & (size >= 256 * MB),
     (groups < 3) & ~aligned & (size >= 16 * MB)),
    ("bias_gelu_exact", "half", size >= 2 * MB,
     (size >= 32 * MB) | (size >= 8 * MB) & (groups < 3)),
    ("bias_gelu_exact", "float32", (size >= 16 * MB) & (aligned | (groups < 3)),
     (groups >= 3).then(size >= 64 * MB, size >= 16 * MB)),
    ("bias_relu", "half", (groups < 3) & ~aligned & (size >= 128 * MB),
     (groups < 3) & (size >= 8 * MB)),
    ("bias_relu", "float32", (groups < 3) & ~aligned & (size >= 256 * MB),
     (groups < 3) & (row_bytes >= KB) & (size >= 16 * MB)),
    ("bias_silu", "half", (groups < 3) & ~aligned & (size >= 2 * MB),
     (groups < 3) & ~aligned & (size >= 8 * MB)),
    ("bias_silu", "float32", (groups < 3) & ~aligned & (size >= 256 * MB),
     (groups < 3) & ~aligned & (size >= 16 * MB)),
    ("cross_entropy", "half float32", (size >= 64 * KB) | (row_bytes >= 64),
     (size >= 128 * KB) | (row_bytes >= 512)),
    *((name, "half", lines & (row_count >= 96) & (size >= 256 * KB), NEVER) for name in (
        "dense_gelu", "dense_gelu_exact", "dense_silu",
    )),
    ("dense_relu", "half", NEVER, NEVER),
    ("dropout", "all", ALWAYS, ALWAYS),
    ("gated_act", "half", NEVER, aligned.then(size >= 8 * MB, size >= MB)),
    ("gated_act", "float32 float64", NEVER, size >= 8 * MB),
    ("gated_act_halves", "half", NEVER, size >= 64 * MB),
    ("gated_act_halves", "float32", NEVER, size >= 16 * MB),
    ("gated_act_halves", "float64", NEVER, size >= 4 * MB),
    ("group_norm", "half", (size >= 16 * MB) & (inner_bytes < 16 * KB), size >= 16 * MB),
    ("group_norm", "float32", NEVER, size >= 32 * MB),
    ("layer_norm", "half", (row_bytes >= 72) & (size >= 4 * MB),
     (row_bytes >= 48) & (row_count >= 160) & (size >= 96 * KB)),
    ("layer_norm", "float32", (row_bytes >= 72) & (size >= 4 * MB),
     (row_bytes >= 384) & (row_count >= 512)),
    ("lerp", "half", broadcast & (groups < 3) & (size >= 32 * MB),
     broadcast & ~ends & (size >= 32 * MB)),
    ("lerp", "float32", broadcast & ~aligned & (size >= 64 * MB),
     broadcast & ~ends & (size >= 16 * MB)),
    ("list_attention", "half", (keys >= 64) & (keys < 2049), NEVER),
    ("log_softmax", "half", (row_bytes >= 16_385) & (size >= 2 * MB),
     ~inner & (row_bytes >= 512) & (size >= 2 * MB)),
    ("log_softmax", "float32", inner | (row_bytes >= 64 * KB) & (size >= 16 * MB),
     (size >= 16 * MB) | inner & (row_bytes < KB)),
    ("log_softmax", "float64", (size >= 32 * KB) & (inner_bytes >= 64),
     (size >= 2 * MB) & (masked | (inner_bytes >= 64))),
    ("relu", "all", NEVER, size >= 8 * MB),
    ("residual_layer_norm", "half", (row_bytes >= 48) & (size >= 2 * MB),
     aligned & (row_bytes >= 48) & (row_count >= 512)),
    ("residual_layer_norm", "float32", ~mixed & (row_bytes >= 128) & (size >= 8 * MB),
     ~mixed & (row_bytes >= 48) & (row_count >= 512)),
    ("residual_rms_norm", "half", aligned & ((size >= 32 * MB) | (row_bytes >= 60_000)),
     (row_bytes >= 48) & (row_count >= 512) & (size >= 96 * KB)),
    ("residual_rms_norm", "float32", ~mixed & aligned & (size >= 24 * MB),
     ~mixed & (row_bytes >= 384) & (row_count >= 512)),
    ("rms_norm", "half", aligned & (row_bytes >= 16_385) & (size >= 4 * MB),
     (row_bytes >= 48) & (row_count >= 160) & (size >= 96 * KB)),
    ("rms_norm", "float32", (row_bytes >= 60_000) & (size >= 4 * MB),
     (row_bytes >= 48) & (row_count >= 160) & (size >= 96 * KB)),
    ("segment_sum", "half", (row_bytes >= 128) & (size >= 4 * MB),
     (row_bytes >= 128) & (size >= 4 * MB)),
    ("segment_sum", "float32", (row_bytes >= 256) & (size >= 128 * MB),
     (row_bytes >= 256) & (size >= 128 * MB)),
    ("segment_sum", "float64", NEVER, NEVER),
    ("short_attention", "half", (keys >= 64) & (keys < 2049), NEVER),
    ("softmax", "half", (size >= 3 * MB) & ((inner_bytes >= 64) | (row_bytes >= 256)),
     (size >= 32 * KB) & (row_bytes >= 40) & (row_count >= 96)),
    ("softmax", "float32", (size >= MB) & ((inner_bytes >= 64) | (row_bytes >= 64 * KB)),
     (size >= 2 * MB) & (~inner | (row_bytes < 2 * KB))),
    ("softmax", "float64", (size >= 32 * KB) & (masked | (inner_bytes >= 64)),
     (size >= 32 * KB) & (row_bytes < 32_769)),
    ("split_heads", "bfloat16", ~odd_bias & (size >= 32 * MB),
     ~odd_bias & (size >= MB) & (head_bytes < 512)),
    ("split_heads", "float16", NEVER, ~odd_bias & (size >= MB) & (head_bytes < 512)),
    ("split_heads", "float32", NEVER, ~odd_bias & (size >= 512 * KB) & (head_bytes < 512)),
    ("split_qkv_heads", "bfloat16", NEVER,
     whole_bias & (head_bytes >= 96) & (size >= 512 * KB)),
    ("split_qkv_heads", "float32", NEVER,
     whole_bias & (head_bytes >= 128) & (size >= 2 * MB)),
    ("split_qkv_heads", "float64", NEVER, size >= 4 * MB),
    ("split_qkv_heads_rotary", "half", norm & (size >= 4 * MB),
     norm.then(size >= 4 * MB, size >= 6 * MB)),
    ("split_qkv_heads_rotary", "float32", norm & (size >= 4 * MB), norm & (size >= 4 * MB)),
    ("take", "half", NEVER, (row_bytes >= 128) & (size >= 4 * MB)),
    ("take", "float32", NEVER, (row_bytes >= 256) & (size >= 128 * MB)),
    ("take", "float64", NEVER, NEVER),
    ("transpose", "bfloat16", rows.then(size >= 4 * MB, size >= 128 * MB),
     rows.then(size >= 4 * MB, size >= 128 * MB)),
    ("transpose", "float32", ~rows & (size >= 256 * MB), ~rows & (size >= 256 * MB)),
    ("transpose", "int8 float64", rows & (size >= 2 * MB), rows & (size >= 2 * MB)),
    ("window_sum", "all", aligned & (row_bytes >= 128) & (work >= 16 * MB),
     aligned & (row_bytes >= 128) & (work >= 16 * MB)),
    *((name, "float64", NEVER, NEVER) for name in (
        "batch_norm", "batch_norm_inference", "bias_gelu", "bias_gelu_exact", "bias_relu",
        "bias_silu", "cross_entropy", "group_norm", "layer_norm", "lerp", "residual_layer_norm",
        "residual_rms_norm", "rms_norm", "split_qkv_heads_rotary",
    )),
])
_CPU = _entries([
    ("add_relu", "all", NEVER, size >= 3_000_000),
    ("batch_norm", "half", ALWAYS, (channel_count >= 34) | (size >= 14_112)),
    ("batch_norm", "float32 float64", size >= 14_112, (channel_count >= 34) | (size >= 14_112)),
    ("batch_norm_inference", "all", NEVER, size >= 9984),
    ("bias_gelu", "all", ALWAYS, ALWAYS),
    ("bias_gelu_exact", "all", ALWAYS, ALWAYS),
    ("bias_relu", "half", size >= 12_768, size >= 4.5 * KB),
    ("bias_relu", "float32 float64", NEVER, size >= 107_776),
    ("bias_silu", "half", ALWAYS, ALWAYS),
    ("bias_silu", "float32", NEVER, size >= 16 * KB),
    ("cross_entropy", "all", ALWAYS, ALWAYS),
    ("dropout", "all", ALWAYS, ALWAYS),
    ("gated_act", "half", ALWAYS, ALWAYS),
    ("gated_act", "float32 float64", size < MB, size >= 10_000),
    ("gated_act_halves", "half", ALWAYS, ALWAYS),
    ("gated_act_halves", "float32 float64", row_bytes >= 14_800, row_bytes >= 14_800),
    ("group_norm", "all", group_bytes >= 16 * KB, group_bytes >= 16 * KB),
    ("layer_norm", "all", (row_bytes >= 38) & (row_count < 11_076), size >= 4 * KB),
    ("lerp", "half", (size >= 8 * KB) & (size < 512 * KB), size >= 7038),
    ("lerp", "float32", (size >= 64 * KB) & (size < 512 * KB),
     broadcast.then(size >= 7038, size >= 16 * KB)),
    ("lerp", "float64", (size >= 64 * KB) & (size < 512 * KB),
     broadcast.then(size >= 7038, size >= 40 * KB)),
    ("log_softmax", "half", row_count < 52_800, ALWAYS),
    ("log_softmax", "float32 float64",
     (row_bytes >= 128) | (size >= 16 * KB) & (row_count < 52_800),
     (size >= 16 * KB) | ~inner & (row_bytes >= 33)),
    ("relu", "all", NEVER, size >= 2_480_544),
    ("residual_layer_norm", "half float64", row_count < 22_625, ALWAYS),
    ("residual_layer_norm", "float32", ~mixed & (row_count < 22_625), ALWAYS),
    ("residual_rms_norm", "half float64", ALWAYS, ALWAYS),
    ("residual_rms_norm", "float32", ~mixed, ALWAYS),
    ("rms_norm", "half", size < 6_584_496, ALWAYS),
    ("rms_norm", "float32 float64", (size < 6_584_496) & ((row_bytes >= 33) | (size >= 16 * KB)),
     (row_bytes >= 33) | (size >= 16 * KB)),
    ("segment_sum", "half", (row_bytes >= 128) & (size < 64 * MB),
     (row_bytes >= 128) & (size < 64 * MB)),
    ("segment_sum", "float32 float64", NEVER, NEVER),
    ("softmax", "half", inner_bytes < 8, ~inner | (row_bytes >= 46) | (row_bytes < 32)),
    ("softmax", "float32 float64", (inner_bytes < 8) & ((row_bytes >= 33) | (size >= 16 * KB)),
     (row_bytes >= 46) | ~inner & (size >= 16 * KB)),
    ("split_heads", "bfloat16 float32 float64", (head_bytes < 256) & (size >= 16 * KB),
     (size >= 16_128) & (head_bytes < 384)),
    ("split_qkv_heads", "int8 bfloat16 float32 float64", size >= 74_880,
     (size >= 64 * KB) | (head_bytes < 160)),
    ("split_qkv_heads_rotary", "all", (size >= 213_120) | norm, (size >= 63 * KB) & norm),
    ("take", "half", NEVER, (row_bytes >= 128) & (size < 64 * MB)),
    ("take", "float32 float64", NEVER, NEVER),
    ("transpose", "int8 bfloat16 float32 float64", rows.then(row_count >= 41_496, size >= 10 * KB),
     rows.then(row_count >= 41_496, size >= 10 * KB)),
    ("window_sum", "all", (radius >= 5) | across, (radius >= 5) | across),
])
# fmt: on

DEVICES: list[dict[str, Any]] = [
    {
        "platform": "cuda",
        "name": "NVIDIA H200",
        "compute_capability": 9.0,
        "bandwidth": 4.814304e12,
        "entries": _CUDA,
    },
    {
        "platform": "cpu",
        "name": "AMD EPYC, 2 cores",
        "compute_capability": 0.0,
        "bandwidth": 0.0,
        "entries": _CPU,
    },
]
