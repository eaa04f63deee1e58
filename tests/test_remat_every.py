"""``Config.remat_every``: the same gradients as without it, and one input kept for each group."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.numerics import assert_close_in_norm

from jax_fastops.models import bert, decoder

pytestmark = pytest.mark.usefixtures("exact_products", "looped_rounds")

LAYERS, BATCH, LENGTH = 3, 2, 16
MODELS = {
    "bert": (bert, dataclasses.replace(bert.SMALL, layers=LAYERS, hidden_size=32, dropout=0.1)),
    "decoder": (decoder, dataclasses.replace(decoder.SMALL, layers=LAYERS, hidden_size=32)),
}
MODELS["kinds"] = (
    decoder,
    dataclasses.replace(
        MODELS["decoder"][1], sliding_window=3, full_layers=(1,), unrotated_layers=(2,)
    ),
)
TOKENS = np.random.default_rng(0).integers(0, 128, (BATCH, LENGTH), np.int32)
KEY = jax.random.key(3, impl="rbg")


@functools.cache
def start(name: str) -> dict:
    model, config = MODELS[name]
    params = model.init(jax.random.key(0), dataclasses.replace(config, init_range=0.2))
    params.pop("pooler", None)  # the loss does not use it
    return params


def loss(params, name: str, config):
    if MODELS[name][0] is decoder:
        return decoder.loss(params, TOKENS, config)
    hidden, _ = bert.apply(params, TOKENS, config, key=KEY)
    return jnp.mean(jnp.square(hidden) * jnp.arange(32, dtype=jnp.float32))


@functools.cache
def wanted(name: str):
    value, grads = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))(
        start(name), name, MODELS[name][1]
    )
    return value, bert.stack_layers(grads)


@pytest.mark.jax
@pytest.mark.parametrize(
    "name, scan",
    [(n, scan) for n in MODELS for scan in (False, True) if not (scan and n == "kinds")],
)
def test_groups(native, name, scan):
    """Groups of two layers and of one."""
    plain = dataclasses.replace(MODELS[name][1], scan=scan)
    params = bert.stack_layers(start(name)) if scan else start(name)

    def kept(config):
        pullback = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, name, config), p)[1], params)
        return sum(math.prod(a.shape) for a in jax.tree.leaves(pullback))

    parameters = sum(a.size for a in jax.tree.leaves(params))
    once, twice = (
        dataclasses.replace(plain, remat_every=2, remat=remat) for remat in (False, True)
    )
    # Two inputs of groups, and what the embeddings and the loss keep.
    assert kept(once) - parameters < (2 + 8) * BATCH * LENGTH * 32 < kept(plain) - parameters
    value, grads = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))(params, name, twice)
    assert_close_in_norm((value, grads if scan else bert.stack_layers(grads)), wanted(name), 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_errors(name):
    config = MODELS[name][1]
    assert dataclasses.replace(config, remat_every=np.int64(2)).remat_every == 2
    with pytest.raises(ValueError, match="remat_every is 0; it must be 1 or more"):
        dataclasses.replace(config, remat_every=0)
    with pytest.raises(TypeError, match="remat_every is True; it must be an integer"):
        dataclasses.replace(config, remat_every=True)
