"""Keeps what is replaced in a program, for programs that are equal.

A function is traced again for a step, under another ``jax.jit`` or in a report, and the bodies of
its layers are equal programs. What is kept has no array, function or equation of a program.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jax_fastops.autofuse import _decisions
from jax_fastops.autofuse._graph import Graph
from jax_fastops.autofuse._pattern import PATTERNS
from jax_fastops.autofuse._rule import Call, Rewrite
from jax_fastops.autofuse._value import NO_EQUATION, Value

_probe = jax.jit(lambda: 0)


class _One(NamedTuple):
    """A rewrite, with values by their places. A result that the program lacks has none."""

    name: str
    results: tuple[int, ...]
    reads: tuple[int, ...]
    call: Call
    fanout: bool
    chosen: Any


class Kept(NamedTuple):
    """What is replaced in a program, and the programs of the calls."""

    ones: tuple[_One, ...]
    programs: dict[tuple, Any]

    def rewrites(self, graph: Graph) -> Iterable[tuple[Rewrite, Any]]:
        """The rewrites in an equal program, each with what its region takes."""
        for name, results, reads, call, fanout, chosen in self.ones:
            made = [Value(None) if i < 0 else graph.values[i] for i in results]
            read = [graph.values[i] for i in reads]
            yield Rewrite(name, made, read, call, frozenset(), fanout), chosen


_kept: dict[tuple, Kept] = {}


def key_of(graph: Graph, *options: Any) -> tuple | None:
    """What a search depends on, or ``None`` if it may depend on more."""
    if graph.key is None:
        return None
    # JAX keeps one program of the probe for each context: settings, meshes, axes, our contexts.
    context = _probe.trace().jaxpr
    return context, *options, len(PATTERNS), *_decisions.state(), graph.key


def found(key: tuple | None) -> Kept | None:
    """What was kept for a program."""
    return _kept.get(key) if key is not None else None


def keep(
    key: tuple, graph: Graph, rewrites: Iterable[tuple[Rewrite, Any]], programs: dict[tuple, Any]
) -> None:
    """Keeps what is replaced, unless a rule has read the elements of an array."""
    if any(v.is_read and v.size > 1 for v in graph.constants):
        return
    ones = []
    for rewrite, chosen in rewrites:
        reads, results = (tuple([v.place for v in x]) for x in (rewrite.reads, rewrite.results))
        absent = [v for v in rewrite.results if v.node is NO_EQUATION]
        if -1 in reads or results.count(-1) > len(absent):
            return
        ones.append(_One(rewrite.name, results, reads, rewrite.call, rewrite.fanout, chosen))
    if len(_kept) >= 256:
        _kept.clear()
    _kept[key] = Kept(tuple(ones), programs)


def clear() -> None:
    """Forgets all programs."""
    _kept.clear()
