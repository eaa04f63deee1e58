"""How long does a forward of BERT-base take? ``python -m benchmarks.inference``

One call from tokens to the last hidden states, with a padding mask of random lengths, and with
weights of the dtype of the activations. Each contender runs in a process of its own, with the same
weights:

``ours``           `models.bert` with the ops of this package, jitted
``plain``          the same model on `jax.nn`
``torch``          PyTorch: the same network compiled by Inductor with CUDA graphs
                   (``mode="reduce-overhead"``), with scaled_dot_product_attention
``torch-autotune`` the same with products that are tuned (``mode="max-autotune"``), which compiles
                   for minutes

Parameters are arguments of the JAX program, or with ``--constants`` constants, as they are in
PyTorch's CUDA graphs: each of the 151 arguments costs the host time in each call.

``ms`` is the time of a call where many calls are in flight, and ``latency_ms`` that of a call which
is waited for. At batch 1 the host decides, and processes differ: ``--processes`` takes the medians
of several. ``calls`` counts the kernels of this package in the program. ``sample`` has some of the
results, to compare the contenders. ``cudnn`` and ``softmax`` are the kinds of attention. PyTorch
chooses its own kernel.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json

from benchmarks import jobs

MODES = {"torch": "reduce-overhead", "torch-autotune": "max-autotune"}
CONTENDERS = ("ours", "plain", *MODES)
SAMPLE = 8


def main() -> None:
    options = parse()
    if options.one:
        measure = torch_row if options.one[0]["contender"] in MODES else jax_row
        print(json.dumps([measure(options, **row) for row in options.one]))
        return

    def shared(row):
        return None if row["contender"] in MODES else (row["dtype"], row["contender"])

    what = "-constants" if options.constants else ""
    jobs.run("benchmarks.inference", options, rows(options), what, shared)


def rows(options: argparse.Namespace):
    for dtype in options.dtypes:
        for name in options.contenders:
            if name in MODES and not importlib.util.find_spec("torch"):
                continue
            for shape in options.shapes:
                for attention in ["its own"] if name in MODES else options.attention:
                    yield dict(contender=name, shape=shape, dtype=dtype, attention=attention)


def parse() -> argparse.Namespace:
    parser = jobs.parser("benchmarks.inference", __doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "plain", "torch"])
    shapes = ["1x32", "1x128", "8x128", "32x512"]
    add("--shapes", nargs="+", default=shapes, help="batch x length")
    add("--dtypes", nargs="+", default=["bfloat16", "float16"])
    add("--constants", action="store_true", help="JAX's parameters are constants")
    add("--attention", nargs="+", choices=("cudnn", "softmax", "xla"), default=["cudnn", "softmax"])
    return parser.parse_args()


def data(shape: str, vocabulary: int):
    """Tokens, and which of them are not padding."""
    import numpy as np

    batch, length = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (batch, length)).astype(np.int32)
    return tokens, np.arange(length) < rng.integers(length // 2, length + 1, (batch, 1))


def jax_row(options, contender: str, shape: str, dtype: str, attention: str) -> dict:
    import jax
    import jax.numpy as jnp

    from benchmarks.bert import PLAIN, bert

    config = dataclasses.replace(
        bert.SMALL if options.small else bert.BASE,
        dtype=dtype,
        attention=attention,
        dropout=0.0,
        attention_dropout=0.0,
    )
    ops = bert.FASTOPS if contender == "ours" else PLAIN
    tokens, inside = map(jnp.asarray, data(shape, config.vocab_size))

    @jax.jit
    def start():
        params = bert.init(jax.random.key(0), config, mlm=True)
        return jax.tree.map(lambda a: a.astype(dtype) if a.ndim > 1 else a, params)

    def forward(params, tokens, inside):
        return bert.apply(params, tokens, config, mask=inside, ops=ops)[0]

    params = start()
    if options.constants:
        jax.config.update("jax_use_simplified_jaxpr_constants", False)  # or they are arguments
        program = jax.jit(functools.partial(forward, params))
    else:
        program = functools.partial(jax.jit(forward), params)

    found, result = jobs.jax_calls(options, lambda: program(tokens, inside))
    lowered = jax.jit(forward).lower(params, tokens, inside)
    found["calls"] = lowered.as_text().count("custom_call @jax_fastops")
    found["sample"] = result[0, 0, :SAMPLE].astype(jnp.float32).tolist()
    return found


def torch_row(options, contender: str, shape: str, dtype: str, attention: str) -> dict:
    import torch

    from benchmarks.torch_bert import Bert, bert, load

    del attention
    config = bert.SMALL if options.small else bert.BASE
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(Bert(config), config).to(device, getattr(torch, dtype)).eval()
    tokens, inside = (torch.from_numpy(a).to(device) for a in data(shape, config.vocab_size))
    tokens, mask = tokens.long(), inside[:, None, None, :]
    forward = torch.compile(model.encode, mode=MODES[contender], dynamic=False)
    result = None

    def call():
        nonlocal result
        with torch.no_grad():
            result = forward(tokens, mask)

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = jobs.steady(call, wait, options.steps)
    found["latency_ms"] = jobs.latency(call, wait, options.steps)
    found["sample"] = result[0, 0, :SAMPLE].float().tolist()
    if options.profile:
        found |= jobs.attributed(jobs.torch_kernels(call, wait), options.profile)
    return found


if __name__ == "__main__":
    main()
