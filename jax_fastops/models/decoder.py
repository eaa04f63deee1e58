"""Llama and Qwen3 in plain functions: a pre-norm decoder with grouped heads and rotary embedding.

``init`` makes parameters, ``apply`` maps tokens to hidden states, ``loss`` is the mean cross
entropy of the next token, and ``generate`` continues prompts. A layer has two RMS norms, each of
the sum of a residual and the branch before it, a gated activation and causal attention. The
functions that compute these ops are an argument, as in :mod:`jax_fastops.models.bert`::

    config = decoder.SMALL
    params = decoder.init(jax.random.key(0), config)
    loss, gradients = jax.value_and_grad(decoder.loss)(params, tokens, config)

:mod:`jax_fastops.models.decoder_checkpoint` reads and writes Hugging Face's checkpoints.

Sources: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models"; Yang et al., "Qwen3
Technical Report"; Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding".
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

import jax_fastops as fo
from jax_fastops.models import bert
from jax_fastops.models._checks import check_choice, check_tree, dtype_name, integer, number
from jax_fastops.models._sharding import dot, following, split_last, whole

__all__ = [
    "FASTOPS",
    "LLAMA_1B",
    "PLAIN",
    "SMALL",
    "Cache",
    "Config",
    "Ops",
    "RopeScaling",
    "apply",
    "generate",
    "init",
    "init_cache",
    "logits",
    "loss",
    "partition_specs",
    "rotary",
    "shapes",
]

_ATTENTIONS = ("softmax", "xla", "cudnn")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
)
_FLAGS = ("tied", "qkv_bias", "output_bias", "qk_norm", "tensor_parallel", "remat", "scan")


class RopeScaling(NamedTuple):
    """The change of rotary frequencies in Llama 3, for sequences longer than those of pretraining.

    Attributes:
      factor: by which low frequencies are divided.
      low_freq_factor: a frequency with fewer periods than this in ``original_positions`` is low.
      high_freq_factor: a frequency with more periods than this stays. Between the two, frequencies
        are interpolated.
      original_positions: the longest sequence of the pretraining.

    Example:
      >>> from jax_fastops.models import decoder
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
        ``"float64"``. Parameters are float32.
      attention: ``"softmax"``: two products with the softmax of ``ops`` between them. ``"xla"`` or
        ``"cudnn"``: ``jax.nn.dot_product_attention`` with that implementation. cuDNN's needs a GPU
        and bfloat16 or float16. With a cache that has tokens, attention is always by softmax.
      tensor_parallel: whether parameters may be sharded as :func:`partition_specs` says. If not,
        products with the same input are one product. If so, they stay separate, and the passes of
        the loss are XLA's, which can shard the vocabulary.
      remat: whether the backward recomputes layers. It then keeps only the input of each layer.
      scan: whether the layers are one ``jax.lax.scan``. The program's size and compilation time
        then do not grow with ``layers``, and ``params["layers"]`` has stacked arrays.
      init_range: the standard deviation of a new network's kernels and embeddings.

    Raises:
      TypeError: a value has another type.
      ValueError: a number is out of its range, or a choice is not one of those above.

    Example:
      >>> from jax_fastops.models import decoder
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
    scan: bool = False
    init_range: float = 0.02

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        for name in _SIZES:
            set_(name, integer("decoder", name, getattr(self, name), 1))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"decoder: kv_heads is {self.kv_heads}, which does not divide heads, {self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"decoder: head_dim is {self.head_dim}; it must be even")
        if self.sliding_window is not None:
            set_("sliding_window", integer("decoder", "sliding_window", self.sliding_window, 1))
        set_("dtype", dtype_name("decoder", self.dtype))
        check_choice("decoder", "attention", self.attention, _ATTENTIONS)
        for name in ("rope_theta", "eps", "init_range"):
            value = number("decoder", name, getattr(self, name))
            if not 0 <= value < math.inf:
                raise ValueError(f"decoder: {name} is {value}; it must be 0 or more, and finite")
            set_(name, value)
        if not isinstance(self.rope_scaling, (RopeScaling, type(None))):
            kind = type(self.rope_scaling).__name__
            raise TypeError(
                f"decoder: rope_scaling is of type {kind}; it must be a RopeScaling or None"
            )
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"decoder: {name} is {value!r}; it must be True or False")
            set_(name, bool(value))


