"""Attention by cuDNN: its kernels, and what they take.

cuDNN computes attention without an array of scores, forward and backward. The kernels read queries,
keys and values from one array or from three, and write their gradients likewise. Names of
dimensions: ``t`` queries, ``s`` keys, ``k`` heads of keys, ``g`` heads of queries for each of them,
``h`` the size of a head.

The masks of cuDNN's dropout depend on its seed and on the shapes of a call. :func:`keep` reads them
from a call whose weights are all equal, so that derivatives that no kernel computes take the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastops import _native
from jax_fastops._dispatch import Refused
from jax_fastops._kernel import Kernel, partitions, without_large_copies
from jax_fastops._random import row_seeds

_ATTRIBUTES = dict(before=np.int64, after=np.int64, scale=np.float64, rate=np.float64)
_OPERANDS = (
    "bias?: ~... *k a b s :acc?, q_lengths?: ... *k :int32, kv_lengths?: ... *k :int32, "
    "starts?: ... *k m :int32, counts?: ... *k m :int32, seeds?: ... *k g 4 :uint32"
)
_Y, _WORKSPACE = "... t *k g h", "... *k w :uint8"
_HEADS = "query: ... t *k g h, key?: ... s *k h, value?: ... s *k h"


def _kernels(stats: str) -> tuple[Kernel, Kernel]:
    forward = Kernel.declare(
        "attention",
        f"{_HEADS}, {_OPERANDS} -> y: {_Y}, stats: {stats}, workspace: {_WORKSPACE}",
        **_ATTRIBUTES,
    )
    backward = Kernel.declare(
        "attention_bwd",
        f"{_HEADS}, {_OPERANDS}, y: {_Y}, stats: {stats}, dy: {_Y} -> dquery: ... t *k g h, "
        f"dkey?: ... s *k h, dvalue?: ... s *k h, workspace: {_WORKSPACE}",
        **_ATTRIBUTES,
        deterministic=np.bool_,
    )
    return forward, backward


FORWARD, BACKWARD = _kernels("... *k g t :acc")
_OF_SEQUENCES = dict(zip((FORWARD, BACKWARD), _kernels("... t *k g :acc"), strict=True))

_WHOLE = dict(
    query="... t p=3 *k h",
    bias="~... *k a b t",
    q_lengths="... *k",
    kv_lengths="... *k",
    starts="... *k m",
    counts="... *k m",
    seeds="... *k g=1 4",
    y="... t *k g=1 h",
    dy="... t *k g=1 h",
    stats="... *k g=1 t",
    dquery="... t p=3 *k h",
    workspace="... *k w",
)


@functools.cache
def _of_whole(kernel: Kernel, operands: frozenset[str]) -> Kernel:
    """The kernel with these operands, and queries, keys and values in one array."""
    names = operands | {slot.name for slot in kernel.signature.results}
    whole = _WHOLE | ({"stats": "... t *k g=1"} if "starts" in operands else {})
    return kernel.with_dimensions(**{name: d for name, d in whole.items() if name in names})


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call.

    ``before`` and ``after`` are the numbers of keys before and after the position of a query that
    count, -1 for all. ``rate`` is that of the dropout.
    """

    scale: float
    before: int = -1
    after: int = -1
    rate: float = 0.0
    deterministic: bool = False


def limit(query, key, size: int, bias, scale: float) -> str | None:
    """Why cuDNN cannot take heads of a size, in arrays like ``query`` and ``key``."""
    if str(query.dtype) not in ("bfloat16", "float16"):
        return f"cuDNN takes bfloat16 and float16, not {query.dtype}"
    if bias is not None and str(bias.dtype) not in (str(query.dtype), "float32"):
        return f"cuDNN takes no bias of {bias.dtype} here"
    sizes = query.shape if key is None else query.shape + key.shape
    if not all(isinstance(d, int) for d in sizes) or 0 in sizes:
        return "a size is symbolic or 0"
    if query.shape[1] == 1:
        return "there is one query, whose weights are few"
    if size % 8 or size > 256:
        return f"cuDNN takes heads of a multiple of 8 up to 256, not of {size}"
    if not 0 < scale < math.inf:
        return f"the scale is {scale}"
    return None


class Segments(NamedTuple):
    """Sequences of one row, for each of which cuDNN computes attention: ``[..., m]``."""

    starts: Any
    counts: Any


class Sizes(NamedTuple):
    """The sizes of the problem that the kernel sees on one device."""

    batch: Any
    heads: Any
    kv_heads: Any
    queries: Any
    keys: Any
    size: Any

    @property
    def groups(self) -> Any:
        """Heads of queries for each head of keys."""
        return self.heads // self.kv_heads


def sizes(query, key) -> Sizes:
    """Those of queries, and of keys or ``None`` if all heads are in one array."""
    batch = math.prod(query.shape[:-4])
    if key is None:
        t, _, k, h = query.shape[-4:]
        return Sizes(batch, k, k, t, t, h)
    t, k, g, h = query.shape[-4:]
    return Sizes(batch, k * g, k, t, key.shape[-3], h)


