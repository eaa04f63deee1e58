"""Threads that run random calls of every op, and check each result: ``python tests/soak.py``.

A program has two parts. The first draws operands and calls the kernel; the second computes the
reference, in the same dtype and in float64, and the errors of both. Shapes and options are those of
`benchmarks/shapes.py`, and transformations those of the harness. The run is divided into rounds. In
a round, every thread compiles new programs, and runs its own and those of the other threads, each
time with new operands. After a round, all programs are dropped. In the last third of the time, the
programs of the last round stay and no others are compiled, because JAX and XLA keep some memory of
each program. Then memory must be flat: after the first of these rounds, the median of the second
half exceeds that of the first half by at most `GROWTH`.

A call fails if NaN or Inf are at other elements, or if its error exceeds the larger of `FACTOR`
times the reference's error and a number of epsilons: half of `ULPS` in norm, and `ULPS` in the
worst element, or in the norm of at most `SUMS` elements. A round that does not end in time prints
all stacks and ends the process.
"""

import argparse
import collections
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import math
import os
import random
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS)]
sys.path.append(str(TESTS.parent))

if __name__ == "__main__":  # before JAX starts
    GRAPHS = (
        "--xla_gpu_graph_min_graph_size=1"
        " --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
    )
    given = os.environ.get("XLA_FLAGS", "")
    cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    os.environ["XLA_FLAGS"] = given if cpu else f"{GRAPHS} {given}"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from harness import transforms  # noqa: E402
from harness.case import implementation  # noqa: E402
from harness.compat import x64  # noqa: E402
from harness.numerics import is_float  # noqa: E402

import jax_fastops as fo  # noqa: E402
from benchmarks import shapes  # noqa: E402
from benchmarks.cases import OPS, Case, Op, mask_and_key, mask_of_keys, plain_cross_entropy  # noqa: E402

# The worst of many elements may have lost bits by cancellation. In float32, the gradient of a layer
# norm (123, 3, 8) had 28 epsilons in a row of small variance (seeds from 216334868), and the
# reference has up to 18 in such rows. So `WIDE` times as many count there in 32 bits and more.
FACTOR, ULPS, WIDE = 4, 16, 4
SUMS = 8  # results of at most so many elements may be sums that cancel
GROWTH = {"device": 1 << 20, "host": 32 << 20}  # bytes
MIN_ROUND = 15.0  # seconds of a round
STUCK = 240  # seconds that a round may take beyond its time
# Most of its time are XLA's products, so it has no rows in the benchmark of ops.
LINEAR = Op(
    name="linear_cross_entropy",
    ours=fo.linear_cross_entropy,
    reference=lambda x, table, labels: plain_cross_entropy(x @ table.T, labels),
    operands="x, x, ...:int32",
    valid=lambda x, table, labels: (x, table, labels % table.shape[-2]),
    layouts=(),
)
DRAWN = [op for op in OPS if op.name != "relu_from_result"]
DRAWN.append(LINEAR)


