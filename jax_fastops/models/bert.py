"""BERT in plain functions: embeddings, post-norm encoder layers, a pooler, the masked-word head.

``init`` makes parameters, a pytree of arrays. ``apply`` maps tokens to hidden states. A layer has
six matrix products and six fused ops: the split into heads with its bias, softmax with scale, mask
and dropout, the merge of heads, two layer norms with bias, dropout and residual, and the activation
with bias. The
functions that compute these ops are an argument, so that a training on ``jax_fastops`` and one in
plain JAX differ in nothing else::

    config = bert.BASE
    params = bert.init(jax.random.key(0), config)
    hidden, pooled = bert.apply(params, tokens, config, mask=tokens != 0)

:mod:`jax_fastops.models.bert_checkpoint` reads and writes Hugging Face's checkpoints.

Sources: FasterTransformer v1.0 (NVIDIA DeepLearningExamples), the encoder layer; Devlin et al.,
"BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

import jax_fastops as fo
from jax_fastops.models._checks import check_choice, check_tree, dtype_name, integer, number
from jax_fastops.models._sharding import dot, explicit_spec, first, varying_with, whole

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

_ACTIVATIONS = {
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
_ATTENTIONS = ("softmax", "xla", "cudnn")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "layers",
    "heads",
    "intermediate_size",
    "positions",
    "token_types",
)


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
      token_types: the number of token types, such as first and second sentence.
      activation: of the feed-forward: ``"gelu_exact"`` (by erf; Hugging Face's ``"gelu"``),
        ``"gelu"`` (by tanh; Hugging Face's ``"gelu_new"``), ``"relu"`` or ``"silu"``.
      eps: added to variances.
      dropout: dropout rate of the embeddings and of the outputs of attention and feed-forward.
      attention_dropout: dropout rate of the attention weights.
      dtype: of products and activations: ``"bfloat16"``, ``"float16"``, ``"float32"`` or
        ``"float64"``. Parameters are float32.
      attention: ``"softmax"``: two products with the softmax of ``ops`` between them. ``"xla"`` or
        ``"cudnn"``: ``jax.nn.dot_product_attention`` with that implementation, which has no
        dropout. cuDNN's needs a GPU and bfloat16 or float16. XLA's takes no float16 on a CPU.
      tensor_parallel: whether parameters may be sharded as :func:`partition_specs` says. The
        kernel of queries, keys and values then has the shape ``[E, 3, heads, E / heads]``, and its
        bias ``[3, heads, E / heads]``, and the passes of the loss are XLA's, which can shard the
        vocabulary.
      remat: whether the backward recomputes layers. It then keeps the input of each layer, the
        norms' inputs, results and statistics (with dropout, the products before the norms in place
        of the inputs). It recomputes the other intermediate results of feed-forward and attention,
        but not the two products before the norms. On a CPU, XLA undoes this unless the layers are
        a ``scan``.
      scan: whether the layers are one ``jax.lax.scan``. The program's size and compilation time
        then do not grow with ``layers``.
      init_range: the standard deviation of a new network's kernels and embeddings.

    Raises:
      TypeError: a size is not an integer, a rate is not a number, or ``tensor_parallel``, ``remat``
        or ``scan`` is not a boolean.
      ValueError: a number is out of its range, or a choice is not one of those above.

    Example:
      >>> from jax_fastops.models import bert
      >>> bert.Config(hidden_size=1024, heads=16, layers=24).positions
      512
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    layers: int = 12
    heads: int = 12
    intermediate_size: int = 3072
    positions: int = 512
    token_types: int = 2
    activation: str = "gelu_exact"
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    dtype: str = "bfloat16"
    attention: str = "softmax"
    tensor_parallel: bool = False
    remat: bool = False
    scan: bool = False
    init_range: float = 0.02

    def __post_init__(self) -> None:
        # Canonical values: a NumPy number equals Python's, but a NumPy dtype not its name.
        set_ = functools.partial(object.__setattr__, self)
        for name in _SIZES:
            set_(name, integer("bert", name, getattr(self, name), 1))
        if self.hidden_size % self.heads:
            raise ValueError(
                f"bert: heads is {self.heads}, which does not divide hidden_size, "
                f"{self.hidden_size}"
            )
        set_("dtype", dtype_name("bert", self.dtype))
        check_choice("bert", "activation", self.activation, tuple(_ACTIVATIONS))
        check_choice("bert", "attention", self.attention, _ATTENTIONS)
        for name in ("dropout", "attention_dropout"):
            rate = number("bert", name, getattr(self, name))
            if not 0 <= rate < 1:
                raise ValueError(f"bert: {name} is {rate}; it must be from 0 to less than 1")
            set_(name, rate)
        for name in ("eps", "init_range"):
            value = number("bert", name, getattr(self, name))
            if not 0 <= value < math.inf:
                raise ValueError(f"bert: {name} is {value}; it must be 0 or more, and finite")
            set_(name, value)
        for name in ("tensor_parallel", "remat", "scan"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"bert: {name} is {value!r}; it must be True or False")
            set_(name, bool(value))


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


# ---- ops -----------------------------------------------------------------------------------------


class Ops(NamedTuple):
    """The functions in which two implementations of the model differ.

    Attributes:
      split_qkv_heads: like :func:`jax_fastops.split_qkv_heads`. It is called with one head for
        cuDNN's attention, which takes another layout of the heads.
      merge_heads: like :func:`jax_fastops.merge_heads`.
      softmax: like :func:`jax_fastops.softmax`.
      residual_layer_norm: like :func:`jax_fastops.residual_layer_norm`.
      layer_norm: like :func:`jax_fastops.layer_norm`.
      bias_act: like :func:`jax_fastops.bias_act`.
      dropout: like :func:`jax_fastops.dropout`.
      linear_cross_entropy: like :func:`jax_fastops.linear_cross_entropy`.

    Example:
      >>> from jax_fastops.models import bert
      >>> mixed = bert.FASTOPS._replace(softmax=bert.PLAIN.softmax)
      >>> isinstance(mixed, bert.Ops)
      True
    """

    split_qkv_heads: Callable
    merge_heads: Callable
    softmax: Callable
    residual_layer_norm: Callable
    layer_norm: Callable
    bias_act: Callable
    dropout: Callable
    linear_cross_entropy: Callable


def _plain_split_qkv_heads(qkv, bias=None, *, num_heads: int):
    if bias is not None:
        qkv = qkv + bias.astype(qkv.dtype)
    if (
        num_heads == 1
    ):  # the gradient of a split is a concatenation; that of indexing is a sum with zeros
        return tuple(part[..., None, :, :] for part in jnp.split(qkv, 3, axis=-1))
    *lead, features = qkv.shape
    qkv = qkv.reshape(*lead, 3, num_heads, features // (3 * num_heads))
    return tuple(jnp.swapaxes(qkv[..., part, :, :], -3, -2) for part in range(3))


def _plain_merge_heads(x):
    x = jnp.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _plain_dropout(x, key, rate: float):
    """Dropout with the masks of this package."""
    if key is None or rate == 0:
        return x
    keep = fo.dropout_mask(key, x.shape, rate)
    if explicit_spec(x) is not None:
        keep = jax.sharding.reshard(keep, jax.typeof(x).sharding)
    # A divisor in bfloat16 would be rounded, which scales every kept element wrongly.
    kept = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) / (1 - rate)).astype(x.dtype)
    return jnp.where(keep, kept, jnp.zeros_like(x))


def _plain_softmax(
    x,
    axis=-1,
    where=None,
    *,
    scale: float = 1.0,
    dropout_key=None,
    dropout_rate: float = 0.0,
    dropout=_plain_dropout,
):
    y = jax.nn.softmax(x * scale, axis=axis, where=where)
    return dropout(y, dropout_key, dropout_rate)


def _plain_residual_layer_norm(
    x,
    residual,
    scale=None,
    bias=None,
    *,
    input_bias=None,
    dropout_key=None,
    dropout_rate: float = 0.0,
    eps: float = 1e-6,
    return_sum=False,
    fanout=False,
    dropout=_plain_dropout,
):
    if input_bias is not None:
        x = x + input_bias.astype(x.dtype)
    x = dropout(x, dropout_key, dropout_rate) + residual
    y = _plain_layer_norm(x, scale, bias, eps=eps, fanout=fanout)
    return (y, x) if return_sum else y


def _plain_layer_norm(x, scale=None, bias=None, *, eps: float = 1e-6, fanout=False):
    """Layer norm in float32 (float64 for float64), rounded once, as models usually write it."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - wide.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    y = (y if bias is None else y + bias).astype(x.dtype)
    return (y, y) if fanout else y


