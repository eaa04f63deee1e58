"""Dense layers: a product, a bias and an activation as one call, where nothing is differentiated.

The rule of the patterns notes the activations. What an activation takes without a look at the
product is decided first. It stays the derivative of the call, so that no step changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jax_fastops import _compat, _dispatch, _explain
from jax_fastops._implementation import Chosen, use_chosen
from jax_fastops._op import jvp_of, ops
from jax_fastops.autofuse import _tune
from jax_fastops.autofuse._graph import Graph, bind
from jax_fastops.autofuse._meaning import VIEWS
from jax_fastops.autofuse._regions import Region, is_local, nodes_of
from jax_fastops.autofuse._rule import (
    ROW,
    Call,
    Miss,
    Read,
    Rewrite,
    Search,
    inlined,
    takes_kernel,
    why_composed,
)
from jax_fastops.autofuse._value import NO_EQUATION, Node, Value, values_between
from jax_fastops.dense_act import dense_act

# ---- the call ------------------------------------------------------------------------------------


class Without(NamedTuple):
    """The form of a layer without its call: its operations, then perhaps the call of an op.

    Attributes:
      before: the program from the operands of the layer to those of the op, or to the result.
      own: the call of the op.
      program: its program, as the region of the activation chose it.
      chosen: this choice.
    """

    before: Any
    own: Call | None
    program: Any
    chosen: Chosen | None

    def __call__(self, *operands: jax.Array) -> jax.Array:
        found = jax.core.eval_jaxpr(self.before.jaxpr, self.before.consts, *operands)
        if self.own is None:
            return found[0]
        types = [jax.typeof(x) for x in found]
        if not _explain.is_on() and getattr(self.program, "in_avals", None) == types:
            return inlined(self.program)(*found)[0]
        with use_chosen(self.chosen):
            return self.own(*found)[0]


class DenseCall:
    """The call of a layer, whose derivative is that of ``without``. Equal layers have one call."""

    def __init__(self, activation: Any, without: Without, shapes: Sequence[tuple[int, ...]]):
        def layer(*operands):
            return dense_act(*operands, activation=activation)

        def plain(*operands):
            pairs = zip(operands, shapes, strict=True)
            return [without(*(x.reshape(shape) for x, shape in pairs))]

        def rule(primals, tangents):
            pair = jvp_of(plain, primals, tangents)
            shape = (*primals[0].shape[:-1], primals[1].shape[-1])
            return tuple(y.reshape(shape) for (y,) in pair)

        self.without: Without = without
        self._layer: Any = jax.custom_jvp(layer)
        self._layer.defjvp(rule, symbolic_zeros=True)

    def __call__(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return self._layer(*([x, kernel] if bias is None else [x, kernel, bias]))


# The calls of layers, by what they compute and the form without them.
_calls: dict[tuple[Any, ...], DenseCall] = {}


# ---- layers of a program -------------------------------------------------------------------------


class Layer(Region):
    """A dense layer. Its plain form is the one without the call, perhaps with the call ``own``."""

    def __init__(
        self, nodes: list[Node], root: Value, reads: dict[str, Value], own: Rewrite | None,
        chosen: Chosen | None,
    ):  # fmt: skip
        super().__init__(nodes, [] if own is None else [own], set(nodes), set())
        self.root, self.reads, self.own, self.chosen = root, reads, own, chosen
        self.rewrite: Rewrite | None = None

    @functools.cached_property
    def key(self) -> str:
        return f"dense_act {Region.key.func(self)} {self.chosen}"

    def __str__(self) -> str:
        return "" if self.rewrite is None else self.rewrite.name

    def call(self, activation: str, search: Search) -> DenseCall:
        """The call, which other layers may have."""
        own, places = self.own, tuple([self.inputs.index(v) for v in self.reads.values()])
        types = tuple([v.aval for v in self.reads.values()])
        context = types, jax.sharding.get_abstract_mesh(), _dispatch.lowering_platform()
        accuracies = [node.params.get("accuracy") for node in self.nodes]
        key = self.structure, str(accuracies), self.chosen, activation, places, context
        if (call := _calls.get(key)) is None:
            program = None
            if own is not None:
                program = search.program(own.call, own.reads, chosen=self.chosen)
            without = Without(self._before(), own and own.call, program, self.chosen)
            if len(_calls) >= 256:
                _calls.clear()
            call = DenseCall(activation, without, [v.shape for v in self.reads.values()])
            _calls[key] = call
        return call

    def _before(self) -> Any:
        """The program from the operands to those of the call of the activation."""
        wanted = [self.root] if self.own is None else list(self.own.reads)

        def run(*operands):
            arrays = dict(zip(self.reads.values(), operands, strict=True))

            def read(v: Value):
                if v.node is NO_EQUATION and v not in arrays:
                    return jnp.full(v.shape, v.number, v.dtype)
                if v not in arrays:
                    results = bind(v.node.equation, [read(u) for u in v.node.operands])
                    arrays.update(zip(v.node.outputs, results, strict=True))
                return arrays[v]

            return [read(v) for v in wanted]

        return jax.make_jaxpr(run)(*[_compat.struct_of(v.aval) for v in self.reads.values()])

    def function(self, program: Callable[[Rewrite], Any] | None) -> Callable[..., list]:
        def run(*args: jax.Array) -> list[jax.Array]:
            assert self.rewrite is not None
            call: Any = self.rewrite.call.op
            arrays = dict(zip(self.inputs, args, strict=True))
            operands = [arrays[v] for v in self.reads.values()]
            if program is None:
                return [call.without(*operands)]
            traced = program(self.rewrite)
            return jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *operands)

        return run


def layers(
    graph: Graph,
    positions: Mapping[Node, int],
    search: Search,
    rewrites: Sequence[Rewrite],
    chosen: Callable[[Rewrite], Chosen | None],
) -> list[Layer]:
    """The layers whose call takes the kernel, where these matches are replaced.

    Arrays that may be spread over devices have none: a kernel of a product would gather columns.
    """
    if not search.activations or graph.has_contexts or _tune.why_not():
        return []
    if not ops()["dense_act"].supports(_dispatch.lowering_platform()):
        return []
    owners = {v.node: rewrite for rewrite in rewrites for v in rewrite.inner}
    of_root = {rewrite.root: rewrite for rewrite in rewrites}

    def is_fused(value: Value) -> bool:
        """Whether XLA fuses the value with what follows it in a forward, or a call computes it."""
        for user in value.users:
            if (rewrite := owners.get(user)) is not None:
                choice = chosen(rewrite)
                forward = None if choice is None else choice.forward
                takes = takes_kernel(rewrite.call)[0] if forward is None else forward
                if not takes or value not in rewrite.reads:
                    return True
            elif user.name in _SAME and user.outputs[0].size == value.size:
                if is_fused(user.outputs[0]):
                    return True
            elif is_local(user):
                return True
        return False

    found: list[Layer] = []
    for root, (name, operand, read) in search.activations.items():
        reads = None if is_fused(root) else _operands(root, operand, read)
        nodes = None if reads is None else nodes_of([root], reads.values())
        own = of_root.get(root)
        if reads is None or nodes is None or (own is not None and len(own.results) > 1):
            continue
        order = sorted(nodes, key=positions.__getitem__)
        layer = Layer(order, root, reads, own, None if own is None else chosen(own))
        whole = set(layer.inputs) == set(reads.values()) and layer.outputs == [root]
        known = not any(_compat.sharded_spec(v.aval) for v in (root, *reads.values()))
        if not (whole and known) or any(n.plain_meaning is None for n in order):
            continue
        how = {k: (v, ROW if k == "bias" else Read(v.shape)) for k, v in reads.items()}
        title = "product + " + "bias + " * ("bias" in reads) + name
        inner = frozenset(v for node in nodes for v in node.outputs)
        rewrite = search.rewrite(title, layer.call(name, search), [root], how, {}, inner)
        reason = rewrite if isinstance(rewrite, str) else why_composed(rewrite.call)
        if isinstance(rewrite, str) or reason:
            search.misses.append(Miss(title, root, reason, is_part=own is not None))
            continue
        layer.rewrite = rewrite
        found.append(layer)
    return found


_SAME = VIEWS - {"convert_element_type", "bitcast_convert_type", "rev", "slice"}


def _operands(root: Value, total: Value, read: Read) -> dict[str, Value] | None:
    """The operands of the layer whose activation is ``root``, of the array ``total``."""
    if root.dtype.itemsize != 2 or read.order or root.shape[-1:] != total.shape[-1:]:
        return None
    for one, bias in (*_sums(total), (total, None)):
        product = _product(one)
        if product is None or product.dtype != root.dtype:
            continue
        x, kernel = product.node.inputs
        reads = {"x": x, "kernel": kernel} | ({} if bias is None else {"bias": bias})
        between = values_between(root, set(reads.values()))
        nodes = {v.node for v in between}
        if product in between and not any(v.is_used_outside(nodes) for v in between - {root}):
            return reads
    return None


def _sums(total: Value) -> Iterator[tuple[Value, Value]]:
    for one, row in total.with_row():
        if row.is_floating and row.number is None:
            yield one, row


def _product(value: Value) -> Value | None:
    """The product ``[..., k] @ [k, n]`` in 16 bits that a value is, perhaps in another shape."""
    while value.node.name != "dot_general":
        view = value.source()
        if view.value is not value and view.is_whole:
            value = view.value
        elif value.node.name == "reshape" and value.node.inputs[0].shape[-1:] == value.shape[-1:]:
            value = value.node.inputs[0]
        else:
            return None
    params, (x, kernel) = value.node.params, value.node.inputs
    (left, right), batch = params["dimension_numbers"]
    precision = params["precision"]
    known = precision if isinstance(precision, tuple) else (precision,)
    fits = (
        not any(batch)
        and tuple(left) == (len(x.shape) - 1,)
        and (tuple(right), len(kernel.shape)) == ((0,), 2)
        and value.dtype == x.dtype == kernel.dtype
        and all(p is None or isinstance(p, lax.Precision) for p in known)
        and params.get("out_sharding") is None
        and not _is_transposed(kernel)
    )
    return value if fits else None


def _is_transposed(kernel: Value) -> bool:
    """Whether the program transposes a kernel that is stored in another order."""
    while kernel.node.name in VIEWS:
        kernel = kernel.node.inputs[0]
    return kernel.node.name == "transpose"
