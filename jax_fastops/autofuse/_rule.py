"""What a rule is: it recognizes a computation in a program, and gives the call that replaces it.

A rule is a class with ``match(value) -> Rewrite | None``. ``Search`` asks the rules at each value
of a program, and traces each call to see whether it takes the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jax_fastops import _compat, _explain, _implementation
from jax_fastops._dispatch import Decision, Refused, kernels_only
from jax_fastops._views import explicit_spec
from jax_fastops.autofuse._value import NO_EQUATION, Value, View


@dataclasses.dataclass(frozen=True)
class Read:
    """How a call makes its operand from a value of the program.

    Attributes:
      sizes: the shape of the operand.
      dtype: its dtype, or ``None`` for that of the value.
      counts: for a mask of numbers, whether the elements that are not 0 count, or those that are.
      order: the order of the value's long dimensions, if the operand has another one.
      part: the range along each dimension of the value, or nothing for the whole value.
    """

    sizes: tuple[int, ...]
    dtype: Any = None
    counts: bool | None = None
    order: tuple[int, ...] = ()
    part: tuple[tuple[int, int], ...] = ()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = lax.slice(x, *zip(*self.part, strict=True)) if self.part else x
        x = jnp.transpose(jnp.squeeze(x), self.order) if self.order else x
        x = jnp.reshape(x, self.sizes)
        if self.counts is not None:
            x = x if x.dtype == bool else x != 0
            return x if self.counts else ~x
        return x if self.dtype is None or x.dtype == self.dtype else x.astype(self.dtype)


ROW = Read((-1,))


def read_of(
    view: View, shape: Sequence[int] = (), places: Sequence[int] | None = None, dtype=None,
    counts=None,
) -> tuple[Value, Read]:  # fmt: skip
    """The value to read for an operand, and what makes an array of this shape of it.

    ``places`` are the dimensions of the view in the array: by default, it has no others. A
    broadcast dimension keeps size 1.
    """
    own = tuple([i for i in view.map if i is not None])
    places = range(len(view.map)) if places is None else places
    sizes = [1] * max(len(shape), len(places))
    for place, i in zip(places, view.map, strict=True):
        sizes[place] = 1 if i is None else view.value.sizes[i]
    order = () if own == view.value.identity else own
    return view.value, Read(tuple(sizes), dtype, counts, order)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op, with its operands and options by name. Equal calls do the same."""

    op: Callable[..., Any]
    names: tuple[str, ...]
    reads: tuple[Read, ...]
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: Any

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.op, self.names, self.reads, self.options, self.shape, self.dtype))

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *values: Any, fanout: bool = False) -> tuple[Any, ...]:
        """All results. With ``fanout``, the first one is there twice."""
        operands = [read(x) for read, x in zip(self.reads, values, strict=True)]
        options = dict(self.options) | ({"fanout": True} if fanout else {})
        results = self.op(**dict(zip(self.names, operands, strict=True)), **options)
        results = results if isinstance(results, tuple) else (results,)
        if fanout and isinstance(results[0], tuple):  # the op gives a pair and its other results
            results = (*results[0], *results[1:])
        same = [y.reshape(self.shape).astype(self.dtype) for y in results[: 1 + fanout]]
        return *same, *results[1 + fanout :]


@dataclasses.dataclass(frozen=True, eq=False)
class Rewrite:
    """A part of a program, and the call that replaces it.

    A rule makes it by :meth:`Rule.rewrite`. ``reads`` are the values that the call reads, ``inner``
    those that it computes. ``note`` is what the report says of the result.
    """

    name: str
    results: Sequence[Value]
    reads: Sequence[Value]
    call: Call
    inner: frozenset[Value]
    fanout: bool = False
    note: str = ""

    @property
    def root(self) -> Value:
        """The first result."""
        return self.results[0]

    @property
    def operands(self) -> dict[str, tuple[Value, Read]]:
        """The operands of the call by name, as :meth:`Rule.rewrite` takes them."""
        pairs = zip(self.reads, self.call.reads, strict=True)
        return dict(zip(self.call.names, pairs, strict=True))


