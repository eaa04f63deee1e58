"""Plans what to replace in a program, and evaluates it with calls in place of patterns."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from jax_fastops import _compat, _explain, _implementation
from jax_fastops.autofuse import _kept, _tune
from jax_fastops.autofuse._attention import AttentionRule
from jax_fastops.autofuse._decisions import Verdict, of_layers, verdicts
from jax_fastops.autofuse._dense import layers
from jax_fastops.autofuse._draws import Draws, has_draws
from jax_fastops.autofuse._dropout import DropoutRule
from jax_fastops.autofuse._embedding import EmbeddingRule
from jax_fastops.autofuse._graph import BODIES, Graph, bind, is_ref, opened
from jax_fastops.autofuse._group_norm import GroupNormRule
from jax_fastops.autofuse._heads import HeadsRule
from jax_fastops.autofuse._linear import LinearLossRule
from jax_fastops.autofuse._one_hot import OneHotLossRule
from jax_fastops.autofuse._pattern_rule import PatternRule
from jax_fastops.autofuse._rule import (
    Miss,
    Rewrite,
    Rule,
    Search,
    calls_op,
    inlined,
    takes_kernel,
    visible,
)
from jax_fastops.autofuse._ruled_loss import RuledLossRule
from jax_fastops.autofuse._segments import SegmentRule
from jax_fastops.autofuse._value import NO_EQUATION, Node, Value
from jax_fastops.autofuse._windows import WindowRule

# In the order in which a search asks them.
RULES: list[type[Rule]] = [
    *(AttentionRule, DropoutRule, WindowRule, HeadsRule, EmbeddingRule, SegmentRule),
    *(GroupNormRule, RuledLossRule, LinearLossRule, OneHotLossRule, PatternRule),
]


class Plan:
    """What is replaced in a program."""

    def __init__(self, graph: Graph, settings: Settings):
        self.rewrites: list[Rewrite] = []
        self.replaced: dict[Value, Rewrite] = {}
        self.rule = settings.rule
        self.derivative = _derivative(graph) if settings.observe is not None else None
        self.verdicts: dict[Rewrite, Verdict] = {}
        self.why_not_tuned = _tune.why_not() if settings.tune else ""
        self._chosen: dict[Rewrite, Any] = {}
        self.numbers: dict[Value, int] = {}
        draws: tuple[tuple[int, bool], ...] = ()
        if settings.draws is not None:
            self.numbers = settings.draws.numbers(graph, settings.given)
            draws = settings.draws.mark(graph, self.numbers)
        options = tuple(RULES), settings.dropout, settings.tune, draws
        key = functools.partial(_kept.key_of, graph, *options)
        kept = _kept.found(key()) if settings.observe is None else None
        if kept is not None:
            self.search = Search((), settings.dropout, False, kept.programs)
            for rewrite, chosen in kept.rewrites(graph):
                self.replaced.update(dict.fromkeys(rewrite.results, rewrite))
                self._chosen[rewrite] = chosen
            self.rewrites += self._chosen
        else:
            graph.link()
            self._find(graph, settings)
            while settings.draws is not None and settings.draws.mark_mixed(
                graph, self.numbers, self._needed(graph)
            ):
                self._find(graph, settings)
            if settings.observe is None and (key_after := key()) is not None:
                pairs = [(rewrite, self.chosen(rewrite)) for rewrite in self.rewrites]
                _kept.keep(key_after, graph, pairs, self.search.programs)
        self.reads = {v for rewrite in self.rewrites for v in rewrite.reads}

    def _needed(self, graph: Graph) -> set[Value]:
        """The values that the program and the calls read."""
        needed = set(graph.results)
        for node in reversed(graph.nodes):
            results = [v for v in node.outputs if v in needed]
            for value in results:
                if (rewrite := self.replaced.get(value)) is not None:
                    needed.update(rewrite.reads)
            if node.equation.effects or any(v not in self.replaced for v in results):
                needed.update(node.inputs)
        return needed

    def _find(self, graph: Graph, settings: Settings) -> None:
        self.search = Search(RULES, settings.dropout, settings.observe is not None)
        self.rewrites, self.replaced, self.verdicts, self._chosen = [], {}, {}, {}
        self._nodes, self._has_contexts = graph.nodes, graph.has_contexts
        self._positions = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.nodes:  # in order, because a value depends on those before it
            for value in node.outputs:
                _ = value.number, value.source(), value.source(narrowing=True)
        needed = set(graph.results)
        for node in reversed(graph.nodes):
            stays = bool(node.equation.effects)
            for value in node.outputs:
                if value not in needed or value in self.replaced:
                    continue
                rewrite = self.search.find(value)
                if rewrite is not None and self._differs_in_context(rewrite):
                    rewrite = None
                if rewrite is None or self._reads_own_result(rewrite):
                    stays = True
                    continue
                self.rewrites.append(rewrite)
                self.replaced.update(dict.fromkeys(rewrite.results, rewrite))
                needed.update(rewrite.reads)
            if stays:
                needed.update(node.inputs)
        if _implementation.current() == "auto":
            if self.rewrites:
                self._decide(graph, settings.tune)
            self._take_layers(graph, settings.tune)

    def _program(self, rewrite: Rewrite, chosen: Any) -> Any:
        return self.search.program(rewrite.call, rewrite.reads, chosen=chosen)

    def _decide(self, graph: Graph, tune: bool) -> None:
        """Decides on the matches by their regions, and leaves those that take no kernel."""
        of_ops = [rewrite for rewrite in self.rewrites if calls_op(rewrite.call)]
        self.verdicts = verdicts(graph, of_ops, self._program, tune)
        for rewrite, (chosen, reason) in self.verdicts.items():
            self._chosen[rewrite] = chosen
            choices = zip((chosen.forward, chosen.step), takes_kernel(rewrite.call), strict=True)
            if not any(table if choice is None else choice for choice, table in choices):
                self.search.misses.append(Miss(rewrite.name, rewrite.root, reason))
                self.rewrites.remove(rewrite)
                for value in rewrite.results:
                    self.replaced.pop(value, None)

    def _take_layers(self, graph: Graph, tune: bool) -> None:
        """Takes the products before activations with them, where a forward gains."""
        found = layers(graph, self._positions, self.search, self.rewrites, self.chosen)
        verdicts = of_layers(found, self._program, tune)
        for layer in found:
            rewrite, verdict = layer.rewrite, verdicts.get(layer)
            assert rewrite is not None
            if verdict is not None and not verdict.chosen.forward:
                part = layer.own is not None
                self.search.misses.append(Miss(rewrite.name, rewrite.root, verdict.reason, part))
                continue
            if verdict is not None:
                self.verdicts[rewrite], self._chosen[rewrite] = verdict, verdict.chosen
            for other in {self.replaced[v] for v in rewrite.inner if v in self.replaced}:
                self.rewrites.remove(other)
                for value in other.results:
                    self.replaced.pop(value, None)
            self.rewrites.append(rewrite)
            self.replaced[rewrite.root] = rewrite
        if found:
            self.rewrites.sort(key=lambda r: self._positions[r.root.node], reverse=True)

    def chosen(self, rewrite: Rewrite) -> Any:
        """What the region of a match takes, or ``None`` if the table decides."""
        return self._chosen.get(rewrite)

    def _reads_own_result(self, rewrite: Rewrite) -> bool:
        """Whether an operand of the call depends on a result of it, which is then a miss."""
        root, *others = rewrite.results
        others = [v for v in others if v.node is not NO_EQUATION]  # that the program needs
        if not others:
            return False
        # What depends on the others comes after them, and operands come before the root. But a
        # later call may have results before it, which then depend on all that it reads.
        depends, end = set(others), self._positions[root.node]
        nodes = self._nodes[min(self._positions[v.node] for v in others) : end]
        calls = [
            call
            for call in self.rewrites
            if any(self._positions.get(v.node, end) < end for v in call.results)
        ]
        if calls:
            depends, nodes = set(rewrite.results), self._nodes
        size = 0
        while size < len(depends):
            size = len(depends)
            for node in nodes:  # effects keep their place among the others
                if node.equation.effects or not depends.isdisjoint(node.inputs):
                    depends.update(node.outputs)
            for call in calls:
                if not depends.isdisjoint(call.reads):
                    depends.update(call.results)
        if depends.isdisjoint(rewrite.reads):
            return False
        self.search.misses.append(Miss(rewrite.name, root, "an operand depends on another result"))
        return True

    def _differs_in_context(self, rewrite: Rewrite) -> bool:
        """Whether the equations of a match run elsewhere, or not all have the same metadata."""
        if not self._has_contexts:
            return False
        nodes: set[Node] = set()
        left = list(rewrite.results)
        while left:
            value = left.pop()
            if value.node not in nodes and value not in rewrite.reads:
                nodes.add(value.node)
                left += value.node.inputs
        contexts = {_compat.context_of(n.equation) for n in nodes - {NO_EQUATION}}
        if len(contexts) == 1 and contexts.pop()[:1] in ((), (None,)):
            return False
        reason = "its operations differ in mesh or metadata for XLA, or are in compute_on"
        self.search.misses.append(Miss(rewrite.name, rewrite.root, reason))
        return True

    def steps(self, steps: Sequence[Node]) -> Iterator[Node]:
        """The steps, where functions in which something is replaced are a part of the program."""
        for step in steps:
            if self._is_changed(step):
                yield from self.steps(step.body)
            else:
                yield step

    def _is_changed(self, call: Node) -> bool:
        """Whether a function computes what is replaced, or what a call of an op reads."""
        if not call.body:
            return False
        inner = {v for step in call.body for v in step.outputs}
        read_inside = not self.reads.isdisjoint(inner.difference(call.outputs))
        return (
            read_inside
            or not inner.isdisjoint(self.replaced)
            or any(self._is_changed(step) for step in call.body)
        )


def _derivative(graph: Graph) -> Value | None:
    """A value that belongs to a derivative, if the program computes one."""
    for node in graph.nodes:
        if node.outputs and node.is_of_derivative:
            return node.outputs[0]
    return None


# A body without any of these is not worth a look. Functions that it calls may have one.
_CALLS = {"jit", "pjit", "custom_jvp_call"}
_WORK = {*BODIES, "mul", "div", "add", "sub", "gather"} - _CALLS


def _has_work(jaxpr) -> bool:
    """Whether a program may have something to replace: that of a relu has not."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _WORK:
            return True
        if name in _CALLS and _has_work(opened(equation.params[BODIES[name][0]])[0]):
            return True
    return False