def _plain_bias_act(x, bias, *, activation: str = "gelu"):
    return _ACTIVATIONS[activation](x + bias.astype(x.dtype))


def _plain_linear_cross_entropy(
    x,
    table,
    labels,
    *,
    bias=None,
    where=None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
):
    """With all logits at once, in float32."""
    del chunk
    logits = _wide_product("...e,ve->...v", x, table)
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    kept = (labels >= 0) & (labels < table.shape[0])
    kept = kept if where is None else kept & where
    # A masked sum instead of an indexed read, whose gradient would be a scatter.
    at_label = jnp.arange(table.shape[0]) == labels[..., None]
    lse = jax.nn.logsumexp(logits, -1)
    each = lse - jnp.sum(jnp.where(at_label, logits, 0), -1)
    if label_smoothing:
        each = (1 - label_smoothing) * each + label_smoothing * (lse - jnp.mean(logits, -1))
    each = each + z_loss * jnp.square(lse) if z_loss else each
    each = jnp.where(kept, each, 0)
    if reduction == "none":
        return each
    return jnp.sum(each) / (jnp.maximum(jnp.sum(kept), 1) if reduction == "mean" else 1)


#: The ops of this package.
FASTOPS = Ops(
    fo.split_qkv_heads,
    fo.merge_heads,
    fo.softmax,
    fo.residual_layer_norm,
    fo.layer_norm,
    fo.bias_act,
    fo.dropout,
    fo.linear_cross_entropy,
)
#: The same ops on ``jax.nn`` and ``jax.numpy``, with the same dropout masks.
PLAIN = Ops(
    _plain_split_qkv_heads,
    _plain_merge_heads,
    _plain_softmax,
    _plain_residual_layer_norm,
    _plain_layer_norm,
    _plain_bias_act,
    _plain_dropout,
    _plain_linear_cross_entropy,
)


