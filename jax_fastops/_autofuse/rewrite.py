"""Chooses the patterns to replace in a program, and evaluates it with the calls in their place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jax_fastops import _compat, _explain, _implementation
from jax_fastops._autofuse.drops import drop_at
from jax_fastops._autofuse.graph import Graph, Level, Value
from jax_fastops._autofuse.linear import Losses, Product, product_at, summed_at
from jax_fastops._autofuse.masks import masked
from jax_fastops._autofuse.match import (
    FUSIBLE,
    Bound,
    Map,
    Matcher,
    State,
    compose,
    constant,
    identity,
    near,
    operand_map,
    resolve,
    terms_of,
    with_row,
)
from jax_fastops._autofuse.moves import Move, joined, move_at
from jax_fastops._autofuse.patterns import MAX_RANK, Pattern, by_size, compiled, kind_of
from jax_fastops._dispatch import Refused, kernels_only

# ---- which patterns can be at a value ------------------------------------------------------------


def _kinds(value: Value) -> set[str]:
    """The kinds of formulas that a value may be the result of."""
    if value.node is None:
        return set()
    name = value.node.name
    if name in ("add", "add_any", "sub"):
        return {"Sum"}
    if name in ("mul", "div"):
        return {"Product"}
    if name == "neg":
        return {"Sum", "Product"} | _kinds(resolve(value.node.inputs[0], narrowing=True)[0])
    return {name}


# ---- one match -----------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Match:
    """A pattern in a program. ``call`` computes the ``results`` from the values that it reads."""

    pattern: Pattern
    before: str  # what it takes with its operand, as in "bias + "
    results: list[Value]
    reads: list[Value]
    call: Call
    inner: frozenset[Value]
    level: Level

    @property
    def root(self) -> Value:
        return self.results[0]


@dataclasses.dataclass(frozen=True)
class Miss:
    """A pattern that was found and not replaced, or of which a large part was found."""

    pattern: str
    value: Value
    reason: str


def line_of(value: Value) -> str:
    """The user's file and line that made a value, or called the function that made it."""
    if value.node is None:
        return ""
    line, level = _compat.source_line(value.node.equation), value.node.level
    while not line and level is not None and level.equation is not None:
        line, level = _compat.source_line(level.equation), level.parent
    return line


def _size(value: Value) -> int:
    return math.prod(value.shape)


@dataclasses.dataclass(frozen=True)
class Read:
    """What makes the operand of a call from a value: another shape, a dtype, a mask of numbers."""

    sizes: tuple
    dtype: Any = None
    counts: bool | None = None  # whether the elements that are not 0 count, or those that are
    order: tuple[int, ...] = ()  # of the value's long dimensions, if it is another one
    part: tuple[tuple[int, int], ...] = ()  # the range along each dimension, or all

    def __call__(self, x):
        x = lax.slice(x, *zip(*self.part, strict=True)) if self.part else x
        x = jnp.transpose(jnp.squeeze(x), self.order) if self.order else x
        x = jnp.reshape(x, self.sizes)
        if self.counts is not None:
            x = x if x.dtype == bool else x != 0
            return x if self.counts else ~x
        return x if self.dtype is None or x.dtype == self.dtype else x.astype(self.dtype)


_ROW = Read((-1,))


def _reader(bound: Bound, shape: Sequence[int], dtype, places: Sequence[int], counts=None):
    """The value to read for a leaf, and what makes an array of this shape of it.

    ``places`` are the dimensions of the leaf in the array. A broadcast dimension keeps size 1.
    """
    source, found = bound.source, bound.map
    own = tuple([i for i in found if i is not None])
    sizes = [1] * len(shape)
    for place, i in zip(places, found, strict=True):
        sizes[place] = 1 if i is None else source.sizes[i]
    order = () if own == identity(source) else own
    return source, Read(tuple(sizes), dtype, counts, order)


@dataclasses.dataclass(frozen=True)
class Call:
    """What replaces a pattern: an op of the operands that it reads. Equal calls do the same."""

    op: Callable
    axis: int
    names: tuple[str, ...]
    reads: tuple[Read, ...]
    numbers: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: Any

    def __call__(self, *values, fanout: bool = False) -> tuple:
        """All results. With ``fanout``, the first one is there twice."""
        given = [read(x) for read, x in zip(self.reads, values, strict=True)]
        leaves = {**dict(zip(self.names, given, strict=True)), **dict(self.numbers)}
        found = self.op({**leaves, "fanout": fanout}, self.axis)
        found = found if isinstance(found, tuple) else (found,)
        if fanout:  # with more results, the op gives a pair and these
            found = (*found[0], *found[1:]) if isinstance(found[0], tuple) else found
        same = [y.reshape(self.shape).astype(self.dtype) for y in found[: 1 + fanout]]
        return *same, *found[1 + fanout :]