@dataclasses.dataclass(frozen=True)
class Miss:
    """A computation that stays, and why.

    ``is_part`` says whether a part of it is replaced. If one of the values ``seen`` is replaced,
    it does not count.
    """

    name: str
    value: Value
    reason: str
    is_part: bool = False
    seen: frozenset[Value] = frozenset()


Reads = Mapping[str, Value | tuple[Value, Read]]


class Rule:
    """Recognizes one kind of computation. A search makes one instance of each rule.

    A rule is asked at each floating value that is needed, from the results of a program back.
    ``self.search`` has the user's option ``dropout``, and gives the matches of other rules.
    """

    def __init__(self, search: Search):
        self.search = search

    def match(self, value: Value) -> Rewrite | None:
        """The rewrite whose first result, or one of whose results, is this value."""
        raise NotImplementedError

    def rewrite(
        self, name: str, op: Callable, results: Sequence[Value], reads: Reads, **options: Any
    ) -> Rewrite | None:
        """The rewrite by a call of an op, or ``None`` with a miss if the call takes no kernel.

        Args:
          name: what the report calls it.
          op: a function of the operands and options, as keywords. A function of a module, so that
            equal calls are traced once.
          results: the values that the call computes, in the order of its results.
          reads: the value of each operand, perhaps with the ``Read`` that makes the operand of it.
          options: other arguments of the op.
        """
        rewrite = self.search.rewrite(name, op, results, reads, options)
        return self.miss(name, results[0], rewrite) if isinstance(rewrite, str) else rewrite

    def miss(self, name: str, value: Value, reason: str, is_part: bool = False) -> None:
        """Notes for the report why a computation stays."""
        self.search.misses.append(Miss(name, value, reason, is_part))


class Search:
    """The search of one program. A thorough one also notes what is only nearly a match."""

    def __init__(
        self, rules: Sequence[type[Rule]], dropout: bool | str, thorough: bool,
        programs: dict[tuple[Any, ...], Any] | None = None,
    ):  # fmt: skip
        self.dropout: bool | str = dropout
        self.thorough: bool = thorough
        self.misses: list[Miss] = []
        # Activations, each with the name, and the array that it is of.
        self.activations: dict[Value, tuple[str, Value, Read]] = {}
        self.programs: dict[tuple[Any, ...], Any] = {} if programs is None else programs
        # Each with what it said.
        self._rules: dict[type[Rule], tuple[Rule, dict[Value, Rewrite | None]]] = {
            rule: (rule(self), {}) for rule in rules
        }

    def find(self, value: Value) -> Rewrite | None:
        """The match of the first rule that has one at this value."""
        if value.node is NO_EQUATION or not value.is_floating:
            return None
        try:
            for rule in self._rules:
                if (match := self.match(rule, value)) is not None:
                    return match
        except RecursionError:  # thousands of factors or views, one of the other
            self.misses.append(Miss("pattern", value, "the program is too deep"))
        return None

    def match(self, rule: type[Rule], value: Value) -> Rewrite | None:
        """The match of one rule, which is asked once for each value."""
        asked, known = self._rules[rule]
        if value not in known:
            known[value] = asked.match(value)
        return known[value]

    def rewrite(
        self, name: str, op: Callable, results: Sequence[Value], reads: Reads,
        options: dict[str, Any], inner: frozenset[Value] | None = None, fanout: bool = False,
    ) -> Rewrite | str:  # fmt: skip
        """As :meth:`Rule.rewrite`, or as text why no call replaces the results.

        ``inner`` are the values that the call computes, if these are more than the results.
        ``fanout`` says whether the op has this option.
        """
        pairs = [v if isinstance(v, tuple) else (v, Read(v.shape)) for v in reads.values()]
        values, how, root = [v for v, _ in pairs], tuple(read for _, read in pairs), results[0]
        call = Call(op, tuple(reads), how, tuple(options.items()), root.shape, root.dtype)
        if not all(v.is_array for v in values):
            return "the program has no array of a product that it sums"
        program = self.program(call, values)
        if isinstance(program, str):
            return program
        if visible(program.out_avals[0]) != visible(root.aval):
            return "the result has another type"
        # All results of a call vary over the axes of all its operands.
        axes = frozenset().union(*(_compat.varying_axes_of(v.aval) for v in values))
        if any(_compat.varying_axes_of(v.aval) != axes for v in results if v.aval is not None):
            return "a result varies over other mesh axes than the operands"
        inner = frozenset(results) if inner is None else inner
        return Rewrite(name, results, values, call, inner, fanout)

    def program(
        self, call: Call, values: Sequence[Value], fanout: bool = False,
        chosen: _implementation.Chosen | None = None,
    ) -> Any:  # fmt: skip
        """The program of a call of such values, or as text why the kernel does not take it.

        It is traced once, however many parts of the program it replaces. ``chosen`` is what its
        region takes, if it was decided.
        """
        types = tuple([_type(v) for v in values])
        key = call, types, fanout, chosen
        if (program := self.programs.get(key)) is None:
            structs = [jax.ShapeDtypeStruct(*x[:2], sharding=x[2]) for x in types]
            with _implementation.use_chosen(chosen):
                program = self.programs[key] = _trace(call, structs, fanout)
        return program


