"""Sums over rows that may be sharded: kernels write partial sums, and XLA adds them up.

XLA partitions a custom call over leading dimensions, so every shard has whole groups of rows, and a
kernel writes partial sums for each group. The sum of these reduces over devices, too.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType

from jax_fastops._kernel import partitions
from jax_fastops._views import parts_of, reshape, spec_of


def shards_of(length, axis, sharding, shortest: int) -> int:
    """The number of equal shards into which a dimension is cut, or may be cut.

    ``axis`` is the dimension's entry in the partition spec, if that is part of the type. With Auto
    mesh axes the sharding is unknown while tracing: there may be as many shards as devices, as far
    as none is shorter than ``shortest``.
    """
    mesh = sharding.mesh
    known = parts_of(axis, sharding)
    explicit = not mesh.empty and AxisType.Explicit in mesh.axis_types
    if (explicit and AxisType.Auto not in mesh.axis_types) or not isinstance(length, int):
        return known
    rest = length // known
    most = math.gcd(rest, partitions())
    fits = (n for n in range(1, most + 1) if most % n == 0 and (n == 1 or rest >= shortest * n))
    return known * max(fits)


class Groups:
    """Groups of the indices of the first ``count`` dimensions of ``x``, which are summed by group.

    ``lead`` are the dimensions of the groups. In a program for one device, there are none, for one
    group. In a program that XLA may partition, the dimensions stay, so that their shards stay
    whole, and the last of them becomes the number of its shards.
    """

    def __init__(self, x, count: int, whole: bool = False):
        """With ``whole``, each index is a group."""
        self._all, self._spec = tuple(x.shape[:count]), spec_of(x)
        if whole:
            self.lead = self._all
        elif not count or (self._spec is None and partitions() == 1):
            self.lead = ()
        else:
            axis = self._spec and self._spec[count - 1]
            last = shards_of(self._all[-1], axis, jax.typeof(x).sharding, 1)
            self.lead = (*self._all[:-1], last)

    @property
    def rows(self):
        """The number of indices in each group."""
        return self._all[-1] // self.lead[-1] if self.lead else math.prod(self._all)

    def spec(self, *own) -> tuple | None:
        """The partition spec of an array with the groups' dimensions and its own."""
        return None if self._spec is None else (*self._spec[: len(self.lead)], *own)

    def split(self, a, *own):
        """``a``, whose first dimensions are those of ``x``, as groups and dimensions ``own``."""
        return reshape(a, (*self.lead, *own), self.spec(*(None for _ in own)))


def total(sums):
    """The sum of the partial sums ``[..., n]``, or ``None`` if there are none."""
    return None if sums is None else sums.sum(tuple(range(sums.ndim - 1)))