def _same_kind(dtype, root) -> bool:
    return dtype == root or dtype.itemsize < root.itemsize


_ELSEWHERE = "its operands are in another function"
_DIFFERS = "the formula differs from here on"


class _Finder:
    """Finds the patterns of a graph. If it is thorough, it finds all that was nearly one."""

    def __init__(self, graph: Graph, dropout: bool, thorough: bool):
        self.graph, self.dropout, self.thorough = graph, dropout, thorough
        self.misses: list[Miss] = []
        self.programs = _Programs()
        # Values of patterns with reductions that stay: XLA fuses these, so no other pattern does.
        self._with_reductions: set[Value] = set()

    def find(self, value: Value) -> Match | None:
        """The match of the largest pattern whose result is this value."""
        if self.dropout and (drop := drop_at(value)) is not None:
            return self._dropped_softmax(drop) or self._moved(drop)
        if (move := move_at(value)) is not None:
            return self._moved(move)
        if (summed := summed_at(value)) is not None:
            return self._linear(value, self._formula(summed.each), summed)
        match = self._formula(value)
        return self._linear(value, match, Losses(value)) or match

    def _formula(self, value: Value) -> Match | None:
        """The match of the largest formula whose result is this value."""
        if not self._may_be_root(value):
            return None
        source = resolve(value, narrowing=True)[0]
        if source.node is None:
            return None
        around, key = near(source)
        key = value.shape, value.dtype, *key
        self._tried: list[tuple[float, Miss]] = []
        whole = []
        for pattern, axis in self._candidates(value, source, around, key):
            self._matched = False
            found = self._at(pattern, axis, value, around)
            if found is not None:
                self._remember(key, [(pattern, axis), *whole], False)
                return found
            if self._matched:
                whole.append((pattern, axis))
        if self._tried:
            self.misses.append(max(self._tried, key=lambda found: found[0])[1])
        self._remember(key, whole, True)
        return None

    _known: ClassVar[dict[tuple, tuple[list[tuple[Pattern, int]], bool]]] = {}

    def _remember(self, key: tuple, whole: list[tuple[Pattern, int]], all_tried: bool) -> None:
        """The patterns that are there after such operations, and whether there are no others."""
        if len(self._known) > 10_000:
            self._known.clear()
        self._known[key] = whole, all_tried

    def _candidates(self, value: Value, source: Value, around: set, key: tuple) -> Iterator[tuple]:
        """The patterns to try, with the axis."""
        known, all_tried = self._known.get(key, ((), False))
        if not (self.thorough and all_tried):
            yield from known
            if all_tried:
                return
        kinds = _kinds(source)
        for pattern in by_size():
            if pattern.kind in kinds and pattern.needs <= around:
                for axis in self._axes(pattern, value):
                    yield pattern, axis

    def _moved(self, move: Move) -> Match | None:
        """The match of a pattern that is no formula, if the kernel takes the call."""
        root, reads = move.results[0], list(move.reads.values())
        shapes = tuple(Read(v.shape) for v in reads)
        of = root.shape, root.dtype
        call = Call(move.op, move.axis, tuple(move.reads), shapes, move.numbers, *of)
        level, program = self._level(root, reads), self.programs(call, [_struct(v) for v in reads])
        if level is None or isinstance(program, str):
            self.misses.append(Miss(move.name, root, (level and program) or _ELSEWHERE))
            return None
        pattern = Pattern(move.name, move.op, tuple(move.reads), move.op)
        return Match(pattern, "", move.results, reads, call, frozenset(move.results), level)

    def _dropped_softmax(self, drop: Move) -> Match | None:
        """The match of a softmax and its dropout, if the softmax is used nowhere else."""
        (root,), (x, key) = drop.results, drop.reads.values()
        alone = len(x.users) == 1 and key.shape == ()
        match = self.find(x) if alone else None
        if match is None or not match.pattern.name.startswith("softmax"):
            return None
        inner = match.call
        names, reads = (*inner.names, "dropout_key"), (*inner.reads, Read(()))
        numbers = (*inner.numbers, ("dropout_rate", drop.rate))
        call = dataclasses.replace(inner, names=names, reads=reads, numbers=numbers)
        values = [*match.reads, key]
        level, program = self._level(root, values), self.programs(call, list(map(_struct, values)))
        if level is None or isinstance(program, str):
            return None
        pattern = dataclasses.replace(match.pattern, name=f"{match.pattern.name} + dropout")
        taken = match.inner | {root}
        return Match(pattern, match.before, [root], values, call, taken, level)

    def _linear(self, root: Value, match: Match | None, losses: Losses) -> Match | None:
        """The match of losses or their sum, if the logits are a product with no other use."""
        if match is None or match.pattern.linear is None:
            return None
        logits, shown, passed = resolve(match.reads[0])
        product, (read, of_labels) = product_at(logits, losses), match.call.reads
        sizes = tuple(d for d in read.sizes if d != 1)
        if read.order or sizes != logits.sizes or shown != identity(logits):
            return None
        between = {match.reads[0], logits, *passed, losses.each, *losses.between}
        if isinstance(product, Product):
            between.update(product.between)
            nodes = {v.node for v in match.inner | between}
            if any(self._used_outside(v, nodes) for v in between - {root}):
                product = "the value is used elsewhere"
        if not isinstance(product, Product):
            if product:
                self.misses.append(Miss("linear_cross_entropy", root, product))
            return None
        x, part, table, bias = product[:4]
        *tokens, features = (end - start for start, end in part)
        tokens, of_x = tuple(tokens), Read((*tokens, features), part=part)
        given = {"x": (x, of_x), "table": (table, Read(table.shape))}
        given["labels"] = match.reads[1], dataclasses.replace(of_labels, sizes=tokens)
        if bias is not None:
            given["bias"] = bias, _ROW
        if losses.where is not None:
            mask, keep = losses.where
            given["where"] = mask, Read(tokens, None, keep)
        values, reads = zip(*given.values(), strict=True)
        numbers = (*match.call.numbers, ("reduction", losses.reduction))
        numbers += tuple((name, getattr(product, name)) for name in ("transposed", "softcap"))
        op, of = match.pattern.linear, (root.shape, root.dtype)
        call = Call(op, 0, tuple(given), reads, numbers, *of)
        level, program = self._level(root, values), self.programs(call, list(map(_struct, values)))
        if level is None or isinstance(program, str):
            why = (level and program) or _ELSEWHERE
            self.misses.append(Miss("linear_cross_entropy", root, why))
            return None
        pattern = dataclasses.replace(match.pattern, name="linear_cross_entropy")
        return Match(pattern, "", [root], list(values), call, match.inner | between, level)

    def _may_be_root(self, value: Value) -> bool:
        node = value.node
        views = ("broadcast_in_dim", "reshape", "squeeze", "copy", "transpose")
        if node is None or node.name in views:
            return False
        floating = value.dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
        fixed = all(isinstance(d, int) for d in value.shape)
        return floating and fixed and not value.aval.weak_type and 0 not in value.shape

    def _axes(self, pattern: Pattern, value: Value) -> Sequence[int]:
        """Axes, as numbers of long dimensions. Those of a loss are of its logits."""
        rank = len(value.long)
        if rank < 2 and "batch_norm" in pattern.name:
            return []
        if pattern.axes == "none":
            return [rank - 1] if rank else []
        if "labels" in pattern.leaves:
            return [rank]
        if pattern.axes == "each":
            return range(rank)
        return [rank - 1] if value.long and value.long[-1] == len(value.shape) - 1 else []

    def _at(self, pattern: Pattern, axis: int, value: Value, around: set) -> Match | None:
        loss = "labels" in pattern.leaves
        sizes = value.sizes
        if loss:
            sizes = self._logits_of(value)
            if sizes is None:
                return None
        if len(sizes) > MAX_RANK:
            return None
        if not ("transpose" in around or pattern.reductions(len(sizes), axis) <= around):
            return None
        if value in self._with_reductions and not pattern.reductions(len(sizes), axis):
            self._matched = True  # here, and maybe elsewhere
            return None
        formulas = compiled(pattern, len(sizes), axis)
        n = pattern.count(sizes, axis)
        matcher = Matcher(value)
        state = matcher(formulas[0], n, value)
        if state is None:
            part = len(set(matcher.seen)) / (1 + formulas[0].size)
            # Sums and products that are nearly a lerp are everywhere.
            if part > 0.7 and formulas[0].size > 5 and pattern.needs:
                self._miss(pattern, matcher.stopped or value, _DIFFERS, min(part, 0.99))
            return None
        self._matched = True
        return self._checked(pattern, axis, value, state, formulas, n, sizes if loss else None)

    @staticmethod
    def _logits_of(value: Value) -> tuple | None:
        """The sizes of the array from which a loss for each token is computed."""
        seen, left = {value}, deque([value])
        while left and len(seen) < 40:
            found = left.popleft()
            if found.sizes[:-1] == value.sizes and len(found.long) == len(value.long) + 1:
                return found.sizes
            fresh = [v for v in (found.node.inputs if found.node else ()) if v not in seen]
            seen.update(fresh)
            left.extend(fresh)
        return None

    def _miss(self, pattern: Pattern, value: Value, reason: str, part: float = 1.0) -> None:
        """Notes how much of a pattern was found. A whole one is not replaced for other reasons."""
        self._tried.append((part, Miss(pattern.name, value, reason)))

    def _checked(
        self, pattern: Pattern, axis: int, root: Value, state: State, formulas, n: int, logits
    ) -> Match | None:
        """The match, if nothing else needs what it replaces and the kernel takes the call."""
        inner = frozenset(state.inner)
        for v in inner:
            if v.is_floating and v.dtype.itemsize < root.dtype.itemsize:
                self._miss(pattern, v, f"{v.dtype} is narrower than the result's {root.dtype}")
                return None
        nodes = {v.node for v in inner} | {root.node}
        outside = [v for v in inner if v is not root and self._used_outside(v, nodes)]
        more = self._other_results(state, formulas[1:], n, outside)
        for v in outside:
            if v not in more and _size(v) >= _size(root):
                self._miss(pattern, v, "the value is used elsewhere")
                return None
        leaves = self._leaves(pattern, axis, root, state, logits)
        if leaves is None:
            self._miss(pattern, root, "an operand has another shape or dtype", 0.99)
            return None
        refused = ""
        for before, results, reads, call in self._forms(pattern, axis, root, leaves, state, nodes):
            level = self._level(root, reads)
            if level is None:
                refused = refused or _ELSEWHERE
                continue
            results = [root, *more, *results]
            program = self.programs(call, [_struct(v) for v in reads])
            if not isinstance(program, str):
                return Match(pattern, before, results, reads, call, inner, level)
            refused = refused or program
        if pattern.reductions(len(root.sizes), axis):
            self._with_reductions.update(inner, [root])
        self._miss(pattern, root, refused or "XLA fuses it with its neighbors")
        return None

    @staticmethod
    def _used_outside(value: Value, nodes: set) -> bool:
        """Whether a value is used by more than these nodes, however it is shown there."""

        def is_inside(user) -> bool:
            shown = user.outputs[0]
            view = len(user.outputs) == 1 and value in (resolve(shown)[0], *resolve(shown)[2])
            return view and shown is not value and not _Finder._used_outside(shown, nodes)

        return value.is_result or any(u not in nodes and not is_inside(u) for u in value.users)

    @staticmethod
    def _other_results(state: State, formulas, n: int, outside: list[Value]) -> list[Value]:
        """The values that are further results of the pattern, such as the mean and the variance."""
        found = []
        for formula in formulas:
            for v in outside:
                if Matcher(v)(formula, n, v, state):
                    found.append(v)
                    break
            else:
                found.append(Value(None))  # nobody uses it
        return found

    def _leaves(self, pattern: Pattern, axis: int, root: Value, state: State, logits):
        """For each leaf the value to read and what to do with it, and the free numbers."""
        shape, places = root.shape, root.long
        if logits is not None:
            shape, places = (*root.shape, logits[-1]), (*root.long, len(root.shape))
        found: dict[str, Any] = {}
        for i, name in enumerate(pattern.leaves):
            kind = kind_of(name)
            if kind == "free":
                found[name] = state.free[i]
                continue
            bound = state.leaves[i].where(lambda v: not root.places.keys().isdisjoint(v.places))
            dtype = bound.source.dtype
            floating = jnp.issubdtype(dtype, jnp.floating)
            if floating is not (kind in ("full", "row")):
                return None
            if kind == "full" and not _same_kind(dtype, root.dtype):
                return None
            if kind == "row":
                read = _reader(bound, [1], None, [0])
            elif kind == "labels":
                read = _reader(bound, root.shape, None, root.long)
            else:
                read = _reader(bound, shape, root.dtype if kind == "full" else None, places)
            if (kind in ("row", "labels") or name in ("x", "residual")) and None in bound.map:
                return None
            found[name] = read
        return found

    def _forms(self, pattern: Pattern, axis: int, root: Value, leaves, state: State, nodes):
        """The calls to try, the one that replaces most first: results, reads and the call."""
        axis = root.long[axis] if axis < len(root.long) else len(root.shape)
        arrays = {k: v for k, v in leaves.items() if isinstance(v, tuple)}
        free = {k: v for k, v in leaves.items() if not isinstance(v, tuple)}

        x = arrays.get("x")
        rest = {k: v for k, v in arrays.items() if k != "x"}

        def form(before: str, op: Callable, own: dict, more=(), rest=rest, **numbers) -> tuple:
            given = {**own, **rest}
            values = [v for v, _ in given.values()]
            reads = tuple(read for _, read in given.values())
            numbers = tuple({**free, **numbers}.items())
            call = Call(op, axis, tuple(given), reads, numbers, root.shape, root.dtype)
            return before, list(more), values, call

        whole = Read(root.shape)
        for before, operand, scale, mask in self._absorbed(pattern, axis, x, root, nodes):
            own = {"x": operand} | ({} if mask is None else {"where": mask})
            yield form(before, pattern.call, own, scale=scale)
        plain = Read(root.shape, root.dtype)
        if x is not None and "up" in rest and x[1] == rest["up"][1] == plain:
            if (both := joined(x[0], rest["up"][0])) is not None:
                own = {"x": (both, Read(both.shape, root.dtype))}
                yield form("split + ", pattern.call, own, rest={})
        node = None if x is None or x[1].order else x[0].node
        if x is not None and node is not None and node.name in ("add", "add_any"):
            a, b = node.inputs
            alone = not self._used_outside(x[0], nodes)
            if pattern.biased and alone:
                for one, row in with_row(x[0]):
                    yield form("bias + ", pattern.biased, {"a": (one, whole), "b": (row, _ROW)})
            same = all(v.shape == root.shape and v.dtype == root.dtype for v in (a, b))
            relu = pattern.name == "relu"
            if pattern.sum_of and same and (alone or not relu):
                more = [] if relu else [x[0]]
                for one, other in () if relu else ((a, b), (b, a)):
                    if not self._used_outside(one, nodes | {node}):
                        for before, own, numbers in self._before_sum(one):
                            own["b"] = other, whole
                            yield form(before + "add + ", pattern.sum_of, own, more, **numbers)
                yield form("add + ", pattern.sum_of, {"a": (a, whole), "b": (b, whole)}, more)
        if pattern.axes != "none" or x is None or rest or not self._fuses(x[0], root):
            yield form("", pattern.call, {} if x is None else {"x": x})

    def _before_sum(self, value: Value) -> Iterator[tuple[str, dict, dict]]:
        """What a norm takes with an array that it adds to the residual: a dropout and a bias."""
        whole = Read(value.shape)
        drop = drop_at(value) if self.dropout else None
        if drop is not None and drop.reads["key"].shape == ():
            x, key = drop.reads.values()
            own, numbers = {"dropout_key": (key, Read(()))}, {"dropout_rate": drop.rate}
            for inner, row in with_row(x):
                biased = {"a": (inner, whole), "input_bias": (row, _ROW), **own}
                yield "bias + dropout + ", biased, numbers
            yield "dropout + ", {"a": (x, whole), **own}, numbers
        for inner, row in with_row(value):
            yield "bias + ", {"a": (inner, whole), "input_bias": (row, _ROW)}, {}

    def _absorbed(self, pattern: Pattern, axis: int, x, root: Value, nodes) -> Iterator[tuple]:
        """What a softmax takes with its operand: a factor and a mask, most first."""
        if not pattern.scaled or self._used_outside(x[0], nodes):
            return

        def view(value: Value, shown: Map) -> Bound:
            source, inner, _ = resolve(value)
            return Bound(source, compose(shown, inner))

        def read(bound: Bound, counts: bool | None = None) -> tuple:
            return _reader(bound, root.shape, None, root.long, counts)

        def fits(bound: Bound) -> bool:
            return None not in bound.map and bound.source.dtype == root.dtype

        order = x[1].order or identity(root)
        along = order[root.long.index(axis)]
        choices: list[tuple] = [("", Bound(x[0], order), None)]
        if pattern.masked and (found := masked(x[0], along)) is not None:
            operand, mask = (view(v, compose(order, operand_map(x[0], v))) for v in found[:2])
            choices.insert(0, ("where + ", operand, read(mask, found[2])))
        nodes = nodes | {x[0].node}
        for before, operand, mask in choices:
            terms = terms_of(operand.source) or []
            if len(terms) == 1 and terms[0][0] > 0:
                factor, inner = terms[0]
                inner = view(inner, compose(operand.map, operand_map(operand.source, inner)))
                if fits(inner) and not self._used_outside(operand.source, nodes):
                    yield "scale + " + before, read(inner), factor, mask
            if mask is not None and fits(operand):
                yield before, read(operand), 1.0, mask

    @staticmethod
    def _fuses(x: Value, root: Value) -> bool:
        """Whether XLA fuses an activation with its neighbors, so that a kernel adds a pass."""
        near = [x.node, *root.users]
        forced = _implementation.current() != "auto"
        return not forced and any(node is not None and node.name in FUSIBLE for node in near)

    @staticmethod
    def _level(root: Value, reads: Sequence[Value]) -> Level | None:
        """The outermost program that has the result and all that is read."""
        levels = [
            level
            for level in root.places
            if all(level in v.places or constant(v) is not None for v in reads)
        ]
        return min(levels, key=lambda level: level.depth, default=None)


