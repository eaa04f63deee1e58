"""How long is a training step of a Llama? ``python -m benchmarks.decoder``

The whole step as users run it: forward, loss over the vocabulary, backward and AdamW, in bfloat16
with float32 parameters and with donated state. The model is 2048 wide, with 32 heads, 8 heads of
keys and values, 8192 features in the feed-forward, 8 layers and a vocabulary of 128256. It is
measured in steady state, as in `benchmarks.pretraining`, each contender in a process of its own,
from the same weights:

``ours``          `models.decoder` with the ops of this package
``plain``         the same model on `jax.nn` and `jax.numpy`. Each kernel has a product of its own:
                  the gradient of a split would be a concatenation
``plain-joined``  the same with joined kernels, as ``ours`` has them
``torch``         PyTorch: the same network compiled by Inductor, with
                  scaled_dot_product_attention, autocast and fused AdamW, where PyTorch is installed

With `--devices`, the JAX contenders run over several devices, which share the axis of the mesh that
`--axis` names: each has a batch of its own (data), or a part of the same batch's heads, features
and vocabulary (tensor), or of its sequence (sequence).
"""

import argparse
import dataclasses
import importlib.util
import json

from benchmarks import jobs

RATE, DECAY = 1e-4, 0.01
CONTENDERS = ("ours", "plain", "plain-joined", "torch")


def main() -> None:
    options = parse()
    if options.one:
        (row,) = options.one
        measure = torch_row if row["contender"] == "torch" else jax_row
        print(json.dumps([measure(options, **row)]))
        return
    rows = (
        {"contender": name, "shape": shape}
        for shape in options.shapes
        for name in options.contenders
        if name != "torch" or (options.devices == 1 and importlib.util.find_spec("torch"))
    )
    facts = dict(attention=options.attention, layers=options.layers, remat=options.remat)
    what = ""
    if options.devices > 1:
        facts |= dict(devices=options.devices, axis=options.axis)
        what = f"-{options.axis}-{options.devices}"
    jobs.run("benchmarks.decoder", options, rows, what, **facts)


def parse() -> argparse.Namespace:
    parser = jobs.parser("benchmarks.decoder", __doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "plain", "torch"])
    add("--shapes", nargs="+", default=["8x2048"], help="batch x length")
    add("--attention", choices=("cudnn", "softmax"), default="cudnn", help="JAX's")
    add("--layers", type=int, default=8)
    add("--remat", action="store_true", help="JAX recomputes layers in the backward")
    add("--devices", type=int, default=1)
    add("--axis", choices=("data", "tensor", "sequence"), default="data")
    return parser.parse_args()


def data(shape: str, vocabulary: int):
    """Tokens, and the token after each."""
    import numpy as np

    batch, length = map(int, shape.split("x"))
    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1), np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def config_of(options: argparse.Namespace, decoder):
    tensor = options.devices > 1 and options.axis == "tensor"
    changes = dict(attention=options.attention, remat=options.remat, tensor_parallel=tensor)
    if options.small:
        attention = "xla" if options.attention == "cudnn" else options.attention
        return dataclasses.replace(decoder.SMALL, **changes | {"attention": attention})
    return decoder.Config(layers=options.layers, **changes)


def jax_row(options: argparse.Namespace, contender: str, shape: str) -> dict:
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks import installed

    decoder = installed("jax_fastops.models.decoder")
    config = config_of(options, decoder)
    specs = decoder.partition_specs(config)
    if contender == "plain":
        config = dataclasses.replace(config, tensor_parallel=True)  # no joined kernels
    ops = decoder.FASTOPS if contender == "ours" else decoder.PLAIN
    optimizer = optax.adamw(RATE, weight_decay=DECAY)

    mesh = Mesh(np.array(jax.devices()[: options.devices]), (options.axis,))
    whole = PartitionSpec()

    def start():
        params = decoder.init(jax.random.key(0), config)
        return params, optimizer.init(params)

    kinds = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(start)[1],
        specs,
        transform_non_params=lambda _: whole,
    )
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, kinds))
    start = jax.jit(start, out_shardings=places)

    def update(state, tokens, labels):
        params, inner = state

        def loss(params):
            return decoder.loss(params, tokens, config, labels=labels, ops=ops)

        value, grads = jax.value_and_grad(loss)(params)
        changes, inner = optimizer.update(grads, inner, params)
        after = optax.apply_updates(params, changes), inner
        return jax.lax.with_sharding_constraint(after, places), value

    axes = {"data": ("data",), "sequence": (None, "sequence"), "tensor": ()}[options.axis]
    batch = data(shape, config.vocab_size)
    if options.axis == "data":  # each device has the batch of one
        batch = [np.tile(a, (options.devices, 1)) for a in batch]
    batch = tuple(jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes))) for a in batch)
    with jax.set_mesh(mesh):
        return jobs.jax_training(options, start, update, [batch])()


def torch_row(options: argparse.Namespace, contender: str, shape: str) -> dict:
    import torch

    from benchmarks.torch_decoder import Decoder, decoder, load

    del contender
    torch.set_float32_matmul_precision("high")
    config, on_cuda = config_of(options, decoder), torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    model = load(Decoder(config), config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=on_cuda)
    batch = tuple(torch.from_numpy(a).to(device).long() for a in data(shape, config.vocab_size))
    return jobs.torch_training(options, torch.compile(model, dynamic=False), optimizer, [batch])


if __name__ == "__main__":
    main()
