"""Plain workloads in ``jax.numpy``: an op with element-wise work before and after it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.others.program import Program, cast, normal, program, tokens


class _Weights:
    """Random parameters, by name."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape, std=None):
        fan_in = shape[-2] if len(shape) > 1 else 1
        std = fan_in**-0.5 if std is None else std
        return jnp.asarray(std * self.rng.standard_normal(shape, np.float32))


def _layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def _rms_norm(x, scale):
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True) + 1e-6)
    return (h * scale).astype(x.dtype)


def _convolution(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def _batch_norm(x, scale, bias):
    h = x.astype(jnp.float32)
    mean, variance = jnp.mean(h, (0, 1, 2)), jnp.var(h, (0, 1, 2))
    return ((h - mean) * lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)


def _rotary(x):
    """Rotary embedding of ``[batch, length, heads, size]``."""
    size = x.shape[-1]
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _label_losses(logits, labels):
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]


@program("layer norm, mean")
def layer_norm_mean(tiny, dtype):
    batch, length, width = (2, 8, 32) if tiny else (64, 512, 1024)
    w = _Weights()
    params = dict(w1=w(width, width), w2=w(width, 64), scale=jnp.ones(width), bias=w(width))
    x = normal((batch, length, width), dtype)

    def loss(params, x):
        p = cast(params, dtype)
        h = x + jnp.tanh(x @ p["w1"])
        h = _layer_norm(h.astype(jnp.float32), params["scale"], params["bias"])
        pooled = (2.0 * h).mean(1).astype(dtype)
        return jnp.square((pooled @ p["w2"]).astype(jnp.float32)).mean()

    return Program(params, (x,), loss)


@program("convolution, gelu, batch norm")
def convolution_batch_norm(tiny, dtype):
    batch, size, width = (2, 8, 16) if tiny else (64, 56, 128)
    w = _Weights()

    def layer():
        kernel = w(3, 3, width, width, std=(9 * width) ** -0.5)
        return dict(kernel=kernel, b=w(width, std=0.1), scale=jnp.ones(width), shift=w(width))

    params = [layer() for _ in range(1 if tiny else 3)]
    x = normal((batch, size, size, width), dtype)

    def loss(params, x):
        for p in params:
            h = _convolution(x, p["kernel"].astype(dtype)) + p["b"].astype(dtype)
            x = x + 0.5 * _batch_norm(jax.nn.gelu(h), p["scale"], p["shift"])
        return jnp.square(x.mean((1, 2)).astype(jnp.float32)).mean()

    return Program(params, (x,), loss)


@program("softmax, top-k")
def softmax_top_k(tiny, dtype):
    rows, width, classes, k = (8, 32, 50, 4) if tiny else (8192, 512, 8192, 16)
    w = _Weights()
    params = dict(w=w(width, classes), temperature=jnp.zeros(()))
    x, allowed = normal((rows, width), dtype), tokens((rows, classes), 10, 1) > 0
    rewards = normal((classes,))

    def loss(params, x, allowed, rewards):
        logits = (x @ params["w"].astype(dtype)).astype(jnp.float32)
        logits = logits / jnp.exp(params["temperature"])
        weights = jax.nn.softmax(jnp.where(allowed, logits, -1e9))
        top, places = lax.top_k(weights, k)
        top = top / (top.sum(-1, keepdims=True) + 1e-6)
        return -(top * rewards[places]).sum(-1).mean()

    return Program(params, (x, allowed, rewards), loss)


def _attention_sizes(tiny):
    return (2, 16, 2, 8) if tiny else (8, 1024, 12, 64)  # batch, length, heads, size


def _attention_program(tiny, dtype, attend, extra=()):
    """Layers of norm, projections, ``attend(q, k, v, *extra)``, projection, residual."""
    batch, length, heads, size = _attention_sizes(tiny)
    width = heads * size
    w = _Weights()

    def layer():
        kernels = dict(qkv=w(width, 3 * width), out=w(width, width))
        return kernels | dict(scale=jnp.ones(width), bias=w(width, std=0.1), gain=jnp.ones(width))

    params = [layer() for _ in range(1 if tiny else 4)]
    x = normal((batch, length, width), dtype)

    def loss(params, x, *extra):
        for p in cast(params, dtype):
            h = _layer_norm(x.astype(jnp.float32), p["scale"], p["bias"]).astype(dtype)
            q, k, v = jnp.split((h @ p["qkv"]).reshape(batch, length, 3 * heads, size), 3, 2)
            attended = attend(q, k, v, *extra).reshape(batch, length, width)
            x = x + p["gain"] * (attended @ p["out"])
        return jnp.square(x.astype(jnp.float32)).mean()

    return Program(params, (x, *extra), loss)


