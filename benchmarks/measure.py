"""Timing. In each round every program runs once, from a cold cache. The median is the result.

There are three clocks, all in seconds per call:

``profiler``  the time of a call's kernels on the GPU, from JAX's profiler. It excludes host time
              between launches, so short kernels are measured as well as long ones.
``chain``     for a GPU that cannot be profiled: many calls in one program with barriers between.
``wall``      host time of a blocking call, for a CPU. Programs that move less than 1 MiB are timed
              over ten warm calls, because their cost is that of the call.
"""

import random
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import profile
from benchmarks.programs import Program

# A timed program is a `programs.Program`, or a `pytorch.Program`, which has the same members and
# whose calls wait for their results.

MIB = 2**20
FLUSH = "flush_cache"
# Bytes. In a real program the op before would have left so few in the core's private cache.
SMALL = MIB


@dataclass(frozen=True)
class Timing:
    """Times of one program, in seconds per call, and how many kernels a call launches."""

    samples: tuple[float, ...]
    launches: int
    clock: str

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def fastest(self) -> float:
        return min(self.samples)

    @property
    def spread(self) -> float:
        """Width of the middle half of the samples."""
        if len(self.samples) < 4:
            return max(self.samples) - min(self.samples)
        low, _, high = statistics.quantiles(self.samples, n=4)
        return high - low

    def as_dict(self) -> dict:
        seconds = {"median": self.median, "min": self.fastest, "spread": self.spread}
        found = {f"{name}_us": value * 1e6 for name, value in seconds.items()}
        return found | {
            "samples": len(self.samples),
            "launches": self.launches,
            "clock": self.clock,
        }


Clock = Callable[[Sequence[Program], int], list[Timing]]


def options(add: Callable, rounds: int | None, help: str = "rounds") -> None:
    """The options of jobs that time programs in turns."""
    add("--repeats", type=int, default=rounds, metavar="N", help=help)
    add("--clock", choices=("auto", "profiler", "chain", "wall"), default="auto")


def clock(name: str = "auto") -> tuple[str, Clock]:
    """The name of a clock and the clock; "auto" is the profiler if it can see a GPU."""
    on_gpu = jax.devices()[0].platform == "gpu"
    if name == "auto" and on_gpu:
        name = "profiler" if _profiler_works() else "chain"
    name = "wall" if name == "auto" else name
    return name, {"wall": wall, "chain": chain, "profiler": profiled}[name]


def wall(programs: Sequence[Program], rounds: int) -> list[Timing]:
    """Measure the host time of blocking calls."""
    for program in programs:
        jax.block_until_ready(program())
    samples: list[list[float]] = [[] for _ in programs]
    for index in _turns(len(programs), rounds):
        samples[index].append(_wall_sample(programs[index]))
    return [
        Timing(tuple(times), launches(program), "wall")
        for program, times in zip(programs, samples, strict=True)
    ]


def _wall_sample(program: Program) -> float:
    """Seconds of a call with cold caches, or the mean of ten warm calls of a small program."""
    small = program.nbytes < SMALL
    jax.block_until_ready(program() if small else flush())
    calls = 10 if small else 1
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(program())
    return (time.perf_counter() - start) / calls


def profiled(programs: Sequence[Program], rounds: int) -> list[Timing]:
    """Measure the time of the kernels between one flush of the cache and the next."""
    turns = _turns(len(programs), rounds)
    calls = profiled_calls(programs, turns)
    if len(calls) == len(turns):
        return _by_program(calls, turns, len(programs))
    warnings.warn(
        f"the profile shows {len(calls)} of {len(turns)} calls; timing chains instead", stacklevel=2
    )
    return chain(programs, rounds)


def profiled_calls(programs: Sequence[Program], turns: Sequence[int]) -> list[list[profile.Kernel]]:
    """The kernels of each call, in the order of the turns. A profile may lose some."""
    for program in [*programs, flush]:
        jax.block_until_ready(program())
    mixed = not all(isinstance(program, Program) for program in programs)

    def work():
        for index in turns:
            flushed = flush()
            if mixed:  # PyTorch's streams do not wait for JAX's; treat all programs alike
                jax.block_until_ready(flushed)
            last = programs[index]()
        jax.block_until_ready(last)

    for _ in range(2):  # the first profile may lose events while its buffers are allocated
        calls = between_flushes(profile.kernels(work))
        if len(calls) == len(turns):
            break
    return calls


def between_flushes(kernels: Sequence[profile.Kernel]) -> list[list[profile.Kernel]]:
    """Group kernels by call. Every call comes after a flush, which is named in its labels."""
    calls: list[list[profile.Kernel]] = []
    flushing = False
    for kernel in kernels:
        if FLUSH in kernel.labels:
            flushing = True
            continue
        if flushing:
            calls.append([])
            flushing = False
        if calls:
            calls[-1].append(kernel)
    return calls


def _by_program(calls, turns: Sequence[int], count: int) -> list[Timing]:
    grouped: list[list] = [[] for _ in range(count)]
    for index, call in zip(turns, calls, strict=True):
        grouped[index].append(call)
    found = []
    for mine in grouped:
        launches = round(statistics.median(map(len, mine)))
        found.append(Timing(tuple(busy(call) * 1e-9 for call in mine), launches, "profiler"))
    return found