#: The configuration of Llama 3.2 1B.
LLAMA_1B = Config(rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192), tied=True)
#: A small decoder for a vocabulary of characters. It trains on a CPU in seconds.
SMALL = Config(
    vocab_size=128,
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    rope_theta=10000.0,
    dtype="float32",
)


# ---- ops -----------------------------------------------------------------------------------------


class Ops(NamedTuple):
    """The functions in which two implementations of the model differ.

    Attributes:
      rms_norm: like :func:`jax_fastops.rms_norm`.
      residual_rms_norm: like :func:`jax_fastops.residual_rms_norm`.
      gated_act: like :func:`jax_fastops.gated_act`.
      split_qkv_heads: like :func:`jax_fastops.split_qkv_heads`.
      softmax: like :func:`jax_fastops.softmax`.
      linear_cross_entropy: like :func:`jax_fastops.linear_cross_entropy`.

    Example:
      >>> from jax_fastops.models import decoder
      >>> mixed = decoder.FASTOPS._replace(softmax=decoder.PLAIN.softmax)
      >>> isinstance(mixed, decoder.Ops)
      True
    """

    rms_norm: Callable
    residual_rms_norm: Callable
    gated_act: Callable
    split_qkv_heads: Callable
    softmax: Callable
    linear_cross_entropy: Callable


