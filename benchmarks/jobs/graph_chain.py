"""Are the kernels replayed from a CUDA graph?

Measures a chain of 50 small ReLU layers, forward and backward, in one jitted program, with XLA's
command buffers (CUDA graphs) and without. Each variant runs in a separate process, because XLA
reads its flags once. XLA's dump shows which custom calls were captured: a call inside a command
buffer is replayed with the graph, and a call outside is launched from the host every time.
"""

import json
import os
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import environment
from benchmarks.cases import fo
from benchmarks.processes import process, steady
from benchmarks.report import write

LAYERS, SHAPE = 50, (256, 1024)
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
VARIANTS = {
    "native, graphs": ("native", ""),
    "native, no graphs": ("native", NO_GRAPHS),
    "jax.nn, graphs": ("xla", ""),
    "jax.nn, no graphs": ("xla", NO_GRAPHS),
}


def options(add) -> None:
    add("--repeats", type=int, default=50, metavar="N", help="timed calls")
    add("--one", choices=("native", "xla"), help="measure this implementation, in this process")


def run(options) -> None:
    """Print a line for each variant: µs per call, and where its custom calls are launched."""
    if options.one:
        print(json.dumps(measure(options.one, options.repeats)))
        return
    results = {}
    print(f"{LAYERS} layers of {SHAPE}, forward and backward")
    print(f"{'':<20}{'µs':>9}{'custom calls':>14}{'captured':>10}{'graphs':>8}")
    for name, (implementation, flags) in VARIANTS.items():
        found = results[name] = variant(implementation, flags, options.repeats)
        counts = found["custom_calls"], found["captured_custom_calls"], found["command_buffers"]
        columns = "".join(f"{c:>{w}}" for c, w in zip(counts, (14, 10, 8), strict=True))
        print(f"{name:<20}{found['median_us']:>9.1f}{columns}", flush=True)
    path = options.out / f"graph-chain-{found['slug']}.json"
    write(path, results)
    print(f"wrote {path}")


def variant(implementation: str, flags: str, repeats: int) -> dict:
    """Measure one variant in a separate process: times in µs, and counts of custom calls."""
    arguments = ["-m", "benchmarks", "graph_chain", "--one", implementation]
    with tempfile.TemporaryDirectory() as dump:
        given = os.environ.get("XLA_FLAGS", "")
        flags = f"{given} {flags} --xla_dump_to={dump} --xla_dump_hlo_as_text"
        found = process([*arguments, "--repeats", str(repeats)], XLA_FLAGS=flags)
        if "error" in found:
            raise SystemExit(found["error"])
        return found | captured(Path(dump))


def measure(implementation: str, repeats: int) -> dict:
    """Host time of a blocking call of the chain, in µs."""

    def loss(x, scales, cotangent):
        for index in range(LAYERS):
            x = fo.relu(x * scales[index])
        return jnp.vdot(x, cotangent)

    x, cotangent = (jax.random.normal(jax.random.key(i), SHAPE) for i in range(2))
    scales = jnp.linspace(0.9, 1.1, LAYERS)
    with fo.use_implementation(implementation):
        chain = jax.jit(jax.grad(loss)).lower(x, scales, cotangent).compile()
    result: list = []

    def call():
        result[:] = [chain(x, scales, cotangent)]

    times = steady(call, lambda: jax.block_until_ready(result), 1, repeats)
    found = {"hardware": environment.hardware()}
    return {
        "device": found["hardware"]["device"],
        "slug": environment.slug(found),
        "jax": jax.__version__,
        "implementation": implementation,
        "median_us": round(times["ms"] * 1e3, 1),
        "min_us": round(min(times["all_ms"]) * 1e3, 1),
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
    found = _counts()
    depth = None  # indentation of the command buffer that holds the line before
    for indent, kind in re.findall(r"^(\s*)\d+: (k\w+)", text, re.MULTILINE):
        if depth is not None and len(indent) <= depth:
            depth = None
        if kind == "kCommandBuffer":
            found["command_buffers"] += 1
            depth = len(indent) if depth is None else depth
        elif kind == "kCustomCall":
            found["custom_calls"] += 1
            found["captured_custom_calls"] += depth is not None
    return found


def count_hlo(text: str) -> dict:
    """The counts in an HLO module, whose command buffers are computations of that name."""
    found, inside = _counts(), False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside = line.lstrip("%").startswith("command_buffer")
            found["command_buffers"] += inside
        elif " custom-call(" in line:
            found["custom_calls"] += 1
            found["captured_custom_calls"] += inside
    return found


def _counts() -> dict[str, int]:
    return dict.fromkeys(("custom_calls", "captured_custom_calls", "command_buffers"), 0)


def _longest(folder: Path, pattern: str) -> str:
    """The text of the longest file, since the chain is the largest program of the process."""
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else ""
