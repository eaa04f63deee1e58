import jax
import jax_fastops as fo
import optax
from flax import linen as nn

WIDTH, TOKENS = 128, 1000


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = Block()(nn.Embed(TOKENS, WIDTH)(tokens))
        return nn.Dense(TOKENS)(nn.LayerNorm()(x))


def loss(params, tokens):
    logits = Model().apply(params, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def train(loss, steps=3):
    params, optimizer = start, optax.adam(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    values = []
    for _ in range(steps):
        params, state, value = step(params, state, tokens)
        values.append(round(float(value), 4))
    return values


tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, TOKENS)
start = Model().init(jax.random.key(0), tokens)
print(train(loss))
print(train(fo.autofuse(loss)))  # the one line
for found in fo.autofuse.report(loss)(start, tokens).replaced:
    print(found.pattern, found.shape)