def _struct(value: Value) -> jax.ShapeDtypeStruct:
    sharding = getattr(value.aval, "sharding", None)
    explicit = sharding is not None and any(s is not None for s in sharding.spec)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding if explicit else None)


@functools.lru_cache(1024)
def _jitted(call: Call, fanout: bool):
    """The call with a cache of its programs, whose key has the implementation in force."""
    return jax.jit(functools.partial(call, fanout=fanout))


@functools.lru_cache(1024)
def _reasons(call: Call, implementation: str) -> list[str]:
    """Why the kernel takes a call, filled in when that is traced."""
    del call, implementation
    return []


class _Programs:
    """The traced calls, each once, however many patterns a program has that it replaces."""

    def __init__(self) -> None:
        self._known: dict[tuple, Any] = {}

    def __call__(self, call: Call, types: Sequence[Any], fanout: bool = False) -> Any:
        """The program of a call, or as text why the kernel does not take it."""
        key = call, tuple(types), fanout
        if key not in self._known:
            self._known[key] = self._trace(call, types, fanout)
        return self._known[key]

    @staticmethod
    def why(call: Call) -> str:
        """Why the kernel takes a call."""
        return "; ".join(_reasons(call, _implementation.current()))

    @staticmethod
    def _trace(call: Call, types: Sequence[Any], fanout: bool) -> Any:
        try:
            with kernels_only(True), _explain.decisions() as made:
                traced = _jitted(call, fanout).trace(*types).jaxpr
        except Refused as refused:
            return str(refused) or "XLA is as fast"
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error).partition("\n")[0]
        if made:
            choices = [d.forward if d.forward.kernel else d.gradient for d in made]
            reasons = dict.fromkeys(choice.reason for choice in choices if choice.kernel)
            _reasons(call, _implementation.current())[:] = reasons
        found = traced.out_avals[0]
        same = found.shape == call.shape and found.dtype == call.dtype
        return traced if same else "the result has another type"