# ---- parameters ----------------------------------------------------------------------------------


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
      nsp: whether to include the next-sentence head, ``{"kernel": [E, 2], "bias": [2]}``. Its
        logits are ``pooled @ kernel + bias``.
      labels: the number of labels of the classifier, or ``None`` for no classifier. Its logits are
        ``pooled @ kernel + bias`` for sequences, and ``hidden @ kernel + bias`` for tokens.
      qa: whether to include the head for question answering. ``hidden @ kernel + bias`` are two
        logits of each token: whether the answer begins there, and whether it ends there.

    Returns:
      A tree of dictionaries. ``E`` is ``hidden_size`` and ``F`` is ``intermediate_size``. A product
      is ``{"kernel": [in, out], "bias": [out]}``, a norm ``{"scale": [E], "bias": [E]}``. All are
      float32.

      - ``"embeddings"``: the tables ``"word"``, ``"position"``, ``"token_type"``, each
        ``[..., E]``, and ``"norm"``.
      - ``"layers"``: a list. Each layer has ``"qkv"`` (to ``3 * E``: queries, keys, values; with
        ``config.tensor_parallel`` to ``[3, heads, E / heads]``), ``"output"`` and
        ``"output_norm"`` of the attention, and ``"up"`` (to ``F``), ``"down"`` and ``"norm"`` of
        the feed-forward.
      - ``"pooler"``: a product.
      - ``"mlm"``, if requested: ``"dense"``, ``"norm"`` and ``"bias": [vocab_size]``.
      - ``"nsp"`` (to 2), ``"classifier"`` (to ``labels``) and ``"qa"`` (to 2), if requested:
        products.

    Raises:
      TypeError: ``labels`` is neither an integer nor ``None``.
      ValueError: ``labels`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> bert.shapes(bert.SMALL)["embeddings"]["word"].shape
      (128, 128)
    """
    e = config.hidden_size
    params = {
        "embeddings": {
            "word": _float32(config.vocab_size, e),
            "position": _float32(config.positions, e),
            "token_type": _float32(config.token_types, e),
            "norm": _norm_shapes(e),
        },
        "layers": [_layer_shapes(config) for _ in range(config.layers)],
        "pooler": _product_shapes(e, e),
    }
    if mlm:
        params["mlm"] = {
            "dense": _product_shapes(e, e),
            "norm": _norm_shapes(e),
            "bias": _float32(config.vocab_size),
        }
    if nsp:
        params["nsp"] = _product_shapes(e, 2)
    if labels is not None:
        params["classifier"] = _product_shapes(e, integer("bert", "labels", labels, 1))
    if qa:
        params["qa"] = _product_shapes(e, 2)
    return params


def _layer_shapes(config: Config) -> dict:
    e, f = config.hidden_size, config.intermediate_size
    heads = (3, config.heads, e // config.heads) if config.tensor_parallel else (3 * e,)
    return {
        "qkv": _product_shapes(e, *heads),
        "output": _product_shapes(e, e),
        "output_norm": _norm_shapes(e),
        "up": _product_shapes(e, f),
        "down": _product_shapes(f, e),
        "norm": _norm_shapes(e),
    }


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _product_shapes(n_in: int, *n_out: int) -> dict:
    return {"kernel": _float32(n_in, *n_out), "bias": _float32(*n_out)}


def _norm_shapes(n: int) -> dict:
    return {"scale": _float32(n), "bias": _float32(n)}


# The axis that tensor parallelism shards, of the parameters whose path ends so.
_SHARDED: dict[tuple, int] = {
    ("qkv", "kernel"): 2,
    ("qkv", "bias"): 1,
    ("output", "kernel"): 0,
    ("up", "kernel"): 1,
    ("up", "bias"): 0,
    ("down", "kernel"): 0,
    ("embeddings", "word"): 0,
    ("mlm", "bias"): 0,
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
    """The shardings of the parameters.

    With ``config.tensor_parallel``, the heads of the attention, the features inside the
    feed-forward, and the rows of the vocabulary are sharded. The axis of the mesh must divide
    ``heads``, ``intermediate_size`` and ``vocab_size``. Otherwise, parameters are replicated.

    Args:
      config: a :class:`Config`.
      mlm: as in :func:`shapes`, as are ``nsp``, ``labels`` and ``qa``.
      nsp: whether there is the next-sentence head.
      labels: the number of labels of the classifier, or ``None``.
      qa: whether there is the head for question answering.
      tensor: the name of the mesh axis.

    Returns:
      A tree of ``jax.sharding.PartitionSpec``, like that of :func:`shapes`; with ``config.scan``
      like that of stacked layers.

    Example:
      >>> import jax
      >>> from jax_fastops.models import bert
      >>> specs = bert.partition_specs(bert.Config(tensor_parallel=True))
      >>> specs["layers"][0]["up"]["kernel"] == jax.sharding.PartitionSpec(None, "tensor")
      True
    """

    def spec(path, leaf):
        names = tuple(getattr(step, "key", None) for step in path[-2:])
        own: list[str | None] = [None] * len(leaf.shape)
        if config.tensor_parallel and names in _SHARDED:
            own[_SHARDED[names]] = tensor
        return PartitionSpec(*own)

    wanted = shapes(config, mlm=mlm, nsp=nsp, labels=labels, qa=qa)
    specs = jax.tree.map_with_path(spec, wanted)
    if config.scan:
        layer = specs["layers"][0]
        specs["layers"] = jax.tree.map(lambda own: PartitionSpec(None, *own), layer)
    return specs


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
      config: a :class:`Config`.
      mlm: whether to include the head of :func:`masked_lm_logits`.
      nsp: whether to include the next-sentence head.
      labels: the number of labels of the classifier, or ``None`` for no classifier.
      qa: whether to include the head for question answering.

    Returns:
      Arrays with the shapes that :func:`shapes` gives.

    Raises:
      TypeError: ``labels`` is neither an integer nor ``None``.
      ValueError: ``labels`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> params["layers"][0]["up"]["kernel"].shape
      (128, 512)

      The logits of a classifier of sequences:

      >>> params = bert.init(jax.random.key(0), bert.SMALL, labels=3)
      >>> _, pooled = bert.apply(params, jnp.array([[1, 2, 3, 0]]), bert.SMALL)
      >>> logits = pooled @ params["classifier"]["kernel"] + params["classifier"]["bias"]
      >>> logits.shape
      (1, 3)
    """
    wanted = shapes(config, mlm=mlm, nsp=nsp, labels=labels, qa=qa)
    named, tree = jax.tree.flatten_with_path(wanted)
    keys = jax.random.split(key, len(named))
    made = []
    for one, (path, leaf) in zip(keys, named, strict=True):
        if path[-1].key not in ("scale", "bias"):
            made.append(config.init_range * jax.random.normal(one, leaf.shape, leaf.dtype))
        else:
            made.append(jnp.full(leaf.shape, float(path[-1].key == "scale"), leaf.dtype))
    return jax.tree.unflatten(tree, made)


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Stacks the layers into one tree, whose arrays have a leading axis over the layers.

    A ``scan`` over layers reads this form directly. It copies a list of layers in every step.

    Args:
      params: parameters, as from :func:`init`. If their layers are stacked, they are returned.

    Returns:
      The parameters with stacked layers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.stack_layers(bert.init(jax.random.key(0), bert.SMALL))
      >>> params["layers"]["up"]["kernel"].shape
      (2, 128, 512)
    """
    layers = params["layers"]
    return params if isinstance(layers, dict) else params | {"layers": _stack(layers)}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Turns stacked layers into a list: the inverse of :func:`stack_layers`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.stack_layers(bert.init(jax.random.key(0), bert.SMALL))
      >>> len(bert.unstack_layers(params)["layers"])
      2
    """
    layers = params["layers"]
    return params | {"layers": _unstack(layers)} if isinstance(layers, dict) else params


def _stack(layers: list) -> dict:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def _unstack(layers: dict) -> list:
    count = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda a, k=k: a[k], layers) for k in range(count)]


# ---- forward -------------------------------------------------------------------------------------


def apply(
    params: dict[str, Any],
    tokens: ArrayLike,
    config: Config,
    *,
    mask: ArrayLike | None = None,
    token_types: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the hidden states of a batch of token sequences.

    Args:
      params: parameters, as from :func:`init`. The layers are a list, or stacked by
        :func:`stack_layers`.
      tokens: integers ``[batch, sequence]`` from 0 to ``vocab_size - 1``.
      config: the :class:`Config` of the parameters.
      mask: booleans or integers ``[batch, sequence]``: True or 1 for a token, False or 0 for
        padding, which is not attended to. Default: no padding.
      token_types: integers ``[batch, sequence]``. Default: zeros.
      positions: integers ``[sequence]`` or ``[batch, sequence]``. Default: counted from 0.
      key: a JAX random key, for dropout at the rates of ``config``. ``None`` means no dropout, as
        at inference.
      ops: the implementation of the ops: ``FASTOPS``, ``PLAIN``, or another :class:`Ops`.

    Returns:
      ``(hidden, pooled)``: the last layer's output ``[batch, sequence, hidden_size]``, and the
      pooler's output for the first token, ``[batch, hidden_size]``, which is ``None`` if ``params``
      has no ``"pooler"``. Both have the dtype ``config.dtype``. In a sequence that is all padding,
      the attention is zero with ``attention="softmax"``, and uniform with ``"xla"``, as in Hugging
      Face's model.

    Sharding: under ``jax.jit`` with Auto or Explicit axes: tokens over the batch and the sequence,
    and parameters as :func:`partition_specs` says, or replicated. If an Auto axis shards the
    sequence, the mesh must be that of ``jax.set_mesh``.

    Raises:
      TypeError: ``tokens``, ``mask``, ``token_types`` or ``positions`` is not an array of such
        numbers, ``key`` is not a random key, or ``params``, ``config`` or ``ops`` has another type.
      ValueError: a shape or the parameters are not those of ``config``, or ``config`` has a dropout
        of attention weights and ``attention`` has none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> hidden, pooled = bert.apply(params, jnp.array([[1, 2, 3, 0]]), bert.SMALL)
      >>> hidden.shape, pooled.shape
      ((1, 4, 128), (1, 128))
    """
    tokens, mask, token_types, positions = _check(
        params, tokens, config, mask, token_types, positions, key, ops
    )
    embeddings_key, layers_key = (None, None) if key is None else jax.random.split(key)
    x = _embed(params["embeddings"], tokens, config, token_types, positions)
    norm = params["embeddings"]["norm"]
    x = ops.layer_norm(x, norm["scale"], norm["bias"], eps=config.eps)
    if embeddings_key is not None and config.dropout > 0:
        x = ops.dropout(x, embeddings_key, config.dropout)
    x = _encode(params["layers"], x, config, mask, layers_key, ops)
    if "pooler" not in params:
        return x, None
    return x, _pool(params["pooler"], x)


