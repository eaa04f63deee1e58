"""ResNet-18 and ResNet-50 in plain functions; images are NHWC.

``init`` makes parameters and running statistics, pytrees of arrays; ``apply`` maps images to
logits. Every batch norm is one call with the ReLU, or the residual's addition and the ReLU, that
follow it; but the one in front of a max pooling may come behind it (``BatchNorm.statistics``).
Which functions those are is an argument, so that a training on ``jax_fastops`` and one in plain JAX
differ in nothing else::

    config = resnet.RESNET50
    params, statistics = resnet.init(jax.random.key(0), config)
    logits, statistics = resnet.apply(params, statistics, images, config, train=True)

The layout is that of He et al., "Deep Residual Learning for Image Recognition", with the stride of
a bottleneck in its 3x3 convolution ("v1.5"); names and paddings are torchvision's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops._arguments import FLOATING, epsilon, integer, parameter, real_number
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import explicit_spec, reshape
from jax_fastops.batch_norm import batch_norm, batch_norm_inference
from jax_fastops.batch_norm import statistics as batch_norm_statistics
from jax_fastops.models._checks import check_choice, check_tree, dtype_name

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

# The sizes of a block's convolutions; the first 3x3 one has the block's stride.
_SIZES = {"basic": (3, 3), "bottleneck": (1, 3, 1)}
_EXPANSION = {"basic": 1, "bottleneck": 4}
_STEMS = ("imagenet", "small")


@dataclasses.dataclass(frozen=True)
class Config:
    """What a ResNet is made of. Hashable: a static argument of ``jax.jit``.

    Attributes:
      stages: how many blocks each stage has. Every stage but the first halves height and width and
        doubles the channels.
      block: ``"basic"`` (3x3, 3x3) or ``"bottleneck"`` (1x1, 3x3, 1x1 to four times the channels).
      width: channels of the stem and of the first stage's inner convolutions.
      classes: how many logits there are.
      channels: channels of an image.
      stem: ``"imagenet"``, a 7x7 convolution of stride 2 and a 3x3 max pooling of stride 2, or
        ``"small"``, a 3x3 convolution of stride 1, for images of 32x32 and less.
      dtype: in which convolutions and activations are: ``"bfloat16"``, ``"float16"``,
        ``"float32"`` or ``"float64"``. Parameters and statistics are float32.
      momentum: the share of a running statistic that stays in a step.
      eps: added to variances.
      zero_init: whether the last batch norm of a block starts with a scale of zeros, so that the
        block starts as its shortcut (Goyal et al., 2017), or of ones.
      remat: in how many blocks, from the first one on, the backward computes the results of the
        inner batch norms again, from their input and statistics, rather than keeping them. The
        gradients of the convolutions behind them need them. It saves those results' bytes, and
        costs a pass over each that reads and writes as many. More than there are means all of them;
        where there is no ``BatchNorm.again`` it changes nothing.

    Raises:
      TypeError: a count is not an integer, ``stages`` is not a sequence, ``dtype`` is no dtype, or
        ``momentum`` or ``eps`` is no number.
      ValueError: a count is not positive, ``remat`` is negative, a choice is not one of those
        above, ``momentum`` is not from 0 to 1, or ``eps`` is NaN.
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

    def __post_init__(self):
        try:
            stages = tuple(self.stages)
        except TypeError:
            raise TypeError(
                f"resnet: stages is {self.stages!r}; it must be a sequence of integers"
            ) from None
        # A list would not be hashable, and a NumPy dtype not equal to its name.
        set_ = functools.partial(object.__setattr__, self)
        set_("stages", tuple(_positive(f"stages[{i}]", n) for i, n in enumerate(stages)))
        if not stages:
            raise ValueError("resnet: stages is empty; there must be one stage or more")
        for name in ("width", "classes", "channels"):
            set_(name, _positive(name, getattr(self, name)))
        set_("remat", integer("resnet", "remat", self.remat))
        if self.remat < 0:
            raise ValueError(f"resnet: remat is {self.remat}; it must be 0 or more")
        check_choice("resnet", "block", self.block, tuple(_SIZES))
        check_choice("resnet", "stem", self.stem, _STEMS)
        set_("dtype", dtype_name("resnet", self.dtype))
        check_choice("resnet", "dtype", self.dtype, FLOATING)
        set_("eps", epsilon("resnet", self.eps))
        set_("momentum", real_number("resnet", "momentum", self.momentum))
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"resnet: momentum is {self.momentum!r}; it must be from 0 to 1")


