"""ResNet-18 and ResNet-50 in plain functions. Images are NHWC.

``init`` makes parameters and running statistics, pytrees of arrays. ``apply`` maps images to
logits. Every batch norm is one call that includes the ReLU, or the residual and the ReLU, after it.
The batch norm of the stem may run after the max pooling (``BatchNorm.statistics``). The functions
that compute all this are an argument, so that a training on ``jax_fastops`` and one in plain JAX
differ in nothing else::

    config = resnet.RESNET50
    params, statistics = resnet.init(jax.random.key(0), config)
    logits, statistics = resnet.apply(params, statistics, images, config, train=True)

An argument of another type or dtype raises ``TypeError``, another shape or value ``ValueError``.
The examples need ``import jax, jax.numpy as jnp`` and ``from jax_fastops.models import resnet``.

The network is that of He et al., "Deep Residual Learning for Image Recognition", with the stride of
a bottleneck in its 3x3 convolution ("v1.5"). Names and paddings are torchvision's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jax_fastops as fo
from jax_fastops.models._checks import Checks
from jax_fastops.models._parameters import keys_like, norm, product
from jax_fastops.models._plain import (
    IMAGE_WINDOWS,
    plain_batch_norm,
    plain_batch_norm_inference,
    plain_max_pool,
)
from jax_fastops.models._products import accumulator_dtype, biased

__all__ = [
    "FASTOPS",
    "PLAIN",
    "RESNET18",
    "RESNET50",
    "SMALL",
    "BatchNorm",
    "Config",
    "apply",
    "init",
    "max_pool",
    "plain_batch_norm",
    "plain_batch_norm_inference",
    "plain_max_pool",
    "shapes",
]

# The window sizes of a block's convolutions. The first 3x3 convolution has the block's stride.
_SIZES = {"basic": (3, 3), "bottleneck": (1, 3, 1)}
_EXPANSION = {"basic": 1, "bottleneck": 4}
_CHECK = Checks("resnet")


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a ResNet. Hashable, for a static argument of ``jax.jit``.

    Attributes:
      stages: the number of blocks in each stage. Every stage except the first halves height and
        width and doubles the channels.
      block: ``"basic"`` (3x3, 3x3) or ``"bottleneck"`` (1x1, 3x3, 1x1 to four times the channels).
      width: channels of the stem and of the first stage's inner convolutions.
      classes: the number of logits.
      channels: channels of an image.
      stem: ``"imagenet"``: a 7x7 convolution of stride 2 and a 3x3 max pooling of stride 2.
        ``"small"``: a 3x3 convolution of stride 1, for images of up to 32x32.
      dtype: of convolutions and activations: ``"bfloat16"``, ``"float16"``, ``"float32"`` or
        ``"float64"``. Parameters and statistics are float32.
      momentum: the weight of the old running statistic in an update.
      eps: added to variances.
      zero_init: whether the scale of a block's last batch norm starts as zeros, so that the block
        starts as its shortcut (Goyal et al., 2017), or as ones.
      remat: the number of blocks, counted from the first, whose inner batch norms are recomputed in
        the backward from their inputs and statistics. The gradients of the next convolutions need
        these results. Recomputing saves their bytes, and costs one pass that reads and writes as
        many. A number larger than that of the blocks means all blocks. Without ``BatchNorm.again``
        it has no effect.

    Example:
      >>> resnet.Config((3, 4, 6, 3), "bottleneck").dtype
      'bfloat16'
    """

    stages: tuple[int, ...]
    block: str
    width: int = 64
    classes: int = 1000
    channels: int = 3
    stem: str = "imagenet"
    dtype: str = "bfloat16"
    momentum: float = 0.9
    eps: float = 1e-5
    zero_init: bool = True
    remat: int = 0

    def __post_init__(self) -> None:
        try:
            stages = tuple(self.stages)
        except TypeError:
            raise TypeError(
                f"resnet: stages is {self.stages!r}; it must be a sequence of integers"
            ) from None
        # Canonical values: a list is not hashable, and a NumPy dtype does not equal its name.
        set_ = functools.partial(object.__setattr__, self)
        stages = tuple(_CHECK.integer(f"stages[{i}]", n, 1) for i, n in enumerate(stages))
        set_("stages", stages)
        if not stages:
            raise ValueError("resnet: stages is empty; there must be one stage or more")
        for name, least in dict(width=1, classes=1, channels=1, remat=0).items():
            set_(name, _CHECK.integer(name, getattr(self, name), least))
        _CHECK.choice("block", self.block, tuple(_SIZES))
        _CHECK.choice("stem", self.stem, ("imagenet", "small"))
        set_("dtype", _CHECK.dtype(self.dtype))
        for name in ("eps", "momentum"):
            set_(name, _CHECK.number(name, getattr(self, name)))
        if math.isnan(self.eps):
            raise ValueError("resnet: eps is nan; it must be a number")
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"resnet: momentum is {self.momentum!r}; it must be from 0 to 1")


