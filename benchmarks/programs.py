"""The compiled programs that are timed for a case: what each computes and what it returns.

``forward``         the op, not differentiated
``forward_saving``  the op and its residuals
``backward``        the gradients, from the residuals and the cotangents
``step``            forward and backward as one program, with an optimization barrier between

Three things would falsify the times of such programs. This module avoids them:

- A jitted function that returns one of its inputs, or the same value twice, copies it. Outputs
  that are inputs, repetitions of another output, or constants are left out (``distinct``,
  ``unrepeated``).
- A constant, which XLA can recompute at no cost, is not passed to the backward as an array.
- Fresh outputs can cost more than the op: on a CPU, the first write to a new page costs several
  times the write itself. Every program writes to its previous outputs, which are donated.
"""

import collections
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from benchmarks.cases import PHASES, Case, fo

# Lowered operations that move nothing, up to their first operand.
MOVES = r"(?:stablehlo\.(?:broadcast_in_dim|reshape) |call @\w+\()"


def temp_bytes(compiled) -> int | None:
    """Peak temporary memory of one call, in bytes."""
    stats = compiled.memory_analysis()
    return None if stats is None else int(stats.temp_size_in_bytes)


def kernels(compiled) -> dict[str, int]:
    """How often a compiled program calls each kernel of this package."""
    found = re.findall(r'custom_call_target="jax_fastops\.(\w+)\.v\d+', compiled.as_text())
    return dict(sorted(collections.Counter(found).items()))


@dataclass
class Program:
    """A compiled program with its arguments. A call overwrites the outputs of the last one."""

    name: str
    function: Callable  # flat arrays in, list of arrays out
    args: list[jax.Array]
    implementation: str = ""  # that it is compiled under; by default the one in force
    like: Sequence[Any] | None = None  # the types of the outputs, if they are known
    shardings: Sequence[Any] | None = None  # of the outputs

    @classmethod
    def of(cls, name: str, function: Callable, *args, **more) -> "Program":
        """A program of a function of trees of arrays."""
        leaves, tree = jax.tree.flatten(args)

        def flat(*leaves):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

        return cls(name, flat, leaves, **more)

    def compile(self) -> None:
        """Compile now, under the implementation that is in force."""
        self.compiled  # noqa: B018

    @cached_property
    def lowered(self):
        def program(*flat):
            return self.function(*flat[: len(self.args)])

        program.__name__ = self.name  # the HLO module's name, which a profile shows
        donated = tuple(range(len(self.args), len(self.args) + len(self.outputs)))
        placed = {"out_shardings": self.shardings} if self.shardings else {}
        jitted = jax.jit(program, donate_argnums=donated, keep_unused=True, **placed)
        chosen = fo.use_implementation(self.implementation or fo.info()["implementation"])
        with chosen:
            return jitted.lower(*self.args, *self.outputs)

    @cached_property
    def compiled(self):
        return self.lowered.compile()

    @property
    def operations(self) -> list[str]:
        """The lowered operations in order with their operands, without those that move nothing.

        The result of a function's call is named by the first argument.
        """
        names: dict[str, str] = {}
        found = []
        for name, text in assignments(self.lowered.as_text(), names):
            first = re.match(MOVES + r"([^,) ]+)", text)
            if first:
                names[name] = first[1]
            elif text.startswith("stablehlo.constant"):
                names[name] = re.sub(r"[ ,()]", "", text)
            else:
                names[name] = f"%r{len(found)}"
                found.append(text)
        return found

    @cached_property
    def outputs(self) -> list[jax.Array]:
        like = self.like or jax.eval_shape(self.function, *self.args)
        places = self.shardings or [None] * len(like)
        pairs = zip(like, places, strict=True)
        return [jnp.zeros(a.shape, a.dtype, device=place) for a, place in pairs]

    @property
    def nbytes(self) -> int:
        """Bytes of arguments and outputs."""
        return sum(array.nbytes for array in (*self.args, *self.outputs))

    @property
    def temp_bytes(self) -> int | None:
        return temp_bytes(self.compiled)

    @property
    def kernels(self) -> dict[str, int]:
        """How often the compiled program calls each kernel of this package."""
        return kernels(self.compiled)

    def __call__(self) -> list[jax.Array]:
        self.outputs = self.compiled(*self.args, *self.outputs)
        return self.outputs

    def results(self) -> list[jax.Array]:
        """The results of a call, for a comparison."""
        return self()

    def repeated(self, length: int) -> "Program":
        """``length`` calls in one program; a call starts when the one before has ended."""

        def calls(*args):
            results = []
            for _ in range(length):
                outputs = self.function(*args)
                outputs, args = jax.lax.optimization_barrier((outputs, args))
                results += outputs
            return results

        return Program(f"{self.name}_x{length}", calls, self.args)


