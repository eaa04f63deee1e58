"""``explain``: which calls of a function take the kernel, and why.

While a function is explained, its operands pass through an identity primitive. Its derivative rule
notes that the call is differentiated, and its equations in the traced program tell how often the
call runs. For the call's own primitives in this program, the lowering's decision is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import AxisType, get_abstract_mesh

from jax_fastops import _places, _tables
from jax_fastops._arguments import array_leaves, check_function, placed, selected
from jax_fastops._dispatch import Choice, Decision, lowering_platform

_COLUMNS = ("op", "operands", "runs", "calls", "kept", "where", "why")

# The session of `explain` in force in this thread, or 0. A user context is part of the key of jit's
# caches, so a session traces every function anew.
_session = jax.make_user_context(0)
_numbers = itertools.count(1)
_sessions: dict[int, list[_Record]] = {}


class _Thread(threading.local):
    decisions: list[Decision] | None = None  # where they are noted
    where: Callable[[], str] | None = None  # gives the place to show, if not that of the call


_thread = _Thread()
_log = logging.getLogger("jax_fastops.dispatch")
_log.setLevel(logging.WARNING)  # whatever the level of the root logger is


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of an op in an explained function.

    Attributes:
      op: the name of the op.
      operands: dtype and shape of each operand; inside of ``jax.vmap``, those of one example.
      kernel: whether the call takes the kernel, in forward and backward if the function
        differentiates it.
      reason: why it does, or why not.
      where: the file and line of the call. For one inside of an installed package, the line of
        the program that calls the package.
      differentiated: whether the function differentiates the call.
      calls: how often it runs. The body of a ``while`` loop and each branch of a ``cond`` count
        once.
      kept: the bytes of the arrays that one run keeps for the backward: 0 if it is not
        differentiated, or if ``jax.checkpoint`` computes it again.

    Example:
      >>> call = fo.explain(lambda x: fo.softmax(x))(jnp.ones((2, 8))).calls[0]
      >>> call.op, call.operands, call.differentiated
      ('softmax', ('float32[2,8]',), False)
    """

    op: str
    operands: tuple[str, ...]
    kernel: bool
    reason: str
    where: str
    differentiated: bool
    calls: int
    kept: int

    def _cells(self) -> tuple[str, ...]:
        runs = "kernel" if self.kernel else "reference"
        kept = _tables.size(self.kept) if self.differentiated else ""
        operands = ", ".join(self.operands)
        return self.op, operands, runs, str(self.calls), kept, self.where, self.reason


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. Its text is a table, with colors in a terminal that has ``rich``,
    and with one row for equal calls.

    Attributes:
      calls: the calls of ops in the order in which they were traced.

    Example:
      >>> with fo.use_implementation("xla"):
      ...     found = fo.explain(lambda x: fo.relu(fo.softmax(x)))(jnp.ones((2, 8)))
      >>> [(call.op, call.kernel) for call in found.calls]
      [('softmax', False), ('relu', False)]
      >>> found.kept
      0
    """

    calls: tuple[OpCall, ...]

    @property
    def kept(self) -> int:
        """The bytes that all calls keep for the backward. An array that two calls keep counts
        twice."""
        return sum(call.kept * call.calls for call in self.calls)

    def _summary(self) -> str:
        if not self.calls:
            return "no calls of ops; autofuse and patch put ops into a program"
        total = sum(call.calls for call in self.calls)
        kernels = sum(call.calls for call in self.calls if call.kernel)
        kept = f"{_tables.size(self.kept)} kept for the backward"
        return f"{total} call{'s' * (total != 1)}, {kernels} by kernel; {kept}"

    def __str__(self) -> str:
        if sys.stdout.isatty():
            try:
                return self._colored()
            except ImportError:
                pass
        return f"{_tables.text(self._rows(), 120)}\n{self._summary()}"

    def _repr_html_(self) -> str:
        """The table, in a notebook."""
        return f"{_tables.as_html(self._rows())}<p>{self._summary()}</p>"

    def to_markdown(self) -> str:
        """The table in Markdown, with whole paths, and the summary: for an issue or a log."""
        return f"{_tables.as_markdown(self._rows())}\n\n{self._summary()}"

    def _alike(self) -> list[OpCall]:
        """The calls. Equal ones, such as those of equal layers, are one."""
        counts: Counter[OpCall] = Counter()
        for call in self.calls:
            counts[dataclasses.replace(call, calls=0)] += call.calls
        return [dataclasses.replace(call, calls=n) for call, n in counts.items()]

    def _rows(self) -> list[tuple[str, ...]]:
        return [_COLUMNS, *(call._cells() for call in self._alike())]

    def _colored(self) -> str:
        from rich.console import Console

        console = Console()
        with console.capture() as text:
            console.print(self)
        return text.get().rstrip()

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(*_COLUMNS, caption=self._summary())
        for call in self._alike():
            table.add_row(*call._cells(), style="green" if call.kernel else "yellow")
        return table


class Waiting:
    """A function of the arguments of ``fn``, whose text says so."""

    def __init__(self, name: str, fn: Callable[..., Any], call: Callable[..., Any]):
        functools.update_wrapper(self, fn)
        self._name, self._call = name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        own = getattr(self, "__name__", "f")
        return f"{self._name}({own}) is a function: call it with the arguments of {own}"


def explain(fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """Shows which calls of ops in a function take the kernel, and why.

    Traces ``fn`` and runs nothing. To see what is kept for a backward, explain the function that
    contains the derivative: ``explain(jax.grad(loss))``.

    Args:
      fn: a function of arrays, which may be under ``jax.jit``, with any derivatives and
        transformations in it.

    Returns:
      A function of the arguments of ``fn``, where ``jax.ShapeDtypeStruct`` may stand for an array.
      It returns an :class:`Explanation`.

    Raises:
      Whatever ``fn`` raises while it is traced.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
      >>> with fo.use_implementation("native"):
      ...     found = fo.explain(jax.grad(lambda x: fo.relu(x).sum()))(x)
      >>> found.calls[0].kernel, found.calls[0].reason, found.kept
      (True, "the implementation is 'native'", 8192)
    """

    check_function("explain", fn)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        def is_array(x):
            return hasattr(x, "shape")

        operands, with_arrays = array_leaves(args, kwargs, is_array)

        def traced(*arrays):
            args, kwargs = with_arrays(arrays)
            return list(filter(is_array, jax.tree.leaves(fn(*args, **kwargs))))

        number = next(_numbers)
        records = _sessions[number] = []
        try:
            with _session(number):
                program = jax.make_jaxpr(traced)(*operands)
        finally:
            del _sessions[number]
        found = _Program(records, number, max(map(_devices, [get_abstract_mesh(), *operands])))
        found.walk(program.jaxpr, 1, False)
        found.decide()
        return Explanation(tuple(r.result() for r in records if r.calls))

    return Waiting("explain", fn, explained)


# ---- what is noted during a trace ----------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Record:
    op: str
    operands: tuple[str, ...]
    where: str
    decision: Decision | None = None
    kept: int = 0
    differentiated: bool = False
    recomputed: bool = False
    calls: int = 0
    lowered: list[Choice] = dataclasses.field(default_factory=list)  # of its primitives

    def result(self) -> OpCall:
        assert self.decision is not None
        choice = self.decision.gradient if self.differentiated else self.decision.forward
        choice = min(self.lowered, default=choice, key=lambda choice: choice.kernel)
        return OpCall(
            op=self.op,
            operands=self.operands,
            kernel=choice.kernel,
            reason=choice.reason,
            where=self.where,
            differentiated=self.differentiated,
            calls=self.calls,
            kept=self.kept if self.differentiated and not self.recomputed else 0,
        )


def observe(op: str, args: Sequence) -> tuple[Sequence, tuple[int, int] | None, Callable]:
    """The operands of a call, marked if it is explained; its session and number there; and what to
    tell the decision to."""
    number = _session.value
    records = _sessions.get(number)
    logged = _log.isEnabledFor(logging.INFO)
    made = _thread.decisions
    if records is None and not logged:
        return args, None, lambda decision, _: made is None or made.append(decision)
    flags = [x is not None for x in args]
    given = selected(args, flags)
    where = _thread.where() if _thread.where else ""
    operands = tuple(jax.typeof(x).str_short() for x in given)
    record = _Record(op, operands, where or _places.of_caller())
    named = None
    if records is not None:
        named = number, len(records)
        records.append(record)
        args = placed(_mark.bind(*given, session=number, index=named[1]), flags)

    def decided(decision: Decision, function: Callable | None) -> None:
        """``function`` computes the call, or is ``None`` if its own calls tell what they keep."""
        record.decision = decision
        if made is not None:
            made.append(decision)
        if records is not None and function is not None:
            with _session(0):
                record.kept = _kept(function, args)
        if logged:
            _log.info("%s", _logged(record))

    return args, named, decided


def _logged(record: _Record) -> str:
    assert record.decision is not None
    call = f"{record.op}({', '.join(record.operands)}) at {record.where}"
    both = [f"{'kernel' if c.kernel else 'reference'}: {c.reason}" for c in record.decision]
    return f"{call}: {both[0]}" + ("" if both[0] == both[1] else f"; with gradients {both[1]}")


def log_refusal(primitive: str, choice: Choice) -> None:
    """Logs that a primitive takes the reference, although its call takes the kernel."""
    _log.info("%s: reference: %s", primitive, choice.reason)


def log(what: str) -> None:
    """Logs each decision to the standard error output, if ``what`` is ``"dispatch"``."""
    if what not in ("", "dispatch"):
        raise ValueError(f"JAX_FASTOPS_LOG: it is {what!r}; it must be 'dispatch' or empty")
    if not what:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)


def _kept(function: Callable, args: Sequence) -> int:
    """The bytes of what the derivative of a function keeps."""
    flags = [x is not None for x in args]

    def keeps(*given):
        return jax.tree.leaves(jax.vjp(lambda *given: function(*placed(given, flags)), *given)[1])

    kept = jax.eval_shape(keeps, *selected(args, flags))
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in kept]
    return sum(size for size in sizes if isinstance(size, int))  # not symbolic


def is_on() -> bool:
    """Whether a function is explained in this thread."""
    return bool(_session.value)


@contextlib.contextmanager
def _in_thread(name: str, value: Any):
    before = getattr(_thread, name)
    setattr(_thread, name, value)
    try:
        yield value
    finally:
        setattr(_thread, name, before)


def decisions():
    """A context that gives a list of the decisions that are made in it."""
    return _in_thread("decisions", [])


def at(where: Callable[[], str]):
    """A context in which calls of ops are shown as at the place that a function gives."""
    return _in_thread("where", where)


_mark = Primitive("fastops_explained")
_mark.multiple_results = True
_mark.def_impl(lambda *xs, **params: list(xs))
_mark.def_abstract_eval(lambda *avals, **params: list(avals))


def _mark_jvp(primals, tangents, *, session, index):
    records = _sessions.get(session)
    if records is not None and not all(type(t) is ad.Zero for t in tangents):
        records[index].differentiated = True
    return _mark.bind(*primals, session=session, index=index), list(tangents)


ad.primitive_jvps[_mark] = _mark_jvp
batching.primitive_batchers[_mark] = lambda xs, dims, **params: (_mark.bind(*xs, **params), dims)


# What lowers each primitive of an op.
stages: dict[Primitive, Any] = {}


@dataclasses.dataclass
class _Program:
    """What a walk through a traced program finds."""

    records: list[_Record]
    session: int
    devices: int = 1  # over which the program may be partitioned
    calls: dict[int, Any] = dataclasses.field(default_factory=dict)  # of primitives of ops

    def walk(self, jaxpr, times: int, again: bool) -> None:
        """Counts the runs of each call. ``again``: inside of what ``jax.checkpoint`` repeats."""
        for equation in jaxpr.eqns:
            if equation.primitive is _mark:
                record = self.records[equation.params["index"]]
                record.recomputed |= again
                record.calls += 0 if again else times
                continue
            if equation.primitive in stages:
                self.calls[id(equation)] = equation
                continue
            repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            inner_again = again or bool(equation.params.get("differentiated"))
            for value in equation.params.values():
                for part in value if isinstance(value, (tuple, list)) else (value,):
                    self.devices = max(self.devices, _devices(part))
                    inner = getattr(part, "jaxpr", part)
                    if hasattr(inner, "eqns"):
                        self.walk(inner, times * repeats, inner_again)

    def decide(self) -> None:
        """Asks for the decisions of lowering."""
        platform, known = lowering_platform(), {}
        for equation in self.calls.values():
            call = equation.params["call"]
            session, index = call.request.record or (0, 0)
            if session != self.session:
                continue
            avals = tuple(x.aval for x in equation.invars)
            mesh = equation.ctx.cur_abstract_mesh
            devices = self.devices
            if AxisType.Manual in mesh.axis_types:
                pairs = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
                devices = math.prod(n for n, kind in pairs if kind != AxisType.Manual)
            params = dict(equation.params, call=call.without_record())
            key = equation.primitive, avals, devices, *params.values()
            if key not in known:
                with equation.ctx.manager:
                    stage = stages[equation.primitive]
                    known[key] = stage.explained(avals, platform, devices, **params)
            self.records[index].lowered.append(known[key])


def _devices(value) -> int:
    """The number of devices of a sharding, a mesh, or an array that has a sharding."""
    value = getattr(value, "sharding", value)
    return math.prod(getattr(getattr(value, "mesh", value), "axis_sizes", ()))
