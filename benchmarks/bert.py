"""What does BERT gain from fused ops? ``python -m benchmarks.bert``

Measures the encoder of BERT-base: its twelve layers on activations ``[batch, length, 768]`` in
bfloat16 with float32 parameters. A padding mask has random lengths between half and all of the
length. There are no embeddings, no head and no optimizer. The phases are:

``step``       forward and backward: the gradients of a randomly weighted sum of the last layer's
               outputs with respect to all parameters of the layers and to the input activations.
               At 32 x 512 its matrix products take at least about 13 ms on an H100
``inference``  only the forward, with weights in the dtype of the activations
``model``      (with ``--phases model``, and in ``--small``) a whole BERT with its embeddings and
               its head: the gradients of the loss of masked tokens with respect to all parameters

Each phase runs at 32 x 512 and 64 x 128, without dropout and with a dropout of 0.1. Attention is
computed by matrix products and ``softmax``, or by cuDNN, without dropout of its weights. Each row
is compiled for each of:

``ours``    with the ops of this package
``native``  the same, all ops by the kernels (with ``--native``)
``plain``   with ``bert.PLAIN``, the same model in jax.nn and jax.numpy; dropout by jax.random

They are timed in turns, and their temporary memory is XLA's figure for the compiled program. Their
results are compared: the gradients by the norm of their difference over their norm.

Other questions, each with a separate results file:

``--kernels``    which kernels does the forward of one layer launch?
``--profile``    where does the time of a step go, by kernel?
``--devices N``  data parallel on N devices, with the same batch on each: how many times the
                 throughput of one device (the mean of their times) is reached, and which
                 collectives are there?

On an H100 everything takes about five minutes. Most of it is the compilation of 24 programs of
twelve layers, of which ``--jobs`` are compiled at a time. ``--rows`` selects some of the rows.
"""

import argparse
import collections
import dataclasses
import functools
import math
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import RESULTS, environment, installed, measure, profile
from benchmarks.cases import fo
from benchmarks.jobs import collectives
from benchmarks.programs import Program
from benchmarks.report import headline, write

bert = installed("jax_fastops.models.bert")

MIB = 2**20
PHASES = ("step", "inference", "model")
ATTENTIONS = ("softmax", "xla", "cudnn")
MASKED = 0.15  # of the tokens, in the loss of "model"
CALLS = 5  # of a step, in a profile
CALLS_OF_A_SAMPLE = 20  # of a step, one after the other, with --devices
TOP = 25  # kernels that --profile lists


def dropout_of_jax(x, key, rate: float):
    """Dropout as models in JAX draw it."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    kept = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) / (1 - rate)).astype(x.dtype)
    return jnp.where(keep, kept, jnp.zeros_like(x))


PLAIN = bert.PLAIN._replace(
    softmax=functools.partial(bert.PLAIN.softmax, dropout=dropout_of_jax),
    residual_layer_norm=functools.partial(bert.PLAIN.residual_layer_norm, dropout=dropout_of_jax),
    dropout=dropout_of_jax,
)


def softmax_of_flax(x, where=None, *, scale: float, dropout_key=None, dropout_rate: float = 0.0):
    """With the mask as Flax' attention has it: the least number in place of other scores."""
    x = x * scale
    x = x if where is None else jnp.where(where, x, jnp.finfo(x.dtype).min)
    return dropout_of_jax(jax.nn.softmax(x), dropout_key, dropout_rate)


def norm_of_flax(x, scale, bias, *, eps: float, fanout=False):
    """As Flax' LayerNorm: the variance from the mean of squares, so that there is one reduction."""
    wide = x.astype(jnp.float32)
    mean, squares = wide.mean(-1, keepdims=True), jnp.square(wide).mean(-1, keepdims=True)
    variance = jnp.maximum(squares - jnp.square(mean), 0)
    y = ((wide - mean) * (jax.lax.rsqrt(variance + eps) * scale) + bias).astype(x.dtype)
    return (y, y) if fanout else y


