"""The network of :mod:`jax_fastops.models.decoder`: its sizes, ops, layers and cache."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastops.bias_act import ACTIVATIONS
from jax_fastops.models._checks import Checks
from jax_fastops.models._layers import in_turn
from jax_fastops.models._parameters import cast_kernels
from jax_fastops.models._plain import attention as plain_attention
from jax_fastops.models._plain import rotated
from jax_fastops.models._products import (
    ATTENTIONS,
    biased,
    dense_act,
    dot,
    jax_attention,
    of_rank,
    take_rows,
)
from jax_fastops.models._rotary import Scaling, cos_sin
from jax_fastops.models._segments import Segments
from jax_fastops.models._sharding import explicit_spec, split_last, whole

_CHECK = Checks("decoder")

_JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


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
      rope_scaling: a :class:`RopeScaling`, :class:`LinearScaling` or :class:`YarnScaling`, or
        ``None``.
      eps: added to mean squares, or to variances.
      tied: whether the head is the table of the embeddings.
      qkv_bias: whether queries, keys and values have biases, as in Qwen2.
      output_bias: whether the output of the attention has a bias.
      qk_norm: whether queries and keys go through an RMS norm of each head, as in Qwen3; with
        ``norms="post"``, of all heads together, as in OLMo 2.
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
        then do not grow with ``layers``, and ``params["layers"]`` has stacked arrays. All layers
        must be alike: it takes no ``full_layers`` and no ``unrotated_layers``.
      init_range: the standard deviation of a new network's kernels and embeddings.
      norms: where a layer has norms: ``"pre"``, before attention and feed-forward, as in Llama;
        ``"post"``, after them and before the residual is added, as in OLMo 2; or ``"both"``, as in
        Gemma 3.
      activation: of the feed-forward, one of :func:`~jax_fastops.bias_act`.
      full_layers: the indices of the layers without the sliding window.
      unrotated_layers: the indices of the layers without a rotary embedding, as in SmolLM3.
      local_theta: the base of the rotary frequencies in layers with the sliding window, which have
        no ``rope_scaling`` then, as in Gemma 3. ``None``: as in the others.
      scaled_embeddings: whether embeddings are multiplied by the root of ``hidden_size``.
      positions: the number of learned positions, as in GPT-2. They replace the rotary embedding;
        norms are layer norms, and the feed-forward is not gated and has biases. ``None``: none.
      attention_scale: the factor of the scores of attention. ``None``: ``head_dim**-0.5``.
      attention_softcap: scores become ``cap * tanh(scores / cap)``, as in Gemma 2. It needs
        ``attention="softmax"``, and the attention is then plain JAX, with all scores in memory.
        ``None``: they do not.
      logits_softcap: the same for the logits of the vocabulary.

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
    rope_scaling: Scaling | None = None
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
    norms: str = "pre"
    activation: str = "silu"
    full_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    local_theta: float | None = None
    scaled_embeddings: bool = False
    positions: int | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    def __post_init__(self) -> None:
        _CHECK.fields(self)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"decoder: kv_heads is {self.kv_heads}, which does not divide heads, {self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"decoder: head_dim is {self.head_dim}; it must be even")
        for name in ("full_layers", "unrotated_layers"):
            self._check_layers(name)
        for name in ("local_theta", "attention_scale", "attention_softcap", "logits_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"decoder: {name} is {value}; it must be positive and finite")
        _CHECK.choice("attention", self.attention, ATTENTIONS)
        if self.attention_softcap is not None and self.attention != "softmax":
            raise ValueError(
                f"decoder: attention is {self.attention!r}, which has no softcap; with "
                "attention_softcap it must be 'softmax'"
            )
        _CHECK.choice("norms", self.norms, ("pre", "post", "both"))
        _CHECK.choice("activation", self.activation, tuple(ACTIVATIONS))
        _CHECK.finite(rope_theta=self.rope_theta, eps=self.eps, init_range=self.init_range)
        kinds = (*typing.get_args(Scaling), type(None))
        accepted = "a RopeScaling, a LinearScaling, a YarnScaling or None"
        _CHECK.type("rope_scaling", self.rope_scaling, kinds, accepted)
        if self.tensor_parallel and self.qk_norm and self.norms == "post":
            raise ValueError(
                "decoder: tensor_parallel is True, but the norms of all queries and all keys "
                "(qk_norm with norms='post') need whole rows"
            )

    def _check_layers(self, name: str) -> None:
        """Checks indices of layers, and gives them in order and without the default."""
        given = getattr(self, name)
        _CHECK.type(name, given, (tuple, list), "a tuple of integers")
        layers = tuple(sorted({_CHECK.integer(name, layer, 0) for layer in given}))
        if layers and layers[-1] >= self.layers:
            raise ValueError(f"decoder: {name} has {layers[-1]}, but layers is {self.layers}")
        if name == "full_layers" and self.sliding_window is None:
            layers = ()
        if layers and self.scan:
            raise ValueError(
                f"decoder: scan is True, but {name} is {layers}; the layers of a scan are alike"
            )
        object.__setattr__(self, name, layers)

    def _kind(self, layer: int) -> tuple[int | None, bool | None]:
        """The sliding window of a layer, and whether its rotary embedding is the local one.

        The latter is ``None`` without a rotary embedding.
        """
        window = None if layer in self.full_layers else self.sliding_window
        if self.positions is not None or layer in self.unrotated_layers:
            return window, None
        return window, window is not None and self.local_theta is not None


class Ops(NamedTuple):
    """The functions in which two implementations of the model differ.

    Each has the arguments and the results of the function of this name in ``jax_fastops``. With
    ``attention_softcap``, plain JAX computes the attention, and ``attention`` is not called.

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
    layer_norm: Callable
    residual_layer_norm: Callable
    bias_act: Callable
    dense_act: Callable


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
    check_length("capacity", capacity, config)

    def zeros():
        if config.scan:
            return jnp.zeros((config.layers, *shape), config.dtype)
        return [jnp.zeros(shape, config.dtype) for _ in range(config.layers)]

    # A length that is known to be 0 lets the first call attend to its own tokens only.
    return Cache(zeros(), zeros(), jnp.zeros((batch, capacity), bool), 0)