def _has_bodies(step: Node) -> bool:
    """Whether there are bodies in which something may be replaced."""
    if step.body:
        return any(map(_has_bodies, step.body))
    return step.equation.primitive.name in BODIES


class Settings(NamedTuple):
    """Options: a function that sees each plan, whether dropout may take other masks, and whether
    regions are timed.

    ``rule`` is the kind and name of the function around the program whose own rule runs in a
    derivative. ``draws`` has the random bits of the whole program, if masks of dropout matter, and
    ``given`` the numbers of the operands there.
    """

    observe: Callable[[Plan], object] | None = None
    dropout: bool | str = False
    tune: bool = False
    rule: str = ""
    draws: Draws | None = None
    given: Sequence[int] = ()


def fused(jaxpr, constants: Sequence[Any], args: Sequence[Any], settings: Settings) -> list:
    """The results of a program, with the calls of ops in place of patterns."""
    graph = Graph(jaxpr, constants, link=False)
    if settings.dropout and settings.draws is None and has_draws(jaxpr):
        draws = Draws(graph, args)
        settings = settings._replace(draws=draws, given=draws.args)
    plan = Plan(graph, settings)
    if settings.observe is not None:
        settings.observe(plan)
    return _Run(plan, graph, args, settings).results()


class _Run:
    """The evaluation of a program."""

    def __init__(self, plan: Plan, graph: Graph, args: Sequence[Any], settings: Settings):
        self._plan, self._graph, self._settings = plan, graph, settings
        self._arrays = graph.constants | dict(zip(graph.operands, args, strict=True))
        self._steps: dict[Value, Node] = {}  # that makes a value
        self._copies: dict[Value, Any] = {}  # of results that the op gives twice
        self._evaluated: set[Node] = set()
        # Without derivatives, a trace takes equations as they are.
        self._trace = _compat.recorder()

    def results(self) -> list:
        replaced = self._plan.replaced
        for step in self._order():
            needed = [v for v in step.outputs if v in self._needed]
            for value in needed:
                if value in replaced:
                    self._compute(value)
            stays = step.equation.effects or any(v not in replaced for v in needed)
            if stays and step not in self._evaluated:
                self._evaluate(step)
        return [self._read(v) for v in self._graph.results]

    def _order(self) -> list[Node]:
        """The steps that are needed."""
        needed = self._needed = Counter(self._graph.results)
        counted = set()
        order = []
        steps = list(self._plan.steps(self._graph.steps))
        for step in steps:
            for value in step.outputs:  # a function may return an operand
                self._steps.setdefault(value, step)
        for step in reversed(steps):
            needed_here = [v for v in step.outputs if v in needed]
            if not needed_here and not step.equation.effects:
                continue
            order.append(step)
            for value in needed_here:
                rewrite = self._plan.replaced.get(value)
                if rewrite is not None and rewrite not in counted:
                    counted.add(rewrite)
                    needed.update(rewrite.reads)
            if step.equation.effects or any(v not in self._plan.replaced for v in needed_here):
                needed.update(step.operands)
        return order[::-1]

    def _read(self, value: Value):
        self._compute(value)
        array = self._arrays[value]
        if value in self._copies:
            self._arrays[value] = self._copies.pop(value)
        return array

    def _compute(self, value: Value) -> None:
        if value not in self._arrays:
            if (rewrite := self._plan.replaced.get(value)) is None:
                self._evaluate(self._steps[value])
            else:
                self._call(rewrite)

    def _call(self, rewrite: Rewrite) -> None:
        root = rewrite.root
        numbers = [v.number if v in self._graph.constants else None for v in rewrite.reads]
        given = [
            self._read(v) if number is None else None
            for v, number in zip(rewrite.reads, numbers, strict=True)
        ]
        has_context = self._graph.has_contexts
        with root.node.equation.ctx.manager if has_context else contextlib.nullcontext():
            given = [  # a literal may be a Python number
                x if number is None else jnp.full(v.shape, number, v.dtype)
                for x, v, number in zip(given, rewrite.reads, numbers, strict=True)
            ]
            twice = rewrite.fanout and self._needed[root] == 2
            y, *others = self._results(rewrite, given, twice)
            if twice:
                self._copies[root] = others.pop(0)
            for value, result in zip(rewrite.results, (y, *others), strict=False):
                if value.node is not NO_EQUATION:
                    if (result.shape, result.dtype) != (value.shape, value.dtype):
                        result = result.reshape(value.shape).astype(value.dtype)
                    self._arrays[value] = result

    def _results(self, rewrite: Rewrite, given: Sequence[Any], twice: bool) -> Sequence[Any]:
        """The results of a call, by its traced program if that is for just these types."""
        root, chosen = rewrite.root, self._plan.chosen(rewrite)
        stack = _scope(self._steps[root], own=True)
        program = None
        if not (_explain.is_on() or self._graph.has_contexts):  # it is of the context around
            program = self._plan.search.program(rewrite.call, rewrite.reads, twice, chosen)
            program = None if isinstance(program, str) else program
        if program is not None and self._trace is not None and _is_recordable(program):
            if _compat.is_recorded(self._trace, program.jaxpr.invars, given):
                source = root.node.equation.source_info.replace(name_stack=stack)
                return _recorded(self._trace, program.jaxpr, given, source)
        types = [jax.typeof(x) for x in given]
        with _explain.at(lambda: root.line), source_info_util.set_name_stack(stack):
            if program is not None and program.in_avals == types:
                return inlined(program)(*given)
            with _implementation.use_chosen(chosen):
                return rewrite.call(*given, fanout=twice)

    def _inside(self, step: Node) -> Settings:
        """The settings for the bodies of an equation."""
        if self._settings.draws is None:
            return self._settings
        return self._settings._replace(given=[self._plan.numbers[v] for v in step.operands])

    def _evaluate(self, step: Node) -> None:
        self._evaluated.add(step)
        args = [self._read(v) for v in step.operands]
        equation, stack = step.equation, _scope(step)
        sharded = equation.primitive.name == "shard_map"
        if _has_bodies(step) and not sharded:
            with source_info_util.set_name_stack(stack), _mesh_of(equation):
                equation = _with_fused_bodies(equation, self._inside(step))
        recorded = self._trace is not None and not equation.effects and not sharded
        if recorded and _compat.is_recorded(self._trace, equation.invars, args):
            source = equation.source_info
            source = source.replace(name_stack=stack + source.name_stack)
            results = _compat.record(self._trace, equation, args, source)
        else:
            with source_info_util.set_name_stack(stack):
                run = functools.partial(_sharded, settings=self._inside(step)) if sharded else bind
                results = run(equation, args)
        for value, result in zip(step.outputs, results, strict=True):
            if value not in self._plan.replaced:
                self._arrays[value] = result