@dataclass(frozen=True)
class Source:
    """Where an output of a traced function comes from.

    ``kind`` is "computed" (``index`` counts these), "input" or "output" (``index`` is the
    position of the input, or of the earlier output, of which it is a reshape) or "constant".
    """

    kind: str
    index: int = 0


def distinct(function: Callable, args: Sequence) -> tuple[Callable, list[Source]]:
    """``function`` with only its computed outputs, and the source of each of its outputs."""
    closed = jax.make_jaxpr(function)(*args)
    sources: list[Source] = []
    for position in range(len(closed.jaxpr.outvars)):
        computed = sum(s.kind == "computed" for s in sources)
        sources.append(_source(closed.jaxpr, position, computed))
    kept = [s.kind == "computed" for s in sources]
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, kept, instantiate=True)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts)), sources


def _source(jaxpr, position: int, computed: int) -> Source:
    outvars, var = list(jaxpr.outvars), _viewed(jaxpr, jaxpr.outvars[position])
    if isinstance(var, core.Literal):
        return Source("constant")
    before = [_viewed(jaxpr, other) for other in outvars[:position]]
    for kind, candidates in (("input", list(jaxpr.invars)), ("output", before)):
        for index, candidate in enumerate(candidates):
            if candidate is var:
                return Source(kind, index)
    only = [index == position for index in range(len(outvars))]
    _, used = partial_eval.dce_jaxpr(jaxpr, only, instantiate=False)
    return Source("computed", computed) if any(used) else Source("constant")


def _viewed(jaxpr, var):
    """The array of which a variable is a reshape, which moves nothing; or the variable itself."""
    for eqn in reversed(jaxpr.eqns):
        if any(var is out for out in eqn.outvars):
            if eqn.primitive.name == "reshape":
                var = eqn.invars[0]
            elif eqn.primitive.name in ("jit", "pjit"):
                closed = eqn.params["jaxpr"]
                inner = getattr(closed, "jaxpr", closed)
                place = [var is out for out in eqn.outvars].index(True)
                found = _viewed(inner, inner.outvars[place])
                same = [found is given for given in inner.invars]
                var = eqn.invars[same.index(True)] if any(same) else var
    return var


def unrepeated(function: Callable, args: Sequence) -> Callable:
    """``function`` without the outputs that its lowered program returns a second time.

    Gradients may be the same array, such as those of the terms of a sum. In a real program they
    reach their consumers without a copy. A program that returned both would copy.
    """

    def program(*flat):  # a new function: a trace of the old one may be cached
        return function(*flat)

    first = first_returned(jax.jit(program).lower(*args).as_text())

    def lean(*flat):
        outputs = function(*flat)
        return [outputs[position] for position in first]

    return lean


# Operations that return the same array for the same operands; each is one line of the program.
_PURE = re.compile(r"(call|stablehlo\.(reshape|slice|convert|transpose|pad|broadcast_in_dim)) ")


def first_returned(stablehlo: str) -> list[int]:
    """Positions of the distinct values that a lowered program's main function returns."""
    canonical: dict[str, str] = {}
    known: dict[str, str] = {}
    main = stablehlo.partition("@main")[2]
    main, returned, rest = main.partition("\n    return ")
    if not returned:
        raise ValueError("a lowered program whose main function returns nothing")
    for name, meaning in assignments(main, canonical):
        canonical[name] = known.setdefault(meaning, name) if _PURE.match(meaning) else name
    values = _renamed(rest.partition(" :")[0], canonical).split(", ")
    return [i for i, value in enumerate(values) if value not in values[:i]]


