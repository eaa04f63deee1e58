"""``segment_sum`` adds up rows by segment, and ``take`` picks rows of a table.

The gradient of each is the other. ``take`` is XLA's gather, which is as fast as a copy. The sums
have a kernel. On a GPU, rows are read in the order of their segments: one kernel sorts the ids, and
another one reads each row once and writes each sum once. The order of additions depends only on ids
and shapes, so the sums have the same bits in every run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_fastops._arguments import FLOATING, as_arrays, integer, not_weak, one_of
from jax_fastops._dispatch import Refused, row_features
from jax_fastops._kernel import Kernel, match_varying, partitions
from jax_fastops._op import Op
from jax_fastops._registry import constant, example
from jax_fastops._shards import shards_of
from jax_fastops._signature import accumulator_dtype
from jax_fastops._views import merge, parts_of, reshape, spec_of, split

MODES = ("fill", "clip")

# Ids are in int32, and a kernel looks a few ids ahead.
_MAX_SEGMENTS = 2**31 - 65

# Of a block on CUDA, as in src/segment_sum/segment_sum.cu.
_THREADS = 256


@functools.cache
def _kernel(ids: str, wide: bool) -> Kernel:
    return Kernel.declare(
        "segment_sum",
        f"x: ... r *c, ids: ~... r *c :{ids}, order?: ~... r *c :int32 "
        f"-> y: ... s *c{' :acc' * wide}, parts?: ... tiles 3 *c :acc",
        tile=np.int64,
    )


def _tile(shape: tuple[int, ...], itemsize: int, segments: int) -> tuple[int, int]:
    """How many rows and segments a group of threads takes, and the number of blocks that follows.

    A row has as many threads as it has 16 bytes, up to a warp. A group has at least 16 rows and
    segments, because it searches for the first of them; more than 1024 would make the last blocks
    run alone.
    """
    *batch, rows, columns = shape
    words = -(-columns * itemsize // 16)
    lanes = min(32, 1 << max(0, words - 1).bit_length())
    groups, items = _THREADS // lanes, rows + segments
    everything = items * -(-words // lanes) * math.prod(batch)
    tile = min(1024, max(16, -(-everything // (_BLOCKS * groups))))
    return tile, -(-items // (tile * groups))


_BLOCKS = 396  # that an H100 runs at a time


@functools.cache
def _sort_kernel(keys: str) -> Kernel:
    return Kernel.declare(
        "segment_sum.sort",
        f"ids: ... r :int32 -> keys: ... r :{keys}, order: ... r :int32, work?: ... w :uint32",
        segments=np.int64,
        bits=np.int64,
        tile=np.int64,
    )


def _sorted(ids, segments: int):
    """Ids ``[..., r]`` in ascending order, and where they were. Those of no segment come last.

    CUDA only. Calls that sort the same ids are one call in XLA's program.
    """
    rows, width = ids.shape[-1], segments.bit_length()
    passes = -(-width // _MAX_BITS)
    bits = max(_MIN_BITS, -(-width // passes))
    # A list that fits is sorted by one block. Else there are about as many as a GPU runs at a time.
    tile = -(-rows // _THREADS) * _THREADS
    if tile > _THREADS * _MAX_ITEMS:
        tile = _THREADS * min(_MAX_ITEMS, max(4, -(-rows // (_THREADS * 512))))
    tiles = -(-rows // tile)
    work = (2 * rows if passes > 1 else 0) + ((tiles + 1) << bits)
    kernel = _sort_kernel("uint16" if segments < 2**16 else "int32")
    found = kernel(ids, work=tiles > 1, segments=segments, bits=bits, tile=tile, w=work)
    return found.keys, found.order


# Of the sort, as in src/segment_sum/sort.cu: bits of a digit, rows of a thread.
_MIN_BITS, _MAX_BITS, _MAX_ITEMS = 3, 10, 16


def _sums(x, ids, *, segments: int, ordered: bool, wide: bool):
    """The sums of ``x: [..., r, c]`` by kernel. ``ids`` are ``[..., r, 1]``."""

    def on_cuda(x, ids):
        tile, tiles = _tile(x.shape, x.dtype.itemsize, segments)
        order = None
        if not ordered:
            ids, order = (a[..., None] for a in _sorted(ids[..., 0], segments))
        kernel = _kernel(str(ids.dtype), wide)
        return kernel(x, ids, order=order, parts=True, tile=tile, s=segments, tiles=tiles).y

    def on_cpu(x, ids):
        return _kernel("int32", wide)(x, ids, tile=0, s=segments).y

    return jax.lax.platform_dependent(x, ids, cpu=on_cpu, default=on_cuda)


def _sums_over_shards(x, ids, *, segments: int, ordered: bool, wide: bool):
    """The sums of all rows of ``x: [..., c]`` by kernel, with an id for each.

    The first dimension may be sharded. Each shard has sums of its own, which are then added up.
    """
    spec, kind = spec_of(x), jax.typeof(x).sharding
    if spec is not None and any(axis is not None for axis in spec[1:-1]):
        raise Refused("an explicit mesh axis shards an inner dimension of the rows")
    if spec is None and x.ndim > 2 and partitions() > 1:
        raise Refused("several devices may share any dimension of the rows")
    shards = shards_of(x.shape[0], spec and spec[0], kind, 1)
    lead = () if spec is None and shards == 1 else (shards,)
    rows = math.prod(x.shape[:-1]) // shards
    axis = None if spec is None else spec[0]
    x = reshape(x, (*lead, rows, x.shape[-1]), spec and (axis, None, spec[-1]))
    ids = reshape(ids, (*lead, rows, 1), spec and (axis, None, None))
    sums = _sums(x, ids, segments=segments, ordered=ordered, wide=wide or bool(lead))
    sums = sums.sum(0) if lead else sums
    return sums if wide else sums.astype(x.dtype)


def _forward(x, ids, **options):
    if x.ndim > 2:
        return _sums(x, ids, **options)
    return _sums_over_shards(x, jax.lax.squeeze(ids, (1,)), **options)


def _over_batch(function, x, ids):
    """``function`` of matrices ``x`` and vectors of ids, under ``vmap`` for batch dimensions."""
    if x.ndim == 2:
        return function(x, jax.lax.squeeze(ids, (1,)))
    inner = functools.partial(_over_batch, function)
    if ids.shape[0] == 1 != x.shape[0]:
        return jax.vmap(inner, in_axes=(0, None))(x, ids[0])
    return jax.vmap(inner)(x, ids)


def _reference(x, ids, *, segments: int, ordered: bool, wide: bool):
    def sums(x, ids):
        if (spec := spec_of(x)) is None:
            return jax.ops.segment_sum(x, ids, segments, indices_are_sorted=ordered)
        # That function has zeros without a sharding.
        sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(None, spec[-1]))
        zeros = jax.lax.full((segments, x.shape[-1]), 0, x.dtype, sharding=sharding)
        ids = jnp.where(ids < 0, segments, ids)
        return zeros.at[ids].add(x, indices_are_sorted=ordered)

    found = _over_batch(sums, x.astype(accumulator_dtype(x.dtype)), ids)
    return found if wide else found.astype(x.dtype)


def _rows(y, ids, fill: float = 0):
    """Rows of a matrix, and a number in place of those that it does not have."""
    return _gathered(y, jnp.where(ids < 0, y.shape[0], ids), mode="fill", fill_value=fill)


def _gathered(table, ids, **options):
    """Rows at indices that do not count from the end."""
    spec = spec_of(ids)
    if spec is None and spec_of(table) is not None:
        spec = (None,) * ids.ndim
    if spec is not None:
        columns = (spec_of(table) or (None,))[-1]
        if not {*jax.tree.leaves(columns)}.isdisjoint(jax.tree.leaves(spec)):
            columns = None  # an axis shards one dimension
        options["out_sharding"] = PartitionSpec(*spec, columns)
    return table.at[ids].get(wrap_negative_indices=False, **options)


def _pullback(residuals, cts, **_):
    (ids,) = residuals
    return _over_batch(_rows, cts[0], ids), None


_SEGMENT_SUM = Op(
    "segment_sum",
    "... r *c, ~... r *c -> ... s=1 *c",
    _reference,
    example=example(lambda x: segment_sum(x, constant(np.arange(len(x)) % 7), 8), "... n"),
    kernels=(_kernel("int32", False),),
    forward=_forward,
    residuals=lambda args, outs, saved: args[1:],
    pullback=_pullback,
    pushforward=lambda residuals, tangents, **options: _reference(
        tangents[0], *residuals, **options
    ),
    backward=lambda residuals, cts, needs_grad, **options: _pullback(residuals, cts),
    tangent=lambda residuals, tangents, **options: _forward(tangents[0], *residuals, **options),
)


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Sums of rows by segment.

    Equals ``jax.ops.segment_sum``, summed in float32 (float64 for float64) and rounded once. The
    kernel gives the same bits in every run.

    Args:
      data: array of one dimension or more. Its first dimension is that of the rows.
      segment_ids: array of any integer dtype, with an id for each row. A row whose id is negative,
        or not below ``num_segments``, is in no sum.
      num_segments: the number of segments; a static Python integer. ``None`` stands for the largest
        id plus 1, which must be known while the function is traced.
      indices_are_sorted: whether ``segment_ids`` are in ascending order. Ids are then not sorted.
        The sums are undefined if they are in another order.

    Returns:
      The sums: an array with the dtype of ``data`` and the shape ``(num_segments,
      *data.shape[1:])``. A segment without rows has the sum 0. Only float32, bfloat16, float16 and
      float64 have a kernel; ``jax.ops.segment_sum`` sums other dtypes.

    Residuals: the ids (int32). The gradient of a row is the row of the cotangent that has its id,
    by XLA's gather.

    Sharding: over the rows, with one all-reduce of the sums; over the other dimensions, without
    communication. Auto mesh axes do not say what they shard, so every device adds up the rows in as
    many groups as there are devices.

    Raises:
      TypeError: an argument is not an array, ``segment_ids`` are not integers, or ``num_segments``
        is not an integer, or ``None`` while ``segment_ids`` are traced.
      ValueError: there is not one id for each row, or ``num_segments`` is negative.

    Source: Merrill and Garland, "Merge-based parallel sparse matrix-vector multiplication" (2016).

    Example:
      >>> data = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> fo.segment_sum(data, jnp.array([2, 0, 2]), 3).tolist()
      [[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]
    """
    name = "segment_sum"
    x, ids = as_arrays(name, data=data, segment_ids=segment_ids)
    _check_integers(name, "segment_ids", ids)
    if x.ndim == 0 or ids.shape != x.shape[:1]:
        raise ValueError(
            f"{name}: segment_ids has shape {ids.shape}, and data has shape {x.shape}; there must "
            "be one id for each row"
        )
    if num_segments is None:
        if isinstance(ids, jax.core.Tracer):
            raise TypeError(
                f"{name}: num_segments is None; it must be given if segment_ids are traced"
            )
        num_segments = int(np.max(ids)) + 1 if ids.size else 0
    x = not_weak(x)
    if jax.export.is_symbolic_dim(num_segments):
        symbolic: Any = num_segments
        return jax.ops.segment_sum(x, ids, symbolic, indices_are_sorted=indices_are_sorted)
    segments = integer(name, "num_segments", num_segments)
    if segments < 0:
        raise ValueError(f"{name}: num_segments is {segments}; it must be 0 or more")
    if str(x.dtype) not in FLOATING or segments > _MAX_SEGMENTS:
        return jax.ops.segment_sum(x, ids, segments, indices_are_sorted=indices_are_sorted)
    x, ids = match_varying([x, _as_int32(ids)])
    rest = x.shape[1:]
    x = merge(x, 1, len(rest)) if rest else jax.lax.expand_dims(x, (1,))
    spec = spec_of(x)
    shards = 1 if spec is None else parts_of(spec[0], jax.typeof(x).sharding)
    if shards > 1:
        x = split(x, 0, (shards, x.shape[0] // shards))
    ids = reshape(ids, (*x.shape[:-1], 1), spec and (spec[0], None, None)[-x.ndim :])
    dtype = " :acc" * (shards > 1)
    sums = _SEGMENT_SUM(
        x,
        ids,
        signature=f"... r *c, ~... r *c -> ... s={segments} *c{dtype}",
        features=row_features(x.shape[-1:], x.dtype),
        limit=_limit(x, segments),
        segments=segments,
        ordered=bool(indices_are_sorted),
        wide=shards > 1,
    )
    if shards > 1:
        sums = sums.sum(0).astype(x.dtype)
    return split(sums, 1, rest) if rest else jax.lax.squeeze(sums, (1,))


def _taken(table, ids, *, fill: bool):
    if fill:
        return _rows(table, ids, np.nan)
    return _gathered(table, ids, mode="promise_in_bounds")


def _table_gradient(residuals, cts, needs_grad, *, fill: bool, rows: int):
    del needs_grad, fill
    (ids,), (ct,) = residuals, cts
    options: dict[str, Any] = dict(segments=rows, ordered=False, wide=False)
    if ids.size > _MAX_SEGMENTS:
        raise Refused("there are 2**31 rows")
    # Devices send the rows if these are smaller than the sums in float32, which they would add up.
    if partitions() > 1 and ids.size * ct.dtype.itemsize <= rows * 4:
        ct, ids = _on_every_device(ct, 1), _on_every_device(ids, 0)
        ct, ids = merge(ct, 0, ids.ndim), merge(ids, 0, ids.ndim)
        return _sums(ct, jax.lax.expand_dims(ids, (1,)), **options), None
    return _sums_over_shards(ct, ids, **options), None


def _on_every_device(x, last: int):
    """``x``, of whose dimensions only the ``last`` ones stay sharded over explicit mesh axes."""
    if (spec := spec_of(x)) is None:
        return x  # a kernel without leading dimensions needs whole operands
    spec = PartitionSpec(*(None,) * (x.ndim - last), *spec[x.ndim - last :])
    return jax.sharding.reshard(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))


def _take_pullback(residuals, cts, *, fill: bool, rows: int):
    """In the accumulator dtype."""
    (ids,), (ct,) = residuals, cts
    wide = accumulator_dtype(ct.dtype)
    table, ids = match_varying([jnp.zeros((rows, ct.shape[-1]), wide), ids])
    return *jax.vjp(functools.partial(_taken, ids=ids, fill=fill), table)[1](ct.astype(wide)), None


def _take_pushforward(residuals, tangents, *, fill: bool, rows: int):
    """A row of NaN does not depend on the table."""
    del rows
    return _rows(tangents[0], *residuals) if fill else _taken(tangents[0], *residuals, fill=False)


_TAKE = Op(
    "take",
    "v c, ... -> ... c",
    lambda table, ids, *, fill, rows: _taken(table, ids, fill=fill),
    family="segment_sum",
    example=example(lambda x: take(x, constant(np.arange(64) ** 2 % len(x))), "... n"),
    kernels=(_kernel("int32", False),),
    forward=lambda table, ids, *, fill, rows: _taken(table, ids, fill=fill),
    residuals=lambda args, outs, saved: args[1:],
    pullback=_take_pullback,
    pushforward=_take_pushforward,
    backward=_table_gradient,
    tangent=_take_pushforward,
)


def take(table: ArrayLike, indices: ArrayLike, *, mode: str | None = None) -> jax.Array:
    """Rows of a table: ``jnp.take(table, indices, axis=0, mode=mode)``.

    The gradient of the table is a :func:`segment_sum`, in float32 (float64 for float64) and rounded
    once. Its kernel gives the same bits in every run.

    Args:
      table: array of one dimension or more. Its first dimension is that of the rows.
      indices: array of any integer dtype and shape.
      mode: ``"fill"`` or ``None`` counts negative indices from the end, and gives rows of NaN for
        indices that are out of bounds. ``"clip"`` moves every index to the nearest row; a negative
        one to row 0.

    Returns:
      An array with the dtype of ``table`` and the shape ``(*indices.shape, *table.shape[1:])``. Of
      the dtypes, float32, bfloat16, float16 and float64 have a kernel for the gradient; for others,
      this is ``jnp.take``.

    Residuals: the indices (int32).

    Sharding: the rows of the result are sharded like ``indices``. If the result has no more bytes
    than the table in float32, the gradient gathers the rows of all devices, and has the bits of one
    device. Otherwise, it adds up the rows of each shard of the first dimension of ``indices``, and
    then the sums by one all-reduce; with auto mesh axes, it takes the reference if ``indices`` have
    several dimensions. A table that is sharded over explicit mesh axes takes the reference.

    Raises:
      TypeError: an argument is not an array, or ``indices`` are not integers.
      ValueError: ``mode`` is not known, or ``table`` has no dimension.
      IndexError: ``table`` has no rows, and ``indices`` are not empty.

    Source: Mikolov et al., "Efficient estimation of word representations" (2013): tables of words.

    Example:
      >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> fo.take(table, jnp.array([1, -2])).tolist()
      [[3.0, 4.0], [1.0, 2.0]]
      >>> jax.grad(lambda t: fo.take(t, jnp.array([1, 1])).sum())(table).tolist()
      [[0.0, 0.0], [2.0, 2.0]]
    """
    name = "take"
    table, indices = as_arrays(name, table=table, indices=indices)
    _check_integers(name, "indices", indices)
    if mode is not None:
        one_of(name, "mode", mode, MODES)
    if table.ndim == 0:
        raise ValueError(f"{name}: table of shape () has no rows")
    table = not_weak(table)
    rows = table.shape[0]
    limit = _limit(table, rows)
    if str(table.dtype) not in FLOATING or limit is not None or 0 in indices.shape:
        return jnp.take(table, indices, axis=0, mode=mode)
    ids, fill = _as_int32(indices), mode != "clip"
    ids = jnp.where(ids < 0, ids + rows, ids) if fill else jnp.clip(ids, 0, rows - 1)
    return _take(table, ids, fill)


def promised_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """The rows of a gather that promises indices in bounds, with the gradient of :func:`take`.

    XLA moves other indices to the nearest row, but their gradient is in no row.
    """
    if str(table.dtype) not in FLOATING or _limit(table, table.shape[0]) or 0 in indices.shape:
        return table.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return _take(table, _as_int32(indices), fill=False)


def _take(table, ids, fill: bool):
    table, ids = match_varying([table, ids])
    rows, rest = table.shape[0], table.shape[1:]
    x = merge(table, 1, len(rest)) if rest else jax.lax.expand_dims(table, (1,))
    taken = _TAKE(
        x,
        ids,
        features=row_features(x.shape[-1:], x.dtype),
        fill=fill,
        rows=rows,
    )
    last = taken.ndim - 1
    return split(taken, last, rest) if rest else jax.lax.squeeze(taken, (last,))


def _check_integers(op: str, name: str, ids) -> None:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"{op}: {name} has dtype {ids.dtype} and shape {ids.shape}; it must have an integer "
            "dtype"
        )


def _as_int32(ids):
    """Ids in int32. Those that it cannot hold stay out of bounds, at the same end."""
    if ids.dtype.itemsize >= 4 and ids.dtype != jnp.int32:
        least = -(2**31) if jnp.issubdtype(ids.dtype, jnp.signedinteger) else 0
        ids = jnp.clip(ids, least, 2**31 - 1)
    return ids.astype(jnp.int32)


def _limit(x, segments: int) -> str | None:
    """Why the kernel cannot take this call, if it cannot."""
    if not all(isinstance(d, int) for d in x.shape):
        return "a size is symbolic"
    if 0 in x.shape or segments == 0:
        return "there are no elements"
    if max(x.shape[0], segments) > _MAX_SEGMENTS:
        return "there are 2**31 rows or segments"
    if math.prod(x.shape[1:]) * x.dtype.itemsize >= 2**32:
        return "a row has 4 GiB"
    return None