@program("attention, causal")
def attention_causal(tiny, dtype):
    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, -1).astype(dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v) * jax.nn.sigmoid(q)

    return _attention_program(tiny, dtype, attend)


@program("attention, window")
def attention_window(tiny, dtype):
    window = 4 if tiny else 256

    def attend(q, k, v):
        q, k, v = (jnp.transpose(a, (0, 2, 1, 3)) for a in (q * q.shape[-1] ** -0.5, k, v))
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32)
        place = jnp.arange(scores.shape[-1])
        distance = place[:, None] - place[None, :]
        scores += jnp.where((distance >= 0) & (distance < window), 0.0, -1e10)
        weights = jax.nn.softmax(scores)
        return jnp.transpose(weights.astype(dtype) @ v, (0, 2, 1, 3))

    return _attention_program(tiny, dtype, attend)


@program("attention, segments")
def attention_segments(tiny, dtype):
    batch, length, *_ = _attention_sizes(tiny)
    segments = jnp.cumsum(tokens((batch, length), length // 4 if tiny else 200) == 0, 1) + 1

    def attend(q, k, v, segments):
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same & jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return _attention_program(tiny, dtype, attend, (segments,))


@program("attention, ALiBi")
def attention_alibi(tiny, dtype):
    def attend(q, k, v):
        heads, length = q.shape[2], q.shape[1]
        slopes = 2.0 ** (-8 * (jnp.arange(heads) + 1) / heads)
        distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        bias = slopes[:, None, None] * distance
        bias = jnp.where(distance <= 0, bias, -1e9)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5 + bias)
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(dtype), v)

    return _attention_program(tiny, dtype, attend)


