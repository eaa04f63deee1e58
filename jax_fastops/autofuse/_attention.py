"""Attention: a product, a softmax, perhaps a dropout, and a second product.

The *letters* are the dimensions of the weights: ``column`` for keys, and one more, ``features``. A
view gives for each letter the dimension of an array, or ``None``. An array without the letter of a
query is a key or a value; several letters of queries are positions and heads that share a key.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fastops import _implementation
from jax_fastops._dispatch import lowering_platform
from jax_fastops._settings import own_code
from jax_fastops.attention import attention
from jax_fastops.autofuse._bands import Band, added_band, band, cases, parts
from jax_fastops.autofuse._dropout import Drop, drop_at
from jax_fastops.autofuse._masks import is_fill, no_row_is_empty
from jax_fastops.autofuse._match import matched
from jax_fastops.autofuse._pattern import MAX_RANK, PATTERNS, formulas
from jax_fastops.autofuse._rule import Read, Rewrite, Rule, why_composed
from jax_fastops.autofuse._value import USED, Map, Node, Value, View, compose

_NEAR = {  # operations on scores that the op has not
    "tanh": "the op has no softcap",
    "mul": "scores are multiplied by an array",
    "div": "scores are divided by an array",
}
_LARGEST_BIAS = 1e4  # a larger number could make up for that of a mask


class _Near(Exception):
    """Why something that is nearly attention stays: a value and the reason."""


class AttentionRule(Rule):
    """``attention``."""

    def match(self, value: Value) -> Rewrite | None:
        root = value.source(narrowing=True)
        product = value if value.node.name == "dot_general" else root.value
        cast = value.node.name == "convert_element_type"  # of a product in a wider dtype
        if product.node.name != "dot_general" or not (value is product or cast):
            return None
        if not value.is_plain or 0 in value.shape or None in root.map:
            return None
        for weights in (0, 1):
            try:
                if (form := _form(product.node, weights)) is not None:
                    return self._rewritten(form, value, root)
            except _Near as near:
                return self.miss("attention", *near.args, is_part=True)
        return None

    def _rewritten(self, form: _Form, value: Value, root: View) -> Rewrite | None:
        dtype, drop = form.value.value.dtype, form.drop
        if value.dtype != dtype:
            if len(root.passed) > 1:  # the product itself may match
                return None
            raise _Near(value, f"the result is {value.dtype}, the values are {dtype}")
        inner = {*root.passed, *form.inner}
        nodes = {v.node for v in inner}
        for v in inner - {value}:
            if v.is_used_outside(nodes):
                raise _Near(v, USED)
            if v.is_narrower_than(dtype):
                raise _Near(v, f"{v.dtype} is narrower than the result's {dtype}")
        if drop is not None and not self.search.dropout:
            raise _Near(value, "it has dropout: pass dropout=True; its masks are others")
        letters = _Letters.of(form)
        if drop is not None:
            shared = {i for i, place in enumerate(drop.mask.map) if place is None}
            if shared & {letters.row, form.column}:
                raise _Near(value, "the mask of its dropout is shared by queries or keys")
            if shared and self.search.dropout != "independent":
                reason = "the mask of its dropout is shared by batch or heads"
                raise _Near(value, f"{reason}: pass dropout='independent'")
        reads: dict[str, tuple[Value, Read]] = {
            "query": letters.read(form.query, "query", dtype),
            "key": letters.read(form.key, "key", dtype),
            "value": letters.read(form.value, "key", dtype),
        }
        for i, (view, keep) in enumerate(form.masks):
            reads[f"mask{i}"] = letters.read(view, "mask", counts=keep)
        for i, (view, _) in enumerate(form.biases):
            reads[f"bias{i}"] = letters.read(view, "mask")
        name, options = "attention", letters.options(form.result_of(root.map))
        if drop is not None:
            name = "attention + dropout"
            reads["dropout_key"] = drop.key, Read(())
            options["dropout_rate"] = drop.rate
        options |= form.options()
        rewrite = self.search.rewrite(name, _attention, [value], reads, options, frozenset(inner))
        # Products in the op's own layout gain nothing on a GPU. The softmax may match by itself.
        if isinstance(rewrite, Rewrite) and _implementation.current() == "auto":
            if lowering_platform() == "cuda" and (reason := why_composed(rewrite.call)):
                rewrite = reason
        if isinstance(rewrite, str):
            return self.miss(name, value, rewrite, is_part=True)
        note = "a query without keys gives 0" if form.may_be_empty() else ""
        return dataclasses.replace(rewrite, note=note)


@own_code()
def _attention(
    query, key, value, *, batch, heads, shape, turn, bias_scales, dropout_key=None, **more
):
    """Attention in the order of dimensions of a program.

    ``batch`` and ``heads`` are sizes that are one dimension of the op each, ``shape`` are those of
    the result before the permutation ``turn``.
    """

    def merged(x):
        sizes, at, result = list(x.shape), 0, []
        for group in (batch, heads):
            own = slice(at, at + len(group))
            if any(n != 1 for n in sizes[own]):
                sizes[own] = group
            result.append(math.prod(sizes[own]))
            at += len(group)
        return jnp.broadcast_to(x, sizes).reshape(*result, *sizes[at:])

    mask = bias = None
    for name in [name for name in more if name.startswith("mask")]:
        x = merged(more.pop(name))
        mask = x if mask is None else mask & x
    for i, scale in enumerate(bias_scales):
        x = merged(more.pop(f"bias{i}"))
        x = x if scale == 1 else x * scale
        bias = x if bias is None else bias + x
    y = attention(query, key, value, bias, mask, dropout_key=dropout_key, **more)
    return y.reshape(shape).transpose(turn)


# ---- the letters of the op -----------------------------------------------------------------------


class _Letters(NamedTuple):
    """Which letters are the batch, the queries, the heads, and the keys of attention."""

    batch: tuple[int, ...]
    row: int | None
    heads: tuple[int, ...]  # the heads of keys, if there are any, then those that share one
    column: int
    features: int
    sizes: tuple[int, ...]
    kv_heads: int

    @staticmethod
    def of(form: _Form) -> _Letters:
        place = form.query.map
        others = [i for i in range(form.features) if i != form.column]
        own = sorted((i for i in others if form.key.map[i] is not None), key=place.__getitem__)
        rows = [i for i in others if form.key.map[i] is None]
        sizes = (*form.sizes, form.query.size(form.features))

        def known(i):  # a mask depends on positions rather than on heads
            return sum(v.map[i] is not None for v, _ in (*form.masks, *form.biases)), sizes[i]

        row = form.row if form.row in rows else max(rows, key=known, default=None)
        groups = sorted((i for i in rows if i != row), key=place.__getitem__)
        shared = [i for i in own if form.key.size(i) != sizes[i]]
        if len(shared) > 1 or (shared and groups):
            raise _Near(form.key.value, "heads are shared in two ways")
        after = row is not None and own and place[own[-1]] > place[row]
        heads = shared or (own[-1:] if len(own) > 1 or after else [])
        batch = tuple(i for i in own if i not in heads)
        kv_heads = math.prod(form.key.size(i) for i in heads)
        return _Letters(batch, row, (*heads, *groups), form.column, form.features, sizes, kv_heads)

    def _sizes(self, letters: Sequence[int | None]) -> tuple[int, ...]:
        return tuple(1 if i is None else self.sizes[i] for i in letters)

    def read(self, view: _Operand | View, role: str, dtype=None, counts=None) -> tuple[Value, Read]:
        """How the op reads an array: as queries, as keys or values, or as a mask."""
        batch, heads = self.batch, self.heads
        if role == "mask":
            order = (*batch, *heads, self.row, self.column)
            has = [None if i is None or view.map[i] is None else i for i in order]
            sizes = self._sizes(has)
        else:
            at = self.row if role == "query" else self.column
            order = (*batch, at, *heads, self.features)
            count = math.prod(self._sizes(heads)) if role == "query" else self.kv_heads
            ends = self._sizes([at])[0], count, self.sizes[self.features]
            sizes = (math.prod(self._sizes(batch)), *ends)
        shown = [(i, view.map[i]) for i in order if i is not None and view.map[i] is not None]
        pairs = itertools.pairwise(shown)
        joined = [i for (i, place), (j, other) in pairs if place == other and j == i + 1]
        places = tuple(dict.fromkeys(place for _, place in shown))
        if len(places) + len(joined) < len(shown):
            raise _Near(view.value, "batch and heads are merged in another order")
        turned = () if places == view.value.identity else places
        return view.value, Read(sizes, dtype, counts, turned)

    def options(self, result: Map) -> dict[str, Any]:
        """The options of the call. ``result`` are the letters of its result."""
        order = [i for i in (*self.batch, self.row, *self.heads, self.features) if i is not None]
        return dict(
            batch=self._sizes(self.batch),
            heads=self._sizes(self.heads),
            shape=self._sizes(order),
            turn=tuple(map(order.index, result)),
        )


# ---- what a program computes ---------------------------------------------------------------------


class _Operand(NamedTuple):
    """A view of queries, keys or values, and the number that they are multiplied with."""

    value: Value
    map: Map
    factor: float = 1.0

    @property
    def is_apart(self) -> bool:
        """Whether each dimension is that of one letter."""
        places = [place for place in self.map if place is not None]
        return len(places) == len(set(places))

    def size(self, letter: int) -> int:
        place = self.map[letter]
        return 1 if place is None else self.value.sizes[place]


class _Scores(NamedTuple):
    """Scores of attention: the product before them, and what is done with it."""

    product: View
    scale: float
    inner: tuple[Value, ...]
    masks: tuple[tuple[View, bool], ...] = ()
    biases: tuple[tuple[View, float], ...] = ()
    near: tuple[Value, str] | None = None  # why they are no scores of the op


@dataclasses.dataclass
class _Form:
    """Attention in a program."""

    sizes: tuple[int, ...]  # of the letters
    column: int
    query: _Operand
    key: _Operand
    value: _Operand
    result: Map  # the letters of the second product, where a merged one is the first of its two
    inner: tuple[Value, ...]
    scale: float
    drop: Drop | None
    logits: Any  # their dtype
    masks: list[tuple[View, bool]] = dataclasses.field(default_factory=list)
    biases: list[tuple[View, float]] = dataclasses.field(default_factory=list)
    row: int | None = None  # the letter of the queries in the band
    low: float = -math.inf
    high: float = math.inf
    merged: int | None = None  # a letter that is one dimension of products with the next one

    def result_of(self, map_: Map) -> Map:
        """The letters of a view of the result."""
        letters = compose(map_, self.result)
        return tuple(j for i in letters for j in ((i, i + 1) if i == self.merged else (i,)))

    @property
    def features(self) -> int:
        return len(self.sizes)

    def _lengths(self) -> tuple[int, int]:
        return 1 if self.row is None else self.sizes[self.row], self.sizes[self.column]

    def add_mask(self, view: View, keep: bool) -> None:
        for part, sign in parts(view, keep):
            if not self._take(band(part, self.column, sign)):
                self.masks.append((part.source(), sign))

    def add_bias(self, view: View, factor: float) -> None:
        """Adds a bias, or the mask that it is."""
        found = cases(view)
        if found is not None:
            mask, *numbers = found
            off, on = (float(number) * factor for number in numbers)
            for zero, fill, keep in ((on, off, True), (off, on, False)):
                if zero == 0 and is_fill(fill, self.logits):
                    return self.add_mask(mask, keep)
            if max(off, on) >= _LARGEST_BIAS:
                raise _Near(view.value, f"{max(off, on):g} is added to scores, which may be hidden")
        if not self._take(added_band(view, self.column, factor, self.logits)):
            self.biases.append((view.source(), factor))

    def _take(self, found: Band | None) -> bool:
        """Whether the op has an option for the band, together with those before."""
        if found is None or self.row not in (None, found.row) or found.low > 0 or found.high < 0:
            return False
        if self.key.map[found.row] is not None:
            return False
        self.row = found.row
        self.low, self.high = max(self.low, found.low), min(self.high, found.high)
        return True

    def options(self) -> dict[str, Any]:
        rows, columns = self._lengths()
        options: dict[str, Any] = dict(
            scale=self.scale,
            is_causal=self.high == 0,
            bias_scales=tuple(factor for _, factor in self.biases),
        )
        ends = self.low > 1 - rows, 0 < self.high < columns - 1
        if any(ends):
            before = int(-self.low) if ends[0] else rows
            after = int(self.high) if self.high < columns else columns
            options["local_window_size"] = before, after
        return options

    def may_be_empty(self) -> bool:
        """Whether a query may have no keys."""
        rows, columns = self._lengths()
        if self.row is not None and rows - 1 + self.low > columns - 1:
            return True
        if self.biases and (self.masks or self.row is not None):
            for bias, factor in self.biases:  # (1 - mask) * -1e9
                multiple = bias.value.multiple
                if multiple is not None and multiple[0] * factor <= -1e4:
                    return True
        if not self.masks:
            return False
        (view, keep), *others = self.masks
        along = view.map[self.column]
        if others or self.row is not None or along is None:
            return True
        return not no_row_is_empty(view.value, view.value.long[along], keep, None)


def _form(node: Node, at: int) -> _Form | None:
    """The attention of which a product is the last step, with the weights as operand ``at``."""
    weights, values = node.inputs[at], node.inputs[1 - at]
    if weights.dtype != values.dtype or not weights.is_static or 0 in weights.shape:
        return None
    if (second := _letters_of_product(node, at)) is None:
        return None
    letters = _Values(*second, weights.sizes, weights.identity)
    for given in filter(None, (_with_heads(letters, values), letters)):
        if (form := _form_of(node, weights, values, given)) is not None:
            return form
    return None


class _Values(NamedTuple):
    """The second product: letters and dimensions."""

    column: int
    map: Map  # of the values
    result: Map  # the letters of the product's dimensions
    sizes: tuple[int, ...]  # of the letters
    weights: Map
    merged: int | None = None


def _with_heads(letters: _Values, values: Value) -> _Values | None:
    """The letters with heads and batch apart, if a reshape before the product merges them."""
    view = _before(View(values, letters.map), values.dtype, False)[-1]
    node, sizes = view.value.node, view.value.sizes
    if node.name != "reshape":
        return None
    own = node.inputs[0].sizes
    at = next((i for i, (m, n) in enumerate(zip(own, sizes, strict=False)) if m != n), len(own))
    if len(own) != len(sizes) + 1 or at not in letters.map[:-1] or own[at + 2 :] != sizes[at + 1 :]:
        return None
    letter = letters.map.index(at)
    if letter == letters.column or view.map[letter] != at:
        return None

    def twice(map_: Map) -> Map:
        return (*map_[: letter + 1], *map_[letter:])

    return _Values(
        column=letters.column + (letters.column > letter),
        map=twice(letters.map),
        result=tuple(i + (i > letter) for i in letters.result),
        sizes=(*letters.sizes[:letter], *own[at : at + 2], *letters.sizes[letter + 1 :]),
        weights=twice(letters.weights),
        merged=letter,
    )


def _reshaped(view: View) -> View | None:
    """The operand of a reshape that merges two dimensions, or makes two of one.

    A dimension that stands for two letters is that of both of them, one after the other.
    """
    node, sizes = view.value.node, view.value.sizes
    if node.name != "reshape":
        return None
    own, map_ = node.inputs[0].sizes, list(view.map)
    wide, narrow = (own, sizes) if len(own) > len(sizes) else (sizes, own)
    at = next(
        (i for i, (m, n) in enumerate(zip(wide, narrow, strict=False)) if m != n), len(narrow)
    )
    merged = (*wide[:at], math.prod(wide[at : at + 2]), *wide[at + 2 :])
    if len(wide) != len(narrow) + 1 or merged != narrow:
        return None
    if wide is own:  # it merges them
        places = [i for i, place in enumerate(map_) if place == at]
        if len(places) != 2:
            return None
        map_ = [p if p is None or p <= at else p + 1 for p in map_]
        map_[places[1]] = at + 1
    else:
        if at not in map_ or map_[map_.index(at) + 1 :][:1] != [at + 1]:
            return None
        map_ = [p if p is None or p <= at else p - 1 for p in map_]
    return View(node.inputs[0], tuple(map_))


def _form_of(node: Node, weights: Value, values: Value, given: _Values) -> _Form | None:
    column = given.column
    view = View(weights, given.weights).source(narrowing=True)
    inner = view.passed
    if (step := _reshaped(view)) is not None:
        view = step.source(narrowing=True)
        inner = (*inner, *view.passed)
    drop = drop_at(view.value, shared=True)
    dropped = view.value
    if drop is not None:
        value = drop.x
        while value is not dropped and len(value.users) == 1 and not value.is_result:
            inner = (*inner, value)
            value = value.users[0].outputs[0]
        mask = View(drop.mask.value, compose(view.map, drop.mask.map))
        drop = drop._replace(mask=mask)
        view = View(drop.x, view.map).source(narrowing=True)
        inner = (*inner, *view.passed)
    if (found := _logits(view, column)) is None:
        return None
    logits, masks, between = found
    for scores in _scores(logits):
        if (operands := _operands(scores.product, column, values, given.map)) is None:
            continue
        if scores.near is not None:
            raise _Near(*scores.near)
        if drop is not None and drop.key.shape != ():
            raise _Near(dropped, "its dropout has several keys, as under vmap")
        query, key, value = operands
        _check(scores.product.value.node, value)
        _check(node, value)
        form = _Form(
            given.sizes,
            column,
            query,
            key,
            value,
            given.result,
            (*inner, *between, *scores.inner),
            scores.scale * query.factor * key.factor,
            drop,
            logits.value.dtype,
            merged=given.merged,
        )
        for mask, keep in (*masks, *scores.masks):
            form.add_mask(mask, keep)
        for bias, factor in scores.biases:
            form.add_bias(bias, factor)
        return form
    return None


def _check(product: Node, value: _Operand) -> None:
    """Checks that the op computes a product as precisely as the program asks."""
    precision = product.params["precision"]
    for each in precision if isinstance(precision, tuple) else (precision,):
        # Products of 16-bit numbers are exact, and their sums are float32.
        sums = isinstance(each, lax.Precision) or str(getattr(each, "name", "")).endswith("_F32")
        narrow = value.value.dtype.itemsize == 2 and sums
        if each not in (None, lax.Precision.DEFAULT) and not narrow:
            raise _Near(product.outputs[0], "the product has a precision of its own")
    if product.params.get("out_sharding") is not None:
        raise _Near(product.outputs[0], "the product has a sharding of its own")


def _free(node: Node) -> list[dict[int, int]]:
    """For each operand of a product the dimensions in the result, by its own dimensions."""
    contracted, batch = node.params["dimension_numbers"]
    result, at = [], len(batch[0])
    for x, own, shared in zip(node.inputs, contracted, batch, strict=True):
        places = {d: i for i, d in enumerate(shared)}
        for d in range(len(x.shape)):
            if d not in own and d not in shared:
                places[d] = at
                at += 1
        result.append(places)
    return result


def _letters_of_product(node: Node, at: int) -> tuple[int, Map, Map] | None:
    """The letter of the keys, the values' dimensions by letters, and the letters of the result."""
    contracted, batch = node.params["dimension_numbers"]
    weights, values = node.inputs[at], node.inputs[1 - at]
    pairs = list(zip(contracted[at], contracted[1 - at], strict=True))
    summed = [(i, j) for i, j in pairs if i in weights.long]
    of_weights, of_values = (_free(node)[i] for i in (at, 1 - at))
    features = [d for d in of_values if d in values.long and d not in batch[1 - at]]
    if len(summed) != 1 or len(features) != 1:
        return None
    both = dict([*zip(batch[at], batch[1 - at], strict=True), *summed])
    map_: list[Any] = [both.get(d) for d in weights.long]
    map_ = [None if d is None else values.long.index(d) for d in (*map_, features[0])]
    letters = {of_weights[d]: i for i, d in enumerate(weights.long) if d in of_weights}
    letters[of_values[features[0]]] = len(weights.long)
    result = tuple(letters[d] for d in node.outputs[0].long)
    return weights.long.index(summed[0][0]), tuple(map_), result


