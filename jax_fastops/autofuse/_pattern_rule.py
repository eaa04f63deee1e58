"""The rule of the patterns: finds the largest one whose result is a value."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from jax_fastops import _compat, _implementation
from jax_fastops.autofuse._dropout import drop_at
from jax_fastops.autofuse._heads import joined
from jax_fastops.autofuse._masks import masked
from jax_fastops.autofuse._match import Matcher, State, makers, matched, moved
from jax_fastops.autofuse._meaning import FUSIBLE, REDUCTIONS
from jax_fastops.autofuse._pattern import (
    KINDS,
    MAX_RANK,
    PATTERNS,
    Formula,
    Pattern,
    formulas,
)
from jax_fastops.autofuse._rule import ROW, Miss, Read, Rewrite, Rule, read_of
from jax_fastops.autofuse._value import (
    MOST_BEFORE,
    NO_EQUATION,
    USED,
    Value,
    View,
    reductions,
    values_before,
)

# ---- which patterns can be at a value ------------------------------------------------------------


_KINDS = {
    **dict.fromkeys(("add", "add_any", "sub"), "Sum"),
    **dict.fromkeys(("mul", "div"), "Product"),
}


def kinds_of(value: Value) -> set[str]:
    """The kinds of formulas that a value may be the result of."""
    if value.node.name == "neg":
        return {"Sum", "Product"} | kinds_of(value.node.inputs[0].source(narrowing=True).value)
    return {_KINDS.get(value.node.name, value.node.name)}


def operations_of(values: Iterable[Value]) -> set:
    """The operations of values, as a formula needs them."""
    operations: set = set()
    for node in {v.node for v in values} - {NO_EQUATION}:
        operations.add("root" if node.name in ("rsqrt", "sqrt", "pow") else node.name)
        if node.name in REDUCTIONS:
            for axes in [found.axes for found in reductions(node)]:
                operations |= {(node.name, (("axes", str(axes)),)), (node.name, len(axes))}
    return operations


def _has_operations(formula: Formula, values: Sequence[Value]) -> bool:
    """Whether values have the operations of a formula that are no sums, products and roots."""
    needs = formula.needs - {"root"}
    return bool(needs) and needs <= {v.node.name for v in values}


def _reads_again(values: Sequence[Value]) -> bool:
    """Whether two of the values are computed from the same one, as in each long formula.

    Otherwise any product with a logistic function, as in an LSTM, would be nearly gelu.
    """
    nodes = {v.node for v in values if v.node.name != "convert_element_type"}
    reads = Counter(x.source(narrowing=True).value for node in nodes for x in set(node.inputs))
    return any(count > 1 for count in reads.values())


def _has_means(value: Value) -> bool:
    """Whether a sum before a value is multiplied with a number. In an L2 norm, none is."""
    multiples = (v.multiple for v in values_before(value) if v.is_floating)
    sums = (m[1].source(narrowing=True).value for m in multiples if m is not None)
    return any(v.node.name == "reduce_sum" for v in sums)


# ---- what a pattern reads ------------------------------------------------------------------------

_Operands = dict[str, tuple[Value, Read]]


def _is_of_convolution(x: Value) -> bool:
    """Whether an array is a convolution, perhaps with a bias, which computes activations, too."""
    arrays = [x, *(one for one, _ in x.with_row())]
    return any(v.source(True).value.node.name == "conv_general_dilated" for v in arrays)


# ---- the rule ------------------------------------------------------------------------------------

# What a pattern that is matched once for equal layers needs one of. An activation matches fast, and
# may be a part of a norm.
_STATISTICS = {"root", *REDUCTIONS}


class PatternRule(Rule):
    """The largest pattern, with what its op takes before the operand."""

    # What matches after which operations, and whether all patterns were tried.
    known: ClassVar[dict[tuple, tuple[list[tuple[Pattern, int]], bool]]] = {}
    # A formula of each pattern and rank, along some axis, for means over any number of elements.
    tops: ClassVar[dict[tuple, Formula]] = {}

    def __init__(self, search):
        super().__init__(search)
        self._tried: list[tuple[float, Miss]] = []  # with the share of the pattern
        # Interior values of rejected reduction patterns. XLA fuses them; no other pattern may
        # claim them.
        self._with_reductions: set[Value] = set()
        self._logits: dict[Value, tuple | None] = {}  # the sizes of those before a loss
        # Values of such makers, each with the patterns that are there. The last one was taken.
        self._matches: dict[tuple, list[tuple[Value, list[tuple[Pattern, int, State]]]]] = {}

    def match(self, value: Value) -> Rewrite | None:
        source = value.source(narrowing=True).value
        views = ("broadcast_in_dim", "reshape", "squeeze", "copy", "transpose")
        if value.node.name in views or NO_EQUATION in (value.node, source.node):
            return None
        if not (value.is_array and value.is_floating and value.is_plain) or 0 in value.shape:
            return None
        alike = self._matches.setdefault((value.computation, makers(source)), [])
        if self.search.thorough or value in self._with_reductions:
            alike = []
        for other, found in alike:
            for pattern, axis, state in found:
                if (state := moved(state, other, value)) is None:
                    break
                if (match := self._checked(pattern, axis, value, state)) is not None:
                    return match
        before = source.before
        key = value.shape, value.dtype, _compat.x64_is_on(), source.structure
        self._tried, whole, match = [], [], None
        for pattern, axis in self._candidates(value, source, before, key):
            state, match = self._at(pattern, axis, value)
            if state is not None:
                whole.append((pattern, axis, state))
            if match is not None:
                if not _STATISTICS.isdisjoint(pattern.needs):
                    alike.append((value, whole))
                break
        if len(self.known) > 10_000:
            self.known.clear()
        self.known[key] = [one[:2] for one in whole], match is None
        if match is not None:
            larger = (m for part, m in self._tried if part == 1 and m.name != match.name)
            if (miss := next(larger, None)) is not None:
                self.search.misses.append(dataclasses.replace(miss, is_part=True))
        elif self._tried:
            part, miss = max(self._tried, key=lambda tried: tried[0])
            is_view = value.view(True) is not None  # of a value that may match
            self.search.misses.append(dataclasses.replace(miss, is_part=part == 1 and not is_view))
        return match

    def _candidates(
        self, value: Value, source: Value, before: Iterable[Value], key: tuple
    ) -> Iterator[tuple]:
        """The patterns to try, with the axis."""
        known, all_tried = self.known.get(key, ([], False))
        if not (self.search.thorough and all_tried):
            yield from known
            if all_tried:
                return
        kinds, around = kinds_of(source), operations_of(before)
        # The rows of a norm: without reductions, only they tell which axes may be its own.
        around |= {("row", v.sizes[0]) for v in before if len(v.sizes) == 1}
        if len(source.before) >= MOST_BEFORE:
            around |= {("row", size) for size in value.sizes}
        found: list[tuple[int, Pattern, Sequence[int]]] = []
        for pattern in PATTERNS:
            # Most patterns are left by what they need, before they are traced.
            axes = self._axes(pattern, value, around) if pattern.needs <= around else ()
            if axes:
                first = self._top(pattern, axes[0], value)
                if first.kind in kinds and first.needs <= around:
                    found.append((first.size, pattern, axes))
        found.sort(key=operator.itemgetter(0), reverse=True)
        for _, pattern, axes in found:
            for axis in axes:
                yield pattern, axis

    def _sizes(self, pattern: Pattern, value: Value) -> tuple | None:
        """The sizes of the operand of a pattern. For a loss, they are those of the logits."""
        if "labels" not in pattern.leaves:
            return value.sizes
        if value not in self._logits:
            before = (v for v in values_before(value, limit=40) if v.sizes[:-1] == value.sizes)
            found = (v.sizes for v in before if len(v.long) == len(value.long) + 1)
            self._logits[value] = next(found, None)
        return self._logits[value]

    def _top(self, pattern: Pattern, axis: int, value: Value) -> Formula:
        """A formula of the size and the kind of the first result's one."""
        key = pattern, len(self._sizes(pattern, value) or ()), _compat.x64_is_on()
        if key not in self.tops:
            (self.tops[key],) = self._formulas(pattern, axis, value, any_count=True)
        return self.tops[key]

    def _formulas(
        self,
        pattern: Pattern,
        axis: int,
        value: Value,
        others: bool = False,
        any_count: bool = False,
    ) -> list[Formula]:
        """The formula of the first result, or those of the others.

        With ``any_count``, they are for means over some number of elements.
        """
        sizes = self._sizes(pattern, value)
        assert sizes is not None
        n = 0 if any_count else pattern.count(sizes, axis)
        return formulas(pattern, value.dtype, len(sizes), axis, n, others)

    def _axes(self, pattern: Pattern, value: Value, around: set) -> Sequence[int]:
        """The axes along which the operations before a value have the pattern's reductions."""
        sizes = self._sizes(pattern, value)
        if sizes is None or len(sizes) > MAX_RANK:
            return ()
        axes = self._any_axes(pattern, value)
        if "transpose" in around:  # the axes may have other numbers
            count = len(sizes) - 1 if pattern.over_others else 1
            return axes if {(name, count) for name in pattern.needs & REDUCTIONS} <= around else ()
        if pattern.axes == "each" and not pattern.needs & REDUCTIONS:
            return [i for i in axes if ("row", sizes[i]) in around]
        return [i for i in axes if pattern.reductions(len(sizes), i) <= around]

    @staticmethod
    def _any_axes(pattern: Pattern, value: Value) -> Sequence[int]:
        """Axes, as numbers of long dimensions. The axes of a loss are dimensions of its logits."""
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

    def _note(
        self, name: str, value: Value, reason: str, part: float = 1.0, seen: Sequence[Value] = ()
    ) -> None:
        """Notes why a pattern stays. ``part`` is the share of it that the program has."""
        self._tried.append((part, Miss(name, value, reason, seen=frozenset(seen))))

    def _at(self, pattern: Pattern, axis: int, value: Value) -> tuple[State | None, Rewrite | None]:
        """The match if the whole pattern is at a value, and the rewrite if it is possible."""
        if value in self._with_reductions and not pattern.needs & REDUCTIONS:
            return State({}, {}, ()), None  # here, and maybe elsewhere
        if pattern.needs & REDUCTIONS and not self.search.thorough:
            (first,) = self._formulas(pattern, axis, value, any_count=True)
            if matched(first, value, any_numbers=True) is None:
                return None, None  # no formula is compiled for this number of elements
        (first,) = self._formulas(pattern, axis, value)
        state = matched(first, value)
        if state is None and self.search.thorough:
            (matcher := Matcher())(first, value)
            part = len(set(matcher.seen)) / (1 + first.size)
            # Sums and products that are nearly a lerp are everywhere.
            near = part > 0.7 and first.size > 5 and _has_operations(first, matcher.seen)
            near = near and _reads_again(matcher.seen)
            if near and (not {"root", "reduce_sum"} <= pattern.needs or _has_means(value)):
                stopped = matcher.stopped
                at = value if stopped is None or stopped.node is NO_EQUATION else stopped
                reason = "the formula differs from here on"
                self._note(pattern.name, at, reason, min(part, 0.99), matcher.seen)
        return state, None if state is None else self._checked(pattern, axis, value, state)

    def _checked(self, pattern: Pattern, axis: int, root: Value, state: State) -> Rewrite | None:
        """The rewrite, if nothing else needs what it replaces and the kernel takes the call."""
        inner = frozenset(state.inner)
        for v in inner:
            if v.is_narrower_than(root.dtype):
                reason = f"{v.dtype} is narrower than the result's {root.dtype}"
                return self._note(pattern.name, v, reason)
        nodes = {v.node for v in inner} | {root.node}
        outside = [v for v in inner if v is not root and v.is_used_outside(nodes)]
        more = [  # other results, such as the mean and the variance, if they are used
            next((v for v in outside if Matcher()(formula, v, state)), Value(None))
            for formula in self._formulas(pattern, axis, root, others=True)
        ]
        for v in outside:
            counts = v.node.name == "iota"
            if v not in more and v.size >= root.size and not counts:
                return self._note(pattern.name, v, USED)
        leaves = self._leaves(pattern, root, state)
        if leaves is None:
            return self._note(pattern.name, root, "an operand has another shape or dtype", 0.99)
        operands, numbers = leaves
        if pattern.axes == "each":
            numbers["axis"] = root.long[axis]
        if pattern.biased is not None:
            self.search.activations[root] = pattern.name, *operands["x"]
        refused: tuple | None = None
        for before, op, reads, results, options in self._forms(
            pattern, axis, root, operands, nodes
        ):
            name, results = before + pattern.name, [root, *more, *results]
            rewrite = self.search.rewrite(
                name, op, results, reads, numbers | options, inner, pattern.fanout
            )
            if isinstance(rewrite, Rewrite):
                if refused is not None:
                    self._note(*refused)
                return rewrite
            refused = refused or (name, root, rewrite)
        if pattern.needs & REDUCTIONS:
            self._with_reductions.update(inner, [root])
        reason = "XLA fuses it with its neighbors" if refused is None else refused[-1]
        return self._note(pattern.name, root, reason)

    def _leaves(
        self, pattern: Pattern, root: Value, state: State
    ) -> tuple[_Operands, dict[str, Any]] | None:
        """For each leaf the value to read and what to do with it, and the free numbers."""
        shape, places = root.shape, root.long
        is_loss = "labels" in pattern.leaves
        if is_loss and (logits := self._sizes(pattern, root)) is not None:
            shape, places = (*root.shape, logits[-1]), (*root.long, len(root.shape))
        sizes = {"row": ([1], [0]), "labels": (root.shape, root.long)}
        operands, numbers = {}, {}
        for i, name in enumerate(pattern.leaves):
            kind = KINDS[name]
            if kind == "free":
                numbers[name] = pattern.fixed.get(name, state.free.get(i))
            if kind == "free" or name in pattern.fixed:
                continue
            view = state.leaves[i]
            dtype = view.value.dtype
            if view.value.is_floating is not (kind in ("full", "row")):
                return None
            if kind == "full" and dtype != root.dtype and dtype.itemsize >= root.dtype.itemsize:
                return None
            if (kind in ("row", "labels") or name in ("x", "residual")) and None in view.map:
                return None
            # The op computes losses of narrow logits in float32.
            is_cast = kind == "full" and (not is_loss or root.dtype.itemsize == 8)
            dtype = root.dtype if is_cast else None
            operands[name] = read_of(view, *sizes.get(kind, (shape, places)), dtype)
        return operands, numbers

    # ---- what an op takes before its operand

    def _forms(
        self, pattern: Pattern, axis: int, root: Value, operands: _Operands, nodes
    ) -> Iterator[tuple]:
        """The calls to try, the one that replaces most first.

        Each has what the name begins with, the op, its operands, further results, and options.
        """
        plain = Read(root.shape, root.dtype)
        x, rest = operands.get("x"), {k: read for k, read in operands.items() if k != "x"}
        is_activation = pattern.axes == "none" and not rest
        by_neighbors = is_activation and _implementation.current() == "auto"
        if x is not None and by_neighbors and _is_of_convolution(x[0]):
            return
        if x is not None:
            for before, own, options in self._absorbed(pattern, axis, x, root, nodes):
                yield before, pattern.call, own | rest, [], options
            if "up" in rest and x[1] == rest["up"][1] == plain:
                if (both := joined(x[0], rest["up"][0])) is not None:
                    operand = {"x": (both, Read(both.shape, root.dtype))}
                    yield "split + ", pattern.call, operand, [], {}
            if x[0].node.name in ("add", "add_any") and not x[1].order:
                yield from self._of_sum(pattern, x[0], root, rest, nodes)
        if x is not None and by_neighbors:  # XLA fuses it, so that a kernel adds a pass
            near = (node.name for node in (x[0].node, *root.users))
            if not FUSIBLE.isdisjoint(near):
                return
        yield "", pattern.call, operands, [], {}

    def _of_sum(
        self, pattern: Pattern, total: Value, root: Value, rest: _Operands, nodes
    ) -> Iterator[tuple]:
        """The calls that take the operands of a sum."""
        a, b = total.node.inputs
        only = not total.is_used_outside(nodes)
        for one, row in total.with_row() if pattern.biased else ():
            if not only:
                self._note("bias + " + pattern.name, total, USED)
            # A root is of a norm, which comes later.
            elif "root" not in operations_of(row.before):
                operands = {"x": (one, Read(root.shape)), "bias": (row, ROW)}
                yield "bias + ", pattern.biased, operands, [], {}
        op = pattern.sum_of or pattern.residual
        if op is None or not a.shape == b.shape == root.shape:
            return
        same = a.dtype == b.dtype == root.dtype
        if not same or (pattern.sum_of and not only):
            reason = USED if same else f"the sum is {a.dtype}, the result {root.dtype}"
            self._note("add + " + pattern.name, total, reason)
            return
        more, summed = ([], {}) if only else ([total], {"return_sum": True})
        for one, other in ((a, b), (b, a)) if pattern.residual else ():
            if not one.is_used_outside(nodes | {total.node}):
                for before, own, options in self._before_sum(one):
                    reads = {**own, "residual": other, **rest}
                    yield f"{before}add + ", op, reads, more, options | summed
        yield "add + ", op, {"x": a, "residual": b, **rest}, more, summed

    def _before_sum(self, value: Value) -> Iterator[tuple[str, dict, dict]]:
        """What a norm takes with an array that it adds to the residual: a dropout and a bias."""
        drop = drop_at(value) if self.search.dropout else None
        if drop is not None and drop.key.shape == ():
            key, options = {"dropout_key": drop.key}, {"dropout_rate": drop.rate}
            for inner, row in drop.x.with_row() if drop.x.leads_only_to(value) else ():
                yield "bias + dropout + ", {"x": inner, "input_bias": (row, ROW), **key}, options
            yield "dropout + ", {"x": drop.x, **key}, options
        for inner, row in value.with_row():
            yield "bias + ", {"x": inner, "input_bias": (row, ROW)}, {}

    def _absorbed(self, pattern: Pattern, axis: int, x, root: Value, nodes) -> Iterator[tuple]:
        """What a softmax takes with its operand: a factor and a mask, most first."""
        if not pattern.scaled or x[0].is_used_outside(nodes):
            return

        def read(view: View, counts: bool | None = None) -> tuple[Value, Read]:
            return read_of(view, root.shape, root.long, None, counts)

        def fits(view: View) -> bool:
            return None not in view.map and view.value.dtype == root.dtype

        seen = View(x[0], x[1].order or root.identity)
        choices: list[tuple] = [("", seen, {})]
        if pattern.masked and (mask := masked(x[0], seen.map[axis])) is not None:
            operand, which = (seen.of(v).source() for v in mask[:2])
            choices.insert(0, ("where + ", operand, {"where": read(which, mask[2])}))
        elif pattern.masked and any(v.number is not None for *_, v, _ in x[0].selections()):
            reason = "the mask is not known, or may leave a row empty"
            self._note("where + " + pattern.name, x[0], reason)
        nodes = nodes | {x[0].node}
        for before, operand, where in choices:
            multiple = operand.value.multiple
            if multiple is not None and multiple[0] > 0:
                inner = operand.of(multiple[1]).source()
                if fits(inner) and not operand.value.is_used_outside(nodes):
                    options = {"scale": multiple[0]}
                    yield "scale + " + before, {"x": read(inner), **where}, options
            if where and fits(operand):
                yield before, {"x": read(operand), **where}, {}
