"""Which random bits a program draws more than once: by equal keys, also in loops and branches.

A dropout that is replaced has another mask. So all uses of such bits must see it, or none.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_fastops.autofuse._graph import BODIES, Graph, opened
from jax_fastops.autofuse._value import Value


class Draws:
    """How often a program draws bits of one key and size.

    Values that are computed in the same way have equal numbers. A value of a loop has that of its
    first step, but an element of an array that a loop goes through has a number of its own.
    """

    def __init__(self, graph: Graph, args: Sequence[Any]):
        self._numbers: dict[tuple, int] = {}
        self.args = [self._number("array", id(x)) for x in args]
        self._counts = self._count(graph, self.args)

    def _number(self, *key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def numbers(self, graph: Graph, given: Sequence[int]) -> dict[Value, int]:
        """The numbers of the values of a program, whose operands have these."""
        numbers = dict(zip(graph.operands, given, strict=True))
        for value, x in graph.constants.items():
            known = value.number
            key = ("array", id(x)) if known is None else ("number", known.tobytes())
            numbers[value] = self._number(*key)
        for node in graph.nodes:
            if node.name == "optimization_barrier":
                numbers |= {v: numbers[x] for v, x in zip(node.outputs, node.inputs, strict=True)}
                continue
            before = node.inputs[0].node if node.inputs else node
            if (before.name, node.name) == ("random_unwrap", "random_wrap"):
                numbers[node.outputs[0]] = numbers[before.inputs[0]]
                continue
            key = node.name, node.code, *[numbers[v] for v in node.inputs]
            for place, value in enumerate(node.outputs):
                numbers[value] = self._number(*key, place)
        return numbers

    def given(self, equation, body: str, numbers: Sequence[int]) -> list[int]:
        """The numbers of the operands of a body, by those of the operands of its equation."""
        params, name = equation.params, equation.primitive.name
        numbers = list(numbers)
        if name == "cond":
            return numbers[1:]
        if name == "while":
            of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
            own = numbers[:of_cond] if body == "cond_jaxpr" else numbers[of_cond:][:of_body]
            return own + numbers[of_cond + of_body :]
        if name == "scan":
            for i, (x, inside) in enumerate(
                zip(equation.invars, opened(params[body])[0].invars, strict=True)
            ):
                if x.aval.shape != inside.aval.shape:
                    numbers[i] = self._number("element", numbers[i])
        return numbers

    def mark(self, graph: Graph, numbers: dict[Value, int]) -> tuple[tuple[int, bool], ...]:
        """Marks the random bits of a program that are also drawn around it or in a body.

        Returns for each draw the place of the first equal one, and whether it is marked.
        """
        marks = []
        for draw, bits in _equal_draws(graph, numbers).items():
            is_drawn_again = self._counts[draw] > len(bits)
            for value in bits:
                value.is_drawn_again = is_drawn_again
                marks.append((bits[0].place, is_drawn_again))
        return tuple(marks)

    def _count(self, graph: Graph, given: Sequence[int]) -> Counter:
        numbers = self.numbers(graph, given)
        counts = Counter({draw: len(bits) for draw, bits in _equal_draws(graph, numbers).items()})
        for node in graph.nodes:
            name = node.equation.primitive.name
            inner = []
            for param in BODIES.get(name, ()):
                bodies = node.equation.params.get(param) or ()
                for body in bodies if isinstance(bodies, (tuple, list)) else (bodies,):
                    if has_draws(opened(body)[0]):
                        own = self.given(node.equation, param, [numbers[v] for v in node.operands])
                        inner.append(self._count(Graph(*opened(body), link=False), own))
            join = operator.or_ if name == "cond" else operator.add  # one branch runs
            counts += functools.reduce(join, inner, Counter())
        return counts


def mark_mixed(graph: Graph, numbers: dict[Value, int], needed: set[Value]) -> bool:
    """Marks the random bits that some calls draw in their own way, and the program as before."""
    found = False
    for bits in _equal_draws(graph, numbers).values():
        if not bits[0].is_drawn_again and len({v in needed for v in bits}) > 1:
            found = True
            for value in bits:
                value.is_drawn_again = True
    return found


def _equal_draws(graph: Graph, numbers: dict[Value, int]) -> dict[tuple[int, int], list[Value]]:
    groups: dict[tuple[int, int], list[Value]] = {}
    for node in graph.nodes:
        if node.name == "random_bits":
            bits = node.outputs[0]
            groups.setdefault((numbers[node.inputs[0]], bits.size), []).append(bits)
    return groups


def has_draws(jaxpr) -> bool:
    """Whether a program draws random bits, also in a body."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "random_bits":
            return True
        for x in equation.params.values():
            for body in x if isinstance(x, (tuple, list)) else (x,):
                inner = opened(body)[0]
                if hasattr(inner, "eqns") and has_draws(inner):
                    return True
    return False
