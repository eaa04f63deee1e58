"""`autofuse` of models that were not written here: losses, gradients, and the share replaced.

Each model says how many norms, softmaxes, losses and activations with a kernel it has.
"""

import functools
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autofuse_programs import X, Y
from harness.numerics import of_products

import jax_fastops as fo

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("native")]
KINDS = {"norm": "norm", "attention": "attention", "loss": "cross_entropy", "act": "relu|gelu|silu"}
RNG = np.random.default_rng(0)
IMAGES = jnp.asarray(RNG.standard_normal((4, 16, 16, 3)), jnp.float32)
CLASSES = jnp.asarray(RNG.integers(0, 10, 4))
TOKENS = jnp.asarray(RNG.integers(1, 50, (4, 12)))


def check(loss, parameters, tolerance=1e-4, /, **has):
    """Loss and gradients are equal within rounding, and 90% of the patterns are replaced."""
    report = fo.autofuse.report(loss)(parameters)
    found = {
        kind: sum(re.search(name, r.pattern) is not None for r in report.replaced)
        for kind, name in KINDS.items()
    }
    share = sum(min(found[kind], n) for kind, n in has.items()) / sum(has.values())
    assert share >= 0.9, f"{found} of {has}\n{report}"
    want = jax.jit(jax.value_and_grad(loss))(parameters)
    got = jax.jit(jax.value_and_grad(fo.autofuse(loss)))(parameters)
    np.testing.assert_allclose(
        got[0], want[0], rtol=of_products(1e-5) if tolerance < 0.01 else 0.02
    )
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t[1])]) for t in (got, want))
    assert np.linalg.norm(a - b) <= of_products(tolerance) * np.linalg.norm(b)


def label_loss(logits, labels):
    optax = pytest.importorskip("optax")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Flax ---------------------------------------------------------------------------------------------


NARROW = pytest.mark.parametrize("dtype", [None, "bfloat16"])


@NARROW
def test_linen_transformer(dtype):
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(2):
                h = linen.LayerNorm(dtype=dtype)(x)
                x = x + linen.MultiHeadDotProductAttention(4, dtype=dtype)(h)
                h = linen.Dense(80, dtype=dtype)(linen.RMSNorm(dtype=dtype)(x))
                x = x + linen.Dense(40, dtype=dtype)(linen.gelu(h))
            return linen.LayerNorm(use_bias=False, dtype=dtype)(x)

    model = Model()
    x = X if dtype is None else X.astype(dtype)
    variables = model.init(jax.random.key(0), x)

    def loss(variables):
        return jnp.sum(model.apply(variables, x) * Y)

    check(loss, variables, 0.05 if dtype else 1e-4, norm=5, attention=2, act=2)


def test_linen_decoder():
    """A language model as in Flax' lm1b: causal mask, mask of padding, tied embedding."""
    linen = pytest.importorskip("flax.linen")
    tokens = TOKENS.at[:, -2:].set(0)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            mask = linen.combine_masks(
                linen.make_causal_mask(tokens), linen.make_attention_mask(tokens > 0, tokens > 0)
            )
            embed = linen.Embed(50, 32)
            x = embed(tokens)
            for _ in range(2):
                h = linen.LayerNorm(dtype=jnp.float32)(x)
                x = x + linen.MultiHeadDotProductAttention(4, use_bias=False)(h, h, mask=mask)
                h = linen.relu(linen.Dense(64)(linen.LayerNorm()(x)))
                x = x + linen.Dense(32)(h)
            return embed.attend(linen.LayerNorm()(x)) / np.sqrt(32)

    model = Model()
    variables = model.init(jax.random.key(0), tokens)

    def loss(variables):
        logits = model.apply(variables, tokens)[:, :-1]
        one_hot = linen.activation.one_hot(tokens[:, 1:], 50)
        losses = -jnp.sum(one_hot * linen.log_softmax(logits), -1)
        weights = tokens[:, 1:] > 0
        return jnp.sum(losses * weights) / weights.sum()

    check(loss, variables, norm=5, attention=2, act=2, loss=1)


