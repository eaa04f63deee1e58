"""How long does the loss of a vocabulary take?

The mean loss of random tokens in bfloat16, and its gradients for the tokens and the table, with no
derivative of anything else. It is measured in steady state, each row in a process of its own:

``ours``   ``linear_cross_entropy``
``plain``  the product in bfloat16, and the formula of optax in float32
``sum``    the same by a masked sum in place of an indexed read, as `models.decoder.PLAIN` has it

A size is tokens x features x classes.
"""

import jax
import jax.numpy as jnp

from benchmarks import installed
from benchmarks.cases import fo, plain_cross_entropy
from benchmarks.processes import jax_calls
from benchmarks.programs import temp_bytes

decoder = installed("jax_fastops.models.decoder")

FORMS = ("ours", "plain", "sum")
SIZES = ("16384x768x30522", "8192x4096x131072", "16384x2048x128256")


def options(add) -> None:
    add("--contenders", nargs="+", choices=FORMS, default=["ours", "plain"])
    add("--sizes", nargs="+", default=SIZES)
    add("--table", choices=("float32", "bfloat16"), default="bfloat16", help="its dtype")
    add("--chunk", type=int, help="tokens at once")


def rows(options):
    sizes = ("64x16x101",) if options.small else options.sizes
    return [dict(contender=name, size=size) for size in sizes for name in options.contenders]


def facts(options) -> dict:
    return dict(table=options.table, chunk=options.chunk)


def measure(options, contender: str, size: str) -> dict:
    tokens, features, classes = map(int, size.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    table = 0.02 * jax.random.normal(keys[1], (classes, features), options.table)
    labels = jax.random.randint(keys[2], (tokens,), 0, classes)
    loss = {
        "ours": lambda x, table: fo.linear_cross_entropy(x, table, labels, chunk=options.chunk),
        "plain": lambda x, table: plain_cross_entropy(x @ table.astype(x.dtype).T, labels).mean(),
        "sum": lambda x, table: decoder.PLAIN.linear_cross_entropy(x, table, labels),
    }[contender]
    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, table).compile()
    found, (value, _) = jax_calls(options, lambda: step(x, table))
    return found | {"loss": float(value), "temp_bytes": temp_bytes(step)}
