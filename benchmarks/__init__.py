"""Benchmarks of jax_fastops against jax.nn: ``python -m benchmarks`` from the checkout's root."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def installed(name: str):
    """Import the installed package ``name``, never the source tree next to this package.

    ``python -m`` puts the checkout's root first on the path, and the source tree there has no
    compiled module.
    """
    path = sys.path[:]
    sys.path[:] = [p for p in path if Path(p or ".").resolve() != ROOT]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SystemExit(f"{name} is not installed: run `pip install .` in {ROOT} first") from None
    finally:
        sys.path[:] = path
