"""What do ``patch`` and ``autofuse`` save in models written without this package?

Whole training steps (forward, loss, backward, an update by
gradient descent, donated parameters) in steady state. Each model runs in a process of its own, as:

``plain``     as it is
``patch``     with its functions and layers replaced by name
``autofuse``  with the patterns replaced in its program
``by hand``   where ``jax_fastops.models`` has the same model

Models of packages that are not installed are left out. ``trace_s`` and ``forward_trace_s`` are the
medians of fresh traces of a step and of the loss, in turns, after each was traced once.

``--first`` measures the first call of a process instead: each contender's first trace of a step and
its whole first call, with the compilation, in processes of their own. ``--processes`` has how many.
"""

import contextlib
import dataclasses
import importlib.util
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import optax

from benchmarks import installed
from benchmarks.cases import fo
from benchmarks.plain import PLAIN, bert
from benchmarks.processes import steady, together
from benchmarks.programs import temp_bytes

decoder, resnet = (installed(f"jax_fastops.models.{name}") for name in ("decoder", "resnet"))

WIDTH, HEADS, LAYERS, LENGTH, BATCH, VOCABULARY = 768, 12, 6, 512, 16, 32000


def options(add) -> None:
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--traces", type=int, default=5, metavar="N", help="traces that are timed")
    add("--first", action="store_true", help="measure first calls of processes")


def rows(options):
    found = [name for name in options.models if importlib.util.find_spec(MODELS[name][0])]
    if options.first:
        return [
            {"model": name, "contender": who} for name in found for who in ("plain", "autofuse")
        ]
    return [{"model": name} for name in found]


def facts(options) -> dict:
    return {"what": "-first"} if options.first else {}


def measure(options, model: str, contender: str = "") -> dict:
    parameters, contenders = MODELS[model][1](options.small)
    if options.first:
        loss = contenders["plain"]
        loss = fo.autofuse(loss) if contender == "autofuse" else loss
        return _first(partial(_updated, loss), jax.block_until_ready(parameters))
    report = fo.autofuse.report(contenders["plain"])(parameters)
    patterns = [r.pattern for r in report.replaced]
    found: dict = {"patterns": {name: patterns.count(name) for name in dict.fromkeys(patterns)}}
    found["left"] = sorted({f"{m.pattern}: {m.reason}" for m in report.missed})
    contenders |= {"patch": contenders["plain"], "autofuse": fo.autofuse(contenders["plain"])}
    losses = {}
    traced, seconds = _traces(options, contenders, parameters)
    found |= seconds
    compiled = together([one.lower().compile for one in traced.values()])
    steps = dict(zip(traced, compiled, strict=True))
    for name, step in steps.items():
        found[f"{name}_temp_bytes"] = temp_bytes(step)
    times: dict[str, list] = {name: [] for name in steps}
    for _ in range(3):  # in turns
        for name, step in steps.items():
            ms, losses[name] = _timed(step, jax.tree.map(jnp.copy, parameters), options.steps)
            times[name].append(ms)
    for name, ms in times.items():
        found |= {f"{name}_ms": statistics.median(ms), f"{name}_loss": float(losses[name])}
    return found


def _trace(name: str, function, parameters):
    """A fresh trace: JAX knows those of a function that it has seen."""
    with fo.patch() if name == "patch" else contextlib.nullcontext():
        return jax.jit(lambda *args: function(*args), donate_argnums=0).trace(parameters)


def _traces(options, contenders: dict, parameters) -> tuple[dict, dict[str, float]]:
    """Each contender's traced step; and median seconds of later traces of step and loss."""
    steps: dict = {}
    seconds: dict[str, list[float]] = {}
    for turn in range(1 + options.traces):
        for name, loss in contenders.items():
            for key, function in (("trace_s", partial(_updated, loss)), ("forward_trace_s", loss)):
                begin = time.perf_counter()
                traced = _trace(name, function, parameters)
                taken = time.perf_counter() - begin
                if turn:  # not the first trace
                    seconds.setdefault(f"{name}_{key}", []).append(taken)
                elif function is not loss:
                    steps[name] = traced
    return steps, {key: statistics.median(times) for key, times in seconds.items()}


def _first(step, parameters) -> dict:
    """Milliseconds of the first trace of a step, and of its first call, which compiles it."""
    jax.config.update("jax_enable_compilation_cache", False)
    begin = time.perf_counter()
    traced = jax.jit(step, donate_argnums=0).trace(parameters)
    middle = time.perf_counter()
    jax.block_until_ready(traced.lower().compile()(parameters))
    end = time.perf_counter()
    return {"trace_ms": (middle - begin) * 1e3, "call_ms": (end - begin) * 1e3}


