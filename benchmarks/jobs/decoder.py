"""How long is a training step of a Llama?

The whole step as users run it: forward, loss over the vocabulary, backward and AdamW, in bfloat16
with float32 parameters and with donated state. The model is 2048 wide, with 32 heads, 8 heads of
keys and values, 8192 features in the feed-forward, 8 layers and a vocabulary of 128256. It is
measured in steady state, each contender in a process of its own, from the same weights:

``ours``          `models.decoder` with the ops of this package
``plain``         the same model on `jax.nn` and `jax.numpy`. Each kernel has a product of its own:
                  the gradient of a split would be a concatenation
``plain-joined``  the same with joined kernels, as ``ours`` has them
``torch``         PyTorch: the same network compiled by Inductor, with
                  scaled_dot_product_attention, autocast and fused AdamW, where it is installed

With `--devices`, the JAX contenders run over several devices: each has a batch of its own (`--axis`
data), or a part of the same batch's heads, features and vocabulary (tensor), or of its sequence.
"""

import dataclasses

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import installed
from benchmarks.processes import adamw, jax_training, torch_training

decoder = installed("jax_fastops.models.decoder")

RATE, DECAY = 1e-4, 0.01
CONTENDERS = ("ours", "plain", "plain-joined", "torch")


def options(add) -> None:
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "plain", "torch"])
    add("--shapes", nargs="+", default=["8x2048"], help="batch x length")
    add("--attention", choices=("cudnn", "softmax"), default="cudnn", help="JAX's")
    add("--layers", type=int, default=8)
    add("--remat", action="store_true", help="JAX recomputes layers in the backward")
    add("--devices", type=int, default=1)
    add("--axis", choices=("data", "tensor", "sequence"), default="data")


def rows(options):
    return [
        {"contender": name, "shape": shape}
        for shape in options.shapes
        for name in options.contenders
        if name != "torch" or options.devices == 1
    ]


def facts(options) -> dict:
    found = dict(attention=options.attention, layers=options.layers, remat=options.remat)
    if options.devices > 1:
        found |= dict(devices=options.devices, axis=options.axis)
        found["what"] = f"-{options.axis}-{options.devices}"
    return found


def measure(options, contender: str, shape: str) -> dict:
    batch = data(shape, config_of(options).vocab_size)
    return (torch_row if contender == "torch" else jax_row)(options, contender, batch)


def data(shape: str, vocabulary: int) -> list[np.ndarray]:
    """Tokens, and the token after each."""
    batch, length = map(int, shape.split("x"))
    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1), np.int32)
    return [np.ascontiguousarray(part) for part in (tokens[:, :-1], tokens[:, 1:])]


def config_of(options):
    tensor = options.devices > 1 and options.axis == "tensor"
    changes = dict(attention=options.attention, remat=options.remat, tensor_parallel=tensor)
    if options.small:
        attention = "xla" if options.attention == "cudnn" else options.attention
        return dataclasses.replace(decoder.SMALL, **changes | {"attention": attention})
    return decoder.Config(layers=options.layers, **changes)


def jax_row(options, contender: str, batch: list[np.ndarray]) -> dict:
    config = config_of(options)
    specs = decoder.partition_specs(config)
    if contender == "plain":
        config = dataclasses.replace(config, tensor_parallel=True)  # no joined kernels
    ops = decoder.FASTOPS if contender == "ours" else decoder.PLAIN

    def loss(params, count, tokens, labels):
        return decoder.loss(params, tokens, config, labels=labels, ops=ops)

    begin, update = adamw(RATE, DECAY, loss)
    mesh = Mesh(np.array(jax.devices()[: options.devices]), (options.axis,))
    whole = PartitionSpec()

    def start():
        return begin(decoder.init(jax.random.key(0), config))

    kinds = optax.tree_utils.tree_map_params(
        optax.adamw(RATE),
        lambda _, spec: spec,
        jax.eval_shape(start)[1],
        specs,
        transform_non_params=lambda _: whole,
    )
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, kinds, whole))
    start = jax.jit(start, out_shardings=places)

    def step(state, *batch):
        after, value = update(state, *batch)
        return jax.lax.with_sharding_constraint(after, places), value

    axes = {"data": ("data",), "sequence": (None, "sequence"), "tensor": ()}[options.axis]
    if options.axis == "data":  # each device has the batch of one
        batch = [np.tile(a, (options.devices, 1)) for a in batch]
    batch = [jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes))) for a in batch]
    with jax.set_mesh(mesh):
        return jax_training(options, start, step, [batch])()


def torch_row(options, contender: str, batch: list[np.ndarray]) -> dict:
    import torch

    from benchmarks.torch_models import Decoder, load, trained

    del contender
    config = config_of(options)
    device, loss, optimizer = trained(load(Decoder(config), config), RATE, DECAY)
    batch = [torch.from_numpy(a).to(device).long() for a in batch]
    return torch_training(options, loss, optimizer, [batch])
