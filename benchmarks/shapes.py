"""Random calls of each op, as people might make them: for what no list of cases foresees.

Sizes are distributed evenly on a logarithmic scale. Half of the rows have a multiple of 8 elements,
and the others any number.
"""

import math
import random

from benchmarks import cases
from benchmarks.cases import DTYPES, HALVES, MOVED, SMOOTH, Layout, Op, Shape, words

Rng = random.Random


def draw(rng: Rng, op: Op, largest: int) -> Layout:
    """A layout of ``op`` whose main operand has up to about ``largest`` elements.

    The function with the name of the family draws it, or the one of element-wise ops.
    """
    elements = number(rng, 2**10, largest)
    made = globals().get(f"_{op.family}", _elementwise)(rng, op, elements)
    shape, options = made[:2]
    more = made[2] if len(made) > 2 else {}
    floating = ("float32", "bfloat16") if rng.random() < 0.8 else DTYPES
    dtypes = {"transpose": MOVED, "dense_act": HALVES}.get(op.family, floating)
    named = "".join(f" {key} {value}" for key, value in options.items())
    return Layout(f"{shape}{named}", shape, shape, (rng.choice(dtypes),), options, **more)


def number(rng: Rng, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, distributed evenly on a logarithmic scale."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def length(rng: Rng, low: int, high: int) -> int:
    """The same; in half of the cases a multiple of 8."""
    n = number(rng, low, high)
    return max(8, n // 8 * 8) if rng.random() < 0.5 else n


def rows(rng: Rng, elements: int, low: int = 8, high: int = 2**17) -> Shape:
    """Rows of random length, with one leading dimension or two."""
    n = length(rng, low, min(high, elements))
    count = max(1, elements // n)
    lead = number(rng, 1, count) if rng.random() < 0.5 else 1
    return (lead, max(1, count // lead), n) if lead > 1 else (count, n)


def _elementwise(rng: Rng, op: Op, elements: int):
    return rows(rng, elements), {}


def _transpose(rng: Rng, op: Op, elements: int):
    rank = rng.choice((2, 3, 3, 4))
    shape, rest = [], elements
    for left in range(rank, 1, -1):
        shape.append(length(rng, 2, max(2, round(rest ** (1.5 / left)))))
        rest = max(2, rest // shape[-1])
    shape.append(rest)
    rng.shuffle(shape)
    axes = tuple(range(rank))
    while axes == tuple(sorted(axes)):
        axes = tuple(rng.sample(axes, rank))
    return tuple(shape), {"axes": axes}


def _heads(rng: Rng, op: Op, elements: int):
    rotary, parts = op.name == "split_qkv_heads_rotary", 3 if "qkv" in op.name else 1
    if rotary:
        keys, size = rng.randint(1, 12), rng.choice((32, 64, 64, 80, 96, 128, 128, 256))
        heads = 6 * keys  # four of queries for each one of keys and of values
    else:
        heads, size = rng.randint(1, 24), rng.choice((32, 40, 48, 64, 64, 80, 96, 128))
        heads *= parts
    count = max(1, elements // (heads * size))
    sequence = min(count, length(rng, 1, 4096))
    batch = max(1, count // sequence)
    if op.name == "merge_heads":
        return (batch, heads, sequence, size), {}
    shape = (batch, sequence, heads * size)
    if rotary:
        options = {"num_heads": 4 * keys, "num_kv_heads": keys}
        return shape, options, {"without": rng.choice((0, 2)), "operands": cases.with_rotary(heads)}
    without = int(parts == 3 and rng.random() < 0.5)
    return shape, {"num_heads": heads // parts}, {"without": without}


def _softmax(rng: Rng, op: Op, elements: int):
    kind = rng.choice(("rows", "rows", "keys", "pairs", "axis"))
    if kind == "rows":
        return rows(rng, elements), {}, {"without": 1}
    n = length(rng, 8, min(4096, math.isqrt(elements)))
    if kind == "axis":
        inner = length(rng, 2, max(2, elements // n))
        return (max(1, elements // (n * inner)), n, inner), {"axis": 1}, {"without": 1}
    heads = rng.choice((1, 4, 8, 12, 16))
    shape = (max(1, elements // (heads * n * n)), heads, n, n)
    return shape, {}, {"operands": cases.mask_of_keys if kind == "keys" else cases.mask_of_pairs}


def _batch_norm(rng: Rng, op: Op, elements: int):
    c = length(rng, 2, min(2048, elements // 8))
    side = rng.choice((1, 4, 7, 14, 28, 56))
    n = max(2, elements // (side * side * c))
    axis = rng.choice((-1, 1))
    shape = (n, side, side, c) if axis == -1 else (n, c, side, side)
    if side == 1:
        shape, axis = (n, c), -1
    if op.name == "batch_norm_inference":
        return shape, cases.INFERENCE | {"axis": axis}, {"operands": cases.of_channels(4, axis)}
    operands = cases.of_channels(2, axis, residual=op.name == "batch_norm_add_relu")
    return shape, {"axis": axis}, {"operands": operands}


def _group_norm(rng: Rng, op: Op, elements: int):
    groups = rng.choice((1, 4, 8, 32, 32, 32))
    channels = number(rng, 1, max(1, min(64, elements // (8 * groups))))
    side = rng.choice((4, 8, 14, 16, 32, 32, 56, 64, 128))
    n, axis = max(1, elements // (side * side * groups * channels)), rng.choice((-1, -1, 1))
    image = (side, side)
    shape = (n, *image, groups * channels) if axis == -1 else (n, groups * channels, *image)
    options = {"num_groups": groups, "axis": axis, "activation": rng.choice((None, "silu"))}
    return shape, options, {"operands": cases.of_channels(2, axis)}


def _lerp(rng: Rng, op: Op, elements: int):
    shape = rows(rng, elements)
    if len(shape) == 2:
        shape = (1, *shape)
    kept = [tuple(rng.random() < 0.6 for _ in shape) for _ in range(3)]
    kept[rng.randrange(3)] = (True,) * 3
    if rng.random() < 0.4:
        kept = [(True,) * 3, (True,) * 3, (rng.random() < 0.5,) * 3]

    def operands(shape: Shape) -> tuple[Shape, ...]:
        return tuple(tuple(n if k else 1 for n, k in zip(shape, ks, strict=True)) for ks in kept)

    return shape, {}, {"operands": operands}


def _bias_act(rng: Rng, op: Op, elements: int):
    shape = rows(rng, elements)
    options = {"activation": "relu" if op.name == "bias_relu" else rng.choice(SMOOTH)}
    if len(shape) == 3 and rng.random() < 0.25:  # a bias for each sequence of a batch
        return shape, options, {"operands": lambda shape: (shape, (shape[0], 1, shape[2]))}
    return shape, options


def _dense_act(rng: Rng, op: Op, elements: int):
    """Sizes that the kernel takes, and up to ``elements`` elements in each array."""
    unit = rng.choice((8, 64, 64))  # 64: rows of whole lines
    width = unit * number(rng, 1, max(1, min(8192, math.isqrt(elements)) // unit))
    columns = unit * number(rng, 1, max(1, min(16384, elements // width) // unit))
    shape = max(1, elements // max(width, columns)), width
    return shape, {"activation": rng.choice((*SMOOTH, "relu"))}, {"operands": cases.into(columns)}


def _gated_act(rng: Rng, op: Op, elements: int):
    *lead, n = rows(rng, elements)
    options = {"activation": rng.choice(("silu", "gelu"))}
    if rng.random() < 0.5:
        return (*lead, 2 * n), options, {"without": 1}
    return (*lead, n), options


def _cross_entropy(rng: Rng, op: Op, elements: int):
    return rows(rng, elements, high=2**18), {}


def _segment_sum(rng: Rng, op: Op, elements: int):
    n = length(rng, 1, 4096)
    shape = (max(1, elements // n), n)
    if op.name == "take":
        return shape, {}, {"operands": words(number(rng, 1, shape[0]))}
    return shape, {"indices_are_sorted": True} if op.name == "segment_sum_sorted" else {}


def _window_sum(rng: Rng, op: Op, elements: int):
    padding = "SAME" if op.name == "window_sum" else "VALID"
    radius, axis = number(rng, 1, 64), rng.choice((0, -1))
    least = 2 * radius + 1
    n = max(least, length(rng, least, max(least, elements // 8)))
    other = max(1, elements // n)
    shape = (n, other) if axis == 0 else (other, n)
    return shape, {"radius": radius, "axis": axis, "padding": padding}