def busy(call) -> float:
    """Nanoseconds in which at least one kernel of a call runs; kernels may overlap."""
    total, until = 0.0, 0.0
    for kernel in sorted(call, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        total += max(end - max(kernel.start, until), 0)
        until = max(until, end)
    return total


def chain(programs: Sequence[Program], rounds: int, length: int = 16) -> list[Timing]:
    """Measure the host time of programs of ``length`` calls each, divided by ``length``.

    The cache is not flushed between the calls of a chain, so it is warm for small cases.
    """
    chains, lengths = [], []
    for program in programs:
        size = sum(a.nbytes for a in program.outputs) or 1
        lengths.append(max(1, min(length, 4096 * MIB // size)))
        chains.append(program.repeated(lengths[-1]))
    timings = wall(chains, rounds)
    return [
        Timing(tuple(t / n for t in timing.samples), launches(program), "chain")
        for timing, n, program in zip(timings, lengths, programs, strict=True)
    ]


def _turns(count: int, rounds: int) -> list[int]:
    """Indices of the programs in the order of their calls: a random order in each round.

    A program pays for what the one before it left in the caches, so the order must vary.
    """
    shuffle = random.Random(0).sample
    return [index for _ in range(rounds) for index in shuffle(range(count), count)]


def flush():
    """Read a buffer larger than the last-level cache, which evicts everything else."""
    program, buffer = _flusher()
    return program(buffer)


@cache
def _flusher():
    def program(buffer):
        return jnp.max(buffer)

    program.__name__ = FLUSH
    buffer = jnp.ones(flush_bytes() // 4, jnp.float32)
    return jax.jit(program).lower(buffer).compile(), buffer


def flush_bytes() -> int:
    """Twice the last-level cache of the CPU; on a GPU, twice the largest L2 of today's GPUs."""
    if jax.devices()[0].platform == "gpu":
        return 256 * MIB
    return min(max(2 * last_level_cache(), 64 * MIB), 512 * MIB)


def last_level_cache() -> int:
    """Bytes of the last-level cache of the first CPU (32 MiB if the system does not tell)."""
    sizes = [
        p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")
    ]
    units = {"K": 2**10, "M": MIB}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units), default=32 * MIB)


def _profiler_works() -> bool:
    jax.block_until_ready(flush())
    return bool(profile.kernels(lambda: jax.block_until_ready(flush())))


def copy_program() -> Program:
    """The streaming copy of the floor: reads, changes and writes every element once."""
    size = 512 * MIB if jax.devices()[0].platform == "gpu" else 2 * flush_bytes()
    return Program("copy", lambda x: [x + 1], [jnp.ones(size // 4, jnp.float32)])


FREE = set("parameter constant tuple get-tuple-element bitcast opt-barrier after-all".split())


def launches(program: Program) -> int:
    """The number of kernels, library calls and copies in a compiled module; 0 for PyTorch."""
    return len(operations(program)) if isinstance(program, Program) else 0


def operations(program: Program) -> list[str]:
    """Opcodes in the entry computation of a module that do work, with what they call."""
    hlo = program.compiled.as_text()
    entry = hlo[hlo.index("\nENTRY ") :].split("\n}")[0]
    found = []
    for line in entry.splitlines()[2:]:
        code = opcode(line)
        if code and code not in FREE:
            target = re.search(r'custom_call_target="([^"]+)"', line)
            name = line.split(" = ")[0].split("%")[-1].strip()
            found.append(f"{code} {target[1] if target else name}")
    return found


def opcode(line: str) -> str | None:
    """The opcode of an instruction in a line of HLO text, or None."""
    found = re.search(r" = .*? ([a-z][\w-]*)\(", line)
    return found and found[1]


TIMES = ("median_us", "spread_us", "min_us", "wall_us")


def figures(program: Program, timing: Timing, wall: float) -> dict:
    """The numbers of a program, with the seconds of a call by the wall clock."""
    found = timing.as_dict() | {"wall_us": wall * 1e6, "temp_mib": program.temp_bytes / MIB}
    return found | {"kernels": program.kernels}


def show_figures(contenders: dict[str, dict]) -> None:
    """Prints a line for each contender, and what ``ours`` gains over ``plain``."""
    columns = ("ms", "spread", "fastest", "wall", "temporary MiB", "launches")
    print(f"{'':<8}" + "".join(f"{column:>14}" for column in columns))
    for name, found in contenders.items():
        times = [found[key] / 1e3 for key in TIMES]
        numbers = "".join(f"{n:>14.3f}" for n in (*times, found["temp_mib"]))
        called = ", ".join(f"{n} {kernel}" for kernel, n in found["kernels"].items()) or "none"
        print(f"{name:<8}{numbers}{found['launches']:>14}   {called}")
    if contenders.keys() >= {"ours", "plain"}:
        ours, plain = contenders["ours"], contenders["plain"]
        speed, memory = (plain[k] / max(ours[k], 1e-9) for k in ("median_us", "temp_mib"))
        print(f"ours is {speed:.3f} times as fast as plain, with 1/{memory:.3f} of its memory")
