"""What does BERT gain from fused ops?

Measures the encoder of BERT-base: its twelve layers on activations ``[batch, length, 768]`` in
bfloat16 with float32 parameters. A padding mask has random lengths between half and all of the
length. There are no embeddings, no head and no optimizer. The phases are:

``step``       forward and backward: the gradients of a randomly weighted sum of the last layer's
               outputs with respect to all parameters of the layers and to the input activations.
               At 32 x 512 its matrix products take at least about 13 ms on an H100
``inference``  only the forward, with weights in the dtype of the activations
``model``      (with ``--phases model``, and in ``--small``) a whole BERT: the gradients of the loss
               of masked tokens with respect to all parameters

Attention is computed by matrix products and ``softmax``, or by cuDNN, without dropout of its
weights. Each row is compiled for each of:

``ours``    with the ops of this package
``native``  the same, all ops by the kernels (with ``--native``)
``plain``   the same model in jax.nn and jax.numpy; dropout by jax.random

They are timed in turns, and their temporary memory is XLA's figure for the compiled program. Their
results are compared: the gradients by the norm of their difference over their norm.

Other questions, each with a separate results file:

``--kernels``    which kernels does the forward of one layer launch?
``--profile``    where does the time of a step go, by kernel?
``--devices N``  data parallel on N devices, with the same batch on each: how many times the
                 throughput of one device is reached, and which collectives are there?
"""

import dataclasses
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import environment, measure, profile
from benchmarks.plain import PLAIN, bert
from benchmarks.programs import Program, collectives
from benchmarks.report import Results

PHASES = ("step", "inference", "model")
ATTENTIONS = ("softmax", "xla", "cudnn")
MASKED = 0.15  # of the tokens, in the loss of "model"
CALLS = 5  # of a step, in a profile
CALLS_OF_A_SAMPLE = 20  # of a step, one after the other, with --devices
TOP = 25  # kernels that --profile lists

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


def options(add) -> None:
    add("--small", action="store_true", help="a small network, for a CPU")
    add("--kernels", action="store_true", help="list the kernels of one layer's forward")
    add("--profile", action="store_true", help="the time of a step by kernel, on a GPU")
    add("--devices", type=int, metavar="N", help="data parallel on N devices and on one")
    add("--rows", default="", metavar="REGEX", help="rows whose name has a match of REGEX")
    add("--phases", nargs="+", choices=PHASES, help="(default: step inference)")
    shape = lambda text: tuple(map(int, text.split("x")))  # noqa: E731
    add("--shapes", nargs="+", type=shape, metavar="BxS", help="(default: 32x512 64x128)")
    add("--dropout", nargs="+", type=float, default=[0.0, 0.1], metavar="R", help="rates")
    add("--attention", nargs="+", choices=ATTENTIONS, help="(default: softmax; on CUDA cudnn too)")
    add("--dtypes", nargs="+", metavar="DTYPE", help="of the activations (default: bfloat16)")
    add("--manual", action="store_true", help="with --devices: under jax.shard_map, too")
    add("--layers", type=int, metavar="N", help="of the network")
    add("--native", action="store_true", help="with all of our ops by the kernels, too")
    add("--jobs", type=int, metavar="N", help="programs compiled at a time (default: the cores)")
    measure.options(add, 15)


def run(options) -> None:
    if options.devices and options.devices > len(jax.devices()):
        raise SystemExit(f"--devices {options.devices}: there are {len(jax.devices())}")
    if options.profile and jax.devices()[0].platform != "gpu":
        raise SystemExit("--profile: only a GPU's profile shows kernels")
    on_cuda = environment.platform_name() == "cuda"
    options.attention = options.attention or ["softmax", *(["cudnn"] if on_cuda else [])]
    options.jobs = options.jobs or min(os.cpu_count() or 1, 8)
    options.names = [name for name in CONTENDERS if name != "native" or options.native]
    setting = SMALL if options.small else BASE
    setting = dataclasses.replace(
        setting,
        config=dataclasses.replace(setting.config, layers=options.layers or setting.config.layers),
        shapes=tuple(options.shapes or setting.shapes),
        dtypes=tuple(options.dtypes or setting.dtypes),
        phases=tuple(options.phases or setting.phases),
    )
    for mode in [name for name in MODES if name and getattr(options, name)] or [""]:
        stem = "-".join(filter(None, ("bert", "small" if options.small else "", mode)))
        results = Results(options.out, stem, network=dataclasses.asdict(setting))
        MODES[mode](setting, options, results)
        results.end()


