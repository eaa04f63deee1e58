"""The network of :mod:`jax_fastops.models.bert`: its sizes, ops, embeddings, layers and pooler."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_fastops._projection import attend_list, takes_bias
from jax_fastops.attention import qkv_attention
from jax_fastops.bias_act import ACTIVATIONS
from jax_fastops.models._checks import Checks
from jax_fastops.models._layers import in_turn
from jax_fastops.models._parameters import cast_kernels, stack, unstack
from jax_fastops.models._products import (
    ATTENTIONS,
    accumulator_dtype,
    biased,
    dense_act,
    dot,
    jax_attention,
    take_rows,
    wide_product,
)
from jax_fastops.models._segments import Segments
from jax_fastops.models._sharding import element, is_sharded, split_last, varying_with, whole
from jax_fastops.models._tokens import Tokens

_CHECK = Checks("bert")


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a BERT. Hashable, for a static argument of ``jax.jit``.

    Attributes:
      vocab_size: the number of words.
      hidden_size: the number of features of a token.
      layers: the number of encoder layers.
      heads: the number of attention heads, which divides ``hidden_size``.
      intermediate_size: the number of features inside the feed-forward.
      positions: the longest sequence.
      token_types: the number of token types, such as first and second sentence. ``None``: none, as
        in DistilBERT.
      activation: of the feed-forward: ``"gelu_exact"`` (by erf; Hugging Face's ``"gelu"``),
        ``"gelu"`` (by tanh; Hugging Face's ``"gelu_new"``), or another one of
        :func:`~jax_fastops.bias_act`.
      eps: added to variances.
      dropout: dropout rate of the embeddings and of the outputs of attention and feed-forward.
      attention_dropout: dropout rate of the attention weights.
      dtype: of products and activations: ``"bfloat16"``, ``"float16"``, ``"float32"`` or
        ``"float64"``. Parameters may have another dtype.
      attention: ``"softmax"``: the attention of ``ops``. ``"xla"`` or ``"cudnn"``:
        ``jax.nn.dot_product_attention`` with that implementation, which has no dropout. cuDNN's
        needs a GPU and bfloat16 or float16. XLA's takes no float16 on a CPU.
      tensor_parallel: whether parameters may be sharded as :func:`partition_specs` says. The
        kernel of queries, keys and values then has the shape ``[E, 3, heads, E / heads]``, and its
        bias ``[3, heads, E / heads]``, and the passes of the loss are XLA's, which can shard the
        vocabulary.
      remat: whether the backward recomputes layers. It then keeps the input of each layer, the
        norms' inputs, results and statistics (with dropout, the products before the norms in place
        of the inputs). It recomputes the other intermediate results of feed-forward and attention,
        but not the two products before the norms. On a CPU, XLA undoes this unless the layers are
        a ``scan``.
      remat_every: a number of layers, or ``None``. The backward then recomputes groups of so many
        layers, and keeps only the input of each group. ``remat`` is about each layer inside of a
        group: with both, a layer is computed up to three times.
      scan: whether the layers are one ``jax.lax.scan``. The program's size and compilation time
        then do not grow with ``layers``.
      init_range: the standard deviation of a new network's kernels and embeddings.
      pooler_activation: of the pooler: ``"tanh"``, or one of :func:`~jax_fastops.bias_act`.
      embedding_size: the number of features of the embeddings, which a product maps to
        ``hidden_size``, as in ELECTRA. ``None``: ``hidden_size``, without a product.

    Example:
      >>> bert.Config(hidden_size=1024, heads=16, layers=24).positions
      512
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    layers: int = 12
    heads: int = 12
    intermediate_size: int = 3072
    positions: int = 512
    token_types: int | None = 2
    activation: str = "gelu_exact"
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    dtype: str = "bfloat16"
    attention: str = "softmax"
    tensor_parallel: bool = False
    remat: bool = False
    remat_every: int | None = None
    scan: bool = False
    init_range: float = 0.02
    pooler_activation: str = "tanh"
    embedding_size: int | None = None

    def __post_init__(self) -> None:
        _CHECK.fields(self)
        if self.embedding_size == self.hidden_size:
            object.__setattr__(self, "embedding_size", None)
        if self.hidden_size % self.heads:
            raise ValueError(
                f"bert: heads is {self.heads}, which does not divide hidden_size, "
                f"{self.hidden_size}"
            )
        _CHECK.choice("activation", self.activation, tuple(ACTIVATIONS))
        _CHECK.choice("pooler_activation", self.pooler_activation, ("tanh", *ACTIVATIONS))
        _CHECK.choice("attention", self.attention, ATTENTIONS)
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            if not 0 <= rate < 1:
                raise ValueError(f"bert: {name} is {rate}; it must be from 0 to less than 1")
        _CHECK.finite(eps=self.eps, init_range=self.init_range)


class Ops(NamedTuple):
    """The functions in which two implementations of the model differ.

    Each has the arguments and the results of the function of this name in ``jax_fastops``.
    ``qkv_attention`` takes the packed result of a product. ``attention`` is for a sequence that is
    sharded over Explicit axes, and ``split_qkv_heads``, with one head, for it and JAX's cuDNN.

    Example:
      >>> mixed = bert.FASTOPS._replace(layer_norm=bert.PLAIN.layer_norm)
      >>> isinstance(mixed, bert.Ops)
      True
    """

    qkv_attention: Callable
    attention: Callable
    split_qkv_heads: Callable
    residual_layer_norm: Callable
    layer_norm: Callable
    bias_act: Callable
    dense_act: Callable
    dropout: Callable
    linear_cross_entropy: Callable
    take: Callable


# What the backward of a layer keeps under ``remat``. A kernel's results are kept or recomputed
# together: with the statistics of a norm, its result and its input are kept, and the product before
# it is not repeated. If the norm takes the reference, the product is kept instead of the sum.
_SUM, _NORM = "bert_sum", "bert_norm"
_KEPT_PRIMITIVES = {f"fastops_{name}_fwd" for name in ("layer_norm", "residual_layer_norm")}
_KEEP = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(_SUM, _NORM),
    lambda primitive, *_, **__: primitive.name in _KEPT_PRIMITIVES,
)


def embed(params: dict, tokens, config: Config, token_types, positions, key, ops: Ops):
    """The input of the first layer: embeddings, layer norm, dropout, product."""
    x = _embeddings(params, tokens, config, token_types, positions, ops)
    x = ops.layer_norm(x, params["norm"]["scale"], params["norm"]["bias"], eps=config.eps)
    if key is not None and config.dropout > 0:
        x = ops.dropout(x, key, config.dropout)
    if config.embedding_size is None:
        return x
    product = params["projection"]
    return biased(dot(x, product["kernel"].astype(x.dtype)), product["bias"])


def _embeddings(params: dict, tokens, config: Config, token_types, positions, ops: Ops):
    """The sum of the three embeddings, computed in float32 and rounded once."""
    rows = functools.partial(take_rows, config=config, ops=ops)
    x = rows(params["word"], tokens).astype(accumulator_dtype(config.dtype))
    table = params["position"]
    x = biased(x, table[: tokens.shape[1]] if positions is None else rows(table, positions))
    if config.token_types is None:
        return x.astype(config.dtype)
    table = params["token_type"]
    if token_types is None:
        x = biased(x, table[0])
    else:
        # There are few types. In the gradient of a gather, all tokens would add to the same rows.
        one_hot = jax.nn.one_hot(token_types, config.token_types, dtype=table.dtype)
        known = (token_types >= 0) & (token_types < config.token_types)
        one_hot = jnp.where(known[..., None], one_hot, jnp.nan)
        x = biased(x, jnp.dot(one_hot, table, precision=jax.lax.Precision.HIGHEST))
    return x.astype(config.dtype)


def pool(params: dict, x, config: Config, mask):
    """The pooler's output for the first token, or for that of each segment."""
    equation, first, exists = "be,ef->bf", None, None
    if not isinstance(mask, Segments):
        first = element(x, 0)
    elif mask.limit is None:
        return None
    else:
        equation, (first, exists) = "bse,ef->bsf", mask.first_tokens(x)
    y = wide_product(equation, first, params["kernel"])
    own = config.pooler_activation
    activation = jnp.tanh if own == "tanh" else ACTIVATIONS[own]
    y = activation(biased(y, params["bias"])).astype(x.dtype)
    return y if exists is None else jnp.where(exists[..., None], y, jnp.zeros_like(y))