def _logits(view: View, column: int) -> tuple[View, list[tuple[View, bool]], Any] | None:
    """The array whose softmax over a letter a view shows, its masks, and the values between."""
    value, axis = view.value, view.map[column]
    if value.node.name not in ("div", "mul", "exp", "select_n") or len(value.long) > MAX_RANK:
        return None
    if axis is None or set(view.map) != set(value.identity) or not value.is_floating:
        return None
    around = {v.node.name for v in value.before}
    for pattern in PATTERNS:
        if not pattern.needs <= around or not pattern.name.startswith("softmax"):
            continue
        n = pattern.count(value.sizes, axis)
        first, *_ = formulas(pattern, value.dtype, len(value.long), axis, n)
        if (state := matched(first, value)) is not None:
            leaves = (state.leaves[i] for i in range(len(pattern.leaves)))
            logits, *masks = (View(x.value, compose(view.map, x.map)) for x in leaves)
            return logits, [(mask, True) for mask in masks], state.inner
    return None


def _scores(view: View, scale: float = 1.0, depth: int = 12) -> Iterator[_Scores]:
    """What a view may be as scores: a product with a scale, with masks and biases."""
    if not depth:  # a sum of sums has many
        return
    view = view.source(narrowing=True)
    value, node = view.value, view.value.node
    if None in view.map or set(view.map) != set(value.identity):
        return
    if (step := _reshaped(view)) is not None:
        for found in _scores(step, scale, depth - 1):
            yield found._replace(inner=(*view.passed, *found.inner))
    if node.name == "dot_general":
        yield _Scores(view, scale, view.passed)

    def before(x: Value, factor: float = 1.0) -> Iterator[_Scores]:
        for found in _scores(view.of(x), scale * factor, depth - 1):
            yield found._replace(inner=(*view.passed, *found.inner))

    if (terms := value.terms) is not None and len(terms) == 1:
        yield from before(terms[0][1], terms[0][0])
    elif terms is not None:
        for (own, x), (other, bias) in (terms, terms[::-1]):
            for found in before(x, own):
                yield found._replace(biases=(*found.biases, (view.of(bias), scale * other)))
    for mask, x, fill, keep in value.selections():
        if fill.number is None or x.number is not None or mask.dtype != bool:
            continue
        number = float(fill.number)
        is_masked = is_fill(number * scale, value.dtype)
        reason = f"the mask gives {number:g}, not a large negative number"
        for found in before(x):
            yield found._replace(
                masks=(*found.masks, (view.of(mask), keep)),
                near=found.near or (None if is_masked else (value, reason)),
            )
    if node.name in _NEAR and terms is None:
        for x in node.inputs[: 1 + (node.name == "mul")]:
            for found in before(x):
                yield found._replace(near=(value, _NEAR[node.name]))