@NARROW
def test_linen_resnet(dtype):
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            norm = functools.partial(linen.BatchNorm, use_running_average=False, dtype=dtype)
            conv = functools.partial(linen.Conv, 8, (3, 3), dtype=dtype)
            x = linen.relu(norm()(conv()(x)))
            for _ in range(2):
                y = linen.relu(norm()(conv()(x)))
                x = linen.relu(x + norm()(conv()(y)))
            return linen.Dense(10, dtype=dtype)(x.mean((1, 2)))

    model = Model()
    variables = model.init(jax.random.key(0), IMAGES)

    def loss(parameters):
        given = {**variables, "params": parameters}
        logits, state = model.apply(given, IMAGES, mutable=["batch_stats"])
        return label_loss(logits, CLASSES) + sum(jnp.sum(s) for s in jax.tree.leaves(state))

    check(loss, variables["params"], 0.05 if dtype else 1e-3, norm=5, act=5, loss=1)


def test_nnx_transformer():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attend = nnx.MultiHeadAttention(4, 40, decode=False, rngs=rngs)
            self.norms = nnx.List([nnx.LayerNorm(40, rngs=rngs), nnx.RMSNorm(40, rngs=rngs)])
            self.up, self.down = nnx.Linear(40, 80, rngs=rngs), nnx.Linear(40, 40, rngs=rngs)

        def __call__(self, x):
            x = x + self.attend(self.norms[0](x))
            gate, up = jnp.split(self.up(self.norms[1](x)), 2, -1)
            return x + self.down(nnx.silu(gate) * up)

    graph, state = nnx.split([Block(nnx.Rngs(i)) for i in range(2)])

    def loss(state):
        x = X
        for block in nnx.merge(graph, state):
            x = block(x)
        return jnp.sum(x * Y)

    check(loss, state, norm=4, attention=2, act=2)