def rows(setting: Setting, options) -> list[Row]:
    """The rows that the options select; ``--rows`` is matched against ``Row.name``."""
    every = itertools.product(
        setting.phases, setting.shapes, options.dropout, options.attention, setting.dtypes
    )
    # An inference has no dropout.
    found = dict.fromkeys(
        Row(phase, *shape, 0.0 if phase == "inference" else dropout, *more)
        for phase, shape, dropout, *more in every
    )
    return [row for row in found if re.search(options.rows, row.name)] or _fail()


def _fail(text: str = "no row fits these options"):
    raise SystemExit(text)


@cache
def parameters(config: bert.Config):
    """Parameters of a whole BERT, in float32; the same arrays for all rows."""
    return jax.jit(partial(bert.init, config=config, mlm=True))(jax.random.key(0))


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


def contender(name: str, row: Row, setting: Setting, devices: int = 1) -> Program:
    """The program of a row for one contender; with a batch for each device."""
    ops, implementation = CONTENDERS[name]
    config, params = row.config(setting.config), parameters(setting.config)
    params = params if row.phase == "model" else params["layers"]
    if row.phase == "inference":  # a step casts the weights, but not each call of a forward
        params = cast(params, row.dtype)
    more = data(row.phase, row.batch * devices, row.length, row.dtype, setting.config)
    # The results' types are known, so no trace is needed, which takes seconds.
    like = [more[0]]
    if row.phase != "inference":
        of_input = like * (row.phase == "step")
        like = [jax.ShapeDtypeStruct((), jnp.float32), *jax.tree.leaves(params), *of_input]
    body = partial(BODIES[row.phase], config=config, ops=ops)
    about = dict(implementation=implementation, like=like)
    return Program.of(f"{row.phase}_{name}", body, params, *more, **about)


def cast(params, dtype: str):
    """Parameters with weight matrices of a dtype."""
    return jax.tree.map(lambda a: a.astype(dtype) if a.ndim > 1 else a, params)


def compiled(programs: dict, options, errors: bool = False) -> dict:
    """Compiles programs by name. With ``errors``, a text takes the place of one that fails."""

    def compiled(name):
        start = time.perf_counter()
        try:
            programs[name].compile()
        except Exception as error:  # an error must not lose the other rows
            if not errors:
                raise
            return f"{type(error).__name__}: {error}"
        print(f"compiled {programs[name].name} in {time.perf_counter() - start:.1f} s", flush=True)
        return programs[name]

    with ThreadPoolExecutor(options.jobs) as pool:
        return dict(zip(programs, pool.map(compiled, programs), strict=True))


def built(setting: Setting, options):
    """Each row with its compiled programs by contender, and the errors."""
    chosen = rows(setting, options)
    keys = itertools.product(chosen, options.names)
    programs = {(row, name): contender(name, row, setting) for row, name in keys}
    programs = compiled(programs, options, errors=True)
    for row in chosen:
        mine = {name: programs.pop((row, name)) for name in options.names}  # frees the outputs
        errors = {name: text for name, text in mine.items() if isinstance(text, str)}
        yield row, {name: p for name, p in mine.items() if name not in errors}, errors