# ---- all matches of a program --------------------------------------------------------------------


class Plan:
    """What is replaced in a program."""

    def __init__(self, graph: Graph, settings: Settings):
        self.graph = graph
        finder = _Finder(graph, settings.dropout, settings.observe is not None)
        self.matches: list[Match] = []
        self.misses, self.programs = finder.misses, finder.programs
        self.at: dict[Level, dict[Any, tuple[Match, int]]] = {}
        self._touched: set[Level] = set()
        needed = set(graph.results)
        replaced: set[Value] = set()
        for node in reversed(graph.nodes):
            plain = bool(node.equation.effects)
            for value in node.outputs:
                if value not in needed or value in replaced:
                    continue
                match = finder.find(value)
                if match is None:
                    plain = True
                    continue
                self._take(match)
                replaced.update(match.results)
                needed.update(match.reads)
            if plain:
                needed.update(node.inputs)

    def _take(self, match: Match) -> None:
        self.matches.append(match)
        for index, value in enumerate(match.results):
            if match.level in value.places:
                self.at.setdefault(match.level, {})[value.places[match.level]] = match, index
        level: Level | None = match.level
        while level is not None:
            self._touched.add(level)
            level = level.parent

    def touches(self, level: Level) -> bool:
        return level in self._touched


_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
}


