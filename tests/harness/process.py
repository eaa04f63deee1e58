"""Python code in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run(code, **env):
    """Run Python code in a fresh process on the CPU, in a folder that shadows nothing."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        timeout=300,
    )
