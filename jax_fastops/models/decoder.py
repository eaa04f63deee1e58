"""Llama and its relatives in plain functions: a decoder with grouped heads and rotary embedding.

``init`` makes parameters, ``apply`` maps tokens to hidden states, ``loss`` is the mean cross
entropy of the next token, and ``generate`` continues prompts. A layer has two RMS norms, each of
the sum of a residual and the branch before it, a gated activation and causal attention. Options of
:class:`Config` make it the layer of Qwen, OLMo 2, SmolLM3, Gemma or GPT-2. The functions that
compute these ops are an argument, as in :mod:`jax_fastops.models.bert`::

    config = decoder.SMALL
    params = decoder.init(jax.random.key(0), config)
    loss, gradients = jax.value_and_grad(decoder.loss)(params, tokens, config)

An argument of another type or dtype raises ``TypeError``, another shape or value ``ValueError``.
The examples need ``import jax, jax.numpy as jnp`` and ``from jax_fastops.models import decoder``.
:mod:`jax_fastops.models.decoder_checkpoint` reads and writes Hugging Face's checkpoints.

Sources: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models"; Yang et al., "Qwen3
Technical Report"; Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding";
Holtzman et al., "The Curious Case of Neural Text Degeneration" (``top_p``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jax_fastops as fo
from jax_fastops._names import elsewhere
from jax_fastops.models import _decoder_generation as _generation
from jax_fastops.models import _parameters, _plain
from jax_fastops.models._checks import Checks
from jax_fastops.models._decoder_layers import (
    Cache,
    Config,
    Ops,
    forward,
    init_cache,
    prepared,
)
from jax_fastops.models._products import in_table, softcapped, vocabulary_loss, wide_product
from jax_fastops.models._rotary import LinearScaling, RopeScaling, YarnScaling
from jax_fastops.models._segments import Segments, checked
from jax_fastops.models._sharding import following

__all__ = [
    "FASTOPS",
    "LLAMA_1B",
    "PLAIN",
    "SMALL",
    "Cache",
    "Config",
    "LinearScaling",
    "Ops",
    "RopeScaling",
    "YarnScaling",
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

_CHECK = Checks("decoder")


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


#: The ops of this package.
FASTOPS = Ops(*(getattr(fo, name) for name in Ops._fields))
#: The same ops on ``jax.nn`` and ``jax.numpy``.
PLAIN = Ops(*(getattr(_plain, name) for name in Ops._fields))._replace(
    split_qkv_heads=_plain.split_grouped_heads
)


def shapes(config: Config) -> dict[str, Any]:
    """The shapes and dtypes of the parameters, as ``jax.ShapeDtypeStruct``.

    Returns:
      A tree of dictionaries. ``E`` is ``hidden_size``, ``F`` is ``intermediate_size``, ``D`` is
      ``head_dim``. A product is ``{"kernel": [in, out]}``, with ``"bias": [out]`` if ``config`` has
      it; a norm is ``{"scale": [E]}``, with ``config.positions`` also ``"bias"``. All are float32.

      - ``"embeddings"``: ``[vocab_size, E]``. ``"head"``: the same, unless ``config.tied``.
        ``"positions"``: ``[positions, E]``, with ``config.positions``.
      - ``"norm"``: the last norm.
      - ``"layers"``: a list, or with ``config.scan`` one layer whose arrays have a leading axis
        over the layers. A layer has ``"input_norm"``, ``"q"`` (to ``heads * D``), ``"k"``, ``"v"``
        (to ``kv_heads * D``), ``"output"``, ``"norm"``, ``"gate"``, ``"up"`` (to ``F``) and
        ``"down"``; with ``config.qk_norm`` also ``"q_norm"`` and ``"k_norm"``, of ``D``, or of all
        heads with ``norms="post"``. With ``"post"``, ``"output_norm"`` and ``"down_norm"`` are in
        place of ``"input_norm"`` and ``"norm"``; with ``"both"``, there are all four. With
        ``config.positions`` there is no ``"gate"``.

    Example:
      >>> decoder.shapes(decoder.SMALL)["layers"][0]["k"]["kernel"].shape
      (64, 32)
    """
    _CHECK.type("config", config, Config, "a Config")
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * d, config.kv_heads * d
    gpt2 = config.positions is not None
    norm = _parameters.norm(e, bias=gpt2)
    layer = {
        "q": _parameters.product(e, queries, bias=config.qkv_bias),
        "k": _parameters.product(e, keys, bias=config.qkv_bias),
        "v": _parameters.product(e, keys, bias=config.qkv_bias),
        "output": _parameters.product(queries, e, bias=config.output_bias),
        "up": _parameters.product(e, f, bias=gpt2),
        "down": _parameters.product(f, e, bias=gpt2),
    }
    if not gpt2:
        layer["gate"] = _parameters.product(e, f, bias=False)
    if config.norms != "post":
        layer |= {"input_norm": norm, "norm": norm}
    if config.norms != "pre":
        layer |= {"output_norm": norm, "down_norm": norm}
    if config.qk_norm:
        sizes = (queries, keys) if config.norms == "post" else (d, d)
        for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            layer[name] = _parameters.norm(size, bias=False)
    layers = [layer] * config.layers
    tables = {"embeddings": config.vocab_size}
    if not config.tied:
        tables["head"] = config.vocab_size
    if config.positions is not None:
        tables["positions"] = config.positions
    params = {
        "layers": _parameters.stacked_shapes(layers) if config.scan else layers,
        "norm": norm,
        **{name: _parameters.float32(count, e) for name, count in tables.items()},
    }
    return jax.tree.map(lambda leaf: leaf, params)  # with dictionaries of its own for each layer


# The dimensions that tensor parallelism shards, as `_parameters.specs` takes them.
_SHARDED: dict[tuple, int] = {
    **{(part, leaf): -1 for part in ("q", "k", "v", "gate", "up") for leaf in ("kernel", "bias")},
    ("output", "kernel"): -2,
    ("down", "kernel"): -2,
    ("embeddings",): -2,
    ("head",): -2,
}


def partition_specs(config: Config, *, tensor: str = "tensor") -> dict[str, Any]:
    """The shardings of the parameters: a tree like that of :func:`shapes`, of ``PartitionSpec``.

    With ``config.tensor_parallel``, the features inside of attention (whole heads) and feed-forward
    are sharded, and the rows of the vocabulary. The axis of the mesh must divide ``kv_heads``,
    ``intermediate_size`` and ``vocab_size``. Otherwise, parameters are replicated.

    Args:
      config: a :class:`Config`.
      tensor: the name of the mesh axis.

    Example:
      >>> specs = decoder.partition_specs(decoder.Config(tensor_parallel=True))
      >>> specs["layers"][0]["up"]["kernel"] == jax.sharding.PartitionSpec(None, "tensor")
      True
    """
    return _parameters.specs(shapes(config), _SHARDED, tensor if config.tensor_parallel else None)


def init(key: ArrayLike, config: Config) -> dict[str, Any]:
    """Initializes parameters with the shapes that :func:`shapes` gives, from a JAX random key.

    Kernels and embeddings are normal with the standard deviation ``config.init_range``. Scales of
    norms are one, and biases are zero.

    Example:
      >>> decoder.init(jax.random.key(0), decoder.SMALL)["norm"]["scale"].shape
      (64,)
    """
    _CHECK.key(key, optional=False)
    return _parameters.normal(key, shapes(config), config.init_range)


@elsewhere(attention_mask="pass mask", position_ids="pass positions")
def apply(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    cache: Cache | None = None,
    ops: Ops = FASTOPS,
) -> Any:
    """Computes the hidden states of a batch of token sequences, after the last norm.

    Args:
      params: parameters, as from :func:`init`.
      tokens: integers ``[batch, sequence]`` from 0 to ``vocab_size - 1``. As in ``jnp.take``, the
        embedding of a larger one is NaN, which makes the whole sequence NaN, and a negative one
        counts from the end of the vocabulary. Padding may have any integers.
      config: the :class:`Config` of the parameters.
      positions: integers ``[sequence]`` or ``[batch, sequence]``, for rotary embedding. Default:
        counted from 0, or from the length of the cache, or from 0 in each segment. Only their
        differences matter, so padding on the left needs no others. Which tokens are earlier is
        given by their order. With ``config.positions``, they are rows of that table, the embedding
        of a larger one is NaN, and the default does not count padding.
      mask: booleans or integers ``[batch, sequence]``: True or 1 for a token, False or 0 for
        padding, which is not attended to. Default: no padding.
      segment_ids: integers ``[batch, sequence]`` of packed rows, such as those of
        :func:`jax_fastops.models.packing.pack`. A token attends only to tokens with its own id. 0
        or a negative id is padding. The tokens of a segment follow each other. Default: each row is
        one sequence.
      max_segments: a bound on the number of segments in a row, static, for
        :func:`jax_fastops.attention`: it takes less time in long rows. Default: no bound.
      cache: a :class:`Cache` with the keys and values of earlier tokens, for rows without segments.
        If it has no room for the new ones, the results are undefined.
      ops: the implementation of the ops: ``FASTOPS``, ``PLAIN``, or another :class:`Ops`.

    Returns:
      An array ``[batch, sequence, hidden_size]`` with the dtype ``config.dtype``; with a cache, a
      pair of it and the new cache. :func:`logits` maps it to the vocabulary.

    Sharding: under ``jax.jit`` with Auto or Explicit axes: tokens over the batch and the sequence,
    and parameters as :func:`partition_specs` says. If an Auto axis shards the sequence, the mesh
    must be that of ``jax.set_mesh``. A cache is sharded over the batch and the heads, as the keys
    and values are.

    Example:
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> decoder.apply(params, jnp.array([[1, 2, 3]]), decoder.SMALL).shape
      (1, 3, 64)
    """
    ids, inside = _check(params, tokens, config, mask, ops, segment_ids, max_segments)
    at = None if positions is None else jnp.asarray(positions)
    at = _CHECK.positions(at, ids.shape)
    _CHECK.type("cache", cache, (Cache, type(None)), "a Cache")
    if cache is not None and isinstance(inside, Segments):
        raise ValueError("decoder: segment_ids and cache are given; a cache has no segments")
    if cache is not None and cache.mask.shape[0] != ids.shape[0]:
        raise ValueError(
            f"decoder: tokens has shape {ids.shape}, but the cache is for {cache.mask.shape[0]} "
            "sequences"
        )
    hidden, cache = forward(prepared(params, config), ids, config, at, inside, cache, ops)
    return hidden if cache is None else (hidden, cache)


def rotary(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding: rotates pairs of features, one from each half of a head, by angles.

    It is computed in float32 (float64 for float64) and rounded once, to the dtype of ``x``.

    Args:
      x: array ``[..., sequence, heads, d]``.
      angles: array ``[..., sequence, d / 2]``: positions times frequencies.

    Example:
      >>> y = decoder.rotary(jnp.array([[[1.0, 0.0]]]), jnp.array([[jnp.pi / 2]]))
      >>> [round(v, 3) + 0.0 for v in y[0, 0].tolist()]
      [0.0, 1.0]
    """
    return _plain.rotated(x, jnp.cos(angles), jnp.sin(angles))