def measure_rows(setting: Setting, options, results: Results) -> None:
    """Measure times, memory and differences; print and write each row when it is known."""
    clock, timer = measure.clock(options.clock)
    results |= {"clock": clock, "rounds": options.repeats, "rows": []}
    for row, programs, errors in built(setting, options):
        several = list(programs.values())
        timings = timer(several, options.repeats)
        walls = timings if clock == "wall" else measure.wall(several, options.repeats)
        found = {
            name: measure.figures(program, timing, wall.median)
            for (name, program), timing, wall in zip(programs.items(), timings, walls, strict=True)
        }
        differences = {
            name: difference(row, program, programs["plain"])
            for name, program in programs.items()
            if name != "plain" and "plain" in programs
        }
        entry = {"row": row.name, **dataclasses.asdict(row), "results": found}
        results.add("rows", entry | {"differences": differences, "errors": errors})
        print(f"\n{row.name}")
        measure.show_figures(found)
        for name, text in [*differences.items(), *errors.items()]:
            print(f"{name}: {text}")


def difference(row: Row, program: Program, plain: Program) -> dict:
    """Compare two contenders: the losses, and the relative norm of the other differences."""
    mine, other = program.results(), plain.results()
    loss = row.phase != "inference"
    found = {"norm": float(_relative(mine[loss:], other[loss:]))}
    return found | ({"loss": float(mine[0]), "plain_loss": float(other[0])} if loss else {})


@jax.jit
def _relative(a: list[jax.Array], b: list[jax.Array]):
    """The norm of the difference of all arrays over the norm of all arrays of ``b``."""
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(a, b, strict=True)]
    error = sum(jnp.sum(jnp.square(x - y)) for x, y in wide)
    return jnp.sqrt(error / sum(jnp.sum(jnp.square(y)) for _, y in wide))


def layer(name: str, attention: str, setting: Setting, weights: str) -> Program:
    """The forward of one layer."""
    ops, implementation = CONTENDERS[name]
    row = Row("inference", *setting.shapes[0], 0.0, attention, setting.dtypes[-1])
    params = cast(parameters(setting.config)["layers"][0], weights)

    def body(params, x, mask):
        return bert.encoder_layer(params, x, row.config(setting.config), mask=mask, ops=ops)

    more = data(row.phase, row.batch, row.length, row.dtype, setting.config)
    return Program.of(f"layer_{name}", body, params, *more, implementation=implementation)


def list_kernels(setting: Setting, options, results: Results) -> None:
    """List what the forward of one layer launches.

    Weight matrices are float32 and cast where they are used, as in training, or have the dtype of
    the activations, as in inference.
    """
    (batch, length), dtype = setting.shapes[0], setting.dtypes[-1]
    weights = dict.fromkeys((dtype, "float32"))
    programs = {
        (attention, weight, name): layer(name, attention, setting, weight)
        for attention, weight, name in itertools.product(options.attention, weights, options.names)
    }
    results["layers"] = []
    for key, program in compiled(programs, options).items():
        # In the order of the launches; without a GPU, the operations that do work.
        calls = profiled(program, 3)
        source = "profile" if calls else "HLO"
        launched = [k.name for k in calls[-1]] if calls else measure.operations(program)
        entry = dict(zip(("attention", "weights", "contender"), key, strict=True))
        entry |= {"batch": batch, "length": length, "dtype": dtype}
        entry |= {"source": source, "count": len(launched), "kernels": launched}
        results.add("layers", entry)
        print(f"\n{', '.join(key)}: {len(launched)} kernels ({source})")
        for index, kernel in enumerate(launched, 1):
            print(f"  {index:>2}  {kernel[:80]}")


def profiled(program: Program, count: int) -> list[list[profile.Kernel]]:
    """The kernels of each of ``count`` calls; an empty list without a GPU."""
    if jax.devices()[0].platform != "gpu":
        return []
    calls = measure.profiled_calls([program], [0] * count)
    if calls and len(calls) != count:
        raise RuntimeError(f"the profile shows {len(calls)} of {count} calls")
    return calls


