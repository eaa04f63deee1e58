"""Finds the patterns of a program, and makes the calls that replace them."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastops import _compat, _explain, _implementation
from jax_fastops._autofuse.drops import drop_at
from jax_fastops._autofuse.graph import Level, Node, Value
from jax_fastops._autofuse.linear import Losses, Product, product_at, summed_at
from jax_fastops._autofuse.masks import masked
from jax_fastops._autofuse.match import Bound, Matcher, State
from jax_fastops._autofuse.meaning import (
    FUSIBLE,
    REDUCTIONS,
    Map,
    compose,
    constant,
    identity,
    meaning,
    multiple_of,
    operand_map,
    resolve,
    selections_of,
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


_IN_NO_PATTERN = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call"}


def _before(value: Value, limit: int, ends: Container[str] = ()) -> Iterator[Value]:
    """A value and those that it is computed from, the nearest first."""
    seen, left = {value}, deque([value])
    while left and len(seen) < limit:
        value = left.popleft()
        yield value
        if value.node is not None and value.node.name not in ends:
            fresh = [v for v in value.node.inputs if v not in seen]
            seen.update(fresh)
            left.extend(fresh)


def _is_told(node: Node) -> bool:
    """Whether the parameters of an operation say what it does: numbers, and no functions."""
    if node.name == "custom_jvp_call":
        return True
    parts = [x for v in node.params.values() for x in (v if isinstance(v, tuple) else (v,))]
    return not any(callable(x) or hasattr(x, "jaxpr") or hasattr(x, "eqns") for x in parts)


def _operations_before(value: Value) -> tuple[set, tuple]:
    """The operations right before a value, as a formula needs them, and a key of all of them."""
    found: set = set()
    key: list = []
    places: dict[Value, int] = {}
    for before in _before(value, 120, _IN_NO_PATTERN):
        places[before] = len(places)
    for before in places:
        node = before.node
        key += (before.shape, before.dtype)
        if node is None:
            known = before.constant
            key.append(None if known is None else str(known))  # NaN is not NaN
            continue
        key.append(node.name)
        if node.name not in _IN_NO_PATTERN:
            key += (node.outputs.index(before), *(places.get(v) for v in node.inputs))
            key.append(meaning(node) if _is_told(node) else None)
        found.add("root" if node.name in ("rsqrt", "sqrt", "pow") else node.name)
        if node.name in REDUCTIONS:
            found.add((node.name, meaning(node)))
    return found, tuple(key)


# ---- what is found -------------------------------------------------------------------------------


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
    is_taken: bool = False  # whether a smaller pattern is replaced here


# ---- calls ---------------------------------------------------------------------------------------


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

    def __call__(self, call: Call, values: Sequence[Value], fanout: bool = False) -> Any:
        """The program of a call of such values, or as text why the kernel does not take it."""
        types = [_struct(v) for v in values]
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


# ---- the finder ----------------------------------------------------------------------------------


def _used_outside(value: Value, nodes: set) -> bool:
    """Whether a value is used by more than these nodes, however it is shown there."""

    def is_inside(user) -> bool:
        shown = user.outputs[0]
        view = len(user.outputs) == 1 and value in (resolve(shown)[0], *resolve(shown)[2])
        return view and shown is not value and not _used_outside(shown, nodes)

    return value.is_result or any(u not in nodes and not is_inside(u) for u in value.users)


def _leads_only_to(value: Value, end: Value) -> bool:
    """Whether a value is used for nothing but another one, each value between by one operation."""
    while value is not end:
        if value.is_result or len(value.users) != 1:
            return False
        value = value.users[0].outputs[0]
    return True


def _is_in(level: Level, value: Value) -> bool:
    return level in value.places or constant(value) is not None


def _in_one_program(root: Value, leaves: dict[int, Bound]) -> dict[int, Bound]:
    """The leaves by values of the outermost program that has the root and all of them."""
    bounds = leaves
    for level in sorted(root.places, key=lambda level: level.depth):
        bounds = {i: b.where(functools.partial(_is_in, level)) for i, b in leaves.items()}
        if all(_is_in(level, b.source) for b in bounds.values()):
            break
    return bounds


_ELSEWHERE = "its operands are in another function"
_DIFFERS = "the formula differs from here on"
_USED = "the value is used elsewhere"


class Finder:
    """Finds the patterns of a graph. If it is thorough, it finds all that was nearly one."""

    def __init__(self, dropout: bool, thorough: bool):
        self._dropout, self._thorough = dropout, thorough
        self.misses: list[Miss] = []
        self.programs = _Programs()
        # Values of patterns with reductions that stay: XLA fuses these, so no other pattern does.
        self._with_reductions: set[Value] = set()

    def find(self, value: Value) -> Match | None:
        """The match of the largest pattern whose result is this value."""
        try:
            return self._find(value)
        except RecursionError:  # thousands of factors or views, one of the other
            self.misses.append(Miss("pattern", value, "the program is too deep"))
            return None

    def _find(self, value: Value) -> Match | None:
        if (self._dropout or self._thorough) and (drop := drop_at(value)) is not None:
            if self._dropout:
                return self._dropped_softmax(drop) or self._moved(drop)
            self.misses.append(Miss("dropout", value, "pass dropout=True; its masks are others"))
        if isinstance(move := move_at(value), Move):
            return self._moved(move)
        if move is not None:
            self.misses.append(Miss("split_heads", value, move))
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
        around, key = _operations_before(source)
        key = value.shape, value.dtype, _compat.x64_is_on(), *key
        self._tried: list[tuple[float, Miss]] = []
        whole = []
        for pattern, axis in self._candidates(value, source, around, key):
            self._matched = False
            found = self._at(pattern, axis, value, around)
            if self._matched and pattern.name == "log_softmax":
                self._note_weighted(value)
            if found is not None:
                self._remember(key, [*whole, (pattern, axis)], False)
                self._note_larger(found)
                return found
            if self._matched:
                whole.append((pattern, axis))
        if self._tried:
            self.misses.append(max(self._tried, key=lambda found: found[0])[1])
        self._remember(key, whole, True)
        return None

    def _note_weighted(self, value: Value) -> None:
        """Notes a loss of a log_softmax whose weights are an array."""
        products = (user.outputs[0] for user in value.users if user.name == "mul")
        if any(user.name == "reduce_sum" for product in products for user in product.users):
            reason = "the weights of the classes are no one_hot of integer labels"
            self.misses.append(Miss("cross_entropy of one_hot", value, reason, True))

    def _note_larger(self, match: Match) -> None:
        """Notes why a larger pattern is not replaced at the result of this match."""
        name = match.before + match.pattern.name
        larger = (miss for part, miss in self._tried if part == 1 and miss.pattern != name)
        if (miss := next(larger, None)) is not None:
            self.misses.append(dataclasses.replace(miss, is_taken=True))

    _known: ClassVar[dict[tuple, tuple[list[tuple[Pattern, int]], bool]]] = {}

    def _remember(self, key: tuple, whole: list[tuple[Pattern, int]], all_tried: bool) -> None:
        """The patterns that are there after such operations, and whether there are no others."""
        if len(self._known) > 10_000:
            self._known.clear()
        self._known[key] = whole, all_tried

    def _candidates(self, value: Value, source: Value, around: set, key: tuple) -> Iterator[tuple]:
        """The patterns to try, with the axis."""
        known, all_tried = self._known.get(key, ([], False))
        if not (self._thorough and all_tried):
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
        level = self._level(call, root, reads)
        if isinstance(level, str):
            self.misses.append(Miss(move.name, root, level))
            return None
        pattern = Pattern(move.name, move.op, tuple(move.reads), move.op)
        return Match(pattern, "", move.results, reads, call, frozenset(move.results), level)

    def _dropped_softmax(self, drop: Move) -> Match | None:
        """The match of a softmax and its dropout, if the softmax is used nowhere else."""
        (root,), (x, key) = drop.results, drop.reads.values()
        alone = _leads_only_to(x, root) and key.shape == ()
        match = self.find(x) if alone else None
        if match is None or not match.pattern.name.startswith("softmax"):
            return None
        inner = match.call
        names, reads = (*inner.names, "dropout_key"), (*inner.reads, Read(()))
        numbers = (*inner.numbers, ("dropout_rate", drop.rate))
        call = dataclasses.replace(inner, names=names, reads=reads, numbers=numbers)
        values = [*match.reads, key]
        level = self._level(call, root, values)
        if isinstance(level, str):
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
            if any(_used_outside(v, nodes) for v in between - {root}):
                product = _USED
        if not isinstance(product, Product):
            if product and not losses.between:  # each loss has the reason of the sum
                self.misses.append(Miss("linear_cross_entropy", root, product, True))
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
        level = self._level(call, root, values)
        if isinstance(level, str):
            if not losses.between:
                self.misses.append(Miss("linear_cross_entropy", root, level, True))
            return None
        pattern = dataclasses.replace(match.pattern, name="linear_cross_entropy")
        return Match(pattern, "", [root], list(values), call, match.inner | between, level)

    def _may_be_root(self, value: Value) -> bool:
        views = ("broadcast_in_dim", "reshape", "squeeze", "copy", "transpose")
        if value.node is None or value.node.name in views or not value.is_floating:
            return False
        if not value.places:  # a product that a `dot_general` sums
            return False
        return value.is_static and not value.aval.weak_type and 0 not in value.shape

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
        dtype = jnp.float64 if value.dtype == jnp.float64 else jnp.float32
        formulas = compiled(pattern, len(sizes), axis, dtype, _compat.x64_is_on())
        n = pattern.count(sizes, axis)
        matcher = Matcher()
        state = matcher(formulas[0], n, value)
        if state is None:
            part = len(set(matcher.seen)) / (1 + formulas[0].size)
            # Sums and products that are nearly a lerp are everywhere.
            if part > 0.7 and formulas[0].size > 5 and pattern.needs:
                self._miss(pattern.name, matcher.stopped or value, _DIFFERS, min(part, 0.99))
            return None
        self._matched = True
        return self._checked(pattern, axis, value, state, formulas, n, sizes if loss else None)

    @staticmethod
    def _logits_of(value: Value) -> tuple | None:
        """The sizes of the array from which a loss for each token is computed."""
        for found in _before(value, 40):
            if found.sizes[:-1] == value.sizes and len(found.long) == len(value.long) + 1:
                return found.sizes
        return None

    def _miss(self, name: str, value: Value, reason: str, part: float = 1.0) -> None:
        """Notes how much of a pattern was found. A whole one is not replaced for other reasons."""
        self._tried.append((part, Miss(name, value, reason)))

    def _checked(
        self, pattern: Pattern, axis: int, root: Value, state: State, formulas, n: int, logits
    ) -> Match | None:
        """The match, if nothing else needs what it replaces and the kernel takes the call."""
        inner = frozenset(state.inner)
        for v in inner:
            if v.is_floating and v.dtype.itemsize < root.dtype.itemsize:
                reason = f"{v.dtype} is narrower than the result's {root.dtype}"
                self._miss(pattern.name, v, reason)
                return None
        nodes = {v.node for v in inner} | {root.node}
        outside = [v for v in inner if v is not root and _used_outside(v, nodes)]
        more = self._other_results(state, formulas[1:], n, outside)
        for v in outside:
            counts = v.node is not None and v.node.name == "iota"
            if v not in more and v.size >= root.size and not counts:
                self._miss(pattern.name, v, _USED)
                return None
        leaves = self._leaves(pattern, axis, root, state, logits)
        if leaves is None:
            self._miss(pattern.name, root, "an operand has another shape or dtype", 0.99)
            return None
        refused: tuple = ()
        for before, results, reads, call in self._forms(pattern, axis, root, leaves, state, nodes):
            level = self._level(call, root, reads)
            if not isinstance(level, str):
                if refused:
                    self._miss(*refused)
                results = [root, *more, *results]
                return Match(pattern, before, results, reads, call, inner, level)
            refused = refused or (before + pattern.name, root, level)
        if pattern.reductions(len(root.sizes), axis):
            self._with_reductions.update(inner, [root])
        reason = refused[-1] if refused else "XLA fuses it with its neighbors"
        self._miss(pattern.name, root, reason)
        return None

    @staticmethod
    def _other_results(state: State, formulas, n: int, outside: list[Value]) -> list[Value]:
        """The values that are further results of the pattern, such as the mean and the variance."""
        found = []
        for formula in formulas:
            for v in outside:
                if Matcher()(formula, n, v, state):
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
        bounds = _in_one_program(root, state.leaves)
        for i, name in enumerate(pattern.leaves):
            kind = kind_of(name)
            if kind == "free":
                found[name] = state.free[i]
                continue
            bound = bounds[i]
            dtype = bound.source.dtype
            if bound.source.is_floating is not (kind in ("full", "row")):
                return None
            if kind == "full" and dtype != root.dtype and dtype.itemsize >= root.dtype.itemsize:
                return None
            if kind == "row":
                read = _reader(bound, [1], None, [0])
            elif kind == "labels":
                read = _reader(bound, root.shape, state.leaves[i].source.dtype, root.long)
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
            alone = not _used_outside(x[0], nodes)
            if pattern.biased:
                for one, row in with_row(x[0]):
                    if not alone:
                        self._miss("bias + " + pattern.name, x[0], _USED)
                        continue
                    if "root" in _operations_before(row)[0]:  # of a norm, which is found later
                        continue
                    yield form("bias + ", pattern.biased, {"a": (one, whole), "b": (row, _ROW)})
            whole_arrays = a.shape == b.shape == root.shape
            same = whole_arrays and a.dtype == b.dtype == root.dtype
            relu = pattern.name == "relu"
            if pattern.sum_of and whole_arrays and not (same and (alone or not relu)):
                reason = _USED if same else f"the sum is {a.dtype}, the result {root.dtype}"
                self._miss("add + " + pattern.name, x[0], reason)
            elif pattern.sum_of and same:
                more = [] if relu else [x[0]]
                for one, other in () if relu else ((a, b), (b, a)):
                    if not _used_outside(one, nodes | {node}):
                        for before, own, numbers in self._before_sum(one):
                            own["b"] = other, whole
                            yield form(before + "add + ", pattern.sum_of, own, more, **numbers)
                yield form("add + ", pattern.sum_of, {"a": (a, whole), "b": (b, whole)}, more)
        if pattern.axes != "none" or x is None or rest or not self._fuses(x[0], root):
            yield form("", pattern.call, {} if x is None else {"x": x})

    def _before_sum(self, value: Value) -> Iterator[tuple[str, dict, dict]]:
        """What a norm takes with an array that it adds to the residual: a dropout and a bias."""
        whole = Read(value.shape)
        drop = drop_at(value) if self._dropout else None
        if drop is not None and drop.reads["key"].shape == ():
            x, key = drop.reads.values()
            own, numbers = {"dropout_key": (key, Read(()))}, {"dropout_rate": drop.rate}
            for inner, row in with_row(x) if _leads_only_to(x, value) else ():
                biased = {"a": (inner, whole), "input_bias": (row, _ROW), **own}
                yield "bias + dropout + ", biased, numbers
            yield "dropout + ", {"a": (x, whole), **own}, numbers
        for inner, row in with_row(value):
            yield "bias + ", {"a": (inner, whole), "input_bias": (row, _ROW)}, {}

    def _absorbed(self, pattern: Pattern, axis: int, x, root: Value, nodes) -> Iterator[tuple]:
        """What a softmax takes with its operand: a factor and a mask, most first."""
        if not pattern.scaled or _used_outside(x[0], nodes):
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
        elif pattern.masked and any(constant(v) is not None for *_, v, _ in selections_of(x[0])):
            reason = "the mask is not known, or may leave a row empty"
            self._miss("where + " + pattern.name, x[0], reason)
        nodes = nodes | {x[0].node}
        for before, operand, mask in choices:
            multiple = multiple_of(operand.source)
            if multiple is not None and multiple[0] > 0:
                factor, inner = multiple
                inner = view(inner, compose(operand.map, operand_map(operand.source, inner)))
                if fits(inner) and not _used_outside(operand.source, nodes):
                    yield "scale + " + before, read(inner), factor, mask
            if mask is not None and fits(operand):
                yield before, read(operand), 1.0, mask

    @staticmethod
    def _fuses(x: Value, root: Value) -> bool:
        """Whether XLA fuses an activation with its neighbors, so that a kernel adds a pass."""
        near = [x.node, *root.users]
        forced = _implementation.current() != "auto"
        return not forced and any(node is not None and node.name in FUSIBLE for node in near)

    def _level(self, call: Call, root: Value, reads: Sequence[Value]) -> Level | str:
        """The outermost program that can have the call, or as text why none takes it."""
        levels = [level for level in root.places if all(_is_in(level, v) for v in reads)]
        if not levels:
            return _ELSEWHERE
        if not (levels := [level for level in levels if not level.has_ref]):
            return "its function has a Ref"
        program = self.programs(call, reads)
        return program if isinstance(program, str) else min(levels, key=lambda x: x.depth)
