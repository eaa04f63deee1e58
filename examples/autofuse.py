"""A GPT in plain JAX, trained as it is and by `autofuse`: the same losses, and what is replaced.

    python examples/autofuse.py

The model knows nothing of jax_fastops. In `main`, one line fuses its loss. Its arrays are small, so
that it runs for seconds on a CPU. On a GPU, `"auto"` leaves such small arrays to XLA; there, set
JAX_FASTOPS_IMPLEMENTATION=native to see the kernels.
"""

import argparse

import jax
import jax.numpy as jnp
import jax_fastops as fo
import optax

# ---- the model, in plain JAX ---------------------------------------------------------------------

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


# ---- training ------------------------------------------------------------------------------------


def batch(key):
    """Sequences that count up by 1, 2 or 3."""
    keys = jax.random.split(key)
    start = jax.random.randint(keys[0], (8, 1), 0, VOCABULARY)
    step = jax.random.randint(keys[1], (8, 1), 1, 4)
    return (start + step * jnp.arange(LENGTH + 1)) % VOCABULARY


def train(loss, steps):
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(p, state, text):
        value, gradients = jax.value_and_grad(loss)(p, text)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(p, updates), state, value

    p, losses = init(jax.random.key(0)), []
    state = optimizer.init(p)
    for key in jax.random.split(jax.random.key(1), steps):
        p, state, value = step(p, state, batch(key))
        losses.append(float(value))
    return losses


def main():
    parser = argparse.ArgumentParser(description="Trains a GPT with and without autofuse.")
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    plain = train(loss, steps)
    fused = train(fo.autofuse(loss), steps)  # the one line
    report = fo.autofuse.report(loss)(init(jax.random.key(0)), batch(jax.random.key(1)))
    print("step  loss    with autofuse")
    for i in sorted({*range(0, steps, 10), steps - 1}):
        print(f"{i:4}  {plain[i]:.4f}  {fused[i]:.4f}")
    print(f"\n{report}")


if __name__ == "__main__":
    main()
