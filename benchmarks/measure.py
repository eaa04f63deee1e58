"""Timing. Programs take turns, round by round, each from a cold cache; the median counts.

Three clocks, all in seconds per call:

``profiler``  the time of a call's kernels on the GPU, from JAX's profiler. Host time between
              launches is not in it, so short kernels are measured as well as long ones.
``chain``     for a GPU that cannot be profiled: many calls in one program, barriers between.
``wall``      host time of a blocking call: what a CPU is measured with. Programs that move less
              than 1 MiB are timed over ten warm calls: what they cost is the call itself.
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

# What is timed is a `programs.Program`, or a `pytorch.Program` with the same members, whose calls
# wait for their results.

MIB = 2**20
FLUSH = "flush_cache"
SMALL = MIB  # bytes; what a core's own cache holds, and the op before would have left there


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
        return {
            "median_us": self.median * 1e6,
            "min_us": self.fastest * 1e6,
            "spread_us": self.spread * 1e6,
            "samples": len(self.samples),
            "launches": self.launches,
            "clock": self.clock,
        }


Clock = Callable[[Sequence[Program], int], list[Timing]]


def clock(name: str = "auto") -> tuple[str, Clock]:
    """The clock of this name; "auto" takes the profiler where it sees a GPU."""
    on_gpu = jax.devices()[0].platform == "gpu"
    if name == "auto" and on_gpu:
        name = "profiler" if _profiler_works() else "chain"
    name = "wall" if name == "auto" else name
    return name, {"wall": wall, "chain": chain, "profiler": profiled}[name]


def wall(programs: Sequence[Program], rounds: int) -> list[Timing]:
    """Host time of blocking calls."""
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
    """Time of the kernels between one flush of the cache and the next."""
    for program in [*programs, flush]:
        jax.block_until_ready(program())
    turns = _turns(len(programs), rounds)
    mixed = not all(isinstance(program, Program) for program in programs)

    def work():
        for index in turns:
            flushed = flush()
            if mixed:  # another framework's streams do not wait for JAX's; treat all alike
                jax.block_until_ready(flushed)
            last = programs[index]()
        jax.block_until_ready(last)

    for _ in range(2):  # a profile may lose events, when its buffers are first made
        calls = between_flushes(profile.kernels(work))
        if len(calls) == len(turns):
            return _by_program(calls, turns, len(programs))
    warnings.warn(
        f"the profile shows {len(calls)} of {len(turns)} calls; timing chains instead", stacklevel=2
    )
    return chain(programs, rounds)


def between_flushes(kernels: Sequence[profile.Kernel]) -> list[list[profile.Kernel]]:
    """Group kernels by call: every call comes after a flush, whose name its labels hold."""
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
    return [
        Timing(
            tuple(busy(call) * 1e-9 for call in mine),
            round(statistics.median(len(call) for call in mine)),
            "profiler",
        )
        for mine in grouped
    ]


def busy(call) -> float:
    """Nanoseconds in which any kernel of a call runs: one may begin while another ends."""
    total, until = 0.0, 0.0
    for kernel in sorted(call, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        total += max(end - max(kernel.start, until), 0)
        until = max(until, end)
    return total


def chain(programs: Sequence[Program], rounds: int, length: int = 16) -> list[Timing]:
    """Host time of programs that make ``length`` calls each, divided by it.

    The cache is not flushed between the calls of one chain, so small cases find it warm.
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
    """Whose turn it is: every program once a round, in an order drawn anew each round.

    A program pays for what the one before it left in the caches, so no two may always meet.
    """
    shuffle = random.Random(0).sample
    return [index for _ in range(rounds) for index in shuffle(range(count), count)]


def flush():
    """Read a buffer larger than the last-level cache, leaving nothing else in it."""
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
    """Twice the CPU's last-level cache; on a GPU, twice what the largest has today."""
    if jax.devices()[0].platform == "gpu":
        return 256 * MIB
    return min(max(2 * last_level_cache(), 64 * MIB), 512 * MIB)


def last_level_cache() -> int:
    """Bytes of the first CPU's last cache level (32 MiB where the system does not say)."""
    sizes = [
        p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")
    ]
    units = {"K": 2**10, "M": MIB}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units), default=32 * MIB)


def _profiler_works() -> bool:
    jax.block_until_ready(flush())
    return bool(profile.kernels(lambda: jax.block_until_ready(flush())))


def copy_program() -> Program:
    """The floor's streaming copy: every element read, changed and written once."""
    size = 512 * MIB if jax.devices()[0].platform == "gpu" else 2 * flush_bytes()
    return Program("copy", lambda x: [x + 1], [jnp.ones(size // 4, jnp.float32)])


FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
}


def launches(program: Program) -> int:
    """How many kernels, library calls and copies a compiled module's entry computation runs; 0 for
    a program that is not XLA's.
    """
    if not isinstance(program, Program):
        return 0
    hlo = program.compiled.as_text()
    entry = hlo[hlo.index("\nENTRY ") :].split("\n}")[0]
    return sum(code not in FREE for code in map(opcode, entry.splitlines()[2:]) if code)


def opcode(line: str) -> str | None:
    _, equals, rest = line.partition(" = ")
    if not equals:
        return None
    if rest.startswith("("):  # a tuple's type, which holds parentheses of its own
        depth, end = 0, 0
        for end, char in enumerate(rest):  # noqa: B007
            depth += (char == "(") - (char == ")")
            if not depth:
                break
        rest = rest[end + 1 :]
    else:
        rest = rest.partition(" ")[2]
    match = re.match(r"\s*([\w-]+)\(", rest)
    return match[1] if match else None