def _positive(name: str, value) -> int:
    value = integer("resnet", name, value)
    if value < 1:
        raise ValueError(f"resnet: {name} is {value}; it must be 1 or more")
    return value


RESNET18 = Config((2, 2, 2, 2), "basic")
# In two blocks of 16: then a training step needs no more memory than plain JAX's.
RESNET50 = Config((3, 4, 6, 3), "bottleneck", remat=2)
# For images of a few pixels, such as handwritten digits: it trains on a CPU in seconds.
SMALL = Config((1, 1, 1), "basic", width=16, classes=10, channels=1, stem="small", dtype="float32")


# ---- max pooling ---------------------------------------------------------------------------------


def plain_max_pool(x, scale=None) -> jax.Array:
    """The maxima of 3x3 windows at stride 2, ``[n, h, w, c]`` to ``[n, ceil(h/2), ceil(w/2), c]``.

    The padding is one row or column of minus infinity on all sides. Its gradient, XLA's
    select-and-scatter, keeps ``x`` and looks for the maxima again. Arguments are those of
    :func:`max_pool`. They are not checked.
    """
    sign, padding = _sign(scale, x.dtype), ((0, 0), (1, 1), (1, 1), (0, 0))
    x = _times(sign, x)
    y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    return _times(sign, y)


def max_pool(x, scale=None) -> jax.Array:
    """:func:`plain_max_pool`, whose gradient keeps no array but a byte per maximum: where it was.

    The gradient goes to the same elements, of equal ones in a window to the first. In a window with
    a NaN it goes to an element that is not specified.

    Args:
      x: array ``[n, h, w, c]`` of a floating dtype.
      scale: array ``[c]`` of a floating dtype, or ``None``: what the result will be multiplied by.
        Where that is negative, the minima are taken: they are then the maxima.

    Returns:
      The maxima, ``[n, ceil(h/2), ceil(w/2), c]``, in the dtype of ``x``.

    Raises:
      TypeError: ``x`` or ``scale`` is not of a floating dtype.
      ValueError: ``x`` is not of four dimensions, or ``scale`` is not of its channels.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"max_pool: x has dtype {x.dtype}; it must be a floating dtype")
    if x.ndim != 4:
        raise ValueError(f"max_pool: x has shape {x.shape}; it must be [n, h, w, c]")
    if scale is not None:
        scale = parameter("max_pool", "scale", scale, x, 3, "axis 3 of x")
    return _pool(x, _sign(scale, x.dtype))


@jax.custom_jvp
def _pool(x, sign):
    return _times(sign, functools.reduce(jax.lax.max, _window_elements(_times(sign, x))))


@_pool.defjvp
def _pool_jvp(primals, tangents):
    (x, sign), (dx, _) = primals, tangents
    return _pool(x, sign), _elements_at(_places(_times(sign, jax.lax.stop_gradient(x))), dx)


def _sign(scale, dtype):
    return None if scale is None else jnp.where(scale < 0, -1, 1).astype(dtype).reshape(1, 1, 1, -1)


def _times(sign, x):
    return x if sign is None else sign * x


def _places(x):
    """Where in its window each maximum is, from 0 to 8, row by row; the first of equal ones."""
    best, *rest = _window_elements(x)
    place = jnp.zeros_like(best, jnp.uint8)
    for k, value in enumerate(rest, 1):
        stays = best >= value  # False of a NaN, as in XLA's: the gradient goes to what is behind
        place = jnp.where(stays, place, jnp.uint8(k))
        best = jnp.where(stays, best, value)
    return place


_NOWHERE = 9
# Which row an even and an odd one are in the window of their number, and in the next one.
_PLACES = (np.array([1, 2]), np.array([_NOWHERE, 0]))


def _window_elements(x) -> list:
    """The nine elements of each window, row by row, as arrays of the result's shape."""
    n, h, w, c = x.shape
    high, wide = (h + 1) // 2, (w + 1) // 2
    outside = jnp.asarray(-jnp.inf, x.dtype)
    # Two behind, so that where there are no windows their slices are within bounds too.
    x = jax.lax.pad(x, outside, ((0, 0, 0), (1, 2, 0), (1, 2, 0), (0, 0, 0)))
    return [
        jax.lax.slice(x, (0, i, j, 0), (n, i + 2 * high, j + 2 * wide, c), (1, 2, 2, 1))
        for i in range(3)
        for j in range(3)
    ]


