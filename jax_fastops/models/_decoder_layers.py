"""The network of :mod:`jax_fastops.models.decoder`: its sizes, ops, layers and cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops.models._checks import Checks
from jax_fastops.models._layers import in_turn
from jax_fastops.models._parameters import cast_kernels
from jax_fastops.models._plain import rotated
from jax_fastops.models._products import (
    ATTENTIONS,
    accumulator_dtype,
    biased,
    dot,
    jax_attention,
    of_rank,
    take_rows,
)
from jax_fastops.models._segments import Segments
from jax_fastops.models._sharding import explicit_spec, split_last, whole

_CHECK = Checks("decoder")

_JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


class RopeScaling(NamedTuple):
    """The change of rotary frequencies in Llama 3, for sequences longer than those of pretraining.

    Attributes:
      factor: by which low frequencies are divided.
      low_freq_factor: a frequency with fewer periods than this in ``original_positions`` is low.
      high_freq_factor: a frequency with more periods than this stays. Between the two, frequencies
        are interpolated.
      original_positions: the longest sequence of the pretraining.

    Example:
      >>> decoder.LLAMA_1B.rope_scaling.factor
      32.0
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a decoder. Hashable, for a static argument of ``jax.jit``.

    Attributes:
      vocab_size: the number of tokens in the vocabulary.
      hidden_size: the number of features of a token.
      layers: the number of layers.
      heads: the number of query heads.
      kv_heads: the number of heads of keys and values, which divides ``heads``.
      head_dim: the number of features of a head, an even number.
      intermediate_size: the number of features inside the feed-forward.
      rope_theta: the base of the rotary frequencies.
      rope_scaling: a :class:`RopeScaling`, or ``None``.
      eps: added to mean squares.
      tied: whether the head is the table of the embeddings.
      qkv_bias: whether queries, keys and values have biases, as in Qwen2.
      output_bias: whether the output of the attention has a bias.
      qk_norm: whether queries and keys go through an RMS norm of each head, as in Qwen3.
      sliding_window: the number of tokens to which a token attends, including itself. ``None``: all
        tokens up to itself.
      dtype: of products and activations: ``"bfloat16"``, ``"float16"``, ``"float32"`` or
        ``"float64"``. Parameters may have another dtype.
      attention: ``"softmax"``: the attention of ``ops``. ``"xla"`` or ``"cudnn"``:
        ``jax.nn.dot_product_attention`` with that implementation. cuDNN's needs a GPU and bfloat16
        or float16. With a cache that has tokens, it is always the attention of ``ops``.
      tensor_parallel: whether parameters may be sharded as :func:`partition_specs` says. If not,
        products with the same input are one product. If so, they stay separate, and the passes of
        the loss are XLA's, which can shard the vocabulary.
      remat: whether the backward recomputes layers. It then keeps only the input of each layer.
      remat_every: a number of layers, or ``None``. The backward then recomputes groups of so many
        layers, and keeps only the input of each group. ``remat`` is about each layer inside of a
        group: with both, a layer is computed up to three times.
      scan: whether the layers are one ``jax.lax.scan``. The program's size and compilation time
        then do not grow with ``layers``, and ``params["layers"]`` has stacked arrays.
      init_range: the standard deviation of a new network's kernels and embeddings.

    Example:
      >>> decoder.Config(heads=16, kv_heads=4).hidden_size
      2048
    """

    vocab_size: int = 128256
    hidden_size: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 8192
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    attention: str = "softmax"
    tensor_parallel: bool = False
    remat: bool = False
    remat_every: int | None = None
    scan: bool = False
    init_range: float = 0.02

    def __post_init__(self) -> None:
        _CHECK.fields(self)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"decoder: kv_heads is {self.kv_heads}, which does not divide heads, {self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"decoder: head_dim is {self.head_dim}; it must be even")
        _CHECK.choice("attention", self.attention, ATTENTIONS)
        _CHECK.finite(rope_theta=self.rope_theta, eps=self.eps, init_range=self.init_range)
        kinds = (RopeScaling, type(None))
        _CHECK.type("rope_scaling", self.rope_scaling, kinds, "a RopeScaling or None")


class Ops(NamedTuple):
    """The functions in which two implementations of the model differ.

    Each has the arguments and the results of the function of this name in ``jax_fastops``.

    Example:
      >>> mixed = decoder.FASTOPS._replace(attention=decoder.PLAIN.attention)
      >>> isinstance(mixed, decoder.Ops)
      True
    """

    rms_norm: Callable
    residual_rms_norm: Callable
    gated_act: Callable
    split_qkv_heads: Callable
    attention: Callable
    linear_cross_entropy: Callable
    take: Callable


class Cache(NamedTuple):
    """The keys and values of past tokens, from :func:`init_cache`. A pytree.

    Attributes:
      keys: an array ``[batch, capacity, kv_heads, head_dim]`` for each layer: a list, or stacked
        with ``config.scan``. They are after the rotary embedding.
      values: the same for values.
      mask: booleans ``[batch, capacity]``: which are tokens, and not padding.
      length: the number of tokens so far, including padding.

    Example:
      >>> decoder.init_cache(decoder.SMALL, batch=2, capacity=8).keys[0].shape
      (2, 8, 2, 16)
    """

    keys: Any
    values: Any
    mask: Any
    length: Any


def init_cache(config: Config, batch: int, capacity: int) -> Cache:
    """An empty cache for ``batch`` sequences of at most ``capacity`` tokens.

    Example:
      >>> config = decoder.SMALL
      >>> params = decoder.init(jax.random.key(0), config)
      >>> cache = decoder.init_cache(config, batch=1, capacity=8)
      >>> hidden, cache = decoder.apply(params, jnp.array([[1, 2, 3]]), config, cache=cache)
      >>> hidden, cache = decoder.apply(params, jnp.array([[4]]), config, cache=cache)
      >>> int(cache.length)
      4
    """
    shape = (batch, capacity, config.kv_heads, config.head_dim)

    def zeros():
        if config.scan:
            return jnp.zeros((config.layers, *shape), config.dtype)
        return [jnp.zeros(shape, config.dtype) for _ in range(config.layers)]

    # A length that is known to be 0 lets the first call attend to its own tokens only.
    return Cache(zeros(), zeros(), jnp.zeros((batch, capacity), bool), 0)


def prepared(params: dict, config: Config) -> dict:
    """Casts the kernels to the dtype of the products, and joins those with the same input."""

    def joined(layer):
        layer = cast_kernels(layer, config.dtype)
        if config.tensor_parallel:
            return layer
        for name, parts in _JOINED.items():
            own = [layer.pop(part) for part in parts]
            layer[name] = jax.tree.map(lambda *a: jnp.concatenate(a, axis=-1), *own)
        return layer

    params = jax.tree.map(jnp.asarray, params)  # a tracer is no index of a NumPy array
    layers = params["layers"]
    layers = joined(layers) if config.scan else [joined(layer) for layer in layers]
    return params | {"layers": layers}


class _Attend(NamedTuple):
    """What a token attends to: a mask and other options of ``attention``; and where to write."""

    mask: Any
    rules: dict[str, Any]
    start: Any

    @property
    def fresh(self) -> bool:
        """Whether there are no earlier tokens."""
        return isinstance(self.start, int) and self.start == 0


def forward(
    params: dict, tokens, config: Config, positions, mask, cache, ops: Ops
) -> tuple[Any, Any]:
    """``decoder.apply`` with the parameters of :func:`prepared`. ``mask`` may be ``Segments``."""
    turns, attend, cache = surroundings(positions, mask, cache, tokens, config)
    x = take_rows(params["embeddings"], tokens, config, ops).astype(config.dtype)
    cached: Any = None if cache is None else (cache.keys, cache.values)
    each: Any = params["layers"], cached
    if not config.scan:
        cached = [None] * config.layers if cached is None else zip(*cached, strict=True)
        each = list(zip(params["layers"], cached, strict=True))
    residual = None
    if config.scan or config.remat or config.remat_every is not None:
        x, cached = in_turn(layer_function(config, turns, attend, ops), x, each, config)
    else:  # the two parts of a layer's result go to the next layer, whose norm adds them up

        def layer(parts, each):
            x, residual = parts
            *parts, cached = _layer(each[0], x, residual, each[1], config, turns, attend, ops)
            return parts, cached

        (x, residual), cached = in_turn(layer, (x, None), each, config)
    hidden = last_norm(params, x, residual, config, ops)
    if cache is None:
        return hidden, None
    keys, values = cached if config.scan else map(list, zip(*cached, strict=True))
    length = cache.length + jnp.int32(tokens.shape[1])
    return hidden, cache._replace(keys=keys, values=values, length=length)


def last_norm(params: dict, x, residual, config: Config, ops: Ops):
    """The norm after the layers, of ``x`` or of its sum with ``residual``."""
    return _norm(params["norm"], x, residual, config, ops)[0]


def surroundings(positions, mask, cache, tokens, config: Config) -> tuple[Any, _Attend, Any]:
    """The rotary turns of tokens, what they attend to, and the cache with their mask.

    Of ``tokens``, only the batch and the sequence matter.
    """
    start = 0 if cache is None else cache.length
    if positions is None and isinstance(mask, Segments):
        positions = mask.positions()
    elif positions is None:
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    angles = _angles(positions, config)
    return (jnp.cos(angles), jnp.sin(angles)), *_attend(mask, cache, tokens, start, config)


def layer_function(config: Config, turns, attend: _Attend, ops: Ops) -> Callable:
    """A layer, as :func:`in_turn` takes it, of its parameters and its part of the cache."""

    def layer(x, each):
        branch, x, cached = _layer(each[0], x, None, each[1], config, turns, attend, ops)
        return x + branch, cached

    return jax.checkpoint(layer, prevent_cse=not config.scan) if config.remat else layer


def _attend(mask, cache, tokens, start, config: Config) -> tuple[_Attend, Cache | None]:
    """What new tokens attend to, and the cache with their mask."""
    count = tokens.shape[1]
    segments: dict[str, Any] = {}
    if isinstance(mask, Segments):
        segments = dict(segment_ids=mask.for_attention(), max_segments=mask.limit)
        mask = None
    mask = None if mask is None else whole(mask, 1)
    if cache is not None:
        new = whole(jnp.ones_like(tokens, bool), 1) if mask is None else mask
        cache = cache._replace(mask=_written(cache.mask, new, start))
    window = config.sliding_window
    attend = _Attend(
        mask=None if mask is None else mask[:, None, None, :],
        rules=dict(
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            **segments,
        ),
        start=start,
    )
    if attend.fresh or cache is None:
        return attend, cache
    query = start + jnp.arange(count, dtype=jnp.int32)[:, None]
    key = jnp.arange(cache.mask.shape[1], dtype=jnp.int32)[None]
    where = key <= query
    if window is not None:
        where &= key > query - window
    where = where[None] & cache.mask[:, None, :]
    return _Attend(where[:, None], {}, start), cache


def _written(cached, new, start):
    """``cached`` with ``new`` from ``start`` of axis 1. Explicit axes are sharded as in ``new``."""
    spec = explicit_spec(new)
    cached = cached if spec is None else jax.sharding.reshard(cached, spec)
    return jax.lax.dynamic_update_slice_in_dim(cached, new, start, axis=1)


def _layer(params: dict, x, residual, cached, config: Config, turns, attend: _Attend, ops: Ops):
    """Applies a layer to the sum of ``x`` and ``residual``.

    Returns the two parts of the layer's result, so that the next norm can add them up.
    """
    y, x = _norm(params["input_norm"], x, residual, config, ops)
    y, cached = _attention(params, y, cached, config, turns, attend, ops)
    y = dot(y, params["output"]["kernel"])
    y, x = ops.residual_rms_norm(
        y,
        x,
        params["norm"]["scale"],
        input_bias=params["output"].get("bias"),
        eps=config.eps,
        return_sum=True,
    )
    y = ops.gated_act(*_products(params, "gate_up", y))
    return dot(y, params["down"]["kernel"]), x, cached


def _norm(params: dict, x, residual, config: Config, ops: Ops) -> tuple:
    """The RMS norm of the sum, and the sum."""
    if residual is None:
        return ops.rms_norm(x, params["scale"], eps=config.eps), x
    return ops.residual_rms_norm(x, residual, params["scale"], eps=config.eps, return_sum=True)


def _products(params: dict, name: str, x) -> list:
    """The products of ``x`` with joined kernels, or with each of them."""
    products = []
    for part in [params[name]] if name in params else [params[n] for n in _JOINED[name]]:
        y = dot(x, part["kernel"])
        products.append(biased(y, part["bias"]) if "bias" in part else y)
    return products


def _attention(params: dict, x, cached, config: Config, turns, attend: _Attend, ops: Ops):
    """Attention without its output's product, and the keys and values of the cache."""
    q, *new = _heads(params, x, config, turns, ops)
    k, v = (whole(part, 1) for part in new)
    if cached is not None:
        cached = _written(cached[0], k, attend.start), _written(cached[1], v, attend.start)
        k, v = (k, v) if attend.fresh else cached
    own = config.attention == "softmax" or not attend.fresh
    attention = ops.attention if own else jax_attention(config.attention)
    y = attention(q, k, v, mask=attend.mask, **attend.rules)
    return y.reshape(*x.shape[:2], config.heads * config.head_dim), cached


