"""Plans what to replace in a program, and evaluates it with calls in place of patterns."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from jax_fastops import _compat, _explain
from jax_fastops.autofuse._graph import Graph, Level, is_ref, opened
from jax_fastops.autofuse._rule import Rewrite, Search
from jax_fastops.autofuse._rules import RULES
from jax_fastops.autofuse._value import Value


class Plan:
    """What is replaced in a program."""

    def __init__(self, graph: Graph, settings: Settings):
        self.search = Search(RULES, settings.dropout, settings.observe is not None)
        self.rewrites: list[Rewrite] = []
        self.rule = settings.rule
        self.derivative = _derivative(graph) if settings.observe is not None else None
        self.at: dict[Level, dict[Any, Rewrite]] = {}
        self.touched: set[Level] = set()
        for node in graph.nodes:  # in order, because a value depends on those before it
            for value in node.outputs:
                _ = value.number, value.source(), value.source(narrowing=True)
        needed = set(graph.results)
        replaced: set[Value] = set()
        for node in reversed(graph.nodes):
            plain = bool(node.equation.effects)
            for value in node.outputs:
                if value not in needed or value in replaced:
                    continue
                rewrite = self.search.find(value)
                if rewrite is None:
                    plain = True
                    continue
                self._take(rewrite)
                replaced.update(rewrite.results)
                needed.update(rewrite.reads)
            if plain:
                needed.update(node.inputs)

    def _take(self, rewrite: Rewrite) -> None:
        self.rewrites.append(rewrite)
        level = rewrite.level
        replaced = {v.places[level]: rewrite for v in rewrite.results if level in v.places}
        self.at.setdefault(level, {}).update(replaced)
        self.touched.update(level.chain())


def _derivative(graph: Graph) -> Value | None:
    """A value that belongs to a derivative, if the program computes one."""
    for node in graph.nodes:
        calls = (level.equation for level in node.level.chain() if level.parent is not None)
        stacks = (str(e.source_info.name_stack) for e in (node.equation, *calls))
        if node.outputs and any("jvp(" in stack for stack in stacks):
            return node.outputs[0]
    return None


_BODIES = {
    **dict.fromkeys(("scan", "remat2", "checkpoint"), ("jaxpr",)),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), ("call_jaxpr",)),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
}
# A body without any of these is not worth a look.
_WORK = {*_BODIES, "jit", "pjit", "shard_map", "mul", "div", "add", "sub"}


class Settings(NamedTuple):
    """Options: a function that sees each plan, and whether dropout may take other masks.

    ``rule`` is the kind of function around the program whose own rule runs in a derivative.
    """

    observe: Callable[[Plan], object] | None = None
    dropout: bool = False
    rule: str = ""


def fused(jaxpr, constants: Sequence[Any], args: Sequence[Any], settings: Settings) -> list:
    """The results of a program, with the calls of ops in place of patterns."""
    graph = Graph(jaxpr, constants)
    plan = Plan(graph, settings)
    if settings.observe is not None:
        settings.observe(plan)
    return _Run(plan, graph.top, args, settings).results()


class _Run:
    """The evaluation of one level."""

    def __init__(self, plan: Plan, level: Level, args: Sequence[Any], settings: Settings):
        self._plan, self._level, self._settings = plan, level, settings
        jaxpr = level.jaxpr
        self._values = dict(zip(jaxpr.invars, args, strict=True))
        self._values.update(zip(jaxpr.constvars, level.constants, strict=True))
        self._replaced = plan.at.get(level, {})
        self._makers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self._failed: set[Rewrite] = set()
        self._copies: dict[Any, Any] = {}  # of results that the op gives twice

    def results(self) -> list:
        for index in self._order():
            equation = self._level.jaxpr.eqns[index]
            needed = [v for v in equation.outvars if v in self._needed]
            for var in needed:
                if var in self._replaced:
                    self._compute(var)
            if equation.effects or any(v not in self._replaced for v in needed):
                self._evaluate(index)
        return [self._read(a) for a in self._level.jaxpr.outvars]

    def _order(self) -> list[int]:
        """The equations that are needed."""
        results = [a for a in self._level.jaxpr.outvars if not isinstance(a, Literal)]
        needed = self._needed = Counter(results)
        counted = set()
        order = []
        for index, equation in reversed(list(enumerate(self._level.jaxpr.eqns))):
            needed_here = [v for v in equation.outvars if v in needed]
            if not needed_here and not equation.effects:
                continue
            order.append(index)
            for var in needed_here:
                rewrite = self._replaced.get(var)
                if rewrite is not None and rewrite not in counted:
                    counted.add(rewrite)
                    needed.update(
                        v.places[self._level] for v in rewrite.reads if self._level in v.places
                    )
            if equation.effects or any(v not in self._replaced for v in needed_here):
                needed.update(a for a in equation.invars if not isinstance(a, Literal))
        return order[::-1]

    def _read(self, atom):
        if isinstance(atom, Literal):
            return atom.val
        self._compute(atom)
        value = self._values[atom]
        if atom in self._copies:
            self._values[atom] = self._copies.pop(atom)
        return value

    def _compute(self, var) -> None:
        if var not in self._values:
            rewrite = self._replaced.get(var)
            if rewrite is None or rewrite in self._failed or not self._call(rewrite):
                self._evaluate(self._makers[var])

    def _call(self, rewrite: Rewrite) -> bool:
        given = [
            self._read(v.places[self._level])
            if self._level in v.places
            else jnp.full(v.shape, v.number, v.dtype)
            for v in rewrite.reads
        ]
        var = rewrite.root.places[self._level]
        scope = self._level.jaxpr.eqns[self._makers[var]].source_info.name_stack
        stack = source_info_util.current_name_stack() + scope
        with _explain.at(rewrite.root.line), source_info_util.set_name_stack(stack):
            twice = rewrite.fanout and self._needed[var] == 2
            y, *others = self._results(rewrite, given, twice)
        copy = others.pop(0) if twice else None
        if _visible(jax.typeof(y)) != _visible(rewrite.root.aval):
            self._failed.add(rewrite)
            return False
        if twice:
            self._copies[var] = copy
        for value, result in zip(rewrite.results, (y, *others), strict=False):
            var = value.places.get(self._level)
            if var is not None and var in self._replaced:
                self._values[var] = result.reshape(value.shape).astype(value.dtype)
        return True

    def _results(self, rewrite: Rewrite, given: Sequence[Any], twice: bool) -> Sequence[Any]:
        """The results of a call, by its traced program if that is for just these types."""
        program = self._plan.search.program(rewrite.call, rewrite.reads, twice)
        types = [jax.typeof(x) for x in given]
        if isinstance(program, str) or program.in_avals != types or _explain.is_on():
            return rewrite.call(*given, fanout=twice)
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *given)

    def _evaluate(self, index: int) -> None:
        level = self._level
        equation = level.jaxpr.eqns[index]
        args = [self._read(a) for a in equation.invars]
        if index in level.calls:
            inner = level.calls[index]
            if inner in self._plan.touched or _has_bodies(inner.jaxpr):
                run = functools.partial(_Run, self._plan, inner, settings=self._settings)
                equation = _with_body(equation, "jaxpr", lambda *a: run(a).results())
        elif equation.primitive.name == "shard_map":
            self._store(equation, _sharded(equation, args, self._settings))
            return
        elif equation.primitive.name in _BODIES:
            for name in _BODIES[equation.primitive.name]:
                equation = _with_fused_bodies(equation, name, self._settings)
        self._store(level.jaxpr.eqns[index], _bind(level.jaxpr, equation, args))

    def _store(self, equation, results) -> None:
        for var, result in zip(equation.outvars, results, strict=True):
            if var not in self._replaced or self._replaced[var] in self._failed:
                self._values[var] = result
            else:
                self._values.setdefault(var, result)


def _has_bodies(jaxpr) -> bool:
    return any(
        e.primitive.name in _BODIES
        or e.primitive.name == "shard_map"
        or (e.primitive.name in ("jit", "pjit") and _has_bodies(e.params["jaxpr"].jaxpr))
        for e in jaxpr.eqns
    )


def _bind(jaxpr, equation, args) -> list:
    """Evaluates one equation, with its name stack and source line."""
    pairs = zip(equation.invars, args, strict=True)
    variables = {atom: x for atom, x in pairs if not isinstance(atom, Literal)}
    one = jaxpr.replace(
        constvars=[], invars=list(variables), outvars=list(equation.outvars), eqns=[equation]
    )
    return jax.core.eval_jaxpr(one, [], *variables.values())


def _with_body(equation, name: str, body: Callable):
    """The equation with another body, or as it is if the new one has another type."""
    old = equation.params[name]
    inner, _ = opened(old)
    if any(map(is_ref, (*inner.invars, *inner.constvars))):
        return equation
    closed = hasattr(old, "consts") and hasattr(old, "jaxpr")
    new = jax.make_jaxpr(body)(*[_compat.struct_of(v.aval) for v in inner.invars])
    before, after = (
        [(_visible(v.aval), v.aval.weak_type) for v in j.outvars] for j in (inner, new.jaxpr)
    )
    if before != after or (not closed and new.consts):
        return equation
    params = {**equation.params, name: new if closed else new.jaxpr}
    return equation.replace(params=params)


def _visible(aval) -> tuple:
    """What a user can see of a type."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None), spec


def _with_fused_bodies(equation, name: str, settings: Settings):
    if (bodies := equation.params.get(name)) is None:
        return equation
    if (kind := equation.primitive.name).startswith("custom_"):
        settings = settings._replace(rule=kind.partition("_call")[0])

    def new_body(body):
        if not any(e.primitive.name in _WORK for e in opened(body)[0].eqns):
            return body
        one = equation.replace(params={name: body})
        return _with_body(one, name, _fused_body(body, settings)).params[name]

    several = isinstance(bodies, (tuple, list))
    new = type(bodies)(map(new_body, bodies)) if several else new_body(bodies)
    return equation.replace(params={**equation.params, name: new})


def _fused_body(body, settings: Settings) -> Callable[..., list]:
    """A body as a function, with the calls of ops in place of patterns."""
    jaxpr, constants = opened(body)
    return lambda *args: fused(jaxpr, constants, args, settings)


def _sharded(equation, args, settings: Settings) -> list:
    params = equation.params
    mapped = jax.shard_map(
        _fused_body(params["jaxpr"], settings),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params.get("newly_manual_axes") or params["manual_axes"]),  # jax < 0.10
        check_vma=params["check_vma"],
    )
    return mapped(*args)
