"""What does a transposition cost inside a block?

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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import measure
from benchmarks.cases import Shape, fo
from benchmarks.programs import contender, operands_of, random
from benchmarks.report import Results

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


def reshaped(x, axes):
    """An array of the transposition's shape, without a move."""
    return x.reshape([x.shape[axis] for axis in axes])


def attention(move, x, w, bias, out):
    """The attention of BERT-base: 12 heads of 64."""
    del move
    q, k, v = fo.split_qkv_heads(x @ w, bias, num_heads=12)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.125
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return fo.merge_heads(jnp.einsum("bhqk,bhkd->bhqd", weights, v)) @ out


def normalized(move, x, scale):
    """Mean and variance over the last axis, of rows that were along another axis."""
    y = move(x, (1, 0, 2)).astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale


BERT = (
    ((32, 512, 768), (768, 2304), (2304,), (768, 768)),
    ((1, 128, 768), (768, 2304), (2304,), (768, 768)),
)
TRAINED = ("forward", "step")


def _squares(count: int) -> tuple[tuple[Shape, ...], ...]:
    return ((4096, 4096),) * count, ((256, 256),) * count


BLOCKS = (
    Block("x @ w.T", lambda move, x, w: x @ move(w, (1, 0)), *_squares(2), phases=TRAINED),
    Block("(x @ w).T @ v", lambda t, x, w, v: t(x @ w, (1, 0)) @ v, *_squares(3), phases=TRAINED),
    *(
        Block(
            f"batched x @ y.T{more}",
            lambda move, x, y: x @ move(y, (0, 2, 1)),
            ((384, 512, n),) * 2,
            ((6, 128, m),) * 2,
            phases=TRAINED,
        )
        for more, n, m in (("", 512, 128), (", thin", 64, 64))
    ),
    Block("attention", attention, *BERT, ("bfloat16",), TRAINED, WAYS[:3]),
    *(
        Block(name.format(text), partial(of, axes=axes), *shapes)
        for text, axes, *shapes in (
            ("(0,2,3,1)", (0, 2, 3, 1), ((64, 128, 56, 56),), ((4, 128, 56, 56),)),
            ("(3,2,1,0)", (3, 2, 1, 0), ((96, 97, 98, 99),), ((48, 49, 50, 51),)),
        )
        for name, of in (
            ("gelu, then {}", lambda move, x, axes: move(jax.nn.gelu(x), axes)),
            ("{}, then gelu", lambda move, x, axes: jax.nn.gelu(move(x, axes))),
            ("gelu, {}, gelu", lambda move, x, axes: jax.nn.gelu(move(jax.nn.gelu(x), axes))),
        )
    ),
    Block(
        "(1,0,2), then layer norm", normalized, ((512, 64, 1024), (1024,)), ((128, 16, 256), (256,))
    ),
)


def options(add) -> None:
    add("--dtypes", nargs="+", metavar="DTYPE", help="these dtypes (default: all)")
    add("--filter", default="", metavar="TEXT", help="blocks whose name contains TEXT")
    measure.options(add, 15)


def run(options) -> None:
    """Measure the blocks one by one, and print a line for each phase."""
    scale = "gpu" if jax.devices()[0].platform == "gpu" else "cpu"
    clock, timer = measure.clock(options.clock)
    results = Results(options.out, "neighbours", clock=clock, rounds=options.repeats, blocks=[])
    print(f"{'µs (kernels)':<36}{'phase':<9}" + "".join(f"{way:>15}" for way in WAYS), flush=True)
    for block in (b for b in BLOCKS if options.filter in b.name):
        for dtype in (d for d in block.dtypes if not options.dtypes or d in options.dtypes):
            found = measured(block, dtype, scale, timer, options.repeats)
            results.add("blocks", found)
            for phase in block.phases:
                print(f"{block.name + ', ' + dtype:<36}{phase:<9}{line(found, phase)}", flush=True)
    results.end()


def line(found: dict, phase: str) -> str:
    numbers = [found["results"].get(way, {}).get(phase) for way in WAYS]
    texts = [f"{n['median_us']:.1f} ({n['launches']})" if n else "-" for n in numbers]
    return "".join(f"{text:>15}" for text in texts)


def measured(block: Block, dtype: str, scale: str, timer: measure.Clock, rounds: int) -> dict:
    """Times and numbers of kernels of one block, in each way."""
    args = [random(i, shape, dtype) for i, shape in enumerate(getattr(block, scale))]
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
        "shapes": [list(shape) for shape in getattr(block, scale)],
        "results": results,
    }