class Settings(NamedTuple):
    """What is seen of each plan, and whether dropout may take other masks."""

    observe: Callable[[Plan], object] | None = None
    dropout: bool = False


def fused(jaxpr, constants: Sequence[Any], args: Sequence[Any], settings: Settings) -> list:
    """The results of a program, with the calls of ops in place of patterns."""
    graph = Graph(jaxpr, constants)
    plan = Plan(graph, settings)
    if settings.observe is not None:
        settings.observe(plan)
    return _Run(plan, graph.top, args, settings).results()


def _has_work(jaxpr) -> bool:
    """Whether a body is worth a look: it has more than a few equations, or bodies of its own."""
    return any(
        e.primitive.name in _BODIES or e.primitive.name in ("jit", "pjit", "shard_map")
        for e in jaxpr.eqns
    ) or any(e.primitive.name in ("mul", "div", "add", "sub") for e in jaxpr.eqns)


class _Run:
    """The evaluation of one level."""

    def __init__(self, plan: Plan, level: Level, args: Sequence[Any], settings: Settings):
        self._plan, self._level, self._settings = plan, level, settings
        jaxpr = level.jaxpr
        self._values = dict(zip(jaxpr.invars, args, strict=True))
        self._values.update(zip(jaxpr.constvars, level.constants, strict=True))
        self._replaced = plan.at.get(level, {})
        self._makers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self._failed: set[Match] = set()
        self._copies: dict[Any, Any] = {}  # of results that the op gives twice

    def results(self) -> list:
        for index in self._order():
            equation = self._level.jaxpr.eqns[index]
            for var in equation.outvars:
                if var in self._replaced and var in self._needed:
                    self._compute(var)
            if equation.effects or any(
                v in self._needed and v not in self._replaced for v in equation.outvars
            ):
                self._evaluate(index)
        return [self._read(a) for a in self._level.jaxpr.outvars]

    def _order(self) -> list[int]:
        """The equations that are needed."""
        results = [a for a in self._level.jaxpr.outvars if not isinstance(a, Literal)]
        needed = self._needed = Counter(results)
        counted = set()
        order = []
        for index, equation in reversed(list(enumerate(self._level.jaxpr.eqns))):
            wanted = [v for v in equation.outvars if v in needed]
            if not wanted and not equation.effects:
                continue
            order.append(index)
            for var in wanted:
                match = self._replaced[var][0] if var in self._replaced else None
                if match is not None and match not in counted:
                    counted.add(match)
                    needed.update(
                        v.places[self._level] for v in match.reads if self._level in v.places
                    )
            if equation.effects or any(v not in self._replaced for v in wanted):
                needed.update(a for a in equation.invars if not isinstance(a, Literal))
        return order[::-1]

    def _read(self, atom):
        if isinstance(atom, Literal):
            return atom.val
        self._compute(atom)
        found = self._values[atom]
        if atom in self._copies:
            self._values[atom] = self._copies.pop(atom)
        return found

    def _compute(self, var) -> None:
        if var not in self._values:
            match = self._replaced[var][0] if var in self._replaced else None
            if match is None or match in self._failed or not self._call(match):
                self._evaluate(self._makers[var])

    def _call(self, match: Match) -> bool:
        given = [
            self._read(v.places[self._level])
            if self._level in v.places
            else jnp.full(v.shape, constant(v), v.dtype)
            for v in match.reads
        ]
        with _explain.at(line_of(match.root)):
            var = match.root.places[self._level]
            twice = match.pattern.fanout and self._needed[var] == 2
            y, *others = self._results(match, given, twice)
        copy = others.pop(0) if twice else None
        if not _close(jax.typeof(y), match.root.aval):
            self._failed.add(match)
            return False
        if twice:
            self._copies[var] = copy
        for value, result in zip(match.results, (y, *others), strict=False):
            var = value.places.get(self._level)
            if var is not None and var in self._replaced:
                self._values[var] = _as(result, value)
        return True

    def _results(self, match: Match, given: Sequence[Any], twice: bool) -> Sequence[Any]:
        """The results of a call, by its traced program if that is for just these types."""
        program = self._plan.programs(match.call, [_struct(v) for v in match.reads], twice)
        types = [jax.typeof(x) for x in given]
        if isinstance(program, str) or program.in_avals != types or _explain.is_on():
            return match.call(*given, fanout=twice)
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *given)

    def _evaluate(self, index: int) -> None:
        level = self._level
        equation = level.jaxpr.eqns[index]
        args = [self._read(a) for a in equation.invars]
        if index in level.calls:
            inner = level.calls[index]
            if self._plan.touches(inner) or _has_bodies(inner.jaxpr):
                equation = _with_body(equation, "jaxpr", lambda *a: self._run(inner, a))
        elif equation.primitive.name == "shard_map":
            self._store(equation, _sharded(equation, args, self._settings))
            return
        elif equation.primitive.name in _BODIES:
            for name in _BODIES[equation.primitive.name]:
                equation = _with_fused_bodies(equation, name, self._settings)
        self._store(level.jaxpr.eqns[index], _bind(level.jaxpr, equation, args))

    def _run(self, level: Level, args) -> list:
        return _Run(self._plan, level, args, self._settings).results()

    def _store(self, equation, results) -> None:
        for var, result in zip(equation.outvars, results, strict=True):
            if var not in self._replaced or self._replaced[var][0] in self._failed:
                self._values[var] = result
            else:
                self._values.setdefault(var, result)