#: ResNet-18.
RESNET18 = Config((2, 2, 2, 2), "basic")
#: ResNet-50. Two of its 16 blocks are recomputed, so that a training step needs no more memory
#: than in plain JAX.
RESNET50 = Config((3, 4, 6, 3), "bottleneck", remat=2)
#: A network for small images, such as handwritten digits. It trains on a CPU in seconds.
SMALL = Config((1, 1, 1), "basic", width=16, classes=10, channels=1, stem="small", dtype="float32")


def max_pool(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """:func:`plain_max_pool` by :func:`jax_fastops.max_pool`, which keeps one byte per maximum.

    Args:
      x: array ``[n, h, w, c]`` of a floating dtype.
      scale: array ``[c]`` of a floating dtype, or ``None``: the factor by which a later batch norm
        multiplies the result. Where it is negative, the minima are pooled, because the factor turns
        them into maxima.

    Example:
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> resnet.max_pool(x)[0, :, :, 0].tolist()
      [[5.0, 7.0], [13.0, 15.0]]
    """
    given = {"x": x} | ({} if scale is None else {"scale": scale})
    for name, array in given.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"max_pool: {name} has dtype {dtype}; it must be an array of a floating dtype"
            )
    if x.ndim != 4:
        raise ValueError(f"max_pool: x has shape {x.shape}; it must be [n, h, w, c]")
    if scale is not None and scale.shape != x.shape[3:]:
        raise ValueError(
            f"max_pool: scale has shape {scale.shape}; it must be {x.shape[3:]}, axis 3 of x"
        )
    return fo.max_pool(x, *IMAGE_WINDOWS, scale=scale)


class BatchNorm(NamedTuple):
    """The functions in which two implementations of the model differ.

    Attributes:
      training: like :func:`jax_fastops.batch_norm`.
      inference: like :func:`jax_fastops.batch_norm_inference`.
      max_pool: like :func:`plain_max_pool`, which is the default. It gets a ``scale`` only if
        ``statistics`` is given.
      again: like :func:`jax_fastops.batch_norm_inference`. It recomputes a result of ``training``
        from its statistics, up to rounding, for ``Config.remat``. With ``None``, as for plain JAX,
        all results are kept.
      statistics: like :func:`jax_fastops.batch_norm_statistics`, or ``None``. If given, the stem
        pools before it normalizes: it calls this function, then the max pooling, then
        ``inference`` on a quarter of the elements. Batch norm is monotonic per channel, so the
        pooling selects the same elements (minima, where the scale is negative). If the normalized
        values are equal (in 16 bits, or with a scale of 0), the gradient goes to the largest input
        instead of the first.

    Example:
      >>> resnet.PLAIN.again is None
      True
    """

    training: Callable
    inference: Callable
    max_pool: Callable = plain_max_pool
    again: Callable | None = None
    statistics: Callable | None = None


#: The batch norms of this package, and :func:`max_pool`.
FASTOPS = BatchNorm(
    fo.batch_norm,
    fo.batch_norm_inference,
    max_pool=max_pool,
    again=fo.batch_norm_inference,
    statistics=fo.batch_norm_statistics,
)
#: The same in plain JAX.
PLAIN = BatchNorm(plain_batch_norm, plain_batch_norm_inference)