def _embed(params: dict, tokens, config: Config, token_types, positions):
    """The sum of the three embeddings, computed in float32 and rounded once."""
    wide = jnp.promote_types(config.dtype, jnp.float32)
    x = _take(params["word"], tokens).astype(wide)
    table = params["position"]
    x = x + (table[: tokens.shape[1]] if positions is None else _take(table, positions))
    table = params["token_type"]
    if token_types is None:
        x = x + table[0]
    else:
        # There are few types. In the gradient of a gather, all tokens would add to the same rows.
        one_hot = jax.nn.one_hot(token_types, config.token_types, dtype=table.dtype)
        x = x + jnp.dot(one_hot, table, precision=jax.lax.Precision.HIGHEST)
    return x.astype(config.dtype)


def _take(table, index):
    """Rows of a table. Over an explicit mesh, they are sharded like the index."""
    if index.dtype.itemsize < 4:  # JAX needs an index dtype that can hold the table's length
        index = index.astype(jnp.int32)
    spec = explicit_spec(index)
    if spec is None:
        return table[index]
    columns = explicit_spec(table) or (None, None)
    return table.at[index].get(out_sharding=PartitionSpec(*spec, columns[-1]))


def _pool(params: dict, x):
    y = _wide_product("be,ef->bf", first(x), params["kernel"])
    return jnp.tanh(y + params["bias"]).astype(x.dtype)