# Under jax.checkpoint, so that a gradient keeps the places, not the masks that are made of them.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _elements_at(place, x):
    """Of each window of ``x``, the element at its place, as :func:`_places` gives it.

    It is written for its transpose, the gradient, in which an element adds what the windows that it
    is in have for it. Of rows, and so of columns, an even one ``2 r`` is only in window ``r``, as
    its row 1, an odd one ``2 r + 1`` is row 2 of window ``r`` and row 0 of window ``r + 1``. So
    there are four windows to look at, and for each a table of the place that an element has in it,
    by the parities of its row and column. XLA makes one loop of that, of four loads per element.
    """
    n, h, w, c = x.shape
    zero = jnp.zeros((), x.dtype)
    x = jax.lax.pad(x, zero, ((0, 0, 0), (0, h % 2, 0), (0, w % 2, 0), (0, 0, 0)))
    # By window and parity.
    spec = explicit_spec(jax.typeof(x).sharding, 4)
    spec = spec and (*spec[:2], None, spec[2], None, spec[3])
    x = reshape(x, (n, (h + 1) // 2, 2, (w + 1) // 2, 2, c), spec)
    parts = []
    for below in (0, 1):
        for right in (0, 1):
            of_row, of_column = _PLACES[below], _PLACES[right]
            wanted = np.minimum(3 * of_row[:, None] + of_column, _NOWHERE).astype(np.uint8)
            # Beyond the last window both are _NOWHERE: `back` cuts off what is found there.
            shift = ((0, 0, 0), (-below, below, 0), (-right, right, 0), (0, 0, 0))
            there = jax.lax.pad(place, jnp.uint8(_NOWHERE), shift)[:, :, None, :, None]
            found = jnp.where(there == wanted[:, None, :, None], x, zero).sum((2, 4))
            back = ((0, 0, 0), (below, -below, 0), (right, -right, 0), (0, 0, 0))
            parts.append(jax.lax.pad(found, zero, back))
    return functools.reduce(jnp.add, parts)


# ---- batch norms ---------------------------------------------------------------------------------


class BatchNorm(NamedTuple):
    """The functions in which two implementations of a model differ.

    Attributes:
      training: like :func:`jax_fastops.batch_norm`.
      inference: like :func:`jax_fastops.batch_norm_inference`.
      max_pool: like :func:`plain_max_pool`, which it is if not given. It gets a ``scale`` only
        where ``statistics`` is given.
      again: like :func:`jax_fastops.batch_norm_inference`: gives a result of ``training`` once
        more, up to rounding, from its statistics, where ``Config.remat`` asks for it. If it is
        ``None``, as for plain JAX, all results are kept.
      statistics: the ``mean`` and ``var`` of ``training``, from ``(x, axis, axis_name)``. If it is
        given, the stem's norm is not ``training`` but this and, behind the pooling, ``inference``,
        of a quarter of the elements: max pooling picks the same ones before as behind what keeps
        their order. Of elements that the norm's result does not tell apart (16 bits of it, or a
        scale of 0) the gradient then goes to the largest, not to the first.
    """

    training: Callable
    inference: Callable
    max_pool: Callable = plain_max_pool
    again: Callable | None = None
    statistics: Callable | None = None


def plain_batch_norm(
    x,
    scale,
    bias,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual=None,
    axis_name=None,
    fork: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """:func:`jax_fastops.batch_norm` as it is usually written in ``jax.numpy``.

    The statistics are float32 (float64 for float64), the variance ``mean(x**2) - mean(x)**2``, as
    in Flax: one pass over ``x``, whose difference cancels where the mean is far larger than the
    deviation. The result is rounded to the dtype of ``x``, then added and rectified.

    Arguments and results are those of :func:`jax_fastops.batch_norm`. They are not checked.
    """
    wide = x.astype(accumulator_dtype(x.dtype))
    axes = tuple(k for k in range(x.ndim) if k != axis % x.ndim)
    mean, squares = jnp.mean(wide, axes), jnp.mean(jnp.square(wide), axes)
    if axis_name is not None:
        mean, squares = jax.lax.pmean((mean, squares), axis_name)
    var = jnp.maximum(squares - jnp.square(mean), 0.0)
    y = plain_batch_norm_inference(
        x, mean, var, scale, bias, axis=axis, eps=eps, activation=activation, residual=residual
    )
    return (y, y) if fork else y, mean, var


def plain_batch_norm_inference(
    x,
    mean,
    var,
    scale,
    bias,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual=None,
) -> jax.Array:
    """:func:`jax_fastops.batch_norm_inference` as it is usually written in ``jax.numpy``.

    Arguments and result are those of that function. They are not checked.
    """

    def along(values):
        return values.reshape([-1 if k == axis % x.ndim else 1 for k in range(x.ndim)])

    factor = jax.lax.rsqrt(var + eps)
    y = (x - along(mean)) * along(factor if scale is None else factor * scale)
    y = (y if bias is None else y + along(bias)).astype(x.dtype)
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if activation == "relu" else y


FASTOPS = BatchNorm(
    batch_norm,
    batch_norm_inference,
    max_pool=max_pool,
    again=batch_norm_inference,
    statistics=batch_norm_statistics,
)
PLAIN = BatchNorm(plain_batch_norm, plain_batch_norm_inference)


# ---- parameters ----------------------------------------------------------------------------------


def shapes(config: Config) -> tuple[dict, dict]:
    """Parameters and running statistics as ``jax.ShapeDtypeStruct``: what a checkpoint holds.

    Args:
      config: a :class:`Config`.

    Returns:
      ``(params, statistics)``. ``params`` has ``"conv1"`` and ``"bn1"`` of the stem, a list of
      blocks in each of ``"layer1"``, ``"layer2"``, ..., and ``"fc"``. A block has ``"conv1"``,
      ``"bn1"``, ``"conv2"``, ... and, where its shape changes, a ``"downsample"`` of ``"conv"`` and
      ``"bn"``. A convolution is ``{"kernel": [height, width, in, out]}``, a batch norm ``{"scale":
      [c], "bias": [c]}``, ``"fc"`` ``{"kernel": [in, classes], "bias": [classes]}``.
      ``statistics`` has the batch norms alone, each ``{"mean": [c], "var": [c]}``. All are float32.

    Raises:
      TypeError: ``config`` has another type.
    """
    _check_config(config)
    size = 7 if config.stem == "imagenet" else 3
    params: dict = {
        "conv1": _conv_shapes(size, config.channels, config.width),
        "bn1": _norm_shapes(config.width),
    }
    n = config.width
    for stage, blocks in enumerate(config.stages):
        params[f"layer{stage + 1}"] = layer = []
        for index in range(blocks):
            block, n = _block_shapes(config, n, config.width << stage, _stride(stage, index))
            layer.append(block)
    params["fc"] = {"kernel": _float32(n, config.classes), "bias": _float32(config.classes)}
    return params, _statistics_shapes(params)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _conv_shapes(size: int, n_in: int, n_out: int) -> dict:
    return {"kernel": _float32(size, size, n_in, n_out)}


def _norm_shapes(n: int) -> dict:
    return {"scale": _float32(n), "bias": _float32(n)}


def _stride(stage: int, index: int) -> int:
    """Of a stage's block of this index."""
    return 2 if stage > 0 and index == 0 else 1


def _block_shapes(config: Config, n_in: int, n_inner: int, stride: int) -> tuple[dict, int]:
    """A block's parameters, and how many channels come out of it."""
    sizes, n_out = _SIZES[config.block], n_inner * _EXPANSION[config.block]
    block: dict = {}
    n = n_in
    for k, size in enumerate(sizes, 1):
        n_next = n_out if k == len(sizes) else n_inner
        block[f"conv{k}"], block[f"bn{k}"] = _conv_shapes(size, n, n_next), _norm_shapes(n_next)
        n = n_next
    if stride != 1 or n_in != n_out:
        block["downsample"] = {"conv": _conv_shapes(1, n_in, n_out), "bn": _norm_shapes(n_out)}
    return block, n_out


def _statistics_shapes(params):
    """What of the parameters' tree has batch norms in it, with statistics in place of them."""
    if isinstance(params, list):
        return [_statistics_shapes(block) for block in params]
    if not isinstance(params, dict):
        return None
    if "scale" in params:
        return {"mean": params["scale"], "var": params["scale"]}
    inner = {name: _statistics_shapes(part) for name, part in params.items()}
    return {name: part for name, part in inner.items() if part} or None


def init(key, config: Config) -> tuple[dict, dict]:
    """Parameters and running statistics of a network that has not been trained.

    Convolutions are normal with variance ``2 / (height * width * out)`` (He et al., 2015, by
    outputs), the kernel of ``"fc"`` is normal with variance ``1 / in``, scales and running
    variances are one (but see ``Config.zero_init``), all else is zero.

    Args:
      key: a JAX random key.
      config: a :class:`Config`.

    Returns:
      ``(params, statistics)``, arrays of the shapes that :func:`shapes` gives.

    Raises:
      TypeError: ``config`` has another type.
    """
    params, statistics = shapes(config)
    last = f"bn{len(_SIZES[config.block])}"
    named, tree = jax.tree.flatten_with_path(params)
    keys = jax.random.split(key, len(named))
    made = []
    for one, (path, leaf) in zip(keys, named, strict=True):
        *outer, name = (getattr(entry, "key", None) for entry in path)
        if name == "kernel":
            *window, n_in, n_out = leaf.shape
            variance = 2 / (math.prod(window) * n_out) if window else 1 / n_in
            made.append(jax.random.normal(one, leaf.shape, leaf.dtype) * math.sqrt(variance))
        else:
            ones = name == "scale" and not (config.zero_init and outer[-1] == last)
            made.append(jnp.full(leaf.shape, float(ones), leaf.dtype))

    def running(path, leaf):
        return jnp.full(leaf.shape, float(path[-1].key == "var"), leaf.dtype)

    return jax.tree.unflatten(tree, made), jax.tree.map_with_path(running, statistics)


# ---- forward -------------------------------------------------------------------------------------


def apply(
    params: dict,
    statistics: dict,
    images,
    config: Config,
    *,
    train: bool,
    batch_norm: BatchNorm = FASTOPS,
    axis_name=None,
) -> tuple[jax.Array, dict]:
    """Logits of a batch of images.

    Args:
      params: parameters, as from :func:`init`.
      statistics: running statistics, as from :func:`init`.
      images: array ``[n, height, width, channels]`` of a floating dtype; it is cast to
        ``config.dtype``.
      config: the :class:`Config` that parameters and statistics were made with.
      train: whether batch norms use this batch's statistics and update the running ones, or use
        the running ones.
      batch_norm: the batch norms and the max pooling: ``FASTOPS``, ``PLAIN``, or a
        :class:`BatchNorm`.
      axis_name: in training, name of a mapped axis (of ``jax.shard_map`` or ``jax.vmap``), or a
        tuple of them, over which the batch is spread.

    Returns:
      ``(logits, statistics)``: logits ``[n, classes]`` of float32 (float64 where ``config.dtype``
      is that), and the new running statistics, ``momentum * old + (1 - momentum) * batch`` with the
      biased variance of the batch, without gradients; the old ones where ``train`` is false.

    Sharding: under ``jax.jit`` over the images' first axis, with parameters and statistics
    everywhere: the statistics are those of the whole batch.

    Raises:
      TypeError: ``images`` is no array of a floating dtype, or ``batch_norm`` or ``config`` has
        another type.
      ValueError: ``images`` has another shape, or parameters or statistics do not fit ``config``.
    """
    _check(params, statistics, images, config, batch_norm)

    def updated(running, mean, var):
        batch = jax.lax.stop_gradient({"mean": mean, "var": var})
        return jax.tree.map(functools.partial(_running, config.momentum), running, batch)

    def norm(x, params, statistics, residual=None, activation="relu", fork=False):
        options = dict(eps=config.eps, residual=residual, activation=activation)
        scale, bias = params["scale"], params["bias"]
        if not train:
            made_of = (x, statistics["mean"], statistics["var"], scale, bias)
            y = batch_norm.inference(*made_of, **options)
            return (y, y) if fork else y, statistics, made_of
        y, mean, var = batch_norm.training(
            x, scale, bias, axis_name=axis_name, fork=fork, **options
        )
        return y, updated(statistics, mean, var), (x, mean, var, scale, bias)

    def norm_and_pool(x, params, running):
        if batch_norm.statistics is None:
            y, found, _ = norm(x, params, running)
            return batch_norm.max_pool(y), found
        mean, var, found = running["mean"], running["var"], running
        if train:
            mean, var = batch_norm.statistics(x, -1, axis_name)
            found = updated(running, mean, var)
        scale, bias = params["scale"], params["bias"]
        x = batch_norm.max_pool(x, scale)
        options = dict(eps=config.eps, activation="relu")
        return batch_norm.inference(x, mean, var, scale, bias, **options), found

    new = {}
    x = jnp.asarray(images).astype(config.dtype)
    first = (params["bn1"], statistics["bn1"])
    if config.stem == "imagenet":
        x, new["bn1"] = norm_and_pool(_conv(x, params["conv1"], 2), *first)
    else:
        x, new["bn1"], _ = norm(_conv(x, params["conv1"], 1), *first)
    users, last = (x, x), (len(config.stages) - 1, config.stages[-1] - 1)
    again = None
    if batch_norm.again is not None:
        again = functools.partial(batch_norm.again, eps=config.eps, activation="relu")
    for stage in range(len(config.stages)):
        name = f"layer{stage + 1}"
        new[name] = []
        for index, block in enumerate(zip(params[name], statistics[name], strict=True)):
            users, found = _block(
                users,
                *block,
                _stride(stage, index),
                _SIZES[config.block],
                functools.partial(norm, fork=(stage, index) != last),
                norm,
                again if sum(config.stages[:stage]) + index < config.remat else None,
            )
            new[name].append(found)
    x = users
    wide = accumulator_dtype(x.dtype)
    x = jnp.mean(x, (1, 2), dtype=wide).astype(x.dtype)
    kernel, bias = params["fc"]["kernel"].astype(x.dtype), params["fc"]["bias"]
    return jnp.dot(x, kernel, preferred_element_type=wide) + bias, new


def _block(users, params: dict, statistics: dict, stride: int, sizes, last_norm, norm, again):
    """What ``last_norm`` gives, and the new statistics, from what the block's two users get."""
    new = {}
    x, shortcut = users
    if "downsample" in params:
        given, running = params["downsample"], statistics["downsample"]["bn"]
        shortcut = _conv(shortcut, given["conv"], stride)
        shortcut, found, _ = norm(shortcut, given["bn"], running, activation=None)
        new["downsample"] = {"bn": found}
    strides = [stride if k == sizes.index(3) else 1 for k in range(len(sizes))]
    x = _conv(x, params["conv1"], strides[0])
    for k in range(1, len(sizes)):
        bn, behind = f"bn{k}", (params[f"conv{k + 1}"], strides[k])
        x, new[bn], made_of = norm(x, params[bn], statistics[bn])
        if again is None:
            x = _conv(x, *behind)
        else:
            x = _conv_of_made(again, x, *behind, made_of)
    bn = f"bn{len(sizes)}"
    x, new[bn], _ = last_norm(x, params[bn], statistics[bn], shortcut)
    return x, new


def _conv(x, params: dict, stride: int):
    """Padded by half a window on all sides; "SAME" would pad even sizes on one side if strided."""
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
    """``_conv(x, params, stride)`` of an ``x`` that ``make(*made_of)`` is too.

    The gradient of the kernel keeps ``made_of`` rather than ``x``.
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


def _running(momentum: float, old, batch):
    return (momentum * old + (1 - momentum) * batch).astype(old.dtype)


# ---- checks --------------------------------------------------------------------------------------


def _check_config(config) -> None:
    if not isinstance(config, Config):
        raise TypeError(f"resnet: config is of type {type(config).__name__}; it must be a Config")


def _check(params, statistics, images, config, batch_norm) -> None:
    _check_config(config)
    if not isinstance(batch_norm, BatchNorm):
        raise TypeError(
            f"resnet: batch_norm is of type {type(batch_norm).__name__}; it must be a BatchNorm, "
            "such as FASTOPS or PLAIN"
        )
    if not hasattr(images, "dtype") or not jnp.issubdtype(images.dtype, jnp.floating):
        kind = getattr(images, "dtype", type(images).__name__)
        raise TypeError(
            f"resnet: images is of {kind}; it must be an array of a floating dtype (of uint8 "
            "pixels, subtract the mean and divide by the deviation)"
        )
    if images.ndim != 4 or images.shape[-1] != config.channels:
        raise ValueError(
            f"resnet: images has shape {images.shape}; it must be (n, height, width, "
            f"{config.channels})"
        )
    for name, given, wanted in zip(
        ("params", "statistics"), (params, statistics), shapes(config), strict=True
    ):
        check_tree("resnet", name, given, wanted)
