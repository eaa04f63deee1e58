"""BERT in plain functions: embeddings, post-norm encoder layers, a pooler, the masked-word head.

``init`` makes parameters, a pytree of arrays. ``apply`` maps tokens to hidden states. A layer has
four matrix products and four fused ops: attention with mask and dropout, which reads the packed
result of a product, two layer norms with bias, dropout and residual, and the activation with bias.
The functions that compute these ops are an argument, so that a training on ``jax_fastops`` and one
in plain JAX differ in nothing else::

    config = bert.BASE
    params = bert.init(jax.random.key(0), config)
    hidden, pooled = bert.apply(params, tokens, config, mask=tokens != 0)

An argument of another type or dtype raises ``TypeError``, another shape or value ``ValueError``.
The examples need ``import jax, jax.numpy as jnp`` and ``from jax_fastops.models import bert``.
:mod:`jax_fastops.models.bert_checkpoint` reads and writes Hugging Face's checkpoints.

Sources: ``BertEncoderTransformer`` of FasterTransformer v1.0 (NVIDIA DeepLearningExamples); Devlin
et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike

import jax_fastops as fo
from jax_fastops._names import elsewhere
from jax_fastops.freeze import again
from jax_fastops.models import _parameters, _plain
from jax_fastops.models._bert_layers import Config, Ops, apply_layer, embed, encode, pool
from jax_fastops.models._checks import Checks
from jax_fastops.models._products import biased, dot, in_table, vocabulary_loss, wide_product
from jax_fastops.models._segments import Segments, checked
from jax_fastops.models._sharding import explicit_spec, is_sharded, whole
from jax_fastops.models._tokens import Tokens

__all__ = [
    "BASE",
    "FASTOPS",
    "LARGE",
    "PLAIN",
    "SMALL",
    "Config",
    "Ops",
    "apply",
    "encoder",
    "encoder_layer",
    "init",
    "masked_lm_logits",
    "partition_specs",
    "shapes",
    "stack_layers",
    "unstack_layers",
]

_CHECK = Checks("bert")


#: BERT-base.
BASE = Config()
#: BERT-large.
LARGE = Config(hidden_size=1024, layers=24, heads=16, intermediate_size=4096)
#: A small BERT for a vocabulary of characters. It trains on a CPU in seconds.
SMALL = Config(
    vocab_size=128,
    hidden_size=128,
    layers=2,
    heads=4,
    intermediate_size=512,
    positions=128,
    dropout=0.0,
    attention_dropout=0.0,
    dtype="float32",
)


#: The ops of this package.
FASTOPS = Ops(*(getattr(fo, name) for name in Ops._fields))
#: The same ops on ``jax.nn`` and ``jax.numpy``, with the same dropout masks.
PLAIN = Ops(*(getattr(_plain, name) for name in Ops._fields))


def shapes(
    config: Config,
    *,
    mlm: bool = False,
    nsp: bool = False,
    labels: int | None = None,
    qa: bool = False,
) -> dict[str, Any]:
    """The shapes and dtypes of the parameters, as ``jax.ShapeDtypeStruct``.

    Args:
      config: a :class:`Config`.
      mlm: whether to include the head of :func:`masked_lm_logits`.
      nsp: whether to include the next-sentence head, with logits ``pooled @ kernel + bias``.
      labels: the number of labels of the classifier, or ``None`` for no classifier. Its logits are
        ``pooled @ kernel + bias`` for sequences, and ``hidden @ kernel + bias`` for tokens.
      qa: whether to include the head for question answering. ``hidden @ kernel + bias`` are two
        logits of each token: whether the answer begins there, and whether it ends there.

    Returns:
      A tree of dictionaries. ``E`` is ``hidden_size`` and ``F`` is ``intermediate_size``. A product
      is ``{"kernel": [in, out], "bias": [out]}``, a norm ``{"scale": [E], "bias": [E]}``. All are
      float32.

      - ``"embeddings"``: the tables ``"word"``, ``"position"`` and, with ``config.token_types``,
        ``"token_type"``, each ``[..., E]``, and ``"norm"``. With ``config.embedding_size``, they
        have that many features, and ``"projection"`` is the product to ``E``.
      - ``"layers"``: a list. Each layer has ``"qkv"`` (to ``3 * E``: queries, keys, values; with
        ``config.tensor_parallel`` to ``[3, heads, E / heads]``), ``"output"`` and
        ``"output_norm"`` of the attention, and ``"up"`` (to ``F``), ``"down"`` and ``"norm"`` of
        the feed-forward.
      - ``"pooler"``: a product.
      - ``"mlm"``, if requested: ``"dense"`` (to the features of the embeddings), ``"norm"`` and
        ``"bias": [vocab_size]``.
      - ``"nsp"`` (to 2), ``"classifier"`` (to ``labels``) and ``"qa"`` (to 2), if requested:
        products.

    Example:
      >>> bert.shapes(bert.SMALL)["embeddings"]["word"].shape
      (128, 128)
    """
    _CHECK.type("config", config, Config, "a Config")
    e = config.hidden_size
    inner = config.embedding_size or e
    params: dict[str, Any] = {
        "embeddings": {
            "word": _parameters.float32(config.vocab_size, inner),
            "position": _parameters.float32(config.positions, inner),
            "norm": _parameters.norm(inner),
        },
        "layers": [_layer_shapes(config) for _ in range(config.layers)],
        "pooler": _parameters.product(e, e),
    }
    if config.token_types is not None:
        params["embeddings"]["token_type"] = _parameters.float32(config.token_types, inner)
    if config.embedding_size is not None:
        params["embeddings"]["projection"] = _parameters.product(inner, e)
    if mlm:
        params["mlm"] = {
            "dense": _parameters.product(e, inner),
            "norm": _parameters.norm(inner),
            "bias": _parameters.float32(config.vocab_size),
        }
    if nsp:
        params["nsp"] = _parameters.product(e, 2)
    if labels is not None:
        params["classifier"] = _parameters.product(e, _CHECK.integer("labels", labels, 1))
    if qa:
        params["qa"] = _parameters.product(e, 2)
    return params


def _layer_shapes(config: Config) -> dict:
    e, f = config.hidden_size, config.intermediate_size
    heads = (3, config.heads, e // config.heads) if config.tensor_parallel else (3 * e,)
    return {
        "qkv": _parameters.product(e, *heads),
        "output": _parameters.product(e, e),
        "output_norm": _parameters.norm(e),
        "up": _parameters.product(e, f),
        "down": _parameters.product(f, e),
        "norm": _parameters.norm(e),
    }


# The dimensions that tensor parallelism shards, as `_parameters.specs` takes them.
_SHARDED: dict[tuple, int] = {
    ("qkv", "kernel"): -2,
    ("qkv", "bias"): -2,
    ("output", "kernel"): -2,
    ("up", "kernel"): -1,
    ("up", "bias"): -1,
    ("down", "kernel"): -2,
    ("embeddings", "word"): -2,
    ("mlm", "bias"): -1,
}


def partition_specs(
    config: Config,
    *,
    mlm: bool = False,
    nsp: bool = False,
    labels: int | None = None,
    qa: bool = False,
    tensor: str = "tensor",
) -> dict[str, Any]:
    """The shardings of the parameters: a tree of ``jax.sharding.PartitionSpec``.

    It is like that of :func:`shapes`; with ``config.scan`` like that of stacked layers.
    With ``config.tensor_parallel``, the heads of the attention, the features inside the
    feed-forward, and the rows of the vocabulary are sharded. The axis of the mesh must divide
    ``heads``, ``intermediate_size`` and ``vocab_size``. Otherwise, parameters are replicated.

    Args:
      config, mlm, nsp, labels, qa: as in :func:`shapes`.
      tensor: the name of the mesh axis.

    Example:
      >>> specs = bert.partition_specs(bert.Config(tensor_parallel=True))
      >>> specs["layers"][0]["up"]["kernel"] == jax.sharding.PartitionSpec(None, "tensor")
      True
    """
    expected = shapes(config, mlm=mlm, nsp=nsp, labels=labels, qa=qa)
    if config.scan:
        expected["layers"] = _parameters.stacked_shapes(expected["layers"])
    return _parameters.specs(expected, _SHARDED, tensor if config.tensor_parallel else None)


def init(
    key: ArrayLike,
    config: Config,
    *,
    mlm: bool = False,
    nsp: bool = False,
    labels: int | None = None,
    qa: bool = False,
) -> dict[str, Any]:
    """Initializes the parameters of a network.

    Kernels and embeddings are normal with the standard deviation ``config.init_range``. Scales of
    norms are one, and biases are zero.

    Args:
      key: a JAX random key.
      config, mlm, nsp, labels, qa: as in :func:`shapes`, which gives the shapes of the result.

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> params["layers"][0]["up"]["kernel"].shape
      (128, 512)
    """
    _CHECK.key(key, optional=False)
    expected = shapes(config, mlm=mlm, nsp=nsp, labels=labels, qa=qa)
    return _parameters.normal(key, expected, config.init_range)


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Stacks the layers into one tree, whose arrays have a leading axis over the layers.

    A ``scan`` over layers reads this form directly. It copies a list of layers in every step.
    Parameters with stacked layers are returned as they are.

    Example:
      >>> params = bert.stack_layers(bert.init(jax.random.key(0), bert.SMALL))
      >>> params["layers"]["up"]["kernel"].shape
      (2, 128, 512)
    """
    layers = params["layers"]
    return params if isinstance(layers, dict) else params | {"layers": _parameters.stack(layers)}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Turns stacked layers into a list: the inverse of :func:`stack_layers`.

    Example:
      >>> params = bert.stack_layers(bert.init(jax.random.key(0), bert.SMALL))
      >>> len(bert.unstack_layers(params)["layers"])
      2
    """
    layers = params["layers"]
    return params | {"layers": _parameters.unstack(layers)} if isinstance(layers, dict) else params


@elsewhere(
    attention_mask="pass mask",
    token_type_ids="pass token_types",
    position_ids="pass positions",
)
def apply(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    mask: ArrayLike | None = None,
    token_types: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
    token_capacity: int | None = None,
    key: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the hidden states of a batch of token sequences.

    Args:
      params: parameters, as from :func:`init`. The layers are a list, or stacked by
        :func:`stack_layers`.
      tokens: integers ``[batch, sequence]`` from 0 to ``vocab_size - 1``. As in ``jnp.take``, the
        embedding of a larger one is NaN, which makes the whole sequence NaN, and a negative one
        counts from the end of the vocabulary. Padding may have any integers.
      config: the :class:`Config` of the parameters.
      mask: booleans or integers ``[batch, sequence]``: True or 1 for a token, False or 0 for
        padding, which is not attended to. Default: no padding.
      token_types: integers ``[batch, sequence]`` from 0 to ``config.token_types - 1``. With
        others, the embedding is NaN. Padding may have any integers. Default: zeros.
      positions: integers ``[sequence]`` or ``[batch, sequence]`` from 0 to
        ``config.positions - 1``. Others are as in ``tokens``; padding may have them only in
        ``[batch, sequence]``. Default: counted from 0, in each segment.
      segment_ids: integers ``[batch, sequence]`` of packed rows, such as those of
        :func:`jax_fastops.models.packing.pack`. A token attends only to tokens with its own id. 0
        or a negative id is padding. The tokens of a segment follow each other. Default: each row is
        one sequence. A row may have more than ``config.positions`` tokens, and a segment may not.
      max_segments: the number of segments in a row that the pooler reads, static: those with the
        ids from 1 to ``max_segments``.
      token_capacity: a number of tokens, static, for a batch with a ``mask`` and without segments.
        If the batch has at most this many tokens, the layers compute a list of ``token_capacity``
        tokens without padding. Otherwise they compute the whole batch; under ``jax.vmap``, both are
        computed. The hidden states of padding are zero, and dropout draws other elements. It is for
        tokens on one device. A symbolic batch or sequence is not supported.
      key: a JAX random key, for dropout at the rates of ``config``. ``None`` means no dropout, as
        at inference. With a key, ``attention_dropout`` must be 0 unless ``attention="softmax"``.
      ops: the implementation of the ops: ``FASTOPS``, ``PLAIN``, or another :class:`Ops`.

    Returns:
      ``(hidden, pooled)``: the last layer's output ``[batch, sequence, hidden_size]``, and the
      pooler's output for the first token, ``[batch, hidden_size]``, which is ``None`` if ``params``
      has no ``"pooler"``. With ``segment_ids`` the latter is ``[batch, max_segments, hidden_size]``
      for the first tokens of the segments, zero for a segment without tokens, and ``None`` without
      ``max_segments``. Both have the dtype ``config.dtype``. In a sequence that is all padding,
      the attention is zero with ``attention="softmax"``, and uniform with ``"xla"``, as in Hugging
      Face's model.

    Sharding: under ``jax.jit`` with Auto or Explicit axes: tokens over the batch and the sequence,
    and parameters as :func:`partition_specs` says, or replicated. If an Auto axis shards the
    sequence, the mesh must be that of ``jax.set_mesh``.

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> hidden, pooled = bert.apply(params, jnp.array([[1, 2, 3, 0]]), bert.SMALL)
      >>> hidden.shape, pooled.shape
      ((1, 4, 128), (1, 128))
    """
    segments = segment_ids, max_segments
    tokens, mask, token_types, positions = _check(
        params, tokens, config, mask, token_types, positions, segments, key, ops
    )
    capacity = _check_capacity(token_capacity, mask)

    read = again({name: params[name] for name in ("embeddings", "layers")})

    def hidden(tokens, token_types, positions, mask):
        embeddings_key, layers_key = (None, None) if key is None else jax.random.split(key)
        own = read()
        tables = own["embeddings"]
        x = embed(tables, tokens, config, token_types, positions, embeddings_key, ops)
        return encode(own["layers"], x, config, mask, layers_key, ops)

    if capacity is None:
        x = hidden(tokens, token_types, positions, mask)
    else:
        x = _within_capacity(hidden, capacity, tokens, token_types, positions, mask)
    if "pooler" not in params:
        return x, None
    return x, pool(params["pooler"], x, config, mask)