def residual_norm_of_flax(
    x, residual, scale, bias, *, input_bias, dropout_key=None, dropout_rate: float = 0.0, **options
):
    x = dropout_of_jax(x + input_bias.astype(x.dtype), dropout_key, dropout_rate)
    return norm_of_flax(x + residual, scale, bias, **options)


#: Another careful user's ops: which of the two forms is faster is measured.
FLAX = PLAIN._replace(
    softmax=softmax_of_flax,
    residual_layer_norm=residual_norm_of_flax,
    layer_norm=norm_of_flax,
)

# The ops, and the implementation under which they are compiled.
CONTENDERS = {
    "ours": (bert.FASTOPS, "auto"),
    "native": (bert.FASTOPS, "native"),
    "plain": (PLAIN, "xla"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A network, and the rows that are measured with it."""

    name: str
    config: bert.Config
    shapes: tuple[tuple[int, int], ...]  # batch, length
    dtypes: tuple[str, ...]
    phases: tuple[str, ...]


BASE = Setting("BERT-base", bert.BASE, ((32, 512), (64, 128)), ("bfloat16",), ("step", "inference"))
SMALL = Setting("small BERT", bert.SMALL, ((32, 128),), ("float32", "bfloat16"), PHASES)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: a program for each contender."""

    phase: str
    batch: int
    length: int
    dropout: float
    attention: str
    dtype: str

    @property
    def name(self) -> str:
        dropout = f", dropout {self.dropout:g}" if self.phase != "inference" else ""
        return f"{self.phase} {self.batch}x{self.length}{dropout}, {self.attention}, {self.dtype}"

    def config(self, config: bert.Config) -> bert.Config:
        """The configuration ``config`` with the options of this row."""
        return dataclasses.replace(
            config,
            dropout=self.dropout,
            attention_dropout=self.dropout if self.attention == "softmax" else 0.0,
            attention=self.attention,
            dtype=self.dtype,
        )


def main() -> None:
    options = parse()
    setting = chosen(options)
    asked = [name for name in ("kernels", "profile", "devices") if getattr(options, name)]
    for name in asked or ["rows"]:
        results = {
            "hardware": environment.hardware(),
            "versions": environment.versions(),
            "network": dataclasses.asdict(setting),
        }
        parts = ["bert", "small" if options.small else "", "" if name == "rows" else name]
        stem = "-".join([*filter(None, parts), environment.slug(results)])
        path = options.out / f"{stem}.json"
        print(f"{setting.name}: {headline(results)}", flush=True)
        MODES[name](setting, options, results, path)
        write(path, results)
        print(f"{headline(results)}\nwrote {path}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--small", action="store_true", help="a small network, for a CPU")
    add("--kernels", action="store_true", help="list the kernels of one layer's forward")
    add("--profile", action="store_true", help="the time of a step by kernel, on a GPU")
    add("--devices", type=int, metavar="N", help="data parallel on N devices and on one")
    add("--rows", default="", metavar="REGEX", help="rows whose name has a match of REGEX")
    add("--phases", nargs="+", choices=PHASES, help="(default: step inference)")
    add("--shapes", nargs="+", type=_shape, metavar="BxS", help="(default: 32x512 64x128)")
    add("--dropout", nargs="+", type=float, default=[0.0, 0.1], metavar="R", help="rates")
    add("--attention", nargs="+", choices=ATTENTIONS, help="(default: softmax; on CUDA cudnn too)")
    add("--dtypes", nargs="+", metavar="DTYPE", help="of the activations (default: bfloat16)")
    add("--manual", action="store_true", help="with --devices: under jax.shard_map, too")
    add("--layers", type=int, metavar="N", help="of the network")
    add("--native", action="store_true", help="with all of our ops by the kernels, too")
    add("--jobs", type=int, metavar="N", help="programs compiled at a time (default: the cores)")
    add("--repeats", type=int, default=15, metavar="N", help="rounds")
    add("--clock", choices=("auto", "profiler", "wall"), default="auto")
    add("--out", "--output", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    if options.devices and options.devices > len(jax.devices()):
        parser.error(f"--devices {options.devices}: there are {len(jax.devices())}")
    if options.profile and jax.devices()[0].platform != "gpu":
        parser.error("--profile: only a GPU's profile shows kernels")
    on_cuda = environment.platform_name() == "cuda"
    options.attention = options.attention or ["softmax", *(["cudnn"] if on_cuda else [])]
    options.jobs = options.jobs or min(os.cpu_count() or 1, 8)
    return options


def _shape(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def chosen(options: argparse.Namespace) -> Setting:
    setting = SMALL if options.small else BASE
    return dataclasses.replace(
        setting,
        config=dataclasses.replace(setting.config, layers=options.layers or setting.config.layers),
        shapes=tuple(options.shapes or setting.shapes),
        dtypes=tuple(options.dtypes or setting.dtypes),
        phases=tuple(options.phases or setting.phases),
    )


def rows(setting: Setting, options: argparse.Namespace) -> list[Row]:
    """The rows that the options select; ``--rows`` is matched against ``Row.name``."""

    def every() -> Iterator[Row]:
        for phase in setting.phases:
            for batch, length in setting.shapes:
                for dropout in [0.0] if phase == "inference" else options.dropout:
                    for attention in options.attention:
                        for dtype in setting.dtypes:
                            yield Row(phase, batch, length, dropout, attention, dtype)

    found = [row for row in every() if re.search(options.rows, row.name)]
    return found or _fail("no row fits these options")


def _fail(text: str):
    raise SystemExit(text)


# ---- programs ------------------------------------------------------------------------------------


@cache
def parameters(config: bert.Config):
    """Parameters of a whole BERT, in float32; the same arrays for all rows."""
    return jax.jit(bert.init, static_argnums=1, static_argnames="mlm")(
        jax.random.key(0), config, mlm=True
    )


@cache
def data(phase: str, batch: int, length: int, dtype: str, config: bert.Config) -> list[jax.Array]:
    """The arguments after the parameters: activations, mask, cotangent, bits of a dropout key.

    For "model" they are tokens, mask, labels, which labels count, and the bits. For "inference"
    they are activations and mask.
    """
    keys = jax.random.split(jax.random.key(1), 4)
    lengths = jax.random.randint(keys[0], (batch, 1), length // 2, length + 1)
    mask = jnp.arange(length) < lengths
    bits = jax.random.key_data(keys[3])
    if phase == "model":
        tokens = jax.random.randint(keys[1], (batch, length), 0, config.vocab_size)
        masked = jax.random.bernoulli(keys[2], MASKED, mask.shape) & mask
        return [jnp.where(masked, 0, tokens), mask, tokens, masked, bits]
    shape = (batch, length, config.hidden_size)
    x, cotangent = (jax.random.normal(k, shape).astype(dtype) for k in keys[1:3])
    return [x, mask, *([cotangent, bits] if phase == "step" else [])]


def step(layers, x, mask, cotangent, bits, *, config: bert.Config, ops: bert.Ops):
    key = jax.random.wrap_key_data(bits) if config.dropout else None

    def loss(layers, x):
        y = bert.encoder(layers, x, config, mask=mask, key=key, ops=ops)
        return jnp.sum(y.astype(jnp.float32) * cotangent) / math.sqrt(y.size)

    value, grads = jax.value_and_grad(loss, (0, 1))(layers, x)
    return value, *grads


def inference(layers, x, mask, *, config: bert.Config, ops: bert.Ops):
    return bert.encoder(layers, x, config, mask=mask, key=None, ops=ops)


def model(params, tokens, mask, labels, masked, bits, *, config: bert.Config, ops: bert.Ops):
    key = jax.random.wrap_key_data(bits) if config.dropout else None

    def loss(params):
        hidden, _ = bert.apply(params, tokens, config, mask=mask, key=key, ops=ops)
        return bert.masked_lm_loss(params, hidden, labels, config, where=masked, ops=ops)

    return jax.value_and_grad(loss)(params)


BODIES = {"step": step, "inference": inference, "model": model}


class Chosen(Program):
    """A program that is compiled under ``implementation``."""

    implementation: str

    @cached_property
    def compiled(self):
        with fo.use_implementation(self.implementation):
            return super().compiled


class Contender(Chosen):
    """The program of a row for one contender, on flat arrays."""

    def __init__(self, name: str, row: Row, setting: Setting):
        ops, self.implementation = CONTENDERS[name]
        config = row.config(setting.config)
        params = parameters(setting.config)
        params = params if row.phase == "model" else params["layers"]
        if row.phase == "inference":  # a step casts the weights, but not each call of a forward
            params = jax.tree.map(lambda a: a.astype(row.dtype) if a.ndim > 1 else a, params)
        leaves, tree = jax.tree.flatten(params)
        more = data(row.phase, row.batch, row.length, row.dtype, setting.config)

        def flat(*args):
            params = jax.tree.unflatten(tree, args[: len(leaves)])
            found = BODIES[row.phase](params, *args[len(leaves) :], config=config, ops=ops)
            return jax.tree.leaves(found)

        # The results' types are known, so no trace is needed, which takes seconds.
        self.like = {
            "step": [jax.ShapeDtypeStruct((), jnp.float32), *leaves, more[0]],
            "inference": [more[0]],
            "model": [jax.ShapeDtypeStruct((), jnp.float32), *leaves],
        }[row.phase]
        self.batched = {"step": {0, 1, 2}, "inference": {0, 1}, "model": {0, 1, 2, 3}}[row.phase]
        self.parameters = len(leaves)
        super().__init__(f"{row.phase}_{name}", flat, [*leaves, *more])

    @cached_property
    def outputs(self) -> list[jax.Array]:
        return [jnp.zeros(a.shape, a.dtype) for a in self.like]


def built(setting: Setting, options: argparse.Namespace, chosen: Sequence[Row]) -> dict:
    """Compiled programs by row and contender, or the text of the error."""
    names = [name for name in CONTENDERS if name != "native" or options.native]
    programs = {row: {name: Contender(name, row, setting) for name in names} for row in chosen}

    def compiled(row: Row, name: str):
        start = time.perf_counter()
        try:
            programs[row][name].compile()
        except Exception as error:  # an error must not lose the other rows
            programs[row][name] = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        print(f"compiled {row.name}, {name} in {seconds:.1f} s", flush=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(compiled, row, name) for row in chosen for name in names]:
            future.result()
    print(f"compiled everything in {time.perf_counter() - start:.1f} s", flush=True)
    return programs


# ---- rows ----------------------------------------------------------------------------------------


def measure_rows(setting: Setting, options: argparse.Namespace, results: dict, path: Path) -> None:
    """Measure times, memory and differences; print and write each row when it is known."""
    clock, timer = measure.clock(options.clock)
    results |= {"clock": clock, "rounds": options.repeats, "rows": []}
    programs = built(setting, options, rows(setting, options))
    for row in list(programs):
        mine = programs.pop(row)  # frees the row's outputs
        results["rows"].append(measured(row, mine, clock, timer, options.repeats))
        show_row(results["rows"][-1])
        write(path, results)


def measured(row: Row, programs: dict, clock: str, timer: measure.Clock, rounds: int) -> dict:
    errors = {name: text for name, text in programs.items() if isinstance(text, str)}
    programs = {name: p for name, p in programs.items() if name not in errors}
    timings = timer(list(programs.values()), rounds)
    walls = timings if clock == "wall" else measure.wall(list(programs.values()), rounds)
    entries = {
        name: _numbers(program, timing, wall)
        for (name, program), timing, wall in zip(programs.items(), timings, walls, strict=True)
    }
    differences = {
        name: difference(row, program, programs["plain"])
        for name, program in programs.items()
        if name != "plain" and "plain" in programs
    }
    return {
        "row": row.name,
        **dataclasses.asdict(row),
        "results": entries,
        "differences": differences,
        "errors": errors,
    }


def _numbers(program: Program, timing: measure.Timing, wall: measure.Timing) -> dict:
    return timing.as_dict() | {
        "wall_us": wall.median * 1e6,
        "temp_mib": program.temp_bytes / MIB,
        "kernels": program.kernels,
    }


def difference(row: Row, program: Program, plain: Program) -> dict:
    """Compare two contenders: the losses, and the relative norm of the other differences."""
    mine, other = program.results(), plain.results()
    loss = row.phase != "inference"
    found = {"norm": float(_relative(mine[loss:], other[loss:]))}
    if loss:
        found |= {"loss": float(mine[0]), "plain_loss": float(other[0])}
    return found


@jax.jit
def _relative(a: list[jax.Array], b: list[jax.Array]):
    """The norm of the difference of all arrays over the norm of all arrays of ``b``."""
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(a, b, strict=True)]
    error = sum(jnp.sum(jnp.square(x - y)) for x, y in wide)
    return jnp.sqrt(error / sum(jnp.sum(jnp.square(y)) for _, y in wide))


def show_row(entry: dict) -> None:
    print(f"\n{entry['row']}")
    columns = ("ms", "spread", "fastest", "wall", "temporary MiB", "launches")
    widths = (9, 8, 9, 9, 15, 10)
    print(" " * 8 + "".join(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True)))
    for name, found in entry["results"].items():
        times = [found[key] / 1e3 for key in ("median_us", "spread_us", "min_us", "wall_us")]
        cells = [*(f"{t:.3f}" for t in times), f"{found['temp_mib']:.1f}", str(found["launches"])]
        called = ", ".join(f"{n} {kernel}" for kernel, n in found["kernels"].items())
        line = "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        print(f"{name:<8}{line}   {called}")
    plain = entry["results"].get("plain")
    for name, found in entry["differences"].items():
        ours = entry["results"][name]
        speed, memory = (plain[k] / max(ours[k], 1e-9) for k in ("median_us", "temp_mib"))
        text = f"{name}: {speed:.3f} times as fast as plain, {_less(memory)} temporary memory"
        text += f"; differs by {found['norm']:.2g} in norm"
        if "loss" in found:
            text += f", losses {found['loss']:.6g} and {found['plain_loss']:.6g}"
        print(text)
    for name, error in entry["errors"].items():
        print(f"{name}: {error}")


def _less(ratio: float) -> str:
    share = 1 - 1 / max(ratio, 1e-9)
    return f"{abs(share):.0%} {'less' if share >= 0 else 'more'}"


# ---- kernels of one layer ------------------------------------------------------------------------


class Layer(Chosen):
    """The forward of one layer."""

    def __init__(self, name: str, row: Row, setting: Setting, weights: str):
        ops, self.implementation = CONTENDERS[name]
        config = row.config(setting.config)
        params = parameters(setting.config)["layers"][0]
        params = jax.tree.map(lambda a: a.astype(weights) if a.ndim > 1 else a, params)
        leaves, tree = jax.tree.flatten(params)
        more = data("inference", row.batch, row.length, row.dtype, setting.config)

        def flat(*args):
            params = jax.tree.unflatten(tree, args[: len(leaves)])
            x, mask = args[len(leaves) :]
            return [bert.encoder_layer(params, x, config, mask=mask, ops=ops)]

        super().__init__(f"layer_{name}", flat, [*leaves, *more])


def list_kernels(setting: Setting, options: argparse.Namespace, results: dict, path: Path) -> None:
    """List what the forward of one layer launches.

    Weight matrices are float32 and cast where they are used, as in training, or have the dtype of
    the activations, as in inference.
    """
    del path
    batch, length = setting.shapes[0]
    dtype = setting.dtypes[-1]
    results["layers"] = []
    names = [name for name in CONTENDERS if name != "native" or options.native]
    programs = {}
    for attention in options.attention:
        row = Row("inference", batch, length, 0.0, attention, dtype)
        for weights in dict.fromkeys((dtype, "float32")):
            for name in names:
                programs[attention, weights, name] = Layer(name, row, setting, weights)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(Layer.compile, programs.values()))
    for (attention, weights, name), program in programs.items():
        source, launched = launches(program)
        entry = {"attention": attention, "weights": weights, "contender": name}
        entry |= {"batch": batch, "length": length, "dtype": dtype}
        entry |= {"source": source, "count": len(launched), "kernels": launched}
        results["layers"].append(entry)
        what = f"{attention}, {weights} weights, {name}"
        print(f"\n{what}: {len(launched)} kernels ({source})")
        for index, kernel in enumerate(launched, 1):
            print(f"  {index:>2}  {_short(kernel)}")


def launches(program: Program) -> tuple[str, list[str]]:
    """What one call runs on the GPU, in order, from a profile. Without a GPU, the operations in the
    entry computation of the compiled module that do work.
    """
    calls = profiled(program, 3)
    if calls:
        return "profile", [kernel.name for kernel in calls[-1]]
    return "HLO", operations(program.compiled.as_text())


def profiled(program: Program, count: int) -> list[list[profile.Kernel]]:
    """The kernels of each of ``count`` calls; an empty list without a GPU."""
    jax.block_until_ready(program())
    jax.block_until_ready(measure.flush())

    def work():
        for _ in range(count):
            measure.flush()
            last = program()
        jax.block_until_ready(last)

    for _ in range(2):  # the first profile may lose events while its buffers are allocated
        calls = measure.between_flushes(profile.kernels(work))
        if len(calls) == count and len({len(call) for call in calls}) == 1:
            return calls
    if calls:
        counts = sorted({len(call) for call in calls})
        raise RuntimeError(f"the profile shows {len(calls)} of {count} calls, of {counts} kernels")
    return []


def operations(hlo: str) -> list[str]:
    """Opcodes in the entry computation of a module that do work, with what they call."""
    entry = hlo[hlo.index("\nENTRY ") :].split("\n}")[0]
    found = []
    for line in entry.splitlines()[2:]:
        opcode = measure.opcode(line)
        if opcode and opcode not in measure.FREE:
            target = re.search(r'custom_call_target="([^"]+)"', line)
            name = line.split(" = ")[0].split("%")[-1].strip()
            found.append(f"{opcode} {target[1] if target else name}")
    return found


# ---- where the time goes -------------------------------------------------------------------------

# The first pattern that matches the name of a kernel counts. Names of XLA's matrix products have
# "dot" or "gemm" in them.
KINDS = {
    "ours": r"jax_fastops",
    "cuDNN attention": r"sdpa|fmha|flash|cudnn_generated",
    "matrix products": r"gemm|cutlass|cublas|nvjet|xmma|wgmma|splitk|\bdot\b|_dot_",
    "collectives": r"nccl",
    "copies": r"memcpy|memset|^copy|wrapped_copy",
}


def profile_steps(setting: Setting, options: argparse.Namespace, results: dict, path: Path) -> None:
    """Profile the time of a step by kernel, for every row that the options select."""
    results["profiles"] = []
    programs = built(setting, options, rows(setting, options))
    for row in list(programs):
        for name, program in programs.pop(row).items():
            if isinstance(program, str):
                print(f"\n{row.name}, {name}: {program}")
                continue
            calls = profiled(program, CALLS) or _fail("the profile shows no kernels")
            entry = {"row": row.name, **dataclasses.asdict(row), "contender": name}
            entry |= breakdown(calls)
            results["profiles"].append(entry)
            show_breakdown(entry)
            write(path, results)


def breakdown(calls: Sequence[Sequence[profile.Kernel]]) -> dict:
    """Mean µs of a call: in total, by kind, and by name without its number."""
    grouped: dict[str, list[profile.Kernel]] = collections.defaultdict(list)
    for call in calls:
        for kernel in call:
            grouped[re.sub(r"([_.]\d+)+$", "", kernel.name)].append(kernel)

    def microseconds(kernels) -> float:
        return sum(kernel.duration for kernel in kernels) * 1e-3 / len(calls)

    entries = [
        {
            "name": name,
            "kind": kind(kernels[0]),
            "count": round(len(kernels) / len(calls)),
            "us": microseconds(kernels),
            "of": origins(kernels),
        }
        for name, kernels in grouped.items()
    ]
    entries.sort(key=lambda entry: -entry["us"])
    kinds: dict[str, dict] = collections.defaultdict(lambda: {"us": 0.0, "count": 0})
    for entry in entries:
        kinds[entry["kind"]]["us"] += entry["us"]
        kinds[entry["kind"]]["count"] += entry["count"]
    return {
        "us": microseconds(kernel for call in calls for kernel in call),
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1]["us"])),
        "kernels": entries[:TOP],
        "others": {
            "us": sum(entry["us"] for entry in entries[TOP:]),
            "count": sum(entry["count"] for entry in entries[TOP:]),
        },
    }


