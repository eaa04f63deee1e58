import jax
import jax_fastops as fo
import optax
from flax import nnx

WIDTH, TOKENS = 128, 1000


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.block, self.norm = Block(rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.block(self.embed(tokens))))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def train(loss, steps=3):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        value, gradients = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, gradients)
        return value

    return [round(float(step(model, optimizer, tokens)), 4) for _ in range(steps)]


tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, TOKENS)
print(train(loss))
print(train(fo.autofuse(loss)))  # the one line
for found in fo.autofuse.report(loss)(Model(nnx.Rngs(0)), tokens).replaced:
    print(found.pattern, found.shape)