def _close(found, wanted) -> bool:
    """Whether two types differ in nothing that a user can see."""
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    specs = [getattr(getattr(t, "sharding", None), "spec", None) for t in (found, wanted)]
    return same and specs[0] == specs[1]


def _as(result, value: Value):
    result = result if result.shape == value.shape else result.reshape(value.shape)
    return result if result.dtype == value.dtype else result.astype(value.dtype)


def _has_bodies(jaxpr) -> bool:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _BODIES or name == "shard_map":
            return True
        if name in ("jit", "pjit") and _has_bodies(equation.params["jaxpr"].jaxpr):
            return True
    return False


def _bind(jaxpr, equation, args) -> list:
    """Evaluates one equation, with its name stack and source line."""
    variables: dict[Any, Any] = {}
    for atom, x in zip(equation.invars, args, strict=True):
        if not isinstance(atom, Literal):
            variables[atom] = x
    one = jaxpr.replace(
        constvars=[], invars=list(variables), outvars=list(equation.outvars), eqns=[equation]
    )
    return jax.core.eval_jaxpr(one, [], *variables.values())


def _inputs(jaxpr) -> list[jax.ShapeDtypeStruct]:
    return [_compat.struct_of(v.aval) for v in jaxpr.invars]


def _with_body(equation, name: str, body: Callable):
    """The equation with another body, or as it is if the new one has another type."""
    old = equation.params[name]
    inner = getattr(old, "jaxpr", old)
    closed = hasattr(old, "consts") and hasattr(old, "jaxpr")
    new = jax.make_jaxpr(body)(*_inputs(inner))
    types = [_visible(v.aval) for v in inner.outvars], [_visible(v.aval) for v in new.jaxpr.outvars]
    if types[0] != types[1] or (not closed and new.consts):
        return equation
    params = {**equation.params, name: new if closed else new.jaxpr}
    return equation.replace(params=params)


def _visible(aval) -> tuple:
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None), aval.weak_type, str(spec)


def _with_fused_bodies(equation, name: str, settings: Settings):
    bodies = equation.params.get(name)
    if bodies is None:
        return equation
    several = isinstance(bodies, (tuple, list))
    found = []
    for body in bodies if several else (bodies,):
        inner = getattr(body, "jaxpr", body)
        if not _has_work(inner):
            found.append(body)
            continue
        alone = equation.replace(params={name: body})
        run = functools.partial(_fused_body, inner, getattr(body, "consts", ()), settings)
        found.append(_with_body(alone, name, run).params[name])
    new = type(bodies)(found) if several else found[0]
    return equation.replace(params={**equation.params, name: new})


def _fused_body(jaxpr, constants, settings, *args):
    return fused(jaxpr, constants, args, settings)


def _sharded(equation, args, settings: Settings) -> list:
    params = equation.params
    jaxpr = params["jaxpr"]
    run = functools.partial(
        _fused_body, getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), settings
    )
    mapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params.get("newly_manual_axes") or params["manual_axes"]),  # jax < 0.10
        check_vma=params["check_vma"],
    )
    return mapped(*args)
