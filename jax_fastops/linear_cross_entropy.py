"""``linear_cross_entropy``: the loss of ``x @ table.T + bias``, without all logits at once.

For each chunk of the tokens there is one product, the two passes of ``cross_entropy``, and the two
products of the gradients. So the forward of a differentiated sum or mean computes the gradients,
and the backward only scales them. No product is repeated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_fastops._arguments import (
    as_arrays,
    integer,
    not_weak,
    one_of,
    real_number,
    same_floating_dtype,
)
from jax_fastops._broadcast import of_rank
from jax_fastops._compat import as_varying, varying_axes
from jax_fastops._kernel import match_varying
from jax_fastops._registry import example, register
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge, mesh_axes, parts_of, reshape, spec_of, split
from jax_fastops.cross_entropy import check_options, cross_entropy, prepared_labels

# Bytes of the logits of a chunk on a device. With fewer tokens in a chunk, adding up the table's
# gradient costs more: it is read and written once for each chunk.
_CHUNK = 2**29
# The classes are padded to a multiple: cuBLAS needs aligned rows of logits.
_ALIGNED = 64


_EXAMPLE = example(
    lambda x, table: linear_cross_entropy(x, table, jnp.arange(len(x)) % 7),
    "t d, v d",
    t=(64, 7),
    d=(128, 33),
    v=(512, 65),
)
register("linear_cross_entropy", "linear_cross_entropy", _EXAMPLE)


class _Options(NamedTuple):
    chunks: int
    softcap: float | None
    label_smoothing: float
    z_loss: float
    precision: Any  # of the products
    class_axis: int  # of the table


# ---- chunks --------------------------------------------------------------------------------------


def _split_tokens(x, chunks: int, fill, axis: int):
    """``[chunks, ..., t / chunks, ...]``. A chunk has every ``chunks``-th token along the axis, so
    that it is sharded like the tokens. ``fill`` fills up the last tokens."""
    if missing := -x.shape[axis] % chunks:
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(split(x, axis, (x.shape[axis] // chunks, chunks)), axis + 1, 0)


def _parts(x, labels, weights, chunks: int) -> list:
    x = jnp.where((labels >= 0)[..., None], x, jnp.zeros_like(x))  # 0 times NaN would be NaN
    axis = labels.ndim - 1
    filled = (x, 0), (labels, -1), (weights, 0)
    return [None if a is None else _split_tokens(a, chunks, fill, axis) for a, fill in filled]


def _join_tokens(x, tokens: int, axis: int):
    """Inverts ``_split_tokens``."""
    return jax.lax.slice_in_dim(merge(jnp.moveaxis(x, 0, axis + 1), axis), 0, tokens, axis=axis)


def _dot(a, b, axes: tuple[Sequence[int], Sequence[int]], dtype, options: _Options):
    """The product of two arrays over these axes. Other axes that are sharded stay so.

    If axes of both arrays are sharded over a mesh axis, only that of the first one stays so.
    """
    specs, kept = [spec for x in (a, b) if (spec := spec_of(x)) is not None], None
    if len(specs) == 2:
        first, second = (
            [name for i, name in enumerate(spec) if i not in over]
            for spec, over in zip(specs, axes, strict=True)
        )
        used = set(mesh_axes(*first))
        second = [None if used.intersection(mesh_axes(name)) else name for name in second]
        kept = PartitionSpec(*first, *second)
    return jax.lax.dot_general(
        a,
        b,
        (axes, ((), ())),
        precision=options.precision,
        preferred_element_type=dtype,
        out_sharding=kept,
    )


class _Layer(NamedTuple):
    """The table, and what is added to each logit, both in the dtype of ``x`` or a wider one.

    The table has the axes that the caller gave it: XLA's products read either axis.
    """

    table: Any
    offset: Any


def _layer(x, table, bias, options: _Options, wide: bool = False) -> _Layer:
    acc = accumulator_dtype(x.dtype)
    dtype = acc if wide else x.dtype
    table = table.astype(dtype)
    bias = None if bias is None else bias.astype(dtype)
    axis, spec = options.class_axis, spec_of(table)
    classes = table.shape[axis]
    fixed = isinstance(classes, int) and (spec is None or spec[axis] is None)
    # The mean of the logits for label smoothing, and the softcap, take no padding.
    plain = options.softcap is None and not options.label_smoothing
    if not fixed or not plain or classes < 16 * _ALIGNED or classes % _ALIGNED == 0:
        return _Layer(table, bias)
    missing = -classes % _ALIGNED
    none = jnp.zeros(classes, dtype) if bias is None else bias
    # The products of the padding are 0, so its logits are this number. It is finite because of
    # jax_debug_infs, unless the biases of all classes are about as low.
    lowest: Any = max(float(jnp.finfo(x.dtype).min), float(jnp.finfo(acc).min) / 2)
    if bias is not None:
        lowest = jnp.where(jax.lax.stop_gradient(bias).max() > lowest / 2, lowest, -jnp.inf)
    offset = jnp.pad(none, (0, missing), constant_values=lowest)
    widths = [(0, missing if i == axis else 0) for i in range(2)]
    return _Layer(jnp.pad(table, widths), offset)


def _products(x, layer: _Layer, options: _Options):
    """The product of each token with each class."""
    return _dot(x, layer.table, ((x.ndim - 1,), (1 - options.class_axis,)), x.dtype, options)


def _losses(raw, offset, labels, options: _Options):
    """The loss of each token, from the products."""
    logits = raw if offset is None else raw + of_rank(offset, raw.ndim)
    if options.softcap is not None:
        wide = logits.astype(accumulator_dtype(logits.dtype))
        logits = (options.softcap * jnp.tanh(wide / options.softcap)).astype(logits.dtype)
    smoothing, z_loss = options.label_smoothing, options.z_loss
    return cross_entropy(logits, labels, label_smoothing=smoothing, z_loss=z_loss)


def _losses_of_chunk(x, labels, layer: _Layer, options: _Options):
    raw = _products(x, layer, options)
    return _losses(raw, layer.offset, labels, options)


# ---- sums ----------------------------------------------------------------------------------------


def _over_chunks(body, start, arrays, chunks: int):
    """``lax.scan``, or a call of ``body`` if there is one chunk."""
    if chunks > 1:
        return jax.lax.scan(body, start, arrays)
    carry, result = body(start, jax.tree.map(lambda x: x[0], arrays))
    return carry, jax.tree.map(lambda x: x[None], result)


def _zeros(like, dtype, *others):
    """Zeros of the shape and sharding of an array, varying over the mesh axes of all arrays."""
    axes = frozenset().union(*map(varying_axes, (like, *others)))
    return as_varying(jnp.zeros_like(like, dtype=dtype), axes)


def _weighted(losses, weights):
    return losses if weights is None else losses * weights


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _total(x, table, bias, weights, labels, options: _Options):
    """The sum of the losses of tokens ``[..., d]``, each times its weight if there are any."""
    layer = _layer(x, table, bias, options)

    def body(_, part):
        x, labels, weights = part
        return None, _weighted(_losses_of_chunk(x, labels, layer, options), weights).sum()

    parts = _parts(x, labels, weights, options.chunks)
    return _over_chunks(body, None, parts, options.chunks)[1].sum()


def _total_and_gradients(x, table, bias, weights, labels, options: _Options, needs_grad):
    """The sum, and its gradients of those operands with a gradient that need one."""
    wide, chunks = accumulator_dtype(x.dtype), options.chunks
    layer, axis = _layer(x, table, bias, options), x.ndim - 2
    class_axis = options.class_axis
    classes = table.shape[class_axis]
    tokens = range(x.ndim - 1)

    def body(carry, part):
        dtable, dbias = carry
        x, labels, weights = part
        raw = _products(x, layer, options)
        losses, pullback = jax.vjp(lambda raw: _losses(raw, layer.offset, labels, options), raw)
        (draw,) = pullback(jnp.ones_like(losses) if weights is None else weights)
        dx = None
        if needs_grad[0]:
            dx = _dot(draw, layer.table, ((x.ndim - 1,), (class_axis,)), x.dtype, options)
        if needs_grad[1]:
            pair = (x, draw) if class_axis else (draw, x)  # so that no axes are exchanged
            dtable = dtable + _dot(*pair, (tokens, tokens), wide, options)
        if needs_grad[2]:
            dbias = dbias + draw.astype(wide).sum(tokens)
        dweights = losses if needs_grad[3] else None
        return (dtable, dbias), (_weighted(losses, weights).sum(), dx, dweights)

    parts = _parts(x, labels, weights, chunks)
    start = (
        _zeros(layer.table, wide, x, labels) if needs_grad[1] else None,
        _zeros(layer.offset, wide, x, labels, table) if needs_grad[2] else None,
    )
    (dtable, dbias), (totals, dx, dweights) = _over_chunks(body, start, parts, chunks)
    grads = [
        None if dx is None else _join_tokens(dx, x.shape[axis], axis),
        None if dtable is None else jax.lax.slice_in_dim(dtable, 0, classes, axis=class_axis),
        None if dbias is None else jax.lax.slice_in_dim(dbias, 0, classes),
        None if dweights is None else _join_tokens(dweights, x.shape[axis], axis),
    ]
    return totals.sum(), [
        # Before the cotangent of a mean divides it, a sum over tokens may be too large for float16.
        g if g is None or a.dtype == jnp.float16 else g.astype(a.dtype)
        for g, a in zip(grads, (x, table, bias, weights), strict=True)
    ]


@functools.partial(_total.defjvp, symbolic_zeros=True)
def _total_jvp(options, primals, tangents):
    moving = [None if isinstance(t, SymbolicZero) else t for t in tangents[:4]]
    needs_grad = [t is not None for t in moving]
    x, table, bias, weights, labels = primals
    total, grads = _total_and_gradients(x, table, bias, weights, labels, options, needs_grad)
    terms = [
        (g.astype(total.dtype) * t.astype(total.dtype)).sum()
        for g, t in zip(grads, moving, strict=True)
        if g is not None and t is not None
    ]
    return total, functools.reduce(jnp.add, terms, jnp.zeros_like(total))


def _each(x, table, bias, labels, options: _Options):
    """The loss of each token. A derivative computes the logits again."""
    chunks = options.chunks
    # The loop adds up the table's gradient in the dtype of the layer.
    layer = _layer(x, table, bias, options, wide=True)

    @jax.checkpoint
    def losses(x, labels, layer):
        layer = jax.tree.map(lambda a: a.astype(x.dtype), layer)
        return _losses_of_chunk(x, labels, layer, options)

    parts = _parts(x, labels, None, chunks)[:2]
    found = _over_chunks(lambda _, part: (None, losses(*part, layer)), None, parts, chunks)[1]
    return _join_tokens(found, x.shape[-2], x.ndim - 2)


# ---- the op --------------------------------------------------------------------------------------


def linear_cross_entropy(
    x: ArrayLike,
    table: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk: int | None = None,
    class_axis: Literal[0, 1] = 0,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """The cross entropy of the logits ``x @ table.T + bias``, which never exist as a whole.

    Equals ``cross_entropy(x @ table.T + bias, labels)``, reduced over the tokens that count.
    Products and logits have the dtype of ``x`` and are accumulated in float32 (float64 for
    float64); the passes between the products are those of :func:`cross_entropy`.

    Args:
      x: array ``[..., d]``, the tokens; float32, bfloat16, float16 or float64.
      table: array ``[v, d]`` of a supported dtype: a row for each class, such as the embeddings of
        a vocabulary. With ``class_axis=1``, array ``[d, v]``, such as the kernel of a layer. It is
        cast to the dtype of ``x``, and padded to a fast number of classes. It is not transposed,
        and its gradient has the same axes.
      labels: array ``[...]`` of any integer dtype, as in :func:`cross_entropy`: a negative label
        leaves its token out, and one of ``v`` or more makes the loss NaN.
      bias: array ``[v]`` of a supported dtype, or ``None``.
      where: boolean array that broadcasts to the shape of ``labels``. Leaves out the tokens where
        it is False.
      label_smoothing, z_loss: as in :func:`cross_entropy`.
      softcap: logits become ``softcap * tanh(logits / softcap)``. Positive. ``None``: they do not.
      reduction: ``"mean"`` over the tokens that count (0 if there is none), ``"sum"``, or
        ``"none"``: the loss of each token.
      chunk: the number of tokens whose logits exist at the same time. ``None``: as many as fit
        512 MiB, of a device if tokens or classes of ``table`` are sharded over explicit mesh axes.
        Over auto mesh axes the sharding is unknown, so give the number of all devices together.
      class_axis: the axis of ``table`` that has the classes.
      precision: of the products, forward and backward, as in ``jnp.matmul``. ``None``: that of
        ``jax.default_matmul_precision``.

    Returns:
      A scalar, or with ``reduction="none"`` an array with the shape of ``labels``; float32, or
      float64 for float64.

    Residuals: for a mean or a sum, the gradients, those of ``table`` and ``bias`` summed in
    float32: the forward computes them, and the backward scales them (for float16, they are float32
    until then). For ``"none"``, the operands: the backward computes the logits again.

    Sharding: over all axes of the tokens, with no communication except the sums of the scalar and
    of the gradients of ``table`` and ``bias``. If the last of several axes has not enough tokens
    for the chunks, only the first one stays sharded. Sharded classes of ``table``: as those of
    :func:`cross_entropy`.

    Raises:
      TypeError: an argument is not an array, has a dtype that is not supported, ``labels`` are not
        integers, ``where`` is not boolean, or an option is not a number.
      ValueError: the shapes do not fit, an option is out of range, or ``precision`` is not known.

    Sources: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024); Hsu et
    al., "Liger Kernel" (2024).

    Example:
      >>> x, table = jnp.eye(3) * 20, jnp.eye(4, 3)
      >>> print(f"{fo.linear_cross_entropy(x, table, jnp.array([0, 1, 0])):.2f}")
      6.67
    """
    return weighted_cross_entropy(
        x, table, labels, None, bias, where, label_smoothing, z_loss, softcap, reduction, chunk,
        class_axis, precision,
    )  # fmt: skip


def weighted_cross_entropy(
    x: ArrayLike,
    table: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    class_axis: int = 0,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """:func:`linear_cross_entropy`, where the sum is one of losses times ``weights``.

    These have the shape of ``labels`` and the dtype of the losses, or are ``None``. With weights,
    the reduction is ``"sum"``.
    """
    name = "linear_cross_entropy"
    if weights is not None and reduction != "sum":
        raise ValueError(f"{name}: there are weights, so reduction must be 'sum'")
    optional = dict(bias=bias, where=where, weights=weights)
    optional = {key: v for key, v in optional.items() if v is not None}
    given: dict[str, Any] = dict(x=x, table=table, labels=labels, **optional)
    arrays: dict[str, Any] = dict(zip(given, as_arrays(name, **given), strict=True))
    for key in ("x", "table", "bias"):
        if key in arrays:
            (arrays[key],) = map(not_weak, same_floating_dtype(name, [arrays[key]], [key]))
    axis = integer(name, "class_axis", class_axis)
    if axis not in (0, 1):
        raise ValueError(f"{name}: class_axis is {class_axis}; it must be 0 or 1")
    _check_shapes(name, arrays, axis)
    options = check_options(name, label_smoothing, z_loss)
    if softcap is not None:
        softcap = real_number(name, "softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"{name}: softcap is {softcap}; it must be positive and finite")
    one_of(name, "reduction", reduction, ("mean", "sum", "none"))
    arrays = dict(zip(arrays, match_varying(list(arrays.values())), strict=True))
    hidden, matrix, row_bias = arrays["x"], arrays["table"], arrays.get("bias")
    weights = arrays.get("weights")
    classes, of = matrix.shape[axis], "that of x without its last axis"
    index = prepared_labels(
        name, arrays["labels"], arrays.get("where"), hidden.shape[:-1], classes, of
    )
    shape, tokens = index.shape, index.ndim
    chunks = _chunks(name, hidden, matrix, chunk, axis)
    # Even chunks of the last dimension of the tokens leave all dimensions sharded.
    if tokens == 0 or (chunks > 1 and -shape[-1] % chunks > shape[-1] // 8):
        index, hidden = merge(index, 0, tokens), merge(hidden, 0, tokens)
        weights = None if weights is None else merge(weights, 0, tokens)
    kept = index >= 0
    # A label that is too large must also be too large for the padded table.
    index = jnp.where(index < classes, index, 2**31 - 1)
    chunks = _of_shards(chunks, hidden)
    static = _Options(chunks, softcap, **options, precision=precision, class_axis=axis)
    if reduction == "none":
        losses = _each(hidden, matrix, row_bias, index, static)
        return (
            losses if losses.ndim == tokens else reshape(losses, shape, spec_of(arrays["labels"]))
        )
    total = _total(hidden, matrix, row_bias, weights, index, static)
    if reduction == "sum":
        return total
    return total / jnp.maximum(kept.astype(total.dtype).sum(), 1)


def _check_shapes(name: str, arrays: dict[str, Any], class_axis: int) -> None:
    x, table, bias = arrays["x"], arrays["table"], arrays.get("bias")
    if x.ndim < 1:
        raise ValueError(f"{name}: x has shape {x.shape}; it must be [..., d]")
    if table.ndim != 2 or table.shape[1 - class_axis] != x.shape[-1]:
        axes = "[d, v]" if class_axis else "[v, d]"
        raise ValueError(
            f"{name}: table has shape {table.shape}; it must be {axes}, where d = {x.shape[-1]} is "
            "the last axis of x"
        )
    classes = table.shape[class_axis]
    if bias is not None and bias.shape != (classes,):
        raise ValueError(
            f"{name}: bias has shape {bias.shape}; it must be {(classes,)}, a number for each "
            "class of table"
        )


def _chunks(name: str, x, table, chunk, class_axis: int) -> int:
    """The number of chunks."""
    tokens, classes = math.prod(x.shape[:-1]), table.shape[class_axis]
    if chunk is not None:
        chunk = integer(name, "chunk", chunk)
        if chunk < 1:
            raise ValueError(f"{name}: chunk is {chunk}; it must be at least 1")
    if not isinstance(tokens, int) or not isinstance(classes, int):
        return 1  # a symbolic size
    if chunk is None:
        shards = _shards(x, slice(-1)) * _shards(table, slice(class_axis, class_axis + 1))
        chunk = max(1, _CHUNK // max(1, classes * x.dtype.itemsize)) * shards
    return max(1, -(-tokens // chunk))


def _shards(x, dimensions: slice) -> int:
    """Into how many parts explicit mesh axes divide these dimensions."""
    spec, sharding = spec_of(x), jax.typeof(x).sharding
    return math.prod(parts_of(axis, sharding) for axis in (spec or ())[dimensions])


def _of_shards(chunks: int, x) -> int:
    """The largest number of chunks up to ``chunks`` that splits each device's tokens evenly."""
    tokens, spec = x.shape[-2], spec_of(x)
    parts = 1 if spec is None else parts_of(spec[-2], jax.typeof(x).sharding)
    while chunks > 1 and (tokens % parts or -(-tokens // chunks) % parts):
        chunks -= 1
    return chunks