@program("attention, grouped")
def attention_grouped(tiny, dtype):
    batch, length, heads, groups, size = (2, 16, 4, 2, 8) if tiny else (4, 2048, 16, 4, 64)
    width = heads * size
    w = _Weights()

    def layer():
        kernels = dict(q=w(width, width), k=w(width, groups * size), v=w(width, groups * size))
        scales = dict(norm=jnp.ones(width), q_norm=jnp.ones(size), k_norm=jnp.ones(size))
        return kernels | scales | dict(out=w(width, width))

    params = [layer() for _ in range(1 if tiny else 3)]
    x = normal((batch, length, width), dtype)

    def loss(params, x):
        for p in cast(params, dtype):
            h = _rms_norm(x, p["norm"])
            q = (h @ p["q"]).reshape(batch, length, heads, size)
            k, v = ((h @ p[n]).reshape(batch, length, groups, size) for n in "kv")
            q, k = _rotary(_rms_norm(q, p["q_norm"])), _rotary(_rms_norm(k, p["k_norm"]))
            q = q.reshape(batch, length, groups, heads // groups, size)
            scores = jnp.einsum("bqghd,bkgd->bghqk", q, k).astype(jnp.float32) * size**-0.5
            mask = jnp.tril(jnp.ones((length, length), bool))
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(dtype)
            attended = jnp.einsum("bghqk,bkgd->bqghd", weights, v).reshape(x.shape)
            x = x + attended @ p["out"]
        return jnp.square(x.astype(jnp.float32)).mean()

    return Program(params, (x,), loss)


@program("SwiGLU")
def swiglu(tiny, dtype):
    rows, width, inner = (16, 32, 64) if tiny else (16384, 1024, 2816)
    w = _Weights()

    def layer():
        kernels = dict(gate=w(width, inner), up=w(width, inner), down=w(inner, width))
        return kernels | dict(norm=jnp.ones(width))

    params = [layer() for _ in range(1 if tiny else 4)]
    x = normal((rows, width), dtype)

    def loss(params, x):
        for p in cast(params, dtype):
            h = _rms_norm(x, p["norm"])
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return jnp.square(x.astype(jnp.float32)).mean()

    return Program(params, (x,), loss)


@program("GEGLU")
def geglu(tiny, dtype):
    rows, width, inner = (16, 32, 64) if tiny else (16384, 768, 3072)
    w = _Weights()

    def layer():
        kernels = dict(up=w(width, 2 * inner), b=w(2 * inner), down=w(inner, width), c=w(width))
        return kernels | dict(scale=jnp.ones(width), bias=w(width), gain=0.1 * jnp.ones(width))

    params = [layer() for _ in range(1 if tiny else 4)]
    x = normal((rows, width), dtype)

    def loss(params, x):
        for p in cast(params, dtype):
            h = _layer_norm(x, p["scale"], p["bias"])
            value, gate = jnp.split(h @ p["up"] + p["b"], 2, -1)
            h = (jax.nn.gelu(gate, approximate=False) * value) @ p["down"] + p["c"]
            x = x + p["gain"] * h
        return jnp.square(x.astype(jnp.float32)).mean()

    return Program(params, (x,), loss)


@program("Llama layers")
def llama_layers(tiny, dtype):
    batch, length, width, heads, groups, inner, vocabulary, layers = (
        (2, 16, 32, 4, 2, 64, 100, 1) if tiny else (4, 2048, 1024, 16, 4, 2816, 64000, 4)
    )
    heads_of = (batch, length, -1, width // heads)
    w = _Weights()

    def layer():
        size = width // heads * groups
        products = dict(q=w(width, width), k=w(width, size), v=w(width, size), o=w(width, width))
        products |= dict(gate=w(width, inner), up=w(width, inner), down=w(inner, width))
        return products | dict(norm1=jnp.ones(width), norm2=jnp.ones(width))

    params = dict(
        table=w(vocabulary, width, std=0.02),
        head=w(width, vocabulary),
        norm=jnp.ones(width),
        layers=[layer() for _ in range(layers)],
    )
    numbers = tokens((batch, length), vocabulary)

    def loss(params, numbers, labels):
        p = params
        x = p["table"].astype(dtype)[numbers]
        for layer in p["layers"]:
            h = _rms_norm(x, layer["norm1"])
            q, k, v = ((h @ layer[n].astype(dtype)).reshape(heads_of) for n in "qkv")
            attended = jax.nn.dot_product_attention(_rotary(q), _rotary(k), v, is_causal=True)
            x = x + attended.reshape(x.shape) @ layer["o"].astype(dtype)
            h = _rms_norm(x, layer["norm2"])
            gate, up = (h @ layer[n].astype(dtype) for n in ("gate", "up"))
            x = x + (jax.nn.silu(gate) * up) @ layer["down"].astype(dtype)
        logits = (_rms_norm(x, p["norm"]) @ p["head"].astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Program(params, (numbers, jnp.roll(numbers, -1, 1)), loss)


@program("BERT layers")
def bert_layers(tiny, dtype):
    batch, length, width, heads, layers, vocabulary = (
        (2, 16, 32, 2, 1, 100) if tiny else (16, 512, 768, 12, 4, 30528)
    )
    w = _Weights()

    def layer():
        found = dict(qkv=w(width, 3 * width), qkv_b=w(3 * width, std=0.02), o=w(width, width))
        found |= dict(up=w(width, 4 * width), up_b=w(4 * width, std=0.02), down=w(4 * width, width))
        norms = {
            f"{k}{i}": f(width) for i in range(2) for k, f in (("s", jnp.ones), ("b", jnp.zeros))
        }
        return found | norms | dict(o_b=w(width, std=0.02), down_b=w(width, std=0.02))

    params = dict(
        table=w(vocabulary, width, std=0.02),
        places=w(length, width, std=0.02),
        layers=[layer() for _ in range(layers)],
        out_b=jnp.zeros(vocabulary),
    )
    numbers = tokens((batch, length), vocabulary)
    inside = jnp.arange(length) < (length // 2 + tokens((batch, 1), length // 2, 1))

    def drop(key, x, rate=0.1):
        keep = jax.random.bernoulli(key, 1 - rate, x.shape)
        return jnp.where(keep, x / (1 - rate), 0)

    def loss(params, numbers, labels, inside, key, train=True):
        p, keys = cast(params, dtype), iter(jax.random.split(key, 1 + 3 * layers))
        drop_ = drop if train else lambda key, x: x
        x = drop_(next(keys), p["table"][numbers] + p["places"])
        bias = jnp.where(inside, 0.0, -1e10)[:, None, None, :]
        for layer in p["layers"]:
            qkv = (x @ layer["qkv"] + layer["qkv_b"]).reshape(
                batch, length, 3, heads, width // heads
            )
            q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32)
            weights = jax.nn.softmax(scores / np.sqrt(width // heads) + bias).astype(dtype)
            weights = drop_(next(keys), weights)
            h = (
                jnp.einsum("bhqk,bhkd->bqhd", weights, v).reshape(x.shape) @ layer["o"]
                + layer["o_b"]
            )
            x = _layer_norm(x + drop_(next(keys), h), layer["s0"], layer["b0"])
            h = (
                jax.nn.gelu(x @ layer["up"] + layer["up_b"], approximate=False) @ layer["down"]
                + layer["down_b"]
            )
            x = _layer_norm(x + drop_(next(keys), h), layer["s1"], layer["b1"])
        logits = x @ p["table"].T + p["out_b"]
        return (_label_losses(logits, labels) * inside).sum() / inside.sum()

    batch_of = (numbers, jnp.roll(numbers, -1, 1), inside, jax.random.key(3))
    return Program(params, batch_of, loss, functools.partial(loss, train=False), dropout=True)


@program("loss, label smoothing")
def label_smoothing(tiny, dtype):
    rows, width, classes = (16, 32, 50) if tiny else (8192, 768, 32000)
    params = dict(w=_Weights()(width, classes), b=jnp.zeros(classes))
    x, labels = normal((rows, width), dtype), tokens((rows,), classes)
    weights = (tokens((rows,), 10, 1) > 0).astype(jnp.float32)

    def loss(params, x, labels, weights, smoothing=0.1):
        logits = x @ params["w"].astype(dtype) + params["b"].astype(dtype)
        one_hot = jax.nn.one_hot(labels, classes)
        targets = one_hot * (1 - smoothing) + smoothing / classes
        log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
        losses = -(targets * log_probabilities).sum(-1)
        return (losses * weights).sum() / weights.sum()

    return Program(params, (x, labels, weights), loss)


@program("loss, z-loss")
def z_loss(tiny, dtype):
    rows, width, classes = (16, 32, 50) if tiny else (8192, 1024, 50304)
    params = dict(table=_Weights()(classes, width, std=0.02), scale=jnp.ones(width))
    x, labels = normal((rows, width), dtype), tokens((rows,), classes)
    weights = (tokens((rows,), 10, 1) > 0).astype(jnp.float32)

    def loss(params, x, labels, weights):
        h = _rms_norm(x, params["scale"])
        logits = (h @ params["table"].T.astype(dtype)).astype(jnp.float32)
        log_sum = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        losses = log_sum - picked + 1e-4 * jnp.square(log_sum)
        return (losses * weights).sum() / jnp.maximum(weights.sum(), 1)

    return Program(params, (x, labels, weights), loss)


@program("embeddings")
def embeddings(tiny, dtype):
    batch, length, width, vocabulary = (2, 8, 32, 50) if tiny else (64, 512, 768, 50304)
    w = _Weights()
    params = dict(
        table=w(vocabulary, width, std=0.02),
        places=w(length, width, std=0.02),
        kinds=w(2, width, std=0.02),
        scale=jnp.ones(width),
        bias=jnp.zeros(width),
        out=w(width, width),
    )
    numbers, kinds = tokens((batch, length), vocabulary), tokens((batch, length), 2, 1)

    def loss(params, numbers, kinds, key, train=True):
        p = cast(params, dtype)
        x = p["table"][numbers] + p["places"] + p["kinds"][kinds]
        x = _layer_norm(x.astype(jnp.float32), params["scale"], params["bias"]).astype(dtype)
        if train:
            x = x * (jax.random.bernoulli(key, 0.9, x.shape) / 0.9).astype(dtype)
        return jnp.square((x @ p["out"]).astype(jnp.float32)).mean()

    batch_of = (numbers, kinds, jax.random.key(3))
    return Program(params, batch_of, loss, functools.partial(loss, train=False), dropout=True)


@program("MLP")
def mlp(tiny, dtype):
    rows, sizes = (16, (32, 64, 64, 10)) if tiny else (16384, (784, 4096, 4096, 10))
    w = _Weights()
    pairs = itertools.pairwise(sizes)
    params = [dict(w=w(*pair), b=jnp.zeros(pair[1])) for pair in pairs]
    x, labels = normal((rows, sizes[0])), tokens((rows,), sizes[-1])

    def logits(params, x):
        *hidden, last = cast(params, dtype)
        x = ((x - 0.13) / 0.31).astype(dtype)
        for p in hidden:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        return (x @ last["w"] + last["b"]).astype(jnp.float32)

    def loss(params, x, labels):
        losses = -(jax.nn.one_hot(labels, sizes[-1]) * jax.nn.log_softmax(logits(params, x))).sum(
            -1
        )
        return losses.mean() + 1e-4 * sum(jnp.vdot(p["w"], p["w"]) for p in params)

    def forward(params, x, labels):
        return (logits(params, x).argmax(-1) == labels).mean()

    return Program(params, (x, labels), loss, forward)


@program("U-Net block")
def unet_block(tiny, dtype):
    batch, size, width, groups, blocks = (2, 8, 16, 4, 1) if tiny else (16, 64, 256, 32, 3)
    w = _Weights()

    def block():
        std = (9 * width) ** -0.5
        kernels = dict(first=w(3, 3, width, width, std=std), second=w(3, 3, width, width, std=std))
        norms = {
            f"{k}{i}": f(width) for i in range(2) for k, f in (("s", jnp.ones), ("b", jnp.zeros))
        }
        return kernels | norms | dict(time=w(width, width))

    params = [block() for _ in range(blocks)]
    x, times = normal((batch, size, size, width), dtype), normal((batch, width), dtype, 1)

    def group_norm(x, scale, bias):
        h = x.astype(jnp.float32).reshape(batch, size * size, groups, width // groups)
        mean, variance = h.mean((1, 3), keepdims=True), h.var((1, 3), keepdims=True)
        h = ((h - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape)
        return (h * scale + bias).astype(dtype)

    def loss(params, x, times):
        target = x
        for p in cast(params, dtype):
            h = _convolution(jax.nn.silu(group_norm(x, p["s0"], p["b0"])), p["first"])
            h = h + (jax.nn.silu(times) @ p["time"])[:, None, None, :]
            h = _convolution(jax.nn.silu(group_norm(h, p["s1"], p["b1"])), p["second"])
            x = (x + h) / np.sqrt(2).astype(dtype)
        return jnp.square((x - target).astype(jnp.float32)).mean()

    return Program(params, (x, times), loss)


@program("moving average")
def moving_average(tiny, dtype):
    """The step of a student whose teacher is the moving average of its parameters."""
    rows, width, inner = (16, 32, 64) if tiny else (2048, 2048, 8192)
    w = _Weights()
    params = [dict(up=w(width, inner), down=w(inner, width)) for _ in range(1 if tiny else 3)]
    x, noise = normal((rows, width), dtype), normal((rows, width), dtype, 1)

    def net(params, x):
        for p in cast(params, dtype):
            x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
        return x / (jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True) + 1e-6)

    def loss(params, teacher, x, noise):
        target = lax.stop_gradient(net(teacher, x))
        teacher = jax.tree.map(lambda t, p: t + 0.01 * (p - t), teacher, params)
        similarity = (net(params, x + 0.1 * noise) * target).sum(-1)
        return (2 - 2 * similarity).mean(), lax.stop_gradient(teacher)

    def forward(params, teacher, x, noise):
        return net(jax.tree.map(lambda t, p: t + 0.01 * (p - t), teacher, params), x)

    return Program(params, (x, noise), loss, forward, jax.tree.map(jnp.copy, params))


@program("logistic regression")
def logistic_regression(tiny, dtype):
    rows, width = (64, 32) if tiny else (262144, 1024)
    params = dict(w=_Weights()(width, 1)[:, 0], b=jnp.zeros(()))
    x, y = normal((rows, width), dtype), tokens((rows,), 2).astype(jnp.float32)
    mean, std = jnp.zeros(width), jnp.ones(width)

    def loss(params, x, y, mean, std):
        z = ((x - mean) / std) @ params["w"] + params["b"]
        losses = jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z)))
        return losses.mean() + 1e-3 * jnp.vdot(params["w"], params["w"])

    def forward(params, x, y, mean, std):
        return jax.nn.sigmoid(((x - mean) / std) @ params["w"] + params["b"])

    return Program(params, (x, y, mean, std), loss, forward)


@program("contrastive loss")
def contrastive_loss(tiny, dtype):
    rows, width, out = (16, 32, 16) if tiny else (8192, 1024, 512)
    w = _Weights()
    params = dict(image=w(width, out), text=w(width, out), log_scale=jnp.log(10.0))
    images, texts = (normal((rows, width), dtype, seed) for seed in range(2))

    def normalized(x):
        x = x.astype(jnp.float32)
        return (x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12)).astype(dtype)

    def loss(params, images, texts):
        a = normalized(images @ params["image"].astype(dtype))
        b = normalized(texts @ params["text"].astype(dtype))
        logits = jnp.exp(params["log_scale"]) * (a @ b.T).astype(jnp.float32)
        labels = jnp.arange(rows)
        return (_label_losses(logits, labels) + _label_losses(logits.T, labels)).mean() / 2

    return Program(params, (images, texts), loss)


@program("focal loss")
def focal_loss(tiny, dtype):
    rows, width, classes = (64, 32, 5) if tiny else (131072, 256, 80)
    w = _Weights()
    params = dict(h=w(width, width), b=w(width), w=w(width, classes), c=w(classes))
    x, labels = normal((rows, width), dtype), tokens((rows,), classes + 1)

    def loss(params, x, labels, gamma=2.0, alpha=0.25):
        p = cast(params, dtype)
        h = jax.nn.relu(x @ p["h"] + p["b"])
        logits = (h @ p["w"] + p["c"]).astype(jnp.float32)
        target = jax.nn.one_hot(labels, classes)
        probability = jax.nn.sigmoid(logits)
        entropy = optax.sigmoid_binary_cross_entropy(logits, target)
        hit = probability * target + (1 - probability) * (1 - target)
        weight = (alpha * target + (1 - alpha) * (1 - target)) * (1 - hit) ** gamma
        return (weight * entropy).sum() / jnp.maximum((labels < classes).sum(), 1)

    return Program(params, (x, labels), loss)


@program("distillation")
def distillation(tiny, dtype):
    rows, width, classes = (16, 32, 50) if tiny else (8192, 768, 16384)
    w = _Weights()
    params = dict(w=w(width, classes), b=jnp.zeros(classes))
    teacher = dict(w=w(width, classes), b=w(classes))
    x, labels = normal((rows, width), dtype), tokens((rows,), classes)

    def loss(params, x, labels, teacher, temperature=2.0):
        student = (x @ params["w"].astype(dtype)).astype(jnp.float32) + params["b"]
        soft = (x @ teacher["w"].astype(dtype)).astype(jnp.float32) + teacher["b"]
        soft = lax.stop_gradient(jax.nn.softmax(soft / temperature))
        log_probabilities = jax.nn.log_softmax(student / temperature)
        divergence = (soft * (jnp.log(soft + 1e-9) - log_probabilities)).sum(-1)
        hard = _label_losses(student, labels)
        return (0.9 * temperature**2 * divergence + 0.1 * hard).mean()

    return Program(params, (x, labels, teacher), loss)


@program("RMS norm, reduction")
def rms_norm_reduction(tiny, dtype):
    rows, width = (16, 32) if tiny else (65536, 1024)
    w = _Weights()
    params = dict(w=w(width, width), scale=jnp.ones(width), value=w(width))
    x = normal((rows, width), dtype)

    def loss(params, x):
        h = x + jax.nn.silu(x @ params["w"].astype(dtype))
        h = _rms_norm(h, params["scale"]).astype(jnp.float32)
        values = (h * params["value"]).sum(-1)
        return jnp.square(values - 1).mean()

    return Program(params, (x,), loss)


@program("layer norm, sum")
def layer_norm_sum(tiny, dtype):
    batch, length, width = (2, 8, 32) if tiny else (128, 1024, 512)
    w = _Weights()
    params = dict(scale=jnp.ones(width), bias=w(width), w=w(width, width))
    x, y = normal((batch, length, width), dtype), normal((batch, width), seed=1)

    def forward(params, x, y):
        h = _layer_norm(x, params["scale"].astype(dtype), params["bias"].astype(dtype))
        return h.sum(1).astype(jnp.float32)

    def loss(params, x, y):
        h = jnp.tanh(x @ params["w"].astype(dtype))
        return jnp.square(forward(params, h, y) - y).mean()

    return Program(params, (x, y), loss, forward)


@program("mixture of experts")
def mixture_of_experts(tiny, dtype):
    rows, width, inner, experts = (32, 32, 64, 4) if tiny else (16384, 1024, 2048, 16)
    capacity = 2 * rows // experts
    w = _Weights()
    params = dict(
        router=w(width, experts), up=w(experts, width, inner), down=w(experts, inner, width)
    )
    x = normal((rows, width), dtype)

    def loss(params, x):
        p = cast(params, dtype)
        weights = jax.nn.softmax(x.astype(jnp.float32) @ params["router"])
        top, chosen = lax.top_k(weights, 2)
        top = top / top.sum(-1, keepdims=True)
        mask = jax.nn.one_hot(chosen, experts).sum(1)
        place = (jnp.cumsum(mask, 0) - 1).astype(jnp.int32)
        place = jnp.take_along_axis(place, chosen, 1)
        slots = jnp.where(place < capacity, chosen * capacity + place, experts * capacity)
        sent = jnp.zeros((experts * capacity, width), dtype)
        sent = sent.at[slots].set(x[:, None], mode="drop").reshape(experts, capacity, width)
        h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, p["up"]))
        h = jnp.einsum("ecf,efd->ecd", h, p["down"]).reshape(experts * capacity, width)
        received = h.at[slots].get(mode="fill", fill_value=0)
        y = x + (received * top[..., None].astype(dtype)).sum(1)
        balance = experts * (mask.mean(0) * weights.mean(0)).sum()
        return jnp.square(y.astype(jnp.float32)).mean() + 0.01 * balance

    return Program(params, (x,), loss)