def _recorded(trace, jaxpr, args: Sequence[Any], source) -> list:
    """The results of a program whose equations a trace records."""
    arrays = dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        given = [None if isinstance(x, Literal) else arrays[x] for x in equation.invars]
        stack = source.name_stack + equation.source_info.name_stack
        results = _compat.record(trace, equation, given, source.replace(name_stack=stack))
        arrays.update(zip(equation.outvars, results, strict=True))
    return [arrays[x] for x in jaxpr.outvars]


def _is_recordable(program) -> bool:
    """Whether all results are made by equations without effects."""
    jaxpr = program.jaxpr
    literals = any(isinstance(x, Literal) for x in jaxpr.outvars)
    return not (program.consts or jaxpr.effects or literals)


def _scope(step: Node, own: bool = False):
    """The names of the scopes around a step, or of the step."""
    stack = source_info_util.current_name_stack()
    for equation in (*reversed(step.callers), *([step.equation] if own else [])):
        stack += equation.source_info.name_stack
    return stack


def _with_fused_bodies(equation, settings: Settings):
    """The equation with calls of ops in its bodies. A body stays if its type would change."""
    if (kind := equation.primitive.name).startswith("custom_"):
        name = opened(equation.params[BODIES[kind][0]])[0].debug_info.func_name
        # Its own rule may draw the masks once more.
        settings = settings._replace(rule=f"{kind.partition('_call')[0]} {name}", dropout=False)

    def fused_body(body, settings):
        jaxpr, _ = opened(body)
        has_ref = any(map(is_ref, (*jaxpr.invars, *jaxpr.constvars)))
        if has_ref or not _has_work(jaxpr):
            return body
        types = [_compat.struct_of(v.aval) for v in jaxpr.invars]
        new = jax.make_jaxpr(_fused_body(body, settings))(*types)
        before, after = (
            [(visible(v.aval), v.aval.weak_type) for v in j.outvars] for j in (jaxpr, new.jaxpr)
        )
        closed = hasattr(body, "consts") and hasattr(body, "jaxpr")
        if before != after or (new.consts and not closed):
            return body
        return new if closed else new.jaxpr

    params = dict(equation.params)
    for name in BODIES[kind]:
        bodies = params.get(name)
        inside = settings
        if settings.draws is not None:
            given = settings.draws.given(equation, name, settings.given)
            inside = settings._replace(given=given)
        if isinstance(bodies, (tuple, list)):
            params[name] = type(bodies)([fused_body(body, inside) for body in bodies])
        elif bodies is not None:
            params[name] = fused_body(bodies, inside)
    return equation.replace(params=params)


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
    with _mesh_of(equation):
        return mapped(*args)


def _mesh_of(equation):
    """The context of the mesh of an equation: another one in ``jax.sharding.auto_axes``."""
    return jax.sharding.use_abstract_mesh(equation.ctx.cur_abstract_mesh)