def _heads(params: dict, x, config: Config, turns, ops: Ops):
    """Queries, keys and values ``[batch, sequence, heads, head_dim]`` of normalized features."""
    scales = [params[f"{n}_norm"]["scale"] if config.qk_norm else None for n in "qk"]
    if "qkv" in params:
        return ops.split_qkv_heads(
            dot(x, params["qkv"]["kernel"]),
            params["qkv"].get("bias"),
            num_heads=config.heads,
            num_kv_heads=config.kv_heads,
            rotary=turns,
            q_scale=scales[0],
            k_scale=scales[1],
            eps=config.eps,
            layout="sequence_first",
        )
    counts = config.heads, config.kv_heads, config.kv_heads
    q, k, v = (
        split_last(part, count, config.head_dim)
        for part, count in zip(_products(params, "qkv", x), counts, strict=True)
    )
    q, k = (
        y if scale is None else ops.rms_norm(y, scale, eps=config.eps)
        for y, scale in zip((q, k), scales, strict=True)
    )
    return rotated(q, *turns), rotated(k, *turns), v


def _angles(positions, config: Config):
    """The angles ``[..., sequence, head_dim / 2]`` of the rotary embedding."""
    half = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-half
    if (scaling := config.rope_scaling) is not None:
        periods = scaling.original_positions * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        same = np.clip((periods - low) / (high - low), 0, 1)
        frequencies = frequencies * (same + (1 - same) / scaling.factor)
    wide = accumulator_dtype(config.dtype)
    positions = positions[..., None].astype(wide)
    return positions * of_rank(jnp.asarray(frequencies, wide), positions.ndim)
