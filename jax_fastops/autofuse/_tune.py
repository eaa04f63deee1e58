"""Measures the two forms of regions on the device of the process: times and memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from jax_fastops import _compat
from jax_fastops._arguments import placed, selected
from jax_fastops._dispatch import lowering_platform
from jax_fastops._settings import own_code
from jax_fastops.autofuse._cost import traffic
from jax_fastops.autofuse._meaning import LOCAL, REDUCTIONS
from jax_fastops.autofuse._regions import KEPT, Region, has_products, order_in_memory
from jax_fastops.autofuse._rule import Rewrite
from jax_fastops.autofuse._value import Value

PHASES = "forward", "step"
# A program has so many copies of a region that they move this many bytes, which no cache holds. On
# a GPU it repeats them: the host takes longer to call a program than a small region runs.
_COPIES, _MOVED = 8, {"cpu": 8 << 20, "cuda": 128 << 20}
_TURNS, _REPEATED = 16, {"cuda": 1 << 30}
_BATCH, _BUDGET = 2e-3, 0.04  # seconds of a batch of runs, and of all runs of a form


class Times(NamedTuple):
    """Seconds of a run of a region, plain and with the calls of ops, and bytes of its temporary
    arrays."""

    plain: float
    kernel: float
    plain_bytes: float = 0
    kernel_bytes: float = 0


def why_not() -> str:
    """Why regions are neither timed nor looked up in the cache here, or an empty text.

    Processes that choose different programs hang in collectives. Arrays over several devices have
    other shapes on each of them than in the program, except inside of ``shard_map``.
    """
    if jax.process_count() > 1:
        return "the program runs in several processes"
    manual = jax.sharding.get_abstract_mesh().axis_types
    if manual and all(kind == AxisType.Manual for kind in manual):
        return ""
    if jax.local_device_count() > 1:
        return f"arrays may be spread over the {jax.local_device_count()} devices of this process"
    return ""


def is_sharded(region: Region) -> bool:
    """Whether a type of a region says that a dimension is spread over devices."""
    values = (*region.inputs, *(v for node in region.nodes for v in node.outputs))
    return any(_compat.sharded_spec(v.aval) is not None for v in values)


def measure(regions: Sequence[Region], program: Callable[[Rewrite], Any]) -> list[dict[str, Times]]:
    """The times of each region by phase. A phase that does not run is not there.

    The programs are compiled in parallel. Then each region is timed by itself, so that the memory
    of one is free before the next. All of this is in threads of its own, in which nothing is
    traced and no context of the caller holds.
    """
    x64 = _compat.x64_is_on()
    with concurrent.futures.ThreadPoolExecutor(1) as own:
        return own.submit(_measured, regions, program, x64).result()


def _measured(regions, program, x64: bool) -> list[dict[str, Times]]:
    workers = min(16, max(2, os.cpu_count() or 1))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        compiled = [
            {
                (phase, fused): pool.submit(_compiled, region, phase, fused, program, x64)
                for phase, fused in itertools.product(PHASES, (False, True))
            }
            for region in regions
        ]
        programs = [{f: future.result() for f, future in forms.items()} for forms in compiled]
    # Not before all are compiled: XLA tries variants of kernels on the device.
    with _settings(x64):
        return [_timed(region, runs) for region, runs in zip(regions, programs, strict=True)]


@contextlib.contextmanager
def _settings(x64: bool):
    with (
        own_code(),
        jax.enable_x64(x64),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):
        yield


# ---- programs ------------------------------------------------------------------------------------


def _compiled(region: Region, phase: str, fused: bool, program, x64: bool) -> Any:
    """The compiled program of one form, or the exception that says why there is none."""
    function = _in_memory(region, region.function(program if fused else None))
    try:
        with _settings(x64):
            if phase == "step":
                function = _step(region, function, fused)
            copies, turns = _counts(region, phase)
            lists = [_types(region, phase)] * copies
            return jax.jit(_repeated(_chained(function), turns)).lower(lists).compile()
    except Exception as error:  # whatever does not compile is not chosen
        return error


def _counts(region: Region, phase: str) -> tuple[int, int]:
    """How many copies of a region a program has, and how often it runs them."""
    size, platform = max(1, traffic(region, False, phase == "step")), lowering_platform()
    copies = max(1, min(_COPIES, _MOVED.get(platform, 0) // size))
    return copies, max(1, min(_TURNS, _REPEATED.get(platform, 0) // (copies * size)))


def _order(value: Value) -> tuple[int, ...]:
    is_moved = lowering_platform() == "cuda"
    return order_in_memory(value) if is_moved else tuple(range(len(value.shape)))


def _in_memory(region: Region, function: Callable) -> Callable:
    """The function of arrays whose dimensions are in the order that the program's memory has.

    A kernel for another order costs two transpositions, and an XLA fusion none.
    """

    def run(*args):
        orders = [tuple(np.argsort(_order(v)).tolist()) for v in region.inputs]
        results = function(*map(lax.transpose, args, orders))
        return list(map(lax.transpose, results, map(_order, region.outputs)))

    return run


def _repeated(run: Callable, turns: int) -> Callable:
    """The results of the last of several turns, each after the one before."""
    if turns == 1:
        return run

    def repeat(lists):
        def turn(_, carry):
            lists, _ = lax.optimization_barrier(carry)
            return lists, run(lists)

        results = jax.tree.map(lambda t: lax.full_like(t, 0), jax.eval_shape(run, lists))
        return lax.fori_loop(0, turns, turn, (lists, results))[1]

    return repeat


def _chained(function: Callable) -> Callable:
    """The function for several lists of arguments, each after the one before.

    The lists have arrays of their own. XLA would compute equal copies only once.
    """

    def run(lists):
        results: list[Any] = []
        for arguments in lists:
            if results:
                arguments, results[-1] = lax.optimization_barrier((arguments, results[-1]))
            results.append(function(*arguments))
        return results

    return run


def _step(region: Region, function: Callable, fused: bool) -> Callable:
    """Results and gradients as a function of inputs and cotangents.

    The backward runs after the forward, from what a step keeps: inputs, results of reductions and
    of walls, what walls read, and what kernels keep. XLA computes all else again where it needs it.
    A call that stands for products keeps what it keeps: a policy would split its loops, whose
    parts exchange an array for each iteration.
    """
    chosen = _cotangents(region)

    def keeps(primitive, *_, **params) -> bool:
        name = primitive.name
        if name == "name":
            return params["name"] == KEPT
        return name in REDUCTIONS or name not in LOCAL

    if not (fused and any(map(has_products, region.inner))):
        function = jax.checkpoint(function, policy=keeps)

    def run(*args):
        inputs, cotangents = args[: len(region.inputs)], args[len(region.inputs) :]
        moving = selected(inputs, region.differentiable)

        def of(*moving):
            results = function(*placed(moving, region.differentiable, inputs))
            return [results[i] for i in chosen], results

        _, pullback, results = jax.vjp(of, *moving, has_aux=True)
        results, cotangents = lax.optimization_barrier((results, list(cotangents)))
        return results, pullback(cotangents)

    return run


def _cotangents(region: Region) -> list[int]:
    """The outputs that have a gradient."""
    return [i for i, v in enumerate(region.outputs) if v.is_floating]


def _types(region: Region, phase: str) -> list[jax.ShapeDtypeStruct]:
    values = list(region.inputs)
    if phase == "step":
        if not any(region.differentiable) or not _cotangents(region):
            raise ValueError("the region has no gradient")
        values += [region.outputs[i] for i in _cotangents(region)]
    return [jax.ShapeDtypeStruct([v.shape[i] for i in _order(v)], v.dtype) for v in values]


# ---- inputs --------------------------------------------------------------------------------------


def _inputs(region: Region, phase: str, rng: np.random.Generator) -> list[jax.Array]:
    largest = max((v.shape for v in region.inputs if v.is_floating), key=math.prod, default=())
    values = _types(region, phase)
    return [_random(t.shape, t.dtype, largest, rng) for t in values]


def _random(shape, dtype, largest: Sequence[int], rng: np.random.Generator) -> jax.Array:
    """An array of numbers as programs have them.

    Masks begin with True, as for padding. Integers are lengths, positions, or labels: at least half
    of the largest dimension that they do not have.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        kinds = []

        def data(key):
            kinds.append(jax.random.key_impl(key))
            return jax.random.key_data(key)

        words = jax.eval_shape(data, jax.ShapeDtypeStruct(shape, dtype))
        return jax.random.wrap_key_data(_random(words.shape, words.dtype, (), rng), impl=kinds[0])
    size = math.prod(shape)
    count = min(size, 65_521)
    if jnp.issubdtype(dtype, jnp.bool_):
        row = shape[-1] if shape else 1
        return jnp.asarray(np.resize(np.arange(row) < max(1, row * 3 // 4), shape))
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        block = rng.integers(0, jnp.iinfo(dtype).max, count, np.uint64, endpoint=True)
    elif jnp.issubdtype(dtype, jnp.integer):
        others = list(largest)
        for n in shape:
            if n in others:
                others.remove(n)
        top = min(max(others, default=2), jnp.iinfo(dtype).max)
        block = rng.integers(top // 2, max(top, 1), count)
    else:
        block = rng.standard_normal(count)
    return jnp.asarray(np.resize(block.astype(dtype), shape))


# ---- timing --------------------------------------------------------------------------------------


def _timed(region: Region, runs: dict[tuple[str, bool], Any]) -> dict[str, Times]:
    rng = np.random.default_rng(0)
    found = {}
    for phase in PHASES:
        both = [runs[phase, fused] for fused in (False, True)]
        if any(isinstance(run, Exception) for run in both):
            continue
        try:
            copies, turns = _counts(region, phase)
            inputs = [_inputs(region, phase, rng) for _ in range(copies)]
            seconds = seconds_of([functools.partial(run, inputs) for run in both])
            seconds = [s / (copies * turns) for s in seconds]
            found[phase] = Times(*seconds, *map(_temporary_bytes, both))
        except Exception:  # it does not fit into memory
            continue
        finally:
            inputs = []
    return found


def _temporary_bytes(compiled: Any) -> int:
    """The memory that a program takes in addition to its arguments and results, if it is known.

    The copies of a region run one after the other, so they share it.
    """
    return getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)


def seconds_of(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """The median time of each function, in turn and in random order."""
    first = []
    for function in functions:
        jax.block_until_ready(function())
        first.append(_batch(function, 1))
    count = max(1, min(50, int(_BATCH / max(min(first), 1e-6))))
    rounds = max(5, min(9, int(_BUDGET / (count * max(first)))))
    times: list[list[float]] = [[] for _ in functions]
    order = list(range(len(functions)))
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for i in order:
            times[i].append(_batch(functions[i], count))
    return [statistics.median(t) for t in times]


def _batch(function: Callable[[], Any], count: int) -> float:
    """Seconds of a run, of so many that wait for the device only once."""
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count