def encoder(
    layers: list[dict[str, Any]] | dict[str, Any],
    x: jax.Array,
    config: Config,
    *,
    mask: ArrayLike | None = None,
    key: ArrayLike | None = None,
    ops: Ops = FASTOPS,
) -> jax.Array:
    """Applies all encoder layers.

    This is the part of :func:`apply` between the embeddings' dropout and the pooler. The same
    ``key`` draws other masks than in :func:`apply`, which splits it for the embeddings first.

    Args:
      layers: the parameters' ``"layers"``: a list, or stacked by :func:`stack_layers`.
      x: array ``[batch, sequence, hidden_size]`` with the dtype ``config.dtype``.
      config: a :class:`Config`.
      mask: booleans or integers ``[batch, sequence]``, as in :func:`apply`.
      key: a JAX random key, for dropout, or ``None``.
      ops: as in :func:`apply`.

    Returns:
      An array with the shape and dtype of ``x``.

    Sharding: as :func:`apply`.

    Raises:
      TypeError: ``x`` has another dtype, ``mask`` is not an array of booleans or integers, ``key``
        is not a random key, or ``layers``, ``config`` or ``ops`` has another type.
      ValueError: a shape or the parameters are not those of ``config``, or ``config`` has a dropout
        of attention weights and ``attention`` has none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> bert.encoder(params["layers"], jnp.ones((2, 4, 128)), bert.SMALL).shape
      (2, 4, 128)
    """
    _check_config(config, ops)
    if not isinstance(layers, (list, tuple, dict)):
        raise TypeError(
            f"bert: layers is of type {type(layers).__name__}; it must be a list, or a dict of "
            "stacked layers"
        )
    check_tree("bert", "layers", layers, _stacked_like(layers, shapes(config)["layers"]))
    mask = _check_layer_arguments(x, config, mask, key)
    return _encode(layers, x, config, mask, key, ops)


