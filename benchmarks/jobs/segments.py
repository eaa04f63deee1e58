"""How long do programs take whose gradients add up rows?

The gradient of a whole step in steady state, each row in a process of its own:

``ours``      ``take`` and ``segment_sum``
``plain``     ``jnp.take`` and ``jax.ops.segment_sum``
``autofuse``  ``plain`` through ``autofuse``

The programs: "graph" is a network of message passing, whose layers add to each node a product of
the sum of its neighbors. "words" is an embedding of words before a product. A size is edges x nodes
x features, or words x vocabulary x features.
"""

import jax
import jax.numpy as jnp

from benchmarks.cases import fo, plain_take
from benchmarks.processes import jax_calls
from benchmarks.programs import temp_bytes

FORMS = ("ours", "plain", "autofuse")
SIZES = {"graph": "2000000x100000x64", "words": "16384x50257x768"}
LAYERS = 3


def options(add) -> None:
    add("--contenders", nargs="+", choices=FORMS, default=FORMS)
    add("--programs", nargs="+", choices=SIZES, default=tuple(SIZES))
    add("--dtype", default="bfloat16")


def rows(options):
    return [
        dict(contender=name, program=program, size="640x64x8" if options.small else SIZES[program])
        for program in options.programs
        for name in options.contenders
    ]


def facts(options) -> dict:
    return dict(dtype=options.dtype, layers=LAYERS)


def measure(options, contender: str, program: str, size: str) -> dict:
    count, nodes, features = map(int, size.split("x"))
    keys = jax.random.split(jax.random.key(0), 4)
    table = jax.random.normal(keys[0], (nodes, features), options.dtype)
    kernels = jax.random.normal(keys[1], (LAYERS, features, features), options.dtype)
    kernels = kernels * features**-0.5
    ends = jax.random.randint(keys[2], (2, count), 0, nodes)
    take, add = plain_take, jax.ops.segment_sum
    if contender == "ours":
        take, add = fo.take, fo.segment_sum

    def graph(table, kernels):
        x = table
        for kernel in kernels:
            x = x + jax.nn.relu(add(take(x, ends[0]), ends[1], nodes) @ kernel)
        return x

    def words(table, kernels):
        return jax.nn.relu(take(table, ends[0]) @ kernels[0])

    function = {"graph": graph, "words": words}[program]
    function = fo.autofuse(function) if contender == "autofuse" else function

    def loss(table, kernels):
        return jnp.square(function(table, kernels).astype(jnp.float32)).mean()

    step = jax.jit(jax.grad(loss, (0, 1))).lower(table, kernels).compile()
    found, _ = jax_calls(options, lambda: step(table, kernels))
    return found | {"temp_bytes": temp_bytes(step)}
