"""A small ResNet of ``jax_fastops.models`` on the digits; its batch norms are an argument."""

import jax
from jax_fastops.models import resnet

import saved
from train import Model

SIDE = 8  # pixels
CONFIG = resnet.SMALL  # three blocks, 16 to 64 channels, in float32


def images(x):
    """Rows of pixels as ``[n, height, width, channels]``."""
    return x.reshape(-1, SIDE, SIDE, 1)


def model(batch_norm: resnet.BatchNorm) -> Model:
    """The network with these batch norms, which include the additions and the ReLUs."""

    def train(params, statistics, x, batch_norm=batch_norm):
        return resnet.apply(
            params, statistics, images(x), CONFIG, train=True, batch_norm=batch_norm
        )

    def infer(params, statistics, x):
        return resnet.apply(
            params, statistics, images(x), CONFIG, train=False, batch_norm=batch_norm
        )[0]

    def kept(params, statistics, x):
        return saved.by_functions(
            batch_norm,
            lambda *functions: train(params, statistics, x, resnet.BatchNorm(*functions)),
        )

    return Model(
        init=lambda seed: jax.jit(resnet.init, static_argnums=1)(jax.random.key(seed), CONFIG),
        train=train,
        infer=infer,
        kept=kept,
    )