def check_length(name: str, length: int, config: Config) -> None:
    """There are learned positions for so many tokens, if any."""
    if config.positions is not None and length > config.positions:
        raise ValueError(
            f"decoder: {name} is {length}, but config has {config.positions} positions"
        )


def prepared(params: dict, config: Config) -> dict:
    """Casts the kernels to the dtype of the products, and joins those with the same input."""

    def joined(layer):
        layer = cast_kernels(layer, config.dtype)
        if config.tensor_parallel:
            return layer
        for name, parts in _JOINED.items():
            if parts[0] not in layer:
                continue
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
    positions = places(positions, mask, cache, tokens, config)
    x = embed(params, tokens, positions, config, ops)
    around, cache = surroundings(positions, mask, cache, tokens, config)
    # Otherwise, the two parts of a layer's result go to the next layer, whose norm adds them up.
    summed = config.scan or config.remat or config.remat_every is not None
    functions = {
        kind: jax.tree_util.Partial(layer_function(config, *own, ops, summed))
        for kind, own in around.items()
    }
    kinds = [functions[config._kind(layer)] for layer in range(config.layers)]
    cached: Any = None if cache is None else (cache.keys, cache.values)
    each: Any = params["layers"], cached, kinds[0]
    if not config.scan:
        cached = [None] * config.layers if cached is None else zip(*cached, strict=True)
        each = list(zip(params["layers"], cached, kinds, strict=True))
    x, cached = in_turn(lambda x, one: one[2](x, one[:2]), x, each, config)
    hidden = last_norm(params, x, config, ops)
    if cache is None:
        return hidden, None
    keys, values = cached if config.scan else map(list, zip(*cached, strict=True))
    length = cache.length + jnp.int32(tokens.shape[1])
    return hidden, cache._replace(keys=keys, values=values, length=length)


