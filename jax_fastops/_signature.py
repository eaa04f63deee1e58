"""Signature strings, which determine an op's shapes, dtypes, batching and sharding.

A signature reads like einops: ``"... n, h -> ... n, ... ceil(n/8) :uint8, h :1"``.

* Operands are left of ``->`` and results right of it, separated by commas.
* ``...`` is any number of leading *batch* dimensions: the op treats every index into them
  independently. All operands and results with ``...`` share these dimensions.
* ``~...`` stands for the batch dimensions of an operand that may be broadcast. There are as many
  of them as in ``...``. Where a size differs from that of ``...``, the op reads index 0 for every
  index. The operand is not expanded to the shape of the others. Its dimensions with a star may
  differ in the same way. If no operand has ``...``, then ``...`` is the NumPy broadcast of all
  ``~...``, and each dimension with a star is broadcast, too.
* A name (``n``) is a dimension. The same name has the same size everywhere.
* A name with a star (``*s``) is an independent dimension, like those of ``...``, but at any
  position. Every slot with ``...`` has it.
* ``ceil(n/8)``, ``ceil(n*m/8)`` and ``n-4`` are sizes computed from names. A number is a fixed
  size. ``n=4`` is a name with a fixed size.
* A result may have a dtype after a colon: a dtype (``:uint8``), the index of the operand whose
  dtype it has (``:1``), or ``:acc``, the accumulator of the first operand (float64 for float64,
  float32 for the narrower types). Without a colon, it has the dtype of the first operand.

In the declaration of a kernel, every operand and result has a name, directly followed by a colon:
``"x: ... n, scale?: n :acc? -> y: ... n, rstd?: ... :acc"``. One whose name ends in a question mark
is optional. Operands have a dtype in the same notation, which a call must match. ``:acc?`` is the
dtype of the first operand or its accumulator.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_CEIL = re.compile(r"^ceil\(([A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*)/(\d+)\)$")
_FIXED = re.compile(r"^([A-Za-z_]\w*)=(\d+)$")
_SLOT_NAME = re.compile(r"^\s*([A-Za-z_]\w*)(\??):")
_SHIFT = re.compile(r"^([A-Za-z_]\w*)([+-]\d+)$")
_NAME = re.compile(r"^[A-Za-z_]\w*$")


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension after ``...``: a name, ``ceil(name/divisor)``, ``name+offset``, or a fixed size.

    Only in ``ceil`` may the name be a product of several names.
    """

    name: str | None
    divisor: int = 1
    offset: int = 0
    size: int | None = None  # fixed; with or without a name
    free: bool = False  # with a star

    @classmethod
    def parse(cls, text: str) -> Dim:
        if text.startswith("*") and _NAME.match(text[1:]):
            return cls(text[1:], free=True)
        if text.isdigit():
            return cls(None, size=int(text))
        if match := _FIXED.match(text):
            return cls(match[1], size=int(match[2]))
        if match := _CEIL.match(text):
            return cls(match[1], divisor=int(match[2]))
        if match := _SHIFT.match(text):
            return cls(match[1], offset=int(match[2]))
        if _NAME.match(text):
            return cls(text)
        raise ValueError(f"cannot read dimension {text!r} in a signature")

    def resolve(self, sizes: dict[str, Any]) -> Any:
        if self.size is not None:
            return self.size
        if self.divisor == 1:
            return sizes[self.name] + self.offset
        whole = math.prod(sizes[name] for name in self.names)
        return (whole + self.divisor - 1) // self.divisor

    def __str__(self) -> str:
        if self.name is None:
            return str(self.size)
        if self.divisor != 1:
            return f"ceil({self.name}/{self.divisor})"
        if self.size is not None:
            return f"{self.name}={self.size}"
        if self.offset:
            return f"{self.name}{self.offset:+d}"
        return f"*{self.name}" if self.free else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names from which the dimension is derived."""
        return () if self.name is None else tuple(self.name.split("*"))

    @property
    def plain(self) -> bool:
        """Whether the dimension is just a name, and so determines the size of that name."""
        return self.name is not None and self.divisor == 1 and self.offset == 0


@dataclasses.dataclass(frozen=True)
class Slot:
    """One operand or result: batch dimensions or not, its own dimensions, a dtype rule.

    Those of a kernel have a name.
    """

    batched: bool
    dims: tuple[Dim, ...]
    dtype: str | int | None = None
    broadcast: bool = False  # with "~...": broadcast along batch dimensions of size 1
    like: int | None = None  # the operand with "~..." whose shape and sharding a result has
    name: str | None = None
    optional: bool = False

    @classmethod
    def parse(cls, text: str) -> Slot:
        name = _SLOT_NAME.match(text)
        dims, _, dtype = text[name.end() if name else 0 :].partition(":")
        words = dims.split()
        broadcast = bool(words) and words[0] == "~..."
        batched = broadcast or (bool(words) and words[0] == "...")
        rule: str | int | None = dtype.strip() or None
        if isinstance(rule, str) and rule.isdigit():
            rule = int(rule)
        slot = cls(batched, tuple(Dim.parse(w) for w in words[batched:]), rule, broadcast)
        return dataclasses.replace(slot, name=name[1], optional=bool(name[2])) if name else slot

    @property
    def free(self) -> tuple[str, ...]:
        """The names with a star, in order."""
        return tuple(d.name for d in self.dims if d.free)

    @property
    def own(self) -> tuple[Dim, ...]:
        """The dimensions that the op does not treat independently."""
        return tuple(d for d in self.dims if not d.free)

    def __str__(self) -> str:
        lead = [f"{self.name}{'?' * self.optional}:"] if self.name else []
        lead += ["~..." if self.broadcast else "..."] if self.batched else []
        words = lead + [str(d) for d in self.dims]
        return " ".join(words + ([f":{self.dtype}"] if self.dtype is not None else []))

    def accepts(self, dtype, first) -> bool:
        """Whether an operand may have a dtype, if the first operand has the dtype ``first``."""
        if self.dtype is None:
            return dtype == first
        if self.dtype in ("acc", "acc?"):
            narrow = self.dtype == "acc?" and dtype == first
            return narrow or dtype == accumulator_dtype(first)
        return dtype == jnp.dtype(self.dtype)


def accumulator_dtype(dtype) -> np.dtype:
    """The dtype of sums and statistics of ``dtype`` data."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype("float64") if dtype == jnp.float64 else jnp.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A signature applied to shapes: the batch shape and the size of every named dimension."""

    batch: tuple
    sizes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Signature:
    """A parsed signature. Hashable, so that it can be a parameter of a primitive."""

    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]
    batch: tuple | None = None  # the batch shape, if operands with copies do not determine it

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Signature:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"signature {text!r} has no '->'")
        return cls(parse_slots(left), parse_slots(right))

    def __post_init__(self):
        stars = {frozenset(s.free) if s.batched else None for s in self.operands + self.results}
        if len(stars - {None}) > 1:
            raise ValueError(f"the slots of '{self}' with '...' have different names with a star")
        if any(s.free for s in self.operands + self.results if not s.batched):
            raise ValueError(f"a slot of '{self}' has a name with a star but no '...'")
        if any(s.broadcast and s.like is None for s in self.results):
            raise ValueError(f"a result of '{self}' has '~...'")

    @property
    def free(self) -> tuple[str, ...]:
        """The names with a star, in the order of the first result that has them."""
        return next((s.free for s in self.results + self.operands if s.free), ())

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.operands, self.results))
        return " -> ".join(sides)

    def bind(self, shapes: Sequence[Sequence]) -> Bound:
        """Binds the operands to ``shapes``. Raises ``ValueError`` if they are inconsistent."""
        if len(shapes) != len(self.operands):
            raise ValueError(f"'{self}' takes {len(self.operands)} operands, got {len(shapes)}")
        batch: tuple | None = self.batch
        sizes: dict[str, Any] = {}
        if batch is None and self.only_broadcast:
            batch, sizes = self._broadcast(shapes)
        for slot, shape in zip(self.operands, shapes, strict=True):
            n_batch = len(shape) - len(slot.dims)
            if n_batch < 0 or (n_batch and not slot.batched):
                raise ValueError(f"shape {tuple(shape)} does not fit '{slot}' of '{self}'")
            if slot.batched and not slot.broadcast:
                head = tuple(shape[:n_batch])
                if batch is not None and head != batch:
                    raise ValueError(f"leading dimensions {head} and {batch} differ in '{self}'")
                batch = head
            for dim, size in zip(slot.dims, shape[n_batch:], strict=True):
                if dim.plain and not (slot.broadcast and dim.free):
                    if sizes.setdefault(dim.name, size) != size:
                        other = sizes[dim.name]
                        raise ValueError(
                            f"dimension '{dim.name}' of '{self}' is both {other} and {size}"
                        )
        # Derived sizes are checked now that all names are known.
        for slot, shape in zip(self.operands, shapes, strict=True):
            n_batch = len(shape) - len(slot.dims)
            if slot.broadcast and n_batch != len(batch or ()):
                raise ValueError(
                    f"shape {tuple(shape)} does not have the rank of '...' in '{self}'"
                )
            for dim, size in zip(slot.dims, shape[n_batch:], strict=True):
                known = sizes.keys() >= set(dim.names) and not (slot.broadcast and dim.free)
                if known and dim.resolve(sizes) != size:
                    raise ValueError(f"dimension '{dim}' of '{self}' cannot be {size}")
        return Bound(batch or (), sizes)

    @property
    def only_broadcast(self) -> bool:
        """Whether ``...`` is the shape to which the operands with ``~...`` broadcast."""
        batched = [slot for slot in self.operands if slot.batched]
        return bool(batched) and all(slot.broadcast for slot in batched)

    def _broadcast(self, shapes: Sequence[Sequence]) -> tuple[tuple, dict[str, Any]]:
        """The batch shape and the starred sizes of operands that all have ``~...``."""
        heads, stars = [], {name: [] for name in self.free}
        for slot, shape in zip(self.operands, shapes, strict=True):
            n_batch = len(shape) - len(slot.dims)
            if slot.broadcast and n_batch >= 0:
                heads.append(tuple(shape[:n_batch]))
                for dim, size in zip(slot.dims, shape[n_batch:], strict=True):
                    if dim.free:
                        stars[dim.name].append((size,))
        if len({len(head) for head in heads}) > 1:
            raise ValueError(f"leading dimensions {heads[0]} and {heads[-1]} differ in '{self}'")
        try:
            batch = jnp.broadcast_shapes(*heads)
            sizes = {name: jnp.broadcast_shapes(*found)[0] for name, found in stars.items()}
        except ValueError:
            shapes = " and ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"shapes {shapes} do not broadcast in '{self}'") from None
        return tuple(batch), sizes

    def infer(self, shapes: Sequence[Sequence], dtypes: Sequence) -> list[tuple[tuple, np.dtype]]:
        """The shape and dtype of every result."""
        bound = self.bind(shapes)
        results = []
        for slot in self.results:
            if slot.like is not None:
                results.append((tuple(shapes[slot.like]), _dtype(slot, dtypes)))
                continue
            try:
                own = tuple(dim.resolve(bound.sizes) for dim in slot.dims)
            except KeyError as missing:
                raise ValueError(f"no operand of '{self}' has dimension {missing}") from None
            results.append(((bound.batch if slot.batched else ()) + own, _dtype(slot, dtypes)))
        return results

    def folds(self, mapped: Sequence[bool]) -> bool:
        """Whether a mapped axis of the flagged operands can become one more batch dimension."""
        only_batched = all(s.batched for s, m in zip(self.operands, mapped, strict=True) if m)
        return only_batched and all(s.batched for s in self.results)

    def of(self, present: set[str], sizes: dict[str, int]) -> Signature:
        """The same signature with the buffers that are present, and with these fixed sizes."""

        def fix(dim: Dim) -> Dim:
            fixed = dim.plain and dim.name in sizes
            return dataclasses.replace(dim, size=int(sizes[dim.name])) if fixed else dim

        def chosen(slots):
            for slot in slots:
                if slot.name in present:
                    yield dataclasses.replace(slot, dims=tuple(map(fix, slot.dims)), optional=False)
                elif not slot.optional:
                    raise TypeError(f"'{slot.name}' of '{self}' is needed")

        return Signature(tuple(chosen(self.operands)), tuple(chosen(self.results)))

    def with_sizes(self, sizes: dict[str, int]) -> Signature:
        """The same signature with names that no operand determines replaced by their sizes."""
        known = {d.name for s in self.operands for d in s.dims if d.plain}

        def fixed(dim: Dim) -> Dim:
            if known.issuperset(dim.names):
                return dim
            if dim.free:
                raise ValueError(f"no operand has the dimension '{dim}'")
            return Dim(None, size=dim.resolve(sizes))

        def fix(slot: Slot) -> Slot:
            return dataclasses.replace(slot, dims=tuple(map(fixed, slot.dims)))

        operands, results = tuple(map(fix, self.operands)), tuple(map(fix, self.results))
        return dataclasses.replace(self, operands=operands, results=results)


def _dtype(slot: Slot, dtypes: Sequence) -> np.dtype:
    if slot.dtype is None:
        return jnp.dtype(dtypes[0])
    if isinstance(slot.dtype, int):
        return jnp.dtype(dtypes[slot.dtype])
    return accumulator_dtype(dtypes[0]) if slot.dtype == "acc" else jnp.dtype(slot.dtype)


def parse_slots(text: str) -> tuple[Slot, ...]:
    """Parse one side of a signature; the empty string has no slots."""
    return tuple(Slot.parse(part) for part in text.split(",")) if text.strip() else ()
