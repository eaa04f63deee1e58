"""Runs Python code in a new process."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run(code, **env):
    """Runs Python code in a new process on the CPU, in a folder that shadows no module."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        timeout=300,
    )