def kind(kernel: profile.Kernel) -> str:
    for name, pattern in KINDS.items():
        if re.search(pattern, kernel.name, re.IGNORECASE):
            return name
    return "XLA's fusions"


def origins(kernels: Sequence[profile.Kernel]) -> list[str]:
    """The JAX operations with the most time in these kernels, if the profile names them."""
    times: collections.Counter = collections.Counter()
    for kernel in kernels:
        if found := re.search(r"jit\(\w+\)/(\S+)", kernel.labels):
            times[found[1]] += kernel.duration
    return [name for name, _ in times.most_common(3)]


def show_breakdown(entry: dict) -> None:
    print(f"\n{entry['row']}, {entry['contender']}: {entry['us'] / 1e3:.3f} ms")
    for name, found in entry["kinds"].items():
        print(f"{found['us']:>11.1f} µs {found['count']:>6}  {name}")
    for found in entry["kernels"]:
        of = f"  <- {found['of'][0][-60:]}" if found["of"] else ""
        times = f"{found['us']:>11.1f} µs {found['count']:>6} {found['us'] / entry['us']:>6.1%}"
        print(f"{times}  {_short(found['name'])}{of}")
    print(f"{entry['others']['us']:>11.1f} µs {entry['others']['count']:>6}         others")


def _short(name: str, most: int = 80) -> str:
    name = re.sub(r"^void ", "", name)
    return name if len(name) <= most else name[: most - 3] + "..."