def _plain_rms_norm(x, scale, *, eps: float):
    """RMS norm in float32 (float64 for float64), rounded once."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


def _plain_residual_rms_norm(x, residual, scale, *, input_bias=None, eps: float, return_sum: bool):
    x = residual + (x if input_bias is None else x + input_bias.astype(x.dtype))
    y = _plain_rms_norm(x, scale, eps=eps)
    return (y, x) if return_sum else y


def _plain_gated_act(gate, up=None, *, activation: str = "silu"):
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    return getattr(jax.nn, activation)(gate) * up


def _plain_split_qkv_heads(
    qkv, bias=None, *, num_heads: int, num_kv_heads: int, rotary, q_scale, k_scale, eps, layout
):
    assert layout == "sequence_first"
    qkv = qkv if bias is None else qkv + bias.astype(qkv.dtype)
    d = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.reshape(*qkv.shape[:-1], num_heads + 2 * num_kv_heads, d)
    q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=-2)
    q = q if q_scale is None else _plain_rms_norm(q, q_scale, eps=eps)
    k = k if k_scale is None else _plain_rms_norm(k, k_scale, eps=eps)
    return _rotated(q, *rotary), _rotated(k, *rotary), v


#: The ops of this package.
FASTOPS = Ops(
    fo.rms_norm,
    fo.residual_rms_norm,
    fo.gated_act,
    fo.split_qkv_heads,
    fo.softmax,
    fo.linear_cross_entropy,
)
#: The same ops on ``jax.nn`` and ``jax.numpy``.
PLAIN = Ops(
    _plain_rms_norm,
    _plain_residual_rms_norm,
    _plain_gated_act,
    _plain_split_qkv_heads,
    bert.PLAIN.softmax,
    bert.PLAIN.linear_cross_entropy,
)


# ---- parameters ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Array:
    """The shape of a parameter, and its axis that tensor parallelism shards."""

    shape: tuple[int, ...]
    sharded: int | None = None


def _arrays(config: Config) -> dict[str, Any]:
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * d, config.kv_heads * d

    def product(n_in, n_out, sharded, bias=False):
        made = {"kernel": _Array((n_in, n_out), sharded)}
        return made | ({"bias": _Array((n_out,), 0 if sharded else None)} if bias else {})

    def norm(n):
        return {"scale": _Array((n,))}

    layer = {
        "input_norm": norm(e),
        "q": product(e, queries, 1, config.qkv_bias),
        "k": product(e, keys, 1, config.qkv_bias),
        "v": product(e, keys, 1, config.qkv_bias),
        "output": product(queries, e, 0, config.output_bias),
        "norm": norm(e),
        "gate": product(e, f, 1),
        "up": product(e, f, 1),
        "down": product(f, e, 0),
    }
    if config.qk_norm:
        layer |= {"q_norm": norm(d), "k_norm": norm(d)}
    tables = ("embeddings",) if config.tied else ("embeddings", "head")
    return {
        "layers": _stacked(layer, config) if config.scan else [layer] * config.layers,
        "norm": norm(e),
        **{name: _Array((config.vocab_size, e), 0) for name in tables},
    }


def _stacked(layer: dict, config: Config) -> dict:
    def stacked(array):
        sharded = None if array.sharded is None else array.sharded + 1
        return _Array((config.layers, *array.shape), sharded)

    return jax.tree.map(stacked, layer)


def shapes(config: Config) -> dict[str, Any]:
    """The shapes and dtypes of the parameters, as ``jax.ShapeDtypeStruct``.

    Args:
      config: a :class:`Config`.

    Returns:
      A tree of dictionaries. ``E`` is ``hidden_size``, ``F`` is ``intermediate_size``, ``D`` is
      ``head_dim``. A product is ``{"kernel": [in, out]}``, with ``"bias": [out]`` if ``config`` has
      it; a norm is ``{"scale": [E]}``. All are float32.

      - ``"embeddings"``: ``[vocab_size, E]``. ``"head"``: the same, unless ``config.tied``.
      - ``"norm"``: the last norm.
      - ``"layers"``: a list, or with ``config.scan`` one layer whose arrays have a leading axis
        over the layers. A layer has ``"input_norm"``, ``"q"`` (to ``heads * D``), ``"k"``, ``"v"``
        (to ``kv_heads * D``), ``"output"``, ``"norm"``, ``"gate"``, ``"up"`` (to ``F``) and
        ``"down"``; with ``config.qk_norm`` also ``"q_norm"`` and ``"k_norm"``, of ``D``.

    Example:
      >>> from jax_fastops.models import decoder
      >>> decoder.shapes(decoder.SMALL)["layers"][0]["k"]["kernel"].shape
      (64, 32)
    """
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), _arrays(config))


def partition_specs(config: Config, *, tensor: str = "tensor") -> dict[str, Any]:
    """The shardings of the parameters.

    With ``config.tensor_parallel``, the features inside of attention (whole heads) and feed-forward
    are sharded, and the rows of the vocabulary. The axis of the mesh must divide ``kv_heads``,
    ``intermediate_size`` and ``vocab_size``. Otherwise, parameters are replicated.

    Args:
      config: a :class:`Config`.
      tensor: the name of the mesh axis.

    Returns:
      A tree like that of :func:`shapes`, of ``jax.sharding.PartitionSpec``.

    Example:
      >>> import jax
      >>> from jax_fastops.models import decoder
      >>> specs = decoder.partition_specs(decoder.Config(tensor_parallel=True))
      >>> specs["layers"][0]["up"]["kernel"] == jax.sharding.PartitionSpec(None, "tensor")
      True
    """

    def spec(array):
        sharded = array.sharded if config.tensor_parallel else None
        return PartitionSpec(
            *(tensor if axis == sharded else None for axis in range(len(array.shape)))
        )

    return jax.tree.map(spec, _arrays(config))


def init(key: ArrayLike, config: Config) -> dict[str, Any]:
    """Initializes the parameters of a network.

    Kernels and embeddings are normal with the standard deviation ``config.init_range``. Scales of
    norms are one, and biases are zero.

    Args:
      key: a JAX random key.
      config: a :class:`Config`.

    Returns:
      Arrays with the shapes that :func:`shapes` gives.

    Example:
      >>> import jax
      >>> from jax_fastops.models import decoder
      >>> decoder.init(jax.random.key(0), decoder.SMALL)["norm"]["scale"].shape
      (64,)
    """
    named, tree = jax.tree.flatten_with_path(shapes(config))
    keys = jax.random.split(key, len(named))
    made = []
    for one, (path, leaf) in zip(keys, named, strict=True):
        if path[-1].key in ("scale", "bias"):
            made.append(jnp.full(leaf.shape, float(path[-1].key == "scale"), leaf.dtype))
        else:
            made.append(config.init_range * jax.random.normal(one, leaf.shape, leaf.dtype))
    return jax.tree.unflatten(tree, made)


def _prepared(params: dict, config: Config) -> dict:
    """Casts the kernels to the dtype of the products, and joins those with the same input."""

    def cast(path, leaf):
        return leaf.astype(config.dtype) if path[-1].key == "kernel" else leaf

    def prepared(layer):
        layer = jax.tree.map_with_path(cast, layer)
        if config.tensor_parallel:
            return layer
        for name, parts in _JOINED.items():
            own = [layer.pop(part) for part in parts]
            layer[name] = jax.tree.map(lambda *a: jnp.concatenate(a, axis=-1), *own)
        return layer

    params = jax.tree.map(jnp.asarray, params)  # a tracer is no index of a NumPy array
    layers = params["layers"]
    made = prepared(layers) if config.scan else [prepared(layer) for layer in layers]
    return params | {"layers": made}


_JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


# ---- forward -------------------------------------------------------------------------------------


class Cache(NamedTuple):
    """The keys and values of past tokens, from :func:`init_cache`. A pytree.

    Attributes:
      keys: an array ``[batch, capacity, kv_heads, head_dim]`` for each layer: a list, or stacked
        with ``config.scan``. They are after the rotary embedding.
      values: the same for values.
      mask: booleans ``[batch, capacity]``: which are tokens, and not padding.
      length: the number of tokens so far, including padding.

    Example:
      >>> from jax_fastops.models import decoder
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
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import decoder
      >>> config = decoder.SMALL
      >>> params = decoder.init(jax.random.key(0), config)
      >>> cache = decoder.init_cache(config, batch=1, capacity=8)
      >>> hidden, cache = decoder.apply(params, jnp.array([[1, 2, 3]]), config, cache=cache)
      >>> hidden, cache = decoder.apply(params, jnp.array([[4]]), config, cache=cache)
      >>> int(cache.length)
      4
    """
    shape = (batch, capacity, config.kv_heads, config.head_dim)

    def made():
        if config.scan:
            return jnp.zeros((config.layers, *shape), config.dtype)
        return [jnp.zeros(shape, config.dtype) for _ in range(config.layers)]

    # A length that is known to be 0 lets the first call attend to its own tokens only.
    return Cache(made(), made(), jnp.zeros((batch, capacity), bool), 0)


def apply(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    cache: Cache | None = None,
    ops: Ops = FASTOPS,
) -> Any:
    """Computes the hidden states of a batch of token sequences, after the last norm.

    Args:
      params: parameters, as from :func:`init`.
      tokens: integers ``[batch, sequence]`` from 0 to ``vocab_size - 1``.
      config: the :class:`Config` of the parameters.
      positions: integers ``[sequence]`` or ``[batch, sequence]``, for rotary embedding. Default:
        counted from 0, or from the length of the cache. Only their differences matter, so padding
        on the left needs no others. Which tokens are earlier is given by their order.
      mask: booleans or integers ``[batch, sequence]``: True or 1 for a token, False or 0 for
        padding, which is not attended to. Default: no padding.
      cache: a :class:`Cache` with the keys and values of earlier tokens. If it has not room for the
        new ones, the results are undefined.
      ops: the implementation of the ops: ``FASTOPS``, ``PLAIN``, or another :class:`Ops`.

    Returns:
      An array ``[batch, sequence, hidden_size]`` with the dtype ``config.dtype``; with a cache, a
      pair of it and the new cache. :func:`logits` maps it to the vocabulary.

    Sharding: under ``jax.jit`` with Auto or Explicit axes: tokens over the batch and the sequence,
    and parameters as :func:`partition_specs` says. If an Auto axis shards the sequence, the mesh
    must be that of ``jax.set_mesh``. A cache takes Auto axes only, which do not shard the sequence.

    Raises:
      TypeError: an argument has another type or dtype.
      ValueError: a shape or the parameters are not those of ``config``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import decoder
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> decoder.apply(params, jnp.array([[1, 2, 3]]), decoder.SMALL).shape
      (1, 3, 64)
    """
    ids, inside = _check(params, tokens, config, mask, ops)
    at = None if positions is None else _integers("positions", positions)
    if at is not None and at.shape not in (ids.shape, ids.shape[1:]):
        raise ValueError(
            f"decoder: positions has shape {at.shape}; it must be {ids.shape[1:]} or {ids.shape}, "
            "as tokens has"
        )
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"decoder: cache is of type {type(cache).__name__}; it must be a Cache")
    if cache is not None and cache.mask.shape[0] != ids.shape[0]:
        raise ValueError(
            f"decoder: tokens has shape {ids.shape}, but the cache is for {cache.mask.shape[0]} "
            "sequences"
        )
    hidden, cache = _forward(_prepared(params, config), ids, config, at, inside, cache, ops)
    return hidden if cache is None else (hidden, cache)


class _Attend(NamedTuple):
    """What a token attends to: padding (or ``None``), all rules together, and where to write."""

    padding: Any
    where: Any
    start: Any

    @property
    def fresh(self) -> bool:
        """Whether there are no earlier tokens."""
        return isinstance(self.start, int) and self.start == 0


def _forward(params: dict, tokens, config: Config, positions, mask, cache, ops: Ops):
    """:func:`apply` with the parameters of ``_prepared``."""
    start = 0 if cache is None else cache.length
    count = tokens.shape[1]
    if positions is None:
        positions = start + jnp.arange(count)
    angles = _angles(positions, config)
    turns = jnp.cos(angles), jnp.sin(angles)
    attend, cache = _attend(mask, cache, tokens.shape, start, config)
    layer = functools.partial(_layer, config=config, turns=turns, attend=attend, ops=ops)

    def whole_layer(params, x, kept):
        branch, x, kept = layer(params, x, None, kept)
        return x + branch, kept

    if config.remat:
        whole_layer = jax.checkpoint(whole_layer, prevent_cse=not config.scan)
    x = bert._take(params["embeddings"], tokens).astype(config.dtype)
    residual = None
    if config.scan:
        kept = None if cache is None else (cache.keys, cache.values)
        each = params["layers"], kept
        x, kept = jax.lax.scan(lambda x, each: whole_layer(each[0], x, each[1]), x, each)
    else:
        new: list[Any] = []
        for index, one in enumerate(params["layers"]):
            own = None if cache is None else (cache.keys[index], cache.values[index])
            if config.remat:
                x, own = whole_layer(one, x, own)
            else:
                x, residual, own = layer(one, x, residual, own)
            new.append(own)
        kept = None if cache is None else tuple(map(list, zip(*new, strict=True)))
    hidden, _ = _norm(params["norm"], x, residual, config, ops)
    if cache is None or kept is None:
        return hidden, None
    keys, values = kept
    return hidden, Cache(keys, values, cache.mask, cache.length + jnp.int32(count))


def _attend(mask, cache, shape, start, config: Config) -> tuple[_Attend, Cache | None]:
    """What new tokens attend to, and the cache with their mask."""
    count = shape[1]
    mask = None if mask is None else whole(mask, 1)
    if cache is not None:
        new = jnp.ones(shape, bool) if mask is None else mask
        all_ = jax.lax.dynamic_update_slice(cache.mask, new, (0, start))
        cache = cache._replace(mask=all_)
    attend = _Attend(mask, None, start)
    if attend.fresh and config.attention != "softmax":
        return attend, cache
    padding = mask if attend.fresh or cache is None else cache.mask
    query = start + jnp.arange(count)[:, None]
    key = jnp.arange(count if padding is None else padding.shape[1])
    where = key <= query
    if config.sliding_window is not None:
        where &= key > query - config.sliding_window
    where = where[None] if padding is None else where & padding[:, None, :]
    return attend._replace(where=where), cache


def _layer(params: dict, x, residual, kept, *, config: Config, turns, attend: _Attend, ops: Ops):
    """Applies a layer to the sum of ``x`` and ``residual``.

    Returns the two parts of the layer's result, so that the next norm can add them up.
    """
    y, x = _norm(params["input_norm"], x, residual, config, ops)
    y, kept = _attention(params, y, kept, config, turns, attend, ops)
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
    return dot(y, params["down"]["kernel"]), x, kept


def _norm(params: dict, x, residual, config: Config, ops: Ops) -> tuple:
    """The RMS norm of the sum, and the sum."""
    if residual is None:
        return ops.rms_norm(x, params["scale"], eps=config.eps), x
    return ops.residual_rms_norm(x, residual, params["scale"], eps=config.eps, return_sum=True)


def _products(params: dict, name: str, x) -> list:
    """The products of ``x`` with joined kernels, or with each of them."""
    made = []
    for part in [params[name]] if name in params else [params[n] for n in _JOINED[name]]:
        y = dot(x, part["kernel"])
        made.append(y + part["bias"].astype(y.dtype) if "bias" in part else y)
    return made


def _attention(params: dict, x, kept, config: Config, turns, attend: _Attend, ops: Ops):
    """Attention without its output's product, and the keys and values of the cache."""
    q, k, v = _heads(params, x, config, turns, ops)
    if kept is not None:
        place = (0, attend.start, 0, 0)
        kept = tuple(
            jax.lax.dynamic_update_slice(old, new, place)
            for old, new in zip(kept, (k, v), strict=True)
        )
        k, v = (k, v) if attend.fresh else kept
    attention = _softmax_attention if attend.where is not None else _dot_product_attention
    k, v = whole(k, 1), whole(v, 1)
    return attention(q, k, v, config, attend, ops).reshape(*x.shape[:2], -1), kept


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
    return _rotated(q, *turns), _rotated(k, *turns), v