def _workspace(
    query, key, bias, lengths: bool, segments: int, options: Options, backward: bool, both: bool
) -> int:
    """Bytes of workspace for an example and a head of keys, in a call of one direction.

    Raises ``Refused`` if there is no plan for it, or with ``both`` for one of the two directions.
    """
    problem = sizes(query, key)
    t, s, h, groups = problem.queries, problem.keys, problem.size, problem.groups
    least = 4096 + 48 * segments
    # A gradient of the queries and a sum for each row in float32, and each head's gradients of
    # keys and values where heads share them.
    rows, columns = (-(-n // 128) * 128 + 128 * segments for n in (t, s))
    backwards = least + groups * rows * (4 * h + 8) + (groups > 1) * 4 * groups * columns * h
    if options.deterministic:
        backwards += groups * rows * columns * 2
    cell = backwards if backward else least
    batch, bias_heads, bias_rows = 0, 0, 0
    if bias is not None:
        *lead, k, g, bias_rows, _ = bias.shape
        batch, bias_heads = math.prod(lead), k * g
    for direction in (False, True) if both else (backward,):
        plan = _native.attention_plan(
            dtype=str(query.dtype),
            **problem._asdict(),
            packed=key is None,
            bias_batch=batch,
            bias_heads=bias_heads,
            bias_rows=t if bias_rows and direction else bias_rows,
            wide_bias=bias is not None and bias.dtype != query.dtype,
            lengths=lengths,
            segments=segments,
            backward=direction,
            **dataclasses.asdict(options),
        )
        if plan is None:  # no device: the plan is found where the program runs
            if segments:
                raise Refused("there is no device that tells whether cuDNN takes segments")
            continue
        needed, refusal = plan
        if refusal:
            raise Refused(refusal)
        needed = -(-needed // (problem.batch * problem.kv_heads))
        if segments and needed > 8 * backwards:
            raise Refused("cuDNN's workspace grows with the number of segments here")
        if direction == backward:
            cell = max(cell, needed)
    return -(-cell // 256) * 256


def _arrays(query, key, value, bias, q_lengths, kv_lengths, segments: Segments | None) -> dict:
    """The operands that both kernels have, without the seeds."""
    k = query.shape[-2] if key is None else key.shape[-2]

    lead = query.shape[:-4]

    def full(lengths):
        if lengths is None:
            return None
        return jnp.broadcast_to(lengths, (*lead, k)).astype(jnp.int32)

    def of_heads(x):
        return jnp.broadcast_to(x[..., None, :], (*lead, k, x.shape[-1])).astype(jnp.int32)

    starts, counts = (None, None) if segments is None else map(of_heads, segments)

    return dict(
        query=query,
        key=key,
        value=value,
        bias=bias,
        q_lengths=full(q_lengths),
        kv_lengths=full(kv_lengths),
        starts=starts,
        counts=counts,
    )


def _numbers(arrays: dict, options: Options, backward: bool, both: bool) -> dict:
    """The attributes that both kernels have, and the size of the workspace."""
    query, key, bias = (arrays[name] for name in ("query", "key", "bias"))
    lengths = arrays["q_lengths"] is not None or arrays["kv_lengths"] is not None
    segments = 0 if arrays["starts"] is None else arrays["starts"].shape[-1]
    return dict(
        before=options.before,
        after=options.after,
        scale=options.scale,
        rate=options.rate,
        w=_workspace(query, key, bias, lengths, segments, options, backward, both),
    )


def _seeds(words, query, key):
    """A seed for each head of queries."""
    if words is None:
        return None
    if partitions() > 1:
        # The masks of cuDNN depend on what a device has, which XLA may choose anew backward.
        raise Refused("cuDNN's dropout needs a program for one device, or shard_map")
    problem = sizes(query, key)
    return row_seeds(words, (*query.shape[:-4], problem.kv_heads, problem.groups, 1))


def _of_same_key(run, bias: int | None):
    """``run(seeds, *arrays)``, under ``vmap`` as one call if each example has its seeds.

    Otherwise there is one call per example: the masks of a call depend on its shape, and examples
    of one key have the same masks. ``bias`` is the place of the bias among the arrays, the first of
    which are the queries.
    """

    @jax.custom_batching.custom_vmap
    def one(seeds, *arrays):
        return run(seeds, *arrays)

    @one.def_vmap
    def _(axis_size, mapped, seeds, *arrays):
        if mapped[0]:
            arrays = [
                x if m else jnp.broadcast_to(x, (axis_size, *x.shape))
                for x, m in zip(arrays, mapped[1:], strict=True)
            ]
            if bias is not None:  # the whole batch of examples, or cuDNN cannot take it
                shape = (*arrays[0].shape[:-4], *arrays[bias].shape[-4:])
                arrays[bias] = jnp.broadcast_to(arrays[bias], shape)
            outs = _of_same_key(jax.vmap(run), bias)(seeds, *arrays)
        else:
            moving = [x for x, m in zip(arrays, mapped[1:], strict=True) if m]

            def example(moving):
                rest = iter(moving)
                chosen = [next(rest) if m else x for x, m in zip(arrays, mapped[1:], strict=True)]
                return one(seeds, *chosen)

            outs = jax.lax.map(example, moving)
        return outs, jax.tree.map(lambda _: True, outs)

    return one


def _emit(kernel: Kernel, seeds, arrays: dict, numbers: dict) -> tuple:
    """The results of a call, without the workspace. ``arrays`` and ``seeds`` are its operands."""
    names = [name for name, x in arrays.items() if x is not None]
    if arrays["starts"] is not None:
        kernel = _OF_SEQUENCES[kernel]
    if arrays["key"] is None:
        own = ["seeds"] if seeds is not None else []
        kernel = _of_whole(kernel, frozenset(names + own))

    def run(seeds, *values):
        given = dict(zip(names, values, strict=True)) | numbers
        call = kernel.of(**given if seeds is None else given | dict(seeds=seeds))
        results = without_large_copies(call)()._asdict()
        return tuple(results[name] for name in results if name != "workspace")

    values = [arrays[name] for name in names]
    if seeds is None:
        return run(None, *values)
    bias = names.index("bias") if "bias" in names else None
    return _of_same_key(run, bias)(seeds, *values)


def forward(
    query, key, value, bias, q_lengths, kv_lengths, segments, words, options: Options, gradient
):
    """The result ``[..., t, k, g, h]`` and its logarithms of sums ``[..., k, g, t]``.

    ``query`` may be an array ``[..., t, 3, k, h]`` of all three, with ``None`` for the others.
    Lengths are ``[..., 1]``. With ``segments``, rows that are in none are not written, and ``bias``
    and lengths must be ``None``; likewise in :func:`backward`. ``gradient`` says whether that may
    follow.
    """
    seeds = _seeds(words, query, key)
    arrays = _arrays(query, key, value, bias, q_lengths, kv_lengths, segments)
    # With dropout, either both directions take cuDNN or none: no other code has its masks. With
    # segments, either both have them or none.
    both = gradient or seeds is not None or segments is not None
    numbers = _numbers(arrays, options, False, both)
    y, stats = _emit(FORWARD, seeds, arrays, numbers)
    return y, stats if segments is None else jnp.moveaxis(stats, -3, -1)


def backward(
    query, key, value, bias, q_lengths, kv_lengths, segments, words, y, stats, dy, options: Options
) -> tuple:
    """The gradients of the arrays, one or three."""
    seeds = _seeds(words, query, key)
    arrays = _arrays(query, key, value, bias, q_lengths, kv_lengths, segments)
    numbers = _numbers(arrays, options, True, seeds is not None or segments is not None)
    stats = stats if segments is None else jnp.moveaxis(stats, -1, -3)
    numbers |= dict(deterministic=options.deterministic)
    if bias is not None:  # cuDNN 9.19 computes wrong gradients with one row for all queries
        rows = query.shape[-4]
        arrays["bias"] = jnp.broadcast_to(bias, (*bias.shape[:-2], rows, bias.shape[-1]))
    if key is not None:
        numbers |= dict(dkey=True, dvalue=True)
    return _emit(BACKWARD, seeds, arrays | dict(y=y, stats=stats, dy=dy), numbers)


def keep(query, key, bias, q_lengths, kv_lengths, segments, words, options: Options):
    """Which weights ``[..., k, g, t, s]`` the dropout of a call keeps, of those that count.

    Queries and bias are 0, so that the weights of a row are equal, and the values are rows of
    identity matrices: a result is not 0 where its weight is kept.
    """
    masks = (None if bias is None else jnp.zeros_like(bias), q_lengths, kv_lengths, segments)
    problem = sizes(query, key)
    length, k, size = problem.keys, problem.kv_heads, problem.size
    rows = jnp.zeros_like(query if key is None else key)
    lead = query.shape[:-4]
    options = dataclasses.replace(options, scale=1.0)
    parts = []
    for first in range(0, length, size):
        identity = jnp.arange(length)[:, None] == first + jnp.arange(size)
        value = jnp.broadcast_to(identity[:, None].astype(query.dtype), (*lead, length, k, size))
        if key is None:
            x = rows.at[..., 2, :, :].set(value)
            y, _ = forward(x, None, None, *masks, words, options, True)
        else:
            zeros = jnp.zeros_like(query)
            y, _ = forward(zeros, rows, value, *masks, words, options, True)
        parts.append(y != 0)
    kept = jnp.concatenate(parts, -1)[..., :length]
    return jnp.moveaxis(kept, -4, -2)
