"""A model of the bytes that a region reads and writes on a GPU, plain and with calls of ops.

XLA fuses element-wise operations, views, and one reduction with the operations before it. A result
of a fusion is written, and read by each fusion that needs it. So a program is a list of *passes*:

* What inputs, reductions, walls and the program's results are is in memory. All else is computed
  where it is needed, as often as it is needed.
* Passes that read the same array and do not depend on each other are one, except that a sum over
  columns is a pass of its own.
* A pass that reads an array and the reductions of its rows is one with the pass of the reductions,
  if the rows are short, in a forward. Otherwise it reads the array again.
* A call of an op reads its operands once, and writes its results. What is next to it is a pass.

The backward is modeled by the equations that JAX would make: one for each operand that has a
gradient, a reduction for each broadcast, and a broadcast for each reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jax_fastops.autofuse._meaning import REDUCTIONS, VIEWS
from jax_fastops.autofuse._regions import PRODUCTS, Region, is_local
from jax_fastops.autofuse._rule import Rewrite
from jax_fastops.autofuse._value import Node, Value

_SHORT_ROW = 8192  # elements up to which XLA holds a row in one block
_CACHE = 32 << 20  # bytes of a sample that stay in the L2 cache
_SAME = VIEWS - {"convert_element_type", "bitcast_convert_type", "rev", "slice"}
_NOT_MODELED = PRODUCTS | {"custom_vjp_call", "custom_vjp_call_jaxpr", "custom_jvp_call"}
_PARTS = {"concatenate", "pad", "split"}  # of larger arrays: no broadcasts
_LINEAR = VIEWS | _PARTS | {"add", "add_any", "sub", "neg", "reduce_sum", "transpose"}


@dataclasses.dataclass(eq=False)
class _Array:
    size: int  # in bytes


@dataclasses.dataclass
class _Step:
    """An operation: "cheap", a reduction of each "row" or "column", or a "wall"."""

    kind: str
    reads: list[_Array]
    writes: list[_Array]
    backward: bool = False
    row: int = 0  # the elements of each sum


@dataclasses.dataclass(eq=False)
class _Pass:
    kind: str
    depth: int
    backward: bool
    reads: set[_Array]
    writes: list[_Array]
    sums: set[_Array]  # the reductions of rows that it computes
    row: int  # the elements of the longest row


def traffic(region: Region, fused: bool, step: bool) -> int:
    """The bytes that one form of a region reads and writes, forward or forward and backward."""
    return _bytes(*_Model(region, fused, step).program())


def more_bytes(region: Region, step: bool) -> tuple[int, int] | None:
    """The bytes with the calls and in the plain form, if the model speaks against the calls.

    They must save bytes. If the table measured just this call, because nothing is next to it that
    XLA would fuse, they may also take as many; but no element-wise forward, which XLA can fuse
    with a product. Where a match has products, the op keeps no whole arrays, and the table decides,
    as it does on a match with a function that has a rule of its own.
    """
    names = {node.equation.primitive.name for node in region.inner if not is_local(node)}
    if not names.isdisjoint(_NOT_MODELED):
        return None
    fused, plain = (traffic(region, form, step) for form in (True, False))
    simple = {"transpose", *REDUCTIONS}.isdisjoint(node.name for node in region.inner)
    if _has_neighbors(region) or (simple and not step):
        saves = fused < 0.98 * plain
    else:
        saves = fused <= 1.02 * plain
    return None if saves else (fused, plain)


def _has_neighbors(region: Region) -> bool:
    """Whether there is work next to a match, on arrays that are not small."""
    values = (*region.inputs, *(v for node in region.nodes for v in node.outputs))
    large = max(map(_size, values)) // 8
    next_to = (node for node in region.nodes if node not in region.inner)
    work = (n for n in next_to if n.name not in VIEWS or n.name == "convert_element_type")
    sizes = (max(map(_size, (*n.operands, *n.outputs))) for n in work)
    return len(region.rewrites) > 1 or any(size > large for size in sizes)


def _size(value: Value) -> int:
    if value.number is not None:
        return 0
    return value.size * getattr(value.dtype, "itemsize", 8)


class _Model:
    def __init__(self, region: Region, fused: bool, step: bool):
        self._region, self._fused, self._step = region, fused, step
        self._arrays: dict[Value, _Array] = {}
        self._gradients: dict[Value, list[_Array]] = {}
        self._steps: list[_Step] = []
        self._plain: set[Node] = set()
        self._results: set[_Array] = set()
        self._given: set[_Array] = set()
        self._has_gradient = {
            v for v, d in zip(region.inputs, region.differentiable, strict=True) if d
        }

    def program(self) -> tuple[list[_Step], set[_Array], set[_Array]]:
        """The operations, the arrays that are given, and the results."""
        region = self._region
        nodes, calls = region.needed(self._fused)
        plain = self._plain = set(nodes)
        self._given.update(map(self._array, region.inputs))
        self._results.update(map(self._array, region.outputs))
        # A call is where its first result is.
        first = {next(v for n in region.nodes for v in n.outputs if v in call.results): call
                 for call in calls}  # fmt: skip
        order: list[Node | Rewrite] = []
        for node in region.nodes:
            order += [first[v] for v in node.outputs if v in first]
            if node in plain:
                order.append(node)
        for item in order:
            self._forward(item)
        if self._step:
            for v in region.outputs:
                if v in self._has_gradient:
                    cotangent = _Array(_size(v))
                    self._given.add(cotangent)
                    self._gradients[v] = [cotangent]
            for item in reversed(order):
                self._backward(item)
            for v in region.inputs:
                if self._gradients.get(v):
                    self._results.add(self._gradient(v))
        return self._steps, self._given, self._results

    def _array(self, v: Value) -> _Array:
        while v.node in self._plain and _is_same(v.node):
            v = v.node.inputs[0]
        if v not in self._arrays:
            self._arrays[v] = _Array(_size(v))
        return self._arrays[v]

    def _list(self, values: Iterable[Value]) -> list[_Array]:
        return [self._array(v) for v in values if v.number is None]

    def _forward(self, item: Node | Rewrite) -> None:
        if isinstance(item, Rewrite):
            reads = self._list(item.reads)
            reads += reads[:1] * _reads_twice(item, 1)  # statistics, then the result
            self._steps.append(_Step("wall", reads, self._list(item.results)))
            before, after = item.reads, item.results
        else:
            reads = self._list(item.inputs)
            if item.name == "gather":  # an element for each index
                reads = reads[1:]
            if item.name == "scatter-add":
                reads *= _scatter_reads(item.outputs[0])
            if not _is_same(item):
                row = item.inputs[0].size // max(1, item.outputs[0].size) if item.inputs else 0
                self._steps.append(_Step(_kind(item), reads, self._list(item.outputs), row=row))
            before, after = item.inputs, item.outputs
        if not self._has_gradient.isdisjoint(before):
            self._has_gradient.update(v for v in after if v.is_floating)

    def _gradient(self, v: Value) -> _Array:
        """The sum of the gradients by all uses of a value."""
        parts = self._gradients[v]
        if len(parts) == 1:
            return parts[0]
        total = _Array(_size(v))
        self._steps.append(_Step("cheap", parts, [total], True))
        self._gradients[v] = [total]
        return total

    def _backward(self, item: Node | Rewrite) -> None:
        is_call = isinstance(item, Rewrite)
        outputs = item.results if is_call else item.outputs
        cotangents = [self._gradient(v) for v in outputs if self._gradients.get(v)]
        inputs = [v for v in (item.reads if is_call else item.inputs) if v in self._has_gradient]
        if not cotangents or not inputs:
            return
        if is_call:
            self._call_backward(item, cotangents, inputs)
            return
        for v in dict.fromkeys(inputs):
            passed_on = item.name in ("add", "add_any") or _is_same(item)
            if passed_on and _size(v) == cotangents[0].size:
                self._gradients.setdefault(v, []).append(cotangents[0])
                continue
            new = _Array(_size(v))
            kind, reads = "cheap", list(cotangents)
            if item.name not in _LINEAR and item.name != "gather":
                others = (u for u in item.inputs if u is not v or item.name not in ("mul", "div"))
                reads += self._list(others)
            if item.name == "gather":  # a scatter
                kind = "wall"
                reads *= _scatter_reads(v)
            elif v.size < item.outputs[0].size and item.name not in _PARTS:
                kind = _summed(item, v)
            self._steps.append(_Step(kind, reads, [new], True))
            self._gradients.setdefault(v, []).append(new)

    def _call_backward(self, call: Rewrite, cotangents: list[_Array], inputs: list[Value]) -> None:
        root = call.root
        kept = self._list(call.reads)
        shared = [v for v in inputs if v.size == root.size]
        if len(call.results) > 1 and call.results[-1].size == root.size:  # the sum before a norm
            kept = [a for a in kept if a.size < _size(root)] + [self._array(call.results[-1])]
        elif call.name.endswith("relu") and "norm" not in call.name:
            kept = [_Array(root.size // 8)]  # bits
        elif call.name.endswith("dropout"):
            kept = []
        elif call.name == "take":
            kept = kept[1:] + cotangents  # ids are sorted before
        if not ("add + " in call.name or len(call.results) > 1):
            shared = shared[:0]
        reads = cotangents + kept
        if _reads_twice(call, 2):
            reads += [a for a in reads if a.size >= _size(root)]
        new: dict[Value, _Array] = {v: _Array(_size(v)) for v in inputs}
        new |= dict.fromkeys(shared, new[shared[0]]) if shared else {}  # of both operands of a sum
        self._steps.append(_Step("wall", reads, list(dict.fromkeys(new.values())), True))
        for v, array in new.items():
            self._gradients.setdefault(v, []).append(array)


def _scatter_reads(sums: Value) -> int:
    """How often a scatter that adds might as well read its operand.

    Measured on one H200: XLA's takes 15 times as long as a copy in 16 bits, 2.3 times in float32.
    """
    return 8 if getattr(sums.dtype, "itemsize", 8) == 2 else 2


def _is_same(node: Node) -> bool:
    """Whether the result is the operand in another shape."""
    same = node.name in _SAME and len(node.inputs) == 1
    return same and _size(node.inputs[0]) == _size(node.outputs[0])


def _reads_twice(call: Rewrite, arrays: int) -> bool:
    """Whether the kernel of a norm reads its arrays from memory twice: statistics, result."""
    if "group_norm" not in call.name:
        return "batch_norm" in call.name
    x, read = call.operands["x"]
    return _size(x) // read.sizes[0] * arrays > _CACHE


def _kind(node: Node) -> str:
    if node.name.startswith("reduce_") and is_local(node):
        long = node.inputs[0].long
        return "row" if not long or long[-1] in node.params.get("axes", ()) else "column"
    return "cheap" if is_local(node) or node.name == "gather" else "wall"


def _summed(node: Node, operand: Value) -> str:
    """The kind of the gradient of an operand that is broadcast."""
    result = node.outputs[0]
    place: Sequence[int] = range(len(result.shape))
    if node.name == "broadcast_in_dim":
        place = node.params["broadcast_dimensions"]
    return "column" if result.long[-1] in [place[i] for i in operand.long] else "row"


# ---- passes --------------------------------------------------------------------------------------


def _bytes(steps: Sequence[_Step], given: set[_Array], results: set[_Array]) -> int:
    in_memory = given | results
    for step in steps:
        if step.kind == "wall":
            in_memory.update((*step.reads, *step.writes))
        elif step.kind != "cheap":
            in_memory.update(step.writes)
    # For each array, those in memory that it is computed from.
    sources: dict[_Array, set[_Array]] = {a: {a} for a in in_memory}
    for step in steps:
        reads = set[_Array]().union(*(sources.get(a, set()) for a in step.reads))
        for array in step.writes:
            sources.setdefault(array, reads)
    large = max((a.size for a in in_memory), default=0) // 8
    depth: dict[_Array, int] = dict.fromkeys(given, 0)
    passes: list[_Pass] = []
    total = 0
    for step in steps:
        if step.kind == "wall":
            total += sum(a.size for a in (*step.reads, *step.writes))
            after = 1 + max((depth.get(a, 0) for a in step.reads), default=0)
            depth.update(dict.fromkeys(step.writes, after))
            continue
        writes = [a for a in step.writes if a in in_memory and a not in given]
        if not writes:
            continue
        reads = set[_Array]().union(*(sources.get(a, set()) for a in step.reads))
        after = 1 + max((depth.get(a, 0) for a in reads), default=0)
        own = _Pass(step.kind, after, step.backward, reads, writes, set(), 0)
        joined = next((p for p in passes if _is_one(p, own, large, depth)), None)
        if joined is None:
            passes.append(joined := own)
        else:
            joined.reads |= reads
            joined.writes += writes
        if step.kind == "row":
            joined.sums.update(writes)
            joined.row = max(joined.row, step.row)
        depth.update(dict.fromkeys(writes, joined.depth))
    for one in passes:
        elsewhere = results.union(*(p.reads for p in passes if p is not one))
        elsewhere.update(a for s in steps if s.kind == "wall" for a in s.reads)
        total += sum(a.size for a in one.reads if a not in one.writes)
        total += sum(a.size for a in one.writes if a in elsewhere)
    return total


def _is_one(done: _Pass, new: _Pass, large: int, depth: dict[_Array, int]) -> bool:
    """Whether two passes are one."""
    same = {a for a in done.reads & new.reads if a.size > large}
    if not same or done.backward != new.backward:
        return False
    if (done.kind == "column") != (new.kind == "column"):
        return False
    if done.depth == new.depth:
        return True
    short = not new.backward and done.row <= _SHORT_ROW
    ready = all(a in done.writes or depth.get(a, 0) < done.depth for a in new.reads)
    return short and ready and not done.sums.isdisjoint(new.reads)