def _timed(step, state, count: int) -> tuple[float, jax.Array]:
    """Milliseconds of a step, and the loss of the first one."""
    losses = []

    def call():
        nonlocal state
        state, loss = step(state)
        losses[1:] = [loss]  # keeps the first and the last

    ms = steady(call, lambda: jax.block_until_ready((state, losses)), count)["ms"]
    return ms, losses[0]


def _updated(loss, parameters):
    value, grads = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - (1e-4 * g).astype(p.dtype), parameters, grads), value


def _numbers(small: bool):
    """Tokens and labels."""
    shape = (2, 16) if small else (BATCH, LENGTH)
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.randint(k, shape, 0, VOCABULARY, jnp.int32) for k in keys]


def _mean(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _images(shape: tuple[int, ...], classes: int):
    """Images and labels."""
    labels = jax.random.randint(jax.random.key(1), shape[:1], 0, classes)
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), labels


def _layers(small: bool) -> int:
    return 1 if small else LAYERS


def post_norm_linen(small: bool):
    """A BERT-like encoder of Flax' layers, in bfloat16 with float32 parameters."""
    from flax import linen as nn

    tokens, labels = _numbers(small)

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            of = dict(dtype=jnp.bfloat16)
            x = nn.Embed(VOCABULARY, WIDTH, **of)(tokens)
            for _ in range(_layers(small)):
                x = nn.LayerNorm(**of)(x + nn.MultiHeadDotProductAttention(HEADS, **of)(x))
                h = nn.Dense(WIDTH, **of)(nn.gelu(nn.Dense(4 * WIDTH, **of)(x)))
                x = nn.LayerNorm(**of)(x + h)
            return nn.Dense(VOCABULARY, **of)(x)

    model = Encoder()
    parameters = jax.jit(model.init)(jax.random.key(1), tokens)

    def loss(parameters):
        logits = model.apply(parameters, tokens)
        return _mean(logits, labels)

    return parameters, {"plain": loss}


def decoder_in_jax(small: bool):
    """A Llama-like decoder in jax.numpy: RMS norm, softmax attention, SwiGLU, a loss by hand."""
    tokens, labels = _numbers(small)
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def matrix(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    inner = 2048
    products = dict(qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH), gate=(WIDTH, inner))
    products |= dict(up=(WIDTH, inner), down=(inner, WIDTH))

    def layer():
        kernels = {name: matrix(*shape) for name, shape in products.items()}
        return kernels | {"scales": jnp.ones((2, WIDTH))}

    parameters = {
        "table": matrix(VOCABULARY, WIDTH) * VOCABULARY**0.5 * 0.02,
        "layers": [layer() for _ in range(_layers(small))],
        "scale": jnp.ones(WIDTH),
    }

    def norm(x, scale):
        h = x.astype(jnp.float32)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        return (h * scale).astype(x.dtype)

    def attend(x, p):
        n = x.shape[1]
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(scores, where=jnp.tril(jnp.ones((n, n), bool)))
        return jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(x.shape) @ p["out"]

    def loss(parameters):
        given = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
        x = given["table"][tokens]
        for p in given["layers"]:
            x = x + attend(norm(x, p["scales"][0]), p)
            h = norm(x, p["scales"][1])
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        logits = (norm(x, given["scale"]) @ given["table"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return -picked.mean()

    return parameters, {"plain": loss}


def resnet_linen(small: bool):
    """ResNet-50 of Flax' layers."""
    from flax import linen as nn

    stages, size, batch = ((1, 1), 32, 2) if small else ((3, 4, 6, 3), 224, 64)
    images, labels = _images((batch, size, size, 3), 1000)
    norm = partial(nn.BatchNorm, use_running_average=False, dtype=jnp.bfloat16)
    conv = partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm()(conv(64, (7, 7), 2)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, blocks in enumerate(stages):
                for block in range(blocks):
                    width, stride = 64 << stage, 2 if stage and not block else 1
                    y = nn.relu(norm()(conv(width, (1, 1))(x)))
                    y = nn.relu(norm()(conv(width, (3, 3), stride)(y)))
                    y = norm(scale_init=nn.initializers.zeros)(conv(4 * width, (1, 1))(y))
                    if not block:
                        x = norm()(conv(4 * width, (1, 1), stride)(x))
                    x = nn.relu(x + y)
            return nn.Dense(1000)(x.mean((1, 2)).astype(jnp.float32))

    model = Net()
    variables = jax.jit(model.init)(jax.random.key(2), images)

    def loss(parameters):
        given = {**variables, "params": parameters}
        logits, _ = model.apply(given, images, mutable=["batch_stats"])
        return _mean(logits, labels)

    return variables["params"], {"plain": loss}


def pre_norm_haiku(small: bool):
    """A GPT of Haiku's layers, in float32."""
    import haiku as hk

    tokens, labels = (a[:4] for a in _numbers(small))
    scale = hk.initializers.VarianceScaling(1.0)

    def net(tokens):
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        for _ in range(_layers(small)):
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=scale)(h, h, h, mask=mask)
            h = hk.Linear(4 * WIDTH)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.Linear(WIDTH)(jax.nn.gelu(h))
        return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))

    model = hk.without_apply_rng(hk.transform(net))
    parameters = jax.jit(model.init)(jax.random.key(1), tokens)

    def loss(parameters):
        losses = jax.nn.log_softmax(model.apply(parameters, tokens))
        return -(jax.nn.one_hot(labels, VOCABULARY) * losses).sum(-1).mean()

    return parameters, {"plain": loss}