def embed(params: dict, tokens, positions, config: Config, ops: Ops):
    """The input of the first layer."""
    x = take_rows(params["embeddings"], tokens, config, ops).astype(config.dtype)
    if config.scaled_embeddings:
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
    if config.positions is not None:
        x = biased(x, take_rows(params["positions"], positions, config, ops))
    return x


def last_norm(params: dict, x, config: Config, ops: Ops):
    """The norm after the layers, of an array or of the sum of a pair."""
    x, residual = x if isinstance(x, tuple) else (x, None)
    return _norm(params["norm"], x, residual, config, ops)[0]


def surroundings(
    positions, mask, cache, tokens, config: Config
) -> tuple[dict[Any, tuple[Any, _Attend]], Any]:
    """By the kind of layer, the rotary turns of tokens and what they attend to; and the cache.

    The cache has their mask. Of ``tokens``, only the batch and the sequence matter.
    """
    attend, cache = _attend(mask, cache, tokens, 0 if cache is None else cache.length)
    around: dict[Any, tuple[Any, _Attend]] = {}
    for window, local in dict.fromkeys(map(config._kind, range(config.layers))):
        theta, scaling = config.rope_theta, config.rope_scaling
        if local and config.local_theta is not None:
            theta, scaling = config.local_theta, None
        turns = None
        if local is not None:
            turns = cos_sin(positions, config.head_dim, theta, scaling, config.dtype)
        around[window, local] = turns, attend(window)
    return around, cache


def layer_function(config: Config, turns, attend: _Attend, ops: Ops, summed: bool) -> Callable:
    """A layer, as :func:`in_turn` takes it, of its parameters and its part of the cache.

    Its result is a pair if it is not ``summed``, and ``x`` may be one.
    """

    def layer(x, each):
        x, residual = x if isinstance(x, tuple) else (x, None)
        branch, x, cached = _layer(each[0], x, residual, each[1], config, turns, attend, ops)
        return (x + branch if summed else (branch, x)), cached

    return jax.checkpoint(layer, prevent_cse=not config.scan) if config.remat else layer


def places(positions, mask, cache, tokens, config: Config):
    """The positions of tokens, of which only the sequence matters: those given, or the default."""
    if positions is not None:
        return positions
    if isinstance(mask, Segments):
        return mask.positions()
    if config.positions is None:
        start = 0 if cache is None else cache.length
        return start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    if cache is None:
        check_length("the length of tokens", tokens.shape[1], config)
    return _counted(tokens, mask, cache)


