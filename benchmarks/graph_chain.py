"""Are the kernels replayed from a CUDA graph? ``python -m benchmarks.graph_chain``

Measures a chain of 50 small ReLU layers, forward and backward, in one jitted program, with XLA's
command buffers (CUDA graphs) and without. Each variant runs in a separate process, because XLA
reads its flags once. XLA's dump shows which custom calls were captured: a call inside a command
buffer is replayed with the graph, and a call outside is launched from the host every time.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.report import write

LAYERS, SHAPE = 50, (256, 1024)
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
VARIANTS = {
    "native, graphs": ("native", ""),
    "native, no graphs": ("native", NO_GRAPHS),
    "jax.nn, graphs": ("xla", ""),
    "jax.nn, no graphs": ("xla", NO_GRAPHS),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_chain", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="timed calls")
    parser.add_argument("--implementation", choices=("native", "xla"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.implementation:
        print(json.dumps(measure(options.implementation, options.repeats)))
        return
    results = {name: variant(*of, options.repeats) for name, of in VARIANTS.items()}
    show(results)
    first = next(iter(results.values()))
    path = options.out / f"graph-chain-{first['slug']}.json"
    write(path, results)
    print(f"wrote {path}")


def show(results: dict) -> None:
    """Print a line for each variant: µs per call, and where its custom calls are launched."""
    first = next(iter(results.values()))
    print(
        f"{LAYERS} layers of {SHAPE}, forward and backward, {first['device']}, jax {first['jax']}"
    )
    print(f"{'':<20}{'µs':>9}{'custom calls':>14}{'captured':>10}{'graphs':>8}")
    for name, found in results.items():
        counts = (found["custom_calls"], found["captured_custom_calls"], found["command_buffers"])
        columns = "".join(f"{c:>{w}}" for c, w in zip(counts, (14, 10, 8), strict=True))
        print(f"{name:<20}{found['median_us']:>9.1f}{columns}")


def variant(implementation: str, flags: str, repeats: int) -> dict:
    """Measure one variant in a separate process: times in µs, and counts of custom calls."""
    command = [sys.executable, "-m", "benchmarks.graph_chain", f"--implementation={implementation}"]
    with tempfile.TemporaryDirectory() as dump:
        given = os.environ.get("XLA_FLAGS", "")
        xla_flags = f"{given} {flags} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        environment = {**os.environ, "XLA_FLAGS": xla_flags, "PYTHONPATH": _path()}
        done = subprocess.run(
            [*command, f"--repeats={repeats}"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1]) | captured(Path(dump))


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def measure(implementation: str, repeats: int) -> dict:
    """Host time of a blocking call of the chain, in µs."""
    import jax
    import jax.numpy as jnp

    from benchmarks import environment
    from benchmarks.cases import fo

    def loss(x, scales, cotangent):
        for index in range(LAYERS):
            x = fo.relu(x * scales[index])
        return jnp.vdot(x, cotangent)

    x, cotangent = (jax.random.normal(jax.random.key(i), SHAPE) for i in range(2))
    scales = jnp.linspace(0.9, 1.1, LAYERS)
    with fo.use_implementation(implementation):
        chain = jax.jit(jax.grad(loss)).lower(x, scales, cotangent).compile()
    times = []
    for index in range(repeats + 5):  # the first calls record the graph
        start = time.perf_counter()
        jax.block_until_ready(chain(x, scales, cotangent))
        if index >= 5:
            times.append((time.perf_counter() - start) * 1e6)
    found = {"hardware": environment.hardware()}
    return {
        "device": found["hardware"]["device"],
        "slug": environment.slug(found),
        "jax": jax.__version__,
        "implementation": implementation,
        "median_us": round(statistics.median(times), 1),
        "min_us": round(min(times), 1),
    }


def captured(dump: Path) -> dict:
    """Count custom calls, those inside command buffers, and command buffers, in XLA's dump.

    Newer versions of XLA form command buffers from thunks and list those. Older ones form them in
    the HLO module.
    """
    thunks = _longest(dump, "*loss*thunk_sequence_after_thunk_passes*.txt")
    thunks = thunks or _longest(dump, "*loss*thunk_sequence*.txt")
    hlo = _longest(dump, "*loss*after_optimizations.txt")
    in_hlo = count_hlo(hlo)
    if not in_hlo["command_buffers"] and "kCommandBuffer" in thunks:
        return count_thunks(thunks)
    return in_hlo


def count_thunks(text: str) -> dict:
    """The counts in a list of thunks: lines of "<index>: <kind> ...", indented where nested."""
    total = inside = buffers = 0
    depth = None  # indentation of the command buffer that holds the line before
    for line in text.splitlines():
        found = re.match(r"(\s*)\d+: (k\w+)", line)
        if not found:
            continue
        indent, kind = len(found[1]), found[2]
        if depth is not None and indent <= depth:
            depth = None
        if kind == "kCommandBuffer":
            buffers += 1
            depth = indent if depth is None else depth
        elif kind == "kCustomCall":
            total += 1
            inside += depth is not None
    return _counts(total, inside, buffers)


def count_hlo(text: str) -> dict:
    """The counts in an HLO module, whose command buffers are computations of that name."""
    total = inside = buffers = 0
    in_buffer = False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            in_buffer = line.lstrip("%").startswith("command_buffer")
            buffers += in_buffer
        elif " custom-call(" in line:
            total += 1
            inside += in_buffer
    return _counts(total, inside, buffers)


def _counts(total: int, inside: int, buffers: int) -> dict:
    return {
        "custom_calls": total,
        "captured_custom_calls": inside,
        "command_buffers": buffers,
    }


def _longest(folder: Path, pattern: str) -> str:
    """The text of the longest file, since the chain is the largest program of the process."""
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else ""


if __name__ == "__main__":
    main()
