"""Shared code of the element-wise ops with broadcast operands.

Kernels read each operand in its own shape. The kernel that computes a gradient also sums it to the
shape of its operand.

The signature of a kernel with sums depends on the call: it says which dimensions are summed. Others
have a star, so they may be sharded. A dimension with a sum must stay whole, unless it is split in
two: the shards, and the elements of a shard. Then the kernel writes a partial sum for each shard,
and XLA adds these up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastops._dispatch import Refused, row_features
from jax_fastops._kernel import Kernel, partitions, without_large_copies
from jax_fastops._native import limit
from jax_fastops._shards import shards_of
from jax_fastops._views import explicit_spec, reshape, spec_of

_WORKSPACE = 8  # elements per element of workspace


def of_rank(x, rank: int) -> jax.Array:
    """``x`` with leading dimensions of size 1 up to the rank ``rank``."""
    return jax.lax.expand_dims(x, tuple(range(rank - x.ndim))) if x.ndim < rank else x


def add(x, bias) -> jax.Array:
    """``x + bias``, rounded once to the dtype of ``x``.

    The bias has this dtype or the accumulator dtype. Like in JAX, its gradient is the sum of the
    gradient of ``x``, in the dtype of the bias.
    """
    return (x.astype(bias.dtype) + bias).astype(x.dtype)


# Kernels that sum gradients count rows, and the words of a row, in 32 bits.
_MOST_ELEMENTS = 2**32


def limit_of(shape) -> str | None:
    """Why the kernels cannot take a result of this shape."""
    if 0 in shape:
        return "there are no elements"
    if len(shape) > limit("broadcast_rank"):
        return f"the result has more than {limit('broadcast_rank')} dimensions"
    if math.prod(d for d in shape if isinstance(d, int)) >= _MOST_ELEMENTS:
        return "the result has 2**32 elements or more"
    return None


def call(kernel: Kernel, *operands, **given) -> tuple:
    """The results of a forward kernel."""
    _refuse_beyond_limits(jnp.broadcast_shapes(*(x.shape for x in operands)))
    run = without_large_copies(kernel.of(*operands, **given))
    return tuple(y for y in run() if y is not None)


def _refuse_beyond_limits(shape) -> None:
    if (reason := limit_of(shape)) is not None:
        raise Refused(reason)


@dataclasses.dataclass(frozen=True)
class _Dimension:
    """The kernel's view of a dimension of the cotangent."""

    index: int
    size: Any
    whole: bool  # not sharded, or at most into ``shards``
    shards: int = 1

    def words(self, own: str) -> str:
        if not self.whole:
            return f"*k{self.index}"
        return f"*s{self.index} {own}" if self.shards > 1 else own

    @property
    def sizes(self) -> tuple:
        return (self.shards, self.size // self.shards) if self.shards > 1 else (self.size,)


def pull_back(kernel: Kernel, dy, operands: dict, targets: dict, **attributes) -> tuple:
    """Gradients by a kernel, from the cotangent and ``operands`` of its rank, by name.

    The dimensions of the kernel's buffers are chosen here. An operand ``mask`` has a byte for every
    8 elements of the last dimension. ``targets`` maps the name of each gradient to the type of the
    operand whose gradient it is, or to ``None`` if it is not needed.
    """
    bits = "mask" in operands
    needed = {key: t for key, t in targets.items() if t is not None}
    cut = partitions() > 1
    kind = jax.typeof(dy).sharding
    spec = explicit_spec(kind, dy.ndim)
    symbolic = not all(isinstance(d, int) for d in dy.shape)
    if symbolic and (cut or spec is not None):
        raise Refused("a size is symbolic in a program for several devices")

    dims = []
    for d, size in enumerate(dy.shape):
        row = bits and d == dy.ndim - 1
        summed = any(t.shape[d] != size for t in needed.values())
        shards = 1
        if summed and not row and (cut or spec is not None):
            shards = shards_of(size, spec and spec[d], kind, 1)
        dims.append(_Dimension(d, size, summed or row, shards))
    _refuse_beyond_limits([size for dim in dims for size in dim.sizes])

    def slot(own: Sequence[str]) -> str:
        return " ".join(["...", *(dim.words(word) for dim, word in zip(dims, own, strict=True))])

    def own(shape) -> list[str]:
        return [
            f"r{d.index}" if size == d.size else "1" for d, size in zip(dims, shape, strict=True)
        ]

    rows = [f"r{d.index}" for d in dims]
    slots = {"dy": slot(rows)}
    for key, x in operands.items():
        mask = [*rows[:-1], f"ceil({rows[-1]}/8)"]
        slots[key] = slot(mask) if bits else f"~{slot(own(x.shape))}"
    for key, t in needed.items():
        partial = any(d.shards > 1 and t.shape[d.index] != d.size for d in dims)
        slots[key] = f"{slot(own(t.shape))} :{'acc' if partial else t.dtype}"
    if any(t.shape != dy.shape for t in needed.values()):
        largest = max((d for d in dims if d.whole), key=lambda d: _within(d))
        parts = list(rows)
        parts[largest.index] = f"ceil(r{largest.index}/{_WORKSPACE})"
        slots["workspace"] = slot(parts)
    views = {key: _view(x, dims) for key, x in {"dy": dy, **operands}.items()}
    result = without_large_copies(kernel.with_dimensions(**slots).of(**views, **attributes))()
    return tuple(
        None if t is None else _back(getattr(result, key), t, dims) for key, t in targets.items()
    )


def backward_of(kernel: Kernel, *names: str):
    """The ``backward`` of an op whose residuals are its operands, by their names in the kernel."""

    def backward(residuals, cts, needs_grad, **attributes):
        types = [jax.typeof(x) if n else None for x, n in zip(residuals, needs_grad, strict=True)]
        targets = {f"d{name}": t for name, t in zip(names, types, strict=True)}
        operands = dict(zip(names, residuals, strict=True))
        return pull_back(kernel, cts[0], operands, targets, **attributes)

    return backward


def _within(dim: _Dimension) -> int:
    return dim.size // dim.shards if isinstance(dim.size, int) else 1 << 40


def _view(x, dims: Sequence[_Dimension]):
    """``x`` with the dimensions that may be sharded split."""
    if all(d.shards == 1 for d in dims):
        return x
    own = spec_of(x)
    shape: list[Any] = []
    spec: list[Any] = []
    for d, size, axis in zip(dims, x.shape, own or (None,) * x.ndim, strict=True):
        if d.shards == 1:
            shape, spec = [*shape, size], [*spec, axis]
        else:
            split = (d.shards, size // d.shards) if size == d.size else (1, 1)
            shape, spec = [*shape, *split], [*spec, axis, None]
    return reshape(x, tuple(shape), own and tuple(spec))


def _back(g, target, dims: Sequence[_Dimension]):
    """A gradient with the shape and sharding of ``target``, from its partial sums."""
    own, at = spec_of(g), 0
    summed: list[int] = []
    spec: list[Any] = []
    for d in dims:
        partial = d.shards > 1 and target.shape[d.index] != d.size
        summed += [at] * partial
        spec.append(own[at + partial] if own else None)
        at += len(d.sizes)
    g = g.sum(tuple(summed)) if summed else g
    if g.shape != target.shape:
        g = reshape(g, target.shape, own and tuple(spec))
    due = explicit_spec(target.sharding, g.ndim)
    if due is not None and spec_of(g) != due:
        g = jax.sharding.reshard(g, target.sharding)
    return g


def features_of(shapes, dtype) -> dict[str, int]:
    """The features of an element-wise op on operands with these shapes. ``dtype`` is the result's.

    Adjacent dimensions in which the same operands are broadcast count as one. Then ``groups`` is
    the number of dimensions, and a row is the last one.
    """
    result = jnp.broadcast_shapes(*shapes)
    broadcast = is_broadcast(shapes)
    shapes = [(1,) * (len(result) - len(shape)) + tuple(shape) for shape in shapes]
    shapes = [shape for shape in shapes if any(n != 1 for n in shape)]
    row, groups, last = [], 0, None
    for d in reversed(range(len(result))):
        kept = tuple(shape[d] == result[d] for shape in shapes)
        if result[d] == 1 or not shapes:
            continue
        if kept != last:
            groups, last = groups + 1, kept
        if groups == 1:
            row.append(result[d])
    return dict(row_features(row, dtype), groups=groups, broadcast=broadcast)


def is_broadcast(shapes) -> bool:
    """Whether one of the shapes is broadcast, and has more than one element."""
    result = jnp.broadcast_shapes(*shapes)
    return any(tuple(s) != tuple(result) and any(n != 1 for n in s) for s in shapes)
