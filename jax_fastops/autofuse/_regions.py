"""Regions: the equations around matches, up to products, tables, loops and the program's ends.

XLA fuses element-wise operations, views and reductions with each other, and nothing else. So
whether a call of an op gains depends on these neighbors of a match, and on no other equations. All
matches among them are decided together.

A *wall* is any other equation. The *level* of an equation is the largest number of walls on a way
to it from the operands of the program. Local equations of one level that are connected have no
wall between them: such a component is a function of its inputs.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from jax_fastops import _compat
from jax_fastops.autofuse._graph import Graph, bind, opened
from jax_fastops.autofuse._meaning import LOCAL
from jax_fastops.autofuse._rule import Rewrite
from jax_fastops.autofuse._value import NO_EQUATION, Node, Value

# A match with one of these keeps whole arrays that the op does not. It is a region of its own.
PRODUCTS = {"dot_general", "conv_general_dilated", "scan", "while", "cond"}
_VARYING = {"pvary", "pcast"}  # they compute nothing
_MOST = 300  # equations of a region


def _is_sum_of_products(node: Node) -> bool:
    """Whether the node is a part of a ``dot_general`` that is a product and its sum."""
    return node.equation.primitive.name == "dot_general" and node.name != "dot_general"


def has_products(node: Node) -> bool:
    """Whether an equation is a product, or may have products in its body."""
    return node.equation.primitive.name in PRODUCTS and not _is_sum_of_products(node)


def is_local(node: Node) -> bool:
    """Whether XLA fuses an equation with its neighbors."""
    return _is_sum_of_products(node) or _is_local(node.equation)


def _is_local(equation) -> bool:
    name = equation.primitive.name
    if name in ("custom_jvp_call", "jit", "pjit"):  # relu, silu
        body = equation.params.get("call_jaxpr" if name == "custom_jvp_call" else "jaxpr")
        return body is not None and all(map(_is_local, opened(body)[0].eqns))
    return name in LOCAL


def order_in_memory(value: Value) -> tuple[int, ...]:
    """The dimensions of an array in the order in which a GPU's memory has them.

    XLA moves the channels of a convolution of images after its other dimensions.
    """
    order = tuple(range(len(value.shape)))
    if len(order) != 4 or not value.is_floating or value.dtype.itemsize not in (2, 4):
        return order
    for node in (value.node, *value.users):
        if node.name == "conv_general_dilated" and value in (*node.outputs, node.operands[0]):
            numbers = node.params["dimension_numbers"]
            spec = numbers.out_spec if value in node.outputs else numbers.lhs_spec
            return spec[0], *spec[2:], spec[1]
    return order


class Region:
    """A part of a program, and the matches in it.

    Attributes:
      nodes: its equations, in the order of the program.
      rewrites: its matches.
      inner: the equations of the matches.
      inputs: the values that it reads.
      outputs: the values that others read.
      differentiable: for each input, whether it has a gradient.
    """

    def __init__(
        self, nodes: list[Node], rewrites: list[Rewrite], inner: set[Node],
        differentiable: set[Value],
    ):  # fmt: skip
        self.nodes, self.rewrites, self.inner = nodes, rewrites, inner
        self.replaced = {v: r for r in rewrites for v in r.results}
        own = {v for node in nodes for v in node.outputs}
        inside = set(nodes)
        reads = [v for r in rewrites for v in r.reads]
        reads += [v for node in nodes if node.name != "mul" or not _is_sum_of_products(node)
                  for v in node.operands]  # fmt: skip
        inputs = (v for v in reads if v not in own and v.number is None)
        self.inputs = list(dict.fromkeys(inputs))
        self.outputs = [
            v
            for node in nodes
            for v in node.outputs
            if v.is_array and (v.is_result or any(u not in inside for u in v.users))
        ]
        self.differentiable = [v in differentiable for v in self.inputs]

    @functools.cached_property
    def key(self) -> str:
        """A digest of both forms: equal regions have equal ones, whatever their variables are."""
        names: dict[Value, str] = {v: f"in{i}" for i, v in enumerate(self.inputs)}
        own = (v for node in self.nodes for v in node.outputs)
        names |= {v: f"v{i}" for i, v in enumerate(own)}

        def named(v: Value) -> str:
            return names[v] if v in names else str(v.number) + _type(v)

        lines = [f"{_type(v)} {d}" for v, d in zip(self.inputs, self.differentiable, strict=True)]
        for node in self.nodes:
            given, made = (" ".join(map(named, x)) for x in (node.operands, node.outputs))
            types = " ".join(map(_type, node.outputs))
            lines.append(f"{made}: {types} = {_equation_text(node.equation)} {given}")
        for rewrite in self.rewrites:
            call = rewrite.call
            parts = call.op, call.names, call.reads, call.options, call.shape, call.dtype
            given, made = (" ".join(map(named, x)) for x in (rewrite.reads, rewrite.results))
            lines.append(f"{made} = {_text(parts)} {given}")
        lines.append(" ".join(map(named, self.outputs)))
        lines.append(str([order_in_memory(v) for v in (*self.inputs, *self.outputs)]))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @functools.cached_property
    def structure(self) -> tuple[Any, ...]:
        """What the model of bytes depends on: equal regions of this process have equal ones.

        It takes less time than the key.
        """
        places: dict[Value, Any] = {v: i for i, v in enumerate(self.inputs)}
        places |= {v: (i, j) for i, node in enumerate(self.nodes)
                   for j, v in enumerate(node.outputs)}  # fmt: skip

        def of(values: Sequence[Value]) -> tuple:
            return tuple([places[v] if v in places else str(v.number) for v in values])

        inputs = tuple([(v.shape, v.dtype) for v in self.inputs])
        nodes = tuple([
            (n.equation.primitive.name, is_local(n), of(n.inputs), of(n.operands),
             *[v.computation for v in n.outputs])
            for n in self.nodes
        ])  # fmt: skip
        calls = tuple([(r.name, r.call, of(r.reads), of(r.results)) for r in self.rewrites])
        return inputs, tuple(self.differentiable), nodes, calls, of(self.outputs)

    def __str__(self) -> str:
        return " + ".join(rewrite.name for rewrite in self.rewrites)

    def needed(self, fused: bool) -> tuple[list[Node], list[Rewrite]]:
        """The equations and the calls that compute the outputs in one form, in order."""
        needed, nodes, calls = set(self.outputs), [], []
        for node in reversed(self.nodes):
            here = [v for v in node.outputs if v in needed]
            calls_here = [self.replaced[v] for v in here if fused and v in self.replaced]
            for call in calls_here:
                if call not in calls:
                    calls.append(call)
                    needed.update(call.reads)
            if len(calls_here) < len(here):
                nodes.append(node)
                needed.update((*node.inputs, *node.operands))
        return nodes[::-1], calls[::-1]

    def function(self, program: Callable[[Rewrite], Any] | None) -> Callable[..., list]:
        """The outputs as a function of the inputs: the plain equations, or with the calls.

        ``program`` gives the traced program of a call. Operands of walls have a name, so that a
        policy of ``jax.checkpoint`` can keep them.
        """
        nodes, calls = self.needed(program is not None)
        maker = {v: node for node in self.nodes for v in node.outputs}
        replaced = {v: call for call in calls for v in call.results}

        def run(*args: jax.Array) -> list[jax.Array]:
            arrays: dict[Value, Any] = dict(zip(self.inputs, args, strict=True))

            def read(value: Value, keep: bool = False):
                if value.number is not None:
                    return jnp.full(value.shape, value.number, value.dtype)
                if value not in arrays:
                    call(replaced[value]) if value in replaced else evaluate(maker[value])
                if keep and value in maker and value.is_floating:
                    return checkpoint_name(arrays[value], KEPT)
                return arrays[value]

            def call(rewrite: Rewrite) -> None:
                assert program is not None
                traced, given = program(rewrite), [read(v, True) for v in rewrite.reads]
                results = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
                for value, y in zip(rewrite.results, results, strict=False):
                    if value.node is not NO_EQUATION:
                        arrays[value] = y.reshape(value.shape).astype(value.dtype)

            def evaluate(node: Node) -> None:
                wall = not is_local(node)
                given = [read(v, wall) for v in node.operands]
                results = given if node.name in _VARYING else bind(node.equation, given)
                for value, y in zip(node.outputs, results, strict=True):
                    arrays.setdefault(value, y)

            for node in nodes:
                if node.name == "mul" and _is_sum_of_products(node):
                    continue
                if any(v not in arrays and v not in replaced for v in node.outputs):
                    evaluate(node)
            return [read(v) for v in self.outputs]

        return run


KEPT = "fastops_region"  # the name of what a wall reads


# ---- text of equations ---------------------------------------------------------------------------


def _type(v: Value) -> str:
    weak = "*" if getattr(v.aval, "weak_type", False) else ""
    return f"{_name(v.dtype)}{v.shape}{weak}{_compat.sharded_spec(v.aval) or ''}"


_name = functools.lru_cache(256)(str)  # of a dtype


def _equation_text(equation) -> str:
    params = [f"{k}={_text(v)}" for k, v in sorted(equation.params.items())]
    return " ".join((equation.primitive.name, *params))


def _text(x: Any) -> str:
    """What describes a parameter, without addresses and names of variables."""
    if x is None or type(x) in (bool, int, str, float):
        return str(x)
    if isinstance(x, np.dtype):
        return _name(x)
    if isinstance(x, (tuple, list)):
        return f"({' '.join(map(_text, x))})"
    if isinstance(x, dict):
        return _text(sorted(x.items()))
    if isinstance(x, functools.partial):
        return _text((x.func, x.args, x.keywords))
    jaxpr = getattr(x, "jaxpr", x)
    if hasattr(jaxpr, "eqns"):
        return _jaxpr_text(jaxpr, getattr(x, "consts", ()))
    if isinstance(x, (np.ndarray, jax.Array)) and not isinstance(x, jax.core.Tracer):
        return f"{x.dtype}{x.shape}{hashlib.sha256(np.asarray(x).tobytes()).hexdigest()}"
    if callable(x) and not isinstance(x, type):
        return f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', type(x).__name__)}"
    return re.sub(r"<[^<>]* at 0x[0-9a-f]+>", lambda m: m[0].split()[0], repr(x))


def _jaxpr_text(jaxpr, constants: Sequence[Any]) -> str:
    names = {v: f"v{i}" for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def named(atom) -> str:
        return str(atom) if isinstance(atom, Literal) else names[atom]

    lines = [f"{v.aval.str_short()}" for v in names]
    for equation in jaxpr.eqns:
        given = " ".join(map(named, equation.invars))
        names |= {v: f"v{len(names) + i}" for i, v in enumerate(equation.outvars)}
        lines.append(f"{_equation_text(equation)} {given}")
    lines += [" ".join(map(named, jaxpr.outvars)), _text(tuple(constants))]
    return "; ".join(lines)


# ---- the regions of a program --------------------------------------------------------------------


def differentiable(graph: Graph) -> set[Value]:
    """The values that may have a gradient, as far as the program says."""
    found = {v for v in graph.operands if v.is_floating}
    for node in graph.nodes:
        if node.name != "stop_gradient" and not found.isdisjoint((*node.inputs, *node.operands)):
            found.update(v for v in node.outputs if v.is_floating)
    return found


def regions(graph: Graph, rewrites: Sequence[Rewrite]) -> list[Region]:
    """The regions of these matches. A match may be in none: where no function is a region."""
    return list(_Regions(graph, rewrites).found())


class _Regions:
    def __init__(self, graph: Graph, rewrites: Sequence[Rewrite]):
        self._graph = graph
        self._positions = {node: i for i, node in enumerate(graph.nodes)}
        self._local = {node: is_local(node) for node in graph.nodes}
        self._levels: dict[Node, int] = {}
        for node in graph.nodes:
            before = [self._levels.get(v.node, 0) for v in (*node.inputs, *node.operands)]
            self._levels[node] = max(before, default=0) + (not self._local[node])
        self._inner: dict[Rewrite, set[Node]] = {}
        self._owners: dict[Node, list[Rewrite]] = {}
        for rewrite in reversed(rewrites):  # in the order of the program
            nodes = nodes_of(rewrite.results, rewrite.reads)
            if nodes is not None:
                self._inner[rewrite] = nodes
                for node in nodes:
                    self._owners.setdefault(node, []).append(rewrite)
        self._taken: set[Node] = set()

    def found(self) -> Iterator[Region]:
        gradients = differentiable(self._graph)
        done: set[Rewrite] = set()
        whole = [r for r in self._inner if any(map(has_products, self._inner[r]))]
        walled = set(whole)
        for rewrite in [*whole, *self._inner]:
            if rewrite in done:
                continue
            matches, nodes = self._grown(rewrite, walled)
            done |= matches
            if len(nodes) > _MOST or not self._taken.isdisjoint(nodes):
                continue
            nodes |= self._before(nodes)
            if len(nodes) > _MOST or not self._is_function(nodes):
                continue
            self._taken |= {node for node in nodes if not _is_constant(node)}
            order = sorted(nodes, key=self._positions.__getitem__)
            inner = set().union(*(self._inner[r] for r in matches))
            chosen = [r for r in self._inner if r in matches]
            region = Region(order, chosen, inner, gradients)
            if region.outputs and all(v.is_static and v.is_array for v in region.inputs):
                yield region

    def _grown(self, rewrite: Rewrite, walled: set[Rewrite]) -> tuple[set[Rewrite], set[Node]]:
        """The matches and the equations that are connected with a match by local equations."""
        matches: set[Rewrite] = set()
        nodes: set[Node] = set()
        left: list[Node] = []

        def add(match: Rewrite) -> None:
            if match not in matches:
                matches.add(match)
                nodes.update(self._inner[match])
                left.extend(self._inner[match])

        add(rewrite)
        inner = None
        if rewrite in walled:  # with what follows the result, if there is no other match
            for node in list(left):
                for other in self._owners[node]:
                    add(other)
            inner, left[:] = set(nodes), [rewrite.root.node]
        while left and len(nodes) <= _MOST:
            node = left.pop()
            for near in _neighbors(node):
                if near in nodes or not self._is_near(node, near):
                    continue
                owners = self._owners.get(near, ())
                if not owners:
                    nodes.add(near)
                    left.append(near)
                elif inner is not None:
                    return matches, inner
                elif walled.isdisjoint(owners):
                    for match in owners:
                        add(match)
        return matches, nodes

    def _is_near(self, node: Node, other: Node) -> bool:
        same = self._levels[node] == self._levels[other]
        return same and self._local[other] and other not in self._taken

    def _before(self, nodes: set[Node]) -> set[Node]:
        """The local equations before whose results nothing else reads."""
        found: set[Node] = set()
        left = list(nodes)
        while left and len(found) <= _MOST:
            for value in left.pop().operands:
                node = value.node
                if (
                    node is NO_EQUATION
                    or node in nodes
                    or node in found
                    or value.number is not None
                ):
                    continue
                if not self._local[node] or node in self._owners or node in self._taken:
                    continue
                inside = nodes | found
                only = not value.is_result and all(user in inside for user in value.users)
                if (only and len(node.outputs) == 1) or _is_constant(node):
                    found.add(node)
                    left.append(node)
        return found

    def _is_function(self, nodes: set[Node]) -> bool:
        """Whether no input depends on an output."""
        level = max(self._levels[node] for node in nodes)  # what follows has no lower one
        seen: set[Node] = set()  # after an output
        left = list(nodes)
        for node in left:
            for user in _users(node):
                if user in nodes:
                    if node in seen:
                        return False
                elif user not in seen and self._levels[user] <= level:
                    seen.add(user)
                    left.append(user)
        return True


def _users(node: Node) -> Iterator[Node]:
    for value in node.outputs:
        yield from value.users


def _neighbors(node: Node) -> Iterator[Node]:
    for value in (*node.inputs, *node.operands):
        if value.node is not NO_EQUATION and value.number is None:
            yield value.node
    for value in node.outputs:
        yield from value.users


def _is_constant(node: Node) -> bool:
    return node.equation.primitive.name == "iota"


def nodes_of(results: Iterable[Value], reads: Iterable[Value]) -> set[Node] | None:
    """The equations that compute results from what is read, if they are few."""
    reads, nodes, left = set(reads), set(), list(results)
    while left:
        value = left.pop()
        node = value.node
        if value in reads or node in nodes or node is NO_EQUATION or value.number is not None:
            continue
        nodes.add(node)
        left += [*node.inputs, *node.operands]
        if len(nodes) > _MOST:
            return None
    return nodes or None