def _counted(tokens, mask, cache):
    """Positions ``[sequence]`` or ``[batch, sequence]`` that count tokens, and not padding."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    if mask is not None:
        positions = jnp.maximum(jnp.cumsum(whole(mask, 1), axis=1, dtype=jnp.int32) - 1, 0)
    if cache is None or (isinstance(cache.length, int) and cache.length == 0):
        return positions
    before = jnp.arange(cache.mask.shape[1], dtype=jnp.int32) < cache.length
    before = jnp.sum(cache.mask & before[None], axis=1, dtype=jnp.int32)
    return before[:, None] + of_rank(positions, 2)


def _attend(mask, cache, tokens, start) -> tuple[Callable[[int | None], _Attend], Cache | None]:
    """What new tokens attend to, by the sliding window; and the cache with their mask."""
    count = tokens.shape[1]
    segments: dict[str, Any] = {}
    if isinstance(mask, Segments):
        segments = dict(segment_ids=mask.for_attention(), max_segments=mask.limit)
        mask = None
    mask = None if mask is None else whole(mask, 1)
    if cache is not None:
        new = whole(jnp.ones_like(tokens, bool), 1) if mask is None else mask
        cache = cache._replace(mask=_written(cache.mask, new, start))

    def attend(window: int | None) -> _Attend:
        own = _Attend(
            mask=None if mask is None else mask[:, None, None, :],
            rules=dict(
                is_causal=True,
                local_window_size=None if window is None else (window - 1, 0),
                **segments,
            ),
            start=start,
        )
        if own.fresh or cache is None:
            return own
        query = start + jnp.arange(count, dtype=jnp.int32)[:, None]
        key = jnp.arange(cache.mask.shape[1], dtype=jnp.int32)[None]
        where = key <= query
        if window is not None:
            where &= key > query - window
        where = where[None] & cache.mask[:, None, :]
        return _Attend(where[:, None], {}, start)

    return attend, cache


def _written(cached, new, start):
    """``cached`` with ``new`` from ``start`` of axis 1. Explicit axes are sharded as in ``new``."""
    spec = explicit_spec(new)
    cached = cached if spec is None else jax.sharding.reshard(cached, spec)
    return jax.lax.dynamic_update_slice_in_dim(cached, new, start, axis=1)


def _layer(params: dict, x, residual, cached, config: Config, turns, attend: _Attend, ops: Ops):
    """Applies a layer to the sum of ``x`` and ``residual``.

    Returns the two parts of the layer's result, so that the next norm can add them up.
    """
    y, x = _norm(params.get("input_norm"), x, residual, config, ops)
    y, cached = _attention(params, y, cached, config, turns, attend, ops)
    y = dot(y, params["output"]["kernel"])
    bias = params["output"].get("bias")
    if "output_norm" in params:
        y = y if bias is None else biased(y, bias)
        (y, _), bias = _norm(params["output_norm"], y, None, config, ops), None
    y, x = _norm(params.get("norm"), y, x, config, ops, bias)
    if config.positions is None:
        y = ops.gated_act(*_products(params, "gate_up", y), activation=config.activation)
        y = dot(y, params["down"]["kernel"])
    else:
        y = dense_act(params["up"], y, config, ops)
        y = biased(dot(y, params["down"]["kernel"]), params["down"]["bias"])
    if "down_norm" in params:
        y, _ = _norm(params["down_norm"], y, None, config, ops)
    return y, x, cached


def _norm(params: dict | None, x, residual, config: Config, ops: Ops, input_bias=None) -> tuple:
    """The norm of the sum, and the sum. Without parameters, twice the sum."""
    if params is None:
        x = x if input_bias is None else biased(x, input_bias)
        total = x if residual is None else x + residual
        return total, total
    kind = "layer_norm" if "bias" in params else "rms_norm"
    values = [params[name] for name in ("scale", "bias") if name in params]
    if residual is None:
        return getattr(ops, kind)(x, *values, eps=config.eps), x
    norm = getattr(ops, f"residual_{kind}")
    return norm(x, residual, *values, input_bias=input_bias, eps=config.eps, return_sum=True)


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
    options = dict(attend.rules)
    if config.attention_scale is not None:
        options["scale"] = config.attention_scale
    if config.attention_softcap is not None:
        attention, options["softcap"] = plain_attention, config.attention_softcap
    y = attention(q, k, v, mask=attend.mask, **options)
    return y.reshape(*x.shape[:2], config.heads * config.head_dim), cached


def _heads(params: dict, x, config: Config, turns, ops: Ops):
    """Queries, keys and values ``[batch, sequence, heads, head_dim]`` of normalized features."""
    scales = [params[f"{n}_norm"]["scale"] if config.qk_norm else None for n in "qk"]
    together = config.qk_norm and config.norms == "post"
    if "qkv" in params and not together:
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
    parts = _products(params, "qkv", x)
    if "qkv" in params:
        ends = [config.head_dim * sum(counts[:n]) for n in (1, 2)]
        parts = jnp.split(parts[0], ends, axis=-1)
    norms = [
        functools.partial(ops.rms_norm, scale=scale, eps=config.eps) if config.qk_norm else _same
        for scale in scales
    ]
    if together:
        parts = [*(norm(y) for norm, y in zip(norms, parts[:2], strict=True)), parts[2]]
    q, k, v = (
        split_last(part, count, config.head_dim) for part, count in zip(parts, counts, strict=True)
    )
    if not together:
        q, k = norms[0](q), norms[1](k)
    return (q, k, v) if turns is None else (rotated(q, *turns), rotated(k, *turns), v)


def _same(x):
    return x