def _linear_cross_entropy(rng, op, elements):
    """Tokens, and a table with more rows than they have elements."""
    d = shapes.length(rng, 1, max(8, math.isqrt(elements) // 4))
    tokens = shapes.rows(rng, max(1, elements // d), low=1, high=2**11)
    shape = (*tokens, d)[-rng.choice((2, 3, 3)) :]
    classes = shapes.length(rng, 1, max(8, min(2**17 // d, 2**22 // math.prod(shape[:-1]))))
    reduction = rng.choice(("sum", "mean", "none"))
    chunk = rng.choice((None, shapes.number(rng, 1, math.prod(shape[:-1]))))
    options = {"reduction": reduction, "chunk": chunk}
    return shape, options, {"operands": lambda shape: (shape, (classes, d), shape[:-1])}


shapes._linear_cross_entropy = _linear_cross_entropy
FAMILIES = sorted({op.family for op in DRAWN})
# Two roundings of a value near 0 may have different signs, and the gradient of a ReLU jumps there.
JUMPS = {"batch_norm_relu", "batch_norm_add_relu", "batch_norm_inference"}


class Program:
    """A random call: an op, its shapes, dtype, options, and a transformation."""

    def __init__(self, rng, family, largest, inputs):
        op = rng.choice([op for op in DRAWN if op.family == family])
        layout = shapes.draw(rng, op, largest)
        while op.name == "softmax_dropout" and layout.operands is not mask_of_keys:
            layout = shapes.draw(rng, op, largest)
        if op.name == "softmax_dropout":
            layout = dataclasses.replace(layout, operands=mask_and_key)
        self.case = Case(op, layout, "cpu", layout.dtypes[0])
        self.diff = self.case.differentiated if is_float(jnp.dtype(self.case.dtype)) else ()
        self.diff = () if op.name in JUMPS else self.diff
        names = ["value", "vmap", *(["vjp", "jvp", "vmap_of_vjp"] * 2 if self.diff else [])]
        self.transform = rng.choice(names)
        count = len(self.case.shapes)
        chosen = rng.sample(range(count), rng.randint(1, count))
        self.mapped = tuple((i, 0) for i in sorted(chosen)) if "vmap" in self.transform else ()
        self.batch = rng.choice((1, 2, 3, 5))
        self.name = f"{self.transform} {self.case.name} mapped {self.mapped} x {self.batch}"
        self.inputs = inputs
        self.fn = functools.partial(op.ours, **layout.options)
        self.calls, self.wide = 0, self.case.dtype == "float64"
        with x64(self.wide):
            args = [jax.ShapeDtypeStruct(s, d) for s, d in self.operands(stacked=False)]
            out = jax.eval_shape(self.fn, *args)
            self.results = [(o.shape, o.dtype) for o in jax.tree.leaves(out) if is_float(o.dtype)]

    def operands(self, stacked=True):
        kinds = list(zip(self.case.shapes, self.case.operand_dtypes, strict=True))
        mapped = dict(self.mapped) if stacked else {}
        return [((self.batch, *s) if i in mapped else s, d) for i, (s, d) in enumerate(kinds)]

    def draw(self, seed):
        lead = (self.batch,) if self.mapped else ()
        keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 20))
        args = self.case.op.valid(*(_drawn(next(keys), *kind) for kind in self.operands()))
        kinds = [(args[i].shape, args[i].dtype) for i in self.diff]
        tangents = tuple(_drawn(next(keys), *kind) for kind in kinds)
        cotangents = tuple(_drawn(next(keys), (*lead, *s), d) for s, d in self.results)
        return transforms.Inputs(args, tangents, cotangents, self.diff)

    def apply(self, inputs):
        apply = getattr(transforms, self.transform)
        return apply(self.fn, inputs, *([self.mapped] if self.mapped else []))

    @functools.cached_property
    def ours(self):
        """A compiled function from seeds to operands and the kernel's results."""

        def one(seed):
            inputs = self.draw(seed)
            return inputs, self.apply(inputs)

        return jax.jit(functools.partial(jax.lax.map, one))

    @functools.cached_property
    def judge(self):
        """From operands and results: for each result the worst of each figure of `_figures`."""

        def one(both):
            inputs, got = both
            want, exact = self.apply(inputs), self.apply(transforms.widen(inputs))
            terms = max(x.size for x in inputs.args)
            leaves = map(jax.tree.leaves, (got, want, exact))
            return jnp.stack([_figures(*each, terms) for each in zip(*leaves, strict=True)])

        return jax.jit(lambda both: jax.lax.map(one, both).max(0))

    def run(self, seed):
        """Runs the program once. Returns the worst error, in the unit of what is accepted."""
        seeds = np.arange(seed, seed + self.inputs, dtype=np.uint32)
        with x64(self.wide), implementation("native"):
            inputs, got = self.ours(seeds)
        with x64(), implementation("xla"):
            figures = np.asarray(self.judge((inputs, got)))
        self.calls += 1
        worst = 0.0
        for leaf, found in zip(jax.tree.leaves(got), figures, strict=True):
            eps = float(jnp.finfo(leaf.dtype).eps) if is_float(leaf.dtype) else 0.0
            # A parameter's gradient may be the sum of numbers of the op's narrower dtype.
            if is_float(jnp.dtype(self.case.dtype)):
                eps = max(eps, float(jnp.finfo(self.case.dtype).eps))
            special, norm, worst_one, their_norm, their_worst = found
            most = ULPS * (WIDE if eps < 1e-4 else 1)
            in_norm = ULPS / 2 if leaf.size > SUMS * self.inputs else ULPS
            pairs = (norm, their_norm, in_norm), (worst_one, their_worst, most)
            for mine, theirs, ulps in pairs:
                ulps *= 4 if self.wide else 1  # the oracle errs, too
                limit = max(FACTOR * theirs, ulps * eps)
                worst = max(worst, mine / limit if limit else math.inf * bool(mine) or 0.0)
            if special or not worst <= 1:  # also if it is NaN
                raise AssertionError(
                    f"{self.name}, seeds from {seed}: {int(special)} elements with NaN or Inf; "
                    f"error in norm {norm:.3g} (reference {their_norm:.3g}), worst {worst_one:.3g} "
                    f"({their_worst:.3g}), epsilon {eps:.3g}"
                )
        return worst


def _drawn(key, shape, dtype):
    if dtype == "bool":
        return jax.random.bernoulli(key, 0.875, shape)
    if is_float(jnp.dtype(dtype)):
        return jax.random.normal(key, shape, dtype)
    return jax.random.bits(key, shape, np.uint32).astype(dtype) >> (dtype == "int32")


def _figures(got, want, exact, terms):
    """How many elements are wrongly not finite; errors in norm and worst, ours and reference's.

    Few numbers may be sums of random terms that cancel, such as the gradients of `lerp`'s weights.
    Their error is relative to half of such a sum's standard deviation, at least.
    """
    if not is_float(want.dtype):
        return jnp.stack([jnp.float64(0), *[jnp.mean(got != want, dtype=np.float64)] * 2, 0, 0])
    got, want, exact = (x.astype(np.float64) for x in (got, want, exact))
    finite = jnp.isfinite(want)
    same = jnp.where(finite, jnp.isfinite(got), (got == want) | (jnp.isnan(got) & jnp.isnan(want)))
    exact = jnp.where(finite & jnp.isfinite(exact), exact, 0)
    least = math.sqrt(terms / exact.size) / 2 if 0 < exact.size <= SUMS else 1e-30
    norm = jnp.maximum(jnp.sqrt(jnp.mean(exact**2)), least)
    scale = jnp.maximum(jnp.abs(exact), norm)
    errors = []
    for x in (got, want):
        difference = jnp.where(finite & jnp.isfinite(x), jnp.abs(x - exact), 0)
        total = jnp.sqrt(jnp.mean(difference**2)) / norm
        errors += [total, jnp.max(difference / scale)]
    return jnp.stack([jnp.sum(~same).astype(np.float64), *errors])


class Soak:
    """All threads, and what they found."""

    def __init__(self, options):
        self.options, self.failures = options, []
        self.memory, self.rounds = [], 0  # after each round without new programs
        self.cases, self.worst = collections.Counter(), collections.defaultdict(float)
        self.programs, self.pool, self.lock = collections.Counter(), [], threading.Lock()
        self.end = time.monotonic() + options.seconds
        self.last_new, self.steady = self.end - options.seconds / 3, False
        self.length = max(MIN_ROUND, min(60.0, options.seconds / 15))
        self.barrier = threading.Barrier(options.threads, self.between)
        self.between(first=True)

    def between(self, first=False):
        """What one thread does between rounds, while the others wait."""
        if not first:
            steady, self.steady = self.steady, time.monotonic() > self.last_new
            if not self.steady:
                self.pool = []
                jax.clear_caches()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            stats = jax.local_devices()[0].memory_stats() or {}
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            row = {
                "device": stats.get("bytes_in_use", 0),
                "host": pages * os.sysconf("SC_PAGESIZE"),
            }
            self.rounds += 1
            if steady:
                self.memory.append(row)
            print(
                f"round {self.rounds}: {sum(self.cases.values())} cases of "
                f"{sum(self.programs.values())} programs, device {row['device'] >> 10} KiB, host "
                f"{row['host'] >> 20} MiB",
                flush=True,
            )
        now = time.monotonic()
        self.round_end = min(now + self.length, self.end)
        least = min(self.of_family(f) for f in FAMILIES)
        enough = self.options.cases and least >= self.options.cases
        self.over = bool(now >= self.end or self.failures or enough)
        faulthandler.dump_traceback_later(self.length + STUCK, exit=True, file=sys.__stderr__)

    def of_family(self, family, counter=None):
        counter = self.cases if counter is None else counter
        return sum(n for name, n in counter.copy().items() if FAMILY[name] == family)

    def thread(self, index):
        rng = random.Random(f"{self.options.seed} {index}")
        try:
            while not self.over:
                while time.monotonic() < self.round_end and not self.failures:
                    self.once(rng)
                self.barrier.wait()
        except threading.BrokenBarrierError:
            pass  # another thread failed
        except BaseException as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            traceback.print_exc()
            self.barrier.abort()

    def once(self, rng):
        """Runs a new program, of a family that lacks cases, in turn with the others."""
        options = self.options
        if self.steady:
            self.run_once(rng, rng.choice(list(self.pool)))
            return
        family = min(
            FAMILIES,
            key=lambda f: (
                0 < options.cases <= self.of_family(f),
                self.of_family(f, self.programs),
                rng.random(),
            ),
        )
        new = Program(rng, family, options.largest, options.inputs)
        self.programs[new.case.op.name] += 1
        self.pool.append(new)
        for turn in range(options.calls):
            self.run_once(rng, new if turn % 2 == 0 else rng.choice(list(self.pool)))
            if self.failures or time.monotonic() > self.round_end:
                break

    def run_once(self, rng, program):
        worst = program.run(rng.randrange(2**31))
        name = program.case.op.name
        with self.lock:
            self.cases[name] += self.options.inputs
            self.worst[name] = max(self.worst[name], worst)

    def grown(self):
        """Whether memory grew while no program was compiled."""
        half = (len(self.memory) - 1) // 2
        for kind, most in GROWTH.items() if half >= 2 else ():
            found = [row[kind] for row in self.memory]
            growth = statistics.median(found[-half:]) - statistics.median(found[-2 * half : -half])
            print(f"{kind} memory: {growth / 2**20:+.1f} MiB in the rounds without new programs")
            if growth > most:
                self.failures.append(f"{kind} memory grew by {growth / 2**20:.1f} MiB")

    def run(self):
        threads = [
            threading.Thread(target=self.thread, args=(i,)) for i in range(self.options.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faulthandler.cancel_dump_traceback_later()
        for name in sorted(self.cases, key=lambda n: (FAMILY[n], n)):
            print(
                f"{FAMILY[name]:14} {name:28} {self.programs[name]:6} programs "
                f"{self.cases[name]:9} cases, worst error {self.worst[name]:.2f} of the limit"
            )
        self.grown()
        for family in FAMILIES:
            if self.of_family(family) < max(1, self.options.cases):
                self.failures.append(f"{family}: only {self.of_family(family)} cases")
        for failure in self.failures:
            print(f"FAILED: {failure}")
        return int(bool(self.failures))


FAMILY = {op.name: op.family for op in DRAWN}


def parsed(arguments):
    parser = argparse.ArgumentParser(prog="python tests/soak.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--cases", type=int, default=0, help="end when each family has so many")
    parser.add_argument("--inputs", type=int, default=1, help="random inputs of a call")
    parser.add_argument("--calls", type=int, default=40, help="calls after each compilation")
    parser.add_argument("--largest", type=int, default=2**14, help="elements of an operand")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parsed(arguments)
    device = jax.devices()[0]
    print(f"seed {options.seed}, {device.device_kind} ({device.platform}), {vars(options)}")
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main())
