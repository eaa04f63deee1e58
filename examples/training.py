"""What ``bert_train.py`` and ``decoder_train.py`` share: options, data, devices and processes.

The text is that of ``--text``, by default the texts in scikit-learn.

**Devices.** A mesh of all devices has one axis, ``"data"``. Parameters are replicated, a batch is
sharded, and the only communication is the all-reduce of gradients and of the loss. With ``--zero``,
each device keeps a part of the parameters and of the optimizer's state, gathers the parameters for
a step, and updates its part (``jax_fastops.models.zero``). The axis type is Auto, although
``jax.make_mesh`` defaults to Explicit since jax 0.9: the models set no shardings, so the compiler
derives them. With ``--stages N``, the mesh has a second axis: the layers are in N stages, and a
batch is cut into micro-batches (``jax_fastops.models.pipeline``). To try it without GPUs::

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8

**Processes.** On several machines, start the same command once per process. Each also gets the
address of process 0, the number of processes, and its own number::

    --coordinator HOST:PORT --processes 2 --process 0    # and 1 for the other one

With ``--coordinator auto``, jax finds these in the environment of Slurm, Open MPI, Kubernetes or a
TPU pod. For several processes on one machine with GPUs, set ``CUDA_VISIBLE_DEVICES`` for each. A
process makes only the rows of a batch that its devices take. Process 0 reports, and writes losses
and plot.

If a process fails or is killed, the others end, too: at the latest after 100 seconds, when jax
misses its heartbeat. Start all of them again. They may be more or fewer than before.

**Resuming.** ``loop.py`` describes the checkpoints. Each row of a batch is a function of
``--seed``, the step number and the row's, and dropout is one of ``--seed`` and the step number, so
there is no other state to keep. Several processes need a folder that all of them can write.

A resumed run has the same losses as one that was never killed, to the last bit, if options,
versions, and number and kind of devices and processes are the same, and on GPUs with
``XLA_FLAGS=--xla_gpu_deterministic_ops=true``. Otherwise they agree within rounding.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_fastops.models import pipeline, zero

import loop
import masked_text

WEIGHT_DECAY, LARGEST_NORM = 0.01, 1.0  # of matrices; of all gradients together
EVALUATED = 4  # batches
PROMPT = 24  # tokens
# The options that the losses depend on. A run that resumes from a checkpoint must have the same.
# Dtype and ops change losses only by rounding.
FIXED = ("config", "batch", "length", "rate", "warm_up", "seed", "stages", "micro_batches")


@dataclasses.dataclass(frozen=True)
class Example:
    """A model and its data.

    Attributes:
      name: of the model, for messages.
      about: the description for ``--help``.
      loss_name: of the loss, for the plot.
      configs: the model's configurations, by size.
      rates: the learning rate of each size.
      ops: the implementations of the model's ops, by name.
      config: maps one of ``configs`` and the options to the configuration to train.
      init: maps a key and a configuration to parameters.
      batch: maps texts, the number of rows, their length and a generator to NumPy arrays, whose
        first axis is that of the rows.
      loss: maps parameters, a batch, a key, the configuration and ops to a scalar; with
        ``micro_batches``, in the stages of the mesh.
      continued: maps parameters, tokens ``[1, PROMPT]``, a key, the configuration and ops to the
        tokens that follow, to be printed as text.
      heads: what ``partition_specs`` gets of the parameters that ``init`` makes.
      add_options: adds further options, by the ``add_argument`` that it gets.
      fixed: the names of those options that the losses depend on, in addition to ``FIXED``.
    """

    name: str
    about: str
    loss_name: str
    configs: Mapping[str, Any]
    rates: Mapping[str, float]
    ops: Mapping[str, Any]
    config: Callable
    init: Callable
    batch: Callable
    loss: Callable
    continued: Callable | None = None
    heads: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_options: Callable = lambda add: None
    fixed: Sequence[str] = ()


def main(example: Example, argv: Sequence[str] | None = None) -> int:
    options = parse(example, argv)
    check_equal(options)
    console = loop.console(quiet=jax.process_index() > 0)
    mesh = data_mesh(options.stages)
    texts = options.texts
    console.print(
        f"{options.config} {example.name} in {options.dtype}, {options.ops} ops, "
        f"{len(mesh.devices.flat)} x {mesh.devices.flat[0].device_kind}, "
        f"processes: {jax.process_count()}; "
        f"{len(texts)} texts of {sum(map(len, texts)):,} bytes",
        highlight=False,
    )
    _, losses = loop.train(Training(example, options, mesh), console)
    if jax.process_index() == 0:
        loop.plot(losses, f"{example.loss_name}, in nats", options.plot)
    console.print(
        f"The loss of step {len(losses)} is {losses[-1]:.4f}. The curve is in {options.plot}.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


# ---- options -------------------------------------------------------------------------------------


def parse(example: Example, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked, with the texts. Connects the processes."""
    parser = loop.parser(example.about, epilog=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    loop.add_options(add, steps=300)
    add("--text", type=Path, metavar="PATH", help="a file, or a folder of .md, .rst, .txt files")
    add("--batch", type=loop.positive, default=32, metavar="N", help="on all devices (default: 32)")
    add(
        "--length",
        type=loop.positive,
        default=128,
        metavar="N",
        help="of a sequence (default: 128)",
    )
    add("--config", choices=example.configs, default="small", help="the size (default: small)")
    # Without float16: its gradients need a scaled loss, which the examples do not have.
    dtypes = ("bfloat16", "float32")
    add("--dtype", choices=dtypes, help="(default: float32 on a CPU, bfloat16 elsewhere)")
    about = "by ops of jax_fastops, or by jax.nn with this implementation (default: softmax)"
    add("--attention", choices=("softmax", "xla", "cudnn"), default="softmax", help=about)
    add("--ops", choices=example.ops, default="fastops", help="the kernels, or plain JAX")
    add("--rate", type=loop.above_zero, metavar="R", help="of learning (default: by size)")
    add("--warm-up", type=loop.positive, default=50, metavar="N", help="steps to it (default: 50)")
    add("--zero", action="store_true", help="a part of the state on each device (ZeRO-1)")
    add("--stages", type=loop.positive, metavar="N", help="of layers, on devices of their own")
    about = "micro-batches of a batch (default: 4 for each stage)"
    add("--micro-batches", type=loop.positive, metavar="N", help=about)
    add("--coordinator", metavar="HOST:PORT", help="the address of process 0, or auto")
    add("--processes", type=loop.positive, metavar="N", help="in all")
    add("--process", type=int, metavar="I", help="the number of this one, from 0")
    example.add_options(add)
    options = parser.parse_args(argv)
    loop.check_options(options, parser)

    # Rotary embeddings have no largest position.
    longest = example.configs[options.config].positions or math.inf
    if options.length > longest:
        options.error(
            f"--length is {options.length}; with --config {options.config} it may be "
            f"{longest} at most"
        )
    try:
        options.texts = masked_text.documents(options.text)
    except (OSError, ValueError) as error:
        options.error(f"--text: {error}")
    if options.stages:
        options.micro_batches = options.micro_batches or 4 * options.stages
    elif options.micro_batches:
        options.error("--micro-batches needs --stages")
    options.rate = options.rate or example.rates[options.config]
    options.made_with = {name: getattr(options, name) for name in (*FIXED, *example.fixed)}
    text = b"\0".join(t.tobytes() for t in options.texts)
    options.made_with["text"] = hashlib.sha256(text).hexdigest()
    options.texts, options.held_out = split(options.texts, options.length)

    connect(options)  # before the first question about devices
    on_cpu = jax.default_backend() == "cpu"
    options.dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    if options.attention == "cudnn" and (on_cpu or options.dtype == "float32"):
        options.error("--attention cudnn needs a GPU and --dtype bfloat16")
    count, stages = jax.device_count(), options.stages or 1
    for name, whole in (("devices", count), ("words of the vocabulary", masked_text.VOCABULARY)):
        if whole % stages:
            options.error(f"--stages is {stages}; it must divide {whole}, the {name}")
    parts, what = count // stages * (options.micro_batches or 1), "the devices"
    if options.stages:
        what = f"{count // stages} devices for each stage x {options.micro_batches} micro-batches"
    if options.batch % parts:
        options.error(f"--batch is {options.batch}; it must be a multiple of {parts}, {what}")
    return options


def split(texts: Sequence[np.ndarray], length: int) -> tuple[list, list]:
    """The texts without the ends of long ones, and these ends: a twentieth of each."""
    counts = [len(text) // 20 if len(text) // 20 >= length else 0 for text in texts]
    pairs = list(zip(texts, counts, strict=True))
    return [t[: len(t) - n] for t, n in pairs], [t[len(t) - n :] for t, n in pairs if n]


# ---- processes -----------------------------------------------------------------------------------


def connect(options: argparse.Namespace) -> None:
    """Connects the processes, if there are several."""
    address, count, index = options.coordinator, options.processes, options.process
    if (address, count, index) == (None, None, None):
        return
    given = {"coordinator_address": address, "cluster_detection_method": "deactivate"}
    if address == "auto":
        given = {}
    elif address is None or count is None or index is None:
        options.error("--coordinator, --processes and --process need each other")
    elif not 0 <= index < count:
        options.error(f"--process is {index}; it must be from 0 to {count - 1}")
    try:
        jax.distributed.initialize(num_processes=count, process_id=index, **given)
    except ValueError as error:  # there is no cluster
        options.error(f"--coordinator is {address}: {error}")


def check_equal(options: argparse.Namespace) -> None:
    """Ends the program if the processes have other options or texts than each other."""
    if jax.process_count() > 1:
        others = ("dtype", "ops", "attention", "steps", "every", "checkpoint", "zero")
        values = [options.made_with, *(getattr(options, name) for name in others)]
        digest = np.frombuffer(hashlib.sha256(repr(values).encode()).digest(), np.uint8)
        if np.any(multihost_utils.process_allgather(digest) != digest):
            options.error("the processes have different options or texts")


# ---- the step ------------------------------------------------------------------------------------


def data_mesh(stages: int | None = None) -> Mesh:
    """All devices along the Auto axis ``"data"``, or along ``"data"`` and ``"stage"``."""
    sizes = {"data": jax.device_count() // (stages or 1)} | ({"stage": stages} if stages else {})
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def optimiser(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW. The rate rises and then stays, so that ``--steps`` can be raised later."""
    rate = optax.linear_schedule(0.0, options.rate, options.warm_up)

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(LARGEST_NORM),
        optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=matrices),
    )


class Training:
    """The compiled step and its inputs.

    The state is ``{"params", "optimiser", "step"}``, replicated on all devices, or sharded with
    ``--zero`` and ``--stages``. ``step`` is the number of completed steps. ``abstract`` has the
    state's shapes, dtypes and shardings.
    """

    def __init__(self, example: Example, options: argparse.Namespace, mesh: Mesh):
        self.example, self.options = example, options
        self.unit, self.units = "tokens", options.batch * options.length
        self.everywhere = NamedSharding(mesh, P())
        self.split = NamedSharding(mesh, P("data"))
        rows = range(options.batch)
        parts = self.split.addressable_devices_indices_map((len(rows),)).values()
        self.rows = sorted({row for (part,) in parts for row in rows[part]})  # of this process
        config = example.config(example.configs[options.config], options)
        optimise, ops = optimiser(options), example.ops[options.ops]
        staged = {"micro_batches": options.micro_batches} if options.stages else {}
        # The stages are an axis of the mesh of jax.set_mesh.
        self.context = functools.partial(jax.set_mesh, mesh) if staged else contextlib.nullcontext

        def init() -> dict:
            params = example.init(jax.random.key(options.seed), config)
            params = pipeline.stack_layers(params, options.stages) if staged else params
            return {"params": params, "optimiser": optimise.init(params), "step": jnp.int32(0)}

        def loss(params: Any, batch: Any, key: Any) -> jax.Array:
            if options.zero:
                params = zero.gather(params, mesh, options.dtype, specs=specs["params"])
            return example.loss(params, batch, key, config, ops, **staged)

        def update(state: dict, batch: Any) -> tuple[dict, jax.Array]:
            # A key that is derived from the seed, other than the key of the parameters.
            key = jax.random.fold_in(jax.random.key(options.seed), 1 + state["step"])
            value, grads = jax.value_and_grad(loss)(state["params"], batch, key)
            changes, inner = optimise.update(grads, state["optimiser"], state["params"])
            params = optax.apply_updates(state["params"], changes)
            return {"params": params, "optimiser": inner, "step": state["step"] + 1}, value

        state = jax.eval_shape(init)
        specs = jax.tree.map(lambda _: P(), state)
        if staged:
            own = pipeline.partition_specs(config, **example.heads)
            specs["params"] = {name: own[name] for name in state["params"]}
            specs["optimiser"] = optax.tree_utils.tree_map_params(
                optimise,
                lambda _, spec: spec,
                state["optimiser"],
                specs["params"],
                transform_non_params=lambda _: P(),
            )
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        places = zero.shardings(state, mesh, specs=specs) if options.zero else places
        self.abstract = jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), state, places
        )
        self.init = jax.jit(init, out_shardings=places)
        self._update = jax.jit(update, donate_argnums=0, out_shardings=(places, self.everywhere))
        self._loss = jax.jit(
            lambda params, batch: loss(params, batch, None), out_shardings=self.everywhere
        )
        self._continued = jax.jit(
            lambda params, tokens, key: example.continued(params, tokens, key, config, ops),
            out_shardings=self.everywhere,
        )

    @functools.cached_property
    def update(self) -> jax.stages.Compiled:
        """Maps ``(state, batch)`` to the next state and the loss. The state is donated."""
        with self.context():
            return self._update.lower(self.abstract, self.batch(0)).compile()

    def batch(self, step: int) -> Any:
        """The batch of a step, counted from 0. Its rows depend only on the step and the seed."""
        return self._batch(self.options.texts, step)

    def _batch(self, texts: Sequence[np.ndarray], step: int) -> Any:
        """Each process makes the rows of its own devices."""
        options = self.options
        rows = [
            self.example.batch(
                texts, 1, options.length, np.random.default_rng((options.seed, step, row))
            )
            for row in self.rows
        ]

        def joined(*parts: np.ndarray) -> jax.Array:
            made = np.concatenate(parts)
            shape = (options.batch, *made.shape[1:])
            return jax.make_array_from_process_local_data(self.split, made, shape)

        return jax.tree.map(joined, *rows)

    def evaluate(self, state: dict) -> dict[str, float | str]:
        """The loss of texts that the training does not see, without dropout; a decoder's text."""
        found = {}
        if self.options.held_out:
            batches = (self._batch(self.options.held_out, step) for step in range(EVALUATED))
            with self.context():
                losses = [float(self._loss(state["params"], batch)) for batch in batches]
            found["loss of held-out text"] = sum(losses) / len(losses)
        if self.example.continued and not self.options.stages:  # whose layers are stacked
            start = (self.options.held_out or self.options.texts)[0][:PROMPT]
            key = jax.random.key(self.options.seed)
            tokens = self._continued(state["params"], start[None].astype(np.int32), key)
            texts = (bytes(part.astype(np.uint8)) for part in (start, np.asarray(tokens)[0]))
            found["sample"] = " | ".join(text.decode(errors="replace") for text in texts)
        return found
