"""The persistent compilation cache: a second process compiles nothing and gets the same bits.

Both processes run this file, which imports all test files that declare cases.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


@pytest.mark.jax
@pytest.mark.transform
def test_a_second_process_compiles_nothing(tmp_path):
    first, second = found_by_process(tmp_path), found_by_process(tmp_path)
    assert first.keys() == second.keys()
    assert sum(one["misses"] for one in first.values()) > 50  # a few cases have the same program
    for name, one in first.items():
        two, programs = second[name], one["misses"] + one["hits"]
        assert programs > 0 and two == one | {"misses": 0, "hits": programs}, (
            f"{name}: the first process found {one}, the second one {two}"
        )


def found_by_process(folder: Path) -> dict[str, dict]:
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "test_cache"]
    process = subprocess.run(
        command, cwd=TESTS, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def child() -> dict[str, dict]:
    """Compiles and runs each case once, and reports hits and misses of the cache."""
    import conftest  # noqa: F401  (prepares the process as for pytest)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from harness.case import DECLARED, implementation
    from harness.export import draw, program

    counts = {"hits": 0, "misses": 0}

    def listen(event, **_):
        for kind in counts:
            counts[kind] += event == f"/jax/compilation_cache/cache_{kind}"

    jax.monitoring.register_event_listener(listen)
    found = {}
    for file in sorted(TESTS.glob("test_*.py")):
        if "\n@checks(" not in file.read_text():
            continue
        DECLARED.clear()
        importlib.import_module(file.stem)
        for case in DECLARED:
            args, cotangents = draw(case, jnp.dtype(case.dtypes[0]), "cache")
            counts.update(hits=0, misses=0)
            with implementation(case.modes[0]):
                results = jax.jit(program(case.fn, case, len(args)))(*args, *cotangents)
            digest = hashlib.sha256(
                b"".join(np.asarray(r).tobytes() for r in jax.tree.leaves(results))
            ).hexdigest()
            name = f"{file.stem} {case.name}"
            assert name not in found, f"{name} is declared twice"
            found[name] = {**counts, "digest": digest}
    return found


if __name__ == "__main__":
    print(json.dumps(child()))
