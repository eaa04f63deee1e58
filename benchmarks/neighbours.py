"""What does a transposition cost inside a block? ``python -m benchmarks.neighbours``

Measured by itself, a kernel that moves data at the speed of a copy wins. Inside a jitted block XLA
may avoid the move: a matrix product reads its operand in either order, and an elementwise neighbor
is fused into the transposition. A custom call prevents both. Each block is measured in four ways:

``native``   with the kernels of this package
``auto``     with the choice of this package
``xla``      with the references, which XLA can fuse
``without``  with a reshape to the same shape in place of the transposition. It moves nothing, so
             this is the cost of the rest of the block

``auto`` should use the reference wherever ``native`` does not win here. The number of kernels shows
whether XLA avoided the move.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import RESULTS, environment, measure
from benchmarks.cases import Shape, fo
from benchmarks.programs import contender, operands_of, random
from benchmarks.report import headline, write

BOTH = ("float32", "bfloat16")
WAYS = ("native", "auto", "xla", "without")


@dataclass(frozen=True)
class Block:
    """A function of a transposition (such as ``fo.transpose``) and of arrays, with their shapes."""

    name: str
    function: Callable
    gpu: tuple[Shape, ...]
    cpu: tuple[Shape, ...]
    dtypes: tuple[str, ...] = BOTH
    phases: tuple[str, ...] = ("forward",)
    ways: tuple[str, ...] = WAYS

    def shapes(self, scale: str) -> tuple[Shape, ...]:
        return self.gpu if scale == "gpu" else self.cpu


def reshaped(x, axes):
    """An array of the transposition's shape, without a move."""
    return x.reshape([x.shape[axis] for axis in axes])


def weight_product(move, x, w):
    return x @ move(w, (1, 0))


def product_product(move, x, w, v):
    return move(x @ w, (1, 0)) @ v


def batched_product(move, x, y):
    return x @ move(y, (0, 2, 1))


def attention(move, x, w, bias, out):
    """The attention of BERT-base: 12 heads of 64."""
    del move
    q, k, v = fo.split_qkv_heads(x @ w, bias, num_heads=12)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.125
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return fo.merge_heads(jnp.einsum("bhqk,bhkd->bhqd", weights, v)) @ out


def before(axes: tuple[int, ...]) -> Callable:
    return lambda move, x: move(jax.nn.gelu(x), axes)


def after(axes: tuple[int, ...]) -> Callable:
    return lambda move, x: jax.nn.gelu(move(x, axes))


def around(axes: tuple[int, ...]) -> Callable:
    return lambda move, x: jax.nn.gelu(move(jax.nn.gelu(x), axes))


def normalized(move, x, scale):
    """Mean and variance over the last axis, of rows that were along another axis."""
    y = move(x, (1, 0, 2)).astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale


def squares(count: int, size: int) -> tuple[Shape, ...]:
    return ((size, size),) * count


NHWC, REVERSED = (0, 2, 3, 1), (3, 2, 1, 0)
CONV = ((64, 128, 56, 56),), ((4, 128, 56, 56),)
CUBE = ((96, 97, 98, 99),), ((48, 49, 50, 51),)
BERT = (
    ((32, 512, 768), (768, 2304), (2304,), (768, 768)),
    ((1, 128, 768), (768, 2304), (2304,), (768, 768)),
)
TRAINED = ("forward", "step")