def shapes(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes and dtypes of parameters and running statistics, as ``jax.ShapeDtypeStruct``.

    Returns:
      ``(params, statistics)``. ``params`` has ``"conv1"`` and ``"bn1"`` of the stem, a list of
      blocks in each of ``"layer1"``, ``"layer2"``, ..., and ``"fc"``. A block has ``"conv1"``,
      ``"bn1"``, ``"conv2"``, ... and, if its shape changes, a ``"downsample"`` with ``"conv"`` and
      ``"bn"``. A convolution is ``{"kernel": [height, width, in, out]}``, a batch norm ``{"scale":
      [c], "bias": [c]}``, and ``"fc"`` is ``{"kernel": [in, classes], "bias": [classes]}``.
      ``statistics`` has only the batch norms, each ``{"mean": [c], "var": [c]}``. All are float32.

    Example:
      >>> params, statistics = resnet.shapes(resnet.SMALL)
      >>> params["conv1"]["kernel"].shape
      (3, 3, 1, 16)
    """
    _CHECK.type("config", config, Config, "a Config")
    size = 7 if config.stem == "imagenet" else 3
    params: dict = {
        "conv1": product(size, size, config.channels, config.width, bias=False),
        "bn1": norm(config.width),
    }
    n = config.width
    for stage, blocks in enumerate(config.stages):
        params[f"layer{stage + 1}"] = layer = []
        for index in range(blocks):
            block, n = _block_shapes(config, n, config.width << stage, _stride(stage, index))
            layer.append(block)
    params["fc"] = product(n, config.classes)
    return params, _statistics_shapes(params)


def _stride(stage: int, index: int) -> int:
    """The stride of the block with this index in a stage."""
    return 2 if stage > 0 and index == 0 else 1


def _block_shapes(config: Config, n_in: int, n_inner: int, stride: int) -> tuple[dict, int]:
    """A block's parameters, and the number of its output channels."""
    sizes, n_out = _SIZES[config.block], n_inner * _EXPANSION[config.block]
    block: dict = {}
    n = n_in
    for k, size in enumerate(sizes, 1):
        n_next = n_out if k == len(sizes) else n_inner
        block[f"conv{k}"] = product(size, size, n, n_next, bias=False)
        block[f"bn{k}"] = norm(n_next)
        n = n_next
    if stride != 1 or n_in != n_out:
        conv = product(1, 1, n_in, n_out, bias=False)
        block["downsample"] = {"conv": conv, "bn": norm(n_out)}
    return block, n_out


def _statistics_shapes(params: Any) -> Any:
    """The parameters' tree reduced to its batch norms, with statistics in their place."""
    if isinstance(params, list):
        return [_statistics_shapes(block) for block in params]
    if not isinstance(params, dict):
        return None
    if "scale" in params:
        return {"mean": params["scale"], "var": params["scale"]}
    inner = {name: _statistics_shapes(part) for name, part in params.items()}
    return {name: part for name, part in inner.items() if part} or None


def init(key: ArrayLike, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Initializes parameters and running statistics, from a JAX random key.

    They have the shapes that :func:`shapes` gives. Convolutions are normal with variance
    ``2 / (height * width * out)`` (He et al., 2015, by outputs). The kernel of ``"fc"`` is normal
    with variance ``1 / in``. Scales and running variances are one (see also ``Config.zero_init``),
    and everything else is zero.

    Example:
      >>> params, statistics = resnet.init(jax.random.key(0), resnet.SMALL)
      >>> params["fc"]["kernel"].shape
      (64, 10)
    """
    _CHECK.key(key, optional=False)
    params, statistics = shapes(config)
    last = f"bn{len(_SIZES[config.block])}"

    def new(path, leaf, key):
        *outer, name = (getattr(entry, "key", None) for entry in path)
        if name == "kernel":
            *window, n_in, n_out = leaf.shape
            variance = 2 / (math.prod(window) * n_out) if window else 1 / n_in
            return jax.random.normal(key, leaf.shape, leaf.dtype) * math.sqrt(variance)
        ones = name == "scale" and not (config.zero_init and outer[-1] == last)
        return jnp.full(leaf.shape, float(ones), leaf.dtype)

    def running(path, leaf):
        return jnp.full(leaf.shape, float(path[-1].key == "var"), leaf.dtype)

    params = jax.tree.map_with_path(new, params, keys_like(key, params))
    return params, jax.tree.map_with_path(running, statistics)


def apply(
    params: dict[str, Any],
    statistics: dict[str, Any],
    images: ArrayLike,
    config: Config,
    *,
    train: bool,
    batch_norm: BatchNorm = FASTOPS,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """Computes the logits of a batch of images.

    Args:
      params: parameters, as from :func:`init`.
      statistics: running statistics, as from :func:`init`.
      images: array ``[n, height, width, channels]`` of a floating dtype. It is cast to
        ``config.dtype``.
      config: the :class:`Config` of parameters and statistics.
      train: whether batch norms use this batch's statistics and update the running ones, or use
        the running ones.
      batch_norm: the batch norms and the max pooling: ``FASTOPS``, ``PLAIN``, or another
        :class:`BatchNorm`.
      axis_name: in training, name of a mapped axis (of ``jax.shard_map`` or ``jax.vmap``), or a
        tuple of names, over which the batch is distributed.

    Returns:
      ``(logits, statistics)``: logits ``[n, classes]`` in float32 (float64 if ``config.dtype`` is
      float64), and the new running statistics, ``momentum * old + (1 - momentum) * batch`` with the
      biased variance of the batch, without gradients. If ``train`` is false, the old statistics.

    Sharding: under ``jax.jit`` over the images' first axis, with replicated parameters and
    statistics. The statistics are those of the whole batch.

    Example:
      >>> params, statistics = resnet.init(jax.random.key(0), resnet.SMALL)
      >>> images = jnp.ones((2, 8, 8, 1))
      >>> logits, _ = resnet.apply(params, statistics, images, resnet.SMALL, train=False)
      >>> logits.shape
      (2, 10)
    """
    _check(params, statistics, images, config, batch_norm)

    def updated(running, mean, var):
        def new(old, batch):
            average = config.momentum * old.astype(batch.dtype) + (1 - config.momentum) * batch
            return average.astype(old.dtype)

        return jax.tree.map(new, running, jax.lax.stop_gradient({"mean": mean, "var": var}))

    def norm(x, params, statistics, residual=None, activation="relu", fanout=False):
        options = dict(eps=config.eps, residual=residual, activation=activation)
        scale, bias = params["scale"], params["bias"]
        if not train:
            made_of = (x, statistics["mean"], statistics["var"], scale, bias)
            y = batch_norm.inference(*made_of, **options)
            return (y, y) if fanout else y, statistics, made_of
        y, mean, var = batch_norm.training(
            x, scale, bias, axis_name=axis_name, fanout=fanout, **options
        )
        return y, updated(statistics, mean, var), (x, mean, var, scale, bias)

    def norm_and_pool(x, params, running):
        if batch_norm.statistics is None:
            y, running, _ = norm(x, params, running)
            return batch_norm.max_pool(y), running
        mean, var = running["mean"], running["var"]
        if train:
            mean, var = batch_norm.statistics(x, axis_name=axis_name)
            running = updated(running, mean, var)
        scale, bias = params["scale"], params["bias"]
        x = batch_norm.max_pool(x, scale)
        options = dict(eps=config.eps, activation="relu")
        return batch_norm.inference(x, mean, var, scale, bias, **options), running

    new = {}
    x = jnp.asarray(images).astype(config.dtype)
    first = (params["bn1"], statistics["bn1"])
    if config.stem == "imagenet":
        x, new["bn1"] = norm_and_pool(_conv(x, params["conv1"], 2), *first)
    else:
        x, new["bn1"], _ = norm(_conv(x, params["conv1"], 1), *first)
    last = (len(config.stages) - 1, config.stages[-1] - 1)
    users: Any = (x, x)
    again = None
    if batch_norm.again is not None:
        again = functools.partial(batch_norm.again, eps=config.eps, activation="relu")
    for stage in range(len(config.stages)):
        name = f"layer{stage + 1}"
        new[name] = []
        for index, block in enumerate(zip(params[name], statistics[name], strict=True)):
            users, block_statistics = _block(
                users,
                *block,
                _stride(stage, index),
                _SIZES[config.block],
                functools.partial(norm, fanout=(stage, index) != last),
                norm,
                again if sum(config.stages[:stage]) + index < config.remat else None,
            )
            new[name].append(block_statistics)
    x = users
    wide = accumulator_dtype(x.dtype)
    x = jnp.mean(x, (1, 2), dtype=wide).astype(x.dtype)
    kernel = params["fc"]["kernel"].astype(x.dtype)
    return biased(jnp.dot(x, kernel, preferred_element_type=wide), params["fc"]["bias"]), new


def _block(users, params: dict, statistics: dict, stride: int, sizes, last_norm, norm, again):
    """Applies a block to the inputs of its two branches; returns its result and new statistics."""
    new = {}
    x, shortcut = users
    if "downsample" in params:
        own, running = params["downsample"], statistics["downsample"]["bn"]
        shortcut = _conv(shortcut, own["conv"], stride)
        shortcut, running, _ = norm(shortcut, own["bn"], running, activation=None)
        new["downsample"] = {"bn": running}
    strides = [stride if k == sizes.index(3) else 1 for k in range(len(sizes))]
    x = _conv(x, params["conv1"], strides[0])
    for k in range(1, len(sizes)):
        bn, next_conv = f"bn{k}", (params[f"conv{k + 1}"], strides[k])
        x, new[bn], made_of = norm(x, params[bn], statistics[bn])
        if again is None:
            x = _conv(x, *next_conv)
        else:
            x = _conv_of_made(again, x, *next_conv, made_of)
    bn = f"bn{len(sizes)}"
    x, new[bn], _ = last_norm(x, params[bn], statistics[bn], shortcut)
    return x, new


def _conv(x, params: dict, stride: int):
    """Pads half a window on all sides. "SAME" would pad even sizes on one side if strided."""
    kernel = params["kernel"].astype(x.dtype)
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=[(size // 2, size // 2) for size in kernel.shape[:2]],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3))
def _conv_of_made(make: Callable, x, params: dict, stride: int, made_of: tuple):
    """``_conv(x, params, stride)``, where ``x`` equals ``make(*made_of)``.

    The gradient of the kernel keeps ``made_of`` instead of ``x``.
    """
    return _conv(x, params, stride)


@_conv_of_made.defjvp
def _conv_of_made_jvp(make, stride, primals, tangents):
    (x, params, made_of), (dx, dparams, _) = primals, tangents

    @jax.checkpoint
    def of_kernel(made_of, dparams):
        return _conv(make(*made_of), dparams, stride)

    dy = _conv(dx, params, stride) + of_kernel(made_of, dparams)
    return _conv_of_made(make, x, params, stride, made_of), dy


def _check(params, statistics, images, config, batch_norm) -> None:
    _CHECK.type("config", config, Config, "a Config")
    kind = "a BatchNorm, such as FASTOPS or PLAIN"
    _CHECK.type("batch_norm", batch_norm, BatchNorm, kind)
    remedy = "(of uint8 pixels, subtract the mean and divide by the deviation)"
    _CHECK.array("images", images, (jnp.floating,), f"a floating dtype {remedy}")
    if images.ndim != 4 or images.shape[-1] != config.channels:
        raise ValueError(
            f"resnet: images has shape {images.shape}; it must be (n, height, width, "
            f"{config.channels})"
        )
    expected = shapes(config)
    _CHECK.tree("params", params, expected[0])
    _CHECK.tree("statistics", statistics, expected[1])
