"""Attention as a softmax between two products, with all kinds of masks as one.

Letters of dimensions: ``b`` batch, ``t`` queries, ``s`` keys, ``n`` heads, ``k`` heads of keys,
``g`` heads of queries for one head of keys, ``h`` the size of a head.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jax_fastops import _cudnn
from jax_fastops._dispatch import Refused, Request, lowering_platform
from jax_fastops._kernel import partitions
from jax_fastops._op import Op
from jax_fastops._random import Drop, kept, row_seeds
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge, split
from jax_fastops.softmax import softmax_of

_PRESETS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}


class Masks(NamedTuple):
    """What a query may attend to. Each field is optional, and all that are given must hold."""

    mask: Any = None  # boolean, broadcasts to [b, n, t, s]
    causal: bool = False
    window: tuple[int, int] | None = None  # keys before and after the position of the query
    query_lengths: Any = None  # [b]
    key_lengths: Any = None  # [b]
    segments: tuple[Any, Any] | None = None  # ids of queries [b, t] and of keys [b, s]

    def merged(self, queries: Any, keys: Any) -> jax.Array | None:
        """One boolean mask in the smallest shape, or ``None``.

        It has rank 4. With heads in groups, ``[..., k, g, t, s]``, lengths are ``[..., 1]`` and
        segments ``[..., 1, t]``.
        """
        row = jax.lax.broadcasted_iota(jnp.int32, (1, 1, queries, 1), 2)
        column = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys), 3)
        parts = []
        if self.causal:
            parts.append(column <= row)
        if self.window is not None:
            before, after = self.window
            parts.append((row - column <= before) & (column - row <= after))
        if self.key_lengths is not None:
            parts.append(column < self.key_lengths[..., None, None, None])
        if self.query_lengths is not None:
            parts.append(row < self.query_lengths[..., None, None, None])
        if self.segments is not None:
            mine, other = self.segments
            mine, other = mine[..., None, :, None], other[..., None, None, :]
            parts.append((mine == other) & (mine > 0))
        if self.mask is not None:
            parts.append(self.mask)
        return functools.reduce(operator.and_, parts) if parts else None


def _scores(query, key, equation: str) -> jax.Array:
    """The product in the accumulator dtype."""
    wide = accumulator_dtype(query.dtype)
    if lowering_platform() == "cpu":  # XLA widens operands of 16 bits there, but not all of them
        return jnp.einsum(equation, query.astype(wide), key.astype(wide))
    # With a preset, the products of the gradient have operands of 16 bits, too.
    precision = _PRESETS.get(str(query.dtype))
    return jnp.einsum(equation, query, key, precision=precision, preferred_element_type=wide)


def by_softmax(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    where: Any,
    *,
    scale: float,
    drop: Drop | None = None,
    keep: Any = None,
    layout: str = "btnh",
    residual: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The result of attention in ``layout``, and the logarithms of the sums ``[b, n, t]``.

    Args:
      query: array in ``layout``.
      key: array in ``layout``, with ``s`` for ``t``, and heads that divide those of the queries.
      value: likewise.
      bias: added to the scaled scores: an array that broadcasts to ``[b, n, t, s]``, or ``None``.
      where: which scores count: likewise.
      scale: of the scores.
      drop: the dropout of the weights.
      keep: in its place, an array ``[b, n, t, s]`` by which weights are multiplied.
      layout: ``"btnh"`` or ``"bnth"``.
      residual: whether the logarithms of the sums are needed.
    """
    axis, heads = layout.index("n"), "n"
    kv_heads = key.shape[axis]
    if query.shape[axis] != kv_heads:
        heads = "kg"
        query = _split_heads(query, axis, kv_heads)
        bias, where = (x if x is None else _split_heads(x, 1, kv_heads) for x in (bias, where))
    of_query = layout.replace("n", heads)
    of_key = layout.replace("t", "s").replace("n", heads[0])
    of_scores = f"b{heads}ts"
    rows = query
    if query.shape[of_query.index("t")] == 1:
        # With keys in the last dimension, XLA makes one kernel of the softmax. Otherwise einsum
        # gives the scores of one query another order.
        rows = query.transpose([of_query.index(d) for d in f"b{heads}th"])
    of_rows = of_query if rows is query else f"b{heads}th"
    scores = _scores(rows, key, f"{of_rows},{of_key}->{of_scores}")
    if bias is not None:
        scores, scale = scores * scale + bias.astype(scores.dtype), 1.0
    weights = softmax_of("softmax", scores, -1, where, scale, drop)
    if keep is not None:
        weights = weights * (keep if heads == "n" else _split_heads(keep, 1, kv_heads))
    weights = weights.astype(value.dtype)
    y = jnp.einsum(f"{of_scores},{of_key}->{of_query}", weights, value)
    y = y if heads == "n" else merge(y, axis)
    if not residual:
        return y, None
    sums = _log_sums(jax.lax.stop_gradient(scores) * scale, where)
    return y, sums if heads == "n" else merge(sums, 1)