BLOCKS = (
    Block("x @ w.T", weight_product, squares(2, 4096), squares(2, 256), phases=TRAINED),
    Block("(x @ w).T @ v", product_product, squares(3, 4096), squares(3, 256), phases=TRAINED),
    Block(
        "batched x @ y.T",
        batched_product,
        ((384, 512, 512), (384, 512, 512)),
        ((6, 128, 128), (6, 128, 128)),
        phases=TRAINED,
    ),
    Block(
        "batched x @ y.T, thin",
        batched_product,
        ((384, 512, 64), (384, 512, 64)),
        ((6, 128, 64), (6, 128, 64)),
        phases=TRAINED,
    ),
    Block("attention", attention, *BERT, ("bfloat16",), TRAINED, WAYS[:3]),
    Block("gelu, then (0,2,3,1)", before(NHWC), *CONV),
    Block("(0,2,3,1), then gelu", after(NHWC), *CONV),
    Block("gelu, (0,2,3,1), gelu", around(NHWC), *CONV),
    Block("gelu, then (3,2,1,0)", before(REVERSED), *CUBE),
    Block("(3,2,1,0), then gelu", after(REVERSED), *CUBE),
    Block("gelu, (3,2,1,0), gelu", around(REVERSED), *CUBE),
    Block(
        "(1,0,2), then layer norm",
        normalized,
        ((512, 64, 1024), (1024,)),
        ((128, 16, 256), (256,)),
    ),
)


def main() -> None:
    options = parse()
    on_gpu = jax.devices()[0].platform == "gpu"
    clock, timer = measure.clock(options.clock)
    results = {
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "clock": clock,
        "rounds": options.repeats,
        "blocks": list(run(options, "gpu" if on_gpu else "cpu", timer)),
    }
    path = options.out / f"neighbours-{environment.slug(results)}.json"
    write(path, results)
    print(f"{headline(results)}\nwrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS, metavar="DIR")
    add("--repeats", type=int, default=15, metavar="N", help="rounds")
    add("--clock", choices=("auto", "profiler", "chain", "wall"), default="auto")
    add("--dtypes", nargs="+", metavar="DTYPE", help="these dtypes (default: all)")
    add("--filter", default="", metavar="TEXT", help="blocks whose name contains TEXT")
    return parser.parse_args()


def run(options: argparse.Namespace, scale: str, timer: measure.Clock) -> Iterator[dict]:
    """Measure the blocks one by one, and print a line for each phase."""
    print(f"{'µs (kernels)':<36}{'phase':<9}" + "".join(f"{way:>15}" for way in WAYS), flush=True)
    for block in (b for b in BLOCKS if options.filter in b.name):
        for dtype in (d for d in block.dtypes if not options.dtypes or d in options.dtypes):
            found = measured(block, dtype, scale, timer, options.repeats)
            for phase in block.phases:
                print(f"{block.name + ', ' + dtype:<36}{phase:<9}{line(found, phase)}", flush=True)
            yield found


def line(found: dict, phase: str) -> str:
    cells = []
    for way in WAYS:
        numbers = found["results"].get(way, {}).get(phase)
        text = f"{numbers['median_us']:.1f} ({numbers['launches']})" if numbers else "-"
        cells.append(f"{text:>15}")
    return "".join(cells)


def measured(block: Block, dtype: str, scale: str, timer: measure.Clock, rounds: int) -> dict:
    """Times and numbers of kernels of one block, in each way."""
    args = [random(i, shape, dtype) for i, shape in enumerate(block.shapes(scale))]
    # Scale the weights, so that results are as large as the operands.
    args = [a if i == 0 else a * a.shape[0] ** -0.5 for i, a in enumerate(args)]
    differentiated = tuple(range(len(args)))
    data = operands_of(lambda *a: block.function(reshaped, *a), args, "step" in block.phases)
    programs, keys = [], []
    for way in block.ways:
        move = reshaped if way == "without" else fo.transpose
        function = lambda *a, move=move: block.function(move, *a)  # noqa: E731
        with fo.use_implementation("xla" if way == "without" else way):
            built = contender(function, differentiated, data, way, block.phases)
        keys += [(way, phase) for phase in block.phases]
        programs += [built.programs[phase] for phase in block.phases]
    results: dict = {way: {} for way in block.ways}
    for (way, phase), timing in zip(keys, timer(programs, rounds), strict=True):
        numbers = timing.as_dict()
        results[way][phase] = {k: numbers[k] for k in ("median_us", "spread_us", "launches")}
    return {
        "block": block.name,
        "dtype": dtype,
        "shapes": [list(shape) for shape in block.shapes(scale)],
        "results": results,
    }


if __name__ == "__main__":
    main()
