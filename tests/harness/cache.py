"""The persistent compilation cache: a second process compiles nothing and gets the same bits.

The two processes run this file as a script; it loads the test file that declares the cases.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def run(file: str, cases: Sequence, mode: str | None) -> None:
    """Runs cases, which are global variables of a test file, in two processes with one cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [
            sys.executable,
            "-m",
            "harness.cache",
            file,
            mode or "",
            *(case.name for case in cases),
        ]
        first, second = (
            json.loads(
                subprocess.run(
                    command,
                    cwd=TESTS,
                    env=environment,
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )
    for case in cases:
        one, two = first[case.name], second[case.name]
        assert one["misses"] > 0 and one["hits"] == 0, f"{case.name}: the first process found {one}"
        assert two["misses"] == 0 and two["hits"] == one["misses"], (
            f"{case.name}: the second process found {two}"
        )
        assert one["digest"] == two["digest"], (
            f"{case.name}: the results differ between the processes"
        )


def child(file: str, mode: str | None, names: Sequence[str]) -> dict[str, dict]:
    """Compiles and runs each case once, and reports hits and misses of the cache."""
    import conftest  # noqa: F401  (prepares the process as for pytest)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from harness.case import Case, implementation
    from harness.export import draw, program

    module_spec = importlib.util.spec_from_file_location("declares_the_cases", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    cases = {value.name: value for value in vars(module).values() if isinstance(value, Case)}

    counts = {"hits": 0, "misses": 0}

    def listen(event, **_):
        for kind in counts:
            counts[kind] += event == f"/jax/compilation_cache/cache_{kind}"

    jax.monitoring.register_event_listener(listen)
    found = {}
    for name in names:
        args, cotangents = draw(cases[name], jnp.dtype(cases[name].dtypes[0]), "cache")
        counts.update(hits=0, misses=0)
        with implementation(mode):
            results = jax.jit(program(cases[name].fn, cases[name], len(args)))(*args, *cotangents)
        digest = hashlib.sha256(
            b"".join(np.asarray(r).tobytes() for r in jax.tree.leaves(results))
        ).hexdigest()
        found[name] = {**counts, "digest": digest}
    return found


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], sys.argv[2] or None, sys.argv[3:])))