# ---- data parallel -------------------------------------------------------------------------------


class Parallel(Contender):
    """A step on a mesh: the batch is sharded, parameters and their gradients are replicated."""

    def __init__(
        self,
        name: str,
        row: Row,
        setting: Setting,
        devices: Sequence[jax.Device],
        manual: bool = False,
    ):
        super().__init__(name, dataclasses.replace(row, batch=row.batch * len(devices)), setting)
        mesh = Mesh(np.array(devices), ("data",))
        whole = NamedSharding(mesh, PartitionSpec())
        dealt = NamedSharding(mesh, PartitionSpec("data"))
        first, last = self.parameters, len(self.args)
        places = [dealt if i - first in self.batched else whole for i in range(last)]
        self.args = [jax.device_put(a, p) for a, p in zip(self.args, places, strict=True)]
        # The last result of a step is the gradient of the activations.
        self.places = [whole] * len(self.like)
        if row.phase == "step":
            self.places[-1] = dealt
        self.devices = len(devices)
        if manual:  # gradients of replicated parameters are summed over the devices by shard_map
            inner = self.function

            def summed(*flat):
                value, *grads = inner(*flat)
                return [jax.lax.psum(value, "data"), *grads]

            specs = [tuple(p.spec for p in places), [p.spec for p in self.places]]
            self.function = jax.shard_map(summed, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
        self.name += f"_on_{len(devices)}"

    @cached_property
    def outputs(self) -> list[jax.Array]:
        return [
            jnp.zeros(a.shape, a.dtype, device=place)
            for a, place in zip(self.like, self.places, strict=True)
        ]

    @cached_property
    def compiled(self):
        def program(*flat):
            return self.function(*flat[: len(self.args)])

        program.__name__ = self.name
        donated = tuple(range(len(self.args), len(self.args) + len(self.outputs)))
        jitted = jax.jit(
            program, donate_argnums=donated, keep_unused=True, out_shardings=self.places
        )
        with fo.use_implementation(self.implementation):
            return jitted.lower(*self.args, *self.outputs).compile()

    def seconds(self) -> float:
        """Seconds per step; several steps are launched one after the other, as in training."""
        start = time.perf_counter()
        for _ in range(CALLS_OF_A_SAMPLE):
            self()
        jax.block_until_ready(self.outputs)
        return (time.perf_counter() - start) / CALLS_OF_A_SAMPLE


def scale(setting: Setting, options: argparse.Namespace, results: dict, path: Path) -> None:
    """Measure steps on one device and on several, with the same batch on each."""
    results |= {"clock": "wall", "rounds": options.repeats, "devices": options.devices}
    results["scaling"] = []
    names = [name for name in CONTENDERS if name != "native" or options.native]
    shape = setting.shapes[0]
    setting = dataclasses.replace(setting, shapes=(shape,))
    for row in rows(setting, options):
        if row.phase == "inference":
            continue
        for name in names:
            for manual in (False, True) if options.manual and row.phase == "step" else (False,):
                entry = {"row": row.name, **dataclasses.asdict(row), "contender": name}
                entry |= {"shard_map": manual, **scaled(name, row, setting, options, manual)}
                results["scaling"].append(entry)
                show_scaling(entry)
                write(path, results)


def scaled(
    name: str, row: Row, setting: Setting, options: argparse.Namespace, manual: bool
) -> dict:
    many = jax.devices()[: options.devices]
    programs = [Parallel(name, row, setting, many, manual)]
    # Each device by itself: two of a kind differ in speed. Together they run at the slower's pace.
    programs += [Parallel(name, row, setting, [device]) for device in many]
    with ThreadPoolExecutor(min(len(programs), options.jobs)) as pool:
        list(pool.map(lambda program: program.compile(), programs))
    samples: list[list[float]] = [[] for _ in programs]
    for program in programs:
        program.seconds()
    for turn in range(options.repeats):
        for index in range(len(programs))[:: 1 if turn % 2 else -1]:
            samples[index].append(programs[index].seconds())
    all_, *each = (statistics.median(times) for times in samples)
    one = statistics.mean(each)
    return {
        "devices": len(many),
        "one_us": one * 1e6,
        "each_us": [seconds * 1e6 for seconds in each],
        "all_us": all_ * 1e6,
        "min_us": [min(times) * 1e6 for times in samples],
        "throughput": len(many) * one / all_,
        "collectives": collectives(programs[0].compiled.as_text()),
    }


def show_scaling(entry: dict) -> None:
    each = " and ".join(f"{us / 1e3:.3f}" for us in entry["each_us"])
    times = f"one device {each} ms, {entry['devices']} devices {entry['all_us'] / 1e3:.3f} ms"
    found = ", ".join(
        f"{v['count']} {kind} ({v['bytes'] / MIB:.1f} MiB)"
        for kind, v in entry["collectives"].items()
    )
    throughput = f"{entry['throughput']:.3f} times the throughput"
    by = " by shard_map" if entry["shard_map"] else ""
    what = f"{entry['row']}, {entry['contender']}{by}"
    print(f"{what}: {times}, {throughput}; {found or 'no collective'}", flush=True)


MODES = {
    "rows": measure_rows,
    "kernels": list_kernels,
    "profile": profile_steps,
    "devices": scale,
}


if __name__ == "__main__":
    main()
