"""Which random bits a program draws more than once: by equal keys, also in loops and branches.

A dropout that is replaced has another mask. So all uses of such bits must see it, or none.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_fastops.autofuse._graph import BODIES, Graph, opened
from jax_fastops.autofuse._value import Value

# A result is a part of the first operand, as the key of an example is of those of a batch.
_PARTS = {"slice", "dynamic_slice", "gather", "squeeze", "reshape", "split", "unstack"}
_Draw = tuple[int, int]  # the number of the keys, and how many bits each of them gives


class Draws:
    """How often a program draws bits of one key and size.

    Values that are computed in the same way have equal numbers. A value of a loop has that of its
    first step, and an element of an array that a loop goes through has that of the array. A key
    that is a part of keys that are drawn as a whole, by ``vmap`` or a loop, counts as these.
    """

    def __init__(self, graph: Graph, args: Sequence[Any]):
        self._numbers: dict[tuple, int] = {}
        self._wholes: dict[int, int] = {}  # of parts
        self.args = [self._number("array", id(x)) for x in args]
        self._drawn: Counter[_Draw] = Counter()
        self._drawn = self._count(graph, self.args)
        self._counts: Counter[_Draw] = Counter()
        for draw, count in self._drawn.items():
            self._counts[self._whole(draw)] += count

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
            if node.name in ("optimization_barrier", "random_wrap", "random_unwrap"):
                numbers |= {v: numbers[x] for v, x in zip(node.outputs, node.inputs, strict=True)}
                continue
            key = node.name, node.code, *[numbers[v] for v in node.inputs]
            for place, value in enumerate(node.outputs):
                numbers[value] = self._number(*key, place)
                if node.name in _PARTS:
                    self._wholes[numbers[value]] = numbers[node.inputs[0]]
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
        return numbers

    def mark(self, graph: Graph, numbers: dict[Value, int]) -> tuple[tuple[int, bool], ...]:
        """Marks the random bits of a program that are also drawn around it or in a body.

        Returns for each draw the place of the first equal one, and whether it is marked.
        """
        marks = []
        for draw, bits in self._equal(graph, numbers).items():
            shapes = {_shape(value) for value in bits}  # the op's mask depends on them
            is_drawn_again = self._counts[draw] > len(bits) or len(shapes) > 1
            for value in bits:
                value.is_drawn_again = is_drawn_again
                marks.append((bits[0].place, is_drawn_again))
        return tuple(marks)

    def mark_mixed(self, graph: Graph, numbers: dict[Value, int], needed: set[Value]) -> bool:
        """Marks the random bits that some calls draw in their own way, and the program as before.

        Returns whether there are any.
        """
        found = False
        for bits in self._equal(graph, numbers).values():
            if not bits[0].is_drawn_again and len({v in needed for v in bits}) > 1:
                found = True
                for value in bits:
                    value.is_drawn_again = True
        return found

    def _equal(self, graph: Graph, numbers: dict[Value, int]) -> dict[_Draw, list[Value]]:
        groups: dict[_Draw, list[Value]] = {}
        for node in graph.nodes:
            if node.name == "random_bits":
                (bits,) = node.outputs
                draw = self._whole((numbers[node.inputs[0]], math.prod(_shape(bits))))
                groups.setdefault(draw, []).append(bits)
        return groups

    def _whole(self, draw: _Draw) -> _Draw:
        """The draw by all keys of which those of a draw are a part, if there is one."""
        whole, size = draw, draw[1]
        part: int | None = draw[0]
        while (part := self._wholes.get(part)) is not None:
            if (part, size) in self._drawn:
                whole = part, size
        return whole

    def _count(self, graph: Graph, given: Sequence[int]) -> Counter[_Draw]:
        numbers = self.numbers(graph, given)
        counts = Counter({draw: len(bits) for draw, bits in self._equal(graph, numbers).items()})
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


def _shape(bits: Value) -> tuple:
    """The shape of the bits that each key gives."""
    return bits.shape[len(bits.node.inputs[0].shape) :]


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
