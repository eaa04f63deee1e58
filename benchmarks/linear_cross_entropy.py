"""How long does the loss of a vocabulary take? ``python -m benchmarks.linear_cross_entropy``

The mean loss of random tokens in bfloat16, and its gradients for the tokens and the table, with no
derivative of anything else. It is measured in steady state, each row in a process of its own:

``ours``   ``linear_cross_entropy``
``plain``  the product in bfloat16, and the formula of optax in float32
``sum``    the same by a masked sum in place of an indexed read, as `models.decoder.PLAIN` has it

A size is tokens x features x classes.
"""

import argparse
import json

from benchmarks import installed, jobs

FORMS = ("ours", "plain", "sum")
SIZES = ("16384x768x30522", "8192x4096x131072", "16384x2048x128256")


def main() -> None:
    options = parse()
    if options.one:
        print(json.dumps([measure(options, **row) for row in options.one]))
        return
    sizes = ("64x16x101",) if options.small else options.sizes
    rows = (
        {"contender": contender, "size": size} for size in sizes for contender in options.contenders
    )
    facts = dict(table=options.table, chunk=options.chunk)
    jobs.run("benchmarks.linear_cross_entropy", options, rows, **facts)


def parse() -> argparse.Namespace:
    parser = jobs.parser("benchmarks.linear_cross_entropy", __doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=FORMS, default=["ours", "plain"])
    add("--sizes", nargs="+", default=SIZES)
    add("--table", choices=("float32", "bfloat16"), default="bfloat16", help="its dtype")
    add("--chunk", type=int, help="tokens at once")
    return parser.parse_args()


def measure(options: argparse.Namespace, contender: str, size: str) -> dict:
    import jax
    import jax.numpy as jnp

    from benchmarks.cases import plain_cross_entropy

    fo, decoder = installed("jax_fastops"), installed("jax_fastops.models.decoder")
    tokens, features, classes = map(int, size.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    table = 0.02 * jax.random.normal(keys[1], (classes, features), options.table)
    labels = jax.random.randint(keys[2], (tokens,), 0, classes)

    def ours(x, table):
        return fo.linear_cross_entropy(x, table, labels, chunk=options.chunk)

    def plain(x, table):
        return plain_cross_entropy(x @ table.astype(x.dtype).T, labels).mean()

    def masked_sum(x, table):
        return decoder.PLAIN.linear_cross_entropy(x, table, labels)

    loss = {"ours": ours, "plain": plain, "sum": masked_sum}[contender]
    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, table).compile()
    found, (value, _) = jobs.jax_calls(options, lambda: step(x, table))
    found["loss"] = float(value)
    if memory := step.memory_analysis():
        found["temp_bytes"] = memory.temp_size_in_bytes
    return found


if __name__ == "__main__":
    main()