def test_nnx_modules_are_updated():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(40, rngs=rngs)
            self.dense = nnx.Linear(40, 40, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.drop(jax.nn.gelu(self.dense(nnx.relu(self.norm(x)))))

    def step(transform):
        model = Model(nnx.Rngs(0))

        def loss(model, x):
            return jnp.sum(model(x) ** 2)

        run = nnx.jit(nnx.value_and_grad(transform(loss)))
        results = [run(model, X + i) for i in range(2)]
        return results, nnx.state(model)

    want, got = step(lambda f: f), step(fo.autofuse)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    report = fo.autofuse.report(lambda m: m(X))(Model(nnx.Rngs(0)))
    assert {r.pattern for r in report.replaced} >= {"batch_norm + relu", "bias + gelu"}


# Haiku --------------------------------------------------------------------------------------------


def test_haiku_transformer():
    hk = pytest.importorskip("haiku")

    def net(x):
        for _ in range(2):
            attend = hk.MultiHeadAttention(4, 10, w_init=hk.initializers.VarianceScaling(1.0))
            x = hk.LayerNorm(-1, True, True)(x + attend(x, x, x))
            h = jax.nn.gelu(hk.Linear(80)(x))
            x = hk.LayerNorm(-1, True, True)(x + hk.Linear(40)(h))
        return hk.RMSNorm(-1)(x)

    model = hk.without_apply_rng(hk.transform(net))
    parameters = model.init(jax.random.key(0), X)
    check(lambda p: jnp.sum(model.apply(p, X) ** 3 * Y), parameters, norm=5, attention=2, act=2)


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_haiku_resnet(v2):
    """The blocks of ResNet-18, with fewer channels."""
    hk = pytest.importorskip("haiku")
    settings = dict(hk.nets.ResNet.CONFIGS[18], channels_per_group=(8, 8, 16, 16))
    settings |= dict(blocks_per_group=(1, 1, 1, 1), initial_conv_config=dict(output_channels=8))

    def net(x):
        return hk.nets.ResNet(num_classes=10, resnet_v2=v2, **settings)(x, is_training=True)

    model = hk.without_apply_rng(hk.transform_with_state(net))
    parameters, state = model.init(jax.random.key(0), IMAGES)

    def loss(parameters):
        return label_loss(model.apply(parameters, state, IMAGES)[0], CLASSES)

    check(loss, parameters, 1e-3, norm=9 if v2 else 12, act=9, loss=1)


# Equinox ------------------------------------------------------------------------------------------


def test_equinox_transformer():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    parts = (
        eqx.nn.MultiheadAttention(4, 40, key=keys[0]),
        eqx.nn.LayerNorm(40),
        eqx.nn.RMSNorm(40),
        eqx.nn.MLP(40, 40, 80, 1, activation=jax.nn.gelu, key=keys[1]),
    )
    parameters, static = eqx.partition(parts, eqx.is_array)

    def loss(parameters):
        attention, norm, other, dense = eqx.combine(parameters, static)

        def one(x):
            x = x + attention(*[jax.vmap(norm)(x)] * 3)
            return x + jax.vmap(dense)(jax.vmap(other)(x))

        return jnp.sum(jax.vmap(one)(X) ** 2)

    check(loss, parameters, norm=2, attention=1, act=1)


@NARROW
def test_equinox_language_model(dtype):
    """The head is a layer under `vmap`, so its product has the classes first."""
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 2)
    parts = eqx.nn.Embedding(50, 40, key=keys[0]), eqx.nn.RMSNorm(40)
    for use_bias in (False, True):
        head = eqx.nn.Linear(40, 50, use_bias, key=keys[1])
        parameters, static = eqx.partition((*parts, head), eqx.is_array)

        def loss(parameters):
            narrow = jax.tree.map(lambda p: p.astype(dtype), parameters) if dtype else parameters
            layers = eqx.combine(narrow, static)  # noqa: B023

            def one(x):
                for layer in layers:
                    x = jax.vmap(layer)(x)
                return x

            logits = jax.vmap(one)(TOKENS)[:, :-1].astype(jnp.float32)
            return label_loss(logits, TOKENS[:, 1:])

        check(loss, parameters, 0.05 if dtype else 1e-4, norm=1, loss=1)
        found = [r.pattern for r in fo.autofuse.report(loss)(parameters).replaced]
        assert "linear_cross_entropy" in found


def test_equinox_classifier():
    """An MLP with relu, and optax' loss."""
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(40, 10, 64, 3, key=jax.random.key(0))
    parameters, static = eqx.partition(mlp, eqx.is_array)

    def loss(parameters):
        logits = jax.vmap(eqx.combine(parameters, static))(X[:, 0])
        return label_loss(logits, CLASSES)

    check(loss, parameters, act=3, loss=1)


# Keras and JAX' own libraries ---------------------------------------------------------------------


@pytest.fixture
def keras():
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = "jax"
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras has another backend")
    return keras


def test_keras(keras):
    """A transformer's block and a classifier."""
    layers = keras.layers
    x = given = keras.Input((6, 40))
    h = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 10)(h, h)
    x = x + layers.Dense(40)(layers.Dense(80, "gelu")(layers.RMSNormalization()(x)))
    x = layers.BatchNormalization()(x)
    x = layers.Dense(32, "relu")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(given, layers.Dense(10)(x))
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fixed = [v.value for v in model.non_trainable_variables]

    def loss(parameters):
        logits, _ = model.stateless_call(parameters, fixed, X, training=True)
        return losses(CLASSES, logits)

    parameters = [v.value for v in model.trainable_variables]
    check(loss, parameters, norm=3, attention=1, act=2, loss=1)