def encode(layers, x, config: Config, mask, key, ops: Ops):
    """Applies all layers. Casts their kernels once, so that no backward casts them again.

    ``mask`` may be ``Segments`` in place of an array, or the ``Tokens`` of which ``x`` is a list.
    """
    layers = cast_kernels(layers, config.dtype)
    if mask is not None and not isinstance(mask, (Segments, Tokens)):
        mask = whole(mask, 1)

    keys = None if key is None else jax.random.split(key, config.layers)
    layer = layer_function(config, mask, ops)
    if config.scan:
        stacked = layers if isinstance(layers, dict) else stack(layers)
        # Under jax.shard_map a layer's result varies over the same mesh axes as these.
        shared = mask.ids if isinstance(mask, Segments) else mask
        given = jax.tree.leaves((stacked, shared, keys))
        return in_turn(layer, varying_with(x, given), (stacked, keys), config)[0]
    layers = unstack(layers) if isinstance(layers, dict) else layers
    each = [(one, None if keys is None else keys[k]) for k, one in enumerate(layers)]
    if not config.remat and config.remat_every is None:
        # A layer's result has two users. With fanout each gets its own, and no separate pass adds
        # their cotangents. Not in a scan, which would carry both, nor in a checkpoint, which would
        # keep both.
        x, _ = in_turn(functools.partial(layer, fanout=True), x, each[:-1], config)
        each = each[-1:]
    return in_turn(layer, x, each, config)[0]


