"""How much memory and time does recomputation in groups of layers save and cost?

The gradient of the loss of a deep network, with ``Config.remat_every`` from 1 to the square root of
the number of layers, without and with ``Config.remat`` for each layer of a group, next to neither.
The layers are one scan.

The temporary bytes are those of XLA's memory analysis: the program is compiled and not run, so a
CPU suffices for networks that do not fit into its memory. With ``--time``, it is also run.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from benchmarks import installed
from benchmarks.processes import jax_calls
from benchmarks.programs import temp_bytes

bert, decoder = (installed(f"jax_fastops.models.{name}") for name in ("bert", "decoder"))

MODELS = {"bert": bert, "decoder": decoder}
# BERT-base and a decoder of its size.
CONFIGS = {
    "bert": dataclasses.replace(bert.BASE, dropout=0.0, attention_dropout=0.0),
    "decoder": decoder.Config(
        vocab_size=30522, hidden_size=768, heads=12, kv_heads=12, intermediate_size=2048
    ),
}


def options(add) -> None:
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--depths", nargs="+", type=int, default=[12, 48, 96], help="numbers of layers")
    add("--shape", default="8x512", help="batch x length")
    add("--dtype", default="bfloat16", help="XLA computes bfloat16 in float32 on a CPU")
    add("--time", action="store_true", help="run the programs, too")


def rows(options):
    return [
        {"model": model, "layers": layers, "every": every, "remat": remat}
        for model in options.models
        for layers in options.depths
        for every in (None, *groups(layers))
        for remat in (False, True)
        if (every, remat) != (1, True)  # a group of one layer is that layer
    ]


def groups(layers: int) -> list[int]:
    """Divisors of the number of layers, from 1 to its square root."""
    return [k for k in range(1, math.isqrt(layers) + 1) if layers % k == 0]


def facts(options) -> dict:
    return {"shape": options.shape, "dtype": options.dtype}


def shared(row: dict):
    return row["model"], row["layers"]


def measure_all(options, rows: list[dict]) -> list[dict]:
    return [measure(options, **row) for row in rows]


def measure(options, model: str, layers: int, every: int | None, remat: bool) -> dict:
    config = bert.SMALL if model == "bert" else decoder.SMALL
    config = dataclasses.replace(
        config if options.small else CONFIGS[model],
        layers=layers,
        remat_every=every,
        remat=remat,
        scan=True,
        dtype=options.dtype,
    )
    batch, length = map(int, options.shape.split("x"))
    init = functools.partial(init_of(model), config=config)
    params = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    @jax.jit
    def step(params, tokens):
        return jax.value_and_grad(loss_of(model))(params, tokens, config)

    compiled = step.lower(params, tokens).compile()
    found = {"temp_bytes": temp_bytes(compiled)}
    if options.time:
        given = jax.jit(init)(jax.random.key(0)), jnp.zeros(tokens.shape, jnp.int32)
        found |= jax_calls(options, lambda: compiled(*given))[0]
    return found


def init_of(model: str):
    if model == "decoder":
        return decoder.init

    def init(key, config):
        params = bert.stack_layers(bert.init(key, config, mlm=True))
        del params["pooler"]  # the loss does not use it
        return params

    return init


def loss_of(model: str):
    if model == "decoder":
        return decoder.loss

    def loss(params, tokens, config):
        hidden, _ = bert.apply(params, tokens, config)
        return bert.masked_lm_loss(params, hidden, tokens, config)

    return loss
