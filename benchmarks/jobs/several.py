"""How much faster is a training step on several GPUs than on one?

The step of a Llama (as in the job ``decoder``) or of BERT's pretraining (as in ``pretraining``,
without dropout of attention weights), on the ops of this package, in these layouts:

``one``    one GPU
``data``   data parallel: each GPU has the batch of one
``zero``   the same with parameters and optimizer sharded over the GPUs (``models.zero``)
``stage``  the layers in stages, one on each GPU, and ``--micro-batches`` of the batch of one
           (``models.pipeline``)

With ``--plain``, each but the stages also on `jax.nn` and `jax.random`, as plain models are
written. The programs of a model share a process, and are compiled at the same time.

The throughput in multiples of one GPU's is ``one / stage``, and N times ``one / data`` of N GPUs.
``state_bytes`` are those of parameters and optimizer on one GPU. ``collectives`` are counted in the
program, where a loop counts once.
"""

import contextlib
import dataclasses
import functools
import os
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import installed
from benchmarks.jobs import decoder as of_decoder
from benchmarks.jobs import pretraining as of_bert
from benchmarks.plain import PLAIN
from benchmarks.processes import adamw, jax_training, together

bert, decoder, pipeline, zero = (
    installed(f"jax_fastops.models.{name}") for name in ("bert", "decoder", "pipeline", "zero")
)

RATE, DECAY = 1e-4, 0.01
SETTINGS = ("CUDA_DEVICE_MAX_CONNECTIONS", "XLA_FLAGS")  # are recorded
LAYOUTS = ("one", "data", "zero", "stage")
SHAPES = {"bert": "32x512", "decoder": "8x2048"}


def options(add) -> None:
    add("--models", nargs="+", choices=SHAPES, default=["decoder"])
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--devices", type=int, default=2)
    add("--micro-batches", type=int, default=8)
    add("--shape", help="batch x length, instead of the one of the model")
    add("--layers", type=int, default=8, help="of the decoder")
    add("--scan", action="store_true", help="layers and ticks are loops: compiles faster")
    add("--plain", action="store_true", help="also plain JAX")


def rows(options):
    return [
        {"model": model, "layout": layout} | ({"contender": "plain"} if plain else {})
        for model in options.models
        for plain in (False, True)[: 1 + options.plain]
        for layout in options.layouts
        if not plain or layout != "stage"
    ]


def shared(row: dict):
    return row["model"]


def measure_all(options, rows: list[dict]) -> list[dict]:
    compilations = [functools.partial(compiled, options, **row) for row in rows]
    return [measure() for measure in together(compilations)]


def facts(options) -> dict:
    names = ("devices", "micro_batches", "shape", "layers", "scan")
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    found = {name: getattr(options, name) for name in names}
    return found | {"settings": settings, "what": f"-{options.devices}"}


def compiled(options, model: str, layout: str, contender: str = "ours"):
    """Compiles, and returns a function that measures."""
    count = 1 if layout == "one" else options.devices
    axis = "stage" if layout == "stage" else "data"
    mesh = jax.make_mesh(
        (count,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    shape = options.shape or SHAPES[model]
    of_model = decoder_task if model == "decoder" else bert_task
    task = of_model(options, layout, shape, contender == "plain")
    begin, update = adamw(RATE, DECAY, functools.partial(loss_of, task, layout, mesh))

    def start():
        params = task.init(jax.random.key(0))
        return begin(pipeline.stack_layers(params, count) if layout == "stage" else params)

    state = jax.eval_shape(start)
    if layout == "zero":
        places = zero.shardings(state, mesh)
    else:
        specs = jax.tree.map(lambda _: PartitionSpec(), state)
        if layout == "stage":
            specs = staged(state, pipeline.partition_specs(task.config, **task.heads))
        places = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    batch = task.batch
    if axis == "data":
        batch = [np.tile(a, (count, *(1,) * (a.ndim - 1))) for a in batch]
    dealt = NamedSharding(mesh, PartitionSpec("data") if axis == "data" else PartitionSpec())
    batch = [jax.device_put(a, dealt) for a in batch]

    def step(state, *batch):
        after, value = update(state, *batch)
        return jax.lax.with_sharding_constraint(after, places), value

    own = sum(
        np.prod(place.shard_shape(a.shape)) * a.dtype.itemsize
        for a, place in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True)
    )
    # With a mesh, the loss would take its tokens in parts also on one GPU.
    with jax.set_mesh(mesh) if count > 1 else contextlib.nullcontext():
        measure = jax_training(options, jax.jit(start, out_shardings=places), step, [batch])
    return lambda: measure() | {"state_bytes": int(own)}


def loss_of(task, layout: str, mesh, params, count, *batch):
    if layout == "zero":
        params = zero.gather(params, mesh, task.config.dtype)
    return task.loss(params, count, *batch)


def staged(state, specs):
    """The specs of the state of AdamW, from those of parameters. Others have less of BERT's."""
    specs = {name: specs[name] for name in state[0]}
    moments = optax.tree_utils.tree_map_params(
        optax.adamw(RATE),
        lambda _, spec: spec,
        state[1],
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    return specs, moments, PartitionSpec()


def decoder_task(options, layout: str, shape: str, plain: bool) -> Any:
    config = decoder.SMALL if options.small else decoder.Config(layers=options.layers)
    config = dataclasses.replace(config, scan=options.scan)
    if plain:  # no joined kernels: the gradient of a split would be a concatenation
        attention = "xla" if options.small else "cudnn"
        config = dataclasses.replace(config, attention=attention, tensor_parallel=True)
    ops = decoder.PLAIN if plain else decoder.FASTOPS

    def loss(params, count, tokens, labels):
        del count
        if layout == "stage":
            return pipeline.decoder_loss(
                params, tokens, config, labels=labels, micro_batches=options.micro_batches
            )
        return decoder.loss(params, tokens, config, labels=labels, ops=ops)

    batch = of_decoder.data(shape, config.vocab_size)
    init = functools.partial(decoder.init, config=config)
    return SimpleNamespace(config=config, loss=loss, batch=batch, init=init, heads={})


def bert_task(options, layout: str, shape: str, plain: bool) -> Any:
    config = bert.SMALL
    if not options.small:
        config = dataclasses.replace(bert.BASE, vocab_size=of_bert.VOCABULARY)
    config = dataclasses.replace(config, dropout=0.1, attention_dropout=0.0, scan=options.scan)
    if plain:
        config = dataclasses.replace(config, attention="xla" if options.small else "cudnn")
    ops, kind = (PLAIN, "rbg") if plain else (bert.FASTOPS, None)

    def init(key):
        params = bert.init(key, config, mlm=True)
        del params["pooler"]  # the loss does not use it
        return bert.stack_layers(params) if config.scan else params

    def loss(params, count, tokens, labels, inside):
        key = jax.random.fold_in(jax.random.key(1, impl=kind), count)
        given = dict(mask=inside, key=key)
        if layout == "stage":
            given |= dict(micro_batches=options.micro_batches)
            hidden, _ = pipeline.bert_apply(params, tokens, config, **given)
            return pipeline.bert_masked_lm_loss(params, hidden, labels, config)
        hidden, _ = bert.apply(params, tokens, config, ops=ops, **given)
        return bert.masked_lm_loss(params, hidden, labels, config, ops=ops)

    batch = of_bert.data(shape, config.vocab_size, "all")
    return SimpleNamespace(config=config, loss=loss, batch=batch, init=init, heads=dict(mlm=True))