def test_keras_resnet(keras):
    """Each norm takes the residual, the last one too, which comes after many operations."""
    layers = keras.layers

    def conv(x):
        return layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x))

    given = keras.Input((8, 8, 3))
    x = layers.MaxPooling2D(2)(layers.ReLU()(conv(given)))
    for _ in range(2):
        x = layers.ReLU()(layers.Add()([x, conv(layers.ReLU()(conv(x)))]))
    model = keras.Model(given, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    fixed = [v.value for v in model.non_trainable_variables]

    def loss(parameters):
        logits, _ = model.stateless_call(parameters, fixed, IMAGES[:, :8, :8], training=True)
        return label_loss(logits, CLASSES)

    parameters = [v.value for v in model.trainable_variables]
    check(loss, parameters, 1e-3, norm=5, act=5, loss=1)
    found = [r.pattern for r in fo.autofuse.report(loss)(parameters).replaced]
    assert found.count("batch_norm + residual + relu") == 2


def test_stax_resnet():
    from jax.example_libraries import stax

    main = stax.serial(stax.Conv(8, (3, 3), padding="SAME"), stax.BatchNorm(), stax.Relu)
    main = stax.serial(main, stax.Conv(8, (3, 3), padding="SAME"), stax.BatchNorm())
    block = stax.serial(
        stax.FanOut(2), stax.parallel(main, stax.Identity), stax.FanInSum, stax.Relu
    )
    stem = stax.serial(stax.Conv(8, (3, 3), padding="SAME"), stax.BatchNorm(), stax.Relu)
    init, apply = stax.serial(stem, block, stax.Flatten, stax.Dense(10), stax.LogSoftmax)
    _, parameters = init(jax.random.key(0), IMAGES.shape)

    def loss(parameters):
        one_hot = jax.nn.one_hot(CLASSES, 10)
        return -jnp.mean(jnp.sum(apply(parameters, IMAGES) * one_hot, axis=1))

    check(loss, parameters, 1e-3, norm=3, act=3, loss=1)


# Ours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bert_of_models(dtype):
    """All that the model by hand has: the program in jax.nn has as many calls of each op."""
    bert = pytest.importorskip("jax_fastops.models.bert")
    config = bert.Config(
        **{"vocab_size": 50, "hidden_size": 32, "layers": 2, "heads": 4, "intermediate_size": 64},
        **{"dropout": 0.0, "attention_dropout": 0.0, "dtype": dtype},
    )
    parameters = bert.init(jax.random.key(0), config, mlm=True)
    del parameters["pooler"]

    def loss(parameters, ops=bert.PLAIN):
        mask = TOKENS > 9
        hidden, _ = bert.apply(parameters, TOKENS, config, mask=mask, ops=ops)
        return bert.masked_lm_loss(parameters, hidden, TOKENS, config, where=mask, ops=ops)

    tolerance = 0.05 if dtype == "bfloat16" else 1e-4
    check(loss, parameters, tolerance, norm=6, attention=2, act=3, loss=1)
    found = fo.explain(fo.autofuse(loss))(parameters).calls
    wanted = fo.explain(functools.partial(loss, ops=bert.FASTOPS))(parameters).calls
    moves = "split_qkv_heads", "transpose"  # attention reads and writes heads in their order
    ours = [c.op for c in wanted if c.op not in moves]
    # Under "native", autofuse leaves products to XLA.
    assert [call.op for call in found] == ["bias_act" if op == "dense_act" else op for op in ours]


def test_decoder_of_models():
    """All that the model by hand has, except that heads are split without rotary embedding."""
    decoder = pytest.importorskip("jax_fastops.models.decoder")
    parameters = decoder.init(jax.random.key(0), decoder.SMALL)

    def loss(parameters, ops=decoder.PLAIN):
        return decoder.loss(parameters, TOKENS, decoder.SMALL, ops=ops)

    check(loss, parameters, norm=5, attention=2, act=2, loss=1)
    found = fo.explain(fo.autofuse(loss))(parameters).calls
    wanted = fo.explain(functools.partial(loss, ops=decoder.FASTOPS))(parameters).calls
    split = "split_qkv_heads_rotary"
    assert [call.op for call in found] == [call.op for call in wanted if call.op != split]
