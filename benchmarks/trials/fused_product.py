"""What does a product gain if its epilogue does the work of the pass that follows it?

Products in bfloat16 on Hopper, as `fused_product.cu` has them, against XLA's product and a pass:
the package's kernel (``kernel``), or what XLA compiles (``xla``). ``product`` is XLA's product by
itself. A CUTLASS row has its tile (0: 128 x 256, 1: 128 x 128 ping-pong, 2: 256 x 128, 3: 64 x 128
ping-pong) and the swizzle of the order of tiles.

``forward``   bias and GELU of a feed-forward, in inference
``training``  the same, where the operand of GELU is kept for the backward
``backward``  the product of the cotangent, GELU's derivative, and the gradient of the bias
``gated``     ``silu(x g) * (x u)``: the second product takes the first one's result
``losses``    the logits of a vocabulary, and what the loss needs of each row: a sum of
              exponentials, without a maximum, so at the least cost

A program has several calls on buffers of its own, more than the L2 cache holds.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import json
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import RESULTS, installed
from benchmarks.cases import fo
from benchmarks.programs import temp_bytes
from benchmarks.report import Results

bert = installed("jax_fastops.models.bert")

MODES = ("plain", "gelu", "gelu_kept", "tanh", "tanh_kept")
MODES += ("gated", "gated_kept", "backward", "exp_sums")
FIRST_MODULE = 5  # modes of the first module; the build makes two
TILES = {0: (128, 256), 1: (128, 128), 2: (256, 128), 3: (64, 128)}
COLD = 160e6  # bytes of operands of a program
FEED_FORWARD = [(tokens, 768, 3072) for tokens in (16384, 8192, 1024, 32)]

product = jnp.matmul


def register(folder: Path) -> None:
    for number in (0, 1):
        module = ctypes.CDLL(str(folder / f"product{number}.so"))
        capsule = jax.ffi.pycapsule(module.FusedProduct)
        jax.ffi.register_ffi_target(f"trial_product{number}", capsule, platform="CUDA")


def fused(mode: str, tile: int, swizzle: int, *operands):
    """The results of a mode, of ``x`` [m, k] and weights [k, n], [n, k] in the backward."""
    x, w = operands[:2]
    m, n = len(x), w.shape[0 if mode == "backward" else 1]
    result = jax.ShapeDtypeStruct((m, n), x.dtype)
    rows, columns = (-(-size // part) for size, part in zip((m, n), TILES[tile], strict=True))
    more = []
    if mode.endswith("kept"):
        more = [result]
    elif mode == "backward":
        more = [jax.ShapeDtypeStruct((rows, columns * TILES[tile][1]), jnp.float32)]
    elif mode == "exp_sums":
        more = [jax.ShapeDtypeStruct((columns, rows * TILES[tile][0]), jnp.float32)]
    index = MODES.index(mode)
    call = jax.ffi.ffi_call(f"trial_product{int(index >= FIRST_MODULE)}", [result, *more])
    numbers = dict(mode=index, tile=tile, swizzle=swizzle)
    found = call(*operands, **{name: np.int64(value) for name, value in numbers.items()})
    if mode == "backward":
        return found[0], found[1][:, :n].sum(0)
    return tuple(found) if more else found[0]


def tiles(mode: str, tokens: int, swizzles=(1,)) -> dict[str, Callable]:
    few = tokens <= 1024 and mode in MODES[:3]
    some = (1, 2, 3) if few else (0, 2) if len(swizzles) > 1 else (0, 1, 2)
    return {
        f"cutlass {tile} {swizzle}": functools.partial(fused, mode, tile, swizzle)
        for tile in some
        for swizzle in swizzles
    }


# ---- what is timed ------------------------------------------------------------------------------


def native(function: Callable) -> Callable:
    def call(*args):
        with fo.use_implementation("native"):
            return function(*args)

    return call


def gelu(x, w, bias, exact: bool):
    return jax.nn.gelu(x @ w + bias, approximate=not exact)


def kernel_gelu(x, w, bias, exact: bool):
    return fo.bias_act(x @ w, bias, activation="gelu_exact" if exact else "gelu")


def forward(tokens, features, width, exact: bool):
    shapes = (tokens, features), (features, width), (width,)
    return shapes, {
        "product": lambda x, w, b: product(x, w),
        "xla": functools.partial(gelu, exact=exact),
        "kernel": native(functools.partial(kernel_gelu, exact=exact)),
        **tiles("gelu" if exact else "tanh", tokens),
    }


def training(tokens, features, width, exact: bool):
    shapes, forms = forward(tokens, features, width, exact)

    def both(act):
        def call(x, w, b):
            kept = x @ w
            return act(kept, b), kept

        return call

    name = "gelu_exact" if exact else "gelu"
    return shapes, {
        "product": forms["product"],
        "xla": both(lambda s, b: jax.nn.gelu(s + b, approximate=not exact)),
        "kernel": native(both(lambda s, b: fo.bias_act(s, b, activation=name))),
        **tiles("gelu_kept" if exact else "tanh_kept", tokens),
    }


def backward(tokens, features, width):
    """``features`` are those of the cotangent, ``width`` those of the activation."""
    shapes = (tokens, features), (width, features), (tokens, width)
    zero = jnp.zeros(width, jnp.bfloat16)

    def pulled(act):
        def call(g, w, kept):
            _, pull = jax.vjp(act, kept, zero)
            dkept, dbias = pull(g @ w.T)
            return dkept, dbias.astype(jnp.float32)

        return call

    return shapes, {
        "product": lambda g, w, kept: g @ w.T,
        "xla": pulled(lambda s, b: jax.nn.gelu(s + b, approximate=False)),
        "kernel": native(pulled(lambda s, b: fo.bias_act(s, b, activation="gelu_exact"))),
        **tiles("backward", tokens),
    }


def gated(tokens, features, width, kept: bool):
    shapes = (tokens, features), (features, width), (features, width)

    def pair(act):
        def call(x, gate, up):
            g, u = x @ gate, x @ up
            return (act(g, u), u, g) if kept else act(g, u)

        return call

    def by(form):
        def call(x, gate, up):
            g = x @ gate
            found = form(x, up, g)
            return (*found, g) if kept else found

        return call

    return shapes, {
        "product": lambda x, gate, up: (x @ gate, x @ up),
        "xla": pair(lambda g, u: jax.nn.silu(g) * u),
        "kernel": native(pair(lambda g, u: fo.gated_act(g, u, activation="silu"))),
        **{n: by(f) for n, f in tiles("gated_kept" if kept else "gated", tokens, (1, 8)).items()},
    }


def losses(tokens, features, classes):
    shapes = (tokens, features), (features, classes)

    def passed(x, w):
        logits = x @ w
        return logits, fo.cross_entropy(logits, jnp.zeros(len(x), jnp.int32))

    plain = {f"plain {name}": f for name, f in tiles("plain", tokens, (1, 8)).items()}
    return shapes, {
        "product": lambda x, w: product(x, w),
        "kernel": native(passed),
        **plain,
        **tiles("exp_sums", tokens, (1, 8)),
    }


def trials() -> dict[str, Callable]:
    """What is timed, the most important first."""
    largest, gates = FEED_FORWARD[0], (16384, 2048, 8192)
    name = "x".join(map(str, largest))
    found = {
        f"forward {name}": functools.partial(forward, *largest, True),
        f"backward {name}": functools.partial(backward, *largest),
        f"training {name}": functools.partial(training, *largest, True),
        "losses 16384x2048x128256": functools.partial(losses, 16384, 2048, 128256),
        "gated forward 16384x2048x8192": functools.partial(gated, *gates, False),
        f"tanh forward {name}": functools.partial(forward, *largest, False),
    }
    for shape in reversed(FEED_FORWARD[1:]):
        found[f"forward {'x'.join(map(str, shape))}"] = functools.partial(forward, *shape, True)
    return found | {
        "gated training 16384x2048x8192": functools.partial(gated, *gates, True),
        f"tanh training {name}": functools.partial(training, *largest, False),
    }


# ---- times --------------------------------------------------------------------------------------


def chained(function: Callable, operands: list) -> Callable:
    """A program that calls a function on each of the operands, one after the other."""

    def call(operands):
        found = []
        for each in operands:
            if found:
                each, found[-1] = jax.lax.optimization_barrier((each, found[-1]))
            found.append(function(*each))
        return found

    return jax.jit(call).lower(operands).compile()


def epilogues(text: str) -> list[str]:
    """Those that XLA gives to cuBLASLt."""
    return sorted(set(re.findall(r'"epilogue":"(\w+)"', text)))


def measure(name: str, make: Callable, rounds: int) -> list[dict]:
    shapes, forms = make()
    size = sum(2 * np.prod(shape) for shape in shapes)
    copies = int(max(1, min(24, COLD // size)))
    keys = iter(jax.random.split(jax.random.key(0), copies * len(shapes)))
    operands = [
        tuple(0.05 * jax.random.normal(next(keys), s, jnp.bfloat16) for s in shapes)
        for _ in range(copies)
    ]
    rows = {form: dict(trial=name, form=form) for form in forms}

    programs = {}
    expected = None
    for form, function in forms.items():
        try:  # one after the other: XLA times algorithms while it compiles
            programs[form] = chained(function, operands)
            found = jax.block_until_ready(programs[form](operands)[0])
        except Exception as error:
            rows[form]["error"] = str(error).splitlines()[0][:200]
            programs.pop(form, None)
            continue
        rows[form]["epilogues"] = epilogues(programs[form].as_text())
        if name.startswith("losses") and form.startswith(("kernel", "cutlass")):
            found = exponentials(found)
        if form == "kernel":
            expected = jax.tree.leaves(found)
        elif expected and form.startswith("cutlass"):
            # The kernel keeps the product without the bias.
            one = "training" in name and not name.startswith("gated")
            pairs = zip(jax.tree.leaves(found)[: 1 if one else None], expected, strict=not one)
            rows[form]["apart"] = [float(apart(a, b)) for a, b in pairs]
        del found
    times = {form: [] for form in programs}
    calls = 3 if name.startswith("losses") else 6
    for _ in range(rounds):
        for form in random.sample(list(programs), len(programs)):
            begin = time.perf_counter()
            for _ in range(calls):
                result = programs[form](operands)
            jax.block_until_ready(result)
            times[form].append((time.perf_counter() - begin) / calls / copies * 1e6)
    flops = 2 * np.prod(shapes[0]) * shapes[1][0 if name.startswith("backward") else 1]
    if name.startswith("gated"):
        flops *= 2
    for form, found in times.items():
        us = statistics.median(found[1:])
        rows[form] |= dict(us=round(us, 2), tflops=round(float(flops / us * 1e-6), 1))
    return list(rows.values())


@jax.jit
def exponentials(found):
    """The sum of each row's exponentials, from logits and losses, or from sums of tiles."""
    logits, more = found
    return more.sum(0)[: len(logits)] if more.ndim == 2 else jnp.exp(more + logits[:, 0])