# ---- queries, keys and values --------------------------------------------------------------------


def _operands(
    product: View, column: int, values: Value, of_values: Map
) -> tuple[_Operand, _Operand, _Operand] | None:
    """Queries, keys and values, as they are before the program scales, casts or repeats them."""
    node, letters = product.value.node, len(product.map)
    contracted, _ = node.params["dimension_numbers"]
    views = []
    for x, places, own in zip(node.inputs, _free(node), contracted, strict=True):
        summed = [d for d in own if d in x.long]
        if len(summed) != 1:
            return None
        of_result = {place: d for d, place in places.items()}
        dims = [of_result.get(product.value.long[place]) for place in product.map]
        views.append(
            View(x, tuple(None if d is None else x.long.index(d) for d in (*dims, summed[0])))
        )
    views = sorted(views, key=lambda v: v.map[column] is not None)
    query, key = views
    if query.map[column] is not None or key.map[column] is None:
        return None
    dtype = values.dtype
    queries = [
        x
        for x in _before(query, dtype, True)
        if x.is_apart and all(i == column or x.map[i] is not None for i in range(letters))
    ]
    own = _before(View(values, of_values), dtype, False)
    for one in reversed(_before(key, dtype, True)):
        for other in reversed(own):
            same = all(one.size(i) == other.size(i) for i in range(letters))
            if one.is_apart and other.is_apart and same and one.map[column] is not None:
                if not queries:
                    return None
                if one.size(letters) != other.size(letters):
                    raise _Near(values, "the values have another size than the keys")
                return queries[-1], one, other
    if any(x.dtype.itemsize > dtype.itemsize for x in node.inputs):
        raise _Near(product.value, f"queries or keys are wider than the values' {dtype}")
    return None