def profile_steps(setting: Setting, options, results: Results) -> None:
    """Profile the time of a step by kernel, for every row that the options select."""
    results["profiles"] = []
    for row, programs, errors in built(setting, options):
        for name, text in errors.items():
            print(f"\n{row.name}, {name}: {text}")
        for name, program in programs.items():
            calls = profiled(program, CALLS) or _fail("the profile shows no kernels")
            kernels = [(k.name, k.duration * 1e-6) for call in calls for k in call]
            entry = {"row": row.name, **dataclasses.asdict(row), "contender": name}
            entry |= profile.attributed(kernels, TOP, CALLS)
            results.add("profiles", entry)
            print(f"\n{row.name}, {name}: {entry['busy_ms']:.3f} ms")
            for title, ms in entry["kinds_ms"].items():
                print(f"{ms:>9.3f} ms         {title}")
            for title, ms, count in entry["kernels"]:
                print(f"{ms:>9.3f} ms {count:>6g}  {title[:80]}")


BATCHED = {"step": 3, "model": 4}  # arguments after the parameters that have a batch


def parallel(name: str, row: Row, setting: Setting, devices: Sequence, manual=False) -> Program:
    """A step on a mesh: the batch is sharded, parameters and their gradients are replicated."""
    program = contender(name, row, setting, len(devices))
    mesh = Mesh(np.array(devices), ("data",))
    whole, dealt = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    count = len(data(row.phase, row.batch, row.length, row.dtype, setting.config))
    places = [whole] * (len(program.args) - count) + [dealt] * BATCHED[row.phase]
    places += [whole] * (len(program.args) - len(places))
    program.args = [jax.device_put(a, p) for a, p in zip(program.args, places, strict=True)]
    program.shardings = [whole] * len(program.like)
    if row.phase == "step":  # the last result is the gradient of the activations
        program.shardings[-1] = dealt
    if manual:  # gradients of replicated parameters are summed over the devices by shard_map
        inner = program.function

        def summed(*flat):
            value, *grads = inner(*flat)
            return [jax.lax.psum(value, "data"), *grads]

        specs = [tuple(p.spec for p in places), [p.spec for p in program.shardings]]
        program.function = jax.shard_map(summed, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    program.name += f"_on_{len(devices)}"
    return program


def seconds(program: Program) -> float:
    """Seconds per step; several steps are launched one after the other, as in training."""
    start = time.perf_counter()
    for _ in range(CALLS_OF_A_SAMPLE):
        program()
    jax.block_until_ready(program.outputs)
    return (time.perf_counter() - start) / CALLS_OF_A_SAMPLE


def scale(setting: Setting, options, results: Results) -> None:
    """Measure steps on one device and on several, with the same batch on each."""
    results |= {"clock": "wall", "rounds": options.repeats, "devices": options.devices}
    results["scaling"] = []
    setting = dataclasses.replace(setting, shapes=setting.shapes[:1])
    for row, name, manual in itertools.product(
        rows(setting, options), options.names, (False, True)
    ):
        if row.phase == "inference" or (manual and not (options.manual and row.phase == "step")):
            continue
        entry = {"row": row.name, **dataclasses.asdict(row), "contender": name}
        entry |= {"shard_map": manual, **scaled(name, row, setting, options, manual)}
        results.add("scaling", entry)
        each = " and ".join(f"{us / 1e3:.3f}" for us in entry["each_us"])
        times = f"one device {each} ms, {entry['devices']} devices {entry['all_us'] / 1e3:.3f} ms"
        what = f"{row.name}, {name}{' by shard_map' if manual else ''}: {times}, "
        print(f"{what}{entry['throughput']:.3f} times the throughput; {entry['collectives']}")


def scaled(name: str, row: Row, setting: Setting, options, manual: bool) -> dict:
    many = jax.devices()[: options.devices]
    # Each device by itself, too: two of a kind differ in speed. Together they run at the slower's
    # pace.
    over = {"all": parallel(name, row, setting, many, manual)}
    over |= {device: parallel(name, row, setting, [device]) for device in many}
    programs = list(compiled(over, options).values())
    for program in programs:
        seconds(program)
    samples: list[list[float]] = [[] for _ in programs]
    for turn in range(options.repeats):
        for index in range(len(programs))[:: 1 if turn % 2 else -1]:
            samples[index].append(seconds(programs[index]))
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


MODES: dict[str, Callable] = {
    "kernels": list_kernels,
    "profile": profile_steps,
    "devices": scale,
    "": measure_rows,
}
