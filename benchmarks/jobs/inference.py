"""How long does a forward of BERT-base take?

One call from tokens to the last hidden states, with a padding mask of random lengths, and with
weights of the dtype of the activations. Each contender runs in a process of its own, with the same
weights:

``ours``           `models.bert` with the ops of this package, jitted
``frozen``         the same with its parameters bound by `jax_fastops.freeze`
``constants``      the same with parameters that are constants of the program, and a result that has
                   the memory of the last one: a CUDA graph of PyTorch has both
``packed``         ``frozen`` with a ``token_capacity`` of 13/16 of the positions; 3/4 are tokens
``plain``          the same model on `jax.nn`
``torch``          PyTorch: the same network compiled by Inductor with CUDA graphs
                   (``mode="reduce-overhead"``), with scaled_dot_product_attention
``torch-autotune`` the same with tuned products (``mode="max-autotune"``): it compiles for minutes

``ms`` is the time of a call where many calls are in flight, and ``latency_ms`` that of a call which
is waited for. At batch 1 the host decides, and processes differ: ``--processes`` takes medians.
``calls`` counts the kernels of this package. ``sample`` has some results, for a comparison.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import installed
from benchmarks.plain import PLAIN, bert
from benchmarks.processes import jax_calls, timed, torch_wait

fo = installed("jax_fastops")

MODES = {"torch": "reduce-overhead", "torch-autotune": "max-autotune"}
CONTENDERS = ("ours", "frozen", "constants", "packed", "plain", *MODES)
SAMPLE = 8


def options(add) -> None:
    add("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "frozen", "plain", "torch"])
    shapes = ["1x32", "1x128", "8x128", "32x512"]
    add("--shapes", nargs="+", default=shapes, help="batch x length")
    add("--dtypes", nargs="+", default=["bfloat16", "float16"])
    add("--attention", nargs="+", choices=("cudnn", "softmax", "xla"), default=["cudnn", "softmax"])


def rows(options):
    return [
        dict(contender=name, shape=shape, dtype=dtype, attention=attention)
        for dtype in options.dtypes
        for name in options.contenders
        for shape in options.shapes
        for attention in (["its own"] if name in MODES else options.attention)
    ]


def shared(row: dict):
    return row["contender"] not in MODES and (row["dtype"], row["contender"])


def measure(options, contender: str, shape: str, dtype: str, attention: str) -> dict:
    row = torch_row if contender in MODES else jax_row
    return row(options, contender, shape, dtype, attention)


def data(shape: str, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and which of them are not padding."""
    batch, length = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (batch, length)).astype(np.int32)
    return tokens, np.arange(length) < rng.integers(length // 2, length + 1, (batch, 1))


def jax_row(options, contender: str, shape: str, dtype: str, attention: str) -> dict:
    small = bert.SMALL if options.small else bert.BASE
    changes = dict(dtype=dtype, attention=attention, dropout=0.0, attention_dropout=0.0)
    config = dataclasses.replace(small, **changes)
    ops = PLAIN if contender == "plain" else bert.FASTOPS
    tokens, inside = map(jnp.asarray, data(shape, config.vocab_size))

    @jax.jit
    def start():
        params = bert.init(jax.random.key(0), config, mlm=True)
        return jax.tree.map(lambda a: a.astype(dtype) if a.ndim > 1 else a, params)

    more = {"token_capacity": tokens.size * 13 // 16} if contender == "packed" else {}

    def forward(params, tokens, inside):
        return bert.apply(params, tokens, config, mask=inside, ops=ops, **more)[0]

    params = start()
    if contender == "constants":
        jax.config.update("jax_use_simplified_jaxpr_constants", False)  # or they are arguments
        program = in_place(functools.partial(forward, params))
    elif contender in ("frozen", "packed"):
        program = fo.freeze(forward, params)
    else:
        program = functools.partial(jax.jit(forward), params)
    found, result = jax_calls(options, lambda: program(tokens, inside))
    lowered = jax.jit(forward).lower(params, tokens, inside)
    found["calls"] = lowered.as_text().count("custom_call @jax_fastops")
    return found | {"sample": result[0, 0, :SAMPLE].astype(jnp.float32).tolist()}


def in_place(forward):
    """The jitted function. A result is valid until the next call, which takes its memory."""

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def call(last, *args):
        del last
        return forward(*args)

    last = None

    def program(*args):
        nonlocal last
        if last is None:
            last = jnp.empty_like(jax.eval_shape(forward, *args))
        last = call(last, *args)
        return last

    return program


def torch_row(options, contender: str, shape: str, dtype: str, attention: str) -> dict:
    import torch

    from benchmarks.torch_models import Bert, device, load

    del attention
    config = bert.SMALL if options.small else bert.BASE
    model = load(Bert(config), config).to(device(), getattr(torch, dtype)).eval()
    tokens, inside = (torch.from_numpy(a).to(device()) for a in data(shape, config.vocab_size))
    tokens, mask = tokens.long(), inside[:, None, None, :]
    forward = torch.compile(model.encode, mode=MODES[contender], dynamic=False)
    result = None

    def call():
        nonlocal result
        with torch.no_grad():
            result = forward(tokens, mask)

    found = timed(options, call, torch_wait(), torch=True)
    return found | {"sample": result[0, 0, :SAMPLE].float().tolist()}