def _encode(layers, x, config: Config, mask, key, ops: Ops):
    """Applies all layers. Casts their kernels once, so that no backward casts them again."""
    layers = _cast(layers, config.dtype)
    mask = None if mask is None else whole(mask, 1)

    # A layer's result has two users. With fanout each gets its own, and no separate pass adds their
    # cotangents. Not in a scan, which would carry both, nor in a checkpoint, which would keep both.
    fanout = not (config.scan or config.remat)

    def layer(params, x, key, fanout=False):
        return _layer(params, x, config, mask, key, ops, fanout)

    if config.remat:
        # XLA does not merge a scan's body with its backward, so no CSE barrier is needed.
        layer = jax.checkpoint(layer, policy=_KEEP, prevent_cse=not config.scan)
    keys = None if key is None else jax.random.split(key, config.layers)
    if config.scan:

        def step(x, each):
            params, key = each
            return layer(params, x, key), None

        stacked = layers if isinstance(layers, dict) else _stack(layers)
        # Under jax.shard_map a layer's result varies over the same mesh axes as these.
        given = [a for a in (*jax.tree.leaves(stacked), mask, keys) if a is not None]
        return jax.lax.scan(step, varying_with(x, given), (stacked, keys))[0]
    layers = _unstack(layers) if isinstance(layers, dict) else layers
    for index, params in enumerate(layers):
        more = {"fanout": True} if fanout and index < config.layers - 1 else {}
        x = layer(params, x, None if keys is None else keys[index], **more)
    return x


def _cast(layers, dtype: str):
    """Casts the kernels to the dtype of the products. The ops take float32 scales and biases."""

    def cast(path, leaf):
        return leaf.astype(dtype) if path[-1].key == "kernel" else leaf

    return jax.tree.map_with_path(cast, layers)


# What the backward of a layer keeps under ``remat``. A kernel's results are kept or recomputed
# together: with the statistics of a norm, its result and its input are kept, and the product before
# it is not repeated. If the norm takes the reference, the product is kept instead of the sum.
_SUM, _NORM = "bert_sum", "bert_norm"
_KEPT_PRIMITIVES = {f"fastops_{name}_fwd" for name in ("layer_norm", "residual_layer_norm")}
_KEEP = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(_SUM, _NORM),
    lambda primitive, *_, **__: primitive.name in _KEPT_PRIMITIVES,
)


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
      x: array ``[batch, sequence, hidden_size]`` with the dtype ``config.dtype``.
      config: a :class:`Config`. ``remat`` and ``scan`` have no effect here.
      mask: booleans or integers ``[batch, sequence]``, as in :func:`apply`.
      key: a JAX random key, for dropout, or ``None``.
      ops: as in :func:`apply`.

    Returns:
      An array with the shape and dtype of ``x``.

    Raises:
      TypeError: ``x`` has another dtype, ``mask`` is not an array of booleans or integers, ``key``
        is not a random key, or ``params``, ``config`` or ``ops`` has another type.
      ValueError: a shape or the parameters are not those of ``config``, or ``config`` has a dropout
        of attention weights and ``attention`` has none.

    Source:
      FasterTransformer, ``BertEncoderTransformer``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.init(jax.random.key(0), bert.SMALL)
      >>> bert.encoder_layer(params["layers"][0], jnp.ones((2, 4, 128)), bert.SMALL).shape
      (2, 4, 128)
    """
    _check_types(params, config, ops)
    check_tree("bert", "params", params, _layer_shapes(config))
    mask = _check_layer_arguments(x, config, mask, key)
    return _layer(params, x, config, mask, key, ops, fanout=False)


def _layer(params: dict, x, config: Config, mask, key, ops: Ops, fanout: bool):
    """Applies a layer to an array, or to the pair from a layer with ``fanout``."""
    keys = (None, None, None) if key is None else jax.random.split(key, 3)
    params = _cast(params, config.dtype)
    x, residual = x if isinstance(x, tuple) else (x, x)
    attention = _softmax_attention if config.attention == "softmax" else _dot_product_attention
    y = attention(params["qkv"], x, config, mask, keys[0], ops)
    norm = functools.partial(_add_norm, config=config, ops=ops)
    x = norm(params["output"], params["output_norm"], y, residual, keys[1], fanout=not config.remat)
    x, residual = x if isinstance(x, tuple) else (checkpoint_name(x, _NORM),) * 2
    y = dot(x, params["up"]["kernel"])
    y = ops.bias_act(y, params["up"]["bias"], activation=config.activation)
    return norm(params["down"], params["norm"], y, residual, keys[2], fanout=fanout)


def _wide_product(equation: str, x, kernel):
    """A product in the dtype of ``x``, whose result has the accumulator dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    kernel = kernel.astype(x.dtype)
    if jax.default_backend() == "cpu":
        # XLA widens the operands on a CPU anyway, but jaxlib 0.8 not those of every product.
        x, kernel = x.astype(wide), kernel.astype(wide)
    return jnp.einsum(equation, x, kernel, preferred_element_type=wide)