def layer_function(config: Config, mask, ops: Ops) -> Callable:
    """A layer, as :func:`in_turn` takes it, of its parameters and its random key."""

    def layer(x, each, fanout=False):
        params, key = each
        return apply_layer(params, x, config, mask, key, ops, fanout), None

    if config.remat:
        # XLA does not merge a scan's body with its backward, so no CSE barrier is needed.
        layer = jax.checkpoint(layer, policy=_KEEP, prevent_cse=not config.scan)
    return layer


def apply_layer(params: dict, x, config: Config, mask, key, ops: Ops, fanout: bool):
    """Applies a layer to an array, or to the pair from a layer with ``fanout``."""
    keys = (None, None, None) if key is None else jax.random.split(key, 3)
    params = cast_kernels(params, config.dtype)
    x, residual = x if isinstance(x, tuple) else (x, x)
    y = _attention(params["qkv"], x, config, mask, keys[0], ops)
    norm = functools.partial(_add_norm, config=config, ops=ops)
    x = norm(params["output"], params["output_norm"], y, residual, keys[1], fanout=not config.remat)
    x, residual = x if isinstance(x, tuple) else (checkpoint_name(x, _NORM),) * 2
    y = dense_act(params["up"], x, config, ops)
    return norm(params["down"], params["norm"], y, residual, keys[2], fanout=fanout)


def _attention(params: dict, x, config: Config, mask, key, ops: Ops):
    """Attention without its output's product.

    There is one product, to which XLA adds the bias. Three products would be merged by XLA in the
    forward, but not in the backward, where it adds up three results.
    """
    if isinstance(mask, Segments):
        where: dict[str, Any] = dict(segment_ids=mask.for_attention())
    elif isinstance(mask, Tokens):
        where = dict(query_seq_lengths=mask.counts, key_value_seq_lengths=mask.counts)
    else:
        where = dict(mask=None if mask is None else mask[:, None, None, :])
    drop = _drop_options(key, config.attention_dropout)
    qkv = dot(x, params["kernel"])
    if isinstance(mask, Tokens):
        length = mask.row_in_list.shape[1]
        own = config.attention == "softmax" and ops.qkv_attention is qkv_attention and not drop
        if own and takes_bias(qkv, config.heads, length):
            options = dict(length=length, num_heads=config.heads)
            return attend_list(qkv[0], params["bias"], mask.offsets, **options)[None]
        qkv = mask.to_rows(qkv)
    y = _attention_of(params["bias"], qkv, config, ops, **where, **drop)
    return mask.of_rows(y) if isinstance(mask, Tokens) else y


def _attention_of(bias, qkv, config: Config, ops: Ops, **options: Any):
    """Attention of a product without its bias. ``options`` are those of ``ops.attention``."""
    own = config.attention == "softmax"
    if own and not is_sharded(qkv, 1):
        # A kernel of this package adds the bias. Otherwise XLA does, maybe in the product.
        short = options.keys() <= {"mask", "query_seq_lengths", "key_value_seq_lengths"}
        short = short and takes_bias(qkv, config.heads)
        given = (qkv, bias) if short else (biased(qkv, bias),)
        return ops.qkv_attention(*given, num_heads=config.heads, **options)
    head_size = config.hidden_size // config.heads
    if config.tensor_parallel or config.attention == "xla":  # XLA fuses the split
        qkv = biased(qkv, bias)
        qkv = qkv if config.tensor_parallel else split_last(qkv, 3, config.heads, head_size)
        parts = [jnp.squeeze(part, 2) for part in jnp.split(qkv, 3, axis=2)]
    else:
        # Splitting as if there were one head is one pass in each direction, including the bias and
        # its gradient. XLA would concatenate the three cotangents twice.
        parts = ops.split_qkv_heads(qkv, bias, num_heads=1)
        parts = [split_last(jnp.squeeze(part, 1), config.heads, head_size) for part in parts]
    q, k, v = parts
    attention = ops.attention if own else jax_attention(config.attention)
    y = attention(q, whole(k, 1), whole(v, 1), **options)
    return y.reshape(*y.shape[:2], config.hidden_size)


def _add_norm(product: dict, norm: dict, y, x, key, *, config: Config, ops: Ops, fanout: bool):
    """A product, then its bias, dropout, the residual and layer norm."""
    y = checkpoint_name(dot(y, product["kernel"]), _SUM)
    return ops.residual_layer_norm(
        y,
        x,
        norm["scale"],
        norm["bias"],
        input_bias=product["bias"],
        eps=config.eps,
        fanout=fanout,
        **_drop_options(key, config.dropout),
    )


def _drop_options(key, rate: float) -> dict[str, Any]:
    """The options of an op that has dropout. Without dropout, an op need not have these options."""
    return {} if key is None or rate == 0 else dict(dropout_key=key, dropout_rate=rate)
