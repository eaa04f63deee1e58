"""How long does a token take that a Llama generates?

The model is that of the job ``decoder``, with weights in bfloat16. It takes the most probable
token. Each contender runs in a process of its own, from the same weights:

``ours``          `decoder.generate` with the ops of this package
``plain``         the same on `jax.nn` and `jax.numpy`
``torch``         PyTorch: the same network with a static cache, whose step is compiled by Inductor
                  with CUDA graphs (``mode="reduce-overhead"``), in a loop in Python
``torch-graphs``  the same step as a CUDA graph of PyTorch's own kernels, not compiled; if asked for

``ms`` is the time of one token: that of so many tokens less that of the first one, which has the
time of the prompt. ``floor_ms`` is the time in which a copy reads as many bytes as a token needs:
those of the weights, but not of the table of the embeddings, and of the keys and values.
``sample`` has some of the tokens.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import installed
from benchmarks.processes import RUNS, torch_wait

decoder = installed("jax_fastops.models.decoder")

CONTENDERS = ("ours", "plain", "torch", "torch-graphs")
SAMPLE = 8


def options(add) -> None:
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS[:3]))
    add("--shapes", nargs="+", default=["1x512", "16x512"], help="batch x prompt")
    add("--length", type=int, default=128, help="new tokens")
    add("--layers", type=int, default=8)


def rows(options):
    return [
        {"contender": name, "shape": shape}
        for shape in options.shapes
        for name in options.contenders
    ]


def facts(options) -> dict:
    return dict(length=options.length, layers=options.layers)


def measure(options, contender: str, shape: str) -> dict:
    config = decoder.SMALL if options.small else decoder.Config(layers=options.layers)
    batch, prompt = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (batch, prompt), np.int32)
    row = torch_row if contender.startswith("torch") else jax_row
    return row(options, contender, config, tokens)


def per_token(length: int, call, wait) -> dict:
    """The times of ``call(count)``, which generates so many tokens."""

    def seconds(count):
        begin = time.perf_counter()
        call(count)
        wait()
        return time.perf_counter() - begin

    for count in (1, length):
        call(count)
        wait()
    times = [(seconds(length) - seconds(1)) / (length - 1) * 1e3 for _ in range(RUNS)]
    return {"ms": statistics.median(times), "all_ms": times}


def jax_row(options, contender: str, config, tokens: np.ndarray) -> dict:
    ops = decoder.FASTOPS if contender == "ours" else decoder.PLAIN

    @jax.jit
    def start():
        params = decoder.init(jax.random.key(0), config)
        return jax.tree.map(lambda a: a.astype(config.dtype) if a.ndim > 1 else a, params)

    programs = {
        count: jax.jit(
            lambda params, tokens, count=count: decoder.generate(
                params, tokens, config, length=count, ops=ops
            )
        )
        for count in (1, options.length)
    }
    params, tokens, result = start(), jnp.asarray(tokens), None

    def call(count):
        nonlocal result
        result = programs[count](params, tokens)[0]

    found = per_token(options.length, call, lambda: jax.block_until_ready(result))
    call(options.length)
    found["floor_ms"] = _bytes(params, config, tokens, options.length) / _bandwidth() * 1e3
    return found | {"sample": result[0, :SAMPLE].tolist()}


def _bytes(params, config, tokens, length: int) -> float:
    """What a token in the middle of the generation reads."""
    weights = sum(a.nbytes for a in jax.tree.leaves(params)) - params["embeddings"].nbytes
    past = tokens.shape[0] * (tokens.shape[1] + length / 2)
    features = 2 * config.kv_heads * config.head_dim * config.layers
    return weights + past * features * jnp.dtype(config.dtype).itemsize


def _bandwidth() -> float:
    """The bytes a second that a copy reads and writes."""
    size, calls = (2**30, 8) if jax.default_backend() == "gpu" else (2**26, 2)
    x = jnp.zeros(size // 4)
    copy = jax.jit(lambda x: x + 1)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(calls):
            x = copy(x)
        x.block_until_ready()
        times.append((time.perf_counter() - begin) / calls)
    return 2 * size / min(times)


def torch_row(options, contender: str, config, tokens: np.ndarray) -> dict:
    import torch

    from benchmarks.torch_models import Decoder, Generation, device, load

    dtype = getattr(torch, config.dtype)
    model = load(Decoder(config), config).to(device(), dtype).eval()
    model.frequencies = Decoder(config).frequencies.to(device())  # in float32
    tokens = torch.from_numpy(tokens).to(device()).long()
    capacity = tokens.shape[1] + options.length
    generation = Generation(model, config, len(tokens), capacity, dtype, contender != "torch")
    result = None

    def call(count):
        nonlocal result
        with torch.no_grad():
            result = generation(tokens, count)

    found = per_token(options.length, call, torch_wait())
    call(options.length)
    return found | {"sample": result[0, :SAMPLE].tolist()}