def assignments(stablehlo: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The results and the operations of a program, with other ``names`` for their operands."""
    for name, text in re.findall(r"^\s*(%\w+)(?::\d+)? = (.*)", stablehlo, re.MULTILINE):
        yield name, _renamed(text, names)


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub(r"%\w+", lambda operand: names.get(operand[0], operand[0]), text)


class Operands(NamedTuple):
    """The arrays of a case, shared by all of its contenders, and what the results are."""

    args: list[jax.Array]
    cotangents: list[jax.Array]
    results: jax.tree_util.PyTreeDef
    result_bytes: int


def operands(case: Case) -> Operands:
    """Random operands of ``case``, and cotangents if the case is differentiated."""
    args = [random(i, x.shape, x.dtype) for i, x in enumerate(case.arguments)]
    args = list(case.op.valid(*args))
    function = partial(case.op.reference, **case.layout.options)
    return operands_of(function, args, differentiated=case.phases != ("forward",))


def operands_of(function: Callable, args: list[jax.Array], differentiated: bool) -> Operands:
    """``args`` with cotangents for the results of ``function``."""
    results, treedef = jax.tree.flatten(jax.eval_shape(function, *args))
    wanted = results if differentiated else []
    cotangents = [random(100 + i, r.shape, r.dtype) for i, r in enumerate(wanted)]
    nbytes = sum(math.prod(r.shape) * r.dtype.itemsize for r in results)
    return Operands(args, cotangents, treedef, nbytes)


def random(seed: int, shape, dtype) -> jax.Array:
    """A random array: floats are normally distributed, and seven of eight booleans are True.

    Integers are a hash of their position, which needs no temporaries: for arrays of gigabytes these
    would not fit.
    """
    if dtype == "bool":
        return jax.random.bernoulli(jax.random.key(seed), 0.875, shape)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jax.random.normal(jax.random.key(seed), shape, dtype)
    return _hashed(seed, tuple(shape), jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(1, 2))
def _hashed(seed, shape, dtype) -> jax.Array:
    place = jnp.full((), seed, jnp.uint32)
    for axis in range(len(shape)):
        step = jnp.uint32(2654435761 + 2 * axis)  # odd, and different for each axis
        place = (place + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * step
    return (place >> max(0, 32 - jnp.iinfo(dtype).bits)).astype(dtype)


@dataclass
class Contender:
    """One implementation of a case: its programs by phase, and the bytes of its residuals."""

    programs: dict[str, Program] = field(default_factory=dict)
    saved: dict[str, int] | None = None  # bytes, see `_saved_bytes`


def contender(function, differentiated, data: Operands, prefix: str, phases=PHASES) -> Contender:
    """Compile the programs of ``function``. Their names are ``prefix``, "_" and the phase."""
    pull = _Pullback(function, differentiated, data.results)
    args, cts = data.args, data.cotangents
    result = Contender()

    def add(phase: str, body: Callable, *arrays: jax.Array) -> list[Source]:
        lean, sources = distinct(body, arrays)
        if phase in ("backward", "step"):
            lean = unrepeated(lean, arrays)
        program = Program(f"{prefix}_{phase}", lean, list(arrays))
        program.compile()
        result.programs[phase] = program
        return sources

    if "forward" in phases:
        add("forward", lambda *a: jax.tree.leaves(function(*a)), *args)
    if "backward" in phases:
        sources = add("forward_saving", pull.forward_saving, *args)
        kept = [jnp.array(a) for a in result.programs["forward_saving"]()]
        add("backward", pull.backward(sources, len(args), len(kept)), *args, *kept, *cts)
        result.saved = _saved_bytes(sources, len(cts), args, kept)
        result.saved["constants"] = pull.constant_bytes(sources, args)
    if "step" in phases:
        add("step", lambda *a: pull.step(a[: len(args)], a[len(args) :]), *args, *cts)
    return result


class _Pullback:
    """The differentiated forms of a function, over flat lists of arrays."""

    def __init__(self, function: Callable, positions: tuple[int, ...], treedef):
        self.function, self.positions, self.treedef = function, positions, treedef

    def vjp(self, args):
        """The leaves of the results, and the pullback, whose leaves are the residuals."""

        def of_differentiated(*chosen):
            full = list(args)
            for position, value in zip(self.positions, chosen, strict=True):
                full[position] = value
            return self.function(*full)

        results, pullback = jax.vjp(of_differentiated, *(args[p] for p in self.positions))
        return jax.tree.leaves(results), pullback

    def forward_saving(self, *args):
        results, pullback = self.vjp(args)
        return [*results, *jax.tree.leaves(pullback)]

    def backward(self, sources: list[Source], inputs: int, kept: int) -> Callable:
        """A function of (inputs, computed outputs of forward_saving, cotangents): the gradients."""

        def gradients(*flat):
            args, saved, cts = flat[:inputs], flat[inputs : inputs + kept], flat[inputs + kept :]
            results, pullback = self.vjp(args)
            leaves, treedef = jax.tree.flatten(pullback)
            first = len(results)
            computed = [_lookup(sources, i, args, saved) for i in range(first, len(sources))]
            leaves = [
                old if new is None else new.reshape(old.shape)
                for old, new in zip(leaves, computed, strict=True)
            ]
            return self.gradients(jax.tree.unflatten(treedef, leaves), cts)

        return gradients

    def step(self, args, cts):
        results, pullback = self.vjp(args)
        results, cts = jax.lax.optimization_barrier((results, list(cts)))
        return [*results, *self.gradients(pullback, cts)]

    def gradients(self, pullback, cts) -> list:
        return jax.tree.leaves(pullback(jax.tree.unflatten(self.treedef, cts)))

    def constant_bytes(self, sources: list[Source], args) -> int:
        """Bytes of residuals that depend on no operand; a compiled program does not keep them."""
        outputs = jax.eval_shape(self.forward_saving, *args)
        pairs = zip(sources, outputs, strict=True)
        return sum(o.size * o.dtype.itemsize for s, o in pairs if s.kind == "constant")


def _lookup(sources: list[Source], position: int, args, saved):
    """The array that output ``position`` stands for, or None for a constant."""
    source = sources[position]
    if source.kind == "output":
        return _lookup(sources, source.index, args, saved)
    if source.kind == "constant":
        return None
    return (args if source.kind == "input" else saved)[source.index]


def _saved_bytes(sources: list[Source], results: int, args, kept) -> dict[str, int]:
    """Bytes of distinct arrays that live from forward to backward: in total, and the parts that are
    operands and results, which the caller may hold anyway.
    """
    residuals = sources[results:]
    inputs = {s.index for s in residuals if s.kind == "input"}
    repeated = {sources[s.index] for s in residuals if s.kind == "output" and s.index < results}

    def nbytes(found) -> int:
        return sum(kept[s.index].nbytes for s in found if s.kind == "computed")

    found = {"operands": sum(args[i].nbytes for i in inputs), "results": nbytes(repeated)}
    return {"total": nbytes(residuals) + sum(found.values()), **found}


COLLECTIVES = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    "|collective-broadcast"
)


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """The collectives of a compiled module by kind: their count, and the bytes of their results."""
    found: dict[str, dict[str, int]] = {}
    for line in hlo.splitlines():
        # An asynchronous one is counted at its end: newer versions also list operands at its start.
        match = re.match(rf"\s*(?:ROOT )?\S+ = (.*?) ({COLLECTIVES})(?:-done)?\(", line)
        if match:
            entry = found.setdefault(match[2], {"count": 0, "bytes": 0})
            entry["count"] += 1
            entry["bytes"] += sum(map(_nbytes, re.findall(r"(\w+)\[([\d,]*)\]", match[1])))
    return found


def _nbytes(shape: tuple[str, str]) -> int:
    bits = int((re.search(r"\d+", shape[0]) or ["8"])[0])  # "pred" has none
    return bits // 8 * math.prod(int(n) for n in shape[1].split(",") if n)
