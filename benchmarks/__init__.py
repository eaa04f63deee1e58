"""Benchmarks of jax_fastops against jax.nn: ``python -m benchmarks`` from the checkout's root."""

import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def installed(name: str):
    """Import ``jax_fastops`` or a module of it."""
    return importlib.import_module(name)
