import equinox as eqx
import jax
import jax_fastops as fo
import optax

WIDTH, TOKENS = 128, 1000


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(h)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    block: Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(TOKENS, WIDTH, key=keys[0])
        self.block, self.norm = Block(keys[1]), eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, TOKENS, key=keys[2])

    def __call__(self, tokens):
        x = self.block(jax.vmap(self.embed)(tokens))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def train(loss, steps=3):
    model, optimizer = Model(jax.random.key(0)), optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, tokens):
        value, gradients = eqx.filter_value_and_grad(loss)(model, tokens)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(steps):
        model, state, value = step(model, state, tokens)
        values.append(round(float(value), 4))
    return values


tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, TOKENS)
print(train(loss))
print(train(fo.autofuse(loss)))  # the one line
for found in fo.autofuse.report(loss)(Model(jax.random.key(0)), tokens).replaced:
    print(found.pattern, found.shape)
