"""Models trained as they are and by `autofuse`: the same losses, and what is replaced.

    python examples/autofuse.py --models gpt resnet transformer

A GPT in plain JAX, a ResNet of Flax's layers, and a transformer of Haiku's. They know nothing of
jax_fastops. In `main`, one line fuses their losses. The arrays are small, so that this runs for
seconds on a CPU. On a GPU, `"auto"` leaves such small arrays to XLA; there, set
JAX_FASTOPS_IMPLEMENTATION=native to see the kernels.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import jax_fastops as fo
import optax

# ---- a GPT in plain JAX --------------------------------------------------------------------------

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 64, 4, 2, 65, 64


def init(key):
    def weights(key, *shape):
        return 0.02 * jax.random.normal(key, shape)

    def norm():
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def block(key):
        keys = jax.random.split(key, 4)
        return {
            "attention": norm(),
            "qkv": weights(keys[0], WIDTH, 3 * WIDTH),
            "out": weights(keys[1], WIDTH, WIDTH),
            "mlp": norm(),
            "up": {"w": weights(keys[2], WIDTH, 4 * WIDTH), "b": jnp.zeros(4 * WIDTH)},
            "down": {"w": weights(keys[3], 4 * WIDTH, WIDTH), "b": jnp.zeros(WIDTH)},
        }

    keys = jax.random.split(key, LAYERS + 2)
    return {
        "tokens": weights(keys[0], VOCABULARY, WIDTH),
        "positions": weights(keys[1], LENGTH, WIDTH),
        "blocks": [block(k) for k in keys[2:]],
        "final": norm(),
    }


def layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["bias"]


def attention(p, x):
    batch, length, _ = x.shape
    qkv = (x @ p["qkv"]).reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
    q, k, v = qkv
    scores = q @ k.mT / jnp.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["out"]


def logits(p, tokens):
    x = p["tokens"][tokens] + p["positions"][: tokens.shape[1]]
    for block in p["blocks"]:
        x = x + attention(block, layer_norm(block["attention"], x))
        h = jax.nn.gelu(layer_norm(block["mlp"], x) @ block["up"]["w"] + block["up"]["b"])
        x = x + h @ block["down"]["w"] + block["down"]["b"]
    return layer_norm(p["final"], x) @ p["tokens"].T


def loss(p, text):
    log_probabilities = jax.nn.log_softmax(logits(p, text[:, :-1]))
    return -jnp.take_along_axis(log_probabilities, text[:, 1:, None], -1).mean()


def batch(key):
    """Sequences that count up by 1, 2 or 3."""
    keys = jax.random.split(key)
    start = jax.random.randint(keys[0], (8, 1), 0, VOCABULARY)
    step = jax.random.randint(keys[1], (8, 1), 1, 4)
    return (start + step * jnp.arange(LENGTH + 1)) % VOCABULARY


def gpt():
    return init(jax.random.key(0)), lambda p, key: loss(p, batch(key))


# ---- a ResNet of Flax's layers -------------------------------------------------------------------


def resnet():
    from flax import linen as nn

    norm = functools.partial(nn.BatchNorm, use_running_average=False)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
            for channels in (16, 32):
                y = nn.relu(norm()(nn.Conv(channels, (3, 3), use_bias=False)(x)))
                y = norm()(nn.Conv(channels, (3, 3), use_bias=False)(y))
                x = x if x.shape == y.shape else norm()(nn.Conv(channels, (1, 1))(x))
                x = nn.relu(x + y)
            return nn.Dense(4)(x.mean((1, 2)))

    def loss(p, key):
        """Which quarter of an image is bright?"""
        keys = jax.random.split(key)
        labels = jax.random.randint(keys[0], (16,), 0, 4)
        bright = jax.nn.one_hot(labels, 4).reshape(16, 2, 2, 1).repeat(4, 1).repeat(4, 2)
        images = bright + jax.random.normal(keys[1], (16, 8, 8, 3))
        logits, _ = model.apply({**variables, "params": p}, images, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    return variables["params"], loss


# ---- a transformer of Haiku's layers -------------------------------------------------------------


def transformer():
    import haiku as hk

    scale = hk.initializers.VarianceScaling(1.0)

    def net(tokens):
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(LAYERS):
            attend = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=scale)
            x = hk.LayerNorm(-1, True, True)(x + attend(x, x, x))
            h = jax.nn.gelu(hk.Linear(4 * WIDTH)(x))
            x = hk.LayerNorm(-1, True, True)(x + hk.Linear(WIDTH)(h))
        return hk.Linear(VOCABULARY)(x.mean(1))

    def loss(p, key):
        """Which token comes next?"""
        text = batch(key)
        return optax.softmax_cross_entropy_with_integer_labels(
            model.apply(p, text[:, :4]), text[:, 4]
        ).mean()

    model = hk.without_apply_rng(hk.transform(net))
    return model.init(jax.random.key(0), jnp.zeros((1, 4), int)), loss


# ---- training ------------------------------------------------------------------------------------

MODELS = {"gpt": gpt, "resnet": resnet, "transformer": transformer}


def train(loss, p, steps):
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(p, state, key):
        value, gradients = jax.value_and_grad(loss)(p, key)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(p, updates), state, value

    state, losses = optimizer.init(p), []
    for key in jax.random.split(jax.random.key(1), steps):
        p, state, value = step(p, state, key)
        losses.append(float(value))
    return losses


def main():
    parser = argparse.ArgumentParser(description="Trains models with and without autofuse.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    for name in options.models:
        try:
            parameters, loss = MODELS[name]()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        plain = train(loss, parameters, options.steps)
        fused = train(fo.autofuse(loss), parameters, options.steps)  # the one line
        print(f"{name}\nstep  loss    with autofuse")
        for i in sorted({*range(0, options.steps, 10), options.steps - 1}):
            print(f"{i:4}  {plain[i]:.4f}  {fused[i]:.4f}")
        print(f"\n{fo.autofuse.report(loss)(parameters, jax.random.key(1))}\n")


if __name__ == "__main__":
    main()