@jax.jit
def apart(a, b):
    """The distance of two arrays, as a share of the second one's norm."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())


# ---- BERT ---------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def feed_forward(x, up, bias, down, tile: int):
    return product(fused("gelu", tile, 1, x, up, bias), down)


def feed_forward_saving(x, up, bias, down, tile):
    y, kept = fused("gelu_kept", tile, 1, x, up, bias)
    return product(y, down), (x, up, y, kept, down)


def feed_forward_backward(tile, residuals, g):
    x, up, y, kept, down = residuals
    dkept, dbias = fused("backward", tile, 1, g, down, kept)
    return product(dkept, up.T), product(x.T, dkept), dbias.astype(x.dtype), product(y.T, g)


feed_forward.defvjp(feed_forward_saving, feed_forward_backward)


class Pending(NamedTuple):
    """The product of a feed-forward, until its bias and the next product are known."""

    x: Any
    kernel: Any
    bias: Any = None


@contextlib.contextmanager
def with_fused_products(tile: int):
    """The ops of a BERT whose feed-forward has fused products while it is traced here."""
    layers = installed("jax_fastops.models._bert_layers")
    dot = layers.dot

    def dot_or_pending(x, kernel):
        if isinstance(x, Pending):
            tokens = x.x.reshape(-1, x.x.shape[-1])
            bias = x.bias.astype(tokens.dtype)
            return feed_forward(tokens, x.kernel, bias, kernel, tile).reshape(x.x.shape)
        return Pending(x, kernel) if kernel.shape[1] == 4 * kernel.shape[0] else dot(x, kernel)

    def bias_act(x, bias, *, activation):
        if isinstance(x, Pending):
            return x._replace(bias=bias)
        return fo.bias_act(x, bias, activation=activation)

    def dense_act(x, kernel, bias, *, activation):
        return bias_act(dot_or_pending(x, kernel), bias, activation=activation)

    layers.dot = dot_or_pending
    try:
        yield bert.FASTOPS._replace(bias_act=bias_act, dense_act=dense_act)
    finally:
        layers.dot = dot


def of_bert(shape: str, tile: int, step: bool) -> list[dict]:
    """A forward in inference, or a step of pretraining: with the package's ops, and fused."""
    job = installed("benchmarks.jobs.pretraining")
    changes = dict(attention="cudnn", attention_dropout=0.0, vocab_size=job.VOCABULARY)
    config = dataclasses.replace(bert.BASE, dropout=0.1 if step else 0.0, **changes)
    batch = list(map(jnp.asarray, job.data(shape, config.vocab_size, "masked")))

    def compiled(ops):
        def loss(params, count, tokens, labels, inside, chosen):
            key = jax.random.fold_in(jax.random.key(1), count)
            hidden, _ = bert.apply(params, tokens, config, mask=inside, key=key, ops=ops)
            return bert.masked_lm_loss(params, hidden, labels, config, positions=chosen, ops=ops)

        def forward(params, tokens, labels, inside, chosen):
            return params, bert.apply(params, tokens, config, mask=inside, ops=ops)[0]

        begin, update = job.adamw(job.RATE, job.DECAY, loss)

        def start():
            params = bert.init(jax.random.key(0), config, mlm=True)
            if step:
                return begin(params)
            return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim > 1 else a, params)

        start = jax.jit(start)
        function = jax.jit(update if step else forward, donate_argnums=0)
        return start, function.lower(jax.eval_shape(start), *batch).compile()

    programs = {"op": compiled(bert.FASTOPS)}
    with with_fused_products(tile) as ops:
        programs["fused"] = compiled(ops)
    state = programs["op"][0]()
    times, values = {name: [] for name in programs}, {}
    calls = 10 if step else 20
    for turn in range(6):
        for name, (_, program) in random.sample(list(programs.items()), len(programs)):
            state, _ = jax.block_until_ready(program(state, *batch))
            begin = time.perf_counter()
            for _ in range(calls):
                state, values[name] = program(state, *batch)
            jax.block_until_ready(state)
            if turn:
                times[name].append((time.perf_counter() - begin) / calls * 1e3)
    kind = "step" if step else "forward"
    sample = {
        name: value.astype(jnp.float32).ravel()[:4].tolist() for name, value in values.items()
    }
    return [
        dict(
            trial=f"BERT {kind} {shape}",
            form=f"cutlass {tile}" if name == "fused" else name,
            ms=statistics.median(found),
            all_ms=found,
            temp_gb=temp_bytes(programs[name][1]) / 1e9,
            sample=sample[name],
        )
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--modules", type=Path, required=True, help="the folder of product0.so and product1.so")
    add("--trials", nargs="*", default=[""], help="by the beginning of their names")
    add("--rounds", type=int, default=8)
    add("--bert", nargs="*", default=[], help="shapes of whole forwards and steps")
    add("--tile", type=int, default=0, choices=(0, 1, 2), help="of BERT's products")
    add("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    register(options.modules)
    results = Results(options.out, "fused_product-trial")

    def keep(rows):
        for row in rows:
            results.add("rows", row)
            print(json.dumps(row), flush=True)

    for name, make in trials().items():
        if name.startswith(tuple(options.trials)):
            keep(measure(name, make, options.rounds))
    for shape in options.bert:
        keep(of_bert(shape, options.tile, False))
        keep(of_bert(shape, options.tile, True))


if __name__ == "__main__":
    main()