def logits(params: dict[str, Any], hidden: jax.Array, config: Config) -> jax.Array:
    """The logits of the vocabulary.

    Args:
      params, config: as in :func:`apply`.
      hidden: array ``[..., hidden_size]``, such as the result of :func:`apply`.

    Returns:
      Logits ``[..., vocab_size]`` in float32 (float64 if ``config.dtype`` is float64).

    Example:
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> decoder.logits(params, jnp.ones((2, 64)), decoder.SMALL).shape
      (2, 128)
    """
    _CHECK.features(hidden, config.hidden_size)
    products = wide_product("...e,ve->...v", hidden.astype(config.dtype), _head(params))
    return softcapped(products, config.logits_softcap)


def _head(params: dict):
    """The table of the head."""
    return params.get("head", params["embeddings"])


@elsewhere(attention_mask="pass mask", position_ids="pass positions")
def loss(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    labels: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """The mean cross entropy of the next token, without the logits of all tokens at once.

    Args:
      params, tokens, config, positions, mask, segment_ids, max_segments: as in :func:`apply`.
      labels: integers with the shape of ``tokens``: the token that comes after each one. A negative
        label does not count. With one of ``vocab_size`` or more, the loss is NaN. Default: the next
        of ``tokens``, and -1 for the last one of the row or segment and where the next one is
        padding.
      ops: as in :func:`apply`. The logits have the dtype of ``config``.

    Returns:
      A scalar: float32 (float64 if ``config.dtype`` is float64). 0 if no label counts.

    Example:
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> decoder.loss(params, jnp.array([[1, 2, 3]]), decoder.SMALL).shape
      ()
    """
    ids, inside = _check(params, tokens, config, mask, ops, segment_ids, max_segments)
    labels, segmented = _labels_of(labels, ids, inside), isinstance(inside, Segments)
    hidden = apply(
        params,
        ids,
        config,
        positions=positions,
        mask=None if segmented else inside,
        segment_ids=inside.ids if segmented else None,
        max_segments=max_segments,
        ops=ops,
    )
    return vocabulary_loss(hidden, _head(params), labels, config, ops)


def _labels_of(labels, ids, inside):
    """The labels of :func:`loss`, checked. ``inside`` is a mask, ``Segments``, or ``None``."""
    if labels is None and isinstance(inside, Segments):
        labels = inside.labels(ids.astype(jnp.int32))
    elif labels is None:
        known = ids.astype(jnp.int32)
        known = known if inside is None else jnp.where(inside, known, -1)
        labels = following(known, -1)
    labels = _CHECK.integers("labels", jnp.asarray(labels))
    _CHECK.shape("labels", labels, "tokens", ids.shape)
    return labels


@elsewhere(
    attention_mask="pass mask",
    max_new_tokens="pass length",
    max_length="pass length, the number of new tokens",
    eos_token_id="pass end",
)
def generate(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    length: int,
    end: int | Iterable[int] | None = None,
    key: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> tuple[jax.Array, jax.Array]:
    """Continues prompts, token by token, in one loop with a cache.

    Under ``jax.jit``, ``config``, ``length``, ``top_k`` and ``ops`` are static. The loop stops when
    every sequence has ended.

    Args:
      params, config, ops: as in :func:`apply`.
      tokens: integers ``[batch, sequence]``, the prompts. Shorter prompts are padded on the left or
        on the right, with a ``mask``. The continuation is the same. Padding may have any integers.
        If tokens or mask are traced, tokens are not checked: after one of ``vocab_size`` or more,
        the continuation is arbitrary.
      length: the largest number of new tokens.
      end: the token that ends a sequence, or several such tokens. ``None``: no token. A traced
        integer is not checked: one outside of the vocabulary ends no sequence.
      key: a JAX random key, to sample. ``None``: the most probable token is taken.
      temperature: a number, 0 or more, that divides the logits before a token is sampled. With 0,
        the most probable token is taken. Another number needs a ``key``. Default: 1. A traced
        number is not checked: NaN and negative numbers count as 0.
      top_k: samples among so many of the most probable tokens. It needs a ``key``. ``None``: among
        all.
      top_p: a number above 0, at most 1: samples among the fewest most probable tokens whose
        probabilities add up to this number or more, after ``temperature``, and of those of
        ``top_k``. It needs a ``key``. ``None``: among all. A traced number is not checked: NaN and
        numbers up to 0 take the most probable token, and those above 1 count as 1.
      mask: booleans or integers ``[batch, sequence]``: True or 1 for a token, False or 0 for
        padding. Default: no padding. The tokens of a prompt must follow each other, and there must
        be at least one. A traced mask is not checked: tokens do not attend to padding between them,
        but it counts in their distances; without a token, the continuation is arbitrary.

    Returns:
      ``(tokens, lengths)``: integers ``[batch, length]``, the new tokens, and ``[batch]``, how many
      of them there are, including the one that ends the sequence. After it, the sequence is filled
      with the first of the tokens ``end``.

    Sharding: as :func:`apply`. The new tokens are sharded over the batch.

    Example:
      >>> params = decoder.init(jax.random.key(0), decoder.SMALL)
      >>> new, lengths = decoder.generate(params, jnp.array([[1, 2]]), decoder.SMALL, length=5)
      >>> new.shape, lengths.tolist()
      ((1, 5), [5])
    """
    ids, inside = _check(params, tokens, config, mask, ops)
    if ids.shape[1] == 0:
        raise ValueError(f"decoder: tokens has shape {ids.shape}; it must have 1 token or more")
    _generation.check_prompts(tokens, mask, config)
    plan = _generation.checked_plan(length, end, key, temperature, top_k, top_p, config)
    return _generation.continued(params, _head(params), ids, inside, config, plan, ops)


def _check(
    params, tokens, config, mask, ops, segment_ids=None, max_segments=None
) -> tuple[Any, Any]:
    """Checks the arguments; returns the tokens, and the boolean mask or ``Segments``."""
    _CHECK.type("config", config, Config, "a Config")
    _CHECK.type("ops", ops, Ops, "an Ops, such as FASTOPS or PLAIN")
    _CHECK.tree("params", params, shapes(config))
    tokens = _CHECK.integers("tokens", jnp.asarray(tokens))
    if tokens.ndim != 2:
        raise ValueError(f"decoder: tokens has shape {tokens.shape}; it must be (batch, sequence)")
    mask = None if mask is None else jnp.asarray(mask)
    mask = _CHECK.mask(mask, "tokens", tokens.shape)
    segments = checked(_CHECK, segment_ids, max_segments, mask, tokens.shape)
    if segments is not None:
        return in_table(tokens, config.vocab_size, segments.inside), segments
    return in_table(tokens, config.vocab_size, mask), mask