def _before(view: View, dtype: Any, scaled: bool) -> list[_Operand]:
    """The arrays of a dtype that an operand is a view or a multiple of, the nearest first.

    The last ones may have fewer heads, which the program repeats.
    """
    found: list[_Operand] = []
    factor, first = 1.0, view.value
    while view.map[-1] is not None and view.value.dtype.itemsize >= dtype.itemsize:
        value = view.value
        if value.dtype == dtype and value.is_array:
            found.append(_Operand(value, view.map, factor))
        multiple = value.multiple if scaled else None
        step = value.view(True)
        if step is not None:
            view = View(step.value, compose(view.map, step.map))
        elif multiple is not None:
            factor *= multiple[0]
            view = view.of(multiple[1])
        elif (before := _reshaped(view) or _repeated(view)) is not None:
            view = before
        else:
            break
    if not found and first.dtype.itemsize < dtype.itemsize:
        found.append(_Operand(first, view.map, 1.0))
    return found


def _repeated(view: View) -> View | None:
    """The array whose heads a reshape of a broadcast array repeats."""
    node, sizes = view.value.node, view.value.sizes
    wide = node.inputs[0] if node.name == "reshape" else view.value
    if len(wide.sizes) != len(sizes) + 1:
        return None
    source = wide.source()
    for i in range(len(sizes)):
        before = (*range(i + 1), *range(i + 2, len(wide.sizes)))
        repeats = source.map[i + 1] is None and source.map[i] is not None
        merged = (*wide.sizes[:i], wide.sizes[i] * wide.sizes[i + 1], *wide.sizes[i + 2 :])
        if repeats and merged == sizes and i in view.map[:-1]:
            return View(source.value, compose(view.map, compose(before, source.map)))
    return None