def _softmax_attention(q, k, v, config: Config, attend: _Attend, ops: Ops):
    q = q.reshape(*q.shape[:2], config.kv_heads, -1, config.head_dim)
    scores = jnp.einsum("bqngd,bknd->bngqk", q, k)
    p = ops.softmax(scores, where=attend.where[:, None, None], scale=config.head_dim**-0.5)
    return jnp.einsum("bngqk,bknd->bqngd", p, v)


def _dot_product_attention(q, k, v, config: Config, attend: _Attend, ops: Ops):
    del ops
    mask, window = attend.padding, config.sliding_window
    if mask is not None:  # cuDNN needs it for every query
        shape = (mask.shape[0], 1, q.shape[1], mask.shape[1])
        mask = jnp.broadcast_to(mask[:, None, None, :], shape)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=cast(Literal["xla", "cudnn"], config.attention),
    )


def _angles(positions, config: Config):
    """The angles ``[..., sequence, head_dim / 2]`` of the rotary embedding."""
    half = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-half
    if (scaling := config.rope_scaling) is not None:
        periods = scaling.original_positions * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((periods - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    wide = jnp.promote_types(config.dtype, jnp.float32)
    return positions[..., None].astype(wide) * jnp.asarray(frequencies, wide)


def rotary(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding: rotates pairs of features, one from each half of a head, by angles.

    It is computed in float32 (float64 for float64) and rounded once.

    Args:
      x: array ``[..., sequence, heads, d]``.
      angles: array ``[..., sequence, d / 2]``: positions times frequencies.

    Returns:
      An array with the shape and dtype of ``x``.

    Source:
      Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding".

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_fastops.models import decoder
      >>> y = decoder.rotary(jnp.array([[[1.0, 0.0]]]), jnp.array([[jnp.pi / 2]]))
      >>> [round(v, 3) + 0.0 for v in y[0, 0].tolist()]
      [0.0, 1.0]
    """
    return _rotated(x, jnp.cos(angles), jnp.sin(angles))


def _rotated(x, cos, sin):
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


# ---- heads ---------------------------------------------------------------------------------------


def logits(params: dict[str, Any], hidden: jax.Array, config: Config) -> jax.Array:
    """The logits of the vocabulary.

    Args:
      params: parameters, as from :func:`init`.
      hidden: array ``[..., hidden_size]``, such as the result of :func:`apply`.
      config: the :class:`Config` of the parameters.

    Returns:
      Logits ``[..., vocab_size]`` in float32 (float64 if ``config.dtype`` is float64).

    Raises:
      ValueError: ``hidden`` has another last axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import decoder
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> decoder.logits(params, jnp.ones((2, 64)), decoder.SMALL).shape
      (2, 128)
    """
    if hidden.shape[-1:] != (config.hidden_size,):
        raise ValueError(
            f"decoder: hidden has shape {hidden.shape}; its last axis must be hidden_size, "
            f"{config.hidden_size}"
        )
    return bert._wide_product("...e,ve->...v", hidden.astype(config.dtype), _head(params))


def _head(params: dict):
    return params.get("head", params["embeddings"])


def loss(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    labels: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """The mean cross entropy of the next token, without the logits of all tokens at once.

    Args:
      params: parameters, as from :func:`init`.
      tokens: as in :func:`apply`.
      config: the :class:`Config` of the parameters.
      labels: integers with the shape of ``tokens``: the token that comes after each one. A label
        that is not in the vocabulary, such as -1, does not count. Default: the next of ``tokens``,
        and -1 for the last one and where the next one is padding.
      positions: as in :func:`apply`.
      mask: as in :func:`apply`.
      ops: as in :func:`apply`. The logits of ``FASTOPS`` have the dtype of ``config``, and those of
        ``PLAIN`` float32.

    Returns:
      A scalar: float32 (float64 if ``config.dtype`` is float64). 0 if no label counts.

    Raises:
      TypeError: an argument has another type or dtype.
      ValueError: a shape or the parameters are not those of ``config``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import decoder
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> decoder.loss(params, jnp.array([[1, 2, 3]]), decoder.SMALL).shape
      ()
    """
    ids, inside = _check(params, tokens, config, mask, ops)
    if labels is None:
        known = ids.astype(jnp.int32)
        known = known if inside is None else jnp.where(inside, known, -1)
        labels = following(known, -1)
    labels = _integers("labels", labels)
    _check_shape("labels", labels, ids.shape)
    hidden = apply(params, ids, config, positions=positions, mask=inside, ops=ops)
    if config.tensor_parallel:
        with fo.use_implementation("xla"):
            return ops.linear_cross_entropy(hidden, _head(params), labels)
    return ops.linear_cross_entropy(hidden, _head(params), labels)


# ---- generation ----------------------------------------------------------------------------------


def generate(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    length: int,
    end: int | Sequence[int] = (),
    key: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    mask: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> tuple[jax.Array, jax.Array]:
    """Continues prompts, token by token, in one loop with a cache.

    Under ``jax.jit``, ``config``, ``length``, ``end``, ``top_k`` and ``ops`` are static. The loop
    stops when every sequence has ended.

    Args:
      params: parameters, as from :func:`init`.
      tokens: integers ``[batch, sequence]``, the prompts. Shorter prompts are padded on the left.
      config: the :class:`Config` of the parameters.
      length: the largest number of new tokens.
      end: the token that ends a sequence, or several such tokens. Default: none.
      key: a JAX random key, to sample. ``None``: the most probable token is taken.
      temperature: a positive number that divides the logits before a token is sampled.
      top_k: samples among so many of the most probable tokens. ``None``: among all.
      mask: booleans or integers ``[batch, sequence]``: False or 0 for padding. Default: no padding.
      ops: as in :func:`apply`.

    Returns:
      ``(tokens, lengths)``: integers ``[batch, length]``, the new tokens, and ``[batch]``, how many
      of them there are, including the one that ends the sequence. After it, the sequence is filled
      with the first of the tokens ``end``.

    Raises:
      TypeError: an argument has another type or dtype.
      ValueError: a shape or the parameters are not those of ``config``, or a number is out of
        range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import decoder
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> new, lengths = decoder.generate(params, jnp.array([[1, 2]]), decoder.SMALL, length=5)
      >>> new.shape, lengths.tolist()
      ((1, 5), [5])
    """
    ids, inside = _check(params, tokens, config, mask, ops)
    if ids.shape[1] == 0:
        raise ValueError(f"decoder: tokens has shape {ids.shape}; it must have 1 token or more")
    length = integer("decoder", "length", length, 1)
    ends = jnp.asarray([end] if isinstance(end, int) else list(end), jnp.int32)
    fill = ends[0] if ends.size else 0
    if top_k is not None:
        top_k = min(integer("decoder", "top_k", top_k, 1), config.vocab_size)
    table = jnp.asarray(_head(params), config.dtype)  # before the loop, as the kernels
    params = _prepared(params, config)

    def chosen(hidden, step):
        found = bert._wide_product("be,ve->bv", hidden[:, -1], table)
        if key is None:
            return found.argmax(-1).astype(jnp.int32)
        own, scaled = jax.random.fold_in(key, step), found / temperature
        if top_k is None:
            return jax.random.categorical(own, scaled).astype(jnp.int32)
        values, index = jax.lax.top_k(scaled, top_k)
        best = jax.random.categorical(own, values)[:, None]
        return jnp.take_along_axis(index, best, axis=1)[:, 0].astype(jnp.int32)

    def body(state):
        step, token, new, lengths, cache = state
        hidden, cache = _forward(params, token[:, None], config, None, None, cache, ops)
        ended = jnp.isin(token, ends)
        token = jnp.where(ended, fill, chosen(hidden, step))
        return step + 1, token, new.at[:, step].set(token), lengths + ~ended, cache

    def unfinished(state):
        step, token, *_ = state
        return (step < length) & ~jnp.isin(token, ends).all()

    cache = init_cache(config, ids.shape[0], ids.shape[1] + length - 1)
    hidden, cache = _forward(params, ids, config, None, inside, cache, ops)
    first = chosen(hidden, 0)
    new = jnp.full((ids.shape[0], length), fill, jnp.int32).at[:, 0].set(first)
    state = (jnp.int32(1), first, new, jnp.ones_like(first), cache)
    _, _, new, lengths, _ = jax.lax.while_loop(unfinished, body, state)
    return new, lengths


# ---- checks --------------------------------------------------------------------------------------


def _check(params, tokens, config, mask, ops) -> tuple[Any, Any]:
    """Checks the arguments; returns the tokens and the boolean mask."""
    if not isinstance(config, Config):
        raise TypeError(f"decoder: config is of type {type(config).__name__}; it must be a Config")
    if not isinstance(ops, Ops):
        raise TypeError(
            f"decoder: ops is of type {type(ops).__name__}; it must be an Ops, such as FASTOPS or "
            "PLAIN"
        )
    check_tree("decoder", "params", params, shapes(config))
    tokens = _integers("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"decoder: tokens has shape {tokens.shape}; it must be (batch, sequence)")
    if mask is not None:
        mask = _integers("mask", mask, booleans=True)
        _check_shape("mask", mask, tokens.shape)
        mask = mask if mask.dtype == jnp.bool_ else mask != 0
    return tokens, mask


def _integers(name: str, value, booleans: bool = False) -> Any:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer) and not (booleans and value.dtype == jnp.bool_):
        accepted = "booleans or integers" if booleans else "integers"
        raise TypeError(f"decoder: {name} is of {value.dtype}; it must be an array of {accepted}")
    return value


def _check_shape(name: str, value, shape) -> None:
    if value.shape != shape:
        raise ValueError(
            f"decoder: {name} has shape {value.shape}; it must be {shape}, as tokens has"
        )
