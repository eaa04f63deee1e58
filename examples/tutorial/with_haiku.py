import haiku as hk
import jax
import jax_fastops as fo
import optax

WIDTH, TOKENS = 128, 1000


def model(tokens):
    def norm(x):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    x = hk.Embed(TOKENS, WIDTH)(tokens)
    h = norm(x)
    attention = hk.MultiHeadAttention(
        4, WIDTH // 4, w_init=hk.initializers.VarianceScaling()
    )
    x = x + attention(h, h, h)
    x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(norm(x))))
    return hk.Linear(TOKENS)(norm(x))


network = hk.without_apply_rng(hk.transform(model))


def loss(params, tokens):
    logits = network.apply(params, tokens[:, :-1])
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
start = network.init(jax.random.key(0), tokens)
print(train(loss))
print(train(fo.autofuse(loss)))  # the one line
for found in fo.autofuse.report(loss)(start, tokens).replaced:
    print(found.pattern, found.shape)