def _within_capacity(hidden, capacity, tokens, token_types, positions, mask):
    """``hidden(tokens, token_types, positions, mask)``, of the list of tokens if it has room."""

    def of_list():
        listed = Tokens.of(mask, capacity)
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32) if positions is None else positions
        at = jnp.broadcast_to(at, tokens.shape)
        types = None if token_types is None else listed.listed(token_types)
        return listed.batched(hidden(listed.listed(tokens), types, listed.listed(at), listed))

    def of_batch():
        return hidden(tokens, token_types, positions, mask)

    if tokens.size <= capacity:
        x = of_batch()
    else:
        x = jax.lax.cond(mask.sum(dtype=jnp.int32) <= capacity, of_list, of_batch)
    return jnp.where(mask[..., None], x, jnp.zeros_like(x))


def encoder(
    layers: list[dict[str, Any]] | dict[str, Any],
    x: jax.Array,
    config: Config,
    *,
    mask: ArrayLike | None = None,
    key: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """Applies all encoder layers. The result has the shape and dtype of ``x``.

    This is the part of :func:`apply` between the embeddings' dropout and the pooler. The same
    ``key`` draws other masks than in :func:`apply`, which splits it for the embeddings first.

    Args:
      layers: the parameters' ``"layers"``: a list, or stacked by :func:`stack_layers`.
      x: array ``[batch, sequence, hidden_size]`` with the dtype ``config.dtype``.
      config: a :class:`Config`.
      mask, key, ops: as in :func:`apply`, as is the sharding.

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> bert.encoder(params["layers"], jnp.ones((2, 4, 128)), bert.SMALL).shape
      (2, 4, 128)
    """
    _check_types(config, ops)
    kinds = "a list, or a dict of stacked layers"
    _CHECK.type("layers", layers, (list, tuple, dict), kinds)
    _CHECK.tree("layers", layers, _stacked_like(layers, shapes(config)["layers"]))
    mask = _check_layer_arguments(x, config, mask, key)
    return encode(layers, x, config, mask, key, ops)


def encoder_layer(
    params: dict[str, Any],
    x: jax.Array,
    config: Config,
    *,
    mask: ArrayLike | None = None,
    key: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """One post-norm encoder layer: attention and feed-forward, each with residual and layer norm.

    Args:
      params: one of the parameters' ``"layers"``.
      config: a :class:`Config`. ``remat`` and ``scan`` have no effect here.
      x, mask, key, ops: as in :func:`encoder`, as is the result.

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> bert.encoder_layer(params["layers"][0], jnp.ones((2, 4, 128)), bert.SMALL).shape
      (2, 4, 128)
    """
    _check_types(config, ops)
    _CHECK.type("params", params, dict, "a dict")
    _CHECK.tree("params", params, _layer_shapes(config))
    mask = _check_layer_arguments(x, config, mask, key)
    return apply_layer(params, x, config, mask, key, ops, fanout=False)


def masked_lm_logits(
    params: dict[str, Any],
    hidden: jax.Array | np.ndarray[Any, Any],
    config: Config,
    *,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """The masked-word head: product, activation, layer norm, and product with the embeddings.

    Args:
      params: parameters with ``"mlm"``, as from ``init(..., mlm=True)``.
      hidden: array ``[..., hidden_size]`` of a floating dtype, such as the result of :func:`apply`.
        Select the masked tokens first if only those count: the result has ``vocab_size`` numbers
        for each token.
      config, ops: as in :func:`apply`.

    Returns:
      Logits ``[..., vocab_size]`` in float32 (float64 if ``config.dtype`` is float64).

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL, mlm=True)
      >>> bert.masked_lm_logits(params, jnp.ones((2, 128)), bert.SMALL).shape
      (2, 128)
    """
    x = _masked_lm_head(params, hidden, config, ops)
    logits = wide_product("...e,ve->...v", x, params["embeddings"]["word"])
    return biased(logits, params["mlm"]["bias"])


def masked_lm_loss(
    params: dict[str, Any],
    hidden: jax.Array | np.ndarray[Any, Any],
    labels: jax.Array | np.ndarray[Any, Any],
    config: Config,
    *,
    where: jax.Array | np.ndarray[Any, Any] | None = None,
    positions: jax.Array | np.ndarray[Any, Any] | None = None,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """The mean cross entropy of the masked-word head, without the logits of all tokens at once.

    Args:
      params: parameters with ``"mlm"``, as from ``init(..., mlm=True)``.
      hidden: array ``[..., sequence, hidden_size]`` of a floating dtype, such as the result of
        :func:`apply`.
      labels: integers: the token at each position ``[..., sequence]``, or at each of ``positions``.
        A position with a negative label does not count. With a label of ``vocab_size`` or more, the
        loss is NaN.
      where: booleans with the shape of ``labels``: which of them count. ``None``: all.
      positions: integers ``[..., n]``: only these positions of each sequence go through the head,
        which has most of its cost in the vocabulary. ``None``: all positions.
      config, ops: as in :func:`apply`. The logits have the dtype of ``config``.

    Returns:
      A scalar: float32 (float64 if ``config.dtype`` is float64). 0 if no position counts.

    Example:
      >>> params = bert.init(jax.random.key(0), bert.SMALL, mlm=True)
      >>> hidden, labels = jnp.ones((2, 8, 128)), jnp.array([[7], [3]])
      >>> loss = bert.masked_lm_loss(params, hidden, labels, bert.SMALL, positions=[[0], [5]])
      >>> loss.shape
      ()
    """
    hidden, labels = jnp.asarray(hidden), jnp.asarray(labels)
    if positions is not None:
        hidden = whole(hidden, hidden.ndim - 2)
        hidden = jnp.take_along_axis(hidden, jnp.asarray(positions)[..., None], -2)
    _CHECK.shape("labels", labels, "the positions", hidden.shape[:-1])
    x = _masked_lm_head(params, hidden, config, ops)
    word, bias = params["embeddings"]["word"], params["mlm"]["bias"]
    return vocabulary_loss(x, word, labels, config, ops, bias=bias, where=where)


def _masked_lm_head(params: dict, hidden, config: Config, ops: Ops):
    """The head up to the product with the embeddings."""
    _check_model(params, config, ops)
    if "mlm" not in params:
        raise ValueError("bert: params has no ['mlm']; make it with init(..., mlm=True)")
    _CHECK.array("hidden", hidden, (jnp.floating,), "a floating dtype")
    _CHECK.features(hidden, config.hidden_size)
    head = params["mlm"]
    x = jnp.asarray(hidden).astype(config.dtype)
    x = dot(x, head["dense"]["kernel"].astype(x.dtype))
    x = ops.bias_act(x, head["dense"]["bias"], activation=config.activation)
    return ops.layer_norm(x, head["norm"]["scale"], head["norm"]["bias"], eps=config.eps)


def _check(params, tokens, config, mask, token_types, positions, segments, key, ops) -> list:
    """Checks the arguments; returns the four arrays, with a boolean mask. ``None`` stays.

    With segments, a pair of ids and their largest number, the mask is ``Segments``.
    Padding has indices that the tables have.
    """
    _check_model(params, config, ops)
    tokens = _CHECK.integers("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[1] == 0:  # the pooler reads the first token
        raise ValueError(
            f"bert: tokens has shape {tokens.shape}; it must be (batch, sequence), with one token "
            "or more"
        )
    shape = tokens.shape
    mask = inside = _CHECK.mask(mask, "tokens", shape)
    given, limit = segments
    segments = checked(_CHECK, given, limit, mask, shape)
    if segments is not None:
        mask, inside = segments, segments.inside
    if token_types is not None:
        if config.token_types is None:
            raise ValueError("bert: token_types is given; config has none")
        token_types = _CHECK.integers("token_types", token_types)
        _CHECK.shape("token_types", token_types, "tokens", shape)
    positions = _CHECK.positions(positions, shape)
    if positions is None and segments is not None:
        positions = segments.positions()
    elif positions is None and shape[1] > config.positions:
        raise ValueError(
            f"bert: tokens has shape {shape}, but config has {config.positions} positions"
        )
    _check_key(config, key)
    return [
        in_table(tokens, config.vocab_size, inside),
        mask,
        in_table(token_types, config.token_types or 1, inside),
        in_table(positions, config.positions, inside),
    ]


def _check_capacity(capacity, mask) -> int | None:
    """Checks that the batch has a mask, if there is a capacity of tokens."""
    if capacity is None:
        return None
    capacity = _CHECK.integer("token_capacity", capacity, 1)
    if mask is None or isinstance(mask, Segments):
        raise ValueError(
            f"bert: token_capacity is {capacity}, for a batch with a mask and without segment_ids"
        )
    if any(map(is_symbolic_dim, mask.shape)):
        raise ValueError(
            f"bert: token_capacity is {capacity}, but tokens has the symbolic shape {mask.shape}; "
            "its sizes must be known when the function is traced"
        )
    if is_sharded(mask, 0) or is_sharded(mask, 1):
        raise ValueError(
            f"bert: token_capacity is {capacity}, but the mask is sharded as "
            f"{explicit_spec(mask)}; call apply in jax.shard_map"
        )
    return capacity


def _check_layer_arguments(x, config, mask, key):
    """Checks a layer's arguments except parameters; returns the boolean mask, or ``None``."""
    kind = str(getattr(x, "dtype", type(x).__name__))
    if kind != config.dtype:
        raise TypeError(
            f"bert: x is of {kind}; it must be an array of the dtype of config, {config.dtype}"
        )
    if x.ndim != 3 or x.shape[2] != config.hidden_size:
        raise ValueError(
            f"bert: x has shape {x.shape}; it must be (batch, sequence, {config.hidden_size})"
        )
    mask = _CHECK.mask(mask, "x", x.shape[:2])
    _check_key(config, key)
    return mask


def _check_key(config, key) -> None:
    """Checks that the key is ``None``, or one that the dropouts of ``config`` can use."""
    _CHECK.key(key)
    if key is not None and config.attention_dropout > 0 and config.attention != "softmax":
        raise ValueError(
            f"bert: attention_dropout is {config.attention_dropout}, but attention="
            f"{config.attention!r} has no dropout of probabilities; train with attention_dropout=0 "
            "or attention='softmax'"
        )


def _check_types(config, ops) -> None:
    _CHECK.type("config", config, Config, "a Config")
    _CHECK.type("ops", ops, Ops, "an Ops, such as FASTOPS or PLAIN")


def _check_model(params, config, ops) -> None:
    _check_types(config, ops)
    _CHECK.type("params", params, dict, "a dict")
    heads = {name: name in params for name in ("mlm", "nsp", "qa")}
    expected = shapes(config, **heads, labels=_label_count(params))
    if "pooler" not in params:
        del expected["pooler"]
    expected["layers"] = _stacked_like(params.get("layers"), expected["layers"])
    _CHECK.tree("params", params, expected)


def _label_count(params) -> int | None:
    """The number of labels by the classifier's first array, or ``None`` without a classifier."""
    if "classifier" not in params:
        return None
    arrays = jax.tree.leaves(params["classifier"])
    return (1, *jnp.shape(arrays[0]))[-1] if arrays else 1  # _CHECK.tree names what is missing


def _stacked_like(layers, expected: list):
    """The expected shapes of the layers, stacked if ``layers`` are."""
    return _parameters.stacked_shapes(expected) if isinstance(layers, dict) else expected
