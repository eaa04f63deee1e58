"""Group norm and instance norm, with a sum before them and an activation after them.

A program has the channels in one dimension, and the groups and their channels in two. Positions may
be one dimension or several. All these are reshapes of the *layout* ``[n, o, g, k, i]``: samples;
positions before the channels; groups and their channels; positions after the channels. So the rule
reads the values of a program in these five dimensions, and compares them with patterns.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Container, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jax_fastops import _compat
from jax_fastops._activations import ACTIVATIONS
from jax_fastops._settings import fixed
from jax_fastops.autofuse._graph import Graph
from jax_fastops.autofuse._match import Matcher, State
from jax_fastops.autofuse._meaning import FUSIBLE
from jax_fastops.autofuse._pattern import MAX_RANK, PATTERNS, Compiler, Formula, Pattern, formulas
from jax_fastops.autofuse._pattern_rule import kinds_of, operations_of
from jax_fastops.autofuse._patterns import FORMS, absences, affine, moments
from jax_fastops.autofuse._rule import ROW, Miss, Read, Rewrite, Rule, visible
from jax_fastops.autofuse._value import USED, Node, Value, View
from jax_fastops.group_norm import group_norm

# ---- patterns ------------------------------------------------------------------------------------

_AXES, _CHANNELS = (1, 3, 4), (2, 3)  # of the statistics, of scale and bias
_SIZES = 101, 103, 107, 109, 113  # no constant of a pattern is a product of these


def _pattern(absent: dict[str, float], form: str, order: str) -> Pattern:
    def function(x, scale, bias, eps):
        mean, var = moments(x, _AXES, form)
        if order == "repeated":  # for each channel, as in Flax
            var = jnp.broadcast_to(var, (*var.shape[:3], *x.shape[3:4], 1))
        return affine(x, mean, lax.rsqrt(var + eps), scale, bias, order)

    return Pattern("group_norm", function, ("x", "scale", "bias", "eps"), group_norm, fixed=absent)


_PATTERNS = [
    _pattern(absent, form, order)
    for absent in absences("scale", "bias")
    for form in FORMS
    for order in ("in", "repeated", "out")
]


@functools.cache
def _formula(pattern: Pattern, layout: tuple[int, ...], dtype: Any, x64: bool) -> Formula:
    """The formula of a pattern. For a result of float64, no number is rounded to float32."""
    shape = [size if given != 1 else 1 for size, given in zip(_SIZES, layout, strict=True)]
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    x, row, eps = (jax.ShapeDtypeStruct(s, wide) for s in (shape, (1, 1, *shape[2:4], 1), ()))
    with fixed(x64):
        traced = jax.make_jaxpr(pattern.function)(x, row, row, eps)
        graph = Graph(traced.jaxpr, traced.consts, is_pattern=True)
        count, n = (math.prod(sizes[axis] for axis in _AXES) for sizes in (shape, layout))
        return Compiler(graph, pattern, count, n)(graph.results[0])


# ---- layouts -------------------------------------------------------------------------------------

_Dims = tuple[int, ...]  # those of a layout that an array has


def _layouts(value: Value, total: Node) -> Iterator[tuple[int, ...]]:
    """The layouts for which a sum may be that of a group norm whose result is a value.

    Norms over the last axis, and those over all axes but one, have other ops.
    """
    operand, size = total.inputs[0], value.size
    # A dimension ends where the product of the sizes up to it does.
    ends, cuts = (list(itertools.accumulate(v.shape, operator.mul)) for v in (value, operand))
    parts = sorted({1, *ends, *cuts})
    if any(b % a for a, b in itertools.pairwise(parts)):
        return
    is_summed = [bisect.bisect_left(cuts, end) in total.params["axes"] for end in parts[1:]]
    runs = [  # of parts that are summed, and that are not
        (summed, [end for _, end in run])
        for summed, run in itertools.groupby(zip(is_summed, parts[1:], strict=True), lambda p: p[0])
    ]
    kept = [1] if runs[0][0] else [1, *runs.pop(0)[1]]
    n, summed = kept[-1], [summed for summed, _ in runs]
    if summed in ([True, False], [True, False, True]):
        o, g = (run[-1] for _, run in runs[:2])
        if n > 1 or g not in ends:
            yield n, o // n, g // o, size // g, 1
    elif summed == [True] and n > 1:
        first, last = min(e for e in ends if e > n), max(e for e in (1, *ends) if e < size)
        if n not in ends:  # it divides the channels
            yield kept[-2], 1, n // kept[-2], first // n, size // first
        elif last > n:
            if kept[-2] > 1:
                yield kept[-2], 1, n // kept[-2], 1, size // n
            yield n, last // n, 1, size // last, 1
            yield n, 1, 1, first // n, size // first


class _Reader:
    """Reads a value, and those before it, in the dimensions of a layout.

    What cannot be read so is as an operand of the program. ``origin`` has the value of the program
    for each one that is read.
    """

    def __init__(self, layout: tuple[int, ...], before: Container[Value]):
        self.layout, self._before = layout, before
        self.dims: _Dims = tuple(d for d, size in enumerate(layout) if size != 1)
        self.origin: dict[Value, Value] = {}
        self._read: dict[tuple[Value, _Dims], Value] = {}

    def __call__(self, value: Value, dims: _Dims) -> Value:
        if value.number is not None:
            return value
        if (value, dims) not in self._read:
            shape = tuple(size if d in dims else 1 for d, size in enumerate(self.layout))
            node = self._node(value, dims) if value in self._before else None
            read = Value(jax.core.ShapedArray(shape, value.dtype), node)
            read.number = None
            if node is not None:
                node.outputs = [read]
            self._read[value, dims], self.origin[read] = read, value
        return self._read[value, dims]

    def _node(self, value: Value, dims: _Dims) -> Node | None:
        node, (x, *_) = value.node, (*value.node.inputs, value)
        name, params = node.name, node.params
        given: Sequence[_Dims | None] = [dims]
        if name == "reduce_sum":
            kept = [i for i in range(len(x.shape)) if i not in params["axes"]]
            if x.size != math.prod(self.layout) or self._part(x.shape, kept, self.dims) != dims:
                return None
            given, params = [self.dims], {"axes": tuple(d for d in self.dims if d not in dims)}
        elif name == "broadcast_in_dim":
            places = zip(params["broadcast_dimensions"], x.shape, strict=True)
            given = [self._part(value.shape, [i for i, size in places if size != 1], dims)]
            params = {"broadcast_dimensions": tuple(range(len(self.layout)))}
        elif name in ("reshape", "squeeze", "expand_dims"):
            name, params = "reshape", {}
        elif name in FUSIBLE:
            long = ([i for i, size in enumerate(v.shape) if size != 1] for v in node.inputs)
            given = [self._part(value.shape, own, dims) for own in long]
        else:
            return None
        if None in given:
            return None
        inputs = [self(v, d or ()) for v, d in zip(node.inputs, given, strict=True)]
        read = Node(node.equation, inputs, node.callers)
        read.name, read.params = name, params
        return read

    def _part(self, shape: Sequence[int], present: Container[int], dims: _Dims) -> _Dims | None:
        """Those of ``dims`` that an array has with the dimensions ``present`` of a shape."""
        own, other = [i for i, size in enumerate(shape) if size != 1], list(dims)
        found: _Dims = ()
        while own:
            left, right = [own.pop(0)], [other.pop(0)]
            while (a := math.prod(shape[i] for i in left)) != (
                b := math.prod(self.layout[d] for d in right)
            ):
                (left if a < b else right).append((own if a < b else other).pop(0))
            there = {i in present for i in left}
            if len(there) > 1:
                return None
            found += tuple(right) * there.pop()
        return found


# ---- the rule ------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    """A norm of a program: result, operands and number, the values between them, views of ``x``."""

    root: Value
    layout: tuple[int, ...]
    operands: dict[str, Value]
    eps: float
    inner: frozenset[Value]
    views: frozenset[Value]


class GroupNormRule(Rule):
    """``group_norm``."""

    # What is no norm, by the structures of values.
    without: ClassVar[set[tuple]] = set()

    def __init__(self, search):
        super().__init__(search)
        self._left: set[Value] = set()  # of norms that take no kernel

    def match(self, value: Value) -> Rewrite | None:
        if not (value.is_array and value.is_plain) or value.size < 2 or value in self._left:
            return None
        if len(value.long) > MAX_RANK or value.view(False) is not None:
            return None
        source = value.source(narrowing=True).value
        before, rank = source.before, len(value.long)
        sums = (v.node for v in before if v.node.name == "reduce_sum")
        sums = [s for s in sums if s.inputs[0].is_static and s.inputs[0].size == value.size]
        sums = {(s.inputs[0].shape, str(s.params["axes"])): s for s in sums}.values()
        layouts = list(itertools.chain(*(_layouts(value, s) for s in sums)))
        if not layouts or "root" not in operations_of(before):
            return None
        key = visible(value.aval), value.dtype, _compat.x64_is_on(), source.structure
        if source.is_closed and key in self.without and not self.search.thorough:
            return None
        for pattern in (p for p in PATTERNS if p.name in ACTIVATIONS):
            (formula,) = formulas(pattern, value.dtype, rank, rank - 1)
            if formula.kind in kinds_of(source) and (state := Matcher()(formula, value)):
                inner = state.leaves[0]
                if inner.is_whole and visible(inner.value.aval) == visible(value.aval):
                    norm = self._norm(inner.value, {inner.value, *before}, layouts)
                    if norm is not None:
                        return self._rewrite(value, norm, pattern.name, state.inner)
        norm = self._norm(value, {value, *before}, layouts)
        if norm is not None:
            return self._rewrite(value, norm)
        if source.is_closed:
            if len(self.without) > 10_000:
                self.without.clear()
            self.without.add(key)
        return None

    def _norm(
        self, value: Value, before: Container[Value], layouts: Sequence[tuple[int, ...]]
    ) -> _Norm | None:
        """The group norm whose result is a value."""
        nearest: tuple[float, Miss | None] = 0.7, None
        for layout in layouts:
            reader = _Reader(layout, before)
            root = reader(value, reader.dims)
            kinds = kinds_of(root.source(narrowing=True).value)
            for pattern in _PATTERNS:
                formula = _formula(pattern, layout, value.dtype, _compat.x64_is_on())
                matcher = Matcher()
                state = matcher(formula, root) if formula.kind in kinds else None
                if state is not None and (norm := _found(pattern, value, reader, state)):
                    return norm
                seen = frozenset(reader.origin.get(v, v) for v in matcher.seen)
                names, part = {v.node.name for v in seen}, len(seen) / (1 + formula.size)
                if state is None and part > nearest[0] and formula.needs - {"root"} <= names:
                    at = reader.origin.get(matcher.stopped or root, value)
                    reason = "the formula differs from here on"
                    nearest = part, Miss(pattern.name, at, reason, seen=seen)
        if nearest[1] is not None and nearest[1].seen.isdisjoint(self._left):
            self.search.misses.append(nearest[1])
        return None

    def _rewrite(
        self, value: Value, norm: _Norm, activation: str | None = None, passed: Sequence[Value] = ()
    ) -> Rewrite | None:
        """The rewrite, if nothing else needs what it replaces and the kernel takes the call."""
        name = "group_norm" if activation is None else f"group_norm + {activation}"
        x, inner = norm.operands["x"], norm.inner | {*passed}
        nodes = {v.node for v in inner} | {value.node}
        misses = self.search.misses  # without what is nearly this norm
        misses[:] = [m for m in misses if m.name != "group_norm" or m.seen.isdisjoint(norm.inner)]
        for v in inner:
            if v.is_narrower_than(value.dtype):
                reason = f"{v.dtype} is narrower than the result's {value.dtype}"
                return self.miss(name, v, reason, is_part=True)
            if v is not value and v.size >= value.size and v.is_used_outside(nodes):
                return self.miss(name, v, USED, is_part=activation is not None)
        if x.dtype != value.dtype and x.dtype.itemsize >= value.dtype.itemsize:
            return self.miss(name, norm.root, "an operand has another shape or dtype")
        n, o, g, k, i = norm.layout
        shape, axis = (n, o, g * k, i), 2
        own = value.shape  # which has the shardings of the program
        for at in range(1, len(own)):
            if (own[0], math.prod(own[1:at]), own[at], math.prod(own[at + 1 :])) == shape:
                shape, axis = own, at
                break
        view = Read(shape, value.dtype)
        reads = {leaf: (v, view if v is x else ROW) for leaf, v in norm.operands.items()}
        options = dict(num_groups=g, axis=axis, eps=norm.eps, activation=activation)
        calls = [(name, reads)]
        if x.dtype == value.dtype and (parts := _summands(norm, nodes)):
            both = {leaf: (v, view) for leaf, v in zip(("x", "residual"), parts, strict=True)}
            calls.insert(0, (f"add + {name}", reads | both))
        found: Rewrite | str = ""
        for longer, operands in calls:
            found = self.search.rewrite(longer, group_norm, [value], operands, options, inner)
            if isinstance(found, Rewrite):
                return found
        self._left |= norm.inner
        return self.miss(name, norm.root, found)


def _found(pattern: Pattern, root: Value, reader: _Reader, state: State) -> _Norm | None:
    """A match as a norm, if the operands have the dimensions of one."""
    operands = {}
    for place, leaf in enumerate(("x", "scale", "bias")):
        if leaf not in pattern.fixed:
            view: View = state.leaves[place]
            own = tuple(d for d in reader.dims if leaf == "x" or d in _CHANNELS)
            if not view.is_whole or view.value.long != own or not view.value.is_floating:
                return None
            operands[leaf] = reader.origin[view.value]
    inner = frozenset(reader.origin.get(v, v) for v in state.inner)
    x = state.leaves[0].value
    views = frozenset(of for v, of in reader.origin.items() if v.source().value is x)
    return _Norm(root, reader.layout, operands, state.free[3], inner, views)


def _summands(norm: _Norm, nodes: set[Node]) -> Sequence[Value]:
    """The two arrays whose sum is normalized, if nothing else needs the sum."""
    x, nodes = norm.operands["x"], nodes | {v.node for v in norm.views}
    parts = x.node.inputs if x.node.name in ("add", "add_any") else ()
    same = all(v.source().is_whole and visible(v.aval) == visible(x.aval) for v in parts)
    return parts if same and not any(v.is_used_outside(nodes) for v in norm.views) else ()
