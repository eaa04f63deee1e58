"""Plans what to replace in a program, and evaluates it with calls in place of patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from jax_fastops import _compat, _explain
from jax_fastops._autofuse.finding import Finder, Match
from jax_fastops._autofuse.graph import Graph, Level, Value, is_ref, opened
from jax_fastops._autofuse.meaning import constant, resolve


class Plan:
    """What is replaced in a program."""

    def __init__(self, graph: Graph, settings: Settings):
        finder = Finder(settings.dropout, settings.observe is not None)
        self.matches: list[Match] = []
        self.misses, self.programs = finder.misses, finder.programs
        self.rule = settings.rule
        self.derivative = _derivative(graph) if settings.observe is not None else None
        self.at: dict[Level, dict[Any, tuple[Match, int]]] = {}
        self._touched: set[Level] = set()
        for node in graph.nodes:  # in order, because a value depends on those before it
            for value in node.outputs:
                constant(value)
                resolve(value)
                resolve(value, narrowing=True)
        needed = set(graph.results)
        replaced: set[Value] = set()
        for node in reversed(graph.nodes):
            plain = bool(node.equation.effects)
            for value in node.outputs:
                if value not in needed or value in replaced:
                    continue
                match = finder.find(value)
                if match is None:
                    plain = True
                    continue
                self._take(match)
                replaced.update(match.results)
                needed.update(match.reads)
            if plain:
                needed.update(node.inputs)

    def _take(self, match: Match) -> None:
        self.matches.append(match)
        for index, value in enumerate(match.results):
            if match.level in value.places:
                self.at.setdefault(match.level, {})[value.places[match.level]] = match, index
        level: Level | None = match.level
        while level is not None:
            self._touched.add(level)
            level = level.parent

    def touches(self, level: Level) -> bool:
        return level in self._touched


def _derivative(graph: Graph) -> Value | None:
    """A value that belongs to a derivative, if the program computes one."""
    for node in graph.nodes:
        level: Level | None = node.level
        equations = [node.equation]
        while level is not None and level.equation is not None:
            equations.append(level.equation)
            level = level.parent
        if node.outputs and any("jvp(" in str(e.source_info.name_stack) for e in equations):
            return node.outputs[0]
    return None


_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr",),
}
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


def _has_work(jaxpr) -> bool:
    """Whether a body is worth a look: it has arithmetic, or bodies of its own."""
    return any(e.primitive.name in _WORK for e in jaxpr.eqns)


class _Run:
    """The evaluation of one level."""

    def __init__(self, plan: Plan, level: Level, args: Sequence[Any], settings: Settings):
        self._plan, self._level, self._settings = plan, level, settings
        jaxpr = level.jaxpr
        self._values = dict(zip(jaxpr.invars, args, strict=True))
        self._values.update(zip(jaxpr.constvars, level.constants, strict=True))
        self._replaced = plan.at.get(level, {})
        self._makers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self._failed: set[Match] = set()
        self._copies: dict[Any, Any] = {}  # of results that the op gives twice

    def results(self) -> list:
        for index in self._order():
            equation = self._level.jaxpr.eqns[index]
            for var in equation.outvars:
                if var in self._replaced and var in self._needed:
                    self._compute(var)
            if equation.effects or any(
                v in self._needed and v not in self._replaced for v in equation.outvars
            ):
                self._evaluate(index)
        return [self._read(a) for a in self._level.jaxpr.outvars]

    def _order(self) -> list[int]:
        """The equations that are needed."""
        results = [a for a in self._level.jaxpr.outvars if not isinstance(a, Literal)]
        needed = self._needed = Counter(results)
        counted = set()
        order = []
        for index, equation in reversed(list(enumerate(self._level.jaxpr.eqns))):
            wanted = [v for v in equation.outvars if v in needed]
            if not wanted and not equation.effects:
                continue
            order.append(index)
            for var in wanted:
                match = self._replaced[var][0] if var in self._replaced else None
                if match is not None and match not in counted:
                    counted.add(match)
                    needed.update(
                        v.places[self._level] for v in match.reads if self._level in v.places
                    )
            if equation.effects or any(v not in self._replaced for v in wanted):
                needed.update(a for a in equation.invars if not isinstance(a, Literal))
        return order[::-1]

    def _read(self, atom):
        if isinstance(atom, Literal):
            return atom.val
        self._compute(atom)
        found = self._values[atom]
        if atom in self._copies:
            self._values[atom] = self._copies.pop(atom)
        return found

    def _compute(self, var) -> None:
        if var not in self._values:
            match = self._replaced[var][0] if var in self._replaced else None
            if match is None or match in self._failed or not self._call(match):
                self._evaluate(self._makers[var])

    def _call(self, match: Match) -> bool:
        given = [
            self._read(v.places[self._level])
            if self._level in v.places
            else jnp.full(v.shape, constant(v), v.dtype)
            for v in match.reads
        ]
        var = match.root.places[self._level]
        scope = self._level.jaxpr.eqns[self._makers[var]].source_info.name_stack
        stack = source_info_util.current_name_stack() + scope
        with _explain.at(match.root.line), source_info_util.set_name_stack(stack):
            twice = match.pattern.fanout and self._needed[var] == 2
            y, *others = self._results(match, given, twice)
        copy = others.pop(0) if twice else None
        if _visible(jax.typeof(y)) != _visible(match.root.aval):
            self._failed.add(match)
            return False
        if twice:
            self._copies[var] = copy
        for value, result in zip(match.results, (y, *others), strict=False):
            var = value.places.get(self._level)
            if var is not None and var in self._replaced:
                self._values[var] = _as(result, value)
        return True

    def _results(self, match: Match, given: Sequence[Any], twice: bool) -> Sequence[Any]:
        """The results of a call, by its traced program if that is for just these types."""
        program = self._plan.programs(match.call, match.reads, twice)
        types = [jax.typeof(x) for x in given]
        if isinstance(program, str) or program.in_avals != types or _explain.is_on():
            return match.call(*given, fanout=twice)
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *given)

    def _evaluate(self, index: int) -> None:
        level = self._level
        equation = level.jaxpr.eqns[index]
        args = [self._read(a) for a in equation.invars]
        if index in level.calls:
            inner = level.calls[index]
            if self._plan.touches(inner) or _has_bodies(inner.jaxpr):
                equation = _with_body(equation, "jaxpr", lambda *a: self._run(inner, a))
        elif equation.primitive.name == "shard_map":
            self._store(equation, _sharded(equation, args, self._settings))
            return
        elif equation.primitive.name in _BODIES:
            for name in _BODIES[equation.primitive.name]:
                equation = _with_fused_bodies(equation, name, self._settings)
        self._store(level.jaxpr.eqns[index], _bind(level.jaxpr, equation, args))

    def _run(self, level: Level, args) -> list:
        return _Run(self._plan, level, args, self._settings).results()

    def _store(self, equation, results) -> None:
        for var, result in zip(equation.outvars, results, strict=True):
            if var not in self._replaced or self._replaced[var][0] in self._failed:
                self._values[var] = result
            else:
                self._values.setdefault(var, result)


def _as(result, value: Value):
    result = result if result.shape == value.shape else result.reshape(value.shape)
    return result if result.dtype == value.dtype else result.astype(value.dtype)


def _has_bodies(jaxpr) -> bool:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _BODIES or name == "shard_map":
            return True
        if name in ("jit", "pjit") and _has_bodies(equation.params["jaxpr"].jaxpr):
            return True
    return False


def _bind(jaxpr, equation, args) -> list:
    """Evaluates one equation, with its name stack and source line."""
    variables: dict[Any, Any] = {}
    for atom, x in zip(equation.invars, args, strict=True):
        if not isinstance(atom, Literal):
            variables[atom] = x
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
    bodies = equation.params.get(name)
    if bodies is None:
        return equation
    if (kind := equation.primitive.name).startswith("custom_"):
        settings = settings._replace(rule=kind.partition("_call")[0])
    several = isinstance(bodies, (tuple, list))
    found = []
    for body in bodies if several else (bodies,):
        if not _has_work(opened(body)[0]):
            found.append(body)
            continue
        alone = equation.replace(params={name: body})
        found.append(_with_body(alone, name, _fused_body(body, settings)).params[name])
    new = type(bodies)(found) if several else found[0]
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