def visible(aval) -> tuple:
    """What a user can see of a type."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None), spec


# ---- the programs of calls -----------------------------------------------------------------------


def _type(value: Value) -> tuple[Any, ...]:
    sharding = getattr(value.aval, "sharding", None)
    explicit = explicit_spec(sharding, len(value.shape)) is not None
    return value.shape, value.dtype, sharding if explicit else None


class _Jitted:
    """A call with a cache of its programs, whose key has the implementation in force.

    The program of a call that is refused has no results, but the reason as the key of a dictionary.
    ``decisions`` has those of each implementation under which the call was traced.
    """

    def __init__(self, call: Call, fanout: bool):
        def program(*values):
            try:
                return call(*values, fanout=fanout)
            except Refused as refused:
                return {str(refused) or "XLA is as fast": ()}

        self.function: Any = jax.jit(program)
        self.decisions: dict[Any, list[Decision]] = {}


_jitted = functools.lru_cache(1024)(_Jitted)


def _decisions(call: Call) -> list[Decision]:
    """The decisions for a call that was traced under the implementation in force."""
    return _jitted(call, False).decisions.get(_implementation.current(), [])


def why(call: Call) -> str:
    """Why the kernel takes a call."""
    decisions = _decisions(call)
    choices = [d.forward if d.forward.kernel else d.gradient for d in decisions]
    return "; ".join(dict.fromkeys(choice.reason for choice in choices if choice.kernel))


def calls_op(call: Call) -> bool:
    """Whether a call calls an op. If not, it moves operations of the program."""
    return bool(_decisions(call))


def why_composed(call: Call) -> str:
    """Why the op of a call is computed by other ops, or an empty text if it has a kernel."""
    for own in _decisions(call)[:1]:  # the others are those of the ops that compute it
        if not (own.forward.kernel or own.gradient.kernel):
            return own.gradient.reason
    return ""


def takes_kernel(call: Call) -> tuple[bool, bool]:
    """Whether a call takes a kernel without a gradient, and in a step."""
    decisions = _decisions(call)
    phases = zip(*decisions, strict=True) if decisions else ((), ())
    forward, step = (not phase or any(choice.kernel for choice in phase) for phase in phases)
    return forward, step


def _trace(call: Call, types: Sequence[Any], fanout: bool) -> Any:
    try:
        with kernels_only(True), _explain.decisions() as decisions:
            traced = _jitted(call, fanout).function.trace(*types)
    except Exception as error:
        known = TypeError, ValueError, NotImplementedError
        # The error for shardings that do not fit has no public name.
        if not isinstance(error, known) and type(error).__name__ != "ShardingTypeError":
            raise
        return str(error).partition("\n")[0]
    if isinstance(traced.out_info, dict):
        return next(iter(traced.out_info))
    if decisions:
        _jitted(call, fanout).decisions[_implementation.current()] = list(decisions)
    return traced.jaxpr


@functools.lru_cache(1024)
def inlined(program: Any) -> Callable[..., list]:
    """A traced program as a function, whose derivative ``jax.jit`` keeps."""
    run = functools.partial(jax.core.eval_jaxpr, program.jaxpr, program.consts)
    return jax.jit(run, inline=_compat.INLINE)