def pre_norm_equinox(small: bool):
    """A transformer of Equinox' layers, in bfloat16."""
    import equinox as eqx

    tokens, labels = _numbers(small)
    keys = iter(jax.random.split(jax.random.key(1), 100))

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: list
        dense: list

        def __init__(self):
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=next(keys))
            self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)]
            sizes = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
            self.dense = [eqx.nn.Linear(*size, key=next(keys)) for size in sizes]

        def __call__(self, x):
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h)
            h = jax.nn.gelu(jax.vmap(self.dense[0])(jax.vmap(self.norms[1])(x)))
            return x + jax.vmap(self.dense[1])(h)

    table = eqx.nn.Embedding(VOCABULARY, WIDTH, key=next(keys))
    model = table, [Block() for _ in range(_layers(small))]
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters):
        given = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
        table, blocks = eqx.combine(given, static)

        def logits(tokens):
            x = jax.vmap(table)(tokens)
            for block in blocks:
                x = block(x)
            return x @ table.weight.T

        losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(logits)(tokens), labels)
        return losses.astype(jnp.float32).mean()

    return parameters, {"plain": loss}


def bert_of_models(small: bool):
    """``models.bert`` on ``jax.nn``, as the pretraining benchmark has it, without dropout."""
    base = bert.SMALL if small else dataclasses.replace(bert.BASE, vocab_size=30528)  # padded
    changes = dict(dtype="bfloat16", attention="softmax", dropout=0.0, attention_dropout=0.0)
    config = dataclasses.replace(base, **changes)
    tokens, labels = (a % config.vocab_size for a in _numbers(small))
    inside = jnp.arange(tokens.shape[1]) < tokens.shape[1] - jnp.arange(len(tokens))[:, None]
    parameters = bert.init(jax.random.key(0), config, mlm=True)
    del parameters["pooler"]

    def loss(parameters, ops):
        hidden, _ = bert.apply(parameters, tokens, config, mask=inside, ops=ops)
        return bert.masked_lm_loss(parameters, hidden, labels, config, ops=ops)

    by_hand = partial(loss, ops=bert.FASTOPS)
    return parameters, {"plain": partial(loss, ops=PLAIN), "by hand": by_hand}


def decoder_of_models(small: bool):
    """``models.decoder`` on ``jax.nn``, as the benchmark of the decoder has it."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, layers=LAYERS, heads=HEADS, kv_heads=4)
    config = decoder.Config(**sizes, intermediate_size=2048)
    if small:
        config = dataclasses.replace(decoder.SMALL, dtype="bfloat16")
    tokens, labels = (a % config.vocab_size for a in _numbers(small))

    def loss(parameters, config, ops):
        return decoder.loss(parameters, tokens, config, labels=labels, ops=ops)

    apart = dataclasses.replace(config, tensor_parallel=True)  # plain models join no kernels
    plain = partial(loss, config=apart, ops=decoder.PLAIN)
    by_hand = partial(loss, config=config, ops=decoder.FASTOPS)
    return decoder.init(jax.random.key(0), config), {"plain": plain, "by hand": by_hand}


def resnet_of_models(small: bool):
    """``models.resnet`` on ``jax.numpy``."""
    config = resnet.SMALL if small else resnet.RESNET50
    size, batch = (8, 2) if small else (224, 64)
    images, labels = _images((batch, size, size, config.channels), config.classes)
    parameters, statistics = resnet.init(jax.random.key(2), config)

    def loss(parameters, ops):
        logits, _ = resnet.apply(parameters, statistics, images, config, train=True, **ops)
        return _mean(logits, labels)

    plain = partial(loss, ops=dict(batch_norm=resnet.PLAIN))
    return parameters, {"plain": plain, "by hand": partial(loss, ops={})}


MODELS = {
    "post-norm, Flax": ("flax", post_norm_linen),
    "decoder, jax.numpy": ("jax", decoder_in_jax),
    "ResNet-50, Flax": ("flax", resnet_linen),
    "pre-norm, Haiku": ("haiku", pre_norm_haiku),
    "pre-norm, Equinox": ("equinox", pre_norm_equinox),
    "models.bert": ("jax", bert_of_models),
    "models.decoder": ("jax", decoder_of_models),
    "models.resnet": ("jax", resnet_of_models),
}