def _softmax_attention(params: dict, x, config: Config, mask, key, ops: Ops):
    if config.tensor_parallel:
        q, k, v = (jnp.swapaxes(part, 1, 2) for part in _sharded_heads(params, x))
    else:
        qkv = dot(x, params["kernel"])
        q, k, v = ops.split_qkv_heads(qkv, params["bias"], num_heads=config.heads)
    k, v = whole(k, 2), whole(v, 2)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    where = None if mask is None else mask[:, None, None, :]
    drop = _drop_options(key, config.attention_dropout)
    p = ops.softmax(scores, where=where, scale=q.shape[-1] ** -0.5, **drop)
    return ops.merge_heads(jnp.einsum("bhqk,bhkd->bhqd", p, v))


def _sharded_heads(params: dict, x):
    """Queries, keys and values ``[batch, sequence, heads, size]``, of which heads are sharded."""
    qkv = dot(x, params["kernel"])
    qkv = qkv + params["bias"].astype(x.dtype)
    return [jnp.squeeze(part, 2) for part in jnp.split(qkv, 3, axis=2)]


def _dot_product_attention(params: dict, x, config: Config, mask, key, ops: Ops):
    """Attention by ``jax.nn``, which takes the heads in the layout of the product.

    There is one product, whose result is split into three when the biases are added. XLA would
    merge three products in the forward, but not in the backward, where it adds up three results.
    """
    if config.tensor_parallel:
        parts = _sharded_heads(params, x)
    elif config.attention == "cudnn":
        # cuDNN takes and returns three arrays. Splitting as if there were one head is one pass in
        # each direction, including the bias and its gradient. XLA would concatenate the three
        # cotangents twice.
        qkv = dot(x, params["kernel"])
        parts = ops.split_qkv_heads(qkv, params["bias"], num_heads=1)
        parts = [jnp.squeeze(part, 1) for part in parts]
    else:  # XLA fuses the split into its attention
        qkv = dot(x, params["kernel"]) + params["bias"].astype(x.dtype)
        parts = jnp.split(qkv, 3, axis=-1)
    shape = (*x.shape[:2], config.heads, x.shape[2] // config.heads)
    q, k, v = (part if config.tensor_parallel else part.reshape(shape) for part in parts)
    k, v = whole(k, 1), whole(v, 1)
    if mask is not None:  # cuDNN needs it for every query
        mask = jnp.broadcast_to(mask[:, None, None, :], (x.shape[0], 1, x.shape[1], x.shape[1]))
    kind = cast(Literal["xla", "cudnn"], config.attention)
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kind)
    return y.reshape(x.shape)


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
      config: the :class:`Config` of the parameters.
      ops: as in :func:`apply`.

    Returns:
      Logits ``[..., vocab_size]`` in float32 (float64 if ``config.dtype`` is float64).

    Raises:
      TypeError: ``hidden`` is not an array of a floating dtype, or ``params``, ``config`` or
        ``ops`` has another type.
      ValueError: ``hidden`` has another last axis, ``params`` has no ``"mlm"``, or the parameters
        are not those of ``config``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
      >>> params = bert.init(jax.random.key(0), bert.SMALL, mlm=True)
      >>> bert.masked_lm_logits(params, jnp.ones((2, 128)), bert.SMALL).shape
      (2, 128)
    """
    x = _masked_lm_head(params, hidden, config, ops)
    return _wide_product("...e,ve->...v", x, params["embeddings"]["word"]) + params["mlm"]["bias"]


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
        A position whose label is not in the vocabulary, such as -1, does not count.
      config: the :class:`Config` of the parameters.
      where: booleans with the shape of ``labels``: which of them count. ``None``: all.
      positions: integers ``[..., n]``: only these positions of each sequence go through the head,
        which has most of its cost in the vocabulary. ``None``: all positions.
      ops: as in :func:`apply`. The logits of ``FASTOPS`` have the dtype of ``config``, and those of
        ``PLAIN`` float32.

    Returns:
      A scalar: float32 (float64 if ``config.dtype`` is float64). 0 if no position counts.

    Raises:
      TypeError: an argument has another type or dtype.
      ValueError: ``hidden`` has another last axis, ``labels`` has another shape, ``params`` has no
        ``"mlm"``, or the parameters are not those of ``config``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_fastops.models import bert
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
    _check_shape("labels", labels, "the positions", hidden.shape[:-1])
    x = _masked_lm_head(params, hidden, config, ops)
    word, bias = params["embeddings"]["word"], params["mlm"]["bias"]
    with fo.use_implementation("xla") if config.tensor_parallel else contextlib.nullcontext():
        return ops.linear_cross_entropy(x, word, labels, bias=bias, where=where)


def _masked_lm_head(params: dict, hidden, config: Config, ops: Ops):
    """The head up to the product with the embeddings."""
    _check_model(params, config, ops)
    if "mlm" not in params:
        raise ValueError("bert: params has no ['mlm']; make it with init(..., mlm=True)")
    if not hasattr(hidden, "dtype") or not jnp.issubdtype(hidden.dtype, jnp.floating):
        kind = getattr(hidden, "dtype", type(hidden).__name__)
        raise TypeError(f"bert: hidden is of {kind}; it must be an array of a floating dtype")
    if hidden.ndim < 1 or hidden.shape[-1] != config.hidden_size:
        raise ValueError(
            f"bert: hidden has shape {hidden.shape}; its last axis must be hidden_size, "
            f"{config.hidden_size}"
        )
    head = params["mlm"]
    x = jnp.asarray(hidden).astype(config.dtype)
    x = dot(x, head["dense"]["kernel"].astype(x.dtype))
    x = ops.bias_act(x, head["dense"]["bias"], activation=config.activation)
    return ops.layer_norm(x, head["norm"]["scale"], head["norm"]["bias"], eps=config.eps)


# ---- checks --------------------------------------------------------------------------------------


def _check(params, tokens, config, mask, token_types, positions, key, ops) -> list:
    """Checks the arguments; returns the four arrays, with a boolean mask. ``None`` stays."""
    _check_model(params, config, ops)
    tokens = _integers("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[1] == 0:  # the pooler reads the first token
        raise ValueError(
            f"bert: tokens has shape {tokens.shape}; it must be (batch, sequence), with one token "
            "or more"
        )
    shape = tokens.shape
    mask = _check_mask(mask, "tokens", shape)
    if token_types is not None:
        token_types = _integers("token_types", token_types)
        _check_shape("token_types", token_types, "tokens", shape)
    if positions is not None:
        positions = _integers("positions", positions)
        if positions.shape not in (shape, shape[1:]):
            raise ValueError(
                f"bert: positions has shape {positions.shape}; it must be {shape[1:]} or {shape}, "
                "as tokens has"
            )
    elif shape[1] > config.positions:
        raise ValueError(
            f"bert: tokens has shape {shape}, but config has {config.positions} positions"
        )
    _check_key(config, key)
    return [tokens, mask, token_types, positions]


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
    mask = _check_mask(mask, "x", x.shape[:2])
    _check_key(config, key)
    return mask


def _integers(name: str, value, booleans: bool = False):
    dtype = getattr(value, "dtype", None)
    if dtype is None or not (
        jnp.issubdtype(dtype, jnp.integer) or (booleans and dtype == jnp.bool_)
    ):
        kind = type(value).__name__ if dtype is None else dtype
        accepted = "booleans or integers" if booleans else "integers"
        raise TypeError(f"bert: {name} is of {kind}; it must be an array of {accepted}")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _check_mask(mask, other: str, shape):
    """The mask as booleans: integers are compared with 0. ``None`` stays."""
    if mask is None:
        return None
    mask = _integers("mask", mask, booleans=True)
    _check_shape("mask", mask, other, shape)
    return mask if mask.dtype == jnp.bool_ else mask != 0


def _check_shape(name: str, value, other: str, shape) -> None:
    if value.shape != shape:
        raise ValueError(
            f"bert: {name} has shape {value.shape}; it must be {shape}, as {other} has"
        )


def _check_key(config, key) -> None:
    """Checks that the key is ``None``, or one that the dropouts of ``config`` can use."""
    if key is None:
        return
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != jnp.uint32:
        raise TypeError(
            f"bert: key is {type(key).__name__ if dtype is None else dtype}; it must be a random "
            "key, such as jax.random.key(0), or None"
        )
    if key.ndim != (0 if typed else 1):
        raise ValueError(f"bert: key has shape {key.shape}; it must be one random key")
    if config.attention_dropout > 0 and config.attention != "softmax":
        raise ValueError(
            f"bert: attention_dropout is {config.attention_dropout}, but attention="
            f"{config.attention!r} has no dropout of probabilities; train with attention_dropout=0 "
            "or attention='softmax'"
        )


def _check_types(params, config, ops) -> None:
    _check_config(config, ops)
    if not isinstance(params, dict):
        raise TypeError(f"bert: params is of type {type(params).__name__}; it must be a dict")


def _check_config(config, ops) -> None:
    if not isinstance(config, Config):
        raise TypeError(f"bert: config is of type {type(config).__name__}; it must be a Config")
    if not isinstance(ops, Ops):
        raise TypeError(
            f"bert: ops is of type {type(ops).__name__}; it must be an Ops, such as FASTOPS or "
            "PLAIN"
        )


def _check_model(params, config, ops) -> None:
    _check_types(params, config, ops)
    heads = {name: name in params for name in ("mlm", "nsp", "qa")}
    wanted = shapes(config, **heads, labels=_label_count(params))
    if "pooler" not in params:
        del wanted["pooler"]
    wanted["layers"] = _stacked_like(params.get("layers"), wanted["layers"])
    check_tree("bert", "params", params, wanted)


def _label_count(params) -> int | None:
    """The number of labels by the classifier's first array, or ``None`` without a classifier."""
    if "classifier" not in params:
        return None
    arrays = jax.tree.leaves(params["classifier"])
    return (1, *jnp.shape(arrays[0]))[-1] if arrays else 1  # check_tree names what is missing


def _stacked_like(layers, wanted: list):
    """The expected shapes of the layers, stacked if ``layers`` are."""
    if not isinstance(layers, dict):
        return wanted
    return jax.tree.map(lambda leaf: _float32(len(wanted), *leaf.shape), wanted[0])