@program("residual blocks")
def residual_blocks(tiny, dtype):
    batch, size, width = (2, 8, 16) if tiny else (64, 56, 256)
    inner = width // 4
    w = _Weights()

    def block():
        kernels = [w(1, 1, width, inner), w(3, 3, inner, inner, std=(9 * inner) ** -0.5)]
        kernels += [w(1, 1, inner, width)]
        return [dict(k=k, s=jnp.ones(k.shape[-1]), b=jnp.zeros(k.shape[-1])) for k in kernels]

    params = dict(blocks=[block() for _ in range(1 if tiny else 3)], out=w(width, 10))
    x, labels = normal((batch, size, size, width), dtype), tokens((batch,), 10)

    def loss(params, x, labels):
        def layer(x, p):
            return _batch_norm(_convolution(x, p["k"].astype(dtype)), p["s"], p["b"])

        for first, second, third in params["blocks"]:
            h = jax.nn.relu(layer(jax.nn.relu(layer(x, first)), second))
            x = jax.nn.relu(x + layer(h, third))
        logits = x.astype(jnp.float32).mean((1, 2)) @ params["out"]
        return _label_losses(logits, labels).mean()

    return Program(params, (x, labels), loss)


@program("convolution, pool")
def convolution_pool(tiny, dtype):
    """As in AlexNet."""
    batch, size, widths = (2, 16, (8, 16)) if tiny else (128, 112, (64, 192))
    w = _Weights()
    layers = zip((3, widths[0]), widths, strict=True)
    params = dict(
        layers=[dict(k=w(5, 5, a, b, std=(25 * a) ** -0.5), b=w(b, std=0.1)) for a, b in layers],
        out=w(widths[1], 10),
    )
    images, labels = normal((batch, size, size, 3)), tokens((batch,), 10)

    def response_norm(x):
        h = jnp.square(x.astype(jnp.float32))
        sums = lax.reduce_window(h, 0.0, lax.add, (1, 1, 1, 5), (1, 1, 1, 1), "SAME")
        return (x * (2.0 + 1e-4 * sums) ** -0.75).astype(dtype)

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")

    def loss(params, images, labels):
        x = images.astype(dtype)
        for p in params["layers"]:
            h = _convolution(x, p["k"].astype(dtype)) + p["b"].astype(dtype)
            x = pool(response_norm(jax.nn.relu(h)))
        logits = x.astype(jnp.float32).mean((1, 2)) @ params["out"]
        return _label_losses(logits, labels).mean()

    return Program(params, (images, labels), loss)
