import jax
import jax.numpy as jnp
import jax_fastops as fo

WIDTH, TOKENS, HEADS = 128, 1000, 4


def init(key):
    def weights(key, *shape):
        return shape[0] ** -0.5 * jax.random.normal(key, shape)

    keys = jax.random.split(key, 6)
    return {
        "embed": weights(keys[0], TOKENS, WIDTH),
        "qkv": weights(keys[1], WIDTH, 3 * WIDTH),
        "out": weights(keys[2], WIDTH, WIDTH),
        "up": weights(keys[3], WIDTH, 4 * WIDTH),
        "up_bias": jnp.zeros(4 * WIDTH),
        "down": weights(keys[4], 4 * WIDTH, WIDTH),
        "head": weights(keys[5], WIDTH, TOKENS),
        "norms": jnp.ones((3, WIDTH)),
    }


def norm(scale, x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def attention(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]


def model(p, tokens):
    x = p["embed"][tokens]
    x = x + attention(p, norm(p["norms"][0], x))
    x = x + jax.nn.gelu(norm(p["norms"][1], x) @ p["up"] + p["up_bias"]) @ p["down"]
    return norm(p["norms"][2], x) @ p["head"]


def loss(p, tokens):
    log_p = jax.nn.log_softmax(model(p, tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


def train(loss, steps=3):
    p = init(jax.random.key(0))

    @jax.jit
    def step(p, tokens):
        value, gradients = jax.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients), value

    values = []
    for _ in range(steps):
        p, value = step(p, tokens)
        values.append(round(float(value), 4))
    return values


tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, TOKENS)
print(train(loss))
print(train(fo.autofuse(loss)))  # the one line
for found in fo.autofuse.report(loss)(init(jax.random.key(0)), tokens).replaced:
    print(found.pattern, found.shape)