def _log_sums(scores, where) -> jax.Array:
    """The logarithms of the sums of exponentials: -inf without an element that counts."""
    if where is None:
        return jax.nn.logsumexp(scores, axis=-1)
    lowest = jnp.asarray(0.5 * jnp.finfo(scores.dtype).min, scores.dtype)  # no -inf - -inf
    sums = jax.nn.logsumexp(jnp.where(where, scores, lowest), axis=-1)
    return jnp.where(where.any(-1), sums, -jnp.inf)


def _split_heads(x, axis: int, kv_heads: int):
    """The heads of queries at ``axis`` as heads of keys, and the queries of each."""
    sizes = (1, 1) if x.shape[axis] == 1 else (kv_heads, x.shape[axis] // kv_heads)
    return split(x, axis, sizes)


# ---- the op: attention by cuDNN ------------------------------------------------------------------
# Heads are in groups: queries [..., t, k, g, h], keys and values [..., s, k, h]; or all of them in
# one array [..., t, 3, k, h]. What masks have in common with scores: [..., k, g, t, s].

_LOWEST = -1e30  # of a bias in place of a mask: finite, so that a row without keys has no NaN


def _masks(mask, q_lengths, kv_lengths, q_ids, kv_ids, causal: bool, window) -> Masks:
    """The masks of an example, from the operands of the op without other leading dimensions."""

    def whole(lengths):
        return None if lengths is None else lengths[..., 0]

    ids = None if q_ids is None else (q_ids[:, 0], kv_ids[:, 0])
    if mask is not None:
        mask = _merged_heads(mask)
    return Masks(mask, causal, window, whole(q_lengths), whole(kv_lengths), ids)


def _merged_heads(x):
    """``[b, k, g, t, s]`` with one dimension of heads, as large as needed."""
    if x.shape[1] == 1 and x.shape[2] > 1:
        return x[:, 0]
    return merge(x, 1)


def over_leading(function, rank: int):
    """``function`` of operands with one leading dimension, for any number of them.

    Without others, the first operand has the rank ``rank``.
    """

    def mapped(query, *rest):
        if query.ndim == rank:
            return function(query, *rest)
        size = query.shape[0]
        axes = [None if x is None or x.shape[0] != size else 0 for x in rest]
        rest = [x if x is None or a == 0 else x[0] for x, a in zip(rest, axes, strict=True)]
        return jax.vmap(mapped, in_axes=(0, *axes))(query, *rest)

    return mapped


def _parts(query, key, value):
    """Queries, keys and values with one dimension of heads, and the heads of keys."""
    if key is None:
        k = query.shape[-2]
        return *(query[:, :, i] for i in range(3)), k
    return merge(query, 2), key, value, key.shape[-2]


def _reference(
    query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, words, **options
):
    """The op by a softmax, with the masks of cuDNN's dropout where cuDNN takes such calls."""
    keep = None
    if words is not None:
        masks = (mask, q_lengths, kv_lengths, q_ids, kv_ids)
        keep = _kept_weights(query, key, value, bias, *masks, words, **options)

    def example(query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, keep):
        q, k, v, kv_heads = _parts(query, key, value)
        if keep is not None:
            wide = accumulator_dtype(q.dtype)
            keep = _merged_heads(keep).astype(wide) * options["dropout_scale"]
        masks = _masks(
            mask, q_lengths, kv_lengths, q_ids, kv_ids, options["causal"], options["window"]
        )
        y, sums = by_softmax(
            q,
            k,
            v,
            None if bias is None else _merged_heads(bias),
            masks.merged(q.shape[1], k.shape[1]),
            scale=options["scale"],
            keep=keep,
            residual=True,
        )
        sizes = (kv_heads, q.shape[2] // kv_heads)
        return split(y, 2, sizes), split(cast("jax.Array", sums), 1, sizes)

    return over_leading(example, 5)(
        query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, keep
    )


class _View(NamedTuple):
    """A call as cuDNN sees it."""

    masks: tuple[Any, Any, Any, Any]  # bias, lengths of queries and of keys, segments
    options: _cudnn.Options
    has_keys: Any  # which queries [..., k, g, t] have a key, or None: lengths tell it


def _view(
    query, key, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, *, causal, window, scale,
    dropout_scale, deterministic,
) -> _View:  # fmt: skip
    sizes = _cudnn.sizes(query, key)
    queries, keys = sizes.queries, sizes.keys
    before, after = _band(queries, keys, causal, window)
    # A row of a band may have no keys, unless nothing else takes keys away.
    band = before < 0 or (queries <= keys and mask is q_ids is kv_lengths is None)
    segments = None if q_ids is None else (q_ids, kv_ids)
    masks = Masks(mask, causal, window, q_lengths, kv_lengths, segments)
    has_keys = None
    if mask is not None or segments is not None or not band:
        of_keys = segments is None and band and mask.shape[-4:-1] == (1, 1, 1)
        if of_keys:
            # An example without any key has no queries, and cuDNN skips the last keys.
            mask = jnp.broadcast_to(mask, (*mask.shape[:-1], keys))
            flat = mask[..., 0, 0, 0, :]
            end = jnp.where(flat, jnp.arange(1, keys + 1, dtype=jnp.int32), 0).max(-1)[..., None]
            kv_lengths = end if kv_lengths is None else jnp.minimum(end, kv_lengths)
        if not of_keys or after >= 0:
            has_keys = masks.merged(queries, keys).any(-1)
        hidden = masks._replace(query_lengths=None, key_lengths=None)
        if band:
            hidden = hidden._replace(causal=False, window=None)
        part = hidden.merged(queries, keys)
        lead = (1,) * (query.ndim - part.ndim)
        part = jnp.broadcast_to(part, (*lead, *part.shape[:-1], keys))
        wide = (bias is not None and bias.dtype != query.dtype) or query.dtype == jnp.float16
        dtype = jnp.float32 if wide else query.dtype
        base = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)
        bias = jnp.where(part, base, jnp.asarray(_LOWEST, dtype))
    if bias is not None:
        bias = _of_cudnn(bias, query, key, keys)
    if not band:
        before = after = -1
    rate = 1 - 1 / dropout_scale
    options = _cudnn.Options(scale, before, after, rate, deterministic)
    return _View((bias, q_lengths, kv_lengths, None), options, has_keys)


def _band(queries: int, keys: int, causal: bool, window) -> tuple[int, int]:
    """The keys before and after the position of a query that count, -1 for all."""
    before, after = window or (-1, -1)
    before = -1 if before >= queries - 1 else before
    return before, 0 if causal else -1 if after >= keys - 1 else after


def _packed_view(query, key, ids, segments, *, causal, window, scale, dropout_scale, deterministic):
    """The segments of a row as sequences, and whether they are.

    Each must be in one piece, and there may not be more of them than ``segments``. ``ids`` are
    ``[..., t]``.
    """
    sizes = _cudnn.sizes(query, key)
    inside = ids > 0
    before_it = jnp.concatenate([jnp.zeros_like(ids[..., :1]), ids[..., :-1]], -1)
    begins = inside & (ids != before_it)
    number = jnp.cumsum(begins, -1, dtype=jnp.int32)  # of the run of equal ids, from 1
    own = number[..., None, :] == 1 + jnp.arange(segments)[:, None]
    counts = (own & inside[..., None, :]).sum(-1, dtype=jnp.int32)
    first = own & begins[..., None, :]
    starts = jnp.where(first, jnp.arange(sizes.queries, dtype=jnp.int32), 0).sum(-1)
    found = jnp.where(first, ids[..., None, :], 0).sum(-1)
    equal = (found[..., :, None] == found[..., None, :]) & (found[..., None] > 0)
    again = equal & (jnp.arange(segments)[:, None] != jnp.arange(segments))
    fits = ~(again.any() | (number[..., -1] > segments).any())
    band = _band(sizes.queries, sizes.keys, causal, window)
    options = _cudnn.Options(scale, *band, 1 - 1 / dropout_scale, deterministic)
    masks = (None, None, None, _cudnn.Segments(starts, counts))
    return _View(masks, options, inside[..., None, None, :]), fits


def _by_view(run, query, key, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, **options):
    """``run(view)`` of the call. Its segments are sequences if they can be, which is data."""
    # There are no more segments than positions.
    segments = min(options.pop("segments"), _cudnn.sizes(query, key).queries)
    del options["threshold"]

    def masked():
        masks = (bias, mask, q_lengths, kv_lengths, q_ids, kv_ids)
        return run(_view(query, key, *masks, **options))

    # In a program for several devices, whether all segments can be is known to none of them.
    only_ids = bias is mask is q_lengths is kv_lengths is None
    if not segments or not only_ids or partitions() > 1:
        return masked()
    try:
        view, fits = _packed_view(query, key, q_ids[..., 0, :], segments, **options)
        return jax.lax.cond(_of_all(fits), lambda: run(view), masked)
    except Refused:
        return masked()


@jax.custom_batching.custom_vmap
def _of_all(fits):
    """Whether this holds for all examples: one choice, so that ``cond`` stays a branch."""
    return fits


@_of_all.def_vmap
def _(axis_size, mapped, fits):
    del axis_size, mapped
    return _of_all(fits.all()), False


def _of_cudnn(bias, query, key, keys: int):
    """The bias in a shape that cuDNN takes: all heads or one, the whole batch or one."""
    sizes = _cudnn.sizes(query, key)
    k, g = sizes.kv_heads, sizes.groups
    lead, (heads, groups, rows, _) = bias.shape[:-4], bias.shape[-4:]
    if (heads, groups) not in ((1, 1), (k, g)):
        heads, groups = k, g
    if any(size != 1 for size in lead):
        lead = query.shape[:-4]
    return jnp.broadcast_to(bias, (*lead, heads, groups, rows, keys))


def _select_rows(has_keys, y):
    """``y`` ``[..., t, k, g, h]``, and 0 in the rows of queries without a key."""
    if has_keys is None:
        return y
    return _or_zero(jnp.moveaxis(has_keys, -1, -3)[..., None], y)


def _or_zero(kept, x):
    return jnp.where(kept, x, jnp.zeros_like(x))


def _forward(*args, gradient: bool, **options):
    query, key, value, *masks, words = args

    def run(view):
        y, stats = _cudnn.forward(query, key, value, *view.masks, words, view.options, gradient)
        if view.masks[-1] is not None:  # cuDNN does not write the rows that are in no segment
            stats = _or_zero(view.has_keys, stats)
        return _select_rows(view.has_keys, y), stats

    return _by_view(run, query, key, *masks, **options)


def _backward(residuals, cts, needs_grad, **options):
    *args, y, stats = residuals
    query, key, value, *masks, words = args
    if needs_grad[3]:
        raise Refused("cuDNN computes no gradient of a bias here")

    def run(view):
        has_keys, dy, logs = view.has_keys, cts[0], stats
        segments = view.masks[-1]
        if segments is None:
            dy = _select_rows(has_keys, dy)
            if has_keys is not None:  # weights of 0, whatever cuDNN made of such a row
                logs = _or_zero(has_keys, logs)
        grads = _cudnn.backward(query, key, value, *view.masks, words, y, logs, dy, view.options)
        if segments is not None:  # cuDNN does not write rows that are in none
            rows = has_keys[..., 0, 0, :]
            grads = [_or_zero(jnp.expand_dims(rows, range(rows.ndim, g.ndim)), g) for g in grads]
        return tuple(grads)

    grads = _by_view(run, query, key, *masks, **options)
    return *grads, *[None] * (len(args) - len(grads))


def _operands(packed: bool) -> str:
    heads = "... t 3 *k h" if packed else "... t *k g h"
    s = "t" if packed else "s"
    small = f"~... *k, ~... *k, ~... *k t, ~... *k {s}, 2"
    return f"{heads}, ... s *k h, ... s *k h, ~... *k a b c, ~... *k d e f, {small}"


def _signature(packed: bool) -> str:
    g = "1" if packed else "g"
    return f"{_operands(packed)} -> ... t *k {g} h, ... *k {g} t :acc"


def _declare(dropout: bool) -> Op:
    return Op(
        "attention_dropout" if dropout else "attention",
        _signature(packed=False),
        _reference,
        family="attention",
        kernels=(_cudnn.FORWARD, _cudnn.BACKWARD),
        forward=functools.partial(_forward, gradient=False),
        forward_saving=functools.partial(_forward, gradient=True),
        residuals=lambda args, outs, saved: (*args, *outs),
        backward=_backward,
        data=range(4, 10),
        independent=not dropout,
    )


_OPS = {dropout: _declare(dropout) for dropout in (False, True)}


# ---- the dropout's masks for derivatives that no kernel computes ---------------------------------


def _kept_by_cudnn(
    query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, words, **options
):
    del value
    masks = (bias, mask, q_lengths, kv_lengths, q_ids, kv_ids)

    def run(view):
        return _cudnn.keep(query, key, *view.masks, words, view.options)

    return _by_view(run, query, key, *masks, **options).astype(query.dtype)


def _kept_by_philox(query, key, *masks, threshold, **options):
    del options
    sizes = _cudnn.sizes(query, key)
    rows = (sizes.kv_heads, sizes.groups, sizes.queries)
    seeds = row_seeds(masks[-1], (*query.shape[:-4], *rows, sizes.keys))
    return kept(seeds, sizes.keys, threshold).astype(query.dtype)


_KEEP = Op(
    "attention_keep",
    f"{_operands(packed=False)} -> ... *k g t s",
    _kept_by_philox,
    family="attention",
    kernels=(_cudnn.FORWARD, _cudnn.BACKWARD),
    forward=_kept_by_cudnn,
    data=range(10),
    independent=False,
)


def _kept_weights(query, key, *rest, **options):
    """Which weights ``[..., k, g, t, s]`` the dropout of a call keeps, as numbers."""
    arrays = [None if x is None else jax.lax.stop_gradient(x) for x in (query, key, *rest)]
    packed = key is None
    signature = f"{_operands(packed)} -> ... *k {'1 t t' if packed else 'g t s'}"
    request = Request("native", "attention", str(query.dtype), (("bytes", 0),))
    return _KEEP.bind(request, *arrays, signature=signature, **options)


# ---- calls ---------------------------------------------------------------------------------------


class Attend(NamedTuple):
    """The arguments of a call of attention, without its heads."""

    scale: float
    bias: Any
    masks: Masks
    drop: Drop | None
    deterministic: bool
    segments: int  # the most in a row, or 0 where cuDNN takes none
    residual: bool  # whether the logarithms of the sums are needed

    def by_softmax(self, query, key, value, layout: str = "btnh"):
        queries, keys = (x.shape[layout.index("t")] for x in (query, key))
        return by_softmax(
            query,
            key,
            value,
            self.bias,
            self.masks.merged(queries, keys),
            scale=self.scale,
            drop=self.drop,
            layout=layout,
            residual=self.residual,
        )

    def __call__(self, query, key=None, value=None, *, size: int, view=None, otherwise=None):
        """The result, and the logarithms of the sums ``[b, n, t]``.

        The result is ``[b, t, n, h]``, and ``[b, t, n * h]`` for an array of all heads.

        Args:
          query: ``[b, t, n, h]``; or an array of all heads, without ``key`` and ``value``.
          key: ``[b, s, k, h]``.
          value: likewise.
          size: that of a head.
          view: ``view(query)`` is the array of all heads as ``[b, t, 3, k, h]`` and two ``None``,
            or queries, keys and values.
          otherwise: ``otherwise(self, query)`` computes both from the array of all heads, without
            cuDNN.
        """
        masks, drop = self.masks, self.drop
        if drop is not None and drop.scale == 1.0:  # a rate that rounds to 0
            drop = None
        op = _OPS[drop is not None]
        options = dict(
            causal=masks.causal,
            window=masks.window,
            scale=self.scale,
            threshold=2**16 if drop is None else drop.threshold,
            dropout_scale=1.0 if drop is None else drop.scale,
            deterministic=self.deterministic,
            segments=self.segments,
        )

        def native(request, query, key, value, bias, mask, *rest):
            whole = view is not None
            if view is not None:
                query, key, value = view(query)
            packed = key is None
            kv_heads = query.shape[3] if packed else key.shape[2]
            if not packed:
                query = split(query, 2, (kv_heads, query.shape[2] // kv_heads))
            bias, mask = (x if x is None else _split_heads(x, 1, kv_heads) for x in (bias, mask))
            *small, words = rest
            small = [x if x is None else x[:, None] for x in small]
            operands = (query, key, value, bias, mask, *small, words)
            y, sums = op.bind(request, *operands, signature=_signature(packed), **options)
            return merge(y, 2, 2 + whole), merge(sums, 1)

        def reference(query, key, value, bias, mask, q_lengths, kv_lengths, q_ids, kv_ids, words):
            segments = None if q_ids is None else (q_ids, kv_ids)
            given = masks._replace(
                mask=mask, query_lengths=q_lengths, key_lengths=kv_lengths, segments=segments
            )
            dropped = None if drop is None else drop._replace(words=words)
            call = self._replace(bias=bias, masks=given, drop=dropped)
            if otherwise is not None:
                return otherwise(call, query)
            return call.by_softmax(query, key, value)

        limit = _cudnn.limit(query, key, size, self.bias, self.scale)
        if drop is not None and drop.threshold == 0:
            limit = "every weight is dropped"
        return op(
            query,
            key,
            value,
            self.bias,
            masks.mask,
            masks.query_lengths,
            masks.key_lengths,
            *(masks.segments or (None, None)),
            None if drop is None else drop.words,
            entry="attention",
            features={"keys": query.shape[1] if key is None else key.shape[1]},
            limit=limit,
            native=native,
            otherwise=reference,
            composed=True,
        )
